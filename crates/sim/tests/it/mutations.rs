//! Each deliberate fault of the engine must be caught by some seed: a simulation that misses
//! one would miss the same mistake made by accident.
#![cfg(feature = "mutations")]

use crate::grown;
use hearth_engine::faults::{Fault, Faults};
use hearth_sim::gate::{self, ENOUGH, SEARCH_FAULT};
use hearth_sim::real::Real;
use hearth_sim::runner::{catches, run_seed};
use std::sync::Mutex;

const THREADS: usize = 2;

/// Random worlds hardly ever cut the power between a disk's growth and the next flush of the log, and
/// then read its one odd block.
#[test]
fn a_disk_that_grows_too_early_is_caught() {
    assert!(grown::padding_is_served(0, Faults(Some(Fault::GrowEarly))));
    assert!(!grown::padding_is_served(0, Faults::default()));
}

/// Faults of the engine, of mirrors under it, of the replacement of devices and of the registry.
#[test]
fn every_fault_is_caught() {
    std::panic::set_hook(Box::new(|_| {}));
    let faults = gate::faults().expect("built with the feature");
    let (missed, stale) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    gate::in_parallel(&faults, THREADS, |broken| {
        let caught = gate::is_caught(broken);
        if caught.seeds.len() < ENOUGH {
            let mut missed = missed.lock().expect("no panic");
            missed.push((broken.name.clone(), caught.seeds));
        }
        if caught.stale {
            stale.lock().expect("no panic").push(broken.name.clone());
        }
    });
    drop(std::panic::take_hook());
    let (missed, stale) = (missed.into_inner().unwrap(), stale.into_inner().unwrap());
    if !stale.is_empty() {
        println!("recorded seeds are stale, run scripts/seeds.sh: {stale:?}");
    }
    assert!(
        missed.is_empty(),
        "caught by fewer than {ENOUGH} of {SEARCH_FAULT} seeds: {missed:?}"
    );
}

/// A wrong count changes no answer at first, so the oracle does not detect it.
#[test]
fn wrong_count_is_caught_by_recount_only() {
    for fault in Fault::BY_COUNTS {
        let profile = match fault {
            Fault::GivenUpStaysPinned => "flash-death",
            _ => "write-back",
        };
        let broken = Real::with(fault).expect("it is built in");
        let caught: Vec<u64> = catches(0, SEARCH_FAULT, profile, &broken)
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
