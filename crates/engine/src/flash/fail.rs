//! Flash that refuses writes, and flash that has died.
//!
//! A failed batch is sent again, with all that followed it, into another segment: a sparse
//! flash file on a full file system may still have room in segments written before. When that
//! fails too often in a row, or a device flush or many reads fail, the device counts as failed:
//! nothing is appended any more, clean data comes from the origins, writes go to the origins,
//! and what is dirty is read from flash as long as it answers. The disks go on (invariant 7).
//!
//! A dirty block that a failed device does not give back, not even when read alone, is listed as
//! lost ([`Core::strike`]), so that somebody can learn of it and accept it. The destager tries all
//! of them, whether or not a guest asks. While the device counts as sound the next read may succeed, so
//! it takes several, seconds apart; but one bad sector must not hold up eviction, nor a flush of its
//! disk, for ever.
//!
//! Flash may also be left although it gives back what it holds ([`FlashFault`]): the file system under
//! it is full, or its file was removed under us. The disks then go on in the same way, and the
//! destager empties it.

use crate::api::{DiskId, Effects, FlashFault};
use crate::cache::index::SlotNo;
use crate::core::Core;
use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::append::unsent;
use crate::flash::device::FlashOp;
use crate::flash::log::{Apply, BatchState, SegState, Then};
use crate::paths::{Path, took};
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_format::superblock::PoolState;
use hearth_io::{BLOCK, Buf, IoError, OpKind};

/// What a flush may say of a disk that has something dirty on flash which is written no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Promise {
    /// Nothing.
    None,
    /// It is durable where it is.
    Durable,
    /// Only what the origin has will last, or that is not known yet: ask again.
    Later,
}

/// Segments tried before the device counts as failed; it does so too when none is left to try.
const SEGMENT_TRIES: u32 = 4;

/// How long the note of the failure may take.
const MARK_TIME_NS: u64 = 2_000_000_000;

/// Where it stands durably that flash was given up, so that no later start believes what is old on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Noted {
    /// It was not given up, or whoever gave it up sees to the note.
    #[default]
    Unasked,
    /// The superblock is being written.
    Asked,
    /// On flash, or in another place that a start looks at.
    Stored,
    /// Nowhere: flash took no copy of the superblock, or not in time.
    Nowhere,
}

/// The note of the failure is on its way to the device.
#[derive(Debug)]
pub(crate) struct FailMark {
    /// Which copy of the superblock is being written or flushed.
    copy: u8,
    /// Every step so far for this copy went well.
    sound: bool,
    /// It is the first of the two: the other follows.
    first: bool,
    until_ns: u64,
    /// Nobody waits any more; once it is written it is flushed all the same.
    pub late: bool,
}

/// How a read of flash failed with an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unread {
    /// It was of this one block; otherwise any block of the run may be the culprit.
    pub alone: bool,
}

/// Places that fail to be read, with no success between, after which the device counts as failed.
const READ_ERRORS_MAX: usize = 32;

/// Times a sound device must refuse a dirty block alone before the block counts as lost, and the pause
/// after the first; it doubles.
const REFUSALS_MAX: u32 = 4;
const REFUSAL_PAUSE_NS: u64 = 1_000_000_000;

/// How often a sound device has refused a dirty block that was read alone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refusals {
    count: u32,
    not_before_ns: u64,
}

impl Refusals {
    /// It is too early to ask again.
    pub fn waits(self, now: u64) -> bool {
        now < self.not_before_ns
    }
}

impl Core {
    /// A read of flash failed. One alone says little; many without a success between them do.
    pub fn flash_read_failed(&mut self, now: u64, fx: &mut Effects) {
        if self.flash.read_errors.len() > READ_ERRORS_MAX {
            self.flash.full = false;
            self.fail_flash(now, fx);
        }
    }

    /// A dirty block could not be read from flash. True if it is worth reading once more at once,
    /// alone; on a failed device the second time it is lost. So a block costs at most two failed reads
    /// and one more for the run it was first read in.
    pub fn strike(
        &mut self,
        disk: DiskId,
        block: u64,
        slot: SlotNo,
        unread: Unread,
        now: u64,
    ) -> bool {
        let sound = !self.flash.failed;
        let hasty = self.opts.faults.has(Fault::LoseTooSoon);
        let d = self.known_mut(disk);
        d.doubtful.insert(block);
        if !unread.alone {
            return true;
        }
        if sound {
            let refused = d.refusals.entry(block).or_default();
            if !refused.waits(now) {
                refused.not_before_ns = now + (REFUSAL_PAUSE_NS << refused.count);
                refused.count += 1;
            }
            if refused.count >= REFUSALS_MAX || hasty {
                took(Path::LostOnSoundFlash);
                self.lose(disk, block, slot);
            }
            return false;
        }
        if d.refused.insert(block) {
            return true;
        }
        if self.opts.faults.has(Fault::HideUnreadable) {
            self.cache.index.set_lost(slot);
            return false;
        }
        self.lose(disk, block, slot);
        false
    }

    /// A batch failed. Once all in flight have ended, sends them again elsewhere.
    pub fn retry_failed(&mut self, now: u64, fx: &mut Effects) {
        if self
            .flash
            .log
            .batches
            .iter()
            .any(|b| b.state == BatchState::InFlight)
        {
            return;
        }
        let first = self.flash.log.batches.front();
        let seq = first.expect("a batch has failed").seq;
        self.flash.log.failures += 1;
        if self.flash.log.failures > SEGMENT_TRIES || self.flash.log.free.is_empty() {
            self.fail_flash(now, fx);
            return;
        }
        // The head (and a segment being sealed) with failed batches get no summary: recovery
        // walks them and finds the batches again, with the same numbers, in a later segment.
        let sealing = std::mem::take(&mut self.flash.log.sealing);
        for s in sealing {
            if s.last_batch >= seq {
                self.unpin(s.seg);
                if s.first_batch >= seq {
                    took(Path::SegmentBad);
                    // Nothing of it is on flash, and a tail must not be looked for there.
                    self.flash.log.order.retain(|seg| *seg != s.seg);
                    self.flash.log.segments[s.seg as usize].state = SegState::Bad;
                    self.flash.evict.current = self.flash.evict.current.filter(|seg| *seg != s.seg);
                }
            } else {
                self.flash.log.sealing.push(s);
            }
        }
        if let Some(head) = self.flash.log.head.take() {
            let unused = head.first_batch >= seq;
            let s = &mut self.flash.log.segments[head.seg as usize];
            // A segment that never took a batch is left alone for this run.
            s.state = if unused {
                took(Path::SegmentBad);
                SegState::Bad
            } else {
                SegState::Closed
            };
            if !unused {
                self.flash.log.order.push_back(head.seg);
            }
        }
        if self.too_few_segments() {
            self.fail_flash(now, fx);
            return;
        }
        took(Path::BatchSentAgain);
        // Trimming gives space away that a full file system will not give back.
        self.opts.trim = false;
        let items = unsent(&mut self.flash.log);
        self.flash.log.requeue(items);
        if !self.opts.faults.has(Fault::ResendRenumbered) {
            self.flash.log.next_batch_seq = seq;
        }
        self.pump(now, fx);
    }

    /// So many segments refused writes that the log can go round no more: with the reserve and the head
    /// there must be one to evict, or who waits for room would wait for ever.
    fn too_few_segments(&self) -> bool {
        let log = &self.flash.log;
        let usable = log.segments.iter().filter(|s| s.state != SegState::Bad);
        usable.count() < log.reserve() + 2
    }

    /// Remembers whether flash refuses writes for want of room only.
    pub fn note_refusal(&mut self, error: &IoError) {
        self.flash.full = error.is_no_space();
    }

    /// The flash device has failed: from here on the origins carry the disks.
    pub fn fail_flash(&mut self, now: u64, fx: &mut Effects) {
        let fault = if self.flash.full {
            FlashFault::Unwritable
        } else {
            FlashFault::Broken
        };
        self.give_flash_up(fault, true, now, fx);
    }

    /// From here on the origins carry the disks. With `mark`, flash itself is told.
    pub fn give_flash_up(&mut self, fault: FlashFault, mark: bool, now: u64, fx: &mut Effects) {
        if self.flash.failed {
            // It may get worse, never better.
            if self.flash.fault == Some(FlashFault::Unwritable) || fault == FlashFault::Broken {
                self.flash.fault = Some(fault);
            }
            return;
        }
        took(match fault {
            FlashFault::Broken => Path::FlashBroken,
            FlashFault::Unwritable | FlashFault::Leaving => Path::FlashUnwritable,
        });
        self.flash.failed = true;
        self.flash.fault = Some(fault);
        if mark {
            self.mark_failed(now, fx);
        }
        for s in std::mem::take(&mut self.flash.log.sealing) {
            if !self.opts.faults.has(Fault::GivenUpStaysPinned) {
                self.unpin(s.seg);
            }
        }
        let items = unsent(&mut self.flash.log);
        self.flash.log.clear_queue();
        let mut requests = Vec::new();
        for item in items {
            if let Apply::Move { old, .. } = item.apply {
                // Not moved after all: the destager may have it.
                for i in 0..item.count {
                    self.cache.index.set_mark(old + i, false);
                }
            }
            match item.then {
                Then::Request(id) => requests.push(id),
                Then::Ticket { disk, ticket } => {
                    let d = self.known_mut(disk);
                    d.drop_ticket(ticket);
                }
                Then::Moved => self.flash.evict.moving -= 1,
                _ => {}
            }
        }
        requests.extend(self.reqs.stalled.drain(..));
        requests.extend(self.reqs.stalled_through.drain(..));
        requests.sort_unstable();
        requests.dedup();
        self.fail_flash_waiters(now, fx);
        for id in requests {
            // They hold their ranges: nobody else has ended them.
            self.divert(id, now, fx);
        }
        for disk in self.disk_ids() {
            self.wake_clean_waiters(disk, now, fx);
        }
        self.everyone_is_ready();
    }

    /// What is dirty on flash that failed may or may not be there; on flash that is full it is as
    /// durable as before; what was removed under us is gone after a power cut, so there a flush
    /// waits until the origin has all, rather than end the guest's file system with an error.
    pub fn promise_of_left_flash(&self, disk: DiskId) -> Promise {
        if self.disk(disk).is_none_or(|d| !d.lost.is_empty()) {
            return Promise::None;
        }
        match self.flash.fault {
            Some(FlashFault::Leaving) => Promise::Later,
            Some(FlashFault::Unwritable)
                if self.flash.log.durable_ord >= self.flash.log.applied_ord =>
            {
                Promise::Durable
            }
            // Its flush covers the log.
            Some(FlashFault::Unwritable) if self.flash.mark.as_ref().is_some_and(|m| !m.late) => {
                Promise::Later
            }
            _ => Promise::None,
        }
    }

    /// Asks again for flushes that had to wait.
    pub fn retry_leaving_flushes(&mut self, now: u64, fx: &mut Effects) {
        for id in std::mem::take(&mut self.reqs.leaving_flushes) {
            self.start_flush(id, now, fx);
        }
    }

    /// Tries to note the failure on the device itself, so that a later start asks before it
    /// trusts what is dirty there. Writes past the cache wait for that: once the origin has them,
    /// what flash has of those blocks is old, and nothing else would say so after a crash.
    ///
    /// One copy of the superblock after the other, each with a flush behind it, and the one that is not
    /// known to be good first: a power cut in between leaves a whole one.
    fn mark_failed(&mut self, now: u64, fx: &mut Effects) {
        self.flash.noted = Noted::Asked;
        self.flash.sb.state = PoolState::Failed;
        self.flash.sb.generation += 1;
        let copy = 1 - (self.flash.sb.copy & 1);
        self.flash.mark = Some(FailMark {
            copy,
            sound: true,
            first: true,
            until_ns: now + MARK_TIME_NS,
            late: false,
        });
        self.write_mark(copy, fx);
    }

    fn write_mark(&mut self, copy: u8, fx: &mut Effects) {
        let mut sb = self.flash.sb.clone();
        sb.copy = copy;
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        buf.bytes_mut().copy_from_slice(&sb.encode()[..]);
        let offset = SUPERBLOCK_BLOCKS[usize::from(copy & 1)] * BLOCK;
        let io = Io::write(self.flash.target(), offset, [buf]).in_background();
        self.io(fx, FlashOp::Mark.into(), io);
    }

    /// A write of the note, or its flush, has ended, well or not: a device that does not take the
    /// note may give old data back after a crash all the same. So the other copy is tried even then, and if
    /// that is no better, whoever runs the engine has until the deadline to note it elsewhere
    /// ([`noted_elsewhere`](Self::noted_elsewhere)) before the disks go on.
    pub fn mark_stored(&mut self, kind: OpKind, ok: bool, now: u64, fx: &mut Effects) {
        // Noted elsewhere, with this still on its way: nobody waits for it.
        let Some(mark) = self.flash.mark.as_mut() else {
            return;
        };
        mark.sound &= ok;
        if kind != OpKind::Flush {
            return self.io(fx, FlashOp::Mark.into(), Io::flush(self.flash.target()));
        }
        if ok {
            // It covers the log as well, and nothing is appended any more.
            self.flash.log.durable_ord = self.flash.log.applied_ord;
            self.flash.log.durable_seq = self.flash.log.applied_seq;
        } else {
            self.flash.fault = Some(FlashFault::Broken);
        }
        if mark.sound {
            self.flash.sb.copy = mark.copy;
            self.flash.noted = Noted::Stored;
        }
        if !mark.first {
            if self.flash.noted != Noted::Stored {
                took(Path::FailureUnnoted);
                self.flash.noted = Noted::Nowhere;
                if !mark.late {
                    return;
                }
            }
            return self.end_mark(now, fx);
        }
        (mark.copy, mark.sound, mark.first) = (1 - mark.copy, true, false);
        let copy = mark.copy;
        self.write_mark(copy, fx);
    }

    /// Does not wait for ever: a device may hang.
    pub fn end_late_mark(&mut self, now: u64, fx: &mut Effects) {
        if let Some(m) = self
            .flash
            .mark
            .as_mut()
            .filter(|m| !m.late && now >= m.until_ns)
        {
            m.late = true;
            if self.flash.noted != Noted::Stored {
                self.flash.noted = Noted::Nowhere;
            }
            self.wake_mark_waiters(now, fx);
        }
    }

    /// A later start will see in another place that flash was given up.
    pub fn noted_elsewhere(&mut self, now: u64, fx: &mut Effects) {
        if self.flash.noted == Noted::Nowhere {
            self.flash.noted = Noted::Stored;
            self.end_mark(now, fx);
        }
    }

    fn end_mark(&mut self, now: u64, fx: &mut Effects) {
        self.flash.mark = None;
        self.wake_mark_waiters(now, fx);
    }

    fn wake_mark_waiters(&mut self, now: u64, fx: &mut Effects) {
        for id in std::mem::take(&mut self.reqs.mark_waiters) {
            self.go_through(id, now, fx);
        }
    }
}
