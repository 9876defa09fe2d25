//! Copies on flash that do not count any more, but would if what came after them were gone.
//!
//! A newer copy or a record makes an older copy void by coming later in the log. As segments are freed in
//! any order, the later one may go first, and a crash would bring back the older. So it has to be known of
//! which blocks there are such copies: then a record that says "void" once more goes ahead of the segment
//! that said so ([`crate::flash::again`]). Only how many there are of each block is kept, 8 bytes a block; where they
//! lie is said by the segments themselves when they are read to be freed.
//!
//! The table is in parts, so that none takes long to grow.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

const PARTS: usize = 512;
/// Blocks of a run, as a power of two: as many as the table compares at once.
const RUN_BITS: u32 = 4;
const BLOCK_BITS: u32 = 36;
/// Above disk and block there is how many copies there are ...
const COUNT_SHIFT: u32 = 51;
/// ... up to here; what has more is taken to have some for ever.
const COUNT_MAX: u64 = (1 << (64 - COUNT_SHIFT)) - 1;
const KEY_MASK: u64 = (1 << COUNT_SHIFT) - 1;

/// How many copies of which block are dead.
pub(crate) struct Dead {
    parts: Box<[HashTable<u64>]>,
    blocks: usize,
}

/// A disk and a block in one number.
fn key(disk: u16, block: u64) -> u64 {
    (u64::from(disk) << BLOCK_BITS | block) & KEY_MASK
}

/// Blocks that follow each other lie side by side, for what is written over is often a run, and every place of its
/// own would be two misses of the processor's caches. The table goes by the lowest bits first; by the highest
/// seven, which differ within a run as well, it tells entries of one place apart.
fn hash(key: u64) -> u64 {
    let run = key >> RUN_BITS;
    let h = (run ^ (run >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let h = (h ^ (h >> 32)) << RUN_BITS | key & ((1 << RUN_BITS) - 1);
    h ^ h << (64 - RUN_BITS)
}

fn hash_of(word: &u64) -> u64 {
    hash(word & KEY_MASK)
}

impl Default for Dead {
    fn default() -> Self {
        Dead {
            parts: (0..PARTS).map(|_| HashTable::new()).collect(),
            blocks: 0,
        }
    }
}

impl Dead {
    fn part(hash: u64) -> usize {
        (hash >> 40) as usize % PARTS
    }

    /// Blocks with dead copies.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// One more copy of a block is dead.
    pub fn add(&mut self, disk: u16, block: u64) {
        self.add_many(disk, block, 1);
    }

    /// The same for several copies of it.
    pub fn add_many(&mut self, disk: u16, block: u64, count: u64) {
        let key = key(disk, block);
        let hash = hash(key);
        let part = &mut self.parts[Self::part(hash)];
        match part.entry(hash, |word| word & KEY_MASK == key, hash_of) {
            Entry::Occupied(mut at) => {
                let count = ((at.get() >> COUNT_SHIFT) + count).min(COUNT_MAX);
                *at.get_mut() = key | count << COUNT_SHIFT;
            }
            Entry::Vacant(at) => {
                at.insert(key | count.min(COUNT_MAX) << COUNT_SHIFT);
                self.blocks += 1;
            }
        }
    }

    /// A dead copy of a block is not there any more.
    pub fn take(&mut self, disk: u16, block: u64) {
        let key = key(disk, block);
        let hash = hash(key);
        let part = &mut self.parts[Self::part(hash)];
        let Ok(mut at) = part.find_entry(hash, |word| word & KEY_MASK == key) else {
            // A log that somebody made up says one thing of a block and another of its copies.
            return;
        };
        match *at.get() >> COUNT_SHIFT {
            COUNT_MAX => {}
            1 => {
                at.remove();
                self.blocks -= 1;
            }
            count => *at.get_mut() = key | (count - 1) << COUNT_SHIFT,
        }
    }

    /// Dead copies of a block.
    pub fn count(&self, disk: u16, block: u64) -> u64 {
        let key = key(disk, block);
        let hash = hash(key);
        let found = self.parts[Self::part(hash)].find(hash, |word| word & KEY_MASK == key);
        found.map_or(0, |word| word >> COUNT_SHIFT)
    }

    /// Blocks of `start..end` that have dead copies, in no order.
    pub fn within(&self, disk: u16, start: u64, end: u64) -> Vec<u64> {
        if end.saturating_sub(start) <= self.blocks as u64 {
            return (start..end).filter(|b| self.count(disk, *b) > 0).collect();
        }
        let all = self
            .iter()
            .filter(|(d, block, _)| *d == disk && (start..end).contains(block));
        all.map(|(_, block, _)| block).collect()
    }

    /// Nothing of a disk that is on flash counts any more.
    pub fn forget(&mut self, disk: u16) {
        for part in &mut self.parts {
            let before = part.len();
            part.retain(|word| (*word & KEY_MASK) >> BLOCK_BITS != u64::from(disk));
            self.blocks -= before - part.len();
        }
    }

    /// Disk, block and dead copies, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u16, u64, u64)> {
        self.parts.iter().flat_map(|part| part.iter()).map(|word| {
            let disk = (word & KEY_MASK) >> BLOCK_BITS;
            (
                disk as u16,
                word & ((1 << BLOCK_BITS) - 1),
                word >> COUNT_SHIFT,
            )
        })
    }

    /// As bytes: blocks in their order, each as its distance from the one before and its copies, seven bits
    /// a byte.
    pub fn encode(&self) -> Vec<u8> {
        let mut words: Vec<(u64, u64)> = self.iter().map(|(d, b, n)| (key(d, b), n)).collect();
        words.sort_unstable();
        let mut out = Vec::new();
        let mut last = 0;
        for (key, count) in words {
            put(&mut out, (key - last) << 1 | u64::from(count > 1));
            if count > 1 {
                put(&mut out, count);
            }
            last = key;
        }
        out
    }

    /// Reads them back; `None` if that is not what they are.
    pub fn decode(bytes: &[u8]) -> Option<Dead> {
        let mut dead = Dead::default();
        let (mut rest, mut key) = (bytes, 0u64);
        while !rest.is_empty() {
            let word = get(&mut rest)?;
            key = key.checked_add(word >> 1).filter(|key| *key <= KEY_MASK)?;
            let count = match word & 1 {
                0 => 1,
                _ => get(&mut rest)?,
            };
            let disk = (key >> BLOCK_BITS) as u16;
            dead.add_many(disk, key & ((1 << BLOCK_BITS) - 1), count.min(COUNT_MAX));
        }
        Some(dead)
    }
}

/// A number, seven bits a byte, the lowest first.
fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 128 {
        out.push(n as u8 | 128);
        n >>= 7;
    }
    out.push(n as u8);
}

fn get(bytes: &mut &[u8]) -> Option<u64> {
    let mut n = 0;
    for shift in (0..63).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        n |= u64::from(byte & 127) << shift;
        if byte & 128 == 0 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, HashSet};

    proptest! {
        #[test]
        fn counts_and_survives_as_bytes(
            ops in prop::collection::vec((any::<bool>(), 1u16..4, 0u64..40), 0..300),
        ) {
            let mut dead = Dead::default();
            let mut plain: BTreeMap<(u16, u64), u64> = BTreeMap::new();
            for (add, disk, block) in ops {
                let block = block * 0x3FFF_FFF1 % (1 << BLOCK_BITS);
                let n = plain.entry((disk, block)).or_default();
                if add {
                    dead.add(disk, block);
                    *n += 1;
                } else if *n > 0 {
                    dead.take(disk, block);
                    *n -= 1;
                }
            }
            plain.retain(|_, n| *n > 0);
            let back = Dead::decode(&dead.encode()).unwrap();
            for d in [&dead, &back] {
                let all: BTreeMap<_, _> = d.iter().map(|(d, b, n)| ((d, b), n)).collect();
                prop_assert_eq!(&all, &plain);
                prop_assert_eq!(d.len(), plain.len());
            }
            let mut of_two = dead.within(2, 5, u64::MAX);
            of_two.sort_unstable();
            let wanted = plain.keys().filter(|(d, b)| *d == 2 && *b >= 5).map(|(_, b)| *b);
            prop_assert_eq!(of_two, wanted.collect::<Vec<_>>());
            dead.forget(2);
            prop_assert!(dead.iter().all(|(disk, _, _)| disk != 2));
            prop_assert_eq!(dead.len(), plain.keys().filter(|(d, _)| *d != 2).count());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = Dead::decode(&bytes);
        }
    }

    #[test]
    fn blocks_of_a_run_lie_together_and_are_told_apart() {
        for run in [0, 1, 77, 1 << 40] {
            let hashes: Vec<u64> = (0..16).map(|i| hash(run << RUN_BITS | i)).collect();
            let places: HashSet<u64> = hashes.iter().map(|h| h << 7 >> 7 >> RUN_BITS).collect();
            let tags: HashSet<u64> = hashes.iter().map(|h| h >> 57).collect();
            assert_eq!((places.len(), tags.len()), (1, 16));
        }
    }

    #[test]
    fn what_is_counted_no_further_stays() {
        let mut dead = Dead::default();
        dead.add_many(1, 1, COUNT_MAX - 1);
        dead.add(1, 1);
        dead.add(1, 1);
        dead.take(1, 1);
        assert_eq!(dead.count(1, 1), COUNT_MAX);
    }
}
