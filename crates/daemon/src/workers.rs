//! Threads for whatever may block.
//!
//! An origin may hang for as long as it likes: a mount whose server is gone, a server that takes
//! connections and says nothing. Who waits for it needs a thread, and threads are bounded. With one bound
//! for all, a few operations that wait for one dead mount hold up every other; with none, each look at a
//! dead mount costs a thread for ever.
//!
//! So every job says at which *spot* it may get stuck: the directory or the server of the origin. A spot
//! has a few workers at most, whatever else there is to do; what is more waits in a queue of the spot's
//! own, and spots take turns. How much of the whole a job may take depends on what it is for
//! ([`Class`]): looking after many dead origins leaves room for what somebody asked for, and that leaves
//! room for answering questions, which waits for no origin at all.
//!
//! Threads are made when there is work and nobody is idle, and end when there is none for a while. Who
//! stops does not wait for a job that hangs: the end of the process ends it.

use crate::sync::{Arc, Condvar, Mutex, MutexGuard, thread};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

/// What a job is for. Each class has what those before it leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Nobody waits for it, and it comes again by itself.
    Background,
    /// Somebody waits for it.
    Asked,
    /// It ends something, or keeps data safe: it must not be left undone.
    Due,
    /// It answers a question, and waits for no origin.
    Answer,
}

pub(crate) const CLASSES: [Class; 4] = [Class::Background, Class::Asked, Class::Due, Class::Answer];

/// Jobs of a class and of those before it that run at one time. A thread takes little but address space,
/// and hundreds of origins that are dead at once are a failure of what they lie on.
pub(crate) const RUNNING_MAX: [usize; CLASSES.len()] = [192, 240, 248, 256];
/// The same at one spot: as many as a disk or server that works has use for.
pub(crate) const RUNNING_MAX_SPOT: [usize; CLASSES.len()] = [12, 14, 16, 16];
/// Jobs of a class that wait at one spot. There is one of each disk at most but for what is asked and
/// answered, which connections bound as well.
pub(crate) const WAITING_MAX: [usize; CLASSES.len()] = [65_536, 256, 65_536, 1024];
/// How long a thread without work stays.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Where a job may get stuck; in words, to be shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spot(String);

impl Spot {
    /// The spot of this name.
    pub fn new(name: impl Into<String>) -> Spot {
        Spot(name.into())
    }
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a job was not taken.
#[derive(Debug)]
pub enum NotTaken {
    /// Too many wait at its spot.
    Full {
        /// Where.
        spot: Spot,
        /// Jobs that run there.
        running: usize,
        /// Jobs that wait there.
        waiting: usize,
    },
    /// The system gives no thread, and there is none that would come to it.
    NoThread(std::io::Error),
}

impl fmt::Display for NotTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotTaken::Full {
                spot,
                running,
                waiting,
            } => write!(
                f,
                "{running} operations run at {spot}, and {waiting} more wait for them already"
            ),
            NotTaken::NoThread(e) => write!(f, "cannot start a thread: {e}"),
        }
    }
}

impl NotTaken {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            NotTaken::Full { .. } => "see whether a device, mount or server hangs there",
            NotTaken::NoThread(_) => "raise the limits on threads and memory of the daemon",
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

struct Job {
    spot: Spot,
    class: Class,
    work: Work,
}

/// Jobs by class.
#[derive(Clone, Copy, Debug, Default)]
struct Running([usize; CLASSES.len()]);

impl Running {
    fn all(&self) -> usize {
        self.0.iter().sum()
    }

    /// May one more of `class` run?
    fn fits(&self, class: Class, most: &[usize; CLASSES.len()]) -> bool {
        let mut sum = 0;
        let sums = self.0.iter().map(|n| {
            sum += n;
            sum
        });
        sums.zip(most)
            .skip(class as usize)
            .all(|(sum, most)| sum < *most)
    }
}

/// What is known of a spot where something runs or waits.
#[derive(Default)]
struct Lane {
    running: Running,
    waiting: [VecDeque<Work>; CLASSES.len()],
    /// It is in the round of the class.
    in_round: [bool; CLASSES.len()],
}

/// Which job comes next.
#[derive(Default)]
struct Plan {
    lanes: BTreeMap<Spot, Lane>,
    /// Spots where a job of the class waits for nothing but its turn.
    rounds: [VecDeque<Spot>; CLASSES.len()],
    running: Running,
}

impl Plan {
    /// Takes a job in, unless too many wait at its spot.
    fn push(&mut self, job: Job) -> Result<(), (NotTaken, Job)> {
        let class = job.class as usize;
        let lane = self.lanes.entry(job.spot.clone()).or_default();
        if lane.waiting[class].len() >= WAITING_MAX[class] {
            let full = NotTaken::Full {
                spot: job.spot.clone(),
                running: lane.running.all(),
                waiting: lane.waiting[class].len(),
            };
            return Err((full, job));
        }
        lane.waiting[class].push_back(job.work);
        self.join_rounds(&job.spot);
        Ok(())
    }

    /// The next job that may run, which from now on does.
    fn next(&mut self) -> Option<Job> {
        for class in CLASSES.into_iter().rev() {
            if !self.running.fits(class, &RUNNING_MAX) {
                continue;
            }
            let at = class as usize;
            while let Some(spot) = self.rounds[at].pop_front() {
                let Some(lane) = self.lanes.get_mut(&spot) else {
                    continue;
                };
                lane.in_round[at] = false;
                // Otherwise it joins again when something ends there.
                if lane.running.fits(class, &RUNNING_MAX_SPOT)
                    && let Some(work) = lane.waiting[at].pop_front()
                {
                    lane.running.0[at] += 1;
                    self.running.0[at] += 1;
                    self.join_rounds(&spot);
                    return Some(Job { spot, class, work });
                }
            }
        }
        None
    }

    /// A job has ended.
    fn ended(&mut self, spot: &Spot, class: Class) {
        self.running.0[class as usize] -= 1;
        if let Some(lane) = self.lanes.get_mut(spot) {
            lane.running.0[class as usize] -= 1;
        }
        self.join_rounds(spot);
    }

    /// A job that [`next`](Self::next) gave did not start.
    fn put_back(&mut self, job: Job) {
        if let Some(lane) = self.lanes.get_mut(&job.spot) {
            lane.waiting[job.class as usize].push_front(job.work);
        }
        self.ended(&job.spot, job.class);
    }

    /// The job that was taken in last at a spot does not wait any more.
    fn take_last(&mut self, spot: &Spot, class: Class) -> Option<Work> {
        let work = self.lanes.get_mut(spot)?.waiting[class as usize].pop_back();
        self.join_rounds(spot);
        work
    }

    /// Has a spot take part wherever one of its jobs could run. Forgets one where there is none.
    fn join_rounds(&mut self, spot: &Spot) {
        let Some(lane) = self.lanes.get_mut(spot) else {
            return;
        };
        let waits = lane.waiting.iter().any(|queue| !queue.is_empty());
        if !waits && lane.running.all() == 0 {
            self.lanes.remove(spot);
            return;
        }
        for class in CLASSES {
            let at = class as usize;
            if !lane.in_round[at]
                && !lane.waiting[at].is_empty()
                && lane.running.fits(class, &RUNNING_MAX_SPOT)
            {
                lane.in_round[at] = true;
                self.rounds[at].push_back(spot.clone());
            }
        }
    }
}

#[derive(Default)]
struct State {
    plan: Plan,
    /// Jobs that count as running, for threads that are on their way to them. There are as many threads
    /// that look here as there are of these and idle ones together.
    handed: VecDeque<Job>,
    idle: usize,
    threads: usize,
    closed: bool,
}

struct Pool {
    state: Mutex<State>,
    called: Condvar,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Hands out all that may run. Nothing is dropped under the lock: what a job holds may be another lock,
    /// or the last handle to this pool.
    fn start(self: &Arc<Pool>, state: &mut State) -> std::io::Result<()> {
        while let Some(job) = state.plan.next() {
            state.handed.push_back(job);
            if state.idle > 0 {
                state.idle -= 1;
                self.called.notify_one();
                continue;
            }
            let pool = self.clone();
            let thread = thread::Builder::new().name("hearth-worker".to_owned());
            match thread.spawn(move || pool.work()) {
                Ok(_) => state.threads += 1,
                Err(e) => {
                    if let Some(job) = state.handed.pop_back() {
                        state.plan.put_back(job);
                    }
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    fn work(self: Arc<Pool>) {
        while let Some(job) = self.wait() {
            let Job { spot, class, work } = job;
            let busy = Busy {
                pool: &self,
                spot,
                class,
            };
            work();
            drop(busy);
        }
    }

    /// Waits for a job; `None`: there was none for a while.
    fn wait(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.handed.pop_front() {
                return Some(job);
            }
            let late = !state.closed && {
                let waited = self.called.wait_timeout(state, IDLE_TIME);
                let (again, timeout) = waited.unwrap_or_else(|e| e.into_inner());
                state = again;
                timeout.timed_out()
            };
            if (late || state.closed) && state.handed.is_empty() {
                state.idle -= 1;
                state.threads -= 1;
                return None;
            }
        }
    }
}

/// A job that runs; told of when it has ended, however it has.
struct Busy<'a> {
    pool: &'a Arc<Pool>,
    spot: Spot,
    class: Class,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.plan.ended(&self.spot, self.class);
        if std::thread::panicking() {
            state.threads -= 1;
        } else {
            state.idle += 1;
        }
        // Without another thread, what waits is come to by those there are.
        let _ = self.pool.start(&mut state);
    }
}

/// The pool, until dropped: then what waits is dropped, and what runs is left to itself.
pub struct Workers {
    pool: Arc<Pool>,
}

impl Default for Workers {
    fn default() -> Workers {
        Workers {
            pool: Arc::new(Pool {
                state: Mutex::new(State::default()),
                called: Condvar::new(),
            }),
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.census().fmt(f)
    }
}

/// How many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Census {
    /// Threads.
    pub threads: usize,
    /// Those that have nothing to do.
    pub idle: usize,
    /// Jobs that run, by [`Class`].
    pub running: [usize; CLASSES.len()],
}

impl Workers {
    /// How many there are at this moment.
    pub fn census(&self) -> Census {
        let state = self.pool.lock();
        Census {
            threads: state.threads,
            idle: state.idle,
            running: state.plan.running.0,
        }
    }

    /// Has `work`, which may get stuck at `spot`, done on a thread of the pool. Waits for nothing. What is
    /// not taken, and what still waits when the pool is dropped, is dropped.
    pub fn run(
        &self,
        spot: &Spot,
        class: Class,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), NotTaken> {
        let job = Job {
            spot: spot.clone(),
            class,
            work: Box::new(work),
        };
        let mut state = self.pool.lock();
        if let Err((why, job)) = state.plan.push(job) {
            drop(state);
            drop(job);
            return Err(why);
        }
        match self.pool.start(&mut state) {
            Err(e) if state.threads == 0 => {
                let work = state.plan.take_last(spot, class);
                drop(state);
                drop(work);
                Err(NotTaken::NoThread(e))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.closed = true;
        let mut left: Vec<Work> = Vec::new();
        for lane in state.plan.lanes.values_mut() {
            left.extend(lane.waiting.iter_mut().flat_map(std::mem::take));
        }
        self.pool.called.notify_all();
        drop(state);
        drop(left);
    }
}
