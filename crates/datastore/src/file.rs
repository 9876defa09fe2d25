//! Who uses a file now, and who has it alone.
//!
//! Reads and writes of a file run side by side. What changes the file's standing (it becomes a disk, is no
//! disk any more, is cut off, was replaced) wants it alone: nobody else begins anything, and what was begun has
//! ended. Whoever comes meanwhile waits.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hearth_engine::api::DiskId;
use hearth_nfs::handle::Key;
use hearth_nfs::v3::Attributes;

use crate::origin::FileOrigin;

/// A file that is a disk now.
pub struct Cached {
    /// The disk.
    pub disk: DiskId,
    /// What the disk's origin is.
    pub origin: Arc<FileOrigin>,
    /// Attributes of the file at the last look, and the time of that look. `used` counts data that was on flash only
    /// then.
    pub known: Mutex<(Attributes, Instant)>,
    /// Bytes of the blocks written since the last look: they may be on flash only, too.
    pub written: AtomicU64,
    /// It was not used for a while, and is being written back to be closed.
    pub draining: AtomicBool,
}

#[derive(Default)]
struct State {
    users: usize,
    alone: bool,
    cached: Option<Arc<Cached>>,
    last_used: Option<Instant>,
    /// It cannot be a disk; not tried again before.
    pass_until: Option<Instant>,
}

/// See the module.
pub struct File {
    /// What the file system calls it.
    pub key: Key,
    state: Mutex<State>,
    changed: Condvar,
}

/// Somebody uses the file, among others.
pub struct Using(Arc<File>);

/// Somebody has the file alone.
pub struct Alone(Arc<File>);

impl File {
    pub(crate) fn new(key: Key) -> File {
        File {
            key,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody has it alone.
    pub fn share(self: &Arc<File>) -> (Using, Option<Arc<Cached>>) {
        let mut state = self.lock();
        while state.alone {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.users += 1;
        let cached = state.cached.clone();
        (Using(self.clone()), cached)
    }

    /// A disk to be used, unless somebody has it alone.
    pub fn try_share(self: &Arc<File>) -> Option<(Using, Arc<Cached>)> {
        let mut state = self.lock();
        if state.alone {
            return None;
        }
        let cached = state.cached.clone()?;
        state.users += 1;
        Some((Using(self.clone()), cached))
    }

    /// Waits until nobody uses it.
    pub fn take(self: &Arc<File>) -> Alone {
        let mut state = self.lock();
        while state.alone {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.alone = true;
        while state.users > 0 {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        Alone(self.clone())
    }

    /// The same, if nobody uses it and nobody has since.
    pub fn try_take(self: &Arc<File>, unused_since: Instant) -> Option<Alone> {
        let mut state = self.lock();
        let busy = state.alone || state.users > 0;
        if busy || state.last_used.is_some_and(|at| at > unused_since) {
            return None;
        }
        state.alone = true;
        Some(Alone(self.clone()))
    }

    /// What it is as a disk, if it is one now.
    pub fn cached(&self) -> Option<Arc<Cached>> {
        self.lock().cached.clone()
    }

    /// It is used as it is, for the time being.
    pub fn passes(&self) -> bool {
        self.lock()
            .pass_until
            .is_some_and(|until| Instant::now() < until)
    }
}

impl Alone {
    /// What it is as a disk.
    pub fn cached(&self) -> Option<Arc<Cached>> {
        self.0.cached()
    }

    /// It is a disk from now on, or none any more.
    pub fn set(&self, cached: Option<Arc<Cached>>) {
        let before = std::mem::replace(&mut self.0.lock().cached, cached);
        // Closes the file, perhaps, for which nobody should wait.
        drop(before);
    }

    /// It cannot be a disk before that.
    pub fn pass_until(&self, until: Instant) {
        self.0.lock().pass_until = Some(until);
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.users -= 1;
        state.last_used = Some(Instant::now());
        let last = state.users == 0;
        drop(state);
        if last {
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.lock().alone = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::thread;

    fn file() -> Arc<File> {
        Arc::new(File::new(Key::new(b"a").unwrap()))
    }

    #[test]
    fn who_wants_it_alone_waits_for_those_who_use_it_and_keeps_others_out() {
        let file = file();
        let (using, _) = file.share();
        let (told, events) = channel();
        let taker = {
            let (file, told) = (file.clone(), told.clone());
            thread::spawn(move || {
                let alone = file.take();
                told.send("alone").unwrap();
                drop(alone);
            })
        };
        // From now on nobody comes in.
        while !file.lock().alone {
            thread::yield_now();
        }
        let late = {
            let (file, told) = (file.clone(), told.clone());
            thread::spawn(move || {
                let shared = file.share();
                told.send("late").unwrap();
                drop(shared);
            })
        };
        assert!(events.try_recv().is_err());
        assert!(file.try_share().is_none());
        drop(using);
        assert_eq!(events.recv().unwrap(), "alone");
        assert_eq!(events.recv().unwrap(), "late");
        taker.join().unwrap();
        late.join().unwrap();
    }

    #[test]
    fn only_what_was_not_used_is_idle() {
        let file = file();
        let before = Instant::now();
        drop(file.share());
        assert!(file.try_take(before).is_none());
        let later = Instant::now();
        let alone = file.try_take(later).unwrap();
        assert!(file.try_take(later).is_none());
        drop(alone);
        assert!(file.try_take(later).is_some());
    }
}
