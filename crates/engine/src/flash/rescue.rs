//! A log without room for the record that would make room.
//!
//! A segment is free only after two more batches ([`crate::flash::append`]). When no segment is free and
//! the head is gone, those two cannot be written: because what was moved, or records nobody could
//! refuse, took the last segment, or because one crash after the other closed a head that was
//! hardly used. Waiting would not help, nor would starting again.
//!
//! The way out takes nothing from the log. Once the oldest segment holds nothing, the *floor* in the
//! superblock is raised past it: a segment below the floor does not count, as if a durable batch had
//! named that tail. Once both copies of the superblock are durable the segment is free.
//!
//! Before the floor rises all that was appended must be durable, for what was moved out of a
//! segment may be the only copy. What is still queued is not in the log, and of that the records
//! that void old copies matter: until they are there, an intent stands for them, which may lie in the
//! very segment that is to go. So if there are intents, a second floor is raised with the first:
//! no clean copy from before it counts after a crash, and then nothing needs to be void. That costs
//! the next start after a crash what was cached, and leaves out nobody who would have to be waited for.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashOp, Users};
use crate::flash::log::SegState;
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_io::{BLOCK, Buf, IoError};

/// Writes of the superblock that may fail in a row before the device counts as failed: as many as
/// segments are tried for a batch.
const STORE_TRIES: u32 = 4;

/// An intent that is closed in RAM; the record that says so is on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closing {
    /// Segment the intent lies in.
    pub seg_seq: u64,
    /// Of the record that closes it.
    pub ord: u64,
}

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
    /// Intents closed lately, whose records may not be on flash yet.
    pub closing: Vec<Closing>,
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
            && log.head.is_none()
            && log.batches.is_empty()
            && self.takes_writes()
            && !log
                .freeing
                .iter()
                .any(|s| match log.segments[*s as usize].state {
                    SegState::Trimming => true,
                    SegState::Freeing { ord, claimed } => claimed && ord <= log.applied_ord,
                    _ => false,
                })
    }

    /// Would a floor past what was evicted free something?
    pub fn floor_frees(&self) -> bool {
        let log = &self.log;
        let evicted = log
            .freeing
            .iter()
            .any(|s| matches!(log.segments[*s as usize].state, SegState::Freeing { .. }));
        evicted && !log.order.is_empty()
    }

    /// Stores a floor below which no segment counts. With `clean`, no clean copy that lies on flash so far
    /// counts after a crash, either.
    pub fn raise_floor(&mut self, clean: bool) {
        self.sb.log_floor = self.sb.log_floor.max(self.log.tail_seq());
        if clean {
            self.sb.clean_floor = self.log.next_segment_seq;
        }
        self.sb.generation += 1;
        self.store_copy(false);
    }

    /// Notes that the record with number `ord` closes an intent that lies in segment `seg_seq`.
    pub fn note_closing(&mut self, seg_seq: u64, ord: u64) {
        let applied = self.log.applied_ord;
        self.rescue.closing.retain(|c| c.ord > applied);
        self.rescue.closing.push(Closing { seg_seq, ord });
    }

    /// Are intents of segments up to number `seq` closed by records that are not in the log yet?
    pub fn closes_intents_of(&self, seq: u64) -> bool {
        let applied = self.log.applied_ord;
        let mut closing = self.rescue.closing.iter();
        closing.any(|c| c.seg_seq <= seq && c.ord > applied)
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
            return;
        }
        if let Err(e) = result {
            self.counters.flash_errors += 1;
            self.note_refusal(e);
            self.rescue.failures += 1;
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
                    if !self.release_below_floor() {
                        // The numbers on flash do not say what is oldest. It would be the same again.
                        self.fail(now);
                    }
                } else {
                    self.store_copy(true);
                }
            }
        }
    }

    /// False if nothing came free.
    fn release_below_floor(&mut self) -> bool {
        let mut any = false;
        for seg in self.log.freeing.clone() {
            let s = self.log.segments[seg as usize];
            if s.seq < self.sb.log_floor && matches!(s.state, SegState::Freeing { .. }) {
                self.release(seg);
                any = true;
            }
        }
        any
    }
}
