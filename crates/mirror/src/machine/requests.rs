//! What the engine asks for, from its taking to its one answer.

use super::{Action, Data, Io, IoId, Machine, Owner, ReqId, What, Why};
use hearth_io::IoError;
use std::collections::HashSet;

/// A request under way.
#[derive(Debug)]
pub(super) struct Request {
    /// `None` for a flush of our own.
    client: Option<ReqId>,
    what: What,
    offset: u64,
    len: u64,
    pending: HashSet<IoId>,
    /// Legs that did it; and that failed, of a read all of them, else those that could not be taken out for it.
    good: Vec<usize>,
    bad: Vec<usize>,
    error: Option<IoError>,
    /// Of a flush: writes that had ended before it, and how far copies were.
    upto: u64,
    copied: Vec<(usize, u64)>,
    /// A read that holds its range.
    locked: bool,
}

impl Machine {
    /// Somebody asks for something that lies within the size.
    pub fn request(&mut self, now: u64, req: ReqId, what: What, offset: u64, len: u64) {
        self.now = now;
        self.take(Some(req), what, offset, len);
    }

    fn take(&mut self, client: Option<ReqId>, what: What, offset: u64, len: u64) {
        let id = self.name();
        let request = Request {
            client,
            what,
            offset,
            len,
            pending: HashSet::new(),
            good: Vec::new(),
            bad: Vec::new(),
            error: None,
            upto: self.clock,
            copied: Vec::new(),
            locked: false,
        };
        self.requests.insert(id, request);
        match what {
            What::Read => self.read(id),
            What::Flush => self.flush(id),
            What::Write | What::Zero { .. } => {
                if self.lock(offset, len, Owner::Request(id)) {
                    self.request_has_range(id);
                }
            }
        }
    }

    /// A change of this range was asked for and is not answered; it may wait for its turn.
    pub(super) fn is_being_changed(&self, offset: u64, len: u64) -> bool {
        let changes = |r: &Request| {
            let overlaps = r.offset < offset + len && offset < r.offset + r.len;
            overlaps && !matches!(r.what, What::Read | What::Flush)
        };
        self.requests.values().any(changes)
    }

    pub(super) fn lock(&mut self, offset: u64, len: u64, owner: Owner) -> bool {
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::CopyUnlocked) && matches!(owner, Owner::Copy(_))
            || self.is_broken(crate::faults::Fault::CheckUnlocked)
                && matches!(owner, Owner::Check(_))
        {
            return true;
        }
        self.locks.take(offset, offset + len, owner)
    }

    /// Makes what was written durable without being asked.
    pub(super) fn flush_ourselves(&mut self) {
        let own = |r: &Request| r.client.is_none() && r.what == What::Flush;
        if !self.requests.values().any(own) {
            self.take(None, What::Flush, 0, 0);
        }
    }

    fn read(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (offset, len) = (request.offset, request.len);
        let regions = self.regions_of(offset, len);
        let differ = |i: usize| {
            self.legs.get(i).is_some_and(|l| {
                i != self.chosen
                    && l.is_current()
                    && l.is_live()
                    && l.behind.has_any(regions.clone())
            })
        };
        #[cfg(any(test, feature = "faults"))]
        if self.is_broken(crate::faults::Fault::ReadsFlip) {
            // Any leg that is current, as if they could not differ.
            let current = |l: &super::Leg| l.is_current() && l.present && !l.removed;
            let all = (0..self.legs.len()).filter(|i| self.legs.get(*i).is_some_and(current));
            let all: Vec<usize> = all.collect();
            let leg = all[(id % all.len() as u64) as usize];
            return self.read_from(id, leg);
        }
        let pins = (0..self.legs.len()).any(differ) && request.bad.is_empty();
        #[cfg(any(test, feature = "faults"))]
        let pins = pins && !self.is_broken(crate::faults::Fault::PinSkipped);
        if pins {
            self.unlock_read(id);
            return self.pin(id, offset, len);
        }
        if !request.locked && self.is_copied(offset, len) {
            // The leg that is copied to may have become the one that is read.
            if let Some(request) = self.requests.get_mut(&id) {
                request.locked = true;
            }
            if !self.lock(offset, len, Owner::Request(id)) {
                return;
            }
        }
        self.read_on(id);
    }

    /// Gives back the range of a read, if it holds it.
    fn unlock_read(&mut self, id: u64) {
        let request = self.requests.get_mut(&id).filter(|r| r.locked);
        let Some(request) = request else {
            return;
        };
        request.locked = false;
        let offset = request.offset;
        let turns = self.locks.give(offset, Owner::Request(id));
        self.turns(turns);
    }

    /// Reads from a leg that has not been tried.
    fn read_on(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (offset, len) = (request.offset, request.len);
        match self.reader(offset, len, &request.bad) {
            Some(leg) => self.read_from(id, leg),
            None => self.end_read(id, None),
        }
    }

    fn read_from(&mut self, id: u64, leg: usize) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let range = (request.offset, request.len);
        let io = self.send(leg, Owner::Request(id), What::Read, range, Data::None);
        if let Some(request) = self.requests.get_mut(&id) {
            request.pending.insert(io);
        }
    }

    /// A pin has the data of a read, or nobody has.
    pub(super) fn end_pinned(&mut self, id: u64, data: Result<IoId, IoError>) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        match data {
            Ok(io) => self.end_read(id, Some(io)),
            Err(e) => {
                request.error.get_or_insert(e);
                self.end_read(id, None);
            }
        }
    }

    fn end_read(&mut self, id: u64, data: Option<IoId>) {
        self.unlock_read(id);
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        let result = match data {
            Some(_) => Ok(()),
            None => Err(request.error.unwrap_or(IoError::Os(libc::EIO))),
        };
        if data.is_some() && !request.bad.is_empty() {
            self.repair(&request.bad, request.offset, request.len);
        }
        if let Some(req) = request.client {
            self.answer(Action::Answer { req, result, data }, false);
        }
    }

    fn flush(&mut self, id: u64) {
        let live = self.live();
        let mut pending = HashSet::new();
        let mut copied = Vec::new();
        for leg in live {
            pending.insert(self.send(leg, Owner::Request(id), What::Flush, (0, 0), Data::None));
            if let Some(leg_) = self.legs.get(leg) {
                let done = leg_
                    .behind
                    .next(0)
                    .map_or(self.size, |r| u64::from(r) * self.region);
                copied.push((leg, done));
            }
        }
        if let Some(request) = self.requests.get_mut(&id) {
            request.pending = pending;
            request.copied = copied;
        }
    }

    /// A change has its range: what it touches is noted first.
    pub(super) fn request_has_range(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        if request.what == What::Read {
            // Which leg counts may be another one than when it began to wait.
            return self.read(id);
        }
        let (offset, len) = (request.offset, request.len);
        let need = self.touch(offset, len);
        if !self.wait_note(need, Owner::Request(id)) {
            self.request_is_noted(id);
        }
    }

    /// A change may go to the legs.
    pub(super) fn request_is_noted(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (what, range) = (request.what, (request.offset, request.len));
        let data = match (what, request.client) {
            (What::Write, Some(req)) => Data::Request(req),
            _ => Data::None,
        };
        let live = self.live();
        let pending: HashSet<IoId> = live
            .into_iter()
            .map(|leg| self.send(leg, Owner::Request(id), what, range, data))
            .collect();
        if let Some(request) = self.requests.get_mut(&id) {
            request.pending = pending;
        }
    }

    /// What was waited for cannot be had.
    pub(super) fn refuse(&mut self, owner: Owner) {
        match owner {
            Owner::Request(id) => {
                if let Some(request) = self.requests.get_mut(&id) {
                    request.error.get_or_insert(IoError::Os(libc::EIO));
                    self.end_change(id);
                }
            }
            Owner::Copy(id) => self.end_copy(id, Err(IoError::Os(libc::EIO))),
            // A check notes nothing.
            Owner::Check(_) => {}
        }
    }

    pub(super) fn request_io_ended(
        &mut self,
        id: u64,
        io: IoId,
        at: Io,
        result: Result<(), IoError>,
    ) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.pending.remove(&io);
        if at.what == What::Read {
            return match result {
                Ok(()) => self.end_read(id, Some(io)),
                Err(e) => {
                    request.bad.push(at.leg);
                    request.error.get_or_insert(e);
                    self.actions.push(Action::Release(io));
                    self.read(id);
                }
            };
        }
        match result {
            Ok(()) => request.good.push(at.leg),
            Err(e) => {
                request.error.get_or_insert(e);
                let out = self.expel(at.leg, Why::Error(e));
                // One that went out may be back before the others have answered, with all that it missed: it does
                // not fail the request. The last one that holds the disk stays, and does.
                if !out && let Some(request) = self.requests.get_mut(&id) {
                    request.bad.push(at.leg);
                }
            }
        }
        // Taking the leg out may have ended it.
        if self.requests.get(&id).is_some_and(|r| r.pending.is_empty()) {
            self.end_change(id);
        }
    }

    /// A leg went out. What flushes under way would say of how far it was copied to is of before: it may come back with
    /// something else, and that is not copied yet.
    pub(super) fn forget_copied(&mut self, leg: usize) {
        for request in self.requests.values_mut() {
            request.copied.retain(|(i, _)| *i != leg);
        }
    }

    /// A change or flush has ended on all legs it went to.
    fn end_change(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let holds = |i: &usize| {
            self.legs
                .get(*i)
                .is_some_and(|l| l.is_current() && !l.removed)
        };
        let failed = request.bad.iter().any(holds);
        let well = !failed && request.good.iter().any(holds);
        if request.what == What::Flush && !well && !failed && !self.live().is_empty() {
            // All that were asked have gone out, and the one that holds the disk now came back meanwhile.
            return self.flush(id);
        }
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        if request.what == What::Flush {
            if well {
                self.flushed = self.flushed.max(request.upto);
                for (i, done) in &request.copied {
                    let leg = self.legs.get_mut(*i).filter(|l| l.stamp.whole);
                    if let Some(leg) = leg.filter(|_| request.good.contains(i)) {
                        leg.stamp.copied = leg.stamp.copied.max(*done);
                    }
                }
            }
        } else {
            if !well {
                self.distrust_copies(request.offset, request.len);
            }
            self.untouch(request.offset, request.len);
            let turns = self.locks.give(request.offset, Owner::Request(id));
            self.turns(turns);
        }
        let result = match well {
            true => Ok(()),
            false => Err(request.error.unwrap_or(IoError::Os(libc::EIO))),
        };
        if let Some(req) = request.client {
            let data = None;
            self.answer(Action::Answer { req, result, data }, true);
        }
    }

    /// A leg that holds the disk has not taken a write that one which is copied to may have: that one is
    /// copied to again there.
    fn distrust_copies(&mut self, offset: u64, len: u64) {
        let regions = self.regions_of(offset, len);
        let mut joined = false;
        for (i, leg) in self.legs.iter_mut().enumerate() {
            if i == self.chosen || !leg.is_live() {
                continue;
            }
            joined |= leg.joining.take().is_some();
            for region in regions.clone() {
                leg.behind.insert(region);
                if let Some(resync) = &mut leg.resync {
                    resync.again(region);
                }
            }
        }
        if joined {
            // The note that is under way may call it current.
            self.generation += 1;
            self.barrier = self.next_note;
            self.note_wanted = true;
            self.write_note();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Limits, Opening};
    use hearth_format::Uuid;
    use hearth_format::mirror::{LegStamp, LegState, MirrorStamps};

    /// Answers what legs are asked, but not the flushes on the legs that hang; those, and how requests ended.
    fn serve(machine: &mut Machine, hang: &[usize]) -> (Vec<(usize, IoId)>, Vec<bool>) {
        let (mut hung, mut ended) = (Vec::new(), Vec::new());
        loop {
            let actions = machine.actions();
            if actions.is_empty() {
                return (hung, ended);
            }
            for action in actions {
                match action {
                    Action::Io { io, leg, what, .. } => {
                        match what == What::Flush && hang.contains(&leg) {
                            true => hung.push((leg, io)),
                            false => machine.done(1, io, Ok(()), false),
                        }
                    }
                    Action::Note { seq, .. } => machine.noted(1, seq, true),
                    Action::Answer { result, .. } => ended.push(result.is_ok()),
                    _ => {}
                }
            }
        }
    }

    /// Two legs are asked to flush; the second fails, comes back and is current before the first answers.
    fn back_before_the_other(well: bool) -> Vec<bool> {
        let stamp = |n: u8| LegStamp {
            id: Uuid::from_bytes([n; 16]),
            generation: 1,
            state: LegState::Current,
            whole: false,
            copied: 0,
            left: (0, 0),
        };
        let opening = Opening {
            size: 1 << 20,
            region: 1 << 16,
            stamps: MirrorStamps {
                generation: 1,
                open: false,
                unknown: false,
                legs: vec![stamp(1), stamp(2)],
                marks: Vec::new(),
            },
            touched: None,
            present: vec![true, true],
            repair: None,
            limits: Limits::default(),
        };
        let mut machine = Machine::open(opening, 0).unwrap();
        machine.request(1, 1, What::Write, 0, 4096);
        assert_eq!(serve(&mut machine, &[]).1, [true]);
        machine.request(1, 2, What::Flush, 0, 0);
        let (hung, ended) = serve(&mut machine, &[0, 1]);
        assert!(ended.is_empty() && hung.len() == 2);
        let failed = Err(IoError::Os(libc::EIO));
        let of = |leg| hung.iter().find(|(l, _)| *l == leg).unwrap().1;
        machine.done(1, of(1), failed, false);
        assert!(machine.returned(1, 1, false));
        assert!(serve(&mut machine, &[0]).1.is_empty());
        assert!(
            machine
                .report()
                .iter()
                .all(|l| l.state == LegState::Current)
        );
        machine.done(1, of(0), if well { Ok(()) } else { failed }, false);
        serve(&mut machine, &[]).1
    }

    #[test]
    fn a_leg_that_is_back_does_not_fail_the_flush_it_went_out_for() {
        assert_eq!(back_before_the_other(true), [true]);
        // The other one goes out then: the one that is back is asked again.
        assert_eq!(back_before_the_other(false), [true]);
    }
}
