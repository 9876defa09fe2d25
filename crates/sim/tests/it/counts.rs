//! What the statistics call a hit.

use crate::common;
use crate::life::{Life, pool};
use hearth_engine::EngineOptions;
use hearth_engine::api::{DiskConfig, ReqError, Request};
use hearth_engine::stats::DiskCounters;
use hearth_io::{BLOCK, Buf};

const DISK: u16 = 1;
const SIZE: u64 = 1024 * BLOCK;

fn counters(life: &Life) -> DiskCounters {
    life.engine.stats(DISK, 1).expect("known").counters
}

fn write(life: &mut Life, block: u64) {
    let (at, buf) = (block * BLOCK, Buf::zeroed(BLOCK as usize));
    life.ask(Request::write(1, DISK, at, BLOCK, false, &buf, life.now));
}

fn read(life: &mut Life, block: u64, count: u64) -> Result<(), ReqError> {
    let (at, len) = (block * BLOCK, count * BLOCK);
    let buf = Buf::zeroed(len as usize);
    life.try_ask(Request::read(1, DISK, at, len, &buf, life.now))
}

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

/// Cache blocks larger than a request make the origin read more than the client did.
#[test]
fn a_wider_fill_is_not_what_the_client_read() {
    let mut flash = pool();
    let config = DiskConfig {
        block_size: 16 * BLOCK as u32,
        ..common::disk(DISK, SIZE)
    };
    let mut life = Life::new(&mut flash, EngineOptions::default(), config);
    read(&mut life, 3, 1).expect("read");
    life.settle();
    let counters = counters(&life);
    assert_eq!(counters.origin_read_bytes, 16 * BLOCK);
    assert_eq!(counters.fills, 16);
    assert_eq!(counters.read_miss_bytes, BLOCK);
    assert_eq!(counters.read_hit_bytes, 0);
}

/// A read that failed is an error, and neither hit nor miss, whatever of it was on flash.
#[test]
fn reads_that_failed_are_errors_only() {
    let mut flash = pool();
    let config = common::disk(DISK, SIZE);
    let options = EngineOptions {
        idle_ns: u64::MAX,
        prefetch: false,
        ..EngineOptions::default()
    };
    let mut life = Life::new(&mut flash, options, config);
    write(&mut life, 1);
    let (batch, blocks) = life.written[0];
    life.flash.rot((batch + blocks - 1) as usize);
    life.origin.faults.bad_ranges.push(8 * BLOCK..9 * BLOCK);
    // What fails takes its time, too.
    life.now += 1_000_000;
    for block in [1, 8] {
        read(&mut life, block, 1).expect_err("a bad block");
    }
    // One half of it is where the origin is bad.
    write(&mut life, 7);
    read(&mut life, 7, 2).expect_err("a bad block");
    let stats = life.engine.stats(DISK, 1).expect("known");
    let c = stats.counters;
    assert_eq!(c.errors, 3);
    assert_eq!(c.read_hits + c.read_partial_hits + c.read_misses, 0);
    assert_eq!(c.read_ns, 0);
    let latencies = [stats.read_hit_latency, stats.read_miss_latency];
    assert_eq!(latencies.map(|l| l.count), [0, 0]);
    read(&mut life, 7, 1).expect("a hit");
    read(&mut life, 9, 1).expect("a miss");
    let c = counters(&life);
    assert_eq!((c.read_hits, c.read_misses, c.errors), (1, 1, 3));
}

/// A long read that finds some of its blocks on flash passes the cache once, not once for every gap.
#[test]
fn a_read_of_a_stream_passes_the_cache_once() {
    let mut flash = pool();
    let config = DiskConfig {
        seq_cutoff: BLOCK,
        ..common::disk(DISK, SIZE)
    };
    let options = EngineOptions {
        prefetch: false,
        ..EngineOptions::default()
    };
    let mut life = Life::new(&mut flash, options, config);
    for block in [3, 8] {
        write(&mut life, block);
    }
    read(&mut life, 0, 16).expect("read");
    let c = counters(&life);
    assert_eq!((c.origin_reads, c.read_partial_hits), (3, 1));
    assert_eq!(c.bypassed_sequential, 1);
    read(&mut life, 16, 16).expect("read");
    assert_eq!(counters(&life).bypassed_sequential, 2);
}
