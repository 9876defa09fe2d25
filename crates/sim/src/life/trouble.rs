//! What is done to devices while a world lives: they fail, rot, fill up and die.

use crate::device::Faults;
use crate::origin::Origin;
use crate::paths::Event;
use crate::world::{Outcome, World, trace};

impl World<'_> {
    pub(super) fn hurt(&mut self, on: bool) -> Outcome {
        let p = &self.profile;
        if !on {
            self.flash.set_faults(&Faults::default());
            for disk in &mut self.disks {
                disk.origin.heal();
            }
            self.release_hung();
            return self.gather_due();
        }
        self.flash.set_faults(&Faults {
            read_eio: p.flash_read_eio,
            write_eio: p.flash_write_eio,
            flush_eio: p.flash_write_eio * 4,
            no_space: p.flash_write_eio / 2,
            slow: p.slow,
            hang: p.slow / 10 + p.flash_hang,
            overdue: p.overdue,
            bad_places: self.bad_places.clone(),
            ..Faults::default()
        });
        for disk in &mut self.disks {
            let mut bad_ranges = Vec::new();
            let mut fail_op = None;
            if p.origin_eio > 0 && self.rng.chance(1, 4) {
                let at = self.rng.below(disk.config.size) / 4096 * 4096;
                bad_ranges.push(at..at + self.rng.between(1, 8) * 4096);
            }
            if p.origin_eio > 0 && self.rng.chance(1, 4) {
                fail_op = Some(self.rng.below(100));
            }
            let device = match &mut disk.origin {
                Origin::One(device) => device,
                Origin::Mirror(mirror) => {
                    mirror.hurt();
                    continue;
                }
            };
            device.faults = Faults {
                read_eio: p.origin_eio,
                write_eio: p.origin_eio,
                flush_eio: p.origin_eio * 4,
                no_space: p.origin_eio / 3,
                slow: p.slow,
                hang: p.slow / 10 + p.hang,
                overdue: p.overdue,
                bad_ranges,
                fail_op,
                ..Faults::default()
            };
        }
        Ok(())
    }

    /// What mirrors have to do since they were told something.
    pub(super) fn gather_due(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            self.with_mirror(index, |m, now, cache| m.act(now, cache))?;
        }
        Ok(())
    }

    /// Something may happen to legs of mirrors.
    pub(super) fn trouble_legs(&mut self) -> Outcome {
        if self.profile.leg_trouble == 0 || !self.rng.chance(self.profile.leg_trouble, 1000) {
            return Ok(());
        }
        let index = self.rng.below(self.disks.len() as u64) as usize;
        self.with_mirror(index, |m, now, cache| m.trouble(now, cache))?;
        Ok(())
    }

    /// As the daemon does: a disk that is whole twice in a row is noted as such beside the flash.
    pub(super) fn note_whole(&mut self, at_rest: bool) -> Outcome {
        if self.profile.flash_lost == 0 || !at_rest && !self.rng.chance(1, 40) {
            return Ok(());
        }
        for index in 0..self.disks.len() {
            let id = self.disks[index].config.id;
            let whole = !self.disks[index].homeless() && self.subject()?.whole(id);
            let disk = &mut self.disks[index];
            if whole && (disk.whole_before || at_rest) {
                disk.maybe_dirty = false;
            }
            disk.whole_before = whole;
        }
        Ok(())
    }

    pub(super) fn flash_dies(&mut self) {
        trace!(self, "THE FLASH DEVICE DIES");
        self.flash.kill();
        if self.flash.are_twice() {
            return;
        }
        self.flash_failed = self.model.now();
        for index in 0..self.disks.len() {
            if self.disks[index].dirty_once {
                let blocks = self.model.written_blocks(self.disks[index].uid);
                self.disks[index].hurt.extend(blocks);
            }
        }
    }

    /// Somebody discards all of it under the pool. What is written from then on is there.
    pub(super) fn flash_is_erased(&mut self) {
        trace!(self, "THE FLASH DEVICE IS ERASED");
        self.paths.note(Event::Erased);
        self.flash.erase();
        self.erased = true;
        self.flash_failed = self.model.now();
        for index in 0..self.disks.len() {
            if self.disks[index].dirty_once {
                let blocks = self.model.written_blocks(self.disks[index].uid);
                self.disks[index].hurt.extend(blocks);
            }
        }
    }

    /// A block of flash that holds a guest's: its index, and whose that is. Metadata is kept twice or
    /// verified, and not hurt here.
    pub(super) fn some_guests_block(&mut self) -> Option<(usize, (usize, u64))> {
        let index = self.rng.below(self.flash.blocks() as u64) as usize;
        (index..self.flash.blocks().min(index + 64)).find_map(|i| Some((i, self.owner_of(i)?)))
    }

    /// As long as this life lasts.
    pub(super) fn sector_goes_bad(&mut self) {
        if let Some((index, (disk, block))) = self.some_guests_block() {
            trace!(
                self,
                "flash block {index} cannot be read any more, holding block {block} of #{}",
                self.disks[disk].uid
            );
            self.flash.block_goes_bad(index);
        }
    }

    pub(super) fn rot(&mut self) {
        if let Some((index, (disk, block))) = self.some_guests_block() {
            trace!(
                self,
                "ROT in flash block {index}, holding block {block} of #{}", self.disks[disk].uid
            );
            self.flash.rot(index);
            if self.disks[disk].dirty_once && !self.flash.are_twice() {
                self.disks[disk].hurt.insert(block);
            }
        }
    }
}
