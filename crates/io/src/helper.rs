//! Threads for what blocks: a few for each device of a driver, started when needed.
//!
//! The ring does almost everything. Unaligned tails of odd-sized origins, discards on block
//! devices and zeros written by hand have to block somewhere; where io_uring is not allowed,
//! everything has. A [`Job`] carries its operation and answers exactly once, even if its
//! thread dies.

use crate::device::Device;
use crate::op::{IoError, IoOp};
use crate::sys::now_ns;
use crate::wake::WakeHandle;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// An operation that ended on another thread.
pub(crate) struct Finished {
    pub op: IoOp,
    /// `None` for what was asked outside the data path.
    pub device: Option<Arc<Device>>,
    pub result: Result<(), IoError>,
    /// Which of what its driver has lent; 0: none.
    pub number: u64,
    pub start_ns: u64,
    pub end_ns: u64,
}

impl Finished {
    /// What the device adds to every operation, nanoseconds.
    pub(crate) fn latency_ns(&self) -> u64 {
        self.device.as_ref().map_or(0, |d| d.latency_ns())
    }
}

/// Where helpers put what they finished. One per driver; bounded by its in-flight limit.
pub(crate) struct Outbox {
    done: Mutex<Vec<Finished>>,
    wake: WakeHandle,
}

impl Outbox {
    pub(crate) fn new(wake: WakeHandle) -> Arc<Outbox> {
        Arc::new(Outbox {
            done: Mutex::new(Vec::new()),
            wake,
        })
    }

    /// Moves everything finished to the end of `out`.
    pub(crate) fn take(&self, out: &mut Vec<Finished>) {
        out.append(&mut lock(&self.done));
    }
}

/// Who waits for a job.
enum Waiter {
    Driver(Arc<Outbox>),
    /// A thread that does nothing else meanwhile.
    Caller(SyncSender<Finished>),
}

/// One operation for another thread to execute. Answers exactly once, with `EIO` if dropped.
pub struct Job {
    /// `None` once answered: the job then holds nothing the answer's receiver may want to close.
    work: Option<(IoOp, Option<Arc<Device>>)>,
    start_ns: u64,
    waiter: Waiter,
    /// Its number among what the driver has lent, and where it is said that it was begun.
    lent: Option<(u64, Arc<AtomicU64>)>,
}

impl Job {
    pub(crate) fn new(op: IoOp, device: Arc<Device>, start_ns: u64, outbox: Arc<Outbox>) -> Job {
        Job {
            work: Some((op, Some(device))),
            start_ns,
            waiter: Waiter::Driver(outbox),
            lent: None,
        }
    }

    /// The driver watches how long it takes.
    pub(crate) fn watched(mut self, lent: (u64, Arc<AtomicU64>)) -> Job {
        self.lent = Some(lent);
        self
    }

    /// A job of a thread that waits for its answer.
    pub(crate) fn awaited(op: IoOp) -> (Job, Receiver<Finished>) {
        // One answer per job, so that the sender never waits.
        let (sender, receiver) = sync_channel(1);
        let job = Job {
            work: Some((op, None)),
            start_ns: now_ns(),
            waiter: Waiter::Caller(sender),
            lent: None,
        };
        (job, receiver)
    }

    /// The operation.
    pub fn op(&self) -> Option<&IoOp> {
        self.work.as_ref().map(|(op, _)| op)
    }

    /// When it was submitted, nanoseconds of [`now_ns`].
    pub fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Executes on the device's file and answers.
    pub(crate) fn run(mut self) {
        if let Some((_, begun_ns)) = &self.lent {
            begun_ns.store(now_ns(), Ordering::Release);
        }
        let result = match self.work.as_mut() {
            Some((op, Some(device))) => device.execute(op),
            _ => return,
        };
        self.answer(result);
    }

    /// Answers.
    pub fn finish(mut self, result: Result<(), IoError>) {
        self.answer(result);
    }

    fn answer(&mut self, result: Result<(), IoError>) {
        let Some((op, device)) = self.work.take() else {
            return;
        };
        let finished = Finished {
            op,
            device,
            result,
            number: self.lent.as_ref().map_or(0, |(number, _)| *number),
            start_ns: self.start_ns,
            end_ns: now_ns(),
        };
        match &self.waiter {
            Waiter::Driver(outbox) => {
                lock(&outbox.done).push(finished);
                outbox.wake.wake();
            }
            // Nobody waits any more if it cannot be sent.
            Waiter::Caller(sender) => drop(sender.try_send(finished)),
        }
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Job").field(&self.op()).finish()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.answer(Err(IoError::Os(libc::EIO)));
    }
}

/// What helpers do. Each has a place where it may get stuck.
pub(crate) trait Work: Send + 'static {
    /// The same number for all that get stuck together.
    fn place(&self) -> usize;
    /// Does it; blocks.
    fn work(self);
}

impl Work for Job {
    /// A device that hangs keeps what it was asked, and nothing else.
    fn place(&self) -> usize {
        let device = self.work.as_ref().and_then(|(_, device)| device.as_ref());
        device.map_or(0, |device| Arc::as_ptr(device).addr())
    }

    fn work(self) {
        self.run();
    }
}

/// What one device is asked.
struct Lane<W> {
    waiting: VecDeque<W>,
    /// How often it stands in the line of those that somebody may begin with, and how many are at it.
    offered: usize,
    busy: usize,
}

struct Queue<W> {
    lanes: HashMap<usize, Lane<W>>,
    /// Whose turn it is.
    ready: VecDeque<usize>,
    idle: usize,
    threads: usize,
    stop: bool,
}

struct Shared<W> {
    queue: Mutex<Queue<W>>,
    work: Condvar,
    /// A thread has ended.
    ended: Condvar,
    /// Threads that a device may keep busy.
    each: usize,
}

/// Threads that execute what blocks, in order of arrival for each device. So many at most are at one device, so that one that
/// hangs, and keeps them for as long as the kernel likes, is nobody else's business. Those with nothing to do end.
pub(crate) struct Helpers<W: Work = Job> {
    shared: Arc<Shared<W>>,
}

/// Threads of one driver at most: as many devices may hang as fill them.
const THREADS_MAX: usize = 128;
/// A thread that had nothing to do for so long ends.
const IDLE_TIME: Duration = Duration::from_secs(10);
/// How long a dying driver waits for them. One that is stuck in a device ends when that lets it go.
const END_TIME: Duration = Duration::from_secs(5);

impl<W: Work> Helpers<W> {
    /// Up to `each` threads are at one device.
    pub(crate) fn new(each: usize) -> Helpers<W> {
        Helpers {
            shared: Arc::new(Shared {
                queue: Mutex::new(Queue {
                    lanes: HashMap::new(),
                    ready: VecDeque::new(),
                    idle: 0,
                    threads: 0,
                    stop: false,
                }),
                work: Condvar::new(),
                ended: Condvar::new(),
                each,
            }),
        }
    }

    pub(crate) fn push(&self, work: W) {
        let mut queue = lock(&self.shared.queue);
        if !queue.add(work, self.shared.each) {
            // Those that are at its device see to it.
            return;
        }
        if queue.idle < queue.ready.len() && queue.threads < THREADS_MAX {
            queue.threads += 1;
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("hearth-io".into());
            if thread.spawn(move || shared.serve()).is_ok() {
                return;
            }
            queue.threads -= 1;
            if queue.threads == 0 {
                // A system short of threads: slow is better than stuck.
                while let Some((place, work)) = queue.take() {
                    drop(queue);
                    work.work();
                    queue = lock(&self.shared.queue);
                    queue.done(place, self.shared.each);
                }
                return;
            }
        }
        drop(queue);
        self.shared.work.notify_one();
    }
}

impl<W: Work> Queue<W> {
    /// Takes something to do. False: nobody may begin with it yet.
    fn add(&mut self, work: W, each: usize) -> bool {
        let place = work.place();
        let lane = self.lanes.entry(place).or_insert_with(|| Lane {
            waiting: VecDeque::new(),
            offered: 0,
            busy: 0,
        });
        lane.waiting.push_back(work);
        let may = lane.busy + lane.offered < each;
        if may {
            lane.offered += 1;
            self.ready.push_back(place);
        }
        may
    }

    /// Something to begin with, and where that is.
    fn take(&mut self) -> Option<(usize, W)> {
        let place = self.ready.pop_front()?;
        let lane = self.lanes.get_mut(&place)?;
        lane.offered -= 1;
        lane.busy += 1;
        // As many wait at least as are offered.
        Some((place, lane.waiting.pop_front()?))
    }

    /// It has ended.
    fn done(&mut self, place: usize, each: usize) {
        let Some(lane) = self.lanes.get_mut(&place) else {
            return;
        };
        lane.busy -= 1;
        if lane.waiting.len() > lane.offered && lane.busy + lane.offered < each {
            lane.offered += 1;
            self.ready.push_back(place);
        } else if lane.busy == 0 && lane.waiting.is_empty() {
            self.lanes.remove(&place);
        }
    }
}

impl<W: Work> Shared<W> {
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((place, work)) = queue.take() {
                drop(queue);
                work.work();
                queue = lock(&self.queue);
                queue.done(place, self.each);
                continue;
            }
            if queue.stop {
                break;
            }
            queue.idle += 1;
            let waited = self.work.wait_timeout(queue, IDLE_TIME);
            let (back, late) = waited.unwrap_or_else(|e| e.into_inner());
            queue = back;
            queue.idle -= 1;
            if late.timed_out() && queue.ready.is_empty() {
                break;
            }
        }
        queue.threads -= 1;
        drop(queue);
        self.ended.notify_all();
    }
}

impl<W: Work> Drop for Helpers<W> {
    /// Finishes what is queued, as far as that is possible in time; what is not begun then is dropped. A thread that is stuck
    /// has what it works with, and ends by itself.
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.stop = true;
        self.shared.work.notify_all();
        let end = Instant::now() + END_TIME;
        while queue.threads > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.ended.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
        let stuck = queue.threads;
        queue.ready.clear();
        let left = std::mem::take(&mut queue.lanes);
        drop(queue);
        // Answers, which wants no lock of ours.
        drop(left);
        if stuck > 0 {
            tracing::error!(
                threads = stuck,
                "threads are stuck in devices that do not answer, and are left behind"
            );
        }
    }
}

/// Locks; a panic elsewhere does not poison plain data.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    /// Longest wait for what comes by itself.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Something to do at a place; it says that it was begun, and waits to be let go if somebody holds it.
    struct Chore {
        place: usize,
        name: u32,
        begun: Sender<u32>,
        hold: Option<Arc<Mutex<()>>>,
    }

    impl Work for Chore {
        fn place(&self) -> usize {
            self.place
        }

        fn work(self) {
            // The test may have ended.
            let _ = self.begun.send(self.name);
            if let Some(hold) = &self.hold {
                drop(lock(hold));
            }
        }
    }

    struct Rig {
        helpers: Helpers<Chore>,
        begun: Receiver<u32>,
        begin: Sender<u32>,
        hold: Arc<Mutex<()>>,
    }

    impl Rig {
        fn new(each: usize) -> Rig {
            let (begin, begun) = channel();
            Rig {
                helpers: Helpers::new(each),
                begun,
                begin,
                hold: Arc::default(),
            }
        }

        fn push(&self, place: usize, name: u32, held: bool) {
            self.helpers.push(Chore {
                place,
                name,
                begun: self.begin.clone(),
                hold: held.then(|| self.hold.clone()),
            });
        }

        fn next(&self) -> u32 {
            self.begun.recv_timeout(LIMIT).expect("something begins")
        }
    }

    #[test]
    fn a_device_that_hangs_keeps_no_thread_from_another() {
        let rig = Rig::new(2);
        let hold = rig.hold.clone();
        let held = lock(&hold);
        // More than it may have threads.
        for name in 0..10 {
            rig.push(1, name, true);
        }
        assert_eq!([rig.next(), rig.next()].iter().sum::<u32>(), 1);
        for name in 100..120 {
            rig.push(2, name, false);
        }
        let mut others: Vec<u32> = (0..20).map(|_| rig.next()).collect();
        others.sort_unstable();
        assert_eq!(others, (100..120).collect::<Vec<_>>());
        assert!(lock(&rig.helpers.shared.queue).threads <= 4);
        drop(held);
        let mut rest: Vec<u32> = (0..8).map(|_| rig.next()).collect();
        rest.sort_unstable();
        assert_eq!(rest, (2..10).collect::<Vec<_>>());
        let shared = rig.helpers.shared.clone();
        drop(rig);
        let queue = lock(&shared.queue);
        assert_eq!(queue.threads, 0, "all ended");
        assert!(queue.lanes.is_empty());
    }

    #[test]
    fn what_is_queued_is_done_before_the_end_and_a_stuck_thread_is_not_waited_for() {
        let rig = Rig::new(1);
        let hold = rig.hold.clone();
        let held = lock(&hold);
        rig.push(1, 0, true);
        assert_eq!(rig.next(), 0);
        for name in 1..5 {
            rig.push(1, name, false);
        }
        for name in 10..15 {
            rig.push(2, name, false);
        }
        let Rig { helpers, begun, .. } = rig;
        let shared = helpers.shared.clone();
        // It would not come back if it waited for that thread.
        drop(helpers);
        let mut done: Vec<u32> = begun.try_iter().collect();
        done.sort_unstable();
        assert_eq!(done, (10..15).collect::<Vec<_>>());
        drop(held);
        let mut queue = lock(&shared.queue);
        while queue.threads > 0 {
            let waited = shared.ended.wait_timeout(queue, LIMIT);
            let (back, late) = waited.unwrap_or_else(|e| e.into_inner());
            assert!(!late.timed_out(), "it ends when it is let go");
            queue = back;
        }
        drop(queue);
        assert_eq!(begun.try_iter().count(), 0, "nothing is begun that late");
    }
}
