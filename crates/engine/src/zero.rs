//! Discard and write-zeroes.
//!
//! In write-back they are writes without data: a record in the log, and the blocks join the
//! disk's set of zeros until the destager has told the origin. So a guest's TRIM costs one
//! small append, and it is ordered with writes like any write. In the other modes they go to
//! the origin like any write past the cache.

use crate::api::{Effects, ReqOp};
use crate::core::{Core, Phase};
use crate::log::Then;
use hearth_format::Kind;
use hearth_io::checksum::crc32c;
use smallvec::smallvec;

/// Blocks of room a discard or zeroing wants to see: two edges, a descriptor, one to spare.
pub(crate) const ROOM_MIN: u32 = 4;

impl Core {
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
