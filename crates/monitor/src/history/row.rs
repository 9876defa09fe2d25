//! What happened in one slot of time, and how it lies in a file.
//!
//! Ninety days of a disk are twelve thousand slots, and five hundred disks' have to fit into 256 MiB: 43 bytes a
//! slot. So counts are kept as small floating numbers without a sign: exact while they are small, and then right to
//! one part in half a million ([`WIDE`]), or to one in two thousand ([`NARROW`]: what goes into means, and sizes).
//! A slot's number is part of its checksum, so that what was written a ring's length ago, half written in a
//! crash, or never, is no slot.

use hearth_daemon::api::stats::{Counters, FlashCounters};
use hearth_io::checksum::crc32c;

/// Bits of a wide number's fraction; its exponent has six more.
const WIDE: u32 = 18;
/// Bits of a narrow number's fraction.
const NARROW: u32 = 10;
/// Numbers of each kind.
const WIDES: usize = 8;
const NARROWS: usize = 7;
/// Bytes of a slot.
pub const BYTES: usize = 2 + 2 + 1 + 3 * WIDES + 2 * NARROWS;

/// What happened in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Row {
    /// Seconds of it that were seen.
    pub seconds: f64,
    pub(super) wide: [u64; WIDES],
    pub(super) narrow: [u64; NARROWS],
}

/// The names of a disk's numbers in the API, in order: the wide ones, the narrow ones. The last two are how it was at the end.
pub const DISK_NAMES: [&str; WIDES + NARROWS] = [
    "reads",
    "read_hits",
    "writes",
    "read_hit_bytes",
    "read_miss_bytes",
    "write_bytes",
    "read_us",
    "write_us",
    "origin_reads",
    "origin_read_us",
    "origin_writes",
    "origin_write_us",
    "errors",
    "cached",
    "dirty",
];

/// The names of the flash's numbers.
pub const FLASH_NAMES: [&str; 4] = [
    "flash_write_bytes",
    "flash_payload_bytes",
    "flash_read_bytes",
    "flash_flushes",
];

/// Where sizes begin among the narrow numbers: they are not summed up.
const SIZES: usize = NARROWS - 2;

impl Row {
    /// What a disk, or all of them, counted.
    pub fn of_disk(counted: &Counters, cached: u64, dirty: u64) -> Row {
        let c = counted;
        Row {
            seconds: 0.0,
            wide: [
                c.reads(),
                c.read_hits,
                c.writes(),
                c.read_hit_bytes,
                c.read_miss_bytes,
                c.write_bytes,
                c.read_ns / 1000,
                c.write_ns / 1000,
            ],
            narrow: [
                c.origin_reads,
                c.origin_read_ns / 1000,
                c.origin_writes,
                c.origin_write_ns / 1000,
                c.errors,
                cached,
                dirty,
            ],
        }
    }

    /// What the flash counted.
    pub fn of_flash(c: &FlashCounters) -> Row {
        let mut row = Row::default();
        row.wide[..FLASH_NAMES.len()].copy_from_slice(&[
            c.flash_write_bytes,
            c.flash_payload_bytes,
            c.flash_read_bytes,
            c.flash_flushes,
        ]);
        row
    }

    /// Its numbers, in the order of their names.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.wide.iter().chain(&self.narrow).copied()
    }

    /// The counters of a disk that it stands for, as far as it has them.
    pub fn counters(&self) -> Counters {
        let [
            reads,
            hits,
            writes,
            hit_bytes,
            miss_bytes,
            write_bytes,
            read_us,
            write_us,
        ] = self.wide;
        let n = &self.narrow;
        Counters {
            read_hits: hits,
            read_misses: reads.saturating_sub(hits),
            write_misses: writes,
            read_hit_bytes: hit_bytes,
            read_miss_bytes: miss_bytes,
            write_bytes,
            read_ns: read_us.saturating_mul(1000),
            write_ns: write_us.saturating_mul(1000),
            origin_reads: n[0],
            origin_read_ns: n[1].saturating_mul(1000),
            origin_writes: n[2],
            origin_write_ns: n[3].saturating_mul(1000),
            errors: n[4],
            ..Counters::default()
        }
    }

    /// Takes in what happened after it.
    pub fn add(&mut self, later: &Row) {
        self.seconds += later.seconds;
        for (n, more) in self.wide.iter_mut().zip(&later.wide) {
            *n = n.saturating_add(*more);
        }
        for (n, more) in self.narrow.iter_mut().zip(&later.narrow).take(SIZES) {
            *n = n.saturating_add(*more);
        }
        self.narrow[SIZES..].copy_from_slice(&later.narrow[SIZES..]);
    }

    /// Divides it among times that follow each other, in seconds; nothing is lost or made up by rounding.
    pub fn divided(&self, seconds: &[f64]) -> Vec<Row> {
        let all: f64 = seconds.iter().sum();
        let mut rows = Vec::with_capacity(seconds.len());
        let mut before = 0.0;
        for part in seconds {
            let share = |n: u64, upto: f64| (n as f64 * (upto / all)).round() as u64;
            let of = |n: u64| match before + part >= all {
                true => n.saturating_sub(share(n, before)),
                false => share(n, before + part).saturating_sub(share(n, before)),
            };
            let mut row = Row {
                seconds: *part,
                wide: self.wide.map(of),
                narrow: self.narrow.map(of),
            };
            row.narrow[SIZES..].copy_from_slice(&self.narrow[SIZES..]);
            rows.push(row);
            before += part;
        }
        rows
    }

    /// As it lies in a file, as slot number `index` of a ring whose slots are `step` seconds long.
    pub fn pack(&self, index: u64, step: u64) -> [u8; BYTES] {
        let mut out = Vec::with_capacity(BYTES);
        let seen = (self.seconds / step as f64 * 255.0)
            .round()
            .clamp(0.0, 255.0);
        out.push(seen as u8);
        for n in self.wide {
            out.extend_from_slice(&small(n, WIDE).to_le_bytes()[..3]);
        }
        for n in self.narrow {
            out.extend_from_slice(&small(n, NARROW).to_le_bytes()[..2]);
        }
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&sum(index, &out).to_le_bytes());
        bytes[4..].copy_from_slice(&out);
        bytes
    }

    /// What lies in a file, if it is this slot.
    pub fn unpack(bytes: &[u8], index: u64, step: u64) -> Option<Row> {
        let (check, rest) = bytes.split_first_chunk::<4>()?;
        if bytes.len() != BYTES || u32::from_le_bytes(*check) != sum(index, rest) {
            return None;
        }
        let (seen, rest) = rest.split_first()?;
        let (wide, narrow) = rest.split_at(3 * WIDES);
        let mut row = Row {
            seconds: f64::from(*seen) / 255.0 * step as f64,
            ..Row::default()
        };
        for (n, b) in row.wide.iter_mut().zip(wide.chunks_exact(3)) {
            *n = large(u32::from_le_bytes([b[0], b[1], b[2], 0]), WIDE);
        }
        for (n, b) in row.narrow.iter_mut().zip(narrow.chunks_exact(2)) {
            *n = large(u32::from_le_bytes([b[0], b[1], 0, 0]), NARROW);
        }
        Some(row)
    }
}

/// The checksum of a slot and its number.
fn sum(index: u64, rest: &[u8]) -> u32 {
    let mut all = index.to_le_bytes().to_vec();
    all.extend_from_slice(rest);
    crc32c(&all)
}

/// A number as one with so many bits of fraction and six of exponent, rounded.
fn small(n: u64, bits: u32) -> u32 {
    let shift = (64 - n.leading_zeros()).saturating_sub(bits + 1);
    if shift == 0 {
        // Its lowest two exponents count one by one.
        return n as u32;
    }
    let rounded = n.saturating_add(1 << (shift - 1));
    // Rounding may have made it a bit longer.
    let shift = (64 - rounded.leading_zeros()) - (bits + 1);
    let fraction = (rounded >> shift) as u32 & ((1 << bits) - 1);
    ((shift + 1) << bits) | fraction
}

/// What such a number stands for.
fn large(small: u32, bits: u32) -> u64 {
    let (exponent, fraction) = (small >> bits, small & ((1 << bits) - 1));
    match exponent {
        0 => u64::from(fraction),
        e => (u64::from(fraction | 1 << bits)) << (e - 1).min(63 - bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: u64) -> Row {
        Row {
            seconds: 10.0,
            wide: std::array::from_fn(|i| n * (i as u64 + 1)),
            narrow: std::array::from_fn(|i| n + i as u64),
        }
    }

    #[test]
    fn small_numbers_are_exact_and_large_ones_nearly() {
        for bits in [WIDE, NARROW] {
            for n in (0..1 << (bits + 1)).step_by(if bits == WIDE { 37 } else { 1 }) {
                assert_eq!(large(small(n, bits), bits), n);
            }
            let edges = (0..64).map(|s| 1u64 << s).chain([u64::MAX]);
            for n in edges.flat_map(|n| [n - 1, n, n.saturating_add(1), n / 3 * 2]) {
                let packed = small(n, bits);
                assert!(packed < 1 << (bits + 6), "{n}: {packed:x}");
                let off = large(packed, bits).abs_diff(n) as f64 / n.max(1) as f64;
                assert!(off <= 0.5f64.powi(bits as i32 + 1), "{n}: {off}");
            }
        }
    }

    #[test]
    fn only_the_slot_that_was_written_is_read() {
        let bytes = row(1000).pack(77, 10);
        assert_eq!(Row::unpack(&bytes, 77, 10), Some(row(1000)));
        assert_eq!(Row::unpack(&bytes, 78, 10), None);
        assert_eq!(Row::unpack(&[0; BYTES], 0, 10), None);
        for at in 0..BYTES {
            for bit in 0..8 {
                let mut damaged = bytes;
                damaged[at] ^= 1 << bit;
                assert_eq!(Row::unpack(&damaged, 77, 10), None, "byte {at}");
            }
            assert_eq!(Row::unpack(&bytes[..at], 77, 10), None);
        }
    }

    #[test]
    fn what_is_divided_is_all_of_it() {
        let whole = Row {
            seconds: 0.0,
            ..row(1001)
        };
        for parts in [vec![10.0], vec![3.0, 10.0, 1.5], vec![0.1; 31]] {
            let rows = whole.divided(&parts);
            let mut all = Row::default();
            rows.iter().for_each(|r| all.add(r));
            assert_eq!((all.wide, all.narrow), (whole.wide, whole.narrow));
            assert!((all.seconds - parts.iter().sum::<f64>()).abs() < 1e-9);
            assert!(
                rows.iter()
                    .all(|r| r.narrow[SIZES..] == whole.narrow[SIZES..])
            );
        }
    }

    #[test]
    fn a_rows_numbers_have_names() {
        let counters = Counters {
            read_hits: 3,
            read_misses: 1,
            origin_read_ns: 5000,
            write_misses: 2,
            ..Counters::default()
        };
        let row = Row::of_disk(&counters, 9, 8);
        let named: Vec<(&str, u64)> = DISK_NAMES.iter().copied().zip(row.numbers()).collect();
        for wanted in [
            ("reads", 4),
            ("read_hits", 3),
            ("writes", 2),
            ("origin_read_us", 5),
            ("cached", 9),
            ("dirty", 8),
        ] {
            assert!(named.contains(&wanted), "{named:?}");
        }
        assert_eq!(row.counters(), counters);
    }
}
