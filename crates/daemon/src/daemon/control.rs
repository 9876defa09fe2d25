//! The control operations. Every change is durable in the pool's registry before it is answered.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearth_engine::DiskStatus;
use hearth_engine::api::{DISK_MAX, Mode, OriginState};
use hearth_fault::Fault;
use hearth_format::{DiskRecord, MirrorStamps, Registry, SharedRecord, Uuid, check_name};
use hearth_io::beneath::Beneath;
use hearth_io::{BLOCK, OriginSpec};
use hearth_origin::owner::Take;

use super::admission::{RULES, failure};
use super::apart::is_taken;
use super::attach::Opened;
use super::chains::check_chain_names;
use super::course::{Attempt, Turn};
use super::{Daemon, Slot, StopReason, control_error, homeless, lock, trouble};
use crate::api::advice::AdviceReport;
use crate::api::areas::{AreaBack, AreaWanted, AreasState};
use crate::api::datastores::{
    DatastoreAdd, DatastoreInfo, DatastoreRemove, DatastoreSet, FileReport,
};
use crate::api::flash::{FlashChange, FlashState};
use crate::api::server::Control;
use crate::api::stats::{DiskReport, StatsReport};
use crate::api::swap::SwapInfo;
use crate::api::types::{
    DiskAdd, DiskInfo, DiskMove, DiskRemove, DiskSet, DiskState, MirrorSet, PoolExport, PoolInfo,
    ScrubSet, Trust,
};
use crate::api::upgrade::{UpgradePlan, UpgradeRequest, UpgradeState};
use crate::api::workload::{HistogramReport, RecordStart, Recording};
use crate::clients::sentence;
use crate::error::{Error, Kind, Result};
use crate::life::{Event, Life, Refusal, Unserved};
use crate::origin;
use crate::pool::Pool;
use crate::rundir::nbd_socket;
use crate::settings;
use crate::size::human;
use crate::spot;
use crate::table::{Purpose, Slots};
use crate::workers::Spot;

/// How long `set --trust flash` waits for what is dirty before it goes on in the background.
const RECONCILE_TIME: Duration = Duration::from_secs(60);
/// Most damaged ranges that are named one by one.
const ROTTEN_NAMED: usize = 8;

/// How long a client that closes its connection may take to be gone: scripts remove a disk right
/// after the program that used it.
const GONE_TIME: Duration = Duration::from_secs(1);

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

/// Why something cannot be done to a disk now, for people.
pub(super) fn refused(name: &str, why: &Refusal) -> Error {
    let (what, remedy) = match why {
        Refusal::Unknown => return Error::no_disk(name),
        Refusal::Unserved(why) => return why.why().clone(),
        Refusal::Fenced(why) => return why.clone(),
        Refusal::Reconciling => return reconciling(name),
        Refusal::Served => ("attached", "there is nothing to do for it"),
        Refusal::Removing => ("being removed", "wait, or call the removal off"),
        Refusal::Leaving => ("being removed", "wait until it is gone, and add it again"),
        Refusal::Opening => ("being attached", "try again when it is"),
    };
    Error::conflict(format!("disk {name} is {what}"), remedy)
}

/// Refuses what cuts clients off.
fn unused(name: &str, slot: &Slot) -> Result<()> {
    let Some(export) = slot.export().filter(|e| e.clients().is_used()) else {
        return Ok(());
    };
    let who = sentence(&export.clients().list());
    Err(Error::refused(
        format!("disk {name} is in use by {who}"),
        "stop the virtual machine or program first, or cut it off with --yes",
    ))
}

/// Refuses a minimum the flash, of `capacity` bytes, cannot hold beside the others'. Shares given as
/// advised are no reason to: they give way to what owners set, in [`Daemon::keep_shares`].
pub(super) fn check_share(registry: &Registry, capacity: u64, name: &str, min: u64) -> Result<()> {
    if min == 0 {
        return Ok(());
    }
    let others: u64 = registry
        .disks
        .iter()
        .filter(|d| d.name != name)
        .fold(0, |sum, d| sum.saturating_add(d.kept_bytes()));
    // The rest stays everybody's: eviction needs blocks it may drop, and of what lives on flash it may drop none.
    let promised = super::homeless::promised(registry);
    let most = (capacity / 8 * 7).saturating_sub(promised);
    if others.saturating_add(min) > most {
        return Err(Error::invalid(
            format!(
                "{} cannot be kept for {name}: of the pool's {}, {} can be kept in all{}, and {} are kept for other disks",
                human(min),
                human(capacity),
                human(most),
                match promised {
                    0 => String::new(),
                    promised => format!(
                        " beside the {} promised to disks that live on flash",
                        human(promised)
                    ),
                },
                human(others)
            ),
            "lower a --min, unpin a disk, or use a larger pool",
        ));
    }
    Ok(())
}

/// Refuses another disk's origin, going by names alone.
fn check_unclaimed(pool: &Pool, spec: &OriginSpec) -> Result<()> {
    let near = pool.near(spec, &[]);
    let mine = hearth_origin::parts(spec);
    let same = |a: &OriginSpec, b: &OriginSpec| {
        let path = hearth_origin::local_path(a);
        a.source == b.source || (path.is_some() && hearth_origin::local_path(b) == path)
    };
    let owner = near.iter().find(|record| {
        origin::parse(&record.origin).is_ok_and(|other| {
            let theirs = hearth_origin::parts(&other);
            mine.iter().any(|a| theirs.iter().any(|b| same(a, b)))
        })
    });
    match owner {
        Some(record) => Err(is_taken(&record.origin, &record.name)),
        None => Ok(()),
    }
}

/// What a new disk remembers of its legs, if its origin is a mirror.
fn new_mirror(spec: &OriginSpec) -> Result<Option<MirrorStamps>> {
    let Some(legs) = hearth_origin::legs(spec) else {
        return Ok(None);
    };
    let twice = legs
        .iter()
        .enumerate()
        .find(|(i, leg)| legs.iter().take(*i).any(|l| l.source == leg.source));
    match twice {
        Some((_, leg)) => Err(Error::invalid(
            format!("the mirror has {leg} twice"),
            "name two different files or devices",
        )),
        None => Ok(Some(crate::mirror::new_stamps(legs.len()))),
    }
}

/// A disk that was just added, if it is served.
pub(super) fn attached(info: DiskInfo) -> Result<DiskInfo> {
    if info.state == DiskState::Attached {
        return Ok(info);
    }
    let whole = format!("disk {} was added but is {}", info.name, info.state.word());
    let why = Fault::new(
        info.reason.unwrap_or_default(),
        info.remedy.unwrap_or_default(),
    );
    Err(Error::of(Kind::Unavailable, why.within(whole)))
}

fn check_name_free(slots: &Slots<Slot>, name: &str) -> Result<()> {
    if slots.get(name).is_none() {
        return Ok(());
    }
    Err(Error::conflict(
        format!("there is already a disk named {name}"),
        "choose another name",
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

    /// Refuses an origin that is the flash, another disk's, or one of our own exports, also under
    /// another name.
    pub(super) fn check_unused(self: &Arc<Daemon>, text: &str, spec: &OriginSpec) -> Result<()> {
        // It would be cached twice, and at a stop its server would be gone before its last writes.
        let ours = self.images.parent().map(nbd_socket);
        let sockets = hearth_origin::parts(spec).into_iter();
        let mut sockets = sockets.filter_map(|part| hearth_origin::socket(&part));
        if let Some(ours) = ours
            && let Some(socket) = sockets.find(|socket| origin::is_same_file(&ours, socket))
        {
            return Err(Error::invalid(
                format!("{} is this daemon's own NBD socket", socket.display()),
                "give the origin of that disk instead, or the address of another server",
            ));
        }
        self.check_apart(text, spec)?;
        check_unclaimed(&lock(&self.pool), spec)
    }

    /// Refuses a disk that cannot be added beside those that are there: a first look, before its origin is
    /// opened.
    fn check_new(&self, disk: &DiskAdd, spec: &OriginSpec) -> Result<()> {
        self.not_stopping()?;
        check_name_free(&self.disks.lock(), &disk.name)?;
        let pool = lock(&self.pool);
        check_share(
            pool.registry(),
            pool.kept_capacity(),
            &disk.name,
            disk.settings.min.unwrap_or(0),
        )?;
        check_unclaimed(&pool, spec)
    }

    /// Takes a number and the name for a new disk, whose origin lies on `place`.
    pub(super) fn take_number(
        self: &Arc<Daemon>,
        name: &str,
        origin: &str,
        place: Option<Beneath>,
    ) -> Result<Turn> {
        let now = self.now_s();
        let mut disks = self.disks.lock();
        self.not_stopping()?;
        check_name_free(&disks, name)?;
        self.same_data(&disks, origin, place.as_ref())?;
        let pool = lock(&self.pool);
        let numbers = &self.stores.numbers;
        let id = pool
            .registry()
            .free_disk_id(|id| disks.contains(id) || numbers.has(id));
        drop(pool);
        let id = id.ok_or_else(|| {
            Error::conflict(
                "the pool has as many disks as it can have",
                "remove one first",
            )
        })?;
        let slot = Slot::new(id, name, Life::Arriving, now);
        disks.insert(id, name, slot);
        // What is on this host and not known is looked at again when it matters.
        let here = |part: &OriginSpec| hearth_origin::local_path(part).is_some();
        let here = origin::parse(origin).is_ok_and(|s| hearth_origin::parts(&s).iter().any(here));
        lock(&self.grounds).set(id, place, here);
        Ok(self.disks.give(&mut disks, id, Purpose::Changing))
    }

    pub(super) fn with_slot<T>(
        &self,
        name: &str,
        act: impl FnOnce(&mut Slot) -> Result<T>,
    ) -> Result<T> {
        let mut disks = self.disks.lock();
        let slot = disks.get_mut(name).filter(|slot| slot.life.is_known());
        act(slot.ok_or_else(|| Error::no_disk(name))?)
    }

    /// Voids whatever the log may hold of the number a new disk gets, stores the disk, and attaches it.
    pub(super) fn admit(
        self: &Arc<Daemon>,
        turn: &Turn,
        spec: &OriginSpec,
        mut record: DiskRecord,
        opened: Opened,
    ) -> Result<()> {
        let (id, name) = (record.id, record.name.clone());
        let failed = |e| control_error(&format!("add {name}"), e);
        // For a moment only, and the data threads do not know its origin yet: one that nobody knows to be
        // flushed the engine would flush of its own accord, and be told that there is no such device. What
        // is known of it is said when it is served.
        self.engine
            .attach(
                settings::config(&record, opened.device()),
                OriginState::Flushed,
            )
            .map_err(failed)?;
        let outcome = self.forget(id).and_then(|since_seq| {
            self.at_rest(&format!("add {name}"), || self.engine.detach(id))?;
            record.since_seq = since_seq;
            let holds = self.holds();
            let mut pool = lock(&self.pool);
            let capacity = pool.kept_capacity();
            // Others may have been added or changed while its origin was opened.
            check_unclaimed(&pool, spec)?;
            check_chain_names(&pool, &name, spec, &record.chain, record.read_only)?;
            pool.change(|registry| {
                check_share(registry, capacity, &name, record.kept_bytes())?;
                if record.is_flash_only() {
                    homeless::check_promise(registry, holds, &name, record.size)?;
                }
                registry.disk_id_taken(id);
                registry.disks.push(record.clone().into());
                Ok(())
            })
        });
        if let Err(e) = outcome {
            let _ = self.engine.detach(id);
            let _ = self.engine.remove(id);
            return Err(e);
        }
        // A new disk's origin fits, so there is nothing left over that would have to be closed.
        drop(self.judge_and_serve(turn, record, None, Ok(opened)));
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
                "see whether it can be reached",
            )
        })?;
        let now = origin::identity(&device);
        // The origin has said all it has to say: from here on nothing waits for it.
        let _turn = self.turn_for(name)?;
        self.with_slot(name, |slot| match slot.export() {
            Some(still) if Arc::ptr_eq(still, &export) => Ok(()),
            _ => Err(Error::conflict(
                format!("disk {name} was detached while its origin was asked for its size"),
                "try again when it is attached",
            )),
        })?;
        let id = hearth_volume::Volume::disk(&*export);
        let known = self.with_record(name)?.size;
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
        self.check_grows(id, size)?;
        // The registry comes last: a start that finds the new size there would not know that the last
        // block's copy may be padded.
        self.at_rest(&format!("resize {name}"), || self.engine.set_size(id, size))?;
        lock(&self.pool).change(|registry| {
            let record = registry.by_id_mut(id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.size = size;
            if device.is_untouched() {
                record.origin_identity = now;
            }
            Ok(())
        })?;
        self.rooms.look_again(id);
        export.set_size(size);
        self.exports.resized(name);
        self.keep_shares();
        self.look_at_pins();
        Ok(())
    }

    /// Attaches a disk that was refused, now that somebody has decided.
    fn decide(self: &Arc<Daemon>, name: &str, trust: Option<Trust>, take: Take) -> Result<()> {
        let turn = self.turn_for(name)?;
        self.with_slot(name, |slot| match &slot.life {
            Life::Unserved(Unserved::Waiting(e)) if take == Take::Free => Err(e.clone()),
            Life::Unserved(_) => Ok(()),
            life => match life.refusal() {
                Refusal::Served | Refusal::Reconciling => Err(Error::conflict(
                    format!("disk {name} is attached; there is nothing to decide"),
                    "leave --trust and --takeover out",
                )),
                why => Err(refused(name, &why)),
            },
        })?;
        let record = lock(&self.pool).record(turn.id()).cloned();
        let record = record.ok_or_else(|| Error::no_disk(name))?;
        self.attach(&turn, record, trust, take)?;
        self.with_slot(name, |slot| match slot.life.unserved() {
            Some(why) => Err(why.why().clone()),
            None => Ok(()),
        })
    }

    /// Gives clients of a disk, or of all, that have just gone the moment it takes to notice.
    fn let_clients_go(&self, name: Option<&str>) {
        let used = || {
            self.disks.lock().iter().any(|(disk, slot)| {
                name.is_none_or(|name| name == disk)
                    && slot.export().is_some_and(|e| e.clients().is_used())
            })
        };
        let gone = || (!used()).then_some(());
        // Who is still there is told of to whoever asked.
        let _ = self.crowd.wait(GONE_TIME, gone);
    }

    /// Waits until a disk being reconciled is served, for a while. Fails at once if it cannot be, because
    /// part of what is to win is lost.
    fn wait_reconciled(&self, name: &str) -> Result<()> {
        // Housekeeping looks how far it is.
        let ended = self.disks.wait(RECONCILE_TIME, |disks| {
            let slot = disks.get(name);
            match slot.filter(|slot| slot.life == Life::Reconciling) {
                Some(slot) if self.not_stopping().is_ok() => slot.session.stranded.clone().map(Err),
                _ => Some(Ok(())),
            }
        });
        ended.unwrap_or(Ok(()))
    }

    /// Waits until a disk whose removal was begun is gone; false if that takes longer than `limit`.
    pub fn wait_gone(&self, name: &str, limit: Duration) -> bool {
        let gone = self.disks.wait(limit, |disks| {
            let known = disks.get(name).is_some_and(|slot| slot.life.is_known());
            (!known).then_some(())
        });
        gone.is_some()
    }

    /// A disk becomes ordered, or is held and so no longer ordered for a while: what may be noted of its origin is of
    /// a time when it was so before.
    fn enters_order(&self, record: &DiskRecord, wanted: &DiskRecord) -> Result<()> {
        let is_ordered = |r: &DiskRecord| settings::mode(r, r.hold) == Mode::WriteBackOrdered;
        let ordered = hearth_format::CacheMode::WriteBackOrdered;
        let same = is_ordered(record) == is_ordered(wanted);
        if wanted.mode != ordered || same || self.is_kept_back(record) {
            return Ok(());
        }
        let Some(beside) = lock(&self.pool).beside().cloned() else {
            return Ok(());
        };
        let noted = beside.note_order(&[(record.id, record.serial, 0)]);
        noted.map_err(|e| beside.unwritten(e, "put that right, and try again"))
    }

    fn apply(&self, name: &str, set: &DiskSet) -> Result<()> {
        let id = self.with_slot(name, |slot| Ok(slot.id))?;
        let record = lock(&self.pool)
            .record(id)
            .cloned()
            .ok_or_else(|| Error::no_disk(name))?;
        let based_on = set.version.as_deref();
        settings::check_version(&record, based_on)?;
        let mut wanted = record.clone();
        let changed = settings::change(&mut wanted, &set.settings)?;
        homeless::check_settings(&wanted)?;
        self.enters_order(&record, &wanted)?;
        let more = wanted.kept_bytes() > record.kept_bytes();
        let mut pool = lock(&self.pool);
        let capacity = pool.kept_capacity();
        let stored = pool.change(|registry| {
            if more {
                check_share(registry, capacity, name, wanted.kept_bytes())?;
            }
            let record = registry.by_id_mut(id).ok_or_else(|| Error::no_disk(name))?;
            settings::check_version(record, based_on)?;
            settings::change(record, &set.settings)?;
            record.sole_user |= set.sole_user;
            Ok(record.clone())
        });
        drop(pool);
        let record = stored?;
        self.with_slot(name, |slot| {
            let (export, device) = (slot.export(), slot.device());
            for setting in &changed {
                setting.tell(export.map(|e| &**e), device.map(|d| &**d), &record);
            }
            Ok(())
        })?;
        if self.with_slot(name, |slot| Ok(slot.device.is_none()))? {
            self.note_share(&record);
            self.keep_shares();
            self.look_at_pins();
            return Ok(());
        }
        let failed = |e| control_error(&format!("change {name}"), e);
        for setting in &changed {
            setting.tell_engine(self, &record).map_err(failed)?;
        }
        match set.settings.auto {
            Some(true) => drop(self.apply_shares(Some(name))?),
            Some(false) => self.with_slot(name, |slot| {
                slot.session.share = None;
                Ok(())
            })?,
            None => {}
        }
        self.keep_share(name).map_err(failed)?;
        self.look_at_pins();
        self.poke();
        Ok(())
    }
}

impl Control for Arc<Daemon> {
    fn pool(&self) -> Result<PoolInfo> {
        Ok(self.pool_info())
    }

    fn accept_claims(&self) -> Result<PoolInfo> {
        self.not_stopping()?;
        let mut pool = lock(&self.pool);
        let unconfirmed = pool
            .registry()
            .plain_disks()
            .filter(|r| !pool.is_confirmed(r));
        let records: Vec<SharedRecord> = unconfirmed.cloned().collect();
        pool.accept_claims(&self.state_dir)?;
        drop(pool);
        self.attach_accepted(&records);
        self.open_datastores();
        Ok(self.pool_info())
    }

    fn flash_state(&self) -> FlashState {
        Daemon::flash_state(self)
    }

    fn change_flash(&self, request: &FlashChange) -> Result<FlashState> {
        Daemon::change_flash(self, request)
    }

    fn cancel_flash(&self) -> Result<()> {
        Daemon::cancel_flash(self)
    }

    fn swap(&self) -> Result<SwapInfo> {
        self.swap_info()
    }

    fn areas(&self) -> AreasState {
        Daemon::areas(self)
    }

    fn set_aside(&self, wanted: &AreaWanted) -> Result<AreasState> {
        Daemon::set_aside(self, wanted)
    }

    fn give_area_back(&self, back: &AreaBack) -> Result<AreasState> {
        Daemon::give_area_back(self, back)
    }

    fn upgrade_state(&self) -> UpgradeState {
        self.succession.state()
    }

    fn check_upgrade(&self, request: &UpgradeRequest) -> Result<UpgradePlan> {
        self.plan_upgrade(request)
    }

    fn upgrade(&self, request: &UpgradeRequest) -> Result<UpgradePlan> {
        self.begin_upgrade(request)
    }

    fn export_pool(&self, how: PoolExport) -> Result<()> {
        if !how.yes {
            self.let_clients_go(None);
        }
        self.not_stopping()?;
        if !how.yes {
            self.check_unused_datastores(None)?;
        }
        for (name, slot) in self.disks.lock().iter() {
            if !how.yes {
                unused(name, slot)?;
            }
            let status = self.engine.status(slot.id).unwrap_or_default();
            let dirty = status.owed_blocks();
            if let Some(e) = trouble::only_lost_left(name, &status) {
                return Err(e);
            }
            if dirty > 0
                && !status.lives_on_flash
                && let Some(e) = slot.life.unserved().map(Unserved::why)
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

    fn spot_of(&self, name: &str) -> Result<Spot> {
        self.with_record(name)
            .map(|record| spot::of(&record.origin))
    }

    fn add(&self, disk: DiskAdd) -> Result<DiskInfo> {
        check_name(&disk.name).map_err(|why| {
            Error::invalid(
                format!("the disk name will not do: {:?}: {why}", disk.name),
                "use letters, digits, '.', '_' and '-', at most 64, not starting with '.' or '-'",
            )
        })?;
        if let Some(size) = disk.flash_only {
            return self.add_flash_only(disk, size);
        }
        if disk.scratch {
            return Err(Error::invalid(
                "only a disk that lives on flash can be scratch: an origin keeps what it has",
                "give the size of one that has no origin, with --flash-only",
            ));
        }
        let mut record = settings::defaults();
        settings::change(&mut record, &disk.settings)?;
        let mut disk = disk;
        let mut spec = origin::parse(&disk.origin)?;
        let given = std::mem::take(&mut disk.origin);
        if let Some(stable) = origin::stable(&spec) {
            spec = stable;
            disk.origin = spec.to_string();
        } else {
            disk.origin.clone_from(&given);
        }
        origin::check_writable(&spec, record.read_only)?;
        self.check_new(&disk, &spec)?;
        self.check_unused(&disk.origin, &spec)?;
        let flash = lock(&self.pool).path().to_owned();
        for part in hearth_origin::parts(&spec) {
            origin::check_plain(&part, &flash)?;
        }
        let chain = self.new_chain(&spec, disk.allow_backing)?;
        self.check_chain(&disk.name, &spec, &chain, record.read_only)?;
        record = DiskRecord {
            name: disk.name.clone(),
            rules: RULES,
            sole_user: disk.sole_user,
            allow_backing: disk.allow_backing,
            chain,
            serial: Uuid::new_v4(),
            mirror: new_mirror(&spec)?,
            ..record
        };
        let take = take(disk.takeover);
        let ownership = self.owners.claim(&spec, &record, take);
        let ownership = ownership.map_err(|e| failure(&e))?;
        let backing = self.backing_of(&record);
        let device = self.open_origin(&spec, &record, backing, true)?;
        ownership.confirm(&spec)?;
        let size = device.size();
        if size > DISK_MAX {
            return Err(Error::invalid(
                format!("the origin {} is larger than 256 TiB", device.name()),
                "give a smaller one",
            ));
        }
        let opened = Opened::new(device, ownership);
        // All that the origin can hold up is done.
        let place = match &record.mirror {
            // Each leg has claimed its own.
            Some(_) => super::apart::place(&spec).0,
            None => opened.device().beneath().cloned(),
        };
        let turn = self.take_number(&disk.name, &disk.origin, place)?;
        let attempt = Attempt::new(self, &turn);
        record = DiskRecord {
            id: turn.id(),
            origin: disk.origin.clone(),
            size,
            ..record
        };
        record.device = origin::device_identity(&record);
        let is_anonymous = record.mirror.is_none()
            && (record.device.is_empty() || hearth_io::identity::is_position(&record.device))
            && opened.has_no_times();
        let id = record.id;
        self.admit(&turn, &spec, record, opened)?;
        attempt.end();
        drop(turn);
        if is_anonymous {
            self.cache_marks(id, size);
        }
        if disk.origin != given {
            let notice = format!(
                "the origin is recorded as {}: {given} can be another device after a restart",
                disk.origin
            );
            self.with_slot(&disk.name, |slot| {
                slot.session.notices.push(notice);
                Ok(())
            })?;
        }
        attached(self.disk_info(&disk.name)?)
    }

    fn set(&self, name: &str, set: DiskSet) -> Result<DiskInfo> {
        let turn = self.turn_for(name)?;
        self.check_set(name, &set)?;
        self.apply(name, &set)?;
        drop(turn);
        if let Some(size) = set.size {
            self.resize_flash_only(name, size)?;
        }
        if set.size_from_origin {
            self.grow(name)?;
        }
        if set.allow_backing {
            self.allow_backing(name)?;
        }
        let asked = set.sole_user
            && self.with_slot(name, |slot| {
                let refused = Some(&slot.life).filter(|life| life.is_known());
                let refused = refused.and_then(|life| life.unserved());
                Ok(matches!(refused, Some(Unserved::Refused { .. })))
            })?;
        if set.trust.is_some() || set.takeover || asked {
            self.decide(name, set.trust, take(set.takeover))?;
            self.wait_reconciled(name)?;
        }
        self.disk_info(name)
    }

    fn flush(&self, name: &str) -> Result<DiskInfo> {
        let turn = self.turn_for(name)?;
        let flash_only = lock(&self.pool)
            .record(turn.id())
            .is_some_and(DiskRecord::is_flash_only);
        if flash_only {
            return Err(homeless::has_none(name, "there is nothing to flush to"));
        }
        self.try_tell(&turn, Event::Flush)
            .map_err(|why| match why {
                Refusal::Unserved(why) => Error::refused(
                    format!("disk {name} cannot be flushed: {}", why.why().what),
                    why.why().remedy.clone(),
                ),
                why => refused(name, &why),
            })?;
        drop(turn);
        self.look_now();
        self.disk_info(name)
    }

    fn cancel(&self, name: &str) -> Result<DiskInfo> {
        // The last step has the turn. Whoever asks meanwhile is told at once, not when the disk is gone.
        let stays = |slot: &Slot| match slot.life {
            Life::Leaving => Err(Error::conflict(
                format!("the removal of disk {name} is in its last step and cannot be called off"),
                "wait until the disk is gone, and add it again",
            )),
            _ => Ok(()),
        };
        let turn = self.turn_unless(name, stays)?;
        self.with_slot(name, |slot| {
            let begun = slot.life.is_removed() || slot.life == (Life::Served { flushing: true });
            if begun {
                self.events.tell(hearth_events::Event::DiskFlushCancelled {
                    disk: name.to_owned(),
                });
            }
            Ok(())
        })?;
        self.tell(&turn, Event::Cancel);
        drop(turn);
        self.disk_info(name)
    }

    fn remove(&self, name: &str, how: DiskRemove) -> Result<DiskInfo> {
        if !how.yes {
            self.let_clients_go(Some(name));
        }
        let turn = self.turn_for(name)?;
        self.with_slot(name, |slot| {
            if !how.yes {
                unused(name, slot)?;
            }
            let status = self.engine.status(slot.id).unwrap_or_default();
            let dirty = status.owed_blocks();
            if status.lives_on_flash && dirty > 0 && !how.discard_dirty {
                return Err(Error::refused(
                    format!(
                        "{} of disk {name} are on flash and nowhere else: they go with it",
                        human(dirty * BLOCK)
                    ),
                    "copy what is needed first; then remove it with --discard-dirty --yes",
                ));
            }
            match slot.life.unserved().map(Unserved::why) {
                Some(e) if dirty > 0 && !how.discard_dirty => Err(Error::refused(
                    format!(
                        "{} of disk {name} are only on flash and cannot be written back: {}",
                        human(dirty * BLOCK),
                        e.what
                    ),
                    format!(
                        "{}; or throw them away with --discard-dirty --yes",
                        e.remedy
                    ),
                )),
                _ => Ok(()),
            }
        })?;
        let discard = how.discard_dirty;
        self.try_tell(&turn, Event::Remove { discard })
            .map_err(|why| refused(name, &why))?;
        let info = self.disk_info(name)?;
        drop(turn);
        self.look_now();
        Ok(info)
    }

    fn set_mirror(&self, name: &str, set: &MirrorSet) -> Result<DiskInfo> {
        self.not_stopping()?;
        Daemon::set_mirror(self, name, set)
    }

    fn move_disk(&self, name: &str, to: &DiskMove) -> Result<DiskInfo> {
        self.not_stopping()?;
        Daemon::move_disk(self, name, to)
    }

    fn set_scrub(&self, name: &str, set: &ScrubSet) -> Result<DiskInfo> {
        self.not_stopping()?;
        Daemon::set_scrub(self, name, set)
    }

    fn accept_loss(&self, name: &str, by: &str) -> Result<DiskInfo> {
        let turn = self.turn_for(name)?;
        let id = turn.id();
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
        self.with_slot(name, |slot| {
            slot.session.stranded = None;
            Ok(())
        })?;
        self.events.tell(hearth_events::Event::LossAccepted {
            disk: name.to_owned(),
            blocks,
            by: by.to_owned(),
        });
        self.poke();
        // One that waited for this is served now.
        drop(turn);
        self.wait_reconciled(name)?;
        self.disk_info(name)
    }

    fn reset(&self, name: &str) -> Result<DiskInfo> {
        self.let_clients_go(Some(name));
        let turn = self.turn_for(name)?;
        self.reset_scratch(&turn, name)?;
        drop(turn);
        self.disk_info(name)
    }

    fn metrics(&self, form: hearth_metrics::Form) -> String {
        self.metrics_page(form)
    }

    fn events(&self) -> &Arc<hearth_events::Events> {
        &self.events
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

    fn datastores(&self) -> Result<Vec<DatastoreInfo>> {
        Ok(self.datastore_infos())
    }

    fn datastore(&self, name: &str) -> Result<DatastoreInfo> {
        self.datastore_info(name)
    }

    fn datastore_files(&self, name: &str) -> Result<Vec<FileReport>> {
        Daemon::datastore_files(self, name)
    }

    fn datastore_advice(&self, name: &str) -> Result<AdviceReport> {
        self.advise_files(name)
    }

    fn add_datastore(&self, add: DatastoreAdd) -> Result<DatastoreInfo> {
        self.not_stopping()?;
        self.begin_datastore(add)
    }

    fn set_datastore(&self, name: &str, set: DatastoreSet) -> Result<DatastoreInfo> {
        self.not_stopping()?;
        self.change_datastore(name, set)
    }

    fn flush_datastore(&self, name: &str) -> Result<DatastoreInfo> {
        self.not_stopping()?;
        self.begin_datastore_flush(name)
    }

    fn scrub_datastore(&self, name: &str, set: &ScrubSet) -> Result<DatastoreInfo> {
        self.not_stopping()?;
        self.set_datastore_scrub(name, set)
    }

    fn remove_datastore(&self, name: &str, how: &DatastoreRemove) -> Result<()> {
        self.not_stopping()?;
        if !how.yes {
            self.check_unused_datastores(Some(name))?;
        }
        self.end_datastore(name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use hearth_engine::api::Effects;
    use std::time::Instant;

    /// A form that was open while another program changed settings must not revert them.
    #[test]
    fn change_based_on_stale_settings_is_refused() {
        let (_dir, daemon) = testing::with_disk("d");
        let set = |body: serde_json::Value| {
            let set: DiskSet = serde_json::from_value(body).unwrap();
            daemon.set("d", set)
        };
        let based_on = daemon.disk_info("d").unwrap().version;
        set(serde_json::json!({ "max": 64 << 20, "version": based_on })).unwrap();
        let stale = serde_json::json!({ "max": 0, "clients": 3, "version": based_on });
        assert_eq!(set(stale).unwrap_err().kind, Kind::Conflict);
        let info = daemon.disk_info("d").unwrap();
        assert_eq!((info.settings.max, info.settings.clients), (64 << 20, 0));
        set(serde_json::json!({ "clients": 3, "version": info.version })).unwrap();
        set(serde_json::json!({ "clients": 4 })).unwrap();
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    /// The engine has it before the data threads know its origin.
    #[test]
    fn nothing_is_sent_to_the_origin_of_a_disk_that_is_being_added() {
        let (dir, daemon) = testing::daemon();
        let id = lock(&daemon.pool).registry().free_disk_id(|_| false);
        let id = id.unwrap();
        let engine = daemon.engine.clone();
        // Far longer than it takes.
        let end = Instant::now() + Duration::from_secs(60);
        // What voids the disk's number comes after this on the same thread.
        let tick = move |now: u64, fx: &mut Effects| {
            let known = || engine.status(id).is_some_and(|status| status.attached);
            while !known() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            engine.tick(now, fx);
        };
        daemon.reactors.run(tick).unwrap();
        daemon.add(testing::disk(dir.path(), "a")).unwrap();
        let counts = daemon.engine.counts(id, hearth_io::now_ns()).unwrap();
        assert_eq!(counts.counters.origin_errors, 0);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn a_limit_an_older_version_took_is_in_nobodys_way() {
        let (_dir, daemon) = testing::with_disk("a");
        let old = |registry: &mut hearth_format::Registry| {
            registry.disks[0].max_bytes = 1024;
            Ok(())
        };
        lock(&daemon.pool).change(old).unwrap();
        let mut cutoff = DiskSet::default();
        cutoff.settings.seq_cutoff = Some(0);
        daemon.set("a", cutoff).unwrap();
        let mut limits = DiskSet::default();
        limits.settings.min = Some(8192);
        daemon.set("a", limits.clone()).unwrap_err();
        limits.settings.max = Some(0);
        daemon.set("a", limits).unwrap();
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
