//! A pool of several flash devices: killed under load, named in any order, and refused where it is not all there or
//! not of one moment.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::nbd::Command;
use hearth_rig::pattern::BLOCK;
use hearth_rig::rng::Rng;
use hearth_rig::{Hearth, wait};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// A cycle's load lasts between these, in milliseconds.
const LOAD_MS: (u64, u64) = (30, 500);

/// A pool on two files of unequal size, not served yet; and where the second is.
fn two() -> Result<(Hearth, PathBuf)> {
    let mut hearth = Hearth::bare()?;
    let second = hearth.dir().join("second.img");
    let made = hearth.ok(&[
        "pool",
        "create",
        "--flash",
        path(hearth.flash()),
        "--flash",
        path(&second),
        "--size",
        "96M",
        "--size",
        "64M",
    ])?;
    ensure!(
        made.contains(&format!("--flash {}", path(&second))),
        "{made}"
    );
    hearth.serve_args = vec!["--flash".into(), path(&second).into()];
    Ok((hearth, second))
}

fn blank(hearth: &Hearth, name: &str) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    std::fs::File::create(&file)?.set_len(BLOCKS * BLOCK as u64)?;
    Ok(file)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn killed_under_load_nothing_that_was_flushed_is_lost() -> Result<()> {
    let seed = number("SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now();
        now.duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64)
    });
    let (mut hearth, _) = two()?;
    hearth.start()?;
    let origin = blank(&hearth, "o.img")?;
    // A slow origin keeps much dirty data on flash.
    hearth.add("d", &format!("model-latency=2ms:{}", path(&origin)), &[])?;
    let mut writer = Writer::new(seed);
    let cycles = number("CYCLES").unwrap_or(5);
    writer.survive(&mut hearth, "d", cycles, LOAD_MS, &|cycle| {
        format!("cycle {cycle}, SEED={seed}")
    })?;
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    for device in pool["devices"].as_array().context("no devices")? {
        let of = |key: &str| device[key].as_u64().unwrap_or(0);
        ensure!(of("cached") > 0, "nothing lies on one of them: {pool}");
        ensure!(device["io"]["errors"] == 0, "{pool}");
    }
    let shown = hearth.ok(&["pool", "show"])?;
    ensure!(
        shown.contains("FLASH DEVICE") && shown.contains("second.img"),
        "{shown}"
    );
    hearth.ok(&["disk", "flush", "d"])?;
    writer
        .check_file(&origin)
        .with_context(|| format!("SEED={seed}"))
}

#[test]
fn only_all_devices_of_one_moment_are_served() -> Result<()> {
    let (mut hearth, second) = two()?;
    hearth.start()?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", path(&origin), &["--mode", "write-through"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[7; BLOCK])?;
    drop(client);
    hearth.stop()?;
    let old = hearth.dir().join("old.img");
    std::fs::copy(&second, &old)?;
    // In another order, and warm.
    let (a, b) = (path(hearth.flash()).to_owned(), path(&second).to_owned());
    let shown = hearth.ok(&["pool", "show", "--flash", &b, "--flash", &a])?;
    ensure!(shown.contains("stopped cleanly"), "{shown}");
    hearth.start()?;
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, BLOCK as u32)? == [7; BLOCK]);
    drop(client);
    hearth.stop()?;

    let state = hearth.dir().join("state");
    let serve = |flash: &[&str]| {
        let named = flash.iter().flat_map(|path| ["--flash", path]);
        let first = ["serve", "--state-dir", path(&state)];
        let args: Vec<&str> = first.into_iter().chain(named).collect();
        hearth.refused(&args)
    };
    let missing = serve(&[&a])?;
    ensure!(
        missing.contains("has 2 flash devices, and device 2 (64 MiB"),
        "{missing}"
    );
    let missing = serve(&[&b])?;
    ensure!(missing.contains("device 1 (96 MiB"), "{missing}");
    let twice = serve(&[&a, &b, &a])?;
    ensure!(twice.contains("is given twice"), "{twice}");
    let older = serve(&[&a, path(&old)])?;
    ensure!(
        older.contains(&format!("{} is older than {a}", path(&old))),
        "{older}"
    );
    hearth.start()?;
    hearth.stop()?;
    Ok(())
}

/// The other one has what came later. Nothing was dirty, so the pool goes on as if it were missing; with the first, which
/// has the tables, the disks are served without a cache.
#[test]
fn older_copy_of_device_counts_as_missing() -> Result<()> {
    for first in [false, true] {
        let (mut hearth, second) = two()?;
        hearth.start()?;
        let origin = blank(&hearth, "o.img")?;
        hearth.add("d", path(&origin), &["--mode", "write-through"])?;
        hearth.stop()?;
        let device = if first {
            hearth.flash().to_owned()
        } else {
            second.clone()
        };
        let old = hearth.dir().join("old.img");
        std::fs::copy(&device, &old)?;
        hearth.start()?;
        let mut client = hearth.connect("d")?;
        client.write(0, &[7; BLOCK])?;
        drop(client);
        hearth.stop()?;
        std::fs::copy(&old, &device)?;
        hearth.start().with_context(|| hearth.log())?;
        let mut client = hearth.connect("d")?;
        ensure!(client.read(0, BLOCK as u32)? == [7; BLOCK]);
        drop(client);
        let older = format!("{} is older than", path(&device));
        if !hearth.said(&["pool", "show"])?.contains(&older) {
            hearth.logged(&older)?;
        }
        if !first {
            ensure!(devices(&hearth)? == [path(hearth.flash())]);
        }
    }
    Ok(())
}

/// What one device held is gone with it. As with a single one, a disk of which nothing was dirty does not mind.
#[test]
fn with_one_device_gone_whole_disks_are_served() -> Result<()> {
    let (mut hearth, second) = two()?;
    hearth.start()?;
    let files = [blank(&hearth, "whole.img")?, blank(&hearth, "dirty.img")?];
    hearth.add("whole", path(&files[0]), &["--mode", "write-through"])?;
    hearth.add("dirty", path(&files[1]), &[])?;
    let mut writer = Writer::new(3);
    let mut client = hearth.connect("whole")?;
    writer.load(&mut client, Duration::from_millis(200), || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    let mut client = hearth.connect("dirty")?;
    client.write(0, &[7; BLOCK])?;
    drop(client);
    hearth.kill9()?;
    let away = second.with_extension("away");
    std::fs::rename(&second, &away)?;
    hearth.start()?;
    let mut client = hearth.connect("whole")?;
    writer.check(&mut client)?;
    drop(client);
    ensure!(hearth.connect("dirty").is_err(), "a stale disk is served");
    let pool = hearth.ok(&["pool", "show"])?;
    ensure!(pool.contains("second.img does not exist"), "{pool}");
    hearth.stop()?;
    // It is back, and so is what was dirty.
    std::fs::rename(&away, &second)?;
    hearth.start()?;
    wait::until("the dirty disk is served again", LIMIT, || {
        hearth.connect("dirty").ok()
    })
    .with_context(|| hearth.log())?;
    let mut client = hearth.connect("dirty")?;
    ensure!(client.read(0, BLOCK as u32)? == [7; BLOCK]);
    let mut client = hearth.connect("whole")?;
    writer.check(&mut client)
}

/// How many devices the pool has that is served.
fn devices(hearth: &Hearth) -> Result<Vec<String>> {
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    let devices = pool["devices"].as_array().context("no devices")?;
    let paths = devices.iter().map(|d| d["path"].as_str().unwrap_or("?"));
    Ok(paths.map(str::to_owned).collect())
}

/// Devices come, are replaced and go under a client, whose connection stays. What was written before and between is
/// there, dirty as it may be, and a start with the list of before finds the pool of today.
#[test]
fn devices_come_are_replaced_and_go_under_a_client() -> Result<()> {
    let mut hearth = Hearth::with_pool("96M")?;
    hearth.start()?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", &format!("model-latency=2ms:{}", path(&origin)), &[])?;
    let mut client = hearth.connect("d")?;
    let mut writer = Writer::new(11);
    let first = path(hearth.flash()).to_owned();
    let [second, third, fourth] =
        ["second", "third", "fourth"].map(|name| path(&hearth.dir().join(name)).to_owned());
    let busy = Duration::from_millis(300);

    writer.load(&mut client, busy, || Ok(()))?;
    let small = hearth.refused(&["pool", "add-flash", &second, "--size", "4M"])?;
    ensure!(small.contains("needs at least"), "{small}");
    let itself = hearth.refused(&["pool", "add-flash", &first])?;
    ensure!(itself.contains("already"), "{itself}");
    let only = hearth.refused(&["pool", "remove-flash", &first])?;
    ensure!(
        only.contains("only flash device") && only.contains("replace-flash"),
        "{only}"
    );

    let added = hearth.ok(&["pool", "add-flash", &second, "--size", "64M"])?;
    ensure!(added.contains("is part of the pool now"), "{added}");
    ensure!(devices(&hearth)? == [first.clone(), second.clone()]);
    writer.load(&mut client, busy, || Ok(()))?;
    let tables = hearth.refused(&["pool", "remove-flash", &first])?;
    ensure!(
        tables.contains("tables") && tables.contains("replace-flash"),
        "{tables}"
    );

    // The first, which has the tables, and one that has only segments.
    let replaced = hearth.ok(&["pool", "replace-flash", &first, &third, "--size", "96M"])?;
    ensure!(replaced.contains("has taken the place of"), "{replaced}");
    writer.load(&mut client, busy, || Ok(()))?;
    hearth.ok(&["pool", "replace-flash", &second, &fourth, "--size", "80M"])?;
    ensure!(devices(&hearth)? == [third.clone(), fourth.clone()]);
    writer.load(&mut client, busy, || Ok(()))?;
    writer.check(&mut client)?;
    let old = hearth.refused(&["pool", "show", "--flash", &first])?;
    ensure!(old.contains("has taken its place"), "{old}");
    let old = hearth.refused(&["pool", "show", "--flash", &second])?;
    ensure!(old.contains("has taken its place"), "{old}");

    // Killed, and started with the list that the settings still have.
    hearth.kill9()?;
    drop(client);
    hearth.start()?;
    ensure!(
        devices(&hearth)? == [third.clone(), fourth.clone()],
        "{}",
        hearth.log()
    );
    hearth.logged("is not that of today")?;
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    writer.check_stable(&mut client)?;

    writer.load(&mut client, busy, || Ok(()))?;
    let removed = hearth.ok(&["pool", "remove-flash", &fourth])?;
    ensure!(
        removed.contains("is no part of the pool any more"),
        "{removed}"
    );
    ensure!(devices(&hearth)? == std::slice::from_ref(&third));
    writer.check(&mut client)?;
    writer.load(&mut client, busy, || Ok(()))?;
    drop(client);
    hearth.stop()?;
    let gone = hearth.refused(&["pool", "show", "--flash", &fourth])?;
    ensure!(gone.contains("taken out of its pool"), "{gone}");

    // On a pool that nobody serves; what was taken out may come again.
    let state = path(&hearth.dir().join("state")).to_owned();
    let at = ["--flash", &third, "--state-dir", &state];
    hearth.ok(&[&["pool", "add-flash", &fourth], &at[..]].concat())?;
    hearth.start()?;
    ensure!(devices(&hearth)? == [third, fourth]);
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    writer.check_file(&origin)
}

/// Has the next start use these devices.
fn serve_from(hearth: &mut Hearth, devices: &[String]) -> Result<()> {
    let (lead, others) = devices.split_first().context("no device")?;
    hearth.set_flash(lead.into());
    hearth.serve_args = others
        .iter()
        .flat_map(|path| ["--flash".into(), path.into()])
        .collect();
    Ok(())
}

/// Whoever changes the devices is killed at any moment, the daemon or the command: the pool is one of the two it may be, and
/// whichever list the next start is given, it finds that.
#[test]
fn killed_while_its_devices_are_changed_the_pool_is_found_by_either_list() -> Result<()> {
    let seed = number("SEED").unwrap_or(1);
    let mut hearth = Hearth::with_pool("64M")?;
    let origin = blank(&hearth, "o.img")?;
    hearth.start()?;
    hearth.add("d", &format!("model-latency=2ms:{}", path(&origin)), &[])?;
    let mut writer = Writer::new(seed);
    let mut today = devices(&hearth)?;
    for cycle in 0..number("CYCLES").unwrap_or(4) {
        let about = || format!("cycle {cycle}, SEED={seed}");
        let mut client = hearth.connect("d")?;
        writer.load(&mut client, Duration::from_millis(150), || Ok(()))?;
        let new = path(&hearth.dir().join(format!("flash-{cycle}"))).to_owned();
        let mut next = today.clone();
        let args: Vec<String> = match (today.len(), cycle % 3) {
            (2.., 2) => {
                let old = next.remove(1);
                vec!["pool".into(), "remove-flash".into(), old]
            }
            (_, 1) | (3.., _) => {
                let at = writer.below(today.len() as u64) as usize;
                let old = std::mem::replace(&mut next[at], new.clone());
                let what = ["pool", "replace-flash", &old, &new, "--size", "64M"];
                what.map(str::to_owned).to_vec()
            }
            _ => {
                next.push(new.clone());
                let what = ["pool", "add-flash", &new, "--size", "64M"];
                what.map(str::to_owned).to_vec()
            }
        };
        let mut command = std::process::Command::new(hearth_rig::daemon::binary()?);
        command.arg("--run-dir").arg(hearth.run_dir()).args(&args);
        command.stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let mut running = command.spawn()?;
        let moment = Duration::from_millis(writer.below(900));
        writer
            .load(&mut client, moment, || hearth.kill9())
            .with_context(about)?;
        running.kill()?;
        running.wait()?;
        drop(client);
        // One list or the other.
        let given = match writer.below(2) {
            0 => today.clone(),
            _ => next.clone(),
        };
        let there = given.iter().all(|path| std::path::Path::new(path).exists());
        let given = if there { given } else { today.clone() };
        serve_from(&mut hearth, &given)?;
        if let Err(e) = hearth.start() {
            // Nothing but the new device was there yet, so that nobody could know which pool it is for.
            ensure!(given == next, "{e:#}\n{}\n{}", about(), hearth.log());
            hearth.kill9()?;
            serve_from(&mut hearth, &today)?;
            hearth.start().with_context(about)?;
        }
        let now = devices(&hearth)?;
        ensure!(
            now == today || now == next,
            "{}: {now:?}, not {today:?} or {next:?}, given {given:?}\n{}",
            about(),
            hearth.log()
        );
        today = now;
        let mut client = hearth.connect("d").with_context(about)?;
        writer.check(&mut client).with_context(about)?;
        writer.check_stable(&mut client).with_context(about)?;
        if !today.contains(&new) {
            // What was begun of it; perhaps nothing was.
            let _ = std::fs::remove_file(&new);
        }
    }
    hearth.ok(&["disk", "flush", "d"])?;
    writer
        .check_file(&origin)
        .with_context(|| format!("SEED={seed}"))
}

/// The same on a pool of two copies, of which a device may have vanished before it is replaced: nothing is lost, whoever is killed.
#[test]
fn killed_while_one_of_two_copies_is_replaced_the_pool_is_found_by_either_list() -> Result<()> {
    let seed = number("SEED").unwrap_or(1);
    let (mut hearth, today) = mirrored()?;
    let mut today = today.to_vec();
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", &format!("model-latency=2ms:{}", path(&origin)), &[])?;
    let mut writer = Writer::new(seed);
    for cycle in 0..number("CYCLES").unwrap_or(4) {
        let about = || format!("cycle {cycle}, SEED={seed}");
        let lost = [0, 1]
            .into_iter()
            .find(|n| is_lost(&hearth, *n).is_ok_and(|lost| lost));
        let victim = lost.unwrap_or(writer.below(2) as usize);
        let mut client = hearth.connect("d")?;
        writer.load(&mut client, Duration::from_millis(150), || Ok(()))?;
        if lost.is_none() && cycle % 2 == 1 {
            std::fs::remove_file(&today[victim])?;
            wait::until("the device is lost", LIMIT, || {
                is_lost(&hearth, victim)
                    .is_ok_and(|lost| lost)
                    .then_some(())
            })
            .with_context(|| hearth.log())?;
        }
        let new = path(&hearth.dir().join(format!("flash-{cycle}"))).to_owned();
        let mut next = today.clone();
        let old = std::mem::replace(&mut next[victim], new.clone());
        let mut command = std::process::Command::new(hearth_rig::daemon::binary()?);
        command.arg("--run-dir").arg(hearth.run_dir());
        command.args(["pool", "replace-flash", &old, &new, "--size", "64M"]);
        command.stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let mut running = command.spawn()?;
        let moment = Duration::from_millis(writer.below(1200));
        writer
            .load(&mut client, moment, || hearth.kill9())
            .with_context(about)?;
        running.kill()?;
        running.wait()?;
        drop(client);
        let given = if writer.below(2) == 0 { &today } else { &next };
        serve_from(&mut hearth, given)?;
        hearth.start().with_context(about)?;
        let now = devices(&hearth)?;
        let mut both = now.iter().zip(&today).zip(&next);
        ensure!(
            both.all(|((now, a), b)| now == a || now == b),
            "{}: {now:?}",
            about()
        );
        today = now;
        let mut client = hearth.connect("d").with_context(about)?;
        writer.check(&mut client).with_context(about)?;
        writer.check_stable(&mut client).with_context(about)?;
        if !today.contains(&new) {
            let _ = std::fs::remove_file(&new);
        }
    }
    hearth.ok(&["disk", "flush", "d"])?;
    writer
        .check_file(&origin)
        .with_context(|| format!("SEED={seed}"))
}

/// A sound device is replaced, served or stopped, and stays where it was. A start by the list of before takes the new one, not the
/// old one, and loses neither; so does a start by a list with a blank one in its place.
#[test]
fn a_start_by_the_list_of_before_loses_no_new_device() -> Result<()> {
    let (mut hearth, [a, b]) = mirrored()?;
    let new = |n: u32, hearth: &Hearth| path(&hearth.dir().join(format!("n{n}.img"))).to_owned();
    let (first, second) = (new(1, &hearth), new(2, &hearth));
    hearth.ok(&["pool", "replace-flash", &b, &first, "--size", "64M"])?;
    let whole = |hearth: &Hearth, today: [&String; 2]| -> Result<()> {
        ensure!(
            devices(hearth)? == today.map(String::clone),
            "{}",
            hearth.log()
        );
        ensure!(
            !is_lost(hearth, 0)? && !is_lost(hearth, 1)?,
            "{}",
            hearth.log()
        );
        Ok(())
    };
    whole(&hearth, [&a, &first])?;
    hearth.stop()?;
    hearth.start()?;
    whole(&hearth, [&a, &first]).context("the old list")?;
    hearth.stop()?;
    let state = path(&hearth.dir().join("state")).to_owned();
    let what = ["pool", "replace-flash", &a, &second, "--size", "64M"];
    let at = ["--flash", &a, "--flash", &first, "--state-dir", &state];
    hearth.ok(&[&what[..], &at[..]].concat())?;
    serve_from(&mut hearth, &[a.clone(), first.clone()])?;
    hearth.start().with_context(|| hearth.log())?;
    whole(&hearth, [&second, &first]).context("the old list, stopped")?;
    hearth.stop()?;
    std::fs::write(&a, vec![0; 1 << 20])?;
    hearth.start().with_context(|| hearth.log())?;
    whole(&hearth, [&second, &first]).context("a blank one")?;
    // One that was lost and is back is used again only as a new one, in its own place.
    hearth.stop()?;
    let away = new(3, &hearth);
    std::fs::rename(&first, &away)?;
    serve_from(&mut hearth, &[second.clone(), first.clone()])?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(is_lost(&hearth, 1)?, "{}", hearth.log());
    let told = hearth.ok(&["metrics"])?;
    let line = r#"hearth_flash_device_state{device="device 2 (missing)",state="lost"} 1"#;
    ensure!(told.contains(line), "{told}");
    hearth.stop()?;
    std::fs::rename(&away, &first)?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(is_lost(&hearth, 1)?, "{}", hearth.log());
    hearth.ok(&["pool", "replace-flash", &first, &first])?;
    whole(&hearth, [&second, &first]).context("itself")
}

/// With two copies either device may vanish while it is used, and its old state may come back: no guest notices, and
/// nothing is lost.
#[test]
fn with_two_copies_either_device_may_vanish() -> Result<()> {
    for victim in [0, 1] {
        vanishes(victim).with_context(|| format!("device {}", victim + 1))?;
    }
    Ok(())
}

fn is_lost(hearth: &Hearth, device: usize) -> Result<bool> {
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    ensure!(
        pool["dirty_copies"] == 2 && pool["state"] == "serving",
        "{pool}"
    );
    let lost = |n: usize| pool["devices"][n]["lost"] == true;
    ensure!(!lost(device) || !lost(1 - device), "both are lost: {pool}");
    Ok(lost(device))
}

/// A daemon on a pool that keeps everything twice, and where its devices are.
fn mirrored() -> Result<(Hearth, [String; 2])> {
    let mut hearth = Hearth::bare()?;
    let second = hearth.dir().join("second.img");
    let (a, b) = (path(hearth.flash()).to_owned(), path(&second).to_owned());
    let create = ["pool", "create", "--dirty-copies", "2", "--flash"];
    let rest = [a.as_str(), "--flash", &b, "--size", "64M"];
    hearth.ok(&[create.as_slice(), &rest].concat())?;
    hearth.serve_args = vec!["--flash".into(), b.clone()];
    hearth.start()?;
    Ok((hearth, [a, b]))
}

/// A number that `pool show --json` tells of the pool.
fn told(hearth: &Hearth, key: &str) -> Result<u64> {
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    pool[key].as_u64().with_context(|| format!("{key}: {pool}"))
}

/// What is clean is on one device, and `pool show` says so.
#[test]
fn a_new_pool_of_two_copies_has_clean_blocks_once_and_says_so() -> Result<()> {
    let (hearth, [a, b]) = mirrored()?;
    let shown = hearth.ok(&["pool", "show"])?;
    ensure!(
        shown.contains("2 of what is dirty, 1 of what is clean"),
        "{shown}"
    );
    ensure!(told(&hearth, "dirty_copies")? == 2 && told(&hearth, "clean_copies")? == 1);
    // More than one device has room for.
    let lengths = [&a, &b].map(|path| std::fs::metadata(path).map(|m| m.len()));
    let one = lengths.into_iter().collect::<std::io::Result<Vec<u64>>>()?;
    let most = one.into_iter().max().context("no device")?;
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![1; (most + most / 2) as usize])?;
    hearth.add("d", path(&origin), &["--seq-cutoff", "0"])?;
    let mut client = hearth.connect("d")?;
    client.sweep(Command::Read, 0..most + most / 2, 128 << 10, 8, |_, _| {})?;
    wait::until("more is cached than fits on one device", LIMIT, || {
        told(&hearth, "cached")
            .is_ok_and(|cached| cached > most)
            .then_some(())
    })
    .with_context(|| hearth.log())
}

/// Bytes that each device has, clean and dirty, and what the pool has of both, as somebody looks at it with these arguments.
fn what_is_where(hearth: &Hearth, more: &[&str]) -> Result<([[u64; 2]; 2], [u64; 2])> {
    let args = [&["pool", "show", "--json"], more].concat();
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&args)?)?;
    let of = |value: &serde_json::Value, key: &str| {
        value[key]
            .as_u64()
            .with_context(|| format!("{key}: {pool}"))
    };
    let mut devices = [[0; 2]; 2];
    for (n, device) in devices.iter_mut().enumerate() {
        let told = &pool["devices"][n];
        *device = [of(told, "clean")?, of(told, "dirty")?];
        ensure!(of(told, "cached")? == device[0] + device[1], "{pool}");
    }
    Ok((devices, [of(&pool, "cached")?, of(&pool, "dirty")?]))
}

/// What is clean counts on the one device that has it, and what is dirty on both.
#[test]
fn it_is_told_what_is_there_once_and_what_twice() -> Result<()> {
    const DIRTY: u64 = 4 << 20;
    const CLEAN: u64 = 8 << 20;
    const PIECE: u64 = 64 << 10;
    let (mut hearth, [a, b]) = mirrored()?;
    // So slow that what is dirty stays so.
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![1; CLEAN as usize])?;
    let slow = format!("model-latency=1s:{}", path(&blank(&hearth, "s.img")?));
    hearth.add("slow", &slow, &[])?;
    hearth.add("d", path(&origin), &["--seq-cutoff", "0"])?;
    let mut client = hearth.connect("d")?;
    // What is read faster than flash takes it, or was read ahead, is not cached.
    let mut rng = Rng::new(1);
    wait::until("half of it is cached", LIMIT, || {
        for _ in 0..CLEAN / PIECE {
            let at = rng.below(CLEAN / PIECE) * PIECE;
            client.read(at, PIECE as u32).ok()?;
        }
        told(&hearth, "cached")
            .is_ok_and(|cached| cached > CLEAN / 2)
            .then_some(())
    })
    .with_context(|| hearth.log())?;
    let mut writer = hearth.connect("slow")?;
    let write = Command::Write { fua: false };
    writer.sweep(write, 0..DIRTY, 128 << 10, 4, |_, data| data.fill(7))?;
    writer.flush()?;
    drop((client, writer));
    // Not while it changes: by who looks at it when nobody serves it.
    hearth.kill9()?;
    let (devices, [cached, dirty]) = what_is_where(&hearth, &["--flash", &a, "--flash", &b])?;
    let [[clean_a, dirty_a], [clean_b, dirty_b]] = devices;
    ensure!(
        dirty > 0 && dirty_a == dirty && dirty_b == dirty,
        "{devices:?}, {cached}, {dirty}"
    );
    ensure!(
        clean_a + clean_b == cached - dirty,
        "{devices:?}, {cached}, {dirty}"
    );
    // Both have their part of it.
    let least = CLEAN / 8;
    ensure!(
        clean_a > least && clean_b > least,
        "{devices:?}, {cached}, {dirty}"
    );
    let shown = hearth.ok(&["pool", "show", "--flash", &a, "--flash", &b])?;
    ensure!(
        shown.contains("CLEAN, ONCE") && shown.contains("DIRTY, TWICE"),
        "{shown}"
    );
    // The same from a checkpoint, and as long as it is served.
    hearth.start()?;
    let (devices, [cached, dirty]) = what_is_where(&hearth, &[])?;
    ensure!(
        devices[0][0] + devices[1][0] <= cached,
        "{devices:?}, {cached}, {dirty}"
    );
    hearth.stop()?;
    let (devices, [cached, dirty]) = what_is_where(&hearth, &["--flash", &a, "--flash", &b])?;
    ensure!(
        devices[0][1] == dirty && devices[1][1] == dirty,
        "{devices:?}, {cached}, {dirty}"
    );
    ensure!(
        devices[0][0] + devices[1][0] == cached - dirty,
        "{devices:?}, {cached}, {dirty}"
    );
    Ok(())
}

/// Whoever looks at devices that nobody serves is told what a start would mend, or go on without; and of those that are in order, nothing.
#[test]
fn what_is_wrong_with_devices_is_told_by_who_looks() -> Result<()> {
    let (mut hearth, [a, b]) = mirrored()?;
    hearth.stop()?;
    let look = |hearth: &Hearth, devices: [&str; 2]| {
        let flash = ["--flash", devices[0], "--flash", devices[1]];
        let shown = hearth.ok(&[&["pool", "show"], &flash[..]].concat())?;
        let imported = hearth.ok(&[&["pool", "import"], &flash[..]].concat())?;
        ensure!(imported.starts_with(&shown), "{imported}\n{shown}");
        anyhow::Ok(shown)
    };
    let shown = look(&hearth, [&a, &b])?;
    ensure!(!shown.contains("warning"), "{shown}");
    // The second copy of what says whose it is.
    let device = std::fs::File::options().write(true).open(&b)?;
    device.write_all_at(&[0; BLOCK], 1 << 20)?;
    let shown = look(&hearth, [&a, &b])?;
    let damaged = format!("warning: of the superblock of {b} one copy is damaged");
    ensure!(
        shown.matches("warning").count() == 1 && shown.contains(&damaged),
        "{shown}"
    );
    hearth.start()?;
    hearth.stop()?;
    let shown = look(&hearth, [&a, &b])?;
    ensure!(!shown.contains("warning"), "{shown}");
    let old = hearth.dir().join("old.img");
    std::fs::copy(&b, &old)?;
    hearth.start()?;
    hearth.stop()?;
    let shown = look(&hearth, [&a, path(&old)])?;
    let older = format!("warning: the pool was served since without {}", path(&old));
    ensure!(shown.contains("LOST") && shown.contains(&older), "{shown}");
    let gone = path(&hearth.dir().join("gone.img")).to_owned();
    let shown = look(&hearth, [&a, &gone])?;
    let missing =
        shown.contains("warning: a flash device of the pool is missing") && shown.contains(&gone);
    ensure!(shown.contains("LOST") && missing, "{shown}");
    let imported = hearth.ok(&["pool", "import", "--flash", &b])?;
    let ready = format!("serve it with `hearth serve --flash {b}`");
    ensure!(imported.contains(&ready), "{imported}");
    let shown = hearth.ok(&["pool", "show", "--flash", &b])?;
    // Nobody knows how full what is missing is.
    ensure!(!shown.contains("100 %"), "{shown}");
    ensure!(
        shown.contains("warning: device 1") && shown.contains("is not among those given"),
        "{shown}"
    );
    Ok(())
}

/// Clean blocks that went with a device are let go without a record, and written past since. So whatever takes its place must bring
/// none of them back: not the lost device itself, its old content left, nor the copy of the other halves that it is given. All
/// blocks are equal here, so that each fits every entry.
#[test]
fn what_was_clean_on_a_lost_device_does_not_come_back_with_it() -> Result<()> {
    for victim in [0, 1] {
        comes_back(victim).with_context(|| format!("device {}", victim + 1))?;
    }
    Ok(())
}

fn comes_back(victim: usize) -> Result<()> {
    const BYTES: u64 = 24 << 20;
    const PIECE: u64 = 64 << 10;
    const OLD: u8 = 0x5a;
    const NEW: u8 = 0xa5;
    let (mut hearth, both) = mirrored()?;
    for (name, mode) in [("d", "write-around"), ("stays", "write-through")] {
        let origin = hearth.dir().join(name);
        std::fs::write(&origin, vec![OLD; BYTES as usize])?;
        let mode = ["--mode", mode, "--seq-cutoff", "0"];
        hearth.add(name, path(&origin), &mode)?;
    }
    let (mut client, mut stays) = (hearth.connect("d")?, hearth.connect("stays")?);
    // The other disk's blocks keep every segment from being freed.
    // What is read faster than flash takes it is not cached, so once may not be enough; nor is what prefetch brings.
    let mut rng = Rng::new(victim as u64);
    let mut pieces: Vec<u64> = (0..BYTES).step_by(PIECE as usize).collect();
    wait::until("so much is cached", LIMIT, || {
        for n in (1..pieces.len()).rev() {
            pieces.swap(n, rng.below(n as u64 + 1) as usize);
        }
        for at in &pieces {
            client.read(*at, PIECE as u32).ok()?;
            stays.read(*at, PIECE as u32).ok()?;
        }
        let much = told(&hearth, "cached").is_ok_and(|bytes| bytes > BYTES / 2 * 3);
        much.then_some(())
    })
    .with_context(|| hearth.log())?;
    let cached = |hearth: &Hearth, what: &str, which: &dyn Fn(u64) -> bool| {
        wait::until(what, LIMIT, || {
            told(hearth, "cached").is_ok_and(which).then_some(())
        })
        .with_context(|| format!("{:?} bytes cached", told(hearth, "cached")))
        .with_context(|| hearth.log())
    };

    let gone = PathBuf::from(&both[victim]);
    let old = hearth.dir().join("old.img");
    std::fs::copy(&gone, &old)?;
    std::fs::remove_file(&gone)?;
    wait::until("the device is lost", LIMIT, || {
        let used = stays.write(0, &[OLD; BLOCK]).and_then(|()| stays.flush());
        let lost = used.is_ok() && is_lost(&hearth, victim).is_ok_and(|lost| lost);
        lost.then_some(())
    })
    .with_context(|| hearth.log())?;
    let what = "what was on it is let go, and nothing else";
    cached(&hearth, what, &|bytes| bytes > 0 && bytes < BYTES / 4 * 5)?;
    // Block by block: what makes a copy void that is there speaks of no other one.
    let write = Command::Write { fua: false };
    client.sweep(write, 0..BYTES, BLOCK as u32, 4, |_, data| data.fill(NEW))?;
    client.flush()?;
    let what = "what was written past is let go";
    cached(&hearth, what, &|bytes| bytes < BYTES / 8 * 5)?;

    std::fs::copy(&old, &gone)?;
    let same = path(&gone).to_owned();
    hearth
        .ok(&["pool", "replace-flash", &same, &same])
        .with_context(|| hearth.log())?;
    ensure!(!is_lost(&hearth, victim)?, "{}", hearth.log());
    drop((client, stays));
    // Stopped, so that no region is open that would be distrusted, and killed, so that the log is read.
    hearth.stop()?;
    hearth.start()?;
    hearth.kill9()?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(!is_lost(&hearth, victim)?, "{}", hearth.log());
    // An origin that is not what old copies say makes a start distrust them all; so they are counted as they are found.
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    let found = pool["recovery"]["cached_blocks"].as_u64();
    let most = BYTES / BLOCK as u64 / 8 * 5;
    ensure!(
        found.is_some_and(|found| found > 0 && found < most),
        "more than what the other disk has on the other device: {pool}"
    );
    let mut client = hearth.connect("d")?;
    for at in (0..BYTES).step_by(PIECE as usize) {
        let read = client.read(at, PIECE as u32)?;
        ensure!(read.iter().all(|byte| *byte == NEW), "old, at {at}");
    }
    Ok(())
}

/// A device that was lost while the other one went on is back after a crash, and the other one is not: nothing but what is
/// noted beside the flash can tell that it is old.
#[test]
fn a_lost_device_that_is_back_alone_is_not_believed() -> Result<()> {
    let (mut hearth, [a, b]) = mirrored()?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", &format!("model-latency=2ms:{}", path(&origin)), &[])?;
    let mut writer = Writer::new(7);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, Duration::from_millis(200), || Ok(()))?;
    writer.flush(&mut client)?;
    let old = hearth.dir().join("old.img");
    std::fs::copy(&b, &old)?;
    std::fs::remove_file(&b)?;
    wait::until("the device is lost", LIMIT, || {
        is_lost(&hearth, 1).is_ok_and(|lost| lost).then_some(())
    })
    .with_context(|| hearth.log())?;
    writer.load(&mut client, Duration::from_millis(200), || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    // From here on the origin has all of it.
    hearth.ok(&["disk", "flush", "d"])?;
    writer.check_file(&origin)?;
    hearth.kill9()?;
    std::fs::rename(&a, hearth.dir().join("dead.img"))?;
    std::fs::rename(&old, &b)?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(is_lost(&hearth, 0)?, "the other one is there");
    // Where something on it counted as dirty, somebody has to say which side is right.
    let _ = hearth.hearth(&["disk", "set", "d", "--trust", "origin"])?;
    let mut client = hearth.connect("d").with_context(|| hearth.log())?;
    writer.check(&mut client).with_context(|| hearth.log())?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    writer.check_file(&origin)
}

fn vanishes(victim: usize) -> Result<()> {
    let (mut hearth, [a, b]) = mirrored()?;
    let origin = blank(&hearth, "o.img")?;
    hearth.add("d", &format!("model-latency=2ms:{}", path(&origin)), &[])?;
    let mut writer = Writer::new(victim as u64 + 1);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, Duration::from_millis(200), || Ok(()))?;
    writer.flush(&mut client)?;
    ensure!(!is_lost(&hearth, victim)?, "a device is lost too early");

    let gone = PathBuf::from([&a, &b][victim]);
    let old = hearth.dir().join("old.img");
    std::fs::copy(&gone, &old)?;
    std::fs::remove_file(&gone)?;
    wait::until("the device is lost", LIMIT, || {
        is_lost(&hearth, victim)
            .is_ok_and(|lost| lost)
            .then_some(())
    })
    .with_context(|| hearth.log())?;
    // The same connection goes on.
    writer.load(&mut client, Duration::from_millis(200), || Ok(()))?;
    writer.flush(&mut client)?;
    writer.check(&mut client)?;
    drop(client);
    let shown = hearth.ok(&["pool", "show"])?;
    ensure!(
        shown.contains("2, and 1 now") && shown.contains("LOST"),
        "{shown}"
    );

    let restarted = |hearth: &mut Hearth, writer: &mut Writer| -> Result<()> {
        hearth.kill9()?;
        hearth.start().with_context(|| hearth.log())?;
        ensure!(is_lost(hearth, victim)?, "what is gone, or old, is used");
        let mut client = hearth.connect("d")?;
        writer.check(&mut client)?;
        writer.check_stable(&mut client)
    };
    restarted(&mut hearth, &mut writer).context("without it")?;
    std::fs::copy(&old, &gone)?;
    restarted(&mut hearth, &mut writer).context("with what it was once")?;

    // Another one takes its place under a client; then the one goes that had everything meanwhile.
    let new = path(&hearth.dir().join("new.img")).to_owned();
    let more = hearth.refused(&["pool", "add-flash", &new, "--size", "64M"])?;
    ensure!(more.contains("replace-flash"), "{more}");
    let mut client = hearth.connect("d")?;
    let replaced = hearth
        .ok(&["pool", "replace-flash", path(&gone), &new, "--size", "64M"])
        .with_context(|| hearth.log())?;
    ensure!(replaced.contains("has taken the place of"), "{replaced}");
    ensure!(!is_lost(&hearth, victim)?, "{}", hearth.log());
    ensure!(devices(&hearth)?[victim] == new);
    writer.load(&mut client, Duration::from_millis(200), || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    // Killed, and started with the list of before, at which the old one still is.
    hearth.kill9()?;
    hearth.start().with_context(|| hearth.log())?;
    ensure!(
        devices(&hearth)?[victim] == new && !is_lost(&hearth, victim)?,
        "{}",
        hearth.log()
    );
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    std::fs::remove_file([&a, &b][1 - victim])?;
    wait::until("the other device is lost", LIMIT, || {
        is_lost(&hearth, 1 - victim)
            .is_ok_and(|lost| lost)
            .then_some(())
    })
    .with_context(|| hearth.log())?;
    writer.load(&mut client, Duration::from_millis(100), || Ok(()))?;
    writer.flush(&mut client)?;
    writer.check(&mut client)?;
    drop(client);
    // And on a pool that nobody serves, named by its number, by one at its path.
    let pool: serde_json::Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    let number = pool["devices"][1 - victim]["uuid"].as_str();
    let number = number.context("no number")?.to_owned();
    hearth.stop()?;
    let state = path(&hearth.dir().join("state")).to_owned();
    let lost = [&a, &b][1 - victim];
    let what = ["pool", "replace-flash", &number, lost, "--size", "64M"];
    let at = ["--flash", &new, "--flash", lost, "--state-dir", &state];
    hearth.ok(&[&what[..], &at[..]].concat())?;
    hearth.set_flash(PathBuf::from(&new));
    hearth.serve_args = vec!["--flash".into(), lost.clone()];
    hearth.start().with_context(|| hearth.log())?;
    ensure!(!is_lost(&hearth, victim)? && !is_lost(&hearth, 1 - victim)?);
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    writer.check_file(&origin)?;
    // Without the last copy there is nothing to go on with but the origins.
    std::fs::remove_file(lost)?;
    wait::until("the device is lost again", LIMIT, || {
        is_lost(&hearth, 1 - victim)
            .is_ok_and(|lost| lost)
            .then_some(())
    })
    .with_context(|| hearth.log())?;
    std::fs::remove_file(&new)?;
    wait::until("flash is left", LIMIT, || {
        let shown = hearth.ok(&["pool", "show", "--json"]).ok()?;
        let pool: serde_json::Value = serde_json::from_str(&shown).ok()?;
        (pool["state"] == "leaving").then_some(())
    })
    .with_context(|| hearth.log())
}
