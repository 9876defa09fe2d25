//! Caches over traces: hit ratios and flash wear without a disk.
//!
//! A [`Workload`] is a trace in memory, its blocks numbered densely. [`run`] drives one policy
//! over it; [`matrix`] runs many policies and sizes in parallel. [`judge`] says how good a policy is
//! on workloads it was not chosen on, of which [`made`] makes some.

mod cache;
pub mod judge;
pub mod made;
mod outcome;
pub mod plot;
mod run;
pub mod segmented;
mod workload;

pub use cache::{Cache, WriteMode};
pub use outcome::Outcome;
pub use run::{Policy, Row, Settings, Size, matrix, run};
pub use workload::{Request, Workload};
