//! Hits in flight, and what the core does meanwhile.

use crate::api::{Completion, DiskConfig, Effects, Mode, OriginState, ReqError, Request};
use crate::{ControlError, Engine, EngineOptions};
use hearth_format::{Layout, Superblock, Uuid};
use hearth_io::{BLOCK, Buf, IoDone, IoError, IoOp, Media, OpKind, Sparse, Target};

const BYTES: u64 = 64 << 20;
const DISK: u16 = 1;

/// An engine with one disk, of which blocks 0 to 15 are on flash and hold 7s.
struct Rig {
    engine: Engine,
    flash: Sparse,
    fx: Effects,
    now: u64,
}

impl Rig {
    fn new() -> Rig {
        let mut flash = Sparse::new(BYTES);
        let layout = Layout::for_device(BYTES, 256).unwrap();
        let uuid = Uuid::from_u128(1);
        Superblock::new(layout, uuid, uuid, "lanes", 0)
            .store(&mut flash)
            .unwrap();
        let (engine, _) = Engine::open(&mut flash, EngineOptions::default(), &[]).unwrap();
        let cfg = DiskConfig {
            id: DISK,
            size: 1 << 30,
            origin_align: 512,
            mode: Mode::WriteBack,
            block_size: 4096,
            min_bytes: 0,
            max_bytes: 0,
            seq_cutoff: 0,
            read_only: false,
            home: crate::api::Home::Origin,
        };
        engine.attach(cfg, OriginState::Flushed).unwrap();
        let (fx, now) = (Effects::default(), 1_000_000);
        let mut rig = Rig {
            engine,
            flash,
            fx,
            now,
        };
        let buf = Buf::zeroed(16 * BLOCK as usize);
        buf.all().bytes_mut().fill(7);
        let write = Request::write(1, DISK, 0, 16 * BLOCK, false, &buf, rig.now);
        rig.engine.submit(rig.now, &mut vec![write], &mut rig.fx);
        assert_eq!(rig.rest().len(), 1);
        rig
    }

    /// Carries out an operation; what is dirty goes nowhere, and origins hold zeros.
    fn carry_out(&mut self, mut op: IoOp) -> IoDone {
        if matches!(op.target, Target::Flash(_)) {
            let mut at = op.offset;
            for buf in &mut op.bufs {
                match op.kind {
                    OpKind::Read => self.flash.read_at(at, buf.bytes_mut()).unwrap(),
                    OpKind::Write => self.flash.write_at(at, buf.bytes()).unwrap(),
                    _ => {}
                }
                at += buf.len() as u64;
            }
        }
        op.done(Ok(()), 10_000)
    }

    /// Carries out all there is; returns what was answered.
    fn rest(&mut self) -> Vec<Completion> {
        for _ in 0..1000 {
            self.now += 1000;
            let ops: Vec<IoOp> = self.fx.ios.drain(..).collect();
            if ops.is_empty() {
                return self.fx.completions.drain(..).collect();
            }
            let mut dones = ops.into_iter().map(|op| self.carry_out(op)).collect();
            self.engine.io_done(self.now, &mut dones, &mut self.fx);
        }
        panic!("the engine does not come to rest");
    }

    fn read(&mut self, owner: u32, block: u64, count: u64) -> Buf {
        let buf = Buf::zeroed((count * BLOCK) as usize);
        let mut r = Request::read(9, DISK, block * BLOCK, count * BLOCK, &buf, self.now);
        r.owner = owner;
        self.engine.submit(self.now, &mut vec![r], &mut self.fx);
        buf
    }

    /// A hit whose operation is in flight.
    fn hit(&mut self, owner: u32) -> IoOp {
        self.read(owner, 3, 1);
        assert_eq!(self.fx.ios.len(), 1);
        let op = self.fx.ios.remove(0);
        assert_ne!(op.id >> 63, 0, "not a lane's: {op:?}");
        op
    }

    fn done(&mut self, done: IoDone) {
        self.now += 1000;
        self.engine.io_done(self.now, &mut vec![done], &mut self.fx);
    }
}

#[test]
fn hits_of_all_threads_are_counted() {
    let mut rig = Rig::new();
    for owner in 0..5 {
        let buf = rig.read(owner, 0, 16);
        let answers = rig.rest();
        assert!(answers.len() == 1 && answers[0].result.is_ok() && answers[0].owner == owner);
        assert!(buf.all().bytes().iter().all(|b| *b == 7));
    }
    let stats = rig.engine.stats(DISK, rig.now).unwrap();
    assert_eq!(stats.counters.read_hits, 5);
    assert_eq!(stats.counters.read_hit_bytes, 5 * 16 * BLOCK);
    assert_eq!(stats.read_hit_latency.count, 5);
    // What is counted is not counted twice, nor lost when a lane forgets a quiet disk.
    for _ in 0..3 {
        rig.now += 2_000_000_000;
        rig.engine.tick(rig.now, &mut rig.fx);
        rig.rest();
    }
    let later = rig.engine.stats(DISK, rig.now).unwrap();
    assert_eq!(later.counters.read_hits, 5);
    assert_eq!(later.read_hit_latency.count, 5);
    assert!(rig.engine.pool_stats().counters.flash_read_bytes >= 5 * 16 * BLOCK);
}

#[test]
fn a_hit_that_ends_after_its_disk_was_fenced_is_not_answered() {
    let mut rig = Rig::new();
    let op = rig.hit(2);
    rig.engine.fence(DISK, rig.now, &mut rig.fx).unwrap();
    let done = rig.carry_out(op);
    rig.done(done);
    assert_eq!(rig.fx.completions[0].result, Err(ReqError::Io));
    assert_eq!(rig.engine.stats(DISK, rig.now).unwrap().counters.errors, 1);
}

#[test]
fn a_disk_stays_while_hits_of_it_are_in_flight() {
    let mut rig = Rig::new();
    let op = rig.hit(3);
    assert_eq!(rig.engine.status(DISK).unwrap().in_flight, 1);
    assert_eq!(rig.engine.detach(DISK), Err(ControlError::Busy));
    assert_eq!(
        rig.engine.forget(DISK, &mut Effects::default()),
        Err(ControlError::Busy)
    );
    // It goes on serving.
    let second = rig.hit(0);
    for op in [op, second] {
        let done = rig.carry_out(op);
        rig.done(done);
    }
    assert!(rig.fx.completions.drain(..).all(|c| c.result.is_ok()));
    assert_eq!(rig.engine.detach(DISK), Ok(()));
    rig.read(0, 3, 1);
    assert_eq!(rig.fx.completions[0].result, Err(ReqError::NoDisk));
}

#[test]
fn the_engine_is_not_idle_while_a_hit_is_in_flight() {
    let mut rig = Rig::new();
    let op = rig.hit(1);
    rig.engine.quiesce(true);
    for _ in 0..100 {
        rig.engine.tick(rig.now, &mut rig.fx);
        rig.rest();
    }
    assert!(!rig.engine.idle());
    rig.read(1, 3, 1);
    let refused = rig.fx.completions.pop().unwrap();
    assert_eq!(refused.result, Err(ReqError::Shutdown));
    let done = rig.carry_out(op);
    rig.done(done);
    assert!(rig.fx.completions.pop().unwrap().result.is_ok());
    assert!(rig.engine.idle());
}

#[test]
fn a_segment_that_a_hit_reads_is_pinned_and_who_waits_for_it_is_told() {
    let mut rig = Rig::new();
    let op = rig.hit(7);
    let shared = rig.engine.core().shared.clone();
    let first = rig.engine.core().flash.layout.segment_offset(0);
    let seg = ((op.offset - first) / BLOCK) as u32 / shared.segment_slots;
    assert!(shared.pinned(seg));
    assert!(!shared.pinned(seg + 1));
    assert!(shared.pinned(seg));
    assert!(shared.wanted.load(std::sync::atomic::Ordering::Relaxed));
    let done = rig.carry_out(op);
    rig.done(done);
    assert!(!shared.pinned(seg));
    // The visit has found that nobody waits any more.
    assert!(!shared.wanted.load(std::sync::atomic::Ordering::Relaxed));
}

#[test]
fn a_hit_whose_read_fails_is_the_cores() {
    let mut rig = Rig::new();
    // Flash refuses it: the core counts that, and answers.
    let op = rig.hit(4);
    let failed = IoDone {
        op,
        result: Err(IoError::Os(5)),
        bad_blocks: Default::default(),
        latency_ns: 1000,
    };
    rig.done(failed);
    assert_eq!(rig.engine.pool_stats().counters.flash_errors, 1);
    let answers = rig.rest();
    assert_eq!(answers.len(), 1);
    assert_eq!(rig.engine.status(DISK).unwrap().in_flight, 0);
    // Its checksum does not match: what is dirty is lost then, and never served.
    let mut op = rig.hit(4);
    op.crcs[0] ^= 1;
    let done = rig.carry_out(op);
    assert_eq!(done.bad_blocks.as_slice(), [0]);
    rig.done(done);
    assert_eq!(rig.fx.completions.pop().unwrap().result, Err(ReqError::Io));
    rig.read(0, 3, 1);
    assert_eq!(rig.rest().pop().unwrap().result, Err(ReqError::Io));
}

#[test]
fn while_flash_is_slow_the_core_decides() {
    let mut rig = Rig::new();
    let op = rig.hit(0);
    let done = IoDone {
        latency_ns: 5_000_000_000,
        ..rig.carry_out(op)
    };
    rig.done(done);
    rig.read(0, 3, 1);
    assert_eq!(rig.fx.ios[0].id >> 63, 0);
    rig.rest();
    rig.engine.set_mode(DISK, Mode::Off).unwrap();
    rig.read(0, 3, 1);
    assert_eq!(rig.fx.ios[0].id >> 63, 0);
}

#[test]
fn uses_reach_the_policy_and_the_slots() {
    let mut rig = Rig::new();
    for _ in 0..2 {
        rig.read(6, 3, 1);
        rig.rest();
    }
    rig.engine.tick(rig.now, &mut rig.fx);
    let core = rig.engine.core();
    let slot = core
        .cache
        .index
        .get(crate::index::Key::new(DISK, 3))
        .unwrap();
    assert_eq!(core.cache.index.slot(slot).unwrap().freq, 2);
    let other = core
        .cache
        .index
        .get(crate::index::Key::new(DISK, 4))
        .unwrap();
    assert_eq!(core.cache.index.slot(other).unwrap().freq, 0);
}
