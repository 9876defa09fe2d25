//! Which of several flash devices is to be taken out, and how far it is empty.

use crate::engine::Engine;
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
            unreadable: how.unreadable,
        })
    }
}
