//! A small world of disks, origins, users and accidents, in an order that a seed decides.
//!
//! It acts on effects as the daemon does (`daemon/course.rs`), with an engine, a registry and origins of a
//! few flags each: whoever has a disk's turn does one effect after the other, while everything else goes
//! on in between. Origins hang and come back, workers end without a word, users ask for anything, the
//! daemon stops. After each step it looks for what must never be; at the end everything answers, and then
//! every disk has to come to rest.

use super::*;
use std::collections::VecDeque;

/// Worlds tried.
const SEEDS: u64 = 3000;
/// Steps of trouble in each.
const STEPS: usize = 300;
/// Steps within which everything has to come to rest once there is no more trouble.
const REST: usize = 60;
const DISKS: usize = 4;

/// Numbers that look random and depend on the seed alone.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What somebody who has the turn is at.
enum Work {
    /// Opening the origin; waits as long as the origin hangs.
    Opening,
    /// The origin is open, and judged next.
    Judging,
    /// One effect after the other.
    Doing(VecDeque<Effect>),
}

/// A disk, and all that can be seen of it from outside its life.
struct Disk {
    life: Life,
    turn: Option<Work>,
    hangs: bool,
    missing: bool,
    dirty: bool,
    /// Something of a client's is in flight.
    in_flight: bool,
    /// The engine has it.
    attached: bool,
    offered: bool,
    shut: bool,
    open: bool,
    known: bool,
    given_up: bool,
    /// Its name is free.
    retired: bool,
    reconciled: bool,
}

impl Disk {
    fn new(arriving: bool) -> Disk {
        Disk {
            life: if arriving {
                Life::Arriving
            } else {
                Life::Unserved(Unserved::Waiting(Error::unavailable("unanswered", "")))
            },
            turn: arriving.then_some(Work::Judging),
            hangs: false,
            missing: false,
            dirty: false,
            in_flight: false,
            attached: false,
            offered: false,
            shut: false,
            open: arriving,
            known: true,
            given_up: false,
            retired: false,
            reconciled: true,
        }
    }

    fn tell(&mut self, event: Event) {
        if let Ok((next, effects)) = self.life.on(event) {
            self.life = next;
            match &mut self.turn {
                Some(Work::Doing(rest)) => rest.extend(effects),
                _ => self.turn = Some(Work::Doing(effects.into())),
            }
        }
    }

    /// Does one effect.
    fn perform(&mut self, effect: Effect, dice: &mut Dice, calm: bool) {
        match effect {
            Effect::Offer => {
                assert!(self.attached, "offered without the engine");
                assert!(self.reconciled, "read before what is dirty has won");
                self.offered = true;
            }
            Effect::Withdraw => self.offered = false,
            Effect::Shut(shut) => self.shut = shut,
            Effect::Settle => {
                if calm || !dice.one_in(3) {
                    self.reconciled = true;
                    self.tell(Event::Settled);
                }
            }
            Effect::Detach if self.attached && self.in_flight => self.tell(Event::Busy),
            Effect::Detach => {
                self.attached = false;
                let owed = self.dirty;
                self.tell(Event::Detached { owed });
            }
            Effect::Reattach => self.attached = true,
            Effect::Close { wait } => {
                assert!(!self.attached, "closed while the engine has it");
                assert!(!self.offered, "closed while on offer");
                // Whoever comes later gets another export.
                (self.open, self.shut) = (false, false);
                if wait {
                    self.tell(Event::Closed);
                }
            }
            Effect::Erase if calm || !self.known || !dice.one_in(4) => {
                self.known = false;
                self.tell(Event::Erased);
            }
            Effect::Erase => {
                self.tell(Event::NotErased(Error::unavailable("flash", "")));
            }
            Effect::GiveUp => {
                assert!(!self.open, "given up while open");
                assert!(!self.known, "given up while the registry knows it");
                self.given_up = true;
                self.tell(Event::GivenUp);
            }
            Effect::Retire => {
                assert_eq!(self.life, Life::Gone);
                self.retired = true;
            }
            Effect::Drain(_)
            | Effect::Disconnect
            | Effect::CutOff
            | Effect::DropClaim
            | Effect::Tell(_) => {}
        }
    }

    /// Whoever has the turn takes a step.
    fn work(&mut self, dice: &mut Dice, calm: bool) {
        match self.turn.take() {
            None => {}
            Some(Work::Opening) if self.hangs => self.turn = Some(Work::Opening),
            Some(Work::Opening) => {
                let missing = self.missing;
                self.open = !missing;
                self.tell(Event::Opened);
                self.turn = Some(Work::Judging);
                if missing {
                    let why = Unserved::Waiting(Error::unavailable("missing", ""));
                    self.tell(Event::NotTaken(why));
                }
            }
            Some(Work::Judging) => {
                if !calm && dice.one_in(4) {
                    self.open = false;
                    let watched = dice.one_in(2);
                    let why = Error::refused("changed", "decide");
                    self.tell(Event::NotTaken(Unserved::Refused { why, watched }));
                } else {
                    assert!(!self.attached, "two have it");
                    assert!(self.open);
                    self.attached = true;
                    let reconcile = self.dirty && dice.one_in(2);
                    self.reconciled = !reconcile;
                    self.tell(Event::Taken { reconcile });
                }
            }
            Some(Work::Doing(mut rest)) => {
                if let Some(effect) = rest.pop_front() {
                    self.turn = Some(Work::Doing(rest));
                    self.perform(effect, dice, calm);
                    if matches!(&self.turn, Some(Work::Doing(rest)) if rest.is_empty()) {
                        self.turn = None;
                    }
                }
            }
        }
    }

    /// What housekeeping would find.
    fn look(&mut self) {
        if self.turn.is_some() || !self.life.is_busy() {
            return;
        }
        let event = match &self.life {
            Life::Leaving => Event::AtRest,
            Life::Removing {
                discard,
                stage: Stage::Draining,
                from,
            } if *discard || !self.dirty || from.is_some() => Event::Drained,
            Life::Removing {
                stage: Stage::Closing | Stage::Detaching,
                ..
            } if !self.in_flight => Event::AtRest,
            Life::Reconciling | Life::Served { .. } if !self.dirty => Event::Drained,
            _ => return,
        };
        self.tell(event);
    }

    fn retry(&mut self) {
        if self.turn.is_none() && self.life.is_awaited() {
            self.tell(Event::Open);
            self.turn = Some(Work::Opening);
        }
    }

    /// Whoever has the turn ends without a word. What it was doing is done or not.
    fn panic(&mut self) {
        let Some(work) = self.turn.take() else {
            return;
        };
        match work {
            Work::Opening | Work::Judging => {
                self.open = false;
                self.tell(Event::Abandoned);
            }
            // Steps that wait for nothing do not end half done; those that wait may.
            Work::Doing(rest) if self.life == Life::Leaving => drop(rest),
            work => self.turn = Some(work),
        }
    }

    fn trouble(&mut self, dice: &mut Dice) {
        match dice.below(14) {
            0 => self.hangs = !self.hangs,
            1 => self.missing = !self.missing,
            // A client writes, if it may: also one that has stayed although nobody new is let in.
            2 if self.attached && self.reconciled && !self.shut => self.dirty = true,
            3 if self.attached => self.in_flight = !self.in_flight,
            4 if self.attached => self.dirty = false,
            5 => self.panic(),
            6 => self.retry(),
            7 => self.look(),
            8..=12 if self.turn.is_none() => {
                let event = match dice.below(5) {
                    0 => Event::Flush,
                    1 => Event::Cancel,
                    2 => Event::Failed(Error::unavailable("lost", "")),
                    3 if self.attached => Event::Fence(Error::refused("taken over", "")),
                    _ => Event::Remove {
                        discard: dice.one_in(2),
                    },
                };
                self.tell(event);
            }
            _ => self.work(dice, false),
        }
    }

    fn check(&self) {
        assert!(!self.offered || self.attached, "offered without the engine");
        assert!(!self.attached || self.open, "the engine has what is closed");
        assert!(!self.given_up || !self.known);
        if self.life == Life::Gone && self.known {
            assert!(!self.given_up && !self.attached);
        }
        // What users see is gone only when that is durable.
        assert!(self.life.is_known() || !self.offered);
    }

    /// A step in a world in which everything answers.
    fn calm(&mut self, dice: &mut Dice) {
        (self.hangs, self.missing, self.in_flight) = (false, false, false);
        self.dirty &= !self.attached;
        if let Life::Fencing(why) = self.life.clone()
            && self.turn.is_none()
        {
            self.tell(Event::Fence(why));
        }
        self.look();
        self.retry();
        self.work(dice, true);
    }

    fn is_at_rest(&self) -> bool {
        let rest = match &self.life {
            Life::Served { flushing } => !flushing && self.offered && !self.shut,
            Life::Unserved(Unserved::Refused { watched, .. }) => !watched && !self.open,
            Life::Gone => self.retired && !self.open,
            _ => false,
        };
        rest && self.turn.is_none()
    }
}

fn run(seed: u64) -> Vec<Life> {
    let mut dice = Dice(seed);
    let mut disks: Vec<Disk> = (0..DISKS).map(|n| Disk::new(n == 0)).collect();
    // The last one's origin hangs from the start to the end of the trouble; nobody else notices.
    for _ in 0..STEPS {
        let at = dice.below(DISKS as u64) as usize;
        disks[at].trouble(&mut dice);
        disks[at].check();
    }
    for disk in &mut disks {
        for _ in 0..REST {
            disk.calm(&mut dice);
            disk.check();
        }
        assert!(disk.is_at_rest(), "waits for ever: {:?}", disk.life);
    }
    disks.into_iter().map(|disk| disk.life).collect()
}

#[test]
fn nothing_that_must_not_be_and_nothing_waits_for_ever() {
    let mut ends = [0; 3];
    for seed in 0..SEEDS {
        let lives = std::panic::catch_unwind(|| run(seed));
        let Ok(lives) = lives else {
            panic!("seed {seed}");
        };
        for life in lives {
            match life {
                Life::Served { .. } => ends[0] += 1,
                Life::Unserved(_) => ends[1] += 1,
                _ => ends[2] += 1,
            }
        }
    }
    // All of it was tried.
    assert!(ends.iter().all(|n| *n > SEEDS / 20), "{ends:?}");
}

/// What one disk does depends on nothing of another: with an origin that hangs for good, all others
/// still come to rest.
#[test]
fn an_origin_that_hangs_holds_up_no_other_disk() {
    for seed in 0..100 {
        let mut dice = Dice(seed);
        let mut disks: Vec<Disk> = (0..DISKS).map(|_| Disk::new(false)).collect();
        disks[0].hangs = true;
        for disk in &mut disks {
            disk.retry();
        }
        for _ in 0..REST {
            disks[0].look();
            disks[0].work(&mut dice, true);
            for disk in &mut disks[1..] {
                disk.calm(&mut dice);
                disk.check();
            }
        }
        assert!(matches!(disks[0].life, Life::Opening(_)));
        assert!(disks[1..].iter().all(Disk::is_at_rest));
    }
}
