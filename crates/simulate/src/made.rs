//! Workloads made from seeds, of the kinds that public traces are short of.
//!
//! A policy tuned to a dozen known traces may be a policy for these. Each kind here is a mechanism
//! (files that live briefly, pieces rewritten whole, mail, a sweep that turns round, …) with a
//! seed for its details, so that a rule can be chosen on some seeds and judged on others, and so that
//! it can be judged where there are no traces at all.

use hearth_policy::spread;

use crate::workload::{Request, Workload};

/// Time between requests, microseconds.
const STEP_US: u64 = 1000;

/// A way of making a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Files written, read back once or twice while young, deleted, their place used again; a skewed
    /// set that is read beside it.
    ShortLived,
    /// Pieces of a megabyte rewritten whole, small reads of those written lately.
    LargeRewrites,
    /// Mailboxes appended to, a journal written in a circle, mail read while it is new.
    Mail,
    /// Forwards and backwards over more than fits.
    Zigzag,
    /// A loop, a skewed set that moves, a hot set under a scan, overwrites, the loop again.
    Phases,
    /// Four guests at once: a loop, a skewed set, a log, a scan.
    Guests,
    /// A list read once, of which some come back a few times, far apart.
    Returning,
    /// Uniform reads and writes of four fifths of a cache of the middle size, mostly writes.
    Overwrites,
    /// Data read once, shortly after it was written; then a skewed rest.
    WriteThenRead,
    /// A few thousand blocks of one small disk, skewed, a third of it writes.
    SmallDisk,
}

impl Kind {
    /// All, in the order of tables.
    pub const ALL: [Kind; 10] = [
        Kind::ShortLived,
        Kind::LargeRewrites,
        Kind::Mail,
        Kind::Zigzag,
        Kind::Phases,
        Kind::Guests,
        Kind::Returning,
        Kind::Overwrites,
        Kind::WriteThenRead,
        Kind::SmallDisk,
    ];

    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::ShortLived => "short-lived",
            Kind::LargeRewrites => "large-rewrites",
            Kind::Mail => "mail",
            Kind::Zigzag => "zigzag",
            Kind::Phases => "phases",
            Kind::Guests => "guests",
            Kind::Returning => "returning",
            Kind::Overwrites => "overwrites",
            Kind::WriteThenRead => "write-then-read",
            Kind::SmallDisk => "small-disk",
        }
    }

    /// The workload of a seed: about `accesses` block accesses.
    pub fn make(self, seed: u64, accesses: u64) -> Workload {
        let mut made = Made::new(seed ^ (self as u64) << 32, accesses);
        match self {
            Kind::ShortLived => made.short_lived(),
            Kind::LargeRewrites => made.large_rewrites(),
            Kind::Mail => made.mail(),
            Kind::Zigzag => made.zigzag(),
            Kind::Phases => made.phases(),
            Kind::Guests => made.guests(),
            Kind::Returning => made.returning(),
            Kind::Overwrites => made.overwrites(),
            Kind::WriteThenRead => made.write_then_read(),
            Kind::SmallDisk => made.small_disk(),
        }
        Workload::made(&format!("{}-{seed}", self.name()), made.requests)
    }
}

struct Made {
    state: u64,
    accesses: u64,
    left: u64,
    requests: Vec<Request>,
}

impl Made {
    fn new(seed: u64, accesses: u64) -> Made {
        Made {
            state: spread(seed),
            accesses,
            left: accesses,
            requests: Vec::new(),
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(1);
        spread(self.state)
    }

    /// Below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// Between `low` and `high`, both included.
    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// In so many of 100 cases.
    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Below `n`, the n-th in proportion to about 1/n.
    fn skewed(&mut self, n: u64) -> u64 {
        let u = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((n as f64).powf(u) as u64).clamp(1, n.max(1)) - 1
    }

    fn access(&mut self, block: u64, count: u64, write: bool) {
        self.requests.push(Request {
            time_us: self.requests.len() as u64 * STEP_US,
            block,
            count: count as u32,
            write,
        });
        self.left = self.left.saturating_sub(count);
    }

    fn read(&mut self, block: u64, count: u64) {
        self.access(block, count, false);
    }

    fn write(&mut self, block: u64, count: u64) {
        self.access(block, count, true);
    }

    /// The n-th block of a region, scattered, so that neighbours say nothing.
    fn scattered(region: u64, n: u64) -> u64 {
        region << 36 | spread(region << 32 ^ n) >> 36
    }

    fn short_lived(&mut self) {
        const CLUSTER: u64 = 64;
        let places = self.accesses / 200;
        let lasting = self.accesses / 12;
        let live_most = (places / self.between(3, 6)) as usize;
        let backwards = self.chance(50);
        let mut free: Vec<u64> = (0..places).map(|n| n * CLUSTER).collect();
        let mut live: Vec<(u64, u64)> = Vec::new();
        while self.left > 0 {
            if self.chance(35) {
                let n = self.skewed(lasting);
                let write = self.chance(5);
                self.access(Self::scattered(1, n), 1, write);
                continue;
            }
            if live.len() > live_most {
                // The older the likelier.
                let at = self.skewed(live.len() as u64) as usize;
                let (place, _) = live.remove(at);
                // Some file systems give back what was freed last, others what was freed first.
                if backwards {
                    free.push(place);
                } else {
                    free.insert(0, place);
                }
            }
            let Some(place) = free.pop() else { return };
            let blocks = 1 + self.skewed(CLUSTER);
            self.write(place, blocks);
            live.push((place, blocks));
            for _ in 0..self.below(3) {
                let back = self.skewed(live.len() as u64 / 2) as usize;
                let (place, blocks) = live[live.len() - 1 - back];
                self.read(place, blocks);
            }
        }
    }

    fn large_rewrites(&mut self) {
        const PIECE: u64 = 256;
        let pieces = self.accesses / 5000 + 8;
        let share = self.between(15, 35);
        let mut newest: Vec<u64> = (0..pieces).collect();
        while self.left > 0 {
            // A rewrite weighs 256 blocks, a read two.
            if self.below(PIECE * 100) < share * 4 {
                let at = if self.chance(50) {
                    self.below(pieces)
                } else {
                    self.skewed(pieces)
                } as usize;
                let piece = newest.remove(at);
                newest.insert(0, piece);
                for part in 0..PIECE / 32 {
                    self.write(piece * PIECE + part * 32, 32);
                }
            } else {
                let piece = newest[self.skewed(pieces) as usize];
                let within = self.skewed(PIECE - 1);
                self.read(piece * PIECE + spread(within ^ piece) % (PIECE - 1), 2);
            }
        }
    }

    fn mail(&mut self) {
        const BOX: u64 = 1 << 14;
        let boxes = self.accesses / 400 + 10;
        let journal = self.accesses / 60;
        let mut ends = vec![0u64; boxes as usize];
        let mut journalled = 0;
        let mut recent: Vec<(u64, u64)> = Vec::new();
        while self.left > 0 {
            match self.below(10) {
                0..4 => {
                    let to = self.skewed(boxes);
                    let blocks = 1 + self.skewed(8);
                    let end = ends[to as usize];
                    let at = to * BOX + end % (BOX - 16);
                    // The last block was part full and is written again.
                    self.write(at, blocks + 1);
                    ends[to as usize] += blocks;
                    recent.push((at, blocks));
                    self.write((1 << 40) + journalled % journal, 2);
                    journalled += 2;
                    // The box's index.
                    self.write((1 << 41) + to, 1);
                }
                4..8 if !recent.is_empty() => {
                    let back = self.skewed(recent.len() as u64) as usize;
                    let (at, blocks) = recent[recent.len() - 1 - back];
                    self.read(at, blocks);
                }
                _ => {
                    let of = self.skewed(boxes);
                    self.read((1 << 41) + of, 1);
                    let end = ends[of as usize];
                    let most = end.clamp(1, 24);
                    self.read(of * BOX + end.saturating_sub(most) % (BOX - 64), most);
                }
            }
        }
    }

    fn zigzag(&mut self) {
        let length = self.accesses / self.between(8, 16);
        let writes = if self.chance(50) { 0 } else { 10 };
        let mut forwards = true;
        while self.left > 0 {
            for i in 0..length {
                let n = if forwards { i } else { length - 1 - i };
                let write = self.chance(writes);
                self.access(Self::scattered(2, n), 1, write);
            }
            forwards = !forwards;
        }
    }

    fn phases(&mut self) {
        let each = self.accesses / 6;
        let set = each / 12;
        for phase in 0..6u64 {
            for i in 0..each {
                match phase {
                    0 | 5 => self.read(Self::scattered(3, i % (set * 2)), 1),
                    1 => {
                        let n = i / 20 + self.skewed(set * 8);
                        self.read(Self::scattered(4, n), 1);
                    }
                    2 if i % 2 == 0 => self.read((1 << 42) + i, 1),
                    2 => {
                        let n = self.skewed(set * 3);
                        self.read(Self::scattered(5, n), 1);
                    }
                    3 => {
                        let (n, write) = (self.below(set * 2), self.chance(70));
                        self.access(Self::scattered(6, n), 1, write);
                    }
                    _ => {
                        // A drift: only the newest matters.
                        let n = i / 12 + self.below(set / 2);
                        self.read(Self::scattered(7, n), 1);
                    }
                }
            }
        }
    }

    fn guests(&mut self) {
        let looped = self.accesses / 25;
        let skewed = self.accesses / 8;
        let log = self.accesses / 20;
        let (mut at, mut logged, mut scanned) = (0, 0, 0);
        let weights = [
            self.between(5, 30),
            self.between(25, 50),
            self.between(10, 25),
        ];
        while self.left > 0 {
            let who = self.below(100);
            if who < weights[0] {
                self.read(Self::scattered(8, at % looped), 1);
                at += 1;
            } else if who < weights[0] + weights[1] {
                let (n, write) = (self.skewed(skewed), self.chance(25));
                self.access(Self::scattered(9, n), 1, write);
            } else if who < weights[0] + weights[1] + weights[2] {
                self.write((3 << 40) + logged % log, 4);
                logged += 4;
                if self.chance(30) {
                    let back = 1 + self.below(64);
                    self.read((3 << 40) + logged.saturating_sub(back * 4) % log, 4);
                }
            } else {
                self.read((4 << 40) + scanned, 4);
                scanned += 4;
            }
        }
    }

    fn returning(&mut self) {
        let percent = self.between(6, 14);
        let gap = self.accesses / self.between(15, 40);
        let mut due: std::collections::BTreeMap<u64, Vec<(u64, u64)>> = Default::default();
        let mut at = 0u64;
        let mut fresh = 0u64;
        while self.left > 0 {
            at += 1;
            let ready = due.first_key_value().is_some_and(|(when, _)| *when <= at);
            if ready && let Some((_, some)) = due.pop_first() {
                for (n, times) in some {
                    self.read(Self::scattered(10, n), 1);
                    if times > 1 {
                        let when = at + self.between(gap / 4, gap);
                        due.entry(when).or_default().push((n, times - 1));
                    }
                }
                continue;
            }
            fresh += 1;
            self.read(Self::scattered(10, fresh), 1);
            if self.chance(percent) {
                let (when, times) = (at + self.between(gap / 4, gap), self.between(3, 12));
                due.entry(when).or_default().push((fresh, times));
            }
        }
    }

    fn overwrites(&mut self) {
        let blocks = self.accesses / 12;
        let hot = self.chance(50);
        while self.left > 0 {
            let n = if hot && self.chance(80) {
                self.below(blocks / 8)
            } else {
                self.below(blocks / 4)
            };
            // A rest that is hardly used makes the share of the working set that of a pool.
            let n = if self.chance(3) {
                self.below(blocks)
            } else {
                n
            };
            let write = self.chance(70);
            self.access(Self::scattered(11, n), 1, write);
        }
    }

    fn write_then_read(&mut self) {
        let window = self.accesses / self.between(100, 400);
        let rest = self.accesses / 10;
        let ring = self.accesses / 6;
        let mut written = 0u64;
        while self.left > 0 {
            if self.chance(40) {
                let n = self.skewed(rest);
                self.read(Self::scattered(12, n), 1);
                continue;
            }
            self.write((5 << 40) + written * 2 % ring, 2);
            written += 1;
            if self.chance(80) {
                let back = self.below(window.min(written));
                self.read((5 << 40) + (written - 1 - back) * 2 % ring, 2);
            }
        }
    }

    fn small_disk(&mut self) {
        let blocks = self.between(1500, 6000);
        let drift = self.between(200, 2000);
        let mut base = 0;
        while self.left > 0 {
            if self.below(drift) == 0 {
                base += 1;
            }
            let n = (self.skewed(blocks) + base * 7) % blocks;
            let (count, write) = (1 + self.skewed(4), self.chance(33));
            self.access(spread(n) % (blocks * 4) / 4 * 4, count, write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_again_and_another_something_else() {
        for kind in Kind::ALL {
            let (a, b, c) = (
                kind.make(1, 30_000),
                kind.make(1, 30_000),
                kind.make(2, 30_000),
            );
            assert_eq!(a.requests, b.requests, "{}", kind.name());
            assert_ne!(a.requests, c.requests, "{}", kind.name());
            assert!(a.accesses() >= 29_000, "{}", kind.name());
            assert!(
                a.accesses() as usize > a.unique,
                "{} has no reuse",
                kind.name()
            );
        }
    }
}
