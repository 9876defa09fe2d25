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
use crate::flash::log::SegState;
use crate::stats::DeviceFigures;
use hearth_io::{IoDone, IoError, OpKind, Spread, Target};
use slab::Slab;
use std::collections::VecDeque;

/// Of the segments that have been free longest, how many are looked at for one on another device than the last.
const LOOK_AHEAD: usize = 8;
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
    faults: Faults,
}

impl Devices {
    pub fn new(spread: Spread, faults: Faults) -> Devices {
        Devices {
            each: (0..spread.devices()).map(|_| OnDevice::default()).collect(),
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
    /// another than the last, so that all of them are busy.
    pub fn take_free(&mut self) -> Option<u32> {
        if !self.devices.are_several() {
            return self.log.free.pop_front();
        }
        let last = self.devices.last_head;
        let ahead = self.log.free.iter().take(LOOK_AHEAD);
        let at = ahead.copied().position(|seg| self.device_of(seg) != last);
        let seg = self.log.free.remove(at.unwrap_or(0))?;
        self.devices.last_head = self.device_of(seg);
        Some(seg)
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
