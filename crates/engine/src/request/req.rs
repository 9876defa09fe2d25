//! A request on its way: what was asked, by whom, and where it stands.

use crate::api::{DiskId, ReqError, ReqOp, Request};
use crate::ids::ReqId;
use crate::request::answer::Answer;
use hearth_io::BufSlice;
use smallvec::SmallVec;

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Reads in flight.
    Reading,
    /// Waits for the range.
    WaitLock,
    /// Reads the rest of partial blocks.
    Merging,
    /// Waits for room on flash.
    WaitSpace,
    /// Waits for its batches.
    Appending,
    /// Waits for the flash device flush.
    WaitFlash,
    /// Waits for its range to be destaged.
    WaitClean,
    /// Waits for the intent to be durable.
    WaitIntent,
    /// Writes the origin.
    Origin,
    /// Waits for the origin's flush.
    WaitOrigin,
}

/// A request the engine has taken.
#[derive(Debug)]
pub(crate) struct Req {
    pub id: ReqId,
    /// Whom it is owed to.
    pub answer: Answer,
    pub disk: DiskId,
    pub op: ReqOp,
    /// First byte, and how many. Of a prefetch, what is left to do.
    pub offset: u64,
    pub len: u64,
    pub buf: Option<BufSlice>,
    /// Checksums that came with it; empty if it does not cover whole blocks, or does no more.
    pub crcs: SmallVec<[u32; 4]>,
    pub start_ns: u64,
    pub phase: Phase,
    /// Operations (or items) it still waits for.
    pub pending: u32,
    pub failed: Option<ReqError>,
    /// What it waited for flash to make durable has to be asked for anew.
    pub flush_again: bool,
    /// Touched flash / touched the origin.
    pub hit: bool,
    pub missed: bool,
    /// Needed the origin, or would have without prefetch.
    pub waited: bool,
    /// Continues no stream, and none of its reads of the origin has been sent.
    pub seeks: bool,
    /// Counts as one that passed the cache because it belongs to a stream.
    pub bypassed: bool,
    /// Holds its range.
    pub locked: bool,
    /// While it waits for its range: for how many others, and when it came.
    pub behind: usize,
    pub turn: u64,
    /// Counts in these intent regions.
    pub regions: Option<(u32, u32)>,
    pub retries: u64,
    /// A fill of its range may be in the log already.
    pub fills_appended: bool,
    /// Blocks put into the append queue so far.
    pub appended: u64,
    /// Buffers of partial edge blocks of a zeroing (head, tail).
    pub edges: SmallVec<[(u64, BufSlice); 2]>,
    /// Goes to the origin directly.
    pub through: bool,
    /// Its partial blocks at the ends have been read: it covers whole blocks now.
    pub merged: bool,
    /// Stalled because of the run of zeros it would add.
    pub waits_for_runs: bool,
}

impl Req {
    pub fn new(id: ReqId, r: Request, answer: Answer) -> Req {
        Req {
            id,
            answer,
            disk: r.disk,
            op: r.op,
            offset: r.offset,
            len: r.len,
            buf: r.buf,
            crcs: r.crcs,
            start_ns: r.start_ns,
            phase: Phase::Reading,
            pending: 0,
            failed: None,
            flush_again: false,
            hit: false,
            missed: false,
            waited: false,
            seeks: false,
            bypassed: false,
            locked: false,
            behind: 0,
            turn: 0,
            regions: None,
            waits_for_runs: false,
            retries: 0,
            fills_appended: false,
            appended: 0,
            edges: SmallVec::new(),
            through: false,
            merged: false,
        }
    }
    /// Did a client ask, not another request?
    pub fn is_clients(&self) -> bool {
        !self.answer.is_to_request()
    }

    /// How many ends of something it waits for, places in queues included.
    #[cfg(any(test, feature = "check"))]
    pub fn waits_for(&self) -> u64 {
        let queues = match self.phase {
            Phase::WaitLock | Phase::WaitSpace | Phase::WaitClean | Phase::WaitIntent => 1,
            // Its one read for the part it is at.
            Phase::Reading => u64::from(self.op == ReqOp::Prefetch),
            _ => 0,
        };
        queues + u64::from(self.pending)
    }

    /// The blocks it touches.
    pub fn blocks(&self) -> (u64, u64) {
        (self.offset / 4096, (self.offset + self.len).div_ceil(4096))
    }
}
