//! Least recently used.

use super::Reference;
use super::list::{Links, List};

/// See [`super::Kind::Lru`].
#[derive(Debug)]
pub struct Lru {
    capacity: usize,
    links: Links,
    list: List,
    cached: Vec<bool>,
}

impl Lru {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> Lru {
        Lru {
            capacity,
            links: Links::new(universe),
            list: List::default(),
            cached: vec![false; universe],
        }
    }
}

impl Reference for Lru {
    fn access(&mut self, id: u32) -> bool {
        if self.cached[id as usize] {
            self.list.touch(&mut self.links, id);
            return true;
        }
        if self.list.len() == self.capacity
            && let Some(old) = self.list.pop_back(&mut self.links)
        {
            self.cached[old as usize] = false;
        }
        self.cached[id as usize] = true;
        self.list.push_front(&mut self.links, id);
        false
    }
}
