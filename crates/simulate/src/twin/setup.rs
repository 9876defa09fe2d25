//! What a disk and its pool are set to.

use hearth_policy::Config;
use hearth_policy::cleaning::{HEADS_MAX, Heads};

use crate::cache::WriteMode;
use crate::device::Device;
use crate::run::Settings;

pub(super) const BLOCK: u64 = 4096;
/// A log and how it is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogShape {
    /// Segments.
    pub segments: u32,
    /// Blocks of data in each, descriptors of batches among them.
    pub data: u32,
    /// Segments kept free.
    pub reserve: u32,
    /// Does a batch take a block for its descriptor?
    pub descriptors: bool,
}

/// Blocks of a pool's segments, less the summary.
const DATA: u32 = 254;
/// Segments below which a cache is too small to be a pool.
const SEGMENTS_MIN: usize = 64;
/// Segments of such a cache.
const SEGMENTS_SMALL: usize = 128;

impl LogShape {
    /// The log of a pool that can hold `blocks`. Caches that are too small for a pool are given as
    /// many segments as keep what the engine keeps free small, and no descriptors.
    pub fn of(blocks: usize) -> LogShape {
        if blocks >= SEGMENTS_MIN * DATA as usize {
            let segments = (blocks / DATA as usize) as u32;
            return LogShape {
                segments,
                data: DATA,
                reserve: LogShape::kept_free(segments),
                descriptors: true,
            };
        }
        let data = (blocks / SEGMENTS_SMALL).max(1);
        LogShape {
            segments: (blocks / data).max(8) as u32,
            data: data as u32,
            reserve: 2,
            descriptors: false,
        }
    }

    /// Segments that the engine keeps free of so many.
    pub fn kept_free(segments: u32) -> u32 {
        let ahead = match segments {
            ..64 => 2,
            _ => (segments / 256).clamp(1, 16),
        };
        (segments / 200).clamp(2, 8) + ahead
    }

    /// Blocks of all segments.
    pub fn blocks(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.data)
    }
}

/// Which segment of the log is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// The oldest, as the engine once did.
    Oldest,
    /// The one that costs least for what it gives (`docs/decisions/0006-cleaning.md`).
    Cheapest {
        /// What a block written to flash costs, in 1024ths of a hit.
        price: u64,
        /// What is appended apart.
        heads: Heads,
    },
}

impl Default for Freed {
    /// At the engine's price, with its heads.
    fn default() -> Freed {
        Freed::Cheapest {
            price: 56,
            heads: Heads::MovesApart,
        }
    }
}

/// What a disk is set to, and the pool it is in.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Rules and sizes.
    pub config: Config,
    /// What happens to written data.
    pub mode: WriteMode,
    /// The log.
    pub log: LogShape,
    /// How it comes free.
    pub freed: Freed,
    /// Blocks after which a sequential read stream is not cached; 0 for never.
    pub seq_cutoff: u64,
    /// Blocks of the unit in which misses are filled.
    pub unit: u64,
    /// Blocks of flash kept for each disk.
    pub min: u64,
    /// Most blocks of flash of each disk; 0 for no limit.
    pub max: u64,
    /// The origin.
    pub device: Device,
}

/// The settings of a disk, and of its pool, that decide what is hit.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Bytes after which a sequential read stream is not cached; 0 for never.
    pub seq_cutoff: u64,
    /// Bytes of the unit in which misses are filled.
    pub block_size: u64,
    /// Bytes of flash kept for it.
    pub min: u64,
    /// Most bytes of flash it may use; 0 for no limit.
    pub max: u64,
    /// Segments of the pool; as many as it has of the usual size if `None`.
    pub segments: Option<u32>,
    /// Segments kept free; as many as the engine keeps if `None`.
    pub reserve: Option<u32>,
    /// How the log comes free.
    pub freed: Freed,
    /// The origin.
    pub device: Device,
    /// Requests that are in flight at most: the next one waits for one of them, and what comes later comes
    /// as much later.
    pub depth: usize,
}

impl Default for Disk {
    fn default() -> Disk {
        Disk {
            seq_cutoff: 1 << 20,
            block_size: BLOCK,
            min: 0,
            max: 0,
            segments: None,
            reserve: None,
            freed: Freed::default(),
            device: Device::HARD_DISK,
            depth: 1,
        }
    }
}

/// Segments of a log at least.
const SEGMENTS_LEAST: u32 = 8;

impl Disk {
    /// The set-up of a cache of `capacity` blocks.
    pub(crate) fn setup(&self, prefetch: bool, capacity: usize, settings: &Settings) -> Setup {
        let mut log = LogShape::of(capacity);
        if let Some(segments) = self.segments {
            log.segments = segments.max(SEGMENTS_LEAST);
            log.data = (capacity as u32 / log.segments).max(1);
            log.descriptors = log.data >= DATA;
            log.reserve = LogShape::kept_free(log.segments);
        }
        // There is one head, or two, and something to free.
        let most = log.segments.saturating_sub(HEADS_MAX as u32 + 1);
        log.reserve = self
            .reserve
            .unwrap_or(log.reserve)
            .clamp(HEADS_MAX as u32, most);
        let blocks = log.blocks() as usize;
        let (ram, ram_most) = settings.stage_of(blocks, prefetch);
        Setup {
            config: Config {
                ram,
                ram_most,
                flash: blocks,
                rules: settings.rules,
                prefetch,
                budget: settings.budget.clone(),
                dead_space: self.freed == Freed::Oldest,
            },
            mode: settings.write_mode,
            log,
            freed: self.freed,
            seq_cutoff: self.seq_cutoff / BLOCK,
            unit: (self.block_size / BLOCK).max(1),
            min: self.min / BLOCK,
            max: self.max / BLOCK,
            device: self.device,
        }
    }
}
