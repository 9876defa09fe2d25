//! The host's clock, when it jumps.
//!
//! Time that goes by is measured by a clock that never jumps; the time of day may be set. Where the two part,
//! somebody or something set it. Events then bear times that are out of order, and certificates may seem to have
//! ended. A clock that is only drawn closer, as time servers do, does not jump.

use crate::model::Reason;

/// Milliseconds by which the two clocks may part between two looks.
pub const JUMP_MS: u64 = 2_000;
/// How long a jump is told of, in milliseconds.
pub const TOLD_MS: u64 = 3_600_000;

/// Both clocks, looked at again and again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clocks {
    last: Option<(u64, u64)>,
    /// When it jumped, by the clock that does not, and by how much.
    jump: Option<(u64, i64)>,
}

impl Clocks {
    /// Looks: the clock that never jumps, and the time of day, in milliseconds.
    pub fn look(&mut self, steady: u64, day: u64) {
        if let Some((steady_then, day_then)) = self.last.replace((steady, day)) {
            let went_by = steady.saturating_sub(steady_then);
            let by = i128::from(day) - i128::from(day_then) - i128::from(went_by);
            if by.unsigned_abs() > u128::from(JUMP_MS) {
                self.jump = Some((steady, i64::try_from(by).unwrap_or(i64::MAX)));
            }
        }
    }

    /// What is to be said of it now.
    pub fn reasons(&self, steady: u64) -> Vec<Reason> {
        let lately = self
            .jump
            .filter(|(at, _)| steady.saturating_sub(*at) < TOLD_MS);
        let tell = |(_, by): (u64, i64)| {
            let seconds = by as f64 / 1000.0;
            let way = if by > 0 { "forward" } else { "back" };
            Reason::degraded(
                "clock-jumped",
                format!("the host's clock jumped {way} by {:.0} s", seconds.abs()),
                "see that one time server, and nothing else, sets it; times of events before and after do not compare",
            )
        };
        lately.map(tell).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_told_for_an_hour_and_drift_is_none() {
        let mut clocks = Clocks::default();
        clocks.look(0, 1_000_000);
        // A second a look, which is much.
        for at in 1..=100 {
            clocks.look(at * 10_000, 1_000_000 + at * 11_000);
        }
        assert_eq!(clocks.reasons(1_000_000), []);
        clocks.look(1_010_000, 400_000);
        let said = clocks.reasons(1_010_000);
        assert!(said[0].what.contains("back by 1710 s"), "{said:?}");
        assert_eq!(clocks.reasons(1_010_000 + TOLD_MS), []);
    }
}
