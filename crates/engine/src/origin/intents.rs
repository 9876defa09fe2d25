//! Which regions of an origin may differ from what flash has of them.
//!
//! A write past the cache changes the origin first and flash afterwards. A crash in between would leave the
//! old copy on flash, and it would be served. So a record goes to flash before the origin is written: of this
//! region, no clean copy from before counts after a crash. That is an intent. It is *active* once the record
//! is durable; until then nobody may write the region.
//!
//! It is closed when nobody has written the region for a while and the origin was flushed after the last
//! write: before that flush a power cut could take from the origin what newer copies on flash have. The record
//! that closes it comes behind those that void what was replaced. And as long as it is open, its own record
//! must not go with the segment it lies in: who frees segments asks for those and records them again.
//!
//! Regions are large: one costs a flush of flash when it is first written, and its clean copies after a crash.

use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Smallest intent region: 16 MiB. A region costs one flash flush when it is first written and,
/// after a crash, its clean blocks; regions of this size settle both to nothing that shows.
pub(crate) const REGION_BLOCKS_MIN: u64 = 4096;
/// Most regions of a disk, bounding memory and records.
const REGIONS_MAX: u64 = 4096;

/// Why a region that is being written has its intent.
const STAYS: &str = "a region keeps its intent while it is written";

/// A region that may differ.
#[derive(Clone, Debug, Default)]
struct Intent {
    /// The record is durable: the origin may be written.
    active: bool,
    /// Writes of the region under way.
    inflight: u32,
    /// Last use, nanoseconds.
    used_ns: u64,
    /// How many writes the origin had answered when the region was last written.
    written: u64,
}

/// What came of a write's wish to write regions.
#[derive(Debug)]
pub(crate) struct Entered {
    /// Regions of which a record has to be made.
    pub new: SmallVec<[u32; 2]>,
    /// All of them may be written now.
    pub active: bool,
}

/// The intents of one origin.
#[derive(Debug)]
pub(crate) struct Intents {
    open: BTreeMap<u32, Intent>,
    /// Blocks per region, a power of two.
    region_blocks: u64,
    /// The least that may be.
    region_blocks_min: u64,
}

impl Intents {
    pub fn new(region_blocks_min: u64) -> Intents {
        Intents {
            open: BTreeMap::new(),
            region_blocks: region_blocks_min,
            region_blocks_min,
        }
    }

    /// The disk has so many blocks from now on. Regions keep their size while one is open: they are
    /// numbered by it.
    pub fn fit(&mut self, blocks: u64) {
        if self.open.is_empty() {
            let fitting = (blocks / REGIONS_MAX).next_power_of_two();
            self.region_blocks = fitting.max(self.region_blocks_min);
        }
    }

    pub fn region_blocks(&self) -> u64 {
        self.region_blocks
    }

    pub fn region_of(&self, block: u64) -> u32 {
        (block / self.region_blocks) as u32
    }

    /// The first and the last region that `start..end` lies in.
    pub fn regions_of(&self, start: u64, end: u64) -> (u32, u32) {
        (self.region_of(start), self.region_of(end - 1))
    }

    /// The blocks of a region: the first, and the first behind it.
    pub fn blocks_of(&self, region: u32) -> (u64, u64) {
        let start = u64::from(region) * self.region_blocks;
        (start, start + self.region_blocks)
    }

    /// Those that are open.
    pub fn regions(&self) -> impl Iterator<Item = u32> + '_ {
        self.open.keys().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub fn clear(&mut self) {
        self.open.clear();
    }

    /// A write wants to change regions `from..=to`, and counts in them until it
    /// [`leave`](Self::leave)s.
    pub fn enter(&mut self, (from, to): (u32, u32), now: u64) -> Entered {
        let mut entered = Entered {
            new: SmallVec::new(),
            active: true,
        };
        for region in from..=to {
            let intent = self.open.entry(region).or_insert_with(|| {
                entered.new.push(region);
                Intent::default()
            });
            intent.inflight += 1;
            intent.used_ns = now;
            entered.active &= intent.active;
        }
        entered
    }

    /// May a write that has entered these regions change them now?
    pub fn are_active(&self, (from, to): (u32, u32)) -> bool {
        self.open.range(from..=to).all(|(_, i)| i.active)
    }

    /// The record is durable.
    pub fn activate(&mut self, region: u32) {
        if let Some(i) = self.open.get_mut(&region) {
            i.active = true;
        }
    }

    /// The origin has answered a write of these regions, as its `written`th.
    pub fn wrote(&mut self, (from, to): (u32, u32), written: u64) {
        for region in from..=to {
            self.open.get_mut(&region).expect(STAYS).written = written;
        }
    }

    /// A write that had entered these regions has ended.
    pub fn leave(&mut self, (from, to): (u32, u32), now: u64) {
        for region in from..=to {
            let i = self.open.get_mut(&region).expect(STAYS);
            i.inflight -= 1;
            i.used_ns = now;
        }
    }

    /// Open regions that meet `start..end`: their blocks, the first and the first behind.
    pub fn open_within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (from, to) = self.regions_of(start, end);
        let regions = self.open.range(from..=to);
        regions.map(|(region, _)| self.blocks_of(*region)).collect()
    }

    /// A record that an earlier run has left in a segment: it holds until the origin is flushed.
    pub fn restore(&mut self, region: u32) {
        let intent = Intent {
            active: true,
            written: 1,
            ..Intent::default()
        };
        self.open.insert(region, intent);
    }

    /// How many writes of the origin must be durable before what nobody has used for `idle_ns` can be
    /// closed; `None` if there is nothing to close.
    pub fn idle_until(&self, now: u64, idle_ns: u64) -> Option<u64> {
        let idle = self
            .open
            .values()
            .filter(|i| i.active && i.inflight == 0 && i.is_idle(now, idle_ns));
        idle.map(|i| i.written).max()
    }

    /// Closes what nobody has used for `idle_ns` and of which the origin has everything durably: its first
    /// `durable` writes. With `in_use`, a deliberate fault, also what is being written.
    pub fn close(&mut self, durable: u64, now: u64, idle_ns: u64, in_use: bool) -> Vec<u32> {
        let mut closed = Vec::new();
        self.open.retain(|region, i| {
            let done = i.active
                && (i.inflight == 0 || in_use)
                && i.written <= durable
                && i.is_idle(now, idle_ns);
            if done {
                closed.push(*region);
            }
            !done
        });
        closed
    }

    /// Clean copies from before count no more, whatever the intents say. Those that are being written need
    /// new records, for what is cached from now on: returns them. The rest is dropped, but for those not
    /// yet durable, for which somebody waits.
    pub fn give_up(&mut self) -> Vec<u32> {
        self.open.retain(|_, i| !i.active || i.inflight > 0);
        let active = self.open.iter_mut().filter(|(_, i)| i.active);
        let again = active.map(|(region, i)| {
            i.active = false;
            *region
        });
        again.collect()
    }

    /// Open regions and how many writes are in each.
    #[cfg(any(test, feature = "check"))]
    pub fn writes(&self) -> impl Iterator<Item = (u32, u32)> {
        self.open.iter().map(|(region, i)| (*region, i.inflight))
    }

    /// Open regions.
    #[cfg(test)]
    pub fn records(&self) -> Vec<u32> {
        self.open.keys().copied().collect()
    }
}

impl Intent {
    fn is_idle(&self, now: u64, idle_ns: u64) -> bool {
        now.saturating_sub(self.used_ns) >= idle_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regions of 64 blocks, and one write of `start..end` that has ended as the origin's `written`th.
    fn written(start: u64, end: u64, written: u64) -> Intents {
        let mut intents = Intents::new(64);
        intents.fit(64 * 100);
        let regions = intents.regions_of(start, end);
        let entered = intents.enter(regions, 1000);
        assert!(!entered.active);
        for region in entered.new {
            intents.activate(region);
        }
        intents.wrote(regions, written);
        intents.leave(regions, 1000);
        intents
    }

    #[test]
    fn a_range_covers_every_region_it_touches() {
        let mut intents = Intents::new(64);
        assert_eq!(intents.regions_of(0, 64), (0, 0));
        assert_eq!(intents.regions_of(63, 65), (0, 1));
        assert_eq!(intents.regions_of(64, 65), (1, 1));
        assert_eq!(intents.blocks_of(1), (64, 128));
        let entered = intents.enter((0, 1), 0);
        assert_eq!((entered.new.to_vec(), entered.active), (vec![0, 1], false));
        let entered = intents.enter((1, 2), 0);
        assert_eq!(entered.new.to_vec(), [2], "the other is recorded already");
        intents.activate(1);
        assert!(intents.are_active((1, 1)) && !intents.are_active((0, 1)));
    }

    #[test]
    fn regions_fit_the_disk_but_do_not_change_while_one_is_open() {
        let mut intents = Intents::new(64);
        intents.fit(REGIONS_MAX * 1000);
        assert_eq!(intents.region_blocks(), 1024);
        intents.enter((3, 3), 0);
        intents.fit(REGIONS_MAX * 4000);
        assert_eq!(intents.region_blocks(), 1024);
        intents.clear();
        intents.fit(REGIONS_MAX * 4000);
        assert_eq!(intents.region_blocks(), 4096);
    }

    #[test]
    fn it_is_closed_only_when_the_origin_has_every_write_of_it() {
        let mut intents = written(60, 70, 7);
        assert_eq!(intents.close(6, 9000, 0, false), []);
        assert_eq!(intents.close(7, 9000, 0, false), [0, 1]);
        assert!(intents.is_empty());
    }

    #[test]
    fn it_stays_open_while_it_is_used_and_for_a_while_after() {
        let mut intents = written(0, 1, 7);
        assert_eq!(intents.idle_until(1999, 1000), None);
        assert_eq!(intents.idle_until(2000, 1000), Some(7));
        assert_eq!(intents.close(9, 1999, 1000, false), []);
        assert!(intents.enter((0, 0), 1500).active);
        assert_eq!(intents.idle_until(9000, 1000), None);
        assert_eq!(intents.close(9, 9000, 1000, false), []);
        intents.wrote((0, 0), 8);
        intents.leave((0, 0), 3000);
        assert_eq!(intents.idle_until(4000, 1000), Some(8));
        assert_eq!(intents.close(9, 4000, 1000, false).len(), 1);
    }

    #[test]
    fn one_whose_record_is_not_durable_is_neither_idle_nor_closed() {
        let mut intents = Intents::new(64);
        intents.enter((0, 0), 0);
        intents.leave((0, 0), 0);
        assert_eq!(intents.idle_until(9000, 0), None);
        assert_eq!(intents.close(u64::MAX, 9000, 0, false), []);
        intents.activate(0);
        assert_eq!(intents.close(u64::MAX, 9000, 0, false).len(), 1);
    }

    #[test]
    fn a_segment_that_says_one_asks_whether_it_is_open() {
        let mut intents = written(60, 70, 7);
        assert_eq!(intents.open_within(0, 64), [(0, 64)]);
        assert_eq!(intents.open_within(0, 640), [(0, 64), (64, 128)]);
        assert_eq!(intents.open_within(128, 192), []);
        intents.close(7, 9000, 0, false);
        assert_eq!(intents.open_within(0, 640), []);
    }

    #[test]
    fn given_up_ones_that_are_being_written_are_recorded_anew() {
        let mut intents = written(60, 70, 7);
        intents.enter((1, 2), 2000);
        assert_eq!(intents.give_up(), [1]);
        assert!(!intents.are_active((1, 1)), "not before the new record is");
        assert_eq!(intents.records().len(), 2);
        intents.activate(1);
        intents.activate(2);
        assert!(intents.are_active((1, 2)));
    }

    #[test]
    fn one_of_an_earlier_run_waits_for_the_first_flush() {
        let mut intents = Intents::new(64);
        intents.restore(4);
        assert_eq!(intents.idle_until(5000, 1000), Some(1));
        assert_eq!(intents.close(0, 5000, 1000, false), []);
        assert_eq!(intents.close(1, 5000, 1000, false), [4]);
    }
}
