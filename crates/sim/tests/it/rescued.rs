//! A log without room is helped by the superblock, and the power is cut at the worst moment of that. Random
//! worlds hardly ever starve a log, and then hardly ever meet that moment.

use crate::judge;
use crate::judge::{
    Fate, Judged, disk, flushes_flash, flushes_origin, writes_flash, writes_origin,
};
use hearth_engine::api::{DiskConfig, Mode};
use hearth_format::Superblock;
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_io::{BLOCK, Class, IoOp, OpKind, Target};
use hearth_policy::cleaning::Heads;
use std::cell::Cell;
use std::rc::Rc;

/// What the tests are about, in the oldest segment.
const KEPT: u8 = 33;
/// Where segments begin at the earliest; what lies before is superblocks, the map and the like.
const SEGMENTS: u64 = 6 << 20;
/// More than there are.
const SEGMENTS_MAX: u64 = 32;
/// Events until something dirty is on its origin; it takes far fewer.
const STEPS_MAX: usize = 10_000;
/// Of this disk there is nothing: forgetting it closes the head.
const NOTHING: u16 = 3;
/// Disks with something dirty, whose destaging spends a segment each.
const SPENDERS: [u16; 2] = [4, 5];

fn writes_batch(op: &IoOp) -> bool {
    writes_flash(op) && op.offset >= SEGMENTS && op.class == Class::Foreground
}

/// How much of flash is spent when is counted with one head.
fn disks(first: DiskConfig) -> Vec<DiskConfig> {
    judge::set_heads(Heads::One);
    disks_of(first)
}

fn disks_of(first: DiskConfig) -> Vec<DiskConfig> {
    let rest = [2, NOTHING, SPENDERS[0], SPENDERS[1]].map(disk);
    [first].into_iter().chain(rest).collect()
}

/// Closes heads with little in them until so many segments are free.
fn spend_to(j: &mut Judged, free: u64, mut write: impl FnMut(&mut Judged, u64)) {
    for at in 0..SEGMENTS_MAX {
        if j.engine.pool_stats().free_segments <= free {
            return;
        }
        j.roll(NOTHING);
        write(j, at);
        while j.step() {}
    }
    panic!("{}", j.engine.explain());
}

/// Guests get no room any more; but what says that something was destaged needs some.
fn spend_the_rest(j: &mut Judged) {
    for disk in SPENDERS {
        j.roll(NOTHING);
        j.engine.drain(disk, true).expect("known");
        j.release_only(|target| target == Target::Origin(disk));
        let clean = |j: &Judged| j.engine.status(disk).expect("known").dirty_blocks == 0;
        for _ in 0..STEPS_MAX {
            if clean(j) {
                break;
            }
            if !j.step() {
                j.tick();
            }
        }
        // Nobody waits for the record.
        j.settle();
    }
    j.roll(NOTHING);
    while j.step() {}
    assert_eq!(
        j.engine.pool_stats().free_segments,
        0,
        "{}",
        j.engine.explain()
    );
}

/// The floor that the superblock says.
fn floor(j: &mut Judged) -> u64 {
    let sb = Superblock::load(&mut j.flash.media(None));
    sb.expect("a superblock").clean_floor
}

/// What keeps the oldest segment, its move held by `judge`; then an intent of disk 1 in the same segment; an
/// old copy of block 3 of disk 1 in the next. That block is written past the cache, which its origin does not
/// answer yet. The log is starved by then.
fn starved_with_an_intent(judge: impl Fn(&IoOp) -> Option<Fate> + 'static) -> (Judged, u64) {
    judge::set_heads(Heads::One);
    starved_with(judge)
}

/// The same with as many heads as were set.
fn starved_with(judge: impl Fn(&IoOp) -> Option<Fate> + 'static) -> (Judged, u64) {
    let first = DiskConfig {
        mode: Mode::WriteAround,
        ..disk(1)
    };
    let mut j = Judged::new(disks_of(first));
    j.only(flushes_origin_1, Fate::Refused);
    j.write_fua(2, 3, KEPT).expect("written");
    for disk in SPENDERS {
        j.write_fua(disk, 3, 1).expect("written");
    }
    j.write(1, 5, 1, 7).expect("written");
    while j.step() {}
    j.roll(NOTHING);
    let old = j.read(1, 3).expect("read");
    j.settle();
    assert_eq!((j.cached(1), old == 44), (1, false));
    j.write_fua(2, 900, 1).expect("written");
    let place = j.find(KEPT) as u64 * BLOCK;
    j.judge(move |op| {
        let moves = op.target == Target::Flash(0)
            && op.kind == OpKind::Read
            && op.class == Class::Background
            && op.offset == place;
        match judge(op) {
            Some(fate) => fate,
            None if flushes_origin_1(op) => Fate::Refused,
            None if moves || writes_origin_1(op) => Fate::Held,
            None => Fate::Done,
        }
    });
    spend_to(&mut j, 2, |j, at| {
        j.write_fua(2, 901 + at, 1).expect("written")
    });
    let tag = j.send_write(1, 3, 1, 44, false);
    while j.step() {}
    assert_eq!(j.answer(tag), None);
    spend_the_rest(&mut j);
    (j, tag)
}

fn flushes_origin_1(op: &IoOp) -> bool {
    op.target == Target::Origin(1) && flushes_origin(op)
}

fn writes_origin_1(op: &IoOp) -> bool {
    op.target == Target::Origin(1) && op.kind == OpKind::Write
}

/// Everything is let go until the floor has risen, and some time longer.
fn be_rescued(j: &mut Judged, tag: u64) {
    j.release();
    for _ in 0..40 {
        j.settle();
    }
    assert_eq!(j.answer(tag), Some(Ok(())), "{}", j.engine.explain());
    assert!(floor(j) > 0, "{}", j.engine.explain());
}

/// The segment goes with its intent, and the record that the old copy is void was never written.
#[test]
fn a_copy_does_not_outlive_the_intent_that_was_given_up() {
    let (mut j, tag) = starved_with_an_intent(|_| None);
    j.judge(|op| match op.kind {
        _ if flushes_origin_1(op) => Fate::Refused,
        _ if writes_batch(op) => Fate::Never,
        _ => Fate::Done,
    });
    be_rescued(&mut j, tag);
    j.crash();
    assert_eq!(j.read(1, 3), Ok(44));
}

/// Two heads need more than one segment to go on, and get them.
#[test]
fn a_starved_log_of_two_heads_comes_free_and_keeps_what_it_was_told() {
    judge::set_heads(Heads::MovesApart);
    let (mut j, tag) = starved_with(|_| None);
    j.only(flushes_origin_1, Fate::Refused);
    be_rescued(&mut j, tag);
    j.crash();
    assert_eq!(j.read(1, 3), Ok(44));
    assert_eq!(j.read(2, 3), Ok(KEPT));
}

/// What was moved out of the segment that goes may be nowhere else.
#[test]
fn no_segment_goes_before_what_was_moved_is_durable() {
    let mut j = Judged::new(disks(disk(1)));
    j.write_fua(1, 3, KEPT).expect("written");
    // Not so old that they would be moved, too.
    spend_to(&mut j, 5, |j, at| {
        j.write(2, 800 + at, 1, 1).expect("written")
    });
    for disk in SPENDERS {
        j.write_fua(disk, 3, 1).expect("written");
    }
    let moved = Rc::new(Cell::new(false));
    let seen = moved.clone();
    j.judge(move |op| {
        let copies = writes_batch(op) && op.bufs.iter().any(|b| has_block_of(b.bytes(), KEPT));
        seen.set(seen.get() || copies);
        match seen.get() {
            _ if writes_origin_1(op) => Fate::Refused,
            _ if writes_origin(op) => Fate::Held,
            _ if copies => Fate::Volatile,
            true if flushes_flash(op) => Fate::Held,
            _ => Fate::Done,
        }
    });
    // Under way before nothing is durable any more.
    for disk in SPENDERS {
        j.engine.drain(disk, true).expect("known");
    }
    j.settle();
    assert_eq!(j.holds(), SPENDERS.len());
    spend_to(&mut j, 2, |j, at| {
        j.write(2, 901 + at, 1, 1).expect("written")
    });
    assert!(moved.get());
    spend_the_rest(&mut j);
    for _ in 0..40 {
        j.settle();
    }
    j.crash();
    assert_eq!(j.read(1, 3), Ok(KEPT));
}

fn has_block_of(bytes: &[u8], fill: u8) -> bool {
    let mut blocks = bytes.chunks(BLOCK as usize);
    blocks.any(|block| block.iter().all(|byte| *byte == fill))
}

/// Then one block that cannot be read, whichever it is, does not bring the older floor back.
#[test]
fn a_segment_is_free_when_both_superblocks_say_so() {
    for copy in SUPERBLOCK_BLOCKS {
        let (mut j, tag) = starved_with_an_intent(|_| None);
        let used = Rc::new(Cell::new(false));
        let seen = used.clone();
        j.judge(move |op| {
            seen.set(seen.get() || writes_batch(op));
            match op.kind {
                _ if flushes_origin_1(op) => Fate::Refused,
                _ if writes_batch(op) => Fate::Never,
                _ => Fate::Done,
            }
        });
        be_rescued(&mut j, tag);
        assert!(used.get(), "nothing is written where it was");
        let at = copy * BLOCK;
        j.flash.faults.bad_ranges.push(at..at + BLOCK);
        j.crash();
        assert_eq!(j.read(1, 3), Ok(44));
    }
}

/// The tests above are what catches these faults.
#[cfg(feature = "mutations")]
#[test]
fn faults_of_the_rescue_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = judge::unnoticed(&[
        (
            Fault::NoCleanFloor,
            a_copy_does_not_outlive_the_intent_that_was_given_up,
        ),
        (
            Fault::IgnoreCleanFloor,
            a_copy_does_not_outlive_the_intent_that_was_given_up,
        ),
        (
            Fault::FreeUndurable,
            no_segment_goes_before_what_was_moved_is_durable,
        ),
        (
            Fault::RescueOneCopy,
            a_segment_is_free_when_both_superblocks_say_so,
        ),
    ]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
