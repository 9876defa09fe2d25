//! Making room on flash: what drives the device's steps ([`crate::flash::evict`]), and what the cache and the
//! disks say of the blocks in a segment that is to be free.

use crate::api::Effects;
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::core::rest::Rest;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::flash::again::Holds;
use crate::flash::choose::Verdict;
use crate::flash::evict::{Contents, Fate, Terms};
use crate::flash::log::Gone;
use crate::paths::{Path, took};
use hearth_policy::Verdict as Worth;

/// Segments freed per event, at most: a foreground request waits for it.
const VICTIMS_MAX: u32 = 4;

impl Core {
    /// One step of making room, if it is short.
    pub fn make_room(&mut self, now: u64, fx: &mut Effects) {
        if self.rescue_step(now, fx) || !self.flash.takes_writes() {
            return;
        }
        for _ in 0..VICTIMS_MAX {
            let Some((seg, begins)) = self.flash.next_victim(now) else {
                break;
            };
            if begins {
                // What is in use shall be known.
                self.fold_all_notes(fx);
            }
            if !self.empty_segment(seg, now, fx) {
                break;
            }
        }
        if !self.quiescing {
            let (flash, mut rest) = self.apart();
            flash.move_off_slow(&mut rest, now);
        }
        let awaited = !self.reqs.stalled.is_empty() || !self.reqs.stalled_through.is_empty();
        if awaited && self.flash.log.free.len() <= self.flash.log.reserve() {
            self.flash.unpark();
        }
        if !self.reqs.log_full && self.reqs.stalled_through.is_empty() {
            self.flash.room_was_got();
        }
        if awaited || self.flash.is_short_of_free() {
            self.flash.flush_to_free(now);
            self.flash.store_map();
        }
        self.flash.free_emptied(now);
        if !self.quiescing {
            self.flash.area_step();
        }
        self.route_flash(now, fx);
    }

    /// Works on the segment that goes next; true if it was freed, or is not to go.
    fn empty_segment(&mut self, seg: u32, now: u64, fx: &mut Effects) -> bool {
        let (flash, mut rest) = self.apart();
        let verdict = flash.judge(seg, &rest, now);
        if verdict == Verdict::Goes {
            flash.sift(seg, &mut rest, now);
        }
        self.route_flash(now, fx);
        if verdict != Verdict::Goes {
            return verdict == Verdict::Stays;
        }
        if self.flash.is_held_long(seg, now) {
            self.let_go_of_hung(seg, now);
        }
        if !self.flash.is_victim_empty(seg) {
            return false;
        }
        // It looks into every lane.
        if self.shared.pinned(seg) {
            return false;
        }
        let (flash, rest) = self.apart();
        let said = flash.say_again(seg, &rest, now);
        self.route_flash(now, fx);
        let Some(ord) = said else {
            return false;
        };
        if self.flash.starved() && self.give_up_intents(seg, now, fx) {
            return false;
        }
        self.flash.free_victim(seg, ord);
        true
    }
}

impl Contents for Rest<'_> {
    fn look(&self, slot: SlotNo, terms: &Terms) -> Fate {
        let Some(info) = self.cache.index.slot(slot) else {
            return Fate::Stays;
        };
        let (disk, block) = (info.key.disk(), info.key.block());
        let moving = self.cache.index.slot_mark(slot);
        if terms.starved {
            // That a write to the block is queued is no obstacle: it does not need the old content.
            return match info.dirty || moving {
                true => Fate::Stays,
                false if self.is_orphan(slot) => Fate::Orphan,
                false => Fate::Goes,
            };
        }
        if !info.dirty && self.is_orphan(slot) {
            return Fate::Orphan;
        }
        if moving || self.superseding(disk, block, block + 1) {
            return Fate::Stays;
        }
        let d = self.known(disk);
        if info.dirty && d.order.is_some() && !d.lost.contains(block) {
            // Where it stands is when it was written. What is lost has no turn any more, and would keep its segment.
            return Fate::Stays;
        }
        if info.dirty {
            let homeless = !d.has_origin();
            if self.faults.has(Fault::EvictDirty) || homeless && self.faults.has(Fault::EvictKept) {
                return Fate::Goes;
            }
            if terms.leaves && self.faults.has(Fault::EmptyForgetsDirty) {
                return Fate::Goes;
            }
            // What flash has refused is read alone, and not at once again.
            if d.is_refused(block, terms.now) || terms.follows && d.doubtful.contains(block) {
                return Fate::Stays;
            }
            let destage = &d.origin.destage;
            let waits = destage.hangs || destage.not_before_ns > terms.now;
            // What flash has lost no origin ever gets: it is moved as it is, and goes on to be told as lost.
            let lost = d.lost.contains(block);
            let stuck = !d.attached || homeless || d.held || waits || lost;
            if terms.dirty_stays && !stuck {
                return Fate::Waits;
            }
            if homeless {
                took(Path::HomelessMoved);
            } else if !d.attached {
                took(Path::UnattachedKept);
            }
        } else {
            let within_min = terms.may_keep && self.is_within_min(d, terms.kept_most);
            let used = self.cache.policy.evict(info.freq as u8) != Worth::Drop;
            let earned = terms.may_keep_used && (used || !terms.crowded) && d.excess() == 0;
            let may_differ = d.may_differ() && !self.faults.has(Fault::CacheUnguarded);
            if !earned && !within_min || may_differ {
                return Fate::Goes;
            }
        }
        Fate::Moves {
            alone: d.doubtful.contains(block),
        }
    }

    fn drop_copy(&mut self, slot: SlotNo, eviction: u64) -> Gone {
        let info = self.cache.index.slot(slot);
        let key = info.expect("a block that is dropped was looked at").key;
        let gone = self.forget_block(key.disk(), key.block());
        let gone = gone.expect("what no copy leads to is an orphan");
        debug_assert_eq!(gone.slot, slot);
        let d = self.known_mut(key.disk());
        d.counters.evictions += 1;
        d.evicted = d.evicted.max(eviction);
        gone
    }

    fn drop_orphan(&mut self, slot: SlotNo) -> Gone {
        let info = self.cache.index.slot(slot);
        let info = info.expect("an orphan was looked at");
        let was = self.cache.index.remove_orphan(slot);
        assert!(was, "the index leads to slot {slot}");
        let (disk, block) = (info.key.disk(), info.key.block());
        self.known_mut(disk).cached -= 1;
        Gone {
            disk,
            block,
            slot,
            dirty: false,
        }
    }

    fn set_moving(&mut self, slot: SlotNo) -> u32 {
        self.cache.index.set_mark(slot, true);
        self.cache.index.crc(slot)
    }
}

impl Holds for Rest<'_> {
    fn is_known(&self, disk: u16) -> bool {
        self.disk(disk).is_some()
    }

    fn is_cached(&self, disk: u16, block: u64) -> bool {
        self.cache.index.get(Key::new(disk, block)).is_some()
    }

    fn clean_copies(&self, disk: u16, start: u64, end: u64) -> Vec<(u64, SlotNo)> {
        let index = &self.cache.index;
        let clean = |slot: SlotNo| index.slot(slot).filter(|info| !info.dirty);
        if end - start <= u64::from(index.slots()) {
            let cached = |block: u64| {
                let slot = index.get(Key::new(disk, block))?;
                clean(slot).map(|_| (block, slot))
            };
            return (start..end).filter_map(cached).collect();
        }
        let of_disk = (0..index.slots()).filter_map(|slot| {
            let info = clean(slot).filter(|info| info.key.disk() == disk)?;
            (start..end)
                .contains(&info.key.block())
                .then_some((info.key.block(), slot))
        });
        of_disk.collect()
    }

    fn zeros(&self, disk: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        let runs = self.known(disk).zero.runs_within(start, end);
        runs.map(|(block, count)| (block, block + count)).collect()
    }

    fn intents(&self, disk: u16, start: u64, end: u64) -> Vec<(u64, u64)> {
        self.known(disk).origin.intents.open_within(start, end)
    }

    fn mark(&self, disk: u16) -> Option<(u64, u32)> {
        let order = self.disk(disk)?.order.as_deref()?;
        Some(order.mark().to_fields())
    }
}

impl Rest<'_> {
    /// Is this slot's block somewhere else by now?
    fn is_orphan(&self, slot: SlotNo) -> bool {
        let info = self.cache.index.slot(slot);
        info.is_some_and(|s| self.cache.index.get(s.key) != Some(slot))
    }

    /// Is the disk within the part of its minimum that is kept? That is all of it, unless the minimums of all
    /// add up to more than leaves eviction something to drop.
    fn is_within_min(&self, d: &Disk, most: u64) -> bool {
        let wanted = u64::try_from(self.totals.min_blocks).unwrap_or(u64::MAX);
        // What lives on flash leaves that much less of which anything can be dropped.
        let most = most.saturating_sub(self.totals.kept_blocks);
        let (kept, of) = match wanted <= most {
            true => (1, 1),
            false => (most, wanted),
        };
        let min = u128::from(d.cfg.min_bytes / 4096) * u128::from(kept);
        u128::from(d.cached) * u128::from(of) <= min
    }
}
