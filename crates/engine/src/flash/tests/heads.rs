//! Two segments that are written at once: what comes when after a crash, and what goes together.

use super::recovery::{Known, Sparse, contents, crc, media, perform, put, say, start, sync};
use super::{Device, IO, Mark, batches, device, sent, written};
use crate::flash::log::{Item, SegState};
use crate::flash::recover::Recovered;
use crate::flash::rescue::HELD;
use hearth_format::superblock::INCOMPAT_HEADS;
use hearth_format::{BatchHeader, Kind};
use hearth_io::{BLOCK, Buf, Media, OpKind};
use hearth_policy::cleaning::{Heads, Why};
use smallvec::smallvec;

/// A device that writes what is moved to a segment of its own.
fn two() -> Device {
    let mut d = device();
    d.set_heads(Heads::MovesApart);
    d.sb.incompat |= INCOMPAT_HEADS;
    d
}

/// Appends a block that is all `byte`, as if it had lain in segment 9.
fn moved(d: &mut Device, block: u64, byte: u8) -> u64 {
    let mut data = Buf::zeroed(BLOCK as usize).all();
    data.bytes_mut().fill(byte);
    let why = Why::Moved { from: 9 };
    let token = Mark::Moved(block);
    let item = Item::data(
        Kind::Dirty,
        1,
        block,
        data,
        smallvec![crc(byte)],
        why,
        token,
    );
    d.log.push(item)
}

/// Makes the numbers of batches lie alternately in segments 0 and 1: blocks 1 to 8 with their numbers as content.
fn alternating(d: &mut Device, media: &mut Sparse) {
    for n in 1..=8u8 {
        match n % 2 {
            1 => put(d, Kind::Dirty, n.into(), n),
            _ => moved(d, n.into(), n),
        };
        perform(d, media);
    }
}

#[test]
fn what_is_moved_lies_apart_and_what_came_later_passes_it() {
    let mut d = two();
    for n in 0..6u8 {
        match n % 2 {
            0 => put(&mut d, Kind::Dirty, n.into(), n),
            _ => moved(&mut d, n.into(), n),
        };
    }
    d.log.urgent = true;
    d.pump(0);
    let blocks = |d: &Device| -> Vec<(u32, Vec<u64>)> {
        let of = |items: &[Item<Mark>]| items.iter().map(|i| i.block).collect();
        d.log
            .batches
            .iter()
            .map(|b| (b.seg, of(&b.items)))
            .collect()
    };
    assert_eq!(blocks(&d), [(0, vec![0, 2, 4]), (1, vec![1, 3, 5])]);
    // Of the second batch nothing is on flash, so of the queue only what is in front of what was passed counts.
    let ops = sent(&mut d);
    assert_eq!(batches(&ops), [1, 2]);
    written(&mut d, 1);
    assert_eq!(d.log.applied_ord, 1);
    written(&mut d, 2);
    assert_eq!(d.log.applied_ord, d.log.next_ord);
}

#[test]
fn nothing_passes_what_speaks_of_the_same_blocks() {
    let mut d = two();
    put(&mut d, Kind::Dirty, 1, 1);
    moved(&mut d, 2, 2);
    // The moved copy must not come behind either of these.
    say(&mut d, Kind::CleanedRun, 2, 1);
    put(&mut d, Kind::Dirty, 2, 20);
    put(&mut d, Kind::Dirty, 3, 3);
    d.log.urgent = true;
    d.pump(0);
    let order: Vec<u64> = (d.log.batches.iter())
        .flat_map(|b| b.items.iter().map(|i| i.ord))
        .collect();
    assert_eq!(order[..3], [1, 2, 3], "{order:?}");
}

#[test]
fn what_two_segments_say_counts_in_the_order_of_its_batches() {
    let (mut d, mut media) = (two(), media());
    alternating(&mut d, &mut media);
    // Each is superseded, or said to be clean, by a batch in the other.
    moved(&mut d, 1, 10);
    perform(&mut d, &mut media);
    say(&mut d, Kind::CleanedRun, 1, 2);
    put(&mut d, Kind::Dirty, 4, 40);
    sync(&mut d, &mut media);
    let expected = [
        (1, crc(10), false),
        (2, crc(2), false),
        (3, crc(3), true),
        (4, crc(40), true),
        (5, crc(5), true),
        (6, crc(6), true),
        (7, crc(7), true),
        (8, crc(8), true),
    ];
    let mut open = two_as_stored(&mut media);
    assert_eq!(contents(&open.1), expected);
    assert_eq!((open.2.segments, open.2.discarded), (2, 0));
    // The start has sealed both, so the next one has only their summaries.
    open = two_as_stored(&mut media);
    assert_eq!(contents(&open.1), expected);
}

/// What a start finds that knows of two heads.
fn two_as_stored(media: &mut Sparse) -> (Device, Known, Recovered) {
    start(media, INCOMPAT_HEADS)
}

#[test]
fn a_log_of_one_head_reads_the_same_with_two() {
    let (mut d, mut media) = (device(), media());
    put(&mut d, Kind::Dirty, 1, 1);
    sync(&mut d, &mut media);
    d.roll();
    put(&mut d, Kind::Dirty, 2, 2);
    sync(&mut d, &mut media);
    let (_, old, _) = start(&mut media, 0);
    let (_, new, _) = two_as_stored(&mut media);
    assert_eq!(old, new);
    assert_eq!(contents(&new), [(1, crc(1), true), (2, crc(2), true)]);
}

#[test]
fn the_first_batch_that_is_sent_again_says_so_and_goes_alone() {
    let (mut d, mut media) = (two(), media());
    alternating(&mut d, &mut media);
    d.flush(0);
    perform(&mut d, &mut media);
    put(&mut d, Kind::Dirty, 21, 21);
    moved(&mut d, 22, 22);
    d.log.urgent = true;
    d.pump(0);
    // The first of two is refused; the second is on flash, in the segment of what is moved.
    let ios: Vec<_> = d.out.ios.drain(..).collect();
    assert_eq!(ios.len(), 2);
    let bytes: Vec<u8> = (ios[1].1.bufs.iter())
        .flat_map(|b| b.bytes().to_vec())
        .collect();
    media.write_at(ios[1].1.offset, &bytes).unwrap();
    written(&mut d, 10);
    d.batch_ended(9, &Err(IO));
    // It is tried once more where it was.
    for _ in 0..10 {
        if d.log.next_batch_seq == 10 {
            break;
        }
        d.out.ios.clear();
        d.batch_ended(9, &Err(IO));
        d.go_on(0, 0);
    }
    let ios: Vec<_> = d.out.ios.drain(..).collect();
    assert_eq!(ios.len(), 1, "nothing follows before it is durable");
    let header = BatchHeader::decode(ios[0].1.bufs[0].bytes(), &mut Vec::new()).unwrap();
    assert_eq!(header.batch_seq, 9);
    assert_eq!(header.flags, hearth_format::batch::BATCH_AGAIN);
    let bytes: Vec<u8> = (ios[0].1.bufs.iter())
        .flat_map(|b| b.bytes().to_vec())
        .collect();
    media.write_at(ios[0].1.offset, &bytes).unwrap();
    // What was batch 10 is there, and does not count.
    let (_, known, _) = two_as_stored(&mut media);
    let found: Vec<u64> = known.blocks.keys().copied().filter(|b| *b > 8).collect();
    assert_eq!(found, [21]);
}

#[test]
fn a_segment_ends_where_the_map_says_whatever_stands_behind_it() {
    let (mut d, mut media) = (two(), media());
    alternating(&mut d, &mut media);
    sync(&mut d, &mut media);
    // As if batches from 6 on had failed and come again elsewhere, in a segment that is free by now.
    d.log.heads[1].as_mut().unwrap().marks.truncate(2);
    d.store_whole_map(&mut media).unwrap();
    let (_, known, _) = two_as_stored(&mut media);
    let moved: Vec<u64> = known
        .blocks
        .keys()
        .copied()
        .filter(|b| b % 2 == 0)
        .collect();
    assert_eq!(moved, [2, 4]);
}

#[test]
fn segments_written_side_by_side_go_with_one_map() {
    let (mut d, mut media) = (two(), media());
    alternating(&mut d, &mut media);
    sync(&mut d, &mut media);
    d.roll();
    sync(&mut d, &mut media);
    put(&mut d, Kind::Dirty, 100, 1);
    sync(&mut d, &mut media);
    d.roll();
    sync(&mut d, &mut media);
    let (first, second, third) = (d.log.order[0], d.log.order[1], d.log.order[2]);
    assert!(!d.is_oldest(first) && !d.is_oldest(second));
    let frees = |d: &mut Device| {
        let ios: Vec<_> = d.out.ios.drain(..).collect();
        assert!(ios.iter().all(|(_, io)| io.kind == OpKind::Write));
        ios.len()
    };
    d.waits_no_more(first);
    assert_eq!(
        frees(&mut d),
        0,
        "what lies beside it has copies that it voids"
    );
    let held = SegState::Freeing { ord: HELD };
    assert_eq!(d.log.segments[first as usize].state, held);
    // Nor does one go that has said all it has to say.
    let ord = d.log.applied_ord;
    d.free_segment(third, ord);
    d.store_map();
    assert_eq!(frees(&mut d), 0, "it may void what the others hold");
    d.waits_no_more(second);
    assert!(frees(&mut d) > 0);
    for seg in [first, second, third] {
        let gone = d.map_entry(seg, d.log.durable_seq).0;
        assert_eq!(gone.seq, 0, "segment {seg}");
    }
}
