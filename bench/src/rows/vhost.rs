//! The same loop, over libblkio, on a bare file and on two vhost-user exports.
//!
//! fio has no vhost-user engine here, so all contenders of these rows are driven by libblkio:
//! the file by its io_uring driver, the sockets by its virtio-blk-vhost-user driver. One thread,
//! one queue, sleeping on the call like a guest.

use crate::args::Args;
use crate::fio::{Sample, cpu_us};
use crate::peers::{At, Contender};
use crate::report::{Comparison, Outcome, Series, Wanted};
use crate::{fixture, peers};
use anyhow::{Result, bail};
use hearth_e2e::blk::{Disk, Kind, Load};
use hearth_e2e::daemon::path;
use std::time::Duration;

/// Bytes of a request.
const BLOCK: usize = 4096;

pub fn read_qd24(args: &Args) -> Result<Outcome> {
    let mut outcome = run(args, Kind::Read, 24)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.9));
    outcome.compare_iops("hearth", "qemu-storage-daemon", Wanted::AtLeast(1.0));
    cpu(&mut outcome);
    Ok(outcome)
}

pub fn read_qd1(args: &Args) -> Result<Outcome> {
    let mut outcome = run(args, Kind::Read, 1)?;
    outcome.compare_iops("hearth", "raw", Wanted::AtLeast(0.6));
    outcome.compare_iops("hearth", "qemu-storage-daemon", Wanted::Shown);
    outcome.compare_cpu("hearth", "qemu-storage-daemon", Wanted::Shown);
    Ok(outcome)
}

pub fn write_qd24(args: &Args) -> Result<Outcome> {
    let mut outcome = run(args, Kind::Write, 24)?;
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
            unit: "µs",
            wanted: Wanted::AtMost(8.0),
        });
    }
}

fn run(args: &Args, kind: Kind, depth: usize) -> Result<Outcome> {
    let file = fixture::file(args, "raw.img", args.disk)?;
    let qemu = peers::qemu_vhost(&file, &args.dir)?;
    let mut contenders = vec![peers::raw(&file), qemu.vhost_contender()];
    let hearth = if args.peers_only {
        None
    } else {
        let origin = fixture::file(args, "origin.img", args.disk)?;
        let hearth = fixture::pool(args, args.disk)?;
        fixture::add(&hearth, "warm", path(&origin), "write-back")?;
        if kind == Kind::Read {
            fixture::warm(&hearth, "warm", args.disk)?;
        }
        contenders.push(Contender {
            name: "hearth".to_owned(),
            at: At::Vhost(hearth.vhost_socket("warm")),
            pid: hearth.pid(),
        });
        Some(hearth)
    };
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
            let load = Load {
                kind,
                depth,
                block: BLOCK,
                span: args.disk,
                time: Duration::from_secs(args.seconds),
                seed: round as u64 + 1,
            };
            let sample = measure(&load, contender)?;
            eprintln!(
                "   round {}: {:19} {:9.0} requests/s",
                round + 1,
                contender.name,
                sample.iops
            );
            series.samples.push(sample);
            if let Some(hearth) = &hearth
                && contender.name == "hearth"
                && kind != Kind::Read
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

fn measure(load: &Load, contender: &Contender) -> Result<Sample> {
    let memory = load.depth * load.block;
    let mut disk = match &contender.at {
        At::File(path) => Disk::file(path, memory)?,
        At::Vhost(socket) => Disk::vhost(socket, memory)?,
        At::Uri(uri) => bail!("{uri} is no vhost-user socket"),
    };
    let before = contender.pid.map(cpu_us).transpose()?;
    let measured = disk.run(load)?;
    let after = contender.pid.map(cpu_us).transpose()?;
    let per = |us: f64| us / measured.requests.max(1) as f64;
    Ok(Sample {
        iops: measured.iops,
        mean_us: measured.mean_us,
        p99_us: measured.p99_us,
        server_us: before.zip(after).map(|(b, a)| per(a - b)),
        client_busy: measured.client_us * measured.iops / 1e6,
    })
}
