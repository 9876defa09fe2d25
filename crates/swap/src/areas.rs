//! Swap on, off, and again after a boot: the order of steps.
//!
//! An area is noted before its file is made, so that a crash leaves no file of gigabytes that nobody knows; settings are noted
//! with what they were before they are changed; an area is noted as going before the kernel gives it up, so
//! that a boot does not take it up again.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use serde::Serialize;
use uuid::Uuid;

use crate::in_pool::{self, Lender, Lent};
use crate::kernel::{self, Discard, InUse};
use crate::notes::{Noted, Notes, Stage, this_host};
use crate::{Result, area, crypt, tuning};

/// Of the memory that is available, what must be left when all is read back: programs go on meanwhile.
const MARGIN: u64 = 64 << 20;

/// Held by whoever changes what is swapped to.
const LOCK: &str = "swap.lock";

/// Of a control group's limit, one part in so many must be left, if that is less than [`MARGIN`].
const MARGIN_PART: u64 = 16;

/// Where control groups are.
const GROUPS: &str = "/sys/fs/cgroup";

const PROC: &str =
    "the host's /proc has to be there; run it on the host itself, not in a container";

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Bytes; inside a pool made whole segments.
    pub size: u64,
    /// The kernel's.
    pub priority: u16,
    /// Is the device told of what is free?
    pub discard: Discard,
    /// With a key that nobody knows; inside a pool only.
    pub encrypt: bool,
    /// Are pages compressed in memory first?
    pub zswap: bool,
}

impl Request {
    fn noted(&self, path: PathBuf, size: u64, in_pool: Option<Lent>) -> Noted {
        Noted {
            path,
            size,
            uuid: Uuid::new_v4(),
            priority: self.priority,
            discard: self.discard,
            stage: Stage::Making,
            encrypted: self.encrypt && in_pool.is_some(),
            in_pool,
            zswap: self.zswap,
        }
    }
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

impl Shown {
    /// Reads a page of it from the device, past the page cache. Waits for as long as the device does not answer.
    pub fn read_back(&self) -> io::Result<()> {
        area::read_back(&self.noted.path)
    }
}

/// The areas of this host.
pub struct Areas {
    dir: PathBuf,
    notes: Notes,
    /// Held while something is changed.
    _lock: Option<File>,
}

impl Areas {
    /// What is noted in the state directory `dir`.
    pub fn open(dir: &Path) -> Result<Areas> {
        let notes = Notes::read(dir, &this_host())?;
        Ok(Areas {
            dir: dir.to_owned(),
            notes,
            _lock: None,
        })
    }

    /// The same, to change something: one at a time, or one would swap to what another gives back.
    pub fn open_to_change(dir: &Path) -> Result<Areas> {
        let path = dir.join(LOCK);
        let wrong = |e: io::Error| {
            let what = format!("cannot lock {}: {e}", path.display());
            match e.raw_os_error() {
                Some(libc::EWOULDBLOCK) => Fault::new(
                    "another `hearth swap` is at work",
                    "wait until it has ended",
                ),
                _ => Fault::new(
                    what,
                    "check the directory, or name another with --state-dir",
                ),
            }
        };
        std::fs::create_dir_all(dir).map_err(wrong)?;
        let lock = File::create(&path).map_err(wrong)?;
        // SAFETY: a descriptor that is open across the call.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(wrong(io::Error::last_os_error()));
        }
        Ok(Areas {
            _lock: Some(lock),
            ..Areas::open(dir)?
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
            let found = user_of(noted, &used);
            Shown {
                noted: noted.clone(),
                on: found.is_some(),
                used: found.map_or(0, |u| u.used),
            }
        });
        Ok(each.collect())
    }

    /// Makes an area beside a flash file and has the kernel swap to it. `goes_on` is called with
    /// bytes written and all; `false` calls it off, and nothing is left: `Ok(None)`.
    pub fn on(
        &mut self,
        flash: &Path,
        request: &Request,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Option<Noted>> {
        self.none_yet()?;
        let path = area::beside(flash)?;
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
        let noted = request.noted(path.clone(), size, None);
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

    /// Has the pool set something aside, and the kernel swap to it. `goes_on` as in [`on`](Areas::on), first while room is made
    /// and then, in a file, while it is written.
    pub fn on_in_pool(
        &mut self,
        request: &Request,
        lender: &mut dyn Lender,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Option<Noted>> {
        self.none_yet()?;
        if request.size < area::SIZE_MIN {
            return Err(Fault::new(
                format!("{} bytes are too few for swap", request.size),
                "give a --size of at least 1M",
            ));
        }
        if request.encrypt {
            crypt::available()?;
        }
        if let Some(left) = lender.lent()?.first() {
            return Err(Fault::new(
                format!(
                    "{} bytes of {} are set aside already, and this host does not swap to them",
                    left.bytes,
                    left.flash.display()
                ),
                "`hearth swap off` gives them back",
            ));
        }
        // That it is set aside stands on the flash: after a crash `off` finds it there.
        let Some(lent) = lender.lend(request.size, goes_on)? else {
            return Ok(None);
        };
        let made = self.use_lent(request, &lent, goes_on);
        if let Ok(Some(_)) = made {
            return made;
        }
        self.unuse(&lent)?;
        lender.take_back(&lent)?;
        self.drop_note(&lent)?;
        made
    }

    fn use_lent(
        &mut self,
        request: &Request,
        lent: &Lent,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Option<Noted>> {
        lent.check_discard(request.discard == Discard::Off)?;
        let mut noted = request.noted(PathBuf::new(), lent.bytes, Some(lent.clone()));
        self.notes.areas.push(noted.clone());
        self.notes.store(&self.dir)?;
        noted.path = lent.show()?;
        self.set_path(lent, &noted.path)?;
        if !lent.fill(&noted.path, goes_on)? {
            return Ok(None);
        }
        if noted.encrypted {
            noted.path = crypt::open(&noted.path, noted.uuid)?;
            self.set_path(lent, &noted.path)?;
        }
        area::format(&noted.path, noted.uuid)?;
        self.take(&noted)?;
        self.stage(&noted.path, Stage::Used)?;
        noted.stage = Stage::Used;
        Ok(Some(noted))
    }

    fn set_path(&mut self, lent: &Lent, path: &Path) -> Result<()> {
        let mut areas = self.notes.areas.iter_mut();
        if let Some(noted) = areas.find(|a| a.in_pool.as_ref() == Some(lent)) {
            noted.path = path.to_owned();
        }
        self.notes.store(&self.dir)
    }

    /// Nobody swaps to it: no loop device is over it any more.
    fn unuse(&mut self, lent: &Lent) -> Result<()> {
        let used = in_use()?;
        let encrypted =
            |a: &&Noted| a.encrypted && a.in_pool.as_ref().is_some_and(|l| l.is_same(lent));
        if let Some(noted) = self.notes.areas.iter().find(encrypted) {
            if let Some(user) = user_of(noted, &used) {
                return Err(Fault::new(
                    format!("the kernel swaps to {}", user.path.display()),
                    "`swapoff` ends that; then use `hearth swap off` once more",
                ));
            }
            crypt::close(noted.uuid)?;
        }
        for node in lent.loops()? {
            if used.iter().any(|u| u.path == node) {
                return Err(Fault::new(
                    format!("the kernel swaps to {}", node.display()),
                    "`swapoff` ends that; then use `hearth swap off` once more",
                ));
            }
            in_pool::detach(&node)?;
        }
        Ok(())
    }

    fn drop_note(&mut self, lent: &Lent) -> Result<()> {
        self.notes
            .areas
            .retain(|a| a.in_pool.as_ref() != Some(lent));
        if self.notes.areas.is_empty() {
            return self.restore();
        }
        self.notes.store(&self.dir)
    }

    /// Sets what belongs to it and has the kernel swap to it.
    fn take(&mut self, noted: &Noted) -> Result<()> {
        for setting in tuning::wanted(&noted.path, noted.zswap) {
            // What was noted of a disk that had its name before is not set any more.
            let settings = &mut self.notes.settings;
            settings.retain(|s| s.path != setting.path || s.disk == setting.disk);
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
    pub fn off(&mut self, lender: &mut dyn Lender) -> Result<bool> {
        let all: Vec<Noted> = self.notes.areas.clone();
        let used = in_use()?;
        let mine = |a: &Noted| user_of(a, &used);
        let out: u64 = all.iter().filter_map(mine).map(|u| u.used).sum();
        let elsewhere: u64 = used
            .iter()
            .filter(|u| {
                !all.iter()
                    .any(|a| mine(a).is_some_and(|m| m.path == u.path))
            })
            .map(|u| u.size.saturating_sub(u.used))
            .sum();
        let available = kernel::available()
            .map_err(|e| Fault::new(format!("cannot read /proc/meminfo: {e}"), PROC))?;
        fits(out, available, elsewhere)?;
        fits_groups(out, &kernel::limited_groups(Path::new(GROUPS)))?;
        let foreign = self.ours().is_err();
        if !foreign && all.iter().any(|a| a.in_pool.is_some()) {
            // Only the daemon takes a part of the pool back, and what was swapped off cannot be put
            // back.
            lender.lent().map_err(|e| {
                Fault::new(
                    format!(
                        "the daemon has to take back its part of the pool, and cannot be asked: {}; nothing was changed",
                        e.what
                    ),
                    "start the daemon with the pool, then use `hearth swap off` again",
                )
            })?;
        }
        for noted in all {
            // Another host's file, or what is there under its name by now, is not ours to remove.
            if foreign {
                self.notes.areas.retain(|a| *a != noted);
                self.notes.store(&self.dir)?;
                continue;
            }
            if let Some(user) = mine(&noted) {
                self.stage(&noted.path, Stage::Going)?;
                match kernel::off(&user.path) {
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
            match &noted.in_pool {
                None => self.forget(&noted.path)?,
                Some(lent) => {
                    self.stage(&noted.path, Stage::Going)?;
                    // Where that device is now. It may have been given back before a crash.
                    match lender.lent()?.into_iter().find(|l| l.is_same(lent)) {
                        Some(now) => {
                            self.unuse(&now)?;
                            lender.take_back(&now)?;
                        }
                        // The device that encrypts it may be there yet.
                        None if noted.encrypted => crypt::close(noted.uuid)?,
                        None if area::uuid_at(&noted.path).is_ok_and(|u| u == Some(noted.uuid)) => {
                            in_pool::detach(&noted.path)?;
                        }
                        None => {}
                    }
                    self.drop_note(lent)?;
                }
            }
        }
        self.restore()?;
        // What a crash left, or another host. Where nobody serves a pool there is nothing to be asked.
        for left in lender.lent().unwrap_or_default() {
            self.unuse(&left)?;
            lender.take_back(&left)?;
        }
        Ok(true)
    }

    /// After a boot, or whenever: what is noted is swapped to, what was left half made is removed. What came of it, area by area.
    pub fn resume(&mut self, lender: &mut dyn Lender) -> Result<Vec<(PathBuf, Result<()>)>> {
        self.ours()?;
        let used = in_use()?;
        let mut told_of = Vec::new();
        for noted in self.notes.areas.clone() {
            let on = user_of(&noted, &used).is_some();
            if let Some(lent) = noted.in_pool.clone() {
                let told = self.resume_in_pool(&noted, &lent, on, lender);
                let now = self.notes.areas.iter().find(|a| a.uuid == noted.uuid);
                let path = now.map_or(noted.path, |now| now.path.clone());
                told_of.push((path, told));
                continue;
            }
            let outcome = match noted.stage {
                Stage::Used if on => Ok(()),
                Stage::Used => area::check(&noted.path, noted.size, noted.uuid)
                    .and_then(|()| self.take(&noted)),
                // Made and taken, but not noted as such, or going and not gone: it stays until somebody says otherwise.
                Stage::Making | Stage::Going if on => self.stage(&noted.path, Stage::Used),
                Stage::Making | Stage::Going => self.forget(&noted.path),
            };
            told_of.push((noted.path, outcome));
        }
        self.restore()?;
        Ok(told_of)
    }

    fn resume_in_pool(
        &mut self,
        noted: &Noted,
        lent: &Lent,
        on: bool,
        lender: &mut dyn Lender,
    ) -> Result<()> {
        match noted.stage {
            _ if on => return self.stage(&noted.path, Stage::Used),
            Stage::Making | Stage::Going => {
                return Err(Fault::new(
                    format!(
                        "a part of {} is set aside, and was to be given back",
                        lent.flash.display()
                    ),
                    "use `hearth swap off` when the daemon runs",
                ));
            }
            Stage::Used => {}
        }
        lender.check(lent)?;
        if noted.encrypted {
            crypt::available()?;
        }
        self.unuse(lent)?;
        let node = lent.show()?;
        self.set_path(lent, &node)?;
        let mut again = Noted {
            path: node.clone(),
            ..noted.clone()
        };
        // With another key nothing of what was there is to be read: it is made anew.
        let ready = match noted.encrypted {
            true => crypt::open(&node, noted.uuid).and_then(|mapped| {
                again.path = mapped;
                self.set_path(lent, &again.path)?;
                area::format(&again.path, noted.uuid)
            }),
            false => in_pool::check_header(&node, noted.uuid),
        };
        let taken = ready.and_then(|()| self.take(&again));
        if taken.is_err() {
            crypt::close(noted.uuid)?;
            in_pool::detach(&node)?;
        }
        taken
    }

    /// Refuses a second area: swap of one size in one place is all there is.
    fn none_yet(&self) -> Result<()> {
        self.ours()?;
        let Some(known) = self.notes.areas.first() else {
            return Ok(());
        };
        let what = match known.stage {
            Stage::Used => format!("there is swap of {} bytes already", known.size),
            Stage::Making | Stage::Going => "swap was left half made or half gone".to_owned(),
        };
        let at = known.path.display();
        Err(Fault::new(
            format!("{what}: {at}"),
            "`hearth swap off` takes it away; then `hearth swap on` makes it anew, also in another size or place",
        ))
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

/// The same in each control group with a limit. Other swap does not count: whether a group's pages
/// may go there, the group says. Nor does the kernel tell where a group's pages are: all of them
/// may be here.
fn fits_groups(out: u64, groups: &[kernel::Group]) -> Result<()> {
    for group in groups {
        let back = group.swapped.min(out);
        let margin = MARGIN.min(group.limit / MARGIN_PART);
        if back > 0 && group.used.saturating_add(back).saturating_add(margin) > group.limit {
            return Err(Fault::new(
                format!(
                    "{back} bytes of the control group {} are swapped out, and {} of its limit of {} are free: the kernel would kill programs in it",
                    group.dir.display(),
                    group.limit.saturating_sub(group.used),
                    group.limit
                ),
                "raise the group's memory limit, or stop a program or machine in it",
            ));
        }
    }
    Ok(())
}

/// What the kernel swaps to of it. A loop device has another name after each boot, the device below it may have, and their old
/// names may be another's: what is swapped to says itself which area it is. Names count only where it may not be looked at.
fn user_of<'a>(noted: &Noted, used: &'a [InUse]) -> Option<&'a InUse> {
    let by_name = || match &noted.in_pool {
        None => vec![noted.path.clone()],
        Some(lent) => lent.loops().unwrap_or_default(),
    };
    used.iter().find(|u| match area::uuid_at(&u.path) {
        Ok(found) => found == Some(noted.uuid),
        Err(_) => by_name().contains(&u.path),
    })
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
            in_pool: None,
            encrypted: false,
            zswap: false,
        });
        notes.store(dir).unwrap();
        Areas::open(dir).unwrap()
    }

    /// Nobody serves a pool.
    struct Nobody;

    impl Lender for Nobody {
        fn lend(&mut self, _: u64, _: &mut dyn FnMut(u64, u64) -> bool) -> Result<Option<Lent>> {
            Err(Fault::new("nobody", "start it"))
        }
        fn take_back(&mut self, _: &Lent) -> Result<()> {
            Err(Fault::new("nobody", "start it"))
        }
        fn lent(&mut self) -> Result<Vec<Lent>> {
            Err(Fault::new("nobody", "start it"))
        }
        fn check(&mut self, _: &Lent) -> Result<()> {
            Err(Fault::new("it is another device", "take it away"))
        }
    }

    #[test]
    fn what_is_swapped_to_says_itself_which_area_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, uuid| {
            let mut header = [0; area::HEADER];
            header[1036..1052].copy_from_slice(Uuid::from_u128(uuid).as_bytes());
            header[4086..].copy_from_slice(b"SWAPSPACE2");
            let path = dir.path().join(name);
            std::fs::write(&path, header).unwrap();
            InUse {
                path,
                size: 1,
                used: 1,
                priority: 1,
            }
        };
        let used = [at("a", 1), at("b", 2)];
        let noted = |name: &str, uuid| Noted {
            path: dir.path().join(name),
            size: 1,
            uuid: Uuid::from_u128(uuid),
            priority: 1,
            discard: Discard::Off,
            stage: Stage::Used,
            in_pool: None,
            encrypted: false,
            zswap: false,
        };
        // Names have changed since it was noted, and what has its name now is somebody else's.
        assert_eq!(user_of(&noted("a", 2), &used), Some(&used[1]));
        assert_eq!(user_of(&noted("a", 3), &used), None);
        // What may not be looked at is told by its name.
        std::fs::remove_file(&used[0].path).unwrap();
        assert_eq!(user_of(&noted("a", 3), &used), Some(&used[0]));
    }

    #[test]
    fn what_was_set_aside_of_a_pool_stays_noted_until_it_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut areas = areas(dir.path(), &this_host(), Stage::Going);
        let flash = dir.path().join("pool");
        std::fs::write(&flash, b"x").unwrap();
        areas.notes.areas[0].in_pool = Some(Lent {
            flash,
            pool: Uuid::from_u128(1),
            device: Uuid::from_u128(2),
            offset: 0,
            bytes: 4096,
        });
        areas.notes.store(dir.path()).unwrap();
        // Neither is swapped to again, nor forgotten, nor removed as a file.
        let told = areas.resume(&mut Nobody).unwrap();
        assert!(told[0].1.as_ref().unwrap_err().remedy.contains("swap off"));
        let refused = areas.off(&mut Nobody).unwrap_err();
        assert!(refused.what.contains("nothing was changed"), "{refused}");
        assert!(dir.path().join("flash.swap").exists());
        assert_eq!(areas.show().unwrap().len(), 1);
        // Another device by that name is not swapped to.
        areas.notes.areas[0].stage = Stage::Used;
        let told = areas.resume(&mut Nobody).unwrap();
        let fault = told[0].1.as_ref().unwrap_err();
        assert!(fault.what.contains("another device"), "{fault}");
    }

    #[test]
    fn one_at_a_time_changes_something() {
        let dir = tempfile::tempdir().unwrap();
        let first = Areas::open_to_change(dir.path()).unwrap();
        let second = Areas::open_to_change(dir.path()).err().unwrap();
        assert!(second.what.contains("another"), "{second}");
        assert!(Areas::open(dir.path()).is_ok());
        drop(first);
        Areas::open_to_change(dir.path()).unwrap();
    }

    #[test]
    fn what_a_crash_left_half_made_is_removed() {
        for stage in [Stage::Making, Stage::Going] {
            let dir = tempfile::tempdir().unwrap();
            let mut areas = areas(dir.path(), &this_host(), stage);
            let told = areas.resume(&mut Nobody).unwrap();
            assert!(told.len() == 1 && told[0].1.is_ok());
            assert!(!dir.path().join("flash.swap").exists());
            assert!(!dir.path().join(crate::notes::NAME).exists());
        }
    }

    #[test]
    fn another_file_in_its_place_is_not_swapped_to() {
        let dir = tempfile::tempdir().unwrap();
        let mut areas = areas(dir.path(), &this_host(), Stage::Used);
        let told = areas.resume(&mut Nobody).unwrap();
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
    fn group_at_its_limit_refuses_reading_back() {
        let group = kernel::Group {
            dir: "/sys/fs/cgroup/memory/vm".into(),
            limit: 1 << 30,
            used: 900 << 20,
            swapped: 200 << 20,
        };
        assert_eq!(fits_groups(0, std::slice::from_ref(&group)), Ok(()));
        assert_eq!(fits_groups(60 << 20, std::slice::from_ref(&group)), Ok(()));
        let told = fits_groups(200 << 20, &[group]).unwrap_err();
        assert!(told.what.contains("209715200") && told.what.contains("/memory/vm"));
        assert!(told.remedy.contains("limit"), "{told}");
    }

    #[test]
    fn another_hosts_notes_touch_nothing_here() {
        let dir = tempfile::tempdir().unwrap();
        let mut areas = areas(dir.path(), "another", Stage::Making);
        assert!(areas.resume(&mut Nobody).is_err());
        let flash = dir.path().join("flash");
        std::fs::write(&flash, b"x").unwrap();
        let request = Request {
            size: area::SIZE_MIN,
            priority: 1,
            discard: Discard::Off,
            encrypt: false,
            zswap: false,
        };
        assert!(areas.on(&flash, &request, &mut |_, _| true).is_err());
        assert_eq!(areas.off(&mut Nobody), Ok(true));
        assert!(dir.path().join("flash.swap").exists());
        assert!(Areas::open(dir.path()).unwrap().show().unwrap().is_empty());
    }
}
