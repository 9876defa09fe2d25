//! Golden bytes: what version 1 of the format looks like, to the byte.
//!
//! The expected bytes were computed from `docs/format.md` by a separate program, not by the
//! encoders under test. If one of these tests fails, the format has changed: pools already
//! written would not be read. Raise a version or add a feature flag instead of the constant.

use hearth_format::disk::OriginIdentity;
use hearth_format::journal::{Change, JournalEntry};
use hearth_format::mirror::{LegStamp, LegState, MirrorNotes, MirrorStamps};
use hearth_format::order::ORDER_NOTE_BYTES;
use hearth_format::registry::{Front, Moved};
use hearth_format::superblock::{INCOMPAT_AREAS, INCOMPAT_HEADS, INCOMPAT_MAP};
use hearth_format::{
    Area, BatchHeader, BatchMark, CacheMode, CheckpointHeader, DeviceEntry, DiskRecord, Entry,
    Home, Kind, Layout, MapEntry, MapHeader, PoolNotes, PoolState, Registry, Section, SegmentMap,
    SummaryHeader, Superblock, Uuid, pool_tag,
};
use hearth_format::{Mark, OrderNote};
use hearth_io::Media;

#[allow(dead_code)]
mod common;
use common::Flash;

/// Decodes `lines` of hex and pads with zeros to a block.
fn hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

fn block(lines: &[&str]) -> Vec<u8> {
    let mut bytes = hex(&lines.concat());
    bytes.resize(4096, 0);
    bytes
}

fn pool() -> Uuid {
    Uuid::from_bytes(std::array::from_fn(|i| 0x10 + i as u8))
}

fn device() -> Uuid {
    Uuid::from_bytes(std::array::from_fn(|i| 0xa0 + i as u8))
}

fn entries() -> Vec<Entry> {
    let entry = |disk, block, word, slot, kind| Entry {
        disk,
        block,
        word,
        slot,
        kind,
        flags: 0,
    };
    vec![
        entry(7, 0x1234_5678_9abc, 0xdead_beef, 1, Kind::Dirty),
        entry(1, 5, 0x0102_0304, 2, Kind::Clean),
        entry(0xffff, 100, 3, 0, Kind::CleanedRun),
        entry(2, 0, u32::MAX, 0, Kind::Intent),
    ]
}

#[test]
fn the_pool_tag_is_the_start_of_the_uuid() {
    assert_eq!(pool_tag(&pool()).to_le_bytes(), pool().as_bytes()[..8]);
}

#[test]
fn kinds_have_their_numbers() {
    let kinds = [
        Kind::Clean,
        Kind::Dirty,
        Kind::CleanedRun,
        Kind::DropRun,
        Kind::ZeroRun,
        Kind::ZeroDoneRun,
        Kind::Intent,
        Kind::IntentClear,
        Kind::Through,
    ];
    for (number, kind) in (1..).zip(kinds) {
        assert_eq!(kind as u8, number);
        assert_eq!(Kind::from_u8(number), Some(kind));
    }
    assert_eq!((Kind::from_u8(0), Kind::from_u8(10)), (None, None));
}

/// As many areas as there may be end before what stands behind their list.
#[test]
fn a_full_list_of_areas_leaves_what_is_behind_it_alone() {
    let layout = Layout::for_device(1 << 30, 256).unwrap();
    let mut sb = Superblock::new(layout, pool(), device(), "golden", 1_700_000_000);
    let without = sb.encode();
    let areas: Vec<Area> = (0..hearth_format::areas::AREAS_MAX as u32)
        .map(|n| Area {
            first: 100 + 3 * n,
            segments: 2,
        })
        .collect();
    for area in &areas {
        sb.add_area(*area).unwrap();
    }
    let with = sb.encode();
    let one_more = Area {
        first: 400,
        segments: 1,
    };
    assert!(sb.add_area(one_more).is_err());
    assert_eq!(with[320..328], [63, 0, 0, 0, 0, 0, 0, 0]);
    for (n, area) in areas.iter().enumerate() {
        let entry = &with[328 + 16 * n..][..16];
        let golden = [
            &[3, 0, 0, 0],
            &area.first.to_le_bytes()[..],
            &[2, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(entry, golden.concat());
    }
    assert_eq!(
        with[1336..],
        without[1336..],
        "1344 and what follows is of devices"
    );
    assert_eq!(Superblock::decode(&with[..]).unwrap().areas, areas);
}

#[test]
fn marks_of_ordered_disks_stand_in_block_and_word() {
    let golden = [
        (7, true, 7, 2),
        (7, false, 7, 1),
        (5 << 36 | 9, true, 9, 12),
    ];
    for (batch, in_order, block, word) in golden {
        let mark = Mark { batch, in_order };
        assert_eq!(mark.to_fields(), (block, word));
        assert_eq!(Mark::from_fields(block, word), mark);
    }
}

#[test]
fn notes_of_ordered_disks() {
    let note = OrderNote {
        serial: pool(),
        sequence: 3,
        upto_ms: 1_700_000_000_123,
    };
    let (at, bytes) = note.encode();
    assert_eq!(at, 512, "odd ones go to the second slot");
    assert_eq!(&bytes[..4], b"HORD");
    assert_eq!(bytes[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&bytes[16..32], pool().as_bytes());
    assert_eq!(bytes[32..40], [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[40..48], 1_700_000_000_123u64.to_le_bytes());
    assert!(bytes[48..].iter().all(|b| *b == 0));
    let mut place = [0; ORDER_NOTE_BYTES];
    assert_eq!(OrderNote::newest(&place).unwrap(), None);
    place[512..].copy_from_slice(&bytes);
    let older = OrderNote {
        sequence: 2,
        ..note
    };
    place[..512].copy_from_slice(&older.encode().1);
    assert_eq!(OrderNote::newest(&place).unwrap(), Some(note));
    // One that was torn leaves the one before.
    place[700] ^= 1;
    assert_eq!(OrderNote::newest(&place).unwrap(), Some(older));
    place[8] = 2;
    let crc = hearth_io::checksum::crc32c(&{
        let mut zeroed = place[..512].to_vec();
        zeroed[4..8].fill(0);
        zeroed
    });
    place[4..8].copy_from_slice(&crc.to_le_bytes());
    assert!(OrderNote::newest(&place).is_err(), "a later version");
}

const BATCH: &[&str] = &[
    "48424154431d6e2610111213141516171100000000000000e803000000000000",
    "0300000000000000e6030000000000002a000000000000000400020010010000",
    "bc9a785634120700efbeadde0100020005000000000001000403020102000100",
    "640000000000ffff03000000000003000000000000000200ffffffff000007",
];

#[test]
fn batch() {
    let header = BatchHeader {
        pool_tag: pool_tag(&pool()),
        segment_seq: 17,
        batch_seq: 1000,
        bound_seq: 3,
        durable_seq: 998,
        epoch: 42,
        data_blocks: 2,
        flags: 0,
    };
    let mut out = vec![0xEE; 4096];
    header.encode(&entries(), &mut out).unwrap();
    assert_eq!(out, block(BATCH));
    let mut back = Vec::new();
    assert_eq!(BatchHeader::decode(&out, &mut back).unwrap(), header);
    assert_eq!(back, entries());
}

/// The first of those that failed and are sent again.
const BATCH_AGAIN: &[&str] = &[
    "48424154b276940a10111213141516171100000000000000e803000000000000",
    "0300000000000000e6030000000000002a000000000000000400020010010100",
    "bc9a785634120700efbeadde0100020005000000000001000403020102000100",
    "640000000000ffff03000000000003000000000000000200ffffffff000007",
];

#[test]
fn batch_that_is_sent_again() {
    let golden = block(BATCH_AGAIN);
    let mut back = Vec::new();
    let header = BatchHeader::decode(&golden, &mut back).unwrap();
    assert_eq!(header.flags, hearth_format::batch::BATCH_AGAIN);
    assert_eq!((header.batch_seq, &back), (1000, &entries()));
    let mut out = vec![0xEE; 4096];
    header.encode(&back, &mut out).unwrap();
    assert_eq!(out, golden);
}

const SUMMARY: &[&str] = &[
    "4853554d192d74b010111213141516171100000000000000e803000000000000",
    "0300000000000000e6030000000000002a000000000000000500000004001000",
    "bc9a785634120700efbeadde0100020005000000000001000403020102000100",
    "640000000000ffff03000000000003000000000000000200ffffffff000007",
];

fn summary_header(bound_seq: u64) -> SummaryHeader {
    SummaryHeader {
        pool_tag: pool_tag(&pool()),
        segment_seq: 17,
        first_batch_seq: 1000,
        last_batch_seq: 1005,
        bound_seq,
        durable_seq: 998,
        epoch: 42,
        entry_count: 4,
    }
}

/// As it was before there was a segment map.
#[test]
fn summary() {
    let header = summary_header(3);
    let mut out = vec![0xEE; 10];
    header.encode(&entries(), &[], &mut out).unwrap();
    assert_eq!(out, block(SUMMARY));
    let (mut back, mut batches) = (Vec::new(), Vec::new());
    let decoded = SummaryHeader::decode(&out, &mut back, &mut batches);
    assert_eq!(decoded.unwrap(), header);
    assert_eq!((back, batches), (entries(), Vec::new()));
}

const SUMMARY_WITH_BATCHES: &[&str] = &[
    "4853554d2df57a1310111213141516171100000000000000e803000000000000",
    "0000000000000000e6030000000000002a000000000000000500000004001001",
    "bc9a785634120700efbeadde0100020005000000000001000403020102000100",
    "640000000000ffff03000000000003000000000000000200ffffffff00000700",
    "03000000e80300000000000002000000eb0300000000000001000000ed030000",
    "0000000001",
];

#[test]
fn summary_with_its_batches() {
    let header = summary_header(0);
    let mark = |(seq, entries)| BatchMark { seq, entries };
    let marks = [(1000, 2), (1003, 1), (1005, 1)].map(mark);
    let mut out = vec![0xEE; 10];
    header.encode(&entries(), &marks, &mut out).unwrap();
    assert_eq!(out, block(SUMMARY_WITH_BATCHES));
    let (mut back, mut batches) = (Vec::new(), Vec::new());
    let decoded = SummaryHeader::decode(&out, &mut back, &mut batches);
    assert_eq!(decoded.unwrap(), header);
    assert_eq!((back, batches), (entries(), marks.to_vec()));
}

const MAP: [&[&str]; 3] = [
    &[
        "484d4150869f139010111213141516170300000000000000ef03000000000000",
        "250100008a07b47c",
    ],
    &[
        "484d54423688d0ea00000000000000001100000000000000ed03000000000000",
        "0000000000000000000000000000000005000000000000808403",
    ],
    &[
        "484d5442b87e2e89010000000000000000000000000000000000000000000000",
        "1200000000000000ef03",
    ],
];

/// A small device, whose registry never grows into the checkpoint area, and larger ones, whose registry may.
#[test]
fn places_of_the_segment_map() {
    for (bytes, segment_blocks, segments, copies) in [
        (300 << 20, 256, 293, [7_315_456, 7_327_744]),
        (1 << 30, 1024, 253, [12_566_528, 12_574_720]),
        (64 << 30, 1024, 16_287, [372_760_576, 373_026_816]),
    ] {
        let layout = Layout::for_device(bytes, segment_blocks).unwrap();
        assert_eq!(layout.segment_count, segments);
        assert_eq!([0, 1].map(|copy| layout.map_offset(copy)), copies);
    }
}

#[test]
fn segment_map() {
    let layout = Layout::for_device(300 << 20, 256).unwrap();
    let mut entries = vec![MapEntry::default(); layout.segment_count as usize];
    for (seg, seq, last_batch) in [(0, 17, 1005), (2, 5, 900), (256, 18, 1007)] {
        entries[seg] = MapEntry {
            seq,
            last_batch,
            clean: seg == 2,
        };
    }
    let mut map = SegmentMap {
        header: MapHeader {
            pool_tag: pool_tag(&pool()),
            generation: 3,
            through: 1007,
            segments: layout.segment_count,
            table_crc: 0x7cb4_078a,
        },
        entries,
        copy: 0,
    };
    let bytes: Vec<u8> = MAP.into_iter().flat_map(block).collect();
    let mut flash = Flash::new(300 << 20);
    map.store(&mut flash, &layout).unwrap();
    for copy in [0, 1] {
        let mut found = vec![0; bytes.len()];
        flash.read_at(layout.map_offset(copy), &mut found).unwrap();
        assert_eq!(found, bytes, "copy {copy}");
        // Written by another program.
        let mut flash = Flash::new(300 << 20);
        flash.write_at(layout.map_offset(copy), &bytes).unwrap();
        let read = SegmentMap::load(&mut flash, &layout, pool_tag(&pool()));
        map.copy = copy;
        assert_eq!(read.as_ref(), Some(&map));
    }
}

const SUPERBLOCK: &[&str] = &[
    "484541525448534201000000bbdb097f00000000000000000900000000000000",
    "0000000000000000040000000000000001010000010000001011121314151617",
    "18191a1b1c1d1e1fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf0000040000000000",
    "000400000400000000040000000000000008000000000000000c000000000000",
    "fd0000000000000000f15365000000004d000000000000000020000000000000",
    "0474616e6b000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "06686f73742d31",
];

#[test]
fn superblock() {
    let layout = Layout::for_device(1 << 30, 1024).unwrap();
    let mut superblock = Superblock::new(layout, pool(), device(), "tank", 1_700_000_000);
    superblock.generation = 9;
    superblock.compat = 4;
    superblock.state = PoolState::Clean {
        checkpoint_id: 77,
        checkpoint_bytes: 8192,
    };
    superblock.last_host = "host-1".to_owned();
    assert_eq!(superblock.encode().to_vec(), block(SUPERBLOCK));
    assert_eq!(Superblock::decode(&block(SUPERBLOCK)).unwrap(), superblock);
}

const SUPERBLOCK_OF_TWO_HEADS: &[&str] = &[
    "484541525448534201000000a956e2b684000000000000000900000000000000",
    "0000000000000000040000000000000001010000010000001011121314151617",
    "18191a1b1c1d1e1fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf0000040000000000",
    "000400000400000000040000000000000008000000000000000c000000000000",
    "fd0000000000000000f15365000000004d000000000000000020000000000000",
    "0474616e6b000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "06686f73742d31",
];

#[test]
fn superblock_of_a_pool_that_is_written_in_two_segments_at_once() {
    let golden = block(SUPERBLOCK_OF_TWO_HEADS);
    let sb = Superblock::decode(&golden).unwrap();
    assert_eq!(sb.incompat, INCOMPAT_MAP | INCOMPAT_HEADS);
    assert_eq!(sb.encode().to_vec(), golden);
}

const SUPERBLOCK_WITH_AREAS: &[&str] = &[
    "484541525448534201000000396fcc2485000000000000000900000000000000",
    "0000000000000000040000000000000001010000010000001011121314151617",
    "18191a1b1c1d1e1fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf0000040000000000",
    "000400000400000000040000000000000008000000000000000c000000000000",
    "fd0000000000000000f15365000000004d000000000000000020000000000000",
    "0474616e6b000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "06686f73742d3100000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "02000000000000000300000064000000320000000000000003000000c8000000",
    "35",
];

#[test]
fn superblock_of_a_pool_that_has_set_segments_aside() {
    let golden = block(SUPERBLOCK_WITH_AREAS);
    let sb = Superblock::decode(&golden).unwrap();
    assert_eq!(sb.incompat, INCOMPAT_AREAS | INCOMPAT_MAP | INCOMPAT_HEADS);
    let area = |first, segments| Area { first, segments };
    assert_eq!(sb.areas, [area(100, 50), area(200, 53)]);
    assert_eq!(sb.encode().to_vec(), golden);
}

const SUPERBLOCK_OF_SECOND: &[&str] = &[
    "4845415254485342010000000b463b5a0c000000000000000600000000000000",
    "0000000000000000000000000000000000000100020000001011121314151617",
    "18191a1b1c1d1e1fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf00fc050000000000",
    "00040000040000000004000000000000000c0000000000000010000000000000",
    "7b0100000000000000f153650000000000000000000000000000000000000000",
    "0474616e6b000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000005000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "00000000000000000000000000000000b0b1b2b3b4b5b6b7b8b9babbbcbdbebf",
    "00000400000000000010000000000000fc00000000000000a0a1a2a3a4a5a6a7",
    "a8a9aaabacadaeaf000002000000000000040000000000007f",
];

#[test]
fn superblock_of_the_second_of_two_devices() {
    let (layout, extents) = Layout::for_devices(&[1 << 30, 1 << 29], 1024).unwrap();
    let first = Uuid::from_bytes(std::array::from_fn(|i| 0xb0 + i as u8));
    let mut lead = Superblock::new(layout, pool(), first, "tank", 1_700_000_000);
    let entries = [first, device()].into_iter().zip(extents);
    let entries = entries.map(|(device, extent)| DeviceEntry { device, extent });
    lead.set_devices(layout, entries.collect());
    lead.incompat |= INCOMPAT_MAP;
    (lead.stamp, lead.next_stamp) = (5, 6);
    let mut second = lead.for_member(1, device(), 1_700_000_000);
    (second.copy, second.generation) = (0, 6);
    let golden = block(SUPERBLOCK_OF_SECOND);
    assert_eq!(second.encode().to_vec(), golden);
    assert_eq!(Superblock::decode(&golden).unwrap(), second);
}

const SUPERBLOCK_TWICE: &[&str] = &[
    "484541525448534201000000dca4a7571c000000000000000900000000000000",
    "0000000000000000000000000000000001000100020000001011121314151617",
    "18191a1b1c1d1e1fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf0000030000000000",
    "000400000400000000040000000000000008000000000000000c000000000000",
    "bd0000000000000000f153650000000000000000000000000000000000000000",
    "0474616e6b000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000007000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "00000000000000000100000000000000b0b1b2b3b4b5b6b7b8b9babbbcbdbebf",
    "0000040000000000000c000000000000bd00000000000000a0a1a2a3a4a5a6a7",
    "a8a9aaabacadaeaf0000030000000000000c000000000000bd",
];

/// The second device of a pool that keeps everything twice, whose first is lost.
#[test]
fn superblock_of_a_pool_that_keeps_everything_twice() {
    let (layout, extents) = Layout::for_twice(&[1 << 30, 3 << 28], 1024).unwrap();
    let first = Uuid::from_bytes(std::array::from_fn(|i| 0xb0 + i as u8));
    let mut sb = Superblock::new(layout, pool(), first, "tank", 1_700_000_000);
    let entries = [first, device()].into_iter().zip(extents);
    let entries = entries.map(|(device, extent)| DeviceEntry { device, extent });
    sb.set_twice(layout, entries.collect());
    sb.incompat |= INCOMPAT_MAP;
    (sb.stamp, sb.lost, sb.generation, sb.copy) = (7, 1, 9, 1);
    let golden = block(SUPERBLOCK_TWICE);
    // As it is written to the second device.
    let own = sb.spread().own_block(1 << 20, sb.encode().as_slice(), 1);
    assert_eq!(own.as_deref(), Some(golden.as_slice()));
    let second = Superblock {
        device: device(),
        device_index: 1,
        ..sb
    };
    assert_eq!(Superblock::decode(&golden).unwrap(), second);
}

const REGISTRY: &[&str] = &[
    "4852454773e30a4d101112131415161718191a1b1c1d1e1f0600000000000000",
    "d000000002000000000000000400000000000000000000000000000000000000",
    "01000000be00000001000200030002000400766d2d310300120066696c653a2f",
    "7372762f766d2d312e696d670400080000000040000000000500010002060004",
    "0000000100070008000010000000000000080008000020000000000000090008",
    "0000001000000000000a000100010b00080037000000000000000c001000a0a1",
    "a2a3a4a5a6a7a8a9aaabacadaeaf0d0028000000004000000000ffffffffffff",
    "ffff0200000000000000030000000000000004000000000000000e0001000163",
    "0003006e657707000000020000006f6b",
];

#[test]
fn registry() {
    let disk = DiskRecord {
        id: 3,
        name: "vm-1".to_owned(),
        origin: "file:/srv/vm-1.img".to_owned(),
        size: 1 << 30,
        mode: CacheMode::WriteThrough,
        block_size: 65536,
        min_bytes: 4096,
        max_bytes: 8192,
        seq_cutoff: 1 << 20,
        read_only: true,
        since_seq: 55,
        serial: device(),
        origin_identity: Some(OriginIdentity {
            size: 1 << 30,
            mtime_ns: -1,
            ctime_ns: 2,
            dev: 3,
            inode: 4,
        }),
        clean_detach: true,
        auto: false,
        origin_timeout_ms: 0,
        rules: 0,
        sole_user: false,
        allow_backing: false,
        chain: Vec::new(),
        clients: 0,
        fenced_at: 0,
        datastore: String::new(),
        mirror: None,
        home: Home::Origin,
        max_age_ms: 0,
        pin: false,
        unknown: vec![(99, b"new".to_vec())],
    };
    let registry = Registry {
        generation: 6,
        next_disk_id: 4,
        disks: vec![disk.into()],
        unknown_records: vec![(7, b"ok".to_vec())],
    };
    assert_eq!(registry.encode(pool()).unwrap(), block(REGISTRY));
    assert_eq!(
        Registry::decode(&block(REGISTRY), pool()).unwrap(),
        registry
    );
}

/// What a disk carries only if it is used: fields 17 to 22.
#[test]
fn terms_of_a_disk() {
    let plain = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "/a".to_owned(),
        ..DiskRecord::default()
    };
    let disk = DiskRecord {
        rules: 1,
        sole_user: true,
        allow_backing: true,
        chain: vec!["/b".to_owned(), "/c".to_owned()],
        clients: 1,
        fenced_at: 0x6912_3456,
        datastore: String::new(),
        mirror: None,
        ..plain.clone()
    };
    let encode = |disk: &DiskRecord| {
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.clone().into()],
            unknown_records: Vec::new(),
        };
        registry.encode(pool()).unwrap()
    };
    let bytes = encode(&disk);
    let terms = hex("12000100011300010001110001000114000500\
         2f620a2f631500040001000000168008005634126900000000");
    assert!(bytes.windows(terms.len()).any(|window| window == terms));
    assert!(
        !encode(&plain)
            .windows(4)
            .any(|window| window == &terms[..4])
    );
    let back = Registry::decode(&bytes, pool()).unwrap();
    assert_eq!(back.disks, [disk.into()]);
}

const JOURNAL_ENTRY: &[&str] = &[
    "4852474a1dd53e31101112131415161706000000000000000700000000000000",
    "8a00000001000500000000000000000000000000000000000000000000000000",
    "0200000002000000030001000000780000000100020004000200010061030002",
    "002f610400080000000000000000000500010001060004000000000007000800",
    "0000000000000000080008000000000000000000090008000000000000000000",
    "0a000100000b00080000000000000000000c0010000000000000000000000000",
    "00000000000e0001",
];
const MOVED: &[&str] = &[
    "485245479233f45a101112131415161718191a1b1c1d1e1f0900000000000000",
    "0000000000000000020000000000000088130000000000002c01",
];
const BASE: &[&str] = &[
    "485245471af42627101112131415161718191a1b1c1d1e1f0600000000000000",
    "8000000001000000010000000500000000000000000000000000000000000000",
    "01000000780000000100020004000200010061030002002f6104000800000000",
    "0000000000050001000106000400000000000700080000000000000000000800",
    "080000000000000000000900080000000000000000000a000100000b00080000",
    "000000000000000c001000000000000000000000000000000000000e0001",
];

/// A disk with nothing set.
fn plain_disk() -> DiskRecord {
    DiskRecord {
        id: 4,
        name: "a".to_owned(),
        origin: "/a".to_owned(),
        ..DiskRecord::default()
    }
}

#[test]
fn journal_entry() {
    let entry = JournalEntry {
        base: 6,
        generation: 7,
        next_disk_id: 5,
        changes: vec![Change::Remove(3), Change::Put(plain_disk().into())],
    };
    let bytes = block(JOURNAL_ENTRY);
    assert_eq!(entry.encode(pool()).unwrap().unwrap(), bytes);
    assert_eq!(JournalEntry::decode(&bytes, pool()).unwrap(), entry);
}

#[test]
fn a_base_with_a_journal_and_the_note_of_a_move() {
    let registry = Registry {
        generation: 6,
        next_disk_id: 5,
        disks: vec![plain_disk().into()],
        unknown_records: Vec::new(),
    };
    assert_eq!(registry.encode_base(pool(), true).unwrap(), block(BASE));
    let front = Front::Base {
        registry,
        journal: true,
        blocks: 1,
    };
    assert_eq!(Front::decode(&block(BASE), pool()).unwrap(), front);
    let moved = Moved {
        generation: 9,
        start: 5000,
        blocks: 300,
    };
    assert_eq!(moved.encode(pool()), block(MOVED));
    assert_eq!(
        Front::decode(&block(MOVED), pool()).unwrap(),
        Front::Moved(moved)
    );
}

const CHECKPOINT: &[&str] = &[
    "48434b50e945637210111213141516174d00000000000000e903000000000000",
    "1200000000000000030000000000000002001800000000000000000000000000",
    "010000004433221100100000000000000a000000000000000200000088776655",
    "00200000000000000010",
];

#[test]
fn checkpoint() {
    let header = CheckpointHeader {
        pool_tag: pool_tag(&pool()),
        id: 77,
        next_batch_seq: 1001,
        next_segment_seq: 18,
        tail_seq: 3,
        sections: vec![
            Section {
                kind: 1,
                offset: 4096,
                len: 10,
                crc: 0x1122_3344,
            },
            Section {
                kind: 2,
                offset: 8192,
                len: 4096,
                crc: 0x5566_7788,
            },
        ],
    };
    assert_eq!(header.encode(12288).unwrap().to_vec(), block(CHECKPOINT));
    assert_eq!(
        CheckpointHeader::decode(&block(CHECKPOINT), 12288).unwrap(),
        header
    );
}

/// Field 25, the last one of a record.
#[test]
fn where_a_disk_lives() {
    let plain = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "flash:a".to_owned(),
        ..DiskRecord::default()
    };
    let encode = |home| {
        let disk = DiskRecord {
            home,
            ..plain.clone()
        };
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.into()],
            unknown_records: Vec::new(),
        };
        let bytes = registry.encode(pool()).unwrap();
        let back = Registry::decode(&bytes, pool()).unwrap();
        assert_eq!(back, registry);
        bytes
    };
    let field = |bytes: &[u8]| {
        let at = bytes.windows(4).position(|w| w == [0x19, 0x80, 1, 0]);
        at.map(|at| bytes[at + 4])
    };
    assert_eq!(field(&encode(Home::Origin)), None);
    assert_eq!(field(&encode(Home::Flash)), Some(1));
    assert_eq!(field(&encode(Home::Scratch)), Some(2));
    assert_eq!(field(&encode(Home::Moving)), Some(3));
}

/// Field 27, and what follows from it.
#[test]
fn a_disk_that_is_to_be_all_on_flash() {
    let plain = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "/a".to_owned(),
        size: 5000,
        min_bytes: 4096,
        ..DiskRecord::default()
    };
    assert_eq!(plain.kept_bytes(), 4096);
    let pinned = DiskRecord {
        pin: true,
        ..plain.clone()
    };
    assert_eq!(pinned.kept_bytes(), 8192, "whole blocks");
    let moving = DiskRecord {
        home: Home::Moving,
        ..pinned.clone()
    };
    assert_eq!(moving.kept_bytes(), 4096, "it is promised already");
    assert_eq!(moving.promised_bytes(), 5000);
    let encode = |disk: &DiskRecord| {
        let registry = Registry {
            generation: 1,
            next_disk_id: 2,
            disks: vec![disk.clone().into()],
            unknown_records: Vec::new(),
        };
        let bytes = registry.encode(pool()).unwrap();
        assert_eq!(Registry::decode(&bytes, pool()).unwrap(), registry);
        let field = bytes.windows(5).position(|w| w == [0x1B, 0, 1, 0, 1]);
        field.is_some()
    };
    assert!(!encode(&plain));
    assert!(encode(&pinned));
}

const MIRROR_STAMPS: &[&str] = &[
    "0900000000000000010300000000000011111111111111111111111111111111",
    "0900000000000000000000000000000001000000000000000807060504030201",
    "0c00000000000000222222222222222222222222222222220700000000000000",
    "0000000200000000020100000000000000000000000000000000000000000000",
    "3333333333333333333333333333333304000000000000000000000000000000",
    "0300000000000000ffffffffffffffff0700000000000000",
];

/// The first 64 bytes of a slot; then come the stamps, and from 4096 on the regions.
const MIRROR_NOTES: &[&str] = &[
    "484d4952581f1cde0100b80000200000a0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
    "0700000000000000000000010000000046000000000000000000000000000000",
];

#[test]
fn a_mirrors_stamps_and_notes() {
    let leg = |n: u8, generation, state, whole, copied, left| LegStamp {
        id: Uuid::from_bytes([n; 16]),
        generation,
        state,
        whole,
        copied,
        left,
    };
    let stamps = MirrorStamps {
        generation: 9,
        open: true,
        unknown: false,
        legs: vec![
            leg(
                0x11,
                9,
                LegState::Current,
                false,
                0,
                (0x0102_0304_0506_0708, 12),
            ),
            leg(0x22, 7, LegState::Behind, true, 32 << 20, (0, 0)),
            leg(0x33, 4, LegState::Out, false, 0, (-1, 7)),
        ],
    };
    let stamped = hex(&MIRROR_STAMPS.concat());
    assert_eq!(stamps.encode().unwrap(), stamped);
    assert_eq!(MirrorStamps::decode(&stamped).unwrap(), stamps);
    let notes = MirrorNotes {
        serial: device(),
        sequence: 7,
        region: 16 << 20,
        regions: 70,
        stamps,
        touched: vec![1 | 1 << 63, 1 << 5],
    };
    let mut slot = hex(&MIRROR_NOTES.concat());
    slot.extend(&stamped);
    slot.resize(4096, 0);
    slot.extend([1, 0, 0, 0, 0, 0, 0, 0x80, 0x20]);
    slot.resize(8192, 0);
    assert_eq!(notes.encode().unwrap(), (32 << 10, slot.clone()));
    assert_eq!(MirrorNotes::newest(&slot, &device()), Some(notes));
}

/// The first 96 bytes of a slot; then come the path at 128, the label at 3200 and the sets from 4096 on.
const POOL_NOTES: &[&str] = &[
    "48504e423d8f6a3b0100010000700000101112131415161718191a1b1c1d1e1f",
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf07000000000000000807060504030201",
    "000000000300000022110000000000000c000200000000000000000000000000",
];

#[test]
fn the_notes_beside_a_pool() {
    let notes = PoolNotes {
        sequence: 7,
        opened: 3 << 32,
        started: 0x1122,
        alone: true,
        flash: "/dev/nvme0n1".to_owned(),
        label: "ab".to_owned(),
        dirty: [1, 65535].into_iter().collect(),
        left: [64].into_iter().collect(),
        lost: [10].into_iter().collect(),
        ..PoolNotes::new(pool(), device(), 0x0102_0304_0506_0708)
    };
    let mut slot = hex(&POOL_NOTES.concat());
    slot.resize(28 << 10, 0);
    slot[128..140].copy_from_slice(b"/dev/nvme0n1");
    slot[3200..3202].copy_from_slice(b"ab");
    (slot[4096], slot[12287], slot[12296], slot[20481]) = (0x02, 0x80, 0x01, 0x04);
    assert_eq!(notes.encode(), (32 << 10, slot.clone()));
    assert_eq!(PoolNotes::newest(&slot).unwrap(), notes);
    // Where the registry lies once it has outgrown its first places, and how large those are then.
    let layout = hearth_format::beside::layout().unwrap();
    assert_eq!(layout.registry_room(), Some((91136, 4096)));
}
