//! What lies below a disk's image: who has allowed it, and who else uses it.
//!
//! A base that several overlays only read is no harm. One that another disk writes changes under
//! its overlays, and an overlay's data file that is also a disk of its own has two writers. So
//! the files of every chain are compared with the origins and chains of all other disks, in both
//! directions, before a disk is added or its chain is taken over.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, SharedRecord};
use hearth_io::OriginSpec;
use hearth_io::beneath::{Beneath, beneath};
use hearth_origin::{Backing, files_of};

use hearth_origin::owner::Take;

use super::admission::FIRST_RULES;
use super::{Daemon, lock};
use crate::claims::Claim;
use crate::error::{Error, Result};
use crate::origin;
use crate::pool::Pool;

/// Refuses directories for files below images that are none.
pub(super) fn check_dirs(dirs: &[PathBuf]) -> Result<()> {
    for dir in dirs {
        let found = dir.is_absolute() && dir.is_dir();
        if !found {
            return Err(Error::invalid(
                format!("{} is no directory", dir.display()),
                "name with --backing-dir the directories in which files below images may lie",
            ));
        }
    }
    Ok(())
}

/// A file or device that a disk uses.
struct Use {
    path: PathBuf,
    /// The disk writes it.
    written: bool,
    /// It lies below the disk's image.
    below: bool,
}

/// All that a disk uses on this host.
fn uses(spec: &OriginSpec, chain: &[String], read_only: bool) -> Vec<Use> {
    let parts = hearth_origin::parts(spec).into_iter();
    let own = parts
        .filter_map(|part| hearth_origin::local_path(&part))
        .map(|path| Use {
            path,
            written: !read_only,
            below: false,
        });
    let files = files_of(chain).into_iter().map(|(path, written)| Use {
        path,
        written: written && !read_only,
        below: true,
    });
    own.chain(files).collect()
}

/// The uses of every other disk, by name.
fn others(records: &[SharedRecord], name: &str) -> Vec<(String, Vec<Use>)> {
    records
        .iter()
        .filter(|record| record.name != name)
        .filter_map(|record| {
            let spec = origin::parse(&record.origin).ok()?;
            let uses = uses(&spec, &record.chain, record.read_only);
            Some((record.name.clone(), uses))
        })
        .collect()
}

/// Why two disks cannot both be served.
fn clash(mine: &Use, theirs: &Use, name: &str) -> Error {
    let path = mine.path.display();
    let what = match (mine.below, theirs.below) {
        (true, false) => {
            format!("{path}, which lies below the image, is the origin of disk {name}")
        }
        (false, _) => format!("{path} lies below the image of disk {name}"),
        (true, true) => {
            format!(
                "{path}, which lies below the image, lies below that of disk {name} as well, and one of them writes it"
            )
        }
    };
    Error::conflict(
        what,
        "two disks cannot share what one of them writes: remove the other disk first, make one of them --read-only, or give the image a base of its own",
    )
}

/// The first file two disks share that one of them writes. Of two origins nothing is said here:
/// that is judged before.
fn first_clash(
    mine: &[Use],
    others: &[(String, Vec<Use>)],
    same: &dyn Fn(&Path, &Path) -> bool,
) -> Option<Error> {
    for (name, theirs) in others {
        for a in mine {
            let shared = theirs.iter().find(|b| {
                (a.below || b.below) && (a.written || b.written) && same(&a.path, &b.path)
            });
            if let Some(b) = shared {
                return Some(clash(a, b, name));
            }
        }
    }
    None
}

/// Refuses what the disk `name` would share with another that writes it, or that it would write, going
/// by names alone: nothing is waited for.
pub(super) fn check_chain_names(
    pool: &Pool,
    name: &str,
    spec: &OriginSpec,
    chain: &[String],
    read_only: bool,
) -> Result<()> {
    let mine = uses(spec, chain, read_only);
    first_clash(&mine, &others(&pool.near(spec, chain), name), &|a, b| {
        a == b
    })
    .map_or(Ok(()), Err)
}

impl Daemon {
    /// What may lie below the image of a disk.
    pub(super) fn backing_of(&self, record: &DiskRecord) -> Backing {
        let dirs = self.backing_dirs.clone();
        if record.rules == 0 {
            return Backing {
                allowed: true,
                dirs,
                known: None,
                hold_bases: false,
                unconfined: true,
            };
        }
        Backing {
            allowed: record.allow_backing,
            dirs,
            known: Some(record.chain.clone()),
            hold_bases: true,
            unconfined: false,
        }
    }

    /// Notes whether a disk is refused for what lies below its image: then it is tried again.
    pub(super) fn note_chain(&self, id: DiskId, refused: bool) {
        if let Some(slot) = self.disks.lock().by_id_mut(id) {
            slot.chain_refused = refused;
        }
    }

    /// What lies below the image of a disk that is being added, or whose chain is taken over.
    pub(super) fn new_chain(&self, spec: &OriginSpec, allowed: bool) -> Result<Vec<String>> {
        if allowed && !hearth_origin::may_have_chain(spec) {
            return Err(Error::invalid(
                "--allow-backing is for images that can name other files, and this origin is none",
                "leave it out, or write the image as qcow2:PATH or vmdk:PATH",
            ));
        }
        let rules = Backing {
            allowed,
            dirs: self.backing_dirs.clone(),
            known: None,
            hold_bases: false,
            unconfined: false,
        };
        origin::chain(spec, &rules)
    }

    /// Refuses what the disk `name` would share with another that writes it, or that it would write.
    /// Looks at files; may hang with the mount one of them is on.
    pub(super) fn check_chain(
        &self,
        name: &str,
        spec: &OriginSpec,
        chain: &[String],
        read_only: bool,
    ) -> Result<()> {
        let pool = lock(&self.pool);
        // Most disks have no chain, and then there is nothing to compare.
        if chain.is_empty() && !pool.any_chain() {
            return Ok(());
        }
        let flash = pool.path().to_owned();
        let records = pool.registry().disks.clone();
        drop(pool);
        let all = others(&records, name);
        let look = |path: &Path| beneath(path).ok();
        let mine: Vec<(Use, Option<Beneath>)> = uses(spec, chain, read_only)
            .into_iter()
            .map(|u| {
                let below = look(&u.path);
                (u, below)
            })
            .collect();
        for (file, _) in mine.iter().filter(|(file, _)| file.below) {
            self.check_not_in_datastore(&file.path)?;
        }
        let of_flash = look(&flash);
        for (file, below) in mine.iter().filter(|(file, _)| file.below) {
            if let (Some(a), Some(b)) = (below, &of_flash)
                && a.overlaps(b)
            {
                return Err(Error::invalid(
                    format!(
                        "{}, which lies below the image, is the pool's own flash device",
                        file.path.display()
                    ),
                    "give the image a base of its own",
                ));
            }
        }
        let overlaps = |a: &Path, b: &Path| {
            let a = mine.iter().find(|(u, _)| u.path == a);
            match (a.and_then(|(_, below)| below.as_ref()), look(b)) {
                (Some(a), Some(b)) => a.overlaps(&b),
                _ => false,
            }
        };
        let uses: Vec<Use> = mine
            .iter()
            .map(|(u, _)| Use {
                path: u.path.clone(),
                ..*u
            })
            .collect();
        first_clash(&uses, &all, &overlaps).map_or(Ok(()), Err)
    }

    /// Takes over what lies below a disk's image now, and attaches the disk if that was in its way.
    pub(super) fn allow_backing(self: &Arc<Daemon>, name: &str) -> Result<()> {
        let record = self.with_record(name)?;
        lock(&self.pool).check_confirmed(Claim::of_disk(&record))?;
        let spec = origin::parse(&record.origin)?;
        let chain = self.new_chain(&spec, true)?;
        self.check_chain(name, &spec, &chain, record.read_only)?;
        let turn = self.turn_for(name)?;
        let id = turn.id();
        let served = self.with_slot(name, |slot| Ok(slot.device.is_some()))?;
        if served && !hearth_origin::is_same_chain(&chain, &record.chain) {
            return Err(Error::conflict(
                format!("the files below the image of {name} were changed while it is attached"),
                "put them back, or remove the disk and add it again",
            ));
        }
        let mut pool = lock(&self.pool);
        let read_only = pool.record(id).is_some_and(|r| r.read_only);
        check_chain_names(&pool, name, &spec, &chain, read_only)?;
        let record = pool.change(|registry| {
            let record = registry.by_id_mut(id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.allow_backing = true;
            record.chain = chain;
            // What the origin looked like was recorded under the rules before.
            record.rules = record.rules.max(FIRST_RULES);
            Ok(record.clone())
        })?;
        drop(pool);
        if served {
            return Ok(());
        }
        self.attach(&turn, record, None, Take::Free)
    }

    pub(super) fn with_record(&self, name: &str) -> Result<DiskRecord> {
        let id = self.with_slot(name, |slot| Ok(slot.id))?;
        let pool = lock(&self.pool);
        pool.record(id).cloned().ok_or_else(|| Error::no_disk(name))
    }

    /// Notes in the record of a disk that is older than the rules what it is today.
    pub(super) fn admit_old(&self, record: &mut DiskRecord, chain: Vec<String>) -> Vec<String> {
        let mut notices = Vec::new();
        if let Ok(spec) = origin::parse(&record.origin) {
            if !chain.is_empty() {
                let files = chain.join(", ");
                notices.push(format!(
                    "the image names other files of this host, which are followed as before and from now on must stay as they are: {files}"
                ));
            }
            let pool = lock(&self.pool);
            let clash = check_chain_names(&pool, &record.name, &spec, &chain, record.read_only);
            if let Err(e) = clash {
                notices.push(e.to_string());
            }
        }
        record.allow_backing |= !chain.is_empty();
        record.chain = chain;
        notices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, origin: &str, chain: &[&str]) -> SharedRecord {
        let record = DiskRecord {
            name: name.to_owned(),
            origin: origin.to_owned(),
            chain: chain.iter().map(|&line| line.to_owned()).collect(),
            ..DiskRecord::default()
        };
        record.into()
    }

    /// What an older version has added is served on, and what it is today is what it stays.
    #[test]
    fn a_disk_older_than_the_rules_keeps_its_chain() {
        use crate::api::server::Control;
        use crate::api::types::{DiskAdd, DiskState};
        use crate::daemon::{StopReason, testing};
        let has = |tool: &str| {
            let mut version = std::process::Command::new(tool);
            version.arg("--version").output().is_ok()
        };
        if !has("qemu-img") || !has("qemu-storage-daemon") {
            println!("SKIPPED chains of old disks: QEMU's tools are not installed");
            return;
        }
        let (dir, daemon) = testing::daemon();
        let elsewhere = tempfile::tempdir().unwrap();
        let base = elsewhere.path().join("base.raw");
        std::fs::write(&base, vec![5; 1 << 20]).unwrap();
        let top = dir.path().join("top.qcow2");
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
            .args([&base, &top])
            .status();
        assert!(made.unwrap().success());
        let plain = dir.path().join("plain.qcow2");
        std::fs::copy(&top, &plain).unwrap();
        // As an older version would have: without a question.
        let admit = |name: &str, origin: String| {
            let mut add = DiskAdd {
                name: name.to_owned(),
                origin,
                ..DiskAdd::default()
            };
            let origin = std::mem::take(&mut add.origin);
            let blank = dir.path().join(format!("{name}.blank"));
            std::fs::write(&blank, vec![0; 1 << 20]).unwrap();
            add.origin = blank.display().to_string();
            daemon.add(add).unwrap();
            let old = |registry: &mut hearth_format::Registry| {
                let record = registry.disks.iter_mut().find(|r| r.name == name);
                let record = record.ok_or_else(|| Error::no_disk(name))?;
                (record.origin, record.rules) = (origin.clone(), 0);
                (record.origin_identity, record.size) = (None, 4096);
                Ok(())
            };
            lock(&daemon.pool).change(old).unwrap();
        };
        admit("overlay", format!("qcow2:{}", top.display()));
        admit("bytes", plain.display().to_string());
        // Written beside the overlay on it. That is no good, and nothing new.
        admit("live", base.display().to_string());
        let odd = dir.path().join("odd.qcow2");
        let address = format!(
            "json:{{\"driver\":\"raw\",\"file\":{{\"driver\":\"file\",\"filename\":\"{}\"}}}}",
            base.display()
        );
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b"])
            .args([&address, odd.to_str().unwrap(), "1M"])
            .status();
        assert!(made.unwrap().success());
        admit("odd", format!("qcow2:{}", odd.display()));
        daemon.shut_down(StopReason::Signal).unwrap();
        drop(daemon);
        let chain = [format!("raw:{}", base.canonicalize().unwrap().display())];
        // The second time the rules hold, and it is served all the same.
        for first in [true, false] {
            let daemon = testing::start(dir.path());
            for name in ["overlay", "bytes", "odd"] {
                let info = daemon.disk(name).unwrap();
                assert_eq!(info.state, DiskState::Attached, "{info:?}");
                let noted = info
                    .notices
                    .iter()
                    .any(|n| n.contains("as before") || n.contains("as they were before"));
                assert_eq!(noted, first, "{info:?}");
            }
            let live = daemon.disk("live").unwrap();
            assert_eq!(live.state, DiskState::Attached, "{live:?}");
            let info = daemon.disk("overlay").unwrap();
            assert_eq!((info.allow_backing, &*info.chain), (true, &chain[..]));
            daemon.shut_down(StopReason::Signal).unwrap();
        }
        // From now on another base is noticed.
        let other = elsewhere.path().join("other.raw");
        std::fs::copy(&base, &other).unwrap();
        let rebased = std::process::Command::new("qemu-img")
            .args(["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b"])
            .args([&other, &top])
            .status();
        assert!(rebased.unwrap().success());
        let daemon = testing::start(dir.path());
        assert_eq!(daemon.disk("overlay").unwrap().state, DiskState::Refused);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn only_what_somebody_writes_is_a_clash() {
        let there = [
            disk("overlay", "qcow2:/top", &["data:/data", "raw:/base"]),
            disk("live", "/live", &[]),
        ];
        let clashes = |origin: &str, chain: &[&str], read_only: bool| {
            let record = disk("new", origin, chain);
            let spec = origin::parse(origin).unwrap();
            let mine = uses(&spec, &record.chain, read_only);
            first_clash(&mine, &others(&there, "new"), &|a, b| a == b)
        };
        // One base under two overlays is only read.
        assert_eq!(clashes("qcow2:/other", &["raw:/base"], false), None);
        assert_eq!(clashes("/base", &[], true), None);
        for (origin, chain, read_only) in [
            ("/base", &[][..], false),
            ("/data", &[], true),
            ("qcow2:/x", &["raw:/live"], false),
            ("qcow2:/x", &["raw:/top"], false),
            ("qcow2:/x", &["data:/data"], false),
            ("qcow2:/x", &["data:/base"], false),
        ] {
            let clash = clashes(origin, chain, read_only);
            assert!(clash.is_some(), "{origin} over {chain:?}");
        }
    }
}
