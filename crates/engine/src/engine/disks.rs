//! Disks come, change and go.

use crate::api::{DISK_MAX, DiskConfig, DiskId, Effects, Home, Mode, OriginState};
use crate::cache::index::Key;
use crate::core::Core;
use crate::disk::Disk;
use crate::disk::ready::Totals;
use crate::engine::Engine;
use crate::faults::Fault;
use crate::paths::{Path, took};
use hearth_format::Kind;
use hearth_io::BLOCK;

// In this crate a `Fault` is a deliberate mistake.
use hearth_fault::Fault as Failure;

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

impl Engine {
    /// Starts serving a disk. `origin` says whether its volatile writes were flushed since it was
    /// opened.
    pub fn attach(&self, cfg: DiskConfig, origin: OriginState) -> Result<(), ControlError> {
        let mut core = self.core();
        if cfg.size == 0 || cfg.size > DISK_MAX || cfg.id == 0 || cfg.id == DiskId::MAX {
            return Err(ControlError::Size);
        }
        let id = cfg.id;
        match core.disk(id) {
            Some(d) if d.attached => return Err(ControlError::Attached),
            // What flash has of it was put there under other rules.
            Some(d) if d.lives_otherwise(cfg.home) && (d.cached > 0 || d.is_dirty()) => {
                return Err(ControlError::Dirty);
            }
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
        let homeless = matches!(cfg.home, Home::Flash | Home::Scratch);
        let known = core.opts.faults.has(Fault::TrustUnknownOrigin) || homeless;
        let origin = match known {
            true => OriginState::Flushed,
            false => origin,
        };
        core.count_promise(id, cfg.home);
        let verifies = core.opts.faults.has(Fault::AttachVerifies);
        close_void_heads(&mut core, id, cfg.mode);
        core.alter(id, |d| {
            d.unverified &= !verifies;
            d.resize(cfg.size);
            d.cfg = cfg;
            d.attached = true;
            d.held = false;
            d.fenced = false;
            d.log_free = false;
        });
        core.set_order(id);
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
        core.end_order(id);
        core.drop_all_of(id);
        if let Some(d) = core.disk_mut(id) {
            d.void = None;
            d.solid.clear();
            d.lost.clear();
            d.doubtful.clear();
            d.refused.clear();
            d.refusals.clear();
            (d.unverified, d.dropping) = (false, None);
        }
        if !core.opts.faults.has(Fault::ForgetInHead) {
            core.flash.roll();
            core.route_flash(0, fx);
        }
        let seq = core.flash.log.next_segment_seq;
        core.flash.forget_disk(id, seq);
        if core.disk(id).is_some_and(|d| d.attached) {
            core.set_order(id);
        }
        core.publish(id);
        Ok(seq)
    }

    /// The segment number below which records of a disk may be void that is off and clean, whether or not requests of
    /// it are under way. Once that is stored, [`set_log_free`](Self::set_log_free) says so. `Dirty`: something has to be
    /// written back first.
    pub fn log_free_seq(&self, id: DiskId) -> Result<u64, ControlError> {
        let mut core = self.core();
        let d = core.disk(id).ok_or(ControlError::NoDisk)?;
        if d.cfg.mode != Mode::Off || !d.has_origin() || d.is_dirty() {
            return Err(ControlError::Dirty);
        }
        let log = &core.flash.log;
        let queued = log.queue.iter();
        let mut on_their_way = queued.chain(log.batches.iter().flat_map(|b| &b.items));
        let data = |kind: Kind| kind.is_data() || kind == Kind::ZeroRun;
        let busy = !d.origin.destage.busy.is_empty()
            || !d.origin.destage.written.is_empty()
            || d.tickets.iter().any(|t| !t.is_reading())
            || on_their_way.any(|item| item.disk == id && data(item.kind));
        if busy {
            core.flash.log.urgent = true;
            return Err(ControlError::Busy);
        }
        let seq = core.flash.log.next_segment_seq;
        core.alter(id, |d| d.heads_void = true);
        Ok(seq)
    }

    /// It is stored that nothing counts which flash has of a disk that is off, below this segment number: drops its
    /// copies. From here on it never waits for the log.
    pub fn set_log_free(&self, id: DiskId, seq: u64, now_ns: u64, fx: &mut Effects) {
        let mut core = self.core();
        // It may have been cached again meanwhile.
        if core
            .disk(id)
            .is_none_or(|d| d.cfg.mode != Mode::Off || !d.heads_void)
        {
            return;
        }
        core.forget_range(id, 0, DISK_MAX / BLOCK);
        core.stage_forget(id, 0, u64::MAX);
        core.flash.forget_disk(id, seq);
        core.publish(id);
        let d = core.known_mut(id);
        d.log_free = true;
        let regions: Vec<u32> = d.origin.intents.regions().collect();
        for region in regions {
            core.wake_intent(id, region, now_ns, fx);
        }
        core.wake_clean_waiters(id, now_ns, fx);
        core.settle(now_ns, fx);
    }

    /// Is a disk off, and could it be [freed from the log](Self::set_log_free)?
    pub fn can_be_log_free(&self, id: DiskId) -> bool {
        let core = self.core();
        let d = core.disk(id);
        d.is_some_and(|d| d.cfg.mode == Mode::Off && d.has_origin() && !d.log_free)
    }

    /// A crash has left nothing of a scratch disk: what nobody has written since cannot be read, until all of it is
    /// [forgotten](Self::forget).
    pub fn set_void(&self, id: DiskId) {
        if let Some(d) = self.core().disk_mut(id).filter(|d| d.is_scratch()) {
            d.void.get_or_insert_default();
        }
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
        core.end_order(id);
        took(Path::Removed);
        core.gather(id);
        if let Some(d) = core.disks[id as usize].take() {
            core.totals.take(Totals::of(&d));
        }
        core.publish(id);
        Ok(())
    }

    /// All clients of all disks were cut off: a flush that fails from here on tells none of them that anything may be lost.
    pub fn clients_have_left(&self) {
        for disk in self.core().disks.iter_mut().flatten() {
            disk.origin.sync.clients_have_left();
        }
    }

    /// True if a write of the disk may leave on flash what its origin lacks; `None` if there is no such disk.
    pub fn writes_to_flash(&self, id: DiskId) -> Option<bool> {
        self.core().disk(id).map(|d| d.writes_to_flash())
    }

    /// Changes the cache mode; requests in flight end as they began.
    pub fn set_mode(&self, id: DiskId, mode: Mode) -> Result<(), ControlError> {
        let mut core = self.core();
        // One that lives on flash has one way to be served.
        if !core.disk(id).ok_or(ControlError::NoDisk)?.has_origin() {
            return Ok(());
        }
        core.stop_holding(id);
        close_void_heads(&mut core, id, mode);
        core.alter(id, |d| d.cfg.mode = mode);
        core.set_order(id);
        core.publish(id);
        if mode == Mode::Off {
            core.stage_forget(id, 0, u64::MAX);
        }
        Ok(())
    }

    /// Gives a disk that lives on flash an origin while it is served ([`Home::Moving`]): one that is as large, all zeros, and
    /// flushed; all that the disk has is dirty from then on. Or says that the origin has it all ([`Home::Origin`]).
    /// [`ControlError::Busy`] asks to be called again a little later.
    ///
    /// The other way, a disk with an origin is promised flash ([`Home::Moving`] again), then [held](Engine::hold) until all of it is there
    /// ([`Engine::is_whole`]). It has to be stored that it lives on flash before it is said here ([`Home::Flash`]).
    pub fn rehome(&self, id: DiskId, home: Home) -> Result<(), ControlError> {
        let mut core = self.core();
        core.rehome(id, home)?;
        core.publish(id);
        Ok(())
    }

    /// Holds on flash what is written to a disk that is [`Home::Moving`], or lets the origin have it (again). While it is held, what flash lacks
    /// ([`Engine::unkept`]) is brought there by [`Request::keep`](crate::api::Request::keep). `Busy` says that it is held, and that something may become
    /// clean yet: what was found before is to be looked for once more. Called again, it notes how far the log has to be durable for what was
    /// brought there so far.
    pub fn hold(&self, id: DiskId, on: bool) -> Result<(), ControlError> {
        self.core().hold(id, on)
    }

    /// The same for a disk that is held: one that was let go meanwhile stays so, which is `Dirty`.
    pub fn hold_on(&self, id: DiskId) -> Result<(), ControlError> {
        let mut core = self.core();
        match core.disk(id) {
            Some(d) if d.held => core.hold(id, true),
            _ => Err(ControlError::Dirty),
        }
    }

    /// Is a disk held on flash?
    pub fn is_held(&self, id: DiskId) -> bool {
        self.core().disk(id).is_some_and(|d| d.held)
    }

    /// Has flash all of a disk that is held as its own, durably, but for what [`Engine::unkept`] has told? `Busy` asks to be called again a little
    /// later; `Dirty` says that something has still to be kept.
    pub fn is_whole(&self, id: DiskId) -> Result<(), ControlError> {
        self.core().is_whole(id)
    }

    /// The first bytes in a range that flash does not have as the disk's own, as (offset, length, whether it has a copy of the origin); or
    /// how far there are none.
    pub fn unkept(&self, id: DiskId, offset: u64, end: u64) -> Result<(u64, u64, bool), u64> {
        let core = self.core();
        let Some(d) = core.disk(id) else {
            return Err(end);
        };
        d.first_run(offset, end, |block| {
            let kept = d.zero.contains(block) || d.dirty.contains(block);
            (!kept).then(|| core.cache.index.get(Key::new(id, block)).is_some())
        })
    }

    /// How far behind the origin of an ordered disk may be before its writes wait; 0 is no limit.
    pub fn set_max_age(&self, id: DiskId, ns: u64) -> Result<(), ControlError> {
        let mut core = self.core();
        core.disk(id).ok_or(ControlError::NoDisk)?;
        core.alter(id, |d| d.max_age_ns = ns);
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
        if max_bytes > 0 {
            // It could not be all on flash.
            core.stop_holding(id);
        }
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
        if on {
            core.stop_holding(id);
        }
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
        // From here on it has them from its origin.
        core.stop_holding(id);
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
}

/// A disk that was off is cached again from here on, if that is its mode: in segments that count for it.
fn close_void_heads(core: &mut Core, id: DiskId, mode: Mode) {
    if mode == Mode::Off || core.disk(id).is_none_or(|d| !d.heads_void) {
        return;
    }
    if !core.opts.faults.has(Fault::OffReturnsInHead) {
        core.flash.roll();
    }
    let d = core.known_mut(id);
    (d.heads_void, d.log_free) = (false, false);
    // Its intents do not count any more. What is cached from here on has none that says whether the origin was flushed,
    // and regions that are being written need new records; these stand before all that is cached.
    d.origin.sync.unguard();
    let regions: Vec<u32> = d.origin.intents.regions().collect();
    for region in regions {
        core.record_intent(id, region);
    }
}

/// Puts a disk into the engine.
pub(crate) fn place(core: &mut Core, disk: Disk) {
    let at = disk.cfg.id as usize;
    if core.disks.len() <= at {
        core.disks.resize_with(at + 1, || None);
    }
    core.totals.add(Totals::of(&disk));
    core.ready.all(disk.cfg.id);
    core.disks[at] = Some(Box::new(disk));
}
