//! Everything but the flash device, so that the device can ask while it works.
//!
//! The device cleans its segments and replays its log by itself, and has to be told meanwhile what the
//! blocks on it are worth and what becomes of them. Who tells cannot hold the device, too: so this is the rest
//! of the [`Core`], lent out beside it. What it changes that the device keeps count of (a slot that is
//! filled, emptied, clean) is said by what it returns.

use crate::api::DiskId;
use crate::blocks::runset::RunSet;
use crate::cache::Cache;
use crate::cache::index::Key;
use crate::core::Core;
use crate::core::apply::Flash;
use crate::disk::Disk;
use crate::disk::ready::{Ready, Totals};
use crate::faults::{Fault, Faults};
use crate::flash::log::Gone;
use crate::request::Requests;

/// Why a disk must be there; see [`Core::known`].
pub(crate) const STAYS: &str = "a disk stays while anything of it does";

/// The engine without its flash device.
pub(crate) struct Rest<'a> {
    pub cache: &'a mut Cache,
    pub disks: &'a mut [Option<Box<Disk>>],
    pub ready: &'a mut Ready,
    pub totals: &'a Totals,
    pub reqs: &'a Requests,
    pub zero_runs: &'a mut u64,
    pub dirty_total: &'a mut u64,
    pub faults: Faults,
}

impl Core {
    /// The flash device, and everything else.
    pub fn apart(&mut self) -> (&mut Flash, Rest<'_>) {
        let rest = Rest {
            cache: &mut self.cache,
            disks: &mut self.disks,
            ready: &mut self.ready,
            totals: &self.totals,
            reqs: &self.reqs,
            zero_runs: &mut self.zero_runs,
            dirty_total: &mut self.dirty_total,
            faults: self.opts.faults,
        };
        (&mut self.flash, rest)
    }

    /// Takes a block out of the index; true if it was there.
    pub fn forget_block(&mut self, disk: DiskId, block: u64) -> bool {
        let (flash, mut rest) = self.apart();
        let gone = rest.forget_block(disk, block);
        if let Some(gone) = gone {
            flash.slot_gone(gone);
        }
        gone.is_some()
    }

    /// Nothing of a disk stays in the index, on stage or on record, dirty data included; what is lost or was refused stays listed.
    pub fn drop_all_of(&mut self, disk: DiskId) {
        let Some(d) = self.disk_mut(disk) else {
            return;
        };
        d.origin.intents.clear();
        let blocks = d.blocks.max(1 << 36);
        self.forget_range(disk, 0, blocks);
        self.stage_forget(disk, 0, u64::MAX);
        self.change_zeros(disk, RunSet::clear);
    }

    /// Takes every cached block of a range out of the index; true if there was one.
    pub fn forget_range(&mut self, disk: DiskId, start: u64, end: u64) -> bool {
        self.forget_copies(disk, start, end) > 0
    }

    /// The same; tells how many there were.
    pub fn forget_copies(&mut self, disk: DiskId, start: u64, end: u64) -> u64 {
        let mut count = 0;
        let (flash, mut rest) = self.apart();
        rest.forget_range(disk, start, end, |gone| {
            count += 1;
            flash.slot_gone(gone);
        });
        count
    }

    /// Takes the clean copies of a range out of the index; their blocks.
    pub fn forget_clean(&mut self, disk: DiskId, start: u64, end: u64) -> Vec<u64> {
        let index = &self.cache.index;
        let clean = |slot| index.slot(slot).filter(|copy| !copy.dirty);
        let blocks: Vec<u64> = match end - start <= u64::from(index.slots()) {
            true => (start..end)
                .filter(|block| index.get(Key::new(disk, *block)).and_then(clean).is_some())
                .collect(),
            // A huge range: cheaper to look at every slot than at every block.
            false => (0..index.slots())
                .filter_map(|slot| Some(clean(slot)?.key))
                .filter(|key| key.disk() == disk && (start..end).contains(&key.block()))
                .map(Key::block)
                .collect(),
        };
        for block in &blocks {
            self.forget_block(disk, *block);
        }
        blocks
    }

    /// Keeps "dirty for" honest.
    pub fn note_clean(&mut self, disk: DiskId) {
        self.apart().1.note_clean(disk);
    }

    /// Has a write for any of these blocks put a newer record into the append queue? Then
    /// nothing about the old content may be appended any more.
    pub fn superseding(&self, disk: DiskId, start: u64, end: u64) -> bool {
        superseding(self.known(disk), &self.reqs, start, end)
    }

    /// Changes a disk's set of zeros, keeping count of the runs of all.
    pub fn change_zeros(&mut self, disk: DiskId, change: impl FnOnce(&mut RunSet)) {
        self.apart().1.change_zeros(disk, change);
    }

    /// The origin has zeros durably.
    pub fn zeros_told(&mut self, disk: DiskId, block: u64, count: u64) {
        self.apart().1.zeros_told(disk, block, count);
    }
}

fn superseding(d: &Disk, reqs: &Requests, start: u64, end: u64) -> bool {
    d.locks.meeting(start, end).any(|l| {
        let to = reqs[l.req].write().superseded_to(l.start, l.end);
        l.start < end && start < to
    })
}

impl Rest<'_> {
    pub fn disk(&self, id: DiskId) -> Option<&Disk> {
        self.disks.get(usize::from(id))?.as_deref()
    }

    pub fn disk_mut(&mut self, id: DiskId) -> Option<&mut Disk> {
        self.disks.get_mut(usize::from(id))?.as_deref_mut()
    }

    /// See [`Core::known`].
    pub fn known(&self, id: DiskId) -> &Disk {
        self.disk(id).expect(STAYS)
    }

    pub fn known_mut(&mut self, id: DiskId) -> &mut Disk {
        self.disk_mut(id).expect(STAYS)
    }

    /// See [`Core::superseding`].
    pub fn superseding(&self, disk: DiskId, start: u64, end: u64) -> bool {
        superseding(self.known(disk), self.reqs, start, end)
    }

    /// Takes a block out of the index, if it is there.
    pub fn forget_block(&mut self, disk: DiskId, block: u64) -> Option<Gone> {
        let key = Key::new(disk, block);
        let slot = self.cache.index.get(key)?;
        let info = self.cache.index.slot(slot);
        let dirty = info.expect("the index leads to what is there").dirty;
        self.cache.index.remove(key);
        let stays = self.faults.has(Fault::CachedStaysCounted);
        let d = self.known_mut(disk);
        d.cached -= u64::from(!stays);
        if dirty {
            d.no_longer_dirty(block);
            if let Some(order) = d.order.as_deref_mut() {
                order.forget(block);
            }
        }
        let owed = dirty && !d.is_promised();
        if dirty {
            *self.dirty_total -= u64::from(owed);
            self.note_clean(disk);
        }
        Some(Gone {
            disk,
            block,
            slot,
            dirty,
        })
    }

    /// Takes every cached block of a range out of the index, and tells of each.
    pub fn forget_range(&mut self, disk: DiskId, start: u64, end: u64, mut tell: impl FnMut(Gone)) {
        // A record of all of a disk comes in many parts, each of which would look at every slot.
        if self.known(disk).cached == 0 {
            return;
        }
        if end - start <= u64::from(self.cache.index.slots()) {
            for block in start..end {
                if let Some(gone) = self.forget_block(disk, block) {
                    tell(gone);
                }
            }
        } else {
            // A huge range: cheaper to look at every slot than at every block.
            for slot in 0..self.cache.index.slots() {
                if let Some(info) = self.cache.index.slot(slot)
                    && info.key.disk() == disk
                    && (start..end).contains(&info.key.block())
                    && let Some(gone) = self.forget_block(disk, info.key.block())
                {
                    tell(gone);
                }
            }
        }
    }

    /// Keeps "dirty for" honest.
    pub fn note_clean(&mut self, disk: DiskId) {
        let d = self.known_mut(disk);
        if !d.is_dirty() {
            d.dirty_since_ns = 0;
            d.origin.destage.trouble = None;
        }
    }

    /// See [`Core::change_zeros`].
    pub fn change_zeros(&mut self, disk: DiskId, change: impl FnOnce(&mut RunSet)) {
        let d = self.known_mut(disk);
        let before = d.zero.run_count();
        change(&mut d.zero);
        let after = d.zero.run_count();
        *self.zero_runs = *self.zero_runs - before + after;
    }

    /// See [`Core::zeros_told`].
    pub fn zeros_told(&mut self, disk: DiskId, block: u64, count: u64) {
        self.change_zeros(disk, |zero| zero.remove_range(block, block + count));
        let d = self.known_mut(disk);
        d.solid.remove_range(block, block + count);
    }
}
