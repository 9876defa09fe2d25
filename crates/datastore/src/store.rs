//! The files of a datastore, and which of them are disks now.
//!
//! A file becomes a disk when it is first used, and is looked at while it is: somebody on this host may have changed
//! it. What clients ask for is in [`view`], and what goes on without them in [`upkeep`].

mod held;
mod in_turn;
mod opens;
mod pins;
pub mod scrub;
mod upkeep;
mod view;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hearth_engine::api::{DISK_MAX, DiskId};
use hearth_io::{BLOCK, OpenError, Shelf};
use hearth_nfs::handle::Key;
use hearth_nfs::tree::{Outcome, Tree};
use hearth_nfs::v3::{Attributes, Kind, Status};
use hearth_reactor::Reactors;
use hearth_trees::large;
use held::Held;
use in_turn::InTurn;
pub use pins::Pinned;
use pins::Pins;
use scrub::Scrubs;
use view::View;

use crate::body::{Body, Under};
use crate::file::{Cached, File, Using};
use crate::opens::Opens;
use crate::origin::FileOrigin;
use crate::port::Port;
use crate::room::Budget;
use crate::rules::Rules;
use crate::{Disks, NotNow};

/// How long a look at a file is good for while it is used.
const LOOK: Duration = Duration::from_secs(1);
/// How long a file that cannot be a disk is used as it is.
const PASS: Duration = Duration::from_secs(5);
/// Names that are remembered as those of disks-to-be.
const NAMED_MAX: usize = 1 << 16;

struct Inner {
    dir: Arc<dyn Under>,
    disks: Arc<dyn Disks>,
    port: Port,
    rules: Rules,
    files: Mutex<HashMap<Key, Arc<File>>>,
    /// Files that have been disks before.
    known: Mutex<HashMap<Key, DiskId>>,
    /// Files whose names say that they will be large.
    named: Mutex<HashSet<Key>>,
    budget: Budget,
    /// Memory for long reads.
    shelf: Arc<Shelf>,
    turn: AtomicUsize,
    /// Everything is being written back.
    flushing: AtomicBool,
    stop: Mutex<bool>,
    bell: Condvar,
    pins: Pins,
    /// Who else opens files that are disks, where that can be seen.
    opens: Option<Arc<Opens<Key>>>,
    /// Who writes files in turn, to be told by somebody who may wait.
    in_turn: InTurn,
    /// Scrubs of two directories.
    scrubs: Scrubs,
}

/// What a datastore is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Files that have a record.
    pub disks: u64,
    /// Of these, those in use.
    pub open: u64,
    /// Bytes the directory does not have yet.
    pub dirty: u64,
    /// These are being written to it.
    pub flushing: bool,
}

/// A file that is a disk, or was one and is known still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The disk.
    pub disk: DiskId,
    /// Where the file is now.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// It is served at this moment.
    pub open: bool,
    /// How far it is with having all of it on flash, if that is wanted.
    pub pinned: Option<Pinned>,
}

/// See the module.
pub struct Datastore {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Ends what goes on in the background.
fn end(inner: &Inner, threads: impl IntoIterator<Item = JoinHandle<()>>) {
    *lock(&inner.stop) = true;
    inner.bell.notify_all();
    if let Some(opens) = &inner.opens {
        opens.end();
    }
    for thread in threads {
        // It has nothing to tell.
        let _ = thread.join();
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Datastore {
    /// A datastore over a directory. What was in use when the daemon ended is written back from now on.
    pub fn open(
        dir: Arc<dyn Under>,
        disks: Arc<dyn Disks>,
        reactors: &Arc<Reactors>,
        rules: Rules,
    ) -> std::io::Result<Datastore> {
        let known: HashMap<Key, DiskId> = disks.known().into_iter().collect();
        let scrubs = Scrubs::new(dir.twin());
        let has_two = dir.twin().is_some();
        let inner = Arc::new(Inner {
            dir,
            disks,
            port: Port::open(reactors)?,
            rules,
            files: Mutex::default(),
            known: Mutex::new(known),
            named: Mutex::default(),
            budget: Budget::default(),
            shelf: Arc::default(),
            turn: AtomicUsize::new(0),
            flushing: AtomicBool::new(false),
            stop: Mutex::new(false),
            bell: Condvar::new(),
            pins: Pins::default(),
            opens: Opens::new().map(Arc::new),
            in_turn: InTurn::default(),
            scrubs,
        });
        // Whatever was started is ended with it, should the rest fail.
        let store = Datastore {
            inner,
            threads: Mutex::default(),
        };
        store.start("store-keeper", |inner| upkeep::keep(&inner))?;
        store.start("store-pinner", |inner| pins::keep(&inner))?;
        if has_two {
            store.start("store-scrub", |inner| scrub::keep(&inner))?;
        }
        if let Some(opens) = store.inner.opens.clone() {
            store.start("store-opens", move |inner| opens::keep(&opens, &inner))?;
        }
        Ok(store)
    }

    fn start(
        &self,
        name: &str,
        work: impl FnOnce(Weak<Inner>) + Send + 'static,
    ) -> std::io::Result<()> {
        let inner = Arc::downgrade(&self.inner);
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || work(inner))?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// What clients see.
    pub fn tree(&self) -> Arc<dyn Tree> {
        Arc::new(View(self.inner.clone()))
    }

    /// Which files are to be all on flash has changed.
    pub fn pins_changed(&self) {
        self.inner.pins.look_anew();
        self.inner.bell.notify_all();
    }

    /// What it is doing.
    pub fn census(&self) -> Census {
        self.inner.census()
    }

    /// The files that have a record, but for those that are gone.
    pub fn files(&self) -> Vec<Known> {
        let known = self.inner.known().into_iter();
        known
            .filter_map(|(key, disk)| self.inner.known_file(&key, disk))
            .collect()
    }

    /// Begins to write everything to the directory that is only on flash. The census says when that is done.
    pub fn begin_flush(&self) {
        self.inner.flushing.store(true, Ordering::SeqCst);
        self.inner.bell.notify_all();
    }

    /// From now on the directory has every write before it is answered, or no longer. What was answered before is
    /// there after a flush.
    pub fn hold(&self, on: bool) {
        self.inner.disks.hold(on);
    }

    /// The disks in use, with the files they are.
    pub fn in_use(&self) -> Vec<(DiskId, Arc<FileOrigin>)> {
        let open = self.inner.open().into_iter();
        open.map(|c| (c.disk, c.origin.clone())).collect()
    }

    /// Serves every file that has something only on flash.
    pub fn open_dirty(&self) {
        self.inner.open_dirty();
    }

    /// Closes every disk, for which all must be written back, and forgets the datastore's files. False if something
    /// is still on flash only.
    pub fn dissolve(&self) -> bool {
        self.inner.known().into_iter().all(|(key, disk)| {
            let alone = self.inner.file(&key).take();
            self.inner.disks.owed(disk) == 0 && self.inner.forget(&alone, &key, disk)
        })
    }

    /// Ends what goes on in the background. Nobody may use the tree any more.
    pub fn stop(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        end(&self.inner, threads);
    }
}

impl Drop for Datastore {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Inner {
    fn file(&self, key: &Key) -> Arc<File> {
        let mut files = lock(&self.files);
        let file = files.entry(*key);
        file.or_insert_with(|| Arc::new(File::new(*key))).clone()
    }

    /// The files that are disks now.
    fn open(&self) -> Vec<Arc<Cached>> {
        let files = lock(&self.files);
        files.values().filter_map(|file| file.cached()).collect()
    }

    /// The files that have been disks before.
    fn known(&self) -> Vec<(Key, DiskId)> {
        let known = lock(&self.known);
        known.iter().map(|(key, disk)| (*key, *disk)).collect()
    }

    fn is_known(&self, key: &Key) -> Option<DiskId> {
        lock(&self.known).get(key).copied()
    }

    fn note_name(&self, key: &Key, name: &[u8]) {
        if self.rules.name_fits(name) || self.disks.wants(name) {
            let mut named = lock(&self.named);
            if named.len() >= NAMED_MAX {
                named.clear();
            }
            named.insert(*key);
        }
    }

    /// True if a file is to be a disk.
    fn fits(&self, key: &Key) -> Outcome<bool> {
        if self.is_known(key).is_some() {
            return Ok(true);
        }
        let known = self.dir.attributes(key)?;
        Ok(known.kind == Kind::Regular
            && (self.rules.size_fits(known.size) || lock(&self.named).contains(key)))
    }

    /// A file to be used, as the disk it is if it is one.
    fn begin(&self, key: &Key) -> Outcome<(Using, Option<Arc<Cached>>)> {
        let file = self.file(key);
        loop {
            let (using, cached) = file.share();
            match cached {
                None if file.passes() || !self.fits(key)? => return Ok((using, None)),
                None => {
                    drop(using);
                    self.attach(&file)?;
                }
                Some(cached) => {
                    if self.look(&cached)? {
                        return Ok((using, Some(cached)));
                    }
                    drop((using, cached));
                    self.take_replaced(&file)?;
                }
            }
        }
    }

    /// True if nothing is known against a file that was looked at lately.
    fn is_fresh(cached: &Cached) -> bool {
        let known = *lock(&cached.known);
        known.1.elapsed() < LOOK && known.0.links > 0 && !cached.origin.is_replaced()
    }

    /// Looks at a file, if that was not done lately; false if somebody else changed it.
    fn look(&self, cached: &Cached) -> Outcome<bool> {
        match Inner::is_fresh(cached) {
            true => Ok(true),
            false => self.look_now(cached),
        }
    }

    /// The same, whenever that was done last.
    fn look_now(&self, cached: &Cached) -> Outcome<bool> {
        // Not held while the file is asked: data threads want to tell of it.
        lock(&cached.known).1 = Instant::now();
        let same = cached.origin.looks_same()?;
        if same {
            let now = self.know(cached)?;
            if now.links == 0 {
                return Err(Status::Stale);
            }
        }
        Ok(same)
    }

    /// Reads a file's attributes from the file system.
    fn know(&self, cached: &Cached) -> Outcome<Attributes> {
        // In this order: a block that is written back at this moment is counted twice, and never left out.
        cached.written.store(0, Ordering::SeqCst);
        let owed = self.disks.needs(cached.disk);
        let mut now = self.dir.attributes_of(cached.origin.file())?;
        now.used = used(&now, owed);
        lock(&cached.known).0 = now;
        Ok(now)
    }

    /// Makes a file a disk, if that can be now.
    fn attach(&self, file: &Arc<File>) -> Outcome<()> {
        let alone = file.take();
        if alone.cached().is_some() || file.passes() {
            return Ok(());
        }
        let key = &file.key;
        let opened = self.dir.open_body(key)?;
        let known = self.dir.attributes_of(&opened)?;
        // What was written past the cache so far, and is not durable: as a disk it will not be asked about.
        opened
            .sync_all()
            .inspect_err(|_| self.dir.lost_unstable())?;
        let name = name_of(&opened, key);
        let attached = match opened.claim() {
            Ok(claims) => {
                let origin = Arc::new(FileOrigin::new(opened, claims, name.clone())?);
                let disk = self.disks.attach(key, &origin);
                disk.map(|disk| (disk, origin))
            }
            // Closed a moment ago, and not by all of us yet.
            Err(OpenError::InUse(user)) if user.is_ours() => Err(NotNow::Wait),
            Err(error) => {
                tracing::warn!(file = %name, "{error}");
                Err(NotNow::InUse)
            }
        };
        match attached {
            Ok((disk, origin)) => {
                lock(&self.known).insert(*key, disk);
                self.pin_if_wanted(key, &origin);
                self.watch_opens(key, origin.file());
                let cached = Arc::new(Cached {
                    disk,
                    origin,
                    known: Mutex::new((known, Instant::now())),
                    written: AtomicU64::new(0),
                    draining: AtomicBool::new(false),
                });
                self.know(&cached)?;
                alone.set(Some(cached));
                Ok(())
            }
            Err(NotNow::Pass) => {
                alone.pass_until(Instant::now() + PASS);
                Ok(())
            }
            Err(NotNow::InUse) => Err(Status::Access),
            Err(NotNow::Wait) => Err(Status::JukeBox),
        }
    }

    fn known_file(&self, key: &Key, disk: DiskId) -> Option<Known> {
        // Not by way of `file`, which would remember everything that is listed.
        let cached = lock(&self.files).get(key).and_then(|file| file.cached());
        if let Some(cached) = cached {
            return Some(Known {
                disk,
                path: cached.origin.path()?,
                size: cached.origin.len(),
                open: true,
                pinned: self.pins.of(key),
            });
        }
        let file = self.dir.open_body(key).ok()?;
        Some(Known {
            disk,
            path: file.path()?,
            size: self.dir.attributes_of(&file).ok()?.size,
            open: false,
            pinned: self.pins.of(key),
        })
    }

    /// Somebody else changed a file: what is cached of it goes.
    fn take_replaced(&self, file: &Arc<File>) -> Outcome<()> {
        let alone = file.take();
        let Some(cached) = alone.cached() else {
            return Ok(());
        };
        if cached.origin.look()? {
            return Ok(());
        }
        let name = name_of(cached.origin.file(), &file.key);
        let owed = self.disks.owed(cached.disk);
        if owed > 0 && self.disks.still_fits(cached.disk, &cached.origin) {
            tracing::warn!(file = %name, "its times were changed by somebody else, its content is the same: what is cached stays");
        } else {
            if owed > 0 {
                tracing::error!(file = %name, bytes = owed, "the file was changed by somebody else while writes to it waited on flash: these are thrown away");
            } else {
                tracing::info!(file = %name, "the file was changed by somebody else; its cache is dropped");
            }
            if !self.disks.empty(cached.disk) {
                return Err(Status::JukeBox);
            }
        }
        cached.origin.accept()?;
        self.grow_to(&cached, cached.origin.len())?;
        self.know(&cached)?;
        lock(&cached.known).1 = Instant::now();
        Ok(())
    }

    /// The disk of a file may be as long as this from now on.
    fn grow_to(&self, cached: &Cached, len: u64) -> Outcome<()> {
        large::allow(&Held::new(self, cached), len, DISK_MAX)
    }

    /// There is room for `len` more bytes of what is dirty.
    fn has_room(&self, len: u64) -> bool {
        self.budget.take(len, || {
            let free = self.dir.room().ok()?.available();
            Some((free, self.owed_by_sparse()))
        })
    }

    fn owed_by_sparse(&self) -> u64 {
        let open = self.open().into_iter();
        let sparse = open.filter(|c| c.origin.is_sparse());
        sparse.map(|c| self.disks.needs(c.disk)).sum()
    }
}

/// Bytes a file takes, counting `more` that may have no place in it yet: programs that copy sparse files take a file
/// with no space for one hole.
fn used(known: &Attributes, more: u64) -> u64 {
    let whole = known.size.next_multiple_of(BLOCK);
    known.used.max(known.used.saturating_add(more).min(whole))
}

/// What a file is called, for people.
fn name_of(file: &Body, key: &Key) -> String {
    file.path().map_or_else(
        || format!("{:02x?}", key.bytes()),
        |p| p.display().to_string(),
    )
}

/// Flash is promised to a scratch file as far as its bound, so that is no further than need be.
const SCRATCH_STEP: u64 = 16 << 20;

/// What bounds of files are multiples of.
fn step(scratch: bool) -> u64 {
    if scratch { SCRATCH_STEP } else { large::STEP }
}

/// The least bound for a file of this length.
pub fn bound(len: u64, scratch: bool) -> u64 {
    large::bound(len, step(scratch), DISK_MAX)
}
