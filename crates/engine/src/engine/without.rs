//! Going on without one of several flash devices that has failed. Why that may be is in [`crate::flash::without`].

use crate::api::DiskId;
use crate::core::{Core, EngineOptions};
use crate::disk::Disk;
use crate::engine::Engine;
use crate::engine::open::{KnownDisk, OpenError};
use crate::flash::checkpoint::CheckpointError;
use crate::paths::{Path, took};
use hearth_format::Superblock;
use hearth_format::superblock::PoolState;
use hearth_io::Media;
use serde::Serialize;
use std::collections::BTreeMap;

/// What keeps a pool from going on without the device that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hindrance {
    /// It holds, or held, what no origin has: a disk lives on flash.
    LivesOnFlash,
    /// Something dirty is listed as lost, until it is written again or accepted as lost.
    Lost,
    /// What is dirty is on its way to the origins.
    Dirty,
    /// An origin has not made durable what was written to it.
    Unflushed,
    /// An origin has failed its last flush, and what is written there took the place of something dirty, or its guest does not know
    /// yet that it may be lost.
    OriginFails,
}

/// A device that failed alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FailedAlone {
    /// Its place.
    pub device: u16,
    /// Clean blocks that the others hold, at least: where those of a disk lie whose origin fails, which are let go, is not looked for.
    pub kept_blocks: u64,
    /// What has to be over first; of which disk, is to be seen there.
    pub hindrance: Option<Hindrance>,
}

impl Engine {
    /// One of the flash devices is known to have failed; flash is about to be given up for it.
    pub fn blame_device(&self, device: u16) {
        self.core().flash.devices.failing.blame(device);
    }

    /// A device that was erased or written over below the pool, which is at rest.
    pub fn blank_device(&self, media: &mut dyn Media) -> Option<u16> {
        self.core().flash.blank_device(media)
    }

    /// The device that flash was given up for, if the pool could go on without it.
    pub fn failed_alone(&self) -> Option<FailedAlone> {
        let core = self.core();
        let device = core.flash.failed_alone()?;
        Some(FailedAlone {
            device,
            kept_blocks: core.kept_without(device),
            hindrance: core.hindrance(),
        })
    }

    /// Disks whose origins have not made durable what was written to them, without those that would be let go: for these
    /// [`Hindrance::Unflushed`] waits.
    pub fn unflushed(&self) -> Vec<DiskId> {
        let core = self.core();
        core.unflushed().map(|d| d.cfg.id).collect()
    }

    /// Closes the pool so that it can go on without the device that failed. `media` asks nothing of that one. Needs
    /// [`idle`](Self::idle), and that nothing [hinders](FailedAlone::hindrance) it.
    pub fn close_without(&self, media: &mut dyn Media) -> Result<(), OpenError> {
        let mut core = self.core();
        let hits = core.shared.all_in_flight();
        if hits > 0 || !core.reqs.is_empty() || !core.ops.is_empty() || !core.flash.log.quiet() {
            return Err(OpenError::Busy);
        }
        if core.flash.failed_alone().is_none() || core.hindrance().is_some() {
            return Err(OpenError::Busy);
        }
        core.let_go_of_unflushed();
        // What the index points at may not be durable so far.
        media.flush()?;
        core.flash.raise_log_floor();
        let id = core.flash.sb.generation + 1;
        let checkpoint_bytes = match core.write_checkpoint(media, id) {
            Err(e @ CheckpointError::TooLarge { .. }) => return Err(e.into()),
            written => written?,
        };
        took(Path::WentOnWithout);
        core.flash.sb.state = PoolState::Clean {
            checkpoint_id: id,
            checkpoint_bytes,
        };
        core.flash.store_superblock(media)?;
        Ok(())
    }
}

/// What a clean stop has left of a pool one of whose devices is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftWithout {
    /// Number of the next segment: what was written so far is below.
    pub floor: u64,
    /// Clean blocks on the devices that are there.
    pub kept_blocks: u64,
    /// And on the one that is missing.
    pub gone_blocks: u64,
    /// Why the pool cannot go on without it, if it cannot.
    pub hindrance: Option<Hindrance>,
}

impl Engine {
    /// Looks what a clean stop has left, if one of the devices is missing; it is not asked for anything, and nothing is written. `None`:
    /// the pool was not closed in order, or nobody can read how.
    pub fn look_without(
        media: &mut dyn Media,
        device: u16,
        opts: EngineOptions,
        known: &[KnownDisk],
    ) -> Result<Option<LeftWithout>, OpenError> {
        let sb = Superblock::load(media)?;
        let PoolState::Clean { checkpoint_id, .. } = sb.state else {
            return Ok(None);
        };
        let since: BTreeMap<u16, u64> = known.iter().map(|k| (k.id, k.since_seq)).collect();
        let mut core = Engine::blank(sb, media.spread(), opts, known);
        if !core.read_checkpoint(media, checkpoint_id, &since)? {
            return Ok(None);
        }
        let kept = core.kept_without(device);
        let all: u64 = (core.flash.log.segments.iter())
            .map(|s| u64::from(s.live))
            .sum();
        Ok(Some(LeftWithout {
            floor: core.flash.log.next_segment_seq,
            kept_blocks: kept,
            gone_blocks: all - kept,
            hindrance: core.hindrance(),
        }))
    }
}

impl Disk {
    /// Its origin has failed its last flush, or is asked for none any more.
    fn origin_fails(&self) -> bool {
        self.fenced || self.origin.sync.error.is_some()
    }

    /// Its origin fails, and has not made durable what was written to it, but nothing dirty would be lost if it never did, and the guest
    /// was told that its flush failed: a link to the origin's server forgets what it would have sent again.
    fn is_let_go(&self) -> bool {
        let sync = &self.origin.sync;
        let unflushed = self.attached && !sync.is_durable();
        unflushed && self.origin_fails() && sync.is_superseded_durably() && sync.is_guest_told()
    }
}

impl Core {
    fn hindrance(&self) -> Option<Hindrance> {
        let disks = || self.disks.iter().flatten();
        let quiet = self.flash.log.batches.is_empty() && self.flash.log.queue.is_empty();
        if disks().any(|d| (!d.has_origin() || d.is_promised()) && (d.cached > 0 || d.is_dirty())) {
            return Some(Hindrance::LivesOnFlash);
        }
        if disks().any(|d| !d.lost.is_empty()) {
            return Some(Hindrance::Lost);
        }
        let waits = |d: &Disk| d.is_dirty() || !d.origin.destage.written.is_empty();
        if disks().any(|d| waits(d)) || self.flash.any_held() || !quiet {
            return Some(Hindrance::Dirty);
        }
        let mut unflushed = self.unflushed().peekable();
        unflushed.peek()?;
        match unflushed.any(Disk::origin_fails) {
            true => Some(Hindrance::OriginFails),
            false => Some(Hindrance::Unflushed),
        }
    }

    fn unflushed(&self) -> impl Iterator<Item = &Disk> {
        let disks = self.disks.iter().flatten().map(|d| &**d);
        disks.filter(|d| d.attached && !d.origin.sync.is_durable() && !d.is_let_go())
    }

    /// Of disks whose origins fail nothing stays in the index: a checkpoint tells neither of open intents nor that an origin may
    /// lose what it has not made durable. Nobody else waits for such an origin, which may be away for days.
    fn let_go_of_unflushed(&mut self) {
        let all = self.disks.iter().flatten().filter(|d| d.is_let_go());
        let all: Vec<_> = all.map(|d| d.cfg.id).collect();
        for id in all {
            took(Path::LetGoWithout);
            self.drop_all_of(id);
        }
    }

    /// Blocks in the index that are not on this device, at least, without those that would be let go.
    fn kept_without(&self, device: u16) -> u64 {
        let all = (0..).zip(&self.flash.log.segments);
        let there = all.filter(|(seg, _)| self.flash.device_of(*seg) != device);
        let there: u64 = there.map(|(_, s)| u64::from(s.live)).sum();
        let let_go = self.disks.iter().flatten().filter(|d| d.is_let_go());
        let let_go: u64 = let_go.map(|d| d.cached).sum();
        there.saturating_sub(let_go)
    }
}
