//! CRC-32C (Castagnoli, as in iSCSI, RFC 3720 appendix B.4): the checksum of everything on flash.

/// CRC-32C of `data`. Check value: `crc32c(b"123456789") == 0xE306_9283`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn known_vectors() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0u8; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFFu8; 32]), 0x62A8_AB43);
    }
}
