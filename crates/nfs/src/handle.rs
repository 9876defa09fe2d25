//! What clients call files: handles that live on, and that nobody can make up.
//!
//! A client keeps a handle for as long as it likes and shows it after restarts of either side, so a
//! handle must name its file by itself. Whoever can send us bytes can show any handle as well; if
//! handles were guessed, a file could be reached without asking its directories. So every handle
//! carries a code (a MAC) that only the holder of the datastore's secret key can make. ESXi takes at most 56
//! bytes.
//!
//! ```text
//! byte 0      1, the form
//! byte 1      length of the key
//! bytes 2-9   the datastore's number
//! then        the key: what the tree calls the file (at most 28 bytes)
//! last 16     HMAC-SHA-256 of all before, its first half
//! ```

use ring::hmac;

/// Longest handle: what ESXi takes.
pub const LENGTH_MAX: usize = 56;
/// Longest key.
pub const KEY_MAX: usize = 28;
const FORM: u8 = 1;
const HEAD: usize = 10;
const MAC: usize = 16;
const _: () = assert!(HEAD + KEY_MAX + MAC <= LENGTH_MAX);

/// What a tree calls a file, as long as the file lives and wherever it is moved to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    len: u8,
    bytes: [u8; KEY_MAX],
}

impl Key {
    /// The key of these bytes, if they are not too many.
    pub fn new(bytes: &[u8]) -> Option<Key> {
        let mut key = Key {
            len: u8::try_from(bytes.len()).ok()?,
            bytes: [0; KEY_MAX],
        };
        key.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(key)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Makes the handles of one datastore, and knows its own again.
pub struct Sealer {
    store: u64,
    key: hmac::Key,
}

impl Sealer {
    /// For the datastore of number `store`. Who knows `secret` can make handles.
    pub fn new(store: u64, secret: &[u8; 32]) -> Sealer {
        Sealer {
            store,
            key: hmac::Key::new(hmac::HMAC_SHA256, secret),
        }
    }

    /// The handle of a file.
    pub fn seal(&self, key: &Key) -> Vec<u8> {
        let mut handle = Vec::with_capacity(HEAD + key.bytes().len() + MAC);
        handle.extend_from_slice(&[FORM, key.len]);
        handle.extend_from_slice(&self.store.to_be_bytes());
        handle.extend_from_slice(key.bytes());
        let tag = hmac::sign(&self.key, &handle);
        handle.extend_from_slice(&tag.as_ref()[..MAC]);
        handle
    }

    /// The file of a handle we made. Takes the same time however much of the code is right.
    pub fn open(&self, handle: &[u8]) -> Option<Key> {
        let (body, mac) = handle.split_at_checked(handle.len().checked_sub(MAC)?)?;
        if store(handle) != Some(self.store) {
            return None;
        }
        let key = Key::new(body.get(HEAD..)?)?;
        if body[0] != FORM || body[1] != key.len {
            return None;
        }
        let tag = hmac::sign(&self.key, body);
        let differs = tag.as_ref()[..MAC]
            .iter()
            .zip(mac)
            .fold(0, |d, (a, b)| d | (a ^ b));
        (std::hint::black_box(differs) == 0).then_some(key)
    }
}

/// The datastore a handle says it is of.
pub fn store(handle: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(*handle.get(2..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sealer() -> Sealer {
        Sealer::new(7, &[3; 32])
    }

    #[test]
    fn a_handle_looks_the_same_for_ever() {
        // Clients keep handles over our restarts and updates.
        let handle = sealer().seal(&Key::new(b"abc").expect("short"));
        let hex: String = handle.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "01030000000000000007616263f8d3afe6aabece537a332f82ad03ada2"
        );
    }

    #[test]
    fn the_longest_fits_esxi() {
        let key = Key::new(&[9; KEY_MAX]).expect("fits");
        let handle = sealer().seal(&key);
        assert!(handle.len() <= LENGTH_MAX);
        assert_eq!(sealer().open(&handle), Some(key));
        assert_eq!(Key::new(&[9; KEY_MAX + 1]), None);
    }

    #[test]
    fn other_keys_and_other_stores_make_other_handles() {
        let key = Key::new(b"file").expect("short");
        assert_eq!(Sealer::new(7, &[4; 32]).open(&sealer().seal(&key)), None);
        assert_eq!(Sealer::new(8, &[3; 32]).open(&sealer().seal(&key)), None);
    }

    proptest! {
        #[test]
        fn every_changed_bit_is_noticed(
            bytes in proptest::collection::vec(any::<u8>(), 0..=KEY_MAX), at: prop::sample::Index, bit in 0u8..8,
        ) {
            let key = Key::new(&bytes).expect("fits");
            let mut handle = sealer().seal(&key);
            prop_assert_eq!(sealer().open(&handle), Some(key));
            let at = at.index(handle.len());
            handle[at] ^= 1 << bit;
            prop_assert_eq!(sealer().open(&handle), None);
        }

        #[test]
        fn other_lengths_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..70), cut in 0usize..40) {
            prop_assert_eq!(sealer().open(&bytes), None);
            let handle = sealer().seal(&Key::new(b"file").expect("short"));
            if cut < handle.len() {
                prop_assert_eq!(sealer().open(&handle[..cut]), None);
            }
        }
    }
}
