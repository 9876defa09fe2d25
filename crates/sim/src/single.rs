//! Each I/O of a fixed workload fails in turn, alone.
//!
//! Random trouble covers much and proves little of any one place: two failures hide each other, and the rare one never
//! comes. Here a world without trouble is run once, and then again for each of its I/Os, up to which it is the same; that
//! one fails, and nothing else does. So the oracle can be stricter than otherwise: of one failure of flash that is not its
//! death nobody may see anything, and one of an origin may fail only a request that needed just this.
//!
//! Where another device has the same, in a pool that keeps everything twice and in a mirror, it is stricter still: whatever
//! fails there, and also if its device is dead from then on, or is back later as it was, no request may fail and nothing
//! may be lost. What a mirror notes in files is no I/O here: its own run of single failures (`hearth_mirror`) tries that.

use crate::paths;
use crate::profile::{CALM, Profile};
use crate::subject::Maker;
use crate::world::{Outcome, World};
use hearth_engine::api::Mode;
use hearth_io::{IoOp, OpKind, Target};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Requests of a workload.
const REQUESTS: u64 = 50;
/// Findings that are kept.
const FINDINGS_MAX: usize = 20;

/// How an I/O fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It is answered with an error, and nothing of it was done.
    Error,
    /// The same, and half of it was done.
    Torn,
    /// It hangs for long, and then it is done.
    Late,
    /// It hangs for long, is given up, and half of it was done.
    TimedOut,
    /// The power goes while it is under way.
    Power,
    /// The process is killed while it is under way.
    Kill,
    /// Its device dies over it, half done. Only where another device has the same.
    Dies,
    /// The same, and then the power goes; at the next start the device answers again, with what it has.
    Returns,
}

impl How {
    /// All of them.
    pub const ALL: [How; 8] = [
        How::Error,
        How::Torn,
        How::Late,
        How::TimedOut,
        How::Power,
        How::Kill,
        How::Dies,
        How::Returns,
    ];

    /// It is answered with an error in the end.
    pub fn is_error(self) -> bool {
        matches!(self, How::Error | How::Torn | How::TimedOut) || self.takes_device()
    }

    /// Its device answers nothing any more.
    pub fn takes_device(self) -> bool {
        matches!(self, How::Dies | How::Returns)
    }

    /// The life ends with it.
    pub fn ends_life(self) -> bool {
        matches!(self, How::Power | How::Kill)
    }

    /// It hangs first.
    pub fn hangs(self) -> bool {
        matches!(self, How::Late | How::TimedOut)
    }

    /// Half of it was done.
    pub fn tears(self) -> bool {
        matches!(self, How::Torn | How::TimedOut) || self.takes_device()
    }
}

/// While the pool is opened or closed there is no engine that asks for I/Os: what is written then counts by devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// After a power cut.
    Start,
    /// In order.
    Stop,
}

/// A device dies in the middle of that. Only where another one has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which one.
    pub device: u16,
    /// With which of its writes and flushes, counted from 0.
    pub step: u64,
    /// Of what.
    pub turn: Turn,
}

/// What fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// An I/O, counted from 0.
    Io(u64, How),
    /// A device.
    Step(Step),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Io(at, how) => write!(f, "{how:?} at I/O {at}"),
            Failure::Step(Step { device, step, turn }) => {
                write!(f, "device {device} dies at its step {step} of a {turn:?}")
            }
        }
    }
}

/// The one failure of a world.
#[derive(Clone, Debug)]
pub(crate) struct Single {
    /// Which I/O, counted from 0.
    pub at: u64,
    pub how: How,
    /// It has happened, to this.
    pub hit: Option<Hit>,
}

/// An I/O that fails.
#[derive(Clone, Debug)]
pub(crate) struct Hit {
    pub target: Target,
    /// Of an origin of several legs, the number of the leg.
    pub leg: Option<u8>,
    pub kind: OpKind,
    pub token: u64,
    pub offset: u64,
    pub len: u64,
}

/// Counts the I/Os of a world, whoever begins them, and knows the one that fails.
#[derive(Debug, Default)]
pub(crate) struct Book {
    /// So far.
    pub begun: u64,
    /// Those to a device of which another one has the same.
    pub spare: Vec<u64>,
    /// The one failure.
    pub single: Option<Single>,
    /// It has just begun, and this life ends with it.
    pub cuts: bool,
    /// Or a device dies, and whether it has.
    pub step: Option<Step>,
    pub died: bool,
}

impl Book {
    /// An I/O begins, perhaps of a leg. `spare`: another device has the same. Is it the one?
    pub fn begin(&mut self, op: &IoOp, leg: Option<u8>, spare: bool) -> bool {
        let number = self.begun;
        self.begun += 1;
        if spare {
            self.spare.push(number);
        }
        let Some(single) = self.single.as_mut().filter(|s| s.at == number) else {
            return false;
        };
        single.hit = Some(Hit {
            target: op.target,
            leg,
            kind: op.kind,
            token: 0,
            offset: op.offset,
            len: op.len,
        });
        self.cuts = single.how.ends_life();
        true
    }

    /// It has begun.
    pub fn is_hit(&self) -> bool {
        self.single.as_ref().is_some_and(|s| s.hit.is_some())
    }

    /// The I/O that fails has this name.
    pub fn name(&mut self, token: u64) {
        if let Some(hit) = self.single.as_mut().and_then(|s| s.hit.as_mut()) {
            hit.token = token;
        }
    }

    /// It hangs for now.
    pub fn hangs(&self) -> bool {
        self.single.as_ref().is_some_and(|s| s.how.hangs())
    }

    /// How an I/O is to fail that ends now, if it is the one.
    pub fn fails(&self, target: Target, leg: Option<u8>, token: u64) -> Option<How> {
        let single = self.single.as_ref().filter(|s| s.how.is_error())?;
        let hit = single.hit.as_ref()?;
        ((hit.target, hit.leg, hit.token) == (target, leg, token)).then_some(single.how)
    }
}

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The mode of its disks.
    pub mode: Mode,
    /// Flash devices.
    pub devices: u64,
    /// They hold everything twice.
    pub twice: bool,
    /// Legs of each origin; one is no mirror.
    pub legs: u64,
    /// What chooses the rest.
    pub seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}, {} flash devices{}{}, seed {}",
            self.mode,
            self.devices,
            if self.twice { " twice" } else { "" },
            if self.legs > 1 { ", mirrored" } else { "" },
            self.seed
        )
    }
}

/// Each mode on one flash device, on two, on two that hold everything twice, and on those over mirrors; the two modes that
/// differ most also on four devices.
pub fn cases() -> Vec<Case> {
    let modes = [
        Mode::WriteBack,
        Mode::WriteBackOrdered,
        Mode::WriteThrough,
        Mode::WriteAround,
        Mode::Off,
    ];
    let mut cases = Vec::new();
    let mut add = |mode, devices, twice, legs, seeds: &[u64]| {
        cases.extend(seeds.iter().map(|seed| Case {
            mode,
            devices,
            twice,
            legs,
            seed: *seed,
        }));
    };
    for mode in modes {
        add(mode, 1, false, 1, &[3, 4]);
        add(mode, 2, false, 1, &[3, 4]);
        add(mode, 2, true, 1, &[3, 4]);
        add(mode, 2, true, 2, &[3]);
    }
    for mode in [Mode::WriteBack, Mode::WriteThrough] {
        add(mode, 4, true, 1, &[3]);
    }
    cases
}

fn profile(case: &Case) -> Profile {
    let modes = match case.mode {
        Mode::WriteBack | Mode::WriteBackOrdered => [1, 0, 0, 0],
        Mode::WriteThrough => [0, 1, 0, 0],
        Mode::WriteAround => [0, 0, 1, 0],
        Mode::Off => [0, 0, 0, 1],
    };
    Profile {
        name: "single",
        about: "one I/O fails",
        modes,
        requests: (REQUESTS, REQUESTS),
        devices: (case.devices, case.devices),
        twice: case.twice,
        legs: (case.legs, case.legs),
        legs_alike: true,
        ordered: case.mode == Mode::WriteBackOrdered,
        refusals: 0,
        ..CALM
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Run {
    /// I/Os there were, and how many until only the reckoning was left.
    pub ios: u64,
    /// The latter.
    pub alive: u64,
    /// Which of them were to a device of which another one has the same.
    pub spare: Vec<u64>,
    /// The device has died that was to.
    pub died: bool,
    /// What was broken, in words.
    pub outcome: Outcome,
    /// The last events, if they were asked for.
    pub trace: Vec<String>,
}

/// Runs a workload in which something fails, or nothing.
pub fn run(case: &Case, fails: Option<Failure>, maker: &dyn Maker, tracing: bool) -> Run {
    paths::begin();
    let mut world = match World::of(case.seed, profile(case), maker, tracing, false) {
        Ok(world) => world,
        Err(e) => {
            return Run {
                ios: 0,
                alive: 0,
                spare: Vec::new(),
                died: false,
                outcome: Err(e),
                trace: Vec::new(),
            };
        }
    };
    match fails {
        Some(Failure::Io(at, how)) => world.book.single = Some(Single { at, how, hit: None }),
        Some(Failure::Step(step)) => world.book.step = Some(step),
        None => {}
    }
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run_once()));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("no message")))
    });
    Run {
        ios: world.book.begun,
        alive: world.alive_ios,
        spare: std::mem::take(&mut world.book.spare),
        died: world.book.died,
        outcome,
        trace: world.trace_tail(),
    }
}

/// A failure that did harm.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The workload.
    pub case: Case,
    /// What failed.
    pub failure: Failure,
    /// What was broken, in words.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding {
            case,
            failure,
            what,
        } = self;
        write!(f, "{case}: {failure}: {what}")
    }
}

/// What all runs came to.
#[derive(Debug, Default)]
pub struct Tally {
    /// Workloads, and the I/Os of each.
    pub ios: Vec<(String, u64)>,
    /// Runs.
    pub runs: u64,
    /// The first of what was found.
    pub findings: Vec<Finding>,
}

/// One run, or one step after the other until the device does not die any more.
type Task = (Case, Failure);

/// Lets every `stride`-th I/O of every workload fail in every way, and devices die with every `stride`-th step. Which of them these
/// are is another one for each workload and way, so that a test that has no time for all of them looks at different ones.
pub fn run_all(stride: u64, jobs: usize, maker: &dyn Maker) -> Result<Tally, String> {
    run_some(&cases(), stride, jobs, maker)
}

/// The same of some workloads.
pub fn run_some(
    cases: &[Case],
    stride: u64,
    jobs: usize,
    maker: &dyn Maker,
) -> Result<Tally, String> {
    let mut tally = Tally::default();
    let mut todo: Vec<Task> = Vec::new();
    let stride = stride.max(1);
    for (n, case) in (0..).zip(cases) {
        let sound = run(case, None, maker, false);
        sound
            .outcome
            .map_err(|e| format!("{case}: without any failure: {e}"))?;
        tally.ios.push((case.to_string(), sound.ios));
        for (m, how) in (0..).zip(How::ALL) {
            // A reckoning is not crashed: it does so itself.
            let end = match how.ends_life() || how == How::Returns {
                true => sound.alive,
                false => sound.ios,
            };
            let all: Vec<u64> = match how.takes_device() {
                true => sound.spare.iter().copied().filter(|at| *at < end).collect(),
                false => (0..end).collect(),
            };
            let first = ((n + m) % stride) as usize;
            let some = all.iter().skip(first).step_by(stride as usize);
            todo.extend(some.map(|at| (*case, Failure::Io(*at, how))));
        }
        let devices = if case.twice { case.devices as u16 } else { 0 };
        for device in 0..devices {
            for turn in [Turn::Start, Turn::Stop] {
                let step = (n + u64::from(device)) % stride;
                let step = Step { device, step, turn };
                todo.push((*case, Failure::Step(step)));
            }
        }
    }
    let (next, runs, found) = (
        AtomicUsize::new(0),
        AtomicU64::new(0),
        Mutex::new(Vec::new()),
    );
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some((case, failure)) = todo.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut failure = *failure;
                    loop {
                        let run = run(case, Some(failure), maker, false);
                        runs.fetch_add(1, Ordering::Relaxed);
                        if let Err(what) = run.outcome
                            && let Ok(mut found) = found.lock()
                            && found.len() < FINDINGS_MAX
                        {
                            let case = *case;
                            found.push(Finding {
                                case,
                                failure,
                                what,
                            });
                        }
                        match &mut failure {
                            Failure::Step(step) if run.died => step.step += stride,
                            _ => break,
                        }
                    }
                }
            });
        }
    });
    tally.runs = runs.into_inner();
    tally.findings = found.into_inner().unwrap_or_default();
    Ok(tally)
}
