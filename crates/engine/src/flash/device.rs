//! One flash device: what is on it, what of that is durable, how it does, what is wrong with it.

use crate::core::FlashWaiter;
use crate::flash::evict::Evict;
use crate::flash::fail::{FailMark, FlashFault, Noted};
use crate::flash::log::{Log, SegState, Segment};
use crate::flash::rescue::Rescue;
use hearth_format::{Layout, Superblock};
use hearth_io::{BLOCK, Target};
use std::collections::BTreeSet;

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
}
