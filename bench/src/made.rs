//! A made trace, for when there are no real ones: a skewed virtual machine.

use anyhow::Result;
use hearth_trace::{Op, Output, Record, Writer};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Bytes of the disk.
const DISK: u64 = 1 << 30;
/// Extents of the disk that are used, of 64 KiB each: a working set of 320 MiB.
const EXTENTS: u64 = 5120;
const EXTENT: u64 = 64 << 10;
/// Lengths of requests in 4 KiB blocks; each as likely as it is often here.
const LENGTHS: [u64; 10] = [1, 1, 1, 1, 1, 2, 2, 4, 4, 16];

/// Writes `requests` requests of seed `seed`: extents by Zipf's law (the n-th is used in proportion to
/// 1/n), scattered over the disk; positions within them even; nine reads to a write.
pub fn trace(path: &Path, requests: u64, seed: u64) -> Result<()> {
    let mut writer = Writer::new(BufWriter::new(File::create(path)?), Output::Hearth)?;
    let mut state = seed;
    let mut next = move || {
        state = hearth_policy::spread(state);
        state
    };
    for i in 0..requests {
        let u = (next() >> 11) as f64 / (1u64 << 53) as f64;
        // The inverse of the distribution with density 1/x.
        let rank = ((EXTENTS as f64).powf(u) as u64 - 1).min(EXTENTS - 1);
        // An odd factor permutes the extents of the disk.
        let extent = rank * 7919 % (DISK / EXTENT);
        let blocks = LENGTHS[(next() % 10) as usize];
        let within = next() % (16 - blocks + 1);
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
