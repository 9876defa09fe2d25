//! Whether a thread sleeps, so that whoever wants to wake it knows whether to ring.
//!
//! Ringing is a system call, a thread is woken often and sleeps seldom. So it says that it is going to
//! sleep, and who wakes it rings only then, once per sleep. The order that must not change: the sleeper
//! looks for a call *after* it said so, the caller says so *before* it looks whether to ring. Either of
//! them then sees the other.

use crate::sync::{AtomicU8, Ordering};

const RUNNING: u8 = 0;
const ASLEEP: u8 = 1;
const NOTIFIED: u8 = 2;

/// See the module. Without the bell itself, so that a test can try every order of steps.
#[derive(Debug)]
pub(crate) struct Doze(AtomicU8);

impl Doze {
    pub(crate) fn new() -> Doze {
        Doze(AtomicU8::new(RUNNING))
    }

    /// Calls the owner; true if the bell has to be rung, because it sleeps or is about to.
    pub(crate) fn call(&self) -> bool {
        self.0.swap(NOTIFIED, Ordering::SeqCst) == ASLEEP
    }

    /// Says that the owner is about to sleep; false if a call came first: it must not.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.0
            .compare_exchange(RUNNING, ASLEEP, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// Says that the owner runs again; true if it was called since this was last asked.
    pub(crate) fn awake(&self) -> bool {
        // The plain load keeps the hot path free of an exchange when nothing happened.
        self.0.load(Ordering::SeqCst) != RUNNING
            && self.0.swap(RUNNING, Ordering::SeqCst) == NOTIFIED
    }
}
