//! S3-FIFO, as libCacheSim 0.3.5 runs it: promoted when used twice while in the small queue. Two variants: adaptive queue
//! sizes, as the paper describes, and Clock2Q+, which ignores uses shortly after a block came.

use super::Reference;
use super::list::{Links, List};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Nowhere,
    Small,
    Main,
    Ghost,
}

/// Parameters of the three variants.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// Uses in the small queue that promote a block.
    promote: u8,
    /// Most uses that count in the main queue.
    freq_max: u8,
    /// Blocks that came into the small queue after a block before its uses count.
    window: u64,
}

/// Divisor of the cache size: the number of recent evictions of each queue that count.
const GHOST_SHARE: u64 = 20;
/// Misses of recently evicted blocks after which the queues are compared.
const COMPARED: u32 = 100;
/// Divisor of the cache size: the blocks by which a queue grows then.
const STEP_SHARE: usize = 1000;

/// Counts that show which queue is too small.
#[derive(Debug)]
struct Balance {
    /// Evictions so far: from the small queue, from the main one.
    evictions: [u64; 2],
    /// The queue that a block was evicted from, and at which of its evictions.
    evicted: Vec<(u8, u64)>,
    /// Misses of blocks that each evicted lately.
    missed: [u32; 2],
}

/// See [`super::Kind::S3Fifo`], [`super::Kind::S3FifoD`] and [`super::Kind::Clock2QPlus`].
#[derive(Debug)]
pub struct S3Fifo {
    rules: Rules,
    balance: Option<Balance>,
    /// Blocks that came into the small queue so far, and at which of them each did.
    came: u64,
    came_at: Vec<u64>,
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
            rules: Rules {
                promote: 2,
                freq_max: 3,
                window: 0,
            },
            balance: None,
            came: 0,
            came_at: vec![0; universe],
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

    /// An empty cache whose queues adapt their sizes.
    pub fn adaptive(capacity: usize, universe: usize) -> S3Fifo {
        S3Fifo {
            balance: Some(Balance {
                evictions: [0; 2],
                evicted: vec![(0, 0); universe],
                missed: [0; 2],
            }),
            ..S3Fifo::new(capacity, universe)
        }
    }

    /// An empty cache with a correlation window of half the small queue, and one bit of use in the main one.
    pub fn clock2q_plus(capacity: usize, universe: usize) -> S3Fifo {
        let cache = S3Fifo::new(capacity, universe);
        S3Fifo {
            rules: Rules {
                promote: 1,
                freq_max: 1,
                window: (cache.small_max / 2) as u64,
            },
            ..cache
        }
    }

    /// A block was evicted from the small queue (0) or the main one (1).
    fn note_evicted(&mut self, queue: u8, id: u32) {
        if let Some(b) = &mut self.balance {
            b.evictions[usize::from(queue)] += 1;
            b.evicted[id as usize] = (queue, b.evictions[usize::from(queue)]);
        }
    }

    /// A block is missed: was it evicted so lately that a larger queue would have kept it?
    fn adapt(&mut self, id: u32) {
        let Some(b) = &mut self.balance else {
            return;
        };
        let (queue, at) = b.evicted[id as usize];
        let queue = usize::from(queue);
        if at == 0 || b.evictions[queue] - at > (self.capacity as u64 / GHOST_SHARE).max(1) {
            return;
        }
        b.missed[queue] += 1;
        let [small, main] = b.missed;
        if small + main < COMPARED {
            return;
        }
        b.missed = [0; 2];
        let step = (self.capacity / STEP_SHARE).max(1);
        if small > 2 * main {
            self.small_max = (self.small_max + step).min(self.capacity * 9 / 10).max(1);
        } else if main > 2 * small {
            self.small_max = self.small_max.saturating_sub(step).max(1);
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
            if self.freq[i] >= self.rules.promote {
                self.freq[i] = 0;
                self.at[i] = At::Main;
                self.main.push_front(&mut self.links, id);
                self.moves += 1;
                continue;
            }
            self.note_evicted(0, id);
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
                self.freq[i] = self.freq[i].min(self.rules.freq_max) - 1;
                self.main.push_front(&mut self.links, id);
                self.moves += 1;
                continue;
            }
            self.note_evicted(1, id);
            self.at[i] = At::Nowhere;
            return;
        }
    }
}

impl Reference for S3Fifo {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        let known = self.at[i] == At::Ghost;
        let soon = self.at[i] == At::Small && self.came - self.came_at[i] < self.rules.window;
        if soon {
            return true;
        }
        if matches!(self.at[i], At::Small | At::Main) {
            self.freq[i] = self.freq[i].saturating_add(1);
            return true;
        }
        self.adapt(id);
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
            self.came += 1;
            self.came_at[i] = self.came;
            self.at[i] = At::Small;
            self.small.push_front(&mut self.links, id);
        }
        false
    }

    fn moves(&self) -> u64 {
        self.moves
    }
}
