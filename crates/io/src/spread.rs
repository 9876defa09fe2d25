//! Several flash devices as one: where on which of them an offset of the whole lies.
//!
//! A pool of several devices has one log, whose segments are numbered through: first those of the first device,
//! then those of the second, and so on. So the whole is the devices one behind the other, each device but the
//! first without what lies before its segments. What lies at an offset is found by range, and a range of the
//! whole that is one segment or a part of it lies on one device. With one device, offsets are what they were.
//!
//! A pool may keep everything twice ([`Spread::twice`]). Then the devices have twice as many segments as the log, and
//! segment `n` of the log is segments `n` and `n + half of all` of the devices, its two *halves*, which never
//! lie on the same one. What lies before the segments is on the first two devices, at the same places. So the log still
//! speaks of one place, and which devices are there or lost is known here and nowhere else.
//!
//! Such a pool may divide what is clean between the halves ([`Twice::once`]). Then a place has a second address: what is in
//! the second half only is as far behind the first address as the halves are apart. Which half is the first takes turns,
//! segment by segment, for what is in both is read from that one.

use crate::media::Media;
use crate::op::BLOCK;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A device but the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// First byte of the whole that lies on it.
    at: u64,
    /// Where on it that is.
    from: u64,
    /// First byte of the whole behind it.
    end: u64,
}

/// What makes a pool keep everything twice.
#[derive(Clone, Copy, Debug)]
pub struct Twice {
    /// Bytes of the whole before the segments.
    pub front: u64,
    /// Bytes of a segment.
    pub segment: u64,
    /// Where blocks are that differ between the first two devices, since they say whose they are ...
    pub own: [u64; 2],
    /// ... and what such a block is on the device with this place. `None`: it is none.
    pub named: fn(&[u8], u16) -> Option<Vec<u8>>,
    /// Bit `n`: device `n` is lost.
    pub lost: u64,
    /// Some of what is in one half of a segment is not in the other.
    pub once: bool,
}

/// The same, and which devices are lost by now: the clones of a [`Spread`] share that.
#[derive(Debug)]
struct Halves {
    how: Twice,
    /// From the first half of a segment to its second, in bytes of the devices one behind the other.
    apart: u64,
    lost: AtomicU64,
    /// Of these, those of which that is durable.
    noted: AtomicU64,
    /// Flash was given up, and nobody notes losses any more.
    unnoted: AtomicBool,
    /// Failed where nobody could make them lost.
    suspects: AtomicU64,
    /// Which half is read first: one more or less is the other one of each segment.
    turn: AtomicU64,
    elsewhere: Mutex<Elsewhere>,
    asked: Condvar,
}

/// Who notes in another place, too, that a device is lost.
#[derive(Debug, Default)]
struct Elsewhere {
    /// Somebody does.
    on: bool,
    /// The generation of the superblocks that say what is lost by now, and that is not noted there yet.
    asked: Option<u64>,
}

impl Halves {
    /// Waits until this is so of the devices of which it is durable that they are lost. False: that does not come.
    fn await_note(&self, so: impl Fn(u64) -> bool) -> bool {
        let until = Instant::now() + LOSS_TIME;
        while !so(self.noted.load(Ordering::Acquire)) {
            if self.unnoted.load(Ordering::Acquire) || Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOSS_POLL);
        }
        true
    }

    fn elsewhere(&self) -> MutexGuard<'_, Elsewhere> {
        self.elsewhere
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where what lies. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Spread {
    /// Bytes of the whole up to which they lie on the first device; `u64::MAX` if there is no other.
    first: u64,
    rest: Arc<[Part]>,
    end: u64,
    halves: Option<Arc<Halves>>,
}

impl PartialEq for Spread {
    fn eq(&self, other: &Spread) -> bool {
        let places = |s: &Spread| (s.first, s.end, s.apart(), s.lost());
        places(self) == places(other) && self.rest == other.rest
    }
}

impl Eq for Spread {}

impl Spread {
    /// One device.
    pub fn one() -> Spread {
        Spread {
            first: u64::MAX,
            rest: Arc::new([]),
            end: u64::MAX,
            halves: None,
        }
    }

    /// The first device up to `first`, and then so many bytes of each other one from an offset on.
    pub fn over(first: u64, others: impl IntoIterator<Item = (u64, u64)>) -> Spread {
        let others = others.into_iter();
        Spread::with_gaps(first, others.map(|(from, bytes)| (0, from, bytes)))
    }

    /// The same; before each other device a part of the whole, so many bytes, lies on none.
    pub fn with_gaps(first: u64, others: impl IntoIterator<Item = (u64, u64, u64)>) -> Spread {
        let mut end = first;
        let rest = others.into_iter().map(|(gap, from, bytes)| {
            let at = end.saturating_add(gap);
            end = at.saturating_add(bytes);
            Part { at, from, end }
        });
        let rest: Arc<[Part]> = rest.collect();
        match rest.is_empty() {
            true => Spread::one(),
            false => Spread {
                first,
                rest,
                end,
                halves: None,
            },
        }
    }

    /// The same devices with everything on two of them.
    pub fn twice(self, how: Twice) -> Spread {
        let halves = Halves {
            apart: self.end.saturating_sub(how.front) / 2,
            lost: AtomicU64::new(how.lost),
            noted: AtomicU64::new(how.lost),
            unnoted: AtomicBool::new(false),
            suspects: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            elsewhere: Mutex::default(),
            asked: Condvar::new(),
            how,
        };
        Spread {
            halves: Some(Arc::new(halves)),
            ..self
        }
    }

    /// Is everything there twice, as long as no device is lost?
    #[inline]
    pub fn is_twice(&self) -> bool {
        self.halves.is_some()
    }

    fn apart(&self) -> u64 {
        self.halves.as_ref().map_or(0, |h| h.apart)
    }

    /// Bit `n`: device `n` is lost. Only where everything is there twice.
    #[inline]
    pub fn lost(&self) -> u64 {
        let halves = self.halves.as_ref();
        halves.map_or(0, |h| h.lost.load(Ordering::Acquire))
    }

    /// Is some of what is in one half of a segment not in the other?
    #[inline]
    pub fn is_once(&self) -> bool {
        self.halves.as_ref().is_some_and(|h| h.how.once)
    }

    /// True if a device is not lost.
    pub fn is_there(&self, device: u16) -> bool {
        self.lost() & bit(device) == 0
    }

    /// A device is lost: nothing goes to it any more. False, and nothing has changed, if something would be gone with it.
    pub fn lose(&self, device: u16) -> bool {
        let Some(halves) = &self.halves else {
            return false;
        };
        let lost = self.lost() | bit(device);
        let whole = self.is_whole_without(lost);
        if whole {
            halves.lost.store(lost, Ordering::Release);
        }
        whole
    }

    /// It is durable which devices are lost.
    pub fn note_lost(&self) {
        if let Some(halves) = &self.halves {
            halves.noted.fetch_or(self.lost(), Ordering::Release);
        }
    }

    /// Nobody will say durably any more which devices are lost: flash was given up.
    pub fn note_none(&self) {
        if let Some(halves) = &self.halves {
            halves.unnoted.store(true, Ordering::Release);
        }
    }

    /// From now on somebody notes losses in another place, too ([`wait_asked`](Self::wait_asked)), or no more.
    pub fn note_elsewhere(&self, on: bool) {
        if let Some(halves) = &self.halves {
            halves.elsewhere().on = on;
            halves.asked.notify_all();
        }
    }

    /// Superblocks of this generation say durably what is lost. True if that is noted in another place next, and whoever does
    /// it says when it is.
    pub fn ask_elsewhere(&self, generation: u64) -> bool {
        let Some(halves) = &self.halves else {
            return false;
        };
        let mut elsewhere = halves.elsewhere();
        if elsewhere.on {
            elsewhere.asked = Some(generation);
            halves.asked.notify_all();
        }
        elsewhere.on
    }

    /// Waits for the generation of which a loss is to be noted. `None`: nobody is to note any more.
    pub fn wait_asked(&self) -> Option<u64> {
        let halves = self.halves.as_ref()?;
        let mut elsewhere = halves.elsewhere();
        while elsewhere.on {
            if let Some(generation) = elsewhere.asked.take() {
                return Some(generation);
            }
            let woken = halves.asked.wait(elsewhere);
            elsewhere = woken.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// A device failed outside the data path.
    pub fn note_suspect(&self, device: u16) {
        if let Some(halves) = &self.halves {
            halves.suspects.fetch_or(bit(device), Ordering::Release);
        }
    }

    /// A device that failed outside the data path, and is not lost yet: whoever runs the log decides.
    pub fn suspect(&self) -> Option<u16> {
        let halves = self.halves.as_ref()?;
        let suspects = halves.suspects.load(Ordering::Acquire) & !self.lost();
        (suspects != 0).then_some(suspects.trailing_zeros() as u16)
    }

    /// From now on the other half of each segment is read, if both are there. False: there are none, or that was so
    /// before.
    pub fn turn(&self) -> bool {
        let halves = self.halves.as_ref().filter(|_| self.lost() == 0);
        halves.is_some_and(|h| h.turn.fetch_xor(1, Ordering::Relaxed) == 0)
    }

    /// Is there a half of everything on devices that are not in `lost`?
    pub fn is_whole_without(&self, lost: u64) -> bool {
        if lost == 0 {
            return true;
        }
        let Some(halves) = &self.halves else {
            return false;
        };
        if lost & 3 == 3 {
            return false;
        }
        // Two devices hold two halves of one segment where their parts, one moved by half of all, overlap.
        let gone = |n: &u16| lost & bit(*n) != 0;
        let parts: Vec<Range<u64>> = (0..self.devices() as u16)
            .filter(gone)
            .filter_map(|n| self.range(n))
            .map(|r| r.start.max(halves.how.front)..r.end)
            .collect();
        let meet = |a: &Range<u64>| {
            let (start, end) = (a.start + halves.apart, a.end + halves.apart);
            parts.iter().any(|b| start < b.end && b.start < end)
        };
        !parts.iter().any(meet)
    }

    /// Where the halves of what lies at an offset of the log are, whether or not their devices are there.
    fn both(&self, halves: &Halves, offset: u64) -> [(u16, u64); 2] {
        let Some(behind) = offset.checked_sub(halves.how.front) else {
            return [(0, offset), (1, offset)];
        };
        if !halves.how.once {
            return [self.place(offset), self.place(offset + halves.apart)];
        }
        // Either address of a place.
        let behind = if behind >= halves.apart {
            behind - halves.apart
        } else {
            behind
        };
        let offset = halves.how.front + behind;
        let [one, other] = [self.place(offset), self.place(offset + halves.apart)];
        match behind / halves.how.segment.max(1) % 2 {
            0 => [one, other],
            _ => [other, one],
        }
    }

    /// Is this the second address of a place?
    fn is_second(halves: &Halves, offset: u64) -> bool {
        halves.how.once && offset >= halves.how.front.saturating_add(halves.apart)
    }

    /// Which device has what is in the first half (0) or the second one (1) of the segment at an offset.
    pub fn device_of_side(&self, offset: u64, side: usize) -> u16 {
        match &self.halves {
            None => self.place(offset).0,
            Some(halves) => self.both(halves, offset)[side & 1].0,
        }
    }

    /// Where what is at this address, and may be nowhere else, lies: the device, whether or not it is lost.
    pub fn only_device(&self, offset: u64) -> u16 {
        let second = self
            .halves
            .as_ref()
            .is_some_and(|h| Self::is_second(h, offset));
        self.device_of_side(offset, usize::from(second))
    }

    /// Where something is written: to both halves, if both are there.
    pub fn halves(&self, offset: u64) -> impl Iterator<Item = (u16, u64)> {
        self.sides(offset).map(|(_, device, at)| (device, at))
    }

    /// The same; tells of each whether it is the first half (0) or the second one (1).
    pub fn sides(&self, offset: u64) -> impl Iterator<Item = (usize, u16, u64)> {
        let lost = self.lost();
        let (first, second) = match &self.halves {
            None => (self.place(offset), None),
            Some(halves) => {
                let [a, b] = self.both(halves, offset);
                (a, Some(b))
            }
        };
        let there = move |(_, device, _): &(usize, u16, u64)| lost & bit(*device) == 0;
        let sides = [Some(first), second].into_iter().flatten().zip(0..);
        sides
            .map(|((device, at), side)| (side, device, at))
            .filter(there)
    }

    /// Where something is read: of two halves by turns, segment by segment.
    #[inline]
    pub fn read_place(&self, offset: u64) -> (u16, u64) {
        match &self.halves {
            None => self.place(offset),
            Some(halves) => self.half_to_read(halves, offset, false),
        }
    }

    /// The same while a pool is opened: of what is in both halves perhaps the other one ([`turn`](Self::turn)).
    fn media_place(&self, offset: u64) -> (u16, u64) {
        match &self.halves {
            None => self.place(offset),
            Some(halves) => self.half_to_read(halves, offset, true),
        }
    }

    fn half_to_read(&self, halves: &Halves, offset: u64, opening: bool) -> (u16, u64) {
        let [first, second] = self.both(halves, offset);
        let behind = offset.checked_sub(halves.how.front);
        let turned = halves.turn.load(Ordering::Relaxed);
        let turn = match (behind, halves.how.once) {
            (None, _) => 0,
            (Some(at), false) => (at / halves.how.segment.max(1) + turned) % 2,
            // Only what both have can be read from the other.
            (Some(_), true) => {
                u64::from(Self::is_second(halves, offset))
                    ^ match opening {
                        true => turned % 2,
                        false => 0,
                    }
            }
        };
        let (one, other) = match turn {
            0 => (first, second),
            _ => (second, first),
        };
        match self.is_there(one.0) {
            true => one,
            false => other,
        }
    }

    /// The other half of what was read on a device, if it is there.
    pub fn other_half(&self, offset: u64, device: u16) -> Option<(u16, u64)> {
        self.halves.as_ref()?;
        self.halves(offset).find(|(n, _)| *n != device)
    }

    /// A block as it is to be written to one of the first two devices: one that says whose it is differs.
    pub fn own_block(&self, offset: u64, data: &[u8], device: u16) -> Option<Vec<u8>> {
        let how = &self.halves.as_ref()?.how;
        let own = how.own.contains(&offset) && data.len() as u64 == BLOCK;
        own.then(|| (how.named)(data, device)).flatten()
    }

    /// A range in pieces of which each has its halves on the same devices.
    fn cut(&self, offset: u64, len: usize) -> Vec<(u64, Range<usize>)> {
        let Some(halves) = &self.halves else {
            return vec![(offset, 0..len)];
        };
        let (front, segment) = (halves.how.front, halves.how.segment.max(1));
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let at = offset.saturating_add(done as u64);
            let end = match at.checked_sub(front) {
                None => front,
                Some(behind) => {
                    front.saturating_add((behind / segment + 1).saturating_mul(segment))
                }
            };
            let left = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
            let n = (len - done).min(left.max(1));
            pieces.push((at, done..done + n));
            done += n;
        }
        pieces
    }

    /// How many devices.
    pub fn devices(&self) -> usize {
        1 + self.rest.len()
    }

    /// Bytes of the whole, each half once; of one device: as large as that is.
    pub fn len(&self) -> Option<u64> {
        (!self.rest.is_empty()).then_some(self.end - self.apart())
    }

    /// It is never empty: there is a first device.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The device that an offset lies on, and where.
    #[inline]
    pub fn place(&self, offset: u64) -> (u16, u64) {
        match offset < self.first {
            true => (0, offset),
            false => self.place_behind(offset),
        }
    }

    #[cold]
    fn beyond(offset: u64) -> (u16, u64) {
        (0, offset)
    }

    fn place_behind(&self, offset: u64) -> (u16, u64) {
        let n = self.rest.partition_point(|part| part.at <= offset);
        match n.checked_sub(1).and_then(|i| self.rest.get(i)) {
            Some(part) if offset < part.end => (n as u16, part.from + (offset - part.at)),
            // Behind all, or on no device: there is nothing at such an offset of the first one either.
            _ => Self::beyond(offset),
        }
    }

    /// The offset in the whole of a byte of a device, if it is a part of the whole.
    pub fn whole(&self, device: u16, offset: u64) -> Option<u64> {
        let range = self.range(device)?;
        let from = match usize::from(device).checked_sub(1) {
            None => 0,
            Some(i) => self.rest.get(i)?.from,
        };
        let Some(at) = offset.checked_sub(from) else {
            // Before its segments the second device has what the first has there.
            let front = self.halves.as_ref().map_or(0, |h| h.how.front);
            return (device == 1 && offset < front).then_some(offset);
        };
        let at = range.start.checked_add(at)?;
        let first_half = |at: u64| match &self.halves {
            Some(h) if at >= h.how.front + h.apart => at - h.apart,
            _ => at,
        };
        (at < range.end).then(|| first_half(at))
    }

    /// What of the whole lies on a device.
    pub fn range(&self, device: u16) -> Option<Range<u64>> {
        match usize::from(device) {
            0 => Some(0..self.first),
            n => self.rest.get(n - 1).map(|part| part.at..part.end),
        }
    }

    /// The same range in pieces, each of one device: `(device, offset there, from..to of the range)`.
    fn pieces(&self, offset: u64, len: usize) -> Vec<(usize, u64, Range<usize>)> {
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let at = offset.saturating_add(done as u64);
            let (device, there) = self.place(at);
            let end = self.range(device).map_or(u64::MAX, |range| range.end);
            let left = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
            // What lies on none is not cut up.
            let n = match left {
                0 => len - done,
                left => (len - done).min(left),
            };
            pieces.push((usize::from(device), there, done..done + n));
            done += n;
        }
        pieces
    }
}

/// The bit of a device among those that are lost.
fn bit(device: u16) -> u64 {
    1u64.checked_shl(u32::from(device)).unwrap_or(0)
}

/// Devices as one, for what happens outside the data path.
///
/// A flush is one of each device. So what is assumed of the medium ([`Media::flush`]) holds of the whole if it
/// holds of each: what was written before a flush began is durable when it has ended, on whichever it lies.
///
/// Where everything is there twice, both halves are written, and a half that cannot be read is read from the other
/// device. One that is lost is left alone.
///
/// Of a device that fails to be written, and without which everything is there all the same, it depends on who uses
/// this ([`waiting`](Self::waiting)): whoever opens or closes the pool goes on without it, and says in the superblock that
/// it is lost before anything rests on that.
#[derive(Clone, Debug)]
pub struct Joined<M> {
    spread: Spread,
    devices: Vec<M>,
    waits: bool,
    /// Failed for good: not flushed.
    left_out: Option<u16>,
}

impl<M: Media> Joined<M> {
    /// `devices` in their order; as many as `spread` says. What stands in the place of a lost one is not used.
    pub fn new(spread: Spread, devices: Vec<M>) -> Joined<M> {
        debug_assert_eq!(spread.devices(), devices.len());
        Joined {
            spread,
            devices,
            waits: false,
            left_out: None,
        }
    }

    /// The same where nothing is there twice, and one of them has failed for good: a flush is one of the others. Nothing on
    /// it is to be read or written.
    pub fn without(self, device: u16) -> Joined<M> {
        Joined {
            left_out: Some(device),
            ..self
        }
    }

    /// The same while somebody else runs the log: a device that fails is lost when that one says so, which is waited
    /// for, as nothing may be told before.
    pub fn waiting(self) -> Joined<M> {
        Joined {
            waits: true,
            ..self
        }
    }

    /// One device failed to do what changes something: goes on without it, if that can be.
    fn failed(&self, device: u16, error: io::Error) -> io::Result<()> {
        let Some(halves) = &self.spread.halves else {
            return Err(error);
        };
        // It may be lost already, since this began.
        if !self
            .spread
            .is_whole_without(self.spread.lost() | bit(device))
        {
            return Err(error);
        }
        if !self.waits {
            return match self.spread.lose(device) {
                true => Ok(()),
                false => Err(error),
            };
        }
        self.spread.note_suspect(device);
        match halves.await_note(|noted| noted & bit(device) != 0) {
            true => Ok(()),
            false => Err(error),
        }
    }

    /// What was done counts: on devices that were lost meanwhile it is not, and that is durable by now.
    fn settled(&self) -> io::Result<()> {
        let Some(halves) = self.spread.halves.as_ref().filter(|_| self.waits) else {
            return Ok(());
        };
        let lost = self.spread.lost();
        match halves.await_note(|noted| lost & !noted == 0) {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it could not be noted that a flash device is lost",
            )),
        }
    }

    /// One of them.
    pub fn device(&mut self, n: usize) -> io::Result<&mut M> {
        let none = || io::Error::new(io::ErrorKind::NotFound, "a flash device is missing");
        self.devices.get_mut(n).ok_or_else(none)
    }

    /// Reads what lies within one segment, or before all of them, from either half.
    fn read_half(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let (device, at) = self.spread.media_place(offset);
        let read = self.device(usize::from(device))?.read_at(at, data);
        match (read, self.spread.other_half(offset, device)) {
            (Err(_), Some((other, at))) => self.device(usize::from(other))?.read_at(at, data),
            (read, _) => read,
        }
    }
}

impl<M: Media> Media for Joined<M> {
    fn len(&self) -> u64 {
        if self.spread.is_twice() {
            let largest = self.devices.iter().map(M::len).max();
            return largest.unwrap_or(0).max(self.spread.end);
        }
        match (self.spread.len(), self.devices.first()) {
            (Some(len), Some(first)) => len.max(first.len()),
            (_, Some(first)) => first.len(),
            (_, None) => 0,
        }
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if self.spread.is_twice() {
            for (at, range) in self.spread.cut(offset, data.len()) {
                let part = data.get_mut(range).unwrap_or_default();
                self.read_half(at, part)?;
            }
            return Ok(());
        }
        for (device, at, range) in self.spread.pieces(offset, data.len()) {
            let part = data.get_mut(range).unwrap_or_default();
            self.device(device)?.read_at(at, part)?;
        }
        Ok(())
    }

    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        let mut by_device: Vec<Vec<(u64, &mut [u8])>> =
            self.devices.iter().map(|_| Vec::new()).collect();
        for (offset, data) in reads.iter_mut() {
            let mut left: &mut [u8] = data;
            let places = match self.spread.is_twice() {
                true => (self.spread.cut(*offset, left.len()).into_iter())
                    .map(|(at, range)| {
                        let (device, at) = self.spread.media_place(at);
                        (usize::from(device), at, range)
                    })
                    .collect(),
                false => self.spread.pieces(*offset, left.len()),
            };
            for (device, at, range) in places {
                let (part, rest) = left.split_at_mut(range.len());
                left = rest;
                if let Some(list) = by_device.get_mut(device) {
                    list.push((at, part));
                }
            }
        }
        // Each device on a thread of its own: several are as fast as all of them together.
        let mut work: Vec<_> = self.devices.iter_mut().zip(by_device).collect();
        work.retain(|(_, reads)| !reads.is_empty());
        if let [(device, reads)] = work.as_mut_slice() {
            return device.read_many(reads);
        }
        for group in work.chunks_mut(DEVICE_READERS) {
            std::thread::scope(|scope| {
                let started = group.iter_mut().map(|(device, reads)| {
                    let thread = std::thread::Builder::new().name("hearth-read".to_owned());
                    thread.spawn_scoped(scope, move || device.read_many(reads))
                });
                let started: Vec<_> = started.collect();
                started.into_iter().try_for_each(|thread| {
                    let died = |_| Err(io::Error::other("a reader thread died"));
                    thread?.join().unwrap_or_else(died)
                })
            })?;
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.spread.is_twice() {
            for (whole, range) in self.spread.cut(offset, data.len()) {
                let part = data.get(range).unwrap_or_default();
                let spread = self.spread.clone();
                for (device, at) in spread.halves(whole) {
                    let own = spread.own_block(whole, part, device);
                    let part = own.as_deref().unwrap_or(part);
                    let written = self.device(usize::from(device))?.write_at(at, part);
                    written.or_else(|e| self.failed(device, e))?;
                }
            }
            return self.settled();
        }
        for (device, at, range) in self.spread.pieces(offset, data.len()) {
            let part = data.get(range).unwrap_or_default();
            self.device(device)?.write_at(at, part)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        for n in 0..self.devices.len() as u16 {
            if self.spread.is_there(n) && self.left_out != Some(n) {
                let flushed = self.device(usize::from(n))?.flush();
                flushed.or_else(|e| self.failed(n, e))?;
            }
        }
        self.settled()
    }

    fn spread(&self) -> Option<Spread> {
        Some(self.spread.clone())
    }

    fn read_first(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if !self.spread.is_twice() {
            return self.read_at(offset, data);
        }
        for (whole, range) in self.spread.cut(offset, data.len()) {
            let (device, at) = self.spread.media_place(whole);
            let part = data.get_mut(range).unwrap_or_default();
            self.device(usize::from(device))?.read_at(at, part)?;
        }
        Ok(())
    }

    fn read_other(&mut self, offset: u64, data: &mut [u8]) -> io::Result<bool> {
        let spread = self.spread.clone();
        for (whole, range) in spread.cut(offset, data.len()) {
            let (device, _) = spread.media_place(whole);
            let Some((other, at)) = spread.other_half(whole, device) else {
                return Ok(false);
            };
            let part = data.get_mut(range).unwrap_or_default();
            self.device(usize::from(other))?.read_at(at, part)?;
        }
        Ok(true)
    }

    fn write_other(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let spread = self.spread.clone();
        for (whole, range) in spread.cut(offset, data.len()) {
            let (device, _) = spread.media_place(whole);
            if let Some((other, at)) = spread.other_half(whole, device) {
                let part = data.get(range).unwrap_or_default();
                let written = self.device(usize::from(other))?.write_at(at, part);
                written.or_else(|e| self.failed(other, e))?;
            }
        }
        self.settled()
    }
}

/// How long it is waited that a device which failed is said to be lost, and how often that is looked at.
const LOSS_TIME: Duration = Duration::from_secs(10);
const LOSS_POLL: Duration = Duration::from_millis(2);
/// Devices read at once while a pool is opened; more are read by turns.
const DEVICE_READERS: usize = 8;

#[cfg(test)]
mod tests;
