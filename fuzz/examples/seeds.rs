//! Writes the seed inputs in `corpus/`: one or two well-formed structures per target, behind
//! the steering byte, without the zeros the targets put back. Run from `fuzz/` with
//! `cargo run --example seeds` after a change of the format.

use hearth_format::journal::{Change, JournalEntry};
use hearth_format::mirror::{LegStamp, LegState, MirrorNotes, MirrorStamps};
use hearth_format::{
    BatchHeader, BatchMark, CheckpointHeader, DiskRecord, Entry, Kind, Layout, OriginIdentity,
    PoolState, Registry, Section, SummaryHeader, Superblock, Uuid,
};
use std::error::Error;
use std::fs;

fn save(target: &str, name: &str, steer: u8, bytes: &[u8]) -> std::io::Result<()> {
    let end = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1);
    let mut input = vec![steer];
    input.extend_from_slice(&bytes[..end]);
    let dir = format!("corpus/fuzz_{target}");
    fs::create_dir_all(&dir)?;
    fs::write(format!("{dir}/{name}"), input)
}

fn main() -> Result<(), Box<dyn Error>> {
    let layout = Layout::for_device(1 << 30, 1024)?;
    let mut superblock = Superblock::new(layout, Uuid::from_u128(1), Uuid::from_u128(2), "tank", 1);
    save("superblock", "open", 1, superblock.encode().as_slice())?;
    superblock.state = PoolState::Clean {
        checkpoint_id: 3,
        checkpoint_bytes: 4096,
    };
    superblock.last_host = "host".to_owned();
    save("superblock", "clean", 0, superblock.encode().as_slice())?;

    let leg = |n: u128, generation, state, whole| LegStamp {
        id: Uuid::from_u128(n),
        generation,
        state,
        whole,
        copied: 0,
        left: (5, 6),
    };
    let stamps = MirrorStamps {
        generation: 9,
        open: true,
        unknown: false,
        legs: vec![
            leg(1, 9, LegState::Current, false),
            leg(2, 7, LegState::Behind, true),
            leg(3, 4, LegState::Out, false),
        ],
        marks: Vec::new(),
    };
    save("mirror", "stamps", 0, &stamps.encode()?)?;
    let notes = MirrorNotes {
        serial: Uuid::from_u128(5),
        sequence: 6,
        region: 16 << 20,
        regions: 130,
        stamps,
        touched: vec![1, 1 << 63, 2],
    };
    save("mirror", "notes", 1, &notes.encode()?.1)?;

    let data = |slot| Entry {
        disk: 1,
        block: 9,
        word: 8,
        slot,
        kind: Kind::Dirty,
        flags: 0,
    };
    let runs: Vec<Entry> = (3..=8)
        .filter_map(Kind::from_u8)
        .map(|kind| Entry {
            disk: 2,
            block: 7,
            word: 6,
            slot: 0,
            kind,
            flags: 0,
        })
        .collect();
    let mut segment = vec![0u8; 16 * 4096];
    let header = BatchHeader {
        pool_tag: 1,
        segment_seq: 2,
        batch_seq: 3,
        data_blocks: 2,
        ..Default::default()
    };
    header.encode(&[data(1), data(2)], &mut segment[..4096])?;
    let header = BatchHeader {
        batch_seq: 4,
        data_blocks: 0,
        ..header
    };
    header.encode(&runs, &mut segment[3 * 4096..4 * 4096])?;
    save("segment", "data-then-runs", 1, &segment)?;
    save("segment", "runs-alone", 0, &segment[3 * 4096..])?;

    let mut summary = Vec::new();
    let entries: Vec<Entry> = [data(1), data(2)].into_iter().chain(runs).collect();
    let header = SummaryHeader {
        pool_tag: 1,
        segment_seq: 2,
        first_batch_seq: 3,
        last_batch_seq: 4,
        ..Default::default()
    };
    header.encode(&entries, &[], &mut summary)?;
    save("summary", "two-batches", 1, &summary)?;
    save("summary", "sealed", 0, &summary)?;
    let marks =
        [(3, 2), (4, entries.len() as u16 - 2)].map(|(seq, entries)| BatchMark { seq, entries });
    header.encode(&entries, &marks, &mut summary)?;
    save("summary", "with-batches", 1, &summary)?;
    save("summary", "with-batches-sealed", 4, &summary)?;

    let disk = |id: u16| DiskRecord {
        id,
        name: format!("vm-{id}"),
        origin: "file:/vm".to_owned(),
        origin_identity: Some(OriginIdentity::default()),
        unknown: vec![(99, b"later".to_vec())],
        ..DiskRecord::default()
    };
    let registry = Registry {
        disks: vec![disk(1).into(), disk(2).into()],
        unknown_records: vec![(9, vec![1, 2])],
        ..Registry::default()
    };
    let bytes = registry.encode(Uuid::nil())?;
    save("registry", "two-disks", 1, &bytes)?;
    save("registry", "sealed", 0, &bytes)?;

    let entry = JournalEntry {
        base: 5,
        generation: 6,
        next_disk_id: 3,
        changes: vec![Change::Put(disk(2).into()), Change::Remove(1)],
    };
    let bytes = entry.encode(Uuid::nil())?.unwrap_or_default();
    save("journal", "one-entry", 1, &bytes)?;
    save("journal", "two-entries", 0, &[&bytes[..], &bytes].concat())?;
    save(
        "journal",
        "one-of-two-blocks",
        2,
        &[&bytes[..], &bytes].concat(),
    )?;

    let section = |kind, offset| Section {
        kind,
        offset,
        len: 4096,
        crc: 5,
    };
    let header = CheckpointHeader {
        sections: vec![section(1, 4096), section(2, 8192)],
        ..Default::default()
    };
    // The steering byte's upper bits are the size of the area: 4096 << 3.
    save(
        "checkpoint",
        "two-sections",
        1 | 3 << 3,
        header.encode(4096 << 3)?.as_slice(),
    )?;
    save(
        "checkpoint",
        "sealed",
        3 << 3,
        header.encode(4096 << 3)?.as_slice(),
    )?;

    for (name, place, mark) in [
        ("xfs", 0u32, &b"XFSB"[..]),
        ("ext", 1080, b"\x53\xef"),
        ("btrfs", 65600, b"_BHRfS_M"),
        ("gpt", 512, b"EFI PART"),
        ("md", 4096, b"\xfc\x4e\x2b\xa9\x01"),
        ("mbr", 510, b"\x55\xaa"),
        ("vhd-at-end", u32::MAX - 512, b"conectix"),
    ] {
        let mut patch = vec![0];
        patch.extend_from_slice(&place.to_le_bytes());
        patch.extend_from_slice(mark);
        patch.resize(13, 0);
        save("foreign", name, 0, &[&patch[..], &[0xff; 11]].concat())?;
    }
    vhost_chains()?;
    nfs_messages()?;
    Ok(())
}

/// A read and a zeroing of two ranges in the table itself, and a read through a table of its own.
fn vhost_chains() -> std::io::Result<()> {
    use hearth_vhost::chain::plain::encode;
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let header = |kind: u32, sector: u64| {
        let mut raw = [0u8; 16];
        raw[..4].copy_from_slice(&kind.to_le_bytes());
        raw[8..].copy_from_slice(&sector.to_le_bytes());
        raw
    };
    let read = [
        encode(0, 16, NEXT, 1),
        encode(0x1000, 4096, NEXT | WRITE, 2),
        encode(0x200, 1, WRITE, 0),
    ];
    let input = |table: &[[u8; 16]], content: &[u8]| {
        let head = [0, table.len() as u8 - 1];
        [&head[..], table.as_flattened(), content].concat()
    };
    save("vhost_chain", "read", 0xf0, &input(&read, &header(0, 8)))?;
    let zero = [encode(0, 48, NEXT, 1), encode(0x200, 1, WRITE, 0)];
    let mut content = header(13, 0).to_vec();
    for sector in [1u64, 9] {
        content.extend_from_slice(&sector.to_le_bytes());
        content.extend_from_slice(&2u32.to_le_bytes());
        content.extend_from_slice(&1u32.to_le_bytes());
    }
    save("vhost_chain", "zeroes", 0xf0, &input(&zero, &content))?;
    let table = [encode(0x100, 48, INDIRECT, 0)];
    let mut content = vec![0u8; 0x130];
    content[..16].copy_from_slice(&header(0, 8));
    content[0x100..].copy_from_slice(read.as_flattened());
    save("vhost_chain", "indirect", 0xf0, &input(&table, &content))
}

/// A call to each kind of procedure, whole, and one as a stream in two fragments.
fn nfs_messages() -> std::io::Result<()> {
    use hearth_nfs::rpc::{Call, Credential};
    use hearth_nfs::v3::{Args, Create, How, Named, PROGRAM, SetAttributes, Stability, VERSION};
    use hearth_nfs::xdr::Writer;
    let (file, set) = (
        &[7; 36][..],
        SetAttributes {
            mode: Some(0o644),
            ..SetAttributes::default()
        },
    );
    let at = Named {
        dir: file,
        name: b".lck-1",
    };
    let message = |args: &Args<'_>| {
        let credential = Credential::Sys {
            uid: 0,
            gid: 0,
            groups: vec![1],
        };
        let procedure = args.procedure() as u32;
        let mut w = Writer::new();
        Call {
            xid: 9,
            program: PROGRAM,
            version: VERSION,
            procedure,
            credential,
        }
        .write(&mut w);
        args.write(&mut w);
        w.into_vec()
    };
    for (name, args) in [
        (
            "create",
            Args::Create {
                at,
                what: Create::File(How::Guarded(set)),
            },
        ),
        (
            "link",
            Args::Create {
                at,
                what: Create::Link { to: b"a/b", set },
            },
        ),
        (
            "set",
            Args::SetAttr {
                file,
                set,
                only_if: None,
            },
        ),
        (
            "write",
            Args::Write {
                file,
                offset: 512,
                count: 4,
                stable: Stability::File,
                data: b"data",
            },
        ),
        ("rename", Args::Rename { from: at, to: at }),
        (
            "list",
            Args::ReadDirPlus {
                dir: file,
                cookie: 1,
                verifier: [0; 8],
                names: 512,
                bytes: 4096,
            },
        ),
    ] {
        save("nfs_message", name, 0, &message(&args))?;
    }
    let whole = message(&Args::GetAttr { file });
    let (a, b) = whole.split_at(40);
    let mut stream = vec![3, 0, 0, 0, 40, 39];
    stream.extend_from_slice(a);
    stream.extend_from_slice(&[3, 0x80, 0, 0, b.len() as u8, b.len() as u8 - 1]);
    stream.extend_from_slice(b);
    save("nfs_message", "stream", 0x80, &stream)
}
