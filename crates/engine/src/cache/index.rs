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
//!
//! Everything is in atomic words, because data threads look blocks up without a lock ([`Lookup`]) while
//! whoever holds the engine's lock changes them ([`Index`], the only one that writes). What such a lookup
//! may find, and why it is never another block's place, is said at [`Lookup::get`].

use crate::sync::{AtomicU32, AtomicU64, zeroed};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A 4 KiB place on flash: its number counted from the first segment.
pub type SlotNo = u32;

/// Slot flag: the block differs from the origin.
pub const DIRTY: u64 = 1;
/// Slot flag of a dirty block: the checksum did not match and the data is lost. Of a clean one: it was written
/// ([`SlotInfo::written`]).
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
/// Buckets a lookup without the lock looks at; on average it is less than two.
const PROBES_MAX: usize = 16;
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
    /// A clean copy of what was written to the origin, not of what was read from it. False if that is not known.
    pub written: bool,
    /// Uses since it was written, saturating.
    pub freq: u64,
}

/// A dirty block that is lost.
fn is_lost(word: u64) -> bool {
    word & (DIRTY | LOST) == DIRTY | LOST
}

/// The bits of a slot word.
const SLOT_MASK: u64 = (1 << (SLOT_BYTES * 8)) - 1;

/// Buckets for so many slots: whole groups, and one that nothing has its home in.
fn buckets_for(slots: u32) -> usize {
    let buckets = (f64::from(slots) / SLOTS_PER_BUCKET) as usize;
    (buckets + 1).next_multiple_of(LANES) + 1
}

/// A section of the index as a checkpoint stores it, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The slot words.
    Slots,
    /// The checksums.
    Checksums,
    /// The buckets.
    Table,
}

/// What index and lookups share.
struct Table {
    /// Slot words of seven bytes, side by side.
    meta: Box<[AtomicU64]>,
    crc: Box<[AtomicU32]>,
    /// Buckets, starting at `table_base` so that each is one cache line.
    table: Box<[AtomicU32]>,
    table_base: usize,
    buckets: usize,
    seed: AtomicU64,
}

/// The index of one flash device, as its one writer has it.
pub struct Index {
    t: Arc<Table>,
    len: usize,
}

/// The index as a data thread sees it, while it may be changing.
#[derive(Clone)]
pub struct Lookup {
    t: Arc<Table>,
}

/// A block found by a [`Lookup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where it is.
    pub slot: SlotNo,
    /// Its checksum.
    pub crc: u32,
    /// Differs from the origin.
    pub dirty: bool,
    /// Known unreadable.
    pub lost: bool,
    /// Uses since it was written, saturating.
    pub freq: u64,
}

impl Table {
    fn new(slots: u32, seed: u64) -> Table {
        let buckets = buckets_for(slots);
        let table: Box<[AtomicU32]> = zeroed(buckets * WORDS + WORDS);
        let misalign = (table.as_ptr() as usize / 4) % WORDS;
        let table_base = (WORDS - misalign) % WORDS;
        let meta = (slots as usize * SLOT_BYTES).div_ceil(8) + 1;
        Table {
            meta: zeroed(meta),
            crc: zeroed(slots as usize),
            table,
            table_base,
            buckets,
            seed: AtomicU64::new(seed),
        }
    }

    /// Where a slot's word begins: which of `meta`, and at which bit.
    #[inline]
    fn at(slot: SlotNo) -> (usize, u32) {
        let byte = slot as usize * SLOT_BYTES;
        (byte / 8, (byte % 8 * 8) as u32)
    }

    /// A slot's word; 0 is an empty slot, or none. For the writer.
    #[inline]
    fn word(&self, slot: SlotNo) -> u64 {
        if slot as usize >= self.crc.len() {
            return 0;
        }
        let (at, shift) = Self::at(slot);
        let mut word = self.meta[at].load(Relaxed) >> shift;
        if shift > 8 {
            word |= self.meta[at + 1].load(Relaxed) << (64 - shift);
        }
        word & SLOT_MASK
    }

    /// The same for who does not write. 0 also if nobody can tell: half of a word may be that of a slot
    /// being filled or emptied.
    ///
    /// A slot is filled from its upper part down and emptied from its lower part up, so an upper
    /// part read between two looks at a lower part that is in use belongs to that.
    #[inline]
    fn word_shared(&self, slot: SlotNo) -> u64 {
        if slot as usize >= self.crc.len() {
            return 0;
        }
        let (at, shift) = Self::at(slot);
        let low = self.meta[at].load(Acquire) >> shift;
        if shift <= 8 {
            return low & SLOT_MASK;
        }
        let high = self.meta[at + 1].load(Acquire) << (64 - shift);
        let again = self.meta[at].load(Relaxed) >> shift;
        if low == 0 || again == 0 {
            return 0;
        }
        (again | high) & SLOT_MASK
    }

    /// Changes bits of one of `meta`. Every store releases: it may be the one by which a reader sees a
    /// neighbour that was filled before.
    #[inline]
    fn put(&self, at: usize, clear: u64, set: u64) {
        let old = self.meta[at].load(Relaxed);
        self.meta[at].store(old & !clear | set, Release);
    }

    /// Fills an empty slot.
    #[inline]
    fn fill(&self, slot: SlotNo, word: u64) {
        let (at, shift) = Self::at(slot);
        if shift > 8 {
            let rest = 64 - shift;
            self.put(at + 1, SLOT_MASK >> rest, word >> rest);
        }
        self.put(at, SLOT_MASK << shift, word << shift);
    }

    /// Empties a slot.
    #[inline]
    fn empty(&self, slot: SlotNo) {
        let (at, shift) = Self::at(slot);
        self.put(at, SLOT_MASK << shift, 0);
        if shift > 8 {
            self.put(at + 1, SLOT_MASK >> (64 - shift), 0);
        }
    }

    /// One hash for the blocks whose homes lie together.
    #[inline]
    fn hash(&self, key: Key) -> u64 {
        // A finaliser in the manner of MurmurHash3: two multiplications, three shifts.
        let mut h = (key.0 / LANES as u64) ^ self.seed.load(Relaxed);
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
    fn bucket(&self, b: usize) -> &[AtomicU32; WORDS] {
        let at = self.table_base + b * WORDS;
        self.table[at..at + WORDS]
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
    fn matches(bucket: &[AtomicU32; WORDS], tag: u8) -> u32 {
        let want = u32::from(tag) * 0x0101_0101;
        let mut mask = 0u32;
        for (word, tags) in bucket.iter().take(3).enumerate() {
            let x = tags.load(Relaxed) ^ want;
            // Exact zero-byte test (no borrow between bytes).
            let zero = !(((x & 0x7F7F_7F7F) + 0x7F7F_7F7F) | x | 0x7F7F_7F7F);
            let bits = (zero >> 7) & 1 | (zero >> 14) & 2 | (zero >> 21) & 4 | (zero >> 28) & 8;
            mask |= bits << (word * 4);
        }
        mask
    }

    /// Bucket and way of a key; for the writer.
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
                if self.word(bucket[4 + way].load(Relaxed)) >> KEY_SHIFT == key.0 {
                    return Some((b, way));
                }
                mask &= mask - 1;
            }
            if bucket[3].load(Relaxed) == 0 {
                return None;
            }
            b = self.next(b);
        }
        None
    }

    fn prefetch(&self, key: Key) {
        let home = self.home(self.hash(key), key);
        if let Some(bucket) = self.table.get(self.table_base + home * WORDS) {
            hearth_io::prefetch(bucket);
        }
    }
}

impl Lookup {
    /// The slot holding `key`, if that can be told without the lock.
    ///
    /// `None` says nothing: who wants to know asks again under the lock. What is found was there at some
    /// moment of the call, and its checksum is that of this block, as long as one thing is kept to:
    /// *no slot is filled a second time while a call is under way that began before it was
    /// emptied* (see [`crate::lanes`]). So during a call a slot is at most filled and then emptied, once,
    /// and two words that belong to a slot in use belong together.
    #[inline]
    pub fn get(&self, key: Key) -> Option<Found> {
        let t = &*self.t;
        let hash = t.hash(key);
        let tag = Table::tag(hash);
        let mut b = t.home(hash, key);
        for _ in 0..PROBES_MAX {
            let bucket = t.bucket(b);
            let mut mask = Table::matches(bucket, tag);
            while mask != 0 {
                let way = mask.trailing_zeros() as usize;
                let slot = bucket[4 + way].load(Relaxed);
                if let Some(found) = self.holds(slot, key) {
                    return Some(found);
                }
                mask &= mask - 1;
            }
            if bucket[3].load(Relaxed) == 0 {
                return None;
            }
            b = t.next(b);
        }
        None
    }

    /// Does `slot` hold `key`? The same is promised as of [`get`](Self::get).
    #[inline]
    pub fn holds(&self, slot: SlotNo, key: Key) -> Option<Found> {
        let word = self.t.word_shared(slot);
        (word >> KEY_SHIFT == key.0).then(|| Found {
            slot,
            // Stored before the word was.
            crc: self.t.crc[slot as usize].load(Relaxed),
            dirty: word & DIRTY != 0,
            lost: is_lost(word),
            freq: (word & FREQ_MASK) >> FREQ_SHIFT,
        })
    }

    /// Has the home bucket of `key` fetched into the processor's cache.
    #[inline]
    pub fn prefetch(&self, key: Key) {
        self.t.prefetch(key);
    }
}

impl Index {
    /// An empty index for `slots` slots. `seed` keeps guests from choosing colliding blocks.
    pub fn new(slots: u32, seed: u64) -> Index {
        let t = Arc::new(Table::new(slots, seed));
        Index { t, len: 0 }
    }

    /// For a data thread.
    pub fn lookup(&self) -> Lookup {
        Lookup { t: self.t.clone() }
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
        self.t.crc.len() as u32
    }

    /// Sets and clears flags of a slot word.
    #[inline]
    fn flag(&mut self, slot: SlotNo, set: u64, clear: u64) {
        let (at, shift) = Table::at(slot);
        self.t.put(at, clear << shift, set << shift);
    }

    /// The slot holding `key`.
    #[inline]
    pub fn get(&self, key: Key) -> Option<SlotNo> {
        let (b, way) = self.t.find(key)?;
        Some(self.t.bucket(b)[4 + way].load(Relaxed))
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
        self.set_by(key, slot, crc, dirty, |_| freq)
    }

    /// The same with as many uses as `freq` says, which is told those of the place that `key` had.
    pub fn set_by(
        &mut self,
        key: Key,
        slot: SlotNo,
        crc: u32,
        dirty: bool,
        freq: impl FnOnce(Option<u64>) -> u64,
    ) -> Option<(SlotNo, bool)> {
        let t = &*self.t;
        debug_assert_eq!(t.word(slot), 0, "slot in use");
        let word = |freq: u64| {
            let flags = if dirty { DIRTY } else { 0 } | freq.min(FREQ_MAX) << FREQ_SHIFT;
            key.0 << KEY_SHIFT | flags
        };
        t.crc[slot as usize].store(crc, Relaxed);
        let hash = t.hash(key);
        let tag = Table::tag(hash);
        let mut free: Option<(usize, usize)> = None;
        let home = t.home(hash, key);
        let mut b = home;
        for _ in 0..t.buckets {
            let bucket = t.bucket(b);
            let mut mask = Table::matches(bucket, tag);
            while mask != 0 {
                let way = mask.trailing_zeros() as usize;
                let old = bucket[4 + way].load(Relaxed);
                let was = t.word(old);
                if was >> KEY_SHIFT == key.0 {
                    let new = word(freq(Some((was & FREQ_MASK) >> FREQ_SHIFT)));
                    // The new place first: who looks without the lock finds one of them.
                    t.fill(slot, new);
                    bucket[4 + way].store(slot, Relaxed);
                    t.empty(old);
                    return Some((old, was & DIRTY != 0));
                }
                mask &= mask - 1;
            }
            if free.is_none() {
                let empty = Table::matches(bucket, 0);
                if empty != 0 {
                    free = Some((b, empty.trailing_zeros() as usize));
                }
            }
            if bucket[3].load(Relaxed) == 0 && free.is_some() {
                break;
            }
            b = t.next(b);
        }
        // Only now: a damaged table may name the slot already, which must not be found above.
        t.fill(slot, word(freq(None)));
        // There is room for every slot, unless a checkpoint brought entries that lead nowhere.
        let (place, way) = free.or_else(|| self.stale()).unwrap_or((home, 0));
        let t = &*self.t;
        change(&t.bucket(place)[way / 4], |tags| {
            tags & !(0xFF << (way % 4 * 8))
        });
        let mut at = home;
        while at != place {
            change(&t.bucket(at)[3], |over| over.saturating_add(1));
            at = t.next(at);
        }
        let bucket = t.bucket(place);
        change(&bucket[way / 4], |tags| {
            tags | u32::from(tag) << (way % 4 * 8)
        });
        bucket[4 + way].store(slot, Relaxed);
        self.len += 1;
        None
    }

    /// Forgets `key`; returns the slot it had.
    pub fn remove(&mut self, key: Key) -> Option<SlotNo> {
        let t = &*self.t;
        let (b, way) = t.find(key)?;
        let mut at = t.home(t.hash(key), key);
        for _ in 0..t.buckets {
            if at == b {
                break;
            }
            change(&t.bucket(at)[3], |over| over.saturating_sub(1));
            at = t.next(at);
        }
        let bucket = t.bucket(b);
        change(&bucket[way / 4], |tags| tags & !(0xFF << (way % 4 * 8)));
        let slot = bucket[4 + way].load(Relaxed);
        bucket[4 + way].store(0, Relaxed);
        t.empty(slot);
        self.len -= 1;
        Some(slot)
    }

    /// An entry of the table that leads to no slot in use, or to one that is found elsewhere.
    fn stale(&self) -> Option<(usize, usize)> {
        let places = (0..self.t.buckets).flat_map(|b| (0..WAYS).map(move |way| (b, way)));
        let leads = |&(b, way): &(usize, usize)| {
            let slot = self.slot(self.t.bucket(b)[4 + way].load(Relaxed));
            slot.is_some_and(|info| self.t.find(info.key) == Some((b, way)))
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
        self.t.empty(slot);
        self.len -= 1;
        true
    }

    /// What `slot` holds; `None` if nothing.
    #[inline]
    pub fn slot(&self, slot: SlotNo) -> Option<SlotInfo> {
        let m = self.t.word(slot);
        if m == 0 {
            return None;
        }
        Some(SlotInfo {
            key: Key(m >> KEY_SHIFT),
            dirty: m & DIRTY != 0,
            lost: is_lost(m),
            written: m & (DIRTY | LOST) == LOST,
            freq: (m & FREQ_MASK) >> FREQ_SHIFT,
        })
    }

    /// Checksum of a slot's block.
    #[inline]
    pub fn crc(&self, slot: SlotNo) -> u32 {
        self.t.crc[slot as usize].load(Relaxed)
    }

    #[inline]
    fn freq(&self, slot: SlotNo) -> u64 {
        (self.t.word(slot) & FREQ_MASK) >> FREQ_SHIFT
    }

    /// Counts a use of the slot.
    #[inline]
    pub fn touch(&mut self, slot: SlotNo) {
        let freq = self.freq(slot);
        // Most blocks that are read have been read before: their cache line stays everybody's.
        if freq < FREQ_MAX {
            self.flag(slot, (freq + 1) << FREQ_SHIFT, FREQ_MASK);
        }
    }

    /// Takes back one use.
    pub fn untouch(&mut self, slot: SlotNo) {
        let less = self.freq(slot).saturating_sub(1);
        self.flag(slot, less << FREQ_SHIFT, FREQ_MASK);
    }

    /// Clears the dirty flag: the origin was given what the slot holds, unless that is lost.
    pub fn set_clean(&mut self, slot: SlotNo) {
        match is_lost(self.t.word(slot)) {
            true => self.flag(slot, 0, DIRTY | LOST),
            false => self.flag(slot, LOST, DIRTY),
        }
    }

    /// Marks a dirty slot's data as lost.
    pub fn set_lost(&mut self, slot: SlotNo) {
        self.flag(slot, LOST, 0);
    }

    /// Marks a clean slot as a copy of what was written to the origin.
    pub fn set_written(&mut self, slot: SlotNo) {
        self.flag(slot, LOST, DIRTY);
    }

    /// True while the slot is being copied elsewhere.
    pub fn slot_mark(&self, slot: SlotNo) -> bool {
        self.t.word(slot) & MARK != 0
    }

    /// Notes that the slot is (not) being copied elsewhere. No effect on an empty slot.
    pub fn set_mark(&mut self, slot: SlotNo, on: bool) {
        if on && self.t.word(slot) != 0 {
            self.flag(slot, MARK, 0);
        } else {
            self.flag(slot, 0, MARK);
        }
    }

    /// Random seed of the hash, which a checkpoint must carry.
    pub fn seed(&self) -> u64 {
        self.t.seed.load(Relaxed)
    }

    /// Length of a section, bytes.
    pub fn section_len(&self, section: Section) -> usize {
        match section {
            Section::Slots => self.t.crc.len() * SLOT_BYTES,
            Section::Checksums => self.t.crc.len() * 4,
            Section::Table => self.t.buckets * WORDS * 4,
        }
    }

    fn words32(&self, section: Section, at: usize, bytes: usize) -> &[AtomicU32] {
        let words = match section {
            Section::Checksums => &self.t.crc[..],
            _ => &self.t.table[self.t.table_base..],
        };
        &words[at / 4..(at + bytes) / 4]
    }

    /// Copies out a piece of a section, for a checkpoint; `at` and, but at the section's end, the
    /// length are multiples of 8.
    pub fn section(&self, section: Section, at: usize, out: &mut [u8]) {
        if section == Section::Slots {
            for (bytes, word) in out.chunks_mut(8).zip(&self.t.meta[at / 8..]) {
                bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes()[..bytes.len()]);
            }
        } else {
            let words = self.words32(section, at, out.len());
            for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
                bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
            }
        }
    }

    /// Fills in a piece of a section from a checkpoint; when all are, they must be
    /// [`adopt`](Self::adopt)ed.
    pub fn set_section(&mut self, section: Section, at: usize, data: &[u8]) {
        if section == Section::Slots {
            for (bytes, word) in data.chunks(8).zip(&self.t.meta[at / 8..]) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(whole), Relaxed);
            }
        } else {
            let words = self.words32(section, at, data.len());
            for (bytes, word) in data.chunks_exact(4).zip(words) {
                let bytes = bytes.try_into().unwrap_or_default();
                word.store(u32::from_le_bytes(bytes), Relaxed);
            }
        }
    }

    /// Accepts arrays read from a checkpoint. Lookups check slot numbers and keys themselves, so
    /// a crafted table can hide blocks but not cross-wire them; counts are checked here.
    ///
    /// Returns false if the table and the slots disagree: then the arrays must not be used.
    pub fn adopt(&mut self, seed: u64) -> bool {
        self.t.seed.store(seed, Relaxed);
        self.len = 0;
        for slot in 0..self.slots() {
            if self.slot_mark(slot) {
                self.flag(slot, 0, MARK);
            }
            self.len += usize::from(self.t.word(slot) != 0);
        }
        let mut tagged = 0usize;
        for b in 0..self.t.buckets {
            tagged += WAYS - Table::matches(self.t.bucket(b), 0).count_ones() as usize;
        }
        tagged == self.len
    }

    /// Takes over what another index holds, of another number of slots. False: it holds something at slots that
    /// there are not, or dirty blocks that nobody finds in it; then this one must not be used. If slots were `lost`, what was clean
    /// there is left out.
    pub fn take_over(&mut self, other: &Index, lost: bool) -> bool {
        for slot in 0..other.slots() {
            let Some(info) = other.slot(slot) else {
                continue;
            };
            if other.get(info.key) != Some(slot) {
                if info.dirty {
                    return false;
                }
                continue;
            }
            if slot >= self.slots() {
                if info.dirty || !lost {
                    return false;
                }
                continue;
            }
            self.set(info.key, slot, other.crc(slot), info.dirty, info.freq);
            if info.lost || info.written {
                self.flag(slot, LOST, 0);
            }
        }
        true
    }

    /// Has the home bucket of `key` fetched into the processor's cache.
    #[inline]
    pub fn prefetch(&self, key: Key) {
        self.t.prefetch(key);
    }
}

/// Changes a word that others read and nobody else writes.
#[inline]
fn change(word: &AtomicU32, to: impl FnOnce(u32) -> u32) {
    word.store(to(word.load(Relaxed)), Relaxed);
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
        let mut copy = Index::new(n, 0);
        for section in [Section::Slots, Section::Checksums, Section::Table] {
            let len = index.section_len(section);
            // In pieces, as a checkpoint has them.
            for at in (0..len).step_by(4096) {
                let mut piece = vec![0xEE; 4096.min(len - at)];
                index.section(section, at, &mut piece);
                copy.set_section(section, at, &piece);
            }
        }
        assert!(copy.adopt(42));
        for s in 0..n {
            let key = Key::new(1 + (s % 3) as u16, u64::from(s));
            assert_eq!((copy.get(key), copy.crc(s)), (Some(s), s));
        }
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
            let t = &index.t;
            assert!(t.table.iter().enumerate().all(|(at, word)| {
                let in_bucket = at.wrapping_sub(t.table_base) % WORDS;
                in_bucket >= 4 || word.load(Relaxed) == 0
            }));
        }
    }

    #[test]
    fn a_damaged_table_that_names_the_slot_to_come_does_not_lose_it() {
        let mut index = Index::new(64, 9);
        let (there, new) = (Key::new(1, 5), Key::new(1, 77));
        index.set(there, 3, 0, false, 0);
        // As many tags as slots in use, but for the wrong one.
        let t = &index.t;
        let (b, way) = t.find(there).unwrap();
        change(&t.bucket(b)[way / 4], |tags| {
            tags & !(0xFF << (way % 4 * 8))
        });
        let hash = t.hash(new);
        let home = t.bucket(t.home(hash, new));
        change(&home[0], |tags| tags | u32::from(Table::tag(hash)));
        change(&home[4], |_| 9);
        assert!(index.adopt(9));
        assert_eq!(index.set(new, 9, 0xABCD, true, 0), None);
        assert_eq!(index.get(new), Some(9));
        assert!(index.slot(9).is_some_and(|s| s.dirty));
    }

    /// Buckets looked at until `key` is found.
    fn probes(index: &Index, key: Key) -> usize {
        let t = &index.t;
        let (place, _) = t.find(key).unwrap();
        let mut at = t.home(t.hash(key), key);
        let mut n = 1;
        while at != place {
            at = t.next(at);
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
        index.set_clean(3);
        index.set_mark(3, false);
        let info = index.slot(3).unwrap();
        assert_eq!((info.key, info.freq), (key, FREQ_MAX - 1));
        assert!(!info.dirty && !info.lost && !index.slot_mark(3));
        assert!(!info.written, "the origin was not given what is lost");
        assert_eq!(index.get(key), Some(3));
    }

    #[test]
    fn clean_slot_tells_written_from_read() {
        let mut index = Index::new(8, 1);
        let [read, written] = [0, 1].map(|block| Key::new(1, block));
        index.set(read, 2, 7, false, 0);
        index.set(written, 5, 8, true, 0);
        let is_written = |index: &Index, slot| index.slot(slot).is_some_and(|s| s.written);
        assert!(!is_written(&index, 2) && !is_written(&index, 5));
        index.set_clean(5);
        index.touch(5);
        assert!(!is_written(&index, 2) && is_written(&index, 5));
        let info = index.slot(5).unwrap();
        assert!(!info.dirty && !info.lost && info.freq == 1);
        assert!(!index.lookup().get(written).unwrap().lost);
        let mut larger = Index::new(16, 1);
        assert!(larger.take_over(&index, false));
        assert!(!is_written(&larger, 2) && is_written(&larger, 5));
        // What takes its place is judged anew.
        index.set(written, 6, 9, false, 0);
        assert!(!is_written(&index, 6));
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
            let lookup = index.lookup();
            for block in 0..400 {
                let key = Key::new(5, block);
                prop_assert_eq!(index.get(key), model.get(&block).copied());
                // At rest the lock makes no difference, but for what no lookup can be sure of.
                match lookup.get(key) {
                    Some(found) => {
                        prop_assert_eq!(Some(found.slot), index.get(key));
                        prop_assert_eq!(found.crc, block as u32);
                    }
                    None => if let Some(slot) = index.get(key) {
                        let (at, shift) = Table::at(slot);
                        prop_assert_eq!(index.t.meta[at].load(Relaxed) >> shift, 0);
                    }
                }
            }
        }
    }
}
