//! One queue at work on a data thread: chains in, engine requests out, answers back.
//!
//! Reads go straight into the guest's buffers where those suit the device (whole, aligned
//! blocks, none of them twice); everything else is copied. Writes are always copied, once, before their checksums
//! are made: a guest may change a page while it is being written (Linux does, for pages under
//! writeback), and what reaches flash must be what was checksummed, or a later read fails.

use crate::chain::{Chain, Guest, walk};
use crate::config;
use crate::error::VhostError;
use crate::inflight::Inflight;
use crate::memory::{GuestMemory, Pieces};
use crate::request::{Limits, Op, Range, SECTOR, Status, parse};
use crate::ring::SplitRing;
use hearth_engine::api::{Completion, REQUEST_MAX, ReqOp, Request};
use hearth_io::{BLOCK, Buf, BufSlice};
use hearth_reactor::{Queue, SessionCx};
use hearth_volume::{Visitor, Volume};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Requests taken before others have their turn.
const PUMP_MAX: usize = 64;
/// Bytes of copies one queue may hold; more requests wait in the ring. Two of the longest.
const COPIES_MAX: u64 = 2 * REQUEST_MAX;
/// A read into scattered memory is split into one request per piece if they are at least this
/// long on average. Below, copying costs less than the requests.
const SPLIT_MIN: u64 = 32 << 10;

/// A connection, as its queues see it.
pub struct Link {
    name: String,
    socket: UnixStream,
    broken: AtomicBool,
}

impl Link {
    /// A link of the client on `socket` to the disk `name`.
    pub fn new(name: &str, socket: UnixStream) -> Link {
        Link {
            name: name.to_owned(),
            socket,
            broken: AtomicBool::new(false),
        }
    }

    /// Ends the connection because of what the client did. Only the first reason is told.
    pub fn fail(&self, error: &VhostError) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            tracing::error!(disk = %self.name, "vhost-user client cut off: {error}");
        }
        self.close();
    }

    /// Ends the connection.
    pub fn close(&self) {
        // Fails only if the other side was first.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Takes no more messages, so that the client's thread comes to its end. The client does not
    /// notice before [`close`](Self::close): it must not think that the queues stand still while
    /// the last requests are being answered.
    pub fn hang_up(&self) {
        let _ = self.socket.shutdown(Shutdown::Read);
    }

    /// True if the connection was ended for something the client did.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

/// What the control thread and a queue share.
#[derive(Default)]
pub struct Line {
    /// Rung when something was used; may change while the queue runs.
    call: Mutex<Option<Arc<OwnedFd>>>,
    /// Where the queue stopped.
    next_avail: AtomicU16,
}

impl Line {
    /// Sets the eventfd to ring, and returns it to be rung now: answers may have been given whose
    /// call went to the eventfd before, when nobody listened there any more, or was lost with the
    /// daemon that gave them. A call too many is harmless, a call too few is a guest that waits for
    /// ever.
    pub fn set_call(&self, fd: Option<OwnedFd>) -> Option<Arc<OwnedFd>> {
        let fd = fd.map(Arc::new);
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = fd.clone();
        fd
    }

    fn call(&self) -> Option<Arc<OwnedFd>> {
        self.call
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The index of the next request to be taken, once the queue has stopped.
    pub fn next_avail(&self) -> u16 {
        self.next_avail.load(Ordering::Acquire)
    }

    /// Where the queue starts.
    pub fn set_next_avail(&self, index: u16) {
        self.next_avail.store(index, Ordering::Release);
    }
}

/// What a queue is made of.
pub struct Parts {
    /// The disk.
    pub disk: Arc<dyn Volume>,
    /// Stands for the client; told of its writes.
    pub visitor: Arc<dyn Visitor>,
    /// The connection.
    pub link: Arc<Link>,
    /// Shared with the control thread.
    pub line: Arc<Line>,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The ring in it.
    pub ring: SplitRing,
    /// Notes that outlive us.
    pub inflight: Option<Inflight>,
    /// Rung by the client.
    pub kick: Arc<OwnedFd>,
    /// What was agreed on.
    pub features: u64,
}

/// A request in flight.
struct Flight {
    /// Engine requests not completed.
    parts: usize,
    outcome: Status,
    /// Guest address of the status byte.
    status: u64,
    /// Bytes the device has written, if all goes well.
    written: u32,
    /// A copy to be given to the guest (reads) or kept for the device (writes).
    copy: Option<Copy>,
}

struct Copy {
    buf: Buf,
    /// Where in the buffer the payload begins.
    at: usize,
    /// Where it goes, for a read.
    to: Pieces,
}

/// See the module.
pub struct DiskQueue {
    parts: Parts,
    serial: [u8; crate::serial::SERIAL_LEN],
    /// By head of chain.
    flights: Vec<Option<Flight>>,
    /// Heads taken over from a daemon that died, to be done first.
    again: VecDeque<u16>,
    /// Heads used and not yet published.
    done: Vec<u16>,
    chain: Chain,
    copied: u64,
    stopped: bool,
}

impl DiskQueue {
    /// A queue that goes on where the line says, or where a dead daemon left it.
    pub fn new(mut parts: Parts) -> Result<DiskQueue, VhostError> {
        use crate::chain::Table;
        let size = usize::from(parts.ring.size());
        let used = parts.ring.published();
        let mut again = VecDeque::new();
        if let Some(inflight) = &mut parts.inflight
            && let Some(left) = inflight.recover(used)?
        {
            again = VecDeque::from(left);
            // What was taken is what was answered and what is in flight. The client's base may be
            // older: it is the used index when the connection ended, and an answer may have been
            // on its way.
            let next = used.wrapping_add(again.len() as u16);
            parts.ring.set_next_avail(next);
        }
        if !again.is_empty() {
            tracing::info!(
                disk = %parts.link.name,
                requests = again.len(),
                "taking over requests that were in flight"
            );
        }
        Ok(DiskQueue {
            serial: crate::serial::serial(parts.disk.name()),
            flights: (0..size).map(|_| None).collect(),
            again,
            done: Vec::with_capacity(size),
            chain: Chain::default(),
            copied: 0,
            stopped: false,
            parts,
        })
    }

    fn fail(&mut self, error: VhostError) {
        self.stopped = true;
        let gone = self.parts.memory.is_gone()
            || self.parts.ring.is_gone()
            || self.parts.inflight.as_ref().is_some_and(Inflight::is_gone);
        let error = if gone { VhostError::Gone } else { error };
        self.parts.link.fail(&error);
    }

    fn next_head(&mut self) -> Result<Option<u16>, VhostError> {
        if let Some(head) = self.again.pop_front() {
            return Ok(Some(head));
        }
        self.parts.ring.pop()
    }

    /// Takes one request.
    fn take(&mut self, head: u16, cx: &mut SessionCx<'_>) -> Result<(), VhostError> {
        let indirect = self.parts.features & config::INDIRECT != 0;
        let memory = self.parts.memory.clone();
        walk(&self.parts.ring, &*memory, head, indirect, &mut self.chain)?;
        let index = usize::from(head);
        if self.flights.get(index).is_none_or(Option::is_some) {
            return Err(VhostError::Twice(head));
        }
        let limits = Limits {
            size: self.parts.disk.size() / SECTOR * SECTOR,
            read_only: self.parts.disk.read_only(),
            len_max: REQUEST_MAX,
            discard: self.parts.features & config::DISCARD != 0,
            write_zeroes: self.parts.features & config::WRITE_ZEROES != 0,
        };
        let request =
            parse(&*memory, &mut self.chain, &limits).map_err(|_| VhostError::NoStatus(head))?;
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.taken(head);
        }
        let before = cx.requests.len();
        let mut flight = Flight {
            parts: 0,
            outcome: Status::Ok,
            status: request.status,
            written: 1,
            copy: None,
        };
        let op = match request.op {
            _ if self.parts.disk.closing() => Op::Answer(Status::IoError),
            op => op,
        };
        match op {
            Op::Read { offset, len } => self.read(head, offset, len, &mut flight, cx)?,
            Op::Write { offset, len } => self.write(head, offset, len, &mut flight, cx)?,
            Op::Flush => self.push(head, ReqOp::Flush, 0, 0, None, cx),
            Op::Discard(ranges) => self.ranges(head, &ranges, true, cx),
            Op::WriteZeroes(ranges) => self.ranges(head, &ranges, false, cx),
            Op::GetId => self.get_id(request.writable, &mut flight)?,
            Op::Answer(status) => flight.outcome = status,
        }
        flight.parts = cx.requests.len() - before;
        if flight.parts == 0 {
            self.finish(head, flight, cx);
        } else {
            self.flights[index] = Some(flight);
        }
        Ok(())
    }

    fn push(
        &self,
        head: u16,
        op: ReqOp,
        offset: u64,
        len: u64,
        buf: Option<BufSlice>,
        cx: &mut SessionCx<'_>,
    ) {
        let (disk, tag) = (self.parts.disk.disk(), u64::from(head));
        cx.requests
            .push(Request::new(tag, disk, op, offset, len, buf, cx.now_ns));
    }

    fn read(
        &mut self,
        head: u16,
        offset: u64,
        len: u64,
        flight: &mut Flight,
        cx: &mut SessionCx<'_>,
    ) -> Result<(), VhostError> {
        let mut to = Pieces::new();
        for piece in &self.chain.writable {
            self.parts
                .memory
                .pieces(piece.at, piece.len.into(), &mut to)
                .map_err(|_| VhostError::Gone)?;
        }
        flight.written = len as u32 + 1;
        // Memory named twice must hold, at the end, what the last piece in the chain asks for;
        // the device could write the pieces in any order, and later than the status byte.
        let whole = !self.chain.overlaps
            && offset.is_multiple_of(BLOCK)
            && to.iter().all(|p| {
                p.as_ptr().addr().is_multiple_of(BLOCK as usize)
                    && (p.len() as u64).is_multiple_of(BLOCK)
            });
        if whole && (to.len() == 1 || len / to.len() as u64 >= SPLIT_MIN) {
            let mut at = offset;
            for piece in to {
                let n = piece.len() as u64;
                self.push(head, ReqOp::Read, at, n, Some(piece), cx);
                at += n;
            }
            return Ok(());
        }
        let buf = self.copy_buffer(offset, len, cx);
        cx.requests.push(Request::read(
            head.into(),
            self.parts.disk.disk(),
            offset,
            len,
            &buf,
            cx.now_ns,
        ));
        flight.copy = Some(Copy {
            buf,
            at: (offset % BLOCK) as usize,
            to,
        });
        Ok(())
    }

    fn write(
        &mut self,
        head: u16,
        offset: u64,
        len: u64,
        flight: &mut Flight,
        cx: &mut SessionCx<'_>,
    ) -> Result<(), VhostError> {
        self.parts.visitor.wrote();
        let buf = self.copy_buffer(offset, len, cx);
        let mut at = (offset % BLOCK) as usize;
        let mut window = buf.all();
        for piece in &self.chain.readable {
            let n = piece.len as usize;
            self.parts
                .memory
                .read(piece.at, &mut window.bytes_mut()[at..at + n])
                .map_err(|_| VhostError::Gone)?;
            at += n;
        }
        let fua = !config::is_write_back(self.parts.features);
        let disk = self.parts.disk.disk();
        cx.requests.push(Request::write(
            head.into(),
            disk,
            offset,
            len,
            fua,
            &buf,
            cx.now_ns,
        ));
        flight.copy = Some(Copy {
            buf,
            at: 0,
            to: Pieces::new(),
        });
        Ok(())
    }

    fn copy_buffer(&mut self, offset: u64, len: u64, cx: &mut SessionCx<'_>) -> Buf {
        let buf = cx.bufs.get(Request::buffer_len(offset, len) as usize);
        self.copied += buf.len() as u64;
        buf
    }

    fn ranges(&mut self, head: u16, ranges: &[Range], discard: bool, cx: &mut SessionCx<'_>) {
        self.parts.visitor.wrote();
        let fua = !config::is_write_back(self.parts.features);
        for range in ranges {
            let op = if discard {
                ReqOp::Discard { fua }
            } else {
                ReqOp::WriteZeroes {
                    fua,
                    punch: range.punch,
                }
            };
            self.push(head, op, range.offset, range.len, None, cx);
        }
    }

    fn get_id(&mut self, writable: u64, flight: &mut Flight) -> Result<(), VhostError> {
        let mut left = &self.serial[..(writable as usize).min(self.serial.len())];
        flight.written = left.len() as u32 + 1;
        for piece in &self.chain.writable {
            let (now, rest) = left.split_at(left.len().min(piece.len as usize));
            self.parts
                .memory
                .write(piece.at, now)
                .map_err(|_| VhostError::Gone)?;
            left = rest;
        }
        Ok(())
    }

    /// Answers a request. The driver sees it with the next [`publish`](Queue::publish).
    fn finish(&mut self, head: u16, flight: Flight, cx: &mut SessionCx<'_>) {
        let mut written = 1;
        if flight.outcome == Status::Ok {
            written = flight.written;
            if let Some(copy) = &flight.copy {
                let mut at = copy.at;
                for to in &copy.to {
                    let mut to = to.clone();
                    let from = copy.buf.slice(at, to.len());
                    to.bytes_mut().copy_from_slice(from.bytes());
                    at += to.len();
                }
            }
        }
        if let Some(copy) = flight.copy {
            self.copied = self.copied.saturating_sub(copy.buf.len() as u64);
            drop(copy.to);
            cx.bufs.put(copy.buf);
        }
        // Inside memory: the chain was checked, and memory does not change under a queue.
        let _ = self
            .parts
            .memory
            .write(flight.status, &[flight.outcome as u8]);
        self.parts.ring.push(head, written);
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.finishing(head);
            self.done.push(head);
        }
    }
}

impl Queue for DiskQueue {
    fn doorbell(&self) -> RawFd {
        self.parts.kick.as_raw_fd()
    }

    fn pump(&mut self, cx: &mut SessionCx<'_>) -> bool {
        if self.stopped {
            return false;
        }
        self.parts.ring.disarm();
        for _ in 0..PUMP_MAX {
            if self.copied >= COPIES_MAX {
                return false;
            }
            let taken = match self.next_head() {
                Ok(Some(head)) => self.take(head, cx),
                Ok(None) => return false,
                Err(e) => Err(e),
            };
            if let Err(e) = taken {
                self.fail(e);
                return false;
            }
        }
        true
    }

    fn completed(&mut self, completion: Completion, cx: &mut SessionCx<'_>) {
        let Completion {
            tag, result, buf, ..
        } = completion;
        drop(buf);
        let Some(place) = self.flights.get_mut(tag as usize) else {
            return;
        };
        let Some(flight) = place else {
            tracing::error!(tag, "the engine completed a request nobody made; ignored");
            return;
        };
        if result.is_err() {
            flight.outcome = Status::IoError;
        }
        flight.parts -= 1;
        if flight.parts == 0
            && let Some(flight) = place.take()
        {
            self.finish(tag as u16, flight, cx);
        }
    }

    fn publish(&mut self) -> Option<Arc<OwnedFd>> {
        if self.parts.ring.unpublished() == 0 {
            return None;
        }
        let call = self.parts.ring.publish();
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.finished(&self.done, self.parts.ring.published());
            self.done.clear();
        }
        if self.parts.memory.is_gone() {
            self.fail(VhostError::Gone);
        }
        if call { self.parts.line.call() } else { None }
    }

    fn arm(&mut self) -> bool {
        // A queue that waits for room is looked at when one of its requests ends.
        !self.stopped && self.copied < COPIES_MAX && self.parts.ring.arm()
    }

    fn has_work(&self) -> bool {
        !self.stopped && self.copied < COPIES_MAX && self.parts.ring.has_work()
    }

    fn is_broken(&self) -> bool {
        self.stopped
    }

    fn shutdown(&mut self) {
        self.stopped = true;
    }
}

impl Drop for DiskQueue {
    fn drop(&mut self) {
        self.parts.line.set_next_avail(self.parts.ring.next_avail());
    }
}
