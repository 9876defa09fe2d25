//! What goes on besides serving: flushes, removals, windows, disks whose origin is missing.

use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, TryLockError};
use std::time::Duration;

use hearth_engine::ControlError;
use hearth_engine::api::OriginState;
use hearth_io::BLOCK;

use super::admission::GIVE_UP_TIME;
use super::attach::CLOSE_TIME;
use super::{Awaited, Daemon, Job, Phase, Slot, Stage, StopReason, control_error, lock, trouble};
use crate::api::stats::{Counters, FlashCounters};
use crate::api::types::DrainProgress;
use crate::error::{Error, Result};
use crate::origin;

/// Time between two rounds while something is going on.
const ROUND_BUSY: Duration = Duration::from_millis(20);
/// Time between two rounds otherwise.
const ROUND_IDLE: Duration = Duration::from_millis(500);
/// Notices kept of a disk; the oldest goes first.
const NOTICES_MAX: usize = 10;

impl Daemon {
    /// Starts a thread of its own: looking for a file may hang with the mount it is on.
    fn spawn_watch(self: &Arc<Daemon>, name: &str, watch: fn(&Arc<Daemon>), without: &str) {
        let daemon = self.clone();
        let thread = std::thread::Builder::new().name(name.to_owned());
        if let Err(e) = thread.spawn(move || watch(&daemon)) {
            tracing::error!("cannot start a thread: {e}; {without}");
        }
    }

    /// Does what is due until the daemon is told to stop; returns why it was.
    pub fn housekeeping(self: &Arc<Daemon>) -> StopReason {
        self.spawn_watch(
            "hearth-origins",
            Daemon::watch_origins,
            "missing origins are not looked for",
        );
        self.spawn_watch(
            "hearth-sizes",
            |d| d.watch_sizes(),
            "origins that shrink are not noticed",
        );
        self.spawn_watch(
            "hearth-flash",
            |d| d.watch_flash(),
            "a flash file that is removed is not noticed",
        );
        loop {
            self.flash_round();
            self.fence_round();
            let busy = self.jobs_round();
            self.trouble_round();
            self.sample();
            self.auto_round();
            self.beats.fetch_add(1, Ordering::Relaxed);
            if let Some(reason) = self.wait_for_stop(if busy { ROUND_BUSY } else { ROUND_IDLE }) {
                return reason;
            }
        }
    }

    /// Takes snapshots of the counters where one is due.
    fn sample(&self) {
        let now = self.now_s();
        let mut disks = lock(&self.disks);
        let mut windows = lock(&self.windows);
        if !windows.due(now) && disks.values().all(|s| !s.windows.due(now)) {
            return;
        }
        for slot in disks.values_mut() {
            let Some(stats) = self.engine.stats(slot.id, hearth_io::now_ns()) else {
                continue;
            };
            let counters = Counters::from(&stats.counters);
            slot.windows.sample(now, &counters);
            if slot.latencies.due(now)
                && let Some(latencies) = self.engine.latencies(slot.id)
            {
                // An idle disk's snapshots are one and the same.
                let same = slot.latencies.newest().filter(|n| ***n == latencies);
                let latencies = same.cloned().unwrap_or_else(|| Arc::new(latencies));
                slot.latencies.sample(now, &latencies);
            }
        }
        windows.sample(
            now,
            &FlashCounters::from(&self.engine.pool_stats().counters),
        );
    }

    /// One step of every job; true if any is going on.
    fn jobs_round(self: &Arc<Daemon>) -> bool {
        let busy: Vec<String> = lock(&self.disks)
            .iter()
            .filter(|(_, s)| s.job.is_some() || matches!(s.phase, Phase::Reconciling(_)))
            .map(|(name, _)| name.clone())
            .collect();
        for name in &busy {
            // A removal may wait for a mount that hangs, within bounds; a hundred of them are no hang.
            self.beats.fetch_add(1, Ordering::Relaxed);
            let lost = |slot: &Slot| match slot.job {
                Some(
                    Job::Flush
                    | Job::Remove {
                        discard: false,
                        stage: Stage::Draining,
                    },
                ) => trouble::only_lost_left(name, &self.engine.status(slot.id)?),
                _ => None,
            };
            let lost = lock(&self.disks).get(name).and_then(lost);
            if let Err(e) = lost.map_or_else(|| self.step(name), Err) {
                self.fail_job(name, e);
            }
        }
        self.forget_leftovers();
        !busy.is_empty()
    }

    fn fail_job(&self, name: &str, error: Error) {
        let mut disks = lock(&self.disks);
        let Some(slot) = disks.get_mut(name) else {
            return;
        };
        let notice = error.to_string();
        if slot.notices.last() != Some(&notice) {
            tracing::error!(disk = %name, "cannot be completed now: {notice}");
            slot.notices.push(notice);
        }
        if slot.notices.len() > NOTICES_MAX {
            slot.notices.remove(0);
        }
        self.call_off(name, slot);
        slot.incomplete = Some(error);
    }

    /// Ends a job without completing it. What was written stays written.
    pub(super) fn call_off(&self, name: &str, slot: &mut Slot) {
        if slot.job.take().is_some() {
            // The disk may not be attached; then there is nothing to call off.
            let _ = self.engine.drain(slot.id, false);
            slot.shown = None;
            if let Phase::Attached(export) = &slot.phase {
                export.set_closing(false);
                self.exports.insert(export.clone());
            }
            tracing::info!(disk = %name, "flush or removal called off");
        }
    }

    fn step(self: &Arc<Daemon>, name: &str) -> Result<()> {
        let now = hearth_io::now_ns();
        let mut disks = lock(&self.disks);
        let Some(slot) = disks.get_mut(name) else {
            return Ok(());
        };
        let status = self.engine.status(slot.id).unwrap_or_default();
        let estimate = slot.progress.update(now, status.owed_blocks());
        slot.shown = Some(DrainProgress {
            done: false,
            blocks_left: estimate.left,
            bytes_left: estimate.left.saturating_mul(BLOCK),
            bytes_per_second: estimate.rate * BLOCK as f64,
            eta_seconds: estimate.eta,
        });
        if let Phase::Reconciling(_) = slot.phase {
            if status.drained {
                drop(disks);
                return self.reconciled(name);
            }
            return Ok(());
        }
        match slot.job {
            Some(Job::Flush) if status.drained => {
                let _ = self.engine.drain(slot.id, false);
                slot.job = None;
                slot.shown = slot.shown.map(|p| DrainProgress { done: true, ..p });
                tracing::info!(disk = %name, "flushed");
            }
            Some(Job::Remove {
                discard,
                stage: Stage::Draining,
            }) if discard || status.drained || slot.export().is_none() => {
                // From here on the guest's requests are refused, so that the end comes.
                if let Some(export) = slot.export() {
                    export.set_closing(true);
                }
                slot.job = Some(Job::Remove {
                    discard,
                    stage: Stage::Closing,
                });
            }
            Some(Job::Remove {
                discard,
                stage: Stage::Closing,
            }) => {
                let rest = status.in_flight == 0 && (discard || status.drained);
                if rest || !status.attached {
                    drop(disks);
                    return self.finish_removal(name, discard);
                }
            }
            Some(Job::Remove {
                discard,
                stage: Stage::Last,
            }) => {
                drop(disks);
                return self.finish_removal(name, discard);
            }
            _ => {}
        }
        Ok(())
    }

    /// Dirty blocks have won over the origin: what was clean may be old, so all goes, unless all of it
    /// was compared with the origin, which nobody but us has written since.
    fn reconciled(self: &Arc<Daemon>, name: &str) -> Result<()> {
        let mut disks = lock(&self.disks);
        let Some(slot) = disks.get_mut(name) else {
            return Ok(());
        };
        let Phase::Reconciling(device) = &slot.phase else {
            return Ok(());
        };
        let (id, device, clean_fits) = (slot.id, device.clone(), slot.clean_fits);
        drop(disks);
        let since_seq = if clean_fits {
            None
        } else {
            match self.try_forget(id) {
                // Something of it is still in flight; the next round tries again.
                Err(ControlError::Busy) => return Ok(()),
                other => Some(other.map_err(|e| control_error(&format!("attach {name}"), e))?),
            }
        };
        let now = origin::identity(&device);
        let record = lock(&self.pool).change(|registry| {
            let record = registry.disks.iter_mut().find(|r| r.id == id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.since_seq = since_seq.unwrap_or(record.since_seq);
            record.origin_identity = now;
            record.clean_detach = false;
            Ok(record.clone())
        })?;
        let _ = self.engine.drain(id, false);
        let export = self.offer(&record, device);
        if let Some(slot) = lock(&self.disks).get_mut(name) {
            slot.phase = Phase::Attached(export);
            slot.shown = None;
        }
        tracing::info!(disk = %name, "what waited on flash is in the origin; attached");
        Ok(())
    }

    /// Nothing of the disk is in flight and nothing that counts is dirty: it goes, in steps. What its
    /// origin may hold up is waited for between them, as others may need housekeeping meanwhile: a disk
    /// that is another host's now is to be stopped at once.
    fn finish_removal(self: &Arc<Daemon>, name: &str, discard: bool) -> Result<()> {
        // Nobody may call it off, or attach the disk again, between here and the end. Whoever
        // changes disks goes first, perhaps for long: housekeeping comes again.
        let _ops = match self.ops.try_lock() {
            Ok(ops) => ops,
            Err(TryLockError::Poisoned(ops)) => ops.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let leaving = lock(&self.disks)
            .get(name)
            .filter(|slot| slot.is_leaving())
            .map(|slot| (slot.id, slot.awaited.as_ref().is_some_and(Awaited::goes_on)));
        match leaving {
            Some((_, true)) => return Ok(()),
            Some((id, false)) => return self.end_removal(name, id),
            None => {}
        }
        let closing = Job::Remove {
            discard,
            stage: Stage::Closing,
        };
        let (id, origin) = match lock(&self.disks).get(name) {
            // What was seen before the lock was taken may have been called off since.
            Some(slot) if slot.job == Some(closing) => {
                (slot.id, slot.export().map(|e| e.origin().clone()))
            }
            _ => return Ok(()),
        };
        if origin.is_some() {
            match self.engine.detach(id) {
                // The next round tries again.
                Err(ControlError::Busy) => return Ok(()),
                other => other.map_err(|e| control_error(&format!("remove {name}"), e))?,
            }
        }
        let rest = self.nothing_left(name, id, discard);
        if let (Err(e), Some(origin)) = (&rest, &origin) {
            // It stays, so it has to be served again.
            tracing::error!(disk = %name, "cannot be removed: {e}");
            let record = lock(&self.pool).record(id).cloned();
            if let Some(record) = record {
                self.engine
                    .attach(
                        crate::settings::config(&record, origin),
                        OriginState::Unknown,
                    )
                    .map_err(|e| control_error(&format!("attach {name}"), e))?;
            }
        }
        rest?;
        drop(origin);
        self.exports.remove(name);
        self.observer.forget_disk(id);
        self.exports.disconnect(name);
        // Whoever is told that the disk is gone finds its origin closed.
        if let Some(slot) = lock(&self.disks).get_mut(name) {
            if let Some(export) = slot.export() {
                export.set_gone();
                self.reactors.look();
            }
            slot.job = Some(Job::Remove {
                discard,
                stage: Stage::Last,
            });
            slot.phase =
                Phase::Waiting(Error::conflict(format!("disk {name} is being removed"), ""));
        }
        let closed = self.begin_release(id);
        self.await_for(name, closed, CLOSE_TIME);
        Ok(())
    }

    fn await_for(&self, name: &str, done: Option<Receiver<()>>, time: Duration) {
        if let Some(slot) = lock(&self.disks).get_mut(name) {
            slot.awaited = done.map(|done| Awaited::new(done, time));
        }
    }

    /// The origin is closed: the disk leaves the registry, then its origin is given up, then it is gone.
    /// The caller has `ops`.
    fn end_removal(self: &Arc<Daemon>, name: &str, id: u16) -> Result<()> {
        let record = lock(&self.pool).record(id).cloned();
        if let Some(record) = record {
            if let Err(e) = self.erase(id) {
                // It stays. Its origin is opened again by those who look for missing ones: that may
                // take as long as the origin likes, and here nobody may wait for it.
                if let Some(slot) = lock(&self.disks).get_mut(name) {
                    slot.phase = Phase::Waiting(e.clone());
                }
                return Err(e);
            }
            if let Some(given_up) = self.owners.begin_give_up(&record) {
                self.await_for(name, Some(given_up), GIVE_UP_TIME);
                if let Some(slot) = lock(&self.disks).get_mut(name) {
                    slot.erased = Some(record);
                }
                return Ok(());
            }
        }
        lock(&self.disks).remove(name);
        // What was kept for it is the others' now.
        self.keep_shares();
        lock(&self.leftovers).push(id);
        self.forget_leftovers();
        tracing::info!(disk = %name, "removed");
        Ok(())
    }

    /// Records of removed disks in the log are void, but take their room, and what was dirty counts
    /// against all others. The engine cannot forget a disk while something of it is on its way to flash.
    fn forget_leftovers(&self) {
        let ids = std::mem::take(&mut *lock(&self.leftovers));
        for id in ids {
            if self.try_forget(id).is_err() {
                lock(&self.leftovers).push(id);
            } else if let Err(e) = self.engine.remove(id) {
                tracing::debug!(disk = id, "the engine keeps an empty entry: {e}");
            }
        }
    }

    /// Refuses to go on if a detached disk still has something to lose.
    fn nothing_left(&self, name: &str, id: u16, discard: bool) -> Result<()> {
        // A guest's last write may have come between the last look and the detaching.
        let status = self.engine.status(id).unwrap_or_default();
        if status.owed_blocks() > 0 && !discard {
            return Err(Error::conflict(
                format!("new writes to {name} arrived at the last moment"),
                "remove it again",
            ));
        }
        Ok(())
    }

    /// Takes a detached disk out of the registry.
    fn erase(&self, id: u16) -> Result<()> {
        lock(&self.pool).change(|registry| {
            registry.disks.retain(|r| r.id != id);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::api::server::Control;
    use crate::api::types::DiskState;
    use crate::error::Kind;

    fn closing(daemon: &Daemon, name: &str) {
        let mut disks = lock(&daemon.disks);
        let slot = disks.get_mut(name).unwrap();
        slot.export().unwrap().set_closing(true);
        slot.job = Some(Job::Remove {
            discard: false,
            stage: Stage::Closing,
        });
    }

    /// As housekeeping does: again while something of the disk is in flight.
    fn finish(daemon: &Arc<Daemon>, name: &str) -> Result<()> {
        while daemon.disk(name).is_ok() {
            daemon.finish_removal(name, false)?;
        }
        Ok(())
    }

    fn is_attached(daemon: &Daemon, name: &str) -> bool {
        lock(&daemon.disks)
            .get(name)
            .is_some_and(|slot| slot.export().is_some())
    }

    #[test]
    fn a_removal_waits_for_other_operations_and_sees_that_it_was_called_off() {
        let (_dir, daemon) = testing::with_disk("a");
        closing(&daemon, "a");
        let ops = lock(&daemon.ops);
        // On a thread of its own, because it must not take what this one holds.
        std::thread::scope(|s| {
            s.spawn(|| daemon.finish_removal("a", false).unwrap());
        });
        assert!(is_attached(&daemon, "a"));
        drop(ops);
        daemon.cancel("a").unwrap();
        daemon.finish_removal("a", false).unwrap();
        assert!(is_attached(&daemon, "a"));
        closing(&daemon, "a");
        finish(&daemon, "a").unwrap();
        assert_eq!(daemon.disk("a").unwrap_err().kind, Kind::NotFound);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    /// Else the watchdog would end the daemon, and nobody would see that another disk was taken over.
    #[test]
    fn an_origin_that_hangs_when_it_is_closed_holds_up_its_own_removal_only() {
        let (_dir, daemon) = testing::with_disk("a");
        closing(&daemon, "a");
        while is_attached(&daemon, "a") {
            daemon.finish_removal("a", false).unwrap();
        }
        // As of one that hangs.
        let (told, done) = std::sync::mpsc::sync_channel(1);
        daemon.await_for("a", Some(done), Duration::from_secs(600));
        daemon.finish_removal("a", false).unwrap();
        drop(daemon.ops.try_lock().unwrap());
        for refused in [
            daemon.remove("a", Default::default()),
            daemon.flush("a"),
            daemon.set("a", Default::default()),
        ] {
            let refused = refused.unwrap_err();
            assert!(refused.what.contains("being removed"), "{refused}");
        }
        assert_eq!(lock(&daemon.pool).registry().disks.len(), 1);
        drop(told);
        // Whoever is told that it is gone may add it elsewhere: not before its origin was given up.
        daemon.finish_removal("a", false).unwrap();
        assert!(lock(&daemon.pool).registry().disks.is_empty());
        assert_eq!(daemon.disk("a").unwrap().state, DiskState::Removing);
        finish(&daemon, "a").unwrap();
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn the_last_step_of_a_removal_cannot_be_called_off() {
        let (_dir, daemon) = testing::with_disk("a");
        // Somebody who still uses the origin, so that the last step takes a while.
        let user = lock(&daemon.disks)["a"].export().unwrap().origin().clone();
        closing(&daemon, "a");
        let remover = daemon.clone();
        let removal = std::thread::spawn(move || finish(&remover, "a"));
        while is_attached(&daemon, "a") {
            std::thread::yield_now();
        }
        let refused = daemon.cancel("a").unwrap_err();
        assert!(
            refused.kind == Kind::Conflict && refused.what.contains("last step"),
            "{refused}"
        );
        assert!(!lock(&daemon.disks)["a"].is_awaited());
        drop(user);
        removal.join().unwrap().unwrap();
        assert_eq!(daemon.disk("a").unwrap_err().kind, Kind::NotFound);
        assert!(lock(&daemon.pool).registry().disks.is_empty());
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
