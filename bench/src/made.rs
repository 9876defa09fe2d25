//! A made trace, for when there are no real ones: a skewed virtual machine.

use anyhow::Result;
use hearth_trace::{Format, Op, Record, Writer};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Bytes of the disk.
const DISK: u64 = 1 << 30;
/// Pieces of data that are asked for, each whole: 79 MiB together.
const PIECES: u64 = 6000;
/// They lie in extents of this size.
const EXTENT: u64 = 64 << 10;
/// Exponent of Zipf's law. With 1.1 a fifth of the pieces gets some 85 % of the requests.
const EXPONENT: f64 = 1.1;
/// Lengths of pieces in 4 KiB blocks; each as likely as it is often here.
const LENGTHS: [u64; 10] = [1, 1, 1, 1, 1, 2, 2, 4, 4, 16];

/// Writes `requests` requests of seed `seed`: pieces by Zipf's law (the n-th is used in proportion
/// to 1/n^1.1), scattered over the disk; nine reads to a write.
pub fn trace(path: &Path, requests: u64, seed: u64) -> Result<()> {
    let mut writer = Writer::new(BufWriter::new(File::create(path)?), Format::Hearth)?;
    let mut state = seed;
    let mut next = move || {
        state = hearth_policy::spread(state);
        state
    };
    for i in 0..requests {
        let u = (next() >> 11) as f64 / (1u64 << 53) as f64;
        // The inverse of the distribution with density 1/x^1.1 between 1 and the number of pieces.
        let tail = 1.0 - EXPONENT;
        let x = (1.0 - u * (1.0 - (PIECES as f64).powf(tail))).powf(1.0 / tail);
        let piece = (x as u64).clamp(1, PIECES) - 1;
        // An odd factor permutes the extents of the disk.
        let extent = piece * 7919 % (DISK / EXTENT);
        let blocks = LENGTHS[(hearth_policy::spread(piece) % 10) as usize];
        let within = hearth_policy::spread(!piece) % (16 - blocks + 1);
        writer.push(Record {
            time_us: i * 8000,
            disk: 0,
            op: if next() % 10 == 0 {
                Op::Write
            } else {
                Op::Read
            },
            offset: extent * EXTENT + within * 4096,
            length: (blocks * 4096) as u32,
        })?;
    }
    writer.finish()?;
    Ok(())
}
