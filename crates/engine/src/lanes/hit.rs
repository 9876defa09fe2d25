//! A hit from request to answer, within one lane.

use super::{Counts, DeviceReads, LANES, Lane, SLOW_NS, Shared};
use crate::api::{Completion, DiskId, Effects, ReqError, ReqOp, Request};
use crate::cache::index::{FREQ_MAX, Key, SlotNo};
use hearth_io::{BLOCK, Class, IoDone, IoOp, OpKind, Target};
use smallvec::{SmallVec, smallvec};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Longest request served here, blocks: what one operation reads. Longer ones are no hotter for it.
const BLOCKS_MAX: u64 = 256;
/// Operations of a request served here; one that is scattered more goes to the core.
const RUNS_MAX: usize = 8;
/// After so many further notes of uses a lane tries whether the core is free.
const USES_FOLD: usize = 128;
/// Most notes kept. Further uses are not told to policy: it goes by samples anyway, and no hit waits.
const USES_MAX: usize = 1024;

/// Marks operations of lanes; the core counts its own from 0.
const OF_LANE: u64 = 1 << 63;
const LANE_SHIFT: u32 = 48;

/// A read in flight.
pub(crate) struct Hit {
    pub r: Request,
    pub pending: u32,
    /// Reads that failed, or whose checksum did not match: the core's to judge.
    pub bad: Vec<(Op, IoDone)>,
}

/// One operation of it.
#[derive(Clone, Copy)]
pub(crate) struct Op {
    pub hit: usize,
    pub block: u64,
    pub slot: SlotNo,
}

/// Blocks of a request that lie together on flash.
pub(crate) struct Run {
    block: u64,
    slot: SlotNo,
    crcs: SmallVec<[u32; 4]>,
    touch: bool,
}

/// Blocks that were used.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    pub disk: DiskId,
    pub block: u64,
    pub slot: SlotNo,
    pub count: u32,
    /// Their use counters are not at their end yet.
    pub touch: bool,
    /// Bytes of the request, if these are its first blocks: where, and how many.
    pub request: Option<(u64, u32)>,
}

/// What a thread has to do for the core after it was in its lane.
#[derive(Clone, Copy, Default)]
pub(crate) struct After {
    /// There is something only the core can do.
    pub must: bool,
    /// Work in the background is due.
    pub settle: bool,
    /// Enough has gathered to be folded.
    pub fold: bool,
}

fn lane_of(op: u64) -> Option<usize> {
    (op & OF_LANE != 0).then_some((op & !OF_LANE) as usize >> LANE_SHIFT)
}

impl Shared {
    /// The lane of the thread that sends these requests.
    pub fn lane(reqs: &[Request]) -> usize {
        reqs.first().map_or(0, |r| r.owner as usize % LANES)
    }

    /// Starts those of the requests that are plain hits; leaves the others.
    pub fn take(&self, n: usize, now: u64, reqs: &mut Vec<Request>, fx: &mut Effects) -> After {
        if reqs.iter().all(|r| r.op != ReqOp::Read) {
            return After::default();
        }
        let mut lane = self.lanes.enter(n);
        let lane = &mut *lane;
        // Here, like all that hits rely on: who closes it and then looks into the lanes finds all there are.
        if !self.open.0.load(Acquire) {
            return After::default();
        }
        let mut rest = std::mem::take(&mut lane.rest);
        let before = lane.uses.len();
        if reqs.len() > 1 {
            let plain = reqs.iter().filter(|r| self.is_plain(r));
            plain.for_each(|r| self.lookup.prefetch(Key::new(r.disk, r.offset / BLOCK)));
        }
        for r in reqs.drain(..) {
            if !self.is_plain(&r) || !self.plan(lane, &r) {
                rest.push(r);
                continue;
            }
            self.start(n, lane, r, fx);
        }
        std::mem::swap(reqs, &mut rest);
        lane.rest = rest;
        self.beat(n, lane, now);
        let uses = lane.uses.len();
        let mut after = self.after(lane, now);
        // Not at every batch: that the core is not free is a cache line that goes from core to core, too.
        after.fold = uses / USES_FOLD > before / USES_FOLD || uses >= USES_MAX;
        after
    }

    /// A read of a disk that serves hits, within its bounds.
    fn is_plain(&self, r: &Request) -> bool {
        let size = || self.cell(r.disk).map_or(0, |c| c.size.load(Acquire));
        r.op == ReqOp::Read
            && (1..=BLOCKS_MAX * BLOCK).contains(&r.len)
            && r.offset.checked_add(r.len).is_some_and(|end| end <= size())
            && r.buf
                .as_ref()
                .is_some_and(|b| b.len() as u64 == Request::buffer_len(r.offset, r.len))
    }

    /// Finds all blocks of a request; false if one is not plainly on flash.
    fn plan(&self, lane: &mut Lane, r: &Request) -> bool {
        lane.runs.clear();
        let end = (r.offset + r.len).div_ceil(BLOCK);
        let mut block = r.offset / BLOCK;
        while block < end {
            let found = self.lookup.get(Key::new(r.disk, block));
            let Some(first) = found.filter(|f| !f.lost) else {
                return false;
            };
            if lane.runs.len() == RUNS_MAX {
                return false;
            }
            let mut run = Run {
                block,
                slot: first.slot,
                crcs: smallvec![first.crc],
                touch: first.freq < FREQ_MAX,
            };
            block += 1;
            while block < end {
                let next = first.slot + run.crcs.len() as u32;
                let found = self.lookup.holds(next, Key::new(r.disk, block));
                let Some(next) = found.filter(|f| f.dirty == first.dirty && !f.lost) else {
                    break;
                };
                run.crcs.push(next.crc);
                run.touch |= next.freq < FREQ_MAX;
                block += 1;
            }
            lane.runs.push(run);
        }
        true
    }

    /// Sends what [`plan`](Self::plan) found.
    fn start(&self, n: usize, lane: &mut Lane, r: Request, fx: &mut Effects) {
        let buf = r.buf.clone().expect("a plain read has a buffer");
        let (disk, base, bytes) = (r.disk, r.offset / BLOCK, (r.offset, r.len as u32));
        if lane.pins.is_empty() {
            lane.pins = vec![0; self.segments];
            lane.by_device = vec![DeviceReads::default(); self.spread.devices()];
        }
        let mut runs = std::mem::take(&mut lane.runs);
        let hit = lane.hits.insert(Hit {
            r,
            pending: runs.len() as u32,
            bad: Vec::new(),
        });
        let mut blocks = 0;
        for (i, run) in runs.drain(..).enumerate() {
            let count = run.crcs.len() as u64;
            blocks += count;
            lane.pins[self.segment_of(run.slot)] += 1;
            if lane.uses.len() < USES_MAX {
                lane.uses.push(Use {
                    disk,
                    block: run.block,
                    slot: run.slot,
                    count: count as u32,
                    touch: run.touch,
                    request: (i == 0).then_some(bytes),
                });
            }
            let op = lane.ops.insert(Op {
                hit,
                block: run.block,
                slot: run.slot,
            });
            let at = ((run.block - base) * BLOCK) as usize;
            let offset = self.layout.slot_offset(run.slot);
            let (target, offset) = match self.spread.read_place(offset) {
                (0, offset) => (self.flash, offset),
                (device, offset) => (Target::Flash(device), offset),
            };
            fx.ios.push(IoOp {
                id: OF_LANE | (n as u64) << LANE_SHIFT | op as u64,
                target,
                kind: OpKind::Read,
                offset,
                len: count * BLOCK,
                bufs: smallvec![buf.sub(at, (count * BLOCK) as usize)],
                crcs: run.crcs,
                sums: false,
                class: Class::Foreground,
            });
        }
        lane.runs = runs;
        lane.reads.bytes += blocks * BLOCK;
        let counts = lane.counts(disk);
        counts.in_flight += 1;
        counts.hit_bytes += blocks * BLOCK;
    }

    /// Takes operations of lanes that ended; leaves the others. Says which lane wants what.
    pub fn done(
        &self,
        now: u64,
        dones: &mut Vec<IoDone>,
        fx: &mut Effects,
    ) -> (Option<usize>, After) {
        let mut last = (None, After::default());
        // One by one: it is always one, unless threads hand each other what ended.
        while let Some(n) = dones.iter().find_map(|d| lane_of(d.op.id)) {
            let mut lane = self.lanes.enter(n);
            let lane = &mut *lane;
            let mut rest = std::mem::take(&mut lane.rest_done);
            let mut slow = false;
            for done in dones.drain(..) {
                if lane_of(done.op.id) != Some(n) {
                    rest.push(done);
                    continue;
                }
                slow |= done.latency_ns > SLOW_NS && self.slow.load(Relaxed) == 0;
                self.op_done(lane, done, now, fx);
            }
            std::mem::swap(dones, &mut rest);
            lane.rest_done = rest;
            self.beat(n, lane, now);
            let mut after = self.after(lane, now);
            after.must |= slow || last.1.must || self.wanted.load(Acquire);
            after.settle |= last.1.settle;
            last = (Some(n), after);
        }
        last
    }

    fn op_done(&self, lane: &mut Lane, done: IoDone, now: u64, fx: &mut Effects) {
        let at = (done.op.id & ((1 << LANE_SHIFT) - 1)) as usize;
        let Some(op) = lane.ops.try_remove(at) else {
            return;
        };
        let Some(hit) = lane.hits.get_mut(op.hit) else {
            return;
        };
        hit.pending -= 1;
        let over = hit.pending == 0;
        if done.result.is_ok() && (done.bad_blocks.is_empty() || self.unchecked) {
            let device = lane.note_device(&done);
            if self
                .slow
                .load(Relaxed)
                .checked_shr(device as u32)
                .unwrap_or(0)
                & 1
                == 0
            {
                lane.reads.count += 1;
                lane.reads.ns += done.latency_ns;
            }
            self.unpin(lane, op.slot);
        } else {
            // It stays pinned until the core has it.
            hit.bad.push((op, done));
        }
        if !over {
            return;
        }
        if !lane.hits[op.hit].bad.is_empty() {
            lane.trouble.push(op.hit);
            return;
        }
        let r = lane.hits.remove(op.hit).r;
        let fenced = self.cell(r.disk).is_none_or(|c| c.fenced.load(Acquire));
        let counts = lane.counts(r.disk);
        counts.in_flight -= 1;
        // What is answered now, whoever goes on with the origin does not have.
        let result = if fenced {
            counts.errors += 1;
            Err(ReqError::Io)
        } else {
            let ns = now.saturating_sub(r.start_ns);
            counts.hits += 1;
            counts.read_ns += ns;
            counts.latency.record(ns);
            Ok(())
        };
        fx.completions.push(Completion {
            owner: r.owner,
            tag: r.tag,
            result,
            buf: r.buf,
        });
    }

    fn beat(&self, n: usize, lane: &Lane, now: u64) {
        let pulse = &self.pulses[n % LANES].0;
        pulse.in_flight.store(lane.hits.len() as u64, Relaxed);
        pulse.last_ns.store(now, Relaxed);
    }

    fn after(&self, lane: &Lane, now: u64) -> After {
        After {
            must: !lane.trouble.is_empty(),
            settle: self.settle_ns.0.load(Relaxed) <= now,
            fold: false,
        }
    }
}

impl Lane {
    #[inline]
    fn note_device(&mut self, done: &IoDone) -> usize {
        let device = match (done.op.target, self.by_device.len()) {
            (Target::Flash(device), 2..) => usize::from(device),
            _ => 0,
        };
        if let Some(reads) = self.by_device.get_mut(device) {
            reads.count += 1;
            reads.bytes += done.op.len;
            reads.ns += done.latency_ns;
        }
        device
    }

    #[inline]
    pub(super) fn counts(&mut self, disk: DiskId) -> &mut Counts {
        let at = disk as usize;
        if self.counts.len() <= at {
            self.counts.resize_with(at + 1, || None);
        }
        let counts = self.counts[at].get_or_insert_with(|| {
            self.counted.push(disk);
            Box::default()
        });
        counts.fresh = true;
        counts
    }
}
