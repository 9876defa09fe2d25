//! The real engine as a [`Subject`].

mod halves;

pub use halves::HalfFault;

use crate::media::SimMedia;
use crate::mirrored::LegFault;
use crate::prng::Prng;
use crate::subject::{CopyPlan, Known, Maker, Replacement, Reshape, Shape, Subject, Unsaved};
use hearth_engine::api::{
    DiskConfig, DiskId, Effects, ExtentState, Home, Mode, OriginState, Request,
};
use hearth_engine::faults::{Fault, Faults};
use hearth_engine::{ControlError, Engine, EngineOptions, KnownDisk, OpenedFrom, Upto};
use hearth_format::areas::AreaPlace;
use hearth_format::change::{self, Newcomer};
use hearth_format::devices::judge;
use hearth_format::superblock::PoolState;
use hearth_format::{DeviceEntry, Layout, Members, Superblock, Uuid};
use hearth_io::{BLOCK, IoDone, Joined, Media, Spread};
use hearth_policy::cleaning::Heads;
use hearth_policy::{Budget, EXPERTS};

/// Makes real engines, whole or with one deliberate fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct Real {
    faults: Faults,
    /// Nobody counts again what it keeps count of.
    uncounted: bool,
    /// The registry's part of the contract broken: it forgets since when a disk exists.
    ignore_since: bool,
    /// How mirrors are broken.
    legs: LegFault,
    /// A device that the pool went on without is believed when it is back.
    believe_lost: bool,
    /// How the replacement of devices is broken.
    halves: HalfFault,
}

/// Names of the deliberate faults that are not the engine's but its caller's.
pub const IGNORE_SINCE: &str = "IgnoreSinceSeq";
/// See [`IGNORE_SINCE`].
pub const BELIEVE_LOST: &str = "BelieveLostDevice";

/// Names of the deliberate faults.
pub fn fault_names() -> Vec<String> {
    let engine = Fault::all().map(|f| format!("{f:?}"));
    let legs = leg_faults().into_iter().map(|(name, _)| name);
    let halves = HalfFault::ALL.map(|(_, name)| name.to_string());
    engine
        .chain([IGNORE_SINCE.to_string(), BELIEVE_LOST.to_string()])
        .chain(halves)
        .chain(legs)
        .collect()
}

/// The deliberate faults of mirrors, and their names.
pub fn leg_faults() -> Vec<(String, LegFault)> {
    let own = [("LegRemovalUnnoted".to_owned(), LegFault::RemovalUnnoted)];
    #[cfg(feature = "mutations")]
    let rules = hearth_mirror::faults::Fault::UNDER_AN_ENGINE
        .map(|rule| (format!("Leg{rule:?}"), LegFault::Rule(rule)));
    #[cfg(not(feature = "mutations"))]
    let rules = [];
    own.into_iter().chain(rules).collect()
}

impl Real {
    /// An engine with the fault of this name. Needs the feature `mutations`.
    pub fn broken(name: &str) -> Result<Real, String> {
        if name.eq_ignore_ascii_case(IGNORE_SINCE) {
            return Ok(Real {
                ignore_since: true,
                ..Real::default()
            });
        }
        if name.eq_ignore_ascii_case(BELIEVE_LOST) {
            return Ok(Real {
                believe_lost: true,
                ..Real::default()
            });
        }
        let mut halves = HalfFault::ALL.into_iter();
        if let Some((halves, _)) = halves.find(|(_, n)| n.eq_ignore_ascii_case(name)) {
            return Ok(Real {
                halves,
                ..Real::default()
            });
        }
        let mut legs = leg_faults().into_iter();
        if let Some((_, legs)) = legs.find(|(n, _)| n.eq_ignore_ascii_case(name)) {
            return Ok(Real {
                legs,
                ..Real::default()
            });
        }
        let fault = Fault::all()
            .find(|f| format!("{f:?}").eq_ignore_ascii_case(name))
            .ok_or_else(|| format!("there is no mutation {name:?}; --list names them"))?;
        Real::with(fault)
    }

    /// An engine with this fault.
    #[cfg(feature = "mutations")]
    pub fn with(fault: Fault) -> Result<Real, String> {
        Ok(Real {
            faults: Faults(Some(fault)),
            ..Real::default()
        })
    }

    /// An engine with this fault: not in this build.
    #[cfg(not(feature = "mutations"))]
    pub fn with(fault: Fault) -> Result<Real, String> {
        Err(format!(
            "the engine was built without {fault:?}; build with --features mutations"
        ))
    }

    /// The same, believed about what it counts.
    pub fn uncounted(self) -> Real {
        Real {
            uncounted: true,
            ..self
        }
    }

    /// Settings drawn from the world's seed.
    fn options(&self, shape: Shape) -> EngineOptions {
        let mut rng = Prng::new(shape.seed);
        EngineOptions {
            hash_seed: rng.next_u64(),
            dirty_high_percent: *rng.pick(&[60, 60, 30, 80]),
            dirty_low_percent: *rng.pick(&[20, 5, 0]),
            idle_ns: *rng.pick(&[300_000_000, 5_000_000]),
            destage_bytes_per_s: *rng.pick(&[0, 0, 0, 4 << 20]),
            trim: rng.chance(2, 3),
            intent_idle_ns: *rng.pick(&[2_000_000_000, 20_000_000, 1_000_000]),
            first_fill: rng.chance(1, 3),
            prefetch: rng.chance(3, 4),
            fast_origin_ns: *rng.pick(&[0, 0, 500_000]),
            ram_stage: Some(*rng.pick(&[0, 4, 40, 256])),
            rules: rng.pick(&[None, Some(0), Some(1)]).map(|i| EXPERTS[i]),
            endurance: if rng.chance(1, 8) {
                Budget::bytes_per_second(4096)
            } else {
                Budget::unlimited()
            },
            faults: self.faults,
            zero_runs_max: *rng.pick(&[u64::MAX, 12, 2]),
            zeros_as_data: *rng.pick(&[1 << 20, 64 << 10, 0]),
            // Mostly several to a disk, and requests that cross from one to the next.
            intent_region_blocks: *rng.pick(&[64, 64, 16, 4096]),
            ..EngineOptions::default()
        }
    }
}

impl Maker for Real {
    fn leg_fault(&self) -> LegFault {
        self.legs
    }

    fn format(&self, media: &mut dyn Media, shape: Shape) -> Result<(), String> {
        let mut rng = Prng::new(shape.seed ^ 0x0F0F);
        let mut uuid = || {
            let (a, b) = (rng.next_u64(), rng.next_u64());
            Uuid::from_u128((u128::from(a) << 64) | u128::from(b))
        };
        let layout =
            Layout::for_device(media.len(), shape.segment_blocks).map_err(|e| e.to_string())?;
        Superblock::new(layout, uuid(), uuid(), "simulated", 0)
            .store(media)
            .map_err(|e| e.to_string())
    }

    fn format_several(
        &self,
        devices: &mut [SimMedia<'_>],
        shape: Shape,
        twice: bool,
    ) -> Result<(), String> {
        let mut rng = Prng::new(shape.seed ^ 0x0F0F);
        let mut uuid = || {
            let (a, b) = (rng.next_u64(), rng.next_u64());
            Uuid::from_u128((u128::from(a) << 64) | u128::from(b))
        };
        let sizes: Vec<u64> = devices.iter().map(|d| d.len()).collect();
        let laid_out = match twice {
            // In some worlds clean blocks are there once.
            true => Layout::for_twice(&sizes, shape.segment_blocks, shape.seed / 11 % 4 != 0),
            false => Layout::for_devices(&sizes, shape.segment_blocks),
        };
        let (layout, extents) = laid_out.map_err(|(place, e)| format!("device {place}: {e}"))?;
        let entries = extents.into_iter().map(|extent| DeviceEntry {
            device: uuid(),
            extent,
        });
        let entries: Vec<DeviceEntry> = entries.collect();
        let mut lead = Superblock::new(layout, uuid(), entries[0].device, "simulated", 0);
        match twice {
            true => lead.set_twice(layout, entries),
            false => lead.set_devices(layout, entries),
        }
        lead.stamp = 1;
        for (media, place) in devices.iter_mut().zip(0..).skip(if twice { 2 } else { 1 }) {
            let mut sb = lead.for_member(place, lead.devices[usize::from(place)].device, 0);
            sb.store(media).map_err(|e| e.to_string())?;
        }
        let stored = match twice {
            true => {
                let devices = devices.iter_mut().collect();
                lead.store(&mut Joined::new(lead.spread(), devices))
            }
            false => lead.store(&mut devices[0]),
        };
        stored.map_err(|e| e.to_string())
    }

    fn join(&self, devices: &mut [SimMedia<'_>]) -> Result<Spread, String> {
        let found: Result<Vec<Superblock>, _> =
            devices.iter_mut().map(|d| Superblock::load(d)).collect();
        if let Some(spread) = self.join_twice(devices)? {
            return Ok(spread);
        }
        let mut found = found.map_err(|e| e.to_string())?;
        let order = judge(&found).map_err(|e| format!("{e:?}"))?;
        if order.iter().enumerate().any(|(at, i)| at != *i) {
            return Err("the devices are in another order than before".into());
        }
        let mut lead = found.remove(0);
        if !found.is_empty() {
            let stamped = Members::new(found).stamp(&mut lead, devices);
            stamped.map_err(|e| e.to_string())?;
        }
        Ok(lead.spread())
    }

    fn reshape(
        &self,
        mut devices: Vec<SimMedia<'_>>,
        what: Reshape,
        seed: u64,
    ) -> Result<(), String> {
        let first = devices.first_mut().ok_or("there is no device")?;
        let lead = Superblock::load(first).map_err(|e| e.to_string())?;
        let newcomer = Newcomer {
            device: Uuid::from_u128(u128::from(seed) << 64 | 1),
            now_unix_s: 1,
        };
        let told = |(place, e): change::Failed| format!("device {place}: {e}");
        match what {
            Reshape::Add => {
                let new = devices.last_mut().ok_or("there is no device")?;
                change::clear(&lead, new, &mut |_, _| true).map_err(|e| e.to_string())?;
                change::add(&mut devices, newcomer).map(drop).map_err(told)
            }
            Reshape::Replace(place) => {
                let mut new = devices.pop().ok_or("there is no device")?;
                let none = |_| false;
                let progress = &mut |_, _| true;
                change::replace(&mut devices, place, &mut new, newcomer, &none, progress)
                    .map(drop)
                    .map_err(told)
            }
            Reshape::Remove(place) => change::remove(devices, place).map(drop).map_err(told),
        }
    }

    fn go_on_without(&self, mut devices: Vec<SimMedia<'_>>, place: usize) -> Result<(), String> {
        let first = devices.first_mut().ok_or("there is no device")?;
        // The floor was raised when it was closed.
        let floor = Superblock::load(first)
            .map_err(|e| e.to_string())?
            .floor_of_log();
        let gone = change::go_on_without(&mut devices, place, floor);
        gone.map(drop)
            .map_err(|(place, e)| format!("device {place}: {e}"))
    }

    fn is_pool(&self, devices: &mut [SimMedia<'_>], list: &[usize]) -> bool {
        let found = list.iter().map(|i| {
            let media = devices.get_mut(*i)?;
            Superblock::load(media).ok()
        });
        let found: Option<Vec<Superblock>> = found.collect();
        let order = found.and_then(|found| judge(&found).ok());
        order.is_some_and(|order| order.iter().enumerate().all(|(at, i)| at == *i))
    }

    fn finish(&self, devices: &mut [SimMedia<'_>]) -> Result<(), String> {
        let [old, .., new] = devices else {
            return Err("there is no other device".into());
        };
        match change::finish_replacement(old, new) {
            Ok(true) => Ok(()),
            Ok(false) => Err("there is no replacement to finish".into()),
            Err(e) => Err(e.to_string()),
        }
    }

    fn lost(&self, devices: &mut [SimMedia<'_>]) -> Result<u64, String> {
        self.lost_of(devices)
    }

    fn listed(&self, devices: &mut [SimMedia<'_>], place: usize) -> Result<u128, String> {
        self.listed_at(devices, place)
    }

    fn copy_plan(&self, devices: &mut [SimMedia<'_>], place: usize) -> Result<CopyPlan, String> {
        self.plan_of(devices, place)
    }

    fn replace_half(
        &self,
        devices: Vec<SimMedia<'_>>,
        new: SimMedia<'_>,
        what: &Replacement,
    ) -> Result<(), String> {
        self.replace(devices, new, what)
    }

    fn was_given_up(&self, media: &mut dyn Media) -> bool {
        Superblock::load(media).is_ok_and(|sb| sb.state == PoolState::Failed)
    }

    fn open(
        &self,
        media: &mut dyn Media,
        shape: Shape,
        known: &[Known],
    ) -> Result<Box<dyn Subject>, String> {
        let mut options = self.options(shape);
        let ordered = known.iter().filter(|k| k.ordered);
        options.ordered = ordered.map(|k| k.id).collect();
        // In some worlds one start after the other has one head and two, as where options change.
        let turn = Superblock::load(media).map_or(0, |sb| sb.generation);
        options.heads = match (shape.seed / 7 % 4, turn % 2) {
            (0, _) | (1, 0) => Heads::One,
            _ => Heads::MovesApart,
        };
        let known: Vec<KnownDisk> = known
            .iter()
            .map(|k| KnownDisk {
                id: k.id,
                size: k.size,
                since_seq: if self.ignore_since { 0 } else { k.since_seq },
                home: k.home,
            })
            .collect();
        let (engine, report) = Engine::open(media, options, &known).map_err(|e| e.to_string())?;
        Ok(Box::new(RealSubject {
            engine,
            uncounted: self.uncounted,
            dropped: report.dropped,
            from_checkpoint: report.from == OpenedFrom::Checkpoint,
        }))
    }
}

struct RealSubject {
    engine: Engine,
    uncounted: bool,
    dropped: Vec<DiskId>,
    from_checkpoint: bool,
}

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// `Busy` is an answer, not an error.
fn retry<T>(result: Result<T, ControlError>) -> Result<Option<T>, String> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ControlError::Busy) => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

impl Subject for RealSubject {
    fn dropped(&self) -> Vec<DiskId> {
        self.dropped.clone()
    }
    fn attach(&self, config: DiskConfig, origin: OriginState) -> Result<(), String> {
        self.engine.attach(config, origin).map_err(text)
    }
    fn detach(&self, id: DiskId) -> Result<bool, String> {
        retry(self.engine.detach(id)).map(|done| done.is_some())
    }
    fn forget(&self, id: DiskId, effects: &mut Effects) -> Result<Option<u64>, String> {
        retry(self.engine.forget(id, effects))
    }
    fn remove(&self, id: DiskId) -> Result<bool, String> {
        retry(self.engine.remove(id)).map(|done| done.is_some())
    }
    fn set_mode(&self, id: DiskId, mode: Mode) -> Result<(), String> {
        self.engine.set_mode(id, mode).map_err(text)
    }
    fn log_free_seq(&self, id: DiskId) -> Option<u64> {
        let may = self.engine.can_be_log_free(id);
        may.then(|| self.engine.log_free_seq(id).ok()).flatten()
    }
    fn set_log_free(&self, id: DiskId, seq: u64, now_ns: u64, effects: &mut Effects) {
        self.engine.set_log_free(id, seq, now_ns, effects);
    }
    fn set_limits(&self, id: DiskId, min: u64, max: u64) -> Result<(), String> {
        self.engine.set_limits(id, min, max).map_err(text)
    }
    fn set_size(&self, id: DiskId, size: u64) -> Result<bool, String> {
        retry(self.engine.set_size(id, size)).map(|done| done.is_some())
    }
    fn rehome(&self, id: DiskId, home: Home) -> Result<bool, String> {
        match self.engine.rehome(id, home) {
            // Its origin does not have everything.
            Err(hearth_engine::ControlError::Dirty) => Ok(false),
            other => retry(other).map(|done| done.is_some()),
        }
    }
    fn hold(&self, id: DiskId) -> Result<bool, String> {
        match self.engine.hold(id, true) {
            Err(hearth_engine::ControlError::Dirty) => Ok(false),
            other => retry(other).map(|done| done.is_some()),
        }
    }
    fn is_held(&self, id: DiskId) -> bool {
        self.engine.is_held(id)
    }
    fn is_whole(&self, id: DiskId) -> Result<Option<bool>, String> {
        match self.engine.is_whole(id) {
            Err(hearth_engine::ControlError::Dirty) => Ok(None),
            other => retry(other).map(|done| Some(done.is_some())),
        }
    }
    fn unkept(&self, id: DiskId, offset: u64, end: u64) -> Result<(u64, u64), u64> {
        let found = self.engine.unkept(id, offset, end);
        found.map(|(from, len, _)| (from, len))
    }
    fn drain(&self, id: DiskId, on: bool) -> Result<(), String> {
        self.engine.drain(id, on).map_err(text)
    }
    fn clean(&self, id: DiskId) -> bool {
        self.engine.status(id).is_none_or(|s| s.drained)
    }
    fn unsaved(&self, id: DiskId) -> Unsaved {
        self.engine.status(id).map_or_else(Unsaved::default, |s| {
            let blocks = |(at, len): &(u64, u64)| at / BLOCK..(at + len) / BLOCK;
            Unsaved {
                dirty: s.dirty_blocks,
                lost: s.lost_ranges.iter().flat_map(blocks).collect(),
            }
        })
    }
    fn owed(&self, id: DiskId) -> Vec<u64> {
        let (mut owed, mut at, mut found) = (Vec::new(), 0, Vec::new());
        loop {
            found.clear();
            self.engine.block_status(id, at, u64::MAX - at, &mut found);
            if found.is_empty() {
                return owed;
            }
            for (len, state) in &found {
                if *state != ExtentState::Origin {
                    owed.extend(at / BLOCK..(at + len).div_ceil(BLOCK));
                }
                at += len;
            }
        }
    }
    fn clean_sums(&self, id: DiskId, offset: u64, len: u64) -> Vec<(u64, u32, bool)> {
        let blocks = offset / BLOCK..(offset + len).div_ceil(BLOCK);
        self.engine.clean_sums(id, blocks)
    }
    fn set_verified(&self, id: DiskId, verified: bool) {
        self.engine.set_verified(id, verified);
    }
    fn drop_clean(&self, id: DiskId) -> Result<bool, String> {
        retry(self.engine.drop_clean(id)).map(|done| done.is_some())
    }
    fn drop_unlike(&self, id: DiskId, offset: u64, right: &[u32]) {
        self.engine.drop_unlike(id, offset / BLOCK, right);
    }
    fn whole(&self, id: DiskId) -> bool {
        let status = self.engine.status(id);
        status.is_none_or(|s| s.owed_blocks() == 0 && s.drained && s.in_flight == 0)
    }
    fn order(&self, id: DiskId, now_ns: u64) -> Option<Upto> {
        self.engine.order(id, now_ns).map(|order| order.upto)
    }
    fn set_max_age(&self, id: DiskId, ns: u64) -> Result<(), String> {
        self.engine.set_max_age(id, ns).map_err(text)
    }
    fn accept_loss(&self, id: DiskId) -> Result<(), String> {
        self.engine.accept_loss(id).map(drop).map_err(text)
    }
    fn quiesce(&self, on: bool) {
        self.engine.quiesce(on);
    }
    fn idle(&self) -> bool {
        self.engine.idle()
    }
    fn close(self: Box<Self>, media: &mut dyn Media) -> Result<(), String> {
        self.engine.close(media).map_err(text)
    }
    fn close_telling(
        self: Box<Self>,
        media: &mut dyn Media,
        segments: &[u32],
    ) -> (Result<(), String>, Vec<Option<u64>>) {
        let closed = self.engine.close(media).map_err(text);
        let touched = segments.iter().map(|seg| self.engine.touched(*seg));
        (closed, touched.collect())
    }
    fn touched(&self, segment: u32) -> Option<u64> {
        self.engine.touched(segment)
    }
    fn submit(&self, now_ns: u64, requests: &mut Vec<Request>, effects: &mut Effects) {
        // As if several data threads served them.
        for r in requests.iter_mut() {
            r.owner = (r.tag % 3) as u32;
        }
        self.engine.submit(now_ns, requests, effects);
    }
    fn io_done(&self, now_ns: u64, done: &mut Vec<IoDone>, effects: &mut Effects) {
        self.engine.io_done(now_ns, done, effects);
    }
    fn tick(&self, now_ns: u64, effects: &mut Effects) -> Option<u64> {
        let next = self.engine.tick(now_ns, effects);
        let overlooked = self.engine.overlooked(now_ns);
        assert!(
            overlooked.is_empty(),
            "disks with work that are on no list: {overlooked:?}"
        );
        next
    }
    fn check(&self, open: u64) -> Result<u64, String> {
        if self.uncounted {
            return Ok(open);
        }
        self.engine.check()
    }
    fn describe(&self) -> String {
        self.engine.explain()
    }
    fn empty_device(&self, device: u16) -> bool {
        self.engine.begin_emptying(device)
    }
    fn is_emptying(&self) -> bool {
        self.engine.emptying().is_some()
    }
    fn emptied(&self) -> Option<u16> {
        let how = self.engine.emptying()?;
        (how.left == 0).then_some(how.device)
    }
    fn use_device_again(&self) {
        self.engine.end_emptying();
    }
    fn begin_area(&self, device: u16, segments: u32) -> bool {
        let area = self.engine.room_for_area(device, segments);
        area.is_some_and(|area| self.engine.begin_area(area).is_ok())
    }
    fn keep_area(&self) -> bool {
        self.engine.keep_area().is_ok()
    }
    fn give_area_back(&self, area: AreaPlace) -> bool {
        let areas = self.engine.areas();
        let area = areas.iter().find(|(_, place)| *place == area);
        area.is_some_and(|(area, _)| self.engine.give_area_back(*area).is_ok())
    }
    fn end_clearing(&self) {
        self.engine.end_clearing(true);
    }
    fn is_area_changed(&self) -> bool {
        self.engine.area_change().is_some()
    }
    fn areas(&self) -> Vec<AreaPlace> {
        self.engine
            .areas()
            .iter()
            .map(|(_, place)| *place)
            .collect()
    }
    fn gave_up_flash(&self) -> bool {
        self.engine.pool_stats().flash_failed
    }
    fn failed_alone(&self) -> Option<u16> {
        self.engine.failed_alone().map(|failed| failed.device)
    }
    fn hindered(&self) -> bool {
        let failed = self.engine.failed_alone();
        failed.is_none_or(|failed| failed.hindrance.is_some())
    }
    fn kept_without(&self) -> u64 {
        self.engine.failed_alone().map_or(0, |f| f.kept_blocks)
    }
    fn close_without(self: Box<Self>, media: &mut dyn Media) -> Result<(), String> {
        self.engine.close_without(media).map_err(text)
    }
    fn used_checkpoint(&self) -> bool {
        self.from_checkpoint
    }
    fn cached_blocks(&self) -> u64 {
        self.engine.pool_stats().cached_blocks
    }
    fn failure_is_unnoted(&self) -> bool {
        self.engine.pool_stats().flash_unnoted
    }
    fn failure_is_noted_elsewhere(&self, now_ns: u64, effects: &mut Effects) {
        self.engine.flash_is_noted_elsewhere(now_ns, effects);
    }
}
