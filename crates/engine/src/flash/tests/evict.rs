//! Which segment goes, and what becomes of what it holds and says.

use super::shelf::*;
use super::*;
use crate::flash::choose::Verdict;
use hearth_format::Entry;

/// The reads among what it wants done.
fn moves(ops: &[FlashOp]) -> Vec<(Slot, u32)> {
    let read = |op: &FlashOp| match op {
        FlashOp::Move { slot, count } => Some((*slot, *count)),
        _ => None,
    };
    ops.iter().filter_map(read).collect()
}

/// An entry without data.
fn said(kind: Kind, block: u64, count: u32) -> Entry {
    Entry {
        disk: 1,
        block,
        word: count,
        slot: 0,
        kind,
        flags: 0,
    }
}

/// Answers the read of what the segment says.
fn entries(d: &mut Device) {
    let ops: Vec<_> = d.out.ios.drain(..).collect();
    let [(FlashOp::Entries { seg, whole: false }, _)] = &ops[..] else {
        panic!("{ops:?}");
    };
    let seg = *seg;
    d.unpin(seg);
    d.set_entries(seg, Vec::new());
}

#[test]
fn the_segment_with_the_most_holes_goes_and_only_when_room_is_short() {
    let mut d = device();
    assert_eq!(d.next_victim(0), None);
    let (mut d, mut shelf) = short_of_room(0);
    // In one of them much has died.
    let holes = d.log.order[2];
    for slot in holes * SEGMENT_BLOCKS + 1..holes * SEGMENT_BLOCKS + 151 {
        let gone = shelf.gone(slot);
        d.slot_gone(gone);
    }
    let (seg, begins) = d.next_victim(0).expect("room is short");
    assert!(begins && !d.is_going(seg));
    assert_eq!(seg, holes);
    assert_eq!(d.next_victim(0), Some((seg, false)), "one after the other");

    d.sift(seg, &mut shelf, 0);
    assert_eq!(
        d.log.segments[seg as usize].live,
        DATA - 150,
        "what it says comes first"
    );
    entries(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
    assert!(d.is_going(seg));
    d.sift(seg, &mut shelf, 0);
    assert!(
        d.fades(seg) && moves(&sent(&mut d)).is_empty(),
        "none of it is used"
    );
}

/// A note that a block is clean need not be said again where the map says it of the whole segment; but the map
/// says so only when whatever is newer is durable.
#[test]
fn a_segment_without_dirty_blocks_is_clean_in_the_map() {
    let (mut d, mut shelf) = short_of_room(0);
    let (stays, goes) = (d.log.order[0], d.log.order[1]);
    d.set_entries(
        goes,
        vec![said(Kind::CleanedRun, u64::from(stays) * 1000, 4)],
    );
    let newer = append(&mut d, 9_000_000, 1, 1);
    let ord = d.say_again(goes, &shelf, 0).expect("nothing holds it");
    assert!(ord >= newer && d.log.queue.len() == 1, "no note");
    let through = d.log.durable_seq;
    let (entry, settled) = d.map_entry(stays, through);
    assert!(entry.seq > 0 && !entry.clean && !settled);
    write_all(&mut d);
    make_durable(&mut d);
    let (entry, settled) = d.map_entry(stays, d.log.durable_seq);
    assert!(entry.clean && settled);
    // One of them is dirty: then there is a note.
    let other = d.log.order[2];
    let slot = other * SEGMENT_BLOCKS + 1;
    let (block, _) = shelf.slots[&slot];
    shelf.slots.insert(slot, (block, false));
    d.log.segments[other as usize].dirty += 1;
    d.set_entries(goes, vec![said(Kind::CleanedRun, block, 1)]);
    d.say_again(goes, &shelf, 0).expect("nothing holds it");
    let queued = d.log.queue.iter().map(|i| (i.kind, i.block));
    assert_eq!(queued.collect::<Vec<_>>(), [(Kind::CleanedRun, block)]);
}

/// Zeros of which an origin that hangs is to know: they are waited for, but others are freed meanwhile.
#[test]
fn a_segment_that_says_too_much_again_is_put_off() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(d.is_victim_empty(seg));
    let most = d.log.summary_capacity * d.log.free.len() / 2;
    let runs = 0..most as u64 + 1;
    shelf.zeros = runs.clone().map(|at| (at * 2, at * 2 + 1)).collect();
    let zeros = runs.map(|at| said(Kind::ZeroRun, at * 2, 1)).collect();
    d.set_entries(seg, zeros);
    assert_eq!(d.say_again(seg, &shelf, 0), None);
    assert!(d.log.queue.is_empty() && d.wants_clean());
    let next = d.next_victim(0).expect("room is short");
    assert!(next.0 != seg && next.1, "another one goes");
    d.free_victim(next.0, 0);
    assert!(d.holds_evicted() && !d.has_gone(1));
    // With more room it is its turn again.
    d.log.freeing.clear();
    d.log.free.push_back(next.0);
    assert_eq!(d.next_victim(0), Some((seg, true)));
    assert!(d.say_again(seg, &shelf, 0).is_none(), "it is read again");
}

/// What was dropped with it nobody recorded, and its copy says that it is dirty: a start after a crash would
/// destage it over what its disk was given since.
#[test]
fn what_says_that_a_block_is_clean_outlives_the_copy_in_a_segment_that_waits() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    let dropped = (seg * SEGMENT_BLOCKS + 1..)
        .find_map(|slot| shelf.slots.get(&slot).map(|(block, _)| *block))
        .expect("something lies there");
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
    d.sift(seg, &mut shelf, 0);
    assert!(d.is_victim_empty(seg) && d.is_begun(seg));
    assert_eq!(d.dead.count(1, dropped), 1, "its copy is dead");
    d.put_off(seg, 1000, 0);
    let next = d.next_victim(0).expect("room is short").0;
    assert_ne!(next, seg);
    d.set_entries(next, vec![said(Kind::CleanedRun, dropped, 1)]);
    d.say_again(next, &shelf, 0).expect("nothing holds it");
    assert!(d.log.queue.is_empty(), "the map says it of all at once");
    assert!(d.log.segments[seg as usize].clean_from.is_some());
    // Where something is left in it that is dirty, the map cannot.
    d.log.segments[seg as usize].clean_from = None;
    d.log.segments[seg as usize].dirty = 1;
    d.say_again(next, &shelf, 0).expect("nothing holds it");
    let queued = d.log.queue.iter().map(|i| (i.kind, i.block));
    assert_eq!(queued.collect::<Vec<_>>(), [(Kind::DropRun, dropped)]);
    assert!(d.log.segments[seg as usize].clean_from.is_none());
}

/// Nothing lives in them, but what they say would fill as many others.
#[test]
fn segments_that_would_only_be_written_again_stay_and_the_oldest_goes() {
    let (mut d, mut shelf) = short_of_room(0);
    let entries = d.log.summary_capacity as u64;
    let void: Vec<Entry> = (0..entries)
        .map(|n| said(Kind::DropRun, 9_000_000 + n * 2, 1))
        .collect();
    void.iter().for_each(|e| d.dead.add(1, e.block));
    let oldest = d.log.order[0];
    for seg in d.log.order.clone() {
        if seg != oldest {
            for slot in seg * SEGMENT_BLOCKS + 1..=seg * SEGMENT_BLOCKS + DATA {
                let gone = shelf.gone(slot);
                d.slot_gone(gone);
            }
        }
    }
    let mut looked_at = Vec::new();
    let seg = loop {
        let (seg, begins) = d.next_victim(0).expect("room is short");
        assert!(begins && looked_at.len() < 20);
        d.set_entries(seg, void.clone());
        if d.judge(seg, &shelf, 0) == Verdict::Goes {
            break seg;
        }
        assert!(
            !d.holds_evicted() && d.begun().is_empty(),
            "it is as before"
        );
        looked_at.push(seg);
    };
    assert!(looked_at.len() > 1 && !looked_at.contains(&oldest));
    assert_eq!(seg, oldest, "nothing it says can matter");
    d.sift(seg, &mut shelf, 0);
    assert!(d.is_victim_empty(seg));
    let ord = d.say_again(seg, &shelf, 0).expect("nothing holds it");
    assert!(d.log.queue.is_empty());
    d.free_victim(seg, ord);
    assert_eq!(d.in_vain().0, 1);
    // The next one is the oldest now.
    let (seg, _) = d.next_victim(0).expect("room is short");
    assert_eq!(seg, d.log.order[0]);
    d.set_entries(seg, void);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
}

#[test]
fn what_is_not_used_goes_where_too_much_lives() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    assert!(d.fades(seg));
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Goes);
    d.sift(seg, &mut shelf, 0);
    assert!(sent(&mut d).is_empty(), "nothing in it is worth a read");
    assert!(d.is_victim_empty(seg));
    let ord = d.say_again(seg, &shelf, 0).expect("nothing holds it");
    assert!(
        d.log.queue.is_empty(),
        "and it says nothing that must be kept"
    );
    assert!(d.holds_evicted() && !d.has_gone(d.evictions()));
    d.free_victim(seg, ord);
    assert_eq!(
        d.log.segments[seg as usize].state,
        SegState::Freeing { ord }
    );
    assert!(
        !d.has_gone(d.evictions()),
        "a crash would bring its copies back"
    );
    let next = d.next_victim(0).expect("room is still short").0;
    assert_ne!(next, seg);
}

#[test]
fn what_is_in_use_is_moved_before_its_segment_is_freed() {
    let (mut d, mut shelf) = short_of_room(0);
    let (seg, _) = d.next_victim(0).expect("room is short");
    let first = seg * SEGMENT_BLOCKS + 1;
    let block = u64::from(seg) * 1000;
    shelf.used.extend([block, block + 1, block + 7]);
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert_eq!(moves(&sent(&mut d)), [(first, 2), (first + 7, 1)]);
    assert_eq!((d.moving(), d.log.segments[seg as usize].live), (3, 3));
    assert!(!d.is_victim_empty(seg));

    // The reads have ended; what was read is appended, and lies elsewhere then.
    for (slot, count) in [(first, 2), (first + 7, 1)] {
        d.move_read_ended(slot, count);
        for slot in slot..slot + count {
            let data = Buf::zeroed(4096).all();
            let gone = shelf.gone(slot);
            let at = (1, gone.block);
            d.append_moved(Kind::Clean, at, slot, data, 0, Mark::Moved(gone.block));
            d.slot_gone(gone);
        }
    }
    assert_eq!(d.moving(), 3);
    assert!(
        !d.is_victim_empty(seg),
        "the only good copy is not on flash yet"
    );
    d.moves_go_on(true);
    d.pump(0);
    let seq = batches(&sent(&mut d))[0];
    let marks = written(&mut d, seq);
    assert_eq!(marks.len(), 3);
    assert!(marks.iter().all(|m| matches!(m, Mark::Moved(_))));
    marks.iter().for_each(|_| d.moved());
    assert!(d.is_victim_empty(seg));
}

#[test]
fn a_segment_that_is_all_dirty_waits_for_the_destager() {
    let (mut d, mut shelf) = short_of_room(DATA);
    let (seg, _) = d.next_victim(0).expect("room is short");
    assert!(!d.wants_clean());
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(d.wants_clean() && moves(&sent(&mut d)).is_empty());

    // What has no origin is moved, and nobody is hurried for it.
    let (mut d, mut shelf) = short_of_room(DATA);
    let (seg, _) = d.next_victim(0).expect("room is short");
    shelf.homeless = shelf.slots.values().map(|(block, _)| *block).collect();
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(!d.wants_clean() && !moves(&sent(&mut d)).is_empty());

    // One with less of it is moved on.
    let (mut d, mut shelf) = short_of_room(30);
    let (seg, _) = d.next_victim(0).expect("room is short");
    d.sift(seg, &mut shelf, 0);
    entries(&mut d);
    d.sift(seg, &mut shelf, 0);
    assert!(!d.wants_clean());
    assert_eq!(moves(&sent(&mut d)), [(seg * SEGMENT_BLOCKS + 1, 30)]);
}

#[test]
fn what_a_segment_says_is_on_flash_again_before_it_goes() {
    let mut d = device();
    let mut shelf = Shelf::default();
    append(&mut d, 0, 1, 1);
    write_all(&mut d);
    d.roll();
    write_all(&mut d);
    d.log.segments[0].live = 0;
    // Zeros that hold in part, and zeros that another segment says, too.
    shelf.zeros = vec![(100, 104)];
    d.log.zeros.add(0, 1, 100, 108);
    d.log.zeros.add(5, 1, 50, 60);
    // Void copies of three blocks, of which another segment has two; one of those is cached.
    shelf.slots.insert(900, (21, false));
    for block in [20, 21, 22] {
        d.dead.add(1, block);
    }
    d.dead.add(1, 22);
    // A clean copy elsewhere, and an open intent.
    shelf.slots.insert(901, (70, false));
    shelf.intents = vec![(64, 128)];
    d.set_entries(
        0,
        vec![
            said(Kind::ZeroRun, 100, 8),
            said(Kind::ZeroDoneRun, 55, 8),
            said(Kind::DropRun, 20, 2),
            Entry {
                slot: 1,
                ..said(Kind::Clean, 22, 7)
            },
            said(Kind::CleanedRun, 68, 4),
            said(Kind::Intent, 64, 64),
            said(Kind::Intent, 640, 64),
        ],
    );
    // It is not the oldest.
    d.log.segments[5] = Segment {
        seq: d.log.segments[0].seq - 1,
        ..d.log.segments[0]
    };
    d.log.order.push_front(5);
    // Something about one of the blocks is on its way.
    append(&mut d, 20, 1, 2);
    assert_eq!(d.say_again(0, &shelf, 0), None);
    d.log.clear_queue();
    let ord = d.say_again(0, &shelf, 0).expect("nothing holds it");
    let queued = d.log.queue.iter();
    let queued: Vec<_> = queued.map(|i| (i.kind, i.block, i.count)).collect();
    assert_eq!(
        queued,
        [
            (Kind::CleanedRun, 70, 1),
            (Kind::DropRun, 20, 1),
            (Kind::DropRun, 22, 1),
            (Kind::ZeroRun, 100, 4),
            (Kind::ZeroDoneRun, 55, 5),
            (Kind::Intent, 64, 64),
        ]
    );
    assert_eq!(ord, d.log.next_ord);
    // Its own copy is none any more.
    d.free_victim(0, ord);
    assert_eq!(d.dead.count(1, 22), 1);
}

#[test]
fn segments_that_are_to_be_free_wait_for_each_other_while_others_are_free() {
    let mut d = device();
    assert!(!d.is_short_of_free());
    let target = d.free_target();
    assert_eq!(
        target - d.log.reserve(),
        2,
        "a small pool keeps few segments ahead"
    );
    d.log.free.truncate(target);
    assert!(!d.is_short_of_free());
    d.log.free.pop_back();
    assert!(d.is_short_of_free(), "and so cannot wait");
    // A large one keeps many.
    let segment = d.log.segments[0];
    d.log.segments.resize(1024, segment);
    let (target, reserve) = (d.free_target(), d.log.reserve());
    d.log.free = (0..target as u32 - 1).collect();
    assert!(!d.is_short_of_free());
    d.log.free.truncate(reserve + 1);
    assert!(d.is_short_of_free());
}
