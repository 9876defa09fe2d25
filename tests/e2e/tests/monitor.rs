//! The second service beside a daemon that lives, hangs and dies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use hearth_rig::api::Api;
use hearth_rig::{Hearth, wait};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A second service. Killed when dropped.
struct Monitor {
    child: Child,
    run_dir: PathBuf,
}

impl Monitor {
    fn start(hearth: &Hearth) -> Result<Monitor> {
        let run_dir = hearth.run_dir();
        let state_dir = hearth.dir().join("monitor");
        let log = fs::File::create(hearth.dir().join("monitor.log"))?;
        let child = Command::new(hearth_rig::daemon::binary()?)
            .arg("monitor")
            .arg("--run-dir")
            .arg(&run_dir)
            .arg("--state-dir")
            .arg(&state_dir)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()?;
        Ok(Monitor {
            child,
            run_dir: beside(&run_dir),
        })
    }

    fn get(&self, path: &str) -> Result<Value> {
        Api::at(self.run_dir.join("api.sock")).get(path)
    }

    fn link_is(&self, link: &str) -> Result<Value> {
        wait::until(&format!("the daemon is {link}"), LIMIT, || {
            let info = self.get("/v1/monitor").ok()?;
            (info["daemon"]["link"] == link).then_some(info)
        })
    }

    fn end(mut self) -> Result<()> {
        signal(self.child.id(), libc::SIGTERM);
        let status = wait::until("the second service ends", LIMIT, || {
            self.child.try_wait().ok().flatten()
        })?;
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn beside(dir: &Path) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push("-monitor");
    PathBuf::from(name)
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: kill touches no memory; the process is our child and was not waited for.
    unsafe { libc::kill(pid as i32, signal) };
}

#[test]
fn it_tells_a_daemon_that_hangs_from_one_that_is_gone_and_finds_it_again() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let monitor = Monitor::start(&hearth)?;
    monitor.link_is("up")?;
    let pid = hearth.pid().expect("serving");
    signal(pid, libc::SIGSTOP);
    let info = monitor.link_is("hanging")?;
    signal(pid, libc::SIGCONT);
    let error = info["daemon"]["error"].as_str().unwrap_or_default();
    ensure!(error.contains("has not answered"), "{info}");
    monitor.link_is("up")?;
    hearth.kill9()?;
    let info = monitor.link_is("down")?;
    ensure!(info["daemon"]["seen"].as_u64().is_some(), "{info}");
    hearth.start()?;
    let info = monitor.link_is("up")?;
    ensure!(info["parts"][0]["restarts"] == 0, "{info}");
    monitor.end()?;
    // The daemon has not noticed.
    hearth.ok(&["disk", "list"])?;
    Ok(())
}

#[test]
fn it_starts_before_the_daemon_and_two_of_them_do_not_share_a_directory() -> Result<()> {
    let mut hearth = Hearth::with_pool("64M")?;
    let monitor = Monitor::start(&hearth)?;
    monitor.link_is("down")?;
    let mut second = Monitor::start(&hearth)?;
    let status = wait::until("the second one ends", LIMIT, || {
        second.child.try_wait().ok().flatten()
    })?;
    ensure!(!status.success(), "two second services in one directory");
    hearth.start()?;
    monitor.link_is("up")?;
    monitor.end()
}
