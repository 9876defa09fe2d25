//! Stopping: finish what was begun, leave a checkpoint, promise nothing that is not so.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Daemon, Phase, lock};
use crate::error::{Error, Result};
use crate::origin;

/// Longest wait for the engine to come to rest.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// Longest wait for everything dirty to reach the origins, at an export.
const EXPORT_TIME: Duration = Duration::from_secs(24 * 3600);
/// How often is looked.
const POLL: Duration = Duration::from_millis(5);

/// Why the daemon stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A signal.
    Signal,
    /// The pool is being exported: nothing may stay dirty.
    Export,
}

impl Daemon {
    /// Tells [`housekeeping`](Self::housekeeping) to return. The first reason counts.
    pub fn request_stop(&self, reason: StopReason) {
        self.stopping.store(true, Ordering::Relaxed);
        lock(&self.stop).get_or_insert(reason);
        self.stop_changed.notify_all();
    }

    /// Waits for a stop, at most `time`.
    pub(super) fn wait_for_stop(&self, time: Duration) -> Option<StopReason> {
        let stop = lock(&self.stop);
        if stop.is_some() {
            return *stop;
        }
        match self.stop_changed.wait_timeout(stop, time) {
            Ok((stop, _)) => *stop,
            Err(poisoned) => *poisoned.into_inner().0,
        }
    }

    /// Ends connections, brings the engine to rest, writes the checkpoint and what the origins
    /// look like. Listening sockets must be gone. What is flushed is safe even if this fails.
    pub fn shut_down(self: &Arc<Daemon>, reason: StopReason) -> Result<()> {
        let _ops = lock(&self.ops);
        if let Some(vhost) = self.exports.vhost() {
            vhost.stop();
        }
        self.reactors.disconnect();
        self.observer.end_recordings();
        for slot in lock(&self.disks).values() {
            if let Some(remote) = slot.device().and_then(|d| d.as_remote()) {
                remote.hurry();
            }
        }
        if reason == StopReason::Export {
            self.drain_everything()?;
        }
        self.engine.quiesce(true);
        self.poke();
        let begin = Instant::now();
        let mut idle = false;
        while !idle && begin.elapsed() < IDLE_TIME {
            idle = self.engine.idle();
            if !idle {
                std::thread::sleep(POLL);
            }
        }
        self.reactors.stop();
        let closed = if idle {
            let mut media = lock(&self.pool).media().clone();
            self.engine
                .close(&mut media)
                .map_err(|e| Error::unavailable(format!("cannot close the pool cleanly: {e}"), ""))
        } else {
            Err(Error::unavailable(
                format!(
                    "I/O did not end within {} s, so there is no checkpoint",
                    IDLE_TIME.as_secs()
                ),
                "the next start reads the log instead; nothing flushed is lost",
            ))
        };
        let promised = if idle { self.promise() } else { Ok(()) };
        self.close_origins();
        closed.and(promised)
    }

    /// Closes every origin, and with it ends the processes that open images. Data threads must be
    /// gone.
    fn close_origins(&self) {
        let slots = std::mem::take(&mut *lock(&self.disks));
        for (name, slot) in slots {
            self.exports.remove(&name);
            let id = slot.id;
            drop(slot);
            self.release(id);
        }
    }

    fn drain_everything(&self) -> Result<()> {
        let ids: Vec<u16> = lock(&self.disks)
            .values()
            .filter(|s| matches!(s.phase, Phase::Attached(_) | Phase::Reconciling(_)))
            .map(|s| s.id)
            .collect();
        for id in &ids {
            // A disk that is gone has nothing to drain.
            let _ = self.engine.drain(*id, true);
        }
        self.poke();
        let end = Instant::now() + EXPORT_TIME;
        while !ids
            .iter()
            .all(|id| self.engine.status(*id).is_none_or(|s| s.drained))
        {
            if Instant::now() >= end {
                return Err(Error::unavailable(
                    "the origins did not take everything within a day",
                    "see why they are slow",
                ));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Records what the origins look like now that nobody writes them any more.
    fn promise(&self) -> Result<()> {
        if self.engine.pool_stats().flash_failed {
            // If it answers again, it has what was dirty before the guests wrote past it.
            return lock(&self.pool).distrust_all();
        }
        let disks = lock(&self.disks);
        let attached: Vec<_> = disks
            .values()
            .filter_map(|s| s.export().map(|e| (s.id, e.origin().clone())))
            .collect();
        drop(disks);
        // Not while the pool is held: it may take as long as the origin likes.
        let attached: Vec<_> = attached
            .into_iter()
            .filter_map(|(id, device)| Some((id, origin::identity(&device)?)))
            .collect();
        lock(&self.pool).change(|registry| {
            for (id, now) in attached {
                let Some(record) = registry.disks.iter_mut().find(|r| r.id == id) else {
                    continue;
                };
                record.origin_identity = Some(now);
                record.clean_detach = true;
            }
            Ok(())
        })
    }
}
