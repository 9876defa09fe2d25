//! Waking a thread that sleeps in the kernel, at the cost of nothing while it is awake.
//!
//! Writing an eventfd is a system call. A data thread is woken by other threads often and
//! sleeps seldom, so the handle keeps a small state and writes only to a thread that said it
//! was going to sleep, once per sleep.

use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const RUNNING: u8 = 0;
const ASLEEP: u8 = 1;
const NOTIFIED: u8 = 2;

#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    state: AtomicU8,
}

/// Wakes one data thread from any thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct WakeHandle(Arc<Inner>);

impl WakeHandle {
    pub(crate) fn new() -> io::Result<WakeHandle> {
        // SAFETY: plain numbers.
        let fd = sys::check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })?;
        // SAFETY: a descriptor just made by the kernel, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(WakeHandle(Arc::new(Inner {
            fd,
            state: AtomicU8::new(RUNNING),
        })))
    }

    /// Makes the thread's current or next wait return [`Event::Woken`](crate::Event::Woken).
    /// What was written to shared memory before is seen by the thread after that.
    pub fn wake(&self) {
        if self.0.state.swap(NOTIFIED, Ordering::SeqCst) == ASLEEP {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes; the descriptor lives as long as `self`. It cannot
            // fail: one write per sleep never comes near the counter's limit.
            unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Says that the owner is about to sleep; false if a wake came first: it must not.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.0
            .state
            .compare_exchange(RUNNING, ASLEEP, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// Says that the owner runs again; true if it was woken since this was last called.
    pub(crate) fn awake(&self) -> bool {
        // The plain load keeps the hot path free of an exchange when nothing happened.
        self.0.state.load(Ordering::SeqCst) != RUNNING
            && self.0.state.swap(RUNNING, Ordering::SeqCst) == NOTIFIED
    }

    /// True if both wake the same thread.
    pub(crate) fn same(&self, other: &WakeHandle) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The eventfd, to read while asleep.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }
}
