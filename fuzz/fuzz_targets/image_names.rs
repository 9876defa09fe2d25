//! The header of an image from anywhere is refused, or names files whose names are bounded text.
#![no_main]

use hearth_origin::names::names;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((how, image)) = data.split_first() else {
        return;
    };
    let format = ["qcow2", "vmdk", "vhdx", "vhd"][usize::from(*how) % 4];
    let mut read = |offset: u64, bytes: &mut [u8]| {
        let from = usize::try_from(offset).ok().and_then(|o| image.get(o..));
        let part = from.and_then(|rest| rest.get(..bytes.len()));
        bytes.copy_from_slice(part.expect("reads stay within the image"));
        Ok(())
    };
    if let Ok(found) = names(format, image.len() as u64, &mut read) {
        let all = [&found.backing, &found.backing_format, &found.data];
        for name in all.into_iter().flatten() {
            assert!(name.len() <= 1023 && !name.chars().any(char::is_control));
        }
        for name in &found.extents {
            let bytes = name.as_os_str().as_encoded_bytes();
            assert!(bytes.len() <= 1023 && !bytes.iter().any(u8::is_ascii_control));
        }
    }
});
