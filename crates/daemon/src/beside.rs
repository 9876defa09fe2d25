//! What is known of a pool beside its flash: a file of the state directory, so that losing the flash is not
//! losing the disks.
//!
//! It holds the registry once more, and for each disk whether something of it may be on flash that its origin lacks
//! ([`PoolNotes`]; the format and the order in which things are durable are in `docs/format.md`). The first is stored after the flash
//! has it, the second before a write is let to the flash. A start without flash serves what is known to be
//! whole in its origin, and notes before that it did.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use hearth_format::beside::{BESIDE_BYTES, POOL_NOTES_BYTES, layout};
use hearth_format::order::ORDER_NOTE_BYTES;
use hearth_format::{
    FormatError, Layout, OrderNote, Places, PoolNotes, Registry, SharedRecord, Superblock, Uuid,
};
use hearth_io::file::sync_names;
use hearth_io::{BlockFile, Device, Media, OpenError, OpenMode};

use crate::daemon::lock;
use crate::error::{Error, Kind, Result};
use crate::rundir::{self, make_private};

/// Most files that are looked through for the one that knows a flash device.
const POOLS_MAX: usize = 1024;

/// Where pools are noted in a state directory.
fn pools_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("pools")
}

/// The time in seconds since 1970.
pub(crate) fn now_unix() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| d.as_secs())
}

/// What is known of a pool beside its flash.
pub(crate) struct Beside {
    path: PathBuf,
    file: File,
    pool: Uuid,
    notes: Mutex<Stored>,
    /// The same, held by nobody who waits for the file's disk.
    seen: Mutex<PoolNotes>,
    shelf: Mutex<Shelf>,
}

/// The notes as they are in the file.
struct Stored {
    notes: PoolNotes,
    /// A store has failed: what the file says is this, or what that store was to make of it.
    unsettled: bool,
}

/// The registry as it is in the file.
struct Shelf {
    layout: Layout,
    places: Places,
    registry: Registry,
}

/// A plain file as the registry's device: what lies behind its end reads as zeros.
struct Plain<'a>(&'a File);

impl Media for Plain<'_> {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            let rest = data.get_mut(done..).unwrap_or_default();
            match self.0.read_at(rest, offset + done as u64)? {
                0 => {
                    rest.fill(0);
                    break;
                }
                n => done += n,
            }
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// True if two records differ in what a start without flash goes by.
fn differs(a: &SharedRecord, b: &SharedRecord) -> bool {
    if a.is(b) {
        return false;
    }
    let essence = |record: &SharedRecord| hearth_format::DiskRecord {
        since_seq: 0,
        origin_identity: None,
        clean_detach: false,
        ..hearth_format::DiskRecord::clone(record)
    };
    essence(a) != essence(b)
}

fn differ(a: &Registry, b: &Registry) -> bool {
    a.disks.len() != b.disks.len()
        || a.disks.iter().zip(&b.disks).any(|(a, b)| differs(a, b))
        || (a.next_disk_id, &a.unknown_records) != (b.next_disk_id, &b.unknown_records)
}

impl Beside {
    /// What is known of `pool`; `None` if nothing is.
    pub(crate) fn of(state_dir: &Path, pool: &Uuid) -> Result<Option<Beside>> {
        let path = pools_dir(state_dir).join(pool.to_string());
        let file = match open_file(&path, false) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(unusable(&path, &e.to_string())),
        };
        if !rundir::lock(&file) {
            return Err(Error::conflict(
                format!(
                    "the pool {pool} is being served: {} is in use",
                    path.display()
                ),
                "stop its daemon first",
            ));
        }
        Beside::load(path, file).map(Some)
    }

    /// The same to be looked at only, even while a daemon uses it.
    pub(crate) fn look(state_dir: &Path, pool: &Uuid) -> Result<Option<Beside>> {
        let path = pools_dir(state_dir).join(pool.to_string());
        match File::open(&path) {
            Ok(file) => Beside::load(path, file).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(unusable(&path, &e.to_string())),
        }
    }

    fn load(path: PathBuf, file: File) -> Result<Beside> {
        let damaged = |e: FormatError| unusable(&path, &e.to_string());
        let notes = read_notes(&file).map_err(damaged)?;
        let layout = layout().map_err(damaged)?;
        let (registry, places) =
            Places::load(&mut Plain(&file), &layout, notes.pool).map_err(damaged)?;
        let pool = notes.pool;
        Ok(Beside {
            path,
            file,
            pool,
            seen: Mutex::new(notes.clone()),
            notes: Mutex::new(Stored {
                notes,
                unsettled: false,
            }),
            shelf: Mutex::new(Shelf {
                layout,
                places,
                registry,
            }),
        })
    }

    /// The same of the pool whose flash was at `flash`.
    pub(crate) fn whose_flash_was_at(state_dir: &Path, flash: &Path) -> Result<Option<Beside>> {
        match pool_at(state_dir, flash)? {
            Some(pool) => Beside::of(state_dir, &pool),
            None => Ok(None),
        }
    }

    /// Makes the file of a pool that none is known of.
    pub(crate) fn make(state_dir: &Path, notes: PoolNotes, registry: &Registry) -> Result<Beside> {
        let dir = pools_dir(state_dir);
        make_private(&dir, 0o700)?;
        let path = dir.join(notes.pool.to_string());
        let new = path.with_extension("new");
        let pool = notes.pool;
        let made = (|| {
            let file = open_file(&new, true)?;
            if !rundir::lock(&file) {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            // All of its room, now: later the file system may be full.
            file.write_all_at(&vec![0; BESIDE_BYTES as usize], 0)?;
            let layout = layout().map_err(io::Error::other)?;
            let beside = Beside {
                path: path.clone(),
                file,
                pool,
                seen: Mutex::new(notes.clone()),
                notes: Mutex::new(Stored {
                    notes,
                    unsettled: true,
                }),
                shelf: Mutex::new(Shelf {
                    places: Places::new(&layout).map_err(io::Error::other)?,
                    layout,
                    registry: Registry::default(),
                }),
            };
            beside.store(registry).map_err(io::Error::other)?;
            beside.note(|_| ())?;
            beside.file.sync_all()?;
            // Until it has its name, nothing is known of the pool.
            std::fs::rename(&new, &path)?;
            sync_names(&path)?;
            Ok(beside)
        })();
        made.map_err(|e: io::Error| {
            // What is left of it counts for nothing.
            let _ = std::fs::remove_file(&new);
            Error::unavailable(
                format!("cannot make {}: {e}", path.display()),
                "make room there, or name another directory with --state-dir",
            )
        })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The notes, as they are in the file.
    pub(crate) fn notes(&self) -> PoolNotes {
        lock(&self.notes).notes.clone()
    }

    /// True if `look` says so of the notes.
    pub(crate) fn says(&self, look: impl FnOnce(&PoolNotes) -> bool) -> bool {
        look(&lock(&self.notes).notes)
    }

    /// The same as they were when they were stored last, without a wait for a disk that may hang.
    pub(crate) fn said(&self, look: impl FnOnce(&PoolNotes) -> bool) -> bool {
        look(&lock(&self.seen))
    }

    /// The registry as it is in the file.
    pub(crate) fn registry(&self) -> Registry {
        lock(&self.shelf).registry.clone()
    }

    /// Changes the notes, durably when it returns `Ok`. If it fails, the file says the old or the new, and
    /// the next change stores them whatever it changes.
    pub(crate) fn note(&self, change: impl FnOnce(&mut PoolNotes)) -> io::Result<()> {
        let mut stored = lock(&self.notes);
        let mut next = stored.notes.clone();
        change(&mut next);
        if next == stored.notes && !stored.unsettled {
            return Ok(());
        }
        // One that failed is stored again in its own place: the other slot has what counted before.
        next.sequence = stored.notes.sequence + 1;
        stored.unsettled = true;
        let (at, bytes) = next.encode();
        self.file.write_all_at(&bytes, at)?;
        self.file.sync_data()?;
        lock(&self.seen).clone_from(&next);
        *stored = Stored {
            notes: next,
            unsettled: false,
        };
        Ok(())
    }

    /// Why something could not be noted, and what to do about it.
    pub(crate) fn unwritten(&self, why: impl std::fmt::Display, remedy: &str) -> Error {
        Error::unavailable(
            format!("cannot write {}: {why}", self.path().display()),
            remedy,
        )
    }

    /// Up to when the origin of an ordered disk holds what was flushed, milliseconds since 1970, as was noted last.
    pub(crate) fn ordered_upto(&self, id: u16, serial: Uuid) -> Option<u64> {
        let file = File::open(self.order_path()).ok()?;
        let note = read_order(&file, id).ok()?;
        note.filter(|n| n.serial == serial && n.upto_ms > 0)
            .map(|n| n.upto_ms)
    }

    /// Records that time for ordered disks, durably when it returns `Ok`; 0: the time is unknown. The record of a disk
    /// that was lost with its flash stays until its origin is trusted: new flash knows nothing of the disk.
    pub(crate) fn note_order(&self, disks: &[(u16, Uuid, u64)]) -> io::Result<()> {
        let lost = |disk: &&(u16, Uuid, u64)| self.said(|notes| notes.lost.contains(disk.0));
        let disks: Vec<_> = disks.iter().filter(|disk| !lost(disk)).copied().collect();
        let path = self.order_path();
        if disks.is_empty() || disks.iter().all(|d| d.2 == 0) && !path.exists() {
            return Ok(());
        }
        let new = !path.exists();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        let mut changed = false;
        for (id, serial, upto_ms) in disks {
            let old = read_order(&file, id)?;
            if old.is_some_and(|o| o.serial == serial && o.upto_ms == upto_ms) {
                continue;
            }
            let note = OrderNote {
                serial,
                sequence: old.map_or(0, |o| o.sequence) + 1,
                upto_ms,
            };
            let (at, bytes) = note.encode();
            file.write_all_at(&bytes, u64::from(id) * ORDER_NOTE_BYTES as u64 + at)?;
            changed = true;
        }
        if changed {
            file.sync_data()?;
        }
        if new {
            sync_names(&path)?;
        }
        Ok(())
    }

    fn order_path(&self) -> PathBuf {
        self.path.with_extension("order")
    }

    /// Stores what of a registry that is on flash has to be known without it.
    pub(crate) fn follow(&self, next: &Registry) -> std::result::Result<(), FormatError> {
        if !differ(&lock(&self.shelf).registry, next) {
            return Ok(());
        }
        self.store(next)
    }

    /// Stores a registry, all of it. Notes of disks that it does not have go.
    pub(crate) fn store(&self, next: &Registry) -> std::result::Result<(), FormatError> {
        let mut shelf = lock(&self.shelf);
        let Shelf {
            layout,
            places,
            registry,
        } = &mut *shelf;
        let mut next = next.clone();
        places.store(
            &mut Plain(&self.file),
            layout,
            self.pool,
            registry,
            &mut next,
        )?;
        *registry = next;
        let gone = |ids: &hearth_format::IdSet| -> Vec<u16> {
            let gone = ids.iter().filter(|id| registry.by_id(*id).is_none());
            gone.collect()
        };
        let stored = lock(&self.notes);
        let gone: Vec<u16> = [&stored.notes.dirty, &stored.notes.left, &stored.notes.lost]
            .into_iter()
            .flat_map(gone)
            .collect();
        drop(stored);
        if !gone.is_empty() {
            // A disk that gets the number later is noted anew before anything of it is on flash.
            let noted = self.note(|notes| {
                for id in &gone {
                    notes.dirty.remove(*id);
                    notes.left.remove(*id);
                    notes.lost.remove(*id);
                }
            });
            if let Err(e) = noted {
                tracing::warn!(path = %self.path.display(), "cannot note that disks are gone: {e}");
            }
        }
        Ok(())
    }

    /// The pool goes elsewhere, with everything in the origins: without its flash nothing is served here.
    pub(crate) fn forget(&self) {
        // Without the notes it says nothing.
        let _ = std::fs::remove_file(self.order_path());
        let removed = std::fs::remove_file(&self.path).and_then(|()| sync_names(&self.path));
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", self.path.display());
            }
            _ => {}
        }
        if let Some(dir) = self.path.parent() {
            // Only if it is empty.
            let _ = std::fs::remove_dir(dir);
        }
    }
}

fn open_file(path: &Path, new: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(new)
        .truncate(new)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

fn read_order(file: &File, id: u16) -> io::Result<Option<OrderNote>> {
    let mut place = [0; ORDER_NOTE_BYTES];
    Plain(file).read_at(u64::from(id) * ORDER_NOTE_BYTES as u64, &mut place)?;
    OrderNote::newest(&place).map_err(io::Error::other)
}

fn read_notes(file: &File) -> std::result::Result<PoolNotes, FormatError> {
    let mut bytes = vec![0; POOL_NOTES_BYTES];
    let read = Plain(file).read_at(0, &mut bytes);
    read.map_err(|source| FormatError::Io {
        doing: "reading notes beside the flash",
        source,
    })?;
    PoolNotes::newest(&bytes)
}

fn unusable(path: &Path, why: &str) -> Error {
    Error::of(
        Kind::Refused,
        hearth_fault::Fault::new(
            format!(
                "{}, which tells what is known of a pool beside its flash, cannot be used: {why}",
                path.display()
            ),
            "put that right; or, if its flash is there and the pool was not served without it, remove the file, and it is made anew",
        ),
    )
}

/// A path as it is noted.
pub(crate) fn shown(flash: &Path) -> String {
    let path = std::path::absolute(flash).unwrap_or_else(|_| flash.to_owned());
    path.to_string_lossy().into_owned()
}

/// Several paths as they are noted: one a line.
pub(crate) fn shown_all(flash: &[PathBuf]) -> String {
    let all: Vec<String> = flash.iter().map(|path| shown(path)).collect();
    all.join("\n")
}

/// Paths that are noted, in words.
pub(crate) fn listed(noted: &str) -> String {
    noted.replace('\n', ", ")
}

/// True if something is at each of the paths that are noted.
pub(crate) fn all_there(noted: &str) -> bool {
    noted
        .split('\n')
        .all(|path| gone(Path::new(path)).is_none())
}

/// The pool that had flash at `flash`: of several, the one that was served last.
pub(crate) fn pool_at(state_dir: &Path, flash: &Path) -> Result<Option<Uuid>> {
    let flash = shown(flash);
    let at = |notes: &PoolNotes| notes.flash.split('\n').any(|path| path == flash);
    let last = known(state_dir)?.into_iter().filter(at);
    let last = last.max_by_key(|notes| notes.started);
    Ok(last.map(|notes| notes.pool))
}

/// The notes of all pools in a state directory. Ones that cannot be read are left out, with a warning.
pub(crate) fn known(state_dir: &Path) -> Result<Vec<PoolNotes>> {
    let dir = pools_dir(state_dir);
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unusable(&dir, &e.to_string())),
    };
    let mut all = Vec::new();
    for entry in entries.flatten().take(POOLS_MAX) {
        let name = entry.file_name();
        if name
            .to_str()
            .is_none_or(|name| name.parse::<Uuid>().is_err())
        {
            continue;
        }
        let read = File::open(entry.path()).map_err(|source| FormatError::Io {
            doing: "reading notes beside the flash",
            source,
        });
        match read.and_then(|file| read_notes(&file)) {
            Ok(notes) => all.push(notes),
            Err(e) => tracing::warn!("{}: {e}", entry.path().display()),
        }
    }
    Ok(all)
}

/// Why there is no pool where flash was, if there is none: the device is gone, cannot be read, or is another one. `None` if
/// there is something that only a person can judge.
pub(crate) fn gone(flash: &Path) -> Option<String> {
    let path = flash.display();
    let dead = |e: &io::Error| e.kind() == io::ErrorKind::NotFound || hearth_io::is_dead(e);
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let file = match BlockFile::open(flash, mode) {
        Ok(file) => file,
        Err(OpenError::Open { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Some(format!("{path} does not exist"));
        }
        Err(OpenError::Open { source, .. }) if dead(&source) => {
            return Some(format!("{path} cannot be opened ({source})"));
        }
        Err(_) => return None,
    };
    let mut media = std::sync::Arc::new(Device::new(file));
    match Superblock::load(&mut media) {
        Err(FormatError::Io { source, .. }) => Some(format!("{path} cannot be read ({source})")),
        Err(FormatError::NotAPool | FormatError::NotFound { .. }) => {
            Some(format!("{path} holds no pool"))
        }
        Err(FormatError::Damaged { .. }) => Some(format!("both superblocks of {path} are damaged")),
        Err(FormatError::TruncatedDevice { recorded, actual }) => {
            Some(format!("{path} has {actual} bytes only, of {recorded}"))
        }
        Err(_) | Ok(_) => None,
    }
}

/// Why there is no pool on the only or first device of one although its superblock is there: a daemon that served it has written that again
/// after somebody had erased the device below it, but not what it did not change.
pub(crate) fn erased(flash: &Path, given: &[PathBuf]) -> Option<String> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let mut media = std::sync::Arc::new(Device::new(BlockFile::open(flash, mode).ok()?));
    let superblock = Superblock::load(&mut media).ok()?;
    // Of several devices the first has the tables; where everything is there twice, two of them.
    let several = given.len() > 1;
    if superblock.device_index > 0
        || superblock.is_twice()
        || several == superblock.devices.is_empty()
    {
        return None;
    }
    let error = Places::load(&mut media, &superblock.layout, superblock.pool).err()?;
    crate::pool::is_erased(&error).then(|| {
        format!(
            "{} was erased or written over: {}",
            flash.display(),
            error.fault()
        )
    })
}
