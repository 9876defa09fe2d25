//! What the order of flushes costs: a guest that flushes often, on a disk that is ordered and on one that is not. The hard
//! disk is a model, and labelled so.

use crate::args::Args;
use crate::fixture;
use crate::report::{Comparison, Outcome, Wanted};
use anyhow::Result;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use std::fs::File;
use std::time::{Duration, Instant};

/// What the guest flushes a second, if it can.
const FLUSHES: u32 = 100;
/// Blocks it writes for each: one of them the same every time, as a journal's head is.
const BLOCKS: u64 = 4;
/// How much of the other disk's it has to reach.
const GOAL: f64 = 0.8;

/// Flushes a second of a guest that does nothing else.
fn flushes(client: &mut Client, size: u64, seconds: u64) -> Result<f64> {
    let (begun, mut done, mut at) = (Instant::now(), 0u32, 1u64);
    let time = Duration::from_secs(seconds);
    while begun.elapsed() < time {
        client.write(0, &[1; 4096])?;
        for _ in 1..BLOCKS {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            client.write((at >> 16) % (size / 4096) * 4096, &[2; 4096])?;
        }
        client.flush()?;
        done += 1;
        let due = Duration::from_secs(1) / FLUSHES * done;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

pub fn ordered(args: &Args) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if args.peers_only {
        return Ok(outcome);
    }
    let size = 256 << 20;
    let mut ratios = Vec::new();
    for _ in 0..args.rounds {
        let mut rates = Vec::new();
        for mode in ["write-back", "write-back-ordered"] {
            let file = args.dir.join("ordered.img");
            File::create(&file)?.set_len(size)?;
            let hearth = fixture::pool(args, size)?;
            fixture::add(&hearth, "d", &format!("model-hdd:{}", path(&file)), mode)?;
            let mut client = Client::connect(&hearth.socket(), "d")?;
            rates.push(flushes(&mut client, size, args.seconds)?);
        }
        outcome.notes.push(format!(
            "{:.1} flushes a second in write-back, {:.1} in order",
            rates[0], rates[1]
        ));
        ratios.push(rates[1] / rates[0].max(f64::EPSILON));
    }
    outcome.comparisons.push(Comparison {
        what: "write-back-ordered / write-back".to_owned(),
        values: ratios,
        unit: String::new(),
        wanted: Wanted::AtLeast(GOAL),
    });
    outcome.notes.push(format!(
        "A guest that writes {BLOCKS} blocks and flushes, {FLUSHES} times a second if it can, for {} s; the hard disk is a model.",
        args.seconds
    ));
    Ok(outcome)
}
