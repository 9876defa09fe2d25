//! The machine's memory, and giving it back.

use std::time::{Duration, Instant};

/// How long the flash must be at rest before memory is given back.
const REST: Duration = Duration::from_secs(2);

/// Bytes of RAM that programs may still take without others being paged out or ended, as the
/// kernel estimates it; `None` if it does not say.
pub fn available() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// Gives memory back once nothing goes on any more.
///
/// The allocator keeps what requests and fills of a busy hour have freed, in pieces between what is in use:
/// beside 4 GiB of cached blocks that was two fifths of what the index itself needs.
#[derive(Debug)]
pub struct GiveBack {
    seen: u64,
    since: Instant,
    given: bool,
}

impl GiveBack {
    /// Nothing was seen yet.
    pub fn new(now: Instant) -> GiveBack {
        GiveBack {
            seen: 0,
            since: now,
            given: false,
        }
    }

    /// To be called now and then with a count that grows with whatever goes on.
    pub fn look(&mut self, count: u64, now: Instant) {
        if self.is_due(count, now) {
            give_back();
        }
    }

    /// True once after each time at which something went on.
    fn is_due(&mut self, count: u64, now: Instant) -> bool {
        if count != self.seen {
            *self = GiveBack {
                seen: count,
                ..GiveBack::new(now)
            };
        }
        let due = !self.given && now.duration_since(self.since) >= REST;
        self.given |= due;
        due
    }
}

#[cfg(target_env = "gnu")]
fn give_back() {
    // SAFETY: takes no pointer and touches nothing that is in use; any thread may call it at any time.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn give_back() {}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_once_after_each_busy_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut g = GiveBack::new(start);
        assert!(!g.is_due(5, at(1000)));
        assert!(!g.is_due(5, at(2900)));
        assert!(g.is_due(5, at(3100)));
        assert!(!g.is_due(5, at(60_000)));
        assert!(!g.is_due(6, at(60_001)));
        assert!(!g.is_due(7, at(62_002)));
        assert!(g.is_due(7, at(64_100)));
        give_back();
    }

    #[test]
    fn what_the_kernel_says() {
        let text = "MemTotal:       32768 kB\nMemFree:  1 kB\nMemAvailable:      24576 kB\n";
        assert_eq!(parse(text), Some(24 << 20));
        assert_eq!(parse("MemTotal:       32768 kB\n"), None);
        assert!(available() > Some(0));
    }
}
