//! A summary from anywhere is refused or understood, and then survives a rewrite.
#![no_main]

use hearth_format::SummaryHeader;
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((how, mut bytes)) = steer(data, 4096) else {
        return;
    };
    if how & 1 == 0 {
        if how & 2 == 0 {
            bytes[62..64].copy_from_slice(&[16, 0]);
        }
        let count = usize::from(u16::from_le_bytes([bytes[60], bytes[61]]));
        let used = 64 + count * usize::from(bytes[62]);
        seal(&mut bytes, b"HSUM", 4, used);
    }
    let mut entries = Vec::new();
    match SummaryHeader::decode(&bytes, &mut entries) {
        Err(_) => assert!(entries.is_empty()),
        Ok(header) => {
            assert_eq!(header.entry_count as usize, entries.len());
            assert!(header.last_batch_seq >= header.first_batch_seq);
            let mut again = Vec::new();
            header
                .encode(&entries, &mut again)
                .expect("a decoded summary can be written");
            let mut back = Vec::new();
            assert_eq!(
                SummaryHeader::decode(&again, &mut back).expect("and read"),
                header
            );
            assert_eq!(back, entries);
        }
    }
});
