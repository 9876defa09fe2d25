//! Who changes what at this moment, so that "before" and "after" are told only of changes that nobody
//! else came into.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::handle::Key;

#[derive(Default)]
struct Spot {
    under_way: u32,
    begun: u64,
}

/// See the module.
#[derive(Default)]
pub(super) struct Changes(Mutex<HashMap<Key, Spot>>);

/// A change that is under way.
pub(super) struct Change<'a> {
    changes: &'a Changes,
    key: Key,
    alone: bool,
    number: u64,
}

impl Changes {
    /// A change begins.
    pub fn begin(&self, key: &Key) -> Change<'_> {
        let mut spots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let spot = spots.entry(*key).or_default();
        let alone = spot.under_way == 0;
        spot.under_way += 1;
        spot.begun += 1;
        Change {
            changes: self,
            key: *key,
            alone,
            number: spot.begun,
        }
    }
}

impl Change<'_> {
    /// True if no other change of it was under way since this one began.
    pub fn alone(&self) -> bool {
        let spots = self
            .changes
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.alone
            && spots
                .get(&self.key)
                .is_some_and(|spot| spot.begun == self.number)
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut spots = self
            .changes
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(spot) = spots.get_mut(&self.key) {
            spot.under_way -= 1;
            if spot.under_way == 0 {
                spots.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_who_were_alone_are_told_so() {
        let changes = Changes::default();
        let [a, b] = [b"a", b"b"].map(|k| Key::new(k).expect("short"));
        let first = changes.begin(&a);
        let elsewhere = changes.begin(&b);
        assert!(first.alone() && elsewhere.alone());
        let second = changes.begin(&a);
        assert!(!first.alone() && !second.alone());
        drop(first);
        // It has seen the other's change.
        assert!(!second.alone());
        drop(second);
        assert!(changes.begin(&a).alone());
        drop(elsewhere);
        assert!(changes.0.lock().expect("whole").is_empty());
    }
}
