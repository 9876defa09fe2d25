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

use crate::ctx::Io;
use crate::faults::{Fault, Faults};
use crate::flash::device::{FlashDevice, FlashOp, Users};
use crate::flash::log::{SegState, Slot};

use crate::stats::DeviceFigures;
use hearth_io::{IoDone, IoError, OpKind, Spread, Target};
use hearth_policy::{Answered, COST, Slow};
use slab::Slab;
use std::collections::VecDeque;

/// Of the segments that have been free longest, how many are looked at for one on another device than the last.
const LOOK_AHEAD: usize = 8;
/// Reads of slow devices that are remembered until what was read is moved, at most: the others come again.
const HOT_MAX: usize = 4096;
/// How often is looked how fast each answers.
const LOOK_NS: u64 = 100_000_000;
/// More devices than this make no more batches in flight: memory is bounded.
const WIDTH_MAX: usize = 4;

/// One device.
#[derive(Debug, Default)]
struct OnDevice {
    /// Writes that have ended on it, well or not.
    written: u64,
    /// Of these, how many are durable.
    flushed: u64,
    figures: DeviceFigures,
    /// What the segments opened on it have cost.
    spent: u64,
}

/// A flush of the log that is under way on several devices.
#[derive(Debug)]
struct Joint {
    /// Whose end has not been told yet.
    op: Option<FlashOp>,
    left: usize,
}

/// A flush of one device for one of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    joint: usize,
    device: u16,
    /// Writes that had ended on it when it was sent.
    covers: u64,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Devices {
    spread: Spread,
    each: Vec<OnDevice>,
    joints: Slab<Joint>,
    /// On which the last head was opened.
    last_head: u16,
    /// Which of them are to be left alone, and when that was last looked at.
    slow: Slow,
    looked_ns: u64,
    faults: Faults,
}

impl Devices {
    pub fn new(spread: Spread, faults: Faults) -> Devices {
        Devices {
            each: (0..spread.devices()).map(|_| OnDevice::default()).collect(),
            slow: Slow::new(spread.devices()),
            looked_ns: 0,
            spread,
            joints: Slab::new(),
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

    /// Devices that can be written at once, as far as it matters.
    pub fn width(&self) -> usize {
        self.each.len().min(WIDTH_MAX)
    }

    /// Where an operation of the log goes that is no flush.
    #[inline]
    pub fn place(&self, target: Target, offset: u64) -> (Target, u64) {
        match self.spread.place(offset) {
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

    fn number(&self, done: &IoDone) -> u16 {
        match done.op.target {
            Target::Flash(device) if self.are_several() => device,
            _ => 0,
        }
    }

    /// The flushes that one of the log is made of.
    pub fn flush(&mut self, op: FlashOp) -> Vec<(Part, Io)> {
        let needs = |(n, d): (usize, &OnDevice)| (d.written > d.flushed).then_some(n as u16);
        let mut which: Vec<u16> = self.each.iter().enumerate().filter_map(needs).collect();
        if which.is_empty() {
            which.push(0);
        }
        if self.faults.has(Fault::FlushOneDevice) {
            which.truncate(1);
        }
        let joint = self.joints.insert(Joint {
            op: Some(op),
            left: which.len(),
        });
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

    /// A flush of one device has ended; if that of the log has with it, how. It has when all have ended well or one has
    /// not: nobody waits for a device that hangs to hear that another one failed.
    pub fn part_ended(
        &mut self,
        part: Part,
        result: Result<(), IoError>,
    ) -> Option<(FlashOp, Result<(), IoError>)> {
        if result.is_ok()
            && let Some(d) = self.each.get_mut(usize::from(part.device))
        {
            d.flushed = d.flushed.max(part.covers);
        }
        let result = match self.faults.has(Fault::FlushForgetsOne) {
            true => Ok(()),
            false => result,
        };
        let joint = self.joints.get_mut(part.joint)?;
        joint.left -= 1;
        let over = joint.left == 0 || self.faults.has(Fault::FlushEndsEarly);
        let told = match over || result.is_err() {
            true => joint.op.take(),
            false => None,
        };
        if joint.left == 0 {
            self.joints.remove(part.joint);
        }
        told.map(|op| (op, result))
    }

    /// An operation has ended.
    pub fn account(&mut self, done: &IoDone) {
        let n = usize::from(self.number(done));
        let Some(d) = self.each.get_mut(n) else {
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

    /// Those that do, and the means of their reads and writes.
    pub fn slow_ones(&self) -> Vec<(u16, u64, u64)> {
        let all = (0..self.each.len() as u16).filter(|n| self.is_slow(*n));
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

    /// Is it time to look how fast each answers?
    pub fn is_look_due(&self, now: u64) -> bool {
        self.are_several() && now.saturating_sub(self.looked_ns) >= LOOK_NS
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
            let sealing = self.log.sealing.iter().any(|s| s.seg == seg);
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

    fn is_on_slow(&self, seg: u32) -> bool {
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
        if self.leaves_slow
            && self.hot.len() < HOT_MAX
            && self.is_on_slow(self.log.segment_of(slot) as u32)
        {
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

    #[test]
    fn a_flush_is_one_of_every_device_that_was_written_since() {
        let mut devices = two();
        let which = |parts: &[(Part, u16)]| parts.iter().map(|(_, d)| *d).collect::<Vec<_>>();
        // Nothing was written: somebody waits all the same.
        let none = flush(&mut devices);
        assert_eq!(which(&none), [0]);
        assert!(devices.part_ended(none[0].0, Ok(())).is_some());
        ended(&mut devices, OpKind::Write, A);
        ended(&mut devices, OpKind::Read, 0);
        let second = flush(&mut devices);
        assert_eq!(which(&second), [1]);
        assert!(devices.part_ended(second[0].0, Ok(())).is_some());
        ended(&mut devices, OpKind::Write, 0);
        ended(&mut devices, OpKind::Write, A);
        let both = flush(&mut devices);
        assert_eq!(which(&both), [0, 1]);
        assert!(devices.part_ended(both[1].0, Ok(())).is_none());
        assert!(devices.part_ended(both[0].0, Ok(())).is_some());
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
        assert!(devices.part_ended(second[0].0, Ok(())).is_some());
        assert!(devices.part_ended(first[0].0, Ok(())).is_some());
        assert_eq!(flush(&mut devices)[0].1, 1);
    }

    #[test]
    fn one_that_fails_fails_the_flush_at_once_and_has_to_be_flushed_again() {
        let mut devices = two();
        ended(&mut devices, OpKind::Write, 0);
        ended(&mut devices, OpKind::Write, A);
        let both = flush(&mut devices);
        let told = devices.part_ended(both[1].0, Err(IoError::Os(5)));
        assert!(matches!(told, Some((FlashOp::Map, Err(_)))));
        assert!(devices.part_ended(both[0].0, Ok(())).is_none());
        assert_eq!(flush(&mut devices)[0].1, 1);
    }
}
