//! Duties of the engine that a world of random requests shows too seldom, step by step: a disk that
//! grows, one flash device under origins of different speed, the note of a failed device.

use crate::grown;
use crate::judge::{Fate, Judged, disk, flushes_flash, writes_flash};
use hearth_engine::FlashFault;
use hearth_engine::api::{DiskConfig, Mode, ReqOp, Request};
use hearth_engine::faults::Faults;
use hearth_io::{BLOCK, Buf, Target};
use hearth_sim::device::Tear;
use std::cell::RefCell;
use std::rc::Rc;

/// A power cut at the very moment a disk of an odd size has grown: what its last block was padded with
/// is not served for what the origin holds there.
#[test]
fn a_grown_disk_never_shows_its_old_padding() {
    for seed in 0..20 {
        let served = grown::padding_is_served(seed, Faults::default());
        assert!(!served, "seed {seed}: padding is served");
    }
}

/// Flash slower than one disk's origin and faster than another's: the first goes past it, the second,
/// whose hits would take ten times as long there, does not.
#[test]
fn a_slow_origin_is_not_asked_because_another_is_fast() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    j.latency = |target| match target {
        Target::Flash(_) => 1_500_000,
        Target::Origin(1) => 100_000,
        Target::Origin(_) => 10_000_000,
    };
    for (id, first) in [(2, 0), (1, 0)] {
        for block in first..first + 64 {
            j.read(id, block).expect("read");
        }
        j.settle();
    }
    assert_eq!(j.cached(1) + j.cached(2), 128);
    let pair = |j: &mut Judged, id: u16, block: u64| {
        let tags: Vec<u64> = (block..block + 4)
            .map(|b| {
                let buf = Buf::zeroed(BLOCK as usize);
                j.submit(|tag, now| Request::read(tag, id, b * BLOCK, BLOCK, &buf, now))
            })
            .collect();
        for tag in tags {
            j.wait(tag).expect("read");
        }
    };
    for round in 0..250u64 {
        // The fast origin is missing all the while.
        j.read(1, 1000 + round * 7).expect("read");
        pair(&mut j, 2, round * 4 % 64);
        pair(&mut j, 1, round * 4 % 64);
    }
    let bypassed = |id| {
        let stats = j.engine.stats(id, 1).expect("known");
        stats.counters.bypassed_congested
    };
    assert_eq!(
        bypassed(2),
        0,
        "hits of the disk on the slow origin went there"
    );
    assert!(
        bypassed(1) > 100,
        "flash is not slow enough for this test: {}",
        bypassed(1)
    );
}

/// The flash file is removed while a flush and a write with FUA wait for the device: both wait until the
/// origin has everything, like those that come a moment later, and neither fails.
#[test]
fn what_waits_for_flash_when_its_file_is_removed_does_not_fail() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write(1, 3, 1, 7).expect("written");
    j.only(flushes_flash, Fate::Held);
    let flush = j.submit(|tag, now| Request::new(tag, 1, ReqOp::Flush, 0, 0, None, now));
    let fua = j.send_write(1, 5, 1, 8, true);
    j.settle();
    assert_eq!((j.answer(flush), j.answer(fua)), (None, None));
    j.done();
    j.engine
        .give_flash_up(FlashFault::Leaving, true, 0, &mut j.fx);
    j.collect();
    // As the daemon does.
    j.engine.drain(1, true).expect("known");
    j.release();
    j.wait(flush).expect("flushed");
    j.wait(fua).expect("written");
    for (block, fill) in [(3, 7), (5, 8)] {
        let there = j.origins[&1].stored_block(block);
        assert!(there.iter().all(|x| *x == fill), "block {block}");
    }
}

/// A power cut while the failure of flash is noted on it: one copy of the superblock is always whole.
#[test]
fn the_note_of_a_failure_never_endangers_both_superblocks() {
    const COPIES: [u64; 2] = [0, 256 * BLOCK];
    let mut noted = 0;
    for seed in 0..40 {
        for steps in 0..8 {
            let mut j = Judged::torn(vec![disk(1)], seed, Tear::Anywhere);
            j.write_fua(1, 3, 1).expect("written");
            let unflushed = Rc::new(RefCell::new(Vec::new()));
            let seen = unflushed.clone();
            let mut failed = false;
            j.judge(move |op| {
                if flushes_flash(op) && !failed {
                    failed = true;
                    return Fate::Denied;
                }
                let copy = COPIES.contains(&op.offset) && writes_flash(op);
                if copy {
                    seen.borrow_mut().push(op.offset);
                    assert_eq!(
                        seen.borrow().len(),
                        1,
                        "both copies are on their way at once"
                    );
                }
                if flushes_flash(op) {
                    seen.borrow_mut().clear();
                }
                Fate::Done
            });
            let tag = j.send_write(1, 4, 1, 2, true);
            while unflushed.borrow().is_empty() {
                if !j.step() {
                    j.tick();
                }
            }
            for _ in 0..steps {
                j.step();
            }
            let _ = j.answer(tag);
            // It opens, or this panics.
            noted += u32::from(j.power_cut().was_failed);
        }
    }
    assert!(noted > 0, "the failure was never noted");
}

/// It was done, so nobody looks at it any more; then a write opens an intent of it that waited for room in the
/// log.
#[test]
fn a_disk_that_is_drained_is_looked_at_again_when_a_write_that_waited_goes_on() {
    let around = DiskConfig {
        mode: Mode::WriteAround,
        ..disk(1)
    };
    let mut j = Judged::new(vec![around, disk(2)]);
    j.only(flushes_flash, Fate::Held);
    // Nothing comes free.
    let mut writes = Vec::new();
    for at in 0.. {
        let tag = j.send_write(2, at % 8, 1, 1, false);
        j.settle();
        writes.push(tag);
        if j.answer(tag).is_none() {
            break;
        }
    }
    let waits = j.send_write(1, 3, 1, 44, false);
    j.engine.drain(1, true).expect("known");
    for _ in 0..4 {
        j.tick();
    }
    assert_eq!(j.answer(waits), None);
    assert!(j.engine.explain().contains("WaitsForRecordRoom"));
    j.done();
    j.release();
    while j.answer(waits).is_none() {
        if !j.step() {
            j.tick();
        }
        let overlooked = j.engine.overlooked(j.now());
        assert!(overlooked.is_empty(), "{overlooked:?}");
    }
    for tag in writes {
        j.wait(tag).expect("written");
    }
}
