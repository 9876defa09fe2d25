//! Disks that are to be all on flash.
//!
//! Most disks are cached as they are used. Of a few their owner knows better: those are to be fast the first time, too. So
//! what the cache does not have of them is read in, in the background. That it stays is the engine's part: as much flash is
//! kept for such a disk as it has bytes ([`DiskRecord::kept_bytes`]), and within that eviction drops nothing. While no segment is free it may
//! nevertheless, or the log would stall; so it is looked again and again, and what is missing is read once more.
//!
//! One thread does that for all disks, and waits for no origin: what it asks for is answered to its letter box. Of the disks whose origins
//! lie at one spot, one is read at a time. Who works with them comes first: after each piece, nothing is read for as long as that
//! took if anybody asked for anything meanwhile.
//!
//! Holes of a file are not read in: nothing is there that could be slow.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_datastore::port::Port;
use hearth_engine::api::{DiskId, ReqError, ReqOp, Request};
use hearth_fault::Fault;
use hearth_format::{DiskRecord, Home};
use hearth_io::{BLOCK, Device};

use super::control::check_share;
use super::homeless::check_promise;
use super::{Daemon, lock};
use crate::api::datastores::PinState;
use crate::api::types::{self, PinInfo};
use crate::error::Result;
use crate::progress::Progress;
use crate::spot::Mounts;
use crate::workers::Spot;

/// How often it is looked whether what was complete still is, and wait after something that failed.
const ROUND: Duration = Duration::from_secs(10);
/// How often one is counted anew that has not lost any blocks: others may have taken their places.
const COUNT_TIME: Duration = Duration::from_secs(600);
/// Wait for what was read to be on flash before it is looked what is missing, and for what holds a disk up just now.
const SOON: Duration = Duration::from_millis(250);
/// How often it is looked whether a disk is served again.
const UNSERVED_TIME: Duration = Duration::from_secs(1);
/// How often the registry is asked which disks are pinned, while nobody tells of a change.
const LIST_TIME: Duration = Duration::from_secs(10);
/// Bytes read in at once.
const PIECE: u64 = 1 << 20;
/// Looks at the index in one go; each is of as much as may be looked at under its lock.
const LOOKS_MAX: usize = 16;
/// Disks with clients of which is looked what was asked for; of more, the first.
const BESIDE_MAX: usize = 64;

/// What the thread is told.
enum News {
    /// Look at the registry.
    Look,
    /// A piece was read, or could not be.
    Read(DiskId, std::result::Result<(), ReqError>),
    End,
}

/// The thread, until it is ended or dropped.
pub(super) struct Pins {
    shown: Arc<Mutex<BTreeMap<DiskId, PinInfo>>>,
    tell: Sender<News>,
    thread: Option<JoinHandle<()>>,
}

impl Pins {
    /// A disk was pinned, unpinned, attached or resized.
    pub(super) fn look(&self) {
        // One that has ended need not look.
        let _ = self.tell.send(News::Look);
    }

    fn of(&self, id: DiskId) -> Option<PinInfo> {
        lock(&self.shown).get(&id).cloned()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = self.tell.send(News::End);
        if let Some(thread) = self.thread.take()
            // It may be the one that drops the last of the daemon.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that reads in pinned disks ended abnormally");
        }
    }
}

/// What is done for a disk.
#[derive(Debug)]
enum Step {
    /// Nothing, until it is due.
    Rest,
    /// It is counted what is missing; so far up to this offset.
    Count(u64),
    /// What is missing is read; so far up to this offset.
    Fill(u64),
    /// The same, and a piece is on its way: up to which offset it goes, of how many bytes, since when, and what clients
    /// had asked for by then.
    Wait(u64, u64, Instant, u64),
}

/// A disk that is to be all on flash.
struct Job {
    name: String,
    spot: Spot,
    size: u64,
    step: Step,
    due: Instant,
    /// Bytes to be read.
    left: u64,
    /// As many as there were when it was counted last.
    before: Option<u64>,
    /// Some was asked for, and nobody was told yet that all is there. It may come late, when nothing is counted any more.
    asked: bool,
    /// Bytes that were there when nothing was missing.
    filled: Option<u64>,
    /// When that was.
    counted: Instant,
    /// Something of it could not be read.
    trouble: Option<Fault>,
    progress: Progress,
}

impl Job {
    /// It is in the midst of it, and nobody else at its spot is to begin.
    fn is_begun(&self) -> bool {
        self.before.is_some() || !matches!(self.step, Step::Rest)
    }

    fn new(record: &DiskRecord, mounts: &Mounts) -> Job {
        Job {
            name: record.name.clone(),
            spot: mounts.spot_of(&record.origin),
            size: record.size,
            step: Step::Rest,
            due: Instant::now(),
            left: 0,
            before: None,
            asked: false,
            filled: None,
            counted: Instant::now(),
            trouble: None,
            progress: Progress::default(),
        }
    }

    /// It was counted not long ago, and nothing was missing.
    fn is_filled(&self) -> bool {
        self.filled.is_some() && self.counted.elapsed() < COUNT_TIME
    }

    fn rest(&mut self, time: Duration) {
        self.step = Step::Rest;
        self.due = Instant::now() + time;
    }
}

struct Keeper {
    daemon: Weak<Daemon>,
    port: Port,
    shown: Arc<Mutex<BTreeMap<DiskId, PinInfo>>>,
    tell: Sender<News>,
    jobs: BTreeMap<DiskId, Job>,
    list_due: Instant,
    turn: usize,
}

impl Daemon {
    /// Starts the thread.
    pub(super) fn start_pins(self: &Arc<Daemon>) -> std::io::Result<Pins> {
        let (tell, news) = channel();
        let shown = Arc::<Mutex<BTreeMap<DiskId, PinInfo>>>::default();
        let mut keeper = Keeper {
            daemon: Arc::downgrade(self),
            port: Port::open(&self.reactors)?,
            shown: shown.clone(),
            tell: tell.clone(),
            jobs: BTreeMap::new(),
            list_due: Instant::now(),
            turn: 0,
        };
        let thread = std::thread::Builder::new()
            .name("hearth-pins".to_owned())
            .spawn(move || keeper.run(&news))?;
        Ok(Pins {
            shown,
            tell,
            thread: Some(thread),
        })
    }

    /// Ends it: from here on nothing is read in.
    pub(super) fn end_pins(&self) {
        let pins = lock(&self.pins).take();
        drop(pins);
    }

    /// Has it look which disks are pinned.
    pub(super) fn look_at_pins(&self) {
        if let Some(pins) = &*lock(&self.pins) {
            pins.look();
        }
    }

    /// Refuses a size for which not so much flash can be kept, where all of a disk is to be there: it is pinned, or it moves and
    /// is promised as a whole until that is over.
    pub(super) fn check_grows(&self, id: DiskId, size: u64) -> Result<()> {
        let holds = self.holds();
        let pool = lock(&self.pool);
        let Some(record) = pool.record(id).filter(|r| size > r.size) else {
            return Ok(());
        };
        if record.home == Home::Moving {
            check_promise(pool.registry(), holds, &record.name, size - record.size)?;
        }
        if !record.pin {
            return Ok(());
        }
        let grown = DiskRecord {
            size,
            ..record.clone()
        };
        let (capacity, kept) = (pool.kept_capacity(), grown.kept_bytes());
        check_share(pool.registry(), capacity, &record.name, kept)
    }

    /// How far a pinned disk is.
    pub(super) fn pin_of(&self, record: &DiskRecord) -> Option<PinInfo> {
        if !record.pin || record.is_flash_only() {
            return None;
        }
        let known = lock(&self.pins)
            .as_ref()
            .and_then(|pins| pins.of(record.id));
        Some(known.unwrap_or_else(|| waiting(Fault::bare("nobody has looked at it yet"))))
    }
}

/// Bytes of it that are on flash, or known to be zeros.
fn there(daemon: &Daemon, id: DiskId) -> u64 {
    let status = daemon.engine.status(id).unwrap_or_default();
    (status.cached_blocks + status.zero_blocks) * BLOCK
}

fn waiting(why: Fault) -> PinInfo {
    let (reason, remedy) = types::fields(Some(why));
    PinInfo {
        state: PinState::Waiting,
        bytes_left: None,
        bytes_per_second: 0.0,
        eta_seconds: None,
        reason,
        remedy,
    }
}

impl Keeper {
    fn run(&mut self, news: &Receiver<News>) {
        let mut wait = Duration::ZERO;
        loop {
            match news.recv_timeout(wait) {
                Ok(News::Look) => self.list_due = Instant::now(),
                Ok(News::Read(id, result)) => self.was_read(id, result),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(News::End) | Err(RecvTimeoutError::Disconnected) => return,
            }
            let Some(daemon) = self.daemon.upgrade() else {
                return;
            };
            wait = self.round(&daemon);
        }
    }

    /// Does what is due; how long there is nothing to do.
    fn round(&mut self, daemon: &Daemon) -> Duration {
        if self.list_due <= Instant::now() {
            self.list(daemon);
        }
        let begun = self.jobs.values().filter(|job| job.is_begun());
        let mut taken: BTreeSet<Spot> = begun.map(|job| job.spot.clone()).collect();
        let ids: Vec<DiskId> = self.jobs.keys().copied().collect();
        for id in ids {
            let Some(mut job) = self.jobs.remove(&id) else {
                continue;
            };
            let now = Instant::now();
            let stands_back = daemon.swap_waits() && matches!(job.step, Step::Fill(_));
            if stands_back {
                // Swap on the same flash is held up.
                job.due = now + SOON;
            } else if matches!(job.step, Step::Wait(..)) || job.due > now {
                // There is nothing to do for it.
            } else if job.is_begun() {
                self.go_on(daemon, id, &mut job);
            } else if job.is_filled() && job.filled <= Some(there(daemon, id)) {
                job.rest(ROUND);
            } else if taken.insert(job.spot.clone()) {
                self.go_on(daemon, id, &mut job);
            } else {
                job.rest(SOON);
                let why = "another pinned disk at the same place is read in first";
                self.show(id, waiting(Fault::bare(why)));
            }
            self.jobs.insert(id, job);
        }
        let soonest = self
            .jobs
            .values()
            .filter(|job| !matches!(job.step, Step::Wait(..)));
        let soonest = soonest.map(|job| job.due).chain([self.list_due]).min();
        soonest.map_or(LIST_TIME, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Looks which disks are pinned.
    fn list(&mut self, daemon: &Daemon) {
        self.list_due = Instant::now() + LIST_TIME;
        let pool = lock(&daemon.pool);
        let pinned = pool
            .registry()
            .plain_disks()
            .filter(|r| r.pin && !r.is_flash_only());
        let pinned: BTreeMap<DiskId, DiskRecord> = pinned.map(|r| (r.id, (**r).clone())).collect();
        drop(pool);
        self.jobs.retain(|id, job| {
            pinned
                .get(id)
                .is_some_and(|r| r.name == job.name && r.size == job.size)
        });
        lock(&self.shown).retain(|id, _| pinned.contains_key(id));
        let mounts = Mounts::now();
        for (id, record) in &pinned {
            let job = self
                .jobs
                .entry(*id)
                .or_insert_with(|| Job::new(record, &mounts));
            job.spot = mounts.spot_of(&record.origin);
            if !job.is_begun() {
                job.due = Instant::now();
            }
        }
        // Of one whose origin does not answer it is to be seen that nothing comes.
        let mut jobs = std::mem::take(&mut self.jobs);
        for (id, job) in &mut jobs {
            if matches!(job.step, Step::Wait(..)) {
                self.show_filling(*id, job);
            }
        }
        self.jobs = jobs;
    }

    fn show(&self, id: DiskId, info: PinInfo) {
        lock(&self.shown).insert(id, info);
    }

    fn show_filling(&self, id: DiskId, job: &mut Job) {
        let now = job.progress.update(hearth_io::now_ns(), job.left);
        let (reason, remedy) = types::fields(job.trouble.clone());
        self.show(
            id,
            PinInfo {
                state: PinState::Filling,
                bytes_left: Some(job.left),
                bytes_per_second: now.rate,
                eta_seconds: now.eta,
                reason,
                remedy,
            },
        );
    }

    fn go_on(&mut self, daemon: &Daemon, id: DiskId, job: &mut Job) {
        let device = match self.may(daemon, id, job) {
            Ok(device) => device,
            Err((info, time)) => {
                job.rest(time);
                if let Some(info) = info {
                    // Others at the same place need not wait for it.
                    (job.filled, job.before) = (None, None);
                    self.show(id, *info);
                }
                return;
            }
        };
        match job.step {
            Step::Rest => {
                job.left = 0;
                self.count(daemon, id, job, &device, 0);
            }
            Step::Count(at) => self.count(daemon, id, job, &device, at),
            Step::Fill(at) => self.fill(daemon, id, job, &device, at),
            Step::Wait(..) => {}
        }
    }

    /// The origin of a disk that can be read in now, or what to show instead and how long to wait.
    fn may(
        &self,
        daemon: &Daemon,
        id: DiskId,
        job: &Job,
    ) -> std::result::Result<Arc<Device>, (Option<Box<PinInfo>>, Duration)> {
        let disks = daemon.disks.lock();
        if disks.purpose(id).is_some() {
            // Somebody changes it, and waits for its I/O to end.
            return Err((None, SOON));
        }
        let slot = disks.by_id(id);
        let device = slot.and_then(|slot| slot.export().and(slot.device()).cloned());
        drop(disks);
        let Some(device) = device else {
            let why = waiting(Fault::bare("the disk is not attached"));
            return Err((Some(Box::new(why)), UNSERVED_TIME));
        };
        let wait = |why: Fault| (Some(Box::new(waiting(why))), ROUND);
        if daemon.flash.degraded().is_some() || daemon.cache_is_off() {
            let why = Fault::new(
                "the pool's flash takes no writes",
                "`hearth pool show` says why",
            );
            return Err(wait(why));
        }
        if matches!(job.step, Step::Rest) {
            let pool = lock(&daemon.pool);
            let kept = pool.record(id).map_or(0, DiskRecord::kept_bytes);
            if let Err(e) = check_share(pool.registry(), pool.kept_capacity(), &job.name, kept) {
                let (info, time) = wait(e.into());
                let info = info.map(|mut info| {
                    info.state = PinState::NoRoom;
                    info
                });
                return Err((info, time));
            }
        }
        Ok(device)
    }

    fn count(&mut self, daemon: &Daemon, id: DiskId, job: &mut Job, device: &Device, mut at: u64) {
        let began = Instant::now();
        for _ in 0..LOOKS_MAX {
            if at >= job.size {
                return self.counted(daemon, id, job);
            }
            at = match daemon.engine.missing(id, at, job.size) {
                Err(to) => to,
                Ok((from, len)) => {
                    let len = len.min(job.size.saturating_sub(from));
                    job.left += data_in(device, from, len);
                    from + len
                }
            };
        }
        job.step = Step::Count(at);
        job.due = Instant::now() + began.elapsed();
    }

    fn counted(&mut self, daemon: &Daemon, id: DiskId, job: &mut Job) {
        if job.left == 0 {
            if std::mem::take(&mut job.asked) {
                daemon.events.tell(hearth_events::Event::DiskPinned {
                    disk: job.name.clone(),
                    bytes: job.size,
                });
            }
            (job.filled, job.before) = (Some(there(daemon, id)), None);
            (job.trouble, job.counted) = (None, Instant::now());
            job.rest(ROUND);
            self.show(
                id,
                PinInfo {
                    state: PinState::Filled,
                    bytes_left: Some(0),
                    bytes_per_second: 0.0,
                    eta_seconds: None,
                    reason: None,
                    remedy: None,
                },
            );
            return;
        }
        job.filled = None;
        if job.before.is_some_and(|before| before <= job.left) {
            // All of it was asked for, and nothing stayed: doing that again at once would only keep the origin busy.
            (job.before, job.progress) = (None, Progress::default());
            job.rest(ROUND);
        } else {
            (job.before, job.asked) = (Some(job.left), true);
            job.trouble = None;
            job.step = Step::Fill(0);
        }
        self.show_filling(id, job);
    }

    fn fill(&mut self, daemon: &Daemon, id: DiskId, job: &mut Job, device: &Device, mut at: u64) {
        let began = Instant::now();
        for _ in 0..LOOKS_MAX {
            if at >= job.size {
                // What was read last is on its way to flash.
                return job.rest(SOON);
            }
            let (from, len) = match daemon.engine.missing(id, at, job.size) {
                Ok((from, len)) => (from, len.min(job.size.saturating_sub(from))),
                Err(to) => {
                    at = to;
                    continue;
                }
            };
            let Some((from, len)) = data_of(device, from, len) else {
                at = from + len;
                continue;
            };
            let piece = len.min(PIECE);
            let asked = asked_for(daemon);
            job.step = Step::Wait(from + piece, piece, Instant::now(), asked);
            let tell = self.tell.clone();
            let request = Request::new(0, id, ReqOp::Prefetch, from, piece, None, 0);
            self.turn = self.turn.wrapping_add(1);
            self.port.ask(
                self.turn,
                request,
                Box::new(move |result, _| {
                    // Nobody is there to be told after the end.
                    let _ = tell.send(News::Read(id, result));
                }),
            );
            return;
        }
        job.step = Step::Fill(at);
        job.due = Instant::now() + began.elapsed();
    }

    fn was_read(&mut self, id: DiskId, result: std::result::Result<(), ReqError>) {
        // One that is not pinned any more, or another of the same number.
        let Some(mut job) = self.jobs.remove(&id) else {
            return;
        };
        if let Step::Wait(to, len, began, asked) = job.step {
            let now = self.daemon.upgrade().map(|d| asked_for(&d));
            let pause = match now {
                Some(now) if now == asked => Duration::ZERO,
                _ => began.elapsed(),
            };
            job.step = Step::Fill(to);
            job.due = Instant::now() + pause;
            match result {
                Ok(()) => job.left = job.left.saturating_sub(len),
                Err(_) => {
                    job.due = Instant::now() + SOON.max(pause);
                    job.trouble = Some(Fault::new(
                        "not all of it can be read from its origin",
                        "see the log for what is wrong with the origin; it is tried again",
                    ));
                }
            }
            self.show_filling(id, &mut job);
        }
        self.jobs.insert(id, job);
    }
}

/// How much clients have asked for.
pub(super) fn asked_for(daemon: &Daemon) -> u64 {
    let disks = daemon.disks.lock();
    let used = disks.all().filter(|(_, slot)| {
        slot.export()
            .is_some_and(|export| export.clients().connections() > 0)
    });
    let used: Vec<DiskId> = used.map(|(id, _)| id).take(BESIDE_MAX).collect();
    drop(disks);
    let counts = |id| daemon.engine.counts(id, hearth_io::now_ns());
    used.into_iter().filter_map(counts).fold(0, |sum, stats| {
        let c = &stats.counters;
        [
            c.read_hits,
            c.read_partial_hits,
            c.read_misses,
            c.write_bytes,
            c.flushes,
            c.discards,
        ]
        .into_iter()
        .fold(sum, u64::wrapping_add)
    })
}

/// Bytes of a range that are no hole of the origin.
fn data_in(device: &Device, from: u64, len: u64) -> u64 {
    let len = len.min(device.size().saturating_sub(from));
    match device.extents(from, len) {
        Ok(extents) => extents.iter().filter(|e| e.data).map(|e| e.len).sum(),
        Err(_) => len,
    }
}

/// The first bytes of a range that are no hole of the origin, as (offset, length).
pub(super) fn data_of(device: &Device, from: u64, len: u64) -> Option<(u64, u64)> {
    let len = len.min(device.size().saturating_sub(from));
    if len == 0 {
        return None;
    }
    let Ok(extents) = device.extents(from, len) else {
        return Some((from, len));
    };
    let data = extents.iter().find(|extent| extent.data)?;
    // Whole blocks, as the cache has them.
    let start = data.offset / BLOCK * BLOCK;
    let end = (data.offset + data.len)
        .next_multiple_of(BLOCK)
        .min(from + len);
    Some((start.max(from), end - start.max(from)))
}

#[cfg(test)]
mod tests;
