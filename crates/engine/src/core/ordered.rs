//! Ordered disks: when an epoch ends, what the destager may have, and what the log says of it
//! ([`crate::origin::order`] has the rules).
//!
//! Of such a disk nothing dirty is moved by eviction: where a block stands in the log is when it was written,
//! and that is all a start after a crash has to go by. It takes the batches of the log for epochs, which are finer
//! than those of the guest: a write that came after a flush was answered is never in the same batch as one that
//! came before. So nothing but the end of each epoch costs a record.
//!
//! Older versions take room that nothing but the destager gives back. So an ordered disk's writes wait when a
//! share of the segments is held, as they do when too much is dirty.

use crate::api::{DiskId, Effects, ReqOp};
use crate::cache::index::{Key, SlotNo};
use crate::core::Core;
use crate::core::apply::Then;
use crate::core::route::FlashWaiter;
use crate::disk::Disk;
use crate::engine::OrderStatus;
use crate::faults::Fault;
use crate::flash::durable::Until;
use crate::ids::ReqId;
use crate::origin::order::{Epoch, Order, Upto};
use crate::origin::pace::Need;
use crate::origin::progress::HANGS_NS;
use crate::paths::{Path, took};
use hearth_format::{Kind, Mark};
use hearth_io::Buf;
use std::collections::{BTreeMap, VecDeque};

/// The destager hurries when an origin is so many hundredths as far behind as it may be, ...
const AGE_HASTE_PERCENT: u64 = 40;
/// ... and works for this disk as if somebody waited, from here on.
const AGE_URGENT_PERCENT: u64 = 70;
/// Writes that had to wait for it are in time again below this.
const AGE_IN_TIME_PERCENT: u64 = 80;

/// What a log tells of one ordered disk: its mark, and of each block the versions that nothing said to be
/// clean or void, by batch.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub mark: Option<Mark>,
    pub versions: BTreeMap<u64, Vec<(u64, SlotNo, u32)>>,
}

impl Told {
    /// Nothing of `start..end` is left that the origin lacks.
    pub fn forget(&mut self, start: u64, end: u64) {
        let blocks: Vec<u64> = self.versions.range(start..end).map(|(b, _)| *b).collect();
        for block in blocks {
            self.versions.remove(&block);
        }
    }

    /// The epochs that are left. Of a disk that was never marked all is one mixture.
    fn order(&self, last_batch: u64) -> Order {
        let mark = self.mark.unwrap_or(Mark {
            batch: u64::MAX,
            in_order: false,
        });
        let mut first = Epoch::default();
        let mut batches: BTreeMap<u64, Epoch> = BTreeMap::new();
        for (block, versions) in &self.versions {
            let mut kept = None;
            let newest = versions.last().map(|(batch, ..)| *batch);
            for &(batch, slot, crc) in versions {
                let version = crate::origin::order::Version {
                    slot,
                    crc,
                    written: false,
                };
                if batch > mark.batch {
                    let epoch = batches.entry(batch).or_default();
                    epoch.versions.insert(*block, version);
                    epoch.last_batch = batch;
                } else if !mark.in_order || newest == Some(batch) {
                    kept = Some(version);
                }
            }
            if let Some(version) = kept {
                first.versions.insert(*block, version);
            }
        }
        let through = match mark.batch {
            u64::MAX => last_batch,
            batch => batch,
        };
        first.last_batch = through;
        let mut epochs = VecDeque::new();
        if !mark.in_order || !first.versions.is_empty() {
            epochs.push_back(first);
        }
        epochs.extend(batches.into_values());
        epochs.push_back(Epoch::default());
        let mut order = Order::of(epochs, !mark.in_order, through);
        order.marked = self.mark.is_some();
        if !mark.in_order {
            order.doubt_all();
        }
        order
    }
}

impl Core {
    /// Where everything dirty of a disk lies that the origin can be given.
    fn dirty_copies(&self, disk: DiskId) -> Vec<(u64, SlotNo, u32)> {
        let Some(d) = self.disk(disk) else {
            return Vec::new();
        };
        let index = &self.cache.index;
        let dirty = d.dirty.range(0, u64::MAX);
        let dirty = dirty.filter(|block| !d.lost.contains(*block));
        let copies = dirty.filter_map(|block| {
            let slot = index.get(Key::new(disk, block))?;
            Some((block, slot, index.crc(slot)))
        });
        copies.collect()
    }

    /// A disk is ordered from now on, or not any more, as its settings say.
    pub fn set_order(&mut self, disk: DiskId) {
        let Some(d) = self.disk(disk) else { return };
        let wanted = d.is_ordered() && self.flash.takes_writes();
        match (wanted, d.order.is_some()) {
            // Else it begins when that is noted.
            (true, false) if self.flash.may_mark() => self.begin_order(disk),
            (false, true) => {
                self.say_no_order(disk);
                self.end_order(disk);
            }
            _ => {}
        }
    }

    fn begin_order(&mut self, disk: DiskId) {
        took(Path::OrderBegun);
        let dirty = self.dirty_copies(disk);
        for (_, slot, _) in &dirty {
            self.flash.hold(*slot);
        }
        let order = Order::mixture(dirty, self.flash.log.applied_seq);
        self.known_mut(disk).order = Some(Box::new(order));
        self.mark_order(disk);
        self.ready.touch(disk);
        self.ready.ending.add(disk);
    }

    /// What is dirty goes to the origin in any order from here on.
    pub fn end_order(&mut self, disk: DiskId) {
        let Some(mut order) = self.disk_mut(disk).and_then(|d| d.order.take()) else {
            return;
        };
        order.clear();
        for slot in order.released.drain(..) {
            self.flash.let_go(slot);
        }
        self.ready.touch(disk);
    }

    /// Has the log say that a disk is in no order any more. Else, when it is ordered once more, what the log said
    /// before would be believed after a crash.
    fn say_no_order(&mut self, disk: DiskId) {
        let order = self.disk(disk).and_then(|d| d.order.as_deref());
        if order.is_none_or(|o| !o.marked) || !self.flash.takes_writes() {
            return;
        }
        let mark = Mark {
            batch: self.flash.log.applied_seq,
            in_order: false,
        };
        let ((block, word), then) = (mark.to_fields(), Then::Nothing);
        self.flash
            .record(Kind::Through, disk, block, word.into(), then);
    }

    /// Versions are gone, or cannot be read: the origin gets what is newest, in any order, and is in order
    /// again when it has that.
    pub fn mix_order(&mut self, disk: DiskId) {
        if self.disk(disk).is_none_or(|d| d.order.is_none()) {
            return;
        }
        took(Path::OrderMixed);
        let dirty = self.dirty_copies(disk);
        for (_, slot, _) in &dirty {
            self.flash.hold(*slot);
        }
        let batch = self.flash.log.applied_seq;
        let d = self.known_mut(disk);
        let order = d.order.as_mut().expect("it was looked for");
        let released = order.mix(dirty, batch);
        for slot in released {
            self.flash.let_go(slot);
        }
        self.mark_order(disk);
        self.ready.touch(disk);
        self.ready.ending.add(disk);
    }

    /// Has the log say how far the origin is.
    fn mark_order(&mut self, disk: DiskId) {
        let starved = self.flash.starved();
        let Some(order) = self.disk_mut(disk).and_then(|d| d.order.as_mut()) else {
            return;
        };
        order.unmarked = starved;
        order.marked |= !starved;
        if starved {
            self.ready.unmarked.add(disk);
            return;
        }
        let Some(order) = self.disk(disk).and_then(|d| d.order.as_ref()) else {
            return;
        };
        let (block, word) = order.mark().to_fields();
        let awaited = !order.is_empty();
        let then = Then::Nothing;
        let ord = self
            .flash
            .record(Kind::Through, disk, block, word.into(), then);
        self.flash.log.urgent |= awaited;
        if let Some(order) = self.known_mut(disk).order.as_mut() {
            order.mark_ord = ord;
        }
    }

    /// What was applied is of an epoch that ends, because something was promised of it.
    pub fn ends_epoch(&mut self, disk: DiskId) {
        if self.disk(disk).is_some_and(|d| d.order.is_some()) {
            self.ready.ending.add(disk);
        }
    }

    /// Ends epochs that are to end. Not while a batch is being applied: it belongs to one of them as a whole.
    pub fn end_epochs(&mut self, now: u64, fx: &mut Effects) {
        if self.ready.ending.is_empty() {
            return;
        }
        let batch = self.flash.log.applied_seq;
        for disk in self.ready.ending.take() {
            if let Some(order) = self.disk_mut(disk).and_then(|d| d.order.as_mut()) {
                order.end_epoch(batch);
                self.go_on_in_order(disk, now, fx);
            }
        }
    }

    /// The next epoch has its turn, if the origin has the first.
    pub fn go_on_in_order(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        self.release_versions(disk);
        let batch = self.flash.log.applied_seq;
        let early = self.opts.faults.has(Fault::EpochUnmarked);
        let merged = self.opts.faults.has(Fault::EpochEarly);
        let durable = self.flash.log.durable_ord;
        let Some(d) = self.disk_mut(disk) else { return };
        let zeros = !d.zero.is_empty();
        let Some(order) = d.order.as_mut() else {
            return;
        };
        if order.mark_ord <= durable {
            order.settle(now);
        }
        if merged {
            order.merge();
        }
        let mixed = order.is_mixed();
        if mixed && zeros || !order.go_on(batch) {
            return;
        }
        order.note_taken(mixed, now);
        took(Path::EpochDestaged);
        if mixed || !early {
            self.mark_order(disk);
        }
        self.ready.touch(disk);
        self.wake_clean_waiters(disk, now, fx);
    }

    /// Lets go of segments for versions that nobody needs any more.
    pub fn release_versions(&mut self, disk: DiskId) {
        let Some(order) = self.disk_mut(disk).and_then(|d| d.order.as_mut()) else {
            return;
        };
        let released = std::mem::take(&mut order.released);
        for slot in released {
            self.flash.let_go(slot);
        }
    }

    /// A block's newest version is lost: the origin gets none of it, and the others in their order.
    pub fn lose_versions(&mut self, disk: DiskId, block: u64) {
        let Some(order) = self.disk_mut(disk).and_then(|d| d.order.as_mut()) else {
            return;
        };
        took(Path::VersionLost);
        order.forget(block);
        self.release_versions(disk);
        // It may have been the last that was waited for.
        self.ready.ending.add(disk);
    }

    /// What is lost is being written again: until the origin has that, it lacks something of a time it is past.
    pub fn mend_lost_versions(&mut self, disk: DiskId, block: u64, count: u32) {
        let d = self.known_mut(disk);
        if d.lost.is_empty() {
            return;
        }
        let any = d.lost.range(block, block + u64::from(count)).next();
        if let (Some(order), Some(_)) = (d.order.as_deref_mut(), any) {
            order.note_mended();
        }
    }

    /// Client data of an ordered disk is on flash.
    pub fn note_version(&mut self, disk: DiskId, block: u64, slot: SlotNo, crc: u32, now: u64) {
        if let Some(order) = self.disk_mut(disk).and_then(|d| d.order.as_mut()) {
            order.add(block, slot, crc, now);
            self.flash.hold(slot);
            // A guest that does not flush would hold with them what the others may.
            self.release_versions(disk);
        }
    }

    /// The next block of an ordered disk that the origin may have.
    pub fn next_in_order(&self, d: &Disk, order: &Order, now: u64) -> Option<u64> {
        if self.flash.is_rescuing() || order.unmarked && order.marked {
            // What the log says of the order is being taken back, or will be: it has no room to say more.
            return None;
        }
        let cursor = order.cursor;
        for (from, to) in [(cursor, u64::MAX), (0, cursor)] {
            let mut at = from;
            // Bounded as the sweep of other disks.
            for _ in 0..64 {
                let Some(block) = order.next(at, to) else {
                    break;
                };
                match self.destage_obstacle(d.cfg.id, block, now) {
                    Some(past) => at = past,
                    None => return Some(block),
                }
            }
        }
        None
    }

    /// How urgent it is for a disk by its order.
    pub fn order_need(&self, d: &Disk, now: u64) -> Need {
        let Some(order) = d.order.as_deref() else {
            return Need::None;
        };
        let age = age_percent(order, d.max_age_ns, now);
        let held = percent_of(self.flash.held_segments as u64, self.held_max());
        // Until the origin has the mixture, no limit is kept.
        let mixed = order.is_mixed() && d.max_age_ns > 0;
        let unknown = d.max_age_ns > 0 && order.waits_to_be_known();
        if age >= AGE_URGENT_PERCENT || held >= 90 || unknown {
            Need::Urgent
        } else if age >= AGE_HASTE_PERCENT || held >= 70 || mixed {
            Need::Haste
        } else {
            Need::None
        }
    }

    /// Does a disk's guest wait until it is known how long the origin takes for an epoch? Not of an origin that is away: that tells nothing,
    /// and what may be lacked then is for its age to say.
    fn waits_to_be_known(&self, d: &Disk, now: u64) -> bool {
        let order = d.order.as_deref();
        let waits = d.max_age_ns > 0 && order.is_some_and(Order::waits_to_be_known);
        let hangs = |since: u64| now.saturating_sub(since) > HANGS_NS;
        waits
            && d.origin.destage.trouble.is_none()
            && !self.destage_unanswered(d).is_some_and(hangs)
    }

    /// Segments that ordered disks may hold.
    fn held_max(&self) -> u64 {
        let log = &self.flash.log;
        let usable = log.usable().saturating_sub(log.free_wanted() + 1);
        (usable as u64 / 2).max(1)
    }

    /// Have writes of an ordered disk to wait until the origin has more of what came before?
    pub fn order_waits(&mut self, disk: DiskId, now: u64) -> bool {
        let most = self.held_max();
        let held = self.flash.held_segments as u64;
        let Some(d) = self.disk(disk) else {
            return false;
        };
        let unknown = self.waits_to_be_known(d, now);
        let d = self.known_mut(disk);
        let max_age_ns = d.max_age_ns;
        let Some(order) = d.order.as_deref_mut().filter(|o| !o.is_empty()) else {
            return false;
        };
        let age = age_percent(order, max_age_ns, now);
        let for_long = order.behind.note_unknown(unknown, now);
        if age >= 100 || for_long {
            took(Path::OrderLate);
            order.behind.found(now);
        }
        if held >= most {
            took(Path::OrderWaits);
            return true;
        }
        let waits = age >= 100 || unknown;
        let lets_in = waits && order.behind.lets_in(now, max_age_ns);
        if lets_in {
            took(Path::OrderLetIn);
        }
        waits && !lets_in
    }

    /// So many blocks of a disk are written now.
    pub fn note_let_in(&mut self, disk: DiskId, blocks: u64, now: u64) {
        if let Some(order) = self.disk_mut(disk).and_then(|d| d.order.as_deref_mut()) {
            order.behind.note_let_in(blocks, now);
        }
    }

    /// Is an origin that was too far behind in time again?
    pub fn look_at_ages(&mut self, disk: DiskId, now: u64) {
        let Some(d) = self.disk(disk) else { return };
        // The origin has it, but it could not be called clean for a newer write, and that has failed; or it has no room,
        // and waits for what this takes.
        let empty = d.order.as_ref().is_some_and(|o| o.is_empty());
        if empty && d.dirty.len() > d.lost.len() {
            let mut dirty = d.dirty.range(0, u64::MAX).filter(|b| !d.lost.contains(*b));
            let left = dirty.any(|block| !self.superseding(disk, block, block + 1));
            drop(dirty);
            if left {
                return self.mix_order(disk);
            }
        }
        let unknown = self.waits_to_be_known(self.known(disk), now);
        let d = self.known_mut(disk);
        let max_age_ns = d.max_age_ns;
        if let Some(order) = d.order.as_deref_mut() {
            order.note_known(now);
        }
        if let Some(order) = d.order.as_deref_mut()
            && order.behind.is_late()
            && !unknown
            && age_percent(order, max_age_ns, now) < AGE_IN_TIME_PERCENT
        {
            order.behind.is_over();
        }
    }

    /// The log has no room for marks. Those it has are void with the floor of clean copies, and the disks are
    /// mixtures. True if there are any marks.
    pub fn give_up_orders(&mut self) -> bool {
        let marked: Vec<DiskId> = self
            .disks
            .iter()
            .flatten()
            .filter(|d| d.order.as_ref().is_some_and(|o| o.marked))
            .map(|d| d.cfg.id)
            .collect();
        for disk in &marked {
            self.mix_order(*disk);
            let Some(order) = self.disk_mut(*disk).and_then(|d| d.order.as_mut()) else {
                continue;
            };
            (order.unmarked, order.marked) = (true, false);
            order.mark_ord = 0;
            let fields = order.mark().to_fields();
            self.ready.unmarked.add(*disk);
            // What is queued comes into the log behind the floor, where it counts.
            for item in &mut self.flash.log.queue {
                if item.kind == Kind::Through && item.disk == *disk {
                    (item.block, item.count) = fields;
                }
            }
        }
        !marked.is_empty()
    }

    /// What the log said of the order of disks is void. Those of their runs that wait until it says more, which it will
    /// not, go to the origin: of a mixture everything may.
    pub fn orders_given_up(&mut self, now: u64, fx: &mut Effects) {
        let void = |core: &Core, id: usize| {
            let job = &core.destaging.jobs[id];
            let order = core.disk(job.disk).and_then(|d| d.order.as_deref());
            job.ord > core.flash.log.durable_ord && order.is_none_or(|o| o.unmarked)
        };
        let mut waiters = std::mem::take(&mut self.flash.waiters);
        let mut runs = Vec::new();
        waiters.retain(|w| match (w.until, w.who) {
            (Until::Ord(_), FlashWaiter::Destage(id)) if void(self, id) => {
                runs.push(id);
                false
            }
            _ => true,
        });
        self.flash.waiters = waiters;
        for id in runs {
            took(Path::RunOfNoOrder);
            self.destaging.jobs[id].ord = 0;
            self.destage_durable(id, now, fx);
        }
    }

    /// Marks disks for which the log had no room.
    pub fn mark_unmarked(&mut self) {
        let may = !self.flash.starved() && !self.flash.is_rescuing() && self.flash.takes_writes();
        if self.ready.unmarked.is_empty() || !may {
            return;
        }
        for disk in self.ready.unmarked.take() {
            self.mark_order(disk);
        }
    }

    /// It is noted that the log may have marks: disks that waited for that are ordered from now on.
    pub fn set_orders(&mut self) {
        for disk in self.disk_ids() {
            self.set_order(disk);
        }
    }

    /// Short zeros of an ordered disk are data like any other.
    pub fn zeros_as_data(&mut self, id: ReqId) {
        let r = &self.reqs[id];
        let (fua, discard) = match r.op {
            ReqOp::Discard { fua } => (fua, true),
            ReqOp::WriteZeroes { fua, .. } => (fua, false),
            _ => return,
        };
        let (disk, mut offset, mut len) = (r.disk, r.offset, r.len);
        let d = self.known(disk);
        if d.order.is_none() || len > self.opts.zeros_as_data || !self.flash.takes_writes() {
            return;
        }
        if discard {
            // It only shrinks.
            let (first, last) = self.zeros_of(id);
            if last <= first {
                return;
            }
            offset = first * 4096;
            len = (last * 4096).min(self.known(disk).cfg.size) - offset;
        }
        took(Path::ZerosAsData);
        let bytes = crate::api::Request::buffer_len(offset, len) as usize;
        let req = &mut self.reqs[id];
        (req.offset, req.len) = (offset, len);
        req.op = ReqOp::Write { fua };
        req.buf = Some(Buf::zeroed(bytes).slice(0, bytes));
        req.made_data = true;
    }

    /// Has a write past the cache to wait until an ordered disk's origin has all that came before?
    pub fn waits_for_order(&self, id: ReqId, disk: DiskId) -> bool {
        let behind = self.reqs[id].write().behind;
        let order = self.disk(disk).and_then(|d| d.order.as_deref());
        // A number beyond the newest is of an order that has ended: the disk was not ordered for a while.
        order.is_some_and(|o| (1..=o.next_number()).contains(&behind) && !o.has_all_before(behind))
    }

    /// A write past the cache of an ordered disk begins.
    pub fn line_up_behind_order(&mut self, id: ReqId) {
        let disk = self.reqs[id].disk;
        let Some(order) = self.disk(disk).and_then(|d| d.order.as_deref()) else {
            return;
        };
        if order.is_empty() && !order.is_mixed() {
            return;
        }
        let behind = order.next_number();
        self.reqs[id].write_mut().behind = behind;
        self.ready.ending.add(disk);
    }

    /// The orders of disks that are ordered, after a start, of which the log or the checkpoint told.
    pub fn restore_orders(&mut self, told: BTreeMap<DiskId, Told>) {
        let last = self.flash.log.applied_seq;
        for (disk, told) in told {
            took(Path::OrderRestored);
            self.adopt_order(disk, told.order(last));
        }
    }

    /// Gives a disk the order it had.
    pub fn adopt_order(&mut self, disk: DiskId, order: Order) {
        let slots: Vec<SlotNo> = order.held().collect();
        let Some(d) = self.disk_mut(disk).filter(|d| d.is_ordered()) else {
            return;
        };
        let unmarked = order.unmarked;
        d.order = Some(Box::new(order));
        for slot in slots {
            self.flash.hold(slot);
        }
        if unmarked {
            self.ready.unmarked.add(disk);
        }
        self.ready.touch(disk);
        // The origin may have the first epoch already.
        self.ready.ending.add(disk);
    }

    /// How far the origin of an ordered disk is, and since when it has lacked the oldest it lacks.
    pub fn order_state(&self, disk: DiskId, now: u64) -> Option<OrderStatus> {
        let d = self.disk(disk)?;
        let order = d.order.as_deref()?;
        let unwritten = !d.zero.is_empty() || !d.lost.is_empty();
        let upto = match order.upto(now) {
            _ if unwritten => Upto::Mixed,
            // It has more than the log says, and may be given that once more.
            _ if order.mark_ord > self.flash.log.durable_ord => order.settled(),
            upto => upto,
        };
        let told_early = self.opts.faults.has(Fault::OrderToldEarly);
        let upto = match upto {
            Upto::At(_) if told_early => Upto::At(now),
            upto => upto,
        };
        Some(OrderStatus {
            upto,
            age_ns: order.age_ns(now),
            late: order.behind.is_late(),
            waits: order.behind.waits(),
            versions: order.len(),
        })
    }
}

/// How near an origin is to being too far behind: by what it lacks, or because it could not have in time all that it will
/// lack. Without the second a guest would be let go on until it is too late, and then go on slowly until the origin
/// has everything.
fn age_percent(order: &Order, max_age_ns: u64, now: u64) -> u64 {
    percent_of(order.age_ns(now).max(order.left_ns()), max_age_ns)
}

/// In hundredths; 0 if there is no limit.
fn percent_of(part: u64, whole: u64) -> u64 {
    match whole {
        0 => 0,
        whole => (u128::from(part) * 100 / u128::from(whole)).min(1000) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(mark: Option<Mark>, versions: &[(u64, u64, SlotNo)]) -> Told {
        let mut told = Told {
            mark,
            ..Told::default()
        };
        for (block, batch, slot) in versions {
            told.versions
                .entry(*block)
                .or_default()
                .push((*batch, *slot, 0));
        }
        told
    }

    fn epochs(order: &Order) -> Vec<Vec<(u64, SlotNo)>> {
        let epochs = order.epochs();
        epochs
            .map(|e| e.versions.iter().map(|(b, v)| (*b, v.slot)).collect())
            .collect()
    }

    #[test]
    fn after_a_crash_batches_are_epochs() {
        let mark = Mark {
            batch: 10,
            in_order: true,
        };
        let order = told(
            Some(mark),
            &[
                (1, 9, 90),
                (1, 11, 91),
                (1, 13, 92),
                (2, 11, 93),
                (3, 8, 94),
            ],
        )
        .order(20);
        // Of block 1 the origin has the oldest; block 3 is dirty although nothing newer is there.
        let expected = vec![vec![(3, 94)], vec![(1, 91), (2, 93)], vec![(1, 92)], vec![]];
        assert_eq!(epochs(&order), expected);
        assert_eq!(order.upto(7), Upto::Earlier);
    }

    #[test]
    fn what_was_never_marked_is_a_mixture_of_what_is_newest() {
        let order = told(None, &[(1, 9, 90), (1, 11, 91), (2, 5, 92)]).order(20);
        assert_eq!(epochs(&order), vec![vec![(1, 91), (2, 92)], vec![]]);
        assert_eq!(order.upto(7), Upto::Mixed);
        let mark = Mark {
            batch: 10,
            in_order: false,
        };
        let order = told(Some(mark), &[(1, 8, 89), (1, 9, 90), (1, 11, 91)]).order(20);
        assert_eq!(epochs(&order), vec![vec![(1, 90)], vec![(1, 91)], vec![]]);
        assert_eq!(order.upto(7), Upto::Mixed);
    }
}
