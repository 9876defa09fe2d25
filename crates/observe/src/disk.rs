//! One disk: what its requests are counted in, and the curve made of a sample of them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_engine::api::{DiskId, ReqOp, Request};
use hearth_io::BLOCK;
use hearth_policy::histogram::{Histograms, Outstanding};
use hearth_policy::mrc::{self, Mrc};
use hearth_reactor::Ended;

use crate::recording::{Recorder, RecordingStatus, Tape};

/// Sampled accesses that may wait for the keeper: 128 KiB. When they are used up, the disk is
/// sampled half as densely from then on, which halves them.
const WAITING_MAX: usize = 16_384;
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
    /// (blocks of 4 KiB, share of blocks read that an LRU cache of that size has), ascending.
    pub points: Vec<(f64, f64)>,
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
}

/// What data threads touch.
pub(crate) struct Front {
    histograms: Histograms,
    since_ns: u64,
    outstanding: Outstanding,
    /// Blocks placed below it are sampled.
    threshold: u32,
    waiting: Vec<u64>,
    /// Blocks read since the keeper last looked.
    reads: u64,
    tape: Option<Tape>,
}

/// What the keeper makes of it.
pub(crate) struct Back {
    mrc: Mrc,
    spare: Vec<u64>,
    first_ns: u64,
    /// Nanoseconds that count, as of `now_ns`.
    counted_ns: f64,
    now_ns: u64,
    halved_ns: u64,
}

/// A disk being watched.
pub(crate) struct Disk {
    pub id: DiskId,
    /// Blocks in its sample, at most.
    samples: usize,
    front: Mutex<Option<Box<Front>>>,
    back: Mutex<Option<Box<Back>>>,
    /// The recording under way or the last one.
    pub recorder: Mutex<Option<Recorder>>,
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
            threshold: mrc::ALL,
            waiting: Vec::new(),
            reads: 0,
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
            if mrc::place(block) < self.threshold {
                if self.waiting.len() == WAITING_MAX {
                    self.thin();
                }
                self.waiting.push(block | mark);
            }
        }
    }

    /// Samples half as densely. No access of a block that stays in the sample is lost.
    fn thin(&mut self) {
        while self.waiting.len() > WAITING_MAX / 2 && self.threshold > 1 {
            self.threshold /= 2;
            let threshold = self.threshold;
            self.waiting
                .retain(|block| mrc::place(block & !WRITTEN) < threshold);
        }
        // Only if one block is all there is.
        self.waiting.truncate(WAITING_MAX / 2);
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
            recorder: Mutex::new(None),
        }
    }

    /// Requests of this disk have arrived; true if the keeper should look.
    pub(crate) fn arrived(&self, requests: &[Request]) -> bool {
        let Some(first) = requests.first() else {
            return false;
        };
        let mut front = lock(&self.front);
        let front = front.get_or_insert_with(|| Box::new(Front::new(first.start_ns)));
        let before = front.waiting.len();
        let mut wake = false;
        for request in requests {
            front.arrived(request);
            if let Some(tape) = &mut front.tape {
                wake |= tape.push(request);
            }
        }
        wake || (before < WAITING_WAKE && front.waiting.len() >= WAITING_WAKE)
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
        let mut back = lock(&self.back);
        let (mut waiting, reads, threshold) = {
            let mut front = lock(&self.front);
            let Some(front) = front.as_mut() else {
                return;
            };
            let back = back.get_or_insert_with(|| {
                Box::new(Back {
                    mrc: Mrc::with_samples(self.samples),
                    spare: Vec::new(),
                    first_ns: front.since_ns,
                    counted_ns: 0.0,
                    now_ns: front.since_ns,
                    halved_ns: now_ns,
                })
            });
            let spare = std::mem::take(&mut back.spare);
            (
                std::mem::replace(&mut front.waiting, spare),
                std::mem::take(&mut front.reads),
                front.threshold,
            )
        };
        let Some(back) = back.as_mut() else {
            return;
        };
        back.mrc.lower_threshold(threshold);
        back.mrc.count(reads as f64);
        for access in waiting.drain(..) {
            back.mrc.sampled(access & !WRITTEN, access & WRITTEN == 0);
        }
        back.spare = waiting;
        back.counted_ns += now_ns.saturating_sub(back.now_ns.max(back.first_ns)) as f64;
        back.now_ns = now_ns;
        if now_ns.saturating_sub(back.halved_ns) >= HALF_LIFE_NS {
            back.halved_ns = now_ns;
            back.counted_ns /= 2.0;
            back.mrc.decay();
        }
        if back.mrc.threshold() < threshold
            && let Some(front) = &mut *lock(&self.front)
        {
            front.threshold = front.threshold.min(back.mrc.threshold());
        }
    }

    /// The curve as of now; `None` before the first request.
    pub(crate) fn curve(&self, now_ns: u64) -> Option<Curve> {
        self.digest(now_ns);
        let back = lock(&self.back);
        let back = back.as_ref()?;
        let seconds = back.counted_ns / 1e9;
        Some(Curve {
            points: back.mrc.points(),
            working_set: back.mrc.blocks(),
            accesses: back.mrc.accesses(),
            rate: if seconds > 0.0 {
                back.mrc.accesses() / seconds
            } else {
                0.0
            },
            seconds,
            sampled: back.mrc.rate(),
        })
    }

    /// Bytes it takes, roughly.
    pub(crate) fn footprint(&self) -> usize {
        let front = lock(&self.front)
            .as_ref()
            .map_or(0, |f| size_of::<Front>() + f.waiting.capacity() * 8);
        let back = lock(&self.back)
            .as_ref()
            .map_or(0, |b| b.mrc.footprint() + b.spare.capacity() * 8);
        front + back
    }

    /// Puts a tape in (or takes it out).
    pub(crate) fn swap_tape(&self, now_ns: u64, tape: Option<Tape>) -> Option<Tape> {
        let mut front = lock(&self.front);
        match (&mut *front, tape) {
            (Some(front), tape) => std::mem::replace(&mut front.tape, tape),
            (None, None) => None,
            (none, Some(tape)) => {
                let mut new = Front::new(now_ns);
                new.tape = Some(tape);
                *none = Some(Box::new(new));
                None
            }
        }
    }

    /// Acts on the tape, if there is one.
    pub(crate) fn with_tape<T>(&self, act: impl FnOnce(&mut Tape) -> T) -> Option<T> {
        lock(&self.front).as_mut()?.tape.as_mut().map(act)
    }

    /// The recording under way or the last one.
    pub(crate) fn recording(&self) -> Option<RecordingStatus> {
        let dropped = self.with_tape(|tape| tape.dropped()).unwrap_or(0);
        lock(&self.recorder).as_ref().map(|r| r.status(dropped))
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
        let at = |blocks| hearth_policy::advise::at(&curve.points, blocks);
        assert!(at(900.0) < 0.01 && at(1000.0) > 0.9, "{:?}", curve.points);
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
        let at = |blocks| hearth_policy::advise::at(&curve.points, blocks);
        assert!(at(7000.0) < 0.1 && at(13_000.0) > 0.9);
        assert!(disk.footprint() < 1 << 20, "{}", disk.footprint());
    }
}
