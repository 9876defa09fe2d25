//! The grammar of `hearth trace`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hearth_fault::Fault;

use super::{Size, parse_size};

#[derive(Debug, Subcommand)]
pub enum Trace {
    /// Record every request of a live disk
    #[command(
        after_help = "Example:\n  hearth trace record vm1 --out vm1.trace --for 10m\n  \
        hearth trace record vm1 --out vm1.trace --max-size 200M\n  hearth trace record vm1 --stop\n\n\
        With --for it waits for the end (Ctrl-C ends the recording); without, it returns at once."
    )]
    Record(TraceRecord),
    /// Send a trace's requests to a disk again, and measure it
    #[command(
        after_help = "Example:\n  hearth trace replay vm1.trace --to 'nbd+unix:///scratch?socket=/run/hearth/nbd.sock' --overwrite\n  \
        hearth trace replay vm1.trace --to /dev/vg0/scratch --overwrite --flat-out --verify\n  \
        hearth trace replay vm1.trace --to nbd://host/disk --reads-only --speed 2\n\n\
        Without --depth or --flat-out requests go out when they did in the trace. Ctrl-C ends it and shows\n\
        what was measured so far. Fails if a request failed or read wrong data."
    )]
    Replay(TraceReplay),
    /// Write a trace in another form
    #[command(
        after_help = "Example:\n  hearth trace convert hm_1.csv.gz hm_1.hearth\n  \
        hearth trace convert vm.vscsi vm.csv\n  \
        hearth trace convert vm1.trace vm1.msr.csv --to msr\n\n\
        What a form has no place for is left out and counted; docs/cli.md says what each loses."
    )]
    Convert(TraceConvert),
    /// Sum a trace up: requests, working set, reuse, sizes, seeks, and how they spread over time
    #[command(
        after_help = "Example:\n  hearth trace info hm_1.csv.gz\n  hearth trace info vm.vscsi --json"
    )]
    Info(TraceInfo),
}

/// A trace's form.
pub(super) fn parse_format(text: &str) -> Result<hearth_trace::Format, Fault> {
    text.parse()
        .map_err(|e: hearth_trace::TraceError| e.fault())
}

/// A form to write.
fn parse_output(text: &str) -> Result<hearth_trace::Format, Fault> {
    match parse_format(text)? {
        form if !form.is_written() => Err(Fault::new(
            "this form is only read",
            "choose another, such as csv",
        )),
        form => Ok(form),
    }
}

/// A time span in seconds, as `30`, `500ms`, `90s`, `10m`, `2h` or `1d`.
pub(super) fn parse_duration(text: &str) -> Result<f64, Fault> {
    match span(text) {
        Some(seconds) if seconds > 0.0 => Ok(seconds),
        _ => Err(Fault::new(
            format!("“{text}” is no time span"),
            "give a number with ms, s, m, h or d, such as 90s or 10m",
        )),
    }
}

/// The same, where 0 means something.
pub(super) fn span(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 5] = [
        ("ms", 0.001),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
        ("d", 86_400.0),
    ];
    let unit =
        (UNITS.iter()).find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, *seconds)));
    let (number, seconds) = unit.unwrap_or((text, 1.0));
    let number = number.trim_end().parse::<f64>().ok()?;
    (number >= 0.0 && number * seconds < 1e10).then_some(number * seconds)
}

/// Days, as `7d` or `7`; 0 for never.
pub(super) fn parse_days(text: &str) -> Result<u32, Fault> {
    let days = text.strip_suffix('d').unwrap_or(text).trim_end();
    days.parse().map_err(|_| {
        Fault::new(
            format!("“{text}” is no number of days"),
            "give one such as 7d, or 0",
        )
    })
}

#[derive(Clone, Debug, Args)]
pub struct TraceRecord {
    /// The disk
    #[arg(value_name = "DISK")]
    pub name: String,
    /// File to make; older requests go to FILE.1 when it gets too long
    #[arg(long, value_name = "FILE", required_unless_present = "stop")]
    pub out: Option<PathBuf>,
    /// Record so long, and wait for it, such as 90s, 10m, 2h
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration, conflicts_with = "stop")]
    pub duration: Option<f64>,
    /// Most both files may take; beyond, the oldest requests are given up [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "stop")]
    pub max_size: Option<Size>,
    /// End the recording under way
    #[arg(long, conflicts_with = "out")]
    pub stop: bool,
}

fn parse_speed(text: &str) -> Result<f64, Fault> {
    match text.parse::<f64>() {
        Ok(n) if (hearth_replay::SPEED_MIN..=1e6).contains(&n) => Ok(n),
        _ => Err(Fault::new(
            format!("“{text}” is no speed"),
            "give a number from 0.001 to 1000000, such as 0.5 or 10",
        )),
    }
}

#[derive(Clone, Debug, Args)]
pub struct TraceReplay {
    /// The trace, in any form `hearth trace` reads
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// An NBD export, a file or a block device
    #[arg(long, value_name = "nbd+unix://…|nbd://…|PATH")]
    pub to: String,
    /// So many times faster than the trace [default: 1]
    #[arg(long, value_name = "X", value_parser = parse_speed, conflicts_with_all = ["depth", "flat_out"])]
    pub speed: Option<f64>,
    /// Keep so many requests in flight instead of the trace's timing
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), conflicts_with = "flat_out")]
    pub depth: Option<u16>,
    /// As fast as the target goes, 128 requests in flight
    #[arg(long)]
    pub flat_out: bool,
    /// Write data that says what it is, and check it whenever it is read, and once more at the end
    #[arg(long, conflicts_with = "reads_only")]
    pub verify: bool,
    /// The trace's writes may destroy what is on the target
    #[arg(long, conflicts_with = "reads_only")]
    pub overwrite: bool,
    /// Leave out everything but reads
    #[arg(long)]
    pub reads_only: bool,
    /// Fold a trace of a larger disk into the target
    #[arg(long)]
    pub wrap: bool,
    /// Only this disk of a trace with several, numbered from 0 in order of appearance
    #[arg(long, value_name = "N")]
    pub disk: Option<u32>,
    /// Form of the trace [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
}

#[derive(Clone, Debug, Args)]
pub struct TraceConvert {
    /// The trace; compressed with gzip or zstd is fine, - is standard input
    #[arg(value_name = "FROM")]
    pub from: PathBuf,
    /// Where to write; - is standard output
    #[arg(value_name = "TO")]
    pub to: PathBuf,
    /// Form of FROM [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
    /// Form to write: hearth, csv, msr, alibaba, spc, blkparse, vscsi1, vscsi2 or oracle-general
    /// [default: csv if TO ends in .csv, else hearth]
    #[arg(long = "to", value_name = "FORM", value_parser = parse_output)]
    pub output: Option<hearth_trace::Format>,
    /// Only this disk of a trace with several, numbered from 0 in order of appearance
    #[arg(long, value_name = "N")]
    pub disk: Option<u32>,
}

#[derive(Clone, Debug, Args)]
pub struct TraceInfo {
    /// The trace
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Its form [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
}
