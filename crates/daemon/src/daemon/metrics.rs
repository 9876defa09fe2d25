//! What the daemon gives Prometheus.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_engine::api::DiskId;
use hearth_metrics::{Device, Disk, Form, Pool, fold, page};

use super::{Daemon, lock};

/// Files of datastores with rows of their own.
const BUSIEST: usize = 50;

impl Daemon {
    /// All figures as a page.
    pub(super) fn metrics_page(&self, form: Form) -> String {
        let up: Duration = self.started.elapsed();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        // By itself: within the expression below it would be held to its end, and devices ask for it again.
        let uuid = lock(&self.pool).uuid();
        let mut stats = self.engine.pool_stats();
        if self.without_flash {
            // The engine believes in flash that nobody has.
            (stats.capacity_blocks, stats.segments, stats.free_segments) = (0, 0, 0);
        }
        let pool = Pool {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uuid,
            started: since.unwrap_or_default().saturating_sub(up).as_secs(),
            dirty: self.dirty_bytes(),
            stuck: lock(&self.stuck).len() as u64,
            log_dropped: crate::log::dropped(),
            stats,
            devices: self.counted_devices(),
            swap: self.swap_figures(),
        };
        let mut disks: Vec<Disk> = {
            let table = self.disks.lock();
            let known = table.iter().filter(|(_, slot)| slot.life.is_known());
            known
                .map(|(name, slot)| Disk {
                    name: name.to_owned(),
                    served: slot.export().is_some(),
                    dirty_unknown: self.is_dirty_unknown(slot),
                    ..self.counted(slot.id)
                })
                .collect()
        };
        let files = self.stores.numbers.open();
        let names = {
            let pool = lock(&self.pool);
            let of = |id| Some((id, pool.record(id)?.datastore.clone()));
            files.into_iter().filter_map(of).collect::<Vec<_>>()
        };
        disks.extend(names.into_iter().map(|(id, datastore)| {
            Disk {
                name: self
                    .stores
                    .numbers
                    .name_of(id)
                    .unwrap_or_else(|| id.to_string()),
                datastore: Some(datastore),
                served: true,
                ..self.counted(id)
            }
        }));
        page(form, &pool, &fold(disks, BUSIEST))
    }

    fn counted_devices(&self) -> Vec<Device> {
        let pool = lock(&self.pool);
        if pool.is_without_flash() {
            return Vec::new();
        }
        let paths = pool.paths();
        drop(pool);
        let devices = paths.into_iter().zip(self.engine.device_stats());
        let device = |(path, stats): (std::path::PathBuf, _)| Device {
            path: path.display().to_string(),
            stats,
        };
        devices.map(device).collect()
    }

    fn counted(&self, id: DiskId) -> Disk {
        let now = hearth_io::now_ns();
        Disk {
            stats: self.engine.counts(id, now).unwrap_or_default(),
            latencies: self.engine.latencies(id).unwrap_or_default(),
            ..Disk::default()
        }
    }
}
