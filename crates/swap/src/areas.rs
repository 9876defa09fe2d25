//! Swap on, off, and again after a boot: the order of steps.
//!
//! An area is noted before its file is made, so that a crash leaves no file of gigabytes that nobody knows; settings are noted
//! with what they were before they are changed; an area is noted as going before the kernel gives it up, so
//! that a boot does not take it up again.

use std::io;
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use serde::Serialize;
use uuid::Uuid;

use crate::kernel::{self, Discard, InUse};
use crate::notes::{Noted, Notes, Stage, this_host};
use crate::{Result, area, tuning};

/// Of the memory that is available, what must be left when all is read back: programs go on meanwhile.
const MARGIN: u64 = 64 << 20;

const PROC: &str =
    "the host's /proc has to be there; run it on the host itself, not in a container";

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The pool's flash file.
    pub flash: PathBuf,
    /// Bytes.
    pub size: u64,
    /// The kernel's.
    pub priority: u16,
    /// Is the device told of what is free?
    pub discard: Discard,
}

/// An area as it is.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    /// What was noted.
    #[serde(flatten)]
    pub noted: Noted,
    /// The kernel swaps to it.
    pub on: bool,
    /// Bytes that are swapped out to it.
    pub used: u64,
}

/// The areas of this host.
pub struct Areas {
    dir: PathBuf,
    notes: Notes,
}

impl Areas {
    /// What is noted in the state directory `dir`.
    pub fn open(dir: &Path) -> Result<Areas> {
        let notes = Notes::read(dir, &this_host())?;
        Ok(Areas {
            dir: dir.to_owned(),
            notes,
        })
    }

    /// What was set, and what it was before.
    pub fn settings(&self) -> &[tuning::Setting] {
        &self.notes.settings
    }

    /// All areas.
    pub fn show(&self) -> Result<Vec<Shown>> {
        let used = in_use()?;
        let each = self.notes.areas.iter().map(|noted| {
            let found = used.iter().find(|u| u.path == noted.path);
            Shown {
                noted: noted.clone(),
                on: found.is_some(),
                used: found.map_or(0, |u| u.used),
            }
        });
        Ok(each.collect())
    }

    /// Makes an area and has the kernel swap to it. `goes_on` is called with bytes written and all; `false` calls it off, and
    /// nothing is left: `Ok(None)`.
    pub fn on(
        &mut self,
        request: &Request,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Option<Noted>> {
        self.ours()?;
        let path = area::beside(&request.flash)?;
        if let Some(known) = self.notes.areas.iter().find(|a| a.path == path) {
            return Err(match known.stage {
                Stage::Used => Fault::new(
                    format!(
                        "{} is an area of {} bytes already",
                        path.display(),
                        known.size
                    ),
                    "to change its size take it away with `hearth swap off` first",
                ),
                Stage::Making | Stage::Going => Fault::new(
                    format!("{} was left half made or half gone", path.display()),
                    "`hearth swap off` takes it away",
                ),
            });
        }
        let size = request.size / 4096 * 4096;
        if size < area::SIZE_MIN {
            return Err(Fault::new(
                format!("{size} bytes are too few for swap"),
                "give a --size of at least 1M",
            ));
        }
        area::room(&path, size)?;
        if std::fs::symlink_metadata(&path).is_ok() {
            return Err(Fault::new(
                format!("{} is there already, and nobody noted it", path.display()),
                "remove it if nobody needs it",
            ));
        }
        let noted = Noted {
            path: path.clone(),
            size,
            uuid: Uuid::new_v4(),
            priority: request.priority,
            discard: request.discard,
            stage: Stage::Making,
        };
        self.notes.areas.push(noted.clone());
        self.notes.store(&self.dir)?;
        let made = area::write(&path, size, goes_on).and_then(|whole| {
            if whole {
                area::format(&path, noted.uuid)?;
                self.take(&noted)?;
            }
            Ok(whole)
        });
        if made != Ok(true) {
            self.forget(&path)?;
            return made.map(|_| None);
        }
        self.stage(&path, Stage::Used)?;
        Ok(Some(Noted {
            stage: Stage::Used,
            ..noted
        }))
    }

    /// Sets what belongs to it and has the kernel swap to it.
    fn take(&mut self, noted: &Noted) -> Result<()> {
        for setting in tuning::wanted(&noted.path) {
            // Where it is set already, by the area before, what was there before that counts.
            if !self.notes.settings.iter().any(|s| s.path == setting.path) {
                self.notes.settings.push(setting.clone());
                self.notes.store(&self.dir)?;
            }
            tuning::set(&setting).map_err(|e| {
                Fault::new(
                    format!("cannot set {}: {e}", setting.path.display()),
                    "run it as root, with the host's /proc and /sys writable",
                )
            })?;
        }
        kernel::on(&noted.path, noted.priority, noted.discard).map_err(|e| {
            let remedy = match e.raw_os_error() {
                Some(libc::EPERM) => "run it as root",
                Some(libc::EINVAL) => {
                    "the file system must allow swap files: ext4 and XFS do, ZFS and NFS do not, Btrfs only without copies on write"
                }
                _ => "look at what the kernel says: dmesg",
            };
            Fault::new(
                format!("the kernel does not swap to {}: {e}", noted.path.display()),
                remedy,
            )
        })
    }

    /// Reads all areas back and takes them away. Refused, with figures, where what is swapped out does not fit
    /// into memory; a signal to this thread calls it off, and what was not read back yet is used as before: `Ok(false)`.
    pub fn off(&mut self) -> Result<bool> {
        let all: Vec<Noted> = self.notes.areas.clone();
        let used = in_use()?;
        let mine = |a: &Noted| used.iter().find(|u| u.path == a.path);
        let out: u64 = all.iter().filter_map(mine).map(|u| u.used).sum();
        let elsewhere: u64 = used
            .iter()
            .filter(|u| !all.iter().any(|a| a.path == u.path))
            .map(|u| u.size.saturating_sub(u.used))
            .sum();
        let available = kernel::available()
            .map_err(|e| Fault::new(format!("cannot read /proc/meminfo: {e}"), PROC))?;
        fits(out, available, elsewhere)?;
        let foreign = self.ours().is_err();
        for noted in all {
            // Another host's file, or what is there under its name by now, is not ours to remove.
            if foreign {
                self.notes.areas.retain(|a| a.path != noted.path);
                self.notes.store(&self.dir)?;
                continue;
            }
            if mine(&noted).is_some() {
                self.stage(&noted.path, Stage::Going)?;
                match kernel::off(&noted.path) {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                        self.stage(&noted.path, Stage::Used)?;
                        return Ok(false);
                    }
                    Err(e) => {
                        self.stage(&noted.path, Stage::Used)?;
                        let remedy = match e.raw_os_error() {
                            Some(libc::ENOMEM) => "stop some programs or machines first",
                            Some(libc::EPERM) => "run it as root",
                            _ => "look at what the kernel says: dmesg",
                        };
                        return Err(Fault::new(
                            format!("the kernel does not give {} up: {e}", noted.path.display()),
                            remedy,
                        ));
                    }
                }
            }
            self.forget(&noted.path)?;
        }
        self.restore()?;
        Ok(true)
    }

    /// After a boot, or whenever: what is noted is swapped to, what was left half made is removed. What came of it, area by area.
    pub fn resume(&mut self) -> Result<Vec<(PathBuf, Result<()>)>> {
        self.ours()?;
        let used = in_use()?;
        let mut told = Vec::new();
        for noted in self.notes.areas.clone() {
            let on = used.iter().any(|u| u.path == noted.path);
            let outcome = match noted.stage {
                Stage::Used if on => Ok(()),
                Stage::Used => area::check(&noted.path, noted.size, noted.uuid)
                    .and_then(|()| self.take(&noted)),
                // Made and taken, but not noted as such, or going and not gone: it stays until somebody says otherwise.
                Stage::Making | Stage::Going if on => self.stage(&noted.path, Stage::Used),
                Stage::Making | Stage::Going => self.forget(&noted.path),
            };
            told.push((noted.path, outcome));
        }
        self.restore()?;
        Ok(told)
    }

    /// Are the notes this host's?
    fn ours(&self) -> Result<()> {
        if self.notes.areas.is_empty() || self.notes.host == this_host() {
            return Ok(());
        }
        Err(Fault::new(
            "the swap that is noted is another host's",
            "`hearth swap off` forgets it and leaves its files; then `hearth swap on` makes one here",
        ))
    }

    fn stage(&mut self, path: &Path, stage: Stage) -> Result<()> {
        for noted in self.notes.areas.iter_mut().filter(|a| a.path == path) {
            noted.stage = stage;
        }
        self.notes.store(&self.dir)
    }

    /// Removes an area's file, then the note of it.
    fn forget(&mut self, path: &Path) -> Result<()> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Fault::new(
                    format!("cannot remove {}: {e}", path.display()),
                    "remove it by hand, then use `hearth swap off`",
                ));
            }
            _ => {}
        }
        self.notes.areas.retain(|a| a.path != path);
        if self.notes.areas.is_empty() {
            return self.restore();
        }
        self.notes.store(&self.dir)
    }

    /// With the last area its settings go.
    fn restore(&mut self) -> Result<()> {
        if !self.notes.areas.is_empty() {
            return Ok(());
        }
        for setting in std::mem::take(&mut self.notes.settings) {
            // A device that is gone has no settings any more.
            if let Err(e) = tuning::undo(&setting)
                && e.kind() != io::ErrorKind::NotFound
            {
                self.notes.settings.push(setting);
            }
        }
        self.notes.store(&self.dir)
    }
}

/// Is there room for what is swapped out? Else the kernel would begin, and kill programs on the way.
fn fits(out: u64, available: u64, elsewhere: u64) -> Result<()> {
    if out == 0 || out + MARGIN <= available.saturating_add(elsewhere) {
        return Ok(());
    }
    Err(Fault::new(
        format!(
            "{out} bytes are swapped out, and {available} bytes of memory and {elsewhere} of other swap are there to take them"
        ),
        "stop some programs or machines first",
    ))
}

fn in_use() -> Result<Vec<InUse>> {
    kernel::in_use().map_err(|e| Fault::new(format!("cannot read /proc/swaps: {e}"), PROC))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn areas(dir: &Path, host: &str, stage: Stage) -> Areas {
        let path = dir.join("flash.swap");
        std::fs::write(&path, b"half").unwrap();
        let mut notes = Notes::none(host.into());
        notes.areas.push(Noted {
            path,
            size: area::SIZE_MIN,
            uuid: Uuid::from_u128(1),
            priority: 1,
            discard: Discard::Off,
            stage,
        });
        notes.store(dir).unwrap();
        Areas::open(dir).unwrap()
    }

    #[test]
    fn what_a_crash_left_half_made_is_removed() {
        for stage in [Stage::Making, Stage::Going] {
            let dir = tempfile::tempdir().unwrap();
            let mut areas = areas(dir.path(), &this_host(), stage);
            let told = areas.resume().unwrap();
            assert!(told.len() == 1 && told[0].1.is_ok());
            assert!(!dir.path().join("flash.swap").exists());
            assert!(!dir.path().join(crate::notes::NAME).exists());
        }
    }

    #[test]
    fn another_file_in_its_place_is_not_swapped_to() {
        let dir = tempfile::tempdir().unwrap();
        let mut areas = areas(dir.path(), &this_host(), Stage::Used);
        let told = areas.resume().unwrap();
        assert!(told[0].1.is_err());
        assert!(dir.path().join("flash.swap").exists());
    }

    #[test]
    fn what_does_not_fit_is_told_with_its_figures() {
        assert_eq!(fits(0, 0, 0), Ok(()));
        assert_eq!(fits(100 << 20, 164 << 20, 0), Ok(()));
        assert_eq!(fits(100 << 20, 64 << 20, 100 << 20), Ok(()));
        let told = fits(100 << 20, 163 << 20, 0).unwrap_err();
        assert!(told.what.contains("104857600") && told.what.contains("170917888"));
    }

    #[test]
    fn another_hosts_notes_touch_nothing_here() {
        let dir = tempfile::tempdir().unwrap();
        let mut areas = areas(dir.path(), "another", Stage::Making);
        assert!(areas.resume().is_err());
        let flash = dir.path().join("flash");
        std::fs::write(&flash, b"x").unwrap();
        let request = Request {
            flash,
            size: area::SIZE_MIN,
            priority: 1,
            discard: Discard::Off,
        };
        assert!(areas.on(&request, &mut |_, _| true).is_err());
        assert_eq!(areas.off(), Ok(true));
        assert!(dir.path().join("flash.swap").exists());
        assert!(Areas::open(dir.path()).unwrap().show().unwrap().is_empty());
    }
}
