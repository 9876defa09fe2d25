//! What the daemon told, in the terms of health: which of its figures matter, and over which time.
//!
//! `hearth status` uses the same where the second service is not there.

use std::collections::BTreeMap;
use std::path::PathBuf;

use hearth_daemon::api::datastores::{DatastoreInfo, TreeInfo};
use hearth_daemon::api::stats::{Counters, DiskReport, DiskSpan, FlashSpan};
use hearth_daemon::api::types::DiskInfo;
use hearth_health::daemon::{Disk, FlashDevice, Leg, Limits, Pool};
use hearth_health::datastore::{Datastore, Tree};
use hearth_health::latency::Answers;
use hearth_health::{Item, daemon};

use crate::watch::Seen;

/// Bytes of a block.
const BLOCK: u64 = 4096;

fn span<'a>(spans: &'a [DiskSpan], name: &str) -> Option<&'a Counters> {
    spans.iter().find(|s| s.span == name).map(|s| &s.counters)
}

fn flash_errors(spans: &[FlashSpan], name: &str) -> u64 {
    let span = spans.iter().find(|s| s.span == name);
    span.map_or(0, |s| s.counters.flash_errors)
}

/// What is called the pool: its label, or the start of its number.
pub fn pool_name(seen: &Seen) -> String {
    match seen.pool.label.as_str() {
        "" => seen.pool.uuid.chars().take(8).collect(),
        label => label.to_owned(),
    }
}

/// Bytes for data of which all is dirty: where clean blocks are on fewer devices, `capacity` counts them as often as they fit.
fn dirty_capacity(capacity: u64, copies: (u32, u32)) -> u64 {
    match copies {
        (clean @ 1.., dirty) if clean < dirty => capacity / u64::from(dirty) * u64::from(clean),
        // Not told, or all are on as many.
        _ => capacity,
    }
}

fn pool(seen: &Seen) -> Pool {
    let stats = &seen.stats.pool;
    let day = span(&stats.disks, "1d");
    Pool {
        name: pool_name(seen),
        state: seen.pool.state.clone(),
        notices: seen.pool.notices.clone(),
        flash_failed: stats.flash_failed,
        flash_errors_hour: flash_errors(&stats.spans, "1h"),
        capacity: dirty_capacity(
            stats.capacity,
            (seen.pool.clean_copies, seen.pool.dirty_copies),
        ),
        dirty: stats.dirty,
        endurance_used: stats.endurance_used,
        swap_trouble: seen.pool.swap_trouble.clone(),
        swap: seen.pool.devices.iter().map(|device| device.swap).sum(),
        bad_blocks_day: day.map_or(0, |c| c.bad_clean_blocks),
        devices: (seen.pool.devices.iter())
            .map(|device| FlashDevice {
                path: device.path.clone(),
                slow: device.slow,
                lost: device.lost,
                errors: device.io.as_ref().map_or(0, |io| io.errors),
            })
            .collect(),
    }
}

fn disk(info: &DiskInfo, report: Option<&DiskReport>) -> Disk {
    let lately = |name: &str| report.and_then(|r| span(&r.spans, name));
    let hour = lately("1h");
    let link = info.link.as_ref().filter(|l| !l.connected);
    Disk {
        name: info.name.clone(),
        origin: info.origin.clone(),
        state: info.state.word().to_owned(),
        reason: (info.reason.clone()).map(|why| (why, info.remedy.clone().unwrap_or_default())),
        unconnected: link.map(|l| {
            let why = l.reason.clone();
            (
                why.unwrap_or_else(|| "it does not answer".to_owned()),
                l.failing,
            )
        }),
        cannot_write_back: info.cannot_write_back.as_ref().map(|t| t.error.clone()),
        two_writers: info.two_writers.clone(),
        legs: (info.legs.iter())
            .map(|leg| Leg {
                origin: leg.origin.clone(),
                state: leg.state.clone(),
                behind: leg.behind,
                reason: leg.reason.clone().unwrap_or_default(),
            })
            .collect(),
        lost_ranges: info.lost.len() as u64,
        dirty: info.dirty,
        dirty_for: report.map_or(0.0, |r| r.dirty_for),
        destaged_hour: hour.map_or(0, |c| c.destaged.saturating_mul(BLOCK)),
        errors_lately: lately("5min").map_or(0, |c| c.errors),
        origin_errors_hour: hour.map_or(0, |c| c.origin_errors),
    }
}

/// A datastore.
fn datastore(info: &DatastoreInfo) -> Datastore {
    let tree = |tree: &TreeInfo| Tree {
        directory: tree.directory.clone(),
        state: tree.state.clone(),
        missing: tree.missing,
        reason: tree.reason.clone().unwrap_or_default(),
    };
    Datastore {
        name: info.name.clone(),
        trees: info.trees.iter().map(tree).collect(),
        two_writers: info.two_writers.clone(),
    }
}

/// The pool, the disks, and the datastores of which there is something to say, judged.
pub fn items(seen: &Seen, limits: &Limits) -> Vec<Item> {
    let reports: BTreeMap<&str, &DiskReport> = (seen.stats.disks.iter())
        .map(|r| (r.name.as_str(), r))
        .collect();
    let disks = (seen.disks.iter())
        .map(|info| disk(info, reports.get(info.name.as_str()).copied()).judge(limits));
    let stores = (seen.datastores.iter())
        .filter(|info| !info.trees.is_empty() || info.two_writers.is_some())
        .map(|info| datastore(info).judge());
    std::iter::once(pool(seen).judge(limits))
        .chain(disks)
        .chain(stores)
        .collect()
}

/// Threads that are stuck.
pub fn stuck(seen: &Seen) -> Vec<(String, u64)> {
    let stuck = seen.pool.stuck.iter();
    stuck.map(|s| (s.thread.clone(), s.seconds)).collect()
}

/// What origins are asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

impl Asked {
    fn of(self, counters: &Counters) -> (u64, u64) {
        match self {
            Asked::Read => (counters.origin_reads, counters.origin_read_ns),
            Asked::Write => (counters.origin_writes, counters.origin_write_ns),
        }
    }
}

/// How the origins of these disks answered, all together.
pub fn answers(name: &str, seen: &Seen, disks: &[String], asked: Asked) -> Answers {
    let mut answers = Answers {
        name: name.to_owned(),
        ..Answers::default()
    };
    let (mut lately, mut day) = (0, 0);
    let reports = seen.stats.disks.iter().filter(|r| disks.contains(&r.name));
    for report in reports {
        if let (Some(now), Some(then)) = (span(&report.spans, "5min"), span(&report.spans, "1d")) {
            let ((now, now_ns), (then, then_ns)) = (asked.of(now), asked.of(then));
            answers.ops += now;
            answers.day_ops += then;
            lately += now_ns;
            day += then_ns;
        }
    }
    let mean = |ns: u64, ops: u64| ns as f64 / 1000.0 / ops.max(1) as f64;
    answers.mean_us = mean(lately, answers.ops);
    answers.day_mean_us = mean(day, answers.day_ops);
    answers
}

/// A path of this host that something lies on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The path.
    pub path: PathBuf,
    /// The disk whose origin it is; the flash has none.
    pub disk: Option<String>,
    /// It is written.
    pub written: bool,
}

/// The path in an origin's name, if it is one of this host: `/PATH`, or `FORMAT:/PATH`.
pub fn path_of(origin: &str) -> Option<PathBuf> {
    let path = match origin.split_once(':') {
        Some((scheme, rest)) if !scheme.contains('/') => rest,
        _ => origin,
    };
    let is_path = path.starts_with('/') && !path.starts_with("//");
    is_path.then(|| PathBuf::from(path))
}

/// All paths that flash and origins lie on.
pub fn places(seen: &Seen) -> Vec<Place> {
    let flash = (seen.pool.flash.iter()).map(|path| Place {
        path: PathBuf::from(path),
        disk: None,
        written: true,
    });
    let of_disk = |info: &DiskInfo| {
        let legs = info.legs.iter().map(|leg| leg.origin.as_str());
        // A mirror's own name is that of its legs together.
        let own = info.legs.is_empty().then_some(info.origin.as_str());
        let (name, written) = (info.name.clone(), !info.settings.read_only);
        let places = own.into_iter().chain(legs).filter_map(path_of);
        let places = places.map(move |path| Place {
            path,
            disk: Some(name.clone()),
            written,
        });
        places.collect::<Vec<_>>()
    };
    flash.chain(seen.disks.iter().flat_map(of_disk)).collect()
}

/// The daemon, judged.
pub fn daemon(daemon: &daemon::Daemon) -> Item {
    daemon.judge()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_flash_is_dirty_where_clean_blocks_are_there_once() {
        for (copies, capacity) in [((0, 1), 100), ((1, 1), 100), ((2, 2), 100), ((1, 2), 50)] {
            assert_eq!(dirty_capacity(100, copies), capacity, "{copies:?}");
        }
    }

    #[test]
    fn paths_are_told_from_addresses() {
        for (origin, path) in [
            ("/srv/a.raw", Some("/srv/a.raw")),
            ("qcow2:/srv/a", Some("/srv/a")),
            ("model-hdd:/o", Some("/o")),
            ("/srv/with:colon", Some("/srv/with:colon")),
            ("nbd://h/x", None),
            ("nbd+unix:///x?socket=/s", None),
        ] {
            assert_eq!(path_of(origin), path.map(PathBuf::from), "{origin}");
        }
    }
}
