//! What the maximum of a disk asks of it.

use crate::common;
use crate::life::{Life, pool};
use hearth_engine::EngineOptions;
use hearth_engine::api::{DiskConfig, Request};
use hearth_io::{BLOCK, Buf};

const DISK: u16 = 1;
const SIZE: u64 = 1024 * BLOCK;
const MAX: u64 = 256;

/// A disk at its maximum makes room by dropping copies. Only when much of what it may have is
/// dirty is the origin written, which clients' reads would wait behind.
#[test]
fn a_full_share_is_no_hurry_to_destage() {
    let mut flash = pool();
    let options = EngineOptions {
        idle_ns: u64::MAX,
        ..EngineOptions::default()
    };
    let (low, high) = (options.dirty_low_percent, options.dirty_high_percent);
    let config = DiskConfig {
        max_bytes: MAX * BLOCK,
        ..common::disk(DISK, SIZE)
    };
    let mut life = Life::new(&mut flash, options, config);
    let io = |life: &mut Life, block: u64, count: u64, write: bool| {
        let (at, len) = (block * BLOCK, count * BLOCK);
        let buf = Buf::zeroed(len as usize);
        life.ask(if write {
            Request::write(1, DISK, at, len, false, &buf, life.now)
        } else {
            Request::read(1, DISK, at, len, &buf, life.now)
        });
        life.settle();
        life.engine.stats(DISK, life.now).expect("known")
    };
    for block in (0..MAX).step_by(16) {
        io(&mut life, block, 16, false);
    }
    let few = MAX * u64::from(low) / 100;
    let stats = io(&mut life, 512, few, true);
    assert_eq!(stats.dirty_blocks, few);
    assert!(stats.cached_blocks <= MAX, "{}", stats.cached_blocks);
    assert!(stats.cached_blocks > MAX / 2, "{}", stats.cached_blocks);
    let many = MAX * u64::from(high) / 100;
    let stats = io(&mut life, 512, many, true);
    assert!(stats.dirty_blocks < many, "{}", stats.dirty_blocks);
    assert!(stats.counters.destaged > 0);
}
