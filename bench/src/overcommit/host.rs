//! What the run sets up on the host, and takes away again whatever becomes of it.
//!
//! Swap areas, loop devices, mounts and control groups outlive who made them. So everything is found again by where it lies,
//! not by what somebody remembers: all of it is below one directory, or has one name. What was set is noted there
//! before it is set.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hearth_rig::daemon::path;
use hearth_rig::wait;

use crate::devices::{tool, unused_below};
use crate::modelled::Disk;

/// The control group of all guests.
const GROUP: &str = "/sys/fs/cgroup/memory/hearth-overcommit";
/// Longest that something made is waited for, or something ended.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest that the kernel may take to bring guests below their limit.
const SHRINK_LIMIT: Duration = Duration::from_secs(240);
/// Bytes that can be swapped out: more than the guests have, for what is read back keeps its place there for a while.
const SWAP: u64 = 6 << 30;

/// The directory of everything, held by one run at a time.
#[derive(Debug)]
pub struct Held {
    /// Where everything is.
    pub dir: PathBuf,
    _lock: File,
}

/// Takes the directory, and what an earlier run left there away.
pub fn hold(parent: &Path) -> Result<Held> {
    // SAFETY: no preconditions.
    ensure!(unsafe { libc::geteuid() } == 0, "it swaps: run it as root");
    ensure!(
        Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists(),
        "it needs control groups of version 1 for memory"
    );
    let lock = File::create(parent.join("overcommit.lock"))?;
    // SAFETY: the descriptor is open; flock touches no memory.
    let got = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    ensure!(got == 0, "another run is using {}", parent.display());
    let held = Held {
        dir: parent.join("overcommit"),
        _lock: lock,
    };
    clean(&held.dir)?;
    fs::create_dir_all(&held.dir)?;
    Ok(held)
}

/// Takes everything away that a run may have left.
pub fn clean(dir: &Path) -> Result<()> {
    tidy(dir)?;
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    Ok(())
}

/// The same, but for files.
pub fn tidy(dir: &Path) -> Result<()> {
    restore(dir)?;
    // Guests first: what they had swapped out need not be read back then.
    wait::until("the guests are gone", LIMIT, || {
        let procs = fs::read_to_string(Path::new(GROUP).join("cgroup.procs")).unwrap_or_default();
        for pid in procs.lines().filter_map(|l| l.parse::<i32>().ok()) {
            // SAFETY: plain numbers. Who is in our group is a guest of ours.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        procs.is_empty().then_some(())
    })?;
    unused_below(dir)?;
    let mount = dir.join("mnt");
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    if mounts
        .lines()
        .any(|l| l.split(' ').nth(1) == Some(path(&mount)))
    {
        tool("umount", &["-l", path(&mount)])?;
    }
    wait::until("the control group is gone", LIMIT, || {
        let _ = fs::remove_dir(GROUP);
        (!Path::new(GROUP).exists()).then_some(())
    })?;
    // The next one makes its own.
    for left in ["flash.swap", "disk.img"] {
        match fs::remove_file(dir.join(left)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
    }
    Ok(())
}

/// Bytes that are swapped out, to whatever.
pub fn swapped_out() -> u64 {
    let text = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let used = |line: &str| -> Option<u64> { line.split_whitespace().nth_back(1)?.parse().ok() };
    text.lines().skip(1).filter_map(used).sum::<u64>() << 10
}

/// Sets a file of the kernel's, with what was in it noted before.
pub fn set(dir: &Path, file: &str, value: &str) -> Result<()> {
    let notes = dir.join("settings.json");
    let mut before: BTreeMap<String, String> = fs::read(&notes)
        .ok()
        .and_then(|b| serde_json::from_slice(&b).ok())
        .unwrap_or_default();
    let now = fs::read_to_string(file).with_context(|| file.to_owned())?;
    before
        .entry(file.to_owned())
        .or_insert(now.trim().to_owned());
    let mut new = File::create(dir.join("settings.new"))?;
    new.write_all(&serde_json::to_vec(&before)?)?;
    new.sync_all()?;
    fs::rename(dir.join("settings.new"), &notes)?;
    fs::write(file, value).with_context(|| format!("{file} {value}"))
}

/// Sets back what was set.
pub fn restore(dir: &Path) -> Result<()> {
    let notes = dir.join("settings.json");
    let Ok(bytes) = fs::read(&notes) else {
        return Ok(());
    };
    let before: BTreeMap<String, String> = serde_json::from_slice(&bytes).unwrap_or_default();
    for (file, value) in before {
        fs::write(&file, &value).with_context(|| format!("{file} {value}"))?;
    }
    fs::remove_file(notes)?;
    Ok(())
}

/// The group of all guests.
#[derive(Debug)]
pub struct Group;

impl Group {
    /// Without a limit yet.
    pub fn new() -> Result<Group> {
        fs::create_dir(GROUP)?;
        fs::write(format!("{GROUP}/memory.swappiness"), "60")?;
        Ok(Group)
    }

    /// Where it is.
    pub fn dir() -> &'static str {
        GROUP
    }

    /// What starts a program in it.
    pub fn wrap() -> Vec<String> {
        let enter = format!("echo $$ > {GROUP}/cgroup.procs && exec \"$@\"");
        ["sh", "-c", &enter, "sh"].map(String::from).to_vec()
    }

    /// Lets its programs have so many bytes; what is above is swapped out by then.
    pub fn limit(&self, bytes: u64) -> Result<()> {
        let file = format!("{GROUP}/memory.limit_in_bytes");
        let began = Instant::now();
        loop {
            match fs::write(&file, bytes.to_string()) {
                Ok(()) => return Ok(()),
                Err(e) if began.elapsed() > SHRINK_LIMIT => {
                    bail!("guests cannot be brought below {} MiB: {e}", bytes >> 20)
                }
                Err(_) => {}
            }
        }
    }

    /// No limit any more.
    pub fn unlimited(&self) -> Result<()> {
        Ok(fs::write(format!("{GROUP}/memory.limit_in_bytes"), "-1")?)
    }

    /// Bytes its programs take.
    pub fn used(&self) -> u64 {
        let text = fs::read_to_string(format!("{GROUP}/memory.usage_in_bytes"));
        text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
    }
}

/// Where is swapped to.
pub enum Swap {
    /// Nowhere.
    None,
    /// A file on the device that is measured.
    Flash,
    /// A modelled hard disk.
    Disk(Disk),
}

impl Swap {
    /// A file, swapped to by the kernel itself.
    pub fn flash(dir: &Path) -> Result<Swap> {
        let area = dir.join("flash.swap");
        tool("fallocate", &["-l", &SWAP.to_string(), path(&area)])?;
        fs::set_permissions(&area, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        tool("mkswap", &[path(&area)])?;
        set(dir, "/proc/sys/vm/page-cluster", "0")?;
        tool("swapon", &["--priority", "100", path(&area)])?;
        Ok(Swap::Flash)
    }

    /// The modelled disk.
    pub fn disk(dir: &Path, binary: &Path) -> Result<Swap> {
        let disk = Disk::new(dir, binary, SWAP)?;
        tool("mkswap", &[disk.device()])?;
        tool("swapon", &["--priority", "100", disk.device()])?;
        Ok(Swap::Disk(disk))
    }

    /// Takes it away. Nobody has anything on it any more.
    pub fn off(self, dir: &Path) -> Result<()> {
        match self {
            Swap::None => {}
            Swap::Flash => {
                let area = dir.join("flash.swap");
                tool("swapoff", &[path(&area)])?;
                fs::remove_file(area)?;
            }
            Swap::Disk(disk) => {
                tool("swapoff", &[disk.device()])?;
                disk.off()?;
            }
        }
        Ok(())
    }
}
