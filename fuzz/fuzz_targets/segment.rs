//! Walking a segment of hostile batches ends, stays inside it, and believes no slot outside.
#![no_main]

use hearth_format::BatchHeader;
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

/// Blocks of the segment walked; the input covers some, the rest are zeros.
const BLOCKS: usize = 16;

fuzz_target!(|data: &[u8]| {
    let Some((how, mut bytes)) = steer(data, BLOCKS * 4096) else {
        return;
    };
    bytes.truncate(BLOCKS * 4096);
    let mut entries = Vec::new();
    let mut at = 0usize;
    while let Some(block) = bytes.get_mut(at * 4096..(at + 1) * 4096) {
        if how & 1 == 0 {
            // Size, width and flags too, lest the walk nearly always end at its first block.
            if how & 2 == 0 {
                block[60..64].copy_from_slice(&[16, 1, how >> 2 & 1, 0]);
            }
            seal(block, b"HBAT", 4, 4096);
        }
        let before = entries.len();
        let Ok(header) = BatchHeader::decode(block, &mut entries) else {
            assert_eq!(entries.len(), before, "a refused batch left entries behind");
            break;
        };
        let new = &entries[before..];
        let mut again = [0u8; 4096];
        header
            .encode(new, &mut again)
            .expect("a decoded batch can be written");
        let mut back = Vec::new();
        assert_eq!(
            BatchHeader::decode(&again, &mut back).expect("and read"),
            header
        );
        assert_eq!(back, new);
        if header.check_slots(at as u32, BLOCKS as u32, new).is_err() {
            break;
        }
        for entry in new.iter().filter(|entry| entry.kind.is_data()) {
            assert!(usize::from(entry.slot) > at && usize::from(entry.slot) < BLOCKS);
        }
        at += 1 + usize::from(header.data_blocks);
    }
    assert!(entries.len() <= BLOCKS * hearth_format::BATCH_ENTRIES_MAX);
});
