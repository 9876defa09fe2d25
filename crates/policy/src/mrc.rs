//! How would the hit ratio be with more or less flash? A miss-ratio curve in fixed memory.
//!
//! The exact curve needs the stack distance of every access, i.e. memory for every block ever
//! seen. This keeps a sample of blocks chosen by hash, at most [`SAMPLES`], and lowers the
//! sampling rate as more come (fixed-size SHARDS: Waldspurger, Park, Garthwaite, Ahmad, "Efficient
//! MRC Construction with SHARDS", FAST 2015). As long as all blocks fit, the curve is exact. Beyond, a
//! sample with too many or too few accesses is corrected by regression; SHARDS puts the difference
//! into the first bucket, which is wrong where what is hot is not what comes back soonest. The curve is
//! that of LRU; how far it is off on real traces is in `docs/decisions/0001-policy.md`.

mod kept;

use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::{loglinear, spread};

pub use kept::{KeptBlock, KeptMrc};

/// Most blocks in the sample. With them, all tables together take about 1 MiB.
pub const SAMPLES: usize = 12_288;
/// Fewest blocks in a sample that is to say anything.
pub const SAMPLES_MIN: usize = 512;
/// Places on the time line per block of the sample; it is renumbered when they are used up.
const TIMES: usize = 4;
/// Sampling thresholds are in 2^-24ths.
const RATE_BITS: u32 = 24;
/// Buckets of the distance histogram per doubling, beyond [`Mrc`]'s exact part: 128.
const PER_OCTAVE_BITS: u32 = 7;
/// The same of what tells where a sample's error goes.
const PULL_BITS: u32 = 4;
/// Distances from 2^40 blocks (4 PiB) on share the last bucket.
const OCTAVES: u32 = 40;

/// Most accesses added because the sample holds too few of the hottest blocks', as a part of those it
/// holds.
const CORRECTION_MAX: f64 = 1.0;

/// Where a key falls among 2^24 places, evenly: those below a threshold are the sample.
#[inline]
pub fn place(key: u64) -> u32 {
    (spread(key) >> (64 - RATE_BITS)) as u32
}

/// A threshold above every [`place`]: all blocks are sampled.
pub const ALL: u32 = 1 << RATE_BITS;

/// A block of the sample.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// When it was last used.
    time: u32,
    /// Counted accesses (halved with the curve).
    counted: u32,
}

/// A curve being measured.
#[derive(Debug)]
pub struct Mrc {
    /// Sampled blocks.
    last: HashMap<u64, Seen>,
    /// The same blocks by hash, largest first: the next to leave.
    by_hash: BinaryHeap<(u32, u64)>,
    /// Fenwick tree over times: one for each sampled block's last use. No count is above
    /// [`SAMPLES`].
    tree: Vec<u16>,
    now: u32,
    /// Most blocks in the sample.
    samples: usize,
    threshold: u32,
    /// Accesses by the size (blocks) from which on they hit, in accesses of the whole stream.
    hits_from: Vec<f64>,
    /// Sizes below this have a bucket each: as many as there are samples, so that nothing is
    /// rounded as long as all blocks are in the sample. A loop's whole rise is at one size.
    fine: usize,
    /// What a sample's error pulls at: by size as `hits_from`, but coarser, and each access counted as
    /// often as its block had been accessed.
    pull: Vec<f64>,
    /// The sum of `pull` and of what first accesses would add to it.
    pulls: f64,
    /// Accesses of sampled blocks, in accesses of the whole stream.
    sampled: f64,
    /// The same, as many as there were.
    taken: f64,
    accesses: f64,
    /// Accesses of sampled blocks that were lost on the way, in accesses of the whole stream.
    missed: f64,
    /// Times of the last two calls of [`decay`](Self::decay), the older one first.
    marks: [u32; 2],
}

impl Default for Mrc {
    fn default() -> Mrc {
        Mrc::new()
    }
}

/// Bucket of the part of the histogram that is coarse, counted as if all of it were.
fn coarse(size: u64) -> usize {
    loglinear::bucket(size, PER_OCTAVE_BITS)
}

/// Smallest size of such a bucket.
fn coarse_lower(bucket: usize) -> u64 {
    loglinear::lower(bucket, PER_OCTAVE_BITS)
}

/// Sums of a histogram up to ascending sizes, evenly spread within a bucket.
struct UpTo<'a, F> {
    counts: &'a [f64],
    lower: F,
    at: usize,
    sum: f64,
}

impl<'a, F: Fn(usize) -> f64> UpTo<'a, F> {
    fn new(counts: &'a [f64], lower: F) -> UpTo<'a, F> {
        UpTo {
            counts,
            lower,
            at: 0,
            sum: 0.0,
        }
    }

    fn size(&mut self, size: f64) -> f64 {
        while self.at + 1 < self.counts.len() && (self.lower)(self.at + 1) <= size {
            self.sum += self.counts[self.at];
            self.at += 1;
        }
        let (from, to) = ((self.lower)(self.at), (self.lower)(self.at + 1));
        self.sum + self.counts[self.at] * ((size - from + 1.0) / (to - from)).clamp(0.0, 1.0)
    }
}

impl Mrc {
    /// A curve without accesses; samples every block at first.
    pub fn new() -> Mrc {
        Mrc::with_samples(SAMPLES)
    }

    /// The same with at most so many blocks in the sample (from [`SAMPLES_MIN`] to [`SAMPLES`]):
    /// a disk of fewer blocks needs no more, and many disks share what memory there is. About
    /// 55 bytes each, and 36 KiB beside.
    pub fn with_samples(samples: usize) -> Mrc {
        let samples = samples.clamp(SAMPLES_MIN, SAMPLES);
        // The first whole coarse bucket above them.
        let fine = coarse_lower(coarse(samples as u64) + 1) as usize;
        Mrc {
            last: HashMap::with_capacity(samples + 1),
            by_hash: BinaryHeap::with_capacity(samples + 1),
            tree: vec![0; samples * TIMES + 1],
            now: 0,
            samples,
            threshold: ALL,
            hits_from: vec![0.0; fine + coarse(1 << OCTAVES) - coarse(fine as u64)],
            fine,
            pull: vec![0.0; loglinear::buckets(OCTAVES, PULL_BITS)],
            pulls: 0.0,
            sampled: 0.0,
            taken: 0.0,
            accesses: 0.0,
            missed: 0.0,
            marks: [0; 2],
        }
    }

    /// Bucket of a size.
    fn bucket(&self, size: u64) -> usize {
        let at = if size < self.fine as u64 {
            size as usize
        } else {
            self.fine + coarse(size) - coarse(self.fine as u64)
        };
        at.min(self.hits_from.len() - 1)
    }

    /// Smallest size of a bucket.
    fn lower(&self, bucket: usize) -> f64 {
        if bucket < self.fine {
            bucket as f64
        } else {
            coarse_lower(bucket - self.fine + coarse(self.fine as u64)) as f64
        }
    }

    /// Share of blocks sampled.
    pub fn rate(&self) -> f64 {
        f64::from(self.threshold) / f64::from(ALL)
    }

    /// Accesses seen (decayed, if [`decay`](Self::decay) was called).
    pub fn accesses(&self) -> f64 {
        self.accesses
    }

    /// Estimated number of different blocks seen, i.e. the working set.
    pub fn blocks(&self) -> f64 {
        self.last.len() as f64 / self.rate()
    }

    /// Blocks in the sample.
    pub fn sample_blocks(&self) -> usize {
        self.last.len()
    }

    /// Most blocks in the sample.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Counted accesses of sampled blocks: what the curve rests on (decayed).
    pub fn taken(&self) -> f64 {
        self.taken
    }

    /// Blocks whose [`place`] is below this are in the sample; it only falls.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Samples fewer blocks from now on: those whose [`place`] is below `threshold`.
    pub fn lower_threshold(&mut self, threshold: u32) {
        if threshold < self.threshold {
            self.threshold = threshold;
            self.shed();
        }
    }

    /// Notes an access.
    #[inline]
    pub fn access(&mut self, key: u64) {
        self.count(1.0);
        let place = place(key);
        if place < self.threshold {
            self.sample(key, place, true);
        }
    }

    /// Counts accesses whose sampled part is told with [`sampled`](Self::sampled).
    pub fn count(&mut self, accesses: f64) {
        self.accesses += accesses;
    }

    /// Of the accesses counted, so many were of sampled blocks and are not told: they got lost. What
    /// they stand for says nothing about hits, so it is left out of the ratio.
    pub fn missed(&mut self, sampled: f64) {
        self.missed += sampled / self.rate();
    }

    /// Notes an access of a sampled block. One that is `counted` was counted with
    /// [`count`](Self::count); else it only makes the block recently used (a write that leaves
    /// the block in the cache, when only reads are of interest). Blocks of the smallest LRU cache that
    /// hits, if it is a counted use of a block that was used before.
    pub fn sampled(&mut self, key: u64, counted: bool) -> Option<u64> {
        let place = place(key);
        (place < self.threshold)
            .then(|| self.sample(key, place, counted))
            .flatten()
    }

    fn sample(&mut self, key: u64, place: u32, counted: bool) -> Option<u64> {
        if self.now as usize == self.samples * TIMES {
            self.renumber();
        }
        let rate = self.rate();
        if counted {
            self.sampled += 1.0 / rate;
            self.taken += 1.0;
        }
        let now = self.now;
        self.now += 1;
        if let Some(seen) = self.last.get_mut(&key) {
            let before = std::mem::replace(&mut seen.time, now);
            let mut distance = None;
            if counted {
                seen.counted = seen.counted.saturating_add(1);
                let pull = f64::from(seen.counted) / (rate * rate);
                let others = self.last.len() as u32 - self.up_to(before);
                let size = (f64::from(others) / rate + 1.0) as u64;
                distance = Some(size);
                let at = self.bucket(size);
                self.hits_from[at] += 1.0 / rate;
                let at = loglinear::bucket(size, PULL_BITS).min(self.pull.len() - 1);
                self.pull[at] += pull;
                self.pulls += pull;
            }
            self.add(before, u16::MAX);
            self.add(now, 1);
            return distance;
        }
        self.pulls += f64::from(u8::from(counted)) / (rate * rate);
        let seen = Seen {
            time: now,
            counted: u32::from(counted),
        };
        self.last.insert(key, seen);
        self.by_hash.push((place, key));
        self.add(now, 1);
        while self.last.len() > self.samples {
            let Some((place, _)) = self.by_hash.peek() else {
                break;
            };
            self.threshold = *place;
            self.shed();
        }
        None
    }

    /// Drops the blocks that are no longer in the sample.
    fn shed(&mut self) {
        while let Some((place, key)) = self.by_hash.peek() {
            if *place < self.threshold {
                break;
            }
            if let Some(seen) = self.last.remove(key) {
                self.add(seen.time, u16::MAX);
            }
            self.by_hash.pop();
        }
    }

    /// Adds to the count at a time; `u16::MAX` takes one away.
    fn add(&mut self, time: u32, what: u16) {
        let mut i = time as usize + 1;
        while i < self.tree.len() {
            self.tree[i] = self.tree[i].wrapping_add(what);
            i += i & i.wrapping_neg();
        }
    }

    /// Sampled blocks last used up to a time.
    fn up_to(&self, time: u32) -> u32 {
        let (mut i, mut sum) = (time as usize + 1, 0u32);
        while i > 0 {
            sum += u32::from(self.tree[i]);
            i &= i - 1;
        }
        sum
    }

    /// Closes the gaps in the time line. At most once per three times `samples` sampled accesses.
    fn renumber(&mut self) {
        let mut order: Vec<(u32, u64)> = self.last.iter().map(|(k, s)| (s.time, *k)).collect();
        order.sort_unstable();
        self.marks = self
            .marks
            .map(|mark| order.partition_point(|(time, _)| *time < mark) as u32);
        for (at, (_, key)) in order.iter().enumerate() {
            if let Some(seen) = self.last.get_mut(key) {
                seen.time = at as u32;
            }
        }
        // A node holds the count of its range: one for each place of it that is in use.
        for i in 1..self.tree.len() {
            let from = i - (i & i.wrapping_neg());
            self.tree[i] = (i.min(order.len()) - from.min(order.len())) as u16;
        }
        self.now = order.len() as u32;
    }

    /// Lets older accesses count half, so that the curve follows the workload. Blocks that were not
    /// used since the call before the last one leave the sample: the working set ages too.
    pub fn decay(&mut self) {
        let oldest = self.marks[0];
        let stale: Vec<(u64, u32)> = self
            .last
            .iter()
            .filter(|(_, seen)| seen.time < oldest)
            .map(|(key, seen)| (*key, seen.time))
            .collect();
        for (key, time) in stale {
            self.last.remove(&key);
            self.add(time, u16::MAX);
        }
        let last = &self.last;
        self.by_hash.retain(|(_, key)| last.contains_key(key));
        self.marks = [self.marks[1], self.now];
        self.accesses /= 2.0;
        self.missed /= 2.0;
        self.sampled /= 2.0;
        self.taken /= 2.0;
        for n in &mut self.hits_from {
            *n /= 2.0;
        }
        for seen in self.last.values_mut() {
            seen.counted /= 2;
        }
        // Half the accesses, each counted half as often.
        self.pulls /= 4.0;
        for n in &mut self.pull {
            *n /= 4.0;
        }
    }

    /// Hit ratio of an LRU cache of so many blocks.
    pub fn hit_ratio(&self, blocks: f64) -> f64 {
        self.curve(&[blocks]).first().map_or(0.0, |p| p.1)
    }

    /// Hit ratios at ascending sizes (blocks).
    pub fn curve(&self, sizes: &[f64]) -> Vec<(f64, f64)> {
        if self.sampled <= 0.0 {
            return sizes.iter().map(|s| (*s, 0.0)).collect();
        }
        let accesses = self.accesses * self.sampled / (self.sampled + self.missed);
        let accesses = accesses.min(self.sampled * (1.0 + CORRECTION_MAX));
        let mut hits_from = UpTo::new(&self.hits_from, |at| self.lower(at));
        let mut pull = UpTo::new(&self.pull, |at| loglinear::lower(at, PULL_BITS) as f64);
        // The sample may hold more or less than its share of often used blocks. By regression: a block
        // moves a count in proportion to its part of that count, and is in the sample by
        // chance, so the expected part of a count in the total's error is its covariance with the
        // total. Sums over the sample's blocks of (accesses × accesses at that size) estimate it.
        // What was not measured may be no more than what was, or a curve would be made of
        // nothing.
        let error = (accesses - self.sampled) / self.pulls.max(1.0);
        let mut most = 0.0f64;
        let mut out = Vec::with_capacity(sizes.len());
        for size in sizes {
            if *size >= 1.0 {
                most = most.max(hits_from.size(*size) + error * pull.size(*size));
            }
            out.push((*size, (most / accesses).clamp(0.0, 1.0)));
        }
        out
    }

    /// The whole curve at sizes a few percent apart, up to the working set: what advice is
    /// computed from.
    pub fn points(&self) -> Vec<(f64, f64)> {
        let most = self.blocks().max(1.0);
        let mut sizes: Vec<f64> = (1..coarse(1 << OCTAVES))
            .map(|at| coarse_lower(at) as f64)
            .take_while(|s| *s < most)
            .collect();
        // All there is to hit is hit by a cache of the whole working set, though its size may fall
        // into the middle of the last bucket, or the estimate of it be a little low.
        sizes.push(f64::MAX);
        let mut points = self.curve(&sizes);
        if let Some(end) = points.last_mut() {
            end.0 = most;
        }
        points
    }

    /// Bytes it takes, roughly.
    pub fn footprint(&self) -> usize {
        self.last.capacity() * 17
            + self.by_hash.capacity() * 16
            + self.tree.capacity() * 2
            + (self.hits_from.capacity() + self.pull.capacity()) * 8
    }
}

/// The exact curve, in memory that grows with the trace: what the estimate is checked against.
pub fn exact(keys: impl Iterator<Item = u64>, sizes: &[f64]) -> Vec<(f64, f64)> {
    let keys: Vec<u64> = keys.collect();
    let mut tree = vec![0i32; keys.len() + 1];
    let mut last: HashMap<u64, usize> = HashMap::new();
    let mut from = vec![0u64; keys.len() + 2];
    let add = |tree: &mut Vec<i32>, at: usize, what: i32| {
        let mut i = at + 1;
        while i < tree.len() {
            tree[i] += what;
            i += i & i.wrapping_neg();
        }
    };
    for (now, key) in keys.iter().enumerate() {
        if let Some(before) = last.insert(*key, now) {
            let (mut i, mut sum) = (before + 1, 0i32);
            while i > 0 {
                sum += tree[i];
                i &= i - 1;
            }
            from[last.len() - sum as usize + 1] += 1;
            add(&mut tree, before, -1);
        }
        add(&mut tree, now, 1);
    }
    let total = keys.len().max(1) as f64;
    sizes
        .iter()
        .map(|s| {
            let hits: u64 = from.iter().take(*s as usize + 1).sum();
            (*s, hits as f64 / total)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zipf(n: u64, count: usize) -> Vec<u64> {
        let mut x = 7u64;
        (0..count)
            .map(|_| {
                x = spread(x);
                let u = (x >> 11) as f64 / (1u64 << 53) as f64;
                // Inverse of the continuous distribution with density 1/x on 1..n.
                ((n as f64).powf(u)) as u64
            })
            .collect()
    }

    fn worst(keys: &[u64], sizes: &[f64]) -> f64 {
        let mut mrc = Mrc::new();
        for key in keys {
            mrc.access(*key);
        }
        assert!(mrc.footprint() < 5 << 18, "{} bytes", mrc.footprint());
        let exact = exact(keys.iter().copied(), sizes);
        mrc.curve(sizes)
            .iter()
            .zip(&exact)
            .map(|(a, b)| (a.1 - b.1).abs())
            .fold(0.0, f64::max)
    }

    #[test]
    fn what_fits_into_the_sample_is_exact() {
        let keys = zipf(5000, 60_000);
        let sizes: Vec<f64> = (1..40).map(|i| f64::from(i) * 25.0).collect();
        let worst = worst(&keys, &sizes);
        assert!(worst < 1e-9, "{worst}");
        // A loop rises at one size, wherever that is within a bucket of a coarser histogram.
        let mut mrc = Mrc::new();
        (0..50_000).for_each(|i| mrc.access(i % 10_007));
        assert_eq!(mrc.hit_ratio(10_006.0), 0.0);
        assert!((mrc.hit_ratio(10_007.0) - 0.79986).abs() < 1e-9);
    }

    #[test]
    fn a_sample_short_of_accesses_is_mended_where_the_often_used_blocks_are() {
        // One block in a thousand takes half of the accesses, each time after all the others; the
        // rest is a scan. Whatever the sample caught of the few, the plateau must be near a half.
        let hot = |i: u64| (1 << 40) + i % 300;
        let keys: Vec<u64> = (0..600_000u64)
            .map(|i| if i % 2 == 0 { hot(i / 2) } else { i })
            .collect();
        let sizes = [100.0, 1000.0, 10_000.0, 100_000.0];
        let mut mrc = Mrc::new();
        keys.iter().for_each(|k| mrc.access(*k));
        assert!(mrc.rate() < 0.1);
        for (got, want) in mrc
            .curve(&sizes)
            .iter()
            .zip(exact(keys.iter().copied(), &sizes))
        {
            assert!((got.1 - want.1).abs() < 0.01, "{got:?} {want:?}");
        }
    }

    #[test]
    fn large_workloads_are_within_two_points() {
        let sizes: Vec<f64> = (1..60).map(|i| f64::from(i) * 4000.0).collect();
        let skewed = zipf(300_000, 600_000);
        let around: Vec<u64> = (0..600_000).map(|i| i % 150_000).collect();
        let mixed: Vec<u64> = skewed
            .iter()
            .zip(&around)
            .enumerate()
            .map(|(i, (a, b))| if i % 3 == 0 { 1_000_000 + b } else { *a })
            .collect();
        for (name, keys) in [("zipf", skewed), ("mixed", mixed)] {
            let worst = worst(&keys, &sizes);
            assert!(worst < 0.02, "{name}: {worst}");
        }
        // A loop is a step: only its place can be wrong, by the sampling error.
        let mut mrc = Mrc::new();
        for key in &around {
            mrc.access(*key);
        }
        assert!(mrc.hit_ratio(140_000.0) < 0.02);
        assert!(mrc.hit_ratio(160_000.0) > 0.73);
        assert!((mrc.blocks() / 150_000.0 - 1.0).abs() < 0.03);
    }

    #[test]
    fn small_samples_are_coarse_but_right() {
        let keys = zipf(300_000, 400_000);
        let sizes: Vec<f64> = (1..30).map(|i| f64::from(i) * 8000.0).collect();
        let mut mrc = Mrc::with_samples(1024);
        keys.iter().for_each(|k| mrc.access(*k));
        assert!(mrc.footprint() < 128 << 10, "{} bytes", mrc.footprint());
        for (got, want) in mrc
            .curve(&sizes)
            .iter()
            .zip(exact(keys.iter().copied(), &sizes))
        {
            assert!((got.1 - want.1).abs() < 0.08, "{got:?} {want:?}");
        }
    }

    #[test]
    fn a_threshold_lowered_from_outside_changes_little() {
        let keys = zipf(20_000, 200_000);
        let (mut all, mut part) = (Mrc::new(), Mrc::new());
        for (i, key) in keys.iter().enumerate() {
            if i == 50_000 {
                part.lower_threshold(ALL / 4);
            }
            all.access(*key);
            part.access(*key);
        }
        assert_eq!(part.threshold(), ALL / 4);
        for size in [500.0, 2000.0, 8000.0] {
            let (a, b) = (all.hit_ratio(size), part.hit_ratio(size));
            assert!((a - b).abs() < 0.04, "{size}: {a} {b}");
        }
    }

    #[test]
    fn writes_make_recent_but_do_not_count() {
        let mut mrc = Mrc::new();
        for round in 0..10u64 {
            for key in 0..100 {
                mrc.sampled(key, false);
                if round % 2 == 0 {
                    mrc.access(key);
                }
            }
        }
        assert_eq!(mrc.accesses(), 500.0);
        // Each read follows a write of the same block.
        assert!(mrc.hit_ratio(2.0) > 0.99);
        assert_eq!(mrc.blocks(), 100.0);
    }

    #[test]
    fn no_curve_is_made_of_nothing() {
        let mut mrc = Mrc::new();
        mrc.lower_threshold(1);
        mrc.count(100_000.0);
        assert_eq!((mrc.taken(), mrc.sample_blocks()), (0.0, 0));
        for (size, ratio) in mrc.points() {
            assert_eq!(ratio, 0.0, "at {size}");
        }
        assert_eq!(mrc.hit_ratio(1e9), 0.0);
        // Ten cold reads in the sample do not make hits of ten thousand nobody looked at either.
        let mut mrc = Mrc::new();
        (0..10).for_each(|key| mrc.access(key));
        mrc.count(10_000.0);
        assert!(mrc.hit_ratio(1e9) <= 0.5, "{}", mrc.hit_ratio(1e9));
    }

    #[test]
    fn what_was_lost_on_the_way_is_neither_hit_nor_miss() {
        let mut mrc = Mrc::new();
        for _ in 0..10 {
            (0..1000).for_each(|key| mrc.access(key));
        }
        let before = (mrc.hit_ratio(500.0), mrc.hit_ratio(2000.0));
        mrc.count(5000.0);
        mrc.missed(5000.0);
        assert_eq!((mrc.hit_ratio(500.0), mrc.hit_ratio(2000.0)), before);
        assert_eq!(mrc.accesses(), 15_000.0);
    }

    #[test]
    fn blocks_not_used_for_two_half_lives_leave_the_working_set() {
        let mut mrc = Mrc::with_samples(4096);
        // A scan once, and a hot set that goes on; many renumberings in between.
        (10_000..12_000).for_each(|key| mrc.access(key));
        for _ in 0..3 {
            for _ in 0..100 {
                (0..500).for_each(|key| mrc.access(key));
            }
            mrc.decay();
        }
        assert_eq!(mrc.blocks(), 500.0);
        (0..500).for_each(|key| mrc.access(key));
        assert!(mrc.hit_ratio(490.0) < 0.1 && mrc.hit_ratio(510.0) > 0.9);
        // The tree agrees with the table.
        assert_eq!(mrc.up_to(mrc.now - 1), 500);
    }
}
