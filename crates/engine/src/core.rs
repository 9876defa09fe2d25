//! The engine's state and how events reach it.
//!
//! [`Core`] is pure: it has no clock, no thread, no device. Every method takes the time and
//! leaves what should happen in [`Effects`]. Its duties are owners in folders of their own (`flash`, `cache`,
//! `origin`, `disk`, `request`); what needs several of them is done here.

mod ahead;
pub(crate) mod apply;
mod destage;
mod fence;
mod fill;
pub(crate) mod fold;
mod gone;
mod grow;
pub(crate) mod left;
mod moves;
pub(crate) mod ordered;
mod own;
mod rebuild;
mod rehome;
pub(crate) mod rest;
mod room;
pub(crate) mod route;
mod starved;

use crate::api::{DiskId, Effects, ReqError};
use crate::cache::Cache;
use crate::cache::index::SlotNo;
use crate::core::apply::Flash;
use crate::core::fold::Folding;
use crate::core::route::Alone;
use crate::ctx::Io;
use crate::disk::Disk;
use crate::disk::ready::{Ready, Totals};
use crate::faults::Faults;
use crate::flash::device::FlashOp;
use crate::flash::devices::Part;
use crate::ids::ReqId;
use crate::lanes::Shared;
use crate::origin::intents::REGION_BLOCKS_MIN;
use crate::origin::pace::Destaging;
use crate::request::Requests;
use crate::request::read::Miss;
use crate::stats::ewma;
use hearth_io::{Class, IoDone, IoError, IoOp, OpKind, Target};
use hearth_policy::{Budget, Rules};
use slab::Slab;
use std::sync::Arc;

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Seeds the index's hash; random in production, fixed in simulation.
    pub hash_seed: u64,
    /// Share of flash that may be dirty before write-back writes wait. If flash is full of data that was read, the
    /// limit is [lower](Core::dirty_high_percent).
    pub dirty_high_percent: u32,
    /// The destager works in the background above this share, and when idle below it.
    pub dirty_low_percent: u32,
    /// Nothing from clients for this long counts as idle.
    pub idle_ns: u64,
    /// Destage bandwidth limit in bytes per second; 0 means none.
    pub destage_bytes_per_s: u64,
    /// Discard whole segments as they are freed.
    pub trim: bool,
    /// An intent region nobody has written for this long is closed.
    pub intent_idle_ns: u64,
    /// Blocks of an intent region at least, a power of two; 16 MiB in production.
    pub intent_region_blocks: u64,
    /// Reuse a damaged log as far as it can be read.
    pub accept_damage: bool,
    /// Up to so many blocks of flash a start keeps what it reads of the log in RAM (24 bytes a block)
    /// until it knows what counts; above, it reads it twice.
    pub recovery_keep_blocks: u32,
    /// Most runs of zeros that wait to be told to origins; fewer where the log has no room for so many.
    pub zero_runs_max: u64,
    /// Rules of eviction that stay; by default the best of several, tried in miniature.
    pub rules: Option<Rules>,
    /// Blocks of RAM that the stage may take at most; by default what the policy says for the pool's size.
    pub ram_stage: Option<usize>,
    /// While flash fills for the first time it takes every miss.
    pub first_fill: bool,
    /// Read ahead of clients.
    pub prefetch: bool,
    /// From an origin that answers scattered reads faster than this nothing is read ahead.
    pub fast_origin_ns: u64,
    /// What may be written to flash in the long run. Tightens admission, never refuses writes.
    pub endurance: Budget,
    /// Zeros up to so many bytes are written to an ordered disk as data. Longer ones wait until the origin has all
    /// that came before, and go there.
    pub zeros_as_data: u64,
    /// Disks that are ordered, as the registry says: told before the log is read.
    pub ordered: Vec<DiskId>,
    /// What is appended together: everything, or what the cleaner moves apart from the rest. It takes no other.
    pub heads: hearth_policy::cleaning::Heads,
    /// Deliberate faults (simulation only).
    pub faults: Faults,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            hash_seed: 0x9E37_79B9_7F4A_7C15,
            dirty_high_percent: 60,
            dirty_low_percent: 20,
            idle_ns: 300_000_000,
            destage_bytes_per_s: 0,
            trim: true,
            intent_idle_ns: 2_000_000_000,
            intent_region_blocks: REGION_BLOCKS_MIN,
            accept_damage: false,
            recovery_keep_blocks: 16 << 20,
            zero_runs_max: u64::MAX,
            rules: None,
            ram_stage: None,
            first_fill: true,
            prefetch: true,
            fast_origin_ns: 500_000,
            endurance: Budget::unlimited(),
            zeros_as_data: 1 << 20,
            ordered: Vec::new(),
            heads: hearth_policy::cleaning::Heads::MovesApart,
            faults: Faults::default(),
        }
    }
}

/// What to do when an operation ends.
#[derive(Debug)]
pub(crate) enum OpCtx {
    /// Blocks of a request read from flash; `at` is the first block's index in the request.
    HitRead {
        req: ReqId,
        block: u64,
        slot: SlotNo,
    },
    /// A run of a request read from the origin.
    MissRead(Miss),
    OriginWrite {
        req: ReqId,
    },
    /// The flash device's own.
    Flash(FlashOp),
    /// One device's part of a flush of the log, or of what both halves get.
    FlashPart(Part),
    /// The same read as another that did not get what it should, of the other half.
    Second(Box<OpCtx>),
    /// A block that a run lacks, of the other half.
    Alone(Box<Alone>),
    OriginFlush {
        disk: DiskId,
        covers: u64,
    },
    DestageRead {
        job: usize,
        slot: SlotNo,
    },
    DestageWrite {
        job: usize,
    },
    /// A read ahead of clients.
    Ahead {
        read: usize,
    },
}

impl From<FlashOp> for OpCtx {
    fn from(op: FlashOp) -> OpCtx {
        OpCtx::Flash(op)
    }
}

/// The whole state.
pub(crate) struct Core {
    pub opts: EngineOptions,
    pub flash: Flash,
    pub cache: Cache,
    pub disks: Vec<Option<Box<Disk>>>,
    /// Which of them have work.
    pub ready: Ready,
    /// Sums over them; kept by [`alter`](Core::alter).
    pub totals: Totals,
    pub reqs: Requests,
    pub destaging: Destaging,
    /// What data threads do without the lock.
    pub shared: Arc<Shared>,
    pub folding: Folding,
    pub ops: Slab<OpCtx>,
    pub next_ticket: u64,
    /// Runs of zeros of all disks; see [`crate::request::zero`].
    pub zero_runs: u64,
    pub dirty_total: u64,
    pub quiescing: bool,
    pub probe: u32,
}

impl Core {
    pub fn disk(&self, id: DiskId) -> Option<&Disk> {
        self.disks.get(id as usize)?.as_deref()
    }

    pub fn disk_mut(&mut self, id: DiskId) -> Option<&mut Disk> {
        self.disks.get_mut(id as usize)?.as_deref_mut()
    }

    /// A disk that cannot have gone: something of it is in flight or cached, or it was just found in the
    /// list. For numbers of disks that come from outside, or were kept while the disk could be removed, there
    /// is [`disk`](Self::disk).
    pub fn known(&self, id: DiskId) -> &Disk {
        self.disk(id)
            .expect("a disk stays while anything of it does")
    }

    pub fn known_mut(&mut self, id: DiskId) -> &mut Disk {
        self.disk_mut(id)
            .expect("a disk stays while anything of it does")
    }

    /// Changes what settings say of a disk, keeping the sums.
    pub fn alter(&mut self, id: DiskId, change: impl FnOnce(&mut Disk)) {
        let disk = self.disks.get_mut(usize::from(id));
        let Some(d) = disk.and_then(Option::as_deref_mut) else {
            return;
        };
        self.totals.take(Totals::of(d));
        change(d);
        self.totals.add(Totals::of(d));
        self.ready.all(id);
    }

    /// Disks there are, by id. Not for what happens per event: there may be thousands.
    pub fn disk_ids(&self) -> Vec<DiskId> {
        self.disks.iter().flatten().map(|d| d.cfg.id).collect()
    }

    /// Has an operation done; `op` says what to do when it has ended.
    pub fn io(&mut self, fx: &mut Effects, op: OpCtx, io: Io) {
        let id = self.ops.insert(op) as u64;
        match (io.target, io.kind) {
            (Target::Flash(_), kind) => self.flash.note_sent(kind, io.len),
            (Target::Origin(d), kind) => {
                if let Some(d) = self.disk_mut(d) {
                    d.counters.note_sent(kind, io.len);
                }
            }
        }
        let placed = io.placed || matches!(self.ops.get(id as usize), Some(OpCtx::FlashPart(_)));
        let (target, offset) = match (io.target, io.kind) {
            (Target::Origin(_), _) | (_, OpKind::Flush) => (io.target, io.offset),
            _ if placed => (io.target, io.offset),
            (target, _) => self.flash.devices.place(target, io.offset),
        };
        fx.ios.push(IoOp {
            id,
            target,
            kind: io.kind,
            offset,
            len: io.len,
            bufs: io.bufs,
            crcs: io.crcs,
            sums: io.sums,
            class: io.class,
        });
    }

    /// Takes a finished operation.
    pub fn done(&mut self, done: IoDone, now: u64, fx: &mut Effects) {
        let ctx = self.ops.try_remove(done.op.id as usize);
        let ctx = ctx.expect("what ends was sent, and ends once");
        self.account(&done, now);
        self.note_shut_out(&done, now, fx);
        let Some((ctx, done)) = self.read_other_half(ctx, done, fx) else {
            return;
        };
        match ctx {
            OpCtx::Second(_) | OpCtx::Alone(_) => {}
            OpCtx::HitRead { req, block, slot } => {
                self.hit_read_done(req, block, slot, done, now, fx)
            }
            OpCtx::MissRead(miss) => self.miss_read_done(miss, done, now, fx),
            OpCtx::Ahead { read } => self.ahead_done(read, done, now, fx),
            OpCtx::OriginWrite { req } => self.origin_write_done(req, done, now, fx),
            OpCtx::Flash(op) => self.flash_done(op, done, now, fx),
            OpCtx::FlashPart(part) => self.flash_part_done(part, done, now, fx),
            OpCtx::OriginFlush { disk, covers } => {
                self.origin_flush_done(disk, covers, done.result, now, fx)
            }
            OpCtx::DestageRead { job, slot } => self.destage_read_done(job, slot, done, now, fx),
            OpCtx::DestageWrite { job } => self.destage_write_done(job, done.result, now, fx),
        }
    }

    pub fn account(&mut self, done: &IoDone, now: u64) {
        let ns = done.latency_ns;
        match (done.op.target, done.op.kind) {
            (Target::Flash(_), _) => self.flash.account(done, now),
            (Target::Origin(d), kind) => {
                if let Some(d) = self.disk_mut(d) {
                    if kind == OpKind::Read && done.op.class == Class::Foreground {
                        d.origin.read_ns = ewma(d.origin.read_ns, ns);
                        d.origin.destage.let_by = true;
                    }
                    match kind {
                        OpKind::Read => d.counters.origin_read_ns += ns,
                        OpKind::Write => d.counters.origin_write_ns += ns,
                        _ => {}
                    }
                    if let Err(e) = done.result
                        && !done.is_memory_gone()
                    {
                        d.counters.origin_errors += 1;
                        d.origin.failed = Some((kind, e));
                    }
                }
            }
        }
    }

    /// Work that any event may have made possible. Called after every batch of events.
    pub fn settle(&mut self, now: u64, fx: &mut Effects) {
        self.end_epochs(now, fx);
        self.drop_some_gone();
        self.pump(now, fx);
        self.make_room(now, fx);
        self.wake_stalled(now, fx);
        self.destage_step(now, fx);
        self.pump(now, fx);
        self.publish_pool(now);
    }

    /// Periodic work; returns when to be called again.
    pub fn tick(&mut self, now: u64, fx: &mut Effects) -> u64 {
        self.cache.policy.tick(now / 1000);
        self.flash.set_write_cost(self.cache.policy.write_cost());
        self.fold_all(now, fx);
        self.sweep_lanes(now);
        self.look_at_devices(now);
        self.go_round(now, fx);
        self.flash.end_late_mark(now);
        self.lose_failing_device(now, fx);
        let taken = self.lost_take_the_room();
        self.flash.leave_if_useless(taken, now);
        self.route_flash(now, fx);
        self.retry_leaving_flushes(now, fx);
        self.wake_waiters_for_lost(now, fx);
        self.mark_unmarked();
        self.flash.flush_if_old(now);
        self.route_flash(now, fx);
        if self.quiescing {
            self.flash.log.urgent = true;
        }
        self.settle(now, fx);
        let busy = self.quiescing
            || !self.flash.log.quiet()
            || !self.reqs.stalled.is_empty()
            || !self.reqs.stalled_through.is_empty()
            || !self.reqs.mark_waiters.is_empty()
            || !self.reqs.leaving_flushes.is_empty()
            || self.jobs_active()
            || !self.ready.draining.is_empty()
            || !self.ready.awaited.is_empty()
            || self.flash.is_emptying()
            || self.flash.is_area_changed();
        let pending = !self.ready.restless.is_empty();
        now + if busy {
            5_000_000
        } else if pending {
            50_000_000
        } else {
            500_000_000
        }
    }
}

/// The request error for a failed operation.
pub(crate) fn req_error(e: IoError) -> ReqError {
    if e.is_no_space() {
        ReqError::NoSpace
    } else {
        ReqError::Io
    }
}
