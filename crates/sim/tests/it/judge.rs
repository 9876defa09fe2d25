//! An engine of which a test decides, for every operation, whether and how it ends.
// Each file of tests uses a part of it.
#![allow(dead_code)]

use hearth_engine::api::{Completion, DiskConfig, Effects, OriginState, ReqError, ReqOp, Request};
use hearth_engine::faults::Faults;
use hearth_engine::{Engine, EngineOptions, KnownDisk, OpenReport};
use hearth_io::{BLOCK, Buf, Class, IoError, IoOp, Joined, OpKind, Target};
use hearth_policy::cleaning::Heads;
use hearth_sim::device::{Base, SimDevice, Tear};
use hearth_sim::prng::Prng;
use hearth_sim::real::Real;
use hearth_sim::subject::{Maker, Shape};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

const FLASH_SIZE: u64 = 16 << 20;
const SEGMENT_BLOCKS: u32 = 256;
/// Bytes of a segment; they begin at multiples of that.
pub const SEGMENT_BYTES: u64 = SEGMENT_BLOCKS as u64 * BLOCK;
/// Blocks of a disk.
pub const BLOCKS: u64 = 8192;
/// Events until a request is answered; it takes far fewer.
const STEPS_MAX: usize = 200_000;
/// Requests until eviction does what a test waits for.
const WRITES_MAX: usize = 2000;

/// What becomes of an operation.
#[derive(Clone, Copy, PartialEq)]
pub enum Fate {
    /// It is done, and said to be.
    Done,
    /// Done when the test lets it go.
    Held,
    /// Not done, and said to have failed.
    Refused,
    /// Done, and said to have failed.
    Denied,
    /// Not done, and nothing is heard of it again.
    Never,
    /// Not done, and said to be: a power cut took it that nobody flushed.
    Volatile,
}

enum Todo {
    Device(Target, u64, Fate),
    Told(IoOp, Result<(), IoError>),
}

pub struct Judged {
    pub engine: Engine,
    pub flash: SimDevice,
    /// The device with the other halves, if everything is there twice.
    pub second: Option<SimDevice>,
    pub origins: BTreeMap<u16, SimDevice>,
    pub disks: Vec<DiskConfig>,
    now: u64,
    /// Time an operation takes.
    pub step_ns: u64,
    tag: u64,
    pub fx: Effects,
    queue: VecDeque<Todo>,
    held: Vec<Todo>,
    answers: BTreeMap<u64, Completion>,
    judge: Box<dyn FnMut(&IoOp) -> Fate>,
    /// What an operation is said to have taken.
    pub latency: fn(Target) -> u64,
    faults: Faults,
}

thread_local! {
    /// How every engine made from now on is broken on purpose.
    static BROKEN: Cell<Faults> = const { Cell::new(Faults::none()) };
    /// What every engine made from now on appends together.
    static HEADS: Cell<Heads> = const { Cell::new(Heads::MovesApart) };
}

/// Every engine of this thread made from now on writes so many segments at once.
pub fn set_heads(heads: Heads) {
    HEADS.set(heads);
}

/// Which of these pairs of a fault and a test are such that the test does not fail with the fault?
#[cfg(feature = "mutations")]
pub fn unnoticed(pairs: &[(hearth_engine::faults::Fault, fn())]) -> Vec<String> {
    std::panic::set_hook(Box::new(|_| {}));
    let mut passed = Vec::new();
    for (fault, test) in pairs {
        BROKEN.set(Faults(Some(*fault)));
        if std::panic::catch_unwind(test).is_ok() {
            passed.push(format!("{fault:?}"));
        }
        BROKEN.set(Faults::none());
    }
    drop(std::panic::take_hook());
    passed
}

fn options() -> EngineOptions {
    EngineOptions {
        idle_ns: u64::MAX,
        intent_idle_ns: 0,
        prefetch: false,
        // Origins are hard disks, whatever the clock of a test says.
        fast_origin_ns: 0,
        heads: HEADS.get(),
        ..EngineOptions::default()
    }
}

/// A write-back disk of [`BLOCKS`] blocks.
pub fn disk(id: u16) -> DiskConfig {
    crate::common::disk(id, BLOCKS * BLOCK)
}

pub fn writes_flash(op: &IoOp) -> bool {
    op.target == Target::Flash(0) && op.kind == OpKind::Write
}

pub fn writes_origin(op: &IoOp) -> bool {
    matches!((op.target, op.kind), (Target::Origin(_), OpKind::Write))
}

pub fn flushes_origin(op: &IoOp) -> bool {
    matches!((op.target, op.kind), (Target::Origin(_), OpKind::Flush))
}

pub fn flushes_flash(op: &IoOp) -> bool {
    matches!((op.target, op.kind), (Target::Flash(_), OpKind::Flush))
}

pub fn reads_flash(op: &IoOp) -> bool {
    matches!((op.target, op.kind), (Target::Flash(_), OpKind::Read))
}

impl Judged {
    pub fn new(disks: Vec<DiskConfig>) -> Judged {
        Judged::seeded(disks, 7)
    }

    /// `seed` decides what of unflushed writes a power cut leaves.
    pub fn seeded(disks: Vec<DiskConfig>, seed: u64) -> Judged {
        Judged::torn(disks, seed, Tear::Block)
    }

    /// The same, and how a power cut tears what is being written to flash.
    pub fn torn(disks: Vec<DiskConfig>, seed: u64, tear: Tear) -> Judged {
        Judged::faulty(disks, seed, tear, BROKEN.get())
    }

    /// The same, of an engine that is broken on purpose.
    pub fn faulty(disks: Vec<DiskConfig>, seed: u64, tear: Tear, faults: Faults) -> Judged {
        Judged::made(disks, seed, tear, faults, FLASH_SIZE)
    }

    /// With so many bytes of flash.
    pub fn roomy(disks: Vec<DiskConfig>, flash_bytes: u64) -> Judged {
        Judged::made(disks, 1, Tear::Block, BROKEN.get(), flash_bytes)
    }

    /// On two devices, which keep everything twice, or clean blocks `once`.
    pub fn twice(disks: Vec<DiskConfig>, once: bool) -> Judged {
        let faults = BROKEN.get();
        let device = |n| {
            let (target, rng) = (Target::Flash(n), Prng::new(u64::from(n) + 7));
            SimDevice::new(target, FLASH_SIZE, BLOCK, Base::Zeros, Tear::Block, rng)
        };
        let (mut flash, mut second) = (device(0), device(1));
        let shape = Shape {
            // It is what decides that.
            seed: if once { 11 } else { 0 },
            segment_blocks: SEGMENT_BLOCKS,
        };
        let mut media = [flash.media(None), second.media(None)];
        let formatted = Real::default().format_several(&mut media, shape, true);
        formatted.expect("formatted");
        let joined = Real::default().join(&mut media).expect("one pool");
        assert_eq!(joined.is_once(), once);
        Judged::on(flash, Some(second), disks, 7, faults)
    }

    fn made(
        disks: Vec<DiskConfig>,
        seed: u64,
        tear: Tear,
        faults: Faults,
        flash_bytes: u64,
    ) -> Judged {
        let (target, rng) = (Target::Flash(0), Prng::new(seed));
        let mut flash = SimDevice::new(target, flash_bytes, BLOCK, Base::Zeros, tear, rng);
        crate::common::format(&mut flash.media(None), flash_bytes, SEGMENT_BLOCKS);
        Judged::on(flash, None, disks, seed, faults)
    }

    fn on(
        mut flash: SimDevice,
        mut second: Option<SimDevice>,
        disks: Vec<DiskConfig>,
        seed: u64,
        faults: Faults,
    ) -> Judged {
        let origins = disks.iter().map(|d| {
            // Room to grow, with something in it.
            let size = d.size.next_multiple_of(BLOCK) + BLOCK;
            let base = Base::Stamped {
                uid: d.id as u8,
                holes: 0,
                size,
            };
            let target = Target::Origin(d.id);
            let rng = Prng::new(seed + 1);
            (
                d.id,
                SimDevice::new(target, size, 512, base, Tear::Block, rng),
            )
        });
        let origins = origins.collect();
        let (engine, _) = open(&mut flash, &mut second, &disks, faults);
        Judged {
            engine,
            flash,
            second,
            origins,
            disks,
            now: 1,
            step_ns: 100_000,
            tag: 0,
            fx: Effects::default(),
            queue: VecDeque::new(),
            held: Vec::new(),
            answers: BTreeMap::new(),
            judge: Box::new(|_| Fate::Done),
            latency: |_| 50_000,
            faults,
        }
    }

    /// The process is killed and starts again.
    pub fn crash(&mut self) -> OpenReport {
        self.forget();
        self.flash.process_death();
        self.second.iter_mut().for_each(SimDevice::process_death);
        self.origins.values_mut().for_each(SimDevice::process_death);
        self.reopen()
    }

    pub fn power_cut(&mut self) -> OpenReport {
        self.forget();
        self.flash.power_cut();
        self.second.iter_mut().for_each(SimDevice::power_cut);
        self.origins.values_mut().for_each(SimDevice::power_cut);
        self.reopen()
    }

    /// The process is killed. Its next start is cut off after so many writes and flushes by a power cut, and
    /// then there is another.
    pub fn start_cut_off(&mut self, cut: u64) -> OpenReport {
        self.forget();
        self.flash.process_death();
        let known: Vec<_> = self.disks.iter().map(known).collect();
        let options = EngineOptions {
            faults: self.faults,
            ..options()
        };
        let _ = Engine::open(&mut self.flash.media(Some(cut)), options, &known);
        self.power_cut()
    }

    /// As [`stop_at_once`](Self::stop_at_once), but what the engine writes then is cut off after so many writes
    /// and flushes by a power cut, and it starts again.
    pub fn stop_cut_off(&mut self, cut: u64) -> OpenReport {
        self.come_to_rest();
        let _ = self.engine.close(&mut self.flash.media(Some(cut)));
        self.power_cut()
    }

    fn forget(&mut self) {
        self.fx = Effects::default();
        self.queue.clear();
        self.held.clear();
        self.done();
    }

    fn reopen(&mut self) -> OpenReport {
        let (flash, second) = (&mut self.flash, &mut self.second);
        let (engine, report) = open(flash, second, &self.disks, self.faults);
        self.engine = engine;
        report
    }

    pub fn judge(&mut self, judge: impl FnMut(&IoOp) -> Fate + 'static) {
        self.judge = Box::new(judge);
    }

    /// From now on all is done.
    pub fn done(&mut self) {
        self.judge(|_| Fate::Done);
    }

    /// From now on one kind of operation has another fate than all the rest.
    pub fn only(&mut self, which: fn(&IoOp) -> bool, fate: Fate) {
        self.judge(move |op| if which(op) { fate } else { Fate::Done });
    }

    fn device(&mut self, target: Target) -> &mut SimDevice {
        match target {
            Target::Flash(1..) if self.second.is_some() => {
                self.second.as_mut().expect("it is there")
            }
            Target::Flash(_) => &mut self.flash,
            Target::Origin(id) => self.origins.get_mut(&id).expect("a known disk"),
        }
    }

    pub fn collect(&mut self) {
        for op in std::mem::take(&mut self.fx.ios) {
            let (target, fate) = (op.target, (self.judge)(&op));
            let todo = match fate {
                Fate::Never => continue,
                Fate::Refused => Todo::Told(op, Err(IoError::Os(28))),
                Fate::Volatile => Todo::Told(op, Ok(())),
                _ => Todo::Device(target, self.device(target).submit(op).0, fate),
            };
            match fate {
                Fate::Held => self.held.push(todo),
                _ => self.queue.push_back(todo),
            }
        }
        for c in self.fx.completions.drain(..) {
            self.answers.insert(c.tag, c);
        }
    }

    pub fn submit(&mut self, request: impl FnOnce(u64, u64) -> Request) -> u64 {
        self.tag += 1;
        let mut requests = vec![request(self.tag, self.now)];
        self.engine.submit(self.now, &mut requests, &mut self.fx);
        self.collect();
        self.tag
    }

    /// Ends one operation; false if there is none.
    pub fn step(&mut self) -> bool {
        self.now += self.step_ns;
        let Some(todo) = self.queue.pop_front() else {
            return false;
        };
        let done = match todo {
            Todo::Told(op, result) => {
                let ns = (self.latency)(op.target);
                op.done(result, ns)
            }
            Todo::Device(target, token, fate) => {
                let ns = (self.latency)(target);
                let finished = self.device(target).complete(token, ns);
                let mut done = finished.expect("in flight").done;
                if fate == Fate::Denied {
                    done.result = Err(IoError::Os(5));
                }
                done
            }
        };
        let mut dones = vec![done];
        self.engine.io_done(self.now, &mut dones, &mut self.fx);
        self.collect();
        true
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    pub fn tick(&mut self) {
        self.now += 5_000_000;
        self.engine.tick(self.now, &mut self.fx);
        self.collect();
    }

    pub fn answer(&self, tag: u64) -> Option<Result<(), ReqError>> {
        self.answers.get(&tag).map(|c| c.result)
    }

    /// Stops at the very moment of the answer.
    pub fn wait(&mut self, tag: u64) -> Result<(), ReqError> {
        for _ in 0..STEPS_MAX {
            if let Some(result) = self.answer(tag) {
                return result;
            }
            if !self.step() {
                self.tick();
            }
        }
        panic!("no answer: {}", self.engine.explain());
    }

    /// Lets what gathers be written, and all of it end.
    pub fn settle(&mut self) {
        while self.step() {}
        self.now += 200_000_000;
        self.tick();
        while self.step() {}
    }

    pub fn rest(&mut self) {
        for _ in 0..400 {
            self.settle();
        }
    }

    /// A stop, as far as the engine is asked, when all has come to rest.
    pub fn stop(&mut self) {
        self.engine.quiesce(true);
        self.rest();
        self.stop_at_once();
    }

    /// A stop as soon as the engine allows it.
    pub fn stop_at_once(&mut self) {
        self.come_to_rest();
        let mut media = self.flash.media(None);
        self.engine.close(&mut media).expect("closed");
    }

    fn come_to_rest(&mut self) {
        self.engine.quiesce(true);
        for _ in 0..STEPS_MAX {
            if self.engine.idle() {
                break;
            }
            if !self.step() {
                self.engine.tick(self.now, &mut self.fx);
                self.collect();
            }
        }
        assert!(self.engine.idle(), "{}", self.engine.explain());
    }

    pub fn send_write(&mut self, disk: u16, block: u64, count: u64, fill: u8, fua: bool) -> u64 {
        let (at, len) = (block * BLOCK, count * BLOCK);
        let buf = Buf::zeroed(len as usize);
        buf.all().bytes_mut().fill(fill);
        self.submit(|tag, now| Request::write(tag, disk, at, len, fua, &buf, now))
    }

    pub fn write(&mut self, disk: u16, block: u64, count: u64, fill: u8) -> Result<(), ReqError> {
        let tag = self.send_write(disk, block, count, fill, false);
        self.wait(tag)
    }

    /// Writes a block with FUA.
    pub fn write_fua(&mut self, disk: u16, block: u64, fill: u8) -> Result<(), ReqError> {
        let tag = self.send_write(disk, block, 1, fill, true);
        self.wait(tag)
    }

    pub fn flush(&mut self, disk: u16) -> Result<(), ReqError> {
        let tag = self.submit(|tag, now| Request::new(tag, disk, ReqOp::Flush, 0, 0, None, now));
        self.wait(tag)
    }

    /// Reads a block; its first byte.
    pub fn read(&mut self, disk: u16, block: u64) -> Result<u8, ReqError> {
        self.read_run(disk, block, 1).map(|bytes| bytes[0])
    }

    pub fn read_run(&mut self, disk: u16, block: u64, count: u64) -> Result<Vec<u8>, ReqError> {
        let (at, len) = (block * BLOCK, count * BLOCK);
        let buf = Buf::zeroed(len as usize);
        let tag = self.submit(|tag, now| Request::read(tag, disk, at, len, &buf, now));
        self.wait(tag)?;
        let all = buf.all();
        Ok(all.bytes().to_vec())
    }

    pub fn cached(&self, disk: u16) -> u64 {
        let stats = self.engine.stats(disk, 1).expect("known");
        stats.cached_blocks
    }

    pub fn lost(&self, disk: u16) -> Vec<(u64, u64)> {
        let status = self.engine.status(disk).expect("known");
        let blocks = |(at, len): &(u64, u64)| (at / BLOCK, len / BLOCK);
        status.lost_ranges.iter().map(blocks).collect()
    }

    /// The block of flash that holds nothing but `fill`.
    pub fn find(&self, fill: u8) -> usize {
        let is_it = |i: &usize| self.flash.visible_block(*i).iter().all(|x| *x == fill);
        (0..self.flash.blocks()).find(is_it).expect("it is there")
    }

    /// The block of flash with this content.
    pub fn place_of(&self, content: &[u8]) -> usize {
        let is_it = |i: &usize| self.flash.visible_block(*i)[..] == *content;
        (0..self.flash.blocks()).find(is_it).expect("it is there")
    }

    /// Fills flash with clean blocks of a disk, until eviction is near.
    pub fn fill(&mut self, disk: u16) {
        let mut at = 1024;
        while self.engine.pool_stats().free_segments > 4 {
            self.read_run(disk, at, 64).expect("read");
            self.settle();
            at += 64;
            assert!(at + 64 < BLOCKS, "{}", self.engine.explain());
        }
    }

    /// Writes to a disk until the test sees what it waits for, and stops at that moment.
    pub fn write_until(&mut self, disk: u16, seen: impl Fn(&Judged) -> bool) {
        self.write_over_until(disk, 1, seen);
    }

    /// The same, over more than flash holds: what lies there has to go, not only what was written over.
    pub fn write_round_until(&mut self, disk: u16, seen: impl Fn(&Judged) -> bool) {
        self.write_over_until(disk, 64, seen);
    }

    fn write_over_until(&mut self, disk: u16, runs: u64, seen: impl Fn(&Judged) -> bool) {
        for run in (0..runs).cycle().take(WRITES_MAX) {
            let tag = self.send_write(disk, 512 + run * 64, 64, 9, false);
            while self.answer(tag).is_none() && !seen(self) {
                if !self.step() {
                    self.tick();
                }
            }
            if seen(self) {
                return;
            }
        }
        panic!("not seen: {}", self.engine.explain());
    }

    /// Block 3 of disk 1 is dirty and rotten in the oldest segment, and eviction's read of it is held.
    pub fn hold_move_of_rotten(&mut self) {
        self.write_fua(1, 3, 33).expect("written");
        self.settle();
        self.fill(1);
        let at = self.find(33);
        self.flash.rot(at);
        let place = at as u64 * BLOCK;
        self.judge(move |op| {
            let moves = op.target == Target::Flash(0)
                && op.kind == OpKind::Read
                && op.class == Class::Background
                && (op.offset..op.offset + op.len).contains(&place);
            if moves { Fate::Held } else { Fate::Done }
        });
        self.write_until(1, |j| !j.held.is_empty());
        assert_eq!(self.held.len(), 1);
    }

    /// Closes the head, as is done when a disk is forgotten: `disk`, of which there is nothing.
    pub fn roll(&mut self, disk: u16) {
        let mut fx = std::mem::take(&mut self.fx);
        self.engine
            .forget(disk, &mut fx)
            .expect("nothing of it is under way");
        self.fx = fx;
        self.collect();
    }

    pub fn holds(&self) -> usize {
        self.held.len()
    }

    /// Lets go what was held, before all else.
    pub fn release(&mut self) {
        self.release_only(|_| true);
    }

    /// The same, of certain devices.
    pub fn release_only(&mut self, which: impl Fn(Target) -> bool) {
        for todo in std::mem::take(&mut self.held) {
            let (Todo::Device(target, ..) | Todo::Told(IoOp { target, .. }, _)) = &todo;
            match which(*target) {
                true => self.queue.push_front(todo),
                false => self.held.push(todo),
            }
        }
    }
}

fn known(d: &DiskConfig) -> KnownDisk {
    KnownDisk {
        id: d.id,
        size: d.size,
        since_seq: 0,
        home: d.home,
    }
}

fn open(
    flash: &mut SimDevice,
    second: &mut Option<SimDevice>,
    disks: &[DiskConfig],
    faults: Faults,
) -> (Engine, OpenReport) {
    let known: Vec<_> = disks.iter().map(known).collect();
    let options = EngineOptions {
        faults,
        ..options()
    };
    let opened = match second {
        None => Engine::open(&mut flash.media(None), options, &known),
        Some(second) => {
            let mut media = vec![flash.media(None), second.media(None)];
            let spread = Real::default().join(&mut media).expect("one pool");
            Engine::open(&mut Joined::new(spread, media), options, &known)
        }
    };
    let (engine, report) = opened.expect("opened");
    for d in disks {
        let config = d.clone();
        engine
            .attach(config, OriginState::Flushed)
            .expect("attached");
    }
    (engine, report)
}
