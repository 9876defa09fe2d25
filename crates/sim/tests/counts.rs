//! What the statistics call a hit.

mod common;
#[path = "common/life.rs"]
mod life;

use hearth_engine::EngineOptions;
use hearth_engine::api::Request;
use hearth_io::{BLOCK, Buf};
use life::{Life, pool};

const DISK: u16 = 1;
const SIZE: u64 = 1024 * BLOCK;

/// A write is a hit if all it covers is cached; its latency is counted with its kind.
#[test]
fn writes_are_told_apart() {
    let mut flash = pool();
    let config = common::disk(DISK, SIZE);
    let mut life = Life::new(&mut flash, EngineOptions::default(), config);
    // A miss, two hits, half a hit.
    for (tag, at, count) in [(1, 0, 2), (2, 0, 2), (3, 1, 1), (4, 1, 2)] {
        let bytes = count * BLOCK;
        let buf = Buf::zeroed(bytes as usize);
        life.ask(Request::write(
            tag,
            DISK,
            at * BLOCK,
            bytes,
            false,
            &buf,
            life.now,
        ));
    }
    life.settle();
    let stats = life.engine.stats(DISK, 1).expect("known");
    let counters = stats.counters;
    assert_eq!(counters.write_misses, 1);
    assert_eq!(counters.write_hits, 2);
    assert_eq!(counters.write_partial_hits, 1);
    assert_eq!(stats.write_hit_latency.count, 2);
    assert_eq!(stats.write_miss_latency.count, 2);
}
