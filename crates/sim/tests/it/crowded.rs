//! What one disk asks for must not take the room that eviction needs for all.

use crate::judge::{BLOCKS, Fate, Judged, disk};
use hearth_engine::api::{DiskConfig, ReqOp, Request};
use hearth_io::{BLOCK, OpKind, Target};

fn discard(j: &mut Judged, disk: u16, block: u64) -> u64 {
    let op = ReqOp::Discard { fua: false };
    j.submit(|tag, now| Request::new(tag, disk, op, block * BLOCK, BLOCK, None, now))
}

/// Reads that fill flash several times over.
fn turn_over(j: &mut Judged, disk: u16) {
    for _ in 0..4 {
        for block in (0..BLOCKS).step_by(64) {
            j.read_run(disk, block, 64).expect("read");
        }
    }
}

/// A minimum that is all there is would leave eviction nothing to drop, and it would move blocks around
/// for ever.
#[test]
fn a_minimum_of_everything_moves_nothing_in_a_circle() {
    let all = DiskConfig {
        min_bytes: 1 << 30,
        ..disk(1)
    };
    let mut j = Judged::new(vec![all, disk(2)]);
    turn_over(&mut j, 1);
    let moved = |j: &Judged| j.engine.stats(1, 1).expect("known").counters.reinsertions;
    let before = moved(&j);
    for block in 0..512 {
        j.write(2, block, 1, 5).expect("written");
    }
    j.rest();
    let moves = moved(&j) - before;
    // Each segment freed for them costs a few.
    assert!(moves < 16 * 512, "{moves}");
    let still = moved(&j);
    j.rest();
    assert_eq!(moved(&j), still);
    // Most of it is kept.
    let cached = j.cached(1);
    turn_over(&mut j, 2);
    assert!(j.cached(1) * 2 > cached, "{} of {cached}", j.cached(1));
}

/// Minimums that are more than there is, as after a device was lost, are kept in proportion, whoever reads last and most.
#[test]
fn minimums_of_more_than_there_is_are_kept_in_proportion() {
    let wants = |id, min_bytes| DiskConfig {
        min_bytes,
        ..disk(id)
    };
    let mut j = Judged::roomy(
        vec![wants(1, 2 << 30), wants(2, 1 << 30), disk(3)],
        48 << 20,
    );
    turn_over(&mut j, 2);
    for _ in 0..6 {
        turn_over(&mut j, 1);
    }
    let mut seen = Vec::new();
    for reader in [3, 2, 3, 2] {
        turn_over(&mut j, reader);
        seen.push((j.cached(1), j.cached(2)));
    }
    // What of flash is free for eviction is nobody's. The first one takes its share only as fast as what it reads is admitted.
    let kept = 9700;
    for (first, second) in seen {
        assert!(first * 10 > kept * 2 / 3 * 7, "{first} of {kept}");
        assert!(second * 10 > kept / 3 * 9, "{second} of {kept}");
    }
}

/// Discards of a disk whose origin hangs wait before their records fill the log, and only they.
#[test]
fn many_discards_do_not_fill_the_log() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    j.judge(|op| match (op.target, op.kind) {
        (Target::Origin(1), OpKind::WriteZeroes { .. } | OpKind::Discard) => Fate::Held,
        _ => Fate::Done,
    });
    let discards: Vec<u64> = (0..BLOCKS / 2)
        .map(|i| {
            let tag = discard(&mut j, 1, i * 2);
            for _ in 0..8 {
                j.step();
            }
            tag
        })
        .collect();
    j.settle();
    assert!(discards.iter().any(|tag| j.answer(*tag).is_none()));
    turn_over(&mut j, 2);
    j.write(2, 1, 64, 7).expect("written");
    let tag = discard(&mut j, 2, 5);
    j.wait(tag).expect("discarded");
    assert_eq!(j.read(2, 5), Ok(0));
    j.flush(2).expect("flushed");
    // Its own writes that leave no more runs than there are go on; so do discards.
    let waits = discards.iter().position(|tag| j.answer(*tag).is_none());
    let waits = waits.expect("some wait") as u64 * 2;
    j.write(1, 1, 1, 8).expect("written");
    j.write(1, BLOCKS - 1, 1, 8).expect("written");
    j.write(1, 0, 1, 8).expect("written");
    let tag = discard(&mut j, 1, 1);
    j.wait(tag).expect("discarded");
    let tag = discard(&mut j, 1, 2);
    j.wait(tag).expect("discarded");
    assert!(waits > 100, "{waits}");
    // It comes back, and takes them all.
    j.done();
    j.release();
    for tag in discards {
        j.wait(tag).expect("discarded");
    }
    assert_eq!(j.read(1, 8), Ok(0));
    assert_ne!(j.read(1, 9), Ok(0));
}

/// Writes into one long run of zeros cut it in two each, and many at once may pass the limit together.
/// Those of a disk whose origin hangs then leave the others their share.
#[test]
fn many_cuts_at_once_leave_others_their_share() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    j.judge(|op| match (op.target, op.kind) {
        (Target::Origin(1), OpKind::WriteZeroes { .. } | OpKind::Discard | OpKind::Write) => {
            Fate::Held
        }
        _ => Fate::Done,
    });
    let op = ReqOp::Discard { fua: false };
    let all = BLOCKS * BLOCK;
    let tag = j.submit(|tag, now| Request::new(tag, 1, op, 0, all, None, now));
    j.wait(tag).expect("discarded");
    let writes: Vec<u64> = (1..BLOCKS / 2)
        .map(|i| j.send_write(1, i * 2, 1, 9, false))
        .collect();
    j.settle();
    assert!(writes.iter().any(|tag| j.answer(*tag).is_none()));
    // What is behind those that wait has to be far from them.
    j.write(1, BLOCKS - 1, 1, 8).expect("at the end of a run");
    for block in 0..8 {
        let tag = discard(&mut j, 2, block * 2);
        j.wait(tag).expect("discarded");
        j.write(2, 100 + block, 1, 7).expect("written");
    }
    turn_over(&mut j, 2);
    j.done();
    j.release();
    for tag in writes {
        j.wait(tag).expect("written");
    }
    assert_eq!((j.read(1, 8), j.read(1, 9)), (Ok(9), Ok(0)));
}

/// A maximum that is lowered gives its blocks up without taking the room of others.
#[test]
fn a_lowered_maximum_leaves_others_alone() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    for block in (0..256).step_by(64) {
        j.read_run(2, block, 64).expect("read");
    }
    // Each block a run of its own.
    for block in (0..BLOCKS).step_by(2) {
        if j.engine.pool_stats().free_segments <= 5 {
            break;
        }
        j.read(1, block).expect("read");
    }
    j.settle();
    let (before, others) = (j.cached(1), j.cached(2));
    assert!(before > 500 && others == 256, "{before} {others}");
    // Far too much for a record each.
    j.engine.set_limits(1, 0, 16 * BLOCK).expect("set");
    for i in 0..2000 {
        j.tick();
        if i == 0 {
            while j.step() {}
            assert_eq!(j.cached(1), before);
        }
        if i % 64 == 0 {
            j.write(2, 4096 + i, 1, 3).expect("written");
        }
        while j.step() {}
    }
    assert!(j.cached(2) >= others, "{} {others}", j.cached(2));
    // What it reads itself brings it down, and so does the log, as it turns.
    let lowered = j.cached(1);
    for block in (1..1024).step_by(2) {
        j.read(1, block).expect("read");
        j.read(1, block).expect("read again");
    }
    assert!(j.cached(1) < lowered, "{} {lowered}", j.cached(1));
    for block in (0..BLOCKS).step_by(64) {
        j.write(2, block, 64, 4).expect("written");
    }
    j.rest();
    assert!(j.cached(1) <= 16, "{}", j.cached(1));
}
