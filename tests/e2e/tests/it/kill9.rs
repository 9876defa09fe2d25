//! kill -9 under a verified write load.
//!
//! A client writes blocks that say which version they are, many in flight, flushes now and then
//! and notes what a flush covered. The daemon is killed at a random moment. After the restart
//! every block must hold, whole, the version of the last acknowledged flush or a later one that
//! was written, and keep giving the same answer. `CYCLES` says how often; `SEED` repeats a run.

use anyhow::{Context, Result};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::pattern::BLOCK;
use hearth_rig::wait;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A cycle's load lasts between these, in milliseconds.
const LOAD_MS: (u64, u64) = (30, 600);

#[test]
fn write_back() -> Result<()> {
    cycles("write-back", "", cycles_wanted())
}

#[test]
fn write_through() -> Result<()> {
    cycles("write-through", "", cycles_wanted())
}

#[test]
fn write_around() -> Result<()> {
    cycles("write-around", "", cycles_wanted())
}

/// A slow origin keeps much dirty data on flash and destaging under way at the kill.
#[test]
fn write_back_slow_origin() -> Result<()> {
    cycles(
        "write-back",
        "model-latency=2ms:",
        cycles_wanted().div_ceil(2),
    )
}

/// The disk takes most of the pool, and every kill comes after segments were freed in this life: what
/// still lived in them is being moved.
#[test]
fn while_the_log_is_cleaned_in_write_back() -> Result<()> {
    while_the_log_is_cleaned("write-back")
}

#[test]
fn while_the_log_is_cleaned_in_write_through() -> Result<()> {
    while_the_log_is_cleaned("write-through")
}

/// Segments freed before a kill, at most.
const FREED_MAX: u64 = 8;
const LIMIT: Duration = Duration::from_secs(120);

fn while_the_log_is_cleaned(mode: &str) -> Result<()> {
    let seed = seed();
    let count = cycles_wanted();
    println!("kill -9 while the log is cleaned, {mode}: {count} cycles, SEED={seed}");
    let mut hearth = Hearth::serving("96M")?;
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![0u8; BLOCKS as usize * BLOCK])?;
    hearth.add("d", path(&origin), &["--mode", mode])?;
    let mut writer = Writer::new(seed);
    for cycle in 0..count {
        let about = || format!("{mode}, cycle {cycle}, SEED={seed}");
        let mut client = hearth.connect("d")?;
        let wanted = 1 + writer.below(FREED_MAX);
        let (api, done) = (hearth.api(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let freed = scope.spawn(|| {
                let freed = wait::until("segments are freed", LIMIT, || {
                    let stats = api.get("/v1/stats").ok()?;
                    let freed = stats["pool"]["spans"][0]["counters"]["segments_freed"].as_u64()?;
                    (freed >= wanted).then_some(())
                });
                done.store(true, Relaxed);
                freed
            });
            writer.load_while(&mut client, || !done.load(Relaxed), || hearth.kill9())?;
            freed.join().expect("it does not panic")
        })
        .with_context(about)
        .with_context(|| hearth.log())?;
        hearth.start().with_context(about)?;
        let mut client = hearth.connect("d").with_context(about)?;
        writer.check(&mut client).with_context(about)?;
        writer.check_stable(&mut client).with_context(about)?;
    }
    hearth.ok(&["disk", "flush", "d"])?;
    writer
        .check_file(&origin)
        .with_context(|| format!("SEED={seed}"))
}

/// Flash has the only copy, and the log is cleaned around it. There is no origin that could be compared.
#[test]
fn flash_only() -> Result<()> {
    let seed = seed();
    let count = cycles_wanted();
    println!("kill -9, on flash alone: {count} cycles, SEED={seed}");
    // Twice and some more: half of what a pool holds may be promised.
    let mut hearth = Hearth::serving("224M")?;
    let bytes = (BLOCKS as usize * BLOCK).to_string();
    hearth.ok(&["disk", "add", "d", "--flash-only", &bytes])?;
    let mut writer = Writer::new(seed);
    writer.survive(&mut hearth, "d", count, LOAD_MS, &|cycle| {
        format!("on flash alone, cycle {cycle}, SEED={seed}")
    })
}

fn seed() -> u64 {
    number("SEED").unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64)
    })
}

fn cycles_wanted() -> u64 {
    number("CYCLES").unwrap_or(5)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn cycles(mode: &str, wrapper: &str, count: u64) -> Result<()> {
    let seed = seed();
    println!("kill -9, {mode} {wrapper}: {count} cycles, SEED={seed}");
    let mut hearth = Hearth::serving("160M")?;
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![0u8; BLOCKS as usize * BLOCK])?;
    hearth.add(
        "d",
        &format!("{wrapper}{}", path(&origin)),
        &["--mode", mode],
    )?;
    // A flash of twice the disk's size, so that segments are freed and reused.
    let mut writer = Writer::new(seed);
    writer.survive(&mut hearth, "d", count, LOAD_MS, &|cycle| {
        format!("{mode} {wrapper}, cycle {cycle}, SEED={seed}")
    })?;
    // What is left must reach the origin, and be the same there.
    hearth.ok(&["disk", "flush", "d"])?;
    writer
        .check_file(&origin)
        .with_context(|| format!("SEED={seed}"))
}
