//! Waiting for a condition instead of for a time.

use std::time::{Duration, Instant};

/// How long nobody looks at the condition, at least.
const POLL_EVERY: Duration = Duration::from_micros(500);
/// And at most, however long it takes to look.
const POLL_SELDOM: Duration = Duration::from_millis(20);

/// Looks at `condition` until it yields something; an error naming `what` after `limit`.
///
/// Who has to run a program to look pauses for twice as long as that took: else those who wait would take a core each from what
/// they wait for, and from the tests that run beside them.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        let look = Instant::now();
        if let Some(value) = condition() {
            return Ok(value);
        }
        let pause = (look.elapsed() * 2).clamp(POLL_EVERY, POLL_SELDOM);
        if start.elapsed() > limit {
            anyhow::bail!("{what}: not so after {limit:?}");
        }
        std::thread::sleep(pause);
    }
}
