//! The engine's cache without an engine: what it would hit, and when.
//!
//! [`Cache`](crate::Cache) asks policy the engine's questions over a log without segments and a disk that
//! answers at once. That is what rules are compared by; it is not what a user gets. Here the engine's
//! ways are followed as far as they decide what is hit: misses go straight to flash while it fills
//! and wait in the RAM stage later, long runs are judged at once, a place in the stage stays taken when its
//! block is overwritten, a batch costs a block for its descriptor, segments are freed ahead of need and in any order, long
//! streams pass by, blocks are dirty until the destager comes, and what is read ahead waits for an
//! [`Arm`]. How far the two agree is measured by `cargo run -p hearth-sim --example agree`.

mod ahead;
mod destage;
mod log;
mod player;
mod rivals;
mod setup;
mod stage;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use hashbrown::HashMap;
use hearth_policy::cleaning::{Cleaner, HEADS_MAX, Heads, Order, Plan, Why, most_of};
use hearth_policy::prefetch::Source;
use hearth_policy::{Policy, Range, Sequential, Stay, Use};

use crate::cache::WriteMode;
use crate::device::{Arm, US};
use crate::outcome::Outcome;
use crate::workload::Request;
use ahead::Coming;
use destage::IDLE_NS;
use setup::BLOCK;

pub use player::Player;
pub use setup::{Disk, Freed, LogShape, Setup};

/// Share of the stage that one miss may take; longer ones are judged at once.
const RUN_SHARE: usize = 4;
/// Longest read of the origin for the cache.
const RUN_MAX: u64 = 256;
/// Ranges that wait to be read ahead.
const QUEUE_MAX: usize = 64;
/// What nobody waits for is appended when so many blocks have gathered or the first waited so long.
const LAZY_BLOCKS: u32 = 96;
const LAZY_NS: u64 = 100_000_000;
/// What flash takes to answer.
const FLASH_NS: u64 = 100 * US;
/// Bits of a key below the disk.
const DISK_SHIFT: u32 = 40;

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
    Written {
        key: u64,
        count: u64,
        queued: bool,
        used: bool,
    },
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
    /// Read since it came.
    used: bool,
    /// Overwritten since.
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
    /// Places it has; it gets to what policy says as blocks come in.
    room: usize,
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
    /// Streams of writes past the cache.
    written_to: HashMap<u64, Sequential>,
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
    /// Fills that gather to be appended; they answer reads until they are overwritten.
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
            room: setup.config.ram,
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
            written_to: HashMap::new(),
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
                Then::Written {
                    key,
                    count,
                    queued,
                    used,
                } => self.written(key, count, queued, used),
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
            if let Some(fill) = self.queued(at) {
                fill.used = true;
                self.policy.used(at, false, Use::Hit);
                self.out.read_hits += 1;
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
            while to < most && !self.present(to) && self.queued(to).is_none() {
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
        if self.setup.config.prefetch && self.room > 0 {
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

    /// The valid copy of a block that is on its way to flash.
    fn queued(&mut self, key: u64) -> Option<&mut Fill> {
        let mut fills = self.sent.iter_mut().flatten().chain(&mut self.queue);
        fills.find(|fill| fill.key == key && !fill.void)
    }

    fn run_max(&self) -> u64 {
        (self.room / RUN_SHARE) as u64
    }

    fn miss(&mut self, key: u64, count: u64, long: bool) -> u64 {
        let stage = !long && !self.filling() && count <= self.run_max();
        let admit = stage || !long && self.deserves(key, false) && self.own_room(key, count);
        let (mut from, mut to) = (key, key + count);
        if admit && self.setup.unit > 1 {
            let unit = self.setup.unit;
            let (floor, ceil) = (from / unit * unit, to.next_multiple_of(unit));
            while from > floor && !self.present(from - 1) && self.queued(from - 1).is_none() {
                from -= 1;
            }
            while to < ceil && !self.present(to) && self.queued(to).is_none() {
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

    fn write(&mut self, key: u64, count: u64) -> u64 {
        let end = key + count;
        let mut used = false;
        for key in key..end {
            let staged = self.stage.get(&key).filter(|s| s.stay.unused.is_none());
            used |= staged.is_some_and(|s| s.stay.freq > 0);
            let hit =
                staged.is_some() || self.index.contains_key(&key) || self.queued(key).is_some();
            self.out.write_hits += u64::from(hit);
            let how = if hit { Use::Hit } else { Use::Miss };
            self.policy.used(key, true, how);
        }
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
            if self.index.contains_key(&key) {
                self.cleaner.rewrite(1);
            }
        }
        if self.setup.mode != WriteMode::Back {
            // Two writes of the same place go one after the other.
            let meets = self.writing.iter().filter(|w| w.0 < end && key < w.1);
            let behind = meets.map(|w| w.2).max().unwrap_or(0);
            let done = self.write_disk(key, count).max(behind);
            self.writing.push((key, end, done));
            let then = Then::Written {
                key,
                count,
                queued,
                used,
            };
            self.later(done, then);
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
    fn written(&mut self, key: u64, count: u64, queued: bool, used: bool) {
        let end = key + count;
        let now = self.now;
        self.writing.retain(|w| w.2 > now);
        let mut cached = false;
        for key in key..end {
            if let Some(copy) = self.index.get(&key).copied() {
                cached = true;
                self.remove(key, copy);
            }
        }
        // What was on its way to flash was read.
        cached |= queued;
        let freq = u8::from(cached || used);
        let disk = self.written_to.entry(key >> DISK_SHIFT).or_default();
        let stream = disk.observe(key * BLOCK, count * BLOCK);
        let cutoff = self.setup.seq_cutoff * BLOCK;
        let long = cutoff > 0 && stream > cutoff && !cached && !self.filling();
        let why = match long {
            true => Why::Written { hot: false },
            false => Why::Filled,
        };
        if self.setup.mode == WriteMode::Through {
            if !self.filling() && !long && count <= self.run_max() {
                let stay = Stay {
                    freq,
                    written: true,
                    ..FRESH
                };
                (key..end).for_each(|k| self.put_in_stage(k, stay, why));
            } else if (cached || self.deserves(key, true)) && self.own_room(key, count) {
                (key..end).for_each(|k| self.fill(k, freq, why));
                return;
            }
        }
        if cached {
            self.record();
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
