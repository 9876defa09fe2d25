//! Another device in the place of one of a pool that keeps everything twice, whether that one is there or lost.
//!
//! The danger is a device that is believed too early or too late: the new one while it lacks something, the old one when
//! the pool has gone on without it. Both are in the hands of the superblocks that carry the pool, those of the first
//! two devices, as with every loss; here it is one of *the others*, never the new one, that decides. In two steps:
//!
//! 1. The list has the new device in the old one's place, and calls it **lost**. From here on the old one is none of the
//!    pool's, and the new one does not count yet; the pool is whole without either.
//! 2. The new device has its superblock, and then the others' no longer call it lost.
//!
//! All that the new device has to hold is durable on it before the first. Cut off before that, the pool is what it was;
//! after it, a pool with a lost device, which is replaced in the same way.

use super::{COPY_BYTES, Copied, Failed, Newcomer, Progress, called_off, in_place_of, no_such};
use crate::BLOCK_BYTES;
use crate::devices::{DeviceEntry, Members, judge_twice};
use crate::error::FormatError;
use crate::layout::SUPERBLOCK_BLOCKS;
use crate::superblock::{Part as Role, PoolState, Superblock};
use hearth_io::{BLOCK, Joined, Media};
use uuid::Uuid;

/// Where the other half of a segment of a device lies: the device's place, and the offset there. Segments are counted from the
/// device's first.
pub fn other_half(lead: &Superblock, place: usize, segment: u32) -> Option<(u16, u64)> {
    let count = u64::from(lead.layout.segment_count);
    let first = u64::from(lead.segments().get(place)?.start);
    let number = (first + u64::from(segment) + count) % (2 * count).max(1);
    let bytes = u64::from(lead.layout.segment_blocks) * BLOCK;
    let whole = lead.layout.segment_start * BLOCK + number * bytes;
    Some(lead.spread().place(whole))
}

/// Refuses the replacement of a device while another one is lost, if something would be on neither.
pub fn can_lose(lead: &Superblock, place: usize) -> Result<(), FormatError> {
    let without = lead.lost | bit(place);
    match lead.spread().is_whole_without(without) {
        true => Ok(()),
        false => Err(FormatError::unfit(
            "list of devices",
            "another device is lost, which has to be replaced first",
        )),
    }
}

fn bit(place: usize) -> u64 {
    1 << place
}

/// Puts `new` into the place of `devices[old]`. `devices` are the pool's in their order, with anything in the place of those that
/// are lost, which `lost` names and which are not used. Afterwards `new` is among them, and the old one is where `new` was.
/// `copied` is as for [`replace`](super::replace).
pub fn replace_half<M: Media>(
    devices: &mut [M],
    old: usize,
    lost: u64,
    new: &mut M,
    newcomer: Newcomer,
    copied: &dyn Fn(u32) -> bool,
    progress: Progress<'_>,
) -> Result<(Superblock, Copied), Failed> {
    let at_new = devices.len();
    let (mut lead, mut members) = opened(devices, lost)?;
    can_lose(&lead, old).map_err(|e| (old, e))?;
    let entry = *lead.devices.get(old).ok_or((at_new, no_such()))?;
    let extent = in_place_of(&lead, old, &entry.extent, new.len()).map_err(|e| (at_new, e))?;
    // What is missing is named, and known for older from here on, as at an opening.
    let mut joined = Joined::new(lead.spread(), devices.iter_mut().collect());
    let stamped = members.stamp_twice(&mut lead, &mut joined);
    stamped.map_err(|e| (at_other(old), e))?;
    can_lose(&lead, old).map_err(|e| (old, e))?;
    let was_lost = lead.lost & bit(old) != 0;

    Superblock::erase(new).map_err(|e| (at_new, e))?;
    let what = Halves {
        lead: &lead,
        place: old,
        to: extent.segment_start * BLOCK,
        copied,
    };
    let copied = what.copy(devices, new, progress, at_new)?;

    let mut next = lead.clone();
    next.devices[old] = DeviceEntry {
        device: newcomer.device,
        extent,
    };
    next.device = next.devices[0].device;
    next.peer = entry.device;
    next.lost |= bit(old);
    if was_lost && next.layout.once {
        // Clean blocks that were on the lost one only: what stands in their places is none of them, however it looks. No segment
        // there is has a number of this generation's, nor has one that is opened later a smaller one.
        next.once.floor = next.once.floor.max(next.generation.saturating_add(1) << 32);
        next.once.behind |= bit(old);
    }
    if old == 0 {
        next.created_unix_s = newcomer.now_unix_s.max(lead.created_unix_s + 1);
    }
    // The switch: the old device is none of the pool's any more.
    let mut rest = Joined::new(next.spread(), devices.iter_mut().collect());
    next.store_naming(&mut rest)
        .map_err(|e| (at_other(old), e))?;
    let sb = first_of(&next, old, newcomer, new).map_err(|e| (at_new, let_go_by(e)))?;
    if old >= 2 {
        let mut others = members.others().to_vec();
        others.retain(|sb| usize::from(sb.device_index) != old);
        others.push(sb);
        members = Members::new(others);
    }
    // And now the new one is. Those that it depends on say so before it does itself.
    next.lost &= !bit(old);
    next.store(&mut rest)
        .map_err(|e| (at_other(old), let_go_by(e)))?;
    next.lost |= rest.spread().map_or(0, |s| s.lost()) & !bit(old);
    if let Some(place) = devices.get_mut(old) {
        std::mem::swap(place, new);
    }
    let mut all = Joined::new(next.spread(), devices.iter_mut().collect());
    let stamped = members.stamp_twice(&mut next, &mut all);
    stamped.map_err(|e| (at_other(old), let_go_by(e)))?;
    if next.lost & bit(old) != 0 {
        let source = std::io::Error::from_raw_os_error(EIO);
        let doing = "writing the superblock";
        return Err((at_new, let_go_by(FormatError::Io { doing, source })));
    }
    // One that was lost is not asked again. If this one fails now, it is no less known by the list for what it is.
    if !was_lost {
        drop(let_go_half(newcomer.device, new));
    }
    Ok((next, copied))
}

/// What went wrong after the old device was let go: the pool is whole without it and without the new one.
fn let_go_by(error: FormatError) -> FormatError {
    match error {
        FormatError::Io { source, .. } => FormatError::Io {
            doing: "making the new device count, after the old one was let go (it is no part of the pool any more: put a third one in the place of the new one)",
            source,
        },
        other => other,
    }
}

/// What a device that no longer takes writes is taken to say.
const EIO: i32 = 5;

/// The device that an error is told of which came from one of several.
fn at_other(place: usize) -> usize {
    usize::from(place == 0)
}

/// The pool on those devices that are there.
fn opened<M: Media>(devices: &mut [M], lost: u64) -> Result<(Superblock, Members), Failed> {
    let mut found = Vec::new();
    let mut at = Vec::new();
    for (place, media) in devices.iter_mut().enumerate() {
        if lost & bit(place) != 0 {
            continue;
        }
        if let Ok(sb) = Superblock::load(media) {
            found.push(sb);
            at.push(place);
        }
    }
    let not_it = |why| {
        (
            at_other(lost.trailing_ones() as usize),
            FormatError::unfit("pool", why),
        )
    };
    let unfit = not_it("they are not its devices in their order");
    let Ok(together) = judge_twice(&found) else {
        return Err(unfit);
    };
    let places = together.places.iter().enumerate();
    let in_order = (places)
        .filter_map(|(place, n)| Some((place, (*n)?)))
        .all(|(place, n)| at.get(n) == Some(&place));
    if together.places.len() != devices.len() || !in_order {
        return Err(unfit);
    }
    if together.lead.state == PoolState::Failed {
        return Err(not_it("its flash was given up, so nothing on it counts"));
    }
    let members = together.members(&found);
    Ok((together.lead, members))
}

/// Gives the new device its first superblock, which says of itself that it does not count.
fn first_of<M: Media>(
    next: &Superblock,
    place: usize,
    newcomer: Newcomer,
    new: &mut M,
) -> Result<Superblock, FormatError> {
    let mut sb = next.for_member(place as u16, newcomer.device, newcomer.now_unix_s);
    sb.peer = next.peer;
    if place >= 2 {
        sb.store(new)?;
        return Ok(sb);
    }
    // Of a smaller generation than the other that carries the pool: that one's counts.
    let own = Superblock {
        device_index: place as u16,
        device: newcomer.device,
        generation: next.generation.saturating_sub(1),
        ..next.clone()
    };
    store_alone(&own, new)?;
    Ok(sb)
}

/// Writes a superblock of one of those that carry the pool to that device alone.
fn store_alone<M: Media>(sb: &Superblock, media: &mut M) -> Result<(), FormatError> {
    let io = |source| FormatError::Io {
        doing: "writing the superblock",
        source,
    };
    for (copy, block) in (0..).zip(SUPERBLOCK_BLOCKS) {
        let own = Superblock { copy, ..sb.clone() };
        media
            .write_at(block * BLOCK, own.encode().as_slice())
            .map_err(io)?;
        media.flush().map_err(io)?;
    }
    Ok(())
}

/// Has a device say that another one took its place. If it cannot, it has nothing to say at all.
fn let_go_half<M: Media>(by: Uuid, media: &mut M) -> Result<(), FormatError> {
    let Ok(was) = Superblock::load(media) else {
        return Superblock::erase(media);
    };
    let mut gone = Superblock {
        part: Role::Gone,
        peer: by,
        ..was
    };
    if gone.device_index >= 2 {
        return gone.store(media);
    }
    gone.generation = gone.generation.saturating_add(1);
    store_alone(&gone, media)
}

/// A device's halves, and what lies before them.
struct Halves<'a> {
    lead: &'a Superblock,
    place: usize,
    /// Where the segments begin on the new one.
    to: u64,
    copied: &'a dyn Fn(u32) -> bool,
}

/// Bytes that are copied.
struct Part {
    /// Where they are, by places of devices; the first is read where it can be.
    from: Vec<(usize, u64)>,
    to: u64,
    len: u64,
    is_segment: bool,
}

impl Halves<'_> {
    /// The old device's own bytes where it is there, so that the new one is a copy of it in every respect: a block that has
    /// rotted on the other half's device is not made the only one there is.
    fn parts(&self) -> Vec<Part> {
        let lead = self.lead;
        let is_there = |place: usize| lead.lost & bit(place) == 0;
        let mut parts = Vec::new();
        if self.place < 2 {
            let from = [self.place, 1 - self.place];
            let from: Vec<usize> = from.into_iter().filter(|n| is_there(*n)).collect();
            let mut at = 0;
            let ends = SUPERBLOCK_BLOCKS
                .into_iter()
                .chain([lead.layout.segment_start]);
            for end in ends {
                if end * BLOCK > at {
                    parts.push(Part {
                        from: from.iter().map(|n| (*n, at)).collect(),
                        to: at,
                        len: end * BLOCK - at,
                        is_segment: false,
                    });
                }
                at = (end + 1) * BLOCK;
            }
        }
        let Some(entry) = lead.devices.get(self.place) else {
            return parts;
        };
        let bytes = u64::from(lead.layout.segment_blocks) * BLOCK;
        for seg in (0..entry.extent.segments).filter(|seg| !(self.copied)(*seg)) {
            let at = u64::from(seg) * bytes;
            let own = (self.place, entry.extent.segment_start * BLOCK + at);
            let other = other_half(lead, self.place, seg).map(|(n, at)| (usize::from(n), at));
            let from = [Some(own), other].into_iter().flatten();
            parts.push(Part {
                from: from.filter(|(n, _)| is_there(*n)).collect(),
                to: self.to + at,
                len: bytes,
                is_segment: true,
            });
        }
        parts
    }

    fn copy<M: Media>(
        &self,
        devices: &mut [M],
        new: &mut M,
        progress: Progress<'_>,
        at_new: usize,
    ) -> Result<Copied, Failed> {
        let writing = |source| {
            let doing = "writing to the new device";
            (at_new, FormatError::Io { doing, source })
        };
        let parts = self.parts();
        let total = parts.iter().map(|part| part.len).sum();
        let mut out = Copied::default();
        let mut done = 0;
        let mut bytes = vec![0; COPY_BYTES];
        for part in parts {
            for at in (0..part.len).step_by(COPY_BYTES) {
                let n = (part.len - at).min(COPY_BYTES as u64) as usize;
                let piece = &mut bytes[..n];
                self.read(devices, &part, at, piece, &mut out)?;
                new.write_at(part.to + at, piece).map_err(writing)?;
                done += n as u64;
                if !progress(done, total) {
                    return Err((at_new, called_off()));
                }
            }
        }
        new.flush().map_err(writing)?;
        Ok(out)
    }

    fn read<M: Media>(
        &self,
        devices: &mut [M],
        part: &Part,
        at: u64,
        piece: &mut [u8],
        out: &mut Copied,
    ) -> Result<(), Failed> {
        let mut read = |from: &(usize, u64), skip: u64, into: &mut [u8]| {
            let none = || std::io::Error::from(std::io::ErrorKind::NotFound);
            let media = devices.get_mut(from.0).ok_or_else(none)?;
            media.read_at(from.1 + at + skip, into)
        };
        if part.from.iter().any(|from| read(from, 0, piece).is_ok()) {
            return Ok(());
        }
        let sound = matches!(self.lead.state, PoolState::Clean { .. });
        for (block, i) in piece.chunks_mut(BLOCK_BYTES).zip(0u64..) {
            let mut failed = std::io::Error::from(std::io::ErrorKind::NotFound);
            let mut done = false;
            for from in &part.from {
                match read(from, i * BLOCK, block) {
                    Ok(()) => {
                        done = true;
                        break;
                    }
                    Err(e) => failed = e,
                }
            }
            if done {
                continue;
            }
            // As when a device is copied that there is once.
            if part.is_segment && at == 0 && i == 0 && !sound {
                let doing = "reading what a segment begins with";
                let place = part.from.last().map_or(0, |(n, _)| *n);
                return Err((
                    place,
                    FormatError::Io {
                        doing,
                        source: failed,
                    },
                ));
            }
            out.unreadable += 1;
            block.fill(0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
