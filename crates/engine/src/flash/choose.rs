//! Which segment goes next, so that afterwards there is more room than before.
//!
//! To free a segment is to write: what lives in it is moved, and what it says that still holds is logged
//! again ([`crate::flash::again`]). Of a segment full of records nothing lives, and yet all of it may have to
//! be written again; a log that frees those that look cheapest can write itself over for ever and let nobody in.
//! So a segment goes only if that gives more than it takes, in one of two ways:
//!
//! - **chosen**: of the segment the cleaner likes best what it says is read, and it is counted what freeing it
//!   would write: blocks that would be moved, as a share of the blocks of a segment, and records, as a share of
//!   its entries ([`FlashDevice::judge`]). Both shares together must leave an eighth. If they do not, nothing in
//!   it has been touched; it is *held* until so many segments were opened that it may be otherwise;
//! - **oldest**, where nothing is worth choosing ([`REFUSED_MAX`]): nothing older is there that what it says could
//!   matter to, so only its open intents and untold zeros are logged again, of which there may be few. What is
//!   clean is dropped beyond what leaves a sixteenth, and what is dirty beyond that waits for the destager. This
//!   is a log that is freed in its order.
//!
//! So every segment that goes gives back at least a sixteenth of itself, whatever is in the log, and who waits for a
//! segment's worth of room waits for sixteen of them at most, those besides of which the freeing had begun and
//! turned out dearer (they are *put off*, and until one of them fits only the oldest goes). The engine counts how many
//! went while somebody waited and got nothing ([`FlashDevice::in_vain`]); tests fail where that is more.

use crate::faults::Fault;
use crate::flash::again::Holds;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::durable::FLUSH_AFTER_BYTES;
use crate::flash::evict::{Contents, Fate};
use crate::paths::{Path, took};
use hearth_io::BLOCK;

/// Of a segment that is chosen, one part in so many is gained at least.
const GAIN_SHARE: u64 = 8;
/// Segments in a row that are looked at and not worth it; then the oldest goes.
const REFUSED_MAX: u32 = 8;
/// Segments that wait for room for what they say again, at most: what lay in them is gone from the cache.
const PUT_OFF_MAX: usize = 4;
/// Time after which it is counted again what the oldest of them says: it may be less.
const PUT_OFF_NS: u64 = 20_000_000;
/// One segment in so many may go before room is short.
const AHEAD_SHARE: usize = 16;
/// Segments that may go one after the other for each one somebody waits for.
const IN_VAIN_SHARE: usize = 16;

/// What is known of segments as candidates.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// Segments whose eviction has begun and that are not emptied: copies of theirs may be gone that the log
    /// still has.
    pub begun: Vec<u32>,
    put_off: Vec<PutOff>,
    held: Vec<Held>,
    /// Segments that were not worth it since one was.
    refused: u32,
    /// Segments that went since somebody who waits for room got some.
    in_vain: usize,
}

impl Choice {
    /// Nobody is at work on the segment, nor was it looked at and not worth it.
    pub fn may_be_left(&self, seg: u32) -> bool {
        let put_off = self.put_off.iter().any(|p| p.seg == seg);
        let held = self.held.iter().any(|h| h.seg == seg);
        !self.begun.contains(&seg) && !put_off && !held
    }
}

/// A segment that says so much again that there is no room for it.
#[derive(Debug)]
struct PutOff {
    seg: u32,
    records: usize,
    since_ns: u64,
}

/// A segment that is not worth it.
#[derive(Debug)]
struct Held {
    seg: u32,
    /// The number of the segment that has to be opened until it is looked at again.
    until: u64,
    oldest: bool,
}

/// How a segment goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Way {
    /// If it is worth it.
    #[default]
    Chosen,
    /// It is the oldest, and there is no better one.
    Oldest,
    /// Nothing lives in it, and it goes with others that are to be free: if it is worth it.
    Ahead,
}

/// Whether a segment goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// What it says is being read.
    Unknown,
    Goes,
    /// It would give too little.
    Stays,
}

impl<U: Users> FlashDevice<U> {
    /// The segment that shall be freed next, of all that are in the log, and how.
    pub(in crate::flash) fn choose(&mut self, now: u64) -> Option<(u32, Way)> {
        let oldest = self.log.order.front().copied();
        if self.starved() {
            return oldest.map(|seg| (seg, Way::Oldest));
        }
        let (room, held) = (self.record_room(), self.any_held());
        let choice = &mut self.evict.choice;
        let due = |p: &PutOff| {
            p.records <= room
                || oldest == Some(p.seg) && now.saturating_sub(p.since_ns) >= PUT_OFF_NS
        };
        if let Some(at) = choice.put_off.iter().position(due) {
            return Some((choice.put_off.swap_remove(at).seg, Way::Oldest));
        }
        let segments = &self.log.segments;
        let put_off = |seg: &u32| {
            let held = segments[*seg as usize].held > 0;
            held || choice.put_off.iter().any(|p| p.seg == *seg)
        };
        if let Some(seg) = choice.begun.iter().find(|seg| !put_off(seg)) {
            return Some((*seg, Way::Oldest));
        }
        if held && oldest.is_some_and(|seg| !put_off(&seg)) {
            // They wait for what began before they ended.
            return oldest.map(|seg| (seg, Way::Oldest));
        }
        if !choice.put_off.is_empty() {
            let others = self.log.order.iter().find(|seg| !put_off(seg));
            let may = choice.put_off.len() < PUT_OFF_MAX;
            return others.filter(|_| may).map(|seg| (*seg, Way::Oldest));
        }
        self.look_again(oldest);
        self.evict.forced = false;
        if self.evict.choice.refused < REFUSED_MAX {
            let best = self.cleaner.pick();
            if best.is_some() {
                return best.map(|seg| (seg, Way::Chosen));
            }
            self.evict.forced = true;
            let turn = self.cleaner.turn();
            if turn.is_some() {
                return turn.map(|seg| (seg, Way::Chosen));
            }
        }
        took(Path::OldestGoes);
        self.evict.forced = true;
        // Of an origin that takes nothing the others do not wait.
        let free = self.log.order.iter().find(|seg| !self.holds(**seg));
        self.evict.wants_clean |= free.is_none();
        free.map(|seg| (*seg, Way::Oldest))
    }

    /// A segment in which nothing lives, if some may go before room is short: the log is flushed when so much was
    /// appended, and what was emptied by then comes free with that flush, instead of with one of its own for each.
    pub(in crate::flash) fn dead_ahead(&self) -> Option<u32> {
        let log = &self.log;
        let choice = &self.evict.choice;
        let coming = log.free.len() + log.freeing.len();
        if coming >= self.free_target() + self.ahead_most()
            || !choice.begun.is_empty()
            || !choice.put_off.is_empty()
        {
            return None;
        }
        self.cleaner.dead()
    }

    /// Segments that go ahead, at most: as many as are filled between two flushes.
    pub(in crate::flash) fn ahead_most(&self) -> usize {
        let segment = u64::from(self.layout.segment_blocks) * BLOCK;
        let filled = (FLUSH_AFTER_BYTES / segment) as usize;
        filled.min(self.log.usable() / AHEAD_SHARE)
    }

    /// Of those that were not worth it some may be by now.
    fn look_again(&mut self, oldest: Option<u32>) {
        let opened = self.log.next_segment_seq;
        let cleaner = &mut self.cleaner;
        let mut back = Vec::new();
        self.evict.choice.held.retain(|h| {
            let again = h.until <= opened || oldest == Some(h.seg) && !h.oldest;
            if again {
                cleaner.give_back(h.seg);
                back.push(h.seg);
            }
            !again
        });
        for seg in back {
            self.leave_alone(seg);
        }
    }

    /// Is the segment that was chosen worth it? Until then nothing in it is touched.
    pub fn judge(&mut self, seg: u32, contents: &(impl Contents + Holds), now: u64) -> Verdict {
        if self.starved() {
            self.begin(seg);
            return Verdict::Goes;
        }
        if self.evict.judged {
            return Verdict::Goes;
        }
        if self.holds(seg) {
            self.evict.wants_clean = true;
            return self.stays(seg);
        }
        let Some((moves, records)) = self.price(seg, contents, now) else {
            return Verdict::Unknown;
        };
        let (blocks, entries) = (self.log.segment_room(), self.log.summary_capacity as u64);
        let cost = moves * entries + records as u64 * blocks;
        let dear =
            cost * GAIN_SHARE > blocks * entries * (GAIN_SHARE - 1) || records > self.record_room();
        let must = self.evict.way == Way::Oldest;
        if !must && dear && !self.faults.has(Fault::FreeForNothing) {
            return self.stays(seg);
        }
        let rows = u64::from(self.log.data_blocks);
        self.evict.said_blocks = (records as u64 * rows).div_ceil(entries) as u32;
        self.begin(seg);
        Verdict::Goes
    }

    /// Another one goes before it.
    fn stays(&mut self, seg: u32) -> Verdict {
        took(Path::SegmentHeld);
        let ahead = (self.log.usable() as u64 / 8).max(4);
        let oldest = self.is_oldest(seg);
        let until = self.log.next_segment_seq + ahead;
        // Nobody waits for one that goes ahead.
        self.evict.choice.refused += u32::from(self.evict.way == Way::Chosen);
        if !self.evict.choice.held.iter().any(|h| h.seg == seg) {
            self.evict.choice.held.push(Held { seg, until, oldest });
        }
        self.log.aside.remove(&seg);
        self.cleaner.withdraw(seg);
        self.forget_victim();
        Verdict::Stays
    }

    /// What freeing a segment would write: blocks, and records. `None`: it is not known yet what it says.
    fn price(
        &mut self,
        seg: u32,
        contents: &(impl Contents + Holds),
        now: u64,
    ) -> Option<(u64, usize)> {
        if !self.read_entries(seg) {
            return None;
        }
        let terms = self.terms(seg, now);
        let base = seg * self.log.segment_slots;
        // Whatever is not known to go may be moved.
        let s = self.log.segments[seg as usize];
        let mut moves = u64::from(s.live) + u64::from(s.dirty) * (self.log.copies_of_dirty() - 1);
        let goes: Vec<bool> = (base..base + self.log.slots_end())
            .map(|slot| {
                let fate = contents.look(slot, &terms);
                moves -= u64::from(matches!(fate, Fate::Goes | Fate::Orphan));
                fate == Fate::Goes
            })
            .collect();
        let counting = self.entries_counting(seg);
        let dropped = counting.iter().filter(|e| e.kind.is_data());
        let dropped = dropped.filter(|e| goes.get(usize::from(e.slot)) == Some(&true));
        // What is dropped is void, and must be said to be where another copy of it lies.
        let void = match self.is_oldest(seg) {
            true => 0,
            false => dropped
                .filter(|e| self.dead.count(e.disk, e.block) > 0)
                .count(),
        };
        let said = self
            .leaving(seg, &counting)
            .holding(contents, self.faults)
            .0;
        Some((moves, said.len() + void))
    }

    /// Its eviction begins.
    fn begin(&mut self, seg: u32) {
        if std::mem::replace(&mut self.evict.judged, true) {
            return;
        }
        self.evict.choice.refused = 0;
        if self.evict.way == Way::Ahead {
            took(Path::SegmentAhead);
        }
        if !self.evict.choice.begun.contains(&seg) {
            self.evict.choice.begun.push(seg);
            // One that goes with its device goes for nobody who waits.
            self.evict.choice.in_vain += usize::from(!self.is_on_emptying(seg));
            self.evict.count += 1;
            self.log.segments[seg as usize].eviction = self.evict.count;
        }
    }

    /// There is no room for what a segment says again: another goes meanwhile.
    pub(in crate::flash) fn put_off(&mut self, seg: u32, records: usize, now: u64) {
        took(Path::SegmentPutOff);
        let since_ns = now;
        self.evict.choice.put_off.push(PutOff {
            seg,
            records,
            since_ns,
        });
        self.log.aside.remove(&seg);
        self.cleaner.withdraw(seg);
        self.forget_victim();
        self.evict.wants_clean = true;
    }

    /// Has the eviction of this segment begun?
    pub(in crate::flash) fn is_begun(&self, seg: u32) -> bool {
        self.evict.choice.begun.contains(&seg)
    }

    /// False: this segment waits for room for what it says again, and there is none.
    pub(in crate::flash) fn may_be_tried(&mut self, seg: u32) -> bool {
        let room = self.record_room();
        let put_off = &mut self.evict.choice.put_off;
        let Some(at) = put_off.iter().position(|p| p.seg == seg) else {
            return true;
        };
        let may = put_off[at].records <= room;
        if may {
            put_off.swap_remove(at);
        }
        may
    }

    /// Do segments wait for room for what they say again?
    pub(in crate::flash) fn any_put_off(&self) -> bool {
        !self.evict.choice.put_off.is_empty()
    }

    /// A segment is no candidate any more.
    pub(in crate::flash) fn leave_choice(&mut self, seg: u32) {
        let choice = &mut self.evict.choice;
        choice.begun.retain(|s| *s != seg);
        choice.put_off.retain(|p| p.seg != seg);
        choice.held.retain(|h| h.seg != seg);
    }

    /// Who waited for room in the log got some, or nobody waits.
    pub fn room_was_got(&mut self) {
        self.evict.choice.in_vain = 0;
    }

    /// Segments that were freed, one after the other, while somebody waited for room and got none; and how many
    /// that may be.
    pub fn in_vain(&self) -> (usize, usize) {
        let most = IN_VAIN_SHARE * (self.free_target() + PUT_OFF_MAX);
        (self.evict.choice.in_vain, most)
    }
}
