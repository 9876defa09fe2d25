//! A flash device of a pool that keeps everything twice is replaced.
//!
//! It may be there, or lost, and what takes its place is blank, or has something old on it: another device that was of the pool
//! once, or the very one that was lost. That happens between two lives of a world, as with a daemon that is stopped, or
//! during one: as the daemon does it then, the device is copied while guests write to the pool, and when it is closed what has
//! changed since is copied again.
//!
//! Whoever replaces it is cut off now and then, with power or without, and the old and the new device fail on the way. Then the
//! devices are the pool as they were listed before or as they are afterwards, by what the *others* say, and the one that is not
//! of it is there instead of the one that is, now and then. When nothing is lost any more the trouble is another device's, so
//! that what stands on the new one is all there is.

use crate::content::BLOCK;
use crate::device::{Base, SimDevice, Tear};
use crate::paths::Event;
use crate::subject::{CopyPlan, Replacement};
use crate::world::{Outcome, SEGMENT_BLOCKS, World, trace};
use hearth_io::Target;

/// Most writes and flushes until a replacement is cut off.
const STEPS: u64 = 70;
/// The same until a device fails.
const DOOM: u64 = 40;
/// In so many steps of a life one begins.
const STEPS_PER_REPLACEMENT: u64 = 200;
/// Bytes that are copied at once while the pool is served.
const PART: u64 = 64 * BLOCK as u64;
/// As in the daemon: so often what has changed meanwhile is copied again, and so few segments are left to the end.
const PASSES: u32 = 4;
const FEW: usize = 2;
/// Steps of copying, for what is copied without pause.
const COPY_STEPS_MAX: u32 = 4000;

/// How far a replacement is.
#[derive(Default)]
pub(crate) struct Replacing {
    /// The device is being copied, or is copied, while the pool is served.
    copy: Option<Copying>,
    /// The pool was closed after that.
    ready: Option<(Replacement, bool)>,
    /// One was replaced, or was to be: which of the two is of the pool is for the others to say.
    pending: Option<Pending>,
    /// The one that died is there again at the next start.
    pub(crate) returns: bool,
}

struct Copying {
    place: usize,
    /// It takes its own place.
    own: bool,
    plan: CopyPlan,
    copied: Vec<Option<u64>>,
    due: Vec<usize>,
    now: Option<Part>,
    passes: u32,
    done: bool,
}

/// A segment that is being copied.
struct Part {
    segment: usize,
    at: u64,
    before: Option<u64>,
}

struct Pending {
    place: usize,
    /// The number of the one that was there before.
    old: u128,
    /// Of the two the new one is in the place, and the old one aside.
    new_is_there: bool,
}

fn bit(place: usize) -> u64 {
    1 << place
}

/// A device that is not there.
fn nothing(place: usize, world: &mut World<'_>) -> SimDevice {
    let target = Target::Flash(place as u16);
    let rng = world.rng.fork();
    let mut none = SimDevice::new(target, 0, BLOCK as u64, Base::Zeros, Tear::Anywhere, rng);
    none.kill();
    none
}

impl World<'_> {
    /// Now and then during a life: begins to copy a device, or goes on with it.
    pub(crate) fn replace_in_life(&mut self) -> Outcome {
        if self.replacing.copy.is_some() {
            return match self.rng.chance(1, 2) {
                true => self.copy_some(),
                false => Ok(()),
            };
        }
        match self.given_up || self.unheard || !self.rng.chance(1, STEPS_PER_REPLACEMENT) {
            true => Ok(()),
            false => self.begin_copy(),
        }
    }

    fn begin_copy(&mut self) -> Outcome {
        let place = self.flash.victim();
        let maker = self.maker;
        let plan = maker.copy_plan(&mut self.flash.media(None).0, place)?;
        if plan.lost != self.flash.lost() {
            // It is being noted that one is lost.
            return Ok(());
        }
        let idle = self
            .flash
            .device(place as u16)
            .is_some_and(|d| d.busy() == 0);
        let may_be_own = idle && plan.lost & bit(place) != 0;
        let own = self.new_device(place, may_be_own);
        trace!(
            self,
            "DEVICE {place} IS COPIED to {}, lost: {}",
            if own { "itself" } else { "another one" },
            plan.lost
        );
        let count = plan.segments.len();
        self.replacing.copy = Some(Copying {
            place,
            own,
            plan,
            copied: vec![None; count],
            due: Vec::new(),
            now: None,
            passes: 0,
            done: false,
        });
        Ok(())
    }

    /// The device that takes a place. True if it is the one that was lost there.
    fn new_device(&mut self, place: usize, may_be_own: bool) -> bool {
        let bytes = self.flash.device(place as u16).map_or(0, |d| d.size());
        let own = may_be_own && self.rng.chance(1, 2);
        let old = match own {
            true => {
                let none = nothing(place, self);
                self.flash.put(place, none)
            }
            false if self.rng.chance(1, 2) => {
                let fits = |_: usize, size: u64| size >= bytes;
                self.flash.take_aside(fits).map(|(_, device)| device)
            }
            false => None,
        };
        let mut new = match old {
            Some(old) => old,
            None => {
                let more = *self.rng.pick(&[0, 0, 5]);
                SimDevice::new(
                    Target::Flash(place as u16),
                    bytes + more * u64::from(SEGMENT_BLOCKS) * BLOCK as u64,
                    BLOCK as u64,
                    Base::Zeros,
                    Tear::Anywhere,
                    self.rng.fork(),
                )
            }
        };
        new.revive();
        new.faults = Default::default();
        new.flush_ns = *self.rng.pick(&[0, 2_000_000]);
        match self.rng.below(6) {
            0 => new.blank(),
            1 => new.overwrite(&[self.rng.next_u64() as u8; BLOCK]),
            _ => {}
        }
        if own {
            self.paths.note(Event::HalfReplacedByItself);
        }
        self.flash.coming = Some(new);
        own
    }

    /// Copies a part of a device, as the daemon does while the pool is served.
    fn copy_some(&mut self) -> Outcome {
        let Some(mut copy) = self.replacing.copy.take() else {
            return Ok(());
        };
        if self.flash.lost() != copy.plan.lost {
            trace!(self, "a device is lost while one is copied");
            self.replacing.copy = Some(copy);
            self.call_off_replacement();
            return Ok(());
        }
        if !copy.done {
            self.copy_part_of(&mut copy)?;
        }
        self.replacing.copy = Some(copy);
        Ok(())
    }

    fn copy_part_of(&mut self, copy: &mut Copying) -> Outcome {
        let subject = self.subject()?;
        let told = |segment: usize| subject.touched(copy.plan.segments[segment].0);
        let Some(mut part) = copy.now.take().or_else(|| {
            let segment = copy.due.pop()?;
            let before = told(segment);
            let at = 0;
            // Before it is read: what is written from here on shows.
            Some(Part {
                segment,
                at,
                before,
            })
        }) else {
            let due = |segment: &usize| {
                let now = told(*segment);
                now.is_some() && now != copy.copied[*segment]
            };
            copy.due = (0..copy.copied.len()).filter(due).collect();
            let few = copy.passes > 0 && copy.due.len() <= FEW;
            copy.done = copy.due.is_empty() || few || copy.passes == PASSES;
            copy.passes += 1;
            if copy.done {
                trace!(self, "device {} is copied", copy.place);
                let coming = self.flash.coming.as_mut();
                coming.into_iter().for_each(SimDevice::flush_now);
            }
            return Ok(());
        };
        let (_, (device, from)) = copy.plan.segments[part.segment];
        let at = part.segment as u64 * copy.plan.bytes + part.at;
        let len = PART.min(copy.plan.bytes - part.at);
        let (from, to) = ((device, from + part.at), copy.plan.to + at);
        if !self.flash.copy_part(from, to, len as usize) {
            // It is looked at when nobody writes.
            copy.copied[part.segment] = None;
            return Ok(());
        }
        part.at += len;
        match part.at < copy.plan.bytes {
            true => copy.now = Some(part),
            false => copy.copied[part.segment] = part.before,
        }
        Ok(())
    }

    /// Does this life end with a replacement?
    pub(crate) fn wants_switch(&mut self) -> bool {
        let may = !self.cut_short && !self.unheard && !self.given_up;
        self.replacing.copy.is_some() && may && self.rng.chance(3, 4)
    }

    /// Copies what is left of a device.
    pub(crate) fn copy_the_rest(&mut self) -> Outcome {
        for _ in 0..COPY_STEPS_MAX {
            match &self.replacing.copy {
                Some(copy) if !copy.done => self.copy_some()?,
                _ => return Ok(()),
            }
        }
        Err("a device is never copied".into())
    }

    /// The numbers that the log has for the segments that were copied.
    pub(crate) fn copied_segments(&self) -> Vec<u32> {
        let copy = self.replacing.copy.as_ref();
        let segments = copy.map(|copy| copy.plan.segments.iter().map(|(number, _)| *number));
        segments.map_or_else(Vec::new, Iterator::collect)
    }

    /// The pool was closed, or was not, and nobody writes to what was copied any more.
    pub(crate) fn copy_is_at_rest(&mut self, touched: Vec<Option<u64>>, closed: bool) {
        let Some(copy) = self.replacing.copy.take() else {
            return;
        };
        if !closed || !copy.done || self.flash.lost() != copy.plan.lost {
            self.replacing.copy = Some(copy);
            return self.call_off_replacement();
        }
        let what = Replacement {
            place: copy.place,
            lost: copy.plan.lost,
            copied: copy.copied,
            touched,
            seed: 0,
        };
        self.replacing.ready = Some((what, copy.own));
    }

    /// Nothing comes of what was copied so far.
    pub(crate) fn call_off_replacement(&mut self) {
        let copy = self.replacing.copy.take();
        let copy = copy.map(|copy| (copy.place, copy.own));
        let ready = self.replacing.ready.take();
        let Some((place, own)) = copy.or(ready.map(|(what, own)| (what.place, own))) else {
            return;
        };
        self.put_back(place, own);
    }

    /// What was to come is none of the pool, or is what was lost of it.
    fn put_back(&mut self, place: usize, own: bool) {
        if own {
            self.flash.exchange(place);
            self.flash.coming = None;
        } else if let Some(coming) = self.flash.coming.take() {
            self.flash.set_aside(place, coming);
        }
    }

    /// Between two lives: replaces a device, or goes through with what was begun.
    pub(crate) fn replace_half(&mut self) -> Outcome {
        if std::mem::take(&mut self.replacing.returns) {
            self.flash.revive();
            return Ok(());
        }
        if self.profile.replace == 0 || self.given_up || self.marker {
            return Ok(());
        }
        let mut replaced = None;
        if let Some((what, own)) = self.replacing.ready.take() {
            self.paths.note(Event::HalfCopied);
            replaced = Some(what.place);
            self.carry_out(what, own)?;
        } else if self.rng.chance(self.profile.replace, 100) {
            let maker = self.maker;
            let lost = maker.lost(&mut self.flash.media(None).0)?;
            let place = match lost {
                0 => self.rng.below(self.flash.count() as u64) as usize,
                lost => lost.trailing_zeros() as usize,
            };
            self.flash.set_victim(place);
            let own = self.new_device(place, lost != 0);
            let what = Replacement {
                place,
                lost,
                ..Replacement::default()
            };
            replaced = Some(place);
            self.carry_out(what, own)?;
        }
        self.old_instead(replaced)
    }

    fn carry_out(&mut self, mut what: Replacement, own: bool) -> Outcome {
        let place = what.place;
        what.seed = self.rng.next_u64();
        let maker = self.maker;
        let old = maker.listed(&mut self.flash.media(None).0, place)?;
        let doom = self.rng.below(DOOM);
        let mut may_fail = false;
        match self.rng.below(8) {
            0 => self.flash.dies_after(place as u16, Some(doom)),
            1 => {
                may_fail = true;
                let coming = self.flash.coming.as_mut();
                coming.into_iter().for_each(|d| d.dies_after(Some(doom)));
            }
            _ => {}
        }
        let cut = self.rng.chance(1, 2).then(|| self.rng.below(STEPS));
        let (media, new, meter) = self.flash.media_and_coming(cut);
        let new = new.ok_or("there is no new device")?;
        let done = maker.replace_half(media, new, &what);
        let tripped = meter.tripped();
        self.check_media()?;
        trace!(
            self,
            "DEVICE {place} IS REPLACED by {} after {} steps: {done:?}, cut off: {tripped}, lost: {}",
            if own { "itself" } else { "another one" },
            meter.used(),
            what.lost
        );
        let coming = self.flash.coming.as_mut();
        coming.into_iter().for_each(|d| d.dies_after(None));
        match own {
            true => self.put_back(place, true),
            false => {
                self.replacing.pending = Some(Pending {
                    place,
                    old,
                    new_is_there: false,
                });
            }
        }
        match &done {
            _ if tripped => self.paths.note(Event::HalfReplaceCutOff),
            Ok(()) => self.paths.note(Event::HalfReplaced),
            Err(_) if may_fail => self.paths.note(Event::HalfReplaceFailed),
            Err(e) => return Err(format!("device {place} cannot be replaced: {e}")),
        }
        if tripped || self.rng.chance(1, 4) {
            let unclean = self.unclean;
            self.crash();
            self.unclean = unclean;
        }
        Ok(())
    }

    /// Of two devices that of the pool is in its place, by what the others say now.
    pub(crate) fn put_in_place(&mut self) -> Outcome {
        let Some(pending) = &mut self.replacing.pending else {
            return Ok(());
        };
        let (place, maker) = (pending.place, self.maker);
        let listed = maker.listed(&mut self.flash.media(None).0, place)?;
        let is_new = listed != pending.old;
        if is_new != pending.new_is_there {
            self.flash.exchange(place);
            pending.new_is_there = is_new;
        }
        trace!(self, "device {place} is the new one: {is_new}");
        Ok(())
    }

    /// Now and then a device that was replaced is there, and the new one is not. If one was replaced just now, it is that one: until the
    /// pool was opened with it, the others alone say that it counts, and with one of them gone, too, there would be two in trouble.
    fn old_instead(&mut self, replaced: Option<usize>) -> Outcome {
        let maker = self.maker;
        let place = match &self.replacing.pending {
            Some(pending) if self.rng.chance(1, 4) => pending.place,
            None if self.rng.chance(1, 10) => {
                let lost = maker.lost(&mut self.flash.media(None).0)?;
                let others_are_there = |place: usize, _: u64| {
                    lost & !bit(place) == 0 && replaced.is_none_or(|there| there == place)
                };
                let Some((place, old)) = self.flash.take_aside(others_are_there) else {
                    return Ok(());
                };
                self.flash.set_victim(place);
                self.flash.coming = self.flash.put(place, old);
                self.flash.dies_after(place as u16, None);
                place
            }
            _ => return Ok(()),
        };
        if let Some(device) = self.flash.device(place as u16) {
            device.revive();
        }
        self.paths.note(Event::OldCameInstead);
        let joined = maker.join(&mut self.flash.media(None).0);
        self.check_media()?;
        trace!(
            self,
            "THE DEVICE THAT WAS IN PLACE {place} IS THERE INSTEAD: {:?}",
            joined.as_ref().map(|spread| spread.lost())
        );
        let missing = joined.is_err() && self.rng.chance(1, 2);
        let pending = self.replacing.pending.is_some();
        match joined {
            // Then the pool is started without it, with the new one or with neither.
            Err(_) if pending => {
                let new = self.flash.coming.as_mut().filter(|_| missing);
                new.into_iter().for_each(SimDevice::kill);
                return Ok(());
            }
            Err(_) => {
                self.flash.exchange(place);
                let new = self.flash.device(place as u16).filter(|_| missing);
                new.into_iter().for_each(SimDevice::kill);
            }
            Ok(_) => self.replacing.pending = None,
        }
        self.put_back(place, false);
        Ok(())
    }

    /// The pool was started: what is of it is durable. If it is whole, the trouble may be another device's.
    pub(crate) fn replacement_is_over(&mut self) {
        if self.profile.replace == 0 {
            return;
        }
        if let Some(pending) = self.replacing.pending.take() {
            self.put_back(pending.place, false);
        }
        let whole = self.flash.lost() == 0 && self.flash.dead().is_none();
        if whole && self.rng.chance(1, 2) {
            let place = self.rng.below(self.flash.count() as u64) as usize;
            if place != self.flash.victim() {
                trace!(self, "the trouble is device {place}'s");
                self.paths.note(Event::OtherTurn);
            }
            self.flash.set_victim(place);
        }
    }
}
