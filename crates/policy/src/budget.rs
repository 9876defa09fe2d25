//! How much may be written to flash: an SSD is worn out by writes, so they are a currency.
//!
//! A bucket fills at the rate the owner allows (drive writes per day, or a rate) and holds an
//! hour's worth, so that a busy hour may borrow from a quiet one. As it empties, admission
//! tightens: first writes weigh more when rules are compared, then newcomers must beat what
//! they displace, at last clean blocks stay off. Dirty blocks are never refused here: they are
//! a promise to the guest.

/// Time whose allowance the bucket holds.
const BUCKET_SECONDS: u64 = 3600;
/// Pressure at which nothing clean is admitted any more.
pub(crate) const FULL: u32 = 256;
/// Pressure from which on newcomers must beat what they displace.
pub(crate) const GATE: u32 = 128;
const BLOCK: u64 = 4096;
const SECONDS_PER_DAY: u64 = 86_400;

/// An endurance budget.
#[derive(Clone, Debug)]
pub struct Budget {
    /// Bytes per second; `None` for no limit.
    rate: Option<u64>,
    /// Bytes left; negative when overdrawn by dirty writes.
    left: i64,
    at_us: u64,
}

impl Budget {
    /// No limit.
    pub fn unlimited() -> Budget {
        Budget {
            rate: None,
            left: 0,
            at_us: 0,
        }
    }

    /// At most so many bytes per second in the long run, at least one.
    pub fn bytes_per_second(rate: u64) -> Budget {
        let rate = rate.clamp(1, i64::MAX as u64 / BUCKET_SECONDS);
        Budget {
            rate: Some(rate),
            left: (rate * BUCKET_SECONDS) as i64,
            at_us: 0,
        }
    }

    /// So many thousandths of the device's size per day (drive writes per day: 300 for 0.3 DWPD).
    pub fn drive_writes_per_day(device_bytes: u64, thousandths: u64) -> Budget {
        let per_day = u128::from(device_bytes) * u128::from(thousandths) / 1000;
        Budget::bytes_per_second((per_day / u128::from(SECONDS_PER_DAY)) as u64)
    }

    /// Lets time pass up to `now_us`. Time that goes back counts for nothing.
    pub fn advance(&mut self, now_us: u64) {
        let Some(rate) = self.rate else { return };
        let passed = now_us.saturating_sub(self.at_us);
        let earned = (u128::from(rate) * u128::from(passed) / 1_000_000) as u64;
        if earned > 0 {
            let most = (rate * BUCKET_SECONDS) as i64;
            self.left = self
                .left
                .saturating_add(earned.min(i64::MAX as u64) as i64)
                .min(most);
            // Time not yet worth a byte stays on the clock.
            self.at_us = now_us;
        }
    }

    /// Notes blocks written.
    pub fn spend(&mut self, blocks: u64) {
        if self.rate.is_some() {
            self.left = self.left.saturating_sub((blocks * BLOCK) as i64);
        }
    }

    /// Bytes a second that may be written in the long run, and how many may be now; none without a limit. Less than none may be now
    /// while more was written, as of what guests write.
    pub fn figures(&self) -> Option<(u64, i64)> {
        Some((self.rate?, self.left))
    }

    /// How tight it is: 0 with half the bucket left or more, 256 when it is empty.
    pub fn pressure(&self) -> u32 {
        let Some(rate) = self.rate else { return 0 };
        let half = (rate * BUCKET_SECONDS / 2).max(1) as i64;
        let short = half - self.left.clamp(0, half);
        (i128::from(short) * i128::from(FULL) / i128::from(half)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tightens_as_it_is_used_up_and_recovers() {
        let mut b = Budget::bytes_per_second(BLOCK * 1000);
        assert_eq!(b.pressure(), 0);
        b.spend(1_800_000);
        assert_eq!(b.pressure(), 0);
        b.spend(900_000);
        assert_eq!(b.pressure(), 128);
        b.spend(2_000_000);
        assert_eq!(b.pressure(), 256);
        b.advance(7_200_000_000);
        assert_eq!(b.pressure(), 0);
        b.advance(0);
        assert_eq!(b.pressure(), 0);
    }

    #[test]
    fn drive_writes_are_per_day() {
        // A 1 TB drive at 0.3 DWPD may take 3.47 MB/s.
        let b = Budget::drive_writes_per_day(1_000_000_000_000, 300);
        assert_eq!(b.figures(), Some((3_472_222, 3_472_222 * 3600)));
        assert_eq!(Budget::unlimited().figures(), None);
        assert_eq!(Budget::unlimited().pressure(), 0);
    }
}
