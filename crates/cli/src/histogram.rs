//! `hearth histogram`: what a guest does to a disk, for people and for vscsiStats' scripts.

use std::fmt::Write as _;

use hearth_daemon::api::workload::{FineLatency, HistogramInfo, HistogramReport};
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;

use crate::args::{Global, Histogram};
use crate::stats::{micros, percentiles};
use crate::table::{Table, plain};
use crate::{Outcome, print_json};

/// Characters of a bar that means all requests of a histogram.
const BAR: u64 = 30;

pub fn run(global: &Global, args: &Histogram) -> Outcome {
    let client = Client::new(&global.dir());
    let report: HistogramReport = if args.reset {
        client.order(&disk_path(&args.name, "/histogram/reset"))?
    } else {
        client.get(&disk_path(&args.name, "/histogram"))?
    };
    if global.json {
        return print_json(&report);
    }
    if args.csv {
        print!("{}", report.csv());
        return Ok(());
    }
    print!("{}", text(&report));
    if args.reset {
        println!("\ncounting begins anew");
    }
    Ok(())
}

/// Where the histograms of a kind are: all, reads and writes are neighbours in vscsiStats' order.
const KINDS: [(&str, usize, Unit); 5] = [
    ("REQUEST LENGTH", 0, Unit::Bytes),
    ("DISTANCE, SECTORS", 3, Unit::Plain),
    ("LATENCY", 7, Unit::Micros),
    ("OUTSTANDING", 10, Unit::Plain),
    ("TIME SINCE LAST", 13, Unit::Micros),
];
/// Its one histogram is of all requests.
const CLOSEST: (&str, usize) = ("FROM CLOSEST OF 16", 6);

#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Plain,
    Micros,
}

impl Unit {
    fn show(self, value: i64) -> String {
        match self {
            Unit::Bytes => match u64::try_from(value) {
                // The limits one below a power of two keep their odd last digits.
                Ok(n) if n % 512 == 0 => human(n),
                _ => value.to_string(),
            },
            Unit::Plain => value.to_string(),
            Unit::Micros => micros(Some(value as f64)),
        }
    }
}

fn text(report: &HistogramReport) -> String {
    let mut out = String::new();
    let all = report.histograms.first().map_or(0, |h| h.count);
    let _ = writeln!(
        out,
        "disk {}: {all} reads and writes in {}",
        plain(&report.name),
        human_seconds(report.seconds)
    );
    if all == 0 {
        out.push_str("nothing has been asked of it yet\n");
        return out;
    }
    for (heading, at, unit) in KINDS {
        if let Some([all, reads, writes]) = report.histograms.get(at..at + 3) {
            out.push('\n');
            out.push_str(&table(heading, unit, all, Some((reads, writes))));
        }
    }
    if let Some(closest) = report.histograms.get(CLOSEST.1) {
        out.push('\n');
        out.push_str(&table(CLOSEST.0, Unit::Plain, closest, None));
    }
    out.push('\n');
    let line = |name, l: &FineLatency| {
        let values = [l.mean_us, l.p50_us, l.p90_us, l.p99_us, l.p999_us, l.max_us];
        (name, l.count, values)
    };
    out.push_str(&percentiles(
        "LATENCY",
        [
            line("reads", &report.read_latency),
            line("writes", &report.write_latency),
        ],
    ));
    out
}

/// The buckets from the first to the last that hold any.
fn table(
    heading: &str,
    unit: Unit,
    all: &HistogramInfo,
    split: Option<(&HistogramInfo, &HistogramInfo)>,
) -> String {
    let used = |i: &usize| all.buckets.get(*i).is_some_and(|b| b.count > 0);
    let first = (0..all.buckets.len()).find(used);
    let last = (0..all.buckets.len()).rev().find(used);
    let (Some(first), Some(last)) = (first, last) else {
        return format!("{heading}: nothing to count yet\n");
    };
    let mut headings = vec![format!(">{heading}")];
    headings.push(">ALL".to_owned());
    if split.is_some() {
        headings.extend([">READS".to_owned(), ">WRITES".to_owned()]);
    }
    headings.push(String::new());
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for i in first..=last {
        let Some(bucket) = all.buckets.get(i) else {
            break;
        };
        let limit = match bucket.up_to {
            Some(limit) => format!("to {}", unit.show(limit)),
            None => "more".to_owned(),
        };
        let mut row = vec![limit, bucket.count.to_string()];
        if let Some((reads, writes)) = split {
            let count = |h: &HistogramInfo| h.buckets.get(i).map_or(0, |b| b.count).to_string();
            row.extend([count(reads), count(writes)]);
        }
        row.push("█".repeat((bucket.count * BAR).div_ceil(all.count.max(1)) as usize));
        table.row(row);
    }
    table.row(["mean".to_owned(), unit.show(all.mean)]);
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::workload::Bucket;

    #[test]
    fn an_idle_disk_has_something_to_show() {
        let report = HistogramReport::new("a", 1, None);
        assert!(text(&report).contains("nothing has been asked"));
    }

    #[test]
    fn only_what_was_counted_is_shown() {
        let mut report = HistogramReport::new("a", 1, None);
        let length = &mut report.histograms[0];
        length.count = 3;
        length.mean = 4096;
        for bucket in &mut length.buckets {
            if bucket.up_to == Some(4096) {
                *bucket = Bucket {
                    count: 3,
                    ..*bucket
                };
            }
        }
        let text = text(&report);
        let line = text.lines().find(|l| l.contains("to 4 KiB"));
        assert!(
            line.is_some_and(|l| l.contains(" 3 ") && l.contains("██")),
            "{text}"
        );
        assert!(!text.contains("to 8191"), "{text}");
        assert!(text.contains("DISTANCE, SECTORS: nothing"), "{text}");
    }
}
