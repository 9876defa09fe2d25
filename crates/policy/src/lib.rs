//! What goes on to flash and what leaves it: pure decisions, no I/O, no clock.
//!
//! The same types run inside the engine and over traces. Policy never decides correctness:
//! a wrong answer here costs speed, nothing else. [`Policy`] is what the engine calls; why it
//! decides as it does, and what that measured, is in `docs/decisions/0001-policy.md`.
//! [`reference`] holds the policies of others to compare with.

pub mod advise;
mod budget;
pub mod cleaning;
pub mod histogram;
pub mod ladder;
mod loglinear;
mod mini;
pub mod mrc;
mod percentiles;
mod policy;
pub mod prefetch;
pub mod reference;
mod rules;
mod sequential;
mod sketch;
mod slow;
mod tuner;

pub use budget::Budget;
pub use percentiles::{Percentiles, quantile};
pub use policy::{Config, Place, Policy, Stay, Use};
pub use rules::{FREQ_MAX, Gate, Rules, Verdict};
pub use sequential::Sequential;
pub use sketch::Sketch;
pub use slow::{Answered, COST, Slow};
pub use tuner::{EXPERTS, Tuner};

/// Blocks one after another. A key is a disk and a block in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub key: u64,
    /// How many.
    pub count: u32,
}

/// Spreads a key over 64 bits, so that any part of the result is a sample of nothing in
/// particular. The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
#[inline]
pub fn spread(key: u64) -> u64 {
    let mut h = key.wrapping_add(0x9E37_79B9_7F4A_7C15);
    h = (h ^ (h >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    h = (h ^ (h >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    h ^ (h >> 31)
}
