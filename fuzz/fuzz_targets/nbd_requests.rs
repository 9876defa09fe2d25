//! Well-formed requests with any content, completed in any order, sent and received in any
//! pieces: each gets exactly one reply.
#![no_main]

#[path = "../../crates/nbd/tests/it/common/mod.rs"]
mod common;

use arbitrary::Arbitrary;
use common::{Req, Style, Wire};
use hearth_engine::api::{Completion, ReqError};
use hearth_nbd::REQUESTS_MAX;
use hearth_volume::Status;
use libfuzzer_sys::fuzz_target;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

const SIZE: u64 = 32 << 10;

#[derive(Arbitrary, Debug)]
enum Act {
    Write { at: Place, len: u16, times: u8, flags: u8 },
    Any { command: u8, flags: u8, at: Place, len: Length },
    Payload { command: u8, len: u16 },
    Step(u16),
    SendStep(u16),
    Deaf(bool),
    Hold(bool),
    Complete { which: u8, fail: bool },
    ReadOnly(bool),
    FastZero(bool),
    Grow,
    Extents(Vec<(u32, u8)>),
}

#[derive(Arbitrary, Debug)]
enum Place {
    Inside(u32),
    Any(u64),
}

#[derive(Arbitrary, Debug)]
enum Length {
    Small(u16),
    Any(u64),
}

#[derive(Arbitrary, Debug)]
struct Script {
    style: u8,
    acts: Vec<Act>,
}

impl Place {
    fn get(&self) -> u64 {
        match self {
            Place::Inside(at) => u64::from(*at) % SIZE,
            Place::Any(at) => *at,
        }
    }
}

fuzz_target!(|script: Script| {
    let style = [Style::Simple, Style::Structured, Style::Extended][usize::from(script.style % 3)];
    let mut wire = Wire::sized(SIZE);
    wire.enter(style);
    let mut step = usize::MAX;
    let mut sent: HashMap<u64, Req> = HashMap::new();
    for act in script.acts.into_iter().take(400) {
        let req = match act {
            Act::Write { at, len, times, flags } => {
                let len = usize::from(len) * usize::from(times % 8 + 1);
                Some(Req::write(at.get(), vec![times; len]).flags(u16::from(flags & !32)))
            }
            Act::Any { command, flags, at, len } => {
                let len = match len {
                    Length::Small(n) => u64::from(n),
                    Length::Any(n) if style == Style::Extended => n,
                    Length::Any(n) => n & 0xffff_ffff,
                };
                // Goodbye ends it and a write brings its payload.
                (command != 1 && command != 2)
                    .then(|| Req::new(u16::from(command), at.get(), len).flags(u16::from(flags & !32)))
            }
            Act::Payload { command, len } if style == Style::Extended && command != 1 && command != 2 => {
                let mut req = Req::new(u16::from(command), 0, u64::from(len)).flags(32);
                req.payload = vec![1; usize::from(len)];
                Some(req)
            }
            Act::Payload { .. } => None,
            Act::Step(n) => {
                // Single bytes are for the tests beside the crate: too slow here.
                step = usize::from(n).max(16);
                None
            }
            Act::SendStep(n) => {
                wire.send_step = usize::from(n).max(16);
                None
            }
            Act::Deaf(on) => {
                wire.deaf = on;
                wire.settle();
                None
            }
            Act::Hold(on) => {
                wire.hold = on;
                wire.settle();
                None
            }
            Act::Complete { which, fail } => {
                let len = wire.held.len().max(1);
                if let Some(request) = wire.held.remove(usize::from(which) % len) {
                    if fail {
                        let completion = Completion {
                            owner: 0,
                            tag: request.tag,
                            result: Err(ReqError::Io),
                            buf: request.buf.clone(),
                        };
                        drop(request);
                        wire.with(|s, cx| s.completed(completion, cx));
                    } else {
                        wire.complete(request);
                    }
                    wire.settle();
                }
                None
            }
            Act::ReadOnly(on) => {
                wire.disk.read_only.store(on, Ordering::Relaxed);
                None
            }
            Act::FastZero(on) => {
                wire.disk.fast_zero.store(on, Ordering::Relaxed);
                None
            }
            Act::Grow => {
                let size = wire.disk.size.load(Ordering::Relaxed);
                if size < 4 * SIZE {
                    wire.disk.data.lock().unwrap().resize(size as usize + 4096, 0);
                    wire.disk.size.store(size + 4096, Ordering::Relaxed);
                }
                None
            }
            Act::Extents(list) => {
                *wire.disk.extents.lock().unwrap() = list
                    .into_iter()
                    .map(|(len, s)| (u64::from(len), [Status::Data, Status::Hole, Status::Zero][usize::from(s % 3)]))
                    .collect();
                None
            }
        };
        let Some(req) = req else { continue };
        let cookie = sent.len() as u64;
        let bytes = req.clone().cookie(cookie).bytes(style);
        let mut taken = wire.feed_in(&bytes, || step);
        if taken < bytes.len() {
            // Full: let everything go, then go on.
            wire.hold = false;
            wire.deaf = false;
            wire.settle();
            taken += wire.feed_in(&bytes[taken..], || step);
            assert_eq!(taken, bytes.len(), "{req:?}");
        }
        sent.insert(cookie, req);
        assert!(wire.session.in_flight() <= REQUESTS_MAX);
    }
    wire.hold = false;
    wire.deaf = false;
    wire.settle();
    assert_eq!(wire.session.in_flight(), 0);
    while !wire.got.is_empty() {
        let cookie = wire.got.iter().skip(8).take(8).fold(0, |n, b| n << 8 | u64::from(*b));
        let req = sent.remove(&cookie).expect("a reply to something asked, once");
        let read_len = if req.command == 0 { req.len } else { 0 };
        let reply = wire.reply(style, read_len as usize);
        assert_eq!(reply.cookie, cookie);
        if reply.error == 0 {
            assert_eq!(reply.data.len() as u64, read_len.max(if req.command == 7 { reply.data.len() as u64 } else { 0 }));
        }
    }
    assert!(sent.is_empty(), "requests without a reply: {sent:?}");
});
