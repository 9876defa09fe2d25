//! Numbers and layouts of the NBD protocol: what is on the wire and nothing else.
//!
//! The server (`hearth-nbd`) and the client (`hearth-nbd-client`) share it, so that each number
//! stands in one place.
//!
//! Names and values follow the NBD protocol document (`doc/proto.md` of the reference
//! implementation) and its `EXTENDED_HEADERS` extension. Everything is big-endian.

/// First greeting of a server: `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Newstyle greeting and magic of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Magic of every option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Magic of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Magic of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flag and client flag: fixed newstyle.
pub const FLAG_FIXED_NEWSTYLE: u32 = 1;
/// Handshake flag and client flag: no 124 zeroes after `EXPORT_NAME`.
pub const FLAG_NO_ZEROES: u32 = 2;

/// Options (client to server, handshake).
pub mod opt {
    #![allow(missing_docs)]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options.
pub mod rep {
    #![allow(missing_docs)]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_POLICY: u32 = 0x8000_0002;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_PLATFORM: u32 = 0x8000_0004;
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    pub const ERR_BLOCK_SIZE_REQD: u32 = 0x8000_0008;
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Kinds of information in `INFO` and `GO`.
pub mod info {
    #![allow(missing_docs)]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod tflag {
    #![allow(missing_docs)]
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub mod cmd {
    #![allow(missing_docs)]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub mod cflag {
    #![allow(missing_docs)]
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of reply chunks.
pub mod chunk {
    #![allow(missing_docs)]
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR: u16 = 0x8001;
    pub const ERROR_OFFSET: u16 = 0x8002;
    /// Bit of every type that is an error, known or not.
    pub const ERROR_BIT: u16 = 0x8000;
    /// Chunk flag: the last chunk of its reply.
    pub const FLAG_DONE: u16 = 1;
}

/// Error values of replies.
pub mod errno {
    #![allow(missing_docs)]
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const NOMEM: u32 = 12;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const OVERFLOW: u32 = 75;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
}

/// `base:allocation` flag: not allocated.
pub const STATE_HOLE: u32 = 1;
/// `base:allocation` flag: reads as zeroes.
pub const STATE_ZERO: u32 = 2;

/// Longest string the protocol allows (names, descriptions, queries, messages), bytes.
pub const STRING_MAX: usize = 4096;

/// How requests and replies are framed; decided in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests; reads and block status are answered in chunks.
    Structured,
    /// 32-byte headers and 64-bit lengths in both directions.
    Extended,
}

impl Style {
    /// Bytes of a request header.
    pub fn request_len(self) -> usize {
        match self {
            Style::Simple | Style::Structured => 28,
            Style::Extended => 32,
        }
    }
}

/// A request header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Command flags.
    pub flags: u16,
    /// Command.
    pub command: u16,
    /// The client's name for the request.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes, of effect or of payload.
    pub len: u64,
}

/// Reads big-endian numbers off the front of untrusted bytes; `None` once they run out.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `n` bytes.
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A 32-bit length and so many bytes of UTF-8, at most [`STRING_MAX`].
    pub fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        if len > STRING_MAX {
            return None;
        }
        std::str::from_utf8(self.take(len)?).ok()
    }
}

impl RequestHeader {
    /// Reads a header of `style` from the front of `bytes`: `None` if they are too few,
    /// `Some(Err(magic))` if they do not start with the magic of that style.
    pub fn parse(style: Style, bytes: &[u8]) -> Option<Result<RequestHeader, u32>> {
        let mut r = Reader(bytes.get(..style.request_len())?);
        let magic = r.u32()?;
        let want = if style == Style::Extended {
            EXTENDED_REQUEST_MAGIC
        } else {
            REQUEST_MAGIC
        };
        if magic != want {
            return Some(Err(magic));
        }
        Some(Ok(RequestHeader {
            flags: r.u16()?,
            command: r.u16()?,
            cookie: r.u64()?,
            offset: r.u64()?,
            len: if style == Style::Extended {
                r.u64()?
            } else {
                u64::from(r.u32()?)
            },
        }))
    }
}

impl RequestHeader {
    /// The header as a client sends it with compact requests; the length must fit 32 bits.
    pub fn compact(&self) -> [u8; 28] {
        let mut raw = [0u8; 28];
        let fields: [&[u8]; 6] = [
            &REQUEST_MAGIC.to_be_bytes(),
            &self.flags.to_be_bytes(),
            &self.command.to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            &(self.len as u32).to_be_bytes(),
        ];
        let mut at = 0;
        for field in fields {
            raw[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        raw
    }
}

/// The fixed part of a reply to a compact request, as a client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// A whole reply; the data of a successful read follows.
    Simple {
        /// 0, or an error of [`errno`].
        error: u32,
        /// The request's.
        cookie: u64,
    },
    /// A part of a reply; `len` bytes follow.
    Chunk {
        /// [`chunk::FLAG_DONE`] and others.
        flags: u16,
        /// A type of [`chunk`].
        kind: u16,
        /// The request's.
        cookie: u64,
        /// Bytes of payload.
        len: u32,
    },
}

impl ReplyHead {
    /// Longest head, bytes.
    pub const LEN_MAX: usize = 20;

    /// Reads a head from the front of `bytes` and says how long it is: `None` if they are too
    /// few, `Some(Err(magic))` if they do not start with the magic of one.
    pub fn parse(bytes: &[u8]) -> Option<Result<(ReplyHead, usize), u32>> {
        let mut r = Reader(bytes);
        let head = match r.u32()? {
            SIMPLE_REPLY_MAGIC => ReplyHead::Simple {
                error: r.u32()?,
                cookie: r.u64()?,
            },
            STRUCTURED_REPLY_MAGIC => ReplyHead::Chunk {
                flags: r.u16()?,
                kind: r.u16()?,
                cookie: r.u64()?,
                len: r.u32()?,
            },
            other => return Some(Err(other)),
        };
        Some(Ok((head, bytes.len() - r.0.len())))
    }
}

/// Longest text sent along with an error.
pub const ERROR_TEXT_MAX: usize = 64;

/// Room for the longest reply header: an extended error chunk with its text.
pub const REPLY_HEADER_MAX: usize = 32 + 6 + ERROR_TEXT_MAX;

/// A reply header, or a whole reply without bulk payload, on the stack.
pub struct ReplyHeader {
    bytes: [u8; REPLY_HEADER_MAX],
    len: usize,
}

impl ReplyHeader {
    fn new() -> ReplyHeader {
        ReplyHeader {
            bytes: [0; REPLY_HEADER_MAX],
            len: 0,
        }
    }

    fn put(mut self, bytes: &[u8]) -> ReplyHeader {
        // Callers stay within REPLY_HEADER_MAX by construction; text is cut beforehand.
        if let Some(room) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
            self.len += bytes.len();
        }
        self
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn simple(cookie: u64, error: u32) -> ReplyHeader {
        Self::new()
            .put(&SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(&error.to_be_bytes())
            .put(&cookie.to_be_bytes())
    }

    fn chunk(style: Style, cookie: u64, offset: u64, kind: u16, payload: u64) -> ReplyHeader {
        let extended = style == Style::Extended;
        let magic = if extended {
            EXTENDED_REPLY_MAGIC
        } else {
            STRUCTURED_REPLY_MAGIC
        };
        let head = Self::new()
            .put(&magic.to_be_bytes())
            .put(&chunk::FLAG_DONE.to_be_bytes())
            .put(&kind.to_be_bytes())
            .put(&cookie.to_be_bytes());
        if extended {
            head.put(&offset.to_be_bytes()).put(&payload.to_be_bytes())
        } else {
            head.put(&(payload as u32).to_be_bytes())
        }
    }

    /// Success without data. `offset` is the request's.
    pub fn ok(style: Style, cookie: u64, offset: u64) -> ReplyHeader {
        match style {
            // A simple reply stays allowed, and shorter, for commands without data.
            Style::Simple | Style::Structured => Self::simple(cookie, 0),
            Style::Extended => Self::chunk(style, cookie, offset, chunk::NONE, 0),
        }
    }

    /// Header of a successful read of `len` bytes (at least 1), which follow it.
    pub fn data(style: Style, cookie: u64, offset: u64, len: u64) -> ReplyHeader {
        match style {
            Style::Simple => Self::simple(cookie, 0),
            Style::Structured | Style::Extended => {
                Self::chunk(style, cookie, offset, chunk::OFFSET_DATA, len + 8)
                    .put(&offset.to_be_bytes())
            }
        }
    }

    /// Success of a read of nothing: a chunk must not be empty, so there is none.
    pub fn no_data(style: Style, cookie: u64, offset: u64) -> ReplyHeader {
        match style {
            Style::Simple => Self::simple(cookie, 0),
            Style::Structured | Style::Extended => {
                Self::chunk(style, cookie, offset, chunk::NONE, 0)
            }
        }
    }

    /// Header of a block status chunk with `payload` bytes (context id and extents) behind it.
    pub fn status(style: Style, cookie: u64, offset: u64, payload: u64) -> ReplyHeader {
        let kind = if style == Style::Extended {
            chunk::BLOCK_STATUS_EXT
        } else {
            chunk::BLOCK_STATUS
        };
        Self::chunk(style, cookie, offset, kind, payload)
    }

    /// Failure, with a text for people where the style can carry one.
    pub fn error(style: Style, cookie: u64, offset: u64, error: u32, text: &str) -> ReplyHeader {
        if style == Style::Simple {
            return Self::simple(cookie, error);
        }
        let text = text.get(..ERROR_TEXT_MAX).unwrap_or(text).as_bytes();
        let text = text.get(..ERROR_TEXT_MAX).unwrap_or(text);
        Self::chunk(style, cookie, offset, chunk::ERROR, 6 + text.len() as u64)
            .put(&error.to_be_bytes())
            .put(&(text.len() as u16).to_be_bytes())
            .put(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compact_header_is_read_field_by_field() {
        let mut raw = Vec::new();
        raw.extend(REQUEST_MAGIC.to_be_bytes());
        raw.extend(1u16.to_be_bytes());
        raw.extend(6u16.to_be_bytes());
        raw.extend(7u64.to_be_bytes());
        raw.extend(8u64.to_be_bytes());
        raw.extend(9u32.to_be_bytes());
        let want = RequestHeader {
            flags: 1,
            command: 6,
            cookie: 7,
            offset: 8,
            len: 9,
        };
        assert_eq!(RequestHeader::parse(Style::Simple, &raw), Some(Ok(want)));
        assert_eq!(RequestHeader::parse(Style::Simple, &raw[..27]), None);
        raw.extend([0; 4]);
        assert_eq!(
            RequestHeader::parse(Style::Extended, &raw),
            Some(Err(REQUEST_MAGIC))
        );
    }

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let request = RequestHeader {
            flags: 1,
            command: cmd::WRITE,
            cookie: u64::MAX,
            offset: 1 << 40,
            len: u64::from(u32::MAX),
        };
        assert_eq!(
            RequestHeader::parse(Style::Structured, &request.compact()),
            Some(Ok(request))
        );
        let simple = ReplyHeader::ok(Style::Simple, 7, 0);
        let head = ReplyHead::Simple {
            error: 0,
            cookie: 7,
        };
        assert_eq!(ReplyHead::parse(simple.bytes()), Some(Ok((head, 16))));
        let data = ReplyHeader::data(Style::Structured, 9, 512, 4096);
        let head = ReplyHead::Chunk {
            flags: chunk::FLAG_DONE,
            kind: chunk::OFFSET_DATA,
            cookie: 9,
            len: 4104,
        };
        assert_eq!(ReplyHead::parse(data.bytes()), Some(Ok((head, 20))));
        assert_eq!(ReplyHead::parse(&data.bytes()[..19]), None);
        assert_eq!(
            ReplyHead::parse(&EXTENDED_REPLY_MAGIC.to_be_bytes()),
            Some(Err(EXTENDED_REPLY_MAGIC))
        );
    }

    #[test]
    fn lengths_of_reply_headers_are_those_of_the_protocol() {
        let len = |h: ReplyHeader| h.bytes().len();
        assert_eq!(len(ReplyHeader::ok(Style::Simple, 1, 2)), 16);
        assert_eq!(len(ReplyHeader::ok(Style::Extended, 1, 2)), 32);
        assert_eq!(len(ReplyHeader::data(Style::Structured, 1, 2, 3)), 28);
        assert_eq!(len(ReplyHeader::data(Style::Extended, 1, 2, 3)), 40);
        assert_eq!(
            len(ReplyHeader::error(Style::Structured, 1, 2, 5, "io")),
            28
        );
        let long = "x".repeat(1000);
        assert_eq!(
            len(ReplyHeader::error(Style::Extended, 1, 2, 5, &long)),
            REPLY_HEADER_MAX
        );
    }

    #[test]
    fn strings_are_bounded_and_utf8() {
        let mut raw = ((STRING_MAX + 1) as u32).to_be_bytes().to_vec();
        raw.extend(vec![b'a'; STRING_MAX + 1]);
        assert_eq!(Reader(&raw).string(), None);
        assert_eq!(Reader(&[0, 0, 0, 1, 0xff]).string(), None);
        assert_eq!(Reader(&[0, 0, 0, 2, b'a']).string(), None);
        assert_eq!(Reader(&[0, 0, 0, 1, b'a']).string(), Some("a"));
    }
}
