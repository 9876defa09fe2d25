//! Statistics of the past in files that cannot grow.
//!
//! Each disk has a file of three rings: slots of 10 s for 2 hours, of 1 min for 2 days, of 15 min for 90 days. Where a slot
//! lies is known from its time, and whether what lies there is this slot from [its checksum](super::row). So
//! nothing points to anything, a crash in the midst of a write costs the slots it hit, and a clock that jumps leaves
//! a gap, or has the same times written again; slots of a time that has not come are not looked at.
//!
//! Slots of the finest ring are written some at a time, and those of the others are made of what is in the files, again
//! and again until their time is over: what a crash left unfinished is mended by the next write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::row::{BYTES, Row};

/// A ring of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Seconds of a slot.
    pub step: u64,
    /// Slots.
    pub slots: u64,
}

impl Ring {
    /// Seconds that it reaches back.
    pub fn span(&self) -> u64 {
        self.step * self.slots
    }
}

/// The rings of a file, the finest first.
pub const RINGS: [Ring; 3] = [
    Ring {
        step: 10,
        slots: 720,
    },
    Ring {
        step: 60,
        slots: 2880,
    },
    Ring {
        step: 900,
        slots: 8640,
    },
];

/// Bytes before the first ring.
const HEADER: u64 = 512;
/// Begins every file; the last byte is the version of what follows.
const MAGIC: [u8; 8] = *b"HearthP\x01";
/// How names end.
const ENDING: &str = "past";
/// Files that are kept: those of 500 disks, of all disks together, and of the flash. They fit into 256 MiB.
pub const FILES_MAX: usize = 502;
/// Slots that may wait to be written: a crash costs a minute of the finest ring.
const WAITING_MAX: usize = 6;

/// Bytes of a file whose rings are full.
pub fn file_bytes() -> u64 {
    HEADER
        + RINGS
            .iter()
            .map(|ring| ring.slots * BYTES as u64)
            .sum::<u64>()
}

/// Where a ring begins.
fn begin(ring: usize) -> u64 {
    let before = RINGS[..ring].iter();
    HEADER + before.map(|ring| ring.slots * BYTES as u64).sum::<u64>()
}

/// The files of a directory.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// Names that have a file.
    there: BTreeSet<String>,
    /// Slots of the finest ring that are to be written.
    waiting: BTreeMap<String, Vec<(u64, Row)>>,
}

/// True if a name can be that of a file as it is. Those of disks can.
fn is_plain(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    !name.is_empty() && name.len() <= 200 && name.bytes().all(allowed) && !name.starts_with('.')
}

impl Store {
    /// The files in `dir`, which is made if it is not there.
    pub fn open(dir: &Path) -> io::Result<Store> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)?;
        let mut there = BTreeSet::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == ENDING)
                && let Some(name) = path.file_stem().and_then(|s| s.to_str())
            {
                there.insert(name.to_owned());
            }
        }
        Ok(Store {
            dir: dir.to_owned(),
            there,
            waiting: BTreeMap::new(),
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.{ENDING}"))
    }

    /// Names of which something is kept.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.there.iter().map(String::as_str)
    }

    /// Makes room for `name`, whose past is to be kept; false if there is none. What is not among `living` makes
    /// room, the longest gone first.
    pub fn admit(&mut self, name: &str, living: &BTreeSet<&str>) -> io::Result<bool> {
        if self.there.contains(name) {
            return Ok(true);
        }
        if !is_plain(name) {
            return Ok(false);
        }
        while self.there.len() >= FILES_MAX {
            let written = |name: &&String| {
                let meta = std::fs::metadata(self.path(name));
                meta.and_then(|m| m.modified()).ok()
            };
            let gone = self.there.iter().filter(|n| !living.contains(n.as_str()));
            let Some(oldest) = gone.min_by_key(written).cloned() else {
                return Ok(false);
            };
            self.forget(&oldest)?;
        }
        self.there.insert(name.to_owned());
        Ok(true)
    }

    /// Removes what is kept of a name.
    fn forget(&mut self, name: &str) -> io::Result<()> {
        self.waiting.remove(name);
        match std::fs::remove_file(self.path(name)) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.there.remove(name);
        Ok(())
    }

    /// Removes files that nothing was written to for as long as the longest ring: nothing in them counts any more.
    pub fn expire(&mut self, now: std::time::SystemTime) -> io::Result<()> {
        let longest = std::time::Duration::from_secs(RINGS[2].span());
        let old = |name: &&String| {
            let modified = std::fs::metadata(self.path(name)).and_then(|m| m.modified());
            let age = modified.ok().and_then(|at| now.duration_since(at).ok());
            age.is_some_and(|age| age > longest)
        };
        let old: Vec<String> = self.there.iter().filter(old).cloned().collect();
        old.iter().try_for_each(|name| self.forget(name))
    }

    /// Keeps slot number `index` of the finest ring. It may wait in memory for others.
    pub fn put(&mut self, name: &str, index: u64, row: Row) -> io::Result<()> {
        let waiting = self.waiting.entry(name.to_owned()).or_default();
        waiting.push((index, row));
        match waiting.len() >= WAITING_MAX {
            true => self.write(name),
            false => Ok(()),
        }
    }

    /// Writes what waits.
    pub fn write_all(&mut self) -> io::Result<()> {
        let names: Vec<String> = self.waiting.keys().cloned().collect();
        names.iter().try_for_each(|name| self.write(name))
    }

    /// Writes what waits of one name. What cannot be written is given up: the next minute matters more.
    pub fn write(&mut self, name: &str) -> io::Result<()> {
        let Some(rows) = self.waiting.remove(name) else {
            return Ok(());
        };
        let file = self.file(name)?;
        let (fine, step) = (RINGS[0], RINGS[0].step);
        let mut touched = BTreeSet::new();
        for (index, row) in rows {
            let at = place(0, index);
            // The service was started again within the slot, or the clock was set back: then what was there is void.
            let row = match read_one(&file, at, index, step)? {
                Some(mut before) if before.seconds + row.seconds <= step as f64 * 1.05 => {
                    before.add(&row);
                    before
                }
                _ => row,
            };
            file.write_all_at(&row.pack(index, step), at)?;
            touched.insert(index * fine.step);
        }
        for (ring, coarse) in RINGS.iter().enumerate().skip(1) {
            let slots: BTreeSet<u64> = touched.iter().map(|at| at / coarse.step).collect();
            for &index in &slots {
                let finer = RINGS[ring - 1];
                let from = index * coarse.step / finer.step;
                let rows = read(&file, ring - 1, from, from + coarse.step / finer.step)?;
                let mut sum = Row::default();
                rows.iter().for_each(|(_, row)| sum.add(row));
                let at = place(ring, index);
                file.write_all_at(&sum.pack(index, coarse.step), at)?;
            }
        }
        Ok(())
    }

    /// The file of a name; one that is none of ours is begun anew.
    fn file(&self, name: &str) -> io::Result<File> {
        let path = self.path(name);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)?;
        let mut magic = [0; 8];
        if file.read_exact_at(&mut magic, 0).is_err() || magic != MAGIC {
            file.set_len(0)?;
            file.write_all_at(&MAGIC, 0)?;
        }
        Ok(file)
    }

    /// What was in the last `since` seconds before second `now`, as (begin, slot), the oldest first, and the seconds of such a
    /// slot, of which there are at most `most`.
    pub fn past(
        &mut self,
        name: &str,
        now: u64,
        since: u64,
        most: usize,
    ) -> io::Result<(u64, Vec<(u64, Row)>)> {
        self.write(name)?;
        let ring = (RINGS.iter().position(|ring| since <= ring.span())).unwrap_or(RINGS.len() - 1);
        let Ring { step, slots } = RINGS[ring];
        let file = match File::open(self.path(name)) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok((step, Vec::new())),
            Err(e) => return Err(e),
        };
        let end = now / step + 1;
        let from = (now.saturating_sub(since) / step).max(end.saturating_sub(slots));
        let rows = read(&file, ring, from, end)?;
        let group = step * (end - from).div_ceil(most.max(1) as u64).max(1);
        let mut merged: Vec<(u64, Row)> = Vec::new();
        for (index, row) in rows {
            let at = index * step / group * group;
            match merged.last_mut() {
                Some((last, sum)) if *last == at => sum.add(&row),
                _ => merged.push((at, row)),
            }
        }
        Ok((group, merged))
    }
}

/// Where a slot lies.
fn place(ring: usize, index: u64) -> u64 {
    begin(ring) + index % RINGS[ring].slots * BYTES as u64
}

fn read_one(file: &File, at: u64, index: u64, step: u64) -> io::Result<Option<Row>> {
    let mut bytes = [0; BYTES];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => Ok(Row::unpack(&bytes, index, step)),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(None),
        Err(e) => Err(e),
    }
}

/// The slots from one number to another that are there, in at most two reads.
fn read(file: &File, ring: usize, from: u64, end: u64) -> io::Result<Vec<(u64, Row)>> {
    let Ring { step, slots } = RINGS[ring];
    let mut found = Vec::new();
    let mut index = from.max(end.saturating_sub(slots));
    while index < end {
        let run = (end - index).min(slots - index % slots);
        let mut bytes = vec![0; run as usize * BYTES];
        let mut got = 0;
        // The file ends where nothing was written yet.
        while got < bytes.len() {
            match file.read_at(&mut bytes[got..], place(ring, index) + got as u64) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        for (slot, at) in bytes[..got].chunks_exact(BYTES).zip(index..) {
            found.extend(Row::unpack(slot, at, step).map(|row| (at, row)));
        }
        index += run;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::stats::Counters;

    /// Some second of 2026, at the begin of a quarter of an hour.
    const T0: u64 = 1_767_225_600;
    const DAY: u64 = 86_400;

    fn row(reads: u64) -> Row {
        let counters = Counters {
            read_hits: reads,
            ..Counters::default()
        };
        Row {
            seconds: 10.0,
            ..Row::of_disk(&counters, reads, 0)
        }
    }

    fn reads(row: &Row) -> u64 {
        row.counters().read_hits
    }

    fn fill(store: &mut Store, name: &str, from: u64, to: u64) {
        for at in (from..to).step_by(10) {
            store.put(name, at / 10, row(1)).unwrap();
        }
    }

    fn all(store: &mut Store, now: u64, since: u64) -> u64 {
        let (_, rows) = store.past("vm", now, since, 1).unwrap();
        rows.iter().map(|(_, r)| reads(r)).sum()
    }

    #[test]
    fn bounds_are_those_that_are_promised() {
        assert_eq!(RINGS[0].span(), 2 * 3600);
        assert_eq!(RINGS[1].span(), 2 * DAY);
        assert_eq!(RINGS[2].span(), 90 * DAY);
        let file = file_bytes();
        assert!(file as f64 <= 0.6 * f64::from(1 << 20), "{file}");
        // Each file takes whole blocks of the file system.
        assert!(file.next_multiple_of(4096) * FILES_MAX as u64 <= 256 << 20);
    }

    #[test]
    fn what_was_is_known_as_finely_as_it_is_kept_and_no_file_grows() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        let end = T0 + 92 * DAY;
        fill(&mut store, "vm", T0, end);
        for (since, step) in [
            (3600, 10),
            (7200, 10),
            (DAY, 60),
            (2 * DAY, 60),
            (90 * DAY, 900),
        ] {
            let (found, rows) = store.past("vm", end - 1, since, 100_000).unwrap();
            assert_eq!(found, step);
            assert!(rows.windows(2).all(|w| w[1].0 == w[0].0 + step), "{since}");
            assert!(rows.iter().all(|(_, r)| reads(r) == step / 10));
            let covered = rows.len() as u64 * step;
            assert!(covered.abs_diff(since) <= step, "{since}: {covered}");
        }
        let (step, rows) = store.past("vm", end - 1, DAY, 100).unwrap();
        assert!(rows.len() <= 101 && step == 900, "{} of {step}", rows.len());
        let sum: u64 = rows.iter().map(|(_, r)| reads(r)).sum();
        assert!(sum.abs_diff(DAY / 10) <= 6, "{sum}");
        let len = std::fs::metadata(store.path("vm")).unwrap().len();
        assert_eq!(len, file_bytes());
    }

    #[test]
    fn what_was_just_written_counts_before_its_minute_is_over_and_over_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        fill(&mut store, "vm", T0, T0 + 30);
        assert_eq!(all(&mut store, T0 + 30, DAY), 3);
        assert_eq!(all(&mut store, T0 + 30, 30 * DAY), 3);
        drop(store);
        let mut store = Store::open(dir.path()).unwrap();
        assert_eq!(store.names().collect::<Vec<_>>(), ["vm"]);
        fill(&mut store, "vm", T0 + 30, T0 + 60);
        assert_eq!(all(&mut store, T0 + 60, 30 * DAY), 6);
    }

    #[test]
    fn a_slot_that_two_runs_of_the_service_saw_holds_both() {
        let dir = tempfile::tempdir().unwrap();
        let part = |n| Row {
            seconds: 5.0,
            ..row(n)
        };
        for n in [3, 4] {
            let mut store = Store::open(dir.path()).unwrap();
            store.put("vm", T0 / 10, part(n)).unwrap();
            store.write_all().unwrap();
        }
        let mut store = Store::open(dir.path()).unwrap();
        assert_eq!(all(&mut store, T0, 3600), 7);
    }

    #[test]
    fn wherever_a_crash_cuts_or_damages_a_file_only_what_it_hit_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        fill(&mut store, "vm", T0, T0 + 7200);
        let path = store.path("vm");
        let whole = std::fs::read(&path).unwrap();
        for cut in (0..whole.len()).step_by(997) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut store = Store::open(dir.path()).unwrap();
            let left = all(&mut store, T0 + 7199, 7200);
            let slots = (cut as u64).saturating_sub(HEADER) / BYTES as u64;
            // The ring does not begin at T0.
            assert!(left <= slots.min(720), "{cut}: {left}");
            if slots >= 720 {
                assert_eq!(left, 720, "{cut}");
            }
            // It goes on.
            store.put("vm", (T0 + 7200) / 10, row(1)).unwrap();
            store.write_all().unwrap();
            assert_eq!(all(&mut store, T0 + 7200, 0), 1, "{cut}");
        }
        for at in (HEADER as usize..HEADER as usize + 720 * BYTES).step_by(331) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            std::fs::write(&path, &damaged).unwrap();
            let mut store = Store::open(dir.path()).unwrap();
            assert_eq!(all(&mut store, T0 + 7199, 7199), 719, "{at}");
        }
        std::fs::write(&path, b"something else").unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        fill(&mut store, "vm", T0, T0 + 60);
        assert_eq!(all(&mut store, T0 + 60, 3600), 6);
    }

    #[test]
    fn a_clock_that_jumps_costs_what_it_jumped_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        fill(&mut store, "vm", T0, T0 + 3600);
        // A year ahead, and back again: nothing of then is shown, and what it overwrote is no data.
        let year = 365 * DAY;
        fill(&mut store, "vm", T0 + year, T0 + year + 600);
        assert_eq!(all(&mut store, T0 + year + 599, 7200), 60);
        fill(&mut store, "vm", T0 + 3600, T0 + 5400);
        let seen = all(&mut store, T0 + 5399, 5400);
        assert!((420..=540).contains(&seen), "{seen}");
        // Set back by a quarter of an hour: these times are written again, and not counted twice.
        fill(&mut store, "vm", T0 + 4500, T0 + 5400);
        assert_eq!(all(&mut store, T0 + 5399, 899), 90);
        let (_, rows) = store.past("vm", T0 + 5399, 30 * DAY, 100_000).unwrap();
        assert_eq!(rows.last().map(|(_, r)| reads(r)), Some(90));
    }

    #[test]
    fn disks_that_are_gone_make_room_and_those_that_live_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path()).unwrap();
        let names: Vec<String> = (0..FILES_MAX).map(|n| format!("vm{n}")).collect();
        let mut living: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        for name in &names {
            assert!(store.admit(name, &living).unwrap());
            store.put(name, T0 / 10, row(1)).unwrap();
        }
        store.write_all().unwrap();
        assert!(!store.admit("new", &living).unwrap());
        living.remove("vm7");
        assert!(store.admit("new", &living).unwrap());
        assert!(!store.path("vm7").exists() && store.names().count() == FILES_MAX);
        assert!(!store.admit("../../etc/x", &BTreeSet::new()).unwrap());
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(91 * DAY);
        store.expire(later).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
