//! A host that runs out of memory: the daemon stays in it, and its guests' memory can be swapped.
//!
//! Exclusive: swap

use anyhow::{Context, Result, anyhow, ensure};
use hearth_rig::blk::Disk;
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Command as Nbd;
use hearth_rig::process::status;
use hearth_rig::short::Group;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

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

/// Swap of a test, off again with it.
struct Swap(PathBuf);

impl Swap {
    /// `None`, with the reason said for `test`, where there can be none.
    fn on(test: &str, file: &Path, size: u64) -> Result<Option<Swap>> {
        std::fs::write(file, vec![0; size as usize])?;
        let run = |program: &str| Command::new(program).arg(file).output();
        ensure!(run("mkswap")?.status.success());
        let on = run("swapon")?;
        if !on.status.success() {
            let why = String::from_utf8_lossy(&on.stderr).into_owned();
            println!("SKIPPED {test}: no swap here: {why}");
            return Ok(None);
        }
        Ok(Some(Swap(file.to_owned())))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).status();
    }
}

/// How much of a daemon is swapped out when its group has been far too short of memory for a while.
fn swapped(lock: &str) -> Result<Option<u64>> {
    let test = "a_daemon_stays_in_memory";
    // What is declared first goes last: the group when nobody is in it any more.
    let Some(group) = Group::of(test, 96 * MIB)? else {
        return Ok(None);
    };
    let mut hearth = Hearth::with_pool("256M")?;
    let Some(_swap) = Swap::on(test, &hearth.dir().join("swap"), 256 * MIB)? else {
        return Ok(None);
    };
    hearth.wrap = group.wrap();
    hearth.serve_args = vec!["--lock-memory".into(), lock.into()];
    hearth.start()?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let content = std::fs::read(&origin)?;
    let mut client = hearth.connect("d")?;
    let pid = hearth.pid().context("no daemon")?;
    let hog = group.hog(180)?;
    let of_hog = hog.pid();
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
    Ok(Some(out))
}

#[test]
fn a_daemon_stays_in_memory_while_its_host_swaps() -> Result<()> {
    let test = "a_daemon_stays_in_memory";
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED {test}: needs root");
        return Ok(());
    }
    if !have(test, &["mkswap", "swapon", "swapoff", "python3"]) {
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

/// Anonymous memory of a process, bytes.
fn anonymous(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.context("no RssAnon")?.trim().trim_end_matches(" kB");
    Ok(kib.parse::<u64>()? << 10)
}

/// Long requests of several clients take no more than what `pool show` announces, which is 24 bytes for each block and 64 MiB, and
/// what they took comes back.
#[test]
fn long_requests_take_announced_memory_and_return_it() -> Result<()> {
    let hearth = Hearth::serving("4G")?;
    let origin = hearth.dir().join("o.raw");
    std::fs::File::create(&origin)?.set_len(512 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let pool: Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    let announced = pool["ram_most"].as_u64().context("ram_most")?;
    let blocks = (4 << 30) / 4096;
    ensure!(announced <= 24 * blocks + 64 * MIB, "{announced} announced");
    let pid = hearth.pid().context("not running")?;
    let idle = anonymous(pid)?;
    let mut peak = 0;
    std::thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..4)
            .map(|n| {
                let hearth = &hearth;
                scope.spawn(move || -> Result<()> {
                    let mut client = hearth.connect("d")?;
                    let data = vec![n as u8; MIB as usize];
                    for round in 0..20u64 {
                        for turn in 0..16u64 {
                            let at = (round * 64 + turn * 4 + n) % 512 * MIB;
                            // A client that writes while it takes no answers to reads is cut off.
                            match round % 2 {
                                0 => {
                                    client.send(Nbd::Write { fua: false }, at, MIB as u32, &data)?
                                }
                                _ => client.send(Nbd::Read, at, MIB as u32, &[])?,
                            };
                        }
                        for _ in 0..16 {
                            client.receive()?;
                        }
                    }
                    Ok(client.flush()?)
                })
            })
            .collect();
        while !clients.iter().all(|client| client.is_finished()) {
            peak = peak.max(anonymous(pid)?);
            std::thread::yield_now();
        }
        clients
            .into_iter()
            .try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
    })?;
    ensure!(peak <= announced, "{peak} of {announced} announced");
    // The index and the RAM stage stay; buffers go.
    let kept = announced - 40 * MIB;
    wait::until("memory is returned", LIMIT, || {
        (anonymous(pid).ok()? <= kept.max(idle)).then_some(())
    })?;
    Ok(())
}
