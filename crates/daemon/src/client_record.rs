//! Which processes used which disks, for the next run of the daemon.
//!
//! A hypervisor whose disk is idle does not reconnect after a restart of the daemon: QEMU does that with its next request. Until
//! then nothing shows that the disk has a guest, and removing it would take the disk from under it. So the processes that
//! have a disk open are noted in the state directory, with the time at which they started and the boot they belong to.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::clients::Known;
use crate::daemon::lock;

/// Longest record that is read.
const RECORD_MAX: u64 = 1 << 20;
/// Most processes noted of a disk.
const PROCESSES_MAX: usize = 16;

/// What is in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Document {
    /// The boot in which these processes run.
    boot: String,
    /// By the name of the disk.
    disks: BTreeMap<String, Vec<Known>>,
    /// Clients of datastores with the time of their last call, by the name of the datastore. They are on other hosts, and outlive
    /// a boot.
    #[serde(default)]
    datastores: Datastores,
}

type Datastores = BTreeMap<String, BTreeMap<IpAddr, u64>>;

/// The time of a last call is noted anew after so many seconds.
const LAST_STEP: u64 = 600;

/// The record.
#[derive(Debug)]
pub(crate) struct ClientRecord {
    file: PathBuf,
    /// Of the run before; each disk's are taken when it is first on offer.
    before: Mutex<BTreeMap<String, Vec<Known>>>,
    stored: Mutex<Document>,
}

fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn read(file: &Path) -> Option<Document> {
    let mut text = String::new();
    let limited = &mut File::open(file).ok()?.take(RECORD_MAX);
    limited.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Puts a document in place of what is there. Not synced: after a power cut it is of another boot.
fn replace(file: &Path, document: &Document) -> io::Result<()> {
    let new = file.with_extension("new");
    std::fs::write(&new, serde_json::to_string(document)?)?;
    std::fs::rename(&new, file)
}

impl ClientRecord {
    /// The record in a state directory. One that cannot be read, or is of another boot, is empty.
    pub(crate) fn open(state_dir: &Path) -> ClientRecord {
        let file = state_dir.join("clients.json");
        let mut document = read(&file).unwrap_or_default();
        if document.boot != boot() {
            document.disks.clear();
        }
        ClientRecord {
            file,
            before: Mutex::new(document.disks.clone()),
            stored: Mutex::new(document),
        }
    }

    /// Processes that used a disk when the run before ended.
    pub(crate) fn take(&self, disk: &str) -> Vec<Known> {
        lock(&self.before).remove(disk).unwrap_or_default()
    }

    /// Clients that used a datastore when it was last served, in this run or the run before.
    pub(crate) fn users_of(&self, datastore: &str) -> BTreeMap<IpAddr, u64> {
        let stored = lock(&self.stored);
        stored
            .datastores
            .get(datastore)
            .cloned()
            .unwrap_or_default()
    }

    /// Notes which processes use which disks now, and which clients which datastores. Those of disks that are not on offer yet
    /// stay.
    pub(crate) fn store(&self, mut now: BTreeMap<String, Vec<Known>>, mut datastores: Datastores) {
        for (disk, known) in &*lock(&self.before) {
            now.entry(disk.clone()).or_insert_with(|| known.clone());
        }
        now.retain(|_, known| {
            known.truncate(PROCESSES_MAX);
            !known.is_empty()
        });
        let last = datastores.values_mut().flat_map(BTreeMap::values_mut);
        last.for_each(|last| *last -= *last % LAST_STEP);
        let mut stored = lock(&self.stored);
        if (&stored.disks, &stored.datastores) == (&now, &datastores) {
            return;
        }
        let document = Document {
            boot: boot(),
            disks: now,
            datastores,
        };
        // Without the file only an idle guest is not seen after the next restart.
        if let Err(e) = replace(&self.file, &document) {
            tracing::warn!("cannot note the clients in {}: {e}", self.file.display());
        }
        *stored = document;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_outlives_the_run_and_not_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let known = vec![Known {
            pid: 7,
            started: 8,
            kind: "nbd".to_owned(),
            since: 9,
        }];
        let now = BTreeMap::from([
            ("d".to_owned(), known.clone()),
            ("e".to_owned(), Vec::new()),
        ]);
        let users = BTreeMap::from([(
            "vms".to_owned(),
            BTreeMap::from([
                (IpAddr::from([192, 0, 2, 1]), 1200),
                // From a damaged file.
                (IpAddr::from([192, 0, 2, 2]), u64::MAX),
            ]),
        )]);
        ClientRecord::open(dir.path()).store(now.clone(), users.clone());
        let record = ClientRecord::open(dir.path());
        // Not on offer yet.
        record.store(BTreeMap::new(), users.clone());
        assert_eq!(record.take("d"), known);
        assert!(record.take("d").is_empty() && record.take("e").is_empty());
        record.store(BTreeMap::new(), users.clone());
        assert!(ClientRecord::open(dir.path()).take("d").is_empty());
        let other = Document {
            boot: "another".to_owned(),
            disks: now,
            datastores: users,
        };
        replace(&dir.path().join("clients.json"), &other).unwrap();
        let record = ClientRecord::open(dir.path());
        assert!(record.take("d").is_empty());
        assert_eq!(record.users_of("vms").len(), 2);
        std::fs::write(dir.path().join("clients.json"), "{").unwrap();
        assert!(ClientRecord::open(dir.path()).take("d").is_empty());
    }
}
