//! What a protocol exporter must be to run on a data thread: a sans-I/O state machine.
//!
//! The reactor owns sockets and rings; a [`Session`] only says where received bytes go, what
//! requests they contain, and which bytes to send. The same code therefore runs over io_uring,
//! over the thread-pool fallback, inside TLS, in unit tests and under a fuzzer.

use crate::budget::{Room, Shares};
use hearth_engine::api::{Completion, Request};
use hearth_io::{BufPool, BufSlice};
use smallvec::SmallVec;

/// Memory every connection may hold, whatever the others hold: small requests always get through.
pub(crate) const SMALL: u64 = 256 << 10;

/// Memory of a session: bytes of its requests and replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it, until the last byte of a reply is sent.
    pub held: u64,
    /// Of which for a payload that is being received, all of its buffer.
    pub payload: u64,
    /// Of which for replies that are not sent.
    pub replies: u64,
    /// A request that was received is not taken because there is no [`Room`] for it.
    pub waits: bool,
}

/// What a session may use while it handles an event.
pub struct SessionCx<'a> {
    /// Requests for the engine; `owner` is filled in by the reactor, `tag` is the session's.
    pub requests: &'a mut Vec<Request>,
    /// This thread's buffers.
    pub bufs: &'a mut BufPool,
    /// Monotonic time, nanoseconds.
    pub now_ns: u64,
    /// Memory for further requests.
    pub room: Room,
}

/// Memory to send, in order. The reactor sends several pieces in one system call.
pub type SendList = SmallVec<[BufSlice; 16]>;

/// One client connection, as a state machine without I/O.
///
/// All methods are called from one thread. None may block.
pub trait Session: Send {
    /// Where the next received bytes go. `None`: receive nothing for now (back-pressure);
    /// the reactor asks again after the next completion or send. The memory belongs to the
    /// kernel until `received` is called.
    fn recv_buf(&mut self, cx: &mut SessionCx<'_>) -> Option<BufSlice>;
    /// True if nothing can be done with the last `recv_buf` before it is full: then it may be worth waiting
    /// for all of it at once, instead of being woken for every piece.
    fn wants_all(&self) -> bool {
        false
    }
    /// `n` bytes have arrived in the last `recv_buf`, all of them or fewer; 0 is the peer's end of stream.
    fn received(&mut self, n: usize, cx: &mut SessionCx<'_>);
    /// A request ended.
    fn completed(&mut self, completion: Completion, cx: &mut SessionCx<'_>);
    /// What to send now. Called when no send is in flight; everything put into `out` stays
    /// with the kernel until `sent`, which may name fewer bytes than offered.
    fn send_list(&mut self, out: &mut SendList);
    /// `n` bytes of the last `send_list` went out.
    fn sent(&mut self, n: usize, cx: &mut SessionCx<'_>);
    /// True when the connection should be closed once nothing is left to send; asked when
    /// something has happened to the connection (see [`look`](crate::Reactors::look)).
    /// The reactor drops a session only after all its requests completed.
    fn closing(&self) -> bool;
    /// What it holds. A peer is cut off if more than 256 KiB wait for the rest of its payload, or
    /// for it to take its replies, and it does nothing about it.
    fn memory(&self) -> Memory {
        Memory::default()
    }
    /// Whose share of the memory it holds, once it is known whose client this is. Stays the same
    /// from then on.
    fn shares(&self) -> Option<&Shares> {
        None
    }
    /// There may be room again for what [`waits`](Memory::waits).
    fn resume(&mut self, cx: &mut SessionCx<'_>) {
        let _ = cx;
    }
    /// The daemon is stopping: take no further request, finish those in flight.
    fn shutdown(&mut self);
    /// The process is about to be replaced by another program: take no further request, keep what was
    /// received of the next one, finish those in flight. False if the connection cannot go over; then it is
    /// [shut down](Self::shutdown) instead.
    fn freeze(&mut self) -> bool {
        false
    }
    /// What another process needs to go on with the connection, once it is [frozen](Self::freeze), nothing is in
    /// flight and nothing left to send; or `None` if it ends after all.
    fn carry(&mut self) -> Option<Vec<u8>> {
        None
    }
    /// Requests handed to the engine and not completed.
    fn in_flight(&self) -> usize;
    /// True until the client has said what it wants. A client that takes too long over it is
    /// cut off; afterwards it may be idle as long as it likes.
    fn handshaking(&self) -> bool {
        false
    }
}
