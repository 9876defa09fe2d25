//! What the engine knows of one disk: its settings, who holds which range, what is dirty.

pub(crate) mod ready;
pub(crate) mod spans;

use crate::api::{DiskConfig, Home, Mode};
use crate::blocks::blockset::BlockSet;
use crate::blocks::runset::RunSet;
use crate::disk::spans::Spans;
use crate::ids::ReqId;
use crate::origin::Origin;
use crate::origin::order::Order;
use crate::origin::trouble::Trouble;
use crate::stats::{DiskCounters, Latency};
use hearth_io::{BLOCK, BufSlice};
use hearth_policy::Sequential;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// A copy of the origin on its way to flash. While it lives, a write to its range cancels its
/// fill: what was read is older than what the write leaves behind.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub id: u64,
    pub start: u64,
    pub end: u64,
    /// What was written meanwhile. What still reads the origin is then given up as a whole; of
    /// what waits to be appended, which may be long, the rest stays good.
    pub cancelled: SmallVec<[(u64, u64); 1]>,
    /// The copy, in the memory that is written to flash; `None` while the origin is still read. Until it is in the
    /// index it answers reads.
    pub copy: Option<BufSlice>,
    /// Blocks of the copy that clients have read.
    pub used: RunSet,
}

impl Ticket {
    pub fn is_reading(&self) -> bool {
        self.copy.is_none()
    }

    /// The first blocks in a row, within `start..end`, of which it has a valid copy.
    fn valid_run(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        self.copy.as_ref()?;
        let (start, end) = (start.max(self.start), end.min(self.end));
        let from = (start..end).find(|block| !self.voids(*block))?;
        let to = (from..end).find(|block| self.voids(*block));
        Some((from, to.unwrap_or(end)))
    }

    pub fn is_cancelled(&self) -> bool {
        !self.cancelled.is_empty()
    }

    /// True if this block was written while it was read for a fill.
    pub fn voids(&self, block: u64) -> bool {
        self.cancelled.iter().any(|&(s, e)| s <= block && block < e)
    }
}

/// Times a sound device must refuse a dirty block alone before the block counts as lost, and the pause
/// after the first; it doubles.
const REFUSALS_MAX: u32 = 4;
const REFUSAL_PAUSE_NS: u64 = 1_000_000_000;
/// Longest that what is written back waits for the origin to answer a client's read.
const LET_BY_MAX_NS: u64 = 250_000_000;

/// How often a sound device has refused a dirty block that was read alone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refusals {
    count: u32,
    not_before_ns: u64,
}

impl Refusals {
    /// It was refused once more. True: it counts as lost.
    pub fn note(&mut self, now: u64) -> bool {
        if !self.waits(now) {
            self.not_before_ns = now + (REFUSAL_PAUSE_NS << self.count);
            self.count += 1;
        }
        self.count >= REFUSALS_MAX
    }

    /// It is too early to ask again.
    pub fn waits(self, now: u64) -> bool {
        now < self.not_before_ns
    }
}

/// One disk.
#[derive(Debug)]
pub(crate) struct Disk {
    pub cfg: DiskConfig,
    /// Blocks, the last one perhaps partial.
    pub blocks: u64,
    pub attached: bool,
    /// Shut out or taken over: see `fence`.
    pub fenced: bool,
    /// Writes, discards and zeroings that hold their blocks alone.
    pub locks: Spans,
    /// Those that wait for one who came before.
    pub lock_queue: Spans,
    /// Of these, those that wait for nobody any more, by when they came.
    pub unlocked: BTreeSet<(u64, ReqId)>,
    pub tickets: Vec<Ticket>,
    pub dirty: BlockSet,
    /// Blocks that are zeros, which the origin has not been told.
    pub zero: RunSet,
    /// Blocks the client wants to keep their space when they become zeros (NBD's NO_HOLE). In
    /// RAM only: after a crash such a range may become a hole, which reads the same.
    pub solid: RunSet,
    /// Dirty blocks whose data is lost.
    pub lost: BlockSet,
    /// Dirty blocks among which flash has refused one: they are read alone.
    pub doubtful: BlockSet,
    /// Dirty blocks that a failed flash device has refused alone, once.
    pub refused: BlockSet,
    /// Dirty blocks that a sound device has refused alone.
    pub refusals: BTreeMap<u64, Refusals>,
    /// Number of the last record that says a copy is void.
    pub dropped_ord: u64,
    /// The disk is about to grow: number of the record that makes copies of its odd last block void.
    /// Until it has grown no new copy is made.
    pub voiding: Option<u64>,
    /// It was given an origin, or is held: what was appended up to then.
    pub moved_ord: u64,
    /// It is on its way onto flash alone: nothing of it is written back, and no copies of its origin are made.
    pub held: bool,
    /// The origin may have changed since its clean copies were made. Until they were compared with it
    /// they answer no reads, and nothing is written back: it may be another disk.
    pub unverified: bool,
    /// Its clean copies are being dropped; ranges where that has still to be done.
    pub dropping: Option<Vec<(u64, u64)>>,
    /// Newest eviction of a segment in which a copy went. No record says so: until the segment is free,
    /// a crash brings the copy back.
    pub evicted: u64,
    pub origin: Origin,
    /// Of an ordered disk: what its origin does not have, in order.
    pub order: Option<Box<Order>>,
    /// How far behind its origin may be, if it is ordered; 0 is no limit.
    pub max_age_ns: u64,
    /// Requests that wait until their range is clean.
    pub clean_waiters: Vec<ReqId>,
    /// Requests that waited for a range are being let in.
    pub waking_locks: bool,
    /// Ord of the last record that calls something clean.
    pub cleaned_ord: u64,
    pub drain: bool,
    /// Of a scratch disk of which a crash left nothing: what was zeroed since. What is not there otherwise cannot be
    /// read, for nobody knows that it was zeros.
    pub void: Option<RunSet>,
    /// It is off, and what the heads say of it may not count: they are closed before it is cached again.
    pub heads_void: bool,
    /// It is off, and it is stored outside the log that nothing flash has of it counts.
    pub log_free: bool,
    /// Clock hand for evicting this disk's own blocks when it is over its maximum.
    pub own_hand: u32,
    pub cached: u64,
    pub in_flight: u64,
    /// Streams of reads.
    pub sequential: Sequential,
    /// Streams of writes past the cache.
    pub written: Sequential,
    pub dirty_since_ns: u64,
    pub last_request_ns: u64,
    pub counters: DiskCounters,
    pub hit_latency: Latency,
    pub miss_latency: Latency,
    pub write_hit_latency: Latency,
    pub write_miss_latency: Latency,
}

impl Disk {
    /// False if it lives on flash alone: nothing of it is ever read from an origin or written to one.
    pub fn has_origin(&self) -> bool {
        matches!(self.cfg.home, Home::Origin | Home::Moving)
    }

    /// The first run of blocks of a byte range of which `of` says the same something, as (offset, length, what it says);
    /// or how far it says nothing. No more is looked at than may be under the lock.
    pub fn first_run<T: PartialEq>(
        &self,
        offset: u64,
        end: u64,
        of: impl Fn(u64) -> Option<T>,
    ) -> Result<(u64, u64, T), u64> {
        const LOOK_MAX: u64 = 16_384;
        let first = offset / BLOCK;
        let last = end.min(self.cfg.size).div_ceil(BLOCK).min(first + LOOK_MAX);
        let found = (first..last).find_map(|block| Some((block, of(block)?)));
        let Some((from, what)) = found else {
            return Err((last * BLOCK).max(offset + 1));
        };
        let ends = |block: &u64| of(*block).as_ref() != Some(&what);
        let to = (from + 1..last).find(ends).unwrap_or(last);
        Ok((from * BLOCK, (to - from) * BLOCK, what))
    }

    /// What flash has of it was put there under other rules than hold for `home`.
    pub fn lives_otherwise(&self, home: Home) -> bool {
        let with_origin = |home| matches!(home, Home::Origin | Home::Moving);
        self.cfg.home != home && !(with_origin(self.cfg.home) && with_origin(home))
    }

    /// Flash was promised for all of it, so its dirty blocks are not counted with those of others.
    pub fn is_promised(&self) -> bool {
        self.cfg.home != Home::Origin
    }

    /// Nothing of it has to survive a crash.
    pub fn is_scratch(&self) -> bool {
        self.cfg.home == Home::Scratch
    }

    /// Could a power cut take from the origin what clean copies have? Then they must not outlive one.
    pub fn may_differ(&self) -> bool {
        let copies = self.attached && self.has_origin() && self.cached > self.dirty.len();
        copies && !self.origin.sync.is_guarded()
    }

    /// True if the disk caches, and waits for a flush of its origin that makes durable what was written
    /// without an intent.
    pub fn waits_unguarded(&self) -> bool {
        let caches = self.has_origin() && self.cfg.mode != Mode::Off;
        caches && !self.origin.sync.is_guarded()
    }

    /// Sound flash has refused this dirty block, too lately to be asked again.
    pub fn is_refused(&self, block: u64, now: u64) -> bool {
        self.refusals.get(&block).is_some_and(|r| r.waits(now))
    }

    /// A block became clean or is not cached any more.
    pub fn no_longer_dirty(&mut self, block: u64) {
        for set in [
            &mut self.dirty,
            &mut self.lost,
            &mut self.doubtful,
            &mut self.refused,
        ] {
            set.remove(block);
        }
        self.refusals.remove(&block);
    }

    pub fn new(cfg: DiskConfig, region_blocks_min: u64) -> Disk {
        let mut disk = Disk {
            blocks: 0,
            attached: true,
            fenced: false,
            locks: Spans::default(),
            lock_queue: Spans::default(),
            unlocked: BTreeSet::new(),
            tickets: Vec::new(),
            dirty: BlockSet::default(),
            zero: RunSet::default(),
            solid: RunSet::default(),
            lost: BlockSet::default(),
            doubtful: BlockSet::default(),
            refused: BlockSet::default(),
            refusals: BTreeMap::new(),
            dropped_ord: 0,
            evicted: 0,
            origin: Origin::new(region_blocks_min),
            order: None,
            max_age_ns: 0,
            clean_waiters: Vec::new(),
            waking_locks: false,
            cleaned_ord: 0,
            voiding: None,
            moved_ord: 0,
            held: false,
            unverified: false,
            dropping: None,
            drain: false,
            void: None,
            heads_void: false,
            log_free: false,
            own_hand: 0,
            cached: 0,
            in_flight: 0,
            sequential: Sequential::default(),
            written: Sequential::default(),
            dirty_since_ns: 0,
            last_request_ns: 0,
            counters: DiskCounters::default(),
            hit_latency: Latency::default(),
            miss_latency: Latency::default(),
            write_hit_latency: Latency::default(),
            write_miss_latency: Latency::default(),
            cfg,
        };
        disk.set_size(disk.cfg.size);
        disk
    }

    /// Has nobody written this block, which is not on flash, since a crash took the contents of the disk?
    pub fn is_void(&self, block: u64) -> bool {
        self.void
            .as_ref()
            .is_some_and(|zeroed| !zeroed.contains(block))
    }

    /// Gives it its new size.
    pub fn resize(&mut self, size: u64) {
        let before = self.blocks;
        self.set_size(size);
        // What comes with it never held anything.
        if let Some(zeroed) = self.void.as_mut().filter(|_| self.blocks > before) {
            zeroed.insert_range(before, self.blocks);
        }
        self.voiding = None;
    }

    fn set_size(&mut self, size: u64) {
        self.cfg.size = size;
        self.blocks = size.div_ceil(4096);
        self.origin.intents.fit(self.blocks);
    }

    /// Bytes of `count` blocks from `block` that lie inside the disk.
    pub fn clip(&self, block: u64, count: u64) -> u64 {
        (self.cfg.size.saturating_sub(block * 4096)).min(count * 4096)
    }

    /// True if a write holds any block of `start..end`.
    pub fn locked(&self, start: u64, end: u64) -> bool {
        self.locks.meets(start, end)
    }

    /// Does what is written back wait for a client's read that the origin has not answered? A drive serves what is near
    /// its arm first, and the next run of a sweep always is: one run after the other would leave the read
    /// waiting for as long as there are any. So each run is paid with an answer, unless none comes.
    pub fn lets_readers_by(&self, now: u64) -> bool {
        let way = &self.origin.destage;
        !way.let_by
            && now.saturating_sub(way.begun_ns) < LET_BY_MAX_NS
            && self.tickets.iter().any(Ticket::is_reading)
    }

    /// Cancels the fills of a range; true if one of them may already be in the log.
    pub fn cancel_fills(&mut self, start: u64, end: u64) -> bool {
        let mut appended = false;
        for t in self
            .tickets
            .iter_mut()
            .filter(|t| t.start < end && start < t.end)
        {
            if !t.is_cancelled() {
                self.counters.fills_cancelled += 1;
            }
            // A block that is written all the time is named once.
            let (from, to) = (start.max(t.start), end.min(t.end));
            if !t.cancelled.iter().any(|&(s, e)| s <= from && to <= e) {
                t.cancelled.push((from, to));
            }
            appended |= !t.is_reading();
        }
        appended
    }

    /// The first blocks in a row, within `start..end`, of which a valid copy is on its way to flash: where its ticket
    /// is in the list, the first block and the end.
    pub fn queued_run(&self, start: u64, end: u64) -> Option<(usize, u64, u64)> {
        let tickets = self.tickets.iter().enumerate();
        let runs = tickets.filter_map(|(at, t)| t.valid_run(start, end).map(|run| (at, run)));
        let first = runs.min_by_key(|(_, (from, _))| *from);
        first.map(|(at, (from, to))| (at, from, to))
    }

    /// True if a clean copy of this block is on its way to flash and no write has made it void since.
    pub fn copy_queued(&self, block: u64) -> bool {
        self.queued_run(block, block + 1).is_some()
    }

    pub fn ticket(&mut self, id: u64) -> Option<&mut Ticket> {
        self.tickets.iter_mut().find(|t| t.id == id)
    }

    pub fn drop_ticket(&mut self, id: u64) {
        if let Some(at) = self.tickets.iter().position(|t| t.id == id) {
            self.tickets.swap_remove(at);
        }
    }

    /// True if any block of the range is newer on flash than on the origin.
    pub fn range_dirty(&self, start: u64, end: u64) -> bool {
        self.dirty.first_in(start, end).is_some() || self.zero.first_in(start, end).is_some()
    }

    /// True if a run that is being destaged touches the range.
    pub fn destaging(&self, start: u64, end: u64) -> bool {
        self.origin.destage.is_writing(start, end)
    }

    /// Blocks cached beyond the disk's maximum.
    pub fn excess(&self) -> u64 {
        match self.cfg.max_bytes / 4096 {
            0 => 0,
            max => self.cached.saturating_sub(max),
        }
    }

    /// What keeps its dirty blocks from the origin, if anything does. Without any, nothing is kept.
    pub fn trouble(&self) -> Option<Trouble> {
        let owes = self.is_dirty() || !self.origin.destage.written.is_empty();
        self.origin
            .destage
            .trouble
            .filter(|_| owes && self.has_origin())
    }

    /// Anything the origin does not have?
    pub fn is_dirty(&self) -> bool {
        let versions = self.order.as_ref().is_some_and(|o| !o.is_empty());
        !self.dirty.is_empty() || !self.zero.is_empty() || versions
    }

    /// True if the log has records of the disk that must be logged again before their segment is freed.
    pub fn is_noted(&self) -> bool {
        !self.origin.intents.is_empty() || !self.zero.is_empty()
    }

    /// True if the disk can have something to do without any event, only because time has passed.
    pub fn is_restless(&self) -> bool {
        let waits = !self.origin.intents.is_empty() || self.waits_unguarded();
        self.attached && self.has_origin() && (waits || self.is_dirty() || self.excess() > 0)
    }

    /// True if the disk has something that the destager may have to bring to the origin.
    pub fn owes_destager(&self) -> bool {
        let barred = self.held || self.fenced || self.unverified && self.dropping.is_none();
        self.attached && self.has_origin() && !barred && self.is_dirty()
    }

    /// The same, and nothing speaks against it now. What an origin that hangs is given only comes back to
    /// be given again.
    pub fn may_destage(&self, now: u64) -> bool {
        let waits = self.origin.destage.hangs || now < self.origin.destage.not_before_ns;
        self.owes_destager() && !waits
    }

    /// With `drain` or before a stop: is there something left to do?
    pub fn is_draining(&self, stopping: bool) -> bool {
        let owes = self.is_dirty() && !self.held || !self.origin.destage.written.is_empty();
        let unflushed = !self.origin.intents.is_empty() || !self.origin.sync.is_durable();
        let attached = self.attached && self.has_origin();
        attached && (self.drain && (owes || unflushed) || stopping && unflushed)
    }

    /// Off, and the index knows no copy of this disk, and none is on its way.
    pub fn is_off_without_copies(&self) -> bool {
        self.cfg.mode == Mode::Off
            && self.cached == 0
            && self.tickets.is_empty()
            && self.origin.intents.is_empty()
    }

    /// It takes no step that waits for the log.
    pub fn is_log_free(&self) -> bool {
        self.log_free && self.cfg.mode == Mode::Off && self.cached == 0
    }

    /// What reaches its origin keeps the order of flushes.
    pub fn is_ordered(&self) -> bool {
        self.cfg.mode == Mode::WriteBackOrdered && self.has_origin()
    }

    pub fn writes_to_flash(&self) -> bool {
        self.cfg.mode.is_write_back() || !self.has_origin()
    }
}
