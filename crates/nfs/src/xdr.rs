//! How numbers, texts and byte strings are written (XDR, RFC 4506).
//!
//! Everything is big-endian and fills whole words of four bytes. A length comes before what it
//! counts, and it comes from outside: it is compared with the bound of its field and with what is
//! left of the message before anything is taken or reserved. What is read borrows from the message,
//! so that a hostile length costs nothing.

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The message ends in the middle of a field.
    #[error("the message ends in the middle of a field")]
    Short,
    /// A byte string or list is longer than its field may be.
    #[error("{len} bytes or items in a field of at most {max}")]
    Long {
        /// What the message says.
        len: u32,
        /// What the field may hold.
        max: u32,
    },
    /// A truth value that is neither 0 nor 1.
    #[error("{0} is not a truth value")]
    Bool(u32),
    /// A choice nobody knows.
    #[error("{0} is not one of the choices")]
    Choice(u32),
    /// More follows where the message should end.
    #[error("{0} bytes follow the last field")]
    Trailing(usize),
}

/// What reading gives.
pub type Result<T> = std::result::Result<T, Malformed>;

/// Bytes that make `len` a multiple of four.
pub(crate) fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// Takes a message apart from front to back.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads `bytes`.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    /// What has not been read.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(head)
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> Result<u32> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(u32::from_be_bytes(*head))
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> Result<u64> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(u64::from_be_bytes(*head))
    }

    /// A truth value.
    pub fn bool(&mut self) -> Result<bool> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Malformed::Bool(other)),
        }
    }

    /// Something that may be there.
    pub fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.bool()? {
            read(self).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Bytes whose number both sides know.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Malformed::Short)?;
        self.rest = rest;
        self.take(padding(N))?;
        Ok(*head)
    }

    /// At most `max` bytes. Senders pad with zeroes, but what they pad with is not looked at.
    pub fn opaque(&mut self, max: u32) -> Result<&'a [u8]> {
        let len = self.length(max)? as usize;
        let bytes = self.take(len)?;
        self.take(padding(len))?;
        Ok(bytes)
    }

    /// The length of a list of at most `max` items. Nothing may be reserved by it: the items may
    /// not be there.
    pub fn length(&mut self, max: u32) -> Result<u32> {
        let len = self.u32()?;
        if len > max {
            Err(Malformed::Long { len, max })
        } else {
            Ok(len)
        }
    }

    /// The message ends here.
    pub fn end(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(Malformed::Trailing(more)),
        }
    }
}

/// Puts a message together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Nothing yet.
    pub fn new() -> Writer {
        Writer::default()
    }

    /// Nothing yet, with room for `bytes`.
    pub fn with_room(bytes: usize) -> Writer {
        Writer {
            bytes: Vec::with_capacity(bytes),
        }
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True if nothing was written.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// A number of 32 bits.
    pub fn u32(&mut self, value: u32) -> &mut Writer {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A number of 64 bits.
    pub fn u64(&mut self, value: u64) -> &mut Writer {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A truth value.
    pub fn bool(&mut self, value: bool) -> &mut Writer {
        self.u32(u32::from(value))
    }

    /// Something that may be there.
    pub fn optional<T>(
        &mut self,
        value: Option<T>,
        write: impl FnOnce(&mut Writer, T),
    ) -> &mut Writer {
        self.bool(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
        self
    }

    /// Bytes whose number both sides know.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Writer {
        self.bytes.extend_from_slice(bytes);
        self.pad(bytes.len())
    }

    /// Bytes with their number in front. No message is so long that it would not fit in 32 bits.
    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Writer {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.fixed(bytes)
    }

    /// What pads `len` bytes that were written before.
    fn pad(&mut self, len: usize) -> &mut Writer {
        self.bytes.extend_from_slice(&[0; 3][..padding(len)]);
        self
    }

    /// Words that another writer wrote.
    pub fn append(&mut self, other: &Writer) -> &mut Writer {
        self.bytes.extend_from_slice(&other.bytes);
        self
    }

    /// Forgets what was written after the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }

    /// What was written.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// What was written.
    pub fn into_vec(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_are_big_endian_and_strings_are_padded() {
        let mut w = Writer::new();
        w.u32(0x0102_0304)
            .u64(5)
            .bool(true)
            .opaque(b"hello")
            .fixed(b"ab");
        let expected = [
            1, 2, 3, 4, //
            0, 0, 0, 0, 0, 0, 0, 5, //
            0, 0, 0, 1, //
            0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0, 0, //
            b'a', b'b', 0, 0,
        ];
        assert_eq!(w.as_slice(), expected);
        let mut r = Reader::new(&expected);
        assert_eq!(r.u32(), Ok(0x0102_0304));
        assert_eq!(r.u64(), Ok(5));
        assert_eq!(r.bool(), Ok(true));
        assert_eq!(r.opaque(5), Ok(&b"hello"[..]));
        assert_eq!(r.fixed(), Ok(*b"ab"));
        assert_eq!(r.end(), Ok(()));
    }

    #[test]
    fn lengths_are_compared_before_anything_is_taken() {
        let mut w = Writer::new();
        w.u32(u32::MAX);
        assert_eq!(
            Reader::new(w.as_slice()).opaque(8),
            Err(Malformed::Long {
                len: u32::MAX,
                max: 8
            })
        );
        assert_eq!(
            Reader::new(w.as_slice()).opaque(u32::MAX),
            Err(Malformed::Short)
        );
        // The bytes are there, what pads them is not.
        assert_eq!(
            Reader::new(&[0, 0, 0, 1, 9]).opaque(8),
            Err(Malformed::Short)
        );
        assert_eq!(Reader::new(&[0, 0, 0, 2]).bool(), Err(Malformed::Bool(2)));
        assert_eq!(Reader::new(&[0]).end(), Err(Malformed::Trailing(1)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            a: u32, b: u64, c: bool, text in proptest::collection::vec(any::<u8>(), 0..70), d: Option<u32>,
        ) {
            let mut w = Writer::new();
            w.u32(a).opaque(&text).u64(b).bool(c).optional(d, |w, d| { w.u32(d); });
            prop_assert_eq!(w.len() % 4, 0);
            let mut r = Reader::new(w.as_slice());
            prop_assert_eq!(r.u32(), Ok(a));
            prop_assert_eq!(r.opaque(70), Ok(&text[..]));
            prop_assert_eq!(r.u64(), Ok(b));
            prop_assert_eq!(r.bool(), Ok(c));
            prop_assert_eq!(r.optional(Reader::u32), Ok(d));
            prop_assert_eq!(r.end(), Ok(()));
        }
    }
}
