//! Keeps the daemon in memory when its host runs out of it.
//!
//! A host that is short of memory swaps, and may swap to a disk that Hearth serves. If the daemon were
//! swapped out itself, every request of every guest would wait for a page to be read, at worst through the daemon that
//! waits for it. So what it has (index, buffers, stacks, code) is locked as soon as it is touched, it is
//! the last to be killed, and the kernel does not make it wait for the writing back of other memory
//! while it serves such writing (`PR_SET_IO_FLUSHER`, `prctl(2)`).
//!
//! Guests' memory is the exception: a guest that reads all of its disk would else be locked as a whole. What maps it
//! (`hearth_vhost`) takes the lock off before anything is touched.

use std::io;

use crate::error::{Error, Result};

/// Killed after nearly everything else, but not never: a daemon that has grown without bound has to go.
const OOM_SCORE_ADJ: i32 = -900;
/// From `linux/prctl.h`, since Linux 5.6.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Whether memory is locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockMemory {
    /// If the process may lock as much as it has.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Or the daemon does not start.
    Required,
}

/// What was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Nothing of the daemon is swapped out.
    pub locked: bool,
    /// The kernel knows that writing back may wait for this process.
    pub io_flusher: bool,
    /// What the kernel chooses by when it has to kill something, -1000 to 1000; `None`: it does not say.
    pub oom_score_adj: Option<i32>,
}

/// Keeps the process in memory as far as it may. Called before threads are started and memory is taken; children
/// inherit all of it but the lock.
pub fn keep(lock: LockMemory) -> Result<Resident> {
    let locked = match lock {
        LockMemory::Off => false,
        LockMemory::Auto | LockMemory::Required => match self::lock() {
            Ok(()) => true,
            Err(e) if lock == LockMemory::Required => {
                return Err(Error::unavailable(
                    format!("cannot lock memory: {e}"),
                    "set LimitMEMLOCK=infinity in the unit or `ulimit -l unlimited`, or use --lock-memory auto",
                ));
            }
            Err(e) => {
                tracing::debug!("memory is not locked: {e}");
                false
            }
        },
    };
    // SAFETY: plain numbers.
    let io_flusher = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } == 0;
    Ok(Resident {
        locked,
        io_flusher,
        oom_score_adj: spare(),
    })
}

/// Locks what is in memory, and what will be when it is touched. Only without a limit: with one, what is mapped
/// above it could not be mapped at all, guests' memory first.
fn lock() -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid pointer to a structure of ours, which the call fills.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_max == libc::RLIM_INFINITY && limit.rlim_cur != libc::RLIM_INFINITY {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: a valid pointer to a structure of ours, which the call only reads.
        if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    if limit.rlim_cur != libc::RLIM_INFINITY && !may_lock_without_limit() {
        return Err(io::Error::other(format!(
            "the process may lock no more than {} bytes",
            limit.rlim_cur
        )));
    }
    // SAFETY: plain numbers; what is mapped stays as it is.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Has the process `CAP_IPC_LOCK`?
fn may_lock_without_limit() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    effective(&status).is_some_and(|caps| caps >> CAP_IPC_LOCK & 1 == 1)
}

fn effective(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Has others killed first, unless somebody has said already who is to be.
fn spare() -> Option<i32> {
    const PATH: &str = "/proc/self/oom_score_adj";
    let read = || std::fs::read_to_string(PATH).ok()?.trim().parse().ok();
    if read()? == 0 {
        // Without the right to it, it stays as it is.
        let _ = std::fs::write(PATH, OOM_SCORE_ADJ.to_string());
    }
    read()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_read_as_the_kernel_writes_them() {
        let status = "Name:\thearth\nCapPrm:\t0000000000000000\nCapEff:\t0000000000004000\n";
        assert_eq!(effective(status), Some(1 << 14));
        assert_eq!(effective("CapEff:\tx\n"), None);
        assert_eq!(effective(""), None);
    }
}
