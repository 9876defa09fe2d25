//! Whether to look again before sleeping.
//!
//! A thread that sleeps is woken by an interrupt, which costs microseconds; a thread that looks
//! costs a processor. So the time spent looking follows what it gained last time: work that
//! came soon after the thread fell asleep makes it longer, a long sleep makes it shorter, down
//! to nothing. An idle daemon therefore sleeps as if polling did not exist.

use std::time::Duration;

/// Where looking begins once it seems worth while.
const FIRST_NS: u64 = 4_000;

/// See the module.
pub(crate) struct Polling {
    max_ns: u64,
    /// How long to look just now.
    window_ns: u64,
    /// Look until then.
    until: u64,
    slept_at: u64,
}

impl Polling {
    pub(crate) fn new(max: Duration) -> Polling {
        Polling {
            max_ns: max.as_nanos().min(u128::from(u64::MAX / 2)) as u64,
            window_ns: 0,
            until: 0,
            slept_at: 0,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.max_ns > 0
    }

    /// True if the thread should look again instead of sleeping. `seen`: this round found work;
    /// `slept`: it began with a sleep.
    pub(crate) fn goes_on(&mut self, now: u64, seen: bool, slept: bool) -> bool {
        if !self.is_on() {
            return false;
        }
        if slept {
            let asleep = now.saturating_sub(self.slept_at);
            self.window_ns = if seen && asleep <= self.max_ns {
                (self.window_ns * 2).clamp(FIRST_NS, self.max_ns.max(FIRST_NS))
            } else if self.window_ns <= FIRST_NS {
                0
            } else {
                self.window_ns / 2
            };
        }
        if seen {
            self.until = now + self.window_ns;
        }
        let look = now < self.until;
        if !look {
            self.slept_at = now;
        }
        look
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_means_off() {
        let mut polling = Polling::new(Duration::ZERO);
        assert!(!polling.is_on());
        assert!(!polling.goes_on(1, true, true));
    }

    #[test]
    fn work_that_comes_soon_is_worth_looking_for() {
        let mut polling = Polling::new(Duration::from_micros(50));
        assert!(!polling.goes_on(0, true, false), "nothing is known yet");
        let mut now = 10_000;
        for _ in 0..8 {
            assert!(polling.goes_on(now, true, true), "work came soon");
            now += polling.window_ns;
            assert!(!polling.goes_on(now, false, false), "the window is over");
            now += 5_000;
        }
        assert_eq!(polling.window_ns, 50_000);
    }

    #[test]
    fn long_sleeps_end_it() {
        let mut polling = Polling::new(Duration::from_micros(50));
        polling.window_ns = 50_000;
        let mut now = 0;
        let mut rounds = 0;
        while polling.window_ns > 0 {
            now += 1_000_000_000;
            polling.goes_on(now, true, true);
            polling.until = 0;
            polling.goes_on(now, false, false);
            rounds += 1;
            assert!(rounds < 8);
        }
        assert!(!polling.goes_on(now + 1_000_000_000, true, true));
    }
}
