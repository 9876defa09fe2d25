//! Making room: a segment is freed by giving up or moving on what it holds.
//!
//! Four steps, each of them a function:
//!
//! 1. which segment goes next is **chosen** ([`FlashDevice::next_victim`]): the one whose freeing gives most
//!    for what is moved ([`hearth_policy::cleaning`]). What it says is read, and it is counted whether freeing it
//!    gives more room than it takes ([`crate::flash::choose`]);
//! 2. what lies in it is **looked at**, slot by slot ([`FlashDevice::sift`]). The device does not know what a
//!    block is worth; that is asked of those who use it ([`Contents`]);
//! 3. what is worth it is **moved**: read here, and appended again by whoever is told of the read. The rest is
//!    dropped at once. Dirty blocks are moved, too, unless the segment is mostly dirty, in which case
//!    the destager is asked instead;
//! 4. once nothing is left, what it says that still holds is logged again
//!    ([`FlashDevice::say_again`]), and the segment is **freed** ([`FlashDevice::free_victim`]): it may be
//!    overwritten once all that is durable and the map says so ([`crate::flash::map`]).
//!
//! Who drives these steps is `core/room.rs`.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::again::{Holds, Leaving};
use crate::flash::choose::{Choice, Way};
use crate::flash::device::{FlashDevice, FlashOp, Token, Users, WRITE_PRICE};
use crate::flash::log::{Gone, Item, LAZY_BATCH_BLOCKS, SegState, Segment, Slot};
use crate::flash::survey::BLOCK_BYTES;
use crate::paths::{Path, took};
use hearth_format::{Entry, Kind};
use hearth_io::{Buf, BufSlice, IoDone, Target};
use hearth_policy::cleaning::Why;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::fmt::Debug;

/// Blocks read at once to be moved.
const MOVE_RUN: u32 = 64;
/// Blocks being moved (read, or queued to be appended) while more runs are begun: as many as
/// make a batch that does not need to wait for more.
const MOVES_MAX: u32 = LAZY_BATCH_BLOCKS;
/// Free segments below which no further segment is evicted while others wait to be free: one for
/// what is moved out of it, one for the records that free the others, also after a crash.
const FREE_MIN: usize = 2;
/// One block in so many of a segment goes at least, or a cache full of blocks in use would turn its
/// log over for ever to make room for one. It bounds what moving writes; a larger share of hot
/// blocks dropped is what it costs (docs/decisions/0001-policy.md).
const DROP_SHARE: u32 = 16;
/// No disk has such blocks; who finds one on flash has read what nobody wrote.
const BLOCKS_END: u64 = 1 << 36;
/// Time between looks at a segment in which everything waits for something.
const RESCAN_NS: u64 = 1_000_000;

/// What the segment says that goes next.
#[derive(Default)]
enum Says {
    /// It is not known yet.
    #[default]
    Unread,
    /// It is being read.
    Reading,
    Read(Vec<Entry>),
}

impl Debug for Says {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Says::Unread => f.write_str("unread"),
            Says::Reading => f.write_str("being read"),
            Says::Read(entries) => write!(f, "{} entries", entries.len()),
        }
    }
}

/// Progress in the segment that goes next.
#[derive(Debug, Default)]
pub(crate) struct Evict {
    current: Option<u32>,
    pub(in crate::flash) way: Way,
    /// It is settled that it goes.
    pub(in crate::flash) judged: bool,
    /// What it says again takes the room of so many blocks.
    pub(in crate::flash) said_blocks: u32,
    says: Says,
    /// Each half of it was asked for that.
    asked_both: bool,
    pub(in crate::flash) choice: Choice,
    /// Evictions so far.
    pub(in crate::flash) count: u64,
    /// Nothing is worth freeing, and a segment has to be freed: as if too much were alive.
    pub(in crate::flash) forced: bool,
    /// Next block of it to look at.
    at: u32,
    scanned_ns: u64,
    /// When it was last looked for origins that hang.
    hung_ns: u64,
    /// Blocks that are being read, or queued to be appended.
    moving: u32,
    kept: u32,
    /// The destager should hurry.
    pub(in crate::flash) wants_clean: bool,
}

/// What eviction can do with a block at the moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Nothing can be moved: what need not be kept goes.
    pub starved: bool,
    /// Blocks in front of it are moved by the same read.
    pub follows: bool,
    /// Dirty blocks wait for their destager, if it can be hoped for.
    pub dirty_stays: bool,
    /// There is a place for a clean block that must be kept.
    pub may_keep: bool,
    /// There is one for a clean block that is in use.
    pub may_keep_used: bool,
    /// Clean blocks that can be kept on the whole device, at most: more would only be moved around.
    pub kept_most: u64,
    /// It lies on a device that is being emptied.
    pub leaves: bool,
    /// More lives than should, and this is to go first: what is not used goes. Else everything that lives is moved.
    pub crowded: bool,
    pub now: u64,
}

/// What becomes of a block whose segment is to be free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is not there, or stays for now: somebody is at work on it.
    Stays,
    /// It stays until its origin has it.
    Waits,
    /// Nothing leads to this copy any more.
    Orphan,
    /// It is not worth being moved.
    Goes,
    /// It is appended again.
    Moves {
        /// What follows it is not read together with it.
        alone: bool,
    },
}

/// What eviction asks of those whose blocks lie on the device.
pub(crate) trait Contents {
    /// Looks at a slot of the segment that goes: what is to become of what lies there?
    fn look(&self, slot: Slot, terms: &Terms) -> Fate;

    /// Drops what lies in a slot, in the eviction with this number. It needs no record, because the whole
    /// segment is freed.
    fn drop_copy(&mut self, slot: Slot, eviction: u64) -> Gone;

    /// Drops a clean copy that nothing leads to.
    fn drop_orphan(&mut self, slot: Slot) -> Gone;

    /// What lies in a slot is being moved, and left alone until then. Tells its checksum.
    fn set_moving(&mut self, slot: Slot) -> u32;
}

impl<U: Users> FlashDevice<U> {
    /// Free segments to keep ready.
    pub fn free_target(&self) -> usize {
        self.log.free_wanted()
    }

    /// Is this segment being freed? One of which that is not settled yet may stay, with all that lies in it.
    pub fn is_going(&self, seg: u32) -> bool {
        self.evict.current == Some(seg) && self.evict.judged
    }

    /// The segment to be freed now, if room is short, and whether that begins only now.
    pub fn next_victim(&mut self, now: u64) -> Option<(u32, bool)> {
        if !self.takes_writes() {
            return None;
        }
        if self.starved() && self.is_emptying() {
            // What it has is needed.
            self.end_emptying();
        }
        if self.starved() && self.evict.current != self.log.order.front().copied() {
            self.forget_victim();
        }
        if let Some(seg) = self.evict.current {
            return Some((seg, false));
        }
        if let Some(seg) = self.next_to_empty() {
            self.begin_with(seg, Way::Oldest);
            return Some((seg, true));
        }
        let log = &self.log;
        // What comes free on a device that is emptied is room for nobody.
        let coming = match self.is_emptying() {
            _ if self.any_held() => 0,
            false => log.freeing.len(),
            true => {
                let of_use = log.freeing.iter().filter(|seg| !self.is_on_emptying(**seg));
                of_use.count()
            }
        };
        if self.free_to_stay() + coming >= self.free_target() && !self.starved() {
            self.evict.wants_clean = false;
            let seg = self.dead_ahead()?;
            self.begin_with(seg, Way::Ahead);
            return Some((seg, true));
        }
        // What was emptied is free only after what took its place is durable. Were the last segments spent
        // before, nothing could ever be appended again; and a crash closes the head, however empty it is.
        if coming > 0 && log.free.len() < FREE_MIN && !self.starved() {
            return None;
        }
        let (seg, way) = self.choose(now)?;
        self.begin_with(seg, way);
        Some((seg, true))
    }

    pub(in crate::flash) fn begin_with(&mut self, seg: u32, way: Way) {
        let before = std::mem::take(&mut self.evict);
        self.evict = Evict {
            current: Some(seg),
            way,
            moving: before.moving,
            choice: before.choice,
            forced: before.forced,
            count: before.count,
            ..Evict::default()
        };
    }

    /// Does something come free without the destager? Segments wait to be free, or one is being emptied. Whether
    /// what is dirty in that stands in the way is told apart ([`wants_clean`](Self::wants_clean)).
    pub fn comes_free(&self) -> bool {
        let under_way = !self.log.freeing.is_empty() || self.evict.current.is_some();
        under_way && !self.starved()
    }

    /// A segment goes next, and it is known what it says.
    #[cfg(test)]
    pub fn set_entries(&mut self, seg: u32, entries: Vec<Entry>) {
        self.evict.current = Some(seg);
        self.evict.says = Says::Read(entries);
    }

    /// Reads what the segment that goes says, if that is not known. True if it is.
    pub(in crate::flash) fn read_entries(&mut self, seg: u32) -> bool {
        match self.evict.says {
            Says::Read(_) => true,
            Says::Reading => false,
            // Batches are on their way to it: what is read now lacks them, which is no sign of damage.
            Says::Unread if self.is_sealing(seg) => false,
            Says::Unread => {
                self.evict.says = Says::Reading;
                self.evict.asked_both = false;
                self.send_read_entries(seg, false, 0);
                false
            }
        }
    }

    /// Are batches of a closed segment still on their way to it?
    fn is_sealing(&self, seg: u32) -> bool {
        self.log.segments[seg as usize].batches > 0 || self.log.is_sealing(seg)
    }

    /// From its first half (0), or its second one (1), if it has two of which blocks differ.
    fn send_read_entries(&mut self, seg: u32, whole: bool, side: u32) {
        let (offset, len) = match whole {
            false => (self.layout.summary_offset(seg), self.layout.summary_bytes()),
            true => (
                self.slot_offset(seg * self.log.segment_slots + side * self.log.half),
                self.log.data_blocks as usize * BLOCK_BYTES,
            ),
        };
        self.log.segments[seg as usize].pins += 1;
        let io = Io::read(self.target(), offset, Buf::zeroed(len).all());
        let op = FlashOp::Entries { seg, whole };
        self.out.send(op, io.in_background());
    }

    /// What a segment says was read, or was not.
    pub fn entries_read(&mut self, seg: u32, whole: bool, done: &IoDone, now: u64) {
        self.unpin(seg);
        if self.evict.current != Some(seg) || !self.takes_writes() {
            return;
        }
        let bytes = done.op.bufs.first().filter(|_| done.result.is_ok());
        let s = self.log.segments[seg as usize];
        let entries = bytes.and_then(|bytes| match whole {
            false => self.entries_of_summary(bytes.bytes(), s.seq),
            true => self.entries_of_batches(bytes.bytes(), s.seq, s.last_batch),
        });
        match entries {
            Some(mut entries) => {
                entries.retain(|e| e.block < BLOCKS_END);
                self.evict.says = Says::Read(entries);
            }
            None if !whole => self.send_read_entries(seg, true, 0),
            // Both halves say the same, and one of them may have rotted. What cannot be read there is read here, once more; that is the end.
            None if !self.evict.asked_both && self.was_first_half(seg, done) => {
                self.evict.asked_both = true;
                self.send_read_entries(seg, true, 1);
            }
            None if !self.evict.asked_both && self.is_half_left(seg, done) => {
                self.evict.asked_both = true;
            }
            None => {
                // Nobody knows what it says, so it stays as it is, and serves what it holds.
                took(Path::SegmentUnreadable);
                if done.result.is_ok() {
                    self.note_blank_segment();
                }
                self.cleaner.withdraw(seg);
                self.log.aside.remove(&seg);
                self.log.order.retain(|s| *s != seg);
                self.leave_choice(seg);
                self.note_unreadable(seg);
                self.forget_victim();
                self.log.unreadable += 1;
                self.cleaner.set_room(self.log.blocks_kept());
                self.may_go_round(now);
            }
        }
    }

    /// Was a segment read from its first half, while the second one is there, too?
    fn was_first_half(&self, seg: u32, done: &IoDone) -> bool {
        let at = self.layout.segment_offset(seg);
        let first = self.devices.spread().device_of_side(at, 0);
        self.log.half > 0
            && self.sides_there(seg) == [true; 2]
            && done.op.target == Target::Flash(first)
    }

    /// The same where all that is in one half is in the other as well: reads the segment from that one, unless this was it.
    fn is_half_left(&mut self, seg: u32, done: &IoDone) -> bool {
        let at = self.slot_offset(seg * self.log.segment_slots);
        let (first, _) = self.devices.place(self.target(), at);
        if self.log.half > 0 || !self.devices.are_twice() || done.op.target != first {
            return false;
        }
        let Some((target, offset)) = self.devices.other_half(done) else {
            return false;
        };
        self.log.segments[seg as usize].pins += 1;
        let len = self.log.data_blocks as usize * BLOCK_BYTES;
        let io = Io::read(target, offset, Buf::zeroed(len).all()).placed();
        let op = FlashOp::Entries { seg, whole: true };
        self.out.send(op, io.in_background());
        true
    }

    /// Looks through a segment that goes, as far as there is room for what is moved.
    pub fn sift(&mut self, seg: u32, contents: &mut impl Contents, now: u64) {
        let s = self.log.segments[seg as usize];
        // Only the destager gives back what is held.
        self.evict.wants_clean |= s.held > 0;
        // Where nothing can be appended nothing of it is logged again, either.
        if s.live == 0 || !self.starved() && !self.read_entries(seg) {
            return;
        }
        let base = seg * self.log.segment_slots;
        let data_blocks = self.log.slots_end();
        if self.evict.at >= data_blocks {
            if self.evict.moving > 0 || now.saturating_sub(self.evict.scanned_ns) < RESCAN_NS {
                return;
            }
            self.evict.at = 0;
        }
        let mut terms = self.terms(seg, now);
        let keep_max = self.keep_max(seg);
        while self.evict.at < data_blocks && self.evict.moving < MOVES_MAX {
            let slot = base + self.evict.at;
            let n = self.run_to_move(slot, base + data_blocks, keep_max, &mut terms, contents);
            if n == 0 {
                self.evict.at += 1;
                continue;
            }
            self.evict.at += n;
            self.evict.kept += n;
            self.read_to_move(slot, n, contents);
        }
        if self.evict.at >= data_blocks {
            self.evict.scanned_ns = now;
        }
    }

    /// What can be done with the blocks of a segment at the moment.
    pub(in crate::flash) fn terms(&self, seg: u32, now: u64) -> Terms {
        let s = self.log.segments[seg as usize];
        let leaves = self.is_on_emptying(seg);
        // What is moved now would take the room of the records that free what was evicted.
        let short = self.log.free.is_empty();
        // Moving a segment that is all dirty would only move it in a circle.
        let most = self.log.data_blocks - self.log.data_blocks / DROP_SHARE;
        let mostly_dirty = s.dirty + self.evict.said_blocks > most;
        Terms {
            starved: self.starved(),
            follows: false,
            // From one device to another it does not go in a circle.
            dirty_stays: mostly_dirty && !leaves || short,
            may_keep: !short && !leaves,
            may_keep_used: !short && !leaves,
            kept_most: self.kept_most(),
            crowded: leaves || self.fades(seg),
            leaves,
            now,
        }
    }

    /// Blocks of a segment that are moved at most, as long as they need not be.
    fn keep_max(&self, seg: u32) -> u32 {
        if self.log.free.is_empty() || self.is_on_emptying(seg) {
            return 0;
        }
        let copies = self.log.copies_of_dirty() as u32;
        let room = self.log.segment_room() as u32;
        let most = room - room / DROP_SHARE;
        match self.evict.way {
            // Whatever is dirty is moved, too.
            Way::Oldest => {
                let dirty = self.log.segments[seg as usize].dirty;
                most.saturating_sub((self.evict.said_blocks + dirty) * copies)
            }
            _ => most,
        }
    }

    /// Clean blocks that can be kept, at most, so that eviction has something to drop.
    fn kept_most(&self) -> u64 {
        let blocks = u64::from(self.log.data_blocks);
        let segments = self.log.usable().saturating_sub(self.log.parked.len());
        // Not those that are to be free, nor the head and the one eviction is at; and descriptors.
        let full = segments.saturating_sub(self.free_target() + 2) as u64 * blocks / 16 * 15;
        full.min(segments as u64 * blocks / 8 * 7)
    }

    /// How many slots from `slot` are to be moved; drops what is not worth it on the way.
    fn run_to_move(
        &mut self,
        slot: Slot,
        end: Slot,
        keep_max: u32,
        terms: &mut Terms,
        contents: &mut impl Contents,
    ) -> u32 {
        let mut n = 0;
        while n < MOVE_RUN && slot + n < end {
            terms.follows = n > 0;
            terms.may_keep_used = match terms.crowded {
                true => self.evict.kept + n < keep_max,
                false => keep_max > 0,
            };
            match contents.look(slot + n, terms) {
                Fate::Moves { alone } => {
                    n += 1;
                    if alone {
                        break;
                    }
                }
                Fate::Stays => break,
                Fate::Waits => {
                    self.evict.wants_clean = true;
                    break;
                }
                Fate::Goes => {
                    self.drop_copy(slot + n, contents);
                    break;
                }
                Fate::Orphan => {
                    let gone = contents.drop_orphan(slot + n);
                    self.slot_gone(gone);
                    break;
                }
            }
        }
        n
    }

    /// Drops what lies in a slot of a segment that goes as a whole.
    pub fn drop_copy(&mut self, slot: Slot, contents: &mut impl Contents) {
        let eviction = self.log.segments[self.log.segment_of(slot)].eviction;
        let gone = contents.drop_copy(slot, eviction);
        self.slot_gone(gone);
    }

    /// Sets what a block written to flash costs, in 1024ths of a hit, as endurance has it. It never costs
    /// nothing.
    pub fn set_write_cost(&mut self, cost: u64) {
        self.cleaner.set_price(cost.max(WRITE_PRICE));
    }

    /// Does what is not used in a segment that is freed go with it, because more lives than should?
    pub fn fades(&self, seg: u32) -> bool {
        self.evict.forced || self.cleaner.fades(seg)
    }

    fn read_to_move(&mut self, slot: Slot, count: u32, contents: &mut impl Contents) {
        let crcs: SmallVec<[u32; 4]> = (0..count).map(|i| contents.set_moving(slot + i)).collect();
        self.pin(slot);
        self.evict.moving += count;
        let len = count as usize * 4096;
        let buf = Buf::zeroed(len).slice(0, len);
        let io = self.read_slots(slot, buf).checked(crcs);
        let op = FlashOp::Move { slot, count };
        self.out.send(op, io.in_background());
    }

    /// Moves what was read from slow devices to others, as far as there is room without freeing anything for it.
    pub fn move_off_slow(&mut self, contents: &mut impl Contents, now: u64) {
        let coming = self.log.free.len() + self.log.freeing.len();
        if self.hot.is_empty()
            || self.evict.current.is_some()
            || coming < self.free_target()
            || self.log.free.len() <= self.log.reserve()
        {
            return;
        }
        let mut terms = Terms {
            starved: false,
            follows: false,
            dirty_stays: false,
            may_keep: true,
            may_keep_used: true,
            kept_most: self.kept_most(),
            crowded: false,
            leaves: false,
            now,
        };
        while self.evict.moving < MOVES_MAX {
            let Some((slot, count)) = self.hot.pop_front() else {
                return;
            };
            if self.log.segments[self.log.segment_of(slot)].state != SegState::Closed {
                continue;
            }
            let mut at = 0;
            while at < count {
                let mut n = 0;
                while at + n < count && n < MOVE_RUN {
                    terms.follows = n > 0;
                    match contents.look(slot + at + n, &terms) {
                        Fate::Moves { alone } => {
                            n += 1;
                            if alone {
                                break;
                            }
                        }
                        Fate::Stays | Fate::Waits | Fate::Orphan | Fate::Goes => break,
                    }
                }
                if n > 0 {
                    self.read_to_move(slot + at, n, contents);
                }
                at += n.max(1);
            }
        }
    }

    /// Blocks to be moved were read, or not. What shall go on is appended with
    /// [`append_moved`](Self::append_moved), and then [`moves_go_on`](Self::moves_go_on).
    pub fn move_read_ended(&mut self, slot: Slot, count: u32) {
        self.unpin_slot(slot);
        self.evict.moving -= count;
    }

    /// Appends a block that was read from `old` to be moved.
    pub fn append_moved(
        &mut self,
        kind: Kind,
        (disk, block): (u16, u64),
        old: Slot,
        data: BufSlice,
        crc: u32,
        token: U::Token,
    ) {
        self.evict.moving += 1;
        let from = self.log.segment_of(old) as u32;
        let why = Why::Moved { from };
        let item = Item::data(kind, disk, block, data, smallvec![crc], why, token);
        self.log.push(item);
    }

    /// What is moved need not gather if somebody waits for room; else it may, for every batch costs a
    /// block of flash. Where fills find no room it waits for what is being read beside it, and no longer.
    pub fn moves_go_on(&mut self, waited_for: bool) {
        let (free, reserve) = (self.log.free.len(), self.log.reserve());
        let all_read = self.evict.moving <= self.log.queued_blocks;
        self.log.urgent |= waited_for || free < reserve || free == reserve && all_read;
    }

    /// A block that was appended to be moved lies elsewhere now, or never will.
    pub fn moved(&mut self) {
        self.evict.moving -= 1;
    }

    /// Blocks that are being moved.
    pub fn moving(&self) -> u32 {
        self.evict.moving
    }

    /// Has somebody held the segment that goes for long? Then it may be an origin that hangs.
    pub fn is_held_long(&mut self, seg: u32, now: u64) -> bool {
        let pinned = self.log.segments[seg as usize].pins > 0;
        let long = pinned && now.saturating_sub(self.evict.hung_ns) >= RESCAN_NS;
        if long {
            self.evict.hung_ns = now;
        }
        long
    }

    /// Nothing lies in the segment that goes, and nobody reads or writes it.
    pub fn is_victim_empty(&self, seg: u32) -> bool {
        let s = &self.log.segments[seg as usize];
        let pinned = s.pins > 0 && !self.faults.has(Fault::FreePinned);
        !(s.live > 0 || pinned || s.held > 0 || s.batches > 0 || self.evict.moving > 0)
    }

    /// Logs again what the segment says that still holds. `None`: something has to happen before that is known.
    /// Else it may go once the log is durable up to the number returned.
    pub fn say_again(&mut self, seg: u32, holds: &impl Holds, now: u64) -> Option<u64> {
        if self.starved() {
            return self
                .needs_nothing_said(seg, holds)
                .then_some(self.unsaid_ord());
        }
        if !self.read_entries(seg) {
            return None;
        }
        let counting = self.entries_counting(seg);
        let leaving = Leaving {
            queued: self.log.on_their_way(),
            ..self.leaving(seg, &counting)
        };
        let Some((records, clean)) = leaving.still_said(holds, self.faults) else {
            took(Path::RelogWaitsForWrite);
            self.log.urgent = true;
            return None;
        };
        if records.len() > self.record_room() {
            // What origins are told is not logged again. Those that are away are waited for, but not by others.
            self.put_off(seg, records.len(), now);
            return None;
        }
        for said in &records {
            took(match said.kind {
                Kind::ZeroRun => Path::ZerosLoggedAgain,
                Kind::ZeroDoneRun => Path::ToldLoggedAgain,
                Kind::Intent => Path::IntentLoggedAgain,
                Kind::CleanedRun => Path::CleanLoggedAgain,
                Kind::Through => Path::MarkLoggedAgain,
                _ => Path::VoidLoggedAgain,
            });
            self.log
                .record(said.kind, said.disk, said.block, said.count, U::Token::OWN);
        }
        // What is newer than a block that was dirty there may be on its way.
        let ord = self.log.next_ord;
        for seg in clean {
            took(Path::SegmentClean);
            self.log.segments[seg as usize]
                .clean_from
                .get_or_insert(ord);
            self.note_changed(seg);
        }
        // Whatever is queued, too: it may say that an intent in the segment is closed.
        Some(ord)
    }

    /// What the segment that goes says of disks of which that counts. A disk may have been removed since it was
    /// read.
    pub(in crate::flash) fn entries_counting(&self, seg: u32) -> Vec<Entry> {
        let Says::Read(entries) = &self.evict.says else {
            return Vec::new();
        };
        let seq = self.log.segments[seg as usize].seq;
        let counting = entries.iter().filter(|e| self.counts(e.disk, seq));
        counting.copied().collect()
    }

    /// A segment that is to be free, as if nothing were on its way to the log.
    pub(in crate::flash) fn leaving<'a>(&'a self, seg: u32, entries: &'a [Entry]) -> Leaving<'a> {
        Leaving {
            seg,
            oldest: self.is_oldest(seg),
            entries,
            dead: &self.dead,
            zeros: &self.log.zeros,
            segments: &self.log.segments,
            segment_blocks: self.log.segment_slots,
            unsaid_drops: self.may_be_gone() || self.drops_unsaid(seg),
            emptied: self.emptied_beside(seg),
            queued: BTreeMap::new(),
        }
    }

    /// May clean copies beside this segment have been dropped of which the log does not know, nor the map could say
    /// that they are clean?
    fn drops_unsaid(&self, seg: u32) -> bool {
        let floor = self.sb.clean_floor;
        let below =
            |s: &Segment| s.seq < floor && matches!(s.state, SegState::Closed | SegState::Open);
        let mut begun = self.begun_beside(seg);
        floor != 0 && self.log.segments.iter().any(below)
            || begun.any(|s| !self.log.segments[s as usize].is_all_clean())
    }

    /// Segments beside this one that are on their way out, and in which nothing is dirty any more.
    fn emptied_beside(&self, seg: u32) -> SmallVec<[u32; 4]> {
        let begun = self.begun_beside(seg);
        begun
            .filter(|s| self.log.segments[*s as usize].is_all_clean())
            .collect()
    }

    fn begun_beside(&self, seg: u32) -> impl Iterator<Item = u32> {
        let begun = self.evict.choice.begun.iter().copied();
        begun.filter(move |s| *s != seg)
    }

    /// Records that a segment may say again: others shall not be without room for theirs.
    pub(in crate::flash) fn record_room(&self) -> usize {
        let capacity = self.log.summary_capacity;
        // All of them may go to one head.
        let left = self.log.open_heads().map(|h| h.entries_left(capacity));
        (left.max().unwrap_or(0) + self.log.free.len() * capacity) / 2
    }

    /// Of a starved log the oldest segment needs no record when it goes, once the zeros it says are told:
    /// what else it speaks of beside itself has gone before.
    pub fn needs_nothing_said(&self, seg: u32, holds: &impl Holds) -> bool {
        let seq = self.log.segments[seg as usize].seq;
        let hold = |(disk, start, end): &(u16, u64, u64)| {
            let counts = holds.is_known(*disk) && self.counts(*disk, seq);
            counts && !holds.zeros(*disk, *start, *end).is_empty()
        };
        self.oldest() == Some(seg) && !self.log.zeros.of(seg).iter().any(hold)
    }

    /// The segment that went holds nothing that counts once the log is durable up to `ord`.
    pub fn free_victim(&mut self, seg: u32, ord: u64) {
        if let Says::Read(entries) = std::mem::take(&mut self.evict.says) {
            self.bury(seg, &entries);
        }
        self.forget_victim();
        self.leave_choice(seg);
        self.evict.wants_clean = false;
        self.free_segment(seg, ord);
        self.let_held_go();
    }

    /// Its dead copies are no copies any more.
    fn bury(&mut self, seg: u32, entries: &[Entry]) {
        let seq = self.log.segments[seg as usize].seq;
        for e in entries.iter().filter(|e| e.kind.is_data()) {
            if self.counts(e.disk, seq) {
                self.dead.take(e.disk, e.block);
            }
        }
    }

    /// No segment is about to go.
    pub(in crate::flash) fn forget_victim(&mut self) {
        self.evict.current = None;
        self.evict.judged = false;
        self.evict.says = Says::Unread;
    }

    /// A segment is no part of the log any more.
    pub fn not_a_victim(&mut self, seg: u32) {
        self.leave_choice(seg);
        if self.evict.current == Some(seg) {
            self.forget_victim();
        }
    }

    /// Starts a flush if room is short and evicted segments wait for one.
    pub fn flush_to_free(&mut self, now: u64) {
        if self.log.free.len() < self.free_target() && self.any_waits_for_flush() {
            self.flush(now);
        }
    }

    /// Do evicted segments wait for a flush of what has been applied?
    pub(in crate::flash) fn any_waits_for_flush(&self) -> bool {
        let (durable, applied) = (self.log.durable_ord, self.log.applied_ord);
        self.log.freeing.iter().any(|seg| {
            let state = self.log.segments[*seg as usize].state;
            matches!(state, SegState::Freeing { ord } if ord > durable && ord <= applied)
        })
    }

    /// Is it the segment that eviction is at?
    pub(in crate::flash) fn is_victim(&self, seg: u32) -> bool {
        self.evict.current == Some(seg)
    }

    /// Segments that are on their way out: copies of theirs may be gone that the log still has.
    pub fn begun(&self) -> &[u32] {
        &self.evict.choice.begun
    }

    /// After a start: copies of these segments may be gone that the log still has.
    pub fn resume(&mut self, begun: Vec<u32>) {
        for seg in &begun {
            self.evict.count += 1;
            self.log.segments[*seg as usize].eviction = self.evict.count;
        }
        self.evict.choice.begun = begun;
    }

    /// A segment is being emptied.
    pub fn is_evicting(&self) -> bool {
        self.evict.current.is_some()
    }

    /// Evictions so far.
    pub fn evictions(&self) -> u64 {
        self.evict.count
    }

    /// Can no copy come back that went in evictions up to this one?
    pub fn has_gone(&self, eviction: u64) -> bool {
        let mut held = self.evict.choice.begun.iter().chain(&self.log.freeing);
        held.all(|seg| self.log.segments[*seg as usize].eviction > eviction)
    }

    /// Blocks of a segment that eviction has looked at.
    pub fn sifted(&self, seg: u32) -> u32 {
        match self.evict.current == Some(seg) {
            true => self.evict.at,
            false => 0,
        }
    }

    /// Are there copies on flash that nothing leads to, because they were dropped with their segment, which
    /// may not be overwritten yet?
    pub fn holds_evicted(&self) -> bool {
        !self.evict.choice.begun.is_empty() || !self.log.freeing.is_empty()
    }

    /// Room is short, and what is dirty stands in the way.
    pub fn wants_clean(&self) -> bool {
        self.evict.wants_clean || self.any_put_off()
    }

    /// Nothing can be moved: only what the destager cleans comes free.
    pub fn want_clean(&mut self) {
        self.evict.wants_clean = true;
    }

    /// Its state in words, for diagnosis.
    pub fn eviction(&self) -> impl Debug {
        &self.evict
    }
}
