//! Legs that are added to a mirror and taken from it while its disk is served.
//!
//! Which legs there are is in the disk's record, and durable there before the mirror is told of a new one and
//! after it has let an old one go: so a crash in between leaves a leg too many, which is brought up to date, and
//! never one that is written and that nobody knows of.
//!
//! A disk that is served from one origin becomes a mirror of that one leg first, which changes nothing of what it
//! holds: a crash leaves either. The new leg is added when all that was sent to the origin past the mirror has ended.
//! What the mirror did not see it could not send to the new leg either, and what it copies would change under the copy.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hearth_format::mirror::LEGS_MAX;
use hearth_format::{DiskRecord, OriginIdentity};
use hearth_io::{Device, OriginSpec, Target};
use hearth_mirror::ScrubOrder;
use hearth_origin::owner::Take;

use super::admission::failure;
use super::homeless::has_none;
use super::{Daemon, lock};
use crate::api::types::{DiskInfo, MirrorSet, ScrubSet};
use crate::error::{Error, Kind, Result};
use crate::life::Life;
use crate::origin;

/// Longest wait for what was sent to an origin before its disk became a mirror.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// How often that is looked at.
const DRAIN_POLL: Duration = Duration::from_millis(2);

/// Why something cannot be done to the legs of a disk.
fn no_mirror(name: &str) -> Error {
    Error::conflict(
        format!("disk {name} is not served from a mirror"),
        format!(
            "`hearth disk mirror {name} --add PATH` makes it one, with what it is served from as the first leg"
        ),
    )
}

fn check_leg(text: &str, leg: &OriginSpec) -> Result<()> {
    if hearth_origin::legs(leg).is_none() {
        return Ok(());
    }
    Err(Error::invalid(
        format!("{text} cannot be a leg"),
        "give a file, a block device, an NBD export, or an image that stands alone",
    ))
}

/// Refuses a leg that the disk has already.
fn check_new(record: &DiskRecord, text: &str, leg: &OriginSpec) -> Result<()> {
    let legs = hearth_origin::legs(&origin::parse(&record.origin)?).unwrap_or_default();
    let new = legs
        .iter()
        .all(|known| known.to_string() != leg.to_string());
    match new {
        true => Ok(()),
        false => Err(Error::conflict(
            format!("{text} is a leg of disk {} already", record.name),
            "give another one; `hearth disk show` lists its legs",
        )),
    }
}

/// A leg by the name that outlives a reboot: `/dev/sdX` can be another device then.
fn named_leg(text: &str) -> Result<OriginSpec> {
    let leg = origin::parse(text)?;
    Ok(origin::stable(&leg).unwrap_or(leg))
}

impl Daemon {
    /// Changes the legs of a served disk, and how they are copied to.
    pub(super) fn set_mirror(self: &Arc<Daemon>, name: &str, set: &MirrorSet) -> Result<DiskInfo> {
        self.check_has_legs(name)?;
        // A leg that is added is to be copied to as was asked with it.
        let pace = |device: &Device| {
            let mirror = crate::mirror::of(device).ok_or_else(|| no_mirror(name))?;
            if let Some(paused) = set.paused {
                mirror.pause(paused);
            }
            if let Some(rate) = set.rate {
                mirror.set_rate(rate);
            }
            Ok(())
        };
        match &set.add {
            Some(leg) => self.add_leg(name, leg, pace)?,
            None => pace(&*self.open_device(name)?)?,
        }
        if let Some(leg) = &set.remove {
            let device = self.open_device(name)?;
            self.remove_leg(name, &device, leg)?;
        }
        self.disk_info(name)
    }

    /// Refuses legs of a disk that has no origin, or soon will have none.
    fn check_has_legs(&self, name: &str) -> Result<()> {
        let record = self.with_record(name)?;
        if record.is_flash_only() {
            return Err(has_none(name, "it has no legs"));
        }
        // What is kept of its origin would be kept of legs, and they would get old without a word.
        if self.engine.is_held(record.id) {
            return Err(Error::conflict(
                format!("disk {name} is on its way onto flash, where it has no legs"),
                format!(
                    "`hearth disk flush {name}` calls that off, and it keeps its origin; then add a leg"
                ),
            ));
        }
        Ok(())
    }

    /// What a disk is served from now. Not to be held on to: it may be waited for that nobody uses it any more.
    fn open_device(&self, name: &str) -> Result<Arc<Device>> {
        self.with_slot(name, |slot| {
            slot.device.clone().ok_or_else(|| no_mirror(name))
        })
    }

    /// The mirror a disk is served from. One that is served from a single origin becomes a mirror of that.
    fn as_mirror(self: &Arc<Daemon>, name: &str) -> Result<Arc<Device>> {
        let turn = self.turn_for(name)?;
        let id = turn.id();
        // It may have been moved while the leg was looked at.
        self.check_has_legs(name)?;
        let before = self.with_slot(name, |slot| {
            let served = matches!(slot.life, Life::Served { .. });
            let device = slot.device.clone().filter(|_| served);
            let device = device.ok_or_else(|| {
                Error::conflict(
                    format!("disk {name} is not served"),
                    format!("`hearth disk show {name}` says why; put that right first"),
                )
            })?;
            match &slot.claim {
                Some(_) if crate::mirror::of(&device).is_none() => Err(Error::refused(
                    format!(
                        "the origin of {name} is on storage that other hosts reach, and of legs no book is kept there"
                    ),
                    "copy it to an origin on this host",
                )),
                _ if slot.session.check.is_some() => Err(Error::conflict(
                    format!("the cache of disk {name} is being compared with its origin"),
                    format!("add the leg when `hearth disk show {name}` no longer prints `checking`"),
                )),
                _ => Ok(device),
            }
        })?;
        if crate::mirror::of(&before).is_some() {
            return Ok(before);
        }
        let record = self.with_record(name)?;
        let leg = origin::parse(&record.origin)?;
        check_leg(&record.origin, &leg)?;
        if let Some(below) = record.chain.first() {
            // What lies below is not kept in step, and is not opened for a leg.
            return Err(Error::refused(
                format!(
                    "the image of {name} names another file, {below}, and a leg has to stand alone"
                ),
                "copy it into an image that stands alone (`qemu-img convert`), and add that",
            ));
        }
        if record.read_only {
            return Err(Error::refused(
                format!(
                    "disk {name} is read-only, and its origin may not be written to bring it up to date"
                ),
                "remove it and add it again without --read-only",
            ));
        }
        let state_dir = self.stores.state_dir();
        // Notes of that number would be believed.
        crate::mirror::forget(state_dir, &record.serial);
        let stamps = crate::mirror::new_stamps(1);
        let become_one = |record: &mut DiskRecord| {
            record.origin = hearth_origin::mirror(std::slice::from_ref(&leg));
            record.mirror = Some(stamps.clone());
            // Of a mirror only the size is looked at, and its legs look after themselves.
            record.origin_identity = Some(OriginIdentity {
                size: record.size,
                ..OriginIdentity::default()
            });
            record.clean_detach = false;
        };
        let changed = self.change_record(name, id, become_one)?;
        let parts = crate::mirror::Parts {
            images: &self.images,
            state_dir,
            pool: &self.pool,
            events: &self.events,
            stale: &self.stale_legs,
            fresh: false,
        };
        let opened = crate::mirror::over(&leg, &before, &changed, &parts);
        let device = opened.inspect_err(|_| {
            // Else it goes on as what it says, from the next start on: a mirror of what it is served from.
            let back = self.change_record(name, id, |now| {
                now.origin.clone_from(&record.origin);
                now.mirror = None;
                now.origin_identity = record.origin_identity;
            });
            if let Err(e) = back {
                tracing::warn!(disk = %name, "it is noted as a mirror of its one origin: {e}");
            }
        })?;
        let device = Arc::new(device);
        crate::mirror::know_cache(&device, &self.engine, id);
        self.targets.set(Target::Origin(id), Some(device.clone()));
        self.rooms.watch(id, &device);
        self.with_slot(name, |slot| {
            slot.before = Arc::downgrade(&before);
            slot.set_device(device.clone());
            Ok(())
        })?;
        // From here on what is sent goes to the mirror.
        self.poke();
        Ok(device)
    }

    /// Waits until all that was sent to an origin before its disk became a mirror has ended.
    fn drained(&self, name: &str) -> Result<()> {
        let end = Instant::now() + DRAIN_TIME;
        let before = self.with_slot(name, |slot| Ok(slot.before.clone()))?;
        while before.strong_count() > 0 {
            if Instant::now() >= end {
                return Err(Error::unavailable(
                    format!(
                        "the origin of {name} still owes answers from before it became a mirror"
                    ),
                    "the disk is a mirror of that one leg now; see whether its origin hangs, and add the other leg again",
                ));
            }
            std::thread::sleep(DRAIN_POLL);
        }
        self.with_slot(name, |slot| {
            slot.before = Weak::new();
            Ok(())
        })
    }

    /// Changes a disk's record, durably; what it says then.
    fn change_record(
        &self,
        name: &str,
        id: u16,
        change: impl Fn(&mut DiskRecord),
    ) -> Result<DiskRecord> {
        lock(&self.pool).change(|registry| {
            let record: &mut DiskRecord =
                registry.by_id_mut(id).ok_or_else(|| Error::no_disk(name))?;
            change(record);
            Ok(record.clone())
        })
    }

    /// Begins a scrub of a mirrored disk, calls it off, or says what it was not to decide alone.
    pub(super) fn set_scrub(&self, name: &str, set: &ScrubSet) -> Result<DiskInfo> {
        let device = self.open_device(name)?;
        let mirror = crate::mirror::of(&device).ok_or_else(|| no_mirror(name))?;
        let prefer = set.prefer.as_deref().map(origin::parse).transpose()?;
        let done = mirror.scrub(ScrubOrder {
            begin: set.begin,
            anew: set.anew,
            cancel: set.cancel,
            prefer: prefer.map(|leg| leg.to_string()),
            rate: set.rate,
            every_days: set.every_days,
        });
        done.map_err(|why| Error::of(Kind::Conflict, why))?;
        self.disk_info(name)
    }

    fn add_leg(
        self: &Arc<Daemon>,
        name: &str,
        text: &str,
        pace: impl Fn(&Device) -> Result<()>,
    ) -> Result<()> {
        let leg = named_leg(text)?;
        check_leg(text, &leg)?;
        let record = self.with_record(name)?;
        origin::check_writable(&leg, record.read_only)?;
        check_new(&record, text, &leg)?;
        self.check_unused(text, &leg)?;
        let flash = lock(&self.pool).path().to_owned();
        origin::check_plain(&leg, &flash)?;
        let ownership = self.owners.claim(&leg, &record, Take::Free);
        let ownership = ownership.map_err(|e| failure(&e))?;
        if let Some(claim) = ownership.claim {
            claim.release();
            return Err(Error::refused(
                format!(
                    "{text} is on storage that other hosts reach, and of legs no book is kept there"
                ),
                "give a leg on this host",
            ));
        }
        let opened = crate::mirror::open_leg(&leg, &record, &self.images)?;
        crate::mirror::check_unused(text, &opened, record.size)?;
        // All that the leg can hold up is done.
        let device = self.as_mirror(name)?;
        self.drained(name)?;
        pace(&device)?;
        let turn = self.turn_for(name)?;
        let stamp = crate::mirror::new_leg();
        let changed = self.change_legs(name, turn.id(), |legs, stamps| {
            if legs.len() >= LEGS_MAX {
                return Err(Error::conflict(
                    format!("the mirror of {name} has {LEGS_MAX} legs already"),
                    "remove one first",
                ));
            }
            legs.push(leg.clone());
            stamps.legs.push(stamp);
            Ok(())
        })?;
        if let Some(mirror) = crate::mirror::of(&device) {
            mirror.add(stamp.id, leg.to_string(), opened);
        }
        self.rooms.look_again(turn.id());
        self.note_place(turn.id(), super::apart::place(&changed));
        self.watch_origin(turn.id());
        self.events.tell(hearth_events::Event::LegAdded {
            disk: name.to_owned(),
            leg: leg.to_string(),
        });
        Ok(())
    }

    fn remove_leg(self: &Arc<Daemon>, name: &str, device: &Device, text: &str) -> Result<()> {
        // As it is recorded, or as it was given before such names were recorded.
        let (given, leg) = (origin::parse(text)?, named_leg(text)?);
        let turn = self.turn_for(name)?;
        let record = self.with_record(name)?;
        let legs = hearth_origin::parts(&origin::parse(&record.origin)?);
        let known = legs.iter().find(|l| l.source == given.source);
        let known = known.or_else(|| legs.iter().find(|l| l.source == leg.source));
        let Some(known) = known else {
            return Err(Error::invalid(
                format!("{text} is no leg of {name}"),
                format!("`hearth disk show {name}` lists them"),
            ));
        };
        let last = || {
            Error::refused(
                format!("no other leg of {name} holds the disk"),
                "wait until another one is current, or add one",
            )
        };
        if legs.len() < 2 {
            return Err(last());
        }
        let mirror = crate::mirror::of(device).ok_or_else(|| no_mirror(name))?;
        if !mirror.remove(&known.to_string()) {
            return Err(last());
        }
        let changed = self.change_legs(name, turn.id(), |legs, stamps| {
            if let Some(at) = legs.iter().position(|l| l.source == known.source) {
                legs.remove(at);
                stamps.legs.remove(at);
            }
            Ok(())
        })?;
        self.note_place(turn.id(), super::apart::place(&changed));
        self.watch_origin(turn.id());
        self.events.tell(hearth_events::Event::LegRemoved {
            disk: name.to_owned(),
            leg: known.to_string(),
        });
        Ok(())
    }

    /// Changes which legs a disk's record names, durably; what it names then.
    fn change_legs(
        &self,
        name: &str,
        id: u16,
        change: impl Fn(&mut Vec<OriginSpec>, &mut hearth_format::MirrorStamps) -> Result<()>,
    ) -> Result<OriginSpec> {
        lock(&self.pool).change(|registry| {
            let record: &mut DiskRecord =
                registry.by_id_mut(id).ok_or_else(|| Error::no_disk(name))?;
            let spec = origin::parse(&record.origin)?;
            let mut legs = hearth_origin::legs(&spec).ok_or_else(|| no_mirror(name))?;
            let mut stamps = record.mirror.clone().ok_or_else(|| no_mirror(name))?;
            change(&mut legs, &mut stamps)?;
            record.origin = hearth_origin::mirror(&legs);
            record.mirror = Some(stamps);
            origin::parse(&record.origin)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use crate::api::types::{CacheCheck, MirrorSet};

    /// The comparison is of one origin: with a leg added it would never end, and nothing would be written back.
    #[test]
    fn leg_during_check_is_refused() {
        let (dir, daemon) = testing::with_disk("d");
        let leg = dir.path().join("leg");
        let size = daemon.with_record("d").unwrap().size;
        std::fs::File::create(&leg).unwrap().set_len(size).unwrap();
        let add = || {
            let set = MirrorSet {
                add: Some(leg.display().to_string()),
                ..MirrorSet::default()
            };
            daemon.set_mirror("d", &set)
        };
        let set_check = |check| {
            let set = daemon.with_slot("d", |slot| {
                slot.session.check = check;
                Ok(())
            });
            set.unwrap();
        };
        set_check(Some(CacheCheck {
            compared: 1,
            cached: 2,
        }));
        let refused = add().unwrap_err();
        assert!(refused.what.contains("is being compared"), "{refused}");
        set_check(None);
        add().unwrap();
    }
}
