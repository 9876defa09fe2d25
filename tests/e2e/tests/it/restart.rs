//! Warm after a stop and after a kill; a restart that a connected client does not notice.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Command;
use hearth_rig::qemu_io::{PROGRAMS, QemuIo};
use hearth_rig::{Hearth, wait};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);

fn warmed(size: u64) -> Result<Hearth> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", size)?;
    hearth.add("d", path(&origin), &["--seq-cutoff", "0"])?;
    let mut client = hearth.connect("d")?;
    client.sweep(Command::Cache, 0..size, 1 << 18, 8, |_, _| {})?;
    wait::until("the disk is cached", LIMIT, || {
        (hearth.stats("d").ok()?["cached"].as_u64()? >= size).then_some(())
    })?;
    // Fills need not be durable to be served; a flush makes them so before anything is killed.
    client.write(0, &[5; 4096])?;
    client.flush()?;
    Ok(hearth)
}

/// All reads after the start are hits, and say what the origin says.
fn all_hits(hearth: &Hearth, size: u64) -> Result<()> {
    let mut client = hearth.connect("d")?;
    let origin = std::fs::read(hearth.dir().join("o.img"))?;
    for at in (0..size).step_by(1 << 16) {
        let data = client.read(at, 1 << 16)?;
        let from = if at == 0 { 4096 } else { 0 };
        ensure!(
            data[from..] == origin[at as usize + from..at as usize + (1 << 16)],
            "wrong data at {at}"
        );
        ensure!(
            at != 0 || data[..4096] == [5; 4096],
            "the flushed write is lost"
        );
    }
    let (hits, misses) = (
        hearth.counter("d", "read_hits")?,
        hearth.counter("d", "read_misses")?,
    );
    let partial = hearth.counter("d", "read_partial_hits")?;
    ensure!(
        hits > 0 && misses + partial == 0,
        "{hits} hits, {partial} partial hits, {misses} misses"
    );
    Ok(())
}

#[test]
fn warm_after_sigterm() -> Result<()> {
    let size = 32 * MIB;
    let mut hearth = warmed(size)?;
    hearth.stop()?;
    hearth.start()?;
    all_hits(&hearth, size)?;
    let pool = hearth.ok(&["pool", "show"])?;
    ensure!(!pool.trim().is_empty(), "pool show says nothing");
    Ok(())
}

#[test]
fn warm_after_kill9() -> Result<()> {
    let size = 32 * MIB;
    let mut hearth = warmed(size)?;
    hearth.kill9()?;
    hearth.start()?;
    all_hits(&hearth, size)
}

/// What is kept for a disk stays, whatever others read meanwhile: also after a stop and after a kill, when all that is
/// known of what was used lately is what the log says. Some goes all the same when no segment is free at the moment that one
/// with it is emptied: a few per cent under such a flood, and what is asked for most is back soon.
#[test]
fn what_is_kept_for_a_disk_outlives_restarts() -> Result<()> {
    let (size, kept, flood) = (16 * MIB, 12 * MIB, 160 * MIB);
    let most_of_it = kept / 4 * 3;
    let mut hearth = Hearth::serving("96M")?;
    let origin = hearth.origin("o.img", size)?;
    let limits = ["--seq-cutoff", "0", "--min", "12M"];
    hearth.add("d", path(&origin), &limits)?;
    let other = hearth.origin("other.img", flood)?;
    hearth.add("other", path(&other), &["--seq-cutoff", "0"])?;
    let cached = |hearth: &Hearth, disk: &str| {
        let shown = hearth.stats(disk)?["cached"].as_u64();
        shown.context("no number of cached bytes")
    };
    let mut client = hearth.connect("d")?;
    client.sweep(Command::Cache, 0..size, 1 << 18, 8, |_, _| {})?;
    drop(client);
    wait::until("the disk is cached", LIMIT, || {
        (cached(&hearth, "d").ok()? >= size).then_some(())
    })?;
    for round in ["at first", "after a stop", "after a kill"] {
        let mut client = hearth.connect("other")?;
        for _ in 0..2 {
            client.sweep(Command::Cache, 0..flood, 1 << 18, 8, |_, _| {})?;
        }
        drop(client);
        let (d, other) = (cached(&hearth, "d")?, cached(&hearth, "other")?);
        ensure!(other > 4 * kept, "{round}: the other has only {other}");
        ensure!(
            d >= most_of_it,
            "{round}: of 12 MiB that are kept there are {d}"
        );
        match round {
            "at first" => hearth.stop().map(drop)?,
            _ => hearth.kill9()?,
        }
        hearth.start()?;
    }
    let d = cached(&hearth, "d")?;
    ensure!(d >= most_of_it, "after all: {d}");
    Ok(())
}

/// A QEMU block node with `reconnect-delay` sees no error over a clean restart and over a kill.
#[test]
fn a_restart_is_invisible_to_qemu() -> Result<()> {
    if !have("restart under qemu", &PROGRAMS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let node = format!(
        "driver=nbd,server.type=unix,server.path={},export=d,reconnect-delay=60",
        path(&hearth.socket())
    );
    let mut qemu = QemuIo::start(&node, LIMIT)?;
    qemu.ask("write -f -P 7 0 64k", "wrote 65536/65536")?;
    for kill in [false, true] {
        qemu.ask("read -P 7 0 64k", "read 65536/65536")?;
        if kill {
            hearth.kill9()?
        } else {
            hearth.stop().map(drop)?
        }
        // Asked while nobody answers: it waits, it does not fail.
        qemu.say("read -P 7 4k 8k")?;
        hearth.start()?;
        qemu.answer("read 8192/8192")?;
        qemu.ask("write -P 7 64k 4k", "wrote 4096/4096")?;
    }
    qemu.end()
}

/// Settings and disks live in the pool: a restart knows them, changed while serving.
#[test]
fn the_pool_knows_its_disks() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let (one, two) = (
        hearth.origin("one.img", 4 * MIB)?,
        hearth.origin("two.img", 4 * MIB)?,
    );
    hearth.add("one", path(&one), &["--mode", "write-through"])?;
    hearth.add("two", path(&two), &["--max", "64M"])?;
    hearth.ok(&["disk", "set", "one", "--mode", "write-around"])?;
    hearth.ok(&["disk", "remove", "two"])?;
    for kill in [true, false] {
        if kill {
            hearth.kill9()?
        } else {
            hearth.stop().map(drop)?
        }
        hearth.start()?;
        let list = hearth.ok(&["disk", "list"])?;
        ensure!(
            list.contains("one") && list.contains("write-around") && !list.contains("two"),
            "{list}"
        );
        hearth.connect("one")?;
    }
    Ok(())
}

/// A grown origin is taken over without losing the cache.
#[test]
fn an_origin_grows() -> Result<()> {
    let size = 8 * MIB;
    let mut hearth = warmed(size)?;
    let origin = hearth.dir().join("o.img");
    hearth.ok(&["disk", "flush", "d"])?;
    std::fs::OpenOptions::new()
        .write(true)
        .open(&origin)?
        .set_len(size * 2)?;
    hearth.ok(&["disk", "set", "d", "--size-from-origin"])?;
    let mut client = hearth.connect("d")?;
    ensure!(client.size == size * 2, "export has {} bytes", client.size);
    client.write(size + 4096, &[9; 4096])?;
    client.flush()?;
    let before = hearth.counter("d", "read_misses")?;
    client.read(MIB, 65536)?;
    ensure!(
        hearth.counter("d", "read_misses")? == before,
        "growing lost the cache"
    );
    hearth.kill9()?;
    hearth.start()?;
    let mut client = hearth.connect("d")?;
    ensure!(
        client.size == size * 2 && client.read(size + 4096, 4096)? == [9; 4096],
        "the grown part was lost"
    );
    Ok(())
}
