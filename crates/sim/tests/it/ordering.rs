//! Orders of events after which nothing old may come back and nothing may wait for ever, step by step:
//! blocks that are lost while they are moved, evictions that a stop or a crash interrupts, batches
//! that are sent twice, flash and origins that fail between two steps.

use crate::common;
use crate::judge::{
    BLOCKS, Fate, Judged, disk, flushes_flash, flushes_origin, reads_flash, writes_flash,
    writes_origin,
};
use hearth_engine::api::{DiskConfig, FlashFault, Home, Mode, ReqError, ReqOp, Request};
use hearth_engine::{ControlError, OpenedFrom};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Buf, Class, IoOp, OpKind, Target};

fn in_mode(mode: Mode, id: u16) -> DiskConfig {
    DiskConfig { mode, ..disk(id) }
}

fn around(id: u16) -> DiskConfig {
    in_mode(Mode::WriteAround, id)
}

/// Its checksum is wrong wherever it is, and that must not pass for the end of the log.
#[test]
fn a_rotten_block_that_is_moved_does_not_end_the_log() {
    let mut j = Judged::new(vec![disk(1)]);
    j.hold_move_of_rotten();
    j.done();
    j.release();
    j.write_until(1, |j| !j.lost(1).is_empty());
    j.write_fua(1, 70, 77).expect("written");
    j.crash();
    assert_eq!(j.read(1, 70), Ok(77));
    assert_eq!(j.read(1, 3), Err(ReqError::Io));
}

#[test]
fn a_rotten_block_that_is_written_while_it_is_moved_stays_written() {
    let mut j = Judged::new(vec![disk(1)]);
    j.hold_move_of_rotten();
    while j.step() {}
    j.done();
    let tag = j.send_write(1, 3, 1, 44, true);
    j.release();
    j.wait(tag).expect("written");
    assert_eq!(j.read(1, 3), Ok(44));
    j.settle();
    // Later batches say that all of it is durable.
    j.write_fua(1, 80, 8).expect("written");
    j.write_fua(1, 81, 8).expect("written");
    j.crash();
    assert_eq!(j.read(1, 3), Ok(44));
}

#[test]
fn flash_that_fails_while_a_rotten_block_is_moved_does_not_hinder_a_stop() {
    let mut j = Judged::new(vec![disk(1)]);
    j.hold_move_of_rotten();
    j.only(writes_flash, Fate::Refused);
    j.write(1, 60, 1, 9).expect("the origin takes it");
    assert!(j.engine.pool_stats().flash_failed);
    j.release();
    j.stop();
}

#[test]
fn a_disk_forgotten_on_failed_flash_does_not_hinder_a_stop() {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    j.write_fua(2, 3, 33).expect("written");
    j.only(writes_flash, Fate::Refused);
    j.write(1, 60, 1, 9).expect("the origin takes it");
    j.rest();
    j.engine.detach(2).expect("detached");
    let mut fx = std::mem::take(&mut j.fx);
    j.engine.forget(2, &mut fx).expect("forgotten");
    j.fx = fx;
    j.collect();
    j.stop();
}

/// What eviction dropped is said nowhere until the segment is free; a checkpoint must not forget it.
#[test]
fn a_stop_in_the_middle_of_an_eviction_brings_no_old_copy_back() {
    let mut j = Judged::new(vec![disk(1), disk(2), disk(3)]);
    let old = j.read_run(1, 0, 10).expect("read")[0];
    j.settle();
    // Much of the first segment is dirty, and eviction waits for the destager that is at it.
    for (block, count) in [(100, 128), (300, 64)] {
        j.write(2, block, count, 1).expect("written");
    }
    j.judge(
        |op| match op.target == Target::Origin(2) && writes_origin(op) {
            true => Fate::Held,
            false => Fate::Done,
        },
    );
    let evicted = |j: &Judged| {
        let block = std::slice::from_ref(&(0..1));
        j.engine.clean_within(1, block, 1).is_empty()
    };
    for at in (1024..BLOCKS).step_by(64) {
        j.write(3, at, 64, 9).expect("written");
        j.settle();
        if evicted(&j) {
            break;
        }
    }
    assert!(evicted(&j) && j.holds() > 0, "{}", j.engine.explain());
    // So fast that eviction does not look at the segment again before the stop.
    j.step_ns = 0;
    j.release();
    while j.step() {}
    j.stop_at_once();
    j.step_ns = 100_000;
    j.disks = vec![in_mode(Mode::Off, 1), disk(2), disk(3)];
    let report = j.crash();
    assert_eq!(report.from, OpenedFrom::Checkpoint);
    // Nor does eviction get any further now.
    j.judge(|op| match (op.target, op.kind, op.class) {
        (Target::Flash(_), OpKind::Read, Class::Background) => Fate::Held,
        _ => Fate::Done,
    });
    j.write_fua(1, 0, 6).expect("written");
    // The region's intent, if there is one, is closed.
    for _ in 0..10 {
        j.settle();
    }
    assert!(old != 6 && j.read(1, 0) == Ok(6));
    j.disks = vec![around(1), disk(2), disk(3)];
    let report = j.crash();
    assert_eq!(report.from, OpenedFrom::Log);
    assert_eq!(j.read(1, 0), Ok(6));
}

/// A write whose error was a lie: its batch is on flash, and again, with others, in the next segment.
#[test]
fn what_is_sent_again_is_not_played_twice() {
    const X: u64 = 1;
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, X, 1).expect("written");
    j.engine.drain(1, true).expect("known");
    j.tick();
    while j.step() {}
    j.engine.drain(1, false).expect("known");
    assert_eq!(j.origins[&1].visible_block(X as usize)[0], 1);
    // In the queue: that X is clean. Then much, then X again: two batches. Both are stored, which of
    // the first is not told; and of what is sent again, only the first.
    let mut batches = 0;
    j.judge(move |op| {
        batches += u32::from(writes_flash(op));
        match batches {
            1 if writes_flash(op) => Fate::Denied,
            4.. => Fate::Refused,
            _ => Fate::Done,
        }
    });
    let (at, len) = (100 * BLOCK, 280 * BLOCK);
    let buf = Buf::zeroed(len as usize);
    let fill = Buf::zeroed(BLOCK as usize);
    fill.all().bytes_mut().fill(9);
    let mut requests = vec![
        Request::write(1000, 1, at, len, false, &buf, 1),
        Request::write(1001, 1, X * BLOCK, BLOCK, false, &fill, 1),
    ];
    j.engine.submit(1, &mut requests, &mut j.fx);
    j.collect();
    for _ in 0..3 {
        assert!(j.step());
    }
    j.crash();
    let there = crc32c(&j.origins[&1].visible_block(X as usize));
    let one = std::slice::from_ref(&(X..X + 1));
    for (block, crc) in j.engine.clean_within(1, one, 1) {
        assert!(block != X || crc == there, "clean, but the origin differs");
    }
}

/// The same, and what was sent again is answered: the first attempts must not stand in its way.
#[test]
fn what_is_sent_again_counts_when_the_first_attempt_is_there_too() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 1, 1).expect("written");
    let mut batches = 0;
    j.judge(move |op| {
        batches += u32::from(writes_flash(op));
        match batches {
            1 if writes_flash(op) => Fate::Denied,
            _ => Fate::Done,
        }
    });
    j.write(1, 100, 300, 7).expect("written");
    j.write_fua(1, 1, 2).expect("written");
    j.crash();
    assert_eq!((j.read(1, 1), j.read(1, 399)), (Ok(2), Ok(7)));
}

/// The last copies of a disk are gone from RAM, but the record that says so gathers: the disk is not
/// yet one that never was cached.
#[test]
fn a_disk_that_is_turned_off_waits_for_what_says_that_its_copies_are_void() {
    let mut j = Judged::new(vec![around(1)]);
    j.read(1, 0).expect("read");
    j.settle();
    assert_eq!(j.cached(1), 1);
    j.only(reads_flash, Fate::Refused);
    j.read(1, 0).expect("the origin has it");
    assert_eq!(j.cached(1), 0);
    off_and_written(&mut j, 0);
}

/// Eviction writes no such record at all.
#[test]
fn a_disk_that_is_turned_off_waits_until_its_evicted_copies_cannot_return() {
    let mut j = Judged::new(vec![around(1), disk(2)]);
    j.read(1, 3).expect("read");
    j.settle();
    assert_eq!(j.cached(1), 1);
    j.fill(2);
    j.write_until(2, |j| j.cached(1) == 0);
    off_and_written(&mut j, 3);
}

/// Turns disk 1 off, writes a block while flash takes nothing, and crashes.
fn off_and_written(j: &mut Judged, block: u64) {
    j.engine.set_mode(1, Mode::Off).expect("known");
    j.only(writes_flash, Fate::Never);
    let tag = j.send_write(1, block, 1, 44, false);
    for _ in 0..1000 {
        if !j.step() {
            j.tick();
        }
    }
    // It may wait for flash, which is right; then nothing was promised, and nothing may be written.
    let there = j.origins[&1].visible_block(block as usize)[0];
    assert_eq!(j.answer(tag).is_some(), there == 44);
    j.crash();
    assert_eq!(j.read(1, block), Ok(there));
}

/// A power cut must not bring back what was dirty on failed flash and has been written since.
#[test]
fn that_flash_failed_outlives_a_power_cut() {
    for seed in 0..8 {
        let mut j = Judged::seeded(vec![disk(1)], seed);
        j.write_fua(1, 3, 33).expect("written");
        j.only(flushes_flash, Fate::Refused);
        assert_eq!(j.write_fua(1, 4, 4), Err(ReqError::Io));
        assert!(j.engine.pool_stats().flash_failed);
        j.done();
        j.write(1, 3, 1, 44).expect("the origin takes it");
        j.rest();
        j.flush(1).expect("all is on the origin");
        j.stop();
        let report = j.power_cut();
        // Of a device that did not take the note nothing can be known.
        assert!(report.was_failed || j.read(1, 3) == Ok(44), "seed {seed}");
    }
}

/// Nor may a write be answered before the note is there: the daemon may die at once.
#[test]
fn a_write_past_failed_flash_waits_for_the_note_but_not_for_ever() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    j.judge(|op| match (op.target, op.kind) {
        (Target::Flash(_), OpKind::Flush) => Fate::Refused,
        (Target::Flash(_), OpKind::Write) if op.offset == 0 => Fate::Held,
        _ => Fate::Done,
    });
    assert_eq!(j.write_fua(1, 4, 4), Err(ReqError::Io));
    let tag = j.send_write(1, 3, 1, 44, false);
    for _ in 0..20 {
        if !j.step() {
            j.tick();
        }
    }
    assert_eq!((j.answer(tag), j.holds()), (None, 1));
    assert_eq!(j.read(1, 3), Ok(33));
    j.wait(tag).expect("the device hangs, the disk does not");
}

/// Nor may what was dirty go to the origin before: a start that finds no note believes the older clean copy
/// of the block, and gives the newer one once that is evicted.
#[test]
fn what_was_dirty_on_failed_flash_waits_for_the_note_but_not_for_ever() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    j.engine.drain(1, true).expect("known");
    j.rest();
    j.engine.drain(1, false).expect("known");
    let there = |j: &Judged| j.origins[&1].visible_block(3)[0];
    assert_eq!(there(&j), 33);
    j.write(1, 3, 1, 44).expect("written");
    j.judge(|op| match (op.target, op.kind) {
        (Target::Flash(_), OpKind::Flush) => Fate::Refused,
        (Target::Flash(_), OpKind::Write) if op.offset == 0 => Fate::Held,
        _ => Fate::Done,
    });
    assert_eq!(j.write_fua(1, 4, 4), Err(ReqError::Io));
    j.engine.drain(1, true).expect("known");
    for _ in 0..20 {
        if !j.step() {
            j.tick();
        }
    }
    assert_eq!((there(&j), j.holds()), (33, 1));
    while there(&j) != 44 {
        if !j.step() {
            j.tick();
        }
    }
    assert_eq!(j.read(1, 3), Ok(44));
}

/// Nobody waits for it any more, but it must not be lost with the power.
#[test]
fn a_note_that_comes_late_is_flushed() {
    for seed in 0..16 {
        let mut j = Judged::seeded(vec![disk(1)], seed);
        j.write_fua(1, 3, 33).expect("written");
        let mut first = true;
        j.judge(move |op| match (op.target, op.kind) {
            (Target::Flash(_), OpKind::Flush) if std::mem::take(&mut first) => Fate::Refused,
            (Target::Flash(_), OpKind::Write) if op.offset == 0 => Fate::Held,
            _ => Fate::Done,
        });
        assert_eq!(j.write_fua(1, 4, 4), Err(ReqError::Io));
        j.write(1, 3, 1, 44).expect("the origin takes it");
        assert_eq!(j.holds(), 1);
        j.done();
        j.release();
        j.rest();
        j.flush(1).expect("all is on the origin");
        let report = j.power_cut();
        assert!(report.was_failed || j.read(1, 3) == Ok(44), "seed {seed}");
    }
}

#[test]
fn a_write_that_waits_for_a_block_that_turns_out_lost_takes_its_place() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    j.settle();
    let at = j.find(33);
    j.engine.set_mode(1, Mode::WriteThrough).expect("known");
    // The origin is away for a moment.
    j.only(writes_origin, Fate::Refused);
    j.settle();
    j.done();
    j.flash.rot(at);
    let tag = j.send_write(1, 3, 1, 44, true);
    while j.step() {}
    assert_eq!(j.answer(tag), None);
    assert_eq!(j.read(1, 3), Err(ReqError::Io));
    assert_eq!(j.lost(1), [(3, 1)]);
    assert_eq!(j.wait(tag), Ok(()));
    assert_eq!(j.read(1, 3), Ok(44));
}

/// The destager finds it, and neither its error nor its rest is anybody else's.
#[test]
fn a_write_whose_block_the_destager_finds_lost_takes_its_place() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    j.write_fua(1, 900, 34).expect("written");
    j.settle();
    let at = j.find(33);
    j.flash.rot(at);
    j.engine.set_mode(1, Mode::WriteThrough).expect("known");
    let lost = j.send_write(1, 3, 1, 44, true);
    let other = j.send_write(1, 900, 1, 45, true);
    assert_eq!((j.wait(lost), j.wait(other)), (Ok(()), Ok(())));
    assert_eq!(j.engine.status(1).expect("known").trouble, None);
    assert_eq!((j.read(1, 3), j.read(1, 900)), (Ok(44), Ok(45)));
}

/// A block is destaged and waits for the flush; then a write past failed flash is refused, half done.
#[test]
fn what_the_origin_refused_does_not_count_as_destaged() {
    let mut j = Judged::new(vec![disk(1)]);
    j.write_fua(1, 3, 33).expect("written");
    j.judge(|op| match (op.target, op.kind) {
        (Target::Flash(_), OpKind::Write) => Fate::Refused,
        (Target::Origin(_), OpKind::Flush) => Fate::Held,
        _ => Fate::Done,
    });
    j.write(1, 60, 1, 9).expect("the origin takes it");
    assert!(j.engine.pool_stats().flash_failed);
    j.settle();
    assert_eq!(j.holds(), 1);
    assert_eq!(j.origins[&1].visible_block(3)[0], 33);
    j.only(writes_origin, Fate::Denied);
    assert_eq!(j.write(1, 3, 1, 44), Err(ReqError::Io));
    assert_eq!(j.read(1, 3), Ok(33));
    j.done();
    j.release();
    j.rest();
    assert_eq!(j.read(1, 3), Ok(33), "nobody wrote since");
    assert_eq!(j.origins[&1].visible_block(3)[0], 33);
}

#[test]
fn a_segment_that_took_nothing_is_no_part_of_the_log() {
    let mut j = Judged::new(vec![disk(1)]);
    let mut first = true;
    j.judge(move |op| {
        let batch = writes_flash(op) && op.len > 64 * BLOCK;
        match batch && std::mem::take(&mut first) {
            true => Fate::Refused,
            false => Fate::Done,
        }
    });
    let tag = j.send_write(1, 0, 300, 5, true);
    j.wait(tag).expect("another segment takes it");
    assert!(!j.engine.pool_stats().flash_failed);
    j.write_fua(1, 400, 6).expect("written");
    j.crash();
    assert_eq!((j.read(1, 70), j.read(1, 400)), (Ok(5), Ok(6)));
}

/// What is left of a log whose beginning was never durable has no beginning, and does not count. It
/// once did, named the lost segment as the tail, and the next start refused the pool (profile full,
/// seed 602204).
#[test]
fn a_log_whose_beginning_was_lost_is_no_log() {
    let mut j = Judged::new(vec![disk(1)]);
    let mut first = true;
    j.judge(move |op| match (op.target, op.kind) {
        (Target::Flash(_), OpKind::Write) if std::mem::take(&mut first) => Fate::Volatile,
        (Target::Flash(_), OpKind::Flush) => Fate::Held,
        _ => Fate::Done,
    });
    j.write(1, 0, 300, 5).expect("written");
    j.write(1, 400, 1, 6).expect("written");
    j.crash();
    let stats = j.engine.stats(1, 1).expect("known");
    assert_eq!(stats.dirty_blocks, 0);
    j.write_fua(1, 500, 7).expect("written");
    j.write_fua(1, 501, 7).expect("written");
    j.crash();
    assert_eq!(j.read(1, 500), Ok(7));
}

/// Its copy was padded with zeros, the origin has grown.
#[test]
fn a_disk_grows_only_when_its_odd_last_block_is_clean() {
    let mut j = Judged::new(vec![common::disk(1, 64 * BLOCK + 512)]);
    let buf = Buf::zeroed(BLOCK as usize);
    buf.all().bytes_mut().fill(33);
    let tag = j.submit(|tag, now| Request::write(tag, 1, 64 * BLOCK, 512, true, &buf, now));
    j.wait(tag).expect("written");
    // Which makes it urgent: nothing else here would ever be destaged.
    assert!(j.engine.set_size(1, 65 * BLOCK).is_err(), "it is dirty");
    j.only(flushes_origin, Fate::Held);
    j.settle();
    j.settle();
    assert_eq!(j.holds(), 1);
    assert!(j.engine.set_size(1, 65 * BLOCK).is_err());
    j.done();
    j.release();
    j.rest();
    // Clean now, but its padded copy has to be void on flash first.
    assert_eq!(j.engine.set_size(1, 65 * BLOCK), Err(ControlError::Busy));
    j.rest();
    j.engine.set_size(1, 65 * BLOCK).expect("void on flash");
    let seen = j.read_run(1, 64, 1).expect("read");
    assert_eq!(seen[0], 33);
    assert!(seen[..] == j.origins[&1].visible_block(64)[..]);
}

/// Sends writes of all of disk 1, of which the last find no room; all of them, and the last.
fn write_all_of_disk_1(j: &mut Judged) -> (Vec<u64>, u64) {
    let mut sent = Vec::new();
    for i in 0..BLOCKS / 64 {
        sent.push(j.send_write(1, i * 64, 64, 1, false));
        j.settle();
    }
    let last = *sent.last().expect("some");
    assert_eq!(j.answer(last), None, "there is room for all of them");
    (sent, last)
}

/// Disk 1 is written until its origin, whose operations have the fate that `judge` says, lets it go no
/// further; then disk 2, in requests of `run` blocks, more than all of flash.
fn write_beside(run: u64, mut judge: impl FnMut(&IoOp) -> Fate + 'static) {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    j.judge(move |op| match op.target {
        Target::Origin(1) => judge(op),
        _ => Fate::Done,
    });
    let (sent, last) = write_all_of_disk_1(&mut j);
    for i in 0..2 * BLOCKS / run {
        let at = i * run % (BLOCKS - run);
        j.write(2, at, run, 2).expect("written");
    }
    assert_eq!(j.answer(last), None, "nothing made it wait");
    j.done();
    j.release();
    for tag in sent {
        j.wait(tag).expect("written, now that the origin takes it");
    }
    for (disk, content) in [(1, 1), (2, 2)] {
        assert_eq!(j.read(disk, BLOCKS / 2), Ok(content));
    }
    j.engine.drain(1, true).expect("drains");
    j.rest();
    assert!(j.engine.status(1).expect("known").drained);
    let origin = &j.origins[&1];
    assert!((0..BLOCKS as usize).all(|block| origin.visible_block(block)[0] == 1));
}

fn if_it(which: fn(&IoOp) -> bool, fate: Fate) -> impl FnMut(&IoOp) -> Fate {
    move |op| if which(op) { fate } else { Fate::Done }
}

#[test]
fn an_origin_that_refuses_writes_does_not_stop_those_of_other_disks() {
    write_beside(64, if_it(writes_origin, Fate::Refused));
    // More than the part of the room that is the disk's own.
    write_beside(200, if_it(writes_origin, Fate::Refused));
}

#[test]
fn an_origin_that_hangs_does_not_stop_those_of_other_disks() {
    write_beside(64, if_it(writes_origin, Fate::Held));
    write_beside(64, if_it(flushes_origin, Fate::Held));
    // Some are written by then, and wait for the flush with the rest.
    let mut writes = 0;
    write_beside(64, move |op| {
        writes += u32::from(writes_origin(op));
        if_it(
            writes_origin,
            if writes > 6 { Fate::Held } else { Fate::Done },
        )(op)
    });
}

/// A discard of less than a block needs no room, and lets in who waits for its range.
#[test]
fn a_discard_of_nothing_in_a_full_log() {
    let mut j = Judged::new(vec![disk(1)]);
    j.only(flushes_flash, Fate::Held);
    let (mut sent, _) = write_all_of_disk_1(&mut j);
    let op = ReqOp::Discard { fua: false };
    let at = 3 * BLOCK + 512;
    let discard = j.submit(|tag, now| Request::new(tag, 1, op, at, 512, None, now));
    sent.push(j.send_write(1, 3, 1, 2, false));
    assert_eq!(j.answer(discard), Some(Ok(())));
    j.done();
    j.release();
    for tag in sent {
        j.wait(tag).expect("written");
    }
    assert_eq!(j.read(1, 3), Ok(2));
}

/// Flash does not give back block 3 of disk 1, its only copy, nor ever will. Block 4 lies beside it.
fn with_a_bad_sector() -> Judged {
    let mut j = Judged::new(vec![disk(1), disk(2)]);
    for (block, fill) in [(3, 33), (4, 34)] {
        j.write_fua(1, block, fill).expect("written");
    }
    j.settle();
    let at = j.find(33) as u64 * BLOCK;
    j.flash.faults.bad_ranges.push(at..at + BLOCK);
    j
}

#[test]
fn a_flush_ends_though_a_sector_of_sound_flash_cannot_be_read() {
    let mut j = with_a_bad_sector();
    j.engine.drain(1, true).expect("drains");
    j.rest();
    assert!(!j.engine.pool_stats().flash_failed);
    assert_eq!(j.origins[&1].visible_block(4)[0], 34);
    assert_eq!(j.lost(1), [(3, 1)]);
    assert_eq!((j.read(1, 3), j.read(1, 4)), (Err(ReqError::Io), Ok(34)));
    assert_eq!(j.engine.accept_loss(1), Ok(1));
    j.rest();
    assert!(j.engine.status(1).expect("known").drained);
}

/// The destager has read it before it was lost, and the origin takes its time. What it gets then is of a block of which
/// nobody promises anything; what is written after the loss was accepted counts, in the cache and in the origin.
#[test]
fn a_loss_accepted_while_the_block_is_destaged_hides_no_newer_write() {
    for (written, crashes) in [(false, false), (true, false), (true, true)] {
        let mut j = Judged::new(vec![disk(1)]);
        j.write_fua(1, 3, 33).expect("written");
        j.settle();
        let at = j.find(33);
        j.only(writes_origin, Fate::Held);
        j.engine.drain(1, true).expect("known");
        for _ in 0..100 {
            j.settle();
        }
        assert_eq!(j.holds(), 1);
        j.flash.rot(at);
        assert_eq!(j.read(1, 3), Err(ReqError::Io));
        assert_eq!(j.lost(1), [(3, 1)]);
        assert_eq!(j.engine.accept_loss(1), Ok(1));
        if written {
            j.write_fua(1, 3, 44).expect("written");
        }
        j.done();
        j.release();
        if crashes {
            j.step();
            j.crash();
            j.engine.drain(1, true).expect("known");
        }
        j.rest();
        assert!(
            j.engine.status(1).expect("known").drained,
            "{}",
            j.engine.explain()
        );
        assert!(j.lost(1).is_empty());
        let there = j.origins[&1].stored_block(3)[0];
        assert_eq!(j.read(1, 3), Ok(there), "cache and origin are the same");
        assert!(there == if written { 44 } else { 33 });
    }
}

#[test]
fn a_bad_sector_stops_neither_eviction_nor_the_device() {
    for reads_succeed in [false, true] {
        let mut j = with_a_bad_sector();
        // Round and round through flash, with what is dirty on the bad sector in the way.
        for at in 0..150 {
            j.write(2, 512 + at % 48 * 64, 64, 9).expect("written");
            if reads_succeed {
                assert_eq!(j.read(1, 4), Ok(34));
            }
        }
        assert!(!j.engine.pool_stats().flash_failed);
        assert_eq!(j.lost(1), [(3, 1)]);
        // It stays lost wherever it was moved to, and can be written again.
        j.crash();
        assert_eq!(j.read(1, 3), Err(ReqError::Io));
        j.flash.faults.bad_ranges.clear();
        j.write_fua(1, 3, 35).expect("written");
        assert_eq!((j.read(1, 3), j.lost(1)), (Ok(35), vec![]));
    }
}

#[test]
fn a_stop_leaves_on_flash_what_is_dirty() {
    let mut j = Judged::new(vec![disk(1)]);
    // So many, so scattered, that the destager is at work; its writes hang.
    j.only(writes_origin, Fate::Held);
    for i in 0..700 {
        j.write(1, i * 8, 1, 7).expect("written");
    }
    j.settle();
    assert!(j.holds() > 0, "{}", j.engine.explain());
    j.done();
    j.release();
    j.stop_at_once();
    let dirty = j.engine.status(1).expect("known").dirty_blocks;
    assert!(dirty > 600, "{dirty}");
    let opened = j.crash();
    assert_eq!(opened.from, OpenedFrom::Checkpoint);
    assert_eq!(j.read(1, 8), Ok(7));
}

#[test]
fn a_write_begun_while_the_cache_was_off_leaves_no_copy_that_nothing_guards() {
    for seed in 0..16 {
        let mut j = Judged::seeded(vec![in_mode(Mode::Off, 1), disk(2)], seed);
        j.only(writes_origin, Fate::Held);
        let tag = j.send_write(1, 3, 1, 44, false);
        while j.step() {}
        assert_eq!(j.holds(), 1);
        j.engine.set_mode(1, Mode::WriteThrough).expect("set");
        j.disks[0].mode = Mode::WriteThrough;
        j.only(flushes_origin, Fate::Held);
        j.release();
        assert_eq!(j.wait(tag), Ok(()));
        for block in 5..45 {
            j.write_fua(2, block, 5).expect("written");
            j.tick();
        }
        j.power_cut();
        j.done();
        let there = j.origins[&1].visible_block(3)[0];
        assert_eq!(j.read(1, 3), Ok(there), "seed {seed}");
    }
}

/// Of a disk that lives on flash a discard leaves nothing that is dirty, and no origin that would be told: only the log
/// knows of it, and a flush has to wait for that.
#[test]
fn a_discard_that_was_flushed_stays_where_a_disk_lives_on_flash() {
    for seed in 0..16 {
        let lives_on_flash = DiskConfig {
            home: Home::Flash,
            ..disk(1)
        };
        let mut j = Judged::seeded(vec![lives_on_flash], seed);
        j.write_fua(1, 5, 55).expect("written");
        let op = ReqOp::Discard { fua: false };
        let tag = j.submit(|tag, now| Request::new(tag, 1, op, 5 * BLOCK, BLOCK, None, now));
        j.wait(tag).expect("discarded");
        j.flush(1).expect("flushed");
        j.power_cut();
        assert_eq!(j.read(1, 5), Ok(0), "seed {seed}");
    }
}

/// What lives on flash that was removed under us will never be in an origin: who flushes it is told so, and does not wait.
#[test]
fn a_flush_of_what_lives_on_flash_that_is_going_ends() {
    let lives_on_flash = DiskConfig {
        home: Home::Flash,
        ..disk(1)
    };
    let mut j = Judged::new(vec![lives_on_flash]);
    j.write_fua(1, 5, 55).expect("written");
    let mut fx = std::mem::take(&mut j.fx);
    j.engine
        .give_flash_up(FlashFault::Leaving, true, 0, &mut fx);
    j.fx = fx;
    j.collect();
    assert_eq!(j.flush(1), Err(ReqError::Io));
}

/// The tests above are what catches these faults: random worlds hardly ever meet such orders of events.
#[cfg(feature = "mutations")]
#[test]
fn faults_that_need_a_certain_order_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = crate::judge::unnoticed(&[
        (
            Fault::PlayTwice,
            what_is_sent_again_counts_when_the_first_attempt_is_there_too,
        ),
        (
            Fault::CheckpointNoEviction,
            a_stop_in_the_middle_of_an_eviction_brings_no_old_copy_back,
        ),
        (
            Fault::OffForgetsEvicted,
            a_disk_that_is_turned_off_waits_until_its_evicted_copies_cannot_return,
        ),
        (
            Fault::OffForgetsDropped,
            a_disk_that_is_turned_off_waits_for_what_says_that_its_copies_are_void,
        ),
        (
            Fault::GrowWhileDirty,
            a_disk_grows_only_when_its_odd_last_block_is_clean,
        ),
        (
            Fault::IgnoreFlashFlushError,
            that_flash_failed_outlives_a_power_cut,
        ),
        (
            Fault::FlushForgetsDiscards,
            a_discard_that_was_flushed_stays_where_a_disk_lives_on_flash,
        ),
        (
            Fault::DestageUnnoted,
            what_was_dirty_on_failed_flash_waits_for_the_note_but_not_for_ever,
        ),
    ]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
