//! Which of several flash devices answers so slowly that it is better left alone.
//!
//! What is written counts in the order in which it was written, so a device that takes ten times as long holds up
//! what goes to the others as well; and whoever reads from it waits ten times as long. A device is judged by
//! the mean of what it answered lately, reads and writes apart, against the best of the others: nothing is
//! slow by itself. It takes several bad means in a row, for even a good SSD pauses now and then, and a device that is left
//! alone is tried again after a while, later each time it turns out as slow as it was.
//!
//! Latency is not speed: of two equal devices that have as much to do as they can, one that is behind has all the queue and the
//! other none, and nothing that is asked of both gets the queue away from where it is. What tells them apart is what happens to
//! the others when the device is left alone. If they answer nearly as slowly as it did, it was the load, and it gets its share
//! again. Until they have been watched for so long, nothing is moved off it.

/// Operations a mean is taken of, at least.
const SAMPLES_MIN: u64 = 16;
/// Means in a row that have to be bad.
const BAD_MIN: u32 = 3;
/// So many times the best is slow ...
const SLOW: u64 = 4;
/// ... and one that was slow and is below so many is not any more.
const FAIR: u64 = 2;
/// What is answered within so many nanoseconds is not slow, whatever others do.
const QUICK_NS: u64 = 200_000;
/// So many times as slow as the best of those that do its work is what was only loaded, at most.
const LOADED: u64 = 3;
/// So many means of the others say that it is not so.
const SURE_MIN: u32 = 5;
/// One that was so much better than another lately is not slow.
const EVEN_NS: u64 = 3_000_000_000;
/// How long one that was only loaded is not called slow again, at first, and at most.
const TRUST_NS: u64 = 10_000_000_000;
const TRUST_MAX_NS: u64 = 160_000_000_000;
/// A mean is good for so long.
const GOOD_NS: u64 = 10_000_000_000;
/// How long a slow device is left alone at first, and at most.
const ALONE_NS: u64 = 30_000_000_000;
const ALONE_MAX_NS: u64 = 960_000_000_000;
/// The cost of the best device.
pub const COST: u64 = 256;

/// What a device has answered since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// Reads, and the time they took together.
    pub reads: u64,
    /// Nanoseconds.
    pub read_ns: u64,
    /// Writes, and theirs.
    pub writes: u64,
    /// Nanoseconds.
    pub write_ns: u64,
}

/// A mean of late.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    ns: u64,
    at: u64,
    /// What it was taken up to.
    count: u64,
    sum: u64,
}

impl Mean {
    /// Takes a new mean if there is enough for one; true if it did.
    fn look(&mut self, count: u64, sum: u64, now: u64) -> bool {
        let new = count.saturating_sub(self.count);
        if new < SAMPLES_MIN {
            return false;
        }
        self.ns = (sum.saturating_sub(self.sum) / new).max(1);
        (self.at, self.count, self.sum) = (now, count, sum);
        true
    }

    fn known(&self, now: u64) -> Option<u64> {
        let fresh = self.ns > 0 && now.saturating_sub(self.at) <= GOOD_NS;
        fresh.then_some(self.ns)
    }
}

#[derive(Clone, Copy, Debug)]
struct Device {
    reads: Mean,
    writes: Mean,
    slow: bool,
    /// Bad means in a row, or, of one that is slow, whether the last one was.
    bad: u32,
    /// When a slow one is tried again, and how long it is left alone.
    again_at: u64,
    alone_ns: u64,
    /// By which means it was judged slow, of reads and of writes; 0: not by those.
    judged: (u64, u64),
    /// How often the others were better meanwhile.
    better: u32,
    /// When another was slow beside it, to read and to write.
    ahead_at: (Option<u64>, Option<u64>),
    /// Until when it is not called slow, and how long that was last.
    trusted_to: u64,
    trust_ns: u64,
}

impl Default for Device {
    fn default() -> Device {
        Device {
            reads: Mean::default(),
            writes: Mean::default(),
            slow: false,
            bad: 0,
            again_at: 0,
            alone_ns: ALONE_NS,
            judged: (0, 0),
            better: 0,
            ahead_at: (None, None),
            trusted_to: 0,
            trust_ns: 0,
        }
    }
}

/// Judges several devices.
#[derive(Clone, Debug, Default)]
pub struct Slow(Vec<Device>);

impl Slow {
    /// For so many devices, of which nothing is known.
    pub fn new(devices: usize) -> Slow {
        Slow(vec![Device::default(); devices])
    }

    /// Is it to be left alone?
    pub fn is_slow(&self, device: usize) -> bool {
        self.0.get(device).is_some_and(|d| d.slow)
    }

    /// Is it to be left alone, and do the others do better without it? Only then is it worth moving what lies there.
    pub fn is_surely_slow(&self, device: usize) -> bool {
        let device = self.0.get(device);
        device.is_some_and(|d| d.slow && d.better >= SURE_MIN)
    }

    /// Is any?
    pub fn any(&self) -> bool {
        self.0.iter().any(|d| d.slow)
    }

    /// How long its reads and its writes took in the mean, when that was last taken; 0: never.
    pub fn means(&self, device: usize) -> (u64, u64) {
        self.0
            .get(device)
            .map_or((0, 0), |d| (d.reads.ns, d.writes.ns))
    }

    /// The best of the others that are not slow, for what `of` says of each.
    fn best(&self, but: usize, now: u64, of: impl Fn(&Device) -> &Mean) -> Option<u64> {
        let others = self.0.iter().enumerate();
        let others = others.filter(|(n, d)| *n != but && !d.slow);
        others.filter_map(|(_, d)| of(d).known(now)).min()
    }

    /// The worst of them.
    fn worst(&self, but: usize, now: u64, of: impl Fn(&Device) -> &Mean) -> u64 {
        let others = self.0.iter().enumerate();
        let others = others.filter(|(n, d)| *n != but && !d.slow);
        let others = others.filter_map(|(_, d)| of(d).known(now));
        others.max().unwrap_or(0)
    }

    /// What it costs to give a device something, where the best costs [`COST`].
    pub fn cost(&self, device: usize, now: u64) -> u64 {
        let cost = |of: fn(&Device) -> &Mean| {
            let mine = of(self.0.get(device)?).known(now)?;
            let best = self.best(device, now, of)?;
            Some(mine.saturating_mul(COST) / best.min(mine))
        };
        let (reads, writes) = (cost(|d| &d.reads), cost(|d| &d.writes));
        let cost = reads.into_iter().chain(writes).max();
        // Small differences are chance.
        cost.filter(|cost| *cost > COST * 5 / 4).unwrap_or(COST)
    }

    /// Takes in what each has answered so far; true if one is slow, or not, that was not, or was.
    pub fn look(&mut self, now: u64, answered: &[Answered]) -> bool {
        let new: Vec<(bool, bool)> = self
            .0
            .iter_mut()
            .zip(answered)
            .map(|(d, a)| {
                let reads = d.reads.look(a.reads, a.read_ns, now);
                (reads, d.writes.look(a.writes, a.write_ns, now))
            })
            .collect();
        let mut changed = false;
        // The worst first: one may be behind with reads, the other with writes, and only one of them can do without the other.
        let mut order: Vec<usize> = (0..new.len()).collect();
        order.sort_by_key(|n| std::cmp::Reverse(self.cost(*n, now)));
        for n in order {
            changed |= match self.is_slow(n) && self.was_loaded(n, &new, now) {
                true => self.trust(n, now),
                false => self.judge(n, new[n].0, new[n].1, now),
            };
        }
        changed
    }

    /// A slow one is left alone: do those that have its work to do answer hardly better than it did?
    fn was_loaded(&mut self, n: usize, new: &[(bool, bool)], now: u64) -> bool {
        let others = self.0.iter().zip(new).enumerate();
        let others = others.filter(|(at, (d, _))| *at != n && !d.slow);
        let new = others.fold((false, false), |all, (_, (_, new))| {
            (all.0 | new.0, all.1 | new.1)
        });
        let reads = self.best(n, now, |d| &d.reads).filter(|_| new.0);
        let writes = self.best(n, now, |d| &d.writes).filter(|_| new.1);
        let Some(d) = self.0.get_mut(n) else {
            return false;
        };
        let of = [(d.judged.0, reads), (d.judged.1, writes)];
        let known: Vec<(u64, u64)> = of
            .into_iter()
            .filter_map(|(judged, best)| Some((judged, best?)))
            .filter(|(judged, _)| *judged > 0)
            .collect();
        if known.is_empty() {
            return false;
        }
        // In all that it was judged by: slow to write is slow, however it reads.
        let loaded = |(judged, best): &(u64, u64)| best.saturating_mul(LOADED) >= *judged;
        if known.iter().all(loaded) {
            return true;
        }
        d.better = d.better.saturating_add(1);
        false
    }

    fn trust(&mut self, n: usize, now: u64) -> bool {
        let Some(d) = self.0.get_mut(n) else {
            return false;
        };
        // Again and again under the same load, or for the first time in long.
        let lately = now.saturating_sub(d.trusted_to) < 2 * d.trust_ns;
        d.trust_ns = match lately {
            true => (d.trust_ns * 2).min(TRUST_MAX_NS),
            false => TRUST_NS,
        };
        d.trusted_to = now + d.trust_ns;
        (d.slow, d.bad, d.again_at) = (false, 0, now);
        true
    }

    fn judge(&mut self, n: usize, reads: bool, writes: bool, now: u64) -> bool {
        let best = (
            self.best(n, now, |d| &d.reads),
            self.best(n, now, |d| &d.writes),
        );
        let worst = (
            self.worst(n, now, |d| &d.reads),
            self.worst(n, now, |d| &d.writes),
        );
        let Some(d) = self.0.get_mut(n) else {
            return false;
        };
        let is_ahead = |new: bool, mean: &Mean, worst: u64| {
            new && worst > QUICK_NS && worst >= mean.ns.saturating_mul(SLOW)
        };
        if is_ahead(reads, &d.reads, worst.0) {
            d.ahead_at.0 = Some(now);
        }
        if is_ahead(writes, &d.writes, worst.1) {
            d.ahead_at.1 = Some(now);
        }
        let times = if d.slow { FAIR } else { SLOW };
        let is_bad = |new: bool, mean: &Mean, best: Option<u64>| {
            let bad = |best: u64| mean.ns > QUICK_NS && mean.ns >= best.saturating_mul(times);
            new && best.is_some_and(bad)
        };
        let by = (
            is_bad(reads, &d.reads, best.0),
            is_bad(writes, &d.writes, best.1),
        );
        let is_even = |at: Option<u64>| at.is_some_and(|at| now.saturating_sub(at) < EVEN_NS);
        // What one kind of operation says is no excuse for the other.
        let uneven = by.0 && !is_even(d.ahead_at.0) || by.1 && !is_even(d.ahead_at.1);
        let bad = by.0 || by.1;
        if reads || writes {
            d.bad = if bad { d.bad.saturating_add(1) } else { 0 };
        }
        if d.slow {
            // One of which nothing is heard may have recovered.
            if now < d.again_at || d.bad > 0 && d.reads.known(now).is_some() {
                return false;
            }
            (d.slow, d.bad) = (false, 0);
            d.again_at = now;
            return true;
        }
        if d.bad < BAD_MIN || now < d.trusted_to || !uneven {
            return false;
        }
        // It was tried, and is as slow as it was; or it has done well for long since.
        let lately = d.again_at > 0 && now.saturating_sub(d.again_at) < d.alone_ns;
        d.alone_ns = match lately {
            true => (d.alone_ns * 2).min(ALONE_MAX_NS),
            false => ALONE_NS,
        };
        (d.slow, d.bad, d.better) = (true, 0, 0);
        d.ahead_at = (None, None);
        let judged = |by: bool, mean: &Mean| if by { mean.ns } else { 0 };
        d.judged = (judged(by.0, &d.reads), judged(by.1, &d.writes));
        d.again_at = now + d.alone_ns;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    /// Two devices, and time.
    struct Bench {
        slow: Slow,
        answered: [Answered; 2],
        now: u64,
    }

    impl Bench {
        fn new() -> Bench {
            Bench {
                slow: Slow::new(2),
                answered: [Answered::default(); 2],
                now: MS,
            }
        }

        /// A tenth of a second in which each answers so many reads and writes in so many nanoseconds.
        fn round(&mut self, reads: [(u64, u64); 2], writes: [(u64, u64); 2]) -> bool {
            self.now += 100 * MS;
            for ((a, r), w) in self.answered.iter_mut().zip(reads).zip(writes) {
                a.reads += r.0;
                a.read_ns += r.0 * r.1;
                a.writes += w.0;
                a.write_ns += w.0 * w.1;
            }
            self.slow.look(self.now, &self.answered)
        }

        /// Rounds until something changes; how long that took.
        fn until_change(&mut self, reads: [(u64, u64); 2], writes: [(u64, u64); 2]) -> u64 {
            let begin = self.now;
            for _ in 0..100_000 {
                if self.round(reads, writes) {
                    return self.now - begin;
                }
            }
            panic!("nothing changes");
        }
    }

    #[test]
    fn ten_times_the_latency_is_slow_and_a_pause_is_not() {
        let mut bench = Bench::new();
        let (even, none) = ([(100, 100_000); 2], [(0, 0); 2]);
        for _ in 0..50 {
            assert!(!bench.round(even, even));
        }
        let slow = [(100, 100_000), (100, MS)];
        for _ in 0..BAD_MIN - 1 {
            assert!(!bench.round(slow, none));
        }
        assert!(!bench.round(even, none));
        assert_eq!(
            bench.until_change(slow, none),
            u64::from(BAD_MIN) * 100 * MS
        );
        assert!(bench.slow.is_slow(1) && !bench.slow.is_slow(0));
        // As long as it answers slowly it stays so.
        for _ in 0..1000 {
            assert!(!bench.round(slow, none));
        }
        assert!(bench.until_change(even, none) <= 100 * MS && !bench.slow.any());
    }

    #[test]
    fn one_that_only_writes_slowly_is_tried_again_and_later_each_time() {
        let mut bench = Bench::new();
        let (none, slow) = ([(0, 0); 2], [(50, 100_000), (50, 2 * MS)]);
        let alone = [(50, 100_000), (0, 0)];
        bench.until_change(none, slow);
        let mut last = 0;
        for _ in 0..8 {
            let waited = bench.until_change(none, alone);
            assert!(waited >= ALONE_NS && waited >= last && waited <= ALONE_MAX_NS + 100 * MS);
            last = waited;
            bench.until_change(none, slow);
            assert!(bench.slow.is_slow(1));
        }
        assert!(last > ALONE_MAX_NS / 2);
        // It does well for long: then it begins anew.
        bench.until_change(none, alone);
        for _ in 0..10_000 {
            assert!(!bench.round(none, [(50, 100_000); 2]));
        }
        bench.until_change(none, slow);
        assert!(bench.until_change(none, alone) <= ALONE_NS + 100 * MS);
    }

    #[test]
    fn one_that_was_only_loaded_gets_its_share_again_and_keeps_it_longer_each_time() {
        let mut bench = Bench::new();
        let none = [(0, 0); 2];
        let (queue_there, all_here) = ([(50, MS), (50, 20 * MS)], [(100, 12 * MS), (0, 0)]);
        let mut last = 0;
        for round in 0..8 {
            let trusted = bench.until_change(none, queue_there);
            assert!(bench.slow.is_slow(1), "round {round}");
            assert!(
                round == 0 || trusted >= TRUST_NS && trusted >= last,
                "{trusted}"
            );
            assert!(trusted <= TRUST_MAX_NS + SECOND);
            last = trusted;
            // The other needs as long for all of it. Nothing has been moved by then.
            assert!(!bench.round(none, [(100, MS), (0, 0)]));
            assert!(!bench.slow.is_surely_slow(1));
            assert!(bench.round(none, all_here), "it is left alone");
            assert!(!bench.slow.any());
        }
        assert!(last > TRUST_MAX_NS / 2);
        // One that is slow indeed is surely slow soon.
        let mut bench = Bench::new();
        bench.until_change(none, queue_there);
        for _ in 0..SURE_MIN {
            assert!(!bench.slow.is_surely_slow(1));
            assert!(!bench.round(none, [(100, 2 * MS), (0, 0)]));
        }
        assert!(bench.slow.is_surely_slow(1) && !bench.slow.is_surely_slow(0));
        // How it reads says nothing of one that was slow to write.
        assert!(!bench.round([(100, 19 * MS), (0, 0)], none));
        assert!(bench.slow.is_slow(1));
    }

    /// The other has the queue of reads, and writes fifty times as fast.
    #[test]
    fn that_another_reads_slowly_is_no_excuse_for_slow_writes() {
        let mut bench = Bench::new();
        let reads = [(100, 2 * MS), (100, 400_000)];
        let waited = bench.until_change(reads, [(100, 400_000), (100, 20 * MS)]);
        assert_eq!(waited, u64::from(BAD_MIN) * 100 * MS);
        assert!(bench.slow.is_slow(1) && !bench.slow.is_slow(0));
    }

    #[test]
    fn nothing_is_slow_alone_or_if_it_is_quick() {
        let mut bench = Bench::new();
        for _ in 0..100 {
            // One NVMe and one SATA drive.
            assert!(!bench.round([(100, 20_000), (100, 150_000)], [(0, 0); 2]));
        }
        assert_eq!(bench.slow.cost(0, bench.now), COST);
        assert_eq!(bench.slow.cost(1, bench.now), COST * 15 / 2);
        let mut bench = Bench::new();
        for _ in 0..100 {
            // Nobody to compare with, and too few to say anything.
            let few = [(100, 50 * MS), (0, 0)];
            assert!(!bench.round(few, [(0, 0); 2]));
        }
        assert_eq!(bench.slow.cost(0, bench.now), COST);
        assert!(!Slow::new(1).look(1, &[Answered::default()]));
    }

    #[test]
    fn three_times_the_latency_costs_three_times() {
        let mut bench = Bench::new();
        for _ in 0..100 {
            assert!(!bench.round([(100, 300_000), (100, 900_000)], [(0, 0); 2]));
        }
        assert_eq!(bench.slow.cost(1, bench.now), 3 * COST);
        assert_eq!(bench.slow.cost(0, bench.now), COST);
        // What is old says nothing.
        assert_eq!(bench.slow.cost(1, bench.now + GOOD_NS + 1), COST);
    }
}
