//! Fixed seeds for the gate: few enough to run on every change, and enough to reach every rare path and to
//! catch every deliberate fault.
//!
//! Random worlds reach a rare path, or catch a fault, once in hundreds or thousands of seeds. A long run ([`record`])
//! searches for such seeds and stores them in `seeds/recorded.txt`; [`run`] and [`is_caught`] start with those. A
//! change of the engine shifts what later random numbers decide, so that recorded seeds go stale. Then the
//! gate falls back on the search, which is slower and proves the same, and prints a notice.

use crate::paths::Taken;
use crate::profile::{MIXED, PROFILES};
use crate::real::{BELIEVE_LOST, HalfFault, IGNORE_SINCE, Real, leg_faults};
use crate::runner::{FAILURES_MAX, Summary, fails, run_many, run_seed, run_worlds};
use hearth_engine::faults::Fault;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Worlds of profile `mixed` in each gate, from seed 0.
pub const MIXED_WORLDS: u64 = 1000;
/// Worlds of each profile in [`OWN_RUNS`], from seed 0.
pub const OWN_WORLDS: u64 = 60;
/// `mixed` never chooses these profiles: pools of several devices, and devices that hang or corrupt blocks.
pub const OWN_RUNS: [&str; 12] = [
    "changed-origins",
    "devices",
    "devices-fail",
    "devices-change",
    "devices-flash-only",
    "areas",
    "areas-fail",
    "overdue",
    "twice-replaced",
    "twice-rot-crash",
    "twice-fail",
    "erased",
];
/// Worlds of each profile, whether `mixed` chooses it or not, from seed [`EACH_START`].
pub const EACH_WORLDS: u64 = 10;
/// See [`EACH_WORLDS`].
const EACH_START: u64 = 50_000;
/// Most seeds of `mixed` searched for a path that no fixed seed reaches.
pub const SEARCH_MIXED: u64 = 10_000;
/// The same for each profile in [`OWN_RUNS`].
pub const SEARCH_OWN: u64 = 1000;
/// Most seeds searched for one fault.
pub const SEARCH_FAULT: u64 = 3000;
/// Seeds that must catch a fault. A single one may do so by chance, and not after the next change.
pub const ENOUGH: usize = 3;
/// Worlds recorded for each path that the fixed seeds reach less often.
const PER_PATH: u64 = 2;

const RECORDED: &str = include_str!("../seeds/recorded.txt");
const FOUND: &str = include_str!("../seeds/found.txt");

/// A profile and a seed.
type WorldId = (String, u64);

/// Lines of `PROFILE SEED` after `prefix`; comments and other lines are skipped.
fn worlds(text: &str, prefix: &str) -> Vec<WorldId> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(prefix));
    lines
        .filter_map(|line| {
            let (profile, seed) = line.split_once(' ')?;
            Some((profile.to_owned(), seed.parse().ok()?))
        })
        .collect()
}

/// The seeds recorded for a fault in this profile.
fn recorded_for(fault: &str, profile: &str) -> Vec<u64> {
    let prefix = format!("fault {fault} {profile} ");
    let line = RECORDED.lines().find_map(|line| line.strip_prefix(&prefix));
    let numbers = line.unwrap_or_default().split_whitespace();
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// Result of [`run`].
pub struct Outcome {
    /// All worlds that ran.
    pub summary: Summary,
    /// Worlds of the search; above 0, recorded seeds are stale.
    pub searched: u64,
}

/// Runs the fixed worlds on `jobs` threads, then more of them while paths are missing.
pub fn run(jobs: usize, progress: &(dyn Fn(u64, usize) + Sync)) -> Outcome {
    let mut summary = Summary::default();
    let fixed = fixed();
    let extra = worlds(RECORDED, "world ")
        .into_iter()
        .chain(worlds(FOUND, ""));
    let fixed: Vec<WorldId> = fixed.into_iter().chain(extra).collect();
    summary.add(run_worlds(&fixed, jobs, &Real::default(), progress));
    let mut searched = 0;
    for (profile, from, to) in search_ranges() {
        let missing = |summary: &Summary| summary.totals.paths.missing().next().is_some();
        let mut at = from;
        while at < to && missing(&summary) && summary.failures.len() < FAILURES_MAX {
            let count = 100.min(to - at);
            summary.add(run_many(
                at,
                count,
                jobs,
                profile,
                &Real::default(),
                &|_, _| {},
            ));
            at += count;
            searched += count;
        }
    }
    Outcome { summary, searched }
}

fn fixed() -> Vec<WorldId> {
    let worlds = |profile: &str, start: u64, count: u64| {
        let profile = profile.to_owned();
        (start..start + count).map(move |seed| (profile.clone(), seed))
    };
    let own = OWN_RUNS.iter().flat_map(|p| worlds(p, 0, OWN_WORLDS));
    let each = PROFILES.iter();
    let each = each.flat_map(|p| worlds(p.name, EACH_START, EACH_WORLDS));
    worlds(MIXED, 0, MIXED_WORLDS)
        .chain(own)
        .chain(each)
        .collect()
}

/// Ranges of the search beyond the fixed seeds: a profile, the first seed and the end.
fn search_ranges() -> Vec<(&'static str, u64, u64)> {
    let own = OWN_RUNS.iter().map(|p| (*p, OWN_WORLDS, SEARCH_OWN));
    own.chain([(MIXED, MIXED_WORLDS, SEARCH_MIXED)]).collect()
}

/// A deliberate fault, and the profile in which it shows soonest.
pub struct Broken {
    /// Its name.
    pub name: String,
    /// The profile.
    pub profile: &'static str,
    /// The engine with the fault.
    pub maker: Real,
}

/// Every deliberate fault that worlds must catch. Needs feature `mutations`.
pub fn faults() -> Result<Vec<Broken>, String> {
    let engine = Fault::BY_WORLDS.map(|fault| (format!("{fault:?}"), profile(fault)));
    let legs = leg_faults().into_iter().map(|(name, _)| (name, "mirrors"));
    let replaced = HalfFault::ALL.map(|(_, name)| (name.to_owned(), "twice-replaced"));
    let callers = [(IGNORE_SINCE, "change"), (BELIEVE_LOST, "twice-fail")];
    let callers = callers.map(|(name, profile)| (name.to_owned(), profile));
    let all = engine
        .into_iter()
        .chain(legs)
        .chain(replaced)
        .chain(callers);
    all.map(|(name, profile)| {
        let maker = Real::broken(&name)?;
        Ok(Broken {
            name,
            profile,
            maker,
        })
    })
    .collect()
}

/// The profile in which a fault shows soonest.
fn profile(fault: Fault) -> &'static str {
    match fault {
        // A log is starved so rarely that only the profile made for it will do.
        Fault::StarveForever => "full",
        Fault::ServeUnverified | Fault::AttachVerifies | Fault::DropUnrecorded => "changed-origins",
        Fault::EvictDirty | Fault::ZeroKeepsCopies | Fault::WriteKeepsZeros => "calm",
        Fault::ForgetInHead
        | Fault::WritePastDirty
        | Fault::WritePastUndurablyClean
        | Fault::OffReturnsInHead => "change",
        Fault::KeepUseless => "erased",
        Fault::KeepGivenUpCopies => "flash-death",
        Fault::EvictKept => "flash-only-pressed",
        Fault::DropUnlikeDirty => "mirrors",
        Fault::KeepScratch => "flash-only",
        Fault::TrustOldSummary => "crash",
        Fault::AgainUntold
        | Fault::ResendRenumbered
        | Fault::LoseTooSoon
        | Fault::PromiseBroken => "flash-errors",
        Fault::WalkStrangers => "full",
        Fault::IgnoreDestageError | Fault::IgnoreOriginFlushError => "origin-errors",
        Fault::StayClean | Fault::CheckpointNoZeros => "restart",
        Fault::DestageRot
        | Fault::ForgetRotten
        | Fault::ServeLost
        | Fault::ResealRot
        | Fault::WaitBehindLost => "rot",
        Fault::FlushCoversLater
        | Fault::ClaimUndurable
        | Fault::CleanMoved
        | Fault::DestageUndurable
        | Fault::MoveSuperseded
        | Fault::OriginFlushCoversLater
        | Fault::ApplyOutOfOrder
        | Fault::SummaryClaimsItself
        | Fault::CleanSuperseded
        | Fault::VoidZerosCount => "write-back",
        Fault::KeepOverwritten
        | Fault::ReplayNoDrops
        | Fault::FlushSkipsOrigin
        | Fault::FuaLeavesOriginVolatile
        | Fault::TrustIntentRegions
        | Fault::SkipRelogIntents
        | Fault::CloseUnflushed
        | Fault::CloseInUse
        | Fault::CloseAllIntents
        | Fault::SkipRestoredVoid
        | Fault::IntentUnawaited => "write-through",
        Fault::EmptyForgetsDirty | Fault::EmptyForgetsFlush => "devices-change",
        Fault::AreaUsedEarly | Fault::AreaUnwiped | Fault::AreaRead => "areas",
        Fault::EpochEarly
        | Fault::EpochUnflushed
        | Fault::EpochUnmarked
        | Fault::OrderToldEarly
        | Fault::FuaEndsNothing => "ordered",
        Fault::FlushOneDevice
        | Fault::FlushEndsEarly
        | Fault::FlushForgetsOne
        | Fault::BelieveBelowFloor => "devices-fail",
        Fault::SecondHalfUnflushed | Fault::DirtyOnce => "twice-fail",
        Fault::BelieveBehind | Fault::HalvesUnmended | Fault::CleanDecides => "twice-replaced",
        _ => "mixed",
    }
}

/// How a fault was caught.
pub struct Caught {
    /// Up to [`ENOUGH`] seeds that fail with the fault and pass without it.
    pub seeds: Vec<u64>,
    /// Whether recorded seeds did not suffice.
    pub stale: bool,
}

/// Looks for seeds that catch a fault: the recorded ones first, then from 0.
pub fn is_caught(broken: &Broken) -> Caught {
    let recorded = recorded_for(&broken.name, broken.profile);
    let seeds = catching(broken, &recorded);
    if seeds.len() >= ENOUGH {
        return Caught {
            seeds,
            stale: false,
        };
    }
    Caught {
        seeds: catching(broken, &(0..SEARCH_FAULT).collect::<Vec<_>>()),
        stale: true,
    }
}

fn catching(broken: &Broken, seeds: &[u64]) -> Vec<u64> {
    let Broken { profile, maker, .. } = broken;
    let sound = |seed: u64| run_seed(seed, profile, &Real::default()).is_ok();
    let seeds = seeds.iter().copied();
    seeds
        .filter(|seed| fails(*seed, profile, maker) && sound(*seed))
        .take(ENOUGH)
        .collect()
}

/// Calls `each` for every item, on `jobs` threads.
pub fn in_parallel<T: Sync>(items: &[T], jobs: usize, each: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    each(item);
                }
            });
        }
    });
}

/// Searches for the seeds of the gate, without those recorded so far; the new text of `seeds/recorded.txt`, or what was
/// not found.
pub fn record(jobs: usize) -> Result<String, String> {
    let mut text = String::from(
        "# Seeds of the gate (crates/sim/src/gate.rs). Made by `scripts/seeds.sh`; do not edit.\n",
    );
    let mut missed = String::new();
    let mut wanted = run_worlds(&fixed(), jobs, &Real::default(), &|_, _| {});
    for (profile, from, to) in search_ranges() {
        for seed in from..to {
            if !wanted.totals.paths.all().any(|(_, n)| n < PER_PATH) {
                break;
            }
            let Ok(report) = run_seed(seed, profile, &Real::default()) else {
                return Err(format!("seed {seed} of {profile} fails without any fault"));
            };
            let helps = |taken: &Taken| {
                let both = wanted.totals.paths.all().zip(taken.all());
                both.into_iter()
                    .any(|((_, n), (_, taken))| n < PER_PATH && taken > 0)
            };
            if helps(&report.paths) {
                wanted.totals.paths.add_world(&report.paths);
                let _ = writeln!(text, "world {profile} {seed}");
            }
        }
    }
    for path in wanted.totals.paths.missing() {
        let _ = writeln!(missed, "no world reaches: {path}");
    }
    let found = Mutex::new(Vec::new());
    in_parallel(&faults()?, jobs, |broken| {
        let seeds = catching(broken, &(0..SEARCH_FAULT).collect::<Vec<_>>());
        eprintln!("{} {}: {seeds:?}", broken.name, broken.profile);
        if let Ok(mut found) = found.lock() {
            found.push((broken.name.clone(), broken.profile, seeds));
        }
    });
    let mut found = found.into_inner().unwrap_or_default();
    found.sort();
    for (name, profile, seeds) in found {
        if seeds.len() < ENOUGH {
            let _ = writeln!(
                missed,
                "caught by fewer than {ENOUGH} seeds: {name} {seeds:?}"
            );
        }
        let seeds: Vec<String> = seeds.iter().map(u64::to_string).collect();
        let _ = writeln!(text, "fault {name} {profile} {}", seeds.join(" "));
    }
    if missed.is_empty() {
        Ok(text)
    } else {
        Err(missed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_files_have_only_known_lines() {
        for (text, prefix) in [(RECORDED, "world "), (FOUND, "")] {
            let lines = text.lines().filter(|line| {
                !line.starts_with('#') && !line.starts_with("fault ") && !line.is_empty()
            });
            assert_eq!(lines.count(), worlds(text, prefix).len());
        }
    }
}
