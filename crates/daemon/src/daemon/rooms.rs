//! Asks file systems for room, for the writes that are held until it is known ([`crate::room`]).
//!
//! One thread looks which disks have writes that wait, and has a worker ask where that may take as long as it likes. A
//! file system that does not answer holds up nobody for long: what it said last counts then, as far as it goes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_engine::api::{Completion, DiskId, Effects, ReqError, Request};
use hearth_events::Event;
use hearth_io::{BLOCK, BlockFile, Device, now_ns};
use hearth_reactor::ReactorError;

use super::{Daemon, lock};
use crate::room::{self, HeldWrite, Place, Rooms, Thin};
use crate::spot::Mounts;
use crate::workers::Class;

/// How often is looked which limits will soon be too old, and which writes have waited for too long.
const LOOK_TIME: Duration = Duration::from_millis(200);
/// The same while nobody writes.
const QUIET_TIME: Duration = Duration::from_secs(5);
/// How long a write waits for a file system that does not answer.
const HANGS_TIME: Duration = Duration::from_secs(1);
/// Runs of dirty blocks that are compared with a file's map, at most: more of them count in full.
const RUNS_MAX: usize = 32_768;
/// Wait before the data threads are asked again that have too many orders.
const BUSY_TIME: Duration = Duration::from_millis(1);

/// The thread, until dropped.
pub(super) struct RoomKeeper {
    rooms: Arc<Rooms>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for RoomKeeper {
    fn drop(&mut self) {
        self.rooms.stop();
        if let Some(thread) = self.thread.take()
            // It may be the one that drops the last of the daemon.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that looks after room ended abnormally");
        }
    }
}

/// The files of an origin, or of its legs.
fn files_of(device: &Arc<Device>) -> Vec<Arc<Device>> {
    let parts = match crate::mirror::of(device) {
        Some(mirror) => mirror.devices(),
        None => vec![device.clone()],
    };
    let is_file = |part: &Arc<Device>| part.file().is_some_and(|file| !file.is_device());
    parts.into_iter().filter(is_file).collect()
}

/// Bytes of runs of blocks that take no space in a file yet.
fn in_holes(file: &BlockFile, runs: &[(u64, u64)]) -> u64 {
    let missing = |(block, count): &(u64, u64)| {
        let from = (block * BLOCK).min(file.size());
        let to = ((block + count) * BLOCK).min(file.size());
        let Ok(extents) = file.extents(from, to - from) else {
            return to - from;
        };
        let holes = extents.iter().filter(|extent| !extent.data);
        holes.map(|extent| extent.len).sum()
    };
    runs.iter().map(missing).sum()
}

impl Daemon {
    /// Starts it. Until then writes to disks with sparse files wait.
    pub(super) fn start_room_keeper(self: &Arc<Daemon>) -> std::io::Result<RoomKeeper> {
        let (daemon, rooms) = (Arc::downgrade(self), self.rooms.clone());
        let body = move || {
            loop {
                let time = match rooms.is_quiet() {
                    true => QUIET_TIME,
                    false => LOOK_TIME,
                };
                let Some(held) = rooms.wait(time) else {
                    return;
                };
                let Some(daemon) = daemon.upgrade() else {
                    return;
                };
                let mut ids = rooms.due(now_ns());
                ids.extend(held);
                ids.sort_unstable();
                ids.dedup();
                daemon.ask_for_room(&ids);
                daemon.go_on_without_answer();
            }
        };
        let thread = std::thread::Builder::new()
            .name("hearth-room".to_owned())
            .spawn(body)?;
        Ok(RoomKeeper {
            rooms: self.rooms.clone(),
            thread: Some(thread),
        })
    }

    fn ask_for_room(self: &Arc<Daemon>, ids: &[DiskId]) {
        if ids.is_empty() {
            return;
        }
        let mounts = Mounts::now();
        for &id in ids {
            if self.rooms.begin(id) {
                let daemon = self.clone();
                let spot = self.spot_by_id(&mounts, id);
                let work = move || {
                    daemon.decide_held(id);
                    daemon.rooms.end(id);
                };
                self.aside(&spot, Class::Background, work);
            }
        }
    }

    /// Lets go, as far as the old limits allow, what waits for a file system that does not answer.
    fn go_on_without_answer(&self) {
        let old = |held: &HeldWrite| held.since.elapsed() >= HANGS_TIME;
        let (mut go, mut stay) = (Vec::new(), Vec::new());
        for held in self.rooms.take_held(None, old) {
            let len = room::whole(&held.req);
            let thin = self.rooms.disk(held.req.disk);
            match thin.is_none_or(|thin| thin.take_known(len)) {
                true => go.push(held.req),
                false => stay.push(held),
            }
        }
        self.rooms.hold_again(stay);
        self.let_go(go);
    }

    /// Asks where a disk lies, and decides what becomes of its writes that are held. Blocks.
    fn decide_held(&self, id: DiskId) {
        let mut asked = false;
        loop {
            let held = self.rooms.take_held(Some(id), |_| true);
            if held.is_empty() && asked {
                return;
            }
            asked = true;
            let thin = self.rooms.disk(id);
            let device = thin.as_ref().and_then(|thin| thin.device.upgrade());
            let (Some(thin), Some(device)) = (thin, device) else {
                // Who answers for disks that are not there says so.
                self.let_go(held.into_iter().map(|held| held.req).collect());
                return;
            };
            let most = held.iter().map(|held| room::whole(&held.req)).sum();
            // What is held while a file system does not answer is looked after by those who wait for it.
            self.rooms.hold_again(held);
            let files = files_of(&device);
            let needed = self.ask(id, &thin, &files, most);
            let held = self.rooms.take_held(Some(id), |_| true);
            self.answer_held(id, &thin, &files, needed, held);
        }
    }

    /// Takes in how much room there is where a disk lies, of which `most` bytes are wanted now. Tells
    /// how much of it is spoken for. Blocks.
    fn ask(&self, id: DiskId, thin: &Thin, files: &[Arc<Device>], most: u64) -> u64 {
        let mut on: BTreeMap<u64, Vec<&BlockFile>> = BTreeMap::new();
        let mut takes = Rooms::was_punched(thin);
        for file in files.iter().filter_map(|device| device.file()) {
            // Of one that does not say, nothing can be promised or refused.
            if let Ok(Some(space)) = file.space() {
                takes |= space.sparse || space.copies_on_write;
                on.entry(space.file_system).or_default().push(file);
            }
        }
        let counts = on.iter().map(|(fs, files)| (*fs, files.len() as u64));
        let counts = counts.filter(|_| takes).collect();
        self.rooms.settle(id, thin, &counts);
        let mut all = 0;
        // In the same order.
        for ((place, files), on) in thin.places().iter().zip(on.values()) {
            let Some(file) = on.first() else { continue };
            let begun = place.begin();
            self.rooms.wait_through();
            let mut needed = self.needed_on(place);
            let Ok(Some(space)) = file.space() else {
                continue;
            };
            let left = place.learn(begun, space.free, needed, now_ns());
            if left < most.saturating_mul(*files) && !space.copies_on_write {
                needed = self.needed_exactly_on(place);
                if let Ok(Some(space)) = file.space() {
                    place.learn(begun, space.free, needed, now_ns());
                }
            }
            all += needed;
        }
        all
    }

    /// Bytes that all disks on a place may still need of it, overwrites included.
    fn needed_on(&self, place: &Arc<Place>) -> u64 {
        let each = self.rooms.on(place).into_iter().map(|(id, _, files)| {
            let (dirty, others) = self.engine.unplaced(id);
            (dirty + others).saturating_mul(BLOCK).saturating_mul(files)
        });
        each.sum()
    }

    /// The same without what is dirty in parts of files that take their space already.
    fn needed_exactly_on(&self, place: &Arc<Place>) -> u64 {
        let each = self.rooms.on(place).into_iter().map(|(id, thin, files)| {
            let (dirty, others) = self.engine.unplaced(id);
            let others = others.saturating_mul(BLOCK).saturating_mul(files);
            let whole = dirty.saturating_mul(BLOCK).saturating_mul(files);
            let mut runs = Vec::new();
            let mut next = Some(0);
            while let Some(block) = next {
                next = self.engine.dirty_runs(id, block, &mut runs);
                if runs.len() > RUNS_MAX {
                    return others.saturating_add(whole);
                }
            }
            let device = thin.device.upgrade();
            let parts = device.map(|device| files_of(&device)).unwrap_or_default();
            let in_each = |part: &Arc<Device>| part.file().map_or(0, |f| in_holes(f, &runs));
            // Of a mirror, all legs: too much where they lie apart, and never too little.
            let dirty: u64 = parts.iter().map(in_each).sum();
            others.saturating_add(dirty)
        });
        each.sum()
    }

    /// Lets go what there is room for, and answers the rest.
    fn answer_held(
        &self,
        id: DiskId,
        thin: &Thin,
        files: &[Arc<Device>],
        needed: u64,
        held: Vec<HeldWrite>,
    ) {
        // Guests wait for this, and must not wait for who stores the registry.
        let record = self.seen.record(id);
        let through = record
            .as_ref()
            .is_some_and(|record| record.mode != hearth_format::CacheMode::WriteBack);
        let unknown = thin.places().is_empty();
        let (mut go, mut refused, mut took) = (Vec::new(), Vec::new(), false);
        for HeldWrite { req, .. } in held {
            let end = req.offset.saturating_add(req.len);
            let placed = || {
                let has_place = |device: &Arc<Device>| {
                    let copies = |file: &BlockFile| {
                        file.space()
                            .is_ok_and(|s| s.is_some_and(|s| s.copies_on_write))
                    };
                    device
                        .file()
                        .is_none_or(|file| !copies(file) && file.has_place(req.offset, end))
                };
                files.iter().all(has_place)
            };
            // What goes to the origin at once, the origin answers; only what is dirty must not lose its room to it.
            let own = || through && needed == 0;
            let takes = !unknown && thin.take(room::whole(&req));
            took |= takes;
            match unknown || takes || placed() || own() {
                true => go.push(req),
                false => refused.push(req),
            }
        }
        if let Some(record) = record.filter(|_| took || !refused.is_empty()) {
            self.tell_of_room(thin, &record.name, needed, refused.is_empty());
        }
        self.let_go(go);
        self.refuse(refused);
    }

    fn tell_of_room(&self, thin: &Thin, name: &str, needed: u64, there_is: bool) {
        if !thin.is_news(there_is) {
            return;
        }
        let disk = name.to_owned();
        self.events.tell(match there_is {
            true => Event::OriginHasRoom { disk },
            false => Event::OriginNoRoom {
                disk,
                dirty_bytes: needed,
            },
        });
    }

    /// Hands writes to the engine.
    fn let_go(&self, writes: Vec<Request>) {
        if writes.is_empty() {
            return;
        }
        let (door, count) = (self.door.clone(), writes.len());
        self.rooms.on_the_way.fetch_add(count, Ordering::SeqCst);
        let on_the_way = OnTheWay(self.rooms.clone(), count);
        // The job may be sent back, and these with it.
        let parcel = Arc::new(Mutex::new(Some((writes, on_the_way))));
        let job = move |now: u64, fx: &mut Effects, parcel: &Mutex<Option<Parcel>>| {
            if let Some((mut writes, on_the_way)) = lock(parcel).take() {
                door.hand_on(now, &mut writes, fx);
                drop(on_the_way);
            }
        };
        self.on_data_thread(parcel, job);
    }

    /// Answers writes for which there is no room.
    fn refuse(&self, writes: Vec<Request>) {
        if writes.is_empty() {
            return;
        }
        let parcel = Arc::new(Mutex::new(writes));
        let job = |_: u64, fx: &mut Effects, parcel: &Mutex<Vec<Request>>| {
            for req in std::mem::take(&mut *lock(parcel)) {
                fx.completions.push(Completion {
                    owner: req.owner,
                    tag: req.tag,
                    result: Err(ReqError::NoSpace),
                    buf: req.buf,
                });
            }
        };
        self.on_data_thread(parcel, job);
    }

    fn on_data_thread<T: Send + 'static>(
        &self,
        parcel: Arc<Mutex<T>>,
        job: impl Fn(u64, &mut Effects, &Mutex<T>) + Clone + Send + 'static,
    ) {
        loop {
            let (job, parcel) = (job.clone(), parcel.clone());
            match self.reactors.run(move |now, fx| job(now, fx, &parcel)) {
                Ok(()) => return,
                Err(ReactorError::Busy) => std::thread::sleep(BUSY_TIME),
                Err(e) => {
                    tracing::error!("writes that waited for room are not answered: {e}");
                    return;
                }
            }
        }
    }
}

type Parcel = (Vec<Request>, OnTheWay);

/// Writes that were let go and are not in the engine yet, until dropped.
struct OnTheWay(Arc<Rooms>, usize);

impl Drop for OnTheWay {
    fn drop(&mut self) {
        self.0.on_the_way.fetch_sub(self.1, Ordering::SeqCst);
    }
}
