//! Caches over traces: hit ratios and flash wear without a disk.
//!
//! A [`Workload`] is a trace in memory, its blocks numbered densely. [`run`] drives one policy
//! over it; [`matrix`] runs many policies and sizes in parallel. [`twin`] does as the engine does, the simpler
//! [`Cache`] compares rules. [`judge`] says how good a policy is
//! on workloads it was not chosen on, of which [`made`] makes some.

mod cache;
pub mod device;
pub mod judge;
pub mod made;
mod outcome;
pub mod plot;
mod run;
pub mod segmented;
pub mod twin;
mod workload;

pub use cache::{Cache, WriteMode};
pub use outcome::Outcome;
pub use run::{Model, Policy, Row, Settings, Size, in_parallel, matrix, run};
pub use workload::{Request, Workload};
