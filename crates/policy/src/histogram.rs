//! What a guest does to a disk, in the histograms of ESXi's vscsiStats.
//!
//! Sixteen histograms with vscsiStats' own limits, so that spreadsheets and scripts written for it
//! read ours: lengths, seek distances (from the request before, and from the closest of the 16
//! before), latency, outstanding requests, time between requests; most of them split by reads and
//! writes. A bucket counts what is above the limit before and up to its own; the last one has
//! no limit, and vscsiStats prints the last limit twice for it.
//!
//! Everything below 100 µs is two of its buckets, too coarse for flash: [`Fine`] has latencies in
//! eight buckets per doubling beside them.

use crate::{loglinear, quantile};

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

/// What advice on a disk's mode and block size rests on, so that nobody who resets the histograms
/// changes the advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Reads by length: those from `2^i` bytes to below twice that.
    pub read_octaves: [u64; 64],
}

impl Default for Mix {
    fn default() -> Mix {
        Mix {
            reads: 0,
            writes: 0,
            read_octaves: [0; 64],
        }
    }
}

impl Mix {
    /// Counts a request of `length` bytes.
    pub fn add(&mut self, write: bool, length: u64) {
        if write {
            self.writes += 1;
        } else {
            self.reads += 1;
            self.read_octaves[length.max(1).ilog2() as usize] += 1;
        }
    }

    /// Requests counted.
    pub fn count(&self) -> u64 {
        self.reads + self.writes
    }

    /// Lets those so far count half.
    pub fn halve(&mut self) {
        self.reads /= 2;
        self.writes /= 2;
        self.read_octaves.iter_mut().for_each(|n| *n /= 2);
    }
}

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

    fn bucket(limits: &[i64], value: i64) -> usize {
        limits.partition_point(|l| *l < value)
    }

    /// Counts a value.
    pub fn add(&mut self, value: i64) {
        self.add_at(Self::bucket(self.limits, value), value);
    }

    /// Counts a value whose bucket is known.
    fn add_at(&mut self, bucket: usize, value: i64) {
        self.counts[bucket] += 1;
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

    fn of(&mut self, write: bool) -> &mut Histogram {
        if write {
            &mut self.writes
        } else {
            &mut self.reads
        }
    }

    /// Counts a value that is the same for the request's kind and for all.
    fn add(&mut self, write: bool, value: i64) {
        let bucket = Histogram::bucket(self.all.limits, value);
        self.all.add_at(bucket, value);
        self.of(write).add_at(bucket, value);
    }
}

/// Buckets of [`Fine`] per doubling: 8, so a value is known within an eighth.
const FINE_BITS: u32 = 3;
/// [`Fine`] holds latencies below 2^40 ns (18 minutes); longer ones share the last bucket.
const FINE_OCTAVES: u32 = 40;

/// Latencies in log-linear buckets, nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fine {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

impl Default for Fine {
    fn default() -> Fine {
        Fine {
            counts: vec![0; loglinear::buckets(FINE_OCTAVES, FINE_BITS)],
            count: 0,
            sum_ns: 0,
            max_ns: 0,
        }
    }
}

impl Fine {
    /// Counts a latency.
    pub fn add(&mut self, ns: u64) {
        let at = loglinear::bucket(ns, FINE_BITS).min(self.counts.len() - 1);
        self.counts[at] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Latencies counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean in nanoseconds; `None` if there is none.
    pub fn mean_ns(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_ns as f64 / self.count as f64)
    }

    /// The largest, nanoseconds.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The latency below which this share of all is, to the end of its bucket; 0 if there is none.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let ends = self.buckets().map(|(count, _, to)| (count, to));
        quantile(ends, self.count, share).map_or(self.max_ns, |to| to.min(self.max_ns))
    }

    /// (count, from, to) in nanoseconds of every bucket that holds any; `to` is not in it.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let lower = |at| loglinear::lower(at, FINE_BITS);
        self.counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(move |(at, count)| (*count, lower(at), lower(at + 1)))
    }
}

/// Where the last request of a kind ended, and when it came.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    /// Its last sector, and its time in microseconds.
    last: Option<(i64, u64)>,
}

impl Before {
    /// Sectors and microseconds from the request before to the one that begins at `start`.
    fn step(&mut self, start: i64, last: i64, now_us: u64) -> Option<(i64, i64)> {
        let (before, at_us) = self.last.replace((last, now_us))?;
        Some((
            start.wrapping_sub(before),
            clamp(now_us.saturating_sub(at_us)),
        ))
    }
}

fn clamp(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Requests under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// All sixteen histograms of one disk, and fine latencies.
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
    /// Requests (of the same kind, for reads and writes) outstanding when a new one came.
    pub outstanding: Split,
    /// Time since the request before, microseconds.
    pub interarrival: Split,
    /// Latencies of reads.
    pub fine_reads: Fine,
    /// Latencies of writes.
    pub fine_writes: Fine,
    all: Before,
    reads: Before,
    writes: Before,
    /// Last sectors of the requests before, the newest at `next - 1`.
    window: [i64; WINDOW],
    /// Places of the window in use.
    seen: usize,
    next: usize,
}

impl Default for Histograms {
    fn default() -> Histograms {
        Histograms::new()
    }
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
            fine_reads: Fine::default(),
            fine_writes: Fine::default(),
            all: Before::default(),
            reads: Before::default(),
            writes: Before::default(),
            window: [0; WINDOW],
            seen: 0,
            next: 0,
        }
    }

    /// A request came while `others` were under way. Offset and length in bytes.
    ///
    /// Distances are counted as vscsiStats does, from the last sector before to the first one
    /// now: 1 when a request follows at once.
    pub fn request(
        &mut self,
        now_us: u64,
        write: bool,
        offset: u64,
        length: u64,
        others: Outstanding,
    ) {
        let start = clamp(offset / SECTOR);
        let last = clamp((offset.saturating_add(length) / SECTOR).saturating_sub(1));
        self.length.add(write, clamp(length));
        let same = if write { others.writes } else { others.reads };
        self.outstanding.of(write).add(clamp(same));
        self.outstanding
            .all
            .add(clamp(others.reads.saturating_add(others.writes)));
        let own = if write {
            &mut self.writes
        } else {
            &mut self.reads
        };
        if let Some((sectors, us)) = own.step(start, last, now_us) {
            self.distance.of(write).add(sectors);
            self.interarrival.of(write).add(us);
        }
        if let Some((sectors, us)) = self.all.step(start, last, now_us) {
            self.distance.all.add(sectors);
            self.interarrival.all.add(us);
        }
        let closest = self.window[..self.seen]
            .iter()
            .map(|end| start.wrapping_sub(*end))
            .min_by_key(|d| d.unsigned_abs());
        if let Some(closest) = closest {
            self.closest.add(closest);
        }
        self.window[self.next] = last;
        self.next = (self.next + 1) % WINDOW;
        self.seen = (self.seen + 1).min(WINDOW);
    }

    /// A request ended.
    pub fn done(&mut self, write: bool, latency_ns: u64) {
        self.latency.add(write, clamp(latency_ns / 1000));
        if write {
            self.fine_writes.add(latency_ns);
        } else {
            self.fine_reads.add(latency_ns);
        }
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
            let others = Outstanding {
                reads: 3,
                writes: 0,
            };
            h.request(i * 100, false, i * 8192, 8192, others);
            h.done(false, 250_000);
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
                h.request(i, false, (s << 30) + i * 4096, 4096, Outstanding::default());
            }
        }
        let ones = h.closest.buckets().find(|b| b.1 == Some(1)).map(|b| b.0);
        assert_eq!(ones, Some(76));
        assert!(h.distance.all.max() > 500_000);
    }

    #[test]
    fn reads_wait_beside_reads() {
        let mut h = Histograms::new();
        let others = Outstanding {
            reads: 2,
            writes: 5,
        };
        h.request(0, false, 0, 512, others);
        h.request(1, true, 0, 512, others);
        assert_eq!(h.outstanding.reads.max(), 2);
        assert_eq!(h.outstanding.writes.max(), 5);
        assert_eq!(h.outstanding.all.mean(), 7);
    }

    #[test]
    fn fine_latencies_are_within_an_eighth() {
        let mut f = Fine::default();
        assert_eq!((f.quantile_ns(0.5), f.mean_ns()), (0, None));
        for ns in 1..=10_000u64 {
            f.add(ns * 10);
        }
        for (share, want) in [(0.5, 50_000.0), (0.99, 99_000.0), (1.0, 100_000.0)] {
            let got = f.quantile_ns(share) as f64;
            assert!((want..=want * 1.125).contains(&got), "{share}: {got}");
        }
        assert_eq!(f.buckets().map(|b| b.0).sum::<u64>(), 10_000);
        f.add(u64::MAX);
        assert_eq!(f.max_ns(), u64::MAX);
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
