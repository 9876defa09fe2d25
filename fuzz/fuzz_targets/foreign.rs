//! Looking at a stranger's device reads only what is there and never panics.
#![no_main]

use hearth_fuzz::steer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // A sparse image: the input is a list of (place, eight bytes), as few marks are longer.
    let Some((how, bytes)) = steer(data, 2) else {
        return;
    };
    let size = (2u64 << 20) + u64::from(how) * 4096 + u64::from(bytes[0]) * 2;
    let mut read = |offset: u64, out: &mut [u8]| {
        assert_eq!(offset % 4096, 0);
        assert!(offset + out.len() as u64 <= size);
        out.fill(0);
        for patch in bytes[1..].chunks_exact(12) {
            let place = u64::from(u32::from_le_bytes([patch[0], patch[1], patch[2], patch[3]]));
            // Places above the middle count from the end.
            let place = if place < 1 << 31 {
                place
            } else {
                size.saturating_sub(u64::from(u32::MAX) - place)
            };
            for (at, byte) in (place..).zip(&patch[4..]) {
                if let Some(target) = at.checked_sub(offset).and_then(|i| out.get_mut(i as usize)) {
                    *target = *byte;
                }
            }
        }
        Ok(())
    };
    if let Ok(Some(found)) = hearth_format::identify(&mut read, size) {
        assert!(!found.what.is_empty() && found.offset < size);
    }
});
