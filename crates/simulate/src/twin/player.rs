//! A guest: it sends what a trace says, and waits.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Setup, Twin};
use crate::device::US;
use crate::outcome::Outcome;
use crate::workload::Request;

/// Plays requests to a [`Twin`] as a guest would send them.
///
/// It has so many in flight at most. A trace was recorded on some other disk; if this one is slower, the guest
/// waits, and does later what it would have done then.
#[derive(Debug)]
pub struct Player {
    twin: Twin,
    depth: usize,
    in_flight: BinaryHeap<Reverse<u64>>,
    late_ns: u64,
}

impl Player {
    /// A guest with so many requests in flight.
    pub fn new(setup: Setup, depth: usize) -> Player {
        Player {
            twin: Twin::new(setup),
            depth: depth.max(1),
            in_flight: BinaryHeap::new(),
            late_ns: 0,
        }
    }

    /// Plays the next request; returns what happened so far.
    pub fn play(&mut self, request: &Request) -> Outcome {
        let due = request.time_us * US + self.late_ns;
        let mut start = due.max(self.twin.now);
        while self.in_flight.peek().is_some_and(|at| at.0 <= start) {
            self.in_flight.pop();
        }
        if self.in_flight.len() >= self.depth
            && let Some(Reverse(at)) = self.in_flight.pop()
        {
            start = start.max(at);
        }
        self.late_ns += start - due;
        let done = self.twin.request(start, request);
        self.in_flight.push(Reverse(done));
        self.twin.out
    }

    /// Everything that is under way ends; what happened in all.
    pub fn end(&mut self) -> Outcome {
        self.twin.settle();
        self.twin.out
    }
}
