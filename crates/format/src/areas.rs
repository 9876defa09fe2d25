//! Segments that are no part of the log: areas that are set aside for something else, such as the kernel's swap.
//!
//! Whoever has such an area writes to it past Hearth, so nothing in it may ever be taken for the log: not while it is set
//! aside, whatever stands in it, and not when it has been given back. So the superblock lists it, which is durable before
//! anybody writes there; and what is given back is zeros, durably, before the superblock that does not list it any more is.

use crate::error::FormatError;
use crate::layout::SEGMENTS_MIN;
use crate::superblock::{INCOMPAT_AREAS, Superblock};
use crate::wire::{put, u16_at, u32_at};
use hearth_io::BLOCK;
use std::ops::Range;

/// Most areas of a pool.
pub const AREAS_MAX: usize = 63;
/// What an area of swap is called on flash.
const KIND_SWAP: u16 = 3;
const AT: usize = 320;
const ENTRY: usize = 16;

/// Segments, one behind the other on one device, that the kernel swaps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub segments: u32,
}

impl Area {
    /// The segments' numbers.
    pub fn range(&self) -> Range<u32> {
        self.first..self.first.saturating_add(self.segments)
    }
}

/// Where an area lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaPlace {
    /// On which of the pool's devices.
    pub device: u16,
    /// From which byte of it on.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

pub(crate) fn put_all(block: &mut [u8], areas: &[Area]) {
    if areas.is_empty() {
        return;
    }
    put(block, AT, &(areas.len() as u16).to_le_bytes());
    for (at, area) in (AT + 8..).step_by(ENTRY).zip(areas) {
        put(block, at, &KIND_SWAP.to_le_bytes());
        put(block, at + 4, &area.first.to_le_bytes());
        put(block, at + 8, &area.segments.to_le_bytes());
    }
}

pub(crate) fn all_at(block: &[u8]) -> Result<Vec<Area>, &'static str> {
    let count = usize::from(u16_at(block, AT));
    if count > AREAS_MAX {
        return Err("it lists more areas beside the log than there may be");
    }
    let each = (AT + 8..).step_by(ENTRY).take(count).map(|at| {
        if u16_at(block, at) != KIND_SWAP {
            return Err("it lists an area beside the log of an unknown kind");
        }
        Ok(Area {
            first: u32_at(block, at + 4),
            segments: u32_at(block, at + 8),
        })
    });
    each.collect()
}

impl Superblock {
    /// Adds an area. Nothing is stored.
    pub fn add_area(&mut self, area: Area) -> Result<(), FormatError> {
        let mut next = self.clone();
        next.areas.push(area);
        next.areas.sort_by_key(|area| area.first);
        let unfit = |why| FormatError::unfit("list of areas", why);
        next.check_areas().map_err(unfit)?;
        next.incompat |= INCOMPAT_AREAS;
        *self = next;
        Ok(())
    }

    /// Takes an area off the list. Nothing is stored.
    pub fn remove_area(&mut self, area: Area) {
        self.areas.retain(|a| *a != area);
        if self.areas.is_empty() {
            self.incompat &= !INCOMPAT_AREAS;
        }
    }

    /// The same for another device: the list is the first one's.
    pub(crate) fn without_areas(&self) -> Superblock {
        Superblock {
            areas: Vec::new(),
            incompat: self.incompat & !INCOMPAT_AREAS,
            ..self.clone()
        }
    }

    /// The numbers of segments that are no part of the log, because they are on no device or set aside.
    pub fn beside_log(&self) -> Vec<u32> {
        let mut all = self.gaps();
        all.extend(self.areas.iter().flat_map(Area::range));
        all
    }

    /// Where an area of this pool lies.
    pub fn place_of(&self, area: Area) -> Option<AreaPlace> {
        let on = |range: &Range<u32>| {
            range.start <= area.first && area.range().end <= range.end && area.segments > 0
        };
        let ranges = self.segments();
        let device = ranges.iter().position(on)?;
        let segment = u64::from(self.layout.segment_blocks) * BLOCK;
        let first = area.first.checked_sub(ranges.get(device)?.start)?;
        let start = self.all_devices().get(device)?.extent.segment_start;
        Some(AreaPlace {
            device: device as u16,
            offset: start * BLOCK + u64::from(first) * segment,
            bytes: u64::from(area.segments) * segment,
        })
    }

    /// Where on a device there is place for an area of so many segments: as far behind as can be.
    pub fn room_for_area(&self, device: u16, segments: u32) -> Option<Area> {
        let on = self.segments().get(usize::from(device))?.clone();
        let mut end = on.end;
        for area in self.areas.iter().rev().filter(|a| a.first < on.end) {
            if end.saturating_sub(area.range().end) >= segments {
                break;
            }
            end = area.first;
        }
        let first = end
            .checked_sub(segments)
            .filter(|first| *first >= on.start)?;
        (segments > 0).then_some(Area { first, segments })
    }

    /// Areas on a device.
    pub fn areas_on(&self, device: u16) -> impl Iterator<Item = Area> {
        let on = move |area: &&Area| self.place_of(**area).is_some_and(|p| p.device == device);
        self.areas.iter().filter(on).copied()
    }

    /// Refuses to take out, or copy, a device with an area on it.
    pub(crate) fn refuse_areas_on(&self, device: usize) -> Result<(), FormatError> {
        match self.areas_on(device as u16).next() {
            None => Ok(()),
            Some(_) => Err(FormatError::unfit(
                "device",
                "an area that the kernel swaps to lies on it (`hearth swap off` gives it back)",
            )),
        }
    }

    /// Do the areas lie within devices, apart from one another, and leave a log?
    pub(crate) fn check_areas(&self) -> Result<(), &'static str> {
        if self.areas.is_empty() {
            return Ok(());
        }
        if self.areas.len() > AREAS_MAX {
            return Err("it lists more areas beside the log than there may be");
        }
        // There a segment is on two devices.
        if self.is_twice() {
            return Err("it lists areas beside a log that is kept twice");
        }
        let mut taken = 0u64;
        let mut end = 0;
        for area in &self.areas {
            if area.first < end || self.place_of(*area).is_none() {
                return Err("its areas beside the log lie on one another, or on no device");
            }
            end = area.range().end;
            taken += u64::from(area.segments);
        }
        let all: u64 = self.segments().iter().map(|r| r.len() as u64).sum();
        match all.checked_sub(taken) {
            Some(left) if left >= u64::from(SEGMENTS_MIN) => Ok(()),
            _ => Err("its areas beside the log leave no room for the log"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Uuid};
    use hearth_io::Sparse;

    fn pool() -> Superblock {
        let layout = Layout::for_device(64 << 20, 256).unwrap();
        Superblock::new(layout, Uuid::from_u128(1), Uuid::from_u128(2), "swap", 3)
    }

    #[test]
    fn an_area_is_listed_stored_and_taken_off_again() {
        let mut sb = pool();
        let plain = sb.encode();
        let n = sb.layout.segment_count;
        let area = Area {
            first: n - 20,
            segments: 20,
        };
        sb.add_area(area).unwrap();
        assert_ne!(sb.incompat & INCOMPAT_AREAS, 0);
        let mut media = Sparse::new(64 << 20);
        sb.store(&mut media).unwrap();
        let again = Superblock::load(&mut media).unwrap();
        assert_eq!(again.areas, [area]);
        // Both copies are good.
        sb.copy = again.copy;
        assert_eq!(again, sb);
        let place = again.place_of(area).unwrap();
        let segment = u64::from(again.layout.segment_blocks) * BLOCK;
        assert_eq!(place.bytes, 20 * segment);
        assert_eq!(
            place.offset,
            again.layout.segment_start * BLOCK + u64::from(n - 20) * segment
        );
        assert_eq!(again.beside_log(), (n - 20..n).collect::<Vec<_>>());
        // An older build opens the pool as it did before.
        sb.remove_area(area);
        (sb.generation, sb.copy) = (0, 1);
        assert_eq!(sb.encode(), plain);
    }

    #[test]
    fn an_area_is_as_far_behind_as_there_is_place() {
        let mut sb = pool();
        let n = sb.layout.segment_count;
        let area = |first, segments| Some(Area { first, segments });
        assert_eq!(sb.room_for_area(0, 5), area(n - 5, 5));
        assert_eq!(sb.room_for_area(1, 5), None);
        assert_eq!(sb.room_for_area(0, 0), None);
        assert_eq!(sb.room_for_area(0, n + 1), None);
        sb.add_area(Area {
            first: n - 5,
            segments: 3,
        })
        .unwrap();
        assert_eq!(sb.room_for_area(0, 2), area(n - 2, 2));
        assert_eq!(sb.room_for_area(0, 3), area(n - 8, 3));
        assert_eq!(sb.room_for_area(0, n - 4), None);
    }

    /// Devices that come leave it where it is, and its own stays.
    #[test]
    fn a_device_with_an_area_is_neither_copied_nor_taken_out() {
        let mut sb = pool();
        let n = sb.layout.segment_count;
        let area = Area {
            first: n - 4,
            segments: 4,
        };
        sb.add_area(area).unwrap();
        let place = sb.place_of(area);
        let refused = crate::change::can_replace(&sb, 0, 1 << 30).unwrap_err();
        assert!(refused.to_string().contains("swap off"), "{refused}");
        let mut more = crate::change::with_more(&sb, 32 << 20, Uuid::from_u128(9)).unwrap();
        assert_eq!((&more.areas, more.place_of(area)), (&vec![area], place));
        crate::change::can_replace(&more, 1, 1 << 30).unwrap();
        let other = more.room_for_area(1, 3).unwrap();
        more.add_area(other).unwrap();
        assert_eq!(more.place_of(other).unwrap().device, 1);
        assert_eq!(more.areas_on(1).collect::<Vec<_>>(), [other]);
        crate::change::can_replace(&more, 1, 1 << 30).unwrap_err();
        // The list is the first device's.
        let member = more.for_member(1, Uuid::from_u128(9), 4);
        assert!(member.areas.is_empty() && member.incompat & INCOMPAT_AREAS == 0);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let n = pool().layout.segment_count;
        let area = |first, segments| Area { first, segments };
        for (areas, why) in [
            (vec![area(n - 4, 5)], "on no device"),
            (vec![area(n, 1)], "on no device"),
            (vec![area(9, 0)], "on no device"),
            (vec![area(u32::MAX, 2)], "on no device"),
            (vec![area(20, 6), area(25, 2)], "on one another"),
            (vec![area(25, 2), area(20, 2)], "on one another"),
            (vec![area(7, n - 7)], "no room for the log"),
        ] {
            let mut sb = pool();
            (sb.areas, sb.incompat) = (areas.clone(), INCOMPAT_AREAS);
            let e = Superblock::decode(&sb.encode()[..]).unwrap_err();
            assert!(e.to_string().contains(why), "{areas:?}: {e}");
            if let [one] = areas[..] {
                pool().add_area(one).unwrap_err();
            }
        }
        let mut sb = pool();
        sb.areas = vec![area(n - 1, 1); AREAS_MAX + 1];
        sb.incompat = INCOMPAT_AREAS;
        Superblock::decode(&sb.encode()[..]).unwrap_err();
        // An unknown kind.
        let mut sb = pool();
        sb.add_area(area(n - 1, 1)).unwrap();
        let mut bytes = sb.encode();
        bytes[AT + 8] = 4;
        let crc = crate::wire::crc_with_hole(&bytes[..], 12);
        put(&mut bytes[..], 12, &crc.to_le_bytes());
        let e = Superblock::decode(&bytes[..]).unwrap_err();
        assert!(e.to_string().contains("unknown kind"), "{e}");
    }
}
