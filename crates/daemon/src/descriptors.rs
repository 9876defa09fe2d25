//! How many files the process may have open, and who may take how many of them.
//!
//! A connection, a guest's memory region, a queue's doorbell and an origin are descriptors all. The
//! usual limit of 1024 is soon reached by a host's guests, and whoever comes last then fails, even
//! the operator who wants to see what is wrong. So the limit is raised as far as the process itself
//! may raise it, a start with too few is refused while nothing is open yet, and clients get a share
//! ([`fd_budget`]) that leaves the rest to the daemon and its control API.

use crate::error::{Error, Result};

/// Descriptors the daemon itself needs before it serves anything: sockets, locks, the flash device,
/// a ring and an eventfd or two for each of up to nine threads, signals, logs.
const OWN: u64 = 64;
/// Kept for control connections: `hearth` commands, a metrics collector, a few of each at a time.
const CONTROL: u64 = 32;
/// With fewer than this for disks and clients it makes no sense to start.
const CLIENTS_MIN: u64 = 32;
/// Highest limit asked for. Some hosts allow a thousand million, and programs that are started with
/// such a limit have been seen to walk through all of it.
const RAISE_MAX: u64 = 1 << 20;

/// How the process's descriptors are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdBudget {
    /// All the process may have open.
    pub limit: u64,
    /// Kept for control connections, whatever clients do.
    pub control: u64,
    /// What clients may take together: connections, guests' memory, doorbells.
    pub clients: u64,
}

impl FdBudget {
    /// Shares out `limit` descriptors with `disks` origins open.
    fn of(limit: u64, disks: u64) -> FdBudget {
        // One for the origin as it is, one for what opens or locks it, one for its socket, which the next program
        // is to have, and one to spare.
        let own = OWN.saturating_add(disks.saturating_mul(4));
        FdBudget {
            limit,
            control: CONTROL,
            clients: limit.saturating_sub(own).saturating_sub(CONTROL),
        }
    }
}

/// How the descriptors are shared out now, with so many disks attached.
pub fn fd_budget(disks: usize) -> FdBudget {
    FdBudget::of(limits().map_or(1024, |l| l.rlim_cur), disks as u64)
}

/// Raises the limit as far as the process may, and refuses to go on with too few.
pub fn raise() -> Result<FdBudget> {
    let Some(mut now) = limits() else {
        // It cannot be asked, so it cannot be changed: whoever runs out is told when it happens.
        return Ok(fd_budget(0));
    };
    let wanted = now.rlim_max.min(RAISE_MAX);
    if now.rlim_cur < wanted {
        let next = libc::rlimit {
            rlim_cur: wanted,
            ..now
        };
        // SAFETY: a valid pointer to a structure of ours, which the call only reads.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &next) } == 0 {
            now = next;
        } else {
            let e = std::io::Error::last_os_error();
            tracing::warn!(
                limit = now.rlim_cur,
                "cannot raise the limit on open files: {e}"
            );
        }
    }
    enough(now.rlim_cur)
}

fn enough(limit: u64) -> Result<FdBudget> {
    let need = OWN + CONTROL + CLIENTS_MIN;
    if limit < need {
        return Err(Error::unavailable(
            format!("the limit on open files is {limit}, and Hearth needs {need} or more"),
            "raise it: “LimitNOFILE=65536” in the unit, “ulimit -n 65536” in a shell",
        ));
    }
    Ok(FdBudget::of(limit, 0))
}

fn limits() -> Option<libc::rlimit> {
    let mut now = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid pointer to a structure of ours, which the call fills.
    let told = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut now) } == 0;
    told.then_some(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_never_get_what_control_needs() {
        for limit in [0, 20, 128, 1024, 65_536, RAISE_MAX, u64::MAX] {
            for disks in [0, 1, 30, 4000] {
                let budget = FdBudget::of(limit, disks);
                let kept = u128::from(budget.clients) + u128::from(budget.control + OWN);
                assert!(
                    budget.clients == 0 || kept <= u128::from(limit),
                    "{budget:?}"
                );
            }
        }
        assert_eq!(FdBudget::of(1024, 10).clients, 1024 - 64 - 32 - 40);
    }

    #[test]
    fn too_few_are_refused_with_a_remedy() {
        let refused = enough(20).unwrap_err();
        assert!(refused.what.contains("20"), "{refused:?}");
        assert!(refused.remedy.contains("LimitNOFILE"), "{refused:?}");
        assert!(enough(128).is_ok());
        assert!(enough(127).is_err());
    }
}
