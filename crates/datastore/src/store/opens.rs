//! Reports files of the datastore that other programs open on this host while data of them is on flash only.

use std::fs::File;
use std::sync::Weak;

use hearth_nfs::handle::Key;

use super::{Inner, lock, name_of};
use crate::body::Body;
use crate::opens::{Opens, name_process};

/// Reports files that are opened, until the datastore is stopped.
pub(super) fn keep(opens: &Opens<Key>, inner: &Weak<Inner>) {
    opens.keep(|opened| {
        let Some(inner) = inner.upgrade().filter(|inner| !inner.is_stopped()) else {
            return false;
        };
        for (key, process) in opened {
            inner.opened_by_other(opens, key, *process);
        }
        true
    });
}

impl Inner {
    /// The file is a disk from now on.
    pub(super) fn watch_opens(&self, key: &Key, body: &Body) {
        if let Some(opens) = self.opens.clone() {
            let key = *key;
            body.when_opened(move |file| opens.watch(key, file));
        }
    }

    /// Stops watching the file.
    pub(super) fn ignore_opens(&self, key: &Key, body: &Body) {
        if let Some(opens) = &self.opens {
            body.each_open(&mut |file: &File| opens.leave(key, file));
        }
    }

    fn opened_by_other(&self, opens: &Opens<Key>, key: &Key, process: u32) {
        let file = lock(&self.files).get(key).cloned();
        let Some(cached) = file.and_then(|file| file.cached()) else {
            return;
        };
        let owed = self.disks.owed(cached.disk);
        if owed > 0 && opens.is_due(key) {
            let name = name_of(cached.origin.file(), key);
            self.disks
                .opened_by_other(&name, owed, &name_process(process));
        }
    }
}
