//! The policies others use, to measure ours against.
//!
//! Each is the published algorithm over one stream of equal blocks: every access is a use, every
//! miss is admitted. Blocks are named by dense numbers (0..universe) so that lists and tables
//! are arrays; a simulator numbers the blocks of a trace once and runs every policy over that.
//! They are yardsticks, not engine code: their memory is that of the universe.

mod arc;
mod larc;
mod lirs;
mod list;
mod lru;
mod opt;
mod s3fifo;
mod sieve;
mod sketch;
mod tinylfu;
mod twoq;

pub use arc::Arc;
pub use larc::Larc;
pub use lirs::Lirs;
pub use lru::Lru;
pub use opt::Opt;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use tinylfu::TinyLfu;
pub use twoq::TwoQ;

/// A cache of equal blocks.
pub trait Reference: Send {
    /// Uses a block; true if it was cached. After a miss it is, unless it was bypassed.
    fn access(&mut self, id: u32) -> bool;

    /// Misses so far after which the block was not cached.
    fn bypassed(&self) -> u64 {
        0
    }

    /// Blocks re-queued inside the cache so far, each one more write in a log.
    fn moves(&self) -> u64 {
        0
    }
}

/// The reference policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Least recently used.
    Lru,
    /// Two queues (Johnson and Shasha, VLDB 1994): A1in a quarter, A1out half.
    TwoQ,
    /// Adaptive replacement cache (Megiddo and Modha, FAST 2003).
    Arc,
    /// Low inter-reference recency set (Jiang and Zhang, SIGMETRICS 2002).
    Lirs,
    /// Windowed TinyLFU (Einziger, Friedman, Manes, TOS 2017), window 1 %.
    TinyLfu,
    /// Three static FIFO queues (Yang et al., SOSP 2023).
    S3Fifo,
    /// S3-FIFO with adaptive queue sizes: a queue that evicts too early grows (section 6 of the paper).
    S3FifoD,
    /// Clock2Q+ (Zhai et al., VLDB 2026): as S3-FIFO, but uses in a correlation window do not count.
    Clock2QPlus,
    /// SIEVE (Zhang et al., NSDI 2024).
    Sieve,
    /// Lazy adaptive replacement (Huang et al., MSST 2013).
    Larc,
    /// Belady's optimum that admits every miss. It knows the future.
    Opt,
}

impl Kind {
    /// All, in the order of tables.
    pub const ALL: [Kind; 11] = [
        Kind::Lru,
        Kind::TwoQ,
        Kind::Arc,
        Kind::Lirs,
        Kind::TinyLfu,
        Kind::S3Fifo,
        Kind::S3FifoD,
        Kind::Clock2QPlus,
        Kind::Sieve,
        Kind::Larc,
        Kind::Opt,
    ];

    /// Name in tables and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Lru => "lru",
            Kind::TwoQ => "2q",
            Kind::Arc => "arc",
            Kind::Lirs => "lirs",
            Kind::TinyLfu => "w-tinylfu",
            Kind::S3Fifo => "s3-fifo",
            Kind::S3FifoD => "s3-fifo-d",
            Kind::Clock2QPlus => "clock2q+",
            Kind::Sieve => "sieve",
            Kind::Larc => "larc",
            Kind::Opt => "opt",
        }
    }

    /// A cache of `capacity` blocks (at least 1) over blocks numbered below `universe`.
    /// `accesses` is the whole stream, which only [`Kind::Opt`] looks at.
    pub fn build(self, capacity: usize, universe: usize, accesses: &[u32]) -> Box<dyn Reference> {
        let capacity = capacity.max(1);
        match self {
            Kind::Lru => Box::new(Lru::new(capacity, universe)),
            Kind::TwoQ => Box::new(TwoQ::new(capacity, universe)),
            Kind::Arc => Box::new(Arc::new(capacity, universe)),
            Kind::Lirs => Box::new(Lirs::new(capacity, universe)),
            Kind::TinyLfu => Box::new(TinyLfu::new(capacity, universe)),
            Kind::S3Fifo => Box::new(S3Fifo::new(capacity, universe)),
            Kind::S3FifoD => Box::new(S3Fifo::adaptive(capacity, universe)),
            Kind::Clock2QPlus => Box::new(S3Fifo::clock2q_plus(capacity, universe)),
            Kind::Sieve => Box::new(Sieve::new(capacity, universe)),
            Kind::Larc => Box::new(Larc::new(capacity, universe)),
            Kind::Opt => Box::new(Opt::new(capacity, universe, accesses)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small mixed stream: a hot set, a loop and one-timers.
    fn stream() -> Vec<u32> {
        let mut x = 1u64;
        (0..20_000u32)
            .map(|i| {
                x = x
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                match (x >> 60) & 3 {
                    0 | 1 => (x >> 40) as u32 % 40,
                    2 => 100 + i % 300,
                    _ => 1000 + i,
                }
            })
            .collect()
    }

    #[test]
    fn none_beats_the_optimum_and_all_find_the_hot_set() {
        let stream = stream();
        let hits = |kind: Kind, capacity| {
            let mut cache = kind.build(capacity, 22_000, &stream);
            stream.iter().filter(|id| cache.access(**id)).count()
        };
        for capacity in [1, 2, 3, 10, 50, 200, 1000] {
            let best = hits(Kind::Opt, capacity);
            for kind in Kind::ALL {
                let got = hits(kind, capacity);
                // The optimum must admit every miss; who may refuse one can do better.
                if kind != Kind::Larc {
                    assert!(got <= best, "{} {capacity}: {got} > {best}", kind.name());
                }
                if capacity >= 200 {
                    // The hot set is half of all accesses.
                    assert!(got * 100 > stream.len() * 45, "{} {got}", kind.name());
                }
            }
        }
    }

    #[test]
    fn everything_hits_once_it_fits() {
        let stream: Vec<u32> = (0..100).cycle().take(1000).collect();
        for kind in Kind::ALL {
            let mut cache = kind.build(128, 100, &stream);
            let hits = stream.iter().filter(|id| cache.access(**id)).count();
            // One that admits at the second miss has a round less.
            let first = if kind == Kind::Larc { 800 } else { 900 };
            assert!(hits == first, "{}: {hits}", kind.name());
        }
    }
}
