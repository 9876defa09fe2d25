//! CRC-32C (Castagnoli, as in iSCSI, RFC 3720 appendix B.4): the checksum of everything on flash.

/// CRC-32C of `data`. Check value: `crc32c(b"123456789") == 0xE306_9283`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// The checksum of what comes in pieces.
pub struct Crc32c(crc_fast::Digest);

impl Default for Crc32c {
    fn default() -> Self {
        Crc32c(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }
}

impl Crc32c {
    /// The next piece.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// The checksum of all pieces.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::{Crc32c, crc32c};

    #[test]
    fn pieces_have_the_checksum_of_the_whole() {
        let data: Vec<u8> = (0..10_000u32).map(|n| (n * 7) as u8).collect();
        let mut pieces = Crc32c::default();
        data.chunks(333).for_each(|piece| pieces.update(piece));
        assert_eq!(pieces.finish(), crc32c(&data));
    }

    #[test]
    fn known_vectors() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0u8; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFFu8; 32]), 0x62A8_AB43);
    }
}
