//! Parts of the flash are set aside for the kernel's swap, and given back, while the pool is served.
//!
//! What the log has to do for that, and why it is safe wherever it is cut off, is in the engine ([`Engine::begin_area`]). Here it
//! is decided how much may be set aside, and nothing is given back that the kernel may still write to.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearth_engine::{AreaRefused, Engine};
use hearth_format::Area;
use hearth_format::areas::AreaPlace;
use hearth_io::BLOCK;

use super::reshape::Stage;
use super::{Daemon, homeless, lock};
use crate::api::areas::{AreaBack, AreaInfo, AreaWanted, AreasState};
use crate::api::types::PoolDevice;
use crate::error::{Error, Kind, Result};
use crate::pool::change::{self, Change};
use crate::size::human;

/// How often is looked how far it is.
const LOOK: Duration = Duration::from_millis(20);

fn refused(why: AreaRefused) -> Error {
    match why {
        AreaRefused::Busy => Error::conflict(
            "a flash device, or another part of one, is being emptied or cleared",
            "wait until that is done",
        ),
        AreaRefused::NoWrites => Error::refused(
            "the pool's flash takes no writes",
            "see `hearth pool show` for the reason and put that right first",
        ),
        AreaRefused::Twice => Error::refused(
            "a pool made with `--dirty-copies 2`, whose segments each lie on two devices, sets nothing aside",
            "make swap in a file (`hearth swap on --size SIZE --flash FILE`) or on a partition of its own",
        ),
        AreaRefused::TooFew => Error::refused(
            "too few segments would be left for the log",
            "give a smaller --size",
        ),
        AreaRefused::NoSuch => Error::refused(
            "there is no such part of the flash, or it is set aside already",
            "`hearth pool show` tells what there is",
        ),
        AreaRefused::NotEmpty => Error::conflict("it is not empty yet", "try again"),
    }
}

/// Refuses to set aside `bytes` more where `aside` bytes are, if so much cannot be promised, or what is `kept` for disks
/// with a minimum, pinned ones among them, would not fit any more.
fn check_share(capacity: u64, aside: u64, promised: u64, kept: u64, bytes: u64) -> Result<()> {
    let all = capacity.saturating_add(aside);
    let taken = aside.saturating_add(promised).saturating_add(bytes);
    // The log is cleaned around what lives on flash in what is left.
    let left = homeless::most(capacity.saturating_sub(bytes));
    let rest = capacity.saturating_sub(bytes);
    let fits = promised.saturating_add(kept) <= rest / 8 * 7;
    if taken <= homeless::most(all) && promised <= left && fits {
        return Ok(());
    }
    if taken <= homeless::most(all) && promised <= left {
        return Err(Error::refused(
            format!(
                "{} cannot be set aside: of the {} that would be left, {} are promised to disks that live on flash, and {} are kept for others",
                human(bytes),
                human(rest),
                human(promised),
                human(kept)
            ),
            "give a smaller --size, lower a --min, or unpin a disk",
        ));
    }
    Err(Error::refused(
        format!(
            "{} cannot be set aside: of the {} that the pool could hold, {} may be for swap and for disks that live on flash; {} are set aside, and {} are promised to such disks",
            human(bytes),
            human(all),
            human(homeless::most(all)),
            human(aside),
            human(promised)
        ),
        "give a smaller --size, remove a disk that lives on flash, or add flash with `hearth pool add-flash`",
    ))
}

impl Daemon {
    /// What is set aside, and what is being done about that.
    pub(super) fn areas(&self) -> AreasState {
        let (devices, pool) = {
            let pool = lock(&self.pool);
            (pool.devices(), pool.uuid())
        };
        let info = |(_, place): &(Area, AreaPlace)| {
            let device = devices.get(usize::from(place.device))?;
            Some(AreaInfo {
                path: device.path.clone(),
                device: device.uuid.clone(),
                pool: pool.clone(),
                offset: place.offset,
                bytes: place.bytes,
                used_by: over(&device.path, place).unwrap_or_default(),
            })
        };
        AreasState {
            areas: self.engine.areas().iter().filter_map(info).collect(),
            change: self.reshaping.progress(),
        }
    }

    /// Begins to set a part of the flash aside.
    pub(super) fn set_aside(self: &Arc<Daemon>, wanted: &AreaWanted) -> Result<AreasState> {
        self.not_stopping()?;
        if self.cache_is_off() {
            return Err(refused(AreaRefused::NoWrites));
        }
        let (devices, segment, promised, kept, twice) = {
            let pool = lock(&self.pool);
            let info = pool.info();
            let promised = homeless::promised(pool.registry());
            let kept = homeless::kept(pool.registry());
            let twice = info.dirty_copies > 1;
            (pool.devices(), info.segment_bytes, promised, kept, twice)
        };
        if twice {
            return Err(refused(AreaRefused::Twice));
        }
        let (at, device) = chosen(&devices, wanted.path.as_deref())?;
        let segments = wanted.bytes.div_ceil(segment.max(1));
        let bytes = segments.saturating_mul(segment);
        let aside = self
            .engine
            .areas()
            .iter()
            .map(|(_, place)| place.bytes)
            .sum();
        let capacity = self.engine.pool_stats().capacity_blocks * BLOCK;
        if aside > 0 {
            return Err(Error::refused(
                format!("{} are set aside already", human(aside)),
                "`hearth swap off` gives that back; then `hearth swap on` with another --size",
            ));
        }
        check_share(capacity, aside, promised, kept, bytes)?;
        let area = u32::try_from(segments).ok();
        let area = area.and_then(|segments| self.engine.room_for_area(at, segments));
        let Some(area) = area.filter(|_| bytes > 0) else {
            return Err(Error::refused(
                format!("there is no place for {} on {}", human(bytes), device.path),
                "give a smaller --size",
            ));
        };
        let what = format!("set {} of {} aside for swap", human(bytes), device.path);
        self.reshaping.begin(what.clone(), Stage::Emptying)?;
        self.work_on_area(what, move |daemon| {
            daemon.wait_dirty(area.segments, bytes)?;
            daemon.engine.begin_area(area).map_err(refused)?;
            let emptied = daemon.wait_empty();
            daemon.reshaping.stage(Stage::Listing);
            // Somebody may have been promised something meanwhile, or has been kept more.
            let fits = || {
                let pool = lock(&daemon.pool);
                let kept = homeless::kept(pool.registry());
                let promised = homeless::promised(pool.registry());
                check_share(capacity, 0, promised, kept, bytes)
            };
            let emptied = emptied.and_then(|()| fits());
            let kept = emptied.and_then(|()| daemon.engine.keep_area().map_err(refused));
            if let Err(e) = kept {
                daemon.engine.end_emptying();
                return Err(e);
            }
            daemon.wait_area(bytes)?;
            match has(&daemon.engine, area) {
                true => Ok(()),
                false => Err(refused(AreaRefused::NoWrites)),
            }
        })
    }

    /// Begins to give an area back.
    pub(super) fn give_area_back(self: &Arc<Daemon>, back: &AreaBack) -> Result<AreasState> {
        self.not_stopping()?;
        let devices = lock(&self.pool).devices();
        let wanted = |(_, place): &&(Area, AreaPlace)| {
            let device = devices.get(usize::from(place.device));
            let here = |d: &PoolDevice| change::same(Path::new(&d.path), Path::new(&back.path));
            place.offset == back.offset && device.is_some_and(here)
        };
        let areas = self.engine.areas();
        let Some((area, place)) = areas.iter().find(wanted).copied() else {
            return Err(Error::new(
                Kind::NotFound,
                format!("nothing is set aside at {} of {}", back.offset, back.path),
                "`hearth pool show` tells what there is",
            ));
        };
        let path = devices
            .get(usize::from(place.device))
            .map_or(back.path.as_str(), |d| d.path.as_str());
        unused(path, &place)?;
        let what = format!("give {} of {path} back to the cache", human(place.bytes));
        self.reshaping.begin(what.clone(), Stage::Clearing)?;
        if let Err(why) = self.engine.give_area_back(area) {
            self.reshaping.end(Err(refused(why)));
            return Err(refused(why));
        }
        let path = path.to_owned();
        self.work_on_area(what, move |daemon| {
            // It took a while to clear it, and anybody may have come meanwhile.
            daemon.wait_clear(place.bytes)?;
            let still = unused(&path, &place);
            daemon.engine.end_clearing(still.is_ok());
            still?;
            daemon.wait_area(place.bytes)?;
            match has(&daemon.engine, area) {
                false => Ok(()),
                true => Err(Error::unavailable(
                    format!(
                        "{path} could not be cleared there, so that part of it stays set aside"
                    ),
                    "check the device's health, then `hearth swap off` tries again",
                )),
            }
        })
    }

    /// Goes on beside everybody else.
    fn work_on_area(
        self: &Arc<Daemon>,
        what: String,
        work: impl FnOnce(&Daemon) -> Result<()> + Send + 'static,
    ) -> Result<AreasState> {
        self.poke();
        let daemon = self.clone();
        let work = move || {
            let result = work(&daemon);
            match &result {
                Ok(()) => tracing::info!("done: {what}"),
                Err(e) => tracing::warn!("cannot {what}: {e}"),
            }
            daemon.note_areas();
            daemon.reshaping.end(result);
        };
        let thread = std::thread::Builder::new().name("hearth-area".to_owned());
        if let Err(e) = thread.spawn(work) {
            self.engine.end_emptying();
            let error = || Error::internal(format!("cannot start a thread: {e}"));
            self.reshaping.end(Err(error()));
            return Err(error());
        }
        Ok(self.areas())
    }

    /// What is told of the pool follows what is on flash.
    fn note_areas(&self) {
        let areas = self.engine.areas().iter().map(|(area, _)| *area).collect();
        lock(&self.pool).set_areas(areas);
    }

    /// Waits until nothing more is done to an area.
    fn wait_area(&self, bytes: u64) -> Result<()> {
        self.wait_while(bytes, || true)
    }

    /// Waits until one is clear, or cannot be.
    fn wait_clear(&self, bytes: u64) -> Result<()> {
        self.wait_while(bytes, || !self.engine.is_area_clear())
    }

    fn wait_while(&self, bytes: u64, more: impl Fn() -> bool) -> Result<()> {
        while let Some((_, done)) = self.engine.area_change().filter(|_| more()) {
            self.reshaping.tell(done, bytes);
            if self.cache_is_off() {
                return Err(refused(AreaRefused::NoWrites));
            }
            if self.stopping.load(Ordering::Relaxed) {
                return Err(Error::unavailable(
                    "the daemon stops",
                    "it is one thing or the other when it is back: `hearth swap show` tells which",
                ));
            }
            self.poke();
            std::thread::sleep(LOOK);
        }
        match self.cache_is_off() {
            true => Err(refused(AreaRefused::NoWrites)),
            false => Ok(()),
        }
    }

    /// Refuses to copy or take out a device that the kernel writes to past the pool.
    pub(super) fn check_no_area_on(&self, change: &Change) -> Result<()> {
        let old = match change {
            Change::Add { .. } => return Ok(()),
            Change::Replace { old, .. } | Change::Remove { old } => old,
        };
        let devices = lock(&self.pool).devices();
        let place = devices
            .iter()
            .position(|d| change::same(Path::new(&d.path), old));
        let areas = self.engine.areas();
        let on = areas
            .iter()
            .any(|(_, p)| Some(usize::from(p.device)) == place);
        match on {
            false => Ok(()),
            true => Err(Error::refused(
                format!(
                    "a part of {} is set aside for swap, which cannot be moved while it is in use",
                    old.display()
                ),
                "`hearth swap off` gives it back; afterwards `hearth swap on --in-pool` makes it on another device",
            )),
        }
    }
}

fn has(engine: &Engine, area: Area) -> bool {
    engine.areas().iter().any(|(a, _)| *a == area)
}

/// Refuses where somebody may still write there. What cannot be looked at may be in use.
fn unused(path: &str, place: &AreaPlace) -> Result<()> {
    let users = over(path, place).map_err(|e| {
        Error::unavailable(
            format!("it cannot be told whether the kernel still swaps to {path}: {e}"),
            "give the daemon the host's /sys and /dev",
        )
    })?;
    match users.first() {
        None => Ok(()),
        Some(user) => Err(Error::conflict(
            format!("{user} still shows that part of {path}"),
            "`hearth swap off` takes it away first",
        )),
    }
}

/// Which loop devices show it.
fn over(path: &str, place: &AreaPlace) -> std::io::Result<Vec<String>> {
    let stretch = place.offset..place.offset.saturating_add(place.bytes);
    let found = hearth_io::loops_over(Path::new(path), stretch)?;
    Ok(found.iter().map(|p| p.display().to_string()).collect())
}

/// The device that is named, or the one with most on it.
fn chosen<'a>(devices: &'a [PoolDevice], path: Option<&str>) -> Result<(u16, &'a PoolDevice)> {
    let named =
        |d: &PoolDevice| path.is_none_or(|path| change::same(Path::new(&d.path), Path::new(path)));
    let fit = devices.iter().zip(0u16..).filter(|(d, _)| named(d));
    // Of several equal ones the last.
    let most = fit.max_by_key(|(d, _)| d.segments);
    most.map(|(d, n)| (n, d)).ok_or_else(|| {
        Error::new(
            Kind::NotFound,
            format!("{} is no flash device of the pool", path.unwrap_or("-")),
            "`hearth pool show` lists them",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_and_disks_on_flash_share_what_may_be_promised() {
        const GIB: u64 = 1 << 30;
        let most = homeless::most(100 * GIB);
        check_share(100 * GIB, 0, 0, 0, most).unwrap();
        let e = check_share(100 * GIB, 0, 0, 0, most + GIB).unwrap_err();
        assert!(e.what.contains("100") && !e.remedy.is_empty(), "{e}");
        // What is set aside counts, and is no part of the capacity any more.
        check_share(90 * GIB, 10 * GIB, 0, 0, most - 10 * GIB).unwrap();
        check_share(90 * GIB, 10 * GIB, 0, 0, most - 9 * GIB).unwrap_err();
        // So does what lives on flash, which must fit into what is left as well.
        check_share(100 * GIB, 0, 20 * GIB, 0, 20 * GIB).unwrap();
        check_share(100 * GIB, 0, most, 0, 1).unwrap_err();
        check_share(0, 0, 0, 0, 1).unwrap_err();
        // What is kept for disks stays kept.
        check_share(100 * GIB, 0, 0, 70 * GIB, 20 * GIB).unwrap();
        let e = check_share(100 * GIB, 0, 0, 71 * GIB, 20 * GIB).unwrap_err();
        assert!(e.to_string().contains("kept for others"), "{e}");
        check_share(u64::MAX, u64::MAX, u64::MAX, 0, u64::MAX).unwrap_err();
    }

    #[test]
    fn the_device_with_most_is_chosen_unless_one_is_named() {
        let device = |path: &str, segments| PoolDevice {
            path: path.to_owned(),
            segments,
            ..PoolDevice::default()
        };
        let devices = [device("/a", 5), device("/b", 9), device("/c", 9)];
        assert_eq!(chosen(&devices, None).unwrap().0, 2);
        assert_eq!(chosen(&devices, Some("/a")).unwrap().0, 0);
        assert!(chosen(&devices, Some("/d")).is_err());
    }
}
