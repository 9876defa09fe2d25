//! The client's half of the handshake, without I/O.
//!
//! Structured replies are asked for, because a read then may come in pieces and holes need not
//! be sent; then the export, with its block sizes. A server that refuses the former, or is too
//! old for the latter, is taken as it is. What it says is checked here, once: nobody later has
//! to doubt a block size.

use hearth_fault::Fault;
use hearth_nbd_wire::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader,
    info, opt, rep, tflag,
};

/// Longest reply to an option that is listened to: a name of 4096 bytes and some more.
const REPLY_MAX: u32 = 8192;
/// Most replies before one that ends an option; servers send three or four.
const REPLIES_MAX: u32 = 64;
/// Largest block a client of ours can align to: the cache's own.
const MIN_BLOCK_MAX: u32 = 4096;
/// Payload of one request where the server does not say: the protocol's portable limit.
const PAYLOAD_DEFAULT: u32 = 32 << 20;
/// Longest text of a server that is repeated.
const TEXT_MAX: usize = 200;

/// What client and server agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags ([`tflag`]).
    pub flags: u16,
    /// Reads are answered in chunks.
    pub structured: bool,
    /// Offsets and lengths are multiples of this: a power of two, at most 4096.
    pub min_block: u32,
    /// Most bytes of data in one request; a multiple of `min_block`, at most 32 MiB.
    pub max_payload: u32,
}

impl Negotiated {
    /// True if the export has this transmission flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Why there was no agreement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.fault())]
pub enum HandshakeError {
    /// Something else listens there.
    NotNbd,
    /// The server broke the protocol.
    Protocol(String),
    /// No such export.
    NoExport {
        /// What was asked for.
        export: String,
        /// What the server said.
        text: String,
    },
    /// It wants TLS.
    Tls,
    /// Refused for another reason.
    Refused {
        /// What was asked for.
        export: String,
        /// What the server said.
        text: String,
    },
    /// Blocks we cannot do.
    Block(u32),
    /// A size that does not fit its blocks.
    Size {
        /// Bytes.
        size: u64,
        /// Smallest request in bytes.
        block: u32,
    },
}

impl HandshakeError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            HandshakeError::NotNbd => Fault::new(
                "what listens there is no NBD server (or one of before 2011)",
                "check the address",
            ),
            HandshakeError::Protocol(why) => Fault::new(
                format!("the NBD server broke the protocol: {why}"),
                "see its log, and whether a newer version of it does better",
            ),
            HandshakeError::NoExport { export, text } => Fault::new(
                format!("the NBD server has no export {export:?}{}", said(text)),
                "list them with `nbdinfo --list`",
            ),
            HandshakeError::Tls => Fault::new(
                "the NBD server wants TLS, which Hearth does not speak to origins",
                "allow plain connections there, or use a tunnel",
            ),
            HandshakeError::Refused { export, text } => Fault::new(
                format!("the NBD server refused export {export:?}{}", said(text)),
                "see its log",
            ),
            HandshakeError::Block(block) => Fault::new(
                format!("the NBD server wants requests in blocks of {block} bytes"),
                "let it take blocks of a power of two up to 4096 bytes",
            ),
            HandshakeError::Size { size, block } => Fault::new(
                format!(
                    "the NBD export has {size} bytes, which is no multiple of its smallest request of {block}"
                ),
                "give it a whole number of blocks",
            ),
        }
    }
}

fn said(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!(" ({text})")
    }
}

fn broke(what: impl Into<String>) -> HandshakeError {
    HandshakeError::Protocol(what.into())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Greeting,
    Structured,
    Go,
    ExportName,
    Done,
}

/// One handshake.
#[derive(Debug)]
pub struct Handshake {
    export: String,
    state: State,
    no_zeroes: bool,
    input: Vec<u8>,
    output: Vec<u8>,
    replies: u32,
    structured: bool,
    size_flags: Option<(u64, u16)>,
    blocks: Option<(u32, u32)>,
}

impl Handshake {
    /// A handshake for an export; [`feed`](Self::feed) it what the server sends.
    pub fn new(export: &str) -> Handshake {
        Handshake {
            export: export.to_owned(),
            state: State::Greeting,
            no_zeroes: false,
            input: Vec::new(),
            output: Vec::new(),
            replies: 0,
            structured: false,
            size_flags: None,
            blocks: None,
        }
    }

    /// What is to be sent now.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Takes bytes of the server; the agreement once there is one.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Option<Negotiated>, HandshakeError> {
        self.input.extend_from_slice(bytes);
        loop {
            let input = std::mem::take(&mut self.input);
            let mut reader = Reader(&input);
            let step = self.step(&mut reader)?;
            self.input = if step { reader.0.to_vec() } else { input };
            if self.state == State::Done {
                // Nobody has asked for anything yet.
                if !self.input.is_empty() {
                    return Err(broke("it speaks before it is asked"));
                }
                return self.agree().map(Some);
            }
            if !step {
                return Ok(None);
            }
        }
    }

    /// One message; false if it is not whole yet.
    fn step(&mut self, r: &mut Reader<'_>) -> Result<bool, HandshakeError> {
        match self.state {
            State::Greeting => self.greeting(r),
            State::Structured | State::Go => self.reply(r),
            State::ExportName => self.old_reply(r),
            State::Done => Ok(false),
        }
    }

    fn greeting(&mut self, r: &mut Reader<'_>) -> Result<bool, HandshakeError> {
        // Something else is told apart before it has sent enough to be taken for a greeting.
        let head = r.0.len().min(8);
        if r.0.get(..head) != INIT_MAGIC.to_be_bytes().get(..head) {
            return Err(HandshakeError::NotNbd);
        }
        let (Some(_), Some(magic), Some(flags)) = (r.u64(), r.u64(), r.u16()) else {
            return Ok(false);
        };
        let flags = u32::from(flags);
        if magic != OPTION_MAGIC || flags & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(HandshakeError::NotNbd);
        }
        self.no_zeroes = flags & FLAG_NO_ZEROES != 0;
        let answer = FLAG_FIXED_NEWSTYLE | (flags & FLAG_NO_ZEROES);
        self.output.extend_from_slice(&answer.to_be_bytes());
        self.option(opt::STRUCTURED_REPLY, &[]);
        self.state = State::Structured;
        Ok(true)
    }

    fn option(&mut self, option: u32, payload: &[u8]) {
        self.replies = 0;
        self.output.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        self.output.extend_from_slice(&option.to_be_bytes());
        self.output
            .extend_from_slice(&(payload.len() as u32).to_be_bytes());
        self.output.extend_from_slice(payload);
    }

    fn reply(&mut self, r: &mut Reader<'_>) -> Result<bool, HandshakeError> {
        let (Some(magic), Some(option), Some(kind), Some(len)) =
            (r.u64(), r.u32(), r.u32(), r.u32())
        else {
            return Ok(false);
        };
        if magic != OPTION_REPLY_MAGIC {
            return Err(broke("an option is answered with something else"));
        }
        if len > REPLY_MAX {
            return Err(broke(format!(
                "an option is answered with {len} bytes, more than {REPLY_MAX}"
            )));
        }
        let Some(payload) = r.take(len as usize) else {
            return Ok(false);
        };
        self.replies += 1;
        if self.replies > REPLIES_MAX {
            return Err(broke("an option is answered without end"));
        }
        let asked = if self.state == State::Structured {
            opt::STRUCTURED_REPLY
        } else {
            opt::GO
        };
        if option != asked {
            return Err(broke("it answers an option that was not asked"));
        }
        match self.state {
            State::Structured => self.structured_reply(kind),
            _ => self.go_reply(kind, payload),
        }
        .map(|()| true)
    }

    fn structured_reply(&mut self, kind: u32) -> Result<(), HandshakeError> {
        match kind {
            rep::ACK => self.structured = true,
            rep::ERR_TLS_REQD => return Err(HandshakeError::Tls),
            kind if kind & 0x8000_0000 != 0 => {}
            _ => return Err(broke("it answers an option with what is no answer")),
        }
        let mut go = (self.export.len() as u32).to_be_bytes().to_vec();
        go.extend_from_slice(self.export.as_bytes());
        go.extend_from_slice(&1u16.to_be_bytes());
        go.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.option(opt::GO, &go);
        self.state = State::Go;
        Ok(())
    }

    fn go_reply(&mut self, kind: u32, payload: &[u8]) -> Result<(), HandshakeError> {
        let text = || {
            String::from_utf8_lossy(payload)
                .chars()
                .filter(|c| !c.is_control())
                .take(TEXT_MAX)
                .collect::<String>()
        };
        let export = || self.export.clone();
        let mut r = Reader(payload);
        match kind {
            rep::ACK => self.state = State::Done,
            rep::INFO => match r.u16() {
                Some(info::EXPORT) => match (r.u64(), r.u16()) {
                    (Some(size), Some(flags)) => self.size_flags = Some((size, flags)),
                    _ => return Err(broke("its export has no size")),
                },
                Some(info::BLOCK_SIZE) => match (r.u32(), r.u32(), r.u32()) {
                    (Some(min), Some(_), Some(max)) => self.blocks = Some((min, max)),
                    _ => return Err(broke("its block sizes are cut short")),
                },
                // What was not asked for may be told.
                Some(_) => {}
                None => return Err(broke("it tells nothing of the export")),
            },
            rep::ERR_UNKNOWN => {
                return Err(HandshakeError::NoExport {
                    export: export(),
                    text: text(),
                });
            }
            rep::ERR_TLS_REQD => return Err(HandshakeError::Tls),
            rep::ERR_UNSUP => {
                let name = self.export.clone();
                self.option(opt::EXPORT_NAME, name.as_bytes());
                self.state = State::ExportName;
            }
            kind if kind & 0x8000_0000 != 0 => {
                return Err(HandshakeError::Refused {
                    export: export(),
                    text: text(),
                });
            }
            _ => return Err(broke("it answers an option with what is no answer")),
        }
        Ok(())
    }

    /// The reply to `EXPORT_NAME`, which has no frame.
    fn old_reply(&mut self, r: &mut Reader<'_>) -> Result<bool, HandshakeError> {
        let (Some(size), Some(flags)) = (r.u64(), r.u16()) else {
            return Ok(false);
        };
        if !self.no_zeroes && r.take(124).is_none() {
            return Ok(false);
        }
        self.size_flags = Some((size, flags));
        self.state = State::Done;
        Ok(true)
    }

    fn agree(&self) -> Result<Negotiated, HandshakeError> {
        let (size, flags) = self
            .size_flags
            .ok_or_else(|| broke("its export has no size"))?;
        if flags & tflag::HAS_FLAGS == 0 || size > i64::MAX as u64 {
            return Err(broke("its export has an impossible size or no flags"));
        }
        let (min, max) = self.blocks.unwrap_or((1, PAYLOAD_DEFAULT));
        if !min.is_power_of_two() || min > MIN_BLOCK_MAX {
            return Err(HandshakeError::Block(min));
        }
        // 2^32-1 stands for no limit.
        let max_payload = max.min(PAYLOAD_DEFAULT) / min * min;
        if max_payload < MIN_BLOCK_MAX {
            return Err(broke(format!("it takes no more than {max} bytes at once")));
        }
        if size % u64::from(min) != 0 {
            return Err(HandshakeError::Size { size, block: min });
        }
        Ok(Negotiated {
            size,
            flags,
            structured: self.structured,
            min_block: min,
            max_payload,
        })
    }
}
