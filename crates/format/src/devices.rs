//! Pools of several flash devices: which device is which, and whether those at hand are the pool.
//!
//! The first device carries what a single one does: registry, checkpoint, segment map, and the superblock that
//! counts. The others carry segments, and a superblock of their own that says whose they are. What makes this
//! dangerous is a device that is not what it seems, above all an old copy of one: the log would find segments in it
//! that counted once. So whoever opens the pool to write it first gives all devices a new number, the *stamp*;
//! devices whose stamps are not of one opening are not used together.
//!
//! A crash in the middle of that must not leave stamps of which nobody knows how they came about. So it is
//! done in steps ([`Members::stamp`]), and nothing else is written before the last.

use crate::error::FormatError;
use crate::layout::{Extent, Layout};
use crate::superblock::{INCOMPAT_DEVICES, Part, PoolState, Superblock};
use crate::wire::{array_at, put, u32_at, u64_at};
use hearth_io::{BLOCK, Media, Spread};
use std::ops::Range;
use uuid::Uuid;

/// Most flash devices of a pool: what the superblock has room to list.
pub const DEVICES_MAX: u16 = 64;

/// First byte of the list in the superblock.
const LIST_AT: usize = 1360;
/// Bytes of an entry.
const ENTRY_BYTES: usize = 40;

/// A device as the superblocks of its pool list it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// The device.
    pub device: Uuid,
    /// What it holds.
    pub extent: Extent,
}

impl DeviceEntry {
    /// Bytes of the device when it was formatted.
    pub fn bytes(&self) -> u64 {
        self.extent.blocks.saturating_mul(BLOCK)
    }
}

/// Writes the list into a superblock.
pub(crate) fn put_list(out: &mut [u8], devices: &[DeviceEntry]) {
    for (entry, i) in devices.iter().zip(0..usize::from(DEVICES_MAX)) {
        let at = LIST_AT + i * ENTRY_BYTES;
        put(out, at, entry.device.as_bytes());
        put(out, at + 16, &entry.extent.blocks.to_le_bytes());
        put(out, at + 24, &entry.extent.segment_start.to_le_bytes());
        put(out, at + 32, &entry.extent.segments.to_le_bytes());
        put(out, at + 36, &entry.extent.gap.to_le_bytes());
    }
}

/// Reads a list of so many devices, which must be those that `layout` is the whole of.
pub(crate) fn list_at(
    block: &[u8],
    count: u16,
    layout: &Layout,
) -> Result<Vec<DeviceEntry>, &'static str> {
    let mut devices: Vec<DeviceEntry> = Vec::new();
    let mut segments = 0u64;
    for i in 0..usize::from(count) {
        let at = LIST_AT + i * ENTRY_BYTES;
        let entry = DeviceEntry {
            device: Uuid::from_bytes(array_at(block, at)),
            extent: Extent {
                blocks: u64_at(block, at + 16),
                segment_start: u64_at(block, at + 24),
                segments: u32_at(block, at + 32),
                gap: match i {
                    0 => 0,
                    _ => u32_at(block, at + 36),
                },
            },
        };
        let extent = &entry.extent;
        segments += u64::from(extent.segments) + u64::from(extent.gap);
        let slots = u64::from(extent.segments) * u64::from(layout.segment_blocks);
        let end = extent.segment_start.checked_add(slots);
        if end.is_none_or(|end| end > extent.blocks) || extent.blocks.checked_mul(BLOCK).is_none() {
            return Err("the segments of a device in its list reach past its end");
        }
        let aligned = extent
            .segment_start
            .is_multiple_of(u64::from(layout.segment_blocks));
        let start = match i {
            0 => layout.segment_start,
            _ => Layout::other_start(layout.segment_blocks),
        };
        if !aligned || extent.segment_start < start || (i == 0 && extent.segment_start != start) {
            return Err("the segments of a device in its list begin at a wrong place");
        }
        if devices.iter().any(|d| d.device == entry.device) {
            return Err("a device is in its list twice");
        }
        devices.push(entry);
    }
    match segments == u64::from(layout.segment_count) {
        true => Ok(devices),
        false => Err("its list of devices has another number of segments than the pool"),
    }
}

/// Why devices are not a pool together. Numbers are places in the list of those given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// Two of different pools.
    OtherPool(usize, usize),
    /// Two that say they are the same device: one is a copy.
    Copies(usize, usize),
    /// The first has missed what was written since: it is an older copy than the second knows of.
    Older(usize, usize),
    /// It is no device of the pool (any more), as the second, which knows the newest, says.
    NotOfIt(usize, usize),
    /// A device of the pool is not among those given: its place, and what is known of it.
    Missing(u16, DeviceEntry),
}

/// The devices that are given, in the order of their places: numbers of the list of their superblocks. Judges
/// whether they are one pool, all of it, and of the same moment.
pub fn judge(found: &[Superblock]) -> Result<Vec<usize>, Misfit> {
    for (i, one) in found.iter().enumerate() {
        for (j, other) in found.iter().enumerate().skip(i + 1) {
            if one.pool != other.pool {
                return Err(Misfit::OtherPool(i, j));
            }
            if one.device == other.device {
                return Err(Misfit::Copies(i, j));
            }
        }
    }
    // Who knows which devices there are: the first, or without it whoever was there last.
    let knows = |(_, sb): &(usize, &Superblock)| (sb.device_index == 0, sb.stamp, sb.next_stamp);
    let Some((who, lead)) = found.iter().enumerate().max_by_key(knows) else {
        return Ok(Vec::new());
    };
    if let (true, Some(first)) = (lead.device_index != 0, lead.devices.first()) {
        return Err(Misfit::Missing(0, *first));
    }
    let newest = lead.stamp.max(lead.next_stamp);
    let mut places = vec![None; lead.devices.len().max(1)];
    for (i, sb) in found.iter().enumerate() {
        if sb.stamp > newest {
            return Err(Misfit::Older(who, i));
        }
        let at = match lead.devices.is_empty() {
            true => (i == who).then_some(0),
            false => lead.devices.iter().position(|d| d.device == sb.device),
        };
        let Some(at) = at else {
            return Err(Misfit::NotOfIt(i, who));
        };
        if sb.stamp < lead.stamp || sb.stamp > lead.stamp && sb.stamp != lead.next_stamp {
            return Err(Misfit::Older(i, who));
        }
        if let Some(place) = places.get_mut(at) {
            *place = Some(i);
        }
    }
    let missing = places.iter().position(Option::is_none);
    if let Some((n, entry)) = missing.and_then(|n| Some((n, lead.devices.get(n)?))) {
        return Err(Misfit::Missing(n as u16, *entry));
    }
    Ok(places.into_iter().flatten().collect())
}

/// The superblocks of a pool of several devices, by their places.
#[derive(Clone, Debug)]
pub struct Members {
    others: Vec<Superblock>,
}

impl Members {
    /// Of devices that were [judged](judge), all but the first.
    pub fn new(others: Vec<Superblock>) -> Members {
        Members { others }
    }

    /// The other devices' superblocks.
    pub fn others(&self) -> &[Superblock] {
        &self.others
    }

    /// Gives all devices a new stamp: from here on an older copy of any of them is known for one. To be called before
    /// anything else is written by who opens the pool, and needed only where there are several devices.
    ///
    /// First the first device says which stamp is coming, then the others get it, and then the first has it. After a
    /// crash in between, the others may have either, and the next opening begins by giving them the one that was
    /// coming; nothing was written meanwhile, so it does not matter which they had.
    ///
    /// What was read of them may be in a cache only, left there by a start that was killed. It is made durable first: a
    /// device that is passed over because it has the stamp already would lose it in a power cut, and be refused for
    /// ever as an older copy.
    pub fn stamp<M: Media>(
        &mut self,
        lead: &mut Superblock,
        devices: &mut [M],
    ) -> Result<(), FormatError> {
        for media in devices.iter_mut() {
            media.flush().map_err(|source| FormatError::Io {
                doing: "flushing a flash device",
                source,
            })?;
        }
        if lead.next_stamp != 0 {
            self.finish(lead, devices)?;
        }
        let next = lead.stamp.checked_add(1);
        lead.next_stamp =
            next.ok_or(FormatError::unfit("superblock", "its stamp is at its end"))?;
        let [first, ..] = devices else {
            return Ok(());
        };
        lead.store(first)?;
        self.finish(lead, devices)
    }

    /// Gives those that do not have it the stamp that is coming.
    pub(crate) fn finish<M: Media>(
        &mut self,
        lead: &mut Superblock,
        devices: &mut [M],
    ) -> Result<(), FormatError> {
        let Some((first, rest)) = devices.split_first_mut() else {
            return Ok(());
        };
        for ((sb, media), place) in self.others.iter_mut().zip(rest).zip(1..) {
            if sb.stamp == lead.next_stamp {
                continue;
            }
            *sb = lead.of_member(place, sb, lead.next_stamp);
            sb.store(media)?;
        }
        (lead.stamp, lead.next_stamp) = (lead.next_stamp, 0);
        lead.store(first)
    }
}

impl Superblock {
    /// The pool has these devices, of which this is the superblock of the first.
    pub fn set_devices(&mut self, layout: Layout, devices: Vec<DeviceEntry>) {
        self.layout = layout;
        self.device_index = 0;
        self.device_count = devices.len() as u16;
        self.incompat |= INCOMPAT_DEVICES;
        self.devices = devices;
    }

    /// Its devices as they are listed, also if there is one only.
    pub fn all_devices(&self) -> Vec<DeviceEntry> {
        match self.devices.is_empty() {
            false => self.devices.clone(),
            true => vec![DeviceEntry {
                device: self.device,
                extent: Extent {
                    blocks: self.layout.device_blocks,
                    segment_start: self.layout.segment_start,
                    segments: self.layout.segment_count,
                    gap: 0,
                },
            }],
        }
    }

    /// The numbers of segments on each device, by their places.
    pub fn segments(&self) -> Vec<Range<u32>> {
        if self.devices.is_empty() {
            return std::iter::once(0..self.layout.segment_count).collect();
        }
        let mut next = 0u32;
        let each = self.devices.iter().map(|d| {
            let from = next.saturating_add(d.extent.gap);
            next = from.saturating_add(d.extent.segments);
            from..next
        });
        each.collect()
    }

    /// The numbers of segments that are on no device any more.
    pub fn gaps(&self) -> Vec<u32> {
        let there = self.segments();
        let mut gaps = Vec::new();
        let mut next = 0;
        for range in there {
            gaps.extend(next..range.start);
            next = range.end;
        }
        gaps
    }

    /// Where on which device an offset of the pool lies.
    pub fn spread(&self) -> Spread {
        let bytes =
            |segments: u32| u64::from(segments) * u64::from(self.layout.segment_blocks) * BLOCK;
        let Some((first, others)) = self.devices.split_first() else {
            return Spread::one();
        };
        let first = self.layout.segment_start * BLOCK + bytes(first.extent.segments);
        let others = others.iter().map(|d| {
            let extent = &d.extent;
            let gap = bytes(extent.gap);
            (gap, extent.segment_start * BLOCK, bytes(extent.segments))
        });
        Spread::with_gaps(first, others)
    }

    /// The superblock of another device of the pool whose first has this one, to take the place of `old` there.
    fn of_member(&self, place: u16, old: &Superblock, stamp: u64) -> Superblock {
        Superblock {
            copy: old.copy,
            generation: old.generation,
            device: old.device,
            device_index: place,
            created_unix_s: old.created_unix_s,
            state: PoolState::Open,
            stamp,
            next_stamp: 0,
            part: Part::Member,
            peer: old.peer,
            ..self.clone()
        }
    }

    /// The first superblock of another device, which is listed at `place`: of none that was there before.
    pub fn for_member(&self, place: u16, device: Uuid, created_unix_s: u64) -> Superblock {
        let new = Superblock {
            copy: 1,
            generation: 0,
            device,
            created_unix_s,
            peer: Uuid::nil(),
            ..self.clone()
        };
        self.of_member(place, &new, self.stamp)
    }

    /// Bytes this device had when it was formatted.
    pub(crate) fn own_bytes(&self) -> u64 {
        let entry = self.devices.get(usize::from(self.device_index));
        match entry {
            Some(entry) => entry.bytes(),
            None => self.layout.device_blocks.saturating_mul(BLOCK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_io::Sparse;

    const SIZES: [u64; 3] = [64 << 20, 40 << 20, 96 << 20];

    /// A pool of three devices as it is formatted: superblocks and media.
    fn formatted() -> (Superblock, Members, Vec<Sparse>) {
        let (layout, extents) = Layout::for_devices(&SIZES, 256).unwrap();
        let device = |n: u128| Uuid::from_u128(0xD000 + n);
        let mut lead = Superblock::new(layout, Uuid::from_u128(7), device(0), "three", 9);
        let entries = extents.iter().zip(0..).map(|(extent, n)| DeviceEntry {
            device: device(n),
            extent: *extent,
        });
        lead.set_devices(layout, entries.collect());
        lead.stamp = 1;
        let mut media: Vec<Sparse> = SIZES.map(Sparse::new).into();
        let mut others: Vec<Superblock> = Vec::new();
        for place in 1..3 {
            let mut sb = lead.for_member(place, device(place.into()), 9);
            sb.store(&mut media[usize::from(place)]).unwrap();
            others.push(sb);
        }
        lead.store(&mut media[0]).unwrap();
        (lead, Members::new(others), media)
    }

    fn loaded(media: &mut [Sparse]) -> Vec<Superblock> {
        media
            .iter_mut()
            .map(|m| Superblock::load(m).unwrap())
            .collect()
    }

    /// The superblocks on `media` after one opening more.
    fn opened(media: &mut [Sparse]) -> Vec<Superblock> {
        let mut found = loaded(media);
        assert_eq!(judge(&found), Ok(vec![0, 1, 2]));
        let mut lead = found.remove(0);
        Members::new(found).stamp(&mut lead, media).unwrap();
        loaded(media)
    }

    #[test]
    fn devices_are_found_in_any_order() {
        let (_, _, mut media) = formatted();
        let found = opened(&mut media);
        assert!(found.iter().all(|sb| (sb.stamp, sb.next_stamp) == (2, 0)));
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let given = order.map(|i| found[i].clone());
            let judged = judge(&given).unwrap();
            assert_eq!(judged.map_by(|at| given[*at].device_index), [0, 1, 2]);
        }
        let spread = found[0].spread();
        assert_eq!(spread.devices(), 3);
        assert_eq!(spread.len(), Some(found[0].layout.device_blocks * BLOCK));
    }

    trait MapBy {
        fn map_by<T>(&self, f: impl Fn(&usize) -> T) -> Vec<T>;
    }

    impl MapBy for Vec<usize> {
        fn map_by<T>(&self, f: impl Fn(&usize) -> T) -> Vec<T> {
            self.iter().map(f).collect()
        }
    }

    #[test]
    fn what_is_not_the_pool_is_told_apart() {
        let (_, _, mut media) = formatted();
        let before = loaded(&mut media);
        let now = opened(&mut media);
        let [a, b, c] = [&now[0], &now[1], &now[2]].map(Clone::clone);
        let old = |n: usize| before[n].clone();
        let judge = |given: &[&Superblock]| {
            let given: Vec<Superblock> = given.iter().map(|sb| (*sb).clone()).collect();
            super::judge(&given)
        };
        assert_eq!(
            judge(&[&a, &c]),
            Err(Misfit::Missing(1, a.devices[1])),
            "one is missing"
        );
        assert_eq!(judge(&[&c, &b]), Err(Misfit::Missing(0, a.devices[0])));
        assert_eq!(judge(&[&a]), Err(Misfit::Missing(1, a.devices[1])));
        // Copies of an earlier time, of any of them.
        assert_eq!(judge(&[&a, &old(1), &c]), Err(Misfit::Older(1, 0)));
        assert_eq!(judge(&[&b, &old(0), &c]), Err(Misfit::Older(1, 0)));
        assert_eq!(judge(&[&a, &b, &c, &old(2)]), Err(Misfit::Copies(2, 3)));
        let foreign = Superblock {
            pool: Uuid::from_u128(8),
            ..b.clone()
        };
        assert_eq!(judge(&[&a, &foreign, &c]), Err(Misfit::OtherPool(0, 1)));
        let replaced = Superblock {
            device: Uuid::from_u128(0xE000),
            ..b.clone()
        };
        assert_eq!(judge(&[&a, &replaced, &c]), Err(Misfit::NotOfIt(1, 0)));
        assert_eq!(judge(&[]), Ok(Vec::new()));
        // The first device as it was before the pool had any other.
        let single = Superblock {
            devices: Vec::new(),
            device_count: 1,
            stamp: 0,
            ..a.clone()
        };
        assert_eq!(judge(&[&single, &b]), Err(Misfit::Older(0, 1)));
        assert_eq!(judge(&[&single]), Ok(vec![0]));
    }

    /// Media that take so many writes and flushes, and no more.
    struct Cut<'a>(&'a mut Sparse, &'a std::sync::atomic::AtomicI64);

    impl Cut<'_> {
        fn spend(&self) -> std::io::Result<()> {
            match self.1.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) > 0 {
                true => Ok(()),
                false => Err(std::io::Error::other("cut")),
            }
        }
    }

    impl Media for Cut<'_> {
        fn len(&self) -> u64 {
            self.0.len()
        }
        fn read_at(&mut self, offset: u64, data: &mut [u8]) -> std::io::Result<()> {
            self.0.read_at(offset, data)
        }
        fn write_at(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
            self.spend()?;
            self.0.write_at(offset, data)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            self.spend()
        }
    }

    #[test]
    fn an_opening_cut_off_anywhere_leaves_a_pool_and_old_copies_are_known_after_the_next() {
        for steps in 0.. {
            let (_, _, mut media) = formatted();
            opened(&mut media);
            let mut found = loaded(&mut media);
            let mut lead = found.remove(0);
            let budget = std::sync::atomic::AtomicI64::new(steps);
            let mut cut: Vec<_> = media.iter_mut().map(|m| Cut(m, &budget)).collect();
            let done = Members::new(found).stamp(&mut lead, &mut cut).is_ok();
            // Whatever was reached, it is one pool, and what is copied now is old once it was opened again.
            let copies = loaded(&mut media);
            let now = opened(&mut media);
            for n in 0..3 {
                let mut given = now.clone();
                given[n] = copies[n].clone();
                let at = judge(&given);
                assert!(
                    matches!(at, Err(Misfit::Older(old, _)) if old == n),
                    "cut after {steps}, device {n}: {at:?}"
                );
            }
            if done {
                assert!(steps > 10, "{steps}");
                return;
            }
        }
    }

    #[test]
    fn lists_that_cannot_be_are_refused() {
        let (lead, ..) = formatted();
        assert_eq!(Superblock::decode(&lead.encode()[..]).unwrap(), lead);
        let refused = |change: &dyn Fn(&mut Superblock)| {
            let mut sb = lead.clone();
            change(&mut sb);
            Superblock::decode(&sb.encode()[..])
                .unwrap_err()
                .to_string()
        };
        type Case = (&'static dyn Fn(&mut Superblock), &'static str);
        let cases: [Case; 15] = [
            (
                &|sb: &mut Superblock| sb.devices[1].extent.segments += 1,
                "past its end",
            ),
            (
                &|sb: &mut Superblock| sb.devices[1].extent.segments -= 1,
                "another number",
            ),
            (
                &|sb| sb.devices[1].extent.segment_start = 256,
                "wrong place",
            ),
            (
                &|sb: &mut Superblock| sb.devices[1].extent.segment_start -= 1,
                "wrong place",
            ),
            (
                &|sb| sb.devices[0].extent.segment_start -= 256,
                "wrong place",
            ),
            (
                &|sb: &mut Superblock| sb.devices[1].extent.blocks = u64::MAX,
                "past its end",
            ),
            (
                &|sb: &mut Superblock| sb.devices[1].device = sb.device,
                "twice",
            ),
            (
                &|sb: &mut Superblock| sb.device = Uuid::nil(),
                "in its place",
            ),
            (&|sb: &mut Superblock| sb.device_index = 1, "in its place"),
            (&|sb: &mut Superblock| sb.device_index = 3, "do not fit"),
            (&|sb: &mut Superblock| sb.device_count = 65, "do not fit"),
            (&|sb: &mut Superblock| sb.incompat = 0, "do not fit"),
            (
                &|sb| (sb.device_count, sb.device_index) = (1, 0),
                "do not fit",
            ),
            (
                &|sb: &mut Superblock| sb.layout.added.segments = u32::MAX,
                "came later",
            ),
            (
                &|sb: &mut Superblock| sb.layout.added.map_shift = u32::MAX,
                "no room",
            ),
        ];
        for (change, why) in cases {
            let told = refused(change);
            assert!(told.contains(why), "{why}: {told}");
        }
    }
}
