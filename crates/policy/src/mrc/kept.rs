//! What is left of a curve when it is put away, and a curve that goes on with it.
//!
//! A curve takes hours to become one, so it outlives who measures it. The time line is not put away: of the
//! sampled blocks only the order of their last uses matters. Nor are empty buckets, and sizes are told as such, so that
//! it fits a sample of another size.

use super::{ALL, Mrc, SAMPLES, Seen, coarse, loglinear, place};

/// Sizes told apart at most, roughly: more are put together within a 128th of a size.
const SIZES_MAX: usize = 2048;

/// A block of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptBlock {
    /// The block.
    pub key: u64,
    /// Its counted accesses.
    pub counted: u32,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptMrc {
    /// Blocks whose [`place`] is below are the sample.
    pub threshold: u32,
    /// The sample, what was used last at the end.
    pub blocks: Vec<KeptBlock>,
    /// So many of them had been used last before the last two [`decays`](Mrc::decay), the older one first.
    pub marks: [u32; 2],
    /// Accesses by the size from which on they hit, ascending.
    pub hits_from: Vec<(u64, f32)>,
    /// What a sample's error pulls at, by size, ascending.
    pub pull: Vec<(u64, f32)>,
    /// The sum of it, and of first accesses.
    pub pulls: f64,
    /// Accesses of sampled blocks, in accesses of the whole stream.
    pub sampled: f64,
    /// The same, as many as there were.
    pub taken: f64,
    /// Accesses of the whole stream.
    pub accesses: f64,
    /// Of these, what stands for accesses of sampled blocks that got lost.
    pub missed: f64,
}

/// A count that can be gone on with.
fn sane(count: f64) -> bool {
    (0.0..1e18).contains(&count)
}

impl KeptMrc {
    /// Leaves out so much of the sample that `blocks` are left: it is of fewer blocks then, and as good otherwise.
    pub fn thin(&mut self, blocks: usize) {
        let mut places: Vec<u32> = self.blocks.iter().map(|b| place(b.key)).collect();
        if places.len() <= blocks {
            return;
        }
        places.sort_unstable();
        self.threshold = places[blocks];
        let mut at = 0;
        let mut left = [0; 2];
        let (threshold, marks) = (self.threshold, self.marks);
        self.blocks.retain(|block| {
            let stays = place(block.key) < threshold;
            for (left, mark) in left.iter_mut().zip(marks) {
                *left += u32::from(stays && at < mark);
            }
            at += 1;
            stays
        });
        self.marks = left;
    }
}

impl Mrc {
    /// What is to be put away of it.
    pub fn kept(&self) -> KeptMrc {
        let mut order: Vec<(u32, KeptBlock)> = (self.last.iter())
            .map(|(key, seen)| {
                let (key, counted) = (*key, seen.counted);
                (seen.time, KeptBlock { key, counted })
            })
            .collect();
        order.sort_unstable_by_key(|(time, _)| *time);
        let before = |mark: &u32| order.partition_point(|(time, _)| time < mark) as u32;
        let marks = [before(&self.marks[0]), before(&self.marks[1])];
        let used = |counts: &[f64]| -> Vec<(usize, f64)> {
            let all = counts.iter().copied().enumerate();
            all.filter(|(_, n)| *n > 0.0).collect()
        };
        let mut hits_from: Vec<(u64, f64)> = Vec::new();
        let hits = used(&self.hits_from);
        let together = hits.len() > SIZES_MAX;
        for (at, count) in hits {
            let size = self.lower(at) as u64;
            match hits_from.last_mut() {
                // The largest of them stands for all: who is promised too little is not led astray.
                Some(last) if together && coarse(last.0) == coarse(size) => {
                    *last = (size, last.1 + count);
                }
                _ => hits_from.push((size, count)),
            }
        }
        let pull = used(&self.pull).into_iter();
        KeptMrc {
            threshold: self.threshold,
            blocks: order.into_iter().map(|(_, block)| block).collect(),
            marks,
            hits_from: hits_from.into_iter().map(|(s, n)| (s, n as f32)).collect(),
            pull: pull
                .map(|(at, n)| (loglinear::lower(at, super::PULL_BITS), n as f32))
                .collect(),
            pulls: self.pulls,
            sampled: self.sampled,
            taken: self.taken,
            accesses: self.accesses,
            missed: self.missed,
        }
    }

    /// A curve of at most `samples` blocks that goes on with this; `None` if no curve can have left it.
    pub fn of_kept(kept: &KeptMrc, samples: usize) -> Option<Mrc> {
        let sums = [
            kept.pulls,
            kept.sampled,
            kept.taken,
            kept.accesses,
            kept.missed,
        ];
        let counts = kept.hits_from.iter().chain(&kept.pull);
        let ascend = |sizes: &[(u64, f32)]| sizes.windows(2).all(|w| w[0].0 < w[1].0);
        let in_sample = |block: &KeptBlock| place(block.key) < kept.threshold;
        let right = (1..=ALL).contains(&kept.threshold)
            && kept.blocks.len() <= SAMPLES
            && kept.blocks.iter().all(in_sample)
            && kept.marks[0] <= kept.marks[1]
            && kept.marks[1] as usize <= kept.blocks.len()
            && sums.into_iter().all(sane)
            && (kept.accesses > 0.0 || kept.sampled == 0.0)
            && counts.map(|c| f64::from(c.1)).all(sane)
            && ascend(&kept.hits_from)
            && ascend(&kept.pull);
        if !right {
            return None;
        }
        let mut mrc = Mrc::with_samples(samples);
        let thinned;
        let kept = if kept.blocks.len() > mrc.samples {
            let mut fewer = kept.clone();
            fewer.thin(mrc.samples);
            thinned = fewer;
            &thinned
        } else {
            kept
        };
        mrc.threshold = kept.threshold;
        for (at, block) in kept.blocks.iter().enumerate() {
            let seen = Seen {
                time: at as u32,
                counted: block.counted,
            };
            if mrc.last.insert(block.key, seen).is_some() {
                return None;
            }
            mrc.by_hash.push((place(block.key), block.key));
        }
        mrc.marks = kept.marks;
        mrc.renumber();
        for (size, count) in &kept.hits_from {
            let at = mrc.bucket(*size);
            mrc.hits_from[at] += f64::from(*count);
        }
        for (size, count) in &kept.pull {
            let at = loglinear::bucket(*size, super::PULL_BITS).min(mrc.pull.len() - 1);
            mrc.pull[at] += f64::from(*count);
        }
        mrc.pulls = kept.pulls;
        mrc.sampled = kept.sampled;
        mrc.taken = kept.taken;
        mrc.accesses = kept.accesses;
        mrc.missed = kept.missed;
        Some(mrc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skewed(i: u64, of: u64) -> u64 {
        let x = crate::spread(i) % of;
        x * (crate::spread(i + 7) % of) / of
    }

    fn watched(blocks: u64) -> Mrc {
        let mut mrc = Mrc::new();
        for i in 0..400_000 {
            mrc.access(skewed(i, blocks));
            if i % 150_000 == 149_999 {
                mrc.decay();
            }
        }
        mrc
    }

    fn same(a: &Mrc, b: &Mrc, within: f64) {
        let sizes: Vec<f64> = (0..60).map(|i| 1.4f64.powi(i)).collect();
        for (a, b) in a.curve(&sizes).into_iter().zip(b.curve(&sizes)) {
            assert!((a.1 - b.1).abs() <= within, "{a:?} {b:?}");
        }
    }

    #[test]
    fn a_curve_that_was_put_away_is_the_same_and_goes_on_alike() {
        for (blocks, within) in [(2000, 1e-4), (300_000, 0.003)] {
            let mut mrc = watched(blocks);
            let kept = mrc.kept();
            let mut again = Mrc::of_kept(&kept, SAMPLES).expect("it is right");
            assert_eq!(again.blocks(), mrc.blocks());
            same(&mrc, &again, within);
            for i in 400_000..600_000 {
                mrc.access(skewed(i, blocks));
                again.access(skewed(i, blocks));
            }
            mrc.decay();
            again.decay();
            assert_eq!(again.sample_blocks(), mrc.sample_blocks());
            same(&mrc, &again, within);
        }
    }

    #[test]
    fn one_of_fewer_blocks_tells_the_same_of_hits() {
        let mrc = watched(300_000);
        assert!(mrc.rate() < 1.0);
        let mut kept = mrc.kept();
        let small = Mrc::of_kept(&kept, 512).expect("it is right");
        assert!(small.sample_blocks() <= 512 && small.samples() == 512);
        same(&mrc, &small, 0.02);
        let ratio = small.blocks() / mrc.blocks();
        assert!((0.7..1.4).contains(&ratio), "{ratio}");
        kept.thin(1000);
        assert!(kept.blocks.len() == 1000 && kept.marks[1] <= 1000);
        assert!(Mrc::of_kept(&kept, SAMPLES).is_some());
    }

    #[test]
    fn what_no_curve_can_have_left_is_refused() {
        let kept = watched(2000).kept();
        let wrong = |change: &dyn Fn(&mut KeptMrc)| {
            let mut kept = kept.clone();
            change(&mut kept);
            Mrc::of_kept(&kept, SAMPLES).is_none()
        };
        assert!(!wrong(&|_| ()));
        assert!(wrong(&|k| k.threshold = 0));
        assert!(wrong(&|k| k.threshold = 5));
        assert!(wrong(&|k| k.marks = [1, 1 << 20]));
        assert!(wrong(&|k| k.sampled = f64::NAN));
        assert!(wrong(&|k| k.accesses = 0.0));
        assert!(wrong(&|k| k.hits_from[0].1 = -1.0));
        assert!(wrong(&|k| k.hits_from.swap(0, 1)));
        assert!(wrong(&|k| k.blocks[0] = k.blocks[1]));
    }
}
