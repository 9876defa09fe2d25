//! What a crash leaves behind of a log, and what no later start may believe of it: batches behind a hole,
//! numbers that are given again, earlier uses of a segment. Random worlds hardly ever keep just the writes that
//! this takes.

use crate::judge::{
    Fate, Judged, SEGMENT_BYTES, disk, flushes_flash, flushes_origin, writes_flash,
};
use hearth_engine::api::{DiskConfig, Mode};
use hearth_io::{BLOCK, Class, IoOp, OpKind, Target};
use std::cell::Cell;
use std::rc::Rc;

/// Content of the block that each of these tests is about.
const KEPT: u8 = 33;

/// Where segments begin.
const SEGMENTS: u64 = 6 << 20;

fn refused_by_origin_1(op: &IoOp) -> bool {
    matches!((op.target, op.kind), (Target::Origin(1), OpKind::Write))
}

/// What a start did not accept must be gone when the numbers of the batches before it are given again: then it
/// would look as if it followed them.
#[test]
fn what_was_not_accepted_does_not_come_true_later() {
    let mut j = Judged::new(vec![disk(1), disk(2), disk(3)]);
    // A start uses the first segment that is free, and that shall be one that came free before.
    for _ in 0..7 {
        j.write_fua(2, 900, 1).expect("written");
        j.roll(3);
        j.settle();
    }
    j.write_fua(1, 3, KEPT).expect("written");
    j.settle();
    let mut first = true;
    j.judge(move |op| match op.kind {
        _ if refused_by_origin_1(op) => Fate::Refused,
        _ if flushes_flash(op) => Fate::Held,
        _ if writes_flash(op) && std::mem::take(&mut first) => Fate::Volatile,
        _ => Fate::Done,
    });
    // The first batch of these never reaches flash; the second does, in a segment of its own, which is sealed.
    j.write(2, 100, 1, 55).expect("written");
    j.roll(3);
    j.write(1, 3, 1, 44).expect("written");
    j.roll(3);
    while j.step() {}
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT));
    // Nor is there a map that would not have it.
    j.judge(|op| match op.kind {
        _ if refused_by_origin_1(op) => Fate::Refused,
        _ if writes_flash(op) && op.offset < SEGMENTS => Fate::Held,
        _ => Fate::Done,
    });
    for block in 200..204 {
        j.write_fua(2, block, 9).expect("written");
        if block == 201 {
            j.roll(3);
        }
    }
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT), "nobody wrote since");
    assert_eq!(j.read(2, 203), Ok(9));
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
/// use of the segment has left there: a copy of a block that was written past it since. What says so need not
/// outlive the segment.
#[test]
fn a_summary_without_its_batches_vouches_for_nothing_else() {
    let around = DiskConfig {
        mode: Mode::WriteAround,
        ..disk(1)
    };
    // After one of these numbers of rounds it is the turn of that segment.
    for rounds in 0..30 {
        let mut j = Judged::new(vec![around.clone(), disk(2), disk(3)]);
        // A device may leave as it is what it is told to discard.
        j.only(|op| op.kind == OpKind::Discard, Fate::Volatile);
        let old = j.read(1, 3).expect("read");
        j.settle();
        assert!(j.cached(1) == 1 && old != 44);
        j.roll(3);
        j.write_fua(1, 3, 44).expect("written");
        for round in 0..rounds {
            j.write_fua(2, 3 + round % 5, round as u8).expect("written");
            j.roll(3);
            j.settle();
        }
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
        assert_eq!(j.read(1, 3), Ok(44), "after {rounds} rounds");
    }
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
    let unnoticed = crate::judge::unnoticed(&[
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
