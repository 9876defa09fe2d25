//! The second service beside a daemon.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::api::Api;
use crate::{Hearth, wait};

/// Longest wait for what it is to notice.
const LIMIT: Duration = Duration::from_secs(120);

/// A second service. Killed when dropped.
#[derive(Debug)]
pub struct Monitor {
    child: Child,
    run_dir: PathBuf,
    log: PathBuf,
}

impl Monitor {
    /// Starts one for a daemon, with more arguments.
    pub fn start(hearth: &Hearth, args: &[&str]) -> Result<Monitor> {
        Monitor::start_with(hearth, args, None)
    }

    /// The same, which looks for programs in a directory first.
    pub fn start_with(hearth: &Hearth, args: &[&str], programs: Option<&Path>) -> Result<Monitor> {
        Monitor::begin(&crate::daemon::binary()?, hearth, args, programs)
    }

    /// The same by the program `bin`.
    pub fn start_by(bin: &Path, hearth: &Hearth, args: &[&str]) -> Result<Monitor> {
        Monitor::begin(bin, hearth, args, None)
    }

    fn begin(
        bin: &Path,
        hearth: &Hearth,
        args: &[&str],
        programs: Option<&Path>,
    ) -> Result<Monitor> {
        let run_dir = hearth.run_dir();
        let log = hearth.dir().join("monitor.log");
        let mut command = Command::new(bin);
        command
            .arg("monitor")
            .arg("--run-dir")
            .arg(&run_dir)
            .arg("--state-dir")
            .arg(hearth.dir().join("monitor"))
            .args(args)
            .stdin(Stdio::null())
            .stderr(fs::File::options().create(true).append(true).open(&log)?);
        if let Some(dir) = programs {
            let mut path: OsString = dir.into();
            path.push(":");
            path.push(std::env::var_os("PATH").unwrap_or_default());
            command.env("PATH", path);
        }
        let mut name = run_dir.into_os_string();
        name.push("-monitor");
        Ok(Monitor {
            child: command.spawn()?,
            run_dir: PathBuf::from(name),
            log,
        })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it answers.
    pub fn get(&self, path: &str) -> Result<Value> {
        Api::at(self.run_dir.join("api.sock")).get(path)
    }

    /// Waits until what it answers is as somebody expects.
    pub fn until(&self, what: &str, path: &str, good: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(what, LIMIT, || self.get(path).ok().filter(|v| good(v)))
    }

    /// Waits until it finds the daemon so.
    pub fn link_is(&self, link: &str) -> Result<Value> {
        let what = format!("the daemon is {link}");
        self.until(&what, "/v1/monitor", |info| info["daemon"]["link"] == link)
    }

    /// Ends it, in order.
    pub fn end(mut self) -> Result<()> {
        // SAFETY: kill touches no memory; the process is our child and was not waited for.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let status = wait::until("the second service ends", LIMIT, || {
            self.child.try_wait().ok().flatten()
        })?;
        ensure!(status.success(), "{status}");
        Ok(())
    }

    /// Waits until it has ended by itself; what it said last.
    pub fn refused(mut self) -> Result<String> {
        let status = wait::until("the second service ends", LIMIT, || {
            self.child.try_wait().ok().flatten()
        })?;
        ensure!(!status.success(), "it ended in order");
        Ok(self.log())
    }

    /// Its log.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
