//! One world: a subject, its devices, its guests and the oracle, under one virtual clock.
//!
//! This file moves the world by single steps: a request, the end of some I/O, a tick. What
//! happens over a world's lifetime (crashes, stops, the final reckoning) is in [`crate::life`].

use crate::content::{BLOCK, SECTOR, Value, fill, recognise, stamp, unstamp};
use crate::device::{Base, SimDevice, Tear};
use crate::model::{Model, WriteId};
use crate::paths::{Event, Taken};
use crate::prng::{Clock, Prng};
use crate::profile::Profile;
use crate::subject::{Known, Maker, Shape, Subject};
use crate::workload::{Habits, Wish, draw_disk};
use hearth_engine::api::{Completion, DiskConfig, Effects, Mode, ReqError, ReqOp, Request};
use hearth_io::{Buf, IoDone, IoOp, OpKind, Target};
use std::collections::{BTreeMap, BTreeSet};

/// A reason for a world to stop, in words.
pub type Outcome = Result<(), String>;

/// Most disks of a world.
const DISKS_MAX: u64 = 3;
/// Most blocks of a disk: small, so that the flash is full soon.
const DISK_BLOCKS_MAX: u64 = 1200;
/// Most requests in flight.
const DEPTH_MAX: u64 = 32;
/// Blocks of a segment: the least the format allows, so that segments are many.
const SEGMENT_BLOCKS: u32 = 256;
/// Bytes of flash besides the segments: superblocks, registry, checkpoint.
const FIXED_BYTES: u64 = 6 << 20;
/// Calls of `tick` in a row that name a deadline already past: more is a busy loop.
const TICKS_WITHOUT_TIME: u32 = 2000;
/// Times a sound device must have refused a block alone before the engine may call it lost.
const SOUND_REFUSALS: u32 = 4;
/// What flushes take besides what any operation does, where the profile does not say: as an SSD with a
/// safe cache, one without, and one that is busy with itself; and hard disks.
const FLUSH_NS: [u64; 5] = [0, 0, 2_000_000, 2_000_000, 40_000_000];
/// Up to here an origin's first content is stamped, also where it has not grown to yet.
const ORIGIN_GROWS_TO: u64 = 1 << 40;
/// While things are in flight, what the subject counts is counted again once in so many steps: each time
/// every slot of its index is looked at.
const STEPS_PER_COUNT: u32 = 64;
/// Lines of the trace that are kept.
const TRACE_MAX: usize = 60;

/// A disk of the world.
pub(crate) struct Disk {
    pub config: DiskConfig,
    /// Names the disk in stamps; unlike the id never used again.
    pub uid: u8,
    pub origin: SimDevice,
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
    /// It is not attached: after so many steps it will be.
    pub late: Option<u64>,
    /// Whether what flash holds of it is older than its origin must be asked before it is attached.
    pub distrusted: bool,
    /// What its origin did not have when flash that was given up was used last.
    pub owed: BTreeSet<u64>,
}

impl Disk {
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

enum Pending {
    Read {
        mark: u64,
    },
    Write {
        id: WriteId,
    },
    /// Whole blocks become zeros; of the edges it is not said.
    Discard {
        id: Option<WriteId>,
        edges: [Option<WriteId>; 2],
    },
    Flush {
        mark: u64,
    },
    Prefetch,
    /// It must be refused.
    Refused(ReqError),
}

struct InFlight {
    disk: usize,
    wish: Wish,
    kind: Pending,
    since: u64,
    /// Index of the disk's incarnation, so that a late completion is not credited to another.
    buf: Option<Buf>,
}

/// A simulated world. See the module.
pub struct World<'a> {
    pub(crate) maker: &'a dyn Maker,
    pub(crate) profile: Profile,
    pub(crate) rng: Prng,
    pub(crate) clock: Clock,
    pub(crate) model: Model,
    pub(crate) shape: Shape,
    pub(crate) flash: SimDevice,
    pub(crate) disks: Vec<Disk>,
    pub(crate) known: Vec<Known>,
    pub(crate) subject: Option<Box<dyn Subject>>,
    /// When an injected failure of flash last happened, in the model's time.
    pub(crate) flash_failed: u64,
    /// When a flash read last failed whose block cannot be told, in the model's time.
    stung_unknown: u64,
    /// The subject stopped using flash.
    pub(crate) given_up: bool,
    /// It stands beside flash that flash was given up.
    pub(crate) marker: bool,
    /// A stop is under way: requests are refused.
    pub(crate) stopping: bool,
    /// This life is to end at once.
    pub(crate) cut_short: bool,
    /// Places of flash that take no writes, in bytes.
    pub(crate) bad_places: Vec<std::ops::Range<u64>>,
    /// What happened.
    pub paths: Taken,
    /// Whatever was lost has been accepted: no request may fail any more.
    pub(crate) all_accepted: bool,
    pub(crate) next_uid: u8,
    events: BTreeMap<(u64, u64), (Target, u64)>,
    hung: Vec<(Target, u64)>,
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

impl<'a> World<'a> {
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
        let mut segments = *rng.pick(&[8, 8, 8, 9, 10, 12, 16, 24]);
        if profile.flash_flush_ns > 0 {
            segments = 8;
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
        let depth = *rng.pick(&[1, 2, 4, 8, DEPTH_MAX]);
        let mut world = World {
            maker,
            profile,
            clock: Clock::new(seed),
            model: Model::new(),
            shape,
            flash,
            disks: Vec::new(),
            known: Vec::new(),
            subject: None,
            flash_failed: 0,
            stung_unknown: 0,
            given_up: false,
            marker: false,
            stopping: false,
            cut_short: false,
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
            rng,
        };
        for id in 1..=world.rng.between(1, DISKS_MAX) {
            let disk = world.draw(id as u16);
            let size = disk.config.size;
            world.disks.push(disk);
            world.known.push(Known {
                id: id as u16,
                size,
                since_seq: 0,
            });
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
        let mut config = draw_disk(&mut self.rng, &self.profile, id, DISK_BLOCKS_MAX);
        self.maker.tune(&mut config);
        let uid = self.next_uid;
        self.next_uid += 1;
        let base = Base::Stamped {
            uid,
            holes: (self.rng.next_u64() & self.rng.next_u64()) as u8,
            // What an origin grows by is not zeros, or nobody would see padding that is served for it.
            size: ORIGIN_GROWS_TO,
        };
        let tear = if self.profile.sector_origins {
            Tear::Sector
        } else {
            Tear::Block
        };
        let align = u64::from(config.origin_align);
        let mut origin = SimDevice::new(
            Target::Origin(id),
            config.size,
            align,
            base,
            tear,
            self.rng.fork(),
        );
        origin.flush_ns = *self.rng.pick(&FLUSH_NS);
        self.model
            .add_disk(uid, base, config.size, tear == Tear::Block);
        trace!(self, "disk {id} is #{uid}: {config:?}");
        Disk {
            dirty_once: config.mode == Mode::WriteBack,
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
            late: None,
            distrusted: false,
            owed: BTreeSet::new(),
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

    /// Requests not answered yet.
    pub(crate) fn open_requests(&self) -> usize {
        self.requests.len()
    }

    /// Open requests of one disk.
    pub(crate) fn open_requests_of(&self, disk: usize) -> usize {
        self.requests.values().filter(|r| r.disk == disk).count()
    }

    pub(crate) fn wants_more(&self) -> bool {
        (self.requests.len() as u64) < self.depth
    }

    fn device(&mut self, target: Target) -> Option<&mut SimDevice> {
        match target {
            Target::Flash(0) => Some(&mut self.flash),
            Target::Flash(_) => None,
            Target::Origin(id) => self
                .disks
                .iter_mut()
                .find(|d| d.config.id == id)
                .map(|d| &mut d.origin),
        }
    }

    /// Makes a request of disk `disk`.
    pub(crate) fn submit(&mut self, disk: usize, wish: Wish) -> Outcome {
        let now = self.clock.now();
        let tag = self.next_tag;
        self.next_tag += 1;
        let (uid, id) = (self.disks[disk].uid, self.disks[disk].config.id);
        let (first, count) = (wish.offset / SECTOR, wish.len.div_ceil(SECTOR));
        let room = Request::buffer_len(wish.offset, wish.len) as usize;
        let at = (wish.offset % BLOCK as u64) as usize;
        if let Some(error) = self.refusal(disk, &wish) {
            let request = match wish.op {
                ReqOp::Read => {
                    Request::read(tag, id, wish.offset, wish.len, &Buf::zeroed(room), now)
                }
                ReqOp::Write { fua } => {
                    let buf = Buf::zeroed(room);
                    Request::write(tag, id, wish.offset, wish.len, fua, &buf, now)
                }
                op => Request::new(tag, id, op, wish.offset, wish.len, None, now),
            };
            return self.hand_over(disk, wish, request, Pending::Refused(error), None);
        }
        let (kind, request, buf) = match wish.op {
            ReqOp::Read => {
                let mark = self.model.begin_read();
                let buf = Buf::zeroed(room);
                // So that a read that fills nothing is not taken for zeros.
                buf.all().bytes_mut()[at..at + wish.len as usize].fill(0xAA);
                (
                    Pending::Read { mark },
                    Request::read(tag, id, wish.offset, wish.len, &buf, now),
                    Some(buf),
                )
            }
            ReqOp::Write { fua } => {
                let write = self.model.begin_write(uid, first, count, wish.zeros, fua);
                let buf = Buf::zeroed(room);
                let mut window = buf.all();
                let payload = &mut window.bytes_mut()[at..at + wish.len as usize];
                for (i, sector) in payload.chunks_mut(SECTOR as usize).enumerate() {
                    let value = Value::Stamp(stamp(uid, write, first + i as u64));
                    fill(if wish.zeros { Value::Zero } else { value }, sector);
                }
                let request = Request::write(tag, id, wish.offset, wish.len, fua, &buf, now);
                (Pending::Write { id: write }, request, Some(buf))
            }
            ReqOp::Discard { fua } => {
                let (middle, edges) = self.begin_discard(disk, wish, fua);
                (
                    Pending::Discard { id: middle, edges },
                    Request::new(tag, id, wish.op, wish.offset, wish.len, None, now),
                    None,
                )
            }
            ReqOp::WriteZeroes { fua, .. } => {
                let write = self.model.begin_write(uid, first, count, true, fua);
                (
                    Pending::Write { id: write },
                    Request::new(tag, id, wish.op, wish.offset, wish.len, None, now),
                    None,
                )
            }
            ReqOp::Flush => {
                let mark = self.model.begin_flush();
                (
                    Pending::Flush { mark },
                    Request::new(tag, id, wish.op, 0, 0, None, now),
                    None,
                )
            }
            ReqOp::Prefetch => (
                Pending::Prefetch,
                Request::new(tag, id, wish.op, wish.offset, wish.len, None, now),
                None,
            ),
        };
        self.hand_over(disk, wish, request, kind, buf)
    }

    /// Gives a request to the subject.
    fn hand_over(
        &mut self,
        disk: usize,
        wish: Wish,
        request: Request,
        kind: Pending,
        buf: Option<Buf>,
    ) -> Outcome {
        let (now, tag, uid) = (self.clock.now(), request.tag, self.disks[disk].uid);
        let name = match &kind {
            Pending::Write { id } => format!(" as write {id}"),
            Pending::Discard { id: Some(id), .. } => format!(" as write {id}"),
            Pending::Refused(error) => format!(" to be refused: {error}"),
            _ => String::new(),
        };
        trace!(
            self,
            "request {tag} #{uid} {:?} at block {}+{} ({} bytes at {}){name}",
            wish.op,
            wish.offset / BLOCK as u64,
            wish.len.div_ceil(BLOCK as u64),
            wish.len,
            wish.offset
        );
        self.clock
            .note(tag ^ wish.offset.rotate_left(13) ^ wish.len.rotate_left(40));
        let since = self.model.now();
        self.requests.insert(
            tag,
            InFlight {
                disk,
                wish,
                kind,
                since,
                buf,
            },
        );
        let mut list = vec![request];
        let Some(subject) = &self.subject else {
            return Err("no subject is open".into());
        };
        subject.submit(now, &mut list, &mut self.effects);
        if !list.is_empty() {
            return Err(format!(
                "the subject left {} submitted requests in the list",
                list.len()
            ));
        }
        self.handle_effects()
    }

    /// Why the subject must refuse a request, if it must.
    fn refusal(&mut self, disk: usize, wish: &Wish) -> Option<ReqError> {
        let d = &self.disks[disk];
        let (event, error) = if !d.attached() {
            (Event::RefusedNoDisk, ReqError::NoDisk)
        } else if self.stopping {
            (Event::RefusedStopping, ReqError::Shutdown)
        } else if wish.offset + wish.len > d.config.size {
            (Event::RefusedPastTheEnd, ReqError::Invalid)
        } else {
            return None;
        };
        self.paths.note(event);
        Some(error)
    }

    /// A discard zeroes the whole blocks of its range; partial ones at its edges it may leave.
    fn begin_discard(
        &mut self,
        disk: usize,
        wish: Wish,
        fua: bool,
    ) -> (Option<WriteId>, [Option<WriteId>; 2]) {
        let (uid, size) = (self.disks[disk].uid, self.disks[disk].config.size);
        let block = BLOCK as u64;
        let (start, end) = (wish.offset, wish.offset + wish.len);
        let last = if end == size {
            end
        } else {
            end / block * block
        };
        let first = start.next_multiple_of(block).min(end);
        let mut begin = |from: u64, to: u64, fua: bool| {
            (from < to).then(|| {
                let count = (to - from).div_ceil(SECTOR);
                self.model.begin_write(uid, from / SECTOR, count, true, fua)
            })
        };
        if first >= last {
            return (None, [begin(start, end, false), None]);
        }
        let edges = [begin(start, first, false), begin(last, end, false)];
        (begin(first, last, fua), edges)
    }

    pub(crate) fn handle_effects(&mut self) -> Outcome {
        self.note_flash()?;
        let ios = std::mem::take(&mut self.effects.ios);
        let completions = std::mem::take(&mut self.effects.completions);
        for op in ios {
            self.start_io(op)?;
        }
        for completion in completions {
            self.end_request(completion)?;
        }
        Ok(())
    }

    /// Has the subject given up flash, and had it a reason?
    fn note_flash(&mut self) -> Outcome {
        let now = self.clock.now();
        let Some(subject) = &self.subject else {
            return Ok(());
        };
        let gave_up = subject.gave_up_flash();
        if self.given_up && !self.marker && subject.failure_is_unnoted() {
            // As the daemon does before anything goes on.
            self.marker = true;
            self.paths.note(Event::NotedElsewhere);
            subject.failure_is_noted_elsewhere(now, &mut self.effects);
            trace!(self, "it is noted elsewhere that flash was given up");
        }
        if self.given_up || !gave_up {
            return Ok(());
        }
        trace!(self, "the subject gives up flash");
        self.given_up = true;
        if self.flash_failed == 0 {
            Err("flash was given up although it never failed".into())
        } else {
            Ok(())
        }
    }

    fn start_io(&mut self, op: IoOp) -> Outcome {
        let (target, now) = (op.target, self.clock.now());
        trace!(
            self,
            "   io {:?} {:?} {:?} at {}+{} ({:?})",
            op.id,
            target,
            op.kind,
            op.offset / BLOCK as u64,
            op.len / BLOCK as u64,
            op.class
        );
        self.clock
            .note(op.offset ^ op.len.rotate_left(32) ^ op.id.rotate_left(7));
        let Some(device) = self.device(target) else {
            return Err(format!("I/O to {target:?}, which does not exist"));
        };
        let (token, time) = device.submit(op);
        if let Some(violation) = device.violation.take() {
            return Err(format!("driver contract broken: {violation}"));
        }
        self.event_number += 1;
        match time {
            Some(time) => {
                self.events
                    .insert((now + time, self.event_number), (target, token));
            }
            None => {
                trace!(self, "   (it hangs)");
                self.hung.push((target, token));
            }
        }
        Ok(())
    }

    /// Hung operations go on.
    pub(crate) fn release_hung(&mut self) {
        for (target, token) in std::mem::take(&mut self.hung) {
            self.event_number += 1;
            self.events
                .insert((self.clock.now(), self.event_number), (target, token));
        }
    }

    pub(crate) fn hung(&self) -> usize {
        self.hung.len()
    }

    /// One step of time: the next ends of I/O, or a tick. `Ok(false)`: nothing can happen any more.
    pub(crate) fn pump(&mut self) -> Result<bool, String> {
        let more = self.step()?;
        self.uncounted += 1;
        let rests = self.events.is_empty() && self.hung.is_empty() && self.requests.is_empty();
        // Not again at rest as long as only time passes.
        if self.uncounted >= STEPS_PER_COUNT || rests && self.stirred {
            self.count_again()?;
        }
        Ok(more)
    }

    /// Whatever the subject keeps count of is as it says, and it has as many requests in flight as were made
    /// and not answered.
    pub(crate) fn count_again(&mut self) -> Outcome {
        (self.uncounted, self.stirred) = (0, false);
        let open = self.requests.len() as u64;
        let counted = self.subject()?.check(open);
        match counted.map_err(|e| format!("counted again: {e}"))? {
            same if same == open => Ok(()),
            other => Err(format!(
                "{open} requests are not answered, and the subject knows of {other}"
            )),
        }
    }

    fn step(&mut self) -> Result<bool, String> {
        let due = self.events.first_key_value().map(|((at, _), _)| *at);
        let tick_first = match (self.next_tick, due) {
            (Some(t), Some(d)) => t <= d || self.rng.chance(1, 8),
            (Some(_), None) => true,
            (None, Some(_)) => self.rng.chance(1, 8),
            (None, None) => {
                // The subject may not have been asked yet.
                return self
                    .tick()
                    .map(|()| !self.events.is_empty() || self.next_tick.is_some());
            }
        };
        if tick_first {
            let until = self.next_tick.unwrap_or(0).min(due.unwrap_or(u64::MAX));
            self.clock.advance_to(until);
            self.tick()?;
            return Ok(true);
        }
        let batch = if self.rng.chance(3, 4) {
            1
        } else {
            self.rng.between(2, 6)
        };
        let mut done: Vec<IoDone> = Vec::new();
        for _ in 0..batch {
            let Some(((at, _), (target, token))) = self.events.pop_first() else {
                break;
            };
            self.clock.advance_to(at);
            done.extend(self.end_io(target, token)?);
        }
        let now = self.clock.now();
        let Some(subject) = &self.subject else {
            return Err("no subject is open".into());
        };
        subject.io_done(now, &mut done, &mut self.effects);
        if !done.is_empty() {
            return Err(format!(
                "the subject left {} finished operations in the list",
                done.len()
            ));
        }
        self.handle_effects()?;
        if self.events.is_empty() || self.rng.chance(1, 3) {
            self.tick()?;
        }
        Ok(true)
    }

    pub(crate) fn tick(&mut self) -> Outcome {
        let now = self.clock.now();
        let Some(subject) = &self.subject else {
            return Err("no subject is open".into());
        };
        let before = self.effects.ios.len();
        self.next_tick = subject.tick(now, &mut self.effects);
        let stuck = self.next_tick.is_some_and(|t| t <= now) && before == self.effects.ios.len();
        self.idle_ticks = if stuck { self.idle_ticks + 1 } else { 0 };
        if self.idle_ticks > TICKS_WITHOUT_TIME {
            return Err(
                "tick keeps asking to be called at once and does nothing: a busy loop".into(),
            );
        }
        self.clock.note(self.next_tick.unwrap_or(7));
        self.handle_effects()
    }

    fn end_io(&mut self, target: Target, token: u64) -> Result<Option<IoDone>, String> {
        let latency = 50_000;
        let Some(device) = self.device(target) else {
            return Ok(None);
        };
        let Some(finished) = device.complete(token, latency) else {
            return Ok(None);
        };
        if let Some(violation) = device.violation.take() {
            return Err(format!("driver contract broken: {violation}"));
        }
        self.done_ios += 1;
        self.stirred = true;
        let done = finished.done;
        self.clock.note(done.op.id ^ done.bad_blocks.len() as u64);
        if finished.injected {
            self.excuse(&done);
        } else if let Err(e) = done.result {
            return Err(format!(
                "{target:?}: {:?} at {}+{} failed: {e}",
                done.op.kind, done.op.offset, done.op.len
            ));
        }
        trace!(
            self,
            "   done {} {target:?} {:?} at {}+{}: {:?}{}",
            done.op.id,
            done.op.kind,
            done.op.offset / BLOCK as u64,
            done.op.len / BLOCK as u64,
            done.result,
            if done.bad_blocks.is_empty() {
                String::new()
            } else {
                format!(" BAD BLOCKS {:?}", done.bad_blocks)
            }
        );
        Ok(Some(done))
    }

    /// An injected failure justifies failures of requests; notes which.
    fn excuse(&mut self, done: &IoDone) {
        let now = self.model.now();
        match done.op.target {
            Target::Origin(id) => {
                if let Some(disk) = self.disks.iter_mut().find(|d| d.config.id == id) {
                    disk.origin_failed = now;
                }
            }
            Target::Flash(_) => {
                self.flash_failed = now;
                if done.op.kind == OpKind::Read {
                    let first = (done.op.offset / BLOCK as u64) as usize;
                    let last = ((done.op.offset + done.op.len) / BLOCK as u64) as usize;
                    for index in first..last {
                        match self.owner_of(index) {
                            Some((disk, block)) => {
                                let disk = &mut self.disks[disk];
                                disk.stung.insert(block, now);
                                if last - first == 1 {
                                    let alone = disk.stung_alone.entry(block).or_default();
                                    *alone += 1;
                                    // A device that was given up is asked twice, a sound one longer.
                                    if *alone >= if self.given_up { 2 } else { SOUND_REFUSALS } {
                                        disk.hurt.insert(block);
                                    }
                                }
                            }
                            // Zeros, written as data: they could be anybody's.
                            None => self.stung_unknown = now,
                        }
                    }
                }
            }
        }
    }

    /// Whose content a block of flash holds, if it is a guest's: (index of disk, block).
    pub(crate) fn owner_of(&self, index: usize) -> Option<(usize, u64)> {
        if index >= self.flash.blocks() || !self.flash.touched(index) {
            return None;
        }
        let block = self.flash.visible_block(index);
        block
            .chunks(SECTOR as usize)
            .find_map(|s| match recognise(s) {
                Value::Stamp(s) => {
                    let (uid, _, sector) = unstamp(s);
                    let disk = self.disks.iter().position(|d| d.uid == uid)?;
                    Some((disk, sector / 8))
                }
                _ => None,
            })
    }

    fn end_request(&mut self, completion: Completion) -> Outcome {
        let tag = completion.tag;
        let Some(request) = self.requests.remove(&tag) else {
            return Err(format!("request {tag} completed twice, or was never made"));
        };
        self.done_requests += 1;
        trace!(self, "request {tag} ended: {:?}", completion.result);
        self.clock
            .note(tag.rotate_left(9) ^ u64::from(completion.result.is_ok()));
        let InFlight {
            disk,
            wish,
            kind,
            since,
            buf,
        } = request;
        let uid = self.disks[disk].uid;
        if let Pending::Refused(error) = kind {
            return match completion.result {
                Err(e) if e == error => Ok(()),
                other => Err(format!(
                    "request {tag} (#{uid} {wish:?}) should have been refused with \"{error}\" and ended with {other:?}"
                )),
            };
        }
        if let Err(e) = completion.result
            && let Err(why) = self.justify(disk, &wish, since, e)
        {
            return Err(format!(
                "request {tag} (#{uid} {wish:?}) failed with \"{e}\" and no fault justifies it: {why}"
            ));
        }
        let ok = completion.result.is_ok();
        match kind {
            Pending::Write { id } => {
                self.model.end_write(id, ok);
                if ok && matches!(wish.op, ReqOp::Write { fua: true }) {
                    self.promise_again(disk, &wish, since);
                }
            }
            Pending::Discard { id, edges } => {
                if let Some(id) = id {
                    self.model.end_write(id, ok);
                }
                // "May have happened" is what a failed write means to the model.
                edges
                    .into_iter()
                    .flatten()
                    .for_each(|edge| self.model.end_write(edge, false));
            }
            Pending::Flush { mark } if ok => self.model.end_flush(uid, mark),
            Pending::Read { mark } if ok && self.is_accepted(disk, &wish, since) => {
                self.model.drop_read(mark);
            }
            Pending::Read { mark } if ok => {
                let at = (wish.offset % BLOCK as u64) as usize;
                let Some(buf) = buf else {
                    return Err("a read without a buffer".into());
                };
                if completion.buf.is_none() {
                    return Err(format!(
                        "request {tag} (a read) came back without its buffer"
                    ));
                }
                let window = buf.slice(at, wish.len as usize);
                let verdict = self
                    .model
                    .end_read(uid, mark, wish.offset / SECTOR, window.bytes());
                return verdict.map_err(|e| format!("request {tag} (read of #{uid}): {e}"));
            }
            Pending::Read { mark } => self.model.drop_read(mark),
            Pending::Flush { .. } | Pending::Prefetch | Pending::Refused(_) => {}
        }
        Ok(())
    }

    /// Does the range hold a block that was accepted as lost, or was so after `since`?
    fn is_accepted(&self, disk: usize, wish: &Wish, since: u64) -> bool {
        let mut blocks =
            wish.offset / BLOCK as u64..(wish.offset + wish.len).div_ceil(BLOCK as u64);
        let disk = &self.disks[disk];
        !disk.accepted.is_empty() && blocks.any(|block| disk.is_accepted(block, since))
    }

    /// Whole blocks that were written durably hold what was written, whatever was accepted before the
    /// write began.
    fn promise_again(&mut self, disk: usize, wish: &Wish, since: u64) {
        let now = self.model.now();
        let blocks = wish.offset.div_ceil(BLOCK as u64)..(wish.offset + wish.len) / BLOCK as u64;
        if self.disks[disk].accepted.is_empty() || blocks.is_empty() {
            return;
        }
        for (_, (from, until)) in self.disks[disk].accepted.range_mut(blocks) {
            if *from < since && *until == u64::MAX {
                *until = now;
                self.paths.note(Event::WrittenAfterLoss);
            }
        }
    }

    /// Does any injected fault explain that this request failed?
    fn justify(&self, disk: usize, wish: &Wish, since: u64, error: ReqError) -> Outcome {
        if wish.op == ReqOp::Prefetch {
            return Ok(());
        }
        if !matches!(error, ReqError::Io | ReqError::NoSpace) {
            return Err("the request was well formed and the disk attached".into());
        }
        if self.all_accepted {
            return Err("whatever was lost has been accepted".into());
        }
        let disk = &self.disks[disk];
        if disk.origin_failed >= since {
            return Ok(());
        }
        if !disk.dirty_once {
            return Err("its origin did not fail, and it never had anything dirty on flash".into());
        }
        let (first, last) = (
            wish.offset / BLOCK as u64,
            (wish.offset + wish.len).div_ceil(BLOCK as u64),
        );
        let hurt = disk.hurt.range(first..last).next().is_some()
            || self.stung_unknown >= since
            || disk.stung.range(first..last).any(|(_, at)| *at >= since);
        let whole = wish.offset % BLOCK as u64 == 0 && (wish.offset + wish.len) % BLOCK as u64 == 0;
        match wish.op {
            ReqOp::Read if hurt => Ok(()),
            ReqOp::Read => Err("no flash block holding its data was hurt".into()),
            ReqOp::Flush
                if !disk.hurt.is_empty() || self.given_up || self.flash_failed >= since =>
            {
                Ok(())
            }
            _ if self.flash_failed >= since || (hurt && !whole) => Ok(()),
            _ => Err("flash did not fail meanwhile".into()),
        }
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
