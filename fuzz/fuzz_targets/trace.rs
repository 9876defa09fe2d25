//! Any bytes as any form of trace: understood or refused, never a panic, never without end; and
//! what was understood survives being written and read again.
#![no_main]

use std::io::{BufReader, Cursor};

use hearth_trace::{Format, Info, Options, Reader, Record, Writer};
use libfuzzer_sys::fuzz_target;

/// Records looked at: enough for several frames of Hearth's form.
const RECORDS_MAX: usize = 20_000;

fn read(bytes: Vec<u8>, format: Option<Format>) -> Vec<Record> {
    let Ok(reader) = Reader::new(BufReader::new(Cursor::new(bytes)), Options { format }) else {
        return Vec::new();
    };
    reader.map_while(Result::ok).take(RECORDS_MAX).collect()
}

fuzz_target!(|data: &[u8]| {
    let Some((how, bytes)) = data.split_first() else {
        return;
    };
    // Forced forms get behind detection; one beyond the last leaves it to detection.
    let format = Format::ALL.get(usize::from(*how) % (Format::ALL.len() + 1));
    let records = read(bytes.to_vec(), format.copied());
    let mut info = Info::new();
    for r in &records {
        let (start, end) = r.blocks();
        assert!(start <= end);
        // A trace may name ranges of up to 1 GiB; the set of blocks stays small all the same.
        info.add(r);
    }
    let sum = info.summary();
    assert!(sum.unique_blocks <= sum.block_accesses);
    let mut writer = Writer::new(Vec::new(), Format::Hearth).expect("memory takes it");
    for r in &records {
        writer.push(*r).expect("what was read can be written");
    }
    let again = read(writer.finish().expect("memory takes it"), None);
    assert_eq!(again, records);
    // An object for each block of a gigabyte takes the fuzzer's memory and proves nothing.
    for format in Format::ALL.into_iter().filter(|f| *f != Format::Oracle) {
        let Ok(mut writer) = Writer::new(Vec::new(), format) else {
            continue;
        };
        let written = records.iter().filter(|r| writer.push(**r).is_ok()).count();
        let left_out = writer.lost().left_out as usize;
        let again = read(writer.finish().expect("memory takes it"), Some(format));
        assert!(again.len() >= (written - left_out).min(RECORDS_MAX), "{format}");
    }
});
