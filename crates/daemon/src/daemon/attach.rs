//! Attaching a disk: is its origin the one we know, and who wins if not?
//!
//! Before a disk is served, the registry holds what the origin looked like, together with the
//! promise that nobody has a reason to change it (`clean_detach`). Our own first write takes the
//! promise back, durably, before it reaches the origin. So after a clean stop, and after a crash
//! before the first write, any change of the origin is somebody else's; later in a disk's life
//! the comparison of cached blocks has to tell.

use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_engine::api::{DiskId, OriginState};
use hearth_format::{DiskRecord, OriginIdentity, Registry, SharedRecord};
use hearth_io::{Device, OriginSpec, Target, Targets};
use hearth_origin::Backing;

use hearth_origin::owner::Take;

use super::admission::Ownership;
use super::control::refused;
use super::course::{Attempt, Turn};
use super::{Daemon, Slot, lock};
use crate::api::types::{CacheCheck, Trust};
use crate::error::{Error, Kind, Result};
use crate::life::{Event, Life, Unserved};
use crate::origin;
use crate::pool::Pool;
use crate::spot::Mounts;
use crate::table::{Purpose, Slots};
use crate::workers::{Class, Spot};

mod judge;
mod sizes;
mod verify;

use judge::{Judged, Looks};
pub(super) use sizes::{MeasuredSpots, shrank};
pub(super) use verify::{Check, Checks};

/// Longest a start waits for origins; those that are slower appear later.
const ATTACH_TIME: Duration = Duration::from_secs(5);
/// Wait before another attempt to open an origin that is there but will not open; it doubles ...
const PATIENCE: Duration = Duration::from_secs(1);
/// ... up to this.
const PATIENCE_MAX: Duration = Duration::from_secs(10);
/// Longest wait for the last user of an origin that is being closed.
const RELEASE_TIME: Duration = Duration::from_secs(2);
/// Longest wait for its being closed, which on a mount that hangs never ends. A process that opens
/// an image is given 25 s to end.
const CLOSE_TIME: Duration = Duration::from_secs(30);

/// An origin that was opened and looked at. Here is all that may take as long as it likes.
pub(super) struct Opened {
    device: Device,
    identity: Option<OriginIdentity>,
    /// What looking at it has shown.
    looks: Looks,
    /// The files below its image, as they were found.
    chain: Vec<String>,
    state: OriginState,
    ownership: Ownership,
}

impl Opened {
    /// Looks at the origin of a new disk. Blocks.
    pub(super) fn new(device: Device, ownership: Ownership) -> Opened {
        let identity = origin::identity(&device);
        Opened::looked_at(device, identity, Looks::default(), Vec::new(), ownership)
    }

    fn looked_at(
        device: Device,
        identity: Option<OriginIdentity>,
        looks: Looks,
        chain: Vec<String>,
        ownership: Ownership,
    ) -> Opened {
        // Without this, what is read before the engine's own first flush could not be cached.
        let state = match device.flush() {
            Ok(()) => OriginState::Flushed,
            Err(e) => {
                tracing::warn!(origin = %device.name(), "the origin cannot be flushed: {e}");
                OriginState::Unknown
            }
        };
        Opened {
            device,
            identity,
            looks,
            chain,
            state,
            ownership,
        }
    }

    /// Nothing will show whether it changed while nothing served it.
    pub(super) fn has_no_times(&self) -> bool {
        let has_times = |identity: OriginIdentity| identity.mtime_ns != 0;
        self.device.is_device() || !self.identity.is_some_and(has_times)
    }

    /// The origin's device.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }
}

/// Says that a disk's origin is being looked for, until dropped. Nobody waits for that: a disk whose
/// origin hangs before it was found can still be changed and removed.
pub(super) struct Looking {
    daemon: Arc<Daemon>,
    id: DiskId,
}

impl Drop for Looking {
    fn drop(&mut self) {
        if let Some(slot) = self.daemon.disks.lock().by_id_mut(self.id) {
            slot.looking = false;
        }
    }
}

/// A disk that the engine has taken.
struct Served {
    device: Arc<Device>,
    notices: Vec<String>,
    /// Dirty blocks must be in the origin before anybody may read.
    reconcile: bool,
    check: Option<Check>,
}

impl Daemon {
    /// Does on a thread of its own what may get stuck at `spot`. Who does so may rely
    /// only on jobs of a later class than its own: there is always room for those.
    pub(super) fn aside(&self, spot: &Spot, class: Class, work: impl FnOnce() + Send + 'static) {
        if let Err(e) = self.workers.run(spot, class, work) {
            tracing::error!("{e}; {}", e.remedy());
        }
    }

    /// Where asking or closing a disk's origin may get stuck.
    pub(super) fn spot_by_id(&self, mounts: &Mounts, id: DiskId) -> Spot {
        // Whoever keeps room for what guests write asks for this, and must not wait for who stores the registry.
        let origin = self.seen.record(id).map(|r| r.origin.clone());
        origin.map_or_else(|| Spot::new(format!("disk {id}")), |o| mounts.spot_of(&o))
    }

    /// Attaches every disk of the registry; those that cannot be are listed with the reason.
    ///
    /// Origins are opened side by side, and one that does not answer (a dead network mount)
    /// keeps nobody waiting for long: its thread goes on, and the disk appears when it is done.
    pub(super) fn attach_all(self: &Arc<Daemon>) {
        // Taken along: opening origins may take long, and the pool must not wait for them.
        let records: Vec<_> = lock(&self.pool).registry().plain_disks().cloned().collect();
        let now = self.now_s();
        let mut disks = self.disks.lock();
        for record in &records {
            let why = Unserved::Waiting(Error::unavailable(
                format!("the origin {} does not answer", record.origin),
                "see whether its device or network mount hangs",
            ));
            let slot = Slot::new(record.id, &record.name, Life::Unserved(why), now);
            disks.insert(record.id, &record.name, slot);
            lock(&self.grounds).lose(record.id);
            self.note_share(record);
        }
        drop(disks);
        self.attach_each(&records, Life::is_awaited);
    }

    /// Attaches the disks that the pool names and that this host's administrator has just confirmed.
    pub(super) fn attach_accepted(self: &Arc<Daemon>, records: &[SharedRecord]) {
        self.attach_each(records, |life| life.unserved().is_some());
    }

    fn attach_each(self: &Arc<Daemon>, records: &[SharedRecord], fits: fn(&Life) -> bool) {
        let pool = lock(&self.pool);
        let confirmed = records.iter().filter(|r| pool.is_confirmed(r)).cloned();
        let confirmed: Vec<SharedRecord> = confirmed.collect();
        drop(pool);
        self.survey(&confirmed);
        let (told, done) = channel::<()>();
        let mounts = Mounts::now();
        for record in records {
            self.attach_aside(&mounts, record, fits, told.clone());
        }
        drop(told);
        // Ends when all have dropped their end, or late.
        let _ = done.recv_timeout(ATTACH_TIME);
    }

    /// Attaches a disk on a thread of its own; drops `told` when done.
    fn attach_aside(
        self: &Arc<Daemon>,
        mounts: &Mounts,
        record: &DiskRecord,
        fits: fn(&Life) -> bool,
        told: Sender<()>,
    ) {
        // Somebody is looking for it; it is tried again.
        let Some(look) = self.begin_look(record.id) else {
            return;
        };
        let spot = mounts.spot_of(&record.origin);
        self.aside(&spot, Class::Background, move || {
            look.daemon.try_attach(look.id, fits);
            drop(look);
            drop(told);
        });
    }

    /// Attaches a disk that nobody changes, if its life still fits; false if it does not.
    fn try_attach(self: &Arc<Daemon>, id: DiskId, fits: fn(&Life) -> bool) -> bool {
        let awaited = |disks: &Slots<Slot>| disks.by_id(id).is_some_and(|s| fits(&s.life));
        // Somebody changing the disk goes first; then it may be gone or decided.
        let Some(turn) = self.disks.turn_if(id, Purpose::Opening, awaited) else {
            return false;
        };
        let record = lock(&self.pool).record(id).cloned();
        // Fails when the daemon is stopping; what was opened is closed.
        record.is_some_and(|record| self.attach(&turn, record, None, Take::Free).is_ok())
    }

    /// Opens a disk's origin, however long that takes, and attaches the disk, whatever comes of
    /// it. Fails if that cannot be now, or if the daemon has begun to stop meanwhile.
    pub(super) fn attach(
        self: &Arc<Daemon>,
        turn: &Turn,
        record: DiskRecord,
        trust: Option<Trust>,
        take: Take,
    ) -> Result<()> {
        let name = record.name.clone();
        turn.begin_opening();
        self.try_tell(turn, Event::Open)
            .map_err(|why| refused(&name, &why))?;
        let attempt = Attempt::new(self, turn);
        let opened = self.look(&record, take, trust);
        if !turn.begin_change() {
            self.not_stopping()?;
        }
        let record = lock(&self.pool).record(turn.id()).cloned();
        let record = record.ok_or_else(|| Error::no_disk(&name))?;
        self.tell(turn, Event::Opened);
        let rest = self.judge_and_serve(turn, record, trust, opened);
        attempt.end();
        // Before the turn: whoever may open it next finds it closed.
        drop(rest);
        Ok(())
    }

    /// Begins to try disks again whose origin is missing or too small. Called by housekeeping.
    pub(super) fn look_for_origins(self: &Arc<Daemon>) {
        let now = Instant::now();
        let disks = self.disks.lock();
        let due = |slot: &Slot| slot.patience.is_none_or(|(next, _)| next <= now);
        let awaited = disks.all().filter(|(id, slot)| {
            slot.life.is_awaited() && due(slot) && !slot.looking && disks.purpose(*id).is_none()
        });
        let awaited: Vec<DiskId> = awaited.map(|(id, _)| id).collect();
        drop(disks);
        if awaited.is_empty() {
            return;
        }
        let mounts = Mounts::now();
        for id in awaited {
            let record = lock(&self.pool).record(id).cloned();
            if let Some(record) = record
                && let Some(look) = self.begin_look(id)
            {
                let spot = mounts.spot_of(&record.origin);
                self.aside(&spot, Class::Background, move || look.daemon.retry(id));
            }
        }
    }

    /// Marks a disk whose origin is about to be looked for; `None` if that goes on already.
    pub(super) fn begin_look(self: &Arc<Daemon>, id: DiskId) -> Option<Looking> {
        let mut disks = self.disks.lock();
        let slot = disks.by_id_mut(id).filter(|slot| !slot.looking)?;
        slot.looking = true;
        Some(Looking {
            daemon: self.clone(),
            id,
        })
    }

    fn retry(self: &Arc<Daemon>, id: DiskId) {
        let Some(record) = lock(&self.pool).record(id).cloned() else {
            return;
        };
        let refused = self
            .disks
            .lock()
            .by_id(id)
            .is_some_and(|slot| matches!(slot.life, Life::Unserved(Unserved::Refused { .. })));
        // Cheaper than a whole attempt, silent, and if it hangs, only this thread does.
        let least = if refused { record.size } else { 1 };
        if !origin::is_found(&record.origin, least) {
            return;
        }
        if !self.try_attach(id, Life::is_awaited) {
            return;
        }
        let mut disks = self.disks.lock();
        if let Some(slot) = disks.by_id_mut(id) {
            // An attempt may start a process, and says in the log what came of it.
            slot.patience = slot.life.is_awaited().then(|| {
                let wait = slot.patience.map_or(PATIENCE, |(_, wait)| wait * 2);
                let wait = wait.min(PATIENCE_MAX);
                (Instant::now() + wait, wait)
            });
        }
    }

    /// Attaches a disk of the registry, whatever came of opening its origin. Nothing here waits for the
    /// origin: one that is not taken is given back, to be closed where it may take its time.
    pub(super) fn judge_and_serve(
        self: &Arc<Daemon>,
        turn: &Turn,
        record: DiskRecord,
        trust: Option<Trust>,
        opened: Result<Opened>,
    ) -> Option<Opened> {
        let (id, name) = (record.id, record.name.clone());
        // Either is seen from outside to be put right.
        let watched = match &opened {
            Ok(opened) => opened.device.size() < record.size,
            Err(_) => {
                let disks = self.disks.lock();
                disks.by_id(id).is_some_and(|slot| slot.chain_refused)
            }
        };
        let clean_fits = opened.as_ref().is_ok_and(|o| o.looks.clean_fits);
        self.note_share(&record);
        let judged = match &opened {
            // Others may have been served since it was looked at.
            Ok(opened) => self
                .take_place(&record)
                .and_then(|()| self.judge(opened, record, trust)),
            Err(e) => Err(e.clone()),
        };
        let (served, rest) = match (judged, opened) {
            (Ok(judged), Ok(opened)) => (self.serve(opened, judged), None),
            (Err(e), opened) => (Err(e), opened.ok()),
            (Ok(_), Err(e)) => (Err(e), None),
        };
        let now = self.now_s();
        let mut to_check = None;
        let mut disks = self.disks.lock();
        let slot = disks.by_id_mut(id)?;
        slot.begin_session(now);
        let event = match served {
            Ok(served) => {
                for notice in &served.notices {
                    tracing::warn!(disk = %name, "{notice}");
                }
                self.events
                    .tell(hearth_events::Event::DiskAttached { disk: name.clone() });
                crate::mirror::know_cache(&served.device, &self.engine, id);
                slot.device = Some(served.device);
                slot.session.notices = served.notices;
                slot.session.clean_fits = clean_fits;
                if let Some(check) = served.check {
                    slot.session.check = Some(CacheCheck::default());
                    to_check = slot.device.clone().zip(Some(check));
                }
                Event::Taken {
                    reconcile: served.reconcile,
                }
            }
            Err(e) => {
                slot.placed = false;
                let why = if e.kind == Kind::Refused {
                    Unserved::Refused { why: e, watched }
                } else {
                    Unserved::Waiting(e)
                };
                // It is tried again and again.
                let told = slot
                    .life
                    .unserved()
                    .is_some_and(|before| match (before, &why) {
                        (Unserved::Waiting(a), Unserved::Waiting(b)) => a == b,
                        (Unserved::Refused { why: a, .. }, Unserved::Refused { why: b, .. }) => {
                            a == b
                        }
                        _ => false,
                    });
                match &why {
                    _ if told => {}
                    Unserved::Waiting(e) => self.events.tell(hearth_events::Event::DiskWaiting {
                        disk: name.clone(),
                        why: e.to_string(),
                    }),
                    Unserved::Refused { why, .. } => {
                        self.events.tell(hearth_events::Event::DiskRefused {
                            disk: name.clone(),
                            why: why.to_string(),
                        });
                    }
                }
                Event::NotTaken(why)
            }
        };
        drop(disks);
        self.tell(turn, event);
        if let Some((device, check)) = to_check {
            self.check_later(id, &device, check);
        }
        self.look_at_pins();
        rest
    }

    /// Gives a judged disk to the engine.
    fn serve(self: &Arc<Daemon>, opened: Opened, judged: Judged) -> Result<Served> {
        let Opened {
            device,
            state,
            ownership,
            ..
        } = opened;
        let Judged {
            record,
            notices,
            reconcile,
            leaving,
            check,
        } = judged;
        let (id, pool) = (record.id, self.pool.clone());
        // Then there is no promise to take back.
        let device = if reconcile || leaving {
            device
        } else {
            device.before_first_write(move || announce_writes(pool, id))
        };
        let device = Arc::new(device);
        self.engine.set_verified(id, check.is_none());
        self.targets.set(Target::Origin(id), Some(device.clone()));
        self.rooms.watch(id, &device);
        if let Err(e) = self.give_engine(crate::settings::config(&record, &device), state) {
            self.release(id);
            return Err(super::control_error(&format!("attach {}", record.name), e));
        }
        self.watch_origin(id);
        // It is there: it was just attached.
        let _ = self
            .engine
            .set_max_age(id, crate::settings::max_age_ns(&record));
        let before = self.disks.lock().by_id_mut(id).and_then(|slot| {
            let mut claim = ownership.claim?;
            claim.keep();
            slot.claim.replace(claim)
        });
        // One that is replaced is of the same record.
        drop(before);
        if self.observer.watch_disk(id, record.size) {
            self.recall_curve(&record);
        }
        self.poke();
        Ok(Served {
            device,
            notices,
            reconcile,
            check,
        })
    }

    /// Opens a disk's origin, leg by leg if it is a mirror. `fresh`: the disk is being added. Blocks.
    pub(super) fn open_origin(
        &self,
        spec: &OriginSpec,
        record: &DiskRecord,
        backing: Backing,
        fresh: bool,
    ) -> Result<Device> {
        if record.is_flash_only() {
            return self.homeless_device(record);
        }
        let Some(legs) = hearth_origin::legs(spec) else {
            return origin::open(spec, record, &self.images, backing);
        };
        let parts = crate::mirror::Parts {
            images: &self.images,
            state_dir: self.stores.state_dir(),
            pool: &self.pool,
            events: &self.events,
            stale: &self.stale_legs,
            fresh,
        };
        crate::mirror::open(&legs, record, &parts)
    }

    /// Closes the origin of a disk the engine has let go, and waits for that, within bounds.
    pub(super) fn release(&self, id: u16) {
        if let Some(closed) = self.begin_release(id, &Mounts::now()) {
            // Ends when it is closed.
            let _ = closed.recv_timeout(CLOSE_TIME);
        }
    }

    /// The same for many disks, side by side.
    pub(super) fn release_all(&self, ids: &[u16]) {
        let end = Instant::now() + CLOSE_TIME;
        let mounts = Mounts::now();
        let begin = |id: &u16| self.begin_release(*id, &mounts);
        let closing: Vec<_> = ids.iter().filter_map(begin).collect();
        for closed in closing {
            let _ = closed.recv_timeout(end.saturating_duration_since(Instant::now()));
        }
    }

    /// The same without waiting.
    pub(super) fn release_aside(&self, id: u16) {
        drop(self.begin_release(id, &Mounts::now()));
    }

    /// Closes an origin on a thread of its own: on a mount that hangs, closing hangs as well. The
    /// other end of what is returned is dropped when it is done.
    fn begin_release(&self, id: u16, mounts: &Mounts) -> Option<Receiver<()>> {
        self.rooms.forget(id);
        let device = self.targets.set(Target::Origin(id), None)?;
        self.ignore_origin(id);
        self.poke();
        let (told, closed) = sync_channel(1);
        let work = move || {
            if Targets::wait_unused(device, RELEASE_TIME).is_err() {
                tracing::warn!(
                    disk = id,
                    "the origin is still being used; it is closed when that ends"
                );
            }
            drop(told);
        };
        self.aside(&self.spot_by_id(mounts, id), Class::Due, work);
        Some(closed)
    }

    /// Stores what was found out about a disk, or keeps it in RAM if flash takes no writes and the next
    /// start is told by other means not to trust it.
    fn note_record(&self, record: &DiskRecord) -> Result<()> {
        lock(&self.pool).change_or_keep(|registry| replace(registry, record))
    }
}

fn replace(registry: &mut Registry, record: &DiskRecord) -> Result<()> {
    let place = registry.by_id_mut(record.id);
    // A disk that was removed meanwhile must not come back.
    let place = place.ok_or_else(|| Error::no_disk(&record.name))?;
    // A mirror notes by itself what becomes of its legs.
    let mirror = place.mirror.clone();
    *place = record.clone();
    place.mirror = mirror;
    Ok(())
}

/// Longest wait for the note that an origin is about to be written.
const NOTE_TIME: Duration = Duration::from_secs(10);

/// Notes durably that an origin is about to be written by us. Who waits for that does so for a while only: somebody else may be
/// changing the registry, and the flash may not answer.
pub(super) fn announce_writes(pool: Arc<Mutex<Pool>>, id: u16) {
    let (done, noted) = channel();
    let note = move || {
        withdraw_promise(&pool, id);
        // Nobody waits any more if it cannot be sent.
        let _ = done.send(());
    };
    let thread = std::thread::Builder::new().name("hearth-note".to_owned());
    // As if it could not be noted.
    if thread.spawn(note).is_err() || noted.recv_timeout(NOTE_TIME).is_err() {
        tracing::error!("it is not noted yet that the origin of disk {id} is being written");
    }
}

/// Notes durably that an origin is about to be written by us.
pub(super) fn withdraw_promise(pool: &Mutex<Pool>, id: u16) {
    let noted = lock(pool).change_or_keep(|registry| {
        if let Some(record) = registry.by_id_mut(id) {
            record.clean_detach = false;
        }
        Ok(())
    });
    // The promise then stands although it is void: the next start may take our own writes for
    // somebody else's, and asks or drops what is clean. Nothing is lost.
    if let Err(e) = noted {
        tracing::error!("cannot note on flash that an origin is being written: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::{StopReason, testing};
    use super::*;
    use crate::api::server::Control;

    fn waiting() -> Unserved {
        Unserved::Waiting(Error::unavailable(
            "nobody has looked for it yet",
            "wait a moment",
        ))
    }

    /// A disk on a new file, in the registry, not attached.
    fn known(daemon: &Daemon, dir: &std::path::Path, id: DiskId, name: &str) -> DiskRecord {
        let record = DiskRecord {
            id,
            name: name.to_owned(),
            origin: testing::disk(dir, name).origin,
            size: 16 << 20,
            ..DiskRecord::default()
        };
        let add = |registry: &mut Registry| {
            registry.disks.push(record.clone().into());
            Ok(())
        };
        lock(&daemon.pool).change(add).unwrap();
        let slot = Slot::new(id, name, Life::Unserved(waiting()), 0);
        daemon.disks.lock().insert(id, name, slot);
        record
    }

    fn attach(daemon: &Arc<Daemon>, record: DiskRecord, opened: Opened) -> Option<Error> {
        let id = record.id;
        let turn = daemon.disks.turn(id, Purpose::Changing).unwrap();
        daemon.tell(&turn, Event::Open);
        daemon.tell(&turn, Event::Opened);
        drop(daemon.judge_and_serve(&turn, record, None, Ok(opened)));
        let disks = daemon.disks.lock();
        let why = disks.by_id(id).unwrap().life.unserved();
        why.map(|why| why.why().clone())
    }

    /// While other operations wait nobody may look at an origin: it may hang.
    #[test]
    fn what_an_old_disk_is_told_was_seen_before() {
        let (dir, daemon) = testing::daemon();
        let record = known(&daemon, dir.path(), 7, "old");
        let mut image = vec![0; record.size as usize];
        image[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        std::fs::write(&record.origin, &image).unwrap();
        let opened = daemon.look(&record, Take::Free, None).unwrap();
        image[..8].fill(0);
        std::fs::write(&record.origin, &image).unwrap();
        assert_eq!(attach(&daemon, record, opened), None);
        let told = daemon.with_slot("old", |slot| Ok(slot.session.notices.concat()));
        assert!(told.unwrap().contains("raw bytes are served"));
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    /// A look that hangs is for one spot only.
    #[test]
    fn sizes_are_looked_at_where_nobody_looks_yet() {
        let (dir, daemon) = testing::with_disk("a");
        let elsewhere = tempfile::tempdir().unwrap();
        daemon.add(testing::disk(elsewhere.path(), "b")).unwrap();
        let spot = crate::spot::of(dir.path().join("a.raw").to_str().unwrap());
        lock(&daemon.measuring).insert(spot.clone());
        for origin in [dir.path().join("a.raw"), elsewhere.path().join("b.raw")] {
            let file = std::fs::File::options().write(true).open(origin).unwrap();
            file.set_len(8 << 20).unwrap();
        }
        // Far longer than it takes.
        let limit = Duration::from_secs(60);
        let shrinks = |name: &str| {
            let short = |disks: &mut Slots<Slot>| disks.get(name)?.session.short;
            daemon.disks.wait(limit, short)
        };
        daemon.look_at_sizes();
        assert_eq!(shrinks("b"), Some(8 << 20));
        let short = daemon.with_slot("a", |slot| Ok(slot.session.short));
        assert_eq!(short.unwrap(), None);
        lock(&daemon.measuring).remove(&spot);
        daemon.look_at_sizes();
        assert_eq!(shrinks("a"), Some(8 << 20));
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    /// Each was looked at before the other was served.
    #[test]
    fn two_disks_on_the_same_data_do_not_slip_past_each_other() {
        let (dir, daemon) = testing::daemon();
        let a = known(&daemon, dir.path(), 7, "a");
        let b = known(&daemon, dir.path(), 8, "b");
        let see = |record| daemon.look(record, Take::Free, None).unwrap();
        let (opened_a, opened_b) = (see(&a), see(&b));
        let place = lock(&daemon.grounds).of(b.id).cloned();
        daemon.note_place(a.id, (place, true));
        assert_eq!(attach(&daemon, a, opened_a), None);
        let refused = attach(&daemon, b, opened_b).unwrap();
        assert!(refused.what.contains("holds the same data"), "{refused}");
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
