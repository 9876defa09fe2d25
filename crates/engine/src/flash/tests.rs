//! A flash device alone: no engine, no disks, no requests. What it wants done is ended by hand.

mod area;
mod evict;
mod heads;
mod once;
mod recovery;
mod shelf;
mod stripes;
mod unreadable;

use crate::api::FlashFault;
use crate::ctx::Io;
use crate::flash::device::{FlashDevice, FlashEvent, FlashOp, Token, Users};
use crate::flash::durable::Until;
use crate::flash::fail::{Noted, Promise};
use crate::flash::log::{FULL_BATCHES_IN_FLIGHT, Item, SegState, Segment, Slot};
use hearth_format::superblock::INCOMPAT_MAP;
use hearth_format::{BATCH_ENTRIES_MAX, Kind, Layout, Superblock, Uuid};
use hearth_io::{Buf, IoError, IoOp, OpKind, Target};
use hearth_policy::cleaning::Why;
use smallvec::smallvec;

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

/// What a driver is given for it.
fn op_of(io: Io) -> IoOp {
    IoOp {
        id: 0,
        target: io.target,
        kind: io.kind,
        offset: io.offset,
        len: io.len,
        bufs: io.bufs,
        crcs: io.crcs,
        sums: io.sums,
        class: io.class,
    }
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
        match d.batch_again(seq, op_of(io).done(Err(IO), 1)) {
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
