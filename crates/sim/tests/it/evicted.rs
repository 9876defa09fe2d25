//! Eviction beside all else: what it moves, frees and drops while guests write the same blocks. Random worlds
//! hardly ever meet it at the moments that matter.

use crate::judge::{Fate, Judged, disk, flushes_origin, writes_flash, writes_origin};
use hearth_engine::api::{DiskConfig, Mode, Request};
use hearth_io::{BLOCK, Buf, Class, IoOp, OpKind, Target};

fn around(id: u16) -> DiskConfig {
    DiskConfig {
        mode: Mode::WriteAround,
        ..disk(id)
    }
}

/// A batch, not a summary.
fn is_batch(op: &IoOp) -> bool {
    writes_flash(op) && op.class == Class::Foreground
}

fn carries(op: &IoOp, content: &[u8]) -> bool {
    let mut blocks = op
        .bufs
        .iter()
        .flat_map(|b| b.bytes().chunks(BLOCK as usize));
    blocks.any(|block| block == content)
}

/// A copy is on its way from the oldest segment to the newest when what it is a copy of is written.
#[test]
fn a_copy_that_was_written_past_while_it_was_moved_is_not_found_again() {
    let mut j = Judged::new(vec![around(1), disk(2)]);
    // Nothing closes the intent, so the write below has to wait for nothing.
    j.only(flushes_origin, Fate::Refused);
    j.write(1, 5, 1, 7).expect("written");
    let old = j.read_run(1, 3, 1).expect("read");
    j.settle();
    // It is in use.
    for _ in 0..4 {
        j.read(1, 3).expect("read");
    }
    assert_eq!(j.cached(1), 1);
    j.fill(2);
    let moved = old.clone();
    j.judge(move |op| match is_batch(op) && carries(op, &moved) {
        _ if flushes_origin(op) => Fate::Refused,
        true => Fate::Held,
        false => Fate::Done,
    });
    j.write_until(2, |j| j.holds() > 0);
    j.write(1, 3, 1, 44).expect("written");
    j.done();
    j.release();
    j.settle();
    assert_eq!(j.read(1, 3), Ok(44));
}

/// A disk at its maximum drops its own blocks, but none of which something newer is on its way to flash.
#[test]
fn what_a_full_disk_drops_is_not_what_is_being_written() {
    let small = DiskConfig {
        max_bytes: 4 * BLOCK,
        ..disk(1)
    };
    let mut j = Judged::new(vec![small, disk(2)]);
    for block in 0..4 {
        j.read(1, block).expect("read");
    }
    j.settle();
    assert_eq!(j.cached(1), 4);
    j.only(is_batch, Fate::Held);
    let tag = j.send_write(1, 0, 4, 44, false);
    while j.step() {}
    assert_eq!((j.answer(tag), j.holds()), (None, 1));
    // A copy for which there is no room.
    j.read(1, 10).expect("read");
    j.settle();
    // The origin takes nothing of it.
    j.only(writes_origin, Fate::Refused);
    j.release();
    j.wait(tag).expect("written");
    j.settle();
    j.flush(1).expect("flushed");
    j.crash();
    assert_eq!(j.read_run(1, 0, 4), Ok(vec![44; 4 * BLOCK as usize]));
}

/// What is read from a segment must be there until it was read.
#[test]
fn a_segment_that_is_read_is_not_written() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    let there = j.read_run(1, 3, 2).expect("read");
    j.settle();
    j.fill(2);
    let place = j.place_of(&there[..BLOCK as usize]) as u64 * BLOCK;
    j.judge(move |op| {
        let reads = op.target == Target::Flash(0) && op.kind == OpKind::Read;
        match reads && op.class == Class::Foreground && op.offset == place {
            true => Fate::Held,
            false => Fate::Done,
        }
    });
    let buf = Buf::zeroed(3 * BLOCK as usize);
    // With a block that is not cached: what is, is pinned like that of any other request.
    let tag = j.submit(|tag, now| Request::read(tag, 1, 3 * BLOCK, 3 * BLOCK, &buf, now));
    assert_eq!(j.holds(), 1);
    let writes: Vec<u64> = (0..100)
        .map(|_| {
            let tag = j.send_write(2, 512, 64, 9, false);
            j.settle();
            tag
        })
        .collect();
    assert!(writes.iter().any(|tag| j.answer(*tag).is_none()));
    j.done();
    j.release();
    j.wait(tag).expect("read");
    assert!(buf.all().bytes()[..there.len()] == there[..]);
    let stats = j.engine.stats(1, 1).expect("known");
    assert_eq!(stats.counters.bad_clean_blocks, 0);
    for tag in writes {
        j.wait(tag).expect("written");
    }
}

/// A block was written and destaged, and the segment that says so goes before the one in which it lies. Then it
/// is written past the cache: a crash must not destage the old content over that.
#[test]
fn what_was_destaged_stays_so_when_the_segment_that_says_it_goes() {
    const NOTHING: u16 = 3;
    let mut j = Judged::new(vec![disk(1), disk(2), disk(NOTHING)]);
    // So much more lies beside it that its segment stays.
    j.write_fua(1, 3, 33).expect("written");
    j.write_fua(1, 900, 33).expect("written");
    j.read_run(1, 100, 200).expect("read");
    j.settle();
    j.roll(NOTHING);
    j.engine.drain(1, true).expect("known");
    for _ in 0..20 {
        j.settle();
    }
    assert!(j.engine.status(1).expect("known").drained);
    j.engine.drain(1, false).expect("known");
    for _ in 0..16 {
        j.roll(NOTHING);
        j.write_fua(2, 900, 1).expect("written");
        j.settle();
    }
    j.engine.set_mode(1, Mode::WriteAround).expect("set");
    j.disks[0].mode = Mode::WriteAround;
    j.settle();
    let mut past = false;
    j.judge(move |op| {
        past |= writes_origin(op);
        match past {
            true if writes_flash(op) => Fate::Volatile,
            true if op.target == Target::Flash(0) && op.kind == OpKind::Flush => Fate::Held,
            _ => Fate::Done,
        }
    });
    j.write_fua(1, 3, 44).expect("written");
    j.crash();
    j.rest();
    assert_eq!(j.read(1, 3), Ok(44));
    assert_eq!(j.origins[&1].visible_block(3)[0], 44);
}

/// The tests above are what catches these faults.
#[cfg(feature = "mutations")]
#[test]
fn faults_of_eviction_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = crate::judge::unnoticed(&[
        (
            Fault::MoveOverNewer,
            a_copy_that_was_written_past_while_it_was_moved_is_not_found_again,
        ),
        (
            Fault::DropBehindNewer,
            what_a_full_disk_drops_is_not_what_is_being_written,
        ),
        (Fault::FreePinned, a_segment_that_is_read_is_not_written),
        (
            Fault::SkipRelogClean,
            what_was_destaged_stays_so_when_the_segment_that_says_it_goes,
        ),
    ]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
