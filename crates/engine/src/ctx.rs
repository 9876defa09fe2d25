//! Operations on devices as the engine decides on them, before they have a name.

use hearth_io::{BufSlice, Class, OpKind, Target};
use smallvec::{SmallVec, smallvec};

/// An operation on a device, before it has a name.
#[derive(Debug)]
pub(crate) struct Io {
    pub target: Target,
    pub kind: OpKind,
    pub offset: u64,
    pub len: u64,
    pub bufs: SmallVec<[BufSlice; 2]>,
    /// Checksums that what is read must have, block by block.
    pub crcs: SmallVec<[u32; 4]>,
    pub class: Class,
}

impl Io {
    /// Reads as much as `buf` holds.
    pub fn read(target: Target, offset: u64, buf: BufSlice) -> Io {
        let len = buf.len() as u64;
        Io::new(target, OpKind::Read, offset, len, smallvec![buf])
    }

    /// Writes what is in `bufs`, one after the other.
    pub fn write(target: Target, offset: u64, bufs: impl IntoIterator<Item = BufSlice>) -> Io {
        let bufs: SmallVec<[BufSlice; 2]> = bufs.into_iter().collect();
        let len = bufs.iter().map(|b| b.len() as u64).sum();
        Io::new(target, OpKind::Write, offset, len, bufs)
    }

    /// Changes a range without data.
    pub fn range(target: Target, kind: OpKind, offset: u64, len: u64) -> Io {
        Io::new(target, kind, offset, len, SmallVec::new())
    }

    /// Makes durable what the device has.
    pub fn flush(target: Target) -> Io {
        Io::range(target, OpKind::Flush, 0, 0)
    }

    fn new(
        target: Target,
        kind: OpKind,
        offset: u64,
        len: u64,
        bufs: SmallVec<[BufSlice; 2]>,
    ) -> Io {
        Io {
            target,
            kind,
            offset,
            len,
            bufs,
            crcs: SmallVec::new(),
            class: Class::Foreground,
        }
    }

    /// What is read must have these checksums.
    pub fn checked(mut self, crcs: SmallVec<[u32; 4]>) -> Io {
        self.crcs = crcs;
        self
    }

    /// Nobody waits for it.
    pub fn in_background(mut self) -> Io {
        self.class = Class::Background;
        self
    }
}
