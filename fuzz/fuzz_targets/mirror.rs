//! What is remembered of a mirror's legs, from anywhere: the stamps of a disk's record, and the notes of the state directory, are
//! refused or understood, and then survive being written again.
#![no_main]

use hearth_format::Uuid;
use hearth_format::mirror::{LEGS_MAX, MirrorNotes, MirrorStamps, NOTES_BYTES, REGIONS_MAX};
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

const SLOT: usize = NOTES_BYTES / 2;

fuzz_target!(|data: &[u8]| {
    let Some((how, bytes)) = steer(data, 0) else {
        return;
    };
    if how & 1 == 0 {
        match MirrorStamps::decode(&bytes) {
            Err(error) => assert!(!error.to_string().is_empty()),
            Ok(stamps) => {
                assert!((1..=LEGS_MAX).contains(&stamps.legs.len()));
                let again = stamps.encode().expect("what was read can be written");
                let again = MirrorStamps::decode(&again);
                assert_eq!(again.expect("what was written can be read"), stamps);
            }
        }
        return;
    }
    let mut file = bytes;
    file.resize(NOTES_BYTES, 0);
    for slot in file.chunks_mut(SLOT) {
        // A length that is none is refused before the checksum is looked at.
        let len = u32::from_le_bytes([slot[12], slot[13], slot[14], slot[15]]) as usize;
        if how & 2 == 0 && len <= slot.len() {
            seal(slot, b"HMIR", 4, len);
        }
    }
    let mut serial = [0; 16];
    serial.copy_from_slice(&file[16..32]);
    let serial = Uuid::from_bytes(serial);
    let Some(notes) = MirrorNotes::newest(&file, &serial) else {
        return;
    };
    assert!(notes.regions <= REGIONS_MAX && notes.touched.len() as u64 * 64 >= notes.regions);
    let (at, written) = notes.encode().expect("what was read can be written");
    let mut fresh = vec![0; NOTES_BYTES];
    fresh[at as usize..][..written.len()].copy_from_slice(&written);
    assert_eq!(MirrorNotes::newest(&fresh, &serial), Some(notes));
});
