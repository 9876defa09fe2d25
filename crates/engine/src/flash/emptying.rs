//! A device, or some of its segments, is emptied while the pool is served, so that it can be taken out, or they set aside
//! ([`crate::flash::area`]).
//!
//! Nothing new goes to it: its free segments are *put aside*, and so is each that comes free. The others are freed one after the
//! other, as eviction frees any ([`crate::flash::evict`]), whenever room is not short, so that who waits for room does
//! not wait for this. What is clean goes: the origins have it. What is dirty is moved: it is safe on another device
//! before the segment counts as freed, by the same rule as ever (it is durable in the log, and both copies of the map say that
//! the segment is free). So at any moment the pool is what it would be without this, and it can be called off.
//!
//! All that is free may lie in what is to be emptied: of a log that was not yet once round, the free segments are the last ones. Were all of them
//! put aside, nothing could be freed elsewhere any more. So as many as are kept ready are *lent*: they are used like any until as many are free
//! elsewhere, and then put aside or emptied like the others.

use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::SegState;
use crate::paths::{Path, took};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// Segments that are emptied before one map says so of all of them.
const FREED_AT_ONCE: usize = 16;
/// Of those that are to be emptied, how many are looked at for one that can be.
const LOOKS: usize = 8;
/// Fewest segments on the other devices.
pub(in crate::flash) const LEFT_MIN: usize = 8;

/// What is known of a device, or a part of one, that is emptied.
#[derive(Debug)]
pub(crate) struct Emptying {
    device: u16,
    /// The part of it, if it is not all.
    pub(in crate::flash) part: Option<Range<u32>>,
    /// Its segments that hold nothing, and are not to be written.
    aside: BTreeSet<u32>,
    /// Those that are to be emptied.
    todo: VecDeque<u32>,
    /// Those that stay in use until enough is free elsewhere.
    lent: Vec<u32>,
    /// Those of which nobody knows what they say.
    unreadable: BTreeSet<u32>,
    /// The pool comes to rest: nothing more is begun.
    pub paused: bool,
}

/// How far that is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HowEmpty {
    pub device: u16,
    pub segments: u32,
    /// Segments that hold something, or are on their way to holding nothing.
    pub left: u32,
    /// It is not all of the device.
    pub part: bool,
    /// Of these, segments that nobody can empty because they cannot be read.
    pub unreadable: u32,
}

impl<U: Users> FlashDevice<U> {
    /// Is a device being emptied?
    pub fn is_emptying(&self) -> bool {
        self.emptying.is_some()
    }

    /// Does a segment lie on the device that is being emptied?
    pub fn is_on_emptying(&self, seg: u32) -> bool {
        let on = |e: &Emptying| self.is_on(e, seg);
        self.emptying.as_ref().is_some_and(on)
    }

    fn is_on(&self, emptying: &Emptying, seg: u32) -> bool {
        match &emptying.part {
            Some(part) => part.contains(&seg),
            None => self.device_of(seg) == emptying.device,
        }
    }

    /// Begins to empty a device. False: it cannot be, or another one is.
    pub fn begin_emptying(&mut self, device: u16) -> bool {
        let there = usize::from(device) < self.devices.spread().devices();
        if device == 0 || !there || self.is_emptying() || !self.takes_writes() {
            return false;
        }
        let all = 0..self.log.segments.len() as u32;
        let usable = |seg: &u32| self.log.segments[*seg as usize].state != SegState::Bad;
        let left = all.clone().filter(usable);
        if left.filter(|seg| self.device_of(*seg) != device).count() < LEFT_MIN {
            return false;
        }
        took(Path::DeviceEmptied);
        self.empty(device, None);
        true
    }

    pub(in crate::flash) fn empty(&mut self, device: u16, part: Option<Range<u32>>) {
        let all = 0..self.log.segments.len() as u32;
        self.emptying = Some(Emptying {
            device,
            part,
            aside: BTreeSet::new(),
            todo: VecDeque::new(),
            lent: Vec::new(),
            unreadable: BTreeSet::new(),
            paused: false,
        });
        let target = self.free_target();
        self.leave_heads();
        let (mut lent, free): (VecDeque<u32>, VecDeque<u32>) = std::mem::take(&mut self.log.free)
            .into_iter()
            .partition(|seg| self.is_on_emptying(*seg));
        let elsewhere = |seg: &&u32| !self.is_on_emptying(**seg);
        let parked = self.log.parked.iter().filter(elsewhere).count();
        let lacking = target.saturating_sub(free.len() + parked);
        for seg in lent.split_off(lacking.min(lent.len())) {
            self.put_aside(seg);
        }
        self.log.free = free;
        self.log.free.extend(&lent);
        // What is free on a device that is too slow, which may be this one.
        for seg in std::mem::take(&mut self.log.parked) {
            match self.is_on_emptying(seg) {
                true => self.put_aside(seg),
                false => self.log.parked.push_back(seg),
            }
        }
        // Who needs room takes it where it is of use.
        let mut todo = lent.clone();
        for seg in self.log.order.clone() {
            if !self.is_on_emptying(seg) {
                continue;
            }
            todo.push_back(seg);
            if !self.is_begun(seg) {
                self.leave_choice(seg);
                self.cleaner.withdraw(seg);
            }
        }
        let known: BTreeSet<u32> = todo.iter().copied().collect();
        let closed = |seg: &u32| self.log.segments[*seg as usize].state == SegState::Closed;
        let lost = all.filter(|seg| closed(seg) && self.is_on_emptying(*seg));
        let lost = lost.filter(|seg| !known.contains(seg)).collect();
        if let Some(emptying) = &mut self.emptying {
            (emptying.todo, emptying.unreadable) = (todo, lost);
            emptying.lent = lent.into();
        }
        if self.emptying.as_ref().is_some_and(|e| !e.lent.is_empty()) {
            took(Path::SegmentsLent);
        }
        // The others may be too few now to leave a slow one alone.
        self.sort_by_speed();
    }

    /// A segment of the device that is emptied holds nothing, and both copies of the map say so.
    pub fn put_aside(&mut self, seg: u32) {
        self.log.set_bad(seg);
        self.cleaner.set_room(self.log.blocks_kept());
        if let Some(emptying) = &mut self.emptying {
            emptying.aside.insert(seg);
        }
    }

    /// The device is used as before.
    pub fn end_emptying(&mut self) {
        let Some(emptying) = self.emptying.take() else {
            return;
        };
        for seg in emptying.aside.iter().copied() {
            self.log.segments[seg as usize].state = SegState::Free;
            self.log.bad -= 1;
            self.log.free.push_back(seg);
        }
        for seg in self.log.order.clone() {
            let on = self.is_on(&emptying, seg);
            // What is still being sealed is given to the cleaner when it is.
            let sealing = self.log.is_sealing(seg);
            if on && !sealing && !self.is_begun(seg) && !self.is_victim(seg) {
                self.cleaner.withdraw(seg);
                self.cleaner.give_back(seg);
            }
        }
        self.spread_free();
        self.sort_by_speed();
    }

    /// Free segments but those that are lent.
    pub fn free_to_stay(&self) -> usize {
        let lent = self.emptying.as_ref().map_or(&[][..], |e| &e.lent);
        let free = |seg: &&u32| self.log.segments[**seg as usize].state == SegState::Free;
        let lent = lent.iter().filter(free).count();
        self.log.free.len().saturating_sub(lent)
    }

    /// There is enough elsewhere: nothing is written any more to what was lent.
    fn end_loan(&mut self) {
        let Some(emptying) = &mut self.emptying else {
            return;
        };
        let lent = std::mem::take(&mut emptying.lent);
        if lent.is_empty() {
            return;
        }
        for seg in lent {
            if self.log.segments[seg as usize].state == SegState::Free {
                self.log.free.retain(|free| *free != seg);
                self.log.parked.retain(|parked| *parked != seg);
                self.put_aside(seg);
            }
        }
        self.leave_heads();
    }

    /// Heads that lie there are closed, or put aside.
    fn leave_heads(&mut self) {
        for at in 0..self.log.heads.len() {
            let seg = self.log.heads[at].as_ref().map(|head| head.seg);
            let Some(seg) = seg.filter(|seg| self.is_on_emptying(*seg)) else {
                continue;
            };
            match self.log.heads[at].take() {
                // It never took a batch.
                Some(head) if head.entries.is_empty() => {
                    self.cleaner.free(seg);
                    self.put_aside(seg);
                }
                head => {
                    self.log.heads[at] = head;
                    self.roll_one(at);
                }
            }
        }
    }

    /// The segment of it that goes next, if there is room for what of it has to be kept.
    pub(in crate::flash) fn next_to_empty(&mut self) -> Option<u32> {
        self.emptying.as_ref().filter(|e| !e.paused)?;
        let coming = self.log.freeing.iter();
        let coming = coming.filter(|seg| !self.is_on_emptying(**seg)).count();
        let free = self.free_to_stay();
        if free + coming < self.free_target() || free < 2 {
            return None;
        }
        self.end_loan();
        let tries = self.emptying.as_ref()?.todo.len().min(LOOKS);
        for _ in 0..tries {
            let emptying = self.emptying.as_mut()?;
            let seg = emptying.todo.pop_front()?;
            if self.log.segments[seg as usize].state != SegState::Closed
                || emptying.unreadable.contains(&seg)
            {
                // What was lent is none of these any more: it was put aside, or closed.
                continue;
            }
            // It stays among them until it has been freed.
            emptying.todo.push_back(seg);
            let sealing = self.log.is_sealing(seg);
            if !sealing && self.may_be_tried(seg) {
                return Some(seg);
            }
        }
        None
    }

    /// Nobody knows what a segment says.
    pub(in crate::flash) fn note_unreadable(&mut self, seg: u32) {
        if self.is_on_emptying(seg)
            && let Some(emptying) = &mut self.emptying
        {
            emptying.unreadable.insert(seg);
        }
    }

    /// Has those that were emptied come free, some at a time.
    pub fn free_emptied(&mut self, now: u64) {
        let Some(emptying) = self.emptying.as_ref().filter(|e| !e.paused) else {
            return;
        };
        let closed = |seg: &u32| self.log.segments[*seg as usize].state == SegState::Closed;
        let more = emptying.todo.iter().any(closed);
        let freed = self.log.freeing.iter();
        let freed = freed.filter(|seg| self.is_on_emptying(**seg)).count();
        if freed == 0 || more && freed < FREED_AT_ONCE {
            return;
        }
        if self.any_waits_for_flush() {
            self.flush(now);
        } else {
            self.log.urgent |= !self.log.queue.is_empty();
        }
        self.store_map();
    }

    /// How far it is.
    pub fn how_empty(&self) -> Option<HowEmpty> {
        let emptying = self.emptying.as_ref()?;
        let mut out = HowEmpty {
            device: emptying.device,
            part: emptying.part.is_some(),
            ..HowEmpty::default()
        };
        for (s, seg) in self.log.segments.iter().zip(0..) {
            if !self.is_on(emptying, seg) {
                continue;
            }
            out.segments += 1;
            let aside = emptying.aside.contains(&seg);
            // A batch that failed there and was sent elsewhere left nothing either.
            let empty = aside || s.state == SegState::Bad;
            out.left += u32::from(!empty || s.pins > 0 || s.batches > 0);
            let closed = s.state == SegState::Closed;
            out.unreadable += u32::from(closed && emptying.unreadable.contains(&seg));
        }
        Some(out)
    }
}
