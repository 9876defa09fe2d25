//! A set of regions: a bit for each.

/// Which regions of a mirror something holds for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Regions {
    words: Vec<u64>,
    count: u32,
    set: u32,
}

impl Regions {
    /// None of `count`.
    pub fn none(count: u32) -> Regions {
        Regions {
            words: vec![0; count.div_ceil(64) as usize],
            count,
            set: 0,
        }
    }

    /// All of `count`.
    pub fn all(count: u32) -> Regions {
        let mut all = Regions::none(count);
        (0..count).for_each(|r| {
            all.insert(r);
        });
        all
    }

    /// There are more of them from now on; those are unset.
    pub fn grow(&mut self, count: u32) {
        if count > self.count {
            self.words.resize(count.div_ceil(64) as usize, 0);
            self.count = count;
        }
    }

    /// From bits, the lowest first; what is missing is unset, what is too much is ignored.
    pub fn from_words(count: u32, words: &[u64]) -> Regions {
        let mut regions = Regions::none(count);
        let bit = |r: &u32| {
            let word = words.get((r / 64) as usize).copied().unwrap_or(0);
            word >> (r % 64) & 1 == 1
        };
        (0..count).filter(bit).for_each(|r| {
            regions.insert(r);
        });
        regions
    }

    /// The bits, the lowest first.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// How many regions there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// How many are in the set.
    pub fn len(&self) -> u32 {
        self.set
    }

    /// True if none is.
    pub fn is_empty(&self) -> bool {
        self.set == 0
    }

    /// True if `region` is.
    pub fn has(&self, region: u32) -> bool {
        let word = self.words.get((region / 64) as usize);
        word.is_some_and(|w| w >> (region % 64) & 1 == 1)
    }

    /// True if any of these is.
    pub fn has_any(&self, mut regions: impl Iterator<Item = u32>) -> bool {
        self.set > 0 && regions.any(|r| self.has(r))
    }

    /// Adds one; true if it was not there.
    pub fn insert(&mut self, region: u32) -> bool {
        if region >= self.count || self.has(region) {
            return false;
        }
        if let Some(word) = self.words.get_mut((region / 64) as usize) {
            *word |= 1 << (region % 64);
            self.set += 1;
        }
        true
    }

    /// Takes one out; true if it was there.
    pub fn remove(&mut self, region: u32) -> bool {
        if !self.has(region) {
            return false;
        }
        if let Some(word) = self.words.get_mut((region / 64) as usize) {
            *word &= !(1 << (region % 64));
            self.set -= 1;
        }
        true
    }

    /// The first at or behind `from`.
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut at = from;
        while at < self.count {
            let word = self.words.get((at / 64) as usize)? >> (at % 64);
            if word != 0 {
                let found = at + word.trailing_zeros();
                return (found < self.count).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let found = self.next(at)?;
            at = found + 1;
            Some(found)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_come_and_go() {
        let mut regions = Regions::none(130);
        for r in [0, 63, 64, 129] {
            assert!(regions.insert(r));
            assert!(!regions.insert(r));
        }
        assert!(!regions.insert(130));
        assert_eq!(regions.iter().collect::<Vec<_>>(), [0, 63, 64, 129]);
        assert!(regions.remove(63) && !regions.remove(63));
        assert_eq!((regions.len(), regions.next(1)), (3, Some(64)));
        let again = Regions::from_words(130, regions.words());
        assert_eq!(again, regions);
        assert_eq!(Regions::from_words(64, regions.words()).len(), 1);
        assert_eq!(Regions::all(130).len(), 130);
        regions.grow(200);
        assert!(regions.insert(199) && regions.has(129) && !regions.has(130));
        assert_eq!((regions.count(), regions.len()), (200, 4));
    }
}
