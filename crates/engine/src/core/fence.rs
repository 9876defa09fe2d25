//! A disk that its storage has shut out, or that another host has taken over.
//!
//! Somebody else goes on with the origin from here. Whatever this engine acknowledged from now on
//! would be lost to that one, and whatever it wrote would be older than what that one wrote. So
//! nothing is acknowledged any more, reads included (what is cached may be old by now), and nothing
//! goes to the origin. What is dirty stays on flash and is listed. The disk stays so until it is
//! attached anew, which the control plane does only when a user has decided.
//!
//! An origin's driver says it with [`IoError::SHUT_OUT`]. It is believed at once, before anybody is
//! asked.

use crate::api::{DiskId, Effects};
use crate::core::Core;
use crate::engine::{ControlError, Engine};
use crate::ids::ReqId;
use crate::request::state::State;
use hearth_io::{BLOCK, IoDone, IoError, Target};

impl Core {
    /// Looks whether a finished operation says that its disk is shut out.
    pub fn note_shut_out(&mut self, done: &IoDone, now: u64, fx: &mut Effects) {
        if let Target::Origin(disk) = done.op.target
            && done.result == Err(IoError::SHUT_OUT)
        {
            self.fence(disk, now, fx);
        }
    }

    /// True if nothing may go to the disk's origin.
    pub fn fenced(&self, disk: DiskId) -> bool {
        self.disk(disk).is_some_and(|d| d.fenced)
    }

    /// Stops a disk for good.
    pub fn fence(&mut self, disk: DiskId, now: u64, fx: &mut Effects) {
        let Some(d) = self.disk_mut(disk).filter(|d| !d.fenced) else {
            return;
        };
        d.fenced = true;
        d.drain = false;
        d.origin.destage.urgent.clear();
        self.publish(disk);
        // From here on no hit of it is answered.
        self.shared.grace();
        let d = self.known_mut(disk);
        // Who waits for a range to become clean waits in vain.
        for id in std::mem::take(&mut d.clean_waiters) {
            self.reqs[id].failed = Some(crate::api::ReqError::Io);
            self.finish(id, now, fx);
        }
        // And who waits for room: nothing of the disk is destaged any more, so none ever comes.
        for id in self.reqs.take_waiting_for_room(disk) {
            self.give_up(id, now, fx);
        }
    }

    /// Fails a write of a stopped disk that waits for room, as soon as none of its parts is on its way.
    pub fn give_up(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let req = &mut self.reqs[id];
        req.failed = Some(crate::api::ReqError::Io);
        let ended = match &mut req.state {
            State::Write(write) => write.stops_appending(),
            _ => true,
        };
        // Else the last part to arrive ends it.
        if ended {
            self.finish(id, now, fx);
        }
    }
}

impl Engine {
    /// Stops a disk: its requests fail, nothing goes to its origin, what is dirty stays. Until it is
    /// detached and attached again.
    pub fn fence(&self, id: DiskId, now_ns: u64, fx: &mut Effects) -> Result<(), ControlError> {
        let mut core = self.core();
        core.disk(id).ok_or(ControlError::NoDisk)?;
        core.fence(id, now_ns, fx);
        Ok(())
    }

    /// Attached disks that are stopped.
    pub fn fenced_disks(&self) -> Vec<DiskId> {
        let core = self.core();
        let disks = core.disks.iter().flatten();
        disks
            .filter(|d| d.fenced && d.attached)
            .map(|d| d.cfg.id)
            .collect()
    }

    /// The first `max` ranges the origin does not have, zeroed ones included, in order: byte offset
    /// and length.
    pub fn dirty_ranges(&self, id: DiskId, max: usize) -> Vec<(u64, u64)> {
        let core = self.core();
        let Some(d) = core.disk(id) else {
            return Vec::new();
        };
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut at = 0;
        while ranges.len() < max {
            let dirty = d.dirty.first_in(at, u64::MAX);
            let zero = d.zero.first_in(at, u64::MAX);
            let Some(start) = dirty.into_iter().chain(zero).min() else {
                break;
            };
            // A run of one kind may go on as one of the other.
            let mut end = start;
            loop {
                let more = d
                    .dirty
                    .run_len(end, u64::MAX - end)
                    .max(d.zero.run_len(end, u64::MAX));
                if more == 0 {
                    break;
                }
                end = end.saturating_add(more);
            }
            ranges.push((start * BLOCK, d.clip(start, end - start)));
            at = end;
        }
        ranges
    }
}
