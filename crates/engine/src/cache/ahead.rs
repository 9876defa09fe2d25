//! What is being read ahead, and who has joined.
//!
//! How it is read, and why nothing stale comes in that way: `core/ahead.rs`.

use crate::api::DiskId;
use crate::ctx::RUN_MAX;
use crate::ids::ReqId;
use hearth_io::BufSlice;
use hearth_policy::Range;
use hearth_policy::prefetch::Source;
use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// Share of the stage that unused blocks may take, so that what was asked for keeps its stay.
pub(crate) const UNUSED_SHARE: usize = 2;

/// A client's read that waits for a read ahead.
#[derive(Debug)]
pub(crate) struct Joined {
    pub req: ReqId,
    pub block: u64,
    pub count: u64,
}

/// A read ahead in flight.
#[derive(Debug)]
pub(crate) struct AheadRead {
    pub disk: DiskId,
    pub block: u64,
    pub count: u64,
    pub source: Source,
    pub ticket: u64,
    pub data: BufSlice,
    /// Which of its blocks a client waits for.
    pub used: [u64; RUN_MAX as usize / 64],
    pub joined: SmallVec<[Joined; 1]>,
}

impl AheadRead {
    pub fn end(&self) -> u64 {
        self.block + self.count
    }

    pub fn is_used(&self, i: u64) -> bool {
        self.used[i as usize / 64] >> (i % 64) & 1 != 0
    }

    pub fn unused(&self) -> u64 {
        self.count
            - self
                .used
                .iter()
                .map(|w| u64::from(w.count_ones()))
                .sum::<u64>()
    }
}

/// What is read ahead.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    pub reads: Slab<AheadRead>,
    pub queue: VecDeque<(Range, Source)>,
    /// Blocks in flight.
    pub blocks: usize,
    /// Emptied and lent to policy for each read, so that asking allocates nothing.
    pub wishes: Vec<(Range, Source)>,
}

impl Ahead {
    /// True if no read ahead is in flight.
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty()
    }
}

#[cfg(any(test, feature = "check"))]
impl Ahead {
    /// Requests that wait for reads ahead, once for each read.
    pub fn waiting(&self) -> impl Iterator<Item = ReqId> {
        let joined = self.reads.iter().flat_map(|(_, r)| &r.joined);
        joined.map(|j| j.req)
    }

    /// Tickets of reads ahead.
    pub fn tickets(&self) -> impl Iterator<Item = (DiskId, u64)> {
        self.reads.iter().map(|(_, r)| (r.disk, r.ticket))
    }
}
