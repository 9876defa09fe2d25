//! What is dirty goes to the origin, in disk order.

use super::{RUN_MAX, Twin};

/// Shares of flash, in percent, from which the destager works when it need not be noticed, and at all costs.
const DIRTY_LOW: u64 = 20;
const DIRTY_HASTE: u64 = 55;
/// Lower limit of `DIRTY_HASTE`, which applies if flash is full of blocks that are not on probation.
const DIRTY_HASTE_LEAST: u64 = 35;
/// No request for so long is quiet.
pub(super) const IDLE_NS: u64 = 300_000_000;
/// Longest pause after a run of the destager, in times of what it took.
const PAUSE_MAX: u64 = 16;

impl Twin {
    pub(super) fn set_clean(&mut self, key: u64) {
        if self.dirty.remove(&key)
            && let Some(copy) = self.index.get_mut(&key)
        {
            copy.dirty = false;
            self.cleaner.destaged(copy.seg);
        }
    }

    /// The destager writes what lies next in disk order; what that takes.
    pub(super) fn destage_run(&mut self) -> u64 {
        let next = self.dirty.range(self.sweep..).next();
        let Some(first) = next.or_else(|| self.dirty.first()).copied() else {
            return 0;
        };
        let mut end = first;
        while end < first + RUN_MAX && self.dirty.contains(&end) {
            self.set_clean(end);
            end += 1;
        }
        self.sweep = end;
        let before = self.arm.free_ns().max(self.now);
        let done = self.write_disk(first, end - first);
        self.record();
        done - before
    }

    pub(super) fn destage(&mut self) {
        let blocks = self.setup.log.blocks();
        let dirty = |twin: &Twin| twin.dirty.len() as u64 * 100;
        let left = (100 - self.cleaner.kept_percent()).saturating_sub(5);
        let haste = left.clamp(DIRTY_HASTE_LEAST, DIRTY_HASTE);
        while dirty(self) > blocks * haste {
            self.destage_run();
        }
        if dirty(self) > blocks * DIRTY_LOW && self.now >= self.pause_ns {
            let took = self.destage_run();
            let left = (blocks * haste).saturating_sub(dirty(self));
            let span = blocks * (haste - DIRTY_LOW);
            let pause = u128::from(took) * u128::from(PAUSE_MAX) * u128::from(left);
            self.pause_ns = self.now + (pause / u128::from(span.max(1))) as u64;
        }
    }

    /// Nobody asks for anything until `to`.
    pub(super) fn destage_idle(&mut self, to: u64) {
        self.now = self.now.max(self.last_ns + IDLE_NS);
        while !self.dirty.is_empty() && self.arm.free_ns().max(self.now) < to {
            self.destage_run();
            self.now = self.now.max(self.arm.free_ns()).min(to);
        }
    }
}
