//! One run of the destager, from its reads of flash to the origin's answer.

use crate::api::{DiskId, Effects};
use crate::cache::index::{Key, SlotNo};
use crate::core::left::Unread;
use crate::core::route::FlashWaiter;
use crate::core::{Core, OpCtx};
use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::origin::job::{DestageJob, NOWHERE};
use crate::origin::pace::{PIECES_PACED, RUN_PACED};
use crate::origin::progress::Written;
use crate::paths::{Path, took};
use hearth_io::{Buf, IoDone, IoError, OpKind, Target};
use smallvec::SmallVec;

/// Longest punch told to the origin at once: 1 GiB.
const ZERO_RUN_MAX: u64 = 1 << 18;

impl Core {
    pub(super) fn destage_run(
        &mut self,
        disk: DiskId,
        start: u64,
        left: u64,
        paced: bool,
        now: u64,
        fx: &mut Effects,
    ) -> bool {
        let mut slots: Vec<SlotNo> = Vec::new();
        let mut sums: Vec<u32> = Vec::new();
        let (longest, mut pieces) = match paced {
            true => (RUN_PACED, PIECES_PACED),
            false => (left, usize::MAX),
        };
        for block in start..start + left.min(longest) {
            if block > start
                && (self.destage_obstacle(disk, block, now).is_some()
                    || self.doubtful(disk, start)
                    || self.doubtful(disk, block))
            {
                break;
            }
            match self.source(disk, block) {
                Some((slot, sum)) => {
                    if slots.last().is_none_or(|last| last + 1 != slot) {
                        if pieces == 0 {
                            break;
                        }
                        pieces -= 1;
                    }
                    slots.push(slot);
                    sums.push(sum);
                }
                None => break,
            }
        }
        if slots.is_empty() {
            return false;
        }
        let count = slots.len() as u64;
        let buf = Buf::zeroed((count * 4096) as usize);
        // Most of it lies in segments that are durable for long, and needs no flush of its own.
        let batch = self.newest_at(&slots);
        let order = self.disk(disk).and_then(|d| d.order.as_deref());
        let ord = order.map_or(0, |o| o.mark_ord);
        let job = self.destaging.jobs.insert(DestageJob {
            disk,
            start,
            count,
            buf: Some(buf.clone()),
            slots: slots.clone(),
            reads: 0,
            failed: false,
            struck: false,
            rotten: false,
            zero: false,
            solid: false,
            started_ns: now,
            batch,
            ord,
        });
        self.destaging.tokens -= (count * 4096) as i64;
        let d = self.known_mut(disk);
        d.origin.destage.let_by = false;
        d.origin.destage.begun_ns = now;
        d.origin.destage.busy.push((start, start + count, job));
        d.origin.destage.cursor = start + count;
        if let Some(order) = d.order.as_deref_mut() {
            order.cursor = start + count;
            order.note_given(now);
        }
        self.ready.given.add(disk);
        let mut i = 0usize;
        while i < slots.len() {
            let mut n = 1;
            while i + n < slots.len() && slots[i + n] == slots[i] + n as u32 {
                n += 1;
            }
            let crcs: SmallVec<[u32; 4]> = SmallVec::from_slice(&sums[i..i + n]);
            for (block, slot) in (start + i as u64..).zip(&slots[i..i + n]) {
                self.flash.pin(*slot);
                if self.cache.index.get(Key::new(disk, block)) != Some(*slot) {
                    took(Path::VersionDestaged);
                    continue;
                }
                self.cache.index.set_mark(*slot, true);
            }
            self.destaging.jobs[job].reads += 1;
            let slot = slots[i];
            let piece = buf.slice(i * 4096, n * 4096);
            let io = self.flash.read_slots(slot, piece).checked(crcs);
            self.io(fx, OpCtx::DestageRead { job, slot }, io.in_background());
            i += n;
        }
        true
    }

    pub fn destage_read_done(
        &mut self,
        id: usize,
        slot: SlotNo,
        done: IoDone,
        now: u64,
        fx: &mut Effects,
    ) {
        let (disk, start) = (self.destaging.jobs[id].disk, self.destaging.jobs[id].start);
        let at = self.destaging.jobs[id]
            .slots
            .iter()
            .position(|s| *s == slot)
            .expect("a run holds what is read for it");
        let rot = self.opts.faults.has(Fault::DestageRot);
        for i in done.bad_blocks.iter().filter(|_| !rot) {
            let block = start + at as u64 + u64::from(*i);
            if self.cache.index.get(Key::new(disk, block)) == Some(slot + i) {
                took(Path::RottenDestaged);
                self.flash.note_rot(1);
                self.lose(disk, block, slot + i);
            }
        }
        if done.result.is_err() {
            self.flash_read_failed(now, fx);
            // What a device that does not answer holds is not known to be bad: it is tried again later.
            if !done.is_overdue() {
                self.destage_unread(id, at, (done.op.len / 4096) as usize, now);
            }
        }
        self.destage_lost_version(id, at, &done);
        let job = &mut self.destaging.jobs[id];
        job.failed |= done.result.is_err();
        job.rotten |= !done.bad_blocks.is_empty() && !rot;
        job.reads -= 1;
        if job.reads > 0 {
            return;
        }
        let struck = job.struck || job.rotten && !job.failed;
        // What is lost takes nobody with it, neither the rest of the run nor those who wait for it.
        if struck {
            // Nothing to wait for: whatever is tried next is another block, or this one alone.
            let job = self.destage_give_back(id);
            self.wake_clean_waiters(job.disk, now, fx);
        } else if job.failed {
            self.destage_failed(id, None, now, fx);
        } else {
            self.destage_durable(id, now, fx);
        }
    }

    /// A version of a block of an ordered disk cannot be read, and nobody but the destager would notice. Then there is
    /// no order.
    fn destage_lost_version(&mut self, id: usize, at: usize, done: &IoDone) {
        let job = &self.destaging.jobs[id];
        let (disk, start) = (job.disk, job.start + at as u64);
        let Some(d) = self.disk(disk).filter(|d| d.order.is_some()) else {
            return;
        };
        let count = done.op.len / 4096;
        let lost = (0..count as usize).any(|i| {
            let block = start + i as u64;
            let newest = self.cache.index.get(Key::new(disk, block)) == Some(job.slots[at + i]);
            let bad = done.result.is_err() || done.bad_blocks.contains(&(i as u32));
            bad && !newest && !d.lost.contains(block)
        });
        if lost && !done.is_memory_gone() && !done.is_overdue() {
            self.mix_order(disk);
        }
    }

    /// One read of a run, `count` blocks from its `at`th, ended with an error.
    fn destage_unread(&mut self, id: usize, at: usize, count: usize, now: u64) {
        let job = &mut self.destaging.jobs[id];
        job.struck = true;
        let (disk, start) = (job.disk, job.start);
        let slots = job.slots[at..at + count].to_vec();
        let unread = Unread { alone: count == 1 };
        for (block, slot) in (start + at as u64..).zip(slots) {
            if self.cache.index.get(Key::new(disk, block)) == Some(slot)
                && self.cache.index.slot(slot).is_some_and(|s| s.dirty)
            {
                self.strike(disk, block, slot, unread, now);
            }
        }
    }

    /// Step 2. If the log were not durable up to the run, a crash could bring an older clean copy
    /// back while the origin has the run's data.
    pub fn destage_durable(&mut self, id: usize, now: u64, fx: &mut Effects) {
        let ord = self.destaging.jobs[id].ord;
        if self.flash.log.durable_seq < self.destaging.jobs[id].batch
            && self.flash.takes_writes()
            && !self.opts.faults.has(Fault::DestageUndurable)
        {
            let until = Until::Batch(self.destaging.jobs[id].batch);
            self.wait_flash(until, FlashWaiter::Destage(id), now, fx);
        } else if self.flash.log.durable_ord < ord && self.flash.takes_writes() {
            // The log does not say yet that the origin has all that came before.
            self.wait_flash(Until::Ord(ord), FlashWaiter::Destage(id), now, fx);
        } else {
            self.destage_write(id, now, fx);
        }
    }

    /// Writes the origin. If flash was given up, not before that is noted: a start that does not find the
    /// note, after a power cut, believes the older clean copies that flash has of these blocks.
    pub fn destage_write(&mut self, id: usize, now: u64, fx: &mut Effects) {
        if self.flash.is_noting() && !self.opts.faults.has(Fault::DestageUnnoted) {
            self.destaging.unnoted.push(id);
            return;
        }
        let job = &mut self.destaging.jobs[id];
        let (disk, start, count, zero, buf) =
            (job.disk, job.start, job.count, job.zero, job.buf.take());
        let solid = job.solid;
        let len = self.disk(disk).map_or(0, |d| d.clip(start, count));
        if len == 0 || (!zero && buf.is_none()) || self.fenced(disk) {
            self.destage_failed(id, None, now, fx);
            return;
        }
        let (target, offset) = (Target::Origin(disk), start * 4096);
        let io = match buf {
            Some(buf) if !zero => Io::write(target, offset, [buf.slice(0, len as usize)]),
            _ => Io::range(target, OpKind::WriteZeroes { punch: !solid }, offset, len),
        };
        self.io(fx, OpCtx::DestageWrite { job: id }, io.in_background());
    }

    /// Tells the origin of the run of zeros that begins with `block` and ends in front of `limit`.
    pub(super) fn destage_zero(
        &mut self,
        disk: DiskId,
        block: u64,
        limit: u64,
        now: u64,
        fx: &mut Effects,
    ) {
        let batch = self.flash.log.applied_seq;
        let d = self.known(disk);
        let mut count = d.zero.run_len(block, ZERO_RUN_MAX).min(limit - block);
        let solid = d.solid.contains(block);
        count = if solid {
            d.solid.run_len(block, count)
        } else {
            let next = d.solid.first_in(block, u64::MAX);
            count.min(next.map_or(count, |s| s - block))
        };
        let job = self.destaging.jobs.insert(DestageJob {
            disk,
            start: block,
            count,
            buf: None,
            slots: Vec::new(),
            reads: 0,
            failed: false,
            struck: false,
            rotten: false,
            zero: true,
            solid,
            started_ns: now,
            batch,
            ord: 0,
        });
        let d = self.known_mut(disk);
        d.origin.destage.busy.push((block, block + count, job));
        self.ready.given.add(disk);
        self.destage_durable(job, now, fx);
    }

    pub fn destage_write_done(
        &mut self,
        id: usize,
        result: Result<(), IoError>,
        now: u64,
        fx: &mut Effects,
    ) {
        if let Err(e) = result
            && !self.opts.faults.has(Fault::IgnoreDestageError)
        {
            self.destage_failed(id, Some(e), now, fx);
            return;
        }
        let job = self.destaging.jobs.remove(id);
        let unflushed = self.opts.faults.has(Fault::EpochUnflushed);
        let d = self.known_mut(job.disk);
        d.origin.destage.failures = 0;
        d.origin.destage.hangs = false;
        d.origin.destage.busy.retain(|(_, _, j)| *j != id);
        d.origin.sync.destaged();
        if job.zero {
            d.origin.destage.told_zeros(job.start, job.count, now);
        } else {
            for (block, slot) in (job.start..).zip(&job.slots) {
                if *slot != NOWHERE {
                    d.counters.destaged += 1;
                    let data = Written::Data { block, slot: *slot };
                    d.origin.destage.push(data, now);
                    if let Some(order) = d.order.as_deref_mut() {
                        order.set_written(block, *slot, true);
                        if unflushed {
                            order.done(block, *slot);
                        }
                    }
                }
            }
        }
        if self.opts.faults.has(Fault::CleanBeforeOriginFlush) {
            let n = self
                .disk(job.disk)
                .map_or(0, |d| d.origin.destage.written.len());
            self.mark_clean(job.disk, n, now, fx);
            return;
        }
        if !self.flash.takes_writes() {
            self.wake_clean_waiters(job.disk, now, fx);
        }
        if unflushed {
            self.go_on_in_order(job.disk, now, fx);
        }
        self.pause_destaging(job.started_ns, now);
        self.ready.touch(job.disk);
        self.destage_step(now, fx);
        self.destage_flush_if_due(job.disk, now, fx);
    }

    /// A run could not be read or written: leave it dirty and wait before trying again.
    fn destage_failed(&mut self, id: usize, error: Option<IoError>, now: u64, fx: &mut Effects) {
        let job = self.destage_give_back(id);
        let d = self.known_mut(job.disk);
        d.counters.destage_errors += 1;
        d.origin.destage.note_trouble(error, now);
        self.destage_back_off(job.disk, now, fx);
    }

    /// Ends a run that has changed nothing.
    fn destage_give_back(&mut self, id: usize) -> DestageJob {
        let mut job = self.destaging.jobs.remove(id);
        job.slots.retain(|slot| *slot != NOWHERE);
        self.let_go_of(&job.slots);
        let d = self.known_mut(job.disk);
        d.origin.destage.busy.retain(|(_, _, j)| *j != id);
        self.ready.touch(job.disk);
        job
    }

    /// The origin (or flash) failed the destager: writes that wait for it fail rather than hang. Of one failure only those
    /// notice that wait for what has failed, not those that wait for all that came before them.
    pub(super) fn destage_back_off(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let flash_failed = !self.flash.takes_writes();
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        d.origin.destage.back_off(now);
        if let Some(order) = d.order.as_deref_mut() {
            order.note_refused();
        }
        if flash_failed {
            self.wake_clean_waiters(disk, now, fx);
            return;
        }
        for id in std::mem::take(&mut d.clean_waiters) {
            let (start, end) = self.blocks_of(id);
            let d = self.known_mut(disk);
            let hit = d.range_dirty(start, end) || d.destaging(start, end);
            if !std::mem::replace(&mut self.reqs[id].write_mut().spared, true) && !hit {
                let d = self.known_mut(disk);
                d.clean_waiters.push(id);
                self.ready.await_clean(disk);
                continue;
            }
            self.reqs[id].failed = Some(crate::api::ReqError::Io);
            self.finish(id, now, fx);
        }
    }
}
