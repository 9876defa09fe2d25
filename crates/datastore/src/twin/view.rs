//! What clients ask of two trees: names, attributes and small files.
//!
//! Whatever is written here is durable when it is answered: there is nothing to be committed.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::tree::{Changed, Done, Entry, Found, Outcome, Read, Room, Tree, Write, Written};
use hearth_nfs::v3::{
    Attributes, Create, How, Kind, SetAttributes, SetTime, Stability, Status, Time, Wcc,
};
use hearth_trees::pair::{Fail, Place};
use ring::digest;

use super::both::lock;
use super::file::TwinFile;
use super::side::{Open, ROOT, is_own};
use super::{Inner, Twin, key_of, number_of, parts};

/// Listings that are remembered, so that one goes on as it began.
const LISTINGS_MAX: usize = 64;
/// Cookies of `.` and `..`.
const SELF: u64 = 1;
const ABOVE: u64 = 2;
/// Names of the same hash that can be told apart.
const SAME_MAX: u64 = 255;

/// What a directory holds, in the order of its cookies: a cookie, a name, and the number of a file.
type Names = Arc<Vec<(u64, Vec<u8>, u64)>>;

/// The names of a directory in the order of their cookies, as of a time of change.
pub(super) struct Listing {
    changed: Time,
    used: Instant,
    names: Names,
}

/// What is created, owned.
#[derive(Clone)]
enum Make {
    File(How),
    Directory(SetAttributes),
    Link(Vec<u8>, SetAttributes),
    Socket(SetAttributes),
    Fifo(SetAttributes),
    Device,
    Other,
}

impl Make {
    fn of(what: &Create<'_>) -> Make {
        match *what {
            Create::File(how) => Make::File(how),
            Create::Directory(set) => Make::Directory(set),
            Create::Link { to, set } => Make::Link(to.to_vec(), set),
            Create::Socket(set) => Make::Socket(set),
            Create::Fifo(set) => Make::Fifo(set),
            Create::Device { .. } => Make::Device,
            Create::Other => Make::Other,
        }
    }

    fn create(&self) -> Create<'_> {
        match self {
            Make::File(how) => Create::File(*how),
            Make::Directory(set) => Create::Directory(*set),
            Make::Link(to, set) => Create::Link { to, set: *set },
            Make::Socket(set) => Create::Socket(*set),
            Make::Fifo(set) => Create::Fifo(*set),
            Make::Device => Create::Device {
                block: false,
                device: (0, 0),
                set: SetAttributes::default(),
            },
            Make::Other => Create::Other,
        }
    }
}

fn failed<T>(status: Status) -> Changed<T> {
    Changed {
        outcome: Err(status),
        wcc: Wcc::default(),
    }
}

/// A change, and what is known of what it changed afterwards.
fn changed<T>(done: Outcome<(T, Option<Attributes>)>) -> Changed<T> {
    match done {
        Ok((outcome, after)) => Changed {
            outcome: Ok(outcome),
            wcc: Wcc {
                before: None,
                after,
            },
        },
        Err(status) => failed(status),
    }
}

/// Clients see times of changes of a directory or file in one tree at a time; those of the other are made as these.
fn same_time(open: &Open, key: &Key, of: &Attributes) -> Outcome<()> {
    let now = open.dir.attributes(key)?;
    if now.modified == of.modified {
        return Ok(());
    }
    let set = SetAttributes {
        modified: SetTime::To(of.modified),
        ..SetAttributes::default()
    };
    open.dir.dress(key, &set)
}

/// In the other tree must be what is in this one.
fn expect(is: bool) -> Outcome<()> {
    is.then_some(()).ok_or(Status::Stale)
}

fn hash(name: &[u8]) -> u64 {
    let sum = digest::digest(&digest::SHA256, name);
    let first = sum
        .as_ref()
        .first_chunk()
        .map_or(0, |b| u64::from_be_bytes(*b));
    // A cookie is a signed number to some clients; and the lowest are those of `.` and `..`.
    (first >> 9).max(1)
}

impl Inner {
    /// A name in a directory and its number, which it gets if it has none: somebody on this host made it.
    fn find(&self, who: &Who, dir: u64, name: &[u8]) -> Outcome<(u64, Attributes)> {
        if is_own(dir, name) {
            return Err(Status::NoEnt);
        }
        if dir == ROOT && name == b".." {
            let root = self.read(&[Place::Names(ROOT)], |open| {
                open.dir.attributes(&open.find(ROOT)?)
            })?;
            return Ok((ROOT, self.told_of(ROOT, root)));
        }
        let (whom, named) = (who.clone(), name.to_vec());
        let (found, number) = self.read(&[Place::Names(dir)], move |open| {
            let found = open.dir.lookup(&whom, &open.find(dir)?, &named)?;
            Ok((found.attributes, open.number(&found.key)?))
        })?;
        let number = match number {
            Some(number) => number,
            None => self.give_number(dir, name)?,
        };
        Ok((number, self.told_of(number, found)))
    }

    fn give_number(&self, dir: u64, name: &[u8]) -> Outcome<u64> {
        let number = self.trees.sides().numbers.take()?;
        let name = name.to_vec();
        self.change(&[Place::Names(dir)], move |open, of: Option<&u64>| {
            let found = open.dir.lookup(&Who::root(), &open.find(dir)?, &name)?;
            match (open.number(&found.key)?, of) {
                (Some(known), None) => return Ok(known),
                (Some(known), Some(of)) => expect(known == *of)?,
                // There it has one.
                (None, Some(of)) if *of != number => return Err(Status::Stale),
                (None, _) => open.give(&found.key, number)?,
            }
            Ok(number)
        })
    }

    fn after(&self, number: u64) -> Option<Attributes> {
        let now = self.read(&[Place::File(number)], move |open| {
            open.dir.attributes(&open.find(number)?)
        });
        Some(self.told_of(number, now.ok()?))
    }

    fn listing(&self, dir: u64, cookie: u64) -> Outcome<Names> {
        let here = [Place::Names(dir)];
        let now = self.read(&here, move |open| open.dir.attributes(&open.find(dir)?))?;
        if now.kind != Kind::Directory {
            return Err(Status::NotDir);
        }
        if cookie != 0
            && let Some(known) = lock(&self.listings).get_mut(&dir)
            && known.changed == now.changed
        {
            known.used = Instant::now();
            return Ok(known.names.clone());
        }
        let entries = self.read(&here, move |open| {
            let entries = open.entries(&open.find(dir)?)?;
            let all = entries.into_iter().map(|(name, found)| {
                let number = match open.number(&found.key) {
                    Err(Status::Stale | Status::NoEnt) => return Ok(None),
                    other => other?,
                };
                Ok(Some((name, number)))
            });
            all.collect::<Outcome<Vec<_>>>()
        })?;
        let mut names = Vec::with_capacity(entries.len());
        for (name, number) in entries.into_iter().flatten() {
            if is_own(dir, &name) {
                continue;
            }
            let number = match number {
                Some(number) => number,
                None => match self.give_number(dir, &name) {
                    Err(Status::NoEnt | Status::Stale) => continue,
                    other => other?,
                },
            };
            names.push((hash(&name), name, number));
        }
        names.sort();
        let mut same = (0, 0);
        for (cookie, ..) in &mut names {
            same = match same {
                (hash, count) if hash == *cookie => (hash, (count + 1).min(SAME_MAX)),
                _ => (*cookie, 0),
            };
            *cookie = (*cookie << 8) | same.1;
        }
        let names = Arc::new(names);
        let mut listings = lock(&self.listings);
        if listings.len() >= LISTINGS_MAX {
            let oldest = listings.iter().min_by_key(|(_, known)| known.used);
            if let Some(oldest) = oldest.map(|(dir, _)| *dir) {
                listings.remove(&oldest);
            }
        }
        listings.insert(
            dir,
            Listing {
                changed: now.changed,
                used: Instant::now(),
                names: names.clone(),
            },
        );
        Ok(names)
    }
}

impl Twin {
    /// The number that tells clients whether unstable data may be lost.
    pub fn write_verifier(&self) -> [u8; 8] {
        self.inner.verifier.get()
    }

    /// Unstable data may have been lost.
    pub fn unstable_lost(&self) {
        self.inner.verifier.replace();
    }

    /// A regular file, open in both trees, on behalf of nobody.
    pub fn open_regular(&self, key: &Key) -> Outcome<TwinFile> {
        let number = number_of(key)?;
        let kind = self.inner.read(&[Place::File(number)], move |open| {
            open.dir.attributes(&open.find(number)?)
        });
        match kind?.kind {
            Kind::Regular => Ok(TwinFile::new(self.inner.clone(), number)),
            Kind::Directory => Err(Status::IsDir),
            _ => Err(Status::Inval),
        }
    }

    fn found(&self, number: u64, attributes: Attributes) -> Found {
        Found {
            key: key_of(number),
            attributes,
        }
    }

    fn write_all(&self, who: &Who, file: &Key, write: &Write) -> Changed<Written> {
        let number = match number_of(file) {
            Ok(number) => number,
            Err(status) => return failed(status),
        };
        let data: Arc<[u8]> = write.data.as_ref().into();
        let (offset, len) = (write.offset, data.len() as u64);
        let Some(end) = offset.checked_add(len) else {
            return failed(Status::FBig);
        };
        let mut places = parts(number, offset, end);
        places.push(Place::File(number));
        let who = who.clone();
        let done = self
            .inner
            .change(&places, move |open, of: Option<&(u32, Attributes)>| {
                let key = open.find(number)?;
                let (count, after) = open.dir.write_durably(&who, &key, offset, &data).outcome?;
                if count < data.len() as u32 {
                    return Err(Status::NoSpace);
                }
                if let Some((_, of)) = of {
                    same_time(open, &key, of)?;
                }
                Ok((count, after))
            });
        let verifier = self.inner.verifier.get();
        changed(done.map(|(count, after)| {
            let written = Written {
                count,
                stable: Stability::File,
                verifier,
            };
            (written, Some(self.inner.told_of(number, after)))
        }))
    }
}

impl Tree for Twin {
    fn root(&self) -> Key {
        key_of(ROOT)
    }

    fn attributes(&self, file: &Key) -> Outcome<Attributes> {
        let number = number_of(file)?;
        let known = self.inner.read(&[Place::File(number)], move |open| {
            open.dir.attributes(&open.find(number)?)
        })?;
        Ok(self.inner.told_of(number, known))
    }

    fn set_attributes(
        &self,
        who: &Who,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()> {
        let now = match number_of(file).and_then(|number| Ok((number, self.attributes(file)?))) {
            Ok(now) => now,
            Err(status) => return failed(status),
        };
        let (number, before) = now;
        let mut places = vec![Place::File(number)];
        if before.kind == Kind::Directory {
            places.push(Place::Names(number));
        }
        if let Some(size) = set.size.filter(|size| *size < before.size) {
            // Of a file that grows again, what was cut off must be zeros everywhere.
            places.extend(parts(number, size, before.size));
        }
        let (who, set) = (who.clone(), *set);
        let done = self
            .inner
            .change(&places, move |open, of: Option<&Attributes>| {
                let key = open.find(number)?;
                let only_if = only_if.filter(|_| of.is_none());
                open.dir.set_attributes(&who, &key, &set, only_if).outcome?;
                if let Some(of) = of {
                    same_time(open, &key, of)?;
                }
                open.dir.attributes(&key)
            });
        changed(done.map(|after| ((), Some(self.inner.told_of(number, after)))))
    }

    fn lookup(&self, who: &Who, dir: &Key, name: &[u8]) -> Outcome<Found> {
        let (number, attributes) = self.inner.find(who, number_of(dir)?, name)?;
        Ok(self.found(number, attributes))
    }

    fn read_link(&self, who: &Who, link: &Key) -> Outcome<Vec<u8>> {
        let (who, number) = (who.clone(), number_of(link)?);
        self.inner.read(&[Place::File(number)], move |open| {
            open.dir.read_link(&who, &open.find(number)?)
        })
    }

    fn read(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Outcome<Read>>) {
        let read = number_of(file).and_then(|number| {
            let who = who.clone();
            let mut places = parts(number, offset, offset.saturating_add(u64::from(count)));
            places.push(Place::File(number));
            let read = self.inner.read(&places, move |open| {
                let key = open.find(number)?;
                let (told, answer) = std::sync::mpsc::channel();
                let tell = move |read: Outcome<Read>| drop(told.send(read));
                let done = Done::new(tell, || Err(Status::ServerFault));
                open.dir.read(&who, &key, offset, count, done);
                answer.recv().unwrap_or(Err(Status::ServerFault))
            });
            read.map(|mut read| {
                read.attributes = read.attributes.map(|a| self.inner.told_of(number, a));
                read
            })
        });
        done.tell(read);
    }

    fn write(&self, who: &Who, file: &Key, write: Write, done: Done<Changed<Written>>) {
        done.tell(self.write_all(who, file, &write));
    }

    fn commit(
        &self,
        who: &Who,
        file: &Key,
        _offset: u64,
        _count: u32,
        done: Done<Changed<[u8; 8]>>,
    ) {
        let after = self.attributes(file).and_then(|after| {
            hearth_nfs::local::may_use_data(who, &after, true)?;
            Ok((self.inner.verifier.get(), Some(after)))
        });
        done.tell(changed(after));
    }

    fn create(&self, who: &Who, dir: &Key, name: &[u8], what: &Create<'_>) -> Changed<Found> {
        let dir = match number_of(dir) {
            Ok(dir) if is_own(dir, name) => return failed(Status::Access),
            Ok(dir) => dir,
            Err(status) => return failed(status),
        };
        let numbers = self.inner.trees.sides().numbers.clone();
        let number = match numbers.take() {
            Ok(number) => number,
            Err(status) => return failed(status),
        };
        let mut places = vec![Place::Names(dir), Place::File(number)];
        if let Create::File(How::Unchecked(set)) = what
            && set.size.is_some()
            && let Ok((known, before)) = self.inner.find(&Who::root(), dir, name)
        {
            places.push(Place::File(known));
            places.extend(parts(known, set.size.unwrap_or(0), before.size));
        }
        let (who, name, make) = (who.clone(), name.to_vec(), Make::of(what));
        let done = self
            .inner
            .change(&places, move |open, of: Option<&(u64, Attributes)>| {
                let above = open.find(dir)?;
                let made = open
                    .dir
                    .create(&who, &above, &name, &make.create())
                    .outcome?;
                let own = match (open.number(&made.key)?, of) {
                    (Some(known), None) => known,
                    (None, None) => {
                        open.give(&made.key, number)?;
                        number
                    }
                    (Some(known), Some((of, _))) => {
                        expect(known == *of)?;
                        known
                    }
                    (None, Some((of, _))) => {
                        expect(*of == number)?;
                        open.give(&made.key, number)?;
                        number
                    }
                };
                if let Some((_, of)) = of {
                    same_time(open, &made.key, of)?;
                }
                Ok((own, open.dir.attributes(&made.key)?))
            });
        let after = self.inner.after(dir);
        changed(done.map(|(number, attributes)| {
            let attributes = self.inner.told_of(number, attributes);
            (self.found(number, attributes), after)
        }))
    }

    fn remove(&self, who: &Who, dir: &Key, name: &[u8], directory: bool) -> Changed<()> {
        let dir = match number_of(dir) {
            Ok(dir) => dir,
            Err(status) => return failed(status),
        };
        if is_own(dir, name) {
            return failed(Status::Access);
        }
        let (who, name) = (who.clone(), name.to_vec());
        let done = self.inner.change(&[Place::Names(dir)], move |open, _| {
            open.dir
                .remove(&who, &open.find(dir)?, &name, directory)
                .outcome
        });
        let after = self.inner.after(dir);
        changed(done.map(|()| ((), after)))
    }

    fn rename(&self, who: &Who, from: (&Key, &[u8]), to: (&Key, &[u8])) -> (Outcome<()>, Wcc, Wcc) {
        let refused = |status| (Err(status), Wcc::default(), Wcc::default());
        let dirs = number_of(from.0).and_then(|a| Ok((a, number_of(to.0)?)));
        let (a, b) = match dirs {
            Ok(dirs) => dirs,
            Err(status) => return refused(status),
        };
        if is_own(a, from.1) || is_own(b, to.1) {
            return refused(Status::Access);
        }
        let mut places = vec![Place::Names(a)];
        if a != b {
            places.push(Place::Names(b));
        }
        let (whom, old, new) = (who.clone(), from.1.to_vec(), to.1.to_vec());
        let done = self.inner.change(&places, move |open, _| {
            let (from, to) = (open.find(a)?, open.find(b)?);
            open.dir.rename(&whom, (&from, &old), (&to, &new)).0
        });
        let wcc = |dir| Wcc {
            before: None,
            after: self.inner.after(dir),
        };
        (done, wcc(a), wcc(b))
    }

    fn link(&self, who: &Who, file: &Key, dir: &Key, name: &[u8]) -> Changed<Attributes> {
        let numbers = number_of(file).and_then(|file| Ok((file, number_of(dir)?)));
        let (number, dir) = match numbers {
            Ok((_, dir)) if is_own(dir, name) => return failed(Status::Access),
            Ok(numbers) => numbers,
            Err(status) => return failed(status),
        };
        let (who, name) = (who.clone(), name.to_vec());
        let places = [Place::Names(dir), Place::File(number)];
        let done = self.inner.change(&places, move |open, _| {
            let (file, dir) = (open.find(number)?, open.find(dir)?);
            open.dir.link(&who, &file, &dir, &name).outcome
        });
        let after = self.inner.after(dir);
        changed(done.map(|known| (self.inner.told_of(number, known), after)))
    }

    fn list(
        &self,
        who: &Who,
        dir: &Key,
        cookie: u64,
        whole: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool> {
        let number = number_of(dir)?;
        let own = self.attributes(dir)?;
        if !who.may(&own, hearth_nfs::access::Want::Read as u32) {
            return Err(Status::Access);
        }
        if cookie > i64::MAX as u64 {
            return Err(Status::BadCookie);
        }
        let names = self.inner.listing(number, cookie)?;
        if cookie < SELF {
            let found = Some(self.found(number, own)).filter(|_| whole);
            if !take(Entry {
                id: number,
                name: b".",
                cookie: SELF,
                found,
            }) {
                return Ok(false);
            }
        }
        if cookie < ABOVE {
            let above = self.inner.find(&Who::root(), number, b"..");
            let (id, found) = match above {
                Ok((above, attributes)) => (above, Some(self.found(above, attributes))),
                Err(_) => (number, None),
            };
            if !take(Entry {
                id,
                name: b"..",
                cookie: ABOVE,
                found: found.filter(|_| whole),
            }) {
                return Ok(false);
            }
        }
        let start = names.partition_point(|(at, ..)| *at <= cookie);
        for (at, name, id) in names.get(start..).unwrap_or_default() {
            let id = *id;
            // Removed meanwhile: then only its name is told.
            let known = match whole {
                true => self
                    .inner
                    .read(&[Place::File(id)], move |open| {
                        open.dir.attributes(&open.find(id)?)
                    })
                    .ok(),
                false => None,
            };
            let found = known.map(|a| self.found(id, self.inner.told_of(id, a)));
            if !take(Entry {
                id,
                name,
                cookie: *at,
                found,
            }) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn room(&self) -> Outcome<Room> {
        let trees = &self.inner.trees;
        let mut least: Option<Room> = None;
        for side in (0..2).filter(|side| trees.current()[*side]) {
            let room = match trees.sides().on(side, |open| open.dir.room()) {
                Ok(room) => room,
                Err(Fail::Tree(why, status)) => {
                    if !trees.failed(side, &why, &[]) {
                        return Err(status);
                    }
                    continue;
                }
                Err(Fail::Client(status) | Fail::Partly(status)) => return Err(status),
            };
            least = Some(match least {
                None => room,
                Some(other) => room.least(other),
            });
        }
        least.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO).into())
    }
}
