//! What Hearth writes on flash, as pure encoders and decoders.
//!
//! A pool outlives the program that wrote it: it may be read after a crash, by another
//! version, on another host, or after somebody wrote over part of it. So everything here is
//! checked before it is believed, every size has a bound, and nothing panics, whatever the
//! bytes. The byte-by-byte description, with the argument why a crash is safe, is
//! `docs/format.md`; golden-byte tests keep the two together.
//!
//! Nothing here decides *when* something is written; that is the engine's.

pub mod areas;
pub mod batch;
pub mod beside;
pub mod change;
pub mod checkpoint;
mod copies;
pub mod datastore;
pub mod devices;
pub mod disk;
pub mod entry;
pub mod error;
pub mod foreign;
pub mod journal;
pub mod layout;
pub mod map;
pub mod mirror;
pub mod order;
pub mod places;
pub mod registry;
pub mod summary;
pub mod superblock;
mod wire;

pub use areas::Area;
pub use batch::{BATCH_ENTRIES_MAX, BatchHeader};
pub use beside::{IdSet, PoolNotes};
pub use checkpoint::{CheckpointHeader, Section};
pub use datastore::DatastoreRecord;
pub use devices::{DeviceEntry, Members, Misfit};
pub use disk::{
    CacheMode, DEVICE_MAX, DISK_ID_MAX, DiskRecord, Home, OnStart, OriginIdentity, check_name,
};
pub use entry::{Entry, Kind, Mark};
pub use error::FormatError;
pub use foreign::{Found, identify};
pub use layout::{Extent, Layout, SEGMENT_BLOCKS_DEFAULT};
pub use map::{MapEntry, MapHeader, SegmentMap};
pub use mirror::{LegStamp, LegState, MirrorNotes, MirrorStamps};
pub use order::OrderNote;
pub use places::Places;
pub use registry::{Registry, SharedRecord};
pub use summary::{BatchMark, SummaryHeader};
pub use superblock::{PoolState, Superblock};
pub use uuid::Uuid;

/// Bytes in a block, as a `usize`; the same as [`hearth_io::BLOCK`].
pub const BLOCK_BYTES: usize = hearth_io::BLOCK as usize;

/// The 64-bit tag of a pool carried by every log structure: the first eight bytes of its
/// UUID, little-endian. It tells this pool's batches from those of a pool formatted earlier
/// on the same device.
pub fn pool_tag(pool: &Uuid) -> u64 {
    let b = pool.as_bytes();
    u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
}
