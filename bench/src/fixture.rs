//! Files and pools to measure on.
//!
//! Every file is written in full first: extents that were never written are slower to write and
//! faster to read than real ones, and would bend every number.

use crate::args::Args;
use crate::peers::{At, Contender};
use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::{path, write_random_unless};
use hearth_rig::nbd::{Client, Command};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a daemon is told for the flash alone to be measured: the origin gets so much while clients write.
pub const HELD_BACK: [&str; 2] = ["--destage-rate", "64K"];
/// Room a pool needs beside its data.
const POOL_SLACK: u64 = 256 << 20;
/// How long the engine may take to settle what it has admitted.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);
/// Bytes per prefetch when a cache is warmed, and how many of them in flight.
const WARM_PIECE: u32 = 256 << 10;
const WARM_DEPTH: usize = 8;
/// Bytes between two looks at whether the user has called it off: under a second of a hard disk.
const WARM_STRETCH: u64 = 64 << 20;

/// What readers besides Hearth read: its flash file, because two files on one disk may differ in
/// speed by half; a file of their own if Hearth is left out.
pub fn to_read(args: &Args, hearth: Option<&Hearth>) -> Result<PathBuf> {
    match hearth {
        Some(hearth) => Ok(hearth.flash().to_owned()),
        None => file(&args.dir, "raw.img", args.disk),
    }
}

/// A file of `size` random bytes, every extent written; reused if it is there already.
pub fn file(dir: &Path, name: &str, size: u64) -> Result<PathBuf> {
    file_unless(dir, name, size, &|| Ok(()))
}

/// The same, but gives up with the error of `stop`, which is asked now and then.
pub fn file_unless(
    dir: &Path,
    name: &str,
    size: u64,
    stop: &dyn Fn() -> Result<()>,
) -> Result<PathBuf> {
    let file = dir.join(name);
    let there = std::fs::metadata(&file).is_ok_and(|m| m.len() == size);
    if !there {
        write_random_unless(&file, size, 1, stop)?;
    }
    Ok(file)
}

/// A served pool with room for `capacity` bytes, on a flash file that was written in full.
pub fn pool(args: &Args, capacity: u64) -> Result<Hearth> {
    pool_served_with(args, capacity, &[])
}

/// The same, by a daemon with further options.
pub fn pool_served_with(args: &Args, capacity: u64, options: &[&str]) -> Result<Hearth> {
    let slack = if args.smoke { 64 << 20 } else { POOL_SLACK };
    let size = capacity + capacity / 8 + slack;
    made_unless(&args.hearth, &args.dir, size, options, &|| Ok(()))
}

/// A served pool on a flash file of exactly `size` bytes.
pub fn pool_of(args: &Args, size: u64) -> Result<Hearth> {
    pool_in(&args.hearth, &args.dir, size)
}

/// A pool served by the program `bin`, on a flash file of exactly `size` bytes below `dir`.
pub fn pool_in(bin: &Path, dir: &Path, size: u64) -> Result<Hearth> {
    pool_unless(bin, dir, size, &|| Ok(()))
}

/// The same, but gives up with the error of `stop`, which is asked now and then.
pub fn pool_unless(
    bin: &Path,
    dir: &Path,
    size: u64,
    stop: &dyn Fn() -> Result<()>,
) -> Result<Hearth> {
    made_unless(bin, dir, size, &[], stop)
}

fn made_unless(
    bin: &Path,
    dir: &Path,
    size: u64,
    options: &[&str],
    stop: &dyn Fn() -> Result<()>,
) -> Result<Hearth> {
    let mut hearth = Hearth::bare_in(bin.to_owned(), dir)?;
    hearth.bound = true;
    hearth.serve_args = options.iter().map(|word| (*word).to_owned()).collect();
    write_random_unless(hearth.flash(), size, 2, stop)?;
    hearth.ok(&["pool", "create", "--flash", path(hearth.flash()), "--force"])?;
    hearth.start()?;
    Ok(hearth)
}

/// A served pool on these devices or files, made with some options and served with others by a daemon that `wrap` starts
/// ([`Hearth::wrap`]).
pub fn pool_on(
    args: &Args,
    flash: &[&str],
    made: &[&str],
    served: &[&str],
    wrap: Vec<String>,
) -> Result<Hearth> {
    let mut hearth = Hearth::bare_in(args.hearth.clone(), &args.dir)?;
    let (first, others) = flash.split_first().context("no flash")?;
    let named = flash.iter().flat_map(|device| ["--flash", device]);
    let create = ["pool", "create", "--force"].into_iter().chain(named);
    let create: Vec<&str> = create.chain(made.iter().copied()).collect();
    hearth.ok(&create)?;
    hearth.bound = true;
    hearth.set_flash(first.into());
    let others = others.iter().flat_map(|device| ["--flash", device]);
    let words = others.chain(served.iter().copied());
    hearth.serve_args = words.map(str::to_owned).collect();
    hearth.wrap = wrap;
    hearth.start()?;
    Ok(hearth)
}

/// A disk of a served pool as a contender.
pub fn contender(hearth: &Hearth, disk: &str, name: &str) -> Result<Contender> {
    let pid = hearth.pid().context("the daemon is not running")?;
    Ok(Contender {
        name: name.to_owned(),
        at: At::Uri(hearth.uri(disk)),
        pid: Some(pid),
    })
}

/// Adds a disk that caches everything, sequential or not.
pub fn add(hearth: &Hearth, name: &str, origin: &str, mode: &str) -> Result<()> {
    let mut more = vec!["--mode", mode, "--seq-cutoff", "0"];
    if origin.starts_with("nbd") {
        // Its server is ours, for this run.
        more.push("--sole-user");
    }
    hearth.add(name, origin, &more).map(drop)
}

/// Brings the whole of a disk on to flash; the bytes cached.
pub fn warm(hearth: &Hearth, disk: &str, size: u64) -> Result<u64> {
    warm_unless(hearth, disk, size, &|| Ok(()))
}

/// The same, but gives up with the error of `stop`, which is asked now and then.
pub fn warm_unless(
    hearth: &Hearth,
    disk: &str,
    size: u64,
    stop: &dyn Fn() -> Result<()>,
) -> Result<u64> {
    let mut client = Client::connect(&hearth.socket(), disk)?;
    for at in (0..size).step_by(WARM_STRETCH as usize) {
        stop()?;
        let range = at..size.min(at + WARM_STRETCH);
        client.sweep(Command::Cache, range, WARM_PIECE, WARM_DEPTH, |_, _| {})?;
    }
    let deadline = Instant::now() + SETTLE_LIMIT;
    let mut last = 0;
    loop {
        stop()?;
        let cached = hearth.stats(disk)?["cached"]
            .as_u64()
            .context("no cached bytes in the statistics")?;
        if cached >= size {
            return Ok(cached);
        }
        // Fills may end after the prefetch is answered; once nothing grows any more it is what it is.
        ensure!(
            Instant::now() < deadline,
            "only {cached} of {size} bytes could be cached"
        );
        if cached == last {
            // Requests to cache are not heeded while eviction makes room.
            client.sweep(Command::Cache, 0..size, WARM_PIECE, WARM_DEPTH, |_, _| {})?;
        }
        last = cached;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Bytes the pool has written to flash since the daemon's start.
pub fn flash_written(hearth: &Hearth) -> Result<f64> {
    hearth.pool_stats()?["spans"][0]["counters"]["flash_write_bytes"]
        .as_f64()
        .context("no flash_write_bytes in the statistics")
}

/// Asks for the whole of a disk larger than its flash; the bytes cached once that changes no more.
pub fn fill(hearth: &Hearth, disk: &str, size: u64) -> Result<u64> {
    let mut client = Client::connect(&hearth.socket(), disk)?;
    let deadline = Instant::now() + SETTLE_LIMIT;
    let mut most = 0;
    loop {
        for at in (0..size).step_by(WARM_STRETCH as usize) {
            let range = at..size.min(at + WARM_STRETCH);
            client.sweep(Command::Cache, range, WARM_PIECE, WARM_DEPTH, |_, _| {})?;
        }
        let cached = hearth.stats(disk)?["cached"]
            .as_u64()
            .context("no cached bytes in the statistics")?;
        if cached <= most || Instant::now() >= deadline {
            return Ok(cached.max(most));
        }
        most = cached;
    }
}

/// Writes every dirty block to the origin, so that one contender's leftovers are not another's load.
pub fn drain(hearth: &Hearth, disk: &str) -> Result<()> {
    hearth.ok(&["disk", "flush", disk]).map(drop)
}

/// Frees a file that is not needed by other rows.
pub fn remove(file: &Path) {
    let _ = std::fs::remove_file(file);
}
