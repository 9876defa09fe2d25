//! What end-to-end tests and benchmarks share: a real `hearth` daemon in a directory of its own,
//! a small pipelining NBD client, other people's clients, and waiting for conditions.
//!
//! The NBD client here is written from the protocol document and shares no code with the
//! exporter, so that a mistake in one is not hidden by the same mistake in the other.

pub mod api;
#[cfg(not(target_env = "musl"))]
pub mod blk;
pub mod child;
pub mod clients;
pub mod daemon;
pub mod guest;
pub mod killer;
pub mod load;
pub mod machine;
pub mod monitor;
pub mod mounted;
pub mod namespace;
pub mod nbd;
pub mod pattern;
pub mod process;
pub mod qemu_io;
pub mod qmp;
pub mod rng;
pub mod servers;
pub mod short;
pub mod wait;

pub use daemon::Hearth;
