//! Several flash devices as one: where on which of them an offset of the whole lies.
//!
//! A pool of several devices has one log, whose segments are numbered through: first those of the first device,
//! then those of the second, and so on. So the whole is the devices one behind the other, each device but the
//! first without what lies before its segments. What lies at an offset is found by range, and a range of the
//! whole that is one segment or a part of it lies on one device. With one device, offsets are what they were.

use crate::media::Media;
use std::io;
use std::ops::Range;
use std::sync::Arc;

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

/// Where what lies. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Bytes of the whole up to which they lie on the first device; `u64::MAX` if there is no other.
    first: u64,
    rest: Arc<[Part]>,
    end: u64,
}

impl Spread {
    /// One device.
    pub fn one() -> Spread {
        Spread {
            first: u64::MAX,
            rest: Arc::new([]),
            end: u64::MAX,
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
            false => Spread { first, rest, end },
        }
    }

    /// How many devices.
    pub fn devices(&self) -> usize {
        1 + self.rest.len()
    }

    /// Bytes of the whole; of one device: as large as that is.
    pub fn len(&self) -> Option<u64> {
        (!self.rest.is_empty()).then_some(self.end)
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
        let at = range.start.checked_add(offset.checked_sub(from)?)?;
        (at < range.end).then_some(at)
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

/// Devices as one, for what happens outside the data path.
///
/// A flush is one of each device. So what is assumed of the medium ([`Media::flush`]) holds of the whole if it
/// holds of each: what was written before a flush began is durable when it has ended, on whichever it lies.
#[derive(Clone, Debug)]
pub struct Joined<M> {
    spread: Spread,
    devices: Vec<M>,
}

impl<M: Media> Joined<M> {
    /// `devices` in their order; as many as `spread` says.
    pub fn new(spread: Spread, devices: Vec<M>) -> Joined<M> {
        debug_assert_eq!(spread.devices(), devices.len());
        Joined { spread, devices }
    }

    fn device(&mut self, n: usize) -> io::Result<&mut M> {
        let none = || io::Error::new(io::ErrorKind::NotFound, "a flash device is missing");
        self.devices.get_mut(n).ok_or_else(none)
    }
}

impl<M: Media> Media for Joined<M> {
    fn len(&self) -> u64 {
        match (self.spread.len(), self.devices.first()) {
            (Some(len), Some(first)) => len.max(first.len()),
            (_, Some(first)) => first.len(),
            (_, None) => 0,
        }
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
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
            for (device, at, range) in self.spread.pieces(*offset, left.len()) {
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
        for (device, at, range) in self.spread.pieces(offset, data.len()) {
            let part = data.get(range).unwrap_or_default();
            self.device(device)?.write_at(at, part)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.devices.iter_mut().try_for_each(M::flush)
    }
}

/// Devices read at once while a pool is opened; more are read by turns.
const DEVICE_READERS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::Sparse;

    /// Three devices: bytes up to 100 blocks on the first, then 50 from block 4 on, then 20 from block 8 on.
    fn three() -> Spread {
        Spread::over(100 * 4096, [(4 * 4096, 50 * 4096), (8 * 4096, 20 * 4096)])
    }

    #[test]
    fn one_device_is_itself() {
        let one = Spread::one();
        assert_eq!(one.devices(), 1);
        assert_eq!(one.place(u64::MAX - 1), (0, u64::MAX - 1));
        assert_eq!(one.whole(0, 77), Some(77));
        assert_eq!(Spread::over(1 << 20, []), one);
    }

    #[test]
    fn a_part_that_lies_on_no_device_leaves_the_others_where_they_were() {
        let spread = Spread::with_gaps(100, [(0, 4, 50), (30, 8, 20)]);
        assert_eq!(spread.len(), Some(200));
        assert_eq!(spread.place(149), (1, 53));
        assert_eq!(spread.place(150).0, 0, "it is on none");
        assert_eq!(spread.place(179).0, 0);
        assert_eq!(spread.place(180), (2, 8));
        assert_eq!(spread.whole(1, 54), None);
        assert_eq!(spread.whole(2, 8), Some(180));
        assert_eq!(spread.range(1), Some(100..150));
    }

    #[test]
    fn every_offset_lies_on_one_device_and_is_found_back() {
        let spread = three();
        assert_eq!(spread.len(), Some(170 * 4096));
        assert_eq!(spread.place(0), (0, 0));
        assert_eq!(spread.place(100 * 4096 - 1), (0, 100 * 4096 - 1));
        assert_eq!(spread.place(100 * 4096), (1, 4 * 4096));
        assert_eq!(spread.place(150 * 4096 - 1), (1, 54 * 4096 - 1));
        assert_eq!(spread.place(150 * 4096), (2, 8 * 4096));
        for block in 0..170 {
            let (device, at) = spread.place(block * 4096);
            assert_eq!(spread.whole(device, at), Some(block * 4096));
        }
        // What lies before a device's segments, or behind its part, is none of the whole.
        assert_eq!(spread.whole(1, 4096), None);
        assert_eq!(spread.whole(1, 54 * 4096), None);
        assert_eq!(spread.whole(2, 28 * 4096), None);
        assert_eq!(spread.whole(3, 0), None);
    }

    #[test]
    fn what_is_written_to_the_whole_is_read_from_it_and_lies_on_the_devices() {
        let device = |blocks: u64| Sparse::new(blocks * 4096);
        let mut joined = Joined::new(three(), vec![device(100), device(200), device(200)]);
        assert_eq!(joined.len(), 170 * 4096);
        // Across both seams.
        let data: Vec<u8> = (0..60 * 4096u32).map(|i| (i / 4096) as u8 + 1).collect();
        joined.write_at(95 * 4096, &data).unwrap();
        let mut back = vec![0; data.len()];
        joined.read_at(95 * 4096, &mut back).unwrap();
        assert_eq!(back, data);
        let (mut a, mut b) = (vec![0; 30 * 4096], vec![0; 30 * 4096]);
        joined
            .read_many(&mut [(95 * 4096, &mut a), (125 * 4096, &mut b)])
            .unwrap();
        assert_eq!([a, b].concat(), data);
        let mut block = [0; 4096];
        for (device, at, want) in [(0, 99, 5), (1, 4, 6), (1, 53, 55), (2, 8, 56)] {
            joined.devices[device]
                .read_at(at * 4096, &mut block)
                .unwrap();
            assert_eq!(block, [want; 4096], "block {at} of device {device}");
        }
    }
}
