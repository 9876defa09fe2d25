//! LARC: a block is admitted when it is missed a second time while its name is remembered.

use super::Reference;
use super::list::{Links, List};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Nowhere,
    Cached,
    Ghost,
}

/// See [`super::Kind::Larc`].
#[derive(Debug)]
pub struct Larc {
    capacity: usize,
    /// Names remembered at most, between a tenth and nine tenths of the cache.
    ghost_max: f64,
    links: Links,
    cache: List,
    ghost: List,
    at: Vec<At>,
    bypassed: u64,
}

impl Larc {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> Larc {
        Larc {
            capacity,
            ghost_max: Self::bounds(capacity).0,
            links: Links::new(universe),
            cache: List::default(),
            ghost: List::default(),
            at: vec![At::Nowhere; universe],
            bypassed: 0,
        }
    }

    fn bounds(capacity: usize) -> (f64, f64) {
        (
            (capacity as f64 * 0.1).max(1.0),
            (capacity as f64 * 0.9).max(1.0),
        )
    }
}

impl Reference for Larc {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        let c = self.capacity as f64;
        let (least, most) = Self::bounds(self.capacity);
        if self.at[i] == At::Cached {
            let step = c / (c - self.ghost_max).max(1.0);
            self.ghost_max = (self.ghost_max - step).max(least);
            self.cache.touch(&mut self.links, id);
            return true;
        }
        self.ghost_max = (self.ghost_max + c / self.ghost_max).min(most);
        if self.at[i] == At::Nowhere {
            self.bypassed += 1;
            self.at[i] = At::Ghost;
            self.ghost.push_front(&mut self.links, id);
            // Hits since the last miss may have shortened it by several.
            while self.ghost.len() as f64 > self.ghost_max {
                let Some(old) = self.ghost.pop_back(&mut self.links) else {
                    break;
                };
                self.at[old as usize] = At::Nowhere;
            }
            return false;
        }
        self.ghost.remove(&mut self.links, id);
        if self.cache.len() == self.capacity
            && let Some(old) = self.cache.pop_back(&mut self.links)
        {
            self.at[old as usize] = At::Nowhere;
        }
        self.at[i] = At::Cached;
        self.cache.push_front(&mut self.links, id);
        false
    }

    fn bypassed(&self) -> u64 {
        self.bypassed
    }
}
