//! A log without room for the record that would make room.
//!
//! A segment is free only after two more batches ([`crate::flash::append`]). When no segment is free and
//! the head is gone, those two cannot be written: because what was moved, or records nobody could
//! refuse, took the last segment, or because one crash after the other closed a head that was
//! hardly used. Waiting would not help, nor would starting again.
//!
//! The way out takes nothing from the log. Nothing is moved any more: of the oldest segment, clean
//! blocks are dropped and dirty ones destaged. Then the *floor* in the superblock is
//! raised past it: a segment below the floor does not count, as if a durable batch had named that
//! tail. Once both copies of the superblock are durable the segment is free.
//!
//! Before the floor rises all that was appended must be durable, for what was moved out of a
//! segment may be the only copy. What is still queued is not in the log, and of that the records
//! that void old copies matter: until they are there, an intent stands for them, which may lie in the
//! very segment that is to go. So if there are intents, a second floor is raised with the first:
//! no clean copy from before it counts after a crash, and then nothing needs to be void. That costs
//! the next start after a crash what was cached, and leaves out nobody who would have to be waited for.

use crate::api::{DiskId, Effects};
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::FlashOp;
use crate::flash::log::{Apply, SegState, Then};
use crate::paths::{Path, took};
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

impl Core {
    /// Nothing can be appended, and nothing that is under way will change that.
    pub fn starved(&self) -> bool {
        let log = &self.flash.log;
        log.free.is_empty()
            && log.head.is_none()
            && log.batches.is_empty()
            && !self.flash.failed
            && !log
                .freeing
                .iter()
                .any(|s| match log.segments[*s as usize].state {
                    SegState::Trimming => true,
                    SegState::Freeing { ord, claimed } => claimed && ord <= log.applied_ord,
                    _ => false,
                })
    }

    /// Raises the floor if the log is starved and something would come free. True while eviction
    /// should wait for that.
    pub fn rescue_step(&mut self, now: u64, fx: &mut Effects) -> bool {
        if self.flash.rescue.step.is_some() {
            return true;
        }
        if !self.starved() || self.opts.faults.has(Fault::StarveForever) {
            return false;
        }
        self.cancel_moves();
        self.flash.evict.wants_clean = true;
        let evicted = self.flash.log.freeing.iter().any(|s| {
            matches!(
                self.flash.log.segments[*s as usize].state,
                SegState::Freeing { .. }
            )
        });
        if !evicted || self.flash.log.order.is_empty() {
            return false;
        }
        if self.flash.log.durable_seq < self.flash.log.applied_seq
            && !self.opts.faults.has(Fault::RescueUndurable)
        {
            self.start_flash_flush(now, fx);
            return true;
        }
        self.flash.sb.log_floor = self.flash.sb.log_floor.max(self.flash.log.tail_seq());
        took(Path::Rescue);
        self.give_up_intents();
        self.flash.sb.generation += 1;
        self.store_copy(false, fx);
        true
    }

    /// Makes intents needless by raising the floor of clean copies. Regions being written get new
    /// ones, for what is cached from now on; those not yet durable stay, somebody waits for them.
    fn give_up_intents(&mut self) {
        let any = self
            .disks
            .iter()
            .flatten()
            .any(|d| !d.origin.intents.is_empty());
        if !any && !self.closes_intents_of(u64::MAX) {
            return;
        }
        took(Path::CleanFloorRaised);
        if !self.opts.faults.has(Fault::NoCleanFloor) {
            self.flash.sb.clean_floor = self.flash.log.next_segment_seq;
        }
        self.cancel_fills();
        self.flash.rescue.closing.clear();
        let mut again = Vec::new();
        for d in self.disks.iter_mut().flatten() {
            if !d.origin.intents.is_empty() {
                took(Path::IntentGivenUp);
            }
            // What is cached from now on has no intent that says whether the origin flushed it.
            d.origin.sync.unguard();
            let regions = d.origin.intents.give_up();
            again.extend(regions.into_iter().map(|region| (d.cfg.id, region)));
        }
        for (disk, region) in again {
            self.record_intent(disk, region);
        }
        self.everyone_is_ready();
    }

    /// True if intents in segments up to number `seq` were closed, and the records that say so are not in the log yet.
    pub fn closes_intents_of(&self, seq: u64) -> bool {
        let applied = self.flash.log.applied_ord;
        let mut closing = self.flash.rescue.closing.iter();
        closing.any(|c| c.seg_seq <= seq && c.ord > applied)
    }

    /// What was to be moved stays where it is: there is no place for it.
    fn cancel_moves(&mut self) {
        if self.flash.evict.moving == 0 {
            return;
        }
        let mut moves: Vec<(SlotNo, u32, bool, DiskId)> = Vec::new();
        self.flash.log.queue.retain(|item| {
            let Apply::Move { old, .. } = item.apply else {
                return true;
            };
            let counts = matches!(item.then, Then::Moved);
            moves.push((old, item.count, counts, item.disk));
            false
        });
        for (old, count, counts, disk) in moves {
            self.ready.touch(disk);
            self.flash.evict.moving -= u32::from(counts);
            for slot in old..old + count {
                self.cache.index.set_mark(slot, false);
            }
        }
        self.flash.log.requeue(Vec::new());
    }

    /// Copies that wait to be appended would lie above the floor, and the intents that may say they
    /// are void in front of it. What they replace is below it and needs no other record.
    fn cancel_fills(&mut self) {
        let mut tickets = Vec::new();
        self.flash.log.queue.retain(|item| match item.then {
            Then::Ticket { disk, ticket } => {
                tickets.push((disk, ticket));
                false
            }
            _ => true,
        });
        for (disk, ticket) in tickets {
            let d = self.known_mut(disk);
            d.drop_ticket(ticket);
            self.ready.touch(disk);
        }
        self.flash.log.requeue(Vec::new());
    }

    /// Drops the block in a slot of the oldest segment if the origin has it. Without a record: the
    /// segment goes as a whole. That a write to the block is queued is no obstacle, it does
    /// not need the old content.
    pub fn drop_clean(&mut self, slot: SlotNo, now: u64) {
        let Some(info) = self.cache.index.slot(slot) else {
            return;
        };
        if info.dirty || self.cache.index.slot_mark(slot) {
            return;
        }
        if self.drop_orphan(slot) {
            return;
        }
        let (disk, block) = (info.key.disk(), info.key.block());
        self.evict_block(disk, block, slot, now);
    }

    /// The origin has a block of the oldest segment durably, and a newer write to it is queued: it
    /// cannot be called clean in the log, but dropped with its segment.
    pub fn let_go(&mut self, disk: DiskId, block: u64, slot: SlotNo, now: u64) {
        let oldest = self.flash.log.order.front().copied();
        let here = self.cache.index.get(Key::new(disk, block)) == Some(slot);
        if here && oldest == Some(self.flash.log.segment_of(slot) as u32) {
            self.evict_block(disk, block, slot, now);
        }
    }

    /// Does nothing in the segment need to be logged again? Zeros are destaged until that is so;
    /// intents are given up.
    pub fn needs_no_relog(&self, seg: u32) -> bool {
        let seq = self.flash.log.segments[seg as usize].seq;
        // Where a record lies is noted when it is queued, so if that is as far as it got, nobody
        // knows what still lies here.
        let unsure = self.flash.evict.relog_sent && !self.flash.evict.relogged;
        let mut noted = self.ready.noted.iter().filter_map(|disk| self.disk(disk));
        noted.all(|d| match d.zero_seg_seq {
            _ if unsure => d.zero.is_empty(),
            z => d.zero.is_empty() || z.is_none_or(|z| z > seq),
        })
    }

    /// Writes the copy of the superblock that is not known to be good, or is the older one.
    fn store_copy(&mut self, last: bool, fx: &mut Effects) {
        let copy = 1 - (self.flash.sb.copy & 1);
        let mut next = self.flash.sb.clone();
        next.copy = copy;
        let bytes = next.encode();
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        buf.bytes_mut().copy_from_slice(&bytes[..]);
        self.flash.rescue.step = Some(Step::Write { last });
        let offset = SUPERBLOCK_BLOCKS[usize::from(copy)] * BLOCK;
        let io = Io::write(self.flash.target(), offset, [buf]);
        self.io(fx, FlashOp::Floor.into(), io);
    }

    /// One step of storing the floor ended.
    pub fn floor_stored(&mut self, result: Result<(), IoError>, now: u64, fx: &mut Effects) {
        let step = self.flash.rescue.step.take();
        let step = step.expect("the floor is being stored");
        if self.flash.failed {
            return;
        }
        if let Err(e) = &result {
            self.flash.counters.flash_errors += 1;
            self.note_refusal(e);
            self.flash.rescue.failures += 1;
            let flush = matches!(step, Step::Flush { .. });
            if flush || self.flash.rescue.failures > STORE_TRIES {
                self.fail_flash(now, fx);
            }
            return;
        }
        match step {
            Step::Write { last } => {
                self.flash.rescue.step = Some(Step::Flush { last });
                self.io(fx, FlashOp::Floor.into(), Io::flush(self.flash.target()));
            }
            Step::Flush { last } => {
                self.flash.sb.copy = 1 - (self.flash.sb.copy & 1);
                if last || self.opts.faults.has(Fault::RescueOneCopy) {
                    self.flash.rescue.failures = 0;
                    if !self.release_below_floor(fx) {
                        // The numbers on flash do not say what is oldest. It would be the same again.
                        self.fail_flash(now, fx);
                    }
                } else {
                    self.store_copy(true, fx);
                }
            }
        }
    }

    /// False if nothing came free.
    fn release_below_floor(&mut self, fx: &mut Effects) -> bool {
        let mut any = false;
        for seg in self.flash.log.freeing.clone() {
            let s = self.flash.log.segments[seg as usize];
            if s.seq < self.flash.sb.log_floor && matches!(s.state, SegState::Freeing { .. }) {
                self.release(seg, fx);
                any = true;
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, EngineOptions};
    use hearth_format::{Layout, Superblock, Uuid};
    use hearth_io::IoOp;

    /// A full log, of which the oldest segment is empty and has the number `freed`; the floor is raised
    /// as often as the engine asks for it.
    fn rescued(freed: u64) -> Core {
        let layout = Layout::for_device(16 << 20, 256).expect("it fits");
        let uuid = Uuid::from_u128(1);
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let mut core = Engine::blank(sb, EngineOptions::default(), &[]);
        core.flash.log.free.clear();
        for (seg, s) in core.flash.log.segments.iter_mut().enumerate() {
            s.seq = 10 + seg as u64;
            s.state = SegState::Closed;
            core.flash.log.order.push_back(seg as u32);
        }
        core.flash.log.order.pop_front();
        core.flash.log.segments[0].seq = freed;
        let ord = core.note_tail();
        core.flash.log.segments[0].state = SegState::Freeing {
            ord,
            claimed: false,
        };
        core.flash.log.freeing.push(0);
        let mut fx = Effects::default();
        // Two copies, each with a flush behind it.
        for _ in 0..4 {
            core.rescue_step(0, &mut fx);
            let ops: Vec<IoOp> = fx.ios.drain(..).collect();
            assert_eq!(ops.len(), 1, "one step after the other");
            core.floor_stored(Ok(()), 0, &mut fx);
        }
        core
    }

    #[test]
    fn a_floor_below_which_nothing_lies_is_not_raised_for_ever() {
        let core = rescued(10);
        assert!(!core.flash.failed && !core.starved());
        assert_eq!(core.flash.log.segments[0].state, SegState::Trimming);
        // The next one has that number too.
        let core = rescued(11);
        assert!(core.flash.failed);
    }
}
