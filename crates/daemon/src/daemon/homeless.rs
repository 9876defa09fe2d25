//! Disks that live on flash: they have no origin, so flash has the only copy of what guests write there.
//!
//! What is promised to them is taken from everybody else's share once, when they are added or grow, so that
//! their writes never wait for room that others hold: the sum of their sizes stays below a share of
//! the pool ([`KEPT_PERCENT_MAX`]), and more is refused with the figures. Until it is written the room serves the
//! cache.

use std::sync::Arc;

use hearth_engine::api::{DISK_MAX, KEPT_PERCENT_MAX};
use hearth_format::{DiskRecord, Home, Registry, Uuid};
use hearth_io::{BLOCK, Device, Nowhere};

use super::admission::{Ownership, RULES};
use super::attach::Opened;
use super::control::attached;
use super::course::{Attempt, Turn};
use super::{Daemon, lock};
use crate::api::types::{CacheMode, DiskAdd, DiskInfo, DiskSet};
use crate::error::{Error, Result};
use crate::origin;
use crate::pool::mode_of;
use crate::settings;
use crate::size::human;

/// Segments a pool has at least on which disks may live: with fewer there is no room to clean the log around
/// what never leaves it.
pub(super) const SEGMENTS_MIN: u64 = 12;

/// What is to be said of a scratch disk that a crash has emptied.
pub(super) const VOID: &str = "it is scratch, and a crash has left nothing of it: what was not written since cannot be \
     read, until `hearth disk reset` makes the disk empty";

/// The device of a disk that has no origin.
pub(super) fn device(record: &DiskRecord) -> Device {
    Device::remote(Arc::new(Nowhere::new("flash alone", record.size)))
}

/// Refuses to serve disks that live on flash from a pool that cannot hold them and be cleaned: it has been given
/// smaller flash than it had. Their writes would fill the log for good, and everybody else would wait.
fn check_fits(registry: &Registry, holds: u64) -> Result<()> {
    let promised = promised(registry);
    // More than may be promised, for segments that take no writes any more make a pool smaller.
    let most = holds / 100 * (KEPT_PERCENT_MAX + 10);
    if promised <= most {
        return Ok(());
    }
    Err(Error::refused(
        format!(
            "the pool holds {}, and {} are promised to disks that live on flash",
            human(holds),
            human(promised)
        ),
        "put the pool on larger flash, or remove one of those disks",
    ))
}

/// Bytes that are promised to disks that live on flash.
pub(super) fn promised(registry: &Registry) -> u64 {
    let promised = registry.disks.iter().map(|d| d.promised_bytes());
    promised.fold(0, u64::saturating_add)
}

/// What is kept for disks with a minimum, pinned ones among them.
pub(super) fn kept(registry: &Registry) -> u64 {
    let kept = registry.disks.iter().map(|d| d.kept_bytes());
    kept.fold(0, u64::saturating_add)
}

/// Of a pool that can hold `capacity` bytes, how many may be promised.
pub(super) fn most(capacity: u64) -> u64 {
    capacity / 100 * KEPT_PERCENT_MAX
}

/// Refuses a disk that lives on flash if so many bytes more cannot be promised.
pub(super) fn check_promise(
    registry: &Registry,
    capacity: u64,
    name: &str,
    more: u64,
) -> Result<()> {
    let (most, promised) = (most(capacity), promised(registry));
    let kept = kept(registry);
    let wanted = promised.saturating_add(more);
    // Of what is left besides the minimums of others, eviction needs something that it may drop.
    if wanted <= most && wanted.saturating_add(kept) <= capacity / 8 * 7 {
        return Ok(());
    }
    if wanted <= most {
        return Err(Error::refused(
            format!(
                "{} of flash cannot be promised to {name}: of the {} that the pool holds, {} are promised to disks that live there, and {} are kept for others",
                human(more),
                human(capacity),
                human(promised),
                human(kept)
            ),
            "make it smaller, or lower minimums with `hearth disk set NAME --min`",
        ));
    }
    Err(Error::refused(
        format!(
            "{} of flash cannot be promised to {name}: of the {} that the pool holds, {} may be promised to disks that live there, and {} are",
            human(more),
            human(capacity),
            human(most),
            human(promised)
        ),
        "make it smaller, remove another such disk, or use a larger pool",
    ))
}

/// Why something that is about an origin cannot be done.
pub(super) fn has_none(name: &str, what: &str) -> Error {
    Error::refused(
        format!("{what}: disk {name} lives on flash and has no origin"),
        "see docs/flash-only.md for what can be done with it",
    )
}

/// Refuses settings that mean nothing for a disk that lives on flash.
pub(super) fn check_settings(record: &DiskRecord) -> Result<()> {
    if !record.is_flash_only() {
        return Ok(());
    }
    let fault = if mode_of(record.mode) != CacheMode::WriteBack {
        "another mode than write-back"
    } else if record.read_only {
        "writes that are refused"
    } else if record.min_bytes > 0 || record.max_bytes > 0 || record.auto {
        "a share of flash (all of it is kept)"
    } else if record.pin {
        "being pinned (all of it is on flash)"
    } else if record.hold {
        "a hold (there is no origin to write to)"
    } else if record.origin_timeout_ms > 0 {
        "a time to wait for an origin"
    } else {
        return Ok(());
    };
    Err(Error::invalid(
        format!("a disk that lives on flash has no use for {fault}"),
        "leave that out",
    ))
}

impl Daemon {
    /// Bytes that the pool can hold, as the engine counts, of which a share may be promised: less where a part is set aside for
    /// swap, with which such disks have that share of all together.
    pub(super) fn holds(&self) -> u64 {
        let stats = self.engine.pool_stats();
        let aside = stats.set_aside_blocks * BLOCK;
        let less = aside / KEPT_PERCENT_MAX * (100 - KEPT_PERCENT_MAX);
        (stats.dirty_capacity_blocks * BLOCK).saturating_sub(less)
    }

    /// The device of a disk that has no origin, if flash can hold all that was promised.
    pub(super) fn homeless_device(&self, record: &DiskRecord) -> Result<Device> {
        let pool = lock(&self.pool);
        if !pool.is_without_flash() {
            check_fits(pool.registry(), self.holds())?;
        }
        Ok(device(record))
    }

    /// Refuses what cannot be promised.
    pub(super) fn check_promise(&self, name: &str, more: u64) -> Result<()> {
        check_promise(lock(&self.pool).registry(), self.holds(), name, more)
    }

    /// Adds a disk of so many bytes that lives on flash.
    pub(super) fn add_flash_only(self: &Arc<Daemon>, disk: DiskAdd, size: u64) -> Result<DiskInfo> {
        if !disk.origin.is_empty() {
            return Err(Error::invalid(
                "a disk that lives on flash has no origin",
                "give either an origin or the size of a disk that has none",
            ));
        }
        if size == 0 || !size.is_multiple_of(BLOCK) || size > DISK_MAX {
            return Err(Error::invalid(
                format!("{size} bytes are no size for a disk that lives on flash"),
                "give a multiple of 4K, up to 256T",
            ));
        }
        let segments = self.engine.pool_stats().segments;
        if segments < SEGMENTS_MIN {
            return Err(Error::refused(
                format!(
                    "no disk can live on a pool of {segments} segments: it takes {SEGMENTS_MIN} at least, or its log cannot be cleaned around what stays"
                ),
                "use a larger pool",
            ));
        }
        self.not_stopping()?;
        if self.flash.degraded().is_some() || self.cache_is_off() {
            return Err(Error::unavailable(
                "the pool's flash takes no writes, so no disk can live there",
                "`hearth pool show` says why",
            ));
        }
        let mut record = settings::defaults();
        settings::change(&mut record, &disk.settings)?;
        let serial = Uuid::new_v4();
        let record = DiskRecord {
            name: disk.name.clone(),
            origin: format!("{}:{serial}", hearth_origin::FLASH),
            size,
            home: match disk.scratch {
                true => Home::Scratch,
                false => Home::Flash,
            },
            rules: RULES,
            serial,
            ..record
        };
        check_settings(&record)?;
        self.check_promise(&record.name, size)?;
        let spec = origin::parse(&record.origin)?;
        let opened = Opened::new(device(&record), Ownership::default());
        let turn = self.take_number(&disk.name, &record.origin, None)?;
        let attempt = Attempt::new(self, &turn);
        let record = DiskRecord {
            id: turn.id(),
            ..record
        };
        self.admit(&turn, &spec, record, opened)?;
        attempt.end();
        drop(turn);
        attached(self.disk_info(&disk.name)?)
    }

    /// Gives a disk that lives on flash another size.
    pub(super) fn resize_flash_only(self: &Arc<Daemon>, name: &str, size: u64) -> Result<()> {
        let turn = self.turn_for(name)?;
        let id = turn.id();
        let record = lock(&self.pool).record(id).cloned();
        let record = record.ok_or_else(|| Error::no_disk(name))?;
        if !record.is_flash_only() {
            return Err(Error::invalid(
                format!("the size of {name} is that of its origin"),
                "make the origin larger, then `hearth disk set --size-from-origin`",
            ));
        }
        if size < record.size || !size.is_multiple_of(BLOCK) || size > DISK_MAX {
            return Err(Error::invalid(
                format!(
                    "disk {name} has {} bytes and cannot get {size}",
                    record.size
                ),
                "give a multiple of 4K that is larger, up to 256T; disks cannot shrink",
            ));
        }
        let export = self.with_slot(name, |slot| {
            slot.export().cloned().ok_or_else(|| {
                Error::conflict(
                    format!("disk {name} is not attached"),
                    "`hearth disk show` says why",
                )
            })
        })?;
        self.check_promise(name, size - record.size)?;
        // Behind its end are zeros, before and after: nothing on flash has to change with it.
        self.at_rest(&format!("resize {name}"), || self.engine.set_size(id, size))?;
        let holds = self.holds();
        lock(&self.pool).change(|registry| {
            check_promise(registry, holds, name, size - record.size)?;
            let record = registry.by_id_mut(id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.size = size;
            Ok(())
        })?;
        export.set_size(size);
        self.exports.resized(name);
        Ok(())
    }

    /// Makes a scratch disk empty that no client uses.
    pub(super) fn reset_scratch(&self, turn: &Turn, name: &str) -> Result<()> {
        let id = turn.id();
        let record = lock(&self.pool).record(id).cloned();
        let record = record.ok_or_else(|| Error::no_disk(name))?;
        if record.home != Home::Scratch {
            return Err(Error::refused(
                format!("{name} is not a scratch disk: what it holds is to be kept"),
                "to have an empty disk, remove it with --discard-dirty --yes and add it again",
            ));
        }
        self.with_slot(name, |slot| match slot.export() {
            Some(export) if export.clients().is_used() => Err(Error::conflict(
                format!("disk {name} is in use, and what its guest has written would be gone"),
                "stop the virtual machine or program first",
            )),
            _ => Ok(()),
        })?;
        let since_seq = self.forget(id)?;
        lock(&self.pool).change(|registry| {
            if let Some(record) = registry.by_id_mut(id) {
                (record.since_seq, record.void) = (since_seq, false);
            }
            Ok(())
        })?;
        self.with_slot(name, |slot| {
            slot.session.notices.retain(|notice| notice != VOID);
            Ok(())
        })
    }

    /// Refuses changes of a disk that lives on flash which are about an origin.
    pub(super) fn check_set(&self, name: &str, set: &DiskSet) -> Result<()> {
        let id = self.with_slot(name, |slot| Ok(slot.id))?;
        let record = lock(&self.pool).record(id).cloned();
        if !record.is_some_and(|record| record.is_flash_only()) {
            return Ok(());
        }
        for (given, what) in [
            (set.size_from_origin, "there is no size to take over"),
            (set.allow_backing, "there is no image"),
            (set.takeover, "there is nothing to take over"),
        ] {
            if given {
                return Err(has_none(name, what));
            }
        }
        Ok(())
    }
}
