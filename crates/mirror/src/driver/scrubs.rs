//! When a scrub begins, what is kept of it, and what is told.

use super::{Driver, ToKeep};
use crate::habits::{ScrubState, Undecided};
use crate::machine::{Difference, ScrubEnd, ScrubReport, UNDECIDED_MAX};
use crate::mirror::lock;
use crate::news::News;
use crate::scrub::{ScrubOrder, Scrubbing};
use hearth_fault::Fault;
use hearth_io::now_ns;

/// How often it is kept how far a scrub is.
const KEEP_NS: u64 = 10_000_000_000;

impl Driver {
    /// Goes on as was asked before the start.
    pub(super) fn take_up_habits(&mut self) {
        let now = now_ns();
        self.machine.set_rate(now, self.habits.rate);
        self.machine.pause(now, self.habits.paused);
        self.machine.set_scrub_rate(now, self.habits.scrub_rate);
        let today = (self.wall)();
        let scrub = &mut self.habits.scrub;
        if scrub.ended_ms == 0 && !scrub.active {
            // The first one is due when it has been there for as long as lies between two.
            scrub.ended_ms = today;
            self.keep_habits();
        } else if scrub.active {
            self.begin(now);
        }
    }

    pub(super) fn keep_habits(&mut self) {
        self.scrubbing.kept_ns = now_ns();
        let habits = Box::new(self.habits.clone());
        // Nobody takes it only when the thread that keeps it has died.
        let _ = self.notes.send(ToKeep::Habits(habits));
        *lock(&self.shared.habits) = self.habits.clone();
    }

    pub(super) fn scrub_when_due(&mut self, now: u64) {
        // What is being decided is not to be taken for it.
        if self.machine.scrub_report().is_some() {
            return;
        }
        let today = (self.wall)();
        if self.habits.believe_clock(today) {
            self.keep_habits();
        }
        if !self.habits.is_due(today) {
            return;
        }
        self.start_anew();
        self.begin(now);
        self.keep_habits();
    }

    fn start_anew(&mut self) {
        self.habits.scrub = ScrubState {
            began_ms: (self.wall)(),
            ended_ms: self.habits.scrub.ended_ms,
            ..ScrubState::default()
        };
    }

    fn begin(&mut self, now: u64) {
        let scrub = &mut self.habits.scrub;
        (scrub.active, scrub.called_off) = (true, false);
        self.scrubbing = Scrubbing {
            before: scrub.clone(),
            deciding: false,
            kept_ns: now,
        };
        let from = scrub.at;
        self.machine.scrub(now, from, None, None, !self.read_only);
        self.shared.witness.tell(News::ScrubStarted { at: from });
    }

    /// Does what is asked about scrubs.
    pub(super) fn scrub(&mut self, now: u64, what: &ScrubOrder) -> Result<(), Fault> {
        if let Some(days) = what.every_days {
            self.habits.every_days = days;
        }
        if let Some(rate) = what.rate {
            self.habits.scrub_rate = rate;
            self.machine.set_scrub_rate(now, rate);
        }
        let active = self.machine.scrub_report().is_some();
        if what.cancel {
            self.machine.cancel_scrub(now);
        } else if let Some(leg) = &what.prefer {
            if active {
                return Err(Fault::new(
                    "a scrub goes on",
                    "wait until it has ended, or call it off with --cancel",
                ));
            }
            self.decide(now, leg)?;
        } else if what.begin && active && what.anew {
            return Err(Fault::new(
                "a scrub goes on",
                "call it off with --cancel first",
            ));
        } else if what.begin && !active {
            if what.anew || !self.habits.scrub.called_off {
                self.start_anew();
            }
            self.begin(now);
        }
        Ok(())
    }

    /// Makes what was found and is not decided the same as this leg has it.
    fn decide(&mut self, now: u64, name: &str) -> Result<(), Fault> {
        if self.read_only {
            return Err(Fault::new(
                "the disk is read-only",
                "write the legs by other means",
            ));
        }
        let report = self.machine.report();
        let names = (0..report.len()).map(|i| self.shared.leg_name(i));
        let mine = names.zip(&report).enumerate();
        let mut mine = mine.filter(|(_, (n, leg))| n == name && !leg.removed);
        let Some((leg, _)) = mine.next() else {
            return Err(Fault::new(
                format!("{name} is no leg of the mirror"),
                "`hearth disk show` lists them",
            ));
        };
        let scrub = &self.habits.scrub;
        let open = scrub.undecided.iter();
        let places: Vec<(u64, u64)> = open.map(|u| (u.offset, u.offset + u.len)).collect();
        if places.is_empty() {
            return Err(Fault::new(
                "no scrub has found a place where somebody has to say which leg is right",
                "run `hearth disk scrub` first",
            ));
        }
        let mut before = scrub.clone();
        before.undecided.clear();
        before.undecided_all = before.undecided_all.saturating_sub(places.len() as u64);
        self.scrubbing = Scrubbing {
            before,
            deciding: true,
            kept_ns: now,
        };
        self.machine.scrub(now, 0, Some(places), Some(leg), true);
        Ok(())
    }

    fn named(&self, difference: &Difference) -> Undecided {
        let leg = |(leg, sum): &(usize, u32)| (self.shared.leg_name(*leg), *sum);
        Undecided {
            offset: difference.offset,
            len: difference.len,
            legs: difference.legs.iter().map(leg).collect(),
            cached: difference.cached,
        }
    }

    /// What is known, with what the one under way has found.
    fn state_with(&self, report: &ScrubReport) -> ScrubState {
        let mut state = self.scrubbing.before.clone();
        if !self.scrubbing.deciding {
            state.at = report.at;
            state.checked += report.checked;
            state.partial += report.partial;
            state.unread += report.unread;
        }
        state.repairs += report.repairs;
        state.repaired += report.repaired;
        let room = UNDECIDED_MAX.saturating_sub(state.undecided.len());
        let more = report.undecided.iter().take(room);
        state.undecided.extend(more.map(|d| self.named(d)));
        state.undecided_all += report.undecided_all;
        state
    }

    /// Keeps how far a scrub is, for those who look and for the next start.
    pub(super) fn publish_scrub(&mut self) {
        let Some(report) = self.machine.scrub_report() else {
            return;
        };
        // What is being decided is in nobody's way if it is forgotten: it is still undecided.
        if self.scrubbing.deciding || report.at == self.habits.scrub.at {
            return;
        }
        self.habits.scrub = self.state_with(report);
        *lock(&self.shared.habits) = self.habits.clone();
        if now_ns() >= self.scrubbing.kept_ns + KEEP_NS {
            self.keep_habits();
        }
    }

    /// A scrub has ended.
    pub(super) fn scrubbed(&mut self, end: &ScrubEnd) {
        let report = &end.report;
        let mut state = self.state_with(report);
        if !self.scrubbing.deciding {
            // One that ends with the daemon goes on with the next one.
            let stopping = lock(&self.shared.inbox).stop;
            state.active = !end.whole && stopping;
            state.called_off = !end.whole && !stopping;
        }
        if !state.active {
            state.ended_ms = (self.wall)();
        }
        let news = News::Scrubbed {
            whole: end.whole,
            deciding: self.scrubbing.deciding,
            state: Box::new(state.clone()),
        };
        let goes_on = state.active;
        self.habits.scrub = state;
        self.scrubbing = Scrubbing::default();
        self.keep_habits();
        if !goes_on {
            self.shared.witness.tell(news);
        }
    }
}
