//! How much more can be promised.
//!
//! A write into a hole is answered from flash, and its place on the file system is taken much later. If there is none
//! left by then, what was answered could never be written back. So such writes are taken only while the file system has room for
//! all that is dirty. What is free is asked for now and then; in between, what was taken is counted, overwrites of
//! the same place twice: too much is better than too little.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Left alone: what a file system needs for itself when it writes what is dirty.
const SLACK: u64 = 4 << 20;
/// How long an answer of the file system is good for.
const FRESH: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct State {
    left: u64,
    asked: Option<Instant>,
}

impl State {
    fn take(&mut self, len: u64) -> bool {
        let left = self.left.checked_sub(len);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Budget(Mutex<State>);

impl Budget {
    /// Takes `len` bytes, if there are so many. `find` tells what is free and what is dirty.
    pub fn take(&self, len: u64, find: impl Fn() -> Option<(u64, u64)>) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = state.asked.is_some_and(|at| at.elapsed() < FRESH);
        if !fresh || state.left < len {
            let Some((free, dirty)) = find() else {
                return false;
            };
            state.left = free.saturating_sub(dirty).saturating_sub(SLACK);
            state.asked = Some(Instant::now());
        }
        state.take(len)
    }

    /// The same, if nobody has to be asked.
    pub fn take_known(&self, len: u64) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.asked.is_some_and(|at| at.elapsed() < FRESH) && state.take(len)
    }
}

#[cfg(test)]
mod tests {
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
}
