//! Making room: a segment is freed by giving up or moving on what it holds.
//!
//! Four steps, each of them a function:
//!
//! 1. which segment goes next is **chosen** ([`FlashDevice::next_victim`]): the oldest;
//! 2. what lies in it is **looked at**, slot by slot ([`FlashDevice::sift`]). The device does not know what a
//!    block is worth; that is asked of those who use it ([`Contents`]);
//! 3. what is worth it is **moved**: read here, and appended again by whoever is told of the read. The rest is
//!    dropped at once. Dirty blocks are moved, too, unless the segment is mostly dirty, in which case
//!    the destager is asked instead;
//! 4. once nothing is left, records that still hold (open intents, zero runs) are logged again
//!    ([`FlashDevice::say_again`]), and the segment is **freed** ([`FlashDevice::free_victim`]): it leaves the
//!    log's tail, and may be overwritten once a later batch that says so is durable.
//!
//! Who drives these steps is `core/room.rs`.

use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashOp, Token, Users};
use crate::flash::log::{Item, LAZY_BATCH_BLOCKS, SegState, Slot};
use crate::paths::{Path, took};
use hearth_format::Kind;
use hearth_io::{Buf, BufSlice};
use smallvec::{SmallVec, smallvec};
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
/// Time between looks at a segment in which everything waits for something.
const RESCAN_NS: u64 = 1_000_000;

/// Progress in the segment that goes next.
#[derive(Debug, Default)]
pub(crate) struct Evict {
    current: Option<u32>,
    /// Next block of it to look at.
    at: u32,
    scanned_ns: u64,
    /// When it was last looked for origins that hang.
    hung_ns: u64,
    /// Blocks that are being read, or queued to be appended.
    moving: u32,
    kept: u32,
    relog_sent: bool,
    relogged: bool,
    /// The destager should hurry.
    wants_clean: bool,
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
    pub now: u64,
}

/// What becomes of a block whose segment is to be free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is not there, or stays for now: somebody is at work on it, or it waits for the destager.
    Stays,
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

/// Something that was recorded in the log and still holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub kind: Kind,
    pub disk: u16,
    pub block: u64,
    pub count: u64,
}

/// What eviction asks of those whose blocks lie on the device.
pub(crate) trait Contents {
    /// Looks at a slot of the segment that goes: what is to become of what lies there?
    fn look(&self, slot: Slot, terms: &Terms) -> Fate;

    /// Drops what lies in a slot of the segment with the number `seq`. It needs no record, because the whole
    /// segment is freed. True if it was dirty.
    fn drop_copy(&mut self, slot: Slot, seq: u64) -> bool;

    /// Drops a clean copy that nothing leads to.
    fn drop_orphan(&mut self, slot: Slot);

    /// What lies in a slot is being moved, and left alone until then. Tells its checksum.
    fn set_moving(&mut self, slot: Slot) -> u32;

    /// Everything that segments up to number `seq` say, beyond data, and that still holds. `None`: that is
    /// about to change, ask again.
    fn still_said(&mut self, seq: u64) -> Option<Vec<Said>>;

    /// It was logged again, in the segment with this number.
    fn said_again(&mut self, said: &Said, seq: u64);
}

impl<U: Users> FlashDevice<U> {
    /// Free segments to keep ready.
    pub fn free_target(&self) -> usize {
        self.log.reserve() + (self.log.segments.len() / 64).clamp(2, 16)
    }

    /// The segment that shall be freed next, of all that are in the log.
    fn choose(&self) -> Option<u32> {
        self.log.order.front().copied()
    }

    /// Would this segment be freed next, were room needed now?
    pub fn is_next(&self, seg: u32) -> bool {
        self.evict.current.or_else(|| self.choose()) == Some(seg)
    }

    /// The segment to be freed now, if room is short, and whether that begins only now.
    pub fn next_victim(&mut self) -> Option<(u32, bool)> {
        if !self.takes_writes() {
            return None;
        }
        let log = &self.log;
        let coming = log.freeing.len();
        if let Some(seg) = self.evict.current {
            return Some((seg, false));
        }
        if log.free.len() + coming >= self.free_target() {
            self.evict.wants_clean = false;
            return None;
        }
        // What was evicted is free only after two more batches and flushes, and moving a segment
        // may take one. Were the last segments spent before those batches are written, nothing
        // could ever be appended again; and a crash closes the head, however empty it is.
        if coming > 0 && log.free.len() < FREE_MIN {
            return None;
        }
        let seg = self.choose()?;
        self.evict = Evict {
            current: Some(seg),
            moving: self.evict.moving,
            ..Evict::default()
        };
        Some((seg, true))
    }

    /// Looks through a segment that goes, as far as there is room for what is moved.
    pub fn sift(&mut self, seg: u32, contents: &mut impl Contents, now: u64) {
        let s = self.log.segments[seg as usize];
        if s.live == 0 {
            return;
        }
        let base = seg * self.log.segment_blocks;
        let data_blocks = self.log.data_blocks;
        if self.evict.at >= data_blocks {
            if self.evict.moving > 0 || now.saturating_sub(self.evict.scanned_ns) < RESCAN_NS {
                return;
            }
            self.evict.at = 0;
        }
        // Moving a segment that is nearly all dirty would only move it in a circle.
        let mostly_dirty = s.dirty * 4 > data_blocks * 3;
        // What is moved now would take the room of the records that free what was evicted.
        let short = self.log.free.is_empty();
        self.evict.wants_clean |= mostly_dirty || short && s.dirty > 0;
        let keep_max = if short {
            0
        } else {
            data_blocks - data_blocks / DROP_SHARE
        };
        let mut terms = Terms {
            starved: self.starved(),
            follows: false,
            dirty_stays: mostly_dirty || short,
            may_keep: keep_max > 0,
            may_keep_used: false,
            kept_most: self.kept_most(),
            now,
        };
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

    /// Clean blocks that can be kept, at most, so that eviction has something to drop.
    fn kept_most(&self) -> u64 {
        let blocks = u64::from(self.log.data_blocks);
        let segments = self.log.segments.len();
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
            terms.may_keep_used = self.evict.kept + n < keep_max;
            match contents.look(slot + n, terms) {
                Fate::Moves { alone } => {
                    n += 1;
                    if alone {
                        break;
                    }
                }
                Fate::Stays => break,
                Fate::Goes => {
                    self.drop_copy(slot + n, contents);
                    break;
                }
                Fate::Orphan => {
                    contents.drop_orphan(slot + n);
                    self.slot_emptied(slot + n, false);
                    break;
                }
            }
        }
        n
    }

    /// Drops what lies in a slot of a segment that goes as a whole.
    pub fn drop_copy(&mut self, slot: Slot, contents: &mut impl Contents) {
        let seq = self.log.segments[self.log.segment_of(slot)].seq;
        let dirty = contents.drop_copy(slot, seq);
        self.slot_emptied(slot, dirty);
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

    /// Blocks to be moved were read, or not. What shall go on is appended with
    /// [`append_moved`](Self::append_moved), and then [`moves_go_on`](Self::moves_go_on).
    pub fn move_read_ended(&mut self, slot: Slot, count: u32) {
        self.unpin_slot(slot);
        self.evict.moving -= count;
    }

    /// Appends a block that was read to be moved.
    pub fn append_moved(
        &mut self,
        kind: Kind,
        disk: u16,
        block: u64,
        data: BufSlice,
        crc: u32,
        token: U::Token,
    ) {
        self.evict.moving += 1;
        let item = Item::data(kind, disk, block, data, smallvec![crc], token);
        self.log.push(item);
    }

    /// What is moved need not gather if somebody waits for room; else it may, for every batch costs a
    /// block of flash.
    pub fn moves_go_on(&mut self, waited_for: bool) {
        self.log.urgent |= waited_for || self.log.free.len() < self.log.reserve();
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
        !(s.live > 0 || pinned || s.batches > 0 || self.evict.moving > 0)
    }

    /// Logs again what the segment says that still holds. True when nothing is left to wait for.
    pub fn say_again(&mut self, seg: u32, contents: &mut impl Contents) -> bool {
        if self.evict.relog_sent {
            return self.evict.relogged;
        }
        let seq = self.log.segments[seg as usize].seq;
        if self.closes_intents_of(seq) && !self.faults.has(Fault::FreeBeforeCloses) {
            took(Path::ClosingAwaited);
            // A batch that names the new tail before those records are in the log would leave a region
            // without its intent and with its old copies.
            self.log.urgent = true;
            return false;
        }
        let Some(records) = contents.still_said(seq) else {
            return false;
        };
        let Some(last) = records.len().checked_sub(1) else {
            return true;
        };
        let segment = self.log.summary_capacity;
        let head = self.log.head.as_ref();
        let room = head.map_or(0, |h| segment - h.entries.len());
        let free = self.log.free.len();
        if free > 0 && records.len() > room + free * segment {
            // A pool of an earlier version may have more runs of zeros than fit. What origins are told
            // is not logged again; those that are away are waited for. With nothing free it is the
            // rescue that helps, once the head is gone.
            self.evict.wants_clean = true;
            return false;
        }
        let here = head.map_or(self.log.next_segment_seq, |h| h.seq);
        for (i, said) in records.iter().enumerate() {
            let token = match i == last {
                true => U::Token::RELOGGED,
                false => U::Token::OWN,
            };
            self.log
                .record(said.kind, said.disk, said.block, said.count, token);
            contents.said_again(said, here);
        }
        self.evict.relog_sent = true;
        self.log.urgent = true;
        self.faults.has(Fault::RelogUnawaited)
    }

    /// What the segment that goes said is in the log again.
    pub fn relogged(&mut self) {
        self.evict.relogged = true;
    }

    /// Was something logged again that is not on flash yet? Where a record lies is noted when it is
    /// queued, so if that is as far as it got, nobody knows what still lies in the segment.
    pub fn is_relog_unsure(&self) -> bool {
        self.evict.relog_sent && !self.evict.relogged
    }

    /// The segment that went holds nothing any more.
    pub fn free_victim(&mut self, seg: u32) {
        self.forget_victim();
        self.evict.wants_clean = false;
        self.free_segment(seg);
    }

    /// No segment is about to go.
    fn forget_victim(&mut self) {
        self.evict.current = None;
    }

    /// A segment is no part of the log any more.
    pub fn not_a_victim(&mut self, seg: u32) {
        if self.evict.current == Some(seg) {
            self.forget_victim();
        }
    }

    /// Starts a flush if room is short and evicted segments wait for one.
    pub fn flush_to_free(&mut self, now: u64) {
        let (durable, applied) = (self.log.durable_ord, self.log.applied_ord);
        let waiting = self.log.freeing.iter().any(|seg| {
            let state = self.log.segments[*seg as usize].state;
            matches!(state, SegState::Freeing { ord, .. } if ord > durable && ord <= applied)
        });
        if waiting && self.log.free.len() < self.free_target() {
            self.flush(now);
        }
    }

    /// The segment that is on its way out, if one is: copies of it may be gone that the log still has.
    pub fn victim(&self) -> Option<u32> {
        self.evict.current
    }

    /// After a start: copies of this segment, if it would go next, may be gone that the log still has.
    pub fn resume_victim(&mut self, is_it: impl Fn(u32) -> bool) {
        self.evict.current = self.choose().filter(|seg| is_it(*seg));
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
        self.evict.current.is_some() || !self.log.freeing.is_empty()
    }

    /// Room is short, and what is dirty stands in the way.
    pub fn wants_clean(&self) -> bool {
        self.evict.wants_clean
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
