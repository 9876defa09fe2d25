//! Durability: flushes of flash and origins, shared by all who wait, and the intents that
//! protect clean copies while an origin changes.

use crate::api::{DiskId, Effects, ReqError};
use crate::core::{Core, FlashWaiter, OpCtx};
use crate::ctx::Io;
use crate::disk::{Intent, SyncWaiter};
use crate::faults::Fault;
use crate::flash::device::FlashOp;
use crate::flash::fail::Promise;
use crate::flash::log::Then;
use crate::flash::rescue::Closing;
use crate::ids::ReqId;
use crate::request::answer::INTENT_STAYS;
use crate::request::state::{Flush, State, Step};
use hearth_format::Kind;
use hearth_io::{IoError, Target};

/// First wait after an origin's flush failed before one that no guest waits for is tried again.
const SYNC_BACKOFF_NS: u64 = 20_000_000;
/// How often that wait doubles: to 1.28 s, so that a stop with a time limit still gets its tries.
const SYNC_BACKOFF_DOUBLINGS: u32 = 6;

/// A flush of the flash device is started when this much was appended since the last one was: after
/// a crash every batch behind the last flush is read to see whether it is whole, and a fast device
/// takes gigabytes within the second of the tick. 64 MiB are read in less than a second by any SSD, and a flush
/// per 64 MiB costs no SSD a noticeable share of its time.
pub const FLUSH_AFTER_BYTES: u64 = 64 << 20;

impl Core {
    /// Batches of `bytes` are on flash: bounds what a crash leaves to be read.
    pub fn flush_if_much(&mut self, bytes: u64, now: u64, fx: &mut Effects) {
        self.flash.unflushed_bytes += bytes;
        if self.flash.unflushed_bytes >= FLUSH_AFTER_BYTES {
            self.start_flash_flush(now, fx);
        }
    }

    /// A client's flush: whatever it covers is durable on flash, or on the origin, or both.
    pub fn start_flush(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let applied = self.flash.log.applied_ord;
        if self.fenced(disk) {
            self.reqs[id].failed = Some(ReqError::Io);
            self.finish(id, now, fx);
            return;
        }
        let d = self.known(disk);
        let flash = d.is_dirty() && self.flash.log.durable_ord < applied;
        let (guest, durable) = (d.sync.guest, d.sync.durable);
        if self.flash.failed && d.is_dirty() {
            match self.promise_of_left_flash(disk) {
                Promise::None if self.opts.faults.has(Fault::PromiseBroken) => {}
                Promise::None => {
                    self.reqs[id].failed = Some(ReqError::Io);
                    self.finish(id, now, fx);
                    return;
                }
                Promise::Later => {
                    self.reqs[id].state = State::Flush(Flush::Leaving);
                    self.reqs.leaving_flushes.push(id);
                    return;
                }
                Promise::Durable => {}
            }
        }
        if flash && self.opts.faults.has(Fault::SkipDeviceFlush) {
            self.finish(id, now, fx);
            return;
        }
        let origin = guest > durable && !self.opts.faults.has(Fault::FlushSkipsOrigin);
        let pending = u32::from(flash) + u32::from(origin);
        let again = false;
        self.reqs[id].state = State::Flush(Flush::Devices { pending, again });
        if !flash && !origin {
            self.finish(id, now, fx);
            return;
        }
        if flash {
            self.wait_flash(applied, FlashWaiter::Request(id), now, fx);
        }
        if origin {
            self.wait_origin(disk, guest, SyncWaiter::Request(id), now, fx);
        }
    }

    /// A device flush a request waited for has ended.
    fn request_durable(&mut self, id: ReqId, failed: bool, now: u64, fx: &mut Effects) {
        let req = &mut self.reqs[id];
        if failed {
            req.failed = Some(ReqError::Io);
        }
        let again = match &mut req.state {
            State::Flush(Flush::Devices { pending, again }) => {
                *pending -= 1;
                if *pending > 0 {
                    return;
                }
                *again
            }
            State::Write(write) => {
                let waits = matches!(write.step, Step::WaitsForFlash | Step::WaitsForOrigin);
                assert!(waits, "a write at {:?} waits for no flush", write.step);
                false
            }
            other => unreachable!("a device was flushed for {other:?}"),
        };
        if again && req.failed.is_none() {
            self.start_flush(id, now, fx);
        } else {
            self.finish(id, now, fx);
        }
    }

    /// The flush of flash that a request waited for has ended, or will never. If flash was given up in
    /// between and may still promise something, the request waits with those that come a moment later.
    fn request_flushed(&mut self, id: ReqId, failed: bool, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let again =
            failed && self.flash.failed && self.promise_of_left_flash(disk) != Promise::None;
        if again {
            self.flush_again(id, now, fx);
        }
        self.request_durable(id, failed && !again, now, fx);
    }

    /// Has a request ask anew what is durable, once it has ended waiting for what it waits for.
    fn flush_again(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        if let State::Flush(flush) = &mut self.reqs[id].state {
            match flush {
                Flush::Devices { again, .. } => *again = true,
                other => unreachable!("flash was flushed for a flush at {other:?}"),
            }
            return;
        }
        // What it wrote can only be destaged, which it waits for from here like a flush, once its range
        // is free.
        self.unlock(id);
        self.leave_regions(id, now);
        self.reqs[id].state = State::Flush(Flush::Devices {
            pending: 1,
            again: true,
        });
        let disk = self.reqs[id].disk;
        self.wake_locks(disk, now, fx);
    }

    /// A write has ended in the regions whose intents count it.
    pub fn leave_regions(&mut self, id: ReqId, now: u64) {
        let disk = self.reqs[id].disk;
        let Some((from, to)) = self.reqs[id].regions() else {
            return;
        };
        self.reqs[id].write_mut().regions = None;
        let d = self.known_mut(disk);
        for region in from..=to {
            let i = d.intents.get_mut(&region).expect(INTENT_STAYS);
            i.inflight -= 1;
            i.used_ns = now;
        }
    }

    /// Waits until the log is durable up to `ord`.
    pub fn wait_flash(&mut self, ord: u64, who: FlashWaiter, now: u64, fx: &mut Effects) {
        self.flash.waiters.push((ord, who));
        self.start_flash_flush(now, fx);
    }

    /// Starts a device flush unless one is in flight; waiters it does not cover start the next.
    pub fn start_flash_flush(&mut self, now: u64, fx: &mut Effects) {
        if self.flash.flush_inflight || self.flash.failed {
            return;
        }
        if self.flash.log.applied_seq <= self.flash.log.durable_seq
            && !self.flash.waiters.is_empty()
        {
            // Nothing new is on flash yet; what is waited for is still queued.
            self.flash.log.urgent = true;
            return;
        }
        self.flash.flush_inflight = true;
        self.flash.last_flush_ns = now;
        self.flash.unflushed_bytes = 0;
        self.flash.log.epoch += 1;
        self.flash.counters.flash_flushes += 1;
        let op = FlashOp::Flush {
            ord: self.flash.log.applied_ord,
            seq: self.flash.log.applied_seq,
        };
        self.io(fx, op.into(), Io::flush(self.flash.target()));
    }

    pub fn flash_flush_done(
        &mut self,
        ord: u64,
        seq: u64,
        result: Result<(), IoError>,
        now: u64,
        fx: &mut Effects,
    ) {
        self.flash.flush_inflight = false;
        if result.is_err() && !self.opts.faults.has(Fault::IgnoreFlashFlushError) {
            // After a failed flush nobody knows what the device kept: it has failed.
            self.flash.counters.flash_errors += 1;
            self.flash.full = false;
            self.fail_flash(now, fx);
            return;
        }
        let (ord, seq) = match self.opts.faults.has(Fault::FlushCoversLater) {
            true => (self.flash.log.applied_ord, self.flash.log.applied_seq),
            false => (ord, seq),
        };
        self.flash.log.durable_ord = self.flash.log.durable_ord.max(ord);
        self.flash.log.durable_seq = self.flash.log.durable_seq.max(seq);
        self.segments_durable(now, fx);
        let durable = self.flash.log.durable_ord;
        let waiters = std::mem::take(&mut self.flash.waiters);
        let durable_seq = self.flash.log.durable_seq;
        let (ready, wait): (Vec<_>, Vec<_>) =
            waiters.into_iter().partition(|(ord, who)| match who {
                FlashWaiter::Destage(job) => self.destaging.jobs[*job].batch <= durable_seq,
                _ => *ord <= durable,
            });
        self.flash.waiters = wait;
        for (_, who) in ready {
            self.flash_waited(who, false, now, fx);
        }
        // Who has to wait on lines up again.
        for disk in self.ready.awaited.take() {
            self.wake_clean_waiters(disk, now, fx);
        }
        if !self.flash.waiters.is_empty() {
            self.start_flash_flush(now, fx);
        }
        self.flush_if_much(0, now, fx);
    }

    /// Tells one waiter how the flash flush ended.
    pub fn flash_waited(&mut self, who: FlashWaiter, failed: bool, now: u64, fx: &mut Effects) {
        match who {
            FlashWaiter::Request(id) => self.request_flushed(id, failed, now, fx),
            FlashWaiter::Intent { disk, region } => {
                if let Some(i) = self.disk_mut(disk).and_then(|d| d.intents.get_mut(&region)) {
                    i.active = true;
                }
                self.wake_intent(disk, region, now, fx);
            }
            // If flash failed, nothing on it counts any more: the origin is what must be whole.
            FlashWaiter::Destage(job) => self.destage_write(job, now, fx),
            FlashWaiter::Nobody => {}
        }
    }

    /// Waits until the origin's first `target` writes are durable.
    pub fn wait_origin(
        &mut self,
        disk: DiskId,
        target: u64,
        who: SyncWaiter,
        now: u64,
        fx: &mut Effects,
    ) {
        let d = self.known_mut(disk);
        if d.sync.durable >= target {
            self.origin_waited(disk, who, false, now, fx);
            return;
        }
        if d.fenced {
            self.origin_waited(disk, who, true, now, fx);
            return;
        }
        d.sync.waiters.push((target, who));
        self.start_origin_flush(disk, fx);
    }

    fn start_origin_flush(&mut self, disk: DiskId, fx: &mut Effects) {
        let d = self.known_mut(disk);
        if d.sync.inflight.is_some() {
            return;
        }
        let covers = d.sync.completed;
        d.sync.inflight = Some(covers);
        let io = Io::flush(Target::Origin(disk));
        self.io(fx, OpCtx::OriginFlush { disk, covers }, io);
    }

    pub fn origin_flush_done(
        &mut self,
        disk: DiskId,
        covers: u64,
        result: Result<(), IoError>,
        now: u64,
        fx: &mut Effects,
    ) {
        let faults = self.opts.faults;
        let d = self.known_mut(disk);
        d.sync.inflight = None;
        let covers = match faults.has(Fault::OriginFlushCoversLater) {
            true => d.sync.completed,
            false => covers,
        };
        let failed = result.is_err() && !faults.has(Fault::IgnoreOriginFlushError);
        d.sync.error = result.err();
        if failed {
            let wait = SYNC_BACKOFF_NS << d.sync.failures.min(SYNC_BACKOFF_DOUBLINGS);
            d.sync.not_before_ns = now + wait;
            d.sync.failures += 1;
        } else {
            d.sync.failures = 0;
            d.sync.durable = d.sync.durable.max(covers);
        }
        let waiters = std::mem::take(&mut d.sync.waiters);
        let (ready, wait): (Vec<_>, Vec<_>) = waiters
            .into_iter()
            .partition(|(target, _)| failed || *target <= covers);
        d.sync.waiters = wait;
        for (_, who) in ready {
            self.origin_waited(disk, who, failed, now, fx);
        }
        let more = self.disk(disk).is_some_and(|d| !d.sync.waiters.is_empty());
        if more && self.fenced(disk) {
            let waiters = self
                .disk_mut(disk)
                .map(|d| std::mem::take(&mut d.sync.waiters));
            for (_, who) in waiters.into_iter().flatten() {
                self.origin_waited(disk, who, true, now, fx);
            }
        } else if more {
            self.start_origin_flush(disk, fx);
        }
    }

    fn origin_waited(
        &mut self,
        disk: DiskId,
        who: SyncWaiter,
        failed: bool,
        now: u64,
        fx: &mut Effects,
    ) {
        match who {
            SyncWaiter::Request(id) => self.request_durable(id, failed, now, fx),
            SyncWaiter::Nobody => {}
            SyncWaiter::Destage => self.destage_flushed(disk, failed, now, fx),
            SyncWaiter::Intents => {
                if !failed {
                    self.clear_intents(disk, now);
                }
            }
        }
    }

    /// Step 3 of a write past the cache. False: the request waits for its intent.
    pub fn intent_or_wait(
        &mut self,
        id: ReqId,
        disk: DiskId,
        start: u64,
        end: u64,
        now: u64,
        fx: &mut Effects,
    ) -> bool {
        let seg_hint = self.flash.log.next_segment_seq;
        if self.reqs[id].regions().is_some()
            || self.flash.failed
            || self.opts.faults.has(Fault::DropIntent)
        {
            let waiting = self.reqs[id].regions().is_some_and(|(from, to)| {
                self.disk(disk).is_some_and(|d| {
                    (from..=to).any(|r| d.intents.get(&r).is_some_and(|i| !i.active))
                })
            });
            if waiting && !self.flash.failed {
                // It may have waited for something else before.
                self.reqs[id].write_mut().step = Step::WaitsForIntent;
                return false;
            }
            return true;
        }
        if self.leaves_flash_alone(disk) {
            return true;
        }
        let faults = self.opts.faults;
        let d = self.known_mut(disk);
        let last = match faults.has(Fault::IntentOneRegion) {
            true => start,
            false => end - 1,
        };
        let (from, to) = (
            (start / d.region_blocks) as u32,
            (last / d.region_blocks) as u32,
        );
        let mut ready = true;
        let unawaited = faults.has(Fault::IntentUnawaited);
        let mut new = Vec::new();
        for region in from..=to {
            let intent = d.intents.entry(region).or_insert_with(|| {
                new.push(region);
                Intent {
                    seg_seq: seg_hint,
                    ..Intent::default()
                }
            });
            intent.inflight += 1;
            intent.used_ns = now;
            ready &= intent.active || unawaited;
        }
        self.reqs[id].write_mut().regions = Some((from, to));
        self.ready.note(disk);
        for region in new {
            self.record_intent(disk, region);
        }
        if !ready {
            self.reqs[id].write_mut().step = Step::WaitsForIntent;
            self.start_flash_flush(now, fx);
        }
        ready
    }

    /// Queues the record of an intent; once it is durable, it is active.
    pub fn record_intent(&mut self, disk: DiskId, region: u32) {
        let count = self.known(disk).region_blocks;
        let then = Then::Intent { disk, region };
        let start = u64::from(region) * count;
        let ord = self
            .flash
            .log
            .record(Kind::Intent, disk, start, count, then);
        if let Some(i) = self.disk_mut(disk).and_then(|d| d.intents.get_mut(&region)) {
            i.ord = ord;
        }
        self.flash
            .waiters
            .push((ord, FlashWaiter::Intent { disk, region }));
        self.flash.log.urgent = true;
    }

    /// The record of an intent is on flash (not yet durable): remember where.
    pub fn intent_applied(&mut self, disk: DiskId, region: u32, seg_seq: u64) {
        if let Some(i) = self.disk_mut(disk).and_then(|d| d.intents.get_mut(&region)) {
            i.seg_seq = seg_seq;
        }
    }

    /// An intent became durable: requests that waited for it go on.
    pub fn wake_intent(&mut self, disk: DiskId, region: u32, now: u64, fx: &mut Effects) {
        // The record may have waited for the flush of flash longer than the disk was there.
        let Some(d) = self.disk(disk) else { return };
        let start = u64::from(region) * d.region_blocks;
        let holders = d.locks.meeting(start, start + d.region_blocks);
        let waits = |id: &ReqId| self.reqs[*id].write().step == Step::WaitsForIntent;
        let waiting: Vec<ReqId> = holders.map(|l| l.req).filter(waits).collect();
        for id in waiting {
            self.go_through(id, now, fx);
        }
    }

    /// A disk that is being drained is not done before the origin has everything durably, what
    /// an earlier run of the daemon wrote included.
    pub fn sync_draining(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        // It may have been removed since it was put on a list.
        let Some(d) = self.disk(disk) else { return };
        let target = d.sync.completed;
        if (d.drain || self.quiescing)
            && d.attached
            && target > d.sync.durable
            && d.sync.inflight.is_none()
            && !d.sync.backing_off(now)
        {
            self.wait_origin(disk, target, SyncWaiter::Nobody, now, fx);
        }
    }

    /// Asks for an origin flush where intents of a disk have been idle, so that they can be closed. Those
    /// of a disk whose origin is missing wait until it is there.
    pub fn close_idle_intents(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let idle_ns = if self.quiescing {
            0
        } else {
            self.opts.intent_idle_ns
        };
        let drain = self.disk(disk).is_some_and(|d| d.drain);
        let idle_ns = if drain { 0 } else { idle_ns };
        if self.opts.faults.has(Fault::CloseUnflushed) {
            self.clear_intents(disk, now);
        }
        let Some(d) = self.disk_mut(disk).filter(|d| d.attached) else {
            return;
        };
        let idle =
            |i: &Intent| i.active && i.inflight == 0 && now.saturating_sub(i.used_ns) >= idle_ns;
        let unguarded = d.sync.unguarded;
        let Some(target) = d
            .intents
            .values()
            .filter(|i| idle(i))
            .map(|i| i.written)
            .chain(d.waits_unguarded().then_some(unguarded))
            .max()
        else {
            return;
        };
        let asked = d
            .sync
            .waiters
            .iter()
            .any(|(_, w)| matches!(w, SyncWaiter::Intents));
        if !asked && !d.sync.backing_off(now) {
            self.wait_origin(disk, target, SyncWaiter::Intents, now, fx);
        }
    }

    /// Closes intents whose writes the origin has made durable. Their replaced copies are in the
    /// log before this record, so a crash sees both or still sees the intent.
    fn clear_intents(&mut self, disk: DiskId, now: u64) {
        let idle_ns = if self.quiescing {
            0
        } else {
            self.opts.intent_idle_ns
        };
        let faults = self.opts.faults;
        let Some(d) = self.disk_mut(disk) else { return };
        let idle_ns = if d.drain { 0 } else { idle_ns };
        let durable = match faults.has(Fault::CloseUnflushed) {
            true => u64::MAX,
            false => d.sync.durable,
        };
        let region_blocks = d.region_blocks;
        let done: Vec<u32> = d
            .intents
            .iter()
            .filter(|(_, i)| {
                i.active
                    && (i.inflight == 0 || faults.has(Fault::CloseInUse))
                    && i.written <= durable
                    && now.saturating_sub(i.used_ns) >= idle_ns
            })
            .map(|(r, _)| *r)
            .collect();
        for region in done {
            let intent = self.disk_mut(disk).and_then(|d| d.intents.remove(&region));
            let block = u64::from(region) * region_blocks;
            let ord =
                self.flash
                    .log
                    .record(Kind::IntentClear, disk, block, region_blocks, Then::Nothing);
            if let Some(intent) = intent {
                let applied = self.flash.log.applied_ord;
                self.flash.rescue.closing.retain(|c| c.ord > applied);
                self.flash.rescue.closing.push(Closing {
                    seg_seq: intent.seg_seq,
                    ord,
                });
            }
        }
    }

    /// Fails every request that waits for an origin flush or for flash; used when flash fails.
    pub fn fail_flash_waiters(&mut self, now: u64, fx: &mut Effects) {
        for (_, who) in std::mem::take(&mut self.flash.waiters) {
            self.flash_waited(who, true, now, fx);
        }
    }
}
