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

/// What NBD clients get unasked, and the least that they can do with: the largest request, and some connections.
pub const NBD_MIN: u64 = 40 << 20;
/// Allocations of at least this are the kernel's, and go back to it as soon as they are freed.
const MAPPED_MIN: libc::c_int = 128 << 10;
/// Heaps of the allocator. Each keeps what was freed in its middle.
const ARENAS: libc::c_int = 2;

/// Has the allocator return what long requests took. Its own rule keeps all of it: the limit for what it maps grows with
/// every long buffer that is freed, and memory that is locked cannot be given back page by page. Called before threads
/// are started.
pub fn return_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: plain numbers.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_MIN);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAPPED_MIN);
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}
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
        NbdLimits::with(memory, disks, crate::descriptors::fd_budget(disks).clients)
    }

    fn with(memory: Option<u64>, disks: usize, fds: u64) -> Result<NbdLimits> {
        let memory = match memory {
            Some(bytes) if bytes < NBD_MIN => {
                return Err(Error::invalid(
                    format!("{} are too little for NBD clients", human(bytes)),
                    "give --nbd-memory 40M or more",
                ));
            }
            Some(bytes) => bytes,
            // Each disk's first connection leaves the rest as it is.
            None => NBD_MIN + disks as u64 * CONNECTION,
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
        let of = |memory, fds| NbdLimits::with(memory, 0, fds).unwrap();
        let many = NbdLimits::with(None, 100, 10_000).unwrap();
        assert_eq!(many.memory, NBD_MIN + (50 << 20));
        let unasked = of(None, 10_000);
        assert_eq!((unasked.memory, unasked.connections), (NBD_MIN, 40));
        assert_eq!(of(Some(4 * GIB), 10_000).connections, 4096);
        // Descriptors bound connections where there are few.
        assert_eq!(of(Some(4 * GIB), 800).connections, 400);
        assert_eq!(of(None, 8).connections, 16);
        let few = NbdLimits::with(Some(NBD_MIN - 1), 0, 800).unwrap_err();
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
