//! Times as events have them: milliseconds since 1970, and what people read of that.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;

/// Now. A clock before 1970 counts as 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| d.as_millis() as u64)
}

/// A time in the form of RFC 3339, in UTC, to the second. One beyond the year 9999 counts as its end.
pub fn utc(ms: u64) -> String {
    let time = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
    let time = Timestamp::from_second(time).unwrap_or(Timestamp::MAX);
    time.strftime("%FT%TZ").to_string()
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
        assert!(utc(u64::MAX).starts_with("9999-12-"));
    }
}
