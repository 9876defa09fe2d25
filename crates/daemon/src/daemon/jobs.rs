//! What goes on besides serving: flushes, removals, windows, disks whose origin is missing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_io::BLOCK;

use super::control::rotten;
use super::course::Turn;
use super::{Daemon, StopReason, lock, trouble};
use crate::api::stats::{Counters, FlashCounters};
use crate::api::types::DrainProgress;
use crate::life::{Event, Life, Stage};
use crate::table::Purpose;
use crate::workers::{Class, Spot};

/// How often missing origins are looked for.
const ORIGINS_TIME: Duration = Duration::from_secs(1);
/// How often the sizes of attached origins are looked at.
const SIZES_TIME: Duration = Duration::from_secs(5);
/// How often the flash file is looked at.
const FLASH_TIME: Duration = Duration::from_secs(1);
/// Time between two rounds while something is going on. What is shown of it is a rate over time.
const ROUND_BUSY: Duration = Duration::from_millis(20);
/// Time between two rounds otherwise.
const ROUND_IDLE: Duration = Duration::from_millis(500);
/// Least time between two looks at all disks; shorter than an idle round, so that none is left out.
const LOOK_TIME: Duration = Duration::from_millis(400);

/// Something that is done every now and then.
struct Every {
    time: Duration,
    next: Instant,
}

impl Every {
    fn new(time: Duration) -> Every {
        let next = Instant::now() + time;
        Every { time, next }
    }

    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = now >= self.next;
        if due {
            self.next = now + self.time;
        }
        due
    }
}

impl Daemon {
    /// Does what is due until the daemon is told to stop; returns why it was. Looking at a file may hang
    /// with the mount it is on, so that is only begun here.
    pub fn housekeeping(self: &Arc<Daemon>) -> StopReason {
        let mut origins = Every::new(ORIGINS_TIME);
        let mut sizes = Every::new(SIZES_TIME);
        let mut flash = Every::new(FLASH_TIME);
        let mut looks = Every::new(LOOK_TIME);
        loop {
            if origins.is_due() {
                self.look_for_origins();
            }
            if sizes.is_due() {
                self.look_at_sizes();
            }
            if flash.is_due() {
                self.look_at_flash_aside();
            }
            self.flash_round();
            let busy = self.jobs_round();
            // These look at every disk, which one that is being flushed or removed is no reason for.
            if looks.is_due() {
                self.fence_round();
                self.trouble_round();
                self.sample();
                self.auto_round();
                self.moves_round();
                self.swap_round();
                self.clients_round();
            }
            self.beats.fetch_add(1, Ordering::Relaxed);
            if let Some(reason) = self.wait_for_stop(if busy { ROUND_BUSY } else { ROUND_IDLE }) {
                return reason;
            }
        }
    }

    /// Notes which processes use which disks.
    pub(super) fn clients_round(&self) {
        let exports: Vec<_> = {
            let disks = self.disks.lock();
            let exports = disks
                .iter()
                .filter_map(|(name, slot)| Some((name.to_owned(), slot.export().cloned()?)));
            exports.collect()
        };
        let known = exports
            .into_iter()
            .map(|(name, export)| (name, export.clients().known()));
        self.client_record
            .store(known.collect(), self.datastore_users());
    }

    /// Takes snapshots of the counters where one is due.
    fn sample(&self) {
        let now = self.now_s();
        let mut disks = self.disks.lock();
        let mut windows = lock(&self.windows);
        if !windows.due(now) && disks.all().all(|(_, s)| !s.session.windows.due(now)) {
            return;
        }
        for (id, slot) in disks.all_mut().filter(|(_, s)| s.life.is_known()) {
            let Some(stats) = self.engine.counts(id, hearth_io::now_ns()) else {
                continue;
            };
            self.watch_counters(slot, &stats.counters);
            let slot = &mut slot.session;
            let counters = Counters::from(&stats.counters);
            slot.windows.sample(now, &counters);
            if slot.latencies.due(now)
                && let Some(latencies) = self.engine.latencies(id)
            {
                slot.latencies.sample(now, &latencies);
            }
        }
        let flash = self.engine.pool_stats().counters;
        self.watch_flash(&flash);
        windows.sample(now, &FlashCounters::from(&flash));
    }

    /// Looks how far everything is that was begun; true if anything was.
    fn jobs_round(self: &Arc<Daemon>) -> bool {
        let disks = self.disks.lock();
        let busy = disks.all().filter(|(_, slot)| slot.life.is_busy());
        let busy: Vec<DiskId> = busy.map(|(id, _)| id).collect();
        drop(disks);
        for id in &busy {
            self.beats.fetch_add(1, Ordering::Relaxed);
            // Whoever changes it goes first, perhaps for long: housekeeping comes again.
            if let Some(turn) = self.disks.turn(*id, Purpose::Changing) {
                self.look_how_far(turn);
            }
        }
        self.forget_gone();
        !busy.is_empty()
    }

    /// Looks how far one disk is.
    fn look_how_far(self: &Arc<Daemon>, turn: Turn) {
        let progress = self.progress_of(turn.id());
        // Who waits for it looks at how far it is.
        self.disks.changed();
        match progress {
            None => {}
            // Closing an origin may wait for a mount that hangs.
            Some(Event::AtRest) => {
                let daemon = self.clone();
                let spot = Spot::new(format!("disk {}", turn.id()));
                // Not taken: the next round comes to it again.
                self.aside(&spot, Class::Asked, move || {
                    daemon.tell(&turn, Event::AtRest)
                });
            }
            Some(event) => self.tell(&turn, event),
        }
    }

    /// What has happened to a disk that something was begun with.
    fn progress_of(&self, id: DiskId) -> Option<Event> {
        let mut disks = self.disks.lock();
        let slot = disks.by_id_mut(id)?;
        let status = self.engine.status(id).unwrap_or_default();
        let session = &mut slot.session;
        let estimate = session
            .progress
            .update(hearth_io::now_ns(), status.owed_blocks());
        session.shown = Some(DrainProgress {
            done: false,
            blocks_left: estimate.left,
            bytes_left: estimate.left.saturating_mul(BLOCK),
            bytes_per_second: estimate.rate * BLOCK as f64,
            eta_seconds: estimate.eta,
        });
        slot.session.stranded = (slot.life == Life::Reconciling && status.only_lost_left)
            .then(|| rotten(&slot.name, &status));
        match &slot.life {
            Life::Reconciling => status.drained.then_some(Event::Drained),
            Life::Served { flushing: true } => trouble::only_lost_left(&slot.name, &status)
                .map(Event::Failed)
                .or(status.drained.then_some(Event::Drained)),
            Life::Removing {
                discard,
                stage: Stage::Draining,
                from,
            } => {
                let lost = trouble::only_lost_left(&slot.name, &status).filter(|_| !discard);
                let done = *discard || status.drained || from.is_some();
                lost.map(Event::Failed).or(done.then_some(Event::Drained))
            }
            Life::Removing { discard, .. } => {
                let rest = status.in_flight == 0 && (*discard || status.drained);
                (rest || !status.attached).then_some(Event::AtRest)
            }
            Life::Leaving => Some(Event::AtRest),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::api::server::Control;
    use crate::api::types::DiskRemove;
    use crate::error::Kind;

    /// As housekeeping does, until the disk is gone.
    fn finish(daemon: &Arc<Daemon>, name: &str) {
        while daemon.disk(name).is_ok() {
            daemon.jobs_round();
            std::thread::yield_now();
        }
    }

    fn life(daemon: &Daemon, name: &str) -> Option<Life> {
        daemon.disks.lock().get(name).map(|slot| slot.life.clone())
    }

    fn begin_removal(daemon: &Arc<Daemon>, name: &str) {
        daemon.remove(name, DiskRemove::default()).unwrap();
    }

    #[test]
    fn a_removal_waits_for_other_changes_of_the_disk_and_sees_that_it_was_called_off() {
        let (_dir, daemon) = testing::with_disk("a");
        begin_removal(&daemon, "a");
        let turn = daemon.turn_for("a").unwrap();
        let before = life(&daemon, "a");
        assert!(daemon.jobs_round());
        assert_eq!(life(&daemon, "a"), before);
        drop(turn);
        daemon.cancel("a").unwrap();
        assert!(!daemon.jobs_round());
        assert_eq!(life(&daemon, "a"), Some(Life::Served { flushing: false }));
        begin_removal(&daemon, "a");
        finish(&daemon, "a");
        assert_eq!(daemon.disk("a").unwrap_err().kind, Kind::NotFound);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    /// Else the watchdog would end the daemon, and nobody would see that another disk was taken over.
    #[test]
    fn an_origin_that_hangs_when_it_is_closed_holds_up_its_own_removal_only() {
        let (_dir, daemon) = testing::with_disk("a");
        // Who still uses the origin, so that it is not closed yet.
        let user = daemon.disks.lock().get("a").unwrap().device.clone();
        begin_removal(&daemon, "a");
        while life(&daemon, "a") != Some(Life::Leaving) {
            daemon.jobs_round();
        }
        assert!(daemon.jobs_round(), "housekeeping goes on");
        for refused in [
            daemon.remove("a", DiskRemove::default()),
            daemon.flush("a"),
            daemon.set("a", Default::default()),
        ] {
            let refused = refused.unwrap_err();
            assert!(refused.what.contains("being removed"), "{refused}");
        }
        drop(user);
        finish(&daemon, "a");
        assert!(lock(&daemon.pool).registry().disks.is_empty());
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn the_last_step_of_a_removal_cannot_be_called_off() {
        let (_dir, daemon) = testing::with_disk("a");
        // Somebody who still uses the origin, so that the last step takes a while.
        let user = daemon.disks.lock().get("a").unwrap().device.clone();
        begin_removal(&daemon, "a");
        while life(&daemon, "a") != Some(Life::Leaving) {
            daemon.jobs_round();
        }
        let refused = daemon.cancel("a").unwrap_err();
        assert!(
            refused.kind == Kind::Conflict && refused.what.contains("last step"),
            "{refused}"
        );
        drop(user);
        finish(&daemon, "a");
        assert_eq!(daemon.disk("a").unwrap_err().kind, Kind::NotFound);
        assert!(lock(&daemon.pool).registry().disks.is_empty());
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
