//! One block I/O operation: what the engine asks for and what a driver answers.
//!
//! The engine is pure: it returns [`IoOp`]s and later takes [`IoDone`]s. A driver (io_uring,
//! a thread pool, a simulated device) executes them. Operations on one target may complete
//! in any order; a `Flush` makes durable every write to the target that *completed* before
//! the flush was submitted. Drivers loop over short transfers; the engine never sees one.

use crate::buf::BufSlice;
use crate::checksum::crc32c;
use smallvec::SmallVec;

/// Bytes in a block: the unit of validity, dirtiness and checksums.
pub const BLOCK: u64 = 4096;

/// Where an operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// A flash device of the pool, by its index.
    Flash(u16),
    /// The origin of a disk, by the disk's id.
    Origin(u16),
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Fill `bufs` from `offset`. Bytes past the end of a file are an error (`UnexpectedEof`).
    Read,
    /// Write `bufs` at `offset`.
    Write,
    /// Make completed writes durable (fdatasync).
    Flush,
    /// Free the range; it reads as zeros or as before. A target that cannot, succeeds.
    Discard,
    /// Make the range read as zeros, freeing space if it can (`punch`) or keeping it allocated.
    WriteZeroes {
        /// Space may be freed.
        punch: bool,
    },
}

/// Whether somebody waits for the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A request waits.
    Foreground,
    /// Destage, eviction, scrub.
    Background,
}

/// An I/O operation; owns its buffers until its [`IoDone`] is handed back.
#[derive(Debug)]
pub struct IoOp {
    /// The engine's name for it; opaque to drivers.
    pub id: u64,
    /// Where.
    pub target: Target,
    /// What.
    pub kind: OpKind,
    /// Byte offset on the target. Block-aligned on flash; on an origin aligned to the
    /// origin's own alignment, except at the very end of an origin of odd size.
    pub offset: u64,
    /// Length in bytes; equals the sum of `bufs` for reads and writes.
    pub len: u64,
    /// Memory, in order of offset. Every piece but the last is a whole number of blocks.
    pub bufs: SmallVec<[BufSlice; 2]>,
    /// Flash reads: expected CRC32C per block, checked by [`IoOp::verify`]. With `sums`: those of what
    /// was read, once it was.
    pub crcs: SmallVec<[u32; 4]>,
    /// A read whose data is to be kept: what ends tells its checksums, block by block.
    pub sums: bool,
    /// Whether somebody waits for it.
    pub class: Class,
}

/// A finished operation.
#[derive(Debug)]
pub struct IoDone {
    /// The operation, with its buffers.
    pub op: IoOp,
    /// How it ended.
    pub result: Result<(), IoError>,
    /// After [`IoOp::verify`]: indices of blocks whose checksum does not match.
    pub bad_blocks: SmallVec<[u32; 2]>,
    /// Device time, nanoseconds, submission to completion.
    pub latency_ns: u64,
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The kernel (or the simulated device) said so.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The device or file is shorter than the operation needs.
    #[error("unexpected end of file: the device is smaller than recorded")]
    UnexpectedEof,
}

impl IoError {
    /// The storage has shut this host out for good: another goes on with the origin.
    pub const SHUT_OUT: IoError = IoError::Os(libc::ESHUTDOWN);

    /// The device has not answered within its limit ([`Device::set_patience`](crate::Device::set_patience)). The
    /// operation goes on: what it reads may still come into its memory, at any moment.
    pub const OVERDUE: IoError = IoError::Os(libc::ETIMEDOUT);

    /// The device has still to answer something before this, which was not begun.
    pub const SILENT: IoError = IoError::Os(libc::EHOSTDOWN);

    /// True if the device does not answer at the moment.
    pub fn is_overdue(&self) -> bool {
        matches!(*self, IoError::OVERDUE | IoError::SILENT)
    }

    /// True if the device is out of space.
    pub fn is_no_space(&self) -> bool {
        matches!(self, IoError::Os(e) if *e == libc::ENOSPC || *e == libc::EDQUOT)
    }
}

impl IoDone {
    /// True if the operation failed because the memory's owner has taken it away
    /// ([`Buf::foreign`](crate::Buf::foreign)): the device is not to blame.
    pub fn is_memory_gone(&self) -> bool {
        self.result == Err(IoError::Os(libc::EFAULT)) && self.op.bufs.iter().any(|b| b.is_shared())
    }

    /// True if the device does not answer at the moment: what it holds is not known to be bad.
    pub fn is_overdue(&self) -> bool {
        self.result.is_err_and(|e| e.is_overdue())
    }

    /// True if the device may still write to the operation's memory, or read from it.
    pub fn goes_on(&self) -> bool {
        self.result == Err(IoError::OVERDUE)
    }
}

impl IoOp {
    /// The same once more, over the same memory: for who answers for it while it goes on.
    pub fn copy(&self) -> IoOp {
        IoOp {
            id: self.id,
            target: self.target,
            kind: self.kind,
            offset: self.offset,
            len: self.len,
            bufs: self.bufs.clone(),
            crcs: self.crcs.clone(),
            sums: self.sums,
            class: self.class,
        }
    }

    /// Compares a finished flash read with its expected checksums; returns the indices of
    /// bad blocks. Done outside the engine's lock, on the thread that did the read.
    pub fn verify(&self) -> SmallVec<[u32; 2]> {
        let mut bad = SmallVec::new();
        if self.crcs.is_empty() {
            return bad;
        }
        let mut index = 0usize;
        for buf in &self.bufs {
            for block in buf.bytes().chunks(BLOCK as usize) {
                if self
                    .crcs
                    .get(index)
                    .is_some_and(|want| crc32c(block) != *want)
                {
                    bad.push(index as u32);
                }
                index += 1;
            }
        }
        bad
    }

    /// The checksum of every block, of which the last may be short.
    fn summed(&self) -> SmallVec<[u32; 4]> {
        let blocks = self
            .bufs
            .iter()
            .flat_map(|b| b.bytes().chunks(BLOCK as usize));
        blocks.map(crc32c).collect()
    }

    /// Wraps the operation as finished, verifying checksums of a successful read, or telling them. Done
    /// outside the engine's lock, on the thread that did the read.
    pub fn done(mut self, result: Result<(), IoError>, latency_ns: u64) -> IoDone {
        if self.sums && result.is_ok() && self.kind == OpKind::Read {
            self.crcs = self.summed();
            return IoDone {
                op: self,
                result,
                bad_blocks: SmallVec::new(),
                latency_ns,
            };
        }
        let bad_blocks = if result.is_ok() && self.kind == OpKind::Read {
            self.verify()
        } else {
            SmallVec::new()
        };
        IoDone {
            op: self,
            result,
            bad_blocks,
            latency_ns,
        }
    }
}
