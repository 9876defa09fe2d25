//! The control operations. Every change is durable in the pool's registry before it is answered.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use hearth_engine::DiskStatus;
use hearth_engine::api::{DISK_MAX, OriginState};
use hearth_format::{DiskRecord, Uuid, check_name};
use hearth_io::{BLOCK, OriginSpec};
use hearth_origin::owner::Take;

use super::admission::{RULES, failure};
use super::apart::is_taken;
use super::attach::Opened;
use super::{Daemon, Job, Phase, Slot, Stage, StopReason, control_error, lock, trouble};
use crate::api::advice::AdviceReport;
use crate::api::server::Control;
use crate::api::stats::{DiskReport, StatsReport};
use crate::api::types::{
    DiskAdd, DiskInfo, DiskRemove, DiskSet, DiskState, PoolExport, PoolInfo, Trust,
};
use crate::api::workload::{HistogramReport, RecordStart, Recording};
use crate::clients::sentence;
use crate::error::{Error, Result};
use crate::origin;
use crate::progress::Progress;
use crate::rundir::nbd_socket;
use crate::settings;
use crate::size::human;

/// How long `set --trust flash` waits for what is dirty before it goes on in the background.
const RECONCILE_TIME: Duration = Duration::from_secs(60);
/// Most damaged ranges that are named one by one.
const ROTTEN_NAMED: usize = 8;
/// How often it looks.
const RECONCILE_POLL: Duration = Duration::from_millis(10);

/// How long a client that closes its connection may take to be gone: scripts remove a disk right
/// after the program that used it.
const GONE_TIME: Duration = Duration::from_secs(1);

/// How long a change of a disk waits while the disk's origin is being opened.
const OPENING_TIME: Duration = Duration::from_secs(3);

/// How an origin is taken.
fn take(over: bool) -> Take {
    if over { Take::Over } else { Take::Free }
}

/// Why a disk whose flash was trusted is not served: part of what waited there is gone.
pub(super) fn rotten(name: &str, status: &DiskStatus) -> Error {
    let ranges = status.lost_ranges.iter().take(ROTTEN_NAMED);
    let mut named: Vec<String> = ranges
        .map(|(offset, len)| format!("{len} bytes at offset {offset}"))
        .collect();
    let more = status.lost_ranges.len().saturating_sub(ROTTEN_NAMED);
    if more > 0 {
        named.push(format!("{more} more ranges (`hearth disk show {name}`)"));
    }
    Error::refused(
        format!(
            "part of what waited on flash for {name} cannot be read there any more: {}; all else is in the origin",
            named.join(", ")
        ),
        format!(
            "`hearth disk accept-loss {name}` gives that part up, so that the origin's older content stays there, and the disk is served"
        ),
    )
}

/// Why a disk takes no flush or removal now.
fn reconciling(name: &str) -> Error {
    Error::conflict(
        format!("what waited on flash is being written to the origin of {name}"),
        "wait until it is served; to give that up, restart the daemon and choose the other side",
    )
}

/// Refuses what cuts clients off.
fn unused(name: &str, slot: &Slot) -> Result<()> {
    let Some(export) = slot.export().filter(|e| e.clients().connections() > 0) else {
        return Ok(());
    };
    let who = sentence(&export.clients().list());
    Err(Error::refused(
        format!("disk {name} is in use by {who}"),
        "stop the virtual machine or program first, or cut it off with --yes",
    ))
}

impl Daemon {
    pub(super) fn not_stopping(&self) -> Result<()> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(Error::conflict(
                "the daemon is stopping",
                "start it again first",
            ));
        }
        Ok(())
    }

    /// Refuses a minimum the flash cannot hold beside the others'. Shares given as advised are no
    /// reason to: they give way to what owners set, in [`keep_shares`](Self::keep_shares).
    fn check_share(&self, name: &str, min: u64) -> Result<()> {
        let pool = lock(&self.pool);
        let others: u64 = pool
            .registry()
            .disks
            .iter()
            .filter(|d| d.name != name)
            .fold(0, |sum, d| sum.saturating_add(d.min_bytes));
        // The rest stays everybody's: eviction needs blocks it may drop.
        let most = pool.capacity() / 8 * 7;
        if min > 0 && others.saturating_add(min) > most {
            return Err(Error::invalid(
                format!(
                    "{} cannot be kept for {name}: of the pool, {} can be kept in all, and {} are kept for other disks",
                    human(min),
                    human(most),
                    human(others)
                ),
                "lower --min",
            ));
        }
        Ok(())
    }

    /// Refuses an origin that is the flash, another disk's, or one of our own exports, also under
    /// another name.
    fn check_unused(self: &Arc<Daemon>, text: &str, spec: &OriginSpec) -> Result<()> {
        // It would be cached twice, and at a stop its server would be gone before its last writes.
        let ours = self.images.parent().map(nbd_socket);
        if let (Some(ours), Some(socket)) = (ours, hearth_origin::socket(spec))
            && origin::is_same_file(&ours, &socket)
        {
            return Err(Error::invalid(
                format!("{} is this daemon's own NBD socket", socket.display()),
                "give the origin of that disk instead, or the address of another server",
            ));
        }
        self.check_apart(text, spec)?;
        self.check_unclaimed(spec)
    }

    /// Refuses another disk's origin, going by names alone.
    fn check_unclaimed(&self, spec: &OriginSpec) -> Result<()> {
        let path = hearth_origin::local_path(spec);
        let pool = lock(&self.pool);
        let owner = pool.registry().disks.iter().find(|record| {
            origin::parse(&record.origin).is_ok_and(|other| {
                other.source == spec.source
                    || (path.is_some() && hearth_origin::local_path(&other) == path)
            })
        });
        match owner {
            Some(record) => Err(is_taken(&record.origin, &record.name)),
            None => Ok(()),
        }
    }

    /// Refuses a disk that cannot be added beside those that are there.
    fn check_new(&self, disk: &DiskAdd, spec: &OriginSpec) -> Result<()> {
        self.not_stopping()?;
        if lock(&self.disks).contains_key(&disk.name) {
            return Err(Error::conflict(
                format!("there is already a disk named {}", disk.name),
                "choose another name",
            ));
        }
        self.check_share(&disk.name, disk.min)?;
        self.check_unclaimed(spec)
    }

    /// The lock of the operations, for a change of disk `name`. While its origin is being opened it
    /// is waited for, a little; operations on other disks go on meanwhile.
    pub(super) fn ops_for(&self, name: &str) -> Result<MutexGuard<'_, ()>> {
        let end = Instant::now() + OPENING_TIME;
        loop {
            let ops = lock(&self.ops);
            self.not_stopping()?;
            let id = self.with_slot(name, |slot| match slot.is_leaving() {
                true => Err(Error::conflict(
                    format!("disk {name} is being removed"),
                    "wait until it is gone",
                )),
                false => Ok(slot.id),
            })?;
            let left = end.saturating_duration_since(Instant::now());
            if let Some(ops) = self.attaching.free_or_wait(id, ops, left) {
                return Ok(ops);
            }
            if left.is_zero() {
                return Err(Error::conflict(
                    format!("the origin of disk {name} is being opened and does not answer"),
                    "see whether its device or network mount hangs",
                ));
            }
        }
    }

    pub(super) fn with_slot<T>(
        &self,
        name: &str,
        act: impl FnOnce(&mut Slot) -> Result<T>,
    ) -> Result<T> {
        let mut disks = lock(&self.disks);
        act(disks.get_mut(name).ok_or_else(|| Error::no_disk(name))?)
    }

    fn begin(&self, name: &str, job: Job) -> Result<()> {
        self.with_slot(name, |slot| {
            slot.job = Some(job);
            slot.progress = Progress::default();
            slot.shown = None;
            slot.incomplete = None;
            Ok(())
        })
    }

    /// Voids whatever the log may hold of the number a new disk gets, and attaches the disk.
    fn admit(self: &Arc<Daemon>, mut record: DiskRecord, opened: Opened) -> Result<()> {
        let (id, name) = (record.id, record.name.clone());
        let failed = |e| control_error(&format!("add {name}"), e);
        self.engine
            .attach(
                settings::config(&record, opened.device()),
                OriginState::Unknown,
            )
            .map_err(failed)?;
        let outcome = self.forget(id).and_then(|since_seq| {
            // The engine may be flushing the origin of its own accord at this moment.
            self.at_rest(&format!("add {name}"), || self.engine.detach(id))?;
            record.since_seq = since_seq;
            lock(&self.pool).change(|registry| {
                // Takes the same number as the caller saw: operations are one at a time.
                registry.take_disk_id();
                registry.disks.push(record.clone());
                Ok(())
            })
        });
        if let Err(e) = outcome {
            let _ = self.engine.detach(id);
            let _ = self.engine.remove(id);
            return Err(e);
        }
        // A new disk's origin fits, so there is nothing left over that would have to be closed.
        let (slot, _) = self.attach_slot(record, None, Ok(opened));
        lock(&self.disks).insert(name, slot);
        // What is kept for it is taken from the others' shares.
        self.keep_shares();
        Ok(())
    }

    fn grow(&self, name: &str) -> Result<()> {
        let export = self.with_slot(name, |slot| {
            slot.export().cloned().ok_or_else(|| {
                Error::conflict(
                    format!("disk {name} is not attached"),
                    "put its origin right first; it then takes over the size by itself",
                )
            })
        })?;
        let device = export.origin();
        // What shrank is judged by what it was, or nothing behind its end could be written until the
        // next look, not even when it has its size back.
        let now = device.file().and_then(|file| file.current_size().ok());
        let asked = match now.filter(|now| *now < device.size()) {
            Some(shrunk) => Ok(shrunk),
            None => device.refresh_size(),
        };
        let size = asked.map_err(|e| {
            Error::unavailable(
                format!("cannot ask {} for its size: {e}", device.name()),
                "",
            )
        })?;
        let now = origin::identity(device);
        // The origin has said all it has to say: from here on nothing waits for it.
        let _ops = self.ops_for(name)?;
        self.with_slot(name, |slot| match slot.export() {
            Some(still) if Arc::ptr_eq(still, &export) => Ok(()),
            _ => Err(Error::conflict(
                format!("disk {name} was detached while its origin was asked for its size"),
                "try again when it is attached",
            )),
        })?;
        let id = hearth_volume::Volume::disk(&*export);
        let known = lock(&self.pool).record(id).map(|record| record.size);
        let known = known.ok_or_else(|| Error::no_disk(name))?;
        if size < known {
            return Err(Error::refused(
                format!("the origin of {name} shrank from {known} to {size} bytes"),
                "give it its size back; disks cannot shrink",
            ));
        }
        if size > DISK_MAX {
            return Err(Error::invalid(
                format!("the origin of {name} is larger than 256 TiB"),
                "no disk can be",
            ));
        }
        // The registry comes last: a start that finds the new size there would not know that the last
        // block's copy may be padded.
        self.at_rest(&format!("resize {name}"), || self.engine.set_size(id, size))?;
        lock(&self.pool).change(|registry| {
            let record = registry.disks.iter_mut().find(|r| r.id == id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.size = size;
            if device.is_untouched() {
                record.origin_identity = now;
            }
            Ok(())
        })?;
        export.set_size(size);
        self.exports.resized(name);
        Ok(())
    }

    /// Attaches a disk that was refused, now that somebody has decided.
    fn decide(self: &Arc<Daemon>, name: &str, trust: Option<Trust>, take: Take) -> Result<()> {
        let ops = self.ops_for(name)?;
        let id = self.with_slot(name, |slot| match &slot.phase {
            _ if matches!(slot.job, Some(Job::Remove { .. })) => Err(Error::conflict(
                format!("disk {name} is being removed"),
                "wait, or call the removal off",
            )),
            Phase::Refused(_) => Ok(slot.id),
            Phase::Waiting(e) if take == Take::Free => Err(e.clone()),
            Phase::Waiting(_) => Ok(slot.id),
            _ => Err(Error::conflict(
                format!("disk {name} is attached; there is nothing to decide"),
                "leave --trust and --takeover out",
            )),
        })?;
        let record = lock(&self.pool)
            .record(id)
            .cloned()
            .ok_or_else(|| Error::no_disk(name))?;
        // Nobody else has it: that was waited for.
        let mark = self
            .attaching
            .take(id)
            .ok_or_else(|| Error::conflict(format!("disk {name} is being attached"), ""))?;
        drop(ops);
        self.attach_marked(mark, record, trust, take)?;
        self.with_slot(name, |slot| match &slot.phase {
            Phase::Refused(e) | Phase::Waiting(e) => Err(e.clone()),
            _ => Ok(()),
        })
    }

    /// Gives clients of a disk, or of all, that have just gone the moment it takes to notice.
    fn let_clients_go(&self, name: Option<&str>) {
        let end = Instant::now() + GONE_TIME;
        let used = || {
            lock(&self.disks).iter().any(|(disk, slot)| {
                name.is_none_or(|name| name == disk)
                    && slot.export().is_some_and(|e| e.clients().connections() > 0)
            })
        };
        while used() && Instant::now() < end {
            std::thread::sleep(RECONCILE_POLL);
        }
    }

    /// Waits until a disk being reconciled is served, for a while. Fails at once if it cannot be, because
    /// part of what is to win is lost.
    fn wait_reconciled(&self, name: &str) -> Result<()> {
        let end = Instant::now() + RECONCILE_TIME;
        let going_on = || {
            lock(&self.disks)
                .get(name)
                .is_some_and(|s| matches!(s.phase, Phase::Reconciling(_)))
        };
        while going_on() && Instant::now() < end && self.not_stopping().is_ok() {
            let id = self.with_slot(name, |slot| Ok(slot.id))?;
            let status = self.engine.status(id).unwrap_or_default();
            if status.only_lost_left && going_on() {
                return Err(rotten(name, &status));
            }
            std::thread::sleep(RECONCILE_POLL);
        }
        Ok(())
    }

    fn apply(&self, name: &str, set: &DiskSet) -> Result<()> {
        let id = self.with_slot(name, |slot| Ok(slot.id))?;
        let record = lock(&self.pool)
            .record(id)
            .cloned()
            .ok_or_else(|| Error::no_disk(name))?;
        let mut wanted = record.clone();
        let changed = settings::change(&mut wanted, set)?;
        if wanted.min_bytes > record.min_bytes {
            self.check_share(name, wanted.min_bytes)?;
        }
        let record = lock(&self.pool).change(|registry| {
            let record = registry
                .disks
                .iter_mut()
                .find(|r| r.id == id)
                .ok_or_else(|| Error::no_disk(name))?;
            settings::change(record, set)?;
            record.sole_user |= set.sole_user;
            Ok(record.clone())
        })?;
        self.with_slot(name, |slot| {
            let (export, device) = (slot.export(), slot.device());
            for setting in &changed {
                setting.tell(export.map(|e| &**e), device.map(|d| &**d), &record);
            }
            Ok(())
        })?;
        if self.with_slot(name, |slot| {
            Ok(matches!(slot.phase, Phase::Waiting(_) | Phase::Refused(_)))
        })? {
            self.keep_shares();
            return Ok(());
        }
        let failed = |e| control_error(&format!("change {name}"), e);
        for setting in &changed {
            setting.tell_engine(&self.engine, &record).map_err(failed)?;
        }
        match set.auto {
            Some(true) => drop(self.apply_shares(Some(name))?),
            Some(false) => self.with_slot(name, |slot| {
                slot.share = None;
                Ok(())
            })?,
            None => {}
        }
        self.keep_share(name).map_err(failed)?;
        self.poke();
        Ok(())
    }
}

impl Control for Arc<Daemon> {
    fn pool(&self) -> Result<PoolInfo> {
        Ok(self.pool_info())
    }

    fn export_pool(&self, how: PoolExport) -> Result<()> {
        if !how.yes {
            self.let_clients_go(None);
        }
        let _ops = lock(&self.ops);
        self.not_stopping()?;
        for (name, slot) in lock(&self.disks).iter() {
            if !how.yes {
                unused(name, slot)?;
            }
            let status = self.engine.status(slot.id).unwrap_or_default();
            let dirty = status.owed_blocks();
            if let Some(e) = trouble::only_lost_left(name, &status) {
                return Err(e);
            }
            if dirty > 0
                && let Phase::Waiting(e) | Phase::Refused(e) = &slot.phase
            {
                return Err(Error::refused(
                    format!(
                        "{} of disk {name} are only on flash and cannot be written back: {}",
                        human(dirty * BLOCK),
                        e.what
                    ),
                    e.remedy.clone(),
                ));
            }
        }
        self.request_stop(StopReason::Export);
        Ok(())
    }

    fn disks(&self) -> Result<Vec<DiskInfo>> {
        Ok(self.disk_infos())
    }

    fn disk(&self, name: &str) -> Result<DiskInfo> {
        self.disk_info(name)
    }

    fn add(&self, disk: DiskAdd) -> Result<DiskInfo> {
        check_name(&disk.name).map_err(|e| {
            Error::invalid(
                e.to_string()
                    .replace("the disk name is damaged", "the disk name will not do"),
                "use letters, digits, '.', '_' and '-', at most 64, not starting with '.' or '-'",
            )
        })?;
        let mut record = settings::defaults();
        settings::change(&mut record, &disk)?;
        let spec = origin::parse(&disk.origin)?;
        origin::check_writable(&spec, disk.read_only)?;
        self.check_new(&disk, &spec)?;
        self.check_unused(&disk.origin, &spec)?;
        let flash = lock(&self.pool).path().to_owned();
        origin::check_plain(&spec, &flash)?;
        let chain = self.new_chain(&spec, disk.allow_backing)?;
        self.check_chain(&disk.name, &spec, &chain, disk.read_only)?;
        record = DiskRecord {
            name: disk.name.clone(),
            rules: RULES,
            sole_user: disk.sole_user,
            allow_backing: disk.allow_backing,
            chain,
            ..record
        };
        let take = take(disk.takeover);
        let ownership = self.owners.claim(&spec, &record, take);
        let ownership = ownership.map_err(|e| failure(&e))?;
        let backing = self.backing_of(&record);
        let device = origin::open(&spec, &record, &self.images, backing)?;
        ownership.confirm(&spec)?;
        let size = device.size();
        if size > DISK_MAX {
            return Err(Error::invalid(
                format!("the origin {} is larger than 256 TiB", device.name()),
                "",
            ));
        }
        let opened = Opened::new(device, ownership);
        // All that the origin can hold up is done. Others may have added disks meanwhile.
        let _ops = lock(&self.ops);
        self.check_new(&disk, &spec)?;
        let place = opened.device().beneath().cloned();
        self.check_still_apart(&disk.origin, place.as_ref())?;
        self.check_chain_names(&disk.name, &spec, &record.chain, disk.read_only)?;
        let id = lock(&self.pool).registry().free_disk_id().ok_or_else(|| {
            Error::conflict(
                "the pool has as many disks as it can have",
                "remove one first",
            )
        })?;
        record = DiskRecord {
            id,
            origin: disk.origin,
            size,
            serial: Uuid::new_v4(),
            ..record
        };
        self.admit(record, opened)?;
        self.note_place(id, place);
        let info = self.disk_info(&disk.name)?;
        if info.state != DiskState::Attached {
            let reason = info.reason.unwrap_or_default();
            return Err(Error::unavailable(
                format!(
                    "disk {} was added but is {}: {reason}",
                    disk.name,
                    info.state.word()
                ),
                "",
            ));
        }
        Ok(info)
    }

    fn set(&self, name: &str, set: DiskSet) -> Result<DiskInfo> {
        let ops = self.ops_for(name)?;
        self.apply(name, &set)?;
        drop(ops);
        if set.size_from_origin {
            self.grow(name)?;
        }
        if set.allow_backing {
            self.allow_backing(name)?;
        }
        let asked = set.sole_user
            && self.with_slot(name, |slot| Ok(matches!(slot.phase, Phase::Refused(_))))?;
        if set.trust.is_some() || set.takeover || asked {
            self.decide(name, set.trust, take(set.takeover))?;
            self.wait_reconciled(name)?;
        }
        self.disk_info(name)
    }

    fn flush(&self, name: &str) -> Result<DiskInfo> {
        let _ops = self.ops_for(name)?;
        let id = self.with_slot(name, |slot| match (&slot.phase, slot.job) {
            (_, Some(Job::Remove { .. })) => {
                Err(Error::conflict(format!("disk {name} is being removed"), ""))
            }
            (Phase::Waiting(e) | Phase::Refused(e), _) => Err(Error::refused(
                format!("disk {name} cannot be flushed: {}", e.what),
                e.remedy.clone(),
            )),
            (Phase::Reconciling(_), _) => Err(reconciling(name)),
            _ => Ok(slot.id),
        })?;
        self.engine
            .drain(id, true)
            .map_err(|e| control_error(&format!("flush {name}"), e))?;
        self.begin(name, Job::Flush)?;
        self.poke();
        self.stop_changed.notify_all();
        self.disk_info(name)
    }

    fn cancel(&self, name: &str) -> Result<DiskInfo> {
        let stays = |slot: &mut Slot| match slot.is_leaving() {
            true => Err(Error::conflict(
                format!("the removal of disk {name} is in its last step and cannot be called off"),
                "wait until the disk is gone, and add it again",
            )),
            false => Ok(()),
        };
        // That step has the lock. Whoever asks now is told at once, not when the disk is gone.
        self.with_slot(name, stays)?;
        let _ops = lock(&self.ops);
        self.with_slot(name, |slot| {
            stays(slot)?;
            self.call_off(name, slot);
            Ok(())
        })?;
        self.disk_info(name)
    }

    fn remove(&self, name: &str, how: DiskRemove) -> Result<DiskInfo> {
        if !how.yes {
            self.let_clients_go(Some(name));
        }
        let _ops = self.ops_for(name)?;
        let (id, attached) = self.with_slot(name, |slot| {
            if !how.yes {
                unused(name, slot)?;
            }
            let status = self.engine.status(slot.id).unwrap_or_default();
            let dirty = status.owed_blocks();
            match &slot.phase {
                Phase::Waiting(e) | Phase::Refused(e) if dirty > 0 && !how.discard_dirty => {
                    Err(Error::refused(
                        format!(
                            "{} of disk {name} are only on flash and cannot be written back: {}",
                            human(dirty * BLOCK),
                            e.what
                        ),
                        format!(
                            "{}; or throw them away with --discard-dirty --yes",
                            e.remedy
                        ),
                    ))
                }
                Phase::Waiting(_) | Phase::Refused(_) => Ok((slot.id, false)),
                Phase::Reconciling(_) => Err(reconciling(name)),
                _ => Ok((slot.id, true)),
            }
        })?;
        if attached {
            self.engine
                .drain(id, !how.discard_dirty)
                .map_err(|e| control_error(&format!("remove {name}"), e))?;
        }
        self.exports.remove(name);
        self.begin(
            name,
            Job::Remove {
                discard: how.discard_dirty,
                stage: Stage::Draining,
            },
        )?;
        let info = self.disk_info(name)?;
        self.poke();
        self.stop_changed.notify_all();
        Ok(info)
    }

    fn accept_loss(&self, name: &str) -> Result<DiskInfo> {
        let ops = lock(&self.ops);
        self.not_stopping()?;
        let id = self.with_slot(name, |slot| Ok(slot.id))?;
        let blocks = self
            .engine
            .accept_loss(id)
            .map_err(|e| control_error(&format!("accept the loss of {name}"), e))?;
        if blocks == 0 {
            return Err(Error::conflict(
                format!("disk {name} has lost nothing"),
                "there is nothing to accept",
            ));
        }
        tracing::warn!(disk = %name, blocks, "lost blocks accepted; they read as the origin has them");
        self.poke();
        // One that waited for this is served now.
        drop(ops);
        self.wait_reconciled(name)?;
        self.disk_info(name)
    }

    fn stats(&self) -> Result<StatsReport> {
        Ok(self.stats_report())
    }

    fn disk_stats(&self, name: &str) -> Result<DiskReport> {
        self.disk_report(name)
    }

    fn histogram(&self, name: &str, reset: bool) -> Result<HistogramReport> {
        self.histogram_report(name, reset)
    }

    fn advice(&self, name: Option<&str>) -> Result<AdviceReport> {
        self.advise(name)
    }

    fn apply_advice(&self, name: Option<&str>) -> Result<AdviceReport> {
        let _ops = lock(&self.ops);
        self.not_stopping()?;
        self.apply_shares(name)
    }

    fn record(&self, name: &str, start: RecordStart) -> Result<Recording> {
        self.not_stopping()?;
        self.begin_recording(name, &start)
    }

    fn stop_recording(&self, name: &str) -> Result<Recording> {
        self.end_recording(name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    #[test]
    fn a_limit_an_older_version_took_is_in_nobodys_way() {
        let (_dir, daemon) = testing::with_disk("a");
        let old = |registry: &mut hearth_format::Registry| {
            registry.disks[0].max_bytes = 1024;
            Ok(())
        };
        lock(&daemon.pool).change(old).unwrap();
        let cutoff = DiskSet {
            seq_cutoff: Some(0),
            ..DiskSet::default()
        };
        daemon.set("a", cutoff).unwrap();
        let mut limits = DiskSet {
            min: Some(8192),
            ..DiskSet::default()
        };
        daemon.set("a", limits.clone()).unwrap_err();
        limits.max = Some(0);
        daemon.set("a", limits).unwrap();
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
