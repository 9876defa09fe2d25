//! `hearth trace replay`: a trace against a disk, measured.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use hearth_daemon::api::stats::{Counters, DiskReport};
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_daemon::windows::Since;
use hearth_fault::Fault;
use hearth_policy::Percentiles;
use hearth_replay::{
    FileTarget, GRACE_NS, NbdTarget, Options, Outcome, Pace, Plan, Progress, ReplayError, SECTOR,
    Select, Source, Target, run as play, scan,
};
use hearth_trace::sparkline;

use crate::args::{Global, TraceReplay};
use crate::interrupt::Interrupt;
use crate::stats::{percent, percentiles};
use crate::table::plain;
use crate::trace::{failed_in, torn_words};
use crate::{Failure, print_json};

/// Lag from which a replay with the trace's timing is not the trace any more, seconds.
const LAG_HONEST: f64 = 0.01;

fn failed(path: &Path, e: &ReplayError) -> Error {
    match e {
        ReplayError::Trace(e) => failed_in(path, e),
        ReplayError::WouldWrite(_) | ReplayError::ReadOnly => Error::of(Kind::Refused, e.fault()),
        ReplayError::Open(_) | ReplayError::Broken { .. } => {
            Error::of(Kind::Unavailable, e.fault())
        }
        _ => Error::of(Kind::Invalid, e.fault()),
    }
}

/// What is printed.
#[derive(serde::Serialize)]
struct Report {
    target: String,
    pace: String,
    #[serde(flatten)]
    outcome: Outcome,
    /// Writes, discards and flushes of the trace that were not asked for.
    left_out: u64,
    /// The first record that is missing, if the trace ended in an unfinished frame.
    torn_at: Option<u64>,
    /// What the cache did meanwhile, if the target is a disk of a daemon that can be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<Cache>,
}

#[derive(serde::Serialize)]
struct Cache {
    read_hit_ratio: Option<f64>,
    read_hit_ratio_bytes: Option<f64>,
    write_hit_ratio: Option<f64>,
}

/// Standard input in a file without a name: a trace is read twice, once to learn what it asks for.
fn spool() -> Result<File, Error> {
    let copied = tempfile::tempfile().and_then(|mut file| {
        std::io::copy(&mut std::io::stdin().lock(), &mut file)?;
        Ok(file)
    });
    copied.map_err(|e| {
        Error::unavailable(
            format!(
                "the trace on standard input cannot be kept in {}: {e}",
                std::env::temp_dir().display()
            ),
            "set TMPDIR to a directory with room for it",
        )
    })
}

pub fn run(global: &Global, args: &TraceReplay) -> Result<(), Failure> {
    let spooled = (args.trace == Path::new("-")).then(spool).transpose()?;
    let path = spooled.as_ref().map_or_else(
        || args.trace.clone(),
        // Opened by this name, it is read from its beginning.
        |file| format!("/proc/self/fd/{}", file.as_raw_fd()).into(),
    );
    let select = Select {
        path,
        form: hearth_trace::Options {
            format: args.format,
        },
        disk: args.disk,
        reads_only: args.reads_only,
        ..Select::default()
    };
    let failed = |e: ReplayError| failed(&args.trace, &e);
    let plan = scan(&select).map_err(failed)?;
    if plan.writes > 0 && !args.overwrite {
        return Err(failed(ReplayError::WouldWrite(plan.writes)).into());
    }
    let mut target = open(args, &plan).map_err(failed)?;
    let align = if args.verify {
        target.align().max(SECTOR)
    } else {
        target.align()
    };
    // What is played goes into whole units of it.
    let size = target.size() / align * align;
    if plan.end > size && !args.wrap {
        let end = plan.end;
        return Err(failed(ReplayError::Beyond { end, size }).into());
    }
    let mut source =
        Source::open(&select, &plan, target.size(), align, target.len_max()).map_err(failed)?;
    let (pace, words) = match (args.depth, args.flat_out) {
        (Some(depth), _) => (
            Pace::Depth(usize::from(depth)),
            format!("{depth} in flight"),
        ),
        (None, true) => (Pace::FlatOut, "flat out".to_owned()),
        (None, false) => {
            let speed = args.speed.unwrap_or(1.0);
            (
                Pace::Original(speed),
                format!("the trace's timing, {speed} x"),
            )
        }
    };
    let options = Options {
        pace,
        verify: args.verify,
        run: uuid::Uuid::new_v4().as_u64_pair().0,
        grace_ns: GRACE_NS,
    };
    let ask = Asker::of(&args.to);
    let before = ask.as_ref().and_then(Asker::counters);
    let interrupt = Interrupt::watch();
    let shown = !global.json && std::io::stderr().is_terminal();
    let mut tell = |p: &Progress| {
        if shown {
            std::eprint!("\r\x1b[K{}", crate::table::plain(&progress(&plan, p)));
            let _ = std::io::stderr().flush();
        }
        !interrupt.hit()
    };
    let outcome = play(&mut source, &mut *target, options, &mut tell).map_err(failed)?;
    if shown {
        std::eprint!("\r\x1b[K");
    }
    let after = ask.as_ref().and_then(Asker::counters);
    let report = Report {
        target: args.to.clone(),
        pace: words,
        cache: before.zip(after).map(|(before, after)| {
            let ratios = after.since(&before).ratios(&after);
            Cache {
                read_hit_ratio: ratios.read_hit_ratio,
                read_hit_ratio_bytes: ratios.read_hit_ratio_bytes,
                write_hit_ratio: ratios.write_hit_ratio,
            }
        }),
        outcome,
        left_out: plan.not_reads,
        torn_at: plan.torn,
    };
    if global.json {
        print_json(&report)?;
    } else {
        print!("{}", text(&report));
    }
    verdict(&report.outcome)
}

fn open(args: &TraceReplay, plan: &Plan) -> Result<Box<dyn Target>, ReplayError> {
    let target: Box<dyn Target> = if NbdTarget::is_address(&args.to) {
        Box::new(NbdTarget::connect(&args.to)?)
    } else {
        Box::new(FileTarget::open(&args.to, plan.writes == 0)?)
    };
    if target.read_only() && plan.writes > 0 {
        return Err(ReplayError::ReadOnly);
    }
    Ok(target)
}

/// Asks the daemon that serves the target, if one does.
struct Asker {
    client: Client,
    disk: String,
}

impl Asker {
    /// A Hearth disk over NBD has the control socket beside its own.
    fn of(address: &str) -> Option<Asker> {
        let (socket, disk) = NbdTarget::unix_parts(address)?;
        let dir = socket.parent()?;
        (socket == hearth_daemon::rundir::nbd_socket(dir)).then(|| Asker {
            client: Client::new(dir),
            disk,
        })
    }

    fn counters(&self) -> Option<Counters> {
        // Whoever else listens there need not know of statistics.
        let report: DiskReport = self.client.get(&disk_path(&self.disk, "/stats")).ok()?;
        report.spans.first().map(|total| total.counters)
    }
}

fn progress(plan: &Plan, p: &Progress) -> String {
    if p.sweeping {
        return format!(
            "{} requests answered; reading back what was written",
            p.done
        );
    }
    let all = plan.requests.max(1);
    let mut text = format!(
        "{} of {} requests ({:.0} %), {}",
        p.done,
        plan.requests,
        p.done.min(all) as f64 * 100.0 / all as f64,
        human_seconds(p.seconds)
    );
    if p.lag_seconds > LAG_HONEST {
        let _ = write!(text, ", {:.2} s behind", p.lag_seconds);
    }
    text
}

/// A time that was measured: rounded like one that is left, a short one would be off by far.
fn took(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", (s * 1000.0).max(1.0)),
        s if s < 60.0 => format!("{s:.1} s"),
        s => human_seconds(s),
    }
}

fn text(report: &Report) -> String {
    let o = &report.outcome;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} requests to {} in {} ({}){}",
        o.requests,
        plain(&report.target),
        took(o.seconds),
        report.pace,
        if o.interrupted { ", called off" } else { "" }
    );
    if let Some(record) = report.torn_at {
        let _ = writeln!(out, "NOT WHOLE: {}", torn_words(record));
    }
    if report.left_out > 0 {
        let _ = writeln!(
            out,
            "{} writes, discards and flushes of the trace left out: only its reads were asked for",
            report.left_out
        );
    }
    let rate = |n: f64| n / o.seconds.max(1e-9);
    let _ = writeln!(
        out,
        "{:.0} requests a second, {} a second read, {} a second written",
        rate((o.reads.count + o.writes.count) as f64),
        human(rate(o.read_bytes as f64) as u64),
        human(rate(o.written_bytes as f64) as u64)
    );
    if o.lag_max_seconds > LAG_HONEST {
        let _ = writeln!(
            out,
            "FELL BEHIND: {} requests went out late, up to {:.2} s; the target is slower than the trace's disk was. \
             Read the response times, which count from when a request was due, not the latencies.",
            o.late, o.lag_max_seconds
        );
    }
    out.push('\n');
    let line = |name, l: &Percentiles| {
        let values = [l.mean_us, l.p50_us, l.p90_us, l.p99_us, l.p999_us, l.max_us];
        (name, l.count, values)
    };
    let lines = [
        line("read latency", &o.reads),
        line("write latency", &o.writes),
    ];
    let response = o.response.as_ref().map(|r| line("response", r));
    out.push_str(&percentiles("", lines.into_iter().chain(response)));
    if let Some(cache) = &report.cache {
        let _ = writeln!(
            out,
            "\ncache: read hit ratio {} by requests, {} by bytes; write hit ratio {}",
            percent(cache.read_hit_ratio),
            percent(cache.read_hit_ratio_bytes),
            percent(cache.write_hit_ratio)
        );
    }
    if o.timeline.len() > 1 {
        let line = |of: fn(&hearth_replay::Slot) -> u64| {
            sparkline(&o.timeline.iter().map(of).collect::<Vec<_>>())
        };
        let _ = writeln!(
            out,
            "\nrequests   {}\nlatency    {}\n           each {} s",
            line(|s| s.requests),
            line(|s| s.mean_us as u64),
            o.interval_seconds
        );
    }
    if o.unanswered > 0 {
        let _ = writeln!(
            out,
            "\n{} requests were not answered within {} s after the replay was called off, and given up",
            o.unanswered,
            GRACE_NS / 1_000_000_000
        );
    }
    if o.skipped > 0 {
        let _ = writeln!(
            out,
            "\n{} discards or flushes left out: the target does not take them",
            o.skipped
        );
    }
    if let Some(v) = &o.verified {
        let _ = writeln!(
            out,
            "\nverified: {} read of what was written, {} wrong{}",
            human(v.sectors * SECTOR),
            human(v.wrong * SECTOR),
            if v.untracked > 0 {
                format!(
                    "; {} written beyond what is remembered, not compared",
                    human(v.untracked * SECTOR)
                )
            } else {
                String::new()
            }
        );
        for m in &v.mismatches {
            let _ = writeln!(out, "  at {}: {}", m.offset, m.what);
        }
    }
    out
}

/// Success only if everything was right.
fn verdict(o: &Outcome) -> Result<(), Failure> {
    if let Some(v) = o.verified.as_ref().filter(|v| v.wrong > 0) {
        return Err(Error::unavailable(
            format!("{} sectors held wrong data", v.wrong),
            "the disk or its cache lost or mixed up writes; keep it as it is and report this",
        )
        .into());
    }
    if o.errors > 0 {
        return Err(Error::unavailable(
            format!(
                "{} requests failed, the first: {}",
                o.errors,
                o.first_error.as_deref().unwrap_or("")
            ),
            "look at the target's log",
        )
        .into());
    }
    if o.interrupted {
        return Err(Failure::Interrupted(Fault::bare(
            "the replay was called off",
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::took;

    #[test]
    fn a_short_run_does_not_seem_long() {
        for (seconds, words) in [
            (0.0, "1 ms"),
            (0.0204, "20 ms"),
            (1.25, "1.2 s"),
            (61.0, "1 min 1 s"),
        ] {
            assert_eq!(took(seconds), words);
        }
    }
}
