//! Every form end to end: written to a file, recognised, read; and cut off or damaged.

use std::io::{BufReader, Cursor, Write};

use hearth_trace::{
    FRAME_RECORDS, Format, HEADER_BYTES, Op, Options, Reader, Record, TraceError, Writer,
};

fn records(n: u64) -> Vec<Record> {
    (0..n)
        .map(|i| Record {
            time_us: i * 130,
            disk: 0,
            op: if i % 3 == 0 { Op::Write } else { Op::Read },
            offset: (i * 7919 % 100_000) * 512,
            length: 512 + (i % 40) as u32 * 512,
        })
        .collect()
}

fn written(records: &[Record], output: Format) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), output).expect("a header");
    for r in records {
        writer.push(*r).expect("a record");
    }
    writer.finish().expect("the rest")
}

fn reader(bytes: Vec<u8>) -> Result<Reader, TraceError> {
    Reader::new(BufReader::new(Cursor::new(bytes)), Options::default())
}

fn read(bytes: Vec<u8>) -> Result<Vec<Record>, TraceError> {
    reader(bytes)?.collect()
}

#[test]
fn own_form_and_csv_come_back() {
    let records = records(FRAME_RECORDS as u64 * 2 + 77);
    for output in [Format::Hearth, Format::Csv] {
        assert_eq!(read(written(&records, output)).expect("read"), records);
    }
    let own = written(&records, Format::Hearth).len();
    let csv = written(&records, Format::Csv).len();
    assert!(own * 3 < csv, "{own} bytes against {csv}");
}

#[test]
fn compression_is_taken_off() {
    let records = records(1000);
    let plain = written(&records, Format::Csv);
    let zstd = zstd::encode_all(&plain[..], 3).expect("zstd");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&plain).expect("gzip");
    for packed in [zstd, gzip.finish().expect("gzip")] {
        assert_eq!(read(packed.clone()).expect("read"), records);
        let cut = packed[..packed.len() - 20].to_vec();
        // A decompressor that gave nothing yet fails at once, one that did fails after it.
        let failed = match reader(cut) {
            Err(e) => Some(e),
            Ok(reader) => reader.filter_map(Result::err).last(),
        };
        assert!(
            matches!(
                failed,
                Some(TraceError::Io { .. } | TraceError::Record { .. })
            ),
            "{failed:?}"
        );
    }
}

#[test]
fn a_torn_tail_is_cut_off_and_damage_before_it_is_said() {
    let records = records(FRAME_RECORDS as u64 + 50);
    let whole = written(&records, Format::Hearth);
    let first = written(&records[..FRAME_RECORDS], Format::Hearth).len();
    for cut in [
        first + 1,
        first + 15,
        first + 16,
        first + 40,
        whole.len() - 1,
    ] {
        let mut reader = reader(whole[..cut].to_vec()).expect("a header");
        let got: Result<Vec<Record>, _> = reader.by_ref().collect();
        assert_eq!(got.expect("no error").len(), FRAME_RECORDS, "cut at {cut}");
        assert_eq!(reader.torn(), Some(FRAME_RECORDS as u64));
    }
    // A last frame whose pages never all reached the disk.
    let mut torn = whole.clone();
    let last = torn.len() - 3;
    torn[last] ^= 0x40;
    let mut cut = reader(torn).expect("a header");
    assert_eq!(cut.by_ref().filter_map(Result::ok).count(), FRAME_RECORDS);
    assert_eq!(cut.torn(), Some(FRAME_RECORDS as u64));
    let mut damaged = whole.clone();
    damaged[HEADER_BYTES + 100] ^= 1;
    assert!(matches!(
        read(damaged),
        Err(TraceError::Record { record: 0, .. })
    ));
    assert_eq!(read(whole).expect("whole"), records);
}

#[test]
fn vscsi_is_read_in_both_versions() {
    let want = records(40);
    let mut one = Vec::new();
    let mut two = Vec::new();
    for (i, r) in want.iter().enumerate() {
        let command: u16 = if r.op == Op::Read { 0x28 } else { 0x8A };
        one.extend((i as u32).to_le_bytes());
        one.extend(r.length.to_le_bytes());
        one.extend(1u32.to_le_bytes());
        one.extend(command.to_le_bytes());
        one.extend(0x0100u16.to_le_bytes());
        one.extend((r.offset / 512).to_le_bytes());
        one.extend(r.time_us.to_le_bytes());
        two.extend(command.to_le_bytes());
        two.extend(0x0200u16.to_le_bytes());
        two.extend((i as u32).to_le_bytes());
        two.extend(r.length.to_le_bytes());
        two.extend(1u32.to_le_bytes());
        two.extend((r.offset / 512).to_le_bytes());
        two.extend(r.time_us.to_le_bytes());
        two.extend(99u64.to_le_bytes());
    }
    for (bytes, format) in [(one, Format::Vscsi1), (two, Format::Vscsi2)] {
        let r = reader(bytes.clone()).expect("recognised");
        assert_eq!(r.format(), format);
        let got: Result<Vec<Record>, _> = r.collect();
        assert_eq!(got.expect("read"), want);
        let cut = read(bytes[..bytes.len() - 7].to_vec());
        assert!(matches!(cut, Err(TraceError::Truncated { record: 39, .. })));
    }
}

#[test]
fn a_bad_line_is_named_by_number() {
    let text = b"time_us,op,offset_bytes,length_bytes\n0,R,0,4096\n1,W,x,4096\n".to_vec();
    let error = read(text).expect_err("damaged");
    assert!(matches!(error, TraceError::Record { record: 2, .. }));
    assert!(error.to_string().contains("“x”"), "{error}");
    assert!(matches!(read(b"\0\0\0".to_vec()), Err(TraceError::Unknown)));
    assert!(matches!(read(Vec::new()), Err(TraceError::Unknown)));
    let endless = [b"0,R,0,4096".to_vec(), vec![b'9'; 200_000]].concat();
    assert!(read(endless).is_err());
}

/// `mkfs` discards 2 GiB at a time, `blkdiscard` the whole device.
#[test]
fn long_discard_becomes_several_records() {
    const GIB: u64 = 1 << 30;
    let text = "8,0 3 14 0.01 697 Q DS 8 + 4194304 [mkfs.ext4]\n8,0 3 15 0.02 697 Q W 0 + 8 [x]\n";
    let got = read(text.as_bytes().to_vec()).expect("read");
    let ranges: Vec<(Op, u64, u64)> = (got.iter())
        .map(|r| (r.op, r.offset, u64::from(r.length)))
        .collect();
    assert_eq!(
        ranges,
        [
            (Op::Discard, 4096, GIB),
            (Op::Discard, 4096 + GIB, GIB),
            (Op::Write, 0, 4096)
        ]
    );
    let text = format!("0,D,0,{}\n", 5 * GIB + 512);
    assert_eq!(read(text.into_bytes()).expect("read").len(), 6);
    assert!(read(format!("0,W,0,{}\n0,W,0,1\n", 2 * GIB).into_bytes()).is_err());
}

#[test]
fn blkparse_text_without_requests_is_refused() {
    let text = "8,0 0 0 0.000000000 0 m N cfq workload slice:100\nCPU0 (8,0):\n";
    let error = read(text.as_bytes().to_vec()).expect_err("nothing in it");
    assert!(error.to_string().contains("without an event"), "{error}");
}

#[test]
fn csv_with_mark_and_comments_is_read() {
    let lines =
        "time_us,op,offset_bytes,length_bytes\r\n0,R,0,4096\r\n# half way\r\n10,W,4096,4096\r\n";
    for before in [
        "",
        "\u{FEFF}",
        "# made by hand\n",
        "\u{FEFF}# made by hand\r\n\r\n",
    ] {
        let got = read(format!("{before}{lines}").into_bytes());
        assert_eq!(got.expect("read").len(), 2, "{before:?}");
    }
}

#[test]
fn a_newer_version_is_refused() {
    let mut bytes = written(&records(1), Format::Hearth);
    bytes[8] = 2;
    assert!(matches!(read(bytes), Err(TraceError::Newer(2))));
}

/// Every form that is written, with records it can hold whole.
#[test]
fn other_forms_come_back() {
    let reads_of_blocks: Vec<Record> = (0..50)
        .map(|i| Record {
            time_us: i * 3_000_000,
            disk: 0,
            op: Op::Read,
            offset: (i * 7 % 20) * 4096,
            length: 4096,
        })
        .collect();
    let mut of_two_disks = records(500);
    for r in of_two_disks.iter_mut().skip(100) {
        r.disk = 1;
    }
    let mut with_flushes = records(500);
    let flush = Record {
        op: Op::Flush,
        offset: 0,
        length: 0,
        ..with_flushes[7]
    };
    with_flushes.insert(8, flush);
    let mut with_discards = of_two_disks.clone();
    with_discards[5].op = Op::Discard;
    for (format, records) in [
        (Format::Msr, &of_two_disks),
        (Format::Alibaba, &of_two_disks),
        (Format::Spc, &of_two_disks),
        (Format::Blkparse, &with_discards),
        (Format::Vscsi1, &with_flushes),
        (Format::Vscsi2, &with_flushes),
        (Format::Oracle, &reads_of_blocks),
    ] {
        let bytes = written(records, format);
        let found = reader(bytes.clone()).expect("recognised");
        assert_eq!(found.format(), format);
        assert_eq!(&read(bytes).expect("read"), records, "{format}");
    }
}

#[test]
fn what_a_form_lacks_is_counted_or_refused() {
    let record = |op, offset, length| Record {
        time_us: 1_700_000,
        disk: 0,
        op,
        offset,
        length,
    };
    let odd = record(Op::Write, 700, 100);
    let all = [
        odd,
        record(Op::Discard, 4096, 4096),
        record(Op::Flush, 0, 0),
    ];
    for (format, left_out, widened, back) in [
        (Format::Csv, 0, 0, odd),
        (Format::Msr, 2, 0, odd),
        (Format::Alibaba, 2, 0, odd),
        (Format::Spc, 2, 1, record(Op::Write, 512, 288)),
        (Format::Blkparse, 1, 1, record(Op::Write, 512, 512)),
        (Format::Vscsi1, 1, 1, record(Op::Write, 512, 288)),
        (Format::Vscsi2, 1, 1, record(Op::Write, 512, 288)),
        (
            Format::Oracle,
            2,
            1,
            Record {
                time_us: 0,
                ..record(Op::Read, 0, 4096)
            },
        ),
    ] {
        let mut writer = Writer::new(Vec::new(), format).expect("a header");
        for r in all {
            writer.push(r).expect("a record");
        }
        let lost = writer.lost();
        assert_eq!(
            (lost.left_out, lost.widened),
            (left_out, widened),
            "{format}"
        );
        let got = read(writer.finish().expect("the rest")).expect("read");
        assert_eq!((got[0], got.len() as u64), (back, 3 - left_out), "{format}");
    }
    for format in [Format::Csv, Format::Vscsi1, Format::Vscsi2, Format::Oracle] {
        let mut writer = Writer::new(Vec::new(), format).expect("a header");
        let second = Record { disk: 1, ..odd };
        let refused = writer.push(second).expect_err("no place for disks");
        assert!(refused.to_string().contains("--disk"), "{refused}");
    }
    let mut writer = Writer::new(Vec::new(), Format::Msr).expect("a header");
    let late = Record {
        time_us: u64::MAX,
        ..odd
    };
    assert!(writer.push(late).is_err());
    assert!(Writer::new(Vec::new(), Format::Keys).is_err());
}

/// `next_access_vtime` is the number of the next record of the same object.
#[test]
fn oracle_general_knows_the_future() {
    let read = |block: u64| Record {
        time_us: 0,
        disk: 0,
        op: Op::Read,
        offset: block * 4096,
        length: 4096,
    };
    let bytes = written(&[read(1), read(2), read(1), read(1)], Format::Oracle);
    let next: Vec<i64> = bytes
        .chunks_exact(24)
        .map(|b| i64::from_le_bytes(b[16..24].try_into().expect("eight bytes")))
        .collect();
    assert_eq!(next, [2, -1, 3, -1]);
}
