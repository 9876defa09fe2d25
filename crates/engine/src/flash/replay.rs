//! The log's entries, told once more in their order to those whose blocks they are about.
//!
//! For a block the last entry counts, so whoever is told only has to do each time what the entry says.
//! What is not of the blocks is kept here: which segment holds how much, and which intents are open.

use crate::faults::Fault;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::{Gone, Slot};
use hearth_format::{Entry, Kind};
use hearth_policy::cleaning::Why;
use std::collections::BTreeMap;

/// Entries between the one being replayed and the one whose place in the index is fetched.
const FETCH_AHEAD: usize = 24;

/// Open intents: where the region begins, by disk, and where it ends.
pub(crate) type Intents = BTreeMap<(u16, u64), u64>;

/// A copy of a block on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub disk: u16,
    pub block: u64,
    pub slot: Slot,
    pub crc: u32,
    pub dirty: bool,
}

/// What became of a copy that the log tells of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Placed {
    /// Something lies in its slot already.
    Taken,
    /// There, perhaps in the place of an older one.
    There(Option<Gone>),
}

/// Those whose blocks lie on the device, while they learn from the log which these are.
pub(crate) trait Replay {
    /// Do entries about a disk count that stand in a segment with this number? Up to which block?
    fn counts(&self, disk: u16, seg_seq: u64) -> Option<u64>;

    /// The next but some entry is about this block. Disk and block may be anything.
    fn comes_soon(&self, disk: u16, block: u64);

    /// A copy.
    fn copied(&mut self, copy: Copied) -> Placed;

    /// The origin has what was dirty in `start..end`; tells which slots are clean by that.
    fn cleaned(&mut self, disk: u16, start: u64, end: u64, tell: impl FnMut(Slot));

    /// Copies of `start..end` are void; tells where they lay.
    fn dropped(&mut self, disk: u16, start: u64, end: u64, tell: impl FnMut(Gone));

    /// `start..end` are zeros.
    fn zeroed(&mut self, disk: u16, start: u64, end: u64);

    /// The origin has those zeros.
    fn zeros_told(&mut self, disk: u16, start: u64, end: u64);

    /// What comes next is of this batch.
    fn batch(&mut self, _seq: u64) {}

    /// Does it matter of which batch something is?
    fn asks_for_batches(&self) -> bool {
        false
    }

    /// The mark of an ordered disk, as it stands in its entry.
    fn marked(&mut self, _disk: u16, _block: u64, _word: u32) {}

    /// Drops what lies in a slot, if it is clean.
    fn drop_clean(&mut self, slot: Slot) -> Option<Gone>;
}

impl<U: Users> FlashDevice<U> {
    /// Applies entries of a segment, of which it is known whether all in it is clean, in the log's order.
    pub fn replay(
        &mut self,
        (seg, seg_seq, clean): (u32, u64, bool),
        entries: &[Entry],
        replay: &mut impl Replay,
        intents: &mut Intents,
    ) {
        let base = seg * self.log.segment_slots;
        // No entry that counts is about disk 0.
        let mut last = (0, None);
        for (i, e) in entries.iter().enumerate() {
            let soon = entries.get(i + FETCH_AHEAD).filter(|e| e.kind.is_data());
            if let Some(e) = soon {
                replay.comes_soon(e.disk, e.block);
            }
            if last.0 != e.disk {
                last = (e.disk, replay.counts(e.disk, seg_seq));
            }
            match last.1.filter(|limit| e.block < *limit) {
                // Those below the floor were taken back.
                Some(_) if e.kind == Kind::Through && seg_seq >= self.sb.clean_floor => {
                    replay.marked(e.disk, e.block, e.word);
                }
                // The entry of one that was taken back does nothing.
                Some(limit) => {
                    self.replay_entry(e, base, limit, replay, intents);
                    if clean && e.kind == Kind::Dirty {
                        // As a record behind it would say.
                        let end = e.block + 1;
                        replay.cleaned(e.disk, e.block, end, |slot| self.slot_cleaned(slot));
                    }
                }
                None if e.kind.is_data() => self.cleaner.skip(seg),
                None => {}
            }
        }
    }

    fn replay_entry(
        &mut self,
        e: &Entry,
        base: Slot,
        limit: u64,
        replay: &mut impl Replay,
        intents: &mut Intents,
    ) {
        let count = match e.kind.is_data() {
            true => 1,
            false => u64::from(e.word),
        };
        let end = (e.block + count).min(limit);
        match e.kind {
            Kind::Clean | Kind::Dirty => {
                let slot = base + u32::from(e.slot);
                let dirty = e.kind == Kind::Dirty;
                let placed = replay.copied(Copied {
                    disk: e.disk,
                    block: e.block,
                    slot,
                    crc: e.word,
                    dirty,
                });
                match placed {
                    Placed::There(instead) => {
                        let seg = self.log.segment_of(slot) as u32;
                        self.cleaner.append(seg, Why::of_found(dirty), dirty);
                        self.slot_replaced(slot, dirty, instead);
                    }
                    Placed::Taken => {}
                }
            }
            Kind::CleanedRun if self.faults.has(Fault::ReplayNoCleaned) => {}
            Kind::CleanedRun => {
                replay.cleaned(e.disk, e.block, end, |slot| self.slot_cleaned(slot));
            }
            Kind::DropRun if self.faults.has(Fault::ReplayNoDrops) => {}
            Kind::DropRun => {
                replay.dropped(e.disk, e.block, end, |gone| self.slot_gone(gone));
            }
            Kind::ZeroRun => {
                replay.dropped(e.disk, e.block, end, |gone| self.slot_gone(gone));
                replay.zeroed(e.disk, e.block, end);
                let seg = base / self.log.segment_slots;
                self.log.zeros.add(seg, e.disk, e.block, end);
            }
            Kind::ZeroDoneRun if self.faults.has(Fault::ReplayNoZerosTold) => {}
            Kind::ZeroDoneRun => replay.zeros_told(e.disk, e.block, end),
            Kind::Through => {}
            Kind::Intent => {
                let open = intents.entry((e.disk, e.block)).or_default();
                *open = end.max(*open);
            }
            // Regions grow with the disk, so one may have been recorded in other sizes: only what
            // is closed whole is closed.
            Kind::IntentClear => {
                if self.faults.has(Fault::CloseAllIntents) {
                    intents.clear();
                }
                let range = (e.disk, e.block)..(e.disk, end);
                let closed = intents.range(range).filter(|(_, to)| **to <= end);
                let closed: Vec<_> = closed.map(|(at, _)| *at).collect();
                for at in closed {
                    intents.remove(&at);
                }
            }
        }
    }
}
