//! What a cached block costs: time to find it and to decide about it, and RAM.
//!
//! The index and the policy of a pool of a size that no bench machine's disk has, filled and
//! asked for 4 KiB blocks that are there, in an order skewed as guests' are, on one core.

use crate::args::Args;
use crate::report::{Comparison, Outcome, Wanted};
use crate::rows::cpu_ns;
use anyhow::{Context, Result};
use hearth_engine::index::{Index, Key};
use hearth_policy::{Config, Policy, Use, spread};
use std::hint::black_box;

/// Lookups timed.
const LOOKUPS: u64 = 4_000_000;
/// Blocks of each disk: 16 GiB.
const PER_DISK: u64 = 4 << 20;
/// Bytes of RAM wanted for each cached block, index and policy together.
const RAM_GOAL: f64 = 20.0;

fn available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))
        .context("no MemAvailable in /proc/meminfo")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}

fn key(n: u64) -> Key {
    // Every second block of its disk, so that neighbours are not all there.
    Key::new((n / PER_DISK + 1) as u16, n % PER_DISK * 2)
}

/// Asks for `LOOKUPS` blocks that are there; nanoseconds for each. 80 % go to 20 % of them.
fn timed(blocks: u64, mut ask: impl FnMut(u64)) -> f64 {
    let mut state = 1u64;
    let start = cpu_ns();
    for _ in 0..LOOKUPS {
        state = spread(state);
        let range = if state % 5 == 0 { blocks } else { blocks / 5 };
        ask(((u128::from(state) * u128::from(range)) >> 64) as u64);
    }
    (cpu_ns() - start) as f64 / LOOKUPS as f64
}

pub fn run(args: &Args) -> Result<Outcome> {
    let mut all = Outcome::default();
    if args.peers_only {
        return Ok(all);
    }
    let sizes: &[u64] = if args.smoke { &[1] } else { &[1, 16, 128] };
    for millions in sizes {
        let blocks = millions * 1_000_000;
        let need = Index::footprint(blocks as u32) * 3 / 2;
        if need * 2 > available()? {
            all.notes.push(format!(
                "{millions} million blocks left out: they need {} MiB of RAM, and there is less than twice that.",
                need >> 20
            ));
            continue;
        }
        let mut index = Index::new(blocks as u32, 7);
        for n in 0..blocks {
            index.set(key(n), n as u32, n as u32, false, 0);
        }
        let mut policy = Policy::new(Config::of(blocks as usize));
        let none = timed(blocks, |n| {
            black_box(n);
        });
        let find = timed(blocks, |n| {
            if let Some(slot) = index.get(key(n)) {
                black_box(index.crc(slot));
                index.touch(slot);
            }
        });
        let mut ahead = Vec::new();
        let mut decide = |n: u64| {
            policy.read(n * 2, 1, &mut ahead);
            ahead.clear();
            policy.used(n * 2, false, Use::Hit);
        };
        // Histories and miniatures fill up first: an empty policy has nothing to look up.
        timed(blocks, &mut decide);
        let decided = timed(blocks, &mut decide);
        let (find, decided) = (find - none, decided - none);
        let index_ram = Index::footprint(blocks as u32) as f64 / blocks as f64;
        let policy_ram = policy.footprint() as f64 / blocks as f64;
        let mut tell = |what: &str, value: f64, unit: &'static str, wanted: Wanted| {
            let what = format!("{millions} million blocks: {what}");
            all.comparisons
                .push(Comparison::single(what, value, unit, wanted));
        };
        tell("lookup", find, "ns", Wanted::Shown);
        tell("policy", decided, "ns", Wanted::Shown);
        tell("both", find + decided, "ns", Wanted::Shown);
        tell(
            "RAM of index and policy for a block",
            index_ram + policy_ram,
            "bytes",
            Wanted::AtMost(RAM_GOAL),
        );
        tell("RAM of the index alone", index_ram, "bytes", Wanted::Shown);
    }
    all.notes.push(
        "CPU time on one core, random blocks that are cached (80 % of them in 20 % of the cache): nearly every lookup misses the processor's caches. Lookup finds the slot, reads its checksum and counts the use; policy notes the request for prefetch and the block in the sketch and the miniatures.".to_owned(),
    );
    Ok(all)
}
