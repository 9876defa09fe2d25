//! A disk as a protocol sees it.

use hearth_engine::api::{DiskId, REQUEST_MAX};
use hearth_io::BLOCK;
use hearth_reactor::{Caller, Shares};

use crate::{Fault, Protocol};

/// Smallest request a hypervisor makes, bytes.
const SECTOR: u64 = 512;

/// What is known of a range of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Allocated, content unknown. Always a safe answer.
    Data,
    /// Not allocated; reads as zeroes.
    Hole,
    /// Allocated; reads as zeroes.
    Zero,
}

/// Sizes of requests, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Smallest unit in which all of the volume can be reached.
    pub smallest: u32,
    /// Least size, and alignment, that costs nothing extra.
    pub preferred: u32,
    /// Longest read or write.
    pub largest: u32,
}

/// What a volume can do beside reading. A protocol tells its clients of these and of no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Takes writes, and what else changes it.
    pub write: bool,
    /// Makes durable what was answered before.
    pub flush: bool,
    /// A single change can be durable when it is answered.
    pub fua: bool,
    /// Ranges can be given up.
    pub discard: bool,
    /// Ranges can be zeroed without sending zeroes.
    pub write_zeroes: bool,
    /// Zeroing costs less than writing.
    pub fast_zero: bool,
    /// What one connection was answered, all others see, and a flush of one covers all.
    pub coherent: bool,
}

impl Capabilities {
    /// All there is, but changes only if `write`.
    pub fn all(write: bool) -> Capabilities {
        Capabilities {
            write,
            flush: true,
            fua: true,
            discard: write,
            write_zeroes: write,
            fast_zero: write,
            coherent: true,
        }
    }
}

/// What stands for a client as long as it uses a volume: dropped when it has gone.
pub trait Visitor: Send + Sync {
    /// It changes the disk.
    fn wrote(&self);
}

/// A client that was let in.
pub struct Visit {
    /// Told of what it does; dropped when it is gone.
    pub visitor: Box<dyn Visitor>,
    /// What it and the volume's other clients hold.
    pub shares: Shares,
}

/// A disk on offer. Its methods are called on data threads and must not block.
pub trait Volume: Send + Sync {
    /// The disk requests go to. Stays the same as long as the disk is in its pool, and is no other
    /// disk's meanwhile.
    fn disk(&self) -> DiskId;
    /// What people and clients call it. In a pool no two disks have the same name; at most 64 bytes.
    fn name(&self) -> &str;
    /// Text for people; may be empty.
    fn description(&self) -> String;
    /// What tells this disk from every other one anywhere, for clients that find a disk again by its
    /// identity and not by its name. It goes with the disk's record, whichever host opens the pool.
    fn serial(&self) -> [u8; 16];
    /// Size in bytes; it may grow while clients are connected.
    fn size(&self) -> u64;
    /// What it can do. May change while clients are connected, for those that come later.
    fn capabilities(&self) -> Capabilities;
    /// Appends to `out` the states of consecutive ranges from `offset` on, as (bytes, state). They may
    /// cover less than `len` (ask again) or more (cut the rest). An empty answer means "all data".
    fn block_status(&self, offset: u64, len: u64, out: &mut Vec<(u64, Status)>);
    /// True while the volume is being taken away: requests are to fail.
    fn closing(&self) -> bool;
    /// True once it is closed for good: sessions end when nothing of theirs is in flight, so that
    /// nobody holds on to what is behind it. They notice when something happens to them; whoever
    /// closes a volume has them looked at (`hearth_reactor::Reactors::look`).
    fn gone(&self) -> bool;
    /// A client wants to use it over `protocol`: what stands for it as long as it stays, or why it may
    /// not. Every protocol asks here, so that who uses a disk, and how many may, is known in one place.
    fn admit(&self, caller: &Caller, protocol: Protocol) -> Result<Visit, Fault>;

    /// Sizes of requests.
    fn block_sizes(&self) -> BlockSizes {
        // The last bytes of a disk of odd size could not be reached otherwise.
        let odd = !self.size().is_multiple_of(SECTOR);
        BlockSizes {
            smallest: if odd { 1 } else { SECTOR as u32 },
            preferred: BLOCK as u32,
            largest: REQUEST_MAX as u32,
        }
    }

    /// True if changes are refused.
    fn read_only(&self) -> bool {
        !self.capabilities().write
    }
}
