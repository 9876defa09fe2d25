//! Disks whose origin may have changed since their clean copies were made.
//!
//! A block device, an NBD export or a restored file does not show whether it was written while nothing served it. Such a
//! disk is served at once, from its origin: its clean copies answer no reads and its dirty blocks stay on flash until
//! enough copies were compared with the origin. If one differs, all of them are void, in the log as well: a crash must
//! not bring them back.

use crate::api::DiskId;
use crate::core::Core;
use crate::core::route::FlashWaiter;
use crate::engine::{ControlError, Engine};
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::paths::{Path, took};
use crate::request::zero::ROOM_MIN;

/// Records that one call appends: the log needs the rest of its space for eviction.
const RECORDS_MAX: usize = 256;
/// Blocks that one record names.
const RUN_MAX: u64 = 1 << 31;

impl Engine {
    /// Sets whether the clean copies of a disk are known to equal its origin. False holds until it is set again; it has to
    /// be set before [`attach`](Engine::attach). A disk that the engine does not know has no copies.
    pub fn set_verified(&self, id: DiskId, verified: bool) {
        let mut core = self.core();
        if core.disk(id).is_some_and(|d| d.unverified == verified) {
            took(match verified {
                true => Path::CopiesVerified,
                false => Path::CopiesUnverified,
            });
            if verified && !core.opts.faults.has(Fault::KeepUncompared) {
                core.drop_held(id);
            }
            core.alter(id, |d| d.unverified = !verified);
            core.publish(id);
        }
    }

    /// True if the clean copies of a disk have still to be compared with its origin.
    pub fn is_unverified(&self, id: DiskId) -> bool {
        self.core().disk(id).is_some_and(|d| d.unverified)
    }

    /// Drops all clean copies of an unverified disk while it is served, including evicted ones that a crash would bring
    /// back. [`ControlError::Busy`]: call again a little later. Success means that it is durable.
    pub fn drop_clean(&self, id: DiskId) -> Result<(), ControlError> {
        let mut core = self.core();
        if core.disk(id).is_none() {
            return Ok(());
        }
        core.drop_clean(id)
    }
}

impl Core {
    /// Drops the clean copies of blocks that a write holds just now. They were not compared
    /// ([`clean_sums`](Engine::clean_sums) leaves them out), and would answer reads until the write ends.
    fn drop_held(&mut self, id: DiskId) {
        let spans = self.known(id).locks.iter();
        let spans: Vec<(u64, u64)> = spans.map(|span| (span.start, span.end)).collect();
        for (start, end) in spans {
            for block in self.forget_clean(id, start, end) {
                // A record behind a newer one would void that.
                if self.flash.takes_writes() && !self.superseding(id, block, block + 1) {
                    self.record_drop(id, block, 1);
                }
            }
        }
    }

    fn drop_clean(&mut self, id: DiskId) -> Result<(), ControlError> {
        if !self.flash.takes_writes() {
            // What is on flash is void for the next start: that is noted elsewhere.
            self.forget_clean(id, 0, u64::MAX);
            return Ok(());
        }
        let d = self.known_mut(id);
        let all = d.blocks;
        let todo = d.dropping.take().unwrap_or_else(|| vec![(0, all)]);
        let copies = self.clean_blocks(id);
        let mut left = Vec::new();
        let mut records = 0;
        for (from, to) in todo {
            for (start, end, busy) in self.cut(id, from, to) {
                let full = records == RECORDS_MAX || self.flash.log.room() < ROOM_MIN;
                if busy || full {
                    left.push((start, end));
                    continue;
                }
                records += 1;
                let from = copies.partition_point(|block| *block < start);
                let within = copies.iter().skip(from).take_while(|block| **block < end);
                for block in within {
                    self.forget_block(id, *block);
                }
                if !self.opts.faults.has(Fault::DropUnrecorded) {
                    self.record_drop(id, start, end - start);
                }
            }
        }
        let ord = self.known(id).dropped_ord;
        if left.is_empty() && self.flash.is_durable(ord) {
            took(Path::CopiesDropped);
            return Ok(());
        }
        if left.is_empty() {
            self.flash
                .tell_when_durable(Until::Ord(ord), FlashWaiter::Nobody);
        }
        self.flash.log.urgent = true;
        // From here on the destager may run: a write that holds a part may wait for it.
        self.alter(id, |d| d.dropping = Some(left));
        Err(ControlError::Busy)
    }

    /// Clean cached blocks of a disk, in order.
    fn clean_blocks(&self, id: DiskId) -> Vec<u64> {
        let index = &self.cache.index;
        let copies = (0..index.slots()).filter_map(|slot| index.slot(slot));
        let clean = copies.filter(|copy| copy.key.disk() == id && !copy.dirty);
        let mut blocks: Vec<u64> = clean.map(|copy| copy.key.block()).collect();
        blocks.sort_unstable();
        blocks
    }

    /// The parts of a range that are neither dirty nor zero, and whether a write holds them just now: a record that such a
    /// part is void could come behind the newer content.
    fn cut(&self, id: DiskId, from: u64, to: u64) -> Vec<(u64, u64, bool)> {
        let d = self.known(id);
        let newer = d.dirty.runs().into_iter().chain(d.zero.runs());
        let mut cuts: Vec<(u64, u64, bool)> = newer.map(|(s, n)| (s, s + n, false)).collect();
        cuts.extend(d.locks.iter().map(|span| (span.start, span.end, true)));
        cuts.retain(|(start, end, _)| *start < to && *end > from);
        cuts.sort_unstable();
        cuts.push((to, to, false));
        let mut parts = Vec::new();
        let mut at = from;
        for (start, end, busy) in cuts {
            while at < start {
                let next = start.min(at + RUN_MAX);
                parts.push((at, next, false));
                at = next;
            }
            if busy && at < end.min(to) {
                parts.push((at, end.min(to), true));
            }
            at = at.max(end);
        }
        parts
    }
}
