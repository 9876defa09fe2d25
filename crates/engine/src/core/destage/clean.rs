//! What the origin has taken becomes clean once a flush covered it; and who may not wait for that.

use crate::api::{DiskId, Effects};
use crate::blocks::runset::RunSet;
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::core::apply::Then;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::origin::job::NOWHERE;
use crate::origin::pace::Need;
use crate::origin::progress::{HANGS_NS, Written};
use crate::origin::sync::SyncWaiter;
use crate::paths::{Path, took};
use hearth_format::Kind;
use smallvec::SmallVec;

impl Core {
    /// Is it well if what was written to the origin waits for more before it is flushed?
    pub(super) fn may_gather(&self, disk: DiskId, now: u64) -> bool {
        let in_service = |d: &Disk| d.may_destage(now) && !self.quiescing;
        // Whoever asked for all of it waits for the last flush, and for no other.
        let last = |d: &Disk| !self.could_destage(d, now);
        self.paced(now)
            && self.disk(disk).is_some_and(|d| {
                let need = self.need(disk, now);
                in_service(d) && (need < Need::Asked || need == Need::Asked && !last(d))
            })
    }

    /// Flushes the origin when enough was written, or nothing more is coming.
    pub(super) fn destage_flush_if_due(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let may_gather = self.may_gather(disk, now);
        let d = self.known_mut(disk);
        // What comes next in order waits for this flush.
        let in_order = d.order.as_deref().is_some_and(|o| o.awaits_flush());
        let awaited = !d.clean_waiters.is_empty() || in_order;
        if !d.origin.destage.cover(awaited, may_gather, now) {
            if let Some(until) = d.origin.destage.gathers_until() {
                self.ready.timers.insert((until, disk));
                self.ready.gathering.add(disk);
            }
            return;
        }
        let target = d.origin.sync.completed();
        self.ready.given.add(disk);
        self.wait_origin(disk, target, SyncWaiter::Destage, now, fx);
    }

    pub fn destage_flushed(&mut self, disk: DiskId, failed: bool, now: u64, fx: &mut Effects) {
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        let n = std::mem::take(&mut d.origin.destage.covered);
        if failed {
            d.origin.destage.zero_anew.clear();
        }
        d.origin.destage.hangs = false;
        if failed {
            for w in d.origin.destage.written.drain(..n).collect::<Vec<_>>() {
                match w {
                    Written::Data { block, slot } => {
                        self.flash.unpin_slot(slot);
                        self.cache.index.set_mark(slot, false);
                        self.unwrite(disk, block, slot);
                    }
                    Written::Zero { .. } => {}
                }
            }
            let d = self.known_mut(disk);
            d.counters.destage_errors += 1;
            d.origin.destage.note_trouble(d.origin.sync.error, now);
            self.forget_void(disk);
            self.destage_back_off(disk, now, fx);
            return;
        }
        let d = self.known_mut(disk);
        d.origin.destage.trouble = None;
        self.mark_clean(disk, n, now, fx);
        self.destage_flush_if_due(disk, now, fx);
    }

    /// The origin has the first `n` written runs durably: step 4.
    pub(super) fn mark_clean(&mut self, disk: DiskId, n: usize, now: u64, fx: &mut Effects) {
        // The newer record cannot come before there is room, and that may need this block gone.
        let stuck = self.flash.starved();
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        let written: Vec<Written> = d.origin.destage.written.drain(..n).collect();
        let mut runs: Vec<(Kind, u64, u64)> = Vec::new();
        for w in written {
            match w {
                Written::Data { block, slot } => {
                    self.flash.unpin_slot(slot);
                    self.cache.index.set_mark(slot, false);
                    let d = self.known_mut(disk);
                    if let Some(order) = d.order.as_deref_mut() {
                        order.done(block, slot);
                    }
                    if self.clean_block(disk, block, slot) {
                        push_run(&mut runs, Kind::CleanedRun, block, 1);
                    } else if stuck {
                        took(Path::StuckLetGo);
                        self.let_go(disk, block, slot);
                    }
                }
                Written::Zero { block, count } => {
                    let count_void = self.opts.faults.has(Fault::VoidZerosCount);
                    let told_superseded = self.opts.faults.has(Fault::ZerosToldSuperseded);
                    let d = self.known(disk);
                    let mut still = RunSet::default();
                    for (b, n) in d.zero.runs_within(block, block + count) {
                        still.insert_range(b, b + n);
                    }
                    if !count_void {
                        d.origin.destage.take_void(&mut still, block, block + count);
                    }
                    // By halves, to where something supersedes them: a run can have billions of blocks.
                    let mut parts: Vec<(u64, u64)> = still.runs().collect();
                    parts.reverse();
                    while let Some((b, n)) = parts.pop() {
                        if told_superseded || !self.superseding(disk, b, b + n) {
                            push_run(&mut runs, Kind::ZeroDoneRun, b, n);
                        } else if n > 1 {
                            parts.extend([(b + n / 2, n - n / 2), (b, n / 2)]);
                        } else if stuck {
                            self.zeros_told(disk, b, 1);
                        }
                    }
                }
            }
        }
        for (kind, block, count) in runs {
            let ord = self.flash.record(kind, disk, block, count, Then::Nothing);
            if kind == Kind::ZeroDoneRun {
                self.zeros_told(disk, block, count);
            }
            let d = self.known_mut(disk);
            d.cleaned_ord = ord;
        }
        self.known_mut(disk).origin.destage.zero_anew.clear();
        self.forget_void(disk);
        self.go_on_in_order(disk, now, fx);
        self.note_clean(disk);
        self.wake_clean_waiters(disk, now, fx);
    }

    /// What the origin was given of a block of an ordered disk does not count.
    pub(super) fn unwrite(&mut self, disk: DiskId, block: u64, slot: SlotNo) {
        let order = self.disk_mut(disk).and_then(|d| d.order.as_deref_mut());
        if let Some(order) = order {
            order.set_written(block, slot, false);
        }
    }

    /// Lets go of what origins that hang hold of a segment. Their writes may still come through at any
    /// time, so the ranges stay busy: nothing else is written there, and none of it counts as clean.
    /// Only of this segment, because one that is no more than slow should not have worked for nothing.
    pub fn let_go_of_hung(&mut self, seg: u32, now: u64) {
        let hangs = |since: u64| now.saturating_sub(since) > HANGS_NS;
        let here = |slot: SlotNo, segment_blocks: u32| slot / segment_blocks == seg;
        let blocks = self.flash.log.segment_slots;
        let mut given = self.ready.given.take();
        given.sort_unstable();
        for disk in given {
            let Some(d) = self.disks[usize::from(disk)].as_deref() else {
                continue;
            };
            if !d.origin.destage.is_given() {
                continue;
            }
            self.ready.given.add(disk);
            let busy: Vec<usize> = d
                .origin
                .destage
                .busy
                .iter()
                .map(|(_, _, job)| *job)
                .collect();
            let mut hung = d.origin.destage.covered > 0 && hangs(d.origin.destage.covered_ns);
            let mut slots: SmallVec<[SlotNo; 4]> = SmallVec::new();
            for id in busy {
                let job = &mut self.destaging.jobs[id];
                // With its memory gone it is the origin's turn.
                if job.buf.is_none() && hangs(job.started_ns) {
                    hung = true;
                    for slot in job.slots.iter_mut().filter(|s| here(**s, blocks)) {
                        slots.push(std::mem::replace(slot, NOWHERE));
                    }
                }
            }
            self.let_go_of(&slots);
            if hung && let Some(d) = self.disk_mut(disk) {
                took(Path::HungLetGo);
                d.origin.destage.hangs = true;
                self.doubt(disk, |_, slot| here(slot, blocks));
            }
        }
    }

    /// The origin refused a write, and may have taken a part of it: what was destaged there before
    /// and waits for the flush does not count.
    pub fn doubt_written(&mut self, disk: DiskId, start: u64, end: u64) {
        let d = self.known_mut(disk);
        d.origin.destage.void_zeros(start, end);
        self.doubt(disk, |block, _| (start..end).contains(&block));
    }

    /// Of the blocks that wait for the flush, those that `which` picks do not count.
    fn doubt(&mut self, disk: DiskId, which: impl Fn(u64, SlotNo) -> bool) {
        self.ready.touch(disk);
        let d = self.known_mut(disk);
        let mut slots: SmallVec<[SlotNo; 4]> = SmallVec::new();
        for w in &mut d.origin.destage.written {
            match *w {
                Written::Data { block, slot } if which(block, slot) => {
                    took(Path::WrittenDoubted);
                    slots.push(slot);
                    if let Some(order) = d.order.as_deref_mut() {
                        order.set_written(block, slot, false);
                    }
                    // It keeps its place: the flush covers so many.
                    *w = Written::Zero { block, count: 0 };
                }
                _ => {}
            }
        }
        self.let_go_of(&slots);
    }

    pub(super) fn let_go_of(&mut self, slots: &[SlotNo]) {
        for slot in slots {
            self.flash.unpin_slot(*slot);
            self.cache.index.set_mark(*slot, false);
        }
    }

    /// Once no run of zeros waits for the flush, none can be misunderstood.
    fn forget_void(&mut self, disk: DiskId) {
        if let Some(d) = self.disk_mut(disk)
            && !d
                .origin
                .destage
                .written
                .iter()
                .any(|w| matches!(w, Written::Zero { .. }))
        {
            d.origin.destage.zero_void.clear();
        }
    }

    /// Marks one block clean if it is still the one that was destaged.
    fn clean_block(&mut self, disk: DiskId, block: u64, slot: SlotNo) -> bool {
        let now_at = self.cache.index.get(Key::new(disk, block));
        let slot = match now_at {
            Some(there) if self.opts.faults.has(Fault::CleanMoved) => there,
            _ => slot,
        };
        if now_at != Some(slot) || !self.cache.index.slot(slot).is_some_and(|s| s.dirty) {
            return false;
        }
        if self.superseding(disk, block, block + 1) && !self.opts.faults.has(Fault::CleanSuperseded)
        {
            took(Path::DestagedBehindWrite);
            return false;
        }
        let d = self.known_mut(disk);
        d.no_longer_dirty(block);
        let counted = !d.is_promised();
        self.cache.index.set_clean(slot);
        self.flash.slot_cleaned(slot);
        self.dirty_total -= u64::from(counted);
        true
    }
}

fn push_run(runs: &mut Vec<(Kind, u64, u64)>, kind: Kind, block: u64, count: u64) {
    match runs.last_mut() {
        Some((k, start, n)) if *k == kind && *start + *n == block => *n += count,
        _ => runs.push((kind, block, count)),
    }
}
