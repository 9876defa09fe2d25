//! What happened lately: windows over counters that only grow.
//!
//! A hit ratio over a daemon's whole life says nothing about today. So the daemon takes a
//! snapshot of all counters at regular times and keeps a bounded ring of them per window;
//! a window's value is the newest counters minus the oldest snapshot inside the window.
//! Memory is bounded: 30 + 60 + 96 snapshots, whatever the uptime. Of counters that stand still one snapshot is
//! kept, and from when to when they stood there: with thousands of disks, most of them idle, rings full of equal
//! snapshots would take more than all else that is known of a disk.

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

/// What the counters stood at for a while.
#[derive(Clone, Debug)]
struct Stand<T> {
    /// Second of the first snapshot that showed it, and of the last.
    first: u64,
    last: u64,
    value: Arc<T>,
}

#[derive(Clone, Debug)]
struct Ring<T> {
    /// Oldest first.
    taken: VecDeque<Stand<T>>,
}

/// The rings of one disk, or of the pool, one for each of [`SPANS`].
#[derive(Clone, Debug)]
pub struct Windows<T> {
    rings: [Ring<T>; SPANS.len()],
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
        Windows::starting(now, &Arc::new(start))
    }

    /// The same, with a start that others have as well.
    pub fn starting(now: u64, start: &Arc<T>) -> Windows<T> {
        let stand = || Stand {
            first: now,
            last: now,
            value: start.clone(),
        };
        let rings = SPANS.map(|_| Ring {
            taken: VecDeque::from([stand()]),
        });
        Windows { rings }
    }

    fn all(&self) -> impl Iterator<Item = (&Span, &Ring<T>)> {
        SPANS.iter().zip(&self.rings)
    }

    /// True if [`sample`](Self::sample) at second `now` would keep a snapshot. Lets the caller
    /// avoid collecting counters that nobody keeps.
    pub fn due(&self, now: u64) -> bool {
        self.all().any(|(span, ring)| ring.due(span, now))
    }

    /// Offers the counters at second `now`; kept where a ring's step has passed.
    pub fn sample(&mut self, now: u64, value: &T) {
        if !self.due(now) {
            return;
        }
        let same = self.newest_kept().filter(|kept| ***kept == *value);
        let value = same.cloned().unwrap_or_else(|| Arc::new(value.clone()));
        for (span, ring) in SPANS.iter().zip(&mut self.rings) {
            if ring.due(span, now) {
                ring.take(span, now, &value);
            }
        }
    }

    /// The newest snapshot kept.
    pub fn newest(&self) -> Option<&T> {
        self.newest_kept().map(|value| &**value)
    }

    fn newest_kept(&self) -> Option<&Arc<T>> {
        let all = self.rings.iter().filter_map(|ring| ring.taken.back());
        all.max_by_key(|stand| stand.last).map(|stand| &stand.value)
    }

    /// Every window's value at second `now`, when the counters stand at `value`.
    pub fn values(&self, now: u64, value: &T) -> Vec<Window<T>> {
        self.all()
            .map(|(&span, ring)| {
                let inside = |at: u64| now.saturating_sub(at) <= span.seconds;
                let start = ring.taken.iter().find(|stand| inside(stand.last));
                match start.or(ring.taken.back()) {
                    Some(stand) => Window {
                        span,
                        // They stood there all the time in between.
                        covered: match now.saturating_sub(stand.last) {
                            long if long > span.seconds => long,
                            _ => now.saturating_sub(stand.first).min(span.seconds),
                        },
                        value: value.since(&stand.value),
                    },
                    None => Window {
                        span,
                        covered: 0,
                        value: value.since(value),
                    },
                }
            })
            .collect()
    }
}

impl<T> Ring<T> {
    fn due(&self, span: &Span, now: u64) -> bool {
        let newest = self.taken.back();
        newest.is_none_or(|stand| now >= stand.last + span.step)
    }

    /// Keeps a snapshot.
    fn take(&mut self, span: &Span, now: u64, value: &Arc<T>) {
        match self.taken.back_mut() {
            Some(stand) if Arc::ptr_eq(&stand.value, value) => stand.last = now,
            _ => self.taken.push_back(Stand {
                first: now,
                last: now,
                value: value.clone(),
            }),
        }
        let old = |stand: &Stand<T>| now.saturating_sub(stand.last) > span.seconds;
        while self.taken.len() > 1 && self.taken.front().is_some_and(old) {
            self.taken.pop_front();
        }
        // A ring that was full, and stands still now.
        if self.taken.len() == 1 {
            self.taken.shrink_to_fit();
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
        for (span, ring) in windows.all() {
            assert!(ring.taken.len() as u64 <= span.seconds / span.step + 1);
        }
    }

    #[test]
    fn what_stands_still_is_kept_once() {
        let mut windows = Windows::new(0, Count(0));
        let kept = |windows: &Windows<Count>| {
            let all = windows.rings.iter().flat_map(|ring| &ring.taken);
            let places = all.map(|stand| Arc::as_ptr(&stand.value));
            places.collect::<std::collections::BTreeSet<_>>().len()
        };
        for now in 1..=100_000 {
            windows.sample(now, &Count(0));
        }
        assert_eq!(kept(&windows), 1);
        assert!(windows.rings.iter().all(|ring| ring.taken.len() == 1));
        for window in windows.values(100_000, &Count(0)) {
            assert_eq!(window.covered, window.span.seconds);
        }
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
