//! Time passes: operations begin and end, the subject is called, and what it counts is counted again.

use super::{Ending, Outcome, World, trace};
use crate::content::{BLOCK, SECTOR, Value, recognise, unstamp};
use crate::device::SimDevice;
use crate::mirrored::{DiskCache, Due, Mirrored};
use crate::paths::Event;
use hearth_engine::api::DiskId;
use hearth_io::{IoDone, IoOp, OpKind, Target};

/// How long an operation is said to have taken; of a slow device, forty times as long.
const QUICK_NS: u64 = 50_000;
/// Calls of `tick` in a row that name a deadline already past: more is a busy loop.
const TICKS_WITHOUT_TIME: u32 = 2000;
/// Times a sound device must have refused a block alone before the engine may call it lost.
const SOUND_REFUSALS: u32 = 4;
/// While things are in flight, what the subject counts is counted again once in so many steps: each time
/// every slot of its index is looked at.
const STEPS_PER_COUNT: u32 = 64;

impl World<'_> {
    fn device(&mut self, target: Target) -> Option<&mut SimDevice> {
        match target {
            Target::Flash(n) => self.flash.device(n),
            Target::Origin(id) => self
                .disks
                .iter_mut()
                .find(|d| d.config.id == id)
                .and_then(|d| d.origin.one()),
        }
    }

    /// Where in the list of disks the one with this number is, if its origin is a mirror.
    fn mirror_of(&self, id: DiskId) -> Option<usize> {
        let mirrors = |d: &super::Disk| d.config.id == id && d.origin.is_mirror();
        self.disks.iter().position(mirrors)
    }

    /// Does something with a disk's mirror, if it has one, and takes over what is to happen then.
    pub(crate) fn with_mirror<T>(
        &mut self,
        index: usize,
        what: impl FnOnce(&mut Mirrored, u64, DiskCache<'_>) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let (now, gone) = (self.clock.now(), self.flash.is_dead());
        let subject = self.subject.as_deref();
        let Some(disk) = self.disks.get_mut(index) else {
            return Ok(None);
        };
        let (id, uid) = (disk.config.id, disk.uid);
        let Some(mirror) = disk.origin.mirror() else {
            return Ok(None);
        };
        let cache = DiskCache(subject.map(|subject| (subject, id)));
        mirror.pool_gone = gone;
        mirror.book = std::mem::take(&mut self.book);
        let hit_before = mirror.book.is_hit();
        let done = what(mirror, now, cache);
        self.book = std::mem::take(&mut mirror.book);
        let doomed = self.book.is_hit() && !hit_before;
        let (said, events, due) = (
            std::mem::take(&mut mirror.said),
            std::mem::take(&mut mirror.events),
            mirror.take_due(),
        );
        self.cut_short |= std::mem::take(&mut mirror.wants_crash) && self.profile.crash > 0;
        for line in said {
            trace!(self, "      mirror of {id}: {line}");
        }
        self.note_doom(doomed);
        for event in events {
            self.paths.note(event);
        }
        for (time, due) in due {
            self.event_number += 1;
            let ending = Ending::Mirror(uid, due);
            match time {
                Some(time) => {
                    self.events.insert((now + time, self.event_number), ending);
                }
                None => self.hung.push(ending),
            }
        }
        done.map(Some)
            .map_err(|e| format!("the mirror of disk {id}: {e}"))
    }

    pub(crate) fn handle_effects(&mut self) -> Outcome {
        self.note_flash()?;
        let ios = std::mem::take(&mut self.effects.ios);
        let completions = std::mem::take(&mut self.effects.completions);
        for op in ios {
            self.start_io(op)?;
        }
        for completion in completions {
            self.end_request(completion)?;
        }
        Ok(())
    }

    /// Has the subject given up flash, and had it a reason?
    fn note_flash(&mut self) -> Outcome {
        let now = self.clock.now();
        let Some(subject) = &self.subject else {
            return Ok(());
        };
        let gave_up = subject.gave_up_flash();
        if self.given_up && !self.marker && subject.failure_is_unnoted() {
            // As the daemon does before anything goes on.
            self.marker = true;
            self.paths.note(Event::NotedElsewhere);
            subject.failure_is_noted_elsewhere(now, &mut self.effects);
            trace!(self, "it is noted elsewhere that flash was given up");
        }
        if self.given_up || !gave_up {
            return Ok(());
        }
        trace!(self, "the subject gives up flash");
        self.given_up = true;
        if self.erased {
            // It is noticed some time later.
            self.flash_failed = self.model.now();
        }
        if self.flash_failed == 0 {
            Err("flash was given up although it never failed".into())
        } else {
            Ok(())
        }
    }

    fn start_io(&mut self, op: IoOp) -> Outcome {
        let (target, now) = (op.target, self.clock.now());
        trace!(
            self,
            "   io {:?} {:?} {:?} at {}+{} ({:?})",
            op.id,
            target,
            op.kind,
            op.offset / BLOCK as u64,
            op.len / BLOCK as u64,
            op.class
        );
        self.clock
            .note(op.offset ^ op.len.rotate_left(32) ^ op.id.rotate_left(7));
        if let Target::Origin(id) = target
            && self.disks.iter().any(|d| d.config.id == id && d.homeless())
        {
            return Err(format!("I/O to the origin of disk {id}, which has none"));
        }
        if let Target::Origin(id) = target
            && let Some(index) = self.mirror_of(id)
        {
            self.with_mirror(index, |m, now, cache| m.submit(now, op, cache))?;
            return Ok(());
        }
        let doomed = self.is_doomed(&op);
        let Some(device) = self.device(target) else {
            return Err(format!("I/O to {target:?}, which does not exist"));
        };
        let (token, mut time) = device.submit(op);
        if let Some(violation) = device.violation.take() {
            return Err(format!("driver contract broken: {violation}"));
        }
        if doomed {
            self.book.name(token);
            time = time.filter(|_| !self.book.hangs());
        }
        self.event_number += 1;
        match time {
            Some(time) => {
                let ending = Ending::Device(target, token);
                self.events.insert((now + time, self.event_number), ending);
            }
            None => {
                trace!(self, "   (it hangs)");
                self.hung.push(Ending::Device(target, token));
            }
        }
        Ok(())
    }

    /// Hung operations go on.
    pub(crate) fn release_hung(&mut self) {
        for ending in std::mem::take(&mut self.hung) {
            self.event_number += 1;
            self.events
                .insert((self.clock.now(), self.event_number), ending);
        }
    }

    pub(crate) fn hung(&self) -> usize {
        self.hung.len()
    }

    /// One step of time: the next ends of I/O, or a tick. `Ok(false)`: nothing can happen any more.
    pub(crate) fn pump(&mut self) -> Result<bool, String> {
        self.compare_copies(false)?;
        let mut more = self.step()?;
        if !more && self.disks.iter().any(|d| d.unverified && d.attached()) {
            self.compare_copies(true)?;
            more = true;
        }
        self.uncounted += 1;
        let rests = self.events.is_empty() && self.hung.is_empty() && self.requests.is_empty();
        // Not again at rest as long as only time passes.
        let often = match self.profile.worn {
            true => STEPS_PER_COUNT * 16,
            false => STEPS_PER_COUNT,
        };
        if self.uncounted >= often || rests && self.stirred {
            self.count_again()?;
        }
        Ok(more)
    }

    /// Whatever the subject keeps count of is as it says, and it has as many requests in flight as were made
    /// and not answered.
    pub(crate) fn count_again(&mut self) -> Outcome {
        (self.uncounted, self.stirred) = (0, false);
        let open = self.requests.len() as u64;
        let counted = self.subject()?.check(open);
        match counted.map_err(|e| format!("counted again: {e}"))? {
            same if same == open => Ok(()),
            other => Err(format!(
                "{open} requests are not answered, and the subject knows of {other}"
            )),
        }
    }

    fn step(&mut self) -> Result<bool, String> {
        let due = self.events.first_key_value().map(|((at, _), _)| *at);
        let tick_first = match (self.next_tick, due) {
            (Some(t), Some(d)) => t <= d || self.rng.chance(1, 8),
            (Some(_), None) => true,
            (None, Some(_)) => self.rng.chance(1, 8),
            (None, None) => {
                // The subject may not have been asked yet.
                return self
                    .tick()
                    .map(|()| !self.events.is_empty() || self.next_tick.is_some());
            }
        };
        if tick_first {
            let until = self.next_tick.unwrap_or(0).min(due.unwrap_or(u64::MAX));
            self.clock.advance_to(until);
            self.tick()?;
            return Ok(true);
        }
        let batch = if self.rng.chance(3, 4) {
            1
        } else {
            self.rng.between(2, 6)
        };
        let mut done: Vec<IoDone> = Vec::new();
        for _ in 0..batch {
            let Some(((at, _), ending)) = self.events.pop_first() else {
                break;
            };
            self.clock.advance_to(at);
            done.extend(match ending {
                Ending::Device(target, token) => self.end_io(target, token)?,
                Ending::Mirror(uid, due) => self.end_mirrored(uid, due)?,
            });
        }
        let now = self.clock.now();
        let Some(subject) = &self.subject else {
            return Err("no subject is open".into());
        };
        subject.io_done(now, &mut done, &mut self.effects);
        if !done.is_empty() {
            return Err(format!(
                "the subject left {} finished operations in the list",
                done.len()
            ));
        }
        self.handle_effects()?;
        if self.events.is_empty() || self.rng.chance(1, 3) {
            self.tick()?;
        }
        Ok(true)
    }

    pub(crate) fn tick(&mut self) -> Outcome {
        let now = self.clock.now();
        let Some(subject) = &self.subject else {
            return Err("no subject is open".into());
        };
        let before = self.effects.ios.len();
        self.next_tick = subject.tick(now, &mut self.effects);
        let stuck = self.next_tick.is_some_and(|t| t <= now) && before == self.effects.ios.len();
        self.idle_ticks = if stuck { self.idle_ticks + 1 } else { 0 };
        if self.idle_ticks > TICKS_WITHOUT_TIME {
            return Err(
                "tick keeps asking to be called at once and does nothing: a busy loop".into(),
            );
        }
        self.clock.note(self.next_tick.unwrap_or(7));
        self.handle_effects()
    }

    fn end_io(&mut self, target: Target, token: u64) -> Result<Option<IoDone>, String> {
        let latency = match (target, self.slow_flash) {
            (Target::Flash(n), Some(slow)) if n == slow => 40 * QUICK_NS,
            _ => QUICK_NS,
        };
        let fails = self.fails(Ending::Device(target, token));
        let Some(device) = self.device(target) else {
            return Ok(None);
        };
        let finished = match fails {
            Some(how) => {
                let failed = device.fail(token, how.tears(), latency);
                if how.takes_device() {
                    device.kill();
                }
                failed
            }
            None => device.complete(token, latency),
        };
        let (violation, owed) = (device.violation.take(), device.is_owed(token));
        if let Some(violation) = violation {
            return Err(format!("driver contract broken: {violation}"));
        }
        let Some(finished) = finished else {
            return Ok(None);
        };
        if owed {
            self.paths.note(Event::AnsweredFor);
            self.hung.push(Ending::Device(target, token));
        }
        self.done_ios += 1;
        self.stirred = true;
        let done = finished.done;
        self.clock.note(done.op.id ^ done.bad_blocks.len() as u64);
        if finished.injected {
            self.excuse(&done);
        } else if let Err(e) = done.result {
            return Err(format!(
                "{target:?}: {:?} at {}+{} failed: {e}",
                done.op.kind, done.op.offset, done.op.len
            ));
        }
        trace!(
            self,
            "   done {} {target:?} {:?} at {}+{}: {:?}{}",
            done.op.id,
            done.op.kind,
            done.op.offset / BLOCK as u64,
            done.op.len / BLOCK as u64,
            done.result,
            if done.bad_blocks.is_empty() {
                String::new()
            } else {
                format!(" BAD BLOCKS {:?}", done.bad_blocks)
            }
        );
        Ok(Some(done))
    }

    /// Something of a mirror ends. No failure of a leg justifies that of a request: another leg is always there.
    fn end_mirrored(&mut self, uid: u8, due: Due) -> Result<Option<IoDone>, String> {
        // It may have gone with its disk.
        let Some(index) = self.disks.iter().position(|d| d.uid == uid) else {
            return Ok(None);
        };
        self.stirred = true;
        let ended = self.with_mirror(index, |m, now, cache| m.end(now, due, cache))?;
        let Some(done) = ended.flatten() else {
            return Ok(None);
        };
        self.done_ios += 1;
        self.clock.note(done.op.id ^ done.bad_blocks.len() as u64);
        trace!(
            self,
            "   done {} {:?} {:?} at {}+{}: {:?}",
            done.op.id,
            done.op.target,
            done.op.kind,
            done.op.offset / BLOCK as u64,
            done.op.len / BLOCK as u64,
            done.result
        );
        match done.result {
            Ok(()) => Ok(Some(done)),
            Err(e) => Err(format!(
                "{:?} at {}+{} of a mirror of which a leg is well failed: {e}",
                done.op.kind, done.op.offset, done.op.len
            )),
        }
    }

    /// An injected failure justifies failures of requests; notes which.
    fn excuse(&mut self, done: &IoDone) {
        let now = self.model.now();
        match done.op.target {
            Target::Origin(id) => {
                if let Some(disk) = self.disks.iter_mut().find(|d| d.config.id == id) {
                    disk.origin_failed = now;
                }
            }
            // Another device has what this one does not give back, or take.
            Target::Flash(_) if self.flash.are_twice() => {}
            Target::Flash(n) => {
                self.flash_failed = now;
                if done.op.kind == OpKind::Read {
                    let Some(first) = self.flash.index_of(n, done.op.offset) else {
                        return;
                    };
                    let last = first + (done.op.len / BLOCK as u64) as usize;
                    for index in first..last {
                        match self.owner_of(index) {
                            Some((disk, block)) => {
                                let disk = &mut self.disks[disk];
                                disk.stung.insert(block, now);
                                // One that only does not answer is asked again and again.
                                if last - first == 1 && !done.is_overdue() {
                                    let alone = disk.stung_alone.entry(block).or_default();
                                    *alone += 1;
                                    // A device that was given up is asked twice, a sound one longer.
                                    if *alone >= if self.given_up { 2 } else { SOUND_REFUSALS } {
                                        disk.hurt.insert(block);
                                    }
                                }
                            }
                            // Zeros, written as data: they could be anybody's.
                            None => {
                                self.stung_unknown = now;
                                if last - first == 1 && !done.is_overdue() {
                                    *self.stung_zeros.entry(index).or_default() += 1;
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// How many blocks that hold zeros may be lost, whosever they are.
    pub(crate) fn zeros_hurt(&self) -> usize {
        let enough = if self.given_up { 2 } else { SOUND_REFUSALS };
        let counts = self.stung_zeros.values();
        counts.filter(|count| **count >= enough).count()
    }

    /// Whose content a block of flash holds, if it is a guest's: (index of disk, block).
    pub(crate) fn owner_of(&self, index: usize) -> Option<(usize, u64)> {
        if index >= self.flash.blocks() || !self.flash.touched(index) {
            return None;
        }
        let block = self.flash.visible_block(index);
        block
            .chunks(SECTOR as usize)
            .find_map(|s| match recognise(s) {
                Value::Stamp(s) => {
                    let (uid, _, sector) = unstamp(s);
                    let disk = self.disks.iter().position(|d| d.uid == uid)?;
                    Some((disk, sector / 8))
                }
                _ => None,
            })
    }
}
