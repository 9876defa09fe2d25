//! How a mirror is copied to and scrubbed, as somebody has asked, and what scrubs have found: what is kept over a restart,
//! and may be lost without harm.

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Days between scrubs unless something else is asked for.
pub const EVERY_DAYS: u32 = 30;
const DAY_MS: u64 = 86_400_000;

/// What time it is, in milliseconds since 1970.
pub type Wall = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The time of this host.
pub fn host_time() -> Wall {
    Arc::new(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
    })
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Habits {
    /// Bytes a second that are copied at most; 0 is no limit.
    pub rate: u64,
    /// Nothing is copied to legs that lack something.
    pub paused: bool,
    /// Bytes of the disk a second that a scrub compares at most; 0 is no limit.
    pub scrub_rate: u64,
    /// Days from one scrub to the next; 0: only when asked for.
    pub every_days: u32,
    /// The scrub under way, or the last one.
    pub scrub: ScrubState,
}

impl Default for Habits {
    fn default() -> Habits {
        Habits {
            rate: 0,
            paused: false,
            scrub_rate: crate::machine::SCRUB_RATE,
            every_days: EVERY_DAYS,
            scrub: ScrubState::default(),
        }
    }
}

impl Habits {
    /// Is it time for a scrub that nobody has to ask for?
    pub fn is_due(&self, now_ms: u64) -> bool {
        let between = u64::from(self.every_days) * DAY_MS;
        between > 0 && !self.scrub.active && now_ms >= self.scrub.ended_ms.saturating_add(between)
    }

    /// The last scrub cannot have ended later than now: the clock was wrong then, or is now. Either way what lies between
    /// two is counted from here, or the next one might not come for years. True if that changes something.
    pub fn believe_clock(&mut self, now_ms: u64) -> bool {
        let wrong = self.scrub.ended_ms > now_ms;
        if wrong {
            self.scrub.ended_ms = now_ms;
        }
        wrong
    }
}

/// A scrub under way, or the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScrubState {
    /// It goes on, also after a restart.
    pub active: bool,
    /// Somebody called it off before it was through; it can be gone on with.
    pub called_off: bool,
    /// When it began, milliseconds since 1970; 0: there was none yet.
    pub began_ms: u64,
    /// When it ended, or when nothing had been scrubbed yet.
    pub ended_ms: u64,
    /// All before here is done.
    pub at: u64,
    /// Bytes looked at.
    pub checked: u64,
    /// Of these, so many that not all legs took part in.
    pub partial: u64,
    /// Of these, so many that no leg could read.
    pub unread: u64,
    /// Places that were repaired.
    pub repairs: u64,
    /// Bytes of them.
    pub repaired: u64,
    /// Where legs differ and nothing tells which one is right; of very many, the first.
    pub undecided: Vec<Undecided>,
    /// How many there are.
    pub undecided_all: u64,
}

/// A place where legs differ, or the cache differs from all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undecided {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The legs, and the CRC32C of the first block that each holds there.
    pub legs: Vec<(String, u32)>,
    /// The legs hold the same, and what is cached is something else.
    pub cached: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = DAY_MS;

    #[test]
    fn monthly_by_default_and_never_while_one_goes_on() {
        let mut habits = Habits::default();
        habits.scrub.ended_ms = 100 * DAY;
        assert!(!habits.is_due(100 * DAY) && !habits.is_due(130 * DAY - 1));
        assert!(habits.is_due(130 * DAY));
        habits.scrub.active = true;
        assert!(!habits.is_due(u64::MAX));
        habits.scrub.active = false;
        habits.every_days = 7;
        assert!(!habits.is_due(107 * DAY - 1) && habits.is_due(107 * DAY));
        habits.every_days = 0;
        assert!(!habits.is_due(u64::MAX));
    }

    #[test]
    fn a_clock_that_was_years_ahead_does_not_put_scrubs_off_for_years() {
        let mut habits = Habits::default();
        habits.scrub.ended_ms = 40_000 * DAY;
        assert!(habits.believe_clock(20_000 * DAY));
        assert!(!habits.is_due(20_030 * DAY - 1) && habits.is_due(20_030 * DAY));
        assert!(!habits.believe_clock(20_001 * DAY));
    }
}
