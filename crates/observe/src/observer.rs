//! The table of disks, and what the control plane asks of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::{JoinHandle, Thread};

use hearth_engine::api::DiskId;
use hearth_io::BLOCK;
use hearth_policy::histogram::Mix;
use hearth_policy::mrc::{SAMPLES, SAMPLES_MIN};
use hearth_reactor::{Watch, Watcher};

use crate::disk::{Counted, Curve, Disk, lock};
use crate::keeper;
use crate::kept::{Kept, KeptError, KeptOf};
use crate::recording::{RecordError, RecordOptions, RecordingStatus};
use crate::scribe;
use crate::thread::ThreadWatch;

/// Blocks in all samples together, 128 MiB of curves. Disks beyond the 192nd get smaller samples.
const SAMPLES_ALL: usize = 192 * SAMPLES;

/// What the data threads, the keeper and the control plane share.
#[derive(Default)]
pub(crate) struct Shared {
    disks: RwLock<BTreeMap<DiskId, Arc<Disk>>>,
    /// Counts changes of the table.
    pub generation: AtomicU64,
    pub stopping: AtomicBool,
    keeper: OnceLock<Thread>,
}

impl Shared {
    pub(crate) fn disk(&self, id: DiskId) -> Option<Arc<Disk>> {
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        disks.get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Disk>> {
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        disks.values().cloned().collect()
    }

    pub(crate) fn wake(&self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }
}

/// Watches the disks of a pool. Dropping it ends recordings properly.
pub struct Observer {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Observer {
    /// An observer of no disks, and its keeper thread.
    ///
    /// # Errors
    ///
    /// When the thread cannot be started.
    pub fn start() -> std::io::Result<Observer> {
        let shared = Arc::new(Shared::default());
        let body = shared.clone();
        let thread = std::thread::Builder::new()
            .name("hearth-observe".to_owned())
            .spawn(move || keeper::run(&body))?;
        // First and only call: the cell was made above.
        let _ = shared.keeper.set(thread.thread().clone());
        Ok(Observer {
            shared,
            keeper: Mutex::new(Some(thread)),
        })
    }

    /// Watches a disk of `size` bytes from now on; one that is watched already stays as it is. True if it was not.
    pub fn watch_disk(&self, id: DiskId, size: u64) -> bool {
        let mut disks = self
            .shared
            .disks
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let share = SAMPLES_ALL / (disks.len() + 1);
        let blocks = usize::try_from(size.div_ceil(BLOCK)).unwrap_or(usize::MAX);
        let samples = blocks.min(share).clamp(SAMPLES_MIN, SAMPLES);
        let new = !disks.contains_key(&id);
        disks
            .entry(id)
            .or_insert_with(|| Arc::new(Disk::new(id, samples)));
        self.shared.generation.fetch_add(1, Ordering::Release);
        new
    }

    /// Forgets a disk; its recording ends. Waits for the recording's file, but not for long.
    pub fn forget_disk(&self, id: DiskId) {
        let gone = {
            let mut disks = self
                .shared
                .disks
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            disks.remove(&id)
        };
        self.shared.generation.fetch_add(1, Ordering::Release);
        if let Some(disk) = gone {
            scribe::close(&[disk], scribe::LIMIT);
        }
    }

    /// What was counted of a disk; with `reset` counting begins anew. `None` before its first
    /// request.
    pub fn histograms(&self, id: DiskId, reset: bool) -> Option<Counted> {
        self.shared.disk(id)?.histograms(hearth_io::now_ns(), reset)
    }

    /// What kinds of requests a disk's guest makes, those of hours ago counted less; `None` before
    /// its first request. Resets of the histograms do not touch it.
    pub fn mix(&self, id: DiskId) -> Option<Mix> {
        self.shared.disk(id)?.mix()
    }

    /// A disk's miss-ratio curve; `None` before its first request.
    pub fn curve(&self, id: DiskId) -> Option<Curve> {
        self.shared.disk(id)?.curve(hearth_io::now_ns())
    }

    /// The disks that are watched.
    pub fn watched(&self) -> Vec<DiskId> {
        self.shared.all().iter().map(|disk| disk.id).collect()
    }

    /// What is known of a disk as bytes, for [`recall`](Self::recall), and how much had been seen for it; `None` if that is
    /// `than`, or if what was kept before is worth more.
    pub fn keep(&self, id: DiskId, of: &KeptOf, than: u64) -> Option<(u64, Vec<u8>)> {
        let (seen, kept) = self.shared.disk(id)?.keep(hearth_io::now_ns(), than)?;
        Some((seen, kept.encode(of)))
    }

    /// Goes on with what was known of a disk, unless more has been seen of it meanwhile.
    ///
    /// # Errors
    ///
    /// When it is damaged, or of another disk.
    pub fn recall(&self, id: DiskId, of: &KeptOf, bytes: &[u8]) -> Result<(), KeptError> {
        let kept = Kept::decode(bytes, of)?;
        match self.shared.disk(id) {
            Some(disk) => disk.recall(hearth_io::now_ns(), kept),
            None => Ok(()),
        }
    }

    /// Bytes all of it takes, roughly.
    pub fn footprint(&self) -> usize {
        self.shared.all().iter().map(|d| d.footprint()).sum()
    }

    /// Begins to record a disk's requests.
    ///
    /// # Errors
    ///
    /// When the disk is not watched or recorded already, or the file cannot be made, or not in
    /// some seconds.
    pub fn record(
        &self,
        id: DiskId,
        options: RecordOptions,
    ) -> Result<RecordingStatus, RecordError> {
        let disk = self.shared.disk(id).ok_or(RecordError::NoDisk)?;
        scribe::begin(&disk, options, hearth_io::now_ns())
    }

    /// Ends a recording; everything that arrived before is in its file then.
    ///
    /// # Errors
    ///
    /// When there is none under way, or its file does not answer for some seconds.
    pub fn stop_recording(&self, id: DiskId) -> Result<RecordingStatus, RecordError> {
        let disk = self.shared.disk(id).ok_or(RecordError::NoDisk)?;
        scribe::end(&disk, scribe::LIMIT)
    }

    /// Ends all recordings for good: nothing more will arrive. Waits for their files some seconds,
    /// for all together.
    pub fn end_recordings(&self) {
        scribe::close(&self.shared.all(), scribe::LIMIT);
    }

    /// The recording of a disk under way, or the last one. Waits for no file.
    pub fn recording(&self, id: DiskId) -> Option<RecordingStatus> {
        self.shared.disk(id)?.recording()
    }
}

impl Watcher for Observer {
    fn watch(&self) -> Box<dyn Watch> {
        Box::new(ThreadWatch::new(self.shared.clone()))
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = lock(&self.keeper).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that keeps the curves ended abnormally");
        }
        self.end_recordings();
    }
}
