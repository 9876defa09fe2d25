//! Disks that lived on flash and are given an origin while they are served.
//!
//! The origin is all zeros, as is what such a disk does not have; so all that flash has of it is dirty against it, which it was called
//! all along, and the destager may begin. Who keeps the registry has stored before that the disk has an origin: else a
//! crash would bring back a disk without one, and what was destaged and then evicted would be gone.
//!
//! Two things are left over from before. What was promised to the disk stays so until its origin has everything
//! ([`Home::Moving`]): its dirty blocks would be far more than all disks together may have, and everybody's writes would wait for its
//! origin. And a discard of before is a record that says that nothing is there, of which nothing is dirty; while the
//! disk moves, its flushes wait for the log as they did before.

use crate::api::{DiskId, Home};
use crate::core::Core;
use crate::core::route::FlashWaiter;
use crate::engine::ControlError;
use crate::flash::durable::Until;
use crate::paths::{Path, took};
use hearth_format::Kind;

impl Core {
    /// See [`Engine::rehome`](crate::Engine::rehome).
    pub fn rehome(&mut self, id: DiskId, home: Home) -> Result<(), ControlError> {
        let d = self.disk(id).ok_or(ControlError::NoDisk)?;
        match (d.cfg.home, home) {
            (from, to) if from == to => return Ok(()),
            // What flash does not take any more goes to no origin that is new.
            (Home::Flash, Home::Moving) if !self.flash.takes_writes() => {
                return Err(ControlError::Busy);
            }
            (Home::Flash, Home::Moving) => {
                // When it is applied, it has to find a disk of which nothing else is to be done for a discard.
                let log = &self.flash.log;
                let mut items = log
                    .queue
                    .iter()
                    .chain(log.batches.iter().flat_map(|b| &b.items));
                if items.any(|item| item.disk == id && item.kind == Kind::DropRun) {
                    took(Path::MoveWaitsForDiscard);
                    return Err(ControlError::Busy);
                }
                took(Path::MovedToOrigin);
                let moved_ord = log.applied_ord;
                self.alter(id, |d| {
                    d.cfg.home = home;
                    d.moved_ord = moved_ord;
                    d.origin.sync.opened_flushed();
                });
            }
            (Home::Moving, Home::Origin) => {
                if d.is_dirty() || !d.origin.destage.written.is_empty() {
                    return Err(ControlError::Dirty);
                }
                let ord = d.moved_ord;
                if !self.flash.is_durable(ord) && self.flash.takes_writes() {
                    self.flash
                        .tell_when_durable(Until::Ord(ord), FlashWaiter::Nobody);
                    self.flash.log.urgent = true;
                    return Err(ControlError::Busy);
                }
                took(Path::MoveDone);
                self.count_promise(id, home);
                self.alter(id, |d| d.cfg.home = home);
            }
            _ => return Err(ControlError::Dirty),
        }
        Ok(())
    }

    /// Counts a disk's dirty blocks with those of others, or no longer, before its home becomes `home`.
    pub fn count_promise(&mut self, id: DiskId, home: Home) {
        let Some(d) = self.disk(id) else { return };
        let dirty = d.dirty.len();
        match (d.is_promised(), home != Home::Origin) {
            (true, false) => self.dirty_total += dirty,
            (false, true) => self.dirty_total -= dirty,
            _ => {}
        }
    }
}
