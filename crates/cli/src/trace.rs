//! `hearth trace convert|info`: traces from elsewhere, converted and summed up. No daemon is asked.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_daemon::error::{Error, Kind};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_fault::Fault;
use hearth_trace::{
    Bin, Format, Info, Lost, Options, Reader, Summary, TraceError, Writer, sparkline,
};

use crate::args::{Global, Trace, TraceConvert, TraceInfo};
use crate::interrupt::Interrupt;
use crate::stats::{micros, percent};
use crate::status::StatusLine;
use crate::table::Table;
use crate::{Failure, Outcome, print_json};

/// How long a trace may be read before anything is said about it.
pub const QUIET: Duration = Duration::from_secs(1);
/// Records between two looks at the clock and at Ctrl-C.
const LOOK_EVERY: u64 = 1 << 12;

/// How far the reading of a trace is.
pub fn reading(path: &Path, records: u64) -> String {
    format!("{}: {records} records read", path.display())
}

/// A trace's error as one for the user.
pub fn failed(error: &TraceError) -> Error {
    Error::of(Kind::Invalid, error.fault())
}

/// The same, of a trace the user named: with several, the sentence alone would not say which.
pub fn failed_in(path: &Path, error: &TraceError) -> Error {
    match error {
        // It names the file.
        TraceError::Open { .. } => failed(error),
        _ => Error::of(Kind::Invalid, error.fault().within(path.display())),
    }
}

/// What to say of a trace without its end.
pub fn torn_words(record: u64) -> String {
    format!(
        "the trace ended in an unfinished frame: record {record} and what followed in it are missing"
    )
}

pub fn run(global: &Global, command: Trace) -> Outcome {
    match command {
        Trace::Record(args) => crate::record::run(global, &args),
        Trace::Replay(args) => crate::replay::run(global, &args),
        Trace::Convert(args) => convert(global, &args),
        Trace::Info(args) => info(global, &args),
    }
}

#[derive(serde::Serialize)]
struct Converted {
    /// Records read, of the disk asked for.
    records: u64,
    form: &'static str,
    torn: bool,
    torn_at: Option<u64>,
    #[serde(flatten)]
    lost: Lost,
}

/// The form a file's name asks for.
fn form_of(to: &Path) -> Result<Format, Error> {
    let extension = to.extension().and_then(|e| e.to_str()).unwrap_or_default();
    match extension.to_ascii_lowercase().as_str() {
        "csv" => Ok(Format::Csv),
        "gz" | "zst" => Err(Error::invalid(
            format!("{} would not be compressed, as its name says", to.display()),
            "write to - and send that through gzip or zstd, or name the form with --to",
        )),
        _ => Ok(Format::Hearth),
    }
}

/// A file that stands under its name only once it is whole; given up, it is removed.
struct Unfinished {
    part: PathBuf,
    to: PathBuf,
}

impl Unfinished {
    /// Makes the file under the name it has until it is whole.
    fn make(to: &Path) -> Result<(Unfinished, std::fs::File), Error> {
        let cannot = |e: std::io::Error| {
            Error::invalid(
                format!("{} cannot be made: {e}", to.display()),
                "give the name of a file that is not there yet",
            )
        };
        if to.symlink_metadata().is_ok() {
            return Err(cannot(std::io::ErrorKind::AlreadyExists.into()));
        }
        let mut part = to.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let file = std::fs::File::create_new(&part).map_err(|e| {
            Error::invalid(
                format!("{} cannot be made: {e}", part.display()),
                "remove what a killed run left, or give another name",
            )
        })?;
        let to = to.to_owned();
        Ok((Unfinished { part, to }, file))
    }

    /// Gives the file its name.
    fn whole(self) -> Result<(), Error> {
        std::fs::rename(&self.part, &self.to).map_err(|e| {
            Error::invalid(
                format!("{} cannot be made: {e}", self.to.display()),
                "give a name in a directory that can be written",
            )
        })
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // It is not there once it has its name.
        let _ = std::fs::remove_file(&self.part);
    }
}

fn convert(global: &Global, args: &TraceConvert) -> Outcome {
    let options = Options {
        format: args.format,
    };
    let form = args.output.map_or_else(|| form_of(&args.to), Ok)?;
    let mut reader = Reader::open(&args.from, options).map_err(|e| failed_in(&args.from, &e))?;
    let stdout = args.to == Path::new("-");
    let interrupt = Interrupt::watch();
    let (unfinished, out): (_, Box<dyn Write>) = if stdout {
        (None, Box::new(std::io::stdout()))
    } else {
        let (unfinished, file) = Unfinished::make(&args.to)?;
        (Some(unfinished), Box::new(file))
    };
    let mut line = StatusLine::new(!global.json).quiet_for(QUIET);
    let mut writer = Writer::new(BufWriter::new(out), form).map_err(|e| failed(&e))?;
    let mut records = 0;
    for (at, record) in (1u64..).zip(reader.by_ref()) {
        let mut record = record.map_err(|e| failed_in(&args.from, &e))?;
        if at.is_multiple_of(LOOK_EVERY) {
            if interrupt.hit() {
                return Err(Failure::Interrupted(Fault::bare(
                    "called off before the end of the trace",
                )));
            }
            line.show(|| reading(&args.from, at));
        }
        if let Some(disk) = args.disk {
            if record.disk != disk {
                continue;
            }
            record.disk = 0;
        }
        writer.push(record).map_err(|e| failed(&e))?;
        records += 1;
    }
    line.end();
    let lost = writer.lost();
    writer.finish().map_err(|e| failed(&e))?;
    unfinished.map_or(Ok(()), Unfinished::whole)?;
    let torn_at = reader.torn();
    let mut notes = Vec::new();
    if lost.left_out > 0 {
        notes.push(format!(
            "{} discards or flushes left out, which {form} has no place for",
            lost.left_out
        ));
    }
    if lost.widened > 0 {
        notes.push(format!(
            "{} requests widened to {form}'s units",
            lost.widened
        ));
    }
    notes.extend(torn_at.map(torn_words));
    if stdout {
        notes.iter().for_each(|note| eprintln!("note: {note}"));
        return Ok(());
    }
    if global.json {
        return print_json(&Converted {
            records,
            form: form.name(),
            torn: torn_at.is_some(),
            torn_at,
            lost,
        });
    }
    println!(
        "{} records written to {} as {form}",
        records - lost.left_out,
        args.to.display()
    );
    notes.iter().for_each(|note| println!("note: {note}"));
    Ok(())
}

#[derive(serde::Serialize)]
struct Informed {
    #[serde(flatten)]
    sum: Summary,
    /// The trace ended in an unfinished frame, which began with record `torn_at`.
    torn: bool,
    torn_at: Option<u64>,
    /// The kind of blkparse's events that were counted, if there are no queue events.
    #[serde(skip_serializing_if = "Option::is_none")]
    counted_event: Option<char>,
}

fn info(global: &Global, args: &TraceInfo) -> Outcome {
    let options = Options {
        format: args.format,
    };
    let failed = |e| failed_in(&args.trace, &e);
    let mut reader = Reader::open(&args.trace, options).map_err(failed)?;
    let mut info = Info::new();
    let mut line = StatusLine::new(!global.json).quiet_for(QUIET);
    for (at, record) in (1u64..).zip(reader.by_ref()) {
        info.add(&record.map_err(failed)?);
        if at.is_multiple_of(LOOK_EVERY) {
            line.show(|| reading(&args.trace, at));
        }
    }
    line.end();
    let sum = info.summary();
    let torn_at = reader.torn();
    if global.json {
        return print_json(&Informed {
            sum,
            torn: torn_at.is_some(),
            torn_at,
            counted_event: reader.other_event(),
        });
    }
    if let Some(record) = torn_at {
        println!("NOT WHOLE     {}", torn_words(record));
    }
    let operations = reader.format().has_operations();
    match reader.other_event() {
        Some(event) => println!(
            "form          {}: it has no queue (Q) events, so {event} events are counted",
            reader.format()
        ),
        None => println!("form          {}", reader.format()),
    }
    println!("requests      {}", sum.requests);
    if operations {
        println!(
            "reads         {} ({}), {}",
            sum.reads,
            percent(Some(sum.read_share)),
            human(sum.read_bytes)
        );
        println!("writes        {}, {}", sum.writes, human(sum.written_bytes));
        if sum.discards + sum.flushes > 0 {
            println!("discards      {}, flushes {}", sum.discards, sum.flushes);
        }
        println!("duration      {}", lasted(sum.duration_us));
    }
    println!("disks         {}", sum.disks);
    println!(
        "working set   {} ({} blocks of 4 KiB)",
        human(sum.unique_blocks * 4096),
        sum.unique_blocks
    );
    println!(
        "reuse         {:.2} accesses per block; no cache without prefetch hits more than {}",
        sum.reuse,
        percent(Some(1.0 - 1.0 / sum.reuse.max(1.0)))
    );
    println!("unaligned     {}", percent(Some(sum.unaligned_share)));
    println!("sequential    {}", percent(Some(sum.sequential_share)));
    if operations {
        println!("over time     {}", sparkline(&sum.over_time));
    }
    println!();
    print!("{}", bars("SIZE UP TO", &sum.sizes, &sum));
    println!();
    print!("{}", bars("SEEK UP TO", &sum.seeks, &sum));
    Ok(())
}

/// A time span as everywhere: with a fraction below a minute.
fn lasted(us: u64) -> String {
    match us {
        0..60_000_000 => micros(Some(us as f64)),
        _ => human_seconds(us as f64 / 1e6),
    }
}

/// A histogram with a bar for each bucket.
fn bars(title: &str, bins: &[Bin], sum: &Summary) -> String {
    /// Characters of a bar that means all requests.
    const WIDTH: u64 = 40;
    let all = (sum.reads + sum.writes).max(1);
    let mut table = Table::new(&[&format!(">{title}"), ">REQUESTS", ""]);
    for bin in bins {
        let limit = bin.up_to.map_or_else(|| "more".to_owned(), human);
        let bar = "█".repeat((bin.count * WIDTH).div_ceil(all) as usize);
        table.row([limit, bin.count.to_string(), bar]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_is_in_it() {
        for (name, form) in [
            ("a.csv", Format::Csv),
            ("a.CSV", Format::Csv),
            ("a.trace", Format::Hearth),
            ("csv", Format::Hearth),
            ("-", Format::Hearth),
        ] {
            assert_eq!(form_of(Path::new(name)).ok(), Some(form), "{name}");
        }
        assert!(form_of(Path::new("a.csv.gz")).is_err());
    }

    #[test]
    fn time_spans_have_one_form() {
        assert_eq!(lasted(1500), "1.5 ms");
        assert_eq!(lasted(7_500_000_000), "2 h 5 min");
    }
}
