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
    /// Raises the floor if the log is starved and something would come free. True while eviction
    /// should wait for that.
    pub fn rescue_step(&mut self, now: u64, fx: &mut Effects) -> bool {
        if self.flash.is_rescuing() {
            return true;
        }
        if !self.flash.starved() || self.opts.faults.has(Fault::StarveForever) {
            return false;
        }
        self.cancel_moves();
        self.flash.want_clean();
        if !self.flash.floor_frees() {
            return false;
        }
        if self.flash.log.durable_seq < self.flash.log.applied_seq
            && !self.opts.faults.has(Fault::RescueUndurable)
        {
            self.start_flash_flush(now, fx);
            return true;
        }
        took(Path::Rescue);
        let clean = self.give_up_intents() && !self.opts.faults.has(Fault::NoCleanFloor);
        self.flash.raise_floor(clean);
        self.route_flash(now, fx);
        true
    }

    /// Makes intents needless, if there are any, for the floor of clean copies rises. Regions being written get new
    /// ones, for what is cached from now on; those not yet durable stay, somebody waits for them.
    fn give_up_intents(&mut self) -> bool {
        let any = self
            .disks
            .iter()
            .flatten()
            .any(|d| !d.origin.intents.is_empty());
        if !any && !self.flash.closes_intents_of(u64::MAX) {
            return false;
        }
        took(Path::CleanFloorRaised);
        self.cancel_fills();
        self.flash.rescue.closing.clear();
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
        if here && self.flash.is_next(seg) {
            let (flash, mut rest) = self.apart();
            flash.drop_copy(slot, &mut rest);
        }
    }

    /// Does nothing in the segment need to be logged again? Zeros are destaged until that is so;
    /// intents are given up.
    pub fn needs_no_relog(&self, seg: u32) -> bool {
        let seq = self.flash.log.segments[seg as usize].seq;
        let unsure = self.flash.is_relog_unsure();
        let mut noted = self.ready.noted.iter().filter_map(|disk| self.disk(disk));
        noted.all(|d| match d.zero_seg_seq {
            _ if unsure => d.zero.is_empty(),
            z => d.zero.is_empty() || z.is_none_or(|z| z > seq),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flash::log::SegState;
    use crate::{Engine, EngineOptions};
    use hearth_format::{Layout, Superblock, Uuid};
    use hearth_io::IoOp;

    /// A full log, of which the oldest segment is empty and has the number `freed`; the floor is raised
    /// as often as the engine asks for it.
    fn rescued(freed: u64) -> Core {
        let layout = Layout::for_device(16 << 20, 256).expect("it fits");
        let uuid = Uuid::from_u128(1);
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let mut core = Engine::blank(sb, EngineOptions::default(), &[]);
        core.flash.log.free.clear();
        for (seg, s) in core.flash.log.segments.iter_mut().enumerate() {
            s.seq = 10 + seg as u64;
            s.state = SegState::Closed;
            core.flash.log.order.push_back(seg as u32);
        }
        core.flash.log.order.pop_front();
        core.flash.log.segments[0].seq = freed;
        let ord = core.flash.note_tail();
        core.flash.log.segments[0].state = SegState::Freeing {
            ord,
            claimed: false,
        };
        core.flash.log.freeing.push(0);
        let mut fx = Effects::default();
        // Two copies, each with a flush behind it.
        for _ in 0..4 {
            core.rescue_step(0, &mut fx);
            let ops: Vec<IoOp> = fx.ios.drain(..).collect();
            assert_eq!(ops.len(), 1, "one step after the other");
            core.flash.floor_ended(&Ok(()), 0);
            core.route_flash(0, &mut fx);
        }
        core
    }

    #[test]
    fn a_floor_below_which_nothing_lies_is_not_raised_for_ever() {
        let core = rescued(10);
        assert!(core.flash.takes_writes() && !core.flash.starved());
        assert_eq!(core.flash.log.segments[0].state, SegState::Trimming);
        // The next one has that number too.
        let core = rescued(11);
        assert!(!core.flash.takes_writes());
    }
}
