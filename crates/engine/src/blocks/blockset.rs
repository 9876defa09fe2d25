//! A set of block numbers of one disk, with the range questions the data path asks.

use roaring::RoaringTreemap;

/// Block numbers, compressed; ordered.
#[derive(Debug, Default, Clone)]
pub(crate) struct BlockSet {
    set: RoaringTreemap,
    /// Kept beside the set, which would have to count.
    len: u64,
}

impl BlockSet {
    pub fn insert(&mut self, block: u64) -> bool {
        let new = self.set.insert(block);
        self.len += u64::from(new);
        new
    }

    pub fn insert_range(&mut self, start: u64, end: u64) {
        self.len += self.set.insert_range(start..end);
    }

    pub fn remove(&mut self, block: u64) -> bool {
        if self.len == 0 {
            return false;
        }
        let had = self.set.remove(block);
        self.len -= u64::from(had);
        had
    }

    pub fn remove_range(&mut self, start: u64, end: u64) {
        if self.len > 0 {
            self.len -= self.set.remove_range(start..end);
        }
    }

    pub fn contains(&self, block: u64) -> bool {
        self.len > 0 && self.set.contains(block)
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn clear(&mut self) {
        *self = BlockSet::default();
    }

    /// The first member in `start..end`.
    pub fn first_in(&self, start: u64, end: u64) -> Option<u64> {
        if self.len == 0 || start >= end {
            return None;
        }
        let mut iter = self.set.iter();
        iter.advance_to(start);
        iter.next().filter(|b| *b < end)
    }

    /// Members in `start..end`, in order.
    pub fn range(&self, start: u64, end: u64) -> impl Iterator<Item = u64> + '_ {
        let mut iter = self.set.iter();
        iter.advance_to(start);
        iter.take_while(move |b| *b < end)
    }

    /// How many consecutive blocks from `start` are members, at most `max`.
    pub fn run_len(&self, start: u64, max: u64) -> u64 {
        self.range(start, start.saturating_add(max))
            .zip(start..)
            .take_while(|(a, b)| a == b)
            .count() as u64
    }

    /// The set as runs.
    pub fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for block in self.set.iter() {
            match runs.last_mut() {
                Some((start, count)) if *start + *count == block => *count += 1,
                _ => runs.push((block, 1)),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_once_whatever_they_meet() {
        let mut set = BlockSet::default();
        set.insert(5);
        set.insert_range(3, 9);
        set.insert_range(8, 10);
        assert_eq!((set.len(), set.runs()), (7, vec![(3, 7)]));
        set.remove_range(0, 4);
        set.remove_range(6, 8);
        set.remove_range(20, 30);
        assert_eq!((set.len(), set.runs()), (4, vec![(4, 2), (8, 2)]));
        set.insert_range(7, 7);
        assert_eq!(set.len(), 4);
    }
}
