//! A disk whose origin is another's now: shut out by its storage, or taken over by another pool.
//!
//! The engine stops such a disk by itself ([`hearth_engine::Engine::fence`]). Here it is noted in the
//! pool's registry, so that no later start serves it or writes anything back either; then clients
//! are cut off and the origin is closed. What waits on flash stays there and is listed, until the user
//! says what it is worth.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use hearth_engine::api::{DiskId, Effects};
use hearth_format::DiskRecord;
use hearth_io::BLOCK;
use hearth_origin::owner::utc;

use super::admission::now_s;
use super::{Daemon, lock};
use crate::api::types::ByteRange;
use crate::error::{Error, Result};
use crate::life::Event;
use crate::size::human;
use crate::table::Purpose;

/// Stranded ranges listed; the disk's dirty bytes say how much there is in all.
const STRANDED_MAX: usize = 1000;

impl Daemon {
    /// Looks for disks that are to be stopped, and goes on with stopping them.
    pub(super) fn fence_round(self: &Arc<Daemon>) {
        let disks = self.disks.lock();
        let claims = disks
            .all()
            .filter_map(|(id, slot)| Some((id, slot.claim.as_ref()?)));
        let lost: Vec<(DiskId, String)> = claims
            .filter_map(|(id, claim)| Some((id, claim.lost()?)))
            .collect();
        drop(disks);
        let fenced = self.engine.fenced_disks();
        if lost.is_empty() && fenced.is_empty() {
            return;
        }
        let disks = self.disks.lock();
        let open = disks.all().filter(|(_, slot)| slot.device.is_some());
        let open: Vec<_> = open
            .map(|(id, slot)| (slot.name.clone(), id, slot.session.misfit.clone()))
            .collect();
        drop(disks);
        for (name, id, misfit) in open {
            self.beats
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let why = lost.iter().find(|(lost, _)| *lost == id);
            let why = why.map(|(_, why)| why.as_str());
            if let Some(error) = misfit.filter(|_| why.is_none()) {
                self.end_service(id, error);
            } else if why.is_some() || fenced.contains(&id) {
                let why = why.unwrap_or("its storage has shut this host out");
                if let Err(e) = self.stop_fenced(&name, id, why) {
                    tracing::error!(disk = %name, "cannot stop a disk that is another's now: {e}");
                }
            }
        }
    }

    /// Notes that a disk is fenced; the record as it is now.
    pub(super) fn note_fenced(&self, id: DiskId, name: &str) -> Result<DiskRecord> {
        let known = lock(&self.pool).record(id).cloned();
        if let Some(record) = known.filter(|record| record.fenced_at != 0) {
            return Ok(record);
        }
        lock(&self.pool).change(|registry| {
            let record = registry.by_id_mut(id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.fenced_at = now_s();
            Ok(record.clone())
        })
    }

    /// Fails a disk's requests from now on, and writes nothing more to its origin.
    pub(super) fn stop_requests(&self, id: DiskId) {
        let (told, done) = sync_channel(1);
        let engine = self.engine.clone();
        let job = move |now: u64, fx: &mut Effects| {
            // The receiver waits for exactly this; it cannot be gone.
            let _ = told.send(engine.fence(id, now, fx));
        };
        if self.reactors.run(job).is_ok() {
            // A disk that the engine does not know is at rest.
            let _ = done.recv();
        }
    }

    /// Disconnects the clients of a stopped disk and closes its origin. A change in progress goes first; then the
    /// next round does it.
    pub(super) fn end_service(self: &Arc<Daemon>, id: DiskId, why: Error) {
        if let Some(turn) = self.disks.turn(id, Purpose::Changing) {
            self.tell(&turn, Event::Fence(why));
        }
    }

    fn stop_fenced(self: &Arc<Daemon>, name: &str, id: DiskId, why: &str) -> Result<()> {
        self.stop_requests(id);
        let first = lock(&self.pool)
            .record(id)
            .is_some_and(|record| record.fenced_at == 0);
        let record = self.note_fenced(id, name)?;
        let error = self.fenced(&record);
        if first {
            self.events.tell(hearth_events::Event::DiskFenced {
                disk: name.to_owned(),
                why: format!("{why}: {error}"),
            });
        }
        self.end_service(id, error);
        Ok(())
    }

    /// Why a fenced disk is not served.
    pub(super) fn fenced(&self, record: &DiskRecord) -> Error {
        let status = self.engine.status(record.id).unwrap_or_default();
        let dirty = status.owed_blocks() * BLOCK;
        let name = &record.name;
        let (stranded, remedy) = if dirty > 0 {
            (
                format!(
                    ", and {} written by the guest wait on flash (`hearth disk show {name}` lists them)",
                    human(dirty)
                ),
                format!(
                    "see that no other host uses the origin any more, then say which side wins: `hearth disk set {name} --trust origin` throws what waits away, `hearth disk set {name} --trust flash` writes it over what others may have written since"
                ),
            )
        } else {
            (
                String::new(),
                format!(
                    "see that no other host uses the origin any more, then `hearth disk set {name} --trust origin`; nothing is lost but what is cached"
                ),
            )
        };
        Error::refused(
            format!(
                "the origin {} is another host's since {}{stranded}",
                record.origin,
                utc(record.fenced_at)
            ),
            remedy,
        )
    }

    /// What waits on flash of a disk that is not served.
    pub(super) fn stranded(&self, id: DiskId) -> Vec<ByteRange> {
        let ranges = self.engine.dirty_ranges(id, STRANDED_MAX).into_iter();
        ranges
            .map(|(offset, length)| ByteRange { offset, length })
            .collect()
    }
}
