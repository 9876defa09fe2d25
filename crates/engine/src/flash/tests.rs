//! A flash device alone: no engine, no disks, no requests. What it wants done is ended by hand.

mod area;
mod heads;
mod once;
mod recovery;
mod stripes;
mod unreadable;

use crate::api::FlashFault;
use crate::flash::again::Holds;
use crate::flash::choose::Verdict;
use crate::flash::device::{FlashDevice, FlashEvent, FlashOp, Token, Users};
use crate::flash::durable::Until;
use crate::flash::evict::{Contents, Fate, Terms};
use crate::flash::fail::{Noted, Promise};
use crate::flash::log::{FULL_BATCHES_IN_FLIGHT, Gone, Item, SegState, Segment, Slot};
use hearth_format::superblock::INCOMPAT_MAP;
use hearth_format::{BATCH_ENTRIES_MAX, Entry, Kind, Layout, Superblock, Uuid};
use hearth_io::{Buf, IoError, IoOp, OpKind, Target};
use hearth_policy::cleaning::Why;
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet};

/// A token somebody waits for, or nobody does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Own,
    Moved(u64),
    Awaited(u32),
}

impl Token for Mark {
    const OWN: Mark = Mark::Own;

    fn is_awaited(&self) -> bool {
        matches!(self, Mark::Awaited(_))
    }

    fn is_move(&self) -> bool {
        matches!(self, Mark::Moved(_))
    }
}

#[derive(Debug)]
enum Nobody {}

impl Users for Nobody {
    type Token = Mark;
    type Waiter = u32;
}

type Device = FlashDevice<Nobody>;

const SEGMENT_BLOCKS: u32 = 256;
/// Blocks of data in a segment of one batch.
const DATA: u32 = 252;
/// Errors as the system numbers them.
const IO: IoError = IoError::Os(5);
const NO_SPACE: IoError = IoError::Os(28);

fn layout() -> Layout {
    Layout::for_device(16 << 20, SEGMENT_BLOCKS).expect("it fits")
}

/// A device about whose segments nothing is known yet.
fn device_of(layout: Layout) -> Device {
    let uuid = Uuid::from_u128(1);
    let mut sb = Superblock::new(layout, uuid, uuid, "test", 0);
    sb.incompat |= INCOMPAT_MAP;
    Device::new(3, sb, true, Default::default())
}

/// An empty device with all its segments free.
fn device() -> Device {
    let mut d = device_of(layout());
    d.log.free = (0..d.log.segments.len() as u32).collect();
    d.log.next_segment_seq = 1;
    d
}

/// Appends a run of blocks; returns its number.
fn append(d: &mut Device, block: u64, count: u32, mark: u32) -> u64 {
    let data = Buf::zeroed(count as usize * 4096).all();
    let crcs = smallvec![0; count as usize];
    let token = Mark::Awaited(mark);
    d.log.push(Item::data(
        Kind::Dirty,
        1,
        block,
        data,
        crcs,
        Why::Filled,
        token,
    ))
}

/// Takes what it wants done. All of it is for this device.
fn sent(d: &mut Device) -> Vec<FlashOp> {
    let ops = d.out.ios.drain(..).map(|(op, io)| {
        assert_eq!(io.target, Target::Flash(3));
        op
    });
    ops.collect()
}

/// The numbers of the batches among it.
fn batches(ops: &[FlashOp]) -> Vec<u64> {
    let seq = |op: &FlashOp| match op {
        FlashOp::Batch { seq } => Some(*seq),
        _ => None,
    };
    ops.iter().filter_map(seq).collect()
}

/// The one flush among it: what it covers.
fn flush(ops: &[FlashOp]) -> (u64, u64) {
    let flushes: Vec<_> = ops
        .iter()
        .filter_map(|op| match op {
            FlashOp::Flush { ord, seq } => Some((*ord, *seq)),
            _ => None,
        })
        .collect();
    assert_eq!(flushes.len(), 1, "{ops:?}");
    flushes[0]
}

/// Who is told that what he waits for is durable.
fn durable(d: &mut Device) -> Vec<u32> {
    let who = |event| match event {
        FlashEvent::Durable { who } => Some(who),
        _ => None,
    };
    d.out.events.drain(..).filter_map(who).collect()
}

/// Ends a batch; returns the tokens of what is applied by that.
fn written(d: &mut Device, seq: u64) -> Vec<Mark> {
    d.batch_ended(seq, &Ok(()));
    let mut tokens = Vec::new();
    while let Some(batch) = d.take_applied() {
        tokens.extend(batch.items.iter().filter(|i| i.ends).map(|i| i.token));
    }
    d.go_on(0, 0);
    tokens
}

/// Writes all that is queued, batch by batch, and all summaries.
fn write_all(d: &mut Device) {
    d.log.urgent = true;
    d.pump(0);
    loop {
        let ops = sent(d);
        if ops.is_empty() {
            return;
        }
        for op in ops {
            match op {
                FlashOp::Batch { seq } => {
                    written(d, seq);
                }
                FlashOp::Summary { seg } => d.summary_ended(seg, &Ok(())),
                op => panic!("{op:?}"),
            }
        }
        d.log.urgent = true;
        d.pump(0);
    }
}

fn make_durable(d: &mut Device) {
    d.flush(0);
    let (ord, seq) = flush(&sent(d));
    assert!(d.flush_ended(ord, seq, &Ok(()), 0));
}

#[test]
fn all_who_wait_share_a_flush_and_who_comes_later_the_next() {
    let mut d = device();
    let first = append(&mut d, 0, 1, 1);
    // Nothing is on flash yet: a flush now would cover nothing.
    d.wait_durable(Until::Ord(first), 10, 0);
    assert!(sent(&mut d).is_empty());
    d.pump(0);
    let seq = batches(&sent(&mut d))[0];
    assert_eq!(written(&mut d, seq), [Mark::Awaited(1)]);
    let (ord, covered) = flush(&sent(&mut d));
    assert_eq!((ord, covered), (first, seq));

    // While that flush is away more is appended, and others wait: for the old and for the new.
    let second = append(&mut d, 1, 1, 2);
    d.pump(0);
    let later = batches(&sent(&mut d))[0];
    written(&mut d, later);
    d.wait_durable(Until::Ord(second), 11, 0);
    d.wait_durable(Until::Ord(first), 12, 0);
    d.wait_durable(Until::Batch(later), 13, 0);
    assert!(sent(&mut d).is_empty(), "one flush at a time");
    assert!(d.flush_ended(ord, covered, &Ok(()), 0));
    assert_eq!(durable(&mut d), [10, 12]);
    assert!(d.is_durable(first) && !d.is_durable(second));

    d.flush_again(0);
    let (ord, covered) = flush(&sent(&mut d));
    assert!(d.flush_ended(ord, covered, &Ok(()), 0));
    assert_eq!(durable(&mut d), [11, 13]);
    d.flush_again(0);
    assert!(d.out.is_empty() && d.is_all_durable());
}

#[test]
fn a_batch_counts_only_when_all_before_it_are_on_flash() {
    let mut d = device();
    append(&mut d, 0, 32, 1);
    d.pump(0);
    append(&mut d, 32, 32, 2);
    d.pump(0);
    let seqs = batches(&sent(&mut d));
    assert_eq!(seqs.len(), 2);
    assert_eq!(written(&mut d, seqs[1]), []);
    assert_eq!(d.log.applied_ord, 0);
    let both = [Mark::Awaited(1), Mark::Awaited(2)];
    assert_eq!(written(&mut d, seqs[0]), both);
    assert_eq!(d.log.applied_ord, 2);
}

/// A single failure is not the end of a device whose segments are all in use.
#[test]
fn a_batch_that_fails_is_written_to_its_place_again_where_there_is_no_other() {
    let mut d = device();
    append(&mut d, 0, 4, 1);
    write_all(&mut d);
    d.log.free.clear();
    append(&mut d, 4, 4, 2);
    d.log.urgent = true;
    d.pump(0);
    let (mut op, mut io) = d.out.ios.pop().expect("a batch");
    let (at, len) = (io.offset, io.len);
    for tries in 0.. {
        let FlashOp::Batch { seq } = op else {
            panic!("{op:?}");
        };
        let done = IoOp {
            id: 1,
            target: io.target,
            kind: io.kind,
            offset: io.offset,
            len: io.len,
            bufs: io.bufs,
            crcs: smallvec![],
            sums: false,
            class: io.class,
        };
        match d.batch_again(seq, done.done(Err(IO), 1)) {
            None => (op, io) = d.out.ios.pop().expect("once more"),
            // It is bad for good.
            Some(done) => {
                assert_eq!(tries, 2);
                d.batch_ended(seq, &done.result);
                d.go_on(0, 0);
                assert!(!d.takes_writes());
                break;
            }
        }
        assert_eq!((io.offset, io.len), (at, len));
        assert!(d.takes_writes());
    }
    // With another segment it goes there.
    let mut d = device();
    append(&mut d, 0, 4, 1);
    d.log.urgent = true;
    d.pump(0);
    let seq = batches(&sent(&mut d))[0];
    d.batch_ended(seq, &Err(IO));
    d.go_on(0, 0);
    assert!(d.takes_writes() && batches(&sent(&mut d)).len() == 1);
}

#[test]
fn a_run_that_is_cut_in_two_is_over_with_its_second_part() {
    let mut d = device();
    // The head has room for no more than a part of the second run.
    append(&mut d, 0, 200, 1);
    write_all(&mut d);
    let ord = append(&mut d, 200, 128, 2);
    d.pump(0);
    let parts = batches(&sent(&mut d));
    assert_eq!(parts.len(), 2);
    assert_eq!(written(&mut d, parts[0]), []);
    assert!(d.log.applied_ord < ord, "half of it does not count as all");
    let ops = sent(&mut d);
    assert!(matches!(ops[..], [FlashOp::Summary { seg: 0 }]), "{ops:?}");
    assert_eq!(written(&mut d, parts[1]), [Mark::Awaited(2)]);
    assert_eq!(d.log.applied_ord, ord);
}

#[test]
fn a_segment_goes_from_free_to_free_by_a_durable_log_and_two_maps() {
    let mut d = device();
    assert_eq!(d.log.segments[0].state, SegState::Free);
    append(&mut d, 0, 100, 1);
    write_all(&mut d);
    assert_eq!(d.log.segments[0].state, SegState::Open);
    append(&mut d, 100, 128, 1);
    append(&mut d, 228, 128, 1);
    d.pump(0);
    // It is closed, but its last batch is not on flash yet: a summary now would claim too much.
    let ops = sent(&mut d);
    assert_eq!(ops.len(), batches(&ops).len());
    for seq in batches(&ops) {
        written(&mut d, seq);
    }
    d.pump(0);
    let rest = sent(&mut d);
    let sealed = rest
        .iter()
        .any(|op| matches!(op, FlashOp::Summary { seg: 0 }));
    assert!(sealed, "{rest:?}");
    assert_eq!(d.log.segments[0].state, SegState::Closed);
    assert_eq!(d.log.segments[0].pins, 1, "its summary is being written");
    d.summary_ended(0, &Ok(()));
    assert_eq!(d.log.segments[0].pins, 0);
    for seq in batches(&rest) {
        written(&mut d, seq);
    }
    write_all(&mut d);
    assert_eq!(d.log.order, [0]);

    // It is empty now. What took the place of its content must be durable ...
    let ord = append(&mut d, 1000, 1, 1);
    d.free_segment(0, ord);
    assert!(d.log.order.is_empty());
    write_all(&mut d);
    d.store_map();
    assert!(sent(&mut d).is_empty(), "the map would say too much");
    make_durable(&mut d);
    assert!(
        sent(&mut d).is_empty(),
        "there are enough, so it waits for others"
    );
    d.store_map();
    // ... and then the map says that it is free, in both its copies.
    for copy in [0, 1] {
        let ios: Vec<_> = d.out.ios.drain(..).collect();
        let place =
            layout().map_offset(copy)..layout().map_offset(copy) + layout().map_blocks() * 4096;
        assert_eq!(ios.len(), 2, "a header and a block of the table");
        for (op, io) in &ios {
            assert!(matches!(op, FlashOp::Map) && io.kind == OpKind::Write);
            assert!(place.contains(&io.offset));
        }
        d.map_ended(OpKind::Write, &Ok(()), 0);
        assert!(sent(&mut d).is_empty(), "not before all of it is written");
        d.map_ended(OpKind::Write, &Ok(()), 0);
        let ios: Vec<_> = d.out.ios.drain(..).collect();
        assert!(matches!(ios[..], [(FlashOp::Map, ref io)] if io.kind == OpKind::Flush));
        assert_eq!(d.log.segments[0].state, SegState::Freeing { ord });
        d.map_ended(OpKind::Flush, &Ok(()), 0);
    }
    assert_eq!(d.log.segments[0].state, SegState::Trimming);
    assert!(matches!(sent(&mut d)[..], [FlashOp::Trim { seg: 0 }]));
    assert!(!d.log.free.contains(&0));
    d.trim_ended(0);
    assert_eq!(d.log.segments[0].state, SegState::Free);
    assert_eq!(d.log.free.back(), Some(&0));
}

/// What had not reached the device, and who waited, as it tells when it is given up.
fn given_up(d: &mut Device) -> (Vec<Mark>, Vec<u32>) {
    let up = |event| match event {
        FlashEvent::GivenUp { unsent, waiters } => {
            Some((unsent.iter().map(|i| i.token).collect(), waiters))
        }
        _ => None,
    };
    let mut told: Vec<_> = d.out.events.drain(..).filter_map(up).collect();
    assert_eq!(told.len(), 1, "told once");
    told.remove(0)
}

#[test]
fn a_failed_flush_is_the_end_of_the_device() {
    let mut d = device();
    let ord = append(&mut d, 0, 1, 1);
    d.pump(0);
    let seq = batches(&sent(&mut d))[0];
    written(&mut d, seq);
    d.wait_durable(Until::Ord(ord), 10, 0);
    let (ord, seq) = flush(&sent(&mut d));
    append(&mut d, 1, 1, 2);
    assert!(!d.flush_ended(ord, seq, &Err(IO), 0));
    assert!(!d.takes_writes());
    assert_eq!(d.given_up(), Some(FlashFault::Broken));
    assert_eq!(d.promise(), Promise::None);
    assert!(!d.is_durable(ord), "nobody knows what it kept");
    assert_eq!(given_up(&mut d), (vec![Mark::Awaited(2)], vec![10]));
    // Nothing goes to it any more but the note.
    assert!(matches!(sent(&mut d)[..], [FlashOp::Mark]));
    append(&mut d, 2, 1, 3);
    d.pump(0);
    d.flush(0);
    assert!(d.out.is_empty());
}

#[test]
fn refused_writes_are_tried_elsewhere_with_the_same_numbers_and_then_no_more() {
    let mut d = device();
    append(&mut d, 0, 1, 1);
    append(&mut d, 1, 1, 2);
    d.log.urgent = true;
    d.pump(0);
    let mut tries = 0;
    while d.takes_writes() {
        let ops = sent(&mut d);
        assert_eq!(batches(&ops), [1], "{ops:?}");
        assert_eq!(d.log.next_batch_seq, 2);
        tries += 1;
        d.batch_ended(1, &Err(NO_SPACE));
        assert!(d.take_applied().is_none());
        d.go_on(0, 0);
    }
    assert!((2..10).contains(&tries), "{tries}");
    assert!(
        !d.trim,
        "what is trimmed now, a full file system may not give back"
    );
    // It was full, and what it holds (nothing) is durable.
    assert_eq!(d.given_up(), Some(FlashFault::Unwritable));
    assert_eq!(d.promise(), Promise::Durable);
    let both = vec![Mark::Awaited(1), Mark::Awaited(2)];
    assert_eq!(given_up(&mut d), (both, vec![]));
    assert!(d.log.segments.iter().all(|s| s.batches == 0 && s.pins == 0));
}

#[test]
fn that_it_was_given_up_is_noted_in_both_copies_or_somewhere_else() {
    for works in [true, false] {
        let mut d = device();
        d.give_up(FlashFault::Broken, true, 0);
        given_up(&mut d);
        for kind in [OpKind::Write, OpKind::Flush, OpKind::Write, OpKind::Flush] {
            assert!(d.is_noting());
            assert!(d.out.events.is_empty(), "told too early");
            assert!(matches!(sent(&mut d)[..], [FlashOp::Mark]));
            d.mark_ended(kind, works);
        }
        if !works {
            // Whoever runs the engine has time to note it elsewhere.
            assert_eq!(d.noted, Noted::Nowhere);
            assert!(d.is_noting() && d.out.is_empty());
            d.noted_elsewhere();
        }
        assert_eq!(d.noted, Noted::Stored);
        assert!(!d.is_noting());
        assert!(matches!(d.out.events[..], [FlashEvent::Noted]));
    }
}

#[test]
fn many_places_that_cannot_be_read_are_a_failed_device_and_one_is_not() {
    let mut d = device();
    for _ in 0..100 {
        d.read_errors.insert(4096);
        d.read_failed(0);
    }
    assert!(d.takes_writes(), "one place says nothing about the rest");
    for place in 0..100 {
        d.read_errors.insert(place * 4096);
        d.read_failed(0);
    }
    assert!(!d.takes_writes());
}

/// What lies on a device, as a cache of one disk without any policy would know it.
#[derive(Default)]
struct Shelf {
    /// Block and dirtiness by slot.
    slots: BTreeMap<Slot, (u64, bool)>,
    /// Clean blocks that are worth being moved.
    used: BTreeSet<u64>,
    /// Dirty blocks that no origin takes.
    homeless: BTreeSet<u64>,
    moving: BTreeSet<Slot>,
    /// Zeros of which the origin does not know, and open intents.
    zeros: Vec<(u64, u64)>,
    intents: Vec<(u64, u64)>,
}

impl Shelf {
    /// What was just written is in the cache: `count` blocks from `block`, from `slot` on.
    fn fill(&mut self, d: &mut Device, slot: Slot, block: u64, count: u32, dirty: bool) {
        for i in 0..count {
            self.slots.insert(slot + i, (block + u64::from(i), dirty));
            d.slot_filled(slot + i, dirty);
            if !dirty {
                // It was written as dirty.
                d.cleaner.destaged(slot / SEGMENT_BLOCKS);
            }
        }
    }

    fn gone(&mut self, slot: Slot) -> Gone {
        let (block, dirty) = self.slots.remove(&slot).expect("it was looked at");
        Gone {
            disk: 1,
            block,
            slot,
            dirty,
        }
    }
}

impl Holds for Shelf {
    fn is_known(&self, disk: u16) -> bool {
        disk == 1
    }

    fn is_cached(&self, _: u16, block: u64) -> bool {
        self.slots.values().any(|(b, _)| *b == block)
    }

    fn clean_copies(&self, _: u16, start: u64, end: u64) -> Vec<(u64, Slot)> {
        let clean = self.slots.iter().filter(|(_, (_, dirty))| !dirty);
        let blocks = clean.map(|(slot, (block, _))| (*block, *slot));
        blocks
            .filter(|(block, _)| (start..end).contains(block))
            .collect()
    }

    fn zeros(&self, _: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        let runs = self.zeros.iter().copied();
        runs.map(|(from, to)| (from.max(start), to.min(end)))
            .filter(|(from, to)| from < to)
            .collect()
    }

    fn intents(&self, _: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        let open = self.intents.iter().copied();
        open.filter(|(from, to)| *from < end && start < *to)
            .collect()
    }
}

impl Contents for Shelf {
    fn look(&self, slot: Slot, terms: &Terms) -> Fate {
        match self.slots.get(&slot) {
            None => Fate::Stays,
            Some(_) if self.moving.contains(&slot) => Fate::Stays,
            Some((block, true)) if self.homeless.contains(block) => Fate::Moves { alone: false },
            Some((_, true)) if terms.dirty_stays || terms.starved => Fate::Waits,
            Some((block, false)) if !terms.may_keep_used || !self.used.contains(block) => {
                Fate::Goes
            }
            Some(_) => Fate::Moves { alone: false },
        }
    }

    fn drop_copy(&mut self, slot: Slot, _: u64) -> Gone {
        self.gone(slot)
    }

    fn drop_orphan(&mut self, slot: Slot) -> Gone {
        panic!("slot {slot} was called no orphan");
    }

    fn set_moving(&mut self, slot: Slot) -> u32 {
        self.moving.insert(slot);
        0
    }
}

/// A device on which room is short: all segments but the last two are full, each of `dirty` dirty blocks
/// and else of clean ones.
fn short_of_room(dirty: u32) -> (Device, Shelf) {
    let mut d = device();
    let mut shelf = Shelf::default();
    let count = DATA;
    while d.log.free.len() > 2 {
        // A whole segment: what is left of it has no room for the next run's descriptor and blocks.
        let seg = *d.log.free.front().expect("one is free");
        let block = u64::from(seg) * 1000;
        append(&mut d, block, count, 1);
        write_all(&mut d);
        let slot = seg * SEGMENT_BLOCKS + 1;
        shelf.fill(&mut d, slot, block, dirty, true);
        shelf.fill(
            &mut d,
            slot + dirty,
            block + u64::from(dirty),
            count - dirty,
            false,
        );
        d.roll();
        write_all(&mut d);
    }
    make_durable(&mut d);
    (d, shelf)
}

/// The reads among what it wants done.
fn moves(ops: &[FlashOp]) -> Vec<(Slot, u32)> {
    let read = |op: &FlashOp| match op {
        FlashOp::Move { slot, count } => Some((*slot, *count)),
        _ => None,
    };
    ops.iter().filter_map(read).collect()
}

/// An entry without data.
fn said(kind: Kind, block: u64, count: u32) -> Entry {
    Entry {
        disk: 1,
        block,
        word: count,
        slot: 0,
        kind,
        flags: 0,
    }
}

/// Answers the read of what the segment says.
fn entries(d: &mut Device) {
    let ops: Vec<_> = d.out.ios.drain(..).collect();
    let [(FlashOp::Entries { seg, whole: false }, _)] = &ops[..] else {
        panic!("{ops:?}");
    };
    let seg = *seg;
    d.unpin(seg);
    d.set_entries(seg, Vec::new());
}

#[test]
fn the_segment_with_the_most_holes_goes_and_only_when_room_is_short() {
    let mut d = device();
    assert_eq!(d.next_victim(0), None);
    let (mut d, mut shelf) = short_of_room(0);
    // In one of them much has died.
    let holes = d.log.order[2];
    for slot in holes * SEGMENT_BLOCKS + 1..holes * SEGMENT_BLOCKS + 151 {
        let gone = shelf.gone(slot);
        d.slot_gone(gone);
    }
    let (seg, begins) = d.next_victim(0).expect("room is short");
    assert!(begins && !d.is_going(seg));
    assert_eq!(seg, holes);
    assert_eq!(d.next_victim(0), Some((seg, false)), "one after the other");

    d.sift(seg, &mut shelf, 0);
    assert_eq!(
        d.log.segments[seg as usize].live,
        DATA - 150,
        "what it says comes first"
    );
    entries(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
    assert!(d.is_going(seg));
    d.sift(seg, &mut shelf, 0);
    assert!(
        d.fades(seg) && moves(&sent(&mut d)).is_empty(),
        "none of it is used"
    );
}

/// A note that a block is clean need not be said again where the map says it of the whole segment; but the map
/// says so only when whatever is newer is durable.
#[test]
fn a_segment_without_dirty_blocks_is_clean_in_the_map() {
    let (mut d, mut shelf) = short_of_room(0);
    let (stays, goes) = (d.log.order[0], d.log.order[1]);
    d.set_entries(
        goes,
        vec![said(Kind::CleanedRun, u64::from(stays) * 1000, 4)],
    );
    let newer = append(&mut d, 9_000_000, 1, 1);
    let ord = d.say_again(goes, &shelf, 0).expect("nothing holds it");
    assert!(ord >= newer && d.log.queue.len() == 1, "no note");
    let through = d.log.durable_seq;
    let (entry, settled) = d.map_entry(stays, through);
    assert!(entry.seq > 0 && !entry.clean && !settled);
    write_all(&mut d);
    make_durable(&mut d);
    let (entry, settled) = d.map_entry(stays, d.log.durable_seq);
    assert!(entry.clean && settled);
    // One of them is dirty: then there is a note.
    let other = d.log.order[2];
    let slot = other * SEGMENT_BLOCKS + 1;
    let (block, _) = shelf.slots[&slot];
    shelf.slots.insert(slot, (block, false));
    d.log.segments[other as usize].dirty += 1;
    d.set_entries(goes, vec![said(Kind::CleanedRun, block, 1)]);
    d.say_again(goes, &shelf, 0).expect("nothing holds it");
    let queued = d.log.queue.iter().map(|i| (i.kind, i.block));
    assert_eq!(queued.collect::<Vec<_>>(), [(Kind::CleanedRun, block)]);
}

/// Zeros of which an origin that hangs is to know: they are waited for, but others are freed meanwhile.
#[test]
fn a_segment_that_says_too_much_again_is_put_off() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(d.is_victim_empty(seg));
    let most = d.log.summary_capacity * d.log.free.len() / 2;
    let runs = 0..most as u64 + 1;
    shelf.zeros = runs.clone().map(|at| (at * 2, at * 2 + 1)).collect();
    let zeros = runs.map(|at| said(Kind::ZeroRun, at * 2, 1)).collect();
    d.set_entries(seg, zeros);
    assert_eq!(d.say_again(seg, &shelf, 0), None);
    assert!(d.log.queue.is_empty() && d.wants_clean());
    let next = d.next_victim(0).expect("room is short");
    assert!(next.0 != seg && next.1, "another one goes");
    d.free_victim(next.0, 0);
    assert!(d.holds_evicted() && !d.has_gone(1));
    // With more room it is its turn again.
    d.log.freeing.clear();
    d.log.free.push_back(next.0);
    assert_eq!(d.next_victim(0), Some((seg, true)));
    assert!(d.say_again(seg, &shelf, 0).is_none(), "it is read again");
}

/// What was dropped with it nobody recorded, and its copy says that it is dirty: a start after a crash would
/// destage it over what its disk was given since.
#[test]
fn what_says_that_a_block_is_clean_outlives_the_copy_in_a_segment_that_waits() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    let dropped = (seg * SEGMENT_BLOCKS + 1..)
        .find_map(|slot| shelf.slots.get(&slot).map(|(block, _)| *block))
        .expect("something lies there");
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
    d.sift(seg, &mut shelf, 0);
    assert!(d.is_victim_empty(seg) && d.is_begun(seg));
    assert_eq!(d.dead.count(1, dropped), 1, "its copy is dead");
    d.put_off(seg, 1000, 0);
    let next = d.next_victim(0).expect("room is short").0;
    assert_ne!(next, seg);
    d.set_entries(next, vec![said(Kind::CleanedRun, dropped, 1)]);
    d.say_again(next, &shelf, 0).expect("nothing holds it");
    assert!(d.log.queue.is_empty(), "the map says it of all at once");
    assert!(d.log.segments[seg as usize].clean_from.is_some());
    // Where something is left in it that is dirty, the map cannot.
    d.log.segments[seg as usize].clean_from = None;
    d.log.segments[seg as usize].dirty = 1;
    d.say_again(next, &shelf, 0).expect("nothing holds it");
    let queued = d.log.queue.iter().map(|i| (i.kind, i.block));
    assert_eq!(queued.collect::<Vec<_>>(), [(Kind::DropRun, dropped)]);
    assert!(d.log.segments[seg as usize].clean_from.is_none());
}

/// Nothing lives in them, but what they say would fill as many others.
#[test]
fn segments_that_would_only_be_written_again_stay_and_the_oldest_goes() {
    let (mut d, mut shelf) = short_of_room(0);
    let entries = d.log.summary_capacity as u64;
    let void: Vec<Entry> = (0..entries)
        .map(|n| said(Kind::DropRun, 9_000_000 + n * 2, 1))
        .collect();
    void.iter().for_each(|e| d.dead.add(1, e.block));
    let oldest = d.log.order[0];
    for seg in d.log.order.clone() {
        if seg != oldest {
            for slot in seg * SEGMENT_BLOCKS + 1..=seg * SEGMENT_BLOCKS + DATA {
                let gone = shelf.gone(slot);
                d.slot_gone(gone);
            }
        }
    }
    let mut looked_at = Vec::new();
    let seg = loop {
        let (seg, begins) = d.next_victim(0).expect("room is short");
        assert!(begins && looked_at.len() < 20);
        d.set_entries(seg, void.clone());
        if d.judge(seg, &shelf, 0) == Verdict::Goes {
            break seg;
        }
        assert!(
            !d.holds_evicted() && d.begun().is_empty(),
            "it is as before"
        );
        looked_at.push(seg);
    };
    assert!(looked_at.len() > 1 && !looked_at.contains(&oldest));
    assert_eq!(seg, oldest, "nothing it says can matter");
    d.sift(seg, &mut shelf, 0);
    assert!(d.is_victim_empty(seg));
    let ord = d.say_again(seg, &shelf, 0).expect("nothing holds it");
    assert!(d.log.queue.is_empty());
    d.free_victim(seg, ord);
    assert_eq!(d.in_vain().0, 1);
    // The next one is the oldest now.
    let (seg, _) = d.next_victim(0).expect("room is short");
    assert_eq!(seg, d.log.order[0]);
    d.set_entries(seg, void);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
}

#[test]
fn what_is_not_used_goes_where_too_much_lives() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    assert!(d.fades(seg));
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
    d.sift(seg, &mut shelf, 0);
    assert!(sent(&mut d).is_empty(), "nothing in it is worth a read");
    assert!(d.is_victim_empty(seg));
    let ord = d.say_again(seg, &shelf, 0).expect("nothing holds it");
    assert!(
        d.log.queue.is_empty(),
        "and it says nothing that must be kept"
    );
    assert!(d.holds_evicted() && !d.has_gone(d.evictions()));
    d.free_victim(seg, ord);
    assert_eq!(
        d.log.segments[seg as usize].state,
        SegState::Freeing { ord }
    );
    assert!(
        !d.has_gone(d.evictions()),
        "a crash would bring its copies back"
    );
    let next = d.next_victim(0).expect("room is still short").0;
    assert_ne!(next, seg);
}

#[test]
fn what_is_in_use_is_moved_before_its_segment_is_freed() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    let first = seg * SEGMENT_BLOCKS + 1;
    let block = u64::from(seg) * 1000;
    shelf.used.extend([block, block + 1, block + 7]);
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert_eq!(moves(&sent(&mut d)), [(first, 2), (first + 7, 1)]);
    assert_eq!((d.moving(), d.log.segments[seg as usize].live), (3, 3));
    assert!(!d.is_victim_empty(seg));

    // The reads have ended; what was read is appended, and lies elsewhere then.
    for (slot, count) in [(first, 2), (first + 7, 1)] {
        d.move_read_ended(slot, count);
        for slot in slot..slot + count {
            let data = Buf::zeroed(4096).all();
            let gone = shelf.gone(slot);
            let at = (1, gone.block);
            d.append_moved(Kind::Clean, at, slot, data, 0, Mark::Moved(gone.block));
            d.slot_gone(gone);
        }
    }
    assert_eq!(d.moving(), 3);
    assert!(
        !d.is_victim_empty(seg),
        "the only good copy is not on flash yet"
    );
    d.moves_go_on(true);
    d.pump(0);
    let seq = batches(&sent(&mut d))[0];
    let marks = written(&mut d, seq);
    assert_eq!(marks.len(), 3);
    assert!(marks.iter().all(|m| matches!(m, Mark::Moved(_))));
    marks.iter().for_each(|_| d.moved());
    assert!(d.is_victim_empty(seg));
}

#[test]
fn a_segment_that_is_all_dirty_waits_for_the_destager() {
    let (mut d, mut shelf) = short_of_room(DATA);
    let (seg, _) = d.next_victim(0).expect("room is short");
    assert!(!d.wants_clean());
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(d.wants_clean() && moves(&sent(&mut d)).is_empty());

    // What has no origin is moved, and nobody is hurried for it.
    let (mut d, mut shelf) = short_of_room(DATA);
    let (seg, _) = d.next_victim(0).expect("room is short");
    shelf.homeless = shelf.slots.values().map(|(block, _)| *block).collect();
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(!d.wants_clean() && !moves(&sent(&mut d)).is_empty());

    // One with less of it is moved on.
    let (mut d, mut shelf) = short_of_room(30);
    let (seg, _) = d.next_victim(0).expect("room is short");
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(!d.wants_clean());
    assert_eq!(moves(&sent(&mut d)), [(seg * SEGMENT_BLOCKS + 1, 30)]);
}

#[test]
fn what_a_segment_says_is_on_flash_again_before_it_goes() {
    let mut d = device();
    let mut shelf = Shelf::default();
    append(&mut d, 0, 1, 1);
    write_all(&mut d);
    d.roll();
    write_all(&mut d);
    d.log.segments[0].live = 0;
    // Zeros that hold in part, and zeros that another segment says, too.
    shelf.zeros = vec![(100, 104)];
    d.log.zeros.add(0, 1, 100, 108);
    d.log.zeros.add(5, 1, 50, 60);
    // Void copies of three blocks, of which another segment has two; one of those is cached.
    shelf.slots.insert(900, (21, false));
    for block in [20, 21, 22] {
        d.dead.add(1, block);
    }
    d.dead.add(1, 22);
    // A clean copy elsewhere, and an open intent.
    shelf.slots.insert(901, (70, false));
    shelf.intents = vec![(64, 128)];
    d.set_entries(
        0,
        vec![
            said(Kind::ZeroRun, 100, 8),
            said(Kind::ZeroDoneRun, 55, 8),
            said(Kind::DropRun, 20, 2),
            Entry {
                slot: 1,
                ..said(Kind::Clean, 22, 7)
            },
            said(Kind::CleanedRun, 68, 4),
            said(Kind::Intent, 64, 64),
            said(Kind::Intent, 640, 64),
        ],
    );
    // It is not the oldest.
    d.log.segments[5] = Segment {
        seq: d.log.segments[0].seq - 1,
        ..d.log.segments[0]
    };
    d.log.order.push_front(5);
    // Something about one of the blocks is on its way.
    append(&mut d, 20, 1, 2);
    assert_eq!(d.say_again(0, &shelf, 0), None);
    d.log.clear_queue();
    let ord = d.say_again(0, &shelf, 0).expect("nothing holds it");
    let queued = d.log.queue.iter();
    let queued: Vec<_> = queued.map(|i| (i.kind, i.block, i.count)).collect();
    assert_eq!(
        queued,
        [
            (Kind::CleanedRun, 70, 1),
            (Kind::DropRun, 20, 1),
            (Kind::DropRun, 22, 1),
            (Kind::ZeroRun, 100, 4),
            (Kind::ZeroDoneRun, 55, 5),
            (Kind::Intent, 64, 64),
        ]
    );
    assert_eq!(ord, d.log.next_ord);
    // Its own copy is none any more.
    d.free_victim(0, ord);
    assert_eq!(d.dead.count(1, 22), 1);
}

#[test]
fn what_is_queued_goes_out_behind_two_batches_only_if_it_fills_one() {
    let full = BATCH_ENTRIES_MAX as u32;
    let mut d = device();
    append(&mut d, 0, 16, 1);
    d.pump(0);
    append(&mut d, 100, 16, 2);
    d.pump(0);
    assert_eq!(batches(&sent(&mut d)).len(), 2);
    append(&mut d, 200, full - 1, 3);
    d.pump(0);
    assert!(sent(&mut d).is_empty(), "it gathers");
    append(&mut d, 1000, 1, 4);
    d.pump(0);
    assert_eq!(
        batches(&sent(&mut d)).len(),
        1,
        "waiting would gain nothing"
    );
    for i in 0..10 {
        append(&mut d, 2000 + u64::from(i * full), full, 5 + i);
        d.pump(0);
    }
    assert_eq!(d.log.batches.len(), FULL_BATCHES_IN_FLIGHT);
}

#[test]
fn segments_that_are_to_be_free_wait_for_each_other_while_others_are_free() {
    let mut d = device();
    assert!(!d.is_short_of_free());
    let target = d.free_target();
    assert_eq!(
        target - d.log.reserve(),
        2,
        "a small pool keeps few segments ahead"
    );
    d.log.free.truncate(target);
    assert!(!d.is_short_of_free());
    d.log.free.pop_back();
    assert!(d.is_short_of_free(), "and so cannot wait");
    // A large one keeps many.
    let segment = d.log.segments[0];
    d.log.segments.resize(1024, segment);
    let (target, reserve) = (d.free_target(), d.log.reserve());
    d.log.free = (0..target as u32 - 1).collect();
    assert!(!d.is_short_of_free());
    d.log.free.truncate(reserve + 1);
    assert!(d.is_short_of_free());
}
