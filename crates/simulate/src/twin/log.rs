//! The log: what is appended where, and which segment is freed.

use hearth_policy::Verdict;
use hearth_policy::cleaning::{Fate, HEADS_MAX, Why};

use super::{Batch, Copy, DISK_SHIFT, Freed, LAZY_BLOCKS, LAZY_NS, Twin};

/// At least one block in so many of a segment that is freed goes.
const DROP_SHARE: u32 = 16;
/// Entries of a batch.
const BATCH_MAX: u32 = 126;

impl Twin {
    /// The block at a slot, if it is not dead.
    pub(super) fn alive(&self, seg: u32, slot: u32) -> Option<(u64, Copy)> {
        let key = *self.segments[seg as usize].get(slot as usize)?;
        let copy = self.index.get(&key)?;
        ((copy.seg, copy.slot) == (seg, slot)).then_some((key, *copy))
    }

    pub(super) fn remove(&mut self, key: u64, copy: Copy) {
        self.index.remove(&key);
        self.cleaner.died(copy.seg, copy.dirty);
        if copy.dirty {
            self.dirty.remove(&key);
        }
        if let Some((own, _)) = self.own.get_mut(&(key >> DISK_SHIFT)) {
            *own -= 1;
        }
    }

    pub(super) fn evict(&mut self, (seg, slot): (u32, u32)) {
        if let Some((key, copy)) = self.alive(seg, slot) {
            self.remove(key, copy);
        }
    }

    /// Something is said in the log that is no data.
    pub(super) fn record(&mut self) {
        let head = self.cleaner.head(Why::Filled);
        self.open(head, 1, false);
        self.join_batch(head, LAZY_BLOCKS);
    }

    /// Counts an entry of the batch that gathers for a head; a new one takes a block.
    pub(super) fn join_batch(&mut self, head: usize, most: u32) {
        if !self.setup.log.descriptors {
            return;
        }
        let batch = &mut self.batches[head];
        let stale = self.now.saturating_sub(batch.since_ns) >= LAZY_NS;
        if batch.entries == 0 || batch.entries >= most || stale {
            *batch = Batch {
                since_ns: self.now,
                entries: 1,
            };
            self.take_slot(head, None);
        } else {
            batch.entries += 1;
        }
    }

    /// Somebody waits for what was appended: it is sent, and what comes next goes by itself.
    pub(super) fn close_batches(&mut self) {
        self.batches = [Batch::default(); HEADS_MAX];
    }

    pub(super) fn append(&mut self, key: u64, why: Why, freq: u8, dirty: bool) {
        // Room first: making it may move this very block.
        let head = self.cleaner.head(why);
        // A descriptor may come before it.
        let blocks = 1 + usize::from(self.setup.log.descriptors);
        self.open(head, blocks, matches!(why, Why::Moved { .. }));
        self.join_batch(head, if dirty { BATCH_MAX } else { LAZY_BLOCKS });
        if let Some(copy) = self.index.get(&key).copied() {
            self.remove(key, copy);
        }
        let (seg, slot) = self.take_slot(head, Some(key));
        self.cleaner.append(seg, why, dirty);
        self.policy.wrote(1);
        self.own.entry(key >> DISK_SHIFT).or_default().0 += 1;
        if dirty {
            self.dirty.insert(key);
        }
        let copy = Copy {
            seg,
            slot,
            freq,
            dirty,
        };
        self.index.insert(key, copy);
    }

    /// Sees to it that a head has room for so many blocks.
    pub(super) fn open(&mut self, head: usize, blocks: usize, moved: bool) {
        if let Some(seg) = self.heads[head]
            && self.segments[seg as usize].len() + blocks > self.setup.log.data as usize
        {
            self.close_head(head);
        }
        if self.heads[head].is_some() {
            return;
        }
        let seg = self.free.pop().expect("the reserve takes what is moved");
        self.segments[seg as usize].clear();
        self.opened[seg as usize] = self.number();
        self.cleaner.open(seg, head);
        self.heads[head] = Some(seg);
        self.batches[head] = Batch::default();
        if !moved {
            self.make_room();
            // What was moved may have filled this very head.
            self.open(head, blocks, true);
        }
    }

    pub(super) fn close_head(&mut self, head: usize) {
        if let Some(seg) = self.heads[head].take() {
            self.cleaner.close(seg);
            self.order.push_back(seg);
        }
    }

    /// The next slot of a head that has room; `None` is a descriptor.
    pub(super) fn take_slot(&mut self, head: usize, key: Option<u64>) -> (u32, u32) {
        self.open(head, 1, true);
        let seg = self.heads[head].expect("it was opened");
        let slot = self.segments[seg as usize].len() as u32;
        self.segments[seg as usize].push(key.unwrap_or(u64::MAX));
        (seg, slot)
    }

    pub(super) fn make_room(&mut self) {
        // Where nearly everything stays, a turn of the log frees nothing: then something goes whatever it is.
        let mut left = self.setup.log.segments * 2;
        while self.free.len() < self.setup.log.reserve as usize {
            let may_keep = left > 0 && self.free.len() >= self.cleaner.plan().heads.count();
            if !self.free_one(may_keep) {
                self.force();
            }
            left = left.saturating_sub(1);
        }
    }

    /// Frees a segment, of which nothing is kept unless that is allowed; false if none can be.
    pub(super) fn free_one(&mut self, may_keep: bool) -> bool {
        if let Freed::Cheapest { price, .. } = self.setup.freed {
            self.cleaner.set_price(self.policy.write_cost().max(price));
        }
        let picked = self.cleaner.pick();
        // Nothing is worth freeing, and something must be.
        let forced = picked.is_none() && self.any_order();
        let Some(seg) = picked.or_else(|| self.cleaner.turn().filter(|_| forced)) else {
            return false;
        };
        let data = self.setup.log.data;
        let (_, dirty) = self.cleaner.counts(seg);
        let oldest = !self.any_order();
        if !may_keep || dirty * 4 > data * 3 && (oldest || forced || dirty == data) {
            for slot in 0..self.segments[seg as usize].len() as u32 {
                if let Some((key, copy)) = self.alive(seg, slot)
                    && copy.dirty
                {
                    self.set_clean(key);
                }
            }
        }
        let keep_max = data - (data / DROP_SHARE).max(u32::from(data > 1));
        let mut kept = 0;
        for slot in 0..self.segments[seg as usize].len() as u32 {
            let Some((key, copy)) = self.alive(seg, slot) else {
                continue;
            };
            let (stays, freq) = if !may_keep {
                (false, 0)
            } else if copy.dirty {
                (true, copy.freq)
            } else {
                let fades = match self.cleaner.fate(seg, copy.dirty, copy.freq) {
                    _ if oldest || forced => true,
                    Fate::Drop => true,
                    Fate::Move { fades, .. } => fades,
                };
                match self.policy.evict(copy.freq) {
                    _ if !fades => (true, copy.freq),
                    Verdict::Keep { freq } if kept < keep_max && !self.is_above_max(key) => {
                        (true, freq)
                    }
                    _ if self.is_within_min(key) => (true, 0),
                    _ => (false, 0),
                }
            };
            if !stays {
                self.remove(key, copy);
                continue;
            }
            kept += 1;
            self.out.reinsertions += 1;
            self.append(key, Why::Moved { from: seg }, freq, copy.dirty);
        }
        self.cleaner.free(seg);
        self.order.retain(|s| *s != seg);
        self.segments[seg as usize].clear();
        self.free.insert(0, seg);
        true
    }

    /// Everything is dirty, or everything is to stay: a segment's worth has to go.
    pub(super) fn force(&mut self) {
        for _ in 0..self.setup.log.data {
            if let Some(key) = self.dirty.first().copied() {
                self.set_clean(key);
            }
            let victim = self.victim();
            let any = || self.index.iter().find(|(_, c)| !c.dirty);
            match victim {
                Some(victim) => self.evict(victim),
                None => {
                    if let Some((key, copy)) = any().map(|(k, c)| (*k, *c)) {
                        self.remove(key, copy);
                    }
                }
            }
        }
    }
}
