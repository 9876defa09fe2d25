//! Files by their number, where the file system's own handles cannot be used.
//!
//! To open a file by handle takes root's rights, and not every file system has handles. But every one has
//! numbers (inodes), and most tell when a file was born, so that a number that is given out
//! again is not taken for the file it belonged to. A key is both. What a number alone does not tell is where the
//! file lies. That is remembered for every name that was come by, and never believed: what is opened
//! at the place is looked at, and if it is another file, the whole tree is looked through for the number, once.
//! So nothing has to be kept on disk that could be lost or be wrong, and files that somebody on the
//! host moves are found again.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, StatxFlags};

use crate::handle::Key;

/// First byte of these keys.
const BY_NUMBER: u8 = 2;
/// Places that are remembered. More files than that are found more slowly.
const PLACES_MAX: usize = 1 << 20;
/// Most directories above one another.
const DEPTH_MAX: usize = 1024;
/// For so long a file that was not found is taken to be gone: clients show the handles of removed files for a while.
const GONE: Duration = Duration::from_secs(5);
const GONE_MAX: usize = 1 << 12;
/// Bytes of a directory read at once.
const LISTING: usize = 32 << 10;

/// Where a file was come by.
#[derive(Clone)]
struct Place {
    dir: u64,
    name: Box<[u8]>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Walk {
    places: Mutex<HashMap<u64, Place>>,
    gone: Mutex<HashMap<Key, Instant>>,
    /// One looks through the tree at a time.
    looking: Mutex<()>,
    /// How often that was begun.
    begun: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stale() -> io::Error {
    io::Error::from_raw_os_error(libc::ESTALE)
}

/// The key of an open file, and the number of the device it is on.
pub(super) fn key_of(file: &impl AsFd) -> io::Result<(Key, u64)> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let told = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?;
    if told.stx_mask & StatxFlags::BTIME.bits() == 0 {
        return Err(io::Error::other("it does not tell when files were made"));
    }
    let mut bytes = vec![BY_NUMBER];
    bytes.extend_from_slice(&told.stx_ino.to_be_bytes());
    bytes.extend_from_slice(&told.stx_btime.tv_sec.to_be_bytes());
    bytes.extend_from_slice(&told.stx_btime.tv_nsec.to_be_bytes());
    let key = Key::new(&bytes).ok_or_else(stale)?;
    Ok((
        key,
        u64::from(told.stx_dev_major) << 32 | u64::from(told.stx_dev_minor),
    ))
}

/// The number in a key of this kind.
fn number(key: &Key) -> Option<u64> {
    let [BY_NUMBER, rest @ ..] = key.bytes() else {
        return None;
    };
    Some(u64::from_be_bytes(*rest.first_chunk()?))
}

impl Walk {
    /// A name was come by.
    pub fn note(&self, file: &Key, dir: &Key, name: &[u8]) {
        if let (Some(file), Some(dir)) = (number(file), number(dir)) {
            put(&mut lock(&self.places), file, dir, name);
        }
    }

    /// Opens the file of a key. `ESTALE` if there is none in the tree.
    pub fn open(
        &self,
        root: &OwnedFd,
        root_key: &Key,
        key: &Key,
        flags: OFlags,
    ) -> io::Result<OwnedFd> {
        let (Some(top), Some(file)) = (number(root_key), number(key)) else {
            return Err(stale());
        };
        let missing = |opened: &io::Result<OwnedFd>| {
            opened
                .as_ref()
                .is_err_and(|error| error.raw_os_error() == Some(libc::ESTALE))
        };
        let mut opened = self.at_place(root, top, file, key, flags);
        if !missing(&opened)
            || lock(&self.gone)
                .get(key)
                .is_some_and(|since| since.elapsed() < GONE)
        {
            return opened;
        }
        // A file that is moved while the tree is looked through can be missed once.
        for _ in 0..2 {
            self.look(root, top)?;
            opened = self.at_place(root, top, file, key, flags);
            if !missing(&opened) {
                return opened;
            }
        }
        let mut gone = lock(&self.gone);
        if gone.len() >= GONE_MAX {
            gone.clear();
        }
        gone.insert(*key, Instant::now());
        opened
    }

    /// Looks through the tree, or waits for somebody else who began it after this was asked for.
    fn look(&self, root: &OwnedFd, top: u64) -> io::Result<()> {
        let before = self.begun.load(Ordering::Acquire);
        let _one_at_a_time = lock(&self.looking);
        if self.begun.load(Ordering::Acquire) > before {
            return Ok(());
        }
        self.begun.fetch_add(1, Ordering::AcqRel);
        let mut places = HashMap::new();
        look_through(root, top, &mut places)?;
        *lock(&self.places) = places;
        Ok(())
    }

    /// The file at the place where its number was come by; `ESTALE` if it is not there.
    fn at_place(
        &self,
        root: &OwnedFd,
        top: u64,
        file: u64,
        key: &Key,
        flags: OFlags,
    ) -> io::Result<OwnedFd> {
        let path = self.path(top, file).ok_or_else(stale)?;
        let beneath = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let open = |flags: OFlags| {
            rustix::fs::openat2(
                root,
                &path[..],
                flags | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
                beneath,
            )
        };
        // Looked at before it is opened for more: what is there now may be a device.
        let opened = match open(OFlags::PATH) {
            Ok(found) if key_of(&found)?.0 != *key => return Err(stale()),
            Ok(found) if flags == OFlags::PATH => return Ok(found),
            Ok(_) => open(flags),
            Err(error) => Err(error),
        };
        match opened {
            Ok(found) if key_of(&found)?.0 == *key => Ok(found),
            Ok(_) => Err(stale()),
            Err(error) => Err(match io::Error::from(error) {
                error
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EXDEV)
                    ) =>
                {
                    stale()
                }
                error => error,
            }),
        }
    }

    fn path(&self, top: u64, file: u64) -> Option<Vec<u8>> {
        let places = lock(&self.places);
        let mut names = Vec::new();
        let mut at = file;
        while at != top {
            let place = places.get(&at)?;
            names.push(&*place.name);
            if names.len() > DEPTH_MAX {
                return None;
            }
            at = place.dir;
        }
        names.reverse();
        Some(if names.is_empty() {
            b".".to_vec()
        } else {
            names.join(&b'/')
        })
    }
}

fn put(places: &mut HashMap<u64, Place>, file: u64, dir: u64, name: &[u8]) {
    if places.len() >= PLACES_MAX && !places.contains_key(&file) {
        places.clear();
    }
    places.insert(
        file,
        Place {
            dir,
            name: name.into(),
        },
    );
}

/// Notes where every file of the tree lies. Only directories are read, no file is looked at.
fn look_through(root: &OwnedFd, top: u64, places: &mut HashMap<u64, Place>) -> io::Result<()> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut space = vec![MaybeUninit::uninit(); LISTING];
    let mut todo: Vec<(u64, Vec<u8>)> = vec![(top, b".".to_vec())];
    while let Some((dir, path)) = todo.pop() {
        // Removed or moved meanwhile, or not ours to read: what is in it is not found.
        let Ok(open) = rustix::fs::openat2(root, &path[..], flags, Mode::empty(), resolve) else {
            continue;
        };
        let mut entries = RawDir::new(&open, &mut space);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            put(places, entry.ino(), dir, name);
            let directory = match entry.file_type() {
                FileType::Unknown => rustix::fs::statat(&open, name, AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
                kind => kind == FileType::Directory,
            };
            if directory {
                todo.push((entry.ino(), [&path[..], b"/", name].concat()));
            }
        }
    }
    Ok(())
}
