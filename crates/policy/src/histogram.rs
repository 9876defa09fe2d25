//! What a guest does to a disk, in the histograms of ESXi's vscsiStats.
//!
//! Sixteen histograms with vscsiStats' own limits, so that spreadsheets and scripts written for it
//! read ours: lengths, seek distances (from the request before, and from the closest of the 16
//! before), latency, outstanding requests, time between requests; most of them split by reads and
//! writes. A bucket counts what is above the limit before and up to its own; the last one has
//! no limit, and vscsiStats prints the last limit twice for it.

/// Limits of request lengths, bytes. 4095/4096 and the like give exact sizes their own bucket.
pub const LENGTH: &[i64] = &[
    512, 1024, 2048, 4095, 4096, 8191, 8192, 16383, 16384, 32768, 49152, 65535, 65536, 81920,
    131_072, 262_144, 524_288,
];
/// Limits of seek distances, 512-byte blocks. 1 is sequential.
pub const DISTANCE: &[i64] = &[
    -500_000, -100_000, -50_000, -10_000, -5000, -1000, -500, -128, -64, -32, -16, -8, -6, -4, -2,
    -1, 0, 1, 2, 4, 6, 8, 16, 32, 64, 128, 500, 1000, 5000, 10_000, 50_000, 100_000, 500_000,
];
/// Limits of latencies and of times between requests, microseconds.
pub const MICROSECONDS: &[i64] = &[1, 10, 100, 500, 1000, 5000, 15_000, 30_000, 50_000, 100_000];
/// Limits of outstanding requests.
pub const OUTSTANDING: &[i64] = &[1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 64];
/// Requests looked back for the closest one.
const WINDOW: usize = 16;
const SECTOR: u64 = 512;

/// Counts between limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    limits: &'static [i64],
    counts: Vec<u64>,
    min: i64,
    max: i64,
    sum: i128,
    count: u64,
}

impl Histogram {
    /// An empty histogram with ascending limits.
    pub fn new(limits: &'static [i64]) -> Histogram {
        Histogram {
            limits,
            counts: vec![0; limits.len() + 1],
            min: i64::MAX,
            max: i64::MIN,
            sum: 0,
            count: 0,
        }
    }

    /// Counts a value.
    pub fn add(&mut self, value: i64) {
        let at = self.limits.partition_point(|l| *l < value);
        self.counts[at] += 1;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        self.sum += i128::from(value);
        self.count += 1;
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Smallest value; 0 if there is none.
    pub fn min(&self) -> i64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// Largest value; 0 if there is none.
    pub fn max(&self) -> i64 {
        if self.count == 0 { 0 } else { self.max }
    }

    /// Mean, rounded towards zero as vscsiStats does; 0 if there is none.
    pub fn mean(&self) -> i64 {
        if self.count == 0 {
            0
        } else {
            (self.sum / i128::from(self.count)) as i64
        }
    }

    /// (count, limit) of every bucket; `None` is above the last limit.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, Option<i64>)> + '_ {
        let limits = self.limits.iter().copied().map(Some).chain([None]);
        self.counts.iter().copied().zip(limits)
    }

    /// What was counted since `before`, an earlier copy of this histogram. Smallest and largest
    /// stay those of the whole time.
    pub fn since(&self, before: &Histogram) -> Histogram {
        Histogram {
            limits: self.limits,
            counts: self
                .counts
                .iter()
                .zip(&before.counts)
                .map(|(a, b)| a.saturating_sub(*b))
                .collect(),
            min: self.min,
            max: self.max,
            sum: self.sum - before.sum,
            count: self.count.saturating_sub(before.count),
        }
    }
}

/// One histogram for all requests, one for reads, one for writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Reads and writes.
    pub all: Histogram,
    /// Reads.
    pub reads: Histogram,
    /// Writes.
    pub writes: Histogram,
}

impl Split {
    fn new(limits: &'static [i64]) -> Split {
        Split {
            all: Histogram::new(limits),
            reads: Histogram::new(limits),
            writes: Histogram::new(limits),
        }
    }

    fn add(&mut self, write: bool, value: i64) {
        self.all.add(value);
        if write {
            self.writes.add(value);
        } else {
            self.reads.add(value);
        }
    }
}

/// Where the last request of a kind ended, and when it came.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    end: Option<u64>,
    at_us: Option<u64>,
}

/// All sixteen histograms of one disk.
#[derive(Clone, Debug)]
pub struct Histograms {
    /// Request lengths, bytes.
    pub length: Split,
    /// Distance from the end of the request before (of the same kind, for reads and writes),
    /// 512-byte blocks.
    pub distance: Split,
    /// Distance from the closest end of the 16 requests before.
    pub closest: Histogram,
    /// Latency, microseconds.
    pub latency: Split,
    /// Requests outstanding when a new one came.
    pub outstanding: Split,
    /// Time since the request before, microseconds.
    pub interarrival: Split,
    all: Before,
    reads: Before,
    writes: Before,
    window: [Option<u64>; WINDOW],
    next: usize,
}

impl Default for Histograms {
    fn default() -> Histograms {
        Histograms::new()
    }
}

/// Sectors from the last one of the request that ended at `end` to `start`, as vscsiStats counts:
/// 1 when the next follows at once.
fn distance(start: u64, end: u64) -> i64 {
    let (start, last) = (start / SECTOR, (end / SECTOR).saturating_sub(1));
    (i128::from(start) - i128::from(last)) as i64
}

impl Histograms {
    /// Empty.
    pub fn new() -> Histograms {
        Histograms {
            length: Split::new(LENGTH),
            distance: Split::new(DISTANCE),
            closest: Histogram::new(DISTANCE),
            latency: Split::new(MICROSECONDS),
            outstanding: Split::new(OUTSTANDING),
            interarrival: Split::new(MICROSECONDS),
            all: Before::default(),
            reads: Before::default(),
            writes: Before::default(),
            window: [None; WINDOW],
            next: 0,
        }
    }

    /// A request came: `outstanding` others were under way. Offset and length in bytes.
    pub fn request(
        &mut self,
        now_us: u64,
        write: bool,
        offset: u64,
        length: u64,
        outstanding: u64,
    ) {
        let clamp = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let end = offset.saturating_add(length);
        self.length.add(write, clamp(length));
        self.outstanding.add(write, clamp(outstanding));
        let own = if write {
            (
                &mut self.writes,
                &mut self.distance.writes,
                &mut self.interarrival.writes,
            )
        } else {
            (
                &mut self.reads,
                &mut self.distance.reads,
                &mut self.interarrival.reads,
            )
        };
        let all = (
            &mut self.all,
            &mut self.distance.all,
            &mut self.interarrival.all,
        );
        for (before, distances, times) in [own, all] {
            if let Some(last) = before.end.replace(end) {
                distances.add(distance(offset, last));
            }
            if let Some(at) = before.at_us.replace(now_us) {
                times.add(clamp(now_us.saturating_sub(at)));
            }
        }
        let closest = self
            .window
            .iter()
            .flatten()
            .map(|end| distance(offset, *end))
            .min_by_key(|d| d.unsigned_abs());
        if let Some(closest) = closest {
            self.closest.add(closest);
        }
        self.window[self.next] = Some(end);
        self.next = (self.next + 1) % WINDOW;
    }

    /// A request ended.
    pub fn done(&mut self, write: bool, latency_us: u64) {
        self.latency
            .add(write, i64::try_from(latency_us).unwrap_or(i64::MAX));
    }

    /// The sixteen, in vscsiStats' order and under its titles.
    pub fn all(&self) -> [(&'static str, &Histogram); 16] {
        [
            ("IO lengths of commands", &self.length.all),
            ("IO lengths of Read commands", &self.length.reads),
            ("IO lengths of Write commands", &self.length.writes),
            (
                "distance (in LBNs) between successive commands",
                &self.distance.all,
            ),
            (
                "distance (in LBNs) between successive Read commands",
                &self.distance.reads,
            ),
            (
                "distance (in LBNs) between successive Write commands",
                &self.distance.writes,
            ),
            (
                "distance (in LBNs) between each command from the closest of previous 16",
                &self.closest,
            ),
            ("latency of IOs in Microseconds (us)", &self.latency.all),
            (
                "latency of Read IOs in Microseconds (us)",
                &self.latency.reads,
            ),
            (
                "latency of Write IOs in Microseconds (us)",
                &self.latency.writes,
            ),
            (
                "number of outstanding IOs when a new IO is issued",
                &self.outstanding.all,
            ),
            (
                "number of outstanding Read IOs when a new Read IO is issued",
                &self.outstanding.reads,
            ),
            (
                "number of outstanding Write IOs when a new Write IO is issued",
                &self.outstanding.writes,
            ),
            (
                "latency of IO interarrival time in Microseconds (us)",
                &self.interarrival.all,
            ),
            (
                "latency of IO interarrival time for Reads in Microseconds (us)",
                &self.interarrival.reads,
            ),
            (
                "latency of IO interarrival time for Writes in Microseconds (us)",
                &self.interarrival.writes,
            ),
        ]
    }

    /// All sixteen as vscsiStats' CSV; `group` and `disk` name the virtual machine and its disk.
    pub fn csv(&self, group: &str, disk: &str) -> String {
        use std::fmt::Write as _;
        let plain = |s: &str| s.replace([',', '\n', '\r'], " ");
        let (group, disk) = (plain(group), plain(disk));
        let mut out = String::new();
        for (title, h) in self.all() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "Histogram: {title},virtual machine worldGroupID,{group},virtual disk handleID,{disk}\n\
                 min,{}\nmax,{}\nmean,{}\ncount,{}\nFrequency,Histogram Bucket Limit",
                h.min(),
                h.max(),
                h.mean(),
                h.count()
            );
            let last = h.limits.last().copied().unwrap_or(0);
            for (count, limit) in h.buckets() {
                let _ = writeln!(out, "{count},{}", limit.unwrap_or(last));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_sizes_have_their_own_bucket() {
        let mut h = Histogram::new(LENGTH);
        for n in [512, 513, 4095, 4096, 4097, 524_288, 524_289] {
            h.add(n);
        }
        let at = |limit| h.buckets().find(|b| b.1 == limit).map(|b| b.0);
        assert_eq!(at(Some(512)), Some(1));
        assert_eq!(at(Some(1024)), Some(1));
        assert_eq!(at(Some(4095)), Some(1));
        assert_eq!(at(Some(4096)), Some(1));
        assert_eq!(at(Some(8191)), Some(1));
        assert_eq!(at(Some(524_288)), Some(1));
        assert_eq!(at(None), Some(1));
        assert_eq!((h.min(), h.max(), h.count()), (512, 524_289, 7));
    }

    #[test]
    fn sequential_requests_are_one_apart() {
        let mut h = Histograms::new();
        for i in 0..10 {
            h.request(i * 100, false, i * 8192, 8192, 3);
            h.done(false, 250);
        }
        assert_eq!((h.distance.all.min(), h.distance.all.max()), (1, 1));
        assert_eq!(h.distance.reads.count(), 9);
        assert_eq!(h.distance.writes.count(), 0);
        assert_eq!(h.interarrival.all.mean(), 100);
        assert_eq!(h.latency.reads.mean(), 250);
        assert_eq!(h.outstanding.all.max(), 3);
    }

    #[test]
    fn interleaved_streams_show_in_the_closest_of_sixteen() {
        let mut h = Histograms::new();
        for i in 0..20u64 {
            for s in 0..4u64 {
                h.request(i, false, (s << 30) + i * 4096, 4096, 0);
            }
        }
        let ones = h.closest.buckets().find(|b| b.1 == Some(1)).map(|b| b.0);
        assert_eq!(ones, Some(76));
        assert!(h.distance.all.max() > 500_000);
    }

    #[test]
    fn csv_is_what_vscsistats_prints() {
        let mut h = Histograms::new();
        h.request(0, false, 0, 512, 0);
        let csv = h.csv("2099979", "8194 (scsi0:0)");
        assert!(csv.starts_with(
            "Histogram: IO lengths of commands,virtual machine worldGroupID,2099979,virtual disk handleID,8194 (scsi0:0)\n\
             min,512\nmax,512\nmean,512\ncount,1\nFrequency,Histogram Bucket Limit\n1,512\n0,1024\n"
        ));
        assert!(csv.contains("\n0,524288\n0,524288\nHistogram: "));
        assert_eq!(csv.matches("Histogram: ").count(), 16);
    }

    #[test]
    fn differences_are_what_came_between() {
        let mut h = Histogram::new(OUTSTANDING);
        h.add(1);
        let before = h.clone();
        h.add(5);
        let d = h.since(&before);
        assert_eq!((d.count(), d.mean()), (1, 5));
    }
}
