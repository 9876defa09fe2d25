//! A superblock from anywhere is refused or understood, and then survives a rewrite.
#![no_main]

use hearth_format::Superblock;
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((how, mut block)) = steer(data, 4096) else {
        return;
    };
    if how & 1 == 0 {
        seal(&mut block, b"HEARTHSB", 12, 4096);
    }
    match Superblock::decode(&block) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(superblock) => {
            let layout = &superblock.layout;
            let last = layout.summary_offset(layout.segment_count - 1);
            assert!(last + layout.summary_bytes() as u64 <= layout.device_blocks * 4096);
            assert!(layout.slots() < u32::MAX);
            let again = Superblock::decode(superblock.encode().as_slice());
            assert_eq!(
                again.expect("a rewritten superblock is readable"),
                superblock
            );
        }
    }
});
