//! Randomness a seed can replay, and the clock nobody has to wait for.
//!
//! A simulated failure is worth something only if it happens again. So every choice in a world
//! comes from one generator started by the seed, and time is a number the world advances.

/// xoshiro256** (Blackman and Vigna, public domain algorithm), started by splitmix64.
#[derive(Clone, Debug)]
pub struct Prng {
    state: [u64; 4],
}

/// One step of splitmix64: spreads a seed, and mixes digests.
pub fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Prng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Prng {
        let mut s = seed;
        Prng {
            state: std::array::from_fn(|_| splitmix(&mut s)),
        }
    }

    /// A generator for a part of the world, so that one part drawing more numbers does not
    /// change what another part draws.
    pub fn fork(&mut self) -> Prng {
        Prng::new(self.next_u64())
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let out = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// A number in `0..n`; 0 for `n == 0`. The bias of multiplying is below 2^-32 here.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in `num` of `den` cases.
    pub fn chance(&mut self, num: u64, den: u64) -> bool {
        self.below(den) < num
    }

    /// One of `items`, which must not be empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// An index into `weights`, by weight. All-zero weights give 0.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let total: u64 = weights.iter().map(|w| u64::from(*w)).sum();
        let mut at = self.below(total);
        for (i, w) in weights.iter().enumerate() {
            if at < u64::from(*w) {
                return i;
            }
            at -= u64::from(*w);
        }
        0
    }
}

/// Virtual time in nanoseconds, and a digest of everything that happened.
#[derive(Clone, Debug)]
pub struct Clock {
    now_ns: u64,
    digest: u64,
}

impl Clock {
    /// A clock that starts at one second, so that "before the start" can be expressed.
    pub fn new(seed: u64) -> Clock {
        Clock {
            now_ns: 1_000_000_000,
            digest: seed,
        }
    }

    /// Now.
    pub fn now(&self) -> u64 {
        self.now_ns
    }

    /// Moves forward; never back.
    pub fn advance_to(&mut self, ns: u64) {
        self.now_ns = self.now_ns.max(ns);
    }

    /// Adds an event to the digest.
    pub fn note(&mut self, event: u64) {
        self.digest ^= event.wrapping_add(self.now_ns.rotate_left(20));
        let mut s = self.digest;
        self.digest = splitmix(&mut s);
    }

    /// The digest so far.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_numbers() {
        let (mut a, mut b) = (Prng::new(7), Prng::new(7));
        assert!((0..1000).all(|_| a.next_u64() == b.next_u64()));
        assert_ne!(Prng::new(7).next_u64(), Prng::new(8).next_u64());
    }

    #[test]
    fn below_reaches_every_value_and_no_other() {
        let mut rng = Prng::new(1);
        let mut seen = [0u32; 10];
        for _ in 0..10_000 {
            seen[rng.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
    }
}
