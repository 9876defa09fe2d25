//! How a place of one modelled tree is made as it is in the other: what the datastore does with two directories.

use std::collections::{BTreeMap, BTreeSet};

use super::{ASIDE, Mistake, PUT_ASIDE, WHOLE, World, names_place};
use crate::pair::{Mended, NotMended, PART, Place};
use crate::sim::DIRS;
use crate::sim::model::{CELL, Ino, Model};

type Name = &'static [u8];

/// Names of a directory as they were when something had to be noted.
pub(super) struct Seen {
    /// Those to be given, and whether another file has the name.
    give: Vec<(Name, Ino, bool)>,
    /// Those to be taken away.
    gone: Vec<Name>,
}

/// Makes a place the same; what that brings with it.
pub(super) fn mend(
    world: &World,
    place: Place,
    (from, to): (usize, usize),
    noted: &BTreeSet<Place>,
    seen: Option<Seen>,
) -> Result<Mended<Seen>, NotMended> {
    let mut mending = Mending {
        world,
        from,
        to,
        noted,
        more: Vec::new(),
    };
    match place {
        Place::Names(dir) => {
            let dir = dir as usize;
            let seen = match seen {
                Some(seen) => seen,
                None => mending.look(dir)?,
            };
            let first = mending.unnoted(&seen)?;
            if !first.is_empty() {
                return Ok(Mended::First(first, seen));
            }
            mending.names(dir, seen)?;
        }
        Place::File(ino) => mending.file(ino)?,
        Place::Part(ino, part) => mending.part(ino, part)?,
    }
    Ok(Mended::Done(mending.more))
}

fn content(ino: Ino) -> [Place; 2] {
    [Place::File(ino), Place::Part(ino, WHOLE)]
}

/// Makes places of one tree as they are in the other.
struct Mending<'a> {
    world: &'a World,
    from: usize,
    to: usize,
    noted: &'a BTreeSet<Place>,
    more: Vec<Place>,
}

type Step<T> = Result<T, NotMended>;

impl Mending<'_> {
    fn source<T>(&self, work: impl FnOnce(&mut Model) -> T) -> Step<T> {
        self.world.on(self.from, work).map_err(NotMended::Source)
    }

    fn target<T>(&self, work: impl FnOnce(&mut Model) -> T) -> Step<T> {
        self.world.on(self.to, work).map_err(NotMended::Target)
    }

    fn put_aside(&self, dir: usize, name: Name) -> Step<()> {
        let done = self.target(|to| {
            let taken = to.names_in(ASIDE);
            let free = PUT_ASIDE.iter().find(|name| !taken.contains_key(*name));
            free.map(|free| to.rename((dir, name), (ASIDE, free)))
        })?;
        done.ok_or(NotMended::Again)
    }

    fn look(&self, dir: usize) -> Step<Seen> {
        let mut theirs: BTreeMap<Name, Ino> = self.target(|to| to.names_in(dir))?;
        let mut give = Vec::new();
        for (name, ino) in self.source(|from| from.names_in(dir))? {
            // A crash may have left a file without its number; it gets one.
            self.source(|from| {
                if !from.file(ino).dressed {
                    from.dress(ino);
                }
            })?;
            let other = theirs.remove(name);
            if other == Some(ino) && self.target(|to| to.file(ino).dressed)? {
                continue;
            }
            give.push((name, ino, other.is_some()));
        }
        let gone = theirs.into_keys().collect();
        Ok(Seen { give, gone })
    }

    /// What is to be noted before names are given: what is not there at all.
    fn unnoted(&self, seen: &Seen) -> Step<Vec<Place>> {
        let mut first = Vec::new();
        for (_, ino, _) in &seen.give {
            let content = content(*ino);
            if !content.iter().all(|place| self.noted.contains(place))
                && !self.target(|to| to.numbered(*ino))?
            {
                first.extend(content);
            }
        }
        Ok(first)
    }

    fn names(&mut self, dir: usize, seen: Seen) -> Step<()> {
        for (name, ino, taken) in seen.give {
            if taken {
                self.put_aside(dir, name)?;
            }
            if self.target(|to| to.numbered(ino))? {
                self.target(|to| to.set_name(dir, name, ino))?;
                continue;
            }
            let content = content(ino);
            if !content.iter().all(|place| self.noted.contains(place)) {
                return Err(NotMended::Again);
            }
            self.target(|to| to.make(dir, name, ino))?;
            self.target(|to| to.dress(ino))?;
            self.more.extend(content);
        }
        for name in seen.gone {
            self.put_aside(dir, name)?;
        }
        Ok(())
    }

    /// True if both have it. If only the other tree has it, its directory is to be looked at.
    fn both(&mut self, ino: Ino) -> Step<bool> {
        if !self.source(|from| from.numbered(ino))? {
            return Ok(false);
        }
        if self.target(|to| to.numbered(ino))? {
            return Ok(true);
        }
        let above = self.source(|from| {
            (0..DIRS).find(|dir| from.names_in(*dir).values().any(|of| *of == ino))
        })?;
        self.more.extend(above.map(names_place));
        Ok(false)
    }

    fn file(&mut self, ino: Ino) -> Step<()> {
        if !self.both(ino)? || self.world.is(Mistake::LengthUnmended) {
            return Ok(());
        }
        let len = self.source(|from| from.file(ino).len)?;
        if self.target(|to| to.file(ino).len)? != len {
            self.target(|to| to.set_len(ino, len))?;
        }
        Ok(())
    }

    fn part(&mut self, ino: Ino, part: u32) -> Step<()> {
        if !self.both(ino)? {
            return Ok(());
        }
        let len = self.source(|from| from.file(ino).len)?;
        if part == WHOLE {
            let parts = 0..len.div_ceil(PART) as u32;
            self.more.extend(parts.map(|part| Place::Part(ino, part)));
            return Ok(());
        }
        let start = u64::from(part) * PART;
        let end = (start + PART).min(len);
        if end <= start {
            return Ok(());
        }
        let here = self.source(|from| from.cells_in(ino, start, end))?;
        let there = self.target(|to| to.cells_in(ino, start, end))?;
        let all: BTreeSet<u64> = here.keys().chain(there.keys()).copied().collect();
        for at in all {
            let value = here.get(&at).copied().unwrap_or(0);
            if there.get(&at).copied().unwrap_or(0) != value {
                self.target(|to| to.put_in_file(ino, at, at + CELL, value))?;
            }
        }
        Ok(())
    }
}
