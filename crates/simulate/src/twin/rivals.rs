//! Who is let in to flash, and at whose cost.

use hearth_policy::{FREQ_MAX, Place, Stay, Verdict};

use super::{DISK_SHIFT, FRESH, Freed, NOWHERE, Twin};

/// Newcomers that the block to beat turns away before the next one takes its place.
const RIVAL_TRIES: u32 = 128;
/// Slots in which a block to beat is looked for.
const RIVAL_SCAN: u32 = 64;
/// Slots looked at when a disk at its maximum makes room.
const OWN_SCAN: u32 = 8192;

impl Twin {
    /// While flash fills for the first time everything is welcome.
    pub(super) fn filling(&self) -> bool {
        self.free.len() > self.setup.log.reserve as usize
    }

    /// Policy's word on what has not been in the stage.
    pub(super) fn deserves(&mut self, key: u64, written: bool) -> bool {
        let stay = Stay { written, ..FRESH };
        match self.policy.leave(stay, !self.filling()) {
            Place::Drop => false,
            Place::Put(_) => true,
            Place::Compete => self.wins(stay, key),
        }
    }

    pub(super) fn wins(&mut self, stay: Stay, key: u64) -> bool {
        let rival = self.rival();
        let wins = match rival {
            None => true,
            Some((seg, slot)) => {
                self.policy
                    .displaces(stay, key, self.segments[seg as usize][slot as usize])
            }
        };
        self.losses += 1;
        if wins || self.losses >= RIVAL_TRIES {
            self.losses = 0;
            self.hand.1 = self.hand.1.saturating_add(1);
        }
        wins
    }

    /// Are segments freed in any order?
    pub(super) fn any_order(&self) -> bool {
        self.setup.freed != Freed::Oldest
    }

    /// The next block that eviction would drop and that has not lost its place.
    pub(super) fn rival(&mut self) -> Option<(u32, u32)> {
        let mut left = RIVAL_SCAN;
        let mut next = self.order_from(self.hand.0);
        while let Some(seg) = next {
            if self.hand.0 != seg {
                self.hand = (seg, 0);
            }
            while (self.hand.1 as usize) < self.segments[seg as usize].len() {
                if left == 0 {
                    return None;
                }
                left -= 1;
                let Some((_, copy)) = self.alive(seg, self.hand.1) else {
                    if self.any_order() {
                        self.hand.1 += 1;
                        continue;
                    }
                    // The log must go on, or nothing would ever leave it.
                    return None;
                };
                if !copy.dirty && self.policy.evict(copy.freq) == Verdict::Drop {
                    return Some(self.hand);
                }
                self.hand.1 += 1;
            }
            next = self.order_after(seg);
        }
        self.hand = (NOWHERE, 0);
        None
    }

    /// The closed segment from which on a block to beat is looked for: this one, or what comes first if it was
    /// freed.
    pub(super) fn order_from(&self, seg: u32) -> Option<u32> {
        if self.any_order() {
            return self.cleaner.turns_from(seg).next();
        }
        let since = self.opened.get(seg as usize).copied().unwrap_or_default();
        let at = self
            .order
            .partition_point(|s| self.opened[*s as usize] < since);
        self.order.get(at).copied()
    }

    pub(super) fn order_after(&self, seg: u32) -> Option<u32> {
        if self.any_order() {
            return self.cleaner.turns_from(seg).nth(1);
        }
        let at = self
            .order
            .partition_point(|s| self.opened[*s as usize] <= self.opened[seg as usize]);
        self.order.get(at).copied()
    }

    /// The block that goes next where it lies, when flash is brimful.
    pub(super) fn victim(&mut self) -> Option<(u32, u32)> {
        let mut left = self.setup.log.segments * (u32::from(FREQ_MAX) + 2);
        while left > 0 {
            let seg = self.cleaner.turn()?;
            if self.hand.0 != seg {
                self.hand = (seg, 0);
            }
            if self.hand.1 as usize >= self.segments[seg as usize].len() {
                self.cleaner.turned(seg);
                self.hand = (NOWHERE, 0);
                left -= 1;
                continue;
            }
            if let Some((key, copy)) = self.alive(seg, self.hand.1)
                && !copy.dirty
            {
                match self.policy.evict(copy.freq) {
                    Verdict::Drop => return Some(self.hand),
                    Verdict::Keep { freq } => {
                        if let Some(copy) = self.index.get_mut(&key) {
                            copy.freq = freq;
                        }
                    }
                }
            }
            self.hand.1 += 1;
        }
        None
    }

    /// Is the disk within its maximum with so many more, if need be at the cost of others of its own?
    pub(super) fn own_room(&mut self, key: u64, count: u64) -> bool {
        let disk = key >> DISK_SHIFT;
        let (own, mut hand) = self.own.get(&disk).copied().unwrap_or_default();
        if self.setup.max == 0 || own + count <= self.setup.max {
            return true;
        }
        let data = self.setup.log.data;
        let slots = self.setup.log.blocks() as u32;
        let mut freed = 0;
        for _ in 0..OWN_SCAN.min(slots) {
            if freed >= count {
                break;
            }
            hand = (hand + 1) % slots;
            let Some((key, copy)) = self.alive(hand / data, hand % data) else {
                continue;
            };
            if key >> DISK_SHIFT != disk || copy.dirty {
                continue;
            }
            if copy.freq > 0 {
                if let Some(copy) = self.index.get_mut(&key) {
                    copy.freq -= 1;
                }
                continue;
            }
            self.remove(key, copy);
            freed += 1;
        }
        self.own.entry(disk).or_default().1 = hand;
        if freed > 0 {
            self.record();
        }
        freed >= count
    }

    pub(super) fn is_within_min(&self, key: u64) -> bool {
        let own = self.own.get(&(key >> DISK_SHIFT)).map_or(0, |o| o.0);
        // Were all of it kept, there would be nothing to drop.
        let most = self.setup.log.blocks() / 4 * 3 / self.own.len().max(1) as u64;
        own <= self.setup.min.min(most)
    }

    pub(super) fn is_above_max(&self, key: u64) -> bool {
        let own = self.own.get(&(key >> DISK_SHIFT)).map_or(0, |o| o.0);
        self.setup.max > 0 && own > self.setup.max
    }
}
