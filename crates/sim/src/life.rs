//! A world's lifetime: it is hurt, dies, comes back, and in the end must be whole.
//!
//! First safety under hardship: requests run while devices fail and the process dies in the
//! middle of anything, also of its own recovery. Then the hurting ends and liveness is checked:
//! every request is answered, everything dirty reaches the origins, and the origins alone hold
//! what the oracle says.

use crate::device::Faults;
use crate::model::End;
use crate::subject::Known;
use crate::workload::Wish;
use crate::world::{Outcome, World, trace};
use hearth_engine::api::{Mode, OriginState, ReqOp};

/// Steps of one life; a world that needs more is stuck in a loop.
const LIFE_STEPS_MAX: u64 = 60_000;
/// Steps that are waited for a disk to grow.
const GROW_TRIES: u32 = 2000;
/// Steps an operation hangs on average.
const HANG_STEPS: u64 = 300;
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
            self.hurt(true);
            let short = lives > 1 && self.rng.chance(1, 6);
            let requests = if short {
                self.rng.below(8)
            } else {
                self.rng
                    .between(self.profile.requests.0, self.profile.requests.1)
            };
            self.live(requests)?;
            self.hurt(false);
            if life == lives || self.given_up {
                break;
            }
            if self.rng.chance(self.profile.crash, 100) {
                self.crash();
            } else {
                self.stop()?;
            }
            self.reopen()?;
            if self.rng.chance(1, 3) {
                self.verify()?;
            }
            if self.given_up {
                break;
            }
        }
        self.finale()
    }

    fn create(&mut self) -> Outcome {
        let shape = self.shape;
        self.maker
            .format(&mut self.flash.media(None), shape)
            .map_err(|e| format!("format failed: {e}"))?;
        self.check_media()?;
        // The registry says a disk exists only after the pool does.
        self.flash.power_cut();
        self.reopen()
    }

    fn check_media(&mut self) -> Outcome {
        self.flash
            .violation
            .take()
            .map_or(Ok(()), |v| Err(format!("media contract broken: {v}")))
    }

    fn hurt(&mut self, on: bool) {
        let p = &self.profile;
        if !on {
            self.flash.faults = Faults::default();
            for disk in &mut self.disks {
                disk.origin.faults = Faults::default();
            }
            self.release_hung();
            return;
        }
        self.flash.faults = Faults {
            read_eio: p.flash_read_eio,
            write_eio: p.flash_write_eio,
            flush_eio: p.flash_write_eio * 4,
            no_space: p.flash_write_eio / 2,
            slow: p.slow,
            hang: p.slow / 10,
            ..Faults::default()
        };
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
                hang: p.slow / 10,
                bad_ranges,
                fail_op,
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
        for _ in 0..LIFE_STEPS_MAX {
            if left == 0 {
                return Ok(());
            }
            if self.wants_more() && self.rng.chance(eager, 10) {
                let index = self.rng.below(self.disks.len() as u64) as usize;
                if !self.disks[index].resting {
                    let disk = &mut self.disks[index];
                    let wish = disk.habits.next(&mut self.rng, disk.config.size);
                    self.submit(index, wish)?;
                    left -= 1;
                }
                if Some(left) == death {
                    self.flash_dies();
                }
            } else if !self.pump()? {
                if self.hung() > 0 {
                    self.release_hung();
                } else if self.open_requests() > 0 {
                    return self
                        .stuck("requests wait but no I/O is in flight and no tick is wanted");
                }
            }
            if self.hung() > 0 && self.rng.chance(1, HANG_STEPS) {
                self.release_hung();
            }
            if self.rng.chance(self.profile.change, 1000) {
                self.change()?;
            }
            if self.rng.chance(self.profile.rot, 1000) {
                self.rot();
            }
        }
        self.stuck("a life took too many steps")
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
        self.flash_failed = self.model.now();
        for index in 0..self.disks.len() {
            if self.disks[index].dirty_once {
                let blocks = self.model.written_blocks(self.disks[index].uid);
                self.disks[index].hurt.extend(blocks);
            }
        }
    }

    fn rot(&mut self) {
        let index = self.rng.below(self.flash.blocks() as u64) as usize;
        // The next guest's block: metadata is kept twice or verified, and not rotted here.
        let found =
            (index..self.flash.blocks().min(index + 64)).find_map(|i| Some((i, self.owner_of(i)?)));
        if let Some((index, (disk, block))) = found {
            trace!(
                self,
                "ROT in flash block {index}, holding block {block} of #{}", self.disks[disk].uid
            );
            self.flash.rot(index);
            if self.disks[disk].dirty_once {
                self.disks[disk].hurt.insert(block);
            }
        }
    }

    /// One management action.
    fn change(&mut self) -> Outcome {
        let index = self.rng.below(self.disks.len() as u64) as usize;
        let id = self.disks[index].config.id;
        if self.disks[index].resting {
            return self.replace(index);
        }
        match self.rng.below(12) {
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
        self.subject()?.attach(config, origin)
    }

    /// Removes a disk and creates another with the same id, once its requests have ended.
    fn replace(&mut self, index: usize) -> Outcome {
        if self.open_requests_of(index) > 0 {
            return Ok(());
        }
        let id = self.disks[index].config.id;
        trace!(self, "disk {id} is removed");
        self.release_hung();
        self.subject()?.drain(id, false)?;
        self.settle("detaching a disk", |w| {
            matches!(w.subject().and_then(|s| s.detach(id)), Ok(true))
        })?;
        let mut since_seq = None;
        for _ in 0..LIFE_STEPS_MAX {
            let mut effects = std::mem::take(&mut self.effects);
            since_seq = self.subject()?.forget(id, &mut effects)?;
            self.effects = effects;
            self.handle_effects()?;
            if since_seq.is_some() || !self.pump()? {
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
        let disk = self.draw(id);
        self.disks[index] = disk;
        self.known.retain(|k| k.id != id);
        let size = self.disks[index].config.size;
        self.known.push(Known {
            id,
            size,
            since_seq,
        });
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
        self.forget_in_flight();
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
        self.subject()?.quiesce(true);
        self.settle("quiescing", |w| {
            w.subject.as_ref().is_some_and(|s| s.idle())
        })?;
        if self.flash.busy() > 0 || self.disks.iter().any(|d| d.origin.busy() > 0) {
            return Err("the subject says it is idle with I/O in flight".into());
        }
        let cut = self.rng.chance(1, 4).then(|| self.rng.below(5));
        let Some(subject) = self.subject.take() else {
            return Ok(());
        };
        let mut media = self.flash.media(cut);
        let result = subject.close(&mut media);
        let (tripped, used) = (media.tripped(), media.used());
        self.check_media()?;
        trace!(
            self,
            "closed after {used} writes, cut off: {tripped}, {result:?}"
        );
        if tripped || self.rng.chance(1, 4) {
            self.crash();
        }
        self.forget_in_flight();
        self.model.crash(End::Process);
        match result {
            Err(e) if !tripped => Err(format!("close failed: {e}")),
            _ => Ok(()),
        }
    }

    /// Opens again; sometimes the power fails in the middle of that.
    fn reopen(&mut self) -> Outcome {
        for attempt in 0..=CUTS_MAX {
            let cut = (attempt < CUTS_MAX && self.rng.chance(1, 4)).then(|| self.rng.below(4));
            let (shape, known) = (self.shape, self.known.clone());
            let mut media = self.flash.media(cut);
            let opened = self.maker.open(&mut media, shape, &known);
            let (tripped, used) = (media.tripped(), media.used());
            self.check_media()?;
            trace!(
                self,
                "opened after {used} writes, cut off: {tripped}, {}",
                opened.as_ref().err().map_or("", |e| e)
            );
            if tripped {
                drop(opened);
                self.crash();
                continue;
            }
            self.subject = Some(opened.map_err(|e| format!("open failed: {e}"))?);
            for index in 0..self.disks.len() {
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
        for _ in 0..SETTLE_STEPS_MAX {
            if done(self) {
                return Ok(());
            }
            if !self.pump()? {
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
        self.verify()?;
        if !self.flash.is_dead() {
            self.drain_and_compare()?;
            if !self.given_up && self.rng.chance(1, 2) {
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
                w.disks.iter().all(|d| {
                    let unsaved = s.unsaved(d.config.id);
                    unsaved.dirty == unsaved.lost.len() as u64
                })
            })
        })?;
        for index in 0..self.disks.len() {
            let (uid, id) = (self.disks[index].uid, self.disks[index].config.id);
            let lost = self.subject()?.unsaved(id).lost;
            trace!(self, "lost of #{uid}: {} blocks", lost.len());
            if let Some(block) = lost.iter().find(|b| !self.disks[index].hurt.contains(b)) {
                return Err(format!(
                    "block {block} of #{uid} is listed as lost, and flash never had its only copy"
                ));
            }
            self.disks[index].accepted.extend(&lost);
            let whole = |b: &&u64| (**b + 1) * 4096 <= self.disks[index].config.size;
            if let Some(block) = lost.iter().find(whole).copied() {
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
                .is_some_and(|s| w.disks.iter().all(|d| s.clean(d.config.id)))
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
        self.settle("draining", |w| {
            w.subject.as_ref().is_some_and(|s| {
                w.disks
                    .iter()
                    .all(|d| !d.hurt.is_empty() || s.clean(d.config.id))
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
        for block in self.model.written_blocks(uid) {
            if self.disks[index].accepted.contains(&block) {
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
