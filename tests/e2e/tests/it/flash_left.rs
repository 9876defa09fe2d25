//! One of two flash devices of a pool that keeps everything once fails under a client: the daemon goes on with what the other holds, by
//! itself, warm, and the client notices nothing.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::nbd::Command;
use hearth_rig::pattern::BLOCK;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// A disk that is read before and after.
const SIZE: u64 = 32 * MIB;
/// Of a load between two looks.
const BUSY: Duration = Duration::from_millis(100);

/// A daemon on a pool of two files; and where the second is.
fn two() -> Result<(Hearth, PathBuf)> {
    let mut hearth = Hearth::bare()?;
    let second = hearth.dir().join("second.img");
    let (a, b) = (path(hearth.flash()).to_owned(), path(&second).to_owned());
    hearth.ok(&[
        "pool", "create", "--flash", &a, "--flash", &b, "--size", "96M",
    ])?;
    hearth.serve_args = vec!["--flash".into(), b];
    hearth.start()?;
    Ok((hearth, second))
}

fn pool(hearth: &Hearth) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["pool", "show", "--json"])?,
    )?)
}

fn devices(hearth: &Hearth) -> Result<usize> {
    let pool = pool(hearth)?;
    Ok(pool["devices"].as_array().context("no devices")?.len())
}

fn cached(hearth: &Hearth, disk: &str) -> Result<u64> {
    hearth.stats(disk)?["cached"].as_u64().context("no figure")
}

/// Has the daemon cache all of a disk, half of it on each device.
fn warm(hearth: &Hearth, disk: &str) -> Result<()> {
    let origin = hearth.origin(&format!("{disk}.img"), SIZE)?;
    let more = ["--mode", "write-through", "--seq-cutoff", "0"];
    hearth.add(disk, path(&origin), &more)?;
    let mut client = hearth.connect(disk)?;
    client.sweep(Command::Cache, 0..SIZE, 1 << 18, 8, |_, _| {})?;
    wait::until("all is cached", LIMIT, || {
        (cached(hearth, disk).ok()? == SIZE).then_some(())
    })?;
    let pool = pool(hearth)?;
    for device in pool["devices"].as_array().context("no devices")? {
        ensure!(device["cached"].as_u64() > Some(0), "{pool}");
    }
    Ok(())
}

/// The disk holds what its origin does, and some of it is read from flash.
fn is_warm(hearth: &Hearth, disk: &str) -> Result<()> {
    let plain = std::fs::read(hearth.dir().join(format!("{disk}.img")))?;
    let before = hearth.counter(disk, "read_hit_bytes").unwrap_or(0);
    let mut client = hearth.connect(disk)?;
    for at in (0..SIZE).step_by(MIB as usize) {
        let data = client.read(at, MIB as u32)?;
        ensure!(data == plain[at as usize..][..MIB as usize], "at {at}");
    }
    wait::until("hits are counted", LIMIT, || {
        let now = hearth.counter(disk, "read_hit_bytes").ok()?;
        (now > before).then_some(())
    })
    .with_context(|| format!("{:?}\n{}", hearth.stats(disk), hearth.log()))
}

/// Keeps a disk busy until the daemon has gone on with one device.
fn load_until_it_goes_on(
    hearth: &Hearth,
    writer: &mut Writer,
    client: &mut hearth_rig::nbd::Client,
    second: &Path,
) -> Result<()> {
    let end = std::time::Instant::now() + LIMIT;
    while devices(hearth).ok() != Some(1) {
        ensure!(
            std::time::Instant::now() < end,
            "{:?}\n{}",
            hearth.ok(&["pool", "show"]),
            hearth.log()
        );
        // What is written makes the file long again, if nobody has looked at it meanwhile.
        cut_short(second)?;
        writer
            .load(client, BUSY, || Ok(()))
            .with_context(|| hearth.log())?;
    }
    Ok(())
}

/// The device ends behind its first blocks.
fn cut_short(second: &Path) -> Result<()> {
    Ok(OpenOptions::new()
        .write(true)
        .open(second)?
        .set_len(2 * MIB)?)
}

fn blank(hearth: &Hearth, name: &str) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    std::fs::File::create(&file)?.set_len(BLOCKS * BLOCK as u64)?;
    Ok(file)
}

/// Killed right after it went on, and started by the list that the service still has: warm as well. The device that
/// failed is back then, as it was, and is not believed.
#[test]
fn goes_on_warm_under_a_client() -> Result<()> {
    let (mut hearth, second) = two()?;
    warm(&hearth, "still")?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", path(&origin), &["--mode", "write-through"])?;
    let mut client = hearth.connect("d")?;
    let mut writer = Writer::new(5);
    writer.load(&mut client, BUSY, || Ok(()))?;
    let old = hearth.dir().join("old.img");
    std::fs::copy(&second, &old)?;
    load_until_it_goes_on(&hearth, &mut writer, &mut client, &second)?;
    let kept = cached(&hearth, "still")?;
    ensure!(
        kept > 0 && kept < SIZE,
        "{kept} bytes are cached\n{}",
        hearth.log()
    );
    is_warm(&hearth, "still")?;
    // The same connection.
    writer.load(&mut client, BUSY, || Ok(()))?;
    writer.check(&mut client)?;
    let shown = pool(&hearth)?;
    ensure!(shown["state"] == "serving", "{shown}");
    let events = hearth.ok(&["events"])?;
    ensure!(
        events.contains("second.img is lost: the pool goes on without it"),
        "{events}"
    );

    drop(client);
    hearth.kill9()?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(devices(&hearth)? == 1);
    is_warm(&hearth, "still")?;
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    writer.load(&mut client, BUSY, || Ok(()))?;
    drop(client);
    hearth.kill9()?;
    std::fs::copy(&old, &second)?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(
        devices(&hearth)? == 1,
        "what is too old is used: {}",
        hearth.log()
    );
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    writer.check_stable(&mut client)
}

/// An origin that is away, perhaps for days, keeps no other disk without its cache. What was cached of its own disk is let go,
/// for it has not made durable what was written to it last, and is as it should be when it comes back.
#[test]
fn goes_on_while_an_origin_is_away() -> Result<()> {
    if !have("an origin that is away", &["nbdkit"]) {
        return Ok(());
    }
    let (hearth, second) = two()?;
    warm(&hearth, "still")?;
    let far = blank(&hearth, "far.img")?;
    let socket = hearth.dir().join("far.sock");
    let file = format!("file={}", path(&far));
    let mut server = Server::start("nbdkit", &["-f", "-U", "{socket}", "file", &file], socket)?;
    let more = [
        "--mode",
        "write-through",
        "--origin-timeout",
        "2",
        "--sole-user",
    ];
    hearth.add("away", &server.uri(""), &more)?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", path(&origin), &["--mode", "write-through"])?;
    let mut away = hearth.connect("away")?;
    let first = vec![1; BLOCK];
    for at in 0..64 {
        away.write(at * BLOCK as u64, &first)?;
    }
    away.flush()?;
    // Answered, and not durable when the server dies.
    let then = vec![2; BLOCK];
    for at in 0..16 {
        away.write(at * BLOCK as u64, &then)?;
    }
    server.kill9()?;
    ensure!(away.flush().is_err(), "its server is dead");

    let mut client = hearth.connect("d")?;
    let mut writer = Writer::new(8);
    cut_short(&second)?;
    // That disk's client would lose its connection. Nobody does that unasked.
    wait::until("it says whom it waits for", LIMIT, || {
        // What is written makes the file long again, if nobody has looked at it meanwhile.
        cut_short(&second).ok()?;
        let _ = writer.load(&mut client, BUSY, || Ok(()));
        // Until it knows that, its disk would be worse off than after a power cut.
        let told = away.flush().is_err();
        let shown = hearth.ok(&["pool", "show"]).ok()?;
        (told && shown.contains("away") && shown.contains("hearth pool remove-flash")).then_some(())
    })
    .with_context(|| format!("{:?}", hearth.ok(&["pool", "show"])))?;
    ensure!(devices(&hearth)? == 2);
    drop(away);
    load_until_it_goes_on(&hearth, &mut writer, &mut client, &second)?;
    is_warm(&hearth, "still")?;
    writer.load(&mut client, BUSY, || Ok(()))?;
    writer.check(&mut client)?;
    server.up()?;
    wait::until("its disk is served again", LIMIT, || {
        let mut away = hearth.connect("away").ok()?;
        away.flush().ok()
    })
    .with_context(|| hearth.log())?;
    let mut away = hearth.connect("away")?;
    for at in 0..64 {
        let data = away.read(at * BLOCK as u64, BLOCK as u32)?;
        // This server had handed on all that it answered.
        ensure!(
            data == if at < 16 { &then[..] } else { &first[..] },
            "block {at}"
        );
    }
    Ok(())
}

/// What is dirty and readable goes to the origins first. What was on the device that failed alone is lost, as ever: it is listed, and until
/// somebody has accepted it, the pool waits.
#[test]
fn waits_for_what_is_dirty() -> Result<()> {
    let (hearth, second) = two()?;
    warm(&hearth, "still")?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", &format!("model-latency=5ms:{}", path(&origin)), &[])?;
    let mut client = hearth.connect("d")?;
    let mut writer = Writer::new(6);
    writer.load(&mut client, Duration::from_millis(400), || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    cut_short(&second)?;
    let lost = || -> Option<u64> {
        let shown = hearth.ok(&["disk", "show", "d", "--json"]).ok()?;
        let disk: Value = serde_json::from_str(&shown).ok()?;
        disk["lost"]
            .as_array()
            .map(|lost| lost.len() as u64)
            .filter(|lost| *lost > 0)
    };
    wait::until("what is lost is listed", LIMIT, lost).with_context(|| hearth.log())?;
    wait::until("it says what it waits for", LIMIT, || {
        let shown = hearth.ok(&["pool", "show"]).ok()?;
        shown.contains("hearth disk accept-loss").then_some(())
    })
    .with_context(|| format!("{:?}", hearth.ok(&["pool", "show"])))?;
    let refused = hearth.refused(&["pool", "remove-flash", path(&second)])?;
    ensure!(refused.contains("accept-loss"), "{refused}");
    // As it is found, piece by piece.
    wait::until("it goes on", LIMIT, || {
        let _ = hearth.hearth(&["disk", "accept-loss", "d"]);
        (devices(&hearth).ok()? == 1).then_some(())
    })
    .with_context(|| hearth.log())?;
    is_warm(&hearth, "still")
}

/// Stopped in order with nothing dirty, and started without the second device: the first goes on with what it holds. The other one is too old
/// from then on.
#[test]
fn a_start_goes_on_without_a_device_that_held_clean_copies_only() -> Result<()> {
    let (mut hearth, second) = two()?;
    warm(&hearth, "still")?;
    hearth.stop()?;
    let away = second.with_extension("away");
    std::fs::rename(&second, &away)?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(devices(&hearth)? == 1, "{}", hearth.log());
    hearth.logged("second.img is missing, and held nothing but")?;
    let kept = cached(&hearth, "still")?;
    ensure!(kept > 0 && kept < SIZE, "{kept} bytes are cached");
    is_warm(&hearth, "still")?;
    hearth.stop()?;
    std::fs::rename(&away, &second)?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(devices(&hearth)? == 1, "what is too old is used");
    is_warm(&hearth, "still")
}

/// With something dirty on flash, nothing is given up unasked: the device may be back.
#[test]
fn a_start_waits_for_a_device_if_anything_is_dirty() -> Result<()> {
    let (mut hearth, second) = two()?;
    warm(&hearth, "still")?;
    let origin = blank(&hearth, "o.img")?;
    // Nothing of it reaches its origin.
    hearth.add("d", &format!("fault=eio-write:{}", path(&origin)), &[])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[7; BLOCK])?;
    client.flush()?;
    drop(client);
    hearth.stop()?;
    let away = second.with_extension("away");
    std::fs::rename(&second, &away)?;
    hearth.start().with_context(|| hearth.log())?;
    hearth.logged("cannot go on without it")?;
    ensure!(hearth.connect("d").is_err(), "a stale disk is served");
    let plain = std::fs::read(hearth.dir().join("still.img"))?;
    let mut client = hearth.connect("still")?;
    ensure!(client.read(0, MIB as u32)? == plain[..MIB as usize]);
    drop(client);
    hearth.stop()?;
    std::fs::rename(&away, &second)?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(devices(&hearth)? == 2, "{}", hearth.log());
    wait::until("the dirty disk is served again", LIMIT, || {
        hearth.connect("d").ok()
    })
    .with_context(|| hearth.log())?;
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, BLOCK as u32)? == [7; BLOCK]);
    Ok(())
}

/// The first device has the tables. With it dead, the other takes its place by one command, and the cache fills again.
#[test]
fn the_other_device_takes_the_place_of_the_first() -> Result<()> {
    let (mut hearth, second) = two()?;
    warm(&hearth, "still")?;
    hearth.kill9()?;
    std::fs::remove_file(hearth.flash())?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(cached(&hearth, "still")? == 0);
    let plain = std::fs::read(hearth.dir().join("still.img"))?;
    let mut client = hearth.connect("still")?;
    ensure!(client.read(0, MIB as u32)? == plain[..MIB as usize]);
    drop(client);
    hearth.stop()?;
    let state = path(&hearth.dir().join("state")).to_owned();
    let other = path(&second).to_owned();
    let adopt = ["pool", "adopt-flash", "--flash", &other, "--force"];
    hearth.ok(&[&adopt[..], &["--state-dir", &state]].concat())?;
    hearth.set_flash(second);
    hearth.serve_args = Vec::new();
    hearth.start().with_context(|| hearth.log())?;
    let mut client = hearth.connect("still")?;
    client.sweep(Command::Cache, 0..SIZE, 1 << 18, 8, |_, _| {})?;
    wait::until("all is cached again", LIMIT, || {
        (cached(&hearth, "still").ok()? == SIZE).then_some(())
    })?;
    is_warm(&hearth, "still")
}
