//! What a [`Target`](crate::Target) stands for: a file or block device, perhaps made slow or
//! faulty on purpose.

use crate::disk::SlowDisk;
use crate::fault::{FaultKind, Faults};
use crate::file::BlockFile;
use crate::media::Media;
use crate::model::HddParams;
use crate::op::{IoError, IoOp, OpKind};
use crate::spec::Drive;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What to do before the first operation that may change a device's content.
#[derive(Default)]
struct FirstWrite {
    armed: AtomicBool,
    hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl std::fmt::Debug for FirstWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FirstWrite").field(&self.armed).finish()
    }
}

/// A flash device or origin, ready for any driver. Shared by all data threads.
#[derive(Debug)]
pub struct Device {
    file: BlockFile,
    faults: Faults,
    latency_ns: u64,
    disk: Option<SlowDisk>,
    first_write: FirstWrite,
}

impl Device {
    /// The file as it is.
    pub fn new(file: BlockFile) -> Device {
        Device {
            file,
            faults: Faults::default(),
            latency_ns: 0,
            disk: None,
            first_write: FirstWrite::default(),
        }
    }

    /// Calls `hook` once, before the first write, discard or zeroing goes to the device. It may
    /// block, and every other writer waits with it: this is for a durable note, made once, that
    /// the content is about to change.
    pub fn before_first_write(mut self, hook: impl FnOnce() + Send + 'static) -> Device {
        self.first_write = FirstWrite {
            armed: AtomicBool::new(true),
            hook: Mutex::new(Some(Box::new(hook))),
        };
        self
    }

    /// True while the hook of [`before_first_write`](Self::before_first_write) has not been
    /// called: nothing was written since.
    pub fn is_untouched(&self) -> bool {
        self.first_write.armed.load(Ordering::Acquire)
    }

    #[cold]
    fn note_first_write(&self) {
        // The lock is held over the hook, so that nobody writes before it has returned.
        let mut hook = self
            .first_write
            .hook
            .lock()
            .unwrap_or_else(|e| e.into_inner());
        if let Some(hook) = hook.take() {
            hook();
        }
        self.first_write.armed.store(false, Ordering::Release);
    }

    /// Completes nothing sooner than `latency_ns` after its submission.
    pub fn with_latency(mut self, latency_ns: u64) -> Device {
        self.latency_ns = latency_ns;
        self
    }

    /// Completes nothing sooner than a modelled hard disk would: one of this size, or a shared
    /// one as large as all who share it. Its state is shared by all who use the device. Starts a
    /// thread, unless the drive has one; of a shared drive the first one's `params` count.
    pub fn with_hdd(mut self, drive: &Drive, params: HddParams) -> io::Result<Device> {
        let (path, size) = (self.file.path(), self.file.size());
        self.disk = Some(match drive {
            Drive::Own => SlowDisk::start(path, size, params)?,
            Drive::Shared(name) => SlowDisk::join(name, path, size, params)?,
        });
        Ok(self)
    }

    /// The file or block device underneath.
    pub fn file(&self) -> &BlockFile {
        &self.file
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

    pub(crate) fn disk(&self) -> Option<&SlowDisk> {
        self.disk.as_ref()
    }

    /// Refuses what no driver should try: armed faults, ranges past the end, writes to a
    /// read-only file, buffers that do not add up.
    pub(crate) fn admit(&self, op: &IoOp) -> Result<(), IoError> {
        self.faults.check(op)?;
        match op.kind {
            OpKind::Flush => return Ok(()),
            OpKind::Read => {}
            _ if self.file.is_read_only() => return Err(IoError::Os(libc::EROFS)),
            _ => {}
        }
        self.file.check_range(op.offset, op.len)?;
        let has_data = matches!(op.kind, OpKind::Read | OpKind::Write);
        if has_data && op.bufs.iter().map(|b| b.len() as u64).sum::<u64>() != op.len {
            return Err(IoError::Os(libc::EINVAL));
        }
        if op.kind != OpKind::Read && self.first_write.armed.load(Ordering::Acquire) {
            self.note_first_write();
        }
        Ok(())
    }

    /// True if the ring can do a read or write whole on the direct descriptor.
    #[inline]
    pub(crate) fn fits_ring(&self, op: &IoOp) -> bool {
        self.file.fits_direct(op.offset, op.len)
            && op
                .bufs
                .iter()
                .all(|b| self.file.fits_memory(b.as_ptr(), b.len()))
    }

    /// Executes an admitted operation; blocks.
    pub(crate) fn execute(&self, op: &mut IoOp) -> Result<(), IoError> {
        let mut at = op.offset;
        let done = match op.kind {
            OpKind::Read => op.bufs.iter_mut().try_for_each(|buf| {
                let len = buf.len() as u64;
                self.file.read_at(at, buf.bytes_mut())?;
                at += len;
                Ok(())
            }),
            OpKind::Write => op.bufs.iter().try_for_each(|buf| {
                self.file.write_at(at, buf.bytes())?;
                at += buf.len() as u64;
                Ok(())
            }),
            OpKind::Flush => self.file.flush(),
            OpKind::Discard => self.file.discard(op.offset, op.len),
            OpKind::WriteZeroes { punch } => self.file.write_zeroes(op.offset, op.len, punch),
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

/// Synchronous access for formatting and recovery. Faults apply; modelled slowness does not.
impl Media for Arc<Device> {
    fn len(&self) -> u64 {
        self.file.size()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.fault(FaultKind::Read, offset, data.len())?;
        self.file.read_at(offset, data)
    }
    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        crate::media::read_parallel(reads, |offset, data| {
            self.fault(FaultKind::Read, offset, data.len())?;
            self.file.read_at(offset, data)
        })
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.fault(FaultKind::Write, offset, data.len())?;
        self.file.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.fault(FaultKind::Flush, 0, 0)?;
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::Buf;
    use crate::op::{BLOCK, Class, Target};
    use smallvec::SmallVec;
    use std::sync::atomic::AtomicU32;

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
            class: Class::Foreground,
        }
    }

    #[test]
    fn the_first_change_is_announced_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = BlockFile::create_sized(dir.path().join("f"), 4 * BLOCK).unwrap();
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        let device = Device::new(file).before_first_write(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        device.admit(&op(OpKind::Read)).unwrap();
        device.admit(&op(OpKind::Flush)).unwrap();
        assert!(device.is_untouched());
        for kind in [
            OpKind::Write,
            OpKind::Discard,
            OpKind::WriteZeroes { punch: true },
        ] {
            device.admit(&op(kind)).unwrap();
        }
        assert!(!device.is_untouched());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}
