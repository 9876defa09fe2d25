//! The engine's vocabulary: what exporters and the control plane say to it and hear from it.
//!
//! The contract of a disk, in one sentence: a completed write is seen by every later read;
//! a completed flush, or FUA, makes every write completed before it survive any crash; nothing
//! is promised about order between two flushes.

use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Buf, BufSlice, IoOp};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// A disk's number within its pool; never 0.
pub type DiskId = u16;

/// Longest read, write: 32 MiB, as advertised over NBD; bounds a request's buffer.
pub const REQUEST_MAX: u64 = 32 << 20;

/// Largest disk: block numbers are kept in 36 bits in RAM (256 TiB).
pub const DISK_MAX: u64 = (1 << 36) * BLOCK;

/// How a disk is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Writes complete on flash and reach the origin later.
    #[default]
    WriteBack,
    /// Writes complete on the origin; the flash copy is renewed.
    WriteThrough,
    /// Reads are cached; writes go to the origin and drop the cached copy.
    WriteAround,
    /// Pass-through.
    Off,
    /// As write-back, and what reaches the origin keeps the order of the flushes.
    WriteBackOrdered,
}

impl Mode {
    /// Do writes complete on flash?
    pub fn is_write_back(self) -> bool {
        matches!(self, Mode::WriteBack | Mode::WriteBackOrdered)
    }
}

/// Where the data of a disk lives in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Home {
    /// On its origin; flash is a cache of it.
    #[default]
    Origin,
    /// On flash alone. What was never written, or was discarded, is zeros.
    Flash,
    /// The same, and all of it is zeros after a crash: nothing waits for flash to be flushed.
    Scratch,
    /// On its origin from now on, and most of it on flash alone still: it lived there, and was given an origin of zeros. What
    /// was promised to it stays so until the origin has it all, and its dirty blocks count for nobody else meanwhile. Or it is on its
    /// way from there onto flash alone ([`Engine::hold`](crate::Engine::hold)), and comes back here if that does not come to an end.
    Moving,
}

/// Of the blocks that flash can hold, so many in a hundred may be promised to disks that live there: the
/// log has to be cleaned around what never leaves it.
pub const KEPT_PERCENT_MAX: u64 = 50;

/// What a disk is to the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Number within the pool.
    pub id: DiskId,
    /// Size of the origin in bytes; need not be a multiple of a block.
    pub size: u64,
    /// Alignment in bytes the origin accepts for I/O without read-modify-write (512 or 4096).
    pub origin_align: u32,
    /// Cache mode.
    pub mode: Mode,
    /// Unit of filling in bytes, 4 KiB to 1 MiB, a power of two.
    pub block_size: u32,
    /// Bytes of flash this disk keeps even under pressure from others.
    pub min_bytes: u64,
    /// Most bytes of flash it may hold; 0 means no limit.
    pub max_bytes: u64,
    /// Length in bytes from which a sequential read stream is not cached, and blocks of a sequential stream of
    /// write-through writes are on probation; 0 turns both off.
    pub seq_cutoff: u64,
    /// Refuse writes.
    pub read_only: bool,
    /// Where its data lives.
    pub home: Home,
}

/// Whether the origin may still hold, in a volatile cache, what was written to it before it was
/// attached (a daemon that died leaves such writes behind).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OriginState {
    /// The caller flushed it after opening it.
    Flushed,
    /// Nobody knows. Nothing read from it is cached before the engine has flushed it.
    Unknown,
}

/// What a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReqOp {
    /// Fill the buffer.
    Read,
    /// Store the buffer; with `fua`, durably before completion.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Everything completed before is durable when this completes.
    Flush,
    /// The range may read as zeros afterwards (it does).
    Discard {
        /// Force unit access.
        fua: bool,
    },
    /// The range reads as zeros.
    WriteZeroes {
        /// Force unit access.
        fua: bool,
        /// Space may be given back.
        punch: bool,
    },
    /// Bring the range into the cache (NBD_CMD_CACHE). No buffer.
    Prefetch,
}

impl ReqOp {
    /// Is it to be durable by itself?
    pub fn is_fua(self) -> bool {
        match self {
            ReqOp::Write { fua } | ReqOp::Discard { fua } | ReqOp::WriteZeroes { fua, .. } => fua,
            ReqOp::Read | ReqOp::Flush | ReqOp::Prefetch => false,
        }
    }
}

/// One request of a client.
#[derive(Debug)]
pub struct Request {
    /// The data thread that waits for the completion.
    pub owner: u32,
    /// The exporter's name for the request.
    pub tag: u64,
    /// Which disk.
    pub disk: DiskId,
    /// What.
    pub op: ReqOp,
    /// First byte. Any alignment.
    pub offset: u64,
    /// Bytes; any length up to `REQUEST_MAX` for reads and writes, up to the disk's size otherwise.
    pub len: u64,
    /// Reads and writes: memory for the whole blocks the range touches, so that byte
    /// `offset` of the disk is at `offset % 4096` of it. See [`Request::buffer_len`].
    pub buf: Option<BufSlice>,
    /// Writes: CRC32C of every block of `buf` that the request covers completely and in order;
    /// empty means the engine computes them. Filled by [`Request::write`].
    pub crcs: SmallVec<[u32; 4]>,
    /// When it arrived, monotonic nanoseconds.
    pub start_ns: u64,
    /// Of a write: it has no data, and changes nothing. What is there is put on flash as if a client had written it.
    pub keeps: bool,
}

impl Request {
    /// Bytes of buffer a read or write of this range needs.
    pub fn buffer_len(offset: u64, len: u64) -> u64 {
        ((offset + len).next_multiple_of(BLOCK)) - (offset / BLOCK * BLOCK)
    }

    /// A read into `buf` (of at least [`buffer_len`](Self::buffer_len) bytes).
    pub fn read(tag: u64, disk: DiskId, offset: u64, len: u64, buf: &Buf, now_ns: u64) -> Request {
        let window = buf.slice(0, Self::buffer_len(offset, len) as usize);
        Self::new(tag, disk, ReqOp::Read, offset, len, Some(window), now_ns)
    }

    /// A write from `buf`, whose payload starts at `offset % 4096`, [summed up](Self::sum_up).
    pub fn write(
        tag: u64,
        disk: DiskId,
        offset: u64,
        len: u64,
        fua: bool,
        buf: &Buf,
        now_ns: u64,
    ) -> Request {
        let window = buf.slice(0, Self::buffer_len(offset, len) as usize);
        let mut req = Self::new(
            tag,
            disk,
            ReqOp::Write { fua },
            offset,
            len,
            Some(window),
            now_ns,
        );
        req.sum_up();
        req
    }

    /// Computes the checksums of a write of whole blocks, outside the engine's lock.
    pub fn sum_up(&mut self) {
        if self.offset.is_multiple_of(BLOCK)
            && self.len.is_multiple_of(BLOCK)
            && let Some(window) = &self.buf
        {
            self.crcs = window.bytes().chunks(BLOCK as usize).map(crc32c).collect();
        }
    }

    /// Has whole blocks of a disk that is [held](crate::Engine::hold) put on flash as they are.
    pub fn keep(tag: u64, disk: DiskId, offset: u64, len: u64, now_ns: u64) -> Request {
        let write = ReqOp::Write { fua: false };
        Request {
            keeps: true,
            ..Self::new(tag, disk, write, offset, len, None, now_ns)
        }
    }

    /// Any request; `buf` only for reads and writes.
    pub fn new(
        tag: u64,
        disk: DiskId,
        op: ReqOp,
        offset: u64,
        len: u64,
        buf: Option<BufSlice>,
        start_ns: u64,
    ) -> Request {
        Request {
            owner: 0,
            tag,
            disk,
            op,
            offset,
            len,
            buf,
            crcs: SmallVec::new(),
            start_ns,
            keeps: false,
        }
    }
}

/// Why a request failed. Maps to a protocol's error at the exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReqError {
    /// Data could not be read or written, or is lost with a failed flash device.
    #[error("input/output error")]
    Io,
    /// The origin has no space left.
    #[error("no space left on the origin")]
    NoSpace,
    /// Out of range or malformed.
    #[error("request outside the disk or malformed")]
    Invalid,
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The disk is not attached (any more).
    #[error("no such disk")]
    NoDisk,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Shutdown,
}

/// How a request ended. Every request gets exactly one.
#[derive(Debug)]
pub struct Completion {
    /// From the request.
    pub owner: u32,
    /// From the request.
    pub tag: u64,
    /// Outcome.
    pub result: Result<(), ReqError>,
    /// The request's buffer, given back.
    pub buf: Option<BufSlice>,
}

/// What the engine wants done after an event. Reused by the caller between calls.
#[derive(Debug, Default)]
pub struct Effects {
    /// I/O to submit. Its `IoDone` may be handed back by any thread.
    pub ios: Vec<IoOp>,
    /// Requests that ended; `owner` says which thread must answer.
    pub completions: Vec<Completion>,
}

/// State of a range of a disk, for NBD block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentState {
    /// Holds data in the cache.
    Data,
    /// Reads as zeros, known by the cache.
    Zero,
    /// Only the origin knows.
    Origin,
}

/// Why flash is written no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlashFault {
    /// It failed. What it gives back is checked, and nothing about it is promised.
    Broken,
    /// It takes no writes (no room, or read-only). What it holds stays there, durably.
    Unwritable,
    /// It still gives back what it holds, but only as long as it is open: its file was removed.
    Leaving,
}
