//! A datastore's files over NFS beside a disk of the same daemon over NBD, by one client.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::nbd;

use crate::args::Args;
use crate::fixture;
use crate::load::Job;
use crate::nfs::{Client, Durable, Wire, run};
use crate::report::{Outcome, Series, Wanted};

/// Bytes of a write by which a disk is brought into the cache. They come in no order: what is written in sequence may
/// go past the cache.
const PIECE: u64 = 64 << 10;
const PIECES_IN_FLIGHT: usize = 8;

/// A daemon with a disk and with a datastore of one file.
struct Lab {
    hearth: Hearth,
    server: SocketAddr,
}

impl Lab {
    fn new(args: &Args) -> Result<Lab> {
        let state = args.dir.join("state");
        let options = ["--state-dir", path(&state)];
        let hearth = fixture::pool_served_with(args, args.disk * 4, &options)?;
        let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
        fixture::add(&hearth, "disk", path(&origin), "write-back")?;
        let vms = args.dir.join("vms");
        std::fs::create_dir_all(&vms)?;
        fixture::file(&vms, "disk.img", args.disk)?;
        hearth.ok(&[
            "datastore",
            "add",
            path(&vms),
            "--nfs",
            "--listen",
            "127.0.0.1:0",
            "--client",
            "127.0.0.1=rw,root",
        ])?;
        let shown = hearth.ok(&["datastore", "show", "vms", "--json"])?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let server = shown["listen"].as_str().context("an address")?.parse()?;
        Ok(Lab { hearth, server })
    }

    fn nbd(&self, durable: Durable) -> Result<Wire> {
        let client = nbd::Client::connect(&self.hearth.socket(), "disk")?;
        Ok(Wire::Nbd(client, durable))
    }

    fn nfs(&self) -> Result<Wire> {
        Ok(Wire::Nfs(Client::connect(self.server, "/vms", "disk.img")?))
    }

    /// Brings all of a disk into the cache, and writes it back.
    fn warm(&self, wire: &mut Wire, size: u64) -> Result<()> {
        let data = vec![0x5a; PIECE as usize];
        let pieces = size / PIECE;
        let mut flying = 0;
        for n in 0..pieces {
            // Odd, so that every piece comes once, and far from its neighbours.
            let at = n.wrapping_mul(0x9e37_79b1) % pieces.next_power_of_two();
            if at < pieces {
                wire.write(at * PIECE, &data)?;
                flying += 1;
            }
            if flying == PIECES_IN_FLIGHT {
                wire.receive()?;
                flying -= 1;
            }
        }
        for _ in 0..flying {
            wire.receive()?;
        }
        self.drain()
    }

    fn drain(&self) -> Result<()> {
        self.hearth.ok(&["disk", "flush", "disk"])?;
        self.hearth.ok(&["datastore", "flush", "vms"])?;
        Ok(())
    }

    /// Runs `job` over every wire in turn, round by round.
    fn rounds(&self, args: &Args, job: &Job, wires: &mut [(&str, Wire)]) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let pid = self.hearth.pid().context("no daemon")?;
        for (name, _) in wires.iter() {
            outcome.series.push(Series {
                name: (*name).to_owned(),
                samples: Vec::new(),
            });
        }
        for round in 0..args.rounds {
            for ((name, wire), series) in wires.iter_mut().zip(&mut outcome.series) {
                let seed = round as u64 + 1;
                let job = Job {
                    seed,
                    ..job.clone()
                };
                let sample = run(&job, wire, pid)?;
                eprintln!("   round {seed}: {name:16} {:9.0} requests/s", sample.iops);
                series.samples.push(sample);
                if job.rw != "randread" {
                    self.drain()?;
                }
            }
        }
        Ok(outcome)
    }
}

/// Warm reads, one at a time and many.
pub fn reads(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let lab = Lab::new(args)?;
    let mut wires = [("nbd", lab.nbd(Durable::Itself)?), ("nfs", lab.nfs()?)];
    for (_, wire) in &mut wires {
        lab.warm(wire, args.disk)?;
    }
    let mut all = Outcome::default();
    let from_flash = || -> Result<f64> {
        let counters = &lab.hearth.pool_stats()?["spans"][0]["counters"];
        let bytes = counters["flash_read_bytes"].as_f64();
        bytes.context("no bytes read in the statistics")
    };
    let before = from_flash()?;
    for depth in [1, 32] {
        let job = Job::random("randread", depth, args.seconds, args.disk);
        let mut outcome = lab.rounds(args, &job, &mut wires)?;
        outcome.compare_iops("nfs", "nbd", Wanted::AtLeast(0.6));
        outcome.compare_cpu("nfs", "nbd", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    let requests = all.series.iter().flat_map(|s| &s.samples);
    let asked: f64 = requests.map(|s| s.requests * 4096.0).sum();
    all.notes.push(format!(
        "{:.1} % of what was read came from flash.",
        (from_flash()? - before) / asked * 100.0
    ));
    Ok(all)
}

/// Durable writes, one at a time and many.
pub fn writes(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let lab = Lab::new(args)?;
    let mut wires = [
        ("nbd, flushed", lab.nbd(Durable::ByFlush)?),
        ("nbd, FUA", lab.nbd(Durable::Itself)?),
        ("nfs", lab.nfs()?),
    ];
    let mut all = Outcome::default();
    for (depth, wanted) in [(1, Wanted::AtLeast(0.7)), (32, Wanted::Shown)] {
        let job = Job::random("randwrite", depth, args.seconds, args.disk);
        let mut outcome = lab.rounds(args, &job, &mut wires)?;
        outcome.compare_iops("nfs", "nbd, flushed", wanted);
        outcome.compare_iops("nfs", "nbd, FUA", Wanted::Shown);
        outcome.compare_cpu("nfs", "nbd, FUA", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    Ok(all)
}
