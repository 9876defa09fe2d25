//! An ordered disk over an origin that is away, or hangs: for how long its guest goes on, when it is told, and whom else that concerns.

use crate::judge::{Fate, Judged, disk};
use hearth_engine::api::{DiskConfig, Mode};
use hearth_io::{IoOp, OpKind, Target};
use std::cell::Cell;
use std::rc::Rc;

/// How far behind the origin may be.
const AGE_NS: u64 = 60_000_000_000;
/// Epochs that a guest makes: many more than wait for an origin of which nothing is known.
const EPOCHS: u64 = 40;
/// Periods until a disk is ordered; it takes a few.
const PERIODS: u32 = 50;

fn changes_origin_1(op: &IoOp) -> bool {
    op.target == Target::Origin(1) && op.kind != OpKind::Read
}

/// Disk 1 is ordered, and disk 2 is not.
fn ordered() -> Judged {
    let ordered = DiskConfig {
        mode: Mode::WriteBackOrdered,
        ..disk(1)
    };
    let mut j = Judged::new(vec![ordered, disk(2)]);
    j.engine.set_max_age(1, AGE_NS).expect("known");
    for _ in 0..PERIODS {
        j.settle();
    }
    assert!(j.engine.order(1, j.now()).is_some());
    j
}

/// For so long, or until it is answered; was it?
fn within(j: &mut Judged, tag: u64, ns: u64) -> bool {
    let until = j.now() + ns;
    while j.now() < until && j.answer(tag).is_none() {
        if !j.step() {
            j.tick();
        }
    }
    j.answer(tag) == Some(Ok(()))
}

fn rest(j: &mut Judged, ns: u64) {
    let until = j.now() + ns;
    while j.now() < until {
        j.settle();
    }
}

/// Writes and flushes one block after the other; how many epochs were made, each within so long.
fn epochs(j: &mut Judged, count: u64, each_ns: u64) -> u64 {
    for n in 0..count {
        let tag = j.send_write(1, n % 8, 1, n as u8, false);
        if !within(j, tag, each_ns) {
            return n;
        }
        j.flush(1).expect("flash has it");
    }
    count
}

fn is_late(j: &Judged) -> bool {
    j.engine.order(1, j.now()).expect("ordered").late
}

/// It stopped after eight flushes, for as long as the origin was away, and nobody was told.
#[test]
fn a_guest_goes_on_while_its_origin_is_away_until_that_is_as_far_behind_as_it_may_be() {
    let mut j = ordered();
    j.only(changes_origin_1, Fate::Refused);
    assert_eq!(epochs(&mut j, EPOCHS, AGE_NS / 100), EPOCHS);
    assert!(!is_late(&j));

    rest(&mut j, AGE_NS);
    let waits = j.send_write(1, 100, 1, 77, false);
    assert!(!within(&mut j, waits, AGE_NS / 10));
    assert!(is_late(&j));
    // Everything else of it is served.
    j.flush(1).expect("flash has what was answered");
    assert_eq!(j.read(1, (EPOCHS - 1) % 8), Ok((EPOCHS - 1) as u8));

    j.done();
    assert_eq!(j.wait(waits), Ok(()));
    rest(&mut j, AGE_NS);
    assert!(!is_late(&j));
    assert_eq!(epochs(&mut j, EPOCHS, AGE_NS / 100), EPOCHS);
}

/// An origin that does not answer may be no more than slow, so few epochs are let ahead of it; but whoever waits is told of, and if
/// it hangs, there is nothing to wait for.
#[test]
fn a_guest_that_stands_still_for_an_origin_that_has_not_answered_yet_is_told_of() {
    let mut j = ordered();
    j.only(changes_origin_1, Fate::Held);
    let made = epochs(&mut j, EPOCHS, AGE_NS / 1000);
    assert!((4..16).contains(&made), "{made}");
    assert!(!is_late(&j), "that may be over at once");
    rest(&mut j, AGE_NS / 20);
    assert!(is_late(&j), "long before it is too old");
    rest(&mut j, AGE_NS / 4);
    assert!(!is_late(&j));
    assert_eq!(epochs(&mut j, EPOCHS, AGE_NS / 100), EPOCHS);
    j.done();
    j.release();
    rest(&mut j, AGE_NS);
    assert!(!is_late(&j));
    assert_eq!(epochs(&mut j, EPOCHS, AGE_NS / 100), EPOCHS);
}

/// As long as it waited, what others had dirty was written back as fast as their origins took it, beside their guests.
#[test]
fn a_write_that_waits_for_its_own_order_hurries_nobody() {
    let mut j = ordered();
    let others = Rc::new(Cell::new(0));
    let seen = others.clone();
    j.judge(move |op| match op.target {
        Target::Origin(2) if op.kind == OpKind::Write => {
            seen.set(seen.get() + 1);
            Fate::Done
        }
        _ if changes_origin_1(op) => Fate::Refused,
        _ => Fate::Done,
    });
    assert_eq!(epochs(&mut j, EPOCHS, AGE_NS / 100), EPOCHS);
    j.write_fua(2, 5, 55).expect("written");
    rest(&mut j, AGE_NS);
    let waits = j.send_write(1, 100, 1, 77, false);
    assert!(!within(&mut j, waits, AGE_NS / 10));
    assert!(is_late(&j));
    assert_eq!(others.get(), 0, "nobody needs that");
    j.done();
    assert_eq!(j.wait(waits), Ok(()));
}
