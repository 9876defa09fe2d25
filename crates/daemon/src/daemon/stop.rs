//! Stopping: finish what was begun, leave a checkpoint, promise nothing that is not so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_format::OriginIdentity;
use hearth_io::Device;
use hearth_origin::owner::Claim;

use super::{Daemon, lock, trouble};
use crate::error::{Error, Kind, Result};
use crate::notify::{Notify, STOP_EXTENSION};
use crate::origin;
use crate::size::human;
use crate::spot::Mounts;
use crate::workers::{Class, Spot};

/// Longest wait for the engine to come to rest.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// Longest wait for everything dirty to reach the origins, at an export.
const EXPORT_TIME: Duration = Duration::from_secs(24 * 3600);
/// Longest wait for changes of disks that have begun. None waits for an origin to be opened, so these wait
/// for flash, or for something that should not be.
const CHANGES_TIME: Duration = Duration::from_secs(15);
/// After so much of it, nobody waits for servers that are not there any more.
const CHANGES_PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait for what the origins look like.
const PROMISE_TIME: Duration = Duration::from_secs(30);
/// Longest wait for the file system of the flash to say whether it is still there.
const LOOK_TIME: Duration = Duration::from_secs(5);
/// Least time between two looks at how far the engine is.
const PACE: Duration = Duration::from_millis(5);

/// Why the daemon stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A signal.
    Signal,
    /// The pool is being exported: nothing may stay dirty.
    Export,
    /// There is room for the cache again, which the next start brings back.
    Room,
    /// Another program takes this one's place, and its clients.
    Upgrade,
}

impl StopReason {
    /// For people.
    pub(crate) fn words(self) -> &'static str {
        match self {
            StopReason::Signal => "a signal",
            StopReason::Export => "the pool is exported",
            StopReason::Room => "there is room for the cache again",
            StopReason::Upgrade => "another program takes over",
        }
    }
}

impl Daemon {
    /// Tells [`housekeeping`](Self::housekeeping) to return. The first reason counts.
    pub fn request_stop(&self, reason: StopReason) {
        self.stopping.store(true, Ordering::Relaxed);
        lock(&self.stop).get_or_insert(reason);
        self.stop_changed.notify_all();
        // Whoever waits for a disk looks whether there is anything to wait for.
        self.disks.changed();
        self.bell.ring();
    }

    /// Has housekeeping come round at once: something has begun.
    pub(super) fn look_now(&self) {
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

    /// The disks whose origins are open.
    pub(super) fn open_disks(&self) -> Vec<DiskId> {
        let disks = self.disks.lock();
        let open = disks.all().filter(|(_, slot)| slot.device.is_some());
        open.map(|(id, _)| id).collect()
    }

    /// From now on nobody waits for servers that are not there.
    fn hurry(&self) {
        for (_, slot) in self.disks.lock().all() {
            if let Some(remote) = slot.device().and_then(|d| d.as_remote()) {
                remote.hurry();
            }
        }
    }

    /// Ends connections, brings the engine to rest, writes the checkpoint and what the origins
    /// look like. Listening sockets must be gone. What is flushed is safe even if this fails.
    pub fn shut_down(self: &Arc<Daemon>, reason: StopReason) -> Result<()> {
        self.end(reason, CHANGES_TIME)
    }

    fn end(self: &Arc<Daemon>, reason: StopReason, changes_time: Duration) -> Result<()> {
        // Clients are still served: it is no part of a pause.
        self.keep_curves();
        // Operations that still wait for an origin find this when they come back.
        self.stopping.store(true, Ordering::Relaxed);
        self.disks.changed();
        self.bell.ring();
        // Not hurried at once: clients whose requests wait for a server are better cut off, and come
        // again, than told of an error.
        let still = self.disks.close(CHANGES_PATIENCE.min(changes_time)) || {
            self.hurry();
            self.disks.close(changes_time)
        };
        // A client that left a moment ago is not to be expected back.
        self.clients_round();
        let connections = self.exports.connections();
        if reason == StopReason::Upgrade {
            self.exports.hand_over();
        } else {
            self.exports.stop();
        }
        if reason == StopReason::Export {
            self.open_dirty_files();
        }
        self.still_datastores();
        self.end_pins();
        self.end_goings();
        let ended = if reason == StopReason::Upgrade {
            self.succession
                .part(connections, || self.reactors.hand_over())
        } else {
            self.reactors.disconnect()
        };
        self.observer.end_recordings();
        // A flush that was under way for one of them fails here, and it will not hear of it.
        self.engine.clients_have_left();
        self.hurry();
        // It may have been removed a moment ago. One that hangs would keep the stop, and what is written there fails in time.
        self.look_at_flash_aside();
        let looked = || (!self.is_looking_at_flash()).then_some(());
        self.bell.wait(LOOK_TIME, PACE, looked);
        if reason == StopReason::Export {
            self.drain_everything()?;
        } else if self.must_empty_flash() {
            self.empty_flash();
        }
        self.engine.quiesce(true);
        self.poke();
        // Where nothing can be vouched for anyway, the engine need not come to rest.
        let limit = if ended { IDLE_TIME } else { Duration::ZERO };
        let at_rest = || self.engine.idle().then_some(());
        let idle = self.bell.wait(limit, PACE, at_rest).is_some();
        self.settle_without();
        let ended = self.reactors.stop() && ended;
        // Whatever that operation, or a thread left behind, is in the middle of must not be vouched
        // for.
        let clean = idle && ended && still;
        // Before anything is written there: what is left of it stays as it is.
        let asked = clean && (!self.cache_is_off() || self.flash.erased().is_some());
        let erased = asked.then(|| self.erased()).flatten();
        let is_erased = erased.is_some();
        let sound = clean && erased.is_none();
        let without = sound.then(|| self.close_without()).flatten();
        let goes_on = without.is_some();
        let closed = if let Some(erased) = erased {
            Err(erased)
        } else if let Some(closed) = without {
            closed
        } else if clean {
            let mut media = lock(&self.pool).flash().joined();
            self.engine.close(&mut media).map_err(|e| {
                let why = e.fault().within("cannot close the pool cleanly");
                Error::of(Kind::Unavailable, why)
            })
        } else if !ended {
            Err(Error::unavailable(
                "a data thread did not end, so there is no checkpoint",
                "see whether an origin's device or mount hangs; the next start reads the log \
                 instead, and nothing flushed is lost",
            ))
        } else if idle {
            Err(Error::unavailable(
                "a control operation did not end, so there is no checkpoint",
                "the next start reads the log instead; nothing flushed is lost",
            ))
        } else {
            Err(Error::unavailable(
                format!(
                    "I/O did not end within {} s, so there is no checkpoint",
                    IDLE_TIME.as_secs()
                ),
                "the next start reads the log instead; nothing flushed is lost",
            ))
        };
        if closed.is_ok() && (goes_on || self.reshaping.without().is_none()) {
            self.reshaping.set_at_rest();
        }
        let off = self.cache_is_off() && !goes_on;
        let promised = if sound { self.promise(off) } else { Ok(()) };
        if clean {
            self.note_whole_at_rest();
            self.note_lost_at_rest();
        }
        let outcome = if clean && off && !is_erased {
            self.end_without_flash(closed.and(promised))
        } else {
            closed.and(promised)
        };
        let claims = self.close_origins();
        if reason == StopReason::Export && outcome.is_ok() {
            let pool = lock(&self.pool);
            let records = pool.registry().plain_disks();
            let records: Vec<_> = records.filter(|r| pool.is_confirmed(r)).cloned().collect();
            drop(pool);
            Notify::from_env().stop_goes_on();
            self.owners.give_up_all(&records, claims);
            if let Some(beside) = lock(&self.pool).beside() {
                beside.forget();
            }
        }
        self.owners.settle();
        outcome
    }

    /// Somebody may have erased the flash below us, and a device takes what is written to it afterwards as if nothing had been. So
    /// that a stop does not say that all is well, it looks whether there is by what the next start would know the pool.
    fn erased(&self) -> Option<Error> {
        let pool = lock(&self.pool);
        // What the daemon has written since is there; the rest of the log is not.
        let blank = || {
            let device = self.engine.blank_device(&mut pool.flash().joined())?;
            pool.paths().get(usize::from(device)).cloned()
        };
        let path = self
            .flash
            .erased()
            .or_else(|| pool.erased())
            .or_else(blank)?;
        let path = path.display().to_string();
        let others = pool.paths().len() > 1;
        let kept = pool.beside().is_some();
        drop(pool);
        let dirty = self.engine.dirty_disks().into_iter();
        let dirty = dirty.filter(|(_, blocks, zeros)| blocks + zeros > 0);
        let dirty: Vec<String> = dirty
            .map(|(id, blocks, zeros)| {
                let bytes = (blocks + zeros).saturating_mul(hearth_io::BLOCK);
                format!("{} of disk {}", human(bytes), self.name_of(id))
            })
            .collect();
        let lost = match dirty.is_empty() {
            true => "nothing was dirty there, so only the cache is lost".to_owned(),
            false => format!(
                "what was dirty there is lost, or most of it: {}",
                dirty.join(", ")
            ),
        };
        let add = match others {
            true => {
                ", serve that device alone, and add the others with `hearth pool add-flash --force`"
            }
            false => "",
        };
        let remedy = match kept {
            true => format!(
                "the next start serves the disks that are whole in their origins; to have a cache again, stop it and run `hearth pool \
                 adopt-flash --flash {path} --force`{add}; then `hearth disk set NAME --trust origin` for each disk that is refused"
            ),
            false => format!(
                "make a new pool with `hearth pool create --flash {path} --force`, and add the disks again"
            ),
        };
        Some(Error::unavailable(
            format!("{path} was erased or written over while it was served: {lost}"),
            remedy,
        ))
    }

    /// Closes every origin, and with it ends the processes that open images. Data threads must be
    /// gone.
    fn close_origins(&self) -> BTreeMap<DiskId, Claim> {
        let slots = self.disks.lock().take_all();
        let ids: Vec<DiskId> = slots.keys().copied().collect();
        let mut claims = BTreeMap::new();
        for (id, mut slot) in slots {
            self.exports.remove(&slot.name);
            claims.extend(slot.claim.take().map(|claim| (id, claim)));
        }
        let files = self.stores.numbers.close();
        self.release_all(&[ids, files].concat());
        claims
    }

    fn drain_everything(self: &Arc<Daemon>) -> Result<()> {
        let mut disks = self.open_disks();
        disks.extend(self.stores.numbers.open());
        self.check_files_open(&disks)?;
        for id in &disks {
            // A disk that is gone has nothing to drain.
            let _ = self.engine.drain(*id, true);
        }
        self.poke();
        let end = Instant::now() + EXPORT_TIME;
        let look = || {
            let mut drained = true;
            for status in disks.iter().map(|id| (id, self.engine.status(*id))) {
                let (id, Some(status)) = status else { continue };
                if let Some(e) = trouble::only_lost_left(&self.name_of(*id), &status) {
                    return Some(Err(e));
                }
                // What lives on flash leaves with the pool.
                drained &= status.drained || status.lives_on_flash;
            }
            drained.then_some(Ok(()))
        };
        let notify = Notify::from_env();
        while Instant::now() < end {
            notify.stop_goes_on();
            if let Some(outcome) = self.bell.wait(STOP_EXTENSION / 2, PACE, look) {
                return outcome;
            }
        }
        Err(Error::unavailable(
            "the origins did not take everything within a day",
            "see why they are slow",
        ))
    }

    /// Records what the origins look like now that nobody writes them any more.
    /// With the cache `off` nothing on flash is promised that may be older.
    fn promise(&self, off: bool) -> Result<()> {
        if off {
            self.settle_left_disks();
        }
        let disks = self.disks.lock();
        let attached = disks.all().filter_map(|(id, slot)| {
            let export = slot.export.as_ref()?;
            Some((id, export.origin()))
        });
        let attached: Vec<_> = attached.collect();
        drop(disks);
        let mounts = Mounts::now();
        let pool = lock(&self.pool);
        let at_spot = attached.into_iter().filter_map(|(id, device)| {
            let spot = mounts.spot_of(&pool.record(id)?.origin);
            Some((id, spot, device))
        });
        let attached: Vec<_> = at_spot.collect();
        drop(pool);
        // Not while the pool is held: it may take as long as the origin likes.
        let served: Vec<u16> = attached.iter().map(|(id, ..)| *id).collect();
        let mut attached = self.identities(attached);
        attached.extend(self.stores.numbers.leave());
        // What has something left on flash that is given up: if it answers again, it has what was dirty
        // before the guests wrote past it.
        let left: Vec<u16> = served
            .iter()
            .copied()
            .filter(|id| off && self.engine.void_seq(*id).is_none())
            .collect();
        lock(&self.pool).change_or_keep(|registry| {
            for record in &mut registry.disks {
                let is_unverified = self.engine.is_unverified(record.id);
                if left.contains(&record.id) {
                    origin::distrust(record);
                } else if origin::is_distrusted(record)
                    && (is_unverified || !served.contains(&record.id))
                {
                    // It was found to differ, and what follows from that is not done.
                    continue;
                } else if let Some((_, now)) = attached.iter().find(|(id, _)| *id == record.id) {
                    record.origin_identity = Some(*now);
                    // What was not compared is compared at the next start.
                    record.clean_detach = !is_unverified;
                } else if record.origin_identity.is_none_or(|left| left.mtime_ns == 0) {
                    // Only an origin that was served until now cannot have changed: the successor compares the others.
                    record.clean_detach = false;
                }
            }
            Ok(())
        })
    }

    /// What origins look like. Those that do not answer within bounds are left out: nothing is promised
    /// of them.
    fn identities(&self, devices: Vec<(u16, Spot, Arc<Device>)>) -> Vec<(u16, OriginIdentity)> {
        let end = Instant::now() + PROMISE_TIME;
        let (told, answers) = channel();
        let asked = devices.len();
        for (id, spot, device) in devices {
            let told = told.clone();
            self.aside(&spot, Class::Due, move || {
                let now = origin::identity(&device);
                drop(device);
                // Nobody listens any more if it came too late.
                let _ = told.send((id, now));
            });
        }
        drop(told);
        let mut answered = 0;
        let mut found = Vec::new();
        while let Ok((id, now)) =
            answers.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            answered += 1;
            found.extend(now.map(|now| (id, now)));
        }
        if answered < asked {
            tracing::warn!(
                origins = asked - answered,
                "some origins do not answer; whether they change from now on is judged by their content"
            );
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::api::server::Control;
    use crate::api::types::{DiskAdd, DiskSet};

    /// Far longer than anything here takes, unless it hangs.
    const LIMIT: Duration = Duration::from_secs(60);

    fn within<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (told, done) = channel();
        std::thread::spawn(move || told.send(work()));
        done.recv_timeout(LIMIT).expect("it hangs")
    }

    #[test]
    fn an_origin_that_does_not_answer_holds_up_nobody_else() {
        let (dir, daemon) = testing::with_disk("a");
        let socket = dir.path().join("silent.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let (adder, origin) = (daemon.clone(), testing::disk(dir.path(), "b").origin);
        let mut silent = DiskAdd {
            name: "silent".to_owned(),
            origin: format!("nbd+unix:///x?socket={}", socket.display()),
            sole_user: true,
            ..DiskAdd::default()
        };
        silent.settings.origin_timeout = Some(600.0);
        let adding = std::thread::spawn(move || adder.add(silent));
        // Now it waits for a greeting.
        let connection = listener.accept().unwrap();
        let other = daemon.clone();
        within(move || {
            let mut smaller = DiskSet::default();
            smaller.settings.max = Some(32 << 20);
            other.set("a", smaller).unwrap();
            let b = DiskAdd {
                name: "b".to_owned(),
                origin,
                ..DiskAdd::default()
            };
            other.add(b).unwrap();
        });
        within(move || daemon.shut_down(StopReason::Signal)).unwrap();
        // None of this waited until the origin was given up.
        assert!(!adding.is_finished());
        drop(connection);
    }

    #[test]
    fn a_stop_beside_an_operation_that_does_not_end_vouches_for_nothing() {
        let (dir, daemon) = testing::with_disk("a");
        let turn = daemon.turn_for("a").unwrap();
        let error = std::thread::scope(|s| {
            let end = || daemon.end(StopReason::Signal, Duration::ZERO);
            s.spawn(end).join().unwrap().unwrap_err()
        });
        assert!(error.what.contains("control operation"), "{error}");
        drop(turn);
        drop(daemon);
        let again = testing::start(dir.path());
        assert_eq!(again.recovery.how, "log");
        again.shut_down(StopReason::Signal).unwrap();
    }
}
