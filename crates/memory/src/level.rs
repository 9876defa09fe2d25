//! How short memory is: five levels, with the names that ESXi has for them.
//!
//! A level becomes worse at once and better slowly, one step at a time and past the threshold by a margin: what helps
//! against pressure makes it look as if there had never been any.

use serde::{Deserialize, Serialize};

use crate::config::MIN_FREE_PERCENT;
use crate::seen::Seen;

/// Later ones are worse.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// There is plenty.
    #[default]
    High,
    /// There is as much as there should be.
    Clear,
    /// Less: balloons take it back from guests that do not use it.
    Soft,
    /// Much less: compression and swap, of idle guests first.
    Hard,
    /// Next to nothing.
    Low,
}

/// In the order in which they become worse.
const ALL: [Level; 5] = [
    Level::High,
    Level::Clear,
    Level::Soft,
    Level::Hard,
    Level::Low,
];
/// How long it must be better before it counts as one step better.
pub const SETTLE_MS: u64 = 10_000;
/// By how much a threshold must be passed on the way to better.
const MARGIN: f64 = 1.25;
/// Waiting, in percent of the time, that is more than a passing one.
const SOME_SOFT: f64 = 8.0;
const FULL_SOFT: f64 = 3.0;
/// And that is felt by everybody.
const SOME_HARD: f64 = 30.0;
const FULL_HARD: f64 = 10.0;
/// The same for bytes read back from swap each second, where the kernel does not tell of waiting.
const SWAP_IN_SOFT: u64 = 2 << 20;
const SWAP_IN_HARD: u64 = 16 << 20;

impl Level {
    /// As it is shown.
    pub fn word(self) -> &'static str {
        match self {
            Level::High => "high",
            Level::Clear => "clear",
            Level::Soft => "soft",
            Level::Hard => "hard",
            Level::Low => "low",
        }
    }

    fn better(self) -> Level {
        ALL[(self as usize).saturating_sub(1)]
    }
}

/// Bytes that should be available.
pub fn wanted(total: u64) -> u64 {
    (total as f64 * MIN_FREE_PERCENT / 100.0) as u64
}

/// What the figures of one moment say; with `margin` above 1 they have to say more for a better level.
fn of(seen: &Seen, margin: f64) -> Level {
    let wanted = wanted(seen.total) as f64 * margin;
    let available = seen.available as f64;
    let by_room = if available >= 2.0 * wanted {
        Level::High
    } else if available >= wanted {
        Level::Clear
    } else if available >= wanted / 2.0 {
        Level::Soft
    } else if available >= wanted / 4.0 {
        Level::Hard
    } else {
        Level::Low
    };
    // Who waits for memory while there is plenty waits at a limit of his own, and no guest can help him.
    if available >= 4.0 * wanted {
        return by_room;
    }
    by_room.max(by_waiting(seen, margin))
}

fn by_waiting(seen: &Seen, margin: f64) -> Level {
    let pick = |hard: bool, soft: bool| match (hard, soft) {
        (true, _) => Level::Hard,
        (_, true) => Level::Soft,
        _ => Level::High,
    };
    match seen.pressure {
        Some(p) => pick(
            p.some * margin >= SOME_HARD || p.full * margin >= FULL_HARD,
            p.some * margin >= SOME_SOFT || p.full * margin >= FULL_SOFT,
        ),
        None => {
            let rate = seen.swap_in as f64 * margin;
            pick(rate >= SWAP_IN_HARD as f64, rate >= SWAP_IN_SOFT as f64)
        }
    }
}

/// Does waiting say that memory is short, whatever the figures say?
pub fn waits(seen: &Seen) -> bool {
    let plenty = 4 * wanted(seen.total);
    seen.available < plenty && by_waiting(seen, 1.0) >= Level::Soft
}

/// The level over time.
#[derive(Clone, Debug, Default)]
pub struct Gauge {
    level: Level,
    /// Since when it is better than that.
    better_since: Option<u64>,
    /// Since when the level is what it is.
    since: u64,
}

impl Gauge {
    /// Looks.
    pub fn look(&mut self, seen: &Seen) -> Level {
        let now = of(seen, 1.0);
        if now > self.level {
            (self.level, self.since, self.better_since) = (now, seen.at_ms, None);
        } else if of(seen, MARGIN) >= self.level {
            self.better_since = None;
        } else {
            let since = *self.better_since.get_or_insert(seen.at_ms);
            if seen.at_ms.saturating_sub(since) >= SETTLE_MS {
                (self.level, self.since, self.better_since) =
                    (self.level.better(), seen.at_ms, None);
            }
        }
        self.level
    }

    /// It, as last seen.
    pub fn level(&self) -> Level {
        self.level
    }

    /// How long it has been so, in milliseconds.
    pub fn for_ms(&self, now: u64) -> u64 {
        now.saturating_sub(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(at_ms: u64, percent: u64) -> Seen {
        Seen {
            at_ms,
            total: 10_000,
            available: percent * 100,
            ..Seen::default()
        }
    }

    #[test]
    fn worse_at_once_and_better_step_by_step() {
        let mut gauge = Gauge::default();
        assert_eq!(gauge.look(&host(0, 50)), Level::High);
        assert_eq!(gauge.look(&host(1000, 1)), Level::Low);
        let mut seen = Vec::new();
        for at in 2..60 {
            let level = gauge.look(&host(at * 1000, 50));
            if seen.last() != Some(&level) {
                seen.push(level);
            }
        }
        let mut back = ALL.to_vec();
        back.reverse();
        assert_eq!(seen, back);
        // At the threshold it stays what it is.
        assert_eq!(gauge.look(&host(70_000, 11)), Level::Clear);
        for at in 71..200 {
            assert_eq!(gauge.look(&host(at * 1000, 12)), Level::Clear);
        }
    }

    #[test]
    fn waiting_counts_only_where_memory_is_not_plenty() {
        let waiting = |percent, some, full| Seen {
            pressure: Some(Pressure { some, full }),
            ..host(0, percent)
        };
        use crate::seen::Pressure;
        let level = |seen: &Seen| Gauge::default().look(seen);
        assert_eq!(level(&waiting(20, 50.0, 20.0)), Level::Hard);
        assert_eq!(level(&waiting(20, 10.0, 0.0)), Level::Soft);
        assert_eq!(level(&waiting(60, 50.0, 20.0)), Level::High);
        let mut old = host(0, 20);
        old.swap_in = 20 << 20;
        assert_eq!(level(&old), Level::Hard, "without PSI");
    }
}
