//! `hearth stats --since`: what the cache did, as far back as the second service remembers, over restarts.

use std::fmt::Write as _;

use hearth_daemon::api::stats::{Counters, Ratios};
use hearth_daemon::client::{Client, escape};
use hearth_daemon::error::Error;
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_events::time::{now_ms, utc};
use hearth_monitor::api::{HistoryInfo, HistorySum, HistorySums};
use hearth_monitor::dirs;
use serde::Serialize;

use crate::args::Global;
use crate::stats::{helping, micros, percent};
use crate::table::{Table, plain};
use crate::{Outcome, print_json};

/// Times of which one disk's table has a row each.
const ROWS: usize = 24;

/// What happened to something, with what that means.
#[derive(Serialize)]
struct Sum {
    #[serde(flatten)]
    sum: HistorySum,
    ratios: Ratios,
}

/// All of it, as JSON.
#[derive(Serialize)]
struct All {
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<Sum>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flash: Option<HistorySum>,
    disks: Vec<Sum>,
}

pub fn run(global: &Global, name: Option<&str>, since: f64) -> Outcome {
    let client = Client::new(&dirs::run_dir(&global.dir()));
    if !client.is_up() {
        return Err(Error::unavailable(
            "the past is kept by the second service, which is not running",
            "start it (systemctl start hearth-monitor, or hearth monitor), and ask again when it has seen something",
        )
        .into());
    }
    let since = since.ceil() as u64;
    match name {
        Some(name) => one(global, &client, name, since),
        None => all(global, &client, since),
    }
}

fn all(global: &Global, client: &Client, since: u64) -> Outcome {
    let sums: HistorySums = client.get(&format!("/v1/history/disks?since={since}"))?;
    if global.json {
        let sum = |sum: HistorySum| Sum {
            ratios: ratios(&sum),
            sum,
        };
        return print_json(&All {
            pool: sums.pool.map(sum),
            flash: sums.flash,
            disks: sums.disks.into_iter().map(sum).collect(),
        });
    }
    print!("{}", text(&sums, since));
    Ok(())
}

/// The counters of these sums.
fn counters(counted: impl Fn(&str) -> u64) -> Counters {
    let (reads, hits) = (counted("reads"), counted("read_hits"));
    Counters {
        read_hits: hits,
        read_misses: reads.saturating_sub(hits),
        write_misses: counted("writes"),
        read_hit_bytes: counted("read_hit_bytes"),
        read_miss_bytes: counted("read_miss_bytes"),
        write_bytes: counted("write_bytes"),
        read_ns: counted("read_us").saturating_mul(1000),
        write_ns: counted("write_us").saturating_mul(1000),
        origin_reads: counted("origin_reads"),
        origin_read_ns: counted("origin_read_us").saturating_mul(1000),
        origin_writes: counted("origin_writes"),
        origin_write_ns: counted("origin_write_us").saturating_mul(1000),
        errors: counted("errors"),
        ..Counters::default()
    }
}

fn ratios(sum: &HistorySum) -> Ratios {
    let counters = counters(|name| sum.counted.get(name).copied().unwrap_or(0));
    Ratios {
        // Which writes were hits is not kept.
        write_hit_ratio: None,
        ..counters.ratios(&counters)
    }
}

fn row(name: String, counters: &Counters, cached: u64, dirty: u64) -> [String; 10] {
    let ratios = counters.ratios(counters);
    let read = counters.read_hit_bytes + counters.read_miss_bytes;
    [
        name,
        counters.reads().to_string(),
        percent(ratios.read_hit_ratio),
        human(read),
        micros(ratios.read_mean_us),
        counters.writes().to_string(),
        human(counters.write_bytes),
        human(cached),
        human(dirty),
        helping(ratios.speedup),
    ]
}

fn table(first: &str) -> Table {
    Table::new(&[
        first,
        ">READS",
        ">HIT",
        ">READ",
        ">MEAN READ",
        ">WRITES",
        ">WRITTEN",
        ">CACHED",
        ">DIRTY",
        "HELPING?",
    ])
}

fn nothing(since: u64) -> String {
    format!(
        "nothing is known of the last {}: the second service has not seen the daemon in that time\n",
        human_seconds(since as f64)
    )
}

fn text(sums: &HistorySums, since: u64) -> String {
    let Some(pool) = &sums.pool else {
        return nothing(since);
    };
    let mut out = format!(
        "from {}, {} of {} seen\n",
        utc(pool.from * 1000),
        human_seconds(pool.seconds),
        human_seconds(since as f64),
    );
    if let Some(flash) = &sums.flash {
        let written = flash.counted.get("flash_write_bytes").copied().unwrap_or(0);
        let _ = writeln!(out, "flash written: {}", human(written));
    }
    out.push('\n');
    let mut table = table("DISK");
    let whole = std::iter::once((pool, "all together".to_owned()));
    for (sum, name) in whole.chain(sums.disks.iter().map(|d| (d, plain(&d.name)))) {
        let counted = |name: &str| sum.counted.get(name).copied().unwrap_or(0);
        let counters = counters(counted);
        table.row(row(name, &counters, counted("cached"), counted("dirty")));
    }
    out.push_str(&table.render());
    out
}

fn one(global: &Global, client: &Client, name: &str, since: u64) -> Outcome {
    // As JSON it is for programs, which can do with more.
    let points = if global.json { 1000 } else { ROWS };
    let question = format!(
        "/v1/history?disk={}&since={since}&points={points}",
        escape(name)
    );
    let info: HistoryInfo = client.get(&question)?;
    if info.at.is_empty() {
        let known: HistorySums = client.get("/v1/history/disks?since=7776000")?;
        if !known.disks.iter().any(|d| d.name == name) {
            return Err(Error::new(
                hearth_daemon::error::Kind::NotFound,
                format!("nothing is known of a disk {name}"),
                "hearth stats --since 90d lists what is known",
            )
            .into());
        }
    }
    if global.json {
        return print_json(&info);
    }
    print!("{}", times(&info, since));
    Ok(())
}

fn times(info: &HistoryInfo, since: u64) -> String {
    if info.at.is_empty() {
        return nothing(since);
    }
    let mut table = table("FROM");
    let at = |name: &str, i: usize| {
        let column = info.columns.get(name);
        column.and_then(|c| c.get(i)).copied().unwrap_or(0)
    };
    for (i, begin) in info.at.iter().enumerate() {
        let counted = |name: &str| at(name, i);
        let counters = counters(counted);
        table.row(row(
            utc(begin * 1000),
            &counters,
            counted("cached"),
            counted("dirty"),
        ));
    }
    let seen: f64 = info.seconds.iter().sum();
    format!(
        "{} of {} seen, {} each, now {}\n\n{}",
        human_seconds(seen),
        human_seconds(since as f64),
        human_seconds(info.step as f64),
        utc(now_ms()),
        table.render()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(name: &str) -> HistorySum {
        let counted = [
            ("reads", 100),
            ("read_hits", 75),
            ("read_us", 100_000),
            ("origin_reads", 25),
            ("origin_read_us", 250_000),
            ("cached", 1 << 20),
        ];
        HistorySum {
            name: name.to_owned(),
            from: 951_782_400,
            seconds: 3600.0,
            counted: counted.map(|(n, c)| (n.to_owned(), c)).into(),
        }
    }

    #[test]
    fn a_day_in_a_table() {
        let sums = HistorySums {
            pool: Some(sum("-pool")),
            flash: None,
            disks: vec![sum("vm1")],
        };
        let text = text(&sums, 86_400);
        assert!(text.starts_with("from 2000-02-29T00:00:00Z, 1 h"), "{text}");
        let line = text.lines().find(|l| l.starts_with("vm1")).unwrap();
        for word in ["100", "75.0 %", "1.0 ms", "1 MiB", "yes, 10.0 x"] {
            assert!(line.contains(word), "{word}: {line}");
        }
        assert!(!text.contains("NaN") && !text.contains("-pool"), "{text}");
        assert!(super::text(&HistorySums::default(), 60).contains("nothing is known"));
    }

    #[test]
    fn one_disk_over_time() {
        let info = HistoryInfo {
            step: 3600,
            at: vec![951_782_400, 951_786_000],
            seconds: vec![3600.0, 10.0],
            columns: [
                ("reads", vec![10, 0]),
                ("read_hits", vec![5, 0]),
                ("writes", vec![0, 7]),
            ]
            .map(|(n, c)| (n.to_owned(), c))
            .into(),
        };
        let text = times(&info, 7200);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[3].starts_with("2000-02-29T00:00:00Z") && lines[3].contains("50.0 %"),
            "{text}"
        );
        assert!(
            lines[4].starts_with("2000-02-29T01:00:00Z") && lines[4].contains(" 7 "),
            "{text}"
        );
    }
}
