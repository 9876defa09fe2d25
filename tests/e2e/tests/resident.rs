//! A host that runs out of memory: the daemon stays in it, and its guests' memory can be swapped.

use anyhow::{Context, Result, ensure};
use hearth_rig::blk::Disk;
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// A line of `/proc/PID/status` that counts KiB, in bytes.
fn status(pid: u32, name: &str) -> Result<u64> {
    let all = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = all.lines().find_map(|l| l.strip_prefix(name));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("no {name} in {all}"))? << 10)
}

/// Of mappings whose name contains `word`: how much is in memory, and how much of that is locked.
fn mapped(pid: u32, word: &str) -> Result<(u64, u64)> {
    let (mut of_it, mut rss, mut locked) = (false, 0, 0);
    for line in std::fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
        let mut fields = line.split_whitespace();
        let first = fields.next().unwrap_or_default();
        if !first.ends_with(':') {
            of_it = line.contains(word);
            continue;
        }
        let kib = fields
            .next()
            .and_then(|n| n.parse::<u64>().ok())
            .unwrap_or(0);
        match first {
            "Rss:" if of_it => rss += kib << 10,
            "Locked:" if of_it => locked += kib << 10,
            _ => {}
        }
    }
    Ok((rss, locked))
}

#[test]
fn what_a_guest_reads_into_its_memory_is_not_locked() -> Result<()> {
    let mut hearth = Hearth::with_pool("128M")?;
    // SAFETY: no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    hearth.serve_args = vec![
        "--lock-memory".into(),
        if root { "required" } else { "auto" }.into(),
    ];
    hearth.start()?;
    let origin = hearth.origin("o.img", 32 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let mut guest = Disk::vhost(&hearth.vhost_socket("d"), 32 << 20)?;
    for at in (0..32 * MIB).step_by(MIB as usize) {
        guest.read(at, at as usize, MIB as usize)?;
    }
    ensure!(*guest.memory() == *std::fs::read(&origin)?);
    let pid = hearth.pid().context("no daemon")?;
    let (rss, locked) = mapped(pid, "/memfd:")?;
    ensure!(
        rss >= 32 * MIB && locked == 0,
        "{rss} bytes of guests' memory, {locked} locked"
    );
    let (heap, locked) = mapped(pid, "[heap]")?;
    ensure!(
        !root || (heap > 0 && locked == heap),
        "heap {heap}, locked {locked}"
    );
    Ok(())
}

#[test]
fn a_limit_on_locked_memory_is_told() -> Result<()> {
    let mut hearth = Hearth::with_pool("64M")?;
    // Root without the right to lock, as in a container.
    if !have("a_limit_on_locked_memory_is_told", &["setpriv", "prlimit"]) {
        return Ok(());
    }
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED a_limit_on_locked_memory_is_told: needs root");
        return Ok(());
    }
    hearth.wrap = [
        "prlimit",
        "--memlock=65536",
        "setpriv",
        "--bounding-set=-ipc_lock",
        "--inh-caps=-ipc_lock",
    ]
    .map(String::from)
    .to_vec();
    hearth.serve_args = vec!["--lock-memory".into(), "required".into()];
    let words = hearth.start_refused()?;
    ensure!(
        words.contains("65536") && words.contains("LimitMEMLOCK"),
        "{words}"
    );
    hearth.serve_args = vec!["--lock-memory".into(), "auto".into()];
    hearth.start()?;
    ensure!(status(hearth.pid().context("no daemon")?, "VmLck:")? == 0);
    Ok(())
}

/// A control group of a test (cgroup v1), with swap of its own; both are gone with it.
struct Short {
    group: PathBuf,
    swap: Option<PathBuf>,
}

impl Short {
    /// `None`, with the reason said, where groups or swap cannot be had.
    fn of(name: &str, limit: u64, swap: &Path, swap_size: u64) -> Result<Option<Short>> {
        let group = PathBuf::from("/sys/fs/cgroup/memory")
            .join(format!("hearth-{name}-{}", std::process::id()));
        if let Err(e) = std::fs::create_dir(&group) {
            println!("SKIPPED {name}: no memory control group can be made: {e}");
            return Ok(None);
        }
        let mut short = Short { group, swap: None };
        std::fs::write(short.group.join("memory.limit_in_bytes"), limit.to_string())?;
        std::fs::write(short.group.join("memory.swappiness"), "100")?;
        let file = std::fs::File::create(swap)?;
        let zeros = vec![0; MIB as usize];
        for _ in 0..swap_size / MIB {
            (&file).write_all(&zeros)?;
        }
        file.sync_all()?;
        let run = |program: &str| Command::new(program).arg(swap).output();
        ensure!(run("mkswap")?.status.success());
        let on = run("swapon")?;
        if !on.status.success() {
            println!(
                "SKIPPED {name}: no swap here: {}",
                String::from_utf8_lossy(&on.stderr)
            );
            return Ok(None);
        }
        short.swap = Some(swap.to_owned());
        Ok(Some(short))
    }

    /// What starts a program in the group.
    fn wrap(&self) -> Vec<String> {
        let enter = format!(
            "echo $$ > {}/cgroup.procs && exec \"$@\"",
            self.group.display()
        );
        ["sh", "-c", &enter, "sh"].map(String::from).to_vec()
    }

    /// A program in the group that writes into so many MiB of its memory, again and again.
    fn hog(&self, mib: u64) -> Result<Hog> {
        let wrap = self.wrap();
        let child = Command::new(&wrap[0])
            .args(&wrap[1..])
            .args(["python3", "-c"])
            .arg(format!(
                "b = bytearray({mib} << 20)\nwhile True:\n  for i in range(0, len(b), 4096): b[i] = 1 + b[i] % 250"
            ))
            .stdin(Stdio::null())
            .spawn()?;
        Ok(Hog(child))
    }
}

impl Drop for Short {
    fn drop(&mut self) {
        if let Some(swap) = &self.swap {
            let _ = Command::new("swapoff").arg(swap).status();
        }
        let _ = std::fs::remove_dir(&self.group);
    }
}

struct Hog(Child);

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How much of a daemon is swapped out when its group has been far too short of memory for a while.
fn swapped(lock: &str) -> Result<Option<u64>> {
    // It reads and answers all the time; its memory has to be there first.
    let mut hearth = Hearth::with_pool("256M")?;
    let name = "a_daemon_stays_in_memory";
    let swap = hearth.dir().join("swap");
    // Declared first, so that it goes last: the group can only be removed when nobody is in it.
    let Some(short) = Short::of(name, 96 * MIB, &swap, 256 * MIB)? else {
        return Ok(None);
    };
    hearth.wrap = short.wrap();
    hearth.serve_args = vec!["--lock-memory".into(), lock.into()];
    hearth.start()?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let content = std::fs::read(&origin)?;
    let mut client = hearth.connect("d")?;
    let pid = hearth.pid().context("no daemon")?;
    let hog = short.hog(180)?;
    let of_hog = hog.0.id();
    wait::until("much is swapped out", LIMIT, || {
        (status(of_hog, "VmSwap:").ok()? > 80 * MIB).then_some(())
    })?;
    for round in 0..64u64 {
        let at = round % 16 * MIB;
        ensure!(client.read(at, MIB as u32)?[..] == content[at as usize..][..MIB as usize]);
    }
    let out = status(pid, "VmSwap:")?;
    drop((client, hog));
    hearth.stop()?;
    drop(short);
    Ok(Some(out))
}

#[test]
fn a_daemon_stays_in_memory_while_its_host_swaps() -> Result<()> {
    let name = "a_daemon_stays_in_memory";
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED {name}: needs root");
        return Ok(());
    }
    if !have(name, &["mkswap", "swapon", "swapoff", "python3"]) {
        return Ok(());
    }
    let Some(loose) = swapped("off")? else {
        return Ok(());
    };
    let locked = swapped("required")?;
    ensure!(
        loose > 0 && locked == Some(0),
        "swapped out: {loose} bytes unlocked, {locked:?} locked"
    );
    Ok(())
}
