//! No two disks on the same data, and none on the flash or on a file of a datastore, whatever the names.
//!
//! A file and a loop device over it, a volume and the disk it is on: two disks on the same data
//! each cache it, and each writes back over what the other wrote. A new disk of that kind is not
//! taken. Those that an earlier version took are told apart when they are attached: the one that
//! comes first in the registry is served, the other waits and says for whom; it attaches by itself
//! when that one is removed. Two that only read do no harm.
//!
//! What each origin lies on is remembered from when the disk itself was looked at: asking about
//! another disk's origin may hang with the mount that one is on.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, SharedRecord};
use hearth_io::OriginSpec;
use hearth_io::beneath::{Beneath, Node, beneath};

use super::{Daemon, Slot, lock};
use crate::error::{Error, Result};
use crate::life::Life;
use crate::origin;
use crate::pool::Pool;
use crate::spot::Mounts;
use crate::table::Slots;
use crate::workers::Class;

/// Longest a start waits to learn what the origins lie on, before it attaches the first.
const SURVEY_TIME: Duration = Duration::from_secs(1);

/// What to do about two disks on the same data.
const APART: &str =
    "use one of the two and remove the other: each would undo what the other writes";

/// What an origin lies on, if it is there, and whether it is on this host.
type Place = (Option<Beneath>, bool);

/// What an origin lies on, with all its legs if it is a mirror. May hang with its mount.
pub(super) fn place(spec: &OriginSpec) -> Place {
    let parts = hearth_origin::parts(spec).into_iter();
    let paths: Vec<_> = parts
        .filter_map(|part| hearth_origin::local_path(&part))
        .collect();
    let found: Vec<Beneath> = paths.iter().filter_map(|path| beneath(path).ok()).collect();
    let place = match found.len() {
        0 => None,
        1 => found.into_iter().next(),
        _ => {
            let all = found.iter().flat_map(|place| place.parts().iter().cloned());
            Some(Beneath::from_parts(all.collect()))
        }
    };
    (place, !paths.is_empty())
}

/// The regular files of this host that hold an origin's data, its image's files (`chain`) included. May hang with its
/// mount.
pub(super) fn files_of(spec: &OriginSpec, chain: &[String]) -> Vec<PathBuf> {
    let (place, _) = place(spec);
    let parts = place.iter().flat_map(|place| place.parts());
    let files = parts.filter(|part| part.exact && matches!(part.node, Node::File { .. }));
    let mut files: Vec<PathBuf> = files.filter_map(|part| part.path.clone()).collect();
    let below = hearth_origin::files_of(chain).into_iter();
    files.extend(below.map(|(path, _)| path));
    files
}

/// True if a file is below the directory of these numbers (device, inode), whatever the names, and on its file system.
pub(super) fn is_below(file: &Path, root: (u64, u64)) -> bool {
    let number = |path: &Path| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let Ok(file) = file.canonicalize() else {
        return false;
    };
    number(&file).is_some_and(|(dev, _)| dev == root.0)
        && file
            .ancestors()
            .skip(1)
            .any(|dir| number(dir) == Some(root))
}

fn place_of(text: &str) -> Place {
    origin::parse(text).map_or((None, false), |spec| place(&spec))
}

/// Why an origin cannot become another disk's.
pub(super) fn is_taken(origin: &str, disk: &str) -> Error {
    Error::conflict(
        format!("{origin} is already the origin of disk {disk}"),
        "use that disk, or remove it first",
    )
}

/// Why a disk cannot be served beside one on the same data.
fn is_same_data(origin: &str, other: &DiskRecord) -> Error {
    Error::conflict(
        format!(
            "{origin} holds the same data as {}, the origin of disk {}, under another name",
            other.origin, other.name
        ),
        APART,
    )
}

/// Of some disks the one that comes first in the registry.
fn first_of(pool: &Pool, disks: impl Iterator<Item = DiskId>) -> Option<&SharedRecord> {
    let registry = pool.registry();
    let at = disks.filter_map(|id| registry.position(id)).min()?;
    registry.disks.get(at)
}

fn is_flash(origin: &str, flash: &Path) -> Error {
    Error::conflict(
        format!(
            "{origin} holds the same data as {}, the pool's flash device, under another name",
            flash.display()
        ),
        "give the file or device that holds the disk's data",
    )
}

impl Daemon {
    /// Refuses a new disk's origin that holds the same data as the flash or another disk's. Looks at the
    /// new one, and within bounds at those of which nothing is known yet.
    pub(super) fn check_apart(self: &Arc<Daemon>, text: &str, spec: &OriginSpec) -> Result<()> {
        let (Some(own), _) = place(spec) else {
            return Ok(());
        };
        for file in files_of(spec, &[]) {
            self.check_not_in_datastore(&file)?;
        }
        let flash: Vec<_> = lock(&self.pool).flash().iter().cloned().collect();
        for flash in &flash {
            let Some(place) = flash.beneath().filter(|place| place.overlaps(&own)) else {
                continue;
            };
            if place.is_same(&own) {
                return Err(Error::invalid(
                    format!("{text} is the pool's own flash device"),
                    "give the file or device that holds the disk's data",
                ));
            }
            return Err(is_flash(text, flash.path()));
        }
        let unknown: Vec<DiskId> = lock(&self.grounds).unknown().collect();
        let pool = lock(&self.pool);
        let unknown = unknown
            .into_iter()
            .filter_map(|id| pool.record(id).cloned());
        let unknown: Vec<DiskRecord> = unknown.collect();
        drop(pool);
        let found = self.places_of(&unknown).into_iter();
        let mut others: BTreeMap<DiskId, bool> = found
            .filter(|(_, place)| place.overlaps(&own))
            .map(|(id, place)| (id, place.is_same(&own)))
            .collect();
        let grounds = lock(&self.grounds);
        let known = grounds.overlapping(&own).into_iter();
        let same = |id| grounds.of(id).is_some_and(|place| place.is_same(&own));
        others.extend(known.map(|id| (id, same(id))));
        drop(grounds);
        let pool = lock(&self.pool);
        match first_of(&pool, others.keys().copied()) {
            Some(other) if others.get(&other.id) == Some(&true) => {
                Err(is_taken(&other.origin, &other.name))
            }
            Some(other) => Err(is_same_data(text, other)),
            None => Ok(()),
        }
    }

    /// Remembers what a disk lies on.
    pub(super) fn note_place(&self, id: DiskId, (place, here): Place) {
        let disks = self.disks.lock();
        if disks.contains(id) {
            lock(&self.grounds).set(id, place, here);
        }
    }

    /// What the origins of disks lie on, as far as they answer within bounds. Those that are being
    /// looked for already are left out: another question to a mount that hangs would hang as well.
    fn places_of(self: &Arc<Daemon>, records: &[DiskRecord]) -> Vec<(DiskId, Beneath)> {
        if records.is_empty() {
            return Vec::new();
        }
        let end = Instant::now() + SURVEY_TIME;
        let mut found = Vec::new();
        let mounts = Mounts::now();
        let (told, answers) = std::sync::mpsc::channel();
        for record in records {
            let Some(look) = self.begin_look(record.id) else {
                continue;
            };
            let (told, id, text) = (told.clone(), record.id, record.origin.clone());
            self.aside(
                &mounts.spot_of(&record.origin),
                Class::Background,
                move || {
                    let (place, _) = place_of(&text);
                    drop(look);
                    // Nobody listens any more if it came too late.
                    let _ = told.send(place.map(|place| (id, place)));
                },
            );
        }
        drop(told);
        // Ends when all have answered, or late.
        while let Ok(place) = answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
            found.extend(place);
        }
        found
    }

    /// A disk with a file below a directory of these numbers, and that file. An origin that does not answer within bounds
    /// is left out.
    pub(super) fn disk_below(&self, root: (u64, u64)) -> Option<(String, PathBuf)> {
        let disks: Vec<_> = lock(&self.pool).registry().plain_disks().cloned().collect();
        let end = Instant::now() + SURVEY_TIME;
        let mounts = Mounts::now();
        let (told, answers) = std::sync::mpsc::channel();
        for record in disks.into_iter().filter(|record| !record.is_flash_only()) {
            let told = told.clone();
            let spot = mounts.spot_of(&record.origin);
            self.aside(&spot, Class::Background, move || {
                let spec = origin::parse(&record.origin);
                let files = spec.map_or_else(|_| Vec::new(), |spec| files_of(&spec, &record.chain));
                let found = files.into_iter().find(|file| is_below(file, root));
                // Fails if the answer is too late.
                let _ = told.send(found.map(|file| (record.name.clone(), file)));
            });
        }
        drop(told);
        // Ends when all have answered, or late.
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match answers.recv_timeout(left) {
                Ok(None) => {}
                Ok(found) => return found,
                Err(_) => return None,
            }
        }
    }

    /// Refuses to attach a disk while one on the same data is served, or comes before it. Looks at
    /// the disk's own origin only.
    pub(super) fn check_place(&self, record: &DiskRecord) -> Result<()> {
        self.note_place(record.id, place_of(&record.origin));
        self.check_rivals(record)
    }

    /// The same by what is remembered: waits for nobody.
    fn check_rivals(&self, record: &DiskRecord) -> Result<()> {
        let disks = self.disks.lock();
        self.find_rival(&disks, record)
    }

    /// The same for a disk that is about to be served: from now on it counts against all others.
    pub(super) fn take_place(&self, record: &DiskRecord) -> Result<()> {
        let mut disks = self.disks.lock();
        self.find_rival(&disks, record)?;
        if let Some(slot) = disks.by_id_mut(record.id) {
            slot.placed = true;
        }
        Ok(())
    }

    fn find_rival(&self, slots: &Slots<Slot>, record: &DiskRecord) -> Result<()> {
        let grounds = lock(&self.grounds);
        let Some(own) = grounds.of(record.id) else {
            return Ok(());
        };
        let pool = lock(&self.pool);
        for flash in pool.flash().iter() {
            if flash.beneath().is_some_and(|place| place.overlaps(own)) {
                return Err(is_flash(&record.origin, flash.path()));
            }
        }
        let registry = pool.registry();
        let turn = registry.position(record.id);
        let comes_first = |id: &DiskId| {
            let (Some(slot), Some(at)) = (slots.by_id(*id), registry.position(*id)) else {
                return false;
            };
            let other = registry.disks.get(at);
            *id != record.id
                && (turn.is_none_or(|turn| at < turn) || slot.placed)
                && !other.is_some_and(|other| other.read_only && record.read_only)
        };
        let rivals = grounds.overlapping(own).into_iter().filter(comes_first);
        first_of(&pool, rivals).map_or(Ok(()), |other| Err(is_same_data(&record.origin, other)))
    }

    /// The disk in the table that lies on the same data as a new one, if any does. Two that are added at
    /// one time are told apart here.
    pub(super) fn same_data(
        &self,
        slots: &Slots<Slot>,
        text: &str,
        own: Option<&Beneath>,
    ) -> Result<()> {
        let Some(own) = own else { return Ok(()) };
        let others = lock(&self.grounds).overlapping(own).into_iter();
        let mut others = others.filter_map(|id| slots.by_id(id));
        let other = others.find(|slot| slot.life != Life::Gone);
        other.map_or(Ok(()), |other| {
            Err(Error::conflict(
                format!(
                    "{text} holds the same data as the origin of disk {}, under another name",
                    other.name
                ),
                APART,
            ))
        })
    }

    /// Learns what all origins lie on, before the first is opened. One that does not answer within
    /// bounds is left out.
    pub(super) fn survey(self: &Arc<Daemon>, records: &[SharedRecord]) {
        let mounts = Mounts::now();
        let (told, done) = std::sync::mpsc::channel::<()>();
        for record in records {
            let (daemon, told) = (self.clone(), told.clone());
            let (id, text) = (record.id, record.origin.clone());
            self.aside(
                &mounts.spot_of(&record.origin),
                Class::Background,
                move || {
                    daemon.note_place(id, place_of(&text));
                    drop(told);
                },
            );
        }
        drop(told);
        // Ends when all have dropped their end, or late.
        let _ = done.recv_timeout(SURVEY_TIME);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{StopReason, testing};
    use super::*;

    /// Another disk's origin may be on a mount that hangs.
    #[test]
    fn a_new_disk_is_compared_with_what_is_remembered_of_others() {
        let (dir, daemon) = testing::with_disk("a");
        let check = |text: &str| daemon.check_apart(text, &origin::parse(text).unwrap());
        let own = lock(&daemon.pool).registry().disks[0].clone();
        let other = testing::disk(dir.path(), "b").origin;
        check(&own.origin).unwrap_err();
        check(&other).unwrap();
        daemon.note_place(own.id, place_of(&other));
        check(&other).unwrap_err();
        check(&own.origin).unwrap();
        // Of nothing remembered it is looked for, but not where somebody waits for it already.
        daemon.note_place(own.id, (None, true));
        check(&own.origin).unwrap_err();
        let look = daemon.begin_look(own.id).unwrap();
        check(&own.origin).unwrap();
        drop(look);
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
