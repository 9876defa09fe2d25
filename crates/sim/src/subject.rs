//! The seam between the simulator and what it tests.
//!
//! The world talks to a [`Subject`]: the real engine, or a toy that breaks one rule on purpose
//! and so proves that the simulator notices.

use hearth_engine::api::{DiskConfig, DiskId, Effects, Mode, Request};
use hearth_io::{IoDone, Media};

/// A disk the registry knows, and since when: records of the same id from before are another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Number within the pool.
    pub id: DiskId,
    /// The log's sequence number when the disk was created.
    pub since_seq: u64,
}

/// The parts of a world the subject must know to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes per segment of the log.
    pub segment_bytes: u64,
    /// Drives choices inside the subject that production takes from entropy.
    pub seed: u64,
}

/// Something that behaves like the engine: see `hearth_engine` for what the calls mean.
pub trait Subject {
    /// Puts a disk into service.
    fn attach(&self, config: DiskConfig) -> Result<(), String>;
    /// Takes a disk out of service. Called with no request of it in flight.
    fn detach(&self, id: DiskId) -> Result<(), String>;
    /// Drops everything cached of a detached disk.
    fn forget(&self, id: DiskId) -> Result<(), String>;
    /// True when a disk being detached has no I/O in flight any more.
    fn detached(&self, id: DiskId) -> bool;
    /// Changes the cache mode.
    fn set_mode(&self, id: DiskId, mode: Mode) -> Result<(), String>;
    /// Changes the limits, in bytes of flash.
    fn set_limits(&self, id: DiskId, min: u64, max: u64) -> Result<(), String>;
    /// Tells of a grown origin.
    fn set_size(&self, id: DiskId, size: u64) -> Result<(), String>;
    /// Starts or stops writing back everything dirty at full speed.
    fn drain(&self, id: DiskId, on: bool) -> Result<(), String>;
    /// True if nothing of the disk is dirty: the origin alone is the disk.
    fn clean(&self, id: DiskId) -> bool;
    /// Sequence number for [`Known::since_seq`] of a disk created now.
    fn seq(&self) -> u64;
    /// Stops (or resumes) background work, before a close.
    fn quiesce(&self, on: bool);
    /// True when no request and no I/O is in flight.
    fn idle(&self) -> bool;
    /// A clean stop.
    fn close(self: Box<Self>, media: &mut dyn Media) -> Result<(), String>;
    /// Requests arrived.
    fn submit(&self, now_ns: u64, requests: &mut Vec<Request>, effects: &mut Effects);
    /// I/O ended.
    fn io_done(&self, now_ns: u64, done: &mut Vec<IoDone>, effects: &mut Effects);
    /// Time passed. Returns when to call again at the latest.
    fn tick(&self, now_ns: u64, effects: &mut Effects) -> Option<u64>;
    /// Internal state worth seeing when something went wrong.
    fn describe(&self) -> String {
        String::new()
    }
}

/// Formats and opens subjects.
pub trait Maker: Sync {
    /// Takes out of a disk's settings what this kind of subject does not support.
    fn tune(&self, _config: &mut DiskConfig) {}
    /// Prepares an empty device.
    fn format(&self, media: &mut dyn Media, shape: Shape) -> Result<(), String>;
    /// Opens a formatted one: after a clean stop, or a crash.
    fn open(
        &self,
        media: &mut dyn Media,
        shape: Shape,
        known: &[Known],
    ) -> Result<Box<dyn Subject>, String>;
}
