//! How much more can be promised.
//!
//! A write into a hole is answered from flash, and its place on the file system is taken much later. If there is none
//! left by then, what was answered could never be written back. So such writes are taken only while the file system has room for
//! all that is dirty. What is free is asked for now and then; in between, what was taken is counted, overwrites of
//! the same place twice: too much is better than too little.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Left alone: what a file system needs for itself when it writes what is dirty.
const SLACK: u64 = 4 << 20;
/// How long an answer of the file system is good for.
const FRESH: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct State {
    left: u64,
    asked: Option<Instant>,
    /// All that was taken, ever.
    taken: u64,
}

impl State {
    fn take(&mut self, len: u64) -> bool {
        let left = self.left.checked_sub(len);
        self.left = left.unwrap_or(self.left);
        if left.is_some() {
            self.taken += len;
        }
        left.is_some()
    }

    fn is_fresh(&self) -> bool {
        self.asked.is_some_and(|at| at.elapsed() < FRESH)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Budget(Mutex<State>);

impl Budget {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `len` bytes, if there are so many. `find` tells what is free and what is dirty; it may hang, as a file system does, and keeps
    /// nobody else.
    pub fn take(&self, len: u64, find: impl Fn() -> Option<(u64, u64)>) -> bool {
        let taken = {
            let mut state = self.lock();
            if state.is_fresh() && state.take(len) {
                return true;
            }
            state.taken
        };
        let begun = Instant::now();
        let Some((free, dirty)) = find() else {
            return false;
        };
        let mut state = self.lock();
        // Somebody who asked meanwhile knows as much.
        if state.asked.is_none_or(|at| at <= begun) {
            // What others took while this asked may not be dirty yet.
            let meanwhile = state.taken - taken;
            let left = free.saturating_sub(dirty).saturating_sub(SLACK);
            state.left = left.saturating_sub(meanwhile);
            state.asked = Some(Instant::now());
        }
        state.take(len)
    }

    /// The same, if nobody has to be asked.
    pub fn take_known(&self, len: u64) -> bool {
        let mut state = self.lock();
        state.is_fresh() && state.take(len)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_is_dirty_is_taken_already() {
        let budget = Budget::default();
        let free = |free: u64, dirty: u64| move || Some((SLACK + free, dirty));
        assert!(!budget.take_known(1));
        assert!(budget.take(4096, free(8192, 0)));
        // Not asked again as long as there is enough.
        assert!(budget.take(4096, || None));
        assert!(!budget.take(4096, free(8192, 8192)));
        assert!(budget.take(4096, free(8192, 4096)));
        assert!(!budget.take(1, || None));
        assert!(!budget.take_known(1));
    }

    /// The thread that serves all clients asks this, and a file system that hangs must not hold it up.
    #[test]
    fn what_hangs_keeps_nobody_who_has_nothing_to_ask() {
        let budget = Arc::new(Budget::default());
        assert!(budget.take(1, || Some((SLACK + 10, 0))));
        let ((asks, asked), (go, gone)) = (channel(), channel::<()>());
        let (hung, other) = (Arc::clone(&budget), Arc::clone(&budget));
        let hangs = std::thread::spawn(move || {
            hung.take(100, || {
                asks.send(()).unwrap();
                let _ = gone.recv();
                Some((SLACK + 102, 0))
            })
        });
        asked.recv().unwrap();
        let (tell, told) = channel();
        std::thread::spawn(move || tell.send(other.take_known(3)));
        let in_time = told.recv_timeout(Duration::from_secs(60));
        go.send(()).unwrap();
        // Three more were taken if that was so soon that what is known was good.
        let taken = in_time.expect("it waits for who hangs");
        assert_eq!(hangs.join().unwrap(), !taken);
    }
}
