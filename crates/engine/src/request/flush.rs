//! Durability: flushes of flash and origins, shared by all who wait, and the intents that
//! protect clean copies while an origin changes.

use crate::api::{DiskId, Effects, ReqError, ReqOp};
use crate::core::apply::Then;
use crate::core::route::FlashWaiter;
use crate::core::{Core, OpCtx};
use crate::ctx::Io;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::flash::fail::Promise;
use crate::ids::ReqId;
use crate::origin::sync::{SyncWaiter, Wait};
use crate::request::state::{Flush, State, Step};
use hearth_format::Kind;
use hearth_io::{IoError, Target};

impl Core {
    /// A client's flush: whatever it covers is durable on flash, or on the origin, or both.
    pub fn start_flush(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let applied = self.flash.log.applied_ord;
        // A write that has to be durable comes here when flash was left before it was. Its failure tells the client of that write alone.
        let is_flush = self.reqs[id].op == ReqOp::Flush;
        if self.fenced(disk) {
            if is_flush {
                self.known_mut(disk).origin.sync.flush_refused();
            }
            self.reqs[id].failed = Some(ReqError::Io);
            self.finish(id, now, fx);
            return;
        }
        self.ends_epoch(disk);
        let d = self.known(disk);
        if d.is_scratch() {
            self.finish(id, now, fx);
            return;
        }
        // Of a disk that lives on flash a discard leaves nothing that is dirty, and no origin that would be
        // told: only the log knows of it.
        // One that was given an origin may have such discards from before.
        let homeless = (!d.has_origin() || d.is_promised() && self.flash.takes_writes())
            && !self.opts.faults.has(Fault::FlushForgetsDiscards);
        let on_flash = d.is_dirty() || homeless;
        let flash = on_flash && self.flash.log.durable_ord < applied;
        let (guest, durable) = match d.has_origin() {
            true => (d.origin.sync.guest(), d.origin.sync.durable()),
            false => (0, 0),
        };
        if !self.flash.takes_writes() && on_flash {
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
            self.wait_flash(Until::Ord(applied), FlashWaiter::Request(id), now, fx);
        }
        if origin {
            let who = match is_flush {
                true => SyncWaiter::Flush(id),
                false => SyncWaiter::Fua(id),
            };
            self.wait_origin(disk, guest, who, now, fx);
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
    pub fn request_flushed(&mut self, id: ReqId, failed: bool, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let again = failed
            && !self.flash.takes_writes()
            && self.promise_of_left_flash(disk) != Promise::None;
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
        let Some(regions) = self.reqs[id].regions() else {
            return;
        };
        self.reqs[id].write_mut().regions = None;
        let d = self.known_mut(disk);
        d.origin.intents.leave(regions, now);
    }

    /// An intent is recorded durably: requests that waited for it go on.
    pub fn intent_durable(&mut self, disk: DiskId, region: u32, now: u64, fx: &mut Effects) {
        if let Some(d) = self.disk_mut(disk) {
            d.origin.intents.activate(region);
        }
        self.wake_intent(disk, region, now, fx);
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
        if d.fenced && d.origin.sync.durable() < target {
            if matches!(who, SyncWaiter::Flush(_)) {
                d.origin.sync.flush_refused();
            }
            self.origin_waited(disk, who, true, now, fx);
            return;
        }
        match d.origin.sync.wait(target, who) {
            Wait::Over => self.origin_waited(disk, who, false, now, fx),
            Wait::Begun => self.start_origin_flush(disk, fx),
        }
    }

    fn start_origin_flush(&mut self, disk: DiskId, fx: &mut Effects) {
        if let Some(covers) = self.known_mut(disk).origin.sync.begin_flush() {
            let io = Io::flush(Target::Origin(disk));
            self.io(fx, OpCtx::OriginFlush { disk, covers }, io);
        }
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
        let covers = match faults.has(Fault::OriginFlushCoversLater) {
            true => d.origin.sync.completed(),
            false => covers,
        };
        let error = result.err();
        let error = error.filter(|_| !faults.has(Fault::IgnoreOriginFlushError));
        for who in d.origin.sync.end_flush(covers, error, now) {
            self.origin_waited(disk, who, error.is_some(), now, fx);
        }
        let d = self.known_mut(disk);
        if d.origin.sync.waiters().next().is_none() {
            return;
        }
        if !d.fenced {
            return self.start_origin_flush(disk, fx);
        }
        for who in d.origin.sync.take_waiters() {
            self.origin_waited(disk, who, true, now, fx);
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
            SyncWaiter::Flush(id) | SyncWaiter::Fua(id) => {
                self.request_durable(id, failed, now, fx)
            }
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
        if self.reqs[id].regions().is_some()
            || !self.flash.takes_writes()
            || self.opts.faults.has(Fault::DropIntent)
        {
            let waiting = self.reqs[id].regions().is_some_and(|regions| {
                let d = self.disk(disk);
                d.is_some_and(|d| !d.origin.intents.are_active(regions))
            });
            if waiting && self.flash.takes_writes() && !self.leaves_flash_alone(disk) {
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
        let end = match faults.has(Fault::IntentOneRegion) {
            true => start + 1,
            false => end,
        };
        let regions = d.origin.intents.regions_of(start, end);
        let entered = d.origin.intents.enter(regions, now);
        self.reqs[id].write_mut().regions = Some(regions);
        self.ready.note(disk);
        if self.known(disk).is_draining(self.quiescing) {
            // It may have been done before: now it is not until the intent is closed.
            self.ready.draining.add(disk);
        }
        for region in entered.new {
            self.record_intent(disk, region);
        }
        let ready = entered.active || faults.has(Fault::IntentUnawaited);
        if !ready {
            self.reqs[id].write_mut().step = Step::WaitsForIntent;
            self.start_flash_flush(now, fx);
        }
        ready
    }

    /// Queues the record of an intent; once it is durable, it is active.
    pub fn record_intent(&mut self, disk: DiskId, region: u32) {
        let (start, end) = self.known(disk).origin.intents.blocks_of(region);
        let ord = self
            .flash
            .record(Kind::Intent, disk, start, end - start, Then::Intent);
        let who = FlashWaiter::Intent { disk, region };
        self.flash.tell_when_durable(Until::Ord(ord), who);
        self.flash.log.urgent = true;
    }

    /// An intent became durable: requests that waited for it go on.
    pub fn wake_intent(&mut self, disk: DiskId, region: u32, now: u64, fx: &mut Effects) {
        // The record may have waited for the flush of flash longer than the disk was there.
        let Some(d) = self.disk(disk) else { return };
        let (start, end) = d.origin.intents.blocks_of(region);
        let holders = d.locks.meeting(start, end);
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
        let sync = &d.origin.sync;
        let idle = !sync.is_durable() && !sync.is_flushing() && !sync.backing_off(now);
        if (d.drain || self.quiescing) && d.attached && d.has_origin() && idle {
            let target = sync.completed();
            self.wait_origin(disk, target, SyncWaiter::Nobody, now, fx);
        }
    }

    /// How long an intent of a disk must not have been used before it is closed.
    fn intent_idle_ns(&self, d: &Disk) -> u64 {
        match d.drain || self.quiescing {
            true => 0,
            false => self.opts.intent_idle_ns,
        }
    }

    /// Asks for an origin flush where intents of a disk have been idle, so that they can be closed. Those
    /// of a disk whose origin is missing wait until it is there.
    pub fn close_idle_intents(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        if self.opts.faults.has(Fault::CloseUnflushed) {
            self.clear_intents(disk, now);
        }
        let Some(d) = self.disk(disk).filter(|d| d.attached) else {
            return;
        };
        let sync = &d.origin.sync;
        let idle = d.origin.intents.idle_until(now, self.intent_idle_ns(d));
        let unguarded = d.waits_unguarded().then(|| sync.unguarded());
        let Some(target) = idle.into_iter().chain(unguarded).max() else {
            return;
        };
        let asked = sync.waiters().any(|who| who == SyncWaiter::Intents);
        if !asked && !sync.backing_off(now) {
            self.wait_origin(disk, target, SyncWaiter::Intents, now, fx);
        }
    }

    /// Closes intents whose writes the origin has made durable. Their replaced copies are in the
    /// log before this record, so a crash sees both or still sees the intent.
    fn clear_intents(&mut self, disk: DiskId, now: u64) {
        let faults = self.opts.faults;
        let Some(d) = self.disk(disk) else { return };
        let (idle_ns, durable) = (self.intent_idle_ns(d), d.origin.sync.durable());
        let durable = match faults.has(Fault::CloseUnflushed) {
            true => u64::MAX,
            false => durable,
        };
        let in_use = faults.has(Fault::CloseInUse);
        let intents = &mut self.known_mut(disk).origin.intents;
        let count = intents.region_blocks();
        for region in intents.close(durable, now, idle_ns, in_use) {
            let block = u64::from(region) * count;
            let ord = self
                .flash
                .record(Kind::IntentClear, disk, block, count, Then::Nothing);
            self.flash.note_closing(ord);
        }
    }
}
