//! Numbers of one to ten bytes, seven bits each, lowest first (LEB128), and signed ones folded
//! so that small magnitudes are short (zigzag).

/// Appends `n`.
pub(crate) fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Takes a number off the front; `None` if there is no whole one that fits 64 bits.
pub(crate) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(first & 0x7F);
        if shift == 63 && part > 1 {
            return None;
        }
        n |= part << shift;
        if first & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

/// Folds a signed number.
pub(crate) fn fold(n: i64) -> u64 {
    ((n << 1) ^ (n >> 63)) as u64
}

/// Unfolds it.
pub(crate) fn unfold(n: u64) -> i64 {
    ((n >> 1) as i64) ^ -((n & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_survive(n: u64, s: i64) {
            let mut bytes = Vec::new();
            put(&mut bytes, n);
            put(&mut bytes, fold(s));
            let mut rest = &bytes[..];
            prop_assert_eq!(take(&mut rest), Some(n));
            prop_assert_eq!(take(&mut rest).map(unfold), Some(s));
            prop_assert!(rest.is_empty());
        }
    }

    #[test]
    fn overlong_and_cut_numbers_are_refused() {
        assert_eq!(take(&mut &[0xFF; 10][..]), None);
        assert_eq!(take(&mut &[0x80, 0x80][..]), None);
        assert_eq!(take(&mut &[][..]), None);
    }
}
