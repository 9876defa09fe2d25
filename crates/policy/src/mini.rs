//! A cache in miniature: which rules would do best, tried on a sample of the blocks.
//!
//! Blocks are sampled by hash, so that a block is always in or always out, and the cache is
//! scaled down by the same factor; its hit ratio is then that of the full one (SHARDS, Waldspurger
//! et al., FAST 2015; miniature simulation, ATC 2017). A miniature holds no data and at most
//! [`MINI_BLOCKS`] entries however large the real cache is.

use hashbrown::HashMap;
use std::collections::VecDeque;

use crate::{Rules, Sketch};

/// Most blocks of a miniature.
pub const MINI_BLOCKS: usize = 2048;
/// Highest use count kept per block, as in the index.
const FREQ_MAX: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Ram,
    Cold,
    Hot,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    at: At,
    seq: u32,
    freq: u8,
    covered: bool,
}

/// One miniature under fixed rules.
#[derive(Debug)]
pub struct Mini {
    rules: Rules,
    held: HashMap<u32, Held>,
    queues: [VecDeque<(u32, u32)>; 3],
    count: [usize; 3],
    ram_max: usize,
    cold_max: usize,
    flash_max: usize,
    seq: u32,
    /// Blocks written to flash since this was last taken.
    pub written: u32,
}

impl Mini {
    /// An empty miniature of a RAM stage and flash of so many blocks.
    pub fn new(rules: Rules, ram: usize, flash: usize) -> Mini {
        Mini {
            rules,
            held: HashMap::with_capacity(ram + flash + 1),
            queues: Default::default(),
            count: [0; 3],
            ram_max: ram.max(1),
            cold_max: rules.cold_blocks(flash),
            flash_max: flash.max(1),
            seq: 0,
            written: 0,
        }
    }

    fn push(&mut self, tag: u32, at: At, freq: u8, covered: bool) {
        self.seq = self.seq.wrapping_add(1);
        self.queues[at as usize].push_back((tag, self.seq));
        self.count[at as usize] += 1;
        let seq = self.seq;
        self.held.insert(tag, Held { at, seq, freq, covered });
    }

    /// The oldest block of a queue, still in it; leftovers of moved blocks are cleared away.
    fn oldest(&mut self, at: At) -> Option<(u32, Held)> {
        while let Some((tag, seq)) = self.queues[at as usize].front() {
            if let Some(h) = self.held.get(tag)
                && h.seq == *seq
            {
                return Some((*tag, *h));
            }
            self.queues[at as usize].pop_front();
        }
        None
    }

    fn take(&mut self, tag: u32, at: At) {
        self.held.remove(&tag);
        self.count[at as usize] -= 1;
    }

    /// Uses a block by its (sampled) tag; true if it was held.
    pub fn access(&mut self, tag: u32, write: bool, covered: bool, sketch: &Sketch, spread: impl Fn(u32) -> u64) -> bool {
        if let Some(h) = self.held.get_mut(&tag) {
            h.freq = (h.freq + 1).min(FREQ_MAX);
            h.covered &= covered;
            let h = *h;
            if write && h.at != At::Ram {
                self.take(tag, h.at);
                self.push(tag, At::Ram, h.freq, h.covered);
                self.settle(sketch, &spread);
            }
            return true;
        }
        self.push(tag, At::Ram, 0, covered);
        self.settle(sketch, &spread);
        false
    }

    fn settle(&mut self, sketch: &Sketch, spread: &impl Fn(u32) -> u64) {
        while self.count[At::Ram as usize] > self.ram_max {
            let Some((tag, h)) = self.oldest(At::Ram) else {
                return;
            };
            self.take(tag, At::Ram);
            if h.covered && h.freq == 0 {
                continue;
            }
            if self.count[1] + self.count[2] >= self.flash_max {
                let Some((victim, v)) = self.victim() else {
                    return;
                };
                if self.rules.gate && sketch.estimate(spread(tag)) <= sketch.estimate(spread(victim)) {
                    continue;
                }
                self.take(victim, v.at);
                self.push(tag, At::Cold, h.freq.min(1), false);
            } else {
                let at = if h.freq > 0 { At::Hot } else { At::Cold };
                self.push(tag, at, 0, false);
            }
            self.written += 1;
        }
    }

    fn victim(&mut self) -> Option<(u32, Held)> {
        // Every turn lowers a use count or moves a block from cold to hot, so it ends; the
        // bound only guards against a slip.
        for _ in 0..(FREQ_MAX as usize + 2) * (self.flash_max + 1) {
            let cold = self.count[1] > 0 && (self.count[1] >= self.cold_max || self.count[2] == 0);
            let from = if cold { At::Cold } else { At::Hot };
            let (tag, h) = self.oldest(from)?;
            if h.freq == 0 {
                return Some((tag, h));
            }
            self.take(tag, from);
            let (to, freq) = match from {
                At::Cold if self.rules.one_queue() => (At::Cold, h.freq - 1),
                At::Cold => (At::Hot, 0),
                _ => (At::Hot, h.freq - 1),
            };
            self.push(tag, to, freq, false);
            self.written += 1;
        }
        None
    }
}
