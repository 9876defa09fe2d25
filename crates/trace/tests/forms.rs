//! Every form end to end: written to a file, recognised, read; and cut off or damaged.

use std::io::{BufReader, Cursor, Write};

use hearth_trace::{
    FRAME_RECORDS, Format, HEADER_BYTES, Op, Options, Output, Reader, Record, TraceError, Writer,
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

fn written(records: &[Record], output: Output) -> Vec<u8> {
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
    for output in [Output::Hearth, Output::Csv] {
        assert_eq!(read(written(&records, output)).expect("read"), records);
    }
    let own = written(&records, Output::Hearth).len();
    let csv = written(&records, Output::Csv).len();
    assert!(own * 3 < csv, "{own} bytes against {csv}");
}

#[test]
fn compression_is_taken_off() {
    let records = records(1000);
    let plain = written(&records, Output::Csv);
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
    let whole = written(&records, Output::Hearth);
    let first = written(&records[..FRAME_RECORDS], Output::Hearth).len();
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

#[test]
fn a_newer_version_is_refused() {
    let mut bytes = written(&records(1), Output::Hearth);
    bytes[8] = 2;
    assert!(matches!(read(bytes), Err(TraceError::Newer(2))));
}
