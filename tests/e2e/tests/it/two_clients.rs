//! Who uses a disk: two virtual machines on one of them, disks that insist, disks that are taken
//! away under somebody, and clients that take more than their share.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::guest::{DATA, Guest, How, kind};
use hearth_rig::nbd::{Client, Command as Nbd};
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);

fn served(more: &[&str]) -> Result<Hearth> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 8 * MIB)?;
    hearth.add("d", path(&origin), more)?;
    Ok(hearth)
}

fn show(hearth: &Hearth) -> Result<Value> {
    let text = hearth.ok(&["disk", "show", "d", "--json"])?;
    Ok(serde_json::from_str(&text)?)
}

/// A second process, which stays connected until it is dropped.
struct Io(Child);

impl Io {
    fn start(hearth: &Hearth) -> Result<Io> {
        let child = Command::new("qemu-io")
            .args(["-f", "raw", &hearth.uri("d")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Io(child))
    }

    fn command(&mut self, line: &str) -> Result<()> {
        let stdin = self.0.stdin.as_mut().context("no stdin")?;
        writeln!(stdin, "{line}")?;
        Ok(stdin.flush()?)
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What one client does after another has begun to write is named; what a migration does is not.
#[test]
fn two_processes_that_write_are_named() -> Result<()> {
    if !have("two processes that write", &["qemu-io"]) {
        return Ok(());
    }
    let hearth = served(&[])?;
    let mut first = hearth.connect("d")?;
    first.write(0, &[1; 4096])?;
    let mut second = Io::start(&hearth)?;
    // One line only: a second one would wait in its buffer until more comes.
    second.command("write -P 2 4k 4k")?;
    let both = |info: &Value| {
        let clients = info["clients"].as_array()?;
        (clients.len() == 2 && clients.iter().all(|c| c["writes"] == true)).then_some(())
    };
    wait::until("both have written", LIMIT, || both(&show(&hearth).ok()?))?;
    // As after a migration: the first flushes, and reads perhaps.
    first.flush()?;
    first.read(0, 4096)?;
    let info = show(&hearth)?;
    ensure!(info["notices"].is_null(), "{info}");
    let (own, other) = (std::process::id(), second.0.id());
    for (pid, word) in [(own, "two_clients"), (other, "qemu-io")] {
        let client = info["clients"].as_array().and_then(|list| {
            let mut list = list.iter();
            list.find(|c| c["pid"] == pid)
        });
        let client = client.with_context(|| format!("{pid} is not listed: {info}"))?;
        ensure!(client["kind"] == "nbd" && client["connections"] == 1);
        let command = client["command"].as_str().unwrap_or("");
        ensure!(command.contains(word), "{client}");
        ensure!(client["since"].as_u64() > Some(0));
    }
    // The first writes again.
    first.write(8192, &[3; 4096])?;
    let info = show(&hearth)?;
    let notice = info["notices"][0].as_str().unwrap_or("");
    for pid in [own, other] {
        let pid = format!("process {pid}");
        ensure!(notice.contains(&pid), "{info}");
        wait::until("it is logged", LIMIT, || {
            let log = hearth.log();
            log.lines()
                .any(|l| l.contains("WARN") && l.contains("two clients") && l.contains(&pid))
                .then_some(())
        })
        .with_context(|| hearth.log())?;
    }
    ensure!(info["two_writers"] == notice, "{info}");
    let events = hearth.ok(&["events", "--json"])?;
    let told = events.lines().map(serde_json::from_str::<Value>);
    let told = told.collect::<Result<Vec<_>, _>>()?;
    let mut told = told.iter().filter(|e| e["event"] == "two-clients-write");
    ensure!(told.next().is_some_and(|e| e["disk"] == "d"), "{events}");
    ensure!(told.next().is_none(), "{events}");
    let text = hearth.ok(&["disk", "show", "d"])?;
    ensure!(
        text.contains("qemu-io") && text.contains("two clients write"),
        "{text}"
    );
    Ok(())
}

/// `--clients 1`: any number of connections of one process, in any way, and nobody else.
#[test]
fn a_disk_may_insist_on_one_client() -> Result<()> {
    if !have("a disk that insists", &["qemu-io"]) {
        return Ok(());
    }
    let mut hearth = served(&["--clients", "1"])?;
    let other = |hearth: &Hearth| {
        let uri = hearth.uri("d");
        Command::new("qemu-io")
            .args(["-f", "raw", "-c", "read 0 4k", &uri])
            .output()
    };
    for restarted in [false, true] {
        if restarted {
            hearth.stop()?;
            hearth.start()?;
        }
        let (mut one, mut two) = (hearth.connect("d")?, hearth.connect("d")?);
        let mut guest = Guest::connect(&hearth.vhost_socket("d"), 1, How::default())?;
        one.write(0, &[1; 4096])?;
        two.write(0, &[2; 4096])?;
        ensure!(guest.request(0, kind::OUT, 0, &[(DATA, 4096)])?.0 == 0);
        let info = show(&hearth)?;
        ensure!(
            info["client_limit"] == 1 && info["connections"] == 3,
            "{info}"
        );
        ensure!(info["notices"].is_null(), "{info}");
        let refused = other(&hearth)?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(!refused.status.success(), "a second client was let in");
        ensure!(
            words.contains("1 client at a time") && words.contains(&std::process::id().to_string()),
            "{words}"
        );
    }
    wait::until("the disk is free", LIMIT, || {
        (show(&hearth).ok()?["connections"] == 0).then_some(())
    })?;
    ensure!(other(&hearth)?.status.success(), "{}", hearth.log());
    // Changed while it is in use.
    let _one = hearth.connect("d")?;
    ensure!(!other(&hearth)?.status.success());
    hearth.ok(&["disk", "set", "d", "--clients", "0"])?;
    ensure!(other(&hearth)?.status.success(), "{}", hearth.log());
    Ok(())
}

/// Nobody's disk is taken away without a word; a clean stop asks nobody.
#[test]
fn a_disk_in_use_is_not_taken_away_unasked() -> Result<()> {
    let mut hearth = served(&[])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[5; 4096])?;
    let own = format!("process {}", std::process::id());
    for command in [&["disk", "remove", "d"][..], &["pool", "export"]] {
        let words = hearth.refused(command)?;
        ensure!(words.contains(&own) && words.contains("--yes"), "{words}");
    }
    ensure!(show(&hearth)?["state"] == "attached");
    client.read(0, 4096)?;
    hearth.stop()?;
    hearth.start()?;
    let guest = Guest::connect(&hearth.vhost_socket("d"), 1, How::default())?;
    let words = hearth.refused(&["disk", "remove", "d"])?;
    ensure!(words.contains(&own), "{words}");
    hearth.ok(&["disk", "remove", "d", "--yes"])?;
    guest.wait_cut()?;
    // One that has just gone is none.
    hearth.add("d", path(&hearth.dir().join("o.img")), &[])?;
    drop(hearth.connect("d")?);
    hearth.ok(&["disk", "remove", "d"])?;
    hearth.add("d", path(&hearth.dir().join("o.img")), &[])?;
    let _client = hearth.connect("d")?;
    hearth.ok(&["pool", "export", "--yes"])?;
    Ok(())
}

fn rss(hearth: &Hearth) -> Result<u64> {
    let pid = hearth.pid().context("no daemon")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib: u64 = line
        .and_then(|l| l.trim().strip_suffix(" kB"))
        .context("no VmRSS")?
        .trim()
        .parse()?;
    Ok(kib * 1024)
}

/// Clients of one disk that ask for everything and take nothing: the memory stays below what the
/// operator gave, and the longest reads of another disk's clients go through beside them.
#[test]
fn clients_that_take_no_replies_starve_nobody() -> Result<()> {
    let mut hearth = Hearth::with_pool("256M")?;
    hearth.serve_args = vec!["--nbd-memory".into(), "192M".into()];
    hearth.start()?;
    for name in ["bad", "good"] {
        let origin = hearth.origin(&format!("{name}.img"), 40 * MIB)?;
        hearth.add(name, path(&origin), &[])?;
    }
    let longest = 32 * MIB as u32;
    let mut good = hearth.connect("good")?;
    let want = std::fs::read(hearth.dir().join("good.img"))?;
    ensure!(good.read(0, longest)? == want[..longest as usize]);
    let before = rss(&hearth)?;
    let mut bad = Vec::new();
    for _ in 0..12 {
        let mut client = hearth.connect("bad")?;
        for _ in 0..4 {
            client.send(Nbd::Read, 0, longest, &[])?;
        }
        bad.push(client);
    }
    // Whoever gets an answer at all has its first bytes by now; nobody takes more.
    for _ in 0..3 {
        ensure!(good.read(MIB, longest)? == want[MIB as usize..][..longest as usize]);
    }
    let mut another = Client::connect(&hearth.socket(), "good")?;
    ensure!(another.read(0, longest)? == want[..longest as usize]);
    let grown = rss(&hearth)?.saturating_sub(before);
    ensure!(grown < 256 * MIB, "{} MiB more", grown / MIB);
    drop(bad);
    Ok(())
}
