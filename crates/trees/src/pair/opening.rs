//! Which trees are believed at a start.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, RwLock};
use std::time::Instant;

use super::{
    Book, Fault, MISSED_MAX, News, Note, Notes, Now, Pair, Place, STRIPES, Sides, Stamp, State,
};

/// What the book says at a start.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Which trees are current; nothing if the book is lost.
    pub stamp: Option<Stamp>,
    /// Where the trees may differ.
    pub noted: Vec<Place>,
    /// They may differ anywhere.
    pub all: bool,
}

/// No tree that is there holds everything: what is the matter with each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError(pub [String; 2]);

/// How a tree is found at a start.
pub type Opened = Result<Option<u64>, String>;

const STALE: &str = "it has missed changes";
const OLD: &str = "it is older than it was left";
const BEHIND: &str = "it gets what it missed";

impl Stamp {
    /// Of a new pair: the first tree counts.
    pub fn first() -> Stamp {
        Stamp {
            generation: 1,
            current: [true, false],
            left: [0, 0],
            tried: 1,
        }
    }

    /// What the roots say, if nothing else does.
    fn of_roots(opened: &[Opened; 2]) -> Stamp {
        let mark = |side: usize| opened[side].as_ref().ok().copied().flatten().unwrap_or(0);
        let generation = mark(0).max(mark(1)).max(1);
        Stamp {
            generation,
            current: [mark(0) == generation, mark(1) == generation],
            left: [mark(0), mark(1)],
            tried: generation,
        }
    }
}

impl<B: Book, S: Sides> Pair<B, S> {
    /// Puts two trees together. Nobody uses either.
    pub fn open(book: B, sides: S, found: Found) -> Result<Pair<B, S>, OpenError> {
        Pair::open_with(book, sides, found, None)
    }

    pub(crate) fn open_with(
        book: B,
        sides: S,
        found: Found,
        fault: Option<Fault>,
    ) -> Result<Pair<B, S>, OpenError> {
        let pair = Pair {
            book,
            sides,
            now: Mutex::new(Now {
                stamp: Stamp::first(),
                states: [State::Current, State::Out(String::new())],
                missed: BTreeSet::new(),
                all: false,
            }),
            notes: Mutex::new(Notes::default()),
            stripes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            gate: RwLock::new(()),
            fault,
        };
        pair.begin_with(found)
    }

    fn begin_with(self, found: Found) -> Result<Pair<B, S>, OpenError> {
        let opened = [self.sides.probe(0), self.sides.probe(1)];
        let before = found.stamp.unwrap_or_else(|| Stamp::of_roots(&opened));
        let everywhere = found.all || found.stamp.is_none();
        let mark = |side: usize| opened[side].as_ref().ok().copied().flatten();
        let fits = |side: usize| {
            if self.is(Fault::StaleRead) {
                return mark(side).is_some();
            }
            before.current[side] && mark(side).is_some_and(|mark| mark >= before.generation)
        };
        let newest = mark(0).max(mark(1)).unwrap_or(0);
        let generation = before.tried.max(newest) + 1;
        let mut why: [Option<String>; 2] = [0, 1].map(|side| match &opened[side] {
            Err(why) => Some(why.clone()),
            Ok(_) if fits(side) => None,
            Ok(None) => Some("it is not this datastore's".to_owned()),
            Ok(Some(_)) if before.current[side] => Some(OLD.to_owned()),
            Ok(Some(_)) => Some(STALE.to_owned()),
        });
        let mut stamp = Stamp {
            generation,
            current: [false; 2],
            left: before.left,
            tried: generation,
        };
        let noted: BTreeSet<Place> = found.noted.iter().copied().collect();
        let same = !everywhere && noted.is_empty() || self.is(Fault::NotMended);
        let all = everywhere || noted.len() > MISSED_MAX;
        // First: a book that was lost must not come to say that nothing may differ. And what roots may have is never given out again.
        let kept = if all { self.book.all(true) } else { Ok(()) };
        let trying = Stamp {
            tried: generation,
            ..before
        };
        if let Err(failed) = kept.and_then(|()| self.book.store(&trying)) {
            return Err(OpenError([failed.clone(), failed]));
        }
        for side in [0, 1] {
            if before.current[side] {
                let old = mark(side).is_some_and(|mark| mark < before.generation);
                // One that is not there now may be as it was left when it comes; an old one never.
                stamp.left[side] = if old { generation } else { before.generation };
            }
            if why[side].is_some() {
                continue;
            }
            if side == 1 && stamp.current[0] && !same {
                why[1] = Some(BEHIND.to_owned());
                continue;
            }
            match self.sides.mark(side, generation) {
                Ok(()) => stamp.current[side] = true,
                Err(failed) => why[side] = Some(failed),
            }
        }
        let reasons = || why.clone().map(Option::unwrap_or_default);
        if stamp.current == [false; 2] {
            return Err(OpenError(reasons()));
        }
        if let Err(failed) = self.book.store(&stamp) {
            return Err(OpenError([failed.clone(), failed]));
        }
        let both = stamp.current == [true; 2];
        {
            let mut now = super::lock(&self.now);
            now.stamp = stamp;
            self.sides.stand(stamp.current);
            now.states = why
                .clone()
                .map(|why| why.map_or(State::Current, State::Out));
            now.all = all && !both;
            if !both && !all {
                now.missed.clone_from(&noted);
            }
            let mut notes = super::lock(&self.notes);
            notes.all = all;
            let note = Note {
                last: Instant::now(),
                under_way: 0,
            };
            let places = noted.into_iter().map(|place| (place, note));
            notes.places = if all {
                HashMap::new()
            } else {
                places.collect()
            };
        }
        for (side, why) in why.into_iter().enumerate() {
            // What only has to be made the same is told when that begins.
            if let Some(why) = why.filter(|why| why != BEHIND && why != STALE) {
                self.sides.drop_side(side);
                self.sides.tell(News::Lost(side, why));
            }
        }
        Ok(self)
    }
}
