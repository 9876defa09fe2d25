//! A pool in which clean blocks are in one half of their segment: where what lies, and what goes with a device.

use super::shelf::*;
use super::*;
use crate::ctx::Io;
use crate::flash::choose::Way;
use hearth_format::Entry;
use hearth_format::{BatchHeader, DeviceEntry};

fn once() -> Device {
    device_on_two(true)
}

/// Two devices of one size, all segments free.
fn device_on_two(once: bool) -> Device {
    let laid_out = Layout::for_twice(&[16 << 20; 2], SEGMENT_BLOCKS, once);
    let (layout, extents) = laid_out.expect("it fits");
    let entries = extents.into_iter().zip(1..);
    let entries = entries.map(|(extent, n)| DeviceEntry {
        device: Uuid::from_u128(n),
        extent,
    });
    let uuid = Uuid::from_u128(1);
    let mut sb = Superblock::new(layout, uuid, uuid, "test", 0);
    sb.set_twice(layout, entries.collect());
    sb.incompat |= INCOMPAT_MAP;
    let mut d = Device::new(0, sb, true, Default::default());
    d.log.free = (0..d.log.segments.len() as u32).collect();
    d.log.next_segment_seq = 1;
    d
}

/// What a block is filled with.
fn fill(block: u64, n: u32) -> u8 {
    (block as u8).wrapping_mul(16) + n as u8
}

fn put(d: &mut Device, kind: Kind, block: u64, count: u32) {
    let data = Buf::zeroed(count as usize * 4096).all();
    for (n, bytes) in (0..).zip(data.clone().bytes_mut().chunks_mut(4096)) {
        bytes.fill(fill(block, n));
    }
    let crcs = smallvec![0; count as usize];
    let item = Item::data(kind, 1, block, data, crcs, Why::Filled, Mark::Awaited(0));
    d.log.push(item);
}

/// The one write among what is wanted: what each half gets.
fn halves(d: &mut Device) -> [Vec<u8>; 2] {
    let ios: Vec<(FlashOp, Io)> = d.out.ios.drain(..).collect();
    let [(FlashOp::Batch { .. }, io)] = &ios[..] else {
        panic!("{} operations", ios.len());
    };
    let bytes = |bufs: &[hearth_io::BufSlice]| {
        let bytes = bufs.iter().flat_map(|b| b.bytes().to_vec());
        bytes.collect::<Vec<u8>>()
    };
    let second = io.second.as_ref().expect("the halves differ");
    [bytes(&io.bufs), bytes(second)]
}

#[test]
fn every_block_stands_where_its_entry_says_and_what_is_dirty_in_both_halves() {
    let mut d = once();
    let runs = [
        (Kind::Clean, 1, 5),
        (Kind::Dirty, 2, 2),
        (Kind::Clean, 3, 1),
        (Kind::Clean, 4, 8),
        (Kind::Dirty, 5, 1),
    ];
    for (kind, block, count) in runs {
        put(&mut d, kind, block * 16, count);
    }
    d.log.urgent = true;
    d.pump(0);
    let halves = halves(&mut d);
    let mut entries = Vec::new();
    let header = BatchHeader::decode(&halves[0][..4096], &mut entries).expect("a descriptor");
    assert_eq!(halves[0][..4096], halves[1][..4096]);
    let half = d.log.half;
    assert!(
        header
            .check_rows(0, d.log.data_blocks, half, &entries)
            .is_ok()
    );
    // 3 dirty blocks and 14 clean ones.
    let rows = header.rows(0, half, &entries);
    assert!((10..=12).contains(&rows), "{rows}");
    assert_eq!(d.log.open_heads().next().map(|h| h.next), Some(1 + rows));
    let block = |side: usize, row: u32| halves[side].get(row as usize * 4096).copied();
    let mut seen = 0;
    for (kind, block_no, count) in runs {
        for n in 0..count {
            let e = entries
                .iter()
                .find(|e| e.block == block_no * 16 + u64::from(n));
            let e = e.expect("each block has an entry");
            let (side, row) = (u32::from(e.slot) / half, u32::from(e.slot) % half);
            let there = Some(fill(block_no * 16, n));
            assert_eq!(block(side as usize, row), there, "{e:?}");
            if kind == Kind::Dirty {
                assert_eq!((block(0, row), block(1, row)), (there, there), "{e:?}");
            }
            seen += 1;
        }
    }
    assert_eq!(entries.len(), seen);
}

#[test]
fn with_a_device_lost_everything_goes_to_the_half_that_is_left() {
    for lost in [0u16, 1] {
        let mut d = once();
        assert!(d.devices.spread().lose(lost));
        put(&mut d, Kind::Clean, 16, 6);
        d.log.urgent = true;
        d.pump(0);
        let halves = halves(&mut d);
        let mut entries = Vec::new();
        BatchHeader::decode(&halves[0][..4096], &mut entries).expect("a descriptor");
        // The first segment's first half is on the first device.
        let half = d.log.half;
        let on = |e: &Entry| u32::from(e.slot) / half;
        assert!(entries.iter().all(|e| on(e) == u32::from(1 - lost)));
    }
}

#[test]
fn what_went_with_a_device_is_dropped_when_it_is_durable_that_it_is_lost_and_not_before() {
    let mut d = once();
    let slots = d.log.segment_slots;
    // The second half of the first segment, and the first one of the second.
    let there = [d.log.half + 1, slots + 1];
    assert!(d.devices.spread().lose(1));
    d.device_lost();
    let mut steps = 0;
    loop {
        let ios: Vec<_> = d.out.ios.drain(..).collect();
        let Some((op, io)) = ios.first() else { break };
        assert!(matches!(op, FlashOp::Lost) && ios.len() == 1);
        assert!(d.next_dropped().is_none());
        assert!(!there.iter().any(|slot| d.is_gone(*slot)));
        d.lost_ended(io.kind, Ok(()), 0);
        steps += 1;
    }
    assert_eq!(steps, 4, "both copies, each flushed");
    assert!(there.iter().all(|slot| d.is_gone(*slot)));
    assert!(!d.is_gone(1) && !d.is_gone(slots + d.log.half + 1));
    let mut next = 0;
    while let Some(range) = d.next_dropped() {
        assert_eq!(range.start, next);
        next = range.end;
    }
    assert_eq!(next, d.layout.slots());
}

#[test]
fn what_was_passed_over_is_looked_at_again_when_the_log_is_durable_so_far() {
    let mut d = once();
    d.begin_dropping(2);
    let mut looked = 0;
    while let Some(range) = d.next_dropped() {
        looked += 1;
        // Two in one step are one.
        d.pass_over(range.start, 0);
        d.pass_over(range.start + 1, 7);
        if looked == d.layout.slots().div_ceil(1 << 14) {
            break;
        }
    }
    d.log.durable_ord = 6;
    assert!(d.next_dropped().is_none());
    d.log.durable_ord = 7;
    let mut next = 0;
    while let Some(range) = d.next_dropped() {
        assert_eq!(range.start, next);
        next = range.end;
    }
    assert_eq!(next, d.layout.slots(), "each once more, and no more often");
}

#[test]
fn below_its_floor_nothing_counts_that_stands_on_a_device_in_the_place_of_a_lost_one() {
    let mut d = once();
    d.sb.once.floor = 7 << 32;
    d.sb.once.behind = 2;
    for (seq, behind) in [(6 << 32, true), (7 << 32, false)] {
        d.log.segments[0].seq = seq;
        assert_eq!(d.is_behind(d.log.half + 1), behind);
        assert!(!d.is_behind(1), "that is on the first device");
    }
}

#[test]
fn a_block_that_was_dirty_and_went_with_a_device_is_void_when_what_says_that_it_is_clean_goes() {
    let cleaned = [Entry {
        disk: 1,
        kind: Kind::CleanedRun,
        block: 20,
        word: 4,
        slot: 0,
        flags: 0,
    }];
    for lost in [false, true] {
        let mut d = once();
        // Its copy, logged as dirty, lies in the first segment, and was dropped without a record.
        d.dead.add(1, 22);
        d.log.segments[0].state = SegState::Closed;
        d.log.segments[1].seq = 1;
        if lost {
            d.sb.lost = 2;
            d.note_gone();
        }
        let (said, _) = d
            .leaving(1, &cleaned)
            .holding(&Shelf::default(), Default::default());
        let said: Vec<_> = said.iter().map(|s| (s.kind, s.block, s.count)).collect();
        match lost {
            // Whoever dropped it said so.
            false => assert!(said.is_empty()),
            true => assert_eq!(said, [(Kind::DropRun, 22, 1)]),
        }
    }
}

/// What the segment that goes says was read whole from a device.
fn told(d: &mut Device, seg: u32, device: u16, bytes: &[u8]) {
    let buf = Buf::zeroed(d.log.data_blocks as usize * 4096).all();
    buf.clone().bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    let io = Io::read(hearth_io::Target::Flash(device), 0, buf);
    let op = op_of(io);
    d.log.segments[seg as usize].pins += 1;
    d.entries_read(seg, true, &op.done(Ok(()), 0), 0);
}

/// A start may have read the second half of everything; whoever frees a segment whose first half has rotted needs it, too.
#[test]
fn what_a_segment_says_is_read_from_its_second_half_where_the_first_one_has_rotted() {
    for rotten_too in [false, true] {
        let mut d = once();
        put(&mut d, Kind::Clean, 16, 4);
        d.log.urgent = true;
        d.pump(0);
        let [_, second] = halves(&mut d);
        let seg = d.log.open_heads().next().expect("a head").seg;
        d.batch_ended(1, &Ok(()));
        assert!(d.take_applied().is_some());
        d.roll();
        d.set_entries(seg, Vec::new());
        d.out.ios.clear();
        let sides = [0, 1].map(|side| {
            let at = d.layout.segment_offset(seg);
            d.devices.spread().device_of_side(at, side)
        });
        told(&mut d, seg, sides[0], &[]);
        let [(FlashOp::Entries { whole: true, .. }, io)] = &d.out.ios[..] else {
            panic!("{} operations", d.out.ios.len());
        };
        assert_eq!(
            d.devices.place(io.target, io.offset).0,
            hearth_io::Target::Flash(sides[1])
        );
        let usable = d.log.usable();
        let bytes = if rotten_too { &[][..] } else { &second[..] };
        told(&mut d, seg, sides[1], bytes);
        let lost = usize::from(rotten_too);
        assert_eq!(d.log.usable(), usable - lost);
        assert_eq!(d.entries_counting(seg).len(), 4 * (1 - lost));
    }
}

/// Where a read of what a segment says goes, and that it is one.
fn entries_read_at(d: &mut Device) -> (bool, hearth_io::IoOp) {
    let ios: Vec<(FlashOp, Io)> = d.out.ios.drain(..).collect();
    let [(FlashOp::Entries { whole, .. }, _)] = ios[..] else {
        panic!("{} operations", ios.len());
    };
    let (_, io) = ios.into_iter().next().expect("it was looked at");
    let (target, offset) = match io.placed {
        true => (io.target, io.offset),
        false => d.devices.place(io.target, io.offset),
    };
    let op = op_of(io);
    (
        whole,
        hearth_io::IoOp {
            target,
            offset,
            ..op
        },
    )
}

/// What the half is like that is asked next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Other {
    Whole,
    Rotten,
    /// What a device does not read it asks the other one for: without an end, if that one is rotten.
    Unreadable,
}

/// The same where the halves do not differ: there is no second address, and the segment stayed for ever, with a good half.
#[test]
fn what_a_segment_says_is_read_from_either_half_where_both_have_all_of_it() {
    for other in [Other::Whole, Other::Rotten, Other::Unreadable] {
        let rotten_too = other != Other::Whole;
        for n in 0u64..2 {
            let mut d = device_on_two(false);
            let mut bytes = Vec::new();
            // The second segment is read from the other device first.
            for seg in 0..=n {
                put(&mut d, Kind::Clean, 16 + seg, 4);
                d.log.urgent = true;
                d.pump(0);
                let ios: Vec<(FlashOp, Io)> = d.out.ios.drain(..).collect();
                let [(FlashOp::Batch { .. }, io)] = &ios[..] else {
                    panic!("{} operations", ios.len());
                };
                bytes = io.bufs.iter().flat_map(|b| b.bytes().to_vec()).collect();
                d.batch_ended(seg + 1, &Ok(()));
                assert!(d.take_applied().is_some());
                if seg < n {
                    d.roll();
                    d.out.ios.clear();
                }
            }
            let seg = d.log.open_heads().next().expect("a head").seg;
            d.roll();
            let summaries: Vec<_> = d.out.ios.drain(..).collect();
            for (op, _) in summaries {
                if let FlashOp::Summary { seg } = op {
                    d.summary_ended(seg, &Ok(()));
                }
            }
            d.begin_with(seg, Way::Chosen);
            assert!(!d.read_entries(seg));
            let usable = d.log.usable();
            let mut devices = Vec::new();
            for (step, whole) in [false, true, true].into_iter().enumerate() {
                let (is_whole, op) = entries_read_at(&mut d);
                assert_eq!(is_whole, whole);
                devices.push(op.target);
                if step == 2 && !rotten_too {
                    op.bufs[0].clone().bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
                }
                let target = match (step, other) {
                    // The device has asked the first one again.
                    (2, Other::Unreadable) => devices[0],
                    _ => op.target,
                };
                let op = hearth_io::IoOp { target, ..op };
                d.entries_read(seg, whole, &op.done(Ok(()), 0), 0);
            }
            assert_eq!(devices[0], devices[1]);
            assert_ne!(devices[1], devices[2], "the other half");
            let lost = usize::from(rotten_too);
            assert_eq!(d.log.usable(), usable - lost);
            assert_eq!(d.entries_counting(seg).len(), 4 * (1 - lost));
            assert!(d.out.ios.is_empty());
        }
    }
}
