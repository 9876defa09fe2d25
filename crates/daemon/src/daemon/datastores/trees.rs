//! A datastore over two directories that hold the same: how they are opened, and who is told what happens to them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use hearth_datastore::body::Under;
use hearth_datastore::store::scrub::{Refused, Scrub};
use hearth_datastore::twin::scrub::What;
use hearth_datastore::twin::{Setup, Twin, Witness, prepare};
use hearth_events::Event;
use hearth_format::datastore::DatastoreRecord;
use hearth_mirror::ScrubOrder;
use hearth_nfs::identity::Identity;
use hearth_nfs::local::Directory;

use super::super::{Daemon, lock};
use crate::api::datastores::{DatastoreInfo, TreeDifference, TreeInfo, TreeScrub};
use crate::api::types::ScrubSet;
use crate::error::{Error, Result};

/// What a datastore is over.
pub(super) struct Ground {
    pub under: Arc<dyn Under>,
    pub twin: Option<Twin>,
    pub identity: Identity,
}

/// Tells what happens to trees, and keeps in the pool which of them are current.
struct Told {
    daemon: Weak<Daemon>,
    name: String,
}

impl Told {
    fn tell(&self, event: impl FnOnce(String) -> Event) {
        if let Some(daemon) = self.daemon.upgrade() {
            daemon.events.tell(event(self.name.clone()));
        }
    }
}

impl Witness for Told {
    fn lost(&self, directory: &Path, why: &str) {
        self.tell(|datastore| Event::TreeLost {
            datastore,
            directory: directory.display().to_string(),
            why: why.to_owned(),
        });
    }

    fn resyncing(&self, directory: &Path, places: u64) {
        self.tell(|datastore| Event::TreeResyncing {
            datastore,
            directory: directory.display().to_string(),
            places,
        });
    }

    fn current(&self, directory: &Path) {
        self.tell(|datastore| Event::TreeCurrent {
            datastore,
            directory: directory.display().to_string(),
        });
    }

    fn scrubbed(&self, scrub: &Scrub) {
        let counts = &scrub.habits.scrub;
        let (bytes, undecided, unread) = (counts.checked, counts.undecided_all, counts.unread);
        let (repairs, repaired) = (counts.repairs, counts.repaired);
        self.tell(|datastore| match (undecided, unread, repairs) {
            (0, 0, 0) => Event::DatastoreScrubDone { datastore, bytes },
            (0, 0, _) => Event::DatastoreScrubRepaired {
                datastore,
                bytes,
                repairs,
                repaired,
            },
            _ => Event::DatastoreScrubUndecided {
                datastore,
                bytes,
                repairs,
                repaired,
                undecided,
                unread,
            },
        });
    }

    fn keep(&self, stamp: &[u8]) {
        let Some(daemon) = self.daemon.upgrade() else {
            return;
        };
        let kept = lock(&daemon.pool).change(|registry| {
            let all = registry.datastores().unwrap_or_default();
            // One that is being added is not there yet.
            if let Some(mut record) = all.into_iter().find(|record| record.name == self.name) {
                record.trees = stamp.to_vec();
                let stored = registry.put_datastore(&record);
                stored.map_err(|e| crate::pool::format_error(Path::new(&self.name), &e))?;
            }
            Ok(())
        });
        if let Err(e) = kept {
            tracing::warn!(datastore = %self.name, "which trees are current is noted in the state directory alone: {e}");
        }
    }
}

/// Both directories.
fn directories(record: &DatastoreRecord) -> [PathBuf; 2] {
    [&record.directory, &record.mirror].map(PathBuf::from)
}

/// By which its trees know it.
fn store(record: &DatastoreRecord) -> u64 {
    record.serial.as_u64_pair().0
}

/// Makes the directories of a new datastore trees of it, if there are two.
pub(super) fn begin(record: &DatastoreRecord) -> Result<()> {
    if record.mirror.is_empty() {
        return Ok(());
    }
    prepare(&directories(record), store(record))
        .map_err(|unfit| Error::refused(unfit.what, unfit.remedy))
}

/// What a datastore that could not be added left in the roots of its trees.
pub(super) fn undo(record: &DatastoreRecord) {
    if !record.mirror.is_empty() {
        hearth_datastore::twin::unmark(&directories(record));
    }
}

/// Opens what a datastore is over; what is kept beside it is in `state`.
pub(super) fn open(
    daemon: &Arc<Daemon>,
    record: &DatastoreRecord,
    state: PathBuf,
) -> Result<Ground> {
    if record.mirror.is_empty() {
        let opened = Directory::open(Path::new(&record.directory), &state);
        let (directory, identity) = opened.map_err(|e| {
            Error::unavailable(
                format!("cannot serve {}: {e}", record.directory),
                "see whether it is there and mounted; it takes a file system of this host",
            )
        })?;
        return Ok(Ground {
            under: Arc::new(directory),
            twin: None,
            identity,
        });
    }
    let known = lock(&daemon.pool).registry().datastores();
    let known = known.unwrap_or_default();
    let stamp = known.into_iter().find(|known| known.name == record.name);
    let setup = Setup {
        directories: directories(record),
        state,
        store: store(record),
        stamp: stamp.map(|known| known.trees),
        limit: hearth_origin::TIMEOUT_DEFAULT,
        witness: Arc::new(Told {
            daemon: Arc::downgrade(daemon),
            name: record.name.clone(),
        }),
    };
    let (twin, identity) = Twin::open(setup).map_err(|what| {
        Error::unavailable(
            format!("cannot serve datastore {}: {what}", record.name),
            "bring back the directory that holds the newest changes, and restart the daemon",
        )
    })?;
    Ok(Ground {
        under: Arc::new(twin.clone()),
        twin: Some(twin),
        identity,
    })
}

/// How the trees are.
pub(super) fn told(twin: &Twin) -> Vec<TreeInfo> {
    let told = twin.report().into_iter().map(|tree| TreeInfo {
        directory: tree.directory.display().to_string(),
        state: tree.state.to_owned(),
        reason: tree.why,
        missing: tree.missing,
    });
    told.collect()
}

impl Daemon {
    /// Begins a scrub of a datastore in two directories, cancels it, or decides what it found.
    pub(in crate::daemon) fn set_datastore_scrub(
        &self,
        name: &str,
        set: &ScrubSet,
    ) -> Result<DatastoreInfo> {
        let order = ScrubOrder {
            begin: set.begin,
            anew: set.anew,
            cancel: set.cancel,
            prefer: set.prefer.clone(),
            rate: set.rate,
            every_days: set.every_days,
        };
        let opened = self.opened_datastore(name)?;
        let done = opened.files.scrub(&order);
        done.map_err(|why| scrub_refused(name, why))?;
        self.datastore_info(name)
    }
}

/// How a datastore is scrubbed, and what was found.
pub(super) fn scrub_info(scrub: Scrub) -> TreeScrub {
    let counts = &scrub.habits.scrub;
    TreeScrub {
        rate: scrub.habits.scrub_rate,
        every_days: scrub.habits.every_days,
        active: counts.active,
        called_off: counts.called_off,
        began: counts.began_ms,
        ended: (!counts.active && counts.began_ms > 0).then_some(counts.ended_ms),
        checked: counts.checked,
        unread: counts.unread,
        repairs: counts.repairs,
        repaired: counts.repaired,
        undecided: counts.undecided_all,
        differences: scrub
            .differences
            .into_iter()
            .map(|place| TreeDifference {
                path: place.path,
                what: match place.what {
                    What::Names => "names",
                    What::Attributes => "attributes",
                    What::Content => "content",
                    What::Cached => "cached",
                }
                .to_owned(),
                offset: place.offset,
                length: place.len,
            })
            .collect(),
    }
}

/// Why an order about scrubs of a datastore is refused.
fn scrub_refused(name: &str, why: Refused) -> Error {
    let (what, remedy) = match why {
        Refused::OneDirectory => (
            format!("datastore {name} has one directory, so there is nothing to compare"),
            "a datastore with two directories is added with --mirror DIR --mirror DIR".to_owned(),
        ),
        Refused::Active => (
            format!("a scrub of datastore {name} is under way"),
            "wait until it ends, or cancel it with --cancel".to_owned(),
        ),
        Refused::NoDirectory => (
            format!("datastore {name} has no such directory"),
            format!("`hearth datastore show {name}` lists its directories"),
        ),
        Refused::Decided => (
            format!("no scrub of datastore {name} found a difference that needs a decision"),
            format!("start one with `hearth datastore scrub {name}`"),
        ),
        Refused::NotCurrent => (
            format!("one directory of datastore {name} is not current"),
            format!("wait until `hearth datastore show {name}` prints that both are current"),
        ),
    };
    Error::conflict(what, remedy)
}
