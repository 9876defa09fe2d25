//! What is on flash takes effect: the index maps it, disks learn of it, those who wait are told.
//!
//! The flash device says which batch counts next; what was in it is known here. With everything that is
//! appended goes its [`Purpose`], which the device gives back unread.

use crate::api::{DiskId, Effects};
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::core::rest::Rest;
use crate::core::route::FlashWaiter;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, Token, Users};
use crate::flash::log::{Batch, Gone, Item};
use crate::flash::replay::Copied;
use crate::ids::ReqId;
use crate::paths::{Path, took};
use crate::request::write::FETCH_BLOCKS;
use hearth_format::Kind;

/// How an item changes the index, block by block, once it is on flash.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Apply {
    /// New data from a client.
    Dirty,
    /// A copy of what was read from the origin, or written to it, unless its ticket was cancelled meanwhile.
    Clean {
        ticket: u64,
        freq: u8,
        written: bool,
    },
    /// The same data at a new place, if it is still at the old one.
    Move { old: SlotNo, dirty: bool, freq: u8 },
    /// No data.
    Record,
    /// A record logged again; nothing changes in RAM.
    Again,
}

/// Who waits for an item to be applied.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Then {
    Nothing,
    /// A request counts down.
    Request(ReqId),
    /// A fill ends: its ticket is given back.
    Ticket {
        disk: u16,
        ticket: u64,
    },
    /// An intent was recorded.
    Intent,
    /// One reinsertion less in flight.
    Moved,
}

/// Why something is appended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Purpose {
    pub apply: Apply,
    pub then: Then,
}

impl Token for Purpose {
    const OWN: Purpose = Purpose {
        apply: Apply::Again,
        then: Then::Nothing,
    };

    fn is_awaited(&self) -> bool {
        let by_nobody = matches!(self.then, Then::Nothing | Then::Ticket { .. } | Then::Moved);
        !by_nobody || matches!(self.apply, Apply::Dirty)
    }

    fn is_move(&self) -> bool {
        matches!(self.apply, Apply::Move { .. })
    }
}

/// The engine, as its flash devices see it.
#[derive(Debug)]
pub(crate) enum House {}

impl Users for House {
    type Token = Purpose;
    type Waiter = FlashWaiter;
}

/// A flash device of this engine.
pub(crate) type Flash = FlashDevice<House>;

impl Flash {
    /// Appends a record about a run of blocks; returns its number.
    pub fn record(&mut self, kind: Kind, disk: DiskId, block: u64, count: u64, then: Then) -> u64 {
        let apply = Apply::Record;
        self.log
            .record(kind, disk, block, count, Purpose { apply, then })
    }
}

/// The block at place `i` of a run that is on flash.
fn copy(item: &Item<Purpose>, i: u32, dirty: bool) -> Copied {
    Copied {
        disk: item.disk,
        block: item.block + u64::from(i),
        slot: item.slot + i,
        crc: item.crcs[i as usize],
        dirty,
    }
}

/// A place of a run that nothing will ever lead to.
fn unused(item: &Item<Purpose>, i: u32, dirty: bool) -> Gone {
    let c = copy(item, i, dirty);
    Gone {
        disk: c.disk,
        block: c.block,
        slot: c.slot,
        dirty,
    }
}

impl Core {
    /// Maps a batch and tells who waited for it.
    pub fn apply(&mut self, batch: Batch<Purpose>, now: u64, fx: &mut Effects) {
        self.destaging.note_batch(batch.seg, batch.seq);
        for item in batch.items {
            match item.token.apply {
                Apply::Dirty => {
                    self.mend_lost_versions(item.disk, item.block, item.count);
                    let (flash, mut rest) = self.apart();
                    rest.map_written(&item, now, |slot, old| {
                        if old.is_some() {
                            flash.cleaner.rewrite(1);
                        }
                        flash.slot_replaced(slot, true, old);
                    });
                    for ((block, slot), crc) in (item.block..).zip(item.slot..).zip(&item.crcs) {
                        self.note_version(item.disk, block, slot, *crc, now);
                    }
                }
                Apply::Clean {
                    ticket,
                    freq,
                    written,
                } => {
                    let raced = self.opts.faults.has(Fault::CacheRacedMiss);
                    let ticket = self.known_mut(item.disk).ticket(ticket).cloned();
                    let mut voided = 0;
                    for i in 0..item.count {
                        let block = item.block + u64::from(i);
                        if !raced && ticket.as_ref().is_none_or(|t| t.voids(block)) {
                            voided += 1;
                            self.flash.slot_unused(unused(&item, i, false));
                            continue;
                        }
                        self.void_fill(item.disk, block - voided, voided);
                        voided = 0;
                        // It was used again before it was there.
                        let used = ticket.as_ref().is_some_and(|t| t.used.contains(block));
                        let freq = u64::from(freq) + u64::from(used);
                        self.map(copy(&item, i, false), freq, now);
                        if written {
                            self.cache.index.set_written(item.slot + i);
                        }
                        self.drop_if_gone(item.disk, block, item.slot + i);
                    }
                    let end = item.block + u64::from(item.count);
                    self.void_fill(item.disk, end - voided, voided);
                }
                Apply::Move { old, dirty, freq } => {
                    let old = old + item.before;
                    for i in 0..item.count {
                        let block = item.block + u64::from(i);
                        let still = self.cache.index.get(Key::new(item.disk, block))
                            == Some(old + i)
                            && self
                                .cache
                                .index
                                .slot(old + i)
                                .is_some_and(|s| s.dirty == dirty);
                        if still
                            && dirty
                            && let Some(d) = self.disk_mut(item.disk)
                            && let Some(order) = d.order.as_deref_mut()
                            && order.moved(block, old + i, item.slot + i)
                        {
                            self.flash.hold(item.slot + i);
                        }
                        if still || self.opts.faults.has(Fault::MoveOverNewer) {
                            let was = self.cache.index.slot(old + i);
                            self.map(copy(&item, i, dirty), u64::from(freq), now);
                            if was.is_some_and(|s| s.lost) {
                                self.lose(item.disk, block, item.slot + i);
                            }
                            if !dirty {
                                if was.is_some_and(|s| s.written) {
                                    self.cache.index.set_written(item.slot + i);
                                }
                                self.drop_if_gone(item.disk, block, item.slot + i);
                            }
                        } else {
                            self.cache.index.set_mark(old + i, false);
                            self.flash.slot_unused(unused(&item, i, dirty));
                        }
                    }
                }
                Apply::Again => {}
                Apply::Record => {
                    self.apply_record(item.kind, item.disk, item.block, item.count, now);
                    if matches!(item.token.then, Then::Request(_)) {
                        self.note_zeroed(item.disk, item.block, item.count);
                    }
                }
            }
            if item.ends {
                self.then(item.token.then, now, fx);
            }
        }
    }

    /// A cancelled fill is on flash but not in the index. A crash would bring it back, and later
    /// writes past the cache do not know that they must void it: so that is done now, but for
    /// the blocks about which something newer is in the log. A clean copy in the index is no
    /// such thing: it may be of another, earlier fill.
    fn void_fill(&mut self, disk: DiskId, block: u64, count: u64) {
        if self.opts.faults.has(Fault::SkipVoidFill) {
            return;
        }
        let mut run = block;
        for b in block..=block + count {
            let d = self.known(disk);
            let newer = b == block + count
                || d.zero.contains(b)
                || d.dirty.contains(b)
                || d.copy_queued(b)
                || self.superseding(disk, b, b + 1);
            if newer {
                if b > run {
                    took(Path::FillVoided);
                    self.record_drop(disk, run, b - run);
                }
                run = b + 1;
            }
        }
    }

    fn then(&mut self, then: Then, now: u64, fx: &mut Effects) {
        match then {
            // Who waits for an intent waits until it is durable.
            Then::Nothing | Then::Intent => {}
            Then::Request(id) => self.request_applied(id, now, fx),
            Then::Ticket { disk, ticket } => {
                let d = self.known_mut(disk);
                d.drop_ticket(ticket);
            }
            Then::Moved => self.flash.moved(),
        }
    }

    /// Points the index at a block's new place.
    fn map(&mut self, copy: Copied, freq: u64, now: u64) {
        let (flash, mut rest) = self.apart();
        let old = rest.map(copy, freq, now);
        flash.slot_replaced(copy.slot, copy.dirty, old);
    }

    /// A client has zeroed or discarded blocks: of a scratch disk that a crash has emptied they can be read again.
    fn note_zeroed(&mut self, disk: DiskId, block: u64, count: u32) {
        if let Some(zeroed) = &mut self.known_mut(disk).void {
            zeroed.insert_range(block, block + u64::from(count));
        }
    }

    fn apply_record(&mut self, kind: Kind, disk: DiskId, block: u64, count: u32, now: u64) {
        let end = block + u64::from(count);
        let d = self.known(disk);
        if kind == Kind::DropRun && !d.has_origin() {
            if !self.opts.faults.has(Fault::ZeroKeepsCopies) {
                self.forget_range(disk, block, end);
            }
            return;
        }
        if kind != Kind::ZeroRun {
            return;
        }
        if !self.opts.faults.has(Fault::ZeroKeepsCopies) {
            self.forget_range(disk, block, end);
        }
        let d = self.known_mut(disk);
        if !d.is_dirty() {
            d.dirty_since_ns = now;
        }
        d.origin.destage.void_zeros(block, end);
        self.change_zeros(disk, |zero| zero.insert_range(block, end));
        self.ready.touch(disk);
        self.ready.note(disk);
    }
}

impl Rest<'_> {
    /// Points the index at the new places of a run that a client wrote; tells for each of them where the
    /// block was. What is known of the disk by ranges is changed once for the run, not for each block.
    fn map_written(
        &mut self,
        item: &Item<Purpose>,
        now: u64,
        mut moved: impl FnMut(SlotNo, Option<Gone>),
    ) {
        let (disk, count) = (item.disk, u64::from(item.count));
        let (start, end) = (item.block, item.block + count);
        if count >= FETCH_BLOCKS {
            (start..end).for_each(|b| self.cache.index.prefetch(Key::new(disk, b)));
        }
        let (mut new, mut were_dirty) = (0, 0);
        for ((block, slot), crc) in (start..end).zip(item.slot..).zip(&item.crcs) {
            // A block that is written again is in use.
            let used = |freq: Option<u64>| freq.map_or(0, |f| f + 1);
            let key = Key::new(disk, block);
            let old = self.cache.index.set_by(key, slot, *crc, true, used);
            new += u64::from(old.is_none());
            were_dirty += u64::from(old.is_some_and(|(_, dirty)| dirty));
            let gone = old.map(|(slot, dirty)| Gone {
                disk,
                block,
                slot,
                dirty,
            });
            moved(slot, gone);
        }
        if !self.known(disk).is_promised() {
            *self.dirty_total += count;
            *self.dirty_total -= were_dirty;
        }
        let keep_zeros = self.faults.has(Fault::WriteKeepsZeros);
        let d = self.known_mut(disk);
        d.cached += new;
        if !d.is_dirty() {
            d.dirty_since_ns = now;
        }
        if !d.refusals.is_empty() {
            d.refusals.retain(|block, _| !(start..end).contains(block));
        }
        d.lost.remove_range(start, end);
        d.dirty.insert_range(start, end);
        if d.zero.first_in(start, end).is_some() && !keep_zeros {
            d.solid.remove_range(start, end);
            self.change_zeros(disk, |zero| zero.remove_range(start, end));
        }
        if !self.faults.has(Fault::OverlookDirty) {
            self.ready.touch(disk);
        }
    }

    /// Points the index at a block's new place; tells where it was.
    pub fn map(&mut self, copy: Copied, freq: u64, now: u64) -> Option<Gone> {
        let Copied {
            disk,
            block,
            slot,
            crc,
            dirty,
        } = copy;
        let key = Key::new(disk, block);
        let old = self.cache.index.set(key, slot, crc, dirty, freq);
        let old_dirty = old.is_some_and(|(_, d)| d);
        if !self.known(disk).is_promised() {
            *self.dirty_total += u64::from(dirty);
            *self.dirty_total -= u64::from(old_dirty);
        }
        let keep_zeros = self.faults.has(Fault::WriteKeepsZeros);
        let d = self.known_mut(disk);
        d.cached += u64::from(old.is_none());
        let news = dirty || d.excess() > 0;
        if !d.refusals.is_empty() {
            d.refusals.remove(&block);
        }
        if dirty {
            if !d.is_dirty() {
                d.dirty_since_ns = now;
            }
            d.lost.remove(block);
            d.dirty.insert(block);
            if d.zero.contains(block) && !keep_zeros {
                d.solid.remove(block);
                self.change_zeros(disk, |zero| zero.remove(block));
            }
        } else if old_dirty {
            d.dirty.remove(block);
            d.lost.remove(block);
        }
        if news && !self.faults.has(Fault::OverlookDirty) {
            self.ready.touch(disk);
        }
        old.map(|(slot, dirty)| Gone {
            disk,
            block,
            slot,
            dirty,
        })
    }
}
