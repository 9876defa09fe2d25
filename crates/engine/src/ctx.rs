//! What an owner asks of the world around it: operations on devices, and news for who runs it.
//!
//! An owner (the flash device, say) holds no queue of a driver and knows nobody else. What it wants
//! done it leaves in its [`Outbox`], and whoever called it empties that before anything else happens,
//! so that operations leave in the order in which they were decided on.

use hearth_io::{BufSlice, Class, OpKind, Target};
use smallvec::{SmallVec, smallvec};

/// Blocks in one device operation of a request: 1 MiB.
pub(crate) const RUN_MAX: u64 = 256;

/// Checksums, block by block.
pub(crate) type Sums = SmallVec<[u32; 4]>;

/// An operation on a device, before it has a name.
#[derive(Debug)]
pub(crate) struct Io {
    pub target: Target,
    pub kind: OpKind,
    pub offset: u64,
    pub len: u64,
    pub bufs: SmallVec<[BufSlice; 2]>,
    /// What the second half gets of a write, if it is not the same.
    pub second: Option<SmallVec<[BufSlice; 2]>>,
    /// Checksums that what is read must have, block by block.
    pub crcs: SmallVec<[u32; 4]>,
    /// What is read is to be kept: its checksums come with it.
    pub sums: bool,
    /// The device and the place on it are known: it is not for whoever sends it to say where they are.
    pub placed: bool,
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
            second: None,
            crcs: SmallVec::new(),
            sums: false,
            placed: false,
            class: Class::Foreground,
        }
    }

    /// What is read must have these checksums.
    pub fn checked(mut self, crcs: SmallVec<[u32; 4]>) -> Io {
        self.crcs = crcs;
        self
    }

    /// What is read will be kept if `kept`, so its checksums are wanted: whoever reads computes them, and
    /// not the core under its lock.
    pub fn summed(mut self, kept: bool) -> Io {
        self.sums = kept;
        self
    }

    /// It goes to that place of that device, wherever the log has it first.
    pub fn placed(mut self) -> Io {
        self.placed = true;
        self
    }

    /// Nobody waits for it.
    pub fn in_background(mut self) -> Io {
        self.class = Class::Background;
        self
    }
}

/// What an owner wants done: operations, each with what the owner shall be told when it has ended, and
/// news. Both keep their memory.
#[derive(Debug)]
pub(crate) struct Outbox<Op, Event> {
    pub ios: Vec<(Op, Io)>,
    pub events: Vec<Event>,
}

impl<Op, Event> Default for Outbox<Op, Event> {
    fn default() -> Self {
        Outbox {
            ios: Vec::new(),
            events: Vec::new(),
        }
    }
}

impl<Op, Event> Outbox<Op, Event> {
    /// Wants `io` done; when it has ended, `op` says what it was for.
    pub fn send(&mut self, op: Op, io: Io) {
        self.ios.push((op, io));
    }

    /// Has something to tell.
    pub fn tell(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Nothing to do, nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.ios.is_empty() && self.events.is_empty()
    }
}
