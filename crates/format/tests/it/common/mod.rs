//! A device with a volatile cache that dies after a number of writes and flushes.

use hearth_io::Media;
use std::collections::BTreeMap;
use std::io;

/// Bytes that never tear; far less than any real sector, so that small fields tear too.
const PIECE: usize = 64;
const BLOCK: usize = 4096;

#[derive(Clone)]
pub struct Flash {
    /// By number of the block; others are zeros.
    durable: BTreeMap<u64, Vec<u8>>,
    cached: Vec<(u64, Vec<u8>)>,
    /// Writes and flushes until it dies.
    pub left: usize,
    pub size: u64,
    /// Offset of a block that gives an error.
    pub unreadable: Option<u64>,
    /// Bytes written, and flushes.
    pub written: (usize, usize),
}

impl Flash {
    pub fn new(size: u64) -> Flash {
        Flash {
            durable: BTreeMap::new(),
            cached: Vec::new(),
            left: usize::MAX,
            size,
            unreadable: None,
            written: (0, 0),
        }
    }

    fn step(&mut self) -> io::Result<()> {
        if self.left == 0 {
            return Err(io::Error::other("the device died"));
        }
        self.left -= 1;
        Ok(())
    }

    fn block(&mut self, number: u64) -> &mut Vec<u8> {
        self.durable.entry(number).or_insert_with(|| vec![0; BLOCK])
    }

    /// Power comes back. Of writes in the cache, the pieces chosen by `keep` are on the
    /// medium.
    pub fn power_cycle(&mut self, keep: impl Fn(usize) -> bool) {
        for (offset, data) in std::mem::take(&mut self.cached) {
            for (number, piece) in data.chunks(PIECE).enumerate() {
                if keep(number) {
                    let at = offset as usize + number * PIECE;
                    let block = self.block((at / BLOCK) as u64);
                    block[at % BLOCK..][..piece.len()].copy_from_slice(piece);
                }
            }
        }
        self.left = usize::MAX;
    }

    /// Flips a bit of what is durable.
    pub fn rot(&mut self, offset: u64) {
        self.block(offset / BLOCK as u64)[offset as usize % BLOCK] ^= 1;
    }

    /// The blocks from `offset` on.
    #[allow(dead_code, reason = "each test program uses a part of this")]
    pub fn get(&mut self, offset: u64, blocks: u64) -> Vec<u8> {
        let first = offset / BLOCK as u64;
        (first..first + blocks)
            .flat_map(|n| self.block(n).clone())
            .collect()
    }

    /// Puts whole blocks on the medium.
    pub fn put(&mut self, offset: u64, data: &[u8]) {
        for (number, data) in data.chunks(BLOCK).enumerate() {
            *self.block(offset / BLOCK as u64 + number as u64) = data.to_vec();
        }
    }

    /// A device on which everything lies `bytes` further in front.
    #[allow(dead_code, reason = "each test program uses a part of this")]
    pub fn shifted(&self, bytes: u64) -> Flash {
        let mut shifted = Flash::new(self.size - bytes);
        let first = bytes / BLOCK as u64;
        let blocks = self.durable.range(first..);
        shifted.durable = blocks.map(|(n, b)| (n - first, b.clone())).collect();
        shifted
    }
}

impl Media for Flash {
    fn len(&self) -> u64 {
        self.size
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(4096) && data.len().is_multiple_of(4096));
        let end = offset + data.len() as u64;
        if self
            .unreadable
            .is_some_and(|at| (offset..end).contains(&at))
        {
            return Err(io::Error::other("medium error"));
        }
        data.fill(0);
        let blocks = self.durable.range(offset / 4096..end / 4096);
        for (number, block) in blocks {
            let at = (number * 4096 - offset) as usize;
            data[at..at + BLOCK].copy_from_slice(block);
        }
        for (at, bytes) in &self.cached {
            let (from, to) = ((*at).max(offset), (at + bytes.len() as u64).min(end));
            if from < to {
                data[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&bytes[(from - at) as usize..(to - at) as usize]);
            }
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(4096) && data.len().is_multiple_of(4096));
        // A write the device dies in may still reach the medium in part.
        self.cached.push((offset, data.to_vec()));
        self.written.0 += data.len();
        self.step()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.step()?;
        self.written.1 += 1;
        for (offset, data) in std::mem::take(&mut self.cached) {
            self.put(offset, &data);
        }
        Ok(())
    }
}

/// Ways of tearing: nothing, everything, a front, a back, every other piece.
pub const TEARS: [fn(usize) -> bool; 6] = [
    |_| false,
    |_| true,
    |n| n == 0,
    |n| n != 0,
    |n| n < 4,
    |n| n % 2 == 1,
];
