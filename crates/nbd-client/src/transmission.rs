//! One connection after the handshake, without I/O: requests out, replies in.
//!
//! Nothing a server sends is believed. A reply must name a request in flight; its data must lie
//! within the request, come once, and be all of it, or a guest would be given what happened to
//! be in the buffer. What breaks a rule ends the connection with the reason: after that no byte
//! of the stream means anything. Data goes straight to where it is wanted; only its beginning,
//! received together with the header before it, is copied.

use crate::handshake::Negotiated;
use hearth_io::BufSlice;
use hearth_nbd_wire::{Reader, ReplyHead, RequestHeader, chunk, cmd, errno};
use smallvec::SmallVec;
use std::collections::HashMap;

/// Requests in flight on one connection: more than servers work on at a time (16 as a rule), so
/// that the next is there when one ends.
pub const REQUESTS_MAX: usize = 64;
/// Pieces of one read that may be known apart at a time. Servers cut reads at holes and send the
/// parts nearly in order, so that they join.
const PIECES_MAX: usize = 1024;
/// Longest payload of an error that is listened to: number, length, text of 4096 bytes, offset.
const ERROR_MAX: u32 = 6 + 4096 + 8;
/// From so many bytes on, data is received straight to its place.
const DIRECT_MIN: usize = 8 << 10;

/// Memory of a request, in order.
pub type Pieces = SmallVec<[BufSlice; 2]>;

/// What to ask a server for.
#[derive(Clone, Debug)]
pub struct Request {
    /// A command of [`cmd`].
    pub command: u16,
    /// Command flags.
    pub flags: u16,
    /// First byte.
    pub offset: u64,
    /// Bytes; at most `max_payload` for reads and writes.
    pub len: u32,
    /// Reads: where data goes; writes: what is sent. As long as `len`, else empty.
    pub bufs: Pieces,
}

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Neither kind of reply.
    #[error("the server broke the protocol: a reply begins with {0:#010x}")]
    Magic(u32),
    /// Nobody asked.
    #[error("the server broke the protocol: it answers a request that is not in flight")]
    Cookie,
    /// A reply that cannot be one to its request.
    #[error("the server broke the protocol: {0}")]
    Reply(&'static str),
    /// The server says so.
    #[error("the server is shutting down")]
    Shutdown,
}

#[derive(Debug)]
struct Pending {
    request: Request,
    /// What has arrived, as sorted, disjoint, not adjacent ranges of the request.
    got: Vec<(u32, u32)>,
    error: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Head,
    /// The head of a data or hole chunk: an offset, and for a hole its length.
    Place {
        cookie: u64,
        len: u32,
        hole: bool,
        done: bool,
    },
    /// Data for a place in the request.
    Data {
        cookie: u64,
        at: u32,
        left: u32,
        done: bool,
    },
    /// The payload of an error.
    Error {
        cookie: u64,
        len: u32,
        done: bool,
    },
}

/// A finished request.
#[derive(Debug)]
pub struct Finished {
    /// As it was given.
    pub cookie: u64,
    /// The request, with its buffers.
    pub request: Request,
    /// Success, or an error of [`errno`].
    pub result: Result<(), u32>,
}

/// The state of a connection.
#[derive(Debug)]
pub struct Transmission {
    structured: bool,
    pending: HashMap<u64, Pending>,
    state: State,
    /// The beginning of a message whose rest has not arrived; shorter than [`ERROR_MAX`].
    held: Vec<u8>,
    finished: Vec<Finished>,
    broken: Option<Broken>,
}

impl Transmission {
    /// A connection on which nothing was asked yet.
    pub fn new(agreed: &Negotiated) -> Transmission {
        Transmission {
            structured: agreed.structured,
            pending: HashMap::new(),
            state: State::Head,
            held: Vec::new(),
            finished: Vec::new(),
            broken: None,
        }
    }

    /// Takes note of a request and returns the header to send; the data of a write follows it.
    /// The caller keeps cookies apart and stays below [`REQUESTS_MAX`].
    pub fn begin(&mut self, cookie: u64, request: Request) -> [u8; 28] {
        let header = RequestHeader {
            flags: request.flags,
            command: request.command,
            cookie,
            offset: request.offset,
            len: u64::from(request.len),
        };
        let pending = Pending {
            request,
            got: Vec::new(),
            error: None,
        };
        self.pending.insert(cookie, pending);
        header.compact()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Requests that have ended since this was last asked.
    pub fn take_finished(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.finished)
    }

    /// Everything still in flight, once the connection is over.
    pub fn abandon(self) -> impl Iterator<Item = (u64, Request)> {
        self.pending.into_iter().map(|(c, p)| (c, p.request))
    }

    /// Where the next bytes of the stream belong, if many of them belong to one place. What is
    /// received there is told with [`received`](Self::received).
    pub fn direct(&self) -> Option<BufSlice> {
        let State::Data {
            cookie, at, left, ..
        } = self.state
        else {
            return None;
        };
        if !self.held.is_empty() {
            return None;
        }
        let window = window(&self.pending.get(&cookie)?.request.bufs, at, left)?;
        (window.len() >= DIRECT_MIN).then_some(window)
    }

    /// The request whose data comes next.
    pub fn direct_cookie(&self) -> Option<u64> {
        match self.state {
            State::Data { cookie, .. } => Some(cookie),
            _ => None,
        }
    }

    /// Everything in flight.
    pub fn requests(&self) -> impl Iterator<Item = (u64, &Request)> {
        self.pending.iter().map(|(c, p)| (*c, &p.request))
    }

    /// So many bytes were received where [`direct`](Self::direct) said.
    pub fn received(&mut self, bytes: usize) -> Result<(), Broken> {
        if let State::Data {
            cookie,
            at,
            left,
            done,
        } = self.state
        {
            let bytes = (bytes as u32).min(left);
            self.advance(cookie, at + bytes, left - bytes, done);
        }
        self.verdict()
    }

    /// Takes bytes of the stream.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.verdict()?;
        let mut rest = bytes;
        // Every step takes a byte at least, or waits for more.
        while !rest.is_empty() {
            if let State::Data {
                cookie,
                at,
                left,
                done,
            } = self.state
            {
                let (now, later) = rest.split_at(rest.len().min(left as usize));
                self.place(cookie, at, now);
                self.advance(cookie, at + now.len() as u32, left - now.len() as u32, done);
                rest = later;
                continue;
            }
            if self.held.is_empty() {
                let used = self.message(rest)?;
                if used == 0 {
                    self.held.extend_from_slice(rest);
                    return Ok(());
                }
                rest = &rest[used..];
            } else {
                // A message cut by the end of a receive: complete it and no more.
                let want = self.wanted().saturating_sub(self.held.len()).max(1);
                let (now, later) = rest.split_at(rest.len().min(want));
                self.held.extend_from_slice(now);
                rest = later;
                let held = std::mem::take(&mut self.held);
                if self.message(&held)? == 0 {
                    self.held = held;
                }
            }
        }
        self.verdict()
    }

    /// Bytes of the message that comes next, as far as is known.
    fn wanted(&self) -> usize {
        match self.state {
            // A simple reply is four bytes shorter than a chunk's head.
            State::Head if self.held.len() < 16 => 16,
            State::Head => ReplyHead::LEN_MAX,
            State::Place { hole: true, .. } => 12,
            State::Place { .. } => 8,
            State::Error { len, .. } => len as usize,
            State::Data { .. } => 0,
        }
    }

    /// Reads one message off the front; 0 if it is not whole.
    fn message(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let read = match self.state {
            State::Head => self.head(bytes),
            State::Place {
                cookie,
                len,
                hole,
                done,
            } => self.where_to(bytes, cookie, len, hole, done),
            State::Error { cookie, len, done } => self.failed(bytes, cookie, len, done),
            State::Data { .. } => Ok(0),
        };
        if let Err(why) = &read {
            self.broken = Some(why.clone());
        }
        read
    }

    fn head(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let (head, used) = match ReplyHead::parse(bytes) {
            None => return Ok(0),
            Some(Err(magic)) => return Err(Broken::Magic(magic)),
            Some(Ok(found)) => found,
        };
        match head {
            ReplyHead::Simple { error, cookie } => self.simple(error, cookie)?,
            ReplyHead::Chunk {
                flags,
                kind,
                cookie,
                len,
            } => self.chunk(flags & chunk::FLAG_DONE != 0, kind, cookie, len)?,
        }
        Ok(used)
    }

    fn simple(&mut self, error: u32, cookie: u64) -> Result<(), Broken> {
        let pending = self.pending.get(&cookie).ok_or(Broken::Cookie)?;
        if !pending.got.is_empty() || pending.error.is_some() {
            return Err(Broken::Reply("a reply in chunks ends with a simple one"));
        }
        if error != 0 {
            return self.fail(cookie, error, true);
        }
        if pending.request.command != cmd::READ {
            self.end(cookie);
            return Ok(());
        }
        if self.structured {
            return Err(Broken::Reply("a read is answered without chunks"));
        }
        let left = pending.request.len;
        self.expect(cookie, 0, left, true)
    }

    fn chunk(&mut self, done: bool, kind: u16, cookie: u64, len: u32) -> Result<(), Broken> {
        if !self.structured {
            return Err(Broken::Reply("a reply comes in chunks nobody asked for"));
        }
        let pending = self.pending.get(&cookie).ok_or(Broken::Cookie)?;
        let request = &pending.request;
        let is_read = request.command == cmd::READ;
        self.state = match kind {
            chunk::NONE if len == 0 && done => {
                self.end_checked(cookie)?;
                State::Head
            }
            // At least a byte of data behind the offset.
            chunk::OFFSET_DATA if is_read && len > 8 && len - 8 <= request.len => State::Place {
                cookie,
                len: len - 8,
                hole: false,
                done,
            },
            chunk::OFFSET_HOLE if is_read && len == 12 => State::Place {
                cookie,
                len: 0,
                hole: true,
                done,
            },
            kind if kind & chunk::ERROR_BIT != 0 && (6..=ERROR_MAX).contains(&len) => {
                State::Error { cookie, len, done }
            }
            _ => return Err(Broken::Reply("a chunk has a type or length it cannot have")),
        };
        Ok(())
    }

    /// Where the data of a chunk goes.
    fn where_to(
        &mut self,
        bytes: &[u8],
        cookie: u64,
        len: u32,
        hole: bool,
        done: bool,
    ) -> Result<usize, Broken> {
        let mut r = Reader(bytes);
        let Some(offset) = r.u64() else {
            return Ok(0);
        };
        let (len, used) = if hole {
            match r.u32() {
                Some(len) => (len, 12),
                None => return Ok(0),
            }
        } else {
            (len, 8)
        };
        let request = &self.pending.get(&cookie).ok_or(Broken::Cookie)?.request;
        let at = offset
            .checked_sub(request.offset)
            .and_then(|at| u32::try_from(at).ok())
            .filter(|at| len > 0 && at.checked_add(len).is_some_and(|end| end <= request.len))
            .ok_or(Broken::Reply("data lies outside what was asked for"))?;
        if hole {
            self.cover(cookie, at, len)?;
            self.zero(cookie, at, len);
            self.advance(cookie, at + len, 0, done);
        } else {
            self.expect(cookie, at, len, done)?;
        }
        Ok(used)
    }

    /// The next `left` bytes of the stream are data.
    fn expect(&mut self, cookie: u64, at: u32, left: u32, done: bool) -> Result<(), Broken> {
        self.cover(cookie, at, left)?;
        self.advance(cookie, at, left, done);
        Ok(())
    }

    /// Notes that a range of a request arrives; it must be the first time.
    fn cover(&mut self, cookie: u64, at: u32, len: u32) -> Result<(), Broken> {
        let pending = self.pending.get_mut(&cookie).ok_or(Broken::Cookie)?;
        let got = &mut pending.got;
        let (mut start, mut end) = (at, at + len);
        let i = got.partition_point(|(_, e)| *e <= at);
        if got.get(i).is_some_and(|(s, _)| *s < end) {
            return Err(Broken::Reply("data comes twice"));
        }
        // Joins its neighbours.
        let mut first = i;
        if let Some((s, e)) = i.checked_sub(1).and_then(|p| got.get(p))
            && *e == start
        {
            start = *s;
            first = i - 1;
        }
        let mut last = i;
        if let Some((s, e)) = got.get(i)
            && *s == end
        {
            end = *e;
            last = i + 1;
        }
        got.splice(first..last, [(start, end)]);
        if got.len() > PIECES_MAX {
            return Err(Broken::Reply("a read is answered in too many pieces"));
        }
        Ok(())
    }

    /// Copies received bytes to their place in the request's memory.
    fn place(&mut self, cookie: u64, at: u32, bytes: &[u8]) {
        if let Some(pending) = self.pending.get_mut(&cookie) {
            let mut rest = bytes;
            each_window(&mut pending.request.bufs, at, bytes.len() as u32, |place| {
                let (now, later) = rest.split_at(place.len().min(rest.len()));
                place[..now.len()].copy_from_slice(now);
                rest = later;
            });
        }
    }

    fn zero(&mut self, cookie: u64, at: u32, len: u32) {
        if let Some(pending) = self.pending.get_mut(&cookie) {
            each_window(&mut pending.request.bufs, at, len, |place| place.fill(0));
        }
    }

    /// So far came the data of a chunk.
    fn advance(&mut self, cookie: u64, at: u32, left: u32, done: bool) {
        if left > 0 {
            self.state = State::Data {
                cookie,
                at,
                left,
                done,
            };
            return;
        }
        self.state = State::Head;
        if done && let Err(why) = self.end_checked(cookie) {
            self.broken = Some(why);
        }
    }

    fn failed(&mut self, bytes: &[u8], cookie: u64, len: u32, done: bool) -> Result<usize, Broken> {
        if bytes.len() < len as usize {
            return Ok(0);
        }
        let error = Reader(bytes).u32().unwrap_or(errno::IO);
        self.state = State::Head;
        // Zero would be no error.
        let error = if error == 0 { errno::IO } else { error };
        self.fail(cookie, error, done)?;
        Ok(len as usize)
    }

    fn fail(&mut self, cookie: u64, error: u32, done: bool) -> Result<(), Broken> {
        if error == errno::SHUTDOWN {
            // The request was not done; the next server does it.
            return Err(Broken::Shutdown);
        }
        let pending = self.pending.get_mut(&cookie).ok_or(Broken::Cookie)?;
        pending.error.get_or_insert(error);
        if done {
            self.end(cookie);
        }
        Ok(())
    }

    /// The last chunk of a reply has come: everything must be there.
    fn end_checked(&mut self, cookie: u64) -> Result<(), Broken> {
        let pending = self.pending.get(&cookie).ok_or(Broken::Cookie)?;
        let request = &pending.request;
        let whole = request.command != cmd::READ
            || pending.error.is_some()
            || request.len == 0
            || pending.got == [(0, request.len)];
        if !whole {
            return Err(Broken::Reply(
                "a read is answered with less than it asked for",
            ));
        }
        self.end(cookie);
        Ok(())
    }

    fn end(&mut self, cookie: u64) {
        if let Some(pending) = self.pending.remove(&cookie) {
            self.finished.push(Finished {
                cookie,
                request: pending.request,
                result: pending.error.map_or(Ok(()), Err),
            });
        }
    }

    fn verdict(&self) -> Result<(), Broken> {
        self.broken.clone().map_or(Ok(()), Err)
    }
}

/// The first window of `bufs` from byte `at` on, at most `len` bytes.
fn window(bufs: &[BufSlice], at: u32, len: u32) -> Option<BufSlice> {
    let mut skip = at as usize;
    for buf in bufs {
        if skip < buf.len() {
            return Some(buf.sub(skip, (buf.len() - skip).min(len as usize)));
        }
        skip -= buf.len();
    }
    None
}

/// Hands every piece of memory of the range `at..at+len` to `act`, in order.
fn each_window(bufs: &mut [BufSlice], at: u32, len: u32, mut act: impl FnMut(&mut [u8])) {
    let (mut skip, mut left) = (at as usize, len as usize);
    for buf in bufs {
        if left == 0 {
            return;
        }
        if skip >= buf.len() {
            skip -= buf.len();
            continue;
        }
        let n = (buf.len() - skip).min(left);
        act(&mut buf.bytes_mut()[skip..skip + n]);
        left -= n;
        skip = 0;
    }
}
