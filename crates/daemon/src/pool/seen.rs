//! What the registry says, for whoever must not wait for the flash.
//!
//! A change of the registry is stored under the pool's lock, and takes as long as the flash takes: with a device that hangs, as long as
//! `--flash-timeout`. Whoever holds back what guests write until something is known must not wait for that: a change of one disk would
//! stop the writes of others. So what was stored last is shown here as well, and nobody keeps it for longer than it takes to look.

use std::sync::{Arc, Mutex};

use hearth_format::{DiskRecord, Registry};

use crate::daemon::lock;

/// The registry as it was stored last.
#[derive(Debug, Default)]
pub(crate) struct Seen(Mutex<Arc<Registry>>);

impl Seen {
    /// It says this from now on, durably.
    pub(super) fn show(&self, registry: &Registry) {
        *lock(&self.0) = Arc::new(registry.clone());
    }

    /// What it says.
    pub(crate) fn registry(&self) -> Arc<Registry> {
        lock(&self.0).clone()
    }

    /// The record of a disk.
    pub(crate) fn record(&self, id: u16) -> Option<DiskRecord> {
        self.registry().by_id(id).cloned()
    }
}
