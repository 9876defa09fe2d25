//! Between the flash device and everybody else: what it wants done is sent, what it tells goes to
//! whom it concerns, and what others want of it is asked here.

use crate::api::{DiskId, Effects, FlashFault};
use crate::core::apply::House;
use crate::core::{Core, OpCtx};
use crate::ctx::Io;
use crate::flash::device::{FlashEvent, FlashOp};
use crate::flash::devices::{Ended, Part, Told};
use crate::flash::durable::Until;
use crate::ids::ReqId;
use crate::paths::{Path, took};
use hearth_io::{BLOCK, BufSlice, IoDone, IoOp, OpKind, Target};
use smallvec::SmallVec;
use std::mem;

/// A run that was read, and the blocks of it that the other half has to give, one after the other.
#[derive(Debug)]
pub(crate) struct Alone {
    /// Who wanted the run.
    ctx: OpCtx,
    run: IoDone,
    left: SmallVec<[u32; 2]>,
    /// Rotten there as well.
    bad: SmallVec<[u32; 2]>,
    /// Where the run is in that half.
    from: (Target, u64),
}

impl Alone {
    #[cfg(any(test, feature = "check"))]
    pub fn ctx(&self) -> &OpCtx {
        &self.ctx
    }
}

/// The memory of a block of what was read.
fn block_of(bufs: &[BufSlice], block: u32) -> Option<BufSlice> {
    let mut at = block as usize * BLOCK as usize;
    for buf in bufs {
        if at + BLOCK as usize <= buf.len() {
            return Some(buf.sub(at, BLOCK as usize));
        }
        at = at.checked_sub(buf.len())?;
    }
    None
}

/// Who waits until something is durable on flash.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FlashWaiter {
    Request(ReqId),
    Intent {
        disk: DiskId,
        region: u32,
    },
    /// A destage job.
    Destage(usize),
    Nobody,
}

impl Core {
    /// Empties the flash device's outbox. Whoever calls the device does this before anything else.
    pub fn route_flash(&mut self, now: u64, fx: &mut Effects) {
        while !self.flash.out.is_empty() {
            let mut ios = mem::take(&mut self.flash.out.ios);
            for (op, io) in ios.drain(..) {
                // What is cleared for somebody else wears the device as well.
                if matches!(op, FlashOp::Batch { .. } | FlashOp::Wipe) && io.kind == OpKind::Write {
                    self.cache.policy.wrote(io.len / BLOCK);
                }
                let devices = &mut self.flash.devices;
                let parts = match io.kind {
                    OpKind::Flush if devices.are_several() => devices.flush(op),
                    OpKind::Flush | OpKind::Read => Vec::new(),
                    _ if devices.are_twice() => devices.pair(op, &io),
                    _ => Vec::new(),
                };
                if !parts.is_empty() {
                    for (part, io) in parts {
                        self.io(fx, OpCtx::FlashPart(part), io);
                    }
                    continue;
                }
                self.io(fx, op.into(), io);
            }
            self.flash.out.ios = ios;
            let mut events = mem::take(&mut self.flash.out.events);
            for event in events.drain(..) {
                self.flash_event(event, now, fx);
            }
            // Kept for its memory.
            if self.flash.out.events.is_empty() {
                self.flash.out.events = events;
            }
        }
    }

    fn flash_event(&mut self, event: FlashEvent<House>, now: u64, fx: &mut Effects) {
        match event {
            FlashEvent::Opened { seg } => {
                debug_assert!(!self.shared.pinned(seg), "a hit reads a free segment");
            }
            FlashEvent::Durable { who } => self.flash_waited(who, false, now, fx),
            FlashEvent::GivenUp { unsent, waiters } => {
                self.flash_given_up(unsent, waiters, now, fx)
            }
            FlashEvent::Noted => self.wake_mark_waiters(now, fx),
            // What is dirty goes to the origins.
            FlashEvent::DeviceLost => self.everyone_is_ready(),
        }
    }

    /// One device has done its part of a flush, or of what both halves get.
    pub fn flash_part_done(&mut self, part: Part, done: IoDone, now: u64, fx: &mut Effects) {
        if self.flash.part_again(part, &done) {
            let io = Io::write(done.op.target, done.op.offset, done.op.bufs);
            return self.io(fx, OpCtx::FlashPart(part), io);
        }
        let told = self.flash.devices.part_ended(part, done.result);
        self.device_may_be_lost(told, now, fx);
    }

    fn device_may_be_lost(&mut self, told: Told, now: u64, fx: &mut Effects) {
        if told.lost.is_some() {
            self.flash.device_lost();
            self.route_flash(now, fx);
        }
        for ended in told.ended {
            self.flash_ended(ended, now, fx);
        }
        // Flash was given up: what is noted is that.
        if told.lost.is_some() && !self.flash.is_losing() {
            for ended in self.flash.devices.let_go() {
                self.flash_ended(ended, now, fx);
            }
        }
    }

    /// What a read did not get, or got rotten, is read from the other half, if there is one. Else what ended
    /// is given back, for that is how it ended.
    ///
    /// Of a run only the blocks that are rotten: each half may have other ones.
    pub fn read_other_half(
        &mut self,
        ctx: OpCtx,
        done: IoDone,
        fx: &mut Effects,
    ) -> Option<(OpCtx, IoDone)> {
        let (ctx, second) = match ctx {
            OpCtx::Alone(alone) => return self.block_read_alone(alone, done, fx),
            OpCtx::Second(ctx) => (*ctx, true),
            ctx => (ctx, false),
        };
        let read = matches!(done.op.target, Target::Flash(_)) && done.op.kind == OpKind::Read;
        let good = done.result.is_ok() && done.bad_blocks.is_empty() || done.is_memory_gone();
        if !read || good || !self.flash.devices.are_twice() {
            return Some((ctx, done));
        }
        let in_part = done.result.is_ok() && done.op.len > BLOCK;
        if second && !in_part {
            return Some((ctx, done));
        }
        if done.goes_on() {
            // The first device may still write to that memory. What reads for itself begins anew with other memory.
            let req = match &ctx {
                OpCtx::HitRead { req, .. } if self.reads_into_own(*req) => *req,
                _ => return Some((ctx, done)),
            };
            self.reqs[req].read_mut().memory_in_use = true;
        }
        let Some((target, offset)) = self.flash.devices.other_half(&done) else {
            return Some((ctx, done));
        };
        took(Path::ReadFromOther);
        if in_part {
            let alone = Alone {
                ctx,
                left: done.bad_blocks.clone(),
                bad: SmallVec::new(),
                from: (target, offset),
                run: done,
            };
            return self.read_next_alone(Box::new(alone), fx);
        }
        let id = self.ops.insert(OpCtx::Second(Box::new(ctx))) as u64;
        self.flash.note_sent(OpKind::Read, done.op.len);
        fx.ios.push(IoOp {
            id,
            target,
            offset,
            ..done.op
        });
        None
    }

    /// Reads the next block that a run lacks; if there is none, that is how the run has ended.
    fn read_next_alone(&mut self, alone: Box<Alone>, fx: &mut Effects) -> Option<(OpCtx, IoDone)> {
        let next = alone.left.last().filter(|_| alone.run.result.is_ok());
        let one = next.and_then(|i| Some((*i, block_of(&alone.run.op.bufs, *i)?)));
        let Some((i, buf)) = one else {
            let Alone {
                ctx,
                run,
                left,
                mut bad,
                ..
            } = *alone;
            let bad_blocks = match run.result {
                Ok(()) => {
                    bad.extend(left);
                    bad
                }
                Err(_) => SmallVec::new(),
            };
            return Some((ctx, IoDone { bad_blocks, ..run }));
        };
        let (target, offset) = alone.from;
        let run = &alone.run.op;
        let op = IoOp {
            id: 0,
            target,
            kind: OpKind::Read,
            offset: offset + u64::from(i) * BLOCK,
            len: BLOCK,
            bufs: [buf].into_iter().collect(),
            crcs: run.crcs.get(i as usize).copied().into_iter().collect(),
            sums: false,
            class: run.class,
        };
        self.flash.note_sent(OpKind::Read, BLOCK);
        let id = self.ops.insert(OpCtx::Alone(alone)) as u64;
        fx.ios.push(IoOp { id, ..op });
        None
    }

    fn block_read_alone(
        &mut self,
        mut alone: Box<Alone>,
        done: IoDone,
        fx: &mut Effects,
    ) -> Option<(OpCtx, IoDone)> {
        let i = alone.left.pop();
        match done.result {
            Ok(()) if done.bad_blocks.is_empty() => {}
            Ok(()) => alone.bad.extend(i),
            // Whoever wanted the run asks for its blocks one by one.
            Err(e) => alone.run.result = Err(e),
        }
        self.read_next_alone(alone, fx)
    }

    /// A device hangs, or nothing of it can be read: goes on without it, if that can be.
    pub fn lose_failing_device(&mut self, now: u64, fx: &mut Effects) {
        if self.flash.devices.are_twice() {
            let past = self.shared.reads_by_device();
            let past = past.into_iter().map(|reads| reads.count);
            self.flash.devices.note_past_reads(past);
        }
        let told = self.flash.devices.lose_failing(now);
        self.device_may_be_lost(told, now, fx);
    }

    /// That a device is lost is noted beside the flash, too: what was held goes on.
    pub fn loss_is_noted(&mut self, generation: u64, now: u64, fx: &mut Effects) {
        let held = self.flash.loss_is_noted(generation);
        self.route_flash(now, fx);
        for ended in held {
            self.flash_ended(ended, now, fx);
        }
    }

    /// A read of the flash device's own has ended, or what changed something on one device.
    pub fn flash_done(&mut self, op: FlashOp, done: IoDone, now: u64, fx: &mut Effects) {
        match op {
            FlashOp::Entries { seg, whole } => self.flash.entries_read(seg, whole, &done, now),
            FlashOp::Move { slot, count } => self.move_read_done(slot, count, done, now),
            _ => {
                let done = match op {
                    FlashOp::Batch { seq } => match self.flash.batch_again(seq, done) {
                        Some(done) => done,
                        None => return self.route_flash(now, fx),
                    },
                    _ => done,
                };
                let (kind, result) = (done.op.kind, done.result);
                return self.flash_ended(Ended { op, kind, result }, now, fx);
            }
        }
        self.route_flash(now, fx);
    }

    /// An operation of the flash device's own has ended that changed something there.
    fn flash_ended(&mut self, ended: Ended, now: u64, fx: &mut Effects) {
        let Ended { op, kind, result } = ended;
        match op {
            FlashOp::Batch { seq } => {
                self.flash.batch_ended(seq, &result);
                let mut bytes = 0;
                while let Some(batch) = self.flash.take_applied() {
                    bytes += batch.bytes;
                    self.apply(batch, now, fx);
                }
                self.flash.go_on(bytes, now);
            }
            FlashOp::Map => self.flash.map_ended(kind, &result, now),
            FlashOp::Summary { seg } => self.flash.summary_ended(seg, &result),
            FlashOp::Flush { ord, seq } => {
                let sound = self.flash.flush_ended(ord, seq, &result, now);
                self.route_flash(now, fx);
                if sound {
                    self.wake_all_clean_waiters(now, fx);
                    self.flash.flush_again(now);
                }
            }
            FlashOp::Trim { seg } => self.flash.trim_ended(seg),
            FlashOp::Mark => self.flash.mark_ended(kind, result.is_ok()),
            FlashOp::Floor => {
                self.flash.floor_ended(&result, now);
                // What had to wait for it goes on.
                if !self.flash.is_rescuing() && self.flash.takes_writes() {
                    self.orders_given_up(now, fx);
                }
                self.set_orders();
                self.everyone_is_ready();
            }
            FlashOp::Wipe => self.flash.wipe_ended(kind, &result, now),
            FlashOp::Lost => {
                let held = self.flash.lost_ended(kind, result, now);
                self.route_flash(now, fx);
                for ended in held {
                    self.flash_ended(ended, now, fx);
                }
                // Disks that could not be ordered meanwhile are.
                self.set_orders();
            }
            // Reads.
            FlashOp::Entries { .. } | FlashOp::Move { .. } => {}
        }
        self.route_flash(now, fx);
    }

    /// More is durable: what waits until its range is clean is looked at again.
    fn wake_all_clean_waiters(&mut self, now: u64, fx: &mut Effects) {
        // Who has to wait on lines up again.
        for disk in self.ready.awaited.take() {
            self.wake_clean_waiters(disk, now, fx);
        }
    }

    /// Tells one who waited how that ended.
    pub fn flash_waited(&mut self, who: FlashWaiter, failed: bool, now: u64, fx: &mut Effects) {
        match who {
            FlashWaiter::Request(id) => self.request_flushed(id, failed, now, fx),
            FlashWaiter::Intent { disk, region } => self.intent_durable(disk, region, now, fx),
            // If flash failed, nothing on it counts any more: the origin is what must be whole.
            FlashWaiter::Destage(job) if failed => self.destage_write(job, now, fx),
            FlashWaiter::Destage(job) => self.destage_durable(job, now, fx),
            FlashWaiter::Nobody => {}
        }
    }

    /// Sends what of the append queue may be sent.
    pub fn pump(&mut self, now: u64, fx: &mut Effects) {
        self.flash.pump(now);
        self.route_flash(now, fx);
    }

    /// Waits until the log is durable that far.
    pub fn wait_flash(&mut self, until: Until, who: FlashWaiter, now: u64, fx: &mut Effects) {
        self.flash.wait_durable(until, who, now);
        self.route_flash(now, fx);
    }

    /// Starts a flush of flash unless one is in flight.
    pub fn start_flash_flush(&mut self, now: u64, fx: &mut Effects) {
        self.flash.flush(now);
        self.route_flash(now, fx);
    }

    /// A read of flash failed.
    pub fn flash_read_failed(&mut self, now: u64, fx: &mut Effects) {
        self.flash.read_failed(now);
        self.route_flash(now, fx);
    }

    /// From here on the origins carry the disks. With `mark`, flash itself is told.
    pub fn give_flash_up(&mut self, fault: FlashFault, mark: bool, now: u64, fx: &mut Effects) {
        self.flash.give_up(fault, mark, now);
        self.route_flash(now, fx);
    }
}
