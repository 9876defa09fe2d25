//! A file of a datastore in two trees, open in both: what is done to it is done to both.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use hearth_io::OpenError;
use hearth_mirror::Cache;
use hearth_mirror::machine::Finding;
use hearth_nfs::handle::Key;
use hearth_nfs::tree::Outcome;
use hearth_nfs::v3::{Attributes, Status};
use hearth_trees::pair::{Fail, Place};
use rustix::fs::{FallocateFlags, SeekFrom, Stat, Timespec, Timestamps};

use super::both::lock;
use super::scrub::{Reconciled, Skipped};
use super::side::{Held, Open, Slot, number_of};
use super::{Inner, key_of, parts, refused, told};
use crate::body::{claim, is_read_only};

/// Called with a file that was opened in a tree.
type Opened = Box<dyn Fn(&File) + Send + Sync>;

/// What steps in a tree need, which may outlast the file.
#[derive(Default)]
struct Shared {
    number: u64,
    slots: [Arc<Slot>; 2],
    /// The file is to be locked in each tree.
    claimed: AtomicBool,
    when_opened: OnceLock<Opened>,
}

/// See the module.
pub struct TwinFile {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
}

impl Shared {
    /// The file in a tree, opened if it is not. The tree keeps it open until it is out.
    fn opened(&self, open: &Open, side: usize, write: bool) -> Outcome<Arc<File>> {
        let slot = &self.slots[side];
        {
            let mut held = lock(slot);
            match &*held {
                Some(held) if !write || !is_read_only(&held.file) => return Ok(held.file.clone()),
                // Its lock may be in the way of the next one.
                _ => *held = None,
            }
        }
        let key = open.find(self.number)?;
        let file = Arc::new(match write {
            true => open.dir.open_to_write(&key)?,
            false => open.dir.open_regular(&key)?,
        });
        let claim = match self.claimed.load(Ordering::SeqCst).then(|| claim(&file)) {
            None => None,
            Some(Ok(claim)) => Some(claim),
            // An operation that began before has it open still.
            Some(Err(OpenError::InUse(user))) if user.is_ours() => None,
            // The tree was away, and another program may use the file by now: then it stays out.
            Some(Err(e)) => {
                tracing::warn!("{e}");
                return Err(Status::Io);
            }
        };
        if let Some(opened) = self.when_opened.get() {
            opened(&file);
        }
        let held = Held {
            file: file.clone(),
            _claim: claim,
        };
        open.keep(slot, held);
        Ok(file)
    }
}

fn os(status: Status) -> io::Error {
    io::Error::from_raw_os_error(match status {
        Status::NoSpace => libc::ENOSPC,
        Status::DQuot => libc::EDQUOT,
        Status::FBig => libc::EFBIG,
        Status::Stale => libc::ESTALE,
        Status::Access => libc::EACCES,
        Status::Perm => libc::EPERM,
        Status::RoFs => libc::EROFS,
        Status::NotSupp => libc::EOPNOTSUPP,
        _ => libc::EIO,
    })
}

impl TwinFile {
    /// What the datastore of this number calls an open file of one of its trees. It may be open by path only.
    pub fn key_of_open(file: &impl AsFd, store: u64) -> Option<Key> {
        number_of(file, store).ok()?.map(key_of)
    }

    pub(super) fn new(inner: Arc<Inner>, number: u64) -> TwinFile {
        TwinFile {
            inner,
            shared: Arc::new(Shared {
                number,
                ..Shared::default()
            }),
        }
    }

    /// Takes a step in a tree. To be written, the file is opened anew there if it is open for reading alone.
    fn on<T: Send + 'static>(
        &self,
        side: usize,
        write: bool,
        work: impl FnOnce(&Open, &File) -> Outcome<T> + Send + 'static,
    ) -> Result<T, Fail<Status>> {
        let shared = self.shared.clone();
        (self.inner.trees.sides()).on(side, move |open| {
            let file = shared.opened(open, side, write)?;
            work(open, &file)
        })
    }

    fn read_with<T: Send + 'static>(
        &self,
        places: &[Place],
        work: impl Fn(&Open, &File) -> Outcome<T> + Send + Sync + 'static,
    ) -> io::Result<(T, usize)> {
        let work = Arc::new(work);
        loop {
            let side = self.inner.trees.first();
            let again = work.clone();
            match self.on(side, false, move |open, file| again(open, file)) {
                Ok(done) => return Ok((done, side)),
                Err(Fail::Tree(why, status)) => {
                    if !self.inner.unread(side, &why, places) {
                        return Err(os(status));
                    }
                }
                Err(Fail::Client(status) | Fail::Partly(status)) => return Err(os(status)),
            }
        }
    }

    fn change<T: Clone + Send + Sync + 'static>(
        &self,
        places: &[Place],
        work: impl Fn(&File) -> Outcome<T> + Send + Sync + 'static,
    ) -> io::Result<T> {
        let work = Arc::new(work);
        let done = self.inner.trees.change(places, refused, |side, _| {
            let work = work.clone();
            self.on(side, true, move |_, file| work(file))
        });
        told(done).map_err(os)
    }

    fn itself(&self) -> Place {
        Place::File(self.shared.number)
    }

    /// What the file looks like, and in which tree.
    pub fn stat(&self) -> io::Result<(Stat, usize)> {
        self.read_with(&[self.itself()], |_, file| {
            Ok(rustix::fs::fstat(file).map_err(io::Error::from)?)
        })
    }

    /// As clients are told of it.
    pub fn attributes(&self) -> Outcome<Attributes> {
        let got = self.read_with(&[self.itself()], |open, file| {
            open.dir.attributes_of_open(file)
        });
        Ok(self.inner.told_of(self.shared.number, got?.0))
    }

    pub(crate) fn set_times(&self, times: Timestamps) -> io::Result<()> {
        self.change(&[self.itself()], move |file| {
            Ok(rustix::fs::futimens(file, &times).map_err(io::Error::from)?)
        })
    }

    pub(crate) fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.change(&[self.itself()], move |file| {
            let mode = rustix::fs::Mode::from_raw_mode(mode);
            Ok(rustix::fs::fchmod(file, mode).map_err(io::Error::from)?)
        })
    }

    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(&[self.itself()], move |file| Ok(file.set_len(len)?))
    }

    /// Reads what is there, up to `len` bytes.
    pub(crate) fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let places = self.places(at, len as u64);
        let read = self.read_with(&places, move |_, file| {
            let mut data = vec![0; len];
            let mut done = 0;
            while done < len {
                match file.read_at(&mut data[done..], at + done as u64) {
                    Ok(0) => break,
                    Ok(n) => done += n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e.into()),
                }
            }
            data.truncate(done);
            Ok(data)
        });
        Ok(read?.0)
    }

    pub(crate) fn write(&self, at: u64, data: Vec<u8>) -> io::Result<()> {
        let places = self.places(at, data.len() as u64);
        let data: Arc<[u8]> = data.into();
        self.change(&places, move |file| Ok(file.write_all_at(&data, at)?))
    }

    pub(crate) fn allocate(&self, how: FallocateFlags, at: u64, len: u64) -> io::Result<()> {
        self.change(&self.places(at, len), move |file| {
            Ok(rustix::fs::fallocate(file, how, at, len).map_err(io::Error::from)?)
        })
    }

    fn places(&self, at: u64, len: u64) -> Vec<Place> {
        let mut places = parts(self.shared.number, at, at + len);
        places.push(self.itself());
        places
    }

    /// Compares a range in both trees with the cache, and writes the right content to the wrong tree. None: one
    /// of the trees is not current, or failed.
    ///
    /// A repair is not noted as a change is: after a crash noted places are copied from the first tree, which may be the wrong
    /// one. Without a note the wrong one is as wrong as before. Its time of change stays: its content is no newer.
    pub(crate) fn reconcile(
        &self,
        offset: u64,
        len: u64,
        cache: &dyn Cache,
        prefer: Option<usize>,
    ) -> Option<Reconciled> {
        let known = || cache.clean(offset, len);
        let repair = |data: &[Vec<u8>; 2], found: Vec<Finding>| {
            let mut done = Reconciled::default();
            for finding in found {
                let (at, len, leg, wrong) = match finding {
                    Finding::Undecided(difference) => {
                        done.undecided.push(difference);
                        continue;
                    }
                    Finding::Right {
                        offset: at,
                        len,
                        leg,
                        wrong,
                        ..
                    } => (at, len, leg, wrong),
                };
                let from = (at - offset) as usize;
                let right = data[leg].get(from..from + len as usize);
                let right: Arc<[u8]> = right.unwrap_or_default().into();
                for side in &wrong {
                    self.repair(*side, at, right.clone())?;
                    done.repaired.push((at, len));
                }
                cache.drop_unlike(at, &hearth_mirror::sums_of(&right));
            }
            Ok(done)
        };
        let done =
            (self.inner).compare_held(self.shared.number, offset, len, prefer, known, repair);
        done.ok().map(|(_, done)| done)
    }

    fn repair(&self, side: usize, at: u64, right: Arc<[u8]>) -> Result<(), Skipped> {
        let repaired = self.on(side, true, move |_, file| {
            let before = rustix::fs::fstat(file).map_err(io::Error::from)?;
            let written = file.write_all_at(&right, at);
            let times = Timestamps {
                last_access: Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_OMIT as _,
                },
                last_modification: Timespec {
                    tv_sec: before.st_mtime,
                    tv_nsec: before.st_mtime_nsec as _,
                },
            };
            // Whatever became of the write: another time would look like another program's change.
            rustix::fs::futimens(file, &times).map_err(io::Error::from)?;
            written?;
            Ok(file.sync_data()?)
        });
        repaired.map_err(|fail| {
            let why = match fail {
                Fail::Tree(why, _) => why,
                Fail::Client(status) | Fail::Partly(status) => {
                    format!("it cannot be repaired ({status})")
                }
            };
            self.inner.unread(side, &why, &self.places(at, 1));
            Skipped::Away
        })
    }

    /// Makes everything durable, in both trees at once.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let trees = &self.inner.trees;
        let sync = |side: usize| self.on(side, false, |_, file| Ok(crate::body::sync_all(file)?));
        loop {
            let current = trees.current();
            let both = current == [true; 2];
            let first = usize::from(!current[0]);
            let (a, b) = std::thread::scope(|scope| {
                let other = both.then(|| scope.spawn(|| sync(1 - first)));
                let a = sync(first);
                let b = other.map(|other| {
                    other.join().unwrap_or_else(|_| {
                        Err(Fail::Tree("a thread has failed".to_owned(), Status::Io))
                    })
                });
                (a, b)
            });
            let failed = |side: usize, done: Result<(), Fail<Status>>| match done {
                Ok(()) => Ok(true),
                Err(Fail::Tree(why, status)) => match trees.failed(side, &why, &[]) {
                    true => Ok(false),
                    false => Err(os(status)),
                },
                Err(Fail::Client(status) | Fail::Partly(status)) if side == first => {
                    Err(os(status))
                }
                Err(_) => match trees.failed(side, "it does not hold what it should", &[]) {
                    true => Ok(false),
                    false => Err(os(Status::Io)),
                },
            };
            if let Some(b) = b {
                failed(1 - first, b)?;
            }
            if failed(first, a)? {
                return Ok(());
            }
        }
    }

    pub(crate) fn has_place(&self, from: u64, to: u64) -> bool {
        let trees = &self.inner.trees;
        (0..2).filter(|side| trees.current()[*side]).all(|side| {
            let hole = self.on(side, false, move |_, file| {
                Ok(rustix::fs::seek(file, SeekFrom::Hole(from)).map_err(io::Error::from)?)
            });
            hole.is_ok_and(|hole| hole >= to)
        })
    }

    /// Where the next data is from an offset on. A tree that cannot be asked has some everywhere.
    pub(crate) fn next_data(&self, from: u64) -> Option<u64> {
        let found = self.read_with(&[self.itself()], move |_, file| {
            Ok(crate::body::next_data(file, from))
        });
        found.map_or(Some(from), |(at, _)| at)
    }

    /// Where it is, as if there were only the first directory.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        let number = self.shared.number;
        let place = self.inner.read(&[self.itself()], move |open| {
            open.place(&open.find(number)?)
        });
        Some(self.inner.trees.sides().path(0).join(place.ok()?))
    }

    /// The files it is, as far as they are open. Nothing is asked of a tree, which may hang.
    pub(crate) fn each_open(&self, see: &mut dyn FnMut(&File)) {
        for slot in &self.shared.slots {
            let file = lock(slot).as_ref().map(|held| held.file.clone());
            if let Some(file) = file {
                see(&file);
            }
        }
    }

    /// Calls `see` with the files it is, and with each that is opened later, in a tree that is back.
    pub(crate) fn when_opened(&self, see: impl Fn(&File) + Send + Sync + 'static) {
        // Set once, when the file becomes a disk.
        let _ = self.shared.when_opened.set(Box::new(see));
        if let Some(see) = self.shared.when_opened.get() {
            self.each_open(&mut |file: &File| see(file));
        }
    }

    /// Locks it in each tree, so that no other program on this host can use it as an image, until it is closed.
    pub(crate) fn claim(&self) -> Result<(), OpenError> {
        let trees = &self.inner.trees;
        for side in (0..2).filter(|side| trees.current()[*side]) {
            // A tree that fails is noticed at its next use.
            if let Ok(claimed) = self.on(side, false, |_, file| Ok(claim(file))) {
                let claimed = claimed?;
                if let Some(held) = &mut *lock(&self.shared.slots[side]) {
                    held._claim = Some(claimed);
                }
            }
        }
        self.shared.claimed.store(true, Ordering::SeqCst);
        Ok(())
    }
}
