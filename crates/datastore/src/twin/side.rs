//! One of two trees: where its files are by the datastore's numbers, and what stands in its root.
//!
//! A file's number is an extended attribute of its inode, so that it survives renames, links, the loss of the other tree and that of
//! everything else. Where a number lies in this tree is remembered; what is not known is looked for in the whole tree.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hearth_io::Claim;
use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::local::Directory;
use hearth_nfs::tree::{Found, Outcome, Tree};
use hearth_nfs::v3::{Kind, Status};
use rustix::fs::{RawDir, XattrFlags};

/// A file's number: a version, the datastore, the number.
const FILE: &str = "trusted.hearth.file";
/// In the root: a version, which tree it is, the datastore, the generation.
const TREE: &str = "trusted.hearth.tree";
const VERSION: u8 = 1;
/// Number of the root.
pub(super) const ROOT: u64 = 1;
/// What mending puts aside, in the root.
pub(super) const ASIDE: &[u8] = b".hearth-aside";
/// What a file system keeps in its root for itself.
const LOST_FOUND: &[u8] = b"lost+found";
/// A number that was looked for in all of the tree is not looked for again before.
const LOOKED: Duration = Duration::from_secs(5);
/// Bytes of a directory read at once.
const LISTING: usize = 32 << 10;

/// A file that is open in a tree.
pub(super) struct Held {
    pub file: Arc<File>,
    /// Keeps other programs from using it as an image.
    pub _claim: Option<Claim>,
}

/// Where a file's user finds it while it is open in a tree.
pub(super) type Slot = Mutex<Option<Held>>;

#[derive(Default)]
struct Known {
    keys: HashMap<u64, Key>,
    numbers: HashMap<Key, u64>,
}

/// A tree that is open.
pub(super) struct Open {
    pub dir: Directory,
    store: u64,
    path: PathBuf,
    known: Mutex<Known>,
    looked: Mutex<Option<Instant>>,
    highest: AtomicU64,
    /// Files that are open in it for their users; none once it is closed.
    held: Mutex<Option<Vec<Weak<Slot>>>>,
    /// How often a directory was listed.
    #[cfg(test)]
    pub listings: AtomicU64,
}

/// Names in a directory that are not clients'.
pub(super) fn is_own(dir: u64, name: &[u8]) -> bool {
    dir == ROOT && (name == ASIDE || name == LOST_FOUND)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name among our open files by which even what is open by path only can be changed.
fn own_name(fd: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

fn get(fd: &impl AsFd, name: &str) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = [0; 64];
    match rustix::fs::getxattr(own_name(fd), name, &mut bytes[..]) {
        Ok(len) => Ok(bytes.get(..len).map(<[u8]>::to_vec)),
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn set(fd: &impl AsFd, name: &str, value: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::setxattr(
        own_name(fd),
        name,
        value,
        XattrFlags::empty(),
    )?)
}

fn split(value: &[u8]) -> Option<(u64, u64)> {
    let ([VERSION], rest) = value.split_first_chunk::<1>()? else {
        return None;
    };
    let (store, number) = rest.split_first_chunk::<8>()?;
    let number: [u8; 8] = number.try_into().ok()?;
    Some((u64::from_be_bytes(*store), u64::from_be_bytes(number)))
}

/// The number of an open file in this datastore, if it has one.
pub(super) fn number_of(file: &impl AsFd, store: u64) -> io::Result<Option<u64>> {
    let value = get(file, FILE)?;
    let own = value.as_deref().and_then(split);
    Ok(own.filter(|(of, _)| *of == store).map(|(_, number)| number))
}

/// What stands in a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub side: u8,
    pub store: u64,
    pub generation: u64,
}

fn mark_of(root: &OwnedFd) -> io::Result<Option<Mark>> {
    let value = get(root, TREE)?;
    let value = value.as_deref().and_then(|v| v.split_first_chunk::<10>());
    Ok(value.and_then(|(head, generation)| {
        let [VERSION, side, store @ ..] = head else {
            return None;
        };
        let generation: [u8; 8] = generation.try_into().ok()?;
        Some(Mark {
            side: *side,
            store: u64::from_be_bytes(*store),
            generation: u64::from_be_bytes(generation),
        })
    }))
}

fn opened(path: &Path) -> io::Result<OwnedFd> {
    let flags =
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?)
}

/// What stands in the root of a directory, and whether it is empty.
pub(super) fn look_at(path: &Path) -> io::Result<(Option<Mark>, bool)> {
    let root = opened(path)?;
    let mark = mark_of(&root)?;
    let mut space = vec![MaybeUninit::uninit(); LISTING];
    let mut entries = RawDir::new(&root, &mut space);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if ![&b"."[..], b"..", LOST_FOUND].contains(&name) {
            return Ok((mark, false));
        }
    }
    Ok((mark, true))
}

/// True if a file system is mounted there.
pub(super) fn is_mount(path: &Path) -> bool {
    let device = |path: &Path| rustix::fs::stat(path).map(|stat| stat.st_dev);
    match (device(path), device(&path.join(".."))) {
        (Ok(own), Ok(above)) => own != above,
        _ => false,
    }
}

/// Writes to the root of a directory which tree it is, durably.
pub(super) fn mark(path: &Path, mark: Mark) -> io::Result<()> {
    mark_root(&opened(path)?, mark)
}

/// Takes what is written there away again, if that can be.
pub(super) fn unmark(path: &Path) {
    if let Ok(root) = opened(path) {
        // Without it the number means nothing.
        let _ = rustix::fs::removexattr(own_name(&root), TREE);
    }
}

fn mark_root(root: &OwnedFd, mark: Mark) -> io::Result<()> {
    let mut value = vec![VERSION, mark.side];
    value.extend(mark.store.to_be_bytes());
    value.extend(mark.generation.to_be_bytes());
    set(root, TREE, &value)?;
    Ok(rustix::fs::fsync(root)?)
}

impl Open {
    /// Opens a tree. What is kept beside it is in `state`.
    pub fn new(path: &Path, state: &Path, store: u64) -> Result<Open, String> {
        std::fs::create_dir_all(state).map_err(|e| format!("{}: {e}", state.display()))?;
        let (dir, _) = Directory::open(path, state).map_err(|e| e.to_string())?;
        let open = Open {
            dir,
            store,
            path: path.to_owned(),
            known: Mutex::default(),
            looked: Mutex::default(),
            highest: AtomicU64::new(ROOT),
            held: Mutex::new(Some(Vec::new())),
            #[cfg(test)]
            listings: AtomicU64::new(0),
        };
        let root = open.dir.root();
        if open.number(&root).map_err(|e| e.to_string())? != Some(ROOT) {
            let numbered = open.give(&root, ROOT);
            numbered.map_err(|e| format!("its files cannot be given numbers ({e})"))?;
        }
        Ok(open)
    }

    /// Keeps a file open in its slot, if that is empty, until the tree is closed.
    pub fn keep(&self, slot: &Arc<Slot>, file: Held) {
        let mut held = lock(&self.held);
        // A step that began before it was closed: the file is closed with it.
        let Some(slots) = &mut *held else { return };
        slots.retain(|known| known.strong_count() > 0 && known.as_ptr() != Arc::as_ptr(slot));
        slots.push(Arc::downgrade(slot));
        lock(slot).get_or_insert(file);
    }

    /// Closes the files that are open in it, those in use included: nothing must keep the file system busy.
    pub fn close(&self) {
        let slots = lock(&self.held).take();
        for slot in slots.into_iter().flatten() {
            let held = slot.upgrade().and_then(|slot| lock(&slot).take());
            drop(held);
        }
    }

    /// Sees whether the directory is still where it was, and reads what stands in its root.
    pub fn probe(&self) -> Result<Option<Mark>, String> {
        let gone = |e: io::Error| format!("{}: {e}", self.path.display());
        let there = opened(&self.path).map_err(gone)?;
        let own = self.dir.root_fd();
        let stat = |fd: &OwnedFd| rustix::fs::fstat(fd).map_err(|e| gone(e.into()));
        let (a, b) = (stat(&there)?, stat(own)?);
        if (a.st_dev, a.st_ino) != (b.st_dev, b.st_ino) {
            return Err(format!(
                "{} is another directory now: it was unmounted or moved",
                self.path.display()
            ));
        }
        // A file system that has given up still tells what it has in memory.
        rustix::fs::fstatvfs(own).map_err(|e| gone(e.into()))?;
        mark_of(own).map_err(gone)
    }

    /// Writes a generation to the root, durably.
    pub fn mark(&self, side: usize, generation: u64) -> io::Result<()> {
        let mark = Mark {
            side: side as u8,
            store: self.store,
            generation,
        };
        mark_root(self.dir.root_fd(), mark)
    }

    /// Makes everything durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(self.dir.root_fd())?)
    }

    fn note(&self, key: &Key, number: u64) {
        let mut known = lock(&self.known);
        known.keys.insert(number, *key);
        known.numbers.insert(*key, number);
        self.highest.fetch_max(number, Ordering::Relaxed);
    }

    /// The number of a file, if it has one.
    pub fn number(&self, key: &Key) -> Outcome<Option<u64>> {
        if let Some(number) = lock(&self.known).numbers.get(key) {
            return Ok(Some(*number));
        }
        let number = number_of(&self.dir.open_path(key)?, self.store)?;
        if let Some(number) = number {
            self.note(key, number);
        }
        Ok(number)
    }

    /// Gives a file its number, durably.
    pub fn give(&self, key: &Key, number: u64) -> Outcome<()> {
        let mut value = vec![VERSION];
        value.extend(self.store.to_be_bytes());
        value.extend(number.to_be_bytes());
        set(&self.dir.open_path(key)?, FILE, &value)?;
        self.dir.make_durable(key)?;
        self.note(key, number);
        Ok(())
    }

    /// The file of a number. `Stale` if there is none in the tree.
    pub fn find(&self, number: u64) -> Outcome<Key> {
        let known = |open: &Open| lock(&open.known).keys.get(&number).copied();
        if let Some(key) = known(self) {
            match self.dir.open_path(&key) {
                Ok(_) => return Ok(key),
                Err(Status::Stale) => {
                    let mut known = lock(&self.known);
                    known.keys.remove(&number);
                    known.numbers.remove(&key);
                }
                Err(e) => return Err(e),
            }
        }
        let mut looked = lock(&self.looked);
        if let Some(key) = known(self) {
            return Ok(key);
        }
        if looked.is_none_or(|at| at.elapsed() >= LOOKED) {
            self.look_through()?;
            *looked = Some(Instant::now());
        }
        known(self).ok_or(Status::Stale)
    }

    /// The highest number there is.
    pub fn highest(&self) -> Outcome<u64> {
        self.look_through()?;
        Ok(self.highest.load(Ordering::Relaxed))
    }

    /// Learns all numbers.
    fn look_through(&self) -> Outcome<()> {
        let mut todo = vec![self.dir.root()];
        while let Some(dir) = todo.pop() {
            let entries = match self.entries(&dir) {
                // It was removed meanwhile.
                Err(Status::Stale | Status::NoEnt | Status::NotDir) => continue,
                other => other?,
            };
            for (_, found) in entries {
                match self.number(&found.key) {
                    Ok(_) | Err(Status::Stale) => {}
                    Err(e) => return Err(e),
                }
                if found.attributes.kind == Kind::Directory {
                    todo.push(found.key);
                }
            }
        }
        Ok(())
    }

    /// What is in a directory, but for `.` and `..`.
    pub fn entries(&self, dir: &Key) -> Outcome<Vec<(Vec<u8>, Found)>> {
        #[cfg(test)]
        self.listings.fetch_add(1, Ordering::Relaxed);
        let fd = self.dir.open_names(dir)?;
        let mut space = vec![MaybeUninit::uninit(); LISTING];
        let mut entries = RawDir::new(&fd, &mut space);
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(io::Error::from)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(name.to_vec());
            }
        }
        let who = Who::root();
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            match self.dir.lookup(&who, dir, &name) {
                Ok(found) => all.push((name, found)),
                // Removed meanwhile, or something is mounted there.
                Err(Status::NoEnt | Status::Access | Status::Stale) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(all)
    }

    /// Where a file is, beneath the root. It may have several names, and this is one of them.
    pub fn place(&self, key: &Key) -> Outcome<PathBuf> {
        let of = |fd: &OwnedFd| std::fs::read_link(own_name(fd));
        let root = of(self.dir.root_fd())?;
        let path = of(&self.dir.open_path(key)?)?;
        let inside = path.strip_prefix(&root).map_err(|_| Status::Stale)?;
        Ok(inside.to_owned())
    }

    /// The directory a name is in, and its last part.
    pub fn above(&self, key: &Key) -> Outcome<(Key, Vec<u8>)> {
        let place = self.place(key)?;
        let name = place.file_name().ok_or(Status::Stale)?.as_bytes().to_vec();
        let mut dir = self.dir.root();
        let who = Who::root();
        for part in place.parent().into_iter().flat_map(Path::components) {
            dir = self
                .dir
                .lookup(&who, &dir, part.as_os_str().as_bytes())?
                .key;
        }
        Ok((dir, name))
    }
}
