//! What a data thread asks of its driver, whichever that is.
//!
//! Two drivers stand behind one trait: io_uring, and where a container or an old kernel
//! forbids that, a poll loop with helper threads, slower but as correct. A driver belongs to
//! the thread that opened it. It owns every operation, with its memory, until the kernel is
//! done with it; nothing is submitted twice or told of twice.

use crate::buf::BufSlice;
use crate::op::{IoDone, IoOp};
use crate::targets::Targets;
use crate::threads::PollDriver;
use crate::uring::RingDriver;
use crate::wake::WakeHandle;
use smallvec::SmallVec;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

use hearth_fault::Fault;

/// Memory to send, in order, in one call.
pub type SendList = SmallVec<[BufSlice; 16]>;

/// Something happened on a socket, or somebody called.
#[derive(Debug)]
pub enum Event {
    /// Bytes arrived in the buffer of [`Proactor::recv`]; `Ok(0)` is the end of the stream.
    Recv {
        /// As given.
        token: u64,
        /// Bytes, or what went wrong.
        result: io::Result<usize>,
        /// More bytes are probably waiting: to be passed to the next [`Proactor::recv`].
        more: bool,
    },
    /// Bytes of a [`Proactor::send`] went out; perhaps fewer than offered.
    Sent {
        /// As given.
        token: u64,
        /// Bytes, or what went wrong.
        result: io::Result<usize>,
    },
    /// A watched eventfd was rung, or the watch is over.
    Rung {
        /// As given.
        token: u64,
        /// `Err` once, as the last event of the watch.
        result: io::Result<()>,
    },
    /// A [`Proactor::signal`] is done with its descriptor.
    Signalled {
        /// As given.
        token: u64,
    },
    /// An [`Proactor::accept`] ended. Ask again for the next connection.
    Accepted {
        /// As given.
        token: u64,
        /// The connection, close-on-exec and blocking.
        result: io::Result<OwnedFd>,
    },
    /// [`WakeHandle::wake`] was called since the last wait.
    Woken,
}

/// How long [`Proactor::wait`] may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all: take what is there.
    Poll,
    /// Until this monotonic time, nanoseconds ([`now_ns`](crate::now_ns)).
    Until(u64),
    /// Until something happens.
    Forever,
}

/// A driver of I/O for one thread.
///
/// Descriptors given to it must stay open until the operation's event; to end a connection's
/// operations early, `shutdown(2)` the socket, or [`cancel`](Self::cancel).
pub trait Proactor {
    /// Starts an operation. Its `IoDone` comes out of a later [`wait`](Self::wait), exactly
    /// once, failures included. Never blocks; what the kernel cannot take now is queued here.
    fn submit_io(&mut self, op: IoOp);

    /// Receives into `buf`. At most one receive per token at a time. `more` says that bytes
    /// are probably waiting already, `all` that nothing is gained by fewer bytes than `buf` has room for;
    /// both only affect speed, and fewer may come nevertheless.
    fn recv(&mut self, token: u64, fd: RawFd, buf: BufSlice, more: bool, all: bool);

    /// Sends `list`. At most one send per token at a time.
    fn send(&mut self, token: u64, fd: RawFd, list: SendList);

    /// Accepts one connection from a listening socket.
    fn accept(&mut self, token: u64, fd: RawFd);

    /// Reports every ring of an eventfd, several perhaps as one, until [`cancel`](Self::cancel)led
    /// or broken. The watch ends with an event that says so; the descriptor must stay open until
    /// then. Never blocks on the eventfd, whatever another process does with it.
    fn watch(&mut self, token: u64, fd: RawFd);

    /// Rings an eventfd somebody else listens to. The descriptor must stay open until the event
    /// that says so; whether the other side still listens is its own business.
    fn signal(&mut self, token: u64, fd: RawFd);

    /// Asks for the socket operations of `token` to end soon; each still gets its event
    /// (`ECANCELED`, or how it ended before). Does not disturb other users of the socket.
    fn cancel(&mut self, token: u64);

    /// Wakes this thread from others.
    fn wake_handle(&self) -> WakeHandle;

    /// Submits what was asked for and sleeps until something happens, in one system call;
    /// then appends everything that happened and returns the time. An error means that the
    /// driver cannot go on.
    fn wait(
        &mut self,
        wait: Wait,
        events: &mut Vec<Event>,
        dones: &mut Vec<IoDone>,
    ) -> io::Result<u64>;

    /// Block operations submitted and not yet handed back.
    fn io_in_flight(&self) -> usize;

    /// `"io_uring"` or `"threads"`, for logs and status.
    fn backend_name(&self) -> &'static str;
}

/// Which driver to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// io_uring.
    Uring,
    /// A poll loop and helper threads.
    Threads,
}

/// Environment variable that forces a backend: `uring` or `threads`.
pub const BACKEND_ENV: &str = "HEARTH_IO";

/// Why no driver could be opened.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ProactorError {
    /// The forced backend is none we know.
    Unknown(String),
    /// io_uring was asked for and is not there.
    Uring(io::Error),
    /// Not even the fallback works.
    Threads(io::Error),
}

impl ProactorError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ProactorError::Unknown(name) => Fault::new(
                format!("HEARTH_IO is \"{name}\""),
                "use \"uring\" or \"threads\", or leave it unset to choose automatically",
            ),
            ProactorError::Uring(e) => Fault::new(
                format!("io_uring cannot be used here: {e}"),
                "unset HEARTH_IO to fall back to threads, or allow io_uring (kernel.io_uring_disabled=0, seccomp)",
            ),
            ProactorError::Threads(e) => Fault::new(
                format!("cannot set up I/O: {e}"),
                "check the limit on open files",
            ),
        }
    }
}

/// Opens a driver for the calling thread, which alone may use it. `None` chooses: what
/// `HEARTH_IO` says, else io_uring if the kernel allows it, else threads.
pub fn open(
    targets: Arc<Targets>,
    backend: Option<Backend>,
) -> Result<Box<dyn Proactor>, ProactorError> {
    let forced = match backend {
        Some(backend) => Some(backend),
        None => from_env(std::env::var(BACKEND_ENV).ok())?,
    };
    if forced != Some(Backend::Threads) {
        match RingDriver::open(targets.clone()) {
            Ok(ring) => return Ok(Box::new(ring)),
            Err(e) if forced == Some(Backend::Uring) => return Err(ProactorError::Uring(e)),
            Err(e) => tracing::warn!(
                "io_uring cannot be used here ({e}); using threads, which are slower"
            ),
        }
    }
    Ok(Box::new(
        PollDriver::open(targets).map_err(ProactorError::Threads)?,
    ))
}

fn from_env(value: Option<String>) -> Result<Option<Backend>, ProactorError> {
    match value.as_deref() {
        None | Some("" | "auto") => Ok(None),
        Some("uring" | "io_uring") => Ok(Some(Backend::Uring)),
        Some("threads") => Ok(Some(Backend::Threads)),
        Some(other) => Err(ProactorError::Unknown(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_forces_a_backend() {
        assert_eq!(from_env(None).unwrap(), None);
        assert_eq!(
            from_env(Some("threads".into())).unwrap(),
            Some(Backend::Threads)
        );
        assert_eq!(
            from_env(Some("uring".into())).unwrap(),
            Some(Backend::Uring)
        );
        assert!(
            from_env(Some("magic".into()))
                .unwrap_err()
                .to_string()
                .contains("magic")
        );
    }
}
