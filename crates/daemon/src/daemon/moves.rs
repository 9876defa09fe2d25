//! Disks that live on flash and are given an origin while they are served.
//!
//! The origin is a new file, all zeros, as is everything that such a disk does not have on flash. So nothing has to be copied before:
//! with one change of the registry all that is on flash is dirty against that file, and the destager does the rest, as for any disk.
//! The order is:
//!
//! 1. the file is made, as large as the disk, and durable;
//! 2. the registry says that the disk has this origin ([`Home::Moving`]), durably;
//! 3. the engine is told, and may write to the file from then on.
//!
//! A crash before the second step leaves a disk that lives on flash (and a file that nobody needs, which the next attempt takes), one
//! behind it a disk of which everything is dirty. Were the engine told first, what was destaged and then evicted would be gone after a
//! crash. What was promised to the disk is kept until its origin has everything; then the engine is told first, and the
//! registry last: until it says so, the next start only promises too much.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, Home};
use hearth_io::file::sync_names;
use hearth_io::{BLOCK, BlockFile, Device, OpenMode, OriginSpec, Source, Target};
use hearth_origin::Backing;
use hearth_origin::owner::Take;

use super::admission::{RULES, failure};
use super::attach::announce_writes;
use super::{Daemon, lock};
use crate::api::types::{DiskInfo, DiskMove};
use crate::error::{Error, Result};
use crate::life::Life;
use crate::origin;
use crate::place::FileSystem;
use crate::pool::Pool;
use crate::size::human;
use crate::table::Purpose;

/// The file that was made for a disk; it goes again unless it is kept.
struct Made {
    path: Option<PathBuf>,
    /// It was empty, whatever its file system can tell.
    fresh: bool,
}

impl Made {
    fn keep(mut self) {
        self.path = None;
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let Some(path) = &self.path else { return };
        // Somebody else may have found it empty, and taken it: only who has its lock may remove it.
        let Ok(file) = BlockFile::open(path, OpenMode::default()) else {
            tracing::warn!("{} was made in vain, and somebody uses it", path.display());
            return;
        };
        let empty = std::fs::metadata(path).is_ok_and(|m| m.blocks() == 0);
        if empty && let Err(e) = std::fs::remove_file(path) {
            tracing::warn!("{} was made in vain and is left: {e}", path.display());
        }
        drop(file);
    }
}

/// Why a file cannot be made or looked at.
fn cannot(what: &str, path: &Path, e: &std::io::Error) -> Error {
    Error::unavailable(
        format!("cannot {what} {}: {e}", path.display()),
        "put that right, or name another file",
    )
}

/// The path of a plain file that an origin is.
fn plain_file(text: &str, spec: &OriginSpec) -> Result<PathBuf> {
    match &spec.source {
        Source::File(path) if !path.starts_with("/dev") => Ok(path.clone()),
        _ => Err(Error::invalid(
            format!("a disk cannot be moved to {text}"),
            "name a file that does not exist, which is made; from there `hearth disk mirror` with --add, then --remove, brings it to a block device",
        )),
    }
}

/// Makes an origin of zeros, durably, or takes one that is there and has no data at all.
fn make(path: &Path, size: u64, holds: u64) -> Result<Made> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let system = FileSystem::of(dir).map_err(|e| cannot("look at", dir, &e))?;
    if system.free() < holds {
        return Err(Error::refused(
            format!(
                "{} holds {} more, and the disk has {} on flash",
                dir.display(),
                human(system.free()),
                human(holds)
            ),
            "make room there, or name a file elsewhere",
        ));
    }
    let new = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let (file, made) = match new {
        Ok(file) => (file, Some(path.to_owned())),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            let begun = std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == 0);
            if !begun {
                // It may have been made a moment ago: the registry must not name what a power cut takes away.
                sync_names(path).map_err(|e| cannot("look at", path, &e))?;
                return Ok(Made {
                    path: None,
                    fresh: false,
                });
            }
            // Perhaps an attempt was cut off here. There is nothing in it that could be lost.
            let file = OpenOptions::new().write(true).open(path);
            (file.map_err(|e| cannot("open", path, &e))?, None)
        }
        Err(e) => return Err(cannot("make", path, &e)),
    };
    let made = Made {
        path: made,
        fresh: true,
    };
    let durable = |file: &File| {
        file.set_len(size)?;
        file.sync_all()?;
        File::open(dir)?.sync_all()
    };
    durable(&file).map_err(|e| cannot("make", path, &e))?;
    Ok(made)
}

/// Refuses an origin that is not as large as the disk, or may hold something.
fn check_empty(text: &str, device: &Device, size: u64, fresh: bool) -> Result<()> {
    if device.size() != size {
        return Err(Error::refused(
            format!("{text} has {} bytes, and the disk {size}", device.size()),
            "name a file that does not exist, or give that one this size (`truncate -s`)",
        ));
    }
    let extents = device.extents(0, size);
    let is_empty = extents.is_ok_and(|extents| extents.iter().all(|extent| !extent.data));
    if fresh || is_empty {
        return Ok(());
    }
    Err(Error::refused(
        format!("{text} holds something, or cannot be seen to be empty"),
        "name a file that does not exist",
    ))
}

/// Refuses where the flash has not taken the registry as it is now.
pub(super) fn flash_knows(pool: &Pool) -> Result<()> {
    match pool.is_settled() {
        true => Ok(()),
        false => Err(Error::unavailable(
            "the pool's flash does not take the change of the disk",
            "`hearth pool show` says why; put that right, then try again",
        )),
    }
}

impl Daemon {
    /// Gives a disk that lives on flash an origin while it is served.
    pub(super) fn move_disk(self: &Arc<Daemon>, name: &str, to: &DiskMove) -> Result<DiskInfo> {
        let text = match (&to.origin, to.flash_only) {
            (Some(origin), false) => origin.as_str(),
            (None, true) => return self.move_onto_flash(name),
            _ => {
                return Err(Error::invalid(
                    "a disk is moved either to an origin or onto flash alone",
                    "give one of the two",
                ));
            }
        };
        let spec = origin::parse(text)?;
        let path = plain_file(text, &spec)?;
        let record = self.with_record(name)?;
        self.check_moves(name, &record)?;
        let holds = self.engine.status(record.id).unwrap_or_default();
        self.check_apart(text, &spec)?;
        let made = make(&path, record.size, holds.cached_blocks * BLOCK)?;
        // Under whatever name it is known elsewhere: from here on it exists.
        self.check_unused(text, &spec)?;
        let flash = lock(&self.pool).path().to_owned();
        origin::check_plain(&spec, &flash)?;
        let ownership = self.owners.claim(&spec, &record, Take::Free);
        let mut ownership = ownership.map_err(|e| failure(&e))?;
        if let Some(claim) = ownership.claim.take() {
            claim.release();
            return Err(Error::refused(
                format!("{text} is on storage that other hosts reach"),
                "name a file on this host",
            ));
        }
        let moved = DiskRecord {
            origin: text.to_owned(),
            home: Home::Moving,
            rules: RULES,
            ..record.clone()
        };
        let device = origin::open(&spec, &moved, &self.images, Backing::default())?;
        check_empty(text, &device, record.size, made.fresh)?;
        device.flush().map_err(|e| {
            Error::unavailable(
                format!("{text} cannot be flushed: {e}"),
                "put that right, or name another file",
            )
        })?;
        let identity = origin::identity(&device);
        // All that the origin can hold up is done.
        let turn = self.turn_for(name)?;
        let id = turn.id();
        let now = self.with_record(name)?;
        self.check_moves(name, &now)?;
        if now.size != record.size || now.serial != record.serial {
            return Err(Error::conflict(
                format!("disk {name} was changed meanwhile"),
                "try again",
            ));
        }
        // Whatever comes of storing that: should it be there after all, its file is, too.
        made.keep();
        let old_place = lock(&self.grounds).of(id).cloned();
        self.note_place(id, super::apart::place(&spec));
        let changed = self.take_place(&moved).and_then(|()| {
            self.change_home(name, id, |record| {
                record.origin = text.to_owned();
                record.home = Home::Moving;
                record.rules = RULES;
                record.origin_identity = identity;
                record.clean_detach = identity.is_some();
            })
        });
        if let Err(e) = changed {
            self.note_place(id, (old_place, true));
            return Err(e);
        }
        let was = |now: &mut DiskRecord| {
            now.origin.clone_from(&record.origin);
            now.home = record.home;
            now.rules = record.rules;
            now.origin_identity = record.origin_identity;
            now.clean_detach = record.clean_detach;
        };
        // Kept beside the flash only, it is not what the next start finds there: it would take the disk for one that lives on flash,
        // with part of it evicted.
        if let Err(e) = flash_knows(&lock(&self.pool)) {
            self.note_place(id, (old_place, true));
            if let Err(back) = self.change_home(name, id, was) {
                tracing::warn!(disk = %name, "it is noted as moving to {text}: {back}");
            }
            return Err(e);
        }
        let pool = self.pool.clone();
        let device = Arc::new(device.before_first_write(move || announce_writes(pool, id)));
        let before = self.targets.set(Target::Origin(id), Some(device.clone()));
        self.rooms.watch(id, &device);
        let told = self.at_rest(&format!("move {name}"), || {
            self.engine.rehome(id, hearth_engine::api::Home::Moving)
        });
        if let Err(e) = told {
            // The engine has not begun: the disk lives on flash as it did. Should that not be stored, the next start goes on
            // with what is: everything is dirty against a file of zeros.
            drop(self.targets.set(Target::Origin(id), before));
            self.rooms.forget(id);
            self.note_place(id, (old_place, true));
            let back = self.change_home(name, id, was);
            if let Err(e) = back {
                tracing::warn!(disk = %name, "it is noted as moving to {text}, from the next start on: {e}");
            }
            return Err(e);
        }
        self.with_slot(name, |slot| {
            slot.set_device(device.clone());
            Ok(())
        })?;
        self.watch_origin(id);
        // Data threads use the new origin from here on.
        self.poke();
        self.events.tell(hearth_events::Event::DiskMoved {
            disk: name.to_owned(),
            origin: text.to_owned(),
        });
        drop(turn);
        self.disk_info(name)
    }

    /// Refuses a disk that cannot be given an origin.
    fn check_moves(&self, name: &str, record: &DiskRecord) -> Result<()> {
        self.not_stopping()?;
        match record.home {
            Home::Flash => {}
            Home::Scratch => {
                return Err(Error::refused(
                    format!("disk {name} is scratch: nothing of it has to outlive a crash"),
                    "add another disk, and copy what is to be kept",
                ));
            }
            Home::Origin | Home::Moving => {
                return Err(Error::conflict(
                    format!("disk {name} has an origin, {}", record.origin),
                    "`hearth disk mirror` with --add, then --remove, brings it to another one",
                ));
            }
        }
        if self.flash.degraded().is_some() || self.cache_is_off() {
            return Err(Error::unavailable(
                "the pool's flash takes no writes, so no disk can be moved off it",
                "`hearth pool show` says why; `hearth rescue` reads what the disk has",
            ));
        }
        let lost = self
            .engine
            .status(record.id)
            .unwrap_or_default()
            .lost_ranges;
        if !lost.is_empty() {
            return Err(Error::refused(
                format!("part of disk {name} was lost with the flash"),
                format!(
                    "`hearth disk show {name}` lists it; `hearth disk accept-loss {name}` gives it up"
                ),
            ));
        }
        self.with_slot(name, |slot| match slot.life {
            Life::Served { .. } => Ok(()),
            _ => Err(Error::conflict(
                format!("disk {name} is not served"),
                format!("`hearth disk show {name}` says why; put that right first"),
            )),
        })
    }

    /// Changes a disk's record, durably.
    pub(super) fn change_home(
        &self,
        name: &str,
        id: DiskId,
        change: impl Fn(&mut DiskRecord),
    ) -> Result<()> {
        lock(&self.pool).change(|registry| {
            let record: &mut DiskRecord =
                registry.by_id_mut(id).ok_or_else(|| Error::no_disk(name))?;
            change(record);
            Ok(())
        })
    }

    /// Ends the moves of disks whose origins have everything. Called by housekeeping.
    pub(super) fn moves_round(self: &Arc<Daemon>) {
        let pool = lock(&self.pool);
        let moving = pool
            .registry()
            .plain_disks()
            .filter(|r| r.home == Home::Moving);
        let moving: Vec<(DiskId, String, String)> = moving
            .map(|r| (r.id, r.name.clone(), r.origin.clone()))
            .collect();
        drop(pool);
        for (id, name, origin) in moving {
            let status = self.engine.status(id).unwrap_or_default();
            if !status.attached || status.owed_blocks() > 0 || self.engine.is_held(id) {
                continue;
            }
            let served = |disks: &crate::table::Slots<super::Slot>| {
                disks.by_id(id).is_some_and(|slot| slot.export.is_some())
            };
            // Somebody changing it goes first; it is looked at again.
            let Some(_turn) = self.disks.turn_if(id, Purpose::Changing, served) else {
                continue;
            };
            if self
                .engine
                .rehome(id, hearth_engine::api::Home::Origin)
                .is_err()
            {
                self.poke();
                continue;
            }
            match self.change_home(&name, id, |record| record.home = Home::Origin) {
                Ok(()) => {
                    self.events
                        .tell(hearth_events::Event::DiskHasMoved { disk: name, origin });
                    self.keep_shares();
                    self.look_at_pins();
                }
                Err(e) => tracing::warn!(disk = %name, "it cannot be noted that it has moved: {e}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{CreateOptions, create};

    const SIZE: u64 = 8 << 20;

    fn opened(path: &Path) -> Device {
        Device::new(BlockFile::open(path, OpenMode::default()).unwrap())
    }

    #[test]
    fn a_file_that_was_made_in_vain_goes_again_and_one_that_holds_something_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new");
        let made = make(&path, SIZE, 0).unwrap();
        assert!(made.fresh && std::fs::metadata(&path).unwrap().len() == SIZE);
        check_empty("new", &opened(&path), SIZE, true).unwrap();
        drop(made);
        assert!(!path.exists());
        make(&path, SIZE, 0).unwrap().keep();
        assert!(path.exists());
        // What was there before is nobody's to remove, also if it is empty.
        drop(make(&path, SIZE, 0).unwrap());
        assert!(path.exists());
        std::fs::write(&path, b"").unwrap();
        drop(make(&path, SIZE, 0).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    }

    #[test]
    fn an_origin_has_the_disks_size_and_nothing_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("there");
        std::fs::write(&path, vec![1; 4096]).unwrap();
        let made = make(&path, SIZE, 0).unwrap();
        assert!(!made.fresh);
        let e = check_empty("there", &opened(&path), SIZE, made.fresh).unwrap_err();
        assert!(e.what.contains("4096 bytes"), "{e}");
        let e = check_empty("there", &opened(&path), 4096, made.fresh).unwrap_err();
        assert!(e.what.contains("holds something"), "{e}");
        let e = make(&path, SIZE, u64::MAX).err().unwrap();
        assert!(e.remedy.contains("make room"), "{e}");
        let block = origin::parse("/dev/null").unwrap();
        let e = plain_file("/dev/null", &block).unwrap_err();
        assert!(e.remedy.contains("hearth disk mirror"), "{e}");
    }

    /// A change that only the place beside the flash has taken is not one that the next start finds.
    #[test]
    fn a_move_needs_flash_that_takes_the_registry() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flash");
        let options = CreateOptions {
            size: Some(64 << 20),
            ..CreateOptions::default()
        };
        create(&path, &options).unwrap();
        // Opened to be looked at, it takes no writes.
        let mut pool = Pool::look_at(std::slice::from_ref(&path)).unwrap();
        pool.remember(&dir.path().join("state")).unwrap();
        pool.note_opened(Default::default(), true, 1).unwrap();
        flash_knows(&pool).unwrap();
        pool.change(|registry| {
            registry.take_disk_id();
            Ok(())
        })
        .unwrap();
        let e = flash_knows(&pool).unwrap_err();
        assert!(e.what.contains("does not take"), "{e}");
    }
}
