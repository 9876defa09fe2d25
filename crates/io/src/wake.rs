//! Waking a thread that sleeps in the kernel, at the cost of nothing while it is awake.
//!
//! Writing an eventfd is a system call. A data thread is woken by other threads often and
//! sleeps seldom, so the handle keeps a small state ([`Doze`]) and writes only to a thread that said it
//! was going to sleep, once per sleep.

use crate::doze::Doze;
use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    doze: Doze,
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
            doze: Doze::new(),
        })))
    }

    /// Makes the thread's current or next wait return [`Event::Woken`](crate::Event::Woken).
    /// What was written to shared memory before is seen by the thread after that.
    pub fn wake(&self) {
        if self.0.doze.call() {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes; the descriptor lives as long as `self`. It cannot
            // fail: one write per sleep never comes near the counter's limit.
            unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Says that the owner is about to sleep; false if a wake came first: it must not.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.0.doze.prepare_sleep()
    }

    /// Says that the owner runs again; true if it was woken since this was last called.
    pub(crate) fn awake(&self) -> bool {
        self.0.doze.awake()
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
