//! Reading ahead: what policy expects is brought from the origin into the RAM stage.
//!
//! A hard disk spends its time finding the place, not reading it, so what follows a read costs
//! next to nothing while the head is there. Policy says what to expect; here it is cut to what is
//! neither cached nor being written nor on its way, read in the background, and staged as unused.
//! It never goes on flash before somebody used it.
//!
//! The rule of every miss holds (invariant 4): a read ahead has a [`Ticket`], a write to its range
//! cancels that, and what comes back without a valid ticket is thrown away. A client that asks for
//! a block that is on its way waits for that read instead of sending the disk there twice; it
//! can only do so while the ticket is valid, i.e. while no write has begun since the read was
//! sent. If the read fails or loses its ticket, the client's own read goes to the origin.

use crate::api::{DiskId, Effects, Mode};
use crate::cache::ahead::{AheadRead, Joined, UNUSED_SHARE};
use crate::cache::stage::{disk_and_block, policy_key};
use crate::core::{Core, OpCtx};
use crate::ctx::{Io, RUN_MAX};
use crate::disk::Ticket;
use crate::faults::Fault;
use crate::ids::ReqId;
use crate::request::read::{FILLS_MAX, Fill, padded_sums};
use hearth_io::{Buf, IoDone, Target};
use hearth_policy::prefetch::Source;
use hearth_policy::{Range, Stay, Use};
use smallvec::SmallVec;

/// Reads ahead in flight in a pool: some for each of the disks that are busy at a time.
const READS_MAX: usize = 16;
/// The same of one disk: enough for it to order them, few enough that what a client asks for
/// next does not wait long behind them.
const DISK_READS_MAX: usize = 4;
/// The same while the disk serves reads that clients wait for.
const BUSY_READS_MAX: usize = 2;
/// Ranges waiting for their turn, as many as policy asks for at once. More are not read ahead.
const QUEUE_MAX: usize = 64;

impl Core {
    /// True if reading ahead is worth it for this disk: it is cached and its origin is slow.
    pub fn reads_ahead(&self, disk: DiskId) -> bool {
        self.opts.prefetch
            && self.cache.stage.capacity() > 0
            && self.flash.takes_writes()
            && !self.quiescing
            && self.disk(disk).is_some_and(|d| {
                d.attached
                    && d.has_origin()
                    && !d.held
                    && d.cfg.mode != Mode::Off
                    && (d.origin.seek_ns == 0 || d.origin.seek_ns >= self.opts.fast_origin_ns)
            })
    }

    /// Queues what policy wishes for and sends what may be sent.
    pub fn read_ahead(&mut self, wishes: &[(Range, Source)], fx: &mut Effects) {
        if self.destaging.others_wait {
            return;
        }
        let room = QUEUE_MAX.saturating_sub(self.cache.ahead.queue.len());
        self.cache.ahead.queue.extend(wishes.iter().take(room));
        self.pump_ahead(fx);
    }

    fn pump_ahead(&mut self, fx: &mut Effects) {
        let mut at = 0;
        while self.cache.ahead.reads.len() < READS_MAX {
            let Some((range, source)) = self.cache.ahead.queue.get(at).copied() else {
                return;
            };
            let (disk, block) = disk_and_block(range.key);
            if !self.reads_ahead(disk) {
                self.cache.ahead.queue.remove(at);
                continue;
            }
            if self.ahead_is_busy(disk) {
                at += 1;
                continue;
            }
            let end = block + u64::from(range.count);
            match self.send_ahead(disk, block, end, source, fx) {
                Some(rest) if rest < end => {
                    if let Some((range, _)) = self.cache.ahead.queue.get_mut(at) {
                        range.key = policy_key(disk, rest);
                        range.count = (end - rest) as u32;
                    }
                }
                _ => {
                    self.cache.ahead.queue.remove(at);
                }
            }
        }
    }

    /// True if the disk has as many reads ahead in flight as it may have.
    fn ahead_is_busy(&self, disk: DiskId) -> bool {
        let ours = self
            .cache
            .ahead
            .reads
            .iter()
            .filter(|(_, r)| r.disk == disk);
        let ours = ours.count();
        let Some(d) = self.disk(disk) else {
            return true;
        };
        let reading = d.tickets.iter().filter(|t| t.is_reading()).count();
        let max = if reading > ours {
            BUSY_READS_MAX
        } else {
            DISK_READS_MAX
        };
        ours >= max || d.tickets.len() >= FILLS_MAX
    }

    /// Sends a read of the first part of `block..end` that can be read; returns where to go on.
    /// `None`: nothing of it can.
    fn send_ahead(
        &mut self,
        disk: DiskId,
        block: u64,
        end: u64,
        source: Source,
        fx: &mut Effects,
    ) -> Option<u64> {
        let d = self.disk(disk)?;
        let end = end.min(d.blocks);
        let unused = self.cache.stage.unused() + self.cache.ahead.blocks;
        let room = (self.cache.stage.capacity() / UNUSED_SHARE).saturating_sub(unused) as u64;
        let mut from = block;
        // What others hold or read: begin behind it, end before it. Each turn leaves one behind.
        let held = |at: u64| {
            let locks = d.locks.meeting(at, at + 1).map(|l| l.end);
            let tickets = d.tickets.iter();
            let tickets = tickets.filter(|t| t.start <= at && at < t.end);
            locks.chain(tickets.map(|t| t.end)).next()
        };
        while from < end {
            if let Some(behind) = held(from) {
                from = behind;
            } else if self.present(disk, from) {
                from += 1;
            } else {
                break;
            }
        }
        let starts = d.tickets.iter().map(|t| t.start);
        let starts = starts.filter(|s| *s > from).chain(d.locks.next_start(from));
        let next = starts.min().unwrap_or(end);
        let limit = end.min(next).min(from + room.min(RUN_MAX));
        let mut to = from;
        while to < limit && !self.present(disk, to) {
            to += 1;
        }
        if to <= from {
            return None;
        }
        let count = to - from;
        let len = d.clip(from, count);
        let ticket = self.take_ticket(disk, from, to, None);
        if let Some(d) = self.disk_mut(disk) {
            d.counters.prefetched += count;
        }
        let bytes = (count * 4096) as usize;
        let data = Buf::zeroed(bytes).slice(0, bytes);
        let piece = data.sub(0, len as usize);
        self.cache.ahead.blocks += count as usize;
        let read = self.cache.ahead.reads.insert(AheadRead {
            disk,
            block: from,
            count,
            source,
            ticket,
            data,
            used: Default::default(),
            joined: SmallVec::new(),
        });
        let io = Io::read(Target::Origin(disk), from * 4096, piece);
        let io = io.summed(true).in_background();
        self.io(fx, OpCtx::Ahead { read }, io);
        Some(to)
    }

    /// How many blocks from `block` a client's read may leave to a read ahead, which it then
    /// waits for, and where the next read ahead begins if that is none.
    pub fn join_ahead(&mut self, req: ReqId, disk: DiskId, block: u64, max: u64) -> (u64, u64) {
        let mut next = u64::MAX;
        let mut found = None;
        for (at, r) in &self.cache.ahead.reads {
            if r.disk != disk || r.end() <= block {
                continue;
            }
            let ticket = self
                .disk(disk)
                .and_then(|d| d.tickets.iter().find(|t| t.id == r.ticket));
            if ticket.is_none_or(Ticket::is_cancelled) {
                continue;
            }
            if r.block <= block {
                found = Some(at);
                break;
            }
            next = next.min(r.block);
        }
        let Some(r) = found.map(|at| &mut self.cache.ahead.reads[at]) else {
            return (0, next);
        };
        let count = max.min(r.end() - block);
        r.joined.push(Joined { req, block, count });
        let (source, mut first) = (r.source, 0);
        for i in block - r.block..block - r.block + count {
            let how = if r.is_used(i) {
                Use::Hit
            } else {
                first += 1;
                Use::Late(source)
            };
            r.used[i as usize / 64] |= 1 << (i % 64);
            self.cache
                .policy
                .used(policy_key(disk, r.block + i), false, how);
        }
        if let Some(d) = self.disk_mut(disk) {
            d.counters.prefetch_used += first;
            d.counters.prefetch_late += first;
        }
        (count, next)
    }

    pub fn ahead_done(&mut self, read: usize, done: IoDone, now: u64, fx: &mut Effects) {
        let mut r = self.cache.ahead.reads.remove(read);
        self.cache.ahead.blocks -= r.count as usize;
        let raced = self.opts.faults.has(Fault::KeepRacedPrefetch);
        let failed = !self.flash.takes_writes();
        let (mut valid, mut staged) = (false, false);
        if let Some(d) = self.disk_mut(r.disk) {
            let cancelled = d.ticket(r.ticket).is_none_or(|t| t.is_cancelled()) && !raced;
            d.drop_ticket(r.ticket);
            valid = done.result.is_ok() && !cancelled;
            staged = valid && !failed && d.attached && d.cfg.mode != Mode::Off;
        }
        self.origin_was_read(r.disk);
        if valid {
            r.data.bytes_mut()[done.op.len as usize..].fill(0);
        }
        if staged {
            let stay = |i| {
                let used = r.is_used(i);
                Stay {
                    freq: 0,
                    // A block that came too late is worth its place on flash like any miss.
                    covered: !used,
                    unused: (!used).then_some(r.source),
                    written: false,
                }
            };
            let crcs = padded_sums(done.op.crcs, done.op.len as usize, &r.data);
            self.stage_put(r.disk, r.block, &r.data, &crcs, stay);
        } else {
            self.waste(r.disk, r.source, r.unused());
        }
        for j in &r.joined {
            if valid {
                self.copy_joined(j, &r);
            } else {
                self.read_range(j.req, j.block, j.block + j.count, Fill::Cached, fx);
            }
            self.read_part_done(j.req, now, fx);
        }
        self.pump_ahead(fx);
    }

    fn copy_joined(&mut self, j: &Joined, r: &AheadRead) {
        self.copy_blocks(j.req, j.block..j.block + j.count, &r.data, r.block);
        if let Some(d) = self.disk_mut(r.disk) {
            d.counters.read_miss_bytes += j.count * 4096;
        }
    }

    /// Blocks read ahead are given up without a use.
    fn waste(&mut self, disk: DiskId, source: Source, count: u64) {
        let stay = Stay {
            freq: 0,
            covered: true,
            unused: Some(source),
            written: false,
        };
        for _ in 0..count {
            self.cache.policy.leave(stay, true);
        }
        if let Some(d) = self.disk_mut(disk) {
            d.counters.prefetch_wasted += count;
        }
    }
}
