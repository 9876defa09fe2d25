//! Guests overwrite what flash holds, for so long that everything in the log has moved many times: does
//! that go on, with the hits it should have, and at what cost?

use crate::played::{SEGMENTS_MIN, Terms, cut, parts};
use hearth_policy::reference::Kind;
use hearth_simulate::device::Device;
use hearth_simulate::twin::Freed;
use hearth_simulate::{Policy, Request, Settings, Workload, WriteMode, run};

const ACCESSES: u64 = 80_000;

fn spread(n: u64) -> u64 {
    let x = (n ^ (n >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 11
}

/// Seven of ten accesses are writes, all blocks alike.
fn uniform(blocks: u64) -> Workload {
    let requests = (0..ACCESSES).map(|i| Request {
        time_us: 0,
        block: spread(i) % blocks,
        count: 1,
        write: spread(i ^ 1 << 40) % 10 < 7,
    });
    let made = Workload::made("uniform", requests.collect::<Vec<_>>());
    cut(made, ACCESSES as usize)
}

/// Once, notes of what was destaged filled whole segments and were moved around for ever.
#[test]
fn overwrites_of_most_of_flash_go_on_and_hit() {
    for mode in [WriteMode::Back, WriteMode::Through] {
        let load = uniform(SEGMENTS_MIN * 254 * 3 / 4);
        let terms = Terms {
            mode,
            prefetch: false,
            segments: SEGMENTS_MIN,
            device: Device {
                access_us: 100,
                ..Device::HARD_DISK
            },
            depth: 1,
            freed: Freed::Oldest,
        };
        let done = &parts(std::slice::from_ref(&load), &terms)[0];
        let settings = Settings {
            write_mode: mode,
            ..Settings::default()
        };
        let lru = Policy::Reference(Kind::Lru);
        let lru = run(lru, &load, done.capacity as usize, &settings).0.score() * 100.0;
        println!(
            "{mode:?}: {:.1} of {lru:.1} %, {} blocks",
            done.hits, done.flash
        );
        assert!(
            done.hits > lru * 0.9,
            "{mode:?}: {:.1} of {lru:.1}",
            done.hits
        );
        // Each write of its own takes two blocks; as much again is moved.
        let most = ACCESSES * 5;
        assert!(done.flash < most, "{mode:?}: {} of {most}", done.flash);
    }
}
