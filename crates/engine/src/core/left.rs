//! What the disks do when flash fails them: a block that cannot be read, or the device given up.
//!
//! Once the device counts as failed, clean data comes from the origins, writes go to the origins,
//! and what is dirty is read from flash as long as it answers. The disks go on (invariant 7).
//!
//! A dirty block that a failed device does not give back, not even when read alone, is listed as
//! lost ([`Core::strike`]), so that somebody can learn of it and accept it. The destager tries all
//! of them, whether or not a guest asks. While the device counts as sound the next read may succeed, so
//! it takes several, seconds apart; but one bad sector must not hold up eviction, nor a flush of its
//! disk, for ever.
//!
//! Flash may also be left although it gives back what it holds: the file system under it is full, or
//! its file was removed under us. The disks then go on in the same way, and the destager empties it.

use crate::api::{DiskId, Effects, FlashFault};
use crate::cache::index::SlotNo;
use crate::core::Core;
use crate::core::apply::{Apply, Purpose, Then};
use crate::core::route::FlashWaiter;
use crate::faults::Fault;
use crate::flash::fail::Promise;
use crate::flash::log::Item;
use crate::paths::{Path, took};

/// How a read of flash failed with an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unread {
    /// It was of this one block; otherwise any block of the run may be the culprit.
    pub alone: bool,
}

impl Core {
    /// A dirty block could not be read from flash. True if it is worth reading once more at once,
    /// alone: a single failure is nothing that a guest should hear of. On a failed device the second time it is lost. So a
    /// block costs at most two failed reads and one more for the run it was first read in.
    pub fn strike(
        &mut self,
        disk: DiskId,
        block: u64,
        slot: SlotNo,
        unread: Unread,
        now: u64,
    ) -> bool {
        let sound = self.flash.takes_writes();
        let hasty = self.opts.faults.has(Fault::LoseTooSoon);
        let d = self.known_mut(disk);
        d.doubtful.insert(block);
        if !unread.alone {
            return true;
        }
        if sound {
            let first = !d.refusals.contains_key(&block);
            let last = d.refusals.entry(block).or_default().note(now);
            if last || hasty {
                took(Path::LostOnSoundFlash);
                self.lose(disk, block, slot);
            }
            return first && !(last || hasty);
        }
        if d.refused.insert(block) {
            return true;
        }
        if self.opts.faults.has(Fault::HideUnreadable) {
            self.cache.index.set_lost(slot);
            return false;
        }
        self.lose(disk, block, slot);
        false
    }

    /// Do writes wait while lost blocks, which no origin ever gets, are most of what may be dirty?
    pub fn lost_take_the_room(&self) -> bool {
        if self.reqs.stalled.is_empty() {
            return false;
        }
        let disks = self.disks.iter().flatten().filter(|d| !d.is_promised());
        let lost: u64 = disks.map(|d| d.lost.len()).sum();
        lost * 2 > self.dirty_room(self.dirty_high_percent())
    }

    /// Flash was given up: what had not reached it goes to the origins, and nobody waits for it.
    pub fn flash_given_up(
        &mut self,
        unsent: Vec<Item<Purpose>>,
        waiters: Vec<FlashWaiter>,
        now: u64,
        fx: &mut Effects,
    ) {
        let mut requests = Vec::new();
        for item in unsent {
            if let Apply::Move { old, .. } = item.token.apply {
                // Not moved after all: the destager may have it.
                for i in 0..item.count {
                    self.cache.index.set_mark(old + item.before + i, false);
                }
            }
            match item.token.then {
                _ if !item.ends => {}
                Then::Request(id) => requests.push(id),
                Then::Ticket { .. } if self.opts.faults.has(Fault::KeepGivenUpCopies) => {}
                Then::Ticket { disk, ticket } => {
                    let d = self.known_mut(disk);
                    d.drop_ticket(ticket);
                }
                Then::Moved => self.flash.moved(),
                _ => {}
            }
        }
        requests.extend(self.reqs.stalled.drain(..));
        requests.extend(self.reqs.stalled_through.drain(..));
        requests.sort_unstable();
        requests.dedup();
        for who in waiters {
            self.flash_waited(who, true, now, fx);
        }
        for id in requests {
            // They hold their ranges: nobody else has ended them.
            self.divert(id, now, fx);
        }
        for disk in self.disk_ids() {
            self.end_order(disk);
            self.wake_clean_waiters(disk, now, fx);
        }
        self.everyone_is_ready();
    }

    /// What a flush may say of a disk that has something dirty on flash which is written no more.
    pub fn promise_of_left_flash(&self, disk: DiskId) -> Promise {
        if self.disk(disk).is_none_or(|d| !d.lost.is_empty()) {
            return Promise::None;
        }
        // What lives on flash that is going has no origin that would ever have it all.
        let homeless = self.disk(disk).is_some_and(|d| !d.has_origin());
        if homeless && self.flash.given_up() == Some(FlashFault::Leaving) {
            return Promise::None;
        }
        self.flash.promise()
    }

    /// Asks again for flushes that had to wait.
    pub fn retry_leaving_flushes(&mut self, now: u64, fx: &mut Effects) {
        for id in std::mem::take(&mut self.reqs.leaving_flushes) {
            self.start_flush(id, now, fx);
        }
    }

    /// That flash was given up is noted, or will not be in time: who waited for that goes on.
    pub fn wake_mark_waiters(&mut self, now: u64, fx: &mut Effects) {
        for id in std::mem::take(&mut self.reqs.mark_waiters) {
            self.go_through(id, now, fx);
        }
        for job in std::mem::take(&mut self.destaging.unnoted) {
            self.destage_write(job, now, fx);
        }
    }
}
