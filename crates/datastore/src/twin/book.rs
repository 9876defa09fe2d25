//! What is known of two trees, kept in the state directory: which are current, and where they may differ.
//!
//! A log of records of 48 bytes behind a head of 8 (`docs/datastore.md`). What has to be durable is appended and synced; when most of
//! the log is of the past, what still counts is written anew. Which trees are current is told to somebody else as well, who keeps it
//! in the pool.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_nfs::identity::replace;
use hearth_trees::pair::{Book, Found, Place, Stamp};

const NAME: &str = "trees";
const MAGIC: &[u8; 8] = b"HRTHTRE1";
const RECORD: usize = 48;
/// Records of the past that are put up with.
const PAST_MAX: usize = 1 << 16;

const NOTED: u8 = 1;
const FORGOTTEN: u8 = 4;
const ALL: u8 = 7;
const STAMP: u8 = 8;

/// Keeps which trees are current somewhere else as well.
pub(super) type Elsewhere = Box<dyn Fn(&[u8]) + Send + Sync>;

struct Log {
    file: File,
    noted: BTreeSet<Place>,
    all: bool,
    stamp: Option<Stamp>,
    records: usize,
    /// Something was not written: nothing can be appended behind it.
    torn: bool,
}

/// See the module.
pub(super) struct Ledger {
    dir: PathBuf,
    log: Mutex<Log>,
    elsewhere: Elsewhere,
}

fn sealed(mut record: [u8; RECORD]) -> [u8; RECORD] {
    let sum = hearth_io::checksum::crc32c(&record[..44]);
    record[44..].copy_from_slice(&sum.to_be_bytes());
    record
}

fn of_place(kind: u8, place: &Place) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    let (offset, part) = match place {
        Place::Names(_) => (0, 0),
        Place::File(_) => (1, 0),
        Place::Part(_, part) => (2, *part),
    };
    record[0] = kind + offset;
    record[4..8].copy_from_slice(&part.to_be_bytes());
    record[8..16].copy_from_slice(&place.number().to_be_bytes());
    sealed(record)
}

fn of_all(differ: bool) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    (record[0], record[1]) = (ALL, u8::from(differ));
    sealed(record)
}

/// A stamp's bytes, here and in the pool.
pub fn stamp_bytes(stamp: &Stamp) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[0] = STAMP;
    record[1] = u8::from(stamp.current[0]) | u8::from(stamp.current[1]) << 1;
    let numbers = [stamp.generation, stamp.tried, stamp.left[0], stamp.left[1]];
    for (place, number) in record[8..40].chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_be_bytes());
    }
    sealed(record)
}

fn number(record: &[u8; RECORD], at: usize) -> u64 {
    let bytes = record.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

fn is_whole(record: &[u8; RECORD]) -> bool {
    hearth_io::checksum::crc32c(&record[..44]).to_be_bytes() == record[44..]
}

/// A stamp of such bytes.
pub fn stamp_of(bytes: &[u8]) -> Option<Stamp> {
    let record: &[u8; RECORD] = bytes.try_into().ok()?;
    (is_whole(record) && record[0] == STAMP).then(|| Stamp {
        generation: number(record, 8),
        current: [record[1] & 1 != 0, record[1] & 2 != 0],
        tried: number(record, 16),
        left: [number(record, 24), number(record, 32)],
    })
}

fn read(bytes: &[u8]) -> Found {
    let mut found = Found::default();
    let mut noted = BTreeSet::new();
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        return found;
    };
    let mut gap = false;
    for record in rest.chunks(RECORD) {
        let Ok(record) = <&[u8; RECORD]>::try_from(record) else {
            break;
        };
        if !is_whole(record) {
            gap = true;
            continue;
        }
        if gap {
            // Not the end that a power cut tears: it is not known what stood there.
            found.all = true;
        }
        let part = record[4..8]
            .first_chunk()
            .map_or(0, |b| u32::from_be_bytes(*b));
        let file = number(record, 8);
        let place = |kind: u8| match kind {
            0 => Place::Names(file),
            1 => Place::File(file),
            _ => Place::Part(file, part),
        };
        match record[0] {
            kind @ NOTED..FORGOTTEN => {
                noted.insert(place(kind - NOTED));
            }
            kind @ FORGOTTEN..ALL => {
                noted.remove(&place(kind - FORGOTTEN));
            }
            ALL => {
                found.all = record[1] != 0;
                noted.clear();
            }
            STAMP => found.stamp = stamp_of(record),
            // Of a newer version.
            _ => found.all = true,
        }
    }
    found.noted = noted.into_iter().collect();
    found
}

impl Ledger {
    /// What is kept in `dir`, and in the pool.
    pub fn open(
        dir: &Path,
        pool: Option<Stamp>,
        elsewhere: Elsewhere,
    ) -> io::Result<(Ledger, Found)> {
        let mut found = match std::fs::read(dir.join(NAME)) {
            Ok(bytes) => read(&bytes),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Found::default(),
            Err(e) => return Err(e),
        };
        let newer = |pool: &Stamp| found.stamp.is_none_or(|own| own.tried < pool.tried);
        if let Some(pool) = pool.filter(newer) {
            // The state directory is older, or another one.
            found.stamp = Some(pool);
            found.all = true;
        }
        let mut log = Log {
            file: File::open(dir)?,
            noted: found.noted.iter().copied().collect(),
            all: found.all,
            stamp: found.stamp,
            records: 0,
            torn: true,
        };
        write_anew(dir, &mut log)?;
        let ledger = Ledger {
            dir: dir.to_owned(),
            log: Mutex::new(log),
            elsewhere,
        };
        Ok((ledger, found))
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append(&self, log: &mut Log, records: &[[u8; RECORD]], durable: bool) -> Result<(), String> {
        let past = log.records.saturating_sub(log.noted.len());
        let done = if log.torn || past > PAST_MAX {
            write_anew(&self.dir, log)
        } else {
            log.torn = true;
            let written = log.file.write_all(&records.concat());
            let synced = written.and_then(|()| match durable {
                true => log.file.sync_data(),
                false => Ok(()),
            });
            log.records += records.len();
            log.torn = synced.is_err();
            synced
        };
        done.map_err(|e| format!("{} cannot be written: {e}", self.dir.join(NAME).display()))
    }
}

/// Writes what counts, and nothing else.
fn write_anew(dir: &Path, log: &mut Log) -> io::Result<()> {
    log.torn = true;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(log.stamp.iter().flat_map(stamp_bytes));
    if log.all {
        bytes.extend(of_all(true));
    }
    bytes.extend(log.noted.iter().flat_map(|place| of_place(NOTED, place)));
    replace(dir, NAME, &bytes)?;
    log.file = OpenOptions::new()
        .append(true)
        .mode(0o600)
        .open(dir.join(NAME))?;
    log.records = bytes.len() / RECORD;
    log.torn = false;
    Ok(())
}

impl Book for Ledger {
    fn note(&self, places: &[Place]) -> Result<(), String> {
        let mut log = self.lock();
        log.noted.extend(places);
        let records: Vec<_> = places.iter().map(|place| of_place(NOTED, place)).collect();
        self.append(&mut log, &records, true)
    }

    fn forget(&self, places: &[Place]) {
        let mut log = self.lock();
        for place in places {
            log.noted.remove(place);
        }
        let records: Vec<_> = places
            .iter()
            .map(|place| of_place(FORGOTTEN, place))
            .collect();
        if let Err(e) = self.append(&mut log, &records, false) {
            tracing::warn!("{e}");
        }
    }

    fn all(&self, differ: bool) -> Result<(), String> {
        let mut log = self.lock();
        log.all = differ;
        log.noted.clear();
        self.append(&mut log, &[of_all(differ)], true)
    }

    fn store(&self, stamp: &Stamp) -> Result<(), String> {
        let mut log = self.lock();
        log.stamp = Some(*stamp);
        let bytes = stamp_bytes(stamp);
        self.append(&mut log, &[bytes], true)?;
        drop(log);
        (self.elsewhere)(&bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp() -> Stamp {
        Stamp {
            generation: 5,
            current: [true, false],
            left: [0, 4],
            tried: 6,
        }
    }

    #[test]
    fn what_is_kept_is_read_again_and_a_torn_end_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Ledger::open(dir.path(), None, Box::new(|_| {})).unwrap();
        let (book, found) = open();
        assert!(found.stamp.is_none() && found.noted.is_empty() && !found.all);
        book.store(&stamp()).unwrap();
        let places = [Place::Names(1), Place::File(7), Place::Part(7, 3)];
        book.note(&places).unwrap();
        book.forget(&[Place::File(7)]);
        drop(book);
        let path = dir.path().join(NAME);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.extend_from_slice(&of_place(NOTED, &Place::Names(9))[..40]);
        std::fs::write(&path, &bytes).unwrap();
        let (book, found) = open();
        assert_eq!(found.stamp, Some(stamp()));
        assert_eq!(found.noted, [Place::Names(1), Place::Part(7, 3)]);
        assert!(!found.all);
        book.all(true).unwrap();
        drop(book);
        assert!(open().1.all && open().1.noted.is_empty());
        // A hole before what is whole.
        let mut bytes = [&MAGIC[..], &of_place(NOTED, &Place::Names(1))].concat();
        bytes[20] ^= 1;
        bytes.extend(stamp_bytes(&stamp()));
        std::fs::write(&path, &bytes).unwrap();
        assert!(open().1.all);
    }

    #[test]
    fn the_pool_counts_where_it_knows_more() {
        let dir = tempfile::tempdir().unwrap();
        let open = |pool| Ledger::open(dir.path(), pool, Box::new(|_| {})).unwrap();
        open(None).0.store(&stamp()).unwrap();
        assert!(!open(Some(stamp())).1.all);
        let newer = Stamp {
            tried: 9,
            ..stamp()
        };
        let (_, found) = open(Some(newer));
        assert_eq!((found.stamp, found.all), (Some(newer), true));
    }

    #[test]
    fn the_bytes_stay_as_they_are() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let text = hex(&stamp_bytes(&stamp()));
        assert!(text.starts_with("0801000000000000000000000000000500000000000000060000000000000000000000000000000400000000"), "{text}");
        assert_eq!(stamp_of(&stamp_bytes(&stamp())), Some(stamp()));
        let text = hex(&of_place(NOTED, &Place::Part(7, 3)));
        assert!(
            text.starts_with("03000000000000030000000000000007"),
            "{text}"
        );
    }
}
