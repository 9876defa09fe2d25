//! The engine as the rest of the daemon sees it: one per pool, shared by all threads.
//!
//! All state is in one [`Core`] behind one short lock, which plain read hits do without
//! ([`crate::lanes`]); checksums, copies and system calls happen outside.

mod sample;

use crate::api::{
    DiskConfig, DiskId, Effects, ExtentState, FlashFault, Mode, OriginState, Request,
};
use crate::blocks::runset::RunSet;
use crate::cache::Cache;
use crate::cache::ahead::UNUSED_SHARE;
use crate::cache::index::{Index, Key};
use crate::cache::stage::Stage;
use crate::core::fold::Folding;
use crate::core::{Core, EngineOptions};
use crate::disk::Disk;
use crate::disk::ready::{Ready, Totals};
use crate::faults::Fault;
use crate::flash::checkpoint::CheckpointError;
use crate::flash::device::FlashDevice;
use crate::flash::fail::Noted;
use crate::flash::recover::{GENERATIONS_END, NUMBERS_END, RecoverError};
use crate::lanes::{After, Shared};
use crate::origin::pace::Destaging;
use crate::origin::trouble::Trouble;
use crate::paths::{Path, took};
use crate::request::Requests;
use crate::stats::{DiskStats, Latencies, PoolStats};
// In this crate a `Fault` is a deliberate mistake.
use hearth_fault::Fault as Failure;
use hearth_format::superblock::PoolState;
use hearth_format::{FormatError, Superblock};
use hearth_io::{BLOCK, IoDone, Media};
use hearth_policy::{Config, Policy};
use serde::Serialize;
use slab::Slab;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// A disk the registry knows, told to the engine before it reads the log.
#[derive(Clone, Copy, Debug)]
pub struct KnownDisk {
    /// Its number.
    pub id: DiskId,
    /// Its size in bytes when last seen.
    pub size: u64,
    /// Records of this disk in segments numbered below this are void.
    pub since_seq: u64,
}

/// How a pool was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpenedFrom {
    /// From the checkpoint of a clean stop.
    Checkpoint,
    /// From the log.
    Log,
}

/// What opening a pool found.
#[derive(Clone, Debug, Serialize)]
pub struct OpenReport {
    /// Where the index came from.
    pub from: OpenedFrom,
    /// Blocks cached.
    pub cached_blocks: u64,
    /// Per disk: dirty blocks and zeroed blocks the origin does not know of.
    pub dirty: Vec<(DiskId, u64, u64)>,
    /// Segments holding data.
    pub segments: u32,
    /// Segments whose end was not on flash when the daemon died.
    pub discarded: u64,
    /// The pool was marked failed by an earlier run: dirty data may be older than its origin.
    pub was_failed: bool,
}

/// Why a pool cannot be opened or closed.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum OpenError {
    /// A structure on flash is not what it should be.
    Format(#[from] FormatError),
    /// The device.
    Io(#[from] std::io::Error),
    /// Durable parts of the log cannot be read.
    Damaged(String),
    /// Requests or background work are in flight.
    Busy,
    /// Writing the checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl OpenError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Failure {
        match self {
            OpenError::Format(e) => e.fault(),
            OpenError::Io(e) => Failure::new(
                format!("cannot read or write the flash device: {e}"),
                "check the device's health",
            ),
            OpenError::Damaged(why) => Failure::new(
                format!("the pool's log is damaged ({why}), and nothing was changed"),
                "start with --accept-damage to use what can be read",
            ),
            OpenError::Busy => {
                Failure::new("the engine is busy", "quiesce it and wait until it is idle")
            }
            OpenError::Checkpoint(e) => e.fault(),
        }
    }
}

/// Why a control call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ControlError {
    /// No such disk.
    NoDisk,
    /// Requests or background work of this disk are in flight.
    Busy,
    /// Already attached.
    Attached,
    /// A size the engine cannot hold.
    Size,
    /// It has data the origin does not have.
    Dirty,
}

impl ControlError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Failure {
        match self {
            ControlError::NoDisk => Failure::bare("no such disk"),
            ControlError::Busy => Failure::new("the disk is busy", "try again in a moment"),
            ControlError::Attached => Failure::bare("the disk is attached already"),
            ControlError::Size => {
                Failure::bare("disks may have up to 256 TiB and must not shrink while attached")
            }
            ControlError::Dirty => Failure::new("the disk has dirty data", "flush it first"),
        }
    }
}

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
    /// Shut out or taken over: nothing is answered, nothing goes to the origin.
    pub fenced: bool,
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

/// The cache engine of one pool.
pub struct Engine {
    core: Mutex<Core>,
    /// Also in the core: what hits need.
    shared: Arc<Shared>,
}

impl Engine {
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        // A panic inside the core is a bug that must not take the other disks along silently;
        // the state is still the best there is.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn blank(sb: Superblock, opts: EngineOptions, known: &[KnownDisk]) -> Core {
        let flash = FlashDevice::new(0, sb, opts.trim, opts.faults);
        let slots = flash.layout.slots();
        let stage = (opts.ram_stage).unwrap_or_else(|| Config::stage_of(slots as usize));
        let index = Index::new(slots, opts.hash_seed);
        let shared = Arc::new(Shared::new(
            index.lookup(),
            flash.target(),
            &flash.layout,
            opts.faults,
        ));
        let policy = Policy::new(Config {
            ram: stage,
            flash: slots as usize,
            prefetch: opts.prefetch,
            rules: opts.rules,
            budget: opts.endurance.clone(),
            // The oldest segment goes first, so what is dead in the others waits for its turn.
            dead_space: true,
        });
        let mut core = Core {
            flash,
            cache: Cache::new(index, policy, Stage::new(stage, opts.hash_seed)),
            disks: Vec::new(),
            ready: Ready::default(),
            totals: Totals::default(),
            reqs: Requests::default(),
            destaging: Destaging::default(),
            shared,
            folding: Folding::default(),
            ops: Slab::new(),
            next_ticket: 0,
            zero_runs: 0,
            dirty_total: 0,
            quiescing: false,
            probe: 0,
            opts,
        };
        for k in known {
            let cfg = DiskConfig {
                id: k.id,
                size: k.size,
                origin_align: 4096,
                mode: Mode::WriteBack,
                block_size: 4096,
                min_bytes: 0,
                max_bytes: 0,
                seq_cutoff: 0,
                read_only: true,
            };
            let mut disk = Disk::new(cfg, core.opts.intent_region_blocks);
            disk.attached = false;
            place(&mut core, disk);
        }
        core
    }

    /// Opens the pool on `media`: from its checkpoint, else from its log.
    ///
    /// Afterwards the pool is marked as open on flash. Disks in `known` are there but not
    /// attached; data of disks not in `known` is dropped.
    pub fn open(
        media: &mut dyn Media,
        opts: EngineOptions,
        known: &[KnownDisk],
    ) -> Result<(Engine, OpenReport), OpenError> {
        let sb = Superblock::load(media)?;
        let floors = [sb.log_floor, sb.clean_floor];
        if sb.generation >= GENERATIONS_END || floors.iter().any(|n| *n >= NUMBERS_END) {
            let why = "its superblock counts further than any pool does";
            return Err(OpenError::Damaged(why.to_owned()));
        }
        let state = sb.state;
        let since: BTreeMap<DiskId, u64> = known.iter().map(|k| (k.id, k.since_seq)).collect();
        let mut core = Self::blank(sb.clone(), opts.clone(), known);
        let mut report = OpenReport {
            from: OpenedFrom::Log,
            cached_blocks: 0,
            dirty: Vec::new(),
            segments: 0,
            discarded: 0,
            was_failed: state == PoolState::Failed,
        };
        let mut loaded = false;
        if let PoolState::Clean { checkpoint_id, .. } = state {
            // One that cannot be read costs a walk of the log, nothing else.
            loaded = core
                .read_checkpoint(media, checkpoint_id, &since)
                .unwrap_or(false);
            if loaded {
                took(Path::CheckpointRead);
                report.from = OpenedFrom::Checkpoint;
                report.segments = core.flash.log.order.len() as u32;
            } else {
                core = Self::blank(sb, opts, known);
            }
        }
        if !loaded {
            Self::recover(&mut core, media, &since, &mut report)?;
        }
        if !core.opts.faults.has(Fault::StayClean) {
            core.flash.sb.state = PoolState::Open;
            core.flash.sb.store(media)?;
        }
        // Segment numbers never repeat: the superblock's generation is in their upper half.
        core.flash.log.next_segment_seq = core
            .flash
            .log
            .next_segment_seq
            .max(match core.opts.faults.has(Fault::RepeatNumbers) {
                true => 0,
                false => core.flash.sb.generation << 32,
            })
            .max(1);
        report.cached_blocks = core.cache.index.len() as u64;
        report.dirty = core
            .disks
            .iter()
            .flatten()
            .filter(|d| d.is_dirty())
            .map(|d| (d.cfg.id, d.dirty.len(), d.zero.len()))
            .collect();
        core.publish_pool(0);
        let engine = Engine {
            shared: core.shared.clone(),
            core: Mutex::new(core),
        };
        Ok((engine, report))
    }

    fn recover(
        core: &mut Core,
        media: &mut dyn Media,
        since: &BTreeMap<DiskId, u64>,
        report: &mut OpenReport,
    ) -> Result<(), OpenError> {
        let found = core.recover(media, since).map_err(|e| match e {
            RecoverError::Io(e) => OpenError::Io(e),
            RecoverError::Format(e) => OpenError::Format(e),
            RecoverError::Damaged(why) => OpenError::Damaged(why),
        })?;
        report.segments = found.segments;
        report.discarded = found.discarded;
        Ok(())
    }

    /// Starts serving a disk. `origin` says whether its volatile writes were flushed since it was
    /// opened.
    pub fn attach(&self, cfg: DiskConfig, origin: OriginState) -> Result<(), ControlError> {
        let mut core = self.core();
        if cfg.size == 0 || cfg.size > crate::api::DISK_MAX || cfg.id == 0 || cfg.id == DiskId::MAX
        {
            return Err(ControlError::Size);
        }
        let id = cfg.id;
        match core.disk(id) {
            Some(d) if d.attached => return Err(ControlError::Attached),
            Some(_) => {
                took(Path::Reattached);
                core.drop_padding(id, cfg.size);
                core.drop_beyond(id, cfg.size.div_ceil(BLOCK));
            }
            None => {
                let disk = Disk::new(cfg.clone(), core.opts.intent_region_blocks);
                place(&mut core, disk);
            }
        }
        let origin = match core.opts.faults.has(Fault::TrustUnknownOrigin) {
            true => OriginState::Flushed,
            false => origin,
        };
        core.alter(id, |d| {
            d.resize(cfg.size);
            d.cfg = cfg;
            d.attached = true;
            d.fenced = false;
        });
        let d = core.disk_mut(id).ok_or(ControlError::NoDisk)?;
        match origin {
            OriginState::Unknown => {
                // A daemon that died may have left writes the origin has not flushed.
                d.origin.sync.opened_unknown();
            }
            // Nothing is written to an origin that is not attached: that flush covers all.
            OriginState::Flushed => d.origin.sync.opened_flushed(),
        }
        core.publish(id);
        Ok(())
    }

    /// Stops serving a disk; what is cached stays.
    pub fn detach(&self, id: DiskId) -> Result<(), ControlError> {
        let mut core = self.core();
        let hits = core.shared.shut(id);
        let d = core.disk_mut(id).ok_or(ControlError::NoDisk)?;
        let io = !d.origin.destage.busy.is_empty()
            || !d.tickets.is_empty()
            || d.origin.sync.is_flushing();
        if d.in_flight + hits > 0 || io || !d.origin.destage.written.is_empty() {
            core.publish(id);
            return Err(ControlError::Busy);
        }
        took(Path::Detached);
        core.alter(id, |d| d.attached = false);
        core.stage_forget(id, 0, u64::MAX);
        Ok(())
    }

    /// Drops everything cached of a disk, dirty data included, and returns the segment number
    /// below which its records are void. The caller stores that in the registry before the
    /// disk is used again; only then is the drop durable.
    pub fn forget(&self, id: DiskId, fx: &mut Effects) -> Result<u64, ControlError> {
        let mut core = self.core();
        let quiet = core.flash.log.queue.iter().all(|i| i.disk != id)
            && core
                .flash
                .log
                .batches
                .iter()
                .all(|b| b.items.iter().all(|i| i.disk != id));
        let hits = core.shared.shut(id);
        let d = core.disk(id).ok_or(ControlError::NoDisk)?;
        if d.in_flight + hits > 0
            || !d.tickets.is_empty()
            || !d.origin.destage.busy.is_empty()
            || !d.origin.destage.written.is_empty()
            || d.origin.sync.is_flushing()
            || !quiet
        {
            core.flash.log.urgent = true;
            core.publish(id);
            return Err(ControlError::Busy);
        }
        let blocks = d.blocks.max(1 << 36);
        core.forget_range(id, 0, blocks);
        core.stage_forget(id, 0, u64::MAX);
        core.change_zeros(id, RunSet::clear);
        if let Some(d) = core.disk_mut(id) {
            d.solid.clear();
            d.zero_seg_seq = None;
            d.lost.clear();
            d.doubtful.clear();
            d.refused.clear();
            d.refusals.clear();
            d.origin.intents.clear();
        }
        if !core.opts.faults.has(Fault::ForgetInHead) {
            core.flash.roll();
            core.route_flash(0, fx);
        }
        core.publish(id);
        Ok(core.flash.log.next_segment_seq)
    }

    /// Forgets that the disk exists. It must be detached and hold nothing dirty.
    pub fn remove(&self, id: DiskId) -> Result<(), ControlError> {
        let mut core = self.core();
        let d = core.disk(id).ok_or(ControlError::NoDisk)?;
        if d.attached || d.in_flight > 0 {
            return Err(ControlError::Busy);
        }
        if d.is_dirty() || d.cached > 0 {
            return Err(ControlError::Dirty);
        }
        took(Path::Removed);
        core.gather(id);
        if let Some(d) = core.disks[id as usize].take() {
            core.totals.take(Totals::of(&d));
        }
        core.publish(id);
        Ok(())
    }

    /// Changes the cache mode; requests in flight end as they began.
    pub fn set_mode(&self, id: DiskId, mode: Mode) -> Result<(), ControlError> {
        let mut core = self.core();
        core.disk(id).ok_or(ControlError::NoDisk)?;
        core.alter(id, |d| d.cfg.mode = mode);
        core.publish(id);
        if mode == Mode::Off {
            core.stage_forget(id, 0, u64::MAX);
        }
        Ok(())
    }

    /// Changes the share of flash a disk keeps and may take, in bytes.
    pub fn set_limits(
        &self,
        id: DiskId,
        min_bytes: u64,
        max_bytes: u64,
    ) -> Result<(), ControlError> {
        let mut core = self.core();
        core.disk(id).ok_or(ControlError::NoDisk)?;
        core.alter(id, |d| {
            d.cfg.min_bytes = min_bytes;
            d.cfg.max_bytes = max_bytes;
        });
        Ok(())
    }

    /// Changes the unit of filling, in bytes.
    pub fn set_block_size(&self, id: DiskId, bytes: u32) -> Result<(), ControlError> {
        let mut core = self.core();
        core.disk_mut(id)
            .ok_or(ControlError::NoDisk)?
            .cfg
            .block_size = bytes;
        Ok(())
    }

    /// Changes the sequential bypass, in bytes; 0 turns it off.
    pub fn set_seq_cutoff(&self, id: DiskId, bytes: u64) -> Result<(), ControlError> {
        let mut core = self.core();
        core.disk_mut(id)
            .ok_or(ControlError::NoDisk)?
            .cfg
            .seq_cutoff = bytes;
        Ok(())
    }

    /// Asks for (or stops asking for) everything dirty to be destaged.
    pub fn drain(&self, id: DiskId, on: bool) -> Result<(), ControlError> {
        let mut core = self.core();
        let d = core.disk_mut(id).ok_or(ControlError::NoDisk)?;
        d.drain = on;
        if on {
            // Whoever asks has perhaps just put the origin right.
            d.origin.destage.not_before_ns = 0;
            d.origin.sync.try_at_once();
        }
        core.ready.all(id);
        Ok(())
    }

    /// Gives up lost blocks: their ranges read what the origin has. Returns how many.
    pub fn accept_loss(&self, id: DiskId) -> Result<u64, ControlError> {
        let mut core = self.core();
        let d = core.disk(id).ok_or(ControlError::NoDisk)?;
        let lost: Vec<u64> = d.lost.range(0, u64::MAX).collect();
        for block in &lost {
            if core.superseding(id, *block, *block + 1) {
                took(Path::LossAcceptedBehindWrite);
                continue;
            }
            core.forget_block(id, *block);
            if !core.flash.takes_writes() {
                took(Path::LossAcceptedFailed);
                continue;
            }
            took(Path::LossAcceptedSound);
            let ord = core.record_drop(id, *block, 1);
            if let Some(d) = core.disk_mut(id) {
                // A write past the cache must find the drop durable, or after a crash what it wrote
                // would be hidden by the lost block again.
                d.cleaned_ord = d.cleaned_ord.max(ord);
            }
        }
        Ok(lost.len() as u64)
    }

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
            fenced: d.fenced,
        })
    }

    /// A disk's statistics. Data left dirty by an earlier run counts as dirty since the first call.
    pub fn stats(&self, id: DiskId, now_ns: u64) -> Option<DiskStats> {
        let mut core = self.core();
        core.gather(id);
        let d = core.disk_mut(id)?;
        if d.is_dirty() && d.dirty_since_ns == 0 {
            d.dirty_since_ns = now_ns;
        }
        Some(DiskStats {
            counters: d.counters,
            cached_blocks: d.cached,
            dirty_blocks: d.dirty.len(),
            zero_blocks: d.zero.len(),
            dirty_for_ns: if d.is_dirty() {
                now_ns.saturating_sub(d.dirty_since_ns).max(1)
            } else {
                0
            },
            read_hit_latency: d.hit_latency.percentiles(),
            read_miss_latency: d.miss_latency.percentiles(),
            write_hit_latency: d.write_hit_latency.percentiles(),
            write_miss_latency: d.write_miss_latency.percentiles(),
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
            cached_blocks: core.cache.index.len() as u64,
            dirty_blocks: core.dirty_total,
            free_segments: core.flash.log.free.len() as u64,
            segments: core.flash.log.segments.len() as u64,
            footprint_bytes: Index::footprint(core.cache.index.slots())
                + core.cache.policy.footprint() as u64
                + Self::stage_footprint(core.cache.stage.capacity(), core.opts.prefetch),
            stage_blocks: core.cache.stage.len() as u64,
            gate: core.cache.policy.rules().gate,
            rule_switches: core.cache.policy.switches(),
            endurance_pressure: core.cache.policy.pressure(),
            flash_failed: !core.flash.takes_writes(),
            flash_fault: core.flash.given_up(),
            flash_unnoted: core.flash.noted == Noted::Nowhere,
            flash_read_ns: core.flash.ewma_ns,
        }
    }

    /// Bytes of RAM that index, policy and RAM stage take for `slots` slots of flash, with a
    /// stage of `stage` blocks or else as many as the pool's size asks for.
    pub fn footprint(slots: u32, stage: Option<usize>) -> u64 {
        let stage = stage.unwrap_or_else(|| Config::stage_of(slots as usize));
        Index::footprint(slots)
            + Policy::footprint_of(slots as usize + stage, true) as u64
            + Self::stage_footprint(stage, true)
    }

    /// Bytes of a stage and, with prefetch, of what is on its way there at most.
    fn stage_footprint(blocks: usize, prefetch: bool) -> u64 {
        let coming = if prefetch { blocks / UNUSED_SHARE } else { 0 };
        Stage::footprint(blocks) + coming as u64 * BLOCK
    }

    /// Clean cached blocks of a disk with their checksums, for comparison with the origin: those
    /// within `ranges` (block numbers), then the most used ones, at most `n` of each.
    pub fn sample_clean(
        &self,
        id: DiskId,
        ranges: &[std::ops::Range<u64>],
        n: usize,
    ) -> Vec<(u64, u32)> {
        let core = self.core();
        let mut sample = BTreeMap::new();
        for block in ranges.iter().cloned().flatten() {
            if sample.len() >= n {
                break;
            }
            if block >= 1 << 36 {
                continue;
            }
            if let Some(slot) = core.cache.index.get(Key::new(id, block))
                && core.cache.index.slot(slot).is_some_and(|s| !s.dirty)
            {
                sample.insert(block, core.cache.index.crc(slot));
            }
        }
        let slots = core.cache.index.slots();
        let step = (slots / (n as u32 * 16).max(1)).max(1);
        let mut hot: Vec<(u64, u64, u32)> = (0..slots)
            .step_by(step as usize)
            .filter_map(|slot| core.cache.index.slot(slot).map(|s| (slot, s)))
            .filter(|(_, s)| s.key.disk() == id && !s.dirty)
            .map(|(slot, s)| (s.freq, s.key.block(), core.cache.index.crc(slot)))
            .collect();
        hot.sort_unstable_by(|a, b| b.cmp(a));
        sample.extend(hot.into_iter().take(n).map(|(_, block, crc)| (block, crc)));
        sample.into_iter().collect()
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
            .filter(|d| d.is_dirty())
            .map(|d| (d.cfg.id, d.dirty.len(), d.zero.len()))
            .collect()
    }

    /// Takes no more requests (or takes them again) and brings everything to rest.
    pub fn quiesce(&self, on: bool) {
        let mut core = self.core();
        core.quiescing = on;
        core.everyone_is_ready();
        // The rest is as it was when the core last looked.
        core.shared.open(false);
    }

    /// Nothing is in flight, everything is durable: [`close`](Self::close) may be called.
    pub fn idle(&self) -> bool {
        let core = self.core();
        let busy_evict = core.flash.moving() > 0;
        let intents = core.disks.iter().flatten().any(|d| {
            d.attached && (!d.origin.intents.is_empty() || d.origin.sync.is_flushing())
                || !d.origin.destage.written.is_empty()
        });
        core.reqs.is_empty()
            && core.shared.all_in_flight() == 0
            && core.ops.is_empty()
            && core.destaging.jobs.is_empty()
            && core.flash.log.quiet()
            && !busy_evict
            && (!intents || !core.flash.takes_writes())
    }

    /// Writes the checkpoint and marks the pool clean. Needs [`idle`](Self::idle).
    pub fn close(&self, media: &mut dyn Media) -> Result<(), OpenError> {
        let mut core = self.core();
        let hits = core.shared.all_in_flight();
        if hits > 0 || !core.reqs.is_empty() || !core.ops.is_empty() || !core.flash.log.quiet() {
            return Err(OpenError::Busy);
        }
        if !core.flash.takes_writes() {
            // Once more: perhaps it answers again, and then nothing on it may be believed.
            if core.flash.sb.state == PoolState::Failed {
                core.flash.sb.store(media)?;
            }
            return Ok(());
        }
        // An origin did not take its flush: a checkpoint would forget what may be stale.
        let mut disks = core.disks.iter().flatten();
        let stale = disks.any(|d| !d.origin.intents.is_empty() || d.may_differ());
        // No summary will say that what carries the new tail is durable, and the segments in front of
        // it would count as free.
        let headless = core
            .flash
            .log
            .head
            .as_ref()
            .is_none_or(|h| h.entries.is_empty());
        if stale {
            took(Path::CheckpointLeftOut);
        }
        if stale || headless && !core.flash.log.freeing.is_empty() {
            // The log remembers; the next start reads it.
            media.flush()?;
            return Ok(());
        }
        let id = core.flash.sb.generation + 1;
        let checkpoint_bytes = core.write_checkpoint(media, id)?;
        core.flash.sb.state = PoolState::Clean {
            checkpoint_id: id,
            checkpoint_bytes,
        };
        core.flash.sb.store(media)?;
        Ok(())
    }

    /// Writes flash no more: the disks go on from their origins, and the destager empties it. With
    /// `mark` the failure is noted on flash; without, the caller has seen to it durably that the next
    /// start trusts nothing there which the origins may have passed.
    pub fn give_flash_up(&self, fault: FlashFault, mark: bool, now_ns: u64, fx: &mut Effects) {
        let mut core = self.core();
        core.give_flash_up(fault, mark, now_ns, fx);
        core.settle(now_ns, fx);
    }

    /// Says that a later start will see in another place that flash was given up, where flash itself took
    /// no note of it ([`PoolStats::flash_unnoted`]).
    pub fn flash_is_noted_elsewhere(&self, now_ns: u64, fx: &mut Effects) {
        let mut core = self.core();
        core.flash.noted_elsewhere();
        core.route_flash(now_ns, fx);
        core.settle(now_ns, fx);
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

    /// Takes requests, all of one thread; `now_ns` is monotonic. Drains `reqs`.
    pub fn submit(&self, now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects) {
        let lane = Shared::lane(reqs);
        let mut after = self.shared.take(lane, now_ns, reqs, fx);
        if !reqs.is_empty() {
            after.must = true;
        }
        let Some(mut core) = self.visit(Some(lane), after, now_ns, fx) else {
            return;
        };
        for r in reqs.drain(..) {
            core.submit(r, now_ns, fx);
        }
        core.settle(now_ns, fx);
    }

    /// Takes finished operations. Drains `dones`.
    pub fn io_done(&self, now_ns: u64, dones: &mut Vec<IoDone>, fx: &mut Effects) {
        let (lane, mut after) = self.shared.done(now_ns, dones, fx);
        if !dones.is_empty() {
            after.must = true;
        }
        let Some(mut core) = self.visit(lane, after, now_ns, fx) else {
            return;
        };
        for d in dones.drain(..) {
            core.done(d, now_ns, fx);
        }
        core.settle(now_ns, fx);
    }

    /// The core, if a thread has to go there after it was in its lane; what that has noted is folded. What
    /// only ought to be done is done if nobody else is there.
    fn visit(
        &self,
        lane: Option<usize>,
        after: After,
        now_ns: u64,
        fx: &mut Effects,
    ) -> Option<MutexGuard<'_, Core>> {
        let mut core = if after.must {
            self.core()
        } else if after.settle || after.fold {
            match self.core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(e)) => e.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            }
        } else {
            return None;
        };
        if let Some(lane) = lane {
            core.fold(lane, now_ns, fx);
        }
        if !after.must && !after.settle {
            core.publish_pool(now_ns);
            return None;
        }
        Some(core)
    }

    /// Background work; returns when to be called again at the latest.
    pub fn tick(&self, now_ns: u64, fx: &mut Effects) -> Option<u64> {
        Some(self.core().tick(now_ns, fx))
    }
}

fn place(core: &mut Core, disk: Disk) {
    let at = disk.cfg.id as usize;
    if core.disks.len() <= at {
        core.disks.resize_with(at + 1, || None);
    }
    core.totals.add(Totals::of(&disk));
    core.ready.all(disk.cfg.id);
    core.disks[at] = Some(Box::new(disk));
}
