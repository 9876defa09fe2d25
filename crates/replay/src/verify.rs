//! Self-describing data: a sector that says where it belongs and which write it is of.
//!
//! Checking a disk under a trace needs what should be there without keeping a copy. Every
//! 512-byte sector written carries the run's number, its own position and the number of the write,
//! and is filled with bytes made of these three; so a read can tell a sector that is right from one
//! that is old, belongs elsewhere, is torn or rotten. All that is kept is the number of the last
//! write of each sector. Requests that overlap one in flight wait for it, so that there is exactly
//! one right answer.

use std::collections::{BTreeMap, HashMap};

use hearth_policy::spread;

use crate::outcome::{Mismatch, Verified};
use crate::target::SECTOR;

/// Sectors whose numbers are kept together, 64 KiB of disk.
const CHUNK: u64 = 128;
/// Chunks kept: 16 GiB of disk, in about 150 MiB. What is written beyond is not verified, and counted.
const CHUNKS_MAX: usize = 1 << 18;
/// Mismatches kept for the report; all are counted.
const MISMATCHES_MAX: usize = 10;
const MAGIC: u64 = 0x4854_5245_504c_4159;

/// What was written where, and what was found.
pub(crate) struct Verifier {
    run: u64,
    next: u32,
    /// Number of the last write of each sector; 0 is none of ours.
    last: HashMap<u64, Box<[u32; CHUNK as usize]>>,
    /// Ranges in flight: start, and end and whether it changes them.
    busy: BTreeMap<(u64, u64), (u64, bool)>,
    pub found: Verified,
}

fn fill(sector: &mut [u8], run: u64, offset: u64, write: u32) {
    let mut state = spread(run ^ spread(offset ^ u64::from(write) << 40));
    for (i, word) in sector.chunks_exact_mut(8).enumerate() {
        let value = match i {
            0 => MAGIC,
            1 => run,
            2 => offset,
            3 => u64::from(write),
            _ => {
                state = spread(state);
                state
            }
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn word(sector: &[u8], i: usize) -> u64 {
    let mut bytes = [0; 8];
    if let Some(part) = sector.get(i * 8..i * 8 + 8) {
        bytes.copy_from_slice(part);
    }
    u64::from_le_bytes(bytes)
}

impl Verifier {
    pub(crate) fn new(run: u64) -> Verifier {
        Verifier {
            run,
            next: 0,
            last: HashMap::new(),
            busy: BTreeMap::new(),
            found: Verified::default(),
        }
    }

    /// True if a request must wait for another on the same bytes.
    pub(crate) fn conflicts(&self, offset: u64, len: u64, changes: bool) -> bool {
        self.busy
            .iter()
            .take_while(|((start, _), _)| *start < offset + len)
            .any(|(_, (end, theirs))| *end > offset && (changes || *theirs))
    }

    /// A request goes out.
    pub(crate) fn begin(&mut self, id: u64, offset: u64, len: u64, changes: bool) {
        self.busy.insert((offset, id), (offset + len, changes));
    }

    fn set(&mut self, offset: u64, len: u64, write: u32) {
        for sector in offset / SECTOR..(offset + len).div_ceil(SECTOR) {
            let (chunk, at) = (sector / CHUNK, (sector % CHUNK) as usize);
            if let Some(numbers) = self.last.get_mut(&chunk) {
                numbers[at] = write;
            } else if write != 0 && self.last.len() < CHUNKS_MAX {
                let mut numbers = Box::new([0; CHUNK as usize]);
                numbers[at] = write;
                self.last.insert(chunk, numbers);
            } else if write != 0 {
                self.found.untracked += 1;
            }
        }
    }

    /// Fills a write's buffer; the write's number.
    pub(crate) fn stamp(&mut self, offset: u64, data: &mut [u8]) -> u32 {
        // After four billion writes numbers repeat, which costs only certainty.
        self.next = self.next.wrapping_add(1).max(1);
        for (i, sector) in data.chunks_exact_mut(SECTOR as usize).enumerate() {
            fill(sector, self.run, offset + i as u64 * SECTOR, self.next);
        }
        self.next
    }

    /// A write (`write` is its number) or discard (0) ended.
    pub(crate) fn written(&mut self, id: u64, offset: u64, len: u64, write: u32, ok: bool) {
        self.busy.remove(&(offset, id));
        // What a failed write left is unknown.
        self.set(offset, len, if ok { write } else { 0 });
    }

    /// A read ended; compares what it brought.
    pub(crate) fn check(&mut self, id: u64, offset: u64, data: Option<&[u8]>) {
        self.busy.remove(&(offset, id));
        let mut want = [0u8; SECTOR as usize];
        for (i, sector) in data
            .unwrap_or_default()
            .chunks_exact(SECTOR as usize)
            .enumerate()
        {
            let at = offset + i as u64 * SECTOR;
            let number = at / SECTOR;
            let write = self
                .last
                .get(&(number / CHUNK))
                .map_or(0, |n| n[(number % CHUNK) as usize]);
            if write == 0 {
                continue;
            }
            fill(&mut want, self.run, at, write);
            self.found.sectors += 1;
            if sector != want {
                self.found.wrong += 1;
                if self.found.mismatches.len() < MISMATCHES_MAX {
                    self.found.mismatches.push(Mismatch {
                        offset: at,
                        what: self.describe(sector, at, write),
                    });
                }
            }
        }
    }

    fn describe(&self, sector: &[u8], at: u64, write: u32) -> String {
        let (run, offset, found) = (word(sector, 1), word(sector, 2), word(sector, 3));
        if sector.iter().all(|b| *b == 0) {
            return format!("zeros instead of write {write}");
        }
        if word(sector, 0) != MAGIC {
            return format!("no data of a replay instead of write {write}");
        }
        if run != self.run {
            return format!("data of another replay instead of write {write}");
        }
        if offset != at {
            return format!("data of offset {offset} instead of write {write}");
        }
        if found != u64::from(write) {
            return format!("write {found} instead of write {write}");
        }
        format!("write {write}, but torn or rotten")
    }

    /// Runs of sectors written by this replay, at most 64 KiB each, in order.
    pub(crate) fn written_runs(&self) -> Vec<(u64, u64)> {
        let mut chunks: Vec<u64> = self.last.keys().copied().collect();
        chunks.sort_unstable();
        let mut runs = Vec::new();
        for chunk in chunks {
            let Some(numbers) = self.last.get(&chunk) else {
                continue;
            };
            let mut start = None;
            for at in 0..=CHUNK as usize {
                let ours = numbers.get(at).is_some_and(|n| *n != 0);
                match (start, ours) {
                    (None, true) => start = Some(at),
                    (Some(from), false) => {
                        let offset = (chunk * CHUNK + from as u64) * SECTOR;
                        runs.push((offset, (at - from) as u64 * SECTOR));
                        start = None;
                    }
                    _ => {}
                }
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_wrong_data_is_told_apart() {
        let mut v = Verifier::new(9);
        let mut old = vec![0u8; 1024];
        let first = v.stamp(4096, &mut old);
        v.begin(1, 4096, 1024, true);
        v.written(1, 4096, 1024, first, true);
        v.check(2, 4096, Some(&old));
        assert_eq!((v.found.sectors, v.found.wrong), (2, 0));
        // Never written: nothing to say.
        v.check(2, 65_536, Some(&old));
        assert_eq!(v.found.sectors, 2);

        let mut new = vec![0u8; 1024];
        let second = v.stamp(4096, &mut new);
        v.written(3, 4096, 1024, second, true);
        let mut elsewhere = old[..512].to_vec();
        fill(&mut elsewhere, 9, 0, second);
        let mut torn = new[..512].to_vec();
        torn[511] ^= 1;
        for (data, words) in [
            (&old[..512], "write 1 instead of write 2"),
            (&[0u8; 512][..], "zeros"),
            (&[7u8; 512][..], "no data of a replay"),
            (&elsewhere, "data of offset 0"),
            (&torn, "torn or rotten"),
        ] {
            v.found = Verified::default();
            v.check(4, 4096, Some(data));
            assert_eq!(v.found.wrong, 1);
            assert!(
                v.found.mismatches[0].what.contains(words),
                "{:?}",
                v.found.mismatches
            );
        }
        // A discard, and a write that failed, leave what nobody knows.
        v.found = Verified::default();
        v.written(5, 4096, 512, 0, true);
        v.written(6, 4608, 512, 7, false);
        v.check(7, 4096, Some(&[0; 1024]));
        assert_eq!(v.found.sectors, 0);
        assert!(v.written_runs().is_empty());
    }

    #[test]
    fn overlapping_requests_wait() {
        let mut v = Verifier::new(1);
        v.begin(1, 8192, 4096, false);
        v.begin(2, 65_536, 512, true);
        assert!(!v.conflicts(8192, 512, false), "reads may overlap");
        assert!(v.conflicts(12_287, 1, true));
        assert!(!v.conflicts(12_288, 512, true));
        assert!(v.conflicts(0, 1 << 20, false));
        v.written(2, 65_536, 512, 5, true);
        assert!(!v.conflicts(0, 1 << 20, false));
        assert_eq!(v.written_runs(), [(65_536, 512)]);
    }
}
