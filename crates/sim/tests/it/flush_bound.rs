//! What a crash leaves to be read again is bounded by bytes, not only by time: recovery checks every
//! batch behind the last flush, and a fast device takes gigabytes between two ticks.

use crate::common;
use hearth_engine::api::{Effects, OriginState, Request};
use hearth_engine::{Engine, EngineOptions, FLUSH_AFTER_BYTES};
use hearth_io::{BLOCK, Buf, IoOp, OpKind, Target};
use hearth_sim::device::{Base, SimDevice, Tear};
use hearth_sim::prng::Prng;
use std::collections::VecDeque;

/// Only its superblock is ever stored; what is appended is answered and dropped.
const FLASH_SIZE: u64 = 1 << 30;
const DISK: u16 = 1;
const SIZE: u64 = 1 << 30;
/// Length of a write.
const LEN: u64 = 1 << 20;
const WRITES: u64 = 400;
/// Writes in flight.
const DEPTH: u64 = 8;
/// Batches of at most a descriptor's entries, two in flight: what may be on its way besides.
const SLACK: u64 = 4 << 20;

fn pool() -> Engine {
    let base = Base::Zeros;
    let mut flash = SimDevice::new(
        Target::Flash(0),
        FLASH_SIZE,
        BLOCK,
        base,
        Tear::Block,
        Prng::new(7),
    );
    let mut media = flash.media(None);
    common::format(&mut media, FLASH_SIZE, 1024);
    let options = EngineOptions {
        dirty_high_percent: 95,
        dirty_low_percent: 95,
        idle_ns: u64::MAX,
        ..EngineOptions::default()
    };
    let (engine, _) = Engine::open(&mut media, options, &[]).expect("opened");
    engine
        .attach(common::disk(DISK, SIZE), OriginState::Flushed)
        .expect("attached");
    engine
}

/// Writes without a pause while time stands still. A flush takes as long as `flush_bytes` of
/// appending. Returns the flushes and the most that was ever appended since the last one started.
fn flushes(flush_bytes: u64) -> (u64, u64) {
    let engine = pool();
    let (mut fx, now) = (Effects::default(), 1);
    let (mut sent, mut answered) = (0, 0);
    let mut ops: VecDeque<IoOp> = VecDeque::new();
    let mut flush: Option<(IoOp, u64)> = None;
    let (mut count, mut since, mut most) = (0, 0u64, 0);
    while answered < WRITES {
        while sent < WRITES && sent - answered < DEPTH {
            let buf = Buf::zeroed(LEN as usize);
            let write = Request::write(sent, DISK, sent * LEN, LEN, false, &buf, now);
            engine.submit(now, &mut vec![write], &mut fx);
            sent += 1;
        }
        for op in fx.ios.drain(..) {
            if op.target == Target::Flash(0) && op.kind == OpKind::Flush {
                assert!(flush.is_none(), "two flushes at once");
                count += 1;
                since = 0;
                flush = Some((op, flush_bytes));
            } else {
                ops.push_back(op);
            }
        }
        answered += fx.completions.drain(..).count() as u64;
        let op = match ops.pop_front() {
            Some(op) => op,
            None if answered == WRITES => break,
            None => flush.take().expect("something is in flight").0,
        };
        if op.target == Target::Flash(0) && op.kind == OpKind::Write {
            since += op.len;
            most = most.max(since);
            if let Some((_, left)) = &mut flush {
                *left = left.saturating_sub(op.len);
            }
        }
        let mut done = vec![op.done(Ok(()), 1000)];
        if flush.as_ref().is_some_and(|(_, left)| *left == 0)
            && let Some((op, _)) = flush.take()
        {
            done.push(op.done(Ok(()), 1000));
        }
        engine.io_done(now, &mut done, &mut fx);
    }
    (count, most)
}

#[test]
fn no_more_is_appended_between_two_flushes_than_the_bound() {
    let (count, most) = flushes(4096);
    assert!(most <= FLUSH_AFTER_BYTES + SLACK, "{most} bytes");
    assert!(
        (WRITES * LEN / FLUSH_AFTER_BYTES..=WRITES * LEN / FLUSH_AFTER_BYTES + 1).contains(&count),
        "{count} flushes"
    );
}

#[test]
fn a_slow_flush_is_followed_by_the_next_one_at_once() {
    let slow = FLUSH_AFTER_BYTES + (32 << 20);
    let (count, most) = flushes(slow);
    assert!(most <= slow + SLACK, "{most} bytes");
    assert!(count >= WRITES * LEN / (slow + SLACK), "{count} flushes");
}
