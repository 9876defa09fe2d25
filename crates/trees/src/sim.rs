//! The order of steps under a storm: each run is one seed, which a failure prints. A client makes, writes, cuts, renames and removes
//! files; in between things are written back; and at any step the power goes. Of what was not durable the modelled file system keeps
//! any part: names of a directory up to some point, each change of a file or none. A judge knows what was answered.
//!
//! Each [`Fault`] leaves a step out, or takes it too early or too late, and must be found.

pub(crate) mod dice {
    pub(crate) use super::model::Dice;
}
mod judge;
mod model;
mod two;
pub(crate) mod world;

use std::cell::RefCell;

use crate::large::{self, BLOCK, Large, STEP};
use crate::names::{self, Names};
use judge::{After, Judge};
use model::{CELL, Dice, Ino, Model, Node, Stop};

/// A step left out, or taken at another time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// What a maker gives a file is not made durable.
    FileUnsynced,
    /// The names in a directory are not made durable.
    NamesUnsynced,
    /// Of two directories the old one is made durable first.
    OldNamesFirst,
    /// What is cut off becomes zeros after the file was cut.
    ZerosLate,
    /// A file is longer for a durable write, and that is not durable.
    LengthUnsynced,
    /// The promise that a file looks as it was left stays while it is changed.
    PromiseStays,
    /// The promise is given before everything is durable.
    PromiseEarly,
    /// A file's record goes when its name does, which is not durable yet.
    ForgottenEarly,
    /// What lies behind the end stays when a file is opened.
    BehindStays,
    /// The registry is not told of a longer bound.
    BoundUnrecorded,
    /// What a cut made zeros is not durable.
    ZerosUnsynced,
}

const FAULTS: &[Fault] = &[
    Fault::FileUnsynced,
    Fault::NamesUnsynced,
    Fault::OldNamesFirst,
    Fault::ZerosLate,
    Fault::LengthUnsynced,
    Fault::PromiseStays,
    Fault::PromiseEarly,
    Fault::ForgottenEarly,
    Fault::BehindStays,
    Fault::BoundUnrecorded,
    Fault::ZerosUnsynced,
];

/// Changes of a run.
const CHANGES: usize = 120;
const DIRS: usize = 2;
const NAMES: [&[u8]; 3] = [b"a", b"b", b"c"];
/// No file is longer.
const MOST: u64 = 1 << 40;
/// Where files are written: at their beginning, and around a step of the bound.
const PLACES: [u64; 2] = [0, STEP - 2 * BLOCK];
const CELLS_PER_PLACE: u64 = 16;

struct World {
    model: RefCell<Model>,
    fault: Option<Fault>,
    /// Steps put off by a fault.
    late: RefCell<Vec<Late>>,
}

enum Late {
    Zero(Ino, u64, u64),
    Names(usize),
}

impl World {
    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Takes the steps that were put off.
    fn catch_up(&self) -> Result<(), Stop> {
        for late in self.late.take() {
            let mut model = self.model.borrow_mut();
            model.step()?;
            match late {
                Late::Zero(ino, from, to) => model.zero(ino, from, to, true),
                Late::Names(dir) => model.sync_names(dir),
            }
        }
        Ok(())
    }
}

impl Names for World {
    type Node = Node;
    type Error = Stop;

    fn find(&self, dir: &Node, name: &[u8]) -> Result<Node, Stop> {
        let found = self.model.borrow().find(dir.dir(), name);
        found.map(Node::File).ok_or(Stop::NoEnt)
    }

    fn unlink(&self, dir: &Node, name: &[u8], _directory: bool) -> Result<(), Stop> {
        let mut model = self.model.borrow_mut();
        model.step()?;
        let gone = model.find(dir.dir(), name).ok_or(Stop::NoEnt)?;
        model.unlink(dir.dir(), name);
        if self.is(Fault::ForgottenEarly) {
            model.forget(gone);
        }
        Ok(())
    }

    fn rename(&self, from: (&Node, &[u8]), to: (&Node, &[u8])) -> Result<(), Stop> {
        let mut model = self.model.borrow_mut();
        model.step()?;
        model.rename((from.0.dir(), from.1), (to.0.dir(), to.1));
        Ok(())
    }

    fn link(&self, file: &Node, dir: &Node, name: &[u8]) -> Result<(), Stop> {
        let mut model = self.model.borrow_mut();
        model.step()?;
        model.set_name(dir.dir(), name, file.file());
        Ok(())
    }

    fn sync(&self, file: &Node) -> Result<(), Stop> {
        let mut model = self.model.borrow_mut();
        model.step()?;
        if !self.is(Fault::FileUnsynced) {
            model.sync(file.file());
        }
        Ok(())
    }

    fn sync_names(&self, dir: &Node) -> Result<(), Stop> {
        self.model.borrow_mut().step()?;
        if self.is(Fault::OldNamesFirst) && self.model.borrow().crossing == Some(dir.dir()) {
            self.late.borrow_mut().push(Late::Names(dir.dir()));
            return Ok(());
        }
        if !self.is(Fault::NamesUnsynced) {
            self.model.borrow_mut().sync_names(dir.dir());
        }
        Ok(())
    }
}

/// A file that is open as a disk.
struct Open<'a>(&'a World, Ino);

impl Large for Open<'_> {
    type Error = Stop;

    fn size(&self) -> u64 {
        self.0.model.borrow().file(self.1).len
    }

    fn synced(&self) -> u64 {
        self.0.model.borrow().synced(self.1)
    }

    fn bound(&self) -> u64 {
        self.0.model.borrow().bound(self.1)
    }

    fn raise(&self, bound: u64) -> Result<(), Stop> {
        self.0.model.borrow_mut().step()?;
        if !self.0.is(Fault::BoundUnrecorded) {
            self.0.model.borrow_mut().raise(self.1, bound);
        }
        Ok(())
    }

    fn withdraw(&self) -> Result<(), Stop> {
        self.0.model.borrow_mut().step()?;
        if !self.0.is(Fault::PromiseStays) {
            self.0.model.borrow_mut().withdraw(self.1);
        }
        Ok(())
    }

    fn grow(&self, len: u64) -> Result<(), Stop> {
        let mut model = self.0.model.borrow_mut();
        model.step()?;
        model.set_len(self.1, len);
        Ok(())
    }

    fn set(&self, len: u64) -> Result<(), Stop> {
        let mut model = self.0.model.borrow_mut();
        model.step()?;
        model.set_len(self.1, len);
        model.step()?;
        model.sync(self.1);
        Ok(())
    }

    fn sync(&self) -> Result<(), Stop> {
        let mut model = self.0.model.borrow_mut();
        model.step()?;
        if self.0.is(Fault::LengthUnsynced) {
            model.believe_synced(self.1);
        } else {
            model.sync(self.1);
        }
        Ok(())
    }

    fn zero(&self, from: u64, to: u64) -> Result<(), Stop> {
        self.0.model.borrow_mut().step()?;
        if self.0.is(Fault::ZerosLate) {
            self.0.late.borrow_mut().push(Late::Zero(self.1, from, to));
            return Ok(());
        }
        let durable = !self.0.is(Fault::ZerosUnsynced);
        self.0.model.borrow_mut().zero(self.1, from, to, durable);
        Ok(())
    }
}

/// A client with his files.
struct Run {
    world: World,
    judge: Judge,
    dice: Dice,
    /// The last value written.
    version: u32,
}

impl Run {
    fn new(seed: u64, fault: Option<Fault>) -> Run {
        let mut dice = Dice::new(seed);
        let mut model = Model::new(DIRS, dice.roll(1 << 40));
        model.promise_early = fault == Some(Fault::PromiseEarly);
        model.promise_stays = fault == Some(Fault::PromiseStays);
        Run {
            world: World {
                model: RefCell::new(model),
                fault,
                late: RefCell::default(),
            },
            judge: Judge::default(),
            dice,
            version: 0,
        }
    }

    fn name(&mut self) -> (usize, &'static [u8]) {
        let dir = self.dice.roll(DIRS as u64) as usize;
        (dir, NAMES[self.dice.roll(NAMES.len() as u64) as usize])
    }

    /// A file, by its name.
    fn some_file(&mut self) -> Option<Ino> {
        let (dir, name) = self.name();
        self.world.model.borrow().find(dir, name)
    }

    fn place(&mut self) -> u64 {
        let base = PLACES[usize::from(self.dice.chance(25))];
        base + self.dice.roll(CELLS_PER_PLACE) * CELL
    }

    fn change(&mut self) -> Result<(), Stop> {
        self.world.model.borrow_mut().busy = None;
        match self.dice.roll(12) {
            0..=1 => self.create(),
            2..=5 => self.write(),
            6 => self.commit(),
            7..=8 => self.resize(),
            9 => self.rename(),
            10 => self.remove(),
            _ => self.link(),
        }
    }

    fn create(&mut self) -> Result<(), Stop> {
        let (dir, name) = self.name();
        if self.world.model.borrow().find(dir, name).is_some() {
            return Ok(());
        }
        let ino = self.world.model.borrow_mut().next_ino();
        self.judge.may_name(After::Made(dir, name, ino));
        let world = &self.world;
        names::create(
            world,
            &Node::Dir(dir),
            name,
            false,
            || {
                let mut model = world.model.borrow_mut();
                model.step()?;
                model.make(dir, name, ino);
                Ok(())
            },
            |node| {
                let mut model = world.model.borrow_mut();
                model.step()?;
                model.dress(node.file());
                Ok(())
            },
        )?;
        self.judge.named(After::Made(dir, name, ino));
        self.judge.made(ino);
        Ok(())
    }

    fn write(&mut self) -> Result<(), Stop> {
        let Some(ino) = self.some_file() else {
            return Ok(());
        };
        self.open(ino)?;
        let from = self.place();
        let to = from + (1 + self.dice.roll(6)) * CELL;
        let durable = self.dice.chance(50);
        self.version += 1;
        let version = self.version;
        self.judge.may_write(ino, from, to, version);
        large::reach(&Open(&self.world, ino), to, durable, MOST)?;
        let mut model = self.world.model.borrow_mut();
        model.step()?;
        model.write(ino, from, to, version, durable);
        drop(model);
        self.world.catch_up()?;
        self.judge.written(ino, from, to, version, durable);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Stop> {
        let Some(ino) = self.some_file() else {
            return Ok(());
        };
        self.open(ino)?;
        large::commit(&Open(&self.world, ino))?;
        let mut model = self.world.model.borrow_mut();
        model.step()?;
        model.flush_log();
        drop(model);
        self.judge.committed(ino);
        Ok(())
    }

    fn resize(&mut self) -> Result<(), Stop> {
        let Some(ino) = self.some_file() else {
            return Ok(());
        };
        self.open(ino)?;
        let len = self.place();
        self.judge.may_resize(ino, len);
        large::resize(&Open(&self.world, ino), len, MOST)?;
        self.world.catch_up()?;
        self.judge.resized(ino, len);
        Ok(())
    }

    fn rename(&mut self) -> Result<(), Stop> {
        let (from, to) = (self.name(), self.name());
        let Some(ino) = self.world.model.borrow().find(from.0, from.1) else {
            return Ok(());
        };
        let victim = self.world.model.borrow().find(to.0, to.1);
        // Of two names of one file none goes.
        if victim == Some(ino) {
            return Ok(());
        }
        let same = from.0 == to.0;
        self.world.model.borrow_mut().crossing = (!same).then_some(to.0);
        let after = After::Moved { from, to, ino };
        self.judge.may_name(after);
        let ends = (Node::Dir(from.0), Node::Dir(to.0));
        let (a, b) = ((&ends.0, from.1), (&ends.1, to.1));
        names::rename(&self.world, a, b, same, || {})?;
        self.world.model.borrow_mut().crossing = None;
        self.world.catch_up()?;
        self.judge.named(after);
        self.gone(victim);
        Ok(())
    }

    fn remove(&mut self) -> Result<(), Stop> {
        let (dir, name) = self.name();
        let Some(ino) = self.world.model.borrow().find(dir, name) else {
            return Ok(());
        };
        self.judge.may_name(After::Removed(dir, name));
        names::remove(&self.world, &Node::Dir(dir), name, false, || {})?;
        self.judge.named(After::Removed(dir, name));
        self.gone(Some(ino));
        Ok(())
    }

    fn link(&mut self) -> Result<(), Stop> {
        let ((dir, name), file) = (self.name(), self.some_file());
        let Some(ino) = file else { return Ok(()) };
        if self.world.model.borrow().find(dir, name).is_some() {
            return Ok(());
        }
        self.judge.may_name(After::Made(dir, name, ino));
        let (node, at) = (Node::File(ino), Node::Dir(dir));
        names::link(&self.world, &node, &at, name)?;
        self.judge.named(After::Made(dir, name, ino));
        Ok(())
    }

    /// A file may have lost its last name, durably: its record goes.
    fn gone(&mut self, victim: Option<Ino>) {
        let mut model = self.world.model.borrow_mut();
        if let Some(ino) = victim.filter(|ino| !model.has_name(*ino)) {
            model.forget(ino);
        }
    }

    /// A file becomes a disk, if it is none now.
    fn open(&mut self, ino: Ino) -> Result<(), Stop> {
        let Some(behind) = self.world.model.borrow_mut().open(ino) else {
            return Ok(());
        };
        let stays = self.world.is(Fault::BehindStays);
        let end = self.world.model.borrow().file(ino).len;
        large::settle(end, behind, |from, to| {
            let mut model = self.world.model.borrow_mut();
            model.step()?;
            if !stays {
                model.zero(ino, from, to, true);
            }
            Ok(())
        })?;
        self.world.model.borrow_mut().opened(ino);
        Ok(())
    }

    /// What clients see is what they were answered.
    fn look(&mut self, crashed: bool) -> Result<(), String> {
        let model = self.world.model.borrow();
        self.judge.judge_names(&model, crashed)?;
        for ino in model.named_files() {
            self.judge.judge_file(&model, ino, crashed)?;
        }
        if crashed {
            self.judge.seen();
        }
        Ok(())
    }

    fn crash(&mut self) -> Result<(), String> {
        self.world.late.borrow_mut().clear();
        self.world.model.borrow_mut().crash();
        // The daemon opens what has something only on flash, and forgets what is gone; it may be killed meanwhile.
        let known = self.world.model.borrow_mut().start();
        for ino in known {
            if self.open(ino).is_err() {
                return self.crash();
            }
        }
        self.look(true)
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..CHANGES {
            if self.dice.chance(25) {
                let steps = self.dice.roll(12) as u32;
                self.world.model.borrow_mut().crash_in(steps);
            }
            match self.change() {
                Ok(()) => self.look(false)?,
                Err(Stop::Crash) => self.crash()?,
                Err(Stop::NoEnt) => return Err("a name that was there is gone".to_owned()),
            }
        }
        // Everything is written back: the tree alone is what clients were answered.
        self.world.model.borrow_mut().crash_in(u32::MAX);
        let owing = self.world.model.borrow().owing();
        for ino in owing {
            if let Err(stop) = self.open(ino) {
                return Err(format!("file {ino} cannot be opened: {stop:?}"));
            }
        }
        self.world.model.borrow_mut().write_all_back();
        self.look(false)?;
        self.world.model.borrow_mut().lose_flash();
        self.look(false)
    }
}

fn env(name: &str, or: u64) -> u64 {
    let given = std::env::var(name).ok().and_then(|v| v.parse().ok());
    given.unwrap_or(or)
}

#[test]
fn a_crash_at_any_step_leaves_what_was_answered() {
    let (start, seeds) = (
        env("HEARTH_TREES_START", 1),
        env("HEARTH_TREES_SEEDS", 2000),
    );
    let mut crashes = 0;
    for seed in start..start + seeds {
        let mut run = Run::new(seed, None);
        if let Err(why) = run.run() {
            panic!("seed {seed}: {why}; again with HEARTH_TREES_START={seed} HEARTH_TREES_SEEDS=1");
        }
        crashes += run.world.model.borrow().crashes;
    }
    println!("seeds {start} to {}: {crashes} crashes", start + seeds - 1);
    assert!(
        seeds < 100 || crashes > seeds,
        "{crashes} crashes are too few to tell"
    );
}

#[test]
fn each_step_that_is_left_out_or_misplaced_is_found() {
    for fault in FAULTS {
        let found = (1..4000).find_map(|seed| {
            let why = Run::new(seed, Some(*fault)).run().err()?;
            Some((seed, why))
        });
        let (seed, why) = found.unwrap_or_else(|| panic!("{fault:?} was not found"));
        println!("{fault:?}: seed {seed}: {why}");
    }
}
