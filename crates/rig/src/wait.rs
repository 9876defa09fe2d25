//! Waiting for a condition instead of for a time.

use std::time::{Duration, Instant};

/// How often a condition is looked at.
const POLL_EVERY: Duration = Duration::from_micros(500);

/// Looks at `condition` until it yields something; an error naming `what` after `limit`.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if start.elapsed() > limit {
            anyhow::bail!("{what}: not so after {limit:?}");
        }
        std::thread::sleep(POLL_EVERY);
    }
}
