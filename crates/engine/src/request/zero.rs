//! Discard and write-zeroes.
//!
//! In write-back they are writes without data: a record in the log, and the blocks join the
//! disk's set of zeros until the destager has told the origin. So a guest's TRIM costs one
//! small append, and it is ordered with writes like any write. In the other modes they go to
//! the origin like any write past the cache.
//!
//! A disk that lives on flash has no such set: the record says that its blocks are not there any more, and
//! what is not there is zeros.
//!
//! The runs in that set are logged again whenever eviction reaches the oldest of them, all at
//! once, in segments that must be free then. So there may be so many and no more; past that, what would
//! make one more waits for the destager as a write does while too much is dirty.

use crate::api::{DiskId, Effects, ReqOp};
use crate::core::Core;
use crate::core::apply::Then;
use crate::ids::ReqId;
use crate::paths::{Path, took};
use crate::request::state::Step;
use crate::request::write::Appended;
use hearth_format::Kind;
use hearth_io::checksum::crc32c;
use smallvec::smallvec;

/// Blocks of room a discard or zeroing wants to see: two edges, a descriptor, one to spare.
pub(crate) const ROOM_MIN: u32 = 4;

/// A share of the runs that only disks with few of them may add, so that one whose origin takes nothing
/// does not stop the others.
const OWN_SHARE: u64 = 10;

impl Core {
    /// Most runs of zeros: half of what fits into the segments that are free whenever eviction is at
    /// work, but for one, which what it moves may take.
    pub fn zero_runs_max(&self) -> u64 {
        let room =
            (self.flash.log.reserve() as u64 - 1) * self.flash.log.summary_capacity as u64 / 2;
        room.min(self.opts.zero_runs_max)
    }

    /// True if the disk may have one more run of zeros.
    fn may_add_run(&self, disk: DiskId) -> bool {
        let max = self.zero_runs_max();
        let kept = max / OWN_SHARE;
        // Each item on its way may add one.
        let batches = self.flash.log.batches.iter().map(|b| b.items.len());
        let coming = self.flash.log.queue.len() + batches.sum::<usize>();
        if self.zero_runs + coming as u64 + kept < max {
            return true;
        }
        // Whatever the others have: all these shares are no more than what was kept for them.
        let own = kept / self.totals.attached.max(1);
        let has = self.disk(disk).map_or(0, |d| d.zero.run_count());
        has < own.max(1)
    }

    /// Has a request to wait because its write of these blocks, or their becoming `zero`, would add a
    /// run that may not be?
    pub fn waits_for_runs(&self, disk: DiskId, start: u64, end: u64, zero: bool) -> bool {
        let adds = self.disk(disk).is_some_and(|d| {
            end > start
                && if zero {
                    d.zero.stands_apart(start, end)
                } else {
                    d.zero.is_cut_by(start, end)
                }
        });
        let waits = adds && !self.may_add_run(disk);
        if waits {
            took(Path::ZerosWait);
        }
        waits
    }

    pub fn begin_zero(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let r = &self.reqs[id];
        let (disk, offset, end) = (r.disk, r.offset, r.offset + r.len);
        let d = self.known(disk);
        let size = d.cfg.size;
        let unit = if self.reqs[id].write().through {
            u64::from(d.cfg.origin_align).clamp(1, 4096)
        } else {
            4096
        };
        let partial = offset % unit != 0 || (end % unit != 0 && end != size);
        if partial && matches!(self.reqs[id].op, ReqOp::WriteZeroes { .. }) {
            self.merge_edges(id, now, fx);
        } else {
            self.zero_with_edges(id, now, fx);
        }
    }

    /// The whole blocks a request zeroes.
    pub fn zeros_of(&self, id: ReqId) -> (u64, u64) {
        let r = &self.reqs[id];
        let (offset, end) = (r.offset, r.offset + r.len);
        let size = self.disk(r.disk).map_or(0, |d| d.cfg.size);
        let last = if end == size {
            end.div_ceil(4096)
        } else {
            end / 4096
        };
        (offset.div_ceil(4096), last)
    }

    /// Appends the zero run and, for partial edges, the merged blocks.
    pub fn zero_with_edges(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        if !self.flash.takes_writes() || self.reqs[id].write().through {
            self.reqs[id].write_mut().through = true;
            self.go_through(id, now, fx);
            return;
        }
        let (first, last) = self.zeros_of(id);
        if last <= first && self.reqs[id].write().edges.is_empty() {
            // A discard of less than a block: nothing to do, which is allowed.
            self.finish(id, now, fx);
            return;
        }
        if self.fenced(self.reqs[id].disk) {
            return self.give_up(id, now, fx);
        }
        if self.append_zeros(id) != Appended::All {
            self.reqs.stalled.push_back(id);
            self.reqs.wants_room = true;
        }
    }

    /// The same, if there is room for it.
    pub fn append_zeros(&mut self, id: ReqId) -> Appended {
        let disk = self.reqs[id].disk;
        let (first, last) = self.zeros_of(id);
        let homeless = !self.known(disk).has_origin();
        let for_runs = !homeless && self.waits_for_runs(disk, first, last, true);
        self.reqs[id].write_mut().stalls(for_runs);
        if for_runs {
            return Appended::TooManyRuns;
        }
        if self.flash.log.room() < ROOM_MIN {
            // Records take room too; a flood of them must not eat eviction's reserve.
            self.reqs.log_full = true;
            return Appended::NoRoom;
        }
        self.flash.room_was_got();
        let write = self.reqs[id].write_mut();
        let edges = std::mem::take(&mut write.edges);
        let pending = edges.len() as u32 + u32::from(last > first);
        write.step = Step::Appends { pending };
        for (block, data) in edges {
            let crcs = smallvec![crc32c(data.bytes())];
            self.push_dirty(disk, block, data.sub(0, 4096), crcs, id);
        }
        if last > first {
            let solid =
                matches!(self.reqs[id].op, ReqOp::WriteZeroes { punch: false, .. }) && !homeless;
            let d = self.known_mut(disk);
            if solid {
                d.solid.insert_range(first, last);
            } else if !d.solid.is_empty() {
                d.solid.remove_range(first, last);
            }
            // Of a disk that lives on flash, what is not there is zeros: nobody else has to be told.
            let kind = match homeless {
                true => Kind::DropRun,
                false => Kind::ZeroRun,
            };
            self.flash
                .record(kind, disk, first, last - first, Then::Request(id));
        }
        Appended::All
    }
}
