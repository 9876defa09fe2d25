//! The flash devices of a world: mostly one, and sometimes two or three of unequal size under one log.
//!
//! The world speaks of blocks of the log ([`hearth_io::Spread`] says on which device each lies), and a
//! power cut takes from every device what that one had not made durable, each its own choice.

use crate::content::BLOCK;
use crate::device::{Faults, Image, SimDevice};
use crate::media::{Meter, SimMedia};
use crate::prng::Prng;
use hearth_io::{Joined, Media, Spread};
use std::ops::Range;

/// What the blocks of the world's log lie on.
pub(crate) struct Flashes {
    devices: Vec<SimDevice>,
    spread: Spread,
    /// Everything is there twice, so the trouble is all this one's.
    victim: Option<usize>,
    /// One that is to take another's place, or that another one took the place of: it may be either until that is durable.
    pub coming: Option<SimDevice>,
    /// Those that were of the pool, or were to be, and the places of that.
    aside: Vec<(usize, SimDevice)>,
    rng: Prng,
}

/// Most devices that are kept aside.
const ASIDE_MAX: usize = 2;

impl Flashes {
    pub fn new(devices: Vec<SimDevice>, twice: bool, mut rng: Prng) -> Flashes {
        let victim = twice.then(|| rng.below(devices.len() as u64) as usize);
        Flashes {
            devices,
            spread: Spread::one(),
            victim,
            coming: None,
            aside: Vec::new(),
            rng,
        }
    }

    /// Which one gets the trouble.
    pub fn victim(&self) -> usize {
        self.victim.unwrap_or(0)
    }

    /// From now on it is another one's.
    pub fn set_victim(&mut self, place: usize) {
        self.victim = Some(place);
        let all = self.devices.iter_mut().enumerate();
        for (_, device) in all.filter(|(n, _)| *n != place) {
            device.dies_after(None);
        }
    }

    /// Devices that are lost, as the pool that is served has it: the bits of their places.
    pub fn lost(&self) -> u64 {
        self.spread.lost()
    }

    /// Puts a device into a place. The one that was there.
    pub fn put(&mut self, place: usize, device: SimDevice) -> Option<SimDevice> {
        let there = self.devices.get_mut(place)?;
        Some(std::mem::replace(there, device))
    }

    /// Changes the device in a place for the one that is coming, or that went.
    pub fn exchange(&mut self, place: usize) {
        if let Some(coming) = self.coming.take() {
            self.coming = self.put(place, coming);
        }
    }

    /// Keeps a device that is none of the pool.
    pub fn set_aside(&mut self, place: usize, device: SimDevice) {
        self.aside.push((place, device));
        if self.aside.len() > ASIDE_MAX {
            drop(self.aside.remove(0));
        }
    }

    /// One of those, if there is one that is large enough: the place that it had.
    pub fn take_aside(&mut self, fits: impl Fn(usize, u64) -> bool) -> Option<(usize, SimDevice)> {
        let mut all = self.aside.iter();
        let at = all.position(|(place, device)| fits(*place, device.size()))?;
        Some(self.aside.remove(at))
    }

    /// Copies a part of a device to the one that is coming. False: it cannot be read.
    pub fn copy_part(&mut self, from: (u16, u64), to: u64, len: usize) -> bool {
        let mut bytes = vec![0; len];
        let read = match self.device(from.0) {
            Some(device) => device.media(None).read_at(from.1, &mut bytes).is_ok(),
            None => false,
        };
        let new = self.coming.as_mut().filter(|_| read);
        new.is_some_and(|new| new.media(None).write_at(to, &bytes).is_ok())
    }

    /// Each of the pool as [`hearth_io::Media`], and the one that is coming, with one plug.
    pub fn media_and_coming(
        &mut self,
        cut: Option<u64>,
    ) -> (Vec<SimMedia<'_>>, Option<SimMedia<'_>>, Meter) {
        let meter = Meter::new(cut);
        let media = |d| SimMedia::metered(d, meter.clone());
        let devices = self.devices.iter_mut().map(media).collect();
        (devices, self.coming.as_mut().map(media), meter.clone())
    }

    /// All of them, and those that are none of the pool.
    fn everything(&mut self) -> impl Iterator<Item = &mut SimDevice> {
        let aside = self.aside.iter_mut().map(|(_, device)| device);
        self.devices.iter_mut().chain(&mut self.coming).chain(aside)
    }

    /// Everything is on two of them.
    pub fn are_twice(&self) -> bool {
        self.victim.is_some()
    }

    /// Where everything is there twice: before a start one device may be gone, or back as it was when it died, or about to
    /// die.
    pub fn comes_or_goes(&mut self, revival: u64) -> Option<&'static str> {
        let (rng, victim) = (&mut self.rng, self.victim?);
        let device = self.devices.get_mut(victim)?;
        if device.is_dead() {
            return rng.chance(revival, 100).then(|| {
                device.revive();
                "one flash device is back"
            });
        }
        match rng.below(8) {
            0 => {
                device.kill();
                Some("one flash device is missing")
            }
            1 => {
                device.dies_after(Some(rng.below(40)));
                Some("one flash device is about to die")
            }
            _ => None,
        }
    }

    pub fn are_several(&self) -> bool {
        self.devices.len() > 1
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// One more, which may become one of the pool.
    pub fn push(&mut self, device: SimDevice) {
        self.devices.push(device);
    }

    /// Only these are left, in this order.
    pub fn keep(&mut self, list: &[usize]) {
        let mut all: Vec<Option<SimDevice>> = self.devices.drain(..).map(Some).collect();
        let kept = list.iter().filter_map(|i| all.get_mut(*i)?.take());
        self.devices = kept.collect();
    }

    pub fn device(&mut self, n: u16) -> Option<&mut SimDevice> {
        self.devices.get_mut(usize::from(n))
    }

    /// The devices are formatted: where what lies.
    pub fn set_spread(&mut self, spread: Spread) {
        self.spread = spread;
    }

    /// Each as [`hearth_io::Media`]. After `cut` writes and flushes of any of them the plug of all is pulled.
    pub fn media(&mut self, cut: Option<u64>) -> (Vec<SimMedia<'_>>, Meter) {
        let meter = Meter::new(cut);
        let devices = self.devices.iter_mut();
        let media = devices.map(|d| SimMedia::metered(d, meter.clone()));
        (media.collect(), meter)
    }

    /// All of them as one.
    pub fn joined(&mut self, cut: Option<u64>) -> (Joined<SimMedia<'_>>, Meter) {
        let spread = self.spread.clone();
        let (media, meter) = self.media(cut);
        (Joined::new(spread, media), meter)
    }

    /// What a driver did that it must not.
    pub fn violation(&mut self) -> Option<String> {
        self.everything().find_map(|d| d.violation.take())
    }

    /// What was answered for ends.
    pub fn pay(&mut self) {
        self.devices.iter_mut().for_each(SimDevice::pay);
    }

    pub fn power_cut(&mut self) {
        self.everything().for_each(SimDevice::power_cut);
    }

    pub fn process_death(&mut self) {
        self.everything().for_each(SimDevice::process_death);
    }

    /// Any of them is: then the log is not served.
    pub fn is_dead(&self) -> bool {
        !self.are_twice() && self.devices.iter().any(SimDevice::is_dead)
    }

    /// Which one is.
    pub fn dead(&self) -> Option<usize> {
        self.devices.iter().position(SimDevice::is_dead)
    }

    /// One of them dies with a step of a start or a stop, or does not.
    pub fn dies_after(&mut self, device: u16, steps: Option<u64>) {
        if let Some(device) = self.device(device) {
            device.dies_after(steps);
        }
    }

    /// One of them dies.
    pub fn kill(&mut self) {
        if let Some(device) = self.some() {
            device.kill();
        }
    }

    /// Contents of each device now.
    pub fn images(&self) -> Vec<Image> {
        self.devices.iter().map(SimDevice::image).collect()
    }

    /// Drawn for the flash alone, so that the rest of a seed is as it was.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.rng.chance(percent, 100)
    }

    /// Restores the contents of each device, durably.
    pub fn come_back_with(&mut self, images: &[Image]) {
        for (device, image) in self.devices.iter_mut().zip(images) {
            device.come_back_with(image);
        }
    }

    /// Other devices have taken their place.
    pub fn blank(&mut self) {
        self.devices.iter_mut().for_each(SimDevice::blank);
        self.spread = Spread::one();
    }

    /// Somebody has discarded all of them.
    pub fn erase(&mut self) {
        self.devices.iter_mut().for_each(SimDevice::blank);
    }

    pub fn revive(&mut self) {
        let dead = self.devices.iter_mut().filter(|d| d.is_dead());
        dead.for_each(SimDevice::revive);
    }

    /// One of them has no room any more.
    pub fn fill(&mut self) {
        if let Some(device) = self.some() {
            device.faults.full = true;
        }
    }

    fn some(&mut self) -> Option<&mut SimDevice> {
        let n = match self.devices.len() as u64 {
            0 | 1 => 0,
            _ if self.are_twice() => self.victim.unwrap_or(0) as u64,
            several => self.rng.below(several),
        };
        self.devices.get_mut(n as usize)
    }

    /// How each fails from now on. Places are bytes of the log.
    pub fn set_faults(&mut self, faults: &Faults) {
        for (n, device) in (0..).zip(&mut self.devices) {
            if self.victim.is_some_and(|victim| victim != usize::from(n)) {
                continue;
            }
            let here = |ranges: &[Range<u64>]| -> Vec<Range<u64>> {
                let here = ranges.iter().filter_map(|r| {
                    let (device, at) = self.spread.place(r.start);
                    (device == n).then(|| at..at + (r.end - r.start))
                });
                here.collect()
            };
            device.faults = Faults {
                bad_ranges: here(&faults.bad_ranges),
                bad_places: here(&faults.bad_places),
                ..faults.clone()
            };
        }
    }

    /// A block of the log cannot be read any more.
    pub fn block_goes_bad(&mut self, index: usize) {
        let (device, at) = self.spread.place(index as u64 * BLOCK as u64);
        if let Some(device) = self.device(device) {
            let ranges = &mut device.faults.bad_ranges;
            ranges.push(at..at + BLOCK as u64);
        }
    }

    /// Operations in flight.
    pub fn busy(&self) -> usize {
        self.devices.iter().map(SimDevice::busy).sum()
    }

    /// Blocks of the log.
    pub fn blocks(&self) -> usize {
        match self.spread.len() {
            Some(bytes) => (bytes / BLOCK as u64) as usize,
            None => self.devices.first().map_or(0, SimDevice::blocks),
        }
    }

    /// Which block of the log a byte of a device is, if any.
    pub fn index_of(&self, device: u16, offset: u64) -> Option<usize> {
        let whole = self.spread.whole(device, offset)?;
        Some((whole / BLOCK as u64) as usize)
    }

    fn place(&self, index: usize) -> (usize, usize) {
        let (device, at) = self.spread.read_place(index as u64 * BLOCK as u64);
        (usize::from(device), (at / BLOCK as u64) as usize)
    }

    pub fn touched(&self, index: usize) -> bool {
        let (device, at) = self.place(index);
        self.devices.get(device).is_some_and(|d| d.touched(at))
    }

    pub fn visible_block(&self, index: usize) -> [u8; BLOCK] {
        let (device, at) = self.place(index);
        let device = self.devices.get(device);
        device.map_or([0; BLOCK], |d| d.visible_block(at))
    }

    pub fn rot(&mut self, index: usize) {
        let (device, at) = self.place(index);
        if let Some(device) = self.devices.get_mut(device) {
            device.rot(at);
        }
    }
}
