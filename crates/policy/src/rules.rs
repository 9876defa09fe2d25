//! Who stays on flash, and who gets on to it.
//!
//! Flash is one log of segments: the oldest goes first, as flash likes it. A block that was used
//! since it was appended is appended again, with one use less; the rest is dropped. The knob is
//! who must beat what it displaces: with a gate for all it is much like TinyLFU, without one a clock.
//! Between them stands a gate for what was read only. Written data is read soon or not at all, and what a
//! rewrite made void had earned its place by hits, which a count of misses cannot show: at a gate both lose.

/// Highest use count a slot keeps: two bits.
pub const FREQ_MAX: u8 = 3;
/// Misses by which a newcomer must lead at a gate. One is no lead: in a loop every block has as many
/// uses as any other, but for being one ahead of what the loop has not reached yet.
const LEAD: u8 = 2;

/// Who must have been missed more often than the block it displaces?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// What was read; what was written comes in as it is.
    Reads,
    /// Nobody.
    Open,
    /// Everything.
    All,
}

/// One setting of the knob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Who must beat what it displaces.
    pub gate: Gate,
}

/// What becomes of the oldest block of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may go.
    Drop,
    /// It is appended again.
    Keep {
        /// With how many uses to its credit.
        freq: u8,
    },
}

impl Rules {
    /// What becomes of a block that was used `freq` times since it was appended.
    pub fn verdict(&self, freq: u8) -> Verdict {
        match freq {
            0 => Verdict::Drop,
            n => Verdict::Keep { freq: n - 1 },
        }
    }

    /// Must such a newcomer beat what it displaces?
    #[inline]
    pub fn stops(&self, written: bool) -> bool {
        match self.gate {
            Gate::Reads => !written,
            Gate::Open => false,
            Gate::All => true,
        }
    }

    /// At the gate: may a block displace another, missed so often lately?
    pub fn beats(candidate: u8, victim: u8) -> bool {
        candidate >= victim.saturating_add(LEAD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_dropped_in_the_end() {
        for gate in [Gate::Reads, Gate::Open, Gate::All] {
            let (mut freq, mut turns) = (FREQ_MAX, 0);
            while let Verdict::Keep { freq: left } = (Rules { gate }).verdict(freq) {
                freq = left;
                turns += 1;
                assert!(turns <= FREQ_MAX);
            }
        }
    }

    #[test]
    fn equals_and_neighbours_do_not_swap_places() {
        assert!(!Rules::beats(3, 3) && !Rules::beats(4, 3));
        assert!(Rules::beats(5, 3) && Rules::beats(2, 0));
    }
}
