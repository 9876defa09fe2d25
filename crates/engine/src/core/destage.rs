//! The destager: dirty blocks to the origin, in disk order; while clients are active, first what
//! lies behind their last read.
//!
//! For each run, in order: (1) read it from flash, checksums checked; (2) once the log is durable
//! up to it, write the origin;
//! (3) flush the origin, many runs at once; (4) mark clean, in RAM and in the log, the blocks
//! that are still where they were read from. Before (3) the origin may lose them again, so
//! they stay dirty; a crash anywhere repeats the work, which is harmless. A block that a write
//! holds is not marked: its newer record may already stand in the log before our mark.

use crate::api::{DiskId, Effects, Home};
use crate::cache::index::{Key, SlotNo};
use crate::core::apply::Then;
use crate::core::left::Unread;
use crate::core::route::FlashWaiter;
use crate::core::{Core, OpCtx};
use crate::ctx::Io;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::origin::job::{DestageJob, NOWHERE};
use crate::origin::pace::{self, JOBS_BUSY, Need, PIECES_PACED, RUN_PACED};
use crate::origin::progress::Written;
use crate::origin::sync::SyncWaiter;
use crate::paths::{Path, took};
use hearth_format::Kind;
use hearth_io::{Buf, IoDone, IoError, OpKind, Target};
use smallvec::SmallVec;
use std::ops::Range;

/// The share of flash that may be dirty, in percent, below the high mark, before haste begins.
const HASTE_PERCENT: u32 = 5;
/// Longest run: 1 MiB.
const RUN_MAX: u64 = 256;
/// Longest punch told to the origin at once: 1 GiB.
const ZERO_RUN_MAX: u64 = 1 << 18;
/// An origin that takes so long over a write or a flush of the destager hangs. Until it answers, what it
/// was given is dirty like the rest, and eviction need not wait for it.
const HANGS_NS: u64 = 10_000_000_000;
/// Disks that wait for nothing but the pool's need, of which so many are looked at per event.
const OWING_PER_STEP: usize = 8;
/// A disk with a need of its own that may not start a run is looked at again after this time at least.
const PAUSE_MIN_NS: u64 = 1_000_000;
impl Core {
    pub fn jobs_active(&self) -> bool {
        !self.destaging.jobs.is_empty()
    }

    /// Since when the origin has owed the destager its oldest answer.
    pub fn destage_unanswered(&self, d: &Disk) -> Option<u64> {
        // With its memory gone it is the origin's turn.
        let writes = d
            .origin
            .destage
            .busy
            .iter()
            .map(|(_, _, job)| &self.destaging.jobs[*job]);
        let writes = writes.filter(|job| job.buf.is_none());
        let flush = (d.origin.destage.covered > 0).then_some(d.origin.destage.covered_ns);
        writes.map(|job| job.started_ns).chain(flush).min()
    }

    fn need(&self, disk: DiskId, now: u64) -> Need {
        let Some(d) = self.disk(disk).filter(|d| d.may_destage(now)) else {
            return Need::None;
        };
        let pool = self.pool_need(now);
        if self.stops_with_dirty() {
            return match d.clean_waiters.is_empty() {
                true => pool,
                false => Need::Urgent,
            };
        }
        // A disk with a maximum has that much flash, however much the pool has.
        let own = match d.cfg.max_bytes / 4096 {
            0 => u64::MAX,
            own => own,
        };
        let over = |percent| is_over(d.dirty.len(), own, percent);
        if !d.clean_waiters.is_empty()
            || !d.origin.destage.urgent.is_empty()
            || !d.cfg.mode.is_write_back()
            || self.flash.is_single()
            || over(self.haste_percent())
            || !d.zero.is_empty() && self.too_many_runs()
        {
            return Need::Urgent;
        }
        let pool = pool.max(self.order_need(d, now));
        if d.drain {
            return pool.max(Need::Asked);
        }
        // What is promised to a disk that moves to an origin is everybody's again once that has it all.
        if over(self.opts.dirty_low_percent) || d.cfg.home == Home::Moving {
            return pool.max(Need::Background);
        }
        pool
    }

    /// What of it is not the disk's own.
    fn pool_need(&self, now: u64) -> Need {
        if self.stops_with_dirty() {
            let awaited = !self.reqs.stalled.is_empty()
                || !self.reqs.stalled_through.is_empty()
                || self.flash.starved();
            return if awaited { Need::Urgent } else { Need::None };
        }
        let over = |percent| self.dirty_total > self.dirty_room(percent);
        // Whoever waits for segments that only wait for a flush has nothing of what an origin is given now.
        let stuck = !self.reqs.stalled.is_empty() && !self.flash.comes_free();
        if stuck || !self.flash.takes_writes() || self.flash.wants_clean() {
            return Need::Urgent;
        }
        if over(self.haste_percent()) {
            return Need::Haste;
        }
        if over(self.opts.dirty_low_percent) {
            return Need::Background;
        }
        if self.reqs.foreground + self.destaging.lane_hits == 0
            && now.saturating_sub(self.reqs.last_foreground_ns) > self.opts.idle_ns
        {
            return Need::Idle;
        }
        Need::None
    }

    /// A stop keeps what is dirty on flash, if it can. Were it destaged, one run would follow the other
    /// and the engine would not come to rest.
    fn stops_with_dirty(&self) -> bool {
        self.quiescing && self.flash.takes_writes()
    }

    fn haste_percent(&self) -> u32 {
        self.opts.dirty_high_percent.saturating_sub(HASTE_PERCENT)
    }

    /// Runs of zeros near as many as may be: disks that have any tell their origins.
    fn too_many_runs(&self) -> bool {
        self.zero_runs * 2 > self.zero_runs_max()
    }

    /// Starts what runs are due: of the disks to which something happened, and of a few that only wait for
    /// the pool's need.
    pub fn destage_step(&mut self, now: u64, fx: &mut Effects) {
        while let Some(disk) = self.ready.due(now) {
            self.ready.touch(disk);
        }
        if !self.ready.gathering.is_empty() && self.pool_need(now) == Need::Urgent {
            for disk in self.ready.gathering.take() {
                self.ready.touch(disk);
            }
        }
        if self.ready.touched.is_empty() && self.ready.owing.is_empty() {
            return;
        }
        let (hits, last) = self.shared.pulse();
        self.destaging.lane_hits = hits;
        self.reqs.last_foreground_ns = self.reqs.last_foreground_ns.max(last);
        self.destaging.refill(self.opts.destage_bytes_per_s, now);
        for _ in 0..self.ready.touched.len() {
            let Some(disk) = self.ready.touched.next() else {
                break;
            };
            self.destage_disk(disk, now, fx);
        }
        for _ in 0..self.ready.owing.len().min(OWING_PER_STEP) {
            if !self.too_many_runs() && self.may_start(self.pool_need(now), now) == 0 {
                return;
            }
            let Some(disk) = self.ready.owing.next() else {
                return;
            };
            self.destage_disk(disk, now, fx);
        }
    }

    /// How many runs of a disk in such need may be on their way at a time: 0 if none may begin.
    fn may_start(&self, need: Need, now: u64) -> usize {
        let limited = self.opts.destage_bytes_per_s > 0;
        let hasty = pace::hasty(self.dirty_total, self.haste_range());
        self.destaging
            .may_start(need, self.paced(now), hasty, limited, now)
    }

    /// From where haste begins to where writes have to wait, in dirty blocks.
    fn haste_range(&self) -> Range<u64> {
        self.dirty_room(self.haste_percent())..self.dirty_room(self.opts.dirty_high_percent)
    }

    /// Starts as many runs of a disk as are due, and puts it on the list where it belongs then.
    fn destage_disk(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let need = self.need(disk, now);
        let mut blocked = false;
        loop {
            let mut limit = self.may_start(need, now);
            // It may have been removed since it was put on a list.
            let Some(d) = self.disk_mut(disk) else { return };
            if need == Need::Background && !d.tickets.is_empty() {
                // Misses of clients go first: the origin has one arm.
                limit = limit.min(1);
            }
            if d.origin.destage.busy.len() >= limit {
                break;
            }
            // Among reads that clients wait for, the way to the next run in the sweep and back
            // would cost each of them a seek. When haste begins, the sweep takes them all.
            if need == Need::Background && self.paced(now) {
                let d = self.known_mut(disk);
                if let Some(near) = d.origin.destage.near.take() {
                    d.origin.destage.cursor = near;
                }
            }
            let stands_back = need <= Need::Background || need == Need::Asked;
            let paced = stands_back && self.paced(now);
            if !self.destage_one(disk, paced, now, fx) {
                blocked = true;
                break;
            }
        }
        self.destage_flush_if_due(disk, now, fx);
        self.line_up(disk, need, blocked, now);
    }

    /// Puts a disk that was looked at where it will be looked at again, if nothing of its own calls for it
    /// before.
    fn line_up(&mut self, disk: DiskId, need: Need, blocked: bool, now: u64) {
        let stopping = self.quiescing;
        let d = self.known(disk);
        let (draining, not_before_ns) = (d.is_draining(stopping), d.origin.destage.not_before_ns);
        let (waits, may) = (d.owes_destager(), d.may_destage(now));
        let full = d.origin.destage.busy.len() >= JOBS_BUSY;
        if draining {
            self.ready.draining.add(disk);
        }
        if !waits {
            return;
        }
        if not_before_ns > now {
            self.ready.timers.insert((not_before_ns, disk));
        } else if may && !blocked && !full {
            self.ready.owing.add(disk);
            if need > self.pool_need(now) {
                // A pause, or the limit on bandwidth, which end without an event.
                let at = self.destaging.pause_ns.max(now + PAUSE_MIN_NS);
                self.ready.timers.insert((at, disk));
            }
        }
    }

    /// Clients are active: what nobody waits for stands back.
    fn paced(&self, now: u64) -> bool {
        self.reqs.foreground + self.destaging.lane_hits > 0
            || pace::is_active(self.reqs.last_foreground_ns, now)
    }

    /// After a background run: leaves the devices to clients for some time. The nearer the dirty
    /// share is to where writes would have to wait, the shorter.
    fn pause_destaging(&mut self, started_ns: u64, now: u64) {
        let low = self.dirty_room(self.opts.dirty_low_percent);
        let haste = self.dirty_room(self.haste_percent());
        let took = now.saturating_sub(started_ns);
        self.destaging
            .pause(took, self.dirty_total, low..haste, now);
    }

    /// Starts the next run of a disk; false if there is none to start. If `paced`, one that holds up clients as
    /// little as can be: short, and without a flush of the log if there is one that needs none.
    fn destage_one(&mut self, disk: DiskId, paced: bool, now: u64, fx: &mut Effects) -> bool {
        if self.destage_urgent(disk, now, fx) {
            return true;
        }
        let zeros = self.disk(disk).and_then(|d| self.next_zeros(d, now));
        if let Some((block, past)) = zeros {
            self.destage_zero(disk, block, past, now, fx);
            return true;
        }
        let next = self.disk(disk).and_then(|d| {
            let durable = paced.then(|| self.next_run(d, true, now)).flatten();
            durable.or_else(|| self.next_run(d, false, now))
        });
        match next {
            Some((block, left)) => self.destage_run(disk, block, left, paced, now, fx),
            None => false,
        }
    }

    /// The next dirty block of a disk's sweep that nothing keeps from the origin, and how many may go with
    /// it at most. If `durable`, one of which the log is durable.
    fn next_run(&self, d: &Disk, durable: bool, now: u64) -> Option<(u64, u64)> {
        if let Some(order) = d.order.as_deref() {
            let next = self.next_in_order(d, order, now);
            return next.map(|block| (block, RUN_MAX));
        }
        // One sweep over the disk, wrapping once.
        let (disk, cursor) = (d.cfg.id, d.origin.destage.cursor);
        for (from, to) in [(cursor, u64::MAX), (0, cursor)] {
            let mut at = from;
            // Bounded: every step passes a busy range, a waiting read, or lost, written or fresh blocks.
            for _ in 0..64 {
                let Some(block) = d.dirty.first_in(at, to) else {
                    break;
                };
                at = match self.destage_obstacle(disk, block, now) {
                    Some(past) => past,
                    None if !self.may_go(disk, block, durable) => block + 1,
                    None => return Some((block, d.dirty.run_len(block, RUN_MAX.min(to - block)))),
                };
            }
        }
        None
    }

    /// Can a dirty block be given to the origin, and, if that matters, without a flush of the log?
    fn may_go(&self, disk: DiskId, block: u64, durable: bool) -> bool {
        self.dirty_slot(disk, block)
            .is_some_and(|slot| !durable || self.newest_at(&[slot]) <= self.flash.log.durable_seq)
    }

    /// The last batch of the segments in which these slots lie.
    fn newest_at(&self, slots: &[SlotNo]) -> u64 {
        let segments = slots.iter().map(|slot| self.flash.log.segment_of(*slot));
        self.destaging.newest_of(segments)
    }

    /// Where a dirty block lies that flash is not known to have lost.
    fn dirty_slot(&self, disk: DiskId, block: u64) -> Option<SlotNo> {
        let slot = self.cache.index.get(Key::new(disk, block))?;
        let info = self.cache.index.slot(slot)?;
        (info.dirty && !info.lost).then_some(slot)
    }

    /// Where the block lies that the origin is to be given now, and its checksum.
    fn source(&self, disk: DiskId, block: u64) -> Option<(SlotNo, u32)> {
        if let Some(order) = self.disk(disk).and_then(|d| d.order.as_deref()) {
            return order.source(block);
        }
        let slot = self.dirty_slot(disk, block)?;
        Some((slot, self.cache.index.crc(slot)))
    }

    /// Would the destager find something of the disk to start, if the need were there? Not what flash has
    /// refused: that may be asked for again as time passes.
    pub fn could_destage(&self, d: &Disk, now: u64) -> bool {
        d.may_destage(now)
            && d.origin.destage.busy.len() < JOBS_BUSY
            && d.refusals.is_empty()
            && (self.next_run(d, false, now).is_some() || self.next_zeros(d, now).is_some())
    }

    /// Starts a run that somebody waits for. Those with an obstacle stay for the sweep, which comes
    /// by as long as somebody waits.
    fn destage_urgent(&mut self, disk: DiskId, now: u64, fx: &mut Effects) -> bool {
        loop {
            let d = self.known_mut(disk);
            let Some(block) = d.origin.destage.urgent.first_in(0, u64::MAX) else {
                return false;
            };
            d.origin.destage.urgent.remove(block);
            if d.order.is_some() {
                // It has its turn.
                continue;
            }
            let dirty = d.dirty.contains(block);
            let left = d.dirty.run_len(block, RUN_MAX);
            if dirty
                && self.destage_obstacle(disk, block, now).is_none()
                && self.destage_run(disk, block, left, false, now, fx)
            {
                return true;
            }
        }
    }

    /// Why a dirty block cannot be destaged now: returns where to look on.
    pub fn destage_obstacle(&self, disk: DiskId, block: u64, now: u64) -> Option<u64> {
        let d = self.disk(disk)?;
        if let Some((_, end, _)) = d
            .origin
            .destage
            .busy
            .iter()
            .find(|(s, e, _)| (*s..*e).contains(&block))
        {
            return Some(*end);
        }
        let refused = self.flash.takes_writes() && d.is_refused(block, now);
        if d.lost.contains(block) {
            return Some(block + d.lost.run_len(block, u64::MAX));
        }
        if d.order.is_none() && self.written_already(disk, block) || refused {
            return Some(block + 1);
        }
        // After flash failed, writes go to the origin past what is dirty: theirs is newer.
        if !self.flash.takes_writes()
            && let Some(l) = d.locks.meeting(block, block + 1).next()
        {
            return Some(l.end);
        }
        // A client's read of the origin is under way: it should not see half of our write. It began before
        // the write that we carry out, so it may return either, and is not cached; a disk does not promise
        // that it returns one of them whole. This is a courtesy, and no test can miss it.
        d.tickets
            .iter()
            .find(|t| t.reading && (t.start..t.end).contains(&block))
            .map(|t| t.end)
    }

    /// The block was written to the origin as it is and waits for the flush.
    fn written_already(&self, disk: DiskId, block: u64) -> bool {
        let Some(slot) = self.cache.index.get(Key::new(disk, block)) else {
            return false;
        };
        self.cache.index.slot_mark(slot)
    }

    /// The block is read alone, to tell whether it is the one that cannot be read.
    pub fn doubtful(&self, disk: DiskId, block: u64) -> bool {
        self.disk(disk).is_some_and(|d| d.doubtful.contains(block))
    }

    fn destage_run(
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
                self.lose(disk, block, slot + i);
            }
        }
        if done.result.is_err() {
            self.flash_read_failed(now, fx);
            self.destage_unread(id, at, (done.op.len / 4096) as usize, now);
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
        if lost && !done.is_memory_gone() {
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

    /// The next zeros of a disk that nothing keeps from the origin: where they begin, and what they must
    /// not reach.
    fn next_zeros(&self, d: &Disk, now: u64) -> Option<(u64, u64)> {
        let mut at = 0;
        for _ in 0..64 {
            let block = d.zero.first_in(at, u64::MAX)?;
            let waits = d.origin.destage.written.iter().find_map(|w| match w {
                Written::Zero { block: b, count } if (*b..*b + *count).contains(&block) => {
                    Some(*b + *count)
                }
                _ => None,
            });
            if let Some(past) = waits.or_else(|| self.destage_obstacle(d.cfg.id, block, now)) {
                at = past;
                continue;
            }
            let limit = d
                .origin
                .destage
                .busy
                .iter()
                .map(|(s, _, _)| *s)
                .chain(d.tickets.iter().filter(|t| t.reading).map(|t| t.start))
                // As in `destage_obstacle`.
                .chain(
                    (!self.flash.takes_writes())
                        .then(|| d.locks.next_start(block))
                        .flatten(),
                )
                .filter(|s| *s > block)
                .min();
            return Some((block, limit.unwrap_or(u64::MAX)));
        }
        None
    }

    /// Tells the origin of the run of zeros that begins with `block` and ends in front of `limit`.
    fn destage_zero(&mut self, disk: DiskId, block: u64, limit: u64, now: u64, fx: &mut Effects) {
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
            // Whatever was void there, it was so of what was told before.
            let end = job.start + job.count;
            d.origin.destage.zero_void.remove_range(job.start, end);
            let zeros = Written::Zero {
                block: job.start,
                count: job.count,
            };
            d.origin.destage.push(zeros, now);
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
    fn destage_back_off(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let flash_failed = !self.flash.takes_writes();
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        d.origin.destage.back_off(now);
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

    /// Is it well if what was written to the origin waits for more before it is flushed?
    fn may_gather(&self, disk: DiskId, now: u64) -> bool {
        let in_service = |d: &Disk| d.may_destage(now) && !self.quiescing;
        self.paced(now)
            && self.disk(disk).is_some_and(in_service)
            && self.need(disk, now) < Need::Asked
    }

    /// Flushes the origin when enough was written, or nothing more is coming.
    fn destage_flush_if_due(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let may_gather = self.may_gather(disk, now);
        let d = self.known_mut(disk);
        // What comes next in order waits for this flush.
        let in_order = d.order.as_deref().is_some_and(|o| o.awaits_flush());
        let awaited = !d.clean_waiters.is_empty() || in_order;
        if !d.origin.destage.cover(awaited, may_gather, now) {
            if let Some(until) = d.origin.destage.gathers_until() {
                self.ready.timers.insert((until, disk));
                self.ready.gathering.add(disk);
            }
            return;
        }
        let target = d.origin.sync.completed();
        self.ready.given.add(disk);
        self.wait_origin(disk, target, SyncWaiter::Destage, now, fx);
    }

    pub fn destage_flushed(&mut self, disk: DiskId, failed: bool, now: u64, fx: &mut Effects) {
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        let n = std::mem::take(&mut d.origin.destage.covered);
        d.origin.destage.hangs = false;
        if failed {
            for w in d.origin.destage.written.drain(..n).collect::<Vec<_>>() {
                match w {
                    Written::Data { block, slot } => {
                        self.flash.unpin_slot(slot);
                        self.cache.index.set_mark(slot, false);
                        self.unwrite(disk, block, slot);
                    }
                    Written::Zero { .. } => {}
                }
            }
            let d = self.known_mut(disk);
            d.counters.destage_errors += 1;
            d.origin.destage.note_trouble(d.origin.sync.error, now);
            self.forget_void(disk);
            self.destage_back_off(disk, now, fx);
            return;
        }
        let d = self.known_mut(disk);
        d.origin.destage.trouble = None;
        self.mark_clean(disk, n, now, fx);
        self.destage_flush_if_due(disk, now, fx);
    }

    /// The origin has the first `n` written runs durably: step 4.
    fn mark_clean(&mut self, disk: DiskId, n: usize, now: u64, fx: &mut Effects) {
        // The newer record cannot come before there is room, and that may need this block gone.
        let stuck = self.flash.starved();
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        let written: Vec<Written> = d.origin.destage.written.drain(..n).collect();
        let mut runs: Vec<(Kind, u64, u64)> = Vec::new();
        for w in written {
            match w {
                Written::Data { block, slot } => {
                    self.flash.unpin_slot(slot);
                    self.cache.index.set_mark(slot, false);
                    let d = self.known_mut(disk);
                    if let Some(order) = d.order.as_deref_mut() {
                        order.done(block, slot);
                    }
                    if self.clean_block(disk, block, slot) {
                        push_run(&mut runs, Kind::CleanedRun, block, 1);
                    } else if stuck {
                        took(Path::StuckLetGo);
                        self.let_go(disk, block, slot);
                    }
                }
                Written::Zero { block, count } => {
                    let count_void = self.opts.faults.has(Fault::VoidZerosCount);
                    let d = self.known(disk);
                    let void = &d.origin.destage.zero_void;
                    let still: Vec<u64> = d
                        .zero
                        .range(block, block + count)
                        .filter(|b| !void.contains(*b) || count_void)
                        .collect();
                    for b in still {
                        if !self.superseding(disk, b, b + 1)
                            || self.opts.faults.has(Fault::ZerosToldSuperseded)
                        {
                            push_run(&mut runs, Kind::ZeroDoneRun, b, 1);
                        } else if stuck {
                            self.zeros_told(disk, b, 1);
                        }
                    }
                }
            }
        }
        for (kind, block, count) in runs {
            let ord = self.flash.record(kind, disk, block, count, Then::Nothing);
            if kind == Kind::ZeroDoneRun {
                self.zeros_told(disk, block, count);
            }
            let d = self.known_mut(disk);
            d.cleaned_ord = ord;
        }
        self.forget_void(disk);
        self.go_on_in_order(disk, now, fx);
        self.note_clean(disk);
        self.wake_clean_waiters(disk, now, fx);
    }

    /// What the origin was given of a block of an ordered disk does not count.
    fn unwrite(&mut self, disk: DiskId, block: u64, slot: SlotNo) {
        let order = self.disk_mut(disk).and_then(|d| d.order.as_deref_mut());
        if let Some(order) = order {
            order.set_written(block, slot, false);
        }
    }

    /// Lets go of what origins that hang hold of a segment. Their writes may still come through at any
    /// time, so the ranges stay busy: nothing else is written there, and none of it counts as clean.
    /// Only of this segment, because one that is no more than slow should not have worked for nothing.
    pub fn let_go_of_hung(&mut self, seg: u32, now: u64) {
        let hangs = |since: u64| now.saturating_sub(since) > HANGS_NS;
        let here = |slot: SlotNo, segment_blocks: u32| slot / segment_blocks == seg;
        let blocks = self.flash.log.segment_blocks;
        let mut given = self.ready.given.take();
        given.sort_unstable();
        for disk in given {
            let Some(d) = self.disks[usize::from(disk)].as_deref() else {
                continue;
            };
            if !d.origin.destage.is_given() {
                continue;
            }
            self.ready.given.add(disk);
            let busy: Vec<usize> = d
                .origin
                .destage
                .busy
                .iter()
                .map(|(_, _, job)| *job)
                .collect();
            let mut hung = d.origin.destage.covered > 0 && hangs(d.origin.destage.covered_ns);
            let mut slots: SmallVec<[SlotNo; 4]> = SmallVec::new();
            for id in busy {
                let job = &mut self.destaging.jobs[id];
                // With its memory gone it is the origin's turn.
                if job.buf.is_none() && hangs(job.started_ns) {
                    hung = true;
                    for slot in job.slots.iter_mut().filter(|s| here(**s, blocks)) {
                        slots.push(std::mem::replace(slot, NOWHERE));
                    }
                }
            }
            self.let_go_of(&slots);
            if hung && let Some(d) = self.disk_mut(disk) {
                took(Path::HungLetGo);
                d.origin.destage.hangs = true;
                self.doubt(disk, |_, slot| here(slot, blocks));
            }
        }
    }

    /// The origin refused a write, and may have taken a part of it: what was destaged there before
    /// and waits for the flush does not count.
    pub fn doubt_written(&mut self, disk: DiskId, start: u64, end: u64) {
        let d = self.known_mut(disk);
        d.origin.destage.void_zeros(start, end);
        self.doubt(disk, |block, _| (start..end).contains(&block));
    }

    /// Of the blocks that wait for the flush, those that `which` picks do not count.
    fn doubt(&mut self, disk: DiskId, which: impl Fn(u64, SlotNo) -> bool) {
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        let mut slots: SmallVec<[SlotNo; 4]> = SmallVec::new();
        for w in &mut d.origin.destage.written {
            match *w {
                Written::Data { block, slot } if which(block, slot) => {
                    took(Path::WrittenDoubted);
                    slots.push(slot);
                    if let Some(order) = d.order.as_deref_mut() {
                        order.set_written(block, slot, false);
                    }
                    // It keeps its place: the flush covers so many.
                    *w = Written::Zero { block, count: 0 };
                }
                _ => {}
            }
        }
        self.let_go_of(&slots);
    }

    fn let_go_of(&mut self, slots: &[SlotNo]) {
        for slot in slots {
            self.flash.unpin_slot(*slot);
            self.cache.index.set_mark(*slot, false);
        }
    }

    /// Once no run of zeros waits for the flush, none can be misunderstood.
    fn forget_void(&mut self, disk: DiskId) {
        if let Some(d) = self.disk_mut(disk)
            && !d
                .origin
                .destage
                .written
                .iter()
                .any(|w| matches!(w, Written::Zero { .. }))
        {
            d.origin.destage.zero_void.clear();
        }
    }

    /// Marks one block clean if it is still the one that was destaged.
    fn clean_block(&mut self, disk: DiskId, block: u64, slot: SlotNo) -> bool {
        let now_at = self.cache.index.get(Key::new(disk, block));
        let slot = match now_at {
            Some(there) if self.opts.faults.has(Fault::CleanMoved) => there,
            _ => slot,
        };
        if now_at != Some(slot) || !self.cache.index.slot(slot).is_some_and(|s| s.dirty) {
            return false;
        }
        if self.superseding(disk, block, block + 1) && !self.opts.faults.has(Fault::CleanSuperseded)
        {
            took(Path::DestagedBehindWrite);
            return false;
        }
        let d = self.known_mut(disk);
        d.no_longer_dirty(block);
        let counted = !d.is_promised();
        self.cache.index.set_dirty(slot, false);
        self.flash.slot_cleaned(slot);
        self.dirty_total -= u64::from(counted);
        true
    }
}

fn is_over(dirty: u64, of: u64, percent: u32) -> bool {
    dirty * 100 > of.saturating_mul(u64::from(percent))
}

fn push_run(runs: &mut Vec<(Kind, u64, u64)>, kind: Kind, block: u64, count: u64) {
    match runs.last_mut() {
        Some((k, start, n)) if *k == kind && *start + *n == block => *n += count,
        _ => runs.push((kind, block, count)),
    }
}

#[cfg(test)]
mod tests;
