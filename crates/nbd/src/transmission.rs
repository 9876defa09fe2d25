//! The transmission phase: requests in, replies out, in whatever order they complete.
//!
//! Nothing a client sends is trusted, and nothing it does may cost more than its share: a
//! request is only taken off the wire while the connection has fewer than
//! [`REQUESTS_MAX`] requests and [`PAYLOAD_MAX`] bytes outstanding (being worked on, or
//! answered but not yet sent). Otherwise the bytes stay in the socket.

use crate::carried::{self, Next};
use crate::export::Attached;
use crate::extents;
use crate::handshake::Agreement;
use crate::input::Input;
use crate::output::{Output, REQUESTS_MAX};
use crate::slab::{Pending, Slab};
use crate::wire::{ReplyHeader, RequestHeader, Style, cflag, cmd, errno};
use hearth_engine::api::{Completion, REQUEST_MAX, ReqError, ReqOp, Request};
use hearth_io::{BLOCK, Buf, BufSlice};
use hearth_reactor::{Memory, SessionCx, Shares};
use hearth_volume::Status;

/// Bytes of request and reply memory one connection may hold: two of the largest requests.
pub const PAYLOAD_MAX: u64 = 64 << 20;

/// Longest payload of a refused request that is read and thrown away; a client that
/// announces more is cut off.
const SKIP_MAX: u64 = 2 * REQUEST_MAX;

/// A payload with at least this many bytes to come is received straight into its place;
/// for less, the system call would cost more than the copy.
const DIRECT_MIN: usize = 16 << 10;

/// After a write at least this long the next header is received alone, so that another long
/// payload need not be copied.
const LARGE_WRITE: usize = 64 << 10;

/// Bytes received when expecting only a header.
const HEADER_ONLY: usize = 512;

/// What the next received bytes are.
enum Expect {
    /// A request header.
    Header,
    /// Payload of a write: `at..end` of `buf` are still to come.
    Payload {
        header: RequestHeader,
        buf: Buf,
        at: usize,
        end: usize,
    },
    /// Payload of a refused request; its reply comes after it, since clients do not expect
    /// an answer to what they are still sending.
    Skip {
        header: RequestHeader,
        left: u64,
        error: u32,
        text: &'static str,
    },
}

/// What became of an attempt to handle received bytes.
pub(crate) enum Step {
    /// Something was handled; try again.
    More,
    /// Bytes are missing.
    Starved,
    /// Too much is outstanding; try again after a completion or a send.
    Full,
    /// The client said goodbye.
    Goodbye,
    /// The client broke the protocol.
    Broken(&'static str),
}

/// State of the phase.
pub(crate) struct Transmission {
    export: Attached,
    style: Style,
    status: bool,
    expect: Expect,
    slab: Slab,
    /// Bytes held by requests and replies.
    held: u64,
    /// The next request waits because all connections together hold too much.
    waits: bool,
    last_write: usize,
    extents: Vec<(u64, Status)>,
}

type Refusal = (u32, &'static str);

impl Transmission {
    pub(crate) fn new(agreed: Agreement) -> Transmission {
        Transmission {
            export: agreed.export,
            style: agreed.style,
            status: agreed.status,
            expect: Expect::Header,
            slab: Slab::default(),
            held: 0,
            waits: false,
            last_write: 0,
            extents: Vec::new(),
        }
    }

    /// Goes on where another process stopped; `None` if that cannot be where it was.
    pub(crate) fn resume(agreed: Agreement, next: Next) -> Option<Transmission> {
        let expect = match next {
            Next::Header => Expect::Header,
            Next::Payload(header, received) => {
                // Only a write that fits is received.
                let end = header.offset.checked_add(header.len)?;
                let fits = end <= agreed.export.size() && header.len <= REQUEST_MAX;
                if !fits || end.checked_next_multiple_of(BLOCK).is_none() {
                    return None;
                }
                let buf = Buf::zeroed(Request::buffer_len(header.offset, header.len) as usize);
                let from = (header.offset % BLOCK) as usize;
                let end = from + header.len as usize;
                let n = received.len().min(header.len as usize);
                buf.slice(from, n)
                    .bytes_mut()
                    .copy_from_slice(&received[..n]);
                let at = from + n;
                Expect::Payload {
                    header,
                    buf,
                    at,
                    end,
                }
            }
            Next::Skip(header, left, error) => Expect::Skip {
                header,
                left,
                error,
                text: "refused",
            },
        };
        let mut resumed = Transmission::new(agreed);
        if let Expect::Skip {
            header,
            left,
            error,
            ..
        } = expect
        {
            // The words for it, which do not go over, are found again if it is still refused for that reason.
            let text = match resumed.check(&header) {
                Err((same, text)) if same == error => text,
                _ => "refused",
            };
            resumed.expect = Expect::Skip {
                header,
                left,
                error,
                text,
            };
        } else {
            resumed.expect = expect;
        }
        Some(resumed)
    }

    /// What another process needs to go on.
    pub(crate) fn carry(&self) -> carried::Phase {
        let next = match &self.expect {
            Expect::Header => Next::Header,
            Expect::Payload {
                header, buf, at, ..
            } => {
                let from = (header.offset % BLOCK) as usize;
                Next::Payload(*header, buf.slice(from, at - from).bytes().to_vec())
            }
            Expect::Skip {
                header,
                left,
                error,
                ..
            } => Next::Skip(*header, *left, *error),
        };
        carried::Phase::Transmission {
            export: self.export.name().to_owned(),
            serial: self.export.serial(),
            size: self.export.size(),
            style: self.style,
            status: self.status,
            next,
        }
    }

    /// A payload was received to its end, and its write not yet taken.
    pub(crate) fn payload_is_whole(&self) -> bool {
        matches!(&self.expect, Expect::Payload { at, end, .. } if at == end)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slab.len()
    }

    /// Memory held, without the replies among it.
    pub(crate) fn memory(&self) -> Memory {
        let payload = match &self.expect {
            Expect::Payload { buf, .. } => buf.len() as u64,
            _ => 0,
        };
        Memory {
            held: self.held + payload,
            payload,
            replies: 0,
            waits: self.waits,
        }
    }

    /// Whose share of the memory is held.
    pub(crate) fn shares(&self) -> &Shares {
        self.export.shares()
    }

    /// True once there is no export any more.
    pub(crate) fn is_over(&self) -> bool {
        self.export.gone()
    }

    /// Memory for the rest of a long payload, if that is what comes next.
    pub(crate) fn direct(&self) -> Option<BufSlice> {
        match &self.expect {
            Expect::Payload { buf, at, end, .. } if end - at >= DIRECT_MIN => {
                Some(buf.slice(*at, end - at))
            }
            _ => None,
        }
    }

    /// How much to receive at once.
    pub(crate) fn recv_limit(&self) -> usize {
        match self.expect {
            Expect::Header if self.last_write >= LARGE_WRITE => HEADER_ONLY,
            _ => usize::MAX,
        }
    }

    /// `n` bytes were received into [`direct`](Self::direct).
    pub(crate) fn received_direct(&mut self, n: usize) {
        if let Expect::Payload { at, end, .. } = &mut self.expect {
            *at = (*at + n).min(*end);
        }
    }

    /// Handles the next piece of what was received.
    pub(crate) fn step(
        &mut self,
        input: &mut Input,
        out: &mut Output,
        cx: &mut SessionCx<'_>,
    ) -> Step {
        match &mut self.expect {
            Expect::Header => {}
            Expect::Payload { buf, at, end, .. } => {
                if let Some(window) = input.window()
                    && at < end
                {
                    let n = window.len().min(*end - *at);
                    buf.slice(*at, n)
                        .bytes_mut()
                        .copy_from_slice(&window.bytes()[..n]);
                    input.consume(n);
                    *at += n;
                }
                if at < end {
                    return Step::Starved;
                }
                self.payload_complete(out, cx);
                return Step::More;
            }
            Expect::Skip {
                header,
                left,
                error,
                text,
            } => {
                let n = (*left).min(input.len() as u64);
                input.consume(n as usize);
                *left -= n;
                if *left > 0 {
                    return Step::Starved;
                }
                let (header, refusal) = (*header, (*error, *text));
                self.expect = Expect::Header;
                self.refuse(&header, refusal, out);
                return Step::More;
            }
        }
        let mut raw = [0u8; 32];
        let len = self.style.request_len();
        if !input.peek(&mut raw[..len]) {
            return Step::Starved;
        }
        let header = match RequestHeader::parse(self.style, &raw[..len]) {
            None => return Step::Starved,
            Some(Err(_)) => return Step::Broken("a request does not start with its magic number"),
            Some(Ok(header)) => header,
        };
        self.waits = false;
        if self.slab.len() + out.len() >= REQUESTS_MAX {
            return Step::Full;
        }
        if self.held > 0 && self.held + memory_of(&header) > PAYLOAD_MAX {
            return Step::Full;
        }
        self.waits = !cx.room.allows(self.held, memory_of(&header));
        if self.waits {
            return Step::Full;
        }
        if header.command == cmd::DISC {
            input.consume(len);
            return Step::Goodbye;
        }
        input.consume(len);
        self.request(header, out, cx)
    }

    /// A new request, its header read.
    fn request(&mut self, header: RequestHeader, out: &mut Output, cx: &mut SessionCx<'_>) -> Step {
        let payload = if self.style == Style::Extended {
            header.flags & cflag::PAYLOAD_LEN != 0
        } else {
            header.command == cmd::WRITE
        };
        if payload && header.len > SKIP_MAX {
            return Step::Broken("a payload is longer than 64 MiB");
        }
        if payload && header.len > REQUEST_MAX && self.style == Style::Extended {
            return Step::Broken("a payload is longer than the 32 MiB agreed on");
        }
        if let Err((error, text)) = self.check(&header) {
            if payload && header.len > 0 {
                self.expect = Expect::Skip {
                    header,
                    left: header.len,
                    error,
                    text,
                };
            } else {
                self.refuse(&header, (error, text), out);
            }
            return Step::More;
        }
        let fua = header.flags & cflag::FUA != 0;
        let (disk, offset, len) = (self.export.disk(), header.offset, header.len);
        if header.command == cmd::BLOCK_STATUS {
            self.block_status(&header, out, cx);
            return Step::More;
        }
        if len == 0 && header.command != cmd::FLUSH {
            let reply = match header.command {
                cmd::READ => ReplyHeader::no_data(self.style, header.cookie, offset),
                _ => ReplyHeader::ok(self.style, header.cookie, offset),
            };
            out.reply(reply.bytes(), None, None, 0);
            return Step::More;
        }
        if matches!(header.command, cmd::TRIM | cmd::WRITE_ZEROES) {
            self.export.wrote();
        }
        let op = match header.command {
            cmd::READ => {
                let buf = cx.bufs.get(Request::buffer_len(offset, len) as usize);
                if let Some(tag) = self.remember(&header, len as usize, Some(buf.clone())) {
                    cx.requests
                        .push(Request::read(tag, disk, offset, len, &buf, cx.now_ns));
                }
                return Step::More;
            }
            cmd::WRITE => {
                let buf = cx.bufs.get(Request::buffer_len(offset, len) as usize);
                self.last_write = len as usize;
                let at = (offset % BLOCK) as usize;
                self.expect = Expect::Payload {
                    header,
                    buf,
                    at,
                    end: at + len as usize,
                };
                return Step::More;
            }
            cmd::FLUSH => ReqOp::Flush,
            cmd::TRIM => ReqOp::Discard { fua },
            cmd::WRITE_ZEROES => ReqOp::WriteZeroes {
                fua,
                punch: header.flags & cflag::NO_HOLE == 0,
            },
            _ => ReqOp::Prefetch,
        };
        if let Some(tag) = self.remember(&header, 0, None) {
            cx.requests
                .push(Request::new(tag, disk, op, offset, len, None, cx.now_ns));
        }
        Step::More
    }

    /// A write with all of its payload goes to the engine.
    fn payload_complete(&mut self, out: &mut Output, cx: &mut SessionCx<'_>) {
        let Expect::Payload { header, buf, .. } =
            std::mem::replace(&mut self.expect, Expect::Header)
        else {
            return;
        };
        // The export may have changed while the payload was coming.
        if let Err(refusal) = self.check(&header) {
            cx.bufs.put(buf);
            return self.refuse(&header, refusal, out);
        }
        let fua = header.flags & cflag::FUA != 0;
        self.export.wrote();
        if let Some(tag) = self.remember(&header, 0, Some(buf.clone())) {
            let disk = self.export.disk();
            cx.requests.push(Request::write(
                tag,
                disk,
                header.offset,
                header.len,
                fua,
                &buf,
                cx.now_ns,
            ));
        }
    }

    /// `None` cannot happen: room was checked before the header was taken.
    fn remember(
        &mut self,
        header: &RequestHeader,
        read_len: usize,
        buf: Option<Buf>,
    ) -> Option<u64> {
        let cost = buf.as_ref().map_or(0, |b| b.len() as u64);
        let pending = Pending {
            cookie: header.cookie,
            offset: header.offset,
            read_len,
            buf,
            cost,
        };
        let tag = self.slab.insert(pending)?;
        self.held += cost;
        Some(tag)
    }

    fn refuse(&mut self, header: &RequestHeader, (error, text): Refusal, out: &mut Output) {
        tracing::debug!(
            export = self.export.name(),
            command = header.command,
            flags = header.flags,
            offset = header.offset,
            len = header.len,
            error,
            "request refused: {text}"
        );
        let reply = ReplyHeader::error(self.style, header.cookie, header.offset, error, text);
        out.reply(reply.bytes(), None, None, 0);
    }

    /// Is the request valid, as far as the protocol says?
    fn check(&self, header: &RequestHeader) -> Result<(), Refusal> {
        use cflag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
        let (allowed, writes) = match header.command {
            cmd::READ if self.style != Style::Simple => (FUA | DF, false),
            cmd::READ | cmd::FLUSH | cmd::CACHE => (FUA, false),
            cmd::WRITE if self.style == Style::Extended => (FUA | PAYLOAD_LEN, true),
            cmd::WRITE | cmd::TRIM => (FUA, true),
            cmd::WRITE_ZEROES => (FUA | NO_HOLE | FAST_ZERO, true),
            cmd::BLOCK_STATUS => (FUA | REQ_ONE, false),
            _ => return Err((errno::INVAL, "unknown command")),
        };
        if header.flags & !allowed != 0 {
            return Err((errno::INVAL, "a flag that does not fit the command"));
        }
        if header.command == cmd::WRITE
            && self.style == Style::Extended
            && header.flags & PAYLOAD_LEN == 0
        {
            return Err((errno::INVAL, "a write without the payload flag"));
        }
        if self.export.closing() {
            return Err((errno::SHUTDOWN, "the export is being closed"));
        }
        if writes || header.command == cmd::FLUSH || header.flags & FUA != 0 {
            let can = self.export.capabilities();
            let offered = match header.command {
                _ if writes && !can.write => {
                    return Err((errno::PERM, "the export is read-only"));
                }
                cmd::FLUSH => can.flush,
                cmd::TRIM => can.discard,
                cmd::WRITE_ZEROES => can.write_zeroes,
                _ => true,
            };
            if !offered || (header.flags & FUA != 0 && !can.fua) {
                return Err((errno::INVAL, "the export does not offer that"));
            }
        }
        if header.command == cmd::FLUSH {
            return match (header.offset, header.len) {
                (0, 0) => Ok(()),
                _ => Err((errno::INVAL, "a flush takes no range")),
            };
        }
        if header
            .offset
            .checked_add(header.len)
            .is_none_or(|end| end > self.export.size())
        {
            let past_end = matches!(header.command, cmd::WRITE | cmd::WRITE_ZEROES);
            let error = if past_end { errno::NOSPC } else { errno::INVAL };
            return Err((error, "the range reaches past the end of the export"));
        }
        match header.command {
            cmd::READ if header.len > REQUEST_MAX => {
                let error = if self.style == Style::Simple {
                    errno::INVAL
                } else {
                    errno::OVERFLOW
                };
                Err((error, "a read is longer than 32 MiB"))
            }
            cmd::WRITE if header.len > REQUEST_MAX => {
                Err((errno::INVAL, "a write is longer than 32 MiB"))
            }
            cmd::WRITE_ZEROES
                if header.flags & FAST_ZERO != 0 && !self.export.capabilities().fast_zero =>
            {
                Err((errno::NOTSUP, "zeroing is no faster than writing here"))
            }
            cmd::BLOCK_STATUS if !self.status => {
                Err((errno::INVAL, "no metadata context was agreed on"))
            }
            cmd::BLOCK_STATUS if header.len == 0 => Err((errno::INVAL, "block status of nothing")),
            _ => Ok(()),
        }
    }

    fn block_status(&mut self, header: &RequestHeader, out: &mut Output, cx: &mut SessionCx<'_>) {
        let one = header.flags & cflag::REQ_ONE != 0;
        extents::collect(
            &*self.export,
            header.offset,
            header.len,
            one,
            &mut self.extents,
        );
        let len = extents::payload_len(self.style, self.extents.len());
        let buf = cx.bufs.get(len);
        let mut payload = buf.slice(0, len);
        extents::encode(self.style, &self.extents, payload.bytes_mut());
        let reply = ReplyHeader::status(self.style, header.cookie, header.offset, len as u64);
        let cost = buf.len() as u64;
        self.held += cost;
        out.reply(reply.bytes(), Some(payload), Some(buf), cost);
    }

    /// The engine is done with a request.
    pub(crate) fn completed(
        &mut self,
        completion: Completion,
        out: &mut Output,
        cx: &mut SessionCx<'_>,
    ) {
        let Completion {
            tag,
            result,
            buf: window,
            ..
        } = completion;
        let Some(pending) = self.slab.remove(tag) else {
            tracing::error!(tag, "the engine completed a request nobody made; ignored");
            return;
        };
        let Pending {
            cookie,
            offset,
            read_len,
            buf,
            cost,
        } = pending;
        drop(window);
        match (result, buf) {
            (Ok(()), Some(buf)) if read_len > 0 => {
                let payload = buf.slice((offset % BLOCK) as usize, read_len);
                let reply = ReplyHeader::data(self.style, cookie, offset, read_len as u64);
                out.reply(reply.bytes(), Some(payload), Some(buf), cost);
                return;
            }
            (Ok(()), buf) => {
                out.reply(
                    ReplyHeader::ok(self.style, cookie, offset).bytes(),
                    None,
                    None,
                    0,
                );
                self.put(buf, cx);
            }
            (Err(error), buf) => {
                let (error, text) = refusal(error);
                out.reply(
                    ReplyHeader::error(self.style, cookie, offset, error, text).bytes(),
                    None,
                    None,
                    0,
                );
                self.put(buf, cx);
            }
        }
        self.freed(cost);
    }

    fn put(&self, buf: Option<Buf>, cx: &mut SessionCx<'_>) {
        if let Some(buf) = buf {
            cx.bufs.put(buf);
        }
    }

    /// `bytes` of request memory are free again.
    pub(crate) fn freed(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }
}

/// Bytes of memory a request will hold, for what its header says (checked later).
fn memory_of(header: &RequestHeader) -> u64 {
    match header.command {
        cmd::READ | cmd::WRITE => header.len.min(REQUEST_MAX) + 2 * BLOCK,
        cmd::BLOCK_STATUS => extents::REPLY_MAX as u64,
        _ => 0,
    }
}

fn refusal(error: ReqError) -> Refusal {
    match error {
        ReqError::Io => (errno::IO, "input/output error"),
        ReqError::NoSpace => (errno::NOSPC, "no space left on the origin"),
        ReqError::Invalid => (errno::INVAL, "the request does not fit the disk"),
        ReqError::ReadOnly => (errno::PERM, "the disk is read-only"),
        ReqError::NoDisk => (errno::SHUTDOWN, "the disk is not attached any more"),
        ReqError::Shutdown => (errno::SHUTDOWN, "the server is stopping"),
    }
}
