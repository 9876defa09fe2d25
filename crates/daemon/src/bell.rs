//! Waiting for what other threads bring about.
//!
//! Control operations wait for things that data threads do: what is in flight ends, the last dirty block
//! reaches its origin, a client is gone. Asking every few milliseconds costs while nothing happens and is
//! late when something does. So who changes something rings, and who waits looks when it rang. A data
//! thread rings thousands of times a second: that costs it one load while nobody listens, and a listener
//! hears at most one ring per look, and looks no more often than it says.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// What is rung when something has happened.
#[derive(Debug)]
pub(crate) struct Bell {
    rung: Mutex<u64>,
    heard: Condvar,
    /// Somebody has looked, or is about to, and is to hear of what happens next.
    wanted: AtomicBool,
}

impl Default for Bell {
    fn default() -> Bell {
        Bell {
            rung: Mutex::new(0),
            heard: Condvar::new(),
            wanted: AtomicBool::new(false),
        }
    }
}

impl Bell {
    /// Something has happened, and can be seen by who looks. Where that is seen under a lock, nobody who
    /// listens misses it: either they look later than it happened, or they had said before that they
    /// listen.
    pub(crate) fn ring(&self) {
        if self.wanted.load(Ordering::SeqCst) && self.wanted.swap(false, Ordering::SeqCst) {
            *self.rung.lock().unwrap_or_else(|e| e.into_inner()) += 1;
            self.heard.notify_all();
        }
    }

    /// Looks again and again, each time after it rang, until something is found; at most for `limit`, and
    /// with at least `pace` between two looks.
    pub(crate) fn wait<T>(
        &self,
        limit: Duration,
        pace: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + limit;
        loop {
            let lock = || self.rung.lock().unwrap_or_else(|e| e.into_inner());
            let seen = *lock();
            self.wanted.store(true, Ordering::SeqCst);
            if let Some(found) = look() {
                return Some(found);
            }
            let next = Instant::now() + pace;
            let mut rung = lock();
            loop {
                let now = Instant::now();
                if now >= end {
                    return None;
                }
                let until = match *rung != seen {
                    true if now >= next => break,
                    true => end.min(next),
                    false => end,
                };
                let waited = self.heard.wait_timeout(rung, until - now);
                rung = waited.unwrap_or_else(|e| e.into_inner()).0;
            }
        }
    }
}
