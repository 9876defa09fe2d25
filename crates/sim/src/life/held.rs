//! A disk with an origin moves onto flash alone, piece by piece, as the daemon has it do.
//!
//! No choice of its own is drawn for where it begins: a change of mode that changes nothing is one, so that worlds without disks on
//! flash are what they were.

use super::changes::GROW_TRIES;
use crate::content::BLOCK;
use crate::paths::Event;
use crate::world::{Outcome, World, trace};
use hearth_engine::api::{Home, Mode};

/// Bytes that are kept at once.
const PIECE: u64 = 32 << 10;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// Something of it may become clean yet.
    Begins,
    /// It is looked at from the start; so far up to this offset, and whether anything was found that flash lacked.
    Pass { at: u64, found: bool },
    /// Flash has all of it, once that is durable.
    Ends,
}

const START: Held = Held::Pass {
    at: 0,
    found: false,
};

impl World<'_> {
    /// The disk begins to move onto flash, if it can; false if it cannot.
    pub(super) fn hold(&mut self, index: usize) -> Result<bool, String> {
        let disk = &self.disks[index];
        let config = disk.config.clone();
        let fits = config.size.is_multiple_of(BLOCK as u64)
            && config.size <= self.kept_bytes()
            && (config.min_bytes, config.max_bytes) == (0, 0);
        let sound = disk.hurt.is_empty() && disk.accepted.is_empty() && !self.given_up;
        let may = self.profile.homes != [1, 0, 0]
            && matches!(config.home, Home::Origin | Home::Moving)
            && config.mode == Mode::WriteBack
            && disk.attached()
            && !disk.origin.is_mirror();
        if !(fits && sound && may) {
            return Ok(false);
        }
        let id = config.id;
        (
            self.disks[index].maybe_dirty,
            self.disks[index].whole_before,
            self.disks[index].dirty_once,
        ) = (true, false, true);
        if config.home == Home::Origin {
            self.note_home(index, Home::Moving);
            if !self.subject()?.rehome(id, Home::Moving)? {
                self.note_home(index, Home::Origin);
                return Ok(false);
            }
        }
        let held = self.subject()?.hold(id)?;
        if held || self.subject()?.is_held(id) {
            trace!(self, "disk {id} moves onto flash");
            self.disks[index].held = Some(if held { START } else { Held::Begins });
        }
        self.handle_effects()?;
        Ok(true)
    }

    /// Disks that move onto flash go on by one piece each.
    pub(crate) fn go_on_holding(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            if let Some(held) = self.disks[index].held {
                self.go_on_with(index, held)?;
            }
        }
        Ok(())
    }

    fn go_on_with(&mut self, index: usize, held: Held) -> Outcome {
        let (id, size) = (self.disks[index].config.id, self.disks[index].config.size);
        if self.stopping || !self.disks[index].attached() || self.subject.is_none() {
            self.disks[index].held = None;
            return Ok(());
        }
        if !self.subject()?.is_held(id) {
            // Its origin is to have it after all.
            self.paths.note(Event::LetGo);
            self.disks[index].held = None;
            return Ok(());
        }
        if self.keeps_of(index) > 0 || self.disks[index].resting {
            return Ok(());
        }
        match held {
            Held::Begins => {
                if self.subject()?.hold(id)? {
                    self.disks[index].held = Some(START);
                }
                self.handle_effects()
            }
            Held::Pass { at, found } => match self.subject()?.unkept(id, at, size) {
                Ok((from, len)) => {
                    let len = len.min(PIECE);
                    self.disks[index].held = Some(Held::Pass {
                        at: from + len,
                        found: true,
                    });
                    self.submit_keep(index, from, len)
                }
                Err(next) if next < size => {
                    self.disks[index].held = Some(Held::Pass { at: next, found });
                    Ok(())
                }
                Err(_) if found => {
                    self.disks[index].held = Some(START);
                    Ok(())
                }
                Err(_) => {
                    // What was brought there so far has to be durable.
                    let again = self.subject()?.hold(id)?;
                    self.disks[index].held = again.then_some(Held::Ends).or(Some(START));
                    Ok(())
                }
            },
            Held::Ends => self.end_holding(index),
        }
    }

    /// The registry says that it lives on flash, then the engine is told.
    fn end_holding(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        match self.subject()?.is_whole(id)? {
            None => {
                self.disks[index].held = Some(START);
                return Ok(());
            }
            Some(false) => return self.handle_effects(),
            Some(true) => {}
        }
        self.note_home(index, Home::Flash);
        self.disks[index].held = None;
        self.disks[index].left_origin = true;
        if self.profile.crash > 0 && self.rng.chance(1, 6) {
            // The engine does not hear of it.
            self.paths.note(Event::CrashBeforeOnFlash);
            (self.cut_short, self.unheard) = (true, true);
            return self.handle_effects();
        }
        let mut tries = 0;
        while !self.subject()?.rehome(id, Home::Flash)? {
            tries += 1;
            if tries > GROW_TRIES || !self.pump()? {
                self.note_home(index, Home::Moving);
                self.disks[index].left_origin = false;
                return Ok(());
            }
        }
        trace!(self, "disk {id} lives on flash");
        self.paths.note(Event::OnFlash);
        if self.profile.crash > 0 && self.rng.chance(1, 4) {
            self.paths.note(Event::CrashAfterOnFlash);
            self.cut_short = true;
        }
        self.handle_effects()
    }
}
