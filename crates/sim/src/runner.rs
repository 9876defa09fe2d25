//! Runs seeds: one, many, or until a deliberate fault is caught.

use crate::paths::{self, Taken};
use crate::subject::Maker;
use crate::world::World;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a passed seed did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Digest of everything that happened; equal for equal seeds.
    pub digest: u64,
    /// Requests answered.
    pub requests: u64,
    /// Device operations completed.
    pub ios: u64,
    /// Rare paths that were taken.
    pub paths: Taken,
}

/// A seed that broke a promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The profile asked for.
    pub profile: String,
    /// Which promise, in words.
    pub what: String,
    /// The last events.
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {} (profile {}) failed; its last events:",
            self.seed, self.profile
        )?;
        for line in &self.trace {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "seed {}: {}", self.seed, self.what)?;
        write!(
            f,
            "to see it all: hearth-sim --profile {} --seed {} --trace",
            self.profile, self.seed
        )
    }
}

/// Runs one seed, without a trace.
fn attempt(
    seed: u64,
    profile: &str,
    maker: &dyn Maker,
    trace: bool,
    echo: bool,
) -> Result<Report, (String, Vec<String>)> {
    paths::begin();
    let mut world = World::new(seed, profile, maker, trace, echo).map_err(|e| (e, Vec::new()))?;
    // A panic of the engine is a finding like any other, and must name its seed.
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run()));
    world.paths.gather();
    let report = Report {
        paths: world.paths,
        digest: world.digest(),
        requests: world.done_requests,
        ios: world.done_ios,
    };
    match outcome {
        Ok(Ok(())) => Ok(report),
        Ok(Err(what)) => Err((what, world.trace_tail())),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err((format!("panic: {text}"), world.trace_tail()))
        }
    }
}

/// Runs one seed; a failing one is run again to record its trace.
pub fn run_seed(seed: u64, profile: &str, maker: &dyn Maker) -> Result<Report, Failure> {
    attempt(seed, profile, maker, false, false).map_err(|(first, _)| {
        let (what, trace) = match attempt(seed, profile, maker, true, false) {
            Err(again) => again,
            Ok(_) => (
                format!("NOT REPRODUCIBLE: first \"{first}\", then nothing"),
                Vec::new(),
            ),
        };
        Failure {
            seed,
            profile: profile.to_string(),
            what,
            trace,
        }
    })
}

/// Runs one seed and prints every event.
pub fn run_loud(seed: u64, profile: &str, maker: &dyn Maker) -> Result<Report, String> {
    attempt(seed, profile, maker, true, true).map_err(|(what, _)| what)
}

/// What many seeds gave.
#[derive(Debug, Default)]
pub struct Summary {
    /// Seeds that passed.
    pub passed: u64,
    /// Seeds that failed, in order.
    pub failures: Vec<Failure>,
    /// Requests answered and operations completed by the passed; of paths, by how many of them.
    pub totals: Report,
}

/// How many failing seeds are kept with their traces; the rest are only counted.
pub const FAILURES_MAX: usize = 50;

impl Summary {
    /// Adds the worlds of another run.
    pub fn add(&mut self, more: Summary) {
        self.passed += more.passed;
        self.failures.extend(more.failures);
        self.totals.requests += more.totals.requests;
        self.totals.ios += more.totals.ios;
        self.totals.digest ^= more.totals.digest;
        self.totals.paths.add_counts(&more.totals.paths);
    }
}

/// Runs `count` seeds from `start` on `jobs` threads. Stops early after [`FAILURES_MAX`] failures.
/// `progress` is called now and then with the number of seeds done and of those failed.
pub fn run_many(
    start: u64,
    count: u64,
    jobs: usize,
    profile: &str,
    maker: &dyn Maker,
    progress: &(dyn Fn(u64, usize) + Sync),
) -> Summary {
    let end = start.saturating_add(count);
    run_each(jobs, maker, progress, |n| {
        let seed = start.checked_add(n).filter(|seed| *seed < end)?;
        Some((profile, seed))
    })
}

/// Runs these worlds, each a profile and a seed; otherwise like [`run_many`].
pub fn run_worlds(
    worlds: &[(String, u64)],
    jobs: usize,
    maker: &dyn Maker,
    progress: &(dyn Fn(u64, usize) + Sync),
) -> Summary {
    run_each(jobs, maker, progress, |n| {
        let (profile, seed) = worlds.get(usize::try_from(n).ok()?)?;
        Some((profile.as_str(), *seed))
    })
}

/// Runs the worlds that `world` gives for 0, 1, 2 and so on, until it gives none.
fn run_each<'a>(
    jobs: usize,
    maker: &dyn Maker,
    progress: &(dyn Fn(u64, usize) + Sync),
    world: impl Fn(u64) -> Option<(&'a str, u64)> + Sync,
) -> Summary {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let summary = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Some((profile, seed)) = world(next.fetch_add(1, Ordering::Relaxed)) else {
                        break;
                    };
                    let result = run_seed(seed, profile, maker);
                    let Ok(mut s) = summary.lock() else { return };
                    match result {
                        Ok(report) => {
                            s.passed += 1;
                            s.totals.requests += report.requests;
                            s.totals.ios += report.ios;
                            s.totals.digest ^= report.digest;
                            s.totals.paths.add_world(&report.paths);
                        }
                        Err(failure) => s.failures.push(failure),
                    }
                    if s.failures.len() >= FAILURES_MAX {
                        stop.store(true, Ordering::Relaxed);
                    }
                    let done = s.passed + s.failures.len() as u64;
                    if done % 200 == 0 {
                        progress(done, s.failures.len());
                    }
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_default();
    summary.failures.sort_by_key(|f| f.seed);
    summary
}

/// Runs seeds until one fails; `None` if `most` of them pass. Proves that a broken subject is caught.
pub fn first_failure(start: u64, most: u64, profile: &str, maker: &dyn Maker) -> Option<Failure> {
    (start..start + most).find_map(|seed| run_seed(seed, profile, maker).err())
}

/// The seeds that fail, without their traces. Proves that a broken subject is caught, and not by chance.
pub fn catches<'a>(
    start: u64,
    count: u64,
    profile: &'a str,
    maker: &'a dyn Maker,
) -> impl Iterator<Item = u64> + 'a {
    (start..start + count).filter(move |seed| fails(*seed, profile, maker))
}

/// Whether a seed fails; without a trace.
pub fn fails(seed: u64, profile: &str, maker: &dyn Maker) -> bool {
    attempt(seed, profile, maker, false, false).is_err()
}
