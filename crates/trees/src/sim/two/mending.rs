//! How a place of one modelled tree is made as it is in the other: what the datastore does with two directories.

use std::collections::BTreeSet;

use super::{ASIDE, Mistake, PUT_ASIDE, WHOLE, World, names_place};
use crate::pair::{NotMended, PART, Place};
use crate::sim::DIRS;
use crate::sim::model::{CELL, Ino, Model};

/// Makes a place the same; what that brings with it.
pub(super) fn mend(
    world: &World,
    place: Place,
    (from, to): (usize, usize),
    noted: &BTreeSet<Place>,
) -> Result<Vec<Place>, NotMended> {
    let mut mending = Mending {
        world,
        from,
        to,
        noted,
        more: Vec::new(),
    };
    match place {
        Place::Names(dir) => mending.names(dir as usize)?,
        Place::File(ino) => mending.file(ino)?,
        Place::Part(ino, part) => mending.part(ino, part)?,
    }
    Ok(mending.more)
}

/// Makes places of one tree as they are in the other.
struct Mending<'a> {
    world: &'a World,
    from: usize,
    to: usize,
    noted: &'a BTreeSet<Place>,
    more: Vec<Place>,
}

type Mended<T> = Result<T, NotMended>;

impl Mending<'_> {
    fn source<T>(&self, work: impl FnOnce(&mut Model) -> T) -> Mended<T> {
        self.world.on(self.from, work).map_err(NotMended::Source)
    }

    fn target<T>(&self, work: impl FnOnce(&mut Model) -> T) -> Mended<T> {
        self.world.on(self.to, work).map_err(NotMended::Target)
    }

    fn put_aside(&self, dir: usize, name: &'static [u8]) -> Mended<()> {
        let done = self.target(|to| {
            let taken = to.names_in(ASIDE);
            let free = PUT_ASIDE.iter().find(|name| !taken.contains_key(*name));
            free.map(|free| to.rename((dir, name), (ASIDE, free)))
        })?;
        done.ok_or(NotMended::Again)
    }

    fn names(&mut self, dir: usize) -> Mended<()> {
        let mut theirs = self.target(|to| to.names_in(dir))?;
        for (name, ino) in self.source(|from| from.names_in(dir))? {
            // A crash may have left a file without its number; it gets one.
            self.source(|from| {
                if !from.file(ino).dressed {
                    from.dress(ino);
                }
            })?;
            if let Some(other) = theirs.remove(name) {
                if other == ino && self.target(|to| to.file(ino).dressed)? {
                    continue;
                }
                self.put_aside(dir, name)?;
            }
            if self.target(|to| to.numbered(ino))? {
                self.target(|to| to.set_name(dir, name, ino))?;
                continue;
            }
            let content = [Place::File(ino), Place::Part(ino, WHOLE)];
            if !content.iter().all(|place| self.noted.contains(place)) {
                return Err(NotMended::First(content.into()));
            }
            self.target(|to| to.make(dir, name, ino))?;
            self.target(|to| to.dress(ino))?;
            self.more.extend(content);
        }
        for name in theirs.into_keys() {
            self.put_aside(dir, name)?;
        }
        Ok(())
    }

    /// True if both have it. If only the other tree has it, its directory is to be looked at.
    fn both(&mut self, ino: Ino) -> Mended<bool> {
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

    fn file(&mut self, ino: Ino) -> Mended<()> {
        if !self.both(ino)? || self.world.is(Mistake::LengthUnmended) {
            return Ok(());
        }
        let len = self.source(|from| from.file(ino).len)?;
        if self.target(|to| to.file(ino).len)? != len {
            self.target(|to| to.set_len(ino, len))?;
        }
        Ok(())
    }

    fn part(&mut self, ino: Ino, part: u32) -> Mended<()> {
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
