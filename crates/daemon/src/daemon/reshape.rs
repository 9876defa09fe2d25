//! Flash devices are added, replaced and removed while the pool is served.
//!
//! All that takes long is done beside the guests: a new file is written, a new device cleared, the old one copied or emptied.
//! What is left are a few blocks on flash, and everything that was sized for the devices there were: the index, the data
//! threads' rings, the map. For that the daemon begins anew with the next list of devices, under its
//! clients, as another version does that takes over ([`crate::upgrade`]): they wait between two requests while
//! the pool is closed, the change is made ([`crate::pool::change`]) and the pool is opened again, warm.
//! So there is one way to change the devices of a pool, on one that nobody writes, and it is safe wherever it is cut off.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_engine::Engine;
use hearth_events::Event;
use hearth_io::{BLOCK, Device};

use super::{Daemon, StopReason, homeless, lock};
use crate::api::flash::{FlashAction, FlashChange, FlashProgress, FlashState};
use crate::api::upgrade::UpgradeRequest;
use crate::error::{Error, Result};
use crate::pool::change::{self, Change, Ready};
use crate::pool::{CreateOptions, DeviceAt, Pool};
use crate::size::human;

mod copying;

use copying::{Passes, Steps};

/// The program that goes on is the one that runs, wherever its file has gone.
pub(super) const OURSELVES: &str = "/proc/self/exe";
/// How often is looked how far a device is emptied.
const LOOK: Duration = Duration::from_millis(50);
/// Nothing was emptied for so long, and nothing given to the origins: it is not waited for any longer.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Preparing,
    Copying,
    Emptying,
    /// An area's segments are empty, and are being listed as such.
    Listing,
    /// An area that is given back is overwritten.
    Clearing,
    Switching,
    Failed,
    CalledOff,
}

impl Stage {
    fn word(self) -> &'static str {
        match self {
            Stage::Preparing => "preparing",
            Stage::Copying => "copying",
            Stage::Emptying => "emptying",
            Stage::Listing => "setting-aside",
            Stage::Clearing => "clearing",
            Stage::Switching => "switching",
            Stage::Failed => "failed",
            Stage::CalledOff => "called-off",
        }
    }
}

#[derive(Debug)]
struct Job {
    what: String,
    stage: Stage,
    begun: Instant,
    done: u64,
    total: u64,
    error: Option<Error>,
}

impl Job {
    fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Failed | Stage::CalledOff)
    }

    fn progress(&self) -> FlashProgress {
        let seconds = self.begun.elapsed().as_secs_f64();
        let rate = match seconds > 0.0 {
            true => self.done as f64 / seconds,
            false => 0.0,
        };
        let left = self.total.saturating_sub(self.done) as f64;
        FlashProgress {
            what: self.what.clone(),
            stage: self.stage.word().to_owned(),
            done: self.done,
            total: self.total,
            bytes_per_second: rate,
            eta_seconds: (rate > 0.0 && !self.is_over()).then_some(left / rate),
            error: self.error.clone().map(Into::into),
        }
    }
}

#[derive(Default)]
struct Inner {
    job: Option<Job>,
    /// All is done that can be done before the pool is closed.
    ready: Option<Ready>,
    /// A device that failed, without which the pool is to go on.
    without: Option<u16>,
}

/// The change that is under way: of the devices, or of an area beside the log ([`super::areas`]).
#[derive(Default)]
pub(crate) struct Reshaping {
    inner: Mutex<Inner>,
    called_off: AtomicBool,
    /// The pool was closed, and nothing of this process uses it any more.
    at_rest: AtomicBool,
}

impl Reshaping {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the place for one change at a time.
    pub(super) fn begin(&self, what: String, stage: Stage) -> Result<()> {
        let mut inner = self.lock();
        if inner.job.as_ref().is_some_and(|job| !job.is_over()) {
            return Err(Error::conflict(
                "the flash devices, or what is set aside on them, are being changed already",
                "wait until they are, or call it off",
            ));
        }
        self.called_off.store(false, Ordering::Relaxed);
        inner.job = Some(Job {
            what,
            stage,
            begun: Instant::now(),
            done: 0,
            total: 0,
            error: None,
        });
        Ok(())
    }

    /// It is done, or could not be.
    pub(super) fn end(&self, result: Result<()>) {
        let mut inner = self.lock();
        let off = self.called_off.load(Ordering::Relaxed);
        match (result, &mut inner.job) {
            (Ok(()), job) => *job = None,
            (Err(e), Some(job)) => {
                job.stage = if off { Stage::CalledOff } else { Stage::Failed };
                job.error = Some(e);
            }
            (Err(_), None) => {}
        }
    }

    pub(super) fn progress(&self) -> Option<FlashProgress> {
        self.lock().job.as_ref().map(Job::progress)
    }

    pub(super) fn stage(&self, stage: Stage) {
        if let Some(job) = &mut self.lock().job {
            (job.stage, job.begun, job.done, job.total) = (stage, Instant::now(), 0, 0);
        }
    }

    /// So much is done; false if it is to end.
    pub(super) fn tell(&self, done: u64, total: u64) -> bool {
        if let Some(job) = &mut self.lock().job {
            (job.done, job.total) = (done, total);
        }
        !self.called_off.load(Ordering::Relaxed)
    }

    /// The pool is to go on without this device, which failed.
    pub(super) fn set_without(&self, device: u16) {
        self.lock().without = Some(device);
    }

    pub(super) fn without(&self) -> Option<u16> {
        self.lock().without
    }

    /// Nothing is in flight any more, and all is durable.
    pub(super) fn set_at_rest(&self) {
        self.at_rest.store(true, Ordering::Relaxed);
    }

    /// The device that is emptied, and how much of it is.
    pub(super) fn emptied(&self, engine: &Engine) -> Option<(u16, u64)> {
        let how = engine.emptying().filter(|how| !how.part)?;
        let gone = u64::from(how.segments.saturating_sub(how.left));
        Some((how.device, gone * 100 / u64::from(how.segments.max(1))))
    }
}

pub(super) fn called_off() -> Error {
    Error::unavailable(
        "it was called off",
        "the pool is as it was; a new file that was made may be removed",
    )
}

/// What is asked for, as far as it makes sense.
fn understood(request: &FlashChange) -> Result<(Change, CreateOptions)> {
    let path = |named: &Option<String>, which: &str| -> Result<PathBuf> {
        let path = PathBuf::from(named.clone().unwrap_or_default());
        match path.is_absolute() {
            true => Ok(path),
            false => Err(Error::invalid(
                format!("the {which} device is not named from the root directory on"),
                "give its absolute path",
            )),
        }
    };
    let new = || -> Result<DeviceAt> {
        Ok(DeviceAt {
            path: path(&request.new, "new")?,
            size: request.size,
        })
    };
    let change = match request.action {
        FlashAction::Add => Change::Add { new: new()? },
        FlashAction::Replace => Change::Replace {
            old: path(&request.old, "old")?,
            new: new()?,
        },
        FlashAction::Remove => Change::Remove {
            old: path(&request.old, "old")?,
        },
    };
    let options = CreateOptions {
        size: request.size,
        quick: request.quick,
        force: request.force,
        twice: false,
        label: String::new(),
    };
    if let Some(new) = change.new_device() {
        crate::place::check(&new.path, &options)?;
    }
    Ok((change, options))
}

/// For what is being emptied, and may never be.
struct Patience {
    left: u32,
    dirty: u64,
    since: Instant,
}

impl Patience {
    fn new(now: Instant) -> Patience {
        Patience {
            left: u32::MAX,
            dirty: u64::MAX,
            since: now,
        }
    }

    /// So many segments are left, and so many blocks wait for their origins: has there been less of neither for too long?
    fn is_over(&mut self, left: u32, dirty: u64, now: Instant) -> bool {
        if left < self.left || dirty < self.dirty {
            self.since = now;
        }
        (self.left, self.dirty) = (self.left.min(left), self.dirty.min(dirty));
        now.saturating_duration_since(self.since) >= PATIENCE
    }
}

impl Daemon {
    /// How far the change is.
    pub(super) fn flash_state(&self) -> FlashState {
        FlashState {
            generation: self.succession.state().generation,
            change: self.reshaping.progress(),
        }
    }

    /// Calls it off.
    pub(super) fn cancel_flash(&self) -> Result<()> {
        let inner = self.reshaping.lock();
        let job = inner.job.as_ref().filter(|job| !job.is_over());
        match job.map(|job| job.stage) {
            None => Err(Error::conflict(
                "no change of the flash devices is under way",
                "`hearth pool show` tells what there is",
            )),
            Some(Stage::Listing | Stage::Clearing) => Err(Error::conflict(
                "this cannot be called off any more",
                "wait until it is done",
            )),
            Some(Stage::Switching) => Err(Error::conflict(
                "the devices are being changed at this moment",
                "wait until they are",
            )),
            Some(_) => {
                self.reshaping.called_off.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Begins it.
    pub(super) fn change_flash(self: &Arc<Daemon>, request: &FlashChange) -> Result<FlashState> {
        let (what, options) = understood(request)?;
        self.not_stopping()?;
        if self.cache_is_off()
            && let Change::Remove { old } = &what
        {
            self.remove_failed(old, request.yes)?;
            return Ok(self.flash_state());
        }
        if self.cache_is_off() {
            return Err(Error::refused(
                "the pool is served without its flash",
                "see `hearth pool show` for the reason and put that right first",
            ));
        }
        let carry = UpgradeRequest {
            program: OURSELVES.to_owned(),
            yes: request.yes,
        };
        self.check_risk(&carry)?;
        if let Change::Remove { old } = &what {
            self.check_room_without(old)?;
        }
        self.check_no_area_on(&what)?;
        self.reshaping.begin(what.words(), Stage::Preparing)?;
        let daemon = self.clone();
        let work = move || daemon.reshape(&what, &options, &carry);
        let thread = std::thread::Builder::new().name("hearth-flash".to_owned());
        if let Err(e) = thread.spawn(work) {
            self.reshaping.lock().job = None;
            return Err(Error::internal(format!("cannot start a thread: {e}")));
        }
        Ok(self.flash_state())
    }

    /// Refuses to take a device out if what has no other place would not fit the rest.
    fn check_room_without(&self, old: &std::path::Path) -> Result<()> {
        let pool = lock(&self.pool);
        let devices = pool.devices();
        let goes = devices
            .iter()
            .find(|d| change::same(std::path::Path::new(&d.path), old));
        let left = pool
            .log_bytes()
            .saturating_sub(goes.map_or(0, |d| d.log_bytes));
        let promised = homeless::promised(pool.registry());
        if promised <= homeless::most(left) {
            return Ok(());
        }
        Err(Error::refused(
            format!(
                "{} are promised to disks that live on flash, and without {} there is room for {} of that",
                human(promised),
                old.display(),
                human(homeless::most(left))
            ),
            "remove such a disk first, or put a larger device in its place with `hearth pool replace-flash`",
        ))
    }

    /// Does it, up to the moment at which the daemon begins anew.
    fn reshape(self: &Arc<Daemon>, what: &Change, options: &CreateOptions, carry: &UpgradeRequest) {
        let Err(e) = self.reshape_up_to_switch(what, options, carry) else {
            return;
        };
        self.engine.end_emptying();
        let off = self.reshaping.called_off.load(Ordering::Relaxed);
        if !off {
            tracing::error!("cannot {}: {e}", what.words());
        }
        let mut inner = self.reshaping.lock();
        inner.ready = None;
        if let Some(job) = &mut inner.job {
            job.stage = if off { Stage::CalledOff } else { Stage::Failed };
            job.error = Some(e);
        }
    }

    fn reshape_up_to_switch(
        self: &Arc<Daemon>,
        what: &Change,
        options: &CreateOptions,
        carry: &UpgradeRequest,
    ) -> Result<()> {
        let paths = lock(&self.pool).paths();
        let pool = Pool::look_at(&paths)?;
        let mut steps = Steps::new(&*self.engine);
        let tell = &mut |done, total| {
            // A new file is written from end to end; clearing a device takes a few blocks here and there.
            if options.size.is_some() {
                steps.step();
            }
            self.reshaping.tell(done, total)
        };
        let mut ready = change::ready(&pool, what, options, tell)?;
        self.check_ram(&ready)?;
        match what {
            Change::Add { .. } => {}
            Change::Replace { .. } => {
                self.reshaping.stage(Stage::Copying);
                self.copy_while_serving(&mut ready)?;
            }
            Change::Remove { .. } => {
                self.reshaping.stage(Stage::Emptying);
                self.empty(ready.place())?;
            }
        }
        // Others may have come meanwhile.
        let plan = self.check_risk(carry)?;
        if self.reshaping.called_off.load(Ordering::Relaxed) {
            return Err(called_off());
        }
        self.reshaping.stage(Stage::Switching);
        if let Some(beside) = lock(&self.pool).beside() {
            change::note_in(beside, &ready.union);
        }
        self.reshaping.lock().ready = Some(ready);
        if !self.succession.appoint(std::path::Path::new(OURSELVES)) {
            return Err(Error::conflict(
                "another program is taking over",
                "try again when it has",
            ));
        }
        self.events.tell(Event::DaemonUpgrading {
            from: plan.from,
            to: plan.to,
            program: what.words(),
        });
        self.request_stop(StopReason::Upgrade);
        Ok(())
    }

    /// Refuses what would need more RAM than there is: the daemon could not begin anew.
    fn check_ram(&self, ready: &Ready) -> Result<()> {
        let Some(slots) = ready.slots else {
            return Ok(());
        };
        let stage = self.ram_stage.map(|bytes| (bytes / BLOCK) as usize);
        let need = Engine::footprint(slots, stage.or(Some(0)));
        let now = lock(&self.pool).footprint(self.ram_stage.or(Some(0)));
        let more = need.saturating_sub(now);
        let free = crate::memory::available();
        let short = free.is_some_and(|free| more > free);
        let beyond = self.memory.is_some_and(|limit| need > limit);
        if !short && !beyond {
            return Ok(());
        }
        Err(Error::refused(
            format!(
                "the index and what belongs to it would need {}, {} more than now",
                human(need),
                human(more)
            ),
            match beyond {
                true => "raise --memory of `hearth serve` and restart it, or take a smaller device",
                false => "make room in RAM, or take a smaller device",
            },
        ))
    }

    /// Waits until nothing lies on a device.
    fn empty(&self, place: u16) -> Result<()> {
        if !self.engine.begin_emptying(place) {
            return Err(Error::refused(
                "the device cannot be emptied: the others have too few segments that take writes",
                "put another device in its place with `hearth pool replace-flash`",
            ));
        }
        self.wait_empty()
    }

    /// Waits until nothing lies in what is being emptied.
    pub(super) fn wait_empty(&self) -> Result<()> {
        let segment = lock(&self.pool).info().segment_bytes;
        let mut patience = Patience::new(Instant::now());
        loop {
            let stats = self.engine.pool_stats();
            let no_room = |why: &str| {
                let promised = homeless::promised(lock(&self.pool).registry());
                Error::refused(
                    format!(
                        "emptying it was given up, for {why}the log needs the room it has: of {}, {} wait for the origins, and {} are promised to disks that live on flash",
                        human(stats.capacity_blocks * BLOCK),
                        human(stats.dirty_blocks * BLOCK),
                        human(promised)
                    ),
                    "wait until the origins have more of what is dirty, and try again",
                )
            };
            let Some(how) = self.engine.emptying() else {
                return Err(no_room(""));
            };
            if patience.is_over(how.left, stats.dirty_blocks, Instant::now()) {
                return Err(no_room("nothing comes free any more, and "));
            }
            let gone = u64::from(how.segments.saturating_sub(how.left));
            if how.left == 0 {
                return Ok(());
            }
            self.may_go_on(gone * segment, u64::from(how.segments) * segment)?;
            if how.left == how.unreadable {
                return Err(Error::unavailable(
                    format!(
                        "{} segments there cannot be read, so nobody knows what is to be kept of them",
                        how.left
                    ),
                    "put another device in its place with `hearth pool replace-flash`",
                ));
            }
            self.poke();
            std::thread::sleep(LOOK);
        }
    }

    /// Records how far it is. An error if it was called off, or cannot go on.
    fn may_go_on(&self, done: u64, total: u64) -> Result<()> {
        if !self.reshaping.tell(done, total) || self.stopping.load(Ordering::Relaxed) {
            return Err(called_off());
        }
        match self.cache_is_off() {
            false => Ok(()),
            true => Err(Error::unavailable(
                "the pool's flash takes no writes any more",
                "`hearth pool show` says why",
            )),
        }
    }

    /// Waits until what is dirty has room in the pool without so many segments. Were they taken at
    /// once, all writers would stand still until the origins had the rest.
    pub(super) fn wait_dirty(&self, segments: u32, bytes: u64) -> Result<()> {
        let mut patience = Patience::new(Instant::now());
        loop {
            let (dirty, room) = self.engine.dirty_without(segments);
            if dirty <= room {
                return Ok(());
            }
            if patience.is_over(0, dirty, Instant::now()) {
                return Err(Error::refused(
                    format!(
                        "{} wait for the origins and become no less; without the {} that are to be set aside, clients would have to wait for room from {} on",
                        human(dirty * BLOCK),
                        human(bytes),
                        human(room * BLOCK)
                    ),
                    "give a smaller --size, or wait until the origins have more of what is dirty (`hearth disk flush`)",
                ));
            }
            self.may_go_on(0, bytes)?;
            self.poke();
            std::thread::sleep(LOOK);
        }
    }

    /// Copies what lies on a device to the one that comes, while it is written to: what changed meanwhile is copied
    /// once more, and what changes at last, when clients wait.
    fn copy_while_serving(&self, ready: &mut Ready) -> Result<()> {
        let (_, segments, bytes, _, to_at) = ready.copy_plan()?;
        let mut devices: Vec<Arc<Device>> = {
            let pool = lock(&self.pool);
            pool.flash().iter().cloned().collect()
        };
        let mut new = ready.new_media()?;
        let first = segments.start;
        let mut copied: Vec<Option<u64>> = vec![None; segments.len()];
        let total = bytes * segments.len() as u64;
        let mut done = 0;
        let mut passes = Passes::new();
        loop {
            let due = |(seg, have): (u32, &Option<u64>)| {
                let now = self.engine.touched(ready.in_log(first + seg));
                (now.is_some() && now != *have).then_some(seg)
            };
            let due: Vec<u32> = (0..).zip(&copied).filter_map(due).collect();
            let Some(pause) = passes.next(due.len()) else {
                break;
            };
            let total = total.max(done + due.len() as u64 * bytes);
            for seg in due {
                // Before it is read: what is written from here on shows.
                let before = self.engine.touched(ready.in_log(first + seg));
                let at = u64::from(seg) * bytes;
                ready.check_lost(lock(&self.pool).flash())?;
                let source = ready.source(seg);
                let old = source.and_then(|(n, _)| devices.get_mut(usize::from(n)));
                let (Some((_, from)), Some(old)) = (source, old) else {
                    return Err(Error::internal("the device is gone"));
                };
                let whole = before.is_some()
                    && copying::copy(
                        (old, from),
                        (&mut new, to_at + at),
                        bytes,
                        &*self.engine,
                        pause,
                    )?;
                // What cannot be read is looked at when nobody writes.
                if let Some(place) = copied.get_mut(seg as usize) {
                    *place = before.filter(|_| whole);
                }
                done += bytes;
                if !self.reshaping.tell(done.min(total), total) {
                    return Err(called_off());
                }
                if self.stopping.load(Ordering::Relaxed) {
                    return Err(called_off());
                }
            }
        }
        copying::settle(&mut new)?;
        ready.copied = copied;
        Ok(())
    }

    /// The pool is closed: makes the change that is ready, if one is. What the list of devices is then, and why it is the one before,
    /// if it is.
    pub(crate) fn finish_reshaping(&self) -> Option<(Vec<PathBuf>, String)> {
        let without = self.reshaping.lock().without.take();
        if let Some(device) = without {
            let at_rest = self.reshaping.at_rest.load(Ordering::Relaxed);
            let as_before = || {
                let why = "cannot go on without a flash device; see the log for why";
                (lock(&self.pool).paths(), why.to_owned())
            };
            return Some(match at_rest {
                true => self.finish_without(device),
                false => as_before(),
            });
        }
        let mut ready = self.reshaping.lock().ready.take()?;
        let pool = lock(&self.pool);
        let words = ready.words();
        let union = ready.union.clone();
        let failed = |why: &Error| format!("cannot {words}: {why}");
        if !self.reshaping.at_rest.load(Ordering::Relaxed) {
            let why = Error::unavailable("the pool could not be closed", "see the log for why");
            return Some((pool.paths(), failed(&why)));
        }
        if let Err(why) = ready.check_lost(pool.flash()) {
            return Some((pool.paths(), failed(&why)));
        }
        let first = ready.copy_plan().map_or(0, |plan| plan.1.start);
        let mut copied = std::mem::take(&mut ready.copied);
        for (copied, number) in copied.iter_mut().zip(first..) {
            if *copied != self.engine.touched(ready.in_log(number)) {
                *copied = None;
            }
        }
        ready.copied = copied;
        let state_dir = self.state_dir.clone();
        let (flash, failure) = match change::carry_out(&pool, ready, &mut |_, _| true) {
            Ok(changed) => {
                for notice in &changed.notices {
                    tracing::warn!("{notice}");
                }
                (changed.flash, String::new())
            }
            Err(e) => {
                let today = change::of_today(&union, &state_dir);
                (today.unwrap_or_else(|| pool.paths()), failed(&e))
            }
        };
        if let Some(beside) = pool.beside() {
            change::note_in(beside, &flash);
        }
        Some((flash, failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_waited_as_long_as_something_comes_free_or_is_given_to_the_origins() {
        let start = Instant::now();
        let mut patience = Patience::new(start);
        let mut at = start;
        let mut look = |left, dirty| {
            at += PATIENCE - LOOK;
            patience.is_over(left, dirty, at)
        };
        assert!(!look(9, 900));
        assert!(!look(8, 900));
        assert!(!look(8, 899));
        // Clients write more: that alone is no news, for better or worse.
        assert!(!look(7, 2000));
        assert!(!look(7, 899), "a little less than that long");
        assert!(look(8, 1000));
        assert!(!look(6, 1000), "it goes on after all");
    }
}
