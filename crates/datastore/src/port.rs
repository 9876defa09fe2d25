//! Requests to the engine, by way of the data threads.
//!
//! NFS calls are taken apart on threads that may block; the engine is called on data threads, each with its own ring. A
//! port has a [`Queue`] on every data thread: whoever has a request leaves it there and rings. Nobody waits: what is to be
//! done with the outcome comes with the request, and is done on the data thread.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_engine::api::{Completion, ReqError, Request};
use hearth_io::BufSlice;
use hearth_reactor::{Queue, QueueId, Reactors, SessionCx};
use rustix::event::{EventfdFlags, eventfd};
use slab::Slab;

/// Requests taken at once: others on the thread want their turn, too.
const TAKEN_MAX: usize = 64;

/// What is done with the outcome. Must not block.
pub type Answer = Box<dyn FnOnce(Result<(), ReqError>, Option<BufSlice>) + Send>;

struct Asked {
    request: Request,
    answer: Answer,
}

/// Where requests are left for one thread.
struct Tray {
    asked: Mutex<Vec<Asked>>,
    waiting: AtomicUsize,
    /// The thread sleeps, or is about to.
    armed: AtomicBool,
    closed: AtomicBool,
    bell: OwnedFd,
}

impl Tray {
    fn lock(&self) -> MutexGuard<'_, Vec<Asked>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, asked: Asked) {
        let mut all = self.lock();
        if self.closed.load(Ordering::SeqCst) {
            drop(all);
            (asked.answer)(Err(ReqError::Shutdown), None);
            return;
        }
        all.push(asked);
        self.waiting.store(all.len(), Ordering::SeqCst);
        drop(all);
        if self.armed.swap(false, Ordering::SeqCst) {
            // Cannot fail but by being full, and then it has rung.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    fn close(&self) {
        let mut all = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        self.waiting.store(0, Ordering::SeqCst);
        let left = std::mem::take(&mut *all);
        drop(all);
        for asked in left {
            (asked.answer)(Err(ReqError::Shutdown), None);
        }
    }
}

/// The end of a tray that its thread has.
struct Taker {
    tray: Arc<Tray>,
    answers: Slab<Answer>,
    stopped: bool,
}

impl Queue for Taker {
    fn doorbell(&self) -> RawFd {
        self.tray.bell.as_raw_fd()
    }

    fn pump(&mut self, cx: &mut SessionCx<'_>) -> bool {
        if self.stopped {
            return false;
        }
        self.tray.armed.store(false, Ordering::SeqCst);
        let mut all = self.tray.lock();
        let count = all.len().min(TAKEN_MAX);
        let taken: Vec<Asked> = all.drain(..count).collect();
        let left = all.len();
        self.tray.waiting.store(left, Ordering::SeqCst);
        drop(all);
        for Asked {
            mut request,
            answer,
        } in taken
        {
            request.tag = self.answers.insert(answer) as u64;
            request.start_ns = cx.now_ns;
            cx.requests.push(request);
        }
        left > 0
    }

    fn completed(&mut self, completion: Completion, _cx: &mut SessionCx<'_>) {
        if let Some(answer) = self.answers.try_remove(completion.tag as usize) {
            answer(completion.result, completion.buf);
        }
    }

    fn publish(&mut self) -> Option<Arc<OwnedFd>> {
        None
    }

    fn arm(&mut self) -> bool {
        if self.stopped {
            return false;
        }
        self.tray.armed.store(true, Ordering::SeqCst);
        self.has_work()
    }

    fn has_work(&self) -> bool {
        self.tray.waiting.load(Ordering::SeqCst) > 0
    }

    fn is_broken(&self) -> bool {
        self.stopped
    }

    fn shutdown(&mut self) {
        self.stopped = true;
        self.tray.close();
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        self.tray.close();
        for answer in self.answers.drain() {
            answer(Err(ReqError::Shutdown), None);
        }
    }
}

/// See the module.
pub struct Port {
    reactors: Arc<Reactors>,
    trays: Vec<(Arc<Tray>, QueueId)>,
}

impl Port {
    /// A port to all data threads.
    pub fn open(reactors: &Arc<Reactors>) -> std::io::Result<Port> {
        let mut port = Port {
            reactors: reactors.clone(),
            trays: Vec::new(),
        };
        for turn in 0..reactors.stats().threads as usize {
            let tray = Arc::new(Tray {
                asked: Mutex::default(),
                waiting: AtomicUsize::new(0),
                armed: AtomicBool::new(true),
                closed: AtomicBool::new(false),
                bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            });
            let queue = Taker {
                tray: tray.clone(),
                answers: Slab::new(),
                stopped: false,
            };
            let id = reactors
                .add_queue(turn, Box::new(queue))
                .map_err(|e| std::io::Error::other(e.to_string()))?;
            port.trays.push((tray, id));
        }
        Ok(port)
    }

    /// Asks the engine, on the thread that `turn` names (counted round). `answer` is called exactly once.
    pub fn ask(&self, turn: usize, request: Request, answer: Answer) {
        match self.trays.get(turn % self.trays.len().max(1)) {
            Some((tray, _)) => tray.put(Asked { request, answer }),
            None => answer(Err(ReqError::Shutdown), None),
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        for (tray, id) in self.trays.drain(..) {
            tray.close();
            self.reactors.remove_queue(id);
        }
    }
}
