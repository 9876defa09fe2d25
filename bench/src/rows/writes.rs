//! Writes: write-back against servers that write the flash file itself, write-through against
//! the origin alone.
//!
//! After each run of Hearth what is dirty is destaged, untimed, before the next contender runs:
//! a run shows a burst that fits the cache, which is what a write-back cache is for.

use super::rounds;
use crate::args::Args;
use crate::load::Job;
use crate::peers::Contender;
use crate::report::{Outcome, Wanted};
use crate::{fixture, peers};
use anyhow::Result;
use hearth_rig::Hearth;
use hearth_rig::daemon::path;

pub fn qd24(args: &Args) -> Result<Outcome> {
    let mut outcome = write_back(
        args,
        &Job::random("randwrite", 24, args.seconds, args.disk),
        false,
    )?;
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::AtLeast(1.5));
    outcome.compare_iops("hearth", "raw", Wanted::Shown);
    outcome.compare_cpu("hearth", "qemu-nbd", Wanted::Shown);
    Ok(outcome)
}

/// Beside the bare loop, on one file; with and without what the destager writes to an origin on the same device.
pub fn sequential(args: &Args) -> Result<Outcome> {
    let job = Job::sequential("write", 16, args.seconds, args.disk);
    let file = fixture::file(&args.dir, "raw.img", args.disk)?;
    let qemu = peers::qemu_nbd(&file, &args.dir)?;
    let bare = peers::bare(&file, &args.dir)?;
    let mut contenders = vec![peers::raw(&file), qemu.contender(), bare.contender()];
    if args.peers_only {
        return rounds(args, &job, &contenders, |_| Ok(()));
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    let size = args.disk * 2;
    let held = fixture::pool_served_with(args, size, &fixture::HELD_BACK)?;
    fixture::add(&held, "back", path(&origin), "write-back")?;
    contenders.push(fixture::contender(&held, "back", "hearth, held back")?);
    let other = fixture::file(&args.dir, "third.img", args.disk)?;
    let hearth = fixture::pool(args, size)?;
    fixture::add(&hearth, "back", path(&other), "write-back")?;
    contenders.push(fixture::contender(&hearth, "back", "hearth")?);
    let mut outcome = rounds(args, &job, &contenders, |c| match c.name.as_str() {
        "hearth" => fixture::drain(&hearth, "back"),
        "hearth, held back" => fixture::drain(&held, "back"),
        _ => Ok(()),
    })?;
    outcome.compare_iops("hearth, held back", "bare loop", Wanted::AtLeast(0.9));
    outcome.compare_cpu("hearth, held back", "bare loop", Wanted::AtMost(1.3));
    outcome.compare_iops("hearth", "bare loop", Wanted::Shown);
    outcome.compare_iops("bare loop", "raw", Wanted::Shown);
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.8));
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::Shown);
    outcome.compare_iops("qemu-nbd", "raw", Wanted::Shown);
    amplification_note(&held, &mut outcome)?;
    outcome.notes.push(format!(
        "\"Held back\" gives the origin {} a second while clients write (`--destage-rate`): the flash alone.",
        fixture::HELD_BACK[1]
    ));
    Ok(outcome)
}

pub fn flush_qd1(args: &Args) -> Result<Outcome> {
    let job = Job {
        flush_every: 32,
        ..Job::random("randwrite", 1, args.seconds, args.disk)
    };
    let mut outcome = write_back(args, &job, true)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.7));
    outcome.compare_iops("hearth", "modelled disk", Wanted::AtLeast(100.0));
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::Shown);
    Ok(outcome)
}

pub fn flush_qd24(args: &Args) -> Result<Outcome> {
    let job = Job {
        flush_every: 32,
        ..Job::random("randwrite", 24, args.seconds, args.disk)
    };
    let mut outcome = write_back(args, &job, true)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.7));
    outcome.compare_iops("hearth", "modelled disk", Wanted::Shown);
    outcome.compare_iops("hearth", "qemu-nbd", Wanted::Shown);
    Ok(outcome)
}

/// Peers write the raw file, Hearth its flash; with `modelled`, the modelled disk uncached, too.
fn write_back(args: &Args, job: &Job, modelled: bool) -> Result<Outcome> {
    let file = fixture::file(&args.dir, "raw.img", args.disk)?;
    let qemu = peers::qemu_nbd(&file, &args.dir)?;
    let mut contenders = vec![peers::raw(&file), qemu.contender()];
    if args.peers_only {
        return rounds(args, job, &contenders, |_| Ok(()));
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    // Twice the disk: the log takes a burst of overwrites without waiting for the destager.
    let hearth = fixture::pool(args, args.disk * 2)?;
    fixture::add(&hearth, "back", path(&origin), "write-back")?;
    contenders.push(fixture::contender(&hearth, "back", "hearth")?);
    if modelled {
        let hdd = fixture::file(&args.dir, "hdd.img", args.disk)?;
        fixture::add(&hearth, "hdd", &format!("model-hdd:{}", path(&hdd)), "off")?;
        contenders.push(fixture::contender(&hearth, "hdd", "modelled disk")?);
    }
    let mut outcome = rounds(args, job, &contenders, |c| drain(&hearth, c, "back"))?;
    amplification_note(&hearth, &mut outcome)?;
    Ok(outcome)
}

pub fn through_qd1(args: &Args) -> Result<Outcome> {
    write_through(args, 1, "")
}

pub fn through_qd24(args: &Args) -> Result<Outcome> {
    write_through(args, 24, "")
}

pub fn through_hdd(args: &Args) -> Result<Outcome> {
    write_through(args, 24, "model-hdd:")
}

fn write_through(args: &Args, depth: u32, wrapper: &str) -> Result<Outcome> {
    let seconds = if wrapper.is_empty() {
        args.seconds
    } else {
        args.seconds * 2
    };
    let job = Job::random("randwrite", depth, seconds, args.disk);
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    let hearth = fixture::pool(args, args.disk)?;
    // One disk in turn with and without cache: two files on one device may differ in speed by half.
    let disk = "through";
    fixture::add(&hearth, disk, &format!("{wrapper}{}", path(&origin)), "off")?;
    let mut contenders = vec![
        fixture::contender(&hearth, disk, "origin alone")?,
        fixture::contender(&hearth, disk, "write-through")?,
    ];
    // The same file by somebody else's hand, so that a slow pass-through would show.
    let other = fixture::file(&args.dir, "third.img", args.disk)?;
    let qemu = if wrapper.is_empty() {
        Some(peers::qemu_nbd(&other, &args.dir)?)
    } else {
        None
    };
    contenders.extend(qemu.as_ref().map(|q| q.contender()));
    let set = |mode| hearth.ok(&["disk", "set", disk, "--mode", mode]).map(drop);
    let mut outcome = rounds(args, &job, &contenders, |c| match c.name.as_str() {
        "origin alone" => set("write-through"),
        "write-through" => {
            fixture::drain(&hearth, disk)?;
            set("off")
        }
        _ => Ok(()),
    })?;
    outcome.compare_iops("write-through", "origin alone", Wanted::AtLeast(0.95));
    outcome.compare_iops("write-through", "qemu-nbd", Wanted::Shown);
    outcome
        .notes
        .push("\"Origin alone\" is the same daemon with the cache off.".to_owned());
    Ok(outcome)
}

fn drain(hearth: &Hearth, contender: &Contender, disk: &str) -> Result<()> {
    if contender.name == "hearth" {
        fixture::drain(hearth, disk)
    } else {
        Ok(())
    }
}

fn amplification_note(hearth: &Hearth, outcome: &mut Outcome) -> Result<()> {
    let pool = hearth.pool_stats()?;
    let total = &pool["spans"][0];
    if let Some(wa) = total["write_amplification"].as_f64() {
        let again = total["counters"]["flash_reinsert_bytes"]
            .as_u64()
            .unwrap_or(0);
        outcome.notes.push(format!(
            "Flash write amplification {wa:.3}, {} MiB written again.",
            again >> 20
        ));
    }
    Ok(())
}
