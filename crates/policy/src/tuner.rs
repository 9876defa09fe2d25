//! Chooses the rules: several are tried in miniature all the time, the best one is in force.
//!
//! No rule is best for all disks: a loop larger than flash wants what is there kept, a shifting
//! working set wants the newest kept, and the same disk changes its mind between day and night.

use crate::mini::{MINI_BLOCKS, Mini};
use crate::{Rules, Sketch};

/// The rules tried.
pub const EXPERTS: [Rules; 4] = [
    Rules { cold: 26, gate: true },
    Rules { cold: 26, gate: false },
    Rules { cold: 90, gate: false },
    Rules { cold: 256, gate: false },
];
/// What a block written to flash costs, in 1024ths of a miss on a hard disk, before the
/// endurance budget adds to it.
pub const WRITE_COST: u64 = 48;

/// Chooses among [`EXPERTS`].
#[derive(Debug)]
pub struct Tuner {
    minis: Vec<Mini>,
    /// Hits less cost of writes, in 1024ths, decayed.
    score: [i64; EXPERTS.len()],
    now: [i64; EXPERTS.len()],
    /// One in `2^32 / threshold` hashes is sampled.
    threshold: u64,
    accesses: u64,
    epoch: u64,
    current: usize,
    /// Cost of a write now.
    pub write_cost: u64,
    ww: i64, decay: i64, margin: i64,
    /// Changes of rules so far.
    pub switches: u64,
}

impl Tuner {
    /// For a cache of so many blocks in RAM and on flash.
    pub fn new(ram: usize, flash: usize) -> Tuner {
        let all = (ram + flash).max(1);
        let kept = all.min(env("MINI", MINI_BLOCKS as u64) as usize);
        let mini_ram = (ram * kept / all).max(1);
        let minis = EXPERTS
            .iter()
            .map(|r| Mini::new(*r, mini_ram, kept.saturating_sub(mini_ram).max(1)))
            .collect();
        Tuner {
            minis,
            score: [0; EXPERTS.len()],
            now: [0; EXPERTS.len()],
            threshold: ((kept as u64) << 32) / all as u64,
            accesses: 0,
            epoch: (kept as u64 / env("EDIV", 2)).max(64),
            current: 0,
            write_cost: env("LAMBDA", WRITE_COST),
            ww: env("WW", 512) as i64, decay: env("DECAY", 16) as i64, margin: env("MARGIN", 64) as i64,
            switches: 0,
        }
    }

    /// The rules in force.
    pub fn rules(&self) -> Rules {
        EXPERTS[self.current]
    }

    /// Notes a use of a block by its hash. `covered` if prefetch serves it whether it is cached
    /// or not; then nothing is gained by caching it.
    pub fn access(&mut self, hash: u64, write: bool, covered: bool, sketch: &Sketch) {
        if hash >> 32 >= self.threshold && self.threshold < 1 << 32 {
            return;
        }
        let weight = if covered { 0 } else if write { self.ww } else { 1024 };
        // The sketch is asked by the same 32 bits everywhere.
        let tag = hash as u32;
        for (mini, now) in self.minis.iter_mut().zip(&mut self.now) {
            if mini.access(tag, write, covered, sketch, crate::sketch_key) {
                *now += weight;
            }
        }
        self.accesses += 1;
        if self.accesses % self.epoch == 0 {
            self.choose();
        }
    }

    fn choose(&mut self) {
        for i in 0..EXPERTS.len() {
            let cost = u64::from(std::mem::take(&mut self.minis[i].written)) * self.write_cost;
            self.score[i] += self.now[i] - cost as i64;
            self.now[i] = 0;
        }
        let best = (0..EXPERTS.len())
            .max_by_key(|i| self.score[*i])
            .unwrap_or(self.current);
        // A change costs a rebuilt cache; it must promise something.
        let margin = self.score[self.current].abs() / self.margin;
        if self.score[best] > self.score[self.current] + margin {
            self.current = best;
            self.switches += 1;
        }
        for s in &mut self.score {
            *s -= *s / self.decay;
        }
    }
}

/// x
pub fn env(n: &str, d: u64) -> u64 { std::env::var(n).ok().and_then(|v| v.parse().ok()).unwrap_or(d) }
