//! What would Hearth do with more or less flash? Its own rules in miniature, at sizes that double.
//!
//! A miss-ratio curve from stack distances is LRU's, and Hearth is no LRU: it turns newcomers away, and
//! keeps a loop's part that fits. No stack distance shows that, so at each of a few sizes
//! there is a cache in miniature with the rules that its own tuner finds best, and written blocks go straight to
//! its flash as in write-back. Miniatures of so few blocks are noisy, but most of the noise is in who is sampled, and
//! hits LRU as well. So only the *difference* to what LRU hits among the same accesses is taken from
//! them, and added to the curve, which rests on a much larger sample. What they write tells what a written block
//! costs in flash.
//!
//! Reading ahead is left out: it depends on when requests come, not on what is kept.

mod kept;

use crate::mini::{MINI_BLOCKS, Mini};
use crate::mrc::{ALL, Mrc, place};
use crate::policy::Config;
use crate::sketch::Sketch;
use crate::spread;
use crate::tuner::Tuner;

pub use kept::{KeptLadder, KeptRung};

/// Blocks of a miniature where there is no lack of memory, and at least.
const BLOCKS: usize = 192;
const BLOCKS_MIN: usize = 32;
/// The curve's sample has at least so many times the blocks of a miniature.
const SAMPLES_PER_BLOCK: usize = 16;
/// Reads before a miniature's word counts, as for the curve.
const READS_MIN: f64 = 400.0;
/// Writes before there is a word on what they cost.
const WRITES_MIN: f64 = 200.0;
/// The engine cleans its log, so what was overwritten does not keep its place until the oldest goes. What moving costs
/// is not among the writes that are told.
const DEAD_SPACE: bool = false;

/// One size.
#[derive(Debug)]
struct Rung {
    /// The size is that of a miniature, doubled so often.
    doubled: u32,
    /// Says which rules would be in force.
    tuner: Tuner,
    /// The cache under these rules.
    cache: Mini,
    /// It has been full. Before, it hits whatever came since it was begun, which says nothing.
    was_full: bool,
    /// Counted since then: reads, its hits, LRU's hits, blocks that guests wrote, blocks written to flash.
    reads: f64,
    hits: f64,
    lru_hits: f64,
    writes: f64,
    flash_writes: f64,
}

impl Rung {
    fn new(blocks: usize, doubled: u32) -> Rung {
        let size = blocks << doubled;
        let ram = (Config::stage_of(size, true) >> doubled).clamp(1, blocks / 2);
        let flash = blocks - ram;
        // What shares a counter decides at the gate: as many blocks must as in the full cache and in its tuner.
        let lines = |full: usize| Sketch::lines(full) * blocks / full;
        let tuner = Tuner::scaled(ram, flash, DEAD_SPACE, lines(size.min(MINI_BLOCKS)));
        let sketch = Sketch::with_lines(blocks, lines(size));
        Rung {
            doubled,
            cache: Mini::with_sketch(tuner.rules(), ram, flash, DEAD_SPACE, sketch),
            tuner,
            was_full: false,
            reads: 0.0,
            hits: 0.0,
            lru_hits: 0.0,
            writes: 0.0,
            flash_writes: 0.0,
        }
    }

    fn play(&mut self, size: u64, hash: u64, write: bool, distance: Option<u64>) {
        // Miniatures of a sample that is one already: all of it is theirs.
        self.tuner.play(hash as u32, write, false);
        self.cache.follow(self.tuner.rules());
        let hit = if write {
            self.cache.write_back(hash as u32)
        } else {
            self.cache.access(hash as u32, false, false)
        };
        let written = std::mem::take(&mut self.cache.written);
        if !self.was_full {
            self.was_full = self.cache.is_full();
            return;
        }
        self.flash_writes += written as f64;
        if write {
            self.writes += 1.0;
        } else {
            self.reads += 1.0;
            self.hits += f64::from(u8::from(hit));
            self.lru_hits += f64::from(u8::from(distance.is_some_and(|d| d <= size)));
        }
    }

    fn gain(&self) -> Option<f64> {
        (self.reads >= READS_MIN).then(|| (self.hits - self.lru_hits) / self.reads)
    }

    fn cost(&self) -> Option<f64> {
        (self.writes >= WRITES_MIN).then(|| self.flash_writes / self.writes)
    }
}

/// Hearth in miniature at sizes that double, fed from the sample of a [`Mrc`].
#[derive(Debug)]
pub struct Ladder {
    /// Blocks of a miniature.
    blocks: usize,
    /// Smallest first. Those too small for what the sample has become are gone, those too large for what was seen
    /// yet are not there.
    rungs: Vec<Rung>,
    /// How often the next one's size is doubled.
    next: u32,
}

impl Ladder {
    /// Beside a curve of at most so many samples.
    pub fn new(samples: usize) -> Ladder {
        let blocks = (samples / SAMPLES_PER_BLOCK).clamp(BLOCKS_MIN, BLOCKS);
        Ladder {
            blocks,
            rungs: Vec::new(),
            next: 0,
        }
    }

    fn size(&self, doubled: u32) -> u64 {
        (self.blocks as u64) << doubled
    }

    /// Notes a use of a block of the curve's sample. `distance` is what
    /// [`Mrc::sampled`] said of it.
    pub fn sampled(&mut self, mrc: &Mrc, key: u64, write: bool, distance: Option<u64>) {
        // A cache of twice all there is never has to choose.
        while self.size(self.next) as f64 <= mrc.blocks() * 2.0 && ALL >> self.next > 0 {
            self.rungs.push(Rung::new(self.blocks, self.next));
            self.next += 1;
        }
        let (place, blocks) = (place(key), self.blocks as u64);
        let threshold = mrc.threshold();
        if self
            .rungs
            .first()
            .is_some_and(|r| ALL >> r.doubled > threshold)
        {
            self.rungs.retain(|r| ALL >> r.doubled <= threshold);
        }
        let hash = spread(key);
        for rung in &mut self.rungs {
            if place >= ALL >> rung.doubled {
                break;
            }
            rung.play(blocks << rung.doubled, hash, write, distance);
        }
    }

    /// Lets older accesses count half.
    pub fn decay(&mut self) {
        for rung in &mut self.rungs {
            for count in [
                &mut rung.reads,
                &mut rung.hits,
                &mut rung.lru_hits,
                &mut rung.writes,
                &mut rung.flash_writes,
            ] {
                *count /= 2.0;
            }
        }
    }

    /// Makes LRU's curve ((blocks, hit ratio), ascending) Hearth's, as far as the miniatures can tell; `None` if
    /// none of them can yet.
    pub fn corrected(&self, lru: &[(f64, f64)]) -> Option<Vec<(f64, f64)>> {
        let mut gains = vec![(0.0, 0.0)];
        gains.extend(
            self.rungs
                .iter()
                .filter_map(|r| Some((self.size(r.doubled) as f64, r.gain()?))),
        );
        let last = gains.last().filter(|_| gains.len() > 1)?.0;
        gains.push((last * 2.0, 0.0));
        let (end, best) = *lru.last()?;
        let beyond = gains.iter().filter(|g| g.0 > end).map(|g| (g.0, best));
        let mut most = 0.0f64;
        let all = lru.iter().copied().chain(beyond).map(|(size, ratio)| {
            most = most.max((ratio + between(&gains, size)).clamp(0.0, best));
            (size, most)
        });
        Some(all.collect())
    }

    /// (blocks of cache, blocks written to flash for each block that guests write), ascending in size; empty until
    /// enough was written.
    pub fn flash_writes(&self) -> Vec<(f64, f64)> {
        self.rungs
            .iter()
            .filter_map(|r| Some((self.size(r.doubled) as f64, r.cost()?)))
            .collect()
    }

    /// Bytes it takes, roughly.
    pub fn footprint(&self) -> usize {
        self.rungs
            .iter()
            .map(|r| size_of::<Rung>() + r.cache.footprint() + r.tuner.footprint())
            .sum()
    }
}

/// The value at a size between points that ascend in size; that of the nearest one outside of them, and 0 if there
/// are none.
pub fn between(points: &[(f64, f64)], size: f64) -> f64 {
    let above = points.partition_point(|p| p.0 < size);
    match (
        above.checked_sub(1).and_then(|i| points.get(i)),
        points.get(above),
    ) {
        (Some(a), Some(b)) => a.1 + (b.1 - a.1) * (size - a.0) / (b.0 - a.0),
        (Some(p), None) | (None, Some(p)) => p.1,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advise::at;

    /// The curve and the ladder after these accesses: (block, is it a write?).
    fn watch(accesses: impl Iterator<Item = (u64, bool)>) -> (Mrc, Ladder) {
        let (mut mrc, mut ladder) = (Mrc::new(), Ladder::new(crate::mrc::SAMPLES));
        for (key, write) in accesses {
            if !write {
                mrc.count(1.0);
            }
            if place(key) < mrc.threshold() {
                let distance = mrc.sampled(key, !write);
                ladder.sampled(&mrc, key, write, distance);
            }
        }
        (mrc, ladder)
    }

    /// What a cache of the full size hits of the reads and writes to flash for each written block.
    fn whole(blocks: usize, accesses: impl Iterator<Item = (u64, bool)>) -> (f64, f64) {
        let config = Config::of(blocks);
        let mut tuner = Tuner::new([config.ram; 2], config.flash, DEAD_SPACE);
        let mut cache = Mini::new(tuner.rules(), config.ram, config.flash, DEAD_SPACE);
        let (mut reads, mut hits, mut writes) = (0.0, 0.0, 0.0);
        for (key, write) in accesses {
            let hash = spread(key);
            tuner.access(hash, write, false);
            cache.follow(tuner.rules());
            if write {
                cache.write_back(hash as u32);
                writes += 1.0;
            } else {
                hits += f64::from(u8::from(cache.access(hash as u32, false, false)));
                reads += 1.0;
            }
        }
        (hits / reads, cache.written as f64 / f64::max(writes, 1.0))
    }

    fn looped() -> impl Iterator<Item = (u64, bool)> {
        (0..900_000u64).map(|i| (i % 30_000, false))
    }

    /// Skewed, and every third a write.
    fn mixed() -> impl Iterator<Item = (u64, bool)> {
        (0..900_000u64).map(|i| {
            let r = spread(i);
            let far = (r >> 40) % 40_000;
            let key = far * ((r >> 20) % 1000) / 1000 * ((r >> 8) % 100) / 100;
            (key, i % 3 == 0)
        })
    }

    #[test]
    fn a_loop_larger_than_the_cache_hits_what_lru_never_does() {
        let (mrc, ladder) = watch(looped());
        let lru = mrc.points();
        let curve = ladder.corrected(&lru).expect("enough was read");
        assert!(at(&lru, 16_000.0) < 0.01);
        for size in [12_288, 24_576] {
            let (real, _) = whole(size, looped());
            let said = at(&curve, size as f64);
            assert!(real > 0.2, "{real}");
            assert!((said - real).abs() < 0.08, "{size}: {said}, is {real}");
        }
        assert!(curve.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
    }

    #[test]
    fn writes_are_told_and_what_they_cost() {
        let (mrc, ladder) = watch(mixed());
        let lru = mrc.points();
        let curve = ladder.corrected(&lru).expect("enough was read");
        let costs = ladder.flash_writes();
        for size in [3000, 6144, 12_288] {
            let (real, cost) = whole(size, mixed());
            let (said, told) = (at(&curve, size as f64), between(&costs, size as f64));
            assert!((said - real).abs() < 0.04, "{size}: {said}, is {real}");
            assert!(
                (told / cost - 1.0).abs() < 0.15,
                "{size}: {told}, is {cost}"
            );
        }
        assert!(costs.iter().all(|c| c.1 >= 1.0), "{costs:?}");
    }

    #[test]
    fn nothing_is_said_before_enough_was_seen_and_memory_is_bounded() {
        let (mrc, ladder) = watch((0..500).map(|i| (i % 300, false)));
        assert_eq!(ladder.corrected(&mrc.points()), None);
        assert!(ladder.flash_writes().is_empty());
        // A hundred times what the sample can hold: small sizes go as it thins out.
        let (mrc, ladder) = watch((0..3_000_000u64).map(|i| (spread(i) % 1_200_000, i % 2 == 0)));
        assert!(mrc.rate() < 0.02);
        assert!(
            (4..=9).contains(&ladder.rungs.len()),
            "{}",
            ladder.rungs.len()
        );
        assert!(ladder.footprint() < 420 << 10, "{}", ladder.footprint());
    }

    #[test]
    fn values_between_points_are_between_them() {
        let points = [(10.0, 1.0), (20.0, 3.0)];
        for (size, want) in [
            (0.0, 1.0),
            (10.0, 1.0),
            (15.0, 2.0),
            (20.0, 3.0),
            (99.0, 3.0),
        ] {
            assert_eq!(between(&points, size), want);
        }
        assert_eq!(between(&[], 5.0), 0.0);
    }
}
