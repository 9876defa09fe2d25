//! Files of datastores as disks of the pool.
//!
//! A file's disk is in the registry like any other, and in no slot of the table: it has no clients of its own, no
//! name that people use, and comes and goes with the file's use. What it is called there is what the file system
//! calls the file, so that it is found again wherever the file was moved to.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hearth_datastore::body::Body;
use hearth_datastore::origin::{Disk, FileOrigin, Hands, is_same_time};
use hearth_datastore::{Disks, Look, Missing, NotNow, store};
use hearth_engine::api::{DiskId, ExtentState, Mode, OriginState, ReqOp, Request};
use hearth_events::Event;
use hearth_format::datastore::DatastoreRecord;
use hearth_format::{DiskRecord, Home, OriginIdentity, Uuid};
use hearth_io::{BLOCK, Device, Target, Targets};
use hearth_nfs::handle::Key;
use hearth_nfs::tree::Outcome;
use hearth_nfs::v3::Status;
use hearth_trees::large;

use super::super::admission::RULES;
use super::super::attach::Check;
use super::super::control::check_share;
use super::super::homeless::{SEGMENTS_MIN, check_promise};
use super::super::{Daemon, REST_PACE, REST_TIME, lock};
use super::matching::Matching;
use crate::api::datastores::FileRule;
use crate::clients::CLASH_TIME;
use crate::error::{Error, Kind, Result};
use crate::keys::{key_of, text_of};
use crate::{compare, settings};

/// What is kept of flash for a file is a multiple of this: it is noted whenever it changes.
const KEEP_STEP: u64 = 1 << 20;

/// Longest wait for the last user of a file that is being closed.
const RELEASE_TIME: Duration = Duration::from_secs(2);
/// Longest comparison of a file with dirty blocks before it is served after a crash, not counting the newest clean blocks.
const DIRTY_FITS_TIME: Duration = Duration::from_secs(1);
/// Longest comparison of a file that is served meanwhile.
const CLEAN_FITS_TIME: Duration = Duration::from_secs(3);
/// Longest comparison of a file whose time of change alone is another.
const STILL_FITS_TIME: Duration = Duration::from_secs(2);

/// Parts of a file that are looked at at once.
const PARTS_LOOK: usize = 1 << 16;
/// Parts of a file that are no further apart become zeros together.
const PARTS_GAP: u64 = 1 << 20;

/// Parts (offset and length) in their order, those near to each other in one.
fn joined(mut parts: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    parts.sort_unstable();
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (from, len) in parts {
        match all.last_mut() {
            Some((begin, n)) if from <= *begin + *n + PARTS_GAP => {
                *n = (*n).max(from + len - *begin);
            }
            _ => all.push((from, len)),
        }
    }
    all
}

fn identity(look: Look) -> OriginIdentity {
    OriginIdentity {
        size: look.size,
        mtime_ns: look.modified_ns,
        ctime_ns: look.changed_ns,
        dev: look.device,
        inode: look.inode,
    }
}

/// Disks of all datastores that are not in the table.
#[derive(Default)]
pub(in crate::daemon) struct Numbers {
    /// Promised, and not in the registry yet.
    promised: Mutex<BTreeSet<DiskId>>,
    /// Those that the engine serves, with what they are of.
    open: Mutex<BTreeMap<DiskId, Arc<FileOrigin>>>,
}

impl Numbers {
    /// Somebody is about to use this number.
    pub(in crate::daemon) fn has(&self, id: DiskId) -> bool {
        lock(&self.promised).contains(&id) || lock(&self.open).contains_key(&id)
    }

    /// Those that are served.
    pub(in crate::daemon) fn open(&self) -> Vec<DiskId> {
        lock(&self.open).keys().copied().collect()
    }

    /// What the file of one of them is called.
    pub(in crate::daemon) fn name_of(&self, id: DiskId) -> Option<String> {
        Some(lock(&self.open).get(&id)?.name().to_owned())
    }

    /// Those that are served, with what they are of.
    pub(super) fn served(&self) -> Vec<(DiskId, Arc<FileOrigin>)> {
        let open = lock(&self.open);
        open.iter()
            .map(|(id, origin)| (*id, origin.clone()))
            .collect()
    }

    /// Where the file of one of them is now.
    pub(in crate::daemon) fn path_of(&self, id: DiskId) -> Option<PathBuf> {
        lock(&self.open).get(&id)?.path()
    }

    /// What they look like, for the promise that they stay so.
    pub(in crate::daemon) fn leave(&self) -> Vec<(DiskId, OriginIdentity)> {
        let open = lock(&self.open).clone();
        let left = open.into_iter().filter_map(|(id, origin)| {
            let look = origin.leave();
            let look = look.inspect_err(|e| tracing::warn!("{origin:?}: {e}"));
            Some((id, identity(look.ok()?)))
        });
        left.collect()
    }

    /// They are closed.
    pub(in crate::daemon) fn close(&self) -> Vec<DiskId> {
        let open = std::mem::take(&mut *lock(&self.open));
        open.into_keys().collect()
    }
}

/// A number that is promised, until it is in the registry or given back.
struct Promised {
    daemon: Arc<Daemon>,
    id: DiskId,
}

impl Drop for Promised {
    fn drop(&mut self) {
        lock(&self.daemon.stores.numbers.promised).remove(&self.id);
    }
}

/// The pool, as one datastore has it.
pub(super) struct Files {
    daemon: Weak<Daemon>,
    store: String,
    hands: Arc<Hands>,
    /// Held while a file with dirty blocks is compared.
    judging: Mutex<()>,
    /// Settings by names.
    rules: Matching,
    /// Files have every write before it is answered.
    held: AtomicBool,
    /// When two clients last wrote a file in turn, and which.
    clash: Mutex<Option<(Instant, String)>>,
}

impl Files {
    pub(super) fn new(daemon: &Arc<Daemon>, store: &DatastoreRecord) -> std::io::Result<Files> {
        Ok(Files {
            daemon: Arc::downgrade(daemon),
            store: store.name.clone(),
            hands: Hands::start()?,
            judging: Mutex::new(()),
            rules: Matching::new(&store.directory, &store.rules),
            held: AtomicBool::new(store.hold),
            clash: Mutex::default(),
        })
    }

    /// Which two clients wrote a file in turn, while that is news.
    pub(super) fn two_writers(&self) -> Option<String> {
        let clash = lock(&self.clash).clone();
        let (_, which) = clash.filter(|(at, _)| at.elapsed() < CLASH_TIME)?;
        Some(which)
    }

    /// Other rules hold from now on. Files that are not served get their settings when they are.
    pub(super) fn set_rules(&self, rules: &[FileRule]) {
        self.rules.replace(rules);
        let Ok(daemon) = self.daemon() else { return };
        for (id, origin) in daemon.stores.numbers.served() {
            self.resettle(&daemon, id, &origin);
        }
        daemon.poke();
    }

    /// Gives a file that is served the settings that hold for its name now.
    fn resettle(&self, daemon: &Daemon, id: DiskId, origin: &FileOrigin) {
        let record = lock(&daemon.pool).record(id).cloned();
        let own = record.filter(|record| record.datastore == self.store);
        let (Some(mut record), Some(path)) = (own, origin.path()) else {
            return;
        };
        if !self.rules.settle(&mut record, &path) {
            return;
        }
        if let Err(e) = daemon.store_file(&record) {
            tracing::warn!(file = ?origin, "its settings cannot be noted, and stay as they were: {e}");
            return;
        }
        // One that was closed meanwhile is opened as it should be.
        let _ = daemon.treat_writes(id, || Some(self.mode(&record)));
        let _ = daemon
            .engine
            .set_limits(id, record.min_bytes, record.max_bytes);
        for setting in settings::SETTINGS
            .iter()
            .filter(|setting| setting.name != "mode")
        {
            let _ = setting.tell_engine(daemon, &record);
        }
    }

    fn daemon(&self) -> std::result::Result<Arc<Daemon>, NotNow> {
        self.daemon.upgrade().ok_or(NotNow::Wait)
    }

    /// How writes of a file are treated now.
    fn mode(&self, record: &DiskRecord) -> Mode {
        if record.is_flash_only() {
            return Mode::WriteBack;
        }
        settings::mode(record, self.held.load(Ordering::SeqCst))
    }

    /// Gives a file to the engine. Nothing is written to it before `settled`.
    fn serve(
        &self,
        daemon: &Arc<Daemon>,
        record: &DiskRecord,
        origin: &Arc<FileOrigin>,
        settled: &Arc<AtomicBool>,
    ) -> std::result::Result<(), NotNow> {
        let id = record.id;
        if record.is_flash_only() {
            origin.set_scratch();
        }
        origin.set_bound(record.size);
        let (weak, settled) = (self.daemon.clone(), settled.clone());
        origin.before_change(Box::new(move || {
            let daemon = weak.upgrade().filter(|_| settled.load(Ordering::Acquire));
            daemon.is_some_and(|daemon| daemon.withdraw_file(id))
        }));
        let device = Arc::new(Device::remote(Arc::new(Disk::new(origin, &self.hands))));
        daemon.targets.set(Target::Origin(id), Some(device.clone()));
        // It was synced when it was opened.
        let mut config = settings::config(record, &device);
        config.mode = self.mode(record);
        let mode = config.mode;
        if let Err(e) = daemon.give_engine(config, OriginState::Flushed) {
            tracing::error!(file = %device.name(), "cannot be cached: {e}");
            daemon.targets.set(Target::Origin(id), None);
            daemon.poke();
            return Err(NotNow::Wait);
        }
        lock(&daemon.stores.numbers.open).insert(id, origin.clone());
        daemon.watch_file(id, origin);
        // Whoever changed it meanwhile did not find the file among those that are open.
        if self.mode(record) != mode {
            let _ = daemon.treat_writes(id, || Some(self.mode(record)));
        }
        daemon.poke();
        Ok(())
    }

    /// Takes a file from the engine.
    fn end(&self, daemon: &Daemon, id: DiskId) -> bool {
        if daemon.engine.detach(id).is_err() {
            return false;
        }
        let origin = lock(&daemon.stores.numbers.open).remove(&id);
        if let Some(origin) = origin {
            daemon.rest_file(id, &origin);
        }
        let device = daemon.targets.set(Target::Origin(id), None);
        daemon.poke();
        // Closed when this returns: whoever opens the file next must not find it in use by us.
        if let Some(device) = device
            && Targets::wait_unused(device, RELEASE_TIME).is_err()
        {
            tracing::warn!(
                disk = id,
                "a file is still being used; it is closed when that ends"
            );
        }
        true
    }

    /// True if a file that was written when the daemon died is what the cache believes, and its dirty blocks may be used.
    /// Corrupt blocks are no reason to throw away dirty blocks: the copies of the corrupt blocks are dropped.
    fn still_same(
        &self,
        daemon: &Arc<Daemon>,
        id: DiskId,
        device: &Device,
    ) -> std::result::Result<bool, NotNow> {
        let subject = compare::Subject {
            engine: &daemon.engine,
            id,
            device,
        };
        // One file at a time: they share a drive.
        let _turn = lock(&self.judging);
        let end = Instant::now() + DIRTY_FITS_TIME;
        let found = subject.thorough(end, |_, _| true);
        if found.differs.is_none() {
            let is_unread = found.equal == 0 && found.unread > 0;
            return (!is_unread).then_some(true).ok_or(NotNow::Wait);
        }
        let end = Instant::now() + STILL_FITS_TIME;
        let Some(corrupt) = subject.corrupt(end) else {
            return Ok(false);
        };
        tracing::warn!(file = %device.name(), blocks = corrupt.len(), "some blocks of the file are corrupt: their cached copies are dropped, and dirty blocks stay");
        for (block, sum) in corrupt {
            // Anything but its own checksum.
            daemon.engine.drop_unlike(id, block, &[!sum]);
        }
        Ok(true)
    }

    /// Serves a file that has been a disk before.
    fn attach_known(
        &self,
        daemon: &Arc<Daemon>,
        mut record: DiskRecord,
        origin: &Arc<FileOrigin>,
    ) -> std::result::Result<DiskId, NotNow> {
        let id = record.id;
        if daemon.is_kept_back(&record) {
            return Err(NotNow::Wait);
        }
        let scratch = record.is_flash_only();
        if scratch && daemon.cannot_hold() {
            return Err(NotNow::Wait);
        }
        let looks = origin.looks().map_err(|_| NotNow::Wait)?;
        let bound = store::bound(looks.size, scratch);
        if bound > record.size && scratch {
            let more = bound - record.size;
            daemon
                .check_promise(origin.name(), more)
                .map_err(|e| refused(origin, &e))?;
        }
        let settled = origin
            .path()
            .is_some_and(|path| self.rules.settle(&mut record, &path));
        if bound > record.size || settled {
            record.size = record.size.max(bound);
            daemon.store_file(&record).map_err(|_| NotNow::Wait)?;
        }
        // Judged before the engine may write anything back.
        let device = Device::remote(Arc::new(Disk::new(origin, &self.hands)));
        origin.set_bound(record.size);
        let owed = self.owed(id);
        if record.void {
            tracing::warn!(file = %device.name(), "is a scratch file, and a crash has left nothing of it: what was not written since cannot be read");
        }
        let left = record.origin_identity.filter(|_| record.clean_detach);
        let fits = match left {
            // Nothing is left of it that would have to be dropped.
            _ if record.void => true,
            // Nothing was done to it but what changes no content.
            Some(left) => {
                let has_two = matches!(origin.file(), Body::Two(_));
                left.size == looks.size && is_same_time(left.mtime_ns, looks.modified_ns, has_two)
            }
            None if scratch => false,
            // It can be served meanwhile, from the file.
            None if owed == 0 => true,
            None => self.still_same(daemon, id, &device)?,
        };
        let is_unverified = fits && left.is_none() && owed == 0 && !record.void;
        if !fits {
            if scratch {
                tracing::info!(file = %device.name(), "the scratch file is not as it was left; it begins empty");
            } else if owed > 0 {
                tracing::error!(file = %device.name(), "the file was changed by somebody else while writes to it waited on flash: these are thrown away");
            } else {
                tracing::info!(file = %device.name(), "the file was changed by somebody else; its cache is dropped");
            }
            if !self.empty(id) {
                return Err(NotNow::Wait);
            }
            record.since_seq = lock(&daemon.pool).record(id).map_or(0, |r| r.since_seq);
            // From now on it looks like this. Were the old look kept, what is answered next and is on flash only would be
            // thrown away after a crash, as if the file had been changed once more.
            record.origin_identity = Some(identity(looks));
            record.clean_detach = true;
            daemon.store_file(&record).map_err(|_| NotNow::Wait)?;
        } else if owed > 0 {
            // What was answered since is newer than the file.
            origin.written();
        }
        // Behind the end may be what was written and whose length was never made durable. It must not count as
        // written back, for it would be shown when the file grows.
        let behind = if owed > 0 {
            daemon.dirty_behind(id, looks.size, record.size)
        } else {
            Vec::new()
        };
        let settled = Arc::new(AtomicBool::new(behind.is_empty()));
        daemon.engine.set_verified(id, !is_unverified);
        self.serve(daemon, &record, origin, &settled)?;
        let zero = |from, to| {
            let zeroed = self.zero(id, from, to - from);
            zeroed.then_some(()).ok_or(())
        };
        if large::settle(looks.size, behind, zero).is_err() {
            self.end(daemon, id);
            return Err(NotNow::Wait);
        }
        settled.store(true, Ordering::Release);
        // Whoever changed the rules meanwhile did not find the file among those that are open.
        self.resettle(daemon, id, origin);
        if is_unverified && let Some(device) = daemon.targets.get(Target::Origin(id)) {
            let check = Check {
                owed: false,
                drop: false,
                time: CLEAN_FITS_TIME,
            };
            daemon.check_later(id, &device, check);
        }
        Ok(id)
    }

    /// Makes a file a disk.
    fn attach_new(
        &self,
        daemon: &Arc<Daemon>,
        key: &Key,
        origin: &Arc<FileOrigin>,
    ) -> std::result::Result<DiskId, NotNow> {
        let promised = daemon.promise_number().ok_or(NotNow::Pass)?;
        let id = promised.id;
        let serial = Uuid::new_v4();
        let (high, _) = serial.as_u64_pair();
        // People never see it; it has to be like no other.
        let front: String = self.store.chars().take(40).collect();
        let scratch = self.is_to_be_scratch(daemon, origin);
        let mut record = DiskRecord {
            id,
            name: format!("{front}.{high:016x}"),
            origin: text_of(key),
            size: store::bound(origin.len(), scratch),
            serial,
            rules: RULES,
            datastore: self.store.clone(),
            home: match scratch {
                true => Home::Scratch,
                false => Home::Origin,
            },
            ..settings::defaults()
        };
        if let Some(path) = origin.path() {
            self.rules.settle(&mut record, &path);
        }
        self.serve(daemon, &record, origin, &Arc::new(AtomicBool::new(true)))?;
        // What the log may hold of this number was another disk's.
        let stored = daemon.forget(id).and_then(|since_seq| {
            record.since_seq = since_seq;
            let holds = daemon.holds();
            lock(&daemon.pool).change(|registry| {
                if scratch {
                    check_promise(registry, holds, origin.name(), record.size)?;
                }
                registry.disk_id_taken(id);
                registry.disks.push(record.clone().into());
                Ok(())
            })
        });
        drop(promised);
        if let Err(e) = stored {
            tracing::warn!(file = ?origin, "cannot be cached: {e}");
            if self.end(daemon, id) {
                let _ = daemon.engine.remove(id);
            }
            return Err(NotNow::Pass);
        }
        self.resettle(daemon, id, origin);
        Ok(id)
    }
}

/// Says why a scratch file cannot be served.
fn refused(origin: &FileOrigin, error: &Error) -> NotNow {
    tracing::warn!(file = ?origin, "{error}");
    NotNow::Wait
}

impl Files {
    /// A new disk's file is to be on flash alone, and can be: there is nothing in it that somebody would miss.
    fn is_to_be_scratch(&self, daemon: &Daemon, origin: &FileOrigin) -> bool {
        let wanted = origin.path().map(|path| self.rules.wanted(&path));
        if !wanted.is_some_and(|wanted| wanted.scratch) || !origin.is_all_hole().unwrap_or(false) {
            return false;
        }
        let bound = store::bound(origin.len(), true);
        let why = match daemon.cannot_hold() {
            true => "no disk can live on the pool's flash as it is".to_owned(),
            false => match daemon.check_promise(origin.name(), bound) {
                Ok(()) => return true,
                Err(e) => e.to_string(),
            },
        };
        tracing::warn!(file = ?origin, "is cached as any other file, and not a scratch file: {why}");
        false
    }
}

impl Disks for Files {
    fn known(&self) -> Vec<(Key, DiskId)> {
        let Ok(daemon) = self.daemon() else {
            return Vec::new();
        };
        let pool = lock(&daemon.pool);
        let own = pool.registry().disks.iter();
        let own = own.filter(|record| record.datastore == self.store);
        own.filter_map(|record| Some((key_of(&record.origin)?, record.id)))
            .collect()
    }

    fn attach(&self, file: &Key, origin: &Arc<FileOrigin>) -> std::result::Result<DiskId, NotNow> {
        let daemon = self.daemon()?;
        let text = text_of(file);
        let record = {
            let pool = lock(&daemon.pool);
            let mut all = pool.registry().disks.iter();
            let own = all.find(|r| r.datastore == self.store && r.origin == text);
            own.map(|record| (**record).clone())
        };
        match record {
            Some(record) => self.attach_known(&daemon, record, origin),
            None if daemon.cache_is_off() => Err(NotNow::Pass),
            None => self.attach_new(&daemon, file, origin),
        }
    }

    fn cache(&self, disk: DiskId) -> Arc<dyn hearth_mirror::Cache> {
        let daemon = self.daemon.upgrade();
        let engine = daemon.map_or_else(Weak::new, |daemon| Arc::downgrade(&daemon.engine));
        Arc::new(crate::mirror::DiskCache::new(engine, disk))
    }

    fn grow(&self, disk: DiskId, bound: u64) -> Outcome<()> {
        let daemon = self.daemon().map_err(|_| Status::JukeBox)?;
        let holds = daemon.holds();
        // The registry first: what is written behind what it says is not found after a crash. All sizes are whole
        // blocks, so that no copy of a last block is padded.
        let stored = lock(&daemon.pool).change(|registry| {
            let known = registry.by_id(disk);
            if let Some(record) = known.filter(|r| r.is_flash_only() && r.size < bound) {
                let more = bound - record.size;
                check_promise(registry, holds, "a scratch file", more)?;
            }
            if let Some(record) = registry.by_id_mut(disk) {
                record.size = record.size.max(bound);
            }
            Ok(())
        });
        if let Err(e) = stored {
            tracing::warn!(
                file = daemon.stores.numbers.name_of(disk),
                "cannot grow: {e}"
            );
            return Err(match e.kind {
                Kind::Refused => Status::NoSpace,
                _ => Status::JukeBox,
            });
        }
        let grown = daemon.engine.set_size(disk, bound);
        grown.map_err(|_| Status::JukeBox)
    }

    fn wants(&self, name: &[u8]) -> bool {
        self.rules
            .is_scratch_name(Path::new(OsStr::from_bytes(name)))
    }

    fn pins(&self) -> bool {
        self.rules.pins()
    }

    fn is_pinned(&self, path: &Path) -> bool {
        let wanted = self.rules.wanted(path);
        wanted.pin && !wanted.scratch
    }

    fn keep(&self, disk: DiskId, bytes: u64) -> bool {
        let min = bytes.next_multiple_of(KEEP_STEP);
        let Ok(daemon) = self.daemon() else {
            return false;
        };
        let capacity = lock(&daemon.pool).kept_capacity();
        let record = lock(&daemon.pool).record(disk).cloned();
        let Some(record) = record.filter(|r| !r.is_flash_only()) else {
            return bytes == 0;
        };
        if record.min_bytes != min {
            let kept = lock(&daemon.pool).change_or_keep(|registry| {
                check_share(registry, capacity, &record.name, min)?;
                if let Some(place) = registry.by_id_mut(disk) {
                    place.min_bytes = min;
                }
                Ok(())
            });
            if kept.is_err() {
                return false;
            }
        }
        // One that is not served is told when it is.
        let _ = daemon.engine.set_limits(disk, min, record.max_bytes);
        true
    }

    fn cached(&self, disk: DiskId) -> u64 {
        let status = self.daemon().ok().and_then(|d| d.engine.status(disk));
        status.map_or(0, |status| status.cached_blocks * BLOCK)
    }

    fn missing(&self, disk: DiskId, from: u64, to: u64) -> Missing {
        let Ok(daemon) = self.daemon() else {
            return Missing::Not(to);
        };
        match daemon.engine.missing(disk, from, to) {
            Ok((at, len)) => Missing::From(at, len),
            Err(to) => Missing::Not(to),
        }
    }

    fn renamed(&self, disk: DiskId, origin: &FileOrigin) {
        if let Ok(daemon) = self.daemon() {
            self.resettle(&daemon, disk, origin);
            daemon.poke();
        }
    }

    fn withdraw(&self, disk: DiskId) -> bool {
        self.daemon().is_ok_and(|daemon| daemon.withdraw_file(disk))
    }

    fn detach(&self, disk: DiskId, origin: &FileOrigin) -> bool {
        let Ok(daemon) = self.daemon() else {
            return false;
        };
        let Ok(look) = origin.leave() else {
            return false;
        };
        // What was not compared is compared when it is opened again.
        let is_verified = !daemon.engine.is_unverified(disk);
        if !self.is_drained(disk) || !self.end(&daemon, disk) {
            return false;
        }
        let stored = lock(&daemon.pool).change_or_keep(|registry| {
            if let Some(record) = registry.by_id_mut(disk) {
                record.origin_identity = Some(identity(look));
                record.clean_detach = is_verified;
            }
            Ok(())
        });
        if let Err(e) = stored {
            // Then its content is compared when it is opened again.
            tracing::warn!("cannot note how a file was left: {e}");
        }
        true
    }

    fn empty(&self, disk: DiskId) -> bool {
        let Ok(daemon) = self.daemon() else {
            return false;
        };
        let owed = self.owed(disk) / BLOCK;
        let record = lock(&daemon.pool).record(disk).cloned();
        let is_kept = record
            .as_ref()
            .is_some_and(|record| !record.is_flash_only());
        let name = daemon.stores.numbers.name_of(disk);
        let name = name.or_else(|| Some(format!("{}/{}", self.store, record?.origin)));
        let emptied = daemon.forget(disk).and_then(|since_seq| {
            lock(&daemon.pool).change_or_keep(|registry| {
                if let Some(record) = registry.by_id_mut(disk) {
                    (record.since_seq, record.void) = (since_seq, false);
                }
                Ok(())
            })
        });
        if emptied.is_ok() && owed > 0 && is_kept {
            daemon.events.tell(Event::DataLost {
                disk: name.unwrap_or_default(),
                blocks: owed,
            });
        }
        emptied
            .inspect_err(|e| tracing::error!("a file's cache cannot be dropped: {e}"))
            .is_ok()
    }

    fn forget(&self, _file: &Key, disk: DiskId) -> bool {
        let Ok(daemon) = self.daemon() else {
            return false;
        };
        let erase = || -> Result<()> {
            lock(&daemon.pool).change(|registry| {
                registry.disks.retain(|record| record.id != disk);
                Ok(())
            })
        };
        // The engine forgets what it serves or has served; the number is given to others much later.
        if daemon.engine.status(disk).is_some() && daemon.forget(disk).is_err() {
            return false;
        }
        if let Err(e) = erase() {
            tracing::error!("a file that is gone cannot be taken out of the registry: {e}");
            return false;
        }
        let served = lock(&daemon.stores.numbers.open).contains_key(&disk);
        let end = || {
            let ended = self.end(&daemon, disk).then_some(());
            ended.or_else(|| {
                daemon.poke();
                None
            })
        };
        if served && daemon.bell.wait(REST_TIME, REST_PACE, end).is_none() {
            return false;
        }
        daemon.unwatch_file(disk);
        let _ = daemon.engine.remove(disk);
        true
    }

    fn still_fits(&self, disk: DiskId, origin: &Arc<FileOrigin>) -> bool {
        let Ok(daemon) = self.daemon() else {
            return false;
        };
        let device = Device::remote(Arc::new(Disk::new(origin, &self.hands)));
        let subject = compare::Subject {
            engine: &daemon.engine,
            id: disk,
            device: &device,
        };
        let end = Instant::now() + STILL_FITS_TIME;
        subject.thorough(end, |_, _| true).is_enough()
    }

    fn zero(&self, disk: DiskId, offset: u64, len: u64) -> bool {
        let Ok(daemon) = self.daemon() else {
            return false;
        };
        let ask = |op, offset, len| {
            let request = Request::new(0, disk, op, offset, len, None, hearth_io::now_ns());
            let done = daemon.reactors.request_blocking(request);
            done.is_ok_and(|completion| completion.result.is_ok())
        };
        let zero = ReqOp::WriteZeroes {
            fua: false,
            punch: true,
        };
        let origin = lock(&daemon.stores.numbers.open).get(&disk).cloned();
        let parts = match origin.filter(|origin| !origin.is_scratch()) {
            // Missing blocks of a scratch file read as zeros.
            None => vec![(offset, len)],
            // Elsewhere are zeros already, in the file and in whatever may still be read of it into the cache. Flash first: what is
            // written back meanwhile is found in the file then.
            Some(origin) => {
                let mut parts = daemon.dirty_parts(disk, offset, offset + len);
                parts.extend(origin.filled(offset, offset + len));
                joined(parts)
            }
        };
        let mut parts = parts.into_iter().filter(|(_, len)| *len > 0);
        parts.all(|(offset, len)| ask(zero, offset, len)) && ask(ReqOp::Flush, 0, 0)
    }

    fn owed(&self, disk: DiskId) -> u64 {
        let status = self.daemon().ok().and_then(|d| d.engine.status(disk));
        // What lives on flash is not owed to anybody.
        let owes = status.filter(|status| !status.lives_on_flash);
        owes.map_or(0, |status| status.owed_bytes())
    }

    fn needs(&self, disk: DiskId) -> u64 {
        let status = self.daemon().ok().and_then(|d| d.engine.status(disk));
        status.map_or(0, |status| status.dirty_blocks.saturating_mul(BLOCK))
    }

    fn is_drained(&self, disk: DiskId) -> bool {
        let status = self.daemon().ok().and_then(|d| d.engine.status(disk));
        status.is_none_or(|status| status.drained || status.lives_on_flash)
    }

    fn drain(&self, disk: DiskId, on: bool) {
        if let Ok(daemon) = self.daemon() {
            // One that is gone has nothing to be written back.
            let _ = daemon.engine.drain(disk, on);
            daemon.poke();
        }
    }

    fn hold(&self, on: bool) {
        self.held.store(on, Ordering::SeqCst);
        let Ok(daemon) = self.daemon() else { return };
        for id in daemon.stores.numbers.open() {
            let record = lock(&daemon.pool).record(id).cloned();
            if let Some(record) = record.filter(|record| record.datastore == self.store) {
                // One that was closed meanwhile is opened as it should be.
                let _ = daemon.treat_writes(id, || Some(self.mode(&record)));
            }
        }
        daemon.poke();
    }

    fn opened_by_other(&self, file: &str, owed: u64, by: &str) {
        if let Ok(daemon) = self.daemon() {
            daemon.events.tell(Event::DirtyFileOpened {
                datastore: Some(self.store.clone()),
                disk: None,
                file: file.to_owned(),
                dirty_bytes: owed,
                by: by.to_owned(),
                hold: format!("hearth datastore flush {} --hold", self.store),
            });
        }
    }

    fn written_by_two(&self, file: &str, [one, other]: &[String; 2]) {
        let which = format!("two clients write {file} at the same time: {one} and {other}");
        *lock(&self.clash) = Some((Instant::now(), which));
        if let Ok(daemon) = self.daemon() {
            daemon.events.tell(Event::TwoClientsWrite {
                datastore: Some(self.store.clone()),
                disk: None,
                file: Some(file.to_owned()),
                what: format!("{file} of datastore {}", self.store),
                one: one.clone(),
                other: other.clone(),
            });
        }
    }

    fn flushed(&self) {
        if let Ok(daemon) = self.daemon() {
            daemon.bell.ring();
        }
    }
}

impl Daemon {
    /// No disk can live on the pool's flash now.
    fn cannot_hold(&self) -> bool {
        let segments = self.engine.pool_stats().segments;
        segments < SEGMENTS_MIN || self.flash.degraded().is_some() || self.cache_is_off()
    }

    /// A number for a new disk that is in no slot.
    fn promise_number(self: &Arc<Daemon>) -> Option<Promised> {
        let disks = self.disks.lock();
        let numbers = &self.stores.numbers;
        let id = lock(&self.pool)
            .registry()
            .free_disk_id(|id| disks.contains(id) || numbers.has(id))?;
        lock(&numbers.promised).insert(id);
        Some(Promised {
            daemon: self.clone(),
            id,
        })
    }

    /// Ranges between two offsets whose newest bytes are on flash only.
    fn dirty_behind(&self, id: DiskId, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut at = from;
        while at < to {
            let mut known = Vec::new();
            self.engine.block_status(id, at, to - at, &mut known);
            if known.is_empty() {
                break;
            }
            for (len, state) in known {
                if state == ExtentState::Data {
                    ranges.push((at, len));
                }
                at += len;
            }
        }
        ranges
    }

    /// Parts of a file's disk that only flash has, as offset and length.
    fn dirty_parts(&self, id: DiskId, from: u64, to: u64) -> Vec<(u64, u64)> {
        let (mut parts, mut at) = (Vec::new(), from);
        loop {
            let more = self.engine.dirty_data(id, at..to, PARTS_LOOK);
            let last = more.last().copied();
            let all = more.len() < PARTS_LOOK;
            parts.extend(more);
            match last {
                Some((offset, len)) if !all => at = offset + len,
                _ => return parts,
            }
        }
    }

    /// Notes durably that a file need not look as it was left.
    fn withdraw_file(&self, id: DiskId) -> bool {
        let noted = lock(&self.pool).change_or_keep(|registry| {
            if let Some(record) = registry.by_id_mut(id) {
                record.clean_detach = false;
            }
            Ok(())
        });
        noted
            .inspect_err(|e| {
                tracing::error!("cannot note on flash that a file is being changed: {e}")
            })
            .is_ok()
    }

    fn store_file(&self, record: &DiskRecord) -> Result<()> {
        lock(&self.pool).change_or_keep(|registry| {
            if let Some(place) = registry.by_id_mut(record.id) {
                *place = record.clone();
            }
            Ok(())
        })
    }
}
