//! One world: a subject, its devices, its guests and the oracle, under one virtual clock.
//!
//! A world is moved by single steps: a request or its answer (`requests`), the end of some I/O or a tick
//! (`steps`). What happens over its lifetime (crashes, stops, the final reckoning) is in [`crate::life`].

mod cut;
mod requests;
mod single;
mod steps;

use crate::area::Aside;
use crate::content::BLOCK;
use crate::device::{Base, Image, SimDevice, Tear};
use crate::flashes::Flashes;
use crate::life::held::Held;
use crate::mirrored::{self, Due, Mirrored};
use crate::model::Model;
use crate::origin::Origin;
use crate::paths::{Event, Taken};
use crate::prng::{Clock, Prng};
use crate::profile::Profile;
use crate::replace::Replacing;
use crate::single::Book;
use crate::subject::{Known, Maker, Shape, Subject};
use crate::workload::{Habits, draw_disk};
use hearth_engine::api::{DiskConfig, Effects, Home, KEPT_PERCENT_MAX, Mode};
use hearth_io::Target;
use requests::InFlight;
use std::collections::{BTreeMap, BTreeSet};

/// A reason for a world to stop, in words.
pub type Outcome = Result<(), String>;

/// Most disks of a world.
const DISKS_MAX: u64 = 3;
/// Most blocks of a disk: small, so that the flash is full soon.
const DISK_BLOCKS_MAX: u64 = 1200;
/// The same of disks with mirrors.
const MIRROR_BLOCKS_MAX: u64 = 300;
/// Most requests in flight.
const DEPTH_MAX: u64 = 32;
/// Blocks of a segment: the least the format allows, so that segments are many.
pub(crate) const SEGMENT_BLOCKS: u32 = 256;
/// Bytes of flash besides the segments: superblocks, registry, checkpoint.
const FIXED_BYTES: u64 = 6 << 20;
/// Segments of flash on which disks live.
const KEPT_SEGMENTS: [u64; 4] = [12, 16, 24, 32];
/// The same on devices behind the first: superblocks, and the start of the segments.
const OTHER_FIXED_BYTES: u64 = 4 << 20;
/// What flushes take besides what any operation does, where the profile does not say: as an SSD with a
/// safe cache, one without, and one that is busy with itself; and hard disks.
const FLUSH_NS: [u64; 5] = [0, 0, 2_000_000, 2_000_000, 40_000_000];
/// The same of flash whose losses are noted late.
const SLOW_NOTE_NS: u64 = 40_000_000;
/// Up to here an origin's first content is stamped, also where it has not grown to yet.
const ORIGIN_GROWS_TO: u64 = 1 << 40;
/// Lines of the trace that are kept.
const TRACE_MAX: usize = 60;

/// What ends at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// An operation of a device.
    Device(Target, u64),
    /// Something of the mirror of the disk with this uid.
    Mirror(u8, Due),
}

/// A disk of the world.
pub(crate) struct Disk {
    pub config: DiskConfig,
    /// Names the disk in stamps; unlike the id never used again.
    pub uid: u8,
    pub origin: Origin,
    pub habits: Habits,
    /// Ever write-back: only then can data have been on flash alone.
    pub dirty_once: bool,
    /// Blocks whose only copy may have been hurt: their reads may fail.
    pub hurt: BTreeSet<u64>,
    /// Blocks accepted as lost: what they hold nobody has promised, from when until when in the model's
    /// time.
    pub accepted: BTreeMap<u64, (u64, u64)>,
    /// Blocks whose flash read failed at this moment of the model's time.
    pub stung: BTreeMap<u64, u64>,
    /// How often flash refused a block when it was asked for nothing else.
    pub stung_alone: BTreeMap<u64, u32>,
    /// When an injected failure of the origin last happened, in the model's time.
    pub origin_failed: u64,
    /// No new requests: about to be detached.
    pub resting: bool,
    /// It is on its way onto flash alone.
    pub held: Option<Held>,
    /// It lived on an origin once that still has what it had: none of zeros, as one is that it could be given.
    pub left_origin: bool,
    /// What its origin has was put on flash as its own: there is more of it there alone than guests have written.
    pub kept: bool,
    /// It is not attached: after so many steps it will be.
    pub late: Option<u64>,
    /// Whether what flash holds of it is older than its origin must be asked before it is attached.
    pub distrusted: bool,
    /// Its clean copies have to be compared with its origin; one was found to differ.
    pub unverified: bool,
    pub dropping: bool,
    /// When that comparison ends at the latest.
    pub compared_by: Option<u64>,
    /// Beside the flash it is noted that something may be dirty there; and it was found whole since.
    pub maybe_dirty: bool,
    pub whole_before: bool,
    /// What its origin did not have when flash that was given up was used last.
    pub owed: BTreeSet<u64>,
    /// When flushes and writes that were to be durable ended: on the clock, and in the model's time.
    pub promises: Vec<(u64, u64)>,
    /// Of an ordered disk: up to when its origin holds what was promised, as was told last.
    pub told: Option<u64>,
}

impl Disk {
    /// It has no origin.
    pub fn homeless(&self) -> bool {
        matches!(self.config.home, Home::Flash | Home::Scratch)
    }

    pub fn attached(&self) -> bool {
        self.late.is_none()
    }

    /// Nobody promises any more what these blocks hold.
    pub fn accept(&mut self, blocks: impl IntoIterator<Item = u64>, now: u64) {
        let blocks = blocks.into_iter();
        self.accepted
            .extend(blocks.map(|block| (block, (now, u64::MAX))));
    }

    /// Is a block accepted as lost, or was it after `since`?
    pub fn is_accepted(&self, block: u64, since: u64) -> bool {
        self.accepted
            .get(&block)
            .is_some_and(|(_, until)| *until >= since)
    }
}

/// A simulated world. See the module.
pub struct World<'a> {
    pub(crate) maker: &'a dyn Maker,
    pub(crate) profile: Profile,
    pub(crate) rng: Prng,
    pub(crate) clock: Clock,
    pub(crate) model: Model,
    pub(crate) shape: Shape,
    pub(crate) flash: Flashes,
    /// Which of several flash devices answers slowly.
    slow_flash: Option<u16>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) known: Vec<Known>,
    pub(crate) subject: Option<Box<dyn Subject>>,
    /// When an injected failure of flash last happened, in the model's time.
    pub(crate) flash_failed: u64,
    /// When a flash read last failed whose block cannot be told, in the model's time.
    stung_unknown: u64,
    /// How often flash refused a block whose content does not tell whose it is, when it was asked for nothing
    /// else, by its place.
    stung_zeros: BTreeMap<usize, u32>,
    /// Flash was erased under the pool.
    pub(crate) erased: bool,
    /// The subject stopped using flash.
    pub(crate) given_up: bool,
    /// It stands beside flash that flash was given up.
    pub(crate) marker: bool,
    /// A stop is under way: requests are refused.
    pub(crate) stopping: bool,
    /// This life is to end at once.
    pub(crate) cut_short: bool,
    /// The registry has it that a disk lives on flash, and the engine has not heard of it: nothing but a crash comes then.
    pub(crate) unheard: bool,
    /// Places of flash that take no writes, in bytes.
    pub(crate) bad_places: Vec<std::ops::Range<u64>>,
    /// What happened.
    pub paths: Taken,
    /// Whatever was lost has been accepted: no request may fail any more.
    pub(crate) all_accepted: bool,
    pub(crate) next_uid: u8,
    events: BTreeMap<(u64, u64), Ending>,
    hung: Vec<Ending>,
    event_number: u64,
    requests: BTreeMap<u64, InFlight>,
    next_tag: u64,
    pub(crate) effects: Effects,
    next_tick: Option<u64>,
    idle_ticks: u32,
    /// Steps since the subject's counts were checked.
    uncounted: u32,
    /// Something was in flight since then.
    stirred: bool,
    /// Requests completed and I/O done, for the report.
    pub(crate) done_requests: u64,
    pub(crate) done_ios: u64,
    tracing: bool,
    echo: bool,
    trace: std::collections::VecDeque<String>,
    depth: u64,
    /// How large disks are, if that is not drawn.
    disk_blocks: Option<u64>,
    /// How large disks may be that live on flash.
    kept_blocks: u64,
    /// The device that was emptied when the pool was closed.
    pub(crate) emptied: Option<u16>,
    /// What is set aside, and written by somebody else.
    pub(crate) area: Aside,
    /// How far a device of a pool that keeps everything twice is replaced.
    pub(crate) replacing: Replacing,
    /// The last run did not end in order.
    pub(crate) unclean: bool,
    /// The disks and the contents of flash at an earlier time, when origins had everything.
    pub(crate) earlier: Option<(Vec<Known>, Vec<Image>)>,
    /// I/Os so far, and the one that fails while nothing else does.
    pub(crate) book: Book,
    /// Those before the reckoning.
    pub(crate) alive_ios: u64,
}

macro_rules! trace {
    ($world:expr, $($arg:tt)*) => {
        if $world.tracing() {
            let line = format!($($arg)*);
            $world.record(line);
        }
    };
}
pub(crate) use trace;

/// Which of several flash devices answers slowly, if any does. A choice of its own, so that the rest of a seed is as it was.
fn slow_flash(seed: u64, others: u64) -> Option<u16> {
    let mut rng = Prng::new(seed ^ 0x510F);
    (others > 0 && rng.below(3) == 0).then(|| rng.below(others + 1) as u16)
}

impl<'a> World<'a> {
    /// How large a disk may be that moves onto flash.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_blocks * 4096
    }

    /// A world of a seed: devices and disks exist, nothing is formatted yet.
    pub fn new(
        seed: u64,
        profile: &str,
        maker: &'a dyn Maker,
        tracing: bool,
        echo: bool,
    ) -> Result<World<'a>, String> {
        let mut rng = Prng::new(seed);
        let profile = Profile::named(profile, &mut rng)
            .ok_or_else(|| format!("there is no profile {profile:?}"))?;
        World::drawn(seed, rng, profile, maker, tracing, echo)
    }

    /// A world of a seed, in a profile that has no name.
    pub(crate) fn of(
        seed: u64,
        profile: Profile,
        maker: &'a dyn Maker,
        tracing: bool,
        echo: bool,
    ) -> Result<World<'a>, String> {
        World::drawn(seed, Prng::new(seed), profile, maker, tracing, echo)
    }

    fn drawn(
        seed: u64,
        mut rng: Prng,
        profile: Profile,
        maker: &'a dyn Maker,
        tracing: bool,
        echo: bool,
    ) -> Result<World<'a>, String> {
        let mut segments = *rng.pick(&[8, 8, 8, 9, 10, 12, 16, 24]);
        if profile.flash_flush_ns > 0 {
            segments = 8;
        }
        if profile.worn {
            segments = *rng.pick(&[64, 80, 100, 128]);
        }
        if profile.homes != [1, 0, 0] {
            segments = *rng.pick(&KEPT_SEGMENTS);
        }
        if profile.areas {
            segments = segments.max(*rng.pick(&[12, 16, 24, 32]));
        }
        let shape = Shape {
            segment_blocks: SEGMENT_BLOCKS,
            seed: rng.next_u64(),
        };
        let flash_bytes = FIXED_BYTES + segments * u64::from(SEGMENT_BLOCKS) * BLOCK as u64;
        let mut flash = SimDevice::new(
            Target::Flash(0),
            flash_bytes,
            BLOCK as u64,
            Base::Zeros,
            Tear::Anywhere,
            rng.fork(),
        );
        flash.flush_ns = match profile.flash_flush_ns {
            0 => *rng.pick(&FLUSH_NS),
            slow => slow,
        };
        let others = match profile.devices {
            (1, 1) => 0,
            (least, most) => rng.between(least, most) - 1,
        };
        let mut flashes = vec![flash];
        for n in 1..=others {
            let segments = *rng.pick(&[8, 8, 9, 12, 20]);
            let fixed = match profile.twice {
                true => FIXED_BYTES,
                false => OTHER_FIXED_BYTES,
            };
            let bytes = fixed + segments * u64::from(SEGMENT_BLOCKS) * BLOCK as u64;
            let mut device = SimDevice::new(
                Target::Flash(n as u16),
                bytes,
                BLOCK as u64,
                Base::Zeros,
                Tear::Anywhere,
                rng.fork(),
            );
            device.flush_ns = *rng.pick(&FLUSH_NS);
            flashes.push(device);
        }
        if profile.replace > 0 && rng.chance(1, 2) {
            // It takes long until it is noted that a device is lost.
            flashes.iter_mut().for_each(|d| d.flush_ns = SLOW_NOTE_NS);
        }
        let flash_rng = match others {
            0 => Prng::new(seed),
            _ => rng.fork(),
        };
        let depth = match profile.worn {
            true => *rng.pick(&[4, 24, DEPTH_MAX]),
            false => *rng.pick(&[1, 2, 4, 8, DEPTH_MAX]),
        };
        let disks = match profile.worn {
            true => rng.between(1, 2),
            false => rng.between(1, DISKS_MAX),
        };
        // Together from less than flash to more than that.
        let disk_blocks = match profile.worn {
            true => Some(segments * 251 * rng.between(60, 180) / 100 / disks),
            false => None,
        };
        let flash = Flashes::new(flashes, profile.twice, flash_rng);
        let mut world = World {
            maker,
            profile,
            clock: Clock::new(seed),
            model: Model::new(),
            shape,
            flash,
            slow_flash: slow_flash(seed, others),
            disks: Vec::new(),
            known: Vec::new(),
            subject: None,
            flash_failed: 0,
            stung_unknown: 0,
            stung_zeros: BTreeMap::new(),
            erased: false,
            given_up: false,
            marker: false,
            stopping: false,
            cut_short: false,
            unheard: false,
            bad_places: Vec::new(),
            paths: Taken::default(),
            all_accepted: false,
            next_uid: 1,
            events: BTreeMap::new(),
            hung: Vec::new(),
            event_number: 0,
            requests: BTreeMap::new(),
            next_tag: 1,
            effects: Effects::default(),
            next_tick: None,
            idle_ticks: 0,
            uncounted: 0,
            stirred: false,
            done_requests: 0,
            done_ios: 0,
            tracing,
            echo,
            trace: std::collections::VecDeque::new(),
            depth,
            disk_blocks,
            // The rest is what segments kept free and the head take, and descriptors.
            kept_blocks: (segments - 6) * 240 * KEPT_PERCENT_MAX / 100 / disks,
            unclean: false,
            earlier: None,
            book: Book::default(),
            alive_ios: 0,
            emptied: None,
            area: Aside::default(),
            replacing: Replacing::default(),
            rng,
        };
        for id in 1..=disks {
            let disk = world.draw(id as u16);
            world.known.push(Known {
                id: id as u16,
                size: disk.config.size,
                since_seq: 0,
                home: disk.config.home,
                ordered: disk.config.mode == Mode::WriteBackOrdered,
            });
            world.disks.push(disk);
        }
        for _ in 0..world.rng.below(world.profile.bad_places + 1) {
            let bytes = u64::from(SEGMENT_BLOCKS) * BLOCK as u64;
            let end = flash_bytes / BLOCK as u64 * BLOCK as u64;
            let at = end - (world.rng.below(segments) + 1) * bytes;
            world.bad_places.push(at..at + bytes);
            world.paths.note(Event::BadPlaces);
        }
        trace!(
            world,
            "profile {}, flash of {segments} segments, depth {depth}", world.profile.name
        );
        Ok(world)
    }

    /// A new disk with a new origin.
    pub(crate) fn draw(&mut self, id: u16) -> Disk {
        let mut config = draw_disk(
            &mut self.rng,
            &self.profile,
            id,
            DISK_BLOCKS_MAX,
            self.kept_blocks,
        );
        if self.profile.legs != (1, 1) {
            // All of it is copied again and again.
            config.size = config.size.min(MIRROR_BLOCKS_MAX * BLOCK as u64);
        }
        if let Some(blocks) = self.disk_blocks {
            config.size = blocks * BLOCK as u64;
            config.max_bytes = 0;
        }
        self.maker.tune(&mut config);
        let uid = self.next_uid;
        self.next_uid += 1;
        let mut holes = (self.rng.next_u64() & self.rng.next_u64()) as u8;
        if self.profile.replace > 0 && self.rng.chance(1, 2) {
            // What is read of it is all alike: a clean block that lies in a place of another one looks as it should.
            holes = u8::MAX;
        }
        let base = match config.home {
            Home::Origin => Base::Stamped {
                uid,
                holes,
                // What an origin grows by is not zeros, or nobody would see padding that is served for it.
                size: ORIGIN_GROWS_TO,
            },
            _ => Base::Zeros,
        };
        let tear = if self.profile.sector_origins && config.home == Home::Origin {
            Tear::Sector
        } else {
            Tear::Block
        };
        let align = u64::from(config.origin_align);
        let legs = match (config.home, self.profile.legs) {
            (Home::Origin, (least, most)) if most > 1 => self.rng.between(least, most),
            _ => 1,
        };
        let rng = self.rng.fork();
        let target = Target::Origin(id);
        let origin = if legs > 1 {
            let shape = mirrored::Shape {
                target,
                size: config.size,
                align,
                base,
                tear,
                legs,
                fresh: self.rng.chance(1, 3) && !self.profile.legs_alike,
                harsh: self.profile.leg_trouble > 0,
                fault: self.maker.leg_fault(),
            };
            let mut mirror = Mirrored::new(shape, rng);
            mirror.tracing = self.tracing;
            Origin::Mirror(Box::new(mirror))
        } else {
            let mut device = SimDevice::new(target, config.size, align, base, tear, rng);
            device.flush_ns = *self.rng.pick(&FLUSH_NS);
            Origin::One(Box::new(device))
        };
        self.model
            .add_disk(uid, base, config.size, tear == Tear::Block);
        trace!(self, "disk {id} is #{uid}: {config:?}");
        Disk {
            dirty_once: config.mode.is_write_back(),
            config,
            uid,
            origin,
            habits: Habits::draw(&mut self.rng, &self.profile),
            hurt: BTreeSet::new(),
            accepted: BTreeMap::new(),
            stung: BTreeMap::new(),
            stung_alone: BTreeMap::new(),
            origin_failed: 0,
            resting: false,
            held: None,
            left_origin: false,
            kept: false,
            late: None,
            distrusted: false,
            unverified: false,
            dropping: false,
            compared_by: None,
            maybe_dirty: false,
            whole_before: false,
            owed: BTreeSet::new(),
            promises: Vec::new(),
            told: None,
        }
    }

    pub(crate) fn tracing(&self) -> bool {
        self.tracing
    }

    pub(crate) fn record(&mut self, line: String) {
        let line = format!(
            "{:>12.3} ms t{:<5} {line}",
            self.clock.now() as f64 / 1e6,
            self.model.now()
        );
        if self.echo {
            println!("{line}");
        }
        if self.trace.len() == TRACE_MAX {
            self.trace.pop_front();
        }
        self.trace.push_back(line);
    }

    /// The last events, oldest first.
    pub fn trace_tail(&self) -> Vec<String> {
        self.trace.iter().cloned().collect()
    }

    /// Digest of everything that happened.
    pub fn digest(&self) -> u64 {
        self.clock.digest()
    }

    /// What the origins do not have, or may lose again in a power cut, should nothing on flash count from
    /// now on.
    pub(crate) fn note_owed(&mut self) {
        if let Some(subject) = self.subject.as_ref().filter(|_| self.given_up) {
            for disk in &mut self.disks {
                disk.owed = subject.owed(disk.config.id).into_iter().collect();
                disk.owed.extend(disk.origin.volatile_blocks());
            }
        }
    }

    /// What flash once refused says nothing of another one.
    pub(crate) fn forget_stings(&mut self) {
        (self.flash_failed, self.stung_unknown) = (0, 0);
        self.stung_zeros.clear();
    }

    /// Everything in flight is given up: the process died.
    pub(crate) fn forget_in_flight(&mut self) {
        self.note_owed();
        self.stopping = false;
        self.requests.clear();
        self.events.clear();
        self.hung.clear();
        self.effects = Effects::default();
        self.next_tick = None;
        self.idle_ticks = 0;
        self.subject = None;
    }

    pub(crate) fn subject(&self) -> Result<&dyn Subject, String> {
        self.subject
            .as_deref()
            .ok_or_else(|| "no subject is open".to_string())
    }
}
