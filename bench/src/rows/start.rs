//! How soon a daemon answers after it was killed or stopped, and how much is written to flash.

use crate::args::Args;
use crate::fixture;
use crate::load::{Job, run};
use crate::report::{Comparison, Outcome, Wanted};
use anyhow::{Context, Result};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
/// How long a first answer may take before the row gives up.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

pub fn one(args: &Args) -> Result<Outcome> {
    start(args, GIB)
}

pub fn four(args: &Args) -> Result<Outcome> {
    start(args, 4 * GIB)
}

pub fn sixteen(args: &Args) -> Result<Outcome> {
    if !args.large {
        let notes = vec!["Left out; --large measures it.".to_owned()];
        return Ok(Outcome {
            notes,
            ..Outcome::default()
        });
    }
    start(args, 16 * GIB)
}

fn start(args: &Args, size: u64) -> Result<Outcome> {
    let size = if args.smoke { 64 << 20 } else { size };
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "start.img", size)?;
    let mut hearth = fixture::pool(args, size)?;
    fixture::add(&hearth, "warm", path(&origin), "write-back")?;
    let cached = fixture::warm(&hearth, "warm", size)?;

    let (mut killed, mut stopped) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        hearth.kill9()?;
        killed.push(first_answer(&mut hearth)?);
        hearth.stop()?;
        stopped.push(first_answer(&mut hearth)?);
    }
    let hits = hearth.counter("warm", "read_hits")?;
    let allowed = 200.0 + 20.0 * size as f64 / GIB as f64;
    let mut outcome = Outcome::default();
    let mut add = |what: &str, values: Vec<f64>, unit: &str, wanted| {
        outcome.comparisons.push(Comparison {
            what: what.to_owned(),
            values,
            unit: unit.to_owned(),
            wanted,
        });
    };
    add(
        "first answer after kill -9",
        killed,
        "ms",
        Wanted::AtMost(allowed),
    );
    add(
        "first answer after a clean stop",
        stopped,
        "ms",
        Wanted::AtMost(200.0),
    );
    outcome.notes.push(format!(
        "{} MiB cached. The first answer was {}.",
        cached >> 20,
        if hits > 0 { "a hit" } else { "no hit" }
    ));
    drop(hearth);
    fixture::remove(&origin);
    Ok(outcome)
}

/// Starts the daemon; milliseconds until the first read was answered.
fn first_answer(hearth: &mut Hearth) -> Result<f64> {
    let start = Instant::now();
    hearth.spawn()?;
    loop {
        match Client::connect(&hearth.socket(), "warm").and_then(|mut c| c.read(4096, 4096)) {
            Ok(_) => return Ok(start.elapsed().as_secs_f64() * 1e3),
            Err(e) => anyhow::ensure!(
                start.elapsed() < ANSWER_LIMIT,
                "no answer: {e}\n{}",
                hearth.log()
            ),
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

pub fn amplification(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    let mut outcome = Outcome::default();
    let jobs = [
        (
            "random 4 KiB writes, depth 24",
            Job::random("randwrite", 24, args.seconds, args.disk),
            Wanted::AtMost(1.1),
        ),
        (
            "sequential 128 KiB writes, depth 16",
            Job::sequential("write", 16, args.seconds, args.disk),
            Wanted::AtMost(1.1),
        ),
        (
            "random 4 KiB writes, depth 24, a flush every 32",
            Job {
                flush_every: 32,
                ..Job::random("randwrite", 24, args.seconds, args.disk)
            },
            Wanted::Shown,
        ),
    ];
    for (what, job, wanted) in jobs {
        let hearth = fixture::pool(args, args.disk * 2)?;
        fixture::add(&hearth, "back", path(&origin), "write-back")?;
        run(&job, &fixture::contender(&hearth, "back", "hearth")?)?;
        note(&mut outcome, what, &hearth, wanted)?;
    }
    let hearth = fixture::pool(args, args.disk)?;
    fixture::add(&hearth, "fill", path(&origin), "write-back")?;
    fixture::warm(&hearth, "fill", args.disk)?;
    note(
        &mut outcome,
        "fills of a whole disk",
        &hearth,
        Wanted::AtMost(1.1),
    )?;
    Ok(outcome)
}

fn note(outcome: &mut Outcome, what: &str, hearth: &Hearth, wanted: Wanted) -> Result<()> {
    let pool = hearth.pool_stats()?;
    let counters = &pool["spans"][0]["counters"];
    let count = |name: &str| {
        counters[name]
            .as_u64()
            .with_context(|| format!("no {name} in the statistics"))
    };
    let (written, payload, again) = (
        count("flash_write_bytes")?,
        count("flash_payload_bytes")?,
        count("flash_reinsert_bytes")?,
    );
    let ratio = written as f64 / payload.max(1) as f64;
    outcome.comparisons.push(Comparison::single(
        format!("{what}: bytes written to flash / bytes of writes and fills"),
        ratio,
        "",
        wanted,
    ));
    outcome.notes.push(format!(
        "{what}: {} MiB to flash for {} MiB; {} MiB written again.",
        written >> 20,
        payload >> 20,
        again >> 20
    ));
    Ok(())
}
