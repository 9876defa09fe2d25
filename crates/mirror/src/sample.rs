//! Is a leg the one it was? A few blocks of it are compared with those of another leg, where both must hold the same.
//!
//! A disk's path does not tell: a blank one put in the old one's place would be taken for the one that comes back, and get
//! only what was written since. Few blocks are enough to tell another disk from the same one. A block here and there that is
//! not the same says nothing of the disk: that is what a scrub is for.

use hearth_format::mirror::Mark;
use hearth_io::{BLOCK, Device, checksum::crc32c};

/// Blocks at either end: where partition tables and file systems have their marks.
const EDGE: u64 = 16;
/// Blocks in between.
const SPREAD: u64 = 64;
/// So many blocks have to differ before neither of two legs that both hold something is believed.
const CERTAIN: usize = 4;
/// Blocks in between, and from each that was written last on, when one of those is not what was written.
const WIDE_SPREAD: u64 = 512;
const WIDE_BEHIND: u64 = 8;

/// What a leg holds at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub(crate) offset: u64,
    /// `None`: it cannot be read.
    pub(crate) sum: Option<u32>,
    pub(crate) zero: bool,
}

/// The places that are looked at on a disk of this size, and these blocks; if `widely`, many more, and what lies behind
/// the blocks.
fn places(size: u64, also: &[Mark], widely: bool) -> Vec<u64> {
    let blocks = size / BLOCK;
    let (spread, behind) = match widely {
        true => (WIDE_SPREAD, WIDE_BEHIND),
        false => (SPREAD, 1),
    };
    let also = also
        .iter()
        .flat_map(|mark| (0..behind).map(|i| mark.block.saturating_add(i)));
    let spread = (1..=spread).map(move |i| blocks / (spread + 1) * i);
    let ends = (0..EDGE).flat_map(|i| [Some(i), blocks.checked_sub(i + 1)]);
    let mut places: Vec<u64> = spread
        .chain(ends.flatten())
        .chain(also)
        .filter(|b| *b < blocks)
        .collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|block| block * BLOCK).collect()
}

/// Looks at a leg, also where something was marked; `widely` if there is doubt. Blocks.
pub fn sample(leg: &Device, size: u64, marks: &[Mark], widely: bool) -> Vec<Sample> {
    let mut block = vec![0; BLOCK as usize];
    let look = |offset: u64| {
        let read = leg.read_at(offset, &mut block);
        Sample {
            offset,
            sum: read.is_ok().then(|| crc32c(&block)),
            zero: block.iter().all(|b| *b == 0),
        }
    };
    places(size, marks, widely).into_iter().map(look).collect()
}

/// How two legs compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Likeness {
    /// Places that say something: not both are zeros.
    told: usize,
    /// Of these, those that are not the same.
    differ: usize,
    /// The first one has only zeros there.
    blank: bool,
}

impl Likeness {
    /// Compares, but for places that need not be the same.
    pub(crate) fn of(one: &[Sample], other: &[Sample], skip: impl Fn(u64) -> bool) -> Likeness {
        let mut found = Likeness {
            blank: true,
            ..Likeness::default()
        };
        for (a, b) in one.iter().zip(other) {
            let (Some(sum), Some(its)) = (a.sum, b.sum) else {
                continue;
            };
            if a.offset != b.offset || a.zero && b.zero || skip(a.offset) {
                continue;
            }
            found.told += 1;
            found.differ += usize::from(sum != its);
            found.blank &= a.zero;
        }
        found
    }

    /// They are not the same disk.
    pub(crate) fn is_another(&self) -> bool {
        self.differ * 2 > self.told
    }
}

/// Of legs that must hold the same, those that do not: blank ones, and a minority. All of them, if it cannot be told.
pub(crate) fn strangers(legs: &[(usize, &[Sample])], skip: impl Fn(u64) -> bool) -> Vec<usize> {
    let compare = |a: &[Sample], b: &[Sample]| Likeness::of(a, b, &skip);
    let blank = |a: &[Sample]| {
        legs.iter().any(|(_, b)| {
            let found = compare(a, b);
            found.is_another() && found.blank
        })
    };
    let (blank, rest): (Vec<_>, Vec<_>) = legs.iter().partition(|(_, a)| blank(a));
    let mut strangers: Vec<usize> = blank.iter().map(|(leg, _)| *leg).collect();
    let agree = |a: &[Sample]| {
        rest.iter()
            .filter(|(_, b)| !compare(a, b).is_another())
            .count()
    };
    let most = rest.iter().map(|(_, a)| agree(a)).max().unwrap_or(0);
    let certain = |a: &[Sample]| {
        let differs = |b: &[Sample]| {
            let found = compare(a, b);
            found.is_another() && found.differ >= CERTAIN
        };
        rest.iter().any(|(_, b)| differs(b))
    };
    let decided = most * 2 > rest.len();
    let odd = rest
        .iter()
        .filter(|(_, a)| certain(a) && (!decided || agree(a) < most));
    strangers.extend(odd.map(|(leg, _)| *leg));
    strangers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Content by place; 0 is zeros.
    fn leg(content: &[u32]) -> Vec<Sample> {
        let sample = |(i, sum): (usize, &u32)| Sample {
            offset: i as u64 * BLOCK,
            sum: Some(*sum),
            zero: *sum == 0,
        };
        content.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn a_disk_put_in_the_place_of_another_is_told() {
        let all = |_| false;
        let one = leg(&[1, 2, 3, 4, 5, 6, 0, 0]);
        let same = one.clone();
        let rotten = leg(&[1, 2, 9, 4, 5, 6, 0, 0]);
        let empty = leg(&[0; 8]);
        let used = leg(&[7, 8, 9, 10, 11, 12, 13, 14]);
        let odd = |legs: &[&Vec<Sample>]| {
            let legs: Vec<(usize, &[Sample])> = legs
                .iter()
                .enumerate()
                .map(|(i, leg)| (i, &leg[..]))
                .collect();
            strangers(&legs, all)
        };
        assert_eq!(odd(&[&one, &same]), []);
        assert_eq!(odd(&[&one, &rotten]), [], "a scrub sees to that");
        assert_eq!(odd(&[&one, &empty]), [1]);
        assert_eq!(odd(&[&empty, &one]), [0]);
        assert_eq!(odd(&[&one, &used]), [0, 1], "either may be the disk");
        assert_eq!(odd(&[&one, &used, &same]), [1]);
        assert_eq!(odd(&[&empty, &empty.clone()]), [], "they say nothing");
        let like = |skip: u64| Likeness::of(&empty, &one, |offset| offset < skip * BLOCK);
        assert!(like(0).is_another() && like(5).is_another());
        assert!(!like(6).is_another(), "the rest need not be the same");
        let mut blind = used.clone();
        blind.iter_mut().for_each(|s| s.sum = None);
        assert_eq!(odd(&[&one, &blind]), [], "it cannot be read");
    }

    #[test]
    fn places_are_on_the_disk() {
        let places = |size| places(size, &[], false);
        assert!(places(0).is_empty() && places(4095).is_empty());
        assert_eq!(places(4096), [0]);
        for size in [10 * BLOCK, 1 << 20, (1 << 40) + 5 * BLOCK + 100] {
            let places = places(size);
            assert!(
                places
                    .iter()
                    .all(|at| at % BLOCK == 0 && at + BLOCK <= size)
            );
            assert!(places.contains(&0) && places.contains(&((size / BLOCK - 1) * BLOCK)));
            assert!(places.len() <= (SPREAD + 2 * EDGE) as usize);
        }
        let marks = [1000, 1 << 40].map(|block| Mark { block, sum: 0 });
        let near = super::places(1 << 30, &marks, false);
        assert!(near.contains(&(1000 * BLOCK)) && near.iter().all(|at| *at < 1 << 30));
        let wide = super::places(1 << 30, &marks, true);
        assert!(wide.contains(&(1007 * BLOCK)) && wide.len() > 500);
    }
}
