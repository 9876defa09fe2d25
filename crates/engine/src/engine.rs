//! The engine as the rest of the daemon sees it: one per pool, shared by all threads.
//!
//! All state is in one [`Core`] behind one short lock, which plain read hits do without
//! ([`crate::lanes`]); checksums, copies and system calls happen outside.

mod devices;
mod disks;
mod open;
mod report;
mod sample;
mod verify;
mod without;

use crate::api::{Effects, FlashFault, Request};
use crate::core::Core;
use crate::lanes::{After, Shared};
use hearth_io::IoDone;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

pub use devices::{AreaRefused, Emptying};
pub use disks::ControlError;
pub use open::{KnownDisk, OpenError, OpenReport, OpenedFrom};
pub use report::{DiskStatus, OrderStatus};
pub use sample::{Owed, STRETCH, Sample};
pub use without::{FailedAlone, Hindrance, LeftWithout};

/// The cache engine of one pool.
pub struct Engine {
    core: Mutex<Core>,
    /// Also in the core: what hits need.
    shared: Arc<Shared>,
}

impl Engine {
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        // A panic inside the core is a bug that must not take the other disks along silently;
        // the state is still the best there is.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes requests, all of one thread; `now_ns` is monotonic. Drains `reqs`.
    pub fn submit(&self, now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects) {
        let lane = Shared::lane(reqs);
        let mut after = self.shared.take(lane, now_ns, reqs, fx);
        if !reqs.is_empty() {
            after.must = true;
        }
        let Some(mut core) = self.visit(Some(lane), after, now_ns, fx) else {
            return;
        };
        for r in reqs.drain(..) {
            core.submit(r, now_ns, fx);
        }
        core.settle(now_ns, fx);
    }

    /// Takes finished operations. Drains `dones`.
    pub fn io_done(&self, now_ns: u64, dones: &mut Vec<IoDone>, fx: &mut Effects) {
        let (lane, mut after) = self.shared.done(now_ns, dones, fx);
        if !dones.is_empty() {
            after.must = true;
        }
        let Some(mut core) = self.visit(lane, after, now_ns, fx) else {
            return;
        };
        for d in dones.drain(..) {
            core.done(d, now_ns, fx);
        }
        core.settle(now_ns, fx);
    }

    /// The core, if a thread has to go there after it was in its lane; what that has noted is folded. What
    /// only ought to be done is done if nobody else is there.
    fn visit(
        &self,
        lane: Option<usize>,
        after: After,
        now_ns: u64,
        fx: &mut Effects,
    ) -> Option<MutexGuard<'_, Core>> {
        let mut core = if after.must {
            self.core()
        } else if after.settle || after.fold {
            match self.core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(e)) => e.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            }
        } else {
            return None;
        };
        if let Some(lane) = lane {
            core.fold(lane, now_ns, fx);
        }
        if !after.must && !after.settle {
            core.publish_pool(now_ns);
            return None;
        }
        Some(core)
    }

    /// Background work; returns when to be called again at the latest.
    pub fn tick(&self, now_ns: u64, fx: &mut Effects) -> Option<u64> {
        Some(self.core().tick(now_ns, fx))
    }

    /// Writes flash no more: the disks go on from their origins, and the destager empties it. With
    /// `mark` the failure is noted on flash; without, the caller has seen to it durably that the next
    /// start trusts nothing there which the origins may have passed.
    pub fn give_flash_up(&self, fault: FlashFault, mark: bool, now_ns: u64, fx: &mut Effects) {
        let mut core = self.core();
        core.give_flash_up(fault, mark, now_ns, fx);
        core.settle(now_ns, fx);
    }

    /// Says that it is noted in another place that devices are lost, as superblocks of this generation have it
    /// ([`hearth_io::Spread::wait_asked`]).
    pub fn loss_is_noted(&self, generation: u64, now_ns: u64, fx: &mut Effects) {
        let mut core = self.core();
        core.loss_is_noted(generation, now_ns, fx);
        core.settle(now_ns, fx);
    }

    /// The generation of the superblock that was stored last.
    pub fn generation(&self) -> u64 {
        self.core().flash.sb.generation
    }

    /// Says that a later start will see in another place that flash was given up, where flash itself took
    /// no note of it ([`PoolStats::flash_unnoted`]).
    pub fn flash_is_noted_elsewhere(&self, now_ns: u64, fx: &mut Effects) {
        let mut core = self.core();
        core.flash.noted_elsewhere();
        core.route_flash(now_ns, fx);
        core.settle(now_ns, fx);
    }
}
