//! A descriptor table and guest memory full of anything: every chain is refused, or made of sound
//! pieces, and every request that comes out of it stays on the disk.
#![no_main]

use hearth_vhost::chain::plain::{Bytes, Descs};
use hearth_vhost::chain::{CHAIN_MAX, Chain, DESC_LEN, Guest, Piece, walk};
use hearth_vhost::request::{Limits, Op, SECTOR, parse};
use libfuzzer_sys::fuzz_target;

/// Bytes of guest memory; what the input does not fill is zero.
const MEMORY: usize = 1 << 16;

fuzz_target!(|data: &[u8]| {
    let Some((&[config, head, descs], rest)) = data.split_first_chunk::<3>() else { return };
    let descs = (usize::from(descs % 32) + 1).min(rest.len() / DESC_LEN as usize);
    let (table, content) = rest.split_at(descs * DESC_LEN as usize);
    if descs == 0 {
        return;
    }
    let table = Descs(table.as_chunks().0.to_vec());
    let mut memory = Bytes(vec![0; MEMORY]);
    let n = content.len().min(MEMORY);
    memory.0[..n].copy_from_slice(&content[..n]);
    let mut chain = Chain::default();
    if walk(&table, &memory, u16::from(head), config & 1 == 0, &mut chain).is_err() {
        return;
    }
    let all = pieces(&chain);
    assert!(!all.is_empty() && all.len() <= CHAIN_MAX);
    let mut overlaps = false;
    for (i, (a, written)) in all.iter().enumerate() {
        assert!(a.len > 0 && memory.holds(a.at, u64::from(a.len)));
        for (b, other) in &all[i + 1..] {
            let apart = a.at + u64::from(a.len) <= b.at || b.at + u64::from(b.len) <= a.at;
            overlaps |= !apart && (*written || *other);
        }
    }
    assert_eq!(overlaps, chain.overlaps);
    let limits = Limits {
        size: SECTOR * (u64::from(config) << 4),
        read_only: config & 2 != 0,
        len_max: 32 << 10,
        discard: config & 4 == 0,
        write_zeroes: config & 8 == 0,
    };
    let Ok(request) = parse(&memory, &mut chain, &limits) else {
        assert!(chain.writable.is_empty());
        return;
    };
    assert!(memory.holds(request.status, 1));
    for (piece, written) in pieces(&chain) {
        assert!(piece.len > 0 && memory.holds(piece.at, u64::from(piece.len)));
        let status = piece.at <= request.status && request.status - piece.at < u64::from(piece.len);
        assert!(!status || !written || overlaps, "the status lies in the data unnoticed");
    }
    let bytes = |pieces: &[Piece]| pieces.iter().map(|p| u64::from(p.len)).sum::<u64>();
    let on_disk = |offset: u64, len: u64| {
        assert!(len > 0 && len % SECTOR == 0 && offset % SECTOR == 0);
        assert!(offset + len <= limits.size);
    };
    match request.op {
        Op::Read { offset, len } => {
            on_disk(offset, len);
            assert!(len <= limits.len_max && len == bytes(&chain.writable));
        }
        Op::Write { offset, len } => {
            on_disk(offset, len);
            assert!(!limits.read_only && len <= limits.len_max && len == bytes(&chain.readable));
        }
        Op::Discard(ranges) => {
            assert!(limits.discard && !limits.read_only && !ranges.is_empty());
            ranges.iter().for_each(|r| on_disk(r.offset, r.len));
        }
        Op::WriteZeroes(ranges) => {
            assert!(limits.write_zeroes && !limits.read_only && !ranges.is_empty());
            ranges.iter().for_each(|r| on_disk(r.offset, r.len));
        }
        Op::Flush | Op::GetId | Op::Answer(_) => {}
    }
});

fn pieces(chain: &Chain) -> Vec<(Piece, bool)> {
    let read = chain.readable.iter().map(|p| (*p, false));
    read.chain(chain.writable.iter().map(|p| (*p, true))).collect()
}
