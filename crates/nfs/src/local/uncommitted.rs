//! Files with data that is not durable yet.
//!
//! The kernel tells a failure to write back to those who had the file open when it happened. A file
//! that is opened anew for a commit might hear of nothing. So a file stays open from its first unstable
//! write to its commit. If there are too many, one is made durable early.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::handle::Key;

/// Files that are kept open.
const FILES_MAX: usize = 128;

/// See the module.
#[derive(Default)]
pub(super) struct Uncommitted(Mutex<HashMap<Key, Arc<File>>>);

impl Uncommitted {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<File>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file, if it is open.
    pub fn get(&self, key: &Key) -> Option<Arc<File>> {
        self.lock().get(key).cloned()
    }

    /// Keeps a file open, from before it is written, and again when it was: it may have been committed
    /// in between. What was kept for it before stays.
    pub fn keep(&self, key: &Key, file: Arc<File>) -> io::Result<Arc<File>> {
        let mut files = self.lock();
        let kept = Arc::clone(files.entry(*key).or_insert(file));
        let early = if files.len() > FILES_MAX {
            files
                .keys()
                .find(|k| *k != key)
                .copied()
                .and_then(|k| files.remove(&k))
        } else {
            None
        };
        drop(files);
        if let Some(early) = early {
            early.sync_all()?;
        }
        Ok(kept)
    }

    /// Keeps it no longer: it is being committed, or has no name any more.
    pub fn take(&self, key: &Key) -> Option<Arc<File>> {
        self.lock().remove(key)
    }
}
