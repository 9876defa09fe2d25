//! What happens to daemons by accident: signals meant for others, and a log that nothing reads.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};

use crate::stored::{Lab, root};

const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

#[test]
fn signals_of_others_end_no_daemon() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("o.raw", MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let mut client = hearth.connect("d")?;
    let pid = hearth.pid().context("not running")? as i32;
    for signal in [
        libc::SIGHUP,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGALRM,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGIO,
        libc::SIGPIPE,
        libc::SIGWINCH,
    ] {
        // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
        unsafe { libc::kill(pid, signal) };
        client.write(0, &[signal as u8; 4096])?;
        client.flush()?;
        ensure!(hearth.running(), "signal {signal} ended the daemon");
    }
    wait::until("SIGHUP is reported", LIMIT, || {
        hearth.log().contains("SIGHUP").then_some(())
    })?;
    // A program that takes over has no handlers at first.
    hearth.ok(&["upgrade", "--yes"])?;
    // SAFETY: as above.
    unsafe { libc::kill(pid, libc::SIGHUP) };
    client.write(0, &[7; 4096])?;
    client.flush()?;
    drop(client);
    hearth.stop().map(drop)
}

#[test]
fn log_that_nothing_reads_holds_up_nothing() -> Result<()> {
    let mut hearth = Hearth::with_pool("64M")?;
    let fifo = hearth.dir().join("log.fifo");
    let made = Command::new("mkfifo").arg(&fifo).status()?;
    ensure!(made.success());
    // Open at both ends and never read.
    let reader = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&fifo)?;
    let script = format!("exec \"$@\" 2>'{}'", path(&fifo));
    hearth.wrap = ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
    hearth.serve_args = ["--log", "debug"].map(str::to_owned).to_vec();
    hearth.start()?;
    let origin = hearth.origin("o.raw", MIB)?;
    hearth.add("d", path(&origin), &[])?;
    // A pipe holds 64 KiB, and each connection is some lines.
    for round in 0..500u64 {
        let mut client = hearth.connect("d")?;
        client.write(round % 256 * 4096, &[round as u8; 4096])?;
        client.flush()?;
    }
    hearth.ok(&["disk", "list"])?;
    hearth.ok(&["disk", "flush", "d"])?;
    // It ends in order, and as soon as otherwise.
    hearth.stop()?;
    drop(reader);
    Ok(())
}

/// A datastore that clients use is not taken away unasked, also when they were idle over a restart.
#[test]
fn datastore_in_use_is_not_removed_unasked() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    root(&mut client)?;
    wait::until("the client is noted", LIMIT, || {
        let noted = std::fs::read_to_string(lab.state().join("clients.json")).ok()?;
        noted.contains("127.0.0.1").then_some(())
    })?;
    for round in 0..3 {
        for command in [&["datastore", "remove", "vms"][..], &["pool", "export"]] {
            let words = lab.hearth.refused(command)?;
            ensure!(words.contains("in use by 127.0.0.1"), "{words}");
        }
        match round {
            0 => lab.hearth.kill9()?,
            _ => drop(lab.hearth.stop()?),
        }
        lab.hearth.start()?;
        lab.address()?;
    }
    let mut client = lab.client()?;
    client.unmount("/vms")?;
    lab.hearth.ok(&["datastore", "remove", "vms"])?;
    lab.hearth.stop().map(drop)
}

/// It neither is gone nor serves: starting another one would be wrong.
#[test]
fn stopped_daemon_is_reported_as_hanging() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let pid = hearth.pid().context("not running")? as i32;
    // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let shown = hearth.hearth(&["status"])?;
    // SAFETY: as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(
        shown.contains("does not answer") && !shown.contains("daemon is not there"),
        "{shown}"
    );
    hearth.stop().map(drop)
}

/// QEMU reconnects with its next request. A guest that is idle over a restart still has its disk.
#[test]
fn idle_guest_is_known_after_restart() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("o.raw", MIB)?;
    hearth.add("d", path(&origin), &[])?;
    // A process that keeps the disk open, and does nothing with it.
    let mut guest = Command::new("qemu-io")
        .args(["-f", "raw", &hearth.uri("d")])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()?;
    wait::until("the guest is noted", LIMIT, || {
        let noted = std::fs::read_to_string(hearth.dir().join("state/clients.json")).ok()?;
        noted
            .contains(&format!("\"pid\":{}", guest.id()))
            .then_some(())
    })?;
    for round in 0..2 {
        match round {
            0 => hearth.kill9()?,
            _ => drop(hearth.stop()?),
        }
        hearth.start()?;
        let words = hearth.refused(&["disk", "remove", "d"])?;
        ensure!(
            words.contains("in use") && words.contains("qemu-io"),
            "{words}"
        );
        let words = hearth.refused(&["pool", "export"])?;
        ensure!(words.contains("in use"), "{words}");
    }
    guest.kill()?;
    guest.wait()?;
    hearth.ok(&["disk", "remove", "d"])?;
    hearth.stop().map(drop)
}
