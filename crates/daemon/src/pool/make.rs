//! Makes a pool: a new file or a device that holds nothing of value, or another flash in the place of one that is gone.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_format::{FormatError, Layout, Members, Places, PoolNotes, Registry, Superblock, Uuid};
use hearth_io::file::sync_names;
use hearth_io::{BLOCK, BlockFile, Buf, Device, Media, OpenError, OpenMode};

use super::{FlashDevices, Pool, format_error, opening};
use crate::api::types::PoolInfo;
use crate::beside::Beside;
use crate::error::{Error, Result};

/// Bytes at either end of a device that have to be zeros, or it may be in use.
const DEVICE_END: u64 = 1 << 20;
/// Bytes of a new flash file written at a time.
const WRITE_OUT_BYTES: u64 = 4 << 20;

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
    let mut made = create_as(path, &options, legacy, progress)?;
    made.look_for_claims(state_dir)?;
    let mut lost = Vec::new();
    let noted = beside.note(|notes| {
        made.take_over(notes);
        notes.flash = crate::beside::shown(path);
        lost = notes.lost.iter().collect();
    });
    noted.map_err(|e| beside.unwritten(e, "put that right, and serve the pool: it is whole"))?;
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

/// Stretches of a device to which somebody else wrote when it was a pool's: areas that were set aside for swap.
///
/// What stands there may be a copy of anything, also of segments of this pool, or of a batch with the numbers that come next. Only
/// the first device of a pool lists them; of another one everything may be such an area.
fn former_areas(file: &BlockFile, found: Option<&Superblock>) -> Vec<Range<u64>> {
    let Some(sb) = found else {
        return Vec::new();
    };
    if sb.device_index > 0 {
        return std::iter::once(0..file.size()).collect();
    }
    let here = |area: &hearth_format::Area| {
        let place = sb.place_of(*area).filter(|place| place.device == 0)?;
        Some(place.offset..place.offset.saturating_add(place.bytes).min(file.size()))
    };
    sb.areas.iter().filter_map(here).collect()
}

/// Overwrites all of it, whatever it is.
fn overwrite(
    file: &BlockFile,
    stretches: &[Range<u64>],
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> std::io::Result<()> {
    let zeros = Buf::zeroed(WRITE_OUT_BYTES as usize).all();
    let all = stretches.iter().map(|s| s.end - s.start).sum();
    let mut done = 0;
    for stretch in stretches {
        let mut at = stretch.start;
        while at < stretch.end {
            if !progress(done, all) {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let len = (stretch.end - at).min(WRITE_OUT_BYTES);
            file.write_at(at, zeros.bytes().get(..len as usize).unwrap_or_default())?;
            (at, done) = (at + len, done + len);
        }
    }
    match stretches {
        [] => Ok(()),
        _ => file.flush(),
    }
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
pub(super) fn prepare(
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
        refuse_used(path, &file, progress)?;
    }
    Ok(Prepared { file, replaced })
}

/// A device that is about to be formatted.
pub(super) struct Prepared {
    pub(super) file: BlockFile,
    pub(super) replaced: Option<Replaced>,
}

/// Gives what the device had its space for back, and what the pool needs for itself, up to block `own_blocks`, room:
/// also in a sparse file on a file system that becomes full later.
pub(super) fn take_room(
    path: &Path,
    file: &BlockFile,
    own_blocks: u64,
    discard: bool,
) -> Result<()> {
    let size = file.size();
    if discard && file.is_device() {
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
pub(super) fn settle_name(
    path: &Path,
    options: &CreateOptions,
    replaced: Option<Replaced>,
) -> Result<()> {
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
    let adopted = options.size.is_none() && legacy.older > 0;
    let found = adopted
        .then(|| super::change::superblock_at(path))
        .flatten();
    let areas = former_areas(&file, found.as_ref());
    let unclear = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::Interrupted => Error::unavailable(
            format!(
                "{} was not made the pool's flash: interrupted",
                path.display()
            ),
            "run the command again",
        ),
        _ => Error::unavailable(
            format!("cannot clear {}: {e}", path.display()),
            "check the device's health",
        ),
    };
    // The superblock that lists them is there until they are clear: what is cut off begins anew.
    overwrite(&file, &areas, progress).map_err(unclear)?;
    // What was discarded may read as anything.
    take_room(path, &file, layout.segment_start, areas.is_empty())?;
    if adopted {
        wipe_segments(&file, &layout).map_err(unclear)?;
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
    let (flash, members) = (FlashDevices::one(media.clone()), Members::new(Vec::new()));
    Ok(Pool::of(
        media, flash, members, superblock, registry, places,
    ))
}

/// Stores the first registry of a new device.
pub(super) fn first_registry(
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
pub(super) struct Replaced {
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

/// Refuses what may be somebody's data: whatever carries a known signature, a file in which any byte is not zero, and a
/// device that does not begin and end with zeros. Of a device no more can be read in a reasonable time.
fn refuse_used(
    path: &Path,
    file: &BlockFile,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let unread = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::Interrupted => Error::unavailable(
            format!("{} was not made: interrupted", path.display()),
            "nothing was changed; run the command again",
        ),
        _ => Error::unavailable(
            format!("cannot read {}: {e}", path.display()),
            "check the device's health",
        ),
    };
    let found = hearth_format::foreign::identify(
        &mut |offset, data| file.read_at(offset, data),
        file.size(),
    );
    let what = match found.map_err(unread)? {
        Some(found) => format!("carries {}", found.what),
        None => match first_used_byte(file, progress).map_err(unread)? {
            Some(at) => format!("is not empty: byte {at} is not zero"),
            None => return Ok(()),
        },
    };
    Err(Error::refused(
        format!("{} {what}", path.display()),
        "add --force to overwrite it, if it is not needed",
    ))
}

/// The first byte that is not zero: of all of a file, of both ends of a device.
fn first_used_byte(
    file: &BlockFile,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> std::io::Result<Option<u64>> {
    let size = file.size();
    let stretches = match file.is_device() && size > 2 * DEVICE_END {
        true => vec![0..DEVICE_END, size - DEVICE_END..size],
        false => std::iter::once(0..size).collect(),
    };
    let mut data = Buf::zeroed(WRITE_OUT_BYTES as usize).all();
    for stretch in stretches {
        // Holes of a sparse file need not be read.
        let extents = file.extents(stretch.start, stretch.end - stretch.start)?;
        for extent in extents.iter().filter(|extent| extent.data) {
            let end = extent.offset + extent.len;
            for from in (extent.offset..end).step_by(WRITE_OUT_BYTES as usize) {
                if !progress(from, size) {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
                let len = (end - from).min(WRITE_OUT_BYTES) as usize;
                let bytes = data.bytes_mut().get_mut(..len).unwrap_or_default();
                file.read_at(from, bytes)?;
                if let Some(used) = bytes.iter().position(|byte| *byte != 0) {
                    return Ok(Some(from + used as u64));
                }
            }
        }
    }
    Ok(None)
}
