//! How often was a block missed lately? A count-min sketch that halves itself.
//!
//! To tell "again and again" from "once" for blocks that are not cached, exact counts would cost
//! more than the cache's index. A few bits per cached block do, if hits are left out: 4-bit counters (Cormode and
//! Muthukrishnan 2005, conservative update; aging as in TinyLFU, Einziger et al. 2017). Both
//! counters of a block lie in one cache line, so that a use costs one miss of the processor's
//! caches. A halving touches nothing: each line knows when it was halved last and catches up when it is
//! used next, so no request waits for a pass over memory.

const COUNTER_MAX: u64 = 15;
/// Keeps the lower three bits of each counter when a word is shifted down.
const HALVE: u64 = 0x7777_7777_7777_7777;
/// Bits of memory per cached block.
const BITS_PER_BLOCK: usize = 4;
/// Lines at least: 16 KiB, so that small caches need not be forgetful.
const LINES_MIN: usize = 256;
/// Misses per cached block that count, by and large: a working set several times flash does.
const PERIOD: u64 = 5;
const LINE_BITS: usize = 512;
/// Counters of the first half of a line, and of the second, whose last byte is the line's age.
const FIRST: u64 = 64;
const SECOND: u64 = 62;
/// Of xxHash64.
const COUNTER_HASH: u64 = 0x9E37_79B1_85EB_CA87;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u64; 8]);

impl Line {
    fn epoch(&self) -> u8 {
        (self.0[7] >> 56) as u8
    }

    /// Halves as often as has been missed since it was used last.
    #[inline]
    fn age_to(&mut self, epoch: u8) {
        let missed = epoch.wrapping_sub(self.epoch());
        if missed == 0 {
            return;
        }
        self.0[7] &= u64::MAX >> 8;
        for _ in 0..missed.min(4) {
            for word in &mut self.0 {
                *word = *word >> 1 & HALVE;
            }
        }
        self.0[7] |= u64::from(epoch) << 56;
    }

    #[inline]
    fn counter(&self, at: u64) -> u64 {
        self.0[(at / 16) as usize] >> (at % 16 * 4) & COUNTER_MAX
    }
}

/// Estimates how often keys were used.
#[derive(Debug)]
pub struct Sketch {
    lines: Vec<Line>,
    /// Halvings so far.
    epoch: u8,
    left: u64,
    period: u64,
}

impl Sketch {
    /// A sketch for a cache of `blocks`.
    pub fn new(blocks: usize) -> Sketch {
        Self::with_lines(blocks, Self::lines(blocks))
    }

    /// The same with so many lines: in a miniature, each holds the counts of as many blocks as in the full one.
    pub(crate) fn with_lines(blocks: usize, lines: usize) -> Sketch {
        // The first period is twice as long, as every one begins with half of the last.
        let period = (blocks as u64 * PERIOD / 2).max(64);
        Sketch {
            lines: vec![Line([0; 8]); lines.max(1)],
            epoch: 0,
            left: period * 2,
            period,
        }
    }

    /// Lines for a cache of `blocks`.
    pub(crate) fn lines(blocks: usize) -> usize {
        (blocks * BITS_PER_BLOCK / LINE_BITS).max(LINES_MIN)
    }

    /// Bytes a sketch for a cache of `blocks` takes.
    pub fn footprint_of(blocks: usize) -> usize {
        Self::lines(blocks) * LINE_BITS / 8
    }

    /// Its line and both its counters.
    #[inline]
    fn place(&self, hash: u32) -> (usize, u64, u64) {
        let line = (u64::from(hash) * self.lines.len() as u64) >> 32;
        let h = u64::from(hash).wrapping_mul(COUNTER_HASH);
        let h = h ^ (h >> 29);
        let (a, b) = (h >> 40 & 0xFFFF, h & 0xFFFF);
        (
            line as usize,
            (a * FIRST) >> 16,
            FIRST + ((b * SECOND) >> 16),
        )
    }

    /// Counts a use.
    #[inline]
    pub fn add(&mut self, hash: u32) {
        let (at, a, b) = self.place(hash);
        let line = &mut self.lines[at];
        line.age_to(self.epoch);
        let (first, second) = (line.counter(a), line.counter(b));
        let least = first.min(second);
        if least < COUNTER_MAX {
            for (at, count) in [(a, first), (b, second)] {
                line.0[(at / 16) as usize] += u64::from(count == least) << (at % 16 * 4);
            }
        }
        self.left -= 1;
        if self.left == 0 {
            self.left = self.period;
            self.epoch = self.epoch.wrapping_add(1);
        }
    }

    /// Uses counted, aged. Never too low since the last halving, up to 15.
    #[inline]
    pub fn estimate(&self, hash: u32) -> u8 {
        let (at, a, b) = self.place(hash);
        let line = &self.lines[at];
        let missed = self.epoch.wrapping_sub(line.epoch()).min(4);
        (line.counter(a).min(line.counter(b)) >> missed) as u8
    }

    /// Bytes it takes.
    pub fn footprint(&self) -> usize {
        self.lines.len() * LINE_BITS / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spread;

    #[test]
    fn counts_are_never_too_low_and_rarely_too_high() {
        let mut sketch = Sketch::new(4096);
        for n in 0..1000u64 {
            for _ in 0..=(n % 10) {
                sketch.add(spread(n) as u32);
            }
        }
        let mut high = 0;
        for n in 0..1000u64 {
            let estimate = u64::from(sketch.estimate(spread(n) as u32));
            assert!(estimate > n % 10);
            high += u64::from(estimate > n % 10 + 1);
        }
        assert!(high < 150, "{high} of 1000 are too high");
    }

    #[test]
    fn counts_fade() {
        let mut sketch = Sketch::new(16);
        for _ in 0..12 {
            sketch.add(1);
        }
        for n in 0..400u64 {
            sketch.add(spread(1000 + n % 4) as u32);
        }
        assert!(sketch.estimate(1) < 6);
    }
}
