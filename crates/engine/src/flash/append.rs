//! From the append queue to flash: batches, their application to the index, sealing.
//!
//! The order that must not change: a batch is written; it and all before it are on the device;
//! the index maps its blocks; those who wait are told. A segment is freed in the RAM order
//! first, then by the tail number in a later batch; only when that batch is durable may the
//! segment be overwritten, else a crash would read another block's data out of it.

use crate::api::{DiskId, Effects};
use crate::cache::index::Key;
use crate::core::Core;
use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::FlashOp;
use crate::flash::log::{
    Apply, BATCH_MIN_BLOCKS, BATCHES_IN_FLIGHT, Batch, BatchState, Head, Item, Log, Sealing,
    SegState, Then,
};
use crate::paths::{Path, took};
use hearth_format::{BatchHeader, Entry, FormatError, Kind, SummaryHeader};
use hearth_io::{BLOCK, Buf, BufSlice, IoError, OpKind};
use smallvec::SmallVec;

/// Why a segment that was written here has room for its summary.
pub(crate) const FITS: &str = "a head is closed before its summary is full";

impl Core {
    /// Sends what may be sent.
    pub fn pump(&mut self, now: u64, fx: &mut Effects) {
        loop {
            if self.flash.failed {
                // Only notes about what became clean still come; there is nowhere to put them.
                self.flash.log.clear_queue();
            }
            if self.flash.log.queue.is_empty() {
                self.flash.log.urgent = false;
                return;
            }
            if self
                .flash
                .log
                .batches
                .iter()
                .any(|b| b.state == BatchState::Failed)
            {
                // Order must hold: wait for the rest, then send all again (`retry_failed`).
                return;
            }
            if self.flash.log.may_gather(now) {
                return;
            }
            let inflight = self.flash.log.batches.len();
            let small = self.flash.log.queued_blocks < BATCH_MIN_BLOCKS && !self.flash.log.urgent;
            if inflight >= BATCHES_IN_FLIGHT || (inflight > 0 && small) {
                return;
            }
            if self.flash.log.head.is_none() && !self.open_head() {
                return;
            }
            match self.flash.log.take_batch() {
                Some(items) => self.send(items, now, fx),
                None => self.roll(fx),
            }
        }
    }

    /// Takes a free segment as the head.
    pub fn open_head(&mut self) -> bool {
        let Some(seg) = self.flash.log.free.pop_front() else {
            return false;
        };
        let seq = self.flash.log.next_segment_seq;
        self.flash.log.next_segment_seq += 1;
        let s = &mut self.flash.log.segments[seg as usize];
        s.state = SegState::Open;
        s.seq = seq;
        debug_assert!(s.live == 0 && s.pins == 0);
        debug_assert!(!self.shared.pinned(seg), "a hit reads a free segment");
        let first_batch = self.flash.log.next_batch_seq;
        self.flash.log.head = Some(Head {
            seg,
            seq,
            next: 0,
            entries: Vec::new(),
            first_batch,
        });
        true
    }

    /// Closes the head: it gets its summary once its last batch is on flash.
    pub fn roll(&mut self, fx: &mut Effects) {
        // Who voids what a disk has on flash closes the head, and there may be none.
        let Some(head) = self.flash.log.head.take() else {
            return;
        };
        self.flash.log.segments[head.seg as usize].state = SegState::Closed;
        self.flash.log.order.push_back(head.seg);
        self.flash.counters.segments_sealed += 1;
        // On failed flash its last batches may never have been applied.
        if head.entries.is_empty() || self.flash.failed {
            return;
        }
        // The summary is an operation on the segment: keep it from being freed before.
        self.flash.log.segments[head.seg as usize].pins += 1;
        // The tail as of now rests only on batches up to `last_batch`; a later one might not.
        let tail_seq = self.flash.log.tail_seq();
        self.flash.log.sealing.push(Sealing {
            tail_seq,
            seg: head.seg,
            seq: head.seq,
            entries: head.entries,
            first_batch: head.first_batch,
            last_batch: self.flash.log.next_batch_seq - 1,
        });
        self.write_summaries(fx);
    }

    fn send(&mut self, mut items: Vec<Item>, _now: u64, fx: &mut Effects) {
        let mut tail_seq = self.flash.log.tail_seq();
        if self.opts.faults.has(Fault::TailSkipsOne)
            && let Some(seg) = self.flash.log.order.get(1)
        {
            tail_seq = self.flash.log.segments[*seg as usize].seq;
        }
        let (pool_tag, mut durable_seq, epoch) = (
            self.flash.pool_tag,
            self.flash.log.durable_seq,
            self.flash.log.epoch,
        );
        if self.opts.faults.has(Fault::ClaimUndurable) {
            durable_seq = self.flash.log.applied_seq;
        }
        let segment_start = self.flash.layout.segment_start;
        let segment_blocks = self.flash.log.segment_blocks;
        let head = self.flash.log.head.as_mut();
        let head = head.expect("what is sent was fitted into the head");
        let seq = self.flash.log.next_batch_seq;
        self.flash.log.next_batch_seq += 1;
        let mut entries: SmallVec<[Entry; 32]> = SmallVec::new();
        let mut bufs: SmallVec<[BufSlice; 2]> = SmallVec::new();
        let descriptor = Buf::zeroed(BLOCK as usize);
        bufs.push(descriptor.all());
        let mut blocks = 0u32;
        let mut payload = 0u64;
        let mut moved = 0u64;
        for item in &items {
            if item.kind.is_data() {
                let base = head.seg * segment_blocks;
                for i in 0..item.count {
                    entries.push(Entry {
                        disk: item.disk,
                        block: item.block + u64::from(i),
                        word: item.crcs[i as usize],
                        slot: (item.slot + i - base) as u16,
                        kind: item.kind,
                        flags: 0,
                    });
                }
                blocks += item.count;
                match item.apply {
                    Apply::Move { .. } => moved += u64::from(item.count),
                    _ => payload += u64::from(item.count),
                }
                if let Some(data) = &item.data {
                    match bufs.last_mut() {
                        Some(last) if last.adjoins(data) => last.extend(data.len()),
                        _ => bufs.push(data.clone()),
                    }
                }
            } else {
                entries.push(Entry {
                    disk: item.disk,
                    block: item.block,
                    word: item.count,
                    slot: 0,
                    kind: item.kind,
                    flags: 0,
                });
            }
        }
        let header = BatchHeader {
            pool_tag,
            segment_seq: head.seq,
            batch_seq: seq,
            tail_seq,
            durable_seq,
            epoch,
            data_blocks: blocks as u16,
            flags: 0,
        };
        let mut window = descriptor.all();
        let encoded = header.encode(&entries, window.bytes_mut());
        encoded.expect("a batch is taken within its bounds");
        let at = head.next;
        head.next += 1 + blocks;
        head.entries.extend_from_slice(&entries);
        let (seg, seg_seq) = (head.seg, head.seq);
        let offset =
            (segment_start + u64::from(seg) * u64::from(segment_blocks) + u64::from(at)) * BLOCK;
        let last_ord = items.last().map_or(0, |i| i.ord);
        // A split item's first part must not make its last part count as applied.
        let partial = self
            .flash
            .log
            .queue
            .front()
            .is_some_and(|f| f.ord == last_ord)
            && !self.opts.faults.has(Fault::SplitCountsEarly);
        if partial {
            took(Path::ItemSplit);
        }
        for item in &mut items {
            debug_assert!(
                item.data
                    .as_ref()
                    .is_none_or(|d| d.len() == item.count as usize * 4096)
            );
        }
        self.flash.log.segments[seg as usize].batches += 1;
        self.flash.log.batches.push_back(Batch {
            seq,
            seg,
            seg_seq,
            items,
            bytes: u64::from(1 + blocks) * BLOCK,
            state: BatchState::InFlight,
            last_ord: if partial { last_ord - 1 } else { last_ord },
        });
        self.cache.policy.wrote(u64::from(1 + blocks));
        self.flash.counters.batches += 1;
        self.flash.counters.flash_payload_bytes += payload * BLOCK;
        self.flash.counters.flash_reinsert_bytes += moved * BLOCK;
        let io = Io::write(self.flash.target(), offset, bufs);
        debug_assert_eq!(io.len, u64::from(1 + blocks) * BLOCK);
        self.io(fx, FlashOp::Batch { seq }.into(), io);
    }

    pub fn batch_done(
        &mut self,
        seq: u64,
        result: Result<(), IoError>,
        now: u64,
        fx: &mut Effects,
    ) {
        let batch = self.flash.log.batches.iter_mut().find(|b| b.seq == seq);
        let Some(batch) = batch else {
            // What was in flight when flash was given up has gone other ways.
            assert!(
                self.flash.failed,
                "batch {seq} ended, and was not in flight"
            );
            return;
        };
        batch.state = if result.is_ok() {
            BatchState::Written
        } else {
            BatchState::Failed
        };
        if let Err(e) = &result {
            self.flash.counters.flash_errors += 1;
            self.note_refusal(e);
        }
        let mut bytes = 0;
        if self.opts.faults.has(Fault::ApplyOutOfOrder)
            && let Some(at) = self
                .flash
                .log
                .batches
                .iter()
                .position(|b| b.state == BatchState::Written)
            && let Some(batch) = self.flash.log.batches.remove(at)
        {
            self.apply(batch, now, fx);
        }
        while self
            .flash
            .log
            .batches
            .front()
            .is_some_and(|b| b.state == BatchState::Written)
        {
            if let Some(batch) = self.flash.log.batches.pop_front() {
                bytes += batch.bytes;
                self.apply(batch, now, fx);
            }
        }
        if self
            .flash
            .log
            .batches
            .iter()
            .any(|b| b.state == BatchState::Failed)
        {
            self.retry_failed(now, fx);
        }
        self.write_summaries(fx);
        if !self.flash.waiters.is_empty() {
            self.start_flash_flush(now, fx);
        }
        self.flush_if_much(bytes, now, fx);
    }

    /// Maps a batch and tells who waited for it.
    fn apply(&mut self, batch: Batch, now: u64, fx: &mut Effects) {
        self.flash.log.failures = 0;
        self.flash.full = false;
        self.flash.log.segments[batch.seg as usize].batches -= 1;
        self.flash.log.applied_seq = batch.seq;
        self.flash.log.applied_ord = self.flash.log.applied_ord.max(batch.last_ord);
        for item in batch.items {
            match item.apply {
                Apply::Dirty => {
                    for i in 0..item.count {
                        let block = item.block + u64::from(i);
                        // A block that is written again is in use.
                        let old = self.cache.index.get(Key::new(item.disk, block));
                        let old = old.and_then(|slot| self.cache.index.slot(slot));
                        self.map(
                            item.disk,
                            block,
                            item.slot + i,
                            item.crcs[i as usize],
                            true,
                            old.map_or(0, |s| s.freq + 1),
                            now,
                        );
                    }
                }
                Apply::Clean { ticket, freq } => {
                    let raced = self.opts.faults.has(Fault::CacheRacedMiss);
                    let ticket = self
                        .disk_mut(item.disk)
                        .and_then(|d| d.ticket(ticket).cloned());
                    let mut voided = 0;
                    for i in 0..item.count {
                        let block = item.block + u64::from(i);
                        if !raced && ticket.as_ref().is_none_or(|t| t.voids(block)) {
                            voided += 1;
                            continue;
                        }
                        self.void_fill(item.disk, block - voided, voided);
                        voided = 0;
                        self.map(
                            item.disk,
                            block,
                            item.slot + i,
                            item.crcs[i as usize],
                            false,
                            u64::from(freq),
                            now,
                        );
                    }
                    let end = item.block + u64::from(item.count);
                    self.void_fill(item.disk, end - voided, voided);
                }
                Apply::Move { old, dirty, freq } => {
                    for i in 0..item.count {
                        let block = item.block + u64::from(i);
                        let still = self.cache.index.get(Key::new(item.disk, block))
                            == Some(old + i)
                            && self
                                .cache
                                .index
                                .slot(old + i)
                                .is_some_and(|s| s.dirty == dirty);
                        if still || self.opts.faults.has(Fault::MoveOverNewer) {
                            let lost = self.cache.index.slot(old + i).is_some_and(|s| s.lost);
                            let crc = item.crcs[i as usize];
                            self.map(
                                item.disk,
                                block,
                                item.slot + i,
                                crc,
                                dirty,
                                u64::from(freq),
                                now,
                            );
                            if lost {
                                self.lose(item.disk, block, item.slot + i);
                            }
                        } else {
                            self.cache.index.set_mark(old + i, false);
                        }
                    }
                }
                Apply::Again => {}
                Apply::Record => self.apply_record(
                    item.kind,
                    item.disk,
                    item.block,
                    item.count,
                    batch.seg_seq,
                    now,
                ),
            }
            self.then(item.then, batch.seg_seq, now, fx);
        }
    }

    /// A cancelled fill is on flash but not in the index. A crash would bring it back, and later
    /// writes past the cache do not know that they must void it: so that is done now, but for
    /// the blocks about which something newer is in the log. A clean copy in the index is no
    /// such thing: it may be of another, earlier fill.
    fn void_fill(&mut self, disk: DiskId, block: u64, count: u64) {
        if self.opts.faults.has(Fault::SkipVoidFill) {
            return;
        }
        let mut run = block;
        for b in block..=block + count {
            let newer = b == block + count
                || self
                    .disk(disk)
                    .is_none_or(|d| d.zero.contains(b) || d.dirty.contains(b) || d.copy_queued(b))
                || self.superseding(disk, b, b + 1);
            if newer {
                if b > run {
                    took(Path::FillVoided);
                    self.record_drop(disk, run, b - run);
                }
                run = b + 1;
            }
        }
    }

    fn then(&mut self, then: Then, seg_seq: u64, now: u64, fx: &mut Effects) {
        match then {
            Then::Nothing => {}
            Then::Request(id) => self.request_applied(id, now, fx),
            Then::Ticket { disk, ticket } => {
                let d = self.known_mut(disk);
                d.drop_ticket(ticket);
            }
            Then::Intent { disk, region } => self.intent_applied(disk, region, seg_seq),
            Then::Relogged => self.flash.evict.relogged = true,
            Then::Moved => self.flash.evict.moving -= 1,
        }
    }

    /// Points the index at a block's new place.
    #[allow(clippy::too_many_arguments)]
    pub fn map(
        &mut self,
        disk: DiskId,
        block: u64,
        slot: u32,
        crc: u32,
        dirty: bool,
        freq: u64,
        now: u64,
    ) {
        let old = self
            .cache
            .index
            .set(Key::new(disk, block), slot, crc, dirty, freq);
        let old_dirty = old.is_some_and(|(_, d)| d);
        let seg = self.flash.log.segment_of(slot);
        let s = &mut self.flash.log.segments[seg];
        s.live += 1;
        s.dirty += u32::from(dirty);
        if let Some((old, was_dirty)) = old {
            self.slot_emptied(old, was_dirty);
        }
        self.dirty_total += u64::from(dirty);
        self.dirty_total -= u64::from(old_dirty);
        let keep_zeros = self.opts.faults.has(Fault::WriteKeepsZeros);
        let d = self.known_mut(disk);
        d.cached += u64::from(old.is_none());
        let news = dirty || d.excess() > 0;
        if !d.refusals.is_empty() {
            d.refusals.remove(&block);
        }
        if dirty {
            if !d.is_dirty() {
                d.dirty_since_ns = now;
            }
            d.lost.remove(block);
            d.dirty.insert(block);
            if d.zero.contains(block) && !keep_zeros {
                d.solid.remove(block);
                self.change_zeros(disk, |zero| zero.remove(block));
            }
        } else if old_dirty {
            d.dirty.remove(block);
            d.lost.remove(block);
        }
        if news && !self.opts.faults.has(Fault::OverlookDirty) {
            self.ready.touch(disk);
        }
    }

    fn apply_record(
        &mut self,
        kind: Kind,
        disk: DiskId,
        block: u64,
        count: u32,
        seg_seq: u64,
        now: u64,
    ) {
        if kind != Kind::ZeroRun {
            return;
        }
        let end = block + u64::from(count);
        if !self.opts.faults.has(Fault::ZeroKeepsCopies) {
            self.forget_range(disk, block, end, now);
        }
        let newest = self.opts.faults.has(Fault::OldestZerosForgotten);
        let d = self.known_mut(disk);
        if !d.is_dirty() {
            d.dirty_since_ns = now;
        }
        let oldest = d.zero_seg_seq.unwrap_or(seg_seq).min(seg_seq);
        d.zero_seg_seq = Some(if d.zero.is_empty() || newest {
            seg_seq
        } else {
            oldest
        });
        d.origin.destage.void_zeros(block, end);
        self.change_zeros(disk, |zero| zero.insert_range(block, end));
        self.ready.touch(disk);
        self.ready.note(disk);
    }

    /// Writes the summary of closed segments whose batches are all on flash. Not before: that would break
    /// nothing, for a start looks at the batches themselves of a summary that reaches past what is durable,
    /// but it would cost that look.
    pub fn write_summaries(&mut self, fx: &mut Effects) {
        while let Some(at) = self
            .flash
            .log
            .sealing
            .iter()
            .position(|s| s.last_batch <= self.flash.log.applied_seq)
        {
            let s = self.flash.log.sealing.swap_remove(at);
            let bytes = self.encode_summary(&s).expect(FITS);
            let mut buf = Buf::zeroed(bytes.len()).slice(0, bytes.len());
            buf.bytes_mut().copy_from_slice(&bytes);
            let offset = self.flash.layout.summary_offset(s.seg);
            let io = Io::write(self.flash.target(), offset, [buf]).in_background();
            self.io(fx, FlashOp::Summary { seg: s.seg }.into(), io);
        }
    }

    /// A summary as whole blocks. Fails only for one that is made of what was found on flash.
    pub fn encode_summary(&self, s: &Sealing) -> Result<Vec<u8>, FormatError> {
        let claims_itself = self.opts.faults.has(Fault::SummaryClaimsItself);
        let header = SummaryHeader {
            pool_tag: self.flash.pool_tag,
            segment_seq: s.seq,
            first_batch_seq: s.first_batch,
            last_batch_seq: s.last_batch,
            tail_seq: match self.opts.faults.has(Fault::SummaryTailLater) {
                true => self.flash.log.tail_seq(),
                false => s.tail_seq,
            },
            durable_seq: match claims_itself {
                true => s.last_batch,
                false => self.flash.log.durable_seq,
            },
            epoch: self.flash.log.epoch,
            entry_count: s.entries.len() as u32,
        };
        let mut bytes = Vec::new();
        header.encode(&s.entries, &mut bytes)?;
        bytes.resize(
            bytes
                .len()
                .next_multiple_of(BLOCK as usize)
                .max(BLOCK as usize),
            0,
        );
        Ok(bytes)
    }

    /// The log is durable further than before: segments freed before that may be reused.
    pub fn segments_durable(&mut self, _now: u64, fx: &mut Effects) {
        let durable = self.flash.log.durable_ord;
        let mut claim = None;
        for seg in self.flash.log.freeing.clone() {
            match self.flash.log.segments[seg as usize].state {
                SegState::Freeing { ord, claimed }
                    if ord <= durable
                        && (claimed || self.opts.faults.has(Fault::ReuseUnclaimed)) =>
                {
                    self.release(seg, fx)
                }
                SegState::Freeing {
                    ord,
                    claimed: false,
                } if ord <= durable => {
                    // Recovery believes the new tail only if a batch on flash claims that the
                    // one naming it is durable: such a batch must be durable too.
                    let claim = *claim.get_or_insert_with(|| self.note_tail());
                    self.flash.log.segments[seg as usize].state = SegState::Freeing {
                        ord: claim,
                        claimed: true,
                    };
                    self.flash.log.urgent = true;
                }
                _ => {}
            }
        }
    }

    /// Gives a freed segment back, trimming it first if wanted.
    pub fn release(&mut self, seg: u32, fx: &mut Effects) {
        self.flash.counters.segments_freed += 1;
        if !self.opts.trim {
            self.trim_done(seg);
            return;
        }
        self.flash.log.segments[seg as usize].state = SegState::Trimming;
        let bytes = u64::from(self.flash.log.segment_blocks) * BLOCK;
        let offset = self.flash.layout.segment_start * BLOCK + u64::from(seg) * bytes;
        let io = Io::range(self.flash.target(), OpKind::Discard, offset, bytes);
        self.io(fx, FlashOp::Trim { seg }.into(), io.in_background());
    }

    /// A trim ended; failing is no harm.
    pub fn trim_done(&mut self, seg: u32) {
        self.flash.log.freeing.retain(|s| *s != seg);
        self.flash.log.segments[seg as usize].state = SegState::Free;
        self.flash.log.free.push_back(seg);
    }
}

/// Items of batches in flight and of the queue, oldest first, to be sent again.
pub(crate) fn unsent(log: &mut Log) -> Vec<Item> {
    let mut items = Vec::new();
    for batch in log.batches.drain(..) {
        log.segments[batch.seg as usize].batches -= 1;
        items.extend(batch.items);
    }
    items.extend(log.queue.drain(..));
    items
}
