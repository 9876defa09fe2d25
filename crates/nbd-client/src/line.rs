//! One connection with its I/O: what is to be sent, what is being received.

use crate::connect::Connection;
use crate::transmission::{Broken, Finished, REQUESTS_MAX, Request, Transmission};
use hearth_io::{Buf, BufSlice, Proactor, SendList};
use hearth_nbd_wire::cmd;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes received at once when nothing long is expected: many short replies in one call.
const SCRATCH: usize = 64 << 10;
/// Room for one request header.
const HEADER_SLOT: usize = 32;
/// Pieces of memory in one send.
const SEND_PIECES: usize = 64;

/// A connection.
pub(crate) struct Line {
    pub(crate) token: u64,
    socket: OwnedFd,
    transmission: Transmission,
    headers: Buf,
    free_headers: Vec<usize>,
    header_of: HashMap<u64, usize>,
    unsent: VecDeque<BufSlice>,
    scratch: BufSlice,
    /// The receive under way goes to a request's memory.
    direct: bool,
    receiving: bool,
    sending: bool,
    more: bool,
}

impl Line {
    pub(crate) fn new(token: u64, connection: Connection) -> Line {
        Line {
            token,
            transmission: Transmission::new(&connection.agreed),
            socket: connection.socket,
            headers: Buf::zeroed(REQUESTS_MAX * HEADER_SLOT),
            free_headers: (0..REQUESTS_MAX).collect(),
            header_of: HashMap::new(),
            unsent: VecDeque::new(),
            scratch: Buf::zeroed(SCRATCH).all(),
            direct: false,
            receiving: false,
            sending: false,
            more: false,
        }
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.transmission.in_flight()
    }

    /// Queues a request; false, without having done so, if the connection is full.
    pub(crate) fn request(&mut self, cookie: u64, request: &Request) -> bool {
        let Some(index) = self.free_headers.pop() else {
            return false;
        };
        let header = self.transmission.begin(cookie, request.clone());
        let mut slot = self.headers.slice(index * HEADER_SLOT, header.len());
        slot.bytes_mut().copy_from_slice(&header);
        self.header_of.insert(cookie, index);
        self.unsent.push_back(slot);
        if request.command == cmd::WRITE {
            self.unsent.extend(request.bufs.iter().cloned());
        }
        true
    }

    /// Starts what can be started.
    pub(crate) fn pump(&mut self, io: &mut dyn Proactor) {
        let fd = self.socket.as_raw_fd();
        if !self.sending && !self.unsent.is_empty() {
            let list: SendList = self.unsent.iter().take(SEND_PIECES).cloned().collect();
            self.sending = true;
            io.send(self.token, fd, list);
        }
        if !self.receiving {
            let direct = self.transmission.direct();
            self.direct = direct.is_some();
            self.receiving = true;
            let window = direct.unwrap_or_else(|| self.scratch.clone());
            io.recv(self.token, fd, window, self.more, false);
        }
    }

    /// So many bytes went out.
    pub(crate) fn sent(&mut self, mut bytes: usize) {
        self.sending = false;
        while let Some(front) = self.unsent.front_mut() {
            if front.len() > bytes {
                *front = front.sub(bytes, front.len() - bytes);
                break;
            }
            bytes -= front.len();
            self.unsent.pop_front();
        }
    }

    /// So many bytes came in: what they complete, and whether the connection can go on after that.
    pub(crate) fn received(
        &mut self,
        bytes: usize,
        more: bool,
    ) -> (Vec<Finished>, Result<(), Broken>) {
        self.receiving = false;
        self.more = more;
        let sound = if self.direct {
            self.transmission.received(bytes)
        } else {
            let bytes = bytes.min(self.scratch.len());
            self.transmission.feed(&self.scratch.bytes()[..bytes])
        };
        let finished = self.transmission.take_finished();
        for done in &finished {
            self.free_headers
                .extend(self.header_of.remove(&done.cookie));
        }
        (finished, sound)
    }

    /// The send or receive under way failed.
    pub(crate) fn send_ended(&mut self) {
        self.sending = false;
    }

    /// As [`send_ended`](Self::send_ended).
    pub(crate) fn receive_ended(&mut self) {
        self.receiving = false;
    }

    /// After the kernel found no memory (`EFAULT`): the requests whose memory may have gone away.
    pub(crate) fn faulted(&self) -> Vec<u64> {
        let sending = |piece: &BufSlice| {
            let start = piece.as_ptr() as usize;
            self.unsent
                .iter()
                .any(|u| (start..start + piece.len()).contains(&(u.as_ptr() as usize)))
        };
        let receiving = self.transmission.direct_cookie().filter(|_| self.direct);
        self.transmission
            .requests()
            .filter(|(cookie, request)| {
                receiving == Some(*cookie)
                    || request.command == cmd::WRITE
                        && request.bufs.iter().any(|b| b.is_shared() && sending(b))
            })
            .map(|(cookie, _)| cookie)
            .collect()
    }

    /// Ends the connection. Its operations end soon; until then the kernel may use their memory.
    pub(crate) fn shut(&self) {
        // SAFETY: plain numbers; the descriptor is open. If it is not connected any more, the
        // operations have ended already.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// True if the kernel uses none of our memory for this connection.
    pub(crate) fn at_rest(&self) -> bool {
        !self.sending && !self.receiving
    }

    /// What was not answered.
    pub(crate) fn abandon(self) -> impl Iterator<Item = (u64, Request)> {
        self.transmission.abandon()
    }
}
