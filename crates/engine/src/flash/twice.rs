//! A device is lost, and the pool goes on without it: everything was on two.
//!
//! What is written from then on is on one device only. Should the power fail then, a start may find both, and the lost one
//! may look as good as the other: its log ends earlier, as after any power cut, and it would be believed. So before anybody
//! is told of anything that it may have missed, the superblocks of the others say that it is lost, both copies,
//! durably. If all of these are gone at that start, and the lost one is there alone, only what is noted beside the flash can
//! say that it is old: so the generation of these superblocks is noted there next ([`hearth_io::Spread::ask_elsewhere`]).
//! Until then what ends is held ([`crate::flash::devices`]); nothing that is held can have been answered, nor have
//! freed a segment.
//!
//! If that note cannot be stored, the pool is left with nothing to rely on, and flash is given up as a single device is.
//!
//! What is dirty is on one device now, so it goes to the origins, and writes of disks that have one go there first until
//! everything is there twice again ([`FlashDevice::is_single`]).

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashEvent, FlashOp, Users};
use crate::flash::devices::Ended;
use crate::paths::{Path, took};
use hearth_format::FormatError;
use hearth_format::layout::SUPERBLOCK_BLOCKS;
use hearth_io::{BLOCK, Buf, IoError, Media, OpKind};

/// The note that a device is lost, on its way.
#[derive(Debug)]
pub(crate) struct Losing {
    /// It waits until the superblock, which is being written for something else, has been.
    waits: bool,
    /// The first of two copies: the other follows.
    first: bool,
    /// Another device was lost meanwhile: once more.
    again: bool,
    /// It is on flash, with this generation, and is being noted in another place.
    asked: Option<u64>,
}

impl<U: Users> FlashDevice<U> {
    /// Would what is dirty be gone with one device, although it should be on two?
    pub fn is_single(&self) -> bool {
        self.devices.are_twice() && self.devices.spread().lost() != 0
    }

    /// Stores the superblock while the pool is opened or closed. What was lost until then, or is by that, is named.
    pub fn store_superblock(&mut self, media: &mut dyn Media) -> Result<(), FormatError> {
        self.sb.store_naming(media)?;
        self.devices.spread().note_lost();
        Ok(())
    }

    /// The same, if a device was lost that it does not name: before anything is said to be durable that this one lacks.
    pub fn store_if_lost(&mut self, media: &mut dyn Media) -> Result<(), FormatError> {
        match self.devices.spread().lost() & !self.sb.lost {
            0 => Ok(()),
            _ => self.store_superblock(media),
        }
    }

    /// What is clean takes a block of the half that is left from now on, where it took half of one of each. Of three devices and more
    /// that is not so of all segments, but as if it were: room that is counted and is not there would be cleaned for in circles.
    pub fn tighten(&mut self) {
        if self.log.half > 0 && !self.log.tight && self.is_single() {
            self.log.tight = true;
            self.cleaner.count_all_alike(self.log.data_blocks);
            self.cleaner.set_room(self.log.blocks_kept());
        }
    }

    /// A device is lost. Says so in the superblocks of the others.
    pub fn device_lost(&mut self) {
        took(Path::DeviceLost);
        self.sb.lost = self.devices.spread().lost();
        self.tighten();
        if self.faults.has(Fault::GoneEarly) {
            self.begin_dropping(self.sb.lost);
        }
        self.out.tell(FlashEvent::DeviceLost);
        // Then the note of the failure says it, too, or is as late as it would be here.
        if !self.takes_writes() {
            self.devices.spread().note_none();
            return;
        }
        if let Some(losing) = self.losing.as_mut().filter(|l| l.asked.is_none()) {
            losing.again = true;
            return;
        }
        self.losing = Some(Losing {
            waits: self.is_rescuing(),
            first: true,
            again: false,
            asked: None,
        });
        self.sb.generation += 1;
        if !self.is_rescuing() {
            self.write_lost();
        }
    }

    /// It is being noted that a device is lost: nothing else writes the superblock.
    pub fn is_losing(&self) -> bool {
        self.losing.is_some()
    }

    /// Nothing else writes the superblock any more.
    pub fn superblock_is_free(&mut self) {
        if let Some(losing) = self.losing.as_mut().filter(|l| l.waits) {
            losing.waits = false;
            // What was written meanwhile may have the number.
            self.sb.generation += 1;
            self.write_lost();
        }
    }

    /// Writes the copy of the superblock that is not known to be good, or is the older one.
    fn write_lost(&mut self) {
        let copy = 1 - (self.sb.copy & 1);
        let mut next = self.sb.clone();
        next.copy = copy;
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        buf.bytes_mut().copy_from_slice(&next.encode()[..]);
        let offset = SUPERBLOCK_BLOCKS[usize::from(copy)] * BLOCK;
        let io = Io::write(self.target(), offset, [buf]);
        self.out.send(FlashOp::Lost, io);
    }

    /// A step of noting that a device is lost has ended: what may be told now.
    pub fn lost_ended(
        &mut self,
        kind: OpKind,
        result: Result<(), IoError>,
        now: u64,
    ) -> Vec<Ended> {
        if !self.takes_writes() {
            self.devices.spread().note_none();
            return self.end_losing();
        }
        let Some(losing) = self.losing.as_mut() else {
            return Vec::new();
        };
        if let Err(e) = result {
            self.counters.flash_errors += 1;
            self.note_refusal(&e);
            self.full = false;
            self.losing = None;
            self.devices.spread().note_none();
            self.fail(now);
            return self.devices.let_go();
        }
        if kind != OpKind::Flush {
            self.out.send(FlashOp::Lost, Io::flush(self.target()));
            return Vec::new();
        }
        self.sb.copy = 1 - (self.sb.copy & 1);
        match (losing.first, losing.again) {
            (_, true) => {
                (losing.first, losing.again) = (true, false);
                self.sb.generation += 1;
                self.write_lost();
            }
            (true, false) => {
                losing.first = false;
                self.write_lost();
            }
            (false, false) => {
                // Not before: the devices that are left must not be older than what is noted there.
                let generation = self.sb.generation;
                if !self.devices.spread().ask_elsewhere(generation) {
                    self.devices.spread().note_lost();
                    self.begin_dropping(self.sb.lost);
                    return self.end_losing();
                }
                losing.asked = Some(generation);
            }
        }
        Vec::new()
    }

    /// What superblocks of this generation say is noted in another place, too: what may be told now.
    pub fn loss_is_noted(&mut self, generation: u64) -> Vec<Ended> {
        let asked = self.losing.as_ref().and_then(|losing| losing.asked);
        if asked.is_none_or(|asked| asked > generation) {
            return Vec::new();
        }
        self.devices.spread().note_lost();
        self.begin_dropping(self.sb.lost);
        self.end_losing()
    }

    /// The note is stored, or flash was given up meanwhile, which is noted in its place.
    fn end_losing(&mut self) -> Vec<Ended> {
        self.losing = None;
        if let Some(copy) = self.mark.as_mut().and_then(|m| m.waits.take()) {
            self.write_mark(copy);
        }
        self.devices.let_go()
    }
}
