//! What is seen by looking: servers of origins that come and go, and counters that should stand still.
//!
//! Where these happen nobody may be told: on data threads, under the engine's lock. So housekeeping looks, at
//! what it looks at anyway, and tells what changed.

use std::sync::atomic::Ordering;

use hearth_engine::stats::{DiskCounters, PoolCounters};
use hearth_events::Event;
use hearth_io::{IoError, OpKind};

use super::{Daemon, Slot, lock};
use crate::size::human;

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

/// Which operation failed, and how.
fn failed_words(kind: OpKind, why: IoError) -> String {
    let what = match kind {
        OpKind::Read => "a read",
        OpKind::Write => "a write",
        OpKind::Flush => "a flush",
        OpKind::Discard => "a discard",
        OpKind::WriteZeroes { .. } => "a write of zeros",
    };
    format!("{what}: {why}")
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
            let last = self.engine.origin_failed(slot.id);
            self.events.tell(Event::OriginErrors {
                disk: disk(),
                count,
                last: last.map_or_else(String::new, |(kind, e)| failed_words(kind, e)),
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
        self.watch_devices();
        self.watch_shares();
    }

    /// What is to be kept for disks, what can be, and the part of it in percent, if that is less.
    fn scaled_shares(&self) -> Option<(u64, u64, u64)> {
        if !self.engine.pool_stats().flash_failed {
            let (wanted, most) = self.engine.minimums();
            let percent = (u128::from(most) * 100 / u128::from(wanted.max(1))) as u64;
            return (wanted > most).then_some((wanted, most, percent));
        }
        None
    }

    /// The same for people.
    pub(super) fn shares_notice(&self) -> Option<String> {
        let (wanted, kept, percent) = self.scaled_shares()?;
        Some(format!(
            "{} of flash are to be kept for disks, and {} can be: each disk keeps {percent} % of its minimum; give the pool more flash, or lower --min",
            human(wanted),
            human(kept)
        ))
    }

    /// Tells that disks keep only a part of their minimums, and that they keep all again.
    fn watch_shares(&self) {
        let scaled = self.scaled_shares();
        if self.shares_scaled.swap(scaled.is_some(), Ordering::Relaxed) == scaled.is_some() {
            return;
        }
        self.events.tell(match scaled {
            Some((wanted_bytes, kept_bytes, percent)) => Event::SharesScaled {
                wanted_bytes,
                kept_bytes,
                percent,
            },
            None => Event::SharesWhole {},
        });
    }

    /// Tells which of several flash devices have become slow, and which are not any more.
    fn watch_devices(&self) {
        let mut before = lock(&self.slow_devices);
        let now = self.engine.slow_devices();
        if now.iter().map(|(n, ..)| n).eq(before.iter()) {
            return;
        }
        let paths = lock(&self.pool).paths();
        let name = |n: u16| {
            let path = paths.get(usize::from(n));
            path.map_or_else(|| n.to_string(), |path| path.display().to_string())
        };
        for (n, read_ns, write_ns) in &now {
            if !before.contains(n) {
                self.events.tell(Event::FlashDeviceSlow {
                    device: name(*n),
                    read_us: read_ns / 1000,
                    write_us: write_ns / 1000,
                });
            }
        }
        for n in before.iter() {
            if !now.iter().any(|(m, ..)| m == n) {
                self.events
                    .tell(Event::FlashDeviceQuick { device: name(*n) });
            }
        }
        *before = now.into_iter().map(|(n, ..)| n).collect();
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

    /// As after a device was lost, or the pool was moved to a smaller one.
    #[test]
    fn more_kept_than_there_is_flash_is_scaled_and_said() {
        let (_dir, daemon) = testing::with_disk("a");
        let id = daemon.disks.lock().get("a").unwrap().id;
        let said = |daemon: &Daemon| {
            daemon.watch_flash(&PoolCounters::default());
            let query = Query {
                limit: 100,
                ..Query::default()
            };
            let events = daemon.events.query(&query).unwrap();
            let all = events.iter().map(|r| r.event.clone());
            all.filter(|event| event.starts_with("shares-"))
                .collect::<Vec<_>>()
        };
        let notice = || daemon.shares_notice();
        let most = daemon.engine.minimums().1;
        daemon.engine.set_limits(id, most / 4096 * 4096, 0).unwrap();
        assert_eq!((said(&daemon), notice()), (Vec::new(), None));
        daemon
            .engine
            .set_limits(id, 2 * most / 4096 * 4096, 0)
            .unwrap();
        said(&daemon);
        assert_eq!(said(&daemon), ["shares-scaled"]);
        let told = notice().unwrap();
        assert!(
            told.contains("each disk keeps 50 % of its minimum"),
            "{told}"
        );
        daemon.engine.set_limits(id, 0, 0).unwrap();
        assert_eq!(said(&daemon), ["shares-scaled", "shares-whole"]);
        assert_eq!(notice(), None);
        daemon.shut_down(StopReason::Signal).unwrap();
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
