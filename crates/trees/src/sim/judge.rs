//! What clients were answered, and what they may find.

use std::collections::{BTreeMap, BTreeSet};

use super::model::{CELL, Ino, Model};
use super::{CELLS_PER_PLACE, PLACES};

type Place = (usize, &'static [u8]);

/// A change of names.
#[derive(Clone, Copy, Debug)]
pub enum After {
    Made(usize, &'static [u8], Ino),
    Removed(usize, &'static [u8]),
    Moved { from: Place, to: Place, ino: Ino },
}

/// A change of a file that was not answered yet.
#[derive(Clone, Copy, Debug)]
enum Maybe {
    Written(Ino, u64, u64, u32),
    Resized(Ino, u64),
}

/// Of each: what may be found after a crash; the last is what is found without one.
#[derive(Debug)]
struct Expected {
    len: Vec<u64>,
    cells: BTreeMap<u64, Vec<u32>>,
}

impl Default for Expected {
    fn default() -> Expected {
        Expected {
            len: vec![0],
            cells: BTreeMap::new(),
        }
    }
}

fn newest<T: Copy + Default>(all: &[T]) -> T {
    all.last().copied().unwrap_or_default()
}

#[derive(Debug, Default)]
pub struct Judge {
    names: BTreeMap<Place, Ino>,
    /// Their makers were answered.
    made: BTreeSet<Ino>,
    files: BTreeMap<Ino, Expected>,
    maybe_named: Option<After>,
    maybe: Option<Maybe>,
}

/// Everywhere a client writes.
fn places() -> impl Iterator<Item = u64> {
    let window = 0..CELLS_PER_PLACE + 8;
    PLACES
        .into_iter()
        .flat_map(move |base| window.clone().map(move |n| base + n * CELL))
}

fn apply(names: &mut BTreeMap<Place, Ino>, after: After) {
    match after {
        After::Made(dir, name, ino) => {
            names.insert((dir, name), ino);
        }
        After::Removed(dir, name) => {
            names.remove(&(dir, name));
        }
        After::Moved { from, to, ino } => {
            names.remove(&from);
            names.insert(to, ino);
        }
    }
}

impl Judge {
    fn file(&mut self, ino: Ino) -> &mut Expected {
        self.files.entry(ino).or_default()
    }

    pub fn may_name(&mut self, after: After) {
        self.maybe_named = Some(after);
    }

    pub fn named(&mut self, after: After) {
        apply(&mut self.names, after);
        self.maybe_named = None;
    }

    /// Its maker was answered.
    pub fn made(&mut self, ino: Ino) {
        self.made.insert(ino);
    }

    pub fn may_write(&mut self, ino: Ino, from: u64, to: u64, value: u32) {
        self.maybe = Some(Maybe::Written(ino, from, to, value));
    }

    pub fn written(&mut self, ino: Ino, from: u64, to: u64, value: u32, durable: bool) {
        self.maybe = None;
        let file = self.file(ino);
        if to > newest(&file.len) {
            file.len.push(to);
        }
        if durable {
            file.len.retain(|len| *len >= to);
        }
        for at in (from..to).step_by(CELL as usize) {
            let cell = file.cells.entry(at).or_insert_with(|| vec![0]);
            cell.push(value);
            if durable {
                *cell = vec![value];
            }
        }
    }

    pub fn committed(&mut self, ino: Ino) {
        let file = self.file(ino);
        file.len = vec![newest(&file.len)];
        for cell in file.cells.values_mut() {
            *cell = vec![newest(cell)];
        }
    }

    pub fn may_resize(&mut self, ino: Ino, len: u64) {
        self.maybe = Some(Maybe::Resized(ino, len));
    }

    pub fn resized(&mut self, ino: Ino, len: u64) {
        self.maybe = None;
        let file = self.file(ino);
        file.len = vec![len];
        file.cells.split_off(&len);
    }

    pub fn judge_names(&mut self, model: &Model, crashed: bool) -> Result<(), String> {
        let seen = model.names();
        let mut allowed = vec![self.names.clone()];
        if let Some(after) = self.maybe_named.take().filter(|_| crashed) {
            let mut then = self.names.clone();
            apply(&mut then, after);
            if let After::Moved { from, to, ino } = after
                && from.0 != to.0
            {
                // Both names, of a file system that does not keep the two together.
                let mut both = then.clone();
                both.insert(from, ino);
                allowed.push(both);
            }
            allowed.push(then);
        }
        if !allowed.contains(&seen) {
            return Err(format!("names are {seen:?} and not one of {allowed:?}"));
        }
        for ino in seen.values().filter(|ino| self.made.contains(ino)) {
            if !model.file(*ino).dressed {
                return Err(format!("file {ino} is not what its maker was told"));
            }
        }
        self.names = seen;
        Ok(())
    }

    pub fn judge_file(&mut self, model: &Model, ino: Ino, crashed: bool) -> Result<(), String> {
        let maybe = self.maybe.filter(|_| crashed);
        let file = self.files.entry(ino).or_default();
        let len = model.file(ino).len;
        let mut lens = file.len.clone();
        let (mut written, mut cut) = (None, u64::MAX);
        match maybe {
            Some(Maybe::Written(of, from, to, value)) if of == ino => {
                lens.push(to.max(newest(&lens)));
                written = Some((from..to, value));
            }
            Some(Maybe::Resized(of, to)) if of == ino => {
                lens.push(to);
                cut = to;
            }
            _ => {}
        }
        let well = match crashed {
            true => lens.contains(&len),
            false => newest(&lens) == len,
        };
        if !well {
            return Err(format!(
                "file {ino} has {len} bytes and not one of {lens:?}"
            ));
        }
        for at in places() {
            let seen = model.read(ino, at);
            let mut may = file.cells.get(&at).cloned().unwrap_or_else(|| vec![0]);
            if at >= len {
                may = vec![0];
            } else if crashed {
                if let Some((range, value)) = &written
                    && range.contains(&at)
                {
                    may.push(*value);
                }
                if at >= cut {
                    may.push(0);
                }
            }
            let well = match crashed {
                true => may.contains(&seen),
                false => newest(&may) == seen,
            };
            if !well {
                return Err(format!(
                    "file {ino} of {len} bytes has {seen} at {at} and not one of {may:?}"
                ));
            }
            if crashed {
                // It stays so.
                file.cells.insert(at, vec![seen]);
            }
        }
        if crashed {
            file.len = vec![len];
        }
        Ok(())
    }

    /// A crash was judged: what had not been answered has been seen.
    pub fn seen(&mut self) {
        self.maybe = None;
    }
}
