//! Scrubs in the storm: blocks that rot on one leg, are damaged on their way from a leg, or are cached wrong; writes
//! while it goes on, crashes in the middle of a repair.
//!
//! A leg that rots is one that lies, and what a client may read is not said then; so clients leave those blocks alone, or
//! write them. Where a crash left a region noted, one leg is copied over the others, rotten or not: of those blocks
//! only that all legs are the same in the end is asked for.

use super::judge::add;
use super::*;
use crate::machine::{Difference, Finding, Held, Seen, decide};

/// What a rotten block reads as, and the one it was.
const ROT: Version = 1 << 30;
/// What a block reads as that was damaged on its way, and what is cached of one by mistake.
const DAMAGED: Version = 1 << 28;
const MISTAKEN: Version = 1 << 27;

/// What was done to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    /// Nothing, or it was written since, or a crash made it anybody's guess.
    None,
    /// It lies, and what the guest wrote is cached.
    Known,
    /// It lies, and nothing tells; what is cached of it was read from a leg. Or only the cache is wrong.
    Unknown,
    /// It cannot be read.
    Unreadable,
    /// It cannot be read, and what the others hold is not what is cached.
    Blind,
    /// It lies, and it does not matter how it ends.
    Decided,
}

impl World {
    pub(super) fn compare_read(
        &mut self,
        check: u64,
        offset: u64,
        len: u64,
        reads: &[(usize, IoId)],
        prefer: Option<usize>,
    ) -> Result<(), String> {
        let first = (offset / BLOCK) as usize;
        if self.dice.chance(self.damage)
            && let Some((_, io)) = self.dice.pick(reads)
        {
            let i = self.dice.roll(len / BLOCK) as usize;
            self.reads.get_mut(&io).ok_or("released data")?[i] = DAMAGED + self.next_req as Version;
        }
        let mut findings: Vec<Finding> = Vec::new();
        for i in 0..(len / BLOCK) as usize {
            let mut held = Vec::new();
            for (leg, io) in reads {
                let sum = self.reads.get(io).ok_or("released data")?[i];
                let class = sum as usize;
                held.push(Held {
                    leg: *leg,
                    class,
                    sum,
                });
            }
            let at = offset + i as u64 * BLOCK;
            findings.extend(decide(at, BLOCK, &held, self.known[first + i], prefer));
        }
        let now = self.now;
        let sum = match reads.first().and_then(|(_, io)| self.reads.get(io)) {
            Some(held) if held.len() == 1 => held[0],
            _ => 0,
        };
        if let Some(machine) = &mut self.machine {
            machine.compared(now, check, Seen { findings, sum });
        }
        Ok(())
    }

    /// What is cached there and is not what the legs hold is dropped.
    pub(super) fn drop_unlike(
        &mut self,
        read: IoId,
        from: u64,
        offset: u64,
        len: u64,
    ) -> Result<(), String> {
        let held = self.reads.get(&read).ok_or("released data")?;
        let held = &held[(from / BLOCK) as usize..][..(len / BLOCK) as usize];
        let known = &mut self.known[(offset / BLOCK) as usize..];
        for (known, held) in known.iter_mut().zip(held) {
            *known = known.filter(|c| c.sum == *held);
        }
        Ok(())
    }
}

fn cached(block: usize, sum: Version, written: bool) -> Option<Cached> {
    Some(Cached {
        block: block as u64,
        sum,
        written,
    })
}

struct Scrubber {
    world: World,
    harm: Vec<Harm>,
    /// What each leg held when all harm was done.
    began: Vec<Vec<Version>>,
    /// Blocks of which something wrong was cached.
    mistaken: Vec<bool>,
    /// What is kept of a scrub over a crash: where it was, and what it had found.
    kept: (u64, Vec<Difference>),
    prefer: Option<usize>,
}

impl Scrubber {
    /// A mirror with different content everywhere, of which some rots.
    fn new(seed: u64, fault: Option<Fault>) -> Result<Scrubber, String> {
        let mut world = World::new(seed, fault);
        // Legs that go and come are tried elsewhere: here they would take along what was right.
        world.complete = true;
        world.aged = Aged::Unasked;
        world.limits.leg_ns = u64::MAX / 2;
        world.blocks = BLOCKS;
        world.open()?;
        for block in 0..BLOCKS {
            world.request(What::Write, block, 1)?;
            world.drain()?;
        }
        for disk in &mut world.disks {
            disk.flush();
        }
        let mut harm = vec![Harm::None; BLOCKS];
        let mut mistaken = vec![false; BLOCKS];
        world.damage = 3;
        for _ in 0..8 {
            let block = world.dice.roll(BLOCKS as u64) as usize;
            let leg = world.dice.roll(world.disks.len() as u64) as usize;
            if harm[block] != Harm::None {
                continue;
            }
            let was = world.disks[leg].durable[block];
            let kind = world.dice.roll(7);
            // A leg that is preferred later can be read.
            let leg = if kind == 1 { 1 } else { leg };
            let disk = &mut world.disks[leg];
            mistaken[block] = matches!(kind, 1 | 2);
            let known = match kind {
                0 | 3 => None,
                1 | 2 => cached(block, MISTAKEN, false),
                4 => cached(block, was, false),
                5 => cached(block, ROT + was, false),
                _ => cached(block, was, true),
            };
            world.known[block] = known;
            harm[block] = match kind {
                0 => Harm::Unreadable,
                1 => Harm::Blind,
                2..=5 => Harm::Unknown,
                _ => Harm::Known,
            };
            match kind {
                0 | 1 => disk.rotten.push(block),
                2 => {}
                _ => disk.durable[block] = ROT + was,
            }
        }
        let began = world.disks.iter().map(|d| d.durable.clone()).collect();
        Ok(Scrubber {
            world,
            harm,
            began,
            mistaken,
            kept: (0, Vec::new()),
            prefer: None,
        })
    }

    fn begin(&mut self) -> Result<(), String> {
        let (now, from) = (self.world.now, self.kept.0);
        if let Some(machine) = &mut self.world.machine {
            machine.scrub(now, from, None, self.prefer, true);
        }
        self.world.act()
    }

    /// What is found is kept with how far it is.
    fn keep(&mut self, report: &crate::machine::ScrubReport) {
        self.kept.0 = report.at;
        for difference in &report.undecided {
            if !self.kept.1.contains(difference) {
                self.kept.1.push(difference.clone());
            }
        }
    }

    fn step(&mut self) -> Result<(), String> {
        let world = &mut self.world;
        match world.dice.roll(100) {
            0..25 => {
                let len = 1 + world.dice.roll(3) as usize;
                let first = world.dice.roll((BLOCKS - len) as u64) as usize;
                let blocks = first..first + len;
                let harmed = blocks.clone().any(|b| self.harm[b] != Harm::None);
                match world.dice.roll(6) {
                    0 => return world.request(What::Flush, 0, 0),
                    1..4 if !harmed => return world.request(What::Read, first, len),
                    // Few of what is rotten is written before it is looked at.
                    _ if harmed && !world.dice.chance(10) => return Ok(()),
                    _ => {}
                }
                blocks.for_each(|b| self.forgive(b));
                self.world.request(What::Write, first, len)
            }
            25..80 => {
                let leg = world.dice.roll(world.disks.len() as u64) as usize;
                world.serve(leg)
            }
            80..88 => world.note(true),
            88..96 => {
                let report = world.machine.as_ref().and_then(|m| m.scrub_report());
                let report = report.cloned();
                let by = [1, 50, 300][world.dice.roll(3) as usize];
                world.tick(by)?;
                if let Some(report) = report {
                    self.keep(&report);
                }
                Ok(())
            }
            // What a crash leaves noted is copied from one leg, so that it is nobody's guess any more: not each time.
            96 if world.dice.chance(30) => self.crash(),
            97 if world.dice.chance(20) => {
                // What is copied to it and cannot be read is repaired by that.
                for harm in self.harm.iter_mut().filter(|h| **h == Harm::Blind) {
                    *harm = Harm::Decided;
                }
                self.world.add_leg(0)
            }
            _ => Ok(()),
        }
    }

    fn crash(&mut self) -> Result<(), String> {
        for block in 0..BLOCKS {
            self.suspect(block);
        }
        self.world.crash()?;
        let regions = self.world.notes.1.clone();
        for block in 0..BLOCKS {
            if self.world.forgot || regions.has((block as u64 * BLOCK / REGION) as u32) {
                self.forgive(block);
            } else if self.harm[block] == Harm::None {
                // What was to be written there has not come to be noted: it is as it was.
                let disks = &self.world.disks;
                let lies = disks.iter().any(|d| (ROT..JUNK).contains(&d.at(block)));
                if lies {
                    self.harm[block] = Harm::Decided;
                }
            }
        }
        self.world.scrubbed = None;
        self.begin()
    }

    /// What a block reads as on a leg that lies may be read from now on.
    fn suspect(&mut self, block: usize) {
        let judge = &mut self.world.judge;
        for disk in &self.world.disks {
            let held = disk.at(block);
            if (ROT..JUNK).contains(&held) {
                add(&mut judge.possible[block], held);
                add(&mut judge.after_crash[block], held);
            }
        }
    }

    /// A block is not what a scrub is asked to find any more.
    fn forgive(&mut self, block: usize) {
        self.suspect(block);
        self.harm[block] = Harm::None;
        self.world.known[block] = None;
    }

    fn run(&mut self) -> Result<(), String> {
        self.begin()?;
        for _ in 0..60_000 {
            if let Some(end) = self.world.scrubbed.take() {
                self.keep(&end.report);
                if end.whole {
                    return self.judge();
                }
                return Err("somebody called it off".to_owned());
            }
            self.step()?;
        }
        Err(format!("it does not end: {:#?}", self.world.machine))
    }

    /// Where nobody has written since, what could be known is durable, and what could not was told.
    fn judge(&mut self) -> Result<(), String> {
        let world = &self.world;
        let Some(machine) = &world.machine else {
            return Err("no machine".to_owned());
        };
        let report = machine.report();
        let differing: Vec<usize> = self
            .kept
            .1
            .iter()
            .map(|d| (d.offset / BLOCK) as usize)
            .collect();
        for (block, harm) in self.harm.iter().enumerate() {
            let held: Vec<Version> = (world.disks.iter().zip(&report))
                .filter(|(_, leg)| leg.state == LegState::Current && leg.behind == 0)
                .map(|(disk, _)| disk.durable[block])
                .collect();
            let same = held.iter().all(|v| *v == held[0]) && held[0] < ROT;
            let unreadable = world.disks.iter().zip(&report).any(|(disk, leg)| {
                leg.state == LegState::Current && leg.behind == 0 && disk.rotten.contains(&block)
            });
            let blind = world.disks.iter().any(|d| d.rotten.contains(&block));
            match harm {
                Harm::Known if !same => return Err(format!("block {block} is {held:?}")),
                Harm::Unreadable if unreadable => {
                    return Err(format!("block {block} cannot be read"));
                }
                Harm::Unknown | Harm::Blind if !differing.contains(&block) => {
                    return Err(format!("block {block} is {held:?} and nobody was told"));
                }
                Harm::Unknown | Harm::Blind => {
                    let disks = self.began.iter().zip(&world.disks);
                    let mut written = disks.filter(|(began, d)| began[block] != d.at(block));
                    if written.next().is_some() || *harm == Harm::Blind && !blind {
                        return Err(format!("block {block} is undecided and was written"));
                    }
                }
                _ => {}
            }
        }
        let lied = |block: &usize| !self.ever_harmed(*block);
        if let Some(block) = differing.iter().copied().find(lied) {
            return Err(format!(
                "block {block} was never harmed and is said to differ"
            ));
        }
        Ok(())
    }

    fn ever_harmed(&self, block: usize) -> bool {
        self.mistaken[block]
            || self.kept.1.iter().any(|d| {
                (d.offset / BLOCK) as usize == block
                    && d.legs.iter().any(|(_, sum)| (ROT..JUNK).contains(sum))
            })
    }

    /// Somebody says which leg is right; then all are the same.
    fn decide(&mut self) -> Result<(), String> {
        self.kept = (0, Vec::new());
        self.prefer = Some(0);
        for harm in &mut self.harm {
            // It is decided now, whoever is right.
            if matches!(harm, Harm::Unknown | Harm::Blind) {
                *harm = Harm::Decided;
            }
        }
        self.run()?;
        let left: Vec<&Difference> = self.kept.1.iter().collect();
        if !left.is_empty() {
            return Err(format!("still undecided: {left:?}"));
        }
        // What the leg holds that was preferred is right now.
        for block in 0..BLOCKS {
            self.suspect(block);
            let held = self.world.disks[0].at(block);
            if let Some(cached) = self.world.known[block].filter(|c| c.sum != held) {
                return Err(format!("block {block} is {held} and cached as {cached:?}"));
            }
        }
        self.world.settle()
    }
}

fn run(seed: u64, fault: Option<Fault>) -> Result<(), String> {
    let mut scrubber = Scrubber::new(seed, fault)?;
    scrubber.run()?;
    scrubber.decide()
}

#[test]
fn what_rots_is_found_and_repaired_where_something_tells() {
    for seed in start()..start() + seeds() / 10 + 1 {
        if let Err(why) = run(seed, None) {
            panic!(
                "seed {seed}: {why}; again with HEARTH_MIRROR_START={seed} HEARTH_MIRROR_SEEDS=1"
            );
        }
    }
}

#[test]
fn broken_rules_of_a_scrub_are_found() {
    for fault in [
        Fault::CheckUnlocked,
        Fault::CheckBehind,
        Fault::CheckSkipsErrors,
        Fault::CheckUnflushed,
        Fault::CheckTrustsReads,
        Fault::CheckOneLook,
        Fault::CheckKeepsCopies,
        Fault::CheckGuesses,
    ] {
        let found = (1..4000).find_map(|seed| Some((seed, run(seed, Some(fault)).err()?)));
        let (seed, why) = found.unwrap_or_else(|| panic!("{fault:?} was not found"));
        println!("{fault:?}: seed {seed}: {why}");
    }
}
