//! Bytes with a right checksum and wrong contents: what a hostile or newer writer would leave.

use hearth_format::{
    BatchHeader, CheckpointHeader, DISK_ID_MAX, DiskRecord, Entry, FormatError, Kind, Layout,
    Registry, Section, SummaryHeader, Superblock, Uuid,
};
use hearth_io::checksum::crc32c;

/// Repairs the checksum at `at` over the first `used` bytes.
fn seal(bytes: &mut [u8], at: usize, used: usize) {
    bytes[at..at + 4].fill(0);
    let crc = crc32c(&bytes[..used]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

fn dirty(slot: u16) -> Entry {
    Entry {
        disk: 1,
        block: 2,
        word: 3,
        slot,
        kind: Kind::Dirty,
        flags: 0,
    }
}

fn run(word: u32, block: u64) -> Entry {
    Entry {
        disk: 1,
        block,
        word,
        slot: 0,
        kind: Kind::DropRun,
        flags: 0,
    }
}

fn refuse_batch(change: impl Fn(&mut [u8])) -> FormatError {
    let header = BatchHeader {
        data_blocks: 1,
        ..BatchHeader::default()
    };
    let mut block = vec![0u8; 4096];
    header.encode(&[dirty(1), run(5, 9)], &mut block).unwrap();
    change(&mut block);
    seal(&mut block, 4, 4096);
    let mut entries = vec![dirty(9)];
    let error = BatchHeader::decode(&block, &mut entries).unwrap_err();
    assert_eq!(entries, [dirty(9)], "a refused batch left entries behind");
    error
}

#[test]
fn batches_with_impossible_fields() {
    let damaged = |change: &dyn Fn(&mut [u8])| {
        let error = refuse_batch(change);
        assert!(matches!(error, FormatError::Damaged { .. }), "{error}");
    };
    damaged(&|b| b[56] = 253);
    damaged(&|b| b[57] = 0xff);
    damaged(&|b| b[58] = 2);
    damaged(&|b| b[58] = 0);
    damaged(&|b| b[64 + 14] = 0);
    damaged(&|b| b[64 + 14] = 9);
    damaged(&|b| b[64 + 15] = 1);
    damaged(&|b| b[64 + 6..64 + 8].fill(0));
    damaged(&|b| b[64 + 12..64 + 14].fill(0));
    damaged(&|b| b[80 + 12] = 1);
    damaged(&|b| b[80 + 8..80 + 12].fill(0));
    damaged(&|b| b[80..80 + 6].fill(0xff));
}

#[test]
fn batches_of_a_newer_version() {
    for error in [
        refuse_batch(|b| b[62] = 2),
        refuse_batch(|b| b[63] = 0x80),
        refuse_batch(|b| b[60] = 32),
        refuse_batch(|b| b[61] = 2),
    ] {
        assert!(matches!(error, FormatError::Newer { .. }), "{error}");
        assert!(error.to_string().contains("newer Hearth"), "{error}");
    }
}

#[test]
fn slots_outside_the_batch() {
    let header = BatchHeader {
        data_blocks: 2,
        ..BatchHeader::default()
    };
    header
        .check_slots(10, 13, &[dirty(11), dirty(12), run(1, 1)])
        .unwrap();
    assert!(header.check_slots(10, 12, &[dirty(11), dirty(12)]).is_err());
    assert!(header.check_slots(10, 99, &[dirty(10), dirty(12)]).is_err());
    assert!(header.check_slots(10, 99, &[dirty(11), dirty(13)]).is_err());
    assert!(header.check_slots(u32::MAX, u32::MAX, &[]).is_err());
}

#[test]
fn encoders_refuse_what_decoders_would() {
    let header = BatchHeader::default();
    let block = &mut [0u8; 4096];
    let bad = [
        Entry {
            disk: 0,
            ..run(1, 1)
        },
        Entry {
            flags: 1,
            ..run(1, 1)
        },
        Entry {
            slot: 1,
            ..run(1, 1)
        },
        run(0, 1),
        run(2, (1 << 48) - 1),
        run(1, 1 << 48),
        run(1, u64::MAX),
    ];
    for entry in bad {
        assert!(header.encode(&[entry], block).is_err(), "{entry:?}");
        assert!(
            SummaryHeader::default()
                .encode(&[entry], &[], &mut Vec::new())
                .is_err()
        );
    }
    header.encode(&[run(1, 1); 252], block).unwrap();
    assert!(header.encode(&[run(1, 1); 253], block).is_err());
    assert!(
        header.encode(&[dirty(1)], block).is_err(),
        "data entry without data block"
    );
    assert!(header.encode(&[], &mut [0; 4095]).is_err());
    assert!(
        BatchHeader { flags: 2, ..header }
            .encode(&[], block)
            .is_err()
    );
    let backwards = SummaryHeader {
        first_batch_seq: 2,
        last_batch_seq: 1,
        ..Default::default()
    };
    assert!(backwards.encode(&[], &[], &mut Vec::new()).is_err());
    let far = SummaryHeader {
        last_batch_seq: 1 << 32,
        ..Default::default()
    };
    assert!(far.encode(&[], &[], &mut Vec::new()).is_err());
}

#[test]
fn summaries_newer_damaged_or_short() {
    let mut bytes = Vec::new();
    SummaryHeader::default()
        .encode(&[dirty(1), run(1, 1)], &[], &mut bytes)
        .unwrap();
    let decode =
        |bytes: &[u8]| SummaryHeader::decode(bytes, &mut Vec::new(), &mut Vec::new()).unwrap_err();

    assert!(matches!(decode(&bytes[..63]), FormatError::Damaged { .. }));
    assert!(matches!(decode(&bytes[..95]), FormatError::Damaged { .. }));
    assert!(decode(&[0; 4096]).is_absent());

    let mut flagged = bytes.clone();
    flagged[63] = 2;
    seal(&mut flagged, 4, 96);
    assert!(matches!(decode(&flagged), FormatError::Newer { .. }));

    let mut wide = bytes.clone();
    wide[62] = 24;
    seal(&mut wide, 4, 64 + 48);
    assert!(matches!(decode(&wide), FormatError::Newer { .. }));

    let mut overflow = bytes.clone();
    overflow[24..32].fill(0xff);
    overflow[56] = 1;
    seal(&mut overflow, 4, 96);
    assert!(matches!(decode(&overflow), FormatError::Damaged { .. }));
}

fn superblock() -> Superblock {
    let layout = Layout::for_device(64 << 20, 1024).unwrap();
    Superblock::new(layout, Uuid::from_u128(1), Uuid::from_u128(2), "label", 3)
}

fn refuse_superblock(at: usize, value: &[u8]) -> FormatError {
    let mut block = superblock().encode();
    block[at..at + value.len()].copy_from_slice(value);
    seal(block.as_mut_slice(), 12, 4096);
    Superblock::decode(block.as_slice()).unwrap_err()
}

#[test]
fn newer_superblocks_are_named_not_guessed_at() {
    let version = refuse_superblock(8, &[2, 0, 7, 0]);
    assert!(
        version.to_string().contains("format version 2.7"),
        "{version}"
    );
    let feature = refuse_superblock(16, &[0, 4]);
    assert!(feature.to_string().contains("0x400"), "{feature}");
    for error in [version, feature] {
        assert!(matches!(error, FormatError::Newer { .. }), "{error}");
    }
}

#[test]
fn a_newer_minor_version_is_fine() {
    let mut block = superblock().encode();
    block[10] = 200;
    seal(block.as_mut_slice(), 12, 4096);
    Superblock::decode(block.as_slice()).unwrap();
}

#[test]
fn unknown_ro_compat_features_forbid_writing() {
    let mut superblock = superblock();
    assert!(!superblock.must_stay_read_only());
    superblock.ro_compat = 1 << 63;
    let back = Superblock::decode(superblock.encode().as_slice()).unwrap();
    assert!(back.must_stay_read_only());
}

#[test]
fn superblocks_with_impossible_fields() {
    for (at, value) in [
        (8, &[0u8, 0][..]),
        (48, &[2]),
        (49, &[3]),
        (50, &[1]),
        (52, &[0, 0]),
        (52, &[1, 1]),
        (88, &[0; 8]),
        (88, &[0xff; 8]),
        (96, &[1]),
        (100, &[0]),
        (104, &[0; 8]),
        (112, &[0xff; 8]),
        (120, &[1]),
        (128, &[0xff; 4]),
        (160, &[64]),
        (161, &[0xff]),
    ] {
        let error = refuse_superblock(at, value);
        assert!(
            matches!(error, FormatError::Damaged { .. }),
            "at {at}: {error}"
        );
    }
    let mut clean = superblock();
    clean.state = hearth_format::PoolState::Clean {
        checkpoint_id: 1,
        checkpoint_bytes: u64::MAX,
    };
    assert!(Superblock::decode(clean.encode().as_slice()).is_err());
}

#[test]
fn long_texts_are_cut_at_a_character() {
    let mut superblock = superblock();
    superblock.last_host = "ä".repeat(40);
    let back = Superblock::decode(superblock.encode().as_slice()).unwrap();
    assert_eq!(back.last_host, "ä".repeat(31));
}

fn disk(id: u16, name: &str) -> DiskRecord {
    DiskRecord {
        id,
        name: name.to_owned(),
        origin: "file:/x".to_owned(),
        ..DiskRecord::default()
    }
}

fn registry(disks: Vec<DiskRecord>) -> Registry {
    Registry {
        disks: disks.into_iter().map(Into::into).collect(),
        ..Registry::default()
    }
}

#[test]
fn registries_that_break_rules_cannot_be_written() {
    let fails = |disks| assert!(registry(disks).encode(Uuid::nil()).is_err());
    fails(vec![disk(0, "a")]);
    fails(vec![disk(u16::MAX, "a")]);
    fails(vec![disk(DISK_ID_MAX + 1, "a")]);
    fails(vec![disk(1, "a"), disk(1, "b")]);
    fails(vec![disk(1, "a"), disk(2, "a")]);
    for name in ["", "-a", ".a", "a/b", "a b", "ä", "a\0", &"x".repeat(65)] {
        fails(vec![disk(1, name)]);
    }
    fails(vec![DiskRecord {
        origin: String::new(),
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        origin: "x".repeat(4097),
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        block_size: 5000,
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        block_size: 2 << 20,
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        min_bytes: 2,
        max_bytes: 1,
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        unknown: vec![(3, vec![])],
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        unknown: vec![(0x8001, vec![])],
        ..disk(1, "a")
    }]);
    fails(vec![DiskRecord {
        unknown: vec![(77, vec![0; 65536])],
        ..disk(1, "a")
    }]);
    registry(vec![disk(1, &"x".repeat(64)), disk(2, "A.b_c-9")])
        .encode(Uuid::nil())
        .unwrap();
}

#[test]
fn the_most_disks_fit_and_more_than_an_area_is_named() {
    let most: Vec<_> = (1..=DISK_ID_MAX)
        .map(|id| disk(id, &format!("d{id}")))
        .collect();
    let most = registry(most);
    let bytes = most.encode(Uuid::nil()).unwrap();
    assert_eq!(Registry::decode(&bytes, Uuid::nil()).unwrap(), most);
    let long = |id| DiskRecord {
        origin: "x".repeat(4096),
        ..disk(id, &format!("d{id}"))
    };
    let error = registry((1..=4200).map(long).collect())
        .encode(Uuid::nil())
        .unwrap_err();
    assert!(error.to_string().contains("shorten origins"), "{error}");
}

fn refuse_registry(change: impl Fn(&mut [u8])) -> FormatError {
    let registry = registry(vec![disk(1, "a")]);
    let mut bytes = registry.encode(Uuid::nil()).unwrap();
    change(&mut bytes);
    let used = 64 + u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
    if used <= bytes.len() {
        seal(&mut bytes, 4, used);
    }
    Registry::decode(&bytes, Uuid::nil()).unwrap_err()
}

/// A way of damaging a registry.
type Change<'a> = &'a dyn Fn(&mut [u8]);

/// Offset of the first field of the first record: header, record header.
const FIRST_FIELD: usize = 64 + 8;

#[test]
fn registries_with_impossible_contents() {
    // Fields in order: id (6 bytes), name (5), origin (11), size (12), mode (5).
    let name = FIRST_FIELD + 6;
    let mode = name + 5 + 11 + 12;
    let damaged: [Change; 10] = [
        &|b| b[32..36].fill(0xff),
        &|b| b[36] = 2,
        &|b| b[36] = 0,
        &|b| b[36..40].fill(0xff),
        &|b| b[64 + 4] += 1,
        &|b| b[64 + 4..64 + 8].fill(0xff),
        &|b| b[FIRST_FIELD + 2] = 3,
        &|b| b[name] = 1,
        &|b| b[name + 4] = b'/',
        &|b| b[name + 4] = 0xff,
    ];
    for (number, change) in damaged.iter().enumerate() {
        let error = refuse_registry(change);
        assert!(
            matches!(
                error,
                FormatError::Damaged { .. } | FormatError::Wrong { .. }
            ),
            "{number}: {error}"
        );
    }
    let newer: [Change; 4] = [
        &|b| b[40] = 4,
        &|b| b[64 + 1] = 0x80,
        &|b| b[mode + 4] = 6,
        &|b| b[FIRST_FIELD + 1] = 0x80,
    ];
    for (number, change) in newer.iter().enumerate() {
        let error = refuse_registry(change);
        assert!(
            matches!(error, FormatError::Newer { .. }),
            "{number}: {error}"
        );
    }
}

#[test]
fn a_registry_of_another_pool_is_absent() {
    let bytes = registry(vec![]).encode(Uuid::from_u128(1)).unwrap();
    assert!(
        Registry::decode(&bytes, Uuid::from_u128(2))
            .unwrap_err()
            .is_absent()
    );
}

#[test]
fn disk_numbers_are_reused_as_late_as_possible() {
    let last = DISK_ID_MAX;
    let mut registry = Registry {
        next_disk_id: last,
        ..registry(vec![disk(1, "a")])
    };
    assert_eq!(registry.take_disk_id(), Some(last));
    assert_eq!(registry.take_disk_id(), Some(2));
    assert_eq!(registry.take_disk_id(), Some(3));
    registry.next_disk_id = last + 1;
    assert_eq!(registry.take_disk_id(), Some(2));
}

#[test]
fn checkpoint_sections_stay_in_their_area() {
    let section = |offset, len| Section {
        kind: 1,
        offset,
        len,
        crc: 0,
    };
    let header = |sections| CheckpointHeader {
        sections,
        ..CheckpointHeader::default()
    };
    let area = 1 << 20;
    header(vec![
        section(8192, 10),
        section(4096, 4096),
        section(8202, 1),
    ])
    .encode(area)
    .unwrap();
    header(vec![section(4096, 0); 64]).encode(area).unwrap();
    for sections in [
        vec![section(0, 1)],
        vec![section(4095, 1)],
        vec![section(area, 1)],
        vec![section(4096, area)],
        vec![section(u64::MAX, 2)],
        vec![section(4096, 10), section(4105, 1)],
        vec![section(4096, 0); 65],
    ] {
        assert!(
            header(sections.clone()).encode(area).is_err(),
            "{sections:?}"
        );
    }
    let mut block = header(vec![section(4096, 1)]).encode(area).unwrap();
    block[48] = 65;
    seal(block.as_mut_slice(), 4, 4096);
    assert!(CheckpointHeader::decode(block.as_slice(), area).is_err());
}
