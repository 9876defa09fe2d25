//! Flash that refuses writes, and flash that has died.
//!
//! A failed batch is sent again, with all that followed it, into another segment: a sparse
//! flash file on a full file system may still have room in segments written before. When that
//! fails too often in a row, or a device flush or many reads fail, the device counts as failed:
//! nothing is appended any more, and whoever waits for it is told. What the disks then do is for
//! others to say; the device tells what may still be promised of what lies on it ([`Promise`]).
//!
//! Flash may also be left although it gives back what it holds ([`FlashFault`]): the file system under
//! it is full, or its file was removed under us.

use crate::api::FlashFault;
use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::append::unsent;
use crate::flash::device::{FlashDevice, FlashEvent, FlashOp, Users};
use crate::flash::devices::Part;
use crate::flash::log::{Batch, BatchState, SegState, last_through};
use crate::paths::{Path, took};
use hearth_format::BatchMark;
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_format::superblock::PoolState;
use hearth_io::{BLOCK, Buf, IoDone, IoError, OpKind};
use std::collections::BTreeSet;

/// Blocks in a row whose checksums do not match after which the device counts as failed: 1 MiB.
const ROT_MAX: u64 = 256;
/// Sound blocks that weigh as much as one whose checksum does not match.
const ROT_SHARE: u64 = 64;
/// Blocks that a segment counts for of which neither the summary nor a batch is there.
const ROT_OF_SEGMENT: u64 = 128;

/// The rate of blocks that do not hold what was written there. Single ones rot; many among few reads mean that
/// something has erased or overwritten the device.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::flash) struct Rot(u64);

impl Rot {
    pub fn add_bad(&mut self, blocks: u64) {
        self.0 += blocks * ROT_SHARE;
    }

    pub fn add_sound(&mut self, blocks: u64) {
        self.0 = self.0.saturating_sub(blocks);
    }

    pub fn is_beyond_limit(self) -> bool {
        self.0 > ROT_MAX * ROT_SHARE
    }
}

/// What a flush may say of something dirty on flash which is written no more.
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

/// How often a batch that failed is written once more to the same place, where there is no other one.
const PLACE_TRIES: u32 = 2;

/// How long the note of the failure may take.
const MARK_TIME_NS: u64 = 2_000_000_000;

/// Segments may be freed in vain so many times as often as a sound log frees them at most.
const IN_VAIN_LIMIT: usize = 4;

/// Places that fail to be read, with no success between, after which the device counts as failed.
const READ_ERRORS_MAX: usize = 32;

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
    late: bool,
    /// The copy to begin with, while the superblock is being written for something else.
    pub(in crate::flash) waits: Option<u8>,
}

impl<U: Users> FlashDevice<U> {
    /// That it was given up is being noted on it, and others have to wait for that.
    pub fn is_noting(&self) -> bool {
        self.mark.as_ref().is_some_and(|m| !m.late)
    }

    /// A read failed. One alone says little; many without a success between them do.
    pub fn read_failed(&mut self, now: u64) {
        if self.read_errors.len() > READ_ERRORS_MAX {
            self.full = false;
            for place in std::mem::take(&mut self.read_errors) {
                let (device, _) = self.devices.spread().place(place);
                self.devices.failing.blame(device);
            }
            self.fail(now);
        }
    }

    /// Blocks turned out not to hold what was written there.
    pub fn note_rot(&mut self, blocks: u64) {
        self.rot.add_bad(blocks);
    }

    /// The same of all of a segment.
    pub(in crate::flash) fn note_blank_segment(&mut self) {
        self.note_rot(ROT_OF_SEGMENT);
    }

    /// Fails if it no longer holds what was written to it, or if freeing segments gives nobody room, or if writes
    /// wait for room that is `taken` for good.
    pub fn leave_if_useless(&mut self, taken: bool, now: u64) {
        let (in_vain, most) = self.in_vain();
        let useless = self.rot.is_beyond_limit() || in_vain > IN_VAIN_LIMIT * most || taken;
        if useless && self.takes_writes() && !self.faults.has(Fault::KeepUseless) {
            took(Path::FlashUseless);
            self.full = false;
            self.fail(now);
        }
    }

    /// A batch has ended. If it failed and there is no segment it could be sent to, it is written to the same place once
    /// more, so that a single failure is not the end of the device, and nothing is given back. A place that is bad
    /// fails again; one without room would.
    ///
    /// What the first attempt has left there does not matter: the bytes are the same, and what is not whole when the
    /// power goes counts as not written, as for any batch in flight.
    pub fn batch_again(&mut self, seq: u64, done: IoDone) -> Option<IoDone> {
        if !self.may_be_again(seq, &done) {
            return Some(done);
        }
        let at = self.devices.whole(&done);
        let io = Io::write(self.target(), at, done.op.bufs);
        self.out.send(FlashOp::Batch { seq }, io);
        None
    }

    /// The same of what one device has done of it, where everything should be there twice, and that device cannot be lost:
    /// is it to write that once more?
    pub fn part_again(&mut self, part: Part, done: &IoDone) -> bool {
        let seq = self.devices.fails_alone(part, done);
        seq.is_some_and(|seq| self.may_be_again(seq, done))
    }

    /// Is a batch that ended so to be written once more to the same place? Counts that as done.
    fn may_be_again(&mut self, seq: u64, done: &IoDone) -> bool {
        let failed = done
            .result
            .is_err_and(|e| !e.is_no_space() && !e.is_overdue());
        if !failed || !self.takes_writes() || !self.log.free.is_empty() {
            return false;
        }
        let batch = self.log.batches.iter_mut().find(|b| b.seq == seq);
        let Some(batch) = batch.filter(|b| b.again < PLACE_TRIES) else {
            return false;
        };
        batch.again += 1;
        self.counters.flash_errors += 1;
        took(Path::BatchAgainInPlace);
        true
    }

    /// A batch failed. Once all in flight have ended, sends them again elsewhere.
    pub fn retry_failed(&mut self, now: u64) {
        if self
            .log
            .batches
            .iter()
            .any(|b| b.state == BatchState::InFlight)
        {
            return;
        }
        let first = self.log.batches.front();
        let seq = first.expect("a batch has failed").seq;
        self.log.failures += 1;
        if self.is_emptying() && self.log.free.is_empty() && self.log.parked.is_empty() {
            self.end_emptying();
        }
        let none_left = self.log.free.is_empty() && !self.unpark();
        // One that does not answer is not tried elsewhere: every place of it would cost that long.
        if self.log.failures > SEGMENT_TRIES || none_left || self.silent {
            self.fail(now);
            return;
        }
        // The head (and a segment being sealed) with failed batches get no summary: recovery
        // walks them and finds the batches again, with the same numbers, in a later segment.
        let failed = |b: &Batch<U::Token>| b.state == BatchState::Failed;
        let refused: BTreeSet<u32> = self
            .log
            .batches
            .iter()
            .filter(|b| failed(b))
            .map(|b| b.seg)
            .collect();
        let sealing = std::mem::take(&mut self.log.sealing);
        for s in sealing {
            if s.last_batch >= seq {
                self.unpin(s.seg);
                if s.first_batch >= seq {
                    // Nothing of it is on flash, and a tail must not be looked for there.
                    self.log.order.retain(|seg| *seg != s.seg);
                    self.give_back(s.seg, refused.contains(&s.seg));
                    self.not_a_victim(s.seg);
                } else {
                    self.close_early(s.seg, &s.marks, seq);
                }
            } else {
                self.log.sealing.push(s);
            }
        }
        let heads = std::mem::take(&mut self.log.heads);
        for head in heads.into_iter().flatten() {
            match head.first_batch >= seq {
                true => self.give_back(head.seg, refused.contains(&head.seg) || !self.has_heads()),
                false => {
                    self.log.segments[head.seg as usize].state = SegState::Closed;
                    self.log.enlist(head.seg);
                    self.close_early(head.seg, &head.marks, seq);
                }
            }
        }
        if !self.may_go_round(now) {
            return;
        }
        took(Path::BatchSentAgain);
        // Trimming gives space away that a full file system will not give back.
        self.trim = false;
        let items = unsent(&mut self.log);
        self.log.requeue(items);
        self.log.again = self.has_heads() && !self.faults.has(Fault::AgainUntold);
        self.log.again_seq = 0;
        if !self.faults.has(Fault::ResendRenumbered) {
            self.log.next_batch_seq = seq;
        }
        self.pump(now);
    }

    /// What was sent to a segment counts nowhere. One that refused a batch, and never took one, is left alone for this run.
    fn give_back(&mut self, seg: u32, refused: bool) {
        if refused {
            took(Path::SegmentBad);
            return self.set_bad(seg);
        }
        self.cleaner.free(seg);
        self.log.segments[seg as usize].state = SegState::Free;
        self.note_changed(seg);
        match self.is_on_emptying(seg) {
            true => self.put_aside(seg),
            false => self.put_free(seg),
        }
    }

    /// Batches from `seq` on that were meant for a segment go elsewhere: it ends with those before.
    fn close_early(&mut self, seg: u32, marks: &[BatchMark], seq: u64) {
        let last = last_through(marks, seq - 1);
        let last = last.expect("its first batch is on flash");
        self.log.segments[seg as usize].last_batch = last;
        if last > self.log.durable_seq && self.has_heads() {
            let kept = marks.iter().filter(|m| m.seq <= last).copied();
            self.log.sealed.push((seg, kept.collect()));
        }
        self.cleaner.close(seg);
    }

    /// A segment refused its first batch. It has no room for anything any more.
    fn set_bad(&mut self, seg: u32) {
        self.log.set_bad(seg);
        self.log.aside.remove(&seg);
        self.cleaner.free(seg);
        self.cleaner.set_room(self.log.blocks_kept());
    }

    /// Flash fails if too few segments are left, those counted that are put aside while a device is emptied.
    pub(in crate::flash) fn may_go_round(&mut self, now: u64) -> bool {
        if self.is_emptying() && self.too_few_segments() {
            self.end_emptying();
        }
        if self.too_few_segments() {
            self.fail(now);
            return false;
        }
        true
    }

    /// So many segments refused writes, or are not freed for nobody can read what they say, that the log can go round no
    /// more: beside the head and those that are to be free there must be one for what is kept, or who waits for room
    /// would wait for ever.
    fn too_few_segments(&self) -> bool {
        self.log.usable() < self.log.free_wanted() + 2
    }

    /// Remembers whether it refuses writes for want of room only.
    pub fn note_refusal(&mut self, error: &IoError) {
        self.full = error.is_no_space();
        self.silent |= error.is_overdue();
    }

    /// It has failed: from here on the origins carry the disks.
    pub fn fail(&mut self, now: u64) {
        let fault = if self.full {
            FlashFault::Unwritable
        } else {
            FlashFault::Broken
        };
        self.give_up(fault, true, now);
    }

    /// From here on the origins carry the disks. With `mark`, the device itself is told.
    pub fn give_up(&mut self, fault: FlashFault, mark: bool, now: u64) {
        if !self.takes_writes() {
            // It may get worse, never better.
            if self.given_up == Some(FlashFault::Unwritable) || fault == FlashFault::Broken {
                self.given_up = Some(fault);
            }
            return;
        }
        took(match fault {
            FlashFault::Broken => Path::FlashBroken,
            FlashFault::Unwritable | FlashFault::Leaving => Path::FlashUnwritable,
        });
        self.given_up = Some(fault);
        if fault != FlashFault::Unwritable {
            self.devices.failing.keep();
        }
        self.area_change = None;
        if mark {
            self.mark_failed(now);
        }
        for s in std::mem::take(&mut self.log.sealing) {
            if !self.faults.has(Fault::GivenUpStaysPinned) {
                self.unpin(s.seg);
            }
        }
        let unsent = unsent(&mut self.log);
        self.log.clear_queue();
        let waiters = self.take_waiters();
        self.out.tell(FlashEvent::GivenUp { unsent, waiters });
    }

    /// What lay on it when it was given up may or may not be there if it failed; if it is full, that is as
    /// durable as before; what was removed under us is gone after a power cut, so there a flush
    /// waits until the origin has all, rather than end the guest's file system with an error.
    pub fn promise(&self) -> Promise {
        match self.given_up {
            Some(FlashFault::Leaving) => Promise::Later,
            Some(FlashFault::Unwritable) if self.is_all_durable() => Promise::Durable,
            // The note's flush covers the log.
            Some(FlashFault::Unwritable) if self.is_noting() => Promise::Later,
            _ => Promise::None,
        }
    }

    /// Tries to note the failure on the device itself, so that a later start asks before it
    /// trusts what is dirty there. Writes past the cache wait for that: once the origin has them,
    /// what flash has of those blocks is old, and nothing else would say so after a crash.
    ///
    /// One copy of the superblock after the other, each with a flush behind it, and the one that is not
    /// known to be good first: a power cut in between leaves a whole one.
    fn mark_failed(&mut self, now: u64) {
        self.noted = Noted::Asked;
        self.sb.state = PoolState::Failed;
        self.sb.generation += 1;
        let copy = 1 - (self.sb.copy & 1);
        self.mark = Some(FailMark {
            copy,
            sound: true,
            first: true,
            until_ns: now + MARK_TIME_NS,
            late: false,
            waits: self.is_losing().then_some(copy),
        });
        if !self.is_losing() {
            self.write_mark(copy);
        }
    }

    pub(in crate::flash) fn write_mark(&mut self, copy: u8) {
        let mut sb = self.sb.clone();
        sb.copy = copy;
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        buf.bytes_mut().copy_from_slice(&sb.encode()[..]);
        let offset = SUPERBLOCK_BLOCKS[usize::from(copy & 1)] * BLOCK;
        let io = Io::write(self.target(), offset, [buf]).in_background();
        self.out.send(FlashOp::Mark, io);
    }

    /// A write of the note, or its flush, has ended, well or not: a device that does not take the
    /// note may give old data back after a crash all the same. So the other copy is tried even then, and if
    /// that is no better, whoever runs the engine has until the deadline to note it elsewhere
    /// ([`noted_elsewhere`](Self::noted_elsewhere)) before the disks go on.
    pub fn mark_ended(&mut self, kind: OpKind, ok: bool) {
        let target = self.target();
        // Noted elsewhere, with this still on its way: nobody waits for it.
        let Some(mark) = self.mark.as_mut() else {
            return;
        };
        mark.sound &= ok;
        if kind != OpKind::Flush {
            return self.out.send(FlashOp::Mark, Io::flush(target));
        }
        if ok && !self.devices.failing.is_any_left_out() {
            // It covers the log as well, and nothing is appended any more.
            self.log.durable_ord = self.log.applied_ord;
            self.log.durable_seq = self.log.applied_seq;
        } else if !ok {
            self.given_up = Some(FlashFault::Broken);
        }
        if mark.sound {
            self.sb.copy = mark.copy;
            self.noted = Noted::Stored;
        }
        if !mark.first {
            if self.noted != Noted::Stored {
                took(Path::FailureUnnoted);
                self.noted = Noted::Nowhere;
                if !mark.late {
                    return;
                }
            }
            return self.end_mark();
        }
        (mark.copy, mark.sound, mark.first) = (1 - mark.copy, true, false);
        let copy = mark.copy;
        self.write_mark(copy);
    }

    /// Does not wait for ever: a device may hang.
    pub fn end_late_mark(&mut self, now: u64) {
        if let Some(m) = self.mark.as_mut().filter(|m| !m.late && now >= m.until_ns) {
            m.late = true;
            if self.noted != Noted::Stored {
                self.noted = Noted::Nowhere;
            }
            self.out.tell(FlashEvent::Noted);
        }
    }

    /// A later start will see in another place that flash was given up.
    pub fn noted_elsewhere(&mut self) {
        if self.noted == Noted::Nowhere {
            self.noted = Noted::Stored;
            self.noted_beside = true;
            self.end_mark();
        }
    }

    fn end_mark(&mut self) {
        self.mark = None;
        self.out.tell(FlashEvent::Noted);
    }
}
