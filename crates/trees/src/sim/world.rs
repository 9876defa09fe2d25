//! What two modelled trees and what is kept of them go through: at any step the power goes; a tree fails, hangs (what it was told to do
//! happens, and nobody hears of it) or is not there; and it comes back as it was left, or as it was much earlier. What is in a tree is
//! the business of whoever models it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::model::Dice;
use crate::pair::{Book, Found, Place, Stamp};

/// What a tree holds, and what of that is durable.
pub(crate) trait Content: Clone {
    /// Of so many steps in a hundred something becomes durable of its own accord.
    const SETTLES: u64;
    /// Earlier times of it that it may come back from.
    const PAST_MAX: usize;

    /// Something that is not durable becomes so, if there is any.
    fn settle(&mut self);
    /// The power goes: of what was not durable any part is kept.
    fn crash(&mut self, dice: &mut Dice);
    /// As a crash would leave it now.
    fn left(&self) -> Self;
}

/// A tree.
pub(crate) struct Side<C> {
    pub content: C,
    /// The generation in its root.
    pub mark: u64,
    pub broken: bool,
    pub absent: bool,
    /// Itself at earlier times.
    past: Vec<(u64, C)>,
}

#[derive(Default)]
pub(crate) struct Paper {
    pub stamp: Option<Stamp>,
    pub noted: BTreeSet<Place>,
    pub all: bool,
}

/// See the module.
pub(crate) struct World<C> {
    pub sides: RefCell<[Side<C>; 2]>,
    pub paper: RefCell<Paper>,
    pub dice: RefCell<Dice>,
    /// Steps until the power goes.
    pub steps_left: Cell<u32>,
    pub crashed: Cell<bool>,
}

fn gone() -> String {
    "gone".to_owned()
}

impl<C: Content> World<C> {
    /// As when a datastore is added.
    pub fn new(contents: [C; 2], dice: Dice) -> Rc<World<C>> {
        let sides = contents.map(|content| Side {
            content,
            mark: 1,
            broken: false,
            absent: false,
            past: Vec::new(),
        });
        let paper = Paper {
            stamp: Some(Stamp::first()),
            noted: BTreeSet::new(),
            all: true,
        };
        Rc::new(World {
            sides: RefCell::new(sides),
            paper: RefCell::new(paper),
            dice: RefCell::new(dice),
            steps_left: Cell::new(u32::MAX),
            crashed: Cell::new(false),
        })
    }

    pub fn roll(&self, sides: u64) -> u64 {
        self.dice.borrow_mut().roll(sides)
    }

    pub fn chance(&self, percent: u64) -> bool {
        self.dice.borrow_mut().chance(percent)
    }

    /// What a start finds in the book.
    pub fn found(&self) -> Found {
        let paper = self.paper.borrow();
        Found {
            stamp: paper.stamp,
            noted: paper.noted.iter().copied().collect(),
            all: paper.all,
        }
    }

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
        let mut sides = self.sides.borrow_mut();
        for each in sides.iter_mut() {
            if dice.chance(C::SETTLES) {
                each.content.settle();
            }
        }
        let side = &sides[side];
        if side.broken || side.absent {
            return (!side.absent && dice.chance(50), false);
        }
        (true, true)
    }

    /// A step, in a tree or in the book.
    pub fn take<T>(
        &self,
        side: Option<usize>,
        work: impl FnOnce(&mut [Side<C>; 2], &mut Paper) -> T,
    ) -> Result<T, String> {
        let (done, heard) = self.step(side);
        if !done {
            return Err(gone());
        }
        let done = work(&mut self.sides.borrow_mut(), &mut self.paper.borrow_mut());
        heard.then_some(done).ok_or_else(gone)
    }

    /// A step in one tree.
    pub fn on<T>(&self, side: usize, work: impl FnOnce(&mut C) -> T) -> Result<T, String> {
        self.take(Some(side), |sides, _| work(&mut sides[side].content))
    }

    /// Writes a generation to the root of a tree.
    pub fn mark(&self, side: usize, generation: u64) -> Result<(), String> {
        self.take(Some(side), |sides, _| sides[side].mark = generation)
    }

    /// What stands in the root of a tree.
    pub fn probe(&self, side: usize) -> Result<Option<u64>, String> {
        self.take(Some(side), |sides, _| {
            Some(sides[side].mark).filter(|mark| *mark > 0)
        })
    }

    /// Both trees are as they are now at an earlier time.
    pub fn remember(&self) {
        for side in self.sides.borrow_mut().iter_mut() {
            if side.past.len() < C::PAST_MAX {
                side.past.push((side.mark, side.content.left()));
            }
        }
    }

    /// A tree is broken or not there, unless the other one is.
    pub fn fail(&self, at: usize, how: impl FnOnce(&mut Side<C>)) {
        let mut sides = self.sides.borrow_mut();
        if !sides[1 - at].broken && !sides[1 - at].absent {
            how(&mut sides[at]);
        }
    }

    /// Both trees are there and work.
    pub fn repair(&self) {
        for side in self.sides.borrow_mut().iter_mut() {
            side.broken = false;
            side.absent = false;
        }
    }

    /// Nothing happens any more.
    pub fn calm(&self) {
        self.steps_left.set(u32::MAX);
        self.repair();
    }

    /// The power goes. With it goes a tree, or the book; or a tree comes back as it was much earlier.
    pub fn crash(&self) {
        self.crashed.set(false);
        let mut dice = self.dice.borrow_mut();
        let mut sides = self.sides.borrow_mut();
        let mut paper = self.paper.borrow_mut();
        for side in sides.iter_mut() {
            side.content.crash(&mut dice);
            side.broken = false;
            side.absent = false;
        }
        let Some(stamp) = paper.stamp else { return };
        let at = dice.roll(2) as usize;
        match dice.roll(6) {
            // It is gone with the power, and is there again later.
            0 => sides[at].absent = true,
            // It comes back as it was before this start, if the other one has everything.
            1 if stamp.current[1 - at] && sides[1 - at].mark >= stamp.generation => {
                let left = match stamp.current[at] {
                    true => stamp.generation,
                    false => stamp.left[at],
                };
                let side = &mut sides[at];
                // A copy of the very generation cannot be told from the tree.
                let old: Vec<_> = side.past.iter().filter(|(mark, _)| *mark < left).collect();
                if let Some((mark, content)) = old.get(dice.roll(old.len().max(1) as u64) as usize)
                {
                    let (mark, content) = (*mark, content.clone());
                    side.mark = mark;
                    side.content = content;
                }
            }
            2 if dice.chance(30) => *paper = Paper::default(),
            _ => {}
        }
    }
}

impl<C: Content> Book for Rc<World<C>> {
    fn note(&self, places: &[Place]) -> Result<(), String> {
        self.take(None, |_, paper| paper.noted.extend(places))
    }

    fn forget(&self, places: &[Place]) {
        let _ = self.take(None, |_, paper| {
            for place in places {
                paper.noted.remove(place);
            }
        });
    }

    fn all(&self, differ: bool) -> Result<(), String> {
        self.take(None, |_, paper| {
            paper.all = differ;
            paper.noted.clear();
        })
    }

    fn store(&self, stamp: &Stamp) -> Result<(), String> {
        self.take(None, |_, paper| paper.stamp = Some(*stamp))
    }
}
