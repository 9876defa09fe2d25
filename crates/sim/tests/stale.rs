//! Copies that a crash must not bring back, and data that it must not take, in orders of events that random
//! worlds hardly ever meet; and that each of these tests catches the mistake it is about.

mod common;
#[path = "common/judge.rs"]
mod judge;

use hearth_engine::api::{DiskConfig, Mode, ReqOp, Request};
use hearth_io::{BLOCK, Class, IoOp, OpKind, Target};
use judge::{Fate, Judged, disk, flushes_origin, writes_flash};

/// What decides how much of the unflushed a power cut leaves.
const SEEDS: u64 = 8;

fn around(id: u16) -> DiskConfig {
    DiskConfig {
        mode: Mode::WriteAround,
        ..disk(id)
    }
}

/// Long enough for intents to be closed and for that to be on flash.
fn close_intents(j: &mut Judged) {
    for _ in 0..10 {
        j.settle();
    }
}

/// A discard of less than a sector changes nothing, but it cancels the fill that is on its way. The
/// copy is on flash then, and no write past the cache knows of it.
#[test]
fn a_fill_that_was_cancelled_for_nothing_does_not_come_back() {
    let mut j = Judged::new(vec![around(1)]);
    let old = j.read(1, 5).expect("read");
    let at = 5 * BLOCK + 100;
    let op = ReqOp::Discard { fua: false };
    let tag = j.submit(|tag, now| Request::new(tag, 1, op, at, 200, None, now));
    j.wait(tag).expect("nothing to do");
    j.settle();
    assert_eq!(j.cached(1), 0, "the fill was not cancelled");
    j.write(1, 5, 1, 44).expect("written");
    close_intents(&mut j);
    j.crash();
    assert!(old != 44 && j.read(1, 5) == Ok(44));
}

/// Of a write that is cut in two, the first part is on flash and flushed. A flush that comes when all
/// of it is there must not take that for the whole.
#[test]
fn a_write_that_was_cut_in_two_is_durable_when_both_parts_are() {
    for seed in 0..SEEDS {
        let mut j = Judged::seeded(vec![disk(1)], seed);
        // A segment has 256 blocks, some of them for its summary.
        j.write(1, 0, 128, 11).expect("written");
        let mut parts = 0;
        j.judge(move |op| {
            parts += u32::from(is_batch(op));
            if is_batch(op) && parts == 2 {
                Fate::Held
            } else {
                Fate::Done
            }
        });
        let tag = j.send_write(1, 1000, 128, 22, false);
        while j.holds() == 0 {
            assert!(j.step(), "seed {seed}: it was not cut");
        }
        // Covers what is there, the first part too.
        j.flush(1).expect("flushed");
        assert_eq!(j.answer(tag), None);
        j.done();
        j.release();
        j.wait(tag).expect("written");
        j.flush(1).expect("flushed");
        j.power_cut();
        let there = j.read_run(1, 1000, 128).expect("read");
        assert!(there.iter().all(|byte| *byte == 22), "seed {seed}");
    }
}

/// A batch, not a summary: those have a place of their own and come later.
fn is_batch(op: &IoOp) -> bool {
    writes_flash(op) && op.class == Class::Foreground
}

/// Eviction has dropped a copy without a word; until the segment is free, a crash brings it back.
#[test]
fn an_evicted_copy_that_was_written_past_does_not_come_back() {
    let mut j = Judged::new(vec![around(1), disk(2)]);
    let old = j.read(1, 3).expect("read");
    j.settle();
    assert_eq!(j.cached(1), 1);
    // Something that has to be moved, which keeps the segment.
    j.write_fua(2, 900, 33).expect("written");
    j.settle();
    j.fill(2);
    let place = j.find(33) as u64 * BLOCK;
    j.judge(move |op| {
        let moves = op.target == Target::Flash(0)
            && op.kind == OpKind::Read
            && op.class == Class::Background
            && (op.offset..op.offset + op.len).contains(&place);
        if moves { Fate::Held } else { Fate::Done }
    });
    j.write_until(2, |j| j.holds() > 0 && j.cached(1) == 0);
    j.write(1, 3, 1, 44).expect("written");
    close_intents(&mut j);
    assert_eq!(j.holds(), 1, "the segment is still there");
    j.crash();
    assert!(old != 44 && j.read(1, 3) == Ok(44));
}

/// The oldest segment goes, and with it the only record of zeros that the origin does not know of.
#[test]
fn zeros_outlive_the_segment_that_says_so() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    // The origin takes none of it, so that the zeros stay ours.
    j.judge(|op| match op.target {
        Target::Origin(1) if op.kind != OpKind::Read => Fate::Refused,
        _ => Fate::Done,
    });
    let op = ReqOp::Discard { fua: true };
    let tag = j.submit(|tag, now| Request::new(tag, 1, op, 3 * BLOCK, BLOCK, None, now));
    j.wait(tag).expect("recorded");
    j.settle();
    j.fill(2);
    // Others, in a later segment.
    let tag = j.submit(|tag, now| Request::new(tag, 1, op, 9 * BLOCK, BLOCK, None, now));
    j.wait(tag).expect("recorded");
    let freed = |j: &Judged| j.engine.pool_stats().counters.segments_freed;
    j.write_until(2, |j| freed(j) > 1);
    j.crash();
    for block in [3, 9] {
        let there = j.origins[&1].visible_block(block)[0];
        assert_ne!(there, 0, "the origin was told");
        assert_eq!(j.read(1, block as u64), Ok(0));
    }
}

/// Written while the cache was off, and not flushed: a power cut takes it from the origin, and must not
/// leave it on flash.
#[test]
fn what_an_origin_may_lose_again_is_not_cached() {
    for seed in 0..SEEDS {
        let off = DiskConfig {
            mode: Mode::Off,
            ..disk(1)
        };
        let mut j = Judged::seeded(vec![off, disk(2)], seed);
        j.write(1, 3, 1, 44).expect("written");
        j.only(flushes_origin, Fate::Held);
        j.engine.set_mode(1, Mode::WriteAround).expect("known");
        j.disks[0].mode = Mode::WriteAround;
        assert_eq!(j.read(1, 3), Ok(44));
        j.settle();
        // Whatever was cached is durable.
        for block in 5..10 {
            j.write_fua(2, block, 5).expect("written");
            j.tick();
        }
        j.power_cut();
        j.done();
        let there = j.origins[&1].visible_block(3)[0];
        assert_eq!(j.read(1, 3), Ok(there), "seed {seed}");
    }
}

#[cfg(feature = "mutations")]
#[test]
fn the_mistakes_these_tests_are_about_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = judge::unnoticed(&[
        (
            Fault::SkipVoidFill,
            a_fill_that_was_cancelled_for_nothing_does_not_come_back,
        ),
        (
            Fault::SplitCountsEarly,
            a_write_that_was_cut_in_two_is_durable_when_both_parts_are,
        ),
        (
            Fault::ForgetEvictedCopies,
            an_evicted_copy_that_was_written_past_does_not_come_back,
        ),
        (
            Fault::SkipRelogZeros,
            zeros_outlive_the_segment_that_says_so,
        ),
    ]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
