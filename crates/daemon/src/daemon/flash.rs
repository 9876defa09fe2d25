//! Watching over the flash: noticing that it is going, saying so, and getting what is dirty off it.
//!
//! A flash file may be removed, truncated or replaced while it is in use, and the file system under a
//! sparse one may become full. What was removed still works until it is closed, so the cache is left in
//! order: writes go to the origins, what is dirty is destaged, and a stop waits for that. A disk whose
//! last dirty block is durable in its origin has its records voided in the registry, so that no later
//! start asks which side is right.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_engine::FlashFault;
use hearth_engine::api::{DiskId, Effects};
use hearth_events::Event;
use hearth_format::{PoolNotes, Uuid};
use hearth_io::BLOCK;
use hearth_io::file::{NameLeadsTo, Standing};

use super::{Daemon, StopReason, lock};
use crate::degraded::Degraded;
use crate::error::Error;
use crate::notify::Notify;
use crate::pool::{Bare, bare};
use crate::size::human;
use crate::workers::{Class, Spot};

/// The first repetition of what was said about the flash; then ever later ...
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// ... up to this.
const TELL_AGAIN_MAX: Duration = Duration::from_secs(3600);
/// Room that is there for so long is worth a word, which comes no more often than `TELL_AGAIN`.
const ROOM_TIME: Duration = Duration::from_secs(2);
/// Longest wait until the engine has been told.
const GIVE_UP_TIME: Duration = Duration::from_secs(5);
/// How often is looked whether disks have nothing left on flash that is given up.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Least time between two tries to go on without a device that failed.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// A stop that empties the flash gives up after so long without any progress.
const EMPTY_STALL: Duration = Duration::from_secs(30);
/// How often it looks at most, and how often it says how far it is.
const EMPTY_PACE: Duration = Duration::from_millis(20);
const EMPTY_TELL: Duration = Duration::from_secs(10);

/// Where a look at the flash file may get stuck.
const FLASH: &str = "the flash";

/// What is known of the flash beyond what the engine knows.
pub(super) struct FlashWatch {
    /// The cache is off since the start.
    degraded: Option<Degraded>,
    /// What is to be said of where it lies.
    place: Vec<String>,
    /// How long there must have been room for the cache that is off until the daemon ends for it.
    exit_when_room: Option<Duration>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What happened to the flash file, once it is given up for that.
    gone: Option<String>,
    /// The device that was erased, if it was given up for that.
    erased: Option<PathBuf>,
    /// Bytes that the file system lacks for all of the flash file.
    lacks: Option<u64>,
    /// Since when there is room for all of the flash file, while the cache is off for want of it.
    room_since: Option<Instant>,
    /// When that was last said.
    room_told_at: Option<Instant>,
    /// The flash file is sound, but its name leads elsewhere.
    moved: Option<String>,
    settle_at: Option<Instant>,
    told: Option<Told>,
    /// The flash file is being looked at.
    looking: bool,
    /// A note of the failure is being written beside the flash.
    marking: bool,
    /// It could not be, and that was said.
    unmarked: bool,
    /// Of which disks the records were voided because flash was given up: from which segment on they counted, and count.
    settled: Vec<(DiskId, u64, u64)>,
    /// The pool could go on without a device that failed, and why it does not.
    waits: Option<Error>,
    /// When that is tried again.
    tried_at: Option<Instant>,
}

/// The flash file is being looked at, until dropped.
struct FlashLook(Arc<Daemon>);

impl Drop for FlashLook {
    fn drop(&mut self) {
        lock(&self.0.flash.state).looking = false;
        // A stop waits for it.
        self.0.bell.ring();
    }
}

/// What was said, and when it is said again.
struct Told {
    what: String,
    again_at: Instant,
    wait: Duration,
}

impl FlashWatch {
    pub(super) fn new(
        degraded: Option<Degraded>,
        place: Vec<String>,
        exit_when_room: Option<Duration>,
    ) -> FlashWatch {
        for notice in &place {
            tracing::warn!("{notice}");
        }
        FlashWatch {
            degraded,
            place,
            exit_when_room,
            state: Mutex::default(),
        }
    }

    /// Of which disks the records were voided, and how they were before.
    pub(super) fn settled(&self) -> Vec<(DiskId, u64, u64)> {
        lock(&self.state).settled.clone()
    }

    /// The device that was erased, if it was given up for that. Its tables may have been stored again since.
    pub(super) fn erased(&self) -> Option<PathBuf> {
        lock(&self.state).erased.clone()
    }

    /// Is it time to try to go on without a device?
    pub(super) fn may_try(&self) -> bool {
        let mut state = lock(&self.state);
        let soon = state.tried_at.is_some_and(|at| at.elapsed() < TRY_AGAIN);
        if !soon {
            state.tried_at = Some(Instant::now());
        }
        !soon
    }

    /// Why the pool does not go on without a device by itself.
    pub(super) fn set_waits(&self, why: Option<Error>) {
        lock(&self.state).waits = why;
    }

    pub(super) fn waits(&self) -> Option<Error> {
        lock(&self.state).waits.clone()
    }

    /// What is to be said of where the flash lies.
    pub(super) fn place(&self) -> &[String] {
        &self.place
    }

    /// Why the cache is off since the start, if it is.
    pub(super) fn degraded(&self) -> Option<&Degraded> {
        self.degraded.as_ref()
    }

    /// Whether a cache that flash refuses to be written for is off for want of room only.
    fn for_room(&self) -> bool {
        self.degraded.as_ref().is_none_or(|d| d.for_room)
    }
}

/// How a pool gets other flash once nothing is left to be saved from what it had. Is it known beside the flash?
fn in_its_place(known: bool) -> &'static str {
    match known {
        true => {
            "stop the daemon, have a new file or device take its place with `hearth pool adopt-flash` (with --force, if \
             that is the old one made anew), and start it: the disks and their settings stay"
        }
        // Only the flash has said what its disks are.
        false => {
            "stop the daemon, create a new pool, and add the disks anew, as nothing could be kept of this pool in the \
             state directory"
        }
    }
}

/// What is wrong with a flash file that had `size` bytes, and whether it still gives back what it holds.
fn verdict(path: &Path, size: u64, now: &Standing) -> Option<(String, FlashFault)> {
    let path = path.display();
    if now.size < size {
        let how = format!(
            "the flash file {path} was truncated from {} to {} while in use",
            human(size),
            human(now.size)
        );
        return Some((how, FlashFault::Broken));
    }
    if now.links > 0 {
        return None;
    }
    let how = match now.name {
        NameLeadsTo::Another => format!("the flash file {path} was replaced while in use"),
        _ => format!("the flash file {path} was removed while in use"),
    };
    Some((how, FlashFault::Leaving))
}

/// What is to be said of a flash file that is sound but not found under its name.
fn misplaced(path: &Path, now: &Standing) -> Option<String> {
    let path = path.display();
    let what = match now.name {
        NameLeadsTo::It => return None,
        NameLeadsTo::Another => format!("another file now lies at {path}"),
        NameLeadsTo::Nothing => format!("the flash file {path} was moved while in use"),
    };
    (now.links > 0).then(|| {
        format!("{what}: the next start will not find the pool there; put the flash file back under its name")
    })
}

impl Daemon {
    /// Begins to look at the flash file, unless it is still being looked at: the question may hang with the
    /// file system. Called by housekeeping.
    pub(super) fn look_at_flash_aside(self: &Arc<Daemon>) {
        if std::mem::replace(&mut lock(&self.flash.state).looking, true) {
            return;
        }
        let looking = FlashLook(self.clone());
        self.aside(&Spot::new(FLASH), Class::Due, move || {
            looking.0.look_at_flash()
        });
    }

    /// Has such a look not ended?
    pub(super) fn is_looking_at_flash(&self) -> bool {
        lock(&self.flash.state).looking
    }

    pub(super) fn look_at_flash(&self) {
        let flash = lock(&self.pool).flash().clone();
        let off = self.cache_is_off();
        let (mut gone, mut moved, mut lacks) = (None, None, off.then_some(0u64));
        let (mut blamed, mut erased) = (Vec::new(), None);
        for (place, device) in (0..).zip(flash.iter()) {
            if flash.is_lost(place) || off {
                continue;
            }
            let Some(bare) = bare(device) else {
                continue;
            };
            if flash.are_twice() && flash.can_lose(place) {
                flash.suspect(place);
                continue;
            }
            let path = device.path().display();
            let how = match bare {
                Bare::Erased => {
                    erased.get_or_insert(device.path().to_owned());
                    format!("{path} was erased or written over while in use")
                }
                // With nobody at work on it no other error says so, and the kernel may swap there.
                Bare::Dead(e) => format!("{path} cannot be read any more: {e}"),
                Bare::Silent => format!("{path} does not answer"),
            };
            gone = Some((how, FlashFault::Broken));
            blamed.push(place);
        }
        let mut files = 0;
        let files_of = (0..).zip(flash.iter());
        for (place, device, file) in files_of.filter_map(|(n, d)| Some((n, d, d.file()?))) {
            // Nobody asks it any more.
            if flash.is_lost(place) {
                continue;
            }
            let now = match device.standing() {
                Ok(Some(now)) => now,
                Ok(None) => continue,
                Err(e) => {
                    tracing::debug!("the flash file does not say how it is: {e}");
                    continue;
                }
            };
            files += 1;
            // One that is gone is as bad as all.
            let verdict = verdict(file.path(), file.size(), &now);
            if flash.are_twice() && verdict.is_some() && flash.can_lose(place) {
                // The others have everything.
                flash.suspect(place);
                continue;
            }
            blamed.extend(verdict.is_some().then_some(place));
            gone = verdict.or(gone);
            moved = moved.or_else(|| misplaced(file.path(), &now));
            lacks = match lacks {
                Some(sum) => crate::place::lacks(file.path(), file).map(|n| sum.saturating_add(n)),
                None => None,
            };
        }
        if files == 0 && gone.is_none() {
            return;
        }
        let mut state = lock(&self.flash.state);
        state.moved = moved;
        state.lacks = lacks;
        // A start finds the pool by its name.
        if lacks == Some(0) && state.moved.is_none() && self.off_for_room() {
            state.room_since.get_or_insert_with(Instant::now);
        } else {
            state.room_since = None;
        }
        // What was removed may be truncated as well, which is worse.
        let news = gone.filter(|(how, _)| state.gone.as_ref() != Some(how));
        let Some((how, fault)) = news else { return };
        state.gone = Some(how);
        state.erased = state.erased.take().or(erased);
        drop(state);
        blamed.into_iter().for_each(|n| self.engine.blame_device(n));
        self.give_flash_up(fault);
    }

    /// The cache is off, and with room on the file system a start would bring it back.
    fn off_for_room(&self) -> bool {
        self.engine.pool_stats().flash_fault == Some(FlashFault::Unwritable)
            && self.flash.for_room()
    }

    /// Says that there is room for the cache again, and ends the daemon for it if that is wanted: an
    /// engine that gave its flash up does not take it back, a start does.
    fn room_round(&self) {
        let mut state = lock(&self.flash.state);
        let Some(since) = state.room_since else {
            return;
        };
        let told = state.room_told_at;
        let again = told.is_none_or(|at| at < since && at.elapsed() >= TELL_AGAIN);
        if again && since.elapsed() >= ROOM_TIME {
            state.room_told_at = Some(Instant::now());
            tracing::warn!("{}", self.room_words());
        }
        drop(state);
        // What is dirty is written back first: a stop that has to wait for that would be a long one.
        let wanted = self.flash.exit_when_room;
        if wanted.is_some_and(|time| since.elapsed() >= time) && self.dirty_bytes() == 0 {
            self.request_stop(StopReason::Room);
        }
    }

    /// That a start would bring the cache back now, as far as room goes.
    pub(super) fn room_again(&self) -> Option<&'static str> {
        let enough = lock(&self.flash.state).lacks == Some(0);
        (enough && self.off_for_room()).then(|| self.room_words())
    }

    fn room_words(&self) -> &'static str {
        match self.flash.exit_when_room {
            None => {
                "there is room for all of the flash file again: restart the daemon to have the cache back"
            }
            Some(_) => {
                "there is room for all of the flash file again: the daemon ends when it has stayed so, \
                 to be started with its cache"
            }
        }
    }

    fn give_flash_up(&self, fault: FlashFault) {
        let engine = self.engine.clone();
        let (told, done) = std::sync::mpsc::sync_channel(1);
        let job = move |now: u64, fx: &mut Effects| {
            engine.give_flash_up(fault, true, now, fx);
            // Whoever waits does so for a while only.
            let _ = told.send(());
        };
        if self.reactors.run(job).is_err() || done.recv_timeout(GIVE_UP_TIME).is_err() {
            tracing::error!("the data threads do not answer; the flash is still in use");
        }
    }

    /// The flash is written no more, whatever the reason.
    pub(super) fn cache_is_off(&self) -> bool {
        self.engine.pool_stats().flash_failed
    }

    /// The word for the state of the pool.
    pub(super) fn pool_state(&self) -> &'static str {
        match self.engine.pool_stats().flash_fault {
            None => "serving",
            Some(FlashFault::Broken) => "failed",
            Some(FlashFault::Leaving) => "leaving",
            Some(FlashFault::Unwritable) => "cache-off",
        }
    }

    /// What somebody should know about the flash; empty if all is well.
    pub(super) fn flash_notices(&self) -> Vec<String> {
        let stats = self.engine.pool_stats();
        let (gone, moved) = {
            let state = lock(&self.flash.state);
            (state.gone.clone(), state.moved.clone())
        };
        let pool = lock(&self.pool);
        let (path, file) = (
            pool.path().display().to_string(),
            pool.media().file().map(hearth_io::BlockFile::descriptor),
        );
        let paths = pool.paths();
        let lost = pool.flash().lost();
        drop(pool);
        let lost: Vec<String> = lost
            .iter()
            .filter_map(|n| Some(paths.get(usize::from(*n))?.display().to_string()))
            .collect();
        let on = "the disks go on from their origins, without a cache";
        let without = self.without_notice();
        let mut notices = Vec::new();
        if !lost.is_empty() && stats.flash_fault.is_none() {
            notices.push(format!(
                "flash device {} is lost: it failed, is missing, or is older than the others, which have all that is dirty; until \
                 there are two again, writes go to the origins before they are answered; put another one in its place with \
                 `hearth pool replace-flash`",
                lost.join(", ")
            ));
        }
        match stats.flash_fault {
            None => {}
            Some(_) if without.is_some() => {
                let why = gone.map_or_else(String::new, |how| format!("{how}: "));
                notices.push(format!("{why}{}; until then {on}", without.unwrap_or_default()));
            }
            Some(FlashFault::Leaving) => notices.push(format!(
                "{}: {on}, and what is dirty is being written to them; wait for that, then {}; \
                 until it stops, the old file can be copied from /proc/{}/fd/{}",
                gone.unwrap_or_else(|| format!("the flash file {path} was removed while in use")),
                in_its_place(self.beside.is_some()),
                std::process::id(),
                file.unwrap_or(-1),
            )),
            Some(FlashFault::Unwritable) => {
                let (why, remedy) = match self.flash.degraded() {
                    Some(degraded) if degraded.dirty == crate::degraded::Dirty::Refuse => (
                        degraded.why.clone(),
                        "the next start uses the flash again",
                    ),
                    Some(degraded) if degraded.dirty == crate::degraded::Dirty::Gone => (
                        degraded.why.clone(),
                        "put the flash back and restart the daemon; if it is there and cannot be used, save what was dirty with \
                         `hearth rescue`, stop the daemon, have another device, or this one with --force, take its place with \
                         `hearth pool adopt-flash`, and start it",
                    ),
                    Some(degraded) => (
                        degraded.why.clone(),
                        "put that right, then restart the daemon to have the cache back",
                    ),
                    None => (
                        format!("the file system that holds {path} is full"),
                        "make room there, then restart the daemon to have the cache back",
                    ),
                };
                notices.push(format!("the cache is off because {why}: {on}; {remedy}"));
            }
            Some(FlashFault::Broken) => notices.push(format!(
                "{}: {on}, and what is dirty is written to them as long as the flash can be read; \
                 wait until `hearth disk flush` is done, see in `hearth disk show` what is lost, then {}",
                gone.map_or_else(
                    || "the flash has failed".to_owned(),
                    |how| format!("the flash has failed: {how}")
                ),
                in_its_place(self.beside.is_some()),
            )),
        }
        notices.extend(moved);
        notices
    }

    /// Whether a restart would bring the cache back, as far as room goes. Not among the notices that are
    /// logged again when they change: this changes with every file on the file system.
    pub(super) fn room_notice(&self) -> Option<String> {
        let full = self.off_for_room();
        match lock(&self.flash.state).lacks.filter(|_| full)? {
            0 => Some(self.room_words().to_owned()),
            short => Some(format!(
                "the file system lacks {} for all of the flash file",
                human(short)
            )),
        }
    }

    /// What is due for flash that is going or gone. Called by housekeeping.
    pub(super) fn flash_round(self: &Arc<Daemon>) {
        self.tell_flash();
        if self.cache_is_off() {
            self.room_round();
            self.note_beside_flash();
            self.go_on_round();
            let now = Instant::now();
            let mut state = lock(&self.flash.state);
            if state.settle_at.is_some_and(|at| now < at) {
                return;
            }
            state.settle_at = Some(now + SETTLE_TIME);
            drop(state);
            self.settle_left_disks();
        } else {
            self.free_off_disks_from_log();
        }
    }

    /// Where flash took no note of being given up: notes it beside it, or a start after a crash would
    /// destage what was dirty then over what guests have written since. Writes past the cache wait for it a
    /// little. On a thread of its own: the file system of the flash may hang.
    fn note_beside_flash(self: &Arc<Daemon>) {
        let mut state = lock(&self.flash.state);
        if !self.engine.pool_stats().flash_unnoted || state.marking {
            return;
        }
        state.marking = true;
        drop(state);
        let daemon = self.clone();
        let work = move || {
            let pool = lock(&daemon.pool);
            let (path, is_device, uuid) = (
                pool.path().to_owned(),
                pool.media().is_device(),
                pool.uuid(),
            );
            let hangs = pool.flash().iter().any(|device| device.owes());
            drop(pool);
            let marked = crate::degraded::write_marker(&path, is_device, &uuid, hangs);
            if marked.is_ok() {
                lock(&daemon.pool).set_covered();
                let engine = daemon.engine.clone();
                let told =
                    move |now: u64, fx: &mut Effects| engine.flash_is_noted_elsewhere(now, fx);
                if daemon.reactors.run(told).is_err() {
                    tracing::error!("the data threads have ended");
                }
            }
            let mut state = lock(&daemon.flash.state);
            state.marking = false;
            match marked {
                Ok(()) => state.unmarked = false,
                Err(e) if !state.unmarked => {
                    state.unmarked = true;
                    tracing::error!(
                        "nothing can note that {} was given up, and after a crash the next start would trust what is old on it: {}; do not serve this pool again without a clean stop before",
                        path.display(),
                        e.what
                    );
                }
                // Said once; it is tried every round.
                Err(_) => {}
            }
        };
        if let Err(e) = self.workers.run(&Spot::new(FLASH), Class::Due, work) {
            tracing::error!("{e}; tried again");
            lock(&self.flash.state).marking = false;
        }
    }

    /// Tells how a start found its flash, unless there is nothing to be said of it.
    pub(super) fn tell_found_flash(&self) {
        let pool = lock(&self.pool);
        let flash = pool.path().display().to_string();
        let adopted = pool.is_adopted();
        let beside = pool.beside().map(|beside| beside.notes());
        let gone = pool.is_without_flash();
        let disks = pool.registry().disks.len() as u64;
        drop(pool);
        let notes = beside.unwrap_or_else(|| PoolNotes::new(Uuid::nil(), Uuid::nil(), 0));
        if adopted {
            self.events.tell(Event::FlashAdopted {
                flash: flash.clone(),
                lost: notes.lost.iter().count() as u64,
            });
        }
        let Some(degraded) = self.flash.degraded() else {
            return;
        };
        let why = degraded.why.clone();
        self.events.tell(match gone {
            true => {
                let more = notes.lost.iter().filter(|id| !notes.dirty.contains(*id));
                let refused = (notes.dirty.iter().count() + more.count()) as u64;
                Event::FlashGone {
                    flash,
                    why,
                    served: disks.saturating_sub(refused),
                    refused,
                }
            }
            false => Event::FlashUnused { flash, why },
        });
    }

    /// Says what is wrong with the flash: at once, and then at growing intervals.
    fn tell_flash(&self) {
        let mut what = self.flash_notices();
        what.extend(self.swap_trouble().map(|why| {
            format!("{why}; a program, or a virtual machine, that touches a page swapped out there is killed by the kernel, or hangs")
        }));
        let what = what.join("; ");
        let mut state = lock(&self.flash.state);
        if what.is_empty() {
            if state.told.take().is_some() {
                self.events.tell(Event::FlashWell {});
            }
            return;
        }
        let now = Instant::now();
        let again = state.told.as_ref().filter(|told| told.what == what);
        let wait = match again {
            None => TELL_AGAIN,
            Some(told) if now < told.again_at => return,
            Some(told) => (told.wait * 2).min(TELL_AGAIN_MAX),
        };
        self.events.tell(Event::FlashTrouble {
            what: what.clone(),
            dirty_bytes: self.dirty_bytes(),
        });
        state.told = Some(Told {
            what,
            again_at: now + wait,
            wait,
        });
    }

    /// Voids the records of disks that have nothing left on flash which is given up: from then on no
    /// start has to ask which side is right.
    pub(super) fn settle_left_disks(&self) {
        let disks = self.disks.lock();
        let left = disks
            .all()
            .filter(|(_, slot)| slot.device.is_some() && !slot.left_flash);
        let ids: Vec<DiskId> = left.map(|(id, _)| id).collect();
        drop(disks);
        let first_time = |id: DiskId| {
            let mut disks = self.disks.lock();
            let slot = disks.by_id_mut(id);
            slot.is_some_and(|slot| !std::mem::replace(&mut slot.asked_to_leave, true))
        };
        let mut done = Vec::new();
        for id in ids {
            match self.engine.void_seq(id) {
                Some(seq) => done.push((id, seq)),
                // Makes the engine flush the origin of what was written past flash. Once: each time it is
                // asked, it tries origins again that it had decided to give a rest.
                None if first_time(id) => {
                    let _ = self.engine.drain(id, true);
                }
                None => {}
            }
        }
        if done.is_empty() {
            return;
        }
        let mut pool = lock(&self.pool);
        let before = done.iter().filter_map(|(id, seq)| {
            let since = pool.record(*id)?.since_seq;
            Some((*id, since, since.max(*seq)))
        });
        let mut settled: Vec<(DiskId, u64, u64)> = before.collect();
        let noted = pool.change_or_keep(|registry| {
            for (id, _, since) in &settled {
                if let Some(record) = registry.by_id_mut(*id) {
                    record.since_seq = *since;
                }
            }
            Ok(())
        });
        drop(pool);
        match noted {
            Ok(()) => {
                lock(&self.flash.state).settled.append(&mut settled);
                let mut disks = self.disks.lock();
                for (id, _) in &done {
                    if let Some(slot) = disks.by_id_mut(*id) {
                        slot.left_flash = true;
                    }
                }
            }
            // Tried again; until then a start asks.
            Err(e) => tracing::debug!("cannot note that disks have left the flash: {e}"),
        }
    }

    /// Voids the records of disks that are off and clean: from then on they take no step that waits for the log, not
    /// even for one that cannot go on. Where flash does not take the registry, the state directory has it.
    fn free_off_disks_from_log(&self) {
        let off = |(id, slot): (DiskId, &super::Slot)| {
            (slot.device.is_some() && self.engine.can_be_log_free(id)).then_some(id)
        };
        let ids: Vec<DiskId> = self.disks.lock().all().filter_map(off).collect();
        for id in ids {
            let Ok(seq) = self.engine.log_free_seq(id) else {
                continue;
            };
            let stored = lock(&self.pool).change(|registry| {
                if let Some(record) = registry.by_id_mut(id) {
                    record.since_seq = record.since_seq.max(seq);
                }
                Ok(())
            });
            let engine = self.engine.clone();
            let told = stored.map(|()| {
                let job = move |now: u64, fx: &mut Effects| engine.set_log_free(id, seq, now, fx);
                self.reactors.run(job)
            });
            // Tried again in the next round; until then the disk's writes may wait for the log.
            if let Err(e) = told {
                tracing::debug!("cannot note that nothing counts which flash has of a disk: {e}");
            }
        }
    }

    /// True if everything that can be got off flash which was given up had better be before the end.
    pub(super) fn must_empty_flash(&self) -> bool {
        self.cache_is_off() || lock(&self.flash.state).moved.is_some()
    }

    /// Before the end: writes to the origins what is dirty on flash that will not be there, or not be
    /// trusted, at the next start. Gives up when nothing moves for a while.
    pub(super) fn empty_flash(&self) {
        let ids = self.open_disks();
        let left = |engine: &hearth_engine::Engine| -> u64 {
            let owed = |id: &DiskId| {
                engine.status(*id).map_or(0, |s| {
                    if s.lives_on_flash {
                        return 0;
                    }
                    let lost: u64 = s.lost_ranges.iter().map(|(_, len)| len).sum();
                    s.owed_bytes().saturating_sub(lost)
                })
            };
            ids.iter().map(owed).sum()
        };
        for id in &ids {
            // A disk that is gone has nothing to drain.
            let _ = self.engine.drain(*id, true);
        }
        self.poke();
        let (mut least, mut moved_at) = (left(&self.engine), Instant::now());
        let mut tell_at = Instant::now();
        let (notify, mut extended_at) = (Notify::from_env(), Instant::now());
        notify.stop_goes_on();
        while least > 0 && moved_at.elapsed() < EMPTY_STALL {
            if Instant::now() >= tell_at {
                tracing::warn!(
                    bytes_left = least,
                    "writing what is dirty to the origins before the end; a second signal ends at once and loses it"
                );
                tell_at = Instant::now() + EMPTY_TELL;
            }
            let rest = EMPTY_STALL.saturating_sub(moved_at.elapsed());
            let less = || Some(left(&self.engine)).filter(|now| *now < least);
            let time = rest.min(tell_at.saturating_duration_since(Instant::now()));
            if let Some(now) = self.bell.wait(time, EMPTY_PACE, less) {
                (least, moved_at) = (now, Instant::now());
            }
            if extended_at.elapsed() >= EMPTY_TELL && moved_at > extended_at {
                extended_at = Instant::now();
                notify.stop_goes_on();
            }
        }
    }

    /// What is only on flash that was given up and belongs into an origin, by disk: bytes, lost ones included.
    pub(super) fn left_on_flash(&self) -> Vec<(String, u64)> {
        let names = lock(&self.pool)
            .registry()
            .disks
            .iter()
            .map(|r| (r.id, r.name.clone()))
            .collect::<Vec<_>>();
        names
            .into_iter()
            .filter_map(|(id, name)| {
                // What lives on flash is owed to nobody: it is there still, or went with it, and that was told.
                let status = self.engine.status(id).filter(|s| !s.lives_on_flash)?;
                let owed = status.owed_blocks();
                (owed > 0).then_some((name, owed.saturating_mul(BLOCK)))
            })
            .collect()
    }

    /// How a stop with the cache off went: `noted` says whether the flash, or something beside it, will
    /// keep the next start from trusting what is old on it.
    pub(super) fn end_without_flash(&self, noted: Result<(), Error>) -> Result<(), Error> {
        let pool = lock(&self.pool);
        let (path, is_device, uuid) = (
            pool.path().to_owned(),
            pool.media().is_device(),
            pool.uuid(),
        );
        drop(pool);
        let leaving = self.engine.pool_stats().flash_fault == Some(FlashFault::Leaving);
        let left = self.left_on_flash();
        if let Err(e) = noted
            && !leaving
        {
            tracing::warn!("the flash takes no note of its failure: {e}");
            crate::degraded::write_marker(&path, is_device, &uuid, false).map_err(|e| {
                Error::unavailable(
                    format!(
                        "{} holds data older than the origins, and nothing could be noted to keep the next start from trusting it: {}",
                        path.display(),
                        e.what
                    ),
                    "do not serve this pool again; create a new one",
                )
            })?;
        }
        if left.is_empty() {
            tracing::info!("everything is in the origins");
            return Ok(());
        }
        let refused = self
            .flash
            .degraded()
            .is_some_and(|d| d.dirty != crate::degraded::Dirty::Destage);
        let list: Vec<String> = left
            .iter()
            .map(|(name, bytes)| format!("{name} ({})", human(*bytes)))
            .collect();
        let list = list.join(", ");
        if refused {
            tracing::info!(disks = %list, "what waited on flash is there still");
            return Ok(());
        }
        if leaving {
            return Err(Error::unavailable(
                format!(
                    "what was dirty on the removed flash file {} is lost: {list}",
                    path.display()
                ),
                "see what their origins hold, and restore what is missing",
            ));
        }
        Err(Error::unavailable(
            format!(
                "not everything could be written to the origins; dirty on {} are still: {list}",
                path.display()
            ),
            "when the flash can be used again, the next start asks which side counts; see `hearth disk list`",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing else may be going on by then that rings, and it would be waited for to the end.
    #[test]
    fn who_waits_for_a_look_at_the_flash_hears_that_it_has_ended() {
        let (_dir, daemon) = super::super::testing::daemon();
        let (begun, ended) = std::sync::mpsc::channel();
        let looking = FlashLook(daemon.clone());
        lock(&daemon.flash.state).looking = true;
        let look = std::thread::spawn(move || {
            ended.recv().expect("somebody waits");
            drop(looking);
        });
        let mut looks = 0;
        let heard = daemon
            .bell
            .wait(Duration::from_secs(20), Duration::ZERO, || {
                looks += 1;
                if looks == 1 {
                    begun.send(()).expect("it has not ended");
                }
                (!daemon.is_looking_at_flash()).then_some(())
            });
        assert!(heard.is_some());
        look.join().expect("it ends");
        let stopped = daemon.shut_down(super::super::StopReason::Signal);
        stopped.expect("it stops");
    }

    /// A new pool would lose the disks and what was set of them.
    #[test]
    fn flash_that_is_gone_is_to_be_adopted_as_long_as_the_pool_is_known_beside_it() {
        let (_dir, daemon) = super::super::testing::daemon();
        for fault in [FlashFault::Leaving, FlashFault::Broken] {
            daemon.give_flash_up(fault);
            let said = daemon.flash_notices().join("; ");
            assert!(said.contains("hearth pool adopt-flash"), "{said}");
            assert!(!said.contains("new pool"), "{said}");
        }
        assert!(in_its_place(false).contains("create a new pool"));
        let stopped = daemon.shut_down(super::super::StopReason::Signal);
        drop(stopped);
    }

    #[test]
    fn a_file_that_was_removed_is_left_one_that_was_truncated_has_failed_and_one_that_was_moved_is_missed()
     {
        let path = Path::new("/f");
        let sound = Standing {
            links: 1,
            size: 100,
            allocated: 100,
            name: NameLeadsTo::It,
        };
        assert_eq!(verdict(path, 100, &sound), None);
        assert_eq!(misplaced(path, &sound), None);
        let removed = Standing {
            links: 0,
            name: NameLeadsTo::Nothing,
            ..sound
        };
        assert_eq!(verdict(path, 100, &removed).unwrap().1, FlashFault::Leaving);
        assert_eq!(misplaced(path, &removed), None);
        let short = Standing {
            size: 99,
            ..removed
        };
        assert_eq!(verdict(path, 100, &short).unwrap().1, FlashFault::Broken);
        let moved = Standing {
            name: NameLeadsTo::Nothing,
            ..sound
        };
        assert_eq!(verdict(path, 100, &moved), None);
        assert!(misplaced(path, &moved).unwrap().contains("moved"));
    }
}
