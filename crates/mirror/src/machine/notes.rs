//! What has to be durable before something else may happen.

use super::{Action, Leg, Machine, Owner, Use};
use crate::regions::Regions;
use hearth_format::mirror::{LegState, Mark, MirrorStamps};
use hearth_io::{BLOCK, IoError};

impl Machine {
    /// Marks what a write is about to touch; the note that has to be durable first.
    pub(super) fn touch(&mut self, offset: u64, len: u64) -> u64 {
        let mut need = 0;
        for region in self.regions_of(offset, len) {
            let next = self.next_note;
            let mut fresh = false;
            let used = self.uses.entry(region).or_insert_with(|| {
                fresh = true;
                Use {
                    noted_by: next,
                    ..Use::default()
                }
            });
            used.flying += 1;
            need = need.max(used.noted_by);
            self.note_wanted |= fresh;
        }
        if !self.open {
            self.open = true;
            self.generation += 1;
            self.note_wanted = true;
            need = self.next_note;
        }
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::WriteBeforeIntent) {
            return 0;
        }
        need
    }

    /// A write has ended on all legs.
    pub(super) fn untouch(&mut self, offset: u64, len: u64) {
        self.clock += 1;
        for region in self.regions_of(offset, len) {
            if let Some(used) = self.uses.get_mut(&region) {
                used.flying = used.flying.saturating_sub(1);
                used.last = self.clock;
                used.last_ns = self.now;
            }
        }
    }

    /// Who needs a note waits for it; false if it is durable already.
    pub(super) fn wait_note(&mut self, need: u64, owner: Owner) -> bool {
        if need <= self.durable {
            return false;
        }
        self.waiting.push((need, owner));
        self.write_note();
        true
    }

    /// What the notes have to say of the legs.
    pub fn stamps(&self) -> MirrorStamps {
        let stamp = |leg: &Leg| {
            let mut stamp = leg.stamp;
            if stamp.state == LegState::Current || leg.joining.is_some() {
                stamp.state = LegState::Current;
                stamp.generation = self.generation;
                stamp.whole = false;
                stamp.copied = 0;
            }
            stamp
        };
        let legs = self.legs.iter().filter(|l| !l.removed).map(stamp);
        MirrorStamps {
            generation: self.generation,
            open: self.open,
            unknown: false,
            legs: legs.collect(),
            marks: Vec::new(),
        }
    }

    /// What a leg looks like, now that nobody writes it any more, for the notes that close the mirror.
    pub fn left(&mut self, leg: usize, left: (i64, u64)) {
        if let Some(leg) = self.legs.get_mut(leg) {
            leg.stamp.left = left;
        }
    }

    /// What a leg looked like when that was noted last.
    pub fn left_as(&self, leg: usize) -> (i64, u64) {
        self.legs.get(leg).map_or((0, 0), |l| l.stamp.left)
    }

    /// A leg that is out is, if it is the one it was, the same as the current ones there.
    pub fn is_the_same(&self, leg: usize, offset: u64) -> bool {
        let region = (offset / self.region) as u32;
        let known = |l: &Leg| !l.stamp.whole || offset < l.stamp.copied;
        !self.uses.contains_key(&region) && self.legs.get(leg).is_some_and(known)
    }

    /// Those of these marks that every leg has durably which is current: not what was asked for since.
    pub fn settled(&self, mut marks: Vec<Mark>) -> Vec<Mark> {
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::MarksEarly) {
            return marks;
        }
        marks.retain(|mark| {
            let at = mark.block.saturating_mul(BLOCK);
            let touched = self.uses.contains_key(&((at / self.region) as u32));
            !touched && !self.is_being_changed(at, BLOCK)
        });
        marks
    }

    /// Where the legs may differ.
    pub fn touched(&self) -> Regions {
        let mut touched = Regions::none(self.count());
        for region in self.uses.keys() {
            touched.insert(*region);
        }
        touched
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.size.div_ceil(self.region)).unwrap_or(u32::MAX)
    }

    /// Writes a note, unless one is under way: then the next one says it.
    pub(super) fn write_note(&mut self) {
        // Reads wait for the note that says which leg counts now, and so for what is durable there.
        let early = self.promoted.is_some();
        if early || !self.note_wanted || self.flying_note.is_some() || self.now < self.retry_note_ns
        {
            return;
        }
        self.note_wanted = false;
        let seq = self.next_note;
        self.next_note += 1;
        self.flying_note = Some(seq);
        let (stamps, touched) = (self.stamps(), self.touched());
        self.actions.push(Action::Note {
            seq,
            stamps,
            touched,
        });
    }

    /// A note is durable, or could not be made.
    pub fn noted(&mut self, now: u64, seq: u64, made: bool) {
        self.now = now;
        self.flying_note = None;
        if !made {
            // What it said has still to be said, and nothing may rest on it.
            self.note_wanted = true;
            self.retry_note_ns = now + self.limits.retry_ns;
            for used in self.uses.values_mut().filter(|u| u.noted_by == seq) {
                used.noted_by = self.next_note;
            }
            for need in [&mut self.barrier, &mut self.read_barrier] {
                *need = if *need == seq { self.next_note } else { *need };
            }
            for leg in self.legs.iter_mut().filter(|l| l.joining == Some(seq)) {
                leg.joining = Some(self.next_note);
            }
            if self.closing == Some(seq) {
                self.closing = Some(self.next_note);
            }
            for (need, action) in &mut self.held {
                *need = if *need == seq { self.next_note } else { *need };
                if let Action::Answer { result, .. } = action {
                    *result = result.and(Err(IoError::Os(libc::EIO)));
                }
            }
            self.held.iter_mut().for_each(|(need, _)| *need = 0);
            self.release_held();
            for (_, owner) in std::mem::take(&mut self.waiting) {
                self.refuse(owner);
            }
            return;
        }
        self.durable = self.durable.max(seq);
        for i in 0..self.legs.len() {
            let Some(leg) = self.legs.get_mut(i) else {
                continue;
            };
            if leg.joining.is_some_and(|need| need <= seq) {
                leg.joining = None;
                leg.stamp.state = LegState::Current;
                leg.stamp.whole = false;
                leg.why = None;
                self.actions.push(Action::Current { leg: i });
            }
        }
        self.release_held();
        let durable = self.durable;
        let due: Vec<Owner> = self
            .waiting
            .extract_if(.., |(need, _)| *need <= durable)
            .map(|(_, owner)| owner)
            .collect();
        for owner in due {
            match owner {
                Owner::Request(req) => self.request_is_noted(req),
                Owner::Copy(copy) => self.copy_is_noted(copy),
                // A check notes nothing.
                Owner::Check(_) => {}
            }
        }
        self.write_note();
        self.pump_copies();
    }

    fn release_held(&mut self) {
        let durable = self.durable;
        let due = self.held.extract_if(.., |(need, _)| *need <= durable);
        let due: Vec<_> = due.map(|(_, action)| action).collect();
        for action in due {
            let done = match &action {
                Action::Answer { data, .. } => *data,
                _ => None,
            };
            self.actions.push(action);
            self.actions.extend(done.map(Action::Release));
        }
    }

    /// Answers, when that may be.
    pub(super) fn answer(&mut self, action: Action, changes: bool) {
        let need = match changes {
            true => self.barrier.max(self.read_barrier),
            false => self.read_barrier,
        };
        #[cfg(any(test, feature = "faults"))]
        let need = if self.is_broken(crate::faults::Fault::StampAfterWrite) {
            0
        } else {
            need
        };
        self.held.push((need, action));
        self.release_held();
    }

    /// Forgets regions that all legs have durably, and sees to it that they come to have them.
    pub(super) fn clean(&mut self) {
        if self.now < self.next_clean_ns || self.uses.is_empty() {
            return;
        }
        self.next_clean_ns = self.now + self.limits.idle_ns / 2;
        let idle = |used: &Use, now: u64, idle_ns: u64| {
            used.flying == 0 && used.last_ns.saturating_add(idle_ns) <= now
        };
        let (now, idle_ns) = (self.now, self.limits.idle_ns);
        let flushed = self.flushed;
        let kept = !self.legs.iter().all(|leg| leg.removed || leg.is_current());
        let legs = &self.legs;
        #[cfg(any(test, feature = "faults"))]
        let flushed = if self.is_broken(crate::faults::Fault::ClearBeforeFlush) {
            u64::MAX
        } else {
            flushed
        };
        let before = self.uses.len();
        if !kept {
            self.uses.retain(|region, used| {
                !idle(used, now, idle_ns)
                    || used.last > flushed
                    || legs.iter().any(|l| !l.removed && l.behind.has(*region))
            });
        }
        if self.uses.len() < before {
            self.note_wanted = true;
        }
        if self
            .uses
            .values()
            .any(|u| idle(u, now, idle_ns) && u.last > flushed)
        {
            self.flush_ourselves();
        }
        if self
            .legs
            .iter()
            .any(|l| l.resync.is_some() && l.stamp.whole)
        {
            // How far a copy is, for a start that goes on with it.
            self.note_wanted = true;
        }
    }

    /// Nobody will write any more: the notes say that the legs are the same, where they are. True once that
    /// is durable. To be called when nothing is under way.
    pub fn close(&mut self, now: u64) -> bool {
        self.now = now;
        self.cancel_scrub(now);
        if let Some(seq) = self.closing {
            self.write_note();
            return self.durable >= seq;
        }
        if self.is_repairing() {
            return false;
        }
        if !self.open {
            return true;
        }
        let flushed = self.flushed;
        let owing = |used: &Use| used.flying > 0 || used.last > flushed;
        if self.uses.values().any(owing) {
            self.flush_ourselves();
            return false;
        }
        let legs = &self.legs;
        if legs.iter().all(|l| l.removed || l.is_current()) {
            let differ = |region: u32| legs.iter().any(|l| !l.removed && l.behind.has(region));
            self.uses.retain(|region, _| differ(*region));
        }
        self.open = !self.uses.is_empty();
        self.generation += 1;
        self.note_wanted = true;
        self.closing = Some(self.next_note);
        self.write_note();
        false
    }
}
