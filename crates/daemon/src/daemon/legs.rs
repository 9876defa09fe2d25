//! Legs that are added to a mirror and taken from it while its disk is served.
//!
//! Which legs there are is in the disk's record, and durable there before the mirror is told of a new one and
//! after it has let an old one go: so a crash in between leaves a leg too many, which is brought up to date, and
//! never one that is written and that nobody knows of.

use std::sync::Arc;

use hearth_format::DiskRecord;
use hearth_format::mirror::LEGS_MAX;
use hearth_io::{Device, OriginSpec};
use hearth_mirror::ScrubOrder;
use hearth_origin::owner::Take;

use super::admission::failure;
use super::{Daemon, lock};
use crate::api::types::{DiskInfo, MirrorSet, ScrubSet};
use crate::error::{Error, Kind, Result};
use crate::origin;

/// Why something cannot be done to the legs of a disk.
fn no_mirror(name: &str) -> Error {
    Error::conflict(
        format!("disk {name} is not served from a mirror"),
        "add a disk with --mirror to have one; one leg is enough to begin with",
    )
}

impl Daemon {
    /// Changes the legs of a served disk, and how they are copied to.
    pub(super) fn set_mirror(self: &Arc<Daemon>, name: &str, set: &MirrorSet) -> Result<DiskInfo> {
        let device = self.with_slot(name, |slot| {
            slot.device.clone().ok_or_else(|| no_mirror(name))
        })?;
        let mirror = crate::mirror::of(&device).ok_or_else(|| no_mirror(name))?;
        // A leg that is added is to be copied to as was asked with it.
        if let Some(paused) = set.paused {
            mirror.pause(paused);
        }
        if let Some(rate) = set.rate {
            mirror.set_rate(rate);
        }
        if let Some(leg) = &set.add {
            self.add_leg(name, &device, leg)?;
        }
        if let Some(leg) = &set.remove {
            self.remove_leg(name, &device, leg)?;
        }
        self.disk_info(name)
    }

    /// Begins a scrub of a mirrored disk, calls it off, or says what it was not to decide alone.
    pub(super) fn set_scrub(&self, name: &str, set: &ScrubSet) -> Result<DiskInfo> {
        let device = self.with_slot(name, |slot| {
            slot.device.clone().ok_or_else(|| no_mirror(name))
        })?;
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

    fn add_leg(self: &Arc<Daemon>, name: &str, device: &Device, text: &str) -> Result<()> {
        let leg = origin::parse(text)?;
        if hearth_origin::legs(&leg).is_some() || hearth_origin::may_have_chain(&leg) {
            return Err(Error::invalid(
                format!("{text} cannot be a leg"),
                "give a file, a block device, an NBD export, or an image of a format that names no other files",
            ));
        }
        let record = self.with_record(name)?;
        origin::check_writable(&leg, record.read_only)?;
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
        if let Some(mirror) = crate::mirror::of(device) {
            mirror.add(stamp.id, leg.to_string(), opened);
        }
        self.note_place(turn.id(), super::apart::place(&changed));
        self.events.tell(hearth_events::Event::LegAdded {
            disk: name.to_owned(),
            leg: leg.to_string(),
        });
        Ok(())
    }

    fn remove_leg(self: &Arc<Daemon>, name: &str, device: &Device, text: &str) -> Result<()> {
        let leg = origin::parse(text)?;
        let turn = self.turn_for(name)?;
        let record = self.with_record(name)?;
        let legs = hearth_origin::parts(&origin::parse(&record.origin)?);
        let known = legs.iter().find(|l| l.source == leg.source);
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
            if let Some(at) = legs.iter().position(|l| l.source == leg.source) {
                legs.remove(at);
                stamps.legs.remove(at);
            }
            Ok(())
        })?;
        self.note_place(turn.id(), super::apart::place(&changed));
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
