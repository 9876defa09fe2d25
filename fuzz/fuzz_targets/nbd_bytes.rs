//! Raw bytes into an NBD session, in the handshake or after it, cut anywhere.
#![no_main]

#[path = "../../crates/nbd/tests/it/common/mod.rs"]
mod common;

use common::{Style, Wire};
use hearth_nbd::{PAYLOAD_MAX, REQUESTS_MAX};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((config, mut rest)) = data.split_first() else { return };
    let mut wire = Wire::sized(16 << 10);
    match config & 3 {
        0 => {}
        1 => wire.enter(Style::Simple),
        2 => wire.enter(Style::Structured),
        _ => wire.enter(Style::Extended),
    }
    wire.hold = config & 4 != 0;
    wire.deaf = config & 8 != 0;
    if config & 16 != 0 {
        wire.send_step = 5;
    }
    // The first byte of each piece is its length; 0 stands for all of the rest.
    while let Some((len, tail)) = rest.split_first() {
        let len = if *len == 0 { tail.len() } else { tail.len().min(usize::from(*len)) };
        let (piece, tail) = tail.split_at(len);
        wire.feed_in(piece, || usize::MAX);
        assert!(wire.session.in_flight() <= REQUESTS_MAX);
        let held: usize = wire.held.iter().filter_map(|r| r.buf.as_ref()).map(|b| b.len()).sum();
        assert!(held as u64 <= PAYLOAD_MAX);
        rest = tail;
    }
    wire.hold = false;
    wire.deaf = false;
    wire.settle();
    assert_eq!(wire.session.in_flight(), 0);
});
