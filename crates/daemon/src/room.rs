//! Writes are taken only as long as what they leave on flash has a place where it belongs.
//!
//! The file of a disk may be sparse, on a file system that others fill as well. A write into a hole is answered from
//! flash, and its place is taken much later: if there is none left by then, what was answered cannot be written
//! back. So a write to a disk with a sparse file is taken only while its file system has room for all that is
//! dirty, of whatever disks lie on it; a mirror needs room on that of each leg. Else it is answered at once that there is
//! none, as the file system itself would have said.
//!
//! Asking a file system may block, so the data threads do not. Each file system has a *limit* for what may be taken
//! since it was first asked; who takes, adds to what is *taken*, and that is all as long as the limit is not reached and not
//! too old. Otherwise the write is held, and a thread that may block asks anew ([`crate::daemon`], `rooms.rs`).
//!
//! **Why nothing is missed.** Who asks looks first at what is taken, then waits until every thread that was handing writes
//! to the engine is through: all that was taken by then is in the engine, which counts it until the origin has it, and
//! what is taken later counts against the new limit. What is free is asked for last: what reached the
//! origin in between is counted twice, and never not at all.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use hearth_engine::api::{DiskId, ReqOp, Request};
use hearth_io::{BLOCK, Device};

use crate::daemon::lock;
use crate::gate::{LANES, Lane, Passing, lane};

/// Left alone: what a file system needs for itself when it writes what is dirty.
const SLACK: u64 = 4 << 20;
/// The same for one byte in so many that are dirty: the map of a file that was a hole grows with what is written into it.
const MAP_SHARE: u64 = 64;
/// How long an answer of a file system is good for, and how long at most: others may take what is free in the meantime,
/// at about this rate.
const FRESH: Duration = Duration::from_millis(500);
const FRESH_MOST: Duration = Duration::from_secs(20);
const OTHERS_RATE: u64 = 256 << 20;
/// An answer that is used is renewed when it is good for no longer than this.
pub(crate) const AHEAD: Duration = Duration::from_millis(400);
/// Least time from what was told of a disk's room until it is told again that there is none.
const QUIET_TIME: Duration = Duration::from_secs(60);
/// Longest wait for threads that are handing writes to the engine.
const THROUGH_TIME: Duration = Duration::from_millis(200);

/// A bit for each disk there can be.
struct Bits(Box<[AtomicU64]>);

impl Bits {
    fn new() -> Bits {
        Bits((0..1024).map(|_| AtomicU64::new(0)).collect())
    }

    fn has(&self, id: DiskId) -> bool {
        let word = self.0.get(usize::from(id) / 64);
        word.is_some_and(|word| word.load(Ordering::SeqCst) & (1 << (id % 64)) != 0)
    }

    fn set(&self, id: DiskId, on: bool) {
        let Some(word) = self.0.get(usize::from(id) / 64) else {
            return;
        };
        match on {
            true => word.fetch_or(1 << (id % 64), Ordering::SeqCst),
            false => word.fetch_and(!(1 << (id % 64)), Ordering::SeqCst),
        };
    }
}

/// What may be taken of a file system.
#[derive(Default)]
pub(crate) struct Place {
    /// Bytes that were taken since the first time it was asked, and how many may be.
    taken: AtomicU64,
    limit: AtomicU64,
    /// Until when the limit is good, on the clock of requests.
    until_ns: AtomicU64,
    /// What was taken when it was last asked.
    seen: AtomicU64,
    known: AtomicBool,
    /// A disk that lies on it.
    disk: AtomicU16,
}

impl Place {
    fn take(&self, len: u64, now_ns: u64) -> bool {
        now_ns < self.until_ns.load(Ordering::SeqCst) && self.take_known(len)
    }

    /// The same, however old the limit is.
    fn take_known(&self, len: u64) -> bool {
        let after = |taken: u64| {
            let after = taken.checked_add(len)?;
            (after <= self.limit.load(Ordering::SeqCst)).then_some(after)
        };
        let taken = &self.taken;
        taken
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, after)
            .is_ok()
    }

    fn give_back(&self, len: u64) {
        self.taken.fetch_sub(len, Ordering::SeqCst);
    }

    /// Begins to ask it: what was taken so far.
    pub(crate) fn begin(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// There are `free` bytes, and `needed` of them are spoken for by what was taken before it was asked. Tells
    /// what may be taken.
    pub(crate) fn learn(&self, begun: u64, free: u64, needed: u64, now_ns: u64) -> u64 {
        let needed = needed.saturating_add(needed / MAP_SHARE);
        let left = free.saturating_sub(needed).saturating_sub(SLACK);
        let good = Duration::from_millis(left.saturating_mul(1000) / OTHERS_RATE);
        let good = good.clamp(FRESH, FRESH_MOST);
        self.limit
            .store(begun.saturating_add(left), Ordering::SeqCst);
        self.seen.store(begun, Ordering::SeqCst);
        let until = now_ns.saturating_add(good.as_nanos() as u64);
        self.until_ns.store(until, Ordering::SeqCst);
        self.known.store(true, Ordering::SeqCst);
        left
    }

    /// Something was taken since it was asked.
    fn is_used(&self) -> bool {
        self.taken.load(Ordering::SeqCst) != self.seen.load(Ordering::SeqCst)
    }

    /// It is used, and will soon have to be asked.
    fn is_due(&self, now_ns: u64) -> bool {
        let soon = now_ns.saturating_add(AHEAD.as_nanos() as u64);
        self.is_used() && self.until_ns.load(Ordering::SeqCst) <= soon
    }
}

/// A file system, and how many files of a disk lie on it.
pub(crate) type OnPlace = (Arc<Place>, u64);

/// What a disk with a sparse file lies on.
pub(crate) struct Thin {
    pub(crate) device: Weak<Device>,
    /// Parts of it were given back since it was opened.
    punched: AtomicBool,
    places: RwLock<Vec<OnPlace>>,
    told: Mutex<Told>,
}

/// What was told of a disk's room.
#[derive(Default)]
struct Told {
    /// That there is none, and not since that there is.
    refuses: bool,
    at: Option<Instant>,
}

impl Thin {
    pub(crate) fn places(&self) -> Vec<OnPlace> {
        let places = self.places.read();
        places.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Is it to be told that there is room, or that there is none? What comes and goes is not told each time.
    pub(crate) fn is_news(&self, there_is: bool) -> bool {
        let mut told = lock(&self.told);
        let quiet = told.at.is_some_and(|at| at.elapsed() < QUIET_TIME);
        let news = told.refuses == there_is && (there_is || !quiet);
        if news {
            told.refuses = !there_is;
            told.at = Some(Instant::now());
        }
        news
    }

    /// Takes `len` bytes on each of its places, or nothing.
    fn take_each(&self, len: u64, take: impl Fn(&Place, u64) -> bool) -> bool {
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        let of = |files: u64| len.saturating_mul(files);
        let got = places
            .iter()
            .position(|(place, files)| !take(place, of(*files)));
        let Some(failed) = got else {
            return !places.is_empty();
        };
        for (place, files) in &places[..failed] {
            place.give_back(of(*files));
        }
        false
    }

    /// The same, as far as the limits are known and however old they are; of what was never asked, all is to be had.
    pub(crate) fn take_known(&self, len: u64) -> bool {
        let known = |place: &Place| place.known.load(Ordering::SeqCst);
        let places = self.places();
        if places.iter().all(|(place, _)| !known(place)) {
            return true;
        }
        self.take_each(len, |place, len| !known(place) || place.take_known(len))
    }

    /// The same with limits that were just asked for.
    pub(crate) fn take(&self, len: u64) -> bool {
        self.take_each(len, Place::take_known)
    }
}

/// Bytes of the whole blocks that a request touches.
pub(crate) fn whole(req: &Request) -> u64 {
    let end = req.offset.saturating_add(req.len).div_ceil(BLOCK);
    end.saturating_sub(req.offset / BLOCK) * BLOCK
}

fn needs_room(op: ReqOp) -> bool {
    matches!(
        op,
        ReqOp::Write { .. } | ReqOp::WriteZeroes { punch: false, .. }
    )
}

fn gives_back(op: ReqOp) -> bool {
    matches!(
        op,
        ReqOp::Discard { .. } | ReqOp::WriteZeroes { punch: true, .. }
    )
}

/// A write that waits until it is known whether there is room.
pub(crate) struct HeldWrite {
    pub(crate) req: Request,
    pub(crate) since: Instant,
}

#[derive(Default)]
struct Held {
    writes: Vec<HeldWrite>,
    /// Disks that somebody is asking for.
    asking: Vec<DiskId>,
    stop: bool,
}

/// Who may write, as far as room goes.
pub(crate) struct Rooms {
    /// Disks with files of which parts may take no space, and those of which that is so or not known.
    watched: Bits,
    thin: Bits,
    disks: RwLock<BTreeMap<DiskId, Arc<Thin>>>,
    places: Mutex<BTreeMap<u64, Weak<Place>>>,
    passing: [Lane; LANES],
    /// Writes that were let go, and are not in the engine yet.
    pub(crate) on_the_way: AtomicUsize,
    held: Mutex<Held>,
    changed: Condvar,
}

impl Default for Rooms {
    fn default() -> Rooms {
        Rooms {
            watched: Bits::new(),
            thin: Bits::new(),
            disks: RwLock::default(),
            places: Mutex::default(),
            passing: Default::default(),
            on_the_way: AtomicUsize::new(0),
            held: Mutex::default(),
            changed: Condvar::new(),
        }
    }
}

impl Rooms {
    /// A disk is served from this, from now on.
    pub(crate) fn watch(&self, id: DiskId, device: &Arc<Device>) {
        let files = device.file().is_some_and(|file| !file.is_device());
        if !files && crate::mirror::of(device).is_none() {
            return self.forget(id);
        }
        let thin = Thin {
            device: Arc::downgrade(device),
            punched: AtomicBool::new(false),
            places: RwLock::default(),
            told: Mutex::default(),
        };
        let mut disks = self.disks.write().unwrap_or_else(PoisonError::into_inner);
        disks.insert(id, Arc::new(thin));
        drop(disks);
        self.thin.set(id, true);
        self.watched.set(id, true);
    }

    /// The disk is served no more, or from what has no files.
    pub(crate) fn forget(&self, id: DiskId) {
        self.watched.set(id, false);
        self.thin.set(id, false);
        let mut disks = self.disks.write().unwrap_or_else(PoisonError::into_inner);
        disks.remove(&id);
    }

    /// Its files have become larger, or others.
    pub(crate) fn look_again(&self, id: DiskId) {
        if self.watched.has(id) {
            self.thin.set(id, true);
        }
        if let Some(thin) = self.disk(id) {
            let mut places = thin.places.write().unwrap_or_else(PoisonError::into_inner);
            places.clear();
        }
    }

    pub(crate) fn disk(&self, id: DiskId) -> Option<Arc<Thin>> {
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        disks.get(&id).cloned()
    }

    /// All disks that lie on a place.
    pub(crate) fn on(&self, place: &Arc<Place>) -> Vec<(DiskId, Arc<Thin>, u64)> {
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        let lies = |(id, thin): (&DiskId, &Arc<Thin>)| {
            let places = thin.places();
            let mine = places.iter().find(|(p, _)| Arc::ptr_eq(p, place))?;
            Some((*id, thin.clone(), mine.1))
        };
        disks.iter().filter_map(lies).collect()
    }

    /// Its files lie on these file systems; on none: all of them takes its space already.
    pub(crate) fn settle(&self, id: DiskId, thin: &Thin, file_systems: &BTreeMap<u64, u64>) {
        let mut known = lock(&self.places);
        known.retain(|_, place| place.strong_count() > 0);
        let mut on = Vec::new();
        for (file_system, files) in file_systems {
            let there = known.get(file_system).and_then(Weak::upgrade);
            let place = there.unwrap_or_else(|| {
                let place = Arc::<Place>::default();
                known.insert(*file_system, Arc::downgrade(&place));
                place
            });
            place.disk.store(id, Ordering::SeqCst);
            on.push((place, *files));
        }
        drop(known);
        let full = on.is_empty();
        *thin.places.write().unwrap_or_else(PoisonError::into_inner) = on;
        if full {
            self.thin.set(id, false);
            // A part may have been given back in between.
            if thin.punched.load(Ordering::SeqCst) {
                self.thin.set(id, true);
            }
        }
    }

    /// Were parts of a disk given back since it was opened? Then its files are sparse, or will be.
    pub(crate) fn was_punched(thin: &Thin) -> bool {
        thin.punched.load(Ordering::SeqCst)
    }

    /// Takes out of `reqs` the writes for which it is not known that there is room. The rest may be handed to the
    /// engine as long as what is returned lives.
    pub(crate) fn pass(&self, now_ns: u64, reqs: &mut Vec<Request>) -> Option<Passing<'_>> {
        let concerns = |req: &Request| {
            (needs_room(req.op) || gives_back(req.op)) && self.watched.has(req.disk)
        };
        if !reqs.iter().any(concerns) {
            return None;
        }
        let passing = self.passing.get(lane()).map(|lane| {
            // Before taking: who asks looks at what is taken, and then at this.
            lane.0.fetch_add(1, Ordering::SeqCst);
            Passing(&lane.0)
        });
        let waits = |req: &mut Request| {
            if !self.watched.has(req.disk) {
                return false;
            }
            if gives_back(req.op) {
                if let Some(thin) = self.disk(req.disk) {
                    thin.punched.store(true, Ordering::SeqCst);
                }
                self.thin.set(req.disk, true);
                return false;
            }
            let is_thin = needs_room(req.op) && self.thin.has(req.disk);
            let len = whole(req);
            let got = |thin: Arc<Thin>| thin.take_each(len, |p, len| p.take(len, now_ns));
            is_thin && self.disk(req.disk).is_some_and(|thin| !got(thin))
        };
        let since = Instant::now();
        let held: Vec<HeldWrite> = reqs
            .extract_if(.., waits)
            .map(|req| HeldWrite { req, since })
            .collect();
        if !held.is_empty() {
            lock(&self.held).writes.extend(held);
            self.changed.notify_all();
        }
        passing
    }

    /// Waits, within bounds, until all that was taken so far is in the engine.
    pub(crate) fn wait_through(&self) {
        let end = Instant::now() + THROUGH_TIME;
        let ways = self.passing.iter().map(|lane| &lane.0);
        for way in ways.chain([&self.on_the_way]) {
            while way.load(Ordering::SeqCst) > 0 && Instant::now() < end {
                std::thread::yield_now();
            }
        }
    }

    /// Disks with writes that are held and for which nobody is asking. Waits for some for at most `time`; `None` when there is
    /// nothing to wait for any more.
    pub(crate) fn wait(&self, time: Duration) -> Option<Vec<DiskId>> {
        let free = |held: &Held| {
            let writes = held.writes.iter();
            let mut ids: Vec<DiskId> = writes.map(|held| held.req.disk).collect();
            ids.sort_unstable();
            ids.dedup();
            ids.retain(|id| !held.asking.contains(id));
            ids
        };
        let held = lock(&self.held);
        let waited = self
            .changed
            .wait_timeout_while(held, time, |held| !held.stop && free(held).is_empty());
        let (held, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match held.stop {
            true => None,
            false => Some(free(&held)),
        }
    }

    /// Somebody begins to ask for a disk; false if somebody does already.
    pub(crate) fn begin(&self, id: DiskId) -> bool {
        let mut held = lock(&self.held);
        let begins = !held.asking.contains(&id);
        if begins {
            held.asking.push(id);
        }
        begins
    }

    /// Nobody asks for it any more.
    pub(crate) fn end(&self, id: DiskId) {
        lock(&self.held).asking.retain(|other| *other != id);
        self.changed.notify_all();
    }

    /// The writes of a disk that are held, of all disks for `None`; those only that `which` says.
    pub(crate) fn take_held(
        &self,
        id: Option<DiskId>,
        which: impl Fn(&HeldWrite) -> bool,
    ) -> Vec<HeldWrite> {
        let mut held = lock(&self.held);
        let mine = |write: &mut HeldWrite| id.is_none_or(|id| write.req.disk == id) && which(write);
        held.writes.extract_if(.., mine).collect()
    }

    /// Gives back writes that still cannot be decided.
    pub(crate) fn hold_again(&self, writes: Vec<HeldWrite>) {
        lock(&self.held).writes.extend(writes);
    }

    /// A disk of each place that is used and will soon have to be asked.
    pub(crate) fn due(&self, now_ns: u64) -> Vec<DiskId> {
        let places = lock(&self.places);
        let places = places.values().filter_map(Weak::upgrade);
        let due = places.filter(|place| place.is_due(now_ns));
        due.map(|place| place.disk.load(Ordering::SeqCst)).collect()
    }

    /// Nothing waits, and no place is used.
    pub(crate) fn is_quiet(&self) -> bool {
        let places = lock(&self.places);
        let mut places = places.values().filter_map(Weak::upgrade);
        let used = places.any(|place| place.is_used());
        !used && lock(&self.held).writes.is_empty()
    }

    /// Nobody waits for more.
    pub(crate) fn stop(&self) {
        lock(&self.held).stop = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn disk(rooms: &Rooms, id: DiskId, dir: &std::path::Path) -> (Arc<Device>, Arc<Thin>) {
        let path = dir.join(id.to_string());
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(16 * MIB).unwrap();
        let mode = hearth_io::OpenMode::default();
        let device = Arc::new(Device::new(
            hearth_io::BlockFile::open(&path, mode).unwrap(),
        ));
        rooms.watch(id, &device);
        let thin = rooms.disk(id).unwrap();
        (device, thin)
    }

    fn write(id: DiskId, offset: u64, len: u64) -> Request {
        Request::new(0, id, ReqOp::Write { fua: false }, offset, len, None, 0)
    }

    fn passes(rooms: &Rooms, now: u64, req: Request) -> bool {
        let mut reqs = vec![req];
        drop(rooms.pass(now, &mut reqs));
        rooms.take_held(None, |_| true);
        !reqs.is_empty()
    }

    /// Two disks on one file system, and one of them on another one as well.
    #[test]
    fn what_one_disk_takes_the_other_has_not_got() {
        let dir = tempfile::tempdir().unwrap();
        let rooms = Rooms::default();
        let (_a, a) = disk(&rooms, 1, dir.path());
        let (_b, b) = disk(&rooms, 2, dir.path());
        // Nobody was asked yet.
        assert!(!passes(&rooms, 0, write(1, 0, 4096)));
        rooms.settle(1, &a, &[(7, 1)].into());
        rooms.settle(2, &b, &[(7, 1), (8, 1)].into());
        let (seven, eight) = (a.places()[0].0.clone(), b.places()[1].0.clone());
        assert!(Arc::ptr_eq(&seven, &b.places()[0].0));
        assert_eq!(seven.learn(0, SLACK + 3 * 4096, 0, 0), 3 * 4096);
        eight.learn(0, SLACK + 4096, 0, 0);
        assert!(passes(&rooms, 0, write(2, 100, 200)));
        // There is room on one of its legs only, and nothing is taken of that.
        assert!(!passes(&rooms, 0, write(2, 0, 4096)));
        assert_eq!(seven.begin(), 4096);
        // Two blocks are touched.
        assert!(passes(&rooms, 0, write(1, 4000, 200)));
        assert!(!passes(&rooms, 0, write(1, 0, 1)));
        // Other disks, and what needs no room.
        assert!(passes(&rooms, 0, write(3, 0, 4096)));
        let flush = Request::new(0, 1, ReqOp::Flush, 0, 0, None, 0);
        assert!(passes(&rooms, 0, flush));
        rooms.forget(1);
        assert!(passes(&rooms, 0, write(1, 0, 4096)));
    }

    #[test]
    fn what_was_taken_while_it_was_asked_counts_and_old_limits_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let rooms = Rooms::default();
        let (_device, thin) = disk(&rooms, 1, dir.path());
        rooms.settle(1, &thin, &[(7, 1)].into());
        let place = thin.places()[0].0.clone();
        place.learn(0, SLACK + 2 * 4096, 0, 0);
        let begun = place.begin();
        assert!(passes(&rooms, 0, write(1, 0, 4096)));
        // What was dirty already needs half of it, with its share of the file's map.
        place.learn(begun, SLACK + 2 * 4096 + 64, 4096, 0);
        assert!(!passes(&rooms, 0, write(1, 0, 4096)));
        place.learn(place.begin(), SLACK + 2 * 4096, 0, 0);
        let old = FRESH.as_nanos() as u64;
        assert!(!passes(&rooms, old, write(1, 0, 4096)));
        assert!(!place.is_due(0));
        assert!(passes(&rooms, old - 1, write(1, 0, 4096)));
        assert!(place.is_due(old) && rooms.due(old) == [1]);
        // Whoever hears nothing goes by what was said last.
        assert!(thin.take_known(4096) && !thin.take_known(4096));
    }

    #[test]
    fn a_file_that_takes_all_its_space_needs_none_until_some_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let rooms = Rooms::default();
        let (_device, thin) = disk(&rooms, 1, dir.path());
        rooms.settle(1, &thin, &BTreeMap::new());
        assert!(passes(&rooms, 0, write(1, 0, 4096)));
        assert!(passes(
            &rooms,
            0,
            Request::new(0, 1, ReqOp::Discard { fua: false }, 0, 4096, None, 0)
        ));
        assert!(!passes(&rooms, 0, write(1, 0, 4096)));
        // Somebody had asked before that, and says so after it.
        rooms.settle(1, &thin, &BTreeMap::new());
        assert!(!passes(&rooms, 0, write(1, 0, 4096)));
        assert!(Rooms::was_punched(&thin));
    }

    #[test]
    fn each_disk_is_asked_for_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let rooms = Rooms::default();
        let (_device, thin) = disk(&rooms, 1, dir.path());
        let mut reqs = vec![write(1, 0, 4096), write(2, 0, 4096)];
        drop(rooms.pass(0, &mut reqs));
        assert_eq!(reqs.len(), 1);
        assert_eq!(rooms.wait(Duration::ZERO), Some(vec![1]));
        assert!(rooms.begin(1) && !rooms.begin(1));
        assert_eq!(rooms.wait(Duration::ZERO), Some(vec![]));
        rooms.end(1);
        assert_eq!(rooms.wait(Duration::ZERO), Some(vec![1]));
        assert_eq!(rooms.take_held(Some(2), |_| true).len(), 0);
        assert_eq!(rooms.take_held(Some(1), |_| true).len(), 1);
        rooms.stop();
        assert_eq!(rooms.wait(Duration::from_secs(60)), None);
        assert!(thin.is_news(false) && !thin.is_news(false));
        // Again within the minute: that it is back is told, that it is gone once more is not.
        assert!(thin.is_news(true) && !thin.is_news(true) && !thin.is_news(false));
    }
}
