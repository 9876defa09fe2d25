//! The flash devices of a pool as files and block devices: which are given, whether they are the pool, and in words
//! what is wrong if they are not.
//!
//! They may be named in any order. The first of the pool carries what a single one does (registry, checkpoint,
//! segment map), so the rest of the daemon goes on speaking of one device, and of all of them where data is meant.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_format::devices::{judge, judge_twice};
use hearth_format::{DeviceEntry, FormatError, Members, Misfit, Superblock};
use hearth_io::beneath::beneath;
use hearth_io::{
    BlockFile, Device, IoError, Job, Joined, Link, OpenError, OpenMode, Remote, Spread,
};

use crate::error::{Error, Kind, Result};
use crate::pool::{format_error, opening};
use crate::size::human;

/// The devices that a pool's log lies on, in the order of their places.
#[derive(Clone, Debug)]
pub struct FlashDevices {
    devices: Vec<Arc<Device>>,
    spread: Spread,
    /// One is missing that was there when the pool was served last.
    newly_missing: bool,
    /// What was found when they were opened, in words.
    found: Vec<String>,
}

impl FlashDevices {
    /// One device.
    pub(crate) fn one(device: Arc<Device>) -> FlashDevices {
        FlashDevices {
            devices: vec![device],
            spread: Spread::one(),
            newly_missing: false,
            found: Vec::new(),
        }
    }

    pub(crate) fn several(devices: Vec<Arc<Device>>, spread: Spread) -> FlashDevices {
        FlashDevices {
            devices,
            spread,
            newly_missing: false,
            found: Vec::new(),
        }
    }

    /// What is wrong with them, though they are the pool: which are missing or older, and of which a copy of the superblock is damaged.
    pub(crate) fn troubles(&self) -> Vec<String> {
        let mut troubles = self.found.clone();
        let there = (0..).zip(&self.devices);
        for (_, device) in there.filter(|(n, _)| self.spread.is_there(*n)) {
            if Superblock::whole_copies(&mut device.clone()) != [true; 2] {
                troubles.push(format!(
                    "of the superblock of {} one copy is damaged; the other one counts, and the next start writes both anew",
                    path_of(device).display()
                ));
            }
        }
        troubles
    }

    /// Is one missing that was there when the pool was served last?
    pub(crate) fn misses_one(&self) -> bool {
        self.newly_missing
    }

    /// The first that is there, which carries the registry.
    pub fn first(&self) -> Option<&Arc<Device>> {
        let there = (0..).zip(&self.devices);
        let mut there = there.filter(|(n, _)| self.spread.is_there(*n));
        there.next().map(|(_, device)| device)
    }

    /// Is everything there twice, as long as no device is lost?
    pub fn are_twice(&self) -> bool {
        self.spread.is_twice()
    }

    /// True if a device is lost: it is missing, or failed, and the others have everything.
    pub fn is_lost(&self, place: u16) -> bool {
        !self.spread.is_there(place)
    }

    /// The places of those that are.
    pub fn lost(&self) -> Vec<u16> {
        let places = 0..self.devices.len() as u16;
        places.filter(|n| self.is_lost(*n)).collect()
    }

    /// Do the others that are not lost have everything?
    pub(crate) fn can_lose(&self, place: u16) -> bool {
        let bit = 1u64.checked_shl(u32::from(place)).unwrap_or(0);
        self.spread.is_whole_without(self.spread.lost() | bit)
    }

    /// A device is found to be gone: whoever runs the log shall go on without it.
    pub(crate) fn suspect(&self, place: u16) {
        self.spread.note_suspect(place);
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.devices.iter()
    }

    /// All of them as one, as the engine's log is read and written outside the data path.
    pub fn joined(&self) -> Joined<Arc<Device>> {
        Joined::new(self.spread.clone(), self.devices.clone())
    }

    /// What lies where, and which are lost.
    pub(crate) fn joined_spread(&self) -> Spread {
        self.spread.clone()
    }

    /// Makes durable what was written to any of them.
    pub(crate) fn flush(&self) -> std::io::Result<()> {
        let there = (0..).zip(&self.devices);
        let mut there = there.filter(|(n, _)| self.spread.is_there(*n));
        there.try_for_each(|(_, device)| device.flush())
    }

    /// Where they are.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.devices.iter().map(|device| path_of(device)).collect()
    }
}

fn path_of(device: &Device) -> PathBuf {
    match device.file() {
        Some(file) => file.path().to_owned(),
        None => PathBuf::from(device.name()),
    }
}

/// What stands in the place of a device that is missing. Nothing is asked of it; if it is, it fails.
#[derive(Debug)]
pub(super) struct Missing(pub(super) String);

impl Remote for Missing {
    fn name(&self) -> String {
        self.0.clone()
    }

    fn size(&self) -> u64 {
        0
    }

    fn refresh_size(&self) -> std::io::Result<u64> {
        Ok(0)
    }

    fn align(&self) -> u32 {
        512
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn push(&self, job: Job) {
        job.finish(Err(IoError::Os(libc::EIO)));
    }

    fn link(&self) -> Link {
        Link::up()
    }

    fn set_timeout(&self, _: std::time::Duration) {}

    fn hurry(&self) {}
}

/// Devices that were opened and found to be a pool.
pub(crate) struct Opened {
    pub flash: FlashDevices,
    pub superblock: Superblock,
    pub members: Members,
}

/// Opens those that are given, and refuses what is not a pool of the same moment, saying what is wrong with which.
pub(crate) fn open(paths: &[PathBuf], mode: OpenMode) -> Result<Opened> {
    if paths.is_empty() {
        return Err(none_given());
    }
    refuse_same(paths)?;
    let mut devices = Vec::new();
    let mut found = Vec::new();
    let (mut known, mut gone) = (Vec::new(), Vec::new());
    let aside = match mode.unlocked {
        true => Vec::new(),
        false => set_aside(paths),
    };
    for (n, path) in paths.iter().enumerate() {
        match look(path, mode, aside.get(n).map_or(&[], Vec::as_slice)) {
            Ok((superblock, device)) => {
                found.push(superblock);
                devices.push(device);
                known.push(path.clone());
            }
            // Where everything is there twice, one may be missing.
            Err((e, true)) => gone.push((path.clone(), e)),
            Err((e, false)) => return Err(e),
        }
    }
    if let Some(stranger) = in_a_lost_place(&found) {
        let path = known.remove(stranger);
        let pool = found.remove(stranger).pool;
        drop(devices.remove(stranger));
        let e = Error::refused(
            format!("{} is of pool {pool}, or was of this one", path.display()),
            "name the devices of one pool",
        );
        tracing::warn!(path = %path.display(), "what stands in the place of a lost flash device is not it: {e}");
        gone.push((path, e));
    }
    if found.iter().any(Superblock::is_twice) {
        return open_twice(&known, &found, &devices, &gone);
    }
    if let Some((_, e)) = gone.into_iter().next() {
        return Err(e);
    }
    let order = judge(&found).map_err(|misfit| explain(paths, &found, &misfit))?;
    let mut sorted: Vec<(Superblock, Arc<Device>)> = Vec::new();
    for at in order {
        if let (Some(sb), Some(device)) = (found.get(at), devices.get(at)) {
            sorted.push((sb.clone(), device.clone()));
        }
    }
    let (mut superblocks, devices): (Vec<_>, Vec<_>) = sorted.into_iter().unzip();
    if superblocks.is_empty() {
        return Err(none_given());
    }
    let superblock = superblocks.remove(0);
    let spread = superblock.spread();
    Ok(Opened {
        flash: FlashDevices::several(devices, spread),
        superblock,
        members: Members::new(superblocks),
    })
}

/// Which one is no part of the pool that the others are, where they go on without a device that was lost before: that one
/// may have been pulled, and another put in its place.
fn in_a_lost_place(found: &[Superblock]) -> Option<usize> {
    if judge_twice(found).is_ok() || !found.iter().any(Superblock::is_twice) {
        return None;
    }
    let fit_without = |n: &usize| {
        let mut rest = found.to_vec();
        rest.remove(*n);
        rest.iter().all(Superblock::is_twice)
            && !rest.is_empty()
            && judge_twice(&rest).is_ok_and(|pool| !pool.newly && pool.older.is_empty())
    };
    let mut fit = (0..found.len()).filter(fit_without);
    match (fit.next(), fit.next()) {
        (only, None) => only,
        _ => None,
    }
}

/// The stretches of each that the pool has set aside for the kernel's swap, which may be in use. It is asked before anything is
/// locked: a daemon that begins anew finds its swap in use.
fn set_aside(paths: &[PathBuf]) -> Vec<Vec<Range<u64>>> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let peek = |path: &PathBuf| {
        let file = BlockFile::open(path, mode).ok()?;
        Superblock::load(&mut Arc::new(Device::new(file))).ok()
    };
    let found: Vec<Option<Superblock>> = paths.iter().map(peek).collect();
    let all = found.iter().flatten();
    let lead = all.clone().find(|sb| sb.device_index == 0);
    let each = found.iter().map(|sb| match (lead, sb) {
        (Some(lead), Some(sb)) if lead.pool == sb.pool => {
            let places = lead.areas.iter().filter_map(|area| lead.place_of(*area));
            let here = places.filter(|place| place.device == sb.device_index);
            here.map(|p| p.offset..p.offset + p.bytes).collect()
        }
        _ => Vec::new(),
    });
    each.collect()
}

/// What stands on a flash device of what is set aside on it.
pub struct OfDevice {
    /// The pool it is of.
    pub pool: hearth_format::Uuid,
    /// Its number for life.
    pub device: hearth_format::Uuid,
    /// Stretches of it that are set aside; of another than the pool's first device it does not say.
    pub aside: Option<Vec<Range<u64>>>,
}

/// Looks what a flash device says of itself, whoever uses it.
pub fn of_device(path: &Path) -> Result<OfDevice> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let (sb, _) = look(path, mode, &[]).map_err(|(e, _)| e)?;
    let places = sb.areas.iter().filter_map(|area| sb.place_of(*area));
    let here = places.filter(|place| place.device == 0);
    let aside = here.map(|p| p.offset..p.offset + p.bytes).collect();
    Ok(OfDevice {
        pool: sb.pool,
        device: sb.device,
        aside: (sb.device_index == 0).then_some(aside),
    })
}

/// Opens one of them. What went wrong if that cannot be, and whether the device can be called missing for it: not if it is
/// in use, or needs a newer version.
fn look(
    path: &Path,
    mode: OpenMode,
    aside: &[Range<u64>],
) -> std::result::Result<(Superblock, Arc<Device>), (Error, bool)> {
    let file = BlockFile::open_beside(path, mode, aside).map_err(|e| {
        let gone = match &e {
            OpenError::Open { source, .. } => {
                source.kind() == io::ErrorKind::NotFound || hearth_io::is_dead(source)
            }
            _ => false,
        };
        (opening(path, e), gone)
    })?;
    let mut media = Arc::new(Device::new(file));
    match Superblock::load(&mut media) {
        Ok(superblock) => Ok((superblock, media)),
        Err(e) => {
            let gone = !matches!(e, FormatError::Newer { .. });
            Err((format_error(path, &e), gone))
        }
    }
}

/// The same where everything is there twice, as far as it is there.
fn open_twice(
    paths: &[PathBuf],
    found: &[Superblock],
    devices: &[Arc<Device>],
    gone: &[(PathBuf, Error)],
) -> Result<Opened> {
    let together = judge_twice(found).map_err(|misfit| explain(paths, found, &misfit))?;
    let members = together.members(found);
    let superblock = together.lead;
    let mut said = Vec::new();
    for at in &together.older {
        let path = paths.get(*at).map_or(Path::new("?"), PathBuf::as_path);
        said.push(format!(
            "the pool was served since without {}: what is on it is older, and it is not used",
            path.display()
        ));
        tracing::warn!(
            path = %path.display(),
            "the pool was served since without this flash device: what is on it is older, and it is not used"
        );
    }
    let missing = together.places.iter().filter(|at| at.is_none()).count();
    let by_place = together.places.iter().zip(0u16..).map(|(at, n)| {
        if let Some(device) = at.and_then(|at| devices.get(at)) {
            return device.clone();
        }
        let older = together.older.iter().find(|at| {
            let entry = superblock.devices.get(usize::from(n));
            entry.map(|e| e.device) == found.get(**at).map(|sb| sb.device)
        });
        let name = match (older.and_then(|at| paths.get(*at)), gone) {
            (Some(path), _) => path.display().to_string(),
            (None, [(path, e)]) if missing == 1 => {
                tracing::warn!("a flash device of the pool is missing: {}", e.what);
                said.push(format!("a flash device of the pool is missing: {}", e.what));
                path.display().to_string()
            }
            _ => {
                let name = format!("device {} (missing)", u32::from(n) + 1);
                if let Some(entry) = superblock.devices.get(usize::from(n)) {
                    said.push(format!("{} is not among those given", described(n, entry)));
                }
                name
            }
        };
        Arc::new(Device::remote(Arc::new(Missing(name))))
    });
    let devices = by_place.collect();
    let spread = superblock.spread();
    Ok(Opened {
        flash: FlashDevices {
            newly_missing: together.newly,
            found: said,
            ..FlashDevices::several(devices, spread)
        },
        superblock,
        members,
    })
}

/// Do those of the devices that are not gone have everything, as far as can be told? Then they are the pool, though they
/// could not be opened just now.
pub(crate) fn is_half_there(paths: &[PathBuf]) -> bool {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let mut found = Vec::new();
    for path in paths.iter().filter(|p| crate::beside::gone(p).is_none()) {
        match look(path, mode, &[]) {
            Ok((superblock, _)) => found.push(superblock),
            // It may be anything, and whole.
            Err(_) if paths.len() > 1 => return true,
            Err(_) => {}
        }
    }
    let twice = found.iter().any(Superblock::is_twice);
    twice && !matches!(judge_twice(&found), Err(Misfit::Missing(..)))
}

/// Which device counts as missing although it is there, as it is an older copy, and that in words.
pub(crate) fn older(paths: &[PathBuf]) -> Option<(usize, String)> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let look = |path: &PathBuf| Some(look(path, mode, &[]).ok()?.0);
    let found: Vec<Superblock> = paths.iter().map(look).collect::<Option<_>>()?;
    match judge(&found) {
        Err(Misfit::Older(at, newer)) if !found.iter().any(Superblock::is_twice) => {
            let why = explain(paths, &found, &Misfit::Older(at, newer));
            Some((at, why.what))
        }
        _ => None,
    }
}

/// That no device is given.
pub(crate) fn none_given() -> Error {
    Error::invalid(
        "no flash device is given",
        "name one with --flash PATH, or each of them",
    )
}

/// Refuses a device that is named twice, under whatever names: the second time it would be found in use by ourselves.
pub(crate) fn refuse_same(paths: &[PathBuf]) -> Result<()> {
    for (i, path) in paths.iter().enumerate() {
        let place = beneath(path).ok();
        for other in paths.iter().skip(i + 1) {
            let overlap = match (&place, beneath(other).ok()) {
                (Some(a), Some(b)) if a.is_same(&b) => Some("are the same device"),
                (Some(a), Some(b)) if a.overlaps(&b) => Some("lie on the same device in part"),
                _ => None,
            };
            let (path_shown, other_shown) = (path.display(), other.display());
            let what = match overlap {
                _ if path == other => format!("{path_shown} is given twice"),
                Some(how) => format!("{path_shown} and {other_shown} {how}"),
                None => continue,
            };
            return Err(Error::invalid(
                what,
                "name each flash device of the pool once",
            ));
        }
    }
    Ok(())
}

/// A device in words, of which there is no path.
fn described(place: u16, entry: &DeviceEntry) -> String {
    format!(
        "device {} ({}, {})",
        u32::from(place) + 1,
        human(entry.bytes()),
        entry.device
    )
}

fn explain(paths: &[PathBuf], found: &[Superblock], misfit: &Misfit) -> Error {
    let path = |at: &usize| paths.get(*at).map_or(Path::new("?"), PathBuf::as_path);
    let shown = |at: &usize| path(at).display().to_string();
    let pool = |at: &usize| {
        found
            .get(*at)
            .map_or_else(String::new, |sb| sb.pool.to_string())
    };
    match misfit {
        Misfit::OtherPool(a, b) => Error::refused(
            format!(
                "{} is of pool {}, and {} of pool {}",
                shown(a),
                pool(a),
                shown(b),
                pool(b)
            ),
            "name the devices of one pool",
        ),
        Misfit::Copies(a, b) => Error::refused(
            format!(
                "{} and {} both say that they are device {} of pool {}: one is a copy of the other",
                shown(a),
                shown(b),
                found.get(*a).map_or(0, |sb| u32::from(sb.device_index) + 1),
                pool(a)
            ),
            "leave the copy out",
        ),
        Misfit::Older(a, b) => Error::refused(
            format!(
                "{} is older than {}: the pool was served since without it, or with what it is a copy of",
                shown(a),
                shown(b)
            ),
            "give the device that was in use then; if that is lost, so is what was only on flash, and the disks go on from their origins with `hearth pool adopt-flash`",
        ),
        Misfit::NotOfIt(a, b) => Error::refused(
            format!(
                "{} was a device of pool {} once, and is none any more, as {} says",
                shown(a),
                pool(a),
                shown(b)
            ),
            "leave it out",
        ),
        Misfit::Apart(a, b) => Error::refused(
            format!(
                "{} and {} were each served without the other, and hold different things",
                shown(a),
                shown(b)
            ),
            "name the one that was in use last alone; what was only on the other is found with `hearth rescue`",
        ),
        Misfit::Missing(place, entry) => {
            let n = found.first().map_or(0, |sb| sb.device_count);
            let id = found
                .first()
                .map_or_else(String::new, |sb| sb.pool.to_string());
            Error::refused(
                format!(
                    "pool {id} has {n} flash devices, and {} is not among those given",
                    described(*place, entry)
                ),
                "name all of them: each with --flash, or for `hearth rescue` one after the other",
            )
        }
    }
}

/// That the pool of a device that was given alone has others.
pub(crate) fn incomplete(path: &Path, superblock: &Superblock) -> Error {
    let paths = [path.to_owned()];
    let found = std::slice::from_ref(superblock);
    match judge(found) {
        Err(misfit) => explain(&paths, found, &misfit),
        Ok(_) => Error::refused(
            format!("{} is one of several devices of a pool", path.display()),
            "name all of them: each with --flash, or for `hearth rescue` one after the other",
        ),
    }
}

/// More devices than a pool can have.
pub(crate) fn too_many(paths: &[PathBuf]) -> Option<Error> {
    let most = usize::from(hearth_format::devices::DEVICES_MAX);
    (paths.len() > most).then(|| {
        Error::of(
            Kind::Invalid,
            hearth_fault::Fault::new(
                format!(
                    "{} flash devices are given, and a pool has at most {most}",
                    paths.len()
                ),
                "join some of them with LVM or md",
            ),
        )
    })
}
