//! What is seen by looking: servers of origins that come and go, and counters that should stand still.
//!
//! Where these happen nobody may be told: on data threads, under the engine's lock. So housekeeping looks, at
//! what it looks at anyway, and tells what changed.

use std::sync::atomic::Ordering;

use hearth_engine::stats::{DiskCounters, PoolCounters};
use hearth_events::Event;

use super::{Daemon, Slot, lock};

/// What was told of a disk since its origin was opened.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    /// That its server is not there.
    lost: bool,
    /// Times its server had come back by then.
    reconnects: u64,
    bad_clean: u64,
    bad_dirty: u64,
    origin_errors: u64,
}

/// How much a counter has grown, which it is then known to have.
fn grown(told: &mut u64, now: u64) -> Option<u64> {
    // A disk that is attached again counts anew.
    let before = std::mem::replace(told, now);
    Some(now.saturating_sub(before)).filter(|n| *n > 0)
}

impl Daemon {
    /// Tells of an origin's server that went or came back.
    pub(super) fn watch_link(&self, slot: &mut Slot) {
        let Some(link) = slot.device().and_then(|d| Some(d.as_remote()?.link())) else {
            return;
        };
        let told = &mut slot.session.told;
        let again = grown(&mut told.reconnects, link.reconnects).is_some();
        let origin = || {
            let pool = lock(&self.pool);
            pool.record(slot.id)
                .map_or_else(String::new, |r| r.origin.clone())
        };
        let disk = || slot.name.clone();
        let why = || {
            let why = link.reason.as_ref().map(ToString::to_string);
            why.unwrap_or_else(|| "it does not answer".to_owned())
        };
        // It may have gone and come back since the last look.
        if (again || !link.connected) && !told.lost {
            self.events.tell(Event::OriginLost {
                disk: disk(),
                origin: origin(),
                why: why(),
            });
        }
        if link.connected && (again || told.lost) {
            self.events.tell(Event::OriginBack {
                disk: disk(),
                origin: origin(),
                reconnects: link.reconnects,
            });
        }
        told.lost = !link.connected;
    }

    /// Tells of what a disk counted that should not happen.
    pub(super) fn watch_counters(&self, slot: &mut Slot, now: &DiskCounters) {
        let told = &mut slot.session.told;
        let disk = || slot.name.clone();
        if let Some(blocks) = grown(&mut told.bad_clean, now.bad_clean_blocks) {
            self.events.tell(Event::BadBlocksRepaired {
                disk: disk(),
                blocks,
            });
        }
        if let Some(blocks) = grown(&mut told.bad_dirty, now.bad_dirty_blocks) {
            self.events.tell(Event::DataLost {
                disk: disk(),
                blocks,
            });
        }
        if let Some(count) = grown(&mut told.origin_errors, now.origin_errors) {
            self.events.tell(Event::OriginErrors {
                disk: disk(),
                count,
            });
        }
    }

    /// Tells of what the flash counted that should not happen.
    pub(super) fn watch_flash(&self, now: &PoolCounters) {
        let mut told = self.flash_errors.load(Ordering::Relaxed);
        if let Some(count) = grown(&mut told, now.flash_errors) {
            self.events.tell(Event::FlashErrors { count });
        }
        self.flash_errors.store(told, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{StopReason, testing};
    use super::*;
    use hearth_events::Query;

    fn told(daemon: &Daemon) -> Vec<(String, Option<u64>)> {
        let query = Query {
            limit: 100,
            disk: Some("a".to_owned()),
            ..Query::default()
        };
        let events = daemon.events.query(&query).unwrap();
        let count = |r: &hearth_events::Record| {
            let n = r.details.get("blocks").or(r.details.get("count"));
            n.and_then(serde_json::Value::as_u64)
        };
        events.iter().map(|r| (r.event.clone(), count(r))).collect()
    }

    #[test]
    fn counters_that_grow_are_told_once_by_how_much() {
        let (_dir, daemon) = testing::with_disk("a");
        let mut counters = DiskCounters {
            bad_clean_blocks: 2,
            ..DiskCounters::default()
        };
        let look = |counters: &DiskCounters| {
            let mut disks = daemon.disks.lock();
            daemon.watch_counters(disks.get_mut("a").unwrap(), counters);
        };
        look(&counters);
        look(&counters);
        counters.bad_clean_blocks = 5;
        counters.bad_dirty_blocks = 1;
        look(&counters);
        assert_eq!(
            told(&daemon),
            [
                ("disk-attached".to_owned(), None),
                ("bad-blocks-repaired".to_owned(), Some(2)),
                ("bad-blocks-repaired".to_owned(), Some(3)),
                ("data-lost".to_owned(), Some(1)),
            ]
        );
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
