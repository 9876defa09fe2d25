//! A process that is killed as it enters a call of the kernel: at each step of what it does, one after the other.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::wait::until;

/// Longest wait until strace has all threads.
const LIMIT: Duration = Duration::from_secs(30);

/// Kills a process at one of its steps, unless it is dropped before.
pub struct Killer(Child);

impl Killer {
    /// Has strace kill the process `pid` as a thread of it enters one of these calls of the kernel for the `at`th time.
    pub fn new(pid: u32, calls: &str, at: u32) -> Result<Killer> {
        let child = Command::new("strace")
            .args(["-f", "-o", "/dev/null", "-p", &pid.to_string()])
            .args(["-e", &format!("trace={calls}")])
            .args(["-e", &format!("inject={calls}:signal=KILL:when={at}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("strace")?;
        let mut killer = Killer(child);
        let own = format!("TracerPid:\t{}\n", killer.0.id());
        until("strace has all threads", LIMIT, || {
            if !matches!(killer.0.try_wait(), Ok(None)) {
                return Some(Err(anyhow::anyhow!("strace cannot attach")));
            }
            traced(pid, &own).then_some(Ok(()))
        })??;
        Ok(killer)
    }
}

/// True if all threads of a process are traced by the one whose line this is.
fn traced(pid: u32, own: &str) -> bool {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return false;
    };
    tasks.flatten().all(|task| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        // The kernel's own workers cannot be, and end as they like.
        status.is_empty() || status.starts_with("Name:\tiou-") || status.contains(own)
    })
}

impl Drop for Killer {
    fn drop(&mut self) {
        // The kernel lets go of what it had.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
