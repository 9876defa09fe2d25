//! A file as the origin of a disk that never ends.
//!
//! Reads behind the file's end give zeros; writes and zeroing are cut off there, so that nothing the engine
//! writes back late makes a file longer that was cut meanwhile. Everything goes through the page cache, as other
//! programs on this host do: what they read after a flush is what was written.
//!
//! Clients must see a file's times as of the last write that was answered, not as of its writing
//! back. So each write of ours sets the time of change back to what clients are told. That it is so
//! between two of our writes also tells them from somebody else's.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_io::{BLOCK, IoError, IoOp, Job, Link, OpKind, Remote};
use hearth_mirror::Cache;
use hearth_nfs::v3::Time;
use rustix::fs::{FallocateFlags, Stat, Timespec, Timestamps, UTIME_OMIT};

use crate::Look;
use crate::body::Body;
use crate::twin::scrub::Reconciled;

/// Of a file's data, so much is taken for whole at first.
const FILLED_STEP: u64 = 1 << 20;
/// Threads that read and write the files of a datastore.
const HANDS: usize = 8;

/// The present, nanoseconds since 1970.
pub fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

/// Bytes from which on no file system keeps a file's content with its properties.
const SHORT: i64 = 64 << 10;

/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;
/// How far apart, in nanoseconds, writes may take the time that are answered at one time.
const AT_ONE_TIME: i64 = SECOND / 10;

/// Seconds, and nanoseconds of the next one.
fn split(ns: i64) -> (i64, u32) {
    (ns.div_euclid(SECOND), ns.rem_euclid(SECOND) as u32)
}

/// As clients are told.
pub fn time(ns: i64) -> Time {
    let (seconds, nanos) = split(ns);
    Time {
        seconds: seconds.clamp(0, i64::from(u32::MAX)) as u32,
        nanos,
    }
}

/// A time of a file, in nanoseconds: of a year after 2262 the last that can be counted.
fn in_ns(seconds: i64, nanos: i64) -> i64 {
    seconds.saturating_mul(SECOND).saturating_add(nanos)
}

/// True if a file may have this time of change though nothing changed it since it was left with the other. Of two trees, the
/// one that is read now may keep whole seconds only.
pub fn is_same_time(left_ns: i64, now_ns: i64, has_two: bool) -> bool {
    left_ns == now_ns || has_two && split(left_ns).0.checked_mul(SECOND) == Some(now_ns)
}

fn modified_ns(stat: &Stat) -> i64 {
    in_ns(stat.st_mtime, stat.st_mtime_nsec as i64)
}

fn changed_ns(stat: &Stat) -> i64 {
    in_ns(stat.st_ctime, stat.st_ctime_nsec as i64)
}

fn look_of(stat: &Stat) -> Look {
    Look {
        size: stat.st_size as u64,
        modified_ns: modified_ns(stat),
        changed_ns: changed_ns(stat),
        device: stat.st_dev,
        inode: stat.st_ino,
    }
}

/// What the file looks like when nobody else has touched it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    size: u64,
    modified_ns: i64,
    /// In which tree, if there are two.
    side: usize,
}

/// Takes back the promise that a file looks as it was left; false if that is not durable.
pub type Withdraw = Box<dyn Fn() -> bool + Send + Sync>;

/// See the module.
pub struct FileOrigin {
    file: Body,
    name: String,
    /// What the engine may ask for.
    bound: AtomicU64,
    /// Held while the file is changed or compared.
    seen: Mutex<Seen>,
    /// Its length, to be read without the lock.
    size: AtomicU64,
    /// How much of that outlives a power cut.
    synced: AtomicU64,
    /// As clients are told.
    modified: AtomicU64,
    changed: AtomicU64,
    /// Somebody else has changed the file.
    replaced: AtomicBool,
    /// There may be holes in it.
    sparse: AtomicBool,
    /// What is written to it stays on flash.
    scratch: AtomicBool,
    /// The promise is taken back.
    withdrawn: AtomicBool,
    withdraw: OnceLock<Withdraw>,
    /// It is open for reading alone, because it could not be written.
    read_only: AtomicBool,
    /// Nobody else on this host may use it as an image.
    claims: Mutex<Vec<hearth_io::Claim>>,
}

impl fmt::Debug for FileOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FileOrigin").field(&self.name).finish()
    }
}

/// Somebody else has changed the file: what would be done to it is not.
fn too_far() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl FileOrigin {
    /// What the file is called, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the file is now. It may have several names, and this is one of them.
    pub fn path(&self) -> Option<PathBuf> {
        self.file.path()
    }

    /// Of an open file.
    pub fn new(file: Body, claims: Vec<hearth_io::Claim>, name: String) -> io::Result<FileOrigin> {
        let (stat, side) = file.stat()?;
        let size = stat.st_size as u64;
        let origin = FileOrigin {
            read_only: AtomicBool::new(file.is_read_only()),
            file,
            name,
            bound: AtomicU64::new(0),
            seen: Mutex::new(Seen {
                size,
                modified_ns: modified_ns(&stat),
                side,
            }),
            size: AtomicU64::new(size),
            synced: AtomicU64::new(0),
            modified: AtomicU64::new(modified_ns(&stat) as u64),
            changed: AtomicU64::new(changed_ns(&stat) as u64),
            replaced: AtomicBool::new(false),
            sparse: AtomicBool::new(true),
            scratch: AtomicBool::new(false),
            withdrawn: AtomicBool::new(false),
            withdraw: OnceLock::new(),
            claims: Mutex::new(claims),
        };
        origin.note_holes(&stat);
        Ok(origin)
    }

    /// What is called, once, before the file is changed.
    pub fn before_change(&self, withdraw: Withdraw) {
        // Set once, before anybody else knows of it.
        let _ = self.withdraw.set(withdraw);
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_holes(&self, stat: &Stat) {
        let has = stat.st_blocks as u64 * 512 < stat.st_size as u64;
        self.sparse.store(has, Ordering::Relaxed);
    }

    /// Bytes the file has.
    pub fn len(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// True if it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The open file.
    pub fn file(&self) -> &Body {
        &self.file
    }

    /// Parts of a range outside which the file has no data, as offset and length, in whole blocks but for the range's ends. They
    /// are at most twice as long as the data in them, and a little.
    pub fn filled(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut parts = Vec::new();
        let (mut at, mut step) = (from, FILLED_STEP);
        while let Some(data) = self.file.next_data(at).filter(|data| *data < to) {
            step = match data == at {
                true => step.saturating_mul(2),
                false => FILLED_STEP,
            };
            let begin = (data / BLOCK * BLOCK).max(from);
            let end = (begin.saturating_add(step) / BLOCK * BLOCK).clamp(data + 1, to);
            parts.push((begin, end - begin));
            at = end;
        }
        parts
    }

    /// What the engine may ask for.
    pub fn bound(&self) -> u64 {
        self.bound.load(Ordering::Acquire)
    }

    /// From now on it may ask for more.
    pub fn set_bound(&self, bound: u64) {
        self.bound.fetch_max(bound, Ordering::AcqRel);
    }

    /// There may be holes in it, for which the file system has to find room.
    pub fn is_sparse(&self) -> bool {
        self.sparse.load(Ordering::Relaxed) && !self.is_scratch()
    }

    /// What is written to it stays on flash: the file has its length and nothing else.
    pub fn is_scratch(&self) -> bool {
        self.scratch.load(Ordering::Acquire)
    }

    /// It is such a file from now on.
    pub fn set_scratch(&self) {
        self.scratch.store(true, Ordering::Release);
    }

    /// True if the file has no bytes of its own, whatever its length. A short one may have them where they cannot be
    /// seen, beside its other properties.
    pub fn is_all_hole(&self) -> io::Result<bool> {
        let (stat, _) = self.file.stat()?;
        Ok(stat.st_blocks == 0 && (stat.st_size == 0 || stat.st_size >= SHORT))
    }

    /// True if the file system has room for this range already: there is no hole in it.
    pub fn has_place(&self, from: u64, to: u64) -> bool {
        self.file.has_place(from, to)
    }

    /// When its content and when anything about it last changed, as clients are told.
    pub fn times(&self) -> (Time, Time) {
        let get = |t: &AtomicU64| time(t.load(Ordering::Acquire) as i64);
        (get(&self.modified), get(&self.changed))
    }

    /// A write was answered.
    pub fn written(&self) {
        let now = now_ns();
        for time in [&self.modified, &self.changed] {
            // Writes that are answered at one time need not set it in their order. A time further ahead was set by a
            // program, or by a clock that was put back. If it stayed, it would hide all writes until then.
            let later = |known: u64| match known as i64 {
                known if known.saturating_sub(now) > AT_ONE_TIME => Some(now as u64),
                known => Some(known.max(now) as u64),
            };
            let _ = time.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
        }
    }

    /// True if it could not be written when it was last opened.
    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Acquire)
    }

    /// Opens it for writing, if it is open for reading alone. Called with the lock.
    fn make_writable(&self) -> io::Result<()> {
        if !self.is_read_only() {
            return Ok(());
        }
        self.file.make_writable()?;
        let claimed = self.file.claim();
        let claims = claimed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        *self.claims.lock().unwrap_or_else(PoisonError::into_inner) = claims;
        self.read_only.store(false, Ordering::Release);
        Ok(())
    }

    /// Takes the promise back, durably, if that was not done.
    fn begin_change(&self) -> io::Result<()> {
        self.make_writable()?;
        if self.withdrawn.load(Ordering::Acquire) {
            return Ok(());
        }
        if !self.withdraw.get().is_none_or(|withdraw| withdraw()) {
            return Err(too_far());
        }
        self.withdrawn.store(true, Ordering::Release);
        Ok(())
    }

    /// It was noticed that somebody else has changed the file, and nothing was done about it yet.
    pub fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Acquire)
    }

    /// Compares the file with what it was left as; false if somebody else changed it.
    pub fn look(&self) -> io::Result<bool> {
        let mut seen = self.lock();
        let stat = self.file.stat()?;
        Ok(self.compare(&mut seen, &stat))
    }

    /// The same, but does not wait for a write of ours, which looks itself.
    pub fn looks_same(&self) -> io::Result<bool> {
        let Ok(mut seen) = self.seen.try_lock() else {
            return Ok(!self.is_replaced());
        };
        let stat = self.file.stat()?;
        Ok(self.compare(&mut seen, &stat))
    }

    fn compare(&self, seen: &mut Seen, (stat, side): &(Stat, usize)) -> bool {
        self.note_holes(stat);
        if seen.side != *side {
            // The other tree is read now, whose file system may keep less of a time.
            seen.side = *side;
            seen.modified_ns = modified_ns(stat);
        }
        if stat.st_size as u64 != seen.size || modified_ns(stat) != seen.modified_ns {
            self.replaced.store(true, Ordering::Release);
        }
        !self.is_replaced()
    }

    /// Takes the file as it is now.
    pub fn accept(&self) -> io::Result<()> {
        let mut seen = self.lock();
        let (stat, side) = self.file.stat()?;
        self.take_over(&mut seen, &stat, side);
        self.modified
            .store(modified_ns(&stat) as u64, Ordering::Release);
        self.changed
            .fetch_max(changed_ns(&stat) as u64, Ordering::AcqRel);
        self.replaced.store(false, Ordering::Release);
        Ok(())
    }

    fn take_over(&self, seen: &mut Seen, stat: &Stat, side: usize) {
        seen.side = side;
        seen.size = stat.st_size as u64;
        seen.modified_ns = modified_ns(stat);
        self.size.store(seen.size, Ordering::Release);
        self.synced.fetch_min(seen.size, Ordering::AcqRel);
        self.note_holes(stat);
    }

    /// Sets the time of change to what clients are told.
    fn set_times(&self, seen: &mut Seen) -> io::Result<()> {
        let (seconds, nanos) = split(self.modified.load(Ordering::Acquire) as i64);
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT as _,
            },
            last_modification: Timespec {
                tv_sec: seconds,
                tv_nsec: nanos.into(),
            },
        };
        self.file.set_times(times)?;
        // A file system may keep less of it.
        let (stat, side) = self.file.stat()?;
        seen.modified_ns = modified_ns(&stat);
        seen.side = side;
        Ok(())
    }

    /// Changes the file, if nobody else has, and leaves the times as told.
    fn change<T>(&self, work: impl FnOnce(&mut Seen) -> io::Result<T>) -> io::Result<T> {
        let mut seen = self.lock();
        let stat = self.file.stat()?;
        if !self.compare(&mut seen, &stat) {
            // What is to be written back would be mixed with somebody else's.
            return Err(too_far());
        }
        self.begin_change()?;
        let done = work(&mut seen);
        let timed = self.set_times(&mut seen);
        let done = done?;
        timed?;
        Ok(done)
    }

    /// True if the file is so long, and with `durable`, stays so in a power cut.
    pub fn reaches(&self, len: u64, durable: bool) -> bool {
        len <= self.len() && (!durable || len <= self.synced.load(Ordering::Acquire))
    }

    /// How much of its length outlives a power cut.
    pub fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Takes the promise back that the file looks as it was left, unless somebody else has changed it: then it stands, so that
    /// this is known after a crash, too.
    pub fn withdraw(&self) -> io::Result<()> {
        if self.withdrawn.load(Ordering::Acquire) {
            return Ok(());
        }
        self.change(|_| Ok(()))
    }

    /// Fails if the file cannot be changed now.
    pub fn check_writable(&self) -> io::Result<()> {
        self.change(|_| Ok(()))
    }

    /// Makes the file at least `len` long.
    pub fn grow(&self, len: u64) -> io::Result<()> {
        self.change(|seen| {
            if len > seen.size {
                self.file.set_len(len)?;
                seen.size = len;
                self.size.store(len, Ordering::Release);
                self.sparse.store(true, Ordering::Relaxed);
            }
            Ok(())
        })
    }

    /// Makes durable what the file has, and how long it is.
    pub fn sync(&self) -> io::Result<()> {
        // What it has from here on may come too late.
        let len = self.len();
        self.file.sync_all()?;
        self.synced.fetch_max(len, Ordering::AcqRel);
        Ok(())
    }

    /// Lets `work` change the file's length, times or owner, and takes over what it left. With `timed`, clients are
    /// told the time of change it left.
    pub fn changed_by<T>(&self, timed: bool, work: impl FnOnce() -> T) -> io::Result<T> {
        let mut seen = self.lock();
        let before = self.file.stat()?;
        if !self.compare(&mut seen, &before) {
            return Err(too_far());
        }
        self.begin_change()?;
        let done = work();
        let (stat, side) = self.file.stat()?;
        self.take_over(&mut seen, &stat, side);
        if timed {
            self.modified
                .store(modified_ns(&stat) as u64, Ordering::Release);
        }
        self.changed
            .fetch_max(changed_ns(&stat) as u64, Ordering::AcqRel);
        Ok(done)
    }

    /// Compares a range of the file in its two trees with the cache, while nothing else writes it. Where a copy that the guest
    /// wrote shows which tree is right, or `prefer` says it, the other gets that, and cached copies of something else are
    /// dropped. None: one tree is not current, or another program changed the file.
    pub fn reconcile(
        &self,
        offset: u64,
        len: u64,
        cache: &dyn Cache,
        prefer: Option<usize>,
    ) -> io::Result<Option<Reconciled>> {
        let mut seen = self.lock();
        let stat = self.file.stat()?;
        if !self.compare(&mut seen, &stat) {
            return Ok(None);
        }
        if prefer.is_some() {
            // A crash could bring dropped copies back. Without the promise they are compared then.
            self.begin_change()?;
        }
        Ok(self.file.reconcile(offset, len, cache, prefer))
    }

    /// What it looks like, for the promise that it stays so. All is durable, times included.
    pub fn leave(&self) -> io::Result<Look> {
        let mut seen = self.lock();
        let stat = self.file.stat()?;
        if !self.compare(&mut seen, &stat) {
            return Err(too_far());
        }
        self.file.sync_all()?;
        Ok(look_of(&stat.0))
    }

    /// What it looks like now.
    pub fn looks(&self) -> io::Result<Look> {
        let (stat, _) = self.file.stat()?;
        Ok(look_of(&stat))
    }

    fn read(&self, op: &IoOp) -> io::Result<()> {
        let mut at = op.offset;
        for buf in &op.bufs {
            // Another handle of the same memory, which nobody else uses until the operation has ended.
            let mut buf = buf.clone();
            self.file.read(at, buf.bytes_mut())?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    fn write(&self, op: &IoOp) -> io::Result<()> {
        self.change(|seen| {
            let mut at = op.offset;
            let mut pieces = Vec::with_capacity(op.bufs.len());
            for buf in &op.bufs {
                let most = seen.size.saturating_sub(at).min(buf.len() as u64) as usize;
                pieces.push((at, buf.bytes().get(..most).unwrap_or_default()));
                at += buf.len() as u64;
            }
            self.file.write(&pieces)
        })
    }

    fn zero(&self, offset: u64, len: u64, punch: bool) -> io::Result<()> {
        self.change(|seen| {
            let len = seen.size.saturating_sub(offset).min(len);
            if len == 0 {
                return Ok(());
            }
            let how = if punch {
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
            } else {
                FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
            };
            match self.file.allocate(how, offset, len) {
                Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    let zeros = vec![0; (BLOCK as usize) << 4];
                    let mut at = offset;
                    while at < offset + len {
                        let most = (offset + len - at).min(zeros.len() as u64) as usize;
                        self.file.write(&[(at, &zeros[..most])])?;
                        at += most as u64;
                    }
                    Ok(())
                }
                other => other,
            }
        })
    }

    fn flush(&self) -> io::Result<()> {
        let mut seen = self.lock();
        // Clients may have written since the last write back; then this is the newer time.
        let stat = self.file.stat()?;
        if self.compare(&mut seen, &stat)
            && self.withdrawn.load(Ordering::Acquire)
            && seen.modified_ns != self.modified.load(Ordering::Acquire) as i64
        {
            self.set_times(&mut seen)?;
        }
        drop(seen);
        self.sync()
    }

    fn execute(&self, op: &IoOp) -> Result<(), IoError> {
        let done = match op.kind {
            OpKind::Read => self.read(op),
            OpKind::Write => self.write(op),
            OpKind::Flush => self.flush(),
            OpKind::Discard => self.zero(op.offset, op.len, true),
            OpKind::WriteZeroes { punch } => self.zero(op.offset, op.len, punch),
        };
        done.map_err(|e| IoError::Os(e.raw_os_error().unwrap_or(libc::EIO)))
    }
}

/// A file's disk, as the engine's I/O sees it.
#[derive(Debug)]
pub struct Disk {
    origin: Arc<FileOrigin>,
    hands: Arc<Hands>,
}

impl Disk {
    /// The disk of a file, whose operations `hands` do.
    pub fn new(origin: &Arc<FileOrigin>, hands: &Arc<Hands>) -> Disk {
        Disk {
            origin: origin.clone(),
            hands: hands.clone(),
        }
    }
}

impl Remote for Disk {
    fn name(&self) -> String {
        self.origin.name.clone()
    }

    fn size(&self) -> u64 {
        self.origin.bound()
    }

    fn refresh_size(&self) -> io::Result<u64> {
        Ok(self.origin.bound())
    }

    fn align(&self) -> u32 {
        512
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn push(&self, job: Job) {
        self.hands.push((self.origin.clone(), job));
    }

    fn link(&self) -> Link {
        Link::up()
    }

    fn set_timeout(&self, _timeout: Duration) {}

    fn hurry(&self) {}
}

type Task = (Arc<FileOrigin>, Job);

#[derive(Default)]
struct Tasks {
    waiting: VecDeque<Task>,
    stop: bool,
}

#[derive(Default)]
struct Table {
    tasks: Mutex<Tasks>,
    bell: Condvar,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut tasks = self.lock();
        loop {
            if let Some((origin, job)) = tasks.waiting.pop_front() {
                drop(tasks);
                let result = match job.op() {
                    Some(op) => origin.execute(op),
                    None => Ok(()),
                };
                job.finish(result);
                drop(origin);
                tasks = self.lock();
            } else if tasks.stop {
                return;
            } else {
                tasks = self
                    .bell
                    .wait(tasks)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// The threads that read and write the files of a datastore. They end when this is dropped.
pub struct Hands(Arc<Table>);

impl fmt::Debug for Hands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hands")
    }
}

impl Hands {
    /// Starts them.
    pub fn start() -> io::Result<Arc<Hands>> {
        let hands = Hands(Arc::default());
        for _ in 0..HANDS {
            let table = hands.0.clone();
            thread::Builder::new()
                .name("store-files".to_owned())
                .spawn(move || table.work())?;
        }
        Ok(Arc::new(hands))
    }

    fn push(&self, task: Task) {
        self.0.lock().waiting.push_back(task);
        self.0.bell.notify_one();
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.bell.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    fn origin(path: &Path) -> FileOrigin {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let claim = hearth_io::Claim::default();
        FileOrigin::new(Body::One(file), vec![claim], path.display().to_string()).unwrap()
    }

    fn write(origin: &FileOrigin, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let mut buf = hearth_io::Buf::zeroed(data.len()).slice(0, data.len());
        buf.bytes_mut().copy_from_slice(data);
        origin.execute(&op(OpKind::Write, offset, data.len(), Some(buf)))
    }

    fn read(origin: &FileOrigin, offset: u64, len: usize) -> Vec<u8> {
        let mut buf = hearth_io::Buf::zeroed(len).slice(0, len);
        buf.bytes_mut().fill(9);
        let op = op(OpKind::Read, offset, len, Some(buf));
        origin.execute(&op).unwrap();
        op.bufs[0].bytes().to_vec()
    }

    fn op(kind: OpKind, offset: u64, len: usize, buf: Option<hearth_io::BufSlice>) -> IoOp {
        IoOp {
            id: 0,
            target: hearth_io::Target::Origin(1),
            kind,
            offset,
            len: len as u64,
            bufs: buf.into_iter().collect(),
            crcs: Default::default(),
            sums: false,
            class: hearth_io::Class::Background,
        }
    }

    #[test]
    fn whole_seconds_fit_in_two_trees_only() {
        let at = 1_700_000_000 * SECOND;
        let fits = |left, now| [true, false].map(|two| is_same_time(left, now, two));
        assert_eq!(fits(at + 5, at + 5), [true; 2]);
        assert_eq!(fits(at + 5, at), [true, false]);
        for now in [at + 6, at + SECOND, at - SECOND] {
            assert_eq!(fits(at + 5, now), [false; 2], "{now}");
        }
        // A tree that kept whole seconds may not get others.
        assert_eq!(fits(at, at + 5), [false; 2]);
        assert_eq!(fits(5 - SECOND, -SECOND), [true, false]);
    }

    /// Of a year that NFS knows, of one whose nanoseconds are no number, and of before the first.
    #[test]
    fn write_sets_any_time_to_now() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"abcdef").unwrap();
        for seconds in [now_ns() / SECOND + 86_400, 10_300_000_000, -1_000_000] {
            let times = Timestamps {
                last_access: Timespec {
                    tv_sec: 0,
                    tv_nsec: UTIME_OMIT as _,
                },
                last_modification: Timespec {
                    tv_sec: seconds,
                    tv_nsec: 0,
                },
            };
            rustix::fs::futimens(File::open(&path).unwrap(), &times).unwrap();
            let origin = origin(&path);
            let before = now_ns();
            origin.written();
            let told = origin.modified.load(Ordering::Acquire) as i64;
            assert!((before..=now_ns()).contains(&told), "{seconds}: {told}");
            // Two that are answered at one time: the later one counts.
            let later = told + SECOND / 1000;
            origin.modified.store(later as u64, Ordering::Release);
            origin.written();
            assert!(origin.modified.load(Ordering::Acquire) as i64 >= later);
        }
    }

    #[test]
    fn behind_the_end_are_zeros_and_nothing_makes_it_longer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"abcdef").unwrap();
        let origin = origin(&path);
        assert_eq!(read(&origin, 4, 4), b"ef\0\0");
        write(&origin, 4, b"XYZ").unwrap();
        write(&origin, 4096, b"far behind").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abcdXY");
        let zero = OpKind::WriteZeroes { punch: true };
        origin.execute(&op(zero, 5, 8192, None)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abcdX\0");
        origin.grow(8).unwrap();
        assert!(!origin.reaches(8, true));
        origin.sync().unwrap();
        assert!(origin.reaches(8, true));
        assert_eq!(
            (origin.len(), read(&origin, 4, 5)),
            (8, b"X\0\0\0\0".to_vec())
        );
    }

    #[test]
    fn holes_have_no_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        file.write_all_at(&[1; 8192], 4 << 20).unwrap();
        file.sync_all().unwrap();
        let origin = origin(&path);
        let at = 4 << 20;
        assert!(origin.has_place(at, at + 8192));
        assert!(origin.has_place(at + 100, at + 200));
        assert!(!origin.has_place(at, 5 << 20));
        assert!(!origin.has_place(0, 4096));
        assert!(!origin.has_place(8 << 20, (8 << 20) + 1));
    }

    #[test]
    fn the_time_of_change_is_that_of_the_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, [1; 8192]).unwrap();
        let origin = origin(&path);
        let before = std::fs::metadata(&path).unwrap().modified().unwrap();
        write(&origin, 0, b"written back").unwrap();
        let modified = || std::fs::metadata(&path).unwrap().modified().unwrap();
        assert_eq!(modified(), before);
        origin.written();
        let told = origin.times().0;
        write(&origin, 4096, b"more").unwrap();
        let since = modified().duration_since(UNIX_EPOCH).unwrap();
        assert_eq!(u64::from(told.seconds), since.as_secs());
        assert_eq!(told.nanos, since.subsec_nanos());
        assert!(origin.look().unwrap());
    }

    #[test]
    fn somebody_else_is_noticed_and_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"ours").unwrap();
        let origin = origin(&path);
        std::fs::write(&path, b"theirs").unwrap();
        assert!(write(&origin, 0, b"ours").is_err());
        assert!(!origin.look().unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
        origin.accept().unwrap();
        assert!(origin.look().unwrap());
        write(&origin, 0, b"T").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"Theirs");
    }

    #[test]
    fn the_promise_is_taken_back_before_the_file_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"as it was").unwrap();
        let origin = origin(&path);
        let allowed = Arc::new(AtomicBool::new(false));
        let withdraw = allowed.clone();
        origin.before_change(Box::new(move || withdraw.load(Ordering::Relaxed)));
        assert!(write(&origin, 0, b"x").is_err());
        assert!(origin.grow(100).is_err() && origin.withdraw().is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"as it was");
        allowed.store(true, Ordering::Relaxed);
        write(&origin, 0, b"x").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"xs it was");
    }
}
