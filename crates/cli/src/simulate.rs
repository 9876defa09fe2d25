//! `hearth simulate`: what would a cache of this size and policy have done?

use std::sync::Mutex;

use hearth_daemon::error::Error;
use hearth_daemon::size;
use hearth_policy::{Budget, Config};
use hearth_simulate::device::Device;
use hearth_simulate::twin::{Disk, Freed};
use hearth_simulate::{Model, Policy, Row, Settings, Size, Workload, WriteMode, matrix, plot};
use hearth_trace::{BLOCK, Options, Reader, sparkline};

use crate::args::{Global, Log, Simulate, WriteTo};
use crate::status::StatusLine;
use crate::table::Table;
use crate::trace::{QUIET, failed_in, reading, torn_words};
use crate::{Outcome, print_json};

pub fn run(global: &Global, args: &Simulate) -> Outcome {
    let sizes = args
        .size
        .iter()
        .map(|s| cache_size(s))
        .collect::<Result<Vec<Size>, Error>>()?;
    let policies = policies(&args.policy)?;
    let settings = Settings {
        write_mode: match args.write_mode {
            WriteTo::Through => WriteMode::Through,
            WriteTo::Back => WriteMode::Back,
            WriteTo::Around => WriteMode::Around,
        },
        model: Model::Engine(disk(args)?),
        budget: args
            .flash_rate
            .map_or_else(Budget::unlimited, |s| Budget::bytes_per_second(s.0)),
        parts: usize::from(args.parts),
        ..Settings::default()
    };
    let threads = args.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        usize::from,
    );
    let mut rows: Vec<Row> = Vec::new();
    // The simulator tells from its own threads.
    let line = Mutex::new(StatusLine::new(!global.json).quiet_for(QUIET));
    let show = |text: &dyn Fn() -> String| {
        if let Ok(mut line) = line.lock() {
            line.show(text);
        }
    };
    // One trace at a time in memory.
    for path in &args.traces {
        let options = Options {
            format: args.format,
        };
        let name = path
            .file_name()
            .map_or_else(|| "stdin".into(), |n| n.to_string_lossy());
        let load = Reader::open(path, options)
            .and_then(|reader| Workload::load(&name, reader, |n| show(&|| reading(path, n))))
            .map_err(|e| failed_in(path, &e))?;
        if let Some(record) = load.torn {
            eprintln!("note: {}: {}", path.display(), torn_words(record));
        }
        let told = |done, all| {
            show(&|| format!("{}: {done} of {all} rows simulated", path.display()));
        };
        rows.extend(matrix(&[load], &sizes, &policies, &settings, threads, told));
    }
    if let Ok(mut line) = line.lock() {
        line.end();
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, plot::svg(&rows)).map_err(|e| {
            Error::invalid(
                format!("the plot {} cannot be written: {e}", path.display()),
                "give a path that can be written",
            )
        })?;
    }
    if global.json {
        return print_json(&rows);
    }
    print!("{}", table(&rows));
    println!(
        "\nThe disk is a model: {} µs to get to a place, {} a second from there. Its time for reads, those ahead among them, is compared with that without a cache.",
        args.disk_access,
        size::human(args.disk_rate.0)
    );
    if let Some(largest) = rows.iter().map(|r| r.blocks).max() {
        println!(
            "Hearth's RAM stage is as large as pays, in the largest of these caches up to {}.",
            size::human(Config::stage_most_of(largest) as u64 * BLOCK)
        );
    }
    Ok(())
}

/// A disk with these settings.
fn disk(args: &Simulate) -> Result<Disk, Error> {
    let block_size = args.block_size.0;
    if !block_size.is_power_of_two() || !(BLOCK..=1 << 20).contains(&block_size) {
        return Err(Error::invalid(
            format!("the cache block size {block_size} is no power of two from 4K to 1M"),
            "choose 4K, 8K, 16K, 32K, 64K, 128K, 256K, 512K or 1M",
        ));
    }
    Ok(Disk {
        seq_cutoff: args.seq_cutoff.0,
        block_size,
        min: args.min.0,
        max: args.max.0,
        segments: args.segments,
        reserve: args.reserve,
        freed: match args.log {
            Log::Oldest => Freed::Oldest,
            Log::Cleaned => Freed::default(),
        },
        device: Device {
            access_us: args.disk_access,
            rate: args.disk_rate.0,
        },
        depth: usize::from(args.in_flight),
    })
}

fn cache_size(text: &str) -> Result<Size, Error> {
    let wrong = |why: String| {
        Error::invalid(
            format!("the cache size “{text}” is not understood: {why}"),
            "write a share such as 5% or a size such as 20G",
        )
    };
    if let Some(share) = text.trim().strip_suffix('%') {
        let share: f64 = share
            .parse()
            .map_err(|_| wrong("it is not a number".to_owned()))?;
        if !(share > 0.0 && share <= 1000.0) {
            return Err(wrong("a share is above 0 and at most 1000 %".to_owned()));
        }
        return Ok(Size::Fraction(share / 100.0));
    }
    let bytes = size::parse(text).map_err(|e| wrong(e.fault().what))?;
    let blocks = bytes / BLOCK;
    /// Blocks that block numbers of 32 bits can tell apart: 16 TiB.
    const MOST: u64 = u32::MAX as u64;
    if blocks == 0 || blocks > MOST {
        return Err(wrong("it must be from 4K to 16T".to_owned()));
    }
    Ok(Size::Blocks(blocks as usize))
}

fn policies(names: &[String]) -> Result<Vec<Policy>, Error> {
    let mut out: Vec<Policy> = Vec::new();
    for name in names {
        let more = if name == "all" {
            Policy::all()
        } else {
            let known = || {
                let names: Vec<&str> = Policy::all().iter().map(|p| p.name()).collect();
                names.join(", ")
            };
            vec![Policy::named(name).ok_or_else(|| {
                Error::invalid(
                    format!("there is no policy “{name}”"),
                    format!("choose all or from {}", known()),
                )
            })?]
        };
        for policy in more {
            if !out.contains(&policy) {
                out.push(policy);
            }
        }
    }
    Ok(out)
}

fn table(rows: &[Row]) -> String {
    let percent = |part: f64| format!("{:.2}", part * 100.0);
    let parts = rows.iter().any(|r| !r.parts.is_empty());
    let mut headings = vec![
        "TRACE",
        ">CACHE",
        "POLICY",
        ">READ HIT %",
        ">ALL HIT %",
        ">PREFETCH HIT %",
        ">DISK TIME SAVED %",
        ">FLASH BLOCKS WRITTEN",
    ];
    if parts {
        headings.push("HITS OVER TIME");
    }
    let mut table = Table::new(&headings);
    for r in rows {
        let o = &r.outcome;
        let of_reads = |n: u64| {
            if o.reads == 0 {
                "-".to_owned()
            } else {
                percent(n as f64 / o.reads as f64)
            }
        };
        let mut cells = vec![
            crate::table::plain(&r.trace),
            if r.fraction > 0.0 {
                format!("{} %", (r.fraction * 1000.0).round() / 10.0)
            } else {
                size::human(r.blocks as u64 * BLOCK)
            },
            r.policy.to_owned(),
            of_reads(o.read_hits),
            percent(r.hit_ratio),
            of_reads(o.prefetch_hits),
            match o.bare_disk_us {
                0 => "-".to_owned(),
                _ => percent(r.disk_time_saved),
            },
            r.flash_writes.to_string(),
        ];
        if parts {
            let scaled: Vec<u64> = r.parts.iter().map(|p| (p * 1000.0) as u64).collect();
            // The last value fixes the scale to one hundred percent.
            let bars = sparkline(&[&scaled[..], &[1000]].concat());
            cells.push(bars.chars().take(scaled.len()).collect());
        }
        table.row(cells);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shares_or_bytes() {
        assert!(matches!(cache_size("5%"), Ok(Size::Fraction(f)) if (f - 0.05).abs() < 1e-9));
        assert!(matches!(cache_size("1M"), Ok(Size::Blocks(256))));
        for wrong in ["", "x%", "0%", "-1%", "5", "20T", "NaN%"] {
            assert!(cache_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn policies_are_named_once() {
        let all = policies(&["all".to_owned(), "lru".to_owned()]);
        assert_eq!(all.map(|p| p.len()).ok(), Some(Policy::all().len()));
        assert!(policies(&["fifo2".to_owned()]).is_err());
    }
}
