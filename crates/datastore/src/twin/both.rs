//! The steps of two trees, each on its own threads and within a time.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_nfs::identity::replace;
use hearth_nfs::tree::Outcome;
use hearth_nfs::v3::Status;
use hearth_trees::pair::{Fail, Mended, News, NotMended, Place, Sides};

use super::lane::Lane;
use super::side::{self, Mark, Open};
use super::{Witness, mend};

/// Longest wait for what takes time in the background.
const SLOW: Duration = Duration::from_secs(600);
/// Numbers are noted in steps of so many.
const STEP: u64 = 4096;
/// A file beside what is kept of a tree: a disk was mounted there.
const MOUNTED: &str = "mounted";
/// Where that is.
const NUMBERS: &str = "numbers";

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Side {
    path: PathBuf,
    state: PathBuf,
    lane: Lane,
    open: Mutex<Option<Arc<Open>>>,
}

/// Numbers for new files.
pub(super) struct Numbers {
    state: PathBuf,
    /// The next one, and the first that was not noted.
    next: Mutex<(u64, u64)>,
}

impl Numbers {
    /// A number that no file has.
    pub fn take(&self) -> Outcome<u64> {
        let mut next = lock(&self.next);
        if next.0 >= next.1 {
            let noted = next.0 + STEP;
            replace(&self.state, NUMBERS, format!("{noted}\n").as_bytes())?;
            next.1 = noted;
        }
        next.0 += 1;
        Ok(next.0 - 1)
    }

    /// All below are taken.
    pub fn above(&self, number: u64) {
        let mut next = lock(&self.next);
        if next.0 <= number {
            next.0 = number + 1;
        }
    }
}

/// See the module.
pub(super) struct Both {
    pub store: u64,
    sides: [Side; 2],
    limit: Duration,
    pub numbers: Arc<Numbers>,
    current: [AtomicBool; 2],
    witness: Arc<dyn Witness>,
}

/// What an error of a file system means for its tree.
pub(super) fn judged(status: Status) -> Fail<Status> {
    match status {
        Status::Io | Status::RoFs | Status::NxIo | Status::NoDev | Status::ServerFault => {
            Fail::Tree(format!("it answers with an error ({status})"), status)
        }
        // As much as there was room for may have been done.
        Status::NoSpace | Status::DQuot | Status::FBig => Fail::Partly(status),
        status => Fail::Client(status),
    }
}

/// Takes a step in a tree, and classifies its failure.
fn tried<T>(open: &Open, work: impl FnOnce(&Open) -> Outcome<T>) -> Result<T, Fail<Status>> {
    work(open).map_err(|status| {
        // A missing file proves nothing if the whole tree is missing.
        let missing = matches!(status, Status::Stale | Status::NoEnt | Status::NotDir);
        match missing.then(|| open.probe()) {
            Some(Err(why)) => Fail::Tree(why, Status::JukeBox),
            _ => judged(status),
        }
    })
}

impl Both {
    pub fn new(
        paths: [PathBuf; 2],
        state: PathBuf,
        store: u64,
        limit: Duration,
        witness: Arc<dyn Witness>,
    ) -> std::io::Result<Both> {
        let noted = match std::fs::read_to_string(state.join(NUMBERS)) {
            Ok(text) => text.trim().parse().unwrap_or(0),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => 0,
            Err(e) => return Err(e),
        };
        let mut at = 0;
        let sides = paths.map(|path| {
            at += 1;
            Side {
                path,
                state: state.join(format!("tree-{}", at - 1)),
                lane: Lane::new(),
                open: Mutex::default(),
            }
        });
        Ok(Both {
            store,
            sides,
            limit,
            numbers: Arc::new(Numbers {
                state,
                next: Mutex::new((noted.max(side::ROOT + 1), noted)),
            }),
            current: Default::default(),
            witness,
        })
    }

    /// The highest number is not known by what is kept of it.
    pub fn forgot_numbers(&self) -> bool {
        lock(&self.numbers.next).1 == 0
    }

    pub fn path(&self, side: usize) -> &std::path::Path {
        &self.sides[side].path
    }

    pub fn witness(&self) -> &dyn Witness {
        &*self.witness
    }

    /// The tree, if it is open.
    pub fn open(&self, side: usize) -> Result<Arc<Open>, String> {
        let open = lock(&self.sides[side].open).clone();
        open.ok_or_else(|| "it is not open".to_owned())
    }

    fn within<T: Send + 'static>(
        &self,
        side: usize,
        limit: Duration,
        work: impl FnOnce(&Open) -> T + Send + 'static,
    ) -> Result<T, String> {
        let open = self.open(side)?;
        // Given up only if it goes out for that: the other one has everything, or it has not.
        let has = |side: usize| self.current[side].load(Ordering::SeqCst);
        let last = || has(side) && !has(1 - side);
        let ran = self.sides[side].lane.run(limit, last, move || work(&open));
        ran.map_err(|hung| hung.why())
    }

    /// Takes steps in a tree.
    pub fn on<T: Send + 'static>(
        &self,
        side: usize,
        work: impl FnOnce(&Open) -> Outcome<T> + Send + 'static,
    ) -> Result<T, Fail<Status>> {
        let ran = self.within(side, self.limit, |open| tried(open, work));
        ran.unwrap_or_else(|why| Err(Fail::Tree(why, Status::JukeBox)))
    }

    /// As [`on`](Self::on), for a scrub: a slow step does not put the tree out.
    pub fn on_slowly<T: Send + 'static>(
        &self,
        side: usize,
        work: impl FnOnce(&Open) -> Outcome<T> + Send + 'static,
    ) -> Result<T, Fail<Status>> {
        let open = self
            .open(side)
            .map_err(|why| Fail::Tree(why, Status::JukeBox))?;
        let lane = &self.sides[side].lane;
        let ran = lane.run(SLOW, || false, move || tried(&open, work));
        ran.unwrap_or(Err(Fail::Client(Status::JukeBox)))
    }

    fn open_now(&self, at: usize) -> Result<(), String> {
        let this = &self.sides[at];
        if this.lane.under_way() > 0 {
            return Err("what was asked of it before has not ended".to_owned());
        }
        let (path, state, store) = (this.path.clone(), this.state.clone(), self.store);
        let opened = this.lane.run(
            self.limit,
            || false,
            move || {
                let (mark, empty) =
                    side::look_at(&path).map_err(|e| format!("{}: {e}", path.display()))?;
                match mark {
                    Some(mark) if mark.store != store => {
                        return Err("it is another datastore's".to_owned());
                    }
                    Some(mark) if usize::from(mark.side) != at => {
                        return Err("the other tree is in its place".to_owned());
                    }
                    Some(_) => {}
                    // What is left where a disk was mounted must not fill the disk beneath.
                    None if empty && state.join(MOUNTED).exists() && !side::is_mount(&path) => {
                        return Err(format!("nothing is mounted at {}", path.display()));
                    }
                    None if empty => {
                        let mark = Mark {
                            side: at as u8,
                            store,
                            generation: 0,
                        };
                        side::mark(&path, mark).map_err(|e| {
                            format!("{} cannot be marked as a tree ({e})", path.display())
                        })?;
                    }
                    None => {
                        return Err(
                            "it holds something, and nothing says that it is this datastore's"
                                .to_owned(),
                        );
                    }
                }
                let open = Open::new(&path, &state, store)?;
                if side::is_mount(&path) {
                    let noted = std::fs::write(state.join(MOUNTED), "");
                    noted.map_err(|e| format!("{}: {e}", state.display()))?;
                }
                Ok(open)
            },
        );
        let opened = opened.map_err(|hung| hung.why())??;
        *lock(&this.open) = Some(Arc::new(opened));
        Ok(())
    }
}

impl Sides for Both {
    type Seen = mend::Seen;

    fn mark(&self, side: usize, generation: u64) -> Result<(), String> {
        let marked = self.within(side, self.limit, move |open| open.mark(side, generation));
        marked?.map_err(|e| format!("its root cannot be written ({e})"))
    }

    fn sync(&self, side: usize) -> Result<(), String> {
        let synced = self.within(side, SLOW, Open::sync);
        synced?.map_err(|e| format!("it cannot be synced ({e})"))
    }

    fn mend(
        &self,
        place: Place,
        from: usize,
        to: usize,
        noted: &BTreeSet<Place>,
        seen: Option<mend::Seen>,
    ) -> Result<Mended<mend::Seen>, NotMended> {
        let source = self.open(from).map_err(NotMended::Source)?;
        let (numbers, noted) = (self.numbers.clone(), noted.clone());
        let mended = self.within(to, SLOW, move |target| {
            mend::mend(place, &source, target, &numbers, &noted, seen.flatten())
        });
        mended.map_err(NotMended::Target)?
    }

    fn everything(&self, of: usize) -> Result<Vec<Place>, String> {
        let numbers = self.numbers.clone();
        let all = self.within(of, SLOW, move |open| mend::everything(open, &numbers));
        all?.map_err(|status| format!("the other tree cannot be read ({status})"))
    }

    fn clear(&self, side: usize) -> Result<(), String> {
        let cleared = self.within(side, SLOW, mend::clear);
        cleared?.map_err(|e| format!("what was put aside in it cannot be removed ({e})"))
    }

    fn probe(&self, side: usize) -> Result<Option<u64>, String> {
        if lock(&self.sides[side].open).is_none() {
            self.open_now(side)?;
        }
        let mark = self.within(side, self.limit, Open::probe)??;
        Ok(mark.map(|mark| mark.generation))
    }

    fn drop_side(&self, side: usize) {
        let this = &self.sides[side];
        if let Some(open) = lock(&this.open).take() {
            // It may hang, and is not opened again before that has ended.
            this.lane.begin(move || open.close());
        }
    }

    fn stand(&self, current: [bool; 2]) {
        for (place, current) in self.current.iter().zip(current) {
            place.store(current, Ordering::SeqCst);
        }
    }

    fn tell(&self, news: News) {
        match news {
            News::Lost(side, why) => {
                let directory = self.path(side).display();
                tracing::warn!(%directory, "a tree of a datastore is out: {why}");
                self.witness.lost(self.path(side), &why);
            }
            News::Resyncing(side, places) => self.witness.resyncing(self.path(side), places),
            News::Current(side) => self.witness.current(self.path(side)),
        }
    }
}
