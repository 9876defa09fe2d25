//! Warm reads: everything is on flash, so only the server's own work differs.

use super::rounds;
use crate::args::Args;
use crate::load::Job;
use crate::report::{Comparison, Outcome, Wanted};
use crate::{fixture, peers};
use anyhow::Result;

pub fn qd24(args: &Args) -> Result<Outcome> {
    let job = Job::random("randread", 24, args.seconds, args.disk);
    let mut outcome = against_peers(args, &job)?;
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::AtLeast(1.0));
    outcome.compare_cpu("hearth", "qemu-nbd", Wanted::AtMost(0.6));
    outcome.compare_iops("hearth", "bare loop", Wanted::AtLeast(1.1));
    outcome.compare_cpu("hearth", "bare loop", Wanted::Shown);
    shown(&mut outcome);
    Ok(outcome)
}

pub fn qd1(args: &Args) -> Result<Outcome> {
    let job = Job::random("randread", 1, args.seconds, args.disk);
    let mut outcome = against_peers(args, &job)?;
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::AtLeast(1.3));
    outcome.compare_cpu("hearth", "qemu-nbd", Wanted::AtMost(0.6));
    outcome.compare_iops("hearth", "bare loop", Wanted::AtLeast(0.97));
    outcome.compare_cpu("hearth", "bare loop", Wanted::Shown);
    shown(&mut outcome);
    Ok(outcome)
}

pub fn sequential(args: &Args) -> Result<Outcome> {
    let job = Job::sequential("read", 16, args.seconds, args.disk);
    let mut outcome = against_peers(args, &job)?;
    outcome.compare_iops("hearth", "bare loop", Wanted::AtLeast(0.9));
    outcome.compare_cpu("hearth", "bare loop", Wanted::AtMost(1.3));
    outcome.compare_iops("bare loop", "raw", Wanted::Shown);
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.8));
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::Shown);
    outcome.compare_iops("qemu-nbd", "raw", Wanted::Shown);
    Ok(outcome)
}

pub fn scale(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    let hearth = warm_pool(args, &origin)?;
    let contender = fixture::contender(&hearth, "warm", "hearth")?;
    let raw = peers::raw(hearth.flash());
    let one = Job::random("randread", 64, args.seconds, args.disk);
    let four = Job {
        depth: 16,
        connections: 4,
        ..one.clone()
    };
    let four_deep = Job {
        connections: 4,
        ..one.clone()
    };
    // The jobs differ here, not the contenders: alternate them by hand.
    let mut outcome = Outcome::default();
    for round in 0..args.rounds {
        let one_round = Args {
            rounds: 1,
            ..args.clone()
        };
        for (name, contender, job) in [
            ("raw, 64", &raw, &one),
            ("1 x 64", &contender, &one),
            ("4 x 16", &contender, &four),
            ("4 x 64", &contender, &four_deep),
        ] {
            let mut named = contender.clone();
            named.name = name.to_owned();
            let job = Job {
                seed: round as u64 + 1,
                ..job.clone()
            };
            let part = rounds(&one_round, &job, &[named], |_| Ok(()))?;
            for series in part.series {
                match outcome.series.iter_mut().find(|s| s.name == series.name) {
                    Some(known) => known.samples.extend(series.samples),
                    None => outcome.series.push(series),
                }
            }
            outcome.notes.extend(part.notes);
        }
    }
    outcome.notes.sort();
    outcome.notes.dedup();
    outcome.compare_iops("4 x 16", "1 x 64", Wanted::AtLeast(1.2));
    outcome.compare_iops("4 x 64", "1 x 64", Wanted::Shown);
    // More than the device can do, connections cannot give.
    outcome.compare_iops("1 x 64", "raw, 64", Wanted::Shown);
    outcome.compare_cpu("4 x 16", "1 x 64", Wanted::Shown);
    Ok(outcome)
}

/// A hit and a pass-through read of a file of the same kind cost the same but for the cache.
pub fn hit_cpu(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    let bare = fixture::file(&args.dir, "raw.img", args.disk)?;
    let hearth = warm_pool(args, &origin)?;
    fixture::add(&hearth, "bare", hearth_rig::daemon::path(&bare), "off")?;
    let contenders = [
        fixture::contender(&hearth, "warm", "hit")?,
        fixture::contender(&hearth, "bare", "pass-through")?,
    ];
    let mut all = Outcome::default();
    for (depth, wanted) in [(24, Wanted::AtMost(1.5)), (1, Wanted::Shown)] {
        let job = Job::random("randread", depth, args.seconds, args.disk);
        let mut outcome = rounds(args, &job, &contenders, |_| Ok(()))?;
        let values = match outcome.series.as_slice() {
            [hit, bare] => hit
                .samples
                .iter()
                .zip(&bare.samples)
                .filter_map(|(h, b)| Some(h.server_us? - b.server_us?))
                .collect(),
            _ => Vec::new(),
        };
        outcome.comparisons.push(Comparison {
            what: "a hit's CPU less a pass-through read's".to_owned(),
            values,
            unit: "µs".to_owned(),
            wanted,
        });
        all.at_depth(depth, outcome);
    }
    Ok(all)
}

/// A pool with a disk `warm`, all of which is on flash.
pub(super) fn warm_pool(args: &Args, origin: &std::path::Path) -> Result<hearth_rig::Hearth> {
    let hearth = fixture::pool(args, args.disk)?;
    fixture::add(
        &hearth,
        "warm",
        hearth_rig::daemon::path(origin),
        "write-back",
    )?;
    fixture::warm(&hearth, "warm", args.disk)?;
    Ok(hearth)
}

fn against_peers(args: &Args, job: &Job) -> Result<Outcome> {
    let hearth = if args.peers_only {
        None
    } else {
        let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
        Some(warm_pool(args, &origin)?)
    };
    let file = fixture::to_read(args, hearth.as_ref())?;
    let qemu = peers::qemu_nbd(&file, &args.dir)?;
    let nbdkit = peers::nbdkit_file(&file, &args.dir)?;
    let bare = peers::bare(&file, &args.dir)?;
    let mut contenders = vec![
        peers::raw(&file),
        qemu.contender(),
        nbdkit.contender(),
        bare.contender(),
    ];
    if let Some(hearth) = &hearth {
        contenders.push(fixture::contender(hearth, "warm", "hearth")?);
    }
    let mut outcome = rounds(args, job, &contenders, |_| Ok(()))?;
    if let Some(hearth) = hearth {
        let misses =
            hearth.counter("warm", "read_misses")? + hearth.counter("warm", "read_partial_hits")?;
        let hits = hearth.counter("warm", "read_hits")?;
        outcome.notes.push(format!(
            "Hearth counted {hits} hits and {misses} reads that were none."
        ));
    }
    outcome.notes.push(
        "nbdkit's file plugin reads through the page cache; the others use O_DIRECT.".to_owned(),
    );
    Ok(outcome)
}

fn shown(outcome: &mut Outcome) {
    outcome.compare_iops("hearth", "nbdkit file", Wanted::Shown);
    outcome.compare_iops("hearth", "raw", Wanted::Shown);
    outcome.compare_iops("qemu-nbd", "raw", Wanted::Shown);
}
