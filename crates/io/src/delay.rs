//! Completions held back until their time, for devices with a fixed latency.

use crate::op::IoDone;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Finished operations by the time they may be told of. Bounded by the driver's in-flight limit.
#[derive(Default)]
pub(crate) struct Delayed {
    order: BinaryHeap<Reverse<(u64, u64)>>,
    held: HashMap<u64, IoDone>,
    next: u64,
}

impl Delayed {
    pub(crate) fn hold(&mut self, until_ns: u64, done: IoDone) {
        self.order.push(Reverse((until_ns, self.next)));
        self.held.insert(self.next, done);
        self.next += 1;
    }

    /// When the next one is due.
    pub(crate) fn next(&self) -> Option<u64> {
        self.order.peek().map(|Reverse((at, _))| *at)
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Moves everything due at `now_ns` to the end of `out`, in order of time.
    pub(crate) fn release(&mut self, now_ns: u64, out: &mut Vec<IoDone>) {
        while self.next().is_some_and(|at| at <= now_ns) {
            if let Some(Reverse((_, key))) = self.order.pop()
                && let Some(mut done) = self.held.remove(&key)
            {
                done.latency_ns = done.latency_ns.max(1);
                out.push(done);
            }
        }
    }
}
