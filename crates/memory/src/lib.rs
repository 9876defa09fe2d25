//! More machines than memory: what is taken from whom, in which order, and when it is given back.
//!
//! A host that runs out of memory swaps whatever the kernel has not seen used for a moment, from whichever machine, and
//! all of them stand still together. It goes better if memory is taken early, from those that do not use it, by the cheapest
//! means first. That is a matter of rules, and they are here: what is seen goes in, what to do comes out. This crate reads
//! no file, asks no guest and knows no clock, so that every rule is tried on made hosts. What looks and acts is
//! `hearth-memory-host`.

pub mod config;
pub mod level;
pub mod notes;
pub mod plan;
pub mod rules;
pub mod seen;
pub mod status;

pub use config::{GuestConfig, MemoryConfig};
pub use level::Level;
pub use notes::{Note, Notes, Target};
pub use rules::{Controller, Decision, Step};
pub use seen::{Guest, Inside, Pressure, Seen, Zswap};
pub use status::Status;

/// A MiB.
pub const MIB: u64 = 1 << 20;

/// Bytes for people.
pub fn human(bytes: u64) -> String {
    match bytes {
        0..=1_048_575 => format!("{} KiB", bytes >> 10),
        1_048_576..=10_737_418_239 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
