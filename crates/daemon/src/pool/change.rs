//! Flash devices that join a pool, leave it, or take another's place, while nobody serves it.
//!
//! What is written in which order is in [`hearth_format::change`]; here it is about files and block devices: that they
//! are there and nobody else's, what they are called, and that a start finds the pool whichever list of devices it is
//! given, the one before or the one after. For that the notes [beside the flash](crate::beside) have the
//! paths of both while the change is under way.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_format::change::{self, Copied, Newcomer};
use hearth_format::superblock::Part;
use hearth_format::{FormatError, Home, Superblock, Uuid};
use hearth_io::beneath::beneath;
use hearth_io::{BLOCK, BlockFile, Device, OpenError, OpenMode};

use crate::api::types::PoolInfo;
use crate::beside::{self, Beside};
use crate::error::{Error, Result};
use crate::pool::create::DeviceAt;
use crate::pool::{
    CreateOptions, FlashDevices, Pool, Prepared, devices, format_error, opening, prepare,
    settle_name, take_room,
};
use crate::size::human;

/// What is to be changed about a pool's devices.
#[derive(Clone, Debug)]
pub enum Change {
    /// One more.
    Add {
        /// Which.
        new: DeviceAt,
    },
    /// One instead of another.
    Replace {
        /// Which goes.
        old: PathBuf,
        /// Which comes.
        new: DeviceAt,
    },
    /// One less, on which nothing lies any more.
    Remove {
        /// Which goes.
        old: PathBuf,
    },
}

impl Change {
    /// The device that goes.
    pub fn old(&self) -> Option<&Path> {
        match self {
            Change::Add { .. } => None,
            Change::Replace { old, .. } | Change::Remove { old } => Some(old),
        }
    }

    /// The device that comes.
    pub fn new_device(&self) -> Option<&DeviceAt> {
        match self {
            Change::Add { new } | Change::Replace { new, .. } => Some(new),
            Change::Remove { .. } => None,
        }
    }

    /// For people, as what was to be done.
    pub fn words(&self) -> String {
        match self {
            Change::Add { new } => format!("add {}", new.path.display()),
            Change::Replace { old, new } => {
                format!("replace {} with {}", old.display(), new.path.display())
            }
            Change::Remove { old } => format!("remove {}", old.display()),
        }
    }
}

/// A change of which everything is known that can be known before the pool is touched, with the new device held.
pub(crate) struct Ready {
    what: Change,
    /// Place of the device that goes.
    old: Option<usize>,
    /// The one that comes, with its room, its name for good, and nothing on it that could be taken for the pool's.
    new: Option<(Arc<Device>, Newcomer)>,
    /// All devices before and after.
    pub union: Vec<PathBuf>,
    /// Slots of the pool afterwards, if there are more.
    pub slots: Option<u32>,
    /// Of the segments of the device that goes, which the new one has already: what was counted of each when it was
    /// copied.
    pub copied: Vec<Option<u64>>,
    /// Numbers of its segments, bytes of each, and where they lie on it and on the new one.
    plan: (Range<u32>, u64, u64, u64),
    /// Where everything is there twice: the pool as it was found, for where the other halves are.
    twice: Option<Superblock>,
}

impl Ready {
    /// For people.
    pub fn words(&self) -> String {
        self.what.words()
    }

    /// Place of the device that goes.
    pub fn place(&self) -> u16 {
        self.old.unwrap_or(0) as u16
    }

    /// The device that goes, the numbers of its segments, bytes of each, and where they lie on it and on the new one.
    pub fn copy_plan(&self) -> Result<(u16, Range<u32>, u64, u64, u64)> {
        let (segments, bytes, from, to) = self.plan.clone();
        Ok((self.place(), segments, bytes, from, to))
    }

    /// Where a segment of the device that goes is read, counted from its first: there, or if it is lost, where its other half
    /// is. The device's place, and the offset on it.
    pub fn source(&self, segment: u32) -> Option<(u16, u64)> {
        let place = self.place();
        match &self.twice {
            Some(lead) if lead.lost & bit(place) != 0 => {
                change::other_half(lead, usize::from(place), segment)
            }
            _ => {
                let (_, bytes, from, _) = &self.plan;
                Some((place, from + u64::from(segment) * bytes))
            }
        }
    }

    /// The number that the log has for a segment of the devices.
    pub fn in_log(&self, number: u32) -> u32 {
        match &self.twice {
            Some(lead) => number % lead.layout.segment_count.max(1),
            None => number,
        }
    }

    /// Refuses to go on if a device was lost since the change was prepared: what was copied from it may be older than it seemed.
    pub fn check_lost(&self, flash: &FlashDevices) -> Result<()> {
        let lost = lost_of(flash);
        match &self.twice {
            Some(lead) if lead.lost != lost => Err(Error::unavailable(
                "a flash device was lost while another one was to be replaced",
                "run the command again; name the lost device first",
            )),
            _ => Ok(()),
        }
    }

    /// The new device.
    pub fn new_media(&self) -> Result<Arc<Device>> {
        let new = self.new.as_ref().map(|(device, _)| device.clone());
        new.ok_or_else(|| Error::internal("a change of flash has no device"))
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// The pool's devices now.
    pub flash: Vec<PathBuf>,
    /// Worth a word.
    pub notices: Vec<String>,
}

/// Changes a pool that nobody serves; `progress` as for [`create_several`](crate::pool::create_several), told of one thing
/// after the other.
pub fn change(
    paths: &[PathBuf],
    what: &Change,
    options: &CreateOptions,
    state_dir: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(PoolInfo, Vec<String>)> {
    if let (Change::Replace { old, new }, None) = (what, what.new_device().and_then(|n| n.size))
        && finish(old, &new.path)?
    {
        let flash: Vec<PathBuf> = (paths.iter())
            .map(|path| {
                if same(path, old) {
                    new.path.clone()
                } else {
                    path.clone()
                }
            })
            .collect();
        let pool = Pool::look_at(&flash)?;
        note(state_dir, &pool.superblock.pool, &flash);
        note_first(state_dir, &pool);
        return Ok((pool.info(), Vec::new()));
    }
    let pool = Pool::open_all(paths)?;
    let uuid = pool.superblock.pool;
    let ready = ready(&pool, what, options, progress)?;
    note(state_dir, &uuid, &ready.union);
    note_first(state_dir, &pool);
    let changed = carry_out(&pool, ready, progress)?;
    note(state_dir, &uuid, &changed.flash);
    drop(pool);
    let pool = Pool::look_at(&changed.flash)?;
    note_first(state_dir, &pool);
    Ok((pool.info(), changed.notices))
}

/// A first device that took the place of the one that is noted has all that was on it. The next one to take its place
/// only names it, so it is noted before that; else a start would take that one for strange flash.
fn note_first(state_dir: &Path, pool: &Pool) {
    let sb = &pool.superblock;
    let Ok(Some(beside)) = Beside::of(state_dir, &sb.pool) else {
        return;
    };
    let noted = beside.notes().device;
    if noted == sb.device || noted != sb.peer {
        return;
    }
    let new = (sb.device, sb.created_unix_s);
    let stored = beside.note(|notes| (notes.device, notes.device_created) = new);
    if let Err(e) = stored {
        tracing::warn!(path = %beside.path().display(), "cannot note the new flash: {e}");
    }
}

fn bit(place: u16) -> u64 {
    1u64.checked_shl(place.into()).unwrap_or(0)
}

/// Bit `n`: device `n` is lost.
fn lost_of(flash: &FlashDevices) -> u64 {
    flash.lost().into_iter().fold(0, |lost, n| lost | bit(n))
}

/// Notes where the flash of a pool is. Without notes everything works that does not need them.
fn note(state_dir: &Path, pool: &Uuid, flash: &[PathBuf]) {
    match Beside::of(state_dir, pool) {
        Ok(Some(beside)) => note_in(&beside, flash),
        Ok(None) => {}
        Err(e) => tracing::warn!("{e}"),
    }
}

/// The same where the notes are at hand.
pub(crate) fn note_in(beside: &Beside, flash: &[PathBuf]) {
    let noted = beside.note(|notes| notes.flash = beside::shown_all(flash));
    if let Err(e) = noted {
        tracing::warn!(path = %beside.path().display(), "cannot note where the flash is: {e}");
    }
}

/// True if two paths are one file or device.
pub(crate) fn same(a: &Path, b: &Path) -> bool {
    a == b || matches!((beneath(a), beneath(b)), (Ok(a), Ok(b)) if a.is_same(&b))
}

/// Finds out whether a change can be made, and makes the new device ready for it.
pub(crate) fn ready(
    pool: &Pool,
    what: &Change,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Ready> {
    let paths = pool.paths();
    let mut union = paths.clone();
    if pool.is_without_flash() || pool.has_failed() {
        return Err(Error::refused(
            "the flash of this pool has failed, so nothing on it counts",
            "have a blank device take its place with `hearth pool adopt-flash`",
        ));
    }
    let twice = pool.superblock.is_twice();
    if twice && !matches!(what, Change::Replace { .. }) {
        return Err(Error::refused(
            "a pool made with `--dirty-copies 2`, where dirty data is on two devices, has the devices it was made with",
            "put another one in the place of one of them with `hearth pool replace-flash`, or make a new pool for more or fewer",
        ));
    }
    let old = match what.old() {
        None => None,
        Some(old) => Some(place_of(pool, &paths, old).ok_or_else(|| {
            Error::invalid(
                format!("{} is no flash device of this pool", old.display()),
                format!("name one of {}", beside::listed(&beside::shown_all(&paths))),
            )
        })?),
    };
    if let (true, Some(place)) = (twice, old) {
        change::can_lose(&pool.superblock, place).map_err(|_| {
            let lost = pool.flash().lost();
            let lost = lost.iter().filter_map(|n| paths.get(usize::from(*n)));
            let lost: Vec<String> = lost.map(|path| path.display().to_string()).collect();
            Error::refused(
                format!(
                    "{} is lost, and what was on it is on this device alone",
                    lost.join(", ")
                ),
                "put another one in the place of the lost device first",
            )
        })?;
    }
    // What stands at the path of a lost device is not the pool's: it may be the new one.
    let there = |n: usize| !pool.flash().is_lost(n as u16);
    let in_use: Vec<PathBuf> = (paths.iter().enumerate())
        .filter(|(n, _)| there(*n))
        .map(|(_, path)| path.clone())
        .collect();
    if matches!(what, Change::Remove { .. }) {
        check_removal(&paths, old.unwrap_or(0))?;
    }
    let mut new = None;
    let mut slots = None;
    let mut options = options.clone();
    if let Some(device) = what.new_device() {
        for path in &in_use {
            if same(path, &device.path) {
                return Err(Error::invalid(
                    format!("{} is a flash device of this pool already", path.display()),
                    "name another one",
                ));
            }
        }
        devices::refuse_same(&[in_use, vec![device.path.clone()]].concat())?;
        options.size = device.size;
        if let Some(size) = device.size {
            fits(pool, what, old, size, &device.path)?;
        }
        options.force |= device.size.is_none() && is_left_over(pool, &device.path);
        let prepared = prepare(&device.path, &options, progress)?;
        slots = fits(pool, what, old, prepared.file.size(), &device.path)?;
        new = Some(settled(pool, device, prepared, &options, old, progress)?);
        if !union.contains(&device.path) {
            union.push(device.path.clone());
        }
    }
    Ok(Ready {
        what: what.clone(),
        old,
        new,
        union,
        slots,
        copied: Vec::new(),
        plan: plan_of(&pool.superblock, old.unwrap_or(0)),
        twice: twice.then(|| pool.superblock.clone()),
    })
}

/// The place of a device that is named by its path or number. One that is lost may have been left out when the pool was started, so
/// that nobody knows its path: then it is the one, if what is at the path is nobody else's.
fn place_of(pool: &Pool, paths: &[PathBuf], old: &Path) -> Option<usize> {
    let there = |n: &usize| !pool.flash().is_lost(*n as u16);
    let all = || 0..paths.len();
    let named = |n: &usize| paths.get(*n).is_some_and(|path| same(path, old));
    let uuid = old.file_name().and_then(|name| name.to_str());
    let uuid = uuid.and_then(|name| name.parse::<Uuid>().ok());
    let list = pool.superblock.all_devices();
    let number = |n: &usize| uuid.is_some() && list.get(*n).map(|d| d.device) == uuid;
    let lost: Vec<usize> = all().filter(|n| !there(n)).collect();
    let lost_one = || match lost.as_slice() {
        [one] => {
            let ours = superblock_at(old).is_none_or(|sb| sb.pool == pool.superblock.pool);
            (ours && (superblock_at(old).is_some() || !old.exists())).then_some(*one)
        }
        _ => None,
    };
    all()
        .find(named)
        .or_else(|| all().find(number))
        .or_else(lost_one)
}

/// Where what of a device lies that is copied.
fn plan_of(lead: &Superblock, place: usize) -> (Range<u32>, u64, u64, u64) {
    let numbers = lead.segments().get(place).cloned().unwrap_or(0..0);
    let bytes = u64::from(lead.layout.segment_blocks) * BLOCK;
    let from = lead
        .all_devices()
        .get(place)
        .map(|d| d.extent.segment_start);
    let to = change::begin_of(lead, place);
    (numbers, bytes, from.unwrap_or(0) * BLOCK, to * BLOCK)
}

/// Refuses to remove what carries the pool's tables.
fn check_removal(paths: &[PathBuf], place: usize) -> Result<()> {
    let path = paths.get(place).map_or(Path::new("?"), PathBuf::as_path);
    let path = path.display();
    match (place, paths.len()) {
        (0, 1) => Err(Error::refused(
            format!("{path} is the only flash device of the pool"),
            "put another one in its place with `hearth pool replace-flash`, or write everything to the origins with `hearth pool export`",
        )),
        (0, _) => Err(Error::refused(
            format!("{path} carries the tables of the pool"),
            "put another device in its place with `hearth pool replace-flash`; a new one, or one that was removed first",
        )),
        _ => Ok(()),
    }
}

/// Refuses a device that is too small, or a pool that would become too large.
fn fits(
    pool: &Pool,
    what: &Change,
    old: Option<usize>,
    bytes: u64,
    path: &Path,
) -> Result<Option<u32>> {
    let superblock = &pool.superblock;
    let refused = |e: FormatError| format_error(path, &e);
    match (what, old) {
        (Change::Add { .. }, _) => {
            let next = change::with_more(superblock, bytes, Uuid::nil()).map_err(refused)?;
            let scratch = pool.registry.disks.iter().find(|d| d.home == Home::Scratch);
            let room = next.layout.checkpoint_room();
            let needed = u64::from(next.layout.slots()) * 18;
            // A start that has to read the log leaves nothing of them.
            match scratch.filter(|_| needed > room) {
                Some(disk) => Err(Error::refused(
                    format!(
                        "the tables of the pool have no room for what a stop leaves with {} more, so scratch disk {} would be empty after every restart",
                        human(bytes),
                        disk.name
                    ),
                    "add a smaller device, or remove the scratch disks first",
                )),
                None => Ok(Some(next.layout.slots())),
            }
        }
        (Change::Replace { old, .. }, Some(place)) => {
            change::can_replace(superblock, place, bytes).map_err(|e| match e {
                FormatError::TooSmall { needed, actual } => Error::refused(
                    format!(
                        "{} has {}, and to take the place of {} it needs {}",
                        path.display(),
                        human(actual),
                        old.display(),
                        human(needed.next_multiple_of(1 << 20))
                    ),
                    "use a larger device, or make a larger file with --size",
                ),
                e => refused(e),
            })?;
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// True if a device was to become part of this pool, or was one, and is not: a change was cut off.
fn is_left_over(pool: &Pool, path: &Path) -> bool {
    let Some(found) = superblock_at(path) else {
        return false;
    };
    let ours = pool.superblock.all_devices();
    // One from before all flash was given up may have what nobody else has.
    let later = found.created_unix_s >= pool.superblock.created_unix_s;
    let stranger = ours.iter().all(|d| d.device != found.device);
    // One that was lost holds what the others have, and older.
    let mut listed = (0..).zip(&ours);
    let lost = listed.any(|(n, d)| d.device == found.device && pool.flash().is_lost(n));
    let left = stranger && (found.part != Part::Member || later);
    found.pool == pool.superblock.pool && (lost || left)
}

/// True if a device is there, and does not even say what it is.
fn cannot_be_asked(path: &Path) -> bool {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    match BlockFile::open(path, mode) {
        Ok(file) => matches!(
            Superblock::load_any(&mut Arc::new(Device::new(file))),
            Err(FormatError::Io { .. } | FormatError::TruncatedDevice { .. })
        ),
        Err(OpenError::Open { source, .. }) => hearth_io::is_dead(&source),
        Err(_) => false,
    }
}

/// What a device says of itself, if it can be read.
pub(super) fn superblock_at(path: &Path) -> Option<Superblock> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let file = BlockFile::open(path, mode).ok()?;
    Superblock::load_any(&mut Arc::new(Device::new(file))).ok()
}

/// Makes the change. The pool's devices are open, and nobody else writes to them.
pub(crate) fn carry_out(
    pool: &Pool,
    ready: Ready,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Changed> {
    let Ready {
        what,
        old,
        new,
        copied,
        twice,
        ..
    } = ready;
    let mut paths = pool.paths();
    let mut media: Vec<Arc<Device>> = pool.flash().iter().cloned().collect();
    let mut notices = Vec::new();
    match (what, old, new) {
        (Change::Remove { .. }, Some(place), _) => {
            change::remove(media, place).map_err(|(at, e)| failed(&paths, at, &e))?;
            paths.remove(place);
        }
        (Change::Add { new }, _, Some((device, newcomer))) => {
            media.push(device);
            paths.push(new.path);
            change::add(&mut media, newcomer).map_err(|(at, e)| failed(&paths, at, &e))?;
        }
        (Change::Replace { new, .. }, Some(place), Some((mut device, newcomer))) => {
            let mut all = paths.clone();
            all.push(new.path.clone());
            let has = |seg: u32| copied.get(seg as usize).is_some_and(Option::is_some);
            let replaced = match twice {
                Some(_) => {
                    let lost = lost_of(pool.flash());
                    change::replace_half(
                        &mut media,
                        place,
                        lost,
                        &mut device,
                        newcomer,
                        &has,
                        progress,
                    )
                }
                None => change::replace(&mut media, place, &mut device, newcomer, &has, progress),
            };
            let (_, Copied { unreadable }) = replaced.map_err(|(at, e)| failed(&all, at, &e))?;
            if let Some(path) = paths.get_mut(place) {
                if unreadable > 0 {
                    notices.push(format!(
                        "{unreadable} blocks of {} could not be read: what was clean there comes from the origins again, and of what was not, `hearth disk show` lists what is lost",
                        path.display()
                    ));
                }
                *path = new.path;
            }
        }
        _ => return Err(Error::internal("a change of flash has no device")),
    }
    Ok(Changed {
        flash: paths,
        notices,
    })
}

/// The pool was closed so that it can go on without a device: takes that one off the list. Where the others are.
pub(crate) fn go_on_without(pool: &Pool, place: u16) -> Result<Vec<PathBuf>> {
    let mut paths = pool.paths();
    let mut media: Vec<Arc<Device>> = pool.flash().iter().cloned().collect();
    let at = usize::from(place);
    if at == 0 || at >= media.len() {
        return Err(Error::internal("a device is to go that is not there"));
    }
    drop(media.remove(at));
    paths.remove(at);
    let lead = media.first_mut().map(|first| Superblock::load(first));
    let lead = lead.ok_or_else(devices::none_given)?;
    let floor = lead.map_err(|e| failed(&paths, 0, &e))?.floor_of_log();
    change::go_on_without(&mut media, at, floor).map_err(|(at, e)| failed(&paths, at, &e))?;
    Ok(paths)
}

/// A new device, with its room and its name for good, and what it is called.
fn settled(
    pool: &Pool,
    at: &DeviceAt,
    prepared: Prepared,
    options: &CreateOptions,
    old: Option<usize>,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(Arc<Device>, Newcomer)> {
    let Prepared { file, replaced } = prepared;
    let start = change::begin_of(&pool.superblock, old.unwrap_or(usize::MAX));
    take_room(&at.path, &file, start, true)?;
    // Before anything names it: after a power cut the file would be there without its name.
    settle_name(&at.path, options, replaced)?;
    let mut device = Arc::new(Device::new(file));
    if at.size.is_none() && old.is_none() {
        change::clear(&pool.superblock, &mut device, progress)
            .map_err(|e| failed(std::slice::from_ref(&at.path), 0, &e))?;
    }
    let newcomer = Newcomer {
        device: Uuid::new_v4(),
        now_unix_s: beside::now_unix(),
    };
    Ok((device, newcomer))
}

fn failed(paths: &[PathBuf], at: usize, error: &FormatError) -> Error {
    match error {
        FormatError::Io { source, .. } if source.kind() == std::io::ErrorKind::Interrupted => {
            Error::unavailable(
                "the devices of the pool were not changed: interrupted",
                "the pool is as it was; run the command again",
            )
        }
        e => format_error(paths.get(at).map_or(Path::new("?"), PathBuf::as_path), e),
    }
}

/// Finishes a replacement of a first device that was cut off between its last steps; false if there is none.
fn finish(old: &Path, new: &Path) -> Result<bool> {
    let parts = [old, new].map(superblock_at);
    let halfway = |sb: &Option<Superblock>, part| sb.as_ref().is_some_and(|sb| sb.part == part);
    if !halfway(&parts[0], Part::Gone) || !halfway(&parts[1], Part::Coming) {
        return Ok(false);
    }
    let open = |path: &Path| -> Result<Arc<Device>> {
        let file = BlockFile::open(path, OpenMode::default()).map_err(|e| opening(path, e))?;
        Ok(Arc::new(Device::new(file)))
    };
    let (mut from, mut to) = (open(old)?, open(new)?);
    change::finish_replacement(&mut from, &mut to).map_err(|e| format_error(new, &e))
}

/// Of devices that are, or were, those of a pool: which are it today, if that can be told and all are there.
///
/// Somebody may have changed the devices while the list that a service starts with stayed as it was.
pub(crate) fn of_today(given: &[PathBuf], state_dir: &Path) -> Option<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = given.to_vec();
    let gone = |path: &PathBuf| matches!(path.try_exists(), Ok(false));
    let noted = given.iter().find_map(|path| {
        let pool = superblock_at(path).map(|sb| sb.pool);
        let pool = pool.or_else(|| beside::pool_at(state_dir, path).ok()?);
        let known = beside::known(state_dir).ok()?;
        let notes = known.into_iter().find(|notes| Some(notes.pool) == pool)?;
        Some((notes.pool, notes.flash))
    });
    // Where all that is named was pulled, it is the only pool that was served from here.
    let only = || match beside::known(state_dir).ok()?.as_slice() {
        [notes] if given.iter().all(gone) => Some((notes.pool, notes.flash.clone())),
        _ => None,
    };
    let (pool, noted) = noted.or_else(only)?;
    for path in noted.split('\n').map(PathBuf::from) {
        if !paths.iter().any(|known| same(known, &path)) {
            paths.push(path);
        }
    }
    // A replacement may lack its last step.
    for old in &paths {
        for new in &paths {
            let finished = finish(old, new).inspect_err(|e| tracing::warn!("{e}"));
            if finished == Ok(true) {
                tracing::info!(old = %old.display(), new = %new.display(), "a replacement of flash that was cut off is finished");
            }
        }
    }
    let found = paths
        .iter()
        .filter_map(|path| Some((path.clone(), superblock_at(path)?)));
    let found: Vec<(PathBuf, Superblock)> = found
        .filter(|(_, sb)| sb.pool == pool && sb.part == Part::Member)
        .collect();
    if found.iter().any(|(_, sb)| sb.is_twice()) {
        return of_today_twice(given, &noted, &found);
    }
    let leads = found.iter().filter(|(_, sb)| sb.device_index == 0);
    let lead = leads.max_by_key(|(_, sb)| (sb.stamp, sb.generation))?;
    let (places, first) = (lead.1.all_devices(), added_from(&lead.1));
    let numbers = lead.1.segments();
    let (mut today, mut replaced) = (Vec::new(), 0);
    for (entry, numbers) in places.iter().zip(numbers) {
        let mut at = found.iter().filter(|(_, sb)| sb.device == entry.device);
        // Missing, or there is a copy of it, of which nobody can tell which is which.
        let (Some((path, sb)), None) = (at.next(), at.next()) else {
            return None;
        };
        // One that was left out is found if it came after the list was made, or if another one that is named was to take its place.
        let came = !sb.peer.is_nil() || numbers.start >= first;
        if !came && !given.iter().any(|known| same(known, path)) {
            replaced += 1;
        }
        today.push(path.clone());
    }
    // Whatever else is given must have been of the pool, or was to be, or cannot be asked: a device without which it went on.
    let is_one = |path: &PathBuf| today.iter().any(|one| same(one, path));
    let is_noted = |path: &PathBuf| noted.split('\n').any(|noted| same(Path::new(noted), path));
    let was_one = |path: &PathBuf| {
        let theirs = || superblock_at(path).is_some_and(|sb| sb.pool == pool);
        is_noted(path) || gone(path) || theirs() || cannot_be_asked(path)
    };
    let all = given.iter().all(|path| is_one(path) || was_one(path));
    let other = today.len() != given.len() || !given.iter().all(is_one);
    // A name that nobody has noted is a mistake, and takes no place.
    let strangers = given.iter().filter(|path| !is_one(path) && is_noted(path));
    (all && other && replaced <= strangers.count()).then_some(today)
}

/// The same where everything is there twice, and a device may be missing. One came after the list was made if another one was replaced,
/// and in the list there is one that is none of the pool's any more, or that is not there.
fn of_today_twice(
    given: &[PathBuf],
    noted: &str,
    found: &[(PathBuf, Superblock)],
) -> Option<Vec<PathBuf>> {
    let leads = found.iter().map(|(_, sb)| sb);
    let leads = leads.filter(|sb| sb.is_twice() && sb.device_index < 2);
    let lead = leads.max_by_key(|sb| (sb.stamp.max(sb.next_stamp), sb.generation))?;
    let mut today: Vec<PathBuf> = Vec::new();
    for entry in &lead.devices {
        let mut at = found.iter().filter(|(_, sb)| sb.device == entry.device);
        match (at.next(), at.next()) {
            (Some((path, _)), None) => today.push(path.clone()),
            (None, _) => {}
            _ => return None,
        }
    }
    let is_in = |list: &[PathBuf], path: &PathBuf| list.iter().any(|one| same(one, path));
    let complete = today.len() == lead.devices.len();
    // What stands where a device was that is none of the pool's any more may be blank by now.
    let was_one = |path: &&PathBuf| {
        let noted = noted.split('\n').any(|noted| same(Path::new(noted), path));
        let theirs = superblock_at(path).map(|sb| sb.pool == lead.pool);
        noted || theirs.unwrap_or(complete) || matches!(path.try_exists(), Ok(false))
    };
    let strangers: Vec<&PathBuf> = given.iter().filter(|path| !is_in(&today, path)).collect();
    let came = today.iter().filter(|path| !is_in(given, path)).count();
    let fit = strangers.iter().all(was_one) && came <= strangers.len();
    (fit && !strangers.is_empty() && !today.is_empty()).then_some(today)
}

/// The first segment that came with a device that was added.
fn added_from(lead: &Superblock) -> u32 {
    let added = lead.layout.added.segments;
    // Where devices have gone it cannot be told from this.
    let first = lead.layout.segment_count.checked_sub(added);
    first.filter(|_| added > 0).unwrap_or(u32::MAX)
}
