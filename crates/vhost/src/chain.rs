//! From a head index to a list of checked pieces of guest memory.
//!
//! A request is a chain of descriptors, in the queue's table or in one of its own (indirect).
//! All of it is memory of the guest's, who may write nonsense, and may write it again while we
//! look. Every descriptor is therefore copied once, and the copy is judged: nothing here trusts
//! a second look. There is no I/O and no pointer, so the same code runs over a byte array under
//! a fuzzer. Source: virtio 1.2, 2.7.5 to 2.7.8.

use smallvec::SmallVec;

/// Descriptors of a chain at most. Longer than any driver builds: Linux stays below the queue's
/// size, and QEMU refuses more than this.
pub const CHAIN_MAX: usize = 1024;
/// Bytes of a descriptor.
pub const DESC_LEN: u64 = 16;

/// The chain goes on.
const NEXT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT as u16;
/// The device writes here.
const WRITE: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_WRITE as u16;
/// The descriptor names a table of descriptors.
const INDIRECT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT as u16;

/// An address outside the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside;

/// The guest's memory, as far as parsing needs it.
pub trait Guest {
    /// Copies bytes out, each of them once.
    fn read(&self, guest: u64, out: &mut [u8]) -> Result<(), Outside>;
    /// True if all of the range is guest memory.
    fn holds(&self, guest: u64, len: u64) -> bool;
}

/// Where the queue's own descriptors are.
pub trait Table {
    /// Descriptors in it.
    fn size(&self) -> u16;
    /// Copies a descriptor whose index is below the size.
    fn get(&self, index: u16) -> [u8; DESC_LEN as usize];
}

/// Why a chain is refused. All of these are the driver's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// An index beyond the table.
    #[error("descriptor {0} is named, but the table has {1}")]
    Index(u16, u32),
    /// Too long, which includes loops.
    #[error("a chain is longer than {0} descriptors, or runs in a circle")]
    TooLong(u32),
    /// No bytes.
    #[error("a descriptor at {0:#x} has no length")]
    Empty(u64),
    /// Not memory of the guest.
    #[error("a descriptor covers {1} bytes at {0:#x}, which is not all guest memory")]
    Outside(u64, u32),
    /// A table that is no table.
    #[error("an indirect table of {0} bytes is no whole number of descriptors, or has none")]
    IndirectLength(u32),
    /// A table in a table, or with a successor.
    #[error("an indirect descriptor lies in an indirect table, or the chain goes on after it")]
    IndirectNested,
    /// Indirect descriptors were not agreed on.
    #[error("an indirect descriptor is used, which was not agreed on")]
    IndirectUnasked,
    /// Reading after writing.
    #[error("a descriptor to be read follows one to be written")]
    Order,
    /// More bytes than a chain can sensibly have.
    #[error("a chain covers more than 4 GiB")]
    Bytes,
}

/// A piece of guest memory, all of it inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Guest address.
    pub at: u64,
    /// Bytes, at least one.
    pub len: u32,
}

impl Piece {
    fn end(&self) -> u64 {
        self.at + u64::from(self.len)
    }
}

/// A chain, judged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// What the device may read.
    pub readable: SmallVec<[Piece; 4]>,
    /// What the device may write.
    pub writable: SmallVec<[Piece; 4]>,
    /// Something the device may write lies over something else of the chain. That is legal
    /// (Windows reads into one dummy page again and again; a program may name a buffer twice),
    /// but then it matters in which order the device writes.
    pub overlaps: bool,
}

impl Chain {
    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.overlaps = false;
    }
}

struct Desc {
    at: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Desc {
    fn parse(raw: &[u8; DESC_LEN as usize]) -> Desc {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *raw;
        Desc {
            at: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            len: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        }
    }
}

/// Follows the chain at `head` and checks all of it; the result replaces `out`.
pub fn walk(
    table: &dyn Table,
    guest: &dyn Guest,
    head: u16,
    indirect_ok: bool,
    out: &mut Chain,
) -> Result<(), ChainError> {
    out.clear();
    let size = u32::from(table.size());
    let mut index = head;
    let mut bytes = 0u64;
    // A chain visits no descriptor twice, so one that is longer than the table is a circle.
    for _ in 0..size.min(CHAIN_MAX as u32) {
        if u32::from(index) >= size {
            return Err(ChainError::Index(index, size));
        }
        let desc = Desc::parse(&table.get(index));
        if desc.flags & INDIRECT != 0 {
            if !indirect_ok {
                return Err(ChainError::IndirectUnasked);
            }
            if desc.flags & NEXT != 0 {
                return Err(ChainError::IndirectNested);
            }
            walk_indirect(guest, &desc, &mut bytes, out)?;
            out.overlaps = overlaps(out);
            return Ok(());
        }
        take(guest, &desc, &mut bytes, out)?;
        if desc.flags & NEXT == 0 {
            out.overlaps = overlaps(out);
            return Ok(());
        }
        index = desc.next;
    }
    Err(ChainError::TooLong(size.min(CHAIN_MAX as u32)))
}

fn walk_indirect(
    guest: &dyn Guest,
    table: &Desc,
    bytes: &mut u64,
    out: &mut Chain,
) -> Result<(), ChainError> {
    if table.len == 0 || !u64::from(table.len).is_multiple_of(DESC_LEN) {
        return Err(ChainError::IndirectLength(table.len));
    }
    if !guest.holds(table.at, u64::from(table.len)) {
        return Err(ChainError::Outside(table.at, table.len));
    }
    let size = table.len / DESC_LEN as u32;
    let mut index = 0u16;
    for _ in 0..size.min(CHAIN_MAX as u32) {
        if u32::from(index) >= size {
            return Err(ChainError::Index(index, size));
        }
        let mut raw = [0u8; DESC_LEN as usize];
        guest
            .read(table.at + u64::from(index) * DESC_LEN, &mut raw)
            .map_err(|_| ChainError::Outside(table.at, table.len))?;
        let desc = Desc::parse(&raw);
        if desc.flags & INDIRECT != 0 {
            return Err(ChainError::IndirectNested);
        }
        take(guest, &desc, bytes, out)?;
        if desc.flags & NEXT == 0 {
            return Ok(());
        }
        index = desc.next;
    }
    Err(ChainError::TooLong(size.min(CHAIN_MAX as u32)))
}

fn take(
    guest: &dyn Guest,
    desc: &Desc,
    bytes: &mut u64,
    out: &mut Chain,
) -> Result<(), ChainError> {
    if desc.len == 0 {
        return Err(ChainError::Empty(desc.at));
    }
    let inside = desc.at.checked_add(u64::from(desc.len)).is_some()
        && guest.holds(desc.at, u64::from(desc.len));
    if !inside {
        return Err(ChainError::Outside(desc.at, desc.len));
    }
    *bytes += u64::from(desc.len);
    // virtio 1.2, 2.7.5.3.1: a chain must not cover more.
    if *bytes > 1 << 32 {
        return Err(ChainError::Bytes);
    }
    let piece = Piece {
        at: desc.at,
        len: desc.len,
    };
    if desc.flags & WRITE != 0 {
        out.writable.push(piece);
    } else if out.writable.is_empty() {
        out.readable.push(piece);
    } else {
        return Err(ChainError::Order);
    }
    Ok(())
}

/// Whether anything the device writes lies over anything else of the chain.
fn overlaps(chain: &Chain) -> bool {
    let (read, write) = (&chain.readable, &chain.writable);
    if read.len() + write.len() <= 8 {
        return write.iter().enumerate().any(|(i, w)| {
            let mut others = read.iter().chain(&write[i + 1..]);
            others.any(|other| w.at < other.end() && other.at < w.end())
        });
    }
    // Sorted by start, an overlap shows between a piece and the furthest end before it.
    let mut all: Vec<(Piece, bool)> = read.iter().map(|p| (*p, false)).collect();
    all.extend(write.iter().map(|p| (*p, true)));
    all.sort_unstable_by_key(|(p, _)| p.at);
    let (mut end, mut write_end) = (0u64, 0u64);
    for (piece, written) in &all {
        if piece.at < write_end || (*written && piece.at < end) {
            return true;
        }
        end = end.max(piece.end());
        if *written {
            write_end = write_end.max(piece.end());
        }
    }
    false
}

/// A table and a memory of plain bytes, for tests and the fuzzer.
pub mod plain {
    use super::{DESC_LEN, Guest, Outside, Table};

    /// Guest memory from address 0 on.
    #[derive(Clone, Debug)]
    pub struct Bytes(pub Vec<u8>);

    impl Guest for Bytes {
        fn read(&self, guest: u64, out: &mut [u8]) -> Result<(), Outside> {
            let at = usize::try_from(guest).map_err(|_| Outside)?;
            let end = at.checked_add(out.len()).ok_or(Outside)?;
            out.copy_from_slice(self.0.get(at..end).ok_or(Outside)?);
            Ok(())
        }

        fn holds(&self, guest: u64, len: u64) -> bool {
            guest
                .checked_add(len)
                .is_some_and(|end| end <= self.0.len() as u64)
        }
    }

    /// A descriptor table.
    #[derive(Clone, Debug, Default)]
    pub struct Descs(pub Vec<[u8; DESC_LEN as usize]>);

    impl Descs {
        /// Appends a descriptor.
        pub fn push(&mut self, at: u64, len: u32, flags: u16, next: u16) {
            self.0.push(encode(at, len, flags, next));
        }
    }

    /// A descriptor's bytes.
    pub fn encode(at: u64, len: u32, flags: u16, next: u16) -> [u8; DESC_LEN as usize] {
        let mut raw = [0u8; DESC_LEN as usize];
        raw[..8].copy_from_slice(&at.to_le_bytes());
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        raw
    }

    impl Table for Descs {
        fn size(&self) -> u16 {
            self.0.len() as u16
        }

        fn get(&self, index: u16) -> [u8; DESC_LEN as usize] {
            self.0[usize::from(index)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::plain::{Bytes, Descs, encode};
    use super::*;
    use proptest::prelude::*;

    const N: u16 = NEXT;
    const W: u16 = WRITE;
    const I: u16 = INDIRECT;

    fn run(descs: &[(u64, u32, u16, u16)], head: u16) -> Result<Chain, ChainError> {
        run_in(&Bytes(vec![0; 1 << 16]), descs, head)
    }

    fn run_in(
        memory: &Bytes,
        descs: &[(u64, u32, u16, u16)],
        head: u16,
    ) -> Result<Chain, ChainError> {
        let mut table = Descs::default();
        for d in descs {
            table.push(d.0, d.1, d.2, d.3);
        }
        let mut chain = Chain::default();
        walk(&table, memory, head, true, &mut chain).map(|()| chain)
    }

    #[test]
    fn a_read_request() {
        let chain = run(
            &[
                (0x100, 16, N, 1),
                (0x1000, 4096, N | W, 2),
                (0x200, 1, W, 0),
            ],
            0,
        )
        .unwrap();
        assert_eq!(&chain.readable[..], &[Piece { at: 0x100, len: 16 }]);
        assert_eq!(chain.writable.len(), 2);
        assert_eq!(chain.writable[1], Piece { at: 0x200, len: 1 });
    }

    #[test]
    fn circles_end() {
        assert_eq!(
            run(&[(0, 16, N, 1), (0x100, 16, N, 0)], 0),
            Err(ChainError::TooLong(2))
        );
        assert_eq!(run(&[(0, 16, N, 0)], 0), Err(ChainError::TooLong(1)));
    }

    #[test]
    fn indices_stay_in_the_table() {
        assert_eq!(run(&[(0, 16, 0, 0)], 1), Err(ChainError::Index(1, 1)));
        assert_eq!(
            run(&[(0, 16, N, 7), (0, 1, 0, 0)], 0),
            Err(ChainError::Index(7, 2))
        );
    }

    #[test]
    fn addresses_stay_in_memory() {
        for (at, len) in [
            (0xffff, 2),
            (0x10000, 1),
            (u64::MAX, 1),
            (u64::MAX - 3, 8),
            (0, u32::MAX),
        ] {
            assert_eq!(
                run(&[(at, len, 0, 0)], 0),
                Err(ChainError::Outside(at, len))
            );
        }
        assert_eq!(run(&[(64, 0, 0, 0)], 0), Err(ChainError::Empty(64)));
    }

    #[test]
    fn what_is_written_may_overlap_and_is_told() {
        // The status byte in the data, the data in the header, and the same page twice.
        for descs in [
            [(0, 16, N, 1), (0x1000, 512, N | W, 2), (0x1010, 1, W, 0)],
            [(0, 16, N, 1), (8, 512, N | W, 2), (0x4000, 1, W, 0)],
            [(0x800, 16, N, 1), (0, 512, N | W, 2), (0, 512, W, 0)],
        ] {
            assert!(run(&descs, 0).unwrap().overlaps);
        }
        // Two pieces that are only read, and neighbours, do not matter.
        for descs in [
            [(0, 16, N, 1), (0, 512, N, 2), (0x4000, 1, W, 0)],
            [(0, 16, N, 1), (16, 512, N | W, 2), (528, 1, W, 0)],
        ] {
            assert!(!run(&descs, 0).unwrap().overlaps);
        }
    }

    #[test]
    fn long_chains_are_checked_for_overlap_too() {
        let mut descs = vec![(0u64, 16u32, N, 1u16)];
        for i in 1..20u16 {
            descs.push((0x1000 + u64::from(i) * 512, 512, N | W, i + 1));
        }
        descs.push((0x8000, 1, W, 0));
        assert!(!run(&descs, 0).unwrap().overlaps);
        descs[7].0 = descs[15].0 + 100;
        assert!(run(&descs, 0).unwrap().overlaps);
        descs[7].0 = 4;
        assert!(run(&descs, 0).unwrap().overlaps);
    }

    #[test]
    fn reading_comes_first() {
        assert_eq!(
            run(&[(0, 16, N | W, 1), (0x100, 16, 0, 0)], 0),
            Err(ChainError::Order)
        );
    }

    #[test]
    fn indirect_tables() {
        let mut memory = Bytes(vec![0; 1 << 16]);
        memory.0[0x100..0x110].copy_from_slice(&encode(0x1000, 16, N, 2));
        memory.0[0x120..0x130].copy_from_slice(&encode(0x2000, 512, W, 0));
        let good = run_in(&memory, &[(0x100, 48, I, 0)], 0).unwrap();
        assert_eq!((good.readable.len(), good.writable.len()), (1, 1));
        let mut chain = Chain::default();
        let mut table = Descs::default();
        table.push(0x100, 48, I, 0);
        assert_eq!(
            walk(&table, &memory, 0, false, &mut chain),
            Err(ChainError::IndirectUnasked)
        );
        for len in [0, 8, 47] {
            assert_eq!(
                run_in(&memory, &[(0x100, len, I, 0)], 0),
                Err(ChainError::IndirectLength(len))
            );
        }
        assert_eq!(
            run_in(&memory, &[(0x100, 48, I | N, 0)], 0),
            Err(ChainError::IndirectNested)
        );
        assert_eq!(
            run_in(&memory, &[(0xfff8, 16, I, 0)], 0),
            Err(ChainError::Outside(0xfff8, 16))
        );
        // A table in a table; a circle; an index beyond it.
        memory.0[0x120..0x130].copy_from_slice(&encode(0x100, 48, I, 0));
        assert_eq!(
            run_in(&memory, &[(0x100, 48, I, 0)], 0),
            Err(ChainError::IndirectNested)
        );
        memory.0[0x120..0x130].copy_from_slice(&encode(0x2000, 8, N, 0));
        assert_eq!(
            run_in(&memory, &[(0x100, 48, I, 0)], 0),
            Err(ChainError::TooLong(3))
        );
        memory.0[0x120..0x130].copy_from_slice(&encode(0x2000, 8, N, 3));
        assert_eq!(
            run_in(&memory, &[(0x100, 48, I, 0)], 0),
            Err(ChainError::Index(3, 3))
        );
    }

    #[test]
    fn absurd_counts_and_sizes() {
        // 65536 descriptors in an indirect table that all point at each other.
        let mut memory = Bytes(vec![0; 2 << 20]);
        for i in 0..65535u32 {
            let at = 4096 + i as usize * 16;
            memory.0[at..at + 16].copy_from_slice(&encode(0, 8, N, (i + 1) as u16));
        }
        assert_eq!(
            run_in(&memory, &[(4096, 65535 * 16, I, 0)], 0),
            Err(ChainError::TooLong(CHAIN_MAX as u32))
        );
        struct Endless;
        impl Guest for Endless {
            fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Outside> {
                Err(Outside)
            }
            fn holds(&self, _: u64, _: u64) -> bool {
                true
            }
        }
        let mut table = Descs::default();
        table.push(0, u32::MAX, N, 1);
        table.push(1 << 40, u32::MAX, 0, 0);
        assert_eq!(
            walk(&table, &Endless, 0, true, &mut Chain::default()),
            Err(ChainError::Bytes)
        );
    }

    fn desc() -> impl Strategy<Value = (u64, u32, u16, u16)> {
        (
            prop_oneof![0u64..0x1_0400, any::<u64>()],
            prop_oneof![0u32..0x300, Just(512), Just(4096), any::<u32>()],
            0u16..8,
            0u16..20,
        )
    }

    proptest! {
        /// Whatever the tables say: an error, or pieces that are inside, not empty, in order,
        /// and of which it is told truly whether one that is written overlaps another.
        #[test]
        fn what_comes_out_is_sound(
            descs in prop::collection::vec(desc(), 1..17),
            inner in prop::collection::vec(desc(), 0..17),
            head in 0u16..20,
        ) {
            let mut memory = Bytes(vec![0; 1 << 16]);
            for (i, d) in inner.iter().enumerate() {
                memory.0[i * 16..i * 16 + 16].copy_from_slice(&encode(d.0, d.1, d.2, d.3));
            }
            if let Ok(chain) = run_in(&memory, &descs, head) {
                let all: Vec<(Piece, bool)> = chain.readable.iter().map(|p| (*p, false))
                    .chain(chain.writable.iter().map(|p| (*p, true))).collect();
                prop_assert!(!all.is_empty() && all.len() <= CHAIN_MAX);
                let mut overlaps = false;
                for (i, (a, written)) in all.iter().enumerate() {
                    prop_assert!(a.len > 0 && memory.holds(a.at, u64::from(a.len)));
                    for (b, other) in &all[i + 1..] {
                        let apart = a.end() <= b.at || b.end() <= a.at;
                        overlaps |= !apart && (*written || *other);
                    }
                }
                prop_assert_eq!(overlaps, chain.overlaps);
            }
        }
    }
}
