//! An origin behind an NBD server, beside the same disk as a file: what the way to it costs on a
//! miss, and that it costs nothing on a hit.

use super::rounds;
use crate::args::Args;
use crate::load::Job;
use crate::peers::{At, Contender};
use crate::report::{Outcome, Wanted};
use crate::{fixture, peers};
use anyhow::{Result, bail};
use hearth_rig::daemon::path;

const DEPTHS: [u32; 2] = [1, 24];

/// A disk of the daemon and where its blocks really are.
struct Disk {
    name: &'static str,
    origin: String,
}

pub fn nbd(args: &Args) -> Result<Outcome> {
    let file = fixture::file(&args.dir, "origin.img", args.disk)?;
    let served = fixture::file(&args.dir, "third.img", args.disk)?;
    let qemu = peers::qemu_nbd(&served, &args.dir)?;
    let server = qemu.contender();
    if args.peers_only {
        return rounds(args, &once(args, 24), &[server], |_| Ok(()));
    }
    let At::Uri(uri) = server.at.clone() else {
        bail!("qemu-nbd has no address")
    };
    let disks = [
        Disk {
            name: "file",
            origin: path(&file).to_owned(),
        },
        Disk {
            name: "nbd",
            origin: uri,
        },
    ];
    let hearth = fixture::pool(args, 2 * args.disk)?;
    for disk in &disks {
        fixture::add(&hearth, disk.name, &disk.origin, "write-back")?;
    }
    let contenders = |state: &str| -> Result<Vec<Contender>> {
        disks
            .iter()
            .map(|d| fixture::contender(&hearth, d.name, &name(state, d)))
            .collect()
    };
    let mut all = Outcome::default();
    for depth in DEPTHS {
        let mut these = vec![server.clone()];
        these.extend(contenders("cold")?);
        let mut outcome = rounds(args, &once(args, depth), &these, |c| {
            // Cold again, for the next round.
            let cached = disks.iter().find(|d| c.name == name("cold", d));
            if let Some(disk) = cached {
                hearth.ok(&["disk", "remove", disk.name, "--yes"])?;
                fixture::add(&hearth, disk.name, &disk.origin, "write-back")?;
            }
            Ok(())
        })?;
        outcome.compare_iops("cold, nbd origin", "cold, file origin", Wanted::Shown);
        outcome.compare_iops("cold, nbd origin", &server.name, Wanted::Shown);
        outcome.compare_cpu("cold, nbd origin", "cold, file origin", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    for disk in &disks {
        fixture::warm(&hearth, disk.name, args.disk)?;
    }
    for depth in DEPTHS {
        let job = Job::random("randread", depth, args.seconds, args.disk);
        let mut outcome = rounds(args, &job, &contenders("warm")?, |_| Ok(()))?;
        outcome.compare_iops("warm, nbd origin", "warm, file origin", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    all.notes.push(
        "The NBD origin is qemu-nbd over a unix socket on a file of the same file system; its own CPU is not in Hearth's.".to_owned(),
    );
    Ok(all)
}

fn name(state: &str, disk: &Disk) -> String {
    format!("{state}, {} origin", disk.name)
}

fn once(args: &Args, depth: u32) -> Job {
    Job {
        once: true,
        ..Job::random("randread", depth, args.seconds, args.disk)
    }
}
