//! What happened lately: windows over counters that only grow.
//!
//! A hit ratio over a daemon's whole life says nothing about today. So the daemon takes a
//! snapshot of all counters at regular times and keeps a bounded ring of them per window;
//! a window's value is the newest counters minus the oldest snapshot inside the window.
//! Memory is bounded: 30 + 60 + 96 snapshots, whatever the uptime. Snapshots that are equal are kept once: with
//! thousands of disks, most of them idle, they would take more than all else that is known of a disk.

use std::collections::VecDeque;
use std::sync::Arc;

/// Counters of which a part of the past can be cut off.
pub trait Since: Clone + PartialEq {
    /// What was counted after `earlier`, an older value of the same counters.
    fn since(&self, earlier: &Self) -> Self;
}

/// A window the daemon offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Name in the API and the command line.
    pub name: &'static str,
    /// Length in seconds.
    pub seconds: u64,
    /// Seconds between two snapshots: the window's length is right to within this.
    pub step: u64,
}

/// The windows: 5 minutes, 1 hour, 1 day, as bcache's users know them.
pub const SPANS: [Span; 3] = [
    Span {
        name: "5min",
        seconds: 300,
        step: 10,
    },
    Span {
        name: "1h",
        seconds: 3600,
        step: 60,
    },
    Span {
        name: "1d",
        seconds: 86_400,
        step: 900,
    },
];

#[derive(Clone, Debug)]
struct Ring<T> {
    span: Span,
    /// Snapshots with the second they were taken at, oldest first.
    taken: VecDeque<(u64, Arc<T>)>,
}

/// The rings of one disk, or of the pool.
#[derive(Clone, Debug)]
pub struct Windows<T> {
    rings: Vec<Ring<T>>,
}

/// One window's value.
#[derive(Clone, Debug, PartialEq)]
pub struct Window<T> {
    /// Which window.
    pub span: Span,
    /// Seconds it really covers: less than the span shortly after a start.
    pub covered: u64,
    /// What was counted in it.
    pub value: T,
}

impl<T: Since> Windows<T> {
    /// Windows that begin at second `now` with the counters at `start`.
    pub fn new(now: u64, start: T) -> Windows<T> {
        let start = Arc::new(start);
        let rings = SPANS
            .iter()
            .map(|&span| Ring {
                span,
                taken: VecDeque::from([(now, start.clone())]),
            })
            .collect();
        Windows { rings }
    }

    /// True if [`sample`](Self::sample) at second `now` would keep a snapshot. Lets the caller
    /// avoid collecting counters that nobody keeps.
    pub fn due(&self, now: u64) -> bool {
        self.rings.iter().any(|ring| ring.due(now))
    }

    /// Offers the counters at second `now`; kept where a ring's step has passed.
    pub fn sample(&mut self, now: u64, value: &T) {
        if !self.due(now) {
            return;
        }
        let same = self.newest_kept().filter(|kept| ***kept == *value);
        let value = same.cloned().unwrap_or_else(|| Arc::new(value.clone()));
        for ring in &mut self.rings {
            if ring.due(now) {
                ring.taken.push_back((now, value.clone()));
                ring.trim(now);
            }
        }
    }

    /// The newest snapshot kept.
    pub fn newest(&self) -> Option<&T> {
        self.newest_kept().map(|value| &**value)
    }

    fn newest_kept(&self) -> Option<&Arc<T>> {
        let all = self.rings.iter().filter_map(|ring| ring.taken.back());
        all.max_by_key(|(at, _)| *at).map(|(_, value)| value)
    }

    /// Every window's value at second `now`, when the counters stand at `value`.
    pub fn values(&self, now: u64, value: &T) -> Vec<Window<T>> {
        self.rings
            .iter()
            .map(|ring| {
                let start = ring
                    .taken
                    .iter()
                    .find(|(at, _)| now.saturating_sub(*at) <= ring.span.seconds);
                match start.or(ring.taken.back()) {
                    Some((at, earlier)) => Window {
                        span: ring.span,
                        covered: now.saturating_sub(*at),
                        value: value.since(earlier),
                    },
                    None => Window {
                        span: ring.span,
                        covered: 0,
                        value: value.since(value),
                    },
                }
            })
            .collect()
    }
}

impl<T> Ring<T> {
    fn due(&self, now: u64) -> bool {
        self.taken
            .back()
            .is_none_or(|(at, _)| now >= at + self.span.step)
    }

    fn trim(&mut self, now: u64) {
        while self.taken.len() > 1
            && self
                .taken
                .front()
                .is_some_and(|(at, _)| now.saturating_sub(*at) > self.span.seconds)
        {
            self.taken.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Count(u64);

    impl Since for Count {
        fn since(&self, earlier: &Count) -> Count {
            Count(self.0 - earlier.0)
        }
    }

    #[test]
    fn windows_forget_what_is_older() {
        let mut windows = Windows::new(0, Count(0));
        // One event a second for two days.
        for now in 1..=2 * 86_400 {
            windows.sample(now, &Count(now));
        }
        let now = 2 * 86_400;
        for window in windows.values(now, &Count(now)) {
            let Count(n) = window.value;
            assert_eq!(n, window.covered);
            assert!(
                n <= window.span.seconds && n + window.span.step > window.span.seconds,
                "{window:?}"
            );
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut windows = Windows::new(0, Count(0));
        for now in 1..=100_000 {
            windows.sample(now, &Count(now));
        }
        for ring in &windows.rings {
            assert!(ring.taken.len() as u64 <= ring.span.seconds / ring.span.step + 1);
        }
    }

    #[test]
    fn what_stands_still_is_kept_once() {
        let mut windows = Windows::new(0, Count(0));
        let kept = |windows: &Windows<Count>| {
            let all = windows.rings.iter().flat_map(|ring| &ring.taken);
            let places = all.map(|(_, value)| Arc::as_ptr(value));
            places.collect::<std::collections::BTreeSet<_>>().len()
        };
        for now in 1..=100_000 {
            windows.sample(now, &Count(0));
        }
        assert_eq!(kept(&windows), 1);
        windows.sample(101_000, &Count(9));
        assert_eq!(kept(&windows), 2);
        assert_eq!(windows.newest(), Some(&Count(9)));
    }

    #[test]
    fn a_young_daemon_says_how_much_it_covers() {
        let mut windows = Windows::new(1000, Count(5));
        windows.sample(1003, &Count(7));
        let values = windows.values(1004, &Count(9));
        assert!(values.iter().all(|w| w.covered == 4 && w.value == Count(4)));
    }

    #[test]
    fn a_long_pause_shows_only_what_is_known() {
        let mut windows = Windows::new(0, Count(0));
        windows.sample(10, &Count(10));
        // Suspended for a week: the last snapshot is older than every window.
        let week = 7 * 86_400;
        let values = windows.values(week, &Count(12));
        assert_eq!(values[0].value, Count(2));
        windows.sample(week, &Count(12));
        assert_eq!(windows.values(week + 1, &Count(13))[0].value, Count(1));
    }

    #[test]
    fn a_clock_that_steps_back_is_harmless() {
        let mut windows = Windows::new(100, Count(0));
        windows.sample(50, &Count(1));
        assert_eq!(windows.values(50, &Count(1))[0].covered, 0);
    }
}
