//! Two trees that hold the same, so that either may die: what is done in which order when something in them changes.
//!
//! What changes is counted in **places**: the names in a directory, a file, a part of a file's data. The two trees may differ in the
//! places that are *noted*, and in no other. So:
//!
//! - **Changed:** the places are noted durably; then the first current tree changes, then the other; then it is answered. A place that was
//!   noted already costs nothing. It is forgotten when it was not changed for a while and both trees were synced since.
//! - **After a crash** what is noted is made in the other tree as it is in the first one, and until that is durable the other one is a
//!   tree that is back: clients are told what the first one has, and must not be told anything else later. Is the first one lost with
//!   the crash, the other is taken: what was answered is in both.
//! - **A tree that fails** is out: that is durable before anything is answered that it misses, in the root of the other tree first, then
//!   in the book. Nothing is forgotten from then on. The last tree stays.
//! - **A tree that is back** gets the places it missed, or all. What it has to be given with a name, a file that it does not have at all, is
//!   noted before: after a crash nobody would see of its name that the content is not there yet. Changes of places that it has are done in it as well; of others they
//!   are only noted. When it misses nothing, and that is durable, it is current: for a moment nobody changes anything.
//! - **A start** believes what the book says, and of a tree only that its generation is no older. Each start is a new generation, so that
//!   a tree that is put back from a copy of an earlier day is known. Without a book the generations in the roots have to do.
//!
//! Both, book and trees, are steps that somebody else takes: file systems in production, models in the tests, which crash at each step.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

mod opening;
mod returning;

pub use opening::{Found, OpenError, Opened};

/// Places that a tree may miss before all of it counts.
pub const MISSED_MAX: usize = 1 << 16;
/// Bytes of a file in one [`Place::Part`].
pub const PART: u64 = 16 << 20;
/// Changes wait for each other by the number of what they change, in so many classes.
const STRIPES: usize = 1024;
/// A place is forgotten when it was not changed for so long.
const REST: Duration = Duration::from_secs(5);

/// What may differ between the trees. The order is that in which they are made the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The names in a directory, and its attributes.
    Names(u64),
    /// A file's attributes and length.
    File(u64),
    /// So many parts of a file's data from its beginning.
    Part(u64, u32),
}

impl Place {
    /// The number of the directory or file.
    pub fn number(&self) -> u64 {
        match self {
            Place::Names(number) | Place::File(number) | Place::Part(number, _) => *number,
        }
    }

    /// The parts of a file that a range touches.
    pub fn parts(number: u64, from: u64, len: u64) -> impl Iterator<Item = Place> {
        let last = from.saturating_add(len.max(1) - 1) / PART;
        let cut = |part: u64| u32::try_from(part).unwrap_or(u32::MAX);
        (cut(from / PART)..=cut(last)).map(move |part| Place::Part(number, part))
    }
}

/// Which trees hold everything, kept where it outlives any one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Higher with each change of the rest, and with each start.
    pub generation: u64,
    /// The tree holds everything that was answered.
    pub current: [bool; 2],
    /// A tree that does not, has in its root at least this generation, if it is as it was when it went out.
    pub left: [u64; 2],
    /// No root has a higher generation than this.
    pub tried: u64,
}

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fail<E> {
    /// It is the client's own, as it would be in one tree. Nothing was changed.
    Client(E),
    /// The same, but something may have been changed before.
    Partly(E),
    /// The tree: why, and what a client is told of it if there is no other.
    Tree(String, E),
}

/// Why a place was not made the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotMended {
    /// The tree that is to be read from.
    Source(String),
    /// The tree that is to be changed.
    Target(String),
    /// Something changed meanwhile; later.
    Again,
}

/// How far a place is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mended<S> {
    /// It is; these are to be made the same next.
    Done(Vec<Place>),
    /// Nothing was changed: these places are to be noted first, for what they are of would be in the tree before its content is. What
    /// was seen on the way need not be looked at again.
    First(Vec<Place>, S),
}

/// Where it is kept durably what is known of the trees.
pub trait Book {
    /// These places are about to change. Durable when it returns.
    fn note(&self, places: &[Place]) -> Result<(), String>;
    /// They are the same. Need not be durable.
    fn forget(&self, places: &[Place]);
    /// From now on everything may differ (true), or nothing (false). Durable.
    fn all(&self, differ: bool) -> Result<(), String>;
    /// Which trees are current. Durable.
    fn store(&self, stamp: &Stamp) -> Result<(), String>;
}

/// The trees' own steps.
pub trait Sides {
    /// What was seen of a place before something had to be noted.
    type Seen;

    /// Writes a generation to the root of a tree, durably.
    fn mark(&self, side: usize, generation: u64) -> Result<(), String>;
    /// Makes everything in a tree durable.
    fn sync(&self, side: usize) -> Result<(), String>;
    /// Makes a place in one tree as it is in the other. Nothing is brought to a tree whose places are not `noted`; `seen` is what was
    /// told when they were not, while the place was kept from others as it still is.
    fn mend(
        &self,
        place: Place,
        from: usize,
        to: usize,
        noted: &BTreeSet<Place>,
        seen: Option<Self::Seen>,
    ) -> Result<Mended<Self::Seen>, NotMended>;
    /// All places of a tree.
    fn everything(&self, of: usize) -> Result<Vec<Place>, String>;
    /// Removes what mending has put aside.
    fn clear(&self, side: usize) -> Result<(), String>;
    /// Looks whether a tree is there, and which generation its root has; one that was out is opened anew.
    fn probe(&self, side: usize) -> Result<Option<u64>, String>;
    /// A tree takes no part any more: what is open of it is closed.
    fn drop_side(&self, side: usize);
    /// Which trees hold everything from now on. The last one is waited for as long as it takes: what it was told to do and has not
    /// done could else come over what is done later.
    fn stand(&self, current: [bool; 2]);
    /// Something is to be told.
    fn tell(&self, news: News);
}

/// What happens to a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// It is out.
    Lost(usize, String),
    /// It gets what it missed: so many places.
    Resyncing(usize, u64),
    /// It holds everything.
    Current(usize),
}

/// How a tree is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It holds everything that was answered.
    Current,
    /// It gets what it missed.
    Resyncing,
    /// It takes no part: why.
    Out(String),
}

/// How the trees are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Each.
    pub states: [State; 2],
    /// Places that are still to be made the same.
    pub places: u64,
    /// All of the tree counts, and it is not known yet how many that are.
    pub all: bool,
}

#[derive(Clone, Copy, Debug)]
struct Note {
    last: Instant,
    under_way: u32,
}

#[derive(Debug, Default)]
struct Notes {
    places: HashMap<Place, Note>,
    /// Everything may differ: nothing need be noted.
    all: bool,
}

#[derive(Debug)]
struct Now {
    stamp: Stamp,
    states: [State; 2],
    /// What the tree that is not the first lacks.
    missed: BTreeSet<Place>,
    /// It lacks everything that was there before; what is in `missed` is what has changed since.
    all: bool,
}

/// Steps left out or taken at another time, which the tests must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)]
pub(crate) enum Fault {
    /// It is answered before the second tree has it.
    AnsweredEarly,
    /// A place is noted after the first tree has changed.
    NotedLate,
    /// That a tree is out is not durable.
    GenerationLost,
    /// A start takes any tree that is there.
    StaleRead,
    /// A place is forgotten before the trees are synced.
    ForgottenEarly,
    /// A tree that is back is current before that is durable in it.
    CurrentEarly,
    /// What is noted is not made the same after a crash.
    NotMended,
    /// A file that a tree is given is not noted before.
    BroughtUnnoted,
}

/// See the module.
pub struct Pair<B, S> {
    book: B,
    sides: S,
    now: Mutex<Now>,
    notes: Mutex<Notes>,
    stripes: Vec<Mutex<()>>,
    /// Changes share it; a tree becomes current, or goes out, while nobody changes anything.
    gate: RwLock<()>,
    pub(crate) fault: Option<Fault>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the tree that is not the first does in a change.
enum Role {
    Follows,
    Misses,
}

impl<B: Book, S: Sides> Pair<B, S> {
    /// Only in tests: a mistake is to be made.
    fn is(&self, fault: Fault) -> bool {
        cfg!(test) && self.fault == Some(fault)
    }

    /// The trees' own steps.
    pub fn sides(&self) -> &S {
        &self.sides
    }

    /// The tree that is read.
    pub fn first(&self) -> usize {
        let now = lock(&self.now);
        usize::from(!now.stamp.current[0])
    }

    /// Which trees hold everything.
    pub fn current(&self) -> [bool; 2] {
        lock(&self.now).stamp.current
    }

    /// How the trees are.
    pub fn report(&self) -> Report {
        let now = lock(&self.now);
        Report {
            states: now.states.clone(),
            places: now.missed.len() as u64,
            all: now.all,
        }
    }

    /// Keeps others from what has these numbers.
    fn hold(&self, places: &[Place]) -> Vec<MutexGuard<'_, ()>> {
        let stripe = |place: &Place| {
            (place.number().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % STRIPES
        };
        let all: BTreeSet<usize> = places.iter().map(stripe).collect();
        all.into_iter().map(|at| lock(&self.stripes[at])).collect()
    }

    /// Looks at a place of both trees while nothing changes it; none if one of them is not current.
    pub fn while_held<T>(&self, place: Place, look: impl FnOnce() -> T) -> Option<T> {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let _held = self.hold(&[place]);
        (self.current() == [true; 2]).then(look)
    }

    /// Notes places durably that are about to change.
    fn begin(&self, places: &[Place]) -> Result<(), String> {
        let mut notes = lock(&self.notes);
        if !notes.all {
            let new: Vec<Place> = places
                .iter()
                .filter(|place| !notes.places.contains_key(place))
                .copied()
                .collect();
            if !new.is_empty() {
                self.book.note(&new)?;
            }
        }
        for place in places {
            let note = notes.places.entry(*place).or_insert(Note {
                last: Instant::now(),
                under_way: 0,
            });
            note.under_way += 1;
        }
        Ok(())
    }

    fn end(&self, places: &[Place]) {
        let mut notes = lock(&self.notes);
        for place in places {
            if let Some(note) = notes.places.get_mut(place) {
                note.under_way = note.under_way.saturating_sub(1);
                note.last = Instant::now();
            }
        }
    }

    /// Changes these places: `op` takes the steps in one tree; for the second one it is given what came of the first. Each place once.
    pub fn change<T, E: Clone>(
        &self,
        places: &[Place],
        refused: impl Fn(String) -> E,
        op: impl Fn(usize, Option<&T>) -> Result<T, Fail<E>>,
    ) -> Result<T, Fail<E>> {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let _held = self.hold(places);
        let late = self.is(Fault::NotedLate);
        if !late {
            self.begin(places)
                .map_err(|why| Fail::Tree(why.clone(), refused(why)))?;
        }
        let done = self.both(places, &refused, &op);
        if late {
            self.begin(places)
                .map_err(|why| Fail::Tree(why.clone(), refused(why)))?;
        }
        self.end(places);
        done
    }

    fn both<T, E: Clone>(
        &self,
        places: &[Place],
        refused: &impl Fn(String) -> E,
        op: &impl Fn(usize, Option<&T>) -> Result<T, Fail<E>>,
    ) -> Result<T, Fail<E>> {
        // Each turn but the last puts a tree out.
        for _ in 0..2 {
            let first = self.first();
            let role = self.role(first, places);
            let done = match op(first, None) {
                Ok(done) => done,
                Err(Fail::Client(e)) => return Err(Fail::Client(e)),
                Err(Fail::Partly(e)) => {
                    if matches!(role, Role::Follows) {
                        self.mend_now(first, places, refused)?;
                    }
                    return Err(Fail::Client(e));
                }
                Err(Fail::Tree(why, e)) => {
                    if !self.lost(first, &why) {
                        return Err(Fail::Tree(why, e));
                    }
                    continue;
                }
            };
            let follows = matches!(role, Role::Follows);
            if follows && !self.is(Fault::AnsweredEarly) {
                self.follow(1 - first, places, refused, op(1 - first, Some(&done)))?;
            }
            return Ok(done);
        }
        let why = "both trees have failed".to_owned();
        Err(Fail::Tree(why.clone(), refused(why)))
    }

    /// What the second tree has made of a change.
    fn follow<T, E>(
        &self,
        other: usize,
        places: &[Place],
        refused: &impl Fn(String) -> E,
        done: Result<T, Fail<E>>,
    ) -> Result<(), Fail<E>> {
        let (why, tree) = match done {
            Ok(_) => return Ok(()),
            Err(Fail::Client(_) | Fail::Partly(_)) => {
                ("it does not hold what it should".to_owned(), false)
            }
            Err(Fail::Tree(why, _)) => (why, true),
        };
        let current = {
            let mut now = lock(&self.now);
            now.missed.extend(places);
            now.states[other] == State::Current
        };
        // One that is on its way back goes out as well: what it has not done yet could come over what it gets.
        if (current || tree) && !self.lost(other, &why) {
            // It cannot be made known that the tree lacks this, so it must not be answered.
            return Err(Fail::Tree(why.clone(), refused(why)));
        }
        Ok(())
    }

    fn role(&self, first: usize, places: &[Place]) -> Role {
        let mut now = lock(&self.now);
        match now.states[1 - first] {
            State::Current => return Role::Follows,
            State::Resyncing if !now.all && places.iter().all(|p| !now.missed.contains(p)) => {
                return Role::Follows;
            }
            // It lacks everything as it is.
            State::Out(_) if now.all => {}
            _ => now.missed.extend(places),
        }
        Role::Misses
    }

    /// Makes a place the same. Somebody has its lock.
    fn mend(&self, place: Place, from: usize, to: usize) -> Result<Vec<Place>, NotMended> {
        let mut noted = BTreeSet::new();
        let mut seen = None;
        loop {
            match self.sides.mend(place, from, to, &noted, seen.take())? {
                Mended::Done(more) => return Ok(more),
                Mended::First(places, so_far) => {
                    let before = noted.len();
                    noted.extend(&places);
                    if noted.len() == before {
                        return Err(NotMended::Again);
                    }
                    if !self.is(Fault::BroughtUnnoted) {
                        self.begin(&places).map_err(NotMended::Target)?;
                        self.end(&places);
                    }
                    seen = Some(so_far);
                }
            }
        }
    }

    /// Makes places the same of which nobody knows what became of them, and of which somebody has the lock.
    fn mend_now<E>(
        &self,
        first: usize,
        places: &[Place],
        refused: &impl Fn(String) -> E,
    ) -> Result<(), Fail<E>> {
        let mut todo: BTreeSet<Place> = places.iter().copied().collect();
        while let Some(place) = todo.pop_first() {
            let why = match self.mend(place, first, 1 - first) {
                Ok(more) => {
                    todo.extend(more);
                    continue;
                }
                Err(NotMended::Target(why) | NotMended::Source(why)) => why,
                Err(NotMended::Again) => "it cannot be made as the other one".to_owned(),
            };
            lock(&self.now).missed.extend(places);
            if !self.lost(1 - first, &why) {
                return Err(Fail::Tree(why.clone(), refused(why)));
            }
            lock(&self.now).missed.extend(todo);
            return Ok(());
        }
        Ok(())
    }

    /// A tree failed, as somebody saw who was reading these places. True if there is another one to be asked.
    ///
    /// They count as what it missed: a place that cannot be read is made anew before the tree is believed again, or it would go out
    /// once more with the next who reads it.
    pub fn failed(&self, side: usize, why: &str, places: &[Place]) -> bool {
        // Durably, for a start knows of no other places. Not of the last tree: nobody could make them the same.
        if self.current()[1 - side] && self.begin(places).is_ok() {
            self.end(places);
        }
        let out = self.lost(side, why);
        let mut now = lock(&self.now);
        if out && !now.stamp.current[side] && !now.all {
            now.missed.extend(places);
        }
        out
    }

    /// A generation that no root has, and none will have that is not told of it now.
    fn next_generation(&self, now: &mut Now) -> Result<u64, String> {
        let mut stamp = now.stamp;
        stamp.tried += 1;
        self.book.store(&stamp)?;
        now.stamp = stamp;
        Ok(stamp.tried)
    }

    /// A tree is out from now on. False if it has to stay, because no other one holds everything, or because that cannot be made durable.
    fn lost(&self, side: usize, why: &str) -> bool {
        let mut now = lock(&self.now);
        if !now.stamp.current[side] {
            if now.states[side] == State::Resyncing {
                now.states[side] = State::Out(why.to_owned());
            }
            return true;
        }
        let other = 1 - side;
        if !now.stamp.current[other] {
            return false;
        }
        let mut stamp = now.stamp;
        stamp.left[side] = now.stamp.generation;
        let durable = |now: &mut Now, stamp: &mut Stamp| {
            stamp.generation = self.next_generation(now)?;
            stamp.tried = stamp.generation;
            self.sides.mark(other, stamp.generation)?;
            self.book.store(stamp)
        };
        stamp.current[side] = false;
        if !self.is(Fault::GenerationLost) && durable(&mut now, &mut stamp).is_err() {
            return false;
        }
        now.stamp = stamp;
        self.sides.stand(stamp.current);
        now.states[side] = State::Out(why.to_owned());
        now.all = false;
        let noted: Vec<Place> = lock(&self.notes).places.keys().copied().collect();
        now.missed.extend(noted);
        drop(now);
        self.sides.drop_side(side);
        self.sides.tell(News::Lost(side, why.to_owned()));
        true
    }
}

#[cfg(test)]
mod sim;
