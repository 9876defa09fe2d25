//! Each deliberate fault of the engine must be caught by some seed: a simulation that misses
//! one would miss the same mistake made by accident.
#![cfg(feature = "mutations")]

mod common;
#[path = "common/grown.rs"]
mod grown;
#[path = "common/judge.rs"]
mod judge;

use hearth_engine::faults::{Fault, Faults};
use hearth_sim::real::{IGNORE_SINCE, Real};
use hearth_sim::runner::{first_failure, run_seed};

/// Most seeds tried for one fault.
const SEEDS_MAX: u64 = 3000;

#[test]
fn a_registry_that_forgets_since_when_a_disk_exists_is_caught() {
    let maker = Real::broken(IGNORE_SINCE).expect("it needs no feature");
    let found = first_failure(0, SEEDS_MAX, "change", &maker).expect("caught");
    assert!(run_seed(found.seed, "change", &Real::default()).is_ok());
}

/// Where a fault shows. A log is starved so rarely that only the profile made for it will do.
fn profile(fault: Fault) -> &'static str {
    match fault {
        Fault::StarveForever => "full",
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
    std::panic::set_hook(Box::new(|_| {}));
    // That one has a test of its own.
    let by_seeds = Fault::ALL.into_iter().filter(|f| *f != Fault::GrowEarly);
    let by_seeds: Vec<Fault> = by_seeds.collect();
    let missed: Vec<Fault> = std::thread::scope(|scope| {
        let halves: Vec<_> = by_seeds
            .chunks(by_seeds.len().div_ceil(2))
            .map(|faults| {
                scope.spawn(move || {
                    faults
                        .iter()
                        .copied()
                        .filter(|fault| match Real::with(*fault) {
                            Ok(maker) => {
                                let profile = profile(*fault);
                                let found = first_failure(0, SEEDS_MAX, profile, &maker);
                                // The same seed must pass when nothing is broken.
                                found.is_none_or(|f| {
                                    run_seed(f.seed, profile, &Real::default()).is_err()
                                })
                            }
                            Err(_) => true,
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        halves
            .into_iter()
            .flat_map(|h| h.join().unwrap_or_default())
            .collect()
    });
    drop(std::panic::take_hook());
    assert!(
        missed.is_empty(),
        "not caught within {SEEDS_MAX} seeds: {missed:?}"
    );
}
