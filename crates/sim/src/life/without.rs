//! A flash device is lost for good, and the pool goes on with what the others hold.
//!
//! As the daemon does it: what is dirty goes to the origins, what cannot is accepted as lost, the pool is closed without asking the lost
//! device for anything, and is opened with the others, warm. Any of it is cut off now and then. Whatever the guests are told afterwards is
//! judged as ever: a copy that something on the lost device had made void must never be seen again.

use crate::model::End;
use crate::paths::Event;
use crate::prng::Prng;
use crate::workload::Wish;
use crate::world::{World, trace};

/// Steps that what is dirty may take to reach its origins.
const DRAIN_STEPS: u64 = 20_000;
/// Writes and flushes of a close, or of a change of the list, until it is cut off.
const STEPS: u64 = 24;

impl World<'_> {
    /// Goes on without a device that is dead, if that can be. True: this life has ended with it.
    pub(super) fn go_on_without(&mut self) -> Result<bool, String> {
        if !self.given_up || !self.flash.are_several() || self.flash.are_twice() {
            return Ok(false);
        }
        let Some(device) = self.subject()?.failed_alone() else {
            return Ok(false);
        };
        // Another one may have died since.
        if self
            .flash
            .dead()
            .is_some_and(|dead| dead != usize::from(device))
        {
            return Ok(false);
        }
        // Choices of its own, so that the rest of a seed is as it was.
        let mut rng = Prng::new(self.shape.seed ^ self.clock.now() ^ 0x0105);
        // An origin may fail meanwhile: nobody waits for it.
        let mut of_origins = Prng::new(self.shape.seed ^ self.clock.now() ^ 0x0106);
        let disks = self.disks.len() as u64;
        let away = of_origins
            .chance(1, 3)
            .then(|| of_origins.below(disks) as usize);
        if !rng.chance(3, 4) || !self.settle_without(away)? {
            return Ok(false);
        }
        self.quiesce(true)?;
        self.settle("quiescing without a device", |w| {
            w.subject.as_ref().is_some_and(|s| s.idle())
        })?;
        if self.subject()?.hindered() {
            self.quiesce(false)?;
            return Ok(false);
        }
        let kept = self.close_without(device, away, &mut rng)?;
        let Some(kept) = kept else {
            return Ok(true);
        };
        let listed = self.list_without(usize::from(device), &mut rng)?;
        self.reopen()?;
        let cached = self.subject()?.cached_blocks();
        trace!(
            self,
            "{kept} blocks were to be kept, and {cached} are cached"
        );
        // A start that was cut off behind the point where it went on has left a log.
        if listed && kept > 0 && self.subject()?.used_checkpoint() {
            // Copies from before a disk was switched off are void.
            let is_void = self.known.iter().any(|known| known.since_seq > 0);
            if cached == 0 && !is_void {
                return Err(format!(
                    "{kept} blocks were to be kept without a device, and none is cached"
                ));
            }
            self.paths.note(Event::WarmWithout);
        }
        Ok(true)
    }

    /// Waits until nothing is dirty and nobody waits. False: that does not come.
    fn settle_without(&mut self, away: Option<usize>) -> Result<bool, String> {
        self.hurt(false)?;
        if let Some(index) = away {
            self.disks[index].origin.refuse_flushes();
            if self.disks[index].attached() {
                // Its guest is told so.
                self.submit(index, Wish::flush())?;
            }
        }
        for index in 0..self.disks.len() {
            if self.disks[index].attached() {
                let id = self.disks[index].config.id;
                self.subject()?.drain(id, true)?;
            }
        }
        for _ in 0..DRAIN_STEPS {
            let over = self.open_requests() == 0 && !self.subject()?.hindered();
            if over {
                return Ok(true);
            }
            for index in 0..self.disks.len() {
                let id = self.disks[index].config.id;
                let unsaved = self.subject()?.unsaved(id);
                let all = unsaved.dirty == unsaved.lost.len() as u64;
                if !unsaved.lost.is_empty() && all && self.disks[index].attached() {
                    self.accept_losses_of(index)?;
                }
            }
            self.late_comers()?;
            if !self.pump_on()? {
                break;
            }
        }
        self.settle("answering before going on", |w| w.open_requests() == 0)?;
        Ok(!self.subject()?.hindered())
    }

    /// Closes the pool. How many blocks are kept; none if it was cut off.
    fn close_without(
        &mut self,
        device: u16,
        away: Option<usize>,
        rng: &mut Prng,
    ) -> Result<Option<u64>, String> {
        self.flash.pay();
        self.disks.iter_mut().for_each(|disk| disk.origin.pay());
        self.note_owed();
        self.note_whole(true)?;
        let Some(subject) = self.subject.take() else {
            return Ok(None);
        };
        let kept = subject.kept_without();
        let cut = rng.chance(1, 4).then(|| rng.below(STEPS));
        let (media, meter) = self.flash.joined(cut);
        let mut media = media.without(device);
        let closed = subject.close_without(&mut media);
        let tripped = meter.tripped();
        drop(media);
        self.check_media()?;
        trace!(
            self,
            "CLOSED without device {device}: {closed:?}, cut off: {tripped}"
        );
        if tripped {
            self.paths.note(Event::StopCutOff);
            self.crash();
            self.flash.revive();
            self.lose(true, false);
            self.reopen()?;
            return Ok(None);
        }
        closed.map_err(|e| format!("closing without a device failed: {e}"))?;
        let now = self.clock.now();
        for (index, disk) in self.disks.iter_mut().enumerate() {
            if let Some(mirror) = disk.origin.mirror() {
                mirror.leave(now)?;
            }
            disk.origin.heal();
            if away == Some(index) {
                continue;
            }
            // The others have everything, so nothing is excused from here on.
            disk.hurt.clear();
            disk.stung.clear();
            disk.stung_alone.clear();
        }
        self.forget_stings();
        self.forget_in_flight();
        self.model.crash(End::Process);
        (self.given_up, self.marker, self.unclean) = (false, false, false);
        Ok(Some(kept))
    }

    /// Lists the devices that there are. True if that was not cut off.
    fn list_without(&mut self, dead: usize, rng: &mut Prng) -> Result<bool, String> {
        let before: Vec<usize> = (0..self.flash.count()).collect();
        let after: Vec<usize> = before.iter().copied().filter(|n| *n != dead).collect();
        let cut = rng.chance(1, 4).then(|| rng.below(STEPS));
        let (mut media, meter) = self.flash.media(cut);
        drop(media.remove(dead));
        let done = self.maker.go_on_without(media, dead);
        let tripped = meter.tripped();
        self.check_media()?;
        trace!(self, "LISTED without it: {done:?}, cut off: {tripped}");
        // It may answer again.
        self.flash.revive();
        if tripped {
            self.paths.note(Event::ReshapeCutOff);
            // What is not durable of a list must not be believed by who looks which one it is.
            self.die(End::Power);
            self.unclean = false;
        } else {
            done.clone()?;
            self.paths.note(Event::WentOn);
        }
        self.look_which(&before, &after, done.is_ok() && !tripped)?;
        Ok(!tripped)
    }
}
