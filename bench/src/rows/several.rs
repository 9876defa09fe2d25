//! Several flash devices: what two give, what it costs to keep everything on both, and how little is felt of one that is slow or
//! dies. Devices that a row needs and the host does not have are made ([`crate::devices`]).

use super::rounds;
use crate::args::Args;
use crate::devices::{self, Limited};
use crate::fixture;
use crate::load::{Job, run};
use crate::peers::Contender;
use crate::report::{Comparison, Outcome, Series, Wanted};
use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::mounted::{self, Mounted};
use hearth_rig::nbd::Client;
use hearth_rig::{Hearth, wait};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What a limited device is read and written at, at most, in bytes a second.
const RATE: u64 = 200_000_000;
/// Room for a pool's own structures, and for what cleaning keeps free.
const SLACK: u64 = 256 << 20;
/// How late a good device answers, and one that is ten times as slow, in milliseconds: so much that the time this machine
/// takes is little beside it.
const GOOD_MS: u32 = 2;
const SLOW_MS: u32 = 20;
/// What is used, and how large the devices are: it would fit on either.
const USED: u64 = 16 << 20;
const SMALL: u64 = 160 << 20;
/// Requests in flight there.
const DEPTH: u32 = 8;
/// What is measured before anything could be learned of a slow device, and how long it is given to be, in seconds.
const FIRST: u64 = 2;
const SETTLING: u64 = 15;
/// After so many milliseconds a device that does not answer counts as lost.
const HANGS_MS: f64 = 10e3;
/// What was asked of it cannot be answered earlier, and may take so many milliseconds more: as if it had been killed at that moment.
const BEYOND_MS: f64 = 100.0;
/// Longest wait for a state.
const LIMIT: Duration = Duration::from_secs(120);

pub(super) fn without(what: &str) -> Result<Outcome> {
    Ok(Outcome {
        notes: vec![format!("Left out: it needs {what}.")],
        ..Outcome::default()
    })
}

/// Two devices and one, each of a limited speed.
pub fn speed(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(missing) = devices::no_limits() {
        return without(missing);
    }
    let size = (args.disk / 2).max(64 << 20);
    // The same room in all, so that nothing but the number of devices differs.
    let file = |name: &str, size| fixture::file(&args.dir, name, size + SLACK);
    let alone = [file("flash-one.img", 2 * size)?];
    let both = [file("flash-a.img", size)?, file("flash-b.img", size)?];
    let one = Limited::new("one", &alone, RATE)?;
    let two = Limited::new("two", &both, RATE)?;
    let mut daemons = Vec::new();
    let mut contenders = Vec::new();
    for (name, limited) in [("one device", &one), ("two devices", &two)] {
        let (flash, wrap) = (limited.devices(), limited.wrap());
        let hearth = fixture::pool_on(args, &flash, &[], &fixture::HELD_BACK, wrap)?;
        let origin = fixture::file(&args.dir, &format!("{}.img", name.replace(' ', "-")), size)?;
        fixture::add(&hearth, "d", path(&origin), "write-back")?;
        contenders.push(fixture::contender(&hearth, "d", name)?);
        daemons.push(hearth);
    }
    let mut all = Outcome::default();
    // All of it, so that what is read is on flash.
    for (rw, what) in [("write", "writes"), ("read", "reads")] {
        let job = Job {
            once: true,
            ..Job::sequential(rw, 16, LIMIT.as_secs(), size)
        };
        let mut outcome = rounds(args, &job, &contenders, |_| Ok(()))?;
        outcome.compare_iops("two devices", "one device", Wanted::AtLeast(1.7));
        let rate = |series: &Series| Comparison {
            what: series.name.clone(),
            values: (series.samples.iter())
                .map(|s| s.iops * job.bs as f64 / 1e6)
                .collect(),
            unit: "MB/s".to_owned(),
            wanted: Wanted::Shown,
        };
        let rates: Vec<Comparison> = outcome.series.iter().map(rate).collect();
        outcome.comparisons.extend(rates);
        all.part(what, outcome);
    }
    all.notes.push(format!(
        "{} MiB each time. The kernel lets a daemon read {} MB/s and write as much of each of its devices, which are loop devices over files; the origin is written {} a second meanwhile.",
        size >> 20,
        RATE / 1_000_000,
        fixture::HELD_BACK[1]
    ));
    drop(daemons);
    drop((one, two));
    let origins = ["one-device.img", "two-devices.img"].map(|name| args.dir.join(name));
    let files = alone.iter().chain(&both).chain(&origins);
    files.for_each(|file| fixture::remove(file));
    Ok(all)
}

/// Everything on both files, and everything on one of them.
pub fn copies(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let size = (args.disk / 4).max(64 << 20);
    let mut files = Vec::new();
    let mut daemons = Vec::new();
    let mut contenders = Vec::new();
    for (name, copies) in [("one copy", "1"), ("two copies", "2")] {
        let file = |n: u32| {
            let file = format!("flash-{copies}-{n}.img");
            fixture::file(&args.dir, &file, 2 * size + SLACK)
        };
        let flash = [file(1)?, file(2)?];
        let named = [path(&flash[0]), path(&flash[1])];
        let made = ["--dirty-copies", copies];
        let hearth = fixture::pool_on(args, &named, &made, &fixture::HELD_BACK, Vec::new())?;
        let origin = fixture::file(&args.dir, &format!("origin-{copies}.img"), size)?;
        fixture::add(&hearth, "d", path(&origin), "write-back")?;
        contenders.push(fixture::contender(&hearth, "d", name)?);
        daemons.push((name, hearth));
        files.extend(flash);
        files.push(origin);
    }
    let mut all = Outcome::default();
    let jobs = [
        (
            "random 4 KiB",
            Job::random("randwrite", 24, args.seconds, size),
            0.5,
        ),
        (
            "sequential 128 KiB",
            Job::sequential("write", 16, args.seconds, size),
            0.4,
        ),
    ];
    for (what, job, goal) in jobs {
        let mut outcome = rounds(args, &job, &contenders, |contender: &Contender| {
            let of = daemons.iter().find(|(name, _)| *name == contender.name);
            let (_, hearth) = of.context("nobody serves it")?;
            fixture::drain(hearth, "d")
        })?;
        outcome.compare_iops("two copies", "one copy", Wanted::AtLeast(goal));
        all.part(what, outcome);
    }
    all.notes.push(format!(
        "Two flash files on one device here: it is written twice as much, so half is the most where its speed binds. Disks of {} MiB; the origins are written {} a second meanwhile.",
        size >> 20,
        fixture::HELD_BACK[1]
    ));
    drop(daemons);
    files.iter().for_each(|file| fixture::remove(file));
    Ok(all)
}

/// A file that a device is made of, with nothing on it.
fn blank(args: &Args, name: &str, size: u64) -> Result<PathBuf> {
    let file = args.dir.join(name);
    std::fs::File::create(&file)?.set_len(size)?;
    Ok(file)
}

/// A good device and one that has become ten times as slow, beside a good one alone.
pub fn slow(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(missing) = mounted::missing() {
        return without(missing);
    }
    let mut outcome = Outcome::default();
    let parts = [
        "good one alone",
        "with a slow one",
        "with a slow one at first",
    ];
    let mut series = parts.map(|name| Series {
        name: name.to_owned(),
        samples: Vec::new(),
    });
    let origin = fixture::file(&args.dir, "slow-origin.img", USED)?;
    let files = [
        blank(args, "flash-good.img", SMALL)?,
        blank(args, "flash-slow.img", SMALL)?,
    ];
    let settling = if args.smoke { 2 } else { SETTLING };
    for round in 0..args.rounds {
        for both in [false, true] {
            let good = Mounted::new(&args.dir, "good", &files[0], GOOD_MS)?;
            // As good as the other one, as long as it is filled.
            let other = Mounted::new(&args.dir, "other", &files[1], GOOD_MS)?;
            let flash = match both {
                true => vec![good.path(), other.path()],
                false => vec![good.path()],
            };
            let mut hearth = fixture::pool_on(args, &flash, &[], &[], Vec::new())?;
            fixture::add(&hearth, "d", path(&origin), "write-back")?;
            fixture::warm(&hearth, "d", USED)?;
            if both {
                let pool = show(&hearth)?;
                let cached = |n: usize| pool["devices"][n]["cached"].as_u64().unwrap_or(0);
                ensure!(
                    cached(0) > 0 && cached(1) > 0,
                    "one of them is not used: {pool}"
                );
            }
            hearth.stop()?;
            drop(other);
            let other = Mounted::new(&args.dir, "other", &files[1], SLOW_MS)?;
            hearth.start()?;
            let disk = fixture::contender(&hearth, "d", "d")?;
            let load = |seconds: u64| {
                let job = Job {
                    reads: 80,
                    seed: round as u64 + 1,
                    ..Job::random("randrw", DEPTH, seconds, USED)
                };
                run(&job, &disk)
            };
            let first = load(FIRST)?;
            load(settling)?;
            let settled = load(args.seconds)?;
            if both {
                series[1].samples.push(settled);
                series[2].samples.push(first);
            } else {
                series[0].samples.push(settled);
            }
            drop(other);
            drop(good);
            drop(hearth);
        }
    }
    outcome.series.extend(series);
    outcome.compare_p99(parts[1], parts[0], Wanted::AtMost(2.0));
    outcome.compare_p99(parts[2], parts[0], Wanted::Shown);
    outcome.notes.push(format!(
        "The good device takes {GOOD_MS} ms longer than a file for each read and write, the slow one {SLOW_MS} ms. {} MiB are in use, half of it on each before the second becomes slow. \"At first\" are the first {FIRST} s after that; {settling} s later is measured.",
        USED >> 20
    ));
    fixture::remove(&origin);
    files.iter().for_each(|file| fixture::remove(file));
    Ok(outcome)
}

fn show(hearth: &Hearth) -> Result<serde_json::Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["pool", "show", "--json"])?,
    )?)
}

/// From the death of one of two devices that both have everything to what is asked then.
pub fn death(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(missing) = mounted::missing() {
        return without(missing);
    }
    let mut outcome = Outcome::default();
    for (what, signal) in [("is killed", libc::SIGKILL), ("hangs", libc::SIGSTOP)] {
        let (mut writes, mut reads) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            let (write, read) = dies(args, signal)?;
            writes.push(write);
            reads.push(read);
        }
        let after = match signal {
            libc::SIGSTOP => (
                "from that write until all that is cached has been read once",
                Wanted::Shown,
            ),
            _ => (
                "until all that is cached has been read once",
                Wanted::AtMost(HANGS_MS),
            ),
        };
        let first = match signal {
            libc::SIGSTOP => {
                writes.iter_mut().for_each(|ms| *ms -= HANGS_MS);
                (
                    "from the deadline until a write that was begun when it hung is durable",
                    Wanted::AtMost(BEYOND_MS),
                )
            }
            _ => (
                "until a write that was begun then is durable",
                Wanted::AtMost(HANGS_MS),
            ),
        };
        let asked = [(first.0, writes, first.1), (after.0, reads, after.1)];
        for (until, values, wanted) in asked {
            outcome.comparisons.push(Comparison {
                what: format!("a flash device {what}: {until}"),
                values,
                unit: "ms".to_owned(),
                wanted,
            });
        }
    }
    outcome.notes.push(format!(
        "Two devices of {} MiB behind servers in user space; {} MiB are cached, which are read one block after the other. The deadline, which cannot be set, is {} s.",
        SMALL >> 20,
        USED >> 20,
        HANGS_MS / 1e3
    ));
    Ok(outcome)
}

/// Milliseconds until a write is durable, and until everything cached has been read.
fn dies(args: &Args, signal: i32) -> Result<(f64, f64)> {
    let files = [
        blank(args, "flash-a.img", SMALL)?,
        blank(args, "flash-b.img", SMALL)?,
    ];
    let origin = fixture::file(&args.dir, "death-origin.img", USED)?;
    // Goes last: it cannot end while a device hangs.
    let hearth;
    let good = Mounted::new(&args.dir, "a", &files[0], 0)?;
    let mut bad = Mounted::new(&args.dir, "b", &files[1], 0)?;
    let flash = [good.path(), bad.path()];
    hearth = fixture::pool_on(args, &flash, &["--dirty-copies", "2"], &[], Vec::new())?;
    fixture::add(&hearth, "d", path(&origin), "write-back")?;
    fixture::warm(&hearth, "d", USED)?;
    let connect = || Client::connect(&hearth.socket(), "d");
    let (mut writer, mut reader) = (connect()?, connect()?);
    writer.write(0, &[1; 4096])?;
    writer.flush()?;
    bad.server().signal(signal)?;
    let begun = Instant::now();
    let passed = || begun.elapsed().as_secs_f64() * 1e3;
    let times = std::thread::scope(|scope| -> Result<(f64, f64)> {
        let mut reading = move || -> Result<f64> {
            for at in (4096..USED).step_by(4096) {
                reader.read(at, 4096)?;
            }
            Ok(passed())
        };
        let mut writing = || -> Result<f64> {
            writer.write(0, &[2; 4096])?;
            writer.flush()?;
            Ok(passed())
        };
        if signal == libc::SIGSTOP {
            // What a device that hangs was asked to read is asked for nowhere else: so not before it is lost.
            let written = writing()?;
            return Ok((written, reading()? - written));
        }
        let reads = scope.spawn(reading);
        let written = writing()?;
        let read = reads.join().ok().context("the reader panicked")??;
        Ok((written, read))
    })?;
    wait::until("the device counts as lost", LIMIT, || {
        let pool = show(&hearth).ok()?;
        (pool["devices"][1]["lost"] == true).then_some(())
    })?;
    drop((bad, good));
    drop(hearth);
    files.iter().for_each(|file| fixture::remove(file));
    fixture::remove(&origin);
    Ok(times)
}
