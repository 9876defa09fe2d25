//! The log's bookkeeping: segments, the append queue, batches in flight.
//!
//! Everything that must reach flash is an [`Item`] in one first-in first-out queue. Batches
//! take items from its front, are written to the head segment, and are *applied* to the index
//! strictly in order, whatever order the device finishes them in: a batch counts only when all
//! before it are on flash, because recovery stops at the first hole. An item's `ord` is its
//! place in that order, so "durable up to ord n" says all there is to say about durability.

use crate::blocks::runset::RunSet;
use crate::flash::device::Token;
use hearth_format::{BATCH_ENTRIES_MAX, BatchMark, Entry, Kind};
use hearth_io::BufSlice;
use hearth_policy::cleaning::{HEADS_MAX, Heads, Why};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Batches in flight at once while what is queued would not fill one. Two keep the device busy while the next
/// one gathers; more would only make batches smaller.
pub(crate) const BATCHES_IN_FLIGHT: usize = 2;
/// Batches in flight at once in any case: what is queued behind two of them fills the next, so waiting
/// would leave the device idle and gather nothing.
pub(crate) const FULL_BATCHES_IN_FLIGHT: usize = 6;
/// While another batch is in flight, wait for this many blocks before sending one.
pub(crate) const BATCH_MIN_BLOCKS: u32 = 16;
/// What nobody waits for (fills, notes) is sent when this many blocks have gathered ...
pub(crate) const LAZY_BATCH_BLOCKS: u32 = 96;
/// ... or when the first of it has waited this long. Sent one by one, fills would double the
/// flash written (a descriptor block each) and stand in the way of the reads that caused them.
pub(crate) const LAZY_NS: u64 = 100_000_000;
/// The head beside the first that is written in turn with it where there are several devices. What the engine keeps apart
/// ([`Heads::MovesApart`]) takes the others.
pub(crate) const STRIPED_HEAD: usize = HEADS_MAX - 1;
/// Segments only internal records, reinsertions and the head may use, so that eviction, which
/// must append before it can free, always has room.
pub(crate) const RESERVE_SEGMENTS: usize = 2;
/// The same in a large pool.
const RESERVE_SEGMENTS_MAX: usize = 8;

/// Items of the queue that are looked at for one batch.
const PASSED_MAX: usize = 2 * BATCH_ENTRIES_MAX;

/// A block's place in the log: which of all blocks of all segments.
pub(crate) type Slot = u32;

/// A slot from which a block is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone {
    pub disk: u16,
    pub block: u64,
    pub slot: Slot,
    pub dirty: bool,
}

/// One thing to append: a run of consecutive blocks of one disk, with or without data.
#[derive(Debug)]
pub(crate) struct Item<T> {
    pub kind: Kind,
    pub disk: u16,
    pub block: u64,
    pub count: u32,
    pub data: Option<BufSlice>,
    pub crcs: SmallVec<[u32; 4]>,
    /// What its data is appended for.
    pub why: Why,
    /// Given back when it is on flash.
    pub token: T,
    /// Blocks of the same run that were cut off before it.
    pub before: u32,
    /// Nothing of the run comes after it.
    pub ends: bool,
    pub ord: u64,
    /// The first slot, once placed in a batch.
    pub slot: Slot,
}

impl<T: Token> Item<T> {
    /// Blocks with data.
    pub fn data(
        kind: Kind,
        disk: u16,
        block: u64,
        data: BufSlice,
        crcs: SmallVec<[u32; 4]>,
        why: Why,
        token: T,
    ) -> Item<T> {
        Item {
            why,
            count: (data.len() / 4096) as u32,
            data: Some(data),
            crcs,
            ..Item::record(kind, disk, block, 0, token)
        }
    }

    /// What is to be said about a run of blocks.
    fn record(kind: Kind, disk: u16, block: u64, count: u32, token: T) -> Item<T> {
        Item {
            kind,
            disk,
            block,
            count,
            data: None,
            crcs: SmallVec::new(),
            why: Why::Filled,
            token,
            before: 0,
            ends: true,
            ord: 0,
            slot: 0,
        }
    }

    /// Nobody waits for it.
    fn lazy(&self) -> bool {
        !self.token.is_awaited()
    }

    /// Entries (and, for data, blocks) it takes in a batch.
    fn entries(&self) -> u32 {
        if self.kind.is_data() { self.count } else { 1 }
    }

    /// Cuts off the first `n` blocks of a data item; the rest ends the run.
    fn split(&mut self, n: u32) -> Item<T> {
        let bytes = n as usize * 4096;
        let data = self
            .data
            .as_ref()
            .map(|d| (d.sub(0, bytes), d.sub(bytes, d.len() - bytes)));
        let (head, rest) = match data {
            Some((h, r)) => (Some(h), Some(r)),
            None => (None, None),
        };
        let part = Item {
            kind: self.kind,
            disk: self.disk,
            block: self.block,
            count: n,
            data: head,
            crcs: self.crcs.drain(..n as usize).collect(),
            why: self.why,
            token: self.token,
            before: self.before,
            ends: false,
            ord: self.ord,
            slot: 0,
        };
        self.data = rest;
        self.block += u64::from(n);
        self.count -= n;
        self.before += n;
        part
    }
}

/// What a segment is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegState {
    /// May be written.
    Free,
    /// Empty, and free once the log is durable up to this ord and the map says so.
    Freeing { ord: u64 },
    /// Being discarded.
    Trimming,
    /// The head.
    Open,
    /// Holds data.
    Closed,
    /// Refused writes; not used again in this run.
    Bad,
}

/// One segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub state: SegState,
    pub seq: u64,
    /// Slots the index points at.
    pub live: u32,
    /// Of these, dirty.
    pub dirty: u32,
    /// Of those that are not, the ones that are in the second half alone.
    pub second: u32,
    /// Operations that read it or still write its summary: it may not be reused.
    pub pins: u32,
    /// Versions in it that the origins of ordered disks are still to get: it may not be reused.
    pub held: u32,
    /// Batches in flight in it.
    pub batches: u32,
    /// Its first batch, and, once it is closed, its last one.
    pub first_batch: u64,
    pub last_batch: u64,
    /// Which eviction of all it is that empties it; 0 for none.
    pub eviction: u64,
    /// Notes that its blocks are clean may go once the log is durable up to this ord and the map says it.
    pub clean_from: Option<u64>,
}

impl Segment {
    /// Is nothing dirty in it, and never will be again?
    pub fn is_all_clean(&self) -> bool {
        self.state == SegState::Closed && self.dirty == 0 && self.held == 0
    }
}

/// Runs of zeros that segments say: disk, first block, and the first behind it. As long as the segment is
/// there, they come back in a crash, unless something later says otherwise.
#[derive(Debug, Default)]
pub(crate) struct ZeroRecords(BTreeMap<u32, Vec<(u16, u64, u64)>>);

impl ZeroRecords {
    /// A segment says that these are zeros.
    pub fn add(&mut self, seg: u32, disk: u16, start: u64, end: u64) {
        let runs = self.0.entry(seg).or_default();
        match runs.last_mut() {
            Some((d, _, to)) if *d == disk && *to == start => *to = end,
            _ => runs.push((disk, start, end)),
        }
    }

    /// The segment is gone.
    pub fn forget(&mut self, seg: u32) {
        self.0.remove(&seg);
    }

    /// What a segment says.
    pub fn of(&self, seg: u32) -> &[(u16, u64, u64)] {
        self.0.get(&seg).map_or(&[], Vec::as_slice)
    }

    /// What other segments say of a range, in order, each block once.
    pub fn of_others(&self, seg: u32, disk: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        let others = self.0.iter().filter(|(of, _)| **of != seg);
        let runs = others.flat_map(|(_, runs)| runs);
        let mut meeting: Vec<(u64, u64)> = runs
            .filter(|(d, from, to)| *d == disk && *from < end && start < *to)
            .map(|(_, from, to)| (start.max(*from), end.min(*to)))
            .collect();
        meeting.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(meeting.len());
        for (from, to) in meeting {
            match merged.last_mut() {
                Some((_, last)) if from <= *last => *last = to.max(*last),
                _ => merged.push((from, to)),
            }
        }
        merged
    }

    /// All of them, for a checkpoint.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u16, u64, u64)> {
        let all = self.0.iter();
        all.flat_map(|(seg, runs)| {
            runs.iter()
                .map(|(disk, from, to)| (*seg, *disk, *from, *to))
        })
    }
}

/// The segment being written.
#[derive(Debug)]
pub(crate) struct Head {
    pub seg: u32,
    pub seq: u64,
    /// Next free block within it.
    pub next: u32,
    pub entries: Vec<Entry>,
    /// Whose they are.
    pub marks: Vec<BatchMark>,
    pub first_batch: u64,
}

impl Head {
    /// The last batch it took.
    pub fn last_batch(&self) -> u64 {
        self.marks.last().map_or(0, |m| m.seq)
    }

    /// Entries that it can still take, of `capacity`: each batch takes the room of one, too.
    pub fn entries_left(&self, capacity: usize) -> usize {
        capacity.saturating_sub(self.entries.len() + self.marks.len() + 1)
    }
}

/// A closed segment whose summary waits for its last batches.
#[derive(Debug)]
pub(crate) struct Sealing {
    pub seg: u32,
    pub seq: u64,
    pub entries: Vec<Entry>,
    pub marks: Vec<BatchMark>,
    pub first_batch: u64,
    pub last_batch: u64,
}

/// How a batch in flight stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchState {
    InFlight,
    Written,
    Failed,
}

/// A batch on its way to flash.
#[derive(Debug)]
pub(crate) struct Batch<T> {
    pub seq: u64,
    pub seg: u32,
    pub items: Vec<Item<T>>,
    /// Its length on flash.
    pub bytes: u64,
    pub state: BatchState,
    pub last_ord: u64,
    /// How often it was written once more to where it had failed.
    pub again: u32,
}

/// The log's state.
#[derive(Debug)]
pub(crate) struct Log<T> {
    pub segments: Vec<Segment>,
    /// So many of them are bad.
    pub bad: usize,
    /// So many of them hold what is served, and say what nobody can read: they are not freed in this run.
    pub unreadable: usize,
    /// Segments with data, oldest first, the head not included.
    pub order: VecDeque<u32>,
    pub free: VecDeque<u32>,
    /// Free ones on a slow device, which are not written as long as there are others.
    pub parked: VecDeque<u32>,
    /// Closed ones there, which are not freed as long as there are others.
    pub aside: BTreeSet<u32>,
    /// Segments on their way to being free (`Freeing` or `Trimming`): few, so that nothing in
    /// the data path looks at all segments.
    pub freeing: Vec<u32>,
    pub heads: [Option<Head>; HEADS_MAX],
    /// What failed is sent again: the next batch says so.
    pub again: bool,
    /// The batch that said so last: nothing follows it before it is durable.
    pub again_seq: u64,
    /// Closed segments whose summary was sent before their last batch was durable, and whose batches they are.
    pub sealed: Vec<(u32, Vec<BatchMark>)>,
    /// So many of them are used.
    pub heads_used: usize,
    /// The one that took the last batch.
    pub last_head: usize,
    /// The last one of those that take in turn what is not moved.
    pub last_main: usize,
    pub sealing: Vec<Sealing>,
    pub queue: VecDeque<Item<T>>,
    /// Data blocks in the queue.
    pub queued_blocks: u32,
    /// Items without data in the queue.
    pub queued_records: u32,
    /// Items in the queue that somebody waits for.
    pub eager: usize,
    /// When the queue was first seen to hold only what nobody waits for.
    pub lazy_since_ns: Option<u64>,
    pub batches: VecDeque<Batch<T>>,
    pub next_batch_seq: u64,
    pub next_segment_seq: u64,
    pub next_ord: u64,
    pub applied_ord: u64,
    pub applied_seq: u64,
    pub durable_ord: u64,
    pub durable_seq: u64,
    pub epoch: u64,
    /// Somebody needs the queue written out now, however small.
    pub urgent: bool,
    /// Failed batches in a row; see [`fail`](crate::flash::fail).
    pub failures: u32,
    /// Slots of a segment.
    pub segment_slots: u32,
    /// Blocks of a segment, or of each of its halves, that batches take.
    pub data_blocks: u32,
    /// Where clean blocks lie in one half: slots of the first half, behind which those of the second are. Else 0.
    pub half: u32,
    /// With a device lost, something clean takes as much room as what is dirty.
    pub tight: bool,
    pub summary_capacity: usize,
    /// What segments say of zeros.
    pub zeros: ZeroRecords,
}

impl<T> Default for Log<T> {
    fn default() -> Self {
        Log {
            segments: Vec::new(),
            bad: 0,
            unreadable: 0,
            order: VecDeque::new(),
            free: VecDeque::new(),
            parked: VecDeque::new(),
            aside: BTreeSet::new(),
            freeing: Vec::new(),
            heads: [const { None }; HEADS_MAX],
            again: false,
            again_seq: 0,
            sealed: Vec::new(),
            heads_used: Heads::One.count(),
            last_head: 0,
            last_main: 0,
            sealing: Vec::new(),
            queue: VecDeque::new(),
            queued_blocks: 0,
            queued_records: 0,
            eager: 0,
            lazy_since_ns: None,
            batches: VecDeque::new(),
            next_batch_seq: 0,
            next_segment_seq: 0,
            next_ord: 0,
            applied_ord: 0,
            applied_seq: 0,
            durable_ord: 0,
            durable_seq: 0,
            epoch: 0,
            urgent: false,
            failures: 0,
            segment_slots: 0,
            data_blocks: 0,
            half: 0,
            tight: false,
            summary_capacity: 0,
            zeros: ZeroRecords::default(),
        }
    }
}

impl<T: Token> Log<T> {
    /// Appends an item; returns its ord.
    pub fn push(&mut self, mut item: Item<T>) -> u64 {
        self.next_ord += 1;
        item.ord = self.next_ord;
        if item.kind.is_data() {
            self.queued_blocks += item.count;
        } else {
            self.queued_records += 1;
        }
        self.eager += usize::from(!item.lazy());
        self.queue.push_back(item);
        self.next_ord
    }

    /// Appends a record about a run of blocks; returns its ord.
    pub fn record(&mut self, kind: Kind, disk: u16, block: u64, count: u64, token: T) -> u64 {
        let mut at = block;
        let mut left = count;
        // A record counts blocks in 32 bits.
        while left > u64::from(u32::MAX) {
            let mut part = Item::record(kind, disk, at, u32::MAX, token);
            part.ends = false;
            self.push(part);
            at += u64::from(u32::MAX);
            left -= u64::from(u32::MAX);
        }
        self.push(Item::record(kind, disk, at, left as u32, token))
    }

    /// Puts items that were on their way back into the queue, in their order.
    pub fn requeue(&mut self, items: Vec<Item<T>>) {
        self.queue.extend(items);
        // What passed others goes back behind them.
        self.queue.make_contiguous().sort_by_key(|i| i.ord);
        let data = self.queue.iter().filter(|i| i.kind.is_data());
        self.queued_blocks = data.map(|i| i.count).sum();
        self.queued_records = self.queue.iter().filter(|i| !i.kind.is_data()).count() as u32;
        self.eager = self.queue.iter().filter(|i| !i.lazy()).count();
    }

    /// Forgets what is queued.
    pub fn clear_queue(&mut self) {
        self.queue.clear();
        self.queued_blocks = 0;
        self.queued_records = 0;
        self.eager = 0;
    }

    /// True while what is queued is better gathered than sent: nobody waits for it.
    pub fn may_gather(&mut self, now: u64) -> bool {
        if self.urgent || self.eager > 0 || self.queued_blocks >= LAZY_BATCH_BLOCKS {
            self.lazy_since_ns = None;
            return false;
        }
        let since = *self.lazy_since_ns.get_or_insert(now);
        if now.saturating_sub(since) < LAZY_NS && self.queue.len() < BATCH_ENTRIES_MAX {
            return true;
        }
        self.lazy_since_ns = None;
        false
    }

    /// The last batch, of those up to `through`, of a segment that has no summary yet.
    pub fn last_batch_of(&self, seg: u32, through: u64) -> u64 {
        let heads = self.open_heads().map(|h| (h.seg, &h.marks));
        let sealed = self.sealed.iter().map(|(seg, marks)| (*seg, marks));
        let sealing = self.sealing.iter().map(|s| (s.seg, &s.marks));
        let mut open = heads.chain(sealing).chain(sealed);
        let marks = open.find(|(of, _)| *of == seg).map(|(_, marks)| marks);
        let s = &self.segments[seg as usize];
        let last = marks.and_then(|marks| last_through(marks, through));
        last.unwrap_or_else(|| s.last_batch.min(through).max(s.first_batch))
    }

    /// The segments being written.
    pub fn open_heads(&self) -> impl Iterator<Item = &Head> {
        self.heads.iter().flatten()
    }

    /// A segment is closed: it takes its place among the others.
    pub fn enlist(&mut self, seg: u32) {
        let seq = |seg: u32| self.segments[seg as usize].seq;
        let at = self.order.iter().rposition(|s| seq(*s) < seq(seg));
        self.order.insert(at.map_or(0, |at| at + 1), seg);
    }

    /// Is no segment being written?
    pub fn is_headless(&self) -> bool {
        self.heads.iter().all(Option::is_none)
    }

    /// Is the summary of a segment on its way?
    pub fn is_sealing(&self, seg: u32) -> bool {
        self.sealing.iter().any(|s| s.seg == seg)
    }

    /// Segments the log goes round with: those that take writes, now or once they are free.
    pub fn usable(&self) -> usize {
        self.segments.len() - self.bad - self.unreadable
    }

    /// A segment that refused a batch and holds nothing is not used again.
    pub fn set_bad(&mut self, seg: u32) {
        self.segments[seg as usize].state = SegState::Bad;
        self.bad += 1;
    }

    /// Segments kept for eviction and other internal records: more in a larger pool, where more
    /// of them may be under way at once.
    pub fn reserve(&self) -> usize {
        (self.usable() / 200).clamp(RESERVE_SEGMENTS, RESERVE_SEGMENTS_MAX)
    }

    /// Free segments to keep ready: some more than the reserve, or nobody could write, and so few that
    /// beside them and the head there is a segment for what is kept.
    pub fn free_wanted(&self) -> usize {
        // Where segments are few, the one ahead of the others may be all that many small writes have.
        let ahead = match self.usable() {
            ..64 => 2,
            usable => (usable / 256).clamp(1, 16),
        };
        let wanted = (self.reserve() + ahead).min(self.usable().saturating_sub(2));
        wanted.max(self.reserve() + 1)
    }

    /// Blocks that can be kept, holes included: in all segments but those to keep free, and the head.
    pub fn blocks_kept(&self) -> u64 {
        let unused = self.free_wanted() + 1 + self.parked.len();
        let segments = self.usable().saturating_sub(unused).max(1);
        segments as u64 * self.segment_room()
    }

    /// Blocks for which there is room in a segment, as the cleaner counts them: what is in both halves is two.
    pub fn segment_room(&self) -> u64 {
        u64::from(self.data_blocks) * self.copies_of_dirty()
    }

    /// How many blocks something dirty is.
    pub fn copies_of_dirty(&self) -> u64 {
        if self.half > 0 && !self.tight { 2 } else { 1 }
    }

    /// Behind the last slot of a segment that may hold data, counted from its first.
    pub fn slots_end(&self) -> u32 {
        self.half + self.data_blocks
    }

    /// May a slot of a segment, counted from its first, hold data?
    pub fn is_for_data(&self, slot: u32) -> bool {
        is_for_data(self.half, self.data_blocks, slot)
    }

    /// Blocks (or records: a segment holds about as many of either) clients may still add,
    /// keeping the reserve.
    pub fn room(&self) -> u32 {
        let reserve = self.reserve();
        if self.free.len() < reserve {
            // The head itself is taken from the reserve.
            return 0;
        }
        let whole = self.data_blocks.min(self.summary_capacity as u32) * 9 / 10;
        let free = (self.free.len() - reserve) as u32 * whole;
        let head = |h: &Head| {
            let blocks = self.data_blocks - h.next;
            let entries = h.entries_left(self.summary_capacity) as u32;
            blocks.min(entries) * 8 / 10
        };
        let heads: u32 = self.open_heads().map(head).sum();
        (free + heads).saturating_sub(self.queued_blocks + self.queued_records)
    }

    /// The segment a slot lies in.
    pub fn segment_of(&self, slot: Slot) -> usize {
        (slot / self.segment_slots) as usize
    }

    /// True if a slot is in the second half of its segment.
    pub fn is_second(&self, slot: Slot) -> bool {
        self.half > 0 && slot % self.segment_slots >= self.half
    }

    /// True if nothing waits or is in flight.
    pub fn quiet(&self) -> bool {
        self.queue.is_empty() && self.batches.is_empty() && self.sealing.is_empty()
    }

    /// Blocks about which something is queued or in flight, by disk.
    pub fn on_their_way(&self) -> BTreeMap<u16, RunSet> {
        let mut all: BTreeMap<u16, RunSet> = BTreeMap::new();
        let items = self.batches.iter().flat_map(|b| &b.items);
        for item in items.chain(&self.queue) {
            if !matches!(item.kind, Kind::Intent | Kind::IntentClear | Kind::Through) {
                let end = item.block + u64::from(item.count);
                all.entry(item.disk)
                    .or_default()
                    .insert_range(item.block, end);
            }
        }
        all
    }

    /// The head that what is first in the queue goes to. A record goes with the data behind it, wherever that goes.
    pub fn next_head(&self, head_of: impl Fn(Why) -> usize) -> usize {
        if self.heads_used == 1 {
            return 0;
        }
        let data = self.queue.iter().find(|i| i.kind.is_data());
        data.map_or(self.last_head, |i| head_of(i.why))
    }

    /// Takes from the queue what fits into a head's segment as one batch, as far as it is to go there. `None`: the head is
    /// full (or absent) and must be rolled first.
    ///
    /// Data of other heads may be passed over, for what is of different blocks may come in any order; but not by what
    /// speaks of more than its blocks.
    ///
    /// `there`: which of the two halves of the head's segment are.
    pub fn take_batch(
        &mut self,
        at: usize,
        there: [bool; 2],
        head_of: impl Fn(Why) -> usize,
    ) -> Option<Vec<Item<T>>> {
        let head = self.heads[at].as_ref()?;
        let mut room_entries =
            BATCH_ENTRIES_MAX.min(head.entries_left(self.summary_capacity)) as u32;
        // A descriptor block must fit even for a batch of records.
        if head.next >= self.data_blocks || room_entries == 0 {
            return None;
        }
        let mut items = Vec::new();
        let base = head.seg * self.segment_slots;
        let mut places = Places {
            half: self.half,
            end: self.data_blocks,
            next: [head.next + 1; 2],
            there,
        };
        let mut i = 0;
        let mut looked = 0;
        while looked < PASSED_MAX
            && let Some(front) = self.queue.get_mut(i)
        {
            looked += 1;
            let want = front.entries();
            let (data, dirty) = (front.kind.is_data(), front.kind == Kind::Dirty);
            let elsewhere = data && head_of(front.why) != at;
            let (disk, start, end) = (
                front.disk,
                front.block,
                front.block + u64::from(front.count),
            );
            let meets = |p: &Item<T>| {
                p.disk == disk && p.block < end && start < p.block + u64::from(p.count)
            };
            if elsewhere {
                i += 1;
                continue;
            }
            if i > 0
                && (matches!(front.kind, Kind::Intent | Kind::IntentClear | Kind::Through)
                    || self.queue.range(..i).any(meets))
            {
                break;
            }
            let most = want.min(room_entries);
            let (fits, slot) = match data {
                true => places.next(dirty, most),
                false => (most, 0),
            };
            if fits == 0 {
                break;
            }
            let mut item = if fits < want {
                self.queue[i].split(fits)
            } else {
                match self.queue.remove(i) {
                    Some(item) => {
                        self.eager -= usize::from(!item.lazy());
                        item
                    }
                    None => break,
                }
            };
            room_entries -= fits;
            if data {
                item.slot = base + slot;
                places.take(dirty, slot, fits);
                self.queued_blocks -= fits;
            } else {
                self.queued_records -= 1;
            }
            items.push(item);
        }
        if items.is_empty() { None } else { Some(items) }
    }
}

/// The same of a segment that takes so many blocks, or each of whose halves does.
pub(crate) fn is_for_data(half: u32, data_blocks: u32, slot: u32) -> bool {
    match half {
        0 => slot < data_blocks,
        half => slot / half < 2 && slot % half < data_blocks,
    }
}

/// Where the data of a batch goes: what is clean to one half, to that which is behind, and so that both are even; what is dirty
/// to the same place in both (docs/decisions/0029-clean-once.md). Without halves one block goes behind the other.
struct Places {
    half: u32,
    /// Behind the last block of a half.
    end: u32,
    /// The next block of each.
    next: [u32; 2],
    there: [bool; 2],
}

impl Places {
    /// How many of the first `want` blocks of a run go to one place, and to which slot of the segment.
    fn next(&self, dirty: bool, want: u32) -> (u32, u32) {
        let [one, other] = self.next;
        let row = one.max(other);
        if self.half == 0 || dirty {
            return (want.min(self.end.saturating_sub(row)), row);
        }
        let side = match self.there {
            [true, false] => 0,
            [false, true] => 1,
            _ => usize::from(one > other),
        };
        let (row, ahead) = (self.next[side], self.next[1 - side]);
        let even = match self.there {
            [true, true] => {
                let behind = ahead - row;
                want.min(behind + want.saturating_sub(behind).div_ceil(2))
            }
            _ => want,
        };
        let fits = even.min(self.end.saturating_sub(row));
        (fits, side as u32 * self.half + row)
    }

    /// So many blocks go there.
    fn take(&mut self, dirty: bool, slot: u32, count: u32) {
        match self.half {
            half if half > 0 && !dirty => self.next[(slot / half) as usize & 1] += count,
            _ => self.next = [slot + count; 2],
        }
    }
}

/// The last of these batches up to a number.
pub(crate) fn last_through(marks: &[BatchMark], through: u64) -> Option<u64> {
    let n = marks.partition_point(|m| m.seq <= through);
    marks[..n].last().map(|m| m.seq)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What is clean is in one half, what is dirty in both at the same place; nothing lies on anything else, and clean blocks
        /// leave at most one block of a half unused beside each dirty run.
        #[test]
        fn blocks_of_a_batch_have_places_of_their_own(
            runs in prop::collection::vec((any::<bool>(), 1u32..40), 1..20),
            at in 1u32..50,
            lost in 0usize..3,
        ) {
            let there = [lost != 1, lost != 2];
            let mut places = Places { half: 256, end: 250, next: [at; 2], there };
            let mut taken = BTreeSet::new();
            let (mut clean, mut dirty, mut dirty_runs) = (0, 0, 0);
            'all: for (is_dirty, count) in runs {
                dirty_runs += u32::from(is_dirty);
                let mut left = count;
                while left > 0 {
                    let (n, slot) = places.next(is_dirty, left);
                    if n == 0 {
                        break 'all;
                    }
                    prop_assert!(n <= left);
                    for slot in slot..slot + n {
                        let (side, row) = (slot / 256, slot % 256);
                        prop_assert!((at..250).contains(&row));
                        match is_dirty {
                            true => {
                                prop_assert_eq!(side, 0);
                                prop_assert!(taken.insert((0, row)) && taken.insert((1, row)));
                            }
                            false => {
                                prop_assert!(there[side as usize]);
                                prop_assert!(taken.insert((side, row)));
                            }
                        }
                    }
                    places.take(is_dirty, slot, n);
                    left -= n;
                    match is_dirty {
                        true => dirty += n,
                        false => clean += n,
                    }
                }
            }
            let used = places.next[0].max(places.next[1]) - at;
            let last = taken.iter().map(|(_, row)| row + 1 - at).max().unwrap_or(0);
            prop_assert_eq!(used, last, "a walk finds the next batch behind the last block");
            let rows = match there {
                [true, true] => clean.div_ceil(2) + dirty_runs + 1,
                _ => clean,
            };
            prop_assert!(used <= dirty + rows, "{} rows for {} clean, {} dirty", used, clean, dirty);
        }
    }
}
