//! Latencies small enough to keep many of: one for every step of every window of every disk.
//!
//! A full histogram takes 12 KiB. Eight buckets per doubling, of which only those in use are
//! stored, take a few hundred bytes and still give percentiles to within 13 %.

use crate::stats::Percentiles;

/// log2 of the buckets per doubling.
const SUB_BITS: u32 = 3;
const SUB: u64 = 1 << SUB_BITS;

/// Cumulative counts of latencies, by bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(Box<[(u8, u32)]>);

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
        let mut out: Vec<(u8, u32)> = Vec::new();
        for (us, count) in values {
            let (b, count) = (bucket(us), u32::try_from(count).unwrap_or(u32::MAX));
            match out.last_mut() {
                Some((last, n)) if *last == b => *n = n.saturating_add(count),
                _ => out.push((b, count)),
            }
        }
        Tally(out.into_boxed_slice())
    }

    /// What was counted after `earlier`, an older state of the same tally.
    pub fn since(&self, earlier: &Tally) -> Tally {
        let mut before = earlier.0.iter().peekable();
        let left = self.0.iter().filter_map(|&(b, n)| {
            while before.next_if(|(e, _)| *e < b).is_some() {}
            let old = before.next_if(|(e, _)| *e == b).map_or(0, |(_, n)| *n);
            Some((b, n.saturating_sub(old))).filter(|(_, n)| *n > 0)
        });
        Tally(left.collect())
    }

    /// The usual figures; each is the upper end of a bucket, the mean that of the buckets' middles.
    pub fn percentiles(&self) -> Percentiles {
        let count: u64 = self.0.iter().map(|(_, n)| u64::from(*n)).sum();
        if count == 0 {
            return Percentiles::default();
        }
        let at = |quantile: f64| {
            let rank = ((count as f64 * quantile).ceil() as u64).max(1);
            let mut seen = 0;
            let found = self.0.iter().find(|(_, n)| {
                seen += u64::from(*n);
                seen >= rank
            });
            found.map_or(0, |(b, _)| upper(*b)) as f64
        };
        let lower = |b: u8| b.checked_sub(1).map_or(0, |b| upper(b) + 1);
        let middle = |b: u8| (lower(b) + upper(b)) as f64 / 2.0;
        let sum: f64 = self.0.iter().map(|(b, n)| middle(*b) * f64::from(*n)).sum();
        Percentiles {
            count,
            mean_us: sum / count as f64,
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
        }
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
