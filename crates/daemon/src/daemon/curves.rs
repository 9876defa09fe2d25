//! Curves outlive the daemon: what is known of how disks are used is kept beside the flash.
//!
//! A miss-ratio curve takes hours to become one, and advice and shares rest on it, so a restart must not cost it. Every few
//! minutes, and before a stop, what is new is written to a file for each disk (`docs/curves.md`); a disk that
//! is attached goes on with its file. Nothing but advice rests on them: they are replaced whole and not flushed, one that is
//! damaged is passed over, and none is waited for. A thread of its own writes them, because the state directory may hang.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, Uuid};
use hearth_observe::{KEPT_MAX, KeptOf};

use super::{Daemon, lock};

/// The directory within the state directory.
const CURVES: &str = "curves";
/// How files in it end.
const ENDING: &str = "curve";
/// Between two times that what is new is written: what a crash costs.
const EVERY: Duration = Duration::from_secs(300);
/// A stop waits no longer for it.
const STOP_TIME: Duration = Duration::from_secs(5);
/// Files of disks that this pool does not have stay so long: they may be another pool's.
const STRAYS: Duration = Duration::from_secs(90 * 86_400);
/// Most bytes of all files together; beyond, the oldest go.
const ALL_MAX: u64 = 32 << 20;

/// What the thread is asked for.
pub(super) enum Ask {
    /// To go on with what was known of a disk.
    Recall(DiskId),
    /// To write what is new now.
    Keep(Sender<()>),
}

fn path(state_dir: &Path, serial: &Uuid) -> PathBuf {
    state_dir.join(CURVES).join(format!("{serial}.{ENDING}"))
}

/// A disk is gone.
pub(super) fn forget(state_dir: &Path, serial: &Uuid) {
    // One that stays is found as a stray.
    let _ = std::fs::remove_file(path(state_dir, serial));
}

fn of(record: &DiskRecord) -> KeptOf {
    let file = !record.datastore.is_empty();
    KeptOf {
        serial: *record.serial.as_bytes(),
        // A datastore's file grows, and is the same.
        size: if file { 0 } else { record.size },
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One that is longer is refused for it.
    let file = std::fs::File::open(path)?;
    file.take(KEPT_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, bytes)?;
    std::fs::rename(&new, path)
}

/// Removes what nobody asks for any more, and the oldest while there is too much.
fn tidy(dir: &Path, known: &BTreeSet<PathBuf>, now: SystemTime, all_max: u64) -> io::Result<()> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let (path, meta) = match entry.and_then(|e| Ok((e.path(), e.metadata()?))) {
            Ok(found) => found,
            // It has just gone.
            Err(_) => continue,
        };
        let at = meta.modified().unwrap_or(now);
        let old = now.duration_since(at).unwrap_or_default() >= STRAYS;
        if old && !known.contains(&path) {
            std::fs::remove_file(&path)?;
        } else {
            files.push((at, path, meta.len()));
        }
    }
    files.sort();
    let mut all: u64 = files.iter().map(|(_, _, len)| len).sum();
    for (_, path, len) in files {
        if all <= all_max {
            break;
        }
        std::fs::remove_file(path)?;
        all -= len;
    }
    Ok(())
}

/// What the thread remembers.
#[derive(Default)]
struct Keeping {
    /// How much had been seen of each disk that was kept.
    kept: BTreeMap<DiskId, (Uuid, u64)>,
    /// It was told that they cannot be written.
    failing: bool,
}

impl Keeping {
    fn keep(&mut self, daemon: &Daemon) {
        let done = self.try_keep(daemon);
        if let Err(e) = &done
            && !self.failing
        {
            tracing::warn!(
                "what is known of how disks are used cannot be kept in {}, and a restart measures it anew: {e}",
                daemon.state_dir.join(CURVES).display()
            );
        }
        self.failing = done.is_err();
    }

    fn try_keep(&mut self, daemon: &Daemon) -> io::Result<()> {
        let dir = daemon.state_dir.join(CURVES);
        std::fs::create_dir_all(&dir)?;
        let watched = daemon.observer.watched();
        let records: Vec<(DiskId, Uuid, KeptOf)> = {
            let pool = lock(&daemon.pool);
            let record = |id: DiskId| pool.record(id).map(|r| (id, r.serial, of(r)));
            watched.into_iter().filter_map(record).collect()
        };
        self.kept
            .retain(|id, (serial, _)| records.iter().any(|r| r.0 == *id && r.1 == *serial));
        let mut known = BTreeSet::new();
        for (id, serial, of) in records {
            let path = path(&daemon.state_dir, &serial);
            let before = self.kept.get(&id).map_or(0, |(_, seen)| *seen);
            if let Some((seen, bytes)) = daemon.observer.keep(id, &of, before) {
                write(&path, &bytes)?;
                self.kept.insert(id, (serial, seen));
            }
            known.insert(path);
        }
        tidy(&dir, &known, SystemTime::now(), ALL_MAX)
    }
}

impl Daemon {
    /// Starts the thread; it ends when the way to it is dropped.
    pub(super) fn start_curves(self: &Arc<Daemon>) -> io::Result<Sender<Ask>> {
        let (asks, asked) = channel();
        let daemon = Arc::downgrade(self);
        let body = move |asked: Receiver<Ask>| {
            let mut keeping = Keeping::default();
            let mut due = Instant::now() + EVERY;
            loop {
                let ask = asked.recv_timeout(due.saturating_duration_since(Instant::now()));
                let Some(daemon) = daemon.upgrade() else {
                    return;
                };
                match ask {
                    Ok(Ask::Recall(id)) => {
                        let record = lock(&daemon.pool).record(id).cloned();
                        if let Some(record) = record {
                            daemon.recall_curve(&record);
                        }
                    }
                    Ok(Ask::Keep(done)) => {
                        keeping.keep(&daemon);
                        // Whoever asked may have given up.
                        let _ = done.send(());
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        keeping.keep(&daemon);
                        due = Instant::now() + EVERY;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        std::thread::Builder::new()
            .name("hearth-curves".to_owned())
            .spawn(move || body(asked))?;
        Ok(asks)
    }

    fn ask_curves(&self, ask: Ask) -> bool {
        let asks = lock(&self.curves);
        asks.as_ref().is_some_and(|asks| asks.send(ask).is_ok())
    }

    /// The same as [`recall_curve`](Self::recall_curve) for somebody who cannot wait for a file.
    pub(super) fn recall_curve_later(&self, id: DiskId) {
        self.ask_curves(Ask::Recall(id));
    }

    /// Goes on with what was known of a disk that is watched.
    pub(super) fn recall_curve(&self, record: &DiskRecord) {
        let (id, name) = (record.id, &record.name);
        let path = path(&self.state_dir, &record.serial);
        let recalled = match read(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return,
            Err(e) => Err(e.to_string()),
            Ok(bytes) => (self.observer.recall(id, &of(record), &bytes)).map_err(|e| e.to_string()),
        };
        if let Err(why) = recalled {
            tracing::warn!(
                "how disk {name} was used is measured anew, because {} is not gone on with: {why}",
                path.display()
            );
        }
    }

    /// Writes what is new, if that does not take long.
    pub(super) fn keep_curves(&self) {
        let (done, kept) = channel();
        if self.ask_curves(Ask::Keep(done))
            && kept.recv_timeout(STOP_TIME) == Err(RecvTimeoutError::Timeout)
        {
            tracing::warn!(
                "what is known of how disks are used was not kept within {} s; that of some minutes ago is",
                STOP_TIME.as_secs()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strays_go_when_they_are_old_and_the_oldest_when_there_is_too_much() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            write(&path, &[0; 1000]).unwrap();
            path
        };
        let (ours, stray) = (file("a.curve"), file("b.curve"));
        let known = BTreeSet::from([ours.clone()]);
        let now = SystemTime::now();
        tidy(dir.path(), &known, now, ALL_MAX).unwrap();
        assert!(ours.exists() && stray.exists());
        tidy(dir.path(), &known, now + STRAYS * 2, ALL_MAX).unwrap();
        assert!(ours.exists() && !stray.exists());
        let newer = file("c.curve");
        let file = std::fs::File::options().write(true).open(&ours).unwrap();
        file.set_modified(now - Duration::from_secs(60)).unwrap();
        tidy(dir.path(), &known, now, 1500).unwrap();
        assert!(!ours.exists() && newer.exists());
    }
}
