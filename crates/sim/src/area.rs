//! Segments that somebody else writes: set aside, given back, and a start in the middle of either.
//!
//! Whoever has an area writes there what does most harm: whole segments of the log as they are at that moment, single blocks
//! of it, and what is nothing. A start must not take any of that for the log, neither while the area is set aside nor when it has been
//! given back; and while it is set aside nothing else may be written there.

use crate::content::BLOCK;
use crate::paths::Event;
use crate::world::{Outcome, SEGMENT_BLOCKS, World, trace};
use hearth_format::areas::AreaPlace;
use std::collections::BTreeMap;

type Block = [u8; BLOCK];

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    None,
    Emptying,
    Listing,
    Set(AreaPlace),
    GivingBack(AreaPlace),
}

/// What is known of the area there is, or is to be.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    stage: Stage,
    /// What somebody else wrote there, by the block on the device.
    written: BTreeMap<usize, Box<Block>>,
}

impl World<'_> {
    /// Now and then during a life.
    pub(crate) fn area_some(&mut self) -> Outcome {
        if self.flash.is_dead() || self.given_up {
            return Ok(());
        }
        let (again, rare) = (self.rng.chance(1, 40), self.rng.chance(1, 150));
        let subject = self.subject()?;
        let (busy, areas) = (subject.is_area_changed(), subject.areas());
        match self.area.stage {
            Stage::None if again => {
                let device = self.rng.below(self.flash.count() as u64) as u16;
                let segments = self.rng.between(1, 6) as u32;
                if self.subject()?.begin_area(device, segments) {
                    trace!(
                        self,
                        "AREA: the last {segments} of device {device} are emptied"
                    );
                    self.area.stage = Stage::Emptying;
                }
            }
            Stage::None => {}
            Stage::Emptying => {
                if !subject.is_emptying() {
                    trace!(self, "AREA: it is not emptied any more");
                    self.area.stage = Stage::None;
                } else if subject.emptied().is_some() && subject.keep_area() {
                    trace!(self, "AREA: it is empty");
                    self.area.stage = Stage::Listing;
                } else if rare {
                    subject.use_device_again();
                    trace!(self, "AREA: it is called off");
                    self.area.stage = Stage::None;
                }
            }
            Stage::Listing if busy || subject.gave_up_flash() => {}
            Stage::Listing => self.is_set(areas.first().copied()),
            Stage::Set(place) if rare => {
                self.look_at_area()?;
                if self.subject()?.give_area_back(place) {
                    trace!(self, "AREA: it is given back");
                    self.area.stage = Stage::GivingBack(place);
                    self.area.written.clear();
                }
            }
            Stage::Set(place) => {
                if again {
                    self.write_area(place);
                }
            }
            // Nobody writes there, whenever the engine asks.
            Stage::GivingBack(_) if busy || subject.gave_up_flash() => subject.end_clearing(),
            Stage::GivingBack(_) => {
                if areas.is_empty() {
                    self.paths.note(Event::AreaBack);
                }
                self.is_set(areas.first().copied());
            }
        }
        Ok(())
    }

    /// It is there from now on, or there is none.
    fn is_set(&mut self, place: Option<AreaPlace>) {
        trace!(self, "AREA: {place:?}");
        self.area.written.clear();
        self.area.stage = place.map_or(Stage::None, Stage::Set);
    }

    /// A start must have found the list as it was, or as it was to be.
    pub(crate) fn area_after_start(&mut self) -> Outcome {
        if !self.profile.areas {
            return Ok(());
        }
        let areas = self.subject()?.areas();
        let stage = self.area.stage;
        trace!(self, "AREA: {stage:?} before the start, {areas:?} now");
        if let Stage::Listing | Stage::GivingBack(_) = stage {
            self.paths.note(Event::AreaCutOff);
        }
        match (stage, areas.as_slice()) {
            (Stage::None | Stage::Emptying, []) => self.area.stage = Stage::None,
            (Stage::Set(place), [one]) if *one == place => {}
            (Stage::Listing, [] | [_]) => self.is_set(areas.first().copied()),
            (Stage::GivingBack(_), []) => self.is_set(None),
            (Stage::GivingBack(place), [one]) if *one == place => self.is_set(Some(place)),
            _ => {
                return Err(format!(
                    "an area was {stage:?}, and a start finds {areas:?}"
                ));
            }
        }
        self.look_at_area()
    }

    /// What somebody else wrote is there as it was.
    fn look_at_area(&mut self) -> Outcome {
        let Stage::Set(place) = self.area.stage else {
            return Ok(());
        };
        let Some(device) = self.flash.device(place.device) else {
            return Ok(());
        };
        for (index, block) in &self.area.written {
            if device.visible_block(*index) != **block {
                return Err(format!("block {index} of an area was written to"));
            }
        }
        Ok(())
    }

    /// Somebody else writes there.
    fn write_area(&mut self, place: AreaPlace) {
        self.paths.note(Event::AreaSet);
        let per_segment = SEGMENT_BLOCKS as usize;
        let first = (place.offset / BLOCK as u64) as usize;
        let blocks = (place.bytes / BLOCK as u64) as usize;
        let segment = first + self.rng.below((blocks / per_segment) as u64) as usize * per_segment;
        // From any segment of any device, as it is now.
        let from = self.rng.below(self.flash.count() as u64) as u16;
        let way = self.rng.below(3);
        let pick = self.rng.next_u64() as usize;
        let Some(device) = self.flash.device(from) else {
            return;
        };
        let last = device.blocks() / per_segment * per_segment;
        let mut put: Vec<(usize, Box<Block>)> = Vec::new();
        match way {
            0 | 1 => {
                let source = pick % (last / per_segment) * per_segment;
                for at in 0..per_segment {
                    // Now and then only the beginning or the end of it.
                    if way == 0 || at < 40 || at >= per_segment - 2 {
                        put.push((segment + at, Box::new(device.visible_block(source + at))));
                    }
                }
            }
            _ => {
                let at = segment + pick % per_segment;
                put.push((at, Box::new([pick as u8; BLOCK])));
            }
        }
        if let Some(device) = self.flash.device(place.device) {
            for (at, block) in put {
                device.put(at, *block);
                self.area.written.insert(at, block);
            }
        }
    }
}
