//! The devices under one log: which one an operation goes to, what of each is durable, how each does.
//!
//! The log knows one device. Where there are several, segments are numbered through over all of them
//! ([`hearth_io::Spread`]), and what is to be read or written goes to the device on which it lies. So the log, the map,
//! recovery and all that was proven of them stay what they are, if only the devices together are what
//! is assumed of one: *what was written before a flush began is durable when it has ended*. Therefore a flush of the
//! log is one of every device that was written since it was flushed last, and has ended when all of them have; if
//! one of them fails, it has failed.
//!
//! Which devices were written since is counted by writes that ended ([`OnDevice::written`]), and what is flushed when a
//! flush *ended* well ([`OnDevice::flushed`]), not when it was sent: two flushes of the log may be under way at
//! once (one for who waits, one for the map), and the second may not take for durable what only the first one makes so.
//!
//! Where everything is there twice ([`Spread::twice`]), what changes something goes to both halves and has ended when both
//! have. If one fails, its device is *lost*, and what has ended on the other has ended; but nobody is told before it is
//! durable that the device is lost ([`crate::flash::twice`]). So all such operations are joint ones there.

use crate::ctx::Io;
use crate::faults::{Fault, Faults};
use crate::flash::device::{FlashDevice, FlashOp, Users};
use crate::flash::log::{SegState, Slot};
use crate::flash::without::Failing;

use crate::stats::DeviceFigures;
use hearth_io::{Buf, BufSlice, IoDone, IoError, OpKind, Spread, Target};
use hearth_policy::{Answered, COST, Slow};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Of the segments that have been free longest, how many are looked at for one on another device than the last.
const LOOK_AHEAD: usize = 8;
/// Reads of slow devices that are remembered until what was read is moved, at most: the others come again.
const HOT_MAX: usize = 4096;
/// How often is looked how fast each answers.
const LOOK_NS: u64 = 100_000_000;
/// More devices than this make no more batches in flight: memory is bounded.
const WIDTH_MAX: usize = 4;
/// What one device has not ended for so long, while another one has ended what came later, it never will: it hangs.
const HANG_NS: u64 = 10_000_000_000;
/// Between two looks no more time than this has passed as far as that goes.
const AWAKE_NS: u64 = 1_000_000_000;
/// Places of one device that fail to be read within [`READS_NS`], with no success between that the core sees, after
/// which it counts as lost if everything is there twice.
const BAD_READS_MAX: usize = 32;
const READS_NS: u64 = 10_000_000_000;

/// One device.
#[derive(Debug, Default)]
struct OnDevice {
    /// Writes that have ended on it, well or not.
    written: u64,
    /// Of these, how many are durable.
    flushed: u64,
    /// When a part of something joint last ended on it.
    ended_ns: u64,
    /// Places that could not be read, and since when these are counted.
    bad_reads: BTreeSet<u64>,
    bad_since_ns: u64,
    /// Reads past the core that went well, when that was last looked at.
    past_reads: u64,
    figures: DeviceFigures,
    /// What the segments opened on it have cost.
    spent: u64,
}

/// A flush of the log that is under way on several devices, or anything that both halves get.
#[derive(Debug)]
struct Joint {
    /// Whose end has not been told yet.
    op: Option<FlashOp>,
    kind: OpKind,
    /// Devices that do a part of it.
    parts: u64,
    /// Devices that have not ended their part.
    waits: u64,
    /// In time as [`Devices::awake_ns`] has it.
    sent_ns: u64,
    result: Result<(), IoError>,
}

/// What one device does of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    joint: u64,
    device: u16,
    /// Writes that had ended on it when it was sent.
    covers: u64,
}

/// Something joint that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub op: FlashOp,
    pub kind: OpKind,
    pub result: Result<(), IoError>,
}

/// What comes of the end of a part.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// What has ended with it.
    pub ended: SmallVec<[Ended; 1]>,
    /// The device that is lost by it.
    pub lost: Option<u16>,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Devices {
    spread: Spread,
    each: Vec<OnDevice>,
    joints: BTreeMap<u64, Joint>,
    next_joint: u64,
    /// What has ended, and must not be told before it is durable that a device is lost.
    held: Vec<Ended>,
    /// That is on its way.
    holds: bool,
    /// Time as far as this program was awake: what it slept says nothing about a device.
    awake_ns: u64,
    woke_ns: u64,
    /// On which the last head was opened.
    last_head: u16,
    /// Which of them are to be left alone, and when that was last looked at.
    slow: Slow,
    looked_ns: u64,
    /// Which of them fail.
    pub failing: Failing,
    faults: Faults,
}

/// The bit of a device.
fn bit(device: u16) -> u64 {
    1u64.checked_shl(u32::from(device)).unwrap_or(0)
}

impl Devices {
    pub fn new(spread: Spread, faults: Faults) -> Devices {
        Devices {
            each: (0..spread.devices()).map(|_| OnDevice::default()).collect(),
            slow: Slow::new(spread.devices()),
            looked_ns: 0,
            failing: Failing::default(),
            spread,
            joints: BTreeMap::new(),
            next_joint: 0,
            held: Vec::new(),
            holds: false,
            awake_ns: 0,
            woke_ns: 0,
            last_head: u16::MAX,
            faults,
        }
    }

    pub fn spread(&self) -> &Spread {
        &self.spread
    }

    /// Is there more than one?
    pub fn are_several(&self) -> bool {
        self.each.len() > 1
    }

    /// Is everything there twice, as long as no device is lost?
    #[inline]
    pub fn are_twice(&self) -> bool {
        self.spread.is_twice()
    }

    /// Devices that can be written at once, as far as it matters.
    pub fn width(&self) -> usize {
        let halves = if self.are_twice() { 2 } else { 1 };
        (self.each.len() / halves).clamp(1, WIDTH_MAX)
    }

    /// Where a read of the log goes, and anything else where nothing is there twice.
    #[inline]
    pub fn place(&self, target: Target, offset: u64) -> (Target, u64) {
        match self.spread.read_place(offset) {
            (0, offset) => (target, offset),
            (device, offset) => (Target::Flash(device), offset),
        }
    }

    /// Where an operation was, in offsets of the log.
    pub fn whole(&self, done: &IoDone) -> u64 {
        let offset = done.op.offset;
        self.spread
            .whole(self.number(done), offset)
            .unwrap_or(offset)
    }

    /// Where what a read did not get can be read as well.
    pub fn other_half(&self, done: &IoDone) -> Option<(Target, u64)> {
        let (device, at) = (self.spread).other_half(self.whole(done), self.number(done))?;
        Some((Target::Flash(device), at))
    }

    fn number(&self, done: &IoDone) -> u16 {
        match done.op.target {
            Target::Flash(device) if self.are_several() => device,
            _ => 0,
        }
    }

    fn join(&mut self, op: FlashOp, kind: OpKind, waits: u64) -> u64 {
        let joint = self.next_joint;
        self.next_joint += 1;
        self.joints.insert(
            joint,
            Joint {
                op: Some(op),
                kind,
                parts: waits,
                waits,
                sent_ns: self.awake_ns,
                result: Ok(()),
            },
        );
        joint
    }

    /// The flushes that one of the log is made of.
    pub fn flush(&mut self, op: FlashOp) -> Vec<(Part, Io)> {
        let lost = self.spread.lost();
        let there = |n: usize| lost & bit(n as u16) == 0;
        let mark = matches!(op, FlashOp::Mark);
        // What is noted stands on the first.
        let asked = |n: usize| there(n) && !(mark && self.failing.is_left_out(n as u16));
        let needs =
            |(n, d): (usize, &OnDevice)| (d.written > d.flushed && asked(n)).then_some(n as u16);
        let mut which: Vec<u16> = self.each.iter().enumerate().filter_map(needs).collect();
        if which.is_empty() {
            which.extend((0..self.each.len()).find(|n| there(*n)).map(|n| n as u16));
        }
        let one = self.faults.has(Fault::FlushOneDevice)
            || self.faults.has(Fault::SecondHalfUnflushed) && self.are_twice();
        if one {
            which.truncate(1);
        }
        let waits = which.iter().fold(0, |waits, n| waits | bit(*n));
        let joint = self.join(op, OpKind::Flush, waits);
        let each = &self.each;
        let parts = which.into_iter().filter_map(|device| {
            let d = each.get(usize::from(device))?;
            let covers = d.written;
            let part = Part {
                joint,
                device,
                covers,
            };
            Some((part, Io::flush(Target::Flash(device))))
        });
        parts.collect()
    }

    /// What both halves get of something that changes the log, where everything is there twice.
    pub fn pair(&mut self, op: FlashOp, io: &Io) -> Vec<(Part, Io)> {
        let places: SmallVec<[(usize, u16, u64); 2]> = self.spread.sides(io.offset).collect();
        let waits = places.iter().fold(0, |waits, (_, n, _)| waits | bit(*n));
        let joint = self.join(op, io.kind, waits);
        let parts = places.into_iter().map(|(side, device, offset)| {
            let part = Part {
                joint,
                device,
                covers: 0,
            };
            let bufs = match io.bufs.as_slice() {
                [one] => self.own_block(io.offset, one, device),
                _ => None,
            };
            let bufs = match (bufs, &io.second) {
                (Some(own), _) => [own].into_iter().collect(),
                (None, Some(second)) if side == 1 => second.clone(),
                (None, _) => io.bufs.clone(),
            };
            let len = match io.second.is_some() {
                true => bufs.iter().map(|b: &BufSlice| b.len() as u64).sum(),
                false => io.len,
            };
            let io = Io {
                target: Target::Flash(device),
                offset,
                len,
                bufs,
                second: None,
                crcs: io.crcs.clone(),
                ..*io
            };
            (part, io)
        });
        parts.collect()
    }

    fn own_block(&self, offset: u64, data: &BufSlice, device: u16) -> Option<BufSlice> {
        let own = self.spread.own_block(offset, data.bytes(), device)?;
        let buf = Buf::zeroed(own.len()).all();
        buf.sub(0, own.len()).bytes_mut().copy_from_slice(&own);
        Some(buf)
    }

    /// The batch that failed on a device which cannot be lost, as there is no other with all of it.
    pub fn fails_alone(&self, part: Part, done: &IoDone) -> Option<u64> {
        let lost = self.spread.lost();
        let joint = self.joints.get(&part.joint)?;
        match joint.op {
            Some(FlashOp::Batch { seq })
                if done.result.is_err()
                    && self.are_twice()
                    && lost & bit(part.device) == 0
                    && !self.spread.is_whole_without(lost | bit(part.device)) =>
            {
                Some(seq)
            }
            _ => None,
        }
    }

    /// A device has done its part; if what it is a part of has ended with it, how. It has when all have ended well or, where
    /// nothing is there twice, one has not: nobody waits for a device that hangs to hear that another one failed. What may fail
    /// waits for both halves: a discard that one refused goes on in the other, and may land on what is written there next.
    pub fn part_ended(&mut self, part: Part, result: Result<(), IoError>) -> Told {
        if let Some(d) = self.each.get_mut(usize::from(part.device)) {
            d.ended_ns = self.awake_ns;
            if result.is_ok() {
                d.flushed = d.flushed.max(part.covers);
            }
        }
        if !self.spread.is_there(part.device) {
            return Told::default();
        }
        let op = self.joints.get(&part.joint).and_then(|joint| joint.op);
        let matters = !matches!(op, Some(FlashOp::Trim { .. } | FlashOp::Summary { .. }));
        if result.is_err() && matters && self.spread.lose(part.device) {
            return self.leave(part.device);
        }
        let result = match self.faults.has(Fault::FlushForgetsOne) {
            true => Ok(()),
            false => result,
        };
        let early = self.faults.has(Fault::FlushEndsEarly);
        let twice = self.are_twice();
        let Some(joint) = self.joints.get_mut(&part.joint) else {
            return Told::default();
        };
        joint.waits &= !bit(part.device);
        joint.result = joint.result.and(result);
        let over = joint.waits == 0;
        let fails = result.is_err() && (matters || !twice);
        let told = match over || early || fails {
            true => joint.op.take(),
            false => None,
        };
        let (kind, result) = (joint.kind, joint.result);
        if over {
            self.joints.remove(&part.joint);
        }
        let ended = told.map(|op| Ended { op, kind, result });
        let ended = ended.and_then(|ended| self.hold(ended));
        Told {
            ended: ended.into_iter().collect(),
            lost: None,
        }
    }

    /// Keeps what must not be told yet.
    fn hold(&mut self, ended: Ended) -> Option<Ended> {
        let own = matches!(ended.op, FlashOp::Mark | FlashOp::Floor | FlashOp::Lost);
        if !self.holds || own || self.faults.has(Fault::LossUnnoted) {
            return Some(ended);
        }
        self.held.push(ended);
        None
    }

    /// A device is lost: nobody waits for it, and nothing that has ended by that is told yet.
    fn leave(&mut self, device: u16) -> Told {
        self.holds = true;
        let mut over = Vec::new();
        for (n, joint) in &mut self.joints {
            joint.waits &= !bit(device);
            if joint.waits == 0 {
                over.push(*n);
            }
        }
        let mut told = Told {
            lost: Some(device),
            ..Told::default()
        };
        for n in over {
            if let Some(joint) = self.joints.remove(&n)
                && let Some(op) = joint.op
            {
                let (kind, result) = (joint.kind, joint.result);
                told.ended.extend(self.hold(Ended { op, kind, result }));
            }
        }
        told
    }

    /// Loses a device on which something hangs, or of which nothing can be read, if everything is there without it.
    pub fn lose_failing(&mut self, now: u64) -> Told {
        if !self.are_twice() {
            return Told::default();
        }
        self.awake_ns += now.saturating_sub(self.woke_ns).min(AWAKE_NS);
        self.woke_ns = now;
        let now = self.awake_ns;
        let each = &self.each;
        let lost = self.spread.lost();
        let goes_on = |than: u16, joint: &Joint| {
            // Time does not go on between two looks: what ended right after it was sent is seen by what has ended.
            let ended = joint.parts & !joint.waits & !lost != 0;
            let mut others = (0..).zip(each);
            ended || others.any(|(n, d)| n != than && d.ended_ns > joint.sent_ns)
        };
        let hung = |joint: &Joint| {
            let late = now.saturating_sub(joint.sent_ns) > HANG_NS;
            let alone = late && joint.waits.is_power_of_two();
            let device = joint.waits.trailing_zeros() as u16;
            (alone && goes_on(device, joint)).then_some(device)
        };
        let unread = |(n, d): (u16, &OnDevice)| (d.bad_reads.len() > BAD_READS_MAX).then_some(n);
        let hung = self.joints.values().find_map(hung);
        let failed = hung.or_else(|| self.spread.suspect());
        // One that is lost stays in that state: lost once more at every look, it would never be noted for good.
        let mut there = (0..).zip(each).filter(|(n, _)| lost & bit(*n) == 0);
        let device = failed.or_else(|| there.find_map(unread));
        match device.filter(|device| self.spread.lose(*device)) {
            Some(device) => self.leave(device),
            None => Told::default(),
        }
    }

    /// What several devices do, or did, and nobody has been told.
    #[cfg(any(test, feature = "check"))]
    pub fn under_way(&self) -> impl Iterator<Item = &FlashOp> {
        let joints = self.joints.values().filter_map(|joint| joint.op.as_ref());
        joints.chain(self.held.iter().map(|ended| &ended.op))
    }

    /// It is durable that a device is lost, or nobody waits for that any more: what has ended meanwhile.
    pub fn let_go(&mut self) -> Vec<Ended> {
        self.holds = false;
        std::mem::take(&mut self.held)
    }

    /// A read of a device has ended.
    pub fn note_read(&mut self, done: &IoDone, now: u64) {
        let n = usize::from(self.number(done));
        let Some(d) = self.each.get_mut(n).filter(|_| self.spread.is_twice()) else {
            return;
        };
        if done.is_memory_gone() {
            return;
        }
        if done.result.is_ok() || now.saturating_sub(d.bad_since_ns) > READS_NS {
            d.bad_reads.clear();
            d.bad_since_ns = now;
        }
        if done.result.is_err() {
            d.bad_reads.insert(done.op.offset);
        }
    }

    /// So many reads of each device went well past the core, since the start: one of which something can be read is not lost
    /// for what cannot.
    pub fn note_past_reads(&mut self, past: impl Iterator<Item = u64>) {
        for (d, reads) in self.each.iter_mut().zip(past) {
            if std::mem::replace(&mut d.past_reads, reads) != reads {
                d.bad_reads.clear();
            }
        }
    }

    /// An operation has ended.
    pub fn account(&mut self, done: &IoDone) {
        let device = self.number(done);
        self.failing.note(device, done);
        let Some(d) = self.each.get_mut(usize::from(device)) else {
            return;
        };
        let f = &mut d.figures;
        f.errors += u64::from(done.result.is_err() && !done.is_memory_gone());
        match done.op.kind {
            OpKind::Read => {
                f.reads += 1;
                f.read_bytes += done.op.len;
                f.read_ns += done.latency_ns;
            }
            OpKind::Flush => {
                f.flushes += 1;
                f.flush_ns += done.latency_ns;
            }
            OpKind::Write => {
                f.writes += 1;
                f.write_bytes += done.op.len;
                f.write_ns += done.latency_ns;
                d.written += 1;
            }
            OpKind::Discard | OpKind::WriteZeroes { .. } => d.written += 1,
        }
    }

    /// Answers a device so slowly that it is left alone?
    pub fn is_slow(&self, device: u16) -> bool {
        self.slow.is_slow(usize::from(device))
    }

    /// And do the others do better without it?
    pub fn is_surely_slow(&self, device: u16) -> bool {
        self.slow.is_surely_slow(usize::from(device))
    }

    /// Those that do, and the means of their reads and writes.
    pub fn slow_ones(&self) -> Vec<(u16, u64, u64)> {
        let all = (0..self.each.len() as u16).filter(|n| self.is_surely_slow(*n));
        all.map(|n| {
            let (reads, writes) = self.slow.means(usize::from(n));
            (n, reads, writes)
        })
        .collect()
    }

    /// Was an operation one of such a device?
    pub fn is_of_slow(&self, done: &IoDone) -> bool {
        self.any_slow() && self.is_slow(self.number(done))
    }

    /// Does any?
    pub fn any_slow(&self) -> bool {
        self.slow.any()
    }

    /// Is it time to look how fast each answers? Not where everything is there twice: each segment lies on two of them.
    pub fn is_look_due(&self, now: u64) -> bool {
        self.are_several() && !self.are_twice() && now.saturating_sub(self.looked_ns) >= LOOK_NS
    }

    /// Looks how fast each answers, where so much was read past the core: (reads, nanoseconds). True if a device is to be left
    /// alone from now on, or no more.
    pub fn look(&mut self, now: u64, past: impl Iterator<Item = (u64, u64)>) -> bool {
        self.looked_ns = now;
        let each = self.each.iter().map(|d| d.figures);
        let answered = each.zip(past).map(|(f, (reads, read_ns))| Answered {
            reads: f.reads + reads,
            read_ns: f.read_ns + read_ns,
            writes: f.writes,
            write_ns: f.write_ns,
        });
        let answered: Vec<Answered> = answered.collect();
        self.slow.look(now, &answered)
    }

    /// Of these free segments' devices, which is to be written next: that on which least was spent.
    fn next(&mut self, ahead: &[u16]) -> Option<usize> {
        let spent = |n: u16| self.each.get(usize::from(n)).map_or(0, |d| d.spent);
        let order = |n: u16| (self.is_slow(n), spent(n), n == self.last_head);
        let at = (0..ahead.len()).min_by_key(|&at| (order(ahead[at]), at))?;
        let cost = self.slow.cost(usize::from(ahead[at]), self.looked_ns);
        // One that was left alone, or had nothing free, does not make up for it.
        let least = self
            .each
            .iter()
            .map(|d| d.spent)
            .max()?
            .saturating_sub(8 * COST);
        let d = self.each.get_mut(usize::from(ahead[at]))?;
        d.spent = d.spent.max(least) + cost;
        self.last_head = ahead[at];
        Some(at)
    }

    /// How each does.
    pub fn figures(&self) -> Vec<DeviceFigures> {
        self.each.iter().map(|d| d.figures).collect()
    }
}

impl<U: Users> FlashDevice<U> {
    /// The device that a segment lies on.
    pub fn device_of(&self, seg: u32) -> u16 {
        self.devices.spread.place(self.layout.segment_offset(seg)).0
    }

    /// Which halves of a segment are on devices that are not lost.
    pub fn sides_there(&self, seg: u32) -> [bool; 2] {
        let (spread, at) = (self.devices.spread(), self.layout.segment_offset(seg));
        [0, 1].map(|side| spread.is_there(spread.device_of_side(at, side)))
    }

    /// Is something on its way to a segment that changes what is there?
    pub fn is_written(&self, seg: u32) -> bool {
        let Some(s) = self.log.segments.get(seg as usize) else {
            return true;
        };
        // A summary that is being written, or an operation that reads, keeps it pinned.
        s.batches > 0 || s.pins > 0 || s.state == SegState::Trimming
    }

    /// The free segment that is written next: that which has been free longest; of several devices one on
    /// that which has its turn, so that all of them are busy, and each as much as it is fast.
    pub fn take_free(&mut self) -> Option<u32> {
        if !self.devices.are_several() {
            return self.log.free.pop_front();
        }
        if self.log.free.is_empty() {
            self.unpark();
        }
        let ahead = self.log.free.iter().take(LOOK_AHEAD);
        let ahead: Vec<u16> = ahead.map(|seg| self.device_of(*seg)).collect();
        let at = self.devices.next(&ahead)?;
        self.log.free.remove(at)
    }

    /// Devices are slow from now on, or no more: what lies on those is left alone, and what is free on them is not
    /// written as long as there is something else.
    pub fn sort_by_speed(&mut self) {
        let (mut left, mut sound) = (Vec::new(), 0);
        for seg in 0..self.log.segments.len() as u32 {
            let state = self.log.segments[seg as usize].state;
            // What is still being sealed is left alone when it is: the cleaner does not know it before that.
            let sealing = self.log.is_sealing(seg);
            match self.is_on_slow(seg) {
                true if state == SegState::Closed && !sealing => left.push(seg),
                true => {}
                false => {
                    sound += usize::from(state != SegState::Bad && !self.is_on_emptying(seg));
                }
            }
        }
        // Too few to go round with.
        self.leaves_slow = self.devices.any_slow() && sound >= 2 * self.log.free_wanted() + 2;
        let before = std::mem::take(&mut self.log.aside);
        for seg in before {
            if !self.is_left_alone(seg) {
                // One of a device that is emptied comes to the cleaner when that ends.
                if !self.is_on_emptying(seg) {
                    self.cleaner.give_back(seg);
                }
            } else {
                self.log.aside.insert(seg);
            }
        }
        for seg in left {
            self.leave_alone(seg);
        }
        let mut free = std::mem::take(&mut self.log.free);
        free.extend(std::mem::take(&mut self.log.parked));
        let (parked, free) = free.into_iter().partition(|seg| self.is_left_alone(*seg));
        (self.log.parked, self.log.free) = (parked, free);
        self.hot.clear();
        self.cleaner.set_room(self.log.blocks_kept());
    }

    /// Does a segment lie on a device that is slow?
    pub fn is_on_slow(&self, seg: u32) -> bool {
        self.devices.any_slow() && self.devices.is_slow(self.device_of(seg))
    }

    /// Is what lies in a segment left where it is, and the segment not written, because its device is slow?
    pub fn is_left_alone(&self, seg: u32) -> bool {
        self.leaves_slow && self.is_on_slow(seg)
    }

    /// A closed segment that could be freed is not, if its device is slow.
    pub fn leave_alone(&mut self, seg: u32) {
        let choice = &self.evict.choice;
        if self.is_left_alone(seg) && choice.may_be_left(seg) && self.log.aside.insert(seg) {
            self.cleaner.withdraw(seg);
        }
    }

    /// Room is short: what is free on a slow device is better than none. True if there was some.
    pub fn unpark(&mut self) -> bool {
        let Some(seg) = self.log.parked.pop_front() else {
            return false;
        };
        self.log.free.push_back(seg);
        self.cleaner.set_room(self.log.blocks_kept());
        true
    }

    /// A segment is free.
    pub fn put_free(&mut self, seg: u32) {
        match self.is_left_alone(seg) {
            true => {
                self.log.parked.push_back(seg);
                self.cleaner.set_room(self.log.blocks_kept());
            }
            false => self.log.free.push_back(seg),
        }
    }

    /// Was something read lately that shall not stay where it is?
    pub fn moves_off_slow(&self) -> bool {
        !self.hot.is_empty()
    }

    /// Blocks from `slot` on were read: if their device is slow, they shall not stay there.
    pub fn note_read(&mut self, slot: Slot, count: u32) {
        if !self.leaves_slow || self.hot.len() >= HOT_MAX {
            return;
        }
        let device = self.device_of(self.log.segment_of(slot) as u32);
        if self.devices.is_surely_slow(device) {
            self.hot.push_back((slot, count));
        }
    }

    /// Puts free segments in an order in which every device has its share of any part of them.
    pub fn spread_free(&mut self) {
        if !self.devices.are_several() {
            return;
        }
        let mut lists = vec![Vec::new(); self.devices.each.len()];
        for seg in std::mem::take(&mut self.log.free) {
            let device = usize::from(self.device_of(seg));
            lists[device].push(seg);
        }
        let mut all: Vec<(u64, u32)> = Vec::new();
        for list in &lists {
            // The middle of its part, if the list were spread over the same length as any other.
            let at = |i: usize| ((2 * i as u64 + 1) << 31) / list.len() as u64;
            all.extend(list.iter().enumerate().map(|(i, seg)| (at(i), *seg)));
        }
        all.sort_unstable();
        self.log.free = all
            .into_iter()
            .map(|(_, seg)| seg)
            .collect::<VecDeque<u32>>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_io::{Class, IoOp};

    const A: u64 = 1 << 20;

    /// Two devices: the first megabyte on one, the second on the other from 4 KiB on.
    fn two() -> Devices {
        let spread = Spread::over(A, [(4096, A)]);
        Devices::new(spread, Faults::none())
    }

    fn ended(devices: &mut Devices, kind: OpKind, at: u64) {
        let (target, offset) = devices.place(Target::Flash(0), at);
        let op = IoOp {
            id: 0,
            target,
            kind,
            offset,
            len: 4096,
            bufs: Default::default(),
            crcs: Default::default(),
            sums: false,
            class: Class::Foreground,
        };
        let done = op.done(Ok(()), 1000);
        assert_eq!(devices.whole(&done), at);
        devices.account(&done);
    }

    fn flush(devices: &mut Devices) -> Vec<(Part, u16)> {
        let parts = devices.flush(FlashOp::Map);
        let parts = parts.into_iter().map(|(part, io)| match io.target {
            Target::Flash(device) => (part, device),
            Target::Origin(_) => panic!("a flush of flash goes to flash"),
        });
        parts.collect()
    }

    fn end(devices: &mut Devices, part: Part, result: Result<(), IoError>) -> Option<Ended> {
        devices.part_ended(part, result).ended.pop()
    }

    #[test]
    fn a_flush_is_one_of_every_device_that_was_written_since() {
        let mut devices = two();
        let which = |parts: &[(Part, u16)]| parts.iter().map(|(_, d)| *d).collect::<Vec<_>>();
        // Nothing was written: somebody waits all the same.
        let none = flush(&mut devices);
        assert_eq!(which(&none), [0]);
        assert!(end(&mut devices, none[0].0, Ok(())).is_some());
        ended(&mut devices, OpKind::Write, A);
        ended(&mut devices, OpKind::Read, 0);
        let second = flush(&mut devices);
        assert_eq!(which(&second), [1]);
        assert!(end(&mut devices, second[0].0, Ok(())).is_some());
        ended(&mut devices, OpKind::Write, 0);
        ended(&mut devices, OpKind::Write, A);
        let both = flush(&mut devices);
        assert_eq!(which(&both), [0, 1]);
        assert!(end(&mut devices, both[1].0, Ok(())).is_none());
        assert!(end(&mut devices, both[0].0, Ok(())).is_some());
        assert_eq!(which(&flush(&mut devices)), [0]);
    }

    #[test]
    fn a_second_flush_does_not_take_for_durable_what_the_first_one_only_makes_so() {
        let mut devices = two();
        ended(&mut devices, OpKind::Write, A);
        let first = flush(&mut devices);
        let second = flush(&mut devices);
        assert_eq!((first[0].1, second[0].1), (1, 1));
        // A write that ends behind a flush is not covered by it.
        ended(&mut devices, OpKind::Write, A);
        assert!(end(&mut devices, second[0].0, Ok(())).is_some());
        assert!(end(&mut devices, first[0].0, Ok(())).is_some());
        assert_eq!(flush(&mut devices)[0].1, 1);
    }

    #[test]
    fn one_that_fails_fails_the_flush_at_once_and_has_to_be_flushed_again() {
        let mut devices = two();
        ended(&mut devices, OpKind::Write, 0);
        ended(&mut devices, OpKind::Write, A);
        let both = flush(&mut devices);
        let told = end(&mut devices, both[1].0, Err(IoError::Os(5)));
        let failed = |e: &Ended| matches!((e.op, e.result), (FlashOp::Map, Err(_)));
        assert!(told.as_ref().is_some_and(failed));
        assert!(end(&mut devices, both[0].0, Ok(())).is_none());
        assert_eq!(flush(&mut devices)[0].1, 1);
    }

    /// Both of two devices have everything.
    fn mirrored() -> Devices {
        let how = hearth_io::Twice {
            front: 4096,
            segment: 4096,
            own: [0; 2],
            named: |_, _| None,
            lost: 0,
            once: false,
        };
        let spread = Spread::over(A + 4096, [(4096, A)]).twice(how);
        Devices::new(spread, Faults::none())
    }

    fn write(devices: &mut Devices) -> Vec<Part> {
        let data = Buf::zeroed(4096).all();
        let io = Io::write(Target::Flash(0), 8192, [data]);
        let parts = devices.pair(FlashOp::Batch { seq: 7 }, &io);
        let at = |io: &Io| (io.target, io.offset);
        let places: Vec<_> = parts.iter().map(|(_, io)| at(io)).collect();
        let both = [(Target::Flash(0), 8192), (Target::Flash(1), 8192)];
        let there = both
            .into_iter()
            .zip(0..)
            .filter(|(_, n)| devices.spread.is_there(*n));
        assert_eq!(places, there.map(|(at, _)| at).collect::<Vec<_>>());
        parts.into_iter().map(|(part, _)| part).collect()
    }

    #[test]
    fn a_write_has_ended_when_both_halves_have_it() {
        let mut devices = mirrored();
        let parts = write(&mut devices);
        assert!(end(&mut devices, parts[1], Ok(())).is_none());
        assert!(end(&mut devices, parts[0], Ok(())).is_some_and(|e| e.result.is_ok()));
    }

    /// A segment was taken for free while the other half was still being discarded, and written to.
    #[test]
    fn a_discard_that_one_half_refuses_has_ended_when_the_other_has_too() {
        let mut devices = mirrored();
        let io = Io::range(Target::Flash(0), OpKind::Discard, 8192, 4096);
        let parts = devices.pair(FlashOp::Trim { seg: 0 }, &io);
        let parts: Vec<_> = parts.into_iter().map(|(part, _)| part).collect();
        assert!(end(&mut devices, parts[0], Err(IoError::Os(5))).is_none());
        assert!(end(&mut devices, parts[1], Ok(())).is_some());
    }

    #[test]
    fn what_one_half_alone_has_is_not_told_before_it_is_durable_that_the_other_is_lost() {
        let mut devices = mirrored();
        let (first, second) = (write(&mut devices), write(&mut devices));
        assert!(end(&mut devices, first[1], Ok(())).is_none());
        let told = devices.part_ended(first[0], Err(IoError::Os(5)));
        assert_eq!((told.lost, told.ended.len()), (Some(0), 0));
        assert!(end(&mut devices, second[1], Ok(())).is_none());
        // Whatever it says later.
        assert!(end(&mut devices, second[0], Ok(())).is_none());
        assert_eq!(write(&mut devices).len(), 1);
        let told = devices.let_go();
        assert_eq!(told.len(), 2);
        assert!(told.iter().all(|e| e.result.is_ok()));
        // The one that is left fails as a single one does.
        let last = write(&mut devices);
        let failed = end(&mut devices, last[0], Err(IoError::Os(5)));
        assert!(failed.is_some_and(|e| e.result.is_err()));
    }

    #[test]
    fn one_that_hangs_while_the_other_goes_on_is_lost() {
        let mut devices = mirrored();
        let parts = write(&mut devices);
        // It may have slept.
        assert_eq!(devices.lose_failing(10 * HANG_NS).lost, None);
        devices.part_ended(parts[0], Ok(()));
        let looks = |devices: &mut Devices| {
            let from = devices.woke_ns;
            let looks = (1..20).map(|n| devices.lose_failing(from + n * AWAKE_NS).lost);
            looks.flatten().collect::<Vec<_>>()
        };
        assert_eq!(looks(&mut devices), [1]);
        assert_eq!(devices.let_go().len(), 1);
        // The other one ended its part in the moment in which it was sent, and nothing was sent since.
        let mut devices = mirrored();
        let parts = write(&mut devices);
        devices.part_ended(parts[0], Ok(()));
        assert_eq!(looks(&mut devices), [1]);
        // Both hang: nobody knows which of them would come back.
        let mut devices = mirrored();
        write(&mut devices);
        assert!(looks(&mut devices).is_empty());
    }

    fn unread(devices: &mut Devices) {
        for n in 0..=BAD_READS_MAX as u64 {
            let op = IoOp {
                id: 0,
                target: Target::Flash(0),
                kind: OpKind::Read,
                offset: n * 4096,
                len: 4096,
                bufs: Default::default(),
                crcs: Default::default(),
                sums: false,
                class: Class::Foreground,
            };
            devices.note_read(&op.done(Err(IoError::Os(5)), 1000), 1);
        }
    }

    #[test]
    fn one_of_which_something_can_be_read_is_not_lost_for_what_cannot() {
        let mut devices = mirrored();
        devices.note_past_reads([7, 7].into_iter());
        unread(&mut devices);
        devices.note_past_reads([8, 7].into_iter());
        assert_eq!(devices.lose_failing(1).lost, None);
        unread(&mut devices);
        // What the other one gives says nothing of it.
        devices.note_past_reads([8, 9].into_iter());
        assert_eq!(devices.lose_failing(2).lost, Some(0));
        // It is lost once: what waits until that is noted would wait for ever.
        assert_eq!(devices.lose_failing(3).lost, None);
    }

    #[test]
    fn a_batch_that_fails_where_no_other_device_has_it_may_be_sent_again() {
        let mut devices = mirrored();
        let failed = |part: Part| {
            let op = IoOp {
                id: 0,
                target: Target::Flash(part.device),
                kind: OpKind::Write,
                offset: 8192,
                len: 4096,
                bufs: Default::default(),
                crcs: Default::default(),
                sums: false,
                class: Class::Foreground,
            };
            op.done(Err(IoError::Os(5)), 1000)
        };
        let parts = write(&mut devices);
        assert_eq!(devices.fails_alone(parts[0], &failed(parts[0])), None);
        devices.part_ended(parts[0], Err(IoError::Os(5)));
        devices.part_ended(parts[1], Ok(()));
        devices.let_go();
        let parts = write(&mut devices);
        assert_eq!(devices.fails_alone(parts[0], &failed(parts[0])), Some(7));
        // It is not over by that.
        assert!(end(&mut devices, parts[0], Ok(())).is_some_and(|e| e.result.is_ok()));
    }
}
