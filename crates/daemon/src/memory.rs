//! The machine's memory, and how much of it NBD clients get.

use hearth_reactor::CONNECTION;

use crate::error::{Error, Result};
use crate::size::human;

/// Bytes of RAM that programs may still take without others being paged out or ended, as the
/// kernel estimates it; `None` if it does not say.
pub fn available() -> Option<u64> {
    parse(
        &std::fs::read_to_string("/proc/meminfo").ok()?,
        "MemAvailable:",
    )
}

/// Least that NBD clients can do with: two of the largest requests, and some connections.
const NBD_MIN: u64 = 128 << 20;
/// Most that is given to them unasked.
const NBD_DEFAULT_MAX: u64 = 1 << 30;
/// Connections there are places for in any case, beside every export's own.
const CONNECTIONS_MIN: u64 = 16;

/// What NBD clients may take, all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdLimits {
    /// Bytes of RAM.
    pub memory: u64,
    /// Connections beside those every export may have in any case: half of the memory at most.
    pub connections: usize,
    /// Descriptors: connections of any kind.
    pub descriptors: usize,
}

impl NbdLimits {
    /// What goes with the memory the operator gives them, and so many disks.
    pub fn of(memory: Option<u64>, disks: usize) -> Result<NbdLimits> {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let fds = crate::descriptors::fd_budget(disks).clients;
        NbdLimits::with(memory, parse(&text, "MemTotal:"), fds)
    }

    fn with(memory: Option<u64>, ram: Option<u64>, fds: u64) -> Result<NbdLimits> {
        let memory = match memory {
            Some(bytes) if bytes < NBD_MIN => {
                return Err(Error::invalid(
                    format!("{} are too little for NBD clients", human(bytes)),
                    "give --nbd-memory 128M or more",
                ));
            }
            Some(bytes) => bytes,
            None => (ram.unwrap_or(0) / 16).clamp(NBD_MIN, NBD_DEFAULT_MAX),
        };
        let connections = (memory / 2 / CONNECTION).min(fds / 2).max(CONNECTIONS_MIN);
        Ok(NbdLimits {
            memory,
            connections: connections as usize,
            // The rest is for guests' memory and doorbells.
            descriptors: (fds / 4 * 3).max(CONNECTIONS_MIN) as usize,
        })
    }
}

fn parse(meminfo: &str, what: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(what))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nbd_clients_get() {
        const GIB: u64 = 1 << 30;
        let of = |memory, ram, fds| NbdLimits::with(memory, Some(ram), fds).unwrap();
        assert_eq!(of(None, GIB, 10_000).memory, NBD_MIN);
        assert_eq!(of(None, 8 * GIB, 10_000).memory, GIB / 2);
        let large = of(None, 256 * GIB, 10_000);
        assert_eq!((large.memory, large.connections), (GIB, 1024));
        assert_eq!(of(Some(4 * GIB), GIB, 10_000).connections, 4096);
        // Descriptors bound connections where there are few.
        assert_eq!(of(Some(4 * GIB), GIB, 800).connections, 400);
        assert_eq!(of(None, GIB, 8).connections, 16);
        let few = NbdLimits::with(Some(NBD_MIN - 1), None, 800).unwrap_err();
        assert!(few.remedy.contains("--nbd-memory"), "{few}");
    }

    #[test]
    fn what_the_kernel_says() {
        let text = "MemTotal:       32768 kB\nMemFree:  1 kB\nMemAvailable:      24576 kB\n";
        assert_eq!(parse(text, "MemAvailable:"), Some(24 << 20));
        assert_eq!(parse("MemTotal:       32768 kB\n", "MemAvailable:"), None);
        assert!(available() > Some(0));
    }
}
