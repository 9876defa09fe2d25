//! Has an origin shrunk while it is served?
//!
//! Nobody tells us, so its size is asked now and then. The question may hang, as any question to an origin; then what lies at
//! the same spot is not asked again until it was answered.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

use hearth_io::BlockFile;

use crate::daemon::{Daemon, lock};
use crate::exports::DiskExport;
use crate::spot::Mounts;
use crate::workers::{Class, Spot};

/// What happens to a disk of `size` bytes whose origin has `now`.
pub(in crate::daemon) fn shrank(size: u64, now: u64) -> String {
    format!(
        "the origin shrank from {size} to {now} bytes while attached; what lies beyond can neither \
         be read nor written back until you give it its size back"
    )
}

/// The sizes of the origins at a spot are being looked at, until dropped.
struct Measuring {
    daemon: Arc<Daemon>,
    spot: Spot,
}

impl Drop for Measuring {
    fn drop(&mut self) {
        lock(&self.daemon.measuring).remove(&self.spot);
    }
}

/// Spots where sizes are being looked at.
pub(in crate::daemon) type MeasuredSpots = Mutex<BTreeSet<Spot>>;

impl Daemon {
    /// Begins to look whether origins have shrunk while attached. Where the question hangs, it is asked
    /// of nothing else that lies there until it is answered. Called by housekeeping.
    pub(in crate::daemon) fn look_at_sizes(self: &Arc<Daemon>) {
        let disks = self.disks.lock();
        let served = disks.iter().filter_map(|(name, slot)| {
            let export = slot.export.clone()?;
            export.origin().file()?;
            Some((name.to_owned(), export))
        });
        let served: Vec<(String, Arc<DiskExport>)> = served.collect();
        drop(disks);
        let mounts = Mounts::now();
        let mut by_spot: BTreeMap<Spot, Vec<(String, Arc<DiskExport>)>> = BTreeMap::new();
        for (name, export) in served {
            let spot = mounts.spot_of_path(Path::new(&export.origin().name()));
            by_spot.entry(spot).or_default().push((name, export));
        }
        for (spot, served) in by_spot {
            if !lock(&self.measuring).insert(spot.clone()) {
                continue;
            }
            let daemon = self.clone();
            let measuring = Measuring {
                daemon: daemon.clone(),
                spot: spot.clone(),
            };
            self.aside(&spot, Class::Background, move || {
                for (name, export) in served {
                    if let Some(Ok(now)) = export.origin().file().map(BlockFile::current_size) {
                        daemon.note_size(&name, &export, now);
                    }
                }
                drop(measuring);
            });
        }
    }

    fn note_size(&self, name: &str, export: &Arc<DiskExport>, now: u64) {
        let mut disks = self.disks.lock();
        let Some(slot) = disks.get_mut(name) else {
            return;
        };
        if !slot.export().is_some_and(|e| Arc::ptr_eq(e, export)) {
            return;
        }
        let size = hearth_volume::Volume::size(&**export);
        let short = (now < size).then_some(now);
        match (slot.session.short, short) {
            (None, Some(now)) => self.events.tell(hearth_events::Event::OriginShrank {
                disk: name.to_owned(),
                what: shrank(size, now),
            }),
            (Some(_), None) => self.events.tell(hearth_events::Event::OriginSizeBack {
                disk: name.to_owned(),
            }),
            _ => {}
        }
        if std::mem::replace(&mut slot.session.short, short) != short {
            drop(disks);
            self.disks.changed();
        }
    }
}
