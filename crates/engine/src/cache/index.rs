//! Where block b of disk d is on flash: the RAM index.
//!
//! The index is most of a cache's memory, so it is built for bytes: per 4 KiB of flash a key
//! with flags (7 bytes) and a checksum (4 bytes) in arrays ordered by slot, and a hash table of
//! slot numbers whose buckets are one cache line: 12 one-byte tags, an overflow count and 12
//! slot numbers. At the table's load this is 16.8 bytes per slot. Keys live only in the slot
//! array; the tag keeps a lookup from touching it more often than it must.
//!
//! What is read or written together mostly lies together on the disk, so eight consecutive blocks have
//! their homes in eight consecutive buckets: one page of RAM to be found by the processor instead of eight.
//! Which of them is whose depends on the hash, so that blocks eight apart do not crowd the same ones.
//!
//! The table never grows: it is sized for all slots at start, so there is no resize stall.

/// A 4 KiB place on flash: its number counted from the first segment.
pub type SlotNo = u32;

/// Slot flag: the block differs from the origin.
pub const DIRTY: u64 = 1;
/// Slot flag: the checksum did not match and the data is lost.
pub const LOST: u64 = 1 << 3;
/// Slot flag: being copied elsewhere (destaged or reinserted); not kept over a restart.
pub const MARK: u64 = 1 << 4;
const FREQ_SHIFT: u32 = 1;
const FREQ_MASK: u64 = 3 << FREQ_SHIFT;
/// Highest value of a slot's use counter.
pub const FREQ_MAX: u64 = 3;
/// Flag bits below the key in a slot word.
const KEY_SHIFT: u32 = 5;
const BLOCK_BITS: u32 = 36;
/// Bytes of a slot word: 5 flag bits, 36 bits of block, 15 bits of disk.
pub const SLOT_BYTES: usize = 7;

/// Words of 4 bytes in a bucket: 3 of tags, 1 overflow count, 12 slot numbers.
const WORDS: usize = 16;
/// Consecutive blocks whose homes lie together, and as many buckets.
const LANES: usize = 8;
/// Entries in a bucket.
const WAYS: usize = 12;
/// Slots per bucket on average when every slot is in use: 92 % load.
const SLOTS_PER_BUCKET: f64 = 11.0;

/// A disk and a block number, as the index packs them: disk in bits 55–41 of the slot word,
/// block in bits 40–5.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key(u64);

impl Key {
    /// Packs a key; `block` must be below 2^36, which requests are checked for, and `disk` at
    /// most [`DISK_ID_MAX`](hearth_format::DISK_ID_MAX), which the registry is checked for.
    #[inline]
    pub fn new(disk: u16, block: u64) -> Key {
        debug_assert!(block < 1 << BLOCK_BITS && disk != 0 && disk <= hearth_format::DISK_ID_MAX);
        Key(u64::from(disk) << BLOCK_BITS | block)
    }

    /// The disk.
    pub fn disk(self) -> u16 {
        (self.0 >> BLOCK_BITS) as u16
    }

    /// The block.
    pub fn block(self) -> u64 {
        self.0 & ((1 << BLOCK_BITS) - 1)
    }
}

/// What a slot holds.
#[derive(Clone, Copy, Debug)]
pub struct SlotInfo {
    /// Whose block.
    pub key: Key,
    /// Differs from the origin.
    pub dirty: bool,
    /// Known unreadable.
    pub lost: bool,
    /// Uses since it was written, saturating.
    pub freq: u64,
}

const EMPTY: [u8; SLOT_BYTES] = [0; SLOT_BYTES];

#[inline]
fn word(m: [u8; SLOT_BYTES]) -> u64 {
    u64::from_le_bytes([m[0], m[1], m[2], m[3], m[4], m[5], m[6], 0])
}

#[inline]
fn bytes(word: u64) -> [u8; SLOT_BYTES] {
    let [a, b, c, d, e, f, g, _] = word.to_le_bytes();
    [a, b, c, d, e, f, g]
}

/// Buckets for so many slots: whole groups, and one that nothing has its home in.
fn buckets_for(slots: u32) -> usize {
    let buckets = (f64::from(slots) / SLOTS_PER_BUCKET) as usize;
    (buckets + 1).next_multiple_of(LANES) + 1
}

/// The index of one flash device.
pub struct Index {
    meta: Vec<[u8; SLOT_BYTES]>,
    crc: Vec<u32>,
    /// Buckets, starting at `table_base` so that each is one cache line.
    table: Vec<u32>,
    table_base: usize,
    buckets: usize,
    seed: u64,
    len: usize,
}

impl Index {
    /// An empty index for `slots` slots. `seed` keeps guests from choosing colliding blocks.
    pub fn new(slots: u32, seed: u64) -> Index {
        let buckets = buckets_for(slots);
        let table = vec![0u32; buckets * WORDS + WORDS];
        let misalign = (table.as_ptr() as usize / 4) % WORDS;
        let table_base = (WORDS - misalign) % WORDS;
        Index {
            meta: vec![[0; SLOT_BYTES]; slots as usize],
            crc: vec![0; slots as usize],
            table,
            table_base,
            buckets,
            seed,
            len: 0,
        }
    }

    /// Bytes of RAM for `slots` slots.
    pub fn footprint(slots: u32) -> u64 {
        let table = (buckets_for(slots) + 1) * WORDS * 4;
        u64::from(slots) * (SLOT_BYTES as u64 + 4) + table as u64
    }

    /// Blocks indexed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Slots there are.
    pub fn slots(&self) -> u32 {
        self.meta.len() as u32
    }

    /// One hash for the blocks whose homes lie together.
    #[inline]
    fn hash(&self, key: Key) -> u64 {
        // A finaliser in the manner of MurmurHash3: two multiplications, three shifts.
        let mut h = (key.0 / LANES as u64) ^ self.seed;
        h = (h ^ (h >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        h = (h ^ (h >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        h ^ (h >> 32)
    }

    #[inline]
    fn home(&self, hash: u64, key: Key) -> usize {
        let group = (((hash >> 32) * (self.buckets / LANES) as u64) >> 32) as usize;
        group * LANES + (hash >> 8).wrapping_add(key.0) as usize % LANES
    }

    #[inline]
    fn tag(hash: u64) -> u8 {
        (hash as u8) | 1
    }

    #[inline]
    fn bucket(&self, b: usize) -> &[u32; WORDS] {
        let at = self.table_base + b * WORDS;
        self.table[at..at + WORDS]
            .try_into()
            .expect("a bucket is WORDS long")
    }

    #[inline]
    fn bucket_mut(&mut self, b: usize) -> &mut [u32; WORDS] {
        let at = self.table_base + b * WORDS;
        (&mut self.table[at..at + WORDS])
            .try_into()
            .expect("a bucket is WORDS long")
    }

    /// Where to look after bucket `b`. Where neighbours fill one bucket they fill those beside it as well,
    /// so the next one is as far away as neighbours reach. Their number is odd, so this visits all.
    #[inline]
    fn next(&self, b: usize) -> usize {
        let next = b + LANES;
        if next < self.buckets {
            next
        } else {
            next - self.buckets
        }
    }

    /// Bit mask of the ways whose tag equals `tag` (a multiple of the tag in three words at once).
    #[inline]
    fn matches(bucket: &[u32; WORDS], tag: u8) -> u32 {
        let want = u32::from(tag) * 0x0101_0101;
        let mut mask = 0u32;
        for (word, tags) in bucket.iter().take(3).enumerate() {
            let x = tags ^ want;
            // Exact zero-byte test (no borrow between bytes).
            let zero = !(((x & 0x7F7F_7F7F) + 0x7F7F_7F7F) | x | 0x7F7F_7F7F);
            let bits = (zero >> 7) & 1 | (zero >> 14) & 2 | (zero >> 21) & 4 | (zero >> 28) & 8;
            mask |= bits << (word * 4);
        }
        mask
    }

    #[inline]
    fn slot_key(&self, slot: SlotNo) -> u64 {
        self.meta
            .get(slot as usize)
            .map_or(u64::MAX, |m| word(*m) >> KEY_SHIFT)
    }

    /// Sets and clears flags of a slot word.
    #[inline]
    fn flag(&mut self, slot: SlotNo, set: u64, clear: u64) {
        let m = &mut self.meta[slot as usize];
        m[0] = m[0] & !(clear as u8) | set as u8;
    }

    #[inline]
    fn find(&self, key: Key) -> Option<(usize, usize)> {
        let hash = self.hash(key);
        let tag = Self::tag(hash);
        let mut b = self.home(hash, key);
        // Bounded by the table, whatever a damaged checkpoint says.
        for _ in 0..self.buckets {
            let bucket = self.bucket(b);
            let mut mask = Self::matches(bucket, tag);
            while mask != 0 {
                let way = mask.trailing_zeros() as usize;
                if self.slot_key(bucket[4 + way]) == key.0 {
                    return Some((b, way));
                }
                mask &= mask - 1;
            }
            if bucket[3] == 0 {
                return None;
            }
            b = self.next(b);
        }
        None
    }

    /// The slot holding `key`.
    #[inline]
    pub fn get(&self, key: Key) -> Option<SlotNo> {
        let (b, way) = self.find(key)?;
        Some(self.bucket(b)[4 + way])
    }

    /// Maps `key` to `slot`; returns the slot it had, which is now empty, and whether that was
    /// dirty. `slot` must be empty.
    pub fn set(
        &mut self,
        key: Key,
        slot: SlotNo,
        crc: u32,
        dirty: bool,
        freq: u64,
    ) -> Option<(SlotNo, bool)> {
        debug_assert_eq!(self.meta[slot as usize], EMPTY, "slot in use");
        let flags = if dirty { DIRTY } else { 0 } | freq.min(FREQ_MAX) << FREQ_SHIFT;
        let new = bytes(key.0 << KEY_SHIFT | flags);
        self.crc[slot as usize] = crc;
        let hash = self.hash(key);
        let tag = Self::tag(hash);
        let mut free: Option<(usize, usize)> = None;
        let home = self.home(hash, key);
        let mut b = home;
        for _ in 0..self.buckets {
            let bucket = self.bucket(b);
            let mut mask = Self::matches(bucket, tag);
            while mask != 0 {
                let way = mask.trailing_zeros() as usize;
                if self.slot_key(bucket[4 + way]) == key.0 {
                    let old = std::mem::replace(&mut self.bucket_mut(b)[4 + way], slot);
                    let was = std::mem::take(&mut self.meta[old as usize]);
                    self.meta[slot as usize] = new;
                    return Some((old, word(was) & DIRTY != 0));
                }
                mask &= mask - 1;
            }
            if free.is_none() {
                let empty = Self::matches(bucket, 0);
                if empty != 0 {
                    free = Some((b, empty.trailing_zeros() as usize));
                }
            }
            if bucket[3] == 0 && free.is_some() {
                break;
            }
            b = self.next(b);
        }
        // Only now: a damaged table may name the slot already, which must not be found above.
        self.meta[slot as usize] = new;
        // There is room for every slot, unless a checkpoint brought entries that lead nowhere.
        let (place, way) = free.or_else(|| self.stale()).unwrap_or((home, 0));
        self.bucket_mut(place)[way / 4] &= !(0xFF << (way % 4 * 8));
        let mut at = home;
        while at != place {
            let bucket = self.bucket_mut(at);
            bucket[3] = bucket[3].saturating_add(1);
            at = self.next(at);
        }
        let bucket = self.bucket_mut(place);
        bucket[way / 4] |= u32::from(tag) << (way % 4 * 8);
        bucket[4 + way] = slot;
        self.len += 1;
        None
    }

    /// Forgets `key`; returns the slot it had.
    pub fn remove(&mut self, key: Key) -> Option<SlotNo> {
        let (b, way) = self.find(key)?;
        let mut at = self.home(self.hash(key), key);
        for _ in 0..self.buckets {
            if at == b {
                break;
            }
            let bucket = self.bucket_mut(at);
            bucket[3] = bucket[3].saturating_sub(1);
            at = self.next(at);
        }
        let bucket = self.bucket_mut(b);
        bucket[way / 4] &= !(0xFF << (way % 4 * 8));
        let slot = std::mem::take(&mut bucket[4 + way]);
        self.meta[slot as usize] = EMPTY;
        self.len -= 1;
        Some(slot)
    }

    /// An entry of the table that leads to no slot in use, or to one that is found elsewhere.
    fn stale(&self) -> Option<(usize, usize)> {
        let places = (0..self.buckets).flat_map(|b| (0..WAYS).map(move |way| (b, way)));
        let leads = |&(b, way): &(usize, usize)| {
            let slot = self.slot(self.bucket(b)[4 + way]);
            slot.is_some_and(|info| self.find(info.key) == Some((b, way)))
        };
        places.into_iter().find(|place| !leads(place))
    }

    /// Empties a slot that no entry of the table leads to, as a checkpoint that lies can have them.
    /// False if one does.
    pub fn remove_orphan(&mut self, slot: SlotNo) -> bool {
        let Some(info) = self.slot(slot) else {
            return false;
        };
        if self.get(info.key) == Some(slot) {
            return false;
        }
        self.meta[slot as usize] = EMPTY;
        self.len -= 1;
        true
    }

    /// What `slot` holds; `None` if nothing.
    #[inline]
    pub fn slot(&self, slot: SlotNo) -> Option<SlotInfo> {
        let m = word(*self.meta.get(slot as usize)?);
        if m == 0 {
            return None;
        }
        Some(SlotInfo {
            key: Key(m >> KEY_SHIFT),
            dirty: m & DIRTY != 0,
            lost: m & LOST != 0,
            freq: (m & FREQ_MASK) >> FREQ_SHIFT,
        })
    }

    /// Checksum of a slot's block.
    #[inline]
    pub fn crc(&self, slot: SlotNo) -> u32 {
        self.crc[slot as usize]
    }

    #[inline]
    fn freq(&self, slot: SlotNo) -> u64 {
        (u64::from(self.meta[slot as usize][0]) & FREQ_MASK) >> FREQ_SHIFT
    }

    /// Counts a use of the slot.
    #[inline]
    pub fn touch(&mut self, slot: SlotNo) {
        let more = (self.freq(slot) + 1).min(FREQ_MAX);
        self.flag(slot, more << FREQ_SHIFT, FREQ_MASK);
    }

    /// Takes back one use.
    pub fn untouch(&mut self, slot: SlotNo) {
        let less = self.freq(slot).saturating_sub(1);
        self.flag(slot, less << FREQ_SHIFT, FREQ_MASK);
    }

    /// Changes the dirty flag.
    pub fn set_dirty(&mut self, slot: SlotNo, dirty: bool) {
        if dirty {
            self.flag(slot, DIRTY, 0);
        } else {
            self.flag(slot, 0, DIRTY | LOST);
        }
    }

    /// Marks a dirty slot's data as lost.
    pub fn set_lost(&mut self, slot: SlotNo) {
        self.flag(slot, LOST, 0);
    }

    /// Is the slot being copied elsewhere?
    pub fn slot_mark(&self, slot: SlotNo) -> bool {
        u64::from(self.meta[slot as usize][0]) & MARK != 0
    }

    /// Notes that the slot is (not) being copied elsewhere. No effect on an empty slot.
    pub fn set_mark(&mut self, slot: SlotNo, on: bool) {
        if on && self.meta[slot as usize] != EMPTY {
            self.flag(slot, MARK, 0);
        } else {
            self.flag(slot, 0, MARK);
        }
    }

    /// Random seed of the hash, which a checkpoint must carry.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The raw arrays, for a checkpoint: slots, checksums, table.
    pub fn sections(&self) -> (&[u8], &[u32], &[u32]) {
        (
            self.meta.as_flattened(),
            &self.crc,
            &self.table[self.table_base..self.table_base + self.buckets * WORDS],
        )
    }

    /// The raw arrays, to be filled from a checkpoint, then [`adopt`](Self::adopt)ed.
    pub fn sections_mut(&mut self) -> (&mut [u8], &mut [u32], &mut [u32]) {
        let (from, to) = (self.table_base, self.table_base + self.buckets * WORDS);
        (
            self.meta.as_flattened_mut(),
            &mut self.crc,
            &mut self.table[from..to],
        )
    }

    /// Accepts arrays read from a checkpoint. Lookups check slot numbers and keys themselves, so
    /// a crafted table can hide blocks but not cross-wire them; counts are checked here.
    ///
    /// Returns false if the table and the slots disagree: then the arrays must not be used.
    pub fn adopt(&mut self, seed: u64) -> bool {
        self.seed = seed;
        self.meta.iter_mut().for_each(|m| m[0] &= !(MARK as u8));
        self.len = self.meta.iter().filter(|m| **m != EMPTY).count();
        let mut tagged = 0usize;
        for b in 0..self.buckets {
            tagged += WAYS - Self::matches(self.bucket(b), 0).count_ones() as usize;
        }
        tagged == self.len
    }

    /// Has the home bucket of `key` fetched into the processor's cache.
    #[inline]
    pub fn prefetch(&self, key: Key) {
        let home = self.home(self.hash(key), key);
        if let Some(bucket) = self.table.get(self.table_base + home * WORDS) {
            hearth_io::prefetch(bucket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn footprint_is_below_seventeen_bytes_a_slot() {
        for slots in [1u32 << 12, 1 << 20, 1 << 28] {
            let per_slot = Index::footprint(slots) as f64 / f64::from(slots);
            assert!(per_slot < 17.0, "{per_slot}");
        }
    }

    #[test]
    fn a_full_index_finds_everything() {
        let n = 50_000u32;
        let mut index = Index::new(n, 42);
        for s in 0..n {
            assert_eq!(
                index.set(Key::new(1 + (s % 3) as u16, u64::from(s)), s, s, false, 0),
                None
            );
        }
        for s in 0..n {
            assert_eq!(
                index.get(Key::new(1 + (s % 3) as u16, u64::from(s))),
                Some(s)
            );
        }
        assert_eq!(index.len(), n as usize);
        let (meta, crc, table) = index.sections();
        let (meta, crc, table) = (meta.to_vec(), crc.to_vec(), table.to_vec());
        let mut copy = Index::new(n, 0);
        let parts = copy.sections_mut();
        parts.0.copy_from_slice(&meta);
        parts.1.copy_from_slice(&crc);
        parts.2.copy_from_slice(&table);
        assert!(copy.adopt(42));
        assert_eq!(copy.get(Key::new(1, 3)), Some(3));
    }

    #[test]
    fn the_smallest_tables_have_room_for_every_slot() {
        for n in 0..400u32 {
            let mut index = Index::new(n, u64::from(n));
            let key = |slot: u32| Key::new(1, u64::from(slot) * 8);
            for slot in 0..n {
                assert_eq!(index.set(key(slot), slot, 0, false, 0), None);
            }
            assert!((0..n).all(|slot| index.get(key(slot)) == Some(slot)));
            for slot in 0..n {
                assert_eq!(index.remove(key(slot)), Some(slot));
            }
            assert!(index.table.iter().enumerate().all(|(at, word)| {
                let in_bucket = at.wrapping_sub(index.table_base) % WORDS;
                in_bucket >= 4 || *word == 0
            }));
        }
    }

    #[test]
    fn a_damaged_table_that_names_the_slot_to_come_does_not_lose_it() {
        let mut index = Index::new(64, 9);
        let (there, new) = (Key::new(1, 5), Key::new(1, 77));
        index.set(there, 3, 0, false, 0);
        // As many tags as slots in use, but for the wrong one.
        let (b, way) = index.find(there).unwrap();
        let at = index.table_base + b * WORDS;
        index.table[at + way / 4] &= !(0xFF << (way % 4 * 8));
        let hash = index.hash(new);
        let home = index.table_base + index.home(hash, new) * WORDS;
        index.table[home] |= u32::from(Index::tag(hash));
        index.table[home + 4] = 9;
        assert!(index.adopt(9));
        assert_eq!(index.set(new, 9, 0xABCD, true, 0), None);
        assert_eq!(index.get(new), Some(9));
        assert!(index.slot(9).is_some_and(|s| s.dirty));
    }

    /// Buckets looked at until `key` is found.
    fn probes(index: &Index, key: Key) -> usize {
        let (place, _) = index.find(key).unwrap();
        let mut at = index.home(index.hash(key), key);
        let mut n = 1;
        while at != place {
            at = index.next(at);
            n += 1;
        }
        n
    }

    #[test]
    fn blocks_at_equal_distances_do_not_crowd_the_same_buckets() {
        let n = 100_000u32;
        for stride in [1u64, 2, 8, 64, 256, 4096] {
            for run in [1u64, 3, 8, 24] {
                let mut index = Index::new(n, 7);
                let keys: Vec<Key> = (0..u64::from(n))
                    .map(|i| Key::new(1, i / run * stride * run.next_multiple_of(8) + i % run))
                    .collect();
                for (slot, key) in (0..n).zip(&keys) {
                    assert_eq!(index.set(*key, slot, 0, false, 0), None);
                }
                let mean =
                    keys.iter().map(|k| probes(&index, *k)).sum::<usize>() as f64 / f64::from(n);
                assert!(mean < 2.0, "stride {stride}, runs of {run}: {mean}");
            }
        }
    }

    #[test]
    fn the_largest_key_and_all_flags_fit_a_slot_word() {
        let mut index = Index::new(8, 1);
        let key = Key::new(hearth_format::DISK_ID_MAX, (1 << BLOCK_BITS) - 1);
        index.set(key, 3, 7, true, FREQ_MAX);
        index.set_lost(3);
        index.set_mark(3, true);
        index.touch(3);
        let info = index.slot(3).unwrap();
        assert_eq!((info.key, info.freq), (key, FREQ_MAX));
        assert!(info.dirty && info.lost && index.slot_mark(3));
        index.untouch(3);
        index.set_dirty(3, false);
        index.set_mark(3, false);
        let info = index.slot(3).unwrap();
        assert_eq!((info.key, info.freq), (key, FREQ_MAX - 1));
        assert!(!info.dirty && !info.lost && !index.slot_mark(3));
        assert_eq!(index.get(key), Some(3));
    }

    proptest! {
        /// The index behaves as a map under churn near full load.
        #[test]
        fn matches_a_map(ops in proptest::collection::vec((0u8..3, 0u64..400), 1..3000)) {
            let slots = 256u32;
            let mut index = Index::new(slots, 7);
            let mut model: HashMap<u64, u32> = HashMap::new();
            let mut free: Vec<u32> = (0..slots).collect();
            for (op, block) in ops {
                let key = Key::new(5, block);
                match op {
                    0 | 1 => {
                        let Some(slot) = free.pop() else { continue };
                        let old = index.set(key, slot, block as u32, op == 1, 0);
                        prop_assert_eq!(old.map(|o| o.0), model.insert(block, slot));
                        free.extend(old.map(|o| o.0));
                    }
                    _ => {
                        let old = index.remove(key);
                        prop_assert_eq!(old, model.remove(&block));
                        free.extend(old);
                    }
                }
                prop_assert_eq!(index.len(), model.len());
            }
            for block in 0..400 {
                prop_assert_eq!(index.get(Key::new(5, block)), model.get(&block).copied());
            }
        }
    }
}
