//! What a server's process has cost so far.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// CPU time of a process and all its threads so far, ended ones included, µs.
///
/// The process's CPU clock (clock_getcpuclockid(3)) counts nanoseconds; `/proc/PID/stat` counts
/// ticks of 10 ms, which is too coarse for the few hundred requests a hard disk answers in a run.
pub fn cpu_us(pid: u32) -> Result<f64> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: an out-pointer that lives across the call.
    let rc = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) };
    ensure!(rc == 0, "server {pid} is gone");
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: an out-pointer that lives across the call.
    let rc = unsafe { libc::clock_gettime(clock, &mut ts) };
    ensure!(rc == 0, "server {pid} is gone");
    Ok(ts.tv_sec as f64 * 1e6 + ts.tv_nsec as f64 / 1e3)
}

/// Resident memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Everything, the pages of the program file included.
    pub all: u64,
    /// What belongs to no file and can therefore not be dropped by the system.
    pub anonymous: u64,
}

/// A line of `/proc/PID/status` that counts KiB, in bytes; `name` with its colon.
pub fn status(pid: u32, name: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = status
        .lines()
        .find_map(|l| l.strip_prefix(name))
        .and_then(|v| v.split_whitespace().next())
        .and_then(|v| v.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .with_context(|| format!("no {name} in /proc/{pid}/status"))
}

/// Reads it.
pub fn resident(pid: u32) -> Result<Resident> {
    Ok(Resident {
        all: status(pid, "VmRSS:")?,
        anonymous: status(pid, "RssAnon:")?,
    })
}

/// Entries of a directory of `/proc/PID`: threads are in `task`, open files in `fd`.
pub fn count_of(pid: u32, what: &str) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/{what}"))?.count())
}

/// How long memory must not change to count as settled: the daemon gives back every ten seconds what it
/// does not need, and its threads' buffers are free only after the first time.
const SETTLED_FOR: Duration = Duration::from_secs(25);
/// When to stop waiting for that.
const SETTLE_LIMIT: Duration = Duration::from_secs(90);

/// Memory once the process has nothing to do any more.
pub fn settled(pid: u32) -> Result<Resident> {
    let start = Instant::now();
    let (mut last, mut since) = (resident(pid)?, Instant::now());
    while since.elapsed() < SETTLED_FOR && start.elapsed() < SETTLE_LIMIT {
        std::thread::sleep(Duration::from_millis(500));
        let now = resident(pid)?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_runs_and_the_dead_have_none() {
        let me = std::process::id();
        let before = cpu_us(me).unwrap();
        let mut sum = 0u64;
        for i in 0..2_000_000u64 {
            sum = std::hint::black_box(sum.wrapping_add(i));
        }
        assert!(cpu_us(me).unwrap() > before);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(cpu_us(child.id()).is_err());
        let memory = resident(me).unwrap();
        assert!(memory.anonymous > 0 && memory.all > memory.anonymous);
    }
}
