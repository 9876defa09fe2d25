//! Block contents that say what they are: which block, which version, and whether they are whole.

use crate::rng::Rng;

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// Fills `out` with version `version` of block `block`; every 8 bytes depend on both, so that a
/// block torn anywhere is recognised.
pub fn fill(out: &mut [u8], block: u64, version: u64) {
    let (head, body) = out.split_at_mut(16);
    head[..8].copy_from_slice(&block.to_le_bytes());
    head[8..].copy_from_slice(&version.to_le_bytes());
    seeded(block, version).fill(body);
}

/// The version of block `block` that `data` holds, whole; an error says what is wrong.
/// A block of zeros is version 0, "never written".
pub fn version_of(data: &[u8], block: u64) -> Result<u64, String> {
    if data.iter().all(|b| *b == 0) {
        return Ok(0);
    }
    let word = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().unwrap_or_default());
    let (found, version) = (word(0), word(8));
    if found != block {
        return Err(format!(
            "block {block} holds what belongs to block {found} (version {version})"
        ));
    }
    let mut expected = vec![0u8; data.len()];
    fill(&mut expected, block, version);
    match data.iter().zip(&expected).position(|(a, b)| a != b) {
        None => Ok(version),
        Some(at) => Err(format!(
            "block {block} claims version {version} but differs from it at byte {at}: torn or corrupt"
        )),
    }
}

fn seeded(block: u64, version: u64) -> Rng {
    Rng::new(block.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ version.rotate_left(32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_torn_and_foreign_blocks_are_told_apart() {
        let mut block = vec![0u8; BLOCK];
        assert_eq!(version_of(&block, 7), Ok(0));
        fill(&mut block, 7, 3);
        assert_eq!(version_of(&block, 7), Ok(3));
        assert!(version_of(&block, 8).is_err());
        let mut newer = vec![0u8; BLOCK];
        fill(&mut newer, 7, 4);
        newer[512..].copy_from_slice(&block[512..]);
        assert!(version_of(&newer, 7).is_err());
    }
}
