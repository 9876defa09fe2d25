//! The daemon: keeps the registry of disks, attaches and detaches them, serves them over NBD and
//! vhost-user, and is controlled over HTTP on a unix socket. The `hearth` command is a thin shell around this.

pub mod abort;
pub mod api;
mod bell;
#[cfg(test)]
mod bell_tests;
mod beside;
pub mod brake;
mod claims;
pub mod client;
mod client_record;
pub mod clients;
mod compare;
pub mod daemon;
pub mod degraded;
pub mod descriptors;
pub mod error;
pub mod events;
pub mod exports;
mod gate;
mod grounds;
pub mod host;
pub mod inspect;
mod keys;
mod life;
pub mod log;
pub mod memory;
mod mirror;
mod monitor;
mod named;
pub mod notify;
pub mod origin;
pub mod place;
pub mod pool;
pub mod progress;
pub mod rescue;
pub mod resident;
pub mod rights;
mod room;
pub mod rundir;
pub mod serve;
pub mod settings;
pub mod sign;
pub mod signals;
pub mod size;
mod spot;
mod sync;
mod table;
pub mod upgrade;
pub mod windows;
pub mod workers;
#[cfg(test)]
mod workers_tests;
