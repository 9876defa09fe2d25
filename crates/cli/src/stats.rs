//! `hearth stats`: what the cache does, for people.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::Duration;

use hearth_daemon::api::stats::{DiskReport, DiskSpan, LatencyReport, PoolReport, StatsReport};
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::error::Error;
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;

use crate::args::{Global, Stats};
use crate::interrupt::Interrupt;
use crate::table::{Table, cut, plain};
use crate::{Outcome, print_json};

/// Time between two pictures of `--watch`.
const REFRESH: Duration = Duration::from_secs(1);

pub fn run(global: &Global, args: Stats) -> Outcome {
    if let Some(since) = args.since {
        return crate::past::run(global, args.name.as_deref(), since);
    }
    let client = Client::new(&global.dir());
    if !args.watch {
        return once(global, &client, args.name.as_deref(), false);
    }
    let interrupt = Interrupt::watch();
    loop {
        once(global, &client, args.name.as_deref(), true)?;
        if interrupt.sleep(REFRESH) {
            return Ok(());
        }
    }
}

/// Pretty once, one object a line when watching.
fn json<T: serde::Serialize>(report: &T, watching: bool) -> Outcome {
    if !watching {
        return print_json(report);
    }
    let line = crate::table::json(report)
        .map_err(|e| Error::internal(format!("cannot print statistics as JSON: {e}")))?;
    println!("{line}");
    Ok(())
}

fn once(global: &Global, client: &Client, name: Option<&str>, watching: bool) -> Outcome {
    // Watched on a terminal, all of it stands on one screen.
    let screen = (watching && std::io::stdout().is_terminal()).then(Screen::here);
    // Home, and clear what is below: less flicker than clearing first.
    let prefix = screen.map_or("", |_| "\x1b[H\x1b[J");
    let text = match name {
        Some(name) => {
            let report: DiskReport = client.get(&disk_path(name, "/stats"))?;
            if global.json {
                return json(&report, watching);
            }
            disk(&report, screen)
        }
        None => {
            let report: StatsReport = client.get("/v1/stats")?;
            if global.json {
                return json(&report, watching);
            }
            all(&report, screen)
        }
    };
    let text = screen.map_or(text.clone(), |screen| screen.cut(&text));
    std::print!("{prefix}{}", crate::table::shown(&text));
    let _ = std::io::stdout().flush();
    Ok(())
}

/// The terminal that statistics are watched on.
#[derive(Clone, Copy, Debug)]
struct Screen {
    columns: usize,
    rows: usize,
}

impl Screen {
    fn here() -> Screen {
        match ratatui::crossterm::terminal::size() {
            Ok((columns, rows)) if columns > 0 && rows > 1 => Screen {
                columns: usize::from(columns),
                rows: usize::from(rows),
            },
            _ => Screen {
                columns: 80,
                rows: 24,
            },
        }
    }

    /// The first lines of a text, as wide as the screen. The last row is left to the cursor.
    fn cut(self, text: &str) -> String {
        let lines: Vec<&str> = text.lines().collect();
        let most = self.rows - 1;
        let shown = if lines.len() > most {
            most - 1
        } else {
            lines.len()
        };
        let mut out = String::new();
        for line in &lines[..shown] {
            let _ = writeln!(out, "{}", cut(line, self.columns));
        }
        if lines.len() > shown {
            let _ = writeln!(out, "and {} more lines", lines.len() - shown);
        }
        out
    }
}

/// A ratio for people.
pub fn percent(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_owned(), |r| format!("{:.1} %", r * 100.0))
}

/// A table of latencies: name, requests, and mean, 50th, 90th, 99th, 99.9th percentile and
/// longest in microseconds, which say nothing if there was no request.
pub fn percentiles<'a>(
    heading: &str,
    lines: impl IntoIterator<Item = (&'a str, u64, [f64; 6])>,
) -> String {
    let mut table = Table::new(&[
        heading, ">COUNT", ">MEAN", ">50 %", ">90 %", ">99 %", ">99.9 %", ">MAX",
    ]);
    for (name, count, values) in lines {
        table.row(
            [name.to_owned(), count.to_string()]
                .into_iter()
                .chain(values.map(|us| micros((count > 0).then_some(us)))),
        );
    }
    table.render()
}

pub fn micros(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("{us:.0} µs"),
        Some(us) if us < 1_000_000.0 => format!("{:.1} ms", us / 1000.0),
        Some(us) => format!("{:.1} s", us / 1_000_000.0),
    }
}

/// Rows that are shown where there is no place for all.
const BRIEF: [&str; 11] = [
    "reads",
    "  hit ratio, requests",
    "  hit ratio, bytes",
    "writes",
    "origin reads",
    "origin writes",
    "errors to clients",
    "mean read",
    "  without cache, est.",
    "mean write",
    "helping?",
];

/// One column per span, one row per number; on a screen only the rows that matter most.
fn spans(spans: &[DiskSpan], screen: Option<Screen>) -> String {
    let headings: Vec<String> = std::iter::once(String::new())
        .chain(spans.iter().map(|s| format!(">{}", s.span)))
        .collect();
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let mut row = |name: &str, cell: &dyn Fn(&DiskSpan) -> String| {
        if screen.is_some() && !BRIEF.contains(&name) {
            return;
        }
        table.row(std::iter::once(name.to_owned()).chain(spans.iter().map(cell)));
    };
    row("reads", &|s| s.counters.reads().to_string());
    row("  hits", &|s| s.counters.read_hits.to_string());
    row("  partial hits", &|s| {
        s.counters.read_partial_hits.to_string()
    });
    row("  misses", &|s| s.counters.read_misses.to_string());
    row("  hit ratio, requests", &|s| {
        percent(s.ratios.read_hit_ratio)
    });
    row("  hit ratio, bytes", &|s| {
        percent(s.ratios.read_hit_ratio_bytes)
    });
    row("  from flash", &|s| human(s.counters.read_hit_bytes));
    row("    of that from RAM", &|s| {
        human(s.counters.stage_hit_bytes)
    });
    row("  from origin", &|s| human(s.counters.read_miss_bytes));
    row("  bypassed, sequential", &|s| {
        s.counters.bypassed_sequential.to_string()
    });
    row("  bypassed, congestion", &|s| {
        human(s.counters.bypassed_congested.saturating_mul(4096))
    });
    row("writes", &|s| s.counters.writes().to_string());
    row("  hits", &|s| s.counters.write_hits.to_string());
    row("  partial hits", &|s| {
        s.counters.write_partial_hits.to_string()
    });
    row("  misses", &|s| s.counters.write_misses.to_string());
    row("  bytes", &|s| human(s.counters.write_bytes));
    row("flushes", &|s| s.counters.flushes.to_string());
    row("fills", &|s| human(s.counters.fills.saturating_mul(4096)));
    row("  not admitted", &|s| {
        human(s.counters.fills_rejected.saturating_mul(4096))
    });
    row("read ahead", &|s| {
        human(s.counters.prefetched.saturating_mul(4096))
    });
    row("  used", &|s| {
        human(s.counters.prefetch_used.saturating_mul(4096))
    });
    row("evicted", &|s| {
        human(s.counters.evictions.saturating_mul(4096))
    });
    row("reinserted", &|s| {
        human(s.counters.reinsertions.saturating_mul(4096))
    });
    row("origin reads", &|s| s.counters.origin_reads.to_string());
    row("origin writes", &|s| s.counters.origin_writes.to_string());
    row("  failed write-backs", &|s| {
        s.counters.destage_errors.to_string()
    });
    row("errors to clients", &|s| s.counters.errors.to_string());
    row("mean read", &|s| micros(s.ratios.read_mean_us));
    row("  without cache, est.", &|s| {
        micros(s.ratios.uncached_read_us)
    });
    row("mean write", &|s| micros(s.ratios.write_mean_us));
    row("  without cache, est.", &|s| {
        micros(s.ratios.uncached_write_us)
    });
    row("helping?", &|s| helping(s.ratios.speedup));
    table.render()
}

pub fn helping(speedup: Option<f64>) -> String {
    match speedup {
        None => "not known yet".to_owned(),
        Some(x) if x >= 1.05 => format!("yes, {x:.1} x"),
        Some(x) if x > 0.95 => "no difference".to_owned(),
        Some(x) => format!("no, {x:.2} x"),
    }
}

fn latencies(report: &DiskReport) -> String {
    let mut table = Table::new(&[
        "latency", ">count", ">mean", ">50 %", ">90 %", ">99 %", ">99.9 %", ">max",
    ]);
    let mut row = |name: &str, l: &LatencyReport| {
        let value = |us: f64| {
            if l.count == 0 {
                "-".to_owned()
            } else {
                micros(Some(us))
            }
        };
        table.row([
            name.to_owned(),
            l.count.to_string(),
            value(l.mean_us),
            value(l.p50_us),
            value(l.p90_us),
            value(l.p99_us),
            value(l.p999_us),
            value(l.max_us),
        ]);
    };
    row("read hit", &report.read_hit_latency);
    row("read miss", &report.read_miss_latency);
    row("write hit", &report.write_hit_latency);
    row("write miss", &report.write_miss_latency);
    for window in &report.latencies {
        for (what, l) in [
            ("read hit", &window.read_hit),
            ("read miss", &window.read_miss),
            ("write hit", &window.write_hit),
            ("write miss", &window.write_miss),
        ] {
            // An hour in which nothing of the kind happened is no news.
            if l.count > 0 {
                row(&format!("{what}, {}", window.span), l);
            }
        }
    }
    table.render()
}

/// Says that a disk cannot be written back, if so.
fn trouble(out: &mut String, report: &DiskReport) {
    if let Some(t) = &report.cannot_write_back {
        let _ = writeln!(
            out,
            "{} CANNOT BE WRITTEN BACK for {}: {}; {} are only on flash",
            plain(&report.name),
            human_seconds(t.seconds),
            plain(&t.error),
            human(t.dirty)
        );
    }
}

fn disk(report: &DiskReport, screen: Option<Screen>) -> String {
    let mut out = String::new();
    let dirty_for = if report.dirty_for > 0.0 {
        format!(" for {}", human_seconds(report.dirty_for))
    } else {
        String::new()
    };
    let _ = writeln!(
        out,
        "disk {}: {} cached, {} dirty{dirty_for}",
        plain(&report.name),
        human(report.cached),
        human(report.dirty)
    );
    if report.behind >= 1.0 {
        let _ = writeln!(out, "its origin is {} behind", human_seconds(report.behind));
    }
    trouble(&mut out, report);
    out.push_str(&spans(&report.spans, screen));
    out.push('\n');
    out.push_str(&latencies(report));
    out
}

/// One line for each thread that is stuck.
pub fn stuck_threads(stuck: &[hearth_daemon::api::stats::StuckThread]) -> String {
    let line = |s: &hearth_daemon::api::stats::StuckThread| {
        format!(
            "STUCK: {} has not come round for {}; its clients get no answers\n",
            s.thread,
            human_seconds(s.seconds as f64)
        )
    };
    stuck.iter().map(line).collect()
}

fn pool(report: &PoolReport, screen: Option<Screen>) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "pool: {} of {} used, {} dirty, {} of {} segments free, {} RAM (stage {} of at most {}){}",
        human(report.cached),
        human(report.capacity),
        human(report.dirty),
        report.free_segments,
        report.segments,
        human(report.ram),
        human(report.ram_stage),
        human(report.ram_stage_most),
        if report.flash_failed {
            "; THE FLASH HAS FAILED, disks go on from their origins"
        } else {
            ""
        },
    );
    for notice in &report.notices {
        let _ = writeln!(out, "warning: {}", plain(notice));
    }
    out.push_str(&stuck_threads(&report.stuck));
    if screen.is_some() {
        return out;
    }
    let headings: Vec<String> = std::iter::once(String::new())
        .chain(report.spans.iter().map(|s| format!(">{}", s.span)))
        .collect();
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let mut row = |name: &str, cell: &dyn Fn(&hearth_daemon::api::stats::FlashSpan) -> String| {
        table.row(std::iter::once(name.to_owned()).chain(report.spans.iter().map(cell)));
    };
    row("flash written", &|s| human(s.counters.flash_write_bytes));
    row("  client data and fills", &|s| {
        human(s.counters.flash_payload_bytes)
    });
    row("  write amplification", &|s| {
        s.write_amplification
            .map_or("-".to_owned(), |r| format!("{r:.2}"))
    });
    row("flash read", &|s| human(s.counters.flash_read_bytes));
    row("flash flushes", &|s| s.counters.flash_flushes.to_string());
    row("flash errors", &|s| s.counters.flash_errors.to_string());
    out.push_str(&table.render());
    out
}

fn all(report: &StatsReport, screen: Option<Screen>) -> String {
    let mut out = format!("serving for {}\n", human_seconds(report.uptime as f64));
    out.push_str(&pool(&report.pool, screen));
    if report.disks.is_empty() {
        out.push_str("\nno disks\n");
        return out;
    }
    for d in &report.disks {
        trouble(&mut out, d);
    }
    out.push_str("\nall disks\n");
    out.push_str(&spans(&report.pool.disks, screen));
    out.push('\n');
    let mut table = Table::new(&[
        "DISK",
        ">CACHED",
        ">DIRTY",
        ">READS",
        ">HIT",
        ">HIT BYTES",
        ">5MIN HIT",
        ">WRITES",
        "HELPING?",
    ]);
    for d in &report.disks {
        let total = d.spans.first();
        let recent = d.spans.get(1);
        table.row([
            plain(&d.name),
            human(d.cached),
            human(d.dirty),
            total.map_or(0, |s| s.counters.reads()).to_string(),
            percent(total.and_then(|s| s.ratios.read_hit_ratio)),
            percent(total.and_then(|s| s.ratios.read_hit_ratio_bytes)),
            percent(recent.and_then(|s| s.ratios.read_hit_ratio)),
            total.map_or(0, |s| s.counters.writes()).to_string(),
            helping(total.and_then(|s| s.ratios.speedup)),
        ]);
    }
    out.push_str(&table.render());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_daemon_has_something_to_show() {
        let report = StatsReport {
            disks: vec![DiskReport::default()],
            ..StatsReport::default()
        };
        let text = all(&report, None);
        assert!(text.contains("pool: 0 B of 0 B used"), "{text}");
        assert!(!text.contains("NaN"), "{text}");
    }

    #[test]
    fn watched_statistics_fit_the_screen() {
        let screen = Screen {
            columns: 80,
            rows: 24,
        };
        let disk_of = |n: usize| DiskReport {
            name: format!("a-disk-with-a-long-name-{n}"),
            spans: vec![DiskSpan::default(); 4],
            ..DiskReport::default()
        };
        for disks in [0, 1, 4, 300] {
            let mut report = StatsReport {
                disks: (0..disks).map(disk_of).collect(),
                ..StatsReport::default()
            };
            report.pool.disks = vec![DiskSpan::default(); 4];
            let text = screen.cut(&all(&report, Some(screen)));
            let fits = text.lines().all(|l| l.chars().count() <= 80);
            assert!(text.lines().count() < 24 && fits, "{disks}:\n{text}");
            assert!(disks == 0 || text.contains("helping?"), "{text}");
            assert!(
                disks == 0 || text.contains("a-disk-with-a-long-name-0"),
                "{text}"
            );
            assert_eq!(disks == 300, text.contains(" more lines"), "{text}");
        }
        let text = screen.cut(&disk(&disk_of(1), Some(screen)));
        assert!(
            text.lines().count() < 24 && text.contains("write miss"),
            "{text}"
        );
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(percent(Some(0.1234)), "12.3 %");
        assert_eq!(micros(Some(1500.0)), "1.5 ms");
        assert_eq!(helping(Some(4.02)), "yes, 4.0 x");
        assert_eq!(helping(Some(1.0)), "no difference");
    }
}
