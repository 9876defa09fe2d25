//! Origins: bringing them what is dirty, and what keeps one from taking it.

pub(crate) mod destage;
pub(crate) mod fence;
pub(crate) mod trouble;

use crate::origin::destage::DestageJob;
use slab::Slab;

/// Destaging of all disks: what is on its way, and what it may take.
#[derive(Default)]
pub(crate) struct Destaging {
    pub jobs: Slab<DestageJob>,
    pub tokens: i64,
    /// While clients are active, background destaging rests until this time.
    pub pause_ns: u64,
    pub refill_ns: u64,
    /// Hits in flight in lanes when the destager last looked.
    pub lane_hits: u64,
}
