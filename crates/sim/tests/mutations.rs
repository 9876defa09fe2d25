//! Each deliberate fault of the engine must be caught by some seed: a simulation that misses
//! one would miss the same mistake made by accident.
#![cfg(feature = "mutations")]

mod common;
#[path = "common/grown.rs"]
mod grown;
#[path = "common/judge.rs"]
mod judge;

use hearth_engine::faults::{Fault, Faults};
use hearth_sim::real::{BELIEVE_LOST, HalfFault, IGNORE_SINCE, Real, leg_faults};
use hearth_sim::runner::{catches, first_failure, run_seed};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most seeds tried for one fault.
const SEEDS_MAX: u64 = 3000;
/// So many of them must catch it: one alone may do so by chance, and not after the next change.
const ENOUGH: usize = 3;
const THREADS: usize = 2;

#[test]
fn a_registry_that_forgets_since_when_a_disk_exists_is_caught() {
    let maker = Real::broken(IGNORE_SINCE).expect("it needs no feature");
    let found = first_failure(0, SEEDS_MAX, "change", &maker).expect("caught");
    assert!(run_seed(found.seed, "change", &Real::default()).is_ok());
}

/// Also where it is back in the very next run, with a log that only ends earlier.
#[test]
fn a_device_that_is_believed_although_the_pool_went_on_without_it_is_caught() {
    let maker = Real::broken(BELIEVE_LOST).expect("it needs no feature");
    let found = first_failure(0, SEEDS_MAX, "twice-fail", &maker).expect("caught");
    assert!(run_seed(found.seed, "twice-fail", &Real::default()).is_ok());
}

/// The profile in which a fault shows soonest.
fn profile(fault: Fault) -> &'static str {
    match fault {
        // A log is starved so rarely that only the profile made for it will do.
        Fault::StarveForever => "full",
        Fault::EvictDirty | Fault::ZeroKeepsCopies | Fault::WriteKeepsZeros => "calm",
        Fault::ForgetInHead | Fault::WritePastDirty | Fault::WritePastUndurablyClean => "change",
        Fault::EvictKept => "flash-only-pressed",
        Fault::KeepScratch => "flash-only",
        Fault::TrustOldSummary => "crash",
        Fault::AgainUntold
        | Fault::ResendRenumbered
        | Fault::LoseTooSoon
        | Fault::PromiseBroken => "flash-errors",
        Fault::WalkStrangers => "full",
        Fault::IgnoreDestageError | Fault::IgnoreOriginFlushError => "origin-errors",
        Fault::StayClean | Fault::CheckpointNoZeros => "restart",
        Fault::DestageRot | Fault::ForgetRotten | Fault::ServeLost | Fault::ResealRot => "rot",
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

/// Random worlds hardly ever cut the power between a disk's growth and the next flush of the log, and
/// then read its one odd block.
#[test]
fn a_disk_that_grows_too_early_is_caught() {
    assert!(grown::padding_is_served(0, Faults(Some(Fault::GrowEarly))));
    assert!(!grown::padding_is_served(0, Faults::default()));
}

#[test]
fn every_fault_is_caught() {
    let broken = Fault::BY_WORLDS.map(|fault| {
        let maker = Real::with(fault).expect("it is built in");
        (format!("{fault:?}"), profile(fault), maker)
    });
    all_are_caught(&broken);
}

/// A mirror that breaks a rule is caught by what the engine above it makes of that.
#[test]
fn every_fault_of_a_mirror_is_caught_under_the_engine() {
    let broken = leg_faults().into_iter().map(|(name, _)| {
        let maker = Real::broken(&name).expect("it is built in");
        (name, "mirrors", maker)
    });
    let broken: Vec<_> = broken.collect();
    assert!(broken.len() > 5, "{}", broken.len());
    all_are_caught(&broken);
}

/// A device that is replaced where everything is there twice: the old one is believed, or the new one before it has all.
#[test]
fn every_fault_of_a_replacement_is_caught() {
    let broken = HalfFault::ALL.map(|(_, name)| {
        let maker = Real::broken(name).expect("it needs no feature");
        (name.to_owned(), "twice-replaced", maker)
    });
    all_are_caught(&broken);
}

fn all_are_caught(broken: &[(String, &str, Real)]) {
    std::panic::set_hook(Box::new(|_| {}));
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some((name, profile, maker)) =
                    broken.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let caught = catches(0, SEEDS_MAX, profile, maker);
                    // The same seeds must pass when nothing is broken.
                    let sound = |seed: &u64| run_seed(*seed, profile, &Real::default()).is_ok();
                    let caught = caught.filter(sound).take(ENOUGH).count();
                    if caught < ENOUGH {
                        missed
                            .lock()
                            .expect("no panic")
                            .push((name.clone(), caught));
                    }
                }
            });
        }
    });
    drop(std::panic::take_hook());
    let missed = missed.into_inner().expect("no panic");
    assert!(
        missed.is_empty(),
        "caught by fewer than {ENOUGH} of {SEEDS_MAX} seeds: {missed:?}"
    );
}

/// What is counted wrongly harms nobody at once, so the oracle does not see it.
#[test]
fn a_wrong_count_is_caught_by_counting_again_and_by_nothing_else() {
    for fault in Fault::BY_COUNTS {
        let profile = match fault {
            Fault::GivenUpStaysPinned => "flash-death",
            _ => "write-back",
        };
        let broken = Real::with(fault).expect("it is built in");
        let caught: Vec<u64> = catches(0, SEEDS_MAX, profile, &broken)
            .take(ENOUGH)
            .collect();
        assert!(
            caught.len() == ENOUGH,
            "{fault:?} is caught by {caught:?} only"
        );
        for seed in caught {
            let found = run_seed(seed, profile, &broken).expect_err("it was caught");
            assert!(found.what.contains("counted again"), "{fault:?}: {found}");
            let unseen = run_seed(seed, profile, &broken.uncounted());
            assert!(
                unseen.is_ok(),
                "{fault:?} is caught without counting: {unseen:?}"
            );
        }
    }
}
