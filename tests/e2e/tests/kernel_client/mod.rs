//! The NFS client of a guest's kernel: how it mounts, and what is known of it when it does not go on.
//!
//! Between the guest and this host stands the emulator's network, which makes connections of its own; so a client that is silent may be
//! waiting for its time to connect again (Linux doubles that, from 3 s to 5 min, with each connection that ends before anything was
//! answered), its connection may be stuck in the emulator, or the server may not answer. Which one it is cannot be seen from outside
//! afterwards: it is looked at while it lasts.

use std::fmt::Write;
use std::fs;
use std::time::Duration;

use anyhow::{Result, bail};
use hearth_rig::machine::{GUEST_LIMIT, Machine};
use serde_json::json;

/// A client that is silent for so long is looked at. It is waited for longer than Linux ever waits to connect again.
const SILENT: Duration = Duration::from_secs(90);
const _: () = assert!(GUEST_LIMIT.as_secs() > 300 + SILENT.as_secs());

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
