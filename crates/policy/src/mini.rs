//! A cache in miniature: how would these rules do?
//!
//! Blocks are sampled by hash, so that a block is always in or always out, and the cache is
//! scaled down by the same factor; its hit ratio is then that of the full one (SHARDS, Waldspurger
//! et al., FAST 2015; miniature simulation, ATC 2017). A miniature holds no data and at most
//! [`MINI_BLOCKS`] entries however large the real cache is.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::rules::{FREQ_MAX, Rules, Verdict};
use crate::sketch::Sketch;

/// Most blocks of a miniature.
pub(crate) const MINI_BLOCKS: usize = 4096;
/// Overwritten entries a queue may hold beyond as many as there is room for, where they cost nothing else.
const MINI_SLACK: usize = 64;

const RAM: usize = 0;
const FLASH: usize = 1;

#[derive(Clone, Copy, Debug)]
struct Held {
    at: usize,
    seq: u32,
    freq: u8,
    covered: bool,
    written: bool,
}

/// One miniature under fixed rules. Blocks are known by the low half of their hash.
#[derive(Debug)]
pub(crate) struct Mini {
    rules: Rules,
    /// Its own misses, counted: under other rules others are missed.
    sketch: Sketch,
    held: HashMap<u32, Held>,
    /// RAM and flash; oldest in front. An entry whose number is not its block's is dead space.
    queues: [VecDeque<(u32, u32)>; 2],
    ram: usize,
    on_flash: usize,
    dead_space: bool,
    ram_max: usize,
    flash_max: usize,
    seq: u32,
    /// Blocks written to flash; the tuner takes it back to zero.
    pub written: u64,
}

impl Mini {
    /// An empty miniature with so many blocks of RAM and flash.
    pub fn new(rules: Rules, ram: usize, flash: usize, dead_space: bool) -> Mini {
        let sketch = Sketch::new(ram + flash);
        Mini::with_sketch(rules, ram, flash, dead_space, sketch)
    }

    /// The same that counts its misses in this.
    pub fn with_sketch(
        rules: Rules,
        ram: usize,
        flash: usize,
        dead_space: bool,
        sketch: Sketch,
    ) -> Mini {
        Mini {
            rules,
            sketch,
            held: HashMap::with_capacity(ram + flash + 1),
            queues: Default::default(),
            ram: 0,
            on_flash: 0,
            dead_space,
            ram_max: ram.max(1),
            flash_max: flash.max(1),
            seq: 0,
            written: 0,
        }
    }

    fn push(&mut self, block: u32, at: usize, freq: u8, covered: bool, written: bool) {
        self.seq = self.seq.wrapping_add(1);
        // Where dead space costs nothing, nothing else would bound the queue.
        if at == FLASH && self.queues[FLASH].len() > 2 * self.flash_max + MINI_SLACK {
            let held = &self.held;
            self.queues[FLASH]
                .retain(|(block, seq)| held.get(block).is_some_and(|h| h.seq == *seq));
        }
        self.queues[at].push_back((block, self.seq));
        if at == RAM {
            self.ram += 1;
        } else {
            self.written += 1;
            self.on_flash += 1;
        }
        let seq = self.seq;
        self.held.insert(
            block,
            Held {
                at,
                seq,
                freq,
                covered,
                written,
            },
        );
    }

    /// The oldest living block of a queue; what is dead before it is cleared away.
    fn oldest(&mut self, at: usize) -> Option<(u32, Held)> {
        while let Some((block, seq)) = self.queues[at].front() {
            if let Some(held) = self.held.get(block)
                && held.seq == *seq
            {
                return Some((*block, *held));
            }
            self.queues[at].pop_front();
        }
        None
    }

    /// Uses a block; true if it was held. `covered` if prefetch had just brought it.
    pub fn access(&mut self, block: u32, write: bool, covered: bool) -> bool {
        let Some(held) = self.held.get_mut(&block) else {
            self.sketch.add(block);
            self.push(block, RAM, 0, covered, write);
            self.settle();
            return false;
        };
        held.freq = (held.freq + 1).min(FREQ_MAX);
        held.covered &= covered;
        held.written |= write;
        let held = *held;
        if write && held.at != RAM {
            // The flash copy is void; the new one begins in RAM.
            self.on_flash -= 1;
            self.push(block, RAM, held.freq, held.covered, true);
            self.settle();
        }
        true
    }

    /// Writes a block straight to flash, as write-back does; true if it was held.
    pub fn write_back(&mut self, block: u32) -> bool {
        let old = self.held.remove(&block);
        match old {
            None => self.sketch.add(block),
            Some(old) if old.at == RAM => self.ram -= 1,
            Some(_) => self.on_flash -= 1,
        }
        while self.taken() >= self.flash_max {
            let Some(victim) = self.victim() else {
                break;
            };
            self.evict(victim);
        }
        let freq = old.map_or(0, |old| (old.freq + 1).min(FREQ_MAX));
        self.push(block, FLASH, freq, false, true);
        old.is_some()
    }

    /// Goes on under these rules.
    pub fn follow(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Is there no room left on flash that does not have to be made?
    pub fn is_full(&self) -> bool {
        self.taken() >= self.flash_max
    }

    /// Bytes it takes, roughly.
    pub fn footprint(&self) -> usize {
        let queues: usize = self.queues.iter().map(VecDeque::capacity).sum();
        self.held.allocation_size() + queues * size_of::<(u32, u32)>() + self.sketch.footprint()
    }

    /// Drops the block that [`victim`](Self::victim) named.
    fn evict(&mut self, victim: u32) {
        self.held.remove(&victim);
        self.queues[FLASH].pop_front();
        self.on_flash -= 1;
    }

    /// Blocks of flash that hold something, be it dead.
    fn taken(&self) -> usize {
        if self.dead_space {
            self.queues[FLASH].len()
        } else {
            self.on_flash
        }
    }

    fn settle(&mut self) {
        while self.ram > self.ram_max {
            let Some((block, held)) = self.oldest(RAM) else {
                self.ram = 0;
                return;
            };
            self.queues[RAM].pop_front();
            self.held.remove(&block);
            self.ram -= 1;
            if held.covered && held.freq == 0 {
                continue;
            }
            if self.taken() < self.flash_max {
                self.push(block, FLASH, 0, false, false);
                continue;
            }
            let victim = self.victim();
            if let Some(victim) = victim {
                let wins =
                    || Rules::beats(self.sketch.estimate(block), self.sketch.estimate(victim));
                if self.rules.stops(held.written) && !wins() {
                    continue;
                }
                self.evict(victim);
            }
            self.push(block, FLASH, held.freq.min(1), false, false);
        }
    }

    /// The next victim, left where it is; none if dead space was enough.
    fn victim(&mut self) -> Option<u32> {
        // Every turn takes a use away or dead space, so this ends.
        while self.taken() >= self.flash_max {
            let before = self.queues[FLASH].len();
            let (block, held) = self.oldest(FLASH)?;
            if self.dead_space && self.queues[FLASH].len() < before {
                continue;
            }
            match self.rules.verdict(held.freq) {
                Verdict::Drop => return Some(block),
                Verdict::Keep { freq } => {
                    self.queues[FLASH].pop_front();
                    self.on_flash -= 1;
                    self.push(block, FLASH, freq, false, false);
                }
            }
        }
        None
    }
}
