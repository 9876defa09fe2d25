//! The end of the service, as something a part can wait for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Told once, seen by everybody.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<(Mutex<bool>, Condvar)>);

impl Stop {
    /// The service is to end.
    pub fn tell(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    /// True once it is.
    pub fn is_told(&self) -> bool {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits so long, or until the service is to end: then true.
    pub fn wait(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut told = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !*told {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.0.1.wait_timeout(told, left);
            told = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until the service is to end.
    pub fn wait_for_it(&self) {
        let told = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let told = self.0.1.wait_while(told, |told| !*told);
        drop(told.unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_is_woken() {
        let stop = Stop::default();
        assert!(!stop.wait(Duration::ZERO));
        let waits = stop.clone();
        let waiting = std::thread::spawn(move || waits.wait(Duration::from_secs(600)));
        stop.tell();
        assert!(waiting.join().unwrap());
        stop.wait_for_it();
        assert!(stop.is_told());
    }
}
