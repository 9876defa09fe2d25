//! How fast something shrinks and when it will be done.
//!
//! Used for draining dirty blocks. The rate is taken over the last seconds, not since the start,
//! so that the estimate follows a guest that begins or stops writing; while dirty blocks grow
//! faster than they drain there is no estimate, and we say so instead of inventing one.

use std::collections::VecDeque;

/// Nanoseconds over which the rate is taken.
const WINDOW_NS: u64 = 10_000_000_000;
/// Points kept; older ones in the window are thinned out by the minimum distance.
const POINTS_MAX: usize = 64;

/// An estimate at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// What is left.
    pub left: u64,
    /// Units per second by which it shrinks; 0 when it grows or stands still.
    pub rate: f64,
    /// Seconds until nothing is left; `None` when it does not shrink.
    pub eta: Option<f64>,
}

/// Follows a quantity that should reach zero.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    points: VecDeque<(u64, u64)>,
}

impl Progress {
    /// Records that `left` is left at `now_ns` and estimates the rest.
    pub fn update(&mut self, now_ns: u64, left: u64) -> Estimate {
        let far = self
            .points
            .back()
            .is_none_or(|(at, _)| now_ns.saturating_sub(*at) >= WINDOW_NS / POINTS_MAX as u64);
        if far {
            self.points.push_back((now_ns, left));
        }
        // The newest point older than the window stays: the rate then covers the whole window.
        while self.points.len() > 2
            && self
                .points
                .get(1)
                .is_some_and(|(at, _)| now_ns.saturating_sub(*at) >= WINDOW_NS)
        {
            self.points.pop_front();
        }
        while self.points.len() > POINTS_MAX * 2 {
            self.points.pop_front();
        }
        self.estimate(now_ns, left)
    }

    fn estimate(&self, now_ns: u64, left: u64) -> Estimate {
        let (at, before) = self.points.front().copied().unwrap_or((now_ns, left));
        let seconds = now_ns.saturating_sub(at) as f64 / 1e9;
        let rate = if seconds > 0.0 {
            before.saturating_sub(left) as f64 / seconds
        } else {
            0.0
        };
        let eta = match left {
            0 => Some(0.0),
            _ if rate > 0.0 => Some(left as f64 / rate),
            _ => None,
        };
        Estimate { left, rate, eta }
    }
}

/// Seconds for a person: `45 s`, `3 min 20 s`, `2 h 5 min`.
pub fn human_seconds(seconds: f64) -> String {
    let s = seconds.clamp(0.0, 1e9).ceil() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..172_800 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} days", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn steady_drain() {
        let mut p = Progress::default();
        let mut last = p.update(0, 1000);
        assert_eq!(last.eta, None);
        for s in 1..=5 {
            last = p.update(s * SECOND, 1000 - s * 100);
        }
        assert_eq!(
            last,
            Estimate {
                left: 500,
                rate: 100.0,
                eta: Some(5.0)
            }
        );
    }

    #[test]
    fn rate_follows_the_last_seconds() {
        let mut p = Progress::default();
        for s in 0..=100u64 {
            p.update(s * SECOND, 1_000_000);
        }
        let mut last = None;
        for s in 1..=20u64 {
            last = Some(p.update((100 + s) * SECOND, 1_000_000 - s * 1000));
        }
        let last = last.unwrap();
        assert!((last.rate - 1000.0).abs() < 1.0, "{last:?}");
    }

    #[test]
    fn growing_has_no_estimate() {
        let mut p = Progress::default();
        p.update(0, 10);
        assert_eq!(
            p.update(SECOND, 20),
            Estimate {
                left: 20,
                rate: 0.0,
                eta: None
            }
        );
        assert_eq!(p.update(2 * SECOND, 0).eta, Some(0.0));
    }

    #[test]
    fn points_are_bounded() {
        let mut p = Progress::default();
        for i in 0..100_000u64 {
            p.update(i * 1_000_000, 100_000 - i);
        }
        assert!(p.points.len() <= POINTS_MAX * 2 + 1);
    }

    #[test]
    fn seconds_shown() {
        assert_eq!(human_seconds(0.2), "1 s");
        assert_eq!(human_seconds(200.0), "3 min 20 s");
        assert_eq!(human_seconds(7500.0), "2 h 5 min");
        assert_eq!(human_seconds(f64::INFINITY), "11574 days");
    }
}
