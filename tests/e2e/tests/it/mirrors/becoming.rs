//! A disk that was served from one origin becomes a mirror while it is used, and goes back to one leg.

use super::{
    LIMIT, LOAD, attached, blank, busy, end, kills, legs_of, states, two_legs, wait_event,
    wait_states,
};
use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::killer::Killer;
use hearth_rig::load::Writer;
use hearth_rig::nbd::Command;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

fn info(hearth: &Hearth) -> Result<serde_json::Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["disk", "show", "d", "--json"])?,
    )?)
}

#[test]
fn a_disk_becomes_a_mirror_while_it_is_used() -> Result<()> {
    for (seed, mode) in (21..).zip(["write-back", "write-through", "write-around", "off"]) {
        let (mut hearth, a, b) = two_legs()?;
        hearth.add("d", path(&a), &["--mode", mode, "--max", "64M"])?;
        let before = info(&hearth)?;
        let mut writer = Writer::new(seed);
        let mut client = hearth.connect("d")?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        let add = ["disk", "mirror", "d", "--add", path(&b)];
        busy(&hearth, &mut writer, &mut client, &add)?;
        wait_event(&hearth, "leg-added", path(&b))?;
        wait_states(&hearth, &["current", "current"])?;
        // It is the same disk to its guest and to its user.
        let after = info(&hearth)?;
        for field in ["name", "size", "serial", "mode", "max"] {
            ensure!(before[field] == after[field], "{field}: {before} {after}");
        }
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
        writer.check_stable(&mut client)?;
        // What it was may go.
        let remove = ["disk", "mirror", "d", "--remove", path(&a)];
        busy(&hearth, &mut writer, &mut client, &remove)?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        end(&mut hearth, &mut writer, client, &[&b])?;
        hearth.start()?;
        attached(&hearth)?;
        ensure!(states(&hearth)? == ["current"]);
        writer.check(&mut hearth.connect("d")?)?;
        hearth.ok(&["disk", "remove", "d"])?;
        writer.check_file(&b)?;
    }
    Ok(())
}

#[test]
fn a_disk_that_cannot_become_a_mirror_stays_what_it_is() -> Result<()> {
    let (hearth, a, b) = two_legs()?;
    hearth.add("d", path(&a), &[])?;
    let refused = |leg: &Path| hearth.refused(&["disk", "mirror", "d", "--add", path(leg)]);
    let full = hearth.origin("full", 64 << 20)?;
    ensure!(refused(&full)?.contains("holds something"));
    ensure!(refused(&a)?.contains("already"));
    ensure!(refused(&hearth.dir().join("none"))?.contains("none"));
    let no_mirror = hearth.refused(&["disk", "mirror", "d", "--rate", "1M"])?;
    ensure!(
        no_mirror.contains("not served from a mirror"),
        "{no_mirror}"
    );
    ensure!(legs_of(&info(&hearth)?).is_empty());
    hearth.ok(&["disk", "remove", "d"])?;
    hearth.add("d", path(&a), &["--read-only"])?;
    ensure!(refused(&b)?.contains("read-only"));
    ensure!(legs_of(&info(&hearth)?).is_empty());
    Ok(())
}

/// What was sent to the origin before cannot be seen by the mirror: no leg is filled from it until that has ended.
#[test]
fn a_leg_is_not_filled_past_what_was_sent_before() -> Result<()> {
    let filters = ["log", "pause"];
    let there = |filter: &str| {
        let dir = std::process::Command::new("nbdkit")
            .arg("--dump-config")
            .output();
        let dir = dir.ok().and_then(|out| String::from_utf8(out.stdout).ok());
        let dir = dir.as_deref().and_then(|text| {
            let mut lines = text.lines();
            lines.find_map(|line| line.strip_prefix("filterdir=").map(str::to_owned))
        });
        dir.is_some_and(|dir| {
            Path::new(&dir)
                .join(format!("nbdkit-{filter}-filter.so"))
                .exists()
        })
    };
    if !have("mirrors: an origin that owes answers", &["nbdkit"])
        || !filters.iter().all(|filter| there(filter))
    {
        return Ok(());
    }
    let (mut hearth, a, b) = two_legs()?;
    let (log, control) = (hearth.dir().join("log"), hearth.dir().join("control"));
    let (logfile, pause) = (
        format!("logfile={}", path(&log)),
        format!("pause-control={}", path(&control)),
    );
    let args = [
        "-f",
        "-U",
        "{socket}",
        "--filter=log",
        "--filter=pause",
        "file",
        path(&a),
    ];
    let mut server = Server::start(
        "nbdkit",
        &[&args[..], &[&logfile, &pause]].concat(),
        hearth.dir().join("a.s"),
    )?;
    let tell = |what: u8, says: u8| -> Result<()> {
        let mut stream = UnixStream::connect(&control)?;
        stream.write_all(&[what])?;
        let mut said = [0];
        stream.read_exact(&mut said)?;
        ensure!(said[0] == says, "it says {said:?}");
        Ok(())
    };
    hearth.add("d", &server.uri(""), &["--sole-user", "--mode", "off"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[1; 4096])?;
    tell(b'p', b'P')?;
    let writes = || {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        said.lines().filter(|line| line.contains(" Write ")).count()
    };
    let known = writes();
    client.send(Command::Write { fua: false }, 4096, 4096, &[2; 4096])?;
    wait::until("the write is at the origin", LIMIT, || {
        (writes() > known).then_some(())
    })?;
    let add = ["disk", "mirror", "d", "--add", path(&b)];
    let refused = hearth.refused(&add)?;
    ensure!(refused.contains("owes answers"), "{refused}");
    ensure!(states(&hearth)? == ["current"], "it has another leg");
    tell(b'r', b'R')?;
    let answer = client.receive()?;
    ensure!(answer.error == 0, "the write failed with {}", answer.error);
    hearth.ok(&add)?;
    wait_states(&hearth, &["current", "current"])?;
    ensure!(client.read(0, 8192)? == [[1; 4096], [2; 4096]].concat());
    drop(client);
    hearth.stop()?;
    server.stop()?;
    ensure!(std::fs::read(&a)? == std::fs::read(&b)?);
    Ok(())
}

/// Calls of the kernel the daemon is killed at, and how many of each.
const STEPS: &[(&str, u32)] = &[
    ("pwrite64", 4),
    ("fsync,fdatasync", 4),
    ("pwritev,pwritev2", 2),
    ("unlink,unlinkat", 1),
    ("openat", 4),
    ("clone,clone3", 3),
    ("io_uring_setup", 1),
    ("io_uring_enter", 6),
];

/// The disk is what it was, or a mirror whose new leg is not believed before it is whole.
#[test]
fn a_kill_at_any_step_leaves_the_disk_or_a_mirror() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    let pid = hearth.pid().context("no daemon")?;
    match Killer::new(pid, "mount", 1) {
        Ok(killer) => drop(killer),
        Err(e) => {
            eprintln!("skipped: {e:#}; scripts/setup.sh test installs strace");
            return Ok(());
        }
    }
    let mut found = BTreeMap::<String, u32>::new();
    for (i, (calls, most)) in STEPS.iter().enumerate() {
        for at in 1..=*most {
            let step = || format!("killed at {calls}, the {at}.");
            let mode = ["write-back", "off"][(at as usize + i) % 2];
            for leg in ["a", "b"] {
                blank(&hearth, leg)?;
            }
            hearth.add("d", path(&a), &["--mode", mode])?;
            let mut writer = Writer::new(u64::from(at));
            let mut client = hearth.connect("d")?;
            writer.load(&mut client, LOAD / 3, || Ok(()))?;
            writer.flush(&mut client)?;
            let add = ["disk", "mirror", "d", "--rate", "1G", "--add", path(&b)];
            let killer = Killer::new(hearth.pid().context("no daemon")?, calls, at);
            let asked = hearth.ok(&add);
            drop(killer);
            drop(client);
            // It may also be killed just after it has answered, and a process that is killed takes some time to end.
            if asked.is_err() || info(&hearth).is_err() {
                wait::until("the daemon is gone", LIMIT, || {
                    (!hearth.running()).then_some(())
                })?;
                // It has ended; this only says so.
                hearth.kill9()?;
                hearth.start()?;
                attached(&hearth).with_context(step)?;
            }
            let shown = info(&hearth)?;
            let legs = legs_of(&shown);
            *found.entry(legs.join(" ")).or_default() += 1;
            ensure!(
                legs.len() < 2 || legs[0] == "current",
                "{}: {legs:?}",
                step()
            );
            writer.check(&mut hearth.connect("d")?).with_context(step)?;
            if legs.len() < 2 {
                hearth.ok(&add).with_context(step)?;
            }
            wait_states(&hearth, &["current", "current"]).with_context(step)?;
            writer.check(&mut hearth.connect("d")?).with_context(step)?;
            hearth.ok(&["disk", "remove", "d"]).with_context(step)?;
            writer.check_file(&a).with_context(step)?;
            writer.check_file(&b).with_context(step)?;
        }
    }
    println!("legs after a kill: {found:?}");
    ensure!(found.len() > 2, "all kills left the same: {found:?}");
    Ok(())
}

/// The same under a load, wherever the daemon is then.
#[test]
fn a_kill_while_a_disk_becomes_a_mirror() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    for cycle in 0..kills(4) {
        let step = || format!("cycle {cycle}");
        for leg in ["a", "b"] {
            blank(&hearth, leg)?;
        }
        let mode = ["off", "write-back"][cycle as usize % 2];
        hearth.add("d", path(&a), &["--mode", mode])?;
        let mut writer = Writer::new(u64::from(30 + cycle));
        let mut client = hearth.connect("d")?;
        writer.load(&mut client, LOAD / 3, || Ok(()))?;
        let pid = hearth.pid().context("no daemon")?;
        std::thread::scope(|scope| -> Result<()> {
            let shown = &hearth;
            let work = scope.spawn(|| shown.ok(&["disk", "mirror", "d", "--add", path(&b)]));
            let life = Duration::from_millis(writer.below(80));
            writer.load(&mut client, life, || {
                // SAFETY: it is the process that was started here, and has not been waited for.
                ensure!(unsafe { libc::kill(pid as i32, libc::SIGKILL) } == 0);
                Ok(())
            })?;
            // It may have been answered or not.
            work.join()
                .map(drop)
                .map_err(|_| anyhow::anyhow!("it panicked"))
        })
        .with_context(step)?;
        hearth.kill9()?;
        hearth.start()?;
        attached(&hearth)?;
        writer.check(&mut hearth.connect("d")?).with_context(step)?;
        if legs_of(&info(&hearth)?).len() < 2 {
            hearth.ok(&["disk", "mirror", "d", "--add", path(&b)])?;
        }
        wait_states(&hearth, &["current", "current"]).with_context(step)?;
        hearth.ok(&["disk", "remove", "d"])?;
        writer.check_file(&a).with_context(step)?;
        writer.check_file(&b).with_context(step)?;
    }
    Ok(())
}
