//! What lies on a device, known by a cache of its own.

use super::*;
use crate::flash::again::Holds;
use crate::flash::evict::{Contents, Fate, Terms};
use crate::flash::log::Gone;
use std::collections::BTreeMap;
use std::collections::BTreeSet;

/// What lies on a device, as a cache of one disk without any policy would know it.
#[derive(Default)]
pub(super) struct Shelf {
    /// Block and dirtiness by slot.
    pub slots: BTreeMap<Slot, (u64, bool)>,
    /// Clean blocks that are worth being moved.
    pub used: BTreeSet<u64>,
    /// Dirty blocks that no origin takes.
    pub homeless: BTreeSet<u64>,
    pub moving: BTreeSet<Slot>,
    /// Zeros of which the origin does not know, and open intents.
    pub zeros: Vec<(u64, u64)>,
    pub intents: Vec<(u64, u64)>,
}

impl Shelf {
    /// What was just written is in the cache: `count` blocks from `block`, from `slot` on.
    pub fn fill(&mut self, d: &mut Device, slot: Slot, block: u64, count: u32, dirty: bool) {
        for i in 0..count {
            self.slots.insert(slot + i, (block + u64::from(i), dirty));
            d.slot_filled(slot + i, dirty);
            if !dirty {
                // It was written as dirty.
                d.cleaner.destaged(slot / SEGMENT_BLOCKS);
            }
        }
    }

    pub fn gone(&mut self, slot: Slot) -> Gone {
        let (block, dirty) = self.slots.remove(&slot).expect("it was looked at");
        Gone {
            disk: 1,
            block,
            slot,
            dirty,
        }
    }
}

impl Holds for Shelf {
    fn is_known(&self, disk: u16) -> bool {
        disk == 1
    }

    fn is_cached(&self, _: u16, block: u64) -> bool {
        self.slots.values().any(|(b, _)| *b == block)
    }

    fn clean_copies(&self, _: u16, start: u64, end: u64) -> Vec<(u64, Slot)> {
        let clean = self.slots.iter().filter(|(_, (_, dirty))| !dirty);
        let blocks = clean.map(|(slot, (block, _))| (*block, *slot));
        blocks
            .filter(|(block, _)| (start..end).contains(block))
            .collect()
    }

    fn zeros(&self, _: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        let runs = self.zeros.iter().copied();
        runs.map(|(from, to)| (from.max(start), to.min(end)))
            .filter(|(from, to)| from < to)
            .collect()
    }

    fn intents(&self, _: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        let open = self.intents.iter().copied();
        open.filter(|(from, to)| *from < end && start < *to)
            .collect()
    }
}

impl Contents for Shelf {
    fn look(&self, slot: Slot, terms: &Terms) -> Fate {
        match self.slots.get(&slot) {
            None => Fate::Stays,
            Some(_) if self.moving.contains(&slot) => Fate::Stays,
            Some((block, true)) if self.homeless.contains(block) => Fate::Moves { alone: false },
            Some((_, true)) if terms.dirty_stays || terms.starved => Fate::Waits,
            Some((block, false)) if !terms.may_keep_used || !self.used.contains(block) => {
                Fate::Goes
            }
            Some(_) => Fate::Moves { alone: false },
        }
    }

    fn drop_copy(&mut self, slot: Slot, _: u64) -> Gone {
        self.gone(slot)
    }

    fn drop_orphan(&mut self, slot: Slot) -> Gone {
        panic!("slot {slot} was called no orphan");
    }

    fn set_moving(&mut self, slot: Slot) -> u32 {
        self.moving.insert(slot);
        0
    }
}

/// A device on which room is short: all segments but the last two are full, each of `dirty` dirty blocks
/// and else of clean ones.
pub(super) fn short_of_room(dirty: u32) -> (Device, Shelf) {
    let mut d = device();
    let mut shelf = Shelf::default();
    let count = DATA;
    while d.log.free.len() > 2 {
        // A whole segment: what is left of it has no room for the next run's descriptor and blocks.
        let seg = *d.log.free.front().expect("one is free");
        let block = u64::from(seg) * 1000;
        append(&mut d, block, count, 1);
        write_all(&mut d);
        let slot = seg * SEGMENT_BLOCKS + 1;
        shelf.fill(&mut d, slot, block, dirty, true);
        shelf.fill(
            &mut d,
            slot + dirty,
            block + u64::from(dirty),
            count - dirty,
            false,
        );
        d.roll();
        write_all(&mut d);
    }
    make_durable(&mut d);
    (d, shelf)
}
