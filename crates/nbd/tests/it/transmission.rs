//! Every command, every error, and what a client may not do to others.

use crate::common;
use crate::common::*;
use hearth_engine::api::{Completion, ReqError, ReqOp};
use hearth_nbd::carried::State;
use hearth_nbd::{NbdSession, PAYLOAD_MAX, REQUESTS_MAX, TlsMode};
use hearth_reactor::{Caller, Memory, PeerAddress, Room};
use hearth_volume::Status;
use std::sync::atomic::Ordering;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const DF: u16 = 4;
const REQ_ONE: u16 = 8;
const FAST_ZERO: u16 = 16;
const PAYLOAD_LEN: u16 = 32;

fn ask(wire: &mut Wire, style: Style, req: Req) -> u32 {
    wire.request(style, req);
    let reply = wire.reply(style, 0);
    assert_eq!(reply.cookie, 77);
    assert!(wire.got.is_empty());
    reply.error
}

#[test]
fn reads_give_the_bytes_of_any_range() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        for (offset, len) in [
            (0, 1),
            (0, 4096),
            (5, 10),
            (4095, 2),
            (8192, 100_000),
            (SIZE - 1, 1),
            (0, SIZE),
        ] {
            wire.request(style, Req::new(0, offset, len));
            let reply = wire.reply(style, len as usize);
            let want = &wire.disk.data.lock().unwrap()[offset as usize..(offset + len) as usize];
            assert!(
                reply.error == 0 && reply.data == want,
                "{style:?} {offset}+{len}"
            );
            assert_eq!(reply.kind, (style != Style::Simple).then_some(1));
        }
        wire.request(style, Req::new(0, 7, 0));
        let reply = wire.reply(style, 0);
        assert_eq!(
            (reply.error, reply.kind),
            (0, (style != Style::Simple).then_some(0))
        );
    }
}

#[test]
fn writes_store_the_bytes_at_any_range() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        for (offset, len) in [
            (0, 1),
            (0, 4096),
            (5, 10),
            (4095, 2),
            (8192, 300_000),
            (SIZE - 1, 1),
            (9, 0),
        ] {
            let payload: Vec<u8> = (0..len).map(|i| (i * 31 + 1) as u8).collect();
            let mut want = wire.disk.data.lock().unwrap().clone();
            want[offset as usize..offset as usize + len].copy_from_slice(&payload);
            assert_eq!(ask(&mut wire, style, Req::write(offset, payload)), 0);
            assert!(
                *wire.disk.data.lock().unwrap() == want,
                "{style:?} {offset}+{len}"
            );
        }
    }
}

#[test]
fn flags_reach_the_engine() {
    let style = Style::Structured;
    let mut wire = Wire::connected(style);
    wire.hold = true;
    let cases = [
        (
            Req::write(0, vec![1; 8192]).flags(FUA),
            ReqOp::Write { fua: true },
        ),
        (Req::write(0, vec![1; 8192]), ReqOp::Write { fua: false }),
        (Req::new(0, 0, 4096).flags(FUA | DF), ReqOp::Read),
        (Req::new(3, 0, 0).flags(FUA), ReqOp::Flush),
        (Req::new(4, 0, 512).flags(FUA), ReqOp::Discard { fua: true }),
        (Req::new(4, 0, 512), ReqOp::Discard { fua: false }),
        (Req::new(5, 0, 512), ReqOp::Prefetch),
        (
            Req::new(6, 0, 512),
            ReqOp::WriteZeroes {
                fua: false,
                punch: true,
            },
        ),
        (
            Req::new(6, 0, 512).flags(FUA | NO_HOLE),
            ReqOp::WriteZeroes {
                fua: true,
                punch: false,
            },
        ),
        (
            Req::new(6, 0, 512).flags(FAST_ZERO),
            ReqOp::WriteZeroes {
                fua: false,
                punch: true,
            },
        ),
    ];
    for (req, op) in cases {
        let (offset, len) = (req.offset, req.len);
        wire.request(style, req);
        let request = wire.held.pop_front().expect("a request");
        assert_eq!(
            (request.op, request.disk, request.offset, request.len),
            (op, 3, offset, len)
        );
        if matches!(op, ReqOp::Write { .. }) {
            assert_eq!(request.crcs.len(), 2);
        }
        assert_eq!(wire.session.in_flight(), 1);
        wire.complete(request);
        wire.settle();
        assert_eq!(wire.reply(style, 0).error, 0);
    }
}

#[test]
fn errors_are_those_of_the_protocol() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        let past = |command| Req::new(command, SIZE - 1, 2);
        let write_past = Req::write(SIZE - 1, vec![0; 2]);
        assert_eq!(ask(&mut wire, style, past(0)), EINVAL);
        assert_eq!(ask(&mut wire, style, write_past), ENOSPC);
        assert_eq!(ask(&mut wire, style, past(4)), EINVAL);
        assert_eq!(ask(&mut wire, style, past(5)), EINVAL);
        assert_eq!(ask(&mut wire, style, past(6)), ENOSPC);
        assert_eq!(ask(&mut wire, style, past(7)), EINVAL);
        assert_eq!(ask(&mut wire, style, Req::new(0, u64::MAX, 2)), EINVAL);
        assert_eq!(ask(&mut wire, style, Req::new(3, 0, 1)), EINVAL);
        assert_eq!(ask(&mut wire, style, Req::new(8, 0, 1)), EINVAL);
        assert_eq!(ask(&mut wire, style, Req::new(0xffff, 0, 1)), EINVAL);
        assert_eq!(ask(&mut wire, style, Req::new(7, 0, 0)), EINVAL);
        for command in [0, 3, 4, 5, 6, 7] {
            assert_eq!(
                ask(&mut wire, style, Req::new(command, 0, 0).flags(1 << 9)),
                EINVAL
            );
        }
        assert_eq!(
            ask(
                &mut wire,
                style,
                Req::write(0, vec![0; 70_000]).flags(NO_HOLE)
            ),
            EINVAL
        );
        let df = if style == Style::Simple { EINVAL } else { 0 };
        wire.request(style, Req::new(0, 0, 4).flags(DF));
        assert_eq!(wire.reply(style, 4).error, df);
        wire.disk.fast_zero.store(false, Ordering::Relaxed);
        assert_eq!(
            ask(&mut wire, style, Req::new(6, 0, 512).flags(FAST_ZERO)),
            ENOTSUP
        );
        assert_eq!(ask(&mut wire, style, Req::new(6, 0, 512)), 0);
        wire.disk.read_only.store(true, Ordering::Relaxed);
        assert_eq!(ask(&mut wire, style, Req::write(0, vec![0; 70_000])), EPERM);
        assert_eq!(ask(&mut wire, style, Req::new(4, 0, 512)), EPERM);
        assert_eq!(ask(&mut wire, style, Req::new(6, 0, 512)), EPERM);
        assert_eq!(ask(&mut wire, style, Req::new(3, 0, 0)), 0);
        wire.disk.closing.store(true, Ordering::Relaxed);
        assert_eq!(ask(&mut wire, style, Req::new(0, 0, 512)), ESHUTDOWN);
    }
}

#[test]
fn what_a_volume_cannot_do_is_not_on_offer() {
    for style in STYLES {
        let mut wire = Wire::new();
        wire.disk.simple.store(true, Ordering::Relaxed);
        wire.greet(3);
        if style != Style::Simple {
            assert_eq!(
                wire.verdict(if style == Style::Extended { 11 } else { 8 }, &[]),
                1
            );
        }
        let list = wire.option(6, &common::go("vm1", &[]));
        let (_, info) = list.iter().find(|(kind, _)| *kind == 3).unwrap();
        let flags = u16::from_be_bytes(info[10..12].try_into().unwrap());
        // Only that there are flags, and the commands that need nothing of the volume.
        let other = if style == Style::Simple { 0 } else { 1 << 7 };
        assert_eq!(flags, 1 | 1 << 10 | other, "{flags:#x}");
        let mut wire = Wire::connected(style);
        wire.disk.simple.store(true, Ordering::Relaxed);
        assert_eq!(ask(&mut wire, style, Req::write(0, vec![1; 512])), 0);
        for command in [3, 4, 6] {
            let len = if command == 3 { 0 } else { 512 };
            let refused = ask(&mut wire, style, Req::new(command, 0, len));
            assert_eq!(refused, EINVAL, "{command}");
        }
        let durable = Req::write(0, vec![1; 512]).flags(FUA);
        assert_eq!(ask(&mut wire, style, durable), EINVAL);
    }
}

#[test]
fn a_session_ends_with_its_export_after_its_last_request() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        wire.hold = true;
        wire.request(style, Req::new(0, 0, 512));
        wire.disk.closing.store(true, Ordering::Relaxed);
        assert!(!wire.session.closing(), "it may be opened again");
        wire.disk.gone.store(true, Ordering::Relaxed);
        assert!(!wire.session.closing(), "a request is in flight");
        // What arrives now is refused.
        assert_eq!(ask(&mut wire, style, Req::new(0, 0, 512)), ESHUTDOWN);
        wire.hold = false;
        wire.settle();
        assert_eq!(wire.reply(style, 512).error, 0);
        assert!(wire.session.closing());
        assert!(wire.with(|s, cx| s.recv_buf(cx)).is_none());
    }
}

#[test]
fn without_room_only_small_requests_are_taken() {
    let style = Style::Simple;
    let mut wire = Wire::connected(style);
    wire.hold = true;
    // Nothing is left but what every connection may have.
    wire.room = Room::of(1, 1, 1, 1);
    for req in [
        Req::new(0, 0, 4096),
        Req::new(3, 0, 0),
        Req::new(0, 0, 512 << 10),
    ] {
        wire.request(style, req);
    }
    assert_eq!(wire.session.in_flight(), 2);
    assert!(wire.session.memory().waits);
    // Nor is there enough for this export, of which others hold something.
    wire.room = Room::of(1 << 20, 1 << 18, 1 << 18, 0);
    wire.with(|s, cx| s.resume(cx));
    assert_eq!(wire.session.in_flight(), 2);
    wire.room = Room::of(1 << 20, 1 << 18, 0, 0);
    wire.hold = false;
    wire.settle();
    assert_eq!(wire.reply(style, 4096).error, 0);
    assert_eq!(wire.reply(style, 0).error, 0);
    assert_eq!(wire.reply(style, 512 << 10).error, 0);
    let idle = wire.session.memory();
    assert!(idle.held == 0 && !idle.waits);
}

#[test]
fn what_a_session_holds_is_told_until_it_is_sent() {
    let style = Style::Simple;
    let len = 512u64 << 10;
    let mut wire = Wire::connected(style);
    wire.deaf = true;
    wire.request(style, Req::new(0, 0, len));
    let memory = wire.session.memory();
    assert!(memory.held >= len && memory.replies == memory.held && memory.payload == 0);
    wire.deaf = false;
    wire.settle();
    assert_eq!(wire.reply(style, len as usize).error, 0);
    assert_eq!(wire.session.memory(), Memory::default());
    // A payload's whole buffer is held, however little of it is to come.
    let write = Req::write(0, vec![1; len as usize]).bytes(style);
    wire.feed(&write[..write.len() - 100]);
    let memory = wire.session.memory();
    assert!(memory.payload >= len && memory.held == memory.payload);
    wire.feed(&write[write.len() - 100..]);
    assert_eq!(wire.session.memory(), Memory::default());
}

#[test]
fn failures_of_the_engine_are_reported() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        wire.hold = true;
        for (error, want) in [
            (ReqError::Io, EIO),
            (ReqError::NoSpace, ENOSPC),
            (ReqError::Invalid, EINVAL),
            (ReqError::ReadOnly, EPERM),
            (ReqError::NoDisk, ESHUTDOWN),
            (ReqError::Shutdown, ESHUTDOWN),
        ] {
            for req in [
                Req::new(0, 0, 4096),
                Req::write(0, vec![1; 10]),
                Req::new(3, 0, 0),
            ] {
                wire.request(style, req);
                let request = wire.held.pop_front().expect("a request");
                let completion = Completion {
                    owner: 0,
                    tag: request.tag,
                    result: Err(error),
                    buf: request.buf.clone(),
                };
                wire.with(|s, cx| s.completed(completion, cx));
                wire.settle();
                assert_eq!(wire.reply(style, 0).error, want);
            }
        }
        assert_eq!(wire.session.in_flight(), 0);
    }
}

#[test]
fn reads_and_writes_longer_than_agreed() {
    let disk = Disk::new(3, "vm1", 4096);
    disk.size.store(1 << 40, Ordering::Relaxed);
    for style in STYLES {
        let server = server(vec![disk.clone()]);
        let session = hearth_nbd::NbdSession::new(server, hearth_nbd::TlsMode::Off, "test".into());
        let mut wire = Wire::over(Box::new(session), disk.clone());
        wire.enter(style);
        let too_long = if style == Style::Simple {
            EINVAL
        } else {
            EOVERFLOW
        };
        assert_eq!(
            ask(&mut wire, style, Req::new(0, 0, (32 << 20) + 1)),
            too_long
        );
        let long = Req::write(0, vec![0; (32 << 20) + 1]);
        if style == Style::Extended {
            wire.feed(&long.bytes(style)[..32]);
            assert!(wire.session.closing());
        } else {
            assert_eq!(ask(&mut wire, style, long), EINVAL);
            let huge = Req {
                len: u64::from(u32::MAX),
                ..Req::new(1, 0, 0)
            };
            wire.request(style, huge);
            assert!(wire.session.closing());
        }
    }
}

#[test]
fn payloads_nobody_asked_for_are_swallowed() {
    let style = Style::Extended;
    let mut wire = Wire::connected(style);
    for command in [0, 3, 4, 5, 6, 7, 99] {
        let mut req = Req::new(command, 0, 50_000).flags(PAYLOAD_LEN);
        req.payload = vec![9; 50_000];
        assert_eq!(ask(&mut wire, style, req), EINVAL);
    }
    // Without the flag a write has no payload, and fails.
    let mut write = Req::write(0, vec![1; 10]).flags(PAYLOAD_LEN);
    write.payload.clear();
    assert_eq!(ask(&mut wire, style, write), EINVAL);
    wire.request(style, Req::new(0, 0, 1));
    assert_eq!(wire.reply(style, 1).error, 0);
}

#[test]
fn block_status() {
    for style in [Style::Structured, Style::Extended] {
        let mut wire = Wire::connected(style);
        *wire.disk.extents.lock().unwrap() = vec![
            (4096, Status::Data),
            (4096, Status::Hole),
            (4096, Status::Hole),
            (1 << 30, Status::Zero),
        ];
        let mut query = |flags: u16, len: u64| {
            wire.request(style, Req::new(7, 0, len).flags(flags));
            let reply = wire.reply(style, 0);
            assert_eq!(
                (reply.error, reply.kind),
                (0, Some(if style == Style::Extended { 6 } else { 5 }))
            );
            let body = &reply.data;
            assert_eq!(body[..4], [0, 0, 0, 1]);
            if style == Style::Extended {
                assert_eq!(body[4..8], ((body.len() as u32 - 8) / 16).to_be_bytes());
                body[8..]
                    .chunks(16)
                    .map(|c| {
                        let value = u128::from_be_bytes(c.try_into().unwrap());
                        ((value >> 64) as u64, value as u32)
                    })
                    .collect::<Vec<_>>()
            } else {
                body[4..]
                    .chunks(8)
                    .map(|c| {
                        let value = u64::from_be_bytes(c.try_into().unwrap());
                        (value >> 32, value as u32)
                    })
                    .collect()
            }
        };
        assert_eq!(query(0, SIZE), [(4096, 0), (8192, 3), (SIZE - 12288, 2)]);
        assert_eq!(query(REQ_ONE, SIZE), [(4096, 0)]);
        assert_eq!(query(REQ_ONE, 512), [(512, 0)]);
        assert_eq!(query(0, 8192), [(4096, 0), (4096, 3)]);
    }
}

#[test]
fn extended_lengths_are_64_bits() {
    let style = Style::Extended;
    let mut wire = Wire::connected(style);
    wire.disk.size.store(1 << 40, Ordering::Relaxed);
    wire.hold = true;
    wire.request(style, Req::new(4, 4096, 1 << 39));
    let request = wire.held.pop_front().expect("a request");
    assert_eq!(request.len, 1 << 39);
}

#[test]
fn an_export_may_grow_while_in_use() {
    let mut wire = Wire::connected(Style::Simple);
    let end = SIZE + 4096;
    assert_eq!(
        ask(&mut wire, Style::Simple, Req::new(5, SIZE, 4096)),
        EINVAL
    );
    wire.disk.data.lock().unwrap().resize(end as usize, 5);
    wire.disk.size.store(end, Ordering::Relaxed);
    wire.request(Style::Simple, Req::new(0, SIZE, 4096));
    assert_eq!(wire.reply(Style::Simple, 4096).data, vec![5; 4096]);
}

#[test]
fn replies_come_as_requests_complete() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        wire.hold = true;
        for cookie in 0..10 {
            wire.request(style, Req::new(0, cookie * 512, 512).cookie(cookie));
        }
        while let Some(request) = wire.held.pop_back() {
            wire.complete(request);
        }
        wire.settle();
        for cookie in (0..10).rev() {
            let reply = wire.reply(style, 512);
            let at = cookie as usize * 512;
            assert_eq!(reply.cookie, cookie);
            assert_eq!(reply.data, wire.disk.data.lock().unwrap()[at..at + 512]);
        }
    }
}

#[test]
fn a_client_that_does_not_read_is_not_read_from() {
    let style = Style::Simple;
    let mut wire = Wire::connected(style);
    wire.deaf = true;
    let many: Vec<u8> = (0..10_000)
        .flat_map(|i| Req::new(0, 0, 4096).cookie(i).bytes(style))
        .collect();
    let taken = wire.feed_in(&many, || usize::MAX);
    assert!(taken < many.len());
    wire.deaf = false;
    wire.settle();
    let rest = wire.feed_in(&many[taken..], || usize::MAX);
    assert_eq!(taken + rest, many.len());
    for i in 0..10_000 {
        assert_eq!(wire.reply(style, 4096).cookie, i);
    }
}

#[test]
fn requests_in_flight_are_bounded_in_number_and_memory() {
    let style = Style::Extended;
    let mut wire = Wire::connected(style);
    wire.hold = true;
    let flushes = Req::new(3, 0, 0).bytes(style).repeat(10_000);
    wire.feed_in(&flushes, || usize::MAX);
    assert_eq!(wire.session.in_flight(), REQUESTS_MAX);
    assert_eq!(wire.held.len(), REQUESTS_MAX);

    let mut wire = Wire::connected(style);
    wire.hold = true;
    wire.disk.size.store(1 << 40, Ordering::Relaxed);
    let reads = Req::new(0, 0, 3 << 20).bytes(style).repeat(10_000);
    wire.feed_in(&reads, || usize::MAX);
    let bytes: usize = wire
        .held
        .iter()
        .filter_map(|r| r.buf.as_ref())
        .map(|b| b.len())
        .sum();
    assert!(
        bytes as u64 <= PAYLOAD_MAX && wire.held.len() == 21,
        "{} requests",
        wire.held.len()
    );
}

#[test]
fn the_largest_requests_fit() {
    let style = Style::Simple;
    let mut wire = Wire::connected(style);
    let size = (32 << 20) + 4096;
    wire.disk.data.lock().unwrap().resize(size, 1);
    wire.disk.size.store(size as u64, Ordering::Relaxed);
    for offset in [0, 1, 4095] {
        assert_eq!(
            ask(
                &mut wire,
                style,
                Req::write(offset, vec![offset as u8; 32 << 20])
            ),
            0
        );
        wire.request(style, Req::new(0, offset, 32 << 20));
        assert!(
            wire.reply(style, 32 << 20)
                .data
                .iter()
                .all(|b| *b == offset as u8)
        );
    }
}

#[test]
fn goodbye_waits_for_what_is_in_flight() {
    let style = Style::Simple;
    let mut wire = Wire::connected(style);
    wire.hold = true;
    wire.request(style, Req::write(0, vec![3; 512]));
    wire.request(style, Req::new(2, 0, 0));
    assert!(!wire.session.closing());
    assert!(wire.with(|s, cx| s.recv_buf(cx)).is_none());
    wire.hold = false;
    wire.settle();
    assert!(wire.session.closing());
    assert_eq!(wire.reply(style, 0).error, 0);
}

#[test]
fn shutdown_finishes_what_is_in_flight_and_takes_no_more() {
    let style = Style::Structured;
    let mut wire = Wire::connected(style);
    wire.hold = true;
    wire.request(style, Req::new(0, 0, 512));
    wire.session.shutdown();
    assert!(wire.with(|s, cx| s.recv_buf(cx)).is_none());
    assert!(!wire.session.closing());
    wire.hold = false;
    wire.settle();
    assert_eq!(wire.reply(style, 512).error, 0);
    assert!(wire.session.closing());
}

#[test]
fn a_wrong_magic_ends_it_at_once() {
    for style in STYLES {
        let mut wire = Wire::connected(style);
        wire.hold = true;
        wire.request(style, Req::new(0, 0, 512));
        wire.feed(&[0xff; 32]);
        assert!(wire.session.closing());
        assert_eq!(wire.session.in_flight(), 1);
        wire.hold = false;
        wire.settle();
        assert_eq!(wire.session.in_flight(), 0);
        assert!(wire.got.is_empty());
    }
}

#[test]
fn the_end_of_stream_in_the_middle_of_anything_is_harmless() {
    let style = Style::Simple;
    let whole = Req::write(3, vec![1; 40_000]).bytes(style);
    for cut in [0, 1, 27, 28, 29, 20_000] {
        let mut wire = Wire::connected(style);
        wire.feed(&whole[..cut]);
        wire.with(|s, cx| s.received(0, cx));
        assert!(wire.session.closing());
        assert!(wire.got.is_empty());
    }
}

#[test]
fn a_completion_nobody_waits_for_is_ignored() {
    let mut wire = Wire::connected(Style::Simple);
    let stray = Completion {
        owner: 0,
        tag: 12345,
        result: Ok(()),
        buf: None,
    };
    wire.with(|s, cx| s.completed(stray, cx));
    wire.settle();
    assert!(wire.got.is_empty());
}

/// A client that is carried to another process at any byte gets the same answers as one that is not.
#[test]
fn a_connection_goes_over_at_any_byte() {
    for style in STYLES {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        match style {
            Style::Simple => {}
            Style::Structured => bytes.extend(option_bytes(8, &[])),
            Style::Extended => bytes.extend(option_bytes(11, &[])),
        }
        bytes.extend(option_bytes(
            10,
            &context_query("vm1", &["base:allocation"]),
        ));
        bytes.extend(option_bytes(7, &go("vm1", &[])));
        bytes.extend(Req::write(5, vec![9; 40]).bytes(style));
        // Refused, once all of it is there.
        bytes.extend(Req::write(SIZE - 1, vec![8; 40]).bytes(style));
        bytes.extend(Req::new(0, 0, 64).bytes(style));
        bytes.extend(Req::new(3, 0, 0).bytes(style));
        let new = || {
            let disk = Disk::new(3, "vm1", SIZE);
            let catalog = server(vec![disk.clone()]);
            let session = NbdSession::new(catalog.clone(), TlsMode::Off, "test".into());
            (Wire::over(Box::new(session), disk), catalog)
        };
        let (mut whole, _) = new();
        // A client that asks further at once is made to wait for its answers.
        for byte in &bytes {
            whole.feed(&[*byte]);
        }
        let wanted: Vec<u8> = whole.got.drain(..).collect();
        for cut in 0..=bytes.len() {
            let (mut first, catalog) = new();
            for byte in &bytes[..cut] {
                first.feed(&[*byte]);
            }
            assert!(first.session.freeze(), "{style:?} at {cut}");
            let state = first.session.carry().expect("it is at rest");
            let state = State::parse(&state).expect("it is understood");
            let mut got: Vec<u8> = first.got.drain(..).collect();
            let disk = first.disk.clone();
            drop(first);
            assert_eq!(disk.clients.load(Ordering::Relaxed), 0);
            let caller = Caller::new(PeerAddress::Unknown);
            let session = NbdSession::resume(catalog, caller, state).expect("its export is there");
            let mut second = Wire::over(Box::new(session), disk);
            for byte in &bytes[cut..] {
                second.feed(&[*byte]);
            }
            got.extend(second.got.drain(..));
            assert!(got == wanted, "{style:?} at {cut}: other answers");
            assert_eq!(second.disk.data.lock().unwrap()[5..45], [9; 40]);
            assert_eq!(second.disk.clients.load(Ordering::Relaxed), 1);
        }
    }
}

/// What is in flight is answered first, a write whose payload is there belongs to it, and no further request is
/// taken.
#[test]
fn nothing_is_taken_from_a_connection_that_goes_over() {
    let style = Style::Simple;
    let mut wire = Wire::connected(style);
    wire.hold = true;
    wire.request(style, Req::new(0, 0, 4096));
    assert!(wire.session.freeze());
    assert!(wire.session.carry().is_none(), "a request is in flight");
    let rest = Req::new(0, 4096, 4096).bytes(style);
    // It was on its way already.
    wire.feed(&rest);
    assert_eq!(wire.session.in_flight(), 1);
    wire.hold = false;
    wire.settle();
    assert_eq!(wire.reply(style, 4096).error, 0);
    let state = State::parse(&wire.session.carry().unwrap()).unwrap();
    assert_eq!(state.input, rest);
    assert_eq!(state.export(), Some("vm1"));
    let resumes = |disk| {
        let caller = Caller::new(PeerAddress::Unknown);
        NbdSession::resume(server(vec![disk]), caller, state.clone()).is_some()
    };
    let id = wire.disk.id;
    assert!(resumes(Disk::new(id, "vm1", SIZE)));
    assert!(resumes(Disk::new(id, "vm1", 2 * SIZE)), "it may grow");
    assert!(!resumes(Disk::new(id, "vm1", SIZE / 2)), "it shrank");
    assert!(!resumes(Disk::new(id + 1, "vm1", SIZE)), "another disk");
    assert!(!resumes(Disk::new(id, "vm2", SIZE)));
}
