//! The engine's cache without an engine: what it would hit, and when.
//!
//! [`Cache`](crate::Cache) asks policy the engine's questions over a log without segments and a disk that
//! answers at once. That is what rules are compared by; it is not what a user gets. Here the engine's
//! ways are followed as far as they decide what is hit: misses go straight to flash while it fills
//! and wait in the RAM stage later, long runs are judged at once, a place in the stage stays taken when its
//! block is overwritten, a batch costs a block for its descriptor, segments are freed ahead of need and in any order, long
//! streams pass by, blocks are dirty until the destager comes, and what is read ahead waits for an
//! [`Arm`]. How far the two agree is measured by `cargo run -p hearth-sim --example agree`.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use hashbrown::HashMap;
use hearth_policy::cleaning::{Cleaner, Fate, HEADS_MAX, Heads, Order, Plan, Why, most_of};
use hearth_policy::prefetch::Source;
use hearth_policy::{Config, FREQ_MAX, Place, Policy, Range, Sequential, Stay, Use, Verdict};

use crate::cache::WriteMode;
use crate::device::{Arm, Device, US};
use crate::outcome::Outcome;
use crate::run::Settings;
use crate::workload::Request;

/// Newcomers that the block to beat turns away before the next one takes its place.
const RIVAL_TRIES: u32 = 128;
/// Slots in which a block to beat is looked for.
const RIVAL_SCAN: u32 = 64;
/// At least one block in so many of a segment that is freed goes.
const DROP_SHARE: u32 = 16;
/// Share of the stage that one miss may take; longer ones are judged at once.
const RUN_SHARE: usize = 4;
/// Longest read of the origin for the cache.
const RUN_MAX: u64 = 256;
/// Share of the stage that blocks read ahead may take before they are used.
const UNUSED_SHARE: usize = 2;
/// Reads ahead in flight, and the same while a client waits for the disk.
const READS_MAX: usize = 4;
const BUSY_READS_MAX: usize = 2;
/// Ranges that wait to be read ahead.
const QUEUE_MAX: usize = 64;
/// What nobody waits for is appended when so many blocks have gathered or the first waited so long.
const LAZY_BLOCKS: u32 = 96;
const LAZY_NS: u64 = 100_000_000;
/// Entries of a batch.
const BATCH_MAX: u32 = 126;
/// What flash takes to answer.
const FLASH_NS: u64 = 100 * US;
/// Shares of flash, in percent, from which the destager works when it need not be noticed, and at all costs.
const DIRTY_LOW: u64 = 20;
const DIRTY_HASTE: u64 = 55;
/// No request for so long is quiet.
const IDLE_NS: u64 = 300_000_000;
/// Longest pause after a run of the destager, in times of what it took.
const PAUSE_MAX: u64 = 16;
/// Slots looked at when a disk at its maximum makes room.
const OWN_SCAN: u32 = 8192;
/// Bits of a key below the disk.
const DISK_SHIFT: u32 = 40;
const BLOCK: u64 = 4096;

/// A log and how it is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogShape {
    /// Segments.
    pub segments: u32,
    /// Blocks of data in each, descriptors of batches among them.
    pub data: u32,
    /// Segments kept free.
    pub reserve: u32,
    /// Does a batch take a block for its descriptor?
    pub descriptors: bool,
}

/// Blocks of a pool's segments, less the summary.
const DATA: u32 = 254;
/// Segments below which a cache is too small to be a pool.
const SEGMENTS_MIN: usize = 64;
/// Segments of such a cache.
const SEGMENTS_SMALL: usize = 128;

impl LogShape {
    /// The log of a pool that can hold `blocks`. Caches that are too small for a pool are given as
    /// many segments as keep what the engine keeps free small, and no descriptors.
    pub fn of(blocks: usize) -> LogShape {
        if blocks >= SEGMENTS_MIN * DATA as usize {
            let segments = (blocks / DATA as usize) as u32;
            return LogShape {
                segments,
                data: DATA,
                reserve: LogShape::kept_free(segments),
                descriptors: true,
            };
        }
        let data = (blocks / SEGMENTS_SMALL).max(1);
        LogShape {
            segments: (blocks / data).max(8) as u32,
            data: data as u32,
            reserve: 2,
            descriptors: false,
        }
    }

    /// Segments that the engine keeps free of so many.
    pub fn kept_free(segments: u32) -> u32 {
        let ahead = match segments {
            ..64 => 2,
            _ => (segments / 256).clamp(1, 16),
        };
        (segments / 200).clamp(2, 8) + ahead
    }

    /// Blocks of all segments.
    pub fn blocks(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.data)
    }
}

/// Which segment of the log is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// The oldest, as the engine once did.
    Oldest,
    /// The one that costs least for what it gives (`docs/decisions/0006-cleaning.md`).
    Cheapest {
        /// What a block written to flash costs, in 1024ths of a hit.
        price: u64,
        /// What is appended apart.
        heads: Heads,
    },
}

impl Default for Freed {
    /// As in the engine, at its price.
    fn default() -> Freed {
        Freed::Cheapest {
            price: 56,
            heads: Heads::One,
        }
    }
}

/// What a disk is set to, and the pool it is in.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Rules and sizes.
    pub config: Config,
    /// What happens to written data.
    pub mode: WriteMode,
    /// The log.
    pub log: LogShape,
    /// How it comes free.
    pub freed: Freed,
    /// Blocks after which a sequential read stream is not cached; 0 for never.
    pub seq_cutoff: u64,
    /// Blocks of the unit in which misses are filled.
    pub unit: u64,
    /// Blocks of flash kept for each disk.
    pub min: u64,
    /// Most blocks of flash of each disk; 0 for no limit.
    pub max: u64,
    /// The origin.
    pub device: Device,
}

#[derive(Clone, Copy, Debug)]
struct Copy {
    seg: u32,
    slot: u32,
    freq: u8,
    dirty: bool,
}

#[derive(Clone, Copy, Debug)]
struct Staged {
    seq: u64,
    stay: Stay,
    /// Was rewritten often, and is a guest's write.
    why: Why,
}

/// A read ahead on its way.
#[derive(Debug)]
struct Coming {
    key: u64,
    count: u64,
    source: Source,
    ready_ns: u64,
    used: Vec<bool>,
    cancelled: bool,
}

/// What happens when the origin has answered.
#[derive(Debug)]
enum Then {
    /// A miss comes in: it waits in RAM, or goes to flash, or neither.
    Filled {
        key: u64,
        count: u64,
        stage: bool,
        admit: bool,
        ticket: u64,
    },
    /// The read ahead with this number comes in.
    Ahead(u64),
    /// A write past the cache is through; copies of what it covers were on their way to flash.
    Written { key: u64, count: u64, queued: bool },
    /// The fills that were sent first are on flash.
    Appended,
}

#[derive(Debug)]
struct Event {
    at: u64,
    n: u64,
    then: Then,
}

impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        (self.at, self.n) == (other.at, other.n)
    }
}
impl Eq for Event {}
impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Event {
    fn cmp(&self, other: &Event) -> std::cmp::Ordering {
        (self.at, self.n).cmp(&(other.at, other.n))
    }
}

/// A clean copy on its way to flash.
#[derive(Clone, Copy, Debug)]
struct Fill {
    key: u64,
    freq: u8,
    why: Why,
    void: bool,
}

/// What has gathered to be appended to a head.
#[derive(Clone, Copy, Debug, Default)]
struct Batch {
    since_ns: u64,
    entries: u32,
}

/// The cache.
#[derive(Debug)]
pub struct Twin {
    policy: Policy,
    setup: Setup,
    cleaner: Cleaner,
    index: HashMap<u64, Copy>,
    stage: HashMap<u64, Staged>,
    /// The stage's places, oldest first; the block of one may be gone.
    places: VecDeque<(u64, u64)>,
    /// Staged blocks that were read ahead and not used.
    unused: usize,
    segments: Vec<Vec<u64>>,
    free: Vec<u32>,
    heads: [Option<u32>; HEADS_MAX],
    batches: [Batch; HEADS_MAX],
    /// When a segment was opened, by a count; closed ones in that order.
    opened: Vec<u64>,
    order: VecDeque<u32>,
    hand: (u32, u32),
    losses: u32,
    dirty: BTreeSet<u64>,
    sweep: u64,
    pause_ns: u64,
    last_ns: u64,
    /// Blocks on flash of each disk, and where each looks for what of its own may go.
    own: HashMap<u64, (u64, u32)>,
    sequential: HashMap<u64, Sequential>,
    arm: Arm,
    /// The same disk without a cache.
    bare: Arm,
    events: BinaryHeap<Reverse<Event>>,
    coming: Vec<(u64, Coming)>,
    ahead: VecDeque<(Range, Source)>,
    wishes: Vec<(Range, Source)>,
    /// Misses on their way: number, range, overwritten meanwhile.
    reading: Vec<(u64, u64, u64, bool)>,
    /// Ranges being written past the cache, and until when.
    writing: Vec<(u64, u64, u64)>,
    /// Fills that gather to be appended; they are nowhere else meanwhile, and nowhere if overwritten.
    queue: Vec<Fill>,
    queued_ns: u64,
    /// The same on the way to flash.
    sent: VecDeque<Vec<Fill>>,
    now: u64,
    numbers: u64,
    /// What happened.
    pub out: Outcome,
}

/// No segment.
const NOWHERE: u32 = u32::MAX;

impl Twin {
    /// An empty cache.
    pub fn new(setup: Setup) -> Twin {
        let LogShape {
            segments,
            data,
            reserve,
            ..
        } = setup.log;
        let (order, heads, price) = match setup.freed {
            Freed::Oldest => (Order::Oldest, Heads::One, 0),
            Freed::Cheapest { price, heads } => (Order::Index, heads, price),
        };
        let taken = u64::from(reserve) + heads.count() as u64;
        let room = u64::from(segments).saturating_sub(taken).max(1) * u64::from(data);
        let plan = Plan {
            order,
            heads,
            most: most_of(room),
            room,
            span: 8,
            price,
        };
        Twin {
            policy: Policy::new(setup.config.clone()),
            cleaner: Cleaner::new(plan, segments, data),
            index: HashMap::new(),
            stage: HashMap::new(),
            places: VecDeque::new(),
            unused: 0,
            segments: vec![Vec::new(); segments as usize],
            free: (0..segments).rev().collect(),
            heads: [None; HEADS_MAX],
            batches: [Batch::default(); HEADS_MAX],
            opened: vec![0; segments as usize],
            order: VecDeque::new(),
            hand: (NOWHERE, 0),
            losses: 0,
            dirty: BTreeSet::new(),
            sweep: 0,
            pause_ns: 0,
            last_ns: 0,
            own: HashMap::new(),
            sequential: HashMap::new(),
            arm: Arm::new(setup.device),
            bare: Arm::new(setup.device),
            events: BinaryHeap::new(),
            coming: Vec::new(),
            ahead: VecDeque::new(),
            wishes: Vec::new(),
            reading: Vec::new(),
            writing: Vec::new(),
            queue: Vec::new(),
            queued_ns: 0,
            sent: VecDeque::new(),
            now: 0,
            numbers: 0,
            out: Outcome::default(),
            setup,
        }
    }

    /// Serves a request that comes at `now_ns`, not before the one before; returns when it is answered.
    pub fn request(&mut self, now_ns: u64, request: &Request) -> u64 {
        self.advance(now_ns);
        self.now = self.now.max(now_ns);
        self.policy.tick(self.now / US);
        let (key, count) = (request.block, u64::from(request.count));
        let done = if request.write {
            self.write(key, count)
        } else {
            self.read(key, count)
        };
        self.last_ns = self.now;
        self.destage();
        done
    }

    /// Lets everything end that is under way.
    pub fn settle(&mut self) {
        self.advance(u64::MAX);
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn later(&mut self, at: u64, then: Then) {
        let n = self.number();
        self.events.push(Reverse(Event { at, n, then }));
    }

    fn advance(&mut self, to: u64) {
        loop {
            let next = self.events.peek().map_or(u64::MAX, |e| e.0.at);
            let due = self.queued_ns.saturating_add(LAZY_NS);
            if !self.queue.is_empty() && due <= next.min(to) {
                self.now = self.now.max(due);
                self.send_queued();
                continue;
            }
            if next > to {
                break;
            }
            let Some(Reverse(event)) = self.events.pop() else {
                break;
            };
            self.now = self.now.max(event.at);
            match event.then {
                Then::Ahead(n) => self.ahead_came(n),
                Then::Filled {
                    key,
                    count,
                    stage,
                    admit,
                    ticket,
                } => {
                    let valid = match self.reading.iter().position(|r| r.0 == ticket) {
                        Some(at) => !self.reading.swap_remove(at).3,
                        None => false,
                    };
                    if valid && stage {
                        (key..key + count).for_each(|k| self.put_in_stage(k, FRESH, Why::Filled));
                    } else if valid && admit {
                        (key..key + count).for_each(|k| self.fill(k, 0, Why::Filled));
                    }
                }
                Then::Written { key, count, queued } => self.written(key, count, queued),
                Then::Appended => self.appended(),
            }
            self.pump_ahead();
        }
        // What nobody asked for is done while nobody asks.
        if to != u64::MAX && to.saturating_sub(self.last_ns) > IDLE_NS {
            self.destage_idle(to);
        }
    }

    fn read(&mut self, key: u64, count: u64) -> u64 {
        let end = key + count;
        let (offset, len) = (key * BLOCK, count * BLOCK);
        let stream = self
            .sequential
            .entry(key >> DISK_SHIFT)
            .or_default()
            .observe(offset, len);
        let long = self.setup.seq_cutoff > 0 && stream > self.setup.seq_cutoff * BLOCK;
        let mut wishes = std::mem::take(&mut self.wishes);
        wishes.clear();
        let in_stream = self.policy.read(key, count as u32, &mut wishes);
        self.bare.serve(self.now, key, count);
        let (mut done, mut waited, mut at) = (self.now + FLASH_NS, false, key);
        self.out.reads += count;
        while at < end {
            if let Some(copy) = self.index.get_mut(&at) {
                copy.freq = Policy::touch(copy.freq);
                self.policy.used(at, false, Use::Hit);
                self.cleaner.hit();
                self.out.read_hits += 1;
                at += 1;
                continue;
            }
            if let Some(staged) = self.stage.get_mut(&at) {
                let how = match staged.stay.unused.take() {
                    Some(source) => {
                        self.unused -= 1;
                        self.out.prefetch_hits += 1;
                        Use::Prefetched(source)
                    }
                    None => {
                        staged.stay.freq = Policy::touch(staged.stay.freq);
                        staged.stay.covered = false;
                        Use::Hit
                    }
                };
                self.policy.used(at, false, how);
                self.out.read_hits += 1;
                waited |= how != Use::Hit;
                at += 1;
                continue;
            }
            waited = true;
            let mut to = at + 1;
            if let Some((_, read)) = self
                .coming
                .iter_mut()
                .find(|(_, r)| !r.cancelled && (r.key..r.key + r.count).contains(&at))
            {
                to = end.min(read.key + read.count);
                done = done.max(read.ready_ns);
                for i in at - read.key..to - read.key {
                    let first = !std::mem::replace(&mut read.used[i as usize], true);
                    let how = if first {
                        self.out.prefetch_late += 1;
                        Use::Late(read.source)
                    } else {
                        Use::Hit
                    };
                    self.policy.used(read.key + i, false, how);
                }
                at = to;
                continue;
            }
            let next = self
                .coming
                .iter()
                .filter(|(_, r)| !r.cancelled && r.key > at)
                .map(|(_, r)| r.key)
                .min()
                .unwrap_or(u64::MAX);
            let most = end.min(next).min(at + RUN_MAX);
            while to < most && !self.present(to) {
                to += 1;
            }
            (at..to).for_each(|k| self.policy.used(k, false, Use::Miss));
            done = done.max(self.miss(at, to - at, long));
            at = to;
        }
        if waited {
            self.policy
                .waited(key, count as u32, in_stream, &mut wishes);
        }
        if self.setup.config.prefetch && self.policy.stage() > 0 {
            let room = QUEUE_MAX.saturating_sub(self.ahead.len());
            self.ahead.extend(wishes.iter().take(room));
            self.pump_ahead();
        }
        self.wishes = wishes;
        done
    }

    fn present(&self, key: u64) -> bool {
        self.index.contains_key(&key) || self.stage.contains_key(&key)
    }

    /// While flash fills for the first time everything is welcome.
    fn filling(&self) -> bool {
        self.free.len() > self.setup.log.reserve as usize
    }

    fn run_max(&self) -> u64 {
        (self.policy.stage() / RUN_SHARE) as u64
    }

    fn miss(&mut self, key: u64, count: u64, long: bool) -> u64 {
        let stage = !long && !self.filling() && count <= self.run_max();
        let admit = stage || !long && self.deserves(key, false) && self.own_room(key, count);
        let (mut from, mut to) = (key, key + count);
        if admit && self.setup.unit > 1 {
            let unit = self.setup.unit;
            let (floor, ceil) = (from / unit * unit, to.next_multiple_of(unit));
            while from > floor && !self.present(from - 1) {
                from -= 1;
            }
            while to < ceil && !self.present(to) {
                to += 1;
            }
        }
        let done = self.arm.serve(self.now, from, to - from);
        self.note_disk_time();
        let ticket = self.number();
        // What is being written is read, but not cached.
        let raced = self.writing.iter().any(|w| w.0 < to && from < w.1);
        self.reading.push((ticket, from, to, raced));
        let then = Then::Filled {
            key: from,
            count: to - from,
            stage,
            admit,
            ticket,
        };
        self.later(done, then);
        done
    }

    fn note_disk_time(&mut self) {
        self.out.disk_us = self.arm.busy_ns / US;
        self.out.bare_disk_us = self.bare.busy_ns / US;
    }

    /// Policy's word on what has not been in the stage.
    fn deserves(&mut self, key: u64, written: bool) -> bool {
        let stay = Stay { written, ..FRESH };
        match self.policy.leave(stay, !self.filling()) {
            Place::Drop => false,
            Place::Put(_) => true,
            Place::Compete => self.wins(stay, key),
        }
    }

    fn wins(&mut self, stay: Stay, key: u64) -> bool {
        let rival = self.rival();
        let wins = match rival {
            None => true,
            Some((seg, slot)) => {
                self.policy
                    .displaces(stay, key, self.segments[seg as usize][slot as usize])
            }
        };
        self.losses += 1;
        if wins || self.losses >= RIVAL_TRIES {
            self.losses = 0;
            self.hand.1 = self.hand.1.saturating_add(1);
        }
        wins
    }

    /// Are segments freed in any order?
    fn any_order(&self) -> bool {
        self.setup.freed != Freed::Oldest
    }

    /// The block at a slot, if it is not dead.
    fn alive(&self, seg: u32, slot: u32) -> Option<(u64, Copy)> {
        let key = *self.segments[seg as usize].get(slot as usize)?;
        let copy = self.index.get(&key)?;
        ((copy.seg, copy.slot) == (seg, slot)).then_some((key, *copy))
    }

    /// The next block that eviction would drop and that has not lost its place.
    fn rival(&mut self) -> Option<(u32, u32)> {
        let mut left = RIVAL_SCAN;
        let mut next = self.order_from(self.hand.0);
        while let Some(seg) = next {
            if self.hand.0 != seg {
                self.hand = (seg, 0);
            }
            while (self.hand.1 as usize) < self.segments[seg as usize].len() {
                if left == 0 {
                    return None;
                }
                left -= 1;
                let Some((_, copy)) = self.alive(seg, self.hand.1) else {
                    if self.any_order() {
                        self.hand.1 += 1;
                        continue;
                    }
                    // The log must go on, or nothing would ever leave it.
                    return None;
                };
                if !copy.dirty && self.policy.evict(copy.freq) == Verdict::Drop {
                    return Some(self.hand);
                }
                self.hand.1 += 1;
            }
            next = self.order_after(seg);
        }
        self.hand = (NOWHERE, 0);
        None
    }

    /// The closed segment from which on a block to beat is looked for: this one, or what comes first if it was
    /// freed.
    fn order_from(&self, seg: u32) -> Option<u32> {
        if self.any_order() {
            return self.cleaner.turns_from(seg).next();
        }
        let since = self.opened.get(seg as usize).copied().unwrap_or_default();
        let at = self
            .order
            .partition_point(|s| self.opened[*s as usize] < since);
        self.order.get(at).copied()
    }

    fn order_after(&self, seg: u32) -> Option<u32> {
        if self.any_order() {
            return self.cleaner.turns_from(seg).nth(1);
        }
        let at = self
            .order
            .partition_point(|s| self.opened[*s as usize] <= self.opened[seg as usize]);
        self.order.get(at).copied()
    }

    /// The block that goes next where it lies, when flash is brimful.
    fn victim(&mut self) -> Option<(u32, u32)> {
        let mut left = self.setup.log.segments * (u32::from(FREQ_MAX) + 2);
        while left > 0 {
            let seg = self.cleaner.turn()?;
            if self.hand.0 != seg {
                self.hand = (seg, 0);
            }
            if self.hand.1 as usize >= self.segments[seg as usize].len() {
                self.cleaner.turned(seg);
                self.hand = (NOWHERE, 0);
                left -= 1;
                continue;
            }
            if let Some((key, copy)) = self.alive(seg, self.hand.1)
                && !copy.dirty
            {
                match self.policy.evict(copy.freq) {
                    Verdict::Drop => return Some(self.hand),
                    Verdict::Keep { freq } => {
                        if let Some(copy) = self.index.get_mut(&key) {
                            copy.freq = freq;
                        }
                    }
                }
            }
            self.hand.1 += 1;
        }
        None
    }

    fn put_in_stage(&mut self, key: u64, stay: Stay, why: Why) {
        let room = self.policy.stage();
        if room == 0 || self.stage.contains_key(&key) {
            return;
        }
        // One for the newcomer, and one more if there are too many.
        for _ in 0..2 {
            if self.places.len() >= room
                && let Some((oldest, seq)) = self.places.pop_front()
                && self.stage.get(&oldest).is_some_and(|s| s.seq == seq)
                && let Some(staged) = self.stage.remove(&oldest)
            {
                self.leave_stage(oldest, staged);
            }
        }
        let seq = self.number();
        self.places.push_back((key, seq));
        self.unused += usize::from(stay.unused.is_some());
        self.stage.insert(key, Staged { seq, stay, why });
    }

    fn leave_stage(&mut self, key: u64, staged: Staged) {
        let stay = staged.stay;
        if stay.unused.is_some() {
            self.unused -= 1;
            self.out.prefetch_wasted += 1;
        }
        let freq = match self.policy.leave(stay, !self.filling()) {
            Place::Drop => return,
            Place::Put(freq) => freq,
            Place::Compete if self.wins(stay, key) => self.policy.credit(stay),
            Place::Compete => return,
        };
        if self.own_room(key, 1) {
            self.fill(key, freq, staged.why);
        }
    }

    /// A clean copy goes to flash.
    fn fill(&mut self, key: u64, freq: u8, why: Why) {
        if self.queue.is_empty() {
            self.queued_ns = self.now;
        }
        self.out.insertions += 1;
        let void = false;
        self.queue.push(Fill {
            key,
            freq,
            why,
            void,
        });
        if self.queue.len() >= LAZY_BLOCKS as usize {
            self.send_queued();
        }
    }

    fn send_queued(&mut self) {
        if !self.queue.is_empty() {
            self.sent.push_back(std::mem::take(&mut self.queue));
            self.later(self.now + FLASH_NS, Then::Appended);
        }
    }

    fn appended(&mut self) {
        for fill in self.sent.pop_front().unwrap_or_default() {
            self.append(fill.key, fill.why, fill.freq, false);
            if fill.void
                && let Some(copy) = self.index.get(&fill.key).copied()
            {
                self.remove(fill.key, copy);
            }
        }
    }

    /// Takes out of the stage what a write covers.
    fn forget_staged(&mut self, key: u64, end: u64) {
        for key in key..end {
            if let Some(staged) = self.stage.remove(&key)
                && staged.stay.unused.is_some()
            {
                self.unused -= 1;
                self.out.prefetch_wasted += 1;
            }
        }
    }

    fn write(&mut self, key: u64, count: u64) -> u64 {
        let end = key + count;
        self.forget_staged(key, end);
        for (_, read) in &mut self.coming {
            read.cancelled |= read.key < end && key < read.key + read.count;
        }
        for (_, from, to, cancelled) in &mut self.reading {
            *cancelled |= *from < end && key < *to;
        }
        let mut queued = false;
        for fill in self.sent.iter_mut().flatten().chain(&mut self.queue) {
            let covers = (key..end).contains(&fill.key);
            fill.void |= covers;
            queued |= covers;
        }
        self.out.writes += count;
        for key in key..end {
            let hit = self.index.contains_key(&key);
            self.out.write_hits += u64::from(hit);
            if hit {
                self.cleaner.rewrite(1);
            }
            let how = if hit { Use::Hit } else { Use::Miss };
            self.policy.used(key, true, how);
        }
        if self.setup.mode != WriteMode::Back {
            // Two writes of the same place go one after the other.
            let meets = self.writing.iter().filter(|w| w.0 < end && key < w.1);
            let behind = meets.map(|w| w.2).max().unwrap_or(0);
            let done = self.write_disk(key, count).max(behind);
            self.writing.push((key, end, done));
            self.later(done, Then::Written { key, count, queued });
            return done;
        }
        self.send_queued();
        for key in key..end {
            let old = self.index.get(&key).copied();
            let hot = old.is_some_and(|c| self.cleaner.hot(c.seg));
            let freq = old.map_or(0, |c| Policy::touch(c.freq));
            self.out.updates += 1;
            self.append(key, Why::Written { hot }, freq, true);
        }
        self.close_batches();
        self.now + FLASH_NS
    }

    /// The arm writes, which is no read that a cache could save.
    fn write_disk(&mut self, key: u64, count: u64) -> u64 {
        let before = self.arm.busy_ns;
        let done = self.arm.serve(self.now, key, count);
        self.arm.busy_ns = before;
        done
    }

    /// A write past the cache is on the origin: the copy is renewed, or void.
    fn written(&mut self, key: u64, count: u64, queued: bool) {
        let end = key + count;
        let now = self.now;
        self.writing.retain(|w| w.2 > now);
        let (mut cached, mut hot) = (false, false);
        for key in key..end {
            if let Some(copy) = self.index.get(&key).copied() {
                cached = true;
                hot |= self.cleaner.hot(copy.seg);
                self.remove(key, copy);
            }
        }
        let why = Why::Written { hot };
        // What was on its way to flash was read.
        cached |= queued;
        if self.setup.mode == WriteMode::Through {
            if !self.filling() && count <= self.run_max() {
                let stay = Stay {
                    freq: u8::from(cached),
                    written: true,
                    ..FRESH
                };
                (key..end).for_each(|k| self.put_in_stage(k, stay, why));
            } else if (cached || self.deserves(key, true)) && self.own_room(key, count) {
                (key..end).for_each(|k| self.fill(k, u8::from(cached), why));
                return;
            }
        }
        if cached {
            self.record();
        }
    }

    fn remove(&mut self, key: u64, copy: Copy) {
        self.index.remove(&key);
        self.cleaner.died(copy.seg, copy.dirty);
        if copy.dirty {
            self.dirty.remove(&key);
        }
        if let Some((own, _)) = self.own.get_mut(&(key >> DISK_SHIFT)) {
            *own -= 1;
        }
    }

    fn evict(&mut self, (seg, slot): (u32, u32)) {
        if let Some((key, copy)) = self.alive(seg, slot) {
            self.remove(key, copy);
        }
    }

    /// Is the disk within its maximum with so many more, if need be at the cost of others of its own?
    fn own_room(&mut self, key: u64, count: u64) -> bool {
        let disk = key >> DISK_SHIFT;
        let (own, mut hand) = self.own.get(&disk).copied().unwrap_or_default();
        if self.setup.max == 0 || own + count <= self.setup.max {
            return true;
        }
        let data = self.setup.log.data;
        let slots = self.setup.log.blocks() as u32;
        let mut freed = 0;
        for _ in 0..OWN_SCAN.min(slots) {
            if freed >= count {
                break;
            }
            hand = (hand + 1) % slots;
            let Some((key, copy)) = self.alive(hand / data, hand % data) else {
                continue;
            };
            if key >> DISK_SHIFT != disk || copy.dirty {
                continue;
            }
            if copy.freq > 0 {
                if let Some(copy) = self.index.get_mut(&key) {
                    copy.freq -= 1;
                }
                continue;
            }
            self.remove(key, copy);
            freed += 1;
        }
        self.own.entry(disk).or_default().1 = hand;
        if freed > 0 {
            self.record();
        }
        freed >= count
    }

    /// Something is said in the log that is no data.
    fn record(&mut self) {
        let head = self.cleaner.head(Why::Filled);
        self.open(head, 1, false);
        self.join_batch(head, LAZY_BLOCKS);
    }

    /// Counts an entry of the batch that gathers for a head; a new one takes a block.
    fn join_batch(&mut self, head: usize, most: u32) {
        if !self.setup.log.descriptors {
            return;
        }
        let batch = &mut self.batches[head];
        let stale = self.now.saturating_sub(batch.since_ns) >= LAZY_NS;
        if batch.entries == 0 || batch.entries >= most || stale {
            *batch = Batch {
                since_ns: self.now,
                entries: 1,
            };
            self.take_slot(head, None);
        } else {
            batch.entries += 1;
        }
    }

    /// Somebody waits for what was appended: it is sent, and what comes next goes by itself.
    fn close_batches(&mut self) {
        self.batches = [Batch::default(); HEADS_MAX];
    }

    fn append(&mut self, key: u64, why: Why, freq: u8, dirty: bool) {
        // Room first: making it may move this very block.
        let head = self.cleaner.head(why);
        // A descriptor may come before it.
        let blocks = 1 + usize::from(self.setup.log.descriptors);
        self.open(head, blocks, matches!(why, Why::Moved { .. }));
        self.join_batch(head, if dirty { BATCH_MAX } else { LAZY_BLOCKS });
        if let Some(copy) = self.index.get(&key).copied() {
            self.remove(key, copy);
        }
        let (seg, slot) = self.take_slot(head, Some(key));
        self.cleaner.append(seg, why, dirty);
        self.policy.wrote(1);
        self.own.entry(key >> DISK_SHIFT).or_default().0 += 1;
        if dirty {
            self.dirty.insert(key);
        }
        let copy = Copy {
            seg,
            slot,
            freq,
            dirty,
        };
        self.index.insert(key, copy);
    }

    /// Sees to it that a head has room for so many blocks.
    fn open(&mut self, head: usize, blocks: usize, moved: bool) {
        if let Some(seg) = self.heads[head]
            && self.segments[seg as usize].len() + blocks > self.setup.log.data as usize
        {
            self.close_head(head);
        }
        if self.heads[head].is_some() {
            return;
        }
        let seg = self.free.pop().expect("the reserve takes what is moved");
        self.segments[seg as usize].clear();
        self.opened[seg as usize] = self.number();
        self.cleaner.open(seg, head);
        self.heads[head] = Some(seg);
        self.batches[head] = Batch::default();
        if !moved {
            self.make_room();
            // What was moved may have filled this very head.
            self.open(head, blocks, true);
        }
    }

    fn close_head(&mut self, head: usize) {
        if let Some(seg) = self.heads[head].take() {
            self.cleaner.close(seg);
            self.order.push_back(seg);
        }
    }

    /// The next slot of a head that has room; `None` is a descriptor.
    fn take_slot(&mut self, head: usize, key: Option<u64>) -> (u32, u32) {
        self.open(head, 1, true);
        let seg = self.heads[head].expect("it was opened");
        let slot = self.segments[seg as usize].len() as u32;
        self.segments[seg as usize].push(key.unwrap_or(u64::MAX));
        (seg, slot)
    }

    fn make_room(&mut self) {
        // Where nearly everything stays, a turn of the log frees nothing: then something goes whatever it is.
        let mut left = self.setup.log.segments * 2;
        while self.free.len() < self.setup.log.reserve as usize {
            let may_keep = left > 0 && self.free.len() >= self.cleaner.plan().heads.count();
            if !self.free_one(may_keep) {
                self.force();
            }
            left = left.saturating_sub(1);
        }
    }

    fn is_within_min(&self, key: u64) -> bool {
        let own = self.own.get(&(key >> DISK_SHIFT)).map_or(0, |o| o.0);
        // Were all of it kept, there would be nothing to drop.
        let most = self.setup.log.blocks() / 4 * 3 / self.own.len().max(1) as u64;
        own <= self.setup.min.min(most)
    }

    fn is_above_max(&self, key: u64) -> bool {
        let own = self.own.get(&(key >> DISK_SHIFT)).map_or(0, |o| o.0);
        self.setup.max > 0 && own > self.setup.max
    }

    /// Frees a segment, of which nothing is kept unless that is allowed; false if none can be.
    fn free_one(&mut self, may_keep: bool) -> bool {
        if let Freed::Cheapest { price, .. } = self.setup.freed {
            self.cleaner.set_price(self.policy.write_cost().max(price));
        }
        let picked = self.cleaner.pick();
        // Nothing is worth freeing, and something must be.
        let forced = picked.is_none() && self.any_order();
        let Some(seg) = picked.or_else(|| self.cleaner.turn().filter(|_| forced)) else {
            return false;
        };
        let data = self.setup.log.data;
        let (_, dirty) = self.cleaner.counts(seg);
        let oldest = !self.any_order();
        if !may_keep || dirty * 4 > data * 3 && (oldest || forced || dirty == data) {
            for slot in 0..self.segments[seg as usize].len() as u32 {
                if let Some((key, copy)) = self.alive(seg, slot)
                    && copy.dirty
                {
                    self.set_clean(key);
                }
            }
        }
        let keep_max = data - (data / DROP_SHARE).max(u32::from(data > 1));
        let mut kept = 0;
        for slot in 0..self.segments[seg as usize].len() as u32 {
            let Some((key, copy)) = self.alive(seg, slot) else {
                continue;
            };
            let (stays, freq) = if !may_keep {
                (false, 0)
            } else if copy.dirty {
                (true, copy.freq)
            } else {
                let fades = match self.cleaner.fate(seg, copy.dirty, copy.freq) {
                    _ if oldest || forced => true,
                    Fate::Drop => true,
                    Fate::Move { fades, .. } => fades,
                };
                match self.policy.evict(copy.freq) {
                    _ if !fades => (true, copy.freq),
                    Verdict::Keep { freq } if kept < keep_max && !self.is_above_max(key) => {
                        (true, freq)
                    }
                    _ if self.is_within_min(key) => (true, 0),
                    _ => (false, 0),
                }
            };
            if !stays {
                self.remove(key, copy);
                continue;
            }
            kept += 1;
            self.out.reinsertions += 1;
            self.append(key, Why::Moved { from: seg }, freq, copy.dirty);
        }
        self.cleaner.free(seg);
        self.order.retain(|s| *s != seg);
        self.segments[seg as usize].clear();
        self.free.insert(0, seg);
        true
    }

    /// Everything is dirty, or everything is to stay: a segment's worth has to go.
    fn force(&mut self) {
        for _ in 0..self.setup.log.data {
            if let Some(key) = self.dirty.first().copied() {
                self.set_clean(key);
            }
            let victim = self.victim();
            let any = || self.index.iter().find(|(_, c)| !c.dirty);
            match victim {
                Some(victim) => self.evict(victim),
                None => {
                    if let Some((key, copy)) = any().map(|(k, c)| (*k, *c)) {
                        self.remove(key, copy);
                    }
                }
            }
        }
    }

    fn set_clean(&mut self, key: u64) {
        if self.dirty.remove(&key)
            && let Some(copy) = self.index.get_mut(&key)
        {
            copy.dirty = false;
            self.cleaner.destaged(copy.seg);
        }
    }

    /// The destager writes what lies next in disk order; what that takes.
    fn destage_run(&mut self) -> u64 {
        let next = self.dirty.range(self.sweep..).next();
        let Some(first) = next.or_else(|| self.dirty.first()).copied() else {
            return 0;
        };
        let mut end = first;
        while end < first + RUN_MAX && self.dirty.contains(&end) {
            self.set_clean(end);
            end += 1;
        }
        self.sweep = end;
        let before = self.arm.free_ns().max(self.now);
        let done = self.write_disk(first, end - first);
        self.record();
        done - before
    }

    fn destage(&mut self) {
        let blocks = self.setup.log.blocks();
        let dirty = |twin: &Twin| twin.dirty.len() as u64 * 100;
        while dirty(self) > blocks * DIRTY_HASTE {
            self.destage_run();
        }
        if dirty(self) > blocks * DIRTY_LOW && self.now >= self.pause_ns {
            let took = self.destage_run();
            let left = (blocks * DIRTY_HASTE).saturating_sub(dirty(self));
            let span = blocks * (DIRTY_HASTE - DIRTY_LOW);
            let pause = u128::from(took) * u128::from(PAUSE_MAX) * u128::from(left);
            self.pause_ns = self.now + (pause / u128::from(span.max(1))) as u64;
        }
    }

    /// Nobody asks for anything until `to`.
    fn destage_idle(&mut self, to: u64) {
        self.now = self.now.max(self.last_ns + IDLE_NS);
        while !self.dirty.is_empty() && self.arm.free_ns().max(self.now) < to {
            self.destage_run();
            self.now = self.now.max(self.arm.free_ns()).min(to);
        }
    }

    /// Sends what may be read ahead now.
    fn pump_ahead(&mut self) {
        let mut at = 0;
        while at < self.ahead.len() {
            let busy = if self.reading.is_empty() {
                READS_MAX
            } else {
                BUSY_READS_MAX
            };
            if self.coming.len() >= busy {
                return;
            }
            let (range, source) = self.ahead[at];
            let end = range.key + u64::from(range.count);
            match self.send_ahead(range.key, end, source) {
                Some(rest) if rest < end => {
                    if let Some((range, _)) = self.ahead.get_mut(at) {
                        range.key = rest;
                        range.count = (end - rest) as u32;
                    }
                }
                _ => {
                    self.ahead.remove(at);
                }
            }
            at = 0;
        }
    }

    /// Sends the first part of `from..end` that can be read; where to go on, or `None` if nothing can.
    fn send_ahead(&mut self, from: u64, end: u64, source: Source) -> Option<u64> {
        let coming: u64 = self.coming.iter().map(|(_, r)| r.count).sum();
        let room = self.policy.stage() / UNUSED_SHARE;
        let room = (room as u64).saturating_sub(self.unused as u64 + coming);
        let held = |at: u64| {
            let ahead = self.coming.iter().map(|(_, r)| (r.key, r.key + r.count));
            let misses = self.reading.iter().map(|r| (r.1, r.2));
            let writes = self.writing.iter().map(|w| (w.0, w.1));
            let queued = self.sent.iter().flatten().chain(&self.queue);
            ahead
                .chain(misses)
                .chain(writes)
                .chain(queued.map(|f| (f.key, f.key + 1)))
                .find(|(s, e)| (*s..*e).contains(&at))
                .map(|(_, e)| e)
        };
        let mut from = from;
        while from < end {
            if let Some(behind) = held(from) {
                from = behind;
            } else if self.present(from) {
                from += 1;
            } else {
                break;
            }
        }
        let most = end.min(from.saturating_add(room.min(RUN_MAX)));
        let mut to = from;
        while to < most && !self.present(to) && held(to).is_none() {
            to += 1;
        }
        if to <= from {
            return None;
        }
        let count = to - from;
        self.out.prefetched += count;
        self.out.prefetch_requests += 1;
        let ready_ns = self.arm.serve(self.now, from, count);
        self.note_disk_time();
        let n = self.number();
        let read = Coming {
            key: from,
            count,
            source,
            ready_ns,
            used: vec![false; count as usize],
            cancelled: false,
        };
        self.coming.push((n, read));
        self.later(ready_ns, Then::Ahead(n));
        Some(to)
    }

    fn ahead_came(&mut self, n: u64) {
        let Some(at) = self.coming.iter().position(|(m, _)| *m == n) else {
            return;
        };
        let (_, read) = self.coming.swap_remove(at);
        for (i, used) in read.used.iter().enumerate() {
            let stay = Stay {
                freq: 0,
                covered: !used,
                unused: (!used).then_some(read.source),
                written: false,
            };
            if !read.cancelled {
                self.put_in_stage(read.key + i as u64, stay, Why::Filled);
            } else if !used {
                self.policy.leave(stay, true);
                self.out.prefetch_wasted += 1;
            }
        }
    }
}

/// What is known of a block that was missed.
const FRESH: Stay = Stay {
    freq: 0,
    covered: false,
    unused: None,
    written: false,
};

/// The settings of a disk, and of its pool, that decide what is hit.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Bytes after which a sequential read stream is not cached; 0 for never.
    pub seq_cutoff: u64,
    /// Bytes of the unit in which misses are filled.
    pub block_size: u64,
    /// Bytes of flash kept for it.
    pub min: u64,
    /// Most bytes of flash it may use; 0 for no limit.
    pub max: u64,
    /// Segments of the pool; as many as it has of the usual size if `None`.
    pub segments: Option<u32>,
    /// Segments kept free; as many as the engine keeps if `None`.
    pub reserve: Option<u32>,
    /// How the log comes free.
    pub freed: Freed,
    /// The origin.
    pub device: Device,
    /// Requests that are in flight at most: the next one waits for one of them, and what comes later comes
    /// as much later.
    pub depth: usize,
}

impl Default for Disk {
    fn default() -> Disk {
        Disk {
            seq_cutoff: 1 << 20,
            block_size: BLOCK,
            min: 0,
            max: 0,
            segments: None,
            reserve: None,
            freed: Freed::default(),
            device: Device::HARD_DISK,
            depth: 1,
        }
    }
}

impl Disk {
    /// The set-up of a cache of `capacity` blocks.
    pub(crate) fn setup(&self, prefetch: bool, capacity: usize, settings: &Settings) -> Setup {
        let mut log = LogShape::of(capacity);
        if let Some(segments) = self.segments {
            log.segments = segments.max(SEGMENTS_LEAST);
            log.data = (capacity as u32 / log.segments).max(1);
            log.descriptors = log.data >= DATA;
            log.reserve = LogShape::kept_free(log.segments);
        }
        // There is one head, or two, and something to free.
        let most = log.segments.saturating_sub(HEADS_MAX as u32 + 1);
        log.reserve = self
            .reserve
            .unwrap_or(log.reserve)
            .clamp(HEADS_MAX as u32, most);
        let blocks = log.blocks() as usize;
        let (ram, ram_most) = settings.stage_of(blocks, prefetch);
        Setup {
            config: Config {
                ram,
                ram_most,
                flash: blocks,
                rules: settings.rules,
                prefetch,
                budget: settings.budget.clone(),
                dead_space: self.freed == Freed::Oldest,
            },
            mode: settings.write_mode,
            log,
            freed: self.freed,
            seq_cutoff: self.seq_cutoff / BLOCK,
            unit: (self.block_size / BLOCK).max(1),
            min: self.min / BLOCK,
            max: self.max / BLOCK,
            device: self.device,
        }
    }
}

/// Segments of a log at least.
const SEGMENTS_LEAST: u32 = 8;

/// Plays requests to a [`Twin`] as a guest would send them.
///
/// It has so many in flight at most. A trace was recorded on some other disk; if this one is slower, the guest
/// waits, and does later what it would have done then.
#[derive(Debug)]
pub struct Player {
    twin: Twin,
    depth: usize,
    in_flight: BinaryHeap<Reverse<u64>>,
    late_ns: u64,
}

impl Player {
    /// A guest with so many requests in flight.
    pub fn new(setup: Setup, depth: usize) -> Player {
        Player {
            twin: Twin::new(setup),
            depth: depth.max(1),
            in_flight: BinaryHeap::new(),
            late_ns: 0,
        }
    }

    /// Plays the next request; returns what happened so far.
    pub fn play(&mut self, request: &Request) -> Outcome {
        let due = request.time_us * US + self.late_ns;
        let mut start = due.max(self.twin.now);
        while self.in_flight.peek().is_some_and(|at| at.0 <= start) {
            self.in_flight.pop();
        }
        if self.in_flight.len() >= self.depth
            && let Some(Reverse(at)) = self.in_flight.pop()
        {
            start = start.max(at);
        }
        self.late_ns += start - due;
        let done = self.twin.request(start, request);
        self.in_flight.push(Reverse(done));
        self.twin.out
    }

    /// Everything that is under way ends; what happened in all.
    pub fn end(&mut self) -> Outcome {
        self.twin.settle();
        self.twin.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{Model, Policy, run};
    use crate::workload::Workload;
    use hearth_policy::spread;

    fn mixed(blocks: u64, count: u64, salt: u64) -> Workload {
        let requests = (0..count).map(|i| {
            let r = spread(i ^ salt << 32);
            Request {
                time_us: i * 500,
                block: if r.is_multiple_of(3) {
                    i * 2 % blocks
                } else {
                    spread(r) % blocks
                },
                count: 1 + (r >> 20) as u32 % 9,
                write: r >> 40 & 3 == 0,
            }
        });
        Workload::made("mixed", requests)
    }

    fn play(disk: Disk, load: &Workload, blocks: usize, write_mode: WriteMode) -> Outcome {
        let settings = Settings {
            model: Model::Engine(disk),
            write_mode,
            ..Settings::default()
        };
        run(Policy::Hearth, load, blocks, &settings).0
    }

    /// Whatever a user asks for: the log never runs out of segments, and what is counted adds up.
    #[test]
    fn any_shape_of_a_log_serves() {
        let modes = [WriteMode::Back, WriteMode::Through, WriteMode::Around];
        for i in 0..240u64 {
            let r = |n: u64| spread(i << 8 | n);
            let blocks = 1 + (r(0) % 3000) as usize;
            let disk = Disk {
                seq_cutoff: [0, 4096, 1 << 20][r(1) as usize % 3],
                block_size: 4096 << (r(2) % 5),
                min: r(3) % (blocks as u64 * 8192),
                max: r(4) % 2 * (r(5) % (blocks as u64 * 4096)),
                segments: (r(6) % 2 == 0).then_some((r(7) % 200) as u32),
                reserve: (r(8) % 2 == 0).then_some((r(9) % 300) as u32),
                freed: [Heads::One, Heads::HotCold]
                    .map(|heads| Freed::Cheapest { price: 64, heads })
                    .get(r(10) as usize % 3)
                    .copied()
                    .unwrap_or(Freed::Oldest),
                device: [Device::HARD_DISK, Device::INSTANT][r(11) as usize % 2],
                depth: 1 + r(12) as usize % 9,
            };
            let load = mixed(1 + r(13) % 4000, 2000, i);
            let out = play(disk, &load, blocks, modes[r(14) as usize % 3]);
            assert_eq!((out.reads, out.writes), (load.reads, load.writes));
            assert!(out.read_hits <= out.reads);
            let judged = out.prefetch_hits + out.prefetch_late + out.prefetch_wasted;
            assert!(judged <= out.prefetched, "{out:?}");
        }
    }

    #[test]
    fn what_is_read_ahead_takes_the_disks_time() {
        let requests = (0..4000u64).map(|i| Request {
            time_us: 0,
            block: i * 4 % 8000,
            count: 4,
            write: false,
        });
        let load = Workload::made("loop", requests);
        let disk = |access_us| Disk {
            device: Device {
                access_us,
                ..Device::HARD_DISK
            },
            seq_cutoff: 0,
            ..Disk::default()
        };
        // A loop in a cache of ten blocks, as fast as it can be read.
        let out = play(disk(8000), &load, 10, WriteMode::Through);
        assert!(out.score() < 0.1, "{out:?}");
        assert!(out.bare_disk_us >= 4000 * 4 * 27, "it has to be read");
        assert!(out.saved_disk_time() < 0.01, "{}", out.saved_disk_time());
    }

    #[test]
    fn a_long_stream_passes_by_and_a_maximum_holds() {
        let twice = || (0..2).flat_map(|_| (0..500u64).map(|i| (i * 8, 8)));
        let requests = twice().map(|(block, count)| Request {
            time_us: block * 1000,
            block,
            count,
            write: false,
        });
        let load = Workload::made("scans", requests);
        let hits = |disk| {
            let settings = Settings {
                model: Model::Engine(disk),
                ..Settings::default()
            };
            run(Policy::HearthDemand, &load, 20_000, &settings)
                .0
                .read_hits
        };
        let all = Disk {
            seq_cutoff: 0,
            ..Disk::default()
        };
        assert!(hits(all.clone()) > 3900);
        assert!(
            hits(Disk::default()) < 600,
            "only its first mebibyte is cached"
        );
        let limited = Disk {
            max: 1000 * BLOCK,
            ..all
        };
        assert!(hits(limited) <= 1000);
    }
}
