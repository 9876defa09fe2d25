//! The destager: dirty blocks to the origin, in disk order; while clients are active, first what
//! lies behind their last read.
//!
//! For each run, in order: (1) read it from flash, checksums checked; (2) once the log is durable
//! up to it, write the origin ([`run`]);
//! (3) flush the origin, many runs at once; (4) mark clean, in RAM and in the log, the blocks
//! that are still where they were read from ([`clean`]). Before (3) the origin may lose them again, so
//! they stay dirty; a crash anywhere repeats the work, which is harmless. A block that a write
//! holds is not marked: its newer record may already stand in the log before our mark.
//!
//! Here it is decided which disk has its turn, how many runs may be on their way, and which is next.

mod clean;
mod run;

use crate::api::{DiskId, Effects, Home};
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::origin::pace;
use crate::origin::pace::{JOBS_BUSY, Need};
use crate::origin::progress::Written;
use std::ops::Range;

/// The share of flash that may be dirty, in percent, below the high mark, before haste begins.
const HASTE_PERCENT: u32 = 5;
/// Longest run: 1 MiB.
const RUN_MAX: u64 = 256;
/// Runs of lost blocks that one look for dirty blocks passes; the next look continues there.
const LOST_RUNS_MAX: u32 = 1024;
/// Disks that wait for nothing but the pool's need, of which so many are looked at per event.
const OWING_PER_STEP: usize = 8;
/// A disk with a need of its own that may not start a run is looked at again after this time at least.
const PAUSE_MIN_NS: u64 = 1_000_000;

/// Result of a look for dirty blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A block that can be destaged, and how many may go with it at most.
    Run(u64, u64),
    /// Too many lost blocks in front of this one: the look continues here.
    Beyond(u64),
    /// Nothing can be destaged now.
    Nothing,
}

/// What became of a disk's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Started,
    /// The sweep has moved on over lost blocks, and more may follow.
    Moved,
    Blocked,
}

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
        let stuck = self.reqs.wants_room && !self.flash.comes_free();
        if stuck || !self.flash.takes_writes() || self.flash.wants_clean() {
            return Need::Urgent;
        }
        if over(self.haste_percent()) {
            return Need::Haste;
        }
        if over(self.opts.dirty_low_percent) {
            return Need::Background;
        }
        if self.nobody_asks(now) {
            return Need::Idle;
        }
        Need::None
    }

    /// Nobody asks for anything, nobody has for a while, and nobody else who uses the flash is held up.
    fn nobody_asks(&self, now: u64) -> bool {
        self.reqs.foreground + self.destaging.lane_hits == 0
            && !self.destaging.others_wait
            && now.saturating_sub(self.reqs.last_foreground_ns) > self.opts.idle_ns
    }

    /// Takes note of hits that clients have without the core.
    fn note_hits(&mut self) {
        let (hits, last) = self.shared.pulse();
        self.destaging.lane_hits = hits;
        self.reqs.last_foreground_ns = self.reqs.last_foreground_ns.max(last);
    }

    /// The same as it is at this moment, for who does something on the devices beside the engine.
    pub fn nobody_asks_now(&mut self, now: u64) -> bool {
        self.note_hits();
        self.nobody_asks(now)
    }

    /// A stop keeps what is dirty on flash, if it can. Were it destaged, one run would follow the other
    /// and the engine would not come to rest.
    fn stops_with_dirty(&self) -> bool {
        self.quiescing && self.flash.takes_writes()
    }

    /// From so many in a hundred on, writers are slowed down.
    pub fn haste_percent(&self) -> u32 {
        self.dirty_high_percent().saturating_sub(HASTE_PERCENT)
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
        self.note_hits();
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
        self.dirty_room(self.haste_percent())..self.dirty_room(self.dirty_high_percent())
    }

    /// Starts as many runs of a disk as are due, and puts it on the list where it belongs then.
    fn destage_disk(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let d = self.disk(disk);
        let in_the_way = d.is_some_and(|d| d.held && !d.zero.is_empty()) && self.too_many_runs();
        if in_the_way
            || self.flash.starved()
            || !self.flash.takes_writes()
            || self.flash.is_single()
        {
            self.stop_holding(disk);
        }
        let need = self.need(disk, now);
        let mut last = Turn::Started;
        loop {
            let mut limit = self.may_start(need, now);
            // It may have been removed since it was put on a list.
            let Some(d) = self.disk_mut(disk) else { return };
            if d.held {
                break;
            }
            if need == Need::Background && !d.tickets.is_empty() {
                // Misses of clients go first: the origin has one arm.
                limit = limit.min(1);
            }
            if d.origin.destage.busy.len() >= limit {
                break;
            }
            let stands_back = need <= Need::Background || need == Need::Asked;
            let paced = stands_back && self.paced(now);
            if paced && self.known(disk).lets_readers_by(now) {
                break;
            }
            // Among reads that clients wait for, the way to the next run in the sweep and back
            // would cost each of them a seek. When haste begins, the sweep takes them all.
            if paced && need >= Need::Background {
                let d = self.known_mut(disk);
                if let Some(near) = d.origin.destage.near.take() {
                    d.origin.destage.cursor = near;
                }
            }
            last = self.destage_one(disk, paced, now, fx);
            if last != Turn::Started {
                break;
            }
        }
        self.destage_flush_if_due(disk, now, fx);
        self.line_up(disk, need, last, now);
    }

    /// Puts a disk that was looked at where it will be looked at again, if nothing of its own calls for it
    /// before.
    fn line_up(&mut self, disk: DiskId, need: Need, last: Turn, now: u64) {
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
        } else if may && last != Turn::Blocked && !full {
            self.ready.owing.add(disk);
            if need > self.pool_need(now) || last == Turn::Moved {
                // A pause, the limit on bandwidth, or the rest of a look, which come without an event.
                let at = self.destaging.pause_ns.max(now + PAUSE_MIN_NS);
                self.ready.timers.insert((at, disk));
            }
        }
    }

    /// Clients are active, or somebody else who uses the flash is held up: what nobody waits for stands back.
    fn paced(&self, now: u64) -> bool {
        self.destaging.others_wait
            || self.reqs.foreground + self.destaging.lane_hits > 0
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

    /// Starts the next run of a disk. If `paced`, one that holds up clients as little as can be: short, and
    /// without a flush of the log if there is one that needs none.
    fn destage_one(&mut self, disk: DiskId, paced: bool, now: u64, fx: &mut Effects) -> Turn {
        if self.destage_urgent(disk, now, fx) {
            return Turn::Started;
        }
        let zeros = self.disk(disk).and_then(|d| self.next_zeros(d, now));
        if let Some((block, past)) = zeros {
            self.destage_zero(disk, block, past, now, fx);
            return Turn::Started;
        }
        let d = self.known(disk);
        let next = match paced.then(|| self.next_run(d, true, now)) {
            None | Some(Next::Nothing) => self.next_run(d, false, now),
            Some(next) => next,
        };
        match next {
            Next::Run(block, left) if self.destage_run(disk, block, left, paced, now, fx) => {
                Turn::Started
            }
            Next::Beyond(block) => {
                self.known_mut(disk).origin.destage.cursor = block;
                Turn::Moved
            }
            Next::Run(..) | Next::Nothing => Turn::Blocked,
        }
    }

    /// The next dirty block of a disk's sweep that nothing keeps from the origin. If `durable`, one of which the
    /// log is durable.
    fn next_run(&self, d: &Disk, durable: bool, now: u64) -> Next {
        if let Some(order) = d.order.as_deref() {
            let next = self.next_in_order(d, order, now);
            return next.map_or(Next::Nothing, |block| Next::Run(block, RUN_MAX));
        }
        if d.lost.len() == d.dirty.len() {
            return Next::Nothing;
        }
        // One sweep over the disk, wrapping once.
        let (disk, cursor) = (d.cfg.id, d.origin.destage.cursor);
        let mut lost_runs = 0;
        for (from, to) in [(cursor, u64::MAX), (0, cursor)] {
            let mut at = from;
            // Bounded: every step passes a busy range, a waiting read, or written or fresh blocks. These
            // are over some time; lost ones stay, and must not hide what lies behind them.
            let mut steps = 0;
            while steps < 64 {
                let Some(block) = d.dirty.first_in(at, to) else {
                    break;
                };
                if d.lost.contains(block) {
                    if self.opts.faults.has(Fault::WaitBehindLost) {
                        return Next::Nothing;
                    }
                    at = block + d.lost.run_len(block, u64::MAX);
                    lost_runs += 1;
                    if lost_runs == LOST_RUNS_MAX {
                        return Next::Beyond(at);
                    }
                    continue;
                }
                at = match self.destage_obstacle(disk, block, now) {
                    Some(past) => past,
                    None if !self.may_go(disk, block, durable) => block + 1,
                    None => {
                        return Next::Run(block, d.dirty.run_len(block, RUN_MAX.min(to - block)));
                    }
                };
                steps += 1;
            }
        }
        Next::Nothing
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
                .chain(d.tickets.iter().filter(|t| t.is_reading()).map(|t| t.start))
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
            && (self.next_run(d, false, now) != Next::Nothing || self.next_zeros(d, now).is_some())
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
            .find(|t| t.is_reading() && (t.start..t.end).contains(&block))
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
}

fn is_over(dirty: u64, of: u64, percent: u32) -> bool {
    dirty * 100 > of.saturating_mul(u64::from(percent))
}

#[cfg(test)]
mod tests;
