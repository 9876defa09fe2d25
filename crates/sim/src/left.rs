//! What a start leaves of disks: not all that flash holds of them counts.

use crate::world::{Outcome, World, trace};
use hearth_engine::api::{Home, Mode};

impl World<'_> {
    /// After a crash nothing is left of scratch disks. After a stop that was cut off, or left no checkpoint, the
    /// subject says whether it was one.
    pub(crate) fn drop_scratch(&mut self) -> Outcome {
        let dropped = self.subject()?.dropped();
        for index in 0..self.disks.len() {
            let (id, uid) = (self.disks[index].config.id, self.disks[index].uid);
            let scratch = self.disks[index].config.home == Home::Scratch;
            let says = dropped.contains(&id);
            if says && !scratch {
                return Err(format!("disk {id} was dropped, and is no scratch disk"));
            }
            if scratch && (self.unclean || says) {
                trace!(self, "disk {id} is scratch: nothing is left of it");
                self.model.clear(uid);
                self.disks[index].hurt.clear();
                self.disks[index].accepted.clear();
            }
        }
        self.unclean = false;
        Ok(())
    }

    /// What flash holds of a disk whose origin went on without it does not count. What its origin never
    /// got is lost then, and nothing else.
    pub(crate) fn drop_distrusted(&mut self, index: usize) -> Outcome {
        if !std::mem::take(&mut self.disks[index].distrusted) || self.disks[index].homeless() {
            return Ok(());
        }
        let found = self.subject()?.owed(self.disks[index].config.id);
        let now = self.model.now();
        let disk = &mut self.disks[index];
        let owed = std::mem::take(&mut disk.owed);
        let lost: Vec<u64> = found.into_iter().filter(|b| owed.contains(b)).collect();
        disk.accept(lost.iter().copied(), now);
        disk.hurt.clear();
        disk.dirty_once = disk.config.mode == Mode::WriteBack;
        trace!(
            self,
            "disk {} was passed by its origin; lost are {lost:?}", self.disks[index].config.id
        );
        self.forget(index)
    }
}
