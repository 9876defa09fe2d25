//! What a start after a crash makes of flash it cannot read everywhere, and of a disk that grew.

use crate::common;
use crate::life;
use crate::life::{Life, pool};
use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, Request};
use hearth_engine::{Engine, EngineOptions, KnownDisk, OpenError, OpenReport, OpenedFrom};
use hearth_format::{CheckpointHeader, Superblock};
use hearth_io::{BLOCK, Buf, IoOp, Media, Target};
use hearth_sim::device::SimDevice;
use std::io;

const DISK: u16 = 1;
const SIZE: u64 = 1024 * BLOCK;

fn options(accept_damage: bool) -> EngineOptions {
    EngineOptions {
        accept_damage,
        idle_ns: u64::MAX,
        ..EngineOptions::default()
    }
}

fn open(flash: &mut SimDevice, accept_damage: bool) -> Result<(Engine, OpenReport), OpenError> {
    life::open(flash, options(accept_damage), &common::disk(DISK, SIZE))
}

/// One block of flash cannot be read any more, and no other.
fn bad_block(flash: &mut SimDevice, block: u64) {
    flash.faults.bad_ranges.clear();
    let range = block * BLOCK..(block + 1) * BLOCK;
    flash.faults.bad_ranges.push(range);
}

fn life(flash: &mut SimDevice) -> Life<'_> {
    Life::new(flash, options(false), common::disk(DISK, SIZE))
}

/// Writes a block, durably.
fn write(life: &mut Life, block: u64) {
    let buf = Buf::zeroed(BLOCK as usize);
    buf.all().bytes_mut().fill(block as u8 + 1);
    let at = block * BLOCK;
    life.ask(Request::write(1, DISK, at, BLOCK, true, &buf, life.now));
}

/// Flash after four dirty blocks and a crash, and where on it their batches lie.
fn four_dirty() -> (SimDevice, Vec<(u64, u64)>) {
    let mut flash = pool();
    let mut life = life(&mut flash);
    for block in 0..4 {
        write(&mut life, block);
    }
    let written = life.written;
    flash.process_death();
    (flash, written)
}

fn dirty(report: &OpenReport) -> u64 {
    report.dirty.iter().map(|(_, blocks, _)| blocks).sum()
}

#[test]
fn a_sector_of_a_free_segment_that_cannot_be_read_is_no_obstacle() {
    let (mut flash, written) = four_dirty();
    let first = written[0].0;
    let blocks = flash.blocks() as u64;
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
    let (mut flash, written) = four_dirty();
    for (descriptor, _) in &written[..3] {
        bad_block(&mut flash, *descriptor);
        let refused = open(&mut flash, false).map(|_| ()).expect_err("refused");
        assert!(matches!(refused, OpenError::Damaged(_)), "{refused}");
    }
    let (_, report) = open(&mut flash, true).expect("what is left");
    assert_eq!(dirty(&report), 2);
}

#[test]
fn what_was_rejected_cannot_be_found_again() {
    let (mut flash, written) = four_dirty();
    let (at, len) = written[3];
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
    let config = common::disk(DISK, ODD);
    let mut life = Life::new(&mut flash, EngineOptions::default(), config.clone());
    let buf = Buf::zeroed(BLOCK as usize);
    life.ask(Request::read(1, DISK, 0, ODD, &buf, 1));
    life.settle();
    flash.process_death();
    let (engine, _) = life::open(&mut flash, EngineOptions::default(), &config).expect("opened");
    let cached = || engine.stats(DISK, 1).expect("known").cached_blocks;
    assert_eq!(cached(), 1);
    let config = common::disk(DISK, BLOCK);
    engine
        .attach(config, OriginState::Flushed)
        .expect("attached");
    assert_eq!(cached(), 0);
}

/// The checkpoint's table had another order once, and another number.
#[test]
fn a_checkpoint_with_a_section_of_another_kind_costs_a_walk_of_the_log() {
    for (kind, from) in [(3, OpenedFrom::Log), (6, OpenedFrom::Checkpoint)] {
        let (mut flash, _) = four_dirty();
        let (engine, _) = open(&mut flash, false).expect("opened");
        let mut media = flash.media(None);
        engine.close(&mut media).expect("closed");
        let layout = Superblock::load(&mut media).expect("a superblock").layout;
        let (at, bytes) = (layout.checkpoint_offset(), layout.checkpoint_bytes());
        let mut block = vec![0; BLOCK as usize];
        media.read_at(at, &mut block).expect("read");
        let mut header = CheckpointHeader::decode(&block, bytes).expect("a header");
        let mut tables = header.sections.iter_mut().filter(|s| s.kind == 6);
        tables.next().expect("a table").kind = kind;
        let block = header.encode(bytes).expect("it fits");
        media.write_at(at, &block[..]).expect("written");
        let (_, report) = open(&mut flash, false).expect("opened");
        assert_eq!(report.from, from);
        assert_eq!(dirty(&report), 4);
    }
}

#[test]
fn what_an_earlier_run_left_dirty_counts_from_the_start() {
    const NOW: u64 = 1 << 50;
    let mut flash = pool();
    write(&mut life(&mut flash), 3);
    flash.process_death();
    let (engine, _) = open(&mut flash, false).expect("opened");
    let dirty_for = |now| engine.stats(DISK, now).expect("known").dirty_for_ns;
    assert_eq!(dirty_for(NOW), 1);
    assert_eq!(dirty_for(NOW + 500), 500);
}

/// Flash of which one place is only right when it is first read.
struct Once<M> {
    media: M,
    place: u64,
    reads: u32,
}

impl<M: Media> Media for Once<M> {
    fn len(&self) -> u64 {
        self.media.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.media.read_at(offset, data)?;
        if (offset..offset + data.len() as u64).contains(&self.place) {
            self.reads += 1;
            if self.reads > 1 {
                data[(self.place - offset) as usize] ^= 1;
            }
        }
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.media.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.media.flush()
    }
}

/// A large pool's summaries are read twice. That one is not right the second time must not make its
/// segment an empty one.
#[test]
fn a_summary_that_is_right_only_once() {
    let mut flash = pool();
    let mut life = life(&mut flash);
    // More than a segment.
    for block in 0..150 {
        write(&mut life, block);
    }
    let written = life.written;
    flash.process_death();
    let known = [KnownDisk {
        id: DISK,
        size: SIZE,
        since_seq: 0,
        home: hearth_engine::api::Home::Origin,
    }];
    let layout = Superblock::load(&mut flash.media(None))
        .expect("loads")
        .layout;
    let mut summaries = (0..).map(|seg| layout.summary_offset(seg));
    let summary = summaries.find(|at| written.iter().any(|(place, _)| place * BLOCK == *at));
    let mut once = Once {
        place: summary.expect("a segment was sealed"),
        media: flash.media(None),
        reads: 0,
    };
    let options = EngineOptions {
        recovery_keep_blocks: 0,
        ..options(false)
    };
    let (_, report) = Engine::open(&mut once, options, &known).expect("opened");
    assert_eq!(once.reads, 2);
    assert_eq!(dirty(&report), 150);
}

/// A write past the cache that a crash cut short leaves an intent. As long as the disk's origin is
/// missing there is nothing to flush, and nobody waits for it; then the intent is closed.
#[test]
fn intents_wait_for_the_origin() {
    for origin in [OriginState::Unknown, OriginState::Flushed] {
        let mut flash = pool();
        let config = DiskConfig {
            mode: Mode::WriteThrough,
            ..common::disk(DISK, SIZE)
        };
        write(
            &mut Life::new(&mut flash, options(false), config.clone()),
            3,
        );
        flash.process_death();
        let (engine, _) = life::open(&mut flash, options(false), &config).expect("opened");
        let mut life = Life {
            engine,
            flash: &mut flash,
            origin: life::device(Target::Origin(DISK), SIZE),
            now: 1,
            written: Vec::new(),
        };
        let to_origin = |op: &IoOp| op.target == Target::Origin(DISK);
        let mut fx = Effects::default();
        for quiescing in [false, true, false] {
            life.engine.quiesce(quiescing);
            for _ in 0..200 {
                life.tick(&mut fx);
                assert!(!fx.ios.iter().any(to_origin), "{:?}", fx.ios);
                life.carry_out(&mut fx);
            }
            assert!(life.engine.idle(), "{}", life.engine.explain());
        }
        let drained = |engine: &Engine| engine.status(DISK).expect("known").drained;
        assert!(!drained(&life.engine), "no intent is left");
        life.engine.attach(config, origin).expect("attached");
        life.settle();
        let flushes = life.engine.stats(DISK, 1).expect("known").counters;
        let once = u64::from(origin == OriginState::Unknown);
        assert_eq!(flushes.origin_flushes, once, "{origin:?}");
        assert!(drained(&life.engine), "{}", life.engine.explain());
    }
}
