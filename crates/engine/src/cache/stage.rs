//! The RAM stage: what was read once waits here before it may wear out flash.
//!
//! Most blocks a guest reads are never read again soon. So once flash is full, a miss is kept in
//! RAM for a while; what is read again meanwhile is served from here, and only when a block's
//! time is over policy decides whether it is worth a flash write.
//!
//! One rule keeps it true: **what is here equals the origin**. A write, in whatever mode, takes
//! the blocks it covers out as it takes its range (`lock_or_wait` in `request/write.rs`), before the origin or
//! the index can change; a read of the origin that a write overtook lost its ticket and never
//! comes in; detaching, forgetting and turning a cache off empty it. Dirty blocks on flash were written, so they are not
//! here. Clean blocks that are on flash or queued for it do not come in. A crash loses the stage, which is safe.
//!
//! How large it is follows what it earns ([`Policy::stage`]): [`aim`](Stage::aim) says so, and the stage gets there as
//! blocks come in. The bound is exact: a queue of places, whose memory is taken and given back in chunks. Blocks
//! taken out early leave their place empty until its turn comes.

use crate::api::DiskId;
use hearth_io::{Buf, BufSlice};
use hearth_policy::{Policy, Stay, Use, spread};
use std::collections::VecDeque;

/// Bytes of a block.
pub(crate) const BYTES: usize = 4096;
/// Places whose memory is taken at once, 256 KiB.
const CHUNK: usize = 64;
/// Share of a stage that a single miss may take; longer ones are judged at once.
const RUN_SHARE: usize = 4;
/// Key of an empty place. No block has it: disks are below 2^15, blocks below 2^36.
const NOBODY: u64 = u64::MAX;
/// A chunk has memory while any of its places is in the queue.
const HAS_MEMORY: &str = "places in the queue have memory";
/// No place, in the table.
const FREE: u32 = u32::MAX;

/// One block.
#[derive(Clone, Copy, Debug)]
struct Held {
    key: u64,
    crc: u32,
    stay: Stay,
}

const EMPTY: Held = Held {
    key: NOBODY,
    crc: 0,
    stay: Stay {
        freq: 0,
        covered: false,
        unused: None,
        written: false,
    },
};

/// A piece of memory for places one after another.
#[derive(Default)]
struct Chunk {
    /// None if no place of it is in use.
    data: Option<Box<[u8]>>,
    /// Places of it in the queue.
    queued: usize,
}

/// A first-in first-out queue of clean blocks.
pub(crate) struct Stage {
    chunks: Vec<Chunk>,
    places: Vec<Held>,
    /// Places in the order in which they are needed next: empty ones, the oldest blocks, the newest.
    queue: VecDeque<u32>,
    /// Places that are not in the queue, of chunks that have memory; those given back first are in front.
    spare: VecDeque<u32>,
    /// Chunks without memory.
    bare: Vec<u32>,
    /// Place numbers by hash of their key, open addressing; a power of two, at most half full.
    table: Vec<u32>,
    seed: u64,
    /// Places it shall have, and may have at most.
    aim: usize,
    most: usize,
    live: usize,
    unused: usize,
}

impl Stage {
    /// A stage for so many blocks, and at most for so many; 0 turns it off.
    pub fn new(blocks: usize, most: usize, seed: u64) -> Stage {
        let most = most.max(blocks);
        let mut stage = Stage {
            chunks: Vec::new(),
            places: Vec::new(),
            queue: VecDeque::new(),
            spare: VecDeque::new(),
            bare: Vec::new(),
            table: vec![FREE; Self::table_len(most)],
            seed,
            aim: blocks,
            most,
            live: 0,
            unused: 0,
        };
        while stage.capacity() < blocks {
            stage.grow();
        }
        stage
    }

    fn table_len(blocks: usize) -> usize {
        (blocks * 2).next_power_of_two()
    }

    /// Bytes of RAM that a stage takes for so many blocks, if it may have `most`.
    pub fn footprint(blocks: usize, most: usize) -> u64 {
        let chunks = blocks.div_ceil(CHUNK) * CHUNK;
        (chunks * (BYTES + size_of::<Held>() + 4) + Self::table_len(most.max(blocks)) * 4) as u64
    }

    /// Bytes of RAM it takes now.
    pub fn footprint_now(&self) -> u64 {
        let chunks = self.chunks.len() - self.bare.len();
        let places = self.places.len() * (size_of::<Held>() + 4);
        (chunks * CHUNK * BYTES + places + self.table.len() * 4) as u64
    }

    /// Sets for how many blocks there shall be room. It is called for each block that comes in, and makes a chunk of
    /// room where no place is empty, so that nobody waits for half a GiB to be had; there is less room
    /// when what is too much has been [taken out](Self::take_oldest), while [`is_large`](Self::is_large) says so.
    pub fn aim(&mut self, blocks: usize) {
        self.aim = blocks.min(self.most);
        let next = self.queue.front().map(|place| *place as usize);
        if next.is_none_or(|place| self.places[place].key != NOBODY) {
            self.grow();
        }
    }

    /// Makes room for a chunk more, if that many shall be.
    fn grow(&mut self) {
        let now = self.aim.min(self.queue.len() + CHUNK);
        while self.queue.len() < now {
            let place = self
                .spare
                .pop_front()
                .unwrap_or_else(|| self.first_of_chunk());
            self.chunks[place as usize / CHUNK].queued += 1;
            self.queue.push_front(place);
        }
    }

    /// The first place of a chunk that gets memory; the others are spare.
    fn first_of_chunk(&mut self) -> u32 {
        let chunk = self.bare.pop().unwrap_or_else(|| {
            self.chunks.push(Chunk::default());
            self.places.resize(self.chunks.len() * CHUNK, EMPTY);
            self.chunks.len() as u32 - 1
        });
        self.chunks[chunk as usize].data = Some(vec![0; CHUNK * BYTES].into_boxed_slice());
        let first = chunk * CHUNK as u32;
        self.spare.extend(first + 1..first + CHUNK as u32);
        first
    }

    /// An empty place that is out of the queue is spare; a chunk all of whose places are has no memory any more.
    fn put_by(&mut self, place: u32) {
        self.spare.push_back(place);
        let at = place / CHUNK as u32;
        let chunk = &mut self.chunks[at as usize];
        chunk.queued -= 1;
        if chunk.queued == 0 {
            chunk.data = None;
            self.bare.push(at);
            self.spare.retain(|place| place / CHUNK as u32 != at);
        }
    }

    /// Has it more places than it shall have?
    pub fn is_large(&self) -> bool {
        self.queue.len() > self.aim
    }

    /// Gives back the place that is needed next, which [`take_oldest`](Self::take_oldest) has emptied.
    pub fn give_back(&mut self) {
        let Some(place) = self.queue.pop_front() else {
            return;
        };
        debug_assert_eq!(self.places[place as usize].key, NOBODY);
        self.put_by(place);
    }

    /// Blocks there is room for.
    pub fn capacity(&self) -> usize {
        self.queue.len()
    }

    /// Blocks there may be room for at most.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Takes misses of up to so many blocks.
    pub fn run_max(&self) -> u64 {
        (self.capacity() / RUN_SHARE) as u64
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Prefetched blocks nobody has used yet.
    pub fn unused(&self) -> usize {
        self.unused
    }

    fn data(&self, place: usize) -> &[u8] {
        let from = place % CHUNK * BYTES;
        let chunk = self.chunks[place / CHUNK].data.as_deref();
        &chunk.expect(HAS_MEMORY)[from..from + BYTES]
    }

    fn home(&self, key: u64) -> usize {
        spread(key ^ self.seed) as usize & (self.table.len() - 1)
    }

    /// Where in the table a key is.
    fn find(&self, key: u64) -> Option<usize> {
        if self.live == 0 {
            return None;
        }
        let mut at = self.home(key);
        loop {
            match self.table[at] {
                FREE => return None,
                place if self.places[place as usize].key == key => return Some(at),
                _ => at = (at + 1) & (self.table.len() - 1),
            }
        }
    }

    /// True if the block is in the RAM stage.
    pub fn contains(&self, key: u64) -> bool {
        self.find(key).is_some()
    }

    /// Copies a block out and counts the use, which it returns; `None` if it is not here.
    pub fn read(&mut self, key: u64, out: &mut BufSlice) -> Option<Use> {
        let at = self.table[self.find(key)?] as usize;
        out.bytes_mut().copy_from_slice(self.data(at));
        let stay = &mut self.places[at].stay;
        if let Some(source) = stay.unused.take() {
            self.unused -= 1;
            return Some(Use::Prefetched(source));
        }
        stay.freq = Policy::touch(stay.freq);
        stay.covered = false;
        Some(Use::Hit)
    }

    /// Empties a place; returns what was known of its block.
    fn remove(&mut self, at: usize) -> Stay {
        let mask = self.table.len() - 1;
        let place = self.table[at] as usize;
        let mut hole = at;
        let mut next = at;
        loop {
            next = (next + 1) & mask;
            let moving = self.table[next];
            if moving == FREE {
                break;
            }
            // Whatever would not be found across the hole moves into it.
            let home = self.home(self.places[moving as usize].key);
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.table[hole] = moving;
                hole = next;
            }
        }
        self.table[hole] = FREE;
        self.live -= 1;
        let held = &mut self.places[place];
        held.key = NOBODY;
        self.unused -= usize::from(held.stay.unused.is_some());
        held.stay
    }

    /// Takes out the block whose place is needed next; `None` if that place is empty.
    pub fn take_oldest(&mut self) -> Option<(u64, Stay)> {
        let key = self.places[*self.queue.front()? as usize].key;
        let at = self.find(key)?;
        Some((key, self.remove(at)))
    }

    /// What lies in the place that is needed next: just after [`take_oldest`](Self::take_oldest)
    /// the data of what that returned, and its checksum.
    pub fn oldest_data(&self) -> (&[u8], u32) {
        match self.queue.front() {
            None => (&[], 0),
            Some(place) => {
                let place = *place as usize;
                (self.data(place), self.places[place].crc)
            }
        }
    }

    /// Checksum and history of a staged block.
    pub fn get(&self, key: u64) -> Option<(u32, Stay)> {
        let held = &self.places[self.table[self.find(key)?] as usize];
        Some((held.crc, held.stay))
    }

    /// Keeps a copy of a block, with its checksum, in the oldest place, which [`take_oldest`](Self::take_oldest) has
    /// emptied.
    pub fn put(&mut self, key: u64, data: &[u8], crc: u32, stay: Stay) {
        if self.contains(key) {
            return;
        }
        let Some(oldest) = self.queue.pop_front() else {
            return;
        };
        let place = self.instead_of(oldest);
        self.queue.push_back(place);
        let place = place as usize;
        debug_assert_eq!(self.places[place].key, NOBODY);
        let from = place % CHUNK * BYTES;
        let chunk = self.chunks[place / CHUNK].data.as_deref_mut();
        chunk.expect(HAS_MEMORY)[from..from + BYTES].copy_from_slice(data);
        let mut at = self.home(key);
        while self.table[at] != FREE {
            at = (at + 1) & (self.table.len() - 1);
        }
        self.table[at] = place as u32;
        self.places[place] = Held { key, crc, stay };
        self.live += 1;
        self.unused += usize::from(stay.unused.is_some());
    }

    /// Where a block goes instead of the oldest place: into a chunk that was given back in part. So what shrinks while
    /// blocks come in empties one chunk after another instead of half of each.
    fn instead_of(&mut self, oldest: u32) -> u32 {
        let chunk = |place: u32| place as usize / CHUNK;
        match self.spare.front() {
            Some(&spare) if chunk(spare) != chunk(oldest) => {
                self.spare.pop_front();
                self.chunks[chunk(spare)].queued += 1;
                self.put_by(oldest);
                spare
            }
            _ => oldest,
        }
    }

    /// Forgets blocks `start..end` of a disk.
    pub fn forget(&mut self, disk: DiskId, start: u64, end: u64) {
        if self.live == 0 {
            return;
        }
        if end - start > self.live as u64 {
            for place in 0..self.places.len() {
                let key = self.places[place].key;
                let (of, block) = disk_and_block(key);
                if key != NOBODY
                    && of == disk
                    && (start..end).contains(&block)
                    && let Some(at) = self.find(key)
                {
                    self.remove(at);
                }
            }
        } else {
            for block in start..end {
                if let Some(at) = self.find(policy_key(disk, block)) {
                    self.remove(at);
                }
            }
        }
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stage({} of {} blocks)", self.live, self.capacity())
    }
}

/// A copy of one block's bytes.
pub(crate) fn one_block(bytes: &[u8]) -> BufSlice {
    let mut copy = Buf::zeroed(BYTES).slice(0, BYTES);
    copy.bytes_mut().copy_from_slice(bytes);
    copy
}

const BLOCK_BITS: u32 = 36;

/// A block as policy knows it: disk and block in one number.
#[inline]
pub(crate) fn policy_key(disk: DiskId, block: u64) -> u64 {
    u64::from(disk) << BLOCK_BITS | block
}

/// The reverse.
#[inline]
pub(crate) fn disk_and_block(key: u64) -> (DiskId, u64) {
    ((key >> BLOCK_BITS) as DiskId, key & ((1 << BLOCK_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_policy::prefetch::Source;
    use proptest::prelude::*;

    const STAY: Stay = Stay {
        freq: 0,
        covered: false,
        unused: None,
        written: false,
    };

    fn block(byte: u8) -> BufSlice {
        let mut b = Buf::zeroed(BYTES).all();
        b.bytes_mut().fill(byte);
        b
    }

    /// Number of the oldest block.
    fn oldest_of(s: &Stage) -> u64 {
        disk_and_block(s.places[s.queue[0] as usize].key).1
    }

    #[test]
    fn what_is_forgotten_keeps_its_place_but_is_not_served() {
        let mut s = Stage::new(2, 2, 5);
        let mut out = block(0);
        s.put(policy_key(1, 10), block(1).bytes(), 11, STAY);
        s.put(policy_key(1, 11), block(2).bytes(), 12, STAY);
        assert_eq!(s.read(policy_key(1, 10), &mut out), Some(Use::Hit));
        assert_eq!(
            (
                out.bytes()[7],
                s.get(policy_key(1, 10))
                    .map(|(crc, stay)| (crc, stay.written))
            ),
            (1, Some((11, false)))
        );
        s.forget(1, 10, 11);
        assert_eq!(s.read(policy_key(1, 10), &mut out), None);
        assert!(s.take_oldest().is_none(), "its place is empty");
        s.put(policy_key(1, 10), block(3).bytes(), 13, STAY);
        let (key, stay) = s.take_oldest().unwrap();
        assert_eq!((disk_and_block(key), stay.freq), ((1, 11), 0));
        let (data, crc) = s.oldest_data();
        assert_eq!((data[9], crc), (2, 12));
        s.forget(1, 0, u64::MAX);
        assert_eq!(s.len(), 0);
    }

    #[test]
    fn a_prefetched_block_is_unused_until_its_first_use() {
        let mut s = Stage::new(4, 4, 5);
        let ahead = Stay {
            covered: true,
            unused: Some(Source::Stream),
            ..STAY
        };
        let key = policy_key(3, 1);
        s.put(key, block(1).bytes(), 11, ahead);
        assert_eq!(s.unused(), 1);
        let mut out = block(0);
        let first = s.read(key, &mut out);
        assert_eq!(first, Some(Use::Prefetched(Source::Stream)));
        assert_eq!(s.unused(), 0);
        assert_eq!(s.read(key, &mut out), Some(Use::Hit));
        s.forget(3, 0, 2);
        assert_eq!((s.len(), s.unused()), (0, 0));
    }

    #[test]
    fn memory_is_taken_when_it_grows_and_given_back_when_it_shrinks() {
        let mut s = Stage::new(CHUNK, 8 * CHUNK, 5);
        let least = s.footprint_now();
        assert_eq!(least, Stage::footprint(CHUNK, 8 * CHUNK));
        let full = |s: &mut Stage, from: u64| {
            for n in from..from + s.capacity() as u64 {
                s.take_oldest();
                s.put(policy_key(1, n), block(n as u8).bytes(), n as u32, STAY);
            }
            assert_eq!(s.len(), s.capacity());
        };
        full(&mut s, 0);
        s.aim(100 * CHUNK);
        assert_eq!(
            (s.capacity(), s.len()),
            (2 * CHUNK, CHUNK),
            "a chunk at once"
        );
        s.aim(100 * CHUNK);
        assert_eq!(s.capacity(), 2 * CHUNK, "empty places come first");
        for n in 500..500 + 7 * CHUNK as u64 {
            s.aim(100 * CHUNK);
            s.take_oldest();
            s.put(policy_key(1, n), block(n as u8).bytes(), n as u32, STAY);
        }
        assert_eq!((s.capacity(), s.len()), (8 * CHUNK, 8 * CHUNK), "at most");
        assert_eq!(s.footprint_now(), Stage::footprint(8 * CHUNK, 8 * CHUNK));
        full(&mut s, 1000);
        s.aim(CHUNK);
        let mut next = 1000;
        while s.is_large() {
            // Oldest first, and their data is there until their place is given back.
            let (key, _) = s.take_oldest().unwrap();
            assert_eq!(disk_and_block(key).1, next);
            assert_eq!(s.oldest_data(), (block(next as u8).bytes(), next as u32));
            s.give_back();
            next += 1;
        }
        assert_eq!((s.capacity(), s.len()), (CHUNK, CHUNK));
        let places = 7 * CHUNK * (size_of::<Held>() + 4);
        assert_eq!(s.footprint_now(), least + places as u64);
        let mut out = block(0);
        for n in next..1000 + 8 * CHUNK as u64 {
            assert_eq!(s.read(policy_key(1, n), &mut out), Some(Use::Hit));
            assert_eq!(out.bytes()[77], n as u8);
        }
        full(&mut s, 5000);
        s.aim(0);
        while s.is_large() {
            s.take_oldest();
            s.give_back();
        }
        assert_eq!((s.capacity(), s.len()), (0, 0));
        s.put(policy_key(1, 1), block(1).bytes(), 1, STAY);
        assert_eq!(s.len(), 0, "there is no place");
    }

    #[test]
    fn what_shrinks_while_blocks_come_in_gives_its_memory_back() {
        let most = 64 * CHUNK;
        let mut s = Stage::new(CHUNK, most, 5);
        let mut next = 0;
        let mut put = |s: &mut Stage, aim: usize, count: usize| {
            for _ in 0..count {
                s.aim(aim);
                s.take_oldest();
                if s.is_large() {
                    s.give_back();
                    s.take_oldest();
                }
                s.put(
                    policy_key(1, next),
                    block(next as u8).bytes(),
                    next as u32,
                    STAY,
                );
                next += 1;
            }
        };
        let memory = |s: &Stage| s.chunks.iter().filter(|c| c.data.is_some()).count() * CHUNK;
        put(&mut s, most, 2 * most);
        assert_eq!((s.len(), memory(&s)), (most, most));
        for aim in [most / 2, CHUNK, most, CHUNK * 3 / 2, most * 3 / 4, 1] {
            for _ in 0..most / 16 {
                put(&mut s, aim, 16);
                let all = memory(&s);
                assert!(
                    all <= s.capacity() + 3 * CHUNK,
                    "{all} for {}",
                    s.capacity()
                );
            }
            put(&mut s, aim, most);
            assert_eq!((s.capacity(), s.len()), (aim, aim));
            let mut out = block(0);
            for n in oldest_of(&s)..oldest_of(&s) + aim as u64 {
                assert_eq!(s.read(policy_key(1, n), &mut out), Some(Use::Hit));
                assert_eq!(out.bytes()[77], n as u8);
            }
        }
    }

    proptest! {
        /// The stage behaves as a bounded queue of a map, whose bound changes.
        #[test]
        fn matches_a_model(ops in proptest::collection::vec((0u8..5, 0u64..40), 1..400)) {
            let mut s = Stage::new(16, 2 * CHUNK, 9);
            let mut model: VecDeque<Option<(u64, u8)>> = vec![None; 16].into();
            let mut aim = 16;
            for (n, (op, b)) in ops.into_iter().enumerate() {
                let key = policy_key(2, b);
                if op == 4 {
                    aim = b as usize * 3;
                    s.aim(aim);
                    let now = aim.min(model.len() + CHUNK);
                    let empty = matches!(model.front(), Some(None));
                    while !empty && model.len() < now {
                        model.push_front(None);
                    }
                } else if op < 3 {
                    while s.is_large() {
                        let oldest = s.take_oldest().map(|(k, _)| (k, s.oldest_data().0[0]));
                        prop_assert_eq!(oldest, model.pop_front().unwrap());
                        s.give_back();
                    }
                    prop_assert!(model.len() <= aim);
                    let oldest = s.take_oldest().map(|(k, _)| (k, s.oldest_data().0[0]));
                    if let Some(front) = model.front_mut() {
                        prop_assert_eq!(oldest, front.take());
                    }
                    if !s.contains(key) {
                        s.put(key, block(n as u8).bytes(), n as u32, STAY);
                        if model.pop_front().is_some() {
                            model.push_back(Some((key, n as u8)));
                        }
                    }
                } else {
                    s.forget(2, b, b + 3);
                    for m in &mut model {
                        if m.is_some_and(|(k, _)| (key..key + 3).contains(&k)) {
                            *m = None;
                        }
                    }
                }
                prop_assert_eq!(s.capacity(), model.len());
                prop_assert_eq!(s.len(), model.iter().flatten().count());
                let mut out = block(0);
                for b in 0..44 {
                    let key = policy_key(2, b);
                    let want = model.iter().flatten().find(|(k, _)| *k == key).map(|m| m.1);
                    let got = s.read(key, &mut out).map(|_| out.bytes()[0]);
                    prop_assert_eq!(got, want);
                }
            }
        }
    }
}
