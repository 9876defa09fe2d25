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
            bytes[62..64].copy_from_slice(&[16, how >> 2 & 1]);
        }
        let count = usize::from(u16::from_le_bytes([bytes[60], bytes[61]]));
        let mut used = 64 + count * usize::from(bytes[62]);
        if bytes[63] & 1 != 0
            && let Some(batches) = bytes.get(used..).and_then(|rest| rest.first_chunk())
        {
            used += 4 + u32::from_le_bytes(*batches) as usize * 12;
        }
        seal(&mut bytes, b"HSUM", 4, used);
    }
    let (mut entries, mut batches) = (Vec::new(), Vec::new());
    match SummaryHeader::decode(&bytes, &mut entries, &mut batches) {
        Err(_) => assert!(entries.is_empty() && batches.is_empty()),
        Ok(header) => {
            assert_eq!(header.entry_count as usize, entries.len());
            assert!(header.last_batch_seq >= header.first_batch_seq);
            let mut again = Vec::new();
            header
                .encode(&entries, &batches, &mut again)
                .expect("a decoded summary can be written");
            let (mut back, mut marks) = (Vec::new(), Vec::new());
            assert_eq!(
                SummaryHeader::decode(&again, &mut back, &mut marks).expect("and read"),
                header
            );
            assert_eq!((back, marks), (entries, batches));
        }
    }
});
