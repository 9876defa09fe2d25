//! One timed run of fio against a server or a file, and what it cost the server.

use crate::peers::{At, Contender};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::process::{Command, Stdio};

/// What fio does.
#[derive(Clone, Debug)]
pub struct Job {
    /// fio's word: randread, randwrite, read, write.
    pub rw: &'static str,
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
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Requests per second.
    pub iops: f64,
    /// Mean latency of a request, µs.
    pub mean_us: f64,
    /// 99th percentile of latency, µs.
    pub p99_us: f64,
    /// CPU of the server per request, µs; absent for a file.
    pub server_us: Option<f64>,
    /// How busy the busiest fio process was, of one core.
    pub client_busy: f64,
}

/// Runs `job` against `contender`.
pub fn run(job: &Job, contender: &Contender) -> Result<Sample> {
    let mut fio = Command::new("fio");
    fio.args([
        "--name=bench",
        "--output-format=json",
        "--group_reporting",
        "--randrepeat=1",
        "--allow_file_create=0",
    ]);
    match &contender.at {
        At::Uri(uri) => {
            fio.arg("--ioengine=nbd").arg(format!("--uri={uri}"));
        }
        At::File(path) => {
            fio.args(["--ioengine=io_uring", "--direct=1"])
                .arg(format!("--filename={}", path.display()));
        }
        At::Vhost(socket) => anyhow::bail!("fio has no engine for {}", socket.display()),
    }
    fio.arg(format!("--rw={}", job.rw))
        .arg(format!("--bs={}", job.bs))
        .arg(format!("--iodepth={}", job.depth))
        .arg(format!("--numjobs={}", job.connections))
        .arg(format!("--size={}", job.size))
        .arg(format!("--runtime={}", job.seconds))
        .arg(format!("--randseed={}", job.seed));
    if !job.once {
        fio.arg("--time_based");
        // fio's map of what it has touched costs the client time and the measurement nothing.
        fio.arg("--norandommap");
    }
    if job.skewed {
        fio.arg("--random_distribution=zoned:80/20:20/80");
    }
    if job.flush_every > 0 {
        // The NBD engine knows fsync; for the file, fdatasync is the cheaper equal of an NBD flush.
        let word = if matches!(contender.at, At::File(_)) {
            "fdatasync"
        } else {
            "fsync"
        };
        fio.arg(format!("--{word}={}", job.flush_every));
    }
    let before = contender.pid.map(cpu_us).transpose()?;
    let out = fio
        .stdin(Stdio::null())
        .output()
        .context("cannot run fio")?;
    let after = contender.pid.map(cpu_us).transpose()?;
    let stdout = String::from_utf8_lossy(&out.stdout);
    ensure!(
        out.status.success(),
        "fio against {}: {}\n{}{stdout}",
        contender.name,
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    // Warnings may stand before the JSON.
    let json = stdout
        .find('{')
        .map(|at| &stdout[at..])
        .context("fio printed no JSON")?;
    let report: Value = serde_json::from_str(json).context("fio's JSON")?;
    let jobs = report["jobs"]
        .as_array()
        .context("fio's JSON has no jobs")?;
    let side = if job.rw.contains("write") {
        "write"
    } else {
        "read"
    };
    let job0 = jobs.first().context("fio ran no job")?;
    ensure!(
        job0["error"].as_i64() == Some(0),
        "fio saw error {} from {}",
        job0["error"],
        contender.name
    );
    let requests = job0[side]["total_ios"].as_f64().unwrap_or(0.0);
    ensure!(
        requests > 0.0,
        "fio completed no request against {}",
        contender.name
    );
    let latency = &job0[side]["clat_ns"];
    Ok(Sample {
        iops: job0[side]["iops"].as_f64().unwrap_or(0.0),
        mean_us: latency["mean"].as_f64().unwrap_or(0.0) / 1e3,
        p99_us: latency["percentile"]["99.000000"].as_f64().unwrap_or(0.0) / 1e3,
        server_us: before.zip(after).map(|(b, a)| (a - b) / requests),
        client_busy: (job0["usr_cpu"].as_f64().unwrap_or(0.0)
            + job0["sys_cpu"].as_f64().unwrap_or(0.0))
            / 100.0,
    })
}

/// CPU time of a process and all its threads so far, ended ones included, µs (proc(5), `stat`).
pub fn cpu_us(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("server {pid} is gone"))?;
    // The name, in brackets, may hold blanks: count fields after it. utime and stime are 14 and 15.
    let after_name = stat.rsplit(')').next().unwrap_or("");
    let field = |n: usize| {
        after_name
            .split_whitespace()
            .nth(n)
            .and_then(|f| f.parse::<f64>().ok())
    };
    let ticks = field(11)
        .zip(field(12))
        .map(|(user, system)| user + system)
        .context("malformed /proc/PID/stat")?;
    // SAFETY: sysconf has no preconditions.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    Ok(ticks * 1e6 / per_second)
}

/// Resident memory of a process, bytes.
pub fn resident(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .and_then(|v| v.split_whitespace().next());
    Ok(kib
        .and_then(|v| v.parse::<u64>().ok())
        .context("no VmRSS in /proc/PID/status")?
        << 10)
}
