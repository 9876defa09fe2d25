//! What the passing of time brings to disks.
//!
//! Most work follows from something that happened. The rest is found by going round: intents that nobody
//! used for long, writes of the origin that nobody asks to be flushed, more flash than a disk may have, a
//! block that flash refused and may be asked for again. Each round takes the next few of the disks to which
//! this may apply, and all that are being drained or waited for.

use crate::api::{DiskId, Effects};
use crate::core::Core;
use crate::disk::Disk;
use crate::engine::Engine;

/// Disks a round takes of those that time may bring work. With more of them each has its turn later.
const RESTLESS_PER_ROUND: usize = 256;

impl Core {
    /// One round.
    pub fn go_round(&mut self, now: u64, fx: &mut Effects) {
        let stopping = self.quiescing;
        for disk in self.ready.draining.take() {
            self.close_idle_intents(disk, now, fx);
            self.sync_draining(disk, now, fx);
            if self.disk(disk).is_some_and(|d| d.is_draining(stopping)) {
                self.ready.draining.add(disk);
                self.ready.touch(disk);
            }
        }
        for _ in 0..self.ready.restless.len().min(RESTLESS_PER_ROUND) {
            let Some(disk) = self.ready.restless.next() else {
                break;
            };
            self.close_idle_intents(disk, now, fx);
            self.trim_own_overuse(disk);
            self.look_at_ages(disk, now);
            if self.disk(disk).is_some_and(Disk::is_restless) {
                self.ready.touch(disk);
            }
        }
    }

    /// Something happened that concerns all disks, and hardly ever happens.
    pub fn everyone_is_ready(&mut self) {
        for disk in self.disk_ids() {
            self.ready.all(disk);
        }
    }

    /// What a disk is not on a list for although it should be.
    fn overlooked(&self, d: &Disk, now: u64) -> Option<&'static str> {
        let (id, ready) = (d.cfg.id, &self.ready);
        let missing = |needs: bool, there: bool| needs && !there;
        let timer = (d.origin.destage.not_before_ns, id);
        if missing(
            d.owes_destager() && d.origin.destage.not_before_ns > now,
            ready.timers.contains(&timer) || ready.touched.contains(id),
        ) {
            return Some("backs off, and no timer ends it");
        }
        if missing(
            self.could_destage(d, now),
            ready.touched.contains(id) || ready.owing.contains(id),
        ) {
            return Some("has something to destage");
        }
        if missing(!d.clean_waiters.is_empty(), ready.awaited.contains(id)) {
            return Some("is waited for");
        }
        if missing(
            d.is_draining(self.quiescing),
            ready.draining.contains(id) || ready.touched.contains(id),
        ) {
            return Some("is to be drained");
        }
        if missing(d.is_restless(), ready.restless.contains(id)) {
            return Some("may have work as time passes");
        }
        if missing(d.is_noted(), ready.noted.contains(id)) {
            return Some("has records to be logged again");
        }
        if let Some(until) = d.origin.destage.gathers_until()
            && missing(
                true,
                ready.touched.contains(id)
                    || ready.timers.contains(&(until, id)) && ready.gathering.contains(id),
            )
        {
            return Some("has written what nobody will flush");
        }
        missing(d.origin.destage.is_given(), ready.given.contains(id))
            .then_some("waits for its origin")
    }
}

impl Engine {
    /// Disks with work that are on no list of those that have some, and what for: there must be none. It
    /// looks at all disks and at what they owe, which is what the lists save; it is there for tests.
    pub fn overlooked(&self, now_ns: u64) -> Vec<(DiskId, &'static str)> {
        let core = self.core();
        let disks = core.disks.iter().flatten();
        let mut found: Vec<_> = disks
            .filter_map(|d| Some((d.cfg.id, core.overlooked(d, now_ns)?)))
            .collect();
        let mut totals = crate::disk::ready::Totals::default();
        for d in core.disks.iter().flatten() {
            totals.add(crate::disk::ready::Totals::of(d));
        }
        if totals != core.totals {
            found.push((0, "is not counted right"));
        }
        found
    }
}
