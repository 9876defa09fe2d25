//! What a [`Target`](crate::Target) stands for: a file, a block device or something remote,
//! perhaps made slow or faulty on purpose.

use crate::beneath::Beneath;
use crate::buf::Buf;
use crate::claim::Claim;
use crate::disk::SlowDisk;
use crate::fault::{FaultKind, Faults};
use crate::file::{BlockFile, Extent, Identity, Standing};
use crate::helper::{Job, lock};
use crate::media::Media;
use crate::model::HddParams;
use crate::op::{Class, IoError, IoOp, OpKind, Target};
use crate::patience::{Errand, Patience};
use crate::remote::Remote;
use crate::spec::Drive;
use crate::watch;
use smallvec::{SmallVec, smallvec};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What to do before the first operation that may change a device's content, and what waits for that.
#[derive(Default)]
struct FirstWrite {
    /// Until it is done, and nothing waits any more.
    armed: AtomicBool,
    /// A thread is at it, or has been.
    begun: AtomicBool,
    state: Mutex<Announcing>,
}

#[derive(Default)]
struct Announcing {
    hook: Option<Box<dyn FnOnce() + Send>>,
    /// As many as drivers may have in flight.
    held: Vec<Job>,
}

fn changes(kind: OpKind) -> bool {
    !matches!(kind, OpKind::Read | OpKind::Flush)
}

impl std::fmt::Debug for FirstWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FirstWrite").field(&self.armed).finish()
    }
}

/// Bytes asked of something remote at a time outside the data path.
const REMOTE_PIECE: usize = 1 << 20;

fn or_size(known: Option<Identity>, remote: &Arc<dyn Remote>) -> Identity {
    known.unwrap_or(Identity {
        size: remote.size(),
        ..Identity::default()
    })
}

#[derive(Clone, Debug)]
enum Backing {
    File(Arc<BlockFile>),
    Remote(Arc<dyn Remote>),
}

/// A flash device or origin, ready for any driver. Shared by all data threads.
#[derive(Debug)]
pub struct Device {
    backing: Backing,
    faults: Arc<Faults>,
    patience: Arc<Patience>,
    latency_ns: u64,
    disk: Option<SlowDisk>,
    first_write: FirstWrite,
    /// On what another process has open for us; the topmost comes first.
    claims: Arc<Vec<Claim>>,
}

impl Device {
    /// The file as it is.
    pub fn new(file: BlockFile) -> Device {
        Device::over(Backing::File(Arc::new(file)))
    }

    /// Something that is no file.
    pub fn remote(remote: Arc<dyn Remote>) -> Device {
        Device::over(Backing::Remote(remote))
    }

    fn over(backing: Backing) -> Device {
        Device {
            backing,
            faults: Arc::default(),
            patience: Arc::default(),
            latency_ns: 0,
            disk: None,
            first_write: FirstWrite::default(),
            claims: Arc::default(),
        }
    }

    /// Holds claims to what is underneath, from the top, for as long as the device is there.
    pub fn holding(mut self, claims: Vec<Claim>) -> Device {
        self.claims = Arc::new(claims);
        self
    }

    /// The same open file or connection once more, for who goes on with it under other rules: its locks are held
    /// until both are gone. What was to be done before the first write is not taken along.
    pub fn twin(&self) -> Device {
        Device {
            backing: self.backing.clone(),
            faults: self.faults.clone(),
            patience: self.patience.clone(),
            latency_ns: self.latency_ns,
            disk: self.disk.clone(),
            first_write: FirstWrite::default(),
            claims: self.claims.clone(),
        }
    }

    /// From now on an operation that the kernel has not ended after so long counts as failed, with
    /// [`IoError::OVERDUE`], and all others fail with [`IoError::SILENT`] until it has ended. One counts as late only if the
    /// device has ended nothing else within that time, and a long one has longer. Zero: it is waited for. What is no
    /// file keeps limits of its own. What is done outside drivers ([`read_at`](Self::read_at)) has none, but fails while the
    /// device owes an answer.
    pub fn set_patience(&self, limit: Duration) {
        self.patience
            .set(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
    }

    /// True while it has not ended what counts as failed.
    pub fn owes(&self) -> bool {
        self.patience.owes()
    }

    pub(crate) fn patience(&self) -> &Patience {
        &self.patience
    }

    /// True if drivers are to watch how long it takes.
    pub(crate) fn is_watched(&self) -> bool {
        self.disk.is_none() && matches!(self.backing, Backing::File(_))
    }

    /// What its data lies on, itself included, if that is on this host and it was locked.
    pub fn beneath(&self) -> Option<&Beneath> {
        let claim = self.file().map(BlockFile::claim);
        let claim = claim.or(self.claims.first());
        claim.and_then(Claim::beneath)
    }

    /// Calls `hook` once, before the first write, discard or zeroing that a driver is given goes to the device: this is for a
    /// durable note, made once, that the content is about to change. It may block. What changes the device waits for it,
    /// and nothing else does: it is called on a thread of its own.
    pub fn before_first_write(mut self, hook: impl FnOnce() + Send + 'static) -> Device {
        self.first_write = FirstWrite {
            armed: AtomicBool::new(true),
            begun: AtomicBool::new(false),
            state: Mutex::new(Announcing {
                hook: Some(Box::new(hook)),
                ..Announcing::default()
            }),
        };
        self
    }

    /// True while the hook of [`before_first_write`](Self::before_first_write) is not being called and has not been: nothing
    /// was written since.
    pub fn is_untouched(&self) -> bool {
        self.is_armed() && !self.first_write.begun.load(Ordering::Acquire)
    }

    fn is_armed(&self) -> bool {
        self.first_write.armed.load(Ordering::Acquire)
    }

    /// True if an operation has to wait for what is announced first.
    #[inline]
    pub(crate) fn announces(&self, kind: OpKind) -> bool {
        self.is_armed() && changes(kind)
    }

    /// Takes a job that has to wait for what is announced first, and does it then; back if it need not wait any more.
    #[cold]
    pub(crate) fn hold(self: &Arc<Device>, job: Job) -> Option<Job> {
        let mut state = lock(&self.first_write.state);
        if !self.is_armed() {
            return Some(job);
        }
        state.held.push(job);
        if self.first_write.begun.swap(true, Ordering::AcqRel) {
            return None;
        }
        drop(state);
        let device = self.clone();
        let thread = std::thread::Builder::new().name("hearth-first".into());
        if thread.spawn(move || device.announce()).is_err() {
            // A system short of threads: slow is better than stuck.
            self.announce();
        }
        None
    }

    fn announce(&self) {
        let hook = lock(&self.first_write.state).hook.take();
        if let Some(hook) = hook {
            hook();
        }
        loop {
            let held = {
                let mut state = lock(&self.first_write.state);
                if state.held.is_empty() {
                    // Under the lock, so that nothing is held any more that nobody would do.
                    return self.first_write.armed.store(false, Ordering::Release);
                }
                std::mem::take(&mut state.held)
            };
            let here = held.into_iter().filter_map(|job| self.take(job));
            here.for_each(Job::run);
        }
    }

    /// Completes nothing sooner than `latency_ns` after its submission.
    pub fn with_latency(mut self, latency_ns: u64) -> Device {
        self.latency_ns = latency_ns;
        self
    }

    /// Completes nothing sooner than a modelled hard disk would: one of this size, or a shared
    /// one as large as all who share it. Its state is shared by all who use the device. Starts a
    /// thread, unless the drive has one; of a shared drive the first one's `params` count.
    ///
    /// Only for files: the model's thread executes by blocking, which a remote does not.
    pub fn with_hdd(mut self, drive: &Drive, params: HddParams) -> io::Result<Device> {
        let Some(file) = self.file() else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "a modelled disk needs a file underneath",
            ));
        };
        let (path, size) = (file.path(), file.size());
        self.disk = Some(match drive {
            Drive::Own => SlowDisk::start(path, size, params)?,
            Drive::Shared(name) => SlowDisk::join(name, path, size, params)?,
        });
        Ok(self)
    }

    /// The file or block device underneath, if it is one.
    pub fn file(&self) -> Option<&BlockFile> {
        match &self.backing {
            Backing::File(file) => Some(file),
            Backing::Remote(_) => None,
        }
    }

    /// What is underneath, if it is no file.
    pub fn as_remote(&self) -> Option<&Arc<dyn Remote>> {
        match &self.backing {
            Backing::File(_) => None,
            Backing::Remote(remote) => Some(remote),
        }
    }

    /// What it is called in messages: a path or an address.
    pub fn name(&self) -> String {
        match &self.backing {
            Backing::File(file) => file.path().display().to_string(),
            Backing::Remote(remote) => remote.name(),
        }
    }

    /// The path of a file or block device; empty for what is remote.
    pub fn path(&self) -> &Path {
        self.file().map_or(Path::new(""), BlockFile::path)
    }

    /// Size in bytes, as of the last [`refresh_size`](Self::refresh_size).
    pub fn size(&self) -> u64 {
        match &self.backing {
            Backing::File(file) => file.size(),
            Backing::Remote(remote) => remote.size(),
        }
    }

    /// Asks for the size again (it may have been resized) and returns it. Blocks.
    pub fn refresh_size(&self) -> io::Result<u64> {
        match &self.backing {
            Backing::File(file) => file.refresh_size(),
            Backing::Remote(remote) => remote.refresh_size(),
        }
    }

    /// Alignment in bytes of offsets and lengths for I/O without read-modify-write.
    pub fn align(&self) -> u32 {
        match &self.backing {
            Backing::File(file) => file.align(),
            Backing::Remote(remote) => remote.align(),
        }
    }

    /// True unless it is in a regular file, whose times and number say something of its content.
    pub fn is_device(&self) -> bool {
        match &self.backing {
            Backing::File(file) => file.is_device(),
            Backing::Remote(remote) => remote.identity().is_none(),
        }
    }

    /// Which piece of hardware a block device is, as a number that is never 0; `None` of anything else, and of a device that
    /// says nothing of itself.
    pub fn hardware(&self) -> Option<u64> {
        let file = self.file().filter(|file| file.is_device())?;
        crate::identity::number(file.identity().ok()?.dev)
    }

    fn is_read_only(&self) -> bool {
        match &self.backing {
            Backing::File(file) => file.is_read_only(),
            Backing::Remote(remote) => remote.is_read_only(),
        }
    }

    /// Makes durable what [`identity`](Self::identity) says, as far as it is a local file's. Blocks.
    pub fn settle(&self) -> io::Result<()> {
        match &self.backing {
            Backing::File(file) => file.settle(),
            Backing::Remote(_) => Ok(()),
        }
    }

    /// What the kernel says about the file now; of what is remote often only the size is known.
    pub fn identity(&self) -> io::Result<Identity> {
        match &self.backing {
            Backing::File(file) => file.identity(),
            Backing::Remote(remote) => Ok(or_size(remote.identity(), remote)),
        }
    }

    /// As [`identity`](Self::identity), of the topmost file alone, whatever else an image is written
    /// through.
    pub fn identity_of_top(&self) -> io::Result<Identity> {
        match &self.backing {
            Backing::File(file) => file.identity(),
            Backing::Remote(remote) => Ok(or_size(remote.identity_of_top(), remote)),
        }
    }

    /// Data and holes of a range, as [`BlockFile::extents`]; what is remote is all data.
    pub fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<Extent>> {
        match &self.backing {
            Backing::File(file) => file.extents(offset, len),
            Backing::Remote(_) => Ok(vec![Extent {
                offset,
                len,
                data: true,
            }]),
        }
    }

    /// Fills `data` from `offset`; an error if that reaches past the end. Blocks.
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let remote = match &self.backing {
            Backing::File(file) => {
                self.answering(file)?;
                if !self.patience.is_limited() {
                    let _noted = watch::begin(data.len(), || self.name());
                    return file.read_at(offset, data);
                }
                return self.read_in_time(file, offset, data);
            }
            Backing::Remote(remote) => remote,
        };
        let align = u64::from(remote.align());
        let end = offset
            .checked_add(data.len() as u64)
            .filter(|end| *end <= remote.size())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut at = offset;
        while at < end {
            let from = at / align * align;
            let to = end
                .min(from + REMOTE_PIECE as u64)
                .next_multiple_of(align)
                .min(remote.size());
            let window = Buf::zeroed((to - from) as usize).slice(0, (to - from) as usize);
            let op = call(remote, OpKind::Read, from, to - from, smallvec![window])?;
            let got = op.bufs.first().map_or(&[][..], |b| b.bytes());
            let take = to.min(end) - at;
            let skip = (at - from) as usize;
            let place = &mut data[(at - offset) as usize..][..take as usize];
            place.copy_from_slice(&got[skip..][..take as usize]);
            at += take;
        }
        Ok(())
    }

    /// Stores `data` at `offset`; an error if that reaches past the end. Blocks. Of what is
    /// remote, the range must be aligned.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let remote = match &self.backing {
            Backing::File(file) => {
                self.answering(file)?;
                if !self.patience.is_limited() {
                    let _noted = watch::begin(data.len(), || self.name());
                    return file.write_at(offset, data);
                }
                let data = data.to_vec();
                let len = data.len() as u64;
                return self.in_time(file, len, move |file| file.write_at(offset, &data));
            }
            Backing::Remote(remote) => remote,
        };
        let mut at = offset;
        for piece in data.chunks(REMOTE_PIECE) {
            let mut window = Buf::zeroed(piece.len()).slice(0, piece.len());
            window.bytes_mut().copy_from_slice(piece);
            let len = piece.len() as u64;
            call(remote, OpKind::Write, at, len, smallvec![window])?;
            at += len;
        }
        Ok(())
    }

    /// Makes completed writes durable. Blocks.
    pub fn flush(&self) -> io::Result<()> {
        match &self.backing {
            Backing::File(file) => {
                self.answering(file)?;
                match self.patience.is_limited() {
                    true => self.in_time(file, 0, BlockFile::flush),
                    false => {
                        let _noted = watch::begin(0, || self.name());
                        file.flush()
                    }
                }
            }
            Backing::Remote(remote) if remote.is_read_only() => Ok(()),
            Backing::Remote(remote) => call(remote, OpKind::Flush, 0, 0, SmallVec::new()).map(drop),
        }
    }

    /// How its file stands to its name now ([`BlockFile::standing`]); `None` where there is no file.
    /// Blocks as [`read_at`](Self::read_at) does.
    pub fn standing(&self) -> io::Result<Option<Standing>> {
        let Backing::File(file) = &self.backing else {
            return Ok(None);
        };
        self.answering(file)?;
        if !self.patience.is_limited() {
            return file.standing();
        }
        let (told, got) = channel();
        self.in_time(file, 0, move |file| {
            let _ = told.send(file.standing()?);
            Ok(())
        })?;
        got.recv().map_err(io::Error::other)
    }

    fn read_in_time(&self, file: &Arc<BlockFile>, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let len = data.len();
        // The thread may have it long after whoever asked has gone.
        let (told, got) = channel();
        self.in_time(file, len as u64, move |file| {
            let mut window = Buf::zeroed(len).slice(0, len);
            file.read_at(offset, window.bytes_mut())?;
            let _ = told.send(window);
            Ok(())
        })?;
        let window = got.recv().map_err(io::Error::other)?;
        data.copy_from_slice(window.bytes());
        Ok(())
    }

    /// Has a thread do it, which alone waits for a device that does not answer: whoever called may hold a lock.
    fn in_time(
        &self,
        file: &Arc<BlockFile>,
        len: u64,
        work: impl FnOnce(&BlockFile) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let errand = Errand::begin(self.patience.clone(), self.name());
        let (file, done) = (file.clone(), errand.clone());
        let thread = std::thread::Builder::new().name("hearth-sync".into());
        thread.spawn(move || done.end(work(&file)))?;
        errand.wait(len)
    }

    /// A device that owes an answer would keep the caller as well, and what is written must not overtake it.
    fn answering<'a>(&self, file: &'a BlockFile) -> io::Result<&'a BlockFile> {
        match self.owes() {
            true => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
            false => Ok(file),
        }
    }

    /// Failures to inject.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// True if its speed is a model's: say so wherever it is shown.
    pub fn is_modelled(&self) -> bool {
        self.disk.is_some() || self.latency_ns > 0
    }

    pub(crate) fn latency_ns(&self) -> u64 {
        self.latency_ns
    }

    /// The file the ring may be given operations on.
    #[inline]
    pub(crate) fn ring_file(&self) -> Option<&BlockFile> {
        match &self.backing {
            Backing::File(file) if self.disk.is_none() => Some(file),
            _ => None,
        }
    }

    /// Gives a job to the thread that serves this device; back if it has none.
    pub(crate) fn take(&self, job: Job) -> Option<Job> {
        match (&self.disk, &self.backing) {
            (Some(disk), _) => disk.push(job),
            (None, Backing::Remote(remote)) => remote.push(job),
            (None, Backing::File(_)) => return Some(job),
        }
        None
    }

    /// Refuses what no driver should try: armed faults, ranges past the end, writes to a
    /// read-only file, buffers that do not add up.
    pub(crate) fn admit(&self, op: &IoOp) -> Result<(), IoError> {
        self.faults.check(op)?;
        if self.owes() {
            return Err(IoError::SILENT);
        }
        match op.kind {
            OpKind::Flush => return Ok(()),
            OpKind::Read => {}
            _ if self.is_read_only() => return Err(IoError::Os(libc::EROFS)),
            _ => {}
        }
        if op
            .offset
            .checked_add(op.len)
            .is_none_or(|end| end > self.size())
        {
            return Err(IoError::UnexpectedEof);
        }
        let has_data = matches!(op.kind, OpKind::Read | OpKind::Write);
        if has_data && op.bufs.iter().map(|b| b.len() as u64).sum::<u64>() != op.len {
            return Err(IoError::Os(libc::EINVAL));
        }
        Ok(())
    }

    /// Executes an admitted operation on a file; blocks.
    pub(crate) fn execute(&self, op: &mut IoOp) -> Result<(), IoError> {
        // What is remote has a thread of its own for this.
        let file = self.file().ok_or(IoError::Os(libc::EIO))?;
        let mut at = op.offset;
        let done = match op.kind {
            OpKind::Read => op.bufs.iter_mut().try_for_each(|buf| {
                let len = buf.len() as u64;
                file.read_at(at, buf.bytes_mut())?;
                at += len;
                Ok(())
            }),
            OpKind::Write => op.bufs.iter().try_for_each(|buf| {
                file.write_at(at, buf.bytes())?;
                at += buf.len() as u64;
                Ok(())
            }),
            OpKind::Flush => file.flush(),
            OpKind::Discard => file.discard(op.offset, op.len),
            OpKind::WriteZeroes { punch } => file.write_zeroes(op.offset, op.len, punch),
        };
        done.map_err(|e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => IoError::UnexpectedEof,
            // WriteZero: the kernel took no byte of a write that lies within the size.
            _ => IoError::Os(e.raw_os_error().unwrap_or(libc::EIO)),
        })
    }

    fn fault(&self, kind: FaultKind, offset: u64, len: usize) -> io::Result<()> {
        self.faults
            .check_range(kind, offset, len as u64)
            .map_err(|e| match e {
                IoError::Os(errno) => io::Error::from_raw_os_error(errno),
                IoError::UnexpectedEof => io::ErrorKind::UnexpectedEof.into(),
            })
    }
}

/// Has a remote do one thing, and waits for it.
fn call(
    remote: &Arc<dyn Remote>,
    kind: OpKind,
    offset: u64,
    len: u64,
    bufs: SmallVec<[crate::buf::BufSlice; 2]>,
) -> io::Result<IoOp> {
    let (job, answer) = Job::awaited(IoOp {
        id: 0,
        // Nobody looks it up: the job goes straight to its remote.
        target: Target::Origin(0),
        kind,
        offset,
        len,
        bufs,
        crcs: SmallVec::new(),
        sums: false,
        class: Class::Foreground,
    });
    remote.push(job);
    // A job that is dropped answers, too.
    let finished = answer
        .recv()
        .map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
    match finished.result {
        Ok(()) => Ok(finished.op),
        Err(IoError::Os(errno)) => Err(io::Error::from_raw_os_error(errno)),
        Err(IoError::UnexpectedEof) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Synchronous access for formatting and recovery. Faults apply; modelled slowness does not.
impl Media for Arc<Device> {
    fn len(&self) -> u64 {
        self.size()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.fault(FaultKind::Read, offset, data.len())?;
        Device::read_at(self, offset, data)
    }
    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        crate::media::read_parallel(reads, |offset, data| {
            self.fault(FaultKind::Read, offset, data.len())?;
            Device::read_at(self, offset, data)
        })
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.fault(FaultKind::Write, offset, data.len())?;
        Device::write_at(self, offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.fault(FaultKind::Flush, 0, 0)?;
        Device::flush(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::BLOCK;

    fn op(kind: OpKind) -> IoOp {
        let has_data = matches!(kind, OpKind::Read | OpKind::Write);
        IoOp {
            id: 0,
            target: Target::Origin(1),
            kind,
            offset: 0,
            len: if kind == OpKind::Flush { 0 } else { BLOCK },
            bufs: has_data
                .then(|| Buf::zeroed(BLOCK as usize).all())
                .into_iter()
                .collect(),
            crcs: SmallVec::new(),
            sums: false,
            class: Class::Foreground,
        }
    }

    #[test]
    fn a_twin_keeps_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        drop(BlockFile::create_sized(&path, 4 * BLOCK).unwrap());
        let open = || BlockFile::open(&path, crate::file::OpenMode::default());
        let one = Device::new(open().unwrap()).before_first_write(|| panic!("not of the twin"));
        let two = one.twin();
        drop(one);
        open().unwrap_err();
        two.admit(&op(OpKind::Write)).unwrap();
        assert!(!two.announces(OpKind::Write));
        two.write_at(0, &[7; 8]).unwrap();
        drop(two);
        let mut got = [0; 8];
        open().unwrap().read_at(0, &mut got).unwrap();
        assert_eq!(got, [7; 8]);
    }
}
