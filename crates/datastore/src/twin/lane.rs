//! Threads of one tree. Whatever is done in it is done here, so that a disk that hangs holds up nobody for longer than is allowed: then
//! the tree is out, and what hangs ends when it ends, with what it was given, which nobody else uses any more.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Most threads of a tree.
const THREADS_MAX: usize = 16;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    threads: usize,
    idle: usize,
    stop: bool,
}

#[derive(Default)]
struct Table {
    queue: Mutex<Queue>,
    bell: Condvar,
    under_way: AtomicUsize,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(work) = queue.waiting.pop_front() {
                drop(queue);
                work();
                queue = self.lock();
            } else if queue.stop {
                queue.threads -= 1;
                return;
            } else {
                queue.idle += 1;
                let waited = self.bell.wait(queue);
                queue = waited.unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }
}

/// Why something was not done, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hung {
    /// It takes too long.
    Late,
    /// There is no thread for it.
    NoThread,
}

impl Hung {
    pub fn why(self) -> String {
        match self {
            Hung::Late => "it does not answer in time".to_owned(),
            Hung::NoThread => "no thread can be started for it".to_owned(),
        }
    }
}

/// See the module.
pub(super) struct Lane(Arc<Table>);

impl Lane {
    pub fn new() -> Lane {
        Lane(Arc::default())
    }

    /// Steps that were begun and have not ended, those that were given up included.
    pub fn under_way(&self) -> usize {
        self.0.under_way.load(Ordering::SeqCst)
    }

    fn push(&self, work: Work) -> io::Result<()> {
        let mut queue = self.0.lock();
        if queue.idle <= queue.waiting.len() && queue.threads < THREADS_MAX {
            let table = self.0.clone();
            let started = thread::Builder::new()
                .name("store-tree".to_owned())
                .spawn(move || table.work());
            match started {
                Ok(_) => queue.threads += 1,
                // One of the others does it.
                Err(_) if queue.threads > 0 => {}
                Err(e) => return Err(e),
            }
        }
        queue.waiting.push_back(work);
        drop(queue);
        self.0.bell.notify_one();
        Ok(())
    }

    /// Does something however long it takes, and does not wait for it.
    pub fn begin(&self, work: impl FnOnce() + Send + 'static) {
        // Given up at once, so it ends when it ends.
        let _ = self.run(Duration::ZERO, || false, work);
    }

    /// Does something within a time, or however long it takes while `patient` says so.
    pub fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        patient: impl Fn() -> bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Hung> {
        let (told, answer) = sync_channel(1);
        let table = self.0.clone();
        table.under_way.fetch_add(1, Ordering::SeqCst);
        let pushed = self.push(Box::new(move || {
            let done = work();
            table.under_way.fetch_sub(1, Ordering::SeqCst);
            // Nobody may be waiting any more.
            let _ = told.send(done);
        }));
        if pushed.is_err() {
            self.0.under_way.fetch_sub(1, Ordering::SeqCst);
            return Err(Hung::NoThread);
        }
        loop {
            match answer.recv_timeout(limit) {
                Ok(done) => return Ok(done),
                Err(RecvTimeoutError::Timeout) if patient() => {}
                Err(RecvTimeoutError::Timeout) => return Err(Hung::Late),
                Err(RecvTimeoutError::Disconnected) => return Err(Hung::NoThread),
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.bell.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn who_hangs_is_given_up_and_ends_later() {
        let lane = Lane::new();
        let minute = Duration::from_secs(60);
        assert_eq!(lane.run(minute, || false, || 7), Ok(7));
        let (go, wait) = channel::<()>();
        let hung = lane.run(Duration::from_millis(1), || false, move || wait.recv());
        assert!(hung.is_err());
        assert_eq!(lane.under_way(), 1);
        // Others are not held up.
        assert_eq!(lane.run(minute, || false, || 8), Ok(8));
        go.send(()).unwrap();
        // The last tree is waited for.
        let turns = AtomicUsize::new(0);
        let (go, wait) = channel::<()>();
        let patient = || {
            if turns.fetch_add(1, Ordering::SeqCst) == 2 {
                go.send(()).unwrap();
            }
            true
        };
        let done = lane.run(Duration::from_millis(1), patient, move || wait.recv());
        assert_eq!(done, Ok(Ok(())));
        while lane.under_way() > 0 {
            thread::yield_now();
        }
    }
}
