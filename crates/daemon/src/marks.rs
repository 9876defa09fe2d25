//! Disks whose origin is being opened, which may take as long as the origin likes.
//!
//! Opening holds no lock, so that operations on other disks go on. Instead the disk has a mark: nobody
//! else opens, changes or removes it meanwhile. A mark is set only by who holds the lock of the operations
//! (or before anybody can ask), and looked at only with it, so between the look and the change nobody sets
//! one. It is given back whatever becomes of the opening, and who waits for that is told.

use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use hearth_engine::api::DiskId;
use std::collections::BTreeSet;
use std::time::Duration;

/// The marks of all disks.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    held: Mutex<BTreeSet<DiskId>>,
    given_back: Condvar,
}

/// A disk's mark, until dropped.
#[derive(Debug)]
pub(crate) struct Mark {
    marks: Arc<Marks>,
    id: DiskId,
}

impl Mark {
    /// Whose it is.
    pub(crate) fn id(&self) -> DiskId {
        self.id
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.marks.lock().remove(&self.id);
        self.marks.given_back.notify_all();
    }
}

impl Marks {
    /// Marks a disk; `None` if it has the mark already.
    pub(crate) fn take(self: &Arc<Marks>, id: DiskId) -> Option<Mark> {
        self.lock().insert(id).then(|| Mark {
            marks: self.clone(),
            id,
        })
    }

    /// True while the disk has the mark.
    pub(crate) fn contains(&self, id: DiskId) -> bool {
        self.lock().contains(&id)
    }

    /// Returns `ops`, the lock of the operations, if the disk has no mark. Else lets go of it and
    /// waits until the mark is given back, or for `limit`; then all has to be looked at anew.
    pub(crate) fn free_or_wait<G>(&self, id: DiskId, ops: G, limit: Duration) -> Option<G> {
        let held = self.lock();
        if !held.contains(&id) {
            return Some(ops);
        }
        // Who opens the disk needs it to end.
        drop(ops);
        let waited = self
            .given_back
            .wait_timeout_while(held, limit, |held| held.contains(&id));
        drop(waited);
        None
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<DiskId>> {
        self.held.lock().unwrap_or_else(|e| e.into_inner())
    }
}
