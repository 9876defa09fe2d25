//! What `hearth simulate` says, the engine does: the same requests hit the same share of blocks, in every mode.
//!
//! Which of two blocks is kept may hang on one count, and everything after it on that, so single workloads
//! lie apart by chance. What is held to a point (two, with prefetch) is the mean.
//! More of it, over traces: `cargo run -p hearth-sim --example agree`.

use crate::played::{SEGMENTS_MIN, Terms, compare, cut};
use hearth_simulate::WriteMode;
use hearth_simulate::device::Device;
use hearth_simulate::made::Kind;
use hearth_simulate::twin::Freed;

const REQUESTS: usize = 12_000;
/// What one workload may be apart by, in points.
const ONE: f64 = 3.0;

#[test]
fn the_simulator_and_the_engine_agree_in_every_mode() {
    let kinds = [
        Kind::Mail,
        Kind::LargeRewrites,
        Kind::Guests,
        Kind::Overwrites,
    ];
    for mode in [WriteMode::Back, WriteMode::Through, WriteMode::Around] {
        for (prefetch, mean) in [(false, 1.0), (true, 2.0)] {
            let mut sum = 0.0;
            let mut told = format!("{mode:?}, prefetch {prefetch}:");
            for kind in kinds {
                let load = cut(kind.make(1, 200_000), REQUESTS);
                let terms = Terms {
                    mode,
                    prefetch,
                    segments: SEGMENTS_MIN,
                    device: Device::HARD_DISK,
                    depth: 1,
                    freed: Freed::default(),
                };
                let both = compare(&load, &terms);
                let (engine, simulated) = (both.engine, both.simulated);
                told += &format!("\n{}: {engine:.2} %, simulated {simulated:.2} %", load.name);
                told += &format!(", {} bytes\n{}", both.capacity, both.words);
                assert!(both.apart().abs() < ONE, "{told}");
                sum += both.apart();
            }
            assert!((sum / kinds.len() as f64).abs() < mean, "{told}");
        }
    }
}
