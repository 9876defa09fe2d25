//! Flash devices come, go and are replaced between two lives of a world, and are emptied for that during one.
//!
//! Whoever changes them is cut off now and then. Then the devices are the pool either as they were listed before or as they
//! are afterwards, never both ways and never neither, but for the moment in which a first device is replaced, which is
//! finished by doing it again. Whatever was taken out must not be believed any more.

use crate::content::BLOCK;
use crate::device::{Base, SimDevice, Tear};
use crate::paths::Event;
use crate::subject::Reshape;
use crate::world::{Outcome, World, trace};
use hearth_io::Target;

/// Most devices of a world.
const DEVICES_MAX: usize = 4;
/// Most writes and flushes until a change is cut off.
const STEPS: u64 = 60;

impl World<'_> {
    /// Now and then during a life: begins to empty a device, or thinks better of it.
    pub(crate) fn empty_some(&mut self) -> Outcome {
        let devices = self.flash.count() as u64;
        if devices < 2 || !self.rng.chance(1, 60) {
            return Ok(());
        }
        let device = self.rng.between(1, devices - 1) as u16;
        let again = self.rng.chance(1, 3);
        let subject = self.subject()?;
        if subject.is_emptying() {
            if again {
                trace!(self, "the device is not emptied any more");
                self.subject()?.use_device_again();
            }
        } else if subject.empty_device(device) {
            trace!(self, "DEVICE {device} is emptied");
            self.paths.note(Event::DeviceEmptied);
        }
        Ok(())
    }

    /// Between two lives.
    pub(crate) fn reshape(&mut self) -> Outcome {
        let emptied = self.emptied.take();
        let quiet = !self.given_up && !self.marker && !self.flash.is_dead();
        if self.profile.reshape == 0 || !quiet || !self.rng.chance(self.profile.reshape, 100) {
            return Ok(());
        }
        let count = self.flash.count();
        let removes = emptied.map(usize::from).filter(|place| *place < count);
        let what = match (removes, self.rng.below(4)) {
            (Some(place), 0..3) => Reshape::Remove(place),
            // It is refused where something lies on it.
            (None, 0) if count > 1 => {
                Reshape::Remove(self.rng.between(1, count as u64 - 1) as usize)
            }
            (_, 1 | 2) if count < DEVICES_MAX => Reshape::Add,
            _ => Reshape::Replace(self.rng.below(count as u64) as usize),
        };
        let before: Vec<usize> = (0..count).collect();
        let mut after = before.clone();
        match what {
            Reshape::Add => after.push(count),
            Reshape::Replace(place) => after[place] = count,
            Reshape::Remove(place) => {
                after.remove(place);
            }
        }
        if !matches!(what, Reshape::Remove(_)) {
            let spare = self.spare(what);
            self.flash.push(spare);
        }
        let cut = self.rng.chance(1, 2).then(|| self.rng.below(STEPS));
        let seed = self.rng.next_u64();
        let (media, meter) = self.flash.media(cut);
        let done = self.maker.reshape(media, what, seed);
        let tripped = meter.tripped();
        self.check_media()?;
        trace!(
            self,
            "{what:?} after {} steps: {done:?}, cut off: {tripped}",
            meter.used()
        );
        if tripped {
            self.paths.note(Event::ReshapeCutOff);
            let unclean = self.unclean;
            self.crash();
            self.unclean = unclean;
            // The daemon lists all of them until it is durable which are the pool; here the others are gone at once.
            let held = self.flash.images();
            self.flash.come_back_with(&held);
        } else if let Err(e) = &done {
            match what {
                Reshape::Remove(_) if removes.is_none() => {}
                _ => return Err(format!("{what:?} failed: {e}")),
            }
        } else {
            self.paths.note(Event::Reshaped);
        }
        self.look_which(&before, &after, done.is_ok())
    }

    /// A blank device: as large as the one it is to replace, at least.
    fn spare(&mut self, what: Reshape) -> SimDevice {
        let number = self.flash.count() as u16;
        let bytes = match what {
            Reshape::Replace(place) => {
                let more = *self.rng.pick(&[0, 0, 5]);
                let old = self.flash.device(place as u16).map_or(0, |d| d.size());
                old + more * 256 * BLOCK as u64
            }
            _ => (4 << 20) + *self.rng.pick(&[8, 9, 12, 20]) * 256 * BLOCK as u64,
        };
        let mut device = SimDevice::new(
            Target::Flash(number),
            bytes,
            BLOCK as u64,
            Base::Zeros,
            Tear::Anywhere,
            self.rng.fork(),
        );
        device.flush_ns = *self.rng.pick(&[0, 2_000_000]);
        device
    }

    /// Leaves the devices that are the pool now, after looking that the others are not.
    pub(crate) fn look_which(&mut self, before: &[usize], after: &[usize], done: bool) -> Outcome {
        let maker = self.maker;
        for again in [true, false] {
            let (mut media, _) = self.flash.media(None);
            let is_old = maker.is_pool(&mut media, before);
            let is_new = maker.is_pool(&mut media, after);
            let list = match (is_old, is_new) {
                (true, true) => return Err("two lists of devices are the pool".into()),
                (true, false) if done => {
                    return Err("the devices that were the pool still are".into());
                }
                (true, false) => before,
                (false, true) => after,
                (false, false) if again => {
                    maker.finish(&mut media)?;
                    continue;
                }
                (false, false) => return Err("no list of devices is the pool".into()),
            };
            drop(media);
            self.flash.keep(list);
            return self.check_media();
        }
        Ok(())
    }
}
