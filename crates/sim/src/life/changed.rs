//! Origins that were written by something else while no daemon served them, and origins that are newer than flash that
//! was restored from an image of the host.
//!
//! What the daemon does then ([`hearth_engine::Engine::set_verified`]) is done here as well: the disk is served from its
//! origin, later its clean copies are compared with it, and dropped if one differs. All of them are compared: how many a
//! sample needs is no question of the engine.

use crate::content::{BLOCK, PER_BLOCK, SECTOR, Value, fill, stamp};
use crate::paths::Event;
use crate::world::{Disk, Outcome, World, trace};
use hearth_io::checksum::crc32c;

/// One step in so many a comparison ends.
const STEPS_PER_CHECK: u64 = 100;
/// Longest comparison, in nanoseconds.
const CHECK_NS: u64 = 60_000_000_000;
/// Most blocks that something else writes.
const CHANGED_MAX: u64 = 12;

impl World<'_> {
    /// Before a start: the origin of a disk may have changed, and the disk does not know.
    pub(super) fn change_origin(&mut self, index: usize) -> Outcome {
        let disk = &self.disks[index];
        if self.profile.changed_origins == 0 || disk.homeless() || disk.origin.is_mirror() {
            return Ok(());
        }
        let (id, uid, size) = (disk.config.id, disk.uid, disk.config.size);
        // What only flash has belongs to the origin as it was: that is a question to the owner.
        let owed = !self.subject()?.owed(id).is_empty();
        let blocks = size / BLOCK as u64;
        if !owed && blocks > 0 && self.rng.chance(self.profile.changed_origins, 100) {
            self.paths.note(Event::OriginChanged);
            for _ in 0..=self.rng.below(CHANGED_MAX) {
                let block = self.rng.below(blocks);
                trace!(self, "block {block} of #{uid} is written by something else");
                let first = block * PER_BLOCK;
                let write = self.model.begin_write(uid, first, PER_BLOCK, false, true);
                let mut content = [0; BLOCK];
                for (sector, bytes) in (first..).zip(content.chunks_mut(SECTOR as usize)) {
                    fill(Value::Stamp(stamp(uid, write, sector)), bytes);
                }
                if let Some(origin) = self.disks[index].origin.one() {
                    origin.push(block as usize, 0, content);
                    origin.flush_now();
                }
                self.model.end_write(write, true);
            }
        }
        let disk = &mut self.disks[index];
        (disk.unverified, disk.dropping, disk.compared_by) = (true, false, None);
        self.subject()?.set_verified(id, false);
        Ok(())
    }

    /// True if origins have everything of all disks.
    pub(super) fn are_whole(&self) -> bool {
        let subject = self.profile.older_flash > 0;
        let subject = self.subject.as_ref().filter(|_| subject);
        subject.is_some_and(|s| self.known.iter().all(|known| s.owed(known.id).is_empty()))
    }

    /// After the end of a life, if origins have everything (`is_whole`): flash may be put back to the end of an earlier one.
    /// Nothing is lost by that, and copies of blocks that were written since are stale. The disks must be the same,
    /// because flash records them, too. The earlier life ended in order (`is_clean`): after a crash, blocks that were written
    /// back are dirty again and look like blocks that the origin lacks.
    pub(super) fn put_flash_back(&mut self, is_whole: bool, is_clean: bool) {
        if !is_whole || self.disks.iter().any(Disk::homeless) {
            return;
        }
        let goes_back = self.flash.chance(self.profile.older_flash);
        match self.earlier.take() {
            Some((disks, images)) if goes_back && disks == self.known => {
                trace!(self, "FLASH IS OLDER");
                self.paths.note(Event::FlashOlder);
                self.flash.come_back_with(&images);
            }
            _ if is_clean => self.earlier = Some((self.known.clone(), self.flash.images())),
            earlier => self.earlier = earlier,
        }
    }

    /// Compares the clean copies of disks with their origins, after a while or when nothing else is to be done.
    pub(crate) fn compare_copies(&mut self, at_once: bool) -> Outcome {
        if self.subject.is_none() || self.profile.changed_origins == 0 {
            return Ok(());
        }
        let now = self.clock.now();
        for index in 0..self.disks.len() {
            let disk = &mut self.disks[index];
            if !disk.unverified || !disk.attached() {
                continue;
            }
            let end = *disk.compared_by.get_or_insert(now + CHECK_NS);
            if at_once || disk.dropping || now >= end || self.rng.chance(1, STEPS_PER_CHECK) {
                self.compare_copies_of(index)?;
            }
        }
        Ok(())
    }

    fn compare_copies_of(&mut self, index: usize) -> Outcome {
        let (id, size) = (self.disks[index].config.id, self.disks[index].config.size);
        let sums = self.subject()?.clean_sums(id, 0, size);
        let origin = self.disks[index].origin.device();
        let differs = origin.is_some_and(|origin| {
            let differs = |(block, sum, _): &(u64, u32, bool)| {
                let at = *block as usize;
                at < origin.blocks() && crc32c(&origin.visible_block(at)) != *sum
            };
            sums.iter().any(differs)
        });
        trace!(
            self,
            "copies of disk {id} are compared, different: {differs}"
        );
        if differs || self.disks[index].dropping {
            self.disks[index].dropping = true;
            if !self.subject()?.drop_clean(id)? {
                // As the daemon wakes the threads that have the engine.
                return self.tick();
            }
            self.paths.note(Event::CopiesOfChangedDropped);
        }
        trace!(self, "copies of disk {id} count again, dropped: {differs}");
        let disk = &mut self.disks[index];
        (disk.unverified, disk.dropping, disk.compared_by) = (false, false, None);
        self.subject()?.set_verified(id, true);
        self.tick()
    }
}
