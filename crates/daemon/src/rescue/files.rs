//! Which file of a datastore a disk is.
//!
//! The pool knows such a file by what its file system calls it. The daemon opens it by that, which takes root's rights and
//! what is kept in the state directory. Here the datastore's directory is looked through instead, and each file in it
//! compared: that takes nothing but that it can be read, and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::time::UNIX_EPOCH;

use hearth_datastore::origin::is_same_time;
use hearth_datastore::twin::{TwinFile, stamp_of};
use hearth_engine::api::DiskId;
use hearth_format::datastore::DatastoreRecord;
use hearth_format::{DiskRecord, Registry};
use hearth_nfs::local::keys_of_open;

use crate::error::{Error, Result};
use crate::keys::text_of;
use crate::pool::change::same;

/// Most names of a path that is looked at: what is mounted in itself has no end.
const DEPTH_MAX: usize = 1024;

/// Where a file is, as far as that could be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spot {
    /// Its path in the datastore, `vms/a.img`.
    pub path: Option<String>,
    /// The file itself; of a datastore of two directories that in each.
    pub files: Vec<PathBuf>,
    /// Directories of the datastore where it should be, and is not.
    pub missing: Vec<PathBuf>,
    /// Its bytes.
    pub size: Option<u64>,
}

/// The directories of a datastore, and of each whether what is in it counts.
fn directories(store: &DatastoreRecord) -> Vec<(PathBuf, bool)> {
    let current = stamp_of(&store.trees).map_or([true; 2], |stamp| stamp.current);
    let both = [&store.directory, &store.mirror].into_iter().zip(current);
    both.filter(|(directory, _)| !directory.is_empty())
        .map(|(directory, current)| (PathBuf::from(directory), current))
        .collect()
}

fn open(path: &Path) -> io::Result<(File, Metadata)> {
    // By path only: nothing happens to what is there, whatever it is.
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let metadata = file.metadata()?;
    Ok((file, metadata))
}

/// What the registry may call an open file of a datastore.
fn texts(file: &File, store: &DatastoreRecord) -> Vec<String> {
    let number = store.serial.as_u64_pair().0;
    let of_both = (!store.mirror.is_empty()).then(|| TwinFile::key_of_open(file, number));
    let keys = keys_of_open(file).into_iter().chain(of_both.flatten());
    keys.map(|key| text_of(&key)).collect()
}

/// Shows every regular file below a directory, by its path in there, until `see` has seen enough. What is mounted in it is
/// left out, and so is what cannot be read.
fn look_through(root: &Path, see: &mut dyn FnMut(&Path, &File, &Metadata) -> bool) {
    let Ok(device) = std::fs::metadata(root).map(|top| top.dev()) else {
        return;
    };
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        let Ok(entries) = std::fs::read_dir(root.join(&dir)) else {
            continue;
        };
        for entry in entries.flatten() {
            let within = dir.join(entry.file_name());
            let Ok((file, found)) = open(&root.join(&within)) else {
                continue;
            };
            if found.dev() != device {
                continue;
            }
            if found.is_dir() && within.components().count() < DEPTH_MAX {
                todo.push(within);
            } else if found.is_file() && !see(&within, &file, &found) {
                return;
            }
        }
    }
}

/// Where the files of these disks are: one of each datastore's directories after the other is looked through for all of them at once.
pub(super) fn find(
    registry: &Registry,
    wanted: &dyn Fn(&DiskRecord) -> bool,
) -> BTreeMap<DiskId, Spot> {
    let files = registry.disks.iter().filter(|record| record.is_file());
    let files: Vec<&DiskRecord> = files.map(|r| &**r).filter(|r| wanted(r)).collect();
    let mut spots: BTreeMap<DiskId, Spot> = files.iter().map(|r| (r.id, Spot::default())).collect();
    for store in registry.datastores().unwrap_or_default() {
        let own = files.iter().filter(|r| r.datastore == store.name);
        let own: BTreeMap<&str, DiskId> = own.map(|r| (r.origin.as_str(), r.id)).collect();
        if own.is_empty() {
            continue;
        }
        for (directory, current) in directories(&store) {
            let mut left: BTreeSet<DiskId> = own.values().copied().collect();
            let mut see = |within: &Path, file: &File, found: &Metadata| {
                let names = texts(file, &store);
                let id = names.iter().find_map(|text| own.get(text.as_str()));
                // A second name of it is none of interest.
                if let Some((id, spot)) = id
                    .filter(|id| left.remove(id))
                    .and_then(|id| Some((id, spots.get_mut(id)?)))
                {
                    tracing::debug!(disk = id, file = %within.display(), "found");
                    let path = format!("{}/{}", store.name, within.display());
                    spot.path.get_or_insert(path);
                    spot.size.get_or_insert(found.len());
                    spot.files.push(directory.join(within));
                }
                !left.is_empty()
            };
            if current {
                look_through(&directory, &mut see);
            }
            for id in left {
                if let Some(spot) = spots.get_mut(&id) {
                    spot.missing.push(directory.clone());
                }
            }
        }
    }
    spots
}

/// The disk of a file that is named by its path in its datastore.
pub(super) fn by_path(registry: &Registry, path: &str) -> Option<DiskId> {
    let (name, within) = path.split_once('/')?;
    let within = Path::new(within);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    if !within.components().all(plain) {
        return None;
    }
    let stores = registry.datastores().unwrap_or_default();
    let store = stores.into_iter().find(|store| store.name == name)?;
    directories(&store).into_iter().find_map(|(directory, _)| {
        let (file, found) = open(&directory.join(within)).ok()?;
        let names = found.is_file().then(|| texts(&file, &store))?;
        let mut own = registry.disks.iter();
        let own = own.find(|r| r.datastore == store.name && names.contains(&r.origin))?;
        Some(own.id)
    })
}

fn listed<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> String {
    let names: Vec<String> = paths.map(|path| path.display().to_string()).collect();
    names.join(" and ")
}

impl Spot {
    /// Its own files, for people.
    pub fn shown(&self) -> Option<String> {
        (!self.files.is_empty()).then(|| listed(self.files.iter()))
    }

    /// Why it is not known where it is.
    pub fn lost(&self) -> Option<String> {
        match (self.files.is_empty(), self.missing.is_empty()) {
            (false, _) => None,
            (true, true) => Some("its datastore is not known".to_owned()),
            (true, false) => Some(format!(
                "not to be found in {}",
                listed(self.missing.iter())
            )),
        }
    }

    /// Refuses to write over what is not the file, or has changed since it was left. `force`: nevertheless; what has to be said
    /// of it then.
    pub fn check(
        &self,
        record: &DiskRecord,
        name: &str,
        onto: &[PathBuf],
        force: bool,
    ) -> Result<Vec<String>> {
        let is_named = |file: &&PathBuf| onto.iter().any(|path| same(file, path));
        let is_own = |path: &&PathBuf| self.files.iter().any(|file| same(file, path));
        let mut wrong: Vec<(String, &str)> = Vec::new();
        let others = listed(onto.iter().filter(|path| !is_own(path)));
        if !others.is_empty() {
            let own = self.shown().or_else(|| self.lost()).unwrap_or_default();
            wrong.push((
                format!("{others} is not the file of disk {name} ({own})"),
                "name the file itself; to write over a copy of it nevertheless, add --force",
            ));
        }
        let own: Vec<&PathBuf> = onto.iter().filter(is_own).collect();
        let lacking = self.files.iter().filter(|file| !is_named(file));
        let lacking = listed(lacking.chain(&self.missing));
        if !own.is_empty() && !lacking.is_empty() {
            wrong.push((
                format!(
                    "the datastore has {name} in {lacking} as well, which would not be the same any more: with this one alone written, remove the datastore before it is used, and add it anew with the directory first that was written to"
                ),
                "name the file in each directory, each with --onto; --force leaves out one that is dead",
            ));
        }
        let has_two = self.files.len() + self.missing.len() > 1;
        if !own.is_empty() && own.iter().all(|path| is_changed(record, path, has_two)) {
            wrong.push((
                format!(
                    "{} was changed since it was left: by somebody else, who may have made it newer than what is here, or by `hearth rescue`",
                    listed(own.into_iter())
                ),
                "compare first, with --to FILE; to overwrite it nevertheless, add --force",
            ));
        }
        if force {
            return Ok(wrong.into_iter().map(|(what, _)| what).collect());
        }
        match wrong.into_iter().next() {
            Some((what, remedy)) => Err(Error::refused(what, remedy)),
            None => Ok(Vec::new()),
        }
    }
}

/// It is promised that the file looks as it was left, and it does not.
fn is_changed(record: &DiskRecord, path: &Path, has_two: bool) -> bool {
    let Some(left) = record.origin_identity.filter(|_| record.clean_detach) else {
        return false;
    };
    let Ok(found) = std::fs::metadata(path) else {
        return false;
    };
    let modified = found
        .modified()
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
        .and_then(|since| i64::try_from(since.as_nanos()).ok());
    let is_same = modified.is_some_and(|now| is_same_time(left.mtime_ns, now, has_two));
    found.len() != left.size || !is_same
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_format::OriginIdentity;
    use std::fs;
    use std::slice::from_ref;

    /// A datastore `vms` in `dir` whose files are disks 1, 2 and so on.
    fn registry(dir: &Path, files: &[&Path]) -> Registry {
        let store = DatastoreRecord {
            name: "vms".to_owned(),
            directory: dir.display().to_string(),
            ..DatastoreRecord::default()
        };
        let mut registry = Registry::default();
        registry.put_datastore(&store).unwrap();
        for (n, path) in files.iter().enumerate() {
            let (file, _) = open(path).unwrap();
            let record = DiskRecord {
                id: n as DiskId + 1,
                name: format!("vms.{n:016x}"),
                origin: texts(&file, &store).pop().expect("it is called something"),
                datastore: store.name.clone(),
                size: 1 << 30,
                ..DiskRecord::default()
            };
            registry.disks.push(record.into());
        }
        registry
    }

    #[test]
    fn files_are_found_where_they_are_now() {
        let dir = tempfile::tempdir().unwrap();
        let vms = dir.path().join("vms");
        fs::create_dir_all(vms.join("web")).unwrap();
        let [a, b, out] = [vms.join("a.img"), vms.join("b.img"), dir.path().join("out")];
        fs::write(&a, [1; 5000]).unwrap();
        fs::write(&b, "").unwrap();
        let registry = registry(&vms, &[&a, &b]);
        let all = |_: &DiskRecord| true;
        let spots = find(&registry, &all);
        assert_eq!(spots[&1].path.as_deref(), Some("vms/a.img"));
        assert_eq!(spots[&1].size, Some(5000));
        assert_eq!(spots[&2].files, from_ref(&b));
        assert_eq!(by_path(&registry, "vms/a.img"), Some(1));
        // Under a second name, too, but not by a detour or through a link to it.
        fs::hard_link(&a, vms.join("web/c.img")).unwrap();
        std::os::unix::fs::symlink(&a, vms.join("l.img")).unwrap();
        assert_eq!(by_path(&registry, "vms/web/c.img"), Some(1));
        for path in [
            "vms/l.img",
            "vms/web",
            "vms/web/../a.img",
            "vms//a.img/x",
            "vm/a.img",
            "a.img",
        ] {
            assert_eq!(by_path(&registry, path), None, "{path}");
        }
        // Moved, and moved away.
        fs::rename(&b, vms.join("web/b.img")).unwrap();
        let only = |record: &DiskRecord| record.id == 2;
        let spots = find(&registry, &only);
        assert_eq!(spots.len(), 1);
        assert_eq!(spots[&2].path.as_deref(), Some("vms/web/b.img"));
        assert_eq!(spots[&2].lost(), None);
        fs::rename(vms.join("web/b.img"), &out).unwrap();
        let spot = &find(&registry, &all)[&2];
        let lost = spot.lost().expect("it is elsewhere");
        assert!(lost.contains(&vms.display().to_string()), "{lost}");
        assert_eq!((&spot.path, spot.size), (&None, None));
        // Its datastore was removed.
        let mut without = registry;
        without.unknown_records.clear();
        assert_eq!(
            find(&without, &all)[&1].lost().as_deref(),
            Some("its datastore is not known")
        );
    }

    #[test]
    fn only_the_file_itself_is_written_over_as_it_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let [a, other] = [dir.path().join("a.img"), dir.path().join("other")];
        fs::write(&a, "a").unwrap();
        fs::copy(&a, &other).unwrap();
        let registry = registry(dir.path(), &[&a]);
        let mut record = (*registry.disks[0]).clone();
        let spot = find(&registry, &|_| true).remove(&1).expect("found");
        let check = |record: &DiskRecord, path: &PathBuf, force| {
            spot.check(record, "vms/a.img", from_ref(path), force)
        };
        assert_eq!(check(&record, &a, false), Ok(vec![]));
        let why = check(&record, &other, false)
            .expect_err("it is a copy")
            .to_string();
        assert!(why.contains("is not the file of disk vms/a.img"), "{why}");
        assert_eq!(check(&record, &other, true).unwrap().len(), 1);
        // It is promised that nobody has changed it.
        let modified = fs::metadata(&a).unwrap().modified().unwrap();
        let since = modified.duration_since(UNIX_EPOCH).unwrap();
        record.clean_detach = true;
        record.origin_identity = Some(OriginIdentity {
            size: 1,
            mtime_ns: since.as_nanos() as i64,
            ctime_ns: 0,
            dev: 0,
            inode: 0,
        });
        assert_eq!(check(&record, &a, false), Ok(vec![]));
        fs::write(&a, "newer").unwrap();
        let why = check(&record, &a, false)
            .expect_err("it is newer")
            .to_string();
        assert!(why.contains("was changed since it was left"), "{why}");
        assert_eq!(check(&record, &a, true).unwrap().len(), 1);
    }

    #[test]
    fn of_two_directories_both_get_it() {
        let [a, b] = ["/one/a.img", "/two/a.img"].map(PathBuf::from);
        let mut spot = Spot {
            files: vec![a.clone(), b.clone()],
            ..Spot::default()
        };
        let record = DiskRecord::default();
        let check =
            |spot: &Spot, onto: &[PathBuf], force| spot.check(&record, "vms/a.img", onto, force);
        assert_eq!(check(&spot, &[b.clone(), a.clone()], false), Ok(vec![]));
        let why = check(&spot, from_ref(&a), false).expect_err("the other lacks it");
        assert!(why.to_string().contains("/two/a.img"), "{why}");
        assert_eq!(check(&spot, from_ref(&a), true).unwrap().len(), 1);
        // One that is not there cannot be given.
        spot.files.pop();
        spot.missing.push("/two".into());
        assert!(check(&spot, from_ref(&a), false).is_err());
        assert_eq!(check(&spot, &[a], true).unwrap().len(), 1);
    }
}
