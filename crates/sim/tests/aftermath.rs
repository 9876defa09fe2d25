//! What a crash leaves behind of a log, and what no later start may believe of it: batches behind a hole,
//! numbers that are given again, earlier uses of a segment. Random worlds hardly ever keep just the writes that
//! this takes.

mod common;
#[path = "common/judge.rs"]
mod judge;

use hearth_engine::api::{DiskConfig, Mode};
use hearth_io::{BLOCK, Class, IoOp, OpKind, Target};
use judge::{Fate, Judged, SEGMENT_BYTES, disk, flushes_flash, flushes_origin, writes_flash};
use std::cell::Cell;
use std::rc::Rc;

/// Content of the block that each of these tests is about.
const KEPT: u8 = 33;

fn refused_by_origin_1(op: &IoOp) -> bool {
    matches!((op.target, op.kind), (Target::Origin(1), OpKind::Write))
}

/// Block 3 of disk 1, dirty and durable in the oldest segment, is moved by eviction, and the oldest segment
/// leaves the log. The batch with the copy and all that follows in its segment never reach flash, and flushes
/// do not end; but batches in the next segment do reach it, which name the new tail.
fn a_hole_where_the_only_copy_should_be() -> Judged {
    let mut j = Judged::new(vec![disk(1), disk(2), disk(3)]);
    // Two segments that come free before: a start uses the first that is free, and that is one of these.
    for _ in 0..2 {
        j.write_fua(2, 900, 1).expect("written");
        j.roll(3);
    }
    j.write_fua(1, 3, KEPT).expect("written");
    j.settle();
    j.fill(2);
    let hole = Rc::new(Cell::new(None));
    let lost = hole.clone();
    j.judge(move |op| {
        let segment = op.offset / SEGMENT_BYTES;
        let copies = writes_flash(op) && op.bufs.iter().any(|b| has_block_of(b.bytes(), KEPT));
        if copies && lost.get().is_none() {
            lost.set(Some(segment));
        }
        match lost.get() {
            _ if refused_by_origin_1(op) => Fate::Refused,
            Some(_) if flushes_flash(op) => Fate::Held,
            Some(hole) if writes_flash(op) && segment == hole => Fate::Volatile,
            _ => Fate::Done,
        }
    });
    j.write_until(2, |_| hole.get().is_some());
    while j.step() {}
    j.roll(3);
    j.write(2, 100, 1, 55).expect("written");
    while j.step() {}
    j
}

fn has_block_of(bytes: &[u8], fill: u8) -> bool {
    let mut blocks = bytes.chunks(BLOCK as usize);
    blocks.any(|block| block.iter().all(|byte| *byte == fill))
}

/// A tail holds only if what names it is durable: what was moved out of the segments before it lies in
/// front of that.
#[test]
fn a_tail_behind_a_hole_frees_nothing() {
    let mut j = a_hole_where_the_only_copy_should_be();
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT));
}

/// What a start did not accept must be gone when the numbers of its batches are given again, and durable:
/// then it would look as if it were, and so would the tail it names.
#[test]
fn what_was_not_accepted_does_not_come_true_later() {
    let mut j = a_hole_where_the_only_copy_should_be();
    // Its summary is the last that was written.
    j.roll(3);
    while j.step() {}
    j.crash();
    let place = j.find(KEPT) as u64 * BLOCK;
    j.judge(move |op| {
        let moves = op.target == Target::Flash(0)
            && op.kind == OpKind::Read
            && op.class == Class::Background
            && (op.offset..op.offset + op.len).contains(&place);
        match moves {
            _ if refused_by_origin_1(op) => Fate::Refused,
            true => Fate::Held,
            false => Fate::Done,
        }
    });
    for block in 0..40 {
        j.write_fua(2, 200 + block, 9).expect("written");
    }
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT));
}

/// An intent is closed behind the record that its old copies are void. That record is lost, and what
/// closes the intent is not.
#[test]
fn what_closes_an_intent_does_not_count_behind_a_hole() {
    let around = DiskConfig {
        mode: Mode::WriteAround,
        ..disk(1)
    };
    let mut j = Judged::new(vec![around, disk(2), disk(3)]);
    let old = j.read(1, 3).expect("read");
    j.settle();
    assert_eq!(j.cached(1), 1);
    j.write_fua(2, 900, 1).expect("written");
    let begun = Rc::new(Cell::new(false));
    let seen = begun.clone();
    j.judge(move |op| {
        seen.set(seen.get() || refused_by_origin_1(op));
        match seen.get() {
            true if writes_flash(op) => Fate::Volatile,
            true if flushes_flash(op) || flushes_origin(op) => Fate::Held,
            _ => Fate::Done,
        }
    });
    j.write(1, 3, 1, 44).expect("written");
    assert!(begun.get());
    j.settle();
    j.roll(3);
    while j.step() {}
    j.only(flushes_flash, Fate::Held);
    j.release_only(|op| matches!(op, Target::Origin(_)));
    for _ in 0..10 {
        j.settle();
    }
    assert!(j.engine.status(1).expect("known").drained, "it is closed");
    j.crash();
    assert!(old != 44 && j.read(1, 3) == Ok(44));
}

/// A summary may reach flash before the batches it tells of. What stands in their place is what an earlier
/// use of the segment has left there.
#[test]
fn a_summary_without_its_batches_vouches_for_nothing_else() {
    let mut j = Judged::new(vec![disk(1), disk(2), disk(3)]);
    // A device may leave as it is what it is told to discard.
    j.only(|op| op.kind == OpKind::Discard, Fate::Volatile);
    for round in 0..3 * j.engine.pool_stats().segments {
        j.write_fua(1, 3 + round % 5, round as u8).expect("written");
        j.roll(3);
        j.settle();
    }
    let there: Vec<_> = (3..8).map(|block| j.read(1, block)).collect();
    j.judge(|op| match op.class {
        _ if flushes_flash(op) => Fate::Held,
        _ if op.kind == OpKind::Discard => Fate::Volatile,
        Class::Foreground if writes_flash(op) => Fate::Volatile,
        _ => Fate::Done,
    });
    j.write(2, 900, 1, 99).expect("written");
    j.roll(3);
    while j.step() {}
    j.crash();
    let found: Vec<_> = (3..8).map(|block| j.read(1, block)).collect();
    assert_eq!(found, there);
}

/// A head whose first batch is lost leaves no trace of its number. If that were given again, what follows in
/// the segment would be taken for what follows the new first batch.
#[test]
fn the_number_of_a_segment_that_was_lost_is_not_given_again() {
    let mut j = Judged::new(vec![disk(1)]);
    let before = j.read(1, 5).expect("read");
    let mut first = true;
    j.judge(move |op| match std::mem::take(&mut first) {
        true if writes_flash(op) => Fate::Volatile,
        _ if flushes_flash(op) => Fate::Held,
        _ => Fate::Done,
    });
    j.write(1, 3, 1, 44).expect("written");
    j.write(1, 5, 1, 55).expect("written");
    j.crash();
    assert_eq!(j.read(1, 5), Ok(before));
    j.write(1, 3, 1, 44).expect("written");
    j.crash();
    assert_eq!(j.read(1, 5), Ok(before), "nobody wrote since");
}

/// The block of a batch that nothing vouches for cannot be read at a start, and later it can. By then the
/// start has answered as if it never was.
#[test]
fn what_was_cut_off_does_not_come_back_with_its_block() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, KEPT).expect("written");
    j.only(flushes_flash, Fate::Held);
    j.write(1, 3, 1, 44).expect("written");
    let at = j.find(44) as u64;
    j.flash.faults.bad_ranges.push(at * BLOCK..(at + 1) * BLOCK);
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT));
    // What can be read no more is what the start wrote about the segment, at its end.
    let end = (at * BLOCK / SEGMENT_BYTES + 1) * SEGMENT_BYTES;
    j.flash.faults.bad_ranges.clear();
    j.flash.faults.bad_ranges.push(end - 2 * BLOCK..end);
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT), "nobody wrote since");
}

/// The tests above are what catches these faults.
#[cfg(feature = "mutations")]
#[test]
fn faults_in_what_a_start_believes_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = judge::unnoticed(&[
        (Fault::AnyTail, a_tail_behind_a_hole_frees_nothing),
        (
            Fault::SkipWipe,
            what_was_not_accepted_does_not_come_true_later,
        ),
        (
            Fault::ReplayPastGap,
            what_closes_an_intent_does_not_count_behind_a_hole,
        ),
        (
            Fault::KeepStrangers,
            a_summary_without_its_batches_vouches_for_nothing_else,
        ),
        (
            Fault::RepeatNumbers,
            the_number_of_a_segment_that_was_lost_is_not_given_again,
        ),
        (
            Fault::SkipCut,
            what_was_cut_off_does_not_come_back_with_its_block,
        ),
    ]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
