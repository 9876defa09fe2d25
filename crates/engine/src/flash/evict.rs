//! Making room: the oldest segment first.
//!
//! Of its blocks, those that policy keeps (used since they were written) and those within their
//! disk's minimum are appended again; dirty ones too, unless the segment is mostly dirty, in
//! which case the destager is asked instead; the rest is dropped. Records that still matter (open intents, zero runs) are logged again. Then the
//! segment leaves the log's tail, and may be overwritten once a later batch that says so is
//! durable.

use crate::api::{DiskId, Effects};
use crate::cache::index::SlotNo;
use crate::core::apply::{Apply, Purpose, Then};
use crate::core::left::Unread;
use crate::core::{Core, OpCtx};
use crate::disk::Disk;
use crate::faults::Fault;
use crate::flash::log::{Item, LAZY_BATCH_BLOCKS, SegState};
use crate::paths::{Path, took};
use hearth_format::Kind;
use hearth_io::checksum::crc32c;
use hearth_io::{Buf, IoDone};
use hearth_policy::Verdict;
use smallvec::{SmallVec, smallvec};

/// Blocks read at once for reinsertion.
const MOVE_RUN: u32 = 64;
/// Blocks being reinserted (read, or queued to be appended) while more runs are begun: as many as
/// make a batch that does not need to wait for more.
const MOVES_MAX: u32 = LAZY_BATCH_BLOCKS;
/// Free segments below which no further segment is evicted while others wait to be free: one for
/// what is moved out of it, one for the records that free the others, also after a crash.
const FREE_MIN: usize = 2;
/// One block in so many of a segment goes at least, or a cache full of blocks in use would turn its
/// log over for ever to make room for one. It bounds what reinsertion writes; a larger share of hot
/// blocks dropped is what it costs (docs/decisions/0001-policy.md).
const DROP_SHARE: u32 = 16;
/// Time between looks at a segment in which everything waits for something.
const RESCAN_NS: u64 = 1_000_000;
/// Slots looked at per call when a disk evicts its own blocks.
const OWN_SCAN: u32 = 8192;
/// A disk above its maximum gives up its blocks one by one if that takes no more than one in so many of the
/// records the log has room for ...
const TRIM_SHARE: u64 = 16;
/// ... so many at a time.
const TRIM_STEP: u64 = 1024;

/// Eviction's progress in the oldest segment.
#[derive(Debug, Default)]
pub(crate) struct Evict {
    pub current: Option<u32>,
    /// Next block of it to look at.
    pub at: u32,
    pub scanned_ns: u64,
    /// When it was last looked for origins that hang.
    pub hung_ns: u64,
    /// Blocks that are being read, or queued to be appended.
    pub moving: u32,
    pub kept: u32,
    pub relog_sent: bool,
    pub relogged: bool,
    /// The segment is mostly dirty: the destager should hurry.
    pub wants_clean: bool,
}

impl Core {
    /// Free segments to keep ready.
    pub fn free_target(&self) -> usize {
        self.flash.log.reserve() + (self.flash.log.segments.len() / 64).clamp(2, 16)
    }

    /// Has a write for any of these blocks put a newer record into the append queue? Then
    /// nothing about the old content may be appended any more.
    pub fn superseding(&self, disk: DiskId, start: u64, end: u64) -> bool {
        let d = self.known(disk);
        d.locks.meeting(start, end).any(|l| {
            let to = self.reqs[l.req].write().superseded_to(l.start, l.end);
            l.start < end && start < to
        })
    }

    /// One step of eviction, if room is short.
    pub fn evict_step(&mut self, now: u64, fx: &mut Effects) {
        if self.rescue_step(now, fx) {
            return;
        }
        for _ in 0..4 {
            if self.flash.failed {
                return;
            }
            let coming = self.flash.log.freeing.len();
            if self.flash.log.free.len() + coming >= self.free_target()
                && self.flash.evict.current.is_none()
            {
                self.flash.evict.wants_clean = false;
                break;
            }
            let Some(seg) = self
                .flash
                .evict
                .current
                .or(self.flash.log.order.front().copied())
            else {
                break;
            };
            // What was evicted is free only after two more batches and flushes, and moving a segment
            // may take one. Were the last segments spent before those batches are written, nothing
            // could ever be appended again; and a crash closes the head, however empty it is.
            if self.flash.evict.current.is_none()
                && coming > 0
                && self.flash.log.free.len() < FREE_MIN
            {
                break;
            }
            if self.flash.evict.current.is_none() {
                self.flash.evict = Evict {
                    current: Some(seg),
                    moving: self.flash.evict.moving,
                    ..Evict::default()
                };
                // What is in use shall be known.
                self.fold_all_notes(fx);
            }
            if !self.evict_segment(seg, now, fx) {
                break;
            }
        }
        let durable = self.flash.log.durable_ord;
        let applied = self.flash.log.applied_ord;
        let waiting = self.flash.log.freeing.iter().any(|seg| {
            let state = self.flash.log.segments[*seg as usize].state;
            matches!(state, SegState::Freeing { ord, .. } if ord > durable && ord <= applied)
        });
        if waiting && self.flash.log.free.len() < self.free_target() {
            self.start_flash_flush(now, fx);
        }
        self.rescue_step(now, fx);
    }

    /// Works on the oldest segment; true if it was freed.
    fn evict_segment(&mut self, seg: u32, now: u64, fx: &mut Effects) -> bool {
        if self.flash.log.segments[seg as usize].live > 0 {
            self.scan(seg, now, fx);
        }
        if self.flash.log.segments[seg as usize].pins > 0
            && now.saturating_sub(self.flash.evict.hung_ns) >= RESCAN_NS
        {
            self.flash.evict.hung_ns = now;
            self.let_go_of_hung(seg, now);
        }
        let s = &self.flash.log.segments[seg as usize];
        let pinned = s.pins > 0 && !self.opts.faults.has(Fault::FreePinned);
        if s.live > 0 || pinned || s.batches > 0 || self.flash.evict.moving > 0 {
            return false;
        }
        let relogged = if self.flash.starved() {
            self.flash.log.order.len() > 1 && self.needs_no_relog(seg)
        } else {
            self.relog(seg)
        };
        // Last, for it looks into every lane.
        if !relogged || self.shared.pinned(seg) {
            return false;
        }
        self.flash.evict.current = None;
        self.flash.evict.wants_clean = false;
        self.flash.free_segment(seg);
        self.route_flash(now, fx);
        true
    }

    fn scan(&mut self, seg: u32, now: u64, fx: &mut Effects) {
        let base = seg * self.flash.log.segment_blocks;
        let data_blocks = self.flash.log.data_blocks;
        if self.flash.evict.at >= data_blocks {
            if self.flash.evict.moving > 0
                || now.saturating_sub(self.flash.evict.scanned_ns) < RESCAN_NS
            {
                return;
            }
            self.flash.evict.at = 0;
        }
        let s = self.flash.log.segments[seg as usize];
        // Reinserting a segment that is nearly all dirty would only move it in a circle.
        let mostly_dirty = s.dirty * 4 > data_blocks * 3;
        // What is moved now would take the room of the records that free what was evicted.
        let short = self.flash.log.free.is_empty();
        let starved = self.flash.starved();
        let dirty_stays = mostly_dirty || short;
        self.flash.evict.wants_clean |= mostly_dirty || short && s.dirty > 0;
        let keep_max = if short {
            0
        } else {
            data_blocks - data_blocks / DROP_SHARE
        };
        let kept_share = self.kept_share();
        while self.flash.evict.at < data_blocks && self.flash.evict.moving < MOVES_MAX {
            let slot = base + self.flash.evict.at;
            if starved {
                self.drop_clean(slot, now);
                self.flash.evict.at += 1;
                continue;
            }
            let n = self.movable_run(
                slot,
                base + data_blocks,
                dirty_stays,
                keep_max,
                kept_share,
                now,
            );
            if n == 0 {
                self.flash.evict.at += 1;
                continue;
            }
            self.flash.evict.at += n;
            self.flash.evict.kept += n;
            self.read_for_move(slot, n, fx);
        }
        if self.flash.evict.at >= data_blocks {
            self.flash.evict.scanned_ns = now;
        }
    }

    /// The part of disks' minimums that is kept, as a fraction: all of it, unless they add up to more
    /// than leaves eviction something to drop. Then it would only move what is kept around.
    fn kept_share(&self) -> (u64, u64) {
        let blocks = u64::from(self.flash.log.data_blocks);
        let segments = self.flash.log.segments.len();
        // Not those that are to be free, nor the head and the one eviction is at; and descriptors.
        let full = segments.saturating_sub(self.free_target() + 2) as u64 * blocks / 16 * 15;
        let most = full.min(segments as u64 * blocks / 8 * 7);
        let wanted = u64::try_from(self.totals.min_blocks).unwrap_or(u64::MAX);
        if wanted <= most {
            (1, 1)
        } else {
            (most, wanted)
        }
    }

    /// How many slots from `slot` are to be moved; drops what is not worth it on the way.
    fn movable_run(
        &mut self,
        slot: SlotNo,
        end: SlotNo,
        dirty_stays: bool,
        keep_max: u32,
        (kept, of): (u64, u64),
        now: u64,
    ) -> u32 {
        let mut n = 0;
        while n < MOVE_RUN && slot + n < end {
            let Some(info) = self.cache.index.slot(slot + n) else {
                break;
            };
            let (disk, block) = (info.key.disk(), info.key.block());
            if !info.dirty && self.drop_orphan(slot + n) {
                break;
            }
            if self.cache.index.slot_mark(slot + n) || self.superseding(disk, block, block + 1) {
                break;
            }
            if info.dirty && self.opts.faults.has(Fault::EvictDirty) {
                self.evict_block(disk, block, slot + n, now);
                break;
            }
            if info.dirty {
                if !self.may_be_read(disk, block, n > 0, now) {
                    break;
                }
                let stuck = self.disk(disk).is_none_or(|d| {
                    !d.attached || d.origin.destage.hangs || d.origin.destage.not_before_ns > now
                });
                if dirty_stays && !stuck {
                    break;
                }
                if self.disk(disk).is_some_and(|d| !d.attached) {
                    took(Path::UnattachedKept);
                }
            } else {
                let within_min = keep_max > 0
                    && self.disk(disk).is_some_and(|d| {
                        let min = u128::from(d.cfg.min_bytes / 4096) * u128::from(kept);
                        u128::from(d.cached) * u128::from(of) <= min
                    });
                let verdict = self.cache.policy.evict(info.freq as u8);
                let earned = verdict != Verdict::Drop
                    && self.flash.evict.kept + n < keep_max
                    && self.disk(disk).is_none_or(|d| d.excess() == 0);
                let may_differ = self.disk(disk).is_some_and(Disk::may_differ)
                    && !self.opts.faults.has(Fault::CacheUnguarded);
                if !earned && !within_min || may_differ {
                    self.evict_block(disk, block, slot + n, now);
                    break;
                }
            }
            n += 1;
            if self.doubtful(disk, block) {
                break;
            }
        }
        n
    }

    /// Gives up a clean copy that the index does not lead to; false if it does.
    pub fn drop_orphan(&mut self, slot: SlotNo) -> bool {
        let Some(info) = self.cache.index.slot(slot) else {
            return false;
        };
        if !self.cache.index.remove_orphan(slot) {
            return false;
        }
        self.flash.slot_emptied(slot, false);
        self.known_mut(info.key.disk()).cached -= 1;
        true
    }

    /// May a dirty block be read to be moved now, and not first in a run? What flash has refused is
    /// read alone, and not at once again.
    fn may_be_read(&self, disk: DiskId, block: u64, follows: bool, now: u64) -> bool {
        let d = self.known(disk);
        !(d.is_refused(block, now) || follows && d.doubtful.contains(block))
    }

    /// Drops a copy in the oldest segment. It needs no record, because the whole segment is freed.
    pub fn evict_block(&mut self, disk: DiskId, block: u64, slot: SlotNo, now: u64) {
        let seq = self.flash.log.segments[self.flash.log.segment_of(slot)].seq;
        self.forget_block(disk, block, now);
        let d = self.known_mut(disk);
        d.counters.evictions += 1;
        d.evicted_seq = d.evicted_seq.max(seq);
    }

    fn read_for_move(&mut self, slot: SlotNo, n: u32, fx: &mut Effects) {
        let mut crcs: SmallVec<[u32; 4]> = SmallVec::new();
        for i in 0..n {
            crcs.push(self.cache.index.crc(slot + i));
            self.cache.index.set_mark(slot + i, true);
        }
        self.flash.pin(slot);
        self.flash.evict.moving += n;
        let len = n as usize * 4096;
        let buf = Buf::zeroed(len).slice(0, len);
        let io = self.flash.read_slots(slot, buf).checked(crcs);
        self.io(fx, OpCtx::EvictRead { slot, count: n }, io.in_background());
    }

    pub fn evict_read_done(&mut self, slot: SlotNo, n: u32, done: IoDone, now: u64) {
        self.flash.unpin_slot(slot);
        self.flash.evict.moving -= n;
        let data = done.op.bufs.first();
        let data = data.expect("a read comes back with its memory");
        for i in 0..n {
            // A write or a discard may have taken its place meanwhile.
            let Some(info) = self.cache.index.slot(slot + i) else {
                continue;
            };
            let (disk, block) = (info.key.disk(), info.key.block());
            let superseding = self.superseding(disk, block, block + 1)
                && !self.opts.faults.has(Fault::MoveSuperseded);
            let reseal = self.opts.faults.has(Fault::ResealRot);
            let (unread, bad) = (
                done.result.is_err(),
                done.bad_blocks.contains(&i) && !reseal,
            );
            // What is lost is lost whether the device says so or not.
            let rotten = info.dirty && (bad || unread && info.lost);
            if rotten && !superseding && !self.flash.failed {
                took(if info.lost {
                    Path::LostMoved
                } else {
                    Path::RottenMoved
                });
                self.lose(disk, block, slot + i);
            } else if bad
                || unread
                || self.flash.failed
                || superseding
                || !info.dirty && self.disk(disk).is_some_and(Disk::may_differ)
            {
                self.cache.index.set_mark(slot + i, false);
                if info.dirty {
                    self.ready.touch(disk);
                }
                if unread && info.dirty && !superseding {
                    self.strike(disk, block, slot + i, Unread { alone: n == 1 }, now);
                }
                if (bad || unread) && !info.dirty {
                    self.forget_block(disk, block, now);
                    // A record behind the newer one would void that.
                    if !superseding {
                        self.record_drop(disk, block, 1);
                    }
                }
                continue;
            }
            self.flash.evict.moving += 1;
            let d = self.known_mut(disk);
            d.counters.reinsertions += 1;
            let freq = match self.cache.policy.evict(info.freq as u8) {
                // It will be judged when it is clean.
                _ if info.dirty => info.freq as u8,
                Verdict::Keep { freq } => freq,
                Verdict::Drop => 0,
            };
            let data = data.sub(i as usize * 4096, 4096);
            // What is lost is moved with a checksum that no read accepts, and that tells recovery
            // all the same that the batch is whole (docs/format.md).
            let crc = match rotten {
                true => !crc32c(data.bytes()),
                false if reseal => crc32c(data.bytes()),
                false => self.cache.index.crc(slot + i),
            };
            let kind = if info.dirty { Kind::Dirty } else { Kind::Clean };
            let token = Purpose {
                apply: Apply::Move {
                    old: slot + i,
                    dirty: info.dirty,
                    freq,
                },
                then: Then::Moved,
            };
            self.flash
                .log
                .push(Item::data(kind, disk, block, data, smallvec![crc], token));
        }
        // Else they may gather: every batch costs a block of flash.
        let waited_for = !self.reqs.stalled.is_empty() || !self.reqs.stalled_through.is_empty();
        self.flash.log.urgent |= waited_for || self.flash.log.free.len() < self.flash.log.reserve();
    }

    /// Logs again what the segment says that still holds. True when nothing is left to wait for.
    fn relog(&mut self, seg: u32) -> bool {
        if self.flash.evict.relog_sent {
            return self.flash.evict.relogged;
        }
        let seq = self.flash.log.segments[seg as usize].seq;
        if self.flash.closes_intents_of(seq) && !self.opts.faults.has(Fault::FreeBeforeCloses) {
            took(Path::ClosingAwaited);
            // A batch that names the new tail before those records are in the log would leave a region
            // without its intent and with its old copies.
            self.flash.log.urgent = true;
            return false;
        }
        let mut records: Vec<(Kind, DiskId, u64, u64)> = Vec::new();
        let mut noted = self.ready.noted.take();
        noted.retain(|disk| self.disk(*disk).is_some_and(Disk::is_noted));
        noted.sort_unstable();
        noted.iter().for_each(|disk| self.ready.noted.add(*disk));
        for d in noted.iter().filter_map(|disk| self.disk(*disk)) {
            let id = d.cfg.id;
            let skip = self.opts.faults.has(Fault::SkipRelogIntents);
            for region in d.origin.intents.held_by(seq).filter(|_| !skip) {
                let (start, end) = d.origin.intents.blocks_of(region);
                records.push((Kind::Intent, id, start, end - start));
            }
            if d.zero_seg_seq.is_some_and(|z| z <= seq)
                && !self.opts.faults.has(Fault::SkipRelogZeros)
            {
                for (block, count) in d.zero.runs() {
                    if self.superseding(id, block, block + count) {
                        took(Path::RelogWaitsForWrite);
                        // The write will be through soon; ask again then.
                        return false;
                    }
                    records.push((Kind::ZeroRun, id, block, count));
                }
            }
        }
        if records.is_empty() {
            return true;
        }
        let segment = self.flash.log.summary_capacity;
        let head = self.flash.log.head.as_ref();
        let head = head.map_or(0, |h| segment.saturating_sub(h.entries.len()));
        let free = self.flash.log.free.len();
        if free > 0 && records.len() > head + free * segment {
            // A pool of an earlier version may have more runs of zeros than fit. What origins are told
            // is not logged again; those that are away are waited for. With nothing free it is the
            // rescue that helps, once the head is gone.
            self.flash.evict.wants_clean = true;
            return false;
        }
        let next = self.flash.log.next_segment_seq;
        let here = self.flash.log.head.as_ref().map_or(next, |h| h.seq);
        let last = records.len() - 1;
        for (i, (kind, disk, block, count)) in records.into_iter().enumerate() {
            let then = if i == last {
                Then::Relogged
            } else {
                Then::Nothing
            };
            self.flash.record_again(kind, disk, block, count, then);
            let d = self.known_mut(disk);
            if kind == Kind::ZeroRun {
                took(Path::ZerosLoggedAgain);
                d.zero_seg_seq = Some(here);
            } else {
                took(Path::IntentLoggedAgain);
                let region = d.origin.intents.region_of(block);
                d.origin.intents.lies_in(region, here);
            }
        }
        self.flash.evict.relog_sent = true;
        self.flash.log.urgent = true;
        self.opts.faults.has(Fault::RelogUnawaited)
    }

    /// Drops clean blocks of a disk that is at its maximum; true if `count` came free.
    pub fn make_own_room(&mut self, disk: DiskId, count: u64, now: u64) -> bool {
        let slots = self.cache.index.slots();
        let Some(mut hand) = self.disk(disk).map(|d| d.own_hand) else {
            return false;
        };
        let mut freed = 0;
        // What lies side by side takes one record.
        let mut run: Option<(u64, u64)> = None;
        for _ in 0..OWN_SCAN.min(slots) {
            if freed >= count {
                break;
            }
            hand = (hand + 1) % slots;
            let Some(info) = self.cache.index.slot(hand) else {
                continue;
            };
            if info.key.disk() != disk || info.dirty || self.cache.index.slot_mark(hand) {
                continue;
            }
            if info.freq > 0 {
                self.cache.index.untouch(hand);
                continue;
            }
            let block = info.key.block();
            if self.superseding(disk, block, block + 1)
                && !self.opts.faults.has(Fault::DropBehindNewer)
            {
                // Our record would come after the newer one and void that.
                continue;
            }
            took(Path::OwnBlocksDropped);
            self.forget_block(disk, block, now);
            match &mut run {
                Some((start, count)) if *start + *count == block => *count += 1,
                run => {
                    if let Some((start, count)) = run.replace((block, 1)) {
                        self.record_drop(disk, start, count);
                    }
                }
            }
            let d = self.known_mut(disk);
            d.counters.evictions += 1;
            freed += 1;
        }
        if let Some((start, count)) = run {
            self.record_drop(disk, start, count);
        }
        let d = self.known_mut(disk);
        d.own_hand = hand;
        freed >= count
    }

    /// Brings a disk above its maximum (after it was lowered) back below it.
    ///
    /// Every block dropped may take a record. Of a disk that is far above, the records would push
    /// what others have out of the log, so that one gives way as the log turns over: its fills each take
    /// the place of two, and nothing of it is moved on.
    pub fn trim_own_overuse(&mut self, disk: DiskId, now: u64) {
        let records = self.flash.log.segments.len() as u64 * self.flash.log.summary_capacity as u64;
        let most = records / TRIM_SHARE;
        let excess = self.disk(disk).map_or(0, Disk::excess);
        if (1..=most).contains(&excess) {
            let room = u64::from(self.flash.log.room() / 4);
            self.make_own_room(disk, excess.min(TRIM_STEP).min(room), now);
        }
    }
}
