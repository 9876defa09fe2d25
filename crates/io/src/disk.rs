//! A [`HddModel`] in real time: one thread that does the real I/O when the model says it is due.
//!
//! All data threads share the drive, and which command it serves next depends on what the
//! others queued; so its commands go to one thread, which sleeps until the next one ends. At
//! the speed of a hard disk the hand-over costs nothing.

use crate::helper::{Job, lock};
use crate::model::{HddCommand, HddModel, HddParams};
use crate::op::OpKind;
use crate::sys::now_ns;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

struct State {
    model: HddModel,
    jobs: HashMap<u64, Job>,
    next: u64,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The thread of one modelled drive.
pub(crate) struct SlowDisk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for SlowDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SlowDisk")
    }
}

impl SlowDisk {
    pub(crate) fn start(capacity: u64, params: HddParams) -> io::Result<SlowDisk> {
        let model = HddModel::new(capacity, params);
        let state = State {
            model,
            jobs: HashMap::new(),
            next: 0,
            stop: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let worker = shared.clone();
        let thread = std::thread::Builder::new()
            .name("hearth-hdd".into())
            .spawn(move || worker.serve())?;
        Ok(SlowDisk {
            shared,
            thread: Some(thread),
        })
    }

    /// Queues a job; it runs, and is answered, when the model is done with it.
    pub(crate) fn push(&self, job: Job) {
        let Some((kind, offset, len)) = job.op().map(|op| (op.kind, op.offset, op.len)) else {
            return;
        };
        let command = match kind {
            OpKind::Read => HddCommand::Read,
            OpKind::Write => HddCommand::Write,
            OpKind::Flush => HddCommand::Flush,
            // A drive cannot discard; the file underneath does it at once. Zeros that keep
            // their space are written by real drives, but a sparse file reads the same.
            OpKind::Discard | OpKind::WriteZeroes { .. } => HddCommand::Flush,
        };
        let mut state = lock(&self.shared.state);
        let id = state.next;
        state.next += 1;
        state.jobs.insert(id, job);
        state.model.submit(now_ns(), id, command, offset, len);
        drop(state);
        self.shared.changed.notify_one();
    }
}

impl Shared {
    fn serve(&self) {
        let mut finished = Vec::new();
        let mut due: Vec<Job> = Vec::new();
        let mut state = lock(&self.state);
        loop {
            let now = now_ns();
            state.model.advance(now, &mut finished);
            due.extend(finished.drain(..).filter_map(|id| state.jobs.remove(&id)));
            if !due.is_empty() {
                drop(state);
                due.drain(..).for_each(Job::run);
                state = lock(&self.state);
                continue;
            }
            if state.stop {
                // Whoever still waits gets an answer: dropping a job fails it.
                state.jobs.clear();
                return;
            }
            state = match state.model.next_event() {
                Some(at) => {
                    let wait = Duration::from_nanos(at.saturating_sub(now));
                    self.changed
                        .wait_timeout(state, wait)
                        .map_or_else(|e| e.into_inner().0, |r| r.0)
                }
                None => self.changed.wait(state).unwrap_or_else(|e| e.into_inner()),
            };
        }
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.changed.notify_one();
        // Jobs hold their device, so the last of them may drop it on this very thread.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
