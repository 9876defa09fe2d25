//! Read hits without the engine's lock.
//!
//! Behind one lock a second core makes hits slower than one alone. So every data thread has a **lane**: the
//! hits it has in flight, the segments they read, its counts, and notes of what was used. A hit
//! looks its blocks up in the index ([`Lookup`]), pins what it found, reads, and answers, all under the
//! lock of its own lane, which nobody else wants but for moments. Whatever is no plain hit (a block
//! that is not on flash, or lost, or cannot be told; a disk that is off, leaving or fenced; flash that is
//! slow or failed) goes to the core as ever, and so does a hit whose read failed.
//!
//! A lane's lock is there for one rule, that of a **grace period**: whoever has changed something that
//! hits rely on takes each lane's lock once. Who looked before has said what it pins by then, and
//! who looks later sees the change. So a segment that is empty in the index, and that no lane then pins,
//! is read by nobody and may be written again ([`Shared::pinned`]); and when a disk is fenced,
//! no hit is answered any more after [`Shared::grace`].
//!
//! What the core has to learn of hits (their use for policy, streams, how fast flash is) is *folded*
//! into it some at a time (`core/fold.rs`): whenever the lane needs the core anyway, when enough
//! has gathered, and at every tick.
//!
//! Lock order: the core, then a lane. Whoever has a lane never waits for the core.

#[cfg(any(test, feature = "check"))]
mod check;
mod hit;
#[cfg(all(test, feature = "model"))]
mod model;
#[cfg(all(test, not(feature = "model")))]
mod tests;

use crate::api::DiskId;
use crate::cache::index::{Lookup, SlotNo};
use crate::stats::Latency;
use crate::sync::{Mutex, MutexGuard};
use hearth_io::{Spread, Target};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{OnceLock, PoisonError};

pub(crate) use hit::{After, Hit, Op, Run, Use};

/// Lanes there are: more than there are data threads, so that none shares one. Threads that do
/// are right, and slower.
pub(crate) const LANES: usize = 16;
/// Disks whose published states are allocated together.
const CHUNK: usize = 256;
const CHUNKS: usize = 1 << (16 - 8);
/// While flash takes longer than this for a read, the core decides about every hit: the origin may be
/// faster.
pub(crate) const SLOW_NS: u64 = 1_000_000;
/// While there is work in the background, hits let it go on this often.
const SETTLE_NS: u64 = 1_000_000;

/// On cache lines of its own; two, because processors fetch them in pairs.
#[repr(align(128))]
struct Apart<T>(T);

/// State of which each thread has its own, and all of which somebody wants now and then.
pub(crate) struct Rooms<T>(Box<[Apart<Mutex<T>>]>);

impl<T: Default> Rooms<T> {
    pub fn new(n: usize) -> Rooms<T> {
        let rooms = (0..n).map(|_| Apart(Mutex::new(T::default())));
        Rooms(rooms.collect())
    }

    /// The room of a thread.
    #[inline]
    pub fn enter(&self, n: usize) -> MutexGuard<'_, T> {
        let room = &self.0[n % self.0.len()].0;
        room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks into each: the grace period of the module's rule.
    pub fn each(&self, mut look: impl FnMut(&mut T)) {
        (0..self.0.len()).for_each(|n| look(&mut self.enter(n)));
    }
}

/// A disk as hits see it; one that is gone is like one that is off.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Bytes up to which hits may be served; 0: none.
    pub size: u64,
    /// Nothing may be answered.
    pub fenced: bool,
}

/// The same, for all threads.
#[derive(Default)]
struct Cell {
    /// Bytes up to which hits may be served; 0: none.
    size: AtomicU64,
    fenced: AtomicBool,
}

/// When a lane was last at work, for who does not want to take its lock.
#[derive(Default)]
struct Pulse {
    in_flight: AtomicU64,
    last_ns: AtomicU64,
}

/// What a lane counts of one disk.
#[derive(Default)]
pub(crate) struct Counts {
    in_flight: u64,
    pub hits: u64,
    pub hit_bytes: u64,
    pub read_ns: u64,
    pub errors: u64,
    pub latency: Latency,
    /// Something came since the core last looked for disks that are quiet.
    fresh: bool,
}

/// Reads of flash that are not folded yet.
#[derive(Default)]
pub(crate) struct Reads {
    /// Asked for.
    pub bytes: u64,
    /// Good ones, and their time.
    pub count: u64,
    pub ns: u64,
}

/// Good reads of one device since the start.
#[derive(Clone, Copy, Default)]
pub(crate) struct DeviceReads {
    pub count: u64,
    pub bytes: u64,
    pub ns: u64,
}

/// One thread's hits.
#[derive(Default)]
pub(crate) struct Lane {
    hits: slab::Slab<Hit>,
    ops: slab::Slab<Op>,
    /// Operations in flight by segment.
    pins: Vec<u32>,
    uses: Vec<Use>,
    counts: Vec<Option<Box<Counts>>>,
    /// Disks that have an entry in `counts`.
    counted: Vec<DiskId>,
    reads: Reads,
    /// The same since the start, by device.
    by_device: Vec<DeviceReads>,
    /// Hits that ended badly and wait for the core.
    trouble: Vec<usize>,
    /// Kept for their memory.
    runs: Vec<Run>,
    rest: Vec<crate::api::Request>,
    rest_done: Vec<hearth_io::IoDone>,
}

/// What data threads see without the core's lock.
pub(crate) struct Shared {
    lookup: Lookup,
    /// The device that hits are read from, or the first of several.
    flash: Target,
    /// Which of them a slot lies on.
    spread: Spread,
    segments: usize,
    segment_slots: u32,
    /// Where on it.
    layout: hearth_format::Layout,
    /// A fault: checksums are not looked at.
    unchecked: bool,
    /// There may be plain hits at all.
    open: Apart<AtomicBool>,
    /// Who ends a hit shall come to the core: it waits for pins.
    wanted: AtomicBool,
    /// From then on, too: there is work in the background. `u64::MAX`: none.
    settle_ns: Apart<AtomicU64>,
    /// A bit for each of the first devices: how fast it answers says nothing of flash.
    slow: AtomicU64,
    disks: Box<[OnceLock<Box<[Cell]>>]>,
    pulses: Box<[Apart<Pulse>]>,
    lanes: Rooms<Lane>,
}

impl Shared {
    pub fn new(
        lookup: Lookup,
        flash: Target,
        spread: Spread,
        layout: &hearth_format::Layout,
        faults: crate::faults::Faults,
    ) -> Shared {
        Shared {
            lookup,
            flash,
            spread,
            segments: layout.segment_count as usize,
            segment_slots: layout.segment_slots(),
            layout: *layout,
            unchecked: faults.has(crate::faults::Fault::SkipChecksum),
            open: Apart(AtomicBool::new(false)),
            wanted: AtomicBool::new(false),
            settle_ns: Apart(AtomicU64::new(u64::MAX)),
            slow: AtomicU64::new(0),
            disks: (0..CHUNKS).map(|_| OnceLock::new()).collect(),
            pulses: (0..LANES).map(|_| Apart(Pulse::default())).collect(),
            lanes: Rooms::new(LANES),
        }
    }

    fn cell(&self, disk: DiskId) -> Option<&Cell> {
        let chunk = self.disks[disk as usize / CHUNK].get()?;
        chunk.get(disk as usize % CHUNK)
    }

    /// Says what hits may know of a disk, from now on.
    pub fn publish(&self, id: DiskId, disk: Seen) {
        let Seen { size, fenced } = disk;
        let chunk = self.disks[id as usize / CHUNK]
            .get_or_init(|| (0..CHUNK).map(|_| Cell::default()).collect());
        let cell = &chunk[id as usize % CHUNK];
        cell.size.store(size, Release);
        cell.fenced.store(fenced, Release);
    }

    /// No new hits of a disk, until it is [`publish`](Self::publish)ed again. Returns how many are in
    /// flight.
    pub fn shut(&self, id: DiskId) -> u64 {
        if let Some(cell) = self.cell(id) {
            cell.size.store(0, Release);
        }
        self.in_flight(id)
    }

    /// Hits of a disk in flight.
    pub fn in_flight(&self, id: DiskId) -> u64 {
        let mut sum = 0;
        self.lanes.each(|lane| {
            let counts = lane.counts.get(id as usize);
            sum += counts.and_then(Option::as_ref).map_or(0, |c| c.in_flight);
        });
        sum
    }

    /// Hits in flight, of all disks.
    pub fn all_in_flight(&self) -> u64 {
        let mut sum = 0;
        self.lanes.each(|lane| sum += lane.hits.len() as u64);
        sum
    }

    /// Takes what a lane has noted: uses, into `uses`, which is empty and kept for its memory; how flash
    /// answered; and whether hits wait for the core.
    pub fn take_notes(&self, n: usize, uses: &mut Vec<Use>) -> (Reads, bool) {
        let mut lane = self.lanes.enter(n);
        std::mem::swap(&mut lane.uses, uses);
        (std::mem::take(&mut lane.reads), !lane.trouble.is_empty())
    }

    /// Good reads of each device, of all lanes, since the start.
    pub fn reads_by_device(&self) -> Vec<DeviceReads> {
        let mut sums = vec![DeviceReads::default(); self.spread.devices()];
        self.lanes.each(|lane| {
            for (sum, reads) in sums.iter_mut().zip(&lane.by_device) {
                sum.count += reads.count;
                sum.bytes += reads.bytes;
                sum.ns += reads.ns;
            }
        });
        sums
    }

    /// Takes only how flash answered.
    pub fn take_reads(&self, n: usize) -> Reads {
        std::mem::take(&mut self.lanes.enter(n).reads)
    }

    /// Takes a hit that ended badly out of a lane. What it read `pin` keeps from being overwritten instead.
    pub fn take_bad(&self, n: usize, mut pin: impl FnMut(SlotNo)) -> Option<Hit> {
        let mut lane = self.lanes.enter(n);
        let at = lane.trouble.pop()?;
        let hit = lane.hits.remove(at);
        lane.counts(hit.r.disk).in_flight -= 1;
        for (op, _) in &hit.bad {
            pin(op.slot);
            self.unpin(&mut lane, op.slot);
        }
        Some(hit)
    }

    /// Shows what lanes have counted of a disk.
    pub fn gather(&self, id: DiskId, mut add: impl FnMut(&mut Counts)) {
        self.lanes.each(|lane| {
            let counts = lane.counts.get_mut(id as usize);
            if let Some(counts) = counts.and_then(Option::as_mut) {
                add(counts);
            }
        });
    }

    /// Shows what lanes count of disks that have been quiet since the last call, and forgets it.
    pub fn sweep(&self, mut add: impl FnMut(DiskId, &mut Counts)) {
        self.lanes.each(|lane| {
            let (all, mut counted) = (&mut lane.counts, std::mem::take(&mut lane.counted));
            counted.retain(|id| {
                let Some(counts) = all.get_mut(*id as usize) else {
                    return false;
                };
                if let Some(c) = counts
                    && !std::mem::take(&mut c.fresh)
                    && c.in_flight == 0
                {
                    add(*id, c);
                    *counts = None;
                }
                counts.is_some()
            });
            lane.counted = counted;
        });
    }

    /// Waits until every hit that may not have seen an earlier change is done with what it looked at.
    pub fn grace(&self) {
        self.lanes.each(|_| {});
    }

    /// Is a segment, of which the index has nothing left, still being read? If so, who ends a hit comes to
    /// the core.
    pub fn pinned(&self, seg: u32) -> bool {
        // First, or the last one to unpin it could miss that.
        self.want(true);
        let mut pinned = false;
        self.lanes
            .each(|lane| pinned |= lane.pins.get(seg as usize).is_some_and(|pins| *pins > 0));
        self.want(pinned);
        pinned
    }

    /// Shall who ends a hit come to the core?
    pub fn want(&self, on: bool) {
        if self.wanted.load(Relaxed) != on {
            self.wanted.store(on, Release);
        }
    }

    /// True if hits may be answered without the core at all.
    pub fn open(&self, on: bool) {
        if self.open.0.load(Relaxed) != on {
            self.open.0.store(on, Release);
        }
    }

    /// Says which devices are left alone because they answer slowly.
    pub fn tell_slow(&self, is_slow: impl Fn(u16) -> bool) {
        let bits = (0..64).filter(|n| is_slow(*n)).map(|n| 1 << n);
        self.slow.store(bits.sum(), Relaxed);
    }

    /// Work in the background goes on with hits, too, or there is none.
    pub fn settle_later(&self, now: u64, work: bool) {
        let at = self.settle_ns.0.load(Relaxed);
        // Not at every event: every lane reads this.
        if !work && at != u64::MAX {
            self.settle_ns.0.store(u64::MAX, Relaxed);
        } else if work && (at == u64::MAX || at <= now) {
            self.settle_ns.0.store(now + SETTLE_NS, Relaxed);
        }
    }

    /// Hits in flight, roughly, and when the last one came.
    pub fn pulse(&self) -> (u64, u64) {
        let pulses = self.pulses.iter().map(|p| &p.0);
        pulses.fold((0, 0), |(sum, last), p| {
            let ns = p.last_ns.load(Relaxed);
            (sum + p.in_flight.load(Relaxed), last.max(ns))
        })
    }

    fn segment_of(&self, slot: SlotNo) -> usize {
        (slot / self.segment_slots) as usize
    }

    fn unpin(&self, lane: &mut Lane, slot: SlotNo) {
        if let Some(pins) = lane.pins.get_mut(self.segment_of(slot)) {
            *pins -= 1;
        }
    }
}
