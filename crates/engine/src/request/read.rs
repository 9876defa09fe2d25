//! Reads: what is on flash comes from flash, the rest from the origin, both at once.
//!
//! A hit holds no lock: it pins the segment it reads, and a write meanwhile goes to another
//! slot, so the read returns what was there when it arrived. A miss takes a [`Ticket`]; a
//! write that arrives while the ticket lives cancels it, so what the miss read is given to
//! its reader but never cached (invariant 4).
//!
//! Between the origin and flash a copy is in memory and serves reads: in the RAM stage, or with the ticket of its append
//! until the index has the block. A write removes the blocks that it covers from both. The new data serves no read before
//! the write is answered: a concurrent read returns the old content.

use crate::api::{DiskId, Effects, Mode, ReqError, Request};
use crate::blocks::runset::RunSet;
use crate::cache::index::{Key, SlotNo};
use crate::cache::stage::policy_key;
use crate::core::apply::{Apply, Purpose, Then};
use crate::core::left::Unread;
use crate::core::{Core, OpCtx, req_error};
use crate::ctx::{Io, RUN_MAX, Sums};
use crate::disk::{Disk, Ticket};
use crate::faults::Fault;
use crate::flash::log::Item;
use crate::ids::ReqId;
use crate::paths::{Path, took};
use crate::request::answer::Asker;
use crate::stats::ewma;
use hearth_format::Kind;
use hearth_io::checksum::crc32c;
use hearth_io::{Buf, BufSlice, IoDone, Target};
use hearth_policy::cleaning::Why;
use hearth_policy::{Stay, Use};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Fills in flight per disk; more misses are served without being cached.
pub(crate) const FILLS_MAX: usize = 512;
/// How often a read looks again for a block that moved or could not be read; a request has this
/// many for each of its blocks.
const RETRIES_MAX: u64 = 8;
/// Bytes a prefetch request reads at a time.
const PREFETCH_STEP: u64 = 256 << 10;
/// Most a prefetch request reads; it is a hint, and its steps nest.
const PREFETCH_MAX: u64 = 32 << 20;

/// Whether a miss may be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// If policy admits it.
    Allowed,
    /// No: it belongs to a long sequential stream.
    Sequential,
    /// No: it is on flash, which is slow, off or bad just now, or was read ahead in vain.
    Cached,
}

/// A run of blocks as the origin has it.
pub(crate) struct CleanCopy {
    pub data: BufSlice,
    /// Of each block.
    pub crcs: Sums,
    /// It was written to the origin, not read from it.
    pub written: bool,
}

/// A run of blocks being read from the origin.
#[derive(Debug)]
pub(crate) struct Miss {
    pub req: ReqId,
    pub disk: u16,
    pub block: u64,
    pub count: u64,
    /// Whole blocks, the tail beyond the disk zeroed.
    pub data: BufSlice,
    pub ticket: u64,
    pub admit: bool,
    /// It waits in RAM first.
    pub stage: bool,
    /// `data` is wider than the request; copy what it asked for.
    pub copy: bool,
    /// It continues no stream: its latency is that of the origin at its worst.
    pub seek: bool,
}

impl Core {
    pub fn start_read(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let (offset, len, client) = {
            let r = &self.reqs[id];
            (r.offset, r.len, r.is_clients())
        };
        let stream = match self.disk_mut(self.reqs[id].disk) {
            Some(d) if client => d.sequential.observe(offset, len),
            _ => 0,
        };
        let long = self
            .disk(self.reqs[id].disk)
            .is_some_and(|d| d.cfg.seq_cutoff > 0 && stream > d.cfg.seq_cutoff);
        let fill = if long {
            Fill::Sequential
        } else {
            Fill::Allowed
        };
        // Guards against completing while pieces are still being issued.
        self.reqs[id].read_mut().pending = 1;
        self.reqs[id].read_mut().seeks = stream <= len;
        let (disk, start) = (self.reqs[id].disk, offset / 4096);
        let end = (offset + len).div_ceil(4096);
        if !client || !self.reads_ahead(disk) {
            self.read_range(id, start, end, fill, fx);
        } else {
            let mut wishes = std::mem::take(&mut self.cache.ahead.wishes);
            wishes.clear();
            let (key, count) = (policy_key(disk, start), (end - start) as u32);
            let in_stream = self.cache.policy.read(key, count, &mut wishes);
            self.read_range(id, start, end, fill, fx);
            if self.reqs[id].read().waited {
                self.cache.policy.waited(key, count, in_stream, &mut wishes);
            }
            if !wishes.is_empty() {
                self.read_ahead(&wishes, fx);
            }
            self.cache.ahead.wishes = wishes;
        }
        self.read_part_done(id, now, fx);
    }

    pub fn read_part_done(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let read = self.reqs[id].read_mut();
        read.pending -= 1;
        if read.pending > 0 {
            return;
        }
        if std::mem::take(&mut read.memory_in_use) && self.reqs[id].failed.is_none() {
            return self.read_into_other_memory(id, now, fx);
        }
        self.finish(id, now, fx);
    }

    /// Is what it reads into nobody else's?
    pub fn reads_into_own(&self, id: ReqId) -> bool {
        let buf = self.reqs[id].buf.as_ref();
        buf.is_some_and(|buf| !buf.is_shared())
    }

    /// Reads all of it once more: what it was given to read into is not its own alone.
    fn read_into_other_memory(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        took(Path::ReadElsewhere);
        let (start, end) = self.blocks_of(id);
        let r = &mut self.reqs[id];
        let len = r.buf.as_ref().map_or(0, |buf| buf.len());
        r.buf = Some(Buf::zeroed(len).slice(0, len));
        r.read_mut().pending = 1;
        self.read_range(id, start, end, Fill::Cached, fx);
        self.read_part_done(id, now, fx);
    }

    /// Issues what brings blocks `start..end` into the request's buffer.
    pub fn read_range(&mut self, id: ReqId, start: u64, end: u64, fill: Fill, fx: &mut Effects) {
        let (disk, client, base) = {
            let r = &self.reqs[id];
            (r.disk, r.is_clients(), r.offset / 4096)
        };
        let buf = self.reqs[id].buf.clone();
        let buf = buf.expect("a read came with memory to read into");
        let d = self.known(disk);
        let empty = d.cached == 0
            && d.void.is_none()
            && d.zero.is_empty()
            && d.tickets.is_empty()
            && self.cache.stage.len() == 0
            && self.cache.ahead.is_idle();
        let (mode, homeless) = (d.cfg.mode, !d.has_origin());
        let counts = client && fill != Fill::Cached && mode != Mode::Off;
        let piece = |from: u64, count: u64| {
            buf.sub(((from - base) * 4096) as usize, (count * 4096) as usize)
        };
        if empty && homeless {
            piece(start, end - start).bytes_mut().fill(0);
            self.reqs[id].read_mut().hit = true;
            return;
        }
        if empty {
            if counts {
                self.count_uses(disk, start, end, Use::Miss);
            }
            self.miss(
                id,
                start,
                end - start,
                piece(start, end - start),
                fill,
                mode,
                fx,
            );
            return;
        }
        let mut b = start;
        while b < end {
            let left = (end - b).min(RUN_MAX);
            let zeros = self.disk(disk).map_or(0, |d| {
                if d.zero.contains(b) {
                    d.zero.run_len(b, left)
                } else {
                    0
                }
            });
            if zeros > 0 {
                piece(b, zeros).bytes_mut().fill(0);
                self.reqs[id].read_mut().hit = true;
                b += zeros;
                continue;
            }
            let Some(slot) = self.cache.index.get(Key::new(disk, b)) else {
                if homeless {
                    if self.disk(disk).is_some_and(|d| d.is_void(b)) {
                        self.reqs[id].failed = Some(ReqError::Io);
                    }
                    piece(b, 1).bytes_mut().fill(0);
                    self.reqs[id].read_mut().hit = true;
                    b += 1;
                    continue;
                }
                let key = policy_key(disk, b);
                if mode != Mode::Off
                    && let Some(how) = self.cache.stage.read(key, &mut piece(b, 1))
                {
                    self.reqs[id].read_mut().hit = true;
                    if counts || how != Use::Hit {
                        self.cache.policy.used(key, false, how);
                    }
                    self.reqs[id].read_mut().waited |= how != Use::Hit;
                    let d = self.known_mut(disk);
                    d.counters.prefetch_used += u64::from(how != Use::Hit);
                    if client {
                        d.counters.read_hit_bytes += 4096;
                        d.counters.stage_hit_bytes += 4096;
                    }
                    if fill == Fill::Allowed && self.is_prefetch(id) {
                        self.promote(disk, b, &piece(b, 1));
                    }
                    b += 1;
                    continue;
                }
                let mut left = left;
                let d = self.known(disk);
                let mut queued = d.queued_run(b, b + left);
                if queued.is_none() && self.opts.faults.has(Fault::ServeVoidedCopy) {
                    let has = |t: &Ticket| !t.is_reading() && t.start <= b && b < t.end;
                    queued = d.tickets.iter().position(has).map(|at| (at, b, b + 1));
                }
                if mode != Mode::Off
                    && let Some((at, from, to)) = queued
                {
                    if from == b {
                        self.read_queued(id, at, b..to, counts);
                        b = to;
                        continue;
                    }
                    left = from - b;
                }
                if counts && !self.cache.ahead.is_idle() {
                    let (joined, next) = self.join_ahead(id, disk, b, left);
                    if joined > 0 {
                        self.reqs[id].missed = true;
                        self.reqs[id].read_mut().waited = true;
                        self.reqs[id].read_mut().pending += 1;
                        b += joined;
                        continue;
                    }
                    left = left.min(next - b);
                }
                let mut n = 1;
                while n < left && !self.present(disk, b + n) {
                    n += 1;
                }
                if counts {
                    self.count_uses(disk, b, b + n, Use::Miss);
                }
                self.miss(id, b, n, piece(b, n), fill, mode, fx);
                b += n;
                continue;
            };
            let info = self.cache.index.slot(slot);
            let dirty = info.is_some_and(|i| i.dirty);
            if info.is_some_and(|i| i.lost) && self.opts.faults.has(Fault::ServeLost) {
                self.miss(id, b, 1, piece(b, 1), Fill::Cached, mode, fx);
                b += 1;
                continue;
            }
            if info.is_some_and(|i| i.lost) {
                self.reqs[id].failed = Some(ReqError::Io);
                b += 1;
                continue;
            }
            if !dirty && self.avoid_flash(disk, mode) {
                let n = self.clean_run(disk, b, left);
                self.miss(id, b, n, piece(b, n), Fill::Cached, mode, fx);
                b += n;
                continue;
            }
            let mut n = 1u64;
            let mut crcs: SmallVec<[u32; 4]> = smallvec![self.cache.index.crc(slot)];
            self.cache.index.touch(slot);
            while n < left {
                let next = slot + n as u32;
                let follows = self.cache.index.slot(next).is_some_and(|i| {
                    i.key.disk() == disk && i.key.block() == b + n && i.dirty == dirty && !i.lost
                });
                if !follows {
                    break;
                }
                self.cache.index.touch(next);
                crcs.push(self.cache.index.crc(next));
                n += 1;
            }
            if counts {
                self.count_uses(disk, b, b + n, Use::Hit);
                self.flash.cleaner.hits(n);
                self.flash.note_read(slot, n as u32);
            }
            if client && let Some(d) = self.disk_mut(disk) {
                d.counters.read_hit_bytes += n * 4096;
            }
            self.reqs[id].read_mut().hit = true;
            self.reqs[id].read_mut().pending += 1;
            self.flash.pin(slot);
            let io = self.flash.read_slots(slot, piece(b, n)).checked(crcs);
            let op = OpCtx::HitRead {
                req: id,
                block: b,
                slot,
            };
            self.io(fx, op, io);
            b += n;
        }
    }

    /// Answers blocks of a read from a copy on its way to flash.
    fn read_queued(&mut self, id: ReqId, at: usize, blocks: Range<u64>, counts: bool) {
        took(Path::QueuedRead);
        let (disk, client) = (self.reqs[id].disk, self.reqs[id].is_clients());
        let count = blocks.end - blocks.start;
        if counts {
            self.count_uses(disk, blocks.start, blocks.end, Use::Hit);
        }
        let d = self.known_mut(disk);
        let ticket = &mut d.tickets[at];
        if counts {
            ticket.used.insert_range(blocks.start, blocks.end);
        }
        let (copy, first) = (ticket.copy.clone(), ticket.start);
        if client {
            d.counters.read_hit_bytes += count * 4096;
            d.counters.stage_hit_bytes += count * 4096;
        }
        let copy = copy.expect("a queued copy is in memory");
        self.copy_blocks(id, blocks, &copy, first);
        self.reqs[id].read_mut().hit = true;
    }

    /// Tells policy that a client used blocks.
    fn count_uses(&mut self, disk: u16, start: u64, end: u64, how: Use) {
        for block in start..end {
            self.cache.policy.used(policy_key(disk, block), false, how);
        }
    }

    /// True if the block is on flash, in the RAM stage, or known to be zero.
    pub fn present(&self, disk: u16, block: u64) -> bool {
        self.cache.index.get(Key::new(disk, block)).is_some()
            || self.cache.stage.contains(policy_key(disk, block))
            || self.disk(disk).is_some_and(|d| d.zero.contains(block))
    }

    /// Clean copies from `block` on, at most `max`; at least one is there.
    fn clean_run(&self, disk: u16, block: u64, max: u64) -> u64 {
        let index = &self.cache.index;
        let is_clean = |block: &u64| {
            let slot = index.get(Key::new(disk, *block));
            slot.and_then(|slot| index.slot(slot))
                .is_some_and(|copy| !copy.dirty)
        };
        1 + (block + 1..block + max).take_while(is_clean).count() as u64
    }

    /// Should a clean hit go to the origin: the cache is off, flash failed, the copies are unverified, or
    /// flash is slower than this disk's own origin just now? One in sixteen still asks flash, to notice when it
    /// recovers.
    fn avoid_flash(&mut self, disk: u16, mode: Mode) -> bool {
        let unverified = self.disk(disk).is_some_and(|d| d.unverified)
            && !self.opts.faults.has(Fault::ServeUnverified);
        if mode == Mode::Off || !self.flash.takes_writes() || unverified {
            return true;
        }
        let origin = self.disk(disk).map_or(0, |d| d.origin.read_ns);
        let congested = origin > 0
            && self.flash.ewma_ns > origin.saturating_mul(2)
            && self.flash.ewma_ns > 1_000_000
            && self.flash.inflight > 0;
        if !congested {
            return false;
        }
        self.probe = self.probe.wrapping_add(1);
        if self.probe.is_multiple_of(16) {
            return false;
        }
        let d = self.known_mut(disk);
        d.counters.bypassed_congested += 1;
        true
    }

    /// Reads a run that is not on flash from the origin.
    #[allow(clippy::too_many_arguments)]
    fn miss(
        &mut self,
        id: ReqId,
        block: u64,
        count: u64,
        data: BufSlice,
        fill: Fill,
        mode: Mode,
        fx: &mut Effects,
    ) {
        let (disk, client) = {
            let r = &self.reqs[id];
            (r.disk, r.is_clients())
        };
        let prefetch = self.is_prefetch(id);
        self.reqs[id].missed = true;
        self.reqs[id].read_mut().waited = true;
        let seek = std::mem::take(&mut self.reqs[id].read_mut().seeks) && client;
        let cacheable = fill == Fill::Allowed
            && mode != Mode::Off
            && self.flash.takes_writes()
            && (client || prefetch)
            && count <= RUN_MAX
            && self.disk(disk).is_some_and(|d| {
                let padded = d.voiding.is_some() && block + count >= d.blocks;
                d.tickets.len() < FILLS_MAX && !padded
            });
        // A block that flash cannot take now serves later reads from RAM.
        let waits = !self.filling() || !self.has_fill_room(disk, count);
        let stage = cacheable && !prefetch && waits && count <= self.cache.stage.run_max();
        let admit = stage || cacheable && self.admit(disk, block, count, prefetch);
        let asked = count;
        let (mut block, mut count, mut data, mut copy) = (block, count, data, false);
        if admit && let Some((wide_block, wide_count)) = self.widen(disk, block, count) {
            data = Buf::zeroed((wide_count * 4096) as usize).slice(0, (wide_count * 4096) as usize);
            (block, count, copy) = (wide_block, wide_count, true);
        } else if admit && data.is_shared() {
            // What is cached must be what the origin said, not what the owner of this memory
            // makes of it before it is checksummed and written to flash.
            data = Buf::zeroed((count * 4096) as usize).slice(0, (count * 4096) as usize);
            copy = true;
        }
        let ticket = self.take_ticket(disk, block, block + count, None);
        let sequential = fill == Fill::Sequential && mode != Mode::Off;
        // A request may miss in several places.
        let bypassed =
            sequential && !std::mem::replace(&mut self.reqs[id].read_mut().bypassed, true);
        let d = self.known_mut(disk);
        if fill != Fill::Allowed && client {
            d.counters.bypassed_sequential += u64::from(bypassed);
        } else if !admit && client {
            d.counters.fills_rejected += asked;
        }
        if client {
            d.counters.read_miss_bytes += asked * 4096;
            d.origin.destage.near = Some(block + count);
        }
        let len = d.clip(block, count);
        self.reqs[id].read_mut().pending += 1;
        let piece = data.sub(0, len as usize);
        let miss = Miss {
            req: id,
            disk,
            block,
            count,
            data,
            ticket,
            admit,
            stage,
            copy,
            seek,
        };
        let io = Io::read(Target::Origin(disk), block * 4096, piece).summed(admit || stage);
        self.io(fx, OpCtx::MissRead(miss), io);
    }

    /// Decides whether a missed run goes on flash without waiting in RAM.
    pub fn admit(&mut self, disk: u16, block: u64, count: u64, asked: bool) -> bool {
        self.has_fill_room(disk, count)
            && self.deserves(disk, block, asked, false)
            && self.own_room(disk, count)
    }

    /// The run to fill for a disk with cache blocks above 4 KiB: up to the unit's limits, as far
    /// as nothing is on flash yet. `None` if that is the run itself.
    fn widen(&self, disk: u16, block: u64, count: u64) -> Option<(u64, u64)> {
        let d = self.disk(disk)?;
        let unit = u64::from(d.cfg.block_size / 4096);
        if unit <= 1 {
            return None;
        }
        let floor = block / unit * unit;
        let ceil = (block + count).next_multiple_of(unit).min(d.blocks);
        let (mut from, mut to) = (block, block + count);
        let queued = d.queued_run(floor, ceil).is_some();
        let present = |block| self.present(disk, block) || queued && d.copy_queued(block);
        while from > floor && !present(from - 1) {
            from -= 1;
        }
        while to < ceil && !present(to) {
            to += 1;
        }
        ((from, to) != (block, block + count)).then_some((from, to - from))
    }

    pub fn hit_read_done(
        &mut self,
        id: ReqId,
        block: u64,
        slot: SlotNo,
        done: IoDone,
        now: u64,
        fx: &mut Effects,
    ) {
        let unchecked = self.opts.faults.has(Fault::SkipChecksum);
        let shared = done.op.bufs.first().is_some_and(BufSlice::is_shared);
        let again = shared && done.result.is_ok() && !done.bad_blocks.is_empty() && !unchecked;
        if again {
            for i in &done.bad_blocks {
                let crc = done.op.crcs.get(*i as usize).copied();
                self.read_privately(id, block + u64::from(*i), slot + i, crc, fx);
            }
        }
        self.flash.unpin_slot(slot);
        if done.is_memory_gone() {
            self.reqs[id].failed = Some(ReqError::Io);
            return self.read_part_done(id, now, fx);
        }
        if done.result.is_err() {
            self.flash_read_failed(now, fx);
        }
        // What goes to a guest's own memory was read into other memory, which is not used again.
        let own = self.reads_into_own(id);
        self.reqs[id].read_mut().memory_in_use |= own && done.goes_on();
        let count = (done.op.len / 4096) as u32;
        let failed = done.result.is_err();
        if failed || (!again && !done.bad_blocks.is_empty() && !unchecked) {
            let disk = self.reqs[id].disk;
            for i in 0..count {
                let (at, in_slot) = (block + u64::from(i), slot + i);
                if done.is_overdue() && self.is_dirty_in(disk, at, in_slot) {
                    // It may be there when the device answers again.
                    took(Path::DirtyOverdue);
                    self.reqs[id].failed = Some(ReqError::Io);
                } else if failed || done.bad_blocks.contains(&i) {
                    let eio = failed.then_some(Unread { alone: count == 1 });
                    self.bad_block(id, disk, at, in_slot, eio, now, fx);
                }
            }
        }
        if !failed
            && !shared
            && done.bad_blocks.is_empty()
            && let Some(data) = done.op.bufs.first()
        {
            self.copy_private(id, block, data);
        }
        self.read_part_done(id, now, fx);
    }

    /// Reads a block once more, into memory of our own: that its checksum did not match in
    /// memory its owner may write at any moment says nothing about flash.
    fn read_privately(
        &mut self,
        id: ReqId,
        block: u64,
        slot: SlotNo,
        crc: Option<u32>,
        fx: &mut Effects,
    ) {
        self.reqs[id].read_mut().pending += 1;
        self.flash.pin(slot);
        let io = self.flash.read_slots(slot, Buf::zeroed(4096).all());
        let op = OpCtx::HitRead {
            req: id,
            block,
            slot,
        };
        self.io(fx, op, io.checked(crc.into_iter().collect()));
    }

    /// Gives a shared request what was read for it with [`Self::read_privately`].
    fn copy_private(&mut self, id: ReqId, block: u64, data: &BufSlice) {
        let r = &self.reqs[id];
        let at = ((block - r.offset / 4096) * 4096) as usize;
        if let Some(buf) = r.buf.as_ref().filter(|b| b.is_shared()) {
            buf.sub(at, data.len())
                .bytes_mut()
                .copy_from_slice(data.bytes());
        }
    }

    /// Is the newest copy of a block there, and the only one?
    fn is_dirty_in(&self, disk: u16, block: u64, slot: SlotNo) -> bool {
        let index = &self.cache.index;
        index.get(Key::new(disk, block)) == Some(slot) && index.slot(slot).is_some_and(|s| s.dirty)
    }

    /// A block could not be read from flash as it was written.
    #[allow(clippy::too_many_arguments)]
    fn bad_block(
        &mut self,
        id: ReqId,
        disk: u16,
        block: u64,
        slot: SlotNo,
        eio: Option<Unread>,
        now: u64,
        fx: &mut Effects,
    ) {
        if self.cache.index.get(Key::new(disk, block)) == Some(slot) {
            self.flash.note_rot(u64::from(eio.is_none()));
            if self.is_dirty_in(disk, block, slot) && !self.opts.faults.has(Fault::ForgetRotten) {
                let again = match eio {
                    Some(unread) => self.strike(disk, block, slot, unread, now),
                    None => {
                        self.lose(disk, block, slot);
                        false
                    }
                };
                if again {
                    self.read_again(id, block, fx);
                } else {
                    self.reqs[id].failed = Some(ReqError::Io);
                }
                return;
            }
            self.forget_block(disk, block);
            // Without the record, a crash could bring the copy back after the origin changed;
            // but a newer record in the queue replaces it anyway, and must not be voided.
            if !self.superseding(disk, block, block + 1) {
                self.record_drop(disk, block, 1);
            }
            let d = self.known_mut(disk);
            d.counters.bad_clean_blocks += 1;
        }
        self.read_again(id, block, fx);
    }

    /// Looks again for one block of a read, wherever it is by now.
    fn read_again(&mut self, id: ReqId, block: u64, fx: &mut Effects) {
        let (start, end) = self.blocks_of(id);
        let read = self.reqs[id].read_mut();
        read.retries += 1;
        if read.retries > RETRIES_MAX * (end - start) {
            self.reqs[id].failed = Some(ReqError::Io);
            return;
        }
        self.read_range(id, block, block + 1, Fill::Cached, fx);
    }

    /// Notes that the only copy of a dirty block is bad.
    pub fn lose(&mut self, disk: u16, block: u64, slot: SlotNo) {
        self.cache.index.set_lost(slot);
        let d = self.known_mut(disk);
        if d.lost.insert(block) {
            took(Path::BlockLost);
            d.counters.bad_dirty_blocks += 1;
            self.lose_versions(disk, block);
        }
    }

    pub fn miss_read_done(&mut self, mut miss: Miss, done: IoDone, now: u64, fx: &mut Effects) {
        let id = miss.req;
        if let Err(e) = done.result {
            self.reqs[id].failed = Some(req_error(e));
            let d = self.known_mut(miss.disk);
            d.drop_ticket(miss.ticket);
            self.origin_was_read(miss.disk);
            self.read_part_done(id, now, fx);
            return;
        }
        if miss.seek
            && let Some(d) = self.disk_mut(miss.disk)
        {
            d.origin.seek_ns = ewma(d.origin.seek_ns, done.latency_ns);
        }
        let got = done.op.len as usize;
        miss.data.bytes_mut()[got..].fill(0);
        let crcs = |data| padded_sums(done.op.crcs, got, data);
        if miss.copy {
            self.copy_out(id, &miss);
        }
        let ignore = self.opts.faults.has(Fault::CacheRacedMiss);
        let failed = !self.flash.takes_writes();
        let room = u64::from(self.flash.log.room()) >= miss.count;
        let d = self.known_mut(miss.disk);
        let cancelled = d.ticket(miss.ticket).is_none_or(|t| t.is_cancelled()) && !ignore;
        let cached = !cancelled && !failed && d.attached && d.cfg.mode != Mode::Off;
        d.drop_ticket(miss.ticket);
        self.origin_was_read(miss.disk);
        if miss.stage && cached {
            let stay = Stay {
                freq: 0,
                covered: false,
                unused: None,
                written: false,
            };
            self.stage_put(miss.disk, miss.block, &miss.data, &crcs(&miss.data), |_| {
                stay
            });
        } else if miss.admit && cached && room {
            let crcs = crcs(&miss.data);
            let copy = CleanCopy {
                data: miss.data,
                crcs,
                written: false,
            };
            self.fill(miss.disk, miss.block, copy, 0);
        }
        self.read_part_done(id, now, fx);
    }

    /// A read of the origin has ended that may have kept the destager from writing there.
    pub fn origin_was_read(&mut self, disk: DiskId) {
        if self.disk(disk).is_some_and(Disk::is_dirty) {
            self.ready.touch(disk);
        }
    }

    /// Announces a copy of the origin, which is still to be read if there is none; see [`Ticket`].
    pub fn take_ticket(
        &mut self,
        disk: DiskId,
        start: u64,
        end: u64,
        copy: Option<BufSlice>,
    ) -> u64 {
        self.next_ticket += 1;
        let id = self.next_ticket;
        let raced = self.opts.faults.has(Fault::CacheRacedMiss);
        let d = self.known_mut(disk);
        // A write that is under way may reach the origin before or after this read.
        let mut cancelled = SmallVec::new();
        if copy.is_none() && d.locked(start, end) && !raced {
            cancelled.push((start, end));
        }
        d.tickets.push(Ticket {
            id,
            start,
            end,
            cancelled,
            copy,
            used: RunSet::default(),
        });
        id
    }

    /// Puts a copy of the origin, used `freq` times since it came, in the append queue.
    pub fn append_clean(&mut self, disk: u16, block: u64, copy: CleanCopy, why: Why, freq: u8) {
        let CleanCopy {
            data,
            crcs,
            written,
        } = copy;
        let end = block + crcs.len() as u64;
        let ticket = self.take_ticket(disk, block, end, Some(data.clone()));
        let token = Purpose {
            apply: Apply::Clean {
                ticket,
                freq,
                written,
            },
            then: Then::Ticket { disk, ticket },
        };
        self.flash
            .log
            .push(Item::data(Kind::Clean, disk, block, data, crcs, why, token));
    }

    /// Copies what the request asked for out of a wider read.
    fn copy_out(&mut self, id: ReqId, miss: &Miss) {
        let (start, end) = self.blocks_of(id);
        let range = miss.block.max(start)..(miss.block + miss.count).min(end);
        self.copy_blocks(id, range, &miss.data, miss.block);
    }

    /// Copies blocks of a request into its buffer; `data` begins with block `first`.
    pub fn copy_blocks(&mut self, id: ReqId, blocks: Range<u64>, data: &BufSlice, first: u64) {
        let r = &mut self.reqs[id];
        let base = r.offset / 4096;
        if blocks.is_empty() {
            // A read was widened, and the request goes on elsewhere.
            return;
        }
        let buf = r.buf.as_mut();
        let buf = buf.expect("a read came with memory to read into");
        let bytes = ((blocks.end - blocks.start) * 4096) as usize;
        let src = data.sub(((blocks.start - first) * 4096) as usize, bytes);
        let at = ((blocks.start - base) * 4096) as usize;
        buf.bytes_mut()[at..at + bytes].copy_from_slice(src.bytes());
    }

    /// True if it is a piece of a client's request to cache.
    fn is_prefetch(&self, id: ReqId) -> bool {
        let parent = self.reqs[id].answer.request();
        parent.is_some_and(|parent| self.reqs[parent].is_prefetch())
    }

    /// NBD_CMD_CACHE: reads the range piece by piece and always admits.
    pub fn start_prefetch(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let r = &mut self.reqs[id];
        r.len = r.len.min(PREFETCH_MAX);
        self.prefetch_step(id, Ok(()), now, fx);
    }

    pub fn prefetch_step(
        &mut self,
        id: ReqId,
        result: Result<(), ReqError>,
        now: u64,
        fx: &mut Effects,
    ) {
        if let Err(e) = result {
            self.reqs[id].failed = Some(e);
        }
        let (disk, offset, len) = {
            let r = &self.reqs[id];
            (r.disk, r.offset, r.len)
        };
        if len == 0 || self.reqs[id].failed.is_some() || self.quiescing {
            self.finish(id, now, fx);
            return;
        }
        let step = PREFETCH_STEP.min(len);
        let buf = Buf::zeroed(Request::buffer_len(offset, step) as usize);
        let req = &mut self.reqs[id];
        req.offset += step;
        req.len -= step;
        let r = Request::read(0, disk, offset, step, &buf, now);
        self.start(r, Asker::Request(id), now, fx);
    }
}

/// Checksums of `data`, of which the first `got` bytes were read and summed up by whoever read them, and
/// zeros stand behind.
pub(crate) fn padded_sums(mut crcs: Sums, got: usize, data: &BufSlice) -> Sums {
    crcs.truncate(got / 4096);
    let rest = data.bytes().chunks(4096).skip(crcs.len());
    crcs.extend(rest.map(crc32c));
    crcs
}
