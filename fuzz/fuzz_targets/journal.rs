//! Whatever stands behind a registry in its two areas is refused or understood, and what was
//! understood survives being stored as a whole.
#![no_main]

use hearth_format::journal::{JournalEntry, replay};
use hearth_format::{DiskRecord, Registry, Uuid};
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

const BLOCK: usize = 4096;
/// Generation of the base.
const BASE: u64 = 5;

fuzz_target!(|data: &[u8]| {
    let Some((how, mut bytes)) = steer(data, BLOCK) else {
        return;
    };
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
    let blocks = bytes.len() / BLOCK;
    if how & 1 == 0 {
        // Each block an entry of its own, or the first an entry of all.
        let each = if how & 2 == 0 { 1 } else { blocks.min(16) };
        for (number, entry) in (1u64..).zip(bytes.chunks_mut(each * BLOCK)) {
            let length = entry.len();
            entry[8..16].fill(0);
            entry[16..24].copy_from_slice(&BASE.to_le_bytes());
            entry[24..32].copy_from_slice(&(BASE + number).to_le_bytes());
            entry[36..38].copy_from_slice(&((length / BLOCK) as u16).to_le_bytes());
            if how & 4 == 0 {
                entry[40..44].fill(0);
            }
            seal(entry, b"HRGJ", 4, length);
        }
    }
    let base = Registry {
        generation: BASE,
        disks: vec![DiskRecord {
            id: 1,
            name: "a".to_owned(),
            origin: "/a".to_owned(),
            ..DiskRecord::default()
        }.into()],
        ..Registry::default()
    };
    if let Ok(entry) = JournalEntry::decode(&bytes, Uuid::nil())
        && let Some(again) = entry.encode(Uuid::nil()).expect("what was read can be written")
    {
        assert_eq!(
            JournalEntry::decode(&again, Uuid::nil()).expect("a rewritten entry is readable"),
            entry
        );
    }
    let other = bytes.split_off(usize::from(how >> 3) % blocks * BLOCK);
    if let Ok(chain) = replay(base, [&bytes, &other], Uuid::nil()) {
        assert!(chain.registry.generation >= BASE);
        let bytes = chain
            .registry
            .encode_base(Uuid::nil(), true)
            .expect("what was read can be written");
        assert_eq!(
            Registry::decode(&bytes, Uuid::nil()).expect("a rewritten registry is readable"),
            chain.registry
        );
    }
});
