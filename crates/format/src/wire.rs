//! Little-endian fields at fixed offsets, and the checksum rule all structures share.
//!
//! Offsets given to these helpers are constants of the format, never values read from flash.

use crc_fast::{CrcAlgorithm, Digest};

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// `N` bytes at `at`; zeros where the slice ends early, which no caller lets happen.
#[inline(always)]
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk::<N>())
        .copied()
        .unwrap_or([0; N])
}

/// Stores `value` at `at`. The caller owns a buffer of the structure's full size.
#[inline(always)]
pub(crate) fn put(out: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = out.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// CRC32C of `bytes` as if the four bytes at `hole` were zero: the checksum of every
/// structure that carries its checksum inside itself.
pub(crate) fn crc_with_hole(bytes: &[u8], hole: usize) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(bytes.get(..hole).unwrap_or_default());
    digest.update(&[0; 4]);
    digest.update(bytes.get(hole + 4..).unwrap_or_default());
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hole_counts_as_zeros() {
        let mut bytes = *b"0123456789abcdef";
        let holed = crc_with_hole(&bytes, 4);
        bytes[4..8].fill(0);
        assert_eq!(holed, hearth_io::checksum::crc32c(&bytes));
    }

    #[test]
    fn short_slices_do_not_panic() {
        assert_eq!(u64_at(&[1, 2, 3], 0), 0);
        assert_eq!(u32_at(&[1, 2, 3, 4], 9), 0);
        put(&mut [0; 2], 1, &[1, 2, 3]);
        let _ = crc_with_hole(&[], 4);
    }
}
