//! Legs that come back as older copies of themselves after a stop in order, and nothing but what was written last shows
//! it; or with one block that has rotted. No read may ever return what an older copy holds.

use super::*;
use crate::machine::LegReport;

struct Older {
    world: World,
    /// A leg, and what it held at some time.
    image: Option<(usize, Vec<Version>)>,
}

impl Older {
    fn step(&mut self) -> Result<(), String> {
        let world = &mut self.world;
        match world.dice.roll(100) {
            0..40 => world.ask(),
            40..80 => {
                let leg = world.dice.roll(world.disks.len() as u64) as usize;
                world.serve(leg)
            }
            80..88 => world.note(true),
            88..97 => {
                let by = [1, 50, 300][world.dice.roll(3) as usize];
                world.tick(by)
            }
            97 => {
                let leg = world.dice.roll(world.disks.len() as u64) as usize;
                let held = (0..BLOCKS).map(|block| world.disks[leg].at(block));
                let report = world.machine.as_ref().map_or_else(Vec::new, |m| m.report());
                // What is copied to a leg is not marked.
                let whole = |l: &LegReport| l.state == LegState::Current && l.behind == 0;
                if report.iter().all(whole) {
                    self.image = Some((leg, held.collect()));
                }
                Ok(())
            }
            _ if world.dice.chance(20) => {
                // What was being written then is not marked any more.
                self.image = None;
                self.world.crash()
            }
            _ => Ok(()),
        }
    }

    /// Stops in order, makes a leg older, and starts again; everything is read.
    fn come_back(&mut self) -> Result<(), String> {
        self.world.settle()?;
        self.world.machine = None;
        let world = &mut self.world;
        match self.image.take() {
            Some((leg, image)) if world.dice.chance(80) => {
                world.say(|| format!("the leg at {leg} is as it was"));
                world.disks[leg].durable = image;
            }
            _ => {
                // One of the places that were written last, and not the newest.
                let marks = world.notes.0.marks.clone();
                let leg = world.dice.roll(world.disks.len() as u64) as usize;
                let at = world.dice.roll(marks.len().max(2) as u64 - 1) as usize;
                if let Some(mark) = marks.get(1 + at) {
                    world.say(|| format!("block {} of the leg at {leg} rots", mark.block));
                    world.disks[leg].durable[mark.block as usize] = 1 << 30;
                }
            }
        }
        world.aged = Aged::Perhaps;
        world.open()?;
        world.aged = Aged::Never;
        for block in 0..world.blocks {
            world.request(What::Read, block, 1)?;
            world.drain()?;
        }
        Ok(())
    }
}

fn run(seed: u64, fault: Option<Fault>) -> Result<(), String> {
    let mut world = World::new(seed, fault);
    (world.complete, world.keeps_notes) = (true, true);
    let mut older = Older { world, image: None };
    older.world.open()?;
    for _ in 0..3 {
        for _ in 0..200 {
            older.step()?;
        }
        older.come_back()?;
    }
    older.world.settle()
}

#[test]
fn leg_rolled_back_while_stopped_is_never_read() {
    for seed in start()..start() + seeds() / 10 + 1 {
        if let Err(why) = run(seed, None) {
            panic!(
                "seed {seed}: {why}; again with HEARTH_MIRROR_START={seed} HEARTH_MIRROR_SEEDS=1"
            );
        }
    }
}

#[test]
fn broken_rules_about_older_copies_are_found() {
    for fault in [Fault::MarksEarly, Fault::OldCopyBelieved] {
        let found = (1..4000).find_map(|seed| Some((seed, run(seed, Some(fault)).err()?)));
        let (seed, why) = found.unwrap_or_else(|| panic!("{fault:?} was not found"));
        println!("{fault:?}: seed {seed}: {why}");
    }
}
