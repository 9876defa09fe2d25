//! What is swapped out wears the flash. It is never held up for that, for a page that cannot leave stalls everybody; so if more of it goes out than
//! is to, memory is taken back earlier: less has to be swapped out then.
//!
//! An hour's worth may be saved up. When half of that is gone, the host is treated as the profile `keen` has it (more should be available, idle
//! guests' balloons are taken earlier, pages are shared and compressed before memory is short), until three quarters are there again.

use crate::seen::Seen;

const DAY: f64 = 86_400.0;
const HOUR: f64 = 3_600.0;
/// It begins and ends with so much of an hour's worth left.
const BEGIN: f64 = 0.5;
const END: f64 = 0.75;

/// How much of it is left.
#[derive(Clone, Debug, Default)]
pub struct Wear {
    /// When it was looked last, and what was left then.
    before: Option<(u64, f64)>,
    early: bool,
}

impl Wear {
    /// Looks; true while memory is to be taken back earlier. `per_day` bytes may be swapped out.
    pub fn look(&mut self, seen: &Seen, per_day: Option<u64>) -> bool {
        let Some(per_day) = per_day else {
            *self = Wear::default();
            return false;
        };
        let full = (per_day as f64 / DAY * HOUR).max(1.0);
        let left = match self.before {
            None => full,
            Some((at, left)) => {
                let seconds = seen.at_ms.saturating_sub(at) as f64 / 1e3;
                let more = per_day as f64 / DAY - seen.swap_out as f64;
                // What was too much is not held against it for longer than an hour.
                (left + more * seconds).clamp(-full, full)
            }
        };
        self.before = Some((seen.at_ms, left));
        self.early = left < full * if self.early { END } else { BEGIN };
        self.early
    }

    /// Is it?
    pub fn is_early(&self) -> bool {
        self.early
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MIB;

    fn at(seconds: u64, swap_out: u64) -> Seen {
        Seen {
            at_ms: seconds * 1000,
            swap_out,
            ..Seen::default()
        }
    }

    #[test]
    fn it_begins_with_half_an_hour_s_worth_gone_and_ends_later() {
        let per_day = Some(24 * 3600 * MIB);
        let mut wear = Wear::default();
        assert!(!wear.look(&at(0, 0), per_day));
        // As much as may be goes out: that can go on for ever.
        for n in 1..100 {
            assert!(!wear.look(&at(n * 1000, MIB), per_day));
        }
        // Twice as much: an hour's worth lasts for an hour, half of it for half of one.
        let from = 99_000;
        assert!(!wear.look(&at(from + 1700, 2 * MIB), per_day));
        assert!(wear.look(&at(from + 1900, 2 * MIB), per_day));
        // Not more than before is no reason to end at once.
        assert!(wear.look(&at(from + 2000, 0), per_day));
        assert!(wear.is_early());
        assert!(!wear.look(&at(from + 4000, 0), per_day));
        // A flood is not held against it for days.
        assert!(wear.look(&at(from + 4001, 1 << 40), per_day));
        assert!(!wear.look(&at(from + 4001 + 2 * 3600, 0), per_day));
    }

    #[test]
    fn without_a_limit_it_never_does() {
        let mut wear = Wear::default();
        for n in 0..10 {
            assert!(!wear.look(&at(n, u64::MAX), None));
        }
        assert!(!wear.look(&at(10, 0), Some(0)), "nothing went out");
        assert!(wear.look(&at(11, 1 << 20), Some(0)));
    }
}
