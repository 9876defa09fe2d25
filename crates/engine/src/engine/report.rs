//! What the engine tells of itself and of its disks.

use crate::api::{DiskId, ExtentState, ReqOp};
use crate::cache::ahead::UNUSED_SHARE;
use crate::cache::index::{Index, Key};
use crate::cache::stage::Stage;
use crate::core::Core;
use crate::disk::spans::Span;
use crate::engine::Engine;
use crate::flash::fail::Noted;
use crate::flash::log::SegState;
use crate::origin::order::Upto;
use crate::origin::trouble::Trouble;
use crate::stats::{DeviceStats, DiskStats, Latencies, PoolStats};
use hearth_io::{BLOCK, IoError, OpKind};
use hearth_policy::{Config, Gate, Policy};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// A disk's state for the control plane.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DiskStatus {
    /// Attached, i.e. serving requests.
    pub attached: bool,
    /// Blocks on flash.
    pub cached_blocks: u64,
    /// Of these, dirty.
    pub dirty_blocks: u64,
    /// Zeroed blocks the origin does not know of.
    pub zero_blocks: u64,
    /// The origin alone is the disk: nothing dirty, every write flushed, no region open.
    pub drained: bool,
    /// The same, but for ranges that are lost: nothing more will come of writing back.
    pub only_lost_left: bool,
    /// Requests in flight.
    pub in_flight: u64,
    /// Lost ranges: (byte offset, length).
    pub lost_ranges: Vec<(u64, u64)>,
    /// Why what is dirty does not reach the origin, if it does not.
    pub trouble: Option<Trouble>,
    /// Since when the origin has owed an answer to the destager, on the clock the engine is given.
    pub unanswered_ns: Option<u64>,
    /// It lives on flash: what it holds there is not owed to anybody.
    pub lives_on_flash: bool,
    /// Shut out or taken over: nothing is answered, nothing goes to the origin.
    pub fenced: bool,
}

/// How far the origin of an ordered disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OrderStatus {
    /// Up to when it holds what was flushed.
    pub upto: Upto,
    /// For how long it has lacked something that was flushed.
    pub age_ns: u64,
    /// Writes wait because that is longer than it may be.
    pub late: bool,
    /// How often a write was found to have to wait for that in this run; it may be over before anybody looks.
    pub waits: u64,
    /// Versions of blocks it lacks, several of one block counted each.
    pub versions: u64,
}

impl DiskStatus {
    /// Blocks the origin does not have yet, zeroed ones included.
    pub fn owed_blocks(&self) -> u64 {
        self.dirty_blocks + self.zero_blocks
    }

    /// The same in bytes.
    pub fn owed_bytes(&self) -> u64 {
        self.owed_blocks().saturating_mul(BLOCK)
    }
}

impl Engine {
    /// A disk's state.
    pub fn status(&self, id: DiskId) -> Option<DiskStatus> {
        let core = self.core();
        let d = core.disk(id)?;
        let unfinished = !d.origin.destage.busy.is_empty()
            || !d.origin.destage.written.is_empty()
            || (!d.origin.intents.is_empty() && core.flash.takes_writes());
        let settled = !unfinished
            && d.origin.sync.is_durable()
            && (!core.flash.takes_writes() || d.cleaned_ord <= core.flash.log.applied_ord);
        Some(DiskStatus {
            attached: d.attached,
            cached_blocks: d.cached,
            dirty_blocks: d.dirty.len(),
            zero_blocks: d.zero.len(),
            drained: !d.is_dirty() && settled,
            only_lost_left: !d.lost.is_empty()
                && d.lost.len() == d.dirty.len()
                && d.zero.is_empty()
                && settled,
            in_flight: d.in_flight + core.shared.in_flight(id),
            lost_ranges: d
                .lost
                .runs()
                .iter()
                .map(|(b, n)| (b * BLOCK, n * BLOCK))
                .collect(),
            trouble: d.trouble(),
            unanswered_ns: core.destage_unanswered(d),
            lives_on_flash: !d.has_origin(),
            fenced: d.fenced,
        })
    }

    /// What failed last on a disk's origin since it was attached, and how.
    pub fn origin_failed(&self, id: DiskId) -> Option<(OpKind, IoError)> {
        self.core().disk(id)?.origin.failed
    }

    /// How far the origin is, if the disk is ordered.
    pub fn order(&self, id: DiskId, now_ns: u64) -> Option<OrderStatus> {
        self.core().order_state(id, now_ns)
    }

    /// A disk's statistics. Data left dirty by an earlier run counts as dirty since the first call.
    pub fn stats(&self, id: DiskId, now_ns: u64) -> Option<DiskStats> {
        let mut core = self.core();
        let counts = Self::counts_of(&mut core, id, now_ns)?;
        let d = core.disk(id)?;
        Some(DiskStats {
            read_hit_latency: d.hit_latency.percentiles(),
            read_miss_latency: d.miss_latency.percentiles(),
            write_hit_latency: d.write_hit_latency.percentiles(),
            write_miss_latency: d.write_miss_latency.percentiles(),
            ..counts
        })
    }

    /// The same without the percentiles, which take longer than all else.
    pub fn counts(&self, id: DiskId, now_ns: u64) -> Option<DiskStats> {
        Self::counts_of(&mut self.core(), id, now_ns)
    }

    fn counts_of(core: &mut Core, id: DiskId, now_ns: u64) -> Option<DiskStats> {
        core.gather(id);
        let d = core.disk_mut(id)?;
        if d.is_dirty() && d.dirty_since_ns == 0 {
            d.dirty_since_ns = now_ns;
        }
        Some(DiskStats {
            counters: d.counters,
            cached_blocks: d.cached,
            dirty_blocks: if d.has_origin() { d.dirty.len() } else { 0 },
            zero_blocks: d.zero.len(),
            dirty_for_ns: if d.is_dirty() && d.has_origin() {
                now_ns.saturating_sub(d.dirty_since_ns).max(1)
            } else {
                0
            },
            behind_ns: d.order.as_ref().map_or(0, |o| o.age_ns(now_ns)),
            ..DiskStats::default()
        })
    }

    /// A disk's latencies so far, to be compared with later ones.
    pub fn latencies(&self, id: DiskId) -> Option<Latencies> {
        let mut core = self.core();
        core.gather(id);
        let d = core.disk(id)?;
        Some(Latencies {
            read_hit: d.hit_latency.tally(),
            read_miss: d.miss_latency.tally(),
            write_hit: d.write_hit_latency.tally(),
            write_miss: d.write_miss_latency.tally(),
        })
    }

    /// The pool's statistics.
    pub fn pool_stats(&self) -> PoolStats {
        let mut core = self.core();
        core.fold_all_reads();
        PoolStats {
            counters: core.flash.counters,
            capacity_blocks: core.capacity_blocks(),
            dirty_capacity_blocks: core.dirty_capacity_blocks(),
            set_aside_blocks: core.flash.set_aside_blocks(),
            cached_blocks: core.cache.index.len() as u64,
            dirty_blocks: core.dirty_total,
            free_segments: (core.flash.log.free.len() + core.flash.log.parked.len()) as u64,
            segments: core.flash.log.segments.len() as u64,
            footprint_bytes: Index::footprint(core.cache.index.slots())
                + core.cache.policy.footprint() as u64
                + core.cache.stage.footprint_now()
                + Self::coming_footprint(core.cache.stage.capacity(), core.opts.prefetch),
            stage_blocks: core.cache.stage.len() as u64,
            stage_capacity_blocks: core.cache.stage.capacity() as u64,
            stage_most_blocks: core.cache.stage.most() as u64,
            gate: core.cache.policy.rules().gate != Gate::Open,
            rule_switches: core.cache.policy.switches(),
            endurance_pressure: core.cache.policy.pressure(),
            endurance: core.cache.policy.budget(),
            flash_failed: !core.flash.takes_writes(),
            flash_fault: core.flash.given_up(),
            flash_unnoted: core.flash.noted == Noted::Nowhere,
            flash_read_ns: core.flash.ewma_ns,
        }
    }

    /// What lies on each flash device, and how it does. Looks at every segment if there are several.
    pub fn device_stats(&self) -> Vec<DeviceStats> {
        let core = self.core();
        let flash = &core.flash;
        let reads = core.shared.reads_by_device();
        let figures = flash.devices.figures().into_iter().zip(reads);
        let mut all: Vec<DeviceStats> = figures
            .map(|(mut figures, reads)| {
                // Most reads are hits, which the core does not see.
                figures.reads += reads.count;
                figures.read_ns += reads.ns;
                figures.read_bytes += reads.bytes;
                DeviceStats {
                    figures,
                    ..DeviceStats::default()
                }
            })
            .collect();
        for (device, d) in (0..).zip(&mut all) {
            d.slow = flash.devices.is_surely_slow(device);
            d.lost = !flash.devices.spread().is_there(device);
        }
        let ranges = flash.sb.segments();
        for (segment, seg) in flash.log.segments.iter().zip(0..) {
            let at = flash.layout.segment_offset(seg);
            // Both halves are there, unless a device is lost. Then nothing is but what the other one has.
            let (live, second) = (u64::from(segment.live), u64::from(segment.second));
            let dirty = u64::from(segment.dirty);
            let both = flash.devices.spread().sides(at).count() > 1;
            for (side, device, _) in flash.devices.spread().sides(at) {
                let device = usize::from(device);
                let numbers = ranges.get(device).filter(|r| r.contains(&seg));
                let there = numbers.is_some() || flash.devices.are_twice();
                let Some(d) = all.get_mut(device).filter(|_| there) else {
                    continue;
                };
                d.segments += 1;
                d.free_segments += u64::from(segment.state == SegState::Free);
                // What is clean may be in one half alone.
                d.cached_blocks += match side {
                    _ if !both || flash.log.half == 0 => live,
                    0 => live - second,
                    _ => second + dirty,
                };
                d.dirty_blocks += dirty;
            }
        }
        all
    }

    /// Bytes that are to be kept for disks whatever others do, and as many as can be: if the first are more, each disk
    /// keeps its part of them.
    pub fn minimums(&self) -> (u64, u64) {
        let core = self.core();
        let wanted = u64::try_from(core.totals.min_blocks).unwrap_or(u64::MAX);
        let log = &core.flash.log;
        let all = log.usable() as u64 * u64::from(log.data_blocks);
        let most = (all / 8 * 7).saturating_sub(core.totals.kept_blocks);
        (wanted.saturating_mul(BLOCK), most.saturating_mul(BLOCK))
    }

    /// The flash devices that answer so slowly that they are left alone: number, and how long reads and writes took in
    /// the mean lately, nanoseconds, 0 where that is not known.
    pub fn slow_devices(&self) -> Vec<(u16, u64, u64)> {
        self.core().flash.devices.slow_ones()
    }

    /// Bytes of RAM that index, policy and RAM stage take for `slots` slots of flash, with a
    /// stage of `stage` blocks or else as many as it has at least.
    pub fn footprint(slots: u32, stage: Option<usize>) -> u64 {
        let blocks = slots as usize;
        let stage = stage.unwrap_or_else(|| Config::stage_of(blocks, true));
        Index::footprint(slots)
            + Policy::footprint_of(blocks + stage, true) as u64
            + Stage::footprint(stage, stage)
            + Self::coming_footprint(stage, true)
    }

    /// Bytes of what is on its way to a stage of so many blocks at most.
    fn coming_footprint(blocks: usize, prefetch: bool) -> u64 {
        let coming = if prefetch { blocks / UNUSED_SHARE } else { 0 };
        coming as u64 * BLOCK
    }

    /// The first blocks of a range that are not on flash, as (byte offset, length), or how far there are none. No more
    /// is looked at than may be under the lock.
    pub fn missing(&self, id: DiskId, offset: u64, end: u64) -> Result<(u64, u64), u64> {
        let core = self.core();
        let Some(d) = core.disk(id) else {
            return Err(end);
        };
        let (at, len, ()) = d.first_run(offset, end, |block| {
            let there =
                d.zero.contains(block) || core.cache.index.get(Key::new(id, block)).is_some();
            (!there).then_some(())
        })?;
        Ok((at, len))
    }

    /// The parts of a byte range of which flash has data that the origin lacks, as offset and length. At most `max`: where it is
    /// as many, the rest is told by a later call.
    pub fn dirty_data(&self, id: DiskId, range: Range<u64>, max: usize) -> Vec<(u64, u64)> {
        let core = self.core();
        let Some(d) = core.disk(id) else {
            return Vec::new();
        };
        let (mut at, last) = (range.start / BLOCK, range.end.div_ceil(BLOCK));
        let mut parts = Vec::new();
        while parts.len() < max
            && let Some(start) = d.dirty.first_in(at, last)
        {
            at = start + d.dirty.run_len(start, last - start);
            let from = (start * BLOCK).max(range.start);
            parts.push((from, (at * BLOCK).min(range.end) - from));
        }
        parts
    }

    /// What the cache knows of a byte range: consecutive extents covering it.
    pub fn block_status(
        &self,
        id: DiskId,
        offset: u64,
        len: u64,
        out: &mut Vec<(u64, ExtentState)>,
    ) {
        /// Blocks looked at under the lock; the rest is told by a later call.
        const LOOK_MAX: u64 = 65_536;
        let core = self.core();
        let Some(d) = core.disk(id) else { return };
        let end = offset.saturating_add(len).min(d.cfg.size);
        let mut at = offset;
        let last = (offset / BLOCK + LOOK_MAX) * BLOCK;
        while at < end.min(last) {
            let block = at / BLOCK;
            let next = ((block + 1) * BLOCK).min(end);
            let state = if d.zero.contains(block) {
                ExtentState::Zero
            } else if core
                .cache
                .index
                .get(Key::new(id, block))
                .and_then(|s| core.cache.index.slot(s))
                .is_some_and(|s| s.dirty)
            {
                ExtentState::Data
            } else if d.is_void(block) {
                // A client that believed in zeros would not notice that reads fail.
                ExtentState::Data
            } else if !d.has_origin() {
                ExtentState::Zero
            } else {
                ExtentState::Origin
            };
            match out.last_mut() {
                Some((n, s)) if *s == state => *n += next - at,
                _ => out.push((next - at, state)),
            }
            at = next;
        }
    }

    /// Disks with anything the origin does not have: (id, dirty blocks, zeroed blocks).
    pub fn dirty_disks(&self) -> Vec<(DiskId, u64, u64)> {
        let core = self.core();
        core.disks
            .iter()
            .flatten()
            .filter(|d| d.is_dirty() && d.has_origin())
            .map(|d| (d.cfg.id, d.dirty.len(), d.zero.len()))
            .collect()
    }

    /// Blocks of a disk for which its origin may still have to find room: dirty ones, and others, which are being written
    /// or become zeros that keep their place. Lost blocks never reach it.
    pub fn unplaced(&self, id: DiskId) -> (u64, u64) {
        let core = self.core();
        let Some(d) = core.disk(id).filter(|d| d.has_origin()) else {
            return (0, 0);
        };
        let writes = |span: &Span| {
            let op = core.reqs.get(span.req).map(|r| r.op);
            matches!(
                op,
                Some(ReqOp::Write { .. } | ReqOp::WriteZeroes { punch: false, .. })
            )
        };
        let held = d.locks.iter().chain(d.lock_queue.iter()).filter(writes);
        let coming: u64 = held.map(|span| span.end - span.start).sum();
        let dirty = d.dirty.len().saturating_sub(d.lost.len());
        (dirty, d.solid.len() + coming)
    }

    /// Adds to `out` the runs of a disk's dirty blocks from `block` on, as (first block, blocks), looking at some; where to
    /// go on, if there are more.
    pub fn dirty_runs(&self, id: DiskId, block: u64, out: &mut Vec<(u64, u64)>) -> Option<u64> {
        /// Blocks looked at under the lock.
        const LOOK_MAX: usize = 16_384;
        let core = self.core();
        let d = core.disk(id)?;
        let mut dirty = d.dirty.range(block, u64::MAX);
        for block in dirty.by_ref().take(LOOK_MAX) {
            match out.last_mut() {
                Some((first, count)) if *first + *count == block => *count += 1,
                _ => out.push((block, 1)),
            }
        }
        dirty.next()
    }

    /// A segment number above all on flash and not above any that a later run will write: a disk that
    /// has nothing dirty, on flash that is written no more, may have its records up to there voided
    /// without being brought to rest. `None` if the disk has something dirty or flash is in use.
    pub fn void_seq(&self, id: DiskId) -> Option<u64> {
        let core = self.core();
        let quiet = core.flash.log.batches.is_empty() && core.flash.log.queue.is_empty();
        let d = core.disk(id)?;
        let safe = !d.is_dirty()
            && d.origin.destage.written.is_empty()
            && d.origin.sync.is_superseded_durably();
        (!core.flash.takes_writes() && quiet && safe).then_some(core.flash.log.next_segment_seq)
    }

    /// The engine's inner state in words, for diagnosis of a stall.
    pub fn explain(&self) -> String {
        let core = self.core();
        let mut states = BTreeMap::new();
        for s in &core.flash.log.segments {
            *states
                .entry(
                    format!("{:?}", s.state)
                        .split(' ')
                        .next()
                        .unwrap_or("")
                        .to_owned(),
                )
                .or_insert(0u32) += 1;
        }
        let phases: Vec<String> = core
            .reqs
            .iter()
            .take(8)
            .map(|(id, r)| format!("{id}:{:?}", r.state))
            .collect();
        let front = core
            .flash
            .log
            .order
            .front()
            .map(|s| core.flash.log.segments[*s as usize]);
        format!(
            "hits {}; requests {phases:?} of {}; operations {}; queue {} items {} blocks; batches {}; sealing {}; stalled {} and {}; \
             segments {states:?}; oldest {front:?}; evict {:?}; jobs {}; dirty {}; ord next {} applied {} durable {}; \
             flush in flight {}; waiters {}; disks {:?}",
            core.shared.all_in_flight(),
            core.reqs.len(),
            core.ops.len(),
            core.flash.log.queue.len(),
            core.flash.log.queued_blocks,
            core.flash.log.batches.len(),
            core.flash.log.sealing.len(),
            core.reqs.stalled.len(),
            core.reqs.stalled_through.len(),
            core.flash.eviction(),
            core.destaging.jobs.len(),
            core.dirty_total,
            core.flash.log.next_ord,
            core.flash.log.applied_ord,
            core.flash.log.durable_ord,
            core.flash.flush_inflight,
            core.flash.waiters.len(),
            core.disks
                .iter()
                .flatten()
                .map(|d| {
                    let g = &d.origin.destage;
                    (
                        d.cfg.id,
                        g.busy.len(),
                        g.written.len(),
                        g.covered,
                        g.not_before_ns,
                        d.tickets.len(),
                        d.locks.len(),
                    )
                })
                .collect::<Vec<_>>(),
        )
    }
}
