//! What files of datastores would gain from flash: which of them are watched.
//!
//! A file in use is watched as a disk is. Most files are not in use, and are to cost nothing; but one that is used
//! every few minutes would never be known if it were forgotten whenever it rests. So a few of those that were used last stay
//! known.

use std::collections::VecDeque;
use std::path::Path;

use hearth_datastore::origin::FileOrigin;
use hearth_engine::api::DiskId;

use super::super::{Daemon, lock};

/// Files that stay known while nobody uses them: a curve takes less than 1 MiB.
const RESTED_MAX: usize = 32;

/// Files that were used, the last one at the end, with what they were called.
#[derive(Default)]
pub(super) struct Rested(VecDeque<(DiskId, String)>);

impl Rested {
    fn take(&mut self, id: DiskId) {
        self.0.retain(|(known, _)| *known != id);
    }

    /// Which one is known no longer.
    fn put(&mut self, id: DiskId, name: String) -> Option<DiskId> {
        self.take(id);
        self.0.push_back((id, name));
        match self.0.len() > RESTED_MAX {
            true => self.0.pop_front().map(|(id, _)| id),
            false => None,
        }
    }
}

impl Daemon {
    /// A file is in use from now on.
    pub(super) fn watch_file(&self, id: DiskId, origin: &FileOrigin) {
        lock(&self.stores.rested).take(id);
        // It may grow, so it is watched as if it were as long as it may be.
        if self.observer.watch_disk(id, origin.bound()) {
            self.recall_curve_later(id);
        }
    }

    /// A file is not in use any more.
    pub(super) fn rest_file(&self, id: DiskId, origin: &FileOrigin) {
        let name = origin.path().map(|path| path.display().to_string());
        let gone = match name {
            Some(name) => lock(&self.stores.rested).put(id, name),
            None => Some(id),
        };
        if let Some(gone) = gone {
            self.observer.forget_disk(gone);
        }
    }

    /// A file is gone.
    pub(super) fn unwatch_file(&self, id: DiskId) {
        lock(&self.stores.rested).take(id);
        self.observer.forget_disk(id);
    }

    /// Files that are watched: the disk, and its datastore and path with a `/` between them, as no disk is called.
    pub(in crate::daemon) fn watched_files(&self) -> Vec<(DiskId, String)> {
        let served = self.stores.numbers.served().into_iter();
        let served =
            served.filter_map(|(id, origin)| Some((id, origin.path()?.display().to_string())));
        let mut all: Vec<(DiskId, String)> = served.collect();
        all.extend(lock(&self.stores.rested).0.iter().cloned());
        all.sort();
        // One that has just been closed, or opened, may be in both.
        all.dedup_by_key(|(id, _)| *id);
        let stores = lock(&self.stores.by_name);
        let within = |id: DiskId, path: String| {
            let store = lock(&self.pool).record(id)?.datastore.clone();
            let directory = &stores.get(&store)?.record.directory;
            let path = Path::new(&path).strip_prefix(directory).ok()?;
            Some((id, format!("{store}/{}", path.display())))
        };
        let named = all.into_iter().filter_map(|(id, path)| within(id, path));
        named.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_used_last_stay_known() {
        let mut rested = Rested::default();
        for id in 1..=RESTED_MAX as DiskId {
            assert_eq!(rested.put(id, String::new()), None);
        }
        // Used again, and rests again: it is the last one now.
        assert_eq!(rested.put(1, String::new()), None);
        assert_eq!(rested.put(1000, String::new()), Some(2));
        rested.take(3);
        assert_eq!(rested.put(1001, String::new()), None);
        assert_eq!(rested.put(1002, String::new()), Some(4));
    }
}
