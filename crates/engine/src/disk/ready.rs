//! Which disks have work.
//!
//! There may be thousands of disks, and most have nothing to do most of the time. Nothing that happens
//! per event looks at all of them: a disk is put on a list when something happened to it, taken off when
//! it was looked at, and the lists are worked on in turn. A disk on none of them costs nothing.
//!
//! | list | who is on it | looked at |
//! | --- | --- | --- |
//! | touched | something happened to it that may let the destager go on | after every event |
//! | owing | has dirty blocks that wait for nothing but the pool's need | a few per event, while there is need |
//! | awaited | requests wait until a range of it is clean | when blocks became clean, and every tick |
//! | draining | has to give the origin all it has | every tick |
//! | restless | time may bring it work: dirty, open intents, too much flash, writes nobody flushed | in turn, so many per tick |
//! | given | its origin was given something that it may not have answered | when flash is short of segments |
//! | gathering | its origin was written, and the flush waits for more | when it cannot wait any longer |
//! | noted | has intents or zeros, whose records are logged again before their segment is freed | per segment evicted |
//! | ending | it is ordered, and an epoch of it is to end | after every event |
//! | unmarked | it is ordered, and the log had no room to say how far its origin is | every tick |
//! | timers | the destager leaves it alone until some time | when it has come |
//!
//! All but the timers are emptied lazily: who finds a disk that does not belong on the list any more
//! takes it off. So nothing is missed as long as it is put there, which the simulator looks after
//! (`Engine::overlooked`).

use crate::api::{DiskId, Home};
use crate::disk::Disk;
use std::collections::{BTreeSet, VecDeque};

/// Disks in turn, each at most once.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    queue: VecDeque<DiskId>,
    /// A bit for each disk that is in the queue.
    present: Vec<u64>,
}

impl Turns {
    /// Puts a disk at the end, unless it has its turn anyway.
    pub fn add(&mut self, disk: DiskId) {
        let (word, bit) = (usize::from(disk) / 64, 1u64 << (disk % 64));
        if self.present.len() <= word {
            self.present.resize(word + 1, 0);
        }
        if self.present[word] & bit == 0 {
            self.present[word] |= bit;
            self.queue.push_back(disk);
        }
    }

    /// Takes the one whose turn it is.
    pub fn next(&mut self) -> Option<DiskId> {
        let disk = self.queue.pop_front()?;
        self.present[usize::from(disk) / 64] &= !(1u64 << (disk % 64));
        Some(disk)
    }

    /// Takes all.
    pub fn take(&mut self) -> Vec<DiskId> {
        let all: Vec<DiskId> = self.queue.drain(..).collect();
        // Not the whole of `present`: it is as long as there are disks.
        for disk in &all {
            self.present[usize::from(*disk) / 64] &= !(1u64 << (disk % 64));
        }
        all
    }

    pub fn contains(&self, disk: DiskId) -> bool {
        let word = self.present.get(usize::from(disk) / 64);
        word.is_some_and(|word| word & (1u64 << (disk % 64)) != 0)
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

/// The lists of [the module](self).
#[derive(Debug, Default)]
pub(crate) struct Ready {
    pub touched: Turns,
    pub owing: Turns,
    pub awaited: Turns,
    pub draining: Turns,
    pub restless: Turns,
    pub given: Turns,
    pub gathering: Turns,
    pub noted: Turns,
    pub ending: Turns,
    pub unmarked: Turns,
    /// When the time has come, and whose.
    pub timers: BTreeSet<(u64, DiskId)>,
}

impl Ready {
    /// Something happened that may let the destager go on with the disk.
    pub fn touch(&mut self, disk: DiskId) {
        self.touched.add(disk);
        self.restless.add(disk);
    }

    /// Requests wait for a range of the disk to become clean.
    pub fn await_clean(&mut self, disk: DiskId) {
        self.awaited.add(disk);
        self.touch(disk);
    }

    /// The disk has an intent or zeros.
    pub fn note(&mut self, disk: DiskId) {
        self.noted.add(disk);
        self.restless.add(disk);
    }

    /// The disk is on every list; whoever looks takes it off where it does not belong.
    pub fn all(&mut self, disk: DiskId) {
        self.await_clean(disk);
        self.draining.add(disk);
        self.given.add(disk);
        self.noted.add(disk);
    }

    /// A disk whose time has come.
    pub fn due(&mut self, now: u64) -> Option<DiskId> {
        let (at, disk) = *self.timers.first()?;
        if at > now {
            return None;
        }
        self.timers.pop_first();
        Some(disk)
    }
}

/// Sums over all disks of what settings say, kept as they change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Disks the engine knows.
    pub known: u64,
    /// Of these, attached.
    pub attached: u64,
    /// Of these, those whose writes go to flash.
    pub write_back: u64,
    /// Blocks of flash that disks keep whatever others want.
    pub min_blocks: u128,
    /// Blocks of disks to which flash was promised, written or not.
    pub kept_blocks: u64,
    /// Disks that were given an origin which does not have everything yet.
    pub moving: u64,
}

impl Totals {
    /// What one disk adds to them.
    pub fn of(d: &Disk) -> Totals {
        Totals {
            known: 1,
            attached: u64::from(d.attached),
            write_back: u64::from(d.attached && d.writes_to_flash()),
            min_blocks: u128::from(d.cfg.min_bytes / 4096),
            kept_blocks: if d.is_promised() { d.blocks } else { 0 },
            moving: u64::from(d.cfg.home == Home::Moving),
        }
    }

    pub fn add(&mut self, other: Totals) {
        self.known += other.known;
        self.attached += other.attached;
        self.write_back += other.write_back;
        self.min_blocks += other.min_blocks;
        self.kept_blocks += other.kept_blocks;
        self.moving += other.moving;
    }

    pub fn take(&mut self, other: Totals) {
        self.known -= other.known;
        self.attached -= other.attached;
        self.write_back -= other.write_back;
        self.min_blocks -= other.min_blocks;
        self.kept_blocks -= other.kept_blocks;
        self.moving -= other.moving;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_one_turn_in_the_order_they_came() {
        let mut turns = Turns::default();
        for disk in [3, 700, 3, 1, 700] {
            turns.add(disk);
        }
        assert_eq!((turns.next(), turns.len()), (Some(3), 2));
        turns.add(3);
        turns.add(1);
        assert_eq!(turns.queue, [700, 1, 3]);
        assert_eq!(turns.take(), [700, 1, 3]);
        assert!(turns.is_empty() && turns.next().is_none());
        turns.add(700);
        assert!(turns.contains(700) && !turns.contains(1) && !turns.contains(9000));
        assert_eq!(turns.next(), Some(700));
    }

    #[test]
    fn timers_come_in_the_order_of_their_time() {
        let mut ready = Ready::default();
        for timer in [(30, 1), (10, 2), (20, 3)] {
            ready.timers.insert(timer);
        }
        assert_eq!(ready.due(9), None);
        assert_eq!(
            [ready.due(20), ready.due(20), ready.due(20)],
            [Some(2), Some(3), None]
        );
        assert_eq!(ready.due(u64::MAX), Some(1));
    }
}
