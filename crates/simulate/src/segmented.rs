//! A cache whose flash is a log of segments that are cleaned.
//!
//! [`Cache`](crate::Cache) counts space without segments: either a dead copy keeps its place until the log's end
//! has passed it, or its place comes back for nothing. The truth lies between, and where depends on which
//! segments are freed and what is appended together. This model has segments, heads, a reserve, dirty blocks
//! that a destager cleans after a while, and the decisions of [`hearth_policy::cleaning`]. It has no
//! prefetch, and an append takes no time.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hearth_policy::cleaning::{Cleaner, Fate, HEADS_MAX, Order, Plan, Why};
use hearth_policy::{Config, Place, Policy, Stay, Use, Verdict};

use crate::cache::WriteMode;
use crate::outcome::Outcome;
use crate::workload::{Request, Workload};

/// Newcomers that the block to beat turns away before the next one takes its place, as in the engine.
const RIVAL_TRIES: u32 = 128;
/// Segments in which a block to beat is looked for, as in the engine.
const RIVAL_SCAN: u32 = 64;
/// Freed the oldest first, at least one block in so many of a segment goes, as the engine did.
const DROP_SHARE: u32 = 16;

/// The log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Segments.
    pub segments: u32,
    /// Blocks of data in each.
    pub data: u32,
    /// Segments kept free.
    pub reserve: u32,
}

impl Shape {
    /// A log of `blocks`, in segments of `data`, at least ten.
    pub fn of(blocks: usize, data: u32, reserve: u32) -> Shape {
        let data = data.min((blocks / 10) as u32).max(1);
        Shape {
            segments: (blocks / data as usize) as u32,
            data,
            reserve,
        }
    }

    /// Blocks of all segments.
    pub fn blocks(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.data)
    }

    /// Blocks for which there is room beside the reserve and the heads.
    pub fn room(&self, heads: usize) -> u64 {
        let taken = u64::from(self.reserve) + heads as u64;
        u64::from(self.segments).saturating_sub(taken).max(1) * u64::from(self.data)
    }
}

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Rules and sizes; `flash` is what lives at most, as the policy sees it.
    pub config: Config,
    /// What happens to written data.
    pub mode: WriteMode,
    /// The log.
    pub shape: Shape,
    /// How it is cleaned. With [`Order::Oldest`] everything is as in today's engine: eviction happens where a
    /// segment is freed, and a block used since it was appended is appended again.
    pub plan: Plan,
    /// Accesses after which a written block is clean.
    pub destage_after: u64,
    /// Does a cached block that was rewritten come back to flash without competing?
    pub returns: bool,
    /// Which blocks are rewritten often, if that is to be known instead of estimated.
    pub oracle: Option<fn(u64) -> bool>,
}

#[derive(Clone, Copy, Debug)]
enum At {
    Ram,
    Flash { seg: u32, slot: u32 },
}

#[derive(Clone, Copy, Debug)]
struct Held {
    at: At,
    seq: u64,
    freq: u8,
    dirty: bool,
    /// When it was written last, to tell the destager what is newer than its order.
    written: u64,
    /// Was rewritten often; kept while it waits in RAM.
    hot: bool,
    /// It was on flash before it was rewritten.
    was_cached: bool,
    rewritten: bool,
}

/// What cleaning did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Segments freed.
    pub freed: u64,
    /// Blocks moved out of them.
    pub moved: u64,
    /// Clean blocks dropped, where they lay or from a segment that was freed.
    pub dropped: u64,
    /// Dirty blocks that had to be destaged before their time.
    pub forced: u64,
    /// Blocks that live at the end.
    pub live: u64,
}

/// The cache.
#[derive(Debug)]
pub struct Segmented {
    policy: Policy,
    setup: Setup,
    cleaner: Cleaner,
    held: HashMap<u64, Held>,
    ram: VecDeque<(u64, u64)>,
    in_ram: usize,
    segments: Vec<Vec<u64>>,
    free: Vec<u32>,
    heads: [Option<u32>; HEADS_MAX],
    to_destage: VecDeque<(u64, u64)>,
    seq: u64,
    accesses: u64,
    /// Where the next block to beat is: its segment's place in the order, the slot.
    hand: (u32, u32),
    losses: u32,
    /// What happened.
    pub out: Outcome,
    /// What cleaning did.
    pub cleaned: Cleaned,
}

impl Segmented {
    /// An empty cache.
    pub fn new(setup: Setup) -> Segmented {
        let Shape { segments, data, .. } = setup.shape;
        Segmented {
            policy: Policy::new(setup.config.clone()),
            cleaner: Cleaner::new(setup.plan, segments, data),
            held: HashMap::new(),
            ram: VecDeque::new(),
            in_ram: 0,
            segments: vec![Vec::new(); segments as usize],
            free: (0..segments).rev().collect(),
            heads: [None; HEADS_MAX],
            to_destage: VecDeque::new(),
            seq: 0,
            accesses: 0,
            hand: (u32::MAX, 0),
            losses: 0,
            out: Outcome::default(),
            cleaned: Cleaned::default(),
            setup,
        }
    }

    /// The cleaner, to look at.
    pub fn cleaner(&self) -> &Cleaner {
        &self.cleaner
    }

    /// Serves a request.
    pub fn request(&mut self, request: &Request) {
        self.policy.tick(request.time_us);
        let n = u64::from(request.count);
        let mut hits = 0;
        for key in request.block..request.block + n {
            hits += u64::from(self.access(key, request.write));
        }
        if request.write {
            self.out.writes += n;
            self.out.write_hits += hits;
        } else {
            self.out.reads += n;
            self.out.read_hits += hits;
        }
        self.cleaned.live = self.cleaner.live();
    }

    fn access(&mut self, key: u64, write: bool) -> bool {
        self.accesses += 1;
        self.destage();
        let mut held = self.held.get_mut(&key);
        if let Some(held) = &mut held {
            held.freq = Policy::touch(held.freq);
        }
        let held = held.map(|h| *h);
        let how = if held.is_some() { Use::Hit } else { Use::Miss };
        self.policy.used(key, write, how);
        if held.is_some_and(|h| matches!(h.at, At::Flash { .. })) {
            if write {
                self.cleaner.rewrite(1);
            } else {
                self.cleaner.hit();
            }
        }
        let freq = held.map_or(0, |h| h.freq);
        let hot = match (held, self.setup.oracle) {
            (_, Some(oracle)) => oracle(key),
            (
                Some(Held {
                    at: At::Flash { seg, .. },
                    ..
                }),
                None,
            ) => self.cleaner.hot(seg),
            (Some(h), None) => h.hot,
            (None, None) => false,
        };
        match (self.setup.mode, held) {
            (WriteMode::Back, _) if write => {
                match held {
                    Some(Held { at: At::Ram, .. }) => self.in_ram -= 1,
                    Some(h) => self.kill(&h),
                    None => {}
                }
                self.held.remove(&key);
                self.out.updates += 1;
                if self.cleaner.brimful()
                    && self.in_place()
                    && let Some(victim) = self.victim()
                {
                    self.evict(victim);
                }
                self.append(key, Why::Written { hot }, freq, self.accesses);
                self.to_destage.push_back((key, self.accesses));
            }
            (_, Some(h)) if write && matches!(h.at, At::Flash { .. }) => {
                self.kill(&h);
                self.stage(key, freq, hot, true, true);
            }
            (_, Some(_)) if write => {
                if let Some(h) = self.held.get_mut(&key) {
                    h.rewritten = true;
                }
            }
            (_, None) => self.stage(key, 0, hot, false, write),
            _ => {}
        }
        how == Use::Hit
    }

    fn stage(&mut self, key: u64, freq: u8, hot: bool, was_cached: bool, rewritten: bool) {
        self.seq += 1;
        self.in_ram += 1;
        self.ram.push_back((key, self.seq));
        let held = Held {
            at: At::Ram,
            seq: self.seq,
            freq,
            dirty: false,
            written: 0,
            hot,
            was_cached,
            rewritten,
        };
        self.held.insert(key, held);
        self.settle();
    }

    fn settle(&mut self) {
        while self.in_ram > self.policy.stage() {
            let Some((key, seq)) = self.ram.pop_front() else {
                return;
            };
            let Some(held) = self.held.get(&key).copied().filter(|h| h.seq == seq) else {
                continue;
            };
            self.held.remove(&key);
            self.in_ram -= 1;
            let stay = Stay {
                freq: held.freq,
                covered: false,
                unused: None,
                written: held.rewritten,
            };
            let back = held.was_cached && self.setup.returns;
            let freq = match self.policy.leave(stay, self.full()) {
                Place::Drop => continue,
                Place::Put(freq) => freq,
                Place::Compete => {
                    if let Some(victim) = self.victim() {
                        let beats = || self.policy.displaces(stay, key, self.key_at(victim));
                        let wins = back || beats();
                        self.losses += 1;
                        if wins || self.losses >= RIVAL_TRIES {
                            self.losses = 0;
                            if wins && self.in_place() && self.cleaner.brimful() {
                                self.evict(victim);
                            } else {
                                self.hand = (victim.0, victim.1 + 1);
                            }
                        }
                        if !wins {
                            continue;
                        }
                    } else {
                        self.hand.1 = self.hand.1.saturating_add(1);
                    }
                    self.policy.credit(stay)
                }
            };
            self.out.insertions += 1;
            let why = if held.rewritten {
                Why::Written { hot: held.hot }
            } else {
                Why::Filled
            };
            self.append(key, why, freq, 0);
        }
    }

    /// Does eviction drop blocks where they lie, or only in a segment that is freed?
    fn in_place(&self) -> bool {
        self.setup.plan.order != Order::Oldest
    }

    fn full(&self) -> bool {
        if self.in_place() {
            self.cleaner.full()
        } else {
            self.free.len() <= self.setup.shape.reserve as usize + 1
        }
    }

    fn key_at(&self, (seg, slot): (u32, u32)) -> u64 {
        self.segments[seg as usize][slot as usize]
    }

    /// The block at a slot, if it lives.
    fn alive(&self, seg: u32, slot: u32) -> Option<(u64, Held)> {
        let key = *self.segments[seg as usize].get(slot as usize)?;
        let held = self.held.get(&key)?;
        match held.at {
            At::Flash { seg: s, slot: n } if (s, n) == (seg, slot) => Some((key, *held)),
            _ => None,
        }
    }

    fn kill(&mut self, held: &Held) {
        if let At::Flash { seg, .. } = held.at {
            self.cleaner.died(seg, held.dirty);
        }
    }

    fn evict(&mut self, (seg, slot): (u32, u32)) {
        if let Some((key, held)) = self.alive(seg, slot) {
            self.kill(&held);
            self.held.remove(&key);
            self.cleaned.dropped += 1;
        }
    }

    /// The block that has to go next. `None` if there is none to be found.
    fn victim(&mut self) -> Option<(u32, u32)> {
        if !self.in_place() || !self.cleaner.brimful() {
            return self.rival();
        }
        // Every use count is at most three.
        let mut left = self.setup.shape.segments * 5;
        while left > 0 {
            let seg = self.cleaner.turn()?;
            if self.hand.0 != seg {
                self.hand = (seg, 0);
            }
            if self.hand.1 as usize >= self.segments[seg as usize].len() {
                self.cleaner.turned(seg);
                self.hand = (u32::MAX, 0);
                left -= 1;
                continue;
            }
            if let Some((key, held)) = self.alive(seg, self.hand.1)
                && !held.dirty
            {
                match self.policy.evict(held.freq) {
                    Verdict::Drop => return Some(self.hand),
                    Verdict::Keep { freq } => {
                        if let Some(h) = self.held.get_mut(&key) {
                            h.freq = freq;
                        }
                    }
                }
            }
            self.hand.1 += 1;
        }
        None
    }

    /// The block to beat where nothing is dropped before its segment is freed: the next that would be.
    fn rival(&mut self) -> Option<(u32, u32)> {
        let from = self.hand;
        for seg in self.cleaner.turns_from(from.0).take(RIVAL_SCAN as usize) {
            let first = if seg == from.0 { from.1 } else { 0 };
            for slot in first..self.segments[seg as usize].len() as u32 {
                // Where the log comes to a hole or to what stays, it goes on for nothing.
                self.hand = (seg, slot);
                let Some((_, held)) = self.alive(seg, slot) else {
                    if self.in_place() {
                        continue;
                    }
                    return None;
                };
                if !held.dirty && self.policy.evict(held.freq) == Verdict::Drop {
                    return Some(self.hand);
                }
            }
        }
        self.hand = (u32::MAX, 0);
        None
    }

    /// Appends a block, for which room is made if need be. `written` is 0 if it is clean.
    fn append(&mut self, key: u64, why: Why, freq: u8, written: u64) {
        let moved = matches!(why, Why::Moved { .. });
        let head = match (why, self.setup.oracle) {
            (_, Some(oracle)) => self.cleaner.head(Why::Written { hot: oracle(key) }),
            _ => self.cleaner.head(why),
        };
        let data = self.setup.shape.data as usize;
        if let Some(seg) = self.heads[head]
            && self.segments[seg as usize].len() >= data
        {
            self.cleaner.close(seg);
            self.heads[head] = None;
        }
        if self.heads[head].is_none() && !moved {
            self.make_room();
        }
        // Making room may have opened this very head.
        let seg = match self.heads[head] {
            Some(seg) => seg,
            None => {
                let seg = self.free.pop().expect("the reserve takes what is moved");
                self.segments[seg as usize].clear();
                self.cleaner.open(seg, head);
                self.heads[head] = Some(seg);
                seg
            }
        };
        if self.segments[seg as usize].len() >= data {
            return self.append(key, why, freq, written);
        }
        let slot = self.segments[seg as usize].len() as u32;
        self.segments[seg as usize].push(key);
        self.cleaner.append(seg, why, written > 0);
        self.policy.wrote(1);
        self.seq += 1;
        let held = Held {
            at: At::Flash { seg, slot },
            seq: self.seq,
            freq,
            dirty: written > 0,
            written,
            hot: false,
            was_cached: true,
            rewritten: false,
        };
        self.held.insert(key, held);
    }

    fn make_room(&mut self) {
        while self.free.len() <= self.setup.shape.reserve as usize {
            if !self.clean_one() {
                // Everything is dirty, or everything lives: something has to go.
                self.force();
            }
        }
    }

    /// Frees a segment; false if none can be.
    fn clean_one(&mut self) -> bool {
        let Some(seg) = self.cleaner.pick() else {
            return false;
        };
        let data = self.setup.shape.data;
        let (_, dirty) = self.cleaner.counts(seg);
        let oldest = !self.in_place();
        if dirty * 4 > data * 3 && (oldest || dirty == data) {
            self.force_out_of(seg);
        }
        let keep_max = data - data / DROP_SHARE.min(data);
        let mut kept = 0;
        for slot in 0..self.segments[seg as usize].len() as u32 {
            let Some((key, held)) = self.alive(seg, slot) else {
                continue;
            };
            let (stays, freq) = if held.dirty {
                (true, held.freq)
            } else {
                let fades = match self.cleaner.fate(seg, held.dirty, held.freq) {
                    _ if oldest => true,
                    Fate::Drop => true,
                    Fate::Move { fades, .. } => fades,
                };
                match self.policy.evict(held.freq) {
                    _ if !fades => (true, held.freq),
                    Verdict::Keep { freq } if kept < keep_max => (true, freq),
                    _ => (false, 0),
                }
            };
            if !stays {
                self.evict((seg, slot));
                continue;
            }
            kept += 1;
            self.cleaned.moved += 1;
            self.out.reinsertions += 1;
            self.kill(&held);
            let written = if held.dirty { held.written } else { 0 };
            self.append(key, Why::Moved { from: seg }, freq, written);
        }
        self.cleaner.free(seg);
        self.segments[seg as usize].clear();
        self.free.insert(0, seg);
        self.cleaned.freed += 1;
        true
    }

    fn destage(&mut self) {
        while let Some((key, written)) = self.to_destage.front().copied() {
            if written + self.setup.destage_after > self.accesses {
                return;
            }
            self.to_destage.pop_front();
            self.set_clean(key, written);
        }
    }

    fn set_clean(&mut self, key: u64, written: u64) -> bool {
        let Some(held) = self.held.get_mut(&key) else {
            return false;
        };
        let At::Flash { seg, .. } = held.at else {
            return false;
        };
        if !held.dirty || held.written != written {
            return false;
        }
        held.dirty = false;
        self.cleaner.destaged(seg);
        true
    }

    fn force_out_of(&mut self, seg: u32) {
        for slot in 0..self.segments[seg as usize].len() as u32 {
            if let Some((key, held)) = self.alive(seg, slot)
                && held.dirty
            {
                self.set_clean(key, held.written);
                self.cleaned.forced += 1;
            }
        }
    }

    /// Destages a segment's worth and drops as much.
    fn force(&mut self) {
        for _ in 0..self.setup.shape.data {
            while let Some((key, written)) = self.to_destage.pop_front() {
                if self.set_clean(key, written) {
                    self.cleaned.forced += 1;
                    break;
                }
            }
            if let Some(victim) = self.victim() {
                self.evict(victim);
            }
        }
    }
}

/// Runs a whole workload; the first of its requests, as many as `unseen`, are not counted.
pub fn run(setup: Setup, load: &Workload, unseen: usize) -> (Outcome, Cleaned) {
    let mut cache = Segmented::new(setup);
    let mut before = Outcome::default();
    for (i, request) in load.requests.iter().enumerate() {
        if i == unseen {
            before = cache.out;
        }
        cache.request(request);
    }
    (cache.out.since(&before), cache.cleaned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_policy::cleaning::Heads;
    use hearth_policy::spread;

    fn setup(order: Order, mode: WriteMode) -> Setup {
        let shape = Shape {
            segments: 130,
            data: 16,
            reserve: 3,
        };
        let heads = Heads::HotCold;
        let room = shape.room(heads.count());
        let mut config = Config::of(shape.blocks() as usize);
        config.prefetch = false;
        config.dead_space = order == Order::Oldest;
        Setup {
            config,
            mode,
            shape,
            plan: Plan {
                order,
                heads: if order == Order::Oldest {
                    Heads::One
                } else {
                    heads
                },
                most: room - room / 64,
                room,
                span: 8,
                price: 0,
            },
            destage_after: 300,
            returns: true,
            oracle: None,
        }
    }

    fn load(blocks: u64, writes: u64) -> Workload {
        let requests = (0..60_000).map(|i| Request {
            time_us: i * 1000,
            block: spread(i) % blocks,
            count: 1,
            write: spread(i ^ 1 << 40) % 100 < writes,
        });
        Workload::made("uniform", requests)
    }

    /// A cache without segments whose dead space costs nothing bounds what cleaning can give; one whose dead
    /// space stays is what freeing the oldest gives.
    #[test]
    fn it_lies_between_the_bounds_of_the_cache_without_segments() {
        let load = load(1500, 70);
        for mode in [WriteMode::Back, WriteMode::Through] {
            let bound = |dead_space| {
                let mut config = setup(Order::Index, mode).config;
                config.dead_space = dead_space;
                let mut cache = crate::Cache::new(config, mode);
                load.requests.iter().for_each(|r| cache.request(r));
                cache.out.score()
            };
            let cleaned = run(setup(Order::Index, mode), &load, 0).0.score();
            let oldest = run(setup(Order::Oldest, mode), &load, 0).0.score();
            assert!(
                (cleaned - bound(false)).abs() < 0.005,
                "{cleaned} {}",
                bound(false)
            );
            assert!(
                (oldest - bound(true)).abs() < 0.06,
                "{oldest} {}",
                bound(true)
            );
            assert!(cleaned > oldest + 0.03, "{cleaned} {oldest}");
        }
    }

    #[test]
    fn what_is_only_read_is_evicted_as_it_was() {
        let load = load(4000, 0);
        let [old, new] =
            [Order::Oldest, Order::Index].map(|o| run(setup(o, WriteMode::Back), &load, 0).0);
        assert!((old.score() - new.score()).abs() < 0.02, "{old:?} {new:?}");
        let ratio = new.flash_writes() as f64 / old.flash_writes() as f64;
        assert!(ratio < 1.1, "{ratio}");
    }
}
