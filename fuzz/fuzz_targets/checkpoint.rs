//! A checkpoint header from anywhere is refused, or all its sections lie apart in the area.
#![no_main]

use hearth_format::CheckpointHeader;
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((how, mut block)) = steer(data, 4096) else {
        return;
    };
    if how & 1 == 0 {
        if how & 2 == 0 {
            block[50..56].copy_from_slice(&[24, 0, 0, 0, 0, 0]);
        }
        seal(&mut block, b"HCKP", 4, 4096);
    }
    let area = 4096u64 << (how >> 3);
    if let Ok(header) = CheckpointHeader::decode(&block, area) {
        let mut total = 0u64;
        for section in &header.sections {
            assert!(section.offset >= 4096 && section.offset + section.len <= area);
            total += section.len;
        }
        assert!(total <= area, "sections overlap");
        let again = header
            .encode(area)
            .expect("a decoded header can be written");
        assert_eq!(
            CheckpointHeader::decode(again.as_slice(), area).expect("and read"),
            header
        );
    }
});
