//! A disk in memory, an engine that serves it, and a client that speaks bytes.
#![allow(dead_code)] // every test file uses its own part

use hearth_engine::api::{Completion, ReqError, ReqOp, Request};
use hearth_io::BufPool;
use hearth_nbd::{NbdSession, TlsMode};
use hearth_reactor::{Caller, Room, SendList, Session, SessionCx, Shares};
use hearth_volume::{Capabilities, Catalog, Fault, Protocol, Status, Visit, Visitor, Volume};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub const SIZE: u64 = 1 << 20;

/// One export; its data lives here too.
pub struct Disk {
    pub id: u16,
    pub name: String,
    pub size: AtomicU64,
    pub read_only: AtomicBool,
    pub fast_zero: AtomicBool,
    /// Takes nothing but reads and plain writes.
    pub simple: AtomicBool,
    pub closing: AtomicBool,
    pub gone: AtomicBool,
    pub full: AtomicBool,
    /// What the last client's certificate called it.
    pub caller: Mutex<Option<String>>,
    pub clients: Arc<AtomicI64>,
    pub writes: Arc<AtomicU64>,
    pub data: Mutex<Vec<u8>>,
    pub extents: Mutex<Vec<(u64, Status)>>,
}

impl Disk {
    pub fn new(id: u16, name: &str, size: u64) -> Arc<Disk> {
        let data = (0..size).map(|i| (i / 512 + i * 7) as u8).collect();
        Arc::new(Disk {
            id,
            name: name.to_owned(),
            size: AtomicU64::new(size),
            read_only: AtomicBool::new(false),
            fast_zero: AtomicBool::new(true),
            simple: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            full: AtomicBool::new(false),
            caller: Mutex::default(),
            clients: Arc::default(),
            writes: Arc::default(),
            data: Mutex::new(data),
            extents: Mutex::new(Vec::new()),
        })
    }

    /// Serves one request as an engine would.
    pub fn serve(&self, request: Request) -> Completion {
        let Request {
            owner,
            tag,
            op,
            offset,
            len,
            buf,
            ..
        } = request;
        let mut data = self.data.lock().unwrap();
        let range = offset as usize..(offset + len) as usize;
        let at = (offset % 4096) as usize;
        let mut result = Ok(());
        let mut buf = buf;
        match op {
            ReqOp::Read | ReqOp::Write { .. } if range.end > data.len() => {
                result = Err(ReqError::Invalid)
            }
            ReqOp::Read => {
                let window = buf.as_mut().expect("a read has a buffer");
                window.bytes_mut()[at..at + len as usize].copy_from_slice(&data[range]);
            }
            ReqOp::Write { .. } => {
                let window = buf.as_ref().expect("a write has a buffer");
                data[range].copy_from_slice(&window.bytes()[at..at + len as usize]);
            }
            ReqOp::WriteZeroes { .. } | ReqOp::Discard { .. } => data[range].fill(0),
            ReqOp::Flush | ReqOp::Prefetch => {}
        }
        Completion {
            owner,
            tag,
            result,
            buf,
        }
    }
}

impl Volume for Disk {
    fn disk(&self) -> u16 {
        self.id
    }
    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }
    fn serial(&self) -> [u8; 16] {
        [self.id as u8; 16]
    }
    fn capabilities(&self) -> Capabilities {
        let write = !self.read_only.load(Ordering::Relaxed);
        if self.simple.load(Ordering::Relaxed) {
            return Capabilities {
                write,
                flush: false,
                fua: false,
                discard: false,
                write_zeroes: false,
                fast_zero: false,
                coherent: false,
            };
        }
        Capabilities {
            fast_zero: self.fast_zero.load(Ordering::Relaxed),
            ..Capabilities::all(write)
        }
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn description(&self) -> String {
        format!("disk {}", self.id)
    }
    fn block_status(&self, _offset: u64, _len: u64, out: &mut Vec<(u64, Status)>) {
        out.extend(self.extents.lock().unwrap().iter().copied());
    }
    fn closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }
    fn gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
    fn admit(&self, caller: &Caller, protocol: Protocol) -> Result<Visit, Fault> {
        assert_eq!(protocol, hearth_nbd::PROTOCOL);
        *self.caller.lock().unwrap() = caller.name.clone();
        if self.full.load(Ordering::Relaxed) {
            return Err(Fault::new("no more clients here", ""));
        }
        self.clients.fetch_add(1, Ordering::Relaxed);
        Ok(Visit {
            visitor: Box::new(Counted(self.clients.clone(), self.writes.clone())),
            shares: Shares::default(),
        })
    }
}

/// A client that is counted as long as it is there.
struct Counted(Arc<AtomicI64>, Arc<AtomicU64>);

impl Visitor for Counted {
    fn wrote(&self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A server with a list of disks.
pub fn server(disks: Vec<Arc<Disk>>) -> Arc<Catalog> {
    Arc::new(disks.into_iter().collect())
}

/// A session with everything around it.
pub struct Wire {
    pub session: Box<dyn Session>,
    pub disk: Arc<Disk>,
    pub bufs: BufPool,
    pub requests: Vec<Request>,
    /// Requests the engine holds back.
    pub held: VecDeque<Request>,
    /// Keep requests in `held` instead of serving them.
    pub hold: bool,
    /// Send nothing, as if the client did not read.
    pub deaf: bool,
    pub room: Room,
    /// Most bytes sent at once.
    pub send_step: usize,
    /// What the client has received and not looked at.
    pub got: VecDeque<u8>,
}

impl Wire {
    pub fn over(session: Box<dyn Session>, disk: Arc<Disk>) -> Wire {
        let mut wire = Wire {
            session,
            disk,
            bufs: BufPool::default(),
            requests: Vec::new(),
            held: VecDeque::new(),
            hold: false,
            deaf: false,
            room: Room::AMPLE,
            send_step: usize::MAX,
            got: VecDeque::new(),
        };
        wire.settle();
        wire
    }

    pub fn new() -> Wire {
        Wire::sized(SIZE)
    }

    pub fn sized(size: u64) -> Wire {
        let disk = Disk::new(3, "vm1", size);
        let server = server(vec![disk.clone()]);
        Wire::over(
            Box::new(NbdSession::new(server, TlsMode::Off, "test".into())),
            disk,
        )
    }

    /// Serves what the engine was asked for and takes what is to be sent, until nothing moves.
    pub fn settle(&mut self) {
        loop {
            let mut moved = false;
            self.held.extend(self.requests.drain(..));
            if !self.hold {
                while let Some(request) = self.held.pop_front() {
                    self.complete(request);
                    moved = true;
                }
            }
            if !self.deaf {
                let mut list = SendList::new();
                self.session.send_list(&mut list);
                let mut n = 0;
                'pieces: for piece in &list {
                    for byte in piece.bytes() {
                        if n == self.send_step {
                            break 'pieces;
                        }
                        self.got.push_back(*byte);
                        n += 1;
                    }
                }
                drop(list);
                if n > 0 {
                    moved = true;
                    self.with(|s, cx| s.sent(n, cx));
                }
            }
            if !moved && self.requests.is_empty() {
                return;
            }
        }
    }

    pub fn with<T>(&mut self, f: impl FnOnce(&mut dyn Session, &mut SessionCx<'_>) -> T) -> T {
        let mut cx = SessionCx {
            requests: &mut self.requests,
            bufs: &mut self.bufs,
            now_ns: 1,
            room: self.room,
        };
        f(&mut *self.session, &mut cx)
    }

    pub fn complete(&mut self, request: Request) {
        let completion = self.disk.serve(request);
        self.with(|s, cx| s.completed(completion, cx));
    }

    /// Delivers bytes in pieces of the lengths `step` gives; returns how many were taken.
    pub fn feed_in(&mut self, mut bytes: &[u8], mut step: impl FnMut() -> usize) -> usize {
        let total = bytes.len();
        while !bytes.is_empty() {
            let Some(mut space) = self.with(|s, cx| s.recv_buf(cx)) else {
                self.settle();
                if self.with(|s, cx| s.recv_buf(cx)).is_none() {
                    break;
                }
                continue;
            };
            let n = space.len().min(bytes.len()).min(step().max(1));
            space.bytes_mut()[..n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            self.with(|s, cx| s.received(n, cx));
            self.settle();
        }
        total - bytes.len()
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        let n = self.feed_in(bytes, || usize::MAX);
        assert_eq!(n, bytes.len(), "the session takes no more");
    }

    pub fn take(&mut self, n: usize) -> Vec<u8> {
        assert!(
            self.got.len() >= n,
            "wanted {n} bytes, there are {}",
            self.got.len()
        );
        self.got.drain(..n).collect()
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }
    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    /// Takes the greeting and answers it.
    pub fn greet(&mut self, flags: u32) {
        assert_eq!(self.take(16), b"NBDMAGICIHAVEOPT");
        assert_eq!(self.u16(), 3);
        self.feed(&flags.to_be_bytes());
    }

    /// Sends an option and takes its replies: (type, data), until a final one.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.feed(&option_bytes(option, data));
        let mut all = Vec::new();
        loop {
            assert_eq!(self.u64(), 0x3e889045565a9);
            assert_eq!(self.u32(), option);
            let kind = self.u32();
            let len = self.u32() as usize;
            all.push((kind, self.take(len)));
            if kind == 1 || kind >> 31 == 1 {
                return all;
            }
        }
    }

    /// The type of the final reply to an option.
    pub fn verdict(&mut self, option: u32, data: &[u8]) -> u32 {
        self.option(option, data).last().expect("a final reply").0
    }

    /// Ready for requests, with options 8 (structured) or 11 (extended) and `base:allocation`
    /// for a style above simple.
    pub fn connected(style: Style) -> Wire {
        let mut wire = Wire::new();
        wire.enter(style);
        wire
    }

    pub fn enter(&mut self, style: Style) {
        self.greet(3);
        self.haggle(style);
    }

    pub fn haggle(&mut self, style: Style) {
        match style {
            Style::Simple => {}
            Style::Structured => assert_eq!(self.verdict(8, &[]), 1),
            Style::Extended => assert_eq!(self.verdict(11, &[]), 1),
        }
        if style != Style::Simple {
            let replies = self.option(10, &context_query("vm1", &["base:allocation"]));
            assert_eq!(replies.len(), 2);
        }
        assert_eq!(self.verdict(7, &go("vm1", &[])), 1);
    }

    pub fn request(&mut self, style: Style, r: Req) {
        self.feed(&r.bytes(style));
    }

    /// The next reply of the style, whole.
    pub fn reply(&mut self, style: Style, read_len: usize) -> Reply {
        let magic = self.u32();
        if magic == 0x67446698 {
            assert_ne!(style, Style::Extended);
            let error = self.u32();
            let cookie = self.u64();
            let data = if error == 0 && style == Style::Simple {
                self.take(read_len)
            } else {
                Vec::new()
            };
            return Reply {
                cookie,
                error,
                kind: None,
                data,
            };
        }
        let want = if style == Style::Extended {
            0x6e8a278c
        } else {
            0x668e33ef
        };
        assert_eq!(magic, want);
        assert_eq!(self.u16(), 1, "one chunk, the last");
        let kind = self.u16();
        let cookie = self.u64();
        let len = if style == Style::Extended {
            self.u64();
            self.u64()
        } else {
            u64::from(self.u32())
        };
        let mut data = self.take(len as usize);
        let mut error = 0;
        if kind >> 15 == 1 {
            error = u32::from_be_bytes(data[..4].try_into().unwrap());
            assert_eq!(
                usize::from(u16::from_be_bytes(data[4..6].try_into().unwrap())),
                data.len() - 6
            );
            data.clear();
        } else if kind == 1 {
            data.drain(..8);
        }
        Reply {
            cookie,
            error,
            kind: Some(kind),
            data,
        }
    }
}

pub use hearth_nbd::wire::Style;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub kind: Option<u16>,
    pub data: Vec<u8>,
}

/// A request to be encoded.
#[derive(Clone, Debug, Default)]
pub struct Req {
    pub command: u16,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u64,
    pub payload: Vec<u8>,
}

impl Req {
    pub fn new(command: u16, offset: u64, len: u64) -> Req {
        Req {
            command,
            offset,
            len,
            cookie: 77,
            ..Req::default()
        }
    }
    pub fn write(offset: u64, payload: Vec<u8>) -> Req {
        Req {
            len: payload.len() as u64,
            payload,
            ..Req::new(1, offset, 0)
        }
    }
    pub fn flags(mut self, flags: u16) -> Req {
        self.flags = flags;
        self
    }
    pub fn cookie(mut self, cookie: u64) -> Req {
        self.cookie = cookie;
        self
    }
    pub fn bytes(&self, style: Style) -> Vec<u8> {
        let mut out = Vec::new();
        let extended = style == Style::Extended;
        let magic: u32 = if extended { 0x21e41c71 } else { 0x25609513 };
        let flags = if extended && self.command == 1 {
            self.flags ^ 32
        } else {
            self.flags
        };
        out.extend(magic.to_be_bytes());
        out.extend(flags.to_be_bytes());
        out.extend(self.command.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        if extended {
            out.extend(self.len.to_be_bytes())
        } else {
            out.extend((self.len as u32).to_be_bytes())
        }
        out.extend(&self.payload);
        out
    }
}

pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

pub fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut out = (name.len() as u32).to_be_bytes().to_vec();
    out.extend(name.as_bytes());
    out.extend((wanted.len() as u16).to_be_bytes());
    for w in wanted {
        out.extend(w.to_be_bytes());
    }
    out
}

pub fn context_query(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut out = (name.len() as u32).to_be_bytes().to_vec();
    out.extend(name.as_bytes());
    out.extend((queries.len() as u32).to_be_bytes());
    for q in queries {
        out.extend((q.len() as u32).to_be_bytes());
        out.extend(q.as_bytes());
    }
    out
}
