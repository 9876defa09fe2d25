//! A directory of virtual machines whose large files are disks of the cache.
//!
//! A datastore's files are made, extended, cut, renamed and removed by clients at any time, and some of them by
//! people on this host. Each large one is a disk of the engine, with a flash copy that must stay in step with a
//! file that lives a life of its own. This crate is what stands between: a
//! [`Tree`](hearth_nfs::tree::Tree) for the NFS server, over a plain
//! [`Directory`](hearth_nfs::local::Directory) and the engine.
//!
//! | module | what it knows |
//! | --- | --- |
//! | [`rules`] | which files become disks |
//! | [`store`] | which files are disks now, what clients ask of them, and what goes on without clients |
//! | [`file`] | who uses a file now, and who has it alone |
//! | [`origin`] | a file as the origin of a disk |
//! | [`body`] | what a file is made of: one open file, or two |
//! | [`twin`] | two directories that hold the same |
//! | [`port`] | requests to the engine, by way of the data threads |
//! | [`room`] | how much more can be promised |
//! | `opens` | who else opens files on this host |
//! | `seldom` | what is said of a file once an hour |
//!
//! # Files that are elsewhere
//!
//! A **scratch** file has its length in the directory and its content on flash alone, as
//! a disk of the pool without an origin: nothing is written back, and after a crash it is all zeros. What a file is, it is from when it becomes a disk,
//! while nothing is in it, until it is removed. A **pinned** file is read in whole, and so much flash is kept for it that
//! eviction drops none of it (`store/pins.rs`).
//!
//! # An endless disk
//!
//! To the engine, a file is a disk that never ends: behind the file's end there are zeros. Reads of the origin give
//! zeros there, and writes to it are cut off at the end ([`origin`]). So the engine need not know how long the file
//! is, and growing and cutting it are no changes of the disk. The size that is recorded is an upper
//! bound, in steps of 1 GiB, stored before anything is written beyond it.
//!
//! What has to hold for that: *behind the file's end, all copies on flash are zeros or void.* The orders below keep it.
//!
//! # What is done in which order
//!
//! The order in which a file grows, is cut, closed and opened, and names change, is in [`hearth_trees`], which is tried with a crash at
//! each step. Beside that:
//!
//! - **A file becomes a disk** when it is first used. Its record is durable before anything of it is cached; a record
//!   whose file is gone is dropped at the next start.
//! - **A durable write** is answered when it is in the log and the log is flushed. An unstable write makes the file longer as well, and a
//!   commit makes that durable.
//! - **Cutting** a file off: nobody else uses it meanwhile. After a crash before the file was cut it has its old length and zeros at its
//!   end, which only the client sees who asked for the cut, and asks again. A destage that is on its way meanwhile cannot
//!   make the file longer, for its writes are cut off at the end.
//! - **Renaming** changes nothing: the disk is known by what the file system calls the file.
//! - **Starting after a crash**: a file about which the promise stands must look as it was left. Where it had been
//!   taken back, cached blocks are compared with the file, as for any disk.
//!
//! # Replaced behind our back
//!
//! Each of our own writes leaves the file's time of change as clients are told it, so whatever else it is, or another
//! length, is somebody else's work. It is looked at with each answer by which a client may open a file (its name looked up, its attributes
//! asked for), at least every second while it is used, and before each of our own writes. Then what is cached goes, dirty or not, unless something is dirty and
//! what is clean still equals the file (somebody set its times).

pub mod body;
pub mod file;
pub mod opens;
pub mod origin;
pub mod port;
pub mod room;
pub mod rules;
mod seldom;
pub mod store;
pub mod twin;

use std::path::Path;
use std::sync::Arc;

use hearth_engine::api::DiskId;
use hearth_nfs::handle::Key;
use hearth_nfs::tree::Outcome;

use origin::FileOrigin;

/// Why a file is no disk now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotNow {
    /// It has nothing cached and can be used as it is.
    Pass,
    /// Somebody on this host uses it.
    InUse,
    /// It cannot be used at all at this moment.
    Wait,
}

/// What is not on flash in a range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// From here, so many bytes.
    From(u64, u64),
    /// Nothing up to here.
    Not(u64),
}

/// What a file looked like when its disk was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Bytes.
    pub size: u64,
    /// When its content changed last, nanoseconds since 1970.
    pub modified_ns: i64,
    /// When anything about it changed last.
    pub changed_ns: i64,
    /// The file system.
    pub device: u64,
    /// The file's number.
    pub inode: u64,
}

/// The pool, as a datastore needs it. Methods may block, but for [`owed`](Self::owed).
pub trait Disks: Send + Sync {
    /// The files that are disks.
    fn known(&self) -> Vec<(Key, DiskId)>;
    /// Serves a file as a disk: the one it is, or a new one.
    fn attach(&self, file: &Key, origin: &Arc<FileOrigin>) -> Result<DiskId, NotNow>;
    /// The disk may be this long from now on, also after a crash.
    fn grow(&self, disk: DiskId, bound: u64) -> Outcome<()>;
    /// Files of this name become disks from their first block on.
    fn wants(&self, name: &[u8]) -> bool;
    /// Some files are to be all on flash.
    fn pins(&self) -> bool;
    /// A file is to be all on flash: its path, as of an open file or within the datastore.
    fn is_pinned(&self, path: &Path) -> bool;
    /// Keeps so many bytes of flash for a disk whatever others want; false if there are not so many.
    fn keep(&self, disk: DiskId, bytes: u64) -> bool;
    /// Bytes of it on flash.
    fn cached(&self, disk: DiskId) -> u64;
    /// The first bytes from an offset on that are not on flash, and how many: no more than are looked at in one go. With none among
    /// those, where to go on.
    fn missing(&self, disk: DiskId, from: u64, to: u64) -> Missing;
    /// The file is about to be changed: it need not look as it was left any more, also after a crash.
    fn withdraw(&self, disk: DiskId) -> bool;
    /// Its file is called something else from now on.
    fn renamed(&self, disk: DiskId, origin: &FileOrigin);
    /// Serves it no longer; false if something is dirty or under way.
    fn detach(&self, disk: DiskId, origin: &FileOrigin) -> bool;
    /// Drops everything cached, dirty or not, of a disk that is served and that nobody uses.
    fn empty(&self, disk: DiskId) -> bool;
    /// Drops everything cached, and the record: its file is gone, or the datastore. It is not served any more.
    fn forget(&self, file: &Key, disk: DiskId) -> bool;
    /// True if what is cached and clean equals the file.
    fn still_fits(&self, disk: DiskId, origin: &Arc<FileOrigin>) -> bool;
    /// Makes a range zeros, durably. What it costs follows the data in it, not its length.
    fn zero(&self, disk: DiskId, offset: u64, len: u64) -> bool;
    /// Bytes the file does not have yet.
    fn owed(&self, disk: DiskId) -> u64;
    /// Of these, those for which the file may need room.
    fn needs(&self, disk: DiskId) -> u64;
    /// The file has everything, durably.
    fn is_drained(&self, disk: DiskId) -> bool;
    /// Writes everything back at once, or no longer.
    fn drain(&self, disk: DiskId, on: bool);
    /// From now on the files have every write before it is answered, or no longer.
    fn hold(&self, on: bool);
    /// A file was opened on this host, and by whom, while so many bytes of it were owed.
    fn opened_by_other(&self, file: &str, owed: u64, by: &str);
    /// The cached copies of a disk, for a scrub of its origin.
    fn cache(&self, disk: DiskId) -> Arc<dyn hearth_mirror::Cache>;
    /// Two clients write a file in turn.
    fn written_by_two(&self, file: &str, clients: &[String; 2]);
    /// Everything is written back: who waits for that may look.
    fn flushed(&self);
}
