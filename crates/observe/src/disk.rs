//! One disk: what its requests are counted in, and the curve made of a sample of them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_engine::api::{DiskId, ReqOp, Request};
use hearth_io::BLOCK;
use hearth_policy::histogram::{Histograms, Mix, Outstanding};
use hearth_policy::ladder::Ladder;
use hearth_policy::mrc::{self, Mrc, SAMPLES_MIN};
use hearth_reactor::Ended;

use crate::kept::{Kept, KeptError};
use crate::recording::{RecordingStatus, Tape};
use crate::scribe::Place;

/// Sampled accesses that may wait for the keeper: 128 KiB. When they are used up, the disk is
/// sampled half as densely from then on, which halves them; at the floor they are dropped.
const WAITING_MAX: usize = 16_384;
/// Fewest accesses there is room for at once: few disks have more between two looks.
const WAITING_MIN: usize = 512;
/// A disk the keeper has not looked at yet is sampled no thinner: nobody knows how much there is.
const FLOOR_FIRST: u32 = mrc::ALL / 16;
/// A sample that uses less than this part of its memory, though not all blocks are sampled, is
/// begun anew: it was thinned by a flood long gone, or by a scan whose blocks have aged.
const SAMPLE_WASTED: usize = 4;
/// The keeper is woken when this many wait.
pub(crate) const WAITING_WAKE: usize = 4096;
/// Marks a sampled block as written, not read. Blocks have numbers below 2^36.
const WRITTEN: u64 = 1 << 63;
/// Older accesses count half after so long: a curve should follow a working day.
const HALF_LIFE_NS: u64 = 3600 * 1_000_000_000;

/// Histograms of a disk, and how long they have been counted.
#[derive(Clone, Debug)]
pub struct Counted {
    /// The counts.
    pub histograms: Histograms,
    /// Seconds since the first request, or since they were reset.
    pub seconds: f64,
}

/// A disk's miss-ratio curve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// (blocks of 4 KiB, share of blocks read that a cache of that size by Hearth's rules has), ascending;
    /// LRU's unless `own`.
    pub points: Vec<(f64, f64)>,
    /// The same of an LRU cache.
    pub lru: Vec<(f64, f64)>,
    /// Enough was seen to tell the two apart.
    pub own: bool,
    /// (blocks of 4 KiB, blocks written to flash for each that the guest writes), ascending; empty while too
    /// little was written.
    pub flash_writes: Vec<(f64, f64)>,
    /// Different blocks seen, read or written: the working set.
    pub working_set: f64,
    /// Blocks read; older ones count less.
    pub accesses: f64,
    /// Blocks read per second, over the time that counts.
    pub rate: f64,
    /// Seconds that count.
    pub seconds: f64,
    /// Share of blocks in the sample.
    pub sampled: f64,
    /// Blocks in the sample.
    pub sample_blocks: f64,
    /// Reads of blocks in the sample, older ones counted less: what the curve rests on.
    pub sample_reads: f64,
}

impl Curve {
    /// Blocks read before a curve says anything.
    pub const READS_MIN: f64 = 2000.0;
    /// Reads of sampled blocks before it does: their share is then right within some five points.
    pub const SAMPLE_READS_MIN: f64 = 400.0;
    /// Blocks in the sample before it does, unless all blocks are in it.
    pub const SAMPLE_BLOCKS_MIN: f64 = 64.0;

    /// True if decisions may rest on it.
    pub fn is_enough(&self) -> bool {
        self.accesses >= Curve::READS_MIN
            && self.sample_reads >= Curve::SAMPLE_READS_MIN
            && (self.sampled >= 1.0 || self.sample_blocks >= Curve::SAMPLE_BLOCKS_MIN)
    }
}

/// What data threads touch.
pub(crate) struct Front {
    histograms: Histograms,
    since_ns: u64,
    outstanding: Outstanding,
    /// What kinds of requests; resets do not touch it, it is halved with the curve.
    mix: Mix,
    /// Blocks placed below it are sampled.
    threshold: u32,
    /// The threshold is not lowered beyond.
    floor: u32,
    waiting: Vec<u64>,
    /// Blocks read since the keeper last looked.
    reads: u64,
    /// Of these, sampled ones that were dropped.
    missed: u64,
    tape: Option<Tape>,
}

/// What the keeper makes of it.
pub(crate) struct Back {
    mrc: Mrc,
    ladder: Ladder,
    spare: Vec<u64>,
    first_ns: u64,
    /// Nanoseconds that count, as of `now_ns`.
    counted_ns: f64,
    now_ns: u64,
    halved_ns: u64,
    /// The curve before the sample was begun anew, until there is enough of the new one.
    before: Option<Curve>,
    /// Blocks read, and sampled ones written, since this was made.
    seen: u64,
}

/// A disk being watched.
pub(crate) struct Disk {
    pub id: DiskId,
    /// Blocks in its sample, at most.
    samples: usize,
    front: Mutex<Option<Box<Front>>>,
    back: Mutex<Option<Box<Back>>>,
    /// What kinds of requests there were before those of this front; taken by it.
    earlier: Mutex<Option<Box<Mix>>>,
    /// The recording under way or the last one. Never held across I/O.
    pub place: Mutex<Place>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Front {
    fn new(now_ns: u64) -> Front {
        Front {
            histograms: Histograms::new(),
            since_ns: now_ns,
            outstanding: Outstanding::default(),
            mix: Mix::default(),
            threshold: mrc::ALL,
            floor: FLOOR_FIRST,
            waiting: Vec::with_capacity(WAITING_MIN),
            reads: 0,
            missed: 0,
            tape: None,
        }
    }

    fn arrived(&mut self, request: &Request) {
        let write = match request.op {
            ReqOp::Read => false,
            ReqOp::Write { .. } => true,
            ReqOp::Flush | ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => return,
            // The client's hint, not its need.
            ReqOp::Prefetch => return,
        };
        if request.len == 0 {
            return;
        }
        self.histograms.request(
            request.start_ns / 1000,
            write,
            request.offset,
            request.len,
            self.outstanding,
        );
        self.mix.add(write, request.len);
        let first = request.offset / BLOCK;
        let last = request.offset.saturating_add(request.len - 1) / BLOCK;
        let mark = if write {
            self.outstanding.writes += 1;
            WRITTEN
        } else {
            self.outstanding.reads += 1;
            self.reads += last - first + 1;
            0
        };
        for block in first..=last {
            let place = mrc::place(block);
            if place < self.threshold {
                if self.waiting.len() >= WAITING_MAX {
                    self.thin();
                }
                if self.waiting.len() < WAITING_MAX {
                    self.waiting.push(block | mark);
                } else {
                    self.missed += u64::from(!write);
                }
            }
        }
    }

    /// Samples half as densely, but not below the floor. No access of a block that stays in the
    /// sample is lost.
    fn thin(&mut self) {
        while self.waiting.len() > WAITING_MAX / 2 && self.threshold / 2 >= self.floor.max(1) {
            self.threshold /= 2;
            let threshold = self.threshold;
            self.waiting
                .retain(|block| mrc::place(block & !WRITTEN) < threshold);
        }
    }

    fn ended(&mut self, ended: &Ended) {
        let (write, outstanding) = match ended.op {
            ReqOp::Read => (false, &mut self.outstanding.reads),
            ReqOp::Write { .. } => (true, &mut self.outstanding.writes),
            _ => return,
        };
        *outstanding = outstanding.saturating_sub(1);
        self.histograms
            .done(write, ended.end_ns.saturating_sub(ended.start_ns));
    }
}

impl Disk {
    pub(crate) fn new(id: DiskId, samples: usize) -> Disk {
        Disk {
            id,
            samples,
            front: Mutex::new(None),
            back: Mutex::new(None),
            earlier: Mutex::new(None),
            place: Mutex::default(),
        }
    }

    fn new_front(&self, now_ns: u64) -> Box<Front> {
        let mut front = Box::new(Front::new(now_ns));
        if let Some(mix) = lock(&self.earlier).take() {
            front.mix = *mix;
        }
        front
    }

    /// Requests of this disk have arrived; true if the keeper should look.
    pub(crate) fn arrived(&self, requests: &[Request]) -> bool {
        let Some(first) = requests.first() else {
            return false;
        };
        let mut guard = lock(&self.front);
        let front = guard.get_or_insert_with(|| self.new_front(first.start_ns));
        let before = front.waiting.len();
        let mut writer = None;
        for request in requests {
            front.arrived(request);
            if let Some(tape) = &mut front.tape
                && tape.push(request)
            {
                writer = Some(tape.writer());
            }
        }
        let wake = before < WAITING_WAKE && front.waiting.len() >= WAITING_WAKE;
        drop(guard);
        if let Some(writer) = writer {
            writer.unpark();
        }
        wake
    }

    /// Requests of this disk have ended.
    pub(crate) fn ended(&self, all: &[Ended]) {
        if let Some(front) = &mut *lock(&self.front) {
            all.iter().for_each(|e| front.ended(e));
        }
    }

    /// The histograms so far; with `reset` they begin anew. `None` before the first request.
    pub(crate) fn histograms(&self, now_ns: u64, reset: bool) -> Option<Counted> {
        let mut front = lock(&self.front);
        let front = front.as_mut()?;
        let seconds = now_ns.saturating_sub(front.since_ns) as f64 / 1e9;
        let histograms = if reset {
            front.since_ns = now_ns;
            std::mem::take(&mut front.histograms)
        } else {
            front.histograms.clone()
        };
        Some(Counted {
            histograms,
            seconds,
        })
    }

    /// Makes what waits part of the curve.
    pub(crate) fn digest(&self, now_ns: u64) {
        let Some(since_ns) = lock(&self.front).as_ref().map(|front| front.since_ns) else {
            return;
        };
        // Data threads wait for the front, so nothing is allocated or computed under its lock.
        let mut back = lock(&self.back);
        let back = back.get_or_insert_with(|| {
            Box::new(Back {
                mrc: Mrc::with_samples(self.samples),
                ladder: Ladder::new(self.samples),
                spare: Vec::with_capacity(WAITING_MIN),
                first_ns: since_ns,
                counted_ns: 0.0,
                now_ns: since_ns,
                halved_ns: now_ns,
                before: None,
                seen: 0,
            })
        });
        let mut spare = std::mem::take(&mut back.spare);
        let (mut waiting, reads, missed, threshold) = {
            let mut front = lock(&self.front);
            let Some(front) = front.as_mut() else {
                return;
            };
            std::mem::swap(&mut front.waiting, &mut spare);
            (
                spare,
                std::mem::take(&mut front.reads),
                std::mem::take(&mut front.missed),
                front.threshold,
            )
        };
        back.mrc.lower_threshold(threshold);
        back.mrc.count(reads as f64);
        back.mrc.missed(missed as f64);
        let came = waiting.len();
        back.seen += reads + came as u64;
        for access in waiting.drain(..) {
            let (block, write) = (access & !WRITTEN, access & WRITTEN != 0);
            let distance = back.mrc.sampled(block, !write);
            back.ladder.sampled(&back.mrc, block, write, distance);
        }
        // As many may come again, or the data thread would have to make room.
        waiting.reserve_exact((came * 2).clamp(WAITING_MIN, WAITING_MAX));
        back.spare = waiting;
        back.counted_ns += now_ns.saturating_sub(back.now_ns.max(back.first_ns)) as f64;
        back.now_ns = now_ns;
        let halve = now_ns.saturating_sub(back.halved_ns) >= HALF_LIFE_NS;
        let mut anew = false;
        if halve {
            back.halved_ns = now_ns;
            back.counted_ns /= 2.0;
            back.mrc.decay();
            back.ladder.decay();
            anew = back.mrc.threshold() < mrc::ALL
                && back.mrc.sample_blocks() < self.samples / SAMPLE_WASTED;
            back.before = anew.then(|| back.curve()).filter(Curve::is_enough);
            if anew {
                back.mrc = Mrc::with_samples(self.samples);
                back.ladder = Ladder::new(self.samples);
                back.counted_ns = 0.0;
            }
        }
        if let Some(front) = &mut *lock(&self.front) {
            if halve {
                front.mix.halve();
            }
            if anew {
                // What came meanwhile was sampled as before.
                front.waiting.clear();
                (front.reads, front.missed) = (0, 0);
                front.threshold = mrc::ALL;
            }
            front.threshold = front.threshold.min(back.mrc.threshold());
            front.floor = back.floor();
        }
    }

    /// The curve as of now; `None` before the first request.
    pub(crate) fn curve(&self, now_ns: u64) -> Option<Curve> {
        self.digest(now_ns);
        let mut back = lock(&self.back);
        let back = back.as_mut()?;
        let curve = back.curve();
        if curve.is_enough() {
            back.before = None;
        }
        Some(back.before.clone().unwrap_or(curve))
    }

    /// What kinds of requests there were, older ones counted less; `None` before the first.
    pub(crate) fn mix(&self) -> Option<Mix> {
        let front = lock(&self.front);
        match &*front {
            Some(front) => Some(front.mix.clone()),
            None => lock(&self.earlier).as_deref().cloned(),
        }
    }

    /// What is to be kept for [`recall`](Self::recall), and how much was seen for it; `None` if that is `than`.
    pub(crate) fn keep(&self, now_ns: u64, than: u64) -> Option<(u64, Kept)> {
        self.digest(now_ns);
        let mix = self.mix().unwrap_or_default();
        let back = lock(&self.back);
        let back = back.as_ref()?;
        // A sample just begun anew says less than the one that was kept before.
        if back.seen == than || (back.before.is_some() && !back.curve().is_enough()) {
            return None;
        }
        let kept = Kept {
            counted_ns: back.counted_ns as u64,
            since_halved_ns: back.now_ns.saturating_sub(back.halved_ns),
            mrc: back.mrc.kept(),
            ladder: back.ladder.kept(),
            mix,
        };
        Some((back.seen, kept))
    }

    /// Goes on with what was kept. What has come meanwhile is let go, unless it is more.
    pub(crate) fn recall(&self, now_ns: u64, kept: Kept) -> Result<(), KeptError> {
        let mrc = Mrc::of_kept(&kept.mrc, self.samples).ok_or(KeptError::Damaged)?;
        let ladder = Ladder::of_kept(&kept.ladder, self.samples).ok_or(KeptError::Damaged)?;
        let mut back = lock(&self.back);
        if (back.as_ref()).is_some_and(|now| now.mrc.accesses() >= mrc.accesses()) {
            return Ok(());
        }
        let mut front = lock(&self.front);
        match &mut *front {
            Some(front) => front.mix = kept.mix,
            None => *lock(&self.earlier) = Some(Box::new(kept.mix)),
        }
        drop(front);
        *back = Some(Box::new(Back {
            mrc,
            ladder,
            spare: Vec::with_capacity(WAITING_MIN),
            first_ns: now_ns,
            counted_ns: kept.counted_ns as f64,
            now_ns,
            halved_ns: now_ns.saturating_sub(kept.since_halved_ns),
            before: None,
            seen: 0,
        }));
        Ok(())
    }

    /// Bytes it takes, roughly.
    pub(crate) fn footprint(&self) -> usize {
        let front = lock(&self.front)
            .as_ref()
            .map_or(0, |f| size_of::<Front>() + f.waiting.capacity() * 8);
        let back = lock(&self.back).as_ref().map_or(0, |b| {
            b.mrc.footprint() + b.ladder.footprint() + b.spare.capacity() * 8
        });
        front + back
    }

    /// Puts a tape in (or takes it out).
    pub(crate) fn swap_tape(&self, now_ns: u64, tape: Option<Tape>) -> Option<Tape> {
        let mut front = lock(&self.front);
        match (&mut *front, tape) {
            (Some(front), tape) => std::mem::replace(&mut front.tape, tape),
            (None, None) => None,
            (none, Some(tape)) => {
                let mut new = self.new_front(now_ns);
                new.tape = Some(tape);
                *none = Some(new);
                None
            }
        }
    }

    /// Acts on the tape, if there is one.
    pub(crate) fn with_tape<T>(&self, act: impl FnOnce(&mut Tape) -> T) -> Option<T> {
        lock(&self.front).as_mut()?.tape.as_mut().map(act)
    }

    /// The recording under way or the last one. Waits for no file.
    pub(crate) fn recording(&self) -> Option<RecordingStatus> {
        let mut status = lock(&self.place).current.as_ref()?.status();
        status.dropped += self.with_tape(|tape| tape.dropped()).unwrap_or(0);
        Some(status)
    }
}

impl Back {
    fn curve(&self) -> Curve {
        let seconds = self.counted_ns / 1e9;
        let lru = self.mrc.points();
        let own = self.ladder.corrected(&lru);
        Curve {
            own: own.is_some(),
            points: own.unwrap_or_else(|| lru.clone()),
            lru,
            flash_writes: self.ladder.flash_writes(),
            working_set: self.mrc.blocks(),
            accesses: self.mrc.accesses(),
            rate: if seconds > 0.0 {
                self.mrc.accesses() / seconds
            } else {
                0.0
            },
            seconds,
            sampled: self.mrc.rate(),
            sample_blocks: self.mrc.sample_blocks() as f64,
            sample_reads: self.mrc.taken(),
        }
    }

    /// The lowest threshold that leaves a sample worth having.
    fn floor(&self) -> u32 {
        let threshold = u64::from(self.mrc.threshold());
        let blocks = self.mrc.sample_blocks().max(SAMPLES_MIN) as u64;
        (threshold * SAMPLES_MIN as u64 / blocks) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(offset: u64, len: u64, now_ns: u64) -> Request {
        Request::new(0, 1, ReqOp::Read, offset, len, None, now_ns)
    }

    fn ended(start_ns: u64, end_ns: u64) -> Ended {
        Ended {
            disk: 1,
            op: ReqOp::Read,
            start_ns,
            end_ns,
        }
    }

    #[test]
    fn nothing_is_known_of_an_idle_disk() {
        let disk = Disk::new(1, 4096);
        disk.digest(5);
        assert!(disk.histograms(9, true).is_none() && disk.curve(9).is_none());
        assert_eq!(disk.footprint(), 0);
    }

    #[test]
    fn requests_are_counted_and_a_reset_begins_anew() {
        let disk = Disk::new(1, 4096);
        disk.arrived(&[read(0, 4096, 1000), read(4096, 4096, 1000)]);
        disk.ended(&[ended(1000, 251_000)]);
        let counted = disk.histograms(2_000_001_000, true).expect("counted");
        assert_eq!(counted.seconds, 2.0);
        assert_eq!(counted.histograms.length.reads.count(), 2);
        assert_eq!(counted.histograms.latency.reads.mean(), 250);
        assert_eq!(counted.histograms.outstanding.reads.max(), 1);
        // One is still under way: the next one sees it.
        disk.arrived(&[read(0, 512, 3000)]);
        let counted = disk.histograms(2_000_001_000, false).expect("counted");
        assert_eq!(counted.histograms.length.all.count(), 1);
        assert_eq!(counted.histograms.outstanding.all.max(), 1);
        disk.ended(&[ended(0, 1), ended(0, 1), ended(0, 1)]);
    }

    #[test]
    fn the_curve_is_that_of_the_reads() {
        let disk = Disk::new(1, 4096);
        let mut now = 0;
        for round in 0..20u64 {
            for block in 0..1000 {
                now = (round * 1000 + block) * 1_000_000;
                disk.arrived(&[read(block * 4096, 4096, now)]);
            }
            disk.digest(now);
        }
        let curve = disk.curve(now).expect("a curve");
        assert_eq!(curve.working_set, 1000.0);
        assert_eq!(curve.accesses, 20_000.0);
        assert!((curve.rate - 1000.0).abs() < 1.0, "{}", curve.rate);
        let at = |blocks| hearth_policy::advise::at(&curve.lru, blocks);
        assert!(at(900.0) < 0.01 && at(1000.0) > 0.9, "{:?}", curve.lru);
        // Of a loop Hearth keeps what fits.
        let own = |blocks| hearth_policy::advise::at(&curve.points, blocks);
        assert!(curve.own && own(768.0) > 0.5, "{:?}", curve.points);
        assert!(curve.flash_writes.is_empty(), "nothing was written");
    }

    #[test]
    fn the_next_one_goes_on_with_what_was_kept() {
        let blocks = 1000u64;
        let disk = Disk::new(1, 4096);
        let load = |disk: &Disk, rounds: std::ops::Range<u64>| {
            for i in rounds {
                let now = i * 1_000_000;
                let block = i * i % blocks;
                disk.arrived(&[read(block * 4096, 4096, now)]);
                if i % 1000 == 999 {
                    disk.digest(now);
                }
            }
        };
        load(&disk, 0..40_000);
        let now = 40_000 * 1_000_000;
        let before = disk.curve(now).expect("a curve");
        let (seen, kept) = disk.keep(now, 0).expect("there is something");
        assert!(disk.keep(now, seen).is_none(), "nothing is new");
        let next = Disk::new(1, 4096);
        next.recall(now, kept.clone()).expect("it is right");
        assert!(next.histograms(now, false).is_none(), "nothing was asked");
        let close = |a: &Curve, b: &Curve, within: f64| {
            let points = a.points.iter().zip(&b.points);
            assert!(points.into_iter().all(|(a, b)| (a.1 - b.1).abs() <= within));
            assert_eq!(
                (a.working_set, a.accesses, a.own),
                (b.working_set, b.accesses, b.own)
            );
        };
        let after = next.curve(now).expect("a curve");
        close(&before, &after, 1e-4);
        assert_eq!((after.seconds, after.rate), (before.seconds, before.rate));
        assert_eq!(next.mix(), disk.mix());
        assert!(next.keep(now, 0).is_none(), "nothing is new");
        // Both go on.
        load(&disk, 40_000..60_000);
        load(&next, 40_000..60_000);
        let now = 60_000 * 1_000_000;
        assert_eq!(next.mix(), disk.mix());
        close(
            &disk.curve(now).expect("a curve"),
            &next.curve(now).expect("a curve"),
            0.05,
        );
        // What is newer and more stays.
        let accesses = next.curve(now).expect("a curve").accesses;
        next.recall(now, kept).expect("it is right");
        assert_eq!(next.curve(now).expect("a curve").accesses, accesses);
    }

    #[test]
    fn what_overwrites_cost_is_told() {
        let disk = Disk::new(1, 4096);
        let write = |block: u64| {
            let op = ReqOp::Write { fua: false };
            Request::new(0, 1, op, block * 4096, 4096, None, 7)
        };
        for i in 0..40_000u64 {
            disk.arrived(&[write(i * 37 % 2000), read(i * 91 % 2000 * 4096, 4096, 7)]);
            if i % 1000 == 0 {
                disk.digest(8);
            }
        }
        let curve = disk.curve(9).expect("a curve");
        let costs = &curve.flash_writes;
        assert!(
            !costs.is_empty() && costs.iter().all(|c| c.1 >= 1.0),
            "{costs:?}"
        );
        // Short of all blocks, what misses bring is written, too. The more is kept, the more of that.
        let most = costs.iter().map(|c| c.1).fold(0.0, f64::max);
        assert!(most > 1.5 && costs[0].1 < 1.5, "{costs:?}");
    }

    #[test]
    fn a_flood_is_sampled_less_and_still_right() {
        let disk = Disk::new(1, 12_288);
        // Never digested in between: the buffer fills many times over.
        for _ in 0..40u64 {
            for block in (0..10_000u64).step_by(8) {
                disk.arrived(&[read(block * 4096, 8 * 4096, 7)]);
            }
        }
        let curve = disk.curve(1_000_000_007).expect("a curve");
        assert_eq!(curve.accesses, 400_000.0);
        assert!(curve.sampled < 0.1, "{}", curve.sampled);
        assert!((curve.working_set / 10_000.0 - 1.0).abs() < 0.2);
        let at = |blocks| hearth_policy::advise::at(&curve.lru, blocks);
        assert!(at(7000.0) < 0.1 && at(13_000.0) > 0.9);
        assert!(disk.footprint() < 1 << 20, "{}", disk.footprint());
    }

    #[test]
    fn a_stalled_keeper_does_not_ruin_the_curve() {
        let disk = Disk::new(1, 12_288);
        let flood = |now| {
            for _ in 0..400u64 {
                for block in (0..4000u64).step_by(8) {
                    disk.arrived(&[read(block * 4096, 8 * 4096, now)]);
                }
            }
        };
        flood(7);
        disk.digest(8);
        // Each of these would halve a threshold without a floor several times.
        for round in 0..20 {
            flood(9 + round);
            disk.digest(10 + round);
        }
        let curve = disk.curve(1_000_000_007).expect("a curve");
        assert!(curve.sample_blocks > 100.0, "{curve:?}");
        assert!((curve.working_set / 4000.0 - 1.0).abs() < 0.2);
        assert_eq!(curve.accesses, 21.0 * 400.0 * 4000.0);
        let at = |blocks| hearth_policy::advise::at(&curve.lru, blocks);
        assert!(at(2500.0) < 0.1 && at(5500.0) > 0.9);

        // What was dropped is not held against it for ever: the sample begins anew, and the old
        // curve is shown until there is a new one.
        let hour = HALF_LIFE_NS + 1_000_000_100;
        let shown = disk.curve(hour).expect("a curve");
        assert!(shown.is_enough() && shown.sampled < 1.0);
        for round in 0..3 {
            for block in 0..4000 {
                disk.arrived(&[read(block * 4096, 4096, hour + 1)]);
            }
            disk.digest(hour + 2 + round);
        }
        let curve = disk.curve(hour + 9).expect("a curve");
        assert_eq!((curve.sampled, curve.working_set), (1.0, 4000.0));
    }

    #[test]
    fn a_reset_of_the_histograms_leaves_the_mix() {
        let disk = Disk::new(1, 4096);
        disk.arrived(&[read(0, 4096, 1000), read(0, 8192, 1000)]);
        disk.digest(2000);
        disk.histograms(2000, true);
        let mix = disk.mix().expect("counted");
        assert_eq!((mix.reads, mix.writes, mix.read_octaves[13]), (2, 0, 1));
        disk.digest(2000 + HALF_LIFE_NS);
        assert_eq!(disk.mix().map(|m| m.count()), Some(1));
    }
}
