//! From a flash device to a pool that serves, and back to rest.

use crate::api::{DiskConfig, DiskId, Home, Mode};
use crate::cache::Cache;
use crate::cache::index::Index;
use crate::cache::stage::Stage;
use crate::core::fold::Folding;
use crate::core::{Core, EngineOptions};
use crate::disk::Disk;
use crate::disk::ready::{Ready, Totals};
use crate::engine::Engine;
use crate::engine::disks::place;
use crate::faults::Fault;
use crate::flash::checkpoint::CheckpointError;
use crate::flash::device::FlashDevice;
use crate::flash::devices::Devices;
use crate::flash::recover::{GENERATIONS_END, NUMBERS_END, RecoverError};
use crate::lanes::Shared;
use crate::origin::pace::Destaging;
use crate::paths::{Path, took};
use crate::request::Requests;
use hearth_format::superblock::{INCOMPAT_HEADS, INCOMPAT_MAP, INCOMPAT_ORDER, PoolState};
use hearth_format::{FormatError, Superblock};
use hearth_io::{Media, Spread};
use hearth_policy::{Config, Policy};
use serde::Serialize;
use slab::Slab;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

// In this crate a `Fault` is a deliberate mistake.
use hearth_fault::Fault as Failure;

/// A disk the registry knows, told to the engine before it reads the log.
#[derive(Clone, Copy, Debug)]
pub struct KnownDisk {
    /// Its number.
    pub id: DiskId,
    /// Its size in bytes when last seen.
    pub size: u64,
    /// Records of this disk in segments numbered below this are void.
    pub since_seq: u64,
    /// Where its data lives.
    pub home: Home,
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
    /// Disks of whose contents nothing is left, because they are scratch and the last run did not end in order.
    pub dropped: Vec<DiskId>,
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

impl Engine {
    pub(crate) fn blank(
        sb: Superblock,
        spread: Option<Spread>,
        opts: EngineOptions,
        known: &[KnownDisk],
    ) -> Core {
        let mut flash = FlashDevice::new(0, sb, opts.trim, opts.faults);
        if let Some(spread) = spread {
            // Which devices are lost is known to whoever has the devices as well.
            flash.devices = Devices::new(spread, opts.faults);
        }
        flash.set_heads(opts.heads);
        flash.since = known.iter().map(|k| (k.id, k.since_seq)).collect();
        flash.resumes = known.iter().any(|k| k.home != Home::Origin);
        let slots = flash.layout.slots();
        let most = (opts.ram_stage).unwrap_or_else(|| Config::stage_most_of(slots as usize));
        let stage = Config::stage_of(slots as usize, opts.prefetch).min(most);
        let index = Index::new(slots, opts.hash_seed);
        let shared = Arc::new(Shared::new(
            index.lookup(),
            flash.target(),
            flash.devices.spread().clone(),
            &flash.layout,
            opts.faults,
        ));
        let policy = Policy::new(Config {
            ram: stage,
            ram_most: most,
            flash: slots as usize,
            prefetch: opts.prefetch,
            rules: opts.rules,
            budget: opts.endurance.clone(),
            // What is dead is cleaned.
            dead_space: false,
        });
        let mut core = Core {
            flash,
            cache: Cache::new(index, policy, Stage::new(stage, most, opts.hash_seed)),
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
                mode: match core.opts.ordered.contains(&k.id) {
                    true => Mode::WriteBackOrdered,
                    false => Mode::WriteBack,
                },
                block_size: 4096,
                min_bytes: 0,
                max_bytes: 0,
                seq_cutoff: 0,
                read_only: true,
                home: k.home,
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
        let floors = [sb.log_floor, sb.clean_floor, sb.once.floor];
        if sb.generation >= GENERATIONS_END || floors.iter().any(|n| *n >= NUMBERS_END) {
            let why = "its superblock counts further than any pool does";
            return Err(OpenError::Damaged(why.to_owned()));
        }
        let state = sb.state;
        let since: BTreeMap<DiskId, u64> = known.iter().map(|k| (k.id, k.since_seq)).collect();
        let spread = media.spread();
        let mut core = Self::blank(sb.clone(), spread.clone(), opts.clone(), known);
        let mut report = OpenReport {
            from: OpenedFrom::Log,
            cached_blocks: 0,
            dirty: Vec::new(),
            dropped: Vec::new(),
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
                core = Self::blank(sb, spread, opts, known);
            }
        }
        if !loaded && core.flash.sb.floor_of_log() > 0 {
            let based = core.read_base(media, &since).unwrap_or(false);
            if !based {
                let (sb, opts) = (core.flash.sb.clone(), core.opts.clone());
                core = Self::blank(sb, media.spread(), opts, known);
            }
        }
        if !loaded {
            let again = (core.flash.sb.clone(), core.opts.clone());
            let mut turned = false;
            loop {
                let recovered = core.recover(media, &since);
                let begins_there = match (recovered, media.spread()) {
                    (Ok(found), _) => {
                        report.segments = found.segments;
                        report.discarded = found.discarded;
                        break;
                    }
                    // The other half of each segment may be whole. Nothing was written so far, or what every start would write.
                    (Err(RecoverError::Damaged(_)), Some(spread)) if !turned && spread.turn() => {
                        turned = true;
                        BTreeMap::new()
                    }
                    // Once in each order of the halves.
                    (Err(RecoverError::BeginsThere(there)), Some(_)) => there,
                    // There are only so many devices.
                    (Err(RecoverError::DeviceLost), Some(_)) => BTreeMap::new(),
                    (Err(e), _) => return Err(refused(e)),
                };
                core = Self::blank(again.0.clone(), media.spread(), again.1.clone(), known);
                core.flash.begins_there = begins_there;
            }
            core.drop_scratch(&mut report);
        }
        core.drop_zeros_of_homeless();
        core.flash.spread_free();
        core.flash.store_whole_map(media)?;
        core.flash.sb.incompat |= INCOMPAT_MAP;
        if core.flash.log.heads_used > 1 {
            core.flash.sb.incompat |= INCOMPAT_HEADS;
        }
        if !core.opts.ordered.is_empty() {
            core.flash.sb.incompat |= INCOMPAT_ORDER;
        }
        core.flash.order_noted = core.flash.sb.incompat & INCOMPAT_ORDER != 0;
        if !core.opts.faults.has(Fault::StayClean) {
            core.flash.sb.state = PoolState::Open;
            core.flash.store_superblock(media)?;
        }
        // Not before it is durable which devices are lost.
        core.drop_all_gone();
        core.flash.tighten();
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
        core.flash.run_seq = core.flash.log.next_segment_seq;
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

    /// Takes no more requests (or takes them again) and brings everything to rest.
    pub fn quiesce(&self, on: bool) {
        let mut core = self.core();
        core.quiescing = on;
        if let Some(emptying) = &mut core.flash.emptying {
            emptying.paused = on;
        }
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
                core.flash.store_superblock(media)?;
            }
            return Ok(());
        }
        // An origin did not take its flush: a checkpoint would forget what may be stale.
        let mut disks = core.disks.iter().flatten();
        let stale = disks.any(|d| !d.origin.intents.is_empty() || d.may_differ());
        // Nor does it tell of segments that may only go together.
        if stale || core.flash.any_held() {
            took(Path::CheckpointLeftOut);

            // The log remembers; the next start reads it.
            media.flush()?;
            return Ok(core.flash.store_if_lost(media)?);
        }
        let id = core.flash.sb.generation + 1;
        let checkpoint_bytes = match core.write_checkpoint(media, id) {
            // Devices came later, and the area is as large as it was: the next start reads the log.
            Err(CheckpointError::TooLarge { .. }) if core.flash.layout.added.segments > 0 => {
                media.flush()?;
                return Ok(core.flash.store_if_lost(media)?);
            }
            written => written?,
        };
        core.flash.sb.state = PoolState::Clean {
            checkpoint_id: id,
            checkpoint_bytes,
        };
        core.flash.store_superblock(media)?;
        Ok(())
    }
}

fn refused(e: RecoverError) -> OpenError {
    match e {
        RecoverError::Io(e) => OpenError::Io(e),
        RecoverError::Format(e) => OpenError::Format(e),
        RecoverError::Damaged(why) => OpenError::Damaged(why),
        e @ (RecoverError::BeginsThere(_) | RecoverError::DeviceLost) => {
            OpenError::Damaged(e.to_string())
        }
    }
}
