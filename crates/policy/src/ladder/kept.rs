//! What is left of a ladder when it is put away.
//!
//! The counts are: they took hours. What the miniatures held is not: they fill again within minutes, and count nothing
//! until they have.

use super::{ALL, BLOCKS, BLOCKS_MIN, Ladder, Rung};

/// One size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeptRung {
    /// The size is that of a miniature, doubled so often.
    pub doubled: u32,
    /// Counted reads, its hits, LRU's hits, blocks that guests wrote, blocks written to flash.
    pub counts: [f64; 5],
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptLadder {
    /// Blocks of a miniature.
    pub blocks: u32,
    /// How often the next size is doubled.
    pub next: u32,
    /// The sizes, ascending.
    pub rungs: Vec<KeptRung>,
}

impl Ladder {
    /// What is to be put away of it.
    pub fn kept(&self) -> KeptLadder {
        let kept = |r: &Rung| KeptRung {
            doubled: r.doubled,
            counts: [r.reads, r.hits, r.lru_hits, r.writes, r.flash_writes],
        };
        KeptLadder {
            blocks: self.blocks as u32,
            next: self.next,
            rungs: self.rungs.iter().map(kept).collect(),
        }
    }

    /// A ladder beside a curve of at most `samples` blocks that goes on with this; `None` if no ladder can have left
    /// it. One of another size begins anew.
    pub fn of_kept(kept: &KeptLadder, samples: usize) -> Option<Ladder> {
        let ascend = kept.rungs.windows(2).all(|w| w[0].doubled < w[1].doubled);
        let sane = |rung: &KeptRung| {
            let counts = rung.counts.iter().all(|n| (0.0..1e18).contains(n));
            counts && rung.doubled < kept.next
        };
        let right = (BLOCKS_MIN..=BLOCKS).contains(&(kept.blocks as usize))
            && kept.next <= ALL.ilog2() + 1
            && ascend
            && kept.rungs.iter().all(sane);
        if !right {
            return None;
        }
        let mut ladder = Ladder::new(samples);
        if ladder.blocks != kept.blocks as usize {
            return Some(ladder);
        }
        ladder.next = kept.next;
        ladder.rungs = (kept.rungs.iter())
            .map(|kept| {
                let mut rung = Rung::new(ladder.blocks, kept.doubled);
                [
                    rung.reads,
                    rung.hits,
                    rung.lru_hits,
                    rung.writes,
                    rung.flash_writes,
                ] = kept.counts;
                rung
            })
            .collect();
        Some(ladder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mrc::{Mrc, SAMPLES, place};

    #[test]
    fn counts_are_gone_on_with_and_what_is_wrong_is_refused() {
        let (mut mrc, mut ladder) = (Mrc::new(), Ladder::new(SAMPLES));
        for i in 0..60_000u64 {
            let key = i % 3000;
            mrc.count(1.0);
            assert!(place(key) < mrc.threshold());
            let distance = mrc.sampled(key, true);
            ladder.sampled(&mrc, key, i % 7 == 0, distance);
        }
        let lru = mrc.points();
        let kept = ladder.kept();
        let mut again = Ladder::of_kept(&kept, SAMPLES).expect("it is right");
        assert_eq!(again.kept(), kept);
        assert!(ladder.corrected(&lru).is_some());
        assert_eq!(again.corrected(&lru), ladder.corrected(&lru));
        assert_eq!(again.flash_writes(), ladder.flash_writes());
        // It goes on: what its miniatures see once they are full is as it was.
        for i in 60_000..120_000u64 {
            let distance = mrc.sampled(i % 3000, true);
            again.sampled(&mrc, i % 3000, i % 7 == 0, distance);
        }
        let (then, now) = (ladder.corrected(&lru), again.corrected(&lru));
        for (a, b) in then.iter().flatten().zip(now.iter().flatten()) {
            assert!((a.1 - b.1).abs() < 0.1, "{a:?} {b:?}");
        }
        // Beside a smaller sample the miniatures are others.
        let small = Ladder::of_kept(&kept, 512).expect("it is right");
        assert_eq!(small.kept().rungs, []);
        let wrong = |change: &dyn Fn(&mut KeptLadder)| {
            let mut kept = kept.clone();
            change(&mut kept);
            Ladder::of_kept(&kept, SAMPLES).is_none()
        };
        assert!(wrong(&|k| k.blocks = 0));
        assert!(wrong(&|k| k.next = 40));
        assert!(wrong(&|k| k.rungs[0].doubled = 40));
        assert!(wrong(&|k| k.rungs[0].counts[3] = f64::INFINITY));
    }
}
