//! What disks did between two looks at their counters.

use std::time::Instant;

use hearth_daemon::api::stats::{Counters, DiskReport, StatsReport};
use hearth_daemon::windows::Since;
use serde::Serialize;

/// What the daemon told, and when.
pub struct Look {
    at: Instant,
    report: StatsReport,
}

impl Look {
    pub fn new(at: Instant, report: StatsReport) -> Look {
        Look { at, report }
    }
}

/// A disk between two looks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub reads_per_second: f64,
    pub writes_per_second: f64,
    pub read_bytes_per_second: f64,
    pub write_bytes_per_second: f64,
    /// Of the reads in between.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_hit_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_mean_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_mean_us: Option<f64>,
    pub cached: u64,
    pub dirty: u64,
}

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Between the looks.
    pub seconds: f64,
    pub uptime: u64,
    pub capacity: u64,
    pub cached: u64,
    pub dirty: u64,
    pub disks: Vec<Row>,
}

fn total(disk: &DiskReport) -> Counters {
    disk.spans.first().map(|s| s.counters).unwrap_or_default()
}

impl Sample {
    /// What happened from one look to the next. A daemon that was started in between counts from nothing.
    pub fn between(before: &Look, now: &Look) -> Sample {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64();
        let rate = |count: u64| {
            if seconds > 0.0 {
                count as f64 / seconds
            } else {
                0.0
            }
        };
        let anew = now.report.uptime < before.report.uptime;
        let row = |disk: &DiskReport| {
            let earlier = before.report.disks.iter().find(|d| d.name == disk.name);
            let then = match earlier {
                Some(earlier) if !anew => total(earlier),
                // What it did before is not what it does now.
                None if !anew => total(disk),
                _ => Counters::default(),
            };
            let counted = total(disk).since(&then);
            let ratios = counted.ratios(&counted);
            Row {
                name: disk.name.clone(),
                reads_per_second: rate(counted.reads()),
                writes_per_second: rate(counted.writes()),
                read_bytes_per_second: rate(counted.read_hit_bytes + counted.read_miss_bytes),
                write_bytes_per_second: rate(counted.write_bytes),
                read_hit_ratio: ratios.read_hit_ratio,
                read_mean_us: ratios.read_mean_us,
                write_mean_us: ratios.write_mean_us,
                cached: disk.cached,
                dirty: disk.dirty,
            }
        };
        Sample {
            seconds,
            uptime: now.report.uptime,
            capacity: now.report.pool.capacity,
            cached: now.report.pool.cached,
            dirty: now.report.pool.dirty,
            disks: now.report.disks.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::stats::DiskSpan;
    use std::time::Duration;

    fn look(at: Instant, uptime: u64, disks: &[(&str, u64)]) -> Look {
        let disk = |(name, hits): &(&str, u64)| DiskReport {
            name: (*name).to_owned(),
            spans: vec![DiskSpan {
                counters: Counters {
                    read_hits: *hits,
                    read_misses: *hits,
                    ..Counters::default()
                },
                ..DiskSpan::default()
            }],
            ..DiskReport::default()
        };
        let report = StatsReport {
            uptime,
            disks: disks.iter().map(disk).collect(),
            ..StatsReport::default()
        };
        Look::new(at, report)
    }

    #[test]
    fn rates_are_of_what_was_counted_in_between() {
        let begin = Instant::now();
        let later = begin + Duration::from_secs(2);
        let before = look(begin, 10, &[("a", 100)]);
        let sample = Sample::between(&before, &look(later, 12, &[("a", 150), ("b", 7)]));
        assert_eq!(sample.disks[0].reads_per_second, 50.0);
        assert_eq!(sample.disks[0].read_hit_ratio, Some(0.5));
        // One that has just come did all that before, for all we know.
        assert_eq!(sample.disks[1].reads_per_second, 0.0);
        // A daemon that began anew counts from nothing, and never backwards.
        let sample = Sample::between(&before, &look(later, 1, &[("a", 4)]));
        assert_eq!(sample.disks[0].reads_per_second, 4.0);
        let sample = Sample::between(&before, &look(begin, 10, &[("a", 100)]));
        assert_eq!(sample.disks[0].reads_per_second, 0.0);
    }
}
