//! What a start after a crash makes of flash it cannot read everywhere, and of a disk that grew.

mod common;

use hearth_engine::api::{Effects, OriginState, Request};
use hearth_engine::{Engine, EngineOptions, KnownDisk, OpenError, OpenReport};
use hearth_io::{BLOCK, Buf, OpKind, Target};
use hearth_sim::device::{Base, SimDevice, Tear};
use hearth_sim::prng::Prng;

const DISK: u16 = 1;
const SIZE: u64 = 1024 * BLOCK;
const FLASH_SIZE: u64 = 16 << 20;
const SEGMENT_BLOCKS: u32 = 256;

fn device(target: Target, size: u64) -> SimDevice {
    SimDevice::new(target, size, BLOCK, Base::Zeros, Tear::Block, Prng::new(7))
}

fn pool() -> SimDevice {
    let mut flash = device(Target::Flash(0), FLASH_SIZE);
    common::format(&mut flash.media(None), FLASH_SIZE, SEGMENT_BLOCKS);
    flash
}

fn open(flash: &mut SimDevice, accept_damage: bool) -> Result<(Engine, OpenReport), OpenError> {
    let known = [KnownDisk {
        id: DISK,
        size: SIZE,
        since_seq: 0,
    }];
    let options = EngineOptions {
        accept_damage,
        idle_ns: u64::MAX,
        ..EngineOptions::default()
    };
    Engine::open(&mut flash.media(None), options, &known)
}

/// One block of flash cannot be read any more, and no other.
fn bad_block(flash: &mut SimDevice, block: u64) {
    flash.faults.bad_ranges.clear();
    let range = block * BLOCK..(block + 1) * BLOCK;
    flash.faults.bad_ranges.push(range);
}

/// A life of a daemon, which ends without a stop. Every operation ends at once.
struct Life<'a> {
    engine: Engine,
    flash: &'a mut SimDevice,
    origin: SimDevice,
    now: u64,
    /// Writes of flash, in order.
    written: Vec<(u64, u64)>,
}

impl<'a> Life<'a> {
    fn new(flash: &'a mut SimDevice) -> Life<'a> {
        let (engine, _) = open(flash, false).expect("opened");
        let config = common::disk(DISK, SIZE);
        engine
            .attach(config, OriginState::Flushed)
            .expect("attached");
        Life {
            engine,
            flash,
            origin: device(Target::Origin(DISK), SIZE),
            now: 1,
            written: Vec::new(),
        }
    }

    fn ask(&mut self, request: Request) {
        let mut fx = Effects::default();
        self.engine.submit(self.now, &mut vec![request], &mut fx);
        while !self.carry_out(&mut fx) {
            self.tick(&mut fx);
        }
    }

    /// Carries out all operations; true if the request was answered meanwhile.
    fn carry_out(&mut self, fx: &mut Effects) -> bool {
        while !fx.ios.is_empty() {
            let mut dones = Vec::new();
            for op in std::mem::take(&mut fx.ios) {
                let device = match op.target {
                    Target::Flash(_) => &mut *self.flash,
                    Target::Origin(_) => &mut self.origin,
                };
                if op.target == Target::Flash(0) && op.kind == OpKind::Write {
                    self.written.push((op.offset / BLOCK, op.len / BLOCK));
                }
                let token = device.submit(op).0;
                dones.push(device.complete(token, 50_000).expect("in flight").done);
            }
            self.engine.io_done(self.now, &mut dones, fx);
        }
        fx.completions.pop().is_some()
    }

    fn tick(&mut self, fx: &mut Effects) {
        self.now += 50_000_000;
        self.engine.tick(self.now, fx);
    }

    /// Writes a block, durably.
    fn write(&mut self, block: u64) {
        let buf = Buf::zeroed(BLOCK as usize);
        buf.all().bytes_mut().fill(block as u8 + 1);
        let at = block * BLOCK;
        self.ask(Request::write(1, DISK, at, BLOCK, true, &buf, self.now));
    }
}

fn dirty(report: &OpenReport) -> u64 {
    report.dirty.iter().map(|(_, blocks, _)| blocks).sum()
}

#[test]
fn a_sector_of_a_free_segment_that_cannot_be_read_is_no_obstacle() {
    let mut flash = pool();
    let mut life = Life::new(&mut flash);
    for block in 0..4 {
        life.write(block);
    }
    let first = life.written[0].0;
    let blocks = flash.blocks() as u64;
    flash.process_death();
    // Inside a segment nothing was written to, and where its summary would be.
    for bad in [blocks - 1, blocks - 100] {
        bad_block(&mut flash, bad);
        let (_, report) = open(&mut flash, false).expect("opened");
        assert_eq!(dirty(&report), 4);
    }
    // A block of data: it alone.
    bad_block(&mut flash, first + 1);
    let (_, report) = open(&mut flash, false).expect("opened");
    assert_eq!(dirty(&report), 4);
}

#[test]
fn a_descriptor_that_cannot_be_read_hides_nothing_that_was_durable() {
    let mut flash = pool();
    let mut life = Life::new(&mut flash);
    for block in 0..4 {
        life.write(block);
    }
    let descriptors: Vec<u64> = life.written.iter().map(|(at, _)| *at).collect();
    flash.process_death();
    for bad in &descriptors[..3] {
        bad_block(&mut flash, *bad);
        let refused = open(&mut flash, false).map(|_| ()).expect_err("refused");
        assert!(matches!(refused, OpenError::Damaged(_)), "{refused}");
    }
    let (_, report) = open(&mut flash, true).expect("what is left");
    assert_eq!(dirty(&report), 2);
}

#[test]
fn what_was_rejected_cannot_be_found_again() {
    let mut flash = pool();
    let mut life = Life::new(&mut flash);
    for block in 0..4 {
        life.write(block);
    }
    let (at, len) = life.written[3];
    flash.process_death();
    // The data of the last batch was torn; its flush had not ended.
    flash.rot((at + len - 1) as usize);
    let (_, report) = open(&mut flash, true).expect("opened");
    assert_eq!(dirty(&report), 3);
    assert!(flash.visible_block(at as usize).iter().all(|b| *b == 0));
}

#[test]
fn a_disk_that_grew_while_it_was_away_forgets_the_padding_of_its_last_block() {
    const ODD: u64 = 512;
    let mut flash = pool();
    let known = |size| KnownDisk {
        id: DISK,
        size,
        since_seq: 0,
    };
    let open = |flash: &mut SimDevice, size| {
        let options = EngineOptions::default();
        Engine::open(&mut flash.media(None), options, &[known(size)]).expect("opened")
    };
    let (engine, _) = open(&mut flash, ODD);
    let config = common::disk(DISK, ODD);
    engine
        .attach(config, OriginState::Flushed)
        .expect("attached");
    let mut life = Life {
        engine,
        flash: &mut flash,
        origin: device(Target::Origin(DISK), BLOCK),
        now: 1,
        written: Vec::new(),
    };
    let buf = Buf::zeroed(BLOCK as usize);
    life.ask(Request::read(1, DISK, 0, ODD, &buf, 1));
    // What was read gathers for a while before it is written.
    for _ in 0..10 {
        let mut fx = Effects::default();
        life.tick(&mut fx);
        life.carry_out(&mut fx);
    }
    flash.process_death();
    let (engine, _) = open(&mut flash, ODD);
    let cached = || engine.stats(DISK, 1).expect("known").cached_blocks;
    assert_eq!(cached(), 1);
    let config = common::disk(DISK, BLOCK);
    engine
        .attach(config, OriginState::Flushed)
        .expect("attached");
    assert_eq!(cached(), 0);
}

#[test]
fn what_an_earlier_run_left_dirty_counts_from_the_start() {
    const NOW: u64 = 1 << 50;
    let mut flash = pool();
    Life::new(&mut flash).write(3);
    flash.process_death();
    let (engine, _) = open(&mut flash, false).expect("opened");
    let dirty_for = |now| engine.stats(DISK, now).expect("known").dirty_for_ns;
    assert_eq!(dirty_for(NOW), 1);
    assert_eq!(dirty_for(NOW + 500), 500);
}
