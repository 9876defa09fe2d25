//! Two directories that hold one datastore, so that either may die.
//!
//! To clients and to the cache it is one tree ([`Tree`], [`Under`]). Files are called by numbers of the datastore's own (`side.rs`), for two
//! file systems have no names for files in common; listings go on behind hashes of names for the same reason. In which order the two
//! are changed, and which of them is believed, is in [`hearth_trees::pair`]; here are the steps, which each tree takes on threads of its own
//! (`lane.rs`), and what is kept in the state directory (`book.rs`).

mod book;
mod both;
mod file;
mod lane;
mod mend;
pub mod scrub;
mod side;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hearth_nfs::handle::Key;
use hearth_nfs::identity::{Identity, Verifier};
use hearth_nfs::tree::Outcome;
use hearth_nfs::v3::{Attributes, Status};
use hearth_trees::pair::{Fail, Pair, Place, State};

use crate::store::scrub::Scrub;
use book::Ledger;
pub use book::{stamp_bytes, stamp_of};
use both::{Both, lock};
pub use file::TwinFile;
use side::{Mark, Open};

/// First byte of keys that are numbers of the datastore's.
const BY_TREE: u8 = 3;
/// How often the trees are looked at.
const ROUND: Duration = Duration::from_secs(1);
/// How often places are forgotten, for which both trees are synced.
const TIDY: Duration = Duration::from_secs(5);
/// Longest wait before a tree that is out is tried again; it doubles from [`ROUND`] on.
const BACK_MAX: Duration = Duration::from_secs(60);
/// A tree that could not be read somewhere, and has held everything for so long since, is one like others again.
const STEADY: Duration = Duration::from_secs(600);
/// Parts of a file that are noted one by one.
const PARTS_MAX: u64 = 1024;

/// Who is told what happens to the trees, and keeps which of them are current where it outlives the state directory.
pub trait Witness: Send + Sync {
    /// A tree is out.
    fn lost(&self, directory: &Path, why: &str);
    /// It gets what it missed.
    fn resyncing(&self, directory: &Path, places: u64);
    /// It holds everything.
    fn current(&self, directory: &Path);
    /// These bytes say which trees are current.
    fn keep(&self, stamp: &[u8]);
    /// A scrub ended.
    fn scrubbed(&self, scrub: &Scrub);
}

/// How a tree is, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeReport {
    /// The directory.
    pub directory: PathBuf,
    /// `current`, `resyncing` or `out`.
    pub state: &'static str,
    /// Why it is out.
    pub why: Option<String>,
    /// Places that it lacks: directories, files, and parts of files of 16 MiB. Absent if that is not known yet.
    pub missing: Option<u64>,
}

/// What two trees are opened with.
pub struct Setup {
    /// The directories.
    pub directories: [PathBuf; 2],
    /// Where is kept what outlives restarts.
    pub state: PathBuf,
    /// The number of the datastore by which its trees know it.
    pub store: u64,
    /// Which trees were current, as it is kept elsewhere.
    pub stamp: Option<Vec<u8>>,
    /// How long a tree may take over a step.
    pub limit: Duration,
    /// See there.
    pub witness: Arc<dyn Witness>,
}

type Trees = Pair<Ledger, Both>;

pub(crate) struct Inner {
    trees: Trees,
    verifier: Verifier,
    /// The number clients are told as that of the tree.
    fsid: u64,
    listings: Mutex<HashMap<u64, view::Listing>>,
    /// A tree went out because something in it could not be read.
    unread: AtomicBool,
    /// Where is kept what outlives restarts.
    state: PathBuf,
    stop: Mutex<bool>,
    bell: Condvar,
}

/// See the module.
#[derive(Clone)]
pub struct Twin {
    inner: Arc<Inner>,
    _keeper: Arc<Keeper>,
}

struct Keeper {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        *lock(&self.inner.stop) = true;
        self.inner.bell.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            // It has nothing to tell.
            let _ = thread.join();
        }
    }
}

/// What clients call a file.
fn key_of(number: u64) -> Key {
    let mut bytes = [BY_TREE; 9];
    bytes[1..].copy_from_slice(&number.to_be_bytes());
    // Nine bytes fit.
    Key::new(&bytes).unwrap_or_else(|| unreachable!("keys have room for nine bytes"))
}

fn number_of(key: &Key) -> Outcome<u64> {
    match key.bytes() {
        [BY_TREE, rest @ ..] => {
            let number: [u8; 8] = rest.try_into().map_err(|_| Status::BadHandle)?;
            Ok(u64::from_be_bytes(number))
        }
        _ => Err(Status::Stale),
    }
}

/// Why two directories cannot become a datastore, and what to do, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Why.
    pub what: String,
    /// What to do.
    pub remedy: &'static str,
}

impl From<String> for Unfit {
    fn from(what: String) -> Unfit {
        Unfit {
            what,
            remedy: "give two directories on two disks, of which the second is empty",
        }
    }
}

/// Makes two directories ready to become a datastore: the first one's files count. Refused if they are not.
pub fn prepare(directories: &[PathBuf; 2], store: u64) -> Result<(), Unfit> {
    let look = |path: &PathBuf| {
        side::look_at(path).map_err(|e| format!("{} cannot be read: {e}", path.display()))
    };
    let (first, _) = look(&directories[0])?;
    let (second, empty) = look(&directories[1])?;
    let known = |mark: Option<Mark>| mark.map(|mark| (mark.store, mark.generation));
    match (known(first), known(second)) {
        // The same datastore, which somebody adds again.
        (Some((a, newer)), Some((b, older))) if a == b => {
            if older > newer {
                let what = format!(
                    "{} holds changes that {} has missed; name it first",
                    directories[1].display(),
                    directories[0].display()
                );
                return Err(what.into());
            }
        }
        _ if empty => {}
        _ => {
            let what = format!(
                "{} holds something, and would become as {} is; it has to be empty",
                directories[1].display(),
                directories[0].display()
            );
            return Err(what.into());
        }
    }
    for (at, path) in directories.iter().enumerate() {
        let mark = Mark {
            side: at as u8,
            store,
            generation: 1 - at as u64,
        };
        side::mark(path, mark).map_err(|e| unmarked(path, &e))?;
    }
    Ok(())
}

/// Why a directory takes no mark. Root alone may lack the right: a service is given a part of root's.
fn unmarked(path: &Path, e: &std::io::Error) -> Unfit {
    let lacks_right = e.kind() == std::io::ErrorKind::PermissionDenied;
    let why = match lacks_right {
        true => {
            "that takes root with the right CAP_SYS_ADMIN, which the packaged service does not give"
        }
        false => "its file system has to keep trusted.* attributes",
    };
    Unfit {
        what: format!(
            "{} cannot be marked as a tree of a datastore ({e}): {why}",
            path.display()
        ),
        remedy: match lacks_right {
            true => {
                "add `CapabilityBoundingSet=CAP_SYS_ADMIN` in the section [Service] with `systemctl edit hearth`, and restart the daemon (docs/datastore.md)"
            }
            false => "use ext4, XFS, Btrfs or ZFS",
        },
    }
}

/// Takes from two directories what made them trees of this datastore. Their files keep numbers that nobody looks at.
pub fn unmark(directories: &[PathBuf; 2]) {
    for path in directories {
        side::unmark(path);
    }
}

impl Twin {
    /// Puts two trees together. If none is there that holds everything, it is said of each why.
    pub fn open(setup: Setup) -> Result<(Twin, Identity), String> {
        let Setup {
            directories,
            state,
            store,
            stamp,
            limit,
            witness,
        } = setup;
        let kept = |e: io::Error| format!("what is kept in {}: {e}", state.display());
        let identity = Identity::load(&state).map_err(kept)?;
        let verifier = Verifier::load(&state).map_err(kept)?;
        let stamp = stamp.as_deref().and_then(stamp_of);
        let keeping = witness.clone();
        let elsewhere = Box::new(move |bytes: &[u8]| keeping.keep(bytes));
        let (ledger, found) = Ledger::open(&state, stamp, elsewhere).map_err(kept)?;
        let sides = Both::new(directories, state.clone(), store, limit, witness).map_err(kept)?;
        let shown = [0, 1].map(|side| sides.path(side).display().to_string());
        let trees = Pair::open(ledger, sides, found).map_err(|e| {
            format!(
                "neither tree can be used alone: {} ({}); {} ({})",
                shown[0], e.0[0], shown[1], e.0[1]
            )
        })?;
        let sides = trees.sides();
        if sides.forgot_numbers() {
            let highest = sides.on(trees.first(), Open::highest);
            let highest = highest.map_err(|_| "the files of the tree cannot be looked through")?;
            sides.numbers.above(highest);
        }
        let inner = Arc::new(Inner {
            trees,
            verifier,
            fsid: identity.store,
            listings: Mutex::default(),
            unread: AtomicBool::new(false),
            state,
            stop: Mutex::new(false),
            bell: Condvar::new(),
        });
        let kept = Arc::downgrade(&inner);
        let thread = thread::Builder::new()
            .name("store-trees".to_owned())
            .spawn(move || keep(&kept))
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        let keeper = Keeper {
            inner: inner.clone(),
            thread: Mutex::new(Some(thread)),
        };
        let twin = Twin {
            inner,
            _keeper: Arc::new(keeper),
        };
        Ok((twin, identity))
    }

    /// Forgets what is the same, so that nothing has to be looked at when it is opened again. Nobody changes anything any more.
    pub fn settle(&self) {
        self.inner.trees.tidy_after(Duration::ZERO);
    }

    /// How the trees are.
    pub fn report(&self) -> [TreeReport; 2] {
        let report = self.inner.trees.report();
        [0, 1].map(|side| {
            let (state, why) = match &report.states[side] {
                State::Current => ("current", None),
                State::Resyncing => ("resyncing", None),
                State::Out(why) => ("out", Some(why.clone())),
            };
            TreeReport {
                directory: self.inner.trees.sides().path(side).to_owned(),
                state,
                why,
                missing: match state {
                    "current" => Some(0),
                    _ => (!report.all).then_some(report.places),
                },
            }
        })
    }
}

/// Looks after the trees until nobody uses them.
fn keep(inner: &Weak<Inner>) {
    let mut patience = ROUND;
    let mut tidied = Instant::now();
    let mut next = Instant::now();
    let mut returned: Option<Instant> = None;
    loop {
        let Some(inner) = inner.upgrade() else { return };
        let stopped = || *lock(&inner.stop);
        inner.trees.look();
        if tidied.elapsed() >= TIDY {
            inner.trees.tidy();
            tidied = Instant::now();
        }
        if Instant::now() >= next {
            let whole = inner.trees.current() == [true; 2];
            let back = inner.trees.restore(stopped);
            if back && !whole && inner.unread.swap(false, Ordering::SeqCst) {
                // A disk with many bad places, or one that does not keep what is written over them, must not go in and out all the time.
                returned = Some(Instant::now());
                next = Instant::now() + patience;
                patience = (patience * 2).min(BACK_MAX);
            } else if back {
                if returned.is_none_or(|at| at.elapsed() >= STEADY) {
                    patience = ROUND;
                }
            } else {
                next = Instant::now() + patience;
                patience = (patience * 2).min(BACK_MAX);
            }
        }
        let stop = lock(&inner.stop);
        if *stop {
            return;
        }
        let waited = inner.bell.wait_timeout(stop, ROUND);
        let (stop, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *stop {
            return;
        }
    }
}

/// What a client is told of a failure of both trees.
fn refused(why: String) -> Status {
    tracing::error!("neither tree of a datastore can be changed: {why}");
    Status::JukeBox
}

fn told<T>(done: Result<T, Fail<Status>>) -> Outcome<T> {
    done.map_err(|fail| match fail {
        Fail::Client(status) | Fail::Partly(status) | Fail::Tree(_, status) => status,
    })
}

impl Inner {
    /// Asks the tree that is read for what is in these places, or the other one if that fails.
    fn read<T: Send + 'static>(
        &self,
        places: &[Place],
        work: impl Fn(&Open) -> Outcome<T> + Send + Sync + 'static,
    ) -> Outcome<T> {
        let work = Arc::new(work);
        loop {
            let side = self.trees.first();
            let again = work.clone();
            match self.trees.sides().on(side, move |open| again(open)) {
                Err(Fail::Tree(why, status)) => {
                    if !self.unread(side, &why, places) {
                        return Err(status);
                    }
                }
                done => return told(done),
            }
        }
    }

    /// A tree could not be read there. True if there is another one to be asked.
    fn unread(&self, side: usize, why: &str, places: &[Place]) -> bool {
        let out = self.trees.failed(side, why, places);
        if out {
            self.unread.store(true, Ordering::SeqCst);
        }
        out
    }

    /// Changes places: `work` takes the steps in one tree, and is given what came of the first one in the second.
    fn change<T: Clone + Send + Sync + 'static>(
        &self,
        places: &[Place],
        work: impl Fn(&Open, Option<&T>) -> Outcome<T> + Send + Sync + 'static,
    ) -> Outcome<T> {
        let work = Arc::new(work);
        told(self.trees.change(places, refused, |side, of: Option<&T>| {
            let (work, of) = (work.clone(), of.cloned());
            self.trees
                .sides()
                .on(side, move |open| work(open, of.as_ref()))
        }))
    }

    /// As clients are told of a file.
    fn told_of(&self, number: u64, mut attributes: Attributes) -> Attributes {
        attributes.id = number;
        attributes.tree = self.fsid;
        attributes
    }
}

/// The parts of a file in a range.
fn parts(number: u64, from: u64, to: u64) -> Vec<Place> {
    if to <= from {
        return Vec::new();
    }
    if (to - from) / hearth_trees::pair::PART > PARTS_MAX {
        return vec![Place::Part(number, mend::WHOLE)];
    }
    Place::parts(number, from, to - from).collect()
}
