//! One timed run of a load against a contender, by whichever client speaks its protocol.
//!
//! fio drives files and NBD servers; it has no vhost-user engine here, so libblkio drives those
//! sockets (and, where they are compared with a file, the file by the same loop).

use crate::peers::{At, Contender};
use anyhow::Result;
#[cfg(not(target_env = "musl"))]
use anyhow::ensure;
#[cfg(not(target_env = "musl"))]
use hearth_rig::blk::{Disk, Kind, Load};
#[cfg(not(target_env = "musl"))]
use hearth_rig::process::cpu_us;
use serde::{Deserialize, Serialize};
#[cfg(not(target_env = "musl"))]
use std::time::Duration;

/// What a load does.
#[derive(Clone, Debug)]
pub struct Job {
    /// fio's word: randread, randwrite, randrw, read, write.
    pub rw: &'static str,
    /// Of 100 requests of randrw, how many are reads.
    pub reads: u32,
    /// Bytes per request.
    pub bs: u64,
    /// Requests in flight per connection.
    pub depth: u32,
    /// Connections.
    pub connections: u32,
    /// A flush after every so many writes; 0 for none.
    pub flush_every: u32,
    /// Seconds.
    pub seconds: u64,
    /// Bytes of the disk that are touched.
    pub size: u64,
    /// Touch every block at most once, and end when all were touched.
    pub once: bool,
    /// 80 % of accesses to the first 20 % of the disk.
    pub skewed: bool,
    /// Seed of the addresses.
    pub seed: u64,
}

impl Job {
    /// 4 KiB random requests over a whole disk.
    pub fn random(rw: &'static str, depth: u32, seconds: u64, size: u64) -> Job {
        Job {
            rw,
            reads: 50,
            bs: 4096,
            depth,
            connections: 1,
            flush_every: 0,
            seconds,
            size,
            once: false,
            skewed: false,
            seed: 1,
        }
    }

    /// 128 KiB sequential requests over a whole disk.
    pub fn sequential(rw: &'static str, depth: u32, seconds: u64, size: u64) -> Job {
        Job {
            bs: 128 << 10,
            ..Job::random(rw, depth, seconds, size)
        }
    }
}

/// What came of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Requests per second.
    pub iops: f64,
    /// Mean latency of a request, µs.
    pub mean_us: f64,
    /// 99th percentile of latency, µs.
    pub p99_us: f64,
    /// CPU of the server per request, µs; absent for a file.
    pub server_us: Option<f64>,
    /// How busy the busiest client process was, of one core.
    pub client_busy: f64,
    /// Requests completed.
    pub requests: f64,
}

/// Runs `job` against `contender`: libblkio for vhost-user, fio for all else.
pub fn run(job: &Job, contender: &Contender) -> Result<Sample> {
    match contender.at {
        At::Vhost(_) => by_libblkio(job, contender, &|| Ok(())),
        At::Uri(_) | At::File(_) => crate::fio::run(job, contender),
    }
}

/// Runs `job` by libblkio against a vhost-user socket or a file: one thread, one queue, sleeping
/// on the call like a guest. Gives up with the error of `stop`, which is asked whenever requests
/// complete.
#[cfg(not(target_env = "musl"))]
pub fn by_libblkio(
    job: &Job,
    contender: &Contender,
    stop: &dyn Fn() -> Result<()>,
) -> Result<Sample> {
    let load = Load {
        kind: match job.rw {
            "randread" => Kind::Read,
            "randwrite" => Kind::Write,
            "randrw" => Kind::Mixed { reads: job.reads },
            other => anyhow::bail!("the libblkio loop has no {other}"),
        },
        depth: job.depth as usize,
        block: job.bs as usize,
        span: job.size,
        time: Duration::from_secs(job.seconds),
        once: job.once,
        flush_every: job.flush_every,
        seed: job.seed,
    };
    ensure!(
        !job.skewed && job.connections == 1,
        "the libblkio loop has one queue and uniform addresses"
    );
    let memory = load.depth * load.block;
    let mut disk = match &contender.at {
        At::File(path) => Disk::file(path, memory)?,
        At::Vhost(socket) => Disk::vhost(socket, memory)?,
        At::Uri(uri) => anyhow::bail!("{uri} is no vhost-user socket"),
    };
    let before = contender.pid.map(cpu_us).transpose()?;
    let measured = disk.run_unless(&load, stop)?;
    let after = contender.pid.map(cpu_us).transpose()?;
    let requests = measured.requests.max(1) as f64;
    Ok(Sample {
        iops: measured.iops,
        mean_us: measured.mean_us,
        p99_us: measured.p99_us,
        server_us: before.zip(after).map(|(b, a)| (a - b) / requests),
        client_busy: measured.client_us * measured.iops / 1e6,
        requests,
    })
}

/// libblkio does not build against musl, so a build that is static in this way has no client for it.
#[cfg(target_env = "musl")]
pub fn by_libblkio(_: &Job, contender: &Contender, _: &dyn Fn() -> Result<()>) -> Result<Sample> {
    anyhow::bail!(
        "{:?} cannot be measured: this build, against musl, has no client for vhost-user sockets; measure with one against glibc",
        contender.at
    )
}
