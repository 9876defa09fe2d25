//! Copies of the origin between memory and flash: they answer reads, are written once, and a write makes them void.

use crate::common;
use crate::life::{Life, open, pool};
use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, ReqOp, Request};
use hearth_engine::stats::DiskCounters;
use hearth_engine::{Engine, EngineOptions};
use hearth_io::{BLOCK, Buf};
use hearth_sim::device::SimDevice;

const DISK: u16 = 1;
const SIZE: u64 = 1024 * BLOCK;

/// What was read gathers before it is appended. A write to a part of it voids that part only, and
/// in write-through what was written is kept: somebody read it.
#[test]
fn a_write_into_a_copy_on_its_way_costs_what_was_written() {
    for (mode, cached) in [(Mode::WriteThrough, 16), (Mode::WriteAround, 14)] {
        let mut flash = pool();
        // A crash while the origin may be newer than the copies costs the whole region.
        let options = || EngineOptions {
            intent_idle_ns: 0,
            ..EngineOptions::default()
        };
        let config = DiskConfig {
            mode,
            ..common::disk(DISK, SIZE)
        };
        let mut life = Life::new(&mut flash, options(), config.clone());
        let new = Buf::zeroed(2 * BLOCK as usize);
        new.all().bytes_mut().fill(6);
        // The region's intent is recorded: nothing else pushes the copies to flash early.
        life.ask(Request::write(0, DISK, 100 * BLOCK, 512, false, &new, 1));
        let buf = Buf::zeroed(16 * BLOCK as usize);
        life.ask(Request::read(1, DISK, 0, 16 * BLOCK, &buf, 1));
        life.ask(Request::write(2, DISK, BLOCK, 2 * BLOCK, false, &new, 1));
        life.settle();
        let stats = |engine: &Engine| engine.stats(DISK, 1).expect("known");
        assert_eq!(stats(&life.engine).cached_blocks, cached, "{mode:?}");

        let origin_reads = stats(&life.engine).counters.origin_read_bytes;
        life.ask(Request::read(3, DISK, 0, 16 * BLOCK, &buf, 1));
        let all = buf.all();
        let bytes: Vec<u8> = all.bytes().chunks(BLOCK as usize).map(|b| b[0]).collect();
        let mut expected = [0; 16];
        expected[1..3].fill(6);
        assert_eq!(bytes, expected, "{mode:?}");
        let reread = stats(&life.engine).counters.origin_read_bytes - origin_reads;
        assert_eq!(reread, (16 - cached) * BLOCK, "{mode:?}");

        // Nor does a crash bring back what was overwritten.
        life.ask(Request::new(4, DISK, ReqOp::Flush, 0, 0, None, 1));
        life.settle();
        let before = stats(&life.engine).cached_blocks;
        flash.process_death();
        let (engine, _) = open(&mut flash, options(), &config).expect("opened");
        assert_eq!(stats(&engine).cached_blocks, before, "{mode:?}");
    }
}

const MODES: [Mode; 3] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround];
/// Blocks of a test that all fit on flash.
const BLOCKS: u64 = 1000;

fn life(flash: &mut SimDevice, mode: Mode) -> Life<'_> {
    let options = EngineOptions {
        prefetch: false,
        ..EngineOptions::default()
    };
    let config = DiskConfig {
        mode,
        ..common::disk(DISK, SIZE)
    };
    Life::new(flash, options, config)
}

fn read(life: &mut Life, block: u64) {
    let buf = Buf::zeroed(BLOCK as usize);
    life.ask(Request::read(1, DISK, block * BLOCK, BLOCK, &buf, life.now));
}

fn write(life: &mut Life, block: u64) {
    let (at, buf) = (block * BLOCK, Buf::zeroed(BLOCK as usize));
    life.ask(Request::write(1, DISK, at, BLOCK, false, &buf, life.now));
}

fn counters(life: &Life) -> DiskCounters {
    life.engine.stats(DISK, 1).expect("known").counters
}

/// Blocks of clients' data that were written to flash.
fn payload(life: &Life) -> u64 {
    life.engine.pool_stats().counters.flash_payload_bytes / BLOCK
}

/// While flash fills for the first time, a miss goes to the append queue.
#[test]
fn block_read_twice_hits_and_is_written_once() {
    for mode in MODES {
        let mut flash = pool();
        let mut life = life(&mut flash, mode);
        for block in 0..BLOCKS {
            read(&mut life, block);
            read(&mut life, block);
        }
        life.settle();
        let c = counters(&life);
        let hits = (c.read_hits, c.read_misses, payload(&life));
        assert_eq!(hits, (BLOCKS, BLOCKS, BLOCKS), "{mode:?}");
        assert!(c.stage_hit_bytes > BLOCKS / 2 * BLOCK, "{mode:?}: from RAM");
        assert_eq!(c.origin_reads, BLOCKS, "{mode:?}");
    }
}

/// An unflushed origin may lose its content, so copies of it must not be on flash. They may be in RAM.
#[test]
fn block_kept_off_flash_hits_from_memory() {
    let mut flash = pool();
    let mut life = life(&mut flash, Mode::WriteThrough);
    life.engine.detach(DISK).expect("idle");
    let config = DiskConfig {
        mode: Mode::WriteThrough,
        ..common::disk(DISK, SIZE)
    };
    life.engine
        .attach(config, OriginState::Unknown)
        .expect("attached");
    for block in 0..100 {
        read(&mut life, block);
        read(&mut life, block);
    }
    let c = counters(&life);
    assert_eq!((c.read_hits, c.read_misses, c.fills), (100, 100, 0));
}

/// Both miss, for the origin has not answered the first.
#[test]
fn block_read_by_two_clients_is_written_once() {
    for mode in MODES {
        let mut flash = pool();
        let mut life = life(&mut flash, mode);
        let bufs = [(); 2].map(|()| Buf::zeroed(4 * BLOCK as usize));
        // They share two of their blocks.
        let both = [(0, 0), (1, 2)].map(|(tag, at)| {
            Request::read(tag, DISK, at * BLOCK, 4 * BLOCK, &bufs[tag as usize], 1)
        });
        let mut fx = Effects::default();
        life.engine.submit(1, &mut Vec::from(both), &mut fx);
        life.carry_out(&mut fx).expect("answered");
        life.settle();
        assert_eq!(payload(&life), 6, "{mode:?}");
        assert_eq!(counters(&life).fills, 6, "{mode:?}");
    }
}

/// The origin is as fast as flash, so blocks that are only written stay off flash. They are in RAM.
#[test]
fn block_written_through_then_read_hits() {
    let mut flash = pool();
    let mut life = life(&mut flash, Mode::WriteThrough);
    for block in 0..BLOCKS {
        write(&mut life, block);
    }
    life.settle();
    assert_eq!(payload(&life), 0, "nobody read it");
    for block in 0..BLOCKS {
        write(&mut life, block);
        read(&mut life, block);
    }
    life.settle();
    let c = counters(&life);
    assert_eq!((c.read_hits, c.read_misses), (BLOCKS, 0));
    assert!(payload(&life) <= BLOCKS, "{} blocks", payload(&life));
}

/// A rewrite of a block that is only in RAM is a hit, in each mode that caches.
#[test]
fn rewrite_of_block_in_memory_counts_as_hit() {
    for mode in MODES {
        let mut flash = pool();
        let mut life = life(&mut flash, mode);
        // One on its way to flash, one that was not read.
        read(&mut life, 3);
        write(&mut life, 3);
        write(&mut life, 4);
        let c = counters(&life);
        assert_eq!((c.write_hits, c.write_misses), (1, 1), "{mode:?}");
    }
    let mut flash = pool();
    let mut life = life(&mut flash, Mode::WriteThrough);
    for _ in 0..3 {
        write(&mut life, 5);
    }
    let c = counters(&life);
    assert_eq!((c.write_hits, c.write_misses), (2, 1));
}
