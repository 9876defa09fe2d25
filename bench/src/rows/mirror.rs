//! Mirrors: what two legs give, what copying and comparing them costs those who use the disk, and how long the death of a leg
//! is felt. The hard disks are models, and labelled so.

use super::rounds;
use crate::args::Args;
use crate::fixture;
use crate::load::{Job, run};
use crate::report::{Comparison, Outcome, Series, Wanted};
use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::nbd::{Client, Command};
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest wait for a leg that is copied to.
const COPY_LIMIT: Duration = Duration::from_secs(1800);
/// The deadline of legs whose death is timed, seconds.
const DEADLINE: u64 = 2;
/// Bytes that are dirty when they are written back beside other requests, in blocks all over the disk: more than a hard disk
/// takes while that is timed.
const DIRTY: u64 = 32 << 20;
/// How often the state of a leg is looked at where the time counts.
const LOOK: Duration = Duration::from_millis(5);

/// A file of zeros that takes no room: the modelled disk is as slow over it as over any other.
fn blank(args: &Args, name: &str, size: u64) -> Result<PathBuf> {
    let file = args.dir.join(name);
    File::create(&file)?.set_len(size)?;
    Ok(file)
}

fn slow(file: &Path) -> String {
    format!("model-hdd:{}", path(file))
}

fn add(hearth: &Hearth, name: &str, legs: &[&str], more: &[&str]) -> Result<()> {
    let mut words = vec!["disk", "add", name, "--seq-cutoff", "0"];
    for leg in legs {
        words.extend(["--mirror", leg]);
    }
    words.extend(more);
    hearth.ok(&words).map(drop)
}

fn state(hearth: &Hearth, name: &str, leg: usize) -> Result<String> {
    let info = hearth.ok(&["disk", "show", name, "--json"])?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    let state = info["legs"][leg]["state"].as_str();
    Ok(state.context("the disk has no such leg")?.to_owned())
}

fn wait_current(hearth: &Hearth, name: &str) -> Result<()> {
    wait::until("the leg is current", COPY_LIMIT, || {
        (state(hearth, name, 1).ok()? == "current").then_some(())
    })
}

/// Reads of a mirror of two hard disks and of one hard disk.
pub fn reads(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let size = (args.disk / 4).max(64 << 20);
    let [one, a, b] =
        ["one", "a", "b"].map(|name| blank(args, &format!("mirror-{name}.img"), size));
    let (one, a, b) = (one?, a?, b?);
    let hearth = fixture::pool(args, size)?;
    fixture::add(&hearth, "one", &slow(&one), "off")?;
    add(&hearth, "two", &[&slow(&a), &slow(&b)], &["--mode", "off"])?;
    wait_current(&hearth, "two")?;
    let contenders = [
        fixture::contender(&hearth, "one", "one modelled disk")?,
        fixture::contender(&hearth, "two", "mirror of two")?,
    ];
    let mut all = Outcome::default();
    for (depth, wanted) in [(1, Wanted::Shown), (24, Wanted::AtLeast(1.8))] {
        let job = Job::random("randread", depth, args.seconds, size);
        let mut outcome = rounds(args, &job, &contenders, |_| Ok(()))?;
        outcome.compare_iops("mirror of two", "one modelled disk", wanted);
        all.at_depth(depth, outcome);
    }
    drop(hearth);
    [one, a, b].iter().for_each(|file| fixture::remove(file));
    Ok(all)
}

/// How fast a new leg is copied to while nobody asks for anything, of what the leg can do.
pub fn resync(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let size = (args.disk / 2).max(64 << 20);
    let hearth = fixture::pool(args, 64 << 20)?;
    let mut outcome = Outcome::default();
    type Named = fn(&Path) -> String;
    let kinds: [(&str, Named, Wanted); 2] = [
        ("modelled hard disks", slow, Wanted::AtLeast(0.8)),
        (
            "files on one SSD",
            |file| path(file).to_owned(),
            Wanted::Shown,
        ),
    ];
    for (what, named, wanted) in kinds {
        let mut ratios = Vec::new();
        let mut speeds = Vec::new();
        for _ in 0..args.rounds {
            let a = fixture::file(&args.dir, "mirror-a.img", size)?;
            let b = blank(args, "mirror-b.img", size)?;
            // As fast as one stream is written, by the same door, to a disk that has no other leg.
            fixture::add(&hearth, "raw", &named(&b), "off")?;
            let job = Job {
                bs: 1 << 20,
                once: true,
                ..Job::sequential("write", 4, args.seconds, size)
            };
            let raw = run(&job, &fixture::contender(&hearth, "raw", "raw")?)?;
            let raw = raw.iops * job.bs as f64;
            hearth.ok(&["disk", "remove", "raw"])?;
            let b = blank(args, path_name(&b)?, size)?;
            add(&hearth, "d", &[&named(&a)], &["--mode", "off"])?;
            let begun = Instant::now();
            hearth.ok(&["disk", "mirror", "d", "--add", &named(&b)])?;
            while state(&hearth, "d", 1)? != "current" {
                ensure!(begun.elapsed() < COPY_LIMIT, "the leg is not copied to");
                std::thread::sleep(LOOK);
            }
            let speed = size as f64 / begun.elapsed().as_secs_f64();
            ratios.push(speed / raw);
            speeds.push(speed / 1e6);
            hearth.ok(&["disk", "remove", "d"])?;
            fixture::remove(&b);
        }
        let mut add = |what: String, values, unit: &str, wanted| {
            outcome.comparisons.push(Comparison {
                what,
                values,
                unit: unit.to_owned(),
                wanted,
            });
        };
        add(
            format!("{what}: resync / one sequential stream of writes"),
            ratios,
            "",
            wanted,
        );
        add(format!("{what}: resync"), speeds, "MB/s", Wanted::Shown);
    }
    fixture::remove(&args.dir.join("mirror-a.img"));
    outcome.notes.push(format!("Disks of {} MiB.", size >> 20));
    Ok(outcome)
}

fn path_name(file: &Path) -> Result<&str> {
    let name = file.file_name().and_then(|name| name.to_str());
    name.context("the file has no name")
}

/// What others feel of a resync, a scrub and of what is written back, at the rates that are set unless somebody sets others.
pub fn quiet(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    // More than can be copied or compared meanwhile.
    let size = if args.smoke { 256 << 20 } else { 1 << 30 };
    let (a, b) = (
        blank(args, "mirror-a.img", size)?,
        blank(args, "mirror-b.img", size)?,
    );
    let hearth = fixture::pool(args, 8 * DIRTY)?;
    let job = Job::random("randread", 4, args.seconds, size);
    let mut names = ["idle", "resync", "scrub", "destage"].map(|name| (name, Vec::new()));
    let mut short = 0;
    for round in 0..args.rounds {
        let job = Job {
            seed: round as u64 + 1,
            ..job.clone()
        };
        for (name, samples) in &mut names {
            let mode = if *name == "destage" {
                "write-back"
            } else {
                "off"
            };
            blank(args, "mirror-b.img", size)?;
            add(&hearth, "d", &[&slow(&a)], &["--mode", mode])?;
            let disk = fixture::contender(&hearth, "d", name)?;
            let goes_on = match *name {
                "resync" => {
                    hearth.ok(&["disk", "mirror", "d", "--add", &slow(&b)])?;
                    "resyncing"
                }
                "scrub" => {
                    hearth.ok(&["disk", "mirror", "d", "--add", &slow(&b)])?;
                    "scrub"
                }
                "destage" => {
                    dirty_randomly(&hearth, DIRTY, size)?;
                    "destage"
                }
                _ => "",
            };
            if goes_on == "scrub" {
                wait_current(&hearth, "d")?;
                hearth.ok(&["disk", "scrub", "d", "--no-wait"])?;
            }
            let sample = std::thread::scope(|scope| {
                let flush = (goes_on == "destage")
                    .then(|| scope.spawn(|| hearth.hearth(&["disk", "flush", "d"])));
                let sample = run(&job, &disk);
                let through = match goes_on {
                    "resyncing" => state(&hearth, "d", 1).is_ok_and(|state| state != "resyncing"),
                    "scrub" => scrub_is_over(&hearth).unwrap_or(true),
                    "destage" => flush.as_ref().is_some_and(|flush| flush.is_finished()),
                    _ => false,
                };
                short += usize::from(through);
                // A flush that goes on ends with its disk.
                hearth.ok(&["disk", "remove", "d", "--discard-dirty", "--yes"])?;
                sample
            })?;
            samples.push(sample);
        }
    }
    let mut outcome = Outcome::default();
    for (name, samples) in names {
        outcome.series.push(Series {
            name: name.to_owned(),
            samples,
        });
    }
    for name in ["resync", "scrub", "destage"] {
        outcome.compare_p99(name, "idle", Wanted::AtMost(3.0));
    }
    outcome.notes.push(format!(
        "Random 4 KiB reads at depth 4 that no cache answers, on modelled hard disks of {} GiB. In {short} runs what went on beside was through before the reads were.",
        size >> 30
    ));
    drop(hearth);
    [a, b].iter().for_each(|file| fixture::remove(file));
    Ok(outcome)
}

fn scrub_is_over(hearth: &Hearth) -> Result<bool> {
    let info = hearth.ok(&["disk", "show", "d", "--json"])?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    Ok(info["upkeep"]["scrub"]["active"] != true)
}

/// Writes blocks all over a disk of `size` bytes that caches writes.
fn dirty_randomly(hearth: &Hearth, dirty: u64, size: u64) -> Result<()> {
    let mut client = Client::connect(&hearth.socket(), "d")?;
    let step = size / (dirty / 4096);
    for at in (0..size).step_by(step as usize) {
        client.call(
            Command::Write { fua: false },
            at / 4096 * 4096,
            4096,
            &[7; 4096],
        )?;
    }
    client.flush()?;
    Ok(())
}

/// From the death of a leg to the first answer, in a disk that is written and flushed all the time.
pub fn death(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let size = 64 << 20;
    let mut outcome = Outcome::default();
    for (what, signal) in [("is killed", libc::SIGKILL), ("hangs", libc::SIGSTOP)] {
        let mut pauses = Vec::new();
        for _ in 0..args.rounds {
            let (a, b) = (
                blank(args, "mirror-a.img", size)?,
                blank(args, "mirror-b.img", size)?,
            );
            let hearth = fixture::pool(args, size)?;
            let mut server = Server::start(
                "nbdkit",
                &["-f", "-U", "{socket}", "file", path(&b)],
                hearth.dir().join("b.s"),
            )?;
            let deadline = DEADLINE.to_string();
            let more = [
                "--sole-user",
                "--mode",
                "off",
                "--origin-timeout",
                &deadline,
            ];
            add(&hearth, "d", &[path(&a), &server.uri("")], &more)?;
            wait_current(&hearth, "d")?;
            let mut client = Client::connect(&hearth.socket(), "d")?;
            for block in 0..64 {
                client.write(block * 4096, &[1; 4096])?;
            }
            client.flush()?;
            server.signal(signal)?;
            let begun = Instant::now();
            // To all legs.
            client.write(0, &[2; 4096])?;
            client.flush()?;
            pauses.push(begun.elapsed().as_secs_f64() * 1e3);
            // It may be on its way back in just then, in vain.
            wait::until("the leg is out", COPY_LIMIT, || {
                (state(&hearth, "d", 1).ok()? == "out").then_some(())
            })?;
            drop(client);
            if signal == libc::SIGSTOP {
                server.signal(libc::SIGCONT)?;
            }
            server.kill9()?;
            drop(hearth);
            [a, b].iter().for_each(|file| fixture::remove(file));
        }
        outcome.comparisons.push(Comparison {
            what: format!("a leg {what}: until a write that was begun then is durable"),
            values: pauses,
            unit: "ms".to_owned(),
            wanted: Wanted::AtMost(DEADLINE as f64 * 1e3),
        });
    }
    outcome.notes.push(format!(
        "One leg is a file, the other one behind an NBD server. The deadline is {DEADLINE} s."
    ));
    Ok(outcome)
}
