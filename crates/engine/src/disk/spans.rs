//! Which requests hold, or wait for, which blocks of a disk.
//!
//! Every write asks whether its range is free, and what is destaged or moved asks whether a write is
//! about to replace it. Looked for one by one, thousands of outstanding writes would each look at
//! thousands. So they are hashed by where they begin, into cells of as many blocks as they may be long:
//! what reaches into a range begins in one of its cells or in the one before. Cells come in levels, each
//! 64 times as long as the one below, so that a discard of a whole disk is found as well and takes no more
//! room than a write of a block.

use crate::ids::ReqId;
use std::ops::Range;

/// Bits of a block's number that a level leaves out more than the one below.
const LEVEL_BITS: u32 = 6;
/// So many levels hold any span.
const LEVELS: usize = 11;
/// Chains there are at least, once there is anything.
const CHAINS_MIN: usize = 16;
/// With more chains than this, their room is given back when nothing is left: most disks never hold as
/// many spans again.
const CHAINS_KEPT: usize = 64;
/// The end of a chain.
const END: u32 = u32::MAX;

/// Blocks `start..end`, at least one, of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    pub start: u64,
    pub end: u64,
    pub req: ReqId,
}

impl Span {
    fn meets(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }

    /// The lowest level on which it is no longer than a cell.
    fn level(&self) -> usize {
        let bits = u64::BITS - (self.end - self.start - 1).leading_zeros();
        (bits.saturating_sub(1) / LEVEL_BITS) as usize
    }

    fn cell(&self) -> u64 {
        let level = self.level();
        key(level, self.start >> shift(level))
    }
}

/// Bits of a block's number within a cell.
fn shift(level: usize) -> u32 {
    (LEVEL_BITS * (level as u32 + 1)).min(u64::BITS - 1)
}

/// Names the `n`th cell of a level.
fn key(level: usize, n: u64) -> u64 {
    n << 4 | level as u64
}

/// A span in its chain.
#[derive(Debug)]
struct Link {
    /// `None`: the place is free.
    span: Option<Span>,
    cell: u64,
    /// The next one of the chain, or the next free place.
    next: u32,
}

/// Spans, which may overlap; a request has at most one.
#[derive(Debug)]
pub(crate) struct Spans {
    /// Where each chain begins; a power of two of them, or none.
    chains: Vec<u32>,
    links: Vec<Link>,
    /// Where the chain of free places begins.
    free: u32,
    len: usize,
    /// How many there are on each level.
    counts: [u32; LEVELS],
}

impl Default for Spans {
    fn default() -> Spans {
        Spans {
            chains: Vec::new(),
            links: Vec::new(),
            free: END,
            len: 0,
            counts: [0; LEVELS],
        }
    }
}

impl Spans {
    pub fn len(&self) -> usize {
        self.len
    }

    /// In which chain the spans of a cell are. Not to be asked while there are no chains.
    fn chain(&self, cell: u64) -> usize {
        let mixed = cell.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> (u64::BITS - self.chains.len().ilog2())) as usize
    }

    pub fn insert(&mut self, span: Span) {
        debug_assert!(span.start < span.end);
        if self.len >= self.chains.len() {
            self.lengthen();
        }
        let cell = span.cell();
        let chain = self.chain(cell);
        let link = Link {
            span: Some(span),
            cell,
            next: self.chains[chain],
        };
        self.chains[chain] = if self.free == END {
            self.links.push(link);
            self.links.len() as u32 - 1
        } else {
            let at = self.free;
            self.free = std::mem::replace(&mut self.links[at as usize], link).next;
            at
        };
        self.len += 1;
        self.counts[span.level()] += 1;
    }

    /// Makes twice as many chains.
    fn lengthen(&mut self) {
        let many = (self.chains.len() * 2).max(CHAINS_MIN);
        self.chains = vec![END; many];
        for at in 0..self.links.len() {
            if self.links[at].span.is_some() {
                let chain = self.chain(self.links[at].cell);
                self.links[at].next = std::mem::replace(&mut self.chains[chain], at as u32);
            }
        }
    }

    /// Takes out what was put in; false if it is not there.
    pub fn remove(&mut self, span: Span) -> bool {
        if self.len == 0 {
            return false;
        }
        let chain = self.chain(span.cell());
        let (mut before, mut at) = (END, self.chains[chain]);
        while at != END && self.links[at as usize].span != Some(span) {
            (before, at) = (at, self.links[at as usize].next);
        }
        if at == END {
            return false;
        }
        let next = self.links[at as usize].next;
        match before {
            END => self.chains[chain] = next,
            before => self.links[before as usize].next = next,
        }
        let link = &mut self.links[at as usize];
        (link.span, link.next) = (None, self.free);
        self.free = at;
        self.len -= 1;
        self.counts[span.level()] -= 1;
        if self.len == 0 && self.chains.len() > CHAINS_KEPT {
            *self = Spans::default();
        }
        true
    }

    /// All of them, in an order that depends only on what was put in and taken out.
    pub fn iter(&self) -> impl Iterator<Item = Span> {
        self.links.iter().filter_map(|link| link.span)
    }

    /// Those that have any of the blocks `start..end`.
    pub fn meeting(&self, start: u64, end: u64) -> Meeting<'_> {
        let mut meeting = Meeting {
            spans: self,
            start,
            end,
            level: 0,
            cells: 0..0,
            cell: 0,
            at: END,
            all: None,
        };
        if self.len > 0 {
            meeting.enter_level();
        }
        meeting
    }

    /// True if any of the blocks is held by anybody.
    pub fn meets(&self, start: u64, end: u64) -> bool {
        self.meeting(start, end).next().is_some()
    }

    /// The first block behind `block` where one begins. Looks at all.
    pub fn next_start(&self, block: u64) -> Option<u64> {
        self.iter().map(|s| s.start).filter(|s| *s > block).min()
    }
}

/// See [`Spans::meeting`].
pub(crate) struct Meeting<'a> {
    spans: &'a Spans,
    start: u64,
    end: u64,
    /// The level being looked at; [`LEVELS`] when all are done.
    level: usize,
    /// Cells of it still to come.
    cells: Range<u64>,
    /// The one being looked at, and where in its chain.
    cell: u64,
    at: u32,
    /// All spans are looked at instead, from this one on: a range of so many cells is better not looked
    /// through one by one.
    all: Option<usize>,
}

impl Meeting<'_> {
    /// Begins with the cells of this level, or of the next one that holds anything.
    fn enter_level(&mut self) {
        while self.level < LEVELS && self.spans.counts[self.level] == 0 {
            self.level += 1;
        }
        if self.level == LEVELS {
            return;
        }
        let shift = shift(self.level);
        let last = (self.end.max(self.start.saturating_add(1)) - 1) >> shift;
        // One that begins further in front does not reach `start`.
        let first = (self.start >> shift).saturating_sub(1);
        if last - first >= self.spans.links.len() as u64 {
            // Nothing was looked at before: the levels below, where it would be more cells, are empty.
            self.all = Some(0);
            return;
        }
        self.cells = first..last + 1;
    }
}

impl Iterator for Meeting<'_> {
    type Item = Span;

    fn next(&mut self) -> Option<Span> {
        let spans = self.spans;
        if let Some(from) = &mut self.all {
            for link in &spans.links[*from..] {
                *from += 1;
                if let Some(span) = link.span
                    && span.meets(self.start, self.end)
                {
                    return Some(span);
                }
            }
            return None;
        }
        loop {
            while self.at != END {
                let link = &spans.links[self.at as usize];
                self.at = link.next;
                if link.cell == self.cell
                    && let Some(span) = link.span
                    && span.meets(self.start, self.end)
                {
                    return Some(span);
                }
            }
            if let Some(n) = self.cells.next() {
                self.cell = key(self.level, n);
                self.at = spans.chains[spans.chain(self.cell)];
                continue;
            }
            if self.level >= LEVELS {
                return None;
            }
            self.level += 1;
            self.enter_level();
            if self.all.is_some() {
                return self.next();
            }
            if self.level == LEVELS {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same questions, answered by looking at all.
    #[derive(Default)]
    struct Naive(Vec<Span>);

    impl Naive {
        fn meeting(&self, start: u64, end: u64) -> Vec<Span> {
            let mut all: Vec<Span> = self
                .0
                .iter()
                .copied()
                .filter(|s| s.meets(start, end))
                .collect();
            all.sort_unstable();
            all
        }
    }

    fn sorted(spans: impl Iterator<Item = Span>) -> Vec<Span> {
        let mut all: Vec<Span> = spans.collect();
        all.sort_unstable();
        all
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Insert(u64, u64),
        /// The n-th of those that are there.
        Remove(usize),
        Ask(u64, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        // Most are short; a discard may be as long as the disk.
        let len = prop_oneof![8 => 1..4u64, 4 => 1..40u64, 1 => 1..100_000u64];
        let step = prop_oneof![
            5 => (0..600u64, len.clone()).prop_map(|(start, len)| Step::Insert(start, len)),
            4 => any::<usize>().prop_map(Step::Remove),
            3 => (0..700u64, len).prop_map(|(start, len)| Step::Ask(start, len)),
        ];
        prop::collection::vec(step, 0..400)
    }

    proptest! {
        #[test]
        fn answers_are_those_of_a_look_at_all(steps in steps()) {
            let (mut spans, mut naive) = (Spans::default(), Naive::default());
            for (req, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(start, len) => {
                        let span = Span { start, end: start + len, req: ReqId::new(req, 0) };
                        spans.insert(span);
                        naive.0.push(span);
                    }
                    Step::Remove(n) if naive.0.is_empty() => {
                        let missing = Span { start: n as u64 % 600, end: 601, req: ReqId::new(req, 0) };
                        prop_assert!(!spans.remove(missing));
                    }
                    Step::Remove(n) => {
                        let span = naive.0.swap_remove(n % naive.0.len());
                        prop_assert!(spans.remove(span));
                        prop_assert!(!spans.remove(span));
                    }
                    Step::Ask(start, len) => {
                        let met = naive.meeting(start, start + len);
                        prop_assert_eq!(spans.meets(start, start + len), !met.is_empty());
                        prop_assert_eq!(sorted(spans.meeting(start, start + len)), met);
                        let next = naive.0.iter().map(|s| s.start).filter(|s| *s > start).min();
                        prop_assert_eq!(spans.next_start(start), next);
                    }
                }
                prop_assert_eq!(spans.len(), naive.0.len());
            }
            naive.0.sort_unstable();
            prop_assert_eq!(sorted(spans.iter()), naive.0);
        }
    }

    #[test]
    fn a_span_as_long_as_the_largest_disk_is_found_anywhere_in_it() {
        let mut spans = Spans::default();
        for req in 0..100u64 {
            let start = 10 * req;
            spans.insert(Span {
                start,
                end: start + 1,
                req: ReqId::new(req as usize, 0),
            });
        }
        let whole = Span {
            start: 0,
            end: 1 << 36,
            req: ReqId::new(1000, 0),
        };
        spans.insert(whole);
        assert_eq!(
            spans.meeting(1 << 35, (1 << 35) + 1).collect::<Vec<_>>(),
            [whole]
        );
        assert!(spans.remove(whole));
        assert!(!spans.meets(1 << 35, 1 << 36));
        assert!(spans.meets(990, 991) && !spans.meets(991, 1 << 36));
    }

    #[test]
    fn room_for_thousands_is_given_back_when_none_is_left() {
        let mut spans = Spans::default();
        let span = |req: usize| Span {
            start: 2 * req as u64,
            end: 2 * req as u64 + 2,
            req: ReqId::new(req, 0),
        };
        (0..4000).for_each(|req| spans.insert(span(req)));
        assert!(spans.chains.len() >= 4000);
        (3..4000).for_each(|req| assert!(spans.remove(span(req))));
        assert_eq!(sorted(spans.iter()), [span(0), span(1), span(2)]);
        assert_eq!(spans.next_start(2), Some(4));
        (0..3).for_each(|req| assert!(spans.remove(span(req))));
        assert_eq!((spans.chains.capacity(), spans.links.capacity()), (0, 0));
        spans.insert(span(7));
        assert!(spans.meets(15, 16) && !spans.meets(16, 17));
    }

    #[test]
    fn every_length_has_a_level_where_it_meets_two_cells_at_most() {
        for bits in 0..64 {
            for len in [1u64 << bits, (1 << bits) + 1] {
                let span = Span {
                    start: 0,
                    end: len,
                    req: ReqId::new(0, 0),
                };
                let level = span.level();
                assert!(level < LEVELS);
                assert!((len - 1) >> shift(level) <= 1, "{len} on level {level}");
                assert!(level == 0 || len > 1 << shift(level - 1));
            }
        }
    }
}
