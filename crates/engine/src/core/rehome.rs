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
//!
//! The other way round, a disk with an origin is promised flash first, by the same state, then *held*: nothing of it is written back, no copies of
//! its origin are made, and all that flash lacks, or has as such copies, is put there as the disk's own ([`crate::request::keep`]). A crash meanwhile
//! leaves a disk that moves to its origin, which has most of that already. When flash has it all, durably, the registry says that the
//! disk lives there, and then it is said here. In between nothing can change that: what is held does not become clean, and what is zeros
//! is known as such until it becomes records that nothing is there.

use crate::api::{DiskId, Home, Mode};
use crate::blocks::runset::RunSet;
use crate::core::Core;
use crate::core::route::FlashWaiter;
use crate::engine::ControlError;
use crate::flash::durable::Until;
use crate::paths::{Path, took};
use crate::request::state::State;
use hearth_format::Kind;
use hearth_io::BLOCK;

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
                if d.held || d.is_dirty() || !d.origin.destage.written.is_empty() {
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
            // Promised as a whole, and to be held.
            (Home::Origin, Home::Moving) => {
                if !self.flash.takes_writes() {
                    return Err(ControlError::Busy);
                }
                let moved_ord = self.flash.log.applied_ord;
                self.count_promise(id, home);
                self.alter(id, |d| {
                    d.cfg.home = home;
                    d.moved_ord = moved_ord;
                });
            }
            (Home::Moving, Home::Flash) => {
                self.is_whole(id)?;
                took(Path::MovedToFlash);
                self.stage_forget(id, 0, u64::MAX);
                self.alter(id, |d| {
                    d.cfg.home = home;
                    (d.cfg.min_bytes, d.cfg.seq_cutoff) = (0, 0);
                    d.held = false;
                    d.drain = false;
                });
                self.zeros_become_nothing(id);
            }
            _ => return Err(ControlError::Dirty),
        }
        Ok(())
    }

    /// See [`Engine::hold`](crate::Engine::hold).
    pub fn hold(&mut self, id: DiskId, on: bool) -> Result<(), ControlError> {
        let sound = self.flash.takes_writes() && !self.flash.is_single();
        let d = self.disk(id).ok_or(ControlError::NoDisk)?;
        if !on {
            self.stop_holding(id);
            return Ok(());
        }
        let served = d.attached && !d.fenced && !d.cfg.read_only;
        let fits = d.cfg.max_bytes == 0 && d.cfg.size.is_multiple_of(BLOCK);
        let moves = d.cfg.home == Home::Moving && d.cfg.mode == Mode::WriteBack;
        if !(sound && served && fits && moves && d.lost.is_empty()) {
            return Err(ControlError::Dirty);
        }
        // What goes past the cache waits for what is dirty to become clean.
        let mut all = self.reqs.iter();
        let past = all
            .any(|(_, r)| r.disk == id && matches!(&r.state, State::Write(write) if write.through));
        if past || d.unverified || !d.clean_waiters.is_empty() {
            return Err(ControlError::Busy);
        }
        if !d.held {
            took(Path::Held);
        }
        let moved_ord = self.flash.log.applied_ord;
        self.alter(id, |d| {
            d.held = true;
            d.drain = false;
            d.moved_ord = moved_ord;
        });
        // What was on its way to the origin when it was held may still become clean, and go.
        let destage = &self.known(id).origin.destage;
        match destage.busy.is_empty() && destage.written.is_empty() {
            true => Ok(()),
            false => Err(ControlError::Busy),
        }
    }

    /// Its origin is to have what a disk has on flash, if that was held.
    pub fn stop_holding(&mut self, id: DiskId) {
        if let Some(d) = self.disk_mut(id).filter(|d| d.held) {
            took(Path::LetGo);
            d.held = false;
            self.ready.all(id);
        }
    }

    /// See [`Engine::is_whole`](crate::Engine::is_whole).
    pub fn is_whole(&mut self, id: DiskId) -> Result<(), ControlError> {
        let d = self.disk(id).ok_or(ControlError::NoDisk)?;
        let served = d.attached && !d.fenced;
        let whole = served && d.held && d.lost.is_empty() && d.cached == d.dirty.len();
        if !whole || !self.flash.takes_writes() || self.flash.is_single() {
            return Err(ControlError::Dirty);
        }
        let origin = &d.origin;
        let on_its_way = !d.tickets.is_empty()
            || !d.clean_waiters.is_empty()
            || !origin.destage.busy.is_empty()
            || !origin.destage.written.is_empty()
            || !origin.intents.is_empty()
            || origin.sync.is_flushing();
        // Records are about a disk with an origin as long as they are not applied.
        let log = &self.flash.log;
        let items = log.batches.iter().flat_map(|b| &b.items);
        let mut items = log.queue.iter().chain(items);
        let records = items.any(|item| item.disk == id && item.kind != Kind::Dirty);
        // Zeros become records of absent blocks. Such a record behind the record of a write over the zeros would void it.
        let over_zeros = |start, end| d.zero.first_in(start, end).is_some();
        let rewritten = (d.locks.iter()).any(|span| over_zeros(span.start, span.end));
        let ord = d.moved_ord;
        let durable = self.flash.is_durable(ord);
        if !durable {
            self.flash
                .tell_when_durable(Until::Ord(ord), FlashWaiter::Nobody);
        }
        if on_its_way || records || rewritten || !durable {
            self.flash.log.urgent = true;
            return Err(ControlError::Busy);
        }
        Ok(())
    }

    /// Of a disk that lives on flash, what is zeros is what is not there.
    pub fn zeros_become_nothing(&mut self, id: DiskId) {
        let Some(d) = self.disk_mut(id).filter(|d| !d.zero.is_empty()) else {
            return;
        };
        took(Path::ZerosOfHomeless);
        let runs: Vec<(u64, u64)> = d.zero.runs().collect();
        d.solid.clear();
        self.change_zeros(id, RunSet::clear);
        for (block, count) in runs {
            self.record_drop(id, block, count);
        }
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
