//! A few hundred worlds of the real engine, enough to notice a broken promise before a commit;
//! `hearth-sim --seeds 10000` runs more.

use hearth_sim::profile::PROFILES;
use hearth_sim::real::Real;
use hearth_sim::runner::{run_many, run_seed};

#[test]
fn worlds_hold() {
    let summary = run_many(0, 200, 2, "mixed", &Real::default(), &|_, _| {});
    assert!(summary.failures.is_empty(), "{}", summary.failures[0]);
    for profile in &PROFILES {
        let summary = run_many(50_000, 10, 2, profile.name, &Real::default(), &|_, _| {});
        assert!(summary.failures.is_empty(), "{}", summary.failures[0]);
    }
}

/// Worlds that once came to a stop, or gave flash up without need: segments were read before they were complete and were never
/// freed, and a block that was lost kept its segment, where few segments were left.
#[test]
fn worlds_with_few_good_places_go_on() {
    for seed in [963, 1030, 1269, 3014, 4915, 5897] {
        let ran = run_seed(seed, "bad-places", &Real::default());
        assert!(ran.is_ok(), "{:?}", ran.err().map(|f| f.what));
    }
}

#[test]
fn same_seed_same_digest() {
    for seed in 0..30 {
        let run = || {
            run_seed(seed, "mixed", &Real::default())
                .map(|r| r.digest)
                .map_err(|f| f.what)
        };
        assert_eq!(run(), run(), "seed {seed}");
    }
}
