//! Clean cached blocks with their checksums, for comparison with an origin that may have changed.
//!
//! The blocks that were put on flash last show an older copy of the origin that was put back
//! ([`Engine::clean_recent`]). The blocks of file systems' and partitions' own structures show that something else wrote
//! the origin ([`Engine::clean_within`]). Only a comparison of all blocks proves that nothing differs
//! ([`Engine::clean_spread`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::api::DiskId;
use crate::cache::index::Key;
use crate::cache::stage::policy_key;
use crate::engine::Engine;

/// Clean blocks by number in the order of the disk, with their checksums.
pub type Sample = Vec<(u64, u32)>;

/// Slots looked at under one lock: the engine serves others meanwhile.
const LOOK_MAX: u32 = 1 << 16;
/// Slots looked at for the blocks that were put on flash last.
const LOOKS_MAX: usize = 1 << 18;
/// Blocks of a stretch: what one read of the origin compares.
pub const STRETCH: u64 = 256;

/// Where the content of a block is that its origin does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owed {
    /// At this byte of the flash, with this CRC32C.
    Flash(u64, u32),
    /// It is zeros.
    Zeros,
    /// It is known to have been on flash, and not where.
    Nowhere,
}

impl Engine {
    /// Blocks of a disk that its origin does not have, in order, from block `from` on, at most `max`: for whoever reads
    /// them without the engine.
    pub fn owed(&self, id: DiskId, from: u64, max: usize) -> Vec<(u64, Owed)> {
        let core = self.core();
        let Some(d) = core.disk(id) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut at = from;
        while found.len() < max {
            let dirty = d.dirty.first_in(at, u64::MAX);
            let zero = d.zero.first_in(at, u64::MAX);
            let Some(block) = dirty.into_iter().chain(zero).min() else {
                break;
            };
            let place = match core.cache.index.get(Key::new(id, block)) {
                _ if dirty != Some(block) => Owed::Zeros,
                Some(slot) => {
                    let offset = core.flash.slot_offset(slot);
                    Owed::Flash(offset, core.cache.index.crc(slot))
                }
                None => Owed::Nowhere,
            };
            found.push((block, place));
            at = block + 1;
        }
        found
    }

    /// Clean cached blocks of a disk within `ranges` (block numbers), in order, at most `max`.
    pub fn clean_within(&self, id: DiskId, ranges: &[std::ops::Range<u64>], max: usize) -> Sample {
        let core = self.core();
        let mut found = BTreeMap::new();
        for block in ranges.iter().cloned().flatten() {
            if found.len() >= max || block >= 1 << 36 {
                break;
            }
            if let Some(slot) = core.cache.index.get(Key::new(id, block))
                && core.cache.index.slot(slot).is_some_and(|s| !s.dirty)
            {
                found.insert(block, core.cache.index.crc(slot));
            }
        }
        found.into_iter().collect()
    }

    /// Clean cached blocks of a disk among `blocks`, in order, with their checksums, and whether they were written to
    /// the origin or read from it; none that a request is just changing, which may be on the origin and not yet in the
    /// cache. While whoever asks keeps changes of these blocks from the origin, it holds just this there.
    pub fn clean_sums(&self, id: DiskId, blocks: Range<u64>) -> Vec<(u64, u32, bool)> {
        let core = self.core();
        let Some(disk) = core.disk(id) else {
            return Vec::new();
        };
        let index = &core.cache.index;
        let sum = |block: u64| {
            if disk.locks.meets(block, block + 1) {
                return None;
            }
            let Some(slot) = index.get(Key::new(id, block)) else {
                let (crc, stay) = core.cache.stage.get(policy_key(id, block))?;
                return Some((block, crc, stay.written));
            };
            let info = index.slot(slot).filter(|info| !info.dirty)?;
            Some((block, index.crc(slot), info.written))
        };
        blocks.filter_map(sum).collect()
    }

    /// Drops the clean copies of a disk's blocks from `first` on that do not have the checksums `right`, in RAM and on
    /// flash, and whatever is being read of them. Dirty blocks and writes under way stay.
    pub fn drop_unlike(&self, id: DiskId, first: u64, right: &[u32]) {
        self.core().drop_unlike(id, first, right);
    }

    /// Clean cached blocks of a disk that were put on flash last, at most `max`: up to half of them were written by guests,
    /// which is what an older copy of the origin does not have, the others were read.
    pub fn clean_recent(&self, id: DiskId, max: usize) -> Sample {
        let core = self.core();
        let slots = core.cache.index.slots();
        let blocks = core.flash.log.segment_slots;
        let mut newest: Vec<(u64, u32)> = (core.flash.log.segments.iter().map(|s| s.seq))
            .zip(0..)
            .collect();
        newest.sort_unstable_by(|a, b| b.cmp(a));
        let segments = newest
            .into_iter()
            .map(|(_, segment)| segment.saturating_mul(blocks));
        let latest =
            segments.flat_map(|first| (first..first.saturating_add(blocks).min(slots)).rev());
        let clean = latest.take(LOOKS_MAX).filter_map(|slot| {
            let info = core.cache.index.slot(slot)?;
            let is_clean = info.key.disk() == id && !info.dirty;
            is_clean.then(|| (info.key.block(), core.cache.index.crc(slot), info.written))
        });
        let mut seen = BTreeSet::new();
        let mut left = [max / 2; 2];
        let mut found = Vec::new();
        for (block, sum, written) in clean {
            let left = &mut left[usize::from(written)];
            if *left > 0 && seen.insert(block) {
                *left -= 1;
                found.push((block, sum));
            }
        }
        found
    }

    /// Clean cached blocks of a disk, in order: all of them, or those of a random choice of its stretches of 1 MiB, so
    /// that they are at most `max`. Also how many there are in all. The choice depends on `seed`.
    pub fn clean_spread(&self, id: DiskId, max: usize, seed: u64) -> (Sample, usize) {
        let mut found: Sample = Vec::new();
        let (mut all, mut from, mut sparse) = (0, 0, 0u32);
        let chosen = |block: u64, sparse: u32| {
            let mixed = ((block / STRETCH) ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (mixed ^ (mixed >> 32)).trailing_zeros() >= sparse
        };
        loop {
            let core = self.core();
            let slots = core.cache.index.slots();
            let to = from + LOOK_MAX.min(slots - from);
            for slot in from..to {
                if let Some(info) = core.cache.index.slot(slot)
                    && info.key.disk() == id
                    && !info.dirty
                {
                    all += 1;
                    if chosen(info.key.block(), sparse) {
                        found.push((info.key.block(), core.cache.index.crc(slot)));
                    }
                }
            }
            drop(core);
            while found.len() > max && sparse < 64 {
                sparse += 1;
                found.retain(|(block, _)| chosen(*block, sparse));
            }
            if to == slots {
                break;
            }
            from = to;
        }
        found.sort_unstable();
        (found, all)
    }
}
