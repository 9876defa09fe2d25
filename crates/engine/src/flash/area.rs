//! Segments are set aside for something beside the log, and given back, while the pool is served.
//!
//! Somebody else writes there, past this program and at any time: the kernel, which swaps. So
//!
//! - an area is told to be there only when the log has nothing in it any more (it was [emptied](crate::flash::emptying), as a
//!   device is that is to go) and both copies of a superblock that lists it are durable. From then on no start looks at it;
//! - an area comes back only when nobody else writes there any more, which whoever asks for it has seen to. What stands there
//!   may look like the log: a page that was swapped out holds whatever a guest put into it, also a copy of a segment of this
//!   very pool, or a batch with the numbers that come next. So all of it is overwritten with zeros and flushed. Then whoever
//!   asked looks once more whether somebody writes there, for that took a while; and then both copies of a superblock that does not list it are made durable, and only then are the segments free.
//!
//! A crash leaves the list as it was or as it is to be, and either is true of what is there.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashOp, Users};
use crate::flash::emptying::LEFT_MIN;
use crate::flash::log::SegState;
use crate::paths::{Path, took};
use hearth_format::Area;
use hearth_io::{BLOCK, Buf, IoError, OpKind};

/// Bytes of zeros that are written at once. What comes in between waits for so much.
const WIPE_BYTES: u64 = 1 << 20;

/// What is done to an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It is empty, and is to be listed.
    List,
    /// It is overwritten: so many bytes of it are.
    Wipe(u64),
    /// That is made durable.
    Flush,
    /// It is clear. Whoever asked for it says whether anybody else may write there by now.
    Clear,
    /// It is to be taken off the list.
    Unlist,
}

/// An area that is being set aside or given back.
#[derive(Clone, Copy, Debug)]
pub(in crate::flash) struct AreaChange {
    area: Area,
    step: Step,
    /// What the step takes is under way.
    sent: bool,
}

/// Why nothing can be done to an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AreaRefused {
    /// Something else is being done to one, or a device is emptied.
    Busy,
    /// Flash takes no writes.
    NoWrites,
    /// Everything is on two devices: a segment has no place of its own.
    Twice,
    /// The log would have too few segments left.
    TooFew,
    /// There is no such area, or it does not lie on one device.
    NoSuch,
    /// Something of the log is there still.
    NotEmpty,
}

impl<U: Users> FlashDevice<U> {
    /// Begins to empty segments so that they can be set aside. Nothing on flash is another for that.
    pub fn begin_area(&mut self, area: Area) -> Result<(), AreaRefused> {
        if !self.takes_writes() {
            return Err(AreaRefused::NoWrites);
        }
        if self.is_emptying() || self.area_change.is_some() {
            return Err(AreaRefused::Busy);
        }
        if self.devices.are_twice() {
            return Err(AreaRefused::Twice);
        }
        let mut next = self.sb.clone();
        let (Some(place), Ok(())) = (next.place_of(area), next.add_area(area)) else {
            return Err(AreaRefused::NoSuch);
        };
        let goes = |seg: &u32| self.log.segments[*seg as usize].state != SegState::Bad;
        let going = area.range().filter(goes).count();
        if self.log.usable().saturating_sub(going) < LEFT_MIN {
            return Err(AreaRefused::TooFew);
        }
        self.empty(place.device, Some(area.range()));
        Ok(())
    }

    /// What is being emptied is set aside from now on, if it is empty.
    pub fn keep_area(&mut self) -> Result<(), AreaRefused> {
        if !self.takes_writes() {
            return Err(AreaRefused::NoWrites);
        }
        let how = self.how_empty().ok_or(AreaRefused::NoSuch)?;
        let part = self.emptying.as_ref().and_then(|e| e.part.clone());
        let part = part.ok_or(AreaRefused::NoSuch)?;
        if how.left > 0 {
            return Err(AreaRefused::NotEmpty);
        }
        // Its segments are put aside already, and stay so.
        self.emptying = None;
        self.area_change = Some(AreaChange {
            area: Area {
                first: part.start,
                segments: part.len() as u32,
            },
            step: Step::List,
            sent: false,
        });
        self.sort_by_speed();
        Ok(())
    }

    /// Begins to give an area back. Nobody else writes there any more.
    pub fn give_area_back(&mut self, area: Area) -> Result<(), AreaRefused> {
        if !self.takes_writes() {
            return Err(AreaRefused::NoWrites);
        }
        if self.area_change.is_some() {
            return Err(AreaRefused::Busy);
        }
        if !self.sb.areas.contains(&area) {
            return Err(AreaRefused::NoSuch);
        }
        let step = match self.faults.has(Fault::AreaUnwiped) {
            true => Step::Unlist,
            false => Step::Wipe(0),
        };
        self.area_change = Some(AreaChange {
            area,
            step,
            sent: false,
        });
        if self.faults.has(Fault::AreaUsedEarly) {
            self.use_again(area);
        }
        Ok(())
    }

    /// Blocks that are set aside.
    pub fn set_aside_blocks(&self) -> u64 {
        let bytes = self.sb.areas.iter().map(|area| self.area_bytes(*area));
        bytes.sum::<u64>() / BLOCK
    }

    /// Is something done to an area?
    pub fn is_area_changed(&self) -> bool {
        self.area_change.is_some()
    }

    /// The area that something is done to, and how many bytes of it are clear.
    pub fn area_change(&self) -> Option<(Area, u64)> {
        self.area_change.map(|change| {
            let done = match change.step {
                Step::List => 0,
                Step::Wipe(done) => done,
                Step::Flush | Step::Clear | Step::Unlist => self.area_bytes(change.area),
            };
            (change.area, done)
        })
    }

    /// Is one clear, and waits for [`end_clearing`](Self::end_clearing)?
    pub fn is_area_clear(&self) -> bool {
        self.area_change.is_some_and(|c| c.step == Step::Clear)
    }

    /// What is clear is the log's again if nobody else writes there; else it stays set aside.
    pub fn end_clearing(&mut self, nobody: bool) {
        if self.is_area_clear() {
            match nobody {
                true => self.set_area_step(Step::Unlist, false),
                false => self.area_change = None,
            }
        }
    }

    fn area_bytes(&self, area: Area) -> u64 {
        u64::from(area.segments) * u64::from(self.layout.segment_blocks) * BLOCK
    }

    /// Does what comes next.
    pub fn area_step(&mut self) {
        let Some(change) = self.area_change.filter(|change| !change.sent) else {
            return;
        };
        // One who writes the superblock at a time.
        let free = !self.is_rescuing() && !self.is_losing();
        match change.step {
            Step::Wipe(done) => {
                let left = self.area_bytes(change.area).saturating_sub(done);
                let start = self.layout.segment_offset(change.area.first);
                let zeros = Buf::zeroed(left.min(WIPE_BYTES) as usize).all();
                let io = Io::write(self.target(), start + done, [zeros]);
                self.out.send(FlashOp::Wipe, io.in_background());
            }
            Step::Flush => self.out.send(FlashOp::Wipe, Io::flush(self.target())),
            Step::Clear => return,
            Step::List | Step::Unlist if !free => return,
            Step::List => {
                if !self.sb.areas.contains(&change.area) && self.sb.add_area(change.area).is_err() {
                    // It was looked at before anything was emptied.
                    return self.use_again(change.area);
                }
                self.store_sb();
            }
            Step::Unlist => {
                self.sb.remove_area(change.area);
                self.store_sb();
            }
        }
        self.set_area_step(change.step, true);
    }

    fn set_area_step(&mut self, step: Step, sent: bool) {
        if let Some(change) = &mut self.area_change {
            (change.step, change.sent) = (step, sent);
        }
    }

    /// A part of an area was overwritten, or that was made durable.
    pub fn wipe_ended(&mut self, kind: OpKind, result: &Result<(), IoError>, now: u64) {
        let Some(change) = self.area_change.filter(|_| self.takes_writes()) else {
            self.area_change = None;
            return;
        };
        if let Err(e) = result {
            self.counters.flash_errors += 1;
            // It stays what it is: whoever asked looks, and may ask again.
            self.area_change = None;
            if kind == OpKind::Flush {
                // What was written since the last one may be gone, of the log as well.
                self.note_refusal(e);
                self.fail(now);
            }
            return;
        }
        let next = match change.step {
            Step::Wipe(done) => {
                let all = self.area_bytes(change.area);
                let done = all.min(done + WIPE_BYTES);
                match done == all {
                    true => Step::Flush,
                    false => Step::Wipe(done),
                }
            }
            _ => Step::Clear,
        };
        self.set_area_step(next, false);
    }

    /// The superblock could not be stored: once more.
    pub(in crate::flash) fn area_not_stored(&mut self) {
        if let Some(change) = &mut self.area_change
            && matches!(change.step, Step::List | Step::Unlist)
        {
            change.sent = false;
        }
    }

    /// Both copies of the superblock are durable.
    pub(in crate::flash) fn area_stored(&mut self) {
        let stored = |c: &AreaChange| c.sent && matches!(c.step, Step::List | Step::Unlist);
        let Some(change) = self.area_change.take_if(|change| stored(change)) else {
            return;
        };
        match change.step {
            Step::List => took(Path::AreaSetAside),
            _ => {
                took(Path::AreaGivenBack);
                self.use_again(change.area);
            }
        }
    }

    /// The log has these segments again.
    fn use_again(&mut self, area: Area) {
        for seg in area.range() {
            let segment = &mut self.log.segments[seg as usize];
            if segment.state != SegState::Bad {
                continue;
            }
            segment.state = SegState::Free;
            self.log.bad -= 1;
            self.log.free.push_back(seg);
        }
        self.spread_free();
        self.sort_by_speed();
    }
}
