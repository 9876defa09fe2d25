//! The figures by which latencies are told, whatever they were counted in.

use serde::{Deserialize, Serialize};

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
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

impl Percentiles {
    /// The figures of `count` latencies; `at` says below which latency a share of them lies. None are all
    /// zeros.
    pub fn of(count: u64, mean_us: f64, max_us: f64, at: impl Fn(f64) -> f64) -> Percentiles {
        if count == 0 {
            return Percentiles::default();
        }
        Percentiles {
            count,
            mean_us,
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us,
        }
    }
}

/// The bucket below whose end lies this share of `total` values: `buckets` in ascending order, each with how
/// many values are in it. `None` if there are fewer values than `total`, or none at all.
pub fn quantile<T>(
    buckets: impl IntoIterator<Item = (u64, T)>,
    total: u64,
    share: f64,
) -> Option<T> {
    let rank = ((share * total as f64).ceil() as u64).clamp(1, total.max(1));
    let mut seen = 0u64;
    buckets.into_iter().find_map(|(count, bucket)| {
        seen = seen.saturating_add(count);
        (seen >= rank).then_some(bucket)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_ends_in_the_bucket_that_holds_its_last_value() {
        let buckets = [(1, 'a'), (0, 'b'), (8, 'c'), (1, 'd')];
        let at = |share| quantile(buckets, 10, share);
        assert_eq!((at(0.0), at(0.1)), (Some('a'), Some('a')));
        assert_eq!((at(0.11), at(0.9)), (Some('c'), Some('c')));
        assert_eq!((at(0.91), at(1.0)), (Some('d'), Some('d')));
        assert_eq!(quantile::<char>([], 0, 0.5), None);
    }

    #[test]
    fn no_requests_have_no_latency() {
        assert_eq!(
            Percentiles::of(0, 3.0, 4.0, |_| 5.0),
            Percentiles::default()
        );
        let some = Percentiles::of(2, 3.0, 4.0, |share| share);
        assert_eq!((some.p50_us, some.p999_us, some.max_us), (0.5, 0.999, 4.0));
    }
}
