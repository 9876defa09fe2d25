//! What happens to legs: they fail, hang, vanish, lose power, come back, perhaps with what they held long ago; they are
//! added and removed, and scrubbed, while all of that goes on.
//!
//! There is always another leg that holds the disk and is well. So no request may fail, and nothing may be lost.

use super::{DiskCache, Due, LegFault, Mirrored};
use crate::content::BLOCK;
use crate::device::Faults;
use crate::paths::Event;
use hearth_format::Uuid;
use hearth_format::mirror::{LegStamp, LegState, MirrorStamps};
use hearth_mirror::machine::LegReport;

/// Most legs at a time.
const LEGS_MAX: usize = 4;
/// Legs that a mirror may ever have had.
const EVER_MAX: u8 = 200;
/// What a removal takes to be recorded.
const RECORD_NS: (u64, u64) = (1_000_000, 30_000_000);

/// How a leg behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Well,
    /// Answers everything with an error.
    Broken,
    /// Answers nothing, or not always.
    Hanging,
    /// Fails now and then, half done.
    Flaky,
    /// Takes longer than it may.
    Slow,
    /// It was not there at the start.
    Gone,
}

/// A leg goes for good.
pub(super) struct Removal {
    number: u8,
    id: Uuid,
}

impl Mirrored {
    /// From now on legs get into trouble.
    pub fn hurt(&mut self) {
        self.rough = true;
    }

    /// From now on all legs are there at every start.
    pub fn spare_starts(&mut self) {
        self.harsh = false;
    }

    /// All is well again: what is out comes back, and what waits goes on.
    pub fn heal(&mut self) {
        self.rough = false;
        for i in 0..self.legs.len() {
            self.recover(i);
        }
        if let Some(machine) = &mut self.machine {
            // It has no clock of its own; what it is told next has the time.
            let now = self.last_ns;
            machine.pause(now, false);
            machine.set_rate(now, 0);
        }
    }

    fn recover(&mut self, i: usize) {
        let Some(leg) = self.legs.get_mut(i) else {
            return;
        };
        leg.mood = Mood::Well;
        leg.device.faults = Faults::default();
        leg.device.revive();
        let number = leg.number;
        for token in std::mem::take(&mut leg.hung) {
            self.due.push((Some(0), Due::Leg(number, token)));
        }
    }

    fn report(&self) -> Vec<LegReport> {
        let machine = self.machine.as_ref();
        machine.map_or_else(Vec::new, |m| m.report())
    }

    /// Legs of which another one holds the disk and is well.
    fn spare(&self) -> Vec<usize> {
        let report = self.report();
        let well = |i: &usize| {
            let leg = self.legs.get(*i);
            let well = leg.is_some_and(|l| l.mood == Mood::Well && l.hung.is_empty());
            let at = report.get(*i);
            well && at.is_some_and(|l| l.state == LegState::Current && l.present && !l.removed)
        };
        let sound: Vec<usize> = (0..report.len()).filter(well).collect();
        let spare = |i: &usize| {
            let stays = report.get(*i).is_some_and(|l| !l.removed);
            stays && sound.iter().any(|s| s != i)
        };
        (0..report.len()).filter(spare).collect()
    }

    /// Something may happen to a leg.
    pub fn trouble(&mut self, now: u64, cache: DiskCache) -> Result<(), String> {
        if !self.rough || self.machine.is_none() {
            return Ok(());
        }
        match self.rng.below(20) {
            0..=6 => self.fall_ill(),
            7..=11 => {
                let i = self.rng.below(self.legs.len() as u64) as usize;
                self.say(|| format!("the leg at {i} is well again"));
                self.recover(i);
            }
            12 => {
                let i = self.rng.below(self.legs.len() as u64) as usize;
                let leg = &mut self.legs[i];
                leg.image = Some(leg.device.image());
            }
            13 | 14 => self.come_old(now)?,
            15 => self.add(now),
            16 => self.remove(now),
            17 | 18 => {
                let call_off = self.rng.chance(1, 4);
                let legs = self.legs.len() as u64;
                let prefer = (self.rng.chance(1, 2)).then(|| self.rng.below(legs) as usize);
                let machine = self.machine.as_mut().ok_or("no machine")?;
                if call_off {
                    machine.cancel_scrub(now);
                } else if machine.scrub(now, 0, None, prefer, true) {
                    self.say(|| "a scrub begins".to_owned());
                }
            }
            _ => {
                let (pause, rate) = (self.rng.chance(1, 4), *self.rng.pick(&[0, 0, 1 << 20]));
                let machine = self.machine.as_mut().ok_or("no machine")?;
                machine.pause(now, pause);
                machine.set_rate(now, rate);
            }
        }
        self.act(now, cache)
    }

    fn fall_ill(&mut self) {
        let spare = self.spare();
        if spare.is_empty() {
            return;
        }
        let i = *self.rng.pick(&spare);
        let mood = *self.rng.pick(&[
            Mood::Broken,
            Mood::Hanging,
            Mood::Hanging,
            Mood::Flaky,
            Mood::Flaky,
            Mood::Slow,
        ]);
        self.say(|| format!("the leg at {i} is {mood:?}"));
        let rare = *self.rng.pick(&[10_000, 3000, 300]);
        let leg = &mut self.legs[i];
        leg.mood = mood;
        leg.device.faults = match mood {
            Mood::Hanging => Faults {
                hang: rare,
                ..Faults::default()
            },
            Mood::Flaky => Faults {
                read_eio: 2000,
                write_eio: rare / 30,
                flush_eio: rare / 30,
                ..Faults::default()
            },
            Mood::Slow => Faults {
                slow: 3000,
                ..Faults::default()
            },
            _ => Faults::default(),
        };
        if mood == Mood::Broken {
            leg.device.kill();
        }
    }

    /// A leg that is out loses power, or comes back with what it held long ago.
    fn come_old(&mut self, now: u64) -> Result<(), String> {
        let report = self.report();
        let out = |i: &usize| report[*i].state == LegState::Out && !report[*i].removed;
        let out: Vec<usize> = (0..report.len()).filter(out).collect();
        if out.is_empty() {
            return Ok(());
        }
        let i = *self.rng.pick(&out);
        let tokens: Vec<u64> = self.legs[i].flying.keys().copied().collect();
        self.legs[i].device.kill();
        for token in tokens {
            self.end_leg(now, i, token)?;
        }
        self.legs[i].device.power_cut();
        if self.rng.chance(1, 2)
            && let Some(image) = self.legs[i].image.clone()
        {
            self.say(|| format!("the leg at {i} comes back old"));
            self.events.push(Event::LegCameOld);
            self.legs[i].device.come_back_with(&image);
            self.legs[i].changed = true;
            let id = self.legs[i].id;
            if let Some(noting) = &mut self.noting {
                noting.knows.retain(|known| *known != id);
            }
        }
        self.recover(i);
        Ok(())
    }

    /// Legs that are well are offered again.
    pub(super) fn call_back(&mut self, now: u64) {
        for (i, report) in self.report().iter().enumerate() {
            let Some(leg) = self.legs.get_mut(i) else {
                continue;
            };
            let answers = matches!(leg.mood, Mood::Well | Mood::Flaky | Mood::Slow);
            let out = report.state == LegState::Out && !report.removed;
            if !out || !answers || now < leg.next_ns {
                continue;
            }
            if let Some(machine) = &mut self.machine {
                machine.returned(now, i, leg.changed);
            }
        }
    }

    /// Before a start a leg may have been exchanged for another one, or an older one, if one is left that holds the disk.
    /// As a start finds that, it is copied to as a whole.
    pub(super) fn exchange(&mut self, stamps: &mut MirrorStamps, present: &[bool]) {
        for i in 0..self.legs.len() {
            let holds = |j: &usize| {
                let leg = stamps.legs.get(*j);
                let current = leg.is_some_and(|l| l.state == LegState::Current);
                *j != i && present[*j] && current && !self.legs[*j].changed
            };
            let others = (0..self.legs.len()).any(|j| holds(&j));
            if self.harsh && present[i] && others && self.rng.chance(1, 25) {
                self.events.push(Event::LegCameOld);
                let leg = &mut self.legs[i];
                match leg.image.clone() {
                    Some(image) => leg.device.come_back_with(&image),
                    None => leg.device.blank(),
                }
                leg.changed = true;
            }
            if present[i]
                && self.legs[i].changed
                && let Some(stamp) = stamps.legs.get_mut(i)
            {
                (stamp.state, stamp.whole, stamp.copied) = (LegState::Behind, true, 0);
            }
        }
    }

    /// A leg that holds something else: first its name is durable, then the mirror is told.
    fn add(&mut self, now: u64) {
        if self.pool_gone || self.record.legs.len() >= LEGS_MAX || self.ever >= EVER_MAX {
            return;
        }
        let leg = self.make_leg(true);
        self.events.push(Event::LegAdded);
        self.record.legs.push(LegStamp {
            id: leg.id,
            generation: 0,
            state: LegState::Behind,
            whole: true,
            copied: 0,
            left: (0, 0),
        });
        let id = leg.id;
        self.legs.push(leg);
        if let Some(machine) = &mut self.machine {
            machine.add(now, id);
        }
        self.wants_crash |= self.rng.chance(1, 6);
    }

    /// A leg goes: first from the mirror, then from the record, and then it is somebody else's.
    fn remove(&mut self, now: u64) {
        let spare = self.spare();
        if self.pool_gone || self.removing.is_some() || spare.is_empty() {
            return;
        }
        let i = *self.rng.pick(&spare);
        let Some(machine) = &mut self.machine else {
            return;
        };
        if !machine.remove(now, i) {
            return;
        }
        self.say(|| format!("the leg at {i} is removed"));
        let (number, id) = (self.legs[i].number, self.legs[i].id);
        self.removing = Some(Removal { number, id });
        let time = self.rng.between(RECORD_NS.0, RECORD_NS.1);
        self.due.push((Some(time), Due::Removed(number)));
        if self.fault == LegFault::RemovalUnnoted {
            self.is_anybodys(i);
        }
        self.wants_crash |= self.rng.chance(1, 3);
    }

    /// Whoever removed a leg uses it for something else.
    fn is_anybodys(&mut self, i: usize) {
        let Some(leg) = self.legs.get_mut(i) else {
            return;
        };
        leg.device.overwrite(&[0xEE; BLOCK]);
    }

    /// It stands in the record, and whoever asked for it is told.
    pub(super) fn removed(&mut self, number: u8) {
        let Some(removal) = self.removing.take().filter(|r| r.number == number) else {
            return;
        };
        if self.pool_gone {
            // It is not acknowledged.
            return;
        }
        self.events.push(Event::LegRemoved);
        self.record.legs.retain(|l| l.id != removal.id);
        if let Some(i) = self.legs.iter().position(|l| l.number == number) {
            self.is_anybodys(i);
        }
    }

    pub(super) fn removal_at_crash(&mut self) {
        if let Some(removal) = self.removing.take()
            && !self.pool_gone
            && self.rng.chance(1, 2)
        {
            self.record.legs.retain(|l| l.id != removal.id);
        }
    }
}
