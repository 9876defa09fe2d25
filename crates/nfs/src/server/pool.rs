//! An export's workers.
//!
//! A file that hangs must not hold up others: at most half of the workers are ever busy with one
//! file. And what hangs must not be overtaken by its own repetition: if a change of a file was not finished
//! in time, its client was told to ask again; until that change has ended, no other change of
//! the file begins, for it would be covered by the older one when that ends at last.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::flight::Flight;
use crate::handle::Key;

/// Most calls that wait for a worker. All clients together cannot have as many under way.
const WAITING_MAX: usize = 1 << 14;

#[derive(Default)]
struct Spot {
    /// Workers that are busy with it, or about to be.
    running: usize,
    waiting: VecDeque<Arc<Flight>>,
    /// Changes that were not finished in time.
    stuck: usize,
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

    /// Has a call carried out. False if there is no room for it or it would overtake one that hangs.
    pub fn submit(&self, flight: Arc<Flight>) -> bool {
        let mut state = self.lock();
        if state.stop || state.waiting >= WAITING_MAX {
            return false;
        }
        let spot = state.spots.entry(flight.about.spot).or_default();
        if spot.stuck > 0 && flight.about.changes() {
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

    /// True if a call must not begin: it would overtake one that hangs.
    pub fn holds_back(&self, flight: &Flight) -> bool {
        let about = &flight.about;
        let stuck = |spot: &Spot| spot.stuck > 0;
        about.changes() && self.lock().spots.get(&about.spot).is_some_and(stuck)
    }

    /// A change of this file was not finished in time.
    pub fn stuck(&self, spot: &Key) {
        self.lock().spots.entry(*spot).or_default().stuck += 1;
    }

    /// It has ended.
    pub fn unstuck(&self, spot: &Key) {
        let mut state = self.lock();
        if let Some(s) = state.spots.get_mut(spot) {
            s.stuck = s.stuck.saturating_sub(1);
            if s.stuck == 0 && s.running == 0 {
                state.spots.remove(spot);
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
            let spot = flight.about.spot;
            let overtakes =
                flight.about.changes() && state.spots.get(&spot).is_some_and(|s| s.stuck > 0);
            drop(state);
            if overtakes {
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
            if spot.running == 0 && spot.stuck == 0 {
                state.spots.remove(key);
            }
        }
    }
}
