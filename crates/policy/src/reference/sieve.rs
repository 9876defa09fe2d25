//! SIEVE: a FIFO whose hand passes over what was used.

use super::Reference;
use super::list::{Links, List};

/// See [`super::Kind::Sieve`].
#[derive(Debug)]
pub struct Sieve {
    capacity: usize,
    links: Links,
    list: List,
    hand: Option<u32>,
    cached: Vec<bool>,
    used: Vec<bool>,
}

impl Sieve {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> Sieve {
        Sieve {
            capacity,
            links: Links::new(universe),
            list: List::default(),
            hand: None,
            cached: vec![false; universe],
            used: vec![false; universe],
        }
    }

    fn evict(&mut self) {
        let mut at = self.hand.or(self.list.back());
        while let Some(id) = at {
            let newer = self.links.newer(id);
            if self.used[id as usize] {
                self.used[id as usize] = false;
                at = newer.or(self.list.back());
                continue;
            }
            self.hand = newer;
            self.list.remove(&mut self.links, id);
            self.cached[id as usize] = false;
            return;
        }
    }
}

impl Reference for Sieve {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        if self.cached[i] {
            self.used[i] = true;
            return true;
        }
        if self.list.len() == self.capacity {
            self.evict();
        }
        self.cached[i] = true;
        self.used[i] = false;
        self.list.push_front(&mut self.links, id);
        false
    }
}
