//! A set of block numbers of one disk that comes in runs, however long: what was discarded or zeroed.
//!
//! It takes memory, and records in the log, for each run and not for each block, so how many runs
//! there are is what has to be bounded.

use rangemap::RangeSet;
use std::ops::Range;

/// Block numbers; ordered.
#[derive(Debug, Default, Clone)]
pub(crate) struct RunSet(RangeSet<u64>);

impl RunSet {
    /// What of `start..end` is in the set.
    fn parts(&self, start: u64, end: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        // The set must not be asked about a range without blocks.
        let asked = start..end.max(start + 1);
        let parts = self.0.overlapping(asked);
        parts
            .map(move |r| r.start.max(start)..r.end.min(end))
            .filter(|r| r.start < r.end)
    }

    pub fn insert_range(&mut self, start: u64, end: u64) {
        if end > start {
            self.0.insert(start..end);
        }
    }

    pub fn remove_range(&mut self, start: u64, end: u64) {
        if end > start {
            self.0.remove(start..end);
        }
    }

    pub fn remove(&mut self, block: u64) {
        self.remove_range(block, block + 1);
    }

    pub fn contains(&self, block: u64) -> bool {
        self.0.contains(&block)
    }

    /// Blocks; counts the runs.
    pub fn len(&self) -> u64 {
        self.runs().map(|(_, count)| count).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn clear(&mut self) {
        *self = RunSet::default();
    }

    /// The first member in `start..end`.
    pub fn first_in(&self, start: u64, end: u64) -> Option<u64> {
        self.parts(start, end).next().map(|r| r.start)
    }

    /// What of `start..end` is in the set, as runs: first block and length.
    pub fn runs_within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.parts(start, end).map(|r| (r.start, r.end - r.start))
    }

    /// How many consecutive blocks from `start` are members, at most `max`.
    pub fn run_len(&self, start: u64, max: u64) -> u64 {
        let run = self.0.get(&start);
        run.map_or(0, |r| (r.end - start).min(max))
    }

    /// True if taking `start..end` out would cut one run in two.
    pub fn is_cut_by(&self, start: u64, end: u64) -> bool {
        let run = self.0.get(&start);
        run.is_some_and(|r| r.start < start && end < r.end)
    }

    /// True if `start..end` would be a new run of its own: it touches none that is there.
    pub fn stands_apart(&self, start: u64, end: u64) -> bool {
        self.parts(start.saturating_sub(1), end + 1)
            .next()
            .is_none()
    }

    /// The set as runs: first block and length.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|r| (r.start, r.end - r.start))
    }

    /// Runs.
    pub fn run_count(&self) -> u64 {
        self.0.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_agrees_with_a_set_of_blocks(
            ops in proptest::collection::vec((0u8..3, 0u64..64, 0u64..12), 1..80)
        ) {
            let (mut runs, mut model) = (RunSet::default(), BTreeSet::new());
            for (op, start, len) in ops {
                let end = start + len;
                match op {
                    0 => {
                        runs.insert_range(start, end);
                        model.extend(start..end);
                    }
                    1 => {
                        runs.remove_range(start, end);
                        model.retain(|b| !(start..end).contains(b));
                    }
                    _ => {
                        runs.remove(start);
                        model.remove(&start);
                    }
                }
                prop_assert_eq!(runs.len(), model.len() as u64);
                prop_assert_eq!(runs.is_empty(), model.is_empty());
                prop_assert_eq!(runs.first_in(start, end), model.range(start..end).next().copied());
                prop_assert!(runs.runs_within(start, end).flat_map(|(b, n)| b..b + n).eq(model.range(start..end).copied()));
                let run = (start..).take_while(|b| model.contains(b)).count() as u64;
                prop_assert_eq!(runs.run_len(start, u64::MAX), run);
                prop_assert_eq!(runs.contains(start), run > 0);
                if len > 0 {
                    let (mut with, mut without) = (runs.clone(), runs.clone());
                    with.insert_range(start, end);
                    without.remove_range(start, end);
                    prop_assert_eq!(runs.stands_apart(start, end), with.run_count() > runs.run_count());
                    prop_assert_eq!(runs.is_cut_by(start, end), without.run_count() > runs.run_count());
                }
                let ends = model.iter().filter(|b| !model.contains(&(*b + 1)));
                prop_assert_eq!(runs.run_count(), ends.count() as u64);
                prop_assert_eq!(runs.runs().map(|(_, n)| n).sum::<u64>(), runs.len());
            }
        }
    }

    #[test]
    fn the_largest_disk_is_one_run() {
        let mut runs = RunSet::default();
        runs.insert_range(0, 1 << 36);
        assert_eq!((runs.run_count(), runs.len()), (1, 1 << 36));
        assert_eq!(runs.run_len(5, u64::MAX), (1 << 36) - 5);
        assert_eq!(runs.first_in(7, u64::MAX), Some(7));
    }
}
