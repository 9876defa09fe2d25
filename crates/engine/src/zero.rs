//! Discard and write-zeroes.
//!
//! In write-back they are writes without data: a record in the log, and the blocks join the
//! disk's set of zeros until the destager has told the origin. So a guest's TRIM costs one
//! small append, and it is ordered with writes like any write. In the other modes they go to
//! the origin like any write past the cache.
//!
//! The runs in that set are logged again whenever eviction reaches the oldest of them, all at
//! once, in segments that must be free then. So there may be so many and no more; past that, what would
//! make one more waits for the destager as a write does while too much is dirty.

use crate::api::{DiskId, Effects, ReqOp};
use crate::core::{Core, Phase};
use crate::log::Then;
use hearth_format::Kind;
use hearth_io::checksum::crc32c;
use smallvec::smallvec;

/// Blocks of room a discard or zeroing wants to see: two edges, a descriptor, one to spare.
pub(crate) const ROOM_MIN: u32 = 4;

/// A share of the runs that only disks with few of them may add, so that one whose origin takes nothing
/// does not stop the others.
const OWN_SHARE: u64 = 10;

impl Core {
    /// Runs of zeros that origins have not been told.
    pub fn zero_runs(&self) -> u64 {
        let disks = self.disks.iter().flatten();
        disks.map(|d| d.zero.run_count()).sum()
    }

    /// Most of them: half of what fits into the segments that are free whenever eviction is at work, but
    /// for one, which what it moves may take.
    pub fn zero_runs_max(&self) -> u64 {
        (self.log.reserve() as u64 - 1) * self.log.summary_capacity as u64 / 2
    }

    /// May the disk have one more run?
    pub fn may_zero(&self, disk: DiskId) -> bool {
        let (runs, max) = (self.zero_runs(), self.zero_runs_max());
        let kept = max / OWN_SHARE;
        // Records on their way count for what they may become.
        let coming = u64::from(self.log.queued_records) + self.log.records_in_flight();
        if runs + coming + kept < max {
            return true;
        }
        let disks = self.disks.iter().flatten().filter(|d| d.attached);
        let own = kept / (disks.count() as u64).max(1);
        let has = self.disk(disk).map_or(0, |d| d.zero.run_count());
        runs + coming < max && has + coming < own.max(1)
    }

    pub fn begin_zero(&mut self, id: usize, now: u64, fx: &mut Effects) {
        let r = &self.reqs[id].r;
        let (disk, offset, end) = (r.disk, r.offset, r.offset + r.len);
        let Some(d) = self.disk(disk) else { return };
        let size = d.cfg.size;
        let unit = if self.reqs[id].through {
            u64::from(d.cfg.origin_align).clamp(1, 4096)
        } else {
            4096
        };
        let partial = offset % unit != 0 || (end % unit != 0 && end != size);
        if partial && matches!(self.reqs[id].r.op, ReqOp::WriteZeroes { .. }) {
            self.merge_edges(id, now, fx);
        } else {
            self.zero_with_edges(id, now, fx);
        }
    }

    /// Appends the zero run and, for partial edges, the merged blocks.
    pub fn zero_with_edges(&mut self, id: usize, now: u64, fx: &mut Effects) {
        if self.flash_failed || self.reqs[id].through {
            self.reqs[id].through = true;
            self.go_through(id, now, fx);
            return;
        }
        let r = &self.reqs[id].r;
        let (disk, offset, end) = (r.disk, r.offset, r.offset + r.len);
        let Some(size) = self.disk(disk).map(|d| d.cfg.size) else {
            return;
        };
        let first = offset.div_ceil(4096);
        let last = if end == size {
            end.div_ceil(4096)
        } else {
            end / 4096
        };
        if last <= first && self.reqs[id].edges.is_empty() {
            // A discard of less than a block: nothing to do, which is allowed.
            self.finish(id, now, fx);
            return;
        }
        if !self.may_zero(disk) {
            self.reqs[id].phase = Phase::WaitSpace;
            self.stalled.push_back(id);
            return;
        }
        if self.log.room() < ROOM_MIN {
            // Records take room too; a flood of them must not eat eviction's reserve.
            self.reqs[id].phase = Phase::WaitSpace;
            self.log_full = true;
            self.stalled.push_back(id);
            return;
        }
        let edges = std::mem::take(&mut self.reqs[id].edges);
        self.reqs[id].phase = Phase::Appending;
        self.reqs[id].pending = edges.len() as u32 + u32::from(last > first);
        for (block, data) in edges {
            let crcs = smallvec![crc32c(data.bytes())];
            self.push_dirty(disk, block, data.sub(0, 4096), crcs, id);
        }
        if last > first {
            let solid = matches!(self.reqs[id].r.op, ReqOp::WriteZeroes { punch: false, .. });
            if let Some(d) = self.disk_mut(disk) {
                if solid {
                    d.solid.insert_range(first, last);
                } else if !d.solid.is_empty() {
                    d.solid.remove_range(first, last);
                }
            }
            self.log
                .record(Kind::ZeroRun, disk, first, last - first, Then::Request(id));
        }
    }
}
