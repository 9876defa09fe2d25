//! Disks with an origin that are to live on flash alone from now on, while they are served.
//!
//! What flash has of such a disk are copies of its origin, which may be dropped at any time, and what the origin does not have yet. All of
//! it has to be there as the disk's own before it may be said that there is no origin. The order is:
//!
//! 1. flash is promised to all of the disk, and the registry says that it moves ([`Home::Moving`]): a crash from here on leaves a disk that
//!    moves *to* its origin, which has nearly everything, and ends as it was;
//! 2. the engine holds what is dirty on flash and makes no copies of the origin any more;
//! 3. what flash lacks, or has as a copy, is written there as the disk's own, a piece at a time ([`Request::keep`]); holes of the origin
//!    are not, for what is not on flash will be zeros;
//! 4. when nothing is lacking, and that is durable, the registry says that the disk lives on flash, durably;
//! 5. the engine is told, and the origin is closed.
//!
//! Anything that is about the origin meanwhile (a flush to it, another mode, flash that fails) lets the disk go: it moves to its
//! origin again, and nothing is lost.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_datastore::port::Port;
use hearth_engine::ControlError;
use hearth_engine::api::{DiskId, ReqError, Request};
use hearth_format::{DiskRecord, Home};
use hearth_io::{BLOCK, Device, Target};

use super::homeless::{SEGMENTS_MIN, check_promise, device};
use super::moves::flash_knows;
use super::pins::{asked_for, data_of};
use super::{Daemon, lock, no_thread};
use crate::api::types::{CacheMode, DiskInfo, OntoFlash};
use crate::error::{Error, Result};
use crate::life::Life;
use crate::origin;
use crate::pool::mode_of;
use crate::progress::Progress;
use crate::table::Purpose;

/// Bytes that are put on flash at once.
const PIECE: u64 = 1 << 20;
/// Wait for what has to come first: somebody who changes the disk, swap that is held up, the log.
const SOON: Duration = Duration::from_millis(250);
/// Looks at the index in one go; each is of as much as may be looked at under its lock.
const LOOKS_MAX: usize = 16;

/// What the thread of a move is told.
enum News {
    /// A piece is on flash, or could not be brought there.
    Kept(std::result::Result<(), ReqError>),
    End,
}

struct Going {
    tell: Sender<News>,
    thread: Option<JoinHandle<()>>,
    shown: Arc<Mutex<OntoFlash>>,
}

impl Drop for Going {
    fn drop(&mut self) {
        let _ = self.tell.send(News::End);
        if let Some(thread) = self.thread.take()
            // It may be the one that drops the last of the daemon.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that moves a disk onto flash ended abnormally");
        }
    }
}

/// The moves that are under way.
#[derive(Default)]
pub(super) struct Goings(BTreeMap<DiskId, Going>);

/// Where a move is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is looked at from the start; so far up to this offset, and whether anything was lacking.
    Pass { at: u64, found: bool },
    /// All of it is there, once that is durable.
    Ends,
    /// There is nothing more to do.
    Over,
}

const START: Step = Step::Pass {
    at: 0,
    found: false,
};

struct Mover {
    daemon: Weak<Daemon>,
    port: Port,
    id: DiskId,
    name: String,
    size: u64,
    step: Step,
    /// What is lacking as far as the pass has come.
    lacking: u64,
    progress: Progress,
    tell: Sender<News>,
    /// A piece is on its way: since when, and what clients had asked for by then.
    sent: Option<(Instant, u64)>,
    shown: Arc<Mutex<OntoFlash>>,
}

impl Daemon {
    /// Has a disk with an origin live on flash alone; that goes on in the background.
    pub(super) fn move_onto_flash(self: &Arc<Daemon>, name: &str) -> Result<DiskInfo> {
        let turn = self.turn_for(name)?;
        let id = turn.id();
        let record = self.with_record(name)?;
        self.check_goes(name, &record)?;
        let holds = self.holds();
        if record.home == Home::Origin {
            lock(&self.pool).change(|registry| {
                check_promise(registry, holds, name, record.size)?;
                let record = registry.by_id_mut(id);
                record.ok_or_else(|| Error::no_disk(name))?.home = Home::Moving;
                Ok(())
            })?;
            // From here on it ends as it was by itself, whatever fails: it moves to its origin.
            flash_knows(&lock(&self.pool))?;
            self.at_rest(&format!("move {name}"), || {
                self.engine.rehome(id, hearth_engine::api::Home::Moving)
            })?;
        }
        match self.engine.hold(id, true) {
            Ok(()) | Err(ControlError::Busy) => {}
            Err(e) => return Err(super::control_error(&format!("move {name}"), e)),
        }
        let (tell, news) = channel();
        let shown = Arc::new(Mutex::new(OntoFlash {
            bytes_left: None,
            bytes_per_second: 0.0,
            eta_seconds: None,
        }));
        let mover = Mover {
            daemon: Arc::downgrade(self),
            port: Port::open(&self.reactors).map_err(no_thread)?,
            id,
            name: name.to_owned(),
            size: record.size,
            step: START,
            lacking: 0,
            progress: Progress::default(),
            tell: tell.clone(),
            sent: None,
            shown: shown.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("hearth-move".to_owned())
            .spawn(move || mover.run(&news))
            .map_err(no_thread)?;
        let going = Going {
            tell,
            thread: Some(thread),
            shown,
        };
        // One of before has ended, or will find that it is not needed.
        let before = lock(&self.goings).0.insert(id, going);
        drop(before);
        self.keep_shares();
        self.look_at_pins();
        self.events.tell(hearth_events::Event::DiskGoesOntoFlash {
            disk: name.to_owned(),
        });
        drop(turn);
        self.disk_info(name)
    }

    /// How far a disk is on its way onto flash, if it is. One of which the registry says that it lives there has arrived, also while the
    /// engine is about to be told so.
    pub(super) fn going_of(&self, record: &DiskRecord) -> Option<OntoFlash> {
        if record.is_flash_only() {
            return None;
        }
        let shown = lock(&self.goings).0.get(&record.id)?.shown.clone();
        let shown = lock(&shown).clone();
        self.engine.is_held(record.id).then_some(shown)
    }

    /// Ends the threads: from here on nothing is moved.
    pub(super) fn end_goings(&self) {
        let goings = std::mem::take(&mut lock(&self.goings).0);
        drop(goings);
    }

    /// Refuses a disk that cannot live on flash alone.
    fn check_goes(&self, name: &str, record: &DiskRecord) -> Result<()> {
        self.not_stopping()?;
        if record.is_flash_only() {
            return Err(Error::conflict(
                format!("disk {name} lives on flash already"),
                "`hearth disk show` says what it has there",
            ));
        }
        if self.engine.is_held(record.id) {
            return Err(Error::conflict(
                format!("disk {name} is on its way onto flash"),
                format!(
                    "`hearth disk show {name}` says how far it is; `hearth disk flush {name}` calls it off"
                ),
            ));
        }
        if record.mirror.is_some() {
            return Err(Error::refused(
                format!(
                    "disk {name} is a mirror, and what its legs have would get old without a word"
                ),
                "take all legs but one out with `hearth disk mirror --remove` first",
            ));
        }
        if mode_of(record.mode) != CacheMode::WriteBack || record.read_only || record.hold {
            return Err(Error::refused(
                format!("disk {name} is not served in write-back, as disks on flash alone are"),
                format!("`hearth disk set {name} --mode write-back --hold off` first"),
            ));
        }
        if record.max_bytes > 0 {
            return Err(Error::refused(
                format!("disk {name} may have only a part of itself on flash"),
                format!("`hearth disk set {name} --max 0` lifts that"),
            ));
        }
        if !record.size.is_multiple_of(BLOCK) {
            return Err(Error::refused(
                format!(
                    "disk {name} has {} bytes, and on flash alone only multiples of 4K can live",
                    record.size
                ),
                "make its origin larger, take that over with `hearth disk set --size-from-origin`, and try again",
            ));
        }
        let stats = self.engine.pool_stats();
        if stats.segments < SEGMENTS_MIN {
            return Err(Error::refused(
                format!(
                    "no disk can live on a pool of {} segments: it takes {SEGMENTS_MIN} at least",
                    stats.segments
                ),
                "use a larger pool",
            ));
        }
        if self.flash.degraded().is_some() || self.cache_is_off() {
            return Err(Error::unavailable(
                "the pool's flash takes no writes, so no disk can live there",
                "`hearth pool show` says why",
            ));
        }
        let status = self.engine.status(record.id).unwrap_or_default();
        if !status.lost_ranges.is_empty() {
            return Err(Error::refused(
                format!("part of disk {name} was lost with the flash"),
                format!(
                    "`hearth disk show {name}` lists it; `hearth disk accept-loss {name}` gives it up"
                ),
            ));
        }
        self.with_slot(name, |slot| {
            if slot.claim.is_some() {
                return Err(Error::refused(
                    format!("the origin of {name} is on storage that other hosts reach, which could take the disk over"),
                    "copy it to a new disk (`hearth disk add NAME --flash-only SIZE`)",
                ));
            }
            let plain = slot.device().is_some_and(|d| d.file().is_some());
            if !plain {
                return Err(Error::refused(
                    format!("the origin of {name} is no plain file or block device of this host"),
                    "copy it to a new disk (`hearth disk add NAME --flash-only SIZE`)",
                ));
            }
            match slot.life {
                Life::Served { .. } => Ok(()),
                _ => Err(Error::conflict(
                    format!("disk {name} is not served"),
                    format!("`hearth disk show {name}` says why; put that right first"),
                )),
            }
        })
    }

    /// The registry and the engine are told that a disk lives on flash, of which flash has all. False: not now.
    fn live_on_flash(self: &Arc<Daemon>, id: DiskId, name: &str) -> Result<bool> {
        let served = |disks: &crate::table::Slots<super::Slot>| {
            disks.by_id(id).is_some_and(|slot| slot.export().is_some())
        };
        let Some(turn) = self.disks.turn_if(id, Purpose::Changing, served) else {
            return Ok(false);
        };
        if self.engine.is_whole(id).is_err() {
            return Ok(false);
        }
        let before = self.with_record(name)?;
        let alone = |record: &mut DiskRecord| {
            record.origin = format!("{}:{}", hearth_origin::FLASH, record.serial);
            record.home = Home::Flash;
            record.origin_identity = None;
            record.clean_detach = false;
            (record.min_bytes, record.max_bytes) = (0, 0);
            (record.auto, record.pin) = (false, false);
            record.origin_timeout_ms = 0;
            record.chain.clear();
            record.allow_backing = false;
        };
        let back = |record: &mut DiskRecord| *record = before.clone();
        self.change_home(name, id, alone)?;
        // By itself: within the expression below the pool would be held to its end.
        let known = flash_knows(&lock(&self.pool));
        let told = known.and_then(|()| {
            self.at_rest(&format!("move {name}"), || {
                self.engine.rehome(id, hearth_engine::api::Home::Flash)
            })
        });
        if let Err(e) = told {
            // It is as whole on its origin as it was: what is held is dirty there.
            if let Err(back) = self.change_home(name, id, back) {
                tracing::error!(disk = %name, "it is noted as living on flash, which was not to be: {back}");
            }
            return Err(e);
        }
        let record = self.with_record(name)?;
        let device = Arc::new(device(&record));
        let old = self.targets.set(Target::Origin(id), Some(device.clone()));
        self.rooms.watch(id, &device);
        self.with_slot(name, |slot| {
            slot.set_device(device.clone());
            Ok(())
        })?;
        self.watch_origin(id);
        if let Ok(spec) = origin::parse(&record.origin) {
            self.note_place(id, super::apart::place(&spec));
        }
        // Data threads let go of the origin from here on.
        self.poke();
        drop(old);
        self.events.tell(hearth_events::Event::DiskLivesOnFlash {
            disk: name.to_owned(),
            origin: before.origin,
        });
        self.keep_shares();
        self.look_at_pins();
        drop(turn);
        Ok(true)
    }
}

impl Mover {
    fn run(mut self, news: &Receiver<News>) {
        let mut wait = Duration::ZERO;
        loop {
            match news.recv_timeout(wait) {
                Ok(News::Kept(result)) => wait = self.was_kept(result),
                Ok(News::End) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let Some(daemon) = self.daemon.upgrade() else {
                        return;
                    };
                    wait = self.go_on(&daemon);
                }
            }
            if self.step == Step::Over {
                return;
            }
        }
    }

    /// A piece has ended; how long the next has to wait.
    fn was_kept(&mut self, result: std::result::Result<(), ReqError>) -> Duration {
        let Some((began, asked)) = self.sent.take() else {
            return SOON;
        };
        if result.is_err() {
            // The next pass finds it again, and says so if it was let go.
            return SOON;
        }
        match self.daemon.upgrade() {
            // As for pinned disks: at most half of a slow disk is taken from those who work with it.
            Some(daemon) if asked_for(&daemon) != asked => began.elapsed(),
            _ => Duration::ZERO,
        }
    }

    /// Does the next step; how long there is nothing to do.
    fn go_on(&mut self, daemon: &Arc<Daemon>) -> Duration {
        if self.sent.is_some() {
            return SOON;
        }
        if !daemon.engine.is_held(self.id) {
            self.step = Step::Over;
            daemon.events.tell(hearth_events::Event::DiskStays {
                disk: self.name.clone(),
            });
            return Duration::ZERO;
        }
        if daemon.swap_waits() {
            return SOON;
        }
        let device = {
            let disks = daemon.disks.lock();
            if disks.purpose(self.id).is_some() {
                // Somebody changes it, and waits for its I/O to end.
                return SOON;
            }
            let slot = disks.by_id(self.id);
            slot.and_then(|slot| slot.export().and(slot.device()).cloned())
        };
        let Some(device) = device else { return SOON };
        match self.step {
            Step::Pass { at, found } => self.pass(daemon, &device, at, found),
            Step::Ends => self.end(daemon),
            Step::Over => Duration::ZERO,
        }
    }

    fn pass(&mut self, daemon: &Daemon, device: &Device, mut at: u64, found: bool) -> Duration {
        if at == 0 {
            // What was on its way to the origin may become clean until then, and a hole be one no more. Who has let the disk go meanwhile,
            // because it is larger now or for another reason, has said the last word.
            match daemon.engine.hold_on(self.id) {
                Ok(()) => self.lacking = 0,
                Err(_) => return SOON,
            }
        }
        for _ in 0..LOOKS_MAX {
            if at >= self.size {
                self.step = match found {
                    true => START,
                    // What was brought there has to be durable.
                    false => match daemon.engine.hold_on(self.id) {
                        Ok(()) => Step::Ends,
                        Err(_) => START,
                    },
                };
                if self.step == Step::Ends {
                    // The last that was shown is how far it was before the last piece.
                    self.show(self.size);
                }
                return Duration::ZERO;
            }
            let (from, len, copy) = match daemon.engine.unkept(self.id, at, self.size) {
                Ok(run) => run,
                Err(to) => {
                    at = to;
                    continue;
                }
            };
            let part = match copy {
                true => Some((from, len)),
                false => data_of(device, from, len),
            };
            let Some((from, len)) = part else {
                at = from + len;
                continue;
            };
            let len = len.min(PIECE);
            self.step = Step::Pass {
                at: from + len,
                found: true,
            };
            self.show(from);
            self.sent = Some((Instant::now(), asked_for(daemon)));
            let tell = self.tell.clone();
            self.port.ask(
                usize::from(self.id),
                Request::keep(0, self.id, from, len, 0),
                Box::new(move |result, _| {
                    // Nobody is there to be told after the end.
                    let _ = tell.send(News::Kept(result));
                }),
            );
            return SOON;
        }
        self.step = Step::Pass { at, found };
        Duration::ZERO
    }

    /// How far it is: what lies behind is done.
    fn show(&mut self, at: u64) {
        let now = self
            .progress
            .update(hearth_io::now_ns(), self.size.saturating_sub(at));
        *lock(&self.shown) = OntoFlash {
            bytes_left: Some(now.left),
            bytes_per_second: now.rate,
            eta_seconds: now.eta,
        };
    }

    fn end(&mut self, daemon: &Arc<Daemon>) -> Duration {
        match daemon.engine.is_whole(self.id) {
            Ok(()) => {}
            Err(ControlError::Busy) => {
                daemon.poke();
                return SOON;
            }
            Err(_) => {
                self.step = START;
                return SOON;
            }
        }
        match daemon.live_on_flash(self.id, &self.name) {
            Ok(true) => {
                self.step = Step::Over;
                Duration::ZERO
            }
            Ok(false) => SOON,
            Err(e) => {
                tracing::warn!(disk = %self.name, "it does not live on flash yet: {e}");
                SOON
            }
        }
    }
}

#[cfg(test)]
mod tests;
