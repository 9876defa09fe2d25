//! Keeps what is noted beside the flash true: which disks may have something there that their origins lack.
//!
//! A thread that does nothing else, and never waits for the pool's lock: whoever has that may be storing the registry on a flash device
//! that answers slowly, and guests of other disks wait for this. It lets held writes go once the note that says "may be dirty" is durable, and takes
//! that note back when a disk has been whole for a while. If the notes cannot be stored, the disk's writes
//! go to its origin first, so that what they say stays true: slower, not stopped.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_engine::api::{DiskConfig, DiskId, Effects, Mode, OriginState};
use hearth_engine::{ControlError, Upto};
use hearth_format::IdSet;
use hearth_reactor::{BlockEngine, ReactorError};

use super::{Daemon, lock};
use crate::beside::Beside;
use crate::gate::Gate;
use crate::settings;

/// How often is looked which disks have become whole. A disk that was twice in a row is noted as such, so
/// that one that is written now and then does not cost a note each time.
const LOOK_TIME: Duration = Duration::from_secs(1);
/// How long a disk's writes go to its origin first until the notes are tried again.
const AGAIN_TIME: Duration = Duration::from_secs(10);
/// How far the origin of an ordered disk has to be gone forward for that to be noted.
const ORDER_STEP_MS: u64 = 2000;
/// Wait before the data threads are asked again that have too many orders.
const BUSY_TIME: Duration = Duration::from_millis(1);

/// The thread, until dropped.
pub(super) struct Noter {
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Noter {
    fn drop(&mut self) {
        self.gate.stop();
        if let Some(thread) = self.thread.take()
            // It may be the one that drops the last of the daemon.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that notes what may be dirty ended abnormally");
        }
    }
}

impl Daemon {
    /// Starts it. Until then writes of disks that are noted as whole wait.
    pub(super) fn start_noter(self: &Arc<Daemon>) -> std::io::Result<Option<Noter>> {
        if self.gate.is_off() {
            return Ok(None);
        }
        let (daemon, gate) = (Arc::downgrade(self), self.gate.clone());
        let body = move || {
            let mut rounds = Rounds::default();
            while let Some(held) = gate.wait(LOOK_TIME) {
                let Some(daemon) = daemon.upgrade() else {
                    return;
                };
                rounds.turn(&daemon, &held);
            }
        };
        let thread = std::thread::Builder::new()
            .name("hearth-noter".to_owned())
            .spawn(body)?;
        Ok(Some(Noter {
            gate: self.gate.clone(),
            thread: Some(thread),
        }))
    }

    /// From here on the engine treats a disk's writes as `mode` says. It is asked while nobody else changes that; `None` for a disk that is
    /// gone. The next write is held until it is noted what follows.
    pub(crate) fn treat_writes(
        &self,
        id: DiskId,
        mode: impl FnOnce() -> Option<Mode>,
    ) -> Result<(), ControlError> {
        let _modes = lock(&self.modes);
        let mode = mode().ok_or(ControlError::NoDisk)?;
        self.gate.shut(id);
        self.engine.set_mode(id, mode)
    }

    /// Gives the engine a disk. The first write is held until what follows from it is noted: it may have been treated in another way when it
    /// was served before.
    pub(super) fn give_engine(
        &self,
        config: DiskConfig,
        origin: OriginState,
    ) -> Result<(), ControlError> {
        let _modes = lock(&self.modes);
        self.gate.shut(config.id);
        self.engine.attach(config, origin)
    }

    /// How writes of a disk are to be treated.
    fn wanted_mode(&self, id: DiskId) -> Option<Mode> {
        let registry = self.seen.registry();
        let record = registry.by_id(id)?;
        let stores = registry.datastores().unwrap_or_default();
        let mut stores = stores.iter();
        let held = stores.any(|store| store.hold && store.name == record.datastore);
        Some(settings::mode(record, held || record.hold))
    }

    /// Nothing on flash is missing from the disk's origin, nor will be of what was asked so far.
    fn is_whole(&self, id: DiskId) -> bool {
        let status = self.engine.status(id);
        status.is_none_or(|s| s.owed_blocks() == 0 && s.drained && s.in_flight == 0)
    }

    /// How far the origin of an ordered disk is, milliseconds since 1970: 0 if it is of no one time, `None` if no
    /// more is known than before.
    pub(super) fn origin_upto(&self, id: DiskId) -> Option<u64> {
        // First the one clock: what is told is not newer than it was.
        let wall = hearth_events::time::now_ms();
        let now = hearth_io::now_ns();
        match self.engine.order(id, now).map(|order| order.upto) {
            Some(Upto::At(ns)) => {
                Some(wall.saturating_sub(now.saturating_sub(ns).div_ceil(1_000_000)))
            }
            Some(Upto::Earlier) => None,
            Some(Upto::Mixed) | None => Some(0),
        }
    }

    /// Notes beside the flash how far the origins of those disks are that are ordered, if that is news: not
    /// every step forward is, but `all` if nothing may be held back, and always that nothing is known.
    pub(super) fn note_orders(
        &self,
        beside: &Beside,
        disks: &[DiskId],
        all: bool,
    ) -> std::io::Result<()> {
        if self.without_flash {
            return Ok(());
        }
        let registry = self.seen.registry();
        let record = |id: &DiskId| {
            let record = registry.by_id(*id)?;
            let ordered = settings::mode(record, record.hold) == Mode::WriteBackOrdered;
            ordered.then_some((*id, record.serial))
        };
        let ordered: Vec<_> = disks.iter().filter_map(record).collect();
        let mut news = Vec::new();
        for (id, serial) in ordered {
            let Some(upto) = self.origin_upto(id) else {
                continue;
            };
            let noted = beside.ordered_upto(id, serial).unwrap_or(0);
            // Also backwards: what was told of a time that the host's clock no longer has is no more known.
            if all || upto < noted || upto >= noted + ORDER_STEP_MS {
                news.push((id, serial, upto));
            }
        }
        beside.note_order(&news)
    }

    /// Notes which disks are whole now that nobody writes any more.
    pub(super) fn note_whole_at_rest(&self) {
        let Some(beside) = lock(&self.pool).beside().cloned() else {
            return;
        };
        let dirty = beside.notes().dirty;
        // Rounds note it once a second: flash may have failed since, and writes gone on past it.
        let all: Vec<DiskId> = dirty.iter().collect();
        if let Err(e) = self.note_orders(&beside, &all, true) {
            tracing::warn!("cannot note how far the origins of ordered disks are: {e}");
        }
        let whole: Vec<DiskId> = dirty.iter().filter(|id| self.is_whole(*id)).collect();
        // Those of a flash that is gone are not judged by what an empty engine says.
        if whole.is_empty() || lock(&self.pool).is_without_flash() {
            return;
        }
        let noted = beside.note(|notes| {
            for id in whole {
                notes.dirty.remove(id);
            }
        });
        if let Err(e) = noted {
            tracing::warn!("cannot note which disks are whole: {e}");
        }
    }
}

#[derive(Default)]
struct Rounds {
    looked_at: Option<Instant>,
    /// Disks that were whole when they were looked at last.
    whole: BTreeSet<DiskId>,
    /// Disks whose writes go to their origins first, because the notes cannot be stored.
    through: BTreeSet<DiskId>,
    failed_at: Option<Instant>,
}

impl Rounds {
    fn turn(&mut self, daemon: &Arc<Daemon>, held: &[DiskId]) {
        let Some(beside) = daemon.beside.clone() else {
            return;
        };
        self.let_go(daemon, &beside, held);
        if self.looked_at.is_none_or(|at| at.elapsed() >= LOOK_TIME) {
            self.looked_at = Some(Instant::now());
            self.look(daemon, &beside);
            self.look_at_orders(daemon, &beside);
            self.take_back(daemon);
        }
    }

    /// Lets held writes go.
    fn let_go(&mut self, daemon: &Arc<Daemon>, beside: &Beside, held: &[DiskId]) {
        if held.is_empty() {
            return;
        }
        // With the flash given up nothing becomes dirty any more; so it does where writes go to the origin first. A disk that is
        // gone answers its requests by itself.
        let dirties =
            |id: DiskId| !daemon.cache_is_off() && daemon.engine.writes_to_flash(id) == Some(true);
        let to_note: Vec<DiskId> = held.iter().copied().filter(|id| dirties(*id)).collect();
        let mut noted = Ok(());
        if !to_note.is_empty() {
            let ordered = daemon.note_orders(beside, &to_note, true);
            noted = ordered.and_then(|()| {
                beside.note(|notes| {
                    for id in &to_note {
                        notes.dirty.insert(*id);
                    }
                })
            });
        }
        // Nobody changes how writes are treated until the gate is open, and who does so then shuts it again. What was changed while
        // this was noted stays shut, and is looked at once more.
        let modes = lock(&daemon.modes);
        if let Err(e) = &noted {
            tracing::error!(
                path = %beside.path().display(),
                "cannot note that disks may be dirty: {e}; until it can be, their writes go to the origins first"
            );
            self.failed_at = Some(Instant::now());
            for id in &to_note {
                // It may be gone.
                let _ = daemon.engine.set_mode(*id, Mode::WriteThrough);
                self.through.insert(*id);
            }
        }
        for id in held {
            if to_note.contains(id) || !dirties(*id) {
                self.whole.remove(id);
                daemon.gate.open(*id);
            }
        }
        drop(modes);
        release(daemon);
    }

    /// Notes which disks are whole by now.
    fn look(&mut self, daemon: &Arc<Daemon>, beside: &Beside) {
        let dirty = beside.notes().dirty;
        let now: BTreeSet<DiskId> = dirty.iter().filter(|id| daemon.is_whole(*id)).collect();
        let before = std::mem::replace(&mut self.whole, now);
        let twice: Vec<DiskId> = self.whole.intersection(&before).copied().collect();
        let mut sure = IdSet::default();
        for id in &twice {
            let _modes = lock(&daemon.modes);
            daemon.gate.shut(*id);
            if daemon.is_whole(*id) {
                sure.insert(*id);
            } else if beside.notes().dirty.contains(*id) {
                daemon.gate.open(*id);
            }
        }
        if twice.is_empty() {
            return;
        }
        release(daemon);
        if sure.is_empty() {
            return;
        }
        let noted = beside.note(|notes| {
            for id in sure.iter() {
                notes.dirty.remove(id);
            }
        });
        // The gate stays shut: what the file says now is not known, and the next write stores it anew.
        if let Err(e) = noted {
            tracing::warn!("cannot note which disks are whole: {e}");
        }
    }

    /// Notes how far the origins of ordered disks are.
    fn look_at_orders(&mut self, daemon: &Arc<Daemon>, beside: &Beside) {
        let dirty: Vec<DiskId> = beside.notes().dirty.iter().collect();
        if let Err(e) = daemon.note_orders(beside, &dirty, false) {
            tracing::warn!("cannot note how far the origins of ordered disks are: {e}");
        }
    }

    /// Tries again to store notes for disks whose writes go to their origins because that failed.
    fn take_back(&mut self, daemon: &Arc<Daemon>) {
        if self.through.is_empty() || self.failed_at.is_some_and(|at| at.elapsed() < AGAIN_TIME) {
            return;
        }
        self.failed_at = Some(Instant::now());
        for id in std::mem::take(&mut self.through) {
            // One that is gone has no mode.
            let _ = daemon.treat_writes(id, || daemon.wanted_mode(id));
        }
    }
}

/// Hands to the engine what waited.
fn release(daemon: &Arc<Daemon>) {
    let requests = daemon.gate.take();
    if requests.is_empty() {
        return;
    }
    // The job may be sent back, and these with it.
    let requests = Arc::new(Mutex::new(requests));
    loop {
        let (door, requests) = (daemon.door.clone(), requests.clone());
        let job = move |now: u64, fx: &mut Effects| {
            let mut requests = std::mem::take(&mut *lock(&requests));
            // The gate may have been shut again meanwhile; then they wait once more.
            door.submit(now, &mut requests, fx);
        };
        match daemon.reactors.run(job) {
            Ok(()) => return,
            Err(ReactorError::Busy) => std::thread::sleep(BUSY_TIME),
            Err(e) => {
                tracing::error!("writes that waited are not answered: {e}");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use hearth_datastore::port::Port;
    use hearth_engine::api::Request;
    use hearth_io::Buf;

    use crate::api::server::Control as _;

    use super::super::{StopReason, testing};
    use super::*;

    /// Far longer than anything here takes.
    const LIMIT: Duration = Duration::from_secs(60);

    fn write(port: &Port, id: DiskId) {
        let (tell, told) = channel();
        let request = Request::write(0, id, 0, 4096, false, &Buf::zeroed(4096), 0);
        port.ask(
            1,
            request,
            Box::new(move |result, _| tell.send(result).unwrap()),
        );
        let result = told.recv_timeout(LIMIT).expect("it waits for the pool");
        assert_eq!(result, Ok(()));
    }

    fn is_noted(daemon: &Daemon, id: DiskId) -> bool {
        daemon.beside.as_ref().unwrap().notes().dirty.contains(id)
    }

    /// Whoever stores the registry has the pool's lock, and may wait for a flash device for half a minute.
    #[test]
    fn the_first_write_of_a_disk_does_not_wait_for_who_has_the_pool() {
        let (_dir, daemon) = testing::with_disk("d");
        let id = daemon.disk_info("d").unwrap().id;
        let port = Port::open(&daemon.reactors).unwrap();
        let pool = lock(&daemon.pool);
        assert!(!is_noted(&daemon, id));
        write(&port, id);
        assert!(is_noted(&daemon, id));
        drop(pool);
        drop(port);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    fn through(dir: &std::path::Path) -> crate::api::types::DiskAdd {
        let mut add = testing::disk(dir, "d");
        let settings = serde_json::json!({"mode": "write-through"});
        add.settings = serde_json::from_value(settings).unwrap();
        add
    }

    /// Its gate was opened without a note, for nothing of it became dirty: that says nothing of what it is now.
    #[test]
    fn what_was_written_through_before_is_noted_once_it_is_written_back() {
        let (dir, daemon) = testing::daemon();
        let port = Port::open(&daemon.reactors).unwrap();
        daemon.add(through(dir.path())).unwrap();
        let id = daemon.disk_info("d").unwrap().id;
        write(&port, id);
        assert!(!is_noted(&daemon, id));
        daemon.treat_writes(id, || Some(Mode::WriteBack)).unwrap();
        write(&port, id);
        assert!(is_noted(&daemon, id), "treated otherwise");

        daemon
            .treat_writes(id, || Some(Mode::WriteThrough))
            .unwrap();
        drop(port);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    /// What is stored is seen at once, without that lock.
    #[test]
    fn what_was_stored_is_seen() {
        let (_dir, daemon) = testing::with_disk("d");
        let id = daemon.disk_info("d").unwrap().id;
        let change = |registry: &mut hearth_format::Registry| {
            registry.by_id_mut(id).unwrap().mode = hearth_format::CacheMode::WriteThrough;
            Ok(())
        };
        lock(&daemon.pool).change(change).unwrap();
        let _pool = lock(&daemon.pool);
        let mode = daemon.seen.record(id).map(|record| record.mode);
        assert_eq!(mode, Some(hearth_format::CacheMode::WriteThrough));
    }
}
