//! As much of DER (ITU-T X.690) as keys and names in certificates need.
//!
//! What is read here was written by the operator's tools, or by a client whose certificate rustls
//! has checked; a malformed value yields nothing, never a panic.

/// INTEGER.
pub(crate) const INTEGER: u8 = 0x02;
/// OCTET STRING.
pub(crate) const OCTETS: u8 = 0x04;
/// OBJECT IDENTIFIER.
pub(crate) const OID: u8 = 0x06;
/// SEQUENCE.
pub(crate) const SEQUENCE: u8 = 0x30;
/// The explicit tag `[0]`.
pub(crate) const EXPLICIT_0: u8 = 0xa0;

/// Values one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a>(pub &'a [u8]);

impl<'a> Values<'a> {
    /// The next value: its tag, its content, and all of it with its header.
    pub(crate) fn next(&mut self) -> Option<(u8, &'a [u8], &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&short, mut rest) = rest.split_first()?;
        let mut len = usize::from(short);
        if short & 0x80 != 0 {
            // Two bytes of length suffice for 64 KiB; certificates are a few KiB.
            let bytes = usize::from(short & 0x7f);
            if !(1..=2).contains(&bytes) {
                return None;
            }
            let (head, tail) = rest.split_at_checked(bytes)?;
            len = head.iter().fold(0, |n, b| n << 8 | usize::from(*b));
            rest = tail;
        }
        let (content, after) = rest.split_at_checked(len)?;
        let whole = &self.0[..self.0.len() - after.len()];
        self.0 = after;
        Some((tag, content, whole))
    }

    /// The content of the next value, which must have this tag.
    pub(crate) fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|v| v.0 == tag).map(|v| v.1)
    }
}

/// Appends a value; its content must be shorter than 64 KiB.
pub(crate) fn put(out: &mut Vec<u8>, tag: u8, content: &[u8]) {
    out.push(tag);
    match content.len() {
        n @ 0..0x80 => out.push(n as u8),
        n @ 0x80..0x100 => out.extend([0x81, n as u8]),
        n => out.extend([0x82, (n >> 8) as u8, n as u8]),
    }
    out.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for len in [0usize, 1, 127, 128, 255, 256, 5000] {
            let content = vec![7u8; len];
            let mut raw = Vec::new();
            put(&mut raw, OCTETS, &content);
            let whole = raw.clone();
            raw.push(9);
            let mut values = Values(&raw);
            assert_eq!(values.next(), Some((OCTETS, &content[..], &whole[..])));
            assert_eq!(values.0, [9]);
            // Cut short anywhere it is nothing.
            for cut in 0..whole.len() {
                assert_eq!(Values(&whole[..cut]).next(), None);
            }
        }
        assert_eq!(Values(&[OCTETS, 0x80, 0, 0]).next(), None);
        assert_eq!(Values(&[OCTETS, 0x83, 0, 0, 0]).next(), None);
    }
}
