//! Is everything well, and if not, what is it and what is to be done?
//!
//! Many tools each know a little: a drive its wear, the kernel its arrays, a volume manager its legs, the
//! daemon its errors. Each has words of its own for it, and an operator has one question. So everything is judged in
//! one [model]: a [`Condition`], and for each a list of [`Reason`]s with what to do.
//!
//! Here are rules only. What they judge is handed in as text, figures or a directory: this crate starts no
//! program, asks no daemon and knows no clock, so that every rule is tested on what the tools really say.

pub mod clock;
pub mod daemon;
pub mod datastore;
pub mod files;
pub mod latency;
pub mod lvm;
pub mod md;
pub mod memory;
pub mod model;
pub mod smart;
pub mod zfs;

pub use model::{Condition, Item, Kind, Reason, Report, mends};
