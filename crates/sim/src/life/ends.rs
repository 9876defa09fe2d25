//! How a life ends and the next one begins: crashes, stops of every kind, and starts that are themselves cut off.

use super::changes::LATE_STEPS;
use crate::area::Aside;
use crate::media::SimMedia;
use crate::model::End;
use crate::paths::Event;
use crate::world::{Outcome, World, trace};
use hearth_engine::api::Mode;
use hearth_io::{Joined, Spread};

/// Most steps that a stop in trouble is waited for: hardly, for some time, until all is well again.
const STOP_STEPS: [u64; 3] = [20, 200, 3000];
/// Times one reopening is cut off before it may finish.
const CUTS_MAX: u64 = 3;

impl World<'_> {
    /// The process dies; mostly the power fails with it.
    pub(crate) fn crash(&mut self) {
        let (flash, origins) = match self.rng.below(10) {
            0..=5 => (true, true),
            6 | 7 => (false, false),
            8 => (true, false),
            _ => (false, true),
        };
        self.crash_of(flash, origins);
    }

    /// The process dies in just this way.
    pub(super) fn die(&mut self, end: End) {
        let power = end != End::Process;
        self.crash_of(power, power);
    }

    /// The process dies. These lose their power with it.
    fn crash_of(&mut self, flash: bool, origins: bool) {
        trace!(
            self,
            "CRASH (flash loses power: {flash}, origins: {origins})"
        );
        if self.disks.iter().any(|d| !d.attached()) {
            self.paths.note(Event::CrashWithoutDisk);
        }
        let is_whole = self.are_whole();
        self.forget_in_flight();
        self.unclean = true;
        self.call_off_replacement();
        self.lose(flash, origins);
        self.put_flash_back(is_whole, false);
        // A power cut of one side only leaves the other's contents volatile.
        self.model.crash(match (flash, origins) {
            (true, true) => End::Power,
            (false, false) => End::Process,
            _ => End::SomePower,
        });
    }

    pub(super) fn lose(&mut self, flash: bool, origins: bool) {
        if flash {
            self.flash.power_cut();
        } else {
            self.flash.process_death();
        }
        for disk in &mut self.disks {
            disk.resting = false;
            disk.held = None;
            disk.origin.crash(origins, flash && !origins);
        }
    }

    /// A clean stop, which may itself be cut off.
    pub(super) fn stop(&mut self) -> Outcome {
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
    pub(super) fn quiesce(&mut self, on: bool) -> Outcome {
        self.subject()?.quiesce(on);
        self.stopping = on;
        Ok(())
    }

    /// A stop that nobody goes through with.
    pub(super) fn stop_called_off(&mut self) -> Outcome {
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
    pub(super) fn stop_in_trouble(&mut self) -> Outcome {
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
    pub(super) fn stop_step(&mut self) -> Outcome {
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
    pub(super) fn close(&mut self) -> Outcome {
        if self.disks.iter().any(|d| !d.attached()) {
            self.paths.note(Event::StopWithoutDisk);
        }
        if self.flash.busy() > 0 || self.disks.iter().any(|d| d.origin.busy() > 0) {
            return Err("the subject says it is idle with I/O in flight".into());
        }
        // The process ends when they have.
        self.flash.pay();
        self.disks.iter_mut().for_each(|disk| disk.origin.pay());
        let cut = self.rng.chance(1, 4).then(|| self.rng.below(5));
        // As after a crash: what rotted in batches that nothing vouches for looks like a torn write.
        let cut = cut.filter(|_| self.profile.rot == 0);
        self.note_owed();
        self.note_whole(true)?;
        let is_whole = self.are_whole();
        let Some(subject) = self.subject.take() else {
            return Ok(());
        };
        let emptied = subject.emptied();
        let segments = self.copied_segments();
        let (mut media, meter) = self.flash.joined(cut);
        let (result, touched) = subject.close_telling(&mut media, &segments);
        let (tripped, used) = (meter.tripped(), meter.used());
        self.check_media()?;
        trace!(
            self,
            "closed after {used} writes, cut off: {tripped}, {result:?}"
        );
        if tripped {
            self.paths.note(Event::StopCutOff);
        }
        // What was not closed may have to be read anew, and that may put something on it.
        self.emptied = emptied.filter(|_| result.is_ok() && !tripped);
        let crashes = tripped || self.rng.chance(1, 4);
        if crashes {
            self.crash();
        }
        self.put_flash_back(is_whole && result.is_ok() && !tripped, true);
        self.copy_is_at_rest(touched, result.is_ok());
        // Whether the stop or the crash was first is for the next start to say.
        self.unclean = false;
        let now = self.clock.now();
        for disk in self.disks.iter_mut().filter(|_| !crashes) {
            if let Some(mirror) = disk.origin.mirror() {
                mirror.leave(now)?;
            }
        }
        self.forget_in_flight();
        self.model.crash(End::Process);
        match result {
            Err(e) if !tripped && !self.flash.is_dead() => Err(format!("close failed: {e}")),
            _ => Ok(()),
        }
    }

    /// All flash is gone for good, and a blank device takes its place. What is known beside it says which disks had
    /// nothing there that their origins lack: those are served. The others went with it.
    pub(super) fn lose_flash(&mut self) -> Outcome {
        trace!(self, "ALL FLASH IS LOST");
        self.paths.note(Event::FlashReplaced);
        self.flash.revive();
        self.flash.blank();
        self.area = Aside::default();
        (self.given_up, self.marker, self.unclean) = (false, false, false);
        self.forget_stings();
        for index in 0..self.disks.len() {
            let (id, mode) = (self.disks[index].config.id, self.disks[index].config.mode);
            if self.disks[index].maybe_dirty || self.disks[index].homeless() {
                trace!(self, "disk {id} may have been dirty there");
                self.paths.note(Event::NotKnownWhole);
                self.disks[index] = self.draw(id);
            } else {
                self.paths.note(Event::ServedWithoutFlash);
                let disk = &mut self.disks[index];
                disk.dirty_once = mode == Mode::WriteBack;
                disk.hurt.clear();
                disk.owed.clear();
                disk.stung.clear();
                disk.stung_alone.clear();
                disk.distrusted = false;
            }
            let config = &self.disks[index].config;
            let (size, home) = (config.size, config.home);
            for known in self.known.iter_mut().filter(|k| k.id == id) {
                (known.size, known.home, known.since_seq) = (size, home, 0);
            }
        }
        self.format()
    }

    /// Opens again; sometimes the power fails in the middle of that.
    pub(super) fn reopen(&mut self) -> Outcome {
        self.unheard = false;
        self.reshape()?;
        self.replace_half()?;
        for attempt in 0..=CUTS_MAX {
            self.put_in_place()?;
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
            self.replacement_is_over();
            self.area_after_start()?;
            self.drop_scratch()?;
            (self.given_up, self.flash_failed) = (false, 0);
            for index in 0..self.disks.len() {
                self.disks[index].late = Some(LATE_STEPS);
                self.drop_distrusted(index)?;
                self.change_origin(index)?;
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
}
