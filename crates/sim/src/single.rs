//! Each I/O of a fixed workload fails in turn, alone.
//!
//! Random trouble covers much and proves little of any one place: two failures hide each other, and the rare one never
//! comes. Here a world without trouble is run once, and then again for each of its I/Os, up to which it is the same; that
//! one fails, and nothing else does. So the oracle can be stricter than otherwise: of one failure of flash that is not its
//! death nobody may see anything, and one of an origin may fail only a request that needed just this.

use crate::paths;
use crate::profile::{CALM, Profile};
use crate::subject::Maker;
use crate::world::{Outcome, World};
use hearth_engine::api::Mode;
use hearth_io::{OpKind, Target};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

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
}

impl How {
    /// All of them.
    pub const ALL: [How; 6] = [
        How::Error,
        How::Torn,
        How::Late,
        How::TimedOut,
        How::Power,
        How::Kill,
    ];

    /// It is answered with an error in the end.
    pub fn is_error(self) -> bool {
        matches!(self, How::Error | How::Torn | How::TimedOut)
    }

    /// It hangs first.
    pub fn hangs(self) -> bool {
        matches!(self, How::Late | How::TimedOut)
    }

    /// Half of it was done.
    pub fn tears(self) -> bool {
        matches!(self, How::Torn | How::TimedOut)
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
    pub kind: OpKind,
    pub token: u64,
    pub offset: u64,
    pub len: u64,
}

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The mode of its disks.
    pub mode: Mode,
    /// Flash devices.
    pub devices: u64,
    /// What chooses the rest.
    pub seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}, {} flash devices, seed {}",
            self.mode, self.devices, self.seed
        )
    }
}

/// Each mode on one flash device and on two.
pub fn cases() -> Vec<Case> {
    let modes = [
        Mode::WriteBack,
        Mode::WriteBackOrdered,
        Mode::WriteThrough,
        Mode::WriteAround,
        Mode::Off,
    ];
    let both = |mode| [1, 2].map(|devices| (mode, devices));
    let all = modes.into_iter().flat_map(both);
    let seeded = |(mode, devices)| {
        [3, 4].map(|seed| Case {
            mode,
            devices,
            seed,
        })
    };
    all.flat_map(seeded).collect()
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
    /// What was broken, in words.
    pub outcome: Outcome,
    /// The last events, if they were asked for.
    pub trace: Vec<String>,
}

/// Runs a workload in which one I/O fails, or none.
pub fn run(case: &Case, fails: Option<(u64, How)>, maker: &dyn Maker, tracing: bool) -> Run {
    paths::begin();
    let mut world = match World::of(case.seed, profile(case), maker, tracing, false) {
        Ok(world) => world,
        Err(e) => {
            return Run {
                ios: 0,
                alive: 0,
                outcome: Err(e),
                trace: Vec::new(),
            };
        }
    };
    world.single = fails.map(|(at, how)| Single { at, how, hit: None });
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run_once()));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("no message")))
    });
    Run {
        ios: world.begun_ios,
        alive: world.alive_ios,
        outcome,
        trace: world.trace_tail(),
    }
}

/// A failure that did harm.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The workload.
    pub case: Case,
    /// Which I/O failed.
    pub at: u64,
    /// How.
    pub how: How,
    /// What was broken, in words.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding {
            case,
            at,
            how,
            what,
        } = self;
        write!(f, "{case}: {how:?} at I/O {at}: {what}")
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

/// Lets every `stride`-th I/O of every workload fail in every way. Which of them these are is another one for each workload
/// and way, so that a test that has no time for all of them looks at different ones.
pub fn run_all(stride: u64, jobs: usize, maker: &dyn Maker) -> Result<Tally, String> {
    let mut tally = Tally::default();
    let mut todo = Vec::new();
    for (n, case) in (0..).zip(cases()) {
        let sound = run(&case, None, maker, false);
        sound
            .outcome
            .map_err(|e| format!("{case}: without any failure: {e}"))?;
        tally.ios.push((case.to_string(), sound.ios));
        for (m, how) in (0..).zip(How::ALL) {
            let first = (n + m) % stride.max(1);
            // A reckoning is not crashed: it does so itself.
            let end = match how {
                How::Power | How::Kill => sound.alive,
                _ => sound.ios,
            };
            let some = (first..end).step_by(stride.max(1) as usize);
            todo.extend(some.map(|at| (case, at, how)));
        }
    }
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some((case, at, how)) = todo.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let run = run(case, Some((*at, *how)), maker, false);
                    let Err(what) = run.outcome else { continue };
                    let Ok(mut found) = found.lock() else { return };
                    if found.len() < FINDINGS_MAX {
                        found.push(Finding {
                            case: *case,
                            at: *at,
                            how: *how,
                            what,
                        });
                    }
                }
            });
        }
    });
    tally.runs = todo.len() as u64;
    tally.findings = found.into_inner().unwrap_or_default();
    Ok(tally)
}
