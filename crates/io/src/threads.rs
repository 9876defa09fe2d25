//! The driver for where io_uring is forbidden: poll(2) for sockets, helper threads for blocks.

use crate::buf::BufSlice;
use crate::delay::Delayed;
use crate::helper::{Finished, Helpers, Job, Outbox};
use crate::op::{IoDone, IoError, IoOp};
use crate::patience::Lending;
use crate::proactor::{Event, Proactor, SendList, Wait};
use crate::sys::{check, now_ns, ring_eventfd, set_nonblocking};
use crate::targets::{TargetView, Targets};
use crate::wake::WakeHandle;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Threads that execute blocking I/O for one driver: as deep as a fast SSD needs to be busy.
const HELPERS: usize = 16;
/// Operations handed to helpers at a time; more wait here. Bounds the outbox.
const IO_MAX: usize = 1024;

enum Socket {
    Recv { token: u64, buf: BufSlice },
    Send { token: u64, list: Box<SendList> },
    Accept { token: u64 },
    Watch { token: u64 },
}

impl Socket {
    fn token(&self) -> u64 {
        match self {
            Socket::Recv { token, .. }
            | Socket::Send { token, .. }
            | Socket::Accept { token }
            | Socket::Watch { token } => *token,
        }
    }

    fn fail(self, e: io::Error) -> Event {
        match self {
            Socket::Recv { token, .. } => Event::Recv {
                token,
                result: Err(e),
                more: false,
            },
            Socket::Send { token, .. } => Event::Sent {
                token,
                result: Err(e),
            },
            Socket::Accept { token } => Event::Accepted {
                token,
                result: Err(e),
            },
            Socket::Watch { token } => Event::Rung {
                token,
                result: Err(e),
            },
        }
    }

    /// Tries once; `None` if it would block.
    fn attempt(&self, fd: RawFd) -> Option<Event> {
        match self {
            Socket::Recv { token, buf } => {
                // SAFETY: the window is live memory of that length, ours to write until the event.
                let n =
                    unsafe { libc::recv(fd, buf.as_ptr().cast(), buf.len(), libc::MSG_DONTWAIT) };
                settle(n).map(|result| Event::Recv {
                    token: *token,
                    result,
                    more: true,
                })
            }
            Socket::Send { token, list } => {
                let iov: smallvec::SmallVec<[libc::iovec; 16]> = list
                    .iter()
                    .map(|b| libc::iovec {
                        iov_base: b.as_ptr().cast(),
                        iov_len: b.len(),
                    })
                    .collect();
                // SAFETY: all-zero bytes are a valid msghdr (null pointers, zero lengths).
                let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
                msg.msg_iov = iov.as_ptr().cast_mut();
                msg.msg_iovlen = iov.len() as _;
                // SAFETY: the header and its vectors live across the call and point to live memory.
                let n = unsafe { libc::sendmsg(fd, &msg, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
                settle(n).map(|result| Event::Sent {
                    token: *token,
                    result,
                })
            }
            Socket::Accept { token } => {
                // SAFETY: null address pointers are allowed; the listener does not block.
                let n = unsafe {
                    libc::accept4(
                        fd,
                        std::ptr::null_mut(),
                        std::ptr::null_mut(),
                        libc::SOCK_CLOEXEC,
                    )
                };
                // SAFETY: a descriptor just made by the kernel, owned by nobody else.
                let own = |fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
                settle(n as isize).map(|result| Event::Accepted {
                    token: *token,
                    result: result.map(own),
                })
            }
            Socket::Watch { token } => {
                let mut count = 0u64;
                let iov = libc::iovec {
                    iov_base: (&raw mut count).cast(),
                    iov_len: 8,
                };
                // Not read(2): another process shares the descriptor, may have read the counter
                // since poll(2) looked, and may have made it blocking.
                // SAFETY: one vector of eight writable bytes, alive across the call.
                let n = unsafe { libc::preadv2(fd, &iov, 1, -1, libc::RWF_NOWAIT) };
                settle(n).map(|result| Event::Rung {
                    token: *token,
                    result: result.map(drop),
                })
            }
        }
    }
}

/// A system call's return as a result; `None` if it would block or was interrupted.
fn settle(n: isize) -> Option<io::Result<usize>> {
    if n >= 0 {
        return Some(Ok(n as usize));
    }
    let e = io::Error::last_os_error();
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => None,
        _ => Some(Err(e)),
    }
}

/// See the module.
pub(crate) struct PollDriver {
    targets: TargetView,
    wake: WakeHandle,
    helpers: Helpers,
    outbox: Arc<Outbox>,
    finished: Vec<Finished>,
    at_helpers: usize,
    lending: Lending,
    /// When it is looked for what should have ended.
    look_ns: u64,
    backlog: VecDeque<IoOp>,
    ready: Vec<IoDone>,
    delayed: Delayed,
    sockets: Vec<(RawFd, Socket)>,
    events: Vec<Event>,
    polls: Vec<libc::pollfd>,
    now: u64,
}

impl PollDriver {
    pub(crate) fn open(targets: Arc<Targets>) -> io::Result<PollDriver> {
        let wake = WakeHandle::new()?;
        Ok(PollDriver {
            targets: TargetView::new(targets, wake.clone()),
            helpers: Helpers::new(HELPERS),
            outbox: Outbox::new(wake.clone()),
            wake,
            finished: Vec::new(),
            at_helpers: 0,
            lending: Lending::default(),
            look_ns: 0,
            backlog: VecDeque::new(),
            ready: Vec::new(),
            delayed: Delayed::default(),
            sockets: Vec::new(),
            events: Vec::new(),
            polls: Vec::new(),
            now: now_ns(),
        })
    }

    fn start_io(&mut self, op: IoOp) {
        let Some(device) = self.targets.get(op.target).cloned() else {
            return self.ready.push(op.done(Err(IoError::Os(libc::ENODEV)), 0));
        };
        if let Err(e) = device.admit(&op) {
            return self.ready.push(op.done(Err(e), 0));
        }
        self.at_helpers += 1;
        let lent = device.is_watched().then(|| self.lending.lend(&op, &device));
        let mut job = Job::new(op, device.clone(), self.now, self.outbox.clone());
        if let Some(lent) = lent {
            job = job.watched(lent);
        }
        let announces = job.op().is_some_and(|op| device.announces(op.kind));
        let job = match announces {
            true => device.hold(job),
            false => Some(job),
        };
        if let Some(job) = job.and_then(|job| device.take(job)) {
            self.helpers.push(job);
        }
    }

    fn collect(&mut self, dones: &mut Vec<IoDone>) {
        if self.at_helpers > 0 {
            self.outbox.take(&mut self.finished);
            self.at_helpers -= self.finished.len();
            for f in self.finished.drain(..) {
                if self.lending.is_told(f.number, self.now) {
                    continue;
                }
                let latency_ns = f.latency_ns();
                let done = f.op.done(f.result, f.end_ns.saturating_sub(f.start_ns));
                settle_done(
                    done,
                    f.start_ns,
                    latency_ns,
                    self.now,
                    &mut self.delayed,
                    dones,
                );
            }
        }
        if self.now >= self.look_ns {
            self.look_ns = self.lending.look(self.now, dones);
        }
        dones.append(&mut self.ready);
        self.delayed.release(self.now, dones);
    }

    fn try_sockets(&mut self, ready: impl Fn(usize) -> bool) {
        let mut index = 0;
        let events = &mut self.events;
        self.sockets.retain(|(fd, socket)| {
            let event = if ready(index) {
                socket.attempt(*fd)
            } else {
                None
            };
            index += 1;
            let rung = matches!(event, Some(Event::Rung { result: Ok(()), .. }));
            let keep = rung || event.is_none();
            events.extend(event);
            keep
        });
    }

    fn start_socket(&mut self, fd: RawFd, socket: Socket) {
        match socket.attempt(fd) {
            Some(event) => self.events.push(event),
            None => self.sockets.push((fd, socket)),
        }
    }
}

/// Hands a finished operation on, now or when its device's latency has passed.
pub(crate) fn settle_done(
    mut done: IoDone,
    start_ns: u64,
    latency_ns: u64,
    now_ns: u64,
    delayed: &mut Delayed,
    out: &mut Vec<IoDone>,
) {
    let due = start_ns.saturating_add(latency_ns);
    // Also when the thread came late to what was done early.
    done.latency_ns = done.latency_ns.max(latency_ns);
    if latency_ns > 0 && due > now_ns {
        delayed.hold(due, done);
    } else {
        out.push(done);
    }
}

impl Proactor for PollDriver {
    fn submit_io(&mut self, op: IoOp) {
        if self.at_helpers >= IO_MAX {
            self.backlog.push_back(op);
        } else {
            self.start_io(op);
        }
    }

    fn recv(&mut self, token: u64, fd: RawFd, buf: BufSlice, _more: bool, _all: bool) {
        self.start_socket(fd, Socket::Recv { token, buf });
    }

    fn send(&mut self, token: u64, fd: RawFd, list: SendList) {
        self.start_socket(
            fd,
            Socket::Send {
                token,
                list: Box::new(list),
            },
        );
    }

    fn accept(&mut self, token: u64, fd: RawFd) {
        let socket = Socket::Accept { token };
        match set_nonblocking(fd, true) {
            Ok(()) => self.start_socket(fd, socket),
            Err(e) => self.events.push(socket.fail(e)),
        }
    }

    fn watch(&mut self, token: u64, fd: RawFd) {
        self.sockets.push((fd, Socket::Watch { token }));
    }

    fn signal(&mut self, token: u64, fd: RawFd) {
        ring_eventfd(fd);
        self.events.push(Event::Signalled { token });
    }

    fn cancel(&mut self, token: u64) {
        for (_, socket) in self.sockets.extract_if(.., |(_, s)| s.token() == token) {
            self.events
                .push(socket.fail(io::Error::from_raw_os_error(libc::ECANCELED)));
        }
    }

    fn wake_handle(&self) -> WakeHandle {
        self.wake.clone()
    }

    fn wait(
        &mut self,
        wait: Wait,
        events: &mut Vec<Event>,
        dones: &mut Vec<IoDone>,
    ) -> io::Result<u64> {
        let pending = !self.events.is_empty() || !self.ready.is_empty();
        let limit = match (wait, self.delayed.next()) {
            _ if pending => Some(0),
            (Wait::Poll, _) => Some(0),
            (Wait::Until(at), Some(due)) => Some(at.min(due)),
            (Wait::Until(at), None) => Some(at),
            (Wait::Forever, due) => due,
        };
        let limit = match self.at_helpers > self.lending.told() {
            true => Some(
                limit
                    .unwrap_or(u64::MAX)
                    .min(self.look_ns.max(self.now + 1)),
            ),
            false => limit,
        };
        let asleep = limit != Some(0) && self.wake.prepare_sleep();
        let timeout_ns = match limit {
            _ if !asleep => Some(0),
            Some(at) => Some(at.saturating_sub(now_ns())),
            None => None,
        };
        self.polls.clear();
        self.polls.push(libc::pollfd {
            fd: self.wake.fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        for (fd, socket) in &self.sockets {
            let events = if matches!(socket, Socket::Send { .. }) {
                libc::POLLOUT
            } else {
                libc::POLLIN
            };
            self.polls.push(libc::pollfd {
                fd: *fd,
                events,
                revents: 0,
            });
        }
        let timeout = timeout_ns.map(|ns| libc::timespec {
            tv_sec: (ns / 1_000_000_000) as _,
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        let timeout = timeout
            .as_ref()
            .map_or(std::ptr::null(), |ts| ts as *const libc::timespec);
        // SAFETY: the array and the timeout live across the call; a null mask leaves signals alone.
        let n = unsafe {
            libc::ppoll(
                self.polls.as_mut_ptr(),
                self.polls.len() as _,
                timeout,
                std::ptr::null(),
            )
        };
        let result = check(n);
        if self.wake.awake() {
            events.push(Event::Woken);
            self.targets.refresh();
        }
        match result {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
        self.now = now_ns();
        if self.polls[0].revents != 0 {
            let mut count = 0u64;
            // SAFETY: eight writable bytes; poll says that the read will not block, and only
            // this thread reads.
            unsafe { libc::read(self.wake.fd(), (&raw mut count).cast(), 8) };
        }
        let polls = std::mem::take(&mut self.polls);
        self.try_sockets(|i| polls.get(i + 1).is_some_and(|p| p.revents != 0));
        self.polls = polls;
        events.append(&mut self.events);
        self.collect(dones);
        while self.at_helpers < IO_MAX
            && let Some(op) = self.backlog.pop_front()
        {
            self.start_io(op);
        }
        Ok(self.now)
    }

    fn io_in_flight(&self) -> usize {
        let told = self.lending.told();
        self.at_helpers - told + self.backlog.len() + self.ready.len() + self.delayed.len()
    }

    fn backend_name(&self) -> &'static str {
        "threads"
    }
}
