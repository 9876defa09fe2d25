//! Disks that live on flash beside one that is cached there: the same reads, and durable writes with and without what a crash would leave.

use super::rounds;
use crate::args::Args;
use crate::fixture;
use crate::load::Job;
use crate::report::{Outcome, Wanted};
use anyhow::Result;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;

const CACHED: &str = "cached";
const ON_FLASH: &str = "flash-only";
const SCRATCH: &str = "scratch";
const PIECE: u64 = 1 << 20;

pub fn flash_only(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let size = (args.disk / 4).max(64 << 20).next_multiple_of(PIECE);
    // What lives on flash is half of a pool at most.
    let hearth = fixture::pool_served_with(args, 6 * size, &fixture::HELD_BACK)?;
    let origin = fixture::file(&args.dir, "homes-origin.img", size)?;
    fixture::add(&hearth, CACHED, path(&origin), "write-back")?;
    let bytes = size.to_string();
    hearth.ok(&["disk", "add", ON_FLASH, "--flash-only", &bytes])?;
    hearth.ok(&["disk", "add", SCRATCH, "--flash-only", &bytes, "--scratch"])?;
    let mut piece = vec![0; PIECE as usize];
    hearth_rig::rng::Rng::new(7).fill(&mut piece);
    let mut contenders = Vec::new();
    for disk in [CACHED, ON_FLASH, SCRATCH] {
        let mut client = Client::connect(&hearth.socket(), disk)?;
        for at in (0..size).step_by(PIECE as usize) {
            client.write(at, &piece)?;
        }
        client.flush()?;
        contenders.push(fixture::contender(&hearth, disk, disk)?);
    }
    let drained = || fixture::drain(&hearth, CACHED);
    drained()?;
    let mut all = Outcome::default();
    for (what, depth) in [
        ("warm random 4 KiB reads, depth 1", 1),
        ("warm random 4 KiB reads, depth 24", 24),
    ] {
        let job = Job::random("randread", depth, args.seconds, size);
        let mut outcome = rounds(args, &job, &contenders, |_| Ok(()))?;
        outcome.compare_iops(ON_FLASH, CACHED, Wanted::AtLeast(0.95));
        outcome.compare_iops(SCRATCH, CACHED, Wanted::AtLeast(0.95));
        all.part(what, outcome);
    }
    let job = Job {
        flush_every: 1,
        ..Job::random("randwrite", 1, args.seconds, size)
    };
    let mut outcome = rounds(args, &job, &contenders, |_| drained())?;
    outcome.compare_iops(ON_FLASH, CACHED, Wanted::AtLeast(0.95));
    outcome.compare_iops(SCRATCH, ON_FLASH, Wanted::AtLeast(1.0));
    all.part("random 4 KiB writes with a flush each", outcome);
    all.notes.push(format!(
        "Disks of {} MiB. A scratch disk is not flushed: a crash drops what is on it.",
        size >> 20
    ));
    drop(hearth);
    fixture::remove(&origin);
    Ok(all)
}
