//! Devices that join a pool, take another's place, or leave it, while nobody serves the pool.
//!
//! Whatever the moment at which this is cut off, there is one pool and it is whole: the one before or the one after.
//! So each change has one store of a superblock that is the **switch**. What it leads to (a segment map for the new
//! number of segments, at a place of its own; the copies of all segments) is durable before, and lies where nothing
//! lies that counts. What the change leaves behind (devices that still list what was before, a device that is no part of the pool
//! any more) is put right after it, and is not believed meanwhile: of several devices, the list of the first
//! is the one that counts, and all get a new stamp as at an opening ([`Members::stamp`]).
//!
//! The first device has that list itself. When it is replaced the switch is on the *old* one, which says
//! that it is [gone](Part::Gone); until then the new one is [coming](Part::Coming), and neither is ever believed beside
//! the other. Between the two steps nothing can be opened, and doing the same again finishes it.
//!
//! Where everything is on two devices it goes another way ([`replace_half`]).
//!
//! The order of steps is in `docs/format.md`, and tried with a power cut at each of them by the simulation.

use crate::batch::BatchHeader;
use crate::devices::{DeviceEntry, Members, judge};
use crate::error::FormatError;
use crate::layout::{Extent, Layout, SEGMENTS_MIN, SUPERBLOCK_BLOCKS};
use crate::map::{MapEntry, SegmentMap};
use crate::superblock::{
    INCOMPAT_CHANGED, INCOMPAT_DEVICES, INCOMPAT_MAP, Part, PoolState, Superblock,
};
use hearth_io::{BLOCK, Media};
use uuid::Uuid;

mod halves;
mod lost;

pub use lost::go_on_without;

pub use halves::{can_lose, other_half, replace_half};

/// Bytes copied at once.
pub const COPY_BYTES: usize = 1 << 20;
const BLOCK_BYTES: usize = BLOCK as usize;

/// What a device is called from now on that joins a pool.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer {
    /// Its number for life.
    pub device: Uuid,
    /// Now, seconds since 1970.
    pub now_unix_s: u64,
}

/// What went wrong, on which of the devices that were given.
pub type Failed = (usize, FormatError);

/// Told how many bytes of how many are done; false calls the change off, as long as it can be.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// How a device was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Blocks that the old device does not give any more, and that are zeros on the new one: what lay in them is found
    /// to be damaged when it is read, as on the old one.
    pub unreadable: u64,
}

/// What of a segment is on which device.
fn extent_of(layout: &Layout, bytes: u64) -> Result<Extent, FormatError> {
    let segment = u64::from(layout.segment_blocks);
    let start = Layout::other_start(layout.segment_blocks);
    let blocks = bytes / BLOCK;
    let fit = blocks.saturating_sub(start) / segment;
    let least = u64::from(SEGMENTS_MIN);
    if fit < least {
        return Err(FormatError::TooSmall {
            needed: (start + least * segment) * BLOCK,
            actual: bytes,
        });
    }
    // What lies behind 2^32 slots stays unused.
    let most = (u32::MAX - 1) / layout.segment_blocks;
    let room = u64::from(most.saturating_sub(layout.segment_count));
    Ok(Extent {
        blocks,
        segment_start: start,
        segments: fit.min(room) as u32,
        gap: 0,
    })
}

/// The pool as it would be with a device of `bytes` more. Nothing is written.
pub fn with_more(lead: &Superblock, bytes: u64, device: Uuid) -> Result<Superblock, FormatError> {
    let extent = extent_of(&lead.layout, bytes)?;
    let layout = lead.layout.grown(extent.segments)?;
    let mut list = lead.all_devices();
    if list.len() >= usize::from(crate::devices::DEVICES_MAX) {
        return Err(FormatError::unfit(
            "list of devices",
            "a pool has at most 64",
        ));
    }
    list.push(DeviceEntry { device, extent });
    let mut next = lead.clone();
    next.set_devices(layout, list);
    next.state = kept_state(lead, &layout);
    Ok(next)
}

/// The pool as it would be without one of its devices. Nothing is written.
fn with_less(lead: &Superblock, place: usize) -> Result<Superblock, FormatError> {
    lead.refuse_areas_on(place)?;
    let mut list = lead.all_devices();
    let gone = match place {
        0 => None,
        _ if place < list.len() => Some(list.remove(place).extent),
        _ => None,
    };
    let gone = gone.ok_or(FormatError::unfit(
        "list of devices",
        "the first device carries the tables of the pool",
    ))?;
    let numbers = gone.segments + gone.gap;
    let mut layout = lead.layout;
    // Whoever comes behind it keeps its numbers; behind the last nobody needs them.
    match list.get_mut(place) {
        Some(behind) => behind.extent.gap += numbers,
        None => layout = layout.cut(numbers)?,
    }
    let mut next = lead.clone();
    next.incompat |= INCOMPAT_CHANGED;
    match list.as_slice() {
        [one] => {
            layout.device_blocks = one.extent.blocks;
            next.incompat &= !INCOMPAT_DEVICES;
            (next.layout, next.device_count) = (layout, 1);
            next.devices = Vec::new();
        }
        _ => next.set_devices(layout, list),
    }
    next.state = kept_state(lead, &layout);
    Ok(next)
}

/// A checkpoint stays good if the segment map of the next layout does not lie on it.
fn kept_state(lead: &Superblock, next: &Layout) -> PoolState {
    match lead.state {
        PoolState::Clean {
            checkpoint_bytes, ..
        } if checkpoint_bytes > next.checkpoint_room() => PoolState::Open,
        state => state,
    }
}

/// The pool on these devices, which are in their order.
fn opened<M: Media>(devices: &mut [M]) -> Result<(Superblock, Members), Failed> {
    let mut found = Vec::new();
    for (media, i) in devices.iter_mut().zip(0..) {
        found.push(Superblock::load(media).map_err(|e| (i, e))?);
    }
    let order = judge(&found).unwrap_or_default();
    let in_order = order.iter().enumerate().all(|(at, i)| at == *i);
    if order.len() != devices.len() || !in_order || found.is_empty() {
        let why = "they are not its devices in their order";
        return Err((0, FormatError::unfit("pool", why)));
    }
    let mut lead = found.remove(0);
    if lead.state == PoolState::Failed {
        let why = "its flash was given up, so nothing on it counts";
        return Err((0, FormatError::unfit("pool", why)));
    }
    let mut members = Members::new(found);
    if lead.next_stamp != 0 {
        // An opening was cut off.
        members.finish(&mut lead, devices).map_err(|e| (0, e))?;
    }
    Ok((lead, members))
}

/// Makes `next` what counts: the switch, and what follows from it.
fn switch<M: Media>(
    lead: &Superblock,
    mut next: Superblock,
    members: &mut Members,
    devices: &mut [M],
) -> Result<Superblock, Failed> {
    let at_end = FormatError::unfit("superblock", "its stamp is at its end");
    next.next_stamp = lead.stamp.checked_add(1).ok_or((0, at_end))?;
    let [first, ..] = devices else {
        return Ok(next);
    };
    if next.devices.is_empty() {
        (next.stamp, next.next_stamp) = (next.next_stamp, 0);
        next.store(first).map_err(|e| (0, e))?;
        return Ok(next);
    }
    next.store(first).map_err(|e| (0, e))?;
    members.finish(&mut next, devices).map_err(|e| (0, e))?;
    Ok(next)
}

/// Writes the segment map for the next layout to its place, which is not that of the one that counts.
fn store_map<M: Media>(
    lead: &Superblock,
    next: &Superblock,
    media: &mut M,
) -> Result<(), FormatError> {
    if lead.incompat & INCOMPAT_MAP == 0 || lead.layout == next.layout {
        return Ok(());
    }
    let mut map = load_map(lead, media)?;
    let count = next.layout.segment_count;
    map.entries.resize(count as usize, MapEntry::default());
    (map.header.segments, map.header.generation) = (count, map.header.generation + 1);
    map.store(media, &next.layout)
        .map_err(|source| FormatError::Io {
            doing: "writing the map of the segments",
            source,
        })
}

fn load_map<M: Media>(lead: &Superblock, media: &mut M) -> Result<SegmentMap, FormatError> {
    let map = SegmentMap::load(media, &lead.layout, lead.pool_tag());
    map.ok_or(FormatError::damaged(
        "map of the segments",
        "neither copy can be read",
    ))
}

/// Adds the last of `devices` to the pool of the others, which are in their order. It is new, or was [cleared](clear).
pub fn add<M: Media>(devices: &mut [M], newcomer: Newcomer) -> Result<Superblock, Failed> {
    let place = devices.len().saturating_sub(1);
    let Some((new, before)) = devices.split_last_mut() else {
        return Err((0, FormatError::NotAPool));
    };
    let (lead, members) = opened(before)?;
    let next = with_more(&lead, new.len(), newcomer.device).map_err(|e| (place, e))?;
    let failed = |e| (place, e);
    Superblock::erase(new).map_err(failed)?;
    let mut others = members.others().to_vec();
    let mut sb = next.for_member(place as u16, newcomer.device, newcomer.now_unix_s);
    sb.store(new).map_err(failed)?;
    others.push(sb);
    let [first, ..] = before else {
        return Err((0, FormatError::NotAPool));
    };
    store_map(&lead, &next, first).map_err(|e| (0, e))?;
    switch(&lead, next, &mut Members::new(others), devices)
}

/// Makes sure that nothing on a device that is to be [added](add) to the pool is taken for the pool's: it may have been of it
/// before.
pub fn clear(
    lead: &Superblock,
    media: &mut dyn Media,
    progress: Progress<'_>,
) -> Result<(), FormatError> {
    let io = |source| FormatError::Io {
        doing: "clearing the device",
        source,
    };
    let layout = &lead.layout;
    let extent = extent_of(layout, media.len())?;
    Superblock::erase(media)?;
    let segment = u64::from(layout.segment_blocks);
    let total = u64::from(extent.segments) * segment * BLOCK;
    let zeros = vec![0; BLOCK_BYTES];
    let mut block = vec![0; BLOCK_BYTES];
    for seg in 0..u64::from(extent.segments) {
        let at = (extent.segment_start + seg * segment) * BLOCK;
        for at in [at, at + u64::from(layout.data_blocks()) * BLOCK] {
            // What cannot be read is written, too.
            let blank = media.read_at(at, &mut block).is_ok() && block == zeros;
            if !blank {
                media.write_at(at, &zeros).map_err(io)?;
            }
        }
        if !progress(seg * segment * BLOCK, total) {
            return Err(called_off());
        }
    }
    media.flush().map_err(io)
}

fn called_off() -> FormatError {
    FormatError::Io {
        doing: "the change",
        source: std::io::ErrorKind::Interrupted.into(),
    }
}

/// Refuses a device of `bytes` that is too small to take the place of another one.
pub fn can_replace(lead: &Superblock, place: usize, bytes: u64) -> Result<(), FormatError> {
    match lead.all_devices().get(place) {
        Some(entry) => in_place_of(lead, place, &entry.extent, bytes).map(drop),
        None => Err(no_such()),
    }
}

fn no_such() -> FormatError {
    FormatError::unfit("list of devices", "there is no such device")
}

/// Puts `new` into the place of `devices[old]`, with all that lies there. `devices` are the pool's in their order;
/// afterwards `new` is among them, and the old one is where `new` was. `copied` says of which segments of the device
/// (counted from its first) the new one has a copy already, durable.
pub fn replace<M: Media>(
    devices: &mut [M],
    old: usize,
    new: &mut M,
    newcomer: Newcomer,
    copied: &dyn Fn(u32) -> bool,
    progress: Progress<'_>,
) -> Result<(Superblock, Copied), Failed> {
    let at_new = devices.len();
    let (lead, members) = opened(devices)?;
    let list = lead.all_devices();
    let entry = *list.get(old).ok_or((at_new, no_such()))?;
    let extent = in_place_of(&lead, old, &entry.extent, new.len()).map_err(|e| (at_new, e))?;
    let from = devices.get_mut(old).ok_or((at_new, no_such()))?;
    Superblock::erase(new).map_err(|e| (at_new, e))?;
    let what = Copy {
        lead: &lead,
        first: old == 0,
        from: &entry.extent,
        to: &extent,
        copied,
    };
    let copied = what.run(from, new, progress, at_new, old)?;
    let mut list = list;
    list[old] = DeviceEntry {
        device: newcomer.device,
        extent,
    };
    let mut next = lead.clone();
    if !lead.devices.is_empty() {
        next.devices = list;
    }
    if old == 0 {
        next.device = newcomer.device;
        next.created_unix_s = newcomer.now_unix_s.max(lead.created_unix_s + 1);
        let sb = take_lead(&lead, next, from, new).map_err(|(new, e)| match new {
            true => (at_new, e),
            false => (old, e),
        })?;
        std::mem::swap(from, new);
        let mut members = members;
        let sb = match sb.devices.is_empty() {
            true => sb,
            false => switch(&sb.clone(), sb, &mut members, devices)?,
        };
        // The old one goes on to say what took its place.
        return Ok((sb, copied));
    }
    let mut others = members.others().to_vec();
    let mut sb = next.for_member(old as u16, newcomer.device, newcomer.now_unix_s);
    sb.peer = entry.device;
    sb.store(new).map_err(|e| (at_new, e))?;
    if let Some(place) = others.get_mut(old - 1) {
        *place = sb;
    }
    std::mem::swap(from, new);
    // From here on the list of the first device has the new one.
    let sb = switch(&lead, next, &mut Members::new(others), devices)?;
    let was = members.others().get(old - 1);
    let_go(was, newcomer.device, new).map_err(|e| (at_new, e))?;
    Ok((sb, copied))
}

/// The first block of the segments on a device that comes into this place.
pub fn begin_of(lead: &Superblock, place: usize) -> u64 {
    match place == 0 || place == 1 && lead.is_twice() {
        true => lead.layout.segment_start,
        false => Layout::other_start(lead.layout.segment_blocks),
    }
}

/// Where on a device of `bytes` the segments go that another one has now.
fn in_place_of(
    lead: &Superblock,
    place: usize,
    old: &Extent,
    bytes: u64,
) -> Result<Extent, FormatError> {
    // It is written past the pool while it would be copied.
    lead.refuse_areas_on(place)?;
    let segment_start = begin_of(lead, place);
    let segments = u64::from(old.segments) * u64::from(lead.layout.segment_blocks);
    let mut needed = segment_start + segments;
    if place == 0 && lead.devices.is_empty() {
        // What the layout says of the device itself stays.
        needed = lead.layout.device_blocks;
    }
    if bytes / BLOCK < needed {
        return Err(FormatError::TooSmall {
            needed: needed * BLOCK,
            actual: bytes,
        });
    }
    Ok(Extent {
        blocks: bytes / BLOCK,
        segment_start,
        segments: old.segments,
        gap: old.gap,
    })
}

/// The new first device has everything: it takes the old one's part. Fails with whether it was the new one that did.
fn take_lead<M: Media>(
    lead: &Superblock,
    next: Superblock,
    old: &mut M,
    new: &mut M,
) -> Result<Superblock, (bool, FormatError)> {
    let mut coming = Superblock {
        copy: 1,
        part: Part::Coming,
        peer: lead.device,
        incompat: next.incompat | INCOMPAT_CHANGED,
        ..next
    };
    coming.store(new).map_err(|e| (true, e))?;
    let mut gone = Superblock {
        part: Part::Gone,
        peer: coming.device,
        incompat: lead.incompat | INCOMPAT_CHANGED,
        ..lead.clone()
    };
    // The switch: from here on the old one is not believed.
    gone.store(old).map_err(|e| (false, e))?;
    settle_lead(&gone, coming, new).map_err(|e| (true, e))
}

/// The last step of that.
fn settle_lead<M: Media>(
    gone: &Superblock,
    coming: Superblock,
    new: &mut M,
) -> Result<Superblock, FormatError> {
    // The bit was set for the change alone, or because devices had gone before.
    let needed = !coming.layout.has_only_grown()
        || coming.devices.iter().any(|d| d.extent.gap > 0)
        || coming.devices.is_empty() && (coming.layout.added.segments != 0 || coming.stamp != 0);
    let mut sb = Superblock {
        part: Part::Member,
        peer: gone.device,
        ..coming
    };
    if !needed {
        sb.incompat &= !INCOMPAT_CHANGED;
    }
    sb.store(new)?;
    Ok(sb)
}

/// Finishes a replacement of a pool's first device that was cut off after the switch. False: there is none to finish,
/// and nothing was done.
pub fn finish_replacement<M: Media>(old: &mut M, new: &mut M) -> Result<bool, FormatError> {
    let (Ok(gone), Ok(coming)) = (Superblock::load_any(old), Superblock::load_any(new)) else {
        return Ok(false);
    };
    let fit = gone.part == Part::Gone
        && coming.part == Part::Coming
        && (gone.peer, coming.peer) == (coming.device, gone.device)
        && gone.pool == coming.pool;
    if fit {
        settle_lead(&gone, coming, new)?;
    }
    Ok(fit)
}

/// A device that is copied.
struct Copy<'a> {
    lead: &'a Superblock,
    /// It carries the tables of the pool as well.
    first: bool,
    from: &'a Extent,
    to: &'a Extent,
    copied: &'a dyn Fn(u32) -> bool,
}

impl Copy<'_> {
    fn run<M: Media>(
        &self,
        from: &mut M,
        to: &mut M,
        progress: Progress<'_>,
        at_new: usize,
        at_old: usize,
    ) -> Result<Copied, Failed> {
        let mut out = Copied::default();
        let segment = u64::from(self.lead.layout.segment_blocks) * BLOCK;
        // Bytes from where, to where, how many, and whether it is a segment.
        let mut parts: Vec<(u64, u64, u64, bool)> = Vec::new();
        if self.first {
            let mut at = 0;
            for block in SUPERBLOCK_BLOCKS {
                parts.push((at, at, block * BLOCK - at, false));
                at = (block + 1) * BLOCK;
            }
            let end = self.lead.layout.segment_start * BLOCK;
            parts.push((at, at, end.saturating_sub(at), false));
        }
        for seg in (0..self.from.segments).filter(|seg| !(self.copied)(*seg)) {
            let at = u64::from(seg) * segment;
            let [a, b] = [self.from, self.to].map(|extent| extent.segment_start * BLOCK + at);
            parts.push((a, b, segment, true));
        }
        let total = parts.iter().map(|(_, _, len, _)| len).sum();
        let mut done = 0;
        let mut bytes = vec![0; COPY_BYTES];
        for (a, b, len, is_segment) in parts {
            for at in (0..len).step_by(COPY_BYTES) {
                let n = (len - at).min(COPY_BYTES as u64) as usize;
                let part = &mut bytes[..n];
                if from.read_at(a + at, part).is_err() {
                    let first = is_segment && at == 0;
                    self.read_blocks(from, a + at, part, first, &mut out)
                        .map_err(|e| (at_old, e))?;
                }
                to.write_at(b + at, part).map_err(|source| {
                    let doing = "writing to the new device";
                    (at_new, FormatError::Io { doing, source })
                })?;
                done += n as u64;
                if !progress(done, total) {
                    return Err((at_new, called_off()));
                }
            }
        }
        to.flush().map_err(|source| {
            let doing = "writing to the new device";
            (at_new, FormatError::Io { doing, source })
        })?;
        Ok(out)
    }

    /// Reads what can be read. `first`: it begins a segment.
    fn read_blocks<M: Media>(
        &self,
        from: &mut M,
        at: u64,
        part: &mut [u8],
        first: bool,
        out: &mut Copied,
    ) -> Result<(), FormatError> {
        let sound = matches!(self.lead.state, PoolState::Clean { .. });
        for (block, i) in part.chunks_mut(BLOCK_BYTES).zip(0u64..) {
            let Err(source) = from.read_at(at + i * BLOCK, block) else {
                continue;
            };
            // Of a log that has to be read nobody would know what was there, not even that it was.
            if first && i == 0 && !sound {
                let doing = "reading what a segment begins with";
                return Err(FormatError::Io { doing, source });
            }
            out.unreadable += 1;
            block.fill(0);
        }
        Ok(())
    }
}

/// Takes a device out of the pool on which nothing lies that counts, but the first. `devices` are the pool's in their order.
/// Afterwards it is none of them, and its superblock says so.
pub fn remove<M: Media>(mut devices: Vec<M>, place: usize) -> Result<(Superblock, Vec<M>), Failed> {
    let (lead, members) = opened(&mut devices)?;
    let next = with_less(&lead, place).map_err(|e| (place, e))?;
    check_empty(&lead, place, &mut devices)?;
    let mut others = members.others().to_vec();
    let mut gone = devices.remove(place);
    let was = others.remove(place - 1);
    let [first, ..] = devices.as_mut_slice() else {
        return Err((0, FormatError::NotAPool));
    };
    store_map(&lead, &next, first).map_err(|e| (0, e))?;
    let sb = switch(&lead, next, &mut Members::new(others), &mut devices)?;
    let_go(Some(&was), Uuid::nil(), &mut gone).map_err(|e| (place, e))?;
    Ok((sb, devices))
}

/// Has a device that is no part of the pool any more say so, and which one took its place, if one did.
fn let_go(was: Option<&Superblock>, by: Uuid, media: &mut dyn Media) -> Result<(), FormatError> {
    let Some(was) = was else {
        return Superblock::erase(media);
    };
    let mut gone = Superblock {
        part: Part::Gone,
        peer: by,
        incompat: was.incompat | INCOMPAT_CHANGED,
        ..was.clone()
    };
    gone.store(media)
}

/// Refuses to let a device go that holds segments which count.
fn check_empty<M: Media>(lead: &Superblock, place: usize, devices: &mut [M]) -> Result<(), Failed> {
    if lead.incompat & INCOMPAT_MAP == 0 {
        // It was never opened, or by a version that had no map.
        return match lead.generation <= 1 {
            true => Ok(()),
            false => Err((
                place,
                FormatError::unfit("map of the segments", "there is none: serve the pool once"),
            )),
        };
    }
    let holds = || {
        let why = "the device still holds segments that count";
        FormatError::unfit("list of devices", why)
    };
    let map = devices.first_mut().map(|first| load_map(lead, first));
    let map = map
        .unwrap_or(Err(FormatError::NotAPool))
        .map_err(|e| (0, e))?;
    let numbers = lead.segments().get(place).cloned().unwrap_or(0..0);
    let named = map
        .entries
        .get(numbers.start as usize..numbers.end as usize);
    if named.unwrap_or_default().iter().any(|entry| entry.seq != 0) {
        return Err((place, holds()));
    }
    // What was opened after the map was written begins behind what it tells of.
    let extent = lead.all_devices().get(place).map(|d| d.extent);
    let (Some(extent), Some(media)) = (extent, devices.get_mut(place)) else {
        return Err((place, FormatError::NotAPool));
    };
    let mut block = vec![0; BLOCK_BYTES];
    for seg in 0..u64::from(extent.segments) {
        let at = (extent.segment_start + seg * u64::from(lead.layout.segment_blocks)) * BLOCK;
        media.read_at(at, &mut block).map_err(|source| {
            let doing = "reading what a segment begins with";
            (place, FormatError::Io { doing, source })
        })?;
        let head = BatchHeader::decode(&block, &mut Vec::new());
        let counts = head.is_ok_and(|head| {
            head.pool_tag == lead.pool_tag() && head.batch_seq > map.header.through
        });
        if counts {
            return Err((place, holds()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
