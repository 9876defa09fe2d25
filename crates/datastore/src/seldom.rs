//! What is said of a file is said once, and again after an hour: it may happen a thousand times a second.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::store::lock;

/// How long nothing more is said of a file.
const REST: Duration = Duration::from_secs(3600);
/// Files of which something is said in that time: nobody reads more, and they are remembered.
const FILES_MAX: usize = 1000;

/// See the module.
pub(crate) struct Seldom<K>(Mutex<HashMap<K, Instant>>);

impl<K> Default for Seldom<K> {
    fn default() -> Seldom<K> {
        Seldom(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash> Seldom<K> {
    /// It is time to say it of this file.
    pub(crate) fn is_due(&self, file: &K) -> bool {
        self.is_due_at(file, Instant::now())
    }

    fn is_due_at(&self, file: &K, now: Instant) -> bool {
        let rests = |said: &Instant| now.saturating_duration_since(*said) < REST;
        let mut said = lock(&self.0);
        if said.get(file).is_some_and(rests) {
            return false;
        }
        if said.len() >= FILES_MAX {
            said.retain(|_, said| rests(said));
        }
        let has_room = said.len() < FILES_MAX;
        if has_room {
            said.insert(*file, now);
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use hearth_nfs::handle::Key;

    use super::*;

    #[test]
    fn each_file_is_told_of_once_an_hour_and_not_all_of_very_many() {
        let key = |n: usize| Key::new(&n.to_ne_bytes()).unwrap();
        let (seldom, now) = (Seldom::default(), Instant::now());
        assert!(seldom.is_due_at(&key(1), now));
        assert!(seldom.is_due_at(&key(2), now + REST / 2));
        assert!(!seldom.is_due_at(&key(1), now + REST / 2));
        assert!(seldom.is_due_at(&key(1), now + REST));
        assert!(!seldom.is_due_at(&key(2), now + REST));

        let due = (0..2 * FILES_MAX).filter(|n| seldom.is_due_at(&key(*n), now + REST * 2));
        assert_eq!(due.count(), FILES_MAX);
        assert!(seldom.is_due_at(&key(2 * FILES_MAX), now + REST * 3));
    }
}
