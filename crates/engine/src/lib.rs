//! The cache engine: a pure state machine between requests and I/O.
//!
//! [`Engine`] is what the daemon, the data threads and the simulation use. Inside, `core` holds
//! the state and dispatches events; each duty has its file (see `ARCHITECTURE.md`).

mod ahead;
pub mod api;
mod append;
mod blockset;
mod checkpoint;
mod core;
mod destage;
mod disk;
mod engine;
mod evict;
pub mod faults;
mod fence;
mod flashfail;
mod flush;
mod grow;
/// For the benchmark that measures it at sizes no pool of a test has.
#[doc(hidden)]
#[allow(clippy::len_without_is_empty)]
pub mod index;
mod log;
mod read;
mod recover;
mod rescue;
mod runset;
mod sample;
mod stage;
pub mod stats;
pub mod tally;
mod trouble;
mod write;
mod zero;

pub use checkpoint::CheckpointError;
pub use core::EngineOptions;
pub use engine::{ControlError, DiskStatus, Engine, KnownDisk, OpenError, OpenReport, OpenedFrom};
pub use flashfail::FlashFault;
pub use flush::FLUSH_AFTER_BYTES;
pub use hearth_policy::{Budget, Rules};
pub use trouble::Trouble;
