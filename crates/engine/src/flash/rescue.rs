//! A log without room for what would make room.
//!
//! To free a segment what still holds in it is logged again. When no segment is free and the head is gone,
//! that cannot be: because what was moved, or records nobody could refuse, took the last
//! segment, or because one crash after the other closed a head that was hardly used. Waiting would not
//! help, nor would starting again.
//!
//! The way out takes nothing from the log. The oldest segment is emptied without moving anything, and as nothing
//! older is left, nothing it says has to be said again about others. Once what was appended is durable the
//! map can say that it is free ([`crate::flash::map`]).
//!
//! What is still queued is not in the log, and of that the records
//! that void old copies matter: until they are there, an intent stands for them, which may lie in the
//! very segment that is to go. So if there are intents, a *floor* in the superblock is raised first:
//! no clean copy from before it counts after a crash, and then nothing needs to be void. That costs
//! the next start after a crash what was cached, and leaves out nobody who would have to be waited for.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashOp, Users};
use crate::flash::log::{SegState, Segment};
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_format::superblock::INCOMPAT_ORDER;
use hearth_io::{BLOCK, Buf, IoError};

/// Writes of the superblock that may fail in a row before the device counts as failed: as many as
/// segments are tried for a batch.
const STORE_TRIES: u32 = 4;

/// The ord of a segment that is empty and goes only together with others.
pub(in crate::flash) const HELD: u64 = u64::MAX;

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A copy is being written; `last`: the second one.
    Write { last: bool },
    /// It is being flushed.
    Flush { last: bool },
}

/// The rescue's state.
#[derive(Debug, Default)]
pub(crate) struct Rescue {
    step: Option<Step>,
    failures: u32,
    /// The segment that goes when the floor is stored.
    frees: Option<u32>,
    /// Number of the record that closed an intent last.
    pub closing: u64,
}

impl<U: Users> FlashDevice<U> {
    /// A floor is being stored.
    pub fn is_rescuing(&self) -> bool {
        self.rescue.step.is_some()
    }

    /// Nothing can be appended, and nothing that is under way will change that.
    pub fn starved(&self) -> bool {
        let log = &self.log;
        log.free.is_empty()
            && log.parked.is_empty()
            && log.is_headless()
            && log.batches.is_empty()
            && self.takes_writes()
            && !self.map.is_storing()
            && !log
                .freeing
                .iter()
                .any(|s| match log.segments[*s as usize].state {
                    SegState::Trimming => true,
                    // None goes before those that wait for each other.
                    SegState::Freeing { ord } => ord <= log.applied_ord && !self.any_held(),
                    _ => false,
                })
    }

    /// Do segments wait for each other, of which nothing was said again?
    pub fn any_held(&self) -> bool {
        let state = |seg: &u32| self.log.segments[*seg as usize].state;
        let held = SegState::Freeing { ord: HELD };
        self.log.freeing.iter().any(|seg| state(seg) == held)
    }

    /// The oldest of all segments that count after a crash.
    pub fn oldest(&self) -> Option<u32> {
        let counts = |s: &Segment| match s.state {
            SegState::Freeing { ord } => ord != HELD,
            state => state == SegState::Closed,
        };
        let segments = (0..).zip(&self.log.segments).filter(|(_, s)| counts(s));
        segments.min_by_key(|(_, s)| s.seq).map(|(seg, _)| seg)
    }

    /// Is nothing older there but what goes with it or before?
    pub fn is_oldest(&self, seg: u32) -> bool {
        let Segment {
            seq, last_batch, ..
        } = self.log.segments[seg as usize];
        if self.has_heads() {
            // What was written beside it is no newer.
            let beside = |s: &Segment| {
                matches!(
                    s.state,
                    SegState::Closed | SegState::Open | SegState::Freeing { ord: HELD }
                ) && s.seq != seq
                    && s.first_batch <= last_batch
            };
            return !self.log.segments.iter().any(beside);
        }
        let older = |s: &Segment| s.state == SegState::Closed && s.seq < seq;
        !self.log.segments.iter().any(older)
    }

    /// The oldest segment, if it is empty, and free only once records are durable for which there is no room.
    pub fn oldest_waits(&self) -> Option<u32> {
        let state = |seg: &u32| self.log.segments[*seg as usize].state;
        let oldest = self.oldest();
        oldest.filter(|seg| matches!(state(seg), SegState::Freeing { .. }))
    }

    /// The oldest segment cannot be read, so what it says stays, and nothing that speaks of it can go.
    pub fn oldest_stays(&self) -> bool {
        let oldest = self.oldest();
        oldest.is_some_and(|seg| !self.log.order.contains(&seg) && self.oldest_waits().is_none())
    }

    /// The oldest segment needs no record to go: it goes with the next map.
    pub fn waits_no_more(&mut self, seg: u32) {
        if matches!(
            self.log.segments[seg as usize].state,
            SegState::Freeing { .. }
        ) {
            let ord = self.unsaid_ord();
            self.log.segments[seg as usize].state = SegState::Freeing { ord };
        } else {
            self.free_victim(seg, self.unsaid_ord());
        }
        self.let_held_go();
        self.store_map();
    }

    /// When a segment may go of which nothing is said again: at once; where others were written beside it, with them.
    pub fn unsaid_ord(&self) -> u64 {
        match self.has_heads() {
            true => HELD,
            false => self.log.applied_ord,
        }
    }

    /// Segments of which nothing is said again go when all that began before the last of them ended goes, too. Until
    /// then no other goes: what it says may be all that makes a copy void that they hold, and nobody counts those any more.
    pub fn let_held_go(&mut self) {
        if !self.any_held() {
            return;
        }
        let held = |s: &Segment| s.state == SegState::Freeing { ord: HELD };
        let all = &self.log.segments;
        let end = all.iter().filter(|s| held(s)).map(|s| s.last_batch).max();
        let end = end.unwrap_or(0);
        let durable = self.log.durable_ord;
        let stays = |s: &Segment| match s.state {
            SegState::Closed | SegState::Open => s.first_batch <= end,
            SegState::Freeing { ord } => ord != HELD && ord > durable && s.first_batch <= end,
            _ => false,
        };
        if all.iter().any(stays) {
            return;
        }
        let ord = self.log.applied_ord;
        for s in self.log.segments.iter_mut().filter(|s| held(s)) {
            s.state = SegState::Freeing { ord };
        }
    }

    /// Stores a floor below which no clean copy counts after a crash; then segment `seg`, which is empty, goes.
    pub fn raise_floor(&mut self, seg: u32) {
        if !self.faults.has(Fault::NoCleanFloor) {
            self.sb.clean_floor = self.log.next_segment_seq;
        }
        self.rescue.frees = Some(seg);
        self.sb.generation += 1;
        self.store_copy(false);
    }

    /// Stores a floor below which marks of ordered disks, and clean copies, do not count after a crash.
    pub fn store_floor(&mut self) {
        self.sb.clean_floor = self.log.next_segment_seq;
        self.sb.generation += 1;
        self.store_copy(false);
    }

    /// May the log have marks of ordered disks? If that is not noted on the device yet, it is begun.
    pub fn may_mark(&mut self) -> bool {
        // One who writes the superblock at a time.
        let free = !self.is_rescuing() && !self.is_losing();
        if !self.order_noted && free && self.takes_writes() {
            self.sb.incompat |= INCOMPAT_ORDER;
            self.sb.generation += 1;
            self.store_copy(false);
        }
        self.order_noted
    }

    /// The record with number `ord` closes an intent.
    pub fn note_closing(&mut self, ord: u64) {
        self.rescue.closing = ord;
    }

    /// Are intents closed by records that are not in the log yet?
    pub fn is_closing(&self) -> bool {
        self.rescue.closing > self.log.applied_ord
    }

    /// Stores the superblock as it is. Nobody else stores it.
    pub(in crate::flash) fn store_sb(&mut self) {
        self.sb.generation += 1;
        self.store_copy(false);
    }

    /// Writes the copy of the superblock that is not known to be good, or is the older one.
    fn store_copy(&mut self, last: bool) {
        let copy = 1 - (self.sb.copy & 1);
        let mut next = self.sb.clone();
        next.copy = copy;
        let bytes = next.encode();
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        buf.bytes_mut().copy_from_slice(&bytes[..]);
        self.rescue.step = Some(Step::Write { last });
        let offset = SUPERBLOCK_BLOCKS[usize::from(copy)] * BLOCK;
        let io = Io::write(self.target(), offset, [buf]);
        self.out.send(FlashOp::Floor, io);
    }

    /// One step of storing the floor ended.
    pub fn floor_ended(&mut self, result: &Result<(), IoError>, now: u64) {
        let step = self.rescue.step.take();
        let step = step.expect("the floor is being stored");
        if !self.takes_writes() {
            // What notes that flash was given up may wait behind what notes that a device is lost.
            return self.superblock_is_free();
        }
        self.floor_step(step, result, now);
        if !self.is_rescuing() {
            self.superblock_is_free();
        }
    }

    fn floor_step(&mut self, step: Step, result: &Result<(), IoError>, now: u64) {
        if let Err(e) = result {
            self.counters.flash_errors += 1;
            self.note_refusal(e);
            self.rescue.failures += 1;
            self.area_not_stored();
            let flush = matches!(step, Step::Flush { .. });
            if flush || self.rescue.failures > STORE_TRIES {
                self.fail(now);
            }
            return;
        }
        match step {
            Step::Write { last } => {
                self.rescue.step = Some(Step::Flush { last });
                self.out.send(FlashOp::Floor, Io::flush(self.target()));
            }
            Step::Flush { last } => {
                self.sb.copy = 1 - (self.sb.copy & 1);
                if last || self.faults.has(Fault::RescueOneCopy) {
                    self.rescue.failures = 0;
                    self.order_noted = self.sb.incompat & INCOMPAT_ORDER != 0;
                    if let Some(seg) = self.rescue.frees.take() {
                        self.waits_no_more(seg);
                    }
                    self.area_stored();
                } else {
                    self.store_copy(true);
                }
            }
        }
    }
}
