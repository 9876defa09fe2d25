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
//!
//! The size of the RAM stage is chosen in the same way: each of the rules is tried with either of two sizes. In a
//! miniature what the stage takes is missing on flash, and the larger one must hit a little more, so that it grows only
//! where a block in it earns more than one there, and is given back where it earns nothing. A change of size
//! alone is cheaper than one of rules: most of what is on flash is in no wrong place afterwards.

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
/// Sizes of the RAM stage.
pub(crate) const SIZES: usize = 2;
/// Pairs of rules and a size: all rules with the first, all rules with the second.
const ARMS: usize = EXPERTS.len() * SIZES;
/// What a hit costs with the larger stage: it must hit a 512th more than the smaller, or its RAM is given back. Whoever
/// hits little is asked for little.
const RENT: u64 = MISS / 512;
/// Misses that another size of the stage must have saved at least, as a share of the miniature's blocks.
const STEP: u64 = 64;
/// Misses that others must have saved before their rules are changed to, as a share of the miniature's
/// blocks: changed rules bring nothing before the cache has been filled by them.
const PATIENCE: u64 = 16;
/// Most that this is raised to by changes that follow one another, in the miniature's blocks: more than the
/// leads can swing in a sweep that turns round.
const PATIENCE_MOST: u64 = 4;
/// Accesses in which a raised price falls by two thirds, in the miniature's blocks.
const FORGIVEN: u64 = 16;

/// Chooses among [`EXPERTS`], and how large the RAM stage is.
#[derive(Debug)]
pub struct Tuner {
    /// Of each pair of rules and a size; the same sizes again have no miniatures.
    minis: Vec<Mini>,
    /// What each has lost more than the best way of having changed between them so far.
    lost: [u64; ARMS],
    /// The sizes, in blocks of the full cache.
    sizes: [usize; SIZES],
    /// What a change of rules is taken to cost now, and so the most that is held against any.
    price: u64,
    /// What a change of the stage's size is: it pushes as many blocks out of flash as the sizes differ by.
    step: u64,
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
    /// For a cache of so many blocks in the RAM stage (at least and at most) and on flash; see
    /// [`dead_space`](crate::Config::dead_space).
    pub fn new(ram: [usize; SIZES], flash: usize, dead_space: bool) -> Tuner {
        let all = (ram[0] + flash).max(1);
        let kept = all.min(MINI_BLOCKS);
        let scaled = ram.map(|ram| (ram * kept / all).clamp(1, kept.div_ceil(2)));
        // Where both are the same in miniature, the larger could not be told from the smaller.
        let sizes = if scaled[0] == scaled[1] {
            &scaled[..1]
        } else {
            &scaled
        };
        let differ = scaled[0].abs_diff(scaled[1]) as u64;
        let mini = |(ram, rules): (usize, Rules)| {
            Mini::new(rules, ram, kept.saturating_sub(ram).max(1), dead_space)
        };
        let arms = sizes
            .iter()
            .flat_map(|ram| EXPERTS.map(|rules| (*ram, rules)));
        let threshold = ((kept as u64) << 32) / all as u64;
        Tuner {
            step: (kept as u64 / STEP).max(differ) * MISS,
            ..Tuner::of(arms.map(mini).collect(), ram, kept, threshold)
        }
    }

    /// For a cache that is in miniature itself, of so many blocks; its miniatures' sketches have `lines`.
    pub(crate) fn scaled(ram: usize, flash: usize, dead_space: bool, lines: usize) -> Tuner {
        let kept = ram + flash;
        let mini = |rules: &Rules| {
            let sketch = Sketch::with_lines(kept, lines);
            Mini::with_sketch(*rules, ram, flash, dead_space, sketch)
        };
        let sizes = [ram; SIZES];
        Tuner::of(EXPERTS.iter().map(mini).collect(), sizes, kept, 1 << 32)
    }

    fn of(minis: Vec<Mini>, sizes: [usize; SIZES], kept: usize, threshold: u64) -> Tuner {
        Tuner {
            minis,
            lost: [0; ARMS],
            sizes,
            price: kept as u64 * MISS / PATIENCE,
            step: 0,
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
        EXPERTS[self.current % EXPERTS.len()]
    }

    /// Blocks the RAM stage should have.
    pub fn stage(&self) -> usize {
        self.sizes[self.current / EXPERTS.len()]
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
        for (arm, (mini, lost)) in self.minis.iter_mut().zip(&mut self.lost).enumerate() {
            if !mini.access(block, write, covered) {
                *lost += miss;
            } else if arm >= EXPERTS.len() && !covered {
                *lost += RENT;
            }
            *lost += std::mem::take(&mut mini.written) * self.write_cost;
            least = least.min(*lost);
        }
        let all = self.blocks * MISS;
        self.price = (self.price - self.price / (self.blocks * FORGIVEN)).max(all / PATIENCE);
        // Whoever is further behind could have been left for the best at the cost of one change.
        let (price, step) = (self.price, self.step.min(self.price));
        let lost = &mut self.lost[..self.minis.len()];
        for lost in lost.iter_mut() {
            *lost = (*lost - least).min(price);
        }
        for arm in EXPERTS.len()..lost.len() {
            let other = arm - EXPERTS.len();
            (lost[arm], lost[other]) = (
                lost[arm].min(lost[other] + step),
                lost[other].min(lost[arm] + step),
            );
        }
        self.note_swing();
        let lost = &self.lost[..self.minis.len()];
        let same_rules = |arm: usize| arm % EXPERTS.len() == self.current % EXPERTS.len();
        let change = |arm: usize| lost[arm] + if same_rules(arm) { step } else { price };
        let others = (0..lost.len()).filter(|arm| *arm != self.current);
        if let Some(best) = others.min_by_key(|arm| change(*arm))
            && change(best) <= lost[self.current]
        {
            if !same_rules(best) {
                self.price = (price * 2).min(all * PATIENCE_MOST);
                self.switches += 1;
                self.behind = 0;
            }
            self.current = best;
        }
    }

    /// Keeps the price above a lead of others that was lost again: to follow it would have been wrong.
    fn note_swing(&mut self) {
        let rules = self.current % EXPERTS.len();
        let sizes = (rules..self.minis.len()).step_by(EXPERTS.len());
        let behind = sizes.map(|arm| self.lost[arm]).min().unwrap_or(0);
        if behind > 0 {
            self.behind = self.behind.max(behind);
            return;
        }
        let all = self.blocks * MISS;
        if self.behind > all / PATIENCE {
            let above = self.behind + self.behind / 2;
            self.price = self.price.max(above.min(all * PATIENCE_MOST));
        }
        self.behind = 0;
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
        let mut tuner = Tuner::new([10, 10], 990, true);
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

    #[test]
    fn the_stage_is_as_large_as_pays() {
        let sizes = [10, 100];
        let mut tuner = Tuner::new(sizes, 9_990, false);
        assert_eq!(tuner.stage(), sizes[0]);
        // Each block is read twice, the second time before it would have left the larger stage.
        feed(&mut tuner, (120..200_120).map(|i| i / 2 - i % 2 * 60));
        assert_eq!(tuner.stage(), sizes[1], "what is read soon again");
        feed(&mut tuner, (0..200_000).map(|i| 1_000_000 + i % 5_000));
        assert_eq!(tuner.stage(), sizes[0], "flash holds it all");
        feed(
            &mut tuner,
            (0..200_000).map(|i| 2_000_000 + i / 2 - i % 2 * 60),
        );
        assert_eq!(tuner.stage(), sizes[1], "again");
    }

    #[test]
    fn sizes_that_miniatures_cannot_tell_apart_are_one() {
        let mut tuner = Tuner::new([256, 300], 1 << 20, false);
        assert_eq!(tuner.minis.len(), EXPERTS.len());
        feed(&mut tuner, (120..200_120).map(|i| i / 2 - i % 2 * 60));
        assert_eq!(tuner.stage(), 256);
    }
}
