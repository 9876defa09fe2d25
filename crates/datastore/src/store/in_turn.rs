//! Large files that two clients write in turn.
//!
//! Nobody locks files here, and two hosts that have the same virtual disk in use destroy what is in it. It is found where
//! calls come in, where nobody may wait; so it is only noted there, and told by who looks after the datastore. Small files
//! are none of its business: hosts share those on purpose.

use std::sync::Mutex;

use hearth_nfs::handle::Key;

use super::{Inner, lock, name_of};
use crate::seldom::Seldom;

/// More are not noted at a time.
const NOTED_MAX: usize = 64;

/// See the module.
#[derive(Default)]
pub(super) struct InTurn {
    told: Seldom<Key>,
    noted: Mutex<Vec<(Key, [String; 2])>>,
}

impl Inner {
    /// Must not block.
    pub(super) fn note_in_turn(&self, key: &Key, clients: [String; 2]) {
        if self.is_known(key).is_none() {
            return;
        }
        let mut noted = lock(&self.in_turn.noted);
        if noted.len() < NOTED_MAX && self.in_turn.told.is_due(key) {
            noted.push((*key, clients));
        }
    }

    pub(super) fn tell_in_turn(&self) {
        let noted = std::mem::take(&mut *lock(&self.in_turn.noted));
        for (key, clients) in noted {
            let file = lock(&self.files).get(&key).cloned();
            if let Some(cached) = file.and_then(|file| file.cached()) {
                let name = name_of(cached.origin.file(), &key);
                self.disks.written_by_two(&name, &clients);
            }
        }
    }
}
