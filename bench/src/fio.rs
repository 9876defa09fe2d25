//! One timed run of fio against a server or a file, and what it cost the server.

use crate::load::{Job, Sample};
use crate::peers::{At, Contender};
use anyhow::{Context, Result, ensure};
use hearth_rig::process::cpu_us;
use serde_json::Value;
use std::process::{Command, Stdio};

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
    if job.rw == "randrw" {
        fio.arg(format!("--rwmixread={}", job.reads));
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
    let job0 = jobs.first().context("fio ran no job")?;
    ensure!(
        job0["error"].as_i64() == Some(0),
        "fio saw error {} from {}",
        job0["error"],
        contender.name
    );
    let sides = [&job0["read"], &job0["write"]];
    let number = |side: &Value, key: &str| side[key].as_f64().unwrap_or(0.0);
    let requests: f64 = sides.iter().map(|s| number(s, "total_ios")).sum();
    ensure!(
        requests > 0.0,
        "fio completed no request against {}",
        contender.name
    );
    let waited: f64 = sides
        .iter()
        .map(|s| number(&s["clat_ns"], "mean") * number(s, "total_ios"))
        .sum();
    let p99 = sides
        .iter()
        .map(|s| number(&s["clat_ns"]["percentile"], "99.000000"))
        .fold(0.0, f64::max);
    Ok(Sample {
        iops: sides.iter().map(|s| number(s, "iops")).sum(),
        mean_us: waited / requests / 1e3,
        // Of a mixed load, the slower side's.
        p99_us: p99 / 1e3,
        server_us: before.zip(after).map(|(b, a)| (a - b) / requests),
        client_busy: (number(job0, "usr_cpu") + number(job0, "sys_cpu")) / 100.0,
        requests,
    })
}
