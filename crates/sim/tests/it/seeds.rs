//! Equal seeds give equal worlds. `hearth-sim --gate` runs the worlds of the gate.

use hearth_sim::real::Real;
use hearth_sim::runner::run_seed;

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
