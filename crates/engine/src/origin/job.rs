//! One run of blocks on its way from flash to an origin.

use crate::api::DiskId;
use hearth_io::Buf;

/// A place on flash.
type Slot = u32;

/// In place of a slot: the run does not hold this block any more.
pub(crate) const NOWHERE: Slot = Slot::MAX;

/// One run being destaged.
#[derive(Debug)]
pub(crate) struct DestageJob {
    pub disk: DiskId,
    pub start: u64,
    pub count: u64,
    pub buf: Option<Buf>,
    /// Where each block was read from; [`NOWHERE`] if it was let go.
    pub slots: Vec<Slot>,
    pub reads: u32,
    pub failed: bool,
    /// Flash refused to give back a part of it.
    pub struck: bool,
    /// A part of it is not what was written, and lost.
    pub rotten: bool,
    pub zero: bool,
    /// Zeros that keep their space on the origin.
    pub solid: bool,
    pub started_ns: u64,
    /// The log must be durable up to this batch before the origin is written. A batch, not an
    /// ord: of an item cut in two, the first part counts before the item does.
    pub batch: u64,
    /// And up to here, if the disk is ordered.
    pub ord: u64,
}
