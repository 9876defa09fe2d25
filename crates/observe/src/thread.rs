//! The observer's part on a data thread: finds the disk, gathers what ends in a round.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hearth_engine::api::{DiskId, Request};
use hearth_reactor::{Ended, Watch};

use crate::disk::Disk;
use crate::observer::Shared;

/// See the module.
pub(crate) struct ThreadWatch {
    shared: Arc<Shared>,
    /// Disks found so far, by number, while the table is of this generation.
    found: Vec<Option<Option<Arc<Disk>>>>,
    generation: u64,
    ended: Vec<Ended>,
}

impl ThreadWatch {
    pub(crate) fn new(shared: Arc<Shared>) -> ThreadWatch {
        ThreadWatch {
            generation: shared.generation.load(Ordering::Acquire),
            shared,
            found: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// The disk, without a lock but for the first time.
    fn disk(&mut self, id: DiskId) -> Option<&Arc<Disk>> {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.found.clear();
            self.generation = generation;
        }
        let at = usize::from(id);
        if self.found.len() <= at {
            self.found.resize(at + 1, None);
        }
        let shared = &self.shared;
        self.found[at]
            .get_or_insert_with(|| shared.disk(id))
            .as_ref()
    }
}

impl Watch for ThreadWatch {
    fn arrived(&mut self, requests: &[Request]) {
        // What ended before must not count as outstanding.
        self.settle();
        let mut wake = false;
        for run in requests.chunk_by(|a, b| a.disk == b.disk) {
            if let Some(disk) = run.first().and_then(|r| self.disk(r.disk)) {
                wake |= disk.arrived(run);
            }
        }
        if wake {
            self.shared.wake();
        }
    }

    fn ended(&mut self, ended: Ended) {
        self.ended.push(ended);
    }

    fn settle(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        let mut ended = std::mem::take(&mut self.ended);
        for run in ended.chunk_by(|a, b| a.disk == b.disk) {
            if let Some(disk) = run.first().and_then(|e| self.disk(e.disk)) {
                disk.ended(run);
            }
        }
        ended.clear();
        self.ended = ended;
    }
}
