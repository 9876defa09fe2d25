//! One flash device: what is on it, what of that is durable, how it does, what is wrong with it.

use crate::api::FlashFault;
use crate::core::FlashWaiter;
use crate::ctx::Io;
use crate::flash::evict::Evict;
use crate::flash::fail::{FailMark, Noted};
use crate::flash::log::{Log, SegState, Segment};
use crate::flash::rescue::Rescue;
use crate::stats::{PoolCounters, ewma};
use hearth_format::{Layout, Superblock};
use hearth_io::{BLOCK, BufSlice, IoDone, OpKind, Target};
use std::collections::BTreeSet;

/// Good reads of which the mean is weighed one by one, at most: the older ones weigh nothing then.
const SAMPLES_MAX: u64 = 64;

/// A flash device of the pool.
pub(crate) struct FlashDevice {
    pub sb: Superblock,
    pub layout: Layout,
    pub pool_tag: u64,
    pub log: Log,
    pub flush_inflight: bool,
    /// Who waits for it to be durable up to an ord.
    pub waiters: Vec<(u64, FlashWaiter)>,
    pub evict: Evict,
    pub rescue: Rescue,
    pub failed: bool,
    /// Why, if so.
    pub fault: Option<FlashFault>,
    /// It refused the last write that failed for want of room.
    pub full: bool,
    /// That it failed is being noted on it.
    pub mark: Option<FailMark>,
    /// Where that is noted.
    pub noted: Noted,
    /// Places where reads of it failed since one succeeded. Places, because one that is read again
    /// and again says nothing about the rest.
    pub read_errors: BTreeSet<u64>,
    pub ewma_ns: u64,
    pub inflight: u32,
    pub last_flush_ns: u64,
    /// Bytes of batches on it that no flush started so far covers.
    pub unflushed_bytes: u64,
    pub counters: PoolCounters,
}

/// What an operation of the device's own was for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FlashOp {
    /// Writes a batch.
    Batch { seq: u64 },
    /// Writes the summary of a closed segment.
    Summary { seg: u32 },
    /// Makes durable what had been applied when it was sent.
    Flush { ord: u64, seq: u64 },
    /// Discards a freed segment.
    Trim { seg: u32 },
    /// A step of noting on the device that it was given up.
    Mark,
    /// A step of storing the log's floor.
    Floor,
}

impl FlashDevice {
    /// The device a superblock describes, as if nothing were on it.
    pub fn new(sb: Superblock) -> FlashDevice {
        let layout: Layout = sb.layout;
        let segment = Segment {
            state: SegState::Free,
            seq: 0,
            live: 0,
            dirty: 0,
            pins: 0,
            batches: 0,
        };
        let log = Log {
            segments: vec![segment; layout.segment_count as usize],
            next_batch_seq: 1,
            segment_blocks: layout.segment_blocks,
            data_blocks: layout.data_blocks(),
            summary_capacity: layout.summary_capacity(),
            ..Log::default()
        };
        FlashDevice {
            pool_tag: sb.pool_tag(),
            log,
            flush_inflight: false,
            waiters: Vec::new(),
            evict: Evict::default(),
            rescue: Rescue::default(),
            failed: false,
            fault: None,
            full: false,
            mark: None,
            noted: Noted::default(),
            read_errors: BTreeSet::new(),
            ewma_ns: 0,
            inflight: 0,
            last_flush_ns: 0,
            unflushed_bytes: 0,
            counters: PoolCounters::default(),
            sb,
            layout,
        }
    }

    /// What operations on it name.
    pub fn target(&self) -> Target {
        Target::Flash(0)
    }

    /// Where a slot lies on it, in bytes.
    pub fn slot_offset(&self, slot: u32) -> u64 {
        (self.layout.segment_start + u64::from(slot)) * BLOCK
    }

    /// Reads consecutive slots into a buffer of their length.
    pub fn read_slots(&self, slot: u32, into: BufSlice) -> Io {
        Io::read(self.target(), self.slot_offset(slot), into)
    }

    /// An operation on it, whoever wants it, is on its way.
    pub fn note_sent(&mut self, kind: OpKind, len: u64) {
        match kind {
            OpKind::Read => {
                self.inflight += 1;
                self.counters.flash_read_bytes += len;
            }
            OpKind::Write => self.counters.flash_write_bytes += len,
            _ => {}
        }
    }

    /// An operation on it, whoever wanted it, has ended. What a failed write means is for those to say
    /// who know what it was for.
    pub fn account(&mut self, done: &IoDone) {
        if done.op.kind != OpKind::Read {
            return;
        }
        self.inflight -= 1;
        self.ewma_ns = ewma(self.ewma_ns, done.latency_ns);
        if done.is_memory_gone() {
            // Says nothing about the device.
        } else if done.result.is_err() {
            self.counters.flash_errors += 1;
            self.read_errors.insert(done.op.offset);
        } else {
            self.read_errors.clear();
        }
    }

    /// Reads that went past the engine's lock have ended well.
    pub fn account_good_reads(&mut self, count: u64, bytes: u64, ns: u64) {
        self.counters.flash_read_bytes += bytes;
        let Some(each) = ns.checked_div(count) else {
            return;
        };
        self.read_errors.clear();
        for _ in 0..count.min(SAMPLES_MAX) {
            self.ewma_ns = ewma(self.ewma_ns, each);
        }
    }
}
