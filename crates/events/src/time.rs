//! Times as events have them: milliseconds since 1970, and what people read of that.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now. A clock before 1970 counts as 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| d.as_millis() as u64)
}

/// Year, month and day of the day that began `days` days after the first of January 1970.
fn date(days: u64) -> (u64, u64, u64) {
    // Counted in years that begin in March, so that the day that is sometimes there is the last one;
    // 400 years have 146,097 days.
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, day)
}

/// A time in the form of RFC 3339, in UTC, to the second.
pub fn utc(ms: u64) -> String {
    let s = ms / 1000;
    let (year, month, day) = date(s / 86_400);
    let s = s % 86_400;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        s / 3600,
        s / 60 % 60,
        s % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_around_the_days_that_are_sometimes_there() {
        for (s, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(s * 1000), text);
        }
    }
}
