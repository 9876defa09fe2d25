//! Slow origins: what a cache is for. Both are models, and labelled so.

use super::rounds;
use crate::args::Args;
use crate::load::{Job, run};
use crate::report::{Outcome, Wanted};
use crate::{fixture, peers};
use anyhow::Result;
use hearth_rig::daemon::path;

/// Longest warm-up of the skewed row, seconds, and the length of its steps.
const WARM_UP_MAX: u64 = 240;
const WARM_UP_STEP: u64 = 30;
/// Shortest run of the skewed row, seconds. Of fio's sequences the beginnings are much alike whatever
/// the seed (two thirds of the first 30,000 blocks in common where a quarter would be chance), so that
/// short runs read again and again what short runs have read.
const SKEWED_SECONDS: u64 = 20;
/// Warm enough: another step gains less than this.
const WARM_GAIN: f64 = 1.03;

pub fn skewed(args: &Args) -> Result<Outcome> {
    let size = (args.disk / 2).max(64 << 20);
    let (off, cached) = (
        fixture::file(&args.dir, "skew-off.img", size)?,
        fixture::file(&args.dir, "skew.img", size)?,
    );
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let flash = (size / 100 * 21).next_multiple_of(1 << 20);
    let hearth = fixture::pool_of(args, flash.max(64 << 20))?;
    fixture::add(
        &hearth,
        "off",
        &format!("model-latency=8ms:{}", path(&off)),
        "off",
    )?;
    fixture::add(
        &hearth,
        "cached",
        &format!("model-latency=8ms:{}", path(&cached)),
        "write-back",
    )?;
    let (no_cache, with) = (
        fixture::contender(&hearth, "off", "no cache")?,
        fixture::contender(&hearth, "cached", "hearth")?,
    );
    let seconds = if args.smoke {
        1
    } else {
        args.seconds.max(SKEWED_SECONDS)
    };
    let job = Job {
        skewed: true,
        ..Job::random("randread", 24, seconds, size)
    };
    let mut spent = 0;
    let mut warm_up = |contender: &crate::peers::Contender| -> Result<u64> {
        let (mut last, mut seconds, mut seed) = (0.0, 0, 1000);
        while seconds < if args.smoke { 1 } else { WARM_UP_MAX } {
            seed += 1;
            let step = if args.smoke { 1 } else { WARM_UP_STEP };
            let iops = run(
                &Job {
                    seconds: step,
                    seed,
                    ..job.clone()
                },
                contender,
            )?
            .iops;
            seconds += step;
            if iops < last * WARM_GAIN && iops > 0.0 {
                break;
            }
            last = iops;
        }
        spent += seconds;
        Ok(seconds)
    };
    let hearth_warm_up = warm_up(&with)?;
    // The cache filter gets the same slow disk, and a cache as large as Hearth's flash.
    let nbdkit = peers::nbdkit_cache(&no_cache, &args.dir, Some(flash))?;
    let filter = nbdkit.contender();
    let filter_warm_up = warm_up(&filter)?;
    let before = (hearth.counter("cached", "read_hits")?, reads(&hearth)?);
    let mut outcome = rounds(args, &job, &[no_cache, with, filter], |_| Ok(()))?;
    let after = (hearth.counter("cached", "read_hits")?, reads(&hearth)?);
    outcome.compare_iops("hearth", "no cache", Wanted::AtLeast(4.0));
    outcome.compare_iops("nbdkit cache", "no cache", Wanted::Shown);
    outcome.notes.push(format!(
        "Disk {} MiB, flash file {} MiB, everything on it included. Hearth's hit ratio {:.1} %. Warm-up {hearth_warm_up} s (nbdkit's cache filter {filter_warm_up} s).",
        size >> 20,
        flash >> 20,
        (after.0 - before.0) as f64 * 100.0 / (after.1 - before.1).max(1) as f64
    ));
    Ok(outcome)
}

fn reads(hearth: &hearth_rig::Hearth) -> Result<u64> {
    let counter = |name| hearth.counter("cached", name);
    Ok(counter("read_hits")? + counter("read_partial_hits")? + counter("read_misses")?)
}

pub fn hdd(args: &Args) -> Result<Outcome> {
    let size = (args.disk / 2).max(64 << 20);
    let (off, cached) = (
        fixture::file(&args.dir, "skew-off.img", size)?,
        fixture::file(&args.dir, "skew.img", size)?,
    );
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let hearth = fixture::pool(args, size)?;
    fixture::add(&hearth, "off", &format!("model-hdd:{}", path(&off)), "off")?;
    fixture::add(
        &hearth,
        "warm",
        &format!("model-hdd:{}", path(&cached)),
        "write-back",
    )?;
    fixture::warm(&hearth, "warm", size)?;
    let contenders = [
        fixture::contender(&hearth, "off", "modelled disk")?,
        fixture::contender(&hearth, "warm", "hearth, warm")?,
    ];
    let mut all = Outcome::default();
    for depth in [1, 24] {
        let mut outcome = rounds(
            args,
            &Job::random("randread", depth, args.seconds, size),
            &contenders,
            |_| Ok(()),
        )?;
        outcome.compare_iops("hearth, warm", "modelled disk", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    all.notes
        .push("The hard disk is a model of a 7200 rpm desktop drive.".to_owned());
    Ok(all)
}
