//! Chooses the rules: several are tried in miniature all the time, the best is in force.
//!
//! No rule is best for all disks: a loop larger than flash wants what is there kept, a shifting
//! working set wants the newest kept, and the same disk changes its mind between day and night.
//! Every use of a sampled block is played to a miniature of each rule; what it hits counts for the
//! rule, what it writes counts against it.

use crate::mini::{MINI_BLOCKS, Mini};
use crate::rules::Rules;
use crate::sketch::Sketch;

/// The rules tried.
pub const EXPERTS: [Rules; 2] = [Rules { gate: true }, Rules { gate: false }];
/// What a hit is worth.
const HIT: i64 = 1024;
/// What a block written to flash costs beside it, when the endurance budget is untouched: about a
/// hundredth of a miss on a hard disk.
pub(crate) const WRITE_COST: u64 = 12;
/// Epochs over which scores are remembered, as the divisor of their decay.
const MEMORY: i64 = 16;
/// Share of a score by which a rule must be better to be changed to, as a divisor.
const MARGIN: i64 = 256;

/// Chooses among [`EXPERTS`].
#[derive(Debug)]
pub struct Tuner {
    minis: Vec<Mini>,
    /// Worth of hits less cost of writes, decayed.
    score: [i64; EXPERTS.len()],
    hits: [i64; EXPERTS.len()],
    /// Blocks whose hash's upper half is below this are sampled.
    threshold: u64,
    accesses: u64,
    epoch: u64,
    current: usize,
    write_cost: u64,
    switches: u64,
}

impl Tuner {
    /// For a cache of so many blocks in RAM and on flash; see [`dead_space`](crate::Config::dead_space).
    pub fn new(ram: usize, flash: usize, dead_space: bool) -> Tuner {
        let all = (ram + flash).max(1);
        let kept = all.min(MINI_BLOCKS);
        let mini_ram = (ram * kept / all).max(1);
        let mini_flash = kept.saturating_sub(mini_ram).max(1);
        Tuner {
            minis: EXPERTS
                .iter()
                .map(|rules| Mini::new(*rules, mini_ram, mini_flash, dead_space))
                .collect(),
            score: [0; EXPERTS.len()],
            hits: [0; EXPERTS.len()],
            threshold: ((kept as u64) << 32) / all as u64,
            accesses: 0,
            epoch: (kept as u64 / 4).max(64),
            current: 0,
            write_cost: WRITE_COST,
            switches: 0,
        }
    }

    /// The rules in force.
    pub fn rules(&self) -> Rules {
        EXPERTS[self.current]
    }

    /// Which of [`EXPERTS`] that is.
    pub fn current(&self) -> usize {
        self.current
    }

    /// How often the rules were changed.
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Sets what a block written to flash costs, in 1024ths of a hit.
    pub fn set_write_cost(&mut self, cost: u64) {
        self.write_cost = cost;
    }

    /// Notes a use of a block by its hash. `covered` if prefetch had just brought it: then
    /// nothing was gained by caching it.
    #[inline]
    pub fn access(&mut self, hash: u64, write: bool, covered: bool, sketch: &Sketch) {
        if hash >> 32 < self.threshold {
            self.play(hash as u32, write, covered, sketch);
        }
    }

    fn play(&mut self, block: u32, write: bool, covered: bool, sketch: &Sketch) {
        let worth = if covered { 0 } else { HIT };
        for (mini, hits) in self.minis.iter_mut().zip(&mut self.hits) {
            if mini.access(block, write, covered, sketch) {
                *hits += worth;
            }
        }
        self.accesses += 1;
        if self.accesses >= self.epoch {
            self.accesses = 0;
            self.choose();
        }
    }

    fn choose(&mut self) {
        for ((mini, hits), score) in self
            .minis
            .iter_mut()
            .zip(&mut self.hits)
            .zip(&mut self.score)
        {
            let cost = std::mem::take(&mut mini.written) * self.write_cost;
            *score += std::mem::take(hits) - cost as i64 - *score / MEMORY;
        }
        let here = self.score[self.current];
        let best = (0..EXPERTS.len())
            .max_by_key(|i| self.score[*i])
            .unwrap_or(self.current);
        if self.score[best] > here + here.abs() / MARGIN {
            self.current = best;
            self.switches += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spread;

    fn feed(tuner: &mut Tuner, sketch: &mut Sketch, keys: impl Iterator<Item = u64>) {
        for key in keys {
            let hash = spread(key);
            sketch.add(hash as u32);
            tuner.access(hash, false, false, sketch);
        }
    }

    #[test]
    fn a_loop_wants_the_gate_and_a_drift_does_not() {
        let mut sketch = Sketch::new(1000);
        let mut tuner = Tuner::new(10, 990, true);
        feed(&mut tuner, &mut sketch, (0..40_000).map(|i| i % 1500));
        assert!(tuner.rules().gate, "a loop of one and a half caches");
        // A working set of half the cache that moves on: only the newest matters.
        let drift = (0..120_000u64).map(|i| 10_000 + i / 20 + spread(i) % 500);
        feed(&mut tuner, &mut sketch, drift);
        assert!(!tuner.rules().gate, "a drifting working set");
        feed(&mut tuner, &mut sketch, (0..120_000).map(|i| i % 1500));
        assert!(tuner.rules().gate, "the loop again");
        assert!(tuner.switches() >= 2);
    }
}
