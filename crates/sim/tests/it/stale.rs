//! Copies that a crash must not bring back, and data that it must not take, in orders of events that random
//! worlds hardly ever meet; and that each of these tests catches the mistake it is about.

use crate::judge::{Fate, Judged, disk, flushes_origin, writes_flash, writes_origin};
use hearth_engine::api::{DiskConfig, Mode, OriginState, ReqOp, Request};
use hearth_io::{BLOCK, Class, IoOp, Media, OpKind, Target};

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

/// Everything dirty is on its origin, durably, and flash says so.
fn destage_all(j: &mut Judged) {
    j.engine.drain(1, true).expect("known");
    close_intents(j);
    assert!(j.engine.status(1).expect("known").drained);
    j.engine.drain(1, false).expect("known");
    close_intents(j);
}

fn become_around(j: &mut Judged) {
    j.engine.set_mode(1, Mode::WriteAround).expect("known");
    j.disks[0].mode = Mode::WriteAround;
}

/// What the daemon before this one wrote is not durable because a new one has opened the origin.
#[test]
fn an_origin_of_which_nobody_knows_is_flushed_when_a_guest_asks() {
    for seed in 0..SEEDS {
        let mut j = Judged::seeded(vec![around(1)], seed);
        j.only(flushes_origin, Fate::Held);
        j.write(1, 3, 1, 44).expect("written");
        j.crash();
        j.engine.detach(1).expect("at rest");
        let attached = j.engine.attach(around(1), OriginState::Unknown);
        attached.expect("detached");
        j.flush(1).expect("flushed");
        j.power_cut();
        assert_eq!(j.read(1, 3), Ok(44), "seed {seed}");
    }
}

#[test]
fn zeros_that_the_origin_has_do_not_hide_what_was_written_past_them() {
    let mut j = Judged::new(vec![disk(1)]);
    let op = ReqOp::Discard { fua: true };
    let tag = j.submit(|tag, now| Request::new(tag, 1, op, 3 * BLOCK, BLOCK, None, now));
    j.wait(tag).expect("recorded");
    destage_all(&mut j);
    become_around(&mut j);
    j.write(1, 3, 1, 44).expect("written");
    close_intents(&mut j);
    j.crash();
    assert_eq!(j.read(1, 3), Ok(44));
}

/// A rotten copy costs something only where there is no other.
#[test]
fn what_became_clean_is_fetched_again_when_it_rots() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    destage_all(&mut j);
    j.crash();
    let at = j.find(33);
    j.flash.rot(at);
    assert_eq!(j.read(1, 3), Ok(33));
}

#[test]
fn a_write_across_two_regions_leaves_no_old_copy_in_either() {
    const BORDER: u64 = 4096;
    let mut j = Judged::new(vec![around(1)]);
    let old = j.read_run(1, BORDER - 1, 2).expect("read");
    assert!(old[0] != 44 && old[BLOCK as usize] != 44);
    j.settle();
    assert_eq!(j.cached(1), 2);
    // Answered, but that the copies are void is not on flash.
    j.write(1, BORDER - 1, 2, 44).expect("written");
    j.crash();
    assert_eq!(j.read(1, BORDER - 1), Ok(44));
    assert_eq!(j.read(1, BORDER), Ok(44));
}

/// The copy is on its way to flash when it is written past, and still is when the intent is closed. It and
/// what closes the intent reach flash, and then the process dies.
#[test]
fn a_fill_that_was_written_past_is_void_before_its_intent_is_closed() {
    for seed in 0..4 * SEEDS {
        let mut j = Judged::seeded(vec![around(1)], seed);
        // Nothing closes the intent.
        j.only(flushes_origin, Fate::Refused);
        j.write(1, 5, 1, 7).expect("written");
        let old = j.read(1, 3).expect("read");
        let mut batches = 0;
        j.judge(move |op| {
            batches += u32::from(is_batch(op));
            if flushes_origin(op) {
                Fate::Refused
            } else if is_batch(op) && batches == 1 {
                Fate::Held
            } else {
                Fate::Done
            }
        });
        while j.holds() == 0 {
            j.tick();
            while j.step() {}
        }
        j.write(1, 3, 1, 44).expect("written");
        let open = |j: &Judged| !j.engine.status(1).expect("known").drained;
        assert!(open(&j));
        j.judge(|_| Fate::Done);
        for _ in 0..400 {
            j.tick();
            while j.step() {}
        }
        // Somebody waits for the next batch, which closes the intent.
        j.send_write(1, 5000, 1, 7, false);
        while j.step() {}
        assert_eq!(j.holds(), 1);
        j.crash();
        assert!(old != 44 && j.read(1, 3) == Ok(44), "seed {seed}");
    }
}

/// The block is rotten on flash and given up, but what was read of it before is still on its way to the
/// origin.
#[test]
fn a_write_past_the_cache_waits_for_the_destager_though_nothing_is_dirty() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    j.only(writes_origin, Fate::Held);
    j.engine.drain(1, true).expect("known");
    while j.holds() == 0 {
        j.tick();
        while j.step() {}
    }
    let at = j.find(33);
    j.flash.rot(at);
    j.read(1, 3).expect_err("it is lost");
    j.engine.accept_loss(1).expect("known");
    become_around(&mut j);
    j.done();
    let tag = j.send_write(1, 3, 1, 44, false);
    for _ in 0..20 {
        j.tick();
        while j.step() {}
    }
    j.release();
    j.wait(tag).expect("written");
    close_intents(&mut j);
    assert_eq!(j.read(1, 3), Ok(44));
    assert_eq!(j.origins[&1].visible_block(3)[0], 44);
}

/// Writes and flushes of a stop, or a start, that may be the last.
const CUTS: u64 = 6;

fn with_something_unflushed(seed: u64) -> Judged {
    let mut j = Judged::seeded(vec![disk(1)], seed);
    j.write_fua(1, 3, 33).expect("written");
    j.write(1, 3, 1, 44).expect("written");
    j
}

#[test]
fn a_stop_that_is_cut_off_claims_nothing_that_is_not_durable() {
    for (seed, cut) in (0..4 * SEEDS).flat_map(|seed| (0..CUTS).map(move |cut| (seed, cut))) {
        let mut j = with_something_unflushed(seed);
        j.stop_cut_off(cut);
        let found = j.read(1, 3);
        assert!([Ok(33), Ok(44)].contains(&found), "seed {seed}: {found:?}");
    }
}

#[test]
fn a_start_that_is_cut_off_claims_nothing_that_is_not_durable() {
    for (seed, cut) in (0..4 * SEEDS).flat_map(|seed| (0..CUTS).map(move |cut| (seed, cut))) {
        let mut j = with_something_unflushed(seed);
        j.start_cut_off(cut);
        let found = j.read(1, 3);
        assert!([Ok(33), Ok(44)].contains(&found), "seed {seed}: {found:?}");
    }
}

/// A block of the origin changed while no daemon served the disk, and a write holds the block when the comparison ends.
/// Held blocks are not compared, so the stale copy must serve no read.
#[test]
fn held_copy_of_changed_origin_answers_no_read() {
    let mut j = Judged::new(vec![DiskConfig {
        mode: Mode::WriteThrough,
        ..disk(1)
    }]);
    let old = j.read(1, 5).expect("read");
    j.settle();
    // The copy in RAM goes with the process.
    j.crash();
    assert_eq!(j.cached(1), 1);
    j.engine.set_verified(1, false);
    let origin = j.origins.get_mut(&1).expect("it is there");
    let changed = origin
        .media(None)
        .write_at(5 * BLOCK, &[33; BLOCK as usize]);
    changed.expect("written by something else");
    j.only(writes_origin, Fate::Held);
    let tag = j.send_write(1, 5, 1, 44, false);
    while j.holds() == 0 {
        assert!(j.step(), "it was not written");
    }
    assert_eq!(j.engine.clean_sums(1, 0..8), [], "it is compared");
    j.engine.set_verified(1, true);
    let found = j.read(1, 5).expect("read");
    assert!(
        [33, 44].contains(&found),
        "it was {old}, and {found} is read"
    );
    j.done();
    j.release();
    j.wait(tag).expect("written");
    assert_eq!(j.read(1, 5), Ok(44));
    j.crash();
    assert_eq!(j.read(1, 5), Ok(44));
}

#[cfg(feature = "mutations")]
#[test]
fn the_mistakes_these_tests_are_about_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = crate::judge::unnoticed(&[
        (
            Fault::KeepUncompared,
            held_copy_of_changed_origin_answers_no_read,
        ),
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
        (
            Fault::TrustUnknownOrigin,
            an_origin_of_which_nobody_knows_is_flushed_when_a_guest_asks,
        ),
        (
            Fault::ReplayNoZerosTold,
            zeros_that_the_origin_has_do_not_hide_what_was_written_past_them,
        ),
        (
            Fault::ReplayNoCleaned,
            what_became_clean_is_fetched_again_when_it_rots,
        ),
        (
            Fault::IntentOneRegion,
            a_write_across_two_regions_leaves_no_old_copy_in_either,
        ),
        (
            Fault::ForgetCancelledFills,
            a_fill_that_was_written_past_is_void_before_its_intent_is_closed,
        ),
        (
            Fault::WritePastDestaging,
            a_write_past_the_cache_waits_for_the_destager_though_nothing_is_dirty,
        ),
        (
            Fault::CloseUnflushedHead,
            a_stop_that_is_cut_off_claims_nothing_that_is_not_durable,
        ),
        (
            Fault::SealUnflushed,
            a_start_that_is_cut_off_claims_nothing_that_is_not_durable,
        ),
    ]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
