//! Scrubs of a datastore in two directories.
//!
//! A scrub compares both directories while clients use them ([`crate::twin::scrub`]). Only a cached copy that a guest wrote
//! shows which directory is right: it was written to both. Other differences are listed and nothing is written until an
//! administrator names the directory that is right. The progress is stored every few seconds, so that a scrub continues
//! after a restart.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use hearth_mirror::machine::{Finding, UNDECIDED_MAX};
use hearth_mirror::{Cached, Habits, ScrubOrder, ScrubState, host_time};
use hearth_nfs::identity::replace;
use hearth_trees::pair::{PART, Place};
use serde::{Deserialize, Serialize};

use super::{Inner, lock};
use crate::twin::Twin;
use crate::twin::scrub::{Difference, PIECE, Skipped, What};

/// How often it is looked whether a scrub is due.
const ROUND: Duration = Duration::from_secs(60);
/// How often the progress is stored.
const KEEP: Duration = Duration::from_secs(10);
/// Wait while one directory is not current.
const AWAY: Duration = Duration::from_secs(1);
/// A place where a directory fails so often is left out.
const TRIES_MAX: u32 = 3;
/// A file of the datastore's state directory.
const NAME: &str = "scrub.json";
/// Its largest size: many differences with long paths.
const SIZE_MAX: u64 = 16 << 20;

/// How a datastore is scrubbed, and the result of the scrub under way or the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Scrub {
    /// Rate, interval and counts. `at` is the number of a file or directory; `undecided` is empty.
    pub habits: Habits,
    /// Places where nothing shows what is right; the first [`UNDECIDED_MAX`].
    pub differences: Vec<Difference>,
}

/// Why an order about scrubs is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The datastore has one directory.
    OneDirectory,
    /// A scrub is under way.
    Active,
    /// The preferred directory is none of the datastore's.
    NoDirectory,
    /// Nothing is undecided.
    Decided,
    /// One directory is not current.
    NotCurrent,
}

/// The state of scrubs.
pub(super) struct Scrubs {
    state: Mutex<Scrub>,
    cancelled: AtomicBool,
    /// Listed differences are being decided: no scrub begins meanwhile.
    deciding: AtomicBool,
}

impl Scrubs {
    pub fn new(twin: Option<&Twin>) -> Scrubs {
        let mut scrub = twin.map_or_else(Scrub::default, |twin| load(twin.state_dir()));
        let habits = &mut scrub.habits;
        if habits.scrub.ended_ms == 0 && !habits.scrub.active {
            // The first one is due when the interval has passed.
            habits.scrub.ended_ms = host_time()();
        }
        Scrubs {
            state: Mutex::new(scrub),
            cancelled: AtomicBool::new(false),
            deciding: AtomicBool::new(false),
        }
    }
}

fn load(dir: &Path) -> Scrub {
    let path = dir.join(NAME);
    let is_small = std::fs::metadata(&path).is_ok_and(|meta| meta.len() <= SIZE_MAX);
    let read = is_small.then(|| std::fs::read(&path).ok()).flatten();
    let parsed = read.map(|bytes| serde_json::from_slice(&bytes));
    match parsed {
        Some(Err(e)) => {
            tracing::warn!("{} is damaged; the scrub starts anew: {e}", path.display());
            Scrub::default()
        }
        Some(Ok(scrub)) => scrub,
        None => Scrub::default(),
    }
}

/// Runs scrubs that are due or were ordered.
pub(super) fn keep(inner: &Weak<Inner>) {
    if let Some(inner) = inner.upgrade() {
        // The time of the first one has to outlive restarts.
        inner.store_scrub();
    }
    loop {
        let Some(inner) = inner.upgrade() else { return };
        if inner.is_stopped() {
            return;
        }
        let now = host_time()();
        let is_due = {
            let mut state = lock(&inner.scrubs.state);
            state.habits.believe_clock(now);
            if state.habits.is_due(now) && !inner.scrubs.deciding.load(Ordering::SeqCst) {
                begin(&mut state, now);
            }
            state.habits.scrub.active
        };
        match is_due {
            true => inner.run_scrub(),
            false => inner.pause_scrub(ROUND),
        }
    }
}

fn begin(state: &mut Scrub, now: u64) {
    state.habits.scrub = ScrubState {
        active: true,
        began_ms: now,
        ended_ms: state.habits.scrub.ended_ms,
        ..ScrubState::default()
    };
    state.differences.clear();
}

impl super::Datastore {
    /// The settings and the result of scrubs; none if the datastore has one directory.
    pub fn scrub_state(&self) -> Option<Scrub> {
        self.inner.dir.twin()?;
        Some(lock(&self.inner.scrubs.state).clone())
    }

    /// Carries out an order about scrubs. Blocks while differences are decided.
    pub fn scrub(&self, order: &ScrubOrder) -> Result<(), Refused> {
        let inner = &self.inner;
        let twin = inner.dir.twin().ok_or(Refused::OneDirectory)?;
        let mut state = lock(&inner.scrubs.state);
        let is_active = state.habits.scrub.active;
        if let Some(directory) = &order.prefer {
            let side = twin.side_of(Path::new(directory));
            let side = side.ok_or(Refused::NoDirectory)?;
            if is_active || inner.scrubs.deciding.swap(true, Ordering::SeqCst) {
                return Err(Refused::Active);
            }
            let _deciding = Deciding(&inner.scrubs.deciding);
            if state.differences.is_empty() {
                return Err(Refused::Decided);
            }
            if !twin.is_whole() {
                return Err(Refused::NotCurrent);
            }
            let differences = state.differences.clone();
            drop(state);
            let all = differences.len() as u64;
            let left = inner.decide(twin, differences, side, directory);
            state = lock(&inner.scrubs.state);
            let decided = all - left.len() as u64;
            let scrub = &mut state.habits.scrub;
            scrub.undecided_all = scrub.undecided_all.saturating_sub(decided);
            state.differences = left;
        } else if order.cancel {
            inner.scrubs.cancelled.store(is_active, Ordering::SeqCst);
        } else if order.begin
            && (is_active && order.anew || inner.scrubs.deciding.load(Ordering::SeqCst))
        {
            return Err(Refused::Active);
        } else if order.begin && !is_active {
            inner.scrubs.cancelled.store(false, Ordering::SeqCst);
            match order.anew || !state.habits.scrub.called_off {
                true => begin(&mut state, host_time()()),
                false => {
                    let scrub = &mut state.habits.scrub;
                    (scrub.active, scrub.called_off) = (true, false);
                }
            }
        }
        if let Some(rate) = order.rate {
            state.habits.scrub_rate = rate;
        }
        if let Some(days) = order.every_days {
            state.habits.every_days = days;
        }
        drop(state);
        inner.store_scrub();
        inner.bell.notify_all();
        Ok(())
    }
}

/// Ends the decision of differences.
struct Deciding<'a>(&'a AtomicBool);

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Limits how many bytes are compared in a second.
struct Pace {
    began: Instant,
    bytes: u64,
}

impl Inner {
    fn store_scrub(&self) {
        let Some(twin) = self.dir.twin() else { return };
        let state = lock(&self.scrubs.state).clone();
        let bytes = serde_json::to_vec_pretty(&state).map_err(std::io::Error::from);
        let stored = bytes.and_then(|bytes| replace(twin.state_dir(), NAME, &bytes));
        if let Err(e) = stored {
            tracing::warn!("the progress of a datastore's scrub cannot be stored: {e}");
        }
    }

    /// Waits until an order comes, the datastore is closed, or the time is over.
    fn pause_scrub(&self, time: Duration) {
        let stop = lock(&self.stop);
        if !*stop {
            let waited = self.bell.wait_timeout(stop, time);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn scrub_ends(&self) -> bool {
        self.is_stopped() || self.scrubs.cancelled.load(Ordering::SeqCst)
    }

    fn run_scrub(&self) {
        let Some(twin) = self.dir.twin() else { return };
        let places = loop {
            if self.scrub_ends() {
                break Vec::new();
            }
            let from = lock(&self.scrubs.state).habits.scrub.at;
            let places = twin
                .is_whole()
                .then(|| twin.places(from, || self.scrub_ends()));
            match places {
                Some(Ok(places)) => break places,
                _ => self.pause_scrub(AWAY),
            }
        };
        let mut pace = Pace {
            began: Instant::now(),
            bytes: 0,
        };
        let mut stored = Instant::now();
        for place in places {
            if self.scrub_ends() {
                break;
            }
            lock(&self.scrubs.state).habits.scrub.at = place.number();
            self.scrub_place(twin, place, &mut pace);
            if stored.elapsed() >= KEEP {
                self.store_scrub();
                stored = Instant::now();
            }
        }
        let is_stopped = self.is_stopped();
        let is_cancelled = self.scrubs.cancelled.swap(false, Ordering::SeqCst);
        let mut state = lock(&self.scrubs.state);
        let scrub = &mut state.habits.scrub;
        if !is_stopped {
            scrub.active = false;
            scrub.called_off = is_cancelled;
            scrub.ended_ms = host_time()();
        }
        if !is_stopped && !is_cancelled {
            scrub.at = 0;
        }
        let ended = (!is_stopped && !is_cancelled).then(|| state.clone());
        drop(state);
        self.store_scrub();
        if let Some(scrub) = ended {
            twin.witness().scrubbed(&scrub);
        }
    }

    /// Repeats a comparison until both directories take part in it; none if the place is gone, the scrub ends, or a
    /// directory fails again and again, which is counted as `bytes` that were not compared.
    fn when_whole<T>(
        &self,
        twin: &Twin,
        bytes: u64,
        compare: impl Fn() -> Result<T, Skipped>,
    ) -> Option<T> {
        let mut tries = 0;
        while !self.scrub_ends() && tries < TRIES_MAX {
            match compare() {
                Ok(done) => return Some(done),
                Err(Skipped::Gone) => return None,
                Err(Skipped::Away) => tries += 1,
            }
            while !twin.is_whole() && !self.scrub_ends() {
                self.pause_scrub(AWAY);
            }
        }
        if tries == TRIES_MAX {
            let unread = &mut lock(&self.scrubs.state).habits.scrub.unread;
            *unread = unread.saturating_add(bytes);
        }
        None
    }

    fn scrub_place(&self, twin: &Twin, place: Place, pace: &mut Pace) {
        // A difference counts when two looks show it.
        let looks_unlike = || self.when_whole(twin, 0, || twin.differs(place)) == Some(true);
        if looks_unlike() && looks_unlike() {
            let what = match place {
                Place::Names(_) => What::Names,
                _ => What::Attributes,
            };
            self.note_difference(twin, place.number(), what, 0, 0);
        }
        let number = place.number();
        let (Place::File(_), Some(len)) = (place, twin.length(number)) else {
            return;
        };
        let mut at = 0;
        while at < len && !self.scrub_ends() {
            let next = self.when_whole(twin, PIECE, || twin.next_data(number, at));
            match next {
                Some(Some(data)) if data < len => at = at.max(data / PIECE * PIECE),
                _ => break,
            }
            self.scrub_piece(twin, number, at);
            at += PIECE;
            pace.bytes += PIECE;
            self.keep_pace(pace);
        }
    }

    fn keep_pace(&self, pace: &mut Pace) {
        let rate = lock(&self.scrubs.state).habits.scrub_rate;
        if rate == 0 {
            return;
        }
        let due = Duration::from_secs_f64(pace.bytes as f64 / rate as f64);
        while !self.scrub_ends()
            && let Some(ahead) = due.checked_sub(pace.began.elapsed())
        {
            self.pause_scrub(ahead.min(AWAY));
        }
        if pace.began.elapsed() >= KEEP {
            *pace = Pace {
                began: Instant::now(),
                bytes: 0,
            };
        }
    }

    /// Compares a piece of a file, and repairs differences that a copy written by a guest decides.
    fn scrub_piece(&self, twin: &Twin, number: u64, offset: u64) {
        let key = Twin::key(number);
        let compared = self.when_whole(twin, PIECE, || {
            twin.compare(number, offset, PIECE, || self.known_clean(&key, offset))
        });
        let Some((compared, found)) = compared else {
            return;
        };
        {
            let checked = &mut lock(&self.scrubs.state).habits.scrub.checked;
            *checked = checked.saturating_add(compared);
        }
        if found.is_empty() {
            return;
        }
        // The file is opened as for a client's read, so that its cached copies count.
        if self.is_known(&key).is_some()
            && let Ok((_using, Some(cached))) = self.begin(&key)
        {
            let cache = self.disks.cache(cached.disk);
            match cached.origin.reconcile(offset, PIECE, &*cache, None) {
                Ok(Some(done)) => {
                    let mut state = lock(&self.scrubs.state);
                    let scrub = &mut state.habits.scrub;
                    let bytes = done.repaired.iter().map(|(_, len)| len).sum();
                    scrub.repairs = scrub.repairs.saturating_add(done.repaired.len() as u64);
                    scrub.repaired = scrub.repaired.saturating_add(bytes);
                    drop(state);
                    for place in done.undecided {
                        let what = match place.cached {
                            true => What::Cached,
                            false => What::Content,
                        };
                        self.note_difference(twin, number, what, place.offset, place.len);
                    }
                    return;
                }
                Ok(None) => {}
                Err(e) => tracing::warn!(file = %twin.shown(number), "cannot repair: {e}"),
            }
        }
        for finding in found {
            let (at, len) = match finding {
                Finding::Right { offset, len, .. } => (offset, len),
                Finding::Undecided(place) => (place.offset, place.len),
            };
            self.note_difference(twin, number, What::Content, at, len);
        }
    }

    /// Clean blocks of a piece of a file that is in use.
    fn known_clean(&self, key: &hearth_nfs::handle::Key, offset: u64) -> Vec<Cached> {
        let cached = lock(&self.files).get(key).and_then(|file| file.cached());
        cached.map_or_else(Vec::new, |cached| {
            self.disks.cache(cached.disk).clean(offset, PIECE)
        })
    }

    fn note_difference(&self, twin: &Twin, number: u64, what: What, offset: u64, len: u64) {
        let path = twin.shown(number);
        let found = Difference {
            number,
            path,
            what,
            offset,
            len,
        };
        let mut state = lock(&self.scrubs.state);
        // A scrub that continues begins the file anew where it was.
        if state.differences.contains(&found) {
            return;
        }
        let all = &mut state.habits.scrub.undecided_all;
        *all = all.saturating_add(1);
        if state.differences.len() < UNDECIDED_MAX {
            state.differences.push(found);
        }
    }

    /// Makes listed places as they are in tree `side`; those where that failed.
    fn decide(
        &self,
        twin: &Twin,
        differences: Vec<Difference>,
        side: usize,
        directory: &str,
    ) -> Vec<Difference> {
        let mut left = Vec::new();
        let mut rest = Vec::new();
        for place in differences {
            let Difference {
                number,
                offset,
                len,
                ..
            } = place;
            let key = Twin::key(number);
            let is_data = matches!(place.what, What::Content | What::Cached);
            if is_data && self.is_known(&key).is_some() {
                // One that cannot be opened may have copies of the wrong directory in the cache: it waits.
                let decided = self.begin(&key).ok().and_then(|(_using, cached)| {
                    let cached = cached?;
                    let cache = self.disks.cache(cached.disk);
                    let len = len.min(PIECE);
                    let done = cached.origin.reconcile(offset, len, &*cache, Some(side));
                    Some(done.ok()??.undecided.is_empty())
                });
                if decided != Some(true) {
                    left.push(place);
                }
                continue;
            }
            let part = u32::try_from(offset / PART).unwrap_or(u32::MAX);
            rest.push((
                match place.what {
                    What::Names => Place::Names(number),
                    What::Attributes => Place::File(number),
                    What::Content | What::Cached => Place::Part(number, part),
                },
                place,
            ));
        }
        if rest.is_empty() {
            return left;
        }
        let places: Vec<Place> = rest.iter().map(|(place, _)| *place).collect();
        let why = format!("{} places become as they are in {directory}", places.len());
        // It goes out and returns as after a failure, which is safe at each step.
        if !twin.get_again(1 - side, &places, &why) {
            left.extend(rest.into_iter().map(|(_, place)| place));
        }
        left
    }
}
