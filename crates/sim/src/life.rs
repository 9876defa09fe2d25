//! A world's lifetime: it is hurt, dies, comes back, and in the end must be whole.
//!
//! First safety under hardship: requests run while devices fail and the process dies in the
//! middle of anything, also of its own recovery. Then the hurting ends and liveness is checked:
//! every request is answered, everything dirty reaches the origins, and the origins alone hold
//! what the oracle says.
//!
//! Here is the course of it; beside it the trouble that is made, the changes that are asked for, how lives end and
//! begin, and the reckoning.

mod changed;
mod changes;
mod ends;
pub(crate) mod held;
mod reckoning;
mod trouble;
mod without;

use crate::content::SECTOR;
use crate::model::End;
use crate::paths::Event;
use crate::single::{Step, Turn};
use crate::world::{Outcome, World, trace};
use hearth_engine::api::ReqOp;

/// Steps of one life; a world that needs more is stuck in a loop.
const LIFE_STEPS_MAX: u64 = 60_000;
/// Steps an operation hangs on average.
const HANG_STEPS: u64 = 300;
/// Steps after the death of a device in which a crash comes soon.
const SOON_STEPS: u64 = 120;
/// Time that passes at once while an operation hangs: long enough to be taken for hanging.
const LONG_NS: u64 = 11_000_000_000;
/// Steps to settle after the hurting ends.
const SETTLE_STEPS_MAX: u64 = 300_000;
/// Virtual time to settle: everything dirty fits in a few seconds of the slowest origin.
const SETTLE_NS_MAX: u64 = 1_200_000_000_000;

impl World<'_> {
    /// Runs the whole world. An error says in words which promise was broken.
    pub fn run(&mut self) -> Outcome {
        self.create()?;
        let lives = self.rng.between(self.profile.lives.0, self.profile.lives.1);
        for life in 1..=lives {
            self.cut_short = false;
            self.hurt(true)?;
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
            if !self.unheard && self.go_on_without()? {
                self.check_origins()?;
                if self.rng.chance(self.profile.verify, 100) {
                    self.verify()?;
                }
                continue;
            }
            let returns = self.rng.chance(self.profile.revival, 100);
            if self.flash.is_dead() && !returns {
                break;
            }
            if self.rng.chance(self.profile.call_off, 100) && !self.unheard {
                self.stop_called_off()?;
            }
            self.check_origins()?;
            let trouble = self.rng.chance(self.profile.trouble, 100);
            if self.wants_switch() {
                self.hurt(false)?;
                self.copy_the_rest()?;
                self.stop()?;
            } else if self.cut_short || self.rng.chance(self.profile.crash, 100) {
                self.hurt(false)?;
                self.crash();
            } else if trouble {
                self.stop_in_trouble()?;
                self.hurt(false)?;
            } else {
                self.hurt(false)?;
                self.stop()?;
            }
            if self.loses_flash() {
                self.lose_flash()?;
            } else if self.flash.is_dead() {
                trace!(self, "FLASH IS BACK");
                self.paths.note(Event::FlashBack);
                self.flash.revive();
                self.lose(true, false);
                self.model.crash(End::SomePower);
            }
            self.reopen()?;
            self.check_origins()?;
            if self.rng.chance(self.profile.verify, 100) {
                self.verify()?;
            }
        }
        self.hurt(false)?;
        if self.unheard {
            // In the middle of a change there is no reckoning.
            self.crash();
            if self.flash.is_dead() {
                self.flash.revive();
                self.lose(true, false);
                self.model.crash(End::SomePower);
            }
            self.reopen()?;
        }
        self.finale()
    }

    /// One life, and the reckoning.
    pub(crate) fn run_once(&mut self) -> Outcome {
        self.create()?;
        self.live(self.profile.requests.0)?;
        self.alive_ios = self.book.begun;
        if let Some(step) = self.book.step {
            self.die_in_step(step)?;
        } else if let Some(end) = self.dies_by() {
            self.die(end);
            // A leg does so by itself.
            self.flash.revive();
            self.reopen()?;
        }
        self.cut_short = false;
        self.finale()
    }

    /// A device dies with a step of a stop, or of a start after a power cut.
    fn die_in_step(&mut self, step: Step) -> Outcome {
        if step.turn == Turn::Start {
            self.die(End::Power);
        }
        self.flash.dies_after(step.device, Some(step.step));
        match step.turn {
            Turn::Start => self.reopen()?,
            Turn::Stop => self.stop()?,
        }
        self.book.died = self.flash.dead().is_some();
        self.flash.dies_after(step.device, None);
        match step.turn {
            Turn::Start => Ok(()),
            Turn::Stop => self.reopen(),
        }
    }

    fn create(&mut self) -> Outcome {
        self.format()?;
        self.reopen()
    }

    /// Makes a pool of the flash, which is blank.
    fn format(&mut self) -> Outcome {
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
        Ok(())
    }

    pub(crate) fn check_media(&mut self) -> Outcome {
        self.flash
            .violation()
            .map_or(Ok(()), |v| Err(format!("media contract broken: {v}")))
    }

    /// Runs `requests` requests under hardship; returns in the middle of things.
    fn live(&mut self, requests: u64) -> Outcome {
        let mut left = requests;
        let eager = self.rng.between(1, 9);
        let death = self
            .profile
            .flash_death
            .then(|| self.rng.between(1, requests.max(2)));
        let replaces = self.profile.replace > 0;
        let death = death.filter(|_| !replaces || self.rng.chance(1, 2));
        let erased = self.profile.flash_erased && !self.erased;
        let erased = erased.then(|| self.rng.between(1, requests.max(2)));
        let mut doom = None;
        let full = self.rng.chance(self.profile.full, 100);
        let full = full.then(|| self.rng.between(1, requests.max(2)));
        for _ in 0..self.steps_max(LIFE_STEPS_MAX) {
            if left == 0 || self.cut_short {
                return Ok(());
            }
            self.late_comers()?;
            self.go_on_holding()?;
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
                    // Soon, perhaps before it is noted anywhere.
                    let soon = replaces && self.rng.chance(1, 2);
                    doom = soon.then(|| self.rng.below(SOON_STEPS));
                }
                if Some(left) == erased {
                    self.flash_is_erased();
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
            self.look_at_origins()?;
            if doom == Some(0) {
                self.cut_short = true;
                // It did not answer, and nothing more.
                self.replacing.returns = self.rng.chance(1, 2);
            }
            doom = doom.map(|steps: u64| steps.saturating_sub(1));
            if replaces {
                self.replace_in_life()?;
            }
            if self.rng.chance(self.profile.change, 1000) {
                self.change()?;
            }
            if self.profile.reshape > 0 {
                self.empty_some()?;
            }
            if self.profile.areas {
                self.area_some()?;
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

    /// Does this life end with the loss of all flash?
    fn loses_flash(&mut self) -> bool {
        let lost = self.profile.flash_lost > 0 && self.rng.chance(self.profile.flash_lost, 100);
        std::mem::take(&mut self.erased) || lost
    }

    /// What hangs goes on in the end; in between time may pass.
    fn hang_on(&mut self) -> Outcome {
        self.trouble_legs()?;
        self.note_whole(false)?;
        if self.hung() > 0 && self.rng.chance(1, HANG_STEPS) {
            self.release_hung();
        }
        let patient = self.profile.hang > 0 || self.book.single.is_some();
        let long = self.hung() > 0 && patient && self.rng.chance(1, HANG_STEPS);
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

    fn stuck(&self, what: &str) -> Outcome {
        let state = self
            .subject
            .as_ref()
            .map(|s| s.describe())
            .unwrap_or_default();
        Err(format!(
            "no progress: {what}; {} requests open. {state} {}",
            self.open_requests(),
            self.disks
                .iter()
                .filter_map(|d| d.origin.explain())
                .collect::<Vec<_>>()
                .join(" ")
        ))
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
}
