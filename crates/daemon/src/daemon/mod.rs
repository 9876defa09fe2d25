//! The daemon proper: a pool, its engine and data threads, and the life of its disks.
//!
//! All that is known of a disk is in its slot (`slot.rs`) of one table (`table.rs`): what it is doing is a
//! pure state machine (`life.rs`), and who changes it has its turn, so that operations on different disks
//! do not wait for each other. `course.rs` does what follows from what happens to a disk.
//!
//! Locks, in the order they may be taken together: the table's (held briefly), `pool` (the registry; held
//! for the time of a write to flash). The data threads take `pool` too, once per disk, so nobody may wait
//! for a data thread while holding it.

mod admission;
mod advice;
mod apart;
mod areas;
mod attach;
mod chains;
#[cfg(test)]
mod claims_tests;
mod control;
mod course;
mod curves;
pub(crate) mod datastores;
mod fence;
mod flash;
mod homeless;
mod jobs;
mod legs;
mod losses;
mod metrics;
mod moves;
mod noter;
mod onto_flash;
mod opens;
mod pins;
mod report;
mod reshape;
mod rooms;
mod slot;
mod stop;
mod swap;
mod trouble;
mod upgrade;
mod watch;
mod without;
mod workload;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hearth_engine::api::{DiskId, Effects, Request};
use hearth_engine::{Budget, ControlError, Engine, EngineOptions, OpenReport, OpenedFrom};
use hearth_events::{Event, Events};
use hearth_io::watch::{GaveUp, Watch};
use hearth_io::{BLOCK, IoDone, Target, Targets};
use hearth_observe::Observer;
use hearth_reactor::{BlockEngine, Config, Reactors, Watcher};

use crate::api::stats::{FlashCounters, StuckThread};
use crate::api::types::Recovery;
use crate::bell::Bell;
use crate::beside::Beside;
use crate::brake::Brake;
use crate::client_record::ClientRecord;
use crate::clients::Crowd;
use crate::degraded::{Degraded, Started};
use crate::error::{Error, Kind, Result};
use crate::exports::ExportTable;
use crate::gate::Gate;
use crate::grounds::Grounds;
use crate::memory::NbdLimits;
use crate::pool::{Pool, Seen};
use crate::room::Rooms;
use crate::size::human;
use crate::table::Table;
use crate::windows::Windows;
use crate::workers::Workers;

use slot::Slot;
pub use stop::StopReason;

/// Longest a control operation waits for a disk's I/O to come to rest.
const REST_TIME: Duration = Duration::from_secs(30);
/// Least time between two looks whether it has: I/O of other disks ends all the time.
const REST_PACE: Duration = Duration::from_millis(2);
/// How long a start waits for a flash device that was there, and how often it looks.
const FLASH_TIME: Duration = Duration::from_secs(10);
const FLASH_PACE: Duration = Duration::from_millis(100);

/// How much may be written to flash in the long run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endurance {
    /// So many bytes a second.
    BytesPerSecond(u64),
    /// So many thousandths of the pool's size a day.
    DriveWritesPerDay(u64),
}

impl Endurance {
    /// The budget for a pool of `bytes`.
    fn budget(self, bytes: u64) -> Budget {
        match self {
            Endurance::BytesPerSecond(rate) => Budget::bytes_per_second(rate),
            Endurance::DriveWritesPerDay(n) => Budget::drive_writes_per_day(bytes, n),
        }
    }
}

/// How to run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The pool's flash devices, in any order.
    pub flash: Vec<PathBuf>,
    /// Data threads; 0 chooses.
    pub threads: usize,
    /// Most RAM for the index, in bytes.
    pub memory: Option<u64>,
    /// Most bytes a second written to the origins in the background; 0: no limit.
    pub destage_rate: u64,
    /// RAM for blocks that were read once, in bytes; `None`: a little, which grows with the pool.
    pub ram_stage: Option<u64>,
    /// How long a flash device may take for an operation before that counts as failed; zero: it is waited for.
    pub flash_timeout: Duration,
    /// Do not read ahead of guests.
    pub no_prefetch: bool,
    /// What may be written to flash in the long run; `None`: no limit.
    pub endurance: Option<Endurance>,
    /// Use a log of which parts cannot be read.
    pub accept_damage: bool,
    /// Longest a data thread looks for work before it sleeps; zero: it does not.
    pub poll: Duration,
    /// Most bytes of RAM for NBD clients: their connections, requests and replies; `None`: a
    /// sixteenth of the machine's, at least 128 MiB, at most 1 GiB.
    pub nbd_memory: Option<u64>,
    /// Directory for the sockets of image processes, of this daemon alone.
    pub images: PathBuf,
    /// The daemon before this one handed over a moment ago, so that nothing can have changed what it served.
    pub handed_over: bool,
    /// Leave the cache off.
    pub degraded: Option<Degraded>,
    /// Where files below images may lie; if none is named, beside the image.
    pub backing_dirs: Vec<PathBuf>,
    /// Leave it off after several aborts.
    pub brake: Option<Brake>,
    /// If the cache is off for want of room: stop when there has been room for so long, to be started
    /// again.
    pub exit_when_room: Option<Duration>,
    /// Where is kept what must outlive the flash; `None`: the usual place.
    pub state_dir: Option<PathBuf>,
    /// Where it tells what happens.
    pub events: Arc<Events>,
}

/// The engine, as the data threads call it. They ring for those who wait for something of it.
struct Shared {
    engine: Arc<Engine>,
    bell: Arc<Bell>,
    gate: Arc<Gate>,
    rooms: Arc<Rooms>,
}

impl Shared {
    /// Hands on what there is room for, or may have to wait for a note first.
    fn hand_on(&self, now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects) {
        let passing = self.gate.pass(reqs);
        self.engine.submit(now_ns, reqs, fx);
        drop(passing);
        self.bell.ring();
    }
}

impl BlockEngine for Shared {
    fn submit(&self, now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects) {
        let passing = self.gate.pass(reqs);
        // Last: what it lets pass counts as being in the engine at once.
        let taking = self.rooms.pass(now_ns, reqs);
        self.engine.submit(now_ns, reqs, fx);
        drop(taking);
        drop(passing);
        self.bell.ring();
    }
    fn io_done(&self, now_ns: u64, dones: &mut Vec<IoDone>, fx: &mut Effects) {
        self.engine.io_done(now_ns, dones, fx);
        self.bell.ring();
    }
    fn tick(&self, now_ns: u64, fx: &mut Effects) -> Option<u64> {
        let before = fx.ios.len() + fx.completions.len();
        let next = self.engine.tick(now_ns, fx);
        // Who waits has the thread look at what was asked, each time: nothing new is no news.
        if fx.ios.len() + fx.completions.len() > before {
            self.bell.ring();
        }
        next
    }
}

/// A pool being served.
pub struct Daemon {
    pool: Arc<Mutex<Pool>>,
    engine: Arc<Engine>,
    targets: Arc<Targets>,
    reactors: Arc<Reactors>,
    /// Rung when the engine has done something.
    bell: Arc<Bell>,
    /// What is known of the pool beside its flash; also for who holds the pool's lock.
    beside: Option<Arc<Beside>>,
    /// What its registry says, for who must not wait for that lock.
    seen: Arc<Seen>,
    /// There is no flash.
    without_flash: bool,
    /// Holds writes until it is noted beside the flash that their disks may be dirty.
    gate: Arc<Gate>,
    /// Whoever changes how the engine treats a disk's writes has this, and whoever opens the gate because of how it does.
    modes: Mutex<()>,
    /// Lets them go.
    noter: Mutex<Option<noter::Noter>>,
    /// Notes beside the flash that a device is lost.
    losses: Mutex<Option<losses::Losses>>,
    /// Holds writes until it is known that there is room for them at the origins.
    rooms: Arc<Rooms>,
    /// Finds that out.
    room_keeper: Mutex<Option<rooms::RoomKeeper>>,
    /// Reads in disks that are to be all on flash.
    pins: Mutex<Option<pins::Pins>>,
    /// Reports origins that are opened while something of them is on flash only.
    opens: OnceLock<Arc<opens::OriginOpens>>,
    /// Disks on their way onto flash alone.
    goings: Mutex<onto_flash::Goings>,
    /// The way to the engine past the data threads.
    door: Arc<Shared>,
    /// For all that an origin, or where it lies, can hold up.
    workers: Arc<Workers>,
    observer: Arc<Observer>,
    /// The way to who keeps what it knows.
    curves: Mutex<Option<std::sync::mpsc::Sender<curves::Ask>>>,
    exports: Arc<ExportTable>,
    /// Connections of all disks' clients.
    crowd: Arc<Crowd>,
    disks: Arc<Table<Slot>>,
    /// What their origins lie on. Taken after the table's lock.
    grounds: Mutex<Grounds>,
    /// Disks whose cached blocks have to be compared with their origins.
    checks: attach::Checks,
    /// Disks for which flash is kept, or may have to be. Taken alone, or after the table's lock.
    sharing: Mutex<BTreeSet<DiskId>>,
    /// Of the flash; those of a disk are in its slot.
    windows: Mutex<Windows<FlashCounters>>,
    started: Instant,
    recovery: Recovery,
    /// The run before did not end in order.
    crashed: bool,
    flash: flash::FlashWatch,
    images: PathBuf,
    /// See [`Options::handed_over`], while disks are attached for the first time.
    handed_over: AtomicBool,
    /// Whose the origins are that other hosts can reach.
    owners: admission::Owners,
    backing_dirs: Vec<PathBuf>,
    stopping: AtomicBool,
    stop: Mutex<Option<StopReason>>,
    stop_changed: Condvar,
    beats: AtomicU64,
    /// Who uses the flash beside the cache.
    shared_flash: Mutex<swap::Shared>,
    /// Threads that were found stuck lately.
    stuck: Mutex<Vec<StuckThread>>,
    /// Second at which shares of disks that follow the advice are next looked at.
    auto_due: AtomicU64,
    /// Where the sizes of origins are being looked at.
    measuring: attach::MeasuredSpots,
    /// The directories that are served whole.
    stores: datastores::Stores,
    /// Where is told what happens.
    events: Arc<Events>,
    /// Legs of mirrors that are not used, as it was told.
    stale_legs: Arc<crate::mirror::news::Stale>,
    /// What of the flash was counted when it was last told.
    flash_errors: AtomicU64,
    /// It was told that disks keep only a part of their minimums.
    shares_scaled: AtomicBool,
    /// Which of its devices were told to be slow. Taken before `pool`.
    slow_devices: Mutex<Vec<u16>>,
    /// Which program takes its place, and whose place it took.
    succession: crate::upgrade::Succession,
    /// Its flash devices are being changed.
    reshaping: reshape::Reshaping,
    /// Most RAM for the index, and RAM for the stage, if they were given.
    memory: Option<u64>,
    ram_stage: Option<u64>,
    /// Where is kept what must outlive the flash.
    state_dir: PathBuf,
    client_record: ClientRecord,
    /// Bytes that NBD clients may hold.
    nbd_memory: u64,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Daemon {
    /// What caches and serves the disks' blocks.
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Opens the pool, attaches its disks, and starts the data threads. Nothing listens yet.
    pub fn start(options: &Options) -> Result<Arc<Daemon>> {
        let begin = Instant::now();
        chains::check_dirs(&options.backing_dirs)?;
        let state_dir = options.state_dir.clone();
        let state_dir = state_dir.unwrap_or_else(crate::rundir::default_state_dir);
        let (asked, kept) = (options.clone(), state_dir.clone());
        let (mut pool, found) = flash_answers(options, true, move || open_pool(&asked, &kept))??;
        // As it was found: from now on it is in use.
        let state = pool.info().state;
        let (crashed, new) = (state == "dirty", state == "new");
        let free = crate::memory::available();
        crate::pool::check_stage(options.ram_stage, free)?;
        let ram_stage = (options.ram_stage)
            .unwrap_or_else(|| crate::pool::stage_within(&pool, options.memory, free));
        crate::pool::check_memory(&pool, options.memory, Some(ram_stage))?;
        let engine_options = EngineOptions {
            // Keeps guests from choosing block numbers that collide in the index.
            hash_seed: uuid::Uuid::new_v4().as_u64_pair().0,
            accept_damage: options.accept_damage,
            destage_bytes_per_s: options.destage_rate,
            ram_stage: Some((ram_stage / BLOCK) as usize),
            prefetch: !options.no_prefetch,
            endurance: options
                .endurance
                .map_or_else(Budget::unlimited, |e| e.budget(pool.kept_capacity())),
            // A flash file keeps the space it was given: punching holes would let others take
            // it, and every write into a hole again waits for the file system.
            trim: pool.flash().iter().all(|device| device.is_device()),
            ordered: pool.ordered(),
            ..EngineOptions::default()
        };
        let braked = match &options.brake {
            Some(brake) => brake.check(&pool.uuid(), &options.events)?,
            None => None,
        };
        // What leaves the flash alone altogether comes first, if there is one.
        let asked = match found {
            Some(gone) if pool.is_without_flash() => Some(gone),
            found => braked.or_else(|| options.degraded.clone()).or(found),
        };
        let (mut pool, started) = flash_answers(options, false, move || {
            let started = crate::degraded::start(&mut pool, &engine_options, &host_name(), asked);
            (pool, started)
        })?;
        let Started {
            engine,
            report,
            degraded,
        } = started?;
        // Before a stop in order, after which nobody would know that they are not just empty.
        pool.change(|registry| {
            for id in &report.dropped {
                if let Some(record) = registry.by_id_mut(*id) {
                    record.void = true;
                }
            }
            Ok(())
        })?;
        for record in pool.registry().disks.iter().filter(|record| record.void) {
            engine.set_void(record.id);
        }
        for device in pool.flash().iter() {
            device.set_patience(options.flash_timeout);
        }
        pool.is_served();
        if !pool.is_without_flash() {
            let dirty = report.dirty.iter().map(|(id, ..)| *id).collect();
            if let Err(e) = pool.note_opened(dirty, degraded.is_none(), engine.generation()) {
                tracing::error!("{e}");
            }
        }
        pool.note_unordered(&engine)?;
        let noted = pool.beside().filter(|_| !pool.is_without_flash());
        let gate = Arc::new(Gate::new(noted.map(|b| b.notes().dirty).as_ref()));
        let beside = pool.beside().cloned();
        // Before anything can be lost.
        pool.flash()
            .joined_spread()
            .note_elsewhere(beside.is_some());
        let source = Source::of(&pool, new, &report);
        let recovery = recovery(source, &report, begin.elapsed());
        tracing::info!(
            pool = %pool.info().uuid,
            from = %recovery.how,
            ms = recovery.millis,
            cached_blocks = recovery.cached_blocks,
            dirty_blocks = recovery.dirty_blocks,
            ram_stage_most = %human(ram_stage),
            "pool opened"
        );
        let files = pool
            .flash()
            .iter()
            .filter_map(|device| Some((device.path(), device.file()?)));
        let place: Vec<String> = files
            .flat_map(|(path, file)| crate::place::notices(path, file))
            .collect();
        let engine = Arc::new(engine);
        let workers = Arc::<Workers>::default();
        let owners = admission::Owners::new(pool.info().uuid, host_name(), workers.clone());
        let targets = Targets::new();
        for (n, device) in (0..).zip(pool.flash().iter()) {
            targets.set(Target::Flash(n), Some(device.clone()));
        }
        let nbd = NbdLimits::of(options.nbd_memory, pool.registry().plain_disks().count())?;
        let nbd_memory = nbd.memory;
        let config = Config {
            threads: options.threads,
            poll: options.poll,
            payload_memory: nbd.memory,
            max_connections: nbd.descriptors,
            half_open: nbd.connections / 4,
            on_failure: Some(crate::abort::driver_failed),
            ..Config::default()
        };
        let observer = Observer::start().map(Arc::new).map_err(no_thread)?;
        let bell = Arc::<Bell>::default();
        let rooms = Arc::<Rooms>::default();
        let door = Arc::new(Shared {
            engine: engine.clone(),
            bell: bell.clone(),
            gate: gate.clone(),
            rooms: rooms.clone(),
        });
        let reactors = Reactors::start_watched(
            door.clone(),
            targets.clone(),
            config,
            Some(observer.clone() as Arc<dyn Watcher>),
        )
        .map_err(|e| Error::of(Kind::Unavailable, e.fault()))?;
        let reactors = Arc::new(reactors);
        let (seen, without_flash) = (pool.seen(), pool.is_without_flash());
        let daemon = Arc::new(Daemon {
            pool: Arc::new(Mutex::new(pool)),
            engine,
            targets,
            reactors,
            bell,
            beside,
            seen,
            without_flash,
            gate,
            modes: Mutex::default(),
            noter: Mutex::default(),
            losses: Mutex::default(),
            rooms,
            room_keeper: Mutex::default(),
            pins: Mutex::default(),
            opens: OnceLock::new(),
            goings: Mutex::default(),
            door,
            workers,
            observer,
            curves: Mutex::default(),
            exports: Arc::default(),
            crowd: Arc::new(Crowd::new(nbd.connections as u64)),
            disks: Arc::default(),
            grounds: Mutex::default(),
            checks: attach::Checks::default(),
            sharing: Mutex::default(),
            windows: Mutex::new(Windows::new(0, FlashCounters::default())),
            started: begin,
            recovery,
            crashed,
            flash: flash::FlashWatch::new(degraded, place, options.exit_when_room),
            images: options.images.clone(),
            handed_over: AtomicBool::new(false),
            owners,
            backing_dirs: options.backing_dirs.clone(),
            stopping: AtomicBool::new(false),
            stop: Mutex::default(),
            stop_changed: Condvar::new(),
            beats: AtomicU64::new(0),
            shared_flash: Mutex::default(),
            stuck: Mutex::default(),
            auto_due: AtomicU64::new(advice::AUTO_SECONDS),
            measuring: attach::MeasuredSpots::default(),
            stores: datastores::Stores::new(options.state_dir.clone()),
            events: options.events.clone(),
            stale_legs: Arc::default(),
            flash_errors: AtomicU64::new(0),
            shares_scaled: AtomicBool::new(false),
            slow_devices: Mutex::default(),
            succession: crate::upgrade::Succession::default(),
            reshaping: reshape::Reshaping::default(),
            memory: options.memory,
            ram_stage: options.ram_stage,
            nbd_memory,
            client_record: ClientRecord::open(&state_dir),
            state_dir,
        });
        *lock(&daemon.curves) = Some(daemon.start_curves().map_err(no_thread)?);
        *lock(&daemon.losses) = daemon.start_losses().map_err(no_thread)?;
        let noter = daemon.start_noter().map_err(no_thread)?;
        *lock(&daemon.noter) = noter;
        let keeper = daemon.start_room_keeper().map_err(no_thread)?;
        *lock(&daemon.room_keeper) = Some(keeper);
        daemon.start_opens().map_err(no_thread)?;
        daemon
            .handed_over
            .store(options.handed_over, Ordering::Relaxed);
        daemon.attach_all();
        daemon.log_unconfirmed();
        daemon.handed_over.store(false, Ordering::Relaxed);
        let pins = daemon.start_pins().map_err(no_thread)?;
        *lock(&daemon.pins) = Some(pins);
        Ok(daemon)
    }

    /// The disks on offer, and the protocols they are offered over.
    pub fn exports(&self) -> Arc<ExportTable> {
        self.exports.clone()
    }

    /// The data threads, to give them listening sockets.
    pub fn reactors(&self) -> &Arc<Reactors> {
        &self.reactors
    }

    /// The threads for what may block.
    pub fn workers(&self) -> &Arc<Workers> {
        &self.workers
    }

    /// Where is told what happens.
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Tells that everything that can be is on offer, and how the pool was found.
    pub(crate) fn tell_started(&self) {
        let Recovery {
            cached_blocks,
            dirty_blocks,
            millis,
            ..
        } = self.recovery;
        let pool = lock(&self.pool).uuid();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        self.events.tell(if self.crashed {
            Event::DaemonStartedAfterCrash {
                version,
                pool,
                cached_blocks,
                dirty_blocks,
                millis,
            }
        } else {
            let off = self.flash.degraded().is_some();
            Event::DaemonStarted {
                version,
                pool,
                found: found(&self.recovery, self.without_flash, off).to_owned(),
                cached_blocks,
                dirty_blocks,
                millis,
            }
        });
        self.tell_found_flash();
    }

    /// Says how to confirm what the pool names outside it.
    fn log_unconfirmed(&self) {
        let pool = lock(&self.pool).info();
        let open = pool.claims.iter().filter(|claim| !claim.confirmed).count();
        if open > 0 {
            tracing::error!(
                pool = %pool.uuid,
                "{open} disks and datastores are not used: the pool names origins, directories, addresses or clients for them that are not confirmed on this host, or the state directory {} was lost; see them with `hearth pool show`, and confirm all with `hearth pool import --accept`",
                self.state_dir.display()
            );
        }
    }

    /// Seconds since the start.
    fn now_s(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Makes the background thread look at what was just asked of the engine.
    fn poke(&self) {
        // A thread that has ended needs no poke.
        let _ = self.reactors.run(|_, _| {});
    }

    /// Repeats `attempt` until the disk's I/O is at rest.
    fn at_rest<T>(
        &self,
        what: &str,
        mut attempt: impl FnMut() -> std::result::Result<T, ControlError>,
    ) -> Result<T> {
        let ended = self.bell.wait(REST_TIME, REST_PACE, || match attempt() {
            // Whoever stops does not wait for what may be waiting for an origin.
            Err(ControlError::Busy) if !self.stopping.load(Ordering::Relaxed) => {
                self.poke();
                None
            }
            other => Some(other),
        });
        match ended {
            None | Some(Err(ControlError::Busy)) => Err(Error::unavailable(
                format!(
                    "cannot {what}: its I/O did not end within {} s",
                    REST_TIME.as_secs()
                ),
                "look for an origin or flash that hangs, and try again",
            )),
            Some(outcome) => outcome.map_err(|e| control_error(what, e)),
        }
    }

    /// Drops everything cached of a disk; the number to be stored in its record.
    fn forget(&self, id: DiskId) -> Result<u64> {
        self.at_rest("drop a disk's cache", || self.try_forget(id))
    }

    /// The same, unless I/O of the disk is in flight.
    ///
    /// The number is remembered until it is in the registry: should storing it fail, the next
    /// attempt to attach the disk must not trust what is in the log.
    fn try_forget(&self, id: DiskId) -> std::result::Result<u64, ControlError> {
        let (answer, result) = std::sync::mpsc::sync_channel(1);
        let engine = self.engine.clone();
        let job = move |_now: u64, fx: &mut Effects| {
            // The receiver waits for exactly this; it cannot be gone.
            let _ = answer.send(engine.forget(id, fx));
        };
        self.reactors.run(job).map_err(|_| ControlError::Busy)?;
        let since_seq = result.recv().unwrap_or(Err(ControlError::Busy))?;
        if let Some(slot) = self.disks.lock().by_id_mut(id) {
            slot.voided = Some(since_seq);
        }
        Ok(since_seq)
    }

    /// Counts housekeeping rounds: a watchdog sees from it that the daemon is alive.
    pub fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    /// Who watches the threads says which of them are stuck.
    pub(crate) fn note_stuck(&self, stuck: Vec<StuckThread>) {
        *lock(&self.stuck) = stuck;
    }
}

fn no_thread(e: std::io::Error) -> Error {
    Error::unavailable(
        format!("cannot start a thread: {e}"),
        "check the limit on processes",
    )
}

/// Does what a start has to do on flash, which may hang before any limit is set for it.
fn flash_answers<T: Send + 'static>(
    options: &Options,
    only_asks: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let limit = options.flash_timeout;
    let silent = match (Watch { limit, only_asks }).run(work) {
        Ok(done) => return Ok(done),
        Err(GaveUp::NoThread(e)) => return Err(no_thread(e)),
        Err(GaveUp::Silent(name)) => name,
        Err(GaveUp::Still) => crate::beside::listed(&crate::beside::shown_all(&options.flash)),
    };
    Err(Error::unavailable(
        format!("{silent} has not answered for {} s", limit.as_secs()),
        "see whether the device hangs, or the mount or server behind it, and start again when it answers; `--flash-timeout SECONDS` \
         says how long it is waited for",
    ))
}

/// Opens the pool to be served; if its flash is gone and it is known beside it, without: then with the reason.
fn open_pool(options: &Options, state_dir: &Path) -> Result<(Pool, Option<Degraded>)> {
    let mut flash = options.flash.clone();
    let begin = Instant::now();
    let late = |p: &&PathBuf| p.starts_with("/dev") && !p.exists();
    loop {
        let failed = match Pool::open_for_service(&flash, state_dir) {
            // What the pool is served without once is not used again.
            Ok((pool, _))
                if pool.flash().misses_one()
                    && begin.elapsed() < FLASH_TIME
                    && (flash.iter().chain(&pool.noted_flash(state_dir))).any(|p| late(&p)) =>
            {
                drop(pool);
                std::thread::sleep(FLASH_PACE);
                continue;
            }
            Ok((mut pool, read_only)) => {
                pool.remember(state_dir)?;
                return Ok((pool, read_only.map(Degraded::unwritable)));
            }
            Err(e) => e,
        };
        // Devices may appear late while a host starts, and without its flash a pool's cache grows old.
        let mut late = flash.iter().filter(late);
        if begin.elapsed() < FLASH_TIME
            && let Some(late) = late.next()
            && crate::beside::pool_at(state_dir, late)?.is_some()
        {
            std::thread::sleep(FLASH_PACE);
            continue;
        }
        match crate::pool::without::go_on(&flash, state_dir) {
            Ok(None) => {}
            Ok(Some(rest)) => {
                tracing::error!("{}", rest.words);
                options.events.tell(Event::FlashDeviceLeft {
                    device: rest.device,
                    kept_bytes: rest.kept_blocks * BLOCK,
                });
                flash = rest.flash;
                continue;
            }
            Err(e) => tracing::error!("{e}"),
        }
        return match Pool::without_flash(state_dir, &flash)? {
            None => Err(failed),
            Some((pool, why)) => Ok((pool, Some(Degraded::gone(why)))),
        };
    }
}

fn control_error(what: &str, error: ControlError) -> Error {
    Error::of(
        Kind::Conflict,
        error.fault().within(format!("cannot {what}")),
    )
}

/// What a start knows its pool from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Checkpoint,
    Log,
    /// Nobody has served it since it was formatted.
    NewFlash,
    /// The flash is gone.
    Beside,
}

impl Source {
    fn of(pool: &Pool, new: bool, report: &OpenReport) -> Source {
        match report.from {
            _ if pool.is_without_flash() => Source::Beside,
            _ if new => Source::NewFlash,
            OpenedFrom::Checkpoint => Source::Checkpoint,
            OpenedFrom::Log => Source::Log,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Source::Checkpoint => "checkpoint of a clean stop",
            Source::Log => "log",
            Source::NewFlash => "new flash",
            Source::Beside => "state directory alone",
        }
    }
}

/// The cache that a start which followed no crash has, in words.
fn found(recovery: &Recovery, without_flash: bool, off: bool) -> &'static str {
    if without_flash {
        return "without a cache, as the flash is gone";
    }
    match recovery.how.as_str() {
        _ if off => "with the cache off",
        how if how == Source::Checkpoint.word() => "cache as a clean stop left it",
        how if how == Source::NewFlash.word() => "the flash is new and the cache empty",
        _ => "cache found again in the log",
    }
}

fn recovery(source: Source, report: &OpenReport, time: Duration) -> Recovery {
    Recovery {
        how: source.word().to_owned(),
        millis: time.as_millis() as u64,
        cached_blocks: report.cached_blocks,
        dirty_blocks: report
            .dirty
            .iter()
            .map(|(_, dirty, zero)| dirty + zero)
            .sum(),
    }
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Daemons for tests, without sockets and without the thread that keeps house.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::api::server::Control;

    /// A daemon on a new pool, in a directory of its own.
    pub(crate) fn daemon() -> (tempfile::TempDir, Arc<Daemon>) {
        let dir = tempfile::tempdir().unwrap();
        let flash = dir.path().join("flash");
        let options = crate::pool::CreateOptions {
            size: Some(64 << 20),
            ..Default::default()
        };
        crate::pool::create(&flash, &options).unwrap();
        let daemon = start(dir.path());
        (dir, daemon)
    }

    /// A daemon on the pool in `dir`.
    pub(crate) fn start(dir: &std::path::Path) -> Arc<Daemon> {
        let options = Options {
            flash: vec![dir.join("flash")],
            threads: 1,
            images: dir.join("images"),
            state_dir: Some(dir.join("state")),
            ..Options::default()
        };
        Daemon::start(&options).unwrap()
    }

    /// Does what `act` does, beside a change of disk `name` that takes all the time.
    pub(crate) fn beside_a_change<T>(daemon: &Daemon, name: &str, act: impl FnOnce() -> T) -> T {
        let _turn = daemon.turn_for(name).unwrap();
        act()
    }

    /// What adds a disk on a new file.
    pub(crate) fn disk(dir: &std::path::Path, name: &str) -> crate::api::types::DiskAdd {
        let origin = dir.join(format!("{name}.raw"));
        let file = std::fs::File::create(&origin).unwrap();
        file.set_len(16 << 20).unwrap();
        crate::api::types::DiskAdd {
            name: name.to_owned(),
            origin: origin.display().to_string(),
            ..Default::default()
        }
    }

    /// The same with a disk.
    pub(crate) fn with_disk(name: &str) -> (tempfile::TempDir, Arc<Daemon>) {
        let (dir, daemon) = daemon();
        daemon.add(disk(dir.path(), name)).unwrap();
        (dir, daemon)
    }
}
