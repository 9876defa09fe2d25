//! Comparing two trees that should hold the same.
//!
//! Corruption of a disk, or another program's change in one directory, is otherwise noticed when the other directory has
//! died. A place is compared while nothing of the datastore changes it. The data is read from the disk, not from the page
//! cache. Times of change are not compared: file systems keep them with different precision.

use std::collections::BTreeMap;
use std::fs::File;

use hearth_mirror::machine::Finding;
use hearth_mirror::{Cached, compare};
use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::tree::{Outcome, Tree};
use hearth_nfs::v3::{Attributes, Kind, Status};
use hearth_trees::pair::{Fail, PART, Place};
use rustix::fs::Advice;
use serde::{Deserialize, Serialize};

use super::side::{Open, ROOT, is_own};
use super::{Inner, Twin, key_of};
use crate::body::next_data;

/// Bytes of a file compared at once: writes to it wait that long.
pub(crate) const PIECE: u64 = 1 << 20;

/// What differs in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Names in a directory, or its owner or mode.
    Names,
    /// A file's length, owner or mode, or where a link points.
    Attributes,
    /// A file's data.
    Content,
    /// Both directories hold the same data, and the cache something else.
    Cached,
}

/// A place where the trees differ, or the cache from both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The number of the directory or file in the datastore.
    pub number: u64,
    /// Its path in the datastore.
    pub path: String,
    /// What differs.
    pub what: What,
    /// First byte, of data.
    pub offset: u64,
    /// Bytes, of data.
    pub len: u64,
}

/// What came of a comparison of two trees.
#[derive(Debug, Default)]
pub struct Reconciled {
    /// Ranges that were made the same: first byte, bytes.
    pub repaired: Vec<(u64, u64)>,
    /// Ranges where nothing shows what is right.
    pub undecided: Vec<hearth_mirror::machine::Difference>,
}

/// Why a place was not compared.
pub(crate) enum Skipped {
    /// One of the trees is not current, or failed just now.
    Away,
    /// It is gone, or is not there in both trees: its directory shows that.
    Gone,
}

/// Reads a range from the disk; shorter at the file's end.
fn read_from_disk(file: &File, at: u64, len: u64) -> Outcome<Vec<u8>> {
    let whole = std::num::NonZeroU64::new(len);
    // A file system that cannot drop its pages reads them.
    let _ = rustix::fs::fadvise(file, at, whole, Advice::DontNeed);
    let mut data = vec![0; len as usize];
    let mut done = 0;
    while done < data.len() {
        match std::os::unix::fs::FileExt::read_at(file, &mut data[done..], at + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    data.truncate(done);
    let _ = rustix::fs::fadvise(file, at, whole, Advice::DontNeed);
    Ok(data)
}

type Names = ([u32; 3], BTreeMap<Vec<u8>, Option<u64>>);

fn owner(a: &Attributes) -> [u32; 3] {
    [a.mode, a.uid, a.gid]
}

fn names(open: &Open, number: u64) -> Outcome<Names> {
    let key = open.find(number)?;
    let mut all = BTreeMap::new();
    for (name, found) in open.entries(&key)? {
        if !is_own(number, &name) {
            all.insert(name, open.number(&found.key)?);
        }
    }
    Ok((owner(&open.dir.attributes(&key)?), all))
}

fn looks(open: &Open, number: u64) -> Outcome<(Kind, [u32; 3], u64, Vec<u8>)> {
    let key = open.find(number)?;
    let a = open.dir.attributes(&key)?;
    let size = match a.kind {
        Kind::Regular => a.size,
        _ => 0,
    };
    let target = match a.kind {
        Kind::Link => open.dir.read_link(&Who::root(), &key)?,
        _ => Vec::new(),
    };
    Ok((a.kind, owner(&a), size, target))
}

/// How long a step of a scrub may take.
#[derive(Clone, Copy)]
enum Pace {
    /// As long as a client's; a tree that takes longer is out.
    Client,
    /// Far longer: the listing of a large directory.
    Slow,
}

impl Inner {
    /// Asks both trees about a place. One that fails is out afterwards, and gets the place again.
    fn ask_both<T: Send + 'static>(
        &self,
        pace: Pace,
        place: Place,
        look: impl Fn(&Open) -> Outcome<T> + Send + Sync + Clone + 'static,
    ) -> Result<[T; 2], Skipped> {
        let sides = self.trees.sides();
        let one = |side: usize| {
            let look = look.clone();
            let looked = match pace {
                Pace::Client => sides.on(side, move |open| look(open)),
                Pace::Slow => sides.on_slowly(side, move |open| look(open)),
            };
            looked.map_err(|fail| match fail {
                Fail::Tree(why, _) => {
                    self.unread(side, &why, &[place]);
                    Skipped::Away
                }
                Fail::Client(Status::JukeBox) => Skipped::Away,
                Fail::Client(_) | Fail::Partly(_) => Skipped::Gone,
            })
        };
        Ok([one(0)?, one(1)?])
    }

    /// Asks both trees about a place while nothing changes it.
    fn ask_held<T: Send + 'static>(
        &self,
        pace: Pace,
        place: Place,
        look: impl Fn(&Open) -> Outcome<T> + Send + Sync + Clone + 'static,
    ) -> Result<[T; 2], Skipped> {
        let held = (self.trees).while_held(place, || self.ask_both(pace, place, look));
        held.unwrap_or(Err(Skipped::Away))
    }

    /// What a file has from an offset on in both trees, as far as both are so long.
    fn data_of_both(&self, number: u64, offset: u64, len: u64) -> Result<[Vec<u8>; 2], Skipped> {
        let place = part_of(number, offset);
        let mut data = self.ask_both(Pace::Client, place, move |open| {
            let file = open.dir.open_regular(&open.find(number)?)?;
            read_from_disk(&file, offset, len)
        })?;
        let both = data[0].len().min(data[1].len());
        data.iter_mut().for_each(|data| data.truncate(both));
        Ok(data)
    }

    /// Compares a range of a file in both trees, up to its end there, with what `known` says about the cache, while nothing
    /// changes it. A difference counts when two looks show it. `repair` gets those and the data.
    pub(super) fn compare_held<T>(
        &self,
        number: u64,
        offset: u64,
        len: u64,
        prefer: Option<usize>,
        known: impl Fn() -> Vec<Cached>,
        repair: impl FnOnce(&[Vec<u8>; 2], Vec<Finding>) -> Result<T, Skipped>,
    ) -> Result<(u64, T), Skipped> {
        let held = self.trees.while_held(part_of(number, offset), || {
            let look = || {
                let data = self.data_of_both(number, offset, len)?;
                let sides = [(0, &data[0][..]), (1, &data[1][..])];
                let found = compare(offset, &sides, &known(), prefer).findings;
                Ok((data, found))
            };
            let (mut data, mut found) = look()?;
            if !found.is_empty() {
                let again = look()?;
                found.retain(|finding| again.1.contains(finding));
                data = again.0;
            }
            // A tree that left while it was read may have been behind.
            if self.trees.current() != [true; 2] {
                return Err(Skipped::Away);
            }
            Ok((data[0].len() as u64, repair(&data, found)?))
        });
        held.unwrap_or(Err(Skipped::Away))
    }
}

fn part_of(number: u64, offset: u64) -> Place {
    Place::Part(number, u32::try_from(offset / PART).unwrap_or(u32::MAX))
}

/// The numbers in a directory, and which of them are directories.
fn numbers_in(open: &Open, dir: u64) -> Outcome<Vec<(u64, bool)>> {
    let mut numbers = Vec::new();
    for (name, found) in open.entries(&open.find(dir)?)? {
        if is_own(dir, &name) {
            continue;
        }
        match open.number(&found.key) {
            Ok(Some(number)) => {
                numbers.push((number, found.attributes.kind == Kind::Directory));
            }
            Ok(None) | Err(Status::Stale | Status::NoEnt) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(numbers)
}

impl Twin {
    /// All directories and files in the tree that is read, by number from `from` on. What has no number yet
    /// is left out: the comparison of its directory shows it.
    /// Ends early, with a part of the places, when `ends` returns true.
    pub(crate) fn places(&self, from: u64, ends: impl Fn() -> bool) -> Result<Vec<Place>, Skipped> {
        let sides = self.inner.trees.sides();
        let side = self.inner.trees.first();
        let mut places = vec![Place::Names(ROOT)];
        let mut todo = vec![ROOT];
        while let Some(dir) = todo.pop()
            && !ends()
        {
            let listed = sides.on_slowly(side, move |open| numbers_in(open, dir));
            let listed = match listed {
                Ok(listed) => listed,
                Err(Fail::Tree(..) | Fail::Client(Status::JukeBox)) => return Err(Skipped::Away),
                // Its own directory shows that it is gone.
                Err(_) => continue,
            };
            for (number, is_directory) in listed {
                if is_directory {
                    places.push(Place::Names(number));
                    todo.push(number);
                } else {
                    places.push(Place::File(number));
                }
            }
        }
        places.retain(|place| place.number() >= from);
        // A file with several names is there several times.
        places.sort_unstable_by_key(|place| (place.number(), *place));
        places.dedup();
        Ok(places)
    }

    /// What clients call the file of a number.
    pub(crate) fn key(number: u64) -> Key {
        key_of(number)
    }

    /// Where it is in the datastore, for people.
    pub(crate) fn shown(&self, number: u64) -> String {
        let place = Place::File(number);
        let path = (self.inner).read(&[place], move |open| open.place(&open.find(number)?));
        match path {
            Ok(path) if path.as_os_str().is_empty() => "/".to_owned(),
            Ok(path) => path.display().to_string(),
            Err(_) => format!("number {number}"),
        }
    }

    /// True if the names in a directory, or the attributes of a file, differ.
    pub(crate) fn differs(&self, place: Place) -> Result<bool, Skipped> {
        let number = place.number();
        match place {
            Place::Names(_) => {
                let [a, b] = self
                    .inner
                    .ask_held(Pace::Slow, place, move |open| names(open, number))?;
                // An entry without a number exists in one tree only.
                let strange = |names: &Names| names.1.values().any(Option::is_none);
                Ok(a != b || strange(&a) || strange(&b))
            }
            _ => {
                let [a, b] = self
                    .inner
                    .ask_held(Pace::Client, place, move |open| looks(open, number))?;
                Ok(a != b)
            }
        }
    }

    /// Bytes of a regular file; none of anything else.
    pub(crate) fn length(&self, number: u64) -> Option<u64> {
        let looked = self.inner.read(&[Place::File(number)], move |open| {
            open.dir.attributes(&open.find(number)?)
        });
        let known = looked.ok()?;
        (known.kind == Kind::Regular).then_some(known.size)
    }

    /// Where the next data of a file is in either tree, from an offset on.
    pub(crate) fn next_data(&self, number: u64, from: u64) -> Result<Option<u64>, Skipped> {
        let found = self
            .inner
            .ask_both(Pace::Client, part_of(number, from), move |open| {
                let file = open.dir.open_regular(&open.find(number)?)?;
                Ok(next_data(&file, from))
            })?;
        Ok(found.into_iter().flatten().min())
    }

    /// Compares a range of a file in both trees, up to its end there, with what `known` says about the cache; how much was
    /// compared, and where something differs.
    pub(crate) fn compare(
        &self,
        number: u64,
        offset: u64,
        len: u64,
        known: impl Fn() -> Vec<Cached>,
    ) -> Result<(u64, Vec<Finding>), Skipped> {
        let inner = &self.inner;
        inner.compare_held(number, offset, len, None, known, |_, found| Ok(found))
    }

    /// Copies these places from the tree that an administrator prefers to the other.
    pub(crate) fn get_again(&self, side: usize, places: &[Place], why: &str) -> bool {
        self.inner.trees.failed(side, why, places)
    }

    /// True if both trees hold everything.
    pub(crate) fn is_whole(&self) -> bool {
        self.inner.trees.current() == [true; 2]
    }

    /// The tree in this directory.
    pub fn side_of(&self, directory: &std::path::Path) -> Option<usize> {
        let sides = self.inner.trees.sides();
        (0..2).find(|side| sides.path(*side) == directory)
    }

    /// Where is kept what outlives restarts.
    pub(crate) fn state_dir(&self) -> &std::path::Path {
        &self.inner.state
    }

    /// The observer of what happens to the trees.
    pub(crate) fn witness(&self) -> &dyn super::Witness {
        self.inner.trees.sides().witness()
    }
}
