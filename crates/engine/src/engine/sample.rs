//! Clean cached blocks with their checksums, for whoever must know whether an origin is still what
//! the cache believes.
//!
//! How many are worth comparing depends on the doubt: a few of the most used tell of a stranger's
//! writes ([`Engine::sample_clean`]), those cached last tell of an older copy put back, and only all
//! of them prove that nothing differs.

use std::collections::BTreeMap;

use crate::api::DiskId;
use crate::cache::index::Key;
use crate::engine::Engine;

/// Clean blocks by number in the order of the disk, with their checksums.
type Sample = Vec<(u64, u32)>;

/// Slots looked at under one lock: the engine serves others meanwhile.
const LOOK_MAX: u32 = 1 << 16;

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

    /// Clean cached blocks of a disk with their checksums, for comparison with the origin: those
    /// within `ranges` (block numbers), then the most used ones, at most `n` of each.
    pub fn sample_clean(
        &self,
        id: DiskId,
        ranges: &[std::ops::Range<u64>],
        n: usize,
    ) -> Vec<(u64, u32)> {
        let core = self.core();
        let mut sample = BTreeMap::new();
        for block in ranges.iter().cloned().flatten() {
            if sample.len() >= n {
                break;
            }
            if block >= 1 << 36 {
                continue;
            }
            if let Some(slot) = core.cache.index.get(Key::new(id, block))
                && core.cache.index.slot(slot).is_some_and(|s| !s.dirty)
            {
                sample.insert(block, core.cache.index.crc(slot));
            }
        }
        let slots = core.cache.index.slots();
        let step = (slots / (n as u32 * 16).max(1)).max(1);
        let mut hot: Vec<(u64, u64, u32)> = (0..slots)
            .step_by(step as usize)
            .filter_map(|slot| core.cache.index.slot(slot).map(|s| (slot, s)))
            .filter(|(_, s)| s.key.disk() == id && !s.dirty)
            .map(|(slot, s)| (s.freq, s.key.block(), core.cache.index.crc(slot)))
            .collect();
        hot.sort_unstable_by(|a, b| b.cmp(a));
        sample.extend(hot.into_iter().take(n).map(|(_, block, crc)| (block, crc)));
        sample.into_iter().collect()
    }

    /// Clean cached blocks of a disk among `blocks`, in order, with their checksums; none that a request is just changing,
    /// which may be on the origin and not yet in the cache. While whoever asks keeps changes of these blocks from the
    /// origin, it holds just this there.
    pub fn clean_sums(&self, id: DiskId, blocks: std::ops::Range<u64>) -> Vec<(u64, u32)> {
        let core = self.core();
        let Some(disk) = core.disk(id) else {
            return Vec::new();
        };
        let sum = |block: u64| {
            let slot = core.cache.index.get(Key::new(id, block))?;
            let info = core.cache.index.slot(slot)?;
            let settled = !info.dirty && !disk.locks.meets(block, block + 1);
            settled.then(|| (block, core.cache.index.crc(slot)))
        };
        blocks.filter_map(sum).collect()
    }

    /// Clean cached blocks of a disk, each list in the order of the disk: `recent` of those that were
    /// put on flash last, and `spread` others from all over the flash.
    pub fn sample_widely(&self, id: DiskId, recent: usize, spread: usize) -> (Sample, Sample) {
        let core = self.core();
        let clean = |slot: u32| {
            let info = core.cache.index.slot(slot)?;
            let mine = info.key.disk() == id && !info.dirty;
            mine.then(|| (info.key.block(), core.cache.index.crc(slot)))
        };
        let slots = core.cache.index.slots();
        let blocks = core.flash.log.segment_slots;
        let mut newest: Vec<(u64, u32)> = (core.flash.log.segments.iter().map(|s| s.seq))
            .zip(0..)
            .collect();
        newest.sort_unstable_by(|a, b| b.cmp(a));
        let segments = newest
            .into_iter()
            .map(|(_, segment)| segment.saturating_mul(blocks))
            // As many as hold that many blocks, were all of them this disk's, and some more.
            .take(recent.div_ceil(blocks.max(1) as usize) * 16 + 1);
        let latest =
            segments.flat_map(|first| (first..first.saturating_add(blocks).min(slots)).rev());
        let latest: BTreeMap<u64, u32> = latest.filter_map(clean).take(recent).collect();
        let mut others = BTreeMap::new();
        let step = (slots / (spread.max(1) as u32).saturating_mul(16)).max(1);
        let mut left = spread;
        // Slots of one step's first round may be other disks': further rounds begin a little later.
        for round in (0..step).take(16) {
            for slot in (round..slots).step_by(step as usize) {
                if left == 0 {
                    break;
                }
                if let Some((block, crc)) = clean(slot)
                    && !latest.contains_key(&block)
                    && others.insert(block, crc).is_none()
                {
                    left -= 1;
                }
            }
        }
        (latest.into_iter().collect(), others.into_iter().collect())
    }

    /// All clean cached blocks of a disk in the order of the disk; `None` if they are more than `most`.
    /// The disk must not be attached, so that none is added meanwhile.
    pub fn all_clean(&self, id: DiskId, most: usize) -> Option<Vec<(u64, u32)>> {
        let mut found = Vec::new();
        let mut from = 0;
        loop {
            let core = self.core();
            let slots = core.cache.index.slots();
            let to = from + LOOK_MAX.min(slots - from);
            for slot in from..to {
                if let Some(info) = core.cache.index.slot(slot)
                    && info.key.disk() == id
                    && !info.dirty
                {
                    found.push((info.key.block(), core.cache.index.crc(slot)));
                }
            }
            if found.len() > most {
                return None;
            }
            if to == slots {
                break;
            }
            from = to;
        }
        found.sort_unstable();
        Some(found)
    }
}
