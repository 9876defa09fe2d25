//! S3-FIFO, as libCacheSim 0.3.5 runs it: promoted when used twice while in the small queue.

use super::Reference;
use super::list::{Links, List};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Nowhere,
    Small,
    Main,
    Ghost,
}

/// Uses in the small queue that promote a block.
const PROMOTE: u8 = 2;
/// Most uses that count in the main queue.
const FREQ_MAX: u8 = 3;

/// See [`super::Kind::S3Fifo`].
#[derive(Debug)]
pub struct S3Fifo {
    capacity: usize,
    small_max: usize,
    ghost_max: usize,
    links: Links,
    small: List,
    main: List,
    ghost: List,
    at: Vec<At>,
    freq: Vec<u8>,
    evicted: bool,
    moves: u64,
}

impl S3Fifo {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> S3Fifo {
        S3Fifo {
            capacity,
            small_max: (capacity / 10).max(1),
            ghost_max: capacity * 9 / 10,
            links: Links::new(universe),
            small: List::default(),
            main: List::default(),
            ghost: List::default(),
            at: vec![At::Nowhere; universe],
            freq: vec![0; universe],
            evicted: false,
            moves: 0,
        }
    }

    fn evict(&mut self) {
        self.evicted = true;
        let before = self.small.len() + self.main.len();
        while self.small.len() + self.main.len() == before {
            if self.main.len() > self.capacity - self.small_max || self.small.len() == 0 {
                self.evict_main();
            } else {
                self.evict_small();
            }
        }
    }

    fn evict_small(&mut self) {
        while let Some(id) = self.small.pop_back(&mut self.links) {
            let i = id as usize;
            if self.freq[i] >= PROMOTE {
                self.freq[i] = 0;
                self.at[i] = At::Main;
                self.main.push_front(&mut self.links, id);
                self.moves += 1;
                continue;
            }
            self.at[i] = At::Ghost;
            self.ghost.push_front(&mut self.links, id);
            if self.ghost.len() > self.ghost_max
                && let Some(old) = self.ghost.pop_back(&mut self.links)
            {
                self.at[old as usize] = At::Nowhere;
            }
            return;
        }
    }

    fn evict_main(&mut self) {
        while let Some(id) = self.main.pop_back(&mut self.links) {
            let i = id as usize;
            if self.freq[i] > 0 {
                self.freq[i] = self.freq[i].min(FREQ_MAX) - 1;
                self.main.push_front(&mut self.links, id);
                self.moves += 1;
                continue;
            }
            self.at[i] = At::Nowhere;
            return;
        }
    }
}

impl Reference for S3Fifo {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        let known = self.at[i] == At::Ghost;
        if matches!(self.at[i], At::Small | At::Main) {
            self.freq[i] = self.freq[i].saturating_add(1);
            return true;
        }
        if known {
            self.ghost.remove(&mut self.links, id);
            self.at[i] = At::Nowhere;
        }
        if self.small.len() + self.main.len() >= self.capacity {
            self.evict();
        }
        self.freq[i] = 0;
        if known || (!self.evicted && self.small.len() >= self.small_max) {
            self.at[i] = At::Main;
            self.main.push_front(&mut self.links, id);
        } else {
            self.at[i] = At::Small;
            self.small.push_front(&mut self.links, id);
        }
        false
    }

    fn moves(&self) -> u64 {
        self.moves
    }
}
