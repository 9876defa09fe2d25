//! Threads for what blocks: a few per driver, started when needed.
//!
//! The ring does almost everything. Unaligned tails of odd-sized origins, discards on block
//! devices and zeros written by hand have to block somewhere; where io_uring is not allowed,
//! everything has. A [`Job`] carries its operation and answers exactly once, even if its
//! thread dies.

use crate::device::Device;
use crate::op::{IoError, IoOp};
use crate::sys::now_ns;
use crate::wake::WakeHandle;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

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

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    stop: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

/// Up to `max` threads that execute jobs in order of arrival.
pub(crate) struct Helpers {
    shared: Arc<Shared>,
    max: usize,
}

impl Helpers {
    pub(crate) fn new(max: usize) -> Helpers {
        Helpers {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                work: Condvar::new(),
            }),
            max,
        }
    }

    pub(crate) fn push(&self, job: Job) {
        let mut queue = lock(&self.shared.queue);
        queue.jobs.push_back(job);
        if queue.idle >= queue.jobs.len() {
            drop(queue);
            return self.shared.work.notify_one();
        }
        if queue.threads.len() < self.max {
            let shared = self.shared.clone();
            match std::thread::Builder::new()
                .name("hearth-io".into())
                .spawn(move || shared.serve())
            {
                Ok(thread) => return queue.threads.push(thread),
                // A system short of threads: slow is better than stuck.
                Err(_) if queue.threads.is_empty() => {
                    let jobs = std::mem::take(&mut queue.jobs);
                    drop(queue);
                    return jobs.into_iter().for_each(Job::run);
                }
                Err(_) => {}
            }
        }
        drop(queue);
        self.shared.work.notify_one();
    }
}

impl Shared {
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job.run();
                queue = lock(&self.queue);
            } else if queue.stop {
                return;
            } else {
                queue.idle += 1;
                queue = self.work.wait(queue).unwrap_or_else(|e| e.into_inner());
                queue.idle -= 1;
            }
        }
    }
}

impl Drop for Helpers {
    /// Finishes what is queued, then ends the threads.
    fn drop(&mut self) {
        let threads = {
            let mut queue = lock(&self.shared.queue);
            queue.stop = true;
            std::mem::take(&mut queue.threads)
        };
        self.shared.work.notify_all();
        for thread in threads {
            // A helper that panicked has answered its job by dropping it.
            let _ = thread.join();
        }
    }
}

/// Locks; a panic elsewhere does not poison plain data.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
