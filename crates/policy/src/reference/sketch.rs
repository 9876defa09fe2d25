//! How often was a block asked for lately: a count-min sketch that halves itself.
//!
//! Four rows of 4-bit counters (Cormode and Muthukrishnan 2005; conservative update; aging as in
//! TinyLFU, Einziger et al. 2017). Exact counts of millions of uncached blocks would cost more
//! than the cache's index; four nibbles a block tell "again and again" from "once".

const ROWS: usize = 4;
const COUNTER_MAX: u64 = 15;
/// Lowest bit of each counter in a word, inverted shift mask for halving.
const HALVE: u64 = 0x7777_7777_7777_7777;

/// Estimates frequencies of hashed keys.
#[derive(Debug)]
pub struct Sketch {
    /// Counters of all rows, 16 to a word; row r of a key lies in its own quarter.
    words: Vec<u64>,
    /// Counters per row minus one; a power of two minus one.
    mask: u64,
    /// Increments since the last halving, and how many there are between halvings.
    added: u64,
    period: u64,
}

impl Sketch {
    /// A sketch of `width` counters a row (rounded up to a power of two, at least 16) that
    /// halves all counts every `period` increments.
    pub fn new(width: usize, period: u64) -> Sketch {
        let width = width.next_power_of_two().max(16);
        Sketch {
            words: vec![0; width / 16 * ROWS],
            mask: width as u64 - 1,
            added: 0,
            period: period.max(1),
        }
    }

    fn place(&self, hash: u64, row: usize) -> (usize, u32) {
        // Two independent halves give any number of rows (Kirsch and Mitzenmacher 2006).
        let h = (hash & 0xFFFF_FFFF).wrapping_add((hash >> 32 | 1).wrapping_mul(row as u64 + 1));
        let h = (h ^ (h >> 15)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let at = h & self.mask;
        let per_row = self.words.len() / ROWS;
        (row * per_row + (at / 16) as usize, (at % 16 * 4) as u32)
    }

    /// Counts a use. Returns the estimate before it.
    pub fn add(&mut self, hash: u64) -> u8 {
        let mut places = [(0usize, 0u32); ROWS];
        let mut least = COUNTER_MAX;
        for (row, place) in places.iter_mut().enumerate() {
            *place = self.place(hash, row);
            least = least.min(self.words[place.0] >> place.1 & 15);
        }
        if least < COUNTER_MAX {
            for (word, shift) in places {
                if self.words[word] >> shift & 15 == least {
                    self.words[word] += 1 << shift;
                }
            }
        }
        self.added += 1;
        if self.added >= self.period {
            self.halve();
        }
        least as u8
    }

    /// Uses counted, aged; never less than there were since the last halving, up to 15.
    pub fn estimate(&self, hash: u64) -> u8 {
        (0..ROWS)
            .map(|row| {
                let (word, shift) = self.place(hash, row);
                self.words[word] >> shift & 15
            })
            .min()
            .unwrap_or(0) as u8
    }

    fn halve(&mut self) {
        for word in &mut self.words {
            *word = *word >> 1 & HALVE;
        }
        self.added /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u64) -> u64 {
        let h = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (h ^ (h >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    }

    #[test]
    fn counts_are_never_too_low_and_rarely_too_high() {
        let mut sketch = Sketch::new(4096, u64::MAX);
        for n in 0..1000u64 {
            for _ in 0..=(n % 10) {
                sketch.add(hash(n));
            }
        }
        let mut high = 0;
        for n in 0..1000u64 {
            let estimate = u64::from(sketch.estimate(hash(n)));
            assert!(estimate > n % 10);
            high += u64::from(estimate > n % 10 + 1);
        }
        assert!(high < 20, "{high} of 1000 are too high");
        assert_eq!(sketch.estimate(hash(77_777)), 0);
    }

    #[test]
    fn counts_fade() {
        let mut sketch = Sketch::new(64, 100);
        for _ in 0..12 {
            sketch.add(hash(1));
        }
        for n in 0..188u64 {
            sketch.add(hash(1000 + n % 4));
        }
        assert!(sketch.estimate(hash(1)) < 6);
    }
}
