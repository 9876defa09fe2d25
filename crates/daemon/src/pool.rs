//! A pool on flash, outside the data path: creating it, looking at it, changing its registry.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::Engine;
use hearth_format::{
    DiskRecord, FormatError, IdSet, Layout, Members, Places, PoolNotes, PoolState, Registry,
    SharedRecord, Superblock, Uuid,
};
use hearth_io::file::sync_names;
use hearth_io::media::Sparse;
use hearth_io::{BLOCK, BlockFile, Buf, Device, Media, OpenError, OpenMode, OriginSpec};
use hearth_policy::Config;

use crate::api::types::{CacheMode, DiskRef, PoolInfo};
use crate::beside::Beside;
use crate::degraded::Refusal;
use crate::error::{Error, Kind, Result};
use crate::inspect;
use crate::named::Named;
use crate::pool::devices::Opened;
use crate::size::human;

/// Bytes of a new flash file written at a time.
const WRITE_OUT_BYTES: u64 = 4 << 20;

/// Size of the flash that an engine believes in whose flash is gone: it is never used.
const WITHOUT_FLASH_BYTES: u64 = 64 << 20;

/// Times a pool that is in use is looked at before what was found is believed to be damaged.
const LOOKS: u32 = 3;

/// How to make a pool.
#[derive(Clone, Debug, Default)]
pub struct CreateOptions {
    /// Make a new file of this many bytes.
    pub size: Option<u64>,
    /// Only reserve a new file's space instead of writing all of it once. The file system then
    /// does that work during the first writes to the cache, which it slows down.
    pub quick: bool,
    /// Overwrite what is there.
    pub force: bool,
    /// The user's name for the pool.
    pub label: String,
    /// Everything is to be on two devices.
    pub twice: bool,
}

/// A pool whose flash this process has to itself.
pub struct Pool {
    /// Its only flash device, or the first that is there.
    media: Arc<Device>,
    /// An engine runs its log.
    served: bool,
    /// All of them.
    flash: FlashDevices,
    /// What the others say of themselves.
    members: Members,
    superblock: Superblock,
    registry: Registry,
    /// Who names what in it.
    named: Named,
    /// Where that is stored.
    places: Places,
    /// A change was not stored, or in one place only: which one counts, the next store decides.
    unsettled: bool,
    /// Why flash refused the last write of ours, if it did.
    refusal: Option<Refusal>,
    /// The superblock or a marker says durably that nothing on flash is to be trusted, so what else the
    /// registry says of it may stay in RAM.
    covered: bool,
    /// What is known of it beside the flash.
    beside: Option<Arc<Beside>>,
    /// There is no flash: where it was.
    gone_from: Option<PathBuf>,
    /// It has taken the place of another flash, and is served for the first time.
    adopted: bool,
}

/// What a pool's registry and superblock are written to: the first device, or, where everything is there twice, the two
/// that carry them.
fn tables(flash: &FlashDevices, first: &Arc<Device>, served: bool) -> Box<dyn Media> {
    match flash.are_twice() {
        true if served => Box::new(flash.joined().waiting()),
        true => Box::new(flash.joined()),
        false => Box::new(first.clone()),
    }
}

/// An error of opening `path`, in the words of the control plane.
pub(crate) fn opening(path: &Path, error: OpenError) -> Error {
    let path = path.display();
    match error {
        OpenError::InUse(found) => Error::conflict(found.to_string(), found.remedy()),
        OpenError::Open { source, .. } => Error::unavailable(
            format!("cannot open {path}: {source}"),
            "check the path and its permissions",
        ),
        OpenError::NotBlock(_) => Error::invalid(
            format!("{path} is neither a regular file nor a block device"),
            "give one of those",
        ),
        OpenError::Create { source, .. } => Error::unavailable(
            format!("cannot create {path}: {source}"),
            "check free space and permissions",
        ),
        other @ OpenError::Alignment { .. } => Error::of(Kind::Invalid, other.fault()),
    }
}

/// An error of the format layer, with the path it is about.
pub fn format_error(path: &Path, error: &FormatError) -> Error {
    let kind = match error {
        FormatError::Io { .. } => Kind::Unavailable,
        FormatError::NotAPool | FormatError::NotFound { .. } | FormatError::TooSmall { .. } => {
            Kind::Invalid
        }
        _ => Kind::Refused,
    };
    Error::of(kind, error.fault().within(path.display()))
}

/// Formats `path` as a new pool.
pub fn create(path: &Path, options: &CreateOptions) -> Result<PoolInfo> {
    create_with(path, options, &mut |_, _| true)
}

/// The same; `progress` is told how many bytes of how many of a new file are written, and calls
/// it off by returning false. Then nothing is left behind, and what was to be replaced is still there.
pub fn create_with(
    path: &Path,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<PoolInfo> {
    let made = create_as(path, options, Legacy::default(), progress)?;
    let info = made.info();
    Ok(PoolInfo {
        // It may have been made under another name.
        flash: vec![path.display().to_string()],
        notices: crate::place::sparse_notice(made.media(), path),
        ..info
    })
}

/// What a pool has that gets a new flash device.
struct Legacy {
    pool: Uuid,
    registry: Registry,
    /// Younger than this is the new device.
    older: u64,
}

impl Default for Legacy {
    fn default() -> Legacy {
        Legacy {
            pool: Uuid::new_v4(),
            registry: Registry::default(),
            older: 0,
        }
    }
}

/// Formats `path` as the flash of a pool whose own is gone: its disks are there at the next start, and the cache fills again.
/// Of several pools that are known in `state_dir`, `pool` says which. Its daemon must not be running.
///
/// Returns the pool, and the names of disks of which something was dirty on the flash that is gone.
pub fn adopt_flash(
    path: &Path,
    options: &CreateOptions,
    state_dir: &Path,
    pool: Option<&str>,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(PoolInfo, Vec<String>)> {
    let beside = heir_of(state_dir, pool)?;
    let notes = beside.notes();
    if crate::beside::all_there(&notes.flash) && !options.force {
        return Err(Error::refused(
            format!(
                "the flash of pool {} is still there: {}",
                notes.pool,
                crate::beside::listed(&notes.flash)
            ),
            "serve it; or, if it is to be given up with everything dirty on it, add --force",
        ));
    }
    let mut registry = beside.registry();
    registry.generation = 0;
    for record in &mut registry.disks {
        // Of another log's segments.
        record.since_seq = 0;
    }
    let label = match options.label.as_str() {
        "" => notes.label.clone(),
        label => label.to_owned(),
    };
    let options = CreateOptions {
        label,
        ..options.clone()
    };
    let legacy = Legacy {
        pool: notes.pool,
        registry,
        older: notes.device_created,
    };
    let made = create_as(path, &options, legacy, progress)?;
    let mut lost = Vec::new();
    let noted = beside.note(|notes| {
        made.take_over(notes);
        notes.flash = crate::beside::shown(path);
        lost = notes.lost.iter().collect();
    });
    noted.map_err(|e| {
        Error::unavailable(
            format!("cannot write {}: {e}", beside.path().display()),
            "put that right, and serve the pool: it is whole",
        )
    })?;
    let names = lost.iter().filter_map(|id| made.record(*id));
    let names = names.map(|record| record.name.clone()).collect();
    let info = PoolInfo {
        flash: vec![path.display().to_string()],
        ..made.info_with_origins()
    };
    Ok((info, names))
}

/// The pool that is to get flash.
fn heir_of(state_dir: &Path, pool: Option<&str>) -> Result<Beside> {
    let known = crate::beside::known(state_dir)?;
    let named = |notes: &&PoolNotes| pool.is_none_or(|pool| notes.pool.to_string() == pool);
    let found: Vec<&PoolNotes> = known.iter().filter(named).collect();
    let listed = |all: &[&PoolNotes]| {
        let list = all.iter().map(|n| match n.label.as_str() {
            "" => format!("{} (flash was {})", n.pool, crate::beside::listed(&n.flash)),
            label => format!(
                "{} ({label}, flash was {})",
                n.pool,
                crate::beside::listed(&n.flash)
            ),
        });
        list.collect::<Vec<_>>().join(", ")
    };
    let one = match found.as_slice() {
        [one] => one.pool,
        [] => {
            let all: Vec<&PoolNotes> = known.iter().collect();
            return Err(Error::invalid(
                format!(
                    "{} knows {}",
                    state_dir.display(),
                    match all.as_slice() {
                        [] => "no pool".to_owned(),
                        all => format!("no such pool, only {}", listed(all)),
                    }
                ),
                "name the directory with --state-dir that `hearth serve` was given; for a new pool use `hearth pool create`",
            ));
        }
        several => {
            return Err(Error::invalid(
                format!("there are several pools: {}", listed(several)),
                "say which one with --pool UUID",
            ));
        }
    };
    Beside::of(state_dir, &one)?.ok_or_else(|| {
        Error::unavailable(
            format!("what is known of pool {one} has just gone"),
            "look whether somebody exports it",
        )
    })
}

/// Segments of an earlier life of this device would be believed: they carry the pool's number.
fn wipe_segments(file: &BlockFile, layout: &Layout) -> std::io::Result<()> {
    let zeros = Buf::zeroed(BLOCK as usize).all();
    let mut block = vec![0; BLOCK as usize];
    for seg in 0..layout.segment_count {
        for at in [layout.segment_offset(seg), layout.summary_offset(seg)] {
            file.read_at(at, &mut block)?;
            if block.iter().any(|b| *b != 0) {
                file.write_at(at, zeros.bytes())?;
            }
        }
    }
    file.flush()
}

/// Opens or makes what is to be formatted, after it is certain that nothing is lost with it.
fn prepare(
    path: &Path,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Prepared> {
    let mut replaced = None;
    let file = match options.size {
        Some(size) => {
            // Too small is found out before the space is taken.
            least(path, size)?;
            replaced = Replaced::find(path, options.force)?;
            let file = match &mut replaced {
                Some(replaced) => replaced.make(size)?,
                None => BlockFile::create_sized(path, size).map_err(|e| opening(path, e))?,
            };
            if !options.quick
                && let Err(e) = write_out(path, &file, progress)
            {
                drop(file);
                if replaced.is_none() {
                    // The error that matters is the one returned.
                    let _ = std::fs::remove_file(path);
                }
                return Err(e);
            }
            file
        }
        None => BlockFile::open(path, OpenMode::default()).map_err(|e| match &e {
            OpenError::Open { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Error::invalid(
                    format!("{} does not exist", path.display()),
                    if path.starts_with("/dev") {
                        "check the name of the device"
                    } else {
                        "check the path, or add --size to make a new file"
                    },
                )
            }
            _ => opening(path, e),
        })?,
    };
    if options.size.is_none() && !options.force {
        refuse_foreign(path, &file)?;
    }
    Ok(Prepared { file, replaced })
}

/// A device that is about to be formatted.
struct Prepared {
    file: BlockFile,
    replaced: Option<Replaced>,
}

/// Gives what the device had its space for back, and what the pool needs for itself, up to block `own_blocks`, room:
/// also in a sparse file on a file system that becomes full later.
fn take_room(path: &Path, file: &BlockFile, own_blocks: u64) -> Result<()> {
    let size = file.size();
    if file.is_device() {
        // Gives the SSD all its space back; one that cannot do it works nevertheless.
        if let Err(e) = file.discard(0, size) {
            tracing::debug!(path = %path.display(), "cannot discard: {e}");
        }
    }
    let own = own_blocks * BLOCK;
    file.reserve(own).map_err(|e| {
        opening(
            path,
            OpenError::Create {
                path: path.to_owned(),
                size: own,
                source: e,
            },
        )
    })
}

/// The new pool is whole: what was at the path makes room for it, and its name stays.
fn settle_name(path: &Path, options: &CreateOptions, replaced: Option<Replaced>) -> Result<()> {
    match replaced {
        Some(replaced) => replaced.done(path),
        // After a power cut the new file would be there, without its name.
        None if options.size.is_some() => sync_names(path).map_err(|e| {
            Error::unavailable(
                format!("cannot store {}: {e}", path.display()),
                "check free space and the file system's health",
            )
        }),
        None => Ok(()),
    }
}

fn create_as(
    path: &Path,
    options: &CreateOptions,
    legacy: Legacy,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Pool> {
    let Prepared { file, replaced } = prepare(path, options, progress)?;
    let layout = layout(path, file.size())?;
    take_room(path, &file, layout.segment_start)?;
    if options.size.is_none() && legacy.older > 0 {
        wipe_segments(&file, &layout).map_err(|e| {
            Error::unavailable(
                format!("cannot clear {}: {e}", path.display()),
                "check the device's health",
            )
        })?;
    }
    let mut media = Arc::new(Device::new(file));
    let now = crate::beside::now_unix().max(legacy.older + 1);
    let mut superblock = Superblock::new(layout, legacy.pool, Uuid::new_v4(), &options.label, now);
    // The superblock comes last: until it is there, this is no pool.
    let stored = Superblock::erase(&mut media)
        .and_then(|()| first_registry(&mut media, &superblock, legacy.registry))
        .and_then(|made| superblock.store(&mut media).map(|()| made));
    let (registry, places) = stored.map_err(|e| format_error(path, &e))?;
    settle_name(path, options, replaced)?;
    Ok(Pool {
        flash: FlashDevices::one(media.clone()),
        members: Members::new(Vec::new()),
        unsettled: false,
        refusal: None,
        covered: false,
        beside: None,
        gone_from: None,
        adopted: false,
        served: false,
        media,
        superblock,
        named: Named::of(&registry),
        registry,
        places,
    })
}

/// Stores the first registry of a new device.
fn first_registry(
    media: &mut dyn Media,
    superblock: &Superblock,
    mut registry: Registry,
) -> std::result::Result<(Registry, Places), FormatError> {
    let layout = &superblock.layout;
    let mut places = Places::new(layout)?;
    let nothing = Registry::default();
    places.store(media, layout, superblock.pool, &nothing, &mut registry)?;
    Ok((registry, places))
}

/// Refuses a size that is none for a flash device, before its file is made: what one needs that is alone.
fn least(path: &Path, size: u64) -> Result<()> {
    layout(path, size).map(drop)
}

/// The layout of a new pool of `size` bytes.
pub(crate) fn layout(path: &Path, size: u64) -> Result<Layout> {
    Layout::for_device(size, Layout::segment_blocks_for(size)).map_err(|e| format_error(path, &e))
}

/// A file that a new pool takes the place of, once it is whole: until then it is needed, should the
/// new one turn out not to fit.
struct Replaced {
    /// Locked as long as this is here: nobody else uses it.
    _old: BlockFile,
    new: PathBuf,
    /// `new` has been made, and has not yet taken its place.
    mine: bool,
}

impl Replaced {
    /// What is at `path`, if anything is and it may be replaced.
    fn find(path: &Path, force: bool) -> Result<Option<Replaced>> {
        let Ok(meta) = std::fs::symlink_metadata(path) else {
            return Ok(None);
        };
        if !force || !meta.is_file() {
            return Err(Error::refused(
                format!(
                    "{} exists already, and --size makes a new file",
                    path.display()
                ),
                if meta.is_file() {
                    "leave --size out to use it as it is, or add --force to replace it"
                } else {
                    "leave --size out"
                },
            ));
        }
        let _old = BlockFile::open(path, OpenMode::default()).map_err(|e| opening(path, e))?;
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        if new.symlink_metadata().is_ok() {
            return Err(Error::refused(
                format!(
                    "{} is there already, under which the new pool is made before it takes the place of the old one",
                    new.display()
                ),
                "remove it if it is what a killed run left, or remove the old pool first",
            ));
        }
        Ok(Some(Replaced {
            _old,
            new,
            mine: false,
        }))
    }

    /// The new pool is whole.
    fn done(mut self, path: &Path) -> Result<()> {
        // After a power cut the old pool would be back under the name, and be believed.
        let renamed = std::fs::rename(&self.new, path).and_then(|()| {
            self.mine = false;
            sync_names(path)
        });
        renamed.map_err(|e| {
            Error::unavailable(
                format!("cannot replace {}: {e}", path.display()),
                "check free space and the directory's permissions",
            )
        })
    }

    /// Makes the new file.
    fn make(&mut self, size: u64) -> Result<BlockFile> {
        let file = BlockFile::create_sized(&self.new, size).map_err(|e| {
            Error::unavailable(
                e.fault().within("cannot make the new pool").what,
                "the old pool stays until the new one is whole; if there is no room for both, remove it first",
            )
        })?;
        self.mine = true;
        Ok(file)
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        if self.mine {
            let _ = std::fs::remove_file(&self.new);
        }
    }
}

/// Writes a new file once from end to end, so that the file system has nothing left to decide:
/// a write into reserved but unwritten space takes it several times as long, and not in parallel.
fn write_out(
    path: &Path,
    file: &BlockFile,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let failed = |e| {
        Error::unavailable(
            format!("cannot write {}: {e}", path.display()),
            "check free space and the device's health",
        )
    };
    let zeros = Buf::zeroed(WRITE_OUT_BYTES as usize).all();
    let size = file.size();
    let mut at = 0;
    while at < size {
        if !progress(at, size) {
            return Err(Error::unavailable(
                format!("{} was not made: interrupted", path.display()),
                "nothing was changed; run the command again",
            ));
        }
        let n = WRITE_OUT_BYTES.min(size - at);
        file.write_at(at, &zeros.bytes()[..n as usize])
            .map_err(failed)?;
        at += n;
    }
    progress(size, size);
    file.flush().map_err(failed)
}

fn refuse_foreign(path: &Path, file: &BlockFile) -> Result<()> {
    let found = hearth_format::foreign::identify(
        &mut |offset, data| file.read_at(offset, data),
        file.size(),
    )
    .map_err(|e| {
        Error::unavailable(
            format!("cannot read {}: {e}", path.display()),
            "check the device's health",
        )
    })?;
    match found {
        None => Ok(()),
        Some(found) => Err(Error::refused(
            format!("{} carries {}", path.display(), found.what),
            "add --force to overwrite it, if it is not needed",
        )),
    }
}

impl Pool {
    /// Opens a pool for this process alone.
    pub fn open(path: &Path) -> Result<Pool> {
        Pool::open_all(&[path.to_owned()])
    }

    /// The same of a pool of all these devices, in any order.
    pub fn open_all(paths: &[PathBuf]) -> Result<Pool> {
        Pool::load(paths, OpenMode::default())
    }

    /// Opens a pool for this process alone; if its flash cannot be written at all, to be read only,
    /// and with the reason. Where its devices have been changed since the list was made, it is found all the same, with what
    /// is known of it in `state_dir`.
    pub fn open_for_service(paths: &[PathBuf], state_dir: &Path) -> Result<(Pool, Option<String>)> {
        match Pool::open_writable(paths) {
            // It would be served without a device that has come since the list was made, and that one lost by it.
            Ok((pool, why)) if pool.flash().misses_one() => {
                let Some(today) = change::of_today(paths, state_dir) else {
                    return Ok((pool, why));
                };
                drop(pool);
                let shown = crate::beside::listed(&crate::beside::shown_all(&today));
                tracing::warn!(
                    "the list of flash devices is not that of today; serving the pool on {shown}: give that list from now on, with --flash or in the settings"
                );
                // Not with the list that was given if that fails: it would lose a device for what may be over in a moment.
                Pool::open_writable(&today)
            }
            Err(e) if matches!(e.kind, Kind::Refused | Kind::Invalid | Kind::Unavailable) => {
                let Some(today) = change::of_today(paths, state_dir) else {
                    return Err(e);
                };
                let opened = Pool::open_writable(&today)?;
                let shown = crate::beside::listed(&crate::beside::shown_all(&today));
                tracing::warn!(
                    "the list of flash devices is not that of today: {e}; serving the pool on {shown}: give that list from now on, with --flash or in the settings"
                );
                Ok(opened)
            }
            other => other,
        }
    }

    /// Looks at a pool as [`open_for_service`](Self::open_for_service) would open it.
    pub fn look_for_service(paths: &[PathBuf], state_dir: &Path) -> Result<Pool> {
        let looked = Pool::look_at(paths);
        if let Ok(pool) = &looked
            && !pool.flash().misses_one()
        {
            return looked;
        }
        match change::of_today(paths, state_dir) {
            Some(today) => Pool::look_at(&today),
            None => looked,
        }
    }

    fn open_writable(paths: &[PathBuf]) -> Result<(Pool, Option<String>)> {
        let read_only = || paths.iter().find(|path| crate::place::is_read_only(path));
        match Pool::open_all(paths) {
            Err(e) if e.kind == Kind::Unavailable => {
                let Some(path) = read_only() else {
                    return Err(e);
                };
                let mode = OpenMode {
                    read_only: true,
                    unlocked: false,
                };
                let why = format!("{} is read-only", path.display());
                Ok((Pool::load(paths, mode)?, Some(why)))
            }
            other => Ok((other?, None)),
        }
    }

    /// Looks at a pool that somebody else may be using.
    pub fn look(path: &Path) -> Result<Pool> {
        Pool::look_at(&[path.to_owned()])
    }

    /// The same of a pool of all these devices.
    pub fn look_at(paths: &[PathBuf]) -> Result<Pool> {
        let mode = OpenMode {
            read_only: true,
            unlocked: true,
        };
        let mut again = LOOKS - 1;
        loop {
            match Pool::load(paths, mode) {
                // They may have been storing the registry just now.
                Err(e) if e.kind == Kind::Refused && again > 0 => again -= 1,
                other => return other,
            }
        }
    }

    fn load(paths: &[PathBuf], mode: OpenMode) -> Result<Pool> {
        let Opened {
            flash,
            superblock,
            members,
        } = devices::open(paths, mode)?;
        let media = flash.first().ok_or_else(devices::none_given)?.clone();
        let path = media.path().to_owned();
        let path = path.as_path();
        if superblock.must_stay_read_only() && !mode.read_only {
            return Err(Error::refused(
                format!(
                    "{} has features this version of Hearth must not write",
                    path.display()
                ),
                "open it with a newer Hearth",
            ));
        }
        let mut tables = tables(&flash, &media, false);
        let (registry, places) = Places::load(&mut *tables, &superblock.layout, superblock.pool)
            .map_err(|e| format_error(path, &e))?;
        Ok(Pool {
            // What only one place has is stored again before anything else rests on it.
            unsettled: !places.is_sound(),
            refusal: None,
            covered: false,
            beside: None,
            gone_from: None,
            adopted: false,
            served: false,
            media,
            flash,
            members,
            superblock,
            named: Named::of(&registry),
            registry,
            places,
        })
    }

    /// Its flash devices.
    pub fn flash(&self) -> &FlashDevices {
        &self.flash
    }

    /// What its registry and superblock are written to.
    fn tables(&self) -> Box<dyn Media> {
        tables(&self.flash, &self.media, self.served)
    }

    /// From now on an engine runs its log, and says which devices are lost.
    pub(crate) fn is_served(&mut self) {
        self.served = true;
    }

    /// Gives several devices a new stamp, before anything else is written to any of them.
    pub(crate) fn stamp(&mut self) -> Result<()> {
        if self.superblock.is_twice() {
            let mut media = self.flash.joined();
            let stamped = self.members.stamp_twice(&mut self.superblock, &mut media);
            return stamped.map_err(|e| self.refused(&e));
        }
        if self.members.others().is_empty() {
            return Ok(());
        }
        let mut devices: Vec<Arc<Device>> = self.flash.iter().cloned().collect();
        let stamped = self.members.stamp(&mut self.superblock, &mut devices);
        stamped.map_err(|e| self.refused(&e))
    }

    /// The flash device, of several the first: it carries the registry.
    pub fn media(&self) -> &Arc<Device> {
        &self.media
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        match &self.gone_from {
            Some(path) => path,
            None => self.media.path(),
        }
    }

    /// Where all its flash devices are.
    pub fn paths(&self) -> Vec<PathBuf> {
        match &self.gone_from {
            Some(path) => vec![path.clone()],
            None => self.flash.paths(),
        }
    }

    /// The registry as it is on flash.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The record of a disk.
    pub fn record(&self, id: u16) -> Option<&DiskRecord> {
        self.registry.by_id(id)
    }

    /// The disks that may name the origin, or a file below it, that another disk names, in the order of the
    /// registry. What they name has to be compared; no other disk's need be.
    pub(crate) fn near(&self, spec: &OriginSpec, chain: &[String]) -> Vec<SharedRecord> {
        let near = self.named.near(spec, chain).into_iter();
        let mut places: Vec<usize> = near.filter_map(|id| self.registry.position(id)).collect();
        places.sort_unstable();
        let disks = &self.registry.disks;
        places
            .iter()
            .filter_map(|at| disks.get(*at).cloned())
            .collect()
    }

    /// True if there are files below any disk's image.
    pub(crate) fn any_chain(&self) -> bool {
        self.named.any_chain()
    }

    /// Bytes of RAM that index, policy and RAM stage take, with a stage of `stage` bytes or else
    /// what it has at least.
    pub fn footprint(&self, stage: Option<u64>) -> u64 {
        let stage = stage.map(|bytes| (bytes / BLOCK) as usize);
        Engine::footprint(self.superblock.layout.slots(), stage)
    }

    /// Bytes of flash for cached data.
    pub fn capacity(&self) -> u64 {
        self.segments() * u64::from(self.superblock.layout.data_blocks()) * BLOCK
    }

    /// Segments of the log that are on its devices.
    fn segments(&self) -> u64 {
        let each = self.superblock.segments();
        let all: u64 = each
            .iter()
            .map(|range| u64::from(range.end - range.start))
            .sum();
        match self.superblock.is_twice() {
            true => all / 2,
            false => all,
        }
    }

    /// Changes the registry; when this returns `Ok` the change is durable. Else nothing changed in RAM,
    /// and on flash the old or the new one is found until something is stored again.
    ///
    /// What is kept beside the flash follows. If the flash does not take the change, that alone
    /// has it, and says that it counts.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut Registry) -> Result<T>) -> Result<T> {
        let mut next = self.registry.clone();
        let value = change(&mut next)?;
        if next != self.registry || self.unsettled {
            self.store(&mut next)?;
            self.named.follow(&self.registry, &next);
            self.registry = next;
        }
        Ok(value)
    }

    fn store(&mut self, next: &mut Registry) -> Result<()> {
        if let (Some(_), Some(beside)) = (&self.gone_from, &self.beside) {
            return beside
                .store(next)
                .map_err(|e| format_error(beside.path(), &e));
        }
        self.unsettled = true;
        let mut tables = self.tables();
        let stored = self.places.store(
            &mut *tables,
            &self.superblock.layout,
            self.superblock.pool,
            &self.registry,
            next,
        );
        let Some(beside) = self.beside.clone() else {
            self.unsettled = stored.is_err();
            return stored.map_err(|e| self.refused(&e));
        };
        match stored {
            Ok(()) => {
                self.unsettled = false;
                let followed = beside
                    .follow(next)
                    .map_err(|e| e.to_string())
                    .and_then(|()| match beside.says(|notes| notes.alone) {
                        true => beside.note(|n| n.alone = false).map_err(|e| e.to_string()),
                        false => Ok(()),
                    });
                if let Err(e) = followed {
                    tracing::error!(path = %beside.path().display(), "what the flash has of the registry cannot be kept beside it: {e}");
                }
                Ok(())
            }
            // Where neither takes it, what is on flash counts, and whoever asked is told why.
            Err(e) => {
                let error = self.refused(&e);
                let kept = beside.store(next).map_err(|e| e.to_string());
                let kept =
                    kept.and_then(|()| beside.note(|n| n.alone = true).map_err(|e| e.to_string()));
                kept.map_err(|_| error)
            }
        }
    }

    /// True if the flash has the registry as it is.
    pub(crate) fn is_settled(&self) -> bool {
        !self.unsettled
    }

    /// Disks that are ordered.
    pub(crate) fn ordered(&self) -> Vec<u16> {
        let disks = self.registry().disks.iter();
        let ordered = disks.filter(|d| d.mode == hearth_format::CacheMode::WriteBackOrdered);
        ordered.map(|d| d.id).collect()
    }

    /// Notes beside the flash of which ordered disks the origin is of no one time, before anything is given to
    /// them.
    pub(crate) fn note_unordered(&self, engine: &hearth_engine::Engine) -> Result<()> {
        let Some(beside) = self.beside().filter(|_| !self.is_without_flash()) else {
            return Ok(());
        };
        let now = hearth_io::now_ns();
        let disks = self.registry().disks.iter();
        let mixed: Vec<_> = disks
            .filter(|d| d.mode == hearth_format::CacheMode::WriteBackOrdered)
            .filter(|d| {
                let order = engine.order(d.id, now);
                order.is_none_or(|o| o.upto == hearth_engine::Upto::Mixed)
            })
            .map(|d| (d.id, d.serial, 0))
            .collect();
        beside.note_order(&mixed).map_err(|e| {
            Error::unavailable(
                format!("cannot write beside {}: {e}", beside.path().display()),
                "make room there, and start again",
            )
        })
    }

    /// Where its flash was when that was noted last.
    pub(crate) fn noted_flash(&self, state_dir: &Path) -> Vec<PathBuf> {
        match Beside::of(state_dir, &self.superblock.pool) {
            Ok(Some(beside)) => {
                let noted = beside.notes().flash;
                let paths = noted.split('\n').filter(|path| !path.is_empty());
                paths.map(PathBuf::from).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What is known of it beside its flash.
    pub(crate) fn beside(&self) -> Option<&Arc<Beside>> {
        self.beside.as_ref()
    }

    /// The flash has taken the place of another one, and is served for the first time.
    pub(crate) fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// True if its flash is gone.
    pub(crate) fn is_without_flash(&self) -> bool {
        self.gone_from.is_some()
    }

    /// Takes what is kept of it in `state_dir`, and believes of the flash what still counts. Nothing is stored:
    /// what changes in the registry is stored when the pool is [settled](Self::settle).
    ///
    /// Without that directory a pool is served as well; then all that is known of it is on flash.
    pub(crate) fn remember(&mut self, state_dir: &Path) -> Result<()> {
        let superblock = &self.superblock;
        let (pool, device) = (superblock.pool, superblock.device);
        let Some(beside) = Beside::of(state_dir, &pool)? else {
            let mut notes = PoolNotes::new(pool, device, superblock.created_unix_s);
            // As long as nobody has looked, it may be so of any disk.
            notes.dirty = self.registry.disks.iter().map(|disk| disk.id).collect();
            self.describe(&mut notes);
            match Beside::make(state_dir, notes, &self.registry) {
                Ok(made) => self.beside = Some(Arc::new(made)),
                Err(e) => tracing::warn!("{e}; if the flash dies, its disks have to be added anew"),
            }
            return Ok(());
        };
        let (noted, peer) = (beside.notes().device, superblock.peer);
        let opened = beside.notes().opened;
        if noted != device && noted == peer && superblock.generation < opened {
            return Err(Error::refused(
                format!(
                    "{} is older than pool {pool}: that was served since from a device which was to be replaced, and was not in the end",
                    self.path().display()
                ),
                format!(
                    "serve that one: the pool was on {} last",
                    crate::beside::listed(&beside.notes().flash)
                ),
            ));
        }
        if noted != device && noted == peer {
            // It has all that the other one had.
            let created = superblock.created_unix_s;
            let noted =
                beside.note(|notes| (notes.device, notes.device_created) = (device, created));
            noted.map_err(|e| {
                Error::unavailable(
                    format!("cannot write {}: {e}", beside.path().display()),
                    "put that right, and try again",
                )
            })?;
        }
        let notes = beside.notes();
        // Nobody has served it since it was formatted, and somebody had served the pool before.
        let unopened = notes.device != device || notes.opened == 0;
        self.adopted = unopened && superblock.created_unix_s >= notes.started;
        if notes.device != device && superblock.created_unix_s <= notes.device_created {
            return Err(Error::refused(
                format!(
                    "{} was flash of pool {pool} before another device took its place{}",
                    self.path().display(),
                    match notes.flash.as_str() {
                        "" => String::new(),
                        path => format!(", which is at {}", crate::beside::listed(path)),
                    }
                ),
                "serve that one; what was dirty on this one is found with `hearth rescue`",
            ));
        }
        if notes.device != device {
            // It took the other's place, and whoever had it do so was stopped before that was noted.
            let noted = beside.note(|notes| self.take_over(notes));
            noted.map_err(|e| {
                Error::unavailable(
                    format!("cannot write {}: {e}", beside.path().display()),
                    "put that right, and try again",
                )
            })?;
        }
        if notes.device == device && superblock.generation < notes.opened {
            tracing::warn!(
                path = %self.path().display(),
                "the flash holds an older state of the pool than the one served last"
            );
            // Opening it raises its generation: a start that is cut off must not make the next one believe it.
            let disks: Vec<u16> = self.registry.disks.iter().map(|disk| disk.id).collect();
            let noted = beside.note(|notes| {
                for id in disks {
                    notes.left.insert(id);
                }
            });
            noted.map_err(|e| {
                Error::unavailable(
                    format!("cannot write {}: {e}", beside.path().display()),
                    "put that right, and try again",
                )
            })?;
            self.distrust_in_ram(|_| true);
        }
        if notes.device == device && notes.alone {
            tracing::info!("the registry was changed while the flash took no writes; that counts");
            let generation = self.registry.generation;
            self.registry = Registry {
                generation,
                ..beside.registry()
            };
            self.named = Named::of(&self.registry);
            self.unsettled = true;
            self.places.begin_anew();
        }
        if !notes.left.is_empty() {
            tracing::warn!(
                "disks were served without this flash; what it holds of them may be old"
            );
            self.distrust_in_ram(|id| notes.left.contains(id));
        }
        self.beside = Some(Arc::new(beside));
        Ok(())
    }

    /// Makes origins look changed to disks, until their caches have been judged anew; stored when the pool is.
    fn distrust_in_ram(&mut self, which: impl Fn(u16) -> bool) {
        self.unsettled = true;
        self.places.begin_anew();
        for record in &mut self.registry.disks {
            if which(record.id) {
                crate::origin::distrust(record);
            }
        }
    }

    /// This flash is in the place of the one that was noted.
    fn take_over(&self, notes: &mut PoolNotes) {
        for id in notes.dirty.iter() {
            notes.lost.insert(id);
        }
        notes.dirty = IdSet::default();
        notes.left = IdSet::default();
        notes.alone = false;
        notes.opened = 0;
        notes.device = self.superblock.device;
        notes.device_created = self.superblock.created_unix_s;
    }

    fn describe(&self, notes: &mut PoolNotes) {
        notes.device = self.superblock.device;
        notes.device_created = self.superblock.created_unix_s;
        notes.started = crate::beside::now_unix();
        notes.flash = crate::beside::shown_all(&self.paths());
        notes.label.clone_from(&self.superblock.label);
    }

    /// Notes beside the flash what opening it has shown: which disks have something there that their origins
    /// lack. What was noted before counts on if the flash took no writes. Superblocks of generation `stored` are on flash: a
    /// device that was lost while they were stored has an older one.
    pub(crate) fn note_opened(&self, dirty: IdSet, writable: bool, stored: u64) -> Result<()> {
        let Some(beside) = &self.beside else {
            return Ok(());
        };
        let settled = writable && !self.unsettled;
        // As found: opening it for writing has stored the next one.
        let found = self.superblock.generation;
        let generation = match self.flash.lost().is_empty() {
            true => found + 1,
            false => stored.max(found + 1),
        };
        let noted = beside.note(|notes| {
            self.describe(notes);
            notes.dirty = dirty;
            if settled {
                notes.opened = notes.opened.max(generation);
                notes.alone = false;
                notes.left = IdSet::default();
            }
        });
        let followed =
            noted.and_then(|()| beside.follow(&self.registry).map_err(std::io::Error::other));
        followed.map_err(|e| {
            Error::unavailable(
                format!("cannot write {}: {e}", beside.path().display()),
                "see why; what is noted there would be believed if the flash were lost",
            )
        })
    }

    /// The pool of which all that is left is what was kept beside its flash, if that is so: it says why there is no flash.
    /// Of several devices one that is gone is enough: what the others hold is of no use alone, unless everything is there
    /// twice.
    pub(crate) fn without_flash(
        state_dir: &Path,
        flash_given: &[PathBuf],
    ) -> Result<Option<(Pool, String)>> {
        let mut found = None;
        for path in flash_given {
            // Not before it is certain that something is known: a mistyped name is none of this.
            if crate::beside::pool_at(state_dir, path)?.is_some()
                && let Some(why) = crate::beside::gone(path)
            {
                found = Some((path.as_path(), why));
                break;
            }
        }
        let Some((flash, why)) = found else {
            return Ok(None);
        };
        if devices::is_half_there(flash_given) {
            return Ok(None);
        }
        let Some(beside) = Beside::whose_flash_was_at(state_dir, flash)? else {
            return Ok(None);
        };
        let notes = beside.notes();
        let mode = OpenMode {
            read_only: true,
            unlocked: true,
        };
        // Nothing is asked of it: the engine has no flash.
        let stand_in =
            BlockFile::open(beside.path(), mode).map_err(|e| opening(beside.path(), e))?;
        let layout = layout(beside.path(), WITHOUT_FLASH_BYTES)?;
        let registry = beside.registry();
        let mut superblock = Superblock::new(
            layout,
            notes.pool,
            notes.device,
            &notes.label,
            notes.device_created,
        );
        superblock.state = PoolState::Failed;
        let served = |id: &u16| !notes.dirty.contains(*id) && !notes.lost.contains(*id);
        let left = registry.disks.iter().map(|disk| disk.id).filter(served);
        let left: Vec<u16> = left.collect();
        // Before the first of them is: from then on what is on flash of them is old.
        let noted = beside.note(|notes| {
            notes.started = crate::beside::now_unix();
            notes.alone = true;
            for id in left {
                notes.left.insert(id);
            }
        });
        noted.map_err(|e| {
            Error::unavailable(
                format!(
                    "{why}, and that its disks go on without it cannot be noted in {}: {e}",
                    beside.path().display()
                ),
                "put that right, or the flash back",
            )
        })?;
        let media = Arc::new(Device::new(stand_in));
        let pool = Pool {
            flash: FlashDevices::one(media.clone()),
            members: Members::new(Vec::new()),
            media,
            places: Places::new(&superblock.layout).map_err(|e| format_error(flash, &e))?,
            superblock,
            named: Named::of(&registry),
            registry,
            unsettled: false,
            refusal: None,
            covered: false,
            beside: Some(Arc::new(beside)),
            gone_from: Some(flash.to_owned()),
            adopted: false,
            served: false,
        };
        Ok(Some((pool, why)))
    }

    /// A blank device in RAM of the pool's layout, for an engine whose flash is gone.
    pub(crate) fn blank(&self) -> Result<Sparse> {
        let mut blank = Sparse::new(WITHOUT_FLASH_BYTES);
        let mut superblock = Superblock {
            state: PoolState::Open,
            ..self.superblock.clone()
        };
        let stored = superblock.store(&mut blank);
        stored.map_err(|e| format_error(self.path(), &e))?;
        Ok(blank)
    }

    /// Stores the registry again if it was not whole in both its places.
    pub(crate) fn settle(&mut self) -> Result<()> {
        if self.unsettled {
            tracing::warn!("one copy of the registry was not whole; it is stored again");
        }
        self.change(|_| Ok(()))
    }

    /// Changes what the registry says of origins and caches. Where flash takes no writes and that is
    /// noted elsewhere, the change stays in RAM.
    pub fn change_or_keep(&mut self, change: impl Fn(&mut Registry) -> Result<()>) -> Result<()> {
        match self.change(&change) {
            Err(_) if self.covered => {
                self.places.begin_anew();
                let old = self.registry.clone();
                let changed = change(&mut self.registry);
                self.named.follow(&old, &self.registry);
                changed
            }
            other => other,
        }
    }

    /// An error of the format layer, remembering whether flash refused to be written.
    fn refused(&mut self, error: &FormatError) -> Error {
        if let FormatError::Io { source, .. } = error {
            self.refusal = Some(crate::degraded::refusal(self.media.path(), source));
        }
        format_error(self.media.path(), error)
    }

    /// Why flash refused the last write of the registry or the superblock that failed.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// What the registry says of caches need not be stored any more: nothing is trusted anyway.
    pub(crate) fn set_covered(&mut self) {
        self.covered = true;
    }

    /// The pool's number for life.
    pub fn uuid(&self) -> String {
        self.superblock.pool.to_string()
    }

    /// Notes in the superblock that the flash was given up.
    pub(crate) fn mark_failed(&mut self) -> Result<()> {
        let before = self.superblock.state;
        self.superblock.state = PoolState::Failed;
        let stored = self.superblock.store_naming(&mut *self.tables());
        stored.map_err(|e| {
            self.superblock.state = before;
            self.refused(&e)
        })
    }

    fn has_failed(&self) -> bool {
        self.superblock.state == PoolState::Failed
            || crate::degraded::is_marked(self.path(), self.media.is_device(), &self.uuid())
    }

    /// As [`distrust_if_failed`](Self::distrust_if_failed), for this run only: what said so stays.
    pub(crate) fn distrust_in_ram_if_failed(&mut self) {
        if self.has_failed() {
            self.distrust_in_ram(|_| true);
        }
    }

    /// If the flash was given up by an earlier run, the origins may have gone on without it: every
    /// disk is marked so that nothing cached is trusted without being asked about.
    pub fn distrust_if_failed(&mut self) -> Result<()> {
        if !self.has_failed() {
            return Ok(());
        }
        tracing::warn!("the flash had failed before; what is on it may be older than the origins");
        self.distrust_all()?;
        crate::degraded::remove_markers(self.path(), self.media.is_device(), &self.uuid());
        Ok(())
    }

    /// Marks every disk so that nothing cached is trusted without being asked about.
    pub fn distrust_all(&mut self) -> Result<()> {
        self.change(|registry| {
            for record in &mut registry.disks {
                crate::origin::distrust(record);
            }
            Ok(())
        })
    }

    /// Notes which host uses the pool.
    pub fn note_host(&mut self, host: &str) -> Result<()> {
        if self.superblock.last_host == host {
            return Ok(());
        }
        if !self.superblock.last_host.is_empty() {
            tracing::info!(before = %self.superblock.last_host, now = host, "the pool comes from another host");
        }
        self.superblock.last_host = host.to_owned();
        let mut tables = self.tables();
        self.superblock
            .store_naming(&mut *tables)
            .map_err(|e| self.refused(&e))
    }

    /// The pool as reported.
    pub fn info(&self) -> PoolInfo {
        let layout = &self.superblock.layout;
        let state = match self.superblock.state {
            PoolState::Clean { .. } => "clean",
            // Opening a pool stores its superblock again.
            PoolState::Open if self.superblock.generation <= 1 => "new",
            PoolState::Open => "dirty",
            PoolState::Failed => "failed",
        };
        PoolInfo {
            uuid: self.superblock.pool.to_string(),
            label: self.superblock.label.clone(),
            flash: self
                .paths()
                .iter()
                .map(|path| path.display().to_string())
                .collect(),
            state: state.to_owned(),
            notices: Vec::new(),
            created: self.superblock.created_unix_s,
            device_bytes: self.flash.iter().map(|device| device.size()).sum(),
            devices: self.devices(),
            dirty_copies: if self.superblock.is_twice() { 2 } else { 1 },
            capacity: self.capacity(),
            segments: self.segments(),
            segment_bytes: u64::from(layout.segment_blocks) * BLOCK,
            ram: self.footprint(None),
            ram_stage: None,
            ram_stage_most: Config::stage_most_of(layout.slots() as usize) as u64 * BLOCK,
            cached: None,
            dirty: None,
            promised: 0,
            promised_most: 0,
            unknown: None,
            stuck: Vec::new(),
            recovery: None,
            io: None,
            threads: None,
            disks: Vec::new(),
        }
    }

    /// The pool with its disks, looking for their origins.
    pub fn info_with_origins(&self) -> PoolInfo {
        let disks = self.registry.plain_disks().map(|disk| DiskRef {
            name: disk.name.clone(),
            origin: disk.origin.clone(),
            size: disk.size,
            mode: mode_of(disk.mode),
            origin_found: crate::origin::is_found(&disk.origin, disk.size),
            cached: None,
            dirty: None,
        });
        PoolInfo {
            disks: disks.collect(),
            ..self.info()
        }
    }

    /// The same, with what is cached and dirty; of a pool that this process has locked.
    pub fn info_with_contents(&self) -> PoolInfo {
        let mut info = self.info_with_origins();
        match inspect::contents(self) {
            Ok((contents, lies)) => {
                show::add(&mut info.devices, &lies);
                info.cached = Some(contents.iter().map(|c| c.cached).sum());
                info.dirty = Some(contents.iter().fold(0, |n, c| c.dirty.saturating_add(n)));
                // Both are in the order of the registry.
                let all = self.registry.disks.iter().zip(contents);
                let plain = all.filter(|(record, _)| !record.is_file());
                for (disk, (_, found)) in info.disks.iter_mut().zip(plain) {
                    disk.cached = Some(found.cached);
                    disk.dirty = Some(found.dirty);
                }
            }
            Err(e) => info.unknown = Some(e.to_string()),
        }
        info
    }
}

/// A pool on `path` with what is cached and dirty, or, if somebody is using it, without.
pub fn show(paths: &[PathBuf]) -> Result<PoolInfo> {
    let mode = OpenMode {
        read_only: true,
        unlocked: false,
    };
    match Pool::load(paths, mode) {
        Ok(pool) => Ok(pool.info_with_contents()),
        Err(e) if e.kind == Kind::Conflict => Ok(PoolInfo {
            unknown: Some(
                "the pool is in use; its daemon tells it, with `hearth pool show` without --flash"
                    .to_owned(),
            ),
            ..Pool::look_at(paths)?.info_with_origins()
        }),
        Err(e) => Err(e),
    }
}

/// The API's word for a registry's mode.
pub fn mode_of(mode: hearth_format::CacheMode) -> CacheMode {
    match mode {
        hearth_format::CacheMode::WriteBack => CacheMode::WriteBack,
        hearth_format::CacheMode::WriteThrough => CacheMode::WriteThrough,
        hearth_format::CacheMode::WriteAround => CacheMode::WriteAround,
        hearth_format::CacheMode::Off => CacheMode::Off,
        hearth_format::CacheMode::WriteBackOrdered => CacheMode::WriteBackOrdered,
    }
}

/// The registry's word for an API's mode.
pub fn mode_to(mode: CacheMode) -> hearth_format::CacheMode {
    match mode {
        CacheMode::WriteBack => hearth_format::CacheMode::WriteBack,
        CacheMode::WriteThrough => hearth_format::CacheMode::WriteThrough,
        CacheMode::WriteAround => hearth_format::CacheMode::WriteAround,
        CacheMode::Off => hearth_format::CacheMode::Off,
        CacheMode::WriteBackOrdered => hearth_format::CacheMode::WriteBackOrdered,
    }
}

/// Refuses a RAM stage that the machine cannot hold; `free` is what it can.
pub fn check_stage(stage: Option<u64>, free: Option<u64>) -> Result<()> {
    match (stage, free) {
        (Some(stage), Some(free)) if stage > free => Err(Error::refused(
            format!(
                "--ram-stage {} is more than the {} of RAM that are free",
                human(stage),
                human(free)
            ),
            "lower it, or leave it out to have it chosen",
        )),
        _ => Ok(()),
    }
}

/// Bytes that the RAM stage may take if nobody said: what the pool's size asks for, as far as the
/// limit leaves it and a quarter of the free RAM does.
pub fn stage_within(pool: &Pool, limit: Option<u64>, free: Option<u64>) -> u64 {
    let slots = pool.superblock.layout.slots() as usize;
    let bytes = |blocks: usize| blocks as u64 * BLOCK;
    let least = bytes(Config::stage_of(slots, true));
    let mut most = bytes(Config::stage_most_of(slots));
    if let Some(free) = free {
        most = most.min(free / 4);
    }
    if let Some(limit) = limit {
        // A block of the stage takes more than its data: an entry, and a read ahead on its way.
        let each =
            (pool.footprint(Some(most)) - pool.footprint(Some(0))).div_ceil((most / BLOCK).max(1));
        let left = limit.saturating_sub(pool.footprint(Some(0)));
        most = most.min(left / each.max(1) * BLOCK);
    }
    most.max(least)
}

/// Refuses a pool that needs more RAM than it may have.
pub fn check_memory(pool: &Pool, limit: Option<u64>, stage: Option<u64>) -> Result<()> {
    let need = pool.footprint(stage);
    match limit {
        Some(limit) if need > limit => Err(Error::refused(
            format!(
                "the pool needs {} of RAM for its index, policy and RAM stage, more than --memory {}",
                human(need),
                human(limit)
            ),
            "raise --memory, or use a smaller flash device",
        )),
        _ => Ok(()),
    }
}

pub(crate) mod change;
mod create;
pub(crate) mod devices;
pub(crate) mod show;
#[cfg(test)]
mod tests;

pub use change::{Change, change};
pub use create::{DeviceAt, create_several};
pub use devices::FlashDevices;
