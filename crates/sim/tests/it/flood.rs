//! A full cache, and more writes at a time than it has room for: does that go on?

use crate::played::{Flood, flood};
use hearth_engine::api::Mode;
use hearth_engine::faults::Faults;

/// As many segments as 64 MiB have.
const SEGMENTS: u64 = 57;
/// Blocks of the disk, and how many of them are cached at first.
const BLOCKS: u64 = 32_768;
const CACHED: u64 = 24_576;
const WRITES: u64 = 40_000;
/// A write may wait until segments come free, one after the other.
const LIMIT_NS: u64 = 2_000_000_000;

fn spread(n: u64) -> u64 {
    let x = (n ^ (n >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 11
}

fn write_all_over(mode: Mode, faults: Faults) -> Flood {
    let blocks: Vec<_> = (0..WRITES).map(|i| (spread(i) % BLOCKS, 1)).collect();
    flood(SEGMENTS, CACHED, mode, &blocks, 24, LIMIT_NS, faults)
}

/// Records that old copies are void filled segments, which were freed, moved around and filled again for ever.
#[test]
fn a_flood_of_writes_past_a_full_cache_goes_on() {
    for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
        let done = write_all_over(mode, Faults::none());
        println!("{mode:?}: {done:?}");
        // A record each, or a block: and as much again for what is moved and for descriptors.
        let most = match mode {
            Mode::WriteThrough => WRITES * 3,
            _ => WRITES / 8,
        };
        assert!(done.flash < most, "{mode:?}: {done:?}");
    }
}

/// Blocks and large pieces, in write-back: room is found for all of them.
#[test]
fn large_writes_to_a_full_cache_go_on() {
    let blocks: Vec<_> = (0..2000)
        .map(|i| {
            let count = [1, 8, 64, 256][spread(i ^ 7 << 20) as usize % 4];
            (spread(i) % (BLOCKS - count), count)
        })
        .collect();
    let faults = Faults::none();
    flood(
        SEGMENTS,
        CACHED,
        Mode::WriteBack,
        &blocks,
        24,
        5 * LIMIT_NS,
        faults,
    );
}

/// The test above is what catches this fault.
#[cfg(feature = "mutations")]
#[test]
fn freeing_for_nothing_is_caught() {
    use hearth_engine::faults::Fault;
    std::panic::set_hook(Box::new(|_| {}));
    let faults = Faults(Some(Fault::FreeForNothing));
    let broken = std::panic::catch_unwind(|| write_all_over(Mode::WriteAround, faults));
    drop(std::panic::take_hook());
    assert!(broken.is_err());
}
