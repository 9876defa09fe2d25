//! How flash is divided between newcomers and the proven, and who gets on to it.
//!
//! Flash is two logs of segments: **cold** holds what has not been used since it came, **hot**
//! what has. Both are FIFOs: the oldest segment goes first, as flash likes it. A cold block that
//! was used moves to hot, a hot one that was used stays, with one use less; the rest is dropped.
//! The share of cold and whether a newcomer must beat what it displaces are the two knobs, and
//! between their ends lie the known policies: a gate and little cold is TinyLFU, no gate and little
//! cold S3-FIFO, all cold a clock.

/// Highest use count a slot keeps: two bits.
pub const FREQ_MAX: u8 = 3;
/// A share of one, in the unit of [`Rules::cold`].
const WHOLE: u16 = 256;

/// One setting of the knobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Share of flash for cold blocks, in 256ths.
    pub cold: u16,
    /// Must a block have been asked for more often than the one it displaces?
    pub gate: bool,
}

/// The two logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Newcomers.
    Cold,
    /// Blocks used since they came.
    Hot,
}

/// What becomes of the oldest block of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may go.
    Drop,
    /// It is appended again.
    Keep {
        /// To which log.
        class: Class,
        /// With how many uses to its credit.
        freq: u8,
    },
}

impl Rules {
    /// Blocks of `flash` that may be cold.
    pub fn cold_blocks(&self, flash: usize) -> usize {
        ((flash as u64 * u64::from(self.cold) / u64::from(WHOLE)) as usize).max(1)
    }

    /// From which log the next victim comes, given how many blocks (or segments) each has and
    /// how many may be cold.
    pub fn next(&self, cold: usize, hot: usize, cold_max: usize) -> Class {
        if hot == 0 || (cold > 0 && cold >= cold_max) {
            Class::Cold
        } else {
            Class::Hot
        }
    }

    /// What becomes of a block of `class` that was used `freq` times since it was appended.
    pub fn verdict(&self, class: Class, freq: u8) -> Verdict {
        match (class, freq) {
            (_, 0) => Verdict::Drop,
            (Class::Cold, n) if self.cold >= WHOLE => Verdict::Keep {
                class: Class::Cold,
                freq: n - 1,
            },
            (Class::Cold, _) => Verdict::Keep {
                class: Class::Hot,
                freq: 0,
            },
            (Class::Hot, n) => Verdict::Keep {
                class: Class::Hot,
                freq: n - 1,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_dropped_in_the_end() {
        for cold in [0, 26, 256] {
            let rules = Rules { cold, gate: false };
            for class in [Class::Cold, Class::Hot] {
                let mut at = (class, FREQ_MAX);
                let mut turns = 0;
                while let Verdict::Keep { class, freq } = rules.verdict(at.0, at.1) {
                    at = (class, freq);
                    turns += 1;
                    assert!(turns <= 4);
                }
            }
        }
    }

    #[test]
    fn cold_goes_first_when_it_has_more_than_its_share() {
        let rules = Rules {
            cold: 64,
            gate: false,
        };
        let max = rules.cold_blocks(100);
        assert_eq!(max, 25);
        assert_eq!(rules.next(30, 70, max), Class::Cold);
        assert_eq!(rules.next(20, 80, max), Class::Hot);
        assert_eq!(rules.next(20, 0, max), Class::Cold);
        assert_eq!(rules.next(0, 5, max), Class::Hot);
    }
}
