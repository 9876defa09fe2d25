//! Flash devices that are slower than what they lie on: loop devices of which a group of processes is given so many bytes a
//! second. That is the kernel's own limit, and costs no CPU time. It needs root. The devices go with the last process that
//! has them open, so that a run that is killed leaves none. Those that answer late or die are [`hearth_rig::mounted`].

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::wait;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Where groups of processes are limited.
const BLKIO: &str = "/sys/fs/cgroup/blkio";
/// Longest that the last process of a group may take to be gone.
const LIMIT: Duration = Duration::from_secs(60);

/// What is missing on this host for devices of a limited speed, if anything is.
pub fn no_limits() -> Option<&'static str> {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("root");
    }
    let file = Path::new(BLKIO).join("blkio.throttle.read_bps_device");
    if !file.exists() {
        return Some("control groups of version 1 for block devices");
    }
    (!Path::new("/dev/loop-control").exists()).then_some("loop devices")
}

/// What a program of the system says.
pub(crate) fn tool(program: &str, args: &[&str]) -> Result<String> {
    let out = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{program}: {}", said.trim());
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// Loop devices over files below a directory.
pub(crate) fn loops_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut ours = Vec::new();
    for entry in fs::read_dir("/sys/block")?.flatten() {
        let file = entry.path().join("loop/backing_file");
        if fs::read_to_string(file).is_ok_and(|f| Path::new(f.trim_end()).starts_with(dir)) {
            ours.push(Path::new("/dev").join(entry.file_name()));
        }
    }
    Ok(ours)
}

/// Nothing below a directory is swapped to any more, nor shown by a loop device.
pub(crate) fn unused_below(dir: &Path) -> Result<()> {
    let ours = loops_below(dir)?;
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    for line in swaps.lines() {
        let area = Path::new(line.split_whitespace().next().unwrap_or_default());
        if area.starts_with(dir) || ours.iter().any(|d| d == area) {
            tool("swapoff", &[path(area)])?;
        }
    }
    for device in ours {
        tool("losetup", &["-d", path(&device)])?;
    }
    Ok(())
}

/// A group of processes that may read and write so many bytes a second of each of some devices.
#[derive(Debug)]
pub struct Limited {
    group: PathBuf,
    devices: Vec<String>,
    /// As long as these are open the devices are there.
    _open: Vec<File>,
}

impl Limited {
    /// Of a device over each of these files.
    pub fn new(name: &str, files: &[PathBuf], rate: u64) -> Result<Limited> {
        let group = Path::new(BLKIO).join(format!("hearth-bench-{name}-{}", std::process::id()));
        fs::create_dir(&group).with_context(|| group.display().to_string())?;
        let mut limited = Limited {
            group,
            devices: Vec::new(),
            _open: Vec::new(),
        };
        for file in files {
            let args = ["--find", "--show", "--direct-io=on", path(file)];
            let device = tool("losetup", &args)?;
            let open = File::open(&device);
            // It stays for as long as it is open.
            tool("losetup", &["--detach", &device])?;
            limited._open.push(open?);
            let number = fs::read_to_string(format!(
                "/sys/class/block/{}/dev",
                device.trim_start_matches("/dev/")
            ))?;
            for what in ["read", "write"] {
                let file = format!("blkio.throttle.{what}_bps_device");
                let file = limited.group.join(file);
                fs::write(&file, format!("{} {rate}", number.trim()))
                    .with_context(|| file.display().to_string())?;
            }
            limited.devices.push(device);
        }
        Ok(limited)
    }

    /// The devices.
    pub fn devices(&self) -> Vec<&str> {
        self.devices.iter().map(String::as_str).collect()
    }

    /// What starts a program in the group.
    pub fn wrap(&self) -> Vec<String> {
        let enter = format!(
            "echo $$ > {}/cgroup.procs && exec \"$@\"",
            path(&self.group)
        );
        ["sh", "-c", &enter, "sh"].map(String::from).to_vec()
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // Only what is empty goes; a dead process leaves it a moment later.
        let _ = wait::until("the group is empty", LIMIT, || {
            fs::remove_dir(&self.group).ok()
        });
    }
}
