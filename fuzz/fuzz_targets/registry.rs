//! A registry from anywhere is refused or understood, and then survives a rewrite with
//! everything it carried.
#![no_main]

use hearth_format::{Registry, Uuid};
use hearth_fuzz::{seal, steer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((how, mut bytes)) = steer(data, 64) else {
        return;
    };
    if how & 1 == 0 {
        bytes[8..24].fill(0);
        if how & 2 == 0 {
            let body = bytes.len() as u32 - 64;
            bytes[32..36].copy_from_slice(&body.to_le_bytes());
            bytes[40..44].fill(0);
        }
        let body = u32::from_le_bytes([bytes[32], bytes[33], bytes[34], bytes[35]]) as usize;
        seal(&mut bytes, b"HREG", 4, 64usize.saturating_add(body));
    }
    if let Ok(registry) = Registry::decode(&bytes, Uuid::nil()) {
        for disk in &registry.disks {
            assert!(
                registry
                    .by_name(&disk.name)
                    .is_some_and(|found| found.id == disk.id)
            );
        }
        // Absent optional fields are written out, which may push a full area over its limit.
        if let Ok(again) = registry.encode(Uuid::nil()) {
            assert_eq!(
                Registry::decode(&again, Uuid::nil()).expect("a rewritten registry is readable"),
                registry
            );
        }
        let mut registry = registry;
        if let Some(id) = registry.take_disk_id() {
            assert!(registry.by_id(id).is_none() && id != 0);
        }
    }
});
