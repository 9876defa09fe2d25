//! What is read of origins, and stays: in RAM at first, then on flash if it is worth more than what it displaces.

use crate::api::{DiskId, Mode};
use crate::cache::index::Key;
use crate::cache::stage::{BYTES, disk_and_block, one_block, policy_key};
use crate::core::Core;
use crate::ctx::Sums;
use crate::faults::Fault;
use crate::request::read::{CleanCopy, FILLS_MAX};
use hearth_io::BufSlice;
use hearth_policy::cleaning::Why;
use hearth_policy::{Place, Stay};
use smallvec::smallvec;

/// Slots looked at for the block a newcomer would displace.
const RIVAL_SCAN: u32 = 64;
/// Newcomers it may turn away: counts are estimates, and one that is much too high must not keep
/// everybody out for good.
const RIVAL_TRIES: u32 = 128;

impl Core {
    /// While flash fills for the first time everything is welcome.
    pub fn filling(&self) -> bool {
        // Eviction keeps as many ready and no more.
        self.opts.first_fill && self.flash.log.free.len() > self.flash.free_target()
    }

    /// Keeps a copy of a run in RAM, with what `stay` says of each block (by its place in the
    /// run); what has been here longest goes to flash or is dropped. The caller has made sure
    /// that the run equals the origin and nobody writes it.
    pub fn stage_put(
        &mut self,
        disk: DiskId,
        block: u64,
        data: &BufSlice,
        crcs: &[u32],
        stay: impl Fn(u64) -> Stay,
    ) {
        let blocks = data.bytes().chunks_exact(BYTES);
        debug_assert_eq!(blocks.len(), crcs.len(), "a checksum for each block");
        let queued = self.is_any_queued(disk, block, crcs.len() as u64);
        for ((i, bytes), crc) in (0..).zip(blocks).zip(crcs) {
            let key = policy_key(disk, block + i);
            if self.cache.stage.contains(key) || self.is_filled(disk, block + i, queued) {
                continue;
            }
            self.cache.stage.aim(self.cache.policy.stage());
            self.unstage_oldest();
            // One more than comes in: it shrinks as slowly as it is used.
            if self.cache.stage.is_large() {
                self.cache.stage.give_back();
                self.unstage_oldest();
            }
            self.cache.stage.put(key, bytes, *crc, stay(i));
        }
    }

    /// Empties the oldest place of the stage; its block goes to flash or is dropped.
    fn unstage_oldest(&mut self) {
        let full = !self.filling();
        let Some((key, stay)) = self.cache.stage.take_oldest() else {
            return;
        };
        let (disk, block) = disk_and_block(key);
        let freq = match self.cache.policy.leave(stay, full) {
            Place::Drop => None,
            Place::Put(freq) => Some(freq),
            Place::Compete => self.wins(stay, key).then(|| self.cache.policy.credit(stay)),
        };
        if let Some(freq) = freq
            && self.has_fill_room(disk, 1)
            && self.own_room(disk, 1)
        {
            let (data, crc) = self.cache.stage.oldest_data();
            let copy = CleanCopy {
                data: one_block(data),
                crcs: smallvec![crc],
                written: stay.written,
            };
            self.fill(disk, block, copy, freq);
        } else if let Some(d) = self.disk_mut(disk) {
            if stay.unused.is_some() {
                d.counters.prefetch_wasted += 1;
            } else {
                d.counters.fills_rejected += 1;
            }
        }
    }

    /// Moves a staged block, of which `data` is a copy, on to flash, because a client asked for it there.
    pub fn promote(&mut self, disk: DiskId, block: u64, data: &BufSlice) {
        if !self.admit(disk, block, 1, true) {
            return;
        }
        // The checksum of what the origin said: the copy may lie in memory that a guest can write.
        let Some((crc, stay)) = self.cache.stage.get(policy_key(disk, block)) else {
            return;
        };
        self.stage_forget(disk, block, block + 1);
        let copy = CleanCopy {
            data: one_block(data.bytes()),
            crcs: smallvec![crc],
            written: stay.written,
        };
        self.fill(disk, block, copy, 0);
    }

    /// Appends a clean run that no write holds. Blocks that are on flash or queued for it, because another read of them
    /// ended first, are left out.
    pub fn fill(&mut self, disk: DiskId, block: u64, copy: CleanCopy, freq: u8) {
        let count = copy.crcs.len() as u64;
        let queued = self.is_any_queued(disk, block, count);
        let twice = self.opts.faults.has(Fault::AppendTwice);
        let mut from = 0;
        while from < count {
            let filled = |i: &u64| !twice && self.is_filled(disk, block + i, queued);
            let to = (from..count).find(filled).unwrap_or(count);
            if from < to {
                let part = CleanCopy {
                    data: copy
                        .data
                        .sub(from as usize * BYTES, (to - from) as usize * BYTES),
                    crcs: Sums::from_slice(&copy.crcs[from as usize..to as usize]),
                    written: copy.written,
                };
                if let Some(d) = self.disk_mut(disk) {
                    d.counters.fills += to - from;
                }
                self.append_clean(disk, block + from, part, Why::Filled, freq);
            }
            from = to + 1;
        }
    }

    /// True if a copy of any of these blocks is queued for flash.
    pub fn is_any_queued(&self, disk: DiskId, block: u64, count: u64) -> bool {
        let d = self.disk(disk);
        d.is_some_and(|d| d.queued_run(block, block + count).is_some())
    }

    /// True if a block is on flash, or queued for it; `queued` is [`is_any_queued`](Self::is_any_queued) of its run.
    pub fn is_filled(&self, disk: DiskId, block: u64, queued: bool) -> bool {
        self.cache.index.get(Key::new(disk, block)).is_some()
            || queued && self.known(disk).copy_queued(block)
    }

    /// May a fill be appended at all: is there room, is the disk cached, is what the origin said
    /// durable there?
    pub fn has_fill_room(&self, disk: DiskId, count: u64) -> bool {
        let Some(d) = self.disk(disk) else {
            return false;
        };
        u64::from(self.flash.log.room()) >= count * 2
            && self.flash.takes_writes()
            && !self.quiescing
            && d.attached
            && !d.held
            && d.cfg.mode != Mode::Off
            && (d.origin.sync.is_guarded() || self.opts.faults.has(Fault::CacheUnguarded))
            && d.tickets.len() < FILLS_MAX
            && !self.keeps_out()
    }

    /// Somebody else who uses the flash is held up, and for more on it something there would have to go: what is read stays off it until he
    /// is not any more. What clients write takes the place it needs.
    fn keeps_out(&self) -> bool {
        self.destaging.others_wait && self.flash.free_to_stay() <= self.flash.free_target()
    }

    /// Is the disk within its maximum with `count` more blocks, if need be at the cost of others
    /// of its own?
    pub fn own_room(&mut self, disk: DiskId, count: u64) -> bool {
        let Some(d) = self.disk(disk) else {
            return true;
        };
        let max = d.cfg.max_bytes / 4096;
        if max == 0 || d.cached + count <= max {
            return true;
        }
        // Far above it, after it was lowered, it comes down with every fill.
        let more = count.min(d.excess());
        self.make_own_room(disk, count + more)
    }

    /// Policy's word on a run that has not been in the stage. What was `asked` for needs no
    /// merit, but a budget that is used up refuses it, too.
    pub fn deserves(&mut self, disk: DiskId, block: u64, asked: bool, written: bool) -> bool {
        let stay = Stay {
            freq: 0,
            covered: false,
            unused: None,
            written,
        };
        match self.cache.policy.leave(stay, !asked && !self.filling()) {
            Place::Drop => false,
            Place::Put(_) => true,
            Place::Compete => self.wins(stay, policy_key(disk, block)),
        }
    }

    /// Does a block deserve flash more than what has to go for it? If so, that has lost its place to
    /// it and is no rival of anybody else; if not, it stays the one to beat, for a while, as the log
    /// stays where it is while nobody gets in.
    fn wins(&mut self, stay: Stay, key: u64) -> bool {
        let rival = self.rival();
        let wins = rival.is_none_or(|rival| self.cache.policy.displaces(stay, key, rival));
        self.cache.rival_losses += 1;
        if wins || self.cache.rival_losses >= RIVAL_TRIES {
            self.cache.rival_at.1 += 1;
            self.cache.rival_losses = 0;
        }
        wins
    }

    /// The next block eviction would drop that has not lost its place. None if all nearby was used since it was
    /// written: then the log must go on, or nothing would ever leave it.
    fn rival(&mut self) -> Option<u64> {
        let (from, mut at) = self.cache.rival_at;
        let log = &self.flash.log;
        let mut left = RIVAL_SCAN;
        for seg in self.flash.cleaner.turns_from(from) {
            if seg != from {
                at = 0;
            }
            at = self.flash.sifted(seg).max(at);
            while at < log.slots_end() {
                let slot = self.cache.index.slot(seg * log.segment_slots + at);
                let goes = slot.is_some_and(|info| {
                    let verdict = self.cache.policy.evict(info.freq as u8);
                    !info.dirty && verdict == hearth_policy::Verdict::Drop
                });
                if let Some(info) = slot.filter(|_| goes) {
                    self.cache.rival_at = (seg, at);
                    return Some(policy_key(info.key.disk(), info.key.block()));
                }
                at += 1;
                left -= 1;
                if left == 0 {
                    self.cache.rival_at = (seg, at);
                    return None;
                }
            }
        }
        self.cache.rival_at = (u32::MAX, 0);
        None
    }

    /// Drops clean copies of blocks that do not have these checksums; see [`Engine::drop_unlike`](crate::Engine::drop_unlike).
    pub fn drop_unlike(&mut self, disk: DiskId, first: u64, right: &[u32]) {
        let end = first + right.len() as u64;
        let drops_dirty = self.opts.faults.has(Fault::DropUnlikeDirty);
        let Some(d) = self.disk_mut(disk) else {
            return;
        };
        d.cancel_fills(first, end);
        for (block, crc) in (first..end).zip(right) {
            let staged = self.cache.stage.get(policy_key(disk, block));
            if staged.is_some_and(|(its, _)| its != *crc) {
                self.stage_forget(disk, block, block + 1);
            }
            let index = &self.cache.index;
            let unlike = index.get(Key::new(disk, block)).is_some_and(|slot| {
                let clean = index.slot(slot).is_some_and(|s| !s.dirty);
                (clean || drops_dirty) && index.crc(slot) != *crc
            });
            if !unlike {
                continue;
            }
            self.forget_block(disk, block);
            // A record behind a newer one would void that.
            if self.flash.takes_writes() && !self.superseding(disk, block, block + 1) {
                self.record_drop(disk, block, 1);
            }
        }
    }

    /// Forgets what is staged of a range that is about to change or to be hidden.
    pub fn stage_forget(&mut self, disk: DiskId, start: u64, end: u64) {
        let before = self.cache.stage.unused();
        self.cache.stage.forget(disk, start, end);
        let wasted = before - self.cache.stage.unused();
        if wasted > 0
            && let Some(d) = self.disk_mut(disk)
        {
            d.counters.prefetch_wasted += wasted as u64;
        }
    }
}
