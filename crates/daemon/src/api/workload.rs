//! What guests do to a disk, as reported: vscsiStats' histograms, fine latencies, recordings.

use hearth_observe::{Counted, RecordingStatus};
use hearth_policy::Percentiles;
use hearth_policy::histogram::{Fine, Histogram};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::types::fields;

/// A bucket of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bucket {
    /// Largest value in it; absent in the last bucket, which has no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub up_to: Option<i64>,
    /// Values above the bucket before and up to `up_to`.
    pub count: u64,
}

/// One of vscsiStats' histograms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HistogramInfo {
    /// vscsiStats' title, unit included.
    pub title: String,
    /// Smallest value; 0 if there is none.
    pub min: i64,
    /// Largest value.
    pub max: i64,
    /// Mean, rounded towards zero.
    pub mean: i64,
    /// Values counted.
    pub count: u64,
    /// All buckets, empty ones included.
    pub buckets: Vec<Bucket>,
}

impl HistogramInfo {
    fn new(title: &str, h: &Histogram) -> HistogramInfo {
        HistogramInfo {
            title: title.to_owned(),
            min: h.min(),
            max: h.max(),
            mean: h.mean(),
            count: h.count(),
            buckets: h
                .buckets()
                .map(|(count, up_to)| Bucket { up_to, count })
                .collect(),
        }
    }
}

/// A bucket of fine latencies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FineBucket {
    /// Shortest latency in it, microseconds.
    pub from_us: f64,
    /// Latencies in it are below this, microseconds.
    pub below_us: f64,
    /// Requests.
    pub count: u64,
}

/// Latencies in log-linear buckets, eight per doubling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FineLatency {
    /// Requests.
    pub count: u64,
    /// Mean, microseconds.
    pub mean_us: f64,
    /// Median, microseconds; like the others the upper end of its bucket, an eighth too much at most.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Longest.
    pub max_us: f64,
    /// Buckets that hold any.
    pub buckets: Vec<FineBucket>,
}

impl From<&Fine> for FineLatency {
    fn from(fine: &Fine) -> FineLatency {
        let us = |ns: u64| ns as f64 / 1000.0;
        let mean = fine.mean_ns().unwrap_or(0.0) / 1000.0;
        let of = Percentiles::of(fine.count(), mean, us(fine.max_ns()), |share| {
            us(fine.quantile_ns(share))
        });
        FineLatency {
            count: of.count,
            mean_us: of.mean_us,
            p50_us: of.p50_us,
            p90_us: of.p90_us,
            p99_us: of.p99_us,
            p999_us: of.p999_us,
            max_us: of.max_us,
            buckets: fine
                .buckets()
                .map(|(count, from, to)| FineBucket {
                    from_us: us(from),
                    below_us: us(to),
                    count,
                })
                .collect(),
        }
    }
}

/// What was counted of a disk's requests, as the guest sent them: before the cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistogramReport {
    /// The disk.
    pub name: String,
    /// Its number within the pool.
    pub id: u16,
    /// Seconds counted: since the first request, or since the last reset.
    pub seconds: f64,
    /// vscsiStats' sixteen, in its order; none before the first request.
    pub histograms: Vec<HistogramInfo>,
    /// Latencies of reads.
    pub read_latency: FineLatency,
    /// Latencies of writes.
    pub write_latency: FineLatency,
}

impl HistogramReport {
    /// A report of what was counted, if anything.
    pub fn new(name: &str, id: u16, counted: Option<&Counted>) -> HistogramReport {
        let mut report = HistogramReport {
            name: name.to_owned(),
            id,
            ..HistogramReport::default()
        };
        let none = hearth_policy::histogram::Histograms::new();
        let histograms = counted.map_or(&none, |c| &c.histograms);
        report.seconds = counted.map_or(0.0, |c| c.seconds);
        report.histograms = histograms
            .all()
            .map(|(title, h)| HistogramInfo::new(title, h))
            .to_vec();
        report.read_latency = (&histograms.fine_reads).into();
        report.write_latency = (&histograms.fine_writes).into();
        report
    }

    /// All sixteen as vscsiStats prints them with `-c`, for spreadsheets and scripts written for
    /// it. Where it names the virtual machine and the virtual disk, the disk's number and name are.
    pub fn csv(&self) -> String {
        use std::fmt::Write as _;
        let name = self.name.replace([',', '\n', '\r'], " ");
        let mut out = String::new();
        for h in &self.histograms {
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "Histogram: {},virtual machine worldGroupID,{},virtual disk handleID,{} ({name})\n\
                 min,{}\nmax,{}\nmean,{}\ncount,{}\nFrequency,Histogram Bucket Limit",
                h.title, self.id, self.id, h.min, h.max, h.mean, h.count
            );
            let mut last = 0;
            for bucket in &h.buckets {
                // The bucket without a limit repeats the last one.
                last = bucket.up_to.unwrap_or(last);
                let _ = writeln!(out, "{},{last}", bucket.count);
            }
        }
        out
    }
}

/// A recording to begin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecordStart {
    /// File the daemon makes, as an absolute path; it must not be there yet, nor FILE.1.
    pub file: String,
    /// Seconds after which it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Most bytes it may take, FILE.1 included; at least 1 MiB, 1 GiB if absent. Beyond, the
    /// oldest requests are given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
}

/// A recording under way, or the last one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Recording {
    /// The file; older requests are in FILE.1 if it has come to that.
    pub file: String,
    /// It goes on.
    pub active: bool,
    /// Requests recorded.
    pub records: u64,
    /// Requests missing because the file was slower than they came.
    pub dropped: u64,
    /// Requests given up because of the size allowed.
    pub given_up: u64,
    /// Bytes in both files.
    pub bytes: u64,
    /// Seconds it has taken.
    pub seconds: f64,
    /// Why it ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What to do about that, if there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl From<RecordingStatus> for Recording {
    fn from(s: RecordingStatus) -> Recording {
        let (error, remedy) = fields(s.error);
        Recording {
            file: s.path.display().to_string(),
            active: s.active,
            records: s.records,
            dropped: s.dropped,
            given_up: s.rotated,
            bytes: s.bytes,
            seconds: s.seconds,
            error,
            remedy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_policy::histogram::{Histograms, Outstanding};

    #[test]
    fn csv_is_what_vscsistats_prints() {
        let mut histograms = Histograms::new();
        histograms.request(0, false, 0, 512, Outstanding::default());
        histograms.done(false, 250_000);
        let counted = Counted {
            histograms,
            seconds: 1.0,
        };
        let report = HistogramReport::new("vm1", 7, Some(&counted));
        let csv = report.csv();
        assert!(csv.starts_with(
            "Histogram: IO lengths of commands,virtual machine worldGroupID,7,virtual disk handleID,7 (vm1)\n\
             min,512\nmax,512\nmean,512\ncount,1\nFrequency,Histogram Bucket Limit\n1,512\n0,1024\n"
        ));
        assert!(csv.contains("\n0,524288\n0,524288\nHistogram: "));
        assert_eq!(csv.matches("Histogram: ").count(), 16);
        assert_eq!(report.read_latency.p99_us, 250.0);
    }

    #[test]
    fn an_idle_disk_has_empty_histograms() {
        let report = HistogramReport::new("a", 1, None);
        assert_eq!(report.histograms.len(), 16);
        assert!(report.histograms.iter().all(|h| h.count == 0));
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(
            serde_json::from_str::<HistogramReport>(&text).unwrap(),
            report
        );
    }
}
