//! From the append queue to flash: batches, heads, summaries, segments that come free.
//!
//! The order that must not change: a batch is written; it and all before it are on the device;
//! the index maps its blocks; those who wait are told. A segment that was emptied may be overwritten when what
//! took the place of its content is durable, and the map on flash says so ([`crate::flash::map`]), else a
//! crash would read another block's data out of it.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashEvent, FlashOp, Token, Users};
use crate::flash::log::{
    BATCH_MIN_BLOCKS, BATCHES_IN_FLIGHT, Batch, BatchState, FULL_BATCHES_IN_FLIGHT, Head, Item,
    Log, STRIPED_HEAD, Sealing, SegState,
};
use crate::paths::{Path, took};
use hearth_format::batch::BATCH_AGAIN;
use hearth_format::{
    BATCH_ENTRIES_MAX, BatchHeader, BatchMark, Entry, FormatError, Kind, SummaryHeader,
};
use hearth_io::{BLOCK, Buf, BufSlice, IoError, OpKind};
use smallvec::SmallVec;

/// Why a segment that was written here has room for its summary.
pub(crate) const FITS: &str = "a head is closed before its summary is full";

impl<U: Users> FlashDevice<U> {
    /// Sends what may be sent.
    pub fn pump(&mut self, now: u64) {
        loop {
            if !self.takes_writes() {
                // Only notes about what became clean still come; there is nowhere to put them.
                self.log.clear_queue();
            }
            if self.log.queue.is_empty() {
                self.log.urgent = false;
                return;
            }
            if self
                .log
                .batches
                .iter()
                .any(|b| b.state == BatchState::Failed)
            {
                // Order must hold: wait for the rest, then send all again (`retry_failed`).
                return;
            }
            if self.log.again_seq > self.log.durable_seq {
                // It decides which batches there were before, so nothing may be there without it.
                if self.log.batches.is_empty() {
                    self.flush(now);
                }
                return;
            }
            if self.log.may_gather(now) {
                return;
            }
            let inflight = self.log.batches.len();
            let small = self.log.queued_blocks < BATCH_MIN_BLOCKS && !self.log.urgent;
            let most = match self.log.queued_blocks as usize >= BATCH_ENTRIES_MAX {
                // One head after the other lies on another device.
                true => FULL_BATCHES_IN_FLIGHT * self.devices.width(),
                false => BATCHES_IN_FLIGHT,
            };
            if inflight >= most || (inflight > 0 && small) {
                return;
            }
            let main = self.main_head();
            let cleaner = &self.cleaner;
            let head_of = |why| match cleaner.head(why) {
                0 => main,
                other => other,
            };
            let wanted = match self.log.next_head(head_of) {
                0 | STRIPED_HEAD => main,
                other => other,
            };
            let at = match self.log.heads[wanted].is_some() || self.open_head(wanted) {
                true => wanted,
                // No segment is free. What belongs together is a wish: it goes wherever there is room, so two heads hold
                // as much as one would, and a second one takes nothing from the reserve.
                false => match self.log.heads.iter().position(Option::is_some) {
                    Some(at) => at,
                    None => return,
                },
            };
            let cleaner = &self.cleaner;
            let head_of = |why| match (at == wanted, cleaner.head(why)) {
                (false, _) => at,
                (true, 0) => main,
                (true, other) => other,
            };
            let there = match self.log.heads[at].as_ref() {
                Some(head) => self.sides_there(head.seg),
                None => [true; 2],
            };
            match self.log.take_batch(at, there, head_of) {
                Some(items) => self.send(at, items),
                None => self.roll_one(at),
            }
        }
    }

    /// The head that all goes to but what is moved. Of several devices two are written in turn, a full batch each, so that
    /// whoever reads on through what was written in one go has two devices at work, and not one for the length of a segment.
    fn main_head(&self) -> usize {
        let log = &self.log;
        let open = |at: usize| log.heads[at].as_ref().map(|head| head.seg);
        let (here, there) = match log.last_main {
            STRIPED_HEAD => (STRIPED_HEAD, 0),
            _ => (0, STRIPED_HEAD),
        };
        let stripes = self.devices.width() > 1
            && log.heads_used > 1
            && log.queued_blocks as usize >= BATCH_ENTRIES_MAX
            // A head more is room that is not free: only as long as there is plenty.
            && log.free.len() > 2 * log.free_wanted();
        if !stripes {
            // The one more is filled first, so that it is gone soon.
            return match open(STRIPED_HEAD) {
                Some(_) => STRIPED_HEAD,
                None => 0,
            };
        }
        match (open(here), open(there)) {
            // What is slow gets no more for being open.
            (Some(_), Some(next)) if self.is_on_slow(next) => here,
            _ => there,
        }
    }

    /// Takes a free segment as a head.
    fn open_head(&mut self, at: usize) -> bool {
        let Some(seg) = self.take_free() else {
            return false;
        };
        let seq = self.log.next_segment_seq;
        self.log.next_segment_seq += 1;
        let s = &mut self.log.segments[seg as usize];
        s.state = SegState::Open;
        s.seq = seq;
        debug_assert!(s.live == 0 && s.pins == 0);
        let first_batch = self.log.next_batch_seq;
        (s.first_batch, s.last_batch, s.eviction) = (first_batch, 0, 0);
        s.clean_from = None;
        self.out.tell(FlashEvent::Opened { seg });
        // The cleaner knows two kinds of segments, and these are of one.
        self.cleaner
            .open(seg, if at == STRIPED_HEAD { 0 } else { at });
        self.note_changed(seg);
        self.log.heads[at] = Some(Head {
            seg,
            seq,
            next: 0,
            entries: Vec::new(),
            marks: Vec::new(),
            first_batch,
        });
        true
    }

    /// Closes all heads.
    pub fn roll(&mut self) {
        for at in 0..self.log.heads.len() {
            self.roll_one(at);
        }
    }

    /// Closes a head: it gets its summary once its last batch is on flash.
    pub fn roll_one(&mut self, at: usize) {
        // Who voids what a disk has on flash closes the heads, and there may be none.
        let Some(head) = self.log.heads[at].take() else {
            return;
        };
        self.log.segments[head.seg as usize].state = SegState::Closed;
        self.log.enlist(head.seg);
        self.counters.segments_sealed += 1;
        // On failed flash its last batches may never have been applied.
        if head.entries.is_empty() || !self.takes_writes() {
            return;
        }
        // The summary is an operation on the segment: keep it from being freed before.
        self.log.segments[head.seg as usize].pins += 1;
        let last_batch = head.last_batch();
        self.log.segments[head.seg as usize].last_batch = last_batch;
        self.log.sealing.push(Sealing {
            seg: head.seg,
            seq: head.seq,
            entries: head.entries,
            marks: head.marks,
            first_batch: head.first_batch,
            last_batch,
        });
        self.write_summaries();
    }

    fn send(&mut self, to: usize, items: Vec<Item<U::Token>>) {
        let durable_seq = match self.faults.has(Fault::ClaimUndurable) {
            true => self.log.applied_seq,
            false => self.log.durable_seq,
        };
        let segment_slots = self.log.segment_slots;
        let half = self.log.half;
        let dirty_once = self.faults.has(Fault::DirtyOnce);
        self.log.last_head = to;
        if to == 0 || to == STRIPED_HEAD {
            self.log.last_main = to;
        }
        let head = self.log.heads[to].as_mut();
        let head = head.expect("what is sent was fitted into the head");
        let seq = self.log.next_batch_seq;
        self.log.next_batch_seq += 1;
        let mut entries: SmallVec<[Entry; 32]> = SmallVec::new();
        let mut bufs: SmallVec<[BufSlice; 2]> = SmallVec::new();
        let descriptor = Buf::zeroed(BLOCK as usize);
        bufs.push(descriptor.all());
        let mut sides = Sides::new(&descriptor, head.next, dirty_once);
        let mut blocks = 0u32;
        let mut payload = 0u64;
        let mut moved = 0u64;
        for item in &items {
            if item.kind.is_data() {
                debug_assert!(
                    item.data
                        .as_ref()
                        .is_none_or(|d| d.len() == item.count as usize * 4096)
                );
                let base = head.seg * segment_slots;
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
                if item.token.is_move() {
                    moved += u64::from(item.count);
                } else {
                    payload += u64::from(item.count);
                }
                if half > 0 {
                    sides.put(
                        item.kind == Kind::Dirty,
                        item.slot - base,
                        half,
                        item.count,
                        item.data.as_ref(),
                    );
                } else if let Some(data) = &item.data {
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
            pool_tag: self.pool_tag,
            segment_seq: head.seq,
            batch_seq: seq,
            bound_seq: 0,
            durable_seq,
            epoch: self.log.epoch,
            data_blocks: blocks as u16,
            flags: match std::mem::take(&mut self.log.again) {
                true => {
                    self.log.again_seq = seq;
                    BATCH_AGAIN
                }
                false => 0,
            },
        };
        let mut window = descriptor.all();
        let encoded = header.encode(&entries, window.bytes_mut());
        encoded.expect("a batch is taken within its bounds");
        let at = head.next;
        let rows = header.rows(at, half, &entries);
        head.next += 1 + rows;
        head.entries.extend_from_slice(&entries);
        head.marks.push(BatchMark {
            seq,
            entries: entries.len() as u16,
        });
        let seg = head.seg;
        let offset = self.layout.segment_offset(seg) + u64::from(at) * BLOCK;
        let last_ord = items.last().map_or(0, |i| i.ord);
        // A split item's first part must not make its last part count as applied, nor what was passed over what passed it.
        let partial = self.log.queue.iter().any(|f| f.ord == last_ord);
        let counts = match self.log.queue.front() {
            Some(f) if !(partial && self.faults.has(Fault::SplitCountsEarly)) => f.ord - 1,
            Some(_) => last_ord,
            None => self.log.next_ord,
        };
        if partial {
            took(Path::ItemSplit);
        }
        self.log.segments[seg as usize].batches += 1;
        self.touched[seg as usize] += 1;
        let bytes = u64::from(1 + rows) * BLOCK;
        self.log.batches.push_back(Batch {
            seq,
            seg,
            items,
            bytes,
            state: BatchState::InFlight,
            last_ord: counts,
            again: 0,
        });
        self.counters.batches += 1;
        self.counters.flash_payload_bytes += payload * BLOCK;
        self.counters.flash_reinsert_bytes += moved * BLOCK;
        let io = match half {
            0 => Io::write(self.target(), offset, bufs),
            _ => {
                let [first, second] = sides.bufs;
                Io {
                    second: Some(second),
                    ..Io::write(self.target(), offset, first)
                }
            }
        };
        debug_assert!(io.len == bytes || half > 0);
        self.out.send(FlashOp::Batch { seq }, io);
    }

    /// A batch was written, or was not. What counts now is taken with [`take_applied`](Self::take_applied),
    /// and then [`go_on`](Self::go_on) sends what may follow.
    pub fn batch_ended(&mut self, seq: u64, result: &Result<(), IoError>) {
        let batch = self.log.batches.iter_mut().find(|b| b.seq == seq);
        let Some(batch) = batch else {
            // What was in flight when the device was given up has gone other ways.
            assert!(
                !self.takes_writes(),
                "batch {seq} ended, and was not in flight"
            );
            return;
        };
        self.touched[batch.seg as usize] += 1;
        batch.state = if result.is_ok() {
            BatchState::Written
        } else {
            BatchState::Failed
        };
        if let Err(e) = result {
            self.counters.flash_errors += 1;
            self.note_refusal(e);
        }
    }

    /// The next batch that is on flash with all before it. It counts as applied: whoever takes it maps
    /// its blocks and tells those who wait before anything else happens.
    pub fn take_applied(&mut self) -> Option<Batch<U::Token>> {
        let written = |b: &Batch<U::Token>| b.state == BatchState::Written;
        let at = match self.faults.has(Fault::ApplyOutOfOrder) {
            true => self.log.batches.iter().position(written)?,
            false => 0,
        };
        if !self.log.batches.get(at).is_some_and(written) {
            return None;
        }
        let batch = self.log.batches.remove(at)?;
        self.log.failures = 0;
        self.full = false;
        self.log.segments[batch.seg as usize].batches -= 1;
        self.log.applied_seq = batch.seq;
        self.log.applied_ord = self.log.applied_ord.max(batch.last_ord);
        for item in &batch.items {
            match item.kind {
                Kind::Clean | Kind::Dirty => {
                    for _ in 0..item.count {
                        let dirty = item.kind == Kind::Dirty;
                        self.cleaner.append(batch.seg, item.why, dirty);
                    }
                }
                Kind::ZeroRun => {
                    let end = item.block + u64::from(item.count);
                    self.log.zeros.add(batch.seg, item.disk, item.block, end);
                }
                _ => {}
            }
        }
        Some(batch)
    }

    /// Batches of `bytes` have been applied, others perhaps have failed: does what follows from that.
    pub fn go_on(&mut self, bytes: u64, now: u64) {
        if self
            .log
            .batches
            .iter()
            .any(|b| b.state == BatchState::Failed)
        {
            self.retry_failed(now);
        }
        self.write_summaries();
        if !self.waiters.is_empty() {
            self.flush(now);
        }
        self.flush_if_much(bytes, now);
    }

    /// Writes the summary of closed segments whose batches are all on flash. Not before: that would break
    /// nothing, for a start looks at the batches themselves of a summary that reaches past what is durable,
    /// but it would cost that look.
    pub fn write_summaries(&mut self) {
        while let Some(at) = self
            .log
            .sealing
            .iter()
            .position(|s| s.last_batch <= self.log.applied_seq)
        {
            let s = self.log.sealing.swap_remove(at);
            self.cleaner.close(s.seg);
            if self.is_on_emptying(s.seg) {
                // It goes with the others there.
                self.cleaner.withdraw(s.seg);
            }
            self.leave_alone(s.seg);
            self.touched[s.seg as usize] += 1;
            let bytes = self.encode_summary(&s).expect(FITS);
            let mut buf = Buf::zeroed(bytes.len()).slice(0, bytes.len());
            buf.bytes_mut().copy_from_slice(&bytes);
            let offset = self.layout.summary_offset(s.seg);
            if s.last_batch > self.log.durable_seq && self.has_heads() {
                self.log.sealed.push((s.seg, s.marks));
            }
            let io = Io::write(self.target(), offset, [buf]).in_background();
            self.out.send(FlashOp::Summary { seg: s.seg }, io);
        }
    }

    /// A summary was written; failing is no harm, the batches themselves tell.
    pub fn summary_ended(&mut self, seg: u32, result: &Result<(), IoError>) {
        self.unpin(seg);
        self.touched[seg as usize] += 1;
        self.counters.flash_errors += u64::from(result.is_err());
    }

    /// A summary as whole blocks. Fails only for one that is made of what was found on flash.
    pub fn encode_summary(&self, s: &Sealing) -> Result<Vec<u8>, FormatError> {
        let claims_itself = self.faults.has(Fault::SummaryClaimsItself);
        let header = SummaryHeader {
            pool_tag: self.pool_tag,
            segment_seq: s.seq,
            first_batch_seq: s.first_batch,
            last_batch_seq: s.last_batch,
            bound_seq: 0,
            durable_seq: match claims_itself {
                true => s.last_batch,
                false => self.log.durable_seq,
            },
            epoch: self.log.epoch,
            entry_count: s.entries.len() as u32,
        };
        let mut bytes = Vec::new();
        header.encode(&s.entries, &s.marks, &mut bytes)?;
        // Earlier builds left no room for the batches, and behind the summary the next segment begins.
        if bytes.len() > self.layout.summary_bytes() {
            header.encode(&s.entries, &[], &mut bytes)?;
        }
        bytes.resize(
            bytes
                .len()
                .next_multiple_of(BLOCK as usize)
                .max(BLOCK as usize),
            0,
        );
        Ok(bytes)
    }

    /// A segment of the log holds nothing any more that counts once what was appended up to `ord` is durable:
    /// it comes free with the next map after that.
    pub fn free_segment(&mut self, seg: u32, ord: u64) {
        self.log.order.retain(|s| *s != seg);
        self.log.aside.remove(&seg);
        self.cleaner.free(seg);
        self.log.segments[seg as usize].state = SegState::Freeing { ord };
        self.log.freeing.push(seg);
        self.note_changed(seg);
        self.log.urgent = true;
        let forgets = self.faults.has(Fault::EmptyForgetsFlush) && self.is_on_emptying(seg);
        if self.faults.has(Fault::ReuseEarly) || forgets {
            self.release(seg);
        }
    }

    /// Gives a freed segment back, trimming it first if wanted.
    pub fn release(&mut self, seg: u32) {
        // A deliberate fault has released it before.
        if !matches!(
            self.log.segments[seg as usize].state,
            SegState::Freeing { .. }
        ) {
            return;
        }
        self.counters.segments_freed += 1;
        self.log.zeros.forget(seg);
        if !self.trim {
            self.trim_ended(seg);
            return;
        }
        self.log.segments[seg as usize].state = SegState::Trimming;
        self.touched[seg as usize] += 1;
        let bytes = u64::from(self.layout.segment_blocks) * BLOCK;
        let offset = self.layout.segment_offset(seg);
        let io = Io::range(self.target(), OpKind::Discard, offset, bytes);
        self.out.send(FlashOp::Trim { seg }, io.in_background());
    }

    /// A trim ended; failing is no harm.
    pub fn trim_ended(&mut self, seg: u32) {
        self.touched[seg as usize] += 1;
        self.log.freeing.retain(|s| *s != seg);
        if self.is_on_emptying(seg) {
            return self.put_aside(seg);
        }
        self.log.segments[seg as usize].state = SegState::Free;
        self.put_free(seg);
    }
}

/// What each half of a segment gets of a batch.
struct Sides {
    bufs: [SmallVec<[BufSlice; 2]>; 2],
    /// Block of the half behind that.
    next: [u32; 2],
    dirty_once: bool,
}

impl Sides {
    /// The descriptor, which is block `at`.
    fn new(descriptor: &Buf, at: u32, dirty_once: bool) -> Sides {
        Sides {
            bufs: [(); 2].map(|()| [descriptor.all()].into_iter().collect()),
            next: [at + 1; 2],
            dirty_once,
        }
    }

    /// A run that has its place in slots of the segment from `slot` on: what is dirty in both halves.
    fn put(&mut self, dirty: bool, slot: u32, half: u32, count: u32, data: Option<&BufSlice>) {
        let (side, row) = ((slot / half) as usize, slot % half);
        for n in 0..2 {
            if n != side && !dirty {
                continue;
            }
            let lost = self.dirty_once && n != side;
            // A block of the half that was behind is left out.
            let gap = row.saturating_sub(self.next[n]) + if lost { count } else { 0 };
            if gap > 0 {
                self.bufs[n].push(Buf::zeroed(gap as usize * BLOCK as usize).all());
            }
            self.next[n] = row + count;
            let Some(data) = data.filter(|_| !lost) else {
                continue;
            };
            match self.bufs[n].last_mut() {
                Some(last) if last.adjoins(data) => last.extend(data.len()),
                _ => self.bufs[n].push(data.clone()),
            }
        }
    }
}

/// Items of batches in flight and of the queue, oldest first, to be sent again.
pub(crate) fn unsent<T: Token>(log: &mut Log<T>) -> Vec<Item<T>> {
    let mut items = Vec::new();
    for batch in log.batches.drain(..) {
        log.segments[batch.seg as usize].batches -= 1;
        items.extend(batch.items);
    }
    items.extend(log.queue.drain(..));
    items
}
