//! What the registry calls the files of datastores.

use std::fmt::Write as _;

use hearth_nfs::handle::Key;

/// What the origin of a file's disk begins with in the registry.
const FILE: &str = "file:";

/// What a file is called there.
pub(crate) fn text_of(key: &Key) -> String {
    key.bytes().iter().fold(FILE.to_owned(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The file that is called so.
pub(crate) fn key_of(text: &str) -> Option<Key> {
    let digits = text.strip_prefix(FILE)?;
    let bytes: Option<Vec<u8>> = (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok())
        .collect();
    Key::new(&bytes?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_are_called_is_read_again() {
        for bytes in [&b"\x01\x01\xff\x00"[..], b""] {
            let key = Key::new(bytes).unwrap();
            assert_eq!(key_of(&text_of(&key)), Some(key));
        }
        for text in ["file:0", "file:zz", "0102", "file:\u{fc}\u{fc}"] {
            assert_eq!(key_of(text), None, "{text}");
        }
    }
}
