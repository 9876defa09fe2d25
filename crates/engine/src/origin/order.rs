//! In which order an ordered disk's writes reach its origin.
//!
//! Should all flash be lost, the origin alone is to be what a disk is after a power cut: everything up to one
//! flush of the guest, and of what came after it any part, but nothing of what came after the next one. So
//! writes are divided into *epochs*: one ends with each flush, and with each write that was to be durable by
//! itself. The destager is given the oldest epoch, and the next one only when the origin has that one whole and
//! durably, and the log says so durably: else a start after a crash would write it once more, over what is newer.
//!
//! A block may be in several epochs, and of all of them the origin gets it, one after the other. Its older
//! versions are looked for by nobody else, so it is known here where they lie, and the segments they lie in
//! are held.
//!
//! What was dirty before a disk was ordered has no order. It is the first epoch, the *mixture*: until the origin
//! has it, the origin is nothing anybody could use.

use crate::origin::behind::Behind;
use crate::stats::ewma;
use hearth_format::Mark;
use std::collections::{BTreeMap, VecDeque};

/// A place on flash.
type Slot = u32;

/// Epochs that may wait for an origin of which nobody knows yet how long it takes for one. A guest that flushes as fast as
/// flash takes it makes hundreds before a slow origin has the first, and would then stand still until it has them all.
const UNKNOWN_MAX: usize = 8;

/// What a block was in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pub slot: Slot,
    pub crc: u32,
    /// The origin has taken it, perhaps not durably.
    pub written: bool,
}

/// Writes between two flushes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub versions: BTreeMap<u64, Version>,
    /// How many of them the origin has taken.
    written: usize,
    /// Of one that has ended: batches up to this are of it or older ones.
    pub last_batch: u64,
    /// When the first of it was written; 0: in an earlier run.
    pub since_ns: u64,
}

impl Epoch {
    fn add(&mut self, block: u64, version: Version) -> Option<Version> {
        let old = self.versions.insert(block, version);
        self.written -= usize::from(old.is_some_and(|v| v.written));
        old
    }

    fn take(&mut self, block: u64) -> Option<Version> {
        let old = self.versions.remove(&block)?;
        self.written -= usize::from(old.written);
        Some(old)
    }
}

/// How far an origin is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Upto {
    /// What it holds is of different times.
    Mixed,
    /// It is in order, and as it was when the last run of the engine told last, or later.
    Earlier,
    /// It holds everything that was flushed by then, on the clock the engine is given.
    At(u64),
}

/// What of an ordered disk the origin does not have, by epochs.
#[derive(Debug)]
pub(crate) struct Order {
    /// The oldest first. The last one is that of writes that come; it is always there.
    epochs: VecDeque<Epoch>,
    /// Number of the first one.
    first: u64,
    /// The first one is the mixture.
    mixed: bool,
    /// What took the place of something that was lost is in epochs before this one: as long as the origin does not have
    /// them, it lacks something of a time of which it has more.
    mends: u64,
    /// What the log is to say: batches up to this do not count but for what is still dirty.
    pub through: u64,
    /// The record that says so; nothing more is given to the origin before that is durable.
    pub mark_ord: u64,
    /// The log does not say it, and there was no room.
    pub unmarked: bool,
    /// The log has a mark of the disk that counts, however old.
    pub marked: bool,
    /// Something was written since the last epoch ended, even if nothing of it is left.
    touched: bool,
    /// Since when this run knows of the order; 0: not noted yet.
    known_ns: u64,
    /// Where the sweep over the first epoch goes on.
    pub cursor: u64,
    /// Places of versions that nobody needs any more.
    pub released: Vec<Slot>,
    /// Versions in all epochs.
    count: u64,
    /// Is the origin further behind than it may be, and what may be written then?
    pub behind: Behind,
    /// How far the origin is by what the log says durably.
    settled: Upto,
    /// What the origin takes for an epoch lately; 0: not known.
    epoch_ns: u64,
    /// Since when it has been given the first epoch; 0: it has not.
    given_ns: u64,
}

impl Order {
    /// Of a disk of which this is dirty, in batches up to `through`, in no order.
    pub fn mixture(dirty: impl IntoIterator<Item = (u64, Slot, u32)>, through: u64) -> Order {
        let mut order = Order::of(VecDeque::from([Epoch::default()]), true, through);
        for (block, slot, crc) in dirty {
            order.add(block, slot, crc, 0);
        }
        order
    }

    /// With these epochs, of which the last one has not ended.
    pub fn of(epochs: VecDeque<Epoch>, mixed: bool, through: u64) -> Order {
        let count = epochs.iter().map(|e| e.versions.len() as u64).sum();
        Order {
            epochs,
            first: 1,
            mixed,
            mends: 0,
            through,
            mark_ord: 0,
            unmarked: false,
            marked: false,
            touched: false,
            known_ns: 0,
            cursor: 0,
            released: Vec::new(),
            count,
            behind: Behind::default(),
            settled: match mixed {
                true => Upto::Mixed,
                false => Upto::Earlier,
            },
            epoch_ns: 0,
            given_ns: 0,
        }
    }

    fn open(&mut self) -> &mut Epoch {
        self.epochs
            .back_mut()
            .expect("the last epoch is always there")
    }

    fn front(&self) -> &Epoch {
        self.epochs.front().expect("the last epoch is always there")
    }

    fn front_mut(&mut self) -> &mut Epoch {
        self.epochs
            .front_mut()
            .expect("the last epoch is always there")
    }

    /// A block was written, and lies there.
    pub fn add(&mut self, block: u64, slot: Slot, crc: u32, now: u64) {
        self.touched = true;
        let open = self.open();
        if open.versions.is_empty() {
            open.since_ns = now.max(1);
        }
        let version = Version {
            slot,
            crc,
            written: false,
        };
        match open.add(block, version) {
            Some(old) => self.released.push(old.slot),
            None => self.count += 1,
        }
    }

    /// A block was moved.
    pub fn moved(&mut self, block: u64, from: Slot, to: Slot) -> bool {
        for epoch in &mut self.epochs {
            if let Some(v) = epoch.versions.get_mut(&block)
                && v.slot == from
            {
                v.slot = to;
                self.released.push(from);
                return true;
            }
        }
        false
    }

    /// The guest has flushed: what is written from now on is of the next epoch. Everything up to this batch
    /// was applied.
    ///
    /// An epoch of which the origin has everything before it ends is ended as well, so that the log says so: a start
    /// after a crash would find its versions in the log, and give the origin the older ones of them over the newest.
    pub fn end_epoch(&mut self, batch: u64) {
        let touched = std::mem::take(&mut self.touched);
        if self.open().versions.is_empty() {
            if let Some(at) = self.epochs.len().checked_sub(2) {
                // Nothing of this one is left, so it is the end of the one before. A guest that flushes and does not write
                // makes no epochs.
                self.epochs[at].last_batch = batch;
                return;
            }
            if !self.mixed && !touched {
                return;
            }
        }
        self.open().last_batch = batch;
        self.epochs.push_back(Epoch::default());
        self.behind.ended_epoch();
    }

    /// Number of the epoch that begins when the one of today ends: which has all that was written so far before it.
    pub fn next_number(&self) -> u64 {
        let empty = self.epochs.back().is_some_and(|e| e.versions.is_empty());
        match empty && self.epochs.len() > 1 {
            true => self.open_number(),
            false => self.open_number() + 1,
        }
    }

    /// Number of the epoch of what is written now.
    pub fn open_number(&self) -> u64 {
        self.first + self.epochs.len() as u64 - 1
    }

    /// Has the origin all epochs before this one?
    pub fn has_all_before(&self, number: u64) -> bool {
        self.first >= number
    }

    /// The next of the first epoch that waits to be written, from `at` on, in front of `to`.
    pub fn next(&self, at: u64, to: u64) -> Option<u64> {
        if at >= to {
            return None;
        }
        let waiting = self.front().versions.range(at..to);
        waiting
            .into_iter()
            .find(|(_, v)| !v.written)
            .map(|(b, _)| *b)
    }

    /// Where a block of the first epoch lies that waits to be written.
    pub fn source(&self, block: u64) -> Option<(Slot, u32)> {
        let v = self.front().versions.get(&block)?;
        (!v.written).then_some((v.slot, v.crc))
    }

    /// The origin has taken a block from there, or that does not count any more.
    pub fn set_written(&mut self, block: u64, slot: Slot, on: bool) {
        let front = self.front_mut();
        if let Some(v) = front.versions.get_mut(&block)
            && v.slot == slot
            && v.written != on
        {
            v.written = on;
            match on {
                true => front.written += 1,
                false => front.written -= 1,
            }
            if on {
                self.behind.took_block();
            }
        }
    }

    /// The origin has durably what lay there.
    pub fn done(&mut self, block: u64, slot: Slot) {
        let front = self.front_mut();
        if front.versions.get(&block).is_some_and(|v| v.slot == slot) {
            front.take(block);
            self.count -= 1;
            self.released.push(slot);
        }
    }

    /// All of the first epoch was written, and others wait for the flush that makes it durable.
    pub fn awaits_flush(&self) -> bool {
        let front = self.front();
        self.epochs.len() > 1 && front.written > 0 && front.written == front.versions.len()
    }

    /// The origin is given something of the first epoch.
    pub fn note_given(&mut self, now: u64) {
        if self.given_ns == 0 {
            self.given_ns = now.max(1);
        }
    }

    /// It failed: what it was away for is no time that it takes.
    pub fn note_refused(&mut self) {
        self.given_ns = 0;
    }

    /// It has it. A `mixture` is no epoch as they come: it tells nothing of how long one takes.
    pub fn note_taken(&mut self, mixture: bool, now: u64) {
        let given = std::mem::take(&mut self.given_ns);
        if given > 0 && !mixture {
            self.epoch_ns = ewma(self.epoch_ns, now.saturating_sub(given).max(1));
        }
        self.behind.took_epoch();
    }

    /// Does as much wait as may while nobody knows how long the origin takes for an epoch? What an earlier run left is not
    /// counted: that is there, whoever waits.
    pub fn waits_to_be_known(&self) -> bool {
        let oldest = self.epochs.iter().rev().nth(UNKNOWN_MAX);
        self.epoch_ns == 0 && !self.mixed && oldest.is_some_and(|e| e.since_ns > 0)
    }

    /// How long the origin will take for all it lacks that was flushed, by what it took lately.
    pub fn left_ns(&self) -> u64 {
        if self.mixed {
            return 0;
        }
        (self.epochs.len() as u64 - 1).saturating_mul(self.epoch_ns)
    }

    /// Goes on to the next epoch if the origin has the first one. `batch`: everything up to there was applied.
    /// True if the log is to say so.
    pub fn go_on(&mut self, batch: u64) -> bool {
        if !self.front().versions.is_empty() {
            return false;
        }
        // An end that nobody asked for: the origin has all there is.
        if self.epochs.len() == 1 {
            if !self.mixed {
                return false;
            }
            self.open().last_batch = batch;
            self.epochs.push_back(Epoch::default());
        }
        while self.epochs.len() > 1 && self.front().versions.is_empty() {
            let ended = self.epochs.pop_front().expect("there is more than one");
            self.through = self.through.max(ended.last_batch);
            self.first += 1;
            self.mixed = false;
            self.cursor = 0;
        }
        true
    }

    /// What the log is to say.
    pub fn mark(&self) -> Mark {
        Mark {
            batch: self.through,
            in_order: !self.is_of_no_time(),
        }
    }

    /// Is what the origin holds of no one time?
    fn is_of_no_time(&self) -> bool {
        self.mixed || self.first < self.mends
    }

    /// What is written now takes the place of something that was lost.
    pub fn note_mended(&mut self) {
        self.mends = self.open_number() + 1;
    }

    /// Nothing tells that what was written in earlier runs has its order.
    pub fn doubt_all(&mut self) {
        self.mends = self.open_number();
    }

    /// The deliberate fault: the first two epochs become one.
    pub fn merge(&mut self) {
        if self.epochs.len() < 3 {
            return;
        }
        let first = self.epochs.pop_front().expect("there are three");
        self.front_mut().since_ns = first.since_ns;
        for (block, version) in first.versions {
            let second = self.front_mut();
            if let std::collections::btree_map::Entry::Vacant(place) = second.versions.entry(block)
            {
                place.insert(version);
                second.written += usize::from(version.written);
            } else {
                self.released.push(version.slot);
                self.count -= 1;
            }
        }
        self.first += 1;
    }

    /// Nobody needs any version of a block any more.
    pub fn forget(&mut self, block: u64) {
        for epoch in &mut self.epochs {
            if let Some(v) = epoch.take(block) {
                self.released.push(v.slot);
                self.count -= 1;
            }
        }
    }

    /// Gives up the order: of each block only what is newest is left, which is where `dirty` says. Everything
    /// up to this batch was applied.
    pub fn mix(
        &mut self,
        dirty: impl IntoIterator<Item = (u64, Slot, u32)>,
        batch: u64,
    ) -> Vec<Slot> {
        let mut mixture = Order::mixture(dirty, batch);
        mixture.first = self.open_number() + 1;
        mixture.behind = self.behind.clone();
        mixture.epoch_ns = self.epoch_ns;
        mixture.marked = self.marked;
        mixture.mends = self.mends;
        mixture.known_ns = self.known_ns;
        let mut old = std::mem::replace(self, mixture);
        old.clear();
        old.released
    }

    /// Lets go of everything.
    pub fn clear(&mut self) {
        let epochs = std::mem::take(&mut self.epochs);
        self.epochs.push_back(Epoch::default());
        let slots = epochs.iter().flat_map(|e| e.versions.values());
        self.released.extend(slots.map(|v| v.slot));
        self.count = 0;
    }

    /// Versions the origin does not have.
    pub fn len(&self) -> u64 {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Epochs, oldest first.
    #[cfg(test)]
    pub fn epochs(&self) -> impl Iterator<Item = &Epoch> {
        self.epochs.iter()
    }

    /// Places of everything that is held.
    pub fn held(&self) -> impl Iterator<Item = Slot> {
        let versions = self.epochs.iter().flat_map(|e| e.versions.values());
        versions
            .map(|v| v.slot)
            .chain(self.released.iter().copied())
    }

    /// For a checkpoint.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mends = self.first < self.mends;
        let flags = [self.mixed, self.unmarked, self.marked, self.touched, mends];
        let flags = (0..).zip(flags).map(|(bit, on)| u8::from(on) << bit);
        out.push(flags.sum());
        out.extend_from_slice(&self.through.to_le_bytes());
        out.extend_from_slice(&(self.epochs.len() as u32).to_le_bytes());
        for epoch in &self.epochs {
            out.extend_from_slice(&epoch.last_batch.to_le_bytes());
            out.extend_from_slice(&(epoch.versions.len() as u32).to_le_bytes());
            for (block, v) in &epoch.versions {
                out.extend_from_slice(&block.to_le_bytes());
                out.extend_from_slice(&v.slot.to_le_bytes());
                out.extend_from_slice(&v.crc.to_le_bytes());
            }
        }
    }

    /// What [`encode`](Self::encode) wrote, taken from the front of `bytes`, when `last_batch` was
    /// the last one. `None`: that cannot be.
    pub fn decode(bytes: &mut &[u8], last_batch: u64) -> Option<Order> {
        let flags = take::<1>(bytes)?[0];
        let through = u64::from_le_bytes(take(bytes)?);
        let mut epochs = VecDeque::new();
        for _ in 0..u32::from_le_bytes(take(bytes)?) {
            let mut epoch = Epoch {
                last_batch: u64::from_le_bytes(take(bytes)?),
                ..Epoch::default()
            };
            for _ in 0..u32::from_le_bytes(take(bytes)?) {
                let block = u64::from_le_bytes(take(bytes)?);
                let version = Version {
                    slot: u32::from_le_bytes(take(bytes)?),
                    crc: u32::from_le_bytes(take(bytes)?),
                    written: false,
                };
                epoch.versions.insert(block, version);
            }
            epochs.push_back(epoch);
        }
        // What comes is of an epoch of its own.
        let mixed = flags & 1 != 0;
        if epochs.back()?.versions.is_empty() && !(mixed && epochs.len() == 1) {
            epochs.pop_back();
        } else {
            epochs.back_mut()?.last_batch = last_batch;
        }
        epochs.push_back(Epoch::default());
        let mut order = Order::of(epochs, mixed, through);
        order.unmarked = flags & 2 != 0;
        order.marked = flags & 4 != 0;
        // What was written before it is of the epoch that has just been ended.
        order.touched = flags & 8 != 0;
        if flags & 16 != 0 {
            order.doubt_all();
        }
        Some(order)
    }

    /// The log says durably all that was to be said: what is told now holds until it says more.
    pub fn settle(&mut self, now: u64) {
        self.settled = self.upto(now);
    }

    /// How far the origin is as long as the log does not say durably that it has more: a start after a crash would
    /// give it the last epoch once more.
    pub fn settled(&self) -> Upto {
        match self.is_of_no_time() {
            true => Upto::Mixed,
            false => self.settled,
        }
    }

    /// How far the origin is.
    pub fn upto(&self, now: u64) -> Upto {
        if self.is_of_no_time() {
            return Upto::Mixed;
        }
        match (self.epochs.len(), self.front().since_ns) {
            (1, _) => Upto::At(now),
            (_, 0) => Upto::Earlier,
            (_, since) => Upto::At(since),
        }
    }

    /// For how long the origin has lacked what a flush has covered, as far as this run knows. A mixture has no age: it
    /// was dirty before there was an order, and nobody is to wait for all of it.
    pub fn age_ns(&self, now: u64) -> u64 {
        if self.mixed || self.epochs.len() == 1 {
            return 0;
        }
        match (self.front().since_ns, self.known_ns) {
            (0, 0) => 0,
            (0, known) => now.saturating_sub(known),
            (since, _) => now.saturating_sub(since),
        }
    }

    /// This run knows of it.
    pub fn note_known(&mut self, now: u64) {
        if self.known_ns == 0 {
            self.known_ns = now.max(1);
        }
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destage(order: &mut Order, block: u64) {
        let (slot, _) = order.source(block).expect("it waits");
        order.set_written(block, slot, true);
        assert_eq!(order.source(block), None);
        order.done(block, slot);
    }

    fn in_order() -> Order {
        let mut order = Order::mixture([], 0);
        assert_eq!(order.upto(5), Upto::Mixed);
        assert!(order.go_on(7));
        assert_eq!((order.upto(5), order.through), (Upto::At(5), 7));
        order
    }

    #[test]
    fn a_guest_that_flushes_and_does_not_write_makes_no_epochs() {
        let mut order = in_order();
        order.add(1, 10, 0, 100);
        order.end_epoch(8);
        for batch in 9..20 {
            order.end_epoch(batch);
        }
        assert_eq!(order.epochs().count(), 2);
        // What lines up now goes after the one epoch there is.
        assert_eq!(order.next_number(), order.open_number());
        destage(&mut order, 1);
        assert!(order.go_on(20));
        assert_eq!(order.through, 19);
        assert!(order.has_all_before(order.open_number()));
    }

    #[test]
    fn what_the_origin_has_before_it_is_flushed_is_told_to_the_log() {
        let mut order = in_order();
        order.add(1, 10, 0, 100);
        order.add(1, 11, 0, 101);
        destage(&mut order, 1);
        // A start after a crash would find both in the log, and begin with the older one.
        order.end_epoch(9);
        assert!(order.go_on(9));
        assert_eq!(order.mark().batch, 9);
        order.end_epoch(10);
        assert!(!order.go_on(10), "nothing was written since");
    }

    #[test]
    fn neither_a_mixture_nor_a_run_of_before_makes_anybody_wait_for_its_age() {
        let mut order = Order::mixture([(1, 10, 0)], 3);
        order.end_epoch(4);
        order.add(2, 11, 0, 500);
        order.end_epoch(5);
        assert_eq!((order.age_ns(1 << 40), order.left_ns()), (0, 0));
        let restored = [(1, 1), (2, 2)].map(|(block, last_batch)| {
            let mut epoch = Epoch::default();
            let version = Version {
                slot: 9,
                crc: 0,
                written: false,
            };
            epoch.add(block, version);
            epoch.last_batch = last_batch;
            epoch
        });
        let mut order = Order::of(restored.into(), false, 0);
        assert_eq!(order.age_ns(1000), 0);
        order.note_known(1000);
        order.note_known(2000);
        assert_eq!(order.age_ns(5000), 4000);
    }

    #[test]
    fn until_what_replaces_a_lost_block_is_there_the_origin_is_of_no_time() {
        let mut order = in_order();
        order.add(1, 10, 0, 100);
        order.end_epoch(8);
        order.forget(1);
        assert!(order.go_on(8));
        order.add(2, 11, 0, 200);
        order.end_epoch(9);
        order.add(1, 12, 0, 300);
        order.note_mended();
        order.end_epoch(10);
        assert_eq!(
            (order.upto(400), order.mark().in_order),
            (Upto::Mixed, false)
        );
        let mut bytes = Vec::new();
        order.encode(&mut bytes);
        let again = Order::decode(&mut bytes.as_slice(), 10).expect("as it was written");
        assert_eq!(again.upto(400), Upto::Mixed);
        destage(&mut order, 2);
        order.go_on(10);
        assert_eq!(order.upto(400), Upto::Mixed);
        destage(&mut order, 1);
        order.go_on(10);
        assert_eq!(order.upto(400), Upto::At(400));
    }

    #[test]
    fn an_epoch_waits_for_the_one_before_it() {
        let mut order = in_order();
        order.add(1, 10, 0, 100);
        order.add(2, 11, 0, 101);
        order.end_epoch(20);
        order.add(1, 12, 0, 200);
        order.end_epoch(21);
        assert_eq!(order.upto(300), Upto::At(100));
        assert_eq!(order.age_ns(300), 200);
        destage(&mut order, 1);
        assert_eq!(
            order.next(0, u64::MAX),
            Some(2),
            "the other one is of the next"
        );
        assert!(!order.go_on(22));
        destage(&mut order, 2);
        assert!(order.go_on(22));
        assert_eq!((order.through, order.upto(300)), (20, Upto::At(200)));
        assert_eq!(order.source(1).map(|(slot, _)| slot), Some(12));
        destage(&mut order, 1);
        assert!(order.go_on(22) && order.is_empty());
        assert_eq!((order.through, order.upto(300)), (21, Upto::At(300)));
        assert_eq!(order.released, [10, 11, 12]);
    }

    #[test]
    fn for_how_long_an_origin_was_away_is_not_how_long_it_takes() {
        let mut order = in_order();
        order.add(1, 10, 0, 100);
        order.end_epoch(20);
        order.note_given(200);
        order.note_refused();
        order.note_given(1_000_200);
        destage(&mut order, 1);
        assert!(order.go_on(21));
        order.note_taken(false, 1_000_260);
        order.add(1, 11, 0, 1_000_300);
        order.end_epoch(22);
        assert_eq!(order.left_ns(), 60);
    }

    #[test]
    fn within_an_epoch_the_last_version_counts() {
        let mut order = in_order();
        order.add(1, 10, 0, 100);
        order.set_written(1, 10, true);
        order.add(1, 11, 0, 101);
        assert_eq!(order.released, [10]);
        order.done(1, 10);
        assert_eq!(order.source(1).map(|(slot, _)| slot), Some(11));
        order.end_epoch(20);
        assert!(!order.awaits_flush());
        order.set_written(1, 11, true);
        assert!(order.awaits_flush());
        order.set_written(1, 11, false);
        assert!(!order.awaits_flush() && order.source(1).is_some());
    }

    #[test]
    fn flushes_without_writes_end_nothing() {
        let mut order = in_order();
        let number = order.open_number();
        order.end_epoch(20);
        assert_eq!(order.open_number(), number);
        order.add(1, 10, 0, 100);
        order.end_epoch(21);
        order.end_epoch(22);
        assert!(!order.has_all_before(order.open_number()));
        destage(&mut order, 1);
        assert!(order.go_on(30));
        assert_eq!(order.through, 22);
        assert!(order.has_all_before(order.open_number()));
    }

    #[test]
    fn what_is_left_takes_as_long_as_what_was() {
        let mut order = in_order();
        for n in 0..10 {
            order.add(n, n as Slot, 0, 100);
            order.end_epoch(20 + n);
        }
        assert_eq!(order.left_ns(), 0, "nothing is known");
        order.note_given(1000);
        order.note_given(1500);
        destage(&mut order, 0);
        order.note_taken(false, 3000);
        assert!(order.go_on(40));
        assert_eq!(order.left_ns(), 9 * 2000);
        order.note_taken(false, 9000);
        assert_eq!(order.left_ns(), 9 * 2000, "nothing was given since");
    }

    #[test]
    fn few_epochs_wait_for_an_origin_of_which_nothing_is_known() {
        let mut order = in_order();
        let mut made = 0;
        while !order.waits_to_be_known() {
            order.add(made, made as Slot, 0, 100);
            order.end_epoch(20 + made);
            made += 1;
            assert!(made < 100, "as many wait as a guest makes");
        }
        assert_eq!(made, UNKNOWN_MAX as u64);
        order.note_given(1000);
        destage(&mut order, 0);
        order.note_taken(true, 2000);
        assert!(order.go_on(40));
        order.add(100, 100, 0, 2000);
        order.end_epoch(50);
        assert!(order.waits_to_be_known(), "a mixture tells nothing");
        order.note_given(2000);
        destage(&mut order, 1);
        order.note_taken(false, 3000);
        assert!(!order.waits_to_be_known());
    }

    #[test]
    fn a_checkpoint_keeps_the_epochs() {
        let mut order = in_order();
        order.add(1, 10, 7, 100);
        order.end_epoch(20);
        order.add(1, 12, 8, 200);
        let mut bytes = Vec::new();
        order.encode(&mut bytes);
        let read = Order::decode(&mut &bytes[..], 25).expect("it is whole");
        let kept: Vec<(u64, usize)> = read
            .epochs()
            .map(|e| (e.last_batch, e.versions.len()))
            .collect();
        assert_eq!(kept, [(20, 1), (25, 1), (0, 0)]);
        assert_eq!(
            (read.through, read.upto(5), read.len()),
            (7, Upto::Earlier, 2)
        );
        for cut in 0..bytes.len() {
            assert!(Order::decode(&mut &bytes[..cut], 25).is_none());
        }
        let mut bytes = Vec::new();
        Order::mixture([], 9).encode(&mut bytes);
        let read = Order::decode(&mut &bytes[..], 25).expect("it is whole");
        assert_eq!(read.upto(5), Upto::Mixed);
    }

    #[test]
    fn what_is_mixed_is_told_when_all_of_it_is_there() {
        let mut order = Order::mixture([(1, 10, 0), (2, 11, 0)], 9);
        order.add(2, 12, 0, 50);
        order.end_epoch(20);
        order.add(1, 13, 0, 60);
        assert_eq!(order.upto(70), Upto::Mixed);
        destage(&mut order, 1);
        destage(&mut order, 2);
        assert!(order.go_on(21));
        assert_eq!(order.upto(70), Upto::At(70));
        assert_eq!(order.len(), 1);
        order.end_epoch(22);
        order.add(1, 14, 0, 80);
        let released = order.mix([(1, 14, 0)], 23);
        assert_eq!(order.upto(90), Upto::Mixed);
        assert_eq!((order.len(), released.len()), (1, 5));
    }
}
