//! What a request is doing, with what that needs and nothing else.
//!
//! Each kind of request has its own states, and what has ended is only told to a request in a state
//! that waits for it. Anything else is a mistake of the engine, not of a client or of a device, and ends
//! the process: a request that is counted down twice would be answered before its data is safe.

use crate::api::ReqOp;
use hearth_io::BufSlice;
use smallvec::SmallVec;

/// The kinds of requests.
#[derive(Debug)]
pub(crate) enum State {
    Read(Read),
    /// Reads its range for the cache, one piece at a time; each is a read of its own.
    Prefetch,
    Flush(Flush),
    /// A write, a discard or a zeroing.
    Write(Write),
}

impl State {
    pub fn new(op: ReqOp) -> State {
        match op {
            ReqOp::Read => State::Read(Read::default()),
            ReqOp::Prefetch => State::Prefetch,
            ReqOp::Flush => State::Flush(Flush::Begins),
            ReqOp::Write { .. } | ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => {
                State::Write(Write::default())
            }
        }
    }
}

/// A read: all its parts are under way at once.
#[derive(Debug, Default)]
pub(crate) struct Read {
    /// Parts it still waits for, and one more while parts are being sent.
    pub pending: u32,
    /// Some of it was on flash, in RAM, or known to be zeros.
    pub hit: bool,
    /// It needed the origin, or would have without reading ahead.
    pub waited: bool,
    /// It continues no stream, and none of its reads of the origin has been sent.
    pub seeks: bool,
    /// It was counted as one that passes the cache because it belongs to a stream.
    pub bypassed: bool,
    /// Blocks that were looked for again.
    pub retries: u64,
    /// A device that was given up on may still write to its memory.
    pub memory_in_use: bool,
}

/// A flush.
#[derive(Debug)]
pub(crate) enum Flush {
    Begins,
    /// Waits for the flushes of flash and of the origin that cover it.
    Devices {
        pending: u32,
        /// Flash was given up before it had flushed: it has to be asked for anew what is durable.
        again: bool,
    },
    /// Waits until nothing of its disk is left on flash that will go.
    Leaving,
}

/// A write, a discard or a zeroing.
#[derive(Debug, Default)]
pub(crate) struct Write {
    pub step: Step,
    /// It goes to the origin directly.
    pub through: bool,
    /// Its partial blocks at the ends have been read: it covers whole blocks now.
    pub merged: bool,
    /// A fill of its range may be in the log already.
    pub fills_appended: bool,
    /// True if a replaced block was used while it was in the RAM stage. A rewrite there is no use: writes of partial
    /// blocks rewrite a block twice.
    pub was_used: bool,
    /// Blocks put into the append queue so far.
    pub appended: u64,
    /// Of a zeroing: partial blocks at its ends, as they will be.
    pub edges: SmallVec<[(u64, BufSlice); 2]>,
    /// It counts in the intents of these regions.
    pub regions: Option<(u32, u32)>,
    /// Past the cache of an ordered disk: its origin must have all epochs before this one; 0: it need not.
    pub behind: u64,
    /// The destager failed once while it waited.
    pub spared: bool,
}

/// Where a write stands.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Step {
    /// It was just taken.
    #[default]
    Begins,
    /// Others hold its range, or came before.
    WaitsForRange {
        /// For how many of them.
        behind: usize,
        /// When it came.
        turn: u64,
    },
    /// It has its range, and is about to go on.
    Holds,
    /// Reads the rest of partial blocks.
    Merges { pending: u32 },
    /// Waits for room on flash.
    WaitsForRoom {
        /// Parts of it on their way to the log.
        pending: u32,
        /// It is the run of zeros it would add that there is no room for.
        for_runs: bool,
    },
    /// All of it is on its way to the log.
    Appends { pending: u32 },
    /// Waits for the flush of flash that its FUA asks for.
    WaitsForFlash,
    /// Past the cache: waits until nothing in its range is newer on flash, or until it is noted that
    /// flash failed.
    WaitsForClean,
    /// Past the cache: waits for room in the log for the record it leaves.
    WaitsForRecordRoom,
    /// Past the cache: waits for the intents of its regions.
    WaitsForIntent,
    /// Past the cache: writes the origin.
    WritesOrigin { pending: u32 },
    /// Past the cache: waits for the flush of the origin that its FUA asks for.
    WaitsForOrigin,
}

impl Write {
    /// It was let in before all others that want its range.
    pub fn holds_range(&self) -> bool {
        !matches!(self.step, Step::Begins | Step::WaitsForRange { .. })
    }

    /// One whom it waits for has given the range back: its turn, if that was the last.
    pub fn one_less_in_front(&mut self) -> Option<u64> {
        let Step::WaitsForRange { behind, turn } = &mut self.step else {
            unreachable!(
                "it waits for its range in the queue, and is at {:?}",
                self.step
            );
        };
        *behind -= 1;
        (*behind == 0).then_some(*turn)
    }

    /// The rest of a partial block was read; true if that was the last.
    pub fn edge_read(&mut self) -> bool {
        let Step::Merges { pending } = &mut self.step else {
            unreachable!(
                "the rest of a block was read for a write at {:?}",
                self.step
            );
        };
        *pending -= 1;
        *pending == 0
    }

    /// A part of it was put into the queue of the log.
    pub fn queued(&mut self, blocks: u64) {
        let Step::WaitsForRoom { pending, .. } = &mut self.step else {
            unreachable!("a write at {:?} is appended", self.step);
        };
        *pending += 1;
        self.appended += blocks;
    }

    /// The last part of it was.
    pub fn all_queued(&mut self) {
        let Step::WaitsForRoom { pending, .. } = self.step else {
            unreachable!("a write at {:?} was appended", self.step);
        };
        self.step = Step::Appends { pending };
    }

    /// A part of it is on flash and mapped; true if all of it is.
    pub fn applied(&mut self) -> bool {
        match &mut self.step {
            Step::WaitsForRoom { pending, .. } => {
                *pending -= 1;
                false
            }
            Step::Appends { pending } => {
                *pending -= 1;
                *pending == 0
            }
            other => unreachable!("a part of a write at {other:?} arrived on flash"),
        }
    }

    /// There is no room for the next part of it.
    pub fn stalls(&mut self, for_runs: bool) {
        let pending = match self.step {
            Step::WaitsForRoom { pending, .. } => pending,
            _ => 0,
        };
        self.step = Step::WaitsForRoom { pending, for_runs };
    }

    /// No more of it is sent; true if nothing of it is on its way either.
    pub fn stops_appending(&mut self) -> bool {
        match self.step {
            Step::WaitsForRoom { pending, .. } if pending > 0 => {
                self.step = Step::Appends { pending };
                false
            }
            _ => true,
        }
    }

    /// A write of the origin for it ended; true if that was the last.
    pub fn origin_written(&mut self) -> bool {
        let Step::WritesOrigin { pending } = &mut self.step else {
            unreachable!("the origin was written for a write at {:?}", self.step);
        };
        *pending -= 1;
        *pending == 0
    }

    /// Where the part of its blocks ends about which the log has, or will have, something newer
    /// than what is mapped.
    pub fn superseded_to(&self, start: u64, end: u64) -> u64 {
        match self.step {
            Step::Appends { .. } | Step::WaitsForFlash => end,
            // All it has appended is on flash and mapped. If that could not become clean, a write
            // that waits for room might wait for itself.
            Step::WaitsForRoom { pending: 0, .. } => start,
            _ => (start + self.appended).min(end),
        }
    }
}

/// How many ends of something a request waits for, places in queues included.
#[cfg(any(test, feature = "check"))]
impl State {
    pub fn waits_for(&self) -> u64 {
        match self {
            State::Read(read) => read.pending.into(),
            State::Prefetch => 1,
            State::Flush(Flush::Begins) => 0,
            State::Flush(Flush::Devices { pending, .. }) => u64::from(*pending),
            State::Flush(Flush::Leaving) => 1,
            State::Write(write) => match write.step {
                Step::Begins | Step::Holds => 0,
                Step::Merges { pending }
                | Step::Appends { pending }
                | Step::WritesOrigin { pending } => pending.into(),
                Step::WaitsForRoom { pending, .. } => 1 + u64::from(pending),
                Step::WaitsForRange { .. }
                | Step::WaitsForFlash
                | Step::WaitsForClean
                | Step::WaitsForRecordRoom
                | Step::WaitsForIntent
                | Step::WaitsForOrigin => 1,
            },
        }
    }
}
