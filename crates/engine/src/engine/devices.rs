//! Which of several flash devices is to be taken out, and how far it is empty; which segments are set aside.

use crate::engine::Engine;
pub use crate::flash::area::AreaRefused;
use hearth_format::Area;
use hearth_format::areas::AreaPlace;
use hearth_io::BLOCK;
use serde::Serialize;
use std::ops::Not;

/// How far a flash device is that is emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Emptying {
    /// Its place.
    pub device: u16,
    /// Segments on it.
    pub segments: u32,
    /// Of these, how many hold something still.
    pub left: u32,
    /// It is not all of the device, but an area that is to be set aside.
    pub part: bool,
    /// Of those, how many cannot be read, so that they cannot be emptied either.
    pub unreadable: u32,
}

impl Engine {
    /// Begins to empty a flash device, so that it can be taken out; any but the first. False: it cannot be now, because
    /// another one is, or because the others are too small or take no writes.
    pub fn begin_emptying(&self, device: u16) -> bool {
        self.core().flash.begin_emptying(device)
    }

    /// The device is used as before.
    pub fn end_emptying(&self) {
        self.core().flash.end_emptying();
    }

    /// Begins to empty segments that are to be set aside for something beside the log. [`emptying`](Engine::emptying) says how
    /// far that is, [`end_emptying`](Engine::end_emptying) calls it off.
    pub fn begin_area(&self, area: Area) -> Result<(), AreaRefused> {
        self.core().flash.begin_area(area)
    }

    /// Sets aside what was emptied. It is when [`area_change`](Engine::area_change) has nothing more to tell and
    /// [`areas`](Engine::areas) has it.
    pub fn keep_area(&self) -> Result<(), AreaRefused> {
        self.core().flash.keep_area()
    }

    /// Gives an area back, to which nobody else writes any more. When it [is clear](Engine::is_area_clear), it waits until that is said
    /// again ([`end_clearing`](Engine::end_clearing)). It is back when [`area_change`](Engine::area_change) has nothing more to
    /// tell and it is not among the [`areas`](Engine::areas); if it still is, that failed.
    pub fn give_area_back(&self, area: Area) -> Result<(), AreaRefused> {
        self.core().flash.give_area_back(area)
    }

    /// Somebody beside this program is held up by what is done on the flash, or is not any more. Until then destaging that
    /// nobody waits for goes one run at a time with pauses, as it does beside clients, nothing is read ahead, and nothing is evicted
    /// for what is read: that stays off flash once only the segments are free that are kept ready.
    pub fn stand_back(&self, others_wait: bool) {
        self.core().destaging.others_wait = others_wait;
    }

    /// Nobody asks for anything, nobody has for a while, and nobody [else](Engine::stand_back) is held up: whoever does something on
    /// the flash that nobody waits for need not give way.
    pub fn nobody_asks(&self, now_ns: u64) -> bool {
        self.core().nobody_asks_now(now_ns)
    }

    /// Somebody beside this program wrote so many bytes to the flash: they count against the same budget as what is written here.
    pub fn wrote_beside(&self, bytes: u64) {
        self.core().cache.policy.wrote(bytes.div_ceil(BLOCK));
    }

    /// Is an area that is given back clear, and waits to be told that still nobody writes there?
    pub fn is_area_clear(&self) -> bool {
        self.core().flash.is_area_clear()
    }

    /// What is clear is used again if `nobody` else writes there; else it stays set aside.
    pub fn end_clearing(&self, nobody: bool) {
        self.core().flash.end_clearing(nobody);
    }

    /// The area that something is done to, and how many bytes of it are cleared.
    pub fn area_change(&self) -> Option<(Area, u64)> {
        self.core().flash.area_change()
    }

    /// What is set aside, and where it lies, as it is listed on flash when [`area_change`](Engine::area_change) has nothing to tell.
    pub fn areas(&self) -> Vec<(Area, AreaPlace)> {
        let core = self.core();
        let sb = &core.flash.sb;
        let placed = |area: &Area| Some((*area, sb.place_of(*area)?));
        sb.areas.iter().filter_map(placed).collect()
    }

    /// Where on a device there is place for an area of so many segments.
    pub fn room_for_area(&self, device: u16, segments: u32) -> Option<Area> {
        self.core().flash.sb.room_for_area(device, segments)
    }

    /// Blocks that wait for their origins, and how many may before writers are slowed down, once so
    /// many segments fewer take writes.
    pub fn dirty_without(&self, segments: u32) -> (u64, u64) {
        let core = self.core();
        let log = &core.flash.log;
        let gone = u64::from(segments) * log.segment_room() / log.copies_of_dirty();
        let capacity = core.dirty_capacity_blocks().saturating_sub(gone);
        let room = core.dirty_room_of(capacity, core.haste_percent());
        (core.dirty_total, room)
    }

    /// Something that changes with everything that is written to a segment; none while something is on its way there. Whoever
    /// reads a segment between two equal answers has read what is in it.
    pub fn touched(&self, seg: u32) -> Option<u64> {
        let core = self.core();
        let touched = core.flash.touched.get(seg as usize).copied()?;
        core.flash.is_written(seg).not().then_some(touched)
    }

    /// How far the device is that is emptied, if one is. With nothing left on it nothing is written to it or read from it,
    /// until it is used again.
    pub fn emptying(&self) -> Option<Emptying> {
        let how = self.core().flash.how_empty()?;
        Some(Emptying {
            device: how.device,
            segments: how.segments,
            left: how.left,
            part: how.part,
            unreadable: how.unreadable,
        })
    }
}
