//! Statistics as reported: counters with their windows, ratios, latencies and the estimate of
//! whether the cache helps. Every name is defined in `docs/statistics.md`; a test compares.

use hearth_engine::FlashFault;
use hearth_engine::stats::{DiskCounters, DiskStats, Latencies, PoolCounters, PoolStats};
use hearth_engine::tally::Tally;
use hearth_policy::Percentiles;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::types::WriteBackTrouble;
use crate::windows::{SPANS, Since, Windows};

/// Operations on the origin below which their mean latency is no base for an estimate.
const ESTIMATE_MIN_OPS: u64 = 16;
const BLOCK: u64 = hearth_io::BLOCK;

/// Declares a struct of counters together with its differences and its source in the engine.
macro_rules! counters {
    ($(#[$doc:meta])* $name:ident from $source:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        pub struct $name { $($(#[$field_doc])* pub $field: u64,)* }

        impl $name {
            /// The counters' names, in order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
        }

        impl From<&$source> for $name {
            fn from(source: &$source) -> $name { $name { $($field: source.$field),* } }
        }

        impl Since for $name {
            fn since(&self, earlier: &$name) -> $name {
                $name { $($field: self.$field.saturating_sub(earlier.$field)),* }
            }
        }

        impl $name {
            /// Adds `other` to every counter.
            pub fn add(&mut self, other: &$name) { $(self.$field = self.$field.saturating_add(other.$field);)* }
        }
    };
}

counters! {
    /// Counters of a disk, or of all disks together. Requests are clients' requests.
    Counters from DiskCounters {
        /// Reads served wholly from flash.
        read_hits,
        /// Reads served partly from flash.
        read_partial_hits,
        /// Reads served by the origin alone.
        read_misses,
        /// Bytes read from flash or the RAM stage for clients.
        read_hit_bytes,
        /// Of these, bytes from the RAM stage.
        stage_hit_bytes,
        /// Bytes read from the origin for clients, without what larger cache blocks read around them.
        read_miss_bytes,
        /// Writes all of whose blocks were cached when they arrived.
        write_hits,
        /// Writes some of whose blocks were cached.
        write_partial_hits,
        /// Writes none of whose blocks was cached.
        write_misses,
        /// Bytes written by clients.
        write_bytes,
        /// Flush requests.
        flushes,
        /// Discard and write-zeroes requests.
        discards,
        /// Bytes discarded or zeroed.
        discard_bytes,
        /// Reads not cached because they belong to a long sequential stream.
        bypassed_sequential,
        /// Blocks cached and clean, yet read from the origin because flash was slower.
        bypassed_congested,
        /// Blocks read from the origin and put on flash.
        fills,
        /// Blocks read from the origin that policy kept off flash.
        fills_rejected,
        /// Blocks read from the origin ahead of their use.
        prefetched,
        /// Of these, blocks a client read.
        prefetch_used,
        /// Of the used ones, blocks still on their way when a client asked for them.
        prefetch_late,
        /// Blocks read ahead and given up without a use.
        prefetch_wasted,
        /// Fills given up because a write overtook them.
        fills_cancelled,
        /// Clean blocks dropped to make room.
        evictions,
        /// Blocks written to flash again because they had earned it or were dirty.
        reinsertions,
        /// Blocks written to the origin by the destager.
        destaged,
        /// Times the destager could not write a run of blocks, or flush, and left them dirty.
        destage_errors,
        /// Reads of the origin.
        origin_reads,
        /// Bytes read from the origin.
        origin_read_bytes,
        /// Writes to the origin.
        origin_writes,
        /// Bytes written to the origin.
        origin_write_bytes,
        /// Flushes of the origin.
        origin_flushes,
        /// Failed operations on the origin.
        origin_errors,
        /// Clean blocks that failed their checksum; read again from the origin.
        bad_clean_blocks,
        /// Dirty blocks that failed their checksum: lost.
        bad_dirty_blocks,
        /// Requests answered with an error.
        errors,
        /// Nanoseconds spent in reads of the origin.
        origin_read_ns,
        /// Nanoseconds spent in reads that did not fail, as clients saw it.
        read_ns,
        /// Nanoseconds spent in writes, as clients saw it.
        write_ns,
        /// Nanoseconds spent in writes to the origin.
        origin_write_ns,
    }
}

counters! {
    /// Counters of the pool's flash.
    FlashCounters from PoolCounters {
        /// Bytes written to flash, everything included.
        flash_write_bytes,
        /// Bytes of client writes and fills among them.
        flash_payload_bytes,
        /// Bytes written again among them.
        flash_reinsert_bytes,
        /// Bytes read from flash.
        flash_read_bytes,
        /// Batches appended to the log.
        batches,
        /// Flushes of the flash device.
        flash_flushes,
        /// Segments filled.
        segments_sealed,
        /// Segments freed.
        segments_freed,
        /// Failed operations on flash.
        flash_errors,
    }
}

/// What the counters of one span of time say. Absent where there is nothing to divide by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ratios {
    /// Reads: hits / all, by requests; a partial hit is no hit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_hit_ratio: Option<f64>,
    /// Reads: bytes from flash / all bytes read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_hit_ratio_bytes: Option<f64>,
    /// Writes: hits / all, by requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_hit_ratio: Option<f64>,
    /// Mean latency of reads, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_mean_us: Option<f64>,
    /// Mean latency of writes, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_mean_us: Option<f64>,
    /// Estimated mean latency of reads without the cache, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncached_read_us: Option<f64>,
    /// Estimated mean latency of writes without the cache, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncached_write_us: Option<f64>,
    /// Estimated time without the cache / time with it; above 1 the cache helps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speedup: Option<f64>,
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Counters {
    /// All reads.
    pub fn reads(&self) -> u64 {
        self.read_hits + self.read_partial_hits + self.read_misses
    }

    /// All writes.
    pub fn writes(&self) -> u64 {
        self.write_hits + self.write_partial_hits + self.write_misses
    }

    /// Ratios and means; `base` are counters over a longer time, whose origin latencies are
    /// used where this span has too few of its own.
    pub fn ratios(&self, base: &Counters) -> Ratios {
        let mean_us = |ns: u64, n: u64| ratio(ns, n).map(|v| v / 1000.0);
        let origin_mean = |ns: fn(&Counters) -> u64, n: fn(&Counters) -> u64| {
            let source = [self, base]
                .into_iter()
                .find(|c| n(c) >= ESTIMATE_MIN_OPS)?;
            mean_us(ns(source), n(source))
        };
        let (reads, writes) = (self.reads(), self.writes());
        let uncached_read_us =
            origin_mean(|c| c.origin_read_ns, |c| c.origin_reads).filter(|_| reads > 0);
        let uncached_write_us =
            origin_mean(|c| c.origin_write_ns, |c| c.origin_writes).filter(|_| writes > 0);
        // A side without an estimate counts as neither helped nor hurt.
        let with = (self.read_ns + self.write_ns) as f64 / 1000.0;
        let without = uncached_read_us.map_or(self.read_ns as f64 / 1000.0, |us| us * reads as f64)
            + uncached_write_us.map_or(self.write_ns as f64 / 1000.0, |us| us * writes as f64);
        let known = uncached_read_us.is_some() || uncached_write_us.is_some();
        Ratios {
            read_hit_ratio: ratio(self.read_hits, reads),
            read_hit_ratio_bytes: ratio(
                self.read_hit_bytes,
                self.read_hit_bytes + self.read_miss_bytes,
            ),
            write_hit_ratio: ratio(self.write_hits, writes),
            read_mean_us: mean_us(self.read_ns, reads),
            write_mean_us: mean_us(self.write_ns, writes),
            uncached_read_us,
            uncached_write_us,
            speedup: (known && with > 0.0).then(|| without / with),
        }
    }
}

impl FlashCounters {
    /// Bytes written to flash for each byte of client writes and fills.
    pub fn write_amplification(&self) -> Option<f64> {
        ratio(self.flash_write_bytes, self.flash_payload_bytes)
    }
}

/// Latency percentiles in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LatencyReport {
    /// Requests.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Largest.
    pub max_us: f64,
}

impl From<&Percentiles> for LatencyReport {
    fn from(p: &Percentiles) -> LatencyReport {
        LatencyReport {
            count: p.count,
            mean_us: p.mean_us,
            p50_us: p.p50_us,
            p90_us: p.p90_us,
            p99_us: p.p99_us,
            p999_us: p.p999_us,
            max_us: p.max_us,
        }
    }
}

/// A span of time: the total since start, or a window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskSpan {
    /// `total`, `5min`, `1h` or `1d`.
    pub span: String,
    /// Seconds it covers: less than its name says shortly after a start.
    pub seconds: u64,
    /// What was counted.
    pub counters: Counters,
    /// What that means.
    pub ratios: Ratios,
}

/// A span of time of the pool's flash.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FlashSpan {
    /// `total`, `5min`, `1h` or `1d`.
    pub span: String,
    /// Seconds it covers.
    pub seconds: u64,
    /// What was counted.
    pub counters: FlashCounters,
    /// Bytes written to flash / bytes of client writes and fills.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_amplification: Option<f64>,
}

/// Statistics of one disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskReport {
    /// The disk.
    pub name: String,
    /// Its origin is another host's now: it is not served, and nothing is written back.
    #[serde(default)]
    pub fenced: bool,
    /// Bytes of it on flash.
    pub cached: u64,
    /// Bytes the origin does not have yet; zeroed and discarded ranges, which take no flash,
    /// included.
    pub dirty: u64,
    /// Seconds since it last had nothing dirty; 0 if it is clean.
    pub dirty_for: f64,
    /// Of an ordered disk: seconds for which the origin has lacked something that was flushed.
    #[serde(default)]
    pub behind: f64,
    /// Why what is dirty cannot be written back to the origin, while that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cannot_write_back: Option<WriteBackTrouble>,
    /// Reads served from flash, since start.
    pub read_hit_latency: LatencyReport,
    /// Reads that needed the origin, since start.
    pub read_miss_latency: LatencyReport,
    /// Writes of blocks that were all cached, since start.
    pub write_hit_latency: LatencyReport,
    /// Other writes, since start.
    pub write_miss_latency: LatencyReport,
    /// The same latencies in the windows, from short to long; percentiles to within 13 %.
    pub latencies: Vec<LatencySpan>,
    /// The total, then the windows from short to long.
    pub spans: Vec<DiskSpan>,
}

/// Latencies of a disk in one window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LatencySpan {
    /// `5min`, `1h` or `1d`.
    pub span: String,
    /// Seconds it covers.
    pub seconds: u64,
    /// Reads served from flash.
    pub read_hit: LatencyReport,
    /// Reads that needed the origin.
    pub read_miss: LatencyReport,
    /// Writes of blocks that were all cached.
    pub write_hit: LatencyReport,
    /// Other writes.
    pub write_miss: LatencyReport,
}

impl Since for Latencies {
    fn since(&self, earlier: &Latencies) -> Latencies {
        Latencies {
            read_hit: self.read_hit.since(&earlier.read_hit),
            read_miss: self.read_miss.since(&earlier.read_miss),
            write_hit: self.write_hit.since(&earlier.write_hit),
            write_miss: self.write_miss.since(&earlier.write_miss),
        }
    }
}

/// The windows of a disk's latencies.
pub fn latency_spans(
    now: u64,
    latencies: &Latencies,
    windows: &Windows<Latencies>,
) -> Vec<LatencySpan> {
    let windows = windows.values(now, latencies);
    let report = |tally: &Tally| LatencyReport::from(&tally.percentiles());
    windows
        .into_iter()
        .map(|w| LatencySpan {
            span: w.span.name.to_owned(),
            seconds: w.covered,
            read_hit: report(&w.value.read_hit),
            read_miss: report(&w.value.read_miss),
            write_hit: report(&w.value.write_hit),
            write_miss: report(&w.value.write_miss),
        })
        .collect()
}

/// A thread of the daemon that does not come round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StuckThread {
    /// Its name, as the system knows it.
    pub thread: String,
    /// When it was last known to be well, seconds since 1970.
    pub since: u64,
    /// For how many seconds it has been silent.
    pub seconds: u64,
}

/// Statistics of the pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolReport {
    /// Bytes of flash for cached data.
    pub capacity: u64,
    /// Bytes cached.
    pub cached: u64,
    /// Bytes the origins do not have yet; zeroed and discarded ranges included.
    pub dirty: u64,
    /// Segments.
    pub segments: u64,
    /// Segments free to write.
    pub free_segments: u64,
    /// Bytes of RAM for index, policy and RAM stage.
    pub ram: u64,
    /// Bytes cached in the RAM stage: read lately, not on flash.
    pub staged: u64,
    /// Bytes the RAM stage has room for now: what works better for the load.
    pub ram_stage: u64,
    /// Bytes it may have room for at most (`serve --ram-stage`).
    pub ram_stage_most: u64,
    /// Whether what was read must have been missed more often than what it displaces on flash
    /// (`gated`) or not (`open`): chosen by what works better for the load.
    pub admission: String,
    /// How often `admission` changed.
    pub admission_changes: u64,
    /// How much of the endurance budget is used up lately, 0 to 1: fewer fills as it grows, none
    /// at 1. 0 without a budget.
    pub endurance_used: f64,
    /// The budget, and who wrote; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endurance: Option<crate::api::swap::Endurance>,
    /// The flash device failed; disks go on from their origins.
    pub flash_failed: bool,
    /// What somebody should know about the flash: that the cache is off, and why.
    #[serde(default)]
    pub notices: Vec<String>,
    /// Mean latency of flash reads lately, microseconds.
    pub flash_read_us: f64,
    /// Threads that do not come round, and whose clients get no answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stuck: Vec<StuckThread>,
    /// Flash: the total, then the windows from short to long.
    pub spans: Vec<FlashSpan>,
    /// The pool's disks together, as they are listed: the total, then the windows. What was counted for a
    /// disk goes with it.
    pub disks: Vec<DiskSpan>,
}

/// All statistics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StatsReport {
    /// Seconds the daemon has been serving.
    pub uptime: u64,
    /// The pool.
    pub pool: PoolReport,
    /// Its disks, by name.
    pub disks: Vec<DiskReport>,
}

/// The spans of a disk: total and windows.
pub fn disk_spans(
    uptime: u64,
    now: u64,
    counters: &Counters,
    windows: &Windows<Counters>,
) -> Vec<DiskSpan> {
    let total = DiskSpan {
        span: "total".to_owned(),
        seconds: uptime,
        counters: *counters,
        ratios: counters.ratios(counters),
    };
    let windows = windows.values(now, counters).into_iter().map(|w| DiskSpan {
        span: w.span.name.to_owned(),
        seconds: w.covered,
        counters: w.value,
        ratios: w.value.ratios(counters),
    });
    std::iter::once(total).chain(windows).collect()
}

/// The spans of all these disks together, the longest that one of them covers.
pub fn all_spans(uptime: u64, disks: &[DiskReport]) -> Vec<DiskSpan> {
    let names = std::iter::once("total").chain(SPANS.iter().map(|span| span.name));
    let mut all = Vec::new();
    for (at, name) in names.enumerate() {
        let mut counters = Counters::default();
        let mut seconds = 0;
        for span in disks.iter().filter_map(|disk| disk.spans.get(at)) {
            counters.add(&span.counters);
            seconds = seconds.max(span.seconds);
        }
        let total = all.first().map_or(counters, |t: &DiskSpan| t.counters);
        all.push(DiskSpan {
            span: name.to_owned(),
            seconds: if at == 0 { uptime } else { seconds },
            counters,
            ratios: counters.ratios(&total),
        });
    }
    all
}

/// The spans of the pool's flash.
pub fn flash_spans(
    uptime: u64,
    now: u64,
    counters: &FlashCounters,
    windows: &Windows<FlashCounters>,
) -> Vec<FlashSpan> {
    let span = |span: &str, seconds, counters: FlashCounters| FlashSpan {
        span: span.to_owned(),
        seconds,
        counters,
        write_amplification: counters.write_amplification(),
    };
    let windows = windows
        .values(now, counters)
        .into_iter()
        .map(|w| span(w.span.name, w.covered, w.value));
    std::iter::once(span("total", uptime, *counters))
        .chain(windows)
        .collect()
}

impl DiskReport {
    /// A report from the engine's figures.
    pub fn new(
        name: &str,
        fenced: bool,
        stats: &DiskStats,
        spans: Vec<DiskSpan>,
        latencies: Vec<LatencySpan>,
    ) -> DiskReport {
        DiskReport {
            name: name.to_owned(),
            fenced,
            cached: stats.cached_blocks.saturating_mul(BLOCK),
            dirty: stats.owed_bytes(),
            dirty_for: stats.dirty_for_ns as f64 / 1e9,
            behind: stats.behind_ns as f64 / 1e9,
            cannot_write_back: None,
            read_hit_latency: (&stats.read_hit_latency).into(),
            read_miss_latency: (&stats.read_miss_latency).into(),
            write_hit_latency: (&stats.write_hit_latency).into(),
            write_miss_latency: (&stats.write_miss_latency).into(),
            latencies,
            spans,
        }
    }
}

impl PoolReport {
    /// A report from the engine's figures; `dirty` bytes of all disks are newer than the origins.
    pub fn new(
        stats: &PoolStats,
        notices: Vec<String>,
        dirty: u64,
        spans: Vec<FlashSpan>,
        disks: Vec<DiskSpan>,
    ) -> PoolReport {
        PoolReport {
            capacity: stats.capacity_blocks.saturating_mul(BLOCK),
            cached: stats.cached_blocks.saturating_mul(BLOCK),
            dirty,
            segments: stats.segments,
            free_segments: stats.free_segments,
            ram: stats.footprint_bytes,
            staged: stats.stage_blocks.saturating_mul(BLOCK),
            ram_stage: stats.stage_capacity_blocks.saturating_mul(BLOCK),
            ram_stage_most: stats.stage_most_blocks.saturating_mul(BLOCK),
            admission: if stats.gate { "gated" } else { "open" }.to_owned(),
            admission_changes: stats.rule_switches,
            endurance_used: f64::from(stats.endurance_pressure) / 256.0,
            endurance: None,
            flash_failed: stats.flash_fault == Some(FlashFault::Broken),
            notices,
            flash_read_us: stats.flash_read_ns as f64 / 1000.0,
            stuck: Vec::new(),
            spans,
            disks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy() -> Counters {
        Counters {
            read_hits: 80,
            read_partial_hits: 10,
            read_misses: 10,
            read_hit_bytes: 850,
            read_miss_bytes: 150,
            read_ns: 80 * 100_000 + 20 * 8_000_000,
            origin_reads: 20,
            origin_read_ns: 20 * 8_000_000,
            ..Counters::default()
        }
    }

    #[test]
    fn partial_hits_are_no_hits() {
        let r = busy().ratios(&busy());
        assert_eq!(r.read_hit_ratio, Some(0.8));
        assert_eq!(r.read_hit_ratio_bytes, Some(0.85));
        assert_eq!(r.write_hit_ratio, None);
    }

    #[test]
    fn helping_is_time_without_over_time_with() {
        let r = busy().ratios(&busy());
        assert_eq!(r.uncached_read_us, Some(8000.0));
        let speedup = r.speedup.unwrap();
        assert!((speedup - 800.0 / 168.0).abs() < 1e-9, "{speedup}");
    }

    #[test]
    fn all_disks_are_those_that_are_listed() {
        let disk = |seconds: u64, counters: &Counters| {
            let windows = Windows::new(100 - seconds, Counters::default());
            let spans = disk_spans(100, 100, counters, &windows);
            DiskReport::new("d", false, &DiskStats::default(), spans, Vec::new())
        };
        let mut twice = busy();
        twice.add(&busy());
        let all = all_spans(100, &[disk(10, &busy()), disk(50, &busy())]);
        let names: Vec<&str> = all.iter().map(|s| s.span.as_str()).collect();
        assert_eq!(names, ["total", "5min", "1h", "1d"]);
        assert!(all.iter().all(|s| s.counters == twice));
        assert_eq!((all[0].seconds, all[1].seconds), (100, 50));
        assert_eq!(all[1].ratios, busy().ratios(&busy()));
        let none = all_spans(100, &[]);
        assert_eq!((none.len(), none[3].counters), (4, Counters::default()));
    }

    #[test]
    fn a_window_of_hits_borrows_the_origins_latency() {
        let quiet = Counters {
            read_hits: 100,
            read_ns: 100 * 50_000,
            ..Counters::default()
        };
        assert_eq!(quiet.ratios(&quiet).speedup, None);
        assert_eq!(quiet.ratios(&busy()).speedup, Some(160.0));
    }

    #[test]
    fn every_counter_is_defined_in_the_documentation() {
        let page = include_str!("../../../../docs/statistics.md");
        for name in Counters::NAMES.iter().chain(FlashCounters::NAMES) {
            assert!(
                page.contains(&format!("`{name}`")),
                "docs/statistics.md does not define {name}"
            );
        }
        let ratios = serde_json::to_value(Ratios {
            read_hit_ratio: Some(0.0),
            read_hit_ratio_bytes: Some(0.0),
            write_hit_ratio: Some(0.0),
            read_mean_us: Some(0.0),
            write_mean_us: Some(0.0),
            uncached_read_us: Some(0.0),
            uncached_write_us: Some(0.0),
            speedup: Some(0.0),
        })
        .unwrap();
        for name in ratios.as_object().unwrap().keys() {
            assert!(
                page.contains(&format!("`{name}`")),
                "docs/statistics.md does not define {name}"
            );
        }
    }

    #[test]
    fn no_counter_of_the_engine_is_forgotten() {
        let engine = serde_json::to_value(DiskCounters::default()).unwrap();
        let ours = serde_json::to_value(Counters::default()).unwrap();
        assert_eq!(engine, ours);
        let engine = serde_json::to_value(PoolCounters::default()).unwrap();
        let ours = serde_json::to_value(FlashCounters::default()).unwrap();
        assert_eq!(engine, ours);
    }
}
