//! Swap of the host on Hearth's flash.
//!
//! A host that runs more than fits into its memory stops for minutes when it swaps to a hard disk. The flash is there, so
//! a part of it becomes swap. The kernel swaps to it directly: no daemon is in the way of a page, so
//! none can make the host wait for memory that waits for the daemon, and killing the daemon changes nothing.
//!
//! An area is a file of its own beside the pool's flash file, written in full ([`area`]), or a stretch of the flash that the pool
//! has set aside ([`in_pool`]), which may be encrypted ([`crypt`]); what is
//! set on the host for it, and was set before, is in [`tuning`]; what is noted, for the next boot and for undoing, in
//! [`notes`]; whether pages that come back wait for others on the same flash tells [`contention`], and how much was written there
//! [`written`]. [`areas`] puts these together in the order that a crash at any step leaves nothing behind that nobody knows of.

pub mod area;
pub mod areas;
pub mod contention;
pub mod crypt;
pub mod in_pool;
pub mod kernel;
pub mod notes;
pub mod tuning;
pub mod written;

pub use areas::{Areas, Request};
pub use hearth_fault::Fault;
pub use in_pool::{Lender, Lent};
pub use notes::Noted;
pub use uuid::Uuid;

/// What can go wrong here is told to who typed the command, as it is.
pub type Result<T> = std::result::Result<T, Fault>;
