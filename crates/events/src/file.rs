//! The last events in files that survive crashes.
//!
//! A database would bring a large library written in another language for what is appended and
//! read in one order. So the events are lines of JSON in files of [`PER_FILE`] lines, named after the first
//! number in them; the oldest file goes when the others hold [`KEPT`] events. A crash leaves at most one
//! line unfinished, which is passed over and closed at the next start; lines that make no sense (a damaged
//! file) are passed over too, and cost only themselves. What was written is flushed to the
//! device once per batch.
//!
//! One daemon writes a directory at a time: it is locked.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::Record;

/// Events in one file.
pub const PER_FILE: u64 = 10_000;
/// Events that are there at least, once so many have happened.
pub const KEPT: u64 = 100_000;
/// How names end.
const ENDING: &str = "events";
/// Longest line read: far longer than any event.
const LINE_MAX: u64 = 64 << 10;

/// Why events cannot be kept.
#[derive(Debug)]
pub enum OpenError {
    /// Another daemon keeps its events there.
    Taken,
    /// The directory or a file in it cannot be used.
    Io(io::Error),
}

impl From<io::Error> for OpenError {
    fn from(e: io::Error) -> OpenError {
        OpenError::Io(e)
    }
}

/// The files, to append to.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    file: File,
    /// Number of the first event in `file`.
    first: u64,
    next: u64,
    /// Held for its lock.
    _lock: File,
}

fn name(first: u64) -> String {
    format!("{first:020}.{ENDING}")
}

/// The first numbers of all files of a directory, oldest first.
fn files(dir: &Path) -> io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == ENDING) {
            let stem = path.file_stem().and_then(|s| s.to_str());
            found.extend(stem.and_then(|s| s.parse::<u64>().ok()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Calls `each` with every event of a file, in order, until it says false.
fn read(path: &Path, each: &mut dyn FnMut(Record) -> bool) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(1 << 17, File::open(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        let n = (&mut reader).take(LINE_MAX).read_until(b'\n', &mut line)?;
        if n == 0 {
            return Ok(());
        }
        // What is not whole, or damaged, is passed over.
        if let Ok(record) = serde_json::from_slice::<Record>(&line)
            && !each(record)
        {
            return Ok(());
        }
    }
}

/// Calls `each` with the events from number `from` on, in order, until it says false. Files that go
/// meanwhile are passed over.
pub fn scan(dir: &Path, from: u64, each: &mut dyn FnMut(Record) -> bool) -> io::Result<()> {
    let files = files(dir)?;
    let mut more = true;
    for (at, first) in files.iter().enumerate() {
        if files.get(at + 1).is_some_and(|next| *next <= from) {
            continue;
        }
        let outcome = read(&dir.join(name(*first)), &mut |record| {
            more = record.id < from || each(record);
            more
        });
        match outcome {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        if !more {
            break;
        }
    }
    Ok(())
}

impl Store {
    /// Opens the files in `dir`, which is made if it is not there.
    pub fn open(dir: &Path) -> Result<Store, OpenError> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(dir.join("lock"))?;
        // SAFETY: the descriptor is open; flock touches no memory.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let e = io::Error::last_os_error();
            return Err(match e.kind() {
                io::ErrorKind::WouldBlock => OpenError::Taken,
                _ => OpenError::Io(e),
            });
        }
        let first = files(dir)?.last().copied().unwrap_or(1);
        let path = dir.join(name(first));
        let mut file = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .mode(0o600)
            .open(&path)?;
        let mut next = first;
        read(&path, &mut |record| {
            next = next.max(record.id.saturating_add(1));
            true
        })?;
        if file.seek(SeekFrom::End(0))? > 0 {
            file.seek(SeekFrom::End(-1))?;
            let mut last = [0];
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                // An unfinished line is closed, so that it takes no other with it.
                file.write_all(b"\n")?;
            }
        }
        Ok(Store {
            dir: dir.to_owned(),
            file,
            first,
            next,
            _lock: lock,
        })
    }

    /// Number of the next event.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Where the files are.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Appends events, whose numbers grow, and flushes them to the device.
    pub fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let mut lines = Vec::new();
        for record in records {
            if record.id >= self.first + PER_FILE {
                self.write(&mut lines)?;
                self.begin(record.id)?;
            }
            serde_json::to_writer(&mut lines, record)?;
            lines.push(b'\n');
            self.next = record.id + 1;
        }
        self.write(&mut lines)
    }

    fn write(&mut self, lines: &mut Vec<u8>) -> io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        // In append mode a line that could only be written in part, on a full file system, is
        // followed by the next; closing it keeps that one whole.
        let outcome = self.file.write_all(lines);
        if outcome.is_err() {
            let _ = self.file.write_all(b"\n");
        }
        lines.clear();
        outcome?;
        self.file.sync_data()
    }

    /// Begins a new file, and removes those that are old enough to go.
    fn begin(&mut self, first: u64) -> io::Result<()> {
        self.file = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(self.dir.join(name(first)))?;
        self.first = first;
        for pair in files(&self.dir)?.windows(2) {
            if pair[1] + KEPT <= first {
                std::fs::remove_file(self.dir.join(name(pair[0])))?;
            }
        }
        // The new name, and that the old one is gone.
        File::open(&self.dir)?.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Severity;

    fn record(id: u64) -> Record {
        Record {
            id,
            at: id * 1000,
            event: "disk-attached".to_owned(),
            severity: Severity::Info,
            disk: Some("vm1".to_owned()),
            text: "attached".to_owned(),
            details: Default::default(),
        }
    }

    fn ids(dir: &Path, from: u64) -> Vec<u64> {
        let mut ids = Vec::new();
        scan(dir, from, &mut |r| {
            ids.push(r.id);
            true
        })
        .unwrap();
        ids
    }

    #[test]
    fn numbers_go_on_over_restarts_and_one_daemon_writes_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        assert_eq!(store.next(), 1);
        store.append(&[record(1), record(2)]).unwrap();
        assert!(matches!(Store::open(dir.path()), Err(OpenError::Taken)));
        drop(store);
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.next(), 3);
        assert_eq!(ids(dir.path(), 2), [2]);
    }

    #[test]
    fn wherever_a_crash_cuts_the_file_only_the_last_line_goes() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        store.append(&[record(1), record(2), record(3)]).unwrap();
        drop(store);
        let path = dir.path().join(name(1));
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut store = Store::open(dir.path()).unwrap();
            // Without its end a line is whole all the same.
            let lines = whole[..cut].split(|b| *b == b'\n');
            let left = lines
                .filter(|l| serde_json::from_slice::<Record>(l).is_ok())
                .count() as u64;
            assert_eq!(store.next(), left + 1, "cut at {cut}");
            store.append(&[record(left + 1)]).unwrap();
            assert_eq!(
                ids(dir.path(), 0),
                (1..=left + 1).collect::<Vec<_>>(),
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn damage_costs_the_lines_it_hits() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        store
            .append(&(1..=5).map(record).collect::<Vec<_>>())
            .unwrap();
        let path = dir.path().join(name(1));
        let mut bytes = std::fs::read(&path).unwrap();
        let second = bytes.iter().position(|b| *b == b'\n').unwrap() + 1;
        bytes[second..second + 5].copy_from_slice(b"\xff\0\xff\0\xff");
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(ids(dir.path(), 0), [1, 3, 4, 5]);
    }

    #[test]
    fn the_last_hundred_thousand_are_kept_and_not_many_more() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        for from in (1..=135_000).step_by(5000) {
            store
                .append(&(from..from + 5000).map(record).collect::<Vec<_>>())
                .unwrap();
        }
        let left = ids(dir.path(), 0);
        assert_eq!(*left.last().unwrap(), 135_000);
        assert!(left.len() as u64 >= KEPT, "{}", left.len());
        assert!((left.len() as u64) < KEPT + 2 * PER_FILE, "{}", left.len());
        assert_eq!(left[0] + left.len() as u64, 135_001, "none is missing");
        drop(store);
        assert_eq!(Store::open(dir.path()).unwrap().next(), 135_001);
        assert_eq!(ids(dir.path(), 134_999), [134_999, 135_000]);
    }
}
