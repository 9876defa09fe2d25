//! Processes by number, without mistaking one for another.
//!
//! Numbers are given again. What a file says about a process of an earlier life is only believed
//! if its time of start fits.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A process, told apart from any other that has, or had, its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    /// When it started, in ticks since the host did (field 22 of `/proc/PID/stat`, proc(5)).
    start: u64,
}

impl Identity {
    /// The process that has this number now.
    pub(crate) fn of(pid: u32) -> io::Result<Identity> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The second field is a name in brackets, which may contain anything.
        let start = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok())
            .ok_or(io::ErrorKind::InvalidData)?;
        Ok(Identity { pid, start })
    }

    /// Stores it.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, format!("{} {}\n", self.pid, self.start))
    }

    /// The process a file tells of, if it is still there.
    pub(crate) fn read(path: &Path) -> Option<Identity> {
        let text = std::fs::read_to_string(path).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        let then = Identity {
            pid: pid.parse().ok()?,
            start: start.parse().ok()?,
        };
        (Identity::of(then.pid).ok()? == then).then_some(then)
    }

    /// Ends it: in order within `time`, by force within `force` more.
    pub(crate) fn end(&self, time: Duration, force: Duration) {
        // SAFETY: plain numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        if fd < 0 {
            return;
        }
        // SAFETY: a descriptor just made by the kernel, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        // The descriptor stands for one process for good: check that it is still the one meant.
        if Identity::of(self.pid).ok() != Some(*self) {
            return;
        }
        for (signal, time) in [(libc::SIGTERM, time), (libc::SIGKILL, force)] {
            let none = std::ptr::null::<libc::siginfo_t>();
            // SAFETY: an open pidfd, a null siginfo, no flags.
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd.as_raw_fd(), signal, none, 0) };
            let mut poll = libc::pollfd {
                fd: fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one pollfd, alive across the call.
            if unsafe { libc::poll(&mut poll, 1, time.as_millis() as i32) } == 1 {
                return;
            }
        }
        tracing::error!(pid = self.pid, "a process could not be ended");
    }
}

/// Sends a signal to a child that has not been reaped.
pub(crate) fn signal(pid: u32, signal: i32) {
    // SAFETY: plain numbers; the caller vouches for the process.
    unsafe { libc::kill(pid as i32, signal) };
}

/// Waits until a child has ended, and leaves it to be reaped.
pub(crate) fn wait_ended(pid: u32) {
    loop {
        // SAFETY: all-zero bytes are a valid siginfo_t.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is a valid out-pointer for the call.
        let done =
            unsafe { libc::waitid(libc::P_PID, pid, &mut info, libc::WEXITED | libc::WNOWAIT) };
        if done == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Highest descriptor that is looked at where the kernel cannot mark all at once (before Linux 5.11).
/// What a daemon inherits it has from its start, with low numbers.
const INHERITED_MAX: i32 = 4096;

/// In a child before exec: keeps every descriptor beyond the standard three from the program. Ours are
/// marked so anyhow; those the daemon was started with (a lock its starter holds, a file systemd
/// opened for it) are not.
fn inherit_nothing() -> io::Result<()> {
    // SAFETY: plain numbers; the range is marked to be closed by exec, nothing is closed now.
    let marked = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3u32,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if marked == 0 {
        return Ok(());
    }
    mark_one_by_one();
    Ok(())
}

/// Has a program started with the standard descriptors and no others.
pub(crate) fn hand_on_nothing(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only system calls are made, which touch no memory.
    unsafe { command.pre_exec(inherit_nothing) }
}

fn mark_one_by_one() {
    for fd in 3..INHERITED_MAX {
        // SAFETY: plain numbers; of a descriptor that is not open this fails, and nothing is done.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// In a child before exec: ends with the thread that made it.
pub(crate) fn die_with_parent(parent: u32) -> io::Result<()> {
    // SAFETY: plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no preconditions.
    if unsafe { libc::getppid() } != parent as i32 {
        // It died before we said so.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_no_descriptor_of_others() {
        let file = tempfile::tempfile().unwrap();
        let slowly = || {
            mark_one_by_one();
            Ok(())
        };
        type Mark = fn() -> io::Result<()>;
        let nothing = || Ok(());
        let all: [(Mark, bool); 3] = [(nothing, true), (inherit_nothing, false), (slowly, false)];
        for (mark, inherits) in all {
            // SAFETY: a valid descriptor; the copy belongs to this test.
            let copy = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD, 40) };
            assert!(copy >= 40);
            // SAFETY: just made, owned by nobody else.
            let copy = unsafe { OwnedFd::from_raw_fd(copy) };
            let mut command = Command::new("test");
            command
                .arg("-e")
                .arg(format!("/proc/self/fd/{}", copy.as_raw_fd()));
            // SAFETY: only system calls that touch no memory.
            unsafe { command.pre_exec(mark) };
            assert_eq!(command.status().unwrap().success(), inherits);
        }
    }

    #[test]
    fn only_the_very_process_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("1.pid");
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let me = Identity::of(child.id()).unwrap();
        // Another that had the number before.
        std::fs::write(&file, format!("{} {}\n", me.pid, me.start - 1)).unwrap();
        assert_eq!(Identity::read(&file), None);
        me.write(&file).unwrap();
        assert_eq!(Identity::read(&file), Some(me));
        assert!(child.try_wait().unwrap().is_none());
        me.end(Duration::from_secs(20), Duration::from_secs(20));
        assert!(!child.wait().unwrap().success());
        assert_eq!(Identity::read(&file), None);
        for text in ["", "x", "1", "1 x", "99999999999 1"] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(Identity::read(&file), None, "{text}");
        }
    }
}
