//! A small NBD client over a unix socket, pipelining, with simple replies.
//!
//! Written from the NBD protocol document (proto.md of the NetworkBlockDevice project):
//! "newstyle negotiation", "option haggling", "transmission", "simple reply message".

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

const FLAG_FIXED_NEWSTYLE_NO_ZEROES: u32 = 3;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;

/// How long a reply may take before a test gives up; far beyond anything but a wedge.
const REPLY_LIMIT: Duration = Duration::from_secs(120);

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read bytes.
    Read,
    /// Write bytes; with `fua`, durably.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// Discard a range.
    Trim,
    /// Bring a range into the cache.
    Cache,
    /// Zero a range.
    WriteZeroes,
}

/// A finished request.
#[derive(Debug)]
pub struct Reply {
    /// What [`Client::send`] returned for it.
    pub cookie: u64,
    /// The NBD error number; 0 is success.
    pub error: u32,
    /// Bytes read.
    pub data: Vec<u8>,
}

/// A connection to one export.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// Bytes to expect for every read in flight, 0 for all else.
    in_flight: HashMap<u64, usize>,
    next_cookie: u64,
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
}

impl Client {
    /// Connects and negotiates export `name`.
    pub fn connect(socket: &Path, name: &str) -> io::Result<Client> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_LIMIT))?;
        let mut greeting = [0u8; 18];
        stream.read_exact(&mut greeting)?;
        if be64(&greeting, 0) != MAGIC || be64(&greeting, 8) != OPTION_MAGIC {
            return Err(bad("not a newstyle NBD server"));
        }
        stream.write_all(&FLAG_FIXED_NEWSTYLE_NO_ZEROES.to_be_bytes())?;
        let mut option = Vec::new();
        option.extend(OPTION_MAGIC.to_be_bytes());
        option.extend(OPT_GO.to_be_bytes());
        option.extend((4 + name.len() as u32 + 2).to_be_bytes());
        option.extend((name.len() as u32).to_be_bytes());
        option.extend(name.as_bytes());
        option.extend(0u16.to_be_bytes());
        stream.write_all(&option)?;
        let (mut size, mut flags) = (0, 0);
        loop {
            let mut head = [0u8; 20];
            stream.read_exact(&mut head)?;
            if be64(&head, 0) != OPTION_REPLY_MAGIC {
                return Err(bad("malformed option reply"));
            }
            let (kind, len) = (be32(&head, 12), be32(&head, 16) as usize);
            let mut payload = vec![0u8; len.min(1 << 16)];
            stream.read_exact(&mut payload)?;
            match kind {
                REP_INFO if payload.len() >= 12 && be16(&payload, 0) == INFO_EXPORT => {
                    size = be64(&payload, 2);
                    flags = be16(&payload, 10);
                }
                REP_INFO => {}
                REP_ACK => break,
                refused => {
                    let why = String::from_utf8_lossy(&payload).into_owned();
                    return Err(io::Error::new(
                        io::ErrorKind::NotFound,
                        format!("export refused ({refused:#x}): {why}"),
                    ));
                }
            }
        }
        Ok(Client {
            stream,
            in_flight: HashMap::new(),
            next_cookie: 1,
            size,
            flags,
        })
    }

    /// Requests sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sends a request; its answer comes from [`receive`](Self::receive) with the same cookie.
    pub fn send(
        &mut self,
        command: Command,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        let (flags, kind) = match command {
            Command::Read => (0u16, 0u16),
            Command::Write { fua } => (fua as u16, 1),
            Command::Flush => (0, 3),
            Command::Trim => (0, 4),
            Command::Cache => (0, 5),
            Command::WriteZeroes => (0, 6),
        };
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut message = Vec::with_capacity(28 + payload.len());
        message.extend(REQUEST_MAGIC.to_be_bytes());
        message.extend(flags.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend(cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(len.to_be_bytes());
        message.extend(payload);
        self.stream.write_all(&message)?;
        self.in_flight.insert(
            cookie,
            if command == Command::Read {
                len as usize
            } else {
                0
            },
        );
        Ok(cookie)
    }

    /// Waits for the next answer, whichever request it belongs to.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let mut head = [0u8; 16];
        self.stream.read_exact(&mut head)?;
        if be32(&head, 0) != SIMPLE_REPLY_MAGIC {
            return Err(bad("malformed reply"));
        }
        let (error, cookie) = (be32(&head, 4), be64(&head, 8));
        let len = self
            .in_flight
            .remove(&cookie)
            .ok_or_else(|| bad("answer to a request nobody sent, or a second answer"))?;
        let mut data = vec![0u8; if error == 0 { len } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok(Reply {
            cookie,
            error,
            data,
        })
    }

    /// Sends one request and waits for it; no other may be in flight.
    pub fn call(
        &mut self,
        command: Command,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> io::Result<Vec<u8>> {
        self.send(command, offset, len, payload)?;
        let reply = self.receive()?;
        match reply.error {
            0 => Ok(reply.data),
            // NBD error numbers are Linux's.
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }

    /// Reads `len` bytes.
    pub fn read(&mut self, offset: u64, len: u32) -> io::Result<Vec<u8>> {
        self.call(Command::Read, offset, len, &[])
    }

    /// Writes `data`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.call(
            Command::Write { fua: false },
            offset,
            data.len() as u32,
            data,
        )
        .map(drop)
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.call(Command::Flush, 0, 0, &[]).map(drop)
    }

    /// Runs `command` over the whole range in pieces of `piece` bytes, `depth` in flight.
    /// `payload` yields the data of a piece for writes.
    pub fn sweep(
        &mut self,
        command: Command,
        range: std::ops::Range<u64>,
        piece: u32,
        depth: usize,
        mut payload: impl FnMut(u64, &mut Vec<u8>),
    ) -> io::Result<()> {
        let mut at = range.start;
        let mut data = Vec::new();
        while at < range.end || self.in_flight() > 0 {
            while at < range.end && self.in_flight() < depth {
                let len = (range.end - at).min(piece as u64) as u32;
                data.clear();
                if matches!(command, Command::Write { .. }) {
                    data.resize(len as usize, 0);
                    payload(at, &mut data);
                }
                self.send(command, at, len, &data)?;
                at += len as u64;
            }
            let reply = self.receive()?;
            if reply.error != 0 {
                return Err(io::Error::from_raw_os_error(reply.error as i32));
            }
        }
        Ok(())
    }

    /// A second handle to the socket, to send what no client would.
    pub fn raw(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn be16(data: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([data[at], data[at + 1]])
}

fn be32(data: &[u8], at: usize) -> u32 {
    (be16(data, at) as u32) << 16 | be16(data, at + 2) as u32
}

fn be64(data: &[u8], at: usize) -> u64 {
    (be32(data, at) as u64) << 32 | be32(data, at + 4) as u64
}
