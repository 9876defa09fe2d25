//! Who may change which range. Two writes of one range must reach all legs in the same order, and what is
//! copied from one leg to another must not be written meanwhile; so they take turns, first come first served.

use std::collections::{BTreeMap, VecDeque};

/// Ranges that are held, and who waits for one.
#[derive(Debug)]
pub(crate) struct Locks<T> {
    /// Start to end and owner; they do not overlap.
    held: BTreeMap<u64, (u64, T)>,
    waiting: VecDeque<(u64, u64, T)>,
}

impl<T: Copy + PartialEq> Locks<T> {
    pub(crate) fn new() -> Locks<T> {
        Locks {
            held: BTreeMap::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Takes `start..end`; false if it has to be waited for.
    pub(crate) fn take(&mut self, start: u64, end: u64, who: T) -> bool {
        let behind = self.waiting.iter().any(|(s, e, _)| *s < end && start < *e);
        if behind || self.is_held(start, end) {
            self.waiting.push_back((start, end, who));
            return false;
        }
        self.held.insert(start, (end, who));
        true
    }

    fn is_held(&self, start: u64, end: u64) -> bool {
        let last = self.held.range(..end).next_back();
        last.is_some_and(|(_, (held_end, _))| *held_end > start)
    }

    /// Gives back what `who` holds from `start`, or does not wait any more; who has their turn now.
    pub(crate) fn give(&mut self, start: u64, who: T) -> Vec<T> {
        if self.held.get(&start).is_some_and(|(_, w)| *w == who) {
            self.held.remove(&start);
        } else {
            self.waiting.retain(|(_, _, w)| *w != who);
        }
        let mut turns = Vec::new();
        let mut passed: Vec<(u64, u64)> = Vec::new();
        let mut left = VecDeque::new();
        for (s, e, w) in std::mem::take(&mut self.waiting) {
            let behind = passed.iter().any(|(ps, pe)| *ps < e && s < *pe);
            if behind || self.is_held(s, e) {
                passed.push((s, e));
                left.push_back((s, e, w));
            } else {
                self.held.insert(s, (e, w));
                turns.push(w);
            }
        }
        self.waiting = left;
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_first_goes_first() {
        let mut locks = Locks::new();
        assert!(locks.take(0, 10, 1));
        assert!(locks.take(10, 20, 2));
        assert!(!locks.take(5, 15, 3));
        assert!(!locks.take(0, 5, 4) && !locks.take(12, 30, 5), "both hold");
        assert!(locks.take(40, 50, 6));
        assert_eq!(locks.give(0, 1), [4]);
        assert_eq!(locks.give(10, 2), [3], "5 came later");
        assert_eq!(locks.give(12, 5), [], "it does not wait any more");
        assert!(!locks.take(14, 16, 7));
        assert_eq!(locks.give(5, 3), [7]);
    }
}
