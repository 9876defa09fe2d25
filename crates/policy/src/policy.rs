//! What the engine asks: may this block on to flash, may that one stay, what comes next?
//!
//! The life of a block: it arrives by a miss or a prefetch into a small **RAM stage**, a FIFO of
//! data. When it leaves, [`Policy::leave`] says whether it is worth a flash write. On flash it
//! lies in the log; when it is the oldest there, [`Policy::evict`] says whether it is appended
//! again. All answers take constant time and depend on nothing but what was
//! asked before.
//!
//! Kept per cached block: two bits of use count in its slot. Kept beside: the sketch, 0.5 bytes per block; the history, 0.2; the RAM stage, 1;
//! miniatures, a fixed 2 MiB.

use crate::budget::{self, Budget};
use crate::prefetch::{Prefetcher, REACH_MAX, Source};
use crate::rules::{FREQ_MAX, Rules, Verdict};
use crate::sketch::Sketch;
use crate::tuner::{Tuner, WRITE_COST};
use crate::{Range, spread};

/// Cached blocks per remembered request: at 16 bytes each, 0.2 bytes per block.
const BLOCKS_PER_ENTRY: usize = 80;
/// Requests remembered at least.
const ENTRIES_MIN: usize = 1024;
/// How many times its normal cost a flash write weighs when the budget is nearly empty.
const PRESSURE_COST: u64 = 32;

/// Blocks of the RAM stage at least, 1 MiB, where they are no more than one in [`FLOOR_SHARE`] of all,
/// or with prefetch, which needs room there, [`AHEAD_FLOOR_SHARE`].
const STAGE_MIN: usize = 256;
/// Caches of less than 50 MiB are found in traces only; a stage of 1 MiB would be much of them.
const FLOOR_SHARE: usize = 50;
const AHEAD_FLOOR_SHARE: usize = 12;
/// The RAM stage takes at least a block for so many of the cache: 1 byte of RAM per block.
const BLOCKS_PER_STAGED: usize = 4096;
/// It may take a block for so many,
const BLOCKS_PER_STAGED_MOST: usize = 100;
/// but no more than these 8 MiB and a block for so many: what is announced for a pool is 24 bytes for each block and 64 MiB,
/// of which the index takes 19 bytes for each block, and buffers of clients 40 MiB,
const STAGE_BASE: usize = 2048;
const BLOCKS_PER_STAGED_MORE: usize = 900;
/// no more than 512 MiB, and no less than with prefetch.
const STAGE_MOST: usize = 128 << 10;

/// Sizes and switches of a policy.
#[derive(Clone, Debug)]
pub struct Config {
    /// Blocks of the RAM stage at the start, and at least.
    pub ram: usize,
    /// The same at most. How many there are between is [chosen](Policy::stage) by what they earn.
    pub ram_most: usize,
    /// Blocks of flash.
    pub flash: usize,
    /// Read ahead?
    pub prefetch: bool,
    /// Rules that stay; chosen by miniatures if `None`.
    pub rules: Option<Rules>,
    /// What may be written.
    pub budget: Budget,
    /// Does an overwritten copy keep its place until the log's end has passed it, or is the log
    /// cleaned? Miniatures count space as the log does.
    pub dead_space: bool,
}

impl Config {
    /// Blocks of the RAM stage of a cache of `blocks` at least.
    pub fn stage_of(blocks: usize, prefetch: bool) -> usize {
        let share = if prefetch {
            AHEAD_FLOOR_SHARE
        } else {
            FLOOR_SHARE
        };
        (blocks / BLOCKS_PER_STAGED)
            .max((blocks / share).min(STAGE_MIN))
            .max(1)
    }

    /// The same at most, if nobody says otherwise.
    pub fn stage_most_of(blocks: usize) -> usize {
        (blocks / BLOCKS_PER_STAGED_MOST)
            .min(STAGE_BASE + blocks / BLOCKS_PER_STAGED_MORE)
            .min(STAGE_MOST)
            .max(Config::stage_of(blocks, true))
    }

    /// Divides a cache of `blocks` into RAM stage and flash as Hearth does.
    pub fn of(blocks: usize) -> Config {
        let ram = Config::stage_of(blocks, true);
        Config {
            ram,
            ram_most: Config::stage_most_of(blocks),
            flash: blocks.saturating_sub(ram).max(1),
            prefetch: true,
            rules: None,
            budget: Budget::unlimited(),
            dead_space: true,
        }
    }
}

/// Where a block was when it was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Neither in RAM nor on flash.
    Miss,
    /// In RAM, prefetched, and used for the first time.
    Prefetched(Source),
    /// Prefetched, not there yet, and used for the first time: the guest waits for the rest of the
    /// read. [`Stay::covered`] is false for it: prefetch is too slow for this block, flash is not.
    Late(Source),
    /// In RAM or on flash.
    Hit,
}

/// What is known of a block that leaves the RAM stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    /// Uses after the one that brought it (after the first, if it was prefetched).
    pub freq: u8,
    /// All its uses so far were served by prefetch in time.
    pub covered: bool,
    /// Prefetched and never used.
    pub unused: Option<Source>,
    /// What it holds was written, not read.
    pub written: bool,
}

/// What becomes of a block that leaves the RAM stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is not worth a flash write.
    Drop,
    /// It goes on flash; there is room.
    Put(u8),
    /// It goes on flash if [`Policy::displaces`] says so of the next victim.
    Compete,
}

/// The policy of one pool.
#[derive(Debug)]
pub struct Policy {
    config: Config,
    sketch: Sketch,
    tuner: Tuner,
    prefetcher: Prefetcher,
    pressure: u32,
    write_cost: u64,
}

impl Policy {
    /// A policy that knows nothing yet.
    pub fn new(config: Config) -> Policy {
        let blocks = config.ram + config.flash;
        let most = config.ram_most.max(config.ram);
        let tuner = Tuner::new([config.ram, most], config.flash, config.dead_space);
        let entries = Self::entries(blocks, config.prefetch);
        Policy {
            sketch: Sketch::new(blocks),
            prefetcher: Prefetcher::new(
                (config.ram / 4).clamp(1, REACH_MAX as usize) as u32,
                entries.min(u32::MAX as usize) as u32,
            ),
            tuner,
            pressure: 0,
            write_cost: WRITE_COST,
            config,
        }
    }

    fn entries(blocks: usize, prefetch: bool) -> usize {
        if prefetch {
            (blocks / BLOCKS_PER_ENTRY).max(ENTRIES_MIN)
        } else {
            1
        }
    }

    /// Bytes of RAM that grow with a cache of `blocks`, the RAM stage's data aside.
    pub fn footprint_of(blocks: usize, prefetch: bool) -> usize {
        Sketch::footprint_of(blocks) + Prefetcher::footprint_of(Self::entries(blocks, prefetch))
    }

    /// A read of `count` blocks from `key` arrived. Adds what should be read ahead to `out`.
    /// True if it continues a stream; pass that to [`waited`](Self::waited).
    pub fn read(&mut self, key: u64, count: u32, out: &mut Vec<(Range, Source)>) -> bool {
        self.config.prefetch && self.prefetcher.request(key, count, out)
    }

    /// That read needed the origin, or would have without prefetch. Adds what should be read
    /// ahead to `out`.
    pub fn waited(
        &mut self,
        key: u64,
        count: u32,
        in_stream: bool,
        out: &mut Vec<(Range, Source)>,
    ) {
        if self.config.prefetch {
            self.prefetcher.waited(key, count, in_stream, out);
        }
    }

    /// A block was used.
    #[inline]
    pub fn used(&mut self, key: u64, write: bool, how: Use) {
        let hash = spread(key);
        // Hits would fill the few counters there are, and say nothing about what flash lacks.
        if how != Use::Hit {
            self.sketch.add(hash as u32);
        }
        let covered = matches!(how, Use::Prefetched(_));
        if let Use::Prefetched(source) | Use::Late(source) = how {
            self.prefetcher.outcome(source, true);
        }
        if self.config.rules.is_none() {
            self.tuner.access(hash, write, covered);
        }
    }

    /// A block is the oldest of the RAM stage and leaves it. `full` if flash has no room left
    /// that does not have to be made.
    pub fn leave(&mut self, stay: Stay, full: bool) -> Place {
        if let Some(source) = stay.unused {
            self.prefetcher.outcome(source, false);
            return Place::Drop;
        }
        if self.pressure >= budget::FULL {
            return Place::Drop;
        }
        if stay.covered && stay.freq == 0 {
            // Prefetch will bring it again for nothing.
            return Place::Drop;
        }
        if !full {
            // The first filling: nothing is displaced, and a loop is caught from its start.
            return Place::Put(0);
        }
        Place::Compete
    }

    /// Does `candidate`, of which `stay` is known, deserve the place of `victim`, which [`evict`](Self::evict)
    /// let go?
    pub fn displaces(&self, stay: Stay, candidate: u64, victim: u64) -> bool {
        if !self.rules().stops(stay.written) && self.pressure < budget::GATE {
            return true;
        }
        Rules::beats(
            self.sketch.estimate(spread(candidate) as u32),
            self.sketch.estimate(spread(victim) as u32),
        )
    }

    /// Uses a candidate that won brings along to its slot.
    pub fn credit(&self, stay: Stay) -> u8 {
        stay.freq.min(1)
    }

    /// What becomes of the oldest block of the log, used `freq` times since it was appended.
    pub fn evict(&self, freq: u8) -> Verdict {
        self.rules().verdict(freq)
    }

    /// The use count of a slot after one more use.
    pub fn touch(freq: u8) -> u8 {
        (freq + 1).min(FREQ_MAX)
    }

    /// Blocks were written to flash, for whatever reason.
    pub fn wrote(&mut self, blocks: u64) {
        self.config.budget.spend(blocks);
    }

    /// Time passed.
    pub fn tick(&mut self, now_us: u64) {
        self.config.budget.advance(now_us);
        self.pressure = self.config.budget.pressure();
        let extra = WRITE_COST * PRESSURE_COST * u64::from(self.pressure) / u64::from(budget::FULL);
        self.write_cost = WRITE_COST + extra;
        self.tuner.set_write_cost(self.write_cost);
    }

    /// What a block written to flash costs, in 1024ths of a read that misses: the more of the budget is used
    /// up, the more.
    pub fn write_cost(&self) -> u64 {
        self.write_cost
    }

    /// The rules in force.
    #[inline]
    pub fn rules(&self) -> Rules {
        self.config.rules.unwrap_or(self.tuner.rules())
    }

    /// Blocks the RAM stage should have now: what earns most, or [`Config::ram`] under rules that stay.
    #[inline]
    pub fn stage(&self) -> usize {
        match self.config.rules {
            Some(_) => self.config.ram,
            None => self.tuner.stage(),
        }
    }

    /// Bytes a second that the budget allows, and how many may be written now.
    pub fn budget(&self) -> Option<(u64, i64)> {
        self.config.budget.figures()
    }

    /// How much of the budget is used up, in 256ths.
    pub fn pressure(&self) -> u32 {
        self.pressure
    }

    /// How often the rules were changed.
    pub fn switches(&self) -> u64 {
        self.tuner.switches()
    }

    /// Share of prefetched blocks used lately, in 256ths: by streams, by history.
    pub fn useful(&self) -> (u32, u32) {
        self.prefetcher.useful()
    }

    /// Bytes of RAM that grow with the cache.
    pub fn footprint(&self) -> usize {
        self.sketch.footprint() + self.prefetcher.footprint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stay(freq: u8, covered: bool) -> Stay {
        Stay {
            freq,
            covered,
            unused: None,
            written: false,
        }
    }

    #[test]
    fn memory_is_what_the_budget_allows() {
        let blocks = 1_000_000;
        let policy = Policy::new(Config::of(blocks));
        let per_block = policy.footprint() as f64 / blocks as f64;
        assert!(per_block < 0.8, "{per_block} bytes per block");
    }

    #[test]
    fn what_others_wrote_leaves_less_for_the_cache() {
        let mut policy = Policy::new(Config {
            budget: Budget::bytes_per_second(4096),
            ..Config::of(1000)
        });
        assert_eq!(policy.budget(), Some((4096, 3600 * 4096)));
        policy.wrote(3600);
        policy.tick(0);
        assert_eq!(policy.budget(), Some((4096, 0)));
        assert_eq!(policy.leave(stay(3, false), true), Place::Drop);
        assert_eq!(Policy::new(Config::of(1000)).budget(), None);
    }

    #[test]
    fn an_empty_budget_keeps_clean_blocks_off_until_it_recovers() {
        let mut policy = Policy::new(Config {
            budget: Budget::bytes_per_second(4096),
            ..Config::of(1000)
        });
        policy.tick(0);
        assert_eq!(policy.leave(stay(0, false), false), Place::Put(0));
        policy.wrote(2800);
        policy.tick(0);
        let written = Stay {
            written: true,
            ..stay(0, false)
        };
        for stay in [stay(0, false), written] {
            assert!(
                !policy.displaces(stay, 1, 2),
                "under pressure a tie is no reason"
            );
        }
        policy.wrote(2000);
        policy.tick(0);
        assert_eq!(policy.leave(stay(3, false), true), Place::Drop);
        policy.tick(3_600_000_000);
        assert_eq!(policy.leave(stay(3, false), true), Place::Compete);
    }

    #[test]
    fn what_prefetch_brings_anyway_displaces_nothing() {
        let mut policy = Policy::new(Config::of(1000));
        assert_eq!(policy.leave(stay(0, true), true), Place::Drop);
        assert_eq!(policy.leave(stay(1, true), true), Place::Compete);
        let unused = Stay {
            unused: Some(Source::Stream),
            ..stay(0, true)
        };
        let before = policy.useful().0;
        for _ in 0..100 {
            assert_eq!(policy.leave(unused, false), Place::Drop);
        }
        assert!(policy.useful().0 < before);
    }
}
