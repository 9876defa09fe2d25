//! Buckets for numbers of any size: linear within a doubling, so the error is a fixed share.
//!
//! A bucket is found with a shift, and numbers below `2^bits` have a bucket each.

/// Bucket of `n` (0 counts as 1) with `2^bits` buckets per doubling.
#[inline]
pub(crate) fn bucket(n: u64, bits: u32) -> usize {
    let n = n.max(1);
    let octave = n.ilog2();
    if octave < bits {
        return n as usize;
    }
    let shift = octave - bits;
    ((u64::from(shift) << bits) + (n >> shift)) as usize
}

/// Smallest number of a bucket.
pub(crate) fn lower(bucket: usize, bits: u32) -> u64 {
    let b = bucket as u64;
    let per = 1u64 << bits;
    if b < per {
        return b;
    }
    ((b % per) + per) << (b / per - 1)
}

/// Buckets needed for numbers below `2^octaves`.
pub(crate) fn buckets(octaves: u32, bits: u32) -> usize {
    ((octaves - bits + 1) as usize) << bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_tile_the_numbers() {
        for bits in [3, 7] {
            for b in 1..buckets(40, bits) {
                assert_eq!(bucket(lower(b, bits), bits), b);
                assert_eq!(bucket(lower(b + 1, bits) - 1, bits), b);
                assert!(lower(b, bits) > lower(b - 1, bits));
            }
            assert_eq!(bucket((1 << 40) - 1, bits), buckets(40, bits) - 1);
        }
    }
}
