//! The claims of a pool about the world outside it, and those that this host's administrator confirmed.
//!
//! A pool moves between hosts, and anything can have been written into it elsewhere. So the origin of a disk and the
//! directories, address and clients of a datastore have no effect on a host until its administrator has confirmed them:
//! with the command that set them there, or with `hearth pool import --accept`.
//!
//! A claim is confirmed as a whole: a directory that was confirmed for clients of this host is another claim than the same
//! directory for all networks. The confirmed claims of a pool are in the file `claims/POOL` of the state directory, one change a
//! line: `+` or `-` and the claim as JSON. A claim is stored there before it is stored in the pool.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use hearth_format::{DatastoreRecord, DiskRecord, Registry, SharedRecord, Uuid};
use hearth_io::file::sync_names;
use serde::{Deserialize, Serialize};

use crate::api::types::PoolClaim;
use crate::beside::Beside;
use crate::error::{Error, Result};
use crate::rundir::make_private_for;

/// Superfluous lines with which a file is opened without being written anew.
const SPARE_LINES: usize = 1024;

/// The claim of one disk or datastore about the world outside the pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Claim {
    /// A disk with an origin.
    Disk {
        name: String,
        origin: String,
        read_only: bool,
        /// The record says that nothing else writes the origin.
        sole_user: bool,
        /// The files below the origin's image; `None`: whichever files the image names.
        backing: Option<Vec<String>>,
    },
    /// A datastore.
    Datastore {
        name: String,
        directories: Vec<String>,
        read_only: bool,
        listen: String,
        clients: Vec<String>,
    },
}

impl Claim {
    /// The claim of a disk, if it has one. Flash-only disks reach nothing, and files of a datastore nothing but that.
    pub(crate) fn of_disk(record: &DiskRecord) -> Option<Claim> {
        if record.is_file() || record.is_flash_only() {
            return None;
        }
        let below = || match record.allow_backing {
            true => record.chain.clone(),
            false => Vec::new(),
        };
        Some(Claim::Disk {
            name: record.name.clone(),
            origin: record.origin.clone(),
            read_only: record.read_only,
            sole_user: record.sole_user,
            // Before there were rules an image could name any file.
            backing: (record.rules > 0).then(below),
        })
    }

    /// The claim of a datastore.
    pub(crate) fn of_datastore(record: &DatastoreRecord) -> Claim {
        let directories = [&record.directory, &record.mirror].into_iter();
        let directories = directories.filter(|path| !path.is_empty());
        Claim::Datastore {
            name: record.name.clone(),
            directories: directories.cloned().collect(),
            read_only: record.read_only,
            listen: record.listen.clone(),
            clients: record.clients.clone(),
        }
    }

    /// All claims of a registry.
    pub(crate) fn all(registry: &Registry) -> impl Iterator<Item = Claim> {
        let disks = registry.disks.iter();
        let disks = disks.filter_map(|record| Claim::of_disk(record));
        disks.chain(datastores(registry))
    }

    /// `disk NAME` or `datastore NAME`.
    fn of(&self) -> String {
        match self {
            Claim::Disk { name, .. } => format!("disk {name}"),
            Claim::Datastore { name, .. } => format!("datastore {name}"),
        }
    }

    /// The claim as a sentence.
    fn reaches(&self) -> String {
        let access = |read_only: bool| match read_only {
            true => "read-only",
            false => "read-write",
        };
        match self {
            Claim::Disk {
                origin,
                read_only,
                sole_user,
                backing,
                ..
            } => {
                let backing = match backing.as_deref() {
                    Some([]) => String::new(),
                    Some(files) => format!(", with the files below it: {}", files.join(", ")),
                    None => ", with any files that it names".to_owned(),
                };
                let sole = match sole_user {
                    true => ", without a check for other hosts (--sole-user)",
                    false => "",
                };
                format!("{origin} {}{backing}{sole}", access(*read_only))
            }
            Claim::Datastore {
                directories,
                read_only,
                listen,
                clients,
                ..
            } => format!(
                "{} {}, on {listen}, for {}",
                directories.join(" and "),
                access(*read_only),
                match clients.as_slice() {
                    [] => "no clients".to_owned(),
                    clients => clients.join(" "),
                }
            ),
        }
    }

    /// Why a disk or datastore is not used.
    pub(crate) fn refused(&self) -> Error {
        Error::refused(
            format!(
                "the pool names {} for {}, and the administrator of this host has not confirmed that",
                self.reaches(),
                self.of()
            ),
            "if this host is to use what `hearth pool show` lists as not confirmed, confirm all of it with `hearth pool import --accept` (while no daemon serves the pool, with --flash)",
        )
    }
}

/// The claims of its datastores. A record that cannot be read is not served.
fn datastores(registry: &Registry) -> impl Iterator<Item = Claim> {
    let all = registry.datastores().unwrap_or_default().into_iter();
    all.map(|record| Claim::of_datastore(&record))
}

/// The effect of a registry change on its claims.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    /// Claims made by this change, in place of none or of a confirmed one.
    made: Vec<Claim>,
    /// Confirmed claims that the registry does not make any more.
    ended: Vec<Claim>,
}

/// The confirmed claims of a pool on this host.
#[derive(Debug)]
pub(crate) struct Confirmed {
    path: PathBuf,
    claims: HashSet<Claim>,
    /// The file is there, and has them.
    stored: bool,
}

impl Confirmed {
    /// Those of `pool` in a state directory, to be looked at. Of a pool that an earlier version served here, all claims are
    /// confirmed that were noted beside its flash.
    pub(crate) fn look(state_dir: &Path, pool: &Uuid) -> Result<Confirmed> {
        Ok(Confirmed::load(state_dir, pool)?.0)
    }

    /// The same, to be changed. Where the file cannot be made, they count for this run, and the next change makes it.
    pub(crate) fn open(state_dir: &Path, pool: &Uuid) -> Result<Confirmed> {
        let (mut confirmed, lines) = Confirmed::load(state_dir, pool)?;
        if lines.is_none_or(|lines| lines > confirmed.claims.len() + SPARE_LINES) {
            match confirmed.write_anew() {
                Ok(()) => confirmed.stored = true,
                Err(e) => tracing::error!("{e}"),
            }
        }
        Ok(confirmed)
    }

    /// True if a later start finds them. Until then what an earlier version noted beside the flash is taken for them.
    pub(crate) fn is_stored(&self) -> bool {
        self.stored
    }

    /// The number of lines is `None` if there is no file.
    fn load(state_dir: &Path, pool: &Uuid) -> Result<(Confirmed, Option<usize>)> {
        let path = state_dir.join("claims").join(pool.to_string());
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let known = Beside::look(state_dir, pool)?.map(|beside| beside.registry());
                let claims = known.iter().flat_map(Claim::all).collect();
                let stored = false;
                return Ok((
                    Confirmed {
                        path,
                        claims,
                        stored,
                    },
                    None,
                ));
            }
            Err(e) => {
                return Err(Error::unavailable(
                    format!("cannot read {}: {e}", path.display()),
                    "see why; until it can be read nothing that the pool names outside it is used",
                ));
            }
        };
        let mut claims = HashSet::new();
        let mut lines = 0;
        for line in text.split(|byte| *byte == b'\n').filter(|l| !l.is_empty()) {
            lines += 1;
            let (sign, claim) = line.split_at(1);
            // The last store may have been cut short.
            let Ok(claim) = serde_json::from_slice::<Claim>(claim) else {
                continue;
            };
            match sign {
                b"+" => drop(claims.insert(claim)),
                b"-" => drop(claims.remove(&claim)),
                _ => {}
            }
        }
        let stored = true;
        let confirmed = Confirmed {
            path,
            claims,
            stored,
        };
        Ok((confirmed, Some(lines)))
    }

    /// True if this is confirmed.
    pub(crate) fn has(&self, claim: &Claim) -> bool {
        self.claims.contains(claim)
    }

    /// What becomes of a pool's claims when its registry changes on this host. A claim that takes the place of one that is
    /// not confirmed is not confirmed either: a command confirms what it says, and not what a foreign pool said before.
    pub(crate) fn follow(&self, old: &Registry, new: &Registry) -> Changed {
        let mut changed = Changed::default();
        let mut note = |before: Option<Claim>, after: Option<Claim>| {
            if before == after {
                return;
            }
            let is_confirmed = before.as_ref().is_none_or(|claim| self.has(claim));
            changed.made.extend(after.filter(|_| is_confirmed));
            changed.ended.extend(before.filter(|_| is_confirmed));
        };
        // A record keeps its place or is taken out, see `Named::follow`.
        let mut at = 0;
        let mut came: Vec<&SharedRecord> = Vec::new();
        for was in &old.disks {
            match new.disks.get(at) {
                Some(is) if is.is(was) => at += 1,
                Some(is) if is.id == was.id => {
                    at += 1;
                    came.push(is);
                }
                _ if new.by_id(was.id).is_none() => note(Claim::of_disk(was), None),
                _ => {}
            }
        }
        came.extend(new.disks.get(at..).unwrap_or_default());
        for is in came {
            let before = old.by_id(is.id).and_then(Claim::of_disk);
            note(before, Claim::of_disk(is));
        }
        if old.unknown_records != new.unknown_records {
            let before: Vec<Claim> = datastores(old).collect();
            let after: Vec<Claim> = datastores(new).collect();
            for was in before
                .iter()
                .filter(|was| !after.iter().any(|is| is.of() == was.of()))
            {
                note(Some(was.clone()), None);
            }
            for is in after {
                let was = before.iter().find(|was| was.of() == is.of());
                note(was.cloned(), Some(is));
            }
        }
        changed
    }

    /// Confirms the claims that a change makes, durably when it returns `Ok`.
    pub(crate) fn begin(&mut self, changed: &Changed) -> Result<()> {
        self.confirm(changed.made.clone())
    }

    /// Takes back what is not claimed any more after a change.
    pub(crate) fn end(&mut self, changed: Changed) {
        let ended: Vec<Claim> = changed.ended.into_iter().filter(|c| self.has(c)).collect();
        for claim in &ended {
            self.claims.remove(claim);
        }
        if let Err(e) = self.store('-', &ended) {
            // They stay confirmed for this pool, which does not make them.
            tracing::warn!("{e}");
        }
    }

    /// Confirms claims, durably when it returns `Ok`.
    pub(crate) fn confirm(&mut self, mut claims: Vec<Claim>) -> Result<()> {
        claims.retain(|claim| !self.has(claim));
        self.claims.extend(claims.iter().cloned());
        self.store('+', &claims).inspect_err(|_| {
            for claim in &claims {
                self.claims.remove(claim);
            }
        })
    }

    /// Stores a change that was made.
    fn store(&mut self, sign: char, claims: &[Claim]) -> Result<()> {
        if claims.is_empty() {
            return Ok(());
        }
        if !self.stored {
            self.write_anew()?;
            self.stored = true;
            return Ok(());
        }
        // What is left of a store that was cut short ends here.
        let mut text = b"\n".to_vec();
        self.lines(sign, claims, &mut text)
            .and_then(|()| {
                let mut file = OpenOptions::new()
                    .append(true)
                    .custom_flags(libc::O_NOFOLLOW)
                    .open(&self.path)?;
                file.write_all(&text)?;
                file.sync_data()
            })
            .map_err(|e| self.unwritten(e))
    }

    /// All of it, in place of what is there.
    fn write_anew(&self) -> Result<()> {
        self.make_dir()?;
        let new = self.path.with_extension("new");
        let mut text = Vec::new();
        self.lines('+', &self.claims, &mut text)
            .and_then(|()| {
                let mut file = create(&new)?;
                file.write_all(&text)?;
                file.sync_all()?;
                std::fs::rename(&new, &self.path)?;
                sync_names(&self.path)
            })
            .map_err(|e| self.unwritten(e))
    }

    fn lines<'a>(
        &self,
        sign: char,
        claims: impl IntoIterator<Item = &'a Claim>,
        text: &mut Vec<u8>,
    ) -> io::Result<()> {
        for claim in claims {
            write!(text, "{sign}")?;
            serde_json::to_writer(&mut *text, claim)?;
            text.push(b'\n');
        }
        Ok(())
    }

    fn make_dir(&self) -> Result<()> {
        let dir = self.path.parent().unwrap_or(&self.path);
        make_private_for(dir, 0o700, "--state-dir")
    }

    fn unwritten(&self, e: io::Error) -> Error {
        Error::unavailable(
            format!(
                "cannot note in {} what was confirmed: {e}",
                self.path.display()
            ),
            "make room there, or name another directory with --state-dir",
        )
    }

    /// The claims of a registry, as they are reported.
    pub(crate) fn report(&self, registry: &Registry) -> Vec<PoolClaim> {
        let report = |claim: Claim| PoolClaim {
            of: claim.of(),
            reaches: claim.reaches(),
            confirmed: self.has(&claim),
        };
        Claim::all(registry).map(report).collect()
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: Uuid = Uuid::from_u128(7);

    fn disk(id: u16, name: &str, origin: &str) -> DiskRecord {
        DiskRecord {
            id,
            name: name.to_owned(),
            origin: origin.to_owned(),
            rules: 1,
            ..DiskRecord::default()
        }
    }

    fn registry(disks: &[DiskRecord], datastores: &[DatastoreRecord]) -> Registry {
        let mut registry = Registry {
            disks: disks.iter().cloned().map(Into::into).collect(),
            ..Registry::default()
        };
        for record in datastores {
            registry.put_datastore(record).unwrap();
        }
        registry
    }

    fn datastore(directory: &str, clients: &[&str]) -> DatastoreRecord {
        DatastoreRecord {
            name: "vms".to_owned(),
            directory: directory.to_owned(),
            listen: "127.0.0.1:2049".to_owned(),
            clients: clients.iter().map(|&c| c.to_owned()).collect(),
            ..DatastoreRecord::default()
        }
    }

    /// As `Pool::change` does it.
    fn change(confirmed: &mut Confirmed, old: &Registry, new: &Registry) {
        let changed = confirmed.follow(old, new);
        confirmed.begin(&changed).unwrap();
        confirmed.end(changed);
    }

    fn open_claims(confirmed: &Confirmed, registry: &Registry) -> Vec<String> {
        let all = confirmed.report(registry).into_iter();
        all.filter(|c| !c.confirmed).map(|c| c.of).collect()
    }

    #[test]
    fn claims_made_here_stay_confirmed_and_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut confirmed = Confirmed::open(dir.path(), &POOL).unwrap();
        let empty = Registry::default();
        let store = datastore("/srv/vms", &["10.0.0.0/8=rw"]);
        let full = registry(&[disk(1, "a", "/srv/a"), disk(2, "b", "/srv/b")], &[store]);
        change(&mut confirmed, &empty, &full);
        let again = Confirmed::open(dir.path(), &POOL).unwrap();
        assert_eq!(open_claims(&again, &full), [""; 0]);
        let wider = datastore("/srv/vms", &["0.0.0.0/0=rw"]);
        let next = registry(&[disk(2, "b", "/srv/b")], &[wider]);
        change(&mut confirmed, &full, &next);
        let again = Confirmed::open(dir.path(), &POOL).unwrap();
        assert_eq!(open_claims(&again, &next), [""; 0]);
        // What was given up here is not confirmed if it comes back from elsewhere.
        assert_eq!(open_claims(&again, &full), ["disk a", "datastore vms"]);
    }

    /// A command on this host confirms what it says, and not the rest of a foreign record.
    #[test]
    fn change_of_an_unconfirmed_record_confirms_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut confirmed = Confirmed::open(dir.path(), &POOL).unwrap();
        let foreign = registry(
            &[disk(1, "a", "/etc/shadow")],
            &[datastore("/", &["::/0=rw"])],
        );
        let mut quiet = disk(1, "a", "/etc/shadow");
        quiet.sole_user = true;
        let narrow = datastore("/", &["127.0.0.1=ro"]);
        let next = registry(&[quiet, disk(2, "b", "/srv/b")], &[narrow]);
        change(&mut confirmed, &foreign, &next);
        assert_eq!(open_claims(&confirmed, &next), ["disk a", "datastore vms"]);
    }

    #[test]
    fn every_part_of_a_claim_counts() {
        let dir = tempfile::tempdir().unwrap();
        let mut confirmed = Confirmed::open(dir.path(), &POOL).unwrap();
        let known = disk(1, "a", "qcow2:/srv/a");
        confirmed
            .confirm(Claim::of_disk(&known).into_iter().collect())
            .unwrap();
        let with = |change: &dyn Fn(&mut DiskRecord)| {
            let mut record = known.clone();
            change(&mut record);
            Claim::of_disk(&record).is_none_or(|claim| confirmed.has(&claim))
        };
        assert!(with(&|_| ()));
        assert!(with(&|r| r.size = 4096));
        assert!(with(&|r| r.home = hearth_format::Home::Flash));
        assert!(with(&|r| r.home = hearth_format::Home::Moving));
        assert!(!with(&|r| r.origin = "qcow2:/srv/b".to_owned()));
        assert!(!with(&|r| r.read_only = true));
        assert!(!with(&|r| r.sole_user = true));
        assert!(!with(&|r| r.rules = 0));
        assert!(!with(&|r| {
            r.allow_backing = true;
            r.chain = vec!["/etc/shadow".to_owned()];
        }));
    }

    #[test]
    fn store_cut_short_loses_only_itself() {
        let dir = tempfile::tempdir().unwrap();
        let mut confirmed = Confirmed::open(dir.path(), &POOL).unwrap();
        let all = registry(&[disk(1, "a", "/srv/a"), disk(2, "b", "/srv/b")], &[]);
        let claim = |at: usize| Claim::of_disk(&all.disks[at]).into_iter().collect();
        confirmed.confirm(claim(0)).unwrap();
        let path = dir.path().join("claims").join(POOL.to_string());
        let mut file = OpenOptions::new().append(true).open(path).unwrap();
        file.write_all(b"\n+{\"disk\":{\"na").unwrap();
        let mut confirmed = Confirmed::open(dir.path(), &POOL).unwrap();
        confirmed.confirm(claim(1)).unwrap();
        let again = Confirmed::open(dir.path(), &POOL).unwrap();
        assert_eq!(open_claims(&again, &all), [""; 0]);
    }
}
