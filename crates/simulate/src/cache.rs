//! The engine's side of the policy, without an engine: RAM stage, log, what is where.
//!
//! Space is counted as the log spends it: a block that was overwritten takes its place until the
//! log's end has passed it. Segments are not modelled; in an engine the open and the draining
//! ones cost about three segments (12 MiB) of space.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hearth_policy::prefetch::Source;
use hearth_policy::{Config, Place, Policy, Range, Stay, Use, Verdict};

use crate::outcome::Outcome;
use crate::workload::Request;

/// What happens to written data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// The origin is written at once; the copy in the cache is renewed in RAM and goes on flash
    /// by its merit.
    #[default]
    Through,
    /// Every write goes on flash at once.
    Back,
    /// The origin is written at once, and the copy in the cache is dropped.
    Around,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Ram,
    Flash,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    at: At,
    seq: u64,
    freq: u8,
    covered: bool,
    unused: Option<Source>,
    written: bool,
    /// When a prefetched block arrives.
    ready_us: u64,
}

/// Dead entries of the log that are not worth clearing away.
const SPARE: usize = 1024;

type Queue = VecDeque<(u64, u64)>;

/// A cache under [`Policy`].
#[derive(Debug)]
pub struct Cache {
    policy: Policy,
    mode: WriteMode,
    ram_max: usize,
    flash_max: usize,
    held: HashMap<u64, Held>,
    ram: Queue,
    log: Queue,
    in_ram: usize,
    on_flash: usize,
    dead_space: bool,
    /// Prefetched blocks not yet used.
    waiting: usize,
    seq: u64,
    ahead: Vec<(Range, Source)>,
    now_us: u64,
    /// Time from asking for a block ahead of its use to having it, microseconds. A use before
    /// counts as a miss.
    pub latency_us: u64,
    /// What happened.
    pub out: Outcome,
}

impl Cache {
    /// An empty cache.
    pub fn new(config: Config, mode: WriteMode) -> Cache {
        Cache {
            ram_max: config.ram,
            flash_max: config.flash,
            dead_space: config.dead_space,
            policy: Policy::new(config),
            mode,
            held: HashMap::new(),
            ram: Queue::new(),
            log: Queue::new(),
            in_ram: 0,
            on_flash: 0,
            waiting: 0,
            seq: 0,
            ahead: Vec::new(),
            now_us: 0,
            latency_us: 0,
            out: Outcome::default(),
        }
    }

    /// The policy, to look at.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Serves a request.
    pub fn request(&mut self, request: &Request) {
        self.policy.tick(request.time_us);
        self.now_us = request.time_us;
        let n = u64::from(request.count);
        let mut ahead = std::mem::take(&mut self.ahead);
        ahead.clear();
        let in_stream =
            !request.write && self.policy.read(request.block, request.count, &mut ahead);
        let (mut hits, mut foreseen, mut waited) = (0, 0, false);
        for key in request.block..request.block + n {
            let how = self.access(key, request.write);
            hits += u64::from(!matches!(how, Use::Miss | Use::Late(_)));
            foreseen += u64::from(matches!(how, Use::Prefetched(_)));
            waited |= how != Use::Hit;
        }
        if request.write {
            self.out.writes += n;
            self.out.write_hits += hits;
        } else {
            self.out.reads += n;
            self.out.read_hits += hits;
            self.out.prefetch_hits += foreseen;
            if waited {
                self.policy
                    .waited(request.block, request.count, in_stream, &mut ahead);
            }
        }
        for (range, source) in &ahead {
            self.prefetch(*range, *source);
        }
        self.ahead = ahead;
    }

    fn prefetch(&mut self, range: Range, source: Source) {
        let mut any = false;
        for key in range.key..range.key.saturating_add(u64::from(range.count)) {
            // Half the stage at most, so that what was asked for keeps its probation.
            if self.waiting * 2 > self.ram_max {
                break;
            }
            if self.held.contains_key(&key) {
                continue;
            }
            any = true;
            self.out.prefetched += 1;
            self.waiting += 1;
            self.put(key, At::Ram, 0, true, Some(source));
        }
        self.out.prefetch_requests += u64::from(any);
        self.settle();
    }

    fn put(&mut self, key: u64, at: At, freq: u8, covered: bool, unused: Option<Source>) {
        self.seq += 1;
        // Where dead space costs nothing, nothing else would bound the queue.
        if at == At::Flash && self.log.len() > 2 * self.flash_max + SPARE {
            let held = &self.held;
            self.log
                .retain(|(key, seq)| held.get(key).is_some_and(|h| h.seq == *seq));
        }
        let queue = match at {
            At::Ram => {
                self.in_ram += 1;
                &mut self.ram
            }
            At::Flash => {
                self.on_flash += 1;
                &mut self.log
            }
        };
        queue.push_back((key, self.seq));
        let seq = self.seq;
        self.held.insert(
            key,
            Held {
                at,
                seq,
                freq,
                covered,
                unused,
                written: false,
                ready_us: self.now_us.saturating_add(self.latency_us),
            },
        );
        if at != At::Ram {
            self.policy.wrote(1);
        }
    }

    fn access(&mut self, key: u64, write: bool) -> Use {
        let mut how = Use::Miss;
        let mut freq = 0;
        let mut place = None;
        if let Some(held) = self.held.get_mut(&key) {
            if let Some(source) = held.unused.take() {
                self.waiting -= 1;
                how = if self.now_us < held.ready_us {
                    self.out.prefetch_late += 1;
                    held.covered = false;
                    Use::Late(source)
                } else {
                    Use::Prefetched(source)
                };
            } else {
                how = Use::Hit;
                held.freq = Policy::touch(held.freq);
                held.covered = false;
            }
            freq = held.freq;
            place = Some(held.at);
        }
        self.policy.used(key, write, how);
        match (self.mode, place) {
            (WriteMode::Back, at) if write => {
                match at {
                    Some(At::Ram) => self.in_ram -= 1,
                    Some(At::Flash) => self.on_flash -= 1,
                    None => {}
                }
                self.held.remove(&key);
                self.out.updates += 1;
                self.make_room();
                self.put(key, At::Flash, freq, false, None);
            }
            (WriteMode::Around, at) if write => {
                match at {
                    Some(At::Ram) => self.in_ram -= 1,
                    Some(At::Flash) => self.on_flash -= 1,
                    None => {}
                }
                self.held.remove(&key);
            }
            // The copy on flash is void, the new one begins in RAM.
            (_, Some(At::Flash)) if write => {
                self.on_flash -= 1;
                self.put(key, At::Ram, freq, false, None);
                self.settle();
            }
            (_, None) => {
                self.put(key, At::Ram, 0, false, None);
                self.settle();
            }
            _ => {}
        }
        if write && let Some(held) = self.held.get_mut(&key) {
            held.written = true;
        }
        self.resize();
        how
    }

    /// Gives the RAM stage the size that pays. What it takes is missing on flash, so that caches are compared that
    /// hold the same.
    fn resize(&mut self) {
        let stage = self.policy.stage();
        if stage == self.ram_max {
            return;
        }
        self.flash_max = (self.flash_max + self.ram_max).saturating_sub(stage).max(1);
        self.ram_max = stage;
        self.settle();
        while self.taken() > self.flash_max {
            match self.victim() {
                Some(victim) => self.drop_oldest(victim),
                None => return,
            }
        }
    }

    /// The oldest living block of a queue; dead space before it is cleared away.
    fn oldest(held: &HashMap<u64, Held>, queue: &mut Queue) -> Option<(u64, Held)> {
        while let Some((key, seq)) = queue.front() {
            if let Some(h) = held.get(key)
                && h.seq == *seq
            {
                return Some((*key, *h));
            }
            queue.pop_front();
        }
        None
    }

    /// Blocks of flash that hold something, be it dead.
    fn taken(&self) -> usize {
        if self.dead_space {
            self.log.len()
        } else {
            self.on_flash
        }
    }

    fn full(&self) -> bool {
        self.taken() >= self.flash_max
    }

    /// Brings the RAM stage back to its size.
    fn settle(&mut self) {
        while self.in_ram > self.ram_max {
            let Some((key, held)) = Self::oldest(&self.held, &mut self.ram) else {
                return;
            };
            self.ram.pop_front();
            self.held.remove(&key);
            self.in_ram -= 1;
            let stay = Stay {
                freq: held.freq,
                covered: held.covered,
                unused: held.unused,
                written: held.written,
            };
            if stay.unused.is_some() {
                self.waiting -= 1;
                self.out.prefetch_wasted += 1;
            }
            match self.policy.leave(stay, self.full()) {
                Place::Drop => continue,
                Place::Put(freq) => self.put(key, At::Flash, freq, false, None),
                Place::Compete => {
                    if let Some(victim) = self.victim() {
                        if !self.policy.displaces(stay, key, victim) {
                            continue;
                        }
                        self.drop_oldest(victim);
                    }
                    let freq = self.policy.credit(stay);
                    self.put(key, At::Flash, freq, false, None);
                }
            }
            self.out.insertions += 1;
        }
    }

    fn drop_oldest(&mut self, key: u64) {
        self.held.remove(&key);
        self.log.pop_front();
        self.on_flash -= 1;
    }

    fn make_room(&mut self) {
        if self.full()
            && let Some(victim) = self.victim()
        {
            self.drop_oldest(victim);
        }
    }

    /// The block that has to go next; `None` when clearing dead space made room.
    fn victim(&mut self) -> Option<u64> {
        while self.full() {
            let before = self.log.len();
            let oldest = Self::oldest(&self.held, &mut self.log);
            if self.dead_space && self.log.len() < before {
                continue;
            }
            let (key, held) = oldest?;
            match self.policy.evict(held.freq) {
                Verdict::Drop => return Some(key),
                Verdict::Keep { freq } => {
                    self.log.pop_front();
                    self.on_flash -= 1;
                    self.out.reinsertions += 1;
                    self.put(key, At::Flash, freq, false, None);
                }
            }
        }
        None
    }
}
