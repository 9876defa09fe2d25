//! What clients ask for, file by file: of the directory, or of the disk that a file is.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hearth_engine::api::{DISK_MAX, DiskId, ReqError, ReqOp, Request};
use hearth_io::{BLOCK, Buf, BufSlice};
use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::local::{Directory, may_use_data};
use hearth_nfs::tree::{
    Changed, Data, Done, Entry, Found, Outcome, Read, Room, Tree, Write, Written,
};
use hearth_nfs::v3::{
    Attributes, Create, How, Kind, SetAttributes, SetTime, Stability, Status, Time, Wcc,
};
use hearth_reactor::Reactors;

use crate::file::{Alone, Cached, File, Using};
use crate::origin::FileOrigin;
use crate::port::Port;
use crate::room::Budget;
use crate::rules::Rules;
use crate::{Disks, NotNow, STEP};

/// How long a look at a file is good for while it is used.
const LOOK: Duration = Duration::from_secs(1);
/// After which a disk that nobody uses is closed.
const IDLE: Duration = Duration::from_secs(30);
/// How often files nobody uses are looked for.
const ROUND: Duration = Duration::from_secs(1);
/// How often it is looked whether everything is written back, while somebody waits for that.
const FLUSH_ROUND: Duration = Duration::from_millis(50);
/// How long a file that cannot be a disk is used as it is.
const PASS: Duration = Duration::from_secs(5);
/// Names that are remembered as those of disks-to-be.
const NAMED_MAX: usize = 1 << 16;

/// Where calls are done on whose behalf nobody asks for rights.
fn root() -> Who {
    Who {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
    }
}

struct Inner {
    dir: Arc<Directory>,
    disks: Arc<dyn Disks>,
    port: Port,
    rules: Rules,
    files: Mutex<HashMap<Key, Arc<File>>>,
    /// Files that have been disks before.
    known: Mutex<HashMap<Key, DiskId>>,
    /// Files whose names say that they will be large.
    named: Mutex<HashSet<Key>>,
    budget: Budget,
    turn: AtomicUsize,
    /// Everything is being written back.
    flushing: AtomicBool,
    stop: Mutex<bool>,
    bell: Condvar,
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

/// See the module.
pub struct Datastore {
    inner: Arc<Inner>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn status(error: ReqError) -> Status {
    match error {
        ReqError::NoSpace => Status::NoSpace,
        ReqError::Invalid => Status::Inval,
        ReqError::ReadOnly => Status::RoFs,
        // Whoever asks again finds a daemon that is back.
        ReqError::NoDisk | ReqError::Shutdown => Status::JukeBox,
        ReqError::Io => Status::Io,
    }
}

/// Bytes of a file, in the memory they were read into.
struct Piece {
    buf: Option<BufSlice>,
    start: usize,
    len: usize,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        let bytes = self.buf.as_ref().map_or(&[][..], BufSlice::bytes);
        bytes
            .get(self.start..self.start + self.len)
            .unwrap_or_default()
    }
}

impl Datastore {
    /// A datastore over a directory. What was in use when the daemon ended is written back from now on.
    pub fn open(
        dir: Arc<Directory>,
        disks: Arc<dyn Disks>,
        reactors: &Arc<Reactors>,
        rules: Rules,
    ) -> std::io::Result<Datastore> {
        let known: HashMap<Key, DiskId> = disks.known().into_iter().collect();
        let inner = Arc::new(Inner {
            dir,
            disks,
            port: Port::open(reactors)?,
            rules,
            files: Mutex::default(),
            known: Mutex::new(known),
            named: Mutex::default(),
            budget: Budget::default(),
            turn: AtomicUsize::new(0),
            flushing: AtomicBool::new(false),
            stop: Mutex::new(false),
            bell: Condvar::new(),
        });
        let kept = Arc::downgrade(&inner);
        let keeper = thread::Builder::new()
            .name("store-keeper".to_owned())
            .spawn(move || keep(&kept))?;
        Ok(Datastore {
            inner,
            keeper: Mutex::new(Some(keeper)),
        })
    }

    /// What clients see.
    pub fn tree(&self) -> Arc<dyn Tree> {
        Arc::new(View(self.inner.clone()))
    }

    /// What it is doing.
    pub fn census(&self) -> Census {
        self.inner.census()
    }

    /// Begins to write everything to the directory that is only on flash. The census says when that is done.
    pub fn begin_flush(&self) {
        self.inner.flushing.store(true, Ordering::SeqCst);
        self.inner.bell.notify_all();
    }

    /// The disks in use, with the files they are.
    pub fn in_use(&self) -> Vec<(DiskId, Arc<FileOrigin>)> {
        let files: Vec<_> = lock(&self.inner.files).values().cloned().collect();
        let cached = files.iter().filter_map(|file| file.cached());
        cached.map(|c| (c.disk, c.origin.clone())).collect()
    }

    /// Serves every file that has something only on flash.
    pub fn open_dirty(&self) {
        self.inner.open_dirty();
    }

    /// Closes every disk, for which all must be written back, and forgets the datastore's files. False if something
    /// is still on flash only.
    pub fn dissolve(&self) -> bool {
        let known: Vec<_> = lock(&self.inner.known).clone().into_iter().collect();
        known.into_iter().all(|(key, disk)| {
            let alone = self.inner.file(&key).take();
            self.inner.disks.owed(disk) == 0 && self.inner.forget(&alone, &key, disk)
        })
    }

    /// Ends what goes on in the background. Nobody may use the tree any more.
    pub fn stop(&self) {
        *lock(&self.inner.stop) = true;
        self.inner.bell.notify_all();
        if let Some(keeper) = lock(&self.keeper).take() {
            // It has nothing to tell.
            let _ = keeper.join();
        }
    }
}

impl Drop for Datastore {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Closes disks that nobody uses, and forgets files that are gone.
fn keep(inner: &Weak<Inner>) {
    if let Some(inner) = inner.upgrade() {
        inner.open_dirty();
        inner.forget_gone();
    }
    loop {
        let Some(inner) = inner.upgrade() else { return };
        let stop = lock(&inner.stop);
        if *stop {
            return;
        }
        let flushing = inner.flushing.load(Ordering::SeqCst);
        let round = if flushing { FLUSH_ROUND } else { ROUND };
        let waited = inner.bell.wait_timeout(stop, round);
        let (stop, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *stop {
            return;
        }
        drop(stop);
        if inner.flushing.load(Ordering::SeqCst) {
            inner.flush();
        }
        inner.close_idle();
    }
}

impl Inner {
    fn file(&self, key: &Key) -> Arc<File> {
        let mut files = lock(&self.files);
        let file = files.entry(*key);
        file.or_insert_with(|| Arc::new(File::new(*key))).clone()
    }

    fn is_known(&self, key: &Key) -> Option<DiskId> {
        lock(&self.known).get(key).copied()
    }

    fn note_name(&self, key: &Key, name: &[u8]) {
        if self.rules.name_fits(name) {
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

    /// Looks at a file, if that was not done lately; false if somebody else changed it.
    fn look(&self, cached: &Cached) -> Outcome<bool> {
        {
            let mut known = lock(&cached.known);
            if known.1.elapsed() < LOOK {
                return Ok(true);
            }
            // Not held while the file is asked: data threads want to tell of it.
            known.1 = Instant::now();
        }
        let same = cached.origin.looks_same()?;
        if same {
            let now = self.dir.attributes_of_open(cached.origin.file())?;
            if now.links == 0 {
                return Err(Status::Stale);
            }
            lock(&cached.known).0 = now;
        }
        Ok(same)
    }

    /// Makes a file a disk, if that can be now.
    fn attach(&self, file: &Arc<File>) -> Outcome<()> {
        let alone = file.take();
        if alone.cached().is_some() || file.passes() {
            return Ok(());
        }
        let key = &file.key;
        let opened = self.dir.open_regular(key)?;
        let known = self.dir.attributes_of_open(&opened)?;
        // What was written past the cache so far, and is not durable: as a disk it will not be asked about.
        opened
            .sync_all()
            .inspect_err(|_| self.dir.unstable_lost())?;
        let claim = {
            let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
            hearth_io::file::claim_for_other(Path::new(&path), false)
        };
        let name = self.name_of(&opened, key);
        let attached = match claim {
            Ok(claim) => {
                let origin = Arc::new(FileOrigin::new(opened, claim, name.clone())?);
                let disk = self.disks.attach(key, &origin);
                disk.map(|disk| (disk, origin))
            }
            Err(error) => {
                tracing::warn!(file = %name, "{error}");
                Err(NotNow::InUse)
            }
        };
        match attached {
            Ok((disk, origin)) => {
                lock(&self.known).insert(*key, disk);
                let known = Mutex::new((known, Instant::now()));
                alone.set(Some(Arc::new(Cached {
                    disk,
                    origin,
                    known,
                    draining: AtomicBool::new(false),
                })));
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

    fn name_of(&self, file: &std::fs::File, key: &Key) -> String {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        path.map_or_else(
            |_| format!("{:02x?}", key.bytes()),
            |p| p.display().to_string(),
        )
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
        let name = self.name_of(cached.origin.file(), &file.key);
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
        let bound = bound(cached.origin.len());
        if bound > cached.origin.bound() {
            self.disks
                .grow(cached.disk, bound)
                .then(|| cached.origin.set_bound(bound))
                .ok_or(Status::JukeBox)?;
        }
        let now = self.dir.attributes_of_open(cached.origin.file())?;
        *lock(&cached.known) = (now, Instant::now());
        Ok(())
    }

    /// Tells of a file as its disk has it.
    fn told_of(&self, key: &Key, attributes: &mut Attributes) {
        if attributes.kind != Kind::Regular {
            return;
        }
        let file = lock(&self.files).get(key).cloned();
        if let Some(cached) = file.and_then(|file| file.cached()) {
            overlay(attributes, &cached);
        }
    }

    fn found(&self, mut found: Found) -> Found {
        self.told_of(&found.key, &mut found.attributes);
        found
    }

    fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// There is room for `len` more bytes of what is dirty.
    fn has_room(&self, len: u64) -> bool {
        self.budget.take(len, || {
            let free = self.dir.room().ok()?.bytes_available;
            Some((free, self.owed_by_sparse()))
        })
    }

    fn owed_by_sparse(&self) -> u64 {
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        let cached = files.iter().filter_map(|file| file.cached());
        let sparse = cached.filter(|c| c.origin.is_sparse());
        sparse.map(|c| self.disks.needs(c.disk)).sum()
    }

    fn census(&self) -> Census {
        let known: Vec<DiskId> = lock(&self.known).values().copied().collect();
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        Census {
            disks: known.len() as u64,
            open: files.iter().filter(|file| file.cached().is_some()).count() as u64,
            dirty: known.iter().map(|disk| self.disks.owed(*disk)).sum(),
            flushing: self.flushing.load(Ordering::SeqCst),
        }
    }

    /// Serves files that have something only on flash, so that it is written back.
    fn open_dirty(&self) {
        let known: Vec<_> = lock(&self.known).clone().into_iter().collect();
        for (key, disk) in known {
            if self.disks.owed(disk) == 0 || self.is_stopped() {
                continue;
            }
            if let Err(status) = self.begin(&key)
                && status != Status::Stale
            {
                tracing::warn!("a file with something only on flash cannot be opened: {status}");
            }
        }
    }

    /// Forgets files that were removed while nobody looked.
    fn forget_gone(&self) {
        let known: Vec<_> = lock(&self.known).clone().into_iter().collect();
        for (key, disk) in known {
            if self.is_stopped() {
                return;
            }
            self.forget_if_gone(&key, disk);
        }
    }

    fn is_stopped(&self) -> bool {
        *lock(&self.stop)
    }

    fn forget_if_gone(&self, key: &Key, disk: DiskId) {
        if self.dir.attributes(key) != Err(Status::Stale) {
            return;
        }
        let alone = self.file(key).take();
        if !self.forget(&alone, key, disk) {
            tracing::warn!(
                disk,
                "the cache of a file that is gone cannot be dropped now"
            );
        }
    }

    fn forget(&self, alone: &Alone, key: &Key, disk: DiskId) -> bool {
        let gone = self.disks.forget(key, disk);
        if gone {
            alone.set(None);
            lock(&self.known).remove(key);
            lock(&self.named).remove(key);
        }
        gone
    }

    /// Closes the disks that nobody uses, and forgets that there are files that nobody uses.
    fn close_idle(&self) {
        let Some(since) = Instant::now().checked_sub(IDLE) else {
            return;
        };
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        for file in files {
            if self.is_stopped() {
                return;
            }
            let Some(alone) = file.try_take(since) else {
                // Used again before all of it was written back.
                if let Some(cached) = file.cached()
                    && cached.draining.swap(false, Ordering::SeqCst)
                {
                    self.disks.drain(cached.disk, false);
                }
                continue;
            };
            let Some(cached) = alone.cached() else {
                continue;
            };
            if !self.disks.is_drained(cached.disk) {
                cached.draining.store(true, Ordering::SeqCst);
                self.disks.drain(cached.disk, true);
            } else if self.disks.detach(cached.disk, &cached.origin) {
                alone.set(None);
            }
        }
        // Whoever has one has it from here: who is not counted has none.
        lock(&self.files).retain(|_, file| {
            Arc::strong_count(file) > 1 || file.cached().is_some() || file.passes()
        });
    }

    /// Writes back what there is to be.
    fn flush(&self) {
        self.open_dirty();
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        let cached: Vec<_> = files.iter().filter_map(|file| file.cached()).collect();
        for cached in &cached {
            self.disks.drain(cached.disk, true);
        }
        let known: Vec<DiskId> = lock(&self.known).values().copied().collect();
        let done = cached.iter().all(|c| self.disks.is_drained(c.disk))
            && known.iter().all(|disk| self.disks.owed(*disk) == 0);
        if done {
            for cached in &cached {
                self.disks.drain(cached.disk, false);
            }
            self.flushing.store(false, Ordering::SeqCst);
            self.disks.flushed();
        }
    }
}

/// What is known of a file that is a disk now.
fn told(cached: &Cached) -> Attributes {
    let mut known = lock(&cached.known).0;
    overlay(&mut known, cached);
    known
}

/// The least bound for a file of this length.
pub fn bound(len: u64) -> u64 {
    len.max(1).next_multiple_of(STEP).min(DISK_MAX)
}

fn overlay(attributes: &mut Attributes, cached: &Cached) {
    attributes.size = cached.origin.len();
    (attributes.modified, attributes.changed) = cached.origin.times();
}

/// The tree, as the server has it.
struct View(Arc<Inner>);

fn failed<T>(status: Status) -> Changed<T> {
    Changed {
        outcome: Err(status),
        wcc: Wcc::default(),
    }
}

impl View {
    fn read_cached(
        &self,
        who: &Who,
        using: Using,
        cached: Arc<Cached>,
        offset: u64,
        count: u32,
        done: Done<Outcome<Read>>,
    ) {
        let attributes = told(&cached);
        if let Err(status) = may_use_data(who, &attributes, false) {
            return done.tell(Err(status));
        }
        let size = cached.origin.len();
        let len = size.saturating_sub(offset).min(u64::from(count));
        let end = offset.saturating_add(len) >= size;
        if len == 0 {
            return done.tell(Ok(Read {
                data: Box::new(Vec::new()),
                end: true,
                attributes: Some(attributes),
            }));
        }
        let buf = Buf::zeroed(Request::buffer_len(offset, len) as usize);
        let request = Request::read(0, cached.disk, offset, len, &buf, 0);
        let answer = move |result: Result<(), ReqError>, buf: Option<BufSlice>| {
            let read = result.map_err(status).map(|()| Read {
                data: Box::new(Piece {
                    buf,
                    start: (offset % BLOCK) as usize,
                    len: len as usize,
                }) as Data,
                end,
                attributes: Some(attributes),
            });
            drop(using);
            done.tell(read);
        };
        self.0
            .port
            .ask(self.0.next_turn(), request, Box::new(answer));
    }

    fn write_cached(
        &self,
        who: &Who,
        using: Using,
        cached: Arc<Cached>,
        write: &Write,
        done: Done<Changed<Written>>,
    ) {
        let inner = &self.0;
        let prepared = inner.prepare_write(who, &using, &cached, write);
        if let Err(status) = prepared {
            return done.tell(failed(status));
        }
        let data = write.data.as_ref();
        let (offset, len) = (write.offset, data.len() as u64);
        let verifier = inner.dir.write_verifier();
        let stable = write.stable;
        let tell = move |cached: &Cached, result: Result<(), ReqError>| {
            let outcome = result.map_err(status).map(|()| {
                cached.origin.written();
                Written {
                    count: len as u32,
                    stable,
                    verifier,
                }
            });
            Changed {
                outcome,
                wcc: Wcc {
                    before: None,
                    after: Some(told(cached)),
                },
            }
        };
        if len == 0 {
            return done.tell(tell(&cached, Ok(())));
        }
        let buf = Buf::zeroed(Request::buffer_len(offset, len) as usize);
        let mut window = buf.slice((offset % BLOCK) as usize, len as usize);
        window.bytes_mut().copy_from_slice(data);
        drop(window);
        let durable = stable != Stability::Unstable;
        let request = Request::write(0, cached.disk, offset, len, durable, &buf, 0);
        let answer = move |result: Result<(), ReqError>, _: Option<BufSlice>| {
            let changed = tell(&cached, result);
            drop(using);
            done.tell(changed);
        };
        inner.port.ask(inner.next_turn(), request, Box::new(answer));
    }

    /// Cuts a file off, or makes it longer, and what else is to be set with it.
    fn set_cached(
        &self,
        who: &Who,
        cached: &Cached,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()> {
        let inner = &self.0;
        let before = told(cached);
        let outcome = (|| {
            if only_if.is_some_and(|time| time != before.changed) {
                return Err(Status::NotSync);
            }
            if let Some(size) = set.size {
                may_use_data(who, &before, true)?;
                let bound = bound(size);
                if size > DISK_MAX {
                    return Err(Status::FBig);
                }
                if bound > cached.origin.bound() {
                    if !inner.disks.grow(cached.disk, bound) {
                        return Err(Status::JukeBox);
                    }
                    cached.origin.set_bound(bound);
                }
                let old = cached.origin.len();
                if size < old {
                    // Durably, before the file is cut: else a crash could bring it back when the file grows again.
                    let end = old.next_multiple_of(BLOCK);
                    if !inner.disks.zero(cached.disk, size, end - size) {
                        return Err(Status::Io);
                    }
                }
            }
            let timed = set.size.is_some() || set.modified != SetTime::Keep;
            let set = cached
                .origin
                .changed_by(timed, || inner.dir.set_attributes(who, file, set, None));
            set?.outcome
        })();
        if let Ok(now) = inner.dir.attributes_of_open(cached.origin.file()) {
            *lock(&cached.known) = (now, Instant::now());
        }
        Changed {
            outcome,
            wcc: Wcc {
                before: Some(before.before()),
                after: Some(told(cached)),
            },
        }
    }

    /// A file that a name stood for may be gone now, and its cache with it.
    fn drop_if_gone(&self, victim: Option<Found>) {
        let Some(victim) = victim else { return };
        if let Some(disk) = self.0.is_known(&victim.key) {
            self.0.forget_if_gone(&victim.key, disk);
        }
    }

    /// What has a name, if that is a file.
    fn victim(&self, dir: &Key, name: &[u8]) -> Option<Found> {
        let found = self.0.dir.lookup(&root(), dir, name).ok();
        found.filter(|found| found.attributes.kind == Kind::Regular)
    }
}

impl Inner {
    /// Sees to it that a write may be done, and that the file is long enough for it.
    fn prepare_write(
        &self,
        who: &Who,
        _using: &Using,
        cached: &Cached,
        write: &Write,
    ) -> Outcome<()> {
        let known = told(cached);
        may_use_data(who, &known, true)?;
        if known.mode & 0o6000 != 0 && !who.is_root() {
            // A file that is written by somebody else than root runs as nobody's any more.
            let mode = rustix::fs::Mode::from_raw_mode(known.mode & !0o6000);
            let disarmed = rustix::fs::fchmod(cached.origin.file(), mode);
            disarmed.map_err(std::io::Error::from)?;
            lock(&cached.known).0.mode = known.mode & !0o6000;
        }
        let len = write.data.as_ref().len() as u64;
        let end = write.offset.checked_add(len).filter(|end| *end <= DISK_MAX);
        let end = end.ok_or(Status::FBig)?;
        if cached.origin.is_sparse() || end > cached.origin.len() {
            let whole = end.next_multiple_of(BLOCK) - write.offset / BLOCK * BLOCK;
            if !self.has_room(whole) {
                return Err(Status::NoSpace);
            }
        }
        let durable = write.stable != Stability::Unstable;
        if len > 0 && !cached.origin.reaches(end, durable) {
            let bound = bound(end);
            if bound > cached.origin.bound() {
                if !self.disks.grow(cached.disk, bound) {
                    return Err(Status::JukeBox);
                }
                cached.origin.set_bound(bound);
            }
            // Before the data: what is answered never lies behind the end.
            cached.origin.extend(end, durable)?;
        }
        Ok(())
    }
}

impl Tree for View {
    fn root(&self) -> Key {
        self.0.dir.root()
    }

    fn attributes(&self, file: &Key) -> Outcome<Attributes> {
        let open = lock(&self.0.files).get(file).cloned();
        let Some(cached) = open.and_then(|open| open.cached()) else {
            // What waits on flash since before a restart: its times are known once it is opened.
            let owed = |disk| self.0.disks.owed(disk) > 0;
            if self.0.is_known(file).is_some_and(owed) {
                drop(self.0.begin(file)?);
                let mut attributes = self.0.dir.attributes(file)?;
                self.0.told_of(file, &mut attributes);
                return Ok(attributes);
            }
            return self.0.dir.attributes(file);
        };
        // Somebody else's change is not waited for here: a heartbeat must not wait for requests in flight.
        let same = self.0.look(&cached)?;
        if same {
            return Ok(told(&cached));
        }
        drop(cached);
        let (using, cached) = self.0.begin(file)?;
        let attributes = cached.map(|cached| told(&cached));
        drop(using);
        attributes.map_or_else(|| self.0.dir.attributes(file), Ok)
    }

    fn set_attributes(
        &self,
        who: &Who,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()> {
        let kind = self.0.dir.attributes(file).map(|a| a.kind);
        if kind != Ok(Kind::Regular) {
            return self.0.dir.set_attributes(who, file, set, only_if);
        }
        match self.0.begin(file) {
            Err(status) => failed(status),
            Ok((using, None)) => {
                let changed = self.0.dir.set_attributes(who, file, set, only_if);
                drop(using);
                changed
            }
            Ok((using, Some(cached))) => {
                if set.size.is_none() {
                    let changed = self.set_cached(who, &cached, file, set, only_if);
                    drop(using);
                    return changed;
                }
                drop((using, cached));
                // Nobody else reads or writes meanwhile.
                let alone = self.0.file(file).take();
                match alone.cached() {
                    Some(cached) => self.set_cached(who, &cached, file, set, only_if),
                    // It was closed in between, for nobody used it.
                    None => failed(Status::JukeBox),
                }
            }
        }
    }

    fn lookup(&self, who: &Who, dir: &Key, name: &[u8]) -> Outcome<Found> {
        let found = self.0.dir.lookup(who, dir, name)?;
        if found.attributes.kind == Kind::Regular {
            self.0.note_name(&found.key, name);
        }
        Ok(self.0.found(found))
    }

    fn read_link(&self, who: &Who, link: &Key) -> Outcome<Vec<u8>> {
        self.0.dir.read_link(who, link)
    }

    fn read(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Outcome<Read>>) {
        match self.0.begin(file) {
            Err(status) => done.tell(Err(status)),
            Ok((using, Some(cached))) => self.read_cached(who, using, cached, offset, count, done),
            Ok((using, None)) => {
                self.0.dir.read(who, file, offset, count, done);
                drop(using);
            }
        }
    }

    fn write(&self, who: &Who, file: &Key, write: Write, done: Done<Changed<Written>>) {
        match self.0.begin(file) {
            Err(status) => done.tell(failed(status)),
            Ok((using, Some(cached))) => self.write_cached(who, using, cached, &write, done),
            Ok((using, None)) => {
                self.0.dir.write(who, file, write, done);
                drop(using);
            }
        }
    }

    fn commit(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Changed<[u8; 8]>>) {
        let (using, cached) = match self.0.begin(file) {
            Err(status) => return done.tell(failed(status)),
            Ok((using, Some(cached))) => (using, cached),
            Ok((using, None)) => {
                self.0.dir.commit(who, file, offset, count, done);
                drop(using);
                return;
            }
        };
        let inner = &self.0;
        let ready = may_use_data(who, &told(&cached), true)
            // Unstable writes may have made it longer.
            .and_then(|()| Ok(cached.origin.sync_length()?));
        if let Err(status) = ready {
            if status == Status::Io {
                inner.dir.unstable_lost();
            }
            return done.tell(failed(status));
        }
        let request = Request::new(0, cached.disk, ReqOp::Flush, 0, 0, None, 0);
        let dir = inner.dir.clone();
        let answer = move |result: Result<(), ReqError>, _: Option<BufSlice>| {
            if result == Err(ReqError::Io) {
                dir.unstable_lost();
            }
            let changed = Changed {
                outcome: result.map_err(status).map(|()| dir.write_verifier()),
                wcc: Wcc {
                    before: None,
                    after: Some(told(&cached)),
                },
            };
            drop(using);
            done.tell(changed);
        };
        inner.port.ask(inner.next_turn(), request, Box::new(answer));
    }

    fn create(&self, who: &Who, dir: &Key, name: &[u8], what: &Create<'_>) -> Changed<Found> {
        // A file that is there may be a disk: what its creator wants of its length is done as with any disk.
        let mut cut = None;
        let mut what = *what;
        if let Create::File(How::Unchecked(set)) = &mut what
            && set.size.is_some()
            && self.victim(dir, name).is_some()
        {
            cut = set.size.take();
        }
        let mut changed = self.0.dir.create(who, dir, name, &what);
        if let Ok(found) = &mut changed.outcome {
            if found.attributes.kind == Kind::Regular {
                self.0.note_name(&found.key, name);
            }
            if let Some(size) = cut {
                let set = SetAttributes {
                    size: Some(size),
                    ..SetAttributes::default()
                };
                let set = self.set_attributes(who, &found.key, &set, None);
                match (set.outcome, set.wcc.after) {
                    (Err(status), _) => {
                        changed.outcome = Err(status);
                        return changed;
                    }
                    (Ok(()), Some(after)) => found.attributes = after,
                    (Ok(()), None) => {}
                }
            }
            *found = self.0.found(*found);
        }
        changed
    }

    fn remove(&self, who: &Who, dir: &Key, name: &[u8], directory: bool) -> Changed<()> {
        let victim = self.victim(dir, name);
        let changed = self.0.dir.remove(who, dir, name, directory);
        if changed.outcome.is_ok() {
            self.drop_if_gone(victim);
        }
        changed
    }

    fn rename(&self, who: &Who, from: (&Key, &[u8]), to: (&Key, &[u8])) -> (Outcome<()>, Wcc, Wcc) {
        let victim = self.victim(to.0, to.1);
        let renamed = self.0.dir.rename(who, from, to);
        if renamed.0.is_ok() {
            self.drop_if_gone(victim);
            if let Some(found) = self.victim(to.0, to.1) {
                self.0.note_name(&found.key, to.1);
            }
        }
        renamed
    }

    fn link(&self, who: &Who, file: &Key, dir: &Key, name: &[u8]) -> Changed<Attributes> {
        let mut changed = self.0.dir.link(who, file, dir, name);
        if let Ok(attributes) = &mut changed.outcome {
            self.0.told_of(file, attributes);
        }
        changed
    }

    fn list(
        &self,
        who: &Who,
        dir: &Key,
        cookie: u64,
        whole: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool> {
        let mut tell = |mut entry: Entry<'_>| {
            if let Some(found) = &mut entry.found {
                if found.attributes.kind == Kind::Regular {
                    self.0.note_name(&found.key, entry.name);
                }
                *found = self.0.found(*found);
            }
            take(entry)
        };
        self.0.dir.list(who, dir, cookie, whole, &mut tell)
    }

    fn room(&self) -> Outcome<Room> {
        let mut room = self.0.dir.room()?;
        let promised = self.0.owed_by_sparse();
        room.bytes_free = room.bytes_free.saturating_sub(promised);
        room.bytes_available = room.bytes_available.saturating_sub(promised);
        Ok(room)
    }
}
