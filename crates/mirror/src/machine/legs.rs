//! Legs that go out and come back, and which of them is read.

use super::{Action, Io, IoId, Leg, Machine, NoneCurrent, What, Why, ZEROES_PER_SECOND};
use crate::regions::Regions;
use hearth_format::Uuid;
use hearth_format::mirror::{LegStamp, LegState};
use hearth_io::IoError;
use std::collections::HashSet;

/// How many operations more a leg may have if all of the disk lies between its reads and those of another one.
/// Half the depth that a hard disk makes use of: then it seeks over its own part of the disk, and still has no more
/// to do than it can order well.
const REACH: u128 = 16;
/// How many reads it takes until a leg's part is where they are.
const DRIFT: u64 = 8;

/// A leg that is read on where it stopped may have so many more operations than the others.
const STREAM_LEAD: usize = 4;

impl Leg {
    pub(super) fn new(stamp: LegStamp, count: u32, present: bool) -> Leg {
        Leg {
            stamp,
            behind: Regions::none(count),
            stuck: Regions::none(count),
            resync: None,
            load: 0,
            ghosts: HashSet::new(),
            doubt: false,
            head: 0,
            center: 0,
            joining: None,
            removed: false,
            present,
            why: None,
            copied: 0,
        }
    }

    pub(super) fn is_current(&self) -> bool {
        self.stamp.state == LegState::Current
    }

    /// Its part of the disk moves towards a read.
    pub(super) fn drift(&mut self, offset: u64) {
        let step = self.center.abs_diff(offset) / DRIFT;
        self.center = match offset > self.center {
            true => self.center + step,
            false => self.center - step,
        };
    }

    /// It takes writes.
    pub(super) fn is_live(&self) -> bool {
        !self.removed && self.stamp.state != LegState::Out
    }

    pub(super) fn is_copied_to(&self) -> bool {
        self.is_live() && (self.resync.is_some() || !self.behind.is_empty())
    }
}

impl Machine {
    /// What the notes say, and what is there, decides which leg is believed.
    pub(super) fn begin(
        &mut self,
        touched: &Regions,
        witness: Option<usize>,
    ) -> Result<(), NoneCurrent> {
        let current = |leg: &Leg| leg.is_current();
        #[cfg(any(test, feature = "faults"))]
        let believed = |leg: &Leg| current(leg) || crate::faults::is_believing();
        #[cfg(not(any(test, feature = "faults")))]
        let believed = current;
        let fit = |leg: &Leg| leg.present && believed(leg);
        let witness = witness.filter(|i| self.legs.get(*i).is_some_and(fit));
        let Some(chosen) = witness.or_else(|| self.legs.iter().position(fit)) else {
            let missing = self.legs.iter().filter(|l| current(l));
            return Err(NoneCurrent {
                missing: missing.map(|l| l.stamp.id).collect(),
            });
        };
        self.chosen = chosen;
        if let Some(leg) = self.legs.get_mut(chosen) {
            leg.stamp.state = LegState::Current;
        }
        let (region, count) = (self.region, self.count());
        for (i, leg) in self.legs.iter_mut().enumerate() {
            match (leg.stamp.state, leg.present) {
                (LegState::Current, true) if i != chosen => leg.behind = touched.clone(),
                (LegState::Current, true) => {}
                (LegState::Current, false) => {}
                (LegState::Behind | LegState::Out, true) => leg.lack(touched, region, count),
                (LegState::Behind | LegState::Out, false) => {
                    leg.stamp.state = LegState::Out;
                    leg.why = Some(Why::Missing);
                }
            }
        }
        for leg in 0..self.legs.len() {
            if self
                .legs
                .get(leg)
                .is_some_and(|l| l.is_current() && !l.present)
            {
                self.expel(leg, Why::Missing);
                // Even a read may not be answered before: it could have said what only the others know.
                self.read_barrier = self.barrier;
            }
        }
        self.write_note();
        Ok(())
    }

    /// Takes a leg out, unless no other one holds the disk; false then.
    pub(super) fn expel(&mut self, leg: usize, why: Why) -> bool {
        let others = self
            .legs
            .iter()
            .enumerate()
            .any(|(i, l)| i != leg && l.is_current() && !l.removed && l.present);
        let touched = self.touched();
        let Some(out) = self.legs.get_mut(leg).filter(|l| l.is_live()) else {
            return true;
        };
        if out.is_current() && !others {
            return false;
        }
        let was_known = out.is_current() || out.joining.is_some();
        out.stamp.state = LegState::Out;
        out.joining = None;
        out.resync = None;
        out.why = Some(why);
        // What is not durable there for certain, it lacks. What is written from now on is touched as well, and
        // nothing is forgotten while it is out.
        touched.iter().for_each(|r| {
            out.behind.insert(r);
        });
        if was_known {
            self.generation += 1;
            self.barrier = self.next_note;
            self.note_wanted = true;
            // A read could say what this leg does not have, or has otherwise; after a crash it would be as before,
            // and a client that lived on would read it.
            self.read_barrier = self.next_note;
        }
        if self.chosen == leg {
            let stays = |l: &Leg| l.is_current() && !l.removed && l.present;
            let whole = self
                .legs
                .iter()
                .position(|l| stays(l) && l.behind.is_empty());
            let next = whole.or_else(|| self.legs.iter().position(stays));
            if let Some(next) = next {
                self.chosen = next;
            }
            if let Some(chosen) = self.legs.get_mut(self.chosen)
                && !chosen.behind.is_empty()
            {
                // It counts now where they may differ: nothing was answered from the other one there that was not
                // copied to it first.
                let none = Regions::none(chosen.behind.count());
                let differs = std::mem::replace(&mut chosen.behind, none);
                chosen.resync = None;
                // Even what it was given must not be read before it is durable there.
                self.promoted = Some((self.chosen, false));
                // What others have from the one that is out is not what this one has.
                for (i, other) in self.legs.iter_mut().enumerate() {
                    if i == self.chosen || !other.is_live() {
                        continue;
                    }
                    other.joining = None;
                    for region in differs.iter() {
                        other.behind.insert(region);
                        if let Some(resync) = &mut other.resync {
                            resync.again(region);
                        }
                    }
                }
            }
        }
        self.forget_copied(leg);
        self.actions.push(Action::Lost { leg, why });
        self.abandon(leg);
        self.settle_promoted();
        self.write_note();
        true
    }

    /// Nobody waits for what a leg does any more.
    fn abandon(&mut self, leg: usize) {
        let mut ghosts: Vec<(IoId, Io)> = self.ios.extract_if(|_, io| io.leg == leg).collect();
        ghosts.sort_by_key(|(id, _)| *id);
        if let Some(leg) = self.legs.get_mut(leg) {
            leg.ghosts.extend(ghosts.iter().map(|(id, _)| *id));
        }
        for (id, io) in ghosts {
            self.settle(id, io, Err(IoError::Os(libc::ETIMEDOUT)));
        }
    }

    /// Takes legs out that do not answer.
    pub(super) fn expire(&mut self) {
        let late = |io: &&Io| {
            let more = match io.what {
                What::Zero { .. } => io.len / ZEROES_PER_SECOND * 1_000_000_000,
                _ => 0,
            };
            io.start_ns + self.limits.leg_ns + more <= self.now
        };
        let mut silent: Vec<usize> = self.ios.values().filter(late).map(|io| io.leg).collect();
        silent.sort_unstable();
        silent.dedup();
        for leg in silent {
            self.expel(leg, Why::Silent);
        }
    }

    /// The leg to read this range from, of those not tried yet. All of them have the same there.
    pub(super) fn reader(&self, offset: u64, len: u64, tried: &[usize]) -> Option<usize> {
        let regions = || self.regions_of(offset, len);
        let fit = |(i, leg): &(usize, &Leg)| {
            leg.is_current()
                && !leg.removed
                && leg.present
                && !tried.contains(i)
                && !leg.behind.has_any(regions())
        };
        let all = || self.legs.iter().enumerate().filter(fit);
        let least = all().map(|(_, l)| l.load).min()?;
        let streaming = all().find(|(_, l)| l.head == offset && l.load <= least + STREAM_LEAD);
        // Legs share the disk by position, and their parts follow what is read.
        let cost = |leg: &Leg| {
            let queue = leg.load as u128 * u128::from(self.size);
            queue + REACH * u128::from(leg.center.abs_diff(offset))
        };
        let cheapest = all().min_by_key(|(_, l)| cost(l));
        streaming.or(cheapest).map(|(i, _)| i)
    }

    /// Legs a change goes to.
    pub(super) fn live(&self) -> Vec<usize> {
        let live = self.legs.iter().enumerate().filter(|(_, l)| l.is_live());
        live.map(|(i, _)| i).collect()
    }

    /// True if everything ever sent to a leg has ended.
    pub fn has_ended(&self, leg: usize) -> bool {
        self.legs.get(leg).is_some_and(|l| l.ghosts.is_empty())
    }

    /// A leg that was out is there again; false if that cannot be yet, because what was sent to it may still
    /// arrive by the same door. If that may be by another one, or it is not known whether the leg is as it was
    /// left (`changed`), it is copied to as a whole.
    pub fn returned(&mut self, now: u64, leg: usize, changed: bool) -> bool {
        self.now = now;
        let (touched, region, count) = (self.touched(), self.region, self.count());
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::ReturnsWithGhosts)
            && let Some(leg) = self.legs.get_mut(leg)
        {
            leg.ghosts.clear();
        }
        let Some(back) = self
            .legs
            .get_mut(leg)
            .filter(|l| !l.is_live() && !l.removed)
        else {
            return false;
        };
        if !back.ghosts.is_empty() {
            return false;
        }
        back.present = true;
        if changed || back.doubt {
            back.stamp.whole = true;
            back.stamp.copied = 0;
        }
        back.load = 0;
        back.doubt = false;
        back.lack(&touched, region, count);
        self.note_wanted = true;
        self.write_note();
        self.pump_copies();
        true
    }

    /// A new leg, whose content is nobody's. Its place in the mirror.
    pub fn add(&mut self, now: u64, id: Uuid) -> usize {
        self.now = now;
        let stamp = LegStamp {
            id,
            generation: 0,
            state: LegState::Behind,
            whole: true,
            copied: 0,
            left: (0, 0),
        };
        let count = self.count();
        let mut leg = Leg::new(stamp, count, true);
        leg.behind = Regions::all(count);
        self.legs.push(leg);
        self.note_wanted = true;
        self.write_note();
        self.pump_copies();
        self.legs.len() - 1
    }

    /// Takes a leg out for good; false if no other one holds the disk.
    pub fn remove(&mut self, now: u64, leg: usize) -> bool {
        self.now = now;
        if !self.expel(leg, Why::Removed) {
            return false;
        }
        if let Some(leg) = self.legs.get_mut(leg) {
            leg.removed = true;
        }
        self.generation += 1;
        self.barrier = self.next_note;
        self.note_wanted = true;
        self.write_note();
        true
    }
}

impl Leg {
    /// What a leg that was out has to get.
    fn lack(&mut self, touched: &Regions, region: u64, count: u32) {
        self.stamp.state = LegState::Behind;
        let mut behind = touched.clone();
        if self.stamp.whole {
            let from = (self.stamp.copied / region) as u32;
            (from..count).for_each(|r| {
                behind.insert(r);
            });
        }
        self.behind = behind;
        self.stuck = Regions::none(count);
        self.resync = None;
        self.why = None;
    }
}
