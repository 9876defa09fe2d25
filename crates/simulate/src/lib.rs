//! Caches over traces: hit ratios and flash wear without a disk.
//!
//! A [`Workload`] is a trace in memory, its blocks numbered densely. [`run`] drives one policy
//! over it; [`matrix`] runs many policies and sizes in parallel.

mod outcome;
mod run;
pub mod proto;
mod workload;

pub use outcome::Outcome;
pub use run::{Policy, run};
pub use workload::{Request, Workload};
