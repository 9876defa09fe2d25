//! A disk at its maximum gives up blocks of its own.
//!
//! It makes room for its next ones, and comes back below the maximum after that was lowered.

use crate::api::DiskId;
use crate::core::Core;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::paths::{Path, took};

/// Slots looked at per call.
const OWN_SCAN: u32 = 8192;
/// A disk above its maximum gives up its blocks one by one if that takes no more than one in so many of the
/// records the log has room for ...
const TRIM_SHARE: u64 = 16;
/// ... so many at a time.
const TRIM_STEP: u64 = 1024;

impl Core {
    /// Drops clean blocks of a disk that is at its maximum; true if `count` came free.
    pub fn make_own_room(&mut self, disk: DiskId, count: u64) -> bool {
        let slots = self.cache.index.slots();
        let Some(mut hand) = self.disk(disk).map(|d| d.own_hand) else {
            return false;
        };
        let mut freed = 0;
        // What lies side by side takes one record.
        let mut run: Option<(u64, u64)> = None;
        for _ in 0..OWN_SCAN.min(slots) {
            if freed >= count {
                break;
            }
            hand = (hand + 1) % slots;
            let Some(info) = self.cache.index.slot(hand) else {
                continue;
            };
            if info.key.disk() != disk || info.dirty || self.cache.index.slot_mark(hand) {
                continue;
            }
            if info.freq > 0 {
                self.cache.index.untouch(hand);
                continue;
            }
            let block = info.key.block();
            if self.superseding(disk, block, block + 1)
                && !self.opts.faults.has(Fault::DropBehindNewer)
            {
                // Our record would come after the newer one and void that.
                continue;
            }
            took(Path::OwnBlocksDropped);
            self.forget_block(disk, block);
            match &mut run {
                Some((start, count)) if *start + *count == block => *count += 1,
                run => {
                    if let Some((start, count)) = run.replace((block, 1)) {
                        self.record_drop(disk, start, count);
                    }
                }
            }
            let d = self.known_mut(disk);
            d.counters.evictions += 1;
            freed += 1;
        }
        if let Some((start, count)) = run {
            self.record_drop(disk, start, count);
        }
        let d = self.known_mut(disk);
        d.own_hand = hand;
        freed >= count
    }

    /// Brings a disk above its maximum (after it was lowered) back below it.
    ///
    /// Every block dropped may take a record. Of a disk that is far above, the records would push
    /// what others have out of the log, so that one gives way as the log turns over: its fills each take
    /// the place of two, and nothing of it is moved on.
    pub fn trim_own_overuse(&mut self, disk: DiskId) {
        let records = self.flash.log.segments.len() as u64 * self.flash.log.summary_capacity as u64;
        let most = records / TRIM_SHARE;
        let excess = self.disk(disk).map_or(0, Disk::excess);
        if (1..=most).contains(&excess) {
            let room = u64::from(self.flash.log.room() / 4);
            self.make_own_room(disk, excess.min(TRIM_STEP).min(room));
        }
    }
}
