//! What a flash device that is gone does to the blocks only it held (invariant 7), step by step:
//! the simulation finds that something is wrong, these say what.

use crate::common;
use hearth_engine::api::{Effects, Mode, OriginState, ReqError, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_io::{BLOCK, Buf, OpKind, Target};
use hearth_sim::device::{Base, Faults, SimDevice, Tear};
use hearth_sim::prng::Prng;

const DISK: u16 = 1;
const SIZE: u64 = 64 * BLOCK;
const FLASH_SIZE: u64 = 16 << 20;
/// Events until the engine has come to rest; it needs far fewer.
const STEPS_MAX: usize = 100_000;

struct Bench {
    engine: Engine,
    flash: SimDevice,
    origin: SimDevice,
    now: u64,
    tag: u64,
    /// After so many more failed reads flash has no bad blocks.
    refusals: Option<u32>,
}

impl Bench {
    /// A write-back disk whose destager rests until it is asked.
    fn new() -> Bench {
        let device = |target, size| {
            let base = match target {
                Target::Flash(_) => Base::Zeros,
                Target::Origin(_) => Base::Stamped {
                    uid: 1,
                    holes: 0,
                    size,
                },
            };
            SimDevice::new(target, size, BLOCK, base, Tear::Block, Prng::new(7))
        };
        let mut flash = device(Target::Flash(0), FLASH_SIZE);
        let mut media = flash.media(None);
        common::format(&mut media, FLASH_SIZE, 256);
        let options = EngineOptions {
            idle_ns: u64::MAX,
            ..EngineOptions::default()
        };
        let (engine, _) = Engine::open(&mut media, options, &[]).expect("opened");
        engine
            .attach(common::disk(DISK, SIZE), OriginState::Flushed)
            .expect("attached");
        Bench {
            engine,
            flash,
            origin: device(Target::Origin(DISK), SIZE),
            now: 1,
            tag: 0,
            refusals: None,
        }
    }

    /// Makes a request and drives the engine until it is answered.
    fn ask(&mut self, request: impl FnOnce(u64, u64) -> Request) -> Result<(), ReqError> {
        self.tag += 1;
        let (tag, mut fx) = (self.tag, Effects::default());
        let mut requests = vec![request(tag, self.now)];
        self.engine.submit(self.now, &mut requests, &mut fx);
        self.drive(fx, Some(tag)).expect("answered")
    }

    fn write(&mut self, block: u64, fill: u8) -> Result<(), ReqError> {
        let buf = Buf::zeroed(BLOCK as usize);
        buf.all().bytes_mut().fill(fill);
        self.ask(|tag, now| Request::write(tag, DISK, block * BLOCK, BLOCK, true, &buf, now))
    }

    fn read(&mut self, block: u64, count: u64) -> Result<Vec<u8>, ReqError> {
        let buf = Buf::zeroed((count * BLOCK) as usize);
        self.ask(|tag, now| Request::read(tag, DISK, block * BLOCK, count * BLOCK, &buf, now))?;
        let all = buf.all();
        Ok(all.bytes().chunks(BLOCK as usize).map(|b| b[0]).collect())
    }

    /// Lets time pass until nothing more happens.
    fn rest(&mut self) {
        for _ in 0..50 {
            self.now += 2_000_000_000;
            let mut fx = Effects::default();
            self.engine.tick(self.now, &mut fx);
            self.drive(fx, None);
        }
    }

    /// Ends operations in order, until request `tag` is answered or none is left.
    fn drive(&mut self, mut fx: Effects, tag: Option<u64>) -> Option<Result<(), ReqError>> {
        let mut queue = std::collections::VecDeque::new();
        let mut answer = None;
        for _ in 0..STEPS_MAX {
            for op in fx.ios.drain(..) {
                let target = op.target;
                let device = self.device(target);
                queue.push_back((target, device.submit(op).0));
            }
            for c in fx.completions.drain(..) {
                answer = (Some(c.tag) == tag).then_some(c.result).or(answer);
            }
            self.now += 100_000;
            let Some((target, token)) = queue.pop_front() else {
                if answer.is_some() || tag.is_none() {
                    return answer;
                }
                self.engine.tick(self.now, &mut fx);
                continue;
            };
            if let Some(finished) = self.device(target).complete(token, 50_000) {
                let mut done = vec![finished.done];
                let refused = done[0].op.kind == OpKind::Read && done[0].result.is_err();
                if let Some(left) = self.refusals.as_mut().filter(|_| refused) {
                    *left -= 1;
                    if *left == 0 {
                        self.flash.faults.bad_ranges.clear();
                    }
                }
                self.engine.io_done(self.now, &mut done, &mut fx);
            }
        }
        panic!("no rest: {}", self.engine.explain());
    }

    fn device(&mut self, target: Target) -> &mut SimDevice {
        match target {
            Target::Flash(_) => &mut self.flash,
            Target::Origin(_) => &mut self.origin,
        }
    }

    fn lost(&self) -> Vec<(u64, u64)> {
        let status = self.engine.status(DISK).expect("attached");
        let blocks = |(at, len): &(u64, u64)| (at / BLOCK, len / BLOCK);
        status.lost_ranges.iter().map(blocks).collect()
    }

    fn failed(&self) -> bool {
        self.engine.pool_stats().flash_failed
    }

    /// Every read of flash fails, or none.
    fn reads_fail(&mut self, on: bool) {
        self.flash.faults = Faults {
            read_eio: if on { 10_000 } else { 0 },
            ..Faults::default()
        };
    }

    /// The block of flash that holds nothing but `fill` goes bad.
    fn rot(&mut self, fill: u8) {
        let at = self.find(fill);
        self.flash.rot(at);
    }

    /// The block of flash that holds nothing but `fill`.
    fn find(&self, fill: u8) -> usize {
        let is_it = |i: &usize| self.flash.visible_block(*i).iter().all(|x| *x == fill);
        (0..self.flash.blocks()).find(is_it).expect("it is there")
    }

    /// Flash takes no more writes; it still reads.
    fn wear_out(&mut self) {
        self.flash.faults.write_eio = 10_000;
        self.write(60, 9).expect("the origin takes it");
        assert!(self.failed());
    }
}

#[test]
fn an_error_of_a_healthy_device_loses_nothing() {
    let mut b = Bench::new();
    b.write(3, 33).unwrap();
    b.reads_fail(true);
    assert_eq!(b.read(3, 1), Err(ReqError::Io));
    assert_eq!(b.read(3, 1), Err(ReqError::Io));
    assert!(b.lost().is_empty() && !b.failed());
    b.reads_fail(false);
    assert_eq!(b.read(3, 1), Ok(vec![33]));
}

#[test]
fn a_worn_out_device_that_still_reads_loses_nothing() {
    let mut b = Bench::new();
    for block in 3..6 {
        b.write(block, block as u8).unwrap();
    }
    b.wear_out();
    assert_eq!(b.read(3, 3), Ok(vec![3, 4, 5]));
    b.rest();
    assert!(b.lost().is_empty());
    assert!(b.engine.status(DISK).unwrap().drained);
    assert_eq!(b.origin.stored_block(4)[0], 4);
}

#[test]
fn what_a_dead_device_held_is_listed_without_anybody_reading_it() {
    let mut b = Bench::new();
    for block in [3, 4, 5, 9] {
        b.write(block, block as u8).unwrap();
    }
    b.flash.kill();
    b.write(60, 9).expect("the origin takes it");
    assert!(b.failed());
    b.rest();
    assert_eq!(b.lost(), [(3, 3), (9, 1)]);
    assert_eq!(b.read(4, 1), Err(ReqError::Io));
    assert!(b.read(6, 3).is_ok() && b.read(60, 1) == Ok(vec![9]));
}

#[test]
fn a_lost_block_returns_when_it_is_written_again_or_accepted() {
    let mut b = Bench::new();
    for block in [3, 4, 5] {
        b.write(block, block as u8).unwrap();
    }
    b.flash.kill();
    b.write(60, 9).expect("the origin takes it");
    // Reading is enough to notice, and the first read says it.
    assert_eq!(b.read(3, 3), Err(ReqError::Io));
    b.rest();
    assert_eq!(b.lost(), [(3, 3)]);

    b.write(4, 44).unwrap();
    assert_eq!(b.lost(), [(3, 1), (5, 1)]);
    assert_eq!(b.read(4, 1), Ok(vec![44]));

    assert_eq!(b.engine.accept_loss(DISK).unwrap(), 2);
    assert!(b.lost().is_empty());
    let old = |block: usize| b.origin.stored_block(block)[0];
    let want = vec![old(3), 44, old(5)];
    assert_eq!(b.read(3, 3), Ok(want));
    b.rest();
    assert!(b.engine.status(DISK).unwrap().drained);
}

#[test]
fn one_bad_block_of_a_failed_device_takes_no_other_with_it() {
    let mut b = Bench::new();
    for block in 3..9 {
        b.write(block, block as u8).unwrap();
    }
    let at = b.find(5) as u64 * BLOCK;
    // Once the device counts as failed, the destager sets to work.
    b.flash.faults.bad_ranges.push(at..at + BLOCK);
    b.wear_out();
    b.rest();
    assert_eq!(b.lost(), [(5, 1)]);
    for block in [3, 4, 6, 7, 8] {
        assert_eq!(b.origin.stored_block(block)[0], block as u8);
    }
}

/// It may be the device's last breath, or an error that the next try does not meet.
#[test]
fn a_failed_device_is_asked_twice_for_each_block_alone() {
    for refusals in [2, 3] {
        let mut b = Bench::new();
        let buf = Buf::zeroed(2 * BLOCK as usize);
        buf.all().bytes_mut()[..BLOCK as usize].fill(33);
        b.ask(|tag, now| Request::write(tag, DISK, 3 * BLOCK, 2 * BLOCK, true, &buf, now))
            .unwrap();
        let at = b.find(33) as u64 * BLOCK;
        b.flash.faults.bad_ranges.push(at..at + BLOCK);
        b.refusals = Some(refusals);
        b.wear_out();
        b.rest();
        assert_eq!(b.refusals, Some(0));
        // Once among others, then twice alone.
        let lost = if refusals > 2 { vec![(3, 1)] } else { vec![] };
        assert_eq!(b.lost(), lost);
    }
}

#[test]
fn a_rotten_dirty_block_is_written_again_in_any_mode() {
    for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
        let mut b = Bench::new();
        for block in 3..5 {
            b.write(block, block as u8).unwrap();
            b.rot(block as u8);
            assert_eq!(b.read(block, 1), Err(ReqError::Io));
        }
        assert_eq!(b.lost(), [(3, 2)]);
        b.engine.set_mode(DISK, mode).unwrap();
        let half = Buf::zeroed(BLOCK as usize);
        let part = b.ask(|tag, now| Request::write(tag, DISK, 3 * BLOCK, 512, true, &half, now));
        assert_eq!(part, Err(ReqError::Io), "the rest of it is lost");

        b.write(3, 44).unwrap();
        assert_eq!((b.lost(), b.read(3, 1)), (vec![(4, 1)], Ok(vec![44])));
        b.rest();
        assert_eq!(b.origin.stored_block(3)[0], 44, "{mode:?}");
        assert_eq!(b.engine.accept_loss(DISK).unwrap(), 1);
        b.write(4, 55).unwrap();
        b.rest();
        assert_eq!(b.origin.stored_block(4)[0], 55, "{mode:?}");
        assert!(b.engine.status(DISK).unwrap().drained);
    }
}

#[test]
fn what_the_origin_refuses_does_not_replace_what_was_dirty() {
    let mut b = Bench::new();
    b.write(3, 33).unwrap();
    b.flash.faults.write_eio = 10_000;
    b.origin.faults.write_eio = 10_000;
    assert_eq!(b.write(3, 44), Err(ReqError::Io));
    assert!(b.failed());
    assert_eq!(b.read(3, 1), Ok(vec![33]));
    b.origin.faults = Faults::default();
    b.rest();
    assert_eq!(b.origin.stored_block(3)[0], 33);
}

/// Its ends were merged with what flash held and sent there, in vain; the rest of those blocks must
/// not be forgotten with them. Found by the simulation (profile mixed, seed 7070).
#[test]
fn zeroing_under_which_flash_fails_keeps_the_rest_of_its_blocks() {
    for discard in [false, true] {
        let mut b = Bench::new();
        for block in 3..6 {
            b.write(block, block as u8).unwrap();
        }
        b.flash.faults.write_eio = 10_000;
        let (at, len) = (3 * BLOCK + 512, 2 * BLOCK);
        let op = match discard {
            true => ReqOp::Discard { fua: false },
            false => ReqOp::WriteZeroes {
                fua: false,
                punch: true,
            },
        };
        b.ask(|tag, now| Request::new(tag, DISK, op, at, len, None, now))
            .expect("the origin takes it");
        assert!(b.failed());
        let buf = Buf::zeroed(3 * BLOCK as usize);
        b.ask(|tag, now| Request::read(tag, DISK, 3 * BLOCK, 3 * BLOCK, &buf, now))
            .unwrap();
        let all = buf.all();
        let at = |byte: u64| all.bytes()[byte as usize];
        let ends = [at(0), at(511), at(BLOCK), at(2 * BLOCK + 512)];
        assert_eq!(ends, [3, 3, 0, 5], "discard: {discard}");
        b.rest();
        assert_eq!(b.origin.stored_block(3)[0], 3);
    }
}

/// Each of them ends as soon as it is let in, and lets the next one in: once that was a stack frame
/// each, and a guest could end the daemon.
#[test]
fn a_crowd_that_waits_for_one_range_is_let_in() {
    const CROWD: u64 = 20_000;
    let mut b = Bench::new();
    let buf = Buf::zeroed(BLOCK as usize);
    let mut requests = vec![Request::write(1, DISK, 0, BLOCK, false, &buf, b.now)];
    for tag in 2..2 + CROWD {
        let mut discard = Request::write(tag, DISK, 0, 512, false, &buf, b.now);
        discard.op = ReqOp::Discard { fua: false };
        discard.buf = None;
        requests.push(discard);
    }
    let mut fx = Effects::default();
    b.engine.submit(b.now, &mut requests, &mut fx);
    assert_eq!(b.drive(fx, Some(1 + CROWD)), Some(Ok(())));
    assert_eq!(b.engine.status(DISK).unwrap().in_flight, 0);
}
