//! One flash device: what is on it, what of that is durable, how it does, what is wrong with it.
//!
//! It knows its log and its health, and neither requests nor disks. Who has something appended gives it
//! a token along, and so does who waits until something is durable ([`Users`]); the device hands them
//! back when that is so, without looking into them. What it wants done, and what it has to tell, it
//! leaves in its [`Outbox`].

use crate::api::FlashFault;
use crate::ctx::{Io, Outbox};
use crate::faults::{Fault, Faults};
use crate::flash::area::AreaChange;
use crate::flash::dead::Dead;
use crate::flash::devices::Devices;
use crate::flash::durable::Waiting;
use crate::flash::emptying::Emptying;
use crate::flash::evict::Evict;
use crate::flash::fail::{FailMark, Noted, Rot};
use crate::flash::gone::Dropping;
use crate::flash::log::{Gone, Item, Log, SegState, Segment, Slot};
use crate::flash::map::MapStore;
use crate::flash::recover::Beginning;
use crate::flash::rescue::Rescue;
use crate::flash::twice::Losing;
use crate::stats::{PoolCounters, ewma};
use hearth_format::{Layout, Superblock};
use hearth_io::{BLOCK, BufSlice, IoDone, OpKind, Target};
use hearth_policy::cleaning::{Cleaner, Heads, Order, Plan, most_of};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;

/// A copy that lived shorter than so many 16ths of the pool was rewritten often
/// (docs/decisions/0006-cleaning.md).
const SPAN: u64 = 8;
/// What a block written to flash costs, in 1024ths of a hit, as far as endurance does not make it dearer.
pub(crate) const WRITE_PRICE: u64 = 56;
/// Good reads of which the mean is weighed one by one, at most: the older ones weigh nothing then.
const SAMPLES_MAX: u64 = 64;

/// What comes with something to be appended, and is given back once that is on flash.
pub(crate) trait Token: Copy + Debug {
    /// Of a record of the device's own: nobody waits for it, and it changes nothing.
    const OWN: Self;
    /// Does somebody wait for it? Else it may gather with others.
    fn is_awaited(&self) -> bool;
    /// Is it a block that lay elsewhere on flash before?
    fn is_move(&self) -> bool;
}

/// Those who use a device, as far as it has to name what they give it.
pub(crate) trait Users {
    /// Comes with what is to be appended.
    type Token: Token;
    /// Waits until something is durable.
    type Waiter: Copy + Debug;
}

/// What a device has to tell.
#[derive(Debug)]
pub(crate) enum FlashEvent<U: Users> {
    /// A segment that was free is written from now on.
    Opened { seg: u32 },
    /// What was waited for is durable.
    Durable { who: U::Waiter },
    /// It is written no more. What had not reached it, and who waits for what now never comes.
    GivenUp {
        unsent: Vec<Item<U::Token>>,
        waiters: Vec<U::Waiter>,
    },
    /// That it was given up stands where a later start sees it, or will not in time.
    Noted,
    /// One of its devices is lost, and the others have everything.
    DeviceLost,
}

/// What an operation of the device's own was for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FlashOp {
    /// Writes a batch.
    Batch { seq: u64 },
    /// Writes the summary of a closed segment.
    Summary { seg: u32 },
    /// Reads what a segment says, from its summary or, if that is not whole, from its batches.
    Entries { seg: u32, whole: bool },
    /// A step of storing the map.
    Map,
    /// Makes durable what had been applied when it was sent.
    Flush { ord: u64, seq: u64 },
    /// Reads blocks that eviction moves.
    Move { slot: Slot, count: u32 },
    /// Discards a freed segment.
    Trim { seg: u32 },
    /// A step of noting on the device that it was given up.
    Mark,
    /// A step of storing the log's floor.
    Floor,
    /// A step of clearing an area that is given back.
    Wipe,
    /// A step of noting that one of several devices is lost.
    Lost,
}

/// A flash device of the pool.
pub(crate) struct FlashDevice<U: Users> {
    /// Which of the pool's devices it is.
    number: u16,
    pub sb: Superblock,
    pub layout: Layout,
    /// The devices it is made of.
    pub devices: Devices,
    /// Slow ones are left alone: there is enough on the others.
    pub(in crate::flash) leaves_slow: bool,
    /// What was read from them lately: first slot, and slots.
    pub(in crate::flash) hot: VecDeque<(Slot, u32)>,
    pub pool_tag: u64,
    /// Segments whose beginning a start takes from the half that is not read otherwise.
    pub begins_there: BTreeMap<u32, Beginning>,
    pub log: Log<U::Token>,
    /// Copies that do not count any more.
    pub dead: Dead,
    /// Of each segment, how often something that is written to it was sent, or has ended.
    pub touched: Vec<u64>,
    /// A device that is to be taken out, if one is.
    pub emptying: Option<Emptying>,
    /// An area beside the log that is being set aside or given back.
    pub(in crate::flash) area_change: Option<AreaChange>,
    /// From which segment on records of a disk count; of one that is not here, from [`run_seq`](Self::run_seq).
    pub since: BTreeMap<u16, u64>,
    /// A start goes on in the segment that was being written, if others are short.
    pub resumes: bool,
    /// Number of the first segment of this run.
    pub run_seq: u64,
    /// Which segment is freed next, and which blocks lie together.
    pub cleaner: Cleaner,
    pub map: MapStore,
    pub out: Outbox<FlashOp, FlashEvent<U>>,
    pub flush_inflight: bool,
    pub waiters: Vec<Waiting<U::Waiter>>,
    pub(in crate::flash) evict: Evict,
    pub rescue: Rescue,
    /// Why nothing is appended any more, if so.
    pub(in crate::flash) given_up: Option<FlashFault>,
    /// It refused the last write that failed for want of room.
    pub full: bool,
    /// It did not answer a write in time.
    pub silent: bool,
    /// Discards whole segments as they are freed.
    pub trim: bool,
    /// That it failed is being noted on it.
    pub mark: Option<FailMark>,
    /// Where that is noted.
    pub noted: Noted,
    /// That is in another place than on flash.
    pub(in crate::flash) noted_beside: bool,
    /// That one of its devices is lost is being noted.
    pub(in crate::flash) losing: Option<Losing>,
    /// Clean blocks that lay on lost devices only are being dropped.
    pub(in crate::flash) gone: Dropping,
    /// Places where reads of it failed since one succeeded. Places, because one that is read again
    /// and again says nothing about the rest.
    pub read_errors: BTreeSet<u64>,
    /// How much of what is read is not what was written.
    pub(in crate::flash) rot: Rot,
    /// Segments in which versions are held for ordered disks.
    pub held_segments: usize,
    /// It stands on the device that the log may have marks of ordered disks.
    pub order_noted: bool,
    pub ewma_ns: u64,
    pub inflight: u32,
    pub last_flush_ns: u64,
    /// Bytes of batches on it that no flush started so far covers.
    pub unflushed_bytes: u64,
    pub counters: PoolCounters,
    pub faults: Faults,
}

impl<U: Users> FlashDevice<U> {
    /// The device with this number in the pool, as a superblock describes it, as if nothing were on it.
    pub fn new(number: u16, sb: Superblock, trim: bool, faults: Faults) -> FlashDevice<U> {
        let layout: Layout = sb.layout;
        let segment = Segment {
            state: SegState::Free,
            seq: 0,
            live: 0,
            dirty: 0,
            second: 0,
            pins: 0,
            held: 0,
            batches: 0,
            first_batch: 0,
            last_batch: 0,
            eviction: 0,
            clean_from: None,
        };
        let mut log = Log {
            segments: vec![segment; layout.segment_count as usize],
            next_batch_seq: 1,
            segment_slots: layout.segment_slots(),
            data_blocks: layout.data_blocks(),
            half: layout.half_blocks(),
            summary_capacity: layout.summary_capacity(),
            ..Log::default()
        };
        // Nothing is read or written there.
        let beside = match faults.has(Fault::AreaRead) {
            true => sb.gaps(),
            false => sb.beside_log(),
        };
        for seg in beside {
            log.set_bad(seg);
        }
        let cleaner = cleaner_of(plan_of(&log), &log);
        FlashDevice {
            number,
            devices: Devices::new(sb.spread(), faults),
            leaves_slow: false,
            hot: VecDeque::new(),
            pool_tag: sb.pool_tag(),
            begins_there: BTreeMap::new(),
            log,
            dead: Dead::default(),
            touched: vec![0; layout.segment_count as usize],
            emptying: None,
            area_change: None,
            since: BTreeMap::new(),
            resumes: false,
            run_seq: 0,
            cleaner,
            map: MapStore::new(layout.segment_count),
            out: Outbox::default(),
            flush_inflight: false,
            waiters: Vec::new(),
            evict: Evict::default(),
            rescue: Rescue::default(),
            given_up: None,
            full: false,
            silent: false,
            trim,
            mark: None,
            noted: Noted::default(),
            noted_beside: false,
            losing: None,
            gone: Dropping::default(),
            read_errors: BTreeSet::new(),
            rot: Rot::default(),
            held_segments: 0,
            order_noted: false,
            ewma_ns: 0,
            inflight: 0,
            last_flush_ns: 0,
            unflushed_bytes: 0,
            counters: PoolCounters::default(),
            faults,
            sb,
            layout,
        }
    }

    /// What is appended together. Before anything is.
    pub fn set_heads(&mut self, heads: Heads) {
        self.log.heads_used = heads.count();
        self.log.tight = self.is_single();
        let plan = Plan {
            heads,
            ..plan_of(&self.log)
        };
        self.cleaner = cleaner_of(plan, &self.log);
    }

    /// What operations on it name.
    pub fn target(&self) -> Target {
        Target::Flash(self.number)
    }

    /// Can anything be appended? Else the origins carry the disks, and it only gives back what it has.
    pub fn takes_writes(&self) -> bool {
        self.given_up.is_none()
    }

    /// Why it was given up, if it was.
    pub fn given_up(&self) -> Option<FlashFault> {
        self.given_up
    }

    /// Where a slot lies on it, in bytes.
    pub fn slot_offset(&self, slot: Slot) -> u64 {
        self.layout.slot_offset(slot)
    }

    /// Reads consecutive slots into a buffer of their length.
    pub fn read_slots(&self, slot: Slot, into: BufSlice) -> Io {
        Io::read(self.target(), self.slot_offset(slot), into)
    }

    /// An operation on it, whoever wants it, is on its way.
    pub fn note_sent(&mut self, kind: OpKind, len: u64) {
        match kind {
            OpKind::Read => {
                self.inflight += 1;
                self.counters.flash_read_bytes += len;
            }
            OpKind::Write => self.counters.flash_write_bytes += len,
            _ => {}
        }
    }

    /// An operation on it, whoever wanted it, has ended. What a failed write means is for those to say
    /// who know what it was for.
    pub fn account(&mut self, done: &IoDone, now: u64) {
        self.devices.account(done);
        if done.op.kind != OpKind::Read {
            return;
        }
        self.inflight -= 1;
        self.devices.note_read(done, now);
        // What a device says that is left alone says nothing of the others.
        if !self.devices.is_of_slow(done) {
            self.ewma_ns = ewma(self.ewma_ns, done.latency_ns);
        }
        if done.is_memory_gone() {
            // Says nothing about the device.
        } else if done.result.is_err() {
            self.counters.flash_errors += 1;
            self.read_errors.insert(self.devices.whole(done));
        } else {
            self.read_errors.clear();
            let bad = done.bad_blocks.len() as u64;
            self.rot
                .add_sound((done.op.len / BLOCK).saturating_sub(bad));
        }
    }

    /// Reads that went past the engine's lock have ended well.
    pub fn account_good_reads(&mut self, count: u64, bytes: u64, ns: u64) {
        self.counters.flash_read_bytes += bytes;
        let Some(each) = ns.checked_div(count) else {
            return;
        };
        self.read_errors.clear();
        self.rot.add_sound(bytes / BLOCK);
        for _ in 0..count.min(SAMPLES_MAX) {
            self.ewma_ns = ewma(self.ewma_ns, each);
        }
    }

    /// The segment of a slot is being read: it may not be reused.
    pub fn pin(&mut self, slot: Slot) {
        let seg = self.log.segment_of(slot);
        self.log.segments[seg].pins += 1;
    }

    /// A read of a slot has ended.
    pub fn unpin_slot(&mut self, slot: Slot) {
        self.unpin(self.log.segment_of(slot) as u32);
    }

    /// The same, for whatever kept a segment.
    pub fn unpin(&mut self, seg: u32) {
        let s = &mut self.log.segments[seg as usize];
        s.pins -= 1;
    }

    /// What lies in a slot stays there until it is [let go](Self::let_go), whether or not the index points at it.
    pub fn hold(&mut self, slot: Slot) {
        let seg = self.log.segment_of(slot);
        let s = &mut self.log.segments[seg];
        s.held += 1;
        self.held_segments += usize::from(s.held == 1);
    }

    /// It is held once less.
    pub fn let_go(&mut self, slot: Slot) {
        let seg = self.log.segment_of(slot);
        let s = &mut self.log.segments[seg];
        s.held -= 1;
        self.held_segments -= usize::from(s.held == 0);
    }

    /// Is this a slot for data of a segment that is part of the log?
    pub fn is_in_log(&self, slot: Slot) -> bool {
        let seg = self.log.segment_of(slot);
        let s = self.log.segments.get(seg);
        s.is_some_and(|s| s.state == SegState::Closed)
            && self.log.is_for_data(slot % self.log.segment_slots)
    }

    /// Is anything held in a segment?
    pub fn holds(&self, seg: u32) -> bool {
        self.log.segments[seg as usize].held > 0
    }

    /// The index points at a slot from now on, to which something was appended.
    pub fn slot_filled(&mut self, slot: Slot, dirty: bool) {
        let seg = self.log.segment_of(slot);
        let second = self.log.is_second(slot);
        let s = &mut self.log.segments[seg];
        s.live += 1;
        s.dirty += u32::from(dirty);
        s.second += u32::from(second);
    }

    /// The same, and at another slot no more, if it did.
    pub fn slot_replaced(&mut self, slot: Slot, dirty: bool, instead: Option<Gone>) {
        self.slot_filled(slot, dirty);
        if let Some(old) = instead {
            self.slot_gone(old);
        }
    }

    /// The index points at a slot no more.
    pub fn slot_gone(&mut self, gone: Gone) {
        let seg = self.log.segment_of(gone.slot);
        let second = self.log.is_second(gone.slot);
        let s = &mut self.log.segments[seg];
        s.live -= 1;
        s.second -= u32::from(second);
        if gone.dirty && !self.faults.has(Fault::DirtyStaysCounted) {
            s.dirty -= 1;
        }
        self.copy_died(gone);
    }

    /// The index never pointed at a slot to which something was appended, and never will.
    pub fn slot_unused(&mut self, gone: Gone) {
        self.copy_died(gone);
    }

    fn copy_died(&mut self, gone: Gone) {
        let seg = self.log.segment_of(gone.slot);
        self.cleaner.died(seg as u32, gone.dirty);
        if self.counts(gone.disk, self.log.segments[seg].seq) {
            self.dead.add(gone.disk, gone.block);
        }
    }

    /// Does what a segment with this number says of a disk count?
    pub fn counts(&self, disk: u16, seg_seq: u64) -> bool {
        seg_seq >= self.since.get(&disk).copied().unwrap_or(self.run_seq)
    }

    /// Nothing counts any more that is said of a disk in segments below this number.
    pub fn forget_disk(&mut self, disk: u16, seq: u64) {
        self.since.insert(disk, seq);
        self.dead.forget(disk);
    }

    /// What a slot holds, the origin has now.
    pub fn slot_cleaned(&mut self, slot: Slot) {
        let seg = self.log.segment_of(slot);
        self.log.segments[seg].dirty -= 1;
        self.cleaner.destaged(seg as u32);
    }
}

fn cleaner_of<T: Token>(plan: Plan, log: &Log<T>) -> Cleaner {
    let room = log.segment_room() as u32;
    let cleaner = Cleaner::new(plan, log.segments.len() as u32, room);
    match log.copies_of_dirty() {
        1 => cleaner,
        _ => cleaner.counting_dirty_twice(),
    }
}

/// How a log of this size is cleaned.
fn plan_of<T: Token>(log: &Log<T>) -> Plan {
    let room = log.blocks_kept();
    Plan {
        order: Order::Index,
        heads: Heads::One,
        most: most_of(room),
        room,
        span: SPAN,
        price: WRITE_PRICE,
    }
}
