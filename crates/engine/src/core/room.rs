//! Making room on flash: what drives the device's steps ([`crate::flash::evict`]), and what the cache and the
//! disks say of the blocks in a segment that is to be free.

use crate::api::Effects;
use crate::cache::index::SlotNo;
use crate::core::Core;
use crate::core::rest::Rest;
use crate::disk::Disk;
use crate::faults::Fault;
use crate::flash::evict::{Contents, Fate, Said, Terms};
use crate::paths::{Path, took};
use hearth_format::Kind;
use hearth_policy::Verdict;

/// Segments freed per event, at most: a foreground request waits for it.
const VICTIMS_MAX: u32 = 4;

impl Core {
    /// One step of making room, if it is short.
    pub fn make_room(&mut self, now: u64, fx: &mut Effects) {
        if self.rescue_step(now, fx) || !self.flash.takes_writes() {
            return;
        }
        for _ in 0..VICTIMS_MAX {
            let Some((seg, begins)) = self.flash.next_victim() else {
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
        let awaited = !self.reqs.stalled.is_empty() || !self.reqs.stalled_through.is_empty();
        if awaited || self.flash.is_short_of_free() {
            self.flash.flush_to_free(now);
        }
        self.route_flash(now, fx);
        self.rescue_step(now, fx);
    }

    /// Works on the segment that goes next; true if it was freed.
    fn empty_segment(&mut self, seg: u32, now: u64, fx: &mut Effects) -> bool {
        let (flash, mut rest) = self.apart();
        flash.sift(seg, &mut rest, now);
        self.route_flash(now, fx);
        if self.flash.is_held_long(seg, now) {
            self.let_go_of_hung(seg, now);
        }
        if !self.flash.is_victim_empty(seg) {
            return false;
        }
        let nothing_said = if self.flash.starved() {
            self.flash.log.order.len() > 1 && self.needs_no_relog(seg)
        } else {
            let (flash, mut rest) = self.apart();
            flash.say_again(seg, &mut rest)
        };
        // Last, for it looks into every lane.
        if !nothing_said || self.shared.pinned(seg) {
            return false;
        }
        self.flash.free_victim(seg);
        self.route_flash(now, fx);
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
        if info.dirty {
            if self.faults.has(Fault::EvictDirty) {
                return Fate::Goes;
            }
            // What flash has refused is read alone, and not at once again.
            if d.is_refused(block, terms.now) || terms.follows && d.doubtful.contains(block) {
                return Fate::Stays;
            }
            let destage = &d.origin.destage;
            let stuck = !d.attached || destage.hangs || destage.not_before_ns > terms.now;
            if terms.dirty_stays && !stuck {
                return Fate::Stays;
            }
            if !d.attached {
                took(Path::UnattachedKept);
            }
        } else {
            let within_min = terms.may_keep && self.is_within_min(d, terms.kept_most);
            let earned = terms.may_keep_used
                && self.cache.policy.evict(info.freq as u8) != Verdict::Drop
                && d.excess() == 0;
            let may_differ = d.may_differ() && !self.faults.has(Fault::CacheUnguarded);
            if !earned && !within_min || may_differ {
                return Fate::Goes;
            }
        }
        Fate::Moves {
            alone: d.doubtful.contains(block),
        }
    }

    fn drop_copy(&mut self, slot: SlotNo, seq: u64) -> bool {
        let info = self.cache.index.slot(slot);
        let key = info.expect("a block that is dropped was looked at").key;
        let gone = self.forget_block(key.disk(), key.block());
        let gone = gone.expect("what no copy leads to is an orphan");
        debug_assert_eq!(gone.slot, slot);
        let d = self.known_mut(key.disk());
        d.counters.evictions += 1;
        d.evicted_seq = d.evicted_seq.max(seq);
        gone.dirty
    }

    fn drop_orphan(&mut self, slot: SlotNo) {
        let info = self.cache.index.slot(slot);
        let info = info.expect("an orphan was looked at");
        let was = self.cache.index.remove_orphan(slot);
        assert!(was, "the index leads to slot {slot}");
        self.known_mut(info.key.disk()).cached -= 1;
    }

    fn set_moving(&mut self, slot: SlotNo) -> u32 {
        self.cache.index.set_mark(slot, true);
        self.cache.index.crc(slot)
    }

    fn still_said(&mut self, seq: u64) -> Option<Vec<Said>> {
        let mut noted = self.ready.noted.take();
        noted.retain(|disk| self.disk(*disk).is_some_and(Disk::is_noted));
        noted.sort_unstable();
        noted.iter().for_each(|disk| self.ready.noted.add(*disk));
        let mut said = Vec::new();
        for d in noted.iter().map(|disk| self.known(*disk)) {
            let disk = d.cfg.id;
            let skip = self.faults.has(Fault::SkipRelogIntents);
            for region in d.origin.intents.held_by(seq).filter(|_| !skip) {
                let (block, end) = d.origin.intents.blocks_of(region);
                said.push(Said {
                    kind: Kind::Intent,
                    disk,
                    block,
                    count: end - block,
                });
            }
            let zeros = d.zero_seg_seq.is_some_and(|z| z <= seq);
            if !zeros || self.faults.has(Fault::SkipRelogZeros) {
                continue;
            }
            for (block, count) in d.zero.runs() {
                if self.superseding(disk, block, block + count) {
                    // The write will be through soon.
                    took(Path::RelogWaitsForWrite);
                    return None;
                }
                said.push(Said {
                    kind: Kind::ZeroRun,
                    disk,
                    block,
                    count,
                });
            }
        }
        Some(said)
    }

    fn said_again(&mut self, said: &Said, seq: u64) {
        let d = self.known_mut(said.disk);
        if said.kind == Kind::ZeroRun {
            took(Path::ZerosLoggedAgain);
            d.zero_seg_seq = Some(seq);
        } else {
            took(Path::IntentLoggedAgain);
            let region = d.origin.intents.region_of(said.block);
            d.origin.intents.lies_in(region, seq);
        }
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
        let (kept, of) = match wanted <= most {
            true => (1, 1),
            false => (most, wanted),
        };
        let min = u128::from(d.cfg.min_bytes / 4096) * u128::from(kept);
        u128::from(d.cached) * u128::from(of) <= min
    }
}
