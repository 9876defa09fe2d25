//! What goes on while nobody asks for anything: disks that nobody uses are closed, what is dirty is opened to be
//! written back, and files that are gone are forgotten.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_nfs::handle::Key;
use hearth_nfs::v3::Status;

use super::{Census, Inner, lock};
use crate::file::Alone;

/// After which a disk that nobody uses is closed.
const IDLE: Duration = Duration::from_secs(30);
/// How often files nobody uses are looked for.
const ROUND: Duration = Duration::from_secs(1);
/// How often it is looked whether everything is written back, while somebody waits for that.
const FLUSH_ROUND: Duration = Duration::from_millis(50);

/// Closes disks that nobody uses, and forgets files that are gone.
pub(super) fn keep(inner: &Weak<Inner>) {
    if let Some(inner) = inner.upgrade() {
        inner.open_dirty();
        inner.forget_gone();
    }
    loop {
        let Some(inner) = inner.upgrade() else { return };
        let stop = lock(&inner.stop);
        if *stop {
            return;
        }
        let flushing = inner.flushing.load(Ordering::SeqCst);
        let round = if flushing { FLUSH_ROUND } else { ROUND };
        let waited = inner.bell.wait_timeout(stop, round);
        let (stop, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *stop {
            return;
        }
        drop(stop);
        if inner.flushing.load(Ordering::SeqCst) {
            inner.flush();
        }
        inner.tell_in_turn();
        inner.close_idle();
        inner.shelf.age();
    }
}

impl Inner {
    pub(super) fn census(&self) -> Census {
        let known = self.known();
        Census {
            disks: known.len() as u64,
            open: self.open().len() as u64,
            dirty: known.iter().map(|(_, disk)| self.disks.owed(*disk)).sum(),
            flushing: self.flushing.load(Ordering::SeqCst),
        }
    }

    /// Serves files that have something only on flash, so that it is written back.
    pub(super) fn open_dirty(&self) {
        for (key, disk) in self.known() {
            if self.disks.owed(disk) == 0 || self.is_stopped() {
                continue;
            }
            if let Err(status) = self.begin(&key)
                && status != Status::Stale
            {
                tracing::warn!("a file with something only on flash cannot be opened: {status}");
            }
        }
    }

    /// Forgets files that were removed while nobody looked.
    fn forget_gone(&self) {
        for (key, disk) in self.known() {
            if self.is_stopped() {
                return;
            }
            self.forget_if_gone(&key, disk);
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        *lock(&self.stop)
    }

    pub(super) fn forget_if_gone(&self, key: &Key, disk: DiskId) {
        if self.dir.attributes(key) != Err(Status::Stale) {
            return;
        }
        let alone = self.file(key).take();
        if !self.forget(&alone, key, disk) {
            tracing::warn!(
                disk,
                "the cache of a file that is gone cannot be dropped now"
            );
        }
    }

    pub(super) fn forget(&self, alone: &Alone, key: &Key, disk: DiskId) -> bool {
        let gone = self.disks.forget(key, disk);
        if gone {
            if let Some(cached) = alone.cached() {
                self.ignore_opens(key, cached.origin.file());
            }
            alone.set(None);
            lock(&self.known).remove(key);
            lock(&self.named).remove(key);
            self.pins.drop(key);
        }
        gone
    }

    /// Closes the disks that nobody uses, and forgets that there are files that nobody uses.
    fn close_idle(&self) {
        let Some(since) = Instant::now().checked_sub(IDLE) else {
            return;
        };
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        for file in files {
            if self.is_stopped() {
                return;
            }
            let Some(alone) = file.try_take(since) else {
                // Used again before all of it was written back.
                if let Some(cached) = file.cached()
                    && cached.draining.swap(false, Ordering::SeqCst)
                {
                    self.disks.drain(cached.disk, false);
                }
                continue;
            };
            let Some(cached) = alone.cached() else {
                continue;
            };
            if !self.disks.is_drained(cached.disk) {
                cached.draining.store(true, Ordering::SeqCst);
                self.disks.drain(cached.disk, true);
            } else if self.disks.detach(cached.disk, &cached.origin) {
                self.ignore_opens(&file.key, cached.origin.file());
                alone.set(None);
            }
        }
        // Whoever has one has it from here: who is not counted has none.
        lock(&self.files).retain(|_, file| {
            Arc::strong_count(file) > 1 || file.cached().is_some() || file.passes()
        });
    }

    /// Writes back what there is to be.
    fn flush(&self) {
        self.open_dirty();
        let cached = self.open();
        for cached in &cached {
            self.disks.drain(cached.disk, true);
        }
        let known = self.known();
        let done = cached.iter().all(|c| self.disks.is_drained(c.disk))
            && known.iter().all(|(_, disk)| self.disks.owed(*disk) == 0);
        if done {
            for cached in &cached {
                self.disks.drain(cached.disk, false);
            }
            self.flushing.store(false, Ordering::SeqCst);
            self.disks.flushed();
        }
    }
}
