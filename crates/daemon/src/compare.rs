//! Does the cache still equal the origin? Clean cached blocks are compared with it.
//!
//! Three questions, and how many blocks answer them:
//! - Is it the same disk? Before a disk is served, its *marks* are compared: the first and last MiB of the disk and the
//!   first MiB of each partition, where file systems keep what changes at every mount.
//! - Did it change while nothing served it? A *sample* is compared: the marks, then the blocks that were put on flash last,
//!   which an older copy of the origin does not have, then stretches of 1 MiB in random order, until enough blocks were
//!   compared or the time is up.
//! - Is the clean cache right although the origin changed? Then *all* clean blocks are compared.
//!
//! A block that changed and is not compared goes unnoticed. With `n` changed among `m` blocks of which `k` were compared at
//! random, that happens with a probability of about `(1 - k/m)^n`; [`ENOUGH`] makes it less than 1 % for five.

use std::ops::Range;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_engine::api::DiskId;
use hearth_engine::{Engine, STRETCH};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Device};

/// Bytes at each end of a disk, and at the beginning of each partition, that are marks.
const MARK_BYTES: u64 = 1 << 20;
/// Most marks: a disk with two ends and six partitions has as many if all of them are cached.
const MARKS_MAX: usize = 2048;
/// Longest comparison of marks, all of one disk: it is not served before.
const MARKS_TIME: Duration = Duration::from_secs(1);
/// Blocks that were put on flash last and are compared whatever the time.
const RECENT_MAX: usize = 256;
/// The same where the time is short.
const RECENT_FEW: usize = 64;
/// Longest comparison of a sample before a disk is served.
const BRIEF_TIME: Duration = Duration::from_millis(300);
/// Longest comparison of the blocks that were put on flash last: an origin that is slower than that hangs.
const RECENT_TIME: Duration = Duration::from_secs(60);
/// Share of the clean blocks that is enough: five changed blocks are missed with a probability of 0.4^5 = 1 %.
const ENOUGH: f64 = 0.61;
/// Blocks that must have been compared for that to mean something.
const FEWEST: usize = 16;
/// At most one block of so many is corrupt in an origin that nothing else wrote.
const CORRUPT_SHARE: usize = 100;
/// Most blocks of which a sample is chosen: 4 GiB, 16 MiB of RAM for the list.
const SPREAD_MAX: usize = 1 << 20;
/// Stretches that are read in one sweep over the disk.
const SWEEP: usize = 64;
/// Longest comparison of all clean blocks; a hard disk reads some 3 GB in that time.
const ALL_TIME: Duration = Duration::from_secs(20);
/// Blocks read at once.
const RUN_MAX: usize = STRETCH as usize;
/// Entries of a partition table that are looked at.
const PARTITIONS_MAX: usize = 128;

/// What a comparison has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Blocks that are equal.
    pub equal: usize,
    /// Byte offset of the first one that is not.
    pub differs: Option<u64>,
    /// Blocks that the origin could not return.
    pub unread: usize,
    /// It was ended before all was compared.
    pub stopped: bool,
    /// Clean blocks in all, if they were counted.
    pub all: usize,
}

impl Compared {
    /// Enough was compared to take an origin for unchanged whose time of change is another.
    pub fn is_enough(&self) -> bool {
        self.differs.is_none() && self.equal >= FEWEST
    }

    /// Nothing was left out: neither for want of time, nor because the origin could not be read.
    pub fn is_complete(&self) -> bool {
        !self.stopped && self.unread == 0
    }

    /// True if the sample is too small because the origin could not return some blocks.
    pub fn is_short(&self) -> bool {
        let few = self.equal < self.all.min(RECENT_MAX) || !is_enough(self.equal, self.all);
        self.differs.is_none() && self.unread > 0 && few
    }
}

/// True if a sample of `compared` blocks among `all` is large enough.
fn is_enough(compared: usize, all: usize) -> bool {
    compared as f64 >= ENOUGH * all as f64
}

type Sample = Vec<(u64, u32)>;

/// A disk to compare.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The cache.
    pub engine: &'a Engine,
    /// The disk in it.
    pub id: DiskId,
    /// Its origin.
    pub device: &'a Device,
}

impl Subject<'_> {
    /// Compares marks: the check of every start that may have to do with another disk.
    pub fn marks(self) -> Compared {
        let end = Instant::now() + MARKS_TIME;
        self.compare(&self.marked(), &mut |_| Instant::now() < end)
    }

    /// Compares a small sample, for a disk that has to be judged before it is served.
    pub fn brief(self) -> Compared {
        let (end, late) = (Instant::now() + BRIEF_TIME, Instant::now() + RECENT_TIME);
        // Nothing compared would be no answer, however slow the origin is.
        self.sample(RECENT_FEW, &mut |found, _| {
            Instant::now() < if found.equal == 0 { late } else { end }
        })
    }

    /// Compares a sample until `end`. The marks and the blocks that were put on flash last are compared in any case.
    /// `go_on` gets the blocks compared so far and how many clean ones there are, and can end it.
    pub fn thorough(self, end: Instant, mut go_on: impl FnMut(usize, usize) -> bool) -> Compared {
        let late = Instant::now() + RECENT_TIME;
        let mut needed = true;
        self.sample(RECENT_MAX, &mut |found, all| {
            needed &= found.equal < all.min(RECENT_MAX);
            let in_time = Instant::now() < if needed { late } else { end };
            in_time && go_on(found.equal, all)
        })
    }

    /// Compares all clean blocks, if that takes no longer than [`ALL_TIME`].
    pub fn all(self) -> Compared {
        let end = Instant::now() + ALL_TIME;
        let (all, count) = self.engine.clean_spread(self.id, SPREAD_MAX, 0);
        let mut found = self.compare(&all, &mut |_| Instant::now() < end);
        found.stopped |= count != all.len();
        found
    }

    /// Clean blocks that differ, with their checksums, if they are so few among those compared until `end` that the origin is
    /// the same one with corrupt blocks. Another program that writes a file or restores it changes more.
    pub fn corrupt(self, end: Instant) -> Option<Vec<(u64, u32)>> {
        let (all, _) = self.engine.clean_spread(self.id, SPREAD_MAX, 0);
        corrupt(self.device, &all, end)
    }

    /// The origin answers no read just now.
    pub fn is_silent(self) -> bool {
        let len = BLOCK.min(self.device.size()) as usize;
        let mut first = vec![0; len];
        self.device.read_at(0, &mut first).is_err()
    }

    fn sample(self, recent_max: usize, go_on: &mut dyn FnMut(Compared, usize) -> bool) -> Compared {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let mut prng = now.as_nanos() as u64 | 1;
        let (spread, all) = self.engine.clean_spread(self.id, SPREAD_MAX, prng);
        let mut first = self.engine.clean_recent(self.id, recent_max);
        first.sort_unstable();
        let mut found = Compared {
            all,
            ..Compared::default()
        };
        let mut add = |part: &[(u64, u32)], found: &mut Compared| {
            let before = found.equal;
            let step = self.compare(part, &mut |part| {
                let equal = before + part.equal;
                go_on(Compared { equal, ..*part }, all)
            });
            found.equal += step.equal;
            found.differs = found.differs.or(step.differs);
            found.unread += step.unread;
            found.stopped |= step.stopped;
            // An unreadable block proves nothing about the other blocks.
            !found.stopped && found.differs.is_none()
        };
        let marks = self.marked();
        if !add(&marks, &mut found) {
            return found;
        }
        first.retain(|block| marks.binary_search(block).is_err());
        if !add(&first, &mut found) {
            return found;
        }
        let is_new = |block: &(u64, u32)| {
            marks.binary_search(block).is_err() && first.binary_search(block).is_err()
        };
        let mut stretches: Vec<Sample> = spread
            .chunk_by(|a, b| a.0 / STRETCH == b.0 / STRETCH)
            .map(|stretch| stretch.iter().copied().filter(is_new).collect())
            .filter(|stretch: &Sample| !stretch.is_empty())
            .collect();
        shuffle(&mut stretches, &mut prng);
        for sweep in stretches.chunks_mut(SWEEP) {
            if is_enough(found.equal, all) {
                break;
            }
            sweep.sort_unstable();
            let sweep: Sample = sweep.concat();
            if !add(&sweep, &mut found) {
                break;
            }
        }
        found
    }

    /// Clean blocks where partitions and file systems keep what changes at every mount, in order.
    fn marked(self) -> Sample {
        let size = self.device.size();
        let mut starts = vec![0, size.saturating_sub(MARK_BYTES)];
        starts.extend(partitions(self.device));
        starts.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for start in starts.into_iter().filter(|start| *start < size) {
            let end = start.saturating_add(MARK_BYTES).min(size).div_ceil(BLOCK);
            match ranges.last_mut().filter(|last| start / BLOCK <= last.end) {
                Some(last) => last.end = last.end.max(end),
                None => ranges.push(start / BLOCK..end),
            }
        }
        self.engine.clean_within(self.id, &ranges, MARKS_MAX)
    }

    /// Compares blocks, sorted by number, until one differs or `go_on` says that it is enough.
    fn compare(self, blocks: &[(u64, u32)], go_on: &mut dyn FnMut(&Compared) -> bool) -> Compared {
        let is_still = |block: u64, sum: u32| {
            let now = self.engine.clean_sums(self.id, block..block + 1);
            matches!(now[..], [(at, now, _)] if (at, now) == (block, sum))
        };
        compare(self.device, blocks, &is_still, go_on)
    }
}

/// See [`Subject::corrupt`].
fn corrupt(device: &Device, all: &[(u64, u32)], end: Instant) -> Option<Vec<(u64, u32)>> {
    let size = device.size();
    let mut buffer = hearth_io::Buf::zeroed(RUN_MAX * BLOCK as usize).all();
    let (mut equal, mut corrupt) = (0, Vec::new());
    for run in runs(all).take_while(|_| Instant::now() < end) {
        // Unread blocks prove nothing.
        let read = compare_run(device, size, run, buffer.bytes_mut());
        let Some(differing) = read else { continue };
        equal += run.len() - differing.len();
        corrupt.extend(differing);
    }
    let is_same = equal >= FEWEST && corrupt.len() <= equal / CORRUPT_SHARE;
    is_same.then_some(corrupt)
}

fn compare(
    device: &Device,
    blocks: &[(u64, u32)],
    is_still: &dyn Fn(u64, u32) -> bool,
    go_on: &mut dyn FnMut(&Compared) -> bool,
) -> Compared {
    let size = device.size();
    let mut buffer = hearth_io::Buf::zeroed(RUN_MAX * BLOCK as usize).all();
    let mut found = Compared::default();
    for run in runs(blocks) {
        if !go_on(&found) {
            found.stopped = true;
            break;
        }
        let Some(differing) = compare_run(device, size, run, buffer.bytes_mut()) else {
            found.unread += run.len();
            continue;
        };
        // The disk may be served: a write changes the origin before the cache knows the new content.
        let really = differing.iter().copied().find(|(block, sum)| {
            is_still(*block, *sum)
                && compare_run(device, size, &[(*block, *sum)], buffer.bytes_mut())
                    .is_some_and(|differing| !differing.is_empty())
                && is_still(*block, *sum)
        });
        found.equal += run.len() - differing.len();
        if let Some((block, _)) = really {
            found.differs = Some(block * BLOCK);
            break;
        }
    }
    found
}

/// Cuts a sorted sample into runs, each for one read. Small gaps are read too: a seek takes longer.
fn runs(sample: &[(u64, u32)]) -> impl Iterator<Item = &[(u64, u32)]> {
    sample.chunk_by(|a, b| a.0 / STRETCH == b.0 / STRETCH)
}

/// The blocks of a run that differ; `None` if it cannot be read.
fn compare_run(
    device: &Device,
    size: u64,
    run: &[(u64, u32)],
    buffer: &mut [u8],
) -> Option<Vec<(u64, u32)>> {
    let ((first, _), (last, _)) = (run.first()?, run.last()?);
    let offset = first * BLOCK;
    let whole = (last + 1 - first) * BLOCK;
    let len = whole.min(size.saturating_sub(offset)) as usize;
    if len == 0 {
        return None;
    }
    let window = buffer.get_mut(..whole as usize)?;
    // The last block of an odd-sized origin is padded with zeros in the cache.
    window.get_mut(len..)?.fill(0);
    device.read_at(offset, window.get_mut(..len)?).ok()?;
    let differs = |(block, want): &&(u64, u32)| {
        let at = ((block - first) * BLOCK) as usize;
        window
            .get(at..at + BLOCK as usize)
            .is_none_or(|bytes| crc32c(bytes) != *want)
    };
    Some(run.iter().filter(differs).copied().collect())
}

/// Byte offsets at which partitions begin: of an MBR's four entries or a GUID partition table (UEFI 2.10, section 5.3).
/// Without a table there are none.
fn partitions(device: &Device) -> Vec<u64> {
    let mut head = vec![0; 64 << 10];
    let len = (device.size() as usize).min(head.len());
    if len < 1024 || device.read_at(0, &mut head[..len]).is_err() {
        return Vec::new();
    }
    let le = |at: usize, bytes: usize| {
        let field = head.get(at..at + bytes).unwrap_or_default();
        field
            .iter()
            .rev()
            .fold(0u64, |n, byte| n << 8 | u64::from(*byte))
    };
    let mut starts = Vec::new();
    for sector in [512, 4096] {
        if head.get(sector..sector + 8) == Some(b"EFI PART") {
            let table = le(sector + 72, 8).saturating_mul(sector as u64);
            let count = (le(sector + 80, 4) as usize).min(PARTITIONS_MAX);
            let entry = le(sector + 84, 4) as usize;
            for i in 0..count {
                let at = usize::try_from(table).unwrap_or(usize::MAX);
                let at = at
                    .saturating_add(i.saturating_mul(entry))
                    .saturating_add(32);
                if at < head.len() - 8 && le(at, 8) > 0 {
                    starts.push(le(at, 8).saturating_mul(sector as u64));
                }
            }
        }
    }
    if starts.is_empty() && head[510..512] == [0x55, 0xAA] {
        let first = (0..4).map(|i| le(446 + i * 16 + 8, 4) * 512);
        starts.extend(first.filter(|start| *start > 0));
    }
    starts
}

/// Puts a list in random order (Fisher and Yates), with a linear congruential generator.
fn shuffle<T>(list: &mut [T], state: &mut u64) {
    for i in (1..list.len()).rev() {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        list.swap(i, (*state >> 33) as usize % (i + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_io::{OpenMode, OriginSpec};

    #[test]
    fn runs_are_bounded_by_one_read() {
        let sample: Vec<(u64, u32)> = (0..600).map(|b| (b, 0)).chain([(700, 0)]).collect();
        let lengths: Vec<usize> = runs(&sample).map(<[_]>::len).collect();
        assert_eq!(lengths, [256, 256, 89]);
    }

    fn device(bytes: &[u8]) -> (tempfile::TempDir, Device) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o");
        std::fs::write(&path, bytes).unwrap();
        let device = OriginSpec::file(&path).open(OpenMode::default()).unwrap();
        (dir, device)
    }

    #[test]
    fn changed_block_is_found() {
        let data: Vec<u8> = (0..3 * BLOCK as usize + 100)
            .map(|i| (i % 251) as u8)
            .collect();
        let (_dir, device) = device(&data);
        let crc = |i: usize| {
            let mut block = data[i * 4096..data.len().min((i + 1) * 4096)].to_vec();
            block.resize(4096, 0);
            crc32c(&block)
        };
        let good: Vec<(u64, u32)> = (0..4).map(|i| (i as u64, crc(i))).collect();
        let look =
            |blocks: &[_], still: bool| compare(&device, blocks, &|_, _| still, &mut |_| true);
        let all = Compared {
            equal: 4,
            ..Compared::default()
        };
        assert_eq!(look(&good, true), all);
        // A gap is read and not compared.
        assert_eq!(look(&[good[0], good[3]], true).equal, 2);
        let mut bad = good.clone();
        bad[3].1 ^= 1;
        assert_eq!(look(&bad, true).differs, Some(3 * 4096));
        // The cache has got other content in the meantime.
        let changing = look(&bad, false);
        assert_eq!((changing.equal, changing.differs), (3, None));
        // Blocks that were not compared for lack of time, or cannot be read, do not count as equal.
        assert!(compare(&device, &good, &|_, _| true, &mut |_| false).stopped);
        let beyond = [(0, good[0].1), (1 << 20, 0)];
        let compared = look(&beyond, true);
        assert_eq!((compared.equal, compared.differs), (1, None));
        assert!(!compared.is_complete() && compared.unread == 1);
        // A difference behind what cannot be read is found.
        let hidden = [(1 << 20, 0), (0, good[0].1), bad[3]];
        assert_eq!(look(&hidden[..], true).differs, Some(3 * 4096));
    }

    #[test]
    fn unread_blocks_do_not_make_files_alike() {
        let (_dir, device) = device(&vec![1; 200 * BLOCK as usize]);
        let sum = crc32c(&[1; BLOCK as usize]);
        let end = Instant::now() + Duration::from_secs(600);
        let good: Vec<(u64, u32)> = (0..200).map(|block| (block, sum)).collect();
        let mut one_bad = good.clone();
        one_bad[7].1 ^= 1;
        assert_eq!(corrupt(&device, &one_bad, end), Some(vec![one_bad[7]]));
        // Behind its end nothing can be read.
        let few = (0..8).chain(1 << 20..(1 << 20) + 200);
        let few: Vec<(u64, u32)> = few.map(|block| (block, sum)).collect();
        assert_eq!(corrupt(&device, &few, end), None);
        let short = |equal, unread| Compared {
            equal,
            unread,
            all: 1000,
            ..Compared::default()
        };
        assert!(short(600, 1).is_short() && short(10, 990).is_short());
        assert!(!short(610, 390).is_short() && !short(300, 0).is_short());
    }

    #[test]
    fn partitions_of_both_tables_are_found() {
        let mut disk = vec![0; 128 << 10];
        assert!(partitions(&device(&disk).1).is_empty());
        disk[510..512].copy_from_slice(&[0x55, 0xAA]);
        disk[446 + 8..446 + 12].copy_from_slice(&2048u32.to_le_bytes());
        disk[446 + 24..446 + 28].copy_from_slice(&9000u32.to_le_bytes());
        assert_eq!(partitions(&device(&disk).1), [2048 * 512, 9000 * 512]);
        for sector in [512usize, 4096] {
            let mut disk = disk.clone();
            disk[sector..sector + 8].copy_from_slice(b"EFI PART");
            disk[sector + 72..sector + 80].copy_from_slice(&2u64.to_le_bytes());
            disk[sector + 80..sector + 84].copy_from_slice(&u32::MAX.to_le_bytes());
            disk[sector + 84..sector + 88].copy_from_slice(&128u32.to_le_bytes());
            for (i, first) in [(0, 256u64), (3, 700)] {
                let at = 2 * sector + i * 128 + 32;
                disk[at..at + 8].copy_from_slice(&first.to_le_bytes());
            }
            let unit = sector as u64;
            assert_eq!(partitions(&device(&disk).1), [256 * unit, 700 * unit]);
            // A table that says it lies anywhere is only not found.
            disk[sector + 72..sector + 80].copy_from_slice(&u64::MAX.to_le_bytes());
            disk[sector + 84..sector + 88].copy_from_slice(&u32::MAX.to_le_bytes());
            assert_eq!(partitions(&device(&disk).1).len(), 2, "those of the MBR");
        }
    }

    #[test]
    fn shuffle_keeps_and_moves_everything() {
        let mut list: Vec<u32> = (0..1000).collect();
        shuffle(&mut list, &mut 1);
        let moved = list.iter().zip(0..).filter(|(a, b)| *a != b).count();
        assert!(moved > 900);
        list.sort_unstable();
        assert!(list.iter().zip(0..).all(|(a, b)| *a == b));
    }
}
