//! Clean blocks that are there once and go with their device: when they may be let go.
//!
//! The shortest history that tells a device which let them go too early needs five things in this order, which worlds that are made by
//! chance do not meet: an intent that is open; the device's death, with what notes it on its way; a write past the log where that
//! intent is, so that it waits for nothing; the origin's flush, which closes the intent; and something urgent, so that the batch which
//! says so goes to the device that is left although the one before it has not ended. Then a crash, and both devices are there.

use crate::judge::{BLOCKS, Fate, Judged, disk, flushes_origin};
use hearth_engine::api::{DiskConfig, Mode};
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_io::{BLOCK, IoOp, OpKind, Target};
use std::cell::Cell;
use std::rc::Rc;

/// Clean blocks, half of them on each device.
const CLEAN: std::ops::Range<u64> = 16..24;
/// Long enough for whatever was refused to be tried again.
const PERIODS: u32 = 400;

fn notes_loss(op: &IoOp) -> bool {
    let flash = matches!(op.target, Target::Flash(_)) && op.kind == OpKind::Write;
    flash && SUPERBLOCK_BLOCKS.iter().any(|at| at * BLOCK == op.offset)
}

fn flushes_origin_1(op: &IoOp) -> bool {
    op.target == Target::Origin(1) && flushes_origin(op)
}

fn go_on(j: &mut Judged) {
    for _ in 0..PERIODS {
        j.settle();
    }
}

/// A device fails, and what says so never gets to flash. Meanwhile blocks are written past the log whose copies were on that
/// device, and the intent is closed. The next start has both devices, and nothing to tell that one was lost.
#[test]
fn what_went_with_a_device_is_let_go_only_when_it_is_durable_that_it_is_lost() {
    let past = DiskConfig {
        mode: Mode::WriteAround,
        ..disk(1)
    };
    let mut j = Judged::twice(vec![past, disk(2)], true);
    let first = CLEAN.start;
    let count = CLEAN.end - first;
    let old = j.read_run(1, first, count).expect("read");
    j.settle();
    j.write_fua(2, 3, 1).expect("written");
    j.settle();
    assert_eq!(j.cached(1), count);

    // The intent of the region is durable, and stays open.
    j.only(flushes_origin_1, Fate::Refused);
    j.write(1, 0, 1, 7).expect("written");
    j.settle();
    let notes = Rc::new(Cell::new(0));
    let seen = notes.clone();
    j.judge(move |op| {
        let note = notes_loss(op);
        seen.set(seen.get() + u32::from(note));
        match note {
            true => Fate::Never,
            false if flushes_origin_1(op) => Fate::Refused,
            false => Fate::Done,
        }
    });
    j.second.as_mut().expect("two devices").kill();
    let noticed = j.send_write(2, 4, 1, 1, true);
    j.settle();
    assert_eq!((j.answer(noticed), notes.get()), (None, 1));

    let tags: Vec<(u64, u64)> = CLEAN
        .map(|block| (block, j.send_write(1, block, 1, 44, false)))
        .collect();
    j.settle();
    let answered: Vec<u64> = (tags.iter())
        .filter(|(_, tag)| j.answer(*tag) == Some(Ok(())))
        .map(|(block, _)| *block)
        .collect();
    assert!(answered.len() as u64 >= count / 2, "{answered:?}");
    // The origin has it, and the intent is closed. One for another region is urgent.
    j.only(notes_loss, Fate::Never);
    go_on(&mut j);
    j.send_write(1, BLOCKS - 1, 1, 9, false);
    j.settle();

    j.second.as_mut().expect("two devices").revive();
    j.crash();
    for block in answered {
        let was = old[((block - first) * BLOCK) as usize];
        assert_ne!(was, 44);
        assert_eq!(j.read(1, block), Ok(44), "block {block}");
    }
}

#[cfg(feature = "mutations")]
#[test]
fn faults_of_letting_go_are_caught() {
    use hearth_engine::faults::Fault;
    let unnoticed = crate::judge::unnoticed(&[(
        Fault::GoneEarly,
        what_went_with_a_device_is_let_go_only_when_it_is_durable_that_it_is_lost,
    )]);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
