//! Comparing what is cached with origins that do not show whether they changed.
//!
//! Such a disk is served from its origin at once. Its clean copies answer nothing and its dirty blocks stay on flash until a
//! sample was compared ([`crate::compare`]). Disks that lie on one drive are compared one after the other: side by side
//! they would send its arm to and fro. Each gets an equal share of [`DRIVE_TIME`], so that all are fully in use after that.
//!
//! If a block differs, the origin changed while nothing served it. All clean copies are void then. Blocks that were
//! dirty before the start belong to what the origin was: the disk is taken out of service and its owner asked. Blocks that
//! became dirty since belong to what the origin is, and stay.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hearth_datastore::port::Port;
use hearth_engine::api::{DiskId, ReqOp, Request};
use hearth_io::beneath::Node;
use hearth_io::{BLOCK, Device, Target};

use super::judge::which_side;
use crate::api::types::CacheCheck;
use crate::daemon::{Daemon, Slot, lock};
use crate::error::{Error, Result};
use crate::origin;
use crate::spot;
use crate::workers::{Class, Spot};

/// Longest comparison of all disks of one drive, not counting the blocks that are compared in any case.
const DRIVE_TIME: Duration = Duration::from_secs(45);
/// Wait before an origin is compared again that could not be read.
const RETRY_TIME: Duration = Duration::from_secs(1);
/// How often a comparison is repeated that lacks blocks which the origin cannot return, before the others have to do: bad
/// sectors must not keep a cache void without limit. While the origin returns nothing, it does not count.
const TRIES_MAX: u32 = 3;
/// Shortest share of a disk.
const SHARE_MIN: Duration = Duration::from_secs(1);

/// Why a cache is dropped with `--on-start drop`.
const DROPPED: &str = "its cache is to be dropped at each start";

/// What has to be compared of a disk.
#[derive(Clone, Copy, Debug)]
pub(in crate::daemon) struct Check {
    /// Something was dirty at the start, and the disk is to be refused if a block differs.
    pub(in crate::daemon) owed: bool,
    /// Nothing is compared: all clean copies are to be dropped.
    pub(in crate::daemon) drop: bool,
    /// Longest comparison.
    pub(in crate::daemon) time: Duration,
}

struct Job {
    id: DiskId,
    /// A disk that waits for its turn can be closed.
    device: Weak<Device>,
    check: Check,
    /// How often it could not be read.
    tries: u32,
}

/// Disks that wait, by the drive they lie on, and until when that drive's are to be done.
#[derive(Default)]
pub(in crate::daemon) struct Checks(Mutex<BTreeMap<Spot, (VecDeque<Job>, Instant)>>);

impl Daemon {
    /// Has a disk, or a file of a datastore, compared on a thread of its drive.
    pub(in crate::daemon) fn check_later(
        self: &Arc<Daemon>,
        id: DiskId,
        device: &Arc<Device>,
        check: Check,
    ) {
        let drive = self.drive_of(id);
        let mut checks = lock(&self.checks.0);
        let job = Job {
            id,
            device: Arc::downgrade(device),
            check,
            tries: 0,
        };
        if let Some((waiting, _)) = checks.get_mut(&drive) {
            waiting.push_back(job);
            return;
        }
        let end = Instant::now() + DRIVE_TIME;
        checks.insert(drive.clone(), (VecDeque::from([job]), end));
        drop(checks);
        let daemon = self.clone();
        self.aside(&drive.clone(), Class::Background, move || {
            while let Some((mut job, end)) = daemon.next_check(&drive) {
                if daemon.check(&mut job, end) {
                    continue;
                }
                // It cannot be read. The others go first, and then it is tried again.
                if let Some((waiting, _)) = lock(&daemon.checks.0).get_mut(&drive) {
                    waiting.push_back(job);
                }
                std::thread::sleep(RETRY_TIME);
            }
        });
    }

    /// The drive a disk lies on, or what else is slow as one.
    fn drive_of(&self, id: DiskId) -> Spot {
        let grounds = lock(&self.grounds);
        let parts = grounds.of(id).map(|place| place.parts());
        let lowest = parts
            .unwrap_or_default()
            .iter()
            .rev()
            .find_map(|part| match part.node {
                Node::Device(rdev) => Some(rdev),
                Node::File { .. } => None,
            });
        drop(grounds);
        if let Some(rdev) = lowest {
            return Spot::new(format!("block device {rdev:#x}"));
        }
        if let Some(path) = self.stores.numbers.path_of(id) {
            return spot::Mounts::now().spot_of_path(&path);
        }
        let origin = self.seen.record(id).map(|record| record.origin.clone());
        spot::of(&origin.unwrap_or_default())
    }

    /// The next disk of a drive and when its share of the time ends; none ends the drive's thread.
    fn next_check(&self, drive: &Spot) -> Option<(Job, Instant)> {
        let mut checks = lock(&self.checks.0);
        let (waiting, end) = checks.get_mut(drive)?;
        let now = Instant::now();
        let share = end.saturating_duration_since(now) / (waiting.len().max(1) as u32);
        let Some(job) = waiting.pop_front() else {
            checks.remove(drive);
            return None;
        };
        let time = share.max(SHARE_MIN).min(job.check.time);
        Some((job, now + time))
    }

    /// Compares a disk; false if too little of its origin could be read.
    fn check(self: &Arc<Daemon>, job: &mut Job, end: Instant) -> bool {
        let Job {
            id,
            device,
            check,
            tries,
        } = job;
        let Some(device) = &device.upgrade() else {
            return true;
        };
        let name = self.name_of(*id);
        let differs = if check.drop && !check.owed {
            Some(DROPPED.to_owned())
        } else {
            let subject = crate::compare::Subject {
                engine: &self.engine,
                id: *id,
                device,
            };
            let found = subject.thorough(end, |compared, cached| {
                self.note_check(*id, device, compared as u64, cached as u64)
            });
            if !self.note_check(*id, device, found.equal as u64, found.equal as u64) {
                return true;
            }
            let has_nothing = found.equal == 0 && found.differs.is_none();
            let is_short = found.is_short() && {
                let is_silent = subject.is_silent();
                *tries += u32::from(!is_silent);
                is_silent || *tries < TRIES_MAX
            };
            if has_nothing && !found.is_complete() || is_short {
                tracing::warn!(disk = %name, unread = found.unread, "the comparison with the origin is repeated: cached blocks could not be read there");
                return false;
            }
            tracing::info!(disk = %name, blocks = found.equal, "cached blocks were compared with the origin");
            found
                .differs
                .map(|at| format!("its content at offset {at} is not what was left there"))
        };
        let has_changed = differs.is_some();
        let differs = differs.or_else(|| {
            // The comparison protects dirty blocks. They stay.
            check.drop.then(|| DROPPED.to_owned())
        });
        let outcome = match differs {
            None => Ok(true),
            Some(why) if check.owed && has_changed => {
                self.take_out_of_service(*id, &name, &why).map(|()| false)
            }
            Some(why) => self.drop_copies(*id, &name, device, &why).map(|()| true),
        };
        match outcome {
            Ok(true) => self.end_check(*id, device),
            Ok(false) => {}
            // They stay without effect, which is safe.
            Err(e) => {
                tracing::error!(disk = %name, "the cache of a disk whose origin changed is not used: {e}")
            }
        }
        true
    }

    /// Acts on the slot of a disk, unless its origin was closed or opened again since.
    fn with_device<T>(
        &self,
        id: DiskId,
        device: &Arc<Device>,
        act: impl FnOnce(&mut Slot) -> T,
    ) -> Option<T> {
        let mut disks = self.disks.lock();
        let slot = disks.by_id_mut(id)?;
        let is_same = slot.device.as_ref().is_some_and(|d| Arc::ptr_eq(d, device));
        is_same.then(|| act(slot))
    }

    /// Notes how far the comparison of a disk is; false if its result is not needed any more.
    fn note_check(&self, id: DiskId, device: &Arc<Device>, compared: u64, cached: u64) -> bool {
        let noted = self.with_device(id, device, |slot| {
            let check = slot.session.check.as_mut();
            check.map(|check| *check = CacheCheck { compared, cached })
        });
        noted.flatten().is_some() || self.is_served_file(id, device)
    }

    /// True for a file of a datastore that was not closed since it got this device.
    fn is_served_file(&self, id: DiskId, device: &Arc<Device>) -> bool {
        let now = self.targets.get(Target::Origin(id));
        self.stores.numbers.has(id) && now.is_some_and(|now| Arc::ptr_eq(&now, device))
    }

    /// From here on the clean copies of a disk count, and its dirty blocks may be written back.
    fn end_check(&self, id: DiskId, device: &Arc<Device>) {
        self.with_device(id, device, |slot| {
            slot.session.check = None;
            self.engine.set_verified(id, true);
        });
        if self.is_served_file(id, device) {
            self.engine.set_verified(id, true);
        }
        self.poke();
    }

    /// Drops the clean copies of a served disk.
    fn drop_copies(&self, id: DiskId, name: &str, device: &Arc<Device>, why: &str) -> Result<()> {
        // A crash before the drop is durable must not bring the copies back. A file of a datastore is compared again
        // after a crash, whatever is noted of it; the note would throw away what clients wrote since.
        let is_file = self.is_served_file(id, device);
        if !is_file {
            self.note_distrust(id, name)?;
        }
        self.at_rest(&format!("drop the cache of {name}"), || {
            self.engine.drop_clean(id)
        })?;
        if is_file {
            tracing::warn!(file = %name, "the file changed while Hearth was stopped ({why}); its cache is dropped");
            return Ok(());
        }
        let now = origin::identity(device);
        lock(&self.pool).change_or_keep(|registry| {
            if let Some(record) = registry.by_id_mut(id) {
                record.origin_identity = now;
                record.clean_detach = false;
            }
            Ok(())
        })?;
        let notice = format!(
            "the origin changed while Hearth was not looking ({why}); its cache is dropped"
        );
        tracing::warn!(disk = %name, "{notice}");
        if let Some(slot) = self.disks.lock().by_id_mut(id) {
            slot.session.notices.push(notice);
        }
        Ok(())
    }

    fn note_distrust(&self, id: DiskId, name: &str) -> Result<()> {
        lock(&self.pool).change_or_keep(|registry| {
            let record = registry.by_id_mut(id);
            origin::distrust(record.ok_or_else(|| Error::no_disk(name))?);
            Ok(())
        })
    }

    /// Ends serving a disk of which something was dirty before the start, on an origin that is not what it was.
    fn take_out_of_service(self: &Arc<Daemon>, id: DiskId, name: &str, why: &str) -> Result<()> {
        self.note_distrust(id, name)?;
        let record = lock(&self.pool).record(id).cloned();
        let record = record.ok_or_else(|| Error::no_disk(name))?;
        let error = Error::refused(
            format!(
                "the origin {} does not fit the cache: {why}, while something written by the guest waits on flash",
                record.origin
            ),
            which_side(&record),
        );
        self.events.tell(hearth_events::Event::DiskRefused {
            disk: name.to_owned(),
            why: error.to_string(),
        });
        // Before it is stopped: a stopped disk without a reason of its own is another host's.
        if let Some(slot) = self.disks.lock().by_id_mut(id) {
            slot.session.misfit = Some(error.clone());
            slot.session.check = None;
        }
        self.stop_requests(id);
        self.end_service(id, error);
        Ok(())
    }
}

/// Blocks that are cached of a new disk which nothing identifies.
const MARKS: u64 = 64;
/// Longest wait for them: the disk can be used without them.
const MARKS_TIME: Duration = Duration::from_secs(10);

impl Daemon {
    /// Caches blocks from all over a new disk. Should it only be written until a crash, nothing else could show at the next
    /// start that its origin is still the same one.
    pub(in crate::daemon) fn cache_marks(&self, id: DiskId, size: u64) {
        let port = match Port::open(&self.reactors) {
            Ok(port) => port,
            Err(e) => {
                tracing::warn!(
                    disk = id,
                    "no blocks are cached that identify its origin: {e}"
                );
                return;
            }
        };
        let blocks = size / BLOCK;
        let mut places: Vec<u64> = (0..MARKS)
            .map(|i| blocks.saturating_sub(1) * i / (MARKS - 1))
            .collect();
        places.dedup();
        let (told, answers) = channel();
        for (place, turn) in places.into_iter().zip(0..) {
            let told = told.clone();
            let request = Request::new(0, id, ReqOp::Prefetch, place * BLOCK, BLOCK, None, 0);
            // The receiver may have given up.
            port.ask(
                turn,
                request,
                Box::new(move |result, _| {
                    let _ = told.send(result);
                }),
            );
        }
        drop(told);
        let end = Instant::now() + MARKS_TIME;
        while answers
            .recv_timeout(end.saturating_duration_since(Instant::now()))
            .is_ok()
        {}
    }
}
