//! What an administrator does meanwhile: disks change, grow, come, go, and losses are accepted.

use super::LIFE_STEPS_MAX;
use crate::paths::Event;
use crate::prng::Prng;
use crate::world::{Outcome, World, trace};
use hearth_engine::api::{Home, Mode, OriginState};

/// Steps that are waited for a disk to grow.
pub(super) const GROW_TRIES: u32 = 2000;
/// Most steps until a disk that was left out comes.
pub(super) const LATE_STEPS: u64 = 1500;

/// How far behind origins of ordered disks may be.
const MAX_AGES_NS: [u64; 4] = [0, 0, 30_000_000, 1_000_000_000];

impl World<'_> {
    /// Disks that were left out, or taken out, are attached when their time has come.
    pub(crate) fn late_comers(&mut self) -> Outcome {
        if self.stopping || self.subject.is_none() {
            return Ok(());
        }
        for index in 0..self.disks.len() {
            match &mut self.disks[index].late {
                None => {}
                Some(0) => {
                    self.paths.note(Event::CameLater);
                    self.attach(index)?;
                }
                Some(steps) => *steps -= 1,
            }
        }
        Ok(())
    }

    /// A disk that is off and clean is voided in the registry, and the engine is told, unless the daemon dies in between.
    fn set_log_free(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        let Some(seq) = self.subject()?.log_free_seq(id) else {
            return Ok(());
        };
        trace!(self, "disk {id} is free of the log below {seq}");
        self.paths.note(Event::LogFree);
        let known = self.known.iter_mut().find(|k| k.id == id);
        known
            .into_iter()
            .for_each(|k| k.since_seq = k.since_seq.max(seq));
        // Choices of its own, so that the rest of a seed is as it was.
        let mut rng = Prng::new(self.shape.seed ^ self.clock.now() ^ 0x0107);
        if rng.chance(1, 4) {
            return Ok(());
        }
        let (now, mut effects) = (self.clock.now(), std::mem::take(&mut self.effects));
        self.subject()?.set_log_free(id, seq, now, &mut effects);
        self.effects = effects;
        self.handle_effects()
    }

    /// One management action.
    pub(super) fn change(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            if self.disks[index].attached() {
                self.set_log_free(index)?;
            }
        }
        let index = self.rng.below(self.disks.len() as u64) as usize;
        let id = self.disks[index].config.id;
        if self.disks[index].resting {
            return if self.open_requests_of(index) > 0 {
                Ok(())
            } else if self.rng.chance(1, 2) {
                self.replace(index)
            } else {
                self.take_out(index)
            };
        }
        if !self.disks[index].attached() {
            // Somebody may tire of waiting for it.
            return if self.rng.chance(1, 4) {
                self.paths.note(Event::RemovedWhileOut);
                self.replace(index)
            } else {
                Ok(())
            };
        }
        if self.rng.chance(1, 2) && self.accept_losses_of(index)? {
            return Ok(());
        }
        let homeless = self.disks[index].homeless();
        match self.rng.below(14) {
            // Neither mode nor limits mean anything for it.
            0..=5 if homeless && self.rng.chance(1, 2) => self.move_to_origin(index)?,
            0..=5 if homeless => self.tick()?,
            0 | 1 if self.disks[index].config.home == Home::Moving => self.end_move(index)?,
            0..=3 => {
                let mode = *self.rng.pick(&[
                    Mode::WriteBack,
                    Mode::WriteBack,
                    Mode::WriteThrough,
                    Mode::WriteAround,
                    Mode::Off,
                ]);
                if mode == Mode::WriteBack && self.hold(index)? {
                    return Ok(());
                }
                trace!(self, "disk {id} becomes {mode:?}");
                let mode = match mode {
                    Mode::WriteBack if self.profile.ordered && self.rng.chance(2, 3) => {
                        Mode::WriteBackOrdered
                    }
                    mode => mode,
                };
                self.disks[index].config.mode = mode;
                self.disks[index].dirty_once |= mode.is_write_back();
                let known = self.known.iter_mut().find(|k| k.id == id);
                known
                    .into_iter()
                    .for_each(|k| k.ordered = mode == Mode::WriteBackOrdered);
                // What was told does not hold from here on, and whoever keeps it has been told so.
                self.disks[index].told = None;
                self.subject()?.set_mode(id, mode)?;
                if self.profile.crash > 0 && self.rng.chance(1, 10) {
                    self.paths.note(Event::CrashAfterModeSwitch);
                    self.cut_short = true;
                }
            }
            4 | 5 => {
                let max = *self.rng.pick(&[0, 64 << 10, 1 << 20, 6 << 20]);
                let min = if max == 0 {
                    *self.rng.pick(&[0, 512 << 10])
                } else {
                    0
                };
                trace!(self, "disk {id} may hold {min}..{max} bytes");
                (
                    self.disks[index].config.min_bytes,
                    self.disks[index].config.max_bytes,
                ) = (min, max);
                self.subject()?.set_limits(id, min, max)?;
            }
            6 | 7 => {
                let on = self.rng.chance(1, 2);
                trace!(self, "disk {id} drains: {on}");
                self.subject()?.drain(id, on)?;
            }
            8 | 9 => self.grow(index)?,
            10 => self.disks[index].resting = true,
            11 => self.try_to_remove(index)?,
            12 => {
                if self.open_requests_of(index) > 0 {
                    self.paths.note(Event::RemovedInUse);
                }
                self.replace(index)?;
                if self.profile.crash > 0 && self.rng.chance(1, 4) {
                    self.paths.note(Event::CrashAfterReplacement);
                    self.cut_short = true;
                }
            }
            _ => self.tick()?,
        }
        Ok(())
    }

    /// A disk that lives on flash is given an origin, as the daemon does: the registry says so first.
    fn move_to_origin(&mut self, index: usize) -> Outcome {
        let config = self.disks[index].config.clone();
        let hurt =
            !self.disks[index].hurt.is_empty() || self.given_up || self.disks[index].left_origin;
        if config.home != Home::Flash || !self.disks[index].attached() || hurt {
            return self.tick();
        }
        let id = config.id;
        // Of what lives on flash nobody asks whether it is whole.
        self.disks[index].maybe_dirty = true;
        self.note_home(index, Home::Moving);
        let mut tries = 0;
        while !self.subject()?.rehome(id, Home::Moving)? {
            tries += 1;
            if tries > GROW_TRIES || !self.pump()? {
                // The engine has not begun.
                self.note_home(index, Home::Flash);
                return Ok(());
            }
        }
        trace!(self, "disk {id} moves to an origin");
        self.disks[index].dirty_once = true;
        if self.profile.crash > 0 && self.rng.chance(1, 4) {
            self.paths.note(Event::CrashAfterMove);
            self.cut_short = true;
        }
        self.handle_effects()
    }

    /// The engine is told that the origin has everything, if that is so; the registry comes last.
    fn end_move(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        if self.disks[index].attached() && self.subject()?.rehome(id, Home::Origin)? {
            trace!(self, "disk {id} has moved");
            self.note_home(index, Home::Origin);
        }
        self.handle_effects()
    }

    /// What the registry says.
    pub(super) fn note_home(&mut self, index: usize, home: Home) {
        let id = self.disks[index].config.id;
        self.disks[index].config.home = home;
        let known = self.known.iter_mut().filter(|k| k.id == id);
        known.for_each(|k| k.home = home);
    }

    /// The origin grows, and the subject is told.
    pub(super) fn grow(&mut self, index: usize) -> Outcome {
        let config = &self.disks[index].config;
        // Within an odd sector growing is a file system's business, not tested here. Legs that grow are tried in the
        // mirror's own simulation.
        // One that came to live on flash grows by zeros, and the oracle knows what its origin would have had.
        let left = self.disks[index].left_origin;
        if left || !config.size.is_multiple_of(512) || self.disks[index].origin.is_mirror() {
            return Ok(());
        }
        let (id, size) = (config.id, config.size + self.rng.between(1, 64) * 512);
        let size = size.next_multiple_of(u64::from(self.disks[index].config.origin_align));
        let mut tries = 0;
        while !self.subject()?.set_size(id, size)? {
            tries += 1;
            // Busy for long: a guest writes the last block over and over. Sometimes nobody waits, and
            // the disk keeps its size for now.
            if tries > GROW_TRIES || self.rng.chance(1, 50) || !self.pump()? {
                return Ok(());
            }
        }
        trace!(self, "disk {id} grows to {size}");
        let disk = &mut self.disks[index];
        disk.config.size = size;
        if let Some(origin) = disk.origin.one() {
            origin.grow(size);
        }
        let uid = disk.uid;
        self.model.grow(uid, size);
        self.known
            .iter_mut()
            .filter(|k| k.id == id)
            .for_each(|k| k.size = size);
        self.handle_effects()
    }

    /// Puts a disk into service, as the daemon does, which flushes its origin first, or as who cannot.
    /// A mirror without a leg that holds the disk waits for one.
    pub(super) fn attach(&mut self, index: usize) -> Outcome {
        let opened = self.with_mirror(index, |m, now, cache| m.open(now, cache))?;
        if opened == Some(false) {
            trace!(self, "disk {} waits for a leg", self.disks[index].config.id);
            self.disks[index].late = Some(self.rng.below(LATE_STEPS));
            return Ok(());
        }
        let disk = &mut self.disks[index];
        let origin = if self.rng.chance(2, 3) {
            disk.origin.flush_now();
            OriginState::Flushed
        } else {
            OriginState::Unknown
        };
        let config = disk.config.clone();
        trace!(
            self,
            "disk {} is attached, its origin {origin:?}", config.id
        );
        let ordered = self.profile.ordered.then(|| *self.rng.pick(&MAX_AGES_NS));
        let id = config.id;
        self.subject()?.attach(config, origin)?;
        if let Some(ns) = ordered {
            self.subject()?.set_max_age(id, ns)?;
        }
        self.disks[index].late = None;
        self.handle_effects()
    }

    /// Gives up what is listed as lost of a disk that is served; false if that is nothing.
    pub(super) fn accept_losses_of(&mut self, index: usize) -> Result<bool, String> {
        let id = self.disks[index].config.id;
        let lost = self.lost_of(index)?;
        if lost.is_empty() {
            return Ok(false);
        }
        self.paths.note(Event::LossAccepted);
        let now = self.model.now();
        self.disks[index].accept(lost, now);
        self.subject()?.accept_loss(id)?;
        Ok(true)
    }

    /// What is listed as lost, if flash ever had the only copy of it.
    pub(super) fn lost_of(&mut self, index: usize) -> Result<Vec<u64>, String> {
        let (uid, id) = (self.disks[index].uid, self.disks[index].config.id);
        let lost = self.subject()?.unsaved(id).lost;
        trace!(self, "lost of #{uid}: {} blocks", lost.len());
        let hurt = &self.disks[index].hurt;
        let others: Vec<u64> = lost.iter().filter(|b| !hurt.contains(b)).copied().collect();
        match others.first() {
            Some(block) if others.len() > self.zeros_hurt() => Err(format!(
                "block {block} of #{uid} is listed as lost, and flash never had its only copy"
            )),
            _ => {
                self.disks[index].hurt.extend(others);
                Ok(lost)
            }
        }
    }

    /// Asks for the end of a disk's service until it is granted, which is when nothing of it is in flight.
    pub(super) fn detach(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        self.release_hung();
        self.settle("detaching a disk", |w| {
            matches!(w.subject().and_then(|s| s.detach(id)), Ok(true))
        })?;
        match self.open_requests_of(index) {
            0 => Ok(()),
            open => Err(format!(
                "disk {id} was detached with {open} requests in flight"
            )),
        }
    }

    /// Takes a disk out of service, once its requests have ended, and leaves what is cached of it.
    pub(super) fn take_out(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        trace!(self, "disk {id} is taken out");
        self.detach(index)?;
        if self.disks[index].origin.busy() > 0 {
            return Err(format!(
                "disk {id} was detached with I/O of its origin in flight"
            ));
        }
        // Whoever opens it anew waits for that.
        self.disks[index].origin.pay();
        self.paths.note(Event::TakenOut);
        self.disks[index].resting = false;
        self.disks[index].late = Some(self.rng.below(LATE_STEPS));
        Ok(())
    }

    /// Drops all that is cached of a disk that is not attached; from now on its records are void.
    pub(crate) fn forget(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        let mut since_seq = None;
        for _ in 0..LIFE_STEPS_MAX {
            let mut effects = std::mem::take(&mut self.effects);
            since_seq = self.subject()?.forget(id, &mut effects)?;
            self.effects = effects;
            self.handle_effects()?;
            if since_seq.is_some() || !self.pump_on()? {
                break;
            }
        }
        let Some(since_seq) = since_seq else {
            return self.stuck("a disk cannot be forgotten");
        };
        if self.disks[index].origin.busy() > 0 {
            return Err(format!(
                "disk {id} was forgotten with I/O of its origin in flight"
            ));
        }
        self.disks[index].origin.pay();
        let known = self.known.iter_mut().find(|k| k.id == id);
        known.into_iter().for_each(|k| k.since_seq = since_seq);
        Ok(())
    }

    /// Asks for the removal of a disk that is served: it stays, and nothing changes for it.
    pub(super) fn try_to_remove(&mut self, index: usize) -> Outcome {
        self.paths.note(Event::RemovalRefused);
        let id = self.disks[index].config.id;
        match self.subject()?.remove(id)? {
            true => Err(format!("disk {id} was removed while it was served")),
            false => Ok(()),
        }
    }

    /// Removes a disk and creates another with the same id. What of it is in flight ends before that, each
    /// request with its answer; no new one is made.
    pub(super) fn replace(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        trace!(self, "disk {id} is removed");
        if !self.disks[index].attached() {
            self.disks[index].late = Some(u64::MAX);
        }
        self.subject()?.drain(id, false)?;
        self.detach(index)?;
        self.disks[index].late = Some(u64::MAX);
        self.forget(index)?;
        if self.rng.chance(1, 2) {
            self.settle("removing a disk", |w| {
                matches!(w.subject().and_then(|s| s.remove(id)), Ok(true))
            })?;
        }
        let disk = self.draw(id);
        self.disks[index] = disk;
        let (size, home) = (self.disks[index].config.size, self.disks[index].config.home);
        let known = self.known.iter_mut().find(|k| k.id == id);
        let ordered = self.disks[index].config.mode == Mode::WriteBackOrdered;
        known
            .into_iter()
            .for_each(|k| (k.size, k.home, k.ordered) = (size, home, ordered));
        // It is new, so whoever waited for it waits no more; it comes below.
        self.disks[index].late = Some(LATE_STEPS);
        if self.rng.chance(1, 2) {
            // Time passes between the removal and the creation.
            for _ in 0..self.rng.below(20) {
                self.pump()?;
            }
        }
        self.attach(index)
    }
}
