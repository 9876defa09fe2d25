//! A pool on flash, outside the data path: creating it, looking at it, changing its registry.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::Engine;
use hearth_format::superblock::INCOMPAT_AREAS;
use hearth_format::{
    DiskRecord, FormatError, Members, Places, PoolState, Registry, SharedRecord, Superblock,
};
use hearth_io::{BLOCK, Device, Media, OpenError, OpenMode, OriginSpec};

use crate::api::types::CacheMode;
use crate::beside::Beside;
use crate::claims::{Claim, Confirmed};
use crate::degraded::Refusal;
use crate::error::{Error, Kind, Result};
use crate::named::Named;
use crate::pool::devices::Opened;

/// Times a pool that is in use is looked at before what was found is believed to be damaged.
const LOOKS: u32 = 3;

/// A pool whose flash this process has to itself.
pub struct Pool {
    /// Its only flash device, or the first that is there.
    media: Arc<Device>,
    /// An engine runs its log.
    served: bool,
    /// All of them.
    flash: FlashDevices,
    /// What the others say of themselves.
    members: Members,
    superblock: Superblock,
    registry: Registry,
    /// The same for whoever must not wait for the lock of this.
    seen: Arc<Seen>,
    /// Who names what in it.
    named: Named,
    /// Where that is stored.
    places: Places,
    /// A change was not stored, or in one place only: which one counts, the next store decides.
    unsettled: bool,
    /// Why flash refused the last write of ours, if it did.
    refusal: Option<Refusal>,
    /// The superblock or a marker says durably that nothing on flash is to be trusted, so what else the
    /// registry says of it may stay in RAM.
    covered: bool,
    /// What is known of it beside the flash.
    beside: Option<Arc<Beside>>,
    /// Which of its claims are confirmed on this host; `None` if no state directory was looked at.
    confirmed: Option<Confirmed>,
    /// There is no flash: where it was.
    gone_from: Option<PathBuf>,
    /// It has taken the place of another flash, and is served for the first time.
    adopted: bool,
}

/// What a pool's registry and superblock are written to: the first device, or, where everything is there twice, the two
/// that carry them.
fn tables(flash: &FlashDevices, first: &Arc<Device>, served: bool) -> Box<dyn Media> {
    match flash.are_twice() {
        true if served => Box::new(flash.joined().waiting()),
        true => Box::new(flash.joined()),
        false => Box::new(first.clone()),
    }
}

/// An error of opening `path`, in the words of the control plane.
pub(crate) fn opening(path: &Path, error: OpenError) -> Error {
    let path = path.display();
    match error {
        OpenError::InUse(found) => Error::conflict(found.to_string(), found.remedy()),
        OpenError::Open { source, .. } => Error::unavailable(
            format!("cannot open {path}: {source}"),
            "check the path and its permissions",
        ),
        OpenError::NotBlock(_) => Error::invalid(
            format!("{path} is neither a regular file nor a block device"),
            "give one of those",
        ),
        OpenError::Create { source, .. } => Error::unavailable(
            format!("cannot create {path}: {source}"),
            "check free space and permissions",
        ),
        other @ OpenError::Alignment { .. } => Error::of(Kind::Invalid, other.fault()),
    }
}

/// An error of the format layer, with the path it is about.
pub fn format_error(path: &Path, error: &FormatError) -> Error {
    let kind = match error {
        FormatError::Io { .. } => Kind::Unavailable,
        FormatError::NotAPool | FormatError::NotFound { .. } | FormatError::TooSmall { .. } => {
            Kind::Invalid
        }
        _ => Kind::Refused,
    };
    Error::of(kind, error.fault().within(path.display()))
}

/// Does that say that tables are not there, or are not what was written?
pub(crate) fn is_erased(error: &FormatError) -> bool {
    use FormatError::{Damaged, NotAPool, NotFound, Wrong};
    matches!(
        error,
        NotAPool | NotFound { .. } | Damaged { .. } | Wrong { .. }
    )
}

/// What has become of a device that has neither superblock any more.
pub(crate) enum Bare {
    /// Something else is there.
    Erased,
    /// It answers with errors, of which this is one.
    Dead(io::Error),
    /// It does not answer.
    Silent,
}

/// Has neither superblock of a device been left, or can neither be read? It is looked at twice, as
/// one may just be written.
///
/// A request that times out here counts in the next look: a process that was stopped for a while
/// may find its own requests late before it sees their answers.
pub(crate) fn bare(device: &Arc<Device>) -> Option<Bare> {
    if device.owes() {
        return Some(Bare::Silent);
    }
    let mut device = device.clone();
    let mut look = || match Superblock::load_any(&mut device) {
        Err(e) if is_erased(&e) => Some(Bare::Erased),
        Err(FormatError::Io { source, .. }) if hearth_io::is_dead(&source) => {
            Some(Bare::Dead(source))
        }
        _ => None,
    };
    look()?;
    look()
}

/// Why the tables of a pool whose superblock is there cannot be used.
fn tables_error(path: &Path, error: &FormatError) -> Error {
    match error {
        FormatError::NotFound { .. } => Error::refused(
            format!(
                "{}: the pool's registry is not there any more: something has erased the device, or a part of it",
                path.display()
            ),
            format!(
                "look what of its data can be saved with `hearth rescue {0}`; then make a new pool there with `hearth pool create \
                 --flash {0} --force`, and add the disks again. (With the state directory in which it was served, `hearth serve` \
                 starts, and serves the disks that are whole in their origins.)",
                path.display()
            ),
        ),
        e => format_error(path, e),
    }
}

impl Pool {
    /// Opens a pool for this process alone.
    pub fn open(path: &Path) -> Result<Pool> {
        Pool::open_all(&[path.to_owned()])
    }

    /// The same of a pool of all these devices, in any order.
    pub fn open_all(paths: &[PathBuf]) -> Result<Pool> {
        Pool::load(paths, OpenMode::default())
    }

    /// Opens a pool for this process alone; if its flash cannot be written at all, to be read only,
    /// and with the reason. Where its devices have been changed since the list was made, it is found all the same, with what
    /// is known of it in `state_dir`.
    pub fn open_for_service(paths: &[PathBuf], state_dir: &Path) -> Result<(Pool, Option<String>)> {
        match Pool::open_writable(paths) {
            // It would be served without a device that has come since the list was made, and that one lost by it.
            Ok((pool, why)) if pool.flash().misses_one() => {
                let Some(today) = change::of_today(paths, state_dir) else {
                    return Ok((pool, why));
                };
                drop(pool);
                let shown = crate::beside::listed(&crate::beside::shown_all(&today));
                tracing::warn!(
                    "the list of flash devices is not that of today; serving the pool on {shown}: give that list from now on, with --flash or in the settings"
                );
                // Not with the list that was given if that fails: it would lose a device for what may be over in a moment.
                Pool::open_writable(&today)
            }
            Err(e) if matches!(e.kind, Kind::Refused | Kind::Invalid | Kind::Unavailable) => {
                let Some(today) = change::of_today(paths, state_dir) else {
                    return Err(e);
                };
                let opened = Pool::open_writable(&today)?;
                let shown = crate::beside::listed(&crate::beside::shown_all(&today));
                tracing::warn!(
                    "the list of flash devices is not that of today: {e}; serving the pool on {shown}: give that list from now on, with --flash or in the settings"
                );
                Ok(opened)
            }
            other => other,
        }
    }

    /// Looks at a pool as [`open_for_service`](Self::open_for_service) would open it.
    pub fn look_for_service(paths: &[PathBuf], state_dir: &Path) -> Result<Pool> {
        let looked = Pool::look_at(paths);
        if let Ok(pool) = &looked
            && !pool.flash().misses_one()
        {
            return looked;
        }
        match change::of_today(paths, state_dir) {
            Some(today) => Pool::look_at(&today),
            None => looked,
        }
    }

    fn open_writable(paths: &[PathBuf]) -> Result<(Pool, Option<String>)> {
        let read_only = || paths.iter().find(|path| crate::place::is_read_only(path));
        match Pool::open_all(paths) {
            Err(e) if e.kind == Kind::Unavailable => {
                let Some(path) = read_only() else {
                    return Err(e);
                };
                let mode = OpenMode {
                    read_only: true,
                    unlocked: false,
                };
                let why = format!("{} is read-only", path.display());
                Ok((Pool::load(paths, mode)?, Some(why)))
            }
            other => Ok((other?, None)),
        }
    }

    /// Looks at a pool that somebody else may be using.
    pub fn look(path: &Path) -> Result<Pool> {
        Pool::look_at(&[path.to_owned()])
    }

    /// The same of a pool of all these devices.
    pub fn look_at(paths: &[PathBuf]) -> Result<Pool> {
        let mode = OpenMode {
            read_only: true,
            unlocked: true,
        };
        let mut again = LOOKS - 1;
        loop {
            match Pool::load(paths, mode) {
                // They may have been storing the registry just now.
                Err(e) if e.kind == Kind::Refused && again > 0 => again -= 1,
                other => return other,
            }
        }
    }

    fn load(paths: &[PathBuf], mode: OpenMode) -> Result<Pool> {
        let Opened {
            flash,
            superblock,
            members,
        } = devices::open(paths, mode)?;
        let media = flash.first().ok_or_else(devices::none_given)?.clone();
        let path = media.path().to_owned();
        let path = path.as_path();
        if superblock.must_stay_read_only() && !mode.read_only {
            return Err(Error::refused(
                format!(
                    "{} has features this version of Hearth must not write",
                    path.display()
                ),
                "open it with a newer Hearth",
            ));
        }
        let mut tables = tables(&flash, &media, false);
        let (registry, places) = Places::load(&mut *tables, &superblock.layout, superblock.pool)
            .map_err(|e| tables_error(path, &e))?;
        Ok(Pool {
            // What only one place has is stored again before anything else rests on it.
            unsettled: !places.is_sound(),
            ..Pool::of(media, flash, members, superblock, registry, places)
        })
    }

    /// One of which all is stored, and of which nothing is known but what is on its flash.
    fn of(
        media: Arc<Device>,
        flash: FlashDevices,
        members: Members,
        superblock: Superblock,
        registry: Registry,
        places: Places,
    ) -> Pool {
        Pool {
            media,
            served: false,
            flash,
            members,
            superblock,
            named: Named::of(&registry),
            seen: Arc::default(),
            registry,
            places,
            unsettled: false,
            refusal: None,
            covered: false,
            beside: None,
            confirmed: None,
            gone_from: None,
            adopted: false,
        }
    }

    /// Its flash devices.
    pub fn flash(&self) -> &FlashDevices {
        &self.flash
    }

    /// What its registry and superblock are written to.
    fn tables(&self) -> Box<dyn Media> {
        tables(&self.flash, &self.media, self.served)
    }

    /// From now on an engine runs its log, and says which devices are lost.
    pub(crate) fn is_served(&mut self) {
        self.served = true;
    }

    /// Gives several devices a new stamp, before anything else is written to any of them.
    pub(crate) fn stamp(&mut self) -> Result<()> {
        if self.superblock.is_twice() {
            let mut media = self.flash.joined();
            let stamped = self.members.stamp_twice(&mut self.superblock, &mut media);
            return stamped.map_err(|e| self.refused(&e));
        }
        if self.members.others().is_empty() {
            return Ok(());
        }
        let mut devices: Vec<Arc<Device>> = self.flash.iter().cloned().collect();
        let stamped = self.members.stamp(&mut self.superblock, &mut devices);
        stamped.map_err(|e| self.refused(&e))
    }

    /// The flash device, of several the first: it carries the registry.
    pub fn media(&self) -> &Arc<Device> {
        &self.media
    }

    /// The device that lacks by what a start knows it and its disks: somebody may have erased the flash, or written over it, below
    /// a pool that is served. A device that does not answer says nothing of that, and a flush is not waited for without a limit, as
    /// a read is.
    pub(crate) fn erased(&self) -> Option<PathBuf> {
        let answers = |device: &Arc<Device>| Device::flush(device).is_ok();
        if answers(&self.media) {
            let mut tables = tables(&self.flash, &self.media, false);
            let loaded = Places::load(&mut *tables, &self.superblock.layout, self.superblock.pool);
            if loaded.is_err_and(|e| is_erased(&e)) {
                return Some(self.path().to_owned());
            }
        }
        // Where everything is there twice, the others are all that a start needs.
        if self.flash.are_twice() {
            return None;
        }
        let others = self.flash.iter().zip(self.flash.paths()).skip(1);
        let mut others = others.filter(|(device, _)| answers(device));
        let erased = others.find(|(device, _)| matches!(bare(device), Some(Bare::Erased)));
        erased.map(|(_, path)| path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        match &self.gone_from {
            Some(path) => path,
            None => self.media.path(),
        }
    }

    /// Where all its flash devices are.
    pub fn paths(&self) -> Vec<PathBuf> {
        match &self.gone_from {
            Some(path) => vec![path.clone()],
            None => self.flash.paths(),
        }
    }

    /// The registry as it is on flash.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// What the registry says from now on, without this one's lock.
    pub(crate) fn seen(&self) -> Arc<Seen> {
        self.seen.show(&self.registry);
        self.seen.clone()
    }

    /// The record of a disk.
    pub fn record(&self, id: u16) -> Option<&DiskRecord> {
        self.registry.by_id(id)
    }

    /// The disks that may name the origin, or a file below it, that another disk names, in the order of the
    /// registry. What they name has to be compared; no other disk's need be.
    pub(crate) fn near(&self, spec: &OriginSpec, chain: &[String]) -> Vec<SharedRecord> {
        let near = self.named.near(spec, chain).into_iter();
        let mut places: Vec<usize> = near.filter_map(|id| self.registry.position(id)).collect();
        places.sort_unstable();
        let disks = &self.registry.disks;
        places
            .iter()
            .filter_map(|at| disks.get(*at).cloned())
            .collect()
    }

    /// True if there are files below any disk's image.
    pub(crate) fn any_chain(&self) -> bool {
        self.named.any_chain()
    }

    /// Refuses what the pool names outside it, unless that is confirmed on this host.
    pub(crate) fn check_confirmed(&self, claim: Option<Claim>) -> Result<()> {
        let confirmed = |claim: &Claim| self.confirmed.as_ref().is_some_and(|c| c.has(claim));
        match claim.filter(|claim| !confirmed(claim)) {
            Some(claim) => Err(claim.refused()),
            None => Ok(()),
        }
    }

    /// The same of a disk's origin.
    pub(crate) fn is_confirmed(&self, record: &DiskRecord) -> bool {
        self.check_confirmed(Claim::of_disk(record)).is_ok()
    }

    /// Looks in a state directory which of its claims are confirmed.
    pub fn look_for_claims(&mut self, state_dir: &Path) -> Result<()> {
        self.confirmed = Some(Confirmed::look(state_dir, &self.superblock.pool)?);
        Ok(())
    }

    /// Confirms all its claims on the host of that state directory.
    pub fn accept_claims(&mut self, state_dir: &Path) -> Result<()> {
        let mut confirmed = match self.confirmed.take() {
            Some(confirmed) => confirmed,
            None => Confirmed::open(state_dir, &self.superblock.pool)?,
        };
        let accepted = confirmed.confirm(Claim::all(&self.registry).collect());
        self.confirmed = Some(confirmed);
        accepted
    }

    /// Bytes of RAM that index, policy and RAM stage take, with a stage of `stage` bytes or else
    /// what it has at least.
    pub fn footprint(&self, stage: Option<u64>) -> u64 {
        let stage = stage.map(|bytes| (bytes / BLOCK) as usize);
        Engine::footprint(self.superblock.layout.slots(), stage)
    }

    /// Bytes of RAM at most, with a RAM stage of so many and NBD clients that may hold so many.
    pub(crate) fn ram_most(&self, stage: u64, nbd: u64) -> u64 {
        // Threads, registries and the like take a few MiB.
        self.footprint(Some(stage)) + nbd + (8 << 20)
    }

    /// So much of it is set aside by now.
    pub(crate) fn set_areas(&mut self, areas: Vec<hearth_format::Area>) {
        self.superblock.areas = areas;
        match self.superblock.areas.is_empty() {
            true => self.superblock.incompat &= !INCOMPAT_AREAS,
            false => self.superblock.incompat |= INCOMPAT_AREAS,
        }
    }

    /// Bytes for data in all segments of the log, those that stay free for cleaning included.
    pub fn log_bytes(&self) -> u64 {
        // What is clean is in one half of a segment.
        let copies = if self.superblock.layout.once { 2 } else { 1 };
        copies * self.kept_capacity()
    }

    /// Bytes of flash for data that is to stay, whatever is written of it: what is dirty is in both halves of a segment, and with a
    /// device lost there is one.
    pub(crate) fn kept_capacity(&self) -> u64 {
        self.segments() * u64::from(self.superblock.layout.data_blocks()) * BLOCK
    }

    /// Segments of the log that are on its devices.
    fn segments(&self) -> u64 {
        let each = self.superblock.segments();
        let all: u64 = each
            .iter()
            .map(|range| u64::from(range.end - range.start))
            .sum();
        let aside = self.superblock.areas.iter().map(|a| u64::from(a.segments));
        let all = all.saturating_sub(aside.sum());
        match self.superblock.is_twice() {
            true => all / 2,
            false => all,
        }
    }

    /// Changes the registry; when this returns `Ok` the change is durable. Else nothing changed in RAM,
    /// and on flash the old or the new one is found until something is stored again.
    ///
    /// What is kept beside the flash follows. If the flash does not take the change, that alone
    /// has it, and says that it counts.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut Registry) -> Result<T>) -> Result<T> {
        let mut next = self.registry.clone();
        let value = change(&mut next)?;
        if next != self.registry || self.unsettled {
            let claims = self.confirmed.as_ref();
            let claims = claims.map(|confirmed| confirmed.follow(&self.registry, &next));
            let claims = claims.unwrap_or_default();
            if let Some(confirmed) = &mut self.confirmed {
                confirmed.begin(&claims)?;
            }
            self.store(&mut next)?;
            self.named.follow(&self.registry, &next);
            self.registry = next;
            self.seen.show(&self.registry);
            if let Some(confirmed) = &mut self.confirmed {
                confirmed.end(claims);
            }
        }
        Ok(value)
    }

    fn store(&mut self, next: &mut Registry) -> Result<()> {
        if let (Some(_), Some(beside)) = (&self.gone_from, &self.beside) {
            return beside
                .store(next)
                .map_err(|e| format_error(beside.path(), &e));
        }
        self.unsettled = true;
        let mut tables = self.tables();
        let stored = self.places.store(
            &mut *tables,
            &self.superblock.layout,
            self.superblock.pool,
            &self.registry,
            next,
        );
        let Some(beside) = self.beside.clone() else {
            self.unsettled = stored.is_err();
            return stored.map_err(|e| self.refused(&e));
        };
        match stored {
            Ok(()) => {
                self.unsettled = false;
                let followed = beside
                    .follow(next)
                    .map_err(|e| e.to_string())
                    .and_then(|()| match beside.says(|notes| notes.alone) {
                        true => beside.note(|n| n.alone = false).map_err(|e| e.to_string()),
                        false => Ok(()),
                    });
                if let Err(e) = followed {
                    tracing::error!(path = %beside.path().display(), "what the flash has of the registry cannot be kept beside it: {e}");
                }
                Ok(())
            }
            // Where neither takes it, what is on flash counts, and whoever asked is told why.
            Err(e) => {
                let error = self.refused(&e);
                let kept = beside.store(next).map_err(|e| e.to_string());
                let kept =
                    kept.and_then(|()| beside.note(|n| n.alone = true).map_err(|e| e.to_string()));
                kept.map_err(|_| error)
            }
        }
    }

    /// True if the flash has the registry as it is.
    pub(crate) fn is_settled(&self) -> bool {
        !self.unsettled
    }

    /// Disks that are ordered.
    pub(crate) fn ordered(&self) -> Vec<u16> {
        let disks = self.registry().disks.iter();
        let ordered = disks.filter(|d| d.mode == hearth_format::CacheMode::WriteBackOrdered);
        ordered.map(|d| d.id).collect()
    }

    /// Stores the registry again if it was not whole in both its places.
    pub(crate) fn settle(&mut self) -> Result<()> {
        if self.unsettled {
            tracing::warn!("one copy of the registry was not whole; it is stored again");
        }
        self.change(|_| Ok(()))
    }

    /// Changes what the registry says of origins and caches. Where flash takes no writes and that is
    /// noted elsewhere, the change stays in RAM.
    pub fn change_or_keep(&mut self, change: impl Fn(&mut Registry) -> Result<()>) -> Result<()> {
        match self.change(&change) {
            Err(_) if self.covered => {
                self.places.begin_anew();
                let old = self.registry.clone();
                let changed = change(&mut self.registry);
                self.named.follow(&old, &self.registry);
                self.seen.show(&self.registry);
                changed
            }
            other => other,
        }
    }

    /// An error of the format layer, remembering whether flash refused to be written.
    fn refused(&mut self, error: &FormatError) -> Error {
        if let FormatError::Io { source, .. } = error {
            self.refusal = Some(crate::degraded::refusal(self.media.path(), source));
        }
        format_error(self.media.path(), error)
    }

    /// Why flash refused the last write of the registry or the superblock that failed.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// What the registry says of caches need not be stored any more: nothing is trusted anyway.
    pub(crate) fn set_covered(&mut self) {
        self.covered = true;
    }

    /// The pool's number for life.
    pub fn uuid(&self) -> String {
        self.superblock.pool.to_string()
    }

    /// Notes in the superblock that the flash was given up.
    pub(crate) fn mark_failed(&mut self) -> Result<()> {
        let before = self.superblock.state;
        self.superblock.state = PoolState::Failed;
        let stored = self.superblock.store_naming(&mut *self.tables());
        stored.map_err(|e| {
            self.superblock.state = before;
            self.refused(&e)
        })
    }

    fn has_failed(&self) -> bool {
        self.superblock.state == PoolState::Failed
            || crate::degraded::is_marked(self.path(), self.media.is_device(), &self.uuid())
    }

    /// As [`distrust_if_failed`](Self::distrust_if_failed), for this run only: what said so stays.
    pub(crate) fn distrust_in_ram_if_failed(&mut self) {
        if self.has_failed() {
            self.distrust_in_ram(|_| true);
        }
    }

    /// If the flash was given up by an earlier run, the origins may have gone on without it: every
    /// disk is marked so that nothing cached is trusted without being asked about.
    pub fn distrust_if_failed(&mut self) -> Result<()> {
        if !self.has_failed() {
            return Ok(());
        }
        tracing::warn!("the flash had failed before; what is on it may be older than the origins");
        self.distrust_all()?;
        crate::degraded::remove_markers(self.path(), self.media.is_device(), &self.uuid());
        Ok(())
    }

    /// Marks every disk so that nothing cached is trusted without being asked about.
    pub fn distrust_all(&mut self) -> Result<()> {
        self.change(|registry| {
            for record in &mut registry.disks {
                crate::origin::distrust(record);
            }
            Ok(())
        })
    }

    /// Notes which host uses the pool.
    pub fn note_host(&mut self, host: &str) -> Result<()> {
        if self.superblock.last_host == host {
            return Ok(());
        }
        if !self.superblock.last_host.is_empty() {
            tracing::info!(before = %self.superblock.last_host, now = host, "the pool comes from another host");
        }
        self.superblock.last_host = host.to_owned();
        let mut tables = self.tables();
        self.superblock
            .store_naming(&mut *tables)
            .map_err(|e| self.refused(&e))
    }
}

/// The API's word for a registry's mode.
pub fn mode_of(mode: hearth_format::CacheMode) -> CacheMode {
    match mode {
        hearth_format::CacheMode::WriteBack => CacheMode::WriteBack,
        hearth_format::CacheMode::WriteThrough => CacheMode::WriteThrough,
        hearth_format::CacheMode::WriteAround => CacheMode::WriteAround,
        hearth_format::CacheMode::Off => CacheMode::Off,
        hearth_format::CacheMode::WriteBackOrdered => CacheMode::WriteBackOrdered,
    }
}

/// The registry's word for an API's mode.
pub fn mode_to(mode: CacheMode) -> hearth_format::CacheMode {
    match mode {
        CacheMode::WriteBack => hearth_format::CacheMode::WriteBack,
        CacheMode::WriteThrough => hearth_format::CacheMode::WriteThrough,
        CacheMode::WriteAround => hearth_format::CacheMode::WriteAround,
        CacheMode::Off => hearth_format::CacheMode::Off,
        CacheMode::WriteBackOrdered => hearth_format::CacheMode::WriteBackOrdered,
    }
}

pub(crate) mod change;
mod create;
pub(crate) mod devices;
pub use devices::{OfDevice, of_device};
mod kept;
mod make;
mod memory;
mod seen;
pub(crate) mod show;
#[cfg(test)]
mod tests;
mod told;
pub(crate) mod without;

pub use change::{Change, change};
pub use create::{DeviceAt, create_several};
pub use devices::FlashDevices;
pub(crate) use make::layout;
pub use make::{CreateOptions, adopt_flash, create, create_with};
use make::{Prepared, first_registry, prepare, settle_name, take_room};
pub use memory::{check_memory, check_stage, stage_within};
pub(crate) use seen::Seen;
pub use told::show;
