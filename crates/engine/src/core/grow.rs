//! Disks that grow.
//!
//! The last block of a disk whose size is no multiple of 4 KiB is cached with zeros behind its end.
//! Once the disk is larger these zeros are wrong: the origin has its own bytes there. So every copy of
//! that block is made void *before* the disk is larger, and durably: who stores the new size (the
//! registry) does so as soon as [`Engine::set_size`] says that the disk has grown, and after a power
//! cut nothing else would tell that the copy in the log is padded. An evicted copy counts, too: until
//! its segment is free a crash brings it back.

use crate::api::{DISK_MAX, DiskId};
use crate::cache::index::Key;
use crate::core::Core;
use crate::core::route::FlashWaiter;
use crate::engine::{ControlError, Engine};
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::origin::progress::Written;
use hearth_io::BLOCK;

impl Engine {
    /// The origin grew, and the disk with it. [`ControlError::Busy`] asks to be called again a little
    /// later: the copy of an odd last block is not void on flash yet, or the block is in use.
    pub fn set_size(&self, id: DiskId, size: u64) -> Result<(), ControlError> {
        let mut core = self.core();
        let hits = core.shared.shut(id);
        let result = core.set_size(id, size, hits);
        core.publish(id);
        result
    }

    /// Before a disk that is not attached is stored with a new size: makes the clean copy of an odd last
    /// block void. Busy as in [`set_size`](Self::set_size). A dirty copy is the guest's and stays.
    pub fn void_padding(&self, id: DiskId, size: u64) -> Result<(), ControlError> {
        let mut core = self.core();
        let d = core.disk(id).ok_or(ControlError::NoDisk)?;
        let last = d.blocks.saturating_sub(1);
        let grows = d.cfg.size % BLOCK != 0 && size > d.cfg.size && d.has_origin();
        if !grows || d.range_dirty(last, last + 1) || core.padding_is_void(id) {
            return Ok(());
        }
        Err(ControlError::Busy)
    }
}

impl Core {
    fn set_size(&mut self, id: DiskId, size: u64, hits: u64) -> Result<(), ControlError> {
        let d = self.disk(id).ok_or(ControlError::NoDisk)?;
        if size < d.cfg.size || size > DISK_MAX {
            return Err(ControlError::Size);
        }
        let (old, blocks) = (d.cfg.size, d.blocks);
        if size != old {
            // What comes to it is not on flash.
            self.stop_holding(id);
        }
        let d = self.disk(id).ok_or(ControlError::NoDisk)?;
        // A disk that lives on flash grows by zeros, which is what is behind its end.
        let odd = old % BLOCK != 0 && size != old && d.has_origin();
        // A fill or read ahead under way carries the padding, too, and belongs to no request.
        let filling = d.tickets.iter().any(|t| t.end >= blocks);
        let destaged = d.origin.destage.written.iter().any(|w| match *w {
            Written::Data { block, .. } => block + 1 == blocks,
            Written::Zero { block, count } => block + count == blocks,
        });
        let dirty = d.range_dirty(blocks - 1, blocks);
        let busy = d.in_flight + hits > 0 || filling || d.destaging(blocks - 1, blocks);
        let waits = !self.opts.faults.has(Fault::GrowWhileDirty);
        if odd && waits && (dirty || destaged || busy) {
            // Its padding must not be written over what the origin grew by.
            if let Some(d) = self.disk_mut(id).filter(|_| dirty) {
                d.origin.destage.urgent.insert(blocks - 1);
                self.ready.touch(id);
            }
            return Err(ControlError::Busy);
        }
        if odd {
            self.stage_forget(id, blocks - 1, blocks);
            if !self.padding_is_void(id) && !self.opts.faults.has(Fault::GrowEarly) {
                return Err(ControlError::Busy);
            }
        }
        self.alter(id, |d| d.resize(size));
        Ok(())
    }

    /// True if every copy of the last, incomplete block is void and a crash cannot bring one back. If one could,
    /// begins to make them void.
    fn padding_is_void(&mut self, id: DiskId) -> bool {
        let Some(d) = self.disk(id) else { return true };
        let (last, voiding) = (d.blocks.saturating_sub(1), d.voiding);
        let cached = self.forget_block(id, last);
        if !self.flash.takes_writes() {
            // Nothing clean on it is believed again.
            return true;
        }
        match voiding.filter(|_| !cached) {
            Some(ord) if self.flash.is_durable(ord) => return true,
            Some(_) => {}
            None => {
                let ord = self.record_drop(id, last, 1);
                if let Some(d) = self.disk_mut(id) {
                    d.voiding = Some(ord);
                }
                self.flash
                    .tell_when_durable(Until::Ord(ord), FlashWaiter::Nobody);
            }
        }
        self.flash.log.urgent = true;
        false
    }

    /// A disk is attached with `size` bytes, perhaps more than it had: drops the clean copy of an odd
    /// last block, whose tail was padding. Who attaches has seen to it that this is durable.
    pub fn drop_padding(&mut self, id: DiskId, size: u64) {
        let Some(d) = self.disk(id) else { return };
        let (old, last) = (d.cfg.size, d.blocks.saturating_sub(1));
        let slot = self.cache.index.get(Key::new(id, last));
        let clean = slot
            .and_then(|s| self.cache.index.slot(s))
            .is_some_and(|s| !s.dirty);
        if old % BLOCK != 0 && size > old && clean {
            self.forget_block(id, last);
            self.record_drop(id, last, 1);
            self.flash.log.urgent = true;
        }
    }
}

impl Core {
    /// A disk is attached with so many blocks: what the log says of blocks behind its end is nonsense,
    /// whoever wrote it there, and would be written to the origin for ever.
    pub fn drop_beyond(&mut self, id: DiskId, blocks: u64) {
        self.change_zeros(id, |zero| zero.remove_range(blocks, u64::MAX));
        let Some(d) = self.disk_mut(id) else { return };
        let beyond: Vec<u64> = d.dirty.range(blocks, u64::MAX).collect();
        for block in beyond {
            self.forget_block(id, block);
        }
    }
}
