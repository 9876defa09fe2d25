//! What goes on to flash and what leaves it: pure decisions, no I/O, no clock.
//!
//! The same types run inside the engine and over traces. Policy never decides correctness:
//! a wrong answer here costs speed, nothing else.

mod ghost;
pub mod reference;
mod sequential;
mod sketch;

pub use ghost::Ghost;
pub use sequential::Sequential;
pub use sketch::Sketch;

pub mod prefetch;

/// Blocks one after another. A key is a disk and a block in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub key: u64,
    /// How many.
    pub count: u32,
}

mod mini;
mod tuner;
pub use tuner::{Tuner, env};

/// How flash is divided and who gets on to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Share of flash for blocks that have not been used since they came, in 256ths.
    pub cold: u16,
    /// Must a block have been asked for more often than the one it displaces?
    pub gate: bool,
}

impl Rules {
    /// Blocks of `flash` that may be cold.
    pub fn cold_blocks(&self, flash: usize) -> usize {
        (flash * usize::from(self.cold) / 256).max(1)
    }

    /// Is everything one queue?
    pub fn one_queue(&self) -> bool {
        self.cold >= 256
    }
}

/// The key under which the sketch counts a block, from the low half of its hash.
pub fn sketch_key(low: u32) -> u64 {
    let h = (u64::from(low) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    h ^ (h >> 29)
}
