//! What clients ask, from the first look at the index to the answer.

pub(crate) mod flush;
pub(crate) mod read;
pub(crate) mod write;
pub(crate) mod zero;

use crate::api::DiskId;
use crate::core::Req;
use slab::Slab;
use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

/// The requests the engine has taken, and what they wait for that is not a disk's own.
#[derive(Default)]
pub(crate) struct Requests {
    all: Slab<Req>,
    /// Write-back requests waiting for room.
    pub stalled: VecDeque<usize>,
    /// One of `stalled` waits for the log itself: who comes now waits behind it.
    pub log_full: bool,
    /// Requests past the cache waiting for room for their records.
    pub stalled_through: VecDeque<usize>,
    /// Flushes of guests that wait until nothing of their disks is left on flash.
    pub leaving_flushes: Vec<usize>,
    /// Writes past the cache that wait until it is noted that flash failed.
    pub mark_waiters: Vec<usize>,
    /// Requests that had to wait for their range so far.
    pub next_turn: u64,
    /// Clients' requests there are.
    pub foreground: u64,
    /// When the last of them came.
    pub last_foreground_ns: u64,
}

impl Requests {
    pub fn insert(&mut self, req: Req) -> usize {
        self.all.insert(req)
    }

    pub fn remove(&mut self, id: usize) -> Req {
        self.all.remove(id)
    }

    pub fn get(&self, id: usize) -> Option<&Req> {
        self.all.get(id)
    }

    pub fn iter(&self) -> slab::Iter<'_, Req> {
        self.all.iter()
    }

    /// Takes a disk's requests that wait for room on flash, or for the disk to leave it, out of the queues.
    pub fn take_waiting_for_room(&mut self, disk: DiskId) -> Vec<usize> {
        let all = &self.all;
        let mut taken = Vec::new();
        let mut stays = |id: usize| {
            let is_its = all[id].r.disk == disk;
            if is_its {
                taken.push(id);
            }
            !is_its
        };
        self.stalled.retain(|&id| stays(id));
        self.stalled_through.retain(|&id| stays(id));
        self.leaving_flushes.retain(|&id| stays(id));
        taken
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

impl Index<usize> for Requests {
    type Output = Req;

    fn index(&self, id: usize) -> &Req {
        &self.all[id]
    }
}

impl IndexMut<usize> for Requests {
    fn index_mut(&mut self, id: usize) -> &mut Req {
        &mut self.all[id]
    }
}
