//! What clients ask, from the first look at the index to the answer.

pub(crate) mod answer;
pub(crate) mod flush;
pub(crate) mod keep;
pub(crate) mod read;
pub(crate) mod req;
pub(crate) mod state;
pub(crate) mod take;
#[cfg(test)]
mod tests;
pub(crate) mod write;
pub(crate) mod zero;

use crate::api::{DiskId, Request};
use crate::ids::ReqId;
use crate::request::answer::{Answer, Asker};
use crate::request::req::Req;
use slab::Slab;
use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

/// The requests the engine has taken, and what they wait for that is not a disk's own.
#[derive(Default)]
pub(crate) struct Requests {
    all: Slab<Req>,
    /// How many there have been.
    lives: u32,
    /// Write-back requests waiting for room.
    pub stalled: VecDeque<ReqId>,
    /// One of `stalled` waits for the log itself: who comes now waits behind it.
    pub log_full: bool,
    /// One of `stalled` waits for what disks have dirty or say, and not for the order of its own disk alone.
    pub wants_room: bool,
    /// Requests past the cache waiting for room for their records.
    pub stalled_through: VecDeque<ReqId>,
    /// Flushes of guests that wait until nothing of their disks is left on flash.
    pub leaving_flushes: Vec<ReqId>,
    /// Writes past the cache that wait until it is noted that flash failed.
    pub mark_waiters: Vec<ReqId>,
    /// Requests that had to wait for their range so far.
    pub next_turn: u64,
    /// Clients' requests there are.
    pub foreground: u64,
    /// When the last of them came.
    pub last_foreground_ns: u64,
}

impl Requests {
    /// Takes a request, which must be answered from here on.
    pub fn insert(&mut self, r: Request, asker: Asker) -> ReqId {
        let place = self.all.vacant_entry();
        let id = ReqId::new(place.key(), self.lives);
        self.lives = self.lives.wrapping_add(1);
        self.foreground += u64::from(matches!(asker, Asker::Client { .. }));
        place.insert(Req::new(id, r, Answer::to(asker)));
        id
    }

    /// Takes a request out to answer it.
    pub fn remove(&mut self, id: ReqId) -> Req {
        self.check(id);
        let req = self.all.remove(id.place());
        self.foreground -= u64::from(!req.answer.is_to_request());
        req
    }

    fn check(&self, id: ReqId) {
        let there = self.all.get(id.place()).map(|req| req.id);
        assert!(there == Some(id), "{id:?} was answered long ago");
    }

    /// The request of this name, if it was not answered yet.
    pub fn get(&self, id: ReqId) -> Option<&Req> {
        self.all.get(id.place()).filter(|req| req.id == id)
    }

    pub fn iter(&self) -> slab::Iter<'_, Req> {
        self.all.iter()
    }

    /// Takes a disk's requests that wait for room on flash, or for the disk to leave it, out of the queues.
    pub fn take_waiting_for_room(&mut self, disk: DiskId) -> Vec<ReqId> {
        let mut queues = (
            std::mem::take(&mut self.stalled),
            std::mem::take(&mut self.stalled_through),
            std::mem::take(&mut self.leaving_flushes),
        );
        let mut taken = Vec::new();
        let mut stays = |id: ReqId| {
            let is_its = self[id].disk == disk;
            if is_its {
                taken.push(id);
            }
            !is_its
        };
        queues.0.retain(|&id| stays(id));
        queues.1.retain(|&id| stays(id));
        queues.2.retain(|&id| stays(id));
        (self.stalled, self.stalled_through, self.leaving_flushes) = queues;
        taken
    }

    /// Those that wait in a queue of this table.
    #[cfg(any(test, feature = "check"))]
    pub fn queued(&self) -> impl Iterator<Item = ReqId> {
        let stalled = self.stalled.iter().chain(&self.stalled_through);
        let others = self.leaving_flushes.iter().chain(&self.mark_waiters);
        stalled.chain(others).copied()
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

impl Drop for Requests {
    /// The engine goes with requests in it: who asked learns it from that, as if the power had failed.
    fn drop(&mut self) {
        for req in self.all.drain() {
            req.answer.void();
        }
    }
}

impl Index<ReqId> for Requests {
    type Output = Req;

    fn index(&self, id: ReqId) -> &Req {
        self.check(id);
        &self.all[id.place()]
    }
}

impl IndexMut<ReqId> for Requests {
    fn index_mut(&mut self, id: ReqId) -> &mut Req {
        self.check(id);
        &mut self.all[id.place()]
    }
}
