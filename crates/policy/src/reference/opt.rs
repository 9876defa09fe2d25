//! Belady's optimum: evict what is used last. Needs the future, so it is a bound, not a policy.

use std::collections::BinaryHeap;

use super::Reference;

/// See [`super::Kind::Opt`].
#[derive(Debug)]
pub struct Opt {
    capacity: usize,
    /// For each position of the stream, where the same block comes next.
    next: Vec<u32>,
    at: usize,
    cached: usize,
    /// Next use of each cached block, `u32::MAX` for never; meaningless for others.
    next_of: Vec<u32>,
    is_cached: Vec<bool>,
    /// (next use, block), with stale entries.
    heap: BinaryHeap<(u32, u32)>,
}

impl Opt {
    /// An empty cache that will see exactly `accesses`.
    pub fn new(capacity: usize, universe: usize, accesses: &[u32]) -> Opt {
        let mut last = vec![u32::MAX; universe];
        let mut next = vec![u32::MAX; accesses.len()];
        for (i, id) in accesses.iter().enumerate().rev() {
            next[i] = last[*id as usize];
            last[*id as usize] = i as u32;
        }
        Opt {
            capacity,
            next,
            at: 0,
            cached: 0,
            next_of: vec![0; universe],
            is_cached: vec![false; universe],
            heap: BinaryHeap::new(),
        }
    }
}

impl Reference for Opt {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        let next = self.next.get(self.at).copied().unwrap_or(u32::MAX);
        self.at += 1;
        let hit = self.is_cached[i];
        if !hit {
            while self.cached == self.capacity {
                let Some((when, victim)) = self.heap.pop() else {
                    break;
                };
                let v = victim as usize;
                if self.is_cached[v] && self.next_of[v] == when {
                    self.is_cached[v] = false;
                    self.cached -= 1;
                }
            }
            self.is_cached[i] = true;
            self.cached += 1;
        }
        self.next_of[i] = next;
        self.heap.push((next, id));
        hit
    }
}
