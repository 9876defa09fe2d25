//! Attaching a disk: is its origin the one we know, and who wins if not?
//!
//! Before a disk is served, the registry holds what the origin looked like, together with the
//! promise that nobody has a reason to change it (`clean_detach`). Our own first write takes the
//! promise back, durably, before it reaches the origin. So after a clean stop, and after a crash
//! before the first write, any change of the origin is somebody else's; later in a disk's life
//! the comparison of cached blocks has to tell.

use std::sync::Arc;

use hearth_engine::api::{DiskConfig, Mode};
use hearth_format::DiskRecord;
use hearth_io::{Device, OriginSpec, Target, Targets};

use super::{Daemon, Phase, REST_TIME, Slot, lock};
use crate::api::types::Trust;
use crate::error::{Error, Kind, Result};
use crate::exports::DiskExport;
use crate::origin;
use crate::pool::mode_of;
use crate::size::human;

/// Cache block size of a disk that leaves it to us.
const BLOCK_SIZE_AUTO: u32 = 4096;

/// An origin that was opened and judged, not served yet.
struct Judged {
    device: Device,
    record: DiskRecord,
    notices: Vec<String>,
    /// Dirty blocks must be in the origin before anybody may read.
    reconcile: bool,
}

/// What the engine is told of a disk.
pub(super) fn config(record: &DiskRecord, device: &Device) -> DiskConfig {
    DiskConfig {
        id: record.id,
        size: record.size,
        origin_align: device.file().align(),
        mode: Mode::from(mode_of(record.mode)),
        block_size: if record.block_size == 0 {
            BLOCK_SIZE_AUTO
        } else {
            record.block_size
        },
        min_bytes: record.min_bytes,
        max_bytes: record.max_bytes,
        seq_cutoff: record.seq_cutoff,
        read_only: record.read_only,
    }
}

impl Daemon {
    /// Attaches every disk of the registry; those that cannot be are listed with the reason.
    pub(super) fn attach_all(self: &Arc<Daemon>) {
        let _ops = lock(&self.ops);
        let records = lock(&self.pool).registry().disks.clone();
        for record in records {
            let name = record.name.clone();
            let slot = self.attach_slot(record, None);
            lock(&self.disks).insert(name, slot);
        }
    }

    /// Tries the disks whose origin was missing again.
    pub(super) fn retry_waiting(self: &Arc<Daemon>) {
        // Somebody adding or changing a disk goes first.
        let Ok(_ops) = self.ops.try_lock() else {
            return;
        };
        let waiting: Vec<(String, u16)> = lock(&self.disks)
            .iter()
            .filter(|(_, slot)| matches!(slot.phase, Phase::Waiting(_)) && slot.job.is_none())
            .map(|(name, slot)| (name.clone(), slot.id))
            .collect();
        for (name, id) in waiting {
            let Some(record) = lock(&self.pool).record(id).cloned() else {
                continue;
            };
            // Cheaper than a whole attempt, and silent.
            if !origin::is_found(&record.origin, 1) {
                continue;
            }
            let slot = self.attach_slot(record, None);
            if !matches!(slot.phase, Phase::Waiting(_)) {
                lock(&self.disks).insert(name, slot);
            }
        }
    }

    /// Attaches a disk of the registry, whatever comes of it.
    pub(super) fn attach_slot(
        self: &Arc<Daemon>,
        record: DiskRecord,
        trust: Option<Trust>,
    ) -> Slot {
        let (id, name) = (record.id, record.name.clone());
        let now = self.now_s();
        match self
            .judge(record, trust)
            .and_then(|judged| self.serve(judged))
        {
            Ok((phase, notices)) => {
                for notice in &notices {
                    tracing::warn!(disk = %name, "{notice}");
                }
                tracing::info!(disk = %name, "attached");
                Slot {
                    notices,
                    ..Slot::new(id, phase, now)
                }
            }
            Err(e) if e.kind == Kind::Refused => {
                tracing::error!(disk = %name, "refused: {e}");
                Slot::new(id, Phase::Refused(e), now)
            }
            Err(e) => {
                tracing::warn!(disk = %name, "waiting: {e}");
                Slot::new(id, Phase::Waiting(e), now)
            }
        }
    }

    /// Opens the origin and compares it with what is known. Drops clean blocks that may be old.
    fn judge(&self, mut record: DiskRecord, trust: Option<Trust>) -> Result<Judged> {
        let spec: OriginSpec = origin::parse(&record.origin)?;
        let device = origin::open(&spec, record.read_only)?;
        let size = device.file().size();
        let path = spec.path.display();
        if size < record.size {
            return Err(Error::refused(
                format!(
                    "the origin {path} shrank from {} to {size} bytes",
                    record.size
                ),
                "give it its size back; or, to lose what is cached, `hearth disk remove` it with --discard-dirty and add it again",
            ));
        }
        let now = origin::identity(&device);
        let reason = self.difference(&record, &device);
        let status = self.engine.status(record.id).unwrap_or_default();
        let dirty = status.dirty_blocks + status.zero_blocks;
        let mut notices = Vec::new();
        let mut reconcile = false;
        if let Some(why) = reason {
            match (dirty, trust) {
                (1.., None) => {
                    return Err(Error::refused(
                        format!(
                            "the origin {path} does not fit the cache: {why}, while {} written by the guest wait on flash",
                            human(dirty * hearth_io::BLOCK)
                        ),
                        format!(
                            "say which side wins: `hearth disk set {name} --trust flash` writes them over the origin, \
                             `hearth disk set {name} --trust origin` throws them away",
                            name = record.name
                        ),
                    ));
                }
                (1.., Some(Trust::Flash)) => {
                    reconcile = true;
                    notices.push(format!(
                        "{why}; what waited on flash is written over it, as you said"
                    ));
                }
                _ => {
                    record.since_seq = self.forget(record.id)?;
                    let lost = if dirty > 0 {
                        ", and what waited on flash thrown away, as you said"
                    } else {
                        ""
                    };
                    notices.push(format!("the origin changed while Hearth was not looking ({why}); its cache is dropped{lost}"));
                }
            }
        } else if size > record.size {
            notices.push(format!(
                "the origin grew from {} to {}",
                human(record.size),
                human(size)
            ));
        }
        record.size = size;
        record.origin_identity = now;
        record.clean_detach = now.is_some() && !reconcile;
        self.store_record(&record)?;
        Ok(Judged {
            device,
            record,
            notices,
            reconcile,
        })
    }

    /// Why the origin is not what the cache believes, if so.
    fn difference(&self, record: &DiskRecord, device: &Device) -> Option<String> {
        let cached = self
            .engine
            .status(record.id)
            .is_some_and(|s| s.cached_blocks + s.zero_blocks > 0);
        if !cached {
            return None;
        }
        if self.was_failed {
            return Some("the flash had failed before, and what is on it may be old".to_owned());
        }
        let now = origin::identity(device);
        if let (Some(then), Some(now)) = (&record.origin_identity, &now)
            && let Some(why) =
                origin::difference(then, now, device.file().is_device(), record.clean_detach)
        {
            return Some(why);
        }
        origin::compare_sample(&self.engine, record.id, device)
            .map(|offset| format!("its content at offset {offset} is not what was left there"))
    }

    /// Gives a judged disk to the engine and, unless it must be reconciled first, to clients.
    fn serve(self: &Arc<Daemon>, judged: Judged) -> Result<(Phase, Vec<String>)> {
        let Judged {
            device,
            record,
            notices,
            reconcile,
        } = judged;
        let (id, pool) = (record.id, self.pool.clone());
        let device = Arc::new(device.before_first_write(move || {
            let noted = lock(&pool).change(|registry| {
                if let Some(record) = registry.disks.iter_mut().find(|r| r.id == id) {
                    record.clean_detach = false;
                }
                Ok(())
            });
            // The promise then stands although it is void: the next start may take our own
            // writes for somebody else's, and asks or drops what is clean. Nothing is lost.
            if let Err(e) = noted {
                tracing::error!("cannot note on flash that an origin is being written: {e}");
            }
        }));
        self.targets.set(Target::Origin(id), Some(device.clone()));
        if let Err(e) = self.engine.attach(config(&record, &device)) {
            self.release(id);
            return Err(super::control_error(&format!("attach {}", record.name), e));
        }
        let phase = if reconcile {
            if let Err(e) = self.engine.drain(id, true) {
                tracing::error!(disk = %record.name, "cannot write back what is dirty: {e}");
            }
            Phase::Reconciling(device)
        } else {
            Phase::Attached(self.offer(&record, device))
        };
        self.poke();
        Ok((phase, notices))
    }

    /// Lets clients connect to an attached disk.
    pub(super) fn offer(&self, record: &DiskRecord, device: Arc<Device>) -> Arc<DiskExport> {
        let export = DiskExport::new(
            record.id,
            &record.name,
            record.read_only,
            self.engine.clone(),
            device,
        );
        let export = Arc::new(export);
        self.exports.insert(export.clone());
        export
    }

    /// Closes the origin of a disk the engine has let go.
    pub(super) fn release(&self, id: u16) {
        if let Some(device) = self.targets.set(Target::Origin(id), None) {
            self.poke();
            if Targets::wait_unused(device, REST_TIME).is_err() {
                tracing::warn!(
                    disk = id,
                    "the origin is still being used; it is closed when that ends"
                );
            }
        }
    }

    /// Stores a disk's record durably.
    pub(super) fn store_record(&self, record: &DiskRecord) -> Result<()> {
        lock(&self.pool).change(|registry| {
            match registry.disks.iter_mut().find(|r| r.id == record.id) {
                Some(place) => *place = record.clone(),
                None => registry.disks.push(record.clone()),
            }
            Ok(())
        })
    }
}
