//! A disk's curve as bytes, so that whoever watches next goes on with it.
//!
//! The form is in `docs/curves.md`. Nothing rests on these bytes but advice, so what is not wholly right is refused and
//! measured anew; but a process that serves disks reads them, so nothing in them is trusted.

use std::fmt;

use hearth_io::checksum::crc32c;
use hearth_policy::histogram::Mix;
use hearth_policy::ladder::{KeptLadder, KeptRung};
use hearth_policy::mrc::{KeptBlock, KeptMrc};

/// Most bytes of one disk: with its past in the second service's files less than 0.6 MiB.
pub const KEPT_MAX: usize = 96 << 10;
/// What they begin with; the last byte is the version.
const MAGIC: &[u8; 8] = b"HearthC\x01";
/// Most of each kind that any curve has: buckets of a curve, of what pulls at it, and miniatures.
const SIZES_MAX: u32 = 20_000;
const PULLS_MAX: u32 = 2000;
const RUNGS_MAX: u32 = 32;

/// Which disk it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptOf {
    /// The disk's serial number.
    pub serial: [u8; 16],
    /// Its size, bytes; 0 of a file that may grow.
    pub size: u64,
}

/// Why it cannot be gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptError {
    /// Another version wrote it.
    Version(u8),
    /// It is of another disk, or of the disk before it was changed.
    OtherDisk,
    /// What was written is not all there.
    Damaged,
}

impl fmt::Display for KeptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeptError::Version(version) => write!(f, "it has the form {version}, not 1"),
            KeptError::OtherDisk => f.write_str("the disk was changed"),
            KeptError::Damaged => f.write_str("it is damaged"),
        }
    }
}

impl std::error::Error for KeptError {}

/// What is kept.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept {
    pub counted_ns: u64,
    pub since_halved_ns: u64,
    pub mrc: KeptMrc,
    pub ladder: KeptLadder,
    pub mix: Mix,
}

fn varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn sizes(out: &mut Vec<u8>, counts: &[(u64, f32)]) {
    let mut before = 0;
    for (size, count) in counts {
        varint(out, size - before);
        out.extend(count.to_le_bytes());
        before = *size;
    }
}

impl Kept {
    /// As bytes, never more than [`KEPT_MAX`].
    pub fn encode(mut self, of: &KeptOf) -> Vec<u8> {
        loop {
            let bytes = self.bytes(of);
            // What is not sampled cannot be so much.
            if bytes.len() <= KEPT_MAX || self.mrc.blocks.is_empty() {
                return bytes;
            }
            self.mrc.thin(self.mrc.blocks.len() * 7 / 8);
        }
    }

    fn bytes(&self, of: &KeptOf) -> Vec<u8> {
        let (mrc, ladder) = (&self.mrc, &self.ladder);
        let mut out = MAGIC.to_vec();
        out.extend([0; 4]);
        out.extend(of.serial);
        for n in [of.size, self.counted_ns, self.since_halved_ns] {
            out.extend(n.to_le_bytes());
        }
        let (hits, pulls) = (mrc.hits_from.len() as u32, mrc.pull.len() as u32);
        for n in [
            mrc.threshold,
            mrc.blocks.len() as u32,
            mrc.marks[0],
            mrc.marks[1],
            hits,
            pulls,
            ladder.blocks,
            ladder.next,
            ladder.rungs.len() as u32,
        ] {
            out.extend(n.to_le_bytes());
        }
        for n in [mrc.pulls, mrc.sampled, mrc.taken, mrc.accesses, mrc.missed] {
            out.extend(n.to_le_bytes());
        }
        varint(&mut out, self.mix.writes);
        for n in self.mix.read_octaves {
            varint(&mut out, n);
        }
        for block in &mrc.blocks {
            varint(&mut out, block.key);
            varint(&mut out, u64::from(block.counted));
        }
        sizes(&mut out, &mrc.hits_from);
        sizes(&mut out, &mrc.pull);
        for rung in &ladder.rungs {
            out.extend(rung.doubled.to_le_bytes());
            for n in rung.counts {
                out.extend(n.to_le_bytes());
            }
        }
        let len = out.len() as u32 + 4;
        out[8..12].copy_from_slice(&len.to_le_bytes());
        let sum = crc32c(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// What was encoded of this disk.
    pub fn decode(bytes: &[u8], of: &KeptOf) -> Result<Kept, KeptError> {
        let damaged = KeptError::Damaged;
        let (magic, _) = bytes.split_at_checked(MAGIC.len()).ok_or(damaged)?;
        match magic.split_last() {
            Some((version, name)) if name == &MAGIC[..7] && *version != MAGIC[7] => {
                return Err(KeptError::Version(*version));
            }
            _ if magic == MAGIC => {}
            _ => return Err(damaged),
        }
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or(damaged)?;
        if bytes.len() > KEPT_MAX || crc32c(body) != u32::from_le_bytes(*sum) {
            return Err(damaged);
        }
        let mut rest = Rest(&body[MAGIC.len()..]);
        Kept::parse(&mut rest, bytes.len(), of)?.ok_or(damaged)
    }

    fn parse(rest: &mut Rest<'_>, len: usize, of: &KeptOf) -> Result<Option<Kept>, KeptError> {
        let Some((told, found)) = rest.head() else {
            return Ok(None);
        };
        if found != *of {
            return Err(KeptError::OtherDisk);
        }
        Ok(rest
            .body()
            .filter(|_| told as usize == len && rest.0.is_empty()))
    }
}

/// What has not been read yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn f64(&mut self) -> Option<f64> {
        self.take().map(f64::from_le_bytes)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.take()?;
            n |= u64::from(byte & 0x7f).checked_shl(shift)?;
            if byte < 0x80 {
                return Some(n);
            }
        }
        None
    }

    fn head(&mut self) -> Option<(u32, KeptOf)> {
        let len = self.u32()?;
        let (serial, size) = (self.take()?, self.u64()?);
        Some((len, KeptOf { serial, size }))
    }

    fn sizes(&mut self, count: u32) -> Option<Vec<(u64, f32)>> {
        let mut before = 0u64;
        (0..count)
            .map(|_| {
                before = before.checked_add(self.varint()?)?;
                Some((before, f32::from_le_bytes(self.take()?)))
            })
            .collect()
    }

    fn body(&mut self) -> Option<Kept> {
        let (counted_ns, since_halved_ns) = (self.u64()?, self.u64()?);
        let threshold = self.u32()?;
        let blocks = self.u32()?;
        let marks = [self.u32()?, self.u32()?];
        let (hits, pulls_len) = (self.u32()?, self.u32()?);
        let (mini, next, rungs) = (self.u32()?, self.u32()?, self.u32()?);
        let few = blocks as usize <= hearth_policy::mrc::SAMPLES
            && hits <= SIZES_MAX
            && pulls_len <= PULLS_MAX
            && rungs <= RUNGS_MAX;
        if !few {
            return None;
        }
        let (pulls, sampled, taken) = (self.f64()?, self.f64()?, self.f64()?);
        let (accesses, missed) = (self.f64()?, self.f64()?);
        let mut mix = Mix {
            writes: self.varint()?,
            ..Mix::default()
        };
        for octave in &mut mix.read_octaves {
            *octave = self.varint()?;
            mix.reads = mix.reads.checked_add(*octave)?;
        }
        // Counting goes on.
        mix.reads.checked_add(mix.writes)?.checked_add(1 << 62)?;
        let blocks = (0..blocks)
            .map(|_| {
                let key = self.varint()?;
                let counted = u32::try_from(self.varint()?).ok()?;
                Some(KeptBlock { key, counted })
            })
            .collect::<Option<_>>()?;
        let mrc = KeptMrc {
            threshold,
            blocks,
            marks,
            hits_from: self.sizes(hits)?,
            pull: self.sizes(pulls_len)?,
            pulls,
            sampled,
            taken,
            accesses,
            missed,
        };
        let rungs = (0..rungs)
            .map(|_| {
                let doubled = self.u32()?;
                let mut counts = [0.0; 5];
                for n in &mut counts {
                    *n = self.f64()?;
                }
                Some(KeptRung { doubled, counts })
            })
            .collect::<Option<_>>()?;
        Some(Kept {
            counted_ns,
            since_halved_ns,
            mrc,
            ladder: KeptLadder {
                blocks: mini,
                next,
                rungs,
            },
            mix,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk;
    use hearth_policy::mrc::{ALL, SAMPLES, place};

    const OF: KeptOf = KeptOf {
        serial: *b"0123456789abcdef",
        size: 1 << 30,
    };

    fn small() -> Kept {
        let mut mix = Mix::default();
        (0..300).for_each(|_| mix.add(false, 4096));
        mix.add(true, 512);
        Kept {
            counted_ns: 7_000_000_000,
            since_halved_ns: 5,
            mrc: KeptMrc {
                threshold: ALL,
                blocks: vec![
                    KeptBlock { key: 1, counted: 2 },
                    KeptBlock {
                        key: 300,
                        counted: 0,
                    },
                ],
                marks: [0, 1],
                hits_from: vec![(1, 1.5), (200, 0.25)],
                pull: vec![(1, 2.0)],
                pulls: 3.0,
                sampled: 4.0,
                taken: 4.0,
                accesses: 5.0,
                missed: 0.5,
            },
            ladder: KeptLadder {
                blocks: 192,
                next: 1,
                rungs: vec![KeptRung {
                    doubled: 0,
                    counts: [1.0, 2.0, 3.0, 4.0, 5.0],
                }],
            },
            mix,
        }
    }

    #[test]
    fn golden_bytes() {
        let golden = include_bytes!("golden/curve-1.bin");
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/golden/curve-1.bin");
        let bytes = small().encode(&OF);
        assert!(bytes == golden, "{path} is not what is written today");
        assert_eq!(Kept::decode(golden, &OF), Ok(small()));
    }

    #[test]
    fn anything_else_is_refused() {
        let bytes = small().encode(&OF);
        let other = KeptOf { size: 5, ..OF };
        assert_eq!(Kept::decode(&bytes, &other), Err(KeptError::OtherDisk));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(Kept::decode(&bad, &OF).is_err(), "byte {at}");
            // With a sum that is right, it is refused or gone on with.
            let end = bad.len() - 4;
            let sum = crc32c(&bad[..end]).to_le_bytes();
            bad[end..].copy_from_slice(&sum);
            if let Ok(kept) = Kept::decode(&bad, &OF) {
                let disk = Disk::new(1, 4096);
                if disk.recall(9_000_000_000, kept).is_ok() {
                    let curve = disk.curve(9_000_000_001).expect("a curve");
                    let points = curve.points.iter().chain(&curve.lru);
                    assert!(
                        points.into_iter().all(|p| (0.0..=1.0).contains(&p.1)),
                        "byte {at}"
                    );
                    assert!(disk.keep(9_000_000_002, u64::MAX).is_some());
                }
            }
            assert!(Kept::decode(&bytes[..at], &OF).is_err(), "{at} bytes");
        }
        let mut newer = bytes;
        newer[7] = 2;
        assert_eq!(Kept::decode(&newer, &OF), Err(KeptError::Version(2)));
    }

    #[test]
    fn the_largest_curve_is_made_to_fit() {
        let mut kept = small();
        // Blocks far out on a large disk take the most bytes.
        kept.mrc.blocks = (0..SAMPLES as u64)
            .map(|i| KeptBlock {
                key: (1 << 35) + i,
                counted: 1 << 30,
            })
            .collect();
        kept.mrc.hits_from = (0..3000).map(|i| (i << 20, 1.0)).collect();
        let bytes = kept.encode(&OF);
        assert!(bytes.len() <= KEPT_MAX, "{}", bytes.len());
        let again = Kept::decode(&bytes, &OF).expect("it is right").mrc;
        assert!(again.blocks.len() > SAMPLES / 2 && again.threshold < ALL);
        assert!(again.blocks.iter().all(|b| place(b.key) < again.threshold));
    }
}
