//! Batches, summaries, the map of segments and the checkpoint.

use super::{block, pool};
use crate::common::Flash;
use hearth_format::{
    BatchHeader, BatchMark, CheckpointHeader, Entry, Kind, Layout, MapEntry, MapHeader, Section,
    SegmentMap, SummaryHeader, pool_tag,
};
use hearth_io::Media;

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

/// Behind the descriptor in block 10: two dirty blocks, and three clean ones, of which the last is in the second half.
const BATCH_ONCE: &[&str] = &[
    "484241544f01c46810111213141516171100000000000000e803000000000000",
    "0000000000000000e6030000000000002a000000000000000500050010010000",
    "6400000000000700111111110b0002006500000000000700222222220c000200",
    "0500000000000100333333330d0001000600000000000100444444440e000100",
    "0700000000000100555555550d0401",
];

#[test]
fn batch_whose_clean_blocks_are_there_once() {
    let entry = |disk, block, word, slot, kind| Entry {
        disk,
        block,
        word,
        slot,
        kind,
        flags: 0,
    };
    let entries = vec![
        entry(7, 100, 0x1111_1111, 11, Kind::Dirty),
        entry(7, 101, 0x2222_2222, 12, Kind::Dirty),
        entry(1, 5, 0x3333_3333, 13, Kind::Clean),
        entry(1, 6, 0x4444_4444, 14, Kind::Clean),
        entry(1, 7, 0x5555_5555, 1024 + 13, Kind::Clean),
    ];
    let golden = block(BATCH_ONCE);
    let mut back = Vec::new();
    let header = BatchHeader::decode(&golden, &mut back).unwrap();
    assert_eq!(back, entries);
    assert_eq!(header.rows(10, 1024, &back), 4);
    assert!(header.check_rows(10, 15, 1024, &back).is_ok());
    assert!(header.check_rows(10, 14, 1024, &back).is_err());
    assert!(header.check_rows(11, 15, 1024, &back).is_err());
    // What is dirty is in both halves, and named by its place in the first.
    back[0].slot += 1024;
    assert!(header.check_rows(10, 15, 1024, &back).is_err());
    let mut out = vec![0xEE; 4096];
    header.encode(&entries, &mut out).unwrap();
    assert_eq!(out, golden);
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
