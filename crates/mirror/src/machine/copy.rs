//! Copying from leg to leg: what a leg missed, what one could not read, and what a read must not change its
//! mind about.

use super::{Action, Data, Io, IoId, Machine, Owner, What, Why};
use hearth_format::mirror::LegState;
use hearth_io::IoError;
use std::collections::HashSet;

/// What a limited resync may save up, in parts of a second.
const SAVED: u64 = 4;

/// What a copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Bringing a leg up to date. Of an earlier attempt if the number is not its resync's.
    Resync { leg: usize, attempt: u64 },
    /// All of it is there: it has to be durable before the leg is called current.
    Join { leg: usize, attempt: u64 },
    /// A region is there. On a leg that is read, it has to be durable before it is taken for the same: another
    /// leg may die, and then the power go.
    Settle { leg: usize, attempt: u64 },
    /// A leg counts from now on, and what was copied to it while another one did has to be durable.
    Promote { leg: usize },
    /// A leg could not read it.
    Repair,
    /// This request's answer must be the same on all legs before it is given.
    Pin { request: u64 },
}

impl Purpose {
    /// It copies nothing.
    fn is_flush(self) -> bool {
        matches!(
            self,
            Purpose::Join { .. } | Purpose::Settle { .. } | Purpose::Promote { .. }
        )
    }
}

/// A copy under way.
#[derive(Debug)]
pub(super) struct Copy {
    purpose: Purpose,
    offset: u64,
    len: u64,
    src: usize,
    tried: Vec<usize>,
    dsts: Vec<usize>,
    flushing: bool,
    touched: bool,
    read: Option<IoId>,
    pending: HashSet<IoId>,
    error: Option<IoError>,
    refused: bool,
}

impl Copy {
    /// What it copies may be on its way.
    fn is_writing(&self) -> bool {
        !self.purpose.is_flush() && self.read.is_some()
    }
}

/// How far a leg's resync is.
#[derive(Debug)]
pub(super) struct Resync {
    attempt: u64,
    /// The region that is being copied, and how much of it has been begun.
    region: Option<u32>,
    at: u64,
    active: usize,
    /// It cannot be done now, or has to be done once more.
    failed: bool,
    again: bool,
    joining: bool,
}

impl Resync {
    /// A region is not what was copied any more.
    pub(super) fn again(&mut self, region: u32) {
        self.again |= self.region == Some(region);
    }
}

impl Machine {
    fn begin_copy(&mut self, purpose: Purpose, offset: u64, len: u64, dsts: Vec<usize>) {
        let id = self.name();
        let copy = Copy {
            purpose,
            offset,
            len,
            src: self.chosen,
            tried: Vec::new(),
            dsts,
            flushing: false,
            touched: false,
            read: None,
            pending: HashSet::new(),
            error: None,
            refused: false,
        };
        self.copies.insert(id, copy);
        #[cfg(any(test, feature = "faults"))]
        if purpose == Purpose::Repair && self.is_broken(crate::faults::Fault::RepairUnlocked) {
            return self.copy_has_range(id);
        }
        if purpose.is_flush() {
            self.copy_flush(id);
        } else if self.lock(offset, len, Owner::Copy(id)) {
            self.copy_has_range(id);
        }
    }

    /// True if a copy of this range is under way.
    pub(super) fn is_copied(&self, offset: u64, len: u64) -> bool {
        let overlaps = |c: &Copy| c.offset < offset + len && offset < c.offset + c.len;
        self.copies.values().any(overlaps)
    }

    /// What a read is about to answer is made the same on all legs that are current.
    pub(super) fn pin(&mut self, request: u64, offset: u64, len: u64) {
        self.begin_copy(Purpose::Pin { request }, offset, len, Vec::new());
    }

    /// Legs that could not read a range get it from another one. A disk that gives such a sector up has
    /// others for it, and takes one when the sector is written.
    pub(super) fn repair(&mut self, legs: &[usize], offset: u64, len: u64) {
        let dsts = legs.iter().copied();
        let dsts: Vec<usize> = dsts
            .filter(|i| {
                self.legs
                    .get(*i)
                    .is_some_and(|l| l.is_current() && l.is_live())
            })
            .collect();
        if !dsts.is_empty() {
            self.begin_copy(Purpose::Repair, offset, len, dsts);
        }
    }

    pub(super) fn copy_has_range(&mut self, id: u64) {
        let Some(copy) = self.copies.get_mut(&id) else {
            return;
        };
        if copy.purpose == Purpose::Repair {
            copy.touched = true;
            copy.tried = copy.dsts.clone();
            let (offset, len) = (copy.offset, copy.len);
            let need = self.touch(offset, len);
            if self.wait_note(need, Owner::Copy(id)) {
                return;
            }
        }
        self.copy_is_noted(id);
    }

    /// Reads what is to be copied, from the next leg that may have it.
    pub(super) fn copy_is_noted(&mut self, id: u64) {
        let Some(copy) = self.copies.get(&id) else {
            return;
        };
        let (offset, len) = (copy.offset, copy.len);
        let src = match copy.purpose {
            Purpose::Pin { .. } => {
                // In order: the one that counts, then whoever can read it at all.
                let fit = |i: &usize| {
                    let leg = self.legs.get(*i);
                    let fit = leg.is_some_and(|l| l.is_current() && l.is_live() && l.present);
                    fit && !copy.tried.contains(i)
                };
                let others = (0..self.legs.len()).filter(fit);
                fit(&self.chosen)
                    .then_some(self.chosen)
                    .or_else(|| others.min())
            }
            Purpose::Resync { leg, attempt } => match self.is_attempt(leg, attempt) {
                true => self.reader(offset, len, &copy.tried),
                false => None,
            },
            _ => self.reader(offset, len, &copy.tried),
        };
        let Some(src) = src else {
            let error = copy.error.unwrap_or(IoError::Os(libc::EIO));
            return self.end_copy(id, Err(error));
        };
        let io = self.send(src, Owner::Copy(id), What::Read, (offset, len), Data::None);
        if let Some(copy) = self.copies.get_mut(&id) {
            copy.src = src;
            copy.pending.insert(io);
        }
    }

    fn is_attempt(&self, leg: usize, attempt: u64) -> bool {
        let leg = self.legs.get(leg).filter(|l| l.is_live());
        leg.and_then(|l| l.resync.as_ref())
            .is_some_and(|r| r.attempt == attempt)
    }

    pub(super) fn copy_io_ended(&mut self, id: u64, io: IoId, at: Io, result: Result<(), IoError>) {
        let Some(copy) = self.copies.get_mut(&id) else {
            self.actions.push(Action::Release(io));
            return;
        };
        copy.pending.remove(&io);
        match (at.what, result) {
            (What::Read, Ok(())) => {
                copy.read = Some(io);
                return self.copy_write(id, io);
            }
            (What::Read, Err(e)) => {
                copy.tried.push(at.leg);
                copy.error.get_or_insert(e);
                self.actions.push(Action::Release(io));
                return self.copy_is_noted(id);
            }
            (_, Ok(())) => {}
            (_, Err(e)) => {
                copy.error.get_or_insert(e);
                copy.dsts.retain(|leg| *leg != at.leg);
                let gone = self.expel(at.leg, Why::Error(e));
                if !gone && let Some(copy) = self.copies.get_mut(&id) {
                    // The only leg left has not taken it: it must not be answered.
                    copy.refused = true;
                }
            }
        }
        let Some(copy) = self.copies.get(&id).filter(|c| c.pending.is_empty()) else {
            return;
        };
        match copy.purpose {
            Purpose::Pin { .. } if !copy.flushing && !copy.dsts.is_empty() => self.copy_flush(id),
            Purpose::Pin { .. } => self.end_copy(id, Ok(())),
            _ => self.end_copy(id, copy.error.map_or(Ok(()), Err)),
        }
    }

    fn copy_write(&mut self, id: u64, io: IoId) {
        let Some(copy) = self.copies.get(&id) else {
            return;
        };
        let (offset, len, src) = (copy.offset, copy.len, copy.src);
        let regions = self.regions_of(offset, len);
        let dsts: Vec<usize> = match copy.purpose {
            Purpose::Pin { .. } => (0..self.legs.len())
                .filter(|i| {
                    let leg = self.legs.get(*i).filter(|l| l.is_current() && l.is_live());
                    // The chosen one, too, if it could not read it.
                    let differs = |l: &super::Leg| {
                        copy.tried.contains(i) || l.behind.has_any(regions.clone())
                    };
                    *i != src && leg.is_some_and(differs)
                })
                .collect(),
            Purpose::Resync { leg, attempt } => {
                let live = self.is_attempt(leg, attempt);
                live.then_some(leg).into_iter().collect()
            }
            _ => {
                let live = |i: &usize| self.legs.get(*i).is_some_and(|l| l.is_live());
                copy.dsts.iter().copied().filter(live).collect()
            }
        };
        let send = |machine: &mut Machine, leg: usize| {
            machine.send(
                leg,
                Owner::Copy(id),
                What::Write,
                (offset, len),
                Data::Read(io),
            )
        };
        let pending: HashSet<IoId> = dsts.iter().map(|leg| send(self, *leg)).collect();
        let nobody = pending.is_empty();
        if let Some(copy) = self.copies.get_mut(&id) {
            copy.dsts = dsts;
            copy.pending = pending;
        }
        if nobody {
            self.end_copy(id, Ok(()));
        }
    }

    fn copy_flush(&mut self, id: u64) {
        let Some(copy) = self.copies.get_mut(&id) else {
            return;
        };
        copy.flushing = true;
        #[cfg(any(test, feature = "faults"))]
        if self.fault == Some(crate::faults::Fault::JoinUnflushed) {
            return self.end_copy(id, Ok(()));
        }
        let dsts = copy.dsts.clone();
        let send = |leg| self.send(leg, Owner::Copy(id), What::Flush, (0, 0), Data::None);
        let pending: HashSet<IoId> = dsts.into_iter().map(send).collect();
        if let Some(copy) = self.copies.get_mut(&id) {
            copy.pending = pending;
        }
    }

    pub(super) fn end_copy(&mut self, id: u64, result: Result<(), IoError>) {
        let Some(copy) = self.copies.remove(&id) else {
            return;
        };
        if copy.touched {
            self.untouch(copy.offset, copy.len);
        }
        match copy.purpose {
            Purpose::Resync { leg, attempt } => {
                self.chunk_ended(leg, attempt, copy.len, result.is_ok());
            }
            Purpose::Join { leg, attempt } => self.join(leg, attempt, result.is_ok()),
            Purpose::Settle { leg, attempt } => {
                if self.is_attempt(leg, attempt) {
                    self.region_ended(leg, result.is_err());
                }
            }
            Purpose::Promote { leg } => {
                if self.promoted == Some((leg, true)) {
                    self.promoted = None;
                    self.write_note();
                }
            }
            Purpose::Repair if result.is_ok() => {
                for leg in &copy.dsts {
                    self.actions.push(Action::Repaired {
                        leg: *leg,
                        offset: copy.offset,
                        len: copy.len,
                    });
                }
            }
            Purpose::Repair => {}
            Purpose::Pin { request } => {
                let read = copy.read.filter(|_| !copy.refused);
                if copy.refused {
                    self.actions.extend(copy.read.map(Action::Release));
                }
                let data = read.ok_or(copy.error.unwrap_or(IoError::Os(libc::EIO)));
                self.end_pinned(request, data);
            }
        }
        if let Some(io) = copy.read
            && !matches!(copy.purpose, Purpose::Pin { .. })
        {
            self.actions.push(Action::Release(io));
        }
        if !copy.purpose.is_flush() {
            let turns = self.locks.give(copy.offset, Owner::Copy(id));
            self.turns(turns);
        }
    }

    fn chunk_ended(&mut self, leg: usize, attempt: u64, len: u64, well: bool) {
        if !self.is_attempt(leg, attempt) {
            return;
        }
        let (size, width) = (self.size, self.region);
        let Some(at) = self.legs.get_mut(leg) else {
            return;
        };
        let Some(resync) = &mut at.resync else {
            return;
        };
        resync.active = resync.active.saturating_sub(1);
        resync.failed |= !well;
        at.copied += if well { len } else { 0 };
        let Some(region) = resync.region else {
            return;
        };
        let end = ((u64::from(region) + 1) * width).min(size);
        if resync.active > 0 || resync.at < end {
            return;
        }
        let failed = resync.failed;
        if at.is_current() && !failed {
            return self.begin_copy(Purpose::Settle { leg, attempt }, 0, 0, vec![leg]);
        }
        self.region_ended(leg, failed);
    }

    fn region_ended(&mut self, leg: usize, failed: bool) {
        let Some(at) = self.legs.get_mut(leg) else {
            return;
        };
        let Some(resync) = &mut at.resync else {
            return;
        };
        let Some(region) = resync.region.take() else {
            return;
        };
        if failed {
            at.stuck.insert(region);
        } else if !resync.again {
            at.behind.remove(region);
            // It is there, but perhaps not durably.
            self.clock += 1;
            let clock = self.clock;
            if let Some(used) = self.uses.get_mut(&region) {
                used.last = clock;
            }
        }
    }

    fn join(&mut self, leg: usize, attempt: u64, well: bool) {
        if !self.is_attempt(leg, attempt) {
            return;
        }
        let next = self.next_note;
        let Some(at) = self.legs.get_mut(leg) else {
            return;
        };
        if let Some(resync) = &mut at.resync {
            resync.joining = false;
        }
        if !well || !at.behind.is_empty() {
            return;
        }
        at.resync = None;
        at.joining = Some(next);
        self.generation += 1;
        self.note_wanted = true;
        self.write_note();
    }

    /// Makes durable what was copied to a leg that counts now, when the last such copy has ended.
    pub(super) fn settle_promoted(&mut self) {
        let Some((leg, false)) = self.promoted else {
            return;
        };
        let to = |c: &Copy| match c.purpose {
            Purpose::Resync { leg: to, .. } => to == leg,
            _ => c.dsts.contains(&leg),
        };
        if self.copies.values().any(|c| c.is_writing() && to(c)) {
            return;
        }
        self.promoted = Some((leg, true));
        self.begin_copy(Purpose::Promote { leg }, 0, 0, vec![leg]);
    }

    /// Begins what can be copied now.
    pub(super) fn pump_copies(&mut self) {
        self.settle_promoted();
        if self.now >= self.unstuck_ns.saturating_add(self.limits.unstick_ns) {
            self.unstuck_ns = self.now;
            let count = self.count();
            for leg in &mut self.legs {
                leg.stuck = crate::Regions::none(count);
            }
        }
        if self.limits.rate > 0 {
            let passed = u128::from(self.now.saturating_sub(self.budget_ns));
            let more = passed * u128::from(self.limits.rate) / 1_000_000_000;
            let most = (self.limits.rate / SAVED) as i64;
            let more = i64::try_from(more).unwrap_or(most);
            self.budget = self.budget.saturating_add(more).min(most);
            self.budget_ns = self.now;
        }
        for leg in 0..self.legs.len() {
            while self.pump_leg(leg) {}
        }
    }

    /// Begins one more copy to a leg, if there is one to begin.
    fn pump_leg(&mut self, leg: usize) -> bool {
        let most = if self.requests.is_empty() {
            self.limits.chunks
        } else {
            1
        };
        let held = self.paused || self.limits.rate > 0 && self.budget <= 0;
        let (size, width, chunk) = (self.size, self.region, self.limits.chunk);
        let attempt = self.next;
        let Some(at) = self.legs.get_mut(leg).filter(|l| l.is_live()) else {
            return false;
        };
        let is_behind = at.stamp.state == LegState::Behind;
        if at.resync.is_none() {
            if at.joining.is_some() || at.behind.is_empty() && !is_behind {
                return false;
            }
            at.resync = Some(Resync {
                attempt,
                region: None,
                at: 0,
                active: 0,
                failed: false,
                again: false,
                joining: false,
            });
            self.next += 1;
        }
        let Some(resync) = &mut at.resync else {
            return false;
        };
        if resync.region.is_none() {
            #[cfg(any(test, feature = "faults"))]
            if self.fault == Some(crate::faults::Fault::SkipTouched) {
                let used = self.uses.iter().filter(|(_, u)| u.flying > 0);
                used.for_each(|(r, _)| {
                    at.behind.remove(*r);
                });
            }
            let mut next = at.behind.next(0);
            while let Some(region) = next.filter(|r| at.stuck.has(*r)) {
                next = at.behind.next(region + 1);
            }
            let Some(region) = next else {
                if !at.behind.is_empty() {
                    return false;
                }
                if !is_behind {
                    at.resync = None;
                    return false;
                }
                if resync.joining {
                    return false;
                }
                resync.joining = true;
                let attempt = resync.attempt;
                self.begin_copy(Purpose::Join { leg, attempt }, 0, 0, vec![leg]);
                return false;
            };
            resync.region = Some(region);
            resync.at = u64::from(region) * width;
            (resync.failed, resync.again) = (false, false);
        }
        let Some(region) = resync.region else {
            return false;
        };
        let end = ((u64::from(region) + 1) * width).min(size);
        if held || resync.active >= most || resync.at >= end {
            return false;
        }
        let (offset, len) = (resync.at, chunk.min(end - resync.at));
        resync.at += len;
        resync.active += 1;
        let attempt = resync.attempt;
        self.budget -= len as i64;
        self.begin_copy(Purpose::Resync { leg, attempt }, offset, len, Vec::new());
        true
    }

    /// Copies no more for now, or goes on.
    pub fn pause(&mut self, now: u64, paused: bool) {
        self.now = now;
        self.paused = paused;
        self.pump_copies();
    }

    /// Bytes a second that are copied at most; 0 is no limit.
    pub fn set_rate(&mut self, now: u64, rate: u64) {
        self.now = now;
        self.limits.rate = rate;
        self.budget = self.budget.min(0);
        self.budget_ns = now;
        self.pump_copies();
    }

    /// A leg may take so long over an operation from now on.
    pub fn set_limit(&mut self, now: u64, leg_ns: u64) {
        self.now = now;
        self.limits.leg_ns = leg_ns;
    }
}
