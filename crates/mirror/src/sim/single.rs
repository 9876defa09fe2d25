//! Each operation of a fixed workload fails in turn: with an error, half done, never, late, or because the power goes.
//!
//! Nothing is left to dice but what a power cut leaves of a disk's cache. Two legs hold the disk all the time, so that of any one
//! failure no client may see anything: no request fails, every read says what it has to say, and the legs are the same in the end.

use super::*;

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// It is answered with an error, and nothing of it was done.
    Error,
    /// The same, and half of it was done.
    Torn,
    /// It is never answered while anybody waits, and neither is what the leg is asked after it. In the end it arrives after all.
    Hang,
    /// It is answered when it was given up, and the leg is there again at once.
    Late,
    /// The power goes: half of it may be done, and of what was in caches anything may be left.
    Power,
    /// The program ends.
    Kill,
}

const ALL: [How; 6] = [
    How::Error,
    How::Torn,
    How::Hang,
    How::Late,
    How::Power,
    How::Kill,
];

/// What is done in a workload.
#[derive(Clone, Copy, Debug)]
enum Do {
    /// Asks for so many blocks from there on.
    Ask(What, usize, usize),
    /// Ends so many operations.
    Serve(usize),
    /// Until all requests are answered.
    Drain,
    /// Time passes, and all that is begun then is ended.
    Rest(u64),
    /// A new leg.
    Add,
    /// The leg that was there first goes, if another one holds the disk.
    Remove,
    /// Compares all legs.
    Scrub,
    /// Asks for everything.
    ReadAll,
}

const ZERO: What = What::Zero { punch: true };

/// Writes of every kind, then those that are under way at one time, then beside a copy, then beside a scrub.
const WORK: &[Do] = &[
    Do::Ask(What::Write, 0, 4),
    Do::Drain,
    Do::Ask(What::Read, 2, 4),
    Do::Ask(What::Flush, 0, 0),
    Do::Drain,
    Do::Ask(What::Write, 10, 3),
    Do::Ask(What::Write, 12, 3),
    Do::Ask(What::Read, 11, 2),
    Do::Ask(ZERO, 1, 2),
    Do::Serve(3),
    Do::Ask(What::Write, 30, 5),
    Do::Drain,
    Do::Ask(What::Flush, 0, 0),
    Do::Drain,
    // Regions are forgotten.
    Do::Rest(600),
    Do::Ask(What::Write, 20, 1),
    Do::Serve(1),
    Do::Add,
    Do::Serve(4),
    Do::Ask(What::Write, 5, 4),
    Do::Serve(3),
    Do::Ask(What::Read, 4, 5),
    Do::Ask(What::Write, 36, 4),
    Do::Drain,
    Do::Rest(600),
    Do::Ask(What::Flush, 0, 0),
    Do::Drain,
    Do::Scrub,
    Do::Serve(3),
    Do::Ask(What::Write, 16, 4),
    Do::Serve(4),
    Do::Drain,
    Do::Rest(600),
    Do::Remove,
    Do::Ask(What::Write, 24, 2),
    Do::Drain,
    Do::Ask(What::Flush, 0, 0),
    Do::Drain,
    Do::ReadAll,
];

/// A world in which one operation fails.
struct Single {
    world: World,
    /// Which fails, of all operations and notes, and how. All before it are good.
    at: u64,
    how: How,
    /// Those that have ended, or failed.
    ended: u64,
    /// Its place in what was done.
    done: usize,
    failed: bool,
}

impl Single {
    fn new(at: u64, how: How, dice: u64) -> Single {
        let mut world = World::new(1, None);
        world.dice = Dice(dice | 1);
        // Two legs, and all of the disk.
        let legs: Vec<LegStamp> = world.notes.0.legs.drain(..).take(2).collect();
        world.notes.0.legs = legs;
        world.disks = vec![
            Disk {
                durable: vec![0; BLOCKS],
                ..Disk::default()
            };
            2
        ];
        world.ids.truncate(2);
        world.judge = Judge::new();
        world.blocks = BLOCKS;
        world.notes.1 = Regions::none((BLOCKS as u64 * BLOCK).div_ceil(REGION) as u32);
        world.complete = true;
        world.keeps_notes = true;
        Single {
            world,
            at,
            how,
            ended: 0,
            done: 0,
            failed: false,
        }
    }

    /// The leg whose operation is the oldest, and its place there; a leg that hangs ends nothing.
    fn oldest(&self) -> Option<(usize, usize)> {
        let disks = self.world.disks.iter().enumerate();
        let all = disks
            .filter(|(_, disk)| !disk.hung)
            .flat_map(|(leg, disk)| {
                let pending = disk.pending.iter().enumerate();
                pending.map(move |(at, p)| (p.io, leg, at))
            });
        all.min().map(|(_, leg, at)| (leg, at))
    }

    /// One operation or note ends; false if there is none.
    fn serve(&mut self) -> Result<bool, String> {
        if self.world.noting.is_some() {
            self.ended += 1;
            if self.ended != self.at {
                self.world.note(true)?;
                return Ok(true);
            }
            self.failed = true;
            match self.how {
                How::Power | How::Kill => self.crash()?,
                // Notes have no legs that could hang: they are made or not.
                _ => self.world.note(false)?,
            }
            return Ok(true);
        }
        let Some((leg, at)) = self.oldest() else {
            return Ok(false);
        };
        self.ended += 1;
        if self.ended != self.at {
            self.world.serve_at(leg, at)?;
            return Ok(true);
        }
        self.failed = true;
        let disk = &mut self.world.disks[leg];
        match self.how {
            How::Error | How::Torn => {
                if self.how == How::Torn {
                    let pending = disk.pending[at].clone();
                    let half = pending.data.len().div_ceil(2);
                    if matches!(pending.what, What::Write | What::Zero { .. }) {
                        disk.execute(pending.what, pending.first, &pending.data[..half]);
                    }
                }
                self.world.fail_at(leg, at)?;
            }
            How::Hang => disk.hung = true,
            How::Late => {
                disk.hung = true;
                self.world.tick(LIMITS.leg_ns + 1)?;
                self.world.disks[leg].hung = false;
            }
            How::Power | How::Kill => self.crash()?,
        }
        Ok(true)
    }

    fn crash(&mut self) -> Result<(), String> {
        self.world.crash_by(self.how == How::Power)
    }

    fn drain(&mut self) -> Result<(), String> {
        for _ in 0..10_000 {
            if self.world.judge.asked.is_empty() && self.world.noting.is_none() {
                return Ok(());
            }
            if !self.serve()? {
                // Whoever waits waits for the leg that hangs.
                self.world.tick(LIMITS.leg_ns / 4)?;
            }
        }
        Err("it is not answered".to_owned())
    }

    fn step(&mut self, what: Do) -> Result<(), String> {
        match what {
            Do::Ask(what, first, len) => self.world.request(what, first, len),
            Do::Serve(count) => {
                for _ in 0..count {
                    self.serve()?;
                }
                Ok(())
            }
            Do::Drain => self.drain(),
            Do::Rest(time) => {
                for _ in 0..8 {
                    self.world.tick(time / 8)?;
                    while self.serve()? {}
                }
                Ok(())
            }
            Do::Add => self.world.add_leg(0),
            Do::Remove => {
                let now = self.world.now;
                let first = Uuid::from_bytes([1; 16]);
                let Some(leg) = self.world.ids.iter().position(|id| *id == first) else {
                    return Ok(());
                };
                let machine = self.world.machine.as_mut().ok_or("no machine")?;
                if machine.remove(now, leg) {
                    self.world.notes.0.legs.retain(|l| l.id != first);
                }
                self.world.act()
            }
            Do::Scrub => {
                let now = self.world.now;
                let machine = self.world.machine.as_mut().ok_or("no machine")?;
                machine.scrub(now, 0, None, None, true);
                self.world.act()
            }
            Do::ReadAll => {
                for block in 0..BLOCKS {
                    self.world.request(What::Read, block, 1)?;
                    self.drain()?;
                }
                Ok(())
            }
        }
    }

    /// All of the workload, from where a crash has left it; then all is well again, and the legs become the same.
    fn run(&mut self) -> Result<u64, String> {
        self.world.open()?;
        while let Some(what) = WORK.get(self.done) {
            self.done += 1;
            self.step(*what)
                .map_err(|e| format!("{what:?}, the {}.: {e}", self.done))?;
        }
        let ended = self.ended;
        // A note that is not made is a failure of its own, which may refuse what waits for it.
        if self.world.refused > 0 && !self.is_note() {
            return Err(format!("{} requests failed", self.world.refused));
        }
        self.world.settle()?;
        Ok(ended)
    }

    /// What failed was a note, of which there is one place only here.
    fn is_note(&self) -> bool {
        self.failed && self.world.unnoted > 0
    }
}

#[test]
fn each_operation_may_fail_once() {
    let mut runs = 0;
    for how in ALL {
        for at in 1.. {
            // What a power cut leaves is tried in several ways.
            let ways = if how == How::Power { 6 } else { 1 };
            let mut reached = false;
            for way in 0..ways {
                let mut single = Single::new(at, how, 77 + 1000 * way);
                let ended = single
                    .run()
                    .unwrap_or_else(|why| panic!("{how:?} at operation {at}, {way}: {why}"));
                reached |= single.failed && ended >= at;
                runs += 1;
            }
            if !reached {
                assert!(at > 100, "{how:?}: the workload ends after {at} operations");
                println!("{how:?}: {} operations", at - 1);
                break;
            }
        }
    }
    println!("{runs} runs");
}

/// The workload finds broken rules as well: it is not only that nothing happens.
#[test]
fn broken_rules_are_found_by_single_failures() {
    for fault in [
        Fault::WriteBeforeIntent,
        Fault::ClearBeforeFlush,
        Fault::JoinUnflushed,
        Fault::SkipTouched,
    ] {
        let found = ALL
            .iter()
            .flat_map(|how| (1..400).map(move |at| (*how, at)));
        let found = found.flat_map(|(how, at)| (0..6).map(move |way| (how, at, way)));
        let why = found.into_iter().find_map(|(how, at, way)| {
            let mut single = Single::new(at, how, 77 + 1000 * way);
            single.world.fault = Some(fault);
            let why = single.run().err()?;
            Some(format!("{how:?} at operation {at}: {why}"))
        });
        println!(
            "{fault:?}: {}",
            why.unwrap_or_else(|| panic!("{fault:?} was not found"))
        );
    }
}
