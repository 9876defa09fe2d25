//! How often was a block asked for lately? A count-min sketch that halves itself.
//!
//! To tell "again and again" from "once" for blocks that are not cached, exact counts would cost
//! more than the cache's index. Ten bits per cached block do: two rows of 4-bit counters (Cormode
//! and Muthukrishnan 2005, conservative update; aging as in TinyLFU, Einziger et al. 2017). More
//! rows in the same memory make every row fuller and the estimate worse.

const ROWS: u64 = 2;
const COUNTER_MAX: u64 = 15;
const PER_WORD: u64 = 16;
/// Keeps the lower three bits of each counter when a word is shifted down.
const HALVE: u64 = 0x7777_7777_7777_7777;
/// Bits of memory per cached block.
const BITS_PER_BLOCK: u64 = 10;
/// Words of a row at least: 8 KiB, so that small caches need not be forgetful.
const ROW_WORDS_MIN: u64 = 1024;
/// Uses per cached block between halvings: a working set several times flash still counts.
const PERIOD: u64 = 10;
/// Odd constants that give each row its own hash (from xxHash64 and SplitMix64).
const ROW_HASH: [u64; ROWS as usize] = [0x9E37_79B1_85EB_CA87, 0xC2B2_AE3D_27D4_EB4F];

/// Estimates how often keys were used.
#[derive(Debug)]
pub struct Sketch {
    words: Vec<u64>,
    row_words: u64,
    added: u64,
    period: u64,
}

impl Sketch {
    /// A sketch for a cache of `blocks`.
    pub fn new(blocks: usize) -> Sketch {
        let row_words = Self::row_words(blocks);
        Sketch {
            words: vec![0; (row_words * ROWS) as usize],
            row_words,
            added: 0,
            period: (blocks as u64 * PERIOD).max(64),
        }
    }

    fn row_words(blocks: usize) -> u64 {
        (blocks as u64 * BITS_PER_BLOCK / 64 / ROWS).max(ROW_WORDS_MIN)
    }

    /// Bytes a sketch for a cache of `blocks` takes.
    pub fn footprint_of(blocks: usize) -> usize {
        (Self::row_words(blocks) * ROWS * 8) as usize
    }

    #[inline]
    fn place(&self, hash: u64, row: u64) -> (usize, u32) {
        let h = hash.wrapping_mul(ROW_HASH[row as usize]);
        let h = (h ^ (h >> 31)) & 0xFFFF_FFFF;
        let at = (h * (self.row_words * PER_WORD)) >> 32;
        (
            (row * self.row_words + at / PER_WORD) as usize,
            (at % PER_WORD) as u32 * 4,
        )
    }

    /// Counts a use.
    pub fn add(&mut self, hash: u32) {
        let hash = u64::from(hash);
        let least = u64::from(self.estimate(hash as u32));
        if least < COUNTER_MAX {
            for row in 0..ROWS {
                let (word, shift) = self.place(hash, row);
                if self.words[word] >> shift & COUNTER_MAX == least {
                    self.words[word] += 1 << shift;
                }
            }
        }
        self.added += 1;
        if self.added >= self.period {
            // One pass over memory per ten uses of every cached block.
            for word in &mut self.words {
                *word = *word >> 1 & HALVE;
            }
            self.added /= 2;
        }
    }

    /// Uses counted, aged. Never too low since the last halving, up to 15.
    pub fn estimate(&self, hash: u32) -> u8 {
        (0..ROWS)
            .map(|row| {
                let (word, shift) = self.place(u64::from(hash), row);
                self.words[word] >> shift & COUNTER_MAX
            })
            .min()
            .unwrap_or(0) as u8
    }

    /// Bytes it takes.
    pub fn footprint(&self) -> usize {
        self.words.len() * 8
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
