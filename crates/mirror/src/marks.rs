//! What was written to a mirror last: the proof that a leg is not an older copy of itself.
//!
//! A leg may be rolled back while nobody looks: by a snapshot of its storage, a copy, an array. Nothing is written on
//! legs that would show it, and block devices have no times. But what was written last is on every leg that is current,
//! and an older copy lacks it. So the checksums of the places written last are kept with the mirror's notes, and
//! compared with what each leg holds before any leg is served.
//!
//! A mark is noted when its region is not noted as touched any more: then all legs have what was written durably. Before
//! the next write there, the region is noted again, and the mark is not.

use crate::sample::Sample;
use hearth_format::mirror::{MARKS_MAX, Mark};
use hearth_io::{BLOCK, BufSlice, checksum::crc32c};
use std::collections::VecDeque;

/// The newest places, all of them.
const LAST: usize = 16;
/// Of those before, at most one in so many nanoseconds: under load the newest are all in regions that count as touched.
const SPACING_NS: u64 = 1_000_000_000;

/// The places written last, the newest first.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    last: VecDeque<Mark>,
    spaced: VecDeque<Mark>,
    spaced_ns: u64,
}

impl Marks {
    pub fn new(known: &[Mark]) -> Marks {
        Marks {
            last: known.iter().take(LAST).copied().collect(),
            spaced: known.iter().skip(LAST).copied().collect(),
            spaced_ns: 0,
        }
    }

    /// Something is about to be written; `sum` is the checksum of the last whole block of it, if there is one.
    pub fn wrote(&mut self, now: u64, offset: u64, len: u64, sum: Option<u32>) {
        self.forget(offset, len);
        let Some((sum, block)) = sum.zip(((offset + len) / BLOCK).checked_sub(1)) else {
            return;
        };
        self.last.push_front(Mark { block, sum });
        if self.last.len() <= LAST {
            return;
        }
        let older = self.last.pop_back();
        if let Some(older) = older.filter(|_| now >= self.spaced_ns + SPACING_NS) {
            self.spaced_ns = now;
            self.spaced.push_front(older);
            self.spaced.truncate(MARKS_MAX - LAST);
        }
    }

    /// What is there now is not known.
    pub fn forget(&mut self, offset: u64, len: u64) {
        let blocks = offset / BLOCK..(offset + len).div_ceil(BLOCK);
        for marks in [&mut self.last, &mut self.spaced] {
            marks.retain(|mark| !blocks.contains(&mark.block));
        }
    }

    pub fn list(&self) -> Vec<Mark> {
        self.last.iter().chain(&self.spaced).copied().collect()
    }
}

/// The checksum of the last whole block that is written to `offset`; `bufs` are empty if these are zeros.
pub(crate) fn last_sum(offset: u64, len: u64, bufs: &[BufSlice]) -> Option<u32> {
    let end = (offset + len) / BLOCK * BLOCK;
    let from = end.checked_sub(BLOCK).filter(|from| *from >= offset)?;
    let mut block = [0; BLOCK as usize];
    let (mut at, mut filled) = (offset, 0);
    for buf in bufs {
        let skip = from.saturating_sub(at).min(buf.len() as u64) as usize;
        let bytes = buf.bytes().get(skip..).unwrap_or_default();
        let n = bytes.len().min(block.len() - filled);
        block[filled..filled + n].copy_from_slice(&bytes[..n]);
        (at, filled) = (at + buf.len() as u64, filled + n);
    }
    Some(crc32c(&block))
}

/// What the marks say of legs that were believed to be current.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Legs that are older copies, and what shows it.
    pub old: Vec<(usize, String)>,
    /// A leg that has all that was written last, if another one lacks some of it.
    pub witness: Option<usize>,
    /// Bytes where blocks begin that legs lack which are no older copies: the witness has them.
    pub lacking: Vec<u64>,
}

/// Checksum of the leg's content at a mark; `None` if it cannot be read.
fn held_at(held: &[Sample], mark: &Mark) -> Option<u32> {
    let at = held.binary_search_by_key(&(mark.block * BLOCK), |s| s.offset);
    held.get(at.ok()?)?.sum
}

/// Marks that a leg does not hold, the newest first.
fn missing(held: &[Sample], marks: &[Mark]) -> Vec<Mark> {
    let lacks = |mark: &&Mark| held_at(held, mark).is_some_and(|sum| sum != mark.sum);
    marks.iter().filter(lacks).copied().collect()
}

/// A leg holds something else at one of these places.
pub fn is_unlike(held: &[Sample], marks: &[Mark]) -> bool {
    !missing(held, marks).is_empty()
}

/// Finds the legs that lack the last writes. An error with the findings if no other leg has at least one readable mark.
///
/// One block that differs may be silent corruption. Two, the newest one, or a further difference from a leg that has
/// all of them show an older copy.
pub(crate) fn judge(
    legs: &[(usize, &[Sample])],
    marks: &[Mark],
    skip: impl Fn(u64) -> bool,
) -> Result<Verdict, Vec<(usize, String)>> {
    let found: Vec<(usize, &[Sample], Vec<Mark>)> = (legs.iter())
        .map(|(leg, held)| (*leg, *held, missing(held, marks)))
        .collect();
    let mut verdict = Verdict::default();
    if found.iter().all(|(_, _, lacks)| lacks.is_empty()) {
        return Ok(verdict);
    }
    #[cfg(any(test, feature = "faults"))]
    if crate::faults::is_forced(crate::faults::Fault::OldCopyBelieved) {
        return Ok(verdict);
    }
    let witness = found.iter().find(|(_, _, lacks)| lacks.is_empty());
    let is_old = |held: &[Sample], lacks: &[Mark]| {
        let newest = marks.first() == lacks.first();
        lacks.len() > 1
            || newest
            || witness.is_some_and(|w| differs_elsewhere(held, w.1, lacks, &skip))
    };
    for (leg, held, lacks) in found.iter().filter(|(_, _, lacks)| !lacks.is_empty()) {
        let (n, of) = (lacks.len(), marks.len());
        let why = format!("{n} of the {of} blocks that were written last are not what was written");
        match is_old(held, lacks) {
            true => verdict.old.push((*leg, why)),
            false => verdict
                .lacking
                .extend(lacks.iter().map(|m| m.block * BLOCK)),
        }
    }
    verdict.witness = witness.map(|(leg, ..)| *leg);
    if verdict.witness.is_none() {
        // Of what only one leg lacks each, and nobody else, a scrub tells.
        verdict.lacking.clear();
    }
    let is_old = |leg: usize| verdict.old.iter().any(|(old, _)| *old == leg);
    let is_proof = |held: &[Sample]| marks.iter().any(|mark| held_at(held, mark).is_some());
    let mut others = found.iter().filter(|(leg, ..)| !is_old(*leg));
    match verdict.old.is_empty() || others.any(|(_, held, _)| is_proof(held)) {
        true => Ok(verdict),
        false => Err(verdict.old),
    }
}

/// The legs differ where nothing was marked as well.
fn differs_elsewhere(
    one: &[Sample],
    other: &[Sample],
    lacks: &[Mark],
    skip: impl Fn(u64) -> bool,
) -> bool {
    one.iter().zip(other).any(|(a, b)| {
        let marked = lacks.iter().any(|mark| mark.block * BLOCK == a.offset);
        let both = a.sum.is_some() && b.sum.is_some() && a.offset == b.offset;
        both && a.sum != b.sum && !marked && !skip(a.offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_io::Buf;

    fn mark(block: u64, sum: u32) -> Mark {
        Mark { block, sum }
    }

    /// A leg of ten blocks whose checksums are their numbers, but for these.
    fn leg(other: &[(u64, u32)]) -> Vec<Sample> {
        let sum = |block: u64| {
            let other = other.iter().find(|(b, _)| *b == block);
            other.map_or(block as u32, |(_, sum)| *sum)
        };
        let sample = |block| Sample {
            offset: block * BLOCK,
            sum: Some(sum(block)),
            zero: false,
        };
        (0..10).map(sample).collect()
    }

    fn verdict(legs: &[&Vec<Sample>], skip: u64) -> Result<Verdict, Vec<(usize, String)>> {
        let marks = [mark(7, 7), mark(3, 3), mark(5, 5)];
        let legs = legs.iter().enumerate();
        let legs: Vec<(usize, &[Sample])> = legs.map(|(i, leg)| (i, &leg[..])).collect();
        judge(&legs, &marks, |at| at == skip * BLOCK)
    }

    #[test]
    fn leg_without_last_writes_is_old() {
        let none = u64::MAX / BLOCK;
        let whole = leg(&[]);
        let old = leg(&[(7, 70), (3, 30)]);
        assert_eq!(verdict(&[&whole, &whole], none), Ok(Verdict::default()));
        let found = verdict(&[&old, &whole], none).unwrap();
        assert_eq!((found.witness, found.old[0].0), (Some(1), 0));
        assert!(found.old[0].1.contains("2 of the 3"), "{found:?}");
        // The newest alone, and an older one with a difference where nothing was marked.
        for odd in [leg(&[(7, 70)]), leg(&[(3, 30), (8, 80)])] {
            let found = verdict(&[&whole, &odd], none).unwrap();
            assert_eq!((found.witness, found.old[0].0), (Some(0), 1));
        }
        // One that is not the newest may be silent corruption.
        for (odd, skip) in [(leg(&[(3, 30)]), none), (leg(&[(3, 30), (8, 80)]), 8)] {
            let found = verdict(&[&odd, &whole], skip).unwrap();
            assert_eq!(found.old, []);
            assert_eq!((found.witness, found.lacking), (Some(1), vec![3 * BLOCK]));
        }
    }

    #[test]
    fn last_leg_is_never_judged_old() {
        let none = u64::MAX / BLOCK;
        let old = leg(&[(7, 70), (3, 30)]);
        let rotten = leg(&[(5, 50)]);
        let both = verdict(&[&old, &old], none).unwrap_err();
        assert_eq!(both.iter().map(|(leg, _)| *leg).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(verdict(&[&old], none).unwrap_err().len(), 1);
        // A leg of which none of these blocks can be read is no proof that another one is older.
        let mut blind = leg(&[]);
        blind.iter_mut().for_each(|sample| sample.sum = None);
        let found = verdict(&[&old, &blind], none).unwrap_err();
        assert_eq!(found.iter().map(|(leg, _)| *leg).collect::<Vec<_>>(), [0]);
        assert_eq!(verdict(&[&blind], none), Ok(Verdict::default()));
        let served = verdict(&[&old, &rotten], none).unwrap();
        assert_eq!((served.old[0].0, served.lacking.len()), (0, 0));
        assert_eq!(verdict(&[&rotten], none).unwrap().old, []);
    }

    #[test]
    fn marks_keep_newest_and_some_older() {
        let mut marks = Marks::default();
        for n in 0..100 {
            marks.wrote(
                n * SPACING_NS / 2 + SPACING_NS,
                n * 8 * BLOCK,
                2 * BLOCK,
                Some(n as u32),
            );
        }
        let list = marks.list();
        assert_eq!(list.len(), MARKS_MAX);
        assert_eq!(list[0], mark(99 * 8 + 1, 99));
        assert!(list.windows(2).all(|w| w[0].block > w[1].block));
        // What is written again, in part, or with an error, is not what it was.
        marks.wrote(0, 99 * 8 * BLOCK, 100, None);
        marks.wrote(0, 98 * 8 * BLOCK, BLOCK + 1, None);
        assert_eq!(marks.list()[0], mark(99 * 8 + 1, 99));
        assert_eq!(marks.list()[1], mark(97 * 8 + 1, 97));
        assert_eq!(Marks::new(&list).list(), list);
    }

    #[test]
    fn last_whole_block_of_a_write_is_summed() {
        let bytes = |n: usize, byte| {
            let mut buf = Buf::zeroed(n).slice(0, n);
            buf.bytes_mut().fill(byte);
            buf
        };
        let sum = |byte| Some(crc32c(&[byte; BLOCK as usize]));
        let bufs = [bytes(3000, 1), bytes(6192, 2), bytes(100, 3)];
        assert_eq!(last_sum(BLOCK, 9292, &bufs), sum(2));
        assert_eq!(last_sum(BLOCK - 3000, 9292, &bufs), sum(2));
        assert_eq!(last_sum(BLOCK, 100, &bufs), None);
        assert_eq!(last_sum(100, BLOCK, &bufs), None);
        assert_eq!(last_sum(0, 3 * BLOCK, &[]), sum(0));
    }
}
