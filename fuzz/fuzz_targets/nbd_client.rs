//! A server that sends anything: to a client's handshake, or in answer to requests in flight,
//! cut anywhere. Data may only land where it was asked for, and a read that succeeds must have
//! been sent whole.
#![no_main]

use hearth_io::Buf;
use hearth_nbd_client::transmission::{Pieces, Request, Transmission};
use hearth_nbd_client::{Handshake, Negotiated};
use hearth_nbd_wire::{cmd, tflag};
use libfuzzer_sys::fuzz_target;

/// What is in a buffer before anything was received.
const EMPTY: u8 = 0xEE;
/// What the fuzzed server is made to send where its data says so.
const READ: u32 = 16 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((config, rest)) = data.split_first() else { return };
    if config & 1 == 0 {
        handshake(rest);
    } else {
        transmission(*config, rest);
    }
});

/// Pieces of the input: the first byte of each is its length, 0 stands for all of the rest.
fn pieces(mut rest: &[u8], mut act: impl FnMut(&[u8]) -> bool) {
    while let Some((len, tail)) = rest.split_first() {
        let len = if *len == 0 { tail.len() } else { tail.len().min(usize::from(*len)) };
        let (piece, tail) = tail.split_at(len);
        if !act(piece) {
            return;
        }
        rest = tail;
    }
}

fn handshake(rest: &[u8]) {
    let mut shake = Handshake::new("disk");
    pieces(rest, |piece| match shake.feed(piece) {
        Ok(None) => {
            shake.take_output();
            true
        }
        Ok(Some(agreed)) => {
            assert!(agreed.min_block.is_power_of_two() && agreed.min_block <= 4096);
            assert!(agreed.max_payload % agreed.min_block == 0 && agreed.max_payload > 0);
            assert!(agreed.max_payload <= 32 << 20 && agreed.size % u64::from(agreed.min_block) == 0);
            false
        }
        Err(e) => {
            assert!(!e.to_string().is_empty());
            false
        }
    });
}

fn transmission(config: u8, rest: &[u8]) {
    let agreed = Negotiated {
        size: 1 << 20,
        flags: tflag::HAS_FLAGS | tflag::SEND_FLUSH,
        structured: config & 2 != 0,
        min_block: 1,
        max_payload: 32 << 20,
    };
    let mut client = Transmission::new(&agreed);
    // Two reads, one of them in two pieces of memory, a write and a flush. Around each window
    // lies memory that must stay as it is.
    let mut memory = Vec::new();
    for cookie in 1..=2u64 {
        let mut buf = Buf::zeroed(READ as usize + 8192).all();
        buf.bytes_mut().fill(EMPTY);
        let half = (READ / 2) as usize;
        let bufs: Pieces = if cookie == 1 {
            [buf.sub(4096, READ as usize)].into_iter().collect()
        } else {
            [buf.sub(4096, half), buf.sub(4096 + half, half)].into_iter().collect()
        };
        client.begin(cookie, Request { command: cmd::READ, flags: 0, offset: cookie << 16, len: READ, bufs });
        memory.push(buf);
    }
    let bufs: Pieces = [Buf::zeroed(4096).all()].into_iter().collect();
    client.begin(3, Request { command: cmd::WRITE, flags: 0, offset: 0, len: 4096, bufs });
    client.begin(4, Request { command: cmd::FLUSH, flags: 0, offset: 0, len: 0, bufs: Pieces::new() });
    let mut done = Vec::new();
    pieces(rest, |piece| {
        let mut left = piece;
        while !left.is_empty() {
            let ok = match client.direct() {
                Some(mut window) => {
                    let n = window.len().min(left.len());
                    window.bytes_mut()[..n].copy_from_slice(&left[..n]);
                    left = &left[n..];
                    client.received(n)
                }
                None => {
                    let all = std::mem::take(&mut left);
                    client.feed(all)
                }
            };
            if ok.is_err() {
                return false;
            }
        }
        done.extend(client.take_finished());
        true
    });
    done.sort_by_key(|f| f.cookie);
    assert!(done.windows(2).all(|w| w[0].cookie != w[1].cookie), "answered twice");
    for buf in &memory {
        let bytes = buf.bytes();
        let end = 4096 + READ as usize;
        assert!(bytes[..4096].iter().chain(&bytes[end..]).all(|b| *b == EMPTY), "outside");
    }
    // Inputs hold fewer of these bytes than a whole read: if one is left, it was not received.
    let received = rest.iter().filter(|b| **b == EMPTY).count();
    for finished in done.iter().filter(|f| f.result.is_ok() && f.request.command == cmd::READ) {
        let left: usize = finished
            .request
            .bufs
            .iter()
            .map(|b| b.bytes().iter().filter(|b| **b == EMPTY).count())
            .sum();
        assert!(left <= received, "a read succeeded with what was never sent");
    }
}
