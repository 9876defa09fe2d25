//! Makes places of one tree as they are in the other.
//!
//! What has another name or directory now is moved, not copied, for it is found by its number. What is in the way is put aside into a
//! directory of the tree's root, where it can still be found, and removed when everything is the same. What is not there at all is made
//! without content, which follows; so its content has to be noted before ([`Mended::First`]). What was listed until then is kept for when that
//! is done: nobody changes the names meanwhile, and to look at all files of a directory is most of the work.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::tree::{Found, Outcome, Tree};
use hearth_nfs::v3::{Attributes, Create, How, Kind, SetAttributes, SetTime, Status};
use hearth_trees::pair::{self, NotMended, PART, Place};
use rustix::fs::{FallocateFlags, SeekFrom};

use super::both::Numbers;
use super::side::{ASIDE, Open, ROOT, is_own};

/// All parts of a file: how many that are is seen when it is looked at.
pub(super) const WHOLE: u32 = u32::MAX;
/// Bytes compared at once.
const PIECE: usize = 1 << 20;

/// Why a step was not taken.
enum Stop {
    Not(NotMended),
    /// These places are to be noted before.
    First(Vec<Place>),
}

impl From<NotMended> for Stop {
    fn from(not: NotMended) -> Stop {
        Stop::Not(not)
    }
}

type Mended<T> = Result<T, Stop>;

/// A directory of both trees, as far as it is not the same.
#[derive(Debug)]
pub(super) struct Listed {
    number: u64,
    attributes: Attributes,
    /// In the other tree.
    there: Key,
    /// What is to be given a name, its number, and whether something else has the name.
    give: Vec<(Vec<u8>, Found, u64, bool)>,
    /// Names to be taken away.
    gone: Vec<Vec<u8>>,
}

/// What was seen of a place before something had to be noted, if that is of use.
pub(super) type Seen = Option<Listed>;

/// Something that changed while it was looked at.
fn moved(status: Status) -> bool {
    matches!(
        status,
        Status::Stale | Status::NoEnt | Status::NotDir | Status::Exist | Status::NotEmpty
    )
}

fn source<T>(done: Outcome<T>) -> Mended<T> {
    let why = |status: Status| match status {
        status if moved(status) => NotMended::Again,
        status => NotMended::Source(format!("the other tree cannot be read ({status})")),
    };
    done.map_err(|status| why(status).into())
}

fn target<T>(done: Outcome<T>) -> Mended<T> {
    let why = |status: Status| match status {
        status if moved(status) => NotMended::Again,
        Status::NoSpace | Status::DQuot => {
            NotMended::Target("it has no room for what the other tree holds".to_owned())
        }
        status => NotMended::Target(format!("it cannot be written ({status})")),
    };
    done.map_err(|status| why(status).into())
}

/// The file of a number, if there is one.
fn there(found: Outcome<Key>) -> Outcome<Option<Key>> {
    match found {
        Ok(key) => Ok(Some(key)),
        Err(Status::Stale) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The number of a file, which gets one if it has none.
pub(super) fn numbered(open: &Open, key: &Key, numbers: &Numbers) -> Outcome<u64> {
    if let Some(number) = open.number(key)? {
        return Ok(number);
    }
    let number = numbers.take()?;
    open.give(key, number)?;
    Ok(number)
}

fn attributes(a: &Attributes) -> SetAttributes {
    SetAttributes {
        mode: (a.kind != Kind::Link).then_some(a.mode),
        uid: Some(a.uid),
        gid: Some(a.gid),
        size: None,
        accessed: SetTime::Keep,
        modified: SetTime::To(a.modified),
    }
}

struct Pairing<'a> {
    from: &'a Open,
    to: &'a Open,
    numbers: &'a Numbers,
    noted: &'a BTreeSet<Place>,
    more: Vec<Place>,
}

/// What has to be made the same of something that is made without content.
fn content(kind: Kind, number: u64) -> Vec<Place> {
    match kind {
        Kind::Directory => vec![Place::Names(number)],
        Kind::Regular => vec![Place::File(number), Place::Part(number, WHOLE)],
        _ => vec![Place::File(number)],
    }
}

/// Makes a place the same.
pub(super) fn mend(
    place: Place,
    from: &Open,
    to: &Open,
    numbers: &Numbers,
    noted: &BTreeSet<Place>,
    seen: Seen,
) -> Result<pair::Mended<Seen>, NotMended> {
    let mut pairing = Pairing {
        from,
        to,
        numbers,
        noted,
        more: Vec::new(),
    };
    let mut seen = seen;
    let done = match place {
        Place::Names(number) => pairing.names(number, &mut seen),
        Place::File(number) => pairing.file(number),
        Place::Part(number, part) => pairing.part(number, part),
    };
    match done {
        Ok(()) => Ok(pair::Mended::Done(pairing.more)),
        Err(Stop::First(places)) => Ok(pair::Mended::First(places, seen)),
        Err(Stop::Not(why)) => Err(why),
    }
}

/// All places of a tree.
pub(super) fn everything(open: &Open, numbers: &Numbers) -> Outcome<Vec<Place>> {
    let mut places = Vec::new();
    let mut todo = vec![(ROOT, open.dir.root())];
    while let Some((dir, key)) = todo.pop() {
        places.push(Place::Names(dir));
        let entries = match open.entries(&key) {
            // Whoever removed it has told of that.
            Err(status) if moved(status) => continue,
            other => other?,
        };
        for (name, found) in entries {
            if is_own(dir, &name) {
                continue;
            }
            let number = match numbered(open, &found.key, numbers) {
                Err(status) if moved(status) => continue,
                other => other?,
            };
            match found.attributes.kind {
                Kind::Directory => todo.push((number, found.key)),
                Kind::Regular => {
                    places.push(Place::File(number));
                    places.push(Place::Part(number, WHOLE));
                }
                _ => places.push(Place::File(number)),
            }
        }
    }
    Ok(places)
}

/// Removes what was put aside.
pub(super) fn clear(open: &Open) -> io::Result<()> {
    let root = format!("/proc/self/fd/{}", open.dir.root_fd().as_raw_fd());
    let aside = Path::new(&root).join(std::ffi::OsStr::from_bytes(ASIDE));
    match std::fs::remove_dir_all(aside) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

impl Pairing<'_> {
    /// Moves a name out of the way.
    fn put_aside(&self, dir: &Key, name: &[u8]) -> Mended<()> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let (who, root) = (Who::root(), self.to.dir.root());
        let aside = match self.to.dir.lookup(&who, &root, ASIDE) {
            Err(Status::NoEnt) => {
                let set = SetAttributes {
                    mode: Some(0o700),
                    ..SetAttributes::default()
                };
                let made = self
                    .to
                    .dir
                    .create(&who, &root, ASIDE, &Create::Directory(set));
                target(made.outcome)?
            }
            found => target(found)?,
        };
        loop {
            let free = format!("{}", LAST.fetch_add(1, Ordering::Relaxed));
            let taken = self.to.dir.lookup(&who, &aside.key, free.as_bytes());
            if taken.is_ok() {
                continue;
            }
            let to = (&aside.key, free.as_bytes());
            return target(self.to.dir.rename(&who, (dir, name), to).0);
        }
    }

    fn names(&mut self, number: u64, seen: &mut Seen) -> Mended<()> {
        let listed = match seen.take().filter(|listed| listed.number == number) {
            Some(listed) => listed,
            None => match self.list(number)? {
                Some(listed) => listed,
                None => return Ok(()),
            },
        };
        let mut first = Vec::new();
        for (_, found, own, _) in &listed.give {
            first.extend(self.unnoted(found, *own)?);
        }
        // All at once: each costs a flush.
        if !first.is_empty() {
            *seen = Some(listed);
            return Err(Stop::First(first));
        }
        for (name, found, own, taken) in &listed.give {
            if *taken {
                self.put_aside(&listed.there, name)?;
            }
            self.bring(found, *own, &listed.there, name)?;
        }
        for name in &listed.gone {
            self.put_aside(&listed.there, name)?;
        }
        target(
            self.to
                .dir
                .dress(&listed.there, &attributes(&listed.attributes)),
        )
    }

    /// Looks at a directory in both trees; nothing if it is none, or gone.
    fn list(&mut self, number: u64) -> Mended<Option<Listed>> {
        let Some(here) = source(there(self.from.find(number)))? else {
            return Ok(None);
        };
        let attributes = source(self.from.dir.attributes(&here))?;
        if attributes.kind != Kind::Directory {
            return Ok(None);
        }
        let there = match target(there(self.to.find(number)))? {
            Some(key) => key,
            None => self.bring_directory(&here)?,
        };
        let mut theirs: HashMap<Vec<u8>, Found> =
            target(self.to.entries(&there))?.into_iter().collect();
        let mut give = Vec::new();
        for (name, found) in source(self.from.entries(&here))? {
            if is_own(number, &name) {
                continue;
            }
            let own = source(numbered(self.from, &found.key, self.numbers))?;
            let other = theirs.remove(&name);
            if let Some(other) = &other
                && target(self.to.number(&other.key))? == Some(own)
            {
                continue;
            }
            give.push((name, found, own, other.is_some()));
        }
        let gone = theirs.into_keys().filter(|name| !is_own(number, name));
        Ok(Some(Listed {
            number,
            attributes,
            there,
            give,
            gone: gone.collect(),
        }))
    }

    /// A directory that is not in the other tree yet, and those above it.
    fn bring_directory(&mut self, here: &Key) -> Mended<Key> {
        let (above, name) = source(self.from.above(here))?;
        let number = source(numbered(self.from, &above, self.numbers))?;
        let dir = match target(there(self.to.find(number)))? {
            Some(key) => key,
            None => self.bring_directory(&above)?,
        };
        let found = Found {
            key: *here,
            attributes: source(self.from.dir.attributes(here))?,
        };
        let own = source(numbered(self.from, here, self.numbers))?;
        if self.to.dir.lookup(&Who::root(), &dir, &name).is_ok() {
            self.put_aside(&dir, &name)?;
        }
        self.bring(&found, own, &dir, &name)?;
        target(self.to.find(own))
    }

    /// What has to be noted before something is given a name: nothing, if it is there already.
    fn unnoted(&self, found: &Found, number: u64) -> Mended<Vec<Place>> {
        let content = content(found.attributes.kind, number);
        if content.iter().all(|place| self.noted.contains(place))
            || target(there(self.to.find(number)))?.is_some()
        {
            return Ok(Vec::new());
        }
        Ok(content)
    }

    /// Gives a name to what has this number, which is made if it is not there.
    fn bring(&mut self, found: &Found, number: u64, dir: &Key, name: &[u8]) -> Mended<()> {
        let who = Who::root();
        let to = &self.to.dir;
        if let Some(key) = target(there(self.to.find(number)))? {
            if found.attributes.kind != Kind::Directory {
                return target(to.link(&who, &key, dir, name).outcome).map(drop);
            }
            let (above, old) = target(self.to.above(&key))?;
            return target(to.rename(&who, (&above, &old), (dir, name)).0);
        }
        let content = content(found.attributes.kind, number);
        if !content.iter().all(|place| self.noted.contains(place)) {
            return Err(Stop::First(content));
        }
        let set = SetAttributes {
            modified: SetTime::Keep,
            ..attributes(&found.attributes)
        };
        let link;
        let what = match found.attributes.kind {
            Kind::Directory => Create::Directory(set),
            Kind::Regular => Create::File(How::Guarded(set)),
            Kind::Link => {
                link = source(self.from.dir.read_link(&who, &found.key))?;
                Create::Link { to: &link, set }
            }
            Kind::Socket => Create::Socket(set),
            Kind::Fifo => Create::Fifo(set),
            // None was made by a client.
            Kind::Block | Kind::Character => return Ok(()),
        };
        let made = target(to.create(&who, dir, name, &what).outcome)?;
        target(self.to.give(&made.key, number))?;
        self.more.extend(content);
        Ok(())
    }

    /// Both files of a number. If only the other tree has it, its directory is to be looked at.
    fn files(&mut self, number: u64) -> Mended<Option<(Key, Key)>> {
        let Some(here) = source(there(self.from.find(number)))? else {
            return Ok(None);
        };
        match target(there(self.to.find(number)))? {
            Some(there) => Ok(Some((here, there))),
            None => {
                let (above, name) = source(self.from.above(&here))?;
                let dir = source(numbered(self.from, &above, self.numbers))?;
                if !is_own(dir, &name) {
                    self.more.push(Place::Names(dir));
                }
                Ok(None)
            }
        }
    }

    fn file(&mut self, number: u64) -> Mended<()> {
        let Some((here, there)) = self.files(number)? else {
            return Ok(());
        };
        let a = source(self.from.dir.attributes(&here))?;
        let b = target(self.to.dir.attributes(&there))?;
        let mut set = attributes(&a);
        if a.kind == Kind::Regular && a.size != b.size {
            set.size = Some(a.size);
        }
        let same = set.size.is_none()
            && (a.mode, a.uid, a.gid, a.modified) == (b.mode, b.uid, b.gid, b.modified);
        if same {
            return Ok(());
        }
        target(self.to.dir.dress(&there, &set))
    }

    fn part(&mut self, number: u64, part: u32) -> Mended<()> {
        let Some((here, there)) = self.files(number)? else {
            return Ok(());
        };
        let known = source(self.from.dir.attributes(&here))?;
        if known.kind != Kind::Regular {
            return Ok(());
        }
        let len = known.size;
        if part == WHOLE {
            let parts = u32::try_from(len.div_ceil(PART))
                .unwrap_or(WHOLE)
                .min(WHOLE - 1);
            self.more
                .extend((0..parts).map(|part| Place::Part(number, part)));
            return Ok(());
        }
        let from = source(self.from.dir.open_regular(&here))?;
        let to = target(self.to.dir.open_to_write(&there))?;
        let start = u64::from(part) * PART;
        let end = (start + PART).min(len);
        let changed = same(&from, &to, start, end)?;
        if changed {
            let set = SetAttributes {
                modified: SetTime::To(known.modified),
                ..SetAttributes::default()
            };
            target(self.to.dir.dress(&there, &set))?;
        }
        Ok(())
    }
}

/// True if there is something but holes.
fn has_data(file: &File, from: u64, to: u64) -> bool {
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(at) => at < to,
        Err(rustix::io::Errno::NXIO) => false,
        Err(_) => true,
    }
}

/// Writes a piece. Of what cannot be read, no part of a block can be written: such blocks are given back first.
fn anew(to: &File, data: &[u8], at: u64, unread: bool) -> io::Result<()> {
    match to.write_all_at(data, at) {
        Err(_) if unread => {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(to, how, at, PIECE as u64)?;
            to.write_all_at(data, at)
        }
        done => done,
    }
}

/// Makes a range the same; true if it was not.
fn same(from: &File, to: &File, start: u64, end: u64) -> Mended<bool> {
    let failed = |e: io::Error| {
        target::<()>(Err(e.into()))
            .err()
            .unwrap_or(NotMended::Again.into())
    };
    let mut changed = false;
    let mut here = vec![0; PIECE];
    let mut there = vec![0; PIECE];
    let mut at = start;
    while at < end {
        let len = (end - at).min(PIECE as u64);
        let (a, b) = (&mut here[..len as usize], &mut there[..len as usize]);
        let next = at + len;
        if !has_data(from, at, next) && !has_data(to, at, next) {
            at = next;
            continue;
        }
        source(read(from, a, at).map_err(Status::from))?;
        // What cannot be read is not the same; whether it can be written is seen then.
        let unread = read(to, b, at).is_err();
        if unread || a != b {
            changed = true;
            let zeros = a.iter().all(|byte| *byte == 0);
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let punched = zeros && rustix::fs::fallocate(to, how, at, len).is_ok();
            if !punched {
                anew(to, a, at, unread).map_err(failed)?;
            }
        }
        at = next;
    }
    Ok(changed)
}

/// Reads a range; behind the end are zeros.
fn read(file: &File, mut rest: &mut [u8], mut at: u64) -> io::Result<()> {
    while !rest.is_empty() {
        match file.read_at(rest, at) {
            Ok(0) => {
                rest.fill(0);
                return Ok(());
            }
            Ok(n) => {
                rest = &mut rest[n..];
                at += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
