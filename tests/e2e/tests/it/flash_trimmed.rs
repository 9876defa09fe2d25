//! Somebody discards all of the flash under a pool that is served. Of what only that flash had, nothing is made up: it
//! fails, is listed, and is still missed after a restart, or the pool is not opened any more. Where everything is there twice, nobody
//! notices.

use crate::failing::trim;
use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::pattern::BLOCK;
use hearth_rig::rng::Rng;
use hearth_rig::{Hearth, wait};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// Of a load between two looks.
const BUSY: Duration = Duration::from_millis(200);
const MIB: u64 = 1 << 20;

fn blank(hearth: &Hearth) -> Result<PathBuf> {
    let file = hearth.dir().join("o.raw");
    File::create(&file)?.set_len(BLOCKS * BLOCK as u64)?;
    Ok(file)
}

/// A guest's request is answered by then.
const ANSWER: Duration = Duration::from_secs(30);

/// Writes and reads a disk until told to end. With `whole`, no request may fail. What the disk holds then.
fn guest(
    hearth: &Hearth,
    disk: &str,
    whole: bool,
    done: &AtomicU64,
    ended: &AtomicBool,
) -> Result<Vec<u8>> {
    let mut client = hearth.connect(disk)?;
    client.raw()?.set_read_timeout(Some(ANSWER))?;
    let mut model = client.read(0, 16 << 20)?;
    let mut rng = Rng::new(disk.len() as u64);
    while !ended.load(Ordering::Relaxed) {
        let at = rng.below(16 * MIB / BLOCK as u64 - 16) as usize * BLOCK;
        let range = at..at + (1 + rng.below(16) as usize) * BLOCK;
        let wrong = || {
            format!(
                "disk {disk}, {range:?} after {}",
                done.load(Ordering::Relaxed)
            )
        };
        let outcome = if rng.below(2) == 0 {
            rng.fill(&mut model[range.clone()]);
            client.write(at as u64, &model[range.clone()])
        } else {
            let read = client.read(at as u64, range.len() as u32);
            read.map(|read| assert!(!whole || read == model[range.clone()], "{}", wrong()))
        };
        match outcome {
            Err(e) if whole || e.raw_os_error() != Some(libc::EIO) => {
                return Err(e).with_context(wrong);
            }
            _ => done.fetch_add(1, Ordering::Relaxed),
        };
    }
    Ok(model)
}

/// Where the log begins: behind the pool's tables.
fn log_start(flash: &Path, data: &[u8]) -> Result<u64> {
    let bytes = std::fs::read(flash)?;
    let mut blocks = (0..).step_by(BLOCK).zip(bytes.chunks(BLOCK));
    let first = blocks.find(|(_, block)| *block == data);
    // In a pool of this size segments are of 1 MiB, and begin at a multiple of that.
    Ok(first.context("nothing is on flash")?.0 / MIB * MIB)
}

/// Discards the log and leaves the tables, as if the daemon had stored them again since.
fn trim_log(flash: &Path, start: u64) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(flash)?;
    let mut tables = vec![0; start as usize];
    file.read_exact_at(&mut tables, 0)?;
    trim(flash)?;
    Ok(file.write_all_at(&tables, 0)?)
}

fn shown(hearth: &Hearth) -> Result<Value> {
    let text = hearth.ok(&["disk", "show", "d", "--json"])?;
    Ok(serde_json::from_str(&text)?)
}

fn connect(hearth: &Hearth) -> Result<hearth_rig::nbd::Client> {
    wait::until("the disk is served", LIMIT, || hearth.connect("d").ok())
        .with_context(|| hearth.log())
}

/// Starts it again. The superblocks and the registry went with the rest, unless somebody has written them again: it may refuse
/// what is no pool any more, or one whose log is damaged, and then nobody is given anything.
fn starts(hearth: &mut Hearth) -> Result<bool> {
    let Err(e) = hearth.start() else {
        return Ok(true);
    };
    let says = hearth.log();
    let refused = ["no registry here", "the pool's log is damaged"]
        .iter()
        .any(|s| says.contains(s));
    ensure!(refused && !hearth.running(), "{e:#}");
    Ok(false)
}

/// Killed after that, or stopped in order.
#[test]
fn what_only_the_flash_had_is_missed_and_not_made_up() -> Result<()> {
    for killed in [true, false] {
        let mut hearth = Hearth::serving("160M")?;
        let file = hearth.origin("o.raw", 16 * MIB)?;
        let plain = std::fs::read(&file)?;
        // Nothing reaches it: what is dirty stays so.
        hearth.add("d", &format!("fault=eio-write:{}", path(&file)), &[])?;
        let mut client = hearth.connect("d")?;
        client.write(MIB, &[0xAB; 65536])?;
        client.flush()?;
        trim(hearth.flash())?;
        let error = client.read(MIB, 65536).err().context("it was made up")?;
        ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
        // Beside it all is well, and what is written takes its place.
        ensure!(client.read(2 * MIB, 65536)? == plain[2 << 20..][..65536]);
        client.write(3 * MIB, &[0xCD; 4096])?;
        client.flush()?;
        ensure!(client.read(3 * MIB, 4096)? == [0xCD; 4096]);
        let all = json!([{"offset": MIB, "length": 65536}]);
        wait::until("what is lost is listed", LIMIT, || {
            // Each block that somebody asks for.
            for at in (MIB..MIB + 65536).step_by(4096) {
                let _ = client.read(at, 4096);
            }
            (shown(&hearth).ok()?["lost"] == all).then_some(())
        })
        .with_context(|| format!("{:?}\n{}", shown(&hearth), hearth.log()))?;
        drop(client);
        match killed {
            true => hearth.kill9()?,
            // It says with its exit status that something is lost, or keeps what it can.
            false => drop(hearth.stop()),
        }
        if !starts(&mut hearth)? {
            continue;
        }
        let served = wait::until("the disk is served or refused", LIMIT, || {
            let state = shown(&hearth).ok()?["state"].as_str()?.to_owned();
            ["attached", "refused"].contains(&&*state).then_some(state)
        })
        .with_context(|| hearth.log())?;
        if served == "refused" {
            ensure!(hearth.connect("d").is_err());
            continue;
        }
        let mut client = hearth.connect("d")?;
        let error = client.read(MIB, 4096).err();
        let error = error.with_context(|| format!("it was made up\n{}", hearth.log()))?;
        ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
        ensure!(client.read(2 * MIB, 65536)? == plain[2 << 20..][..65536]);
    }
    Ok(())
}

/// A stop says what is lost, and does not call itself clean. The next start serves what is whole in its origin and refuses the rest
/// by name; with what the stop has told the cache is there again.
#[test]
fn a_stop_tells_of_it_and_what_is_whole_is_served_afterwards() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let origins = ["o.raw", "w.raw"].map(|name| hearth.origin(name, 16 * MIB));
    let [dirty, whole] = origins;
    let (dirty, whole) = (dirty?, whole?);
    hearth.add("d", &format!("fault=eio-write:{}", path(&dirty)), &[])?;
    hearth.add("w", path(&whole), &["--mode", "write-through"])?;
    for disk in ["d", "w"] {
        let mut client = hearth.connect(disk)?;
        client.write(MIB, &[0xAB; 65536])?;
        client.flush()?;
    }
    trim(hearth.flash())?;
    ensure!(hearth.stop().is_err(), "it calls this an end in order");
    let says = hearth.log();
    ensure!(
        says.contains("was erased or written over while it was served")
            && says.contains("64 KiB of disk d")
            && !says.contains("of disk w")
            && says.contains("adopt-flash"),
        "{says}"
    );
    hearth.start().with_context(|| hearth.log())?;
    let served = |hearth: &Hearth| -> Result<()> {
        let mut client = wait::until("the whole disk is served", LIMIT, || {
            hearth.connect("w").ok()
        })?;
        ensure!(client.read(MIB, 65536)? == [0xAB; 65536]);
        Ok(())
    };
    served(&hearth).with_context(|| hearth.log())?;
    ensure!(shown(&hearth)?["state"] == "refused", "{}", hearth.log());
    ensure!(hearth.connect("d").is_err());
    let _ = hearth.stop();
    let flash = hearth.flash().to_owned();
    let state = hearth.dir().join("state");
    hearth.ok(&[
        "pool",
        "adopt-flash",
        "--flash",
        path(&flash),
        "--force",
        "--state-dir",
        path(&state),
    ])?;
    hearth.start().with_context(|| hearth.log())?;
    served(&hearth)?;
    hearth.ok(&["disk", "set", "d", "--trust", "origin"])?;
    let mut client = connect(&hearth)?;
    ensure!(client.read(MIB, 65536)? == std::fs::read(&dirty)?[1 << 20..][..65536]);
    drop(client);
    hearth.stop().map(drop)
}

/// The same of the second of two devices that share what is cached: the first one's tables are there, and yet not all is well.
#[test]
fn a_stop_tells_of_the_second_device_as_well() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let first = path(hearth.flash()).to_owned();
    let second = hearth.dir().join("second.img");
    let both = ["--flash", &first, "--flash", path(&second)];
    hearth.ok(&[&["pool", "create", "--size", "64M"], &both[..]].concat())?;
    hearth.serve_args = vec!["--flash".into(), path(&second).into()];
    hearth.start()?;
    let origin = hearth.origin("w.raw", 16 * MIB)?;
    hearth.add("w", path(&origin), &["--mode", "write-through"])?;
    let mut client = hearth.connect("w")?;
    client.write(MIB, &[0xAB; 65536])?;
    client.flush()?;
    drop(client);
    trim(&second)?;
    ensure!(hearth.stop().is_err(), "it calls this an end in order");
    let says = hearth.log();
    let what = format!(
        "{} was erased or written over while it was served: nothing was dirty there",
        path(&second)
    );
    ensure!(says.contains(&what), "{says}");
    // What it told to do gives a pool that is served.
    hearth.start().with_context(|| hearth.log())?;
    let mut client = wait::until("the whole disk is served", LIMIT, || {
        hearth.connect("w").ok()
    })
    .with_context(|| hearth.log())?;
    ensure!(client.read(MIB, 65536)? == [0xAB; 65536]);
    drop(client);
    let _ = hearth.stop();
    let state = path(&hearth.dir().join("state")).to_owned();
    let adopt = ["pool", "adopt-flash", "--flash", path(&second), "--force"];
    hearth.ok(&[&adopt[..], &["--state-dir", &state]].concat())?;
    hearth.set_flash(second);
    hearth.serve_args.clear();
    hearth.start().with_context(|| hearth.log())?;
    hearth.ok(&["pool", "add-flash", &first, "--force"])?;
    let mut client = hearth.connect("w")?;
    ensure!(client.read(MIB, 65536)? == [0xAB; 65536]);
    drop(client);
    hearth.stop().map(drop)
}

/// The first of two devices has the tables, of which the daemon stores the superblock again when it gives up the flash.
#[test]
fn erased_first_device_leaves_clean_disks_served() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let first = path(hearth.flash()).to_owned();
    let second = hearth.dir().join("second.img");
    let both = ["--flash", &first, "--flash", path(&second)];
    hearth.ok(&[&["pool", "create", "--size", "64M"], &both[..]].concat())?;
    hearth.serve_args = vec!["--flash".into(), path(&second).into()];
    hearth.start()?;
    let origin = hearth.origin("w.raw", 16 * MIB)?;
    hearth.add("w", path(&origin), &["--mode", "write-through"])?;
    trim(hearth.flash())?;
    wait::until("it is noticed", LIMIT, || {
        let pool = hearth.said(&["pool", "show"]).ok()?;
        pool.contains("was erased or written over while in use")
            .then_some(())
    })
    .with_context(|| hearth.log())?;
    let mut client = hearth.connect("w")?;
    client.write(MIB, &[0xAB; 65536])?;
    client.flush()?;
    drop(client);
    ensure!(hearth.stop().is_err(), "it calls this an end in order");
    hearth.start().with_context(|| hearth.log())?;
    let mut client = wait::until("the whole disk is served", LIMIT, || {
        hearth.connect("w").ok()
    })
    .with_context(|| hearth.log())?;
    ensure!(client.read(MIB, 65536)? == [0xAB; 65536]);
    Ok(())
}

/// In every mode, while guests read and write: those with nothing dirty there do not notice.
#[test]
fn erased_flash_under_load_stops_no_disk() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let modes = ["write-back", "write-through", "write-around", "off"];
    for mode in modes {
        let origin = hearth.origin(&format!("{mode}.raw"), 16 * MIB)?;
        hearth.add(mode, path(&origin), &["--mode", mode, "--seq-cutoff", "0"])?;
    }
    let (done, ended) = (modes.map(|_| AtomicU64::new(0)), AtomicBool::new(false));
    let written = |more: u64| {
        let before = done.each_ref().map(|n| n.load(Ordering::Relaxed));
        wait::until("all guests go on", LIMIT, || {
            let now = done
                .iter()
                .zip(before)
                .all(|(n, before)| n.load(Ordering::Relaxed) >= before + more);
            now.then_some(())
        })
    };
    let models = std::thread::scope(|scope| -> Result<Vec<Vec<u8>>> {
        let guests = modes.iter().zip(&done).map(|(mode, done)| {
            let (hearth, ended) = (&hearth, &ended);
            scope.spawn(move || guest(hearth, mode, *mode != "write-back", done, ended))
        });
        let guests: Vec<_> = guests.collect();
        let course = (|| {
            written(300)?;
            trim(hearth.flash())?;
            wait::until("the flash is left", LIMIT, || {
                let pool = hearth.ok(&["pool", "show", "--json"]).ok()?;
                let pool: Value = serde_json::from_str(&pool).ok()?;
                (pool["state"] == "failed").then_some(())
            })?;
            written(300)
        })();
        ended.store(true, Ordering::Relaxed);
        let models = guests
            .into_iter()
            .map(|g| g.join().expect("a guest found wrong data"));
        let models: Result<Vec<_>> = models.collect();
        course.with_context(|| hearth.log())?;
        models
    })?;
    let status = hearth.said(&["pool", "show"])?;
    ensure!(status.contains("adopt-flash"), "{status}");
    let _ = hearth.stop();
    ensure!(
        !hearth.log().contains("the pool is clean"),
        "{}",
        hearth.log()
    );
    hearth.start().with_context(|| hearth.log())?;
    for (mode, model) in modes.iter().zip(models).skip(1) {
        let mut client = wait::until(mode, LIMIT, || hearth.connect(mode).ok())?;
        ensure!(
            client.read(0, 16 << 20)? == model,
            "{mode} changed over the restart"
        );
    }
    Ok(())
}

/// Nobody reads it, so nothing fails.
#[test]
fn erased_flash_is_noticed_on_quiet_host() -> Result<()> {
    let hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("o.raw", 16 * MIB)?;
    hearth.add("d", path(&origin), &["--mode", "write-through"])?;
    trim(hearth.flash())?;
    wait::until("it is noticed", LIMIT, || {
        let pool = hearth.said(&["pool", "show"]).ok()?;
        pool.contains("was erased or written over while in use")
            .then_some(())
    })
    .with_context(|| hearth.log())?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[7; BLOCK])?;
    ensure!(client.read(0, BLOCK as u32)? == [7; BLOCK]);
    Ok(())
}

/// The superblock and the registry are there, and the log is not: as after a daemon that stored them again.
#[test]
fn start_over_blank_log_serves_clean_disks() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let [dirty, whole] = ["o.raw", "w.raw"].map(|name| hearth.origin(name, 16 * MIB));
    hearth.add("d", &format!("fault=eio-write:{}", path(&dirty?)), &[])?;
    hearth.add("w", path(&whole?), &["--mode", "write-through"])?;
    for disk in ["d", "w"] {
        let mut client = hearth.connect(disk)?;
        client.write(MIB, &[0xAB; 65536])?;
        client.flush()?;
    }
    hearth.kill9()?;
    trim_log(hearth.flash(), log_start(hearth.flash(), &[0xAB; BLOCK])?)?;
    hearth.start().with_context(|| hearth.log())?;
    let mut client = wait::until("the whole disk is served", LIMIT, || {
        hearth.connect("w").ok()
    })
    .with_context(|| hearth.log())?;
    ensure!(client.read(MIB, 65536)? == [0xAB; 65536]);
    ensure!(shown(&hearth)?["state"] == "refused", "{}", hearth.log());
    hearth.logged("adopt-flash")?;
    let says = hearth.said(&["pool", "show"])? + &hearth.log();
    ensure!(!says.contains("--accept-damage"), "{says}");
    Ok(())
}

/// The same under the daemon, which is stopped before anything of the log is read.
#[test]
fn stop_over_blank_log_is_not_clean() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("w.raw", 16 * MIB)?;
    hearth.add(
        "w",
        path(&origin),
        &["--mode", "write-through", "--seq-cutoff", "0"],
    )?;
    let mut client = hearth.connect("w")?;
    client.write(MIB, &[0xAB; 65536])?;
    client.read(MIB, 65536)?;
    // It is on flash from now on.
    let start = wait::until("it is cached", LIMIT, || {
        log_start(hearth.flash(), &[0xAB; BLOCK]).ok()
    })?;
    drop(client);
    trim_log(hearth.flash(), start)?;
    ensure!(hearth.stop().is_err(), "it calls this an end in order");
    let says = hearth.log();
    ensure!(says.contains("was erased or written over while"), "{says}");
    Ok(())
}

/// Either of two devices that hold everything, under a client, several times; and it is so after a kill as well.
#[test]
fn with_two_copies_nobody_notices() -> Result<()> {
    for (victim, mode) in [(0, "write-back"), (1, "write-back"), (0, "write-through")] {
        let about = || format!("{mode}, device {victim}");
        let mut hearth = Hearth::bare()?;
        let files = ["a.img", "b.img"].map(|name| hearth.dir().join(name));
        for file in &files {
            File::create(file)?.set_len(160 * MIB)?;
        }
        let both = ["--flash", path(&files[0]), "--flash", path(&files[1])];
        hearth.ok(&[&["pool", "create", "--dirty-copies", "2"][..], &both].concat())?;
        hearth.set_flash(files[0].clone());
        hearth.serve_args = both[2..].iter().map(|arg| (*arg).to_owned()).collect();
        hearth.start()?;
        let file = blank(&hearth)?;
        // What is dirty stays so for a while.
        let origin = format!("model-latency=20ms:{}", path(&file));
        hearth.add("d", &origin, &["--mode", mode, "--seq-cutoff", "0"])?;
        let mut client = hearth.connect("d")?;
        let mut writer = Writer::new(22);
        for _ in 0..4 {
            let loaded = writer.load(&mut client, BUSY, || trim(&files[victim]));
            loaded.with_context(|| format!("{}\n{}", about(), hearth.log()))?;
        }
        writer.flush(&mut client)?;
        let same = writer.check_stable(&mut client);
        same.with_context(|| format!("{}\n{}", about(), hearth.log()))?;
        ensure!(shown(&hearth)?["lost"].as_array().is_none_or(Vec::is_empty));
        for _ in 0..2 {
            let loaded = writer.load(&mut client, BUSY, || hearth.kill9());
            loaded.with_context(about)?;
            hearth.start().with_context(|| hearth.log())?;
            client = connect(&hearth).with_context(about)?;
            let sound = writer.check(&mut client);
            sound.with_context(|| format!("{}\n{}", about(), hearth.log()))?;
            writer.check_stable(&mut client).with_context(about)?;
        }
        drop(client);
        hearth.ok(&["disk", "flush", "d"])?;
        writer.check_file(&file).with_context(about)?;
        hearth.stop().with_context(about)?;
    }
    Ok(())
}
