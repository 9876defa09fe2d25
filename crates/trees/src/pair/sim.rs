//! Two modelled trees under a storm: each run is one seed, which a failure prints. Clients change places; in between what was noted is
//! forgotten, trees fail at any step, hang (what they were told to do happens, and nobody hears of it), go and come back, as they were
//! left or as they were much earlier; at any step the power goes, with either tree or with the book. A judge knows what was answered.
//!
//! Each [`Fault`] must be found.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::{Book, Fail, Fault, Found, News, NotMended, Pair, Place, Sides, Stamp};
use crate::sim_dice::Dice;

type Slot = (Place, u8);
type Values = BTreeMap<Slot, u32>;

#[derive(Clone, Default)]
struct Tree {
    now: Values,
    durable: Values,
    pending: Vec<(Slot, Option<u32>)>,
    mark: u64,
    broken: bool,
    absent: bool,
    /// Itself at earlier times.
    past: Vec<(u64, Values)>,
}

fn put(values: &mut Values, (slot, value): (Slot, Option<u32>)) {
    match value {
        Some(value) => values.insert(slot, value),
        None => values.remove(&slot),
    };
}

impl Tree {
    fn set(&mut self, slot: Slot, value: Option<u32>) {
        put(&mut self.now, (slot, value));
        self.pending.push((slot, value));
    }

    fn sync(&mut self, only: impl Fn(&Place) -> bool) {
        for change in self.pending.extract_if(.., |(slot, _)| only(&slot.0)) {
            put(&mut self.durable, change);
        }
    }

    /// Of what was not durable any part is kept, of each slot in order.
    fn crash(&mut self, dice: &mut Dice) {
        let mut lost = BTreeSet::new();
        for change in std::mem::take(&mut self.pending) {
            if lost.contains(&change.0) || dice.chance(50) {
                lost.insert(change.0);
                continue;
            }
            put(&mut self.durable, change);
        }
        self.now = self.durable.clone();
    }
}

#[derive(Default)]
struct Paper {
    stamp: Option<Stamp>,
    noted: BTreeSet<Place>,
    all: bool,
}

struct World {
    trees: RefCell<[Tree; 2]>,
    paper: RefCell<Paper>,
    dice: RefCell<Dice>,
    steps_left: Cell<u32>,
    crashed: Cell<bool>,
    mended: RefCell<BTreeSet<Place>>,
}

fn gone() -> String {
    "gone".to_owned()
}

impl World {
    /// True if the step is taken; and whether anybody hears of it.
    fn step(&self, side: Option<usize>) -> (bool, bool) {
        if self.crashed.get() {
            return (false, false);
        }
        let mut dice = self.dice.borrow_mut();
        let left = self.steps_left.get();
        if left == 0 {
            self.crashed.set(true);
            return (dice.chance(50), false);
        }
        self.steps_left.set(left - 1);
        let Some(side) = side else {
            return (true, true);
        };
        let mut trees = self.trees.borrow_mut();
        // Some of what is not durable becomes so of its own accord.
        for tree in trees.iter_mut() {
            if dice.chance(10)
                && let Some((slot, _)) = tree.pending.first().copied()
            {
                tree.sync(|place| *place == slot.0);
            }
        }
        let tree = &trees[side];
        if tree.broken || tree.absent {
            return (!tree.absent && dice.chance(50), false);
        }
        (true, true)
    }

    fn take<T>(
        &self,
        side: Option<usize>,
        work: impl FnOnce(&mut [Tree; 2], &mut Paper) -> T,
    ) -> Result<T, String> {
        let (done, heard) = self.step(side);
        if !done {
            return Err(gone());
        }
        let done = work(&mut self.trees.borrow_mut(), &mut self.paper.borrow_mut());
        heard.then_some(done).ok_or_else(gone)
    }
}

struct Hand(Rc<World>);

impl Book for Hand {
    fn note(&self, places: &[Place]) -> Result<(), String> {
        self.0.take(None, |_, paper| paper.noted.extend(places))
    }

    fn forget(&self, places: &[Place]) {
        let _ = self.0.take(None, |_, paper| {
            for place in places {
                paper.noted.remove(place);
            }
        });
    }

    fn all(&self, differ: bool) -> Result<(), String> {
        self.0.take(None, |_, paper| {
            paper.all = differ;
            paper.noted.clear();
        })
    }

    fn store(&self, stamp: &Stamp) -> Result<(), String> {
        self.0.take(None, |_, paper| paper.stamp = Some(*stamp))
    }
}

impl Sides for Hand {
    fn mark(&self, side: usize, generation: u64) -> Result<(), String> {
        self.0
            .take(Some(side), |trees, _| trees[side].mark = generation)
    }

    fn sync(&self, side: usize) -> Result<(), String> {
        self.0
            .take(Some(side), |trees, _| trees[side].sync(|_| true))
    }

    fn mend(
        &self,
        place: Place,
        from: usize,
        to: usize,
        _noted: &BTreeSet<Place>,
    ) -> Result<Vec<Place>, NotMended> {
        if self.0.dice.borrow_mut().chance(5) {
            return Err(NotMended::Again);
        }
        let read = |trees: &mut [Tree; 2], side: usize| -> Values {
            let tree = &trees[side];
            let own = tree.now.iter().filter(|(slot, _)| slot.0 == place);
            own.map(|(slot, value)| (*slot, *value)).collect()
        };
        self.0.mended.borrow_mut().insert(place);
        let source = self.0.take(Some(from), |trees, _| read(trees, from));
        let source = source.map_err(NotMended::Source)?;
        let target = self.0.take(Some(to), |trees, _| read(trees, to));
        let target = target.map_err(NotMended::Target)?;
        let slots: BTreeSet<Slot> = source.keys().chain(target.keys()).copied().collect();
        for slot in slots {
            let value = source.get(&slot).copied();
            if value != target.get(&slot).copied() {
                let set = self.0.take(Some(to), |trees, _| trees[to].set(slot, value));
                set.map_err(NotMended::Target)?;
            }
        }
        Ok(Vec::new())
    }

    fn everything(&self, of: usize) -> Result<Vec<Place>, String> {
        self.0.take(Some(of), |_, _| PLACES.to_vec())
    }

    fn clear(&self, side: usize) -> Result<(), String> {
        self.0.take(Some(side), |_, _| ())
    }

    fn probe(&self, side: usize) -> Result<Option<u64>, String> {
        self.0.take(Some(side), |trees, _| {
            Some(trees[side].mark).filter(|m| *m > 0)
        })
    }

    fn drop_side(&self, _side: usize) {}

    fn stand(&self, _current: [bool; 2]) {}

    fn tell(&self, _news: News) {}
}

const PLACES: [Place; 6] = [
    Place::Names(1),
    Place::Names(2),
    Place::File(3),
    Place::Part(3, 0),
    Place::Part(3, 1),
    Place::File(4),
];

/// What clients may be told of a slot: now, and after a crash.
#[derive(Clone, Default)]
struct May {
    now: BTreeSet<Option<u32>>,
    crashed: BTreeSet<Option<u32>>,
}

struct Judge(BTreeMap<Slot, May>);

impl Judge {
    fn of(&mut self, slot: Slot) -> &mut May {
        self.0.entry(slot).or_insert_with(|| May {
            now: [None].into(),
            crashed: [None].into(),
        })
    }

    fn answered(&mut self, slot: Slot, value: Option<u32>, durable: bool) {
        let may = self.of(slot);
        may.now = [value].into();
        if durable {
            may.crashed.clear();
        }
        may.crashed.insert(value);
    }

    fn unsure(&mut self, slot: Slot, value: Option<u32>) {
        let may = self.of(slot);
        may.now.insert(value);
        may.crashed.insert(value);
    }

    fn crash(&mut self) {
        for may in self.0.values_mut() {
            may.now = may.crashed.clone();
        }
    }

    fn check(&mut self, values: &Values, after_crash: bool) -> Result<(), String> {
        for (slot, may) in &mut self.0 {
            let value = values.get(slot).copied();
            if !may.now.contains(&value) {
                return Err(format!("{slot:?} is {value:?}, may be {:?}", may.now));
            }
            // It keeps giving this answer.
            may.now = [value].into();
            if after_crash {
                may.crashed = [value].into();
            }
        }
        Ok(())
    }
}

type Trees = Pair<Hand, Hand>;

struct Run {
    world: Rc<World>,
    judge: Judge,
    fault: Option<Fault>,
    next: u32,
}

impl Run {
    fn roll(&self, sides: u64) -> u64 {
        self.world.dice.borrow_mut().roll(sides)
    }

    fn chance(&self, percent: u64) -> bool {
        self.world.dice.borrow_mut().chance(percent)
    }

    fn open(&self) -> Option<Trees> {
        let found = {
            let paper = self.world.paper.borrow();
            Found {
                stamp: paper.stamp,
                noted: paper.noted.iter().copied().collect(),
                all: paper.all,
            }
        };
        let (book, sides) = (Hand(self.world.clone()), Hand(self.world.clone()));
        Pair::open_with(book, sides, found, self.fault).ok()
    }

    fn change(&mut self, pair: &Trees) {
        let first = PLACES[self.roll(PLACES.len() as u64) as usize];
        let second = PLACES[self.roll(PLACES.len() as u64) as usize];
        let places: BTreeSet<Place> = [first, second].into();
        let places: Vec<Place> = places.into_iter().collect();
        let durable = self.chance(60);
        let mut sets = Vec::new();
        for place in &places {
            self.next += 1;
            let slot = (*place, self.roll(2) as u8);
            let value = (!self.chance(20)).then_some(self.next);
            sets.push((slot, value));
        }
        let refused = self.chance(5);
        let partly = self.chance(5);
        let before = pair.first();
        let world = self.world.clone();
        let tree = |why: String| Fail::Tree(why.clone(), why);
        let done = pair.change(
            &places,
            |why| why,
            |side, of| {
                if refused {
                    return Err(Fail::Client("no".to_owned()));
                }
                for (slot, value) in &sets {
                    let set = world.take(Some(side), |trees, _| trees[side].set(*slot, *value));
                    set.map_err(tree)?;
                    if partly && of.is_none() && side == before {
                        return Err(Fail::Partly("no room".to_owned()));
                    }
                }
                if durable {
                    for place in &places {
                        let synced =
                            world.take(Some(side), |trees, _| trees[side].sync(|p| p == place));
                        synced.map_err(tree)?;
                    }
                }
                Ok(())
            },
        );
        for (slot, value) in sets {
            match &done {
                Ok(()) => self.judge.answered(slot, value, durable),
                Err(_) => self.judge.unsure(slot, value),
            }
        }
    }

    fn read(&mut self, pair: &Trees, after_crash: bool) -> Result<(), String> {
        if self.world.crashed.get() {
            return Ok(());
        }
        let side = pair.first();
        let values = {
            let trees = self.world.trees.borrow();
            if trees[side].broken || trees[side].absent {
                return Ok(());
            }
            trees[side].now.clone()
        };
        self.judge.check(&values, after_crash)
    }

    /// The power goes.
    fn crash(&mut self) {
        let world = self.world.clone();
        let mut dice = world.dice.borrow_mut();
        let mut trees = world.trees.borrow_mut();
        let mut paper = world.paper.borrow_mut();
        for tree in trees.iter_mut() {
            tree.crash(&mut dice);
            tree.broken = false;
            tree.absent = false;
        }
        self.judge.crash();
        let Some(stamp) = paper.stamp else { return };
        let side = dice.roll(2) as usize;
        match dice.roll(6) {
            // It is gone with the power, and is there again later.
            0 => trees[side].absent = true,
            // It comes back as it was before this start, if the other one has everything.
            1 if stamp.current[1 - side] && trees[1 - side].mark >= stamp.generation => {
                let left = match stamp.current[side] {
                    true => stamp.generation,
                    false => stamp.left[side],
                };
                let tree = &mut trees[side];
                // A copy of the very generation cannot be told from the tree.
                let old: Vec<_> = tree
                    .past
                    .iter()
                    .filter(|(mark, _)| *mark < left)
                    .cloned()
                    .collect();
                if let Some((mark, values)) = old.get(dice.roll(old.len().max(1) as u64) as usize) {
                    tree.mark = *mark;
                    tree.durable.clone_from(values);
                    tree.now.clone_from(values);
                }
            }
            2 if dice.chance(30) => *paper = Paper::default(),
            _ => {}
        }
    }

    fn go(&mut self) -> Result<(), String> {
        let mut pair: Option<Trees> = None;
        for _ in 0..90 {
            if self.world.crashed.get() || pair.is_none() {
                if self.world.crashed.get() {
                    self.crash();
                    self.world.crashed.set(false);
                }
                pair = None;
                let steps = if self.chance(50) {
                    self.roll(60) as u32
                } else {
                    400
                };
                self.world.steps_left.set(steps);
                match self.open() {
                    Some(opened) => {
                        self.read(&opened, true)?;
                        pair = Some(opened);
                    }
                    // What has everything comes back.
                    None => {
                        let mut trees = self.world.trees.borrow_mut();
                        trees.iter_mut().for_each(|tree| tree.absent = false);
                    }
                }
                continue;
            }
            let Some(pair) = &pair else { continue };
            match self.roll(16) {
                0 => pair.tidy_after(Duration::ZERO),
                1 | 2 => {
                    pair.restore(|| false);
                }
                3 => pair.look(),
                4 => {
                    let side = self.roll(2) as usize;
                    let mut trees = self.world.trees.borrow_mut();
                    if !trees[1 - side].broken && !trees[1 - side].absent {
                        trees[side].broken = true;
                    }
                }
                5 | 6 => {
                    let mut trees = self.world.trees.borrow_mut();
                    for tree in trees.iter_mut() {
                        tree.broken = false;
                        tree.absent = false;
                    }
                }
                7 => {
                    let mut trees = self.world.trees.borrow_mut();
                    for tree in trees.iter_mut() {
                        let now = (tree.mark, tree.durable.clone());
                        tree.past.push(now);
                    }
                }
                8 if self.chance(20) => self.world.steps_left.set(0),
                _ => {
                    self.change(pair);
                    self.read(pair, false)?;
                }
            }
        }
        self.end(pair)
    }

    /// Everything is well again: both trees are the same, and each alone is what was answered.
    fn end(&mut self, pair: Option<Trees>) -> Result<(), String> {
        let well = |world: &World| {
            world.steps_left.set(u32::MAX);
            for tree in world.trees.borrow_mut().iter_mut() {
                tree.broken = false;
                tree.absent = false;
            }
        };
        let pair = match pair.filter(|_| !self.world.crashed.get()) {
            Some(pair) => pair,
            None => {
                if self.world.crashed.get() {
                    self.crash();
                    self.world.crashed.set(false);
                }
                well(&self.world);
                let pair = self.open().ok_or("it does not open")?;
                self.read(&pair, true)?;
                pair
            }
        };
        well(&self.world);
        self.read(&pair, false)?;
        if !(0..20).any(|_| pair.restore(|| false)) {
            return Err(format!("not restored: {:?}", pair.report()));
        }
        pair.tidy_after(Duration::ZERO);
        let mut trees = self.world.trees.borrow_mut();
        let mut dice = self.world.dice.borrow_mut();
        for tree in trees.iter_mut() {
            tree.crash(&mut dice);
        }
        if trees[0].now != trees[1].now {
            return Err(format!("{:?} and {:?}", trees[0].now, trees[1].now));
        }
        self.judge.check(&trees[1].now, false)
    }
}

/// Runs.
const SEEDS: u64 = 20_000;

fn start(seed: u64, fault: Option<Fault>) -> Run {
    let world = World {
        trees: RefCell::default(),
        paper: RefCell::default(),
        dice: RefCell::new(Dice::new(seed)),
        steps_left: Cell::new(u32::MAX),
        crashed: Cell::new(false),
        mended: RefCell::default(),
    };
    {
        // As when a datastore is added.
        let mut trees = world.trees.borrow_mut();
        trees.iter_mut().for_each(|tree| tree.mark = 1);
        let mut paper = world.paper.borrow_mut();
        paper.stamp = Some(Stamp::first());
        paper.all = true;
    }
    Run {
        world: Rc::new(world),
        judge: Judge(BTreeMap::new()),
        fault,
        next: 0,
    }
}

fn run(seed: u64, fault: Option<Fault>) -> Result<(), String> {
    start(seed, fault).go()
}

#[test]
fn what_was_answered_is_in_both_trees_whatever_happens() {
    for seed in 0..SEEDS {
        if let Err(why) = run(seed, None) {
            panic!("seed {seed}: {why}");
        }
    }
}

#[test]
fn each_deliberate_fault_is_found() {
    let faults = [
        Fault::AnsweredEarly,
        Fault::NotedLate,
        Fault::GenerationLost,
        Fault::StaleRead,
        Fault::ForgottenEarly,
        Fault::CurrentEarly,
        Fault::NotMended,
    ];
    for fault in faults {
        let found = (0..SEEDS).find(|seed| run(*seed, Some(fault)).is_err());
        assert!(found.is_some(), "{fault:?} is not found");
    }
}

#[test]
fn parts_are_those_a_range_touches() {
    let parts = |from, len| Place::parts(7, from, len).collect::<Vec<_>>();
    assert_eq!(parts(0, 0), [Place::Part(7, 0)]);
    assert_eq!(
        parts(super::PART - 1, 2),
        [Place::Part(7, 0), Place::Part(7, 1)]
    );
    assert_eq!(parts(super::PART, super::PART), [Place::Part(7, 1)]);
}

#[test]
fn what_could_not_be_read_in_a_tree_is_made_anew_after_a_crash_as_well() {
    let run = start(1, None);
    let whole = |pair: &Trees| assert!((0..20).any(|_| pair.restore(|| false)));
    let pair = run.open().unwrap();
    whole(&pair);
    pair.tidy_after(Duration::ZERO);
    let (bad, late) = (Place::Part(3, 1), Place::File(4));
    assert!(pair.failed(0, "a bad place", &[bad]));
    // Whoever was reading meanwhile finds the tree out already.
    assert!(pair.failed(0, "a bad place", &[late]));
    assert_eq!(pair.report().places, 2);
    // The last one stays, and what cannot be read there is not asked of it.
    assert!(!pair.failed(1, "a bad place", &[Place::Names(2)]));
    assert_eq!(pair.report().places, 2);
    drop(pair);
    run.world.mended.borrow_mut().clear();
    let pair = run.open().unwrap();
    assert_eq!(pair.first(), 1);
    whole(&pair);
    assert_eq!(*run.world.mended.borrow(), [bad, late].into());
}
