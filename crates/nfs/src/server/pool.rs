//! An export's workers.
//!
//! A file that hangs must not hold up others: at most half of the workers are ever busy with one
//! file. And what hangs must not be overtaken by its own repetition: if a change of a file was not finished
//! in time, its client was told to ask again; until that change has ended, no other change of
//! the file begins, for it would be covered by the older one when that ends at last. Nor may what hangs become more and more: a read of a
//! file that is cached elsewhere holds no worker while it waits, but memory, and its client asks again every few seconds.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::flight::{About, Flight};
use crate::handle::Key;

/// Most calls that wait for a worker. All clients together cannot have as many under way.
const WAITING_MAX: usize = 1 << 14;

/// Reads of one file that may hang; others of it are not begun then.
pub const HUNG_READS_MAX: usize = 64;

#[derive(Default)]
struct Spot {
    /// Workers that are busy with it, or about to be.
    running: usize,
    waiting: VecDeque<Arc<Flight>>,
    /// Changes that were not finished in time.
    stuck: usize,
    /// Reads of which that is so.
    hung: usize,
}

impl Spot {
    fn holds_back(&self, about: &About) -> bool {
        (about.changes() && self.stuck > 0) || (about.reads() && self.hung >= HUNG_READS_MAX)
    }

    fn hanging(&mut self, about: &About) -> Option<&mut usize> {
        if about.changes() {
            Some(&mut self.stuck)
        } else if about.reads() {
            Some(&mut self.hung)
        } else {
            None
        }
    }

    fn is_idle(&self) -> bool {
        self.running == 0 && self.stuck == 0 && self.hung == 0
    }
}

#[derive(Default)]
struct State {
    ready: VecDeque<Arc<Flight>>,
    spots: HashMap<Key, Spot>,
    waiting: usize,
    stop: bool,
}

/// See the module.
pub(super) struct Pool {
    state: Mutex<State>,
    bell: Condvar,
    spot_max: usize,
}

impl Pool {
    /// As many threads. They end when the pool is [stopped](Self::stop).
    pub fn start(workers: usize) -> std::io::Result<Arc<Pool>> {
        let workers = workers.max(2);
        let pool = Arc::new(Pool {
            state: Mutex::default(),
            bell: Condvar::new(),
            spot_max: workers / 2,
        });
        for n in 0..workers {
            let mine = Arc::clone(&pool);
            let spawned = thread::Builder::new()
                .name(format!("nfs-worker-{n}"))
                .spawn(move || mine.work());
            if let Err(error) = spawned {
                pool.stop();
                return Err(error);
            }
        }
        Ok(pool)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a call carried out. False if there is no room for it, or if it must not begin.
    pub fn submit(&self, flight: Arc<Flight>) -> bool {
        let mut state = self.lock();
        if state.stop || state.waiting >= WAITING_MAX {
            return false;
        }
        let spot = state.spots.entry(flight.about.spot).or_default();
        if spot.holds_back(&flight.about) {
            return false;
        }
        if spot.running < self.spot_max {
            spot.running += 1;
            state.ready.push_back(flight);
            self.bell.notify_one();
        } else {
            spot.waiting.push_back(flight);
        }
        state.waiting += 1;
        true
    }

    /// True if a call must not begin: it would overtake a change that hangs, or be one read too many that does.
    pub fn holds_back(&self, flight: &Flight) -> bool {
        let about = &flight.about;
        let state = self.lock();
        let spot = state.spots.get(&about.spot);
        spot.is_some_and(|spot| spot.holds_back(about))
    }

    /// A call was begun and not finished in time.
    pub fn stuck(&self, about: &About) {
        let mut state = self.lock();
        let spot = state.spots.entry(about.spot).or_default();
        if let Some(count) = spot.hanging(about) {
            *count += 1;
        }
    }

    /// It has ended.
    pub fn unstuck(&self, about: &About) {
        let mut state = self.lock();
        if let Some(spot) = state.spots.get_mut(&about.spot) {
            if let Some(count) = spot.hanging(about) {
                *count = count.saturating_sub(1);
            }
            if spot.is_idle() {
                state.spots.remove(&about.spot);
            }
        }
    }

    /// No further calls; those that wait are still carried out.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.bell.notify_all();
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some(flight) = state.ready.pop_front() else {
                if state.stop {
                    return;
                }
                state = self
                    .bell
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.waiting -= 1;
            let about = &flight.about;
            let spot = about.spot;
            let held = state.spots.get(&spot).is_some_and(|s| s.holds_back(about));
            drop(state);
            if held {
                flight.expire();
            } else if let Some(job) = flight.begin() {
                job(&flight, None);
            }
            drop(flight);
            state = self.lock();
            self.leave(&mut state, &spot);
        }
    }

    /// A worker has done with a file: the next call about it is ready.
    fn leave(&self, state: &mut State, key: &Key) {
        let Some(spot) = state.spots.get_mut(key) else {
            return;
        };
        if let Some(next) = spot.waiting.pop_front() {
            state.ready.push_back(next);
            self.bell.notify_one();
        } else {
            spot.running -= 1;
            if spot.is_idle() {
                state.spots.remove(key);
            }
        }
    }
}
