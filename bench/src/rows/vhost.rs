//! The same loop, over libblkio, on a bare file and on two vhost-user exports.
//!
//! fio has no vhost-user engine here, so all contenders of these rows are driven by libblkio:
//! the file by its io_uring driver, the sockets by its virtio-blk-vhost-user driver. One thread,
//! one queue, sleeping on the call like a guest.

use crate::args::Args;
use crate::load::{Job, by_libblkio};
use crate::peers::{At, Contender};
use crate::report::{Comparison, Outcome, Series, Wanted};
use crate::{fixture, peers};
use anyhow::Result;
use hearth_rig::daemon::path;

pub fn read_qd24(args: &Args) -> Result<Outcome> {
    let mut outcome = run(args, "randread", 24)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.9));
    outcome.compare_iops("hearth", "qemu-storage-daemon", Wanted::AtLeast(1.0));
    cpu(&mut outcome);
    Ok(outcome)
}

pub fn read_qd1(args: &Args) -> Result<Outcome> {
    let mut outcome = run(args, "randread", 1)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.6));
    outcome.compare_iops("hearth", "qemu-storage-daemon", Wanted::Shown);
    outcome.compare_cpu("hearth", "qemu-storage-daemon", Wanted::Shown);
    Ok(outcome)
}

pub fn write_qd24(args: &Args) -> Result<Outcome> {
    let mut outcome = run(args, "randwrite", 24)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.9));
    outcome.compare_iops("hearth", "qemu-storage-daemon", Wanted::Shown);
    cpu(&mut outcome);
    Ok(outcome)
}

/// The server's processor time per request, against its goal.
fn cpu(outcome: &mut Outcome) {
    outcome.compare_cpu("hearth", "qemu-storage-daemon", Wanted::Shown);
    let hearth = outcome.series.iter().find(|s| s.name == "hearth");
    let values: Vec<f64> = hearth
        .iter()
        .flat_map(|s| s.samples.iter().filter_map(|x| x.server_us))
        .collect();
    if !values.is_empty() {
        outcome.comparisons.push(Comparison {
            what: "hearth, server CPU per request".to_owned(),
            values,
            unit: "µs".to_owned(),
            wanted: Wanted::AtMost(8.0),
        });
    }
}

fn run(args: &Args, rw: &'static str, depth: u32) -> Result<Outcome> {
    let reads = rw == "randread";
    let hearth = if args.peers_only {
        None
    } else {
        let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
        let hearth = fixture::pool(args, args.disk)?;
        fixture::add(&hearth, "warm", path(&origin), "write-back")?;
        if reads {
            fixture::warm(&hearth, "warm", args.disk)?;
        }
        Some(hearth)
    };
    let file = fixture::to_read(args, hearth.as_ref().filter(|_| reads))?;
    let qemu = peers::qemu_vhost(&file, &args.dir)?;
    let mut contenders = vec![peers::raw(&file), qemu.vhost_contender()];
    if let Some(hearth) = &hearth {
        contenders.push(Contender {
            name: "hearth".to_owned(),
            at: At::Vhost(hearth.vhost_socket("warm")),
            pid: hearth.pid(),
        });
    }
    let mut outcome = Outcome {
        series: contenders
            .iter()
            .map(|c| Series {
                name: c.name.clone(),
                samples: Vec::new(),
            })
            .collect(),
        ..Outcome::default()
    };
    for round in 0..args.rounds {
        for (contender, series) in contenders.iter().zip(&mut outcome.series) {
            let job = Job {
                seed: round as u64 + 1,
                ..Job::random(rw, depth, args.seconds, args.disk)
            };
            let sample = by_libblkio(&job, contender, &|| Ok(()))?;
            eprintln!(
                "   round {}: {:19} {:9.0} requests/s",
                round + 1,
                contender.name,
                sample.iops
            );
            series.samples.push(sample);
            if let Some(hearth) = &hearth
                && contender.name == "hearth"
                && !reads
            {
                fixture::drain(hearth, "warm")?;
            }
        }
    }
    outcome.notes.push(
        "All contenders through one loop over libblkio (crate blkio), one thread, one queue."
            .to_owned(),
    );
    Ok(outcome)
}
