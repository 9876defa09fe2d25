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
//!
//! A pool that keeps everything twice is still there when a device is not ([`judge_twice`]). There the first two devices
//! carry all that the first one does elsewhere, and each superblock of theirs says which devices are *lost*: the pool
//! went on without them, so what they hold does not count, whenever they come back.

use crate::error::FormatError;
use crate::layout::{Extent, Layout, REGISTRY_AREA_BLOCKS, REGISTRY_BLOCKS, SUPERBLOCK_BLOCKS};
use crate::map::SegmentMap;
use crate::places::Places;
use crate::superblock::{
    INCOMPAT_DEVICES, INCOMPAT_ONCE, INCOMPAT_TWICE, Part, PoolState, Superblock,
};
use crate::wire::{array_at, put, u32_at, u64_at};
use hearth_io::{BLOCK, Joined, Media, Spread, Twice};
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
    twice: bool,
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
        let carries = i == 0 || i == 1 && twice;
        let start = match carries {
            true => layout.segment_start,
            false => Layout::other_start(layout.segment_blocks),
        };
        if !aligned || extent.segment_start < start || (carries && extent.segment_start != start) {
            return Err("the segments of a device in its list begin at a wrong place");
        }
        if twice && extent.segments > layout.segment_count {
            return Err("a device in its list has both halves of a segment");
        }
        if devices.iter().any(|d| d.device == entry.device) {
            return Err("a device is in its list twice");
        }
        devices.push(entry);
    }
    let halves = if twice { 2 } else { 1 };
    match segments == u64::from(layout.segment_count) * halves {
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
    /// Of a pool that keeps everything twice: each was written while the other was lost.
    Apart(usize, usize),
}

/// Refuses devices of two pools, and a device and its copy.
fn are_apart(found: &[Superblock]) -> Result<(), Misfit> {
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
    Ok(())
}

/// The devices that are given, in the order of their places: numbers of the list of their superblocks. Judges
/// whether they are one pool, all of it, and of the same moment.
pub fn judge(found: &[Superblock]) -> Result<Vec<usize>, Misfit> {
    are_apart(found)?;
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

/// What devices are of a pool that keeps everything twice. Numbers are places in the list of those given.
#[derive(Clone, Debug)]
pub struct Together {
    /// Which device is in which place; of those that are lost none is.
    pub places: Vec<Option<usize>>,
    /// The superblock that counts, as that of the first device. It names all that are lost by now: what is not given is.
    pub lead: Superblock,
    /// Given, and older than what was written since without them.
    pub older: Vec<usize>,
    /// A device is missing that was not lost before.
    pub newly: bool,
}

impl Together {
    /// The superblocks of those that carry no more than segments.
    pub fn members(&self, found: &[Superblock]) -> Members {
        let others = self.places.iter().skip(2).flatten();
        Members::new(others.filter_map(|at| found.get(*at)).cloned().collect())
    }
}

/// The same as [`judge`] for a pool that keeps everything twice, of which devices may be missing as long as there is one half
/// of everything.
///
/// Which superblock counts? Both of the first two devices are written at every change, so the one that has missed
/// something is behind in the opening or in the generation. Whom it calls lost has missed something, and so has
/// whoever is behind it without being called that; but if each calls the other lost, both were written alone, and
/// nobody can say which of them is the pool.
pub fn judge_twice(found: &[Superblock]) -> Result<Together, Misfit> {
    are_apart(found)?;
    let knows = |(_, sb): &(usize, &Superblock)| (sb.stamp.max(sb.next_stamp), sb.generation);
    let carries = |sb: &Superblock| sb.is_twice() && sb.device_index < 2;
    let leads = found.iter().enumerate().filter(|(_, sb)| carries(sb));
    let Some((who, lead)) = leads.max_by_key(knows) else {
        let first = found.first().and_then(|sb| sb.devices.first());
        let nobody = DeviceEntry {
            device: Uuid::nil(),
            extent: Extent {
                blocks: 0,
                segment_start: 0,
                segments: 0,
                gap: 0,
            },
        };
        return Err(Misfit::Missing(0, first.copied().unwrap_or(nobody)));
    };
    let mut lead = lead.clone();
    let mut places = vec![None; lead.devices.len()];
    let mut older = Vec::new();
    for (i, sb) in found.iter().enumerate() {
        let at = lead.devices.iter().position(|d| d.device == sb.device);
        let Some(at) = at else {
            return Err(Misfit::NotOfIt(i, who));
        };
        let carries = at < 2 && i != who;
        if carries && sb.lost & (1 << lead.device_index) != 0 {
            return Err(Misfit::Apart(i, who));
        }
        if sb.stamp > lead.stamp.max(lead.next_stamp) {
            return Err(Misfit::Older(who, i));
        }
        // An opening was cut off, in which either got its stamp first.
        let coming = |a: &Superblock, b: &Superblock| a.next_stamp != 0 && a.next_stamp == b.stamp;
        let same = sb.stamp == lead.stamp || coming(&lead, sb) || carries && coming(sb, &lead);
        match lead.lost & (1 << at) == 0 && same {
            true => places[at] = Some(i),
            false => older.push(i),
        }
    }
    let before = lead.lost;
    let there = places.iter().map(Option::is_some);
    lead.lost = (0..)
        .zip(there)
        .filter(|(_, there)| !there)
        .fold(0, |lost, (n, _)| lost | 1 << n);
    if !lead.spread().is_whole_without(lead.lost) {
        let n = places.iter().position(Option::is_none).unwrap_or(0);
        let entry = lead.devices.get(n).copied();
        return Err(Misfit::Missing(n as u16, entry.unwrap_or(lead.devices[0])));
    }
    lead.device_index = 0;
    lead.device = lead.devices[0].device;
    Ok(Together {
        places,
        newly: lead.lost & !before != 0,
        lead,
        older,
    })
}

/// What was read may be the work of a program that was killed before it could flush it: a power cut might take it, with what rests
/// on it on another device left.
fn settle(media: &mut dyn Media) -> Result<(), FormatError> {
    media.flush().map_err(|source| FormatError::Io {
        doing: "flushing the flash device",
        source,
    })
}

/// Gives the second half of what lies before the segments what the first has, or where that is damaged and the second
/// is not, the first what the second has.
///
/// What is there twice on each device (registry, map) is written one copy after the other, each durable on both
/// devices before the next, and so it is here. So at any moment the devices differ in one copy at most, and a
/// device that is left alone in the middle has the other one whole.
fn make_alike(layout: &Layout, pool: Uuid, media: &mut dyn Media) -> std::io::Result<()> {
    let registry = REGISTRY_BLOCKS.map(|at| (at, REGISTRY_AREA_BLOCKS));
    let grown = layout.registry_room();
    let grown = grown.map(|(at, blocks)| [(at, blocks), (at + blocks, blocks)]);
    let from_other = Places::better_there(media, layout, pool);
    let areas = registry.into_iter().chain(grown.into_iter().flatten());
    let areas = areas.map(|(start, blocks)| (start, blocks, from_other));
    let better = SegmentMap::better_there(media, layout);
    let map = [0, 1].into_iter().zip(better).map(|(copy, better)| {
        let start = layout.map_offset(copy) / BLOCK;
        (start, layout.map_blocks(), better)
    });
    for (start, blocks, from_other) in areas.chain(map) {
        let mut differs = false;
        for from in (0..blocks).step_by(ALIKE_BLOCKS as usize) {
            let at = (start + from) * BLOCK;
            let len = (blocks - from).min(ALIKE_BLOCKS) * BLOCK;
            let (mut one, mut other) = (vec![0; len as usize], vec![0; len as usize]);
            // What can be read on one only is written to the other.
            let both = media.read_other(at, &mut other);
            if matches!(both, Ok(false)) {
                return Ok(());
            }
            media.read_at(at, &mut one)?;
            let unread = both.is_err();
            let pairs = one.chunks(BLOCK as usize).zip(other.chunks(BLOCK as usize));
            for ((one, other), n) in pairs.zip(0..) {
                if !unread && one == other {
                    continue;
                }
                match from_other && !unread {
                    true => media.write_at(at + n * BLOCK, other)?,
                    false => media.write_other(at + n * BLOCK, one)?,
                }
                differs = true;
            }
        }
        if differs {
            media.flush()?;
        }
    }
    Ok(())
}

/// Blocks that are compared at once.
const ALIKE_BLOCKS: u64 = 256;

/// What a superblock is on the device with this place, of two that carry the same.
fn named(block: &[u8], place: u16) -> Option<Vec<u8>> {
    let sb = Superblock::decode(block).ok()?;
    let entry = sb.devices.get(usize::from(place))?;
    let named = Superblock {
        device_index: place,
        device: entry.device,
        ..sb.clone()
    };
    Some(named.encode().to_vec())
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
        devices.iter_mut().try_for_each(|device| settle(device))?;
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

    /// The same for a pool that keeps everything twice; what is missing is named as lost by that. Then the first two
    /// devices are made the same before their segments: of what was being written there when the power failed, one
    /// may have more than the other.
    pub fn stamp_twice<M: Media>(
        &mut self,
        lead: &mut Superblock,
        media: &mut Joined<M>,
    ) -> Result<(), FormatError> {
        settle(media)?;
        if lead.next_stamp != 0 {
            // Of the first two, one may know nothing of it yet. If the other had finished, and this were cut off too, that one
            // would have an old stamp and no reason for it.
            lead.store_naming(media)?;
            self.finish_twice(lead, media)?;
        }
        let next = lead.stamp.checked_add(1);
        lead.next_stamp =
            next.ok_or(FormatError::unfit("superblock", "its stamp is at its end"))?;
        lead.store_naming(media)?;
        self.finish_twice(lead, media)?;
        make_alike(&lead.layout, lead.pool, media).map_err(|source| FormatError::Io {
            doing: "making two flash devices the same",
            source,
        })
    }

    fn finish_twice<M: Media>(
        &mut self,
        lead: &mut Superblock,
        media: &mut Joined<M>,
    ) -> Result<(), FormatError> {
        for sb in &mut self.others {
            if sb.stamp == lead.next_stamp {
                continue;
            }
            let place = sb.device_index;
            *sb = lead.of_member(place, sb, lead.next_stamp);
            let spread = media.spread();
            let device = media.device(usize::from(place));
            let device = device.map_err(|source| FormatError::Io {
                doing: "writing the superblock",
                source,
            })?;
            let stored = sb.store(device);
            // What fails now is lost, and the first device says so below.
            stored.or_else(|e| match spread.is_some_and(|s| s.lose(place)) {
                true => Ok(()),
                false => Err(e),
            })?;
        }
        (lead.stamp, lead.next_stamp) = (lead.next_stamp, 0);
        lead.store_naming(media)
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
        let spread = Spread::with_gaps(first, others);
        if !self.is_twice() {
            return spread;
        }
        spread.twice(Twice {
            front: self.layout.segment_start * BLOCK,
            segment: u64::from(self.layout.segment_blocks) * BLOCK,
            own: SUPERBLOCK_BLOCKS.map(|at| at * BLOCK),
            named,
            lost: self.lost,
            once: self.layout.once,
        })
    }

    /// Is everything in the pool on two of its devices?
    pub fn is_twice(&self) -> bool {
        self.incompat & INCOMPAT_TWICE != 0
    }

    /// The pool keeps everything twice on these devices, of which this is the superblock of the first.
    pub fn set_twice(&mut self, layout: Layout, devices: Vec<DeviceEntry>) {
        self.set_devices(layout, devices);
        self.incompat |= INCOMPAT_TWICE;
        if layout.once {
            self.incompat |= INCOMPAT_ONCE;
        }
    }

    /// The superblock of another device of the pool whose first has this one, to take the place of `old` there.
    pub(crate) fn of_member(&self, place: u16, old: &Superblock, stamp: u64) -> Superblock {
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
            ..self.without_areas()
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

    /// Stores it on all devices that carry it, naming those that are lost, also what is lost while that is done.
    pub fn store_naming(&mut self, media: &mut dyn Media) -> Result<(), FormatError> {
        let lost = |media: &dyn Media| media.spread().map_or(0, |spread| spread.lost());
        loop {
            self.lost |= lost(media);
            self.store(media)?;
            if lost(media) & !self.lost == 0 {
                return Ok(());
            }
        }
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
mod tests;
