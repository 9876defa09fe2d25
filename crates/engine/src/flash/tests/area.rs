//! Segments beside the log: what is durable before what.

use super::*;
use crate::flash::area::AreaRefused;
use hearth_format::Area;
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use std::collections::BTreeSet;

fn tail(d: &Device) -> Area {
    let first = d.log.segments.len() as u32 - 2;
    Area { first, segments: 2 }
}

/// What is sent next, which is one operation.
fn next(d: &mut Device) -> (FlashOp, crate::ctx::Io) {
    d.area_step();
    let mut ios: Vec<_> = d.out.ios.drain(..).collect();
    assert_eq!(ios.len(), 1);
    ios.remove(0)
}

/// Both copies of the superblock are stored, each behind a flush, and list these.
fn stored(d: &mut Device, areas: &[Area]) {
    let mut copies = BTreeSet::new();
    for n in 0..2 {
        assert!(d.is_area_changed());
        let (op, io) = match n {
            0 => next(d),
            _ => d.out.ios.drain(..).next().expect("the other copy"),
        };
        assert!(matches!(op, FlashOp::Floor) && io.kind == OpKind::Write);
        let found = Superblock::decode(io.bufs[0].bytes()).unwrap();
        assert_eq!(found.areas, areas);
        assert_eq!(io.offset, SUPERBLOCK_BLOCKS[usize::from(found.copy)] * 4096);
        copies.insert(found.copy);
        d.floor_ended(&Ok(()), 0);
        let (_, io) = d.out.ios.drain(..).next().expect("a flush");
        assert_eq!(io.kind, OpKind::Flush);
        d.floor_ended(&Ok(()), 0);
    }
    assert_eq!(copies.len(), 2);
    assert!(!d.is_area_changed());
}

fn set_aside(d: &mut Device) -> Area {
    let area = tail(d);
    d.begin_area(area).unwrap();
    // Nothing was on it.
    assert_eq!(
        d.how_empty().map(|how| (how.left, how.part)),
        Some((0, true))
    );
    assert!(d.sb.areas.is_empty());
    d.keep_area().unwrap();
    stored(d, &[area]);
    area
}

fn is_free(d: &Device, area: Area) -> bool {
    let free = area.range().filter(|seg| d.log.free.contains(seg)).count();
    assert!(free == 0 || free == area.segments as usize);
    free > 0
}

#[test]
fn it_is_the_logs_again_only_when_it_is_clear_and_durably_off_the_list() {
    let mut d = device();
    let area = set_aside(&mut d);
    assert!(!is_free(&d, area));
    d.give_area_back(area).unwrap();
    assert_eq!(d.give_area_back(area), Err(AreaRefused::Busy));
    let start = layout().segment_offset(area.first);
    let end = start + 2 * u64::from(SEGMENT_BLOCKS) * 4096;
    let mut clear = start;
    while clear < end {
        let (op, io) = next(&mut d);
        assert!(matches!(op, FlashOp::Wipe) && io.kind == OpKind::Write);
        assert_eq!(io.offset, clear);
        assert!(io.bufs[0].bytes().iter().all(|byte| *byte == 0));
        clear += io.bufs[0].bytes().len() as u64;
        d.area_step();
        assert!(sent(&mut d).is_empty(), "one after the other");
        d.wipe_ended(OpKind::Write, &Ok(()), 0);
    }
    assert_eq!(clear, end);
    let (op, io) = next(&mut d);
    assert!(matches!(op, FlashOp::Wipe) && io.kind == OpKind::Flush);
    assert_eq!(d.sb.areas, [area]);
    assert!(!d.is_area_clear());
    d.wipe_ended(OpKind::Flush, &Ok(()), 0);
    assert!(!is_free(&d, area) && d.is_area_clear());
    d.area_step();
    assert!(sent(&mut d).is_empty(), "who asked has to look once more");
    d.end_clearing(true);
    stored(&mut d, &[]);
    assert!(is_free(&d, area));
    assert_eq!(d.log.usable(), d.log.segments.len());
}

#[test]
fn what_cannot_be_cleared_stays_set_aside() {
    let mut d = device();
    let area = set_aside(&mut d);
    d.give_area_back(area).unwrap();
    next(&mut d);
    d.wipe_ended(OpKind::Write, &Err(IO), 0);
    assert!(!d.is_area_changed() && d.takes_writes() && !is_free(&d, area));
    assert_eq!(d.sb.areas, [area]);
    // And again, up to a flush that fails: nobody knows what that leaves of the log.
    d.give_area_back(area).unwrap();
    for _ in 0..2 {
        next(&mut d);
        d.wipe_ended(OpKind::Write, &Ok(()), 0);
    }
    next(&mut d);
    d.wipe_ended(OpKind::Flush, &Err(IO), 0);
    assert!(!d.takes_writes() && !is_free(&d, area));
}

#[test]
fn what_somebody_writes_to_again_when_it_is_clear_stays_set_aside() {
    let mut d = device();
    let area = set_aside(&mut d);
    d.give_area_back(area).unwrap();
    d.end_clearing(true);
    assert!(!d.is_area_clear(), "it is not clear yet");
    while !d.is_area_clear() {
        let (_, io) = next(&mut d);
        d.wipe_ended(io.kind, &Ok(()), 0);
    }
    d.end_clearing(false);
    assert!(!d.is_area_changed() && !is_free(&d, area));
    assert_eq!(d.sb.areas, [area]);
}

/// Batches behind one that failed go elsewhere with it, and the segment they were sent to comes free: on a part that is
/// being emptied it must not be written again.
#[test]
fn a_segment_whose_batches_go_elsewhere_is_put_aside_where_it_is_emptied() {
    let mut d = device();
    append(&mut d, 0, 200, 1);
    write_all(&mut d);
    append(&mut d, 200, 128, 2);
    d.pump(0);
    let parts = batches(&sent(&mut d));
    assert_eq!(parts.len(), 2);
    let area = Area {
        first: 1,
        segments: 2,
    };
    d.begin_area(area).unwrap();
    assert_eq!(d.log.segments[1].batches, 1);
    written(&mut d, parts[1]);
    d.batch_ended(parts[0], &Err(IO));
    d.go_on(0, 0);
    assert!(d.takes_writes() && d.is_emptying());
    assert!(area.range().all(|seg| !d.log.free.contains(&seg)));
    write_all(&mut d);
    assert_eq!(d.how_empty().map(|how| how.left), Some(0));
    d.end_emptying();
    assert!(area.range().all(|seg| d.log.free.contains(&seg)));
}

/// Of a log that was not yet once round, what is free lies at the end, and so does what is to be set aside. Were all of it put aside, nothing could be
/// moved or said any more, and setting aside would be given up although others hold nothing that has to be kept.
#[test]
fn what_is_free_there_stays_in_use_until_enough_is_free_elsewhere() {
    let mut d = device_of(Layout::for_device(32 << 20, SEGMENT_BLOCKS).expect("it fits"));
    let n = d.log.segments.len() as u32;
    d.log.free = (0..n).collect();
    d.log.next_segment_seq = 1;
    let target = d.free_target() as u32;
    for seg in 0..n - target {
        append(&mut d, u64::from(seg) * 1000, DATA, seg);
        write_all(&mut d);
    }
    let area = Area {
        first: n - target - 2,
        segments: target + 2,
    };
    let there = |d: &Device| {
        let free = d.log.free.iter().copied();
        free.filter(|seg| area.range().contains(seg)).count() as u32
    };
    assert_eq!(there(&d), d.log.free.len() as u32, "all that is free");
    d.begin_area(area).unwrap();
    assert!(!d.starved() && d.is_emptying());
    assert_eq!((there(&d), d.free_to_stay()), (target, 0));
    let (seg, _) = d.next_victim(0).expect("another one goes");
    assert!(!area.range().contains(&seg), "{seg}");
    assert_eq!(there(&d), target);
    // What is written meanwhile goes there, and is emptied like the rest.
    append(&mut d, 90_000, 8, 99);
    write_all(&mut d);
    assert_eq!(there(&d), target - 1);
    d.forget_victim();
    for seg in 0..target {
        d.log.order.retain(|s| *s != seg);
        d.cleaner.free(seg);
        d.log.segments[seg as usize].state = SegState::Free;
        d.put_free(seg);
    }
    let (seg, _) = d.next_victim(0).expect("one of them goes");
    assert!(area.range().contains(&seg), "{seg}");
    assert_eq!(there(&d), 0);
    let open = |d: &Device| {
        d.log
            .heads
            .iter()
            .flatten()
            .map(|h| h.seg)
            .collect::<Vec<_>>()
    };
    assert!(open(&d).iter().all(|seg| !area.range().contains(seg)));
    d.end_emptying();
    let (free, head) = (there(&d), d.log.order.contains(&(n - target)));
    assert_eq!((free, head), (target - 1, true), "the head was closed");
}

#[test]
fn what_cannot_be_set_aside_is_refused() {
    let mut d = device();
    let n = d.log.segments.len() as u32;
    let area = |first, segments| Area { first, segments };
    assert_eq!(d.begin_area(area(n - 1, 2)), Err(AreaRefused::NoSuch));
    assert_eq!(d.begin_area(area(0, n)), Err(AreaRefused::NoSuch));
    assert_eq!(d.keep_area(), Err(AreaRefused::NoSuch));
    assert_eq!(d.give_area_back(tail(&d)), Err(AreaRefused::NoSuch));
    d.begin_area(tail(&d)).unwrap();
    assert_eq!(d.begin_area(tail(&d)), Err(AreaRefused::Busy));
    // Called off, it is as it was.
    d.end_emptying();
    assert_eq!(d.log.free.len(), n as usize);
    d.begin_area(tail(&d)).unwrap();
    append(&mut d, 1, 1, 1);
    assert!(d.how_empty().is_some_and(|how| how.left == 0));
}

/// A copy of the superblock that was not stored is tried again, and until it is, nothing is told.
#[test]
fn a_list_that_is_not_stored_is_stored_again() {
    let mut d = device();
    let area = tail(&d);
    d.begin_area(area).unwrap();
    d.keep_area().unwrap();
    next(&mut d);
    d.floor_ended(&Err(IO), 0);
    assert!(d.is_area_changed() && d.takes_writes());
    stored(&mut d, &[area]);
    // A start leaves it alone.
    let again = Device::new(3, d.sb.clone(), true, Default::default());
    let aside = |seg: &u32| again.log.segments[*seg as usize].state == SegState::Bad;
    assert!(area.range().all(|seg| aside(&seg)));
    assert_eq!(again.log.bad, 2);
}
