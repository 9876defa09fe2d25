//! A trace summed up: how much, how large, how far apart, how often again, and when.

use roaring::RoaringTreemap;

use crate::record::{BLOCK, Op, Record};

/// Slots of the picture over time.
const SLOTS: usize = 64;
/// Time a slot covers at first, microseconds; doubled whenever the trace outgrows the picture.
const SLOT_US: u64 = 1024;
/// Bits of a block's address below its disk's number.
const DISK_SHIFT: u32 = 40;

/// One bucket of a histogram.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Bin {
    /// Largest value counted here; the bin before ends just below. `None`: no limit.
    pub up_to: Option<u64>,
    /// Requests.
    pub count: u64,
}

/// The sums of a trace.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Summary {
    /// Requests of all kinds.
    pub requests: u64,
    /// Reads among them.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Discards.
    pub discards: u64,
    /// Flushes.
    pub flushes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Share of reads among reads and writes, by requests.
    pub read_share: f64,
    /// Blocks of 4 KiB touched by reads and writes, each request counting its own.
    pub block_accesses: u64,
    /// Different blocks: the working set.
    pub unique_blocks: u64,
    /// Accesses per different block.
    pub reuse: f64,
    /// Share of reads and writes that begin or end inside a block.
    pub unaligned_share: f64,
    /// Share of reads and writes that begin where the one before on the same disk ended.
    pub sequential_share: f64,
    /// Disks.
    pub disks: u32,
    /// From the first request to the last, microseconds.
    pub duration_us: u64,
    /// Request lengths, bytes.
    pub sizes: Vec<Bin>,
    /// Distance from the end of the request before on the same disk, bytes, either way.
    pub seeks: Vec<Bin>,
    /// Requests in equal slots of time.
    pub over_time: Vec<u64>,
    /// Length of a slot, microseconds.
    pub slot_us: u64,
}

/// Sums a trace up, record by record. Memory grows with the number of different blocks (a few bits
/// to two bytes each), not with the trace.
#[derive(Debug)]
pub struct Info {
    sum: Summary,
    blocks: RoaringTreemap,
    ends: std::collections::HashMap<u32, u64>,
    first_us: u64,
    last_us: u64,
    unaligned: u64,
    sequential: u64,
    sizes: [u64; 33],
    seeks: [u64; 65],
}

impl Default for Info {
    fn default() -> Info {
        Info::new()
    }
}

/// The bucket of a number: 0 for 0, else one more than the position of its highest bit, powers
/// of two belonging to what is below them.
fn bucket(n: u64) -> usize {
    if n == 0 {
        return 0;
    }
    (64 - (n - 1).leading_zeros()) as usize
}

fn bins(counts: &[u64]) -> Vec<Bin> {
    let first = counts.iter().position(|c| *c > 0).unwrap_or(0);
    let last = counts.iter().rposition(|c| *c > 0).unwrap_or(0);
    let up_to = |i: usize| (i < 64).then(|| if i == 0 { 0 } else { 1u64 << i });
    (first..=last)
        .map(|i| Bin {
            up_to: up_to(i),
            count: counts[i],
        })
        .collect()
}

impl Info {
    /// Nothing yet.
    pub fn new() -> Info {
        Info {
            sum: Summary {
                requests: 0,
                reads: 0,
                writes: 0,
                discards: 0,
                flushes: 0,
                read_bytes: 0,
                written_bytes: 0,
                read_share: 0.0,
                block_accesses: 0,
                unique_blocks: 0,
                reuse: 0.0,
                unaligned_share: 0.0,
                sequential_share: 0.0,
                disks: 0,
                duration_us: 0,
                sizes: Vec::new(),
                seeks: Vec::new(),
                over_time: vec![0; SLOTS],
                slot_us: SLOT_US,
            },
            blocks: RoaringTreemap::new(),
            ends: std::collections::HashMap::new(),
            first_us: 0,
            last_us: 0,
            unaligned: 0,
            sequential: 0,
            sizes: [0; 33],
            seeks: [0; 65],
        }
    }

    /// Adds a record.
    pub fn add(&mut self, r: &Record) {
        if self.sum.requests == 0 {
            self.first_us = r.time_us;
            self.last_us = r.time_us;
        }
        self.sum.requests += 1;
        self.last_us = self.last_us.max(r.time_us);
        self.place_in_time(r.time_us.saturating_sub(self.first_us));
        self.sum.disks = self.sum.disks.max(r.disk.saturating_add(1));
        let length = u64::from(r.length);
        match r.op {
            Op::Read => {
                self.sum.reads += 1;
                self.sum.read_bytes += length;
            }
            Op::Write => {
                self.sum.writes += 1;
                self.sum.written_bytes += length;
            }
            Op::Discard => {
                self.sum.discards += 1;
                return;
            }
            Op::Flush => {
                self.sum.flushes += 1;
                return;
            }
        }
        let (start, end) = r.blocks();
        self.sum.block_accesses += end - start;
        // Beyond 8 million disks or 4 PiB, addresses share numbers.
        let at = u64::from(r.disk & 0x7F_FFFF) << DISK_SHIFT | start & ((1 << DISK_SHIFT) - 1);
        self.blocks.insert_range(at..at + (end - start));
        self.sizes[bucket(length).min(32)] += 1;
        self.unaligned += u64::from(r.offset % BLOCK != 0 || length % BLOCK != 0);
        let stop = r.offset.saturating_add(length);
        if let Some(before) = self.ends.insert(r.disk, stop) {
            self.seeks[bucket(before.abs_diff(r.offset))] += 1;
            self.sequential += u64::from(before == r.offset);
        }
    }

    fn place_in_time(&mut self, us: u64) {
        while us / self.sum.slot_us >= SLOTS as u64 {
            let old = std::mem::replace(&mut self.sum.over_time, vec![0; SLOTS]);
            for (i, n) in old.into_iter().enumerate() {
                self.sum.over_time[i / 2] += n;
            }
            self.sum.slot_us *= 2;
        }
        self.sum.over_time[(us / self.sum.slot_us) as usize] += 1;
    }

    /// The sums.
    pub fn summary(&self) -> Summary {
        let share = |part: u64, whole: u64| {
            if whole == 0 {
                0.0
            } else {
                part as f64 / whole as f64
            }
        };
        let io = self.sum.reads + self.sum.writes;
        let duration = self.last_us - self.first_us;
        let slots = ((duration / self.sum.slot_us) as usize + 1).min(SLOTS);
        Summary {
            read_share: share(self.sum.reads, io),
            unique_blocks: self.blocks.len(),
            reuse: share(self.sum.block_accesses, self.blocks.len()),
            unaligned_share: share(self.unaligned, io),
            sequential_share: share(self.sequential, io),
            duration_us: duration,
            sizes: bins(&self.sizes),
            seeks: bins(&self.seeks),
            over_time: self.sum.over_time[..slots].to_vec(),
            ..self.sum.clone()
        }
    }
}

/// Numbers as a line of little bars, the largest full height. Something is never shown as nothing.
pub fn sparkline(values: &[u64]) -> String {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().max().unwrap_or(0).max(1);
    values
        .iter()
        .map(|v| {
            let height = (u128::from(*v) * 8).div_ceil(u128::from(most));
            BARS[height.min(8) as usize]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_right() {
        let mut info = Info::new();
        let mut add = |time_us, op, offset, length| {
            info.add(&Record {
                time_us,
                disk: 0,
                op,
                offset,
                length,
            });
        };
        add(100, Op::Read, 0, 8192);
        add(200, Op::Read, 8192, 4096);
        add(300, Op::Write, 512, 4096);
        add(1_000_100, Op::Flush, 0, 0);
        add(1_000_100, Op::Discard, 0, 1 << 20);
        let s = info.summary();
        assert_eq!(
            (s.requests, s.reads, s.writes, s.flushes, s.discards),
            (5, 2, 1, 1, 1)
        );
        assert_eq!((s.block_accesses, s.unique_blocks), (5, 3));
        assert_eq!((s.read_bytes, s.written_bytes), (12288, 4096));
        assert!((s.reuse - 5.0 / 3.0).abs() < 1e-9);
        assert!((s.unaligned_share - 1.0 / 3.0).abs() < 1e-9);
        assert!((s.sequential_share - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(s.duration_us, 1_000_000);
        assert_eq!(s.over_time.iter().sum::<u64>(), 5);
        assert_eq!(
            s.sizes,
            [
                Bin {
                    up_to: Some(4096),
                    count: 2
                },
                Bin {
                    up_to: Some(8192),
                    count: 1
                }
            ]
        );
    }

    #[test]
    fn bars_show_what_is_there() {
        assert_eq!(sparkline(&[0, 1, 50, 100]), " ▁▄█");
        assert_eq!(sparkline(&[]), "");
        assert_eq!(sparkline(&[0, 0]), "  ");
    }
}
