//! Origins: bringing them what is dirty, what of it is durable, and what keeps one from taking it.

pub(crate) mod behind;
pub(crate) mod intents;
pub(crate) mod job;
pub(crate) mod order;
pub(crate) mod pace;
pub(crate) mod progress;
pub(crate) mod sync;
pub(crate) mod trouble;

use crate::origin::intents::Intents;
use crate::origin::progress::Destage;
use crate::origin::sync::OriginSync;
use hearth_io::{IoError, OpKind};

/// One disk's origin: where it may differ from what is recorded, what of it is durable, how far
/// destaging to it is, how fast it answers. It knows neither requests, but by name, nor the log.
#[derive(Debug)]
pub(crate) struct Origin {
    pub intents: Intents,
    pub sync: OriginSync,
    pub destage: Destage,
    /// What a client's read takes lately; 0: not known.
    pub read_ns: u64,
    /// What a client's read takes lately that continues no other; 0: not known.
    pub seek_ns: u64,
    /// What failed last, and how.
    pub failed: Option<(OpKind, IoError)>,
}

impl Origin {
    /// One nothing is known of, with intents of at least so many blocks.
    pub fn new(region_blocks_min: u64) -> Origin {
        Origin {
            intents: Intents::new(region_blocks_min),
            sync: OriginSync::default(),
            destage: Destage::default(),
            read_ns: 0,
            seek_ns: 0,
            failed: None,
        }
    }

    /// A client's write past the cache was answered, which had entered these regions, if any; returns its
    /// number.
    pub fn wrote(&mut self, regions: Option<(u32, u32)>) -> u64 {
        let written = self.sync.wrote(regions.is_some());
        if let Some(regions) = regions {
            self.intents.wrote(regions, written);
        }
        written
    }
}
