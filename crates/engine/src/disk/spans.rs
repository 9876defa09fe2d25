//! Which requests hold, or wait for, which blocks of a disk.
//!
//! Every write asks whether its range is free, and what is destaged or moved asks whether a write is
//! about to replace it. Looked for one by one, thousands of outstanding writes would each look at
//! thousands. A few are looked through, which is what costs least; many are kept in order of where they
//! begin, those of like length together, so that a question looks only at what may reach its blocks.

use crate::ids::ReqId;
use std::collections::BTreeMap;

/// So many are looked through one by one.
const FEW_MAX: usize = 32;
/// When as few are left of many, they are so again.
const FEW_AGAIN: usize = 8;
/// Classes of length: the n-th holds those of more than 2^(n-1) and at most 2^n blocks.
const CLASSES: usize = 64;

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

    fn class(&self) -> u8 {
        (self.end - self.start).max(1).next_power_of_two().ilog2() as u8
    }

    fn key(&self) -> (u8, u64, ReqId) {
        (self.class(), self.start, self.req)
    }
}

/// Spans, which may overlap; a request has at most one.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    few: Vec<Span>,
    many: Option<Box<Many>>,
}

/// More than a few.
#[derive(Debug)]
struct Many {
    /// By class, start and request: the end.
    ends: BTreeMap<(u8, u64, ReqId), u64>,
    /// How many there are of each class.
    counts: [u32; CLASSES],
}

impl Many {
    fn insert(&mut self, span: Span) {
        self.counts[usize::from(span.class())] += 1;
        self.ends.insert(span.key(), span.end);
    }

    fn classes(&self) -> impl Iterator<Item = u8> {
        (0u8..)
            .zip(&self.counts)
            .filter(|(_, n)| **n > 0)
            .map(|(class, _)| class)
    }

    fn spans(&self, class: u8, from: u64, to: u64) -> impl Iterator<Item = Span> {
        let range = (class, from, ReqId::FIRST)..(class, to, ReqId::FIRST);
        let found = self.ends.range(range);
        found.map(|(&(_, start, req), &end)| Span { start, end, req })
    }
}

impl Spans {
    pub fn len(&self) -> usize {
        self.many.as_ref().map_or(self.few.len(), |m| m.ends.len())
    }

    pub fn insert(&mut self, span: Span) {
        debug_assert!(span.start < span.end);
        if let Some(many) = &mut self.many {
            many.insert(span);
        } else if self.few.len() < FEW_MAX {
            self.few.push(span);
        } else {
            let mut many = Box::new(Many {
                ends: BTreeMap::new(),
                counts: [0; CLASSES],
            });
            // The room of a few is given back: most disks never hold as many again.
            for known in std::mem::take(&mut self.few) {
                many.insert(known);
            }
            many.insert(span);
            self.many = Some(many);
        }
    }

    /// Takes out what was put in; false if it is not there.
    pub fn remove(&mut self, span: Span) -> bool {
        let Some(many) = &mut self.many else {
            let at = self.few.iter().position(|s| *s == span);
            at.map(|at| self.few.swap_remove(at));
            return at.is_some();
        };
        let had = many.ends.remove(&span.key()).is_some();
        many.counts[usize::from(span.class())] -= u32::from(had);
        if many.ends.len() <= FEW_AGAIN {
            self.few = self.iter().collect();
            self.many = None;
        }
        had
    }

    /// All of them, in an order that depends only on what was put in and taken out.
    pub fn iter(&self) -> impl Iterator<Item = Span> {
        let many = self.many.iter().flat_map(|m| {
            let spans = m.ends.iter();
            spans.map(|(&(_, start, req), &end)| Span { start, end, req })
        });
        self.few.iter().copied().chain(many)
    }

    /// Those that have any of the blocks `start..end`.
    pub fn meeting(&self, start: u64, end: u64) -> impl Iterator<Item = Span> {
        let many = self.many.iter().flat_map(move |m| {
            m.classes().flat_map(move |class| {
                // One that begins further in front does not reach `start`.
                let reach = (1u64 << class) - 1;
                m.spans(class, start.saturating_sub(reach), end)
            })
        });
        let few = self.few.iter().copied();
        few.chain(many).filter(move |s| s.meets(start, end))
    }

    /// True if any of the blocks is held by anybody.
    pub fn meets(&self, start: u64, end: u64) -> bool {
        self.meeting(start, end).next().is_some()
    }

    /// The first block behind `block` where one begins.
    pub fn next_start(&self, block: u64) -> Option<u64> {
        let few = self.few.iter().map(|s| s.start).filter(|s| *s > block);
        let many = self.many.iter().flat_map(|m| {
            let first = move |class| m.spans(class, block.saturating_add(1), u64::MAX).next();
            m.classes().filter_map(first).map(|s| s.start)
        });
        few.chain(many).min()
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
    fn few_again_answer_alike() {
        let mut spans = Spans::default();
        let span = |req: usize| Span {
            start: 2 * req as u64,
            end: 2 * req as u64 + 2,
            req: ReqId::new(req, 0),
        };
        (0..40).for_each(|req| spans.insert(span(req)));
        assert!(spans.many.is_some());
        (3..40).for_each(|req| assert!(spans.remove(span(req))));
        assert!(spans.many.is_none());
        assert_eq!(sorted(spans.iter()), [span(0), span(1), span(2)]);
        assert_eq!(spans.next_start(2), Some(4));
    }
}
