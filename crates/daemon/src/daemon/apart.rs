//! No two disks on the same data, and none on the flash, whatever the names.
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
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_format::DiskRecord;
use hearth_io::OriginSpec;
use hearth_io::beneath::{Beneath, beneath};

use super::{Daemon, Slot, attach, lock};
use crate::error::{Error, Result};
use crate::life::Life;
use crate::origin;
use crate::table::Slots;

/// Longest a start waits to learn what the origins lie on, before it attaches the first.
const SURVEY_TIME: Duration = Duration::from_secs(1);

/// What to do about two disks on the same data.
const APART: &str =
    "use one of the two and remove the other: each would undo what the other writes";

/// What an origin lies on, if it is on this host and there. May hang with its mount.
fn place(spec: &OriginSpec) -> Option<Beneath> {
    beneath(&hearth_origin::local_path(spec)?).ok()
}

fn place_of(text: &str) -> Option<Beneath> {
    place(&origin::parse(text).ok()?)
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
        let Some(own) = place(spec) else {
            return Ok(());
        };
        let pool = lock(&self.pool);
        let flash = pool.media().clone();
        let disks = pool.registry().disks.clone();
        drop(pool);
        if let Some(place) = flash.beneath()
            && place.overlaps(&own)
        {
            if place.is_same(&own) {
                return Err(Error::invalid(
                    format!("{text} is the pool's own flash device"),
                    "give the file or device that holds the disk's data",
                ));
            }
            return Err(is_flash(text, flash.path()));
        }
        let remembered = self.disks.lock();
        let places = remembered.all();
        let places = places.filter_map(|(id, slot)| Some((id, slot.place.clone()?)));
        let mut places: BTreeMap<DiskId, Beneath> = places.collect();
        drop(remembered);
        let unknown = disks.iter().filter(|disk| !places.contains_key(&disk.id));
        let unknown: Vec<&DiskRecord> = unknown.collect();
        places.extend(self.places_of(&unknown));
        for other in &disks {
            match places.get(&other.id) {
                Some(place) if place.is_same(&own) => {
                    return Err(is_taken(&other.origin, &other.name));
                }
                Some(place) if place.overlaps(&own) => return Err(is_same_data(text, other)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Remembers what a disk lies on.
    pub(super) fn note_place(&self, id: DiskId, place: Option<Beneath>) {
        if let Some(slot) = self.disks.lock().by_id_mut(id) {
            slot.place = place;
        }
    }

    /// What the origins of disks lie on, as far as they answer within bounds. Those that are being
    /// looked for already are left out: another question to a mount that hangs would hang as well.
    fn places_of(self: &Arc<Daemon>, records: &[&DiskRecord]) -> Vec<(DiskId, Beneath)> {
        let end = Instant::now() + SURVEY_TIME;
        let mut found = Vec::new();
        for group in records.chunks(attach::ATTACH_THREADS) {
            let (told, answers) = std::sync::mpsc::channel();
            for record in group {
                let Some(look) = self.begin_look(record.id) else {
                    continue;
                };
                let (told, id, text) = (told.clone(), record.id, record.origin.clone());
                attach::aside(move || {
                    let place = place_of(&text);
                    drop(look);
                    // Nobody listens any more if it came too late.
                    let _ = told.send(place.map(|place| (id, place)));
                });
            }
            drop(told);
            // Ends when all of the group have answered, or late.
            while let Ok(place) =
                answers.recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                found.extend(place);
            }
        }
        found
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
        let own = slots.by_id(record.id).and_then(|slot| slot.place.as_ref());
        let Some(own) = own else { return Ok(()) };
        let pool = lock(&self.pool);
        let flash = pool.media();
        if flash.beneath().is_some_and(|place| place.overlaps(own)) {
            return Err(is_flash(&record.origin, flash.path()));
        }
        let disks = &pool.registry().disks;
        let turn = disks.iter().position(|disk| disk.id == record.id);
        let rival = disks.iter().enumerate().find(|(n, other)| {
            let Some(slot) = slots.by_id(other.id) else {
                return false;
            };
            let first = turn.is_none_or(|turn| *n < turn) || slot.placed;
            other.id != record.id
                && first
                && !(other.read_only && record.read_only)
                && slot.place.as_ref().is_some_and(|place| place.overlaps(own))
        });
        rival.map_or(Ok(()), |(_, other)| {
            Err(is_same_data(&record.origin, other))
        })
    }

    /// The disk in the table that lies on the same data as a new one, if any does. Two that are added at
    /// one time are told apart here.
    pub(super) fn same_data(slots: &Slots<Slot>, text: &str, own: Option<&Beneath>) -> Result<()> {
        let Some(own) = own else { return Ok(()) };
        let mut others = slots.all().map(|(_, slot)| slot);
        let other = others.find(|slot| {
            let named = slot.life != Life::Gone;
            named && slot.place.as_ref().is_some_and(|place| place.overlaps(own))
        });
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
    pub(super) fn survey(self: &Arc<Daemon>, records: &[DiskRecord]) {
        let end = Instant::now() + SURVEY_TIME;
        for group in records.chunks(attach::ATTACH_THREADS) {
            let (told, done) = std::sync::mpsc::channel::<()>();
            for record in group {
                let (daemon, told) = (self.clone(), told.clone());
                let (id, text) = (record.id, record.origin.clone());
                attach::aside(move || {
                    daemon.note_place(id, place_of(&text));
                    drop(told);
                });
            }
            drop(told);
            // Ends when all of the group have dropped their end, or late.
            let _ = done.recv_timeout(end.saturating_duration_since(Instant::now()));
        }
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
        daemon.note_place(own.id, None);
        check(&own.origin).unwrap_err();
        let look = daemon.begin_look(own.id).unwrap();
        check(&own.origin).unwrap();
        drop(look);
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
