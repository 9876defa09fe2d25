//! What one program leaves for the next is understood and written again as it was, or refused.
#![no_main]

#[path = "../../crates/daemon/src/upgrade/document.rs"]
#[allow(dead_code)]
mod document;

use document::Document;
use hearth_nbd::carried::State;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((how, bytes)) = data.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    match how % 3 {
        0 => {
            if let Some(state) = State::parse(&bytes) {
                let again = state.encode();
                assert_eq!(State::parse(&again).as_ref(), Some(&state));
            }
            return;
        }
        // With the right sum behind it, which nobody guesses.
        1 => bytes.extend(hearth_io::checksum::crc32c(&bytes).to_le_bytes()),
        _ => {}
    }
    if let Ok(document) = Document::parse(&bytes) {
        assert_eq!(document.encode(), bytes);
    }
});
