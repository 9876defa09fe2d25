//! Does what an origin holds fit what is cached of it, and if not: which side wins?
//!
//! Here an origin is opened and compared with what is known of it ([`Daemon::look`], which may take as long as it
//! likes), and then judged. Where something that a guest wrote is on one side only, nothing is decided for its owner: the
//! disk is refused until somebody says whom to trust.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, OnStart, OriginIdentity};
use hearth_io::{Device, OriginSpec};
use hearth_origin::Backing;
use hearth_origin::owner::{ClaimError, Take};

use super::Opened;
use super::verify::Check;
use crate::api::types::Trust;
use crate::claims::Claim;
use crate::compare;
use crate::daemon::admission;
use crate::daemon::chains::check_chain_names;
use crate::daemon::{Daemon, lock};
use crate::degraded::Dirty;
use crate::error::{Error, Result};
use crate::origin;
use crate::size::human;

/// Longest comparison of a sample with an origin that does not show whether it changed.
const CHECK_TIME: Duration = Duration::from_secs(20);
/// The same for a file after a crash: its inode and size show most changes.
const FILE_TIME: Duration = Duration::from_secs(3);

/// Longest comparison with a file whose time of change alone is another, before it is served.
const TOUCHED_TIME: Duration = Duration::from_secs(5);

/// What looking at an origin has shown.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Why it is not what the cache believes, if so.
    pub(super) differs: Option<String>,
    /// Why it is taken for unchanged although something about it is not as it was.
    pub(super) notice: Option<String>,
    /// What is said of the bytes of a disk that is older than the rules.
    pub(super) old: Option<String>,
    /// Every clean cached block equals it.
    pub(super) clean_fits: bool,
    /// What identifies its block device; empty if nothing does.
    pub(super) device: String,
    /// True if the only finding is that the origin could not be read.
    pub(super) is_unread: bool,
    /// Nothing shows whether it changed: clean copies count when a sample of them was compared with it, for at most
    /// this long.
    pub(super) doubt: Option<Duration>,
}

/// What becomes of a disk whose origin was opened and judged, but is not served yet.
pub(super) struct Judged {
    pub(super) record: DiskRecord,
    pub(super) notices: Vec<String>,
    /// Dirty blocks must be in the origin before anybody may read.
    pub(super) reconcile: bool,
    /// The cache is off, and something dirty is still on flash.
    pub(super) leaving: bool,
    /// Clean copies have to be compared with the origin before they count.
    pub(super) check: Option<Check>,
}

impl Daemon {
    /// Opens an origin and compares it with what is known. Blocks.
    pub(super) fn look(
        &self,
        record: &DiskRecord,
        take: Take,
        trust: Option<Trust>,
    ) -> Result<Opened> {
        if record.fenced_at != 0 && trust.is_none() && take == Take::Free {
            return Err(self.fenced(record));
        }
        lock(&self.pool).check_confirmed(Claim::of_disk(record))?;
        let spec: OriginSpec = origin::parse(&record.origin)?;
        self.check_place(record)?;
        let rules = self.backing_of(record);
        let chain = origin::chain(&spec, &rules);
        self.note_chain(record.id, chain.is_err());
        let chain = chain?;
        let pool = lock(&self.pool);
        let clash = check_chain_names(&pool, &record.name, &spec, &chain, record.read_only);
        drop(pool);
        let backing = Backing {
            known: Some(chain.clone()),
            hold_bases: clash.is_ok(),
            ..rules
        };
        let mut ownership = self.owners.claim(&spec, record, take).map_err(|e| {
            if matches!(e, ClaimError::Owned { .. }) {
                // Whatever becomes of that owner: it has gone on where we had stopped.
                if let Err(e) = self.note_fenced(record.id, &record.name) {
                    tracing::error!(disk = %record.name, "cannot note that its origin is another's: {e}");
                }
            }
            admission::failure(&e)
        })?;
        if take == Take::Free && trust.is_none() {
            self.check_still_ours(record, &ownership)?;
        }
        // The disk is in the registry, perhaps with something dirty on flash: so is its owner's record to
        // stay, whatever comes of this attempt.
        if let Some(claim) = &mut ownership.claim {
            claim.keep();
        }
        let device = self.open_origin(&spec, record, backing, false)?;
        ownership.confirm(&spec)?;
        let identity = origin::identity(&device);
        // Of one that is too small nothing more need be known.
        // What flash alone has cannot differ from anything.
        let mut looks = if device.size() >= record.size && !record.is_flash_only() {
            self.compared(record, &device, identity.as_ref())
        } else {
            Looks::default()
        };
        if looks.is_unread && trust.is_none() {
            return Err(Error::unavailable(
                format!(
                    "the origin {} cannot be read, and writes of the guest wait on flash",
                    record.origin
                ),
                "see why its device or server returns errors; the disk attaches by itself when it can be read",
            ));
        }
        if record.rules == 0 {
            looks.old = origin::plain_notice(&spec);
        }
        if looks.differs.is_some() && trust == Some(Trust::Flash) {
            let all = self.subject(record.id, &device).all();
            looks.clean_fits = all.is_complete() && all.differs.is_none();
        }
        Ok(Opened::looked_at(device, identity, looks, chain, ownership))
    }

    /// Refuses a disk with dirty blocks whose owner's record is gone from shared storage. This pool leaves its record there
    /// over stops and crashes: another host took the disk over, and removed it since.
    fn check_still_ours(&self, record: &DiskRecord, ownership: &super::Ownership) -> Result<()> {
        let is_new = ownership
            .claim
            .as_ref()
            .is_some_and(hearth_origin::owner::Claim::is_new);
        let owed = self.engine.status(record.id).unwrap_or_default();
        if !is_new || owed.owed_blocks() == 0 {
            return Ok(());
        }
        tracing::warn!(disk = %record.name, "the record that this pool owns the origin is gone: another host has used the disk");
        // Durable before this claim is given up: the next start must not find a record of ours and go on.
        let record = self.note_fenced(record.id, &record.name)?;
        Err(self.fenced(&record))
    }

    /// Says what becomes of an origin that was looked at. Drops clean blocks that may be old.
    pub(super) fn judge(
        &self,
        opened: &Opened,
        mut record: DiskRecord,
        trust: Option<Trust>,
    ) -> Result<Judged> {
        let Opened {
            device,
            identity: now,
            looks,
            ownership,
            chain,
            ..
        } = opened;
        let voided = self.disks.lock().by_id(record.id).and_then(|s| s.voided);
        record.since_seq = record.since_seq.max(voided.unwrap_or(0));
        let size = device.size();
        let path = device.name();
        if size < record.size {
            return Err(Error::refused(
                format!(
                    "the origin {path} shrank from {} to {size} bytes",
                    record.size
                ),
                "give it its size back, and the disk attaches by itself; or, to lose what is cached, `hearth disk remove` it with --discard-dirty and add it again",
            ));
        }
        let status = self.engine.status(record.id).unwrap_or_default();
        let dirty = status.owed_blocks();
        let degraded = self.flash.degraded();
        if let Some(degraded) = degraded.filter(|_| record.is_flash_only()) {
            return Err(Error::refused(
                format!("it lives on flash, which is not used: {}", degraded.why),
                "the disk is served again when the daemon is started with its flash in use",
            ));
        }
        if let Some(degraded) = degraded.filter(|d| dirty > 0 && d.dirty == Dirty::Refuse) {
            return Err(Error::refused(
                format!(
                    "{} written by the guest wait on flash, which is not used: {}",
                    human(dirty * hearth_io::BLOCK),
                    degraded.why
                ),
                "the disk is served again when the daemon is started with its flash in use",
            ));
        }
        let mut notices = Vec::new();
        if record.void {
            notices.push(super::super::homeless::VOID.to_owned());
        }
        notices.extend(self.kept_back(&record, trust)?);
        if record.rules == 0 {
            notices.extend(looks.old.clone());
            notices.extend(self.admit_old(&mut record, chain.clone()));
        }
        notices.extend(admission::grandfather(&mut record, ownership));
        notices.extend(looks.notice.clone());
        let mut reconcile = false;
        let fenced = (record.fenced_at != 0).then(|| {
            format!(
                "it was another host's since {}",
                hearth_origin::owner::utc(record.fenced_at)
            )
        });
        if let Some(why) = fenced.as_ref().or(looks.differs.as_ref()) {
            match (dirty, trust) {
                (1.., None) => {
                    return Err(Error::refused(
                        format!(
                            "the origin {path} does not fit the cache: {why}, while {} written by the guest wait on flash",
                            human(dirty * hearth_io::BLOCK)
                        ),
                        which_side(&record),
                    ));
                }
                (1.., Some(Trust::Flash)) => {
                    reconcile = true;
                    let clean = if looks.clean_fits {
                        "what else was cached equals the origin and stays"
                    } else {
                        "what else was cached goes, for it may be older than the origin"
                    };
                    notices.push(format!(
                        "{why}; what waited on flash is written over it, as you said; {clean}"
                    ));
                }
                _ => {
                    record.since_seq = self.forget(record.id)?;
                    let lost = if dirty > 0 {
                        ", and what waited on flash thrown away, as you said"
                    } else {
                        ""
                    };
                    notices.push(format!("the origin changed while Hearth was not looking ({why}); its cache is dropped{lost}"));
                }
            }
        } else if size > record.size {
            notices.push(format!(
                "the origin grew from {} to {}",
                human(record.size),
                human(size)
            ));
        }
        if size > record.size && self.engine.status(record.id).is_some() {
            // Before the registry knows: after a crash nothing else says that the last block is padded.
            let what = format!("take over the size of {path}");
            self.at_rest(&what, || self.engine.void_padding(record.id, size))?;
        }
        let check = looks.doubt.filter(|_| degraded.is_none());
        let check = check.map(|time| Check {
            owed: dirty > 0,
            drop: record.on_start == OnStart::Drop,
            time,
        });
        record.fenced_at = 0;
        record.size = size;
        record.origin_identity = *now;
        // Until its copies were compared, the next start has to ask the same question.
        record.clean_detach = now.is_some() && check.is_none();
        if !looks.device.is_empty() {
            record.device.clone_from(&looks.device);
        }
        // Until the last dirty block is durable in the origin, and the registry says so.
        let leaving = degraded.is_some() && dirty > 0;
        if reconcile || leaving {
            // Until that is done, a crash must lead back to the same question.
            origin::distrust(&mut record);
        }
        self.note_record(&record)?;
        Ok(Judged {
            record,
            notices,
            reconcile,
            leaving,
            check,
        })
    }

    fn subject<'a>(&'a self, id: DiskId, device: &'a Device) -> compare::Subject<'a> {
        compare::Subject {
            engine: &self.engine,
            id,
            device,
        }
    }

    /// Refuses a disk of which something was dirty on flash that is gone, unless somebody has said that its origin
    /// is to count; then that is noted, and said.
    fn kept_back(&self, record: &DiskRecord, trust: Option<Trust>) -> Result<Option<String>> {
        let pool = lock(&self.pool);
        let gone = pool.is_without_flash();
        let Some(beside) = pool.beside().cloned() else {
            return Ok(None);
        };
        drop(pool);
        let id = record.id;
        if !beside.says(|notes| notes.lost.contains(id) || gone && notes.dirty.contains(id)) {
            return Ok(None);
        }
        if trust != Some(Trust::Origin) {
            let (what, back) = match self.flash.degraded().filter(|_| gone) {
                Some(degraded) => (
                    degraded.why.clone(),
                    "if the flash can be brought back, put it back and restart the daemon; if it can still be read, `hearth rescue` saves what is on it; ",
                ),
                None => (
                    "another device has taken the place of its flash".to_owned(),
                    "if the old flash can still be read, `hearth rescue` saves what is on it; ",
                ),
            };
            let upto = beside
                .ordered_upto(id, record.serial)
                .filter(|_| record.mode == hearth_format::CacheMode::WriteBackOrdered);
            let go_on = format!("`hearth disk set {} --trust origin`", record.name);
            return Err(Error::refused(
                format!(
                    "something written by the guest may have been on flash only, and is not there any more: {what}{}",
                    upto.map_or_else(String::new, |upto| format!(
                        "; its origin holds everything that was flushed up to {}, as after a power cut",
                        hearth_events::time::utc(upto)
                    ))
                ),
                match record.is_flash_only() {
                    _ if upto.is_some() => format!(
                        "{back}to go on with what the origin holds, all of it of one time: {go_on}"
                    ),
                    true => format!(
                        "{back}to go on with an empty disk: `hearth disk set {} --trust origin`",
                        record.name
                    ),
                    false => format!(
                        "{back}to go on with what the origin has, which may be an older state in any of its parts: `hearth disk set {} --trust origin`",
                        record.name
                    ),
                },
            ));
        }
        let noted = beside.note(|notes| {
            notes.lost.remove(id);
            if gone {
                notes.dirty.remove(id);
                notes.left.insert(id);
            }
        });
        noted.map_err(|e| beside.unwritten(e, "put that right, and try again"))?;
        // What is noted of its origin is of before.
        if let Err(e) = beside.note_order(&[(id, record.serial, 0)]) {
            tracing::warn!("{}: {e}", beside.path().display());
        }
        Ok(Some(
            "what was only on the flash that is gone is given up, as you said".to_owned(),
        ))
    }

    /// True if something of a disk was dirty on flash that is gone.
    pub(in crate::daemon) fn is_kept_back(&self, record: &DiskRecord) -> bool {
        self.kept_back(record, None).is_err()
    }

    /// Whether the origin is what the cache believes.
    fn compared(
        &self,
        record: &DiskRecord,
        device: &Device,
        now: Option<&OriginIdentity>,
    ) -> Looks {
        let mut looks = Looks {
            device: origin::device_identity(record),
            ..Looks::default()
        };
        let status = self.engine.status(record.id).unwrap_or_default();
        let owed = status.owed_blocks();
        if status.cached_blocks + status.zero_blocks == 0 {
            return looks;
        }
        let now = now.map(|now| origin::as_recorded(device, record.rules, *now));
        let times = record.origin_identity.as_ref().zip(now.as_ref());
        let difference = times.and_then(|(then, now)| {
            origin::difference(then, now, device.is_device(), record.clean_detach)
        });
        let touched = difference.as_ref().is_some_and(|d| d.touched);
        looks.notice = difference.as_ref().filter(|_| touched).map(|d| {
            format!(
                "{}; cached blocks are compared with it before they count",
                d.said
            )
        });
        if let Some(difference) = difference.filter(|d| !d.touched) {
            looks.differs = Some(difference.said);
            return looks;
        }
        let is_named = !record.device.is_empty() && !looks.device.is_empty();
        if is_named && !hearth_io::identity::is_same(&record.device, &looks.device) {
            looks.differs = Some(format!(
                "it is another device: {}, which was {}",
                looks.device, record.device
            ));
            return looks;
        }
        let is_known = is_named && !hearth_io::identity::is_position(&looks.device);
        let is_file = origin::has_times(record, device, now.as_ref());
        let shows = is_file || self.handed_over.load(Ordering::Relaxed);
        if shows && record.clean_detach && !touched || record.on_start == OnStart::Keep {
            return looks;
        }
        let subject = self.subject(record.id, device);
        let found = match owed {
            0 => subject.marks(),
            // Something has happened to it. Better late than with the dirty blocks of another content.
            _ if touched => subject.thorough(Instant::now() + TOUCHED_TIME, |_, _| true),
            // Dirty blocks must not be served together with another disk's content.
            _ => subject.brief(),
        };
        if let Some(offset) = found.differs {
            let known = times.filter(|_| is_file);
            let since = known.map(|(then, now)| format!(" (it was {})", origin::since(then, now)));
            looks.differs = Some(format!(
                "its content at offset {offset} is not what was left there{}",
                since.unwrap_or_default()
            ));
        } else if owed > 0 && found.equal == 0 && !is_file && !is_known && record.mirror.is_none() {
            looks.is_unread = found.unread > 0;
            looks.differs = Some(
                "nothing shows that it is the same disk: it has no serial number or other identity of its own, and none of its cached blocks could be compared".to_owned(),
            );
        } else {
            looks.doubt = Some(match is_file && !touched {
                true => FILE_TIME,
                false => CHECK_TIME,
            });
        }
        looks
    }
}

/// What to do about a disk whose origin and flash do not fit: which answer fits which story.
pub(super) fn which_side(record: &DiskRecord) -> String {
    let likely = if origin::is_distrusted(record) {
        " (if the flash failed while serving, guests went on writing to the origin, so that it is \
         right unless something was still dirty or lost at the stop; if an earlier choice of the \
         flash was cut short, choose it again)"
    } else {
        ""
    };
    format!(
        "say which side wins; until then nothing is written. If the origin was only copied, moved, \
         or restored to just the state Hearth left it in: `hearth disk set {name} --trust flash` \
         writes what waits over it. If a VM or a tool wrote it meanwhile, or an older copy was \
         restored and is what you want: `hearth disk set {name} --trust origin` throws what waits \
         away{likely}",
        name = record.name
    )
}
