//! Clean blocks that went with a device, in a pool that has them once.
//!
//! Where clean blocks lie in one half of their segment only ([`Layout::once`](hearth_format::Layout::once)), a lost device
//! takes those along that were on it. The log still tells of them, for what it says is on both. So they are dropped from the
//! index: while the pool is served some slots at a time, at a start before anybody is served.
//!
//! They are dropped without a record, as the origins have them. So nothing may ever bring them back, and while that is possible
//! they stay, cached and unreadable: until it is durable that the device is lost, a start might believe the device. Whoever
//! writes past the log meanwhile finds them cached and voids them by a record, and who reads them finds
//! them rotten, which is a record, too (docs/decisions/0029-clean-once.md).
//!
//! What was dirty is in both halves, and stays there when it is clean. That is not known of a slot any more: if its first half
//! is on the lost device, it goes as well.

use crate::faults::Fault;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::Slot;
use std::collections::VecDeque;
use std::ops::Range;

/// Slots that are looked at in one step: nobody waits long for it.
const STEP: u32 = 1 << 14;

/// How far that is.
#[derive(Debug, Default)]
pub(crate) struct Dropping {
    /// Bit `n`: it is durable that device `n` is lost.
    lost: u64,
    /// The slot that is looked at next.
    next: Option<Slot>,
    /// The steps in which a block was passed over since it could not be dropped yet, the first one first.
    passed: VecDeque<u32>,
    /// They are looked at again when the log is durable up to here.
    until: u64,
}

impl<U: Users> FlashDevice<U> {
    /// It is durable that these devices are lost.
    pub(in crate::flash) fn begin_dropping(&mut self, lost: u64) {
        if self.log.half > 0 && lost != 0 {
            self.gone = Dropping {
                lost,
                next: Some(0),
                ..Dropping::default()
            };
        }
    }

    /// The same at a start, at which all are looked at.
    pub fn note_gone(&mut self) {
        self.gone = Dropping {
            lost: self.sb.lost,
            ..Dropping::default()
        };
    }

    /// May the clean block in this slot be dropped because it went with its device?
    pub fn is_gone(&self, slot: Slot) -> bool {
        self.log.half > 0 && self.gone.lost != 0 && self.gone.lost & self.bit_of(slot) != 0
    }

    /// Did it go with a device whose place another one has?
    pub fn is_behind(&self, slot: Slot) -> bool {
        let once = &self.sb.once;
        self.log.half > 0
            && !self.faults.has(Fault::BelieveBehind)
            && once.behind & self.bit_of(slot) != 0
            && self.log.segments[self.log.segment_of(slot)].seq < once.floor
    }

    /// May any have?
    pub fn may_be_gone(&self) -> bool {
        self.log.half > 0 && (self.gone.lost | self.sb.once.behind) != 0
    }

    fn bit_of(&self, slot: Slot) -> u64 {
        let device = (self.devices.spread()).only_device(self.layout.slot_offset(slot));
        1u64.checked_shl(u32::from(device)).unwrap_or(0)
    }

    /// What is gone in this slot cannot be dropped before the log is durable up to `ord`.
    pub fn pass_over(&mut self, slot: Slot, ord: u64) {
        let step = slot / STEP;
        if self.gone.passed.back() != Some(&step) && !self.gone.passed.contains(&step) {
            self.gone.passed.push_back(step);
        }
        self.gone.until = self.gone.until.max(ord);
    }

    /// The slots that are looked at next: each once, and those where something was passed over again.
    pub fn next_dropped(&mut self) -> Option<Range<Slot>> {
        let slots = self.layout.slots();
        if let Some(from) = self.gone.next {
            let end = from.saturating_add(STEP).min(slots);
            self.gone.next = (end < slots).then_some(end);
            return Some(from..end);
        }
        if !self.is_durable(self.gone.until) {
            return None;
        }
        let from = self.gone.passed.pop_front()? * STEP;
        Some(from..from.saturating_add(STEP).min(slots))
    }
}
