//! Scrubbing: what the legs hold is read and compared, so that a block that has rotted on one of them is found while
//! another one still has it.
//!
//! Only legs that must be the same at a place are compared there: current ones, where they lack nothing. A
//! place is held against writes while it is looked at, or a write would be on one leg and not yet on the other.
//!
//! **What is right** is decided only where a witness proves it: a leg that cannot read its own block, or a cached copy
//! that the guest wrote, and so all legs were given. A cached copy that was read from a leg proves nothing, since it may
//! have been read from the wrong one. Where nothing decides, all legs are reported, and nothing is written until
//! somebody names a leg.
//!
//! **A difference counts when it was seen twice** in the same way: what was damaged on its way from a leg is not what
//! the leg holds.
//!
//! **What is cached** and is not what the legs hold after a decision is [dropped](Action::Settled) while the place is
//! still held. Dirty blocks stay: they go to all legs.
//!
//! **A repair is not noted** as a write is: after a crash, what is noted is copied from one leg to the others, and
//! that may be the wrong one. Instead the place where a scrub is moves on only when what was repaired before it is
//! durable; a scrub that was cut short begins there again.

use super::{Action, Data, Io, IoId, Machine, Owner, What, Why};
use hearth_io::{BLOCK, IoError};
use std::collections::HashSet;

/// Differences that are kept; of more only the number.
pub const UNDECIDED_MAX: usize = 1000;
/// What a limited scrub may save up, in parts of a second.
const SAVED: u64 = 4;
/// How often a place is read for two looks in a row that agree.
const LOOKS_MAX: u32 = 5;

/// A place where legs differ and nothing tells which one is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Legs, and the checksum of what each holds there.
    pub legs: Vec<(usize, u32)>,
    /// The legs hold the same, and what is cached is something else.
    pub cached: bool,
}

/// What a comparison has shown of a place: not all of what was read there is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// What this leg holds is right.
    Right {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The leg.
        leg: usize,
        /// The checksum of what it holds there; of several blocks, of their checksums.
        sum: u32,
        /// Legs that hold something else; none if only what is cached is wrong.
        wrong: Vec<usize>,
    },
    /// Nothing tells.
    Undecided(Difference),
}

impl Finding {
    /// What it says, and the legs that could be read.
    fn difference(&self) -> (Difference, Vec<usize>) {
        match self {
            Finding::Undecided(difference) => {
                let legs = difference.legs.iter().map(|(leg, _)| *leg);
                (difference.clone(), legs.collect())
            }
            Finding::Right {
                offset,
                len,
                leg,
                sum,
                wrong,
            } => {
                let difference = Difference {
                    offset: *offset,
                    len: *len,
                    legs: vec![(*leg, *sum)],
                    cached: false,
                };
                (difference, [&wrong[..], &[*leg]].concat())
            }
        }
    }
}

/// What a leg holds in a block: legs of the same class hold the same.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The leg.
    pub leg: usize,
    /// Its class.
    pub class: usize,
    /// The checksum.
    pub sum: u32,
}

/// A clean cached block: its checksum, and whether all legs were given it (else it was read from one of them).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// The block's number.
    pub block: u64,
    /// The checksum.
    pub sum: u32,
    /// The guest wrote it.
    pub written: bool,
}

/// What is right of a block of which this is cached. `None` if all is well.
pub fn decide(
    offset: u64,
    len: u64,
    held: &[Held],
    cached: Option<Cached>,
    prefer: Option<usize>,
) -> Option<Finding> {
    let first = held.first()?;
    let right = |right: &Held| {
        let wrong = held.iter().filter(|h| h.class != right.class);
        Some(Finding::Right {
            offset,
            len,
            leg: right.leg,
            sum: right.sum,
            wrong: wrong.map(|h| h.leg).collect(),
        })
    };
    let undecided = |cached| {
        Some(Finding::Undecided(Difference {
            offset,
            len,
            legs: held.iter().map(|h| (h.leg, h.sum)).collect(),
            cached,
        }))
    };
    let preferred = held.iter().find(|h| Some(h.leg) == prefer);
    if held.iter().all(|h| h.class == first.class) {
        let unlike = cached.is_some_and(|c| c.sum != first.sum);
        return match preferred {
            _ if !unlike => None,
            Some(leg) => right(leg),
            None => undecided(true),
        };
    }
    let proves = |c: &Cached| c.written;
    #[cfg(any(test, feature = "faults"))]
    let proves =
        |c: &Cached| proves(c) || crate::faults::is_forced(crate::faults::Fault::CheckTrustsReads);
    let witness = cached.filter(proves).map(|c| c.sum);
    let mut fitting = held.iter().filter(|h| Some(h.sum) == witness);
    let proven = fitting
        .next()
        .filter(|one| fitting.all(|h| h.class == one.class));
    match proven.or(preferred) {
        Some(leg) => right(leg),
        None => undecided(false),
    }
}

/// How far a scrub is, and what it has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// All before here is done, durably.
    pub at: u64,
    /// Bytes looked at.
    pub checked: u64,
    /// Of these, so many that not all legs took part in.
    pub partial: u64,
    /// Of these, so many that no leg could read.
    pub unread: u64,
    /// Places that were repaired, and their bytes.
    pub repairs: u64,
    /// Bytes of them.
    pub repaired: u64,
    /// Where nothing tells what is right; of very many, the first.
    pub undecided: Vec<Difference>,
    /// How many there are.
    pub undecided_all: u64,
}

/// How a scrub ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubEnd {
    /// It is through; else somebody called it off.
    pub whole: bool,
    /// What it has found.
    pub report: ScrubReport,
}

/// A scrub under way.
#[derive(Debug)]
pub(super) struct Scrub {
    /// Places yet to be looked at, the next one last.
    todo: Vec<(u64, u64)>,
    /// Up to here it is looked block by block: something could not be read.
    fine: u64,
    /// What looks have found up to there, or at the place that is looked at, and the legs that could be read then. One of
    /// them that cannot be read any more may be the one that is right.
    differed: Vec<(Difference, Vec<usize>)>,
    prefer: Option<usize>,
    /// What is found wrong is written.
    repair: bool,
    called_off: bool,
    check: Option<Check>,
    report: ScrubReport,
    budget: i64,
    budget_ns: u64,
}

/// What is done about the place that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Reading,
    Comparing,
    Writing,
    Flushing,
}

/// What a comparison has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Where what was read is not the same.
    pub findings: Vec<Finding>,
    /// The checksum of what the first leg has brought, if it is one block: it may be written to a leg that cannot read
    /// its own.
    pub sum: u32,
}

/// The place that is looked at.
#[derive(Debug)]
struct Check {
    id: u64,
    offset: u64,
    len: u64,
    stage: Stage,
    reads: Vec<(usize, IoId)>,
    failed: Vec<usize>,
    pending: HashSet<IoId>,
    /// What the last look has shown, and how often it was looked.
    seen: Option<Seen>,
    looks: u32,
    /// Legs that were written, places and bytes; less what has failed.
    written: Vec<(usize, u64)>,
    undecided: Vec<Difference>,
    /// What was decided: the read that brought it, and the place.
    settled: Vec<(IoId, u64, u64)>,
}

impl Machine {
    /// Begins a scrub at `from`, or of these places alone. Where nothing tells what is right, that is what `prefer`
    /// holds. False if one is under way.
    pub fn scrub(
        &mut self,
        now: u64,
        from: u64,
        places: Option<Vec<(u64, u64)>>,
        prefer: Option<usize>,
        repair: bool,
    ) -> bool {
        self.now = now;
        if self.scrub.is_some() {
            return false;
        }
        let size = self.size;
        let mut todo = places.unwrap_or_else(|| vec![(from.min(size), size)]);
        todo.retain(|(start, end)| start < end && *end <= size);
        todo.reverse();
        self.scrub = Some(Scrub {
            todo,
            fine: 0,
            differed: Vec::new(),
            prefer,
            repair,
            called_off: false,
            check: None,
            report: ScrubReport {
                at: from,
                ..ScrubReport::default()
            },
            budget: 0,
            budget_ns: now,
        });
        self.pump_scrub();
        true
    }

    /// Calls a scrub off; what is being repaired is ended first.
    pub fn cancel_scrub(&mut self, now: u64) {
        self.now = now;
        if let Some(scrub) = &mut self.scrub {
            scrub.called_off = true;
        }
        self.pump_scrub();
    }

    /// Bytes of the disk a second that a scrub compares at most; 0 is no limit.
    pub fn set_scrub_rate(&mut self, now: u64, rate: u64) {
        self.now = now;
        self.limits.scrub_rate = rate;
        if let Some(scrub) = &mut self.scrub {
            scrub.budget = scrub.budget.min(0);
            scrub.budget_ns = now;
        }
        self.pump_scrub();
    }

    /// How far the scrub under way is.
    pub fn scrub_report(&self) -> Option<&ScrubReport> {
        self.scrub.as_ref().map(|scrub| &scrub.report)
    }

    /// A leg is being written what another one has.
    pub(super) fn is_repairing(&self) -> bool {
        let check = self.scrub.as_ref().and_then(|s| s.check.as_ref());
        check.is_some_and(|c| matches!(c.stage, Stage::Writing | Stage::Flushing))
    }

    /// Looks at the next place, if it may.
    pub(super) fn pump_scrub(&mut self) {
        let (now, rate, chunk) = (self.now, self.limits.scrub_rate, self.limits.chunk);
        let Some(scrub) = &mut self.scrub else {
            return;
        };
        if scrub.check.is_some() {
            return;
        }
        if rate > 0 {
            let passed = u128::from(now.saturating_sub(scrub.budget_ns));
            let more = passed * u128::from(rate) / 1_000_000_000;
            let most = (rate / SAVED).max(chunk) as i64;
            let more = i64::try_from(more).unwrap_or(most);
            if more > 0 {
                scrub.budget = scrub.budget.saturating_add(more).min(most);
                scrub.budget_ns = now;
            }
        }
        while scrub.todo.last().is_some_and(|(from, to)| from >= to) {
            scrub.todo.pop();
        }
        let next = scrub.todo.last().copied().filter(|_| !scrub.called_off);
        let Some((offset, end)) = next else {
            if let Some(scrub) = self.scrub.take() {
                self.actions.push(Action::Scrubbed(ScrubEnd {
                    whole: scrub.todo.is_empty(),
                    report: scrub.report,
                }));
            }
            return;
        };
        if rate > 0 && scrub.budget <= 0 {
            return;
        }
        let most = if offset < scrub.fine { BLOCK } else { chunk };
        // Which legs are compared is a matter of the region.
        let edge = (offset / self.region + 1) * self.region;
        let aligned = (offset / most + 1) * most;
        let len = aligned.min(edge).min(end) - offset;
        scrub.budget -= len as i64;
        let id = self.name();
        if let Some(scrub) = &mut self.scrub {
            scrub.check = Some(Check {
                id,
                offset,
                len,
                stage: Stage::Waiting,
                reads: Vec::new(),
                failed: Vec::new(),
                pending: HashSet::new(),
                seen: None,
                looks: 0,
                written: Vec::new(),
                undecided: Vec::new(),
                settled: Vec::new(),
            });
        }
        if self.lock(offset, len, Owner::Check(id)) {
            self.check_has_range(id);
        }
    }

    fn check(&mut self, id: u64) -> Option<&mut Check> {
        let check = self.scrub.as_mut()?.check.as_mut();
        check.filter(|c| c.id == id)
    }

    /// The place is held: it is read from every leg that must be the same there.
    pub(super) fn check_has_range(&mut self, id: u64) {
        let Some(check) = self.check(id) else {
            return;
        };
        let (offset, len) = (check.offset, check.len);
        check.stage = Stage::Reading;
        let fit = |i: &usize| self.is_same_at(*i, offset, len);
        let legs: Vec<usize> = (0..self.legs.len()).filter(fit).collect();
        let send = |leg| {
            let io = self.send(leg, Owner::Check(id), What::Read, (offset, len), Data::None);
            (leg, io)
        };
        let reads: Vec<(usize, IoId)> = legs.into_iter().map(send).collect();
        let nobody = reads.is_empty();
        if let Some(check) = self.check(id) {
            check.pending = reads.iter().map(|(_, io)| *io).collect();
            check.reads = reads;
        }
        if nobody {
            self.check_is_read(id);
        }
    }

    /// What this leg holds there is the disk, if it can be read.
    fn is_same_at(&self, leg: usize, offset: u64, len: u64) -> bool {
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::CheckBehind) {
            return self.legs.get(leg).is_some_and(|l| l.is_live());
        }
        let regions = self.regions_of(offset, len);
        self.legs.get(leg).is_some_and(|l| {
            l.is_current() && l.is_live() && l.present && !l.behind.has_any(regions)
        })
    }

    pub(super) fn check_io_ended(
        &mut self,
        id: u64,
        io: IoId,
        at: Io,
        result: Result<(), IoError>,
    ) {
        let Some(check) = self.check(id) else {
            self.actions.push(Action::Release(io));
            return;
        };
        check.pending.remove(&io);
        let mut gone = None;
        match (at.what, result) {
            (_, Ok(())) => {}
            (What::Read, Err(_)) => {
                check.failed.push(at.leg);
                check.reads.retain(|(_, read)| *read != io);
                self.actions.push(Action::Release(io));
            }
            (_, Err(e)) => {
                check.written.retain(|(leg, _)| *leg != at.leg);
                gone = Some(Why::Error(e));
            }
        }
        if let Some(why) = gone {
            // That may end what else it was asked, and so the check.
            self.expel(at.leg, why);
        }
        let Some(check) = self.check(id).filter(|c| c.pending.is_empty()) else {
            return;
        };
        match check.stage {
            Stage::Reading => self.check_is_read(id),
            Stage::Writing => self.check_is_written(id),
            Stage::Flushing => self.end_check(id),
            Stage::Waiting | Stage::Comparing => {}
        }
    }

    fn check_is_read(&mut self, id: u64) {
        let Some(check) = self.check(id) else {
            return;
        };
        let (offset, len) = (check.offset, check.len);
        let (reads, failed) = (check.reads.clone(), check.failed.clone());
        // One that is out by now has not failed to read: it was not there.
        let here = |i: &usize| self.is_same_at(*i, offset, len);
        let failed: Vec<usize> = failed.into_iter().filter(here).collect();
        let seen = reads.len() + failed.len();
        let members = self.legs.iter().filter(|l| !l.removed).count();
        let Some(scrub) = &mut self.scrub else {
            return;
        };
        if !failed.is_empty() && len > BLOCK {
            // What it can read, it keeps.
            scrub.fine = offset + len;
            return self.let_go(id);
        }
        let prefer = scrub.prefer;
        let first = scrub.check.as_ref().is_some_and(|c| c.looks == 0);
        if seen < members && first {
            scrub.report.partial += len;
        }
        if reads.is_empty() && first {
            scrub.report.unread += len;
        }
        let nothing = reads.is_empty();
        if let Some(check) = self.check(id) {
            check.failed = failed;
            check.stage = Stage::Comparing;
            check.looks += 1;
        }
        if nothing {
            return self.end_check(id);
        }
        self.actions.push(Action::Compare {
            check: id,
            offset,
            len,
            reads,
            prefer,
        });
    }

    /// What a comparison has shown.
    pub fn compared(&mut self, now: u64, id: u64, seen: Seen) {
        self.now = now;
        let Some(check) = self.check(id).filter(|c| c.stage == Stage::Comparing) else {
            return;
        };
        let agrees = match &check.seen {
            None => seen.findings.is_empty() && check.failed.is_empty(),
            Some(before) => *before == seen,
        };
        #[cfg(any(test, feature = "faults"))]
        let agrees = agrees || self.is_broken(crate::faults::Fault::CheckOneLook);
        let Some(check) = self.check(id) else {
            return;
        };
        if !agrees && check.looks < LOOKS_MAX {
            let differs: Vec<_> = seen.findings.iter().map(Finding::difference).collect();
            check.seen = Some(seen);
            check.failed.clear();
            let old = std::mem::take(&mut check.reads);
            let release = |(_, io): &(usize, IoId)| Action::Release(*io);
            self.actions.extend(old.iter().map(release));
            if let Some(scrub) = &mut self.scrub {
                scrub.differed.extend(differs);
            }
            return self.check_has_range(id);
        }
        let (offset, len) = (check.offset, check.len);
        if !agrees {
            // A leg that says something else each time holds nothing that could be believed.
            if let Some(scrub) = &mut self.scrub {
                scrub.report.unread += len;
            }
            return self.end_check(id);
        }
        let Some(check) = self.check(id) else {
            return;
        };
        let (reads, failed) = (check.reads.clone(), check.failed.clone());
        let read_of = |leg: usize| reads.iter().find(|(i, _)| *i == leg).map(|(_, io)| *io);
        // To whom, from which read, where.
        let mut plan: Vec<(usize, IoId, u64, u64)> = Vec::new();
        let guesses = false;
        #[cfg(any(test, feature = "faults"))]
        let guesses = guesses || self.is_broken(crate::faults::Fault::CheckGuesses);
        let mut undecided = Vec::new();
        let mut settled = Vec::new();
        let mut good = reads.first().map(|(leg, _)| *leg);
        for finding in seen.findings {
            match finding {
                Finding::Right {
                    offset,
                    len,
                    leg,
                    wrong,
                    ..
                } => {
                    good = Some(leg);
                    let from = read_of(leg);
                    settled.extend(from.map(|io| (io, offset, len)));
                    plan.extend(
                        wrong
                            .iter()
                            .filter_map(|to| Some((*to, from?, offset, len))),
                    );
                }
                // Not even to a leg that cannot read its own: which content is right is not known.
                Finding::Undecided(difference) => {
                    good = good.filter(|_| guesses);
                    undecided.push(difference);
                }
            }
        }
        if !failed.is_empty() && !guesses {
            // It cannot be read any more, and held something else when it could.
            let here = |(d, legs): &&(Difference, Vec<usize>)| {
                let overlaps = d.offset < offset + len && offset < d.offset + d.len;
                overlaps && legs.iter().any(|leg| failed.contains(leg))
            };
            let differed = self
                .scrub
                .as_ref()
                .and_then(|s| s.differed.iter().rfind(here));
            if let Some((difference, _)) = differed {
                good = None;
                plan.clear();
                settled.clear();
                if undecided.is_empty() {
                    undecided.push(Difference {
                        offset,
                        len,
                        ..difference.clone()
                    });
                }
            }
        }
        if let Some(from) = good.and_then(read_of) {
            plan.extend(failed.iter().map(|to| (*to, from, offset, len)));
        }
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::CheckSkipsErrors) {
            plan.retain(|(to, ..)| !failed.contains(to));
        }
        let repair = self.scrub.as_ref().is_some_and(|s| s.repair);
        plan.retain(|(to, ..)| repair && self.is_same_at(*to, offset, len));
        let pending: HashSet<IoId> = plan
            .iter()
            .map(|(to, from, at, n)| {
                let data = Data::Part(*from, at - offset);
                self.send(*to, Owner::Check(id), What::Write, (*at, *n), data)
            })
            .collect();
        let nothing = pending.is_empty();
        if let Some(check) = self.check(id) {
            check.stage = Stage::Writing;
            check.pending = pending;
            check.written = plan.into_iter().map(|(to, _, _, n)| (to, n)).collect();
            check.undecided = undecided;
            if repair {
                check.settled = settled;
            }
        }
        if nothing {
            self.end_check(id);
        }
        self.pump_scrub();
    }

    fn check_is_written(&mut self, id: u64) {
        let Some(check) = self.check(id) else {
            return;
        };
        check.stage = Stage::Flushing;
        let mut legs: Vec<usize> = check.written.iter().map(|(leg, _)| *leg).collect();
        legs.sort_unstable();
        legs.dedup();
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::CheckUnflushed) {
            legs.clear();
        }
        let send = |leg| self.send(leg, Owner::Check(id), What::Flush, (0, 0), Data::None);
        let pending: HashSet<IoId> = legs.into_iter().map(send).collect();
        let nothing = pending.is_empty();
        if let Some(check) = self.check(id) {
            check.pending = pending;
        }
        if nothing {
            self.end_check(id);
        }
    }

    /// The place was looked at, and what could be repaired there is durable.
    fn end_check(&mut self, id: u64) {
        let Some(scrub) = &mut self.scrub else {
            return;
        };
        let Some(check) = scrub.check.as_mut().filter(|c| c.id == id) else {
            return;
        };
        let report = &mut scrub.report;
        report.checked += check.len;
        report.repairs += check.written.len() as u64;
        report.repaired += check.written.iter().map(|(_, n)| n).sum::<u64>();
        report.undecided_all += check.undecided.len() as u64;
        let room = UNDECIDED_MAX.saturating_sub(report.undecided.len());
        report
            .undecided
            .extend(check.undecided.drain(..).take(room));
        let (at, done) = (check.offset, check.offset + check.len);
        let settled = std::mem::take(&mut check.settled);
        if let Some((from, _)) = scrub.todo.last_mut() {
            *from = done;
        }
        report.at = done;
        if done >= scrub.fine {
            scrub.differed.clear();
        }
        #[cfg(any(test, feature = "faults"))]
        let settled = match self.is_broken(crate::faults::Fault::CheckKeepsCopies) {
            true => Vec::new(),
            false => settled,
        };
        let tell = |(read, offset, len)| Action::Settled {
            read,
            from: offset - at,
            offset,
            len,
        };
        self.actions.extend(settled.into_iter().map(tell));
        self.let_go(id);
    }

    /// Gives the place back.
    fn let_go(&mut self, id: u64) {
        let check = self.scrub.as_mut().and_then(|s| s.check.take());
        let Some(check) = check.filter(|c| c.id == id) else {
            return;
        };
        let release = |(_, io): &(usize, IoId)| Action::Release(*io);
        self.actions.extend(check.reads.iter().map(release));
        let turns = self.locks.give(check.offset, Owner::Check(id));
        self.turns(turns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(classes: &[usize]) -> Vec<Held> {
        let held = |(leg, class): (usize, &usize)| Held {
            leg,
            class: *class,
            sum: 100 + *class as u32,
        };
        classes.iter().enumerate().map(held).collect()
    }

    fn right(leg: usize, wrong: &[usize]) -> Option<Finding> {
        Some(Finding::Right {
            offset: 0,
            len: 1,
            leg,
            sum: 0,
            wrong: wrong.to_vec(),
        })
    }

    fn cached(sum: u32, written: bool) -> Option<Cached> {
        Some(Cached {
            block: 0,
            sum,
            written,
        })
    }

    /// The truth table of `docs/mirrors.md`.
    #[test]
    fn legs_differ_only_written_copy_or_preference_decides() {
        let decide = |classes: &[usize], known, prefer| {
            let mut found = decide(0, 1, &held(classes), known, prefer);
            if let Some(Finding::Right { leg, sum, .. }) = &mut found {
                let its = classes.get(*leg).map(|class| 100 + *class as u32);
                assert_eq!(Some(std::mem::take(sum)), its);
            }
            found
        };
        let open = |found: Option<Finding>, cached| matches!(found, Some(Finding::Undecided(d)) if d.cached == cached);
        let (read, written) = (|sum| cached(sum, false), |sum| cached(sum, true));
        // Nothing differs.
        assert_eq!(decide(&[0, 0], None, None), None);
        assert_eq!(decide(&[0, 0], read(100), Some(1)), None);
        // The legs differ.
        assert_eq!(decide(&[0, 1], written(101), None), right(1, &[0]));
        assert!(open(decide(&[0, 1], read(101), None), false));
        assert!(open(decide(&[0, 1], read(7), None), false));
        assert!(open(decide(&[0, 1], written(7), None), false));
        assert!(open(decide(&[0, 1], None, None), false));
        // Most of them are not right for being most.
        assert!(open(decide(&[0, 1, 1], None, None), false));
        assert!(open(decide(&[0, 1, 1], read(101), None), false));
        // A leg is preferred: that is less than what the guest wrote, and more than what was read.
        assert_eq!(decide(&[0, 1], written(101), Some(0)), right(1, &[0]));
        assert_eq!(decide(&[0, 1], read(101), Some(0)), right(0, &[1]));
        assert_eq!(decide(&[0, 1], written(7), Some(0)), right(0, &[1]));
        assert_eq!(decide(&[0, 1, 1], None, Some(2)), right(2, &[0]));
        assert!(open(decide(&[0, 1], None, Some(5)), false));
        // The legs are the same, and the cache is not.
        assert!(open(decide(&[0, 0], read(7), None), true));
        assert!(open(decide(&[0, 0], written(7), None), true));
        assert_eq!(decide(&[0, 0], read(7), Some(0)), right(0, &[]));
        // Two that are not the same have the same checksum.
        let mut twins = held(&[0, 1]);
        twins[1].sum = 100;
        assert!(open(super::decide(0, 1, &twins, written(100), None), false));
    }
}
