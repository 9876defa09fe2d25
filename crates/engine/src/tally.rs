//! Latencies small enough to keep many of: one for every step of every window of every disk.
//!
//! A full histogram takes 12 KiB or more. Eight buckets per doubling, of which only those in use are
//! stored, take a few hundred bytes and still give percentiles to within 13 %.

use hearth_policy::{Percentiles, quantile};

/// log2 of the buckets per doubling.
const SUB_BITS: u32 = 3;
const SUB: u64 = 1 << SUB_BITS;

/// Bits of a count: a million requests per second reach the end of it in two thousand years.
const COUNT_BITS: u32 = 56;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;

/// A bucket and its cumulative count, in one word because there are so many: a busy disk's main
/// bucket passes 2^32 within hours, and a wider pair would take twice the RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    fn new(bucket: u8, count: u64) -> Entry {
        Entry(u64::from(bucket) << COUNT_BITS | count.min(COUNT_MAX))
    }

    fn bucket(self) -> u8 {
        (self.0 >> COUNT_BITS) as u8
    }

    fn count(self) -> u64 {
        self.0 & COUNT_MAX
    }
}

/// Cumulative counts of latencies, by bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(Box<[Entry]>);

fn bucket(us: u64) -> u8 {
    if us < SUB {
        return us as u8;
    }
    let octave = us.ilog2() - SUB_BITS;
    (u64::from(octave + 1) * SUB + ((us >> octave) & (SUB - 1))).min(u64::from(u8::MAX)) as u8
}

/// The largest latency that falls into the bucket, microseconds.
fn upper(bucket: u8) -> u64 {
    let bucket = u64::from(bucket);
    if bucket < SUB {
        return bucket;
    }
    let octave = bucket / SUB - 1;
    ((SUB + bucket % SUB + 1) << octave) - 1
}

impl Tally {
    /// Counts latencies in microseconds with how often they occurred, in ascending order.
    pub fn of(values: impl Iterator<Item = (u64, u64)>) -> Tally {
        let mut out: Vec<Entry> = Vec::new();
        for (us, count) in values {
            let b = bucket(us);
            match out.last_mut() {
                Some(last) if last.bucket() == b => {
                    *last = Entry::new(b, last.count().saturating_add(count));
                }
                _ => out.push(Entry::new(b, count)),
            }
        }
        Tally(out.into_boxed_slice())
    }

    /// What was counted after `earlier`, an older state of the same tally.
    pub fn since(&self, earlier: &Tally) -> Tally {
        let mut before = earlier.0.iter().peekable();
        let left = self.0.iter().filter_map(|now| {
            let b = now.bucket();
            while before.next_if(|e| e.bucket() < b).is_some() {}
            let old = before.next_if(|e| e.bucket() == b).map_or(0, |e| e.count());
            let n = now.count().saturating_sub(old);
            (n > 0).then(|| Entry::new(b, n))
        });
        Tally(left.collect())
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|e| e.count()).sum()
    }

    /// How many there were below `us` microseconds: exact where a bucket ends there, as one does at every power
    /// of two.
    pub fn below(&self, us: u64) -> u64 {
        let below = self.0.iter().take_while(|e| upper(e.bucket()) < us);
        below.map(|e| e.count()).sum()
    }

    /// The usual figures; each is the upper end of a bucket, the mean that of the buckets' middles.
    pub fn percentiles(&self) -> Percentiles {
        let count = self.count();
        let at = |share: f64| {
            let buckets = self.0.iter().map(|e| (e.count(), e.bucket()));
            quantile(buckets, count, share).map_or(0, upper) as f64
        };
        let lower = |b: u8| b.checked_sub(1).map_or(0, |b| upper(b) + 1);
        let middle = |b: u8| (lower(b) + upper(b)) as f64 / 2.0;
        let sums = self.0.iter().map(|e| middle(e.bucket()) * e.count() as f64);
        let sum: f64 = sums.sum();
        Percentiles::of(count, sum / count as f64, at(1.0), at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_one_another_without_gaps() {
        for b in 0..u8::MAX {
            assert_eq!(bucket(upper(b)), b);
            assert_eq!(bucket(upper(b) + 1), b + 1);
        }
        assert!(upper(bucket(1_000_000_000)) >= 1_000_000_000);
    }

    #[test]
    fn a_window_holds_only_what_came_later() {
        let early = Tally::of([(5, 10), (900, 1)].into_iter());
        let late = Tally::of([(5, 10), (100, 98), (900, 1), (20_000, 2)].into_iter());
        let window = late.since(&early).percentiles();
        assert_eq!(window.count, 100);
        assert!((100.0..110.0).contains(&window.p50_us), "{window:?}");
        assert!((20_000.0..22_500.0).contains(&window.p99_us), "{window:?}");
        assert_eq!(late.since(&late), Tally::default());
        assert_eq!(Tally::default().percentiles(), Percentiles::default());
    }

    #[test]
    fn what_is_below_a_power_of_two_is_counted_exactly() {
        let tally = Tally::of([(0, 1), (127, 2), (128, 4), (1023, 8), (1024, 16)].into_iter());
        let below = [1, 128, 256, 1024, 2048].map(|us| tally.below(us));
        assert_eq!(below, [1, 3, 7, 15, 31]);
        assert_eq!(tally.count(), 31);
    }

    #[test]
    fn a_window_across_what_32_bits_count_holds_all() {
        let at = |n: u64| Tally::of([(5, n), (900, 3)].into_iter());
        let (early, late) = (at(u64::from(u32::MAX) - 10), at(1 << 33));
        let window = late.since(&early).percentiles();
        assert_eq!(window.count, (1 << 33) - u64::from(u32::MAX) + 10);
        assert_eq!(window.p50_us, 5.0);
        // The first and the last bucket leave each other alone.
        let ends = Tally::of([(0, 7), (u64::MAX >> 1, u64::MAX)].into_iter());
        assert_eq!(
            ends.since(&Tally::of([(0, 6)].into_iter())).0[0],
            Entry::new(0, 1)
        );
        assert_eq!(ends.0[1], Entry::new(u8::MAX, COUNT_MAX));
    }

    proptest! {
        #[test]
        fn percentiles_are_right_to_a_bucket(mut us in proptest::collection::vec(1u64..2_000_000, 1..400)) {
            us.sort_unstable();
            let p = Tally::of(us.iter().map(|u| (*u, 1))).percentiles();
            let exact = us[(us.len() - 1) / 2] as f64;
            prop_assert!(p.p50_us >= exact && p.p50_us <= exact * 1.13 + 1.0, "{} {exact}", p.p50_us);
            prop_assert!(p.max_us >= us[us.len() - 1] as f64);
        }
    }
}
