//! Does the cache still equal the origin? Cached clean blocks are compared with it, as many as the
//! doubt asks for.
//!
//! - At every attach a *sample*: the first and last MiB, where every file system leaves its mark when
//!   it is mounted, and the blocks used most.
//! - Where only the origin's time of change is another (chmod, chown, a move), a *wide sample*: also
//!   the blocks cached last, which an older copy put back in place would not have, and some from all
//!   over the disk. If all of the former and enough in all fit, the origin is taken for unchanged.
//! - Where the user says that what waits on flash is right, *all*: only then the clean cache may stay.

use std::time::{Duration, Instant};

use hearth_engine::Engine;
use hearth_engine::api::DiskId;
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Device};

/// Bytes at each end of an origin that are compared if cached.
const EDGE_BYTES: u64 = 1 << 20;
/// Blocks at the edges: two times 1 MiB.
const EDGES_MAX: usize = 512;
/// Blocks compared at most besides the edges, the most used ones.
const HOTTEST_MAX: usize = 64;
/// Time for comparing blocks besides the edges: a start must not wait long for a slow origin.
const SAMPLE_TIME: Duration = Duration::from_millis(40);
/// The same where the answer spares the user a question, or the disk its cache: for the blocks that
/// were cached last, which a hard disk has to look for one by one, and for all others.
const RECENT_TIME: Duration = Duration::from_secs(5);
const WIDE_TIME: Duration = Duration::from_secs(2);
/// Blocks of a wide sample that were cached last, and from all over the flash.
const RECENT_MAX: usize = 512;
const SPREAD_MAX: usize = 512;
/// Blocks that must have been compared for a wide sample to mean something.
const WIDE_MIN: usize = 16;
/// Longest comparison of all clean blocks; a hard disk reads some 3 GB meanwhile.
const ALL_TIME: Duration = Duration::from_secs(20);
/// Most clean blocks that are compared: 4 GiB, 16 MiB of RAM for the list.
const ALL_MAX: usize = 1 << 20;
/// Blocks read at once.
const RUN_MAX: usize = 256;

/// What a comparison has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Blocks that are equal.
    pub equal: usize,
    /// Byte offset of the first one that is not.
    pub differs: Option<u64>,
    /// Nothing was left out: neither for want of time, nor because the origin could not be read.
    pub complete: bool,
}

impl Compared {
    /// A wide sample was wide enough to take the origin for unchanged.
    pub fn is_enough(&self) -> bool {
        self.differs.is_none() && self.complete && self.equal >= WIDE_MIN
    }
}

/// The sample of every attach; the offset of the first block that differs. An origin that cannot be
/// read is not different: it fails later, visibly.
pub fn sample(engine: &Engine, id: DiskId, device: &Device) -> Option<u64> {
    let (edges, elsewhere) = edges_and_hottest(engine, id, device);
    let first = compare(device, &edges, None);
    first.differs.or_else(|| {
        let end = Instant::now() + SAMPLE_TIME;
        compare(device, &elsewhere, Some(end)).differs
    })
}

/// A wide sample; complete if nothing was left out of the blocks cached last.
pub fn wide(engine: &Engine, id: DiskId, device: &Device) -> Compared {
    let (recent, mut others) = engine.sample_widely(id, RECENT_MAX, SPREAD_MAX);
    let (edges, hottest) = edges_and_hottest(engine, id, device);
    others.extend(hottest);
    others.extend(&edges);
    others.sort_unstable();
    others.dedup();
    others.retain(|block| recent.binary_search(block).is_err());
    compare_widely(device, &recent, &others, RECENT_TIME, WIDE_TIME)
}

/// The blocks cached last come first: an older copy of the origin has all others, so that no number of
/// those says anything.
fn compare_widely(
    device: &Device,
    recent: &[(u64, u32)],
    others: &[(u64, u32)],
    recent_time: Duration,
    others_time: Duration,
) -> Compared {
    let first = compare(device, recent, Some(Instant::now() + recent_time));
    if first.differs.is_some() || !first.complete {
        return first;
    }
    let then = compare(device, others, Some(Instant::now() + others_time));
    Compared {
        equal: first.equal + then.equal,
        differs: then.differs,
        complete: true,
    }
}

/// All clean blocks.
pub fn all(engine: &Engine, id: DiskId, device: &Device) -> Compared {
    let end = Instant::now() + ALL_TIME;
    match engine.all_clean(id, ALL_MAX) {
        Some(all) => compare(device, &all, Some(end)),
        None => Compared::default(),
    }
}

type Sample = Vec<(u64, u32)>;

fn edges_and_hottest(engine: &Engine, id: DiskId, device: &Device) -> (Sample, Sample) {
    let blocks = device.size().div_ceil(BLOCK);
    let edge = EDGE_BYTES / BLOCK;
    let edges = [
        0..edge.min(blocks),
        blocks.saturating_sub(edge).max(edge.min(blocks))..blocks,
    ];
    let is_edge = |block: u64| edges.iter().any(|r| r.contains(&block));
    let mut at_edges = engine.sample_clean(id, &edges, EDGES_MAX);
    at_edges.retain(|(block, _)| is_edge(*block));
    let mut elsewhere = engine.sample_clean(id, &[], HOTTEST_MAX);
    elsewhere.retain(|(block, _)| !is_edge(*block));
    (at_edges, elsewhere)
}

/// Compares blocks, sorted by number, with the origin.
fn compare(device: &Device, blocks: &[(u64, u32)], end: Option<Instant>) -> Compared {
    let size = device.size();
    let mut buffer = hearth_io::Buf::zeroed(RUN_MAX * BLOCK as usize).all();
    let mut found = Compared {
        complete: true,
        ..Compared::default()
    };
    for run in runs(blocks) {
        if end.is_some_and(|end| Instant::now() >= end) {
            found.complete = false;
            break;
        }
        match compare_run(device, size, run, buffer.bytes_mut()) {
            None => found.complete = false,
            Some(None) => found.equal += run.len(),
            Some(Some(at)) => {
                found.differs = Some(at);
                break;
            }
        }
    }
    found
}

/// Cuts a sorted sample into runs of adjacent blocks.
fn runs(sample: &[(u64, u32)]) -> impl Iterator<Item = &[(u64, u32)]> {
    sample
        .chunk_by(|a, b| a.0 + 1 == b.0)
        .flat_map(|run| run.chunks(RUN_MAX))
}

/// Where a run of adjacent blocks differs, if anywhere; `None` if it cannot be read.
fn compare_run(
    device: &Device,
    size: u64,
    run: &[(u64, u32)],
    buffer: &mut [u8],
) -> Option<Option<u64>> {
    let (first, _) = run.first()?;
    let offset = first * BLOCK;
    let len = (run.len() as u64 * BLOCK).min(size.saturating_sub(offset)) as usize;
    if len == 0 {
        return None;
    }
    let window = buffer.get_mut(..run.len() * BLOCK as usize)?;
    // The last block of an odd-sized origin is padded with zeros in the cache.
    window.get_mut(len..)?.fill(0);
    device.read_at(offset, window.get_mut(..len)?).ok()?;
    let differs = |((_, want), bytes): (&(u64, u32), &[u8])| crc32c(bytes) != *want;
    let at = run
        .iter()
        .zip(window.chunks(BLOCK as usize))
        .position(differs);
    Some(
        at.and_then(|at| run.get(at))
            .map(|(block, _)| block * BLOCK),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_io::{OpenMode, OriginSpec};

    #[test]
    fn runs_are_adjacent_and_bounded() {
        let sample: Vec<(u64, u32)> = (0..600).map(|b| (b, 0)).chain([(700, 0)]).collect();
        let lengths: Vec<usize> = runs(&sample).map(<[_]>::len).collect();
        assert_eq!(lengths, [256, 256, 88, 1]);
    }

    #[test]
    fn a_changed_block_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o");
        let data: Vec<u8> = (0..3 * BLOCK as usize + 100)
            .map(|i| (i % 251) as u8)
            .collect();
        std::fs::write(&path, &data).unwrap();
        let device = OriginSpec::file(&path).open(OpenMode::default()).unwrap();
        let crc = |i: usize| {
            let mut block = data[i * 4096..data.len().min((i + 1) * 4096)].to_vec();
            block.resize(4096, 0);
            crc32c(&block)
        };
        let good: Vec<(u64, u32)> = (0..4).map(|i| (i as u64, crc(i))).collect();
        let all = Compared {
            equal: 4,
            differs: None,
            complete: true,
        };
        assert_eq!(compare(&device, &good, None), all);
        let mut bad = good.clone();
        bad[3].1 ^= 1;
        assert_eq!(compare(&device, &bad, None).differs, Some(3 * 4096));
        // What there was no time for, or what cannot be read, is not equal.
        assert!(!compare(&device, &good, Some(Instant::now())).complete);
        let beyond = [(0, good[0].1), (1 << 20, 0)];
        let compared = compare(&device, &beyond, None);
        assert_eq!((compared.equal, compared.differs), (1, None));
        assert!(!compared.complete);
    }

    /// An older copy put back has all but what was cached last, wherever on the disk that is.
    #[test]
    fn what_was_cached_last_is_compared_first_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o");
        std::fs::write(&path, vec![7; 64 * BLOCK as usize]).unwrap();
        let device = OriginSpec::file(&path).open(OpenMode::default()).unwrap();
        let good = crc32c(&[7; BLOCK as usize]);
        let others: Vec<(u64, u32)> = (0..32).map(|block| (block, good)).collect();
        let recent: Vec<(u64, u32)> = (40..64).map(|block| (block, good)).collect();
        let (time, none) = (Duration::from_secs(60), Duration::ZERO);
        let wide = |recent: &[_], recent_time, others_time| {
            compare_widely(&device, recent, &others, recent_time, others_time)
        };
        let all = wide(&recent, time, time);
        assert_eq!((all.equal, all.is_enough()), (56, true));
        // Of the others there need not be time for all, of these there must.
        assert!(wide(&recent, time, none).is_enough());
        assert!(!wide(&recent, none, time).is_enough());
        let mut old = recent.clone();
        old[23].1 ^= 1;
        assert_eq!(wide(&old, time, none).differs, Some(63 * BLOCK));
        let few = wide(&recent[..2], time, none);
        assert!(few.complete && !few.is_enough());
    }
}
