//! What went with a lost device is dropped from the index ([`crate::flash::gone`]).

use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::flash::evict::Contents;
use crate::paths::{Path, took};

impl Core {
    /// Some of it, while the pool is served.
    pub fn drop_some_gone(&mut self) {
        for slot in self.flash.next_dropped().into_iter().flatten() {
            if self.flash.is_gone(slot) || self.flash.is_behind(slot) {
                self.drop_gone(slot);
            }
        }
    }

    /// All of it, at a start.
    pub fn drop_all_gone(&mut self) {
        self.flash.note_gone();
        if !self.flash.may_be_gone() {
            return;
        }
        for slot in 0..self.cache.index.slots() {
            if self.flash.is_gone(slot) || self.flash.is_behind(slot) {
                self.drop_gone(slot);
            }
        }
    }

    /// A clean block was put where nothing is any more.
    pub fn drop_if_gone(&mut self, disk: u16, block: u64, slot: SlotNo) {
        if self.flash.is_gone(slot) && self.cache.index.get(Key::new(disk, block)) == Some(slot) {
            self.drop_gone(slot);
        }
    }

    fn drop_gone(&mut self, slot: SlotNo) {
        let Some(info) = self.cache.index.slot(slot).filter(|info| !info.dirty) else {
            return;
        };
        // A copy that is on its way elsewhere would come back in a crash. And until it is durable that a block is clean,
        // that would be a dirty one.
        let cleaned = self.known(info.key.disk()).cleaned_ord;
        let moves = self.cache.index.slot_mark(slot);
        if moves || !self.flash.is_durable(cleaned) {
            // Where it is on its way to has a number already.
            let until = if moves {
                self.flash.log.next_ord
            } else {
                cleaned
            };
            self.flash.pass_over(slot, until);
            return;
        }
        took(Path::CleanGone);
        if self.cache.index.get(info.key) == Some(slot) {
            self.forget_block(info.key.disk(), info.key.block());
            return;
        }
        let (flash, mut rest) = self.apart();
        let gone = rest.drop_orphan(slot);
        flash.slot_gone(gone);
    }
}
