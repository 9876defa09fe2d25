//! What the daemon tells of itself.

use std::collections::BTreeSet;

use hearth_engine::Upto;
use hearth_engine::api::DiskId;
use hearth_engine::stats::DiskStats;
use hearth_fault::Fault;
use hearth_format::DiskRecord;
use hearth_io::{BLOCK, Device};

use super::{Daemon, Slot, lock, trouble};
use crate::api::stats::{
    Counters, DiskReport, FlashCounters, PoolReport, StatsReport, all_spans, disk_spans,
    flash_spans, latency_spans,
};
use crate::api::types::{
    self, ByteRange, DiskInfo, DiskRef, DiskState, ErrorBody, LegSum, MirrorLeg, MirrorUpkeep,
    OrderInfo, OriginLink, PoolInfo, ScrubInfo, Undecided,
};
use crate::error::{Error, Result};
use crate::life::{Life, Unserved};
use crate::origin;
use crate::pool::mode_of;
use crate::settings::{SettingsShown, version as settings_version};

/// The legs of a mirrored origin.
fn legs(device: &Device) -> Vec<MirrorLeg> {
    let legs = device.as_remote().map(|r| r.legs()).unwrap_or_default();
    legs.into_iter()
        .map(|leg| {
            let (reason, remedy) = types::fields(leg.reason);
            MirrorLeg {
                origin: leg.name,
                state: leg.state.to_owned(),
                behind: leg.behind,
                copied: leg.copied,
                reason,
                remedy,
            }
        })
        .collect()
}

/// How a mirrored origin is copied to and scrubbed.
fn upkeep(device: &Device) -> Option<MirrorUpkeep> {
    let habits = crate::mirror::of(device)?.habits();
    let scrub = habits.scrub;
    let undecided = scrub.undecided.into_iter().map(|place| Undecided {
        offset: place.offset,
        length: place.len,
        legs: place
            .legs
            .into_iter()
            .map(|(leg, sum)| LegSum { leg, sum })
            .collect(),
        cached: place.cached,
    });
    Some(MirrorUpkeep {
        rate: habits.rate,
        paused: habits.paused,
        scrub_rate: habits.scrub_rate,
        scrub_every_days: habits.every_days,
        scrub: (scrub.began_ms > 0).then(|| ScrubInfo {
            active: scrub.active,
            called_off: scrub.called_off,
            began: scrub.began_ms,
            ended: (!scrub.active).then_some(scrub.ended_ms),
            at: scrub.at,
            checked: scrub.checked,
            partial: scrub.partial,
            unread: scrub.unread,
            repairs: scrub.repairs,
            repaired: scrub.repaired,
            undecided: undecided.collect(),
            undecided_all: scrub.undecided_all,
        }),
    })
}

fn link(device: &Device, record: &DiskRecord) -> Option<OriginLink> {
    let link = device.as_remote()?.link();
    let (reason, remedy) = types::fields(link.reason);
    Some(OriginLink {
        connected: link.connected,
        seconds: link.since.elapsed().as_secs_f64(),
        attempts: link.attempts,
        failing: link.failing,
        reason,
        remedy,
        reconnects: link.reconnects,
        timeout: origin::timeout(record).as_secs_f64(),
    })
}

/// What becomes of a disk while the cache is off.
fn goes_on(state: DiskState, flash_only: bool, dirty_unknown: bool, owed: u64) -> String {
    match (state, owed) {
        (DiskState::Refused | DiskState::Waiting, _) if dirty_unknown => {
            "how much of the disk was only on flash is not known".to_owned()
        }
        (DiskState::Refused | DiskState::Waiting | DiskState::Fenced, 0) => {
            "the disk is not served".to_owned()
        }
        (DiskState::Refused | DiskState::Waiting | DiskState::Fenced, owed) => format!(
            "the disk is not served, and {} of it are only on flash",
            crate::size::human(owed)
        ),
        _ if flash_only => "the disk lives on flash: its writes fail, and what it holds can be read as long as flash answers".to_owned(),
        (_, 0) => "the disk goes on from its origin".to_owned(),
        (_, owed) => format!("{} are still only on flash", crate::size::human(owed)),
    }
}

/// Lost ranges listed; more are counted in the statistics.
const LOST_MAX: usize = 1000;

impl Daemon {
    /// Bytes of all disks that their origins do not have yet.
    pub(super) fn dirty_bytes(&self) -> u64 {
        let disks = self.engine.dirty_disks();
        let blocks: u64 = disks.iter().map(|(_, dirty, zero)| dirty + zero).sum();
        blocks.saturating_mul(BLOCK)
    }

    pub(super) fn pool_info(&self) -> PoolInfo {
        let stats = self.engine.pool_stats();
        let reactors = self.reactors.stats();
        let disks = self.disks.lock();
        let found = disks.all().filter(|(_, slot)| slot.life.is_known());
        let found = found.filter(|(_, slot)| {
            !matches!(slot.life.unserved(), Some(Unserved::Waiting(_)))
                && slot.life != Life::Leaving
        });
        let found: BTreeSet<DiskId> = found.map(|(id, _)| id).collect();
        let unknown = disks.all().filter(|(_, slot)| self.is_dirty_unknown(slot));
        let unknown: BTreeSet<DiskId> = unknown.map(|(id, _)| id).collect();
        drop(disks);
        let mut flash_notices = self.flash_notices();
        flash_notices.extend(self.room_notice());
        flash_notices.extend_from_slice(self.flash.place());
        flash_notices.extend(self.shares_notice());
        let pool = lock(&self.pool);
        let disks = pool.registry().plain_disks().map(|r| {
            let status = self.engine.status(r.id);
            DiskRef {
                name: r.name.clone(),
                origin: r.origin.clone(),
                size: r.size,
                mode: mode_of(r.mode),
                origin_found: found.contains(&r.id),
                cached: status
                    .as_ref()
                    .map(|s| s.cached_blocks.saturating_mul(BLOCK)),
                dirty: status
                    .filter(|s| s.lives_on_flash || !unknown.contains(&r.id))
                    .map(|s| match s.lives_on_flash {
                        true => 0,
                        false => s.owed_bytes(),
                    }),
            }
        });
        let promised = super::homeless::promised(pool.registry());
        let lies = self.engine.device_stats();
        let mut devices = pool.devices();
        if !pool.is_without_flash() {
            crate::pool::show::add(&mut devices, &lies);
            crate::pool::show::add_io(&mut devices, &lies);
            let emptied = self.reshaping.emptied(&self.engine);
            crate::pool::show::add_emptied(&mut devices, emptied);
        }
        PoolInfo {
            devices,
            state: self.pool_state().to_owned(),
            notices: flash_notices,
            swap_trouble: self.swap_trouble(),
            capacity: Some(match self.without_flash {
                true => 0,
                false => stats.capacity_blocks.saturating_mul(BLOCK),
            }),
            cached: Some(stats.cached_blocks * BLOCK),
            dirty: Some(self.dirty_bytes()),
            promised,
            promised_most: match self.without_flash {
                true => 0,
                false => super::homeless::most(self.holds()),
            },
            ram_most: pool.ram_most(
                stats.stage_most_blocks.saturating_mul(BLOCK),
                self.nbd_memory,
            ),
            ram_stage: Some(stats.stage_capacity_blocks.saturating_mul(BLOCK)),
            ram_stage_most: stats.stage_most_blocks.saturating_mul(BLOCK),
            stuck: lock(&self.stuck).clone(),
            recovery: Some(self.recovery.clone()),
            io: Some(reactors.backend.to_owned()),
            threads: Some(u64::from(reactors.threads)),
            disks: disks.collect(),
            ..pool.info()
        }
    }

    pub(super) fn disk_infos(&self) -> Vec<DiskInfo> {
        let disks = self.disks.lock();
        let pool = lock(&self.pool);
        disks
            .iter()
            .filter(|(_, slot)| slot.life.is_known())
            .filter_map(|(name, slot)| {
                let record = pool.record(slot.id).or(slot.erased.as_deref())?;
                Some(self.describe(name, slot, record))
            })
            .collect()
    }

    pub(super) fn disk_info(&self, name: &str) -> Result<DiskInfo> {
        let disks = self.disks.lock();
        let slot = disks.get(name).filter(|slot| slot.life.is_known());
        let slot = slot.ok_or_else(|| Error::no_disk(name))?;
        let pool = lock(&self.pool);
        let record = pool.record(slot.id).or(slot.erased.as_deref());
        let record = record.ok_or_else(|| Error::no_disk(name))?;
        Ok(self.describe(name, slot, record))
    }

    /// How far the origin of an ordered disk is.
    fn order_of(&self, slot: &Slot, record: &DiskRecord) -> Option<OrderInfo> {
        if record.mode != hearth_format::CacheMode::WriteBackOrdered {
            return None;
        }
        let noted = || {
            // Whoever asks holds the pool's lock.
            let beside = self.beside.as_ref()?;
            beside.ordered_upto(record.id, record.serial)
        };
        let now = hearth_io::now_ns();
        let lost = |beside: &std::sync::Arc<crate::beside::Beside>| {
            beside.said(|notes| notes.lost.contains(record.id))
        };
        // Of a disk that was lost with its flash the engine, which has new flash, knows nothing.
        let lost = self.beside.as_ref().is_some_and(lost);
        let state = self.engine.order(record.id, now).filter(|_| !lost);
        let upto = match state.map(|s| s.upto) {
            Some(Upto::Mixed) => None,
            Some(Upto::At(_)) => self.origin_upto(record.id),
            Some(Upto::Earlier) | None => noted(),
        };
        let in_order = match state.map(|s| s.upto) {
            Some(Upto::Mixed) => false,
            Some(_) => true,
            None => upto.is_some(),
        };
        // The engine may not have heard of it yet.
        let begins = match state {
            None => slot.export().is_some(),
            Some(state) => state.versions == 0,
        };
        let status = self.engine.status(record.id);
        let status = status.filter(|_| begins && !in_order && !self.cache_is_off());
        Some(OrderInfo {
            begins: status.is_some_and(|s| s.owed_blocks() == 0 && s.lost_ranges.is_empty()),
            in_order,
            upto,
            behind: state.map_or(0.0, |s| s.age_ns as f64 / 1e9),
            late: state.is_some_and(|s| s.late),
        })
    }

    /// Something of a disk that is not served may have been dirty on flash that is gone, and nobody knows how much.
    /// Whoever asks holds locks of others.
    pub(super) fn is_dirty_unknown(&self, slot: &Slot) -> bool {
        let unserved = slot.life.unserved().is_some();
        let beside = self.beside.as_ref().filter(|_| unserved);
        beside.is_some_and(|beside| {
            beside.said(|notes| {
                let gone = self.without_flash && notes.dirty.contains(slot.id);
                gone || notes.lost.contains(slot.id)
            })
        })
    }

    fn describe(&self, name: &str, slot: &Slot, record: &DiskRecord) -> DiskInfo {
        let status = self.engine.status(slot.id).unwrap_or_default();
        let cannot_write_back = trouble::write_back_trouble(&status, hearth_io::now_ns());
        let served = || cannot_write_back.as_ref();
        let served = || served().map(|t| trouble::fault(t, &record.origin));
        let (mut state, reason) = match &slot.life {
            Life::Reconciling if status.only_lost_left => (
                DiskState::Refused,
                Some(super::control::rotten(name, &status).into()),
            ),
            Life::Reconciling => (
                DiskState::Flushing,
                Some(Fault::bare(
                    "what waits on flash is being written over the origin",
                )),
            ),
            Life::Leaving => (
                DiskState::Removing,
                Some(Fault::bare(format!("disk {name} is being removed"))),
            ),
            life => match life.unserved() {
                // Its life is ahead of its export for a moment.
                None if slot.export().is_none() => (
                    DiskState::Waiting,
                    Some(Fault::bare("the export is being set up")),
                ),
                None => (DiskState::Attached, served()),
                Some(Unserved::Waiting(e)) => (DiskState::Waiting, Some(e.clone().into())),
                Some(Unserved::Refused { why, .. }) => {
                    (DiskState::Refused, Some(why.clone().into()))
                }
            },
        };
        if record.fenced_at != 0 {
            state = DiskState::Fenced;
        }
        if slot.life.is_removed() {
            state = DiskState::Removing;
        } else if slot.life == (Life::Served { flushing: true }) {
            state = DiskState::Flushing;
        }
        let mut notices = slot.session.notices.clone();
        let dirty_unknown = !record.is_flash_only() && self.is_dirty_unknown(slot);
        if self.cache_is_off() {
            let goes_on = goes_on(
                state,
                record.is_flash_only(),
                dirty_unknown,
                status.owed_bytes(),
            );
            notices.push(format!(
                "the cache is off, see `hearth pool show`; {goes_on}"
            ));
            notices.extend(self.room_again().map(str::to_owned));
        }
        if record.hold {
            notices.push(format!(
                "held for a backup: the origin has each write before it is answered, until `hearth disk set {name} --hold off`"
            ));
        }
        if let Some(now) = slot.session.short {
            notices.push(super::attach::shrank(record.size, now));
        }
        if slot.export().is_some_and(|e| e.origin().is_modelled()) {
            notices.push("the origin's speed is a model's".to_owned());
        }
        notices.extend(slot.export().and_then(|e| e.clients().notice()));
        let link = slot.device().and_then(|d| link(d, record));
        let link = link.filter(|_| !record.is_flash_only());
        if let Some(l) = link.as_ref().filter(|l| !l.connected) {
            let what = if l.failing { "fail" } else { "wait" };
            let reason = l.reason.as_deref().unwrap_or("it does not answer");
            let notice = format!(
                "the origin is not connected since {:.0} s, after {} attempts: {reason}; requests it is needed for {what}, and it is tried again",
                l.seconds, l.attempts
            );
            let remedy = l.remedy.clone().unwrap_or_default();
            notices.push(Fault::new(notice, remedy).to_string());
        }
        // Its legs have what a connection is to a server.
        let legs = slot.device().map(|d| legs(d)).unwrap_or_default();
        let link = link.filter(|_| legs.is_empty());
        for leg in legs.iter().filter(|leg| leg.state == "out") {
            let why = leg.reason.as_deref().unwrap_or("it does not answer");
            notices.push(format!("the leg {} is out: {why}", leg.origin));
        }
        let (reason, remedy) = types::fields(reason);
        DiskInfo {
            name: name.to_owned(),
            id: slot.id,
            origin: record.origin.clone(),
            size: record.size,
            settings: SettingsShown::of(record),
            pinned: self.pin_of(record),
            onto_flash: self.going_of(record),
            share: slot.session.share.map(|share| share.min(slot.session.kept)),
            allow_backing: record.allow_backing,
            chain: record.chain.clone(),
            state,
            reason,
            remedy,
            notices,
            cached: status.cached_blocks * BLOCK,
            dirty: match record.is_flash_only() {
                true => 0,
                false => status.owed_bytes(),
            },
            dirty_unknown,
            home: record.home.into(),
            order: self.order_of(slot, record),
            connections: slot.export().map_or(0, |e| e.clients().connections()),
            clients: slot.export().map_or_else(Vec::new, |e| e.clients().list()),
            two_writers: slot.export().and_then(|e| e.clients().two_writers()),
            version: settings_version(record),
            link,
            legs,
            upkeep: slot.device().and_then(|d| upkeep(d)),
            cannot_write_back,
            lost: status
                .lost_ranges
                .iter()
                .take(LOST_MAX)
                .map(|&(offset, length)| ByteRange { offset, length })
                .collect(),
            fenced_at: (record.fenced_at != 0).then_some(record.fenced_at),
            stranded: if record.fenced_at != 0 {
                self.stranded(slot.id)
            } else {
                Vec::new()
            },
            recording: self.observer.recording(slot.id).map(Into::into),
            progress: slot.session.shown,
            check: slot.session.check,
            device: record.device.clone(),
            incomplete: slot.session.incomplete.clone().map(ErrorBody::from),
        }
    }

    fn disk_stats_of(&self, name: &str, slot: &Slot, now: u64) -> DiskReport {
        let stats: DiskStats = self
            .engine
            .stats(slot.id, hearth_io::now_ns())
            .unwrap_or_default();
        let counters = Counters::from(&stats.counters);
        let status = self.engine.status(slot.id).unwrap_or_default();
        let latencies = self.engine.latencies(slot.id).unwrap_or_default();
        let fenced = lock(&self.pool)
            .record(slot.id)
            .is_some_and(|record| record.fenced_at != 0);
        let mut report = DiskReport::new(
            name,
            fenced,
            &stats,
            disk_spans(now, now, &counters, &slot.session.windows),
            latency_spans(now, &latencies, &slot.session.latencies),
        );
        report.cannot_write_back = trouble::write_back_trouble(&status, hearth_io::now_ns());
        report
    }

    pub(super) fn disk_report(&self, name: &str) -> Result<DiskReport> {
        let disks = self.disks.lock();
        let slot = disks.get(name).filter(|slot| slot.life.is_known());
        let slot = slot.ok_or_else(|| Error::no_disk(name))?;
        Ok(self.disk_stats_of(name, slot, self.now_s()))
    }

    pub(super) fn stats_report(&self) -> StatsReport {
        let now = self.now_s();
        let disks = self.disks.lock();
        let windows = lock(&self.windows);
        let reports: Vec<DiskReport> = disks
            .iter()
            .filter(|(_, slot)| slot.life.is_known())
            .map(|(name, slot)| self.disk_stats_of(name, slot, now))
            .collect();
        let stats = self.engine.pool_stats();
        let flash = FlashCounters::from(&stats.counters);
        let mut pool = PoolReport::new(
            &stats,
            self.flash_notices()
                .into_iter()
                .chain(self.room_notice())
                .collect(),
            self.dirty_bytes(),
            flash_spans(now, now, &flash, &windows),
            all_spans(now, &reports),
        );
        if self.without_flash {
            (pool.capacity, pool.segments, pool.free_segments) = (0, 0, 0);
        }
        pool.stuck = lock(&self.stuck).clone();
        pool.endurance = self.endurance();
        StatsReport {
            uptime: now,
            pool,
            disks: reports,
        }
    }
}

#[cfg(test)]
mod tests;
