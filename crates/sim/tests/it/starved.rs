//! A pool whose last free segment was spent, by one crash after the other, before anything could
//! come free: the next start must not wait for room that cannot come.

use crate::common;
use hearth_engine::api::{Effects, OriginState, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions, KnownDisk};
use hearth_io::{BLOCK, Buf, IoOp, OpKind, Target};
use hearth_sim::device::{Base, SimDevice, Tear};
use hearth_sim::prng::Prng;
use std::cell::Cell;
use std::collections::VecDeque;

const DISK: u16 = 1;
const SIZE: u64 = 256 * BLOCK;
/// Room for the fixed areas and few segments, of 1 MiB.
const FLASH_SIZE: u64 = 16 << 20;
const SEGMENT: u64 = 256 * BLOCK;
/// More lives than there are segments.
const LIVES: u64 = 20;
/// Events after which nothing more is to be hoped for.
const STEPS_MAX: usize = 20_000;

struct Bench {
    engine: Engine,
    flash: SimDevice,
    origin: SimDevice,
    /// Operations that will end.
    queue: VecDeque<(Target, u64)>,
    now: u64,
    tag: u64,
}

fn open(flash: &mut SimDevice) -> Engine {
    let known = [KnownDisk {
        id: DISK,
        size: SIZE,
        since_seq: 0,
        home: hearth_engine::api::Home::Origin,
    }];
    let (engine, _) =
        Engine::open(&mut flash.media(None), EngineOptions::default(), &known).expect("opened");
    engine
        .attach(common::disk(DISK, SIZE), OriginState::Flushed)
        .expect("attached");
    engine
}

impl Bench {
    fn new() -> Bench {
        let device = |target, size| {
            SimDevice::new(target, size, BLOCK, Base::Zeros, Tear::Block, Prng::new(7))
        };
        let mut flash = device(Target::Flash(0), FLASH_SIZE);
        common::format(&mut flash.media(None), FLASH_SIZE, 256);
        Bench {
            engine: open(&mut flash),
            flash,
            origin: device(Target::Origin(DISK), SIZE),
            queue: VecDeque::new(),
            now: 1,
            tag: 0,
        }
    }

    /// The process dies, and starts again.
    fn restart(&mut self) {
        self.queue.clear();
        self.flash.process_death();
        self.origin.process_death();
        self.engine = open(&mut self.flash);
    }

    /// Makes a request; true once it is answered. Operations that `done` refuses never end.
    fn ask(
        &mut self,
        request: impl FnOnce(u64, u64) -> Request,
        done: impl Fn(&IoOp) -> bool,
    ) -> bool {
        self.tag += 1;
        let mut fx = Effects::default();
        let request = request(self.tag, self.now);
        self.engine.submit(self.now, &mut vec![request], &mut fx);
        for _ in 0..STEPS_MAX {
            for op in fx.ios.drain(..) {
                let (target, ends) = (op.target, done(&op));
                let token = self.device(target).submit(op).0;
                if ends {
                    self.queue.push_back((target, token));
                }
            }
            if let Some(c) = fx.completions.drain(..).find(|c| c.tag == self.tag) {
                c.result.expect("nothing fails here");
                return true;
            }
            self.now += 100_000;
            let Some((target, token)) = self.queue.pop_front() else {
                self.now += 5_000_000;
                self.engine.tick(self.now, &mut fx);
                continue;
            };
            let finished = self.device(target).complete(token, 50_000);
            let mut done = vec![finished.expect("in flight").done];
            self.engine.io_done(self.now, &mut done, &mut fx);
        }
        false
    }

    fn device(&mut self, target: Target) -> &mut SimDevice {
        match target {
            Target::Flash(_) => &mut self.flash,
            Target::Origin(_) => &mut self.origin,
        }
    }

    fn write(&mut self, block: u64, done: impl Fn(&IoOp) -> bool) -> bool {
        let buf = Buf::zeroed(BLOCK as usize);
        buf.all().bytes_mut().fill(block as u8 + 1);
        let at = block * BLOCK;
        self.ask(
            |tag, now| Request::write(tag, DISK, at, BLOCK, false, &buf, now),
            done,
        )
    }

    fn check(&mut self, blocks: u64) {
        for block in 0..blocks {
            let buf = Buf::zeroed(BLOCK as usize);
            let at = block * BLOCK;
            let read = |tag, now| Request::read(tag, DISK, at, BLOCK, &buf, now);
            assert!(self.ask(read, |_| true), "{}", self.engine.explain());
            assert_eq!(buf.all().bytes()[0], block as u8 + 1, "block {block}");
        }
    }
}

fn writes_flash(op: &IoOp) -> bool {
    op.target == Target::Flash(0) && op.kind == OpKind::Write
}

/// Lives that each append one block, from `block` on, and end before any flush, read or write to the
/// origin does, until there is no room; how many blocks there are then.
fn live_until_full(b: &mut Bench, block: u64) -> u64 {
    let mut written = block;
    while written < LIVES && b.write(written, writes_flash) {
        written += 1;
        b.restart();
    }
    written
}

fn zero_the_first(b: &mut Bench) {
    let op = ReqOp::WriteZeroes {
        fua: false,
        punch: true,
    };
    let zero = |tag, now| Request::new(tag, DISK, op, 0, BLOCK, None, now);
    assert!(b.ask(zero, writes_flash));
}

/// Lives that end with the first batch of what is moved or, in turn, of what the origin has had, until so many
/// segments are free.
fn spend_all_but(b: &mut Bench, free: u64) {
    for life in 0.. {
        if b.engine.pool_stats().free_segments <= free {
            return;
        }
        assert!(life < 2 * LIVES, "{}", b.engine.explain());
        b.restart();
        let first = FLASH_SIZE - b.engine.pool_stats().segments * SEGMENT;
        let left = Cell::new(true);
        let destages = life % 2 == 1;
        if destages {
            // Somebody wants the disk flushed; for room alone the destager waits while a segment is coming free.
            b.engine.drain(DISK, true).expect("it is attached");
        }
        let moves = |op: &IoOp| match (op.target, op.kind) {
            (Target::Flash(0), OpKind::Read) => true,
            (Target::Flash(0), OpKind::Write) => op.offset >= first && left.replace(false),
            (Target::Flash(_), _) => false,
            (Target::Origin(_), _) => destages,
        };
        assert!(!b.write(90, moves), "{}", b.engine.explain());
    }
}

/// Zeros that were written over need no record of theirs any more, wherever that lies.
#[test]
fn zeros_written_over_do_not_keep_a_full_log_full() {
    let mut b = Bench::new();
    zero_the_first(&mut b);
    assert!(b.write(0, writes_flash));
    // Enough to be moved for a life more than one.
    for block in 100..220 {
        assert!(b.write(block, writes_flash));
    }
    b.restart();
    let written = live_until_full(&mut b, 1);
    spend_all_but(&mut b, 0);
    b.restart();
    assert!(b.write(90, |_| true), "{}", b.engine.explain());
    b.check(written);
}

/// What has to be logged again fits into the head when only that is left, and the origin takes nothing.
#[test]
fn one_record_fits_where_the_last_blocks_do() {
    let mut b = Bench::new();
    zero_the_first(&mut b);
    for block in 100..220 {
        assert!(b.write(block, writes_flash));
    }
    b.restart();
    live_until_full(&mut b, 1);
    spend_all_but(&mut b, 1);
    b.restart();
    let flash = |op: &IoOp| op.target == Target::Flash(0);
    assert!(b.write(90, flash), "{}", b.engine.explain());
}

#[test]
fn a_log_without_a_free_segment_comes_free() {
    let mut b = Bench::new();
    let written = live_until_full(&mut b, 0);
    assert!(written >= 6, "only {written} writes were answered");
    assert!(written < LIVES, "the log was never full");
    b.restart();

    for block in written..written + 8 {
        assert!(b.write(block, |_| true), "{}", b.engine.explain());
    }
    b.check(written + 8);
    let flush = |tag, now| Request::new(tag, DISK, ReqOp::Flush, 0, 0, None, now);
    assert!(b.ask(flush, |_| true), "{}", b.engine.explain());
    b.flash.power_cut();
    b.restart();
    b.check(written + 8);
}

/// A log goes round with a head, a reserve and one segment to evict.
#[test]
fn flash_of_which_too_little_takes_writes_is_given_up_before_writes_wait_for_ever() {
    let mut b = Bench::new();
    let segments = b.engine.pool_stats().segments;
    let bytes = SEGMENT;
    let first = FLASH_SIZE - segments * bytes;
    // Never so many in a row that this alone would be enough.
    let sound = |segment: u64| segment % 4 == 0;
    let bad = (0..segments).filter(|s| !sound(*s));
    b.flash.faults.bad_places = bad
        .map(|s| first + s * bytes..first + (s + 1) * bytes)
        .collect();
    assert!((0..segments).filter(|s| sound(*s)).count() < 4);
    for at in 0..5 * 256 {
        let what = b.engine.explain();
        assert!(b.write(at % 255, |_| true), "write {at} waits: {what}");
    }
    assert!(b.engine.pool_stats().flash_failed);
    b.check(255);
}
