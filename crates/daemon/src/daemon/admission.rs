//! The terms on which a disk is served: those it was added under, and whose its origin is.
//!
//! Rules of admission become stricter with time. A disk that was added before there were any goes
//! on being served as it was, is told of what it would be refused for today, and what it is today
//! is recorded, so that from now on the rules hold for it, too.
//!
//! An origin that other hosts can reach has one owner among pools ([`hearth_origin::owner`]). It is
//! made ours before it is opened, and stays ours while it is closed, until its disk is removed or
//! the pool exported. When somebody takes it over, or the storage shuts us out, the disk is fenced
//! ([`super::fence`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_engine::api::DiskId;
use hearth_fault::Fault;
use hearth_format::{DiskRecord, SharedRecord};
use hearth_io::OriginSpec;
use hearth_origin::owner::{self, Claim, ClaimError, Owner, Take};

use super::lock;
use crate::error::{Error, Kind};
use crate::spot::{self, Mounts};
use crate::workers::{Class, Spot, Workers};

/// The rules of today: 1 asks for formats, chains and owners; 2 looks at every file of an image
/// ([`ALL_FILES_COUNT`](crate::origin::ALL_FILES_COUNT)).
pub(super) const RULES: u8 = 2;
/// The first rules of all.
pub(super) const FIRST_RULES: u8 = 1;

/// Longest wait until a removed disk's origin is given up: storage may hang.
pub(super) const GIVE_UP_TIME: Duration = Duration::from_secs(5);
/// The same for all origins of a pool that is exported.
const GIVE_UP_ALL_TIME: Duration = Duration::from_secs(30);

/// Seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// What came of asking for an origin.
#[derive(Debug, Default)]
pub(super) struct Ownership {
    /// The record that says it is ours, where there is a place for one.
    pub(super) claim: Option<Claim>,
    /// There is none, so that nobody knows who else writes the origin.
    pub(super) unknown: Option<Fault>,
}

impl Ownership {
    /// Asked when the origin is open: somebody may have taken it over meanwhile.
    pub(super) fn confirm(&self, spec: &OriginSpec) -> crate::error::Result<()> {
        let confirmed = self.claim.as_ref().map_or(Ok(()), Claim::confirm);
        confirmed.map_err(|why| {
            let why = why.within(format!("cannot use the origin {spec}"));
            Error::conflict(why.what, "try again when it is nobody else's")
        })
    }
}

/// The origins that are ours.
pub(super) struct Owners {
    pool: String,
    host: String,
    instance: String,
    leaving: Arc<Leaving>,
    workers: Arc<Workers>,
    /// How long an origin is waited for that is being given up.
    patience: Duration,
}

/// The origins that are being given up. That may still go on when their disk is gone, and would take
/// the record of one that is added again at once.
#[derive(Default)]
struct Leaving {
    origins: Mutex<Vec<String>>,
    fewer: Condvar,
}

impl Leaving {
    fn begin(self: &Arc<Leaving>, spec: &OriginSpec) -> Leave {
        let origin = spec.to_string();
        lock(&self.origins).push(origin.clone());
        Leave {
            leaving: self.clone(),
            origin,
        }
    }

    /// Waits until an origin is not being given up any more; false if that takes too long.
    fn wait(&self, spec: &OriginSpec, time: Duration) -> bool {
        let origin = spec.to_string();
        let all = lock(&self.origins);
        let waited = self
            .fewer
            .wait_timeout_while(all, time, |all| all.contains(&origin));
        waited.is_ok_and(|(_, result)| !result.timed_out())
    }
}

/// An origin that is being given up, until dropped.
struct Leave {
    leaving: Arc<Leaving>,
    origin: String,
}

impl Drop for Leave {
    fn drop(&mut self) {
        let mut all = lock(&self.leaving.origins);
        if let Some(at) = all.iter().position(|origin| *origin == self.origin) {
            all.swap_remove(at);
        }
        self.leaving.fewer.notify_all();
    }
}

impl Owners {
    pub(super) fn new(pool: String, host: String, workers: Arc<Workers>) -> Owners {
        Owners {
            pool,
            host,
            instance: uuid::Uuid::new_v4().to_string(),
            leaving: Arc::default(),
            workers,
            patience: GIVE_UP_TIME,
        }
    }

    fn me(&self, disk: &str) -> Owner {
        Owner {
            pool: self.pool.clone(),
            host: self.host.clone(),
            disk: disk.to_owned(),
            instance: self.instance.clone(),
            since: now_s(),
        }
    }

    /// Makes an origin ours, as far as somebody keeps book of that. Blocks.
    pub(super) fn claim(
        &self,
        spec: &OriginSpec,
        record: &DiskRecord,
        take: Take,
    ) -> std::result::Result<Ownership, ClaimError> {
        if record.read_only {
            return Ok(Ownership::default());
        }
        if !self.leaving.wait(spec, self.patience) {
            return Err(ClaimError::Unavailable {
                origin: spec.to_string(),
                why: Fault::new(
                    "it is still being given up by a disk that was removed, and its storage does not answer",
                    "see whether the storage can be reached, and try again",
                ),
            });
        }
        match owner::claim(spec, &self.me(&record.name), take) {
            Ok(claim) => Ok(Ownership {
                claim,
                unknown: None,
            }),
            Err(e @ ClaimError::Unknown { .. }) if record.rules == 0 || record.sole_user => {
                Ok(Ownership {
                    claim: None,
                    unknown: Some(e.fault()),
                })
            }
            Err(e) => Err(e),
        }
    }

    /// Gives up the origin of a disk that was removed, on a thread of its own. The other end of what is
    /// returned is dropped when it is done: who is told that the disk is gone may add it elsewhere.
    pub(super) fn begin_give_up(
        &self,
        record: &DiskRecord,
        claim: Option<Claim>,
    ) -> Option<Receiver<()>> {
        let work = self.parting(record, claim)?;
        let (told, done) = sync_channel::<()>(1);
        let work = move || {
            work();
            drop(told);
        };
        let taken = self
            .workers
            .run(&spot::of(&record.origin), Class::Due, work);
        if let Err(e) = taken {
            tracing::error!("{e}; the record of an origin's owner stays");
        }
        Some(done)
    }

    /// Waits, within bounds, for origins that are still being given up: their disks are gone already.
    pub(super) fn settle(&self) {
        let all = lock(&self.leaving.origins);
        let left = self
            .leaving
            .fewer
            .wait_timeout_while(all, GIVE_UP_TIME, |all| !all.is_empty());
        if left.is_ok_and(|(_, result)| result.timed_out()) {
            tracing::warn!(
                "the storage of a disk that was removed does not answer, so that it may still say that the disk is this pool's; another pool then takes it only with --takeover"
            );
        }
    }

    /// What gives up a disk's origin, also one that is not open.
    fn parting(&self, record: &DiskRecord, claim: Option<Claim>) -> Option<Parting> {
        if record.read_only {
            return None;
        }
        let spec = crate::origin::parse(&record.origin).ok()?;
        let me = self.me(&record.name);
        let leave = self.leaving.begin(&spec);
        Some(Box::new(move || {
            match claim {
                Some(claim) => claim.release(),
                None => owner::forget(&spec, &me),
            }
            drop(leave);
        }))
    }

    /// Gives all up: the pool is exported, and nothing of them is on its flash.
    pub(super) fn give_up_all(
        &self,
        records: &[SharedRecord],
        mut claims: BTreeMap<DiskId, Claim>,
    ) {
        let mounts = Mounts::now();
        let work = records.iter().filter_map(|record| {
            let claim = claims.remove(&record.id);
            let (name, spot) = (record.name.clone(), mounts.spot_of(&record.origin));
            Some((name, spot, self.parting(record, claim)?))
        });
        let left = side_by_side(&self.workers, work.collect(), GIVE_UP_ALL_TIME);
        if !left.is_empty() {
            let names: Vec<String> = left.into_iter().collect();
            tracing::warn!(
                disks = %names.join(", "),
                "the storage of these disks does not answer, so that it may still say that they are this pool's; another pool then takes them only with --takeover"
            );
        }
    }
}

type Parting = Box<dyn FnOnce() + Send>;

/// Does all that, each where it may get stuck; the names of those that are not done in time.
fn side_by_side(
    workers: &Workers,
    work: Vec<(String, Spot, Parting)>,
    time: Duration,
) -> BTreeSet<String> {
    let end = Instant::now() + time;
    let mut left: BTreeSet<String> = work.iter().map(|(name, ..)| name.clone()).collect();
    let (told, done) = channel();
    for (name, spot, part) in work {
        let told = told.clone();
        let run = move || {
            part();
            // Nobody listens any more if it came too late.
            let _ = told.send(name);
        };
        if let Err(e) = workers.run(&spot, Class::Due, run) {
            tracing::error!("{e}; an origin is not given up");
        }
    }
    drop(told);
    while let Ok(name) = done.recv_timeout(end.saturating_duration_since(Instant::now())) {
        left.remove(&name);
    }
    left
}

/// Why an origin is not ours, in the words of the control plane.
pub(super) fn failure(e: &ClaimError) -> Error {
    let kind = match e {
        ClaimError::Owned { .. } | ClaimError::Alive { .. } | ClaimError::Unknown { .. } => {
            Kind::Refused
        }
        ClaimError::InUse { .. } | ClaimError::Garbled { .. } => Kind::Conflict,
        ClaimError::Unavailable { .. } => Kind::Unavailable,
    };
    Error::of(kind, e.fault())
}

/// Puts a disk that was added before there were rules under those of today, as it is; what it should
/// be told.
pub(super) fn grandfather(record: &mut DiskRecord, ownership: &Ownership) -> Vec<String> {
    let mut notices = Vec::new();
    if record.rules == 0
        && !record.sole_user
        && let Some(why) = &ownership.unknown
    {
        record.sole_user = true;
        notices.push(format!(
            "{}; that nobody does is taken for granted, because the disk was added before Hearth asked; if somebody may, remove the disk",
            why.what
        ));
    }
    record.rules = record.rules.max(RULES);
    notices
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::api::server::Control;
    use crate::api::types::DiskAdd;
    use crate::daemon::StopReason;

    #[test]
    fn who_shares_an_origin_unknowingly_is_asked() {
        let (_dir, daemon) = testing::daemon();
        let mut disk = DiskAdd {
            name: "a".to_owned(),
            origin: "nbd+unix:///x?socket=/nowhere/s".to_owned(),
            ..DiskAdd::default()
        };
        let refused = daemon.add(disk.clone()).unwrap_err();
        assert!(refused.remedy.contains("--sole-user"), "{refused}");
        // Then it is only its server that is missing.
        for (sole_user, read_only) in [(true, false), (false, true)] {
            (disk.sole_user, disk.settings.read_only) = (sole_user, Some(read_only));
            let missing = daemon.add(disk.clone()).unwrap_err();
            assert!(missing.what.contains("cannot connect"), "{missing}");
        }
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn an_old_disk_goes_on_with_a_word() {
        let mut record = DiskRecord::default();
        let unknown = Ownership {
            claim: None,
            unknown: Some(Fault::new("nobody can tell", "say so")),
        };
        let notices = grandfather(&mut record, &unknown);
        assert!(
            notices[0].starts_with("nobody can tell; that nobody does"),
            "{notices:?}"
        );
        assert_eq!((record.rules, record.sole_user), (RULES, true));
        assert!(grandfather(&mut record, &unknown).is_empty());
        let mut local = DiskRecord::default();
        assert!(grandfather(&mut local, &Ownership::default()).is_empty());
        assert_eq!((local.rules, local.sole_user), (RULES, false));
    }

    #[test]
    fn one_that_hangs_keeps_no_other_from_being_given_up() {
        let workers = Workers::default();
        let (hang, hanging) = sync_channel::<()>(0);
        let spot = Spot::new("/a");
        let quick =
            |name: String| -> (String, Spot, Parting) { (name, spot.clone(), Box::new(|| ())) };
        let slow: Parting = Box::new(move || {
            let _ = hanging.recv();
        });
        let mut work = vec![("slow".to_owned(), spot.clone(), slow)];
        work.extend((0..40).map(|n| quick(n.to_string())));
        let left = side_by_side(&workers, work, Duration::from_secs(2));
        assert_eq!(left.into_iter().collect::<Vec<_>>(), ["slow"]);
        drop(hang);
        let rest = vec![quick("a".to_owned())];
        assert!(side_by_side(&workers, rest, Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn what_is_being_given_up_is_not_claimed() {
        let mut owners = Owners::new("pool".to_owned(), "host".to_owned(), Arc::default());
        owners.patience = Duration::ZERO;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o");
        std::fs::write(&path, [0; 4096]).unwrap();
        let record = DiskRecord {
            origin: path.display().to_string(),
            ..DiskRecord::default()
        };
        let spec = crate::origin::parse(&record.origin).unwrap();
        let part = owners.parting(&record, None).unwrap();
        let claimed = owners.claim(&spec, &record, Take::Free);
        assert!(matches!(claimed, Err(ClaimError::Unavailable { .. })));
        part();
        owners.claim(&spec, &record, Take::Free).unwrap();
    }
}
