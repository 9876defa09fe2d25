//! What is done to devices while a world lives: they fail, rot, fill up and die.

use crate::device::Faults;
use crate::world::{World, trace};

impl World<'_> {
    pub(super) fn hurt(&mut self, on: bool) {
        let p = &self.profile;
        if !on {
            self.flash.set_faults(&Faults::default());
            for disk in &mut self.disks {
                disk.origin.faults = Faults::default();
            }
            self.release_hung();
            return;
        }
        self.flash.set_faults(&Faults {
            read_eio: p.flash_read_eio,
            write_eio: p.flash_write_eio,
            flush_eio: p.flash_write_eio * 4,
            no_space: p.flash_write_eio / 2,
            slow: p.slow,
            hang: p.slow / 10,
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
            disk.origin.faults = Faults {
                read_eio: p.origin_eio,
                write_eio: p.origin_eio,
                flush_eio: p.origin_eio * 4,
                no_space: p.origin_eio / 3,
                slow: p.slow,
                hang: p.slow / 10 + p.hang,
                bad_ranges,
                fail_op,
                ..Faults::default()
            };
        }
    }

    pub(super) fn flash_dies(&mut self) {
        trace!(self, "THE FLASH DEVICE DIES");
        self.flash.kill();
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
            if self.disks[disk].dirty_once {
                self.disks[disk].hurt.insert(block);
            }
        }
    }
}
