//! What simulated guests write: content that says where it belongs.
//!
//! If two writes could carry the same bytes, a cache that serves the wrong one would go
//! unnoticed. Every 512-byte sector therefore holds a stamp (disk, write, sector) and a pattern
//! derived from it, so that any sector found anywhere can be named in words: a stale version, a
//! neighbour's sector, another disk's, half of one and half of another.

/// Bytes in a sector: the unit in which the model tracks content.
pub const SECTOR: u64 = 512;
/// Sectors in a block.
pub const PER_BLOCK: u64 = 8;
/// Bytes in a block.
pub const BLOCK: usize = 4096;

/// What a sector holds, as recognised from its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// All zeros.
    Zero,
    /// A stamp with its whole pattern.
    Stamp(u64),
    /// Neither: torn, rotted or foreign. Carries what the first word looked like.
    Garbage(u64),
}

/// The stamp of a sector: never 0, because a disk's uid is never 0.
pub fn stamp(uid: u8, version: u32, sector: u64) -> u64 {
    (u64::from(uid) << 56) | (u64::from(version & 0xFF_FFFF) << 32) | (sector & 0xFFFF_FFFF)
}

/// Takes a stamp apart: (disk uid, version, sector).
pub fn unstamp(stamp: u64) -> (u8, u32, u64) {
    (
        (stamp >> 56) as u8,
        ((stamp >> 32) & 0xFF_FFFF) as u32,
        stamp & 0xFFFF_FFFF,
    )
}

#[inline]
fn word(stamp: u64, i: usize) -> u64 {
    if i == 0 {
        stamp
    } else {
        (stamp ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

/// Fills a sector (or the shorter tail of a disk) with a value.
pub fn fill(value: Value, out: &mut [u8]) {
    match value {
        Value::Zero => out.fill(0),
        Value::Stamp(stamp) | Value::Garbage(stamp) => {
            for (i, chunk) in out.chunks_mut(8).enumerate() {
                let bytes = word(stamp, i).to_le_bytes();
                chunk.copy_from_slice(&bytes[..chunk.len()]);
            }
        }
    }
}

/// Recognises a sector (or the shorter tail of a disk).
pub fn recognise(bytes: &[u8]) -> Value {
    let (words, tail) = bytes.as_chunks::<8>();
    let mut first = [0u8; 8];
    let n = bytes.len().min(8);
    first[..n].copy_from_slice(&bytes[..n]);
    let head = u64::from_le_bytes(first);
    // Differences are gathered rather than branched on: this is the simulator's hottest loop.
    let (difference, rest) = if head == 0 {
        (words.iter().fold(0, |d, w| d | u64::from_le_bytes(*w)), 0)
    } else {
        let d = words
            .iter()
            .enumerate()
            .fold(0, |d, (i, w)| d | (u64::from_le_bytes(*w) ^ word(head, i)));
        (d, word(head, words.len()))
    };
    let whole = difference == 0 && rest.to_le_bytes()[..tail.len()] == *tail;
    match (whole, head) {
        (true, 0) => Value::Zero,
        (true, _) => Value::Stamp(head),
        (false, _) => Value::Garbage(head),
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Zero => write!(f, "zeros"),
            Value::Stamp(s) => {
                let (uid, version, sector) = unstamp(*s);
                write!(
                    f,
                    "content of write {version} for sector {sector} of disk #{uid}"
                )
            }
            Value::Garbage(s) => {
                let (uid, version, sector) = unstamp(*s);
                write!(
                    f,
                    "garbage (torn or rotted; begins like write {version}, sector {sector}, disk #{uid})"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognises_what_it_filled_and_nothing_else() {
        let mut sector = [0u8; 512];
        let value = Value::Stamp(stamp(3, 77, 12345));
        fill(value, &mut sector);
        assert_eq!(recognise(&sector), value);
        assert_eq!(recognise(&sector[..57]), value);
        for flip in [0usize, 7, 8, 100, 511] {
            let mut bad = sector;
            bad[flip] ^= 0x10;
            assert!(matches!(recognise(&bad), Value::Garbage(_)), "byte {flip}");
        }
        let mut other = [0u8; 512];
        fill(Value::Stamp(stamp(3, 78, 12345)), &mut other);
        sector[256..].copy_from_slice(&other[256..]);
        assert!(matches!(recognise(&sector), Value::Garbage(_)));
        assert_eq!(recognise(&[0u8; 512]), Value::Zero);
    }
}
