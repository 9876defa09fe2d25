//! A cache that is off or cold must not be in the way.

use super::rounds;
use crate::args::Args;
use crate::load::Job;
use crate::peers::Contender;
use crate::report::{Outcome, Wanted};
use crate::{fixture, peers};
use anyhow::Result;
use hearth_rig::Hearth;
use hearth_rig::daemon::path;

pub fn ssd(args: &Args) -> Result<Outcome> {
    measure(args, "", &[1, 4, 24, 64])
}

pub fn slow(args: &Args) -> Result<Outcome> {
    measure(args, "model-latency=8ms:", &[1, 24])
}

/// Every read is a first read: no block is asked for twice, and the disk is added anew, thus
/// cold, before each run.
fn measure(args: &Args, wrapper: &str, depths: &[u32]) -> Result<Outcome> {
    let (off, cold) = (
        fixture::file(&args.dir, "raw.img", args.disk)?,
        fixture::file(&args.dir, "origin.img", args.disk)?,
    );
    let third = fixture::file(&args.dir, "third.img", args.disk)?;
    let on_ssd = wrapper.is_empty();
    let qemu = if on_ssd {
        Some(peers::qemu_nbd(&third, &args.dir)?)
    } else {
        None
    };
    let mut contenders = qemu.iter().map(|q| q.contender()).collect::<Vec<_>>();
    if args.peers_only {
        let Some(origin) = contenders.first() else {
            return Ok(Outcome::default());
        };
        let nbdkit = peers::nbdkit_cache(origin, &args.dir, None)?;
        contenders.push(nbdkit.contender());
        return rounds(args, &once(args, 24), &contenders, |_| Ok(()));
    }
    let hearth = fixture::pool(args, args.disk)?;
    let cold = format!("{wrapper}{}", path(&cold));
    fixture::add(&hearth, "off", &format!("{wrapper}{}", path(&off)), "off")?;
    fixture::add(&hearth, "cold", &cold, "write-back")?;
    let off = fixture::contender(&hearth, "off", "off")?;
    contenders.extend([off.clone(), fixture::contender(&hearth, "cold", "cold")?]);
    let mut all = Outcome::default();
    for &depth in depths {
        // Fresh for every depth: what it has cached stays cached.
        let nbdkit = if depth == 24 {
            Some(peers::nbdkit_cache(&off, &args.dir, None)?)
        } else {
            None
        };
        let mut these = contenders.clone();
        these.extend(nbdkit.as_ref().map(|n| n.contender()));
        let mut outcome = rounds(args, &once(args, depth), &these, |c| {
            renew(&hearth, c, &cold)
        })?;
        if on_ssd {
            outcome.compare_iops("off", "qemu-nbd", Wanted::AtLeast(0.95));
            outcome.compare_iops("cold", "qemu-nbd", Wanted::AtLeast(0.95));
        }
        outcome.compare_iops("cold", "off", Wanted::AtLeast(0.95));
        outcome.compare_iops("nbdkit cache", "off", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    all.notes.push("Origin alone: qemu-nbd on a file of the same file system, and the same daemon with the cache off. nbdkit's cache filter is cold in its first round only.".to_owned());
    Ok(all)
}

fn once(args: &Args, depth: u32) -> Job {
    Job {
        once: true,
        ..Job::random("randread", depth, args.seconds, args.disk)
    }
}

fn renew(hearth: &Hearth, contender: &Contender, origin: &str) -> Result<()> {
    if contender.name != "cold" {
        return Ok(());
    }
    hearth.ok(&["disk", "remove", "cold", "--yes"])?;
    fixture::add(hearth, "cold", origin, "write-back")
}
