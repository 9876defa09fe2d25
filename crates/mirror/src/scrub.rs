//! What a scrub compares, and what may be asked of it.

use crate::machine::{Cached, Finding, Held, Seen, decide};
use hearth_io::{BLOCK, checksum::crc32c};

/// What is to be done about scrubs. Nothing set: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubOrder {
    /// Begin one, or go on with one that was called off.
    pub begin: bool,
    /// Begin it at the start, whatever was done.
    pub anew: bool,
    /// Call off the one under way.
    pub cancel: bool,
    /// What was found and is not decided is to be as this leg has it.
    pub prefer: Option<String>,
    /// Bytes of the disk a second at most; 0 is no limit.
    pub rate: Option<u64>,
    /// Days from one scrub to the next; 0: only when asked for.
    pub every_days: Option<u32>,
}

/// What is under way.
#[derive(Debug, Default)]
pub(crate) struct Scrubbing {
    /// What was known when it began; what it finds comes on top.
    pub(crate) before: crate::habits::ScrubState,
    /// It looks at what was not decided, and nothing else.
    pub(crate) deciding: bool,
    pub(crate) kept_ns: u64,
}

/// The cache of a disk.
pub trait Cache: Send + Sync {
    /// Blocks in this range that are cached and equal to the origin, in order. None that is just being changed. Must
    /// not wait for the mirror.
    fn clean(&self, offset: u64, len: u64) -> Vec<Cached>;

    /// Drops what is cached from `offset` on and does not have these CRC32Cs, block by block, and whatever is being
    /// read there; nothing that is dirty. Must not wait for the mirror.
    fn drop_unlike(&self, offset: u64, right: &[u32]);
}

/// Compares what legs hold from `offset` on, block by block, with one another and with what is cached. The offset is
/// that of a block.
pub fn compare(
    offset: u64,
    legs: &[(usize, &[u8])],
    known: &[Cached],
    prefer: Option<usize>,
) -> Seen {
    let sum = match legs.first() {
        Some((_, first)) if first.len() as u64 <= BLOCK => sum_of(first),
        _ => 0,
    };
    let findings = differences(offset, legs, known, prefer);
    Seen { findings, sum }
}

fn differences(
    offset: u64,
    legs: &[(usize, &[u8])],
    known: &[Cached],
    prefer: Option<usize>,
) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    let Some((_, first)) = legs.first() else {
        return found;
    };
    if known.is_empty() && legs.iter().all(|(_, bytes)| bytes == first) {
        return found;
    }
    let step = BLOCK as usize;
    for start in (0..first.len()).step_by(step) {
        let here = |bytes: &'_ [u8]| -> Vec<u8> {
            let end = (start + step).min(bytes.len());
            bytes.get(start..end).unwrap_or_default().to_vec()
        };
        let place = offset + start as u64;
        let known = known
            .binary_search_by_key(&(place / BLOCK), |cached| cached.block)
            .ok()
            .and_then(|i| known.get(i))
            .copied();
        let mut held: Vec<Held> = Vec::new();
        let blocks: Vec<Vec<u8>> = legs.iter().map(|(_, bytes)| here(bytes)).collect();
        let Some(one) = blocks.first() else {
            continue;
        };
        if known.is_none() && blocks.iter().all(|block| block == one) {
            continue;
        }
        for ((leg, _), block) in legs.iter().zip(&blocks) {
            held.push(Held {
                leg: *leg,
                class: blocks.iter().position(|b| b == block).unwrap_or(0),
                sum: sum_of(block),
            });
        }
        if let Some(finding) = decide(place, one.len() as u64, &held, known, prefer)
            && !found.last_mut().is_some_and(|last| joins(last, &finding))
        {
            found.push(finding);
        }
    }
    found
}

/// The checksums of blocks, of which the last may be cut short.
pub fn sums_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK as usize).map(sum_of).collect()
}

/// The checksum of a block as it is cached: the last one of a disk of an odd size is filled up with zeros.
fn sum_of(block: &[u8]) -> u32 {
    let mut whole = block.to_vec();
    whole.resize(BLOCK as usize, 0);
    crc32c(&whole)
}

/// Takes a finding into the one before, if it goes on with it.
fn joins(last: &mut Finding, next: &Finding) -> bool {
    match (last, next) {
        (
            Finding::Right {
                offset,
                len,
                leg,
                sum,
                wrong,
            },
            Finding::Right {
                offset: at,
                len: more,
                leg: other,
                sum: next,
                wrong: also,
            },
        ) if *offset + *len == *at && leg == other && wrong == also => {
            *len += more;
            *sum = crc32c(&[sum.to_le_bytes(), next.to_le_bytes()].concat());
            true
        }
        (Finding::Undecided(last), Finding::Undecided(next))
            if last.offset + last.len == next.offset
                && last.cached == next.cached
                && last.legs.len() == next.legs.len() =>
        {
            last.len += next.len;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_go_on_are_one_place() {
        let a = vec![1; 5 * 4096 + 100];
        let mut b = a.clone();
        for at in [4096, 2 * 4096 + 7, 5 * 4096] {
            b[at] = 2;
        }
        let legs = [(0, &a[..]), (1, &b[..])];
        let found = compare(8192, &legs, &[], None).findings;
        let place = |finding: &Finding| match finding {
            Finding::Undecided(d) => (d.offset, d.len),
            Finding::Right { offset, len, .. } => (*offset, *len),
        };
        let places: Vec<(u64, u64)> = found.iter().map(place).collect();
        assert_eq!(places, [(8192 + 4096, 2 * 4096), (8192 + 5 * 4096, 100)]);
        // The cache has one block as the second leg has it, and the odd one as the first.
        let cached = |block, sum| Cached {
            block,
            sum,
            written: true,
        };
        let known = [
            cached(3, sum_of(&b[4096..8192])),
            cached(7, sum_of(&a[5 * 4096..])),
        ];
        let found = compare(8192, &legs, &known, None).findings;
        let right = |finding: &Finding| match finding {
            Finding::Undecided(_) => None,
            Finding::Right { leg, .. } => Some(*leg),
        };
        let legs_right: Vec<Option<usize>> = found.iter().map(right).collect();
        assert_eq!(legs_right, [Some(1), None, Some(0)]);
        assert_eq!(
            differences(0, &[(0, &a), (1, &a)], &[cached(0, 5)], None).len(),
            1
        );
        assert!(differences(0, &[(0, &a), (1, &a)], &[], None).is_empty());
    }
}
