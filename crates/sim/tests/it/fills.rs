//! What becomes of copies of the origin that are overwritten before they are on flash.

use crate::common;
use crate::life::{Life, open, pool};
use hearth_engine::api::{DiskConfig, Mode, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_io::{BLOCK, Buf};

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
