//! The cache engine: a pure state machine between requests and I/O.
//!
//! [`Engine`] is what the daemon, the data threads and the simulation use. Inside, `core` holds
//! the state and dispatches events; each duty has its file (see `ARCHITECTURE.md`).

pub mod api;
mod blocks;
mod cache;
#[cfg(any(test, feature = "check"))]
mod check;
mod core;
mod ctx;
mod disk;
mod engine;
pub mod faults;
mod flash;
mod ids;
mod lanes;
mod origin;
pub mod paths;
mod request;
mod rounds;
pub mod stats;
mod sync;
pub mod tally;

pub use api::FlashFault;
/// For the benchmark that measures it at sizes no pool of a test has.
#[doc(hidden)]
pub use cache::index;
pub use core::EngineOptions;
pub use engine::{
    AreaRefused, ControlError, DiskStatus, Emptying, Engine, FailedAlone, Hindrance, KnownDisk,
    LeftWithout, OpenError, OpenReport, OpenedFrom, OrderStatus, Owed, STRETCH, Sample,
};
pub use flash::checkpoint::CheckpointError;
pub use flash::durable::FLUSH_AFTER_BYTES;
pub use hearth_policy::{Budget, Rules};
pub use origin::order::Upto;
pub use origin::trouble::Trouble;
