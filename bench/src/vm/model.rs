//! The modelled hard disk on paper: what its arithmetic alone would give for a load.
//!
//! The model runs on any clock. Here it runs on a virtual one, so a row costs no time and knows
//! neither server nor machine: the distance between it and the same disk served in real time is
//! what the server, the timers and the noise of the machine cost.

use crate::load::{Job, Sample};
use anyhow::{Context, Result};
use hearth_io::model::{HddCommand, HddModel, HddParams};
use hearth_rig::rng::Rng;

/// Virtual seconds: long enough that a seed's luck does not show.
const SECONDS: u64 = 60;

/// The model's measures in words.
pub fn describe(size: u64) -> String {
    let p = HddParams::default();
    format!(
        "MODEL of a 7200 rpm desktop drive: rotation {:.2} ms, seek {:.1} to {:.0} ms, write settle {:.1} ms, {} MB/s, {} commands queued, write cache of {} runs, read-ahead {} MiB; each file of {} MiB is a whole drive of its own",
        p.rotation_ns as f64 / 1e6,
        p.settle_ns as f64 / 1e6,
        p.full_stroke_ns as f64 / 1e6,
        p.write_settle_ns as f64 / 1e6,
        p.rate / 1_000_000,
        p.queue,
        p.write_cache,
        p.readahead >> 20,
        size >> 20
    )
}

/// Runs `job`, a random one, against the model on virtual time.
pub fn run(job: &Job) -> Result<Sample> {
    let mut disk = HddModel::new(job.size, HddParams::default());
    let mut rng = Rng::new(job.seed);
    let places = (job.size / job.bs).max(1);
    let (end, depth) = (SECONDS * 1_000_000_000, job.depth as usize);
    let (mut now, mut in_flight, mut next, mut writes) = (0u64, 0, 0u64, 0);
    // When each command was asked for; flushes are commands, but no requests.
    let mut asked: Vec<Option<u64>> = Vec::new();
    let mut latencies: Vec<u64> = Vec::new();
    let mut finished = Vec::new();
    while now < end {
        while in_flight < depth {
            let flush = job.flush_every > 0 && writes >= job.flush_every;
            let offset = rng.below(places) * job.bs;
            let write = match job.rw {
                "randread" => false,
                "randwrite" => true,
                _ => rng.below(100) >= u64::from(job.reads),
            };
            let command = match (flush, write) {
                (true, _) => HddCommand::Flush,
                (_, true) => HddCommand::Write,
                _ => HddCommand::Read,
            };
            writes = match command {
                HddCommand::Flush => 0,
                HddCommand::Write => writes + 1,
                HddCommand::Read => writes,
            };
            asked.push((!flush).then_some(now));
            disk.submit(now, next, command, offset, job.bs);
            next += 1;
            in_flight += 1;
        }
        now = disk
            .next_event()
            .context("the modelled disk stands still")?;
        disk.advance(now, &mut finished);
        for id in finished.drain(..) {
            in_flight -= 1;
            latencies.extend(asked[id as usize].map(|then| now - then));
        }
    }
    let requests = latencies.len().max(1) as f64;
    latencies.sort_unstable();
    let p99 = latencies.get(latencies.len() * 99 / 100).copied();
    Ok(Sample {
        iops: requests * 1e9 / now as f64,
        mean_us: latencies.iter().sum::<u64>() as f64 / requests / 1e3,
        p99_us: p99.unwrap_or(0) as f64 / 1e3,
        server_us: None,
        client_busy: 0.0,
        requests,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_gives_what_it_is_calibrated_to() {
        let at = |rw, depth| run(&Job::random(rw, depth, 1, 256 << 20)).unwrap().iops;
        assert!((70.0..84.0).contains(&at("randread", 1)));
        assert!((155.0..185.0).contains(&at("randread", 24)));
        assert!((90.0..115.0).contains(&at("randwrite", 1)));
    }

    #[test]
    fn a_flush_after_every_write_takes_the_write_cache_away() {
        let job = Job::random("randwrite", 1, 1, 256 << 20);
        let without = run(&job).unwrap().iops;
        let flush_every = 1;
        let with = run(&Job { flush_every, ..job }).unwrap().iops;
        assert!(with < without * 0.9, "{with} {without}");
    }
}
