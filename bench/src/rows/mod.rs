//! The rows of the table: each sets up its contenders, runs them in turn, and compares.

mod cold;
mod drain;
mod engine_cost;
mod homes;
mod kept;
mod lookup;
mod many_files;
mod mirror;
mod nfs;
mod ordered;
mod ram;
mod reads;
mod remote;
mod replay;
mod several;
mod slow;
mod start;
mod storage_vm;
mod swap_raw;
mod vhost;
mod watched;
mod writes;

use crate::args::Args;
use crate::load::{Job, run};
use crate::peers::Contender;
use crate::report::{Outcome, Series};
use anyhow::Result;

/// A row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name on the command line.
    pub id: &'static str,
    /// What it measures.
    pub title: &'static str,
    /// Measures it.
    pub run: fn(&Args) -> Result<Outcome>,
}

/// Rows of a smoke run: one of every kind.
pub const SMOKE: &[&str] = &[
    "read-qd24",
    "write-qd24",
    "flush-qd1",
    "wt-qd24",
    "vhost-read-qd24",
    "cold",
    "mirror-reads",
    "mirror-resync",
    "mirror-quiet",
    "mirror-death",
    "flash-drain",
    "replay-hdd",
    "nfs-read",
    "nfs-write",
    "nfs-seq",
    "nfs-ganesha",
    "lookup",
    "engine-cost",
    "wa",
    "start-1g",
    "swap-raw",
];

/// All rows, in the order of the report.
pub const ALL: &[Row] = &[
    Row {
        id: "read-qd24",
        title: "Warm random 4 KiB reads, one connection, depth 24",
        run: reads::qd24,
    },
    Row {
        id: "read-qd1",
        title: "Warm random 4 KiB reads, one connection, depth 1",
        run: reads::qd1,
    },
    Row {
        id: "hit-cpu",
        title: "The cache's own CPU on a hit: a hit less a bare pass-through read",
        run: reads::hit_cpu,
    },
    Row {
        id: "watched",
        title: "Warm random 4 KiB reads, depth 24: with history, alerts, metrics, events and console on, and without",
        run: watched::reads,
    },
    Row {
        id: "scale",
        title: "Warm random 4 KiB reads, depth 64: four connections and one",
        run: reads::scale,
    },
    Row {
        id: "seq-read",
        title: "Warm sequential 128 KiB reads, depth 16",
        run: reads::sequential,
    },
    Row {
        id: "seq-write",
        title: "Write-back sequential 128 KiB writes, depth 16",
        run: writes::sequential,
    },
    Row {
        id: "write-qd24",
        title: "Write-back random 4 KiB writes, depth 24",
        run: writes::qd24,
    },
    Row {
        id: "flush-qd1",
        title: "Write-back random 4 KiB writes, a flush every 32, depth 1",
        run: writes::flush_qd1,
    },
    Row {
        id: "flush-qd24",
        title: "Write-back random 4 KiB writes, a flush every 32, depth 24",
        run: writes::flush_qd24,
    },
    Row {
        id: "wt-qd1",
        title: "Write-through random 4 KiB writes, depth 1",
        run: writes::through_qd1,
    },
    Row {
        id: "wt-qd24",
        title: "Write-through random 4 KiB writes, depth 24",
        run: writes::through_qd24,
    },
    Row {
        id: "wt-hdd",
        title: "Write-through random 4 KiB writes on a modelled hard disk",
        run: writes::through_hdd,
    },
    Row {
        id: "vhost-read-qd24",
        title: "vhost-user: warm random 4 KiB reads, one queue, depth 24",
        run: vhost::read_qd24,
    },
    Row {
        id: "vhost-read-qd1",
        title: "vhost-user: warm random 4 KiB reads, one queue, depth 1",
        run: vhost::read_qd1,
    },
    Row {
        id: "vhost-write-qd24",
        title: "vhost-user: write-back random 4 KiB writes, one queue, depth 24",
        run: vhost::write_qd24,
    },
    Row {
        id: "nfs-read",
        title: "A datastore's file over NFS, a disk over NBD: warm random 4 KiB reads at depth 1, 32",
        run: nfs::reads,
    },
    Row {
        id: "nfs-write",
        title: "A datastore's file over NFS, a disk over NBD: durable random 4 KiB writes at depth 1, 32",
        run: nfs::writes,
    },
    Row {
        id: "nfs-seq",
        title: "A datastore's file over NFS, the flash file as it is: sequential 1 MiB reads and writes, depth 8",
        run: nfs::sequential,
    },
    Row {
        id: "nfs-ganesha",
        title: "A datastore's file by Hearth and by nfs-ganesha: warm random 4 KiB reads, durable writes, at depth 1, 32",
        run: nfs::ganesha,
    },
    Row {
        id: "nfs-hdd",
        title: "A datastore on a modelled hard disk, cached and not: durable random 4 KiB writes, reads, at depth 1, 32",
        run: nfs::hard_disk,
    },
    Row {
        id: "nfs-many",
        title: "A datastore of 20,000 files and one of 200: names, first use, memory, start; in one directory and in two",
        run: many_files::many,
    },
    Row {
        id: "nfs-host",
        title: "A host like ESXi on a modelled hard disk: durable writes at depth 32, heartbeats, locks; with flash for all and with little",
        run: storage_vm::heartbeats,
    },
    Row {
        id: "nfs-kept",
        title: "A datastore's files kept on flash, on a modelled hard disk: a scratch file under a host like ESXi, a pinned one read for the first time",
        run: kept::kept,
    },
    Row {
        id: "storage-vm-table",
        title: "A datastore on two modelled hard disks: random 4 KiB reads, durable writes at depth 1, 24, beside disk and flash",
        run: storage_vm::table,
    },
    Row {
        id: "storage-vm-loss",
        title: "The same under a host like ESXi: a disk pulled and put back, the daemon killed",
        run: storage_vm::loss,
    },
    Row {
        id: "cold",
        title: "Cache off or cold, SSD origin, random 4 KiB reads at depth 1, 4, 24, 64",
        run: cold::ssd,
    },
    Row {
        id: "cold-8ms",
        title: "Cache off or cold, 8 ms origin, random 4 KiB reads at depth 1, 24",
        run: cold::slow,
    },
    Row {
        id: "nbd-origin",
        title: "An origin behind an NBD server and the same as a file: cold and warm random 4 KiB reads at depth 1, 24",
        run: remote::nbd,
    },
    Row {
        id: "skew-8ms",
        title: "8 ms origin, 80 % of reads in 20 % of the disk, cache 21 % of it, depth 24",
        run: slow::skewed,
    },
    Row {
        id: "hdd",
        title: "Modelled hard disk: cold and warm random 4 KiB reads",
        run: slow::hdd,
    },
    Row {
        id: "ordered",
        title: "100 flushes a second, in order and not, over a modelled hard disk",
        run: ordered::ordered,
    },
    Row {
        id: "mirror-reads",
        title: "A mirror of two modelled hard disks and one such disk: random 4 KiB reads at depth 1, 24",
        run: mirror::reads,
    },
    Row {
        id: "mirror-resync",
        title: "Speed at which a new leg is copied to",
        run: mirror::resync,
    },
    Row {
        id: "mirror-quiet",
        title: "Reads beside a resync, a scrub and what is written back, on modelled hard disks",
        run: mirror::quiet,
    },
    Row {
        id: "mirror-death",
        title: "From the death of a leg to the next durable write",
        run: mirror::death,
    },
    Row {
        id: "flash-two",
        title: "Two flash devices of 200 MB/s each and one such device: sequential 128 KiB writes and reads",
        run: several::speed,
    },
    Row {
        id: "flash-copies",
        title: "Everything on two flash files and everything once: random 4 KiB and sequential 128 KiB writes",
        run: several::copies,
    },
    Row {
        id: "flash-only",
        title: "Disks that live on flash, durable and scratch, and one cached there: warm random 4 KiB reads at depth 1, 24; writes with a flush each",
        run: homes::flash_only,
    },
    Row {
        id: "flash-slow",
        title: "Two flash devices, of which one answers ten times as slowly, and the good one alone: four reads to a write, depth 8",
        run: several::slow,
    },
    Row {
        id: "flash-drain",
        title: "Reads while a flash device is taken out, put in, and replaced",
        run: drain::drain,
    },
    Row {
        id: "flash-replace",
        title: "How fast a flash device is replaced when nobody asks for anything",
        run: drain::replaced,
    },
    Row {
        id: "flash-death",
        title: "From the death of one of two flash devices to the next answers, everything being on both",
        run: several::death,
    },
    Row {
        id: "replay-hdd",
        title: "Read-dominated traces on a modelled hard disk, flash 20 % of the working set",
        run: replay::hdd,
    },
    Row {
        id: "block-size",
        title: "Cache block sizes: the same traces, fills of 4 KiB to 1 MiB",
        run: replay::block_sizes,
    },
    Row {
        id: "lookup",
        title: "A cached 4 KiB block: lookup and policy on one core, and RAM",
        run: lookup::run,
    },
    Row {
        id: "engine-cost",
        title: "The engine alone: threads, disks with something dirty, outstanding writes, idle disks",
        run: engine_cost::run,
    },
    Row {
        id: "swap-raw",
        title: "Swap inside a pool and the loop device below it: random 4 KiB page-in and reads at depth 1, 16",
        run: swap_raw::row,
    },
    Row {
        id: "wa",
        title: "Flash write amplification",
        run: start::amplification,
    },
    Row {
        id: "ram-4g",
        title: "RAM per cached block, 4 GiB of flash full",
        run: ram::four,
    },
    Row {
        id: "ram-16g",
        title: "RAM per cached block, 16 GiB of flash full",
        run: ram::sixteen,
    },
    Row {
        id: "start-1g",
        title: "Time to the first answer, with 1 GiB cached",
        run: start::one,
    },
    Row {
        id: "start-4g",
        title: "Time to the first answer, with 4 GiB cached",
        run: start::four,
    },
    Row {
        id: "start-16g",
        title: "Time to the first answer, with 16 GiB cached",
        run: start::sixteen,
    },
];

/// CPU time of this thread, nanoseconds: what others do on the machine is not in it.
pub(crate) fn cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid pointer to a timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Runs `job` against every contender, round by round; `after` runs, untimed, after each of them.
fn rounds(
    args: &Args,
    job: &Job,
    contenders: &[Contender],
    mut after: impl FnMut(&Contender) -> Result<()>,
) -> Result<Outcome> {
    let mut series = contenders
        .iter()
        .map(|c| Series {
            name: c.name.clone(),
            samples: Vec::new(),
        })
        .collect::<Vec<_>>();
    for round in 0..args.rounds {
        for (contender, series) in contenders.iter().zip(&mut series) {
            let job = Job {
                seed: round as u64 + 1,
                ..job.clone()
            };
            let sample = run(&job, contender)?;
            eprintln!(
                "   round {}: {:14} {:9.0} requests/s",
                round + 1,
                contender.name,
                sample.iops
            );
            series.samples.push(sample);
            after(contender)?;
        }
    }
    let mut outcome = Outcome {
        series,
        ..Outcome::default()
    };
    // fio's NBD engine serves a connection with one thread: near a whole core it is the limit.
    let limited = outcome
        .series
        .iter()
        .filter(|s| s.samples.iter().any(|x| x.client_busy > 0.95))
        .map(|s| s.name.clone())
        .collect::<Vec<_>>();
    if !limited.is_empty() {
        outcome.notes.push(format!(
            "The client (one fio thread per connection) was the limit against: {}. Compare the servers' CPU per request there.",
            limited.join(", ")
        ));
    }
    Ok(outcome)
}
