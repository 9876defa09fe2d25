//! Getting out of a log without room ([`crate::flash::rescue`]): what the cache and the disks do for it.
//!
//! Nothing is moved any more: of the oldest segment, clean blocks are dropped and dirty ones destaged,
//! and intents are given up, so that nothing in it has to be logged again.

use crate::api::{DiskId, Effects};
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::core::apply::{Apply, Then};
use crate::faults::Fault;
use crate::paths::{Path, took};

impl Core {
    /// Prepares a starved log to be emptied from its oldest segment. True while that has to wait.
    pub fn rescue_step(&mut self, now: u64, fx: &mut Effects) -> bool {
        // Both are about to write the superblock.
        if self.flash.is_rescuing() || self.flash.is_losing() {
            return true;
        }
        if !self.flash.starved() || self.opts.faults.has(Fault::StarveForever) {
            return self.flash.starved();
        }
        if self.flash.is_emptying() {
            // What lies aside is needed.
            self.flash.end_emptying();
            return false;
        }
        self.cancel_moves();
        self.flash.want_clean();
        if self.give_up_orders() {
            took(Path::OrderGivenUp);
            self.flash.store_floor();
            self.route_flash(now, fx);
            return true;
        }
        if self.flash.oldest_stays() {
            self.flash.fail(now);
            self.route_flash(now, fx);
            return true;
        }
        let Some(seg) = self.flash.oldest_waits() else {
            return false;
        };
        // It is empty already, but what was to be said again has no room.
        let (flash, rest) = self.apart();
        if flash.needs_nothing_said(seg, &rest) && !self.give_up_intents(seg, now, fx) {
            took(Path::OldestWaitsNoMore);
            self.flash.waits_no_more(seg);
            self.route_flash(now, fx);
        }
        true
    }

    /// Segment `seg` goes without what it says being logged again: makes intents needless, if there are any, for
    /// the floor of clean copies rises. False if there are none. Regions being written get new
    /// ones, for what is cached from now on; those not yet durable stay, somebody waits for them.
    pub fn give_up_intents(&mut self, seg: u32, now: u64, fx: &mut Effects) -> bool {
        let any = self
            .disks
            .iter()
            .flatten()
            .any(|d| !d.origin.intents.is_empty());
        if !any && !self.flash.is_closing() {
            return false;
        }
        took(Path::CleanFloorRaised);
        self.cancel_fills();
        let mut again = Vec::new();
        for d in self.disks.iter_mut().flatten() {
            if !d.origin.intents.is_empty() {
                took(Path::IntentGivenUp);
            }
            // What is cached from now on has no intent that says whether the origin flushed it.
            d.origin.sync.unguard();
            let regions = d.origin.intents.give_up();
            again.extend(regions.into_iter().map(|region| (d.cfg.id, region)));
        }
        for (disk, region) in again {
            self.record_intent(disk, region);
        }
        self.everyone_is_ready();
        self.flash.raise_floor(seg);
        self.route_flash(now, fx);
        true
    }

    /// What was to be moved stays where it is: there is no place for it.
    fn cancel_moves(&mut self) {
        if self.flash.moving() == 0 {
            return;
        }
        let mut moves: Vec<(SlotNo, u32, bool, DiskId)> = Vec::new();
        self.flash.log.queue.retain(|item| {
            let Apply::Move { old, .. } = item.token.apply else {
                return true;
            };
            let counts = item.ends && matches!(item.token.then, Then::Moved);
            moves.push((old + item.before, item.count, counts, item.disk));
            false
        });
        for (old, count, counts, disk) in moves {
            self.ready.touch(disk);
            if counts {
                self.flash.moved();
            }
            for slot in old..old + count {
                self.cache.index.set_mark(slot, false);
            }
        }
        self.flash.log.requeue(Vec::new());
    }

    /// Copies that wait to be appended would lie above the floor, and the intents that may say they
    /// are void in front of it. What they replace is below it and needs no other record.
    fn cancel_fills(&mut self) {
        let mut tickets = Vec::new();
        self.flash.log.queue.retain(|item| match item.token.then {
            Then::Ticket { disk, ticket } if item.ends => {
                tickets.push((disk, ticket));
                false
            }
            _ => true,
        });
        for (disk, ticket) in tickets {
            let d = self.known_mut(disk);
            d.drop_ticket(ticket);
            self.ready.touch(disk);
        }
        self.flash.log.requeue(Vec::new());
    }

    /// The origin has a block durably whose segment goes next, and a newer write to it is queued: it
    /// cannot be called clean in the log, but dropped with its segment.
    pub fn let_go(&mut self, disk: DiskId, block: u64, slot: SlotNo) {
        let here = self.cache.index.get(Key::new(disk, block)) == Some(slot);
        let seg = self.flash.log.segment_of(slot) as u32;
        if here && self.flash.is_going(seg) {
            let (flash, mut rest) = self.apart();
            flash.drop_copy(slot, &mut rest);
        }
    }
}
