//! One connection: its socket, its session, and what is in flight for it.

use crate::session::{Memory, SMALL, Session};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// How fast bytes move while much memory waits for them. A peer that moves one now and then would
/// hold it for days.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// When this stretch began; 0 while nothing waits.
    since_ns: u64,
    bytes: u64,
}

impl Pace {
    pub(crate) fn moved(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// True if fewer than [`SMALL`] bytes have moved in a whole `stretch`, all of which something
    /// waited (`waits`: it does now). To be asked often in a stretch.
    pub(crate) fn is_slow(&mut self, waits: bool, now_ns: u64, stretch: u64) -> bool {
        if !waits || self.since_ns == 0 {
            *self = Pace {
                since_ns: if waits { now_ns } else { 0 },
                bytes: 0,
            };
            return false;
        }
        if now_ns.saturating_sub(self.since_ns) <= stretch {
            return false;
        }
        let slow = self.bytes < SMALL;
        *self = Pace {
            since_ns: now_ns,
            bytes: 0,
        };
        slow
    }
}

/// See the module.
pub(crate) struct Conn {
    fd: OwnedFd,
    pub session: Box<dyn Session>,
    /// Bytes of the receive window the kernel has, 0 if none.
    pub receiving: usize,
    /// A send is in flight.
    pub sending: bool,
    /// The kernel said that more bytes are waiting.
    pub more: bool,
    /// Queued for a look after this round.
    pub dirty: bool,
    /// What the session held when it was last called.
    pub memory: Memory,
    /// What of that counts against the memory budget.
    pub counted: u64,
    /// The socket is of no use any more; kept until everything in flight has ended.
    pub dead: bool,
    /// It goes over to another process as soon as nothing is in flight.
    pub frozen: bool,
    /// The receive in flight waits until its window is full.
    pub whole: bool,
    /// The session was told that the stream ended.
    pub ended: bool,
    /// Requests the engine has not completed.
    pub requests: usize,
    pub since_ns: u64,
    pub recv_ns: u64,
    pub send_ns: u64,
    pub receipts: Pace,
    pub sends: Pace,
    /// When the session began to close, 0 before.
    pub closing_ns: u64,
}

impl Conn {
    pub(crate) fn new(fd: OwnedFd, session: Box<dyn Session>, now_ns: u64) -> Conn {
        Conn {
            fd,
            session,
            receiving: 0,
            sending: false,
            // The client usually speaks first or at once.
            more: true,
            dirty: false,
            memory: Memory::default(),
            counted: 0,
            dead: false,
            frozen: false,
            whole: false,
            ended: false,
            requests: 0,
            since_ns: now_ns,
            recv_ns: now_ns,
            send_ns: now_ns,
            receipts: Pace::default(),
            sends: Pace::default(),
            closing_ns: 0,
        }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Gives the socket up: what is in flight on it ends soon, nothing new is started.
    pub(crate) fn kill(&mut self) {
        if !self.dead {
            self.dead = true;
            // SAFETY: plain numbers; the descriptor is open. Fails only if the peer is gone already.
            unsafe { libc::shutdown(self.fd(), libc::SHUT_RDWR) };
        }
    }

    /// True once a connection that goes over has nothing in flight any more.
    pub(crate) fn is_still(&self) -> bool {
        self.frozen
            && !self.dead
            && !self.ended
            && self.receiving == 0
            && !self.sending
            && self.requests == 0
    }

    /// The socket, for whoever goes on with it.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// True when nothing refers to the connection any more.
    pub(crate) fn is_over(&self) -> bool {
        self.dead && self.receiving == 0 && !self.sending && self.requests == 0
    }
}
