//! Which device a [`Target`] is, shared by all data threads and changeable while they run.
//!
//! The table changes when a disk is attached or a flash device added, which is rare; it is
//! looked at for every operation. So each thread keeps a snapshot and renews it when a
//! generation counter has moved: one load per operation, no lock.

use crate::device::Device;
use crate::helper::lock;
use crate::op::Target;
use crate::wake::WakeHandle;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Default)]
struct Table {
    flash: Vec<Option<Arc<Device>>>,
    origin: Vec<Option<Arc<Device>>>,
}

impl Table {
    fn get(&self, target: Target) -> Option<&Arc<Device>> {
        match target {
            Target::Flash(i) => self.flash.get(usize::from(i))?.as_ref(),
            Target::Origin(i) => self.origin.get(usize::from(i))?.as_ref(),
        }
    }
}

/// The shared table.
#[derive(Debug, Default)]
pub struct Targets {
    table: RwLock<Table>,
    generation: AtomicU64,
    /// Threads with a snapshot, to be woken when it is out of date.
    viewers: Mutex<Vec<WakeHandle>>,
}

/// How often [`Targets::wait_unused`] looks.
const UNUSED_POLL: Duration = Duration::from_millis(1);

impl Targets {
    /// An empty table.
    pub fn new() -> Arc<Targets> {
        Arc::new(Targets::default())
    }

    /// Puts `device` at `target`, or removes what is there, which is returned. Operations in
    /// flight keep the old device alive; later ones fail with `ENODEV` if it was removed.
    pub fn set(&self, target: Target, device: Option<Arc<Device>>) -> Option<Arc<Device>> {
        let mut table = self.table.write().unwrap_or_else(|e| e.into_inner());
        let (list, index) = match target {
            Target::Flash(i) => (&mut table.flash, usize::from(i)),
            Target::Origin(i) => (&mut table.origin, usize::from(i)),
        };
        if list.len() <= index {
            list.resize(index + 1, None);
        }
        let old = std::mem::replace(&mut list[index], device);
        self.generation.fetch_add(1, Ordering::Release);
        drop(table);
        for viewer in lock(&self.viewers).iter() {
            viewer.wake();
        }
        old
    }

    /// Waits until a removed device is used by nobody else, then closes it (and gives up its
    /// lock), so that it can be opened again. Blocks; gives the device back after `limit`.
    pub fn wait_unused(mut device: Arc<Device>, limit: Duration) -> Result<(), Arc<Device>> {
        let end = Instant::now() + limit;
        loop {
            device = match Arc::try_unwrap(device) {
                Ok(_) => return Ok(()),
                Err(device) if Instant::now() >= end => return Err(device),
                Err(device) => device,
            };
            std::thread::sleep(UNUSED_POLL);
        }
    }

    /// The device at `target`.
    pub fn get(&self, target: Target) -> Option<Arc<Device>> {
        self.table
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .get(target)
            .cloned()
    }
}

/// One thread's view of the table. It keeps removed devices open until the thread looks again.
#[derive(Debug)]
pub(crate) struct TargetView {
    shared: Arc<Targets>,
    generation: u64,
    table: Table,
    wake: WakeHandle,
}

impl TargetView {
    /// A view of a thread woken by `wake`, which is to [`refresh`](Self::refresh) when woken.
    pub(crate) fn new(shared: Arc<Targets>, wake: WakeHandle) -> TargetView {
        lock(&shared.viewers).push(wake.clone());
        let mut view = TargetView {
            shared,
            generation: u64::MAX,
            table: Table::default(),
            wake,
        };
        view.refresh();
        view
    }

    /// Renews the snapshot if the table changed.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.table = self
                .shared
                .table
                .read()
                .unwrap_or_else(|e| e.into_inner())
                .clone();
            self.generation = generation;
        }
    }

    /// The device at `target`, as of now.
    #[inline]
    pub(crate) fn get(&mut self, target: Target) -> Option<&Arc<Device>> {
        self.refresh();
        self.table.get(target)
    }
}

impl Drop for TargetView {
    fn drop(&mut self) {
        lock(&self.shared.viewers).retain(|w| !w.same(&self.wake));
    }
}
