//! A world's lifetime: it is hurt, dies, comes back, and in the end must be whole.
//!
//! First safety under hardship: requests run while devices fail and the process dies in the
//! middle of anything, also of its own recovery. Then the hurting ends and liveness is checked:
//! every request is answered, everything dirty reaches the origins, and the origins alone hold
//! what the oracle says.

use crate::content::SECTOR;
use crate::device::Faults;
use crate::media::SimMedia;
use crate::model::End;
use crate::paths::Event;
use crate::workload::Wish;
use crate::world::{Outcome, World, trace};
use hearth_engine::api::{Mode, OriginState, ReqOp};
use hearth_io::{Joined, Spread};

/// Steps of one life; a world that needs more is stuck in a loop.
const LIFE_STEPS_MAX: u64 = 60_000;
/// Steps that are waited for a disk to grow.
const GROW_TRIES: u32 = 2000;
/// Steps an operation hangs on average.
const HANG_STEPS: u64 = 300;
/// Time that passes at once while an operation hangs: long enough to be taken for hanging.
const LONG_NS: u64 = 11_000_000_000;
/// Most steps until a disk that was left out comes.
const LATE_STEPS: u64 = 1500;
/// Most steps that a stop in trouble is waited for: hardly, for some time, until all is well again.
const STOP_STEPS: [u64; 3] = [20, 200, 3000];
/// Steps to settle after the hurting ends.
const SETTLE_STEPS_MAX: u64 = 300_000;
/// Virtual time to settle: everything dirty fits in a few seconds of the slowest origin.
const SETTLE_NS_MAX: u64 = 1_200_000_000_000;
/// Times one reopening is cut off before it may finish.
const CUTS_MAX: u64 = 3;
/// Longest read of a check, in blocks.
const CHECK_RUN_MAX: u64 = 48;

impl World<'_> {
    /// Runs the whole world. An error says in words which promise was broken.
    pub fn run(&mut self) -> Outcome {
        self.create()?;
        let lives = self.rng.between(self.profile.lives.0, self.profile.lives.1);
        for life in 1..=lives {
            self.cut_short = false;
            self.hurt(true);
            let short = lives > 1 && self.rng.chance(1, 6);
            let requests = if short {
                self.rng.below(8)
            } else {
                self.rng
                    .between(self.profile.requests.0, self.profile.requests.1)
            };
            self.live(requests)?;
            if life == lives {
                break;
            }
            let returns = self.rng.chance(self.profile.revival, 100);
            if self.flash.is_dead() && !returns {
                break;
            }
            if self.rng.chance(self.profile.call_off, 100) {
                self.stop_called_off()?;
            }
            let trouble = self.rng.chance(self.profile.trouble, 100);
            if self.cut_short || self.rng.chance(self.profile.crash, 100) {
                self.hurt(false);
                self.crash();
            } else if trouble {
                self.stop_in_trouble()?;
                self.hurt(false);
            } else {
                self.hurt(false);
                self.stop()?;
            }
            if self.flash.is_dead() {
                trace!(self, "FLASH IS BACK");
                self.paths.note(Event::FlashBack);
                self.flash.revive();
                self.lose(true, false);
                self.model.crash(End::SomePower);
            }
            self.reopen()?;
            if self.rng.chance(self.profile.verify, 100) {
                self.verify()?;
            }
        }
        self.hurt(false);
        self.finale()
    }

    fn create(&mut self) -> Outcome {
        let (shape, twice) = (self.shape, self.profile.twice);
        let (mut media, _) = self.flash.media(None);
        let formatted = match media.as_mut_slice() {
            [one] => self.maker.format(one, shape),
            several => self.maker.format_several(several, shape, twice),
        };
        formatted.map_err(|e| format!("format failed: {e}"))?;
        self.check_media()?;
        // The registry says a disk exists only after the pool does.
        self.flash.power_cut();
        self.reopen()
    }

    fn check_media(&mut self) -> Outcome {
        self.flash
            .violation()
            .map_or(Ok(()), |v| Err(format!("media contract broken: {v}")))
    }

    fn hurt(&mut self, on: bool) {
        let p = &self.profile;
        if !on {
            self.flash.set_faults(&Faults::default());
            for disk in &mut self.disks {
                disk.origin.faults = Faults::default();
            }
            self.release_hung();
            return;
        }
        self.flash.set_faults(&Faults {
            read_eio: p.flash_read_eio,
            write_eio: p.flash_write_eio,
            flush_eio: p.flash_write_eio * 4,
            no_space: p.flash_write_eio / 2,
            slow: p.slow,
            hang: p.slow / 10,
            bad_places: self.bad_places.clone(),
            ..Faults::default()
        });
        for disk in &mut self.disks {
            let mut bad_ranges = Vec::new();
            let mut fail_op = None;
            if p.origin_eio > 0 && self.rng.chance(1, 4) {
                let at = self.rng.below(disk.config.size) / 4096 * 4096;
                bad_ranges.push(at..at + self.rng.between(1, 8) * 4096);
            }
            if p.origin_eio > 0 && self.rng.chance(1, 4) {
                fail_op = Some(self.rng.below(100));
            }
            disk.origin.faults = Faults {
                read_eio: p.origin_eio,
                write_eio: p.origin_eio,
                flush_eio: p.origin_eio * 4,
                no_space: p.origin_eio / 3,
                slow: p.slow,
                hang: p.slow / 10 + p.hang,
                bad_ranges,
                fail_op,
                ..Faults::default()
            };
        }
    }

    /// Runs `requests` requests under hardship; returns in the middle of things.
    fn live(&mut self, requests: u64) -> Outcome {
        let mut left = requests;
        let eager = self.rng.between(1, 9);
        let death = self
            .profile
            .flash_death
            .then(|| self.rng.between(1, requests.max(2)));
        let full = self.rng.chance(self.profile.full, 100);
        let full = full.then(|| self.rng.between(1, requests.max(2)));
        for _ in 0..self.steps_max(LIFE_STEPS_MAX) {
            if left == 0 || self.cut_short {
                return Ok(());
            }
            self.late_comers()?;
            if self.wants_more() && self.rng.chance(eager, 10) {
                let index = self.rng.below(self.disks.len() as u64) as usize;
                if !self.disks[index].resting {
                    let disk = &mut self.disks[index];
                    let mut wish = disk.habits.next(&mut self.rng, disk.config.size);
                    if wish.op != ReqOp::Flush && self.rng.chance(self.profile.refusals, 1000) {
                        // Across the end, or behind it.
                        let beyond = self.rng.below(wish.len.div_ceil(SECTOR)) * SECTOR;
                        wish.offset = disk.config.size.next_multiple_of(SECTOR)
                            - beyond.min(disk.config.size / SECTOR * SECTOR);
                        wish.len = wish.len.next_multiple_of(SECTOR);
                    }
                    self.submit(index, wish)?;
                    left -= 1;
                }
                if Some(left) == death && !self.flash.is_dead() {
                    self.flash_dies();
                }
                if Some(left) == full {
                    trace!(self, "THE FILE SYSTEM UNDER FLASH IS FULL");
                    self.paths.note(Event::FlashFull);
                    self.flash.fill();
                }
            } else if !self.pump()? {
                if self.hung() > 0 {
                    self.release_hung();
                } else if self.open_requests() > 0 {
                    return self
                        .stuck("requests wait but no I/O is in flight and no tick is wanted");
                }
            }
            self.hang_on()?;
            if self.rng.chance(self.profile.change, 1000) {
                self.change()?;
            }
            if self.rng.chance(self.profile.rot, 1000) {
                self.rot();
            }
            if self.rng.chance(self.profile.bad_sectors, 1000) {
                self.sector_goes_bad();
            }
        }
        self.stuck("a life took too many steps")
    }

    /// Where there is more to do, more steps may be needed.
    fn steps_max(&self, steps: u64) -> u64 {
        steps * if self.profile.worn { 20 } else { 1 }
    }

    /// A step of time while something is waited for; what hangs goes on in the end.
    fn pump_on(&mut self) -> Result<bool, String> {
        let hung = self.hung() > 0;
        if hung && self.rng.chance(1, HANG_STEPS) {
            self.release_hung();
        }
        if self.pump()? {
            return Ok(true);
        }
        self.release_hung();
        Ok(hung)
    }

    /// What hangs goes on in the end; in between time may pass.
    fn hang_on(&mut self) -> Outcome {
        if self.hung() > 0 && self.rng.chance(1, HANG_STEPS) {
            self.release_hung();
        }
        let long = self.hung() > 0 && self.profile.hang > 0 && self.rng.chance(1, HANG_STEPS);
        if long {
            self.paths.note(Event::TimePassed);
        }
        if long || self.rng.chance(self.profile.sleeps, 10_000) {
            // As if the process had slept, too.
            self.clock.advance_to(self.clock.now() + LONG_NS);
            return self.tick();
        }
        Ok(())
    }

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

    fn stuck(&self, what: &str) -> Outcome {
        let state = self
            .subject
            .as_ref()
            .map(|s| s.describe())
            .unwrap_or_default();
        Err(format!(
            "no progress: {what}; {} requests open. {state}",
            self.open_requests()
        ))
    }

    fn flash_dies(&mut self) {
        trace!(self, "THE FLASH DEVICE DIES");
        self.flash.kill();
        if self.flash.are_twice() {
            return;
        }
        self.flash_failed = self.model.now();
        for index in 0..self.disks.len() {
            if self.disks[index].dirty_once {
                let blocks = self.model.written_blocks(self.disks[index].uid);
                self.disks[index].hurt.extend(blocks);
            }
        }
    }

    /// A block of flash that holds a guest's: its index, and whose that is. Metadata is kept twice or
    /// verified, and not hurt here.
    fn some_guests_block(&mut self) -> Option<(usize, (usize, u64))> {
        let index = self.rng.below(self.flash.blocks() as u64) as usize;
        (index..self.flash.blocks().min(index + 64)).find_map(|i| Some((i, self.owner_of(i)?)))
    }

    /// As long as this life lasts.
    fn sector_goes_bad(&mut self) {
        if let Some((index, (disk, block))) = self.some_guests_block() {
            trace!(
                self,
                "flash block {index} cannot be read any more, holding block {block} of #{}",
                self.disks[disk].uid
            );
            self.flash.block_goes_bad(index);
        }
    }

    fn rot(&mut self) {
        if let Some((index, (disk, block))) = self.some_guests_block() {
            trace!(
                self,
                "ROT in flash block {index}, holding block {block} of #{}", self.disks[disk].uid
            );
            self.flash.rot(index);
            if self.disks[disk].dirty_once && !self.flash.are_twice() {
                self.disks[disk].hurt.insert(block);
            }
        }
    }

    /// One management action.
    fn change(&mut self) -> Outcome {
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
            0..=5 if homeless => self.tick()?,
            0..=3 => {
                let mode = *self.rng.pick(&[
                    Mode::WriteBack,
                    Mode::WriteBack,
                    Mode::WriteThrough,
                    Mode::WriteAround,
                    Mode::Off,
                ]);
                trace!(self, "disk {id} becomes {mode:?}");
                self.disks[index].config.mode = mode;
                self.disks[index].dirty_once |= mode == Mode::WriteBack;
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

    /// The origin grows, and the subject is told.
    fn grow(&mut self, index: usize) -> Outcome {
        let config = &self.disks[index].config;
        // Within an odd sector growing is a file system's business, not tested here.
        if !config.size.is_multiple_of(512) {
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
        disk.origin.grow(size);
        let uid = disk.uid;
        self.model.grow(uid, size);
        self.known
            .iter_mut()
            .filter(|k| k.id == id)
            .for_each(|k| k.size = size);
        self.handle_effects()
    }

    /// Puts a disk into service, as the daemon does, which flushes its origin first, or as who cannot.
    fn attach(&mut self, index: usize) -> Outcome {
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
        self.subject()?.attach(config, origin)?;
        self.disks[index].late = None;
        self.handle_effects()
    }

    /// Gives up what is listed as lost of a disk that is served; false if that is nothing.
    fn accept_losses_of(&mut self, index: usize) -> Result<bool, String> {
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
    fn lost_of(&mut self, index: usize) -> Result<Vec<u64>, String> {
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
    fn detach(&mut self, index: usize) -> Outcome {
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
    fn take_out(&mut self, index: usize) -> Outcome {
        let id = self.disks[index].config.id;
        trace!(self, "disk {id} is taken out");
        self.detach(index)?;
        if self.disks[index].origin.busy() > 0 {
            return Err(format!(
                "disk {id} was detached with I/O of its origin in flight"
            ));
        }
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
        let known = self.known.iter_mut().find(|k| k.id == id);
        known.into_iter().for_each(|k| k.since_seq = since_seq);
        Ok(())
    }

    /// Asks for the removal of a disk that is served: it stays, and nothing changes for it.
    fn try_to_remove(&mut self, index: usize) -> Outcome {
        self.paths.note(Event::RemovalRefused);
        let id = self.disks[index].config.id;
        match self.subject()?.remove(id)? {
            true => Err(format!("disk {id} was removed while it was served")),
            false => Ok(()),
        }
    }

    /// Removes a disk and creates another with the same id. What of it is in flight ends before that, each
    /// request with its answer; no new one is made.
    fn replace(&mut self, index: usize) -> Outcome {
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
        known
            .into_iter()
            .for_each(|k| (k.size, k.home) = (size, home));
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

    /// The process dies; mostly the power fails with it.
    fn crash(&mut self) {
        let (flash, origins) = match self.rng.below(10) {
            0..=5 => (true, true),
            6 | 7 => (false, false),
            8 => (true, false),
            _ => (false, true),
        };
        trace!(
            self,
            "CRASH (flash loses power: {flash}, origins: {origins})"
        );
        if self.disks.iter().any(|d| !d.attached()) {
            self.paths.note(Event::CrashWithoutDisk);
        }
        self.forget_in_flight();
        self.unclean = true;
        self.lose(flash, origins);
        // A power cut of one side only leaves the other's contents volatile.
        self.model.crash(match (flash, origins) {
            (true, true) => End::Power,
            (false, false) => End::Process,
            _ => End::SomePower,
        });
    }

    fn lose(&mut self, flash: bool, origins: bool) {
        if flash {
            self.flash.power_cut();
        } else {
            self.flash.process_death();
        }
        for disk in &mut self.disks {
            disk.resting = false;
            if origins {
                disk.origin.power_cut();
            } else {
                disk.origin.process_death();
            }
        }
    }

    /// A clean stop, which may itself be cut off.
    fn stop(&mut self) -> Outcome {
        trace!(self, "STOP");
        self.release_hung();
        self.settle("before a clean stop", |w| w.open_requests() == 0)?;
        self.quiesce(true)?;
        self.settle("quiescing", |w| {
            w.subject.as_ref().is_some_and(|s| s.idle())
        })?;
        self.close()
    }

    /// Takes no more requests, or takes them again.
    fn quiesce(&mut self, on: bool) -> Outcome {
        self.subject()?.quiesce(on);
        self.stopping = on;
        Ok(())
    }

    /// A stop that nobody goes through with.
    fn stop_called_off(&mut self) -> Outcome {
        trace!(self, "STOP, which is called off");
        self.paths.note(Event::StopCalledOff);
        self.quiesce(true)?;
        for _ in 0..self.rng.below(200) {
            self.stop_step()?;
        }
        trace!(self, "it is called off");
        self.quiesce(false)?;
        let requests = self.rng.below(20);
        self.live(requests)
    }

    /// A stop while devices fail and hang; not all are waited for.
    fn stop_in_trouble(&mut self) -> Outcome {
        trace!(self, "STOP in trouble");
        self.paths.note(Event::StopInTrouble);
        self.quiesce(true)?;
        let patience = *self.rng.pick(&STOP_STEPS);
        for _ in 0..self.rng.below(patience) {
            let idle = self.subject.as_ref().is_some_and(|s| s.idle());
            if self.open_requests() == 0 && idle {
                return self.close();
            }
            self.stop_step()?;
        }
        trace!(self, "it is not waited for");
        self.paths.note(Event::StopNotWaited);
        self.crash();
        Ok(())
    }

    /// Something happens during a stop.
    fn stop_step(&mut self) -> Outcome {
        if self.rng.chance(1, 20) {
            let index = self.rng.below(self.disks.len() as u64) as usize;
            let disk = &mut self.disks[index];
            let wish = disk.habits.next(&mut self.rng, disk.config.size);
            self.submit(index, wish)?;
        }
        self.hang_on()?;
        if !self.pump()? {
            self.release_hung();
        }
        Ok(())
    }

    /// Closes the subject, which is at rest.
    fn close(&mut self) -> Outcome {
        if self.disks.iter().any(|d| !d.attached()) {
            self.paths.note(Event::StopWithoutDisk);
        }
        if self.flash.busy() > 0 || self.disks.iter().any(|d| d.origin.busy() > 0) {
            return Err("the subject says it is idle with I/O in flight".into());
        }
        let cut = self.rng.chance(1, 4).then(|| self.rng.below(5));
        // As after a crash: what rotted in batches that nothing vouches for looks like a torn write.
        let cut = cut.filter(|_| self.profile.rot == 0);
        self.note_owed();
        let Some(subject) = self.subject.take() else {
            return Ok(());
        };
        let (mut media, meter) = self.flash.joined(cut);
        let result = subject.close(&mut media);
        let (tripped, used) = (meter.tripped(), meter.used());
        self.check_media()?;
        trace!(
            self,
            "closed after {used} writes, cut off: {tripped}, {result:?}"
        );
        if tripped {
            self.paths.note(Event::StopCutOff);
        }
        let crashes = tripped || self.rng.chance(1, 4);
        if crashes {
            self.crash();
        }
        // Whether the stop or the crash was first is for the next start to say.
        self.unclean = false;
        self.forget_in_flight();
        self.model.crash(End::Process);
        match result {
            Err(e) if !tripped && !self.flash.is_dead() => Err(format!("close failed: {e}")),
            _ => Ok(()),
        }
    }

    /// Opens again; sometimes the power fails in the middle of that.
    fn reopen(&mut self) -> Outcome {
        for attempt in 0..=CUTS_MAX {
            let changes =
                self.flash.are_twice() && self.profile.flash_death && self.rng.chance(1, 2);
            if changes && let Some(what) = self.flash.comes_or_goes(self.profile.revival) {
                trace!(self, "{what}");
            }
            // Several devices are marked before the log is looked at.
            let steps = if self.flash.are_several() { 32 } else { 4 };
            let cut = (attempt < CUTS_MAX && self.rng.chance(1, 4)).then(|| self.rng.below(steps));
            let maker = self.maker;
            let given_up = |media: &mut SimMedia<'_>| maker.was_given_up(media);
            let noted = self.flash.media(None).0.first_mut().is_some_and(given_up);
            if noted || self.marker {
                // As the daemon does: it is in the registry before anything is changed on flash.
                self.disks.iter_mut().for_each(|d| d.distrusted = true);
                self.marker = false;
            } else if self.given_up {
                self.paths.note(Event::OpenedUntold);
            }
            let (shape, known) = (self.shape, self.known.clone());
            let (mut media, meter) = self.flash.media(cut);
            let joined = maker.join(&mut media);
            let spread = joined.clone().unwrap_or_else(|_| Spread::one());
            let opened = joined.and_then(|spread| {
                let mut media = Joined::new(spread, media);
                maker.open(&mut media, shape, &known)
            });
            let (tripped, used) = (meter.tripped(), meter.used());
            if !tripped {
                self.flash.set_spread(spread);
            }
            self.check_media()?;
            trace!(
                self,
                "opened after {used} writes, cut off: {tripped}, {}",
                opened.as_ref().err().map_or("", |e| e)
            );
            if tripped {
                drop(opened);
                self.paths.note(Event::StartCutOff);
                // After a stop in order the start says whether it had begun to change anything.
                let unclean = self.unclean;
                self.crash();
                self.unclean = unclean;
                continue;
            }
            if self.given_up {
                self.paths.note(Event::OpenedAfterGivenUp);
            }
            self.subject = Some(opened.map_err(|e| format!("open failed: {e}"))?);
            self.drop_scratch()?;
            (self.given_up, self.flash_failed) = (false, 0);
            for index in 0..self.disks.len() {
                self.disks[index].late = Some(LATE_STEPS);
                self.drop_distrusted(index)?;
                if self.rng.chance(self.profile.absent, 100) {
                    trace!(self, "disk {} is left out", self.disks[index].config.id);
                    self.paths.note(Event::LeftOut);
                    self.disks[index].late = Some(self.rng.below(LATE_STEPS));
                    continue;
                }
                self.attach(index)
                    .map_err(|e| format!("attach failed: {e}"))?;
            }
            return Ok(());
        }
        Err("a reopening that is never cut off was cut off".into())
    }

    /// Lets time pass until `done`.
    fn settle(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Outcome {
        let until = self.clock.now() + SETTLE_NS_MAX;
        for _ in 0..self.steps_max(SETTLE_STEPS_MAX) {
            if done(self) {
                return Ok(());
            }
            self.late_comers()?;
            if !self.pump_on()? {
                return if done(self) {
                    Ok(())
                } else {
                    self.stuck(&format!("{what}: nothing more happens"))
                };
            }
            if self.clock.now() > until {
                return self.stuck(&format!(
                    "{what}: more than {} s passed",
                    SETTLE_NS_MAX / 1_000_000_000
                ));
            }
        }
        self.stuck(&format!("{what}: more than {SETTLE_STEPS_MAX} steps"))
    }

    /// Reads back everything ever written, and some of what was not.
    fn verify(&mut self) -> Outcome {
        trace!(self, "VERIFY");
        for index in 0..self.disks.len() {
            if !self.disks[index].attached() {
                continue;
            }
            let (uid, size) = (self.disks[index].uid, self.disks[index].config.size);
            let mut blocks = self.model.written_blocks(uid);
            blocks.extend((0..4).map(|_| self.rng.below(size.div_ceil(4096))));
            blocks.sort_unstable();
            blocks.dedup();
            let mut rest = &blocks[..];
            while let Some(first) = rest.first() {
                let hurt = self.disks[index].hurt.contains(first);
                let max = if hurt { 1 } else { CHECK_RUN_MAX };
                let clean = |i: usize| hurt || !self.disks[index].hurt.contains(&rest[i]);
                let run = (1..rest.len())
                    .take_while(|i| (*i as u64) < max && rest[*i] == first + *i as u64 && clean(*i))
                    .count()
                    + 1;
                let offset = first * 4096;
                let len = (run as u64 * 4096).min(size - offset);
                self.submit(
                    index,
                    Wish {
                        op: ReqOp::Read,
                        offset,
                        len,
                        zeros: false,
                    },
                )?;
                rest = &rest[run..];
                self.settle("verifying", |w| w.wants_more())?;
            }
        }
        self.settle("verifying", |w| w.open_requests() == 0)
    }

    /// The hurting has ended: everything must come to rest, and be right.
    fn finale(&mut self) -> Outcome {
        trace!(self, "FINALE");
        self.hurt(false);
        self.settle("answering the last requests", |w| w.open_requests() == 0)?;
        for index in 0..self.disks.len() {
            if !self.disks[index].attached() {
                self.attach(index)?;
            }
        }
        self.verify()?;
        if !self.flash.is_dead() {
            self.drain_and_compare()?;
            if self.rng.chance(1, 2) {
                // What rotted in batches that no later one vouches for looks like a torn write after
                // a power cut, so profiles that rot end with a stop.
                if self.rng.chance(1, 2) && self.profile.rot == 0 {
                    self.crash();
                } else {
                    self.stop()?;
                }
                self.reopen()?;
                self.verify()?;
            }
        } else if self.given_up {
            self.accept_losses()?;
        }
        self.count_again()
    }

    /// The flash device is gone for good. What only it held must be listed, all of it and nothing
    /// else; what is written again, or accepted as lost, must work again; the rest must be on the
    /// origins.
    fn accept_losses(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            self.subject()?.drain(self.disks[index].config.id, true)?;
        }
        self.settle("listing what is lost", |w| {
            w.subject.as_ref().is_some_and(|s| {
                w.disks.iter().filter(|d| !d.homeless()).all(|d| {
                    let unsaved = s.unsaved(d.config.id);
                    unsaved.dirty == unsaved.lost.len() as u64
                })
            })
        })?;
        for index in 0..self.disks.len() {
            let (uid, id) = (self.disks[index].uid, self.disks[index].config.id);
            let (lost, now) = (self.lost_of(index)?, self.model.now());
            self.disks[index].accept(lost.iter().copied(), now);
            let whole = |b: &&u64| (**b + 1) * 4096 <= self.disks[index].config.size;
            let again = lost.iter().find(whole).copied();
            if let Some(block) = again.filter(|_| !self.disks[index].homeless()) {
                self.disks[index].accepted.remove(&block);
                let wish = Wish {
                    op: ReqOp::Write { fua: false },
                    offset: block * 4096,
                    len: 4096,
                    zeros: false,
                };
                self.submit(index, wish)?;
                self.settle("writing a lost block again", |w| w.open_requests() == 0)?;
                if self.subject()?.unsaved(id).lost.contains(&block) {
                    return Err(format!(
                        "block {block} of #{uid} was written again and is still listed as lost"
                    ));
                }
            }
            self.subject()?.accept_loss(id)?;
        }
        self.all_accepted = true;
        self.verify()?;
        self.settle("draining after the losses were accepted", |w| {
            w.subject
                .as_ref()
                .is_some_and(|s| w.disks.iter().all(|d| d.homeless() || s.clean(d.config.id)))
        })?;
        (0..self.disks.len()).try_for_each(|index| self.compare(index))
    }

    fn drain_and_compare(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            self.submit(
                index,
                Wish {
                    op: ReqOp::Flush,
                    offset: 0,
                    len: 0,
                    zeros: false,
                },
            )?;
            self.subject()?.drain(self.disks[index].config.id, true)?;
        }
        self.settle("the last flush", |w| w.open_requests() == 0)?;
        for index in 0..self.disks.len() {
            // A block of zeros that was lost is known only from the list; its disk stays dirty.
            self.lost_of(index)?;
        }
        self.settle("draining", |w| {
            w.subject.as_ref().is_some_and(|s| {
                w.disks
                    .iter()
                    .all(|d| d.homeless() || !d.hurt.is_empty() || s.clean(d.config.id))
            })
        })?;
        for index in 0..self.disks.len() {
            if self.disks[index].hurt.is_empty() {
                self.compare(index)?;
            }
            let id = self.disks[index].config.id;
            self.subject()?.drain(id, false)?;
        }
        Ok(())
    }

    /// The origin alone must be the disk, but for what was accepted as lost.
    fn compare(&mut self, index: usize) -> Outcome {
        let uid = self.disks[index].uid;
        if self.disks[index].homeless() {
            // All that is to be seen of it was read.
            return Ok(());
        }
        for block in self.model.written_blocks(uid) {
            if self.disks[index].is_accepted(block, u64::MAX) {
                continue;
            }
            let stored = self.disks[index].origin.stored_block(block as usize);
            self.model
                .check_block(uid, block, &stored)
                .map_err(|e| format!("after a drain, the origin alone is not the disk: {e}"))?;
        }
        Ok(())
    }
}
