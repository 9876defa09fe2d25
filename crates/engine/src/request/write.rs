//! Writes: to flash (write-back) or to the origin (all other modes).
//!
//! Write-back, in order: (1) hold the range, cancel fills of it; (2) read what partial blocks
//! lack; (3) append to the log; (4) when the batch and all before it are on flash, map the
//! blocks, then answer. Answering before (4) would let a crash of the daemon lose a write the
//! guest believes done, although the device never lost power.
//!
//! Past the cache, in order: (1) hold the range, cancel fills; (2) wait until nothing in it is
//! newer on flash than on the origin, durably, or the older dirty copy would be destaged over
//! the new data after a crash (invariant 5); (3) record the intent, durably, or a crash would
//! leave the old copy on flash being served (invariant 3); (4) write the origin; (5) unmap the
//! old copy and append the new one or a record that it is void; (6) answer. The intent stays
//! until (5) is on flash and the origin was flushed.

use crate::api::{DiskId, Effects, Mode, ReqError, ReqOp, Request};
use crate::cache::index::Key;
use crate::cache::stage::policy_key;
use crate::core::apply::{Apply, Purpose, Then};
use crate::core::route::FlashWaiter;
use crate::core::{Core, OpCtx, req_error};
use crate::ctx::Io;
use crate::disk::Disk;
use crate::disk::spans::Span;
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::flash::log::Item;
use crate::ids::ReqId;
use crate::origin::sync::SyncWaiter;
use crate::paths::{Path, took};
use crate::request::answer::{Answer, Asker};
use crate::request::read::CleanCopy;
use crate::request::state::Step;
use hearth_format::Kind;
use hearth_io::checksum::crc32c;
use hearth_io::{Buf, BufSlice, IoDone, OpKind, Target};
use hearth_policy::cleaning::{PROBATION_PERCENT, Why};
use hearth_policy::{Stay, Use};
use smallvec::SmallVec;

/// Blocks appended as one item at most, so that a large write fits a small pool piecewise.
const APPEND_MAX: u64 = 128;
/// From this length on a write's places in the index are fetched into the CPU's cache together.
pub(crate) const FETCH_BLOCKS: u64 = 4;

/// Of the room for dirty blocks one part in so many is divided among the disks; the rest is for whoever
/// comes first. Without it one origin that takes no writes would in the end stop those of all disks.
const OWN_SHARE: u64 = 10;

/// How far a stalled write got.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    /// All of it is in the queue, or it took another way.
    All,
    /// Its disk has as many dirty blocks as it may have now.
    TooDirty,
    /// The disk's origin must have more of what came before: nothing that others do helps.
    InOrder,
    /// It would leave more runs of zeros than may be (see [`crate::request::zero`]).
    TooManyRuns,
    /// The log has no room for anybody.
    NoRoom,
}

/// Share of flash, in percent, that may always be dirty. Smaller than the share of blocks on probation, so that some of
/// these are clean and can be freed.
const DIRTY_HIGH_LEAST: u32 = PROBATION_PERCENT as u32 - 5;
/// A write of an origin nobody has read yet may have waited for so many others.
const QUEUED_WRITES: u64 = 4;

/// Why a write has memory: without it, it is refused.
const HAS_DATA: &str = "a write came with its data";

impl Core {
    /// Blocks a request touches.
    pub fn blocks_of(&self, id: ReqId) -> (u64, u64) {
        self.reqs[id].blocks()
    }

    /// The blocks a request touches, as its own.
    fn span_of(&self, req: ReqId) -> Span {
        let (start, end) = self.blocks_of(req);
        Span { start, end, req }
    }

    /// Takes the request's range or queues behind whoever has it, or waits for it longer.
    pub fn lock_or_wait(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let span = self.span_of(id);
        let unheld = self.opts.faults.has(Fault::SkipRangeLock);
        let behind = self.disk(disk).filter(|_| !unheld).map_or(0, |d| {
            let (held, waiting) = (&d.locks, &d.lock_queue);
            let held = held.meeting(span.start, span.end);
            held.chain(waiting.meeting(span.start, span.end)).count()
        });
        if behind == 0 {
            return self.acquire(id, now, fx);
        }
        self.reqs.next_turn += 1;
        let turn = self.reqs.next_turn;
        // It ends as it began, whatever mode the disk gets meanwhile: that it may become dirty was noted for those
        // alone that came to be written back.
        let through = !self.known(disk).writes_to_flash();
        let write = self.reqs[id].write_mut();
        (write.step, write.through) = (Step::WaitsForRange { behind, turn }, through);
        let d = self.known_mut(disk);
        d.lock_queue.insert(span);
    }

    fn acquire(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let span = self.span_of(id);
        let (start, end) = (span.start, span.end);
        let raced = self.opts.faults.has(Fault::CacheRacedMiss);
        if matches!(self.reqs[id].op, ReqOp::Write { .. }) && !self.reqs[id].keeps {
            self.count_write(id, disk);
        }
        if !self.opts.faults.has(Fault::StageForgetsNot) {
            self.stage_forget(disk, start, end);
        }
        let d = self.known_mut(disk);
        d.locks.insert(span);
        let appended = !raced && d.cancel_fills(start, end);
        let write = self.reqs[id].write_mut();
        write.step = Step::Holds;
        write.fills_appended = appended;
        self.begin_write(id, now, fx);
    }

    /// Gives a range back. Who waited for nobody else may take its own:
    /// [`wake_locks`](Self::wake_locks) lets it in.
    pub fn unlock(&mut self, id: ReqId) {
        let span = self.span_of(id);
        let disk = self.reqs[id].disk;
        let d = self.disks[disk as usize].as_deref_mut();
        let d = d.expect("a disk stays while a request holds a range of it");
        assert!(d.locks.remove(span), "{id:?} did not hold its range");
        if !self.flash.takes_writes() {
            // What it held may be destaged now.
            self.ready.touch(disk);
        }
        // All of them came after: who came before and had not ended would have kept this one waiting.
        for waiting in d.lock_queue.meeting(span.start, span.end) {
            if let Some(turn) = self.reqs[waiting.req].write_mut().one_less_in_front() {
                d.unlocked.insert((turn, waiting.req));
            }
        }
    }

    /// A range was given back: let in who waited for it, in order.
    ///
    /// What is let in may end at once and give its range back, which comes here again. Only the
    /// outermost call goes on, or thousands of queued requests would be as many stack frames.
    pub fn wake_locks(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        if std::mem::replace(&mut self.known_mut(disk).waking_locks, true) {
            return;
        }
        while let Some(id) = self.next_unlocked(disk) {
            self.acquire(id, now, fx);
        }
        let d = self.known_mut(disk);
        d.waking_locks = false;
    }

    /// Takes the first request out of the queue whose range is free.
    fn next_unlocked(&mut self, disk: DiskId) -> Option<ReqId> {
        let (_, id) = self.known_mut(disk).unlocked.pop_first()?;
        let span = self.span_of(id);
        let waited = self.known_mut(disk).lock_queue.remove(span);
        assert!(waited, "{id:?} is let in, and did not wait");
        Some(id)
    }

    fn begin_write(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let r = &self.reqs[id];
        let (disk, offset, len) = (r.disk, r.offset, r.len);
        let d = self.known(disk);
        let zeros = !matches!(self.reqs[id].op, ReqOp::Write { .. });
        let came_through = self.reqs[id].write().through;
        let past = (zeros || came_through) && d.order.is_some();
        // What one device alone would have is in the origin first, unless that would break its order.
        let single = self.flash.is_single() && d.has_origin() && d.order.is_none();
        let through =
            !self.flash.takes_writes() || !d.writes_to_flash() || came_through || past || single;
        let (size, align) = (d.cfg.size, u64::from(d.cfg.origin_align).clamp(1, 4096));
        self.reqs[id].write_mut().through = through;
        if self.reqs[id].keeps {
            return self.begin_keep(id, now, fx);
        }
        if past {
            self.line_up_behind_order(id);
        }
        if zeros {
            self.begin_zero(id, now, fx);
            return;
        }
        let end = offset + len;
        let unit = if through { align } else { 4096 };
        let head = offset % unit != 0;
        let tail = end % unit != 0 && end != size;
        if head || tail {
            self.merge_edges(id, now, fx);
        } else if through {
            self.go_through(id, now, fx);
        } else {
            self.append_or_stall(id, now, fx);
        }
    }

    /// Counts a write and reports it to the policy, before the replaced blocks leave RAM.
    fn count_write(&mut self, id: ReqId, disk: DiskId) {
        let (start, end) = self.blocks_of(id);
        if end - start >= FETCH_BLOCKS {
            (start..end).for_each(|b| self.cache.index.prefetch(Key::new(disk, b)));
        }
        let mut cached = 0;
        let queued = self.is_any_queued(disk, start, end - start);
        for block in start..end {
            let staged = self.cache.stage.get(policy_key(disk, block));
            // No request has used a block that was read ahead.
            let staged = staged.filter(|(_, stay)| stay.unused.is_none());
            let was_used = staged.is_some_and(|(_, stay)| stay.freq > 0);
            self.reqs[id].write_mut().was_used |= was_used;
            let hit = staged.is_some() || self.is_filled(disk, block, queued);
            cached += u64::from(hit);
            let how = if hit { Use::Hit } else { Use::Miss };
            self.cache.policy.used(policy_key(disk, block), true, how);
        }
        self.reqs[id].missed = cached < end - start;
        let d = self.known_mut(disk);
        match cached {
            0 => d.counters.write_misses += 1,
            n if n == end - start => d.counters.write_hits += 1,
            _ => d.counters.write_partial_hits += 1,
        }
    }

    /// Reads the blocks a write covers only partly; [`merged`](Self::merged) goes on.
    pub fn merge_edges(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let r = &self.reqs[id];
        let (disk, offset, end) = (r.disk, r.offset, r.offset + r.len);
        let size = self.known(disk).cfg.size;
        let mut edges: SmallVec<[u64; 2]> = SmallVec::new();
        if offset % 4096 != 0 {
            edges.push(offset / 4096);
        }
        if end % 4096 != 0 && end != size && edges.last() != Some(&(end / 4096)) {
            edges.push(end / 4096);
        }
        let pending = edges.len() as u32;
        self.reqs[id].write_mut().step = Step::Merges { pending };
        if edges.is_empty() {
            self.merge_complete(id, now, fx);
        }
        for block in edges {
            let len = (size - block * 4096).min(4096);
            let r = Request::read(0, disk, block * 4096, len, &Buf::zeroed(4096), now);
            self.start(r, Asker::Request(id), now, fx);
        }
    }

    /// One edge block has been read.
    pub fn merged(
        &mut self,
        id: ReqId,
        (block, old): (u64, Option<BufSlice>),
        result: Result<(), ReqError>,
        now: u64,
        fx: &mut Effects,
    ) {
        let req = &mut self.reqs[id];
        let complete = req.write_mut().edge_read();
        match (result, old) {
            (Ok(()), Some(old)) => {
                let (start, end) = (req.offset, req.offset + req.len);
                // Bytes of the edge block the write covers.
                let from = start.saturating_sub(block * 4096).min(4096) as usize;
                let to = (end - block * 4096).min(4096) as usize;
                if let Some(buf) = req.buf.as_mut() {
                    let at = ((block - start / 4096) * 4096) as usize;
                    let bytes = &mut buf.bytes_mut()[at..at + 4096];
                    bytes[..from].copy_from_slice(&old.bytes()[..from]);
                    bytes[to..].copy_from_slice(&old.bytes()[to..]);
                } else {
                    let mut whole = old;
                    whole.bytes_mut()[from..to].fill(0);
                    req.write_mut().edges.push((block, whole));
                }
            }
            (Err(e), _) => req.failed = Some(e),
            (Ok(()), None) => unreachable!("a read comes back with its memory"),
        }
        if complete {
            self.merge_complete(id, now, fx);
        }
    }

    fn merge_complete(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        self.reqs[id].write_mut().merged = true;
        if self.reqs[id].failed.is_some() {
            self.finish(id, now, fx);
        } else if !matches!(self.reqs[id].op, ReqOp::Write { .. }) {
            self.zero_with_edges(id, now, fx);
        } else {
            self.reqs[id].crcs.clear();
            // Whole blocks from here on.
            if self.reqs[id].write().through || !self.flash.takes_writes() {
                self.go_through(id, now, fx);
            } else {
                self.append_or_stall(id, now, fx);
            }
        }
    }

    pub fn append_or_stall(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        if self.fenced(self.reqs[id].disk) {
            return self.give_up(id, now, fx);
        }
        self.reqs[id].write_mut().stalls(false);
        let disk = self.reqs[id].disk;
        // Behind its like; past another disk's dirty blocks and what adds runs of zeros, but not past who
        // waits for the log.
        let queues = self.reqs.log_full
            || self.reqs.stalled.iter().any(|&other| {
                let other = &self.reqs[other];
                let for_runs = matches!(
                    other.write().step,
                    Step::WaitsForRoom { for_runs: true, .. }
                );
                other.disk == disk && !for_runs
            });
        if queues {
            self.reqs.stalled.push_back(id);
            return;
        }
        let appended = self.append_some(id, now, fx);
        if appended != Appended::All {
            self.reqs.stalled.push_back(id);
            self.reqs.wants_room |= appended != Appended::InOrder;
        }
    }

    /// Appends as much of a write-back request as there is room for.
    fn append_some(&mut self, id: ReqId, now: u64, fx: &mut Effects) -> Appended {
        let disk = self.reqs[id].disk;
        let (start, end) = self.blocks_of(id);
        if !self.flash.takes_writes() {
            // What had waited when it failed has been diverted, and no part of this was sent since.
            self.divert(id, now, fx);
            return Appended::All;
        }
        if !matches!(self.reqs[id].op, ReqOp::Write { .. }) {
            return self.append_zeros(id);
        }
        let for_runs = self.waits_for_runs(disk, start, end, false);
        self.reqs[id].write_mut().stalls(for_runs);
        if for_runs {
            return Appended::TooManyRuns;
        }
        loop {
            let done = self.reqs[id].write().appended;
            let left = end - start - done;
            if left == 0 {
                self.reqs[id].write_mut().all_queued();
                if self.opts.faults.has(Fault::AckEarly) {
                    self.ack_early(id, fx);
                }
                return Appended::All;
            }
            if self.order_waits(disk, now) {
                return Appended::InOrder;
            }
            let n = self.may_dirty(disk, left.min(APPEND_MAX));
            if n == 0 {
                return Appended::TooDirty;
            }
            if u64::from(self.flash.log.room()) < n + 1 {
                self.reqs.log_full = true;
                return Appended::NoRoom;
            }
            self.flash.room_was_got();
            self.note_let_in(disk, n, now);
            let req = &mut self.reqs[id];
            let buf = req.buf.as_ref().expect(HAS_DATA);
            let mut data = buf.sub((done * 4096) as usize, (n * 4096) as usize);
            let mut crcs: SmallVec<[u32; 4]> = req
                .crcs
                .get(done as usize..(done + n) as usize)
                .map(SmallVec::from_slice)
                .unwrap_or_default();
            if crcs.is_empty() {
                // Past the disk's end is nothing; the cache keeps zeros there.
                let size = self.disks[disk as usize].as_ref().map_or(0, |d| d.cfg.size);
                let inside = (size - (start + done) * 4096).min(n * 4096) as usize;
                data.bytes_mut()[inside..].fill(0);
                crcs = data.bytes().chunks(4096).map(crc32c).collect();
            }
            req.write_mut().queued(n);
            self.push_dirty(disk, start + done, data, crcs, id);
        }
    }

    /// How many of `want` more dirty blocks the disk may have now, 0 if it has to wait.
    fn may_dirty(&self, disk: DiskId, want: u64) -> u64 {
        if self.disk(disk).is_some_and(|d| d.is_promised()) {
            // Its blocks were promised when it was made, and all else stays out of that.
            return want;
        }
        let limit = self.dirty_room(self.dirty_high_percent());
        // Where most of flash takes no writes, a request may be larger than all that may be dirty.
        let want = want.min((limit / 2).max(1));
        // What is on its way may all become dirty; a batch's length counts its descriptor too.
        let coming = u64::from(self.flash.log.queued_blocks)
            + self
                .flash
                .log
                .batches
                .iter()
                .map(|b| b.bytes / 4096)
                .sum::<u64>();
        let left = limit.saturating_sub(self.dirty_total + coming);
        let kept = limit / OWN_SHARE;
        if left >= want + kept {
            return want;
        }
        let disks = self.totals.write_back;
        if disks <= 1 {
            return if left >= want { want } else { 0 };
        }
        let own = kept / disks;
        if left >= want + own * disks {
            return want;
        }
        let dirty = self.disk(disk).map_or(0, |d| d.dirty.len());
        want.min(own.saturating_sub(dirty + coming)).min(left)
    }

    /// Share of flash, in percent, above which write-back writes wait. Dirty blocks cannot be freed: with a larger share
    /// than the blocks on probation have, a restore would displace the hot set.
    pub fn dirty_high_percent(&self) -> u32 {
        let most = self.opts.dirty_high_percent;
        let left = 100 - self.flash.cleaner.kept_percent() as u32;
        left.max(DIRTY_HIGH_LEAST).min(most)
    }

    /// Blocks that may be dirty and wait for their origins, where so many in a hundred of flash may: what is
    /// promised to disks that live on flash is taken from that, but not all of it.
    pub fn dirty_room(&self, percent: u32) -> u64 {
        self.dirty_room_of(self.dirty_capacity_blocks(), percent)
    }

    /// The same of a flash with so many blocks for that.
    pub fn dirty_room_of(&self, capacity: u64, percent: u32) -> u64 {
        let all = capacity * u64::from(percent) / 100;
        let kept = self.totals.kept_blocks;
        all.saturating_sub(kept).max(all / 4)
    }

    /// Appends client data; the request counts down when it is applied.
    pub fn push_dirty(
        &mut self,
        disk: DiskId,
        block: u64,
        data: BufSlice,
        crcs: SmallVec<[u32; 4]>,
        id: ReqId,
    ) {
        let token = Purpose {
            apply: Apply::Dirty,
            then: Then::Request(id),
        };
        let why = Why::Written { hot: false };
        self.flash
            .log
            .push(Item::data(Kind::Dirty, disk, block, data, crcs, why, token));
    }

    /// Blocks of flash that can hold data: all but what is kept free, and the head.
    pub fn capacity_blocks(&self) -> u64 {
        self.flash.cleaner.plan().most
    }

    /// The same if all of them are dirty: what is in both halves of a segment takes the room of two.
    pub fn dirty_capacity_blocks(&self) -> u64 {
        self.capacity_blocks() / self.flash.log.copies_of_dirty()
    }

    /// Room may have come free: go on with writes that waited for it, in order but for those whose
    /// disk is too dirty.
    pub fn wake_stalled(&mut self, now: u64, fx: &mut Effects) {
        self.wake_stalled_through(now, fx);
        self.reqs.log_full = false;
        self.reqs.wants_room = false;
        let mut too_dirty: SmallVec<[DiskId; 4]> = SmallVec::new();
        let mut at = 0;
        while let Some(id) = self.reqs.stalled.get(at).copied() {
            let disk = self.reqs[id].disk;
            if too_dirty.contains(&disk) {
                at += 1;
                continue;
            }
            // It may end at once and let others in, who look through the queue.
            self.reqs.stalled.remove(at);
            let appended = self.append_some(id, now, fx);
            self.reqs.wants_room |= !matches!(appended, Appended::All | Appended::InOrder);
            match appended {
                Appended::All => {}
                Appended::TooManyRuns => {
                    self.reqs.stalled.insert(at, id);
                    at += 1;
                }
                Appended::TooDirty | Appended::InOrder => {
                    self.reqs.stalled.insert(at, id);
                    if self.totals.known <= 1 {
                        return;
                    }
                    too_dirty.push(disk);
                    at += 1;
                }
                Appended::NoRoom => {
                    self.reqs.stalled.insert(at, id);
                    return;
                }
            }
        }
    }

    /// May a write past the cache add a record to the log? One that cannot leave any may.
    fn has_record_room(&self, disk: DiskId) -> bool {
        self.leaves_flash_alone(disk) || self.flash.log.room() >= crate::request::zero::ROOM_MIN
    }

    /// Nothing of the disk is on flash, nor on its way there, nor can a crash bring anything back:
    /// nothing can become stale.
    pub fn leaves_flash_alone(&self, disk: DiskId) -> bool {
        if self.disk(disk).is_some_and(Disk::is_log_free) {
            return true;
        }
        let Some(d) = self.disk(disk).filter(|d| d.is_off_without_copies()) else {
            return false;
        };
        (self.flash.is_durable(d.dropped_ord) || self.opts.faults.has(Fault::OffForgetsDropped))
            && (self.flash.has_gone(d.evicted) || self.opts.faults.has(Fault::OffForgetsEvicted))
    }

    /// Queues the record that says copies are void; returns its number.
    pub fn record_drop(&mut self, disk: DiskId, block: u64, count: u64) -> u64 {
        let ord = self
            .flash
            .record(Kind::DropRun, disk, block, count, Then::Nothing);
        let d = self.known_mut(disk);
        d.dropped_ord = ord;
        ord
    }

    /// The same for writes past the cache.
    fn wake_stalled_through(&mut self, now: u64, fx: &mut Effects) {
        // Each pass admits one or ends; `go_through` may put one back only for want of room.
        while let Some(id) = self.reqs.stalled_through.front().copied() {
            let disk = self.reqs[id].disk;
            if self.flash.takes_writes() && !self.has_record_room(disk) {
                return;
            }
            self.reqs.stalled_through.pop_front();
            self.go_through(id, now, fx);
        }
    }

    /// An item of a request is on flash and mapped.
    pub fn request_applied(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let req = &mut self.reqs[id];
        if !req.write_mut().applied() {
            return;
        }
        let fua = match req.op {
            ReqOp::Write { fua } | ReqOp::Discard { fua } | ReqOp::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        if fua && !self.opts.faults.has(Fault::FuaEndsNothing) {
            self.ends_epoch(self.reqs[id].disk);
        }
        let waits = fua && !self.known(self.reqs[id].disk).is_scratch();
        if waits && !self.opts.faults.has(Fault::IgnoreFua) {
            self.reqs[id].write_mut().step = Step::WaitsForFlash;
            let ord = self.flash.log.applied_ord;
            self.wait_flash(Until::Ord(ord), FlashWaiter::Request(id), now, fx);
        } else {
            self.finish(id, now, fx);
        }
    }

    /// The deliberate fault: answers although nothing is on flash yet.
    fn ack_early(&mut self, id: ReqId, fx: &mut Effects) {
        let told = Answer::to(Asker::Told);
        let answer = std::mem::replace(&mut self.reqs[id].answer, told);
        answer.client(Ok(()), None, fx);
    }

    /// Flash failed under a write-back request: the origin takes it.
    pub fn divert(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        took(Path::WriteDiverted);
        let write = self.reqs[id].write_mut();
        let here = matches!(
            write.step,
            Step::WaitsForRoom { .. } | Step::Appends { .. } | Step::WaitsForRecordRoom
        );
        assert!(
            here,
            "a write at {:?} is not on its way to flash",
            write.step
        );
        write.step = Step::Holds;
        write.through = true;
        let zero = !matches!(self.reqs[id].op, ReqOp::Write { .. });
        if zero {
            // Its edges went into the log that failed. They are read again, or the rest of those
            // blocks would be forgotten with the copies on flash.
            let write = self.reqs[id].write_mut();
            write.merged = false;
            write.edges.clear();
            self.begin_zero(id, now, fx)
        } else {
            self.go_through(id, now, fx)
        }
    }

    /// Past the cache, from step 2 of the module's list. Entered again after every wait.
    pub fn go_through(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let (start, end) = self.blocks_of(id);
        // A disk that lives on flash has no other place for what flash does not take.
        if self.fenced(disk) || !self.known(disk).has_origin() || self.reqs[id].keeps {
            self.reqs[id].failed = Some(ReqError::Io);
            self.finish(id, now, fx);
            return;
        }
        if self.flash.is_noting() {
            self.reqs[id].write_mut().step = Step::WaitsForClean;
            self.reqs.mark_waiters.push(id);
            return;
        }
        if self.flash.takes_writes()
            && self
                .disk(disk)
                .is_some_and(|d| d.lost.range(start, end).next().is_some())
        {
            self.supersede_lost(id, now, fx);
            return;
        }
        if !self.clean_or_wait(id, disk, start, end, now, fx) {
            return;
        }
        let admitted = self.reqs[id].regions().is_some() || !self.flash.takes_writes();
        if !admitted && !self.has_record_room(disk) {
            // What it leaves behind is at least a record, and a flood of records would eat the
            // reserve without which eviction cannot make room.
            self.reqs[id].write_mut().step = Step::WaitsForRecordRoom;
            self.reqs.stalled_through.push_back(id);
            return;
        }
        if !admitted {
            self.flash.room_was_got();
        }
        if !self.intent_or_wait(id, disk, start, end, now, fx) {
            return;
        }
        let r = &self.reqs[id];
        let (offset, len) = (r.offset, r.len);
        let d = self.known(disk);
        let partial =
            offset % 4096 != 0 || ((offset + len) % 4096 != 0 && offset + len != d.cfg.size);
        if !self.flash.takes_writes() && partial && !self.reqs[id].write().merged {
            // The rest of the block may be newer on flash than on the origin, and what is on
            // flash is forgotten once the origin has been written.
            self.merge_edges(id, now, fx);
            return;
        }
        let (align, size, whole) = (
            u64::from(d.cfg.origin_align).clamp(1, 4096),
            d.cfg.size,
            d.clip(start, end - start),
        );
        match self.reqs[id].op {
            ReqOp::Write { .. } => {
                let exact = !self.reqs[id].write().merged
                    && offset % align == 0
                    && ((offset + len) % align == 0 || offset + len == size);
                let (from, bytes) = if exact {
                    (offset, len)
                } else {
                    (start * 4096, whole)
                };
                let buf = self.reqs[id].buf.as_ref().expect(HAS_DATA);
                let piece = buf.sub((from - start * 4096) as usize, bytes as usize);
                self.reqs[id].write_mut().step = Step::WritesOrigin { pending: 1 };
                let io = Io::write(Target::Origin(disk), from, [piece]);
                self.io(fx, OpCtx::OriginWrite { req: id }, io);
            }
            op => self.zero_through(id, disk, op, align, size, now, fx),
        }
    }

    /// A dirty block in the range is lost, so it never becomes clean, and until this write is through
    /// it must go on failing, also after a crash. So the write takes its place on flash, whatever the mode, and
    /// is destaged like what a mode before this one left dirty.
    fn supersede_lost(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        took(Path::LossSuperseded);
        self.reqs[id].write_mut().through = false;
        let r = &self.reqs[id];
        let (offset, end) = (r.offset, r.offset + r.len);
        let size = self.disk(r.disk).map_or(0, |d| d.cfg.size);
        let partial = offset % 4096 != 0 || (end % 4096 != 0 && end != size);
        let write = matches!(r.op, ReqOp::Write { .. });
        let discard = matches!(r.op, ReqOp::Discard { .. });
        if partial && !discard && !self.reqs[id].write().merged {
            self.merge_edges(id, now, fx);
        } else if write {
            self.append_or_stall(id, now, fx);
        } else {
            self.zero_with_edges(id, now, fx);
        }
    }

    /// Step 4 for a discard or zeroing: the partial blocks at its ends as data, the rest as zeros.
    #[allow(clippy::too_many_arguments)]
    fn zero_through(
        &mut self,
        id: ReqId,
        disk: DiskId,
        op: ReqOp,
        align: u64,
        size: u64,
        now: u64,
        fx: &mut Effects,
    ) {
        let r = &self.reqs[id];
        let (offset, end) = (r.offset, r.offset + r.len);
        let edges = self.reqs[id].write().edges.clone();
        // With merged edges the zeros begin at whole blocks; a discard only shrinks.
        let unit = if edges.is_empty() { align } else { 4096 };
        let from = offset.next_multiple_of(unit);
        let to = if end == size { end } else { end / unit * unit };
        let middle = to > from;
        let pending = edges.len() as u32 + u32::from(middle);
        if pending == 0 {
            self.finish(id, now, fx);
            return;
        }
        self.reqs[id].write_mut().step = Step::WritesOrigin { pending };
        for (block, data) in edges {
            let len = (size - block * 4096).min(4096);
            let piece = data.sub(0, len as usize);
            let io = Io::write(Target::Origin(disk), block * 4096, [piece]);
            self.io(fx, OpCtx::OriginWrite { req: id }, io);
        }
        if middle {
            let punch = !matches!(op, ReqOp::WriteZeroes { punch: false, .. });
            let kind = OpKind::WriteZeroes { punch };
            let io = Io::range(Target::Origin(disk), kind, from, to - from);
            self.io(fx, OpCtx::OriginWrite { req: id }, io);
        }
    }

    /// Step 2. False: the request waits.
    fn clean_or_wait(
        &mut self,
        id: ReqId,
        disk: DiskId,
        start: u64,
        end: u64,
        now: u64,
        fx: &mut Effects,
    ) -> bool {
        if !self.flash.takes_writes() {
            // Nothing on flash counts any more, but a run on its way must not land after us.
            let Some(d) = self.disk_mut(disk).filter(|d| d.destaging(start, end)) else {
                return true;
            };
            d.clean_waiters.push(id);
            self.reqs[id].write_mut().step = Step::WaitsForClean;
            self.ready.await_clean(disk);
            return false;
        }
        // It would wait for ever for what is not to become clean.
        self.stop_holding(disk);
        let in_order = !self.waits_for_order(id, disk);
        if !in_order {
            took(Path::ZerosInOrder);
        }
        let durable = self.flash.log.durable_ord;
        let faults = self.opts.faults;
        let d = self.known_mut(disk);
        let dirty = d.range_dirty(start, end) && !faults.has(Fault::WritePastDirty)
            || d.destaging(start, end) && !faults.has(Fault::WritePastDestaging);
        if in_order
            && !dirty
            && (d.cleaned_ord <= durable
                || d.is_log_free()
                || faults.has(Fault::WritePastUndurablyClean))
        {
            return true;
        }
        let blocks: Vec<u64> = d.dirty.range(start, end).collect();
        for block in blocks {
            d.origin.destage.urgent.insert(block);
        }
        let cleaned = d.cleaned_ord;
        d.clean_waiters.push(id);
        self.reqs[id].write_mut().step = Step::WaitsForClean;
        self.ready.await_clean(disk);
        if !dirty && in_order {
            self.flash.log.urgent = true;
            self.wait_flash(Until::Ord(cleaned), FlashWaiter::Nobody, now, fx);
        }
        false
    }

    /// Blocks became clean, or the log durable: see who of the waiting writes can go on.
    pub fn wake_clean_waiters(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        // It may have been removed since it was put on the list.
        let Some(d) = self.disk_mut(disk) else { return };
        let waiting = std::mem::take(&mut d.clean_waiters);
        for id in waiting {
            self.go_through(id, now, fx);
        }
    }

    /// A block somebody waits for turned out to be lost: it never becomes clean, and the write takes
    /// its place instead ([`supersede_lost`](Self::supersede_lost)).
    pub fn wake_waiters_for_lost(&mut self, now: u64, fx: &mut Effects) {
        for disk in self.ready.awaited.take() {
            let Some(d) = self.disk(disk).filter(|d| !d.clean_waiters.is_empty()) else {
                continue;
            };
            let lost = !d.lost.is_empty();
            self.ready.await_clean(disk);
            if lost {
                self.wake_clean_waiters(disk, now, fx);
            }
        }
    }

    pub fn origin_write_done(&mut self, id: ReqId, done: IoDone, now: u64, fx: &mut Effects) {
        let disk = self.reqs[id].disk;
        let (start, end) = self.blocks_of(id);
        if let Err(e) = done.result {
            self.reqs[id].failed = Some(req_error(e));
        }
        if !self.reqs[id].write_mut().origin_written() {
            return;
        }
        let regions = self.reqs[id].regions();
        let unguarded = regions.is_none();
        self.ready.touch(disk);
        let single = self.flash.is_single();
        let d = self.known_mut(disk);
        let written = d.origin.wrote(regions);
        let mode = match d.cfg.mode {
            Mode::WriteBack if single => Mode::WriteThrough,
            mode => mode,
        };
        let op = self.reqs[id].op;
        let ok = self.reqs[id].failed.is_none();
        // Copies dropped by eviction are still on flash until their segment is overwritten.
        let evicting =
            self.flash.holds_evicted() && !self.opts.faults.has(Fault::ForgetEvictedCopies);
        // After flash failed the range may be dirty there, and what the origin refused replaces nothing.
        let replaced = ok || self.flash.takes_writes();
        let copies = match replaced && !self.opts.faults.has(Fault::KeepOverwritten) {
            true => self.forget_copies(disk, start, end),
            false => 0,
        };
        let cached = copies > 0;
        if !self.flash.takes_writes()
            && let Some(d) = self.disk_mut(disk)
            && (cached || !d.zero.is_empty())
        {
            d.origin.sync.supersedes();
        }
        let fills_appended = self.reqs[id].write().fills_appended
            && !self.opts.faults.has(Fault::ForgetCancelledFills);
        let had = cached || fills_appended || evicting && !unguarded;
        if !replaced {
            self.doubt_written(disk, start, end);
            // The origin may have got some of it.
            self.forget_clean(disk, start, end);
        } else if self.disk(disk).is_some_and(|d| !d.zero.is_empty()) {
            // Only after flash failed: the origin now holds what was written.
            self.change_zeros(disk, |zero| zero.remove_range(start, end));
        }
        // A copy that was still on its way to flash is one that was read.
        let read = cached || self.reqs[id].write().fills_appended;
        let renewed = ok
            && !unguarded
            && mode == Mode::WriteThrough
            && matches!(op, ReqOp::Write { .. })
            && self.renew(id, disk, start, end, read, &done);
        if mode == Mode::WriteThrough {
            // What is written now takes their place, at once or from the stage.
            self.flash.cleaner.rewrite(copies);
        }
        if had
            && !renewed
            && self.flash.takes_writes()
            && !self.opts.faults.has(Fault::SkipDropRecord)
        {
            self.record_drop(disk, start, end - start);
        }
        let fua = match op {
            ReqOp::Write { fua } | ReqOp::Discard { fua } | ReqOp::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        if ok && fua && !self.opts.faults.has(Fault::FuaLeavesOriginVolatile) {
            self.reqs[id].write_mut().step = Step::WaitsForOrigin;
            self.wait_origin(disk, written, SyncWaiter::Fua(id), now, fx);
        } else {
            self.finish(id, now, fx);
        }
    }

    /// Write-through: keeps what was written, in RAM at first or on flash. True if it was
    /// appended as the new clean copy, so that no record need say that the old one is void.
    fn renew(
        &mut self,
        id: ReqId,
        disk: DiskId,
        start: u64,
        end: u64,
        read: bool,
        done: &IoDone,
    ) -> bool {
        let (offset, bytes) = (done.op.offset, done.op.len);
        let filling = self.filling();
        let d = self.known_mut(disk);
        // Blocks of a restore or a copy are on probation, so that they do not displace the hot set.
        let stream = d.written.observe(offset, bytes);
        let cutoff = d.cfg.seq_cutoff;
        let is_long = !read && !filling && cutoff > 0 && stream > cutoff;
        let d = self.known(disk);
        let whole = offset == start * 4096 && (bytes % 4096 == 0 || offset + bytes == d.cfg.size);
        let count = end - start;
        let buf = self.reqs[id].buf.as_ref().expect(HAS_DATA);
        if !whole || !self.flash.takes_writes() || buf.is_shared() {
            return false;
        }
        // While flash fills, there is nothing to compete with. Of an origin as fast as flash, a block
        // nobody read is not worth that: an SSD that is both would write everything twice.
        let origin_ns = match d.origin.seek_ns {
            0 => done.latency_ns / QUEUED_WRITES,
            known => known,
        };
        // The block stays in RAM and is written to flash only if it is used.
        let ram_only = filling && !read && origin_ns < self.opts.fast_origin_ns;
        let mut data = buf.sub(0, (count * 4096) as usize);
        data.bytes_mut()[bytes as usize..].fill(0);
        // Whoever brought the request has summed it up, unless it was not of whole blocks.
        let mut crcs = self.reqs[id].crcs.clone();
        if crcs.len() as u64 != count || bytes % 4096 != 0 {
            crcs = data.bytes().chunks(4096).map(crc32c).collect();
        }
        let used = read || self.reqs[id].write().was_used;
        if (ram_only || !filling) && !is_long && count <= self.cache.stage.run_max() {
            let stay = Stay {
                freq: u8::from(used),
                covered: ram_only && !used,
                unused: None,
                written: true,
            };
            self.stage_put(disk, start, &data, &crcs, |_| stay);
            return false;
        }
        if ram_only {
            return false;
        }
        let room = u64::from(self.flash.log.room()) >= count * 2;
        if !room || !(read || self.deserves(disk, start, false, true)) {
            return false;
        }
        if !self.own_room(disk, count) {
            return false;
        }
        let copy = CleanCopy {
            data,
            crcs,
            written: true,
        };
        let why = match is_long {
            true => Why::Written { hot: false },
            false => Why::Filled,
        };
        self.append_clean(disk, start, copy, why, u8::from(used));
        true
    }
}
