//! Replaying a trace against a disk: the same requests again, at their time or as fast as can be.
//!
//! A replay is only worth something if it does not flatter. Requests are therefore due at the
//! trace's own times, whether or not earlier ones were answered (an open loop); if they go out
//! late, that is measured and said, and response times count from when they were due, not from
//! when they could be sent. With `verify`, every sector written says what it is, and every read
//! is compared with what was written there last.
//!
//! [`Source`] makes requests of a trace that fit the target, [`run`] plays them against a
//! [`Target`] ([`NbdTarget`], [`FileTarget`]) and tells what came out in an [`Outcome`].

mod error;
mod file;
mod nbd;
mod outcome;
mod run;
mod source;
mod target;
mod verify;

pub use error::ReplayError;
pub use file::FileTarget;
pub use nbd::NbdTarget;
pub use outcome::{Mismatch, Outcome, Slot, Verified};
pub use run::{GRACE_NS, Options, Pace, Progress, SPEED_MIN, run};
pub use source::{Plan, Select, Source, scan};
pub use target::{Done, Job, Kind, SECTOR, Target};
