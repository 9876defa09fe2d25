//! The NFS client of a guest's kernel: how it mounts, and what is known of it when it does not go on.
//!
//! Between the guest and this host stands the emulator's network, which makes connections of its own. A client that is silent may be
//! waiting for its time to connect again (3 s in Linux 6.1, whether it is refused, closed or reset; but TCP's first packet is repeated
//! after twice the time each time, up to 64 s, when nothing comes back), its connection may be stuck in the emulator, or the server
//! may not answer. Which one it is cannot be seen from outside afterwards: it is looked at while it lasts.

#![allow(dead_code)]

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::path;
use hearth_rig::machine::{GUEST_LIMIT, Machine};
use serde_json::json;

/// A client that is silent for so long is looked at. It is waited for longer than Linux may ever wait to connect again, by its source.
const SILENT: Duration = Duration::from_secs(90);
const _: () = assert!(GUEST_LIMIT.as_secs() > 300 + SILENT.as_secs());

/// An image with these programs, without what only debuggers read: a disk by which a guest gets them.
pub fn brought(dir: &Path, programs: &[PathBuf]) -> Result<PathBuf> {
    let (all, image) = (dir.join("programs"), dir.join("programs.img"));
    fs::create_dir(&all)?;
    for program in programs {
        let name = program.file_name().context("a program has a name")?;
        let to = all.join(name);
        ensure!(program.is_file(), "{} is no program", program.display());
        run_ok(
            "strip",
            &["--strip-debug", "-o", path(&to), path(program)],
            dir,
        )?;
    }
    fs::File::create(&image)?.set_len(128 << 20)?;
    run_ok(
        "mke2fs",
        &["-q", "-t", "ext4", "-d", path(&all), path(&image)],
        dir,
    )?;
    Ok(image)
}

/// Mounts what is served at `port` of this host's loopback, as `hearth attach-help --for linux` prints it. No `timeo` but Linux's own: a
/// client also gives up a connection that does not take its data for three times that, and a guest that is emulated on a busy
/// machine is slow, not dead.
pub fn mount(guest: &mut Machine, port: u16, at: &str, options: &str) -> Result<()> {
    let way = format!(
        "vers=3,proto=tcp,mountproto=tcp,hard,nolock,port={port},mountport={port},addr=10.0.2.2,mountaddr=10.0.2.2"
    );
    guest
        .run(&format!(
            "mkdir -p {at} && mount -i -t nfs -o {way}{options} 10.0.2.2:/vms {at}"
        ))
        .map(drop)
}

/// Waits until `condition`, a shell's, holds in the guest, whose client of what is served at `port` has to work for that.
pub fn wait_until(guest: &mut Machine, port: u16, condition: &str) -> Result<()> {
    let job = guest.start(&format!("until {condition}; do usleep 20000; done"))?;
    if guest.wait_within(&job, SILENT)?.is_some() {
        return Ok(());
    }
    eprintln!("not yet: {condition}\n{}", known(guest, port));
    match guest.wait_within(&job, GUEST_LIMIT)? {
        Some(_) => Ok(()),
        None => bail!("never: {condition}\n{}", known(guest, port)),
    }
}

/// What is known of the client: by itself, by the emulator and by this host.
fn known(guest: &mut Machine, port: u16) -> String {
    let mut text = String::new();
    let mut add = |what: &str, said: Result<String>| {
        let said = said.unwrap_or_else(|e| format!("{e:#}"));
        let _ = writeln!(text, "-- {what}\n{}", said.trim_end());
    };
    for (what, command) in [
        (
            "its transports",
            "grep -h xprt: /proc/self/mountstats".to_owned(),
        ),
        ("its connections", "cat /proc/net/tcp".to_owned()),
        ("its kernel", "dmesg | tail -15".to_owned()),
        // Past the client: 0 if the emulator and the server take a connection.
        (
            "a connection made by hand",
            format!("timeout 20 nc 10.0.2.2 {port} </dev/null >/dev/null 2>&1; echo status $?"),
        ),
    ] {
        let job = guest.start(&format!("{command} || true"));
        let ended = job.and_then(|job| guest.wait_within(&job, Duration::from_secs(60)));
        let said = ended.map(|ended| ended.map_or("no answer".to_owned(), |ended| ended.text));
        add(what, said);
    }
    let asked = json!({"command-line": "info usernet"});
    let emulator = guest.qmp.execute("human-monitor-command", asked);
    add("the emulator", emulator.map(|said| said.to_string()));
    let host = fs::read_to_string("/proc/net/tcp").map_err(Into::into);
    let port = format!(":{port:04X} ");
    let lines = |all: String| {
        let own: Vec<&str> = all.lines().filter(|line| line.contains(&port)).collect();
        own.join("\n")
    };
    add("this host", host.map(lines));
    text
}
