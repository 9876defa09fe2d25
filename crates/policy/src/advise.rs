//! How much flash is worth having, and who should get it.
//!
//! Input is each disk's miss-ratio curve and how much it reads. A curve of hit ratio over size
//! rises steeply and then flattens; the knee is where more flash begins to buy little. A pool is
//! divided so that the last block given to each disk saves as much time as the last given to any
//! other: on curves made concave that is the best division there is.

/// One disk's need.
#[derive(Clone, Debug)]
pub struct Demand {
    /// Its name.
    pub name: String,
    /// (blocks, hit ratio), ascending in both, as [`Mrc::points`](crate::mrc::Mrc::points) gives.
    pub curve: Vec<(f64, f64)>,
    /// Blocks it reads per second.
    pub rate: f64,
    /// Time of a hit, microseconds.
    pub hit_us: f64,
    /// Time of a miss, microseconds.
    pub miss_us: f64,
    /// Blocks it must get.
    pub min: f64,
    /// Most blocks it may get.
    pub max: f64,
}

/// What one disk should get, and what that does.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The disk.
    pub name: String,
    /// Blocks.
    pub blocks: f64,
    /// Expected hit ratio.
    pub hit_ratio: f64,
    /// Expected mean latency of a read, microseconds.
    pub latency_us: f64,
}

/// Hit ratio at a size, between the points of a curve. Zero below the first point's share.
pub fn at(curve: &[(f64, f64)], blocks: f64) -> f64 {
    let mut before = (0.0, 0.0);
    for point in curve {
        if blocks < point.0 {
            let width = point.0 - before.0;
            let part = if width > 0.0 {
                (blocks - before.0) / width
            } else {
                1.0
            };
            return before.1 + (point.1 - before.1) * part;
        }
        before = *point;
    }
    before.1
}

/// Mean latency of a read at a size, microseconds.
pub fn latency(demand: &Demand, blocks: f64) -> f64 {
    let hit = at(&demand.curve, blocks);
    hit * demand.hit_us + (1.0 - hit) * demand.miss_us
}

/// The knee of a curve: the point farthest above the line from its beginning to its end
/// (Satopää et al., "Finding a Kneedle in a Haystack", 2011). `None` if nothing is reused, or
/// the curve has no bend worth the name.
pub fn knee(curve: &[(f64, f64)]) -> Option<(f64, f64)> {
    /// Rise above the line, as a share of the whole, from which it is a bend.
    const BEND_MIN: f64 = 0.05;
    let last = curve.last().filter(|p| p.0 > 0.0 && p.1 > 0.0)?;
    let rise = |p: &(f64, f64)| p.1 / last.1 - p.0 / last.0;
    let best = curve.iter().max_by(|a, b| rise(a).total_cmp(&rise(b)))?;
    (rise(best) >= BEND_MIN).then_some(*best)
}

/// The size up to which more flash pays: the last at which another `step` blocks raise the hit
/// ratio by `gain` or more, on the mean over a step of the curve; (0, 0) if none does.
pub fn pays(curve: &[(f64, f64)], step: f64, gain: f64) -> (f64, f64) {
    let hull = hull(curve);
    hull.windows(2)
        .take_while(|pair| (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0) * step >= gain)
        .last()
        .map_or((0.0, 0.0), |pair| pair[1])
}

/// The cache block size for reads of these lengths (see
/// [`Mix::read_octaves`](crate::histogram::Mix::read_octaves)), bytes: the largest
/// that three reads of four fill by themselves, so that what else a miss brings in is rarely paid
/// for in vain. `None` without reads.
pub fn block_size(read_octaves: &[u64; 64]) -> Option<u64> {
    /// 4 KiB and 1 MiB.
    const SIZES: std::ops::RangeInclusive<usize> = 12..=20;
    let all: u64 = read_octaves.iter().sum();
    let long = |from: usize| read_octaves.iter().skip(from).sum::<u64>();
    let least = *SIZES.start();
    (all > 0).then(|| {
        let best = SIZES.rev().find(|k| long(*k) * 4 >= all * 3);
        1 << best.unwrap_or(least)
    })
}

/// The upper concave hull of a curve, from (0, 0): giving flash in one go past a step of the curve
/// is worth the mean over the step.
fn hull(curve: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut hull: Vec<(f64, f64)> = vec![(0.0, 0.0)];
    for p in curve {
        if p.0 <= hull[hull.len() - 1].0 {
            continue;
        }
        while hull.len() >= 2 {
            let (a, b) = (hull[hull.len() - 2], hull[hull.len() - 1]);
            if (b.1 - a.1) * (p.0 - b.0) <= (p.1 - b.1) * (b.0 - a.0) {
                hull.pop();
            } else {
                break;
            }
        }
        hull.push(*p);
    }
    hull
}

/// Divides `blocks` of flash. Every disk gets its minimum first (cut short alike if they do not
/// all fit); then flash goes, piece by piece of the curves' hulls, to whoever saves most time with
/// it. What nobody gains from is left over.
pub fn divide(demands: &[Demand], blocks: f64) -> Vec<Share> {
    let least: f64 = demands.iter().map(|d| d.min.min(d.max)).sum();
    let cut = if least > blocks && least > 0.0 {
        blocks / least
    } else {
        1.0
    };
    let mut given: Vec<f64> = demands.iter().map(|d| d.min.min(d.max) * cut).collect();
    let mut left = (blocks - given.iter().sum::<f64>()).max(0.0);
    // (saved time per block and second, disk, up to)
    let mut pieces: Vec<(f64, usize, f64)> = Vec::new();
    for (i, d) in demands.iter().enumerate() {
        for pair in hull(&d.curve).windows(2) {
            let (a, b) = (pair[0], pair[1]);
            let gain = (b.1 - a.1) * d.rate * (d.miss_us - d.hit_us) / (b.0 - a.0);
            if gain > 0.0 {
                pieces.push((gain, i, b.0));
            }
        }
    }
    // Stable: a disk's own pieces, which fall in gain, stay in order.
    pieces.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (_, i, to) in pieces {
        let want = (to.min(demands[i].max) - given[i]).max(0.0).min(left);
        given[i] += want;
        left -= want;
    }
    demands
        .iter()
        .zip(given)
        .map(|(d, blocks)| Share {
            name: d.name.clone(),
            blocks,
            hit_ratio: at(&d.curve, blocks),
            latency_us: latency(d, blocks),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(name: &str, curve: &[(f64, f64)], rate: f64) -> Demand {
        Demand {
            name: name.to_owned(),
            curve: curve.to_vec(),
            rate,
            hit_us: 100.0,
            miss_us: 8000.0,
            min: 0.0,
            max: f64::INFINITY,
        }
    }

    #[test]
    fn the_knee_is_where_it_bends() {
        let curve: Vec<(f64, f64)> = (1..=100)
            .map(|i| {
                let x = f64::from(i);
                (
                    x,
                    if x <= 20.0 {
                        x / 25.0
                    } else {
                        0.8 + (x - 20.0) / 400.0
                    },
                )
            })
            .collect();
        assert_eq!(knee(&curve).map(|p| p.0), Some(20.0));
        let straight: Vec<(f64, f64)> = (1..=100)
            .map(|i| (f64::from(i), f64::from(i) / 100.0))
            .collect();
        assert_eq!(knee(&straight), None);
        assert_eq!(knee(&[]), None);
    }

    #[test]
    fn flash_pays_until_the_curve_is_flat() {
        // 10 points per 100 blocks, then 1 point, then nothing.
        let curve = [(100.0, 0.1), (500.0, 0.5), (600.0, 0.51), (2000.0, 0.51)];
        assert_eq!(pays(&curve, 100.0, 0.05), (500.0, 0.5));
        assert_eq!(pays(&curve, 100.0, 0.005), (600.0, 0.51));
        assert_eq!(pays(&curve, 100.0, 0.5), (0.0, 0.0));
        assert_eq!(pays(&[], 100.0, 0.01), (0.0, 0.0));
        // A step is judged by its mean: the flat part before it is not the end.
        let step = [(499.0, 0.0), (500.0, 1.0), (900.0, 1.0)];
        assert_eq!(pays(&step, 100.0, 0.1), (500.0, 1.0));
    }

    #[test]
    fn blocks_are_no_longer_than_most_reads() {
        let mut reads = [0; 64];
        assert_eq!(block_size(&reads), None);
        reads[9] = 10;
        assert_eq!(block_size(&reads), Some(4096));
        reads[16] = 30;
        assert_eq!(block_size(&reads), Some(65_536));
        reads[9] = 11;
        assert_eq!(block_size(&reads), Some(4096));
        reads[25] = 1000;
        assert_eq!(block_size(&reads), Some(1 << 20));
    }

    #[test]
    fn flash_goes_where_it_saves_most() {
        let steep = demand("steep", &[(100.0, 0.8), (1000.0, 0.9)], 10.0);
        let flat = demand("flat", &[(1000.0, 0.5)], 10.0);
        let idle = demand("idle", &[(10.0, 0.9)], 0.0);
        let got = divide(&[steep, flat, idle], 600.0);
        assert_eq!(got[0].blocks, 100.0);
        assert_eq!(got[1].blocks, 500.0);
        assert_eq!(got[2].blocks, 0.0);
        assert!((got[0].hit_ratio - 0.8).abs() < 1e-9);
        assert!((got[1].latency_us - (0.25 * 100.0 + 0.75 * 8000.0)).abs() < 1e-6);
    }

    #[test]
    fn a_step_is_bought_whole_or_compared_by_its_mean() {
        // Nothing below 500 blocks, all above: a loop.
        let looped = demand("loop", &[(499.0, 0.0), (500.0, 1.0)], 10.0);
        let even = demand("even", &[(1000.0, 0.9)], 10.0);
        let got = divide(&[looped, even], 800.0);
        assert_eq!(got[0].blocks, 500.0);
        assert_eq!(got[1].blocks, 300.0);
    }

    #[test]
    fn limits_are_kept() {
        let mut a = demand("a", &[(100.0, 0.9)], 100.0);
        let mut b = demand("b", &[(100.0, 0.1)], 1.0);
        a.max = 30.0;
        b.min = 50.0;
        let got = divide(&[a.clone(), b.clone()], 100.0);
        assert_eq!(got[0].blocks, 30.0);
        assert_eq!(got[1].blocks, 70.0);
        let short = divide(&[a, b], 25.0);
        assert_eq!(short[1].blocks, 25.0);
    }
}
