//! A [`HddModel`] in real time: one thread that does the real I/O when the model says it is due.
//!
//! All data threads share the drive, and which command it serves next depends on what the
//! others queued; so its commands go to one thread, which sleeps until the next one ends. At
//! the speed of a hard disk the hand-over costs nothing.
//!
//! Several files may lie on one drive, one behind the other, as the images of several guests do:
//! then one arm serves them all, and they are in each other's way.

use crate::helper::{Job, lock};
use crate::model::{HddCommand, HddModel, HddParams};
use crate::op::OpKind;
use crate::sys::now_ns;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, LazyLock, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Drives that are shared, by name, while anybody uses them.
static SHARED: LazyLock<Mutex<HashMap<String, Weak<Spindle>>>> = LazyLock::new(Mutex::default);

struct State {
    model: HddModel,
    /// Where files lie: the first byte and the length. A file that leaves keeps its place, so
    /// that it finds it again; all places are gone with the drive's last file.
    places: HashMap<PathBuf, (u64, u64)>,
    /// Bytes that are taken.
    end: u64,
    jobs: HashMap<u64, Job>,
    next: u64,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The thread of one modelled drive.
struct Spindle {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A file's place on a modelled drive.
#[derive(Clone)]
pub(crate) struct SlowDisk {
    spindle: Arc<Spindle>,
    base: u64,
}

impl std::fmt::Debug for SlowDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SlowDisk")
    }
}

impl Spindle {
    /// A drive with nothing on it.
    fn start(params: HddParams) -> io::Result<Spindle> {
        let state = State {
            model: HddModel::new(0, params),
            places: HashMap::new(),
            end: 0,
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
        Ok(Spindle {
            shared,
            thread: Some(thread),
        })
    }

    /// Where `path` lies, of `len` bytes: where it was, or behind all others.
    fn place(&self, path: &Path, len: u64) -> u64 {
        let mut state = lock(&self.shared.state);
        if let Some((base, _)) = state.places.get(path).filter(|(_, known)| *known >= len) {
            return *base;
        }
        let base = state.end;
        state.end = base.saturating_add(len);
        state.model.grow(len);
        state.places.insert(path.to_owned(), (base, len));
        base
    }
}

impl SlowDisk {
    /// A drive of its own for a file.
    pub(crate) fn start(path: &Path, len: u64, params: HddParams) -> io::Result<SlowDisk> {
        let spindle = Arc::new(Spindle::start(params)?);
        let base = spindle.place(path, len);
        Ok(SlowDisk { spindle, base })
    }

    /// A place on the drive called `name`, which is made if nobody uses it.
    pub(crate) fn join(
        name: &str,
        path: &Path,
        len: u64,
        params: HddParams,
    ) -> io::Result<SlowDisk> {
        let mut shared = lock(&SHARED);
        shared.retain(|_, drive| drive.strong_count() > 0);
        let spindle = match shared.get(name).and_then(Weak::upgrade) {
            Some(spindle) => spindle,
            None => {
                let spindle = Arc::new(Spindle::start(params)?);
                shared.insert(name.to_owned(), Arc::downgrade(&spindle));
                spindle
            }
        };
        // A drive dropped here joins its thread, which must not happen under the lock.
        drop(shared);
        let base = spindle.place(path, len);
        Ok(SlowDisk { spindle, base })
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
        let shared = &self.spindle.shared;
        let mut state = lock(&shared.state);
        let id = state.next;
        state.next += 1;
        state.jobs.insert(id, job);
        let offset = self.base.saturating_add(offset);
        state.model.submit(now_ns(), id, command, offset, len);
        drop(state);
        shared.changed.notify_one();
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

impl Drop for Spindle {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_lie_one_behind_the_other_and_find_their_place_again() {
        let join = |path: &str, len| {
            SlowDisk::join("places", Path::new(path), len, HddParams::default()).unwrap()
        };
        let (a, b) = (join("/a", 1000), join("/b", 500));
        assert_eq!((a.base, b.base), (0, 1000));
        assert!(Arc::ptr_eq(&a.spindle, &b.spindle));
        drop(a);
        assert_eq!(join("/a", 1000).base, 0);
        assert_eq!(join("/a", 2000).base, 1500, "it grew: a new place");
        drop(b);
        assert_eq!(join("/c", 10).base, 0, "an unused drive is forgotten");
        let own = SlowDisk::start(Path::new("/a"), 10, HddParams::default()).unwrap();
        assert_eq!(own.base, 0);
    }
}
