//! Chooses the rules: several are tried in miniature all the time, the best is in force.
//!
//! No rule is best for all disks: a loop larger than flash wants what is there kept, a shifting
//! working set wants the newest kept, and the same disk changes its mind between day and night.
//! Every use of a sampled block is played to a miniature of each rule; what it misses and what it
//! writes count against the rule.
//!
//! When to change? Following whoever was best lately loses to patterns that swing, and waiting for who is
//! best in all loses to those that change for good. What is kept for each rule is the *work function* of a
//! task system (Borodin, Linial and Saks 1992): how much more the best sequence of rules would have cost
//! that ends with this one, if each change costs a fixed price. That needs no epochs and forgets by itself:
//! the difference is never more than the price, and when the rule in force has reached it, the best one takes over.
//!
//! A change that is taken back soon cost more than that price. So each doubles it, and it falls again with time: where
//! the lead swings, as in sweeps that turn round, the rules stay what they are, and where the load changes
//! for good, it is followed as fast as before. As long as swings are seen that a lower price would have
//! followed, it does not fall below them.

use crate::mini::{MINI_BLOCKS, Mini};
use crate::rules::{Gate, Rules};
use crate::sketch::Sketch;

/// The rules tried; the first are in force at the start.
pub const EXPERTS: [Rules; 3] = [
    Rules { gate: Gate::Reads },
    Rules { gate: Gate::Open },
    Rules { gate: Gate::All },
];
/// What a read that misses costs.
const MISS: u64 = 1024;
/// What a write that misses costs: it waits for nothing, but keeps us honest where nothing is read.
const WRITE_MISS: u64 = MISS / 16;
/// What a block written to flash costs beside it, when the endurance budget is untouched: about a
/// hundredth of a miss on a hard disk.
pub(crate) const WRITE_COST: u64 = 12;
/// Misses that others must have saved before their rules are changed to, as a share of the miniature's
/// blocks: changed rules bring nothing before the cache has been filled by them.
const PATIENCE: u64 = 16;
/// Most that this is raised to by changes that follow one another, in the miniature's blocks: more than the
/// leads can swing in a sweep that turns round.
const PATIENCE_MOST: u64 = 4;
/// Accesses in which a raised price falls by two thirds, in the miniature's blocks.
const FORGIVEN: u64 = 16;

/// Chooses among [`EXPERTS`].
#[derive(Debug)]
pub struct Tuner {
    minis: Vec<Mini>,
    /// What each has lost more than the best way of having changed between them so far.
    lost: [u64; EXPERTS.len()],
    /// What a change of rules is taken to cost now, and so the most that is held against any.
    price: u64,
    /// Blocks of a miniature.
    blocks: u64,
    /// Blocks whose hash's upper half is below this are sampled.
    threshold: u64,
    current: usize,
    /// Most that the rules in force were behind since they were the best.
    behind: u64,
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
        let mini = |rules: &Rules| Mini::new(*rules, mini_ram, mini_flash, dead_space);
        let threshold = ((kept as u64) << 32) / all as u64;
        Tuner::of(EXPERTS.iter().map(mini).collect(), kept, threshold)
    }

    /// For a cache that is in miniature itself, of so many blocks; its miniatures' sketches have `lines`.
    pub(crate) fn scaled(ram: usize, flash: usize, dead_space: bool, lines: usize) -> Tuner {
        let kept = ram + flash;
        let mini = |rules: &Rules| {
            let sketch = Sketch::with_lines(kept, lines);
            Mini::with_sketch(*rules, ram, flash, dead_space, sketch)
        };
        Tuner::of(EXPERTS.iter().map(mini).collect(), kept, 1 << 32)
    }

    fn of(minis: Vec<Mini>, kept: usize, threshold: u64) -> Tuner {
        Tuner {
            minis,
            lost: [0; EXPERTS.len()],
            price: kept as u64 * MISS / PATIENCE,
            blocks: kept as u64,
            threshold,
            current: 0,
            behind: 0,
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

    /// Sets what a block written to flash costs, in 1024ths of a read that misses.
    pub fn set_write_cost(&mut self, cost: u64) {
        self.write_cost = cost;
    }

    /// Notes a use of a block by its hash. `covered` if prefetch had just brought it: then
    /// nothing was gained by caching it.
    #[inline]
    pub fn access(&mut self, hash: u64, write: bool, covered: bool) {
        if hash >> 32 < self.threshold {
            self.play(hash as u32, write, covered);
        }
    }

    /// Bytes it takes, roughly.
    pub(crate) fn footprint(&self) -> usize {
        self.minis.iter().map(Mini::footprint).sum()
    }

    /// Plays a use of a sampled block.
    pub(crate) fn play(&mut self, block: u32, write: bool, covered: bool) {
        let miss = match (covered, write) {
            (true, _) => 0,
            (_, true) => WRITE_MISS,
            (_, false) => MISS,
        };
        let mut least = u64::MAX;
        for (mini, lost) in self.minis.iter_mut().zip(&mut self.lost) {
            if !mini.access(block, write, covered) {
                *lost += miss;
            }
            *lost += std::mem::take(&mut mini.written) * self.write_cost;
            least = least.min(*lost);
        }
        let all = self.blocks * MISS;
        self.price = (self.price - self.price / (self.blocks * FORGIVEN)).max(all / PATIENCE);
        // Whoever is further behind could have been left for the best at the cost of one change.
        for lost in &mut self.lost {
            *lost = (*lost - least).min(self.price);
        }
        if self.lost[self.current] == 0 {
            // A lead of others that was lost again: to follow it would have been wrong.
            if self.behind > all / PATIENCE {
                let above = self.behind + self.behind / 2;
                self.price = self.price.max(above.min(all * PATIENCE_MOST));
            }
            self.behind = 0;
        } else if self.lost[self.current] < self.price {
            self.behind = self.behind.max(self.lost[self.current]);
        } else {
            self.behind = 0;
            self.current = (0..EXPERTS.len())
                .min_by_key(|i| self.lost[*i])
                .unwrap_or(self.current);
            self.switches += 1;
            self.price = (self.price * 2).min(all * PATIENCE_MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spread;

    fn feed(tuner: &mut Tuner, keys: impl Iterator<Item = u64>) {
        for key in keys {
            tuner.access(spread(key), false, false);
        }
    }

    #[test]
    fn a_loop_wants_the_gate_and_a_drift_does_not() {
        let mut tuner = Tuner::new(10, 990, true);
        feed(&mut tuner, (0..40_000).map(|i| i % 1500));
        assert_ne!(
            tuner.rules().gate,
            Gate::Open,
            "a loop of one and a half caches"
        );
        // A working set of half the cache that moves on: only the newest matters.
        let drift = (0..120_000u64).map(|i| 10_000 + i / 20 + spread(i) % 500);
        feed(&mut tuner, drift);
        assert_eq!(tuner.rules().gate, Gate::Open, "a drifting working set");
        feed(&mut tuner, (0..120_000).map(|i| i % 1500));
        assert_ne!(tuner.rules().gate, Gate::Open, "the loop again");
        assert!(tuner.switches() >= 2);
    }
}
