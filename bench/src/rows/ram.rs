//! What a cached block costs in RAM, everything included, once the flash is full.

use crate::args::Args;
use crate::fixture;
use crate::report::{Comparison, Outcome, Wanted};
use anyhow::{Context, Result};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::process::settled;

const GIB: u64 = 1 << 30;

pub fn four(args: &Args) -> Result<Outcome> {
    ram(args, 4 * GIB)
}

pub fn sixteen(args: &Args) -> Result<Outcome> {
    if !args.large {
        let notes = vec!["Left out; --large measures it.".to_owned()];
        return Ok(Outcome {
            notes,
            ..Outcome::default()
        });
    }
    ram(args, 16 * GIB)
}

/// Fills a pool of `size` bytes from a larger disk.
fn ram(args: &Args, size: u64) -> Result<Outcome> {
    let size = if args.smoke { 64 << 20 } else { size };
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "ram.img", size + size / 8)?;
    let mut hearth = fixture::pool_of(args, size)?;
    let pid = |hearth: &Hearth| hearth.pid().context("no daemon");
    let empty = settled(pid(&hearth)?)?;
    fixture::add(&hearth, "warm", path(&origin), "write-back")?;
    let blocks = fixture::fill(&hearth, "warm", size + size / 8)? / 4096;
    let full = settled(pid(&hearth)?)?;
    let reported = hearth.pool_stats()?["ram"].as_u64().unwrap_or(0);
    hearth.stop()?;
    hearth.start()?;
    let reopened = settled(pid(&hearth)?)?;

    // The program's own pages are shared with the file and can be dropped by the system; beside
    // a cache of a few GiB they would hide what a block costs.
    let rows = [
        (
            "memory of the full daemon that belongs to no file",
            full.anonymous,
            Wanted::AtMost(20.0),
        ),
        (
            "the same after a restart",
            reopened.anonymous,
            Wanted::AtMost(20.0),
        ),
        (
            "all resident memory of the full daemon, program included",
            full.all,
            Wanted::AtMost(20.0),
        ),
        (
            "index and policy as the daemon reports them",
            reported,
            Wanted::Shown,
        ),
    ];
    let mut outcome = Outcome::default();
    for (what, bytes, wanted) in rows {
        outcome.comparisons.push(Comparison::single(
            format!("{what}, bytes per cached 4 KiB block"),
            bytes as f64 / blocks.max(1) as f64,
            "bytes",
            wanted,
        ));
    }
    outcome.notes.push(format!(
        "{} MiB cached on {} MiB of flash; resident {} KiB empty ({} KiB of it in files), {} KiB full.",
        (blocks * 4096) >> 20,
        size >> 20,
        empty.all >> 10,
        (empty.all - empty.anonymous) >> 10,
        full.all >> 10,
    ));
    drop(hearth);
    fixture::remove(&origin);
    Ok(outcome)
}
