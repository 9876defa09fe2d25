//! Two modelled trees under a storm: each run is one seed, which a failure prints. Clients change places; in between what was noted is
//! forgotten, trees fail at any step, hang (what they were told to do happens, and nobody hears of it), go and come back, as they were
//! left or as they were much earlier; at any step the power goes, with either tree or with the book. A judge knows what was answered.
//!
//! Each [`Fault`] must be found.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::rc::Rc;
use std::time::Duration;

use super::{Fail, Fault, Mended, News, NotMended, Pair, Place, Sides};
use crate::sim::world::{self, Content};
use crate::sim_dice::Dice;

type Slot = (Place, u8);
type Values = BTreeMap<Slot, u32>;

/// What is in a tree.
#[derive(Clone, Default)]
struct Slots {
    now: Values,
    durable: Values,
    pending: Vec<(Slot, Option<u32>)>,
}

fn put(values: &mut Values, (slot, value): (Slot, Option<u32>)) {
    match value {
        Some(value) => values.insert(slot, value),
        None => values.remove(&slot),
    };
}

impl Slots {
    fn set(&mut self, slot: Slot, value: Option<u32>) {
        put(&mut self.now, (slot, value));
        self.pending.push((slot, value));
    }

    fn sync(&mut self, only: impl Fn(&Place) -> bool) {
        for change in self.pending.extract_if(.., |(slot, _)| only(&slot.0)) {
            put(&mut self.durable, change);
        }
    }

    fn of(&self, place: Place) -> Values {
        let own = self.now.iter().filter(|(slot, _)| slot.0 == place);
        own.map(|(slot, value)| (*slot, *value)).collect()
    }
}

impl Content for Slots {
    const SETTLES: u64 = 10;
    const PAST_MAX: usize = usize::MAX;

    fn settle(&mut self) {
        if let Some((slot, _)) = self.pending.first().copied() {
            self.sync(|place| *place == slot.0);
        }
    }

    /// Of each slot changes are kept in order.
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

    fn left(&self) -> Slots {
        Slots {
            now: self.durable.clone(),
            durable: self.durable.clone(),
            pending: Vec::new(),
        }
    }
}

struct World {
    both: Rc<world::World<Slots>>,
    mended: RefCell<BTreeSet<Place>>,
}

impl Deref for World {
    type Target = world::World<Slots>;

    fn deref(&self) -> &world::World<Slots> {
        &self.both
    }
}

struct Hand(Rc<World>);

impl Sides for Hand {
    type Seen = ();

    fn mark(&self, side: usize, generation: u64) -> Result<(), String> {
        self.0.mark(side, generation)
    }

    fn sync(&self, side: usize) -> Result<(), String> {
        self.0.on(side, |slots| slots.sync(|_| true))
    }

    fn mend(
        &self,
        place: Place,
        from: usize,
        to: usize,
        _noted: &BTreeSet<Place>,
        _seen: Option<()>,
    ) -> Result<Mended<()>, NotMended> {
        if self.0.chance(5) {
            return Err(NotMended::Again);
        }
        self.0.mended.borrow_mut().insert(place);
        let source = self.0.on(from, |slots| slots.of(place));
        let source = source.map_err(NotMended::Source)?;
        let target = self.0.on(to, |slots| slots.of(place));
        let target = target.map_err(NotMended::Target)?;
        let slots: BTreeSet<Slot> = source.keys().chain(target.keys()).copied().collect();
        for slot in slots {
            let value = source.get(&slot).copied();
            if value != target.get(&slot).copied() {
                let set = self.0.on(to, |slots| slots.set(slot, value));
                set.map_err(NotMended::Target)?;
            }
        }
        Ok(Mended::Done(Vec::new()))
    }

    fn everything(&self, of: usize) -> Result<Vec<Place>, String> {
        self.0.on(of, |_| PLACES.to_vec())
    }

    fn clear(&self, side: usize) -> Result<(), String> {
        self.0.on(side, |_| ())
    }

    fn probe(&self, side: usize) -> Result<Option<u64>, String> {
        self.0.probe(side)
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

type Trees = Pair<Rc<world::World<Slots>>, Hand>;

struct Run {
    world: Rc<World>,
    judge: Judge,
    fault: Option<Fault>,
    next: u32,
}

impl Run {
    fn roll(&self, sides: u64) -> u64 {
        self.world.roll(sides)
    }

    fn chance(&self, percent: u64) -> bool {
        self.world.chance(percent)
    }

    fn open(&self) -> Option<Trees> {
        let (book, sides) = (self.world.both.clone(), Hand(self.world.clone()));
        Pair::open_with(book, sides, self.world.found(), self.fault).ok()
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
                    let set = world.on(side, |slots| slots.set(*slot, *value));
                    set.map_err(tree)?;
                    if partly && of.is_none() && side == before {
                        return Err(Fail::Partly("no room".to_owned()));
                    }
                }
                if durable {
                    for place in &places {
                        let synced = world.on(side, |slots| slots.sync(|p| p == place));
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
            let sides = self.world.sides.borrow();
            if sides[side].broken || sides[side].absent {
                return Ok(());
            }
            sides[side].content.now.clone()
        };
        self.judge.check(&values, after_crash)
    }

    /// The power goes.
    fn crash(&mut self) {
        self.world.crash();
        self.judge.crash();
    }

    fn go(&mut self) -> Result<(), String> {
        let mut pair: Option<Trees> = None;
        for _ in 0..90 {
            if self.world.crashed.get() || pair.is_none() {
                if self.world.crashed.get() {
                    self.crash();
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
                        let mut sides = self.world.sides.borrow_mut();
                        sides.iter_mut().for_each(|side| side.absent = false);
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
                    self.world.fail(side, |side| side.broken = true);
                }
                5 | 6 => self.world.repair(),
                7 => self.world.remember(),
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
        let pair = match pair.filter(|_| !self.world.crashed.get()) {
            Some(pair) => pair,
            None => {
                if self.world.crashed.get() {
                    self.crash();
                }
                self.world.calm();
                let pair = self.open().ok_or("it does not open")?;
                self.read(&pair, true)?;
                pair
            }
        };
        self.world.calm();
        self.read(&pair, false)?;
        if !(0..20).any(|_| pair.restore(|| false)) {
            return Err(format!("not restored: {:?}", pair.report()));
        }
        pair.tidy_after(Duration::ZERO);
        let mut sides = self.world.sides.borrow_mut();
        let mut dice = self.world.dice.borrow_mut();
        let [first, second] = sides.each_mut().map(|side| {
            side.content.crash(&mut dice);
            &side.content.now
        });
        if first != second {
            return Err(format!("{first:?} and {second:?}"));
        }
        self.judge.check(second, false)
    }
}

/// Runs.
const SEEDS: u64 = 20_000;

fn start(seed: u64, fault: Option<Fault>) -> Run {
    let world = World {
        both: world::World::new(Default::default(), Dice::new(seed)),
        mended: RefCell::default(),
    };
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
