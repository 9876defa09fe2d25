//! All that is known of one disk.

use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_engine::stats::Latencies;
use hearth_format::DiskRecord;
use hearth_io::Device;
use hearth_origin::owner::Claim;

use super::{trouble, watch};
use crate::api::stats::Counters;
use crate::api::types::{CacheCheck, DrainProgress};
use crate::error::Error;
use crate::exports::DiskExport;
use crate::life::Life;
use crate::progress::Progress;
use crate::windows::Windows;

/// What every disk begins with, and one that is never used stays with.
static NOTHING: LazyLock<(Arc<Counters>, Arc<Latencies>)> = LazyLock::new(Default::default);

/// What is to be said of a disk since its origin was opened last.
pub(super) struct Session {
    pub(super) notices: Vec<String>,
    pub(super) progress: Progress,
    pub(super) shown: Option<DrainProgress>,
    /// Why what waited on flash cannot all reach the origin, although it is to win.
    pub(super) stranded: Option<Error>,
    /// Why the last flush or removal ended before it was done.
    pub(super) incomplete: Option<Error>,
    /// Bytes of flash advised to be kept for it.
    pub(super) share: Option<u64>,
    /// Bytes kept for it as last told to the engine.
    pub(super) kept: u64,
    /// Every clean cached block was found equal to the origin, so that it may stay once what is dirty
    /// has won.
    pub(super) clean_fits: bool,
    /// How far its clean copies were compared with the origin, while they do not count.
    pub(super) check: Option<CacheCheck>,
    /// Why it is taken out of service although no other host owns its origin.
    pub(super) misfit: Option<Error>,
    /// Bytes of the origin, where it became smaller than the disk while attached.
    pub(super) short: Option<u64>,
    pub(super) windows: Windows<Counters>,
    pub(super) latencies: Windows<Latencies>,
    /// Tells when its writes wait because its origin is too far behind.
    pub(super) lateness: trouble::Lateness,
    /// Tells when it cannot be written back.
    pub(super) alarm: trouble::Alarm,
    /// What was told of it.
    pub(super) told: watch::Told,
}

impl Session {
    /// Begins at second `now`.
    pub(super) fn new(now: u64) -> Session {
        Session {
            notices: Vec::new(),
            progress: Progress::default(),
            shown: None,
            stranded: None,
            incomplete: None,
            share: None,
            kept: 0,
            clean_fits: false,
            check: None,
            misfit: None,
            short: None,
            windows: Windows::starting(now, &NOTHING.0),
            latencies: Windows::starting(now, &NOTHING.1),
            lateness: trouble::Lateness::default(),
            alarm: trouble::Alarm::default(),
            told: watch::Told::default(),
        }
    }
}

/// A disk.
pub(super) struct Slot {
    pub(super) id: DiskId,
    pub(super) name: String,
    /// What it is doing. Changed only by who has its turn.
    pub(super) life: Life,
    /// The origin's device, as long as the engine has the disk.
    pub(super) device: Option<Arc<Device>>,
    /// The same as it was before it became a mirror: alive while something that was sent to it has not ended.
    pub(super) before: Weak<Device>,
    /// What protocols have of it, as long as it is served.
    pub(super) export: Option<Arc<DiskExport>>,
    /// Whose its origin is, where somebody keeps book of that.
    pub(super) claim: Option<Claim>,
    /// What the registry said of it when it was taken out.
    pub(super) erased: Option<Box<DiskRecord>>,
    /// What is to be said of it.
    pub(super) session: Session,
    /// Its cache was dropped: what its record must say before it is used.
    pub(super) voided: Option<u64>,
    /// Its origin is being looked for. Nobody waits for that: a disk whose origin hangs before it was
    /// found can still be changed and removed.
    pub(super) looking: bool,
    /// It was found to be alone on what its origin lies on, and counts against all who come later.
    pub(super) placed: bool,
    /// What lies below its image is not what was allowed.
    pub(super) chain_refused: bool,
    /// Its origin is there but would not open: when to try again, and the wait after that.
    pub(super) patience: Option<(Instant, Duration)>,
    /// The registry says that nothing of it counts on flash that was given up.
    pub(super) left_flash: bool,
    /// The engine was asked to bring its origin up to date because flash was given up.
    pub(super) asked_to_leave: bool,
}

impl Slot {
    pub(super) fn new(id: DiskId, name: &str, life: Life, now: u64) -> Slot {
        Slot {
            id,
            name: name.to_owned(),
            life,
            device: None,
            before: Weak::new(),
            export: None,
            claim: None,
            erased: None,
            session: Session::new(now),
            voided: None,
            looking: false,
            placed: false,
            chain_refused: false,
            patience: None,
            left_flash: false,
            asked_to_leave: false,
        }
    }

    /// Another origin of the same disk, or the same one opened again.
    pub(super) fn begin_session(&mut self, now: u64) {
        self.session = Session::new(now);
    }

    /// The origin's device, if it is open.
    pub(super) fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref()
    }

    /// From here on that is its origin's device, also for who is served.
    pub(super) fn set_device(&mut self, device: Arc<Device>) {
        if let Some(export) = &self.export {
            drop(export.set_origin(device.clone()));
        }
        self.device = Some(device);
    }

    /// What protocols have of it, if it is served.
    pub(super) fn export(&self) -> Option<&Arc<DiskExport>> {
        self.export.as_ref()
    }
}
