//! Files that are to be all on flash.
//!
//! Most files are cached as they are used. Of some their owner knows better: a few virtual machines are to be fast the first time, too.
//! So those are looked for when the rules change, at a start and now and then, opened, and what is missing of
//! them is read in, in the background. That it stays is the engine's part: as much flash is kept for the disk as the file
//! is long. Where there is not so much left to be kept, nothing is read in: it would push out other files' blocks, and be
//! pushed out by them.
//!
//! Who works at the datastore comes first: after each piece the reading waits for as long as it took, if clients asked for
//! anything meanwhile.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use hearth_engine::api::{ReqOp, Request};
use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::tree::Outcome;
use hearth_nfs::v3::{Kind, Status};

use super::{Inner, lock};
use crate::Missing;
use crate::origin::FileOrigin;

/// How often it is looked whether those that are known are complete, and while one is being read in.
const ROUND: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_millis(500);
/// How often files are looked for that nobody told us of.
const WALK: Duration = Duration::from_secs(600);
/// Bytes read in at once.
const PIECE: u64 = 1 << 20;
/// How often it is looked whether to end while a piece is read.
const PATIENCE: Duration = Duration::from_millis(500);

/// How far a file is that is to be all on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// It is being read in, or will be.
    Filling,
    /// All of it is there.
    Filled,
    /// Not so much flash can be kept for it.
    NoRoom,
}

#[derive(Clone, Copy, Debug)]
struct Pin {
    state: Pinned,
    /// When it was complete: how long it was, and how much of it was on flash.
    filled: Option<(u64, u64)>,
}

const FILLING: Pin = Pin {
    state: Pinned::Filling,
    filled: None,
};

/// See the module.
#[derive(Default)]
pub(super) struct Pins {
    all: Mutex<HashMap<Key, Pin>>,
    /// They have to be looked for.
    anew: AtomicBool,
    /// Some were told of meanwhile.
    told: AtomicBool,
}

impl Pins {
    pub fn of(&self, key: &Key) -> Option<Pinned> {
        lock(&self.all).get(key).map(|pin| pin.state)
    }

    pub fn drop(&self, key: &Key) {
        lock(&self.all).remove(key);
    }

    pub fn look_anew(&self) {
        self.anew.store(true, Ordering::SeqCst);
    }

    fn add(&self, key: &Key) {
        lock(&self.all).entry(*key).or_insert(FILLING);
    }

    fn set(&self, key: &Key, pin: Pin) {
        // One that was removed meanwhile stays so.
        if let Some(place) = lock(&self.all).get_mut(key) {
            *place = pin;
        }
    }
}

/// Looks for files that are to be on flash, and reads them in.
pub(super) fn keep(inner: &Weak<Inner>) {
    let mut walked: Option<Instant> = None;
    // Flash may be kept for some since before a restart.
    let mut kept = true;
    loop {
        let Some(inner) = inner.upgrade() else { return };
        if inner.is_stopped() {
            return;
        }
        let wanted = inner.disks.pins();
        let anew = inner.pins.anew.swap(false, Ordering::SeqCst);
        let due = walked.is_none_or(|at| at.elapsed() >= WALK);
        if (wanted || kept) && (anew || due) {
            walked = Some(Instant::now());
            match inner.find_pins(wanted) {
                Ok(()) => kept = wanted,
                Err(status) => {
                    tracing::warn!("not all files to be kept on flash are found: {status}")
                }
            }
        }
        inner.pins.told.store(false, Ordering::SeqCst);
        let all: Vec<Key> = lock(&inner.pins.all).keys().copied().collect();
        let mut round = ROUND;
        for key in all {
            if inner.is_stopped() || inner.pins.anew.load(Ordering::SeqCst) {
                break;
            }
            if inner.keep_pinned(&key) {
                round = SOON;
            }
        }
        inner.rest(round);
    }
}

impl Inner {
    /// A file that is a disk from now on, or is called something else.
    pub(super) fn pin_if_wanted(&self, key: &Key, origin: &FileOrigin) {
        if origin.is_scratch() || !self.disks.pins() {
            return;
        }
        if origin
            .path()
            .is_some_and(|path| self.disks.is_pinned(&path))
        {
            self.pins.add(key);
            self.pins.told.store(true, Ordering::SeqCst);
            self.bell.notify_all();
        } else {
            self.pins.drop(key);
        }
    }

    /// Waits, unless there is something to do or it is to end.
    fn rest(&self, time: Duration) {
        let stop = lock(&self.stop);
        let pins = &self.pins;
        let waits = |stop: &mut bool| {
            let told = pins.anew.load(Ordering::SeqCst) || pins.told.load(Ordering::SeqCst);
            !*stop && !told
        };
        let waited = self.bell.wait_timeout_while(stop, time, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Looks through the directory. For others, no flash is kept any more.
    fn find_pins(&self, wanted: bool) -> Outcome<()> {
        let mut found = HashSet::new();
        if wanted {
            let mut todo = vec![(self.dir.root(), PathBuf::new())];
            while let Some((dir, path)) = todo.pop() {
                if self.is_stopped() {
                    return Ok(());
                }
                match self.look_in(&dir, &path, &mut todo, &mut found) {
                    // Removed meanwhile.
                    Err(Status::Stale | Status::NoEnt) if !path.as_os_str().is_empty() => {}
                    other => other?,
                }
            }
        }
        let mut all = lock(&self.pins.all);
        all.retain(|key, _| found.contains(key));
        drop(all);
        for key in &found {
            self.pins.add(key);
        }
        for (key, disk) in self.known() {
            if self.pins.of(&key).is_none() {
                self.disks.keep(disk, 0);
            }
        }
        Ok(())
    }

    fn look_in(
        &self,
        dir: &Key,
        path: &Path,
        todo: &mut Vec<(Key, PathBuf)>,
        found: &mut HashSet<Key>,
    ) -> Outcome<()> {
        let mut cookie = 0;
        loop {
            let behind = cookie;
            let mut tell = |entry: hearth_nfs::tree::Entry<'_>| {
                cookie = entry.cookie;
                let name =
                    <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(entry.name);
                let (Some(at), false) = (entry.found, name == "." || name == "..") else {
                    return true;
                };
                let path = path.join(name);
                match at.attributes.kind {
                    Kind::Directory => todo.push((at.key, path)),
                    Kind::Regular
                        if self.disks.is_pinned(&path)
                            && (self.rules.name_fits(entry.name)
                                || self.rules.size_fits(at.attributes.size)) =>
                    {
                        found.insert(at.key);
                    }
                    _ => {}
                }
                true
            };
            if self.dir.list(&Who::root(), dir, behind, true, &mut tell)? {
                return Ok(());
            }
        }
    }

    /// Keeps flash for a file, and reads in what is missing. True if it has to be looked at again soon.
    fn keep_pinned(&self, key: &Key) -> bool {
        let Some(pin) = lock(&self.pins.all).get(key).copied() else {
            return false;
        };
        if let Some((len, cached)) = pin.filled
            && let Some(disk) = self.is_known(key)
            && self.disks.cached(disk) >= cached
            && self.dir.attributes(key).is_ok_and(|now| now.size == len)
        {
            return false;
        }
        match self.fill(key) {
            Ok(pin) => {
                self.pins.set(key, pin);
                pin.state == Pinned::Filling
            }
            Err(Status::Stale) => {
                self.pins.drop(key);
                false
            }
            // It is used by somebody else, or its file system does not answer.
            Err(_) => {
                self.pins.set(key, FILLING);
                false
            }
        }
    }

    /// Reads in what is missing. It is complete when nothing was: what was read in may still be on its way to flash.
    fn fill(&self, key: &Key) -> Outcome<Pin> {
        let (mut at, mut read) = (0, false);
        loop {
            // Each time anew: it may be cut, removed or replaced meanwhile, for which nobody should wait.
            let (using, cached) = self.begin(key)?;
            let Some(cached) = cached else {
                return Err(Status::JukeBox);
            };
            let len = cached.origin.len();
            if !self.disks.keep(cached.disk, len) {
                return Ok(Pin {
                    state: Pinned::NoRoom,
                    filled: None,
                });
            }
            let next = cached.origin.file().next_data(at);
            let Some(from) = next.filter(|from| *from < len) else {
                return Ok(match read {
                    true => FILLING,
                    false => Pin {
                        state: Pinned::Filled,
                        filled: Some((len, self.disks.cached(cached.disk))),
                    },
                });
            };
            at = match self.disks.missing(cached.disk, from, len) {
                Missing::Not(to) => to,
                Missing::From(from, missing) => {
                    let piece = missing.min(PIECE);
                    let turn = self.turn.load(Ordering::Relaxed);
                    let began = Instant::now();
                    self.read_in(cached.disk, from, piece)?;
                    read = true;
                    drop((using, cached));
                    let busy = self.turn.load(Ordering::Relaxed) != turn;
                    if busy {
                        self.pause(began.elapsed());
                    }
                    from + piece
                }
            };
            if self.is_stopped() || self.pins.anew.load(Ordering::SeqCst) {
                return Ok(FILLING);
            }
        }
    }

    /// Waits, unless it is to end.
    fn pause(&self, time: Duration) {
        let stop = lock(&self.stop);
        let waited = self.bell.wait_timeout_while(stop, time, |stop| !*stop);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Has a range read in. What takes too long is waited for, unless it is to end.
    fn read_in(&self, disk: u16, from: u64, len: u64) -> Outcome<()> {
        let (told, answers) = sync_channel(1);
        let request = Request::new(0, disk, ReqOp::Prefetch, from, len, None, 0);
        // Not counted among what clients ask for.
        let turn = self.turn.load(Ordering::Relaxed);
        let answer = move |result: Result<(), hearth_engine::api::ReqError>, _| {
            // Who does not wait any more need not be told.
            let _ = told.try_send(result);
        };
        self.port.ask(turn, request, Box::new(answer));
        loop {
            match answers.recv_timeout(PATIENCE) {
                Ok(result) => return result.map_err(|_| Status::Io),
                Err(RecvTimeoutError::Timeout) if !self.is_stopped() => {}
                Err(_) => return Err(Status::JukeBox),
            }
        }
    }
}
