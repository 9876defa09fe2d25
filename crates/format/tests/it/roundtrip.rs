//! What is written is read back; what is altered is refused; nothing panics.

use hearth_format::disk::OriginIdentity;
use hearth_format::mirror::{LegStamp, LegState, Mark, MirrorStamps};
use hearth_format::{
    BATCH_ENTRIES_MAX, BatchHeader, BatchMark, CacheMode, CheckpointHeader, DeviceEntry,
    DiskRecord, Entry, Extent, FormatError, Home, Kind, Layout, MapHeader, OnStart, PoolState,
    Registry, Section, SummaryHeader, Superblock, Uuid, check_name,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn entry() -> impl Strategy<Value = Entry> {
    let data = (1u16.., 0u64..1 << 48, any::<u32>(), 1u16.., any::<bool>()).prop_map(
        |(disk, block, word, slot, dirty)| {
            let kind = if dirty { Kind::Dirty } else { Kind::Clean };
            Entry {
                disk,
                block,
                word,
                slot,
                kind,
                flags: 0,
            }
        },
    );
    let run = (1u16.., 0u64..(1 << 48) - (1 << 32), 1u32.., 3u8..=8).prop_map(
        |(disk, block, word, kind)| {
            let kind = Kind::from_u8(kind).unwrap();
            Entry {
                disk,
                block,
                word,
                slot: 0,
                kind,
                flags: 0,
            }
        },
    );
    prop_oneof![3 => data, 1 => run]
}

fn data_count(entries: &[Entry]) -> u16 {
    entries.iter().filter(|e| e.kind.is_data()).count() as u16
}

fn mirror(serial: [u8; 16], generation: u64) -> MirrorStamps {
    let generation = generation.max(1);
    let mut other = serial;
    other[0] ^= 1;
    let leg = |id, generation, state| LegStamp {
        id: Uuid::from_bytes(id),
        generation,
        state,
        whole: state == LegState::Out,
        copied: 0,
        left: (-7, generation),
    };
    MirrorStamps {
        generation,
        open: generation % 2 == 0,
        unknown: generation % 3 == 0,
        legs: vec![
            leg(serial, generation, LegState::Current),
            leg(other, generation - 1, LegState::Out),
        ],
        marks: vec![Mark { block: 8, sum: 9 }],
    }
}

prop_compose! {
    fn batch()(
        seqs: [u64; 6], entries in vec(entry(), 0..=BATCH_ENTRIES_MAX),
    ) -> (BatchHeader, Vec<Entry>) {
        let [pool_tag, segment_seq, batch_seq, bound_seq, durable_seq, epoch] = seqs;
        let data_blocks = data_count(&entries);
        let header = BatchHeader {
            pool_tag, segment_seq, batch_seq, bound_seq, durable_seq, epoch, data_blocks, flags: 0,
        };
        (header, entries)
    }
}

prop_compose! {
    fn summary()(
        seqs: [u64; 5], first in 0..u64::MAX / 2, delta: u32, entries in vec(entry(), 0..1500),
    ) -> (SummaryHeader, Vec<Entry>) {
        let [pool_tag, segment_seq, bound_seq, durable_seq, epoch] = seqs;
        let header = SummaryHeader {
            pool_tag, segment_seq, bound_seq, durable_seq, epoch,
            first_batch_seq: first, last_batch_seq: first + u64::from(delta),
            entry_count: entries.len() as u32,
        };
        (header, entries)
    }
}

/// The entries in batches of `per`, whose numbers are `gap` apart.
fn batches_of(
    header: SummaryHeader,
    entries: &[Entry],
    per: usize,
    gap: u64,
    told: bool,
) -> (SummaryHeader, Vec<BatchMark>) {
    if !told || entries.is_empty() {
        return (header, Vec::new());
    }
    let seqs = (0u64..).map(|i| header.first_batch_seq + i * gap);
    let batches: Vec<BatchMark> = (seqs.zip(entries.chunks(per)))
        .map(|(seq, part)| BatchMark {
            seq,
            entries: part.len() as u16,
        })
        .collect();
    let last_batch_seq = batches.last().unwrap().seq;
    (
        SummaryHeader {
            last_batch_seq,
            ..header
        },
        batches,
    )
}

prop_compose! {
    fn disk()(
        size: u64, mode in 0usize..4, shift in 12u32..=20, auto: bool, min in 0u64..1 << 40,
        cutoff: u64, flags: [bool; 4], since_seq: u64, serial: [u8; 16],
        identity: (u64, i64, i64, u64, u64), origin in "[ -~]{1,200}",
        unknown in vec((100u16..0x8000, vec(any::<u8>(), 0..40)), 0..4),
        terms: (u8, bool, bool, u32, u64), chain in vec("[ -~]{1,60}", 0..4),
        datastore in "([a-z]{1,9})?",
    ) -> DiskRecord {
        let (rules, sole_user, allow_backing, clients, fenced_at) = terms;
        let modes = [CacheMode::WriteBack, CacheMode::WriteThrough, CacheMode::WriteAround, CacheMode::Off];
        let (size_then, mtime_ns, ctime_ns, dev, inode) = identity;
        DiskRecord {
            id: 0,
            name: String::new(),
            origin,
            size,
            mode: modes[mode],
            block_size: if auto { 0 } else { 1 << shift },
            min_bytes: min,
            max_bytes: if flags[0] { 0 } else { min * 2 },
            seq_cutoff: cutoff,
            read_only: flags[0],
            since_seq,
            serial: Uuid::from_bytes(serial),
            origin_identity: flags[1].then_some(OriginIdentity { size: size_then, mtime_ns, ctime_ns, dev, inode }),
            clean_detach: flags[2],
            auto: flags[3],
            origin_timeout_ms: if flags[2] { 0 } else { shift },
            rules,
            sole_user,
            allow_backing,
            chain,
            clients,
            fenced_at,
            datastore: datastore.clone(),
            mirror: flags[1].then(|| mirror(serial, size_then)),
            home: [Home::Origin, Home::Flash, Home::Scratch, Home::Moving][mode % 4],
            max_age_ms: [0, 30_000, u32::MAX][mode % 3],
            pin: mode % 2 == 1,
            on_start: [OnStart::Sample, OnStart::Drop, OnStart::Keep][mode % 3],
            device: datastore,
            hold: mode % 3 == 1,
            void: mode % 5 == 1,
            unknown,
        }
    }
}

prop_compose! {
    fn registry()(
        generation: u64, next_disk_id: u16, mut disks in vec(disk(), 0..20),
        unknown_records in vec((100u16..0x8000, vec(any::<u8>(), 0..40)), 0..4),
    ) -> Registry {
        for (number, disk) in (1u16..).zip(&mut disks) {
            disk.id = number * 3;
            disk.name = format!("disk-{number}");
        }
        Registry { generation, next_disk_id, disks: disks.into_iter().map(Into::into).collect(), unknown_records }
    }
}

/// A layout of a device and of so many others.
fn sizes(bytes: u64, others: u64, shift: u32) -> (Layout, Vec<Extent>) {
    let sizes: Vec<u64> = [bytes]
        .into_iter()
        .chain((0..others).map(|n| (64 + n) << 20))
        .collect();
    Layout::for_devices(&sizes, 1 << shift).unwrap()
}

prop_compose! {
    fn superblock()(
        bytes in (1u64 << 25)..(1 << 50), shift in 8u32..=10, numbers: [u64; 4], ids: [[u8; 16]; 2],
        texts in ("\\PC{0,100}", "\\PC{0,100}"), copy in 0u8..2, state in 0u8..3, others in 0u64..4, index in 0u16..4,
    ) -> Superblock {
        let (layout, extents) = sizes(bytes, others, shift);
        let [pool, device] = ids.map(Uuid::from_bytes);
        let mut sb = Superblock::new(layout, pool, device, &texts.0, numbers[0]);
        sb.copy = copy;
        sb.generation = numbers[1];
        sb.compat = numbers[2];
        sb.ro_compat = numbers[3];
        if others > 0 {
            let index = index.min(others as u16);
            let entry = |(extent, n): (&Extent, u16)| DeviceEntry {
                device: if n == index { device } else { Uuid::from_u128(n.into()) },
                extent: *extent,
            };
            sb.set_devices(layout, extents.iter().zip(0..).map(entry).collect());
            sb.device_index = index;
            (sb.stamp, sb.next_stamp) = (numbers[3], numbers[2]);
        }
        sb.last_host = texts.1.chars().take(15).collect();
        sb.state = match state {
            0 => PoolState::Open,
            1 => PoolState::Clean { checkpoint_id: numbers[0], checkpoint_bytes: layout.checkpoint_bytes() },
            _ => PoolState::Failed,
        };
        sb
    }
}

proptest! {
    #[test]
    fn batches_round_trip((header, entries) in batch(), prefix in vec(entry(), 0..3)) {
        let mut block = [0xEEu8; 4096];
        header.encode(&entries, &mut block).unwrap();
        let mut back = prefix.clone();
        prop_assert_eq!(BatchHeader::decode(&block, &mut back).unwrap(), header);
        prop_assert_eq!(&back[..prefix.len()], &prefix[..]);
        prop_assert_eq!(&back[prefix.len()..], &entries[..]);
    }

    #[test]
    fn any_bit_flip_in_a_batch_is_noticed((header, entries) in batch(), bit in 0usize..4096 * 8) {
        let mut block = [0u8; 4096];
        header.encode(&entries, &mut block).unwrap();
        block[bit / 8] ^= 1 << (bit % 8);
        let mut back = Vec::new();
        prop_assert!(BatchHeader::decode(&block, &mut back).is_err());
        prop_assert!(back.is_empty());
    }

    #[test]
    fn a_torn_batch_is_noticed((old, old_entries) in batch(), (new, new_entries) in batch(), sector in 1usize..8) {
        let (mut a, mut b) = ([0u8; 4096], [0u8; 4096]);
        old.encode(&old_entries, &mut a).unwrap();
        new.encode(&new_entries, &mut b).unwrap();
        let mut torn = a;
        torn[..sector * 512].copy_from_slice(&b[..sector * 512]);
        prop_assume!(torn != a && torn != b);
        prop_assert!(BatchHeader::decode(&torn, &mut Vec::new()).is_err());
    }

    #[test]
    fn summaries_round_trip((header, entries) in summary(), per in 1usize..40, gap in 1u64..4, told: bool) {
        let (header, batches) = batches_of(header, &entries, per, gap, told);
        let mut bytes = vec![1; 3];
        header.encode(&entries, &batches, &mut bytes).unwrap();
        prop_assert_eq!(bytes.len() % 4096, 0);
        let (mut back, mut told) = (Vec::new(), Vec::new());
        prop_assert_eq!(SummaryHeader::decode(&bytes, &mut back, &mut told).unwrap(), header);
        prop_assert_eq!(back, entries);
        prop_assert_eq!(told, batches);
    }

    #[test]
    fn any_bit_flip_in_a_summary_is_noticed(
        (header, entries) in summary(), told: bool, at: prop::sample::Index, bit in 0u8..8,
    ) {
        let (header, batches) = batches_of(header, &entries, 7, 2, told);
        let mut bytes = Vec::new();
        header.encode(&entries, &batches, &mut bytes).unwrap();
        let marks = if batches.is_empty() { 0 } else { 4 + batches.len() * 12 };
        let used = 64 + entries.len() * 16 + marks;
        bytes[at.index(used)] ^= 1 << bit;
        prop_assert!(SummaryHeader::decode(&bytes, &mut Vec::new(), &mut Vec::new()).is_err());
    }

    #[test]
    fn batches_that_are_not_those_of_the_entries_are_refused(
        (header, entries) in summary(), at: prop::sample::Index,
    ) {
        prop_assume!(!entries.is_empty());
        let (header, mut batches) = batches_of(header, &entries, 7, 2, true);
        let i = at.index(batches.len());
        batches[i].seq = header.last_batch_seq + 1;
        let mut bytes = Vec::new();
        header.encode(&entries, &batches, &mut bytes).unwrap();
        let decoded = SummaryHeader::decode(&bytes, &mut Vec::new(), &mut Vec::new());
        let damaged = matches!(decoded, Err(FormatError::Damaged { .. }));
        prop_assert!(damaged);
        batches[i].entries += 1;
        prop_assert!(header.encode(&entries, &batches, &mut bytes).is_err());
    }

    #[test]
    fn superblocks_round_trip(sb in superblock()) {
        let bytes = sb.encode();
        prop_assert_eq!(Superblock::decode(bytes.as_slice()).unwrap(), sb);
    }

    #[test]
    fn any_bit_flip_in_a_superblock_is_noticed(sb in superblock(), bit in 0usize..4096 * 8) {
        let mut bytes = sb.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = Superblock::decode(bytes.as_slice()).unwrap_err();
        prop_assert_eq!(matches!(error, FormatError::NotAPool), bit < 64, "{}", error);
    }

    #[test]
    fn registries_round_trip(registry in registry(), pool: [u8; 16]) {
        let pool = Uuid::from_bytes(pool);
        let bytes = registry.encode(pool).unwrap();
        prop_assert_eq!(bytes.len() % 4096, 0);
        prop_assert_eq!(Registry::decode(&bytes, pool).unwrap(), registry);
    }

    #[test]
    fn any_bit_flip_in_a_registry_is_noticed(registry in registry(), at: prop::sample::Index, bit in 0u8..8) {
        let mut bytes = registry.encode(Uuid::nil()).unwrap();
        let used = 64 + u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
        bytes[at.index(used)] ^= 1 << bit;
        prop_assert!(Registry::decode(&bytes, Uuid::nil()).is_err());
    }

    #[test]
    fn checkpoints_round_trip(words: [u64; 5], lens in vec(0u64..1 << 30, 0..=64), crc: u32) {
        let [pool_tag, id, next_batch_seq, next_segment_seq, tail_seq] = words;
        let mut offset = 4096;
        let sections: Vec<Section> = (0..).zip(lens).map(|(kind, len)| {
            let section = Section { kind, offset, len, crc };
            offset += len;
            section
        }).collect();
        let header = CheckpointHeader { pool_tag, id, next_batch_seq, next_segment_seq, tail_seq, sections };
        let block = header.encode(offset).unwrap();
        prop_assert_eq!(CheckpointHeader::decode(block.as_slice(), offset).unwrap(), header.clone());
        if header.sections.iter().any(|s| s.len > 0) {
            prop_assert!(CheckpointHeader::decode(block.as_slice(), offset - 1).is_err());
        }
    }

    #[test]
    fn garbage_is_refused_without_panic(bytes in vec(any::<u8>(), 0..5000), which in 0u8..5) {
        let mut bytes = bytes;
        let magic: &[u8] = [&b"HEARTHSB\x01\0"[..], b"HBAT", b"HSUM", b"HREG", b"HCKP"][which as usize];
        if let Some(start) = bytes.get_mut(..magic.len()) {
            start.copy_from_slice(magic);
        }
        prop_assert!(Superblock::decode(&bytes).is_err());
        prop_assert!(BatchHeader::decode(&bytes, &mut Vec::new()).is_err());
        prop_assert!(SummaryHeader::decode(&bytes, &mut Vec::new(), &mut Vec::new()).is_err());
        prop_assert!(MapHeader::decode(&bytes).is_none());
        prop_assert!(Registry::decode(&bytes, Uuid::nil()).is_err());
        prop_assert!(CheckpointHeader::decode(&bytes, u64::MAX).is_err());
    }

    #[test]
    fn names_are_safe(name in "\\PC{0,70}") {
        if check_name(&name).is_ok() {
            prop_assert!(!name.is_empty() && name.len() <= 64 && !name.contains(['/', ' ', '\0', '%', '?']));
            prop_assert!(!name.starts_with(['-', '.']));
        }
    }
}
