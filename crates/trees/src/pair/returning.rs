//! What goes on without clients: places are forgotten, trees that fail are noticed, and one that is back gets what it missed.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{Book, Fault, MISSED_MAX, News, NotMended, Pair, Place, REST, Sides, State, lock};

/// So often may a place be put off.
const TURNS_MAX: u32 = 10_000;

impl<B: Book, S: Sides> Pair<B, S> {
    /// Looks at both trees. To be called now and then.
    pub fn look(&self) {
        for side in [0, 1] {
            let current = lock(&self.now).stamp.current[side];
            if current && let Err(why) = self.sides.probe(side) {
                self.lost(side, &why);
            }
        }
    }

    /// Forgets what was not changed for a while and is the same for good. To be called now and then.
    pub fn tidy(&self) {
        self.tidy_after(REST);
    }

    /// The same, of what was not changed for so long.
    pub fn tidy_after(&self, rest: Duration) {
        let mut now = lock(&self.now);
        let both = now.stamp.current == [true; 2];
        if both && !now.missed.is_empty() {
            // That the second one lacks it could not be made durable before.
            drop(now);
            self.lost(1, "it lacks a change");
            return;
        }
        if !both {
            let out = now.states.iter().any(|s| matches!(s, State::Out(_)));
            if out && !now.all && now.missed.len() > MISSED_MAX {
                let mut notes = lock(&self.notes);
                if notes.all || self.book.all(true).is_ok() {
                    notes.all = true;
                    now.all = true;
                    now.missed.clear();
                }
            }
            return;
        }
        drop(now);
        let aged = |at: Instant| at.elapsed() >= rest;
        let old: Vec<(Place, Instant)> = lock(&self.notes)
            .places
            .iter()
            .filter(|(_, note)| note.under_way == 0 && aged(note.last))
            .map(|(place, note)| (*place, note.last))
            .collect();
        if old.is_empty() {
            return;
        }
        if !self.is(Fault::ForgottenEarly) {
            for side in [0, 1] {
                if let Err(why) = self.sides.sync(side) {
                    self.lost(side, &why);
                    return;
                }
            }
        }
        // Whoever puts a tree out takes what is noted as what it misses: not between these two.
        let now = lock(&self.now);
        if now.stamp.current != [true; 2] {
            return;
        }
        let mut notes = lock(&self.notes);
        let mut gone = Vec::new();
        for (place, last) in old {
            let same = notes
                .places
                .get(&place)
                .is_some_and(|note| note.under_way == 0 && note.last == last);
            if same {
                notes.places.remove(&place);
                gone.push(place);
            }
        }
        self.book.forget(&gone);
    }

    /// Brings a tree back that is out, if it is there. True if both are current afterwards.
    pub fn restore(&self, stop: impl Fn() -> bool) -> bool {
        let to = {
            let now = lock(&self.now);
            match now.stamp.current {
                [true, true] => return true,
                [true, false] => 1,
                _ => 0,
            }
        };
        let from = 1 - to;
        let put_off = |why: String| {
            let mut now = lock(&self.now);
            if !now.stamp.current[to] {
                now.states[to] = State::Out(why);
            }
            drop(now);
            self.sides.drop_side(to);
            false
        };
        let mark = match self.sides.probe(to) {
            Ok(mark) => mark,
            Err(why) => return put_off(why),
        };
        {
            let mut now = lock(&self.now);
            // Another tree, or an older state of it: nothing is known of it.
            if mark.is_none_or(|mark| mark < now.stamp.left[to]) && !now.all {
                let mut notes = lock(&self.notes);
                if let Err(why) = self.book.all(true) {
                    drop((notes, now));
                    return put_off(why);
                }
                notes.all = true;
                now.all = true;
                now.missed.clear();
            }
            now.states[to] = State::Resyncing;
            let places = now.missed.len() as u64;
            drop(now);
            self.sides.tell(News::Resyncing(to, places));
        }
        match self.catch_up(from, to, &stop) {
            Ok(true) => true,
            Ok(false) => put_off("it waits to get what it missed".to_owned()),
            Err(why) => put_off(why),
        }
    }

    fn catch_up(&self, from: usize, to: usize, stop: &impl Fn() -> bool) -> Result<bool, String> {
        if lock(&self.now).all {
            // What changes from here on is added by whoever changes it.
            let places = self.sides.everything(from)?;
            let mut now = lock(&self.now);
            now.missed.extend(places);
            now.all = false;
        }
        let mut turns = 0;
        let mut after: Option<Place> = None;
        loop {
            let next = {
                let now = lock(&self.now);
                if now.states[to] != State::Resyncing {
                    return Ok(false);
                }
                let beyond = after.and_then(|after| {
                    let mut rest = now
                        .missed
                        .range((std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded));
                    rest.next().copied()
                });
                beyond.or_else(|| now.missed.first().copied())
            };
            let Some(place) = next else {
                if self.finish(from, to)? {
                    return Ok(true);
                }
                continue;
            };
            if stop() {
                return Ok(false);
            }
            let _held = self.hold(&[place]);
            match self.mend(place, from, to) {
                Ok(more) => {
                    let mut now = lock(&self.now);
                    now.missed.remove(&place);
                    now.missed.extend(more);
                    after = None;
                }
                Err(NotMended::Target(why) | NotMended::Source(why)) => return Err(why),
                Err(NotMended::Again) => {
                    turns += 1;
                    if turns > TURNS_MAX {
                        return Err("it cannot be made as the other one".to_owned());
                    }
                    after = Some(place);
                }
            }
        }
    }

    /// Makes a tree current that lacks nothing. False if it does lack something.
    fn finish(&self, from: usize, to: usize) -> Result<bool, String> {
        // Most of it before everybody waits.
        self.sides.clear(to)?;
        self.sides.sync(to)?;
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        if !lock(&self.now).missed.is_empty() {
            return Ok(false);
        }
        if !self.is(Fault::CurrentEarly) {
            self.sides.sync(from)?;
            self.sides.sync(to)?;
        }
        let mut now = lock(&self.now);
        if now.states[to] != State::Resyncing || now.stamp.current[to] {
            return Ok(false);
        }
        let generation = self.next_generation(&mut now)?;
        let mut stamp = now.stamp;
        stamp.generation = generation;
        stamp.current = [true; 2];
        self.sides.mark(from, stamp.generation)?;
        self.sides.mark(to, stamp.generation)?;
        self.book.store(&stamp)?;
        now.stamp = stamp;
        self.sides.stand(stamp.current);
        now.states = [State::Current, State::Current];
        let mut notes = lock(&self.notes);
        notes.places.clear();
        // If this is not durable, a start makes the same what is the same.
        notes.all = self.book.all(false).is_err();
        drop((notes, now));
        self.sides.tell(News::Current(to));
        Ok(true)
    }
}
