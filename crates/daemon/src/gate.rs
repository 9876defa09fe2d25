//! Writes that may leave on flash what an origin lacks wait until that is noted beside the flash.
//!
//! Of each disk is noted whether something may be dirty; where nothing is, the flash may die and the disk is served all the
//! same. So the first write of a disk that is noted as whole is held until the note says otherwise,
//! durably. All others pass, at the price of one look at a bit.
//!
//! **Why a disk that is noted as whole is whole.** Whoever is to note it closes the gate, waits until every thread that was
//! handing requests to the engine is through, and only then asks the engine whether anything is in flight, dirty,
//! or written to the origin without being durable there. A write that came later is held; one that came before is in
//! the engine, which says so.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use hearth_engine::api::{DiskId, ReqOp, Request};

use crate::daemon::lock;

/// Counters that threads on their way to the engine are spread over, so that they do not share a cache line.
pub(crate) const LANES: usize = 16;

/// One of them, alone on its line.
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Lane(pub(crate) AtomicUsize);

/// Who may write.
pub(crate) struct Gate {
    /// A bit for each disk whose writes are held.
    shut: Box<[AtomicU64]>,
    /// No disk's are, ever.
    off: bool,
    passing: [Lane; LANES],
    held: Mutex<Held>,
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    requests: Vec<Request>,
    stop: bool,
}

/// A thread is handing requests to the engine, until dropped.
pub(crate) struct Passing<'a>(pub(crate) &'a AtomicUsize);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The counter of this thread.
pub(crate) fn lane() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % LANES;
    }
    MINE.with(|mine| *mine)
}

fn changes(op: ReqOp) -> bool {
    match op {
        ReqOp::Write { .. } | ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => true,
        ReqOp::Read | ReqOp::Flush | ReqOp::Prefetch => false,
    }
}

impl Gate {
    /// Shut for all disks but those that `open` names; `None`: open for all, always.
    pub(crate) fn new(open: Option<&hearth_format::IdSet>) -> Gate {
        let gate = Gate {
            shut: (0..1024).map(|_| AtomicU64::new(u64::MAX)).collect(),
            off: open.is_none(),
            passing: Default::default(),
            held: Mutex::default(),
            changed: Condvar::new(),
        };
        for id in open.into_iter().flat_map(|ids| ids.iter()) {
            gate.open(id);
        }
        gate
    }

    /// True if it holds nobody, ever.
    pub(crate) fn is_off(&self) -> bool {
        self.off
    }

    fn is_shut(&self, id: DiskId) -> bool {
        let word = self.shut.get(usize::from(id) / 64);
        word.is_some_and(|word| word.load(Ordering::SeqCst) & (1 << (id % 64)) != 0)
    }

    /// Takes out of `reqs` what has to wait. The rest may be handed to the engine as long as what is returned lives.
    pub(crate) fn pass(&self, reqs: &mut Vec<Request>) -> Option<Passing<'_>> {
        if self.off || !reqs.iter().any(|req| changes(req.op)) {
            return None;
        }
        let passing = self.passing.get(lane()).map(|lane| {
            // Before looking: who shuts the gate looks at this after it has.
            lane.0.fetch_add(1, Ordering::SeqCst);
            Passing(&lane.0)
        });
        let waits = |req: &Request| changes(req.op) && self.is_shut(req.disk);
        if reqs.iter().any(waits) {
            let mut held = lock(&self.held);
            held.requests.extend(reqs.extract_if(.., |req| waits(req)));
            drop(held);
            self.changed.notify_all();
        }
        passing
    }

    /// Holds the writes of a disk from now on. When this returns, none is on its way to the engine.
    pub(crate) fn shut(&self, id: DiskId) {
        if let Some(word) = self.shut.get(usize::from(id) / 64) {
            word.fetch_or(1 << (id % 64), Ordering::SeqCst);
        }
        for lane in &self.passing {
            while lane.0.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Lets the writes of a disk pass. Those that are held are still to be [taken](Self::take).
    pub(crate) fn open(&self, id: DiskId) {
        if let Some(word) = self.shut.get(usize::from(id) / 64) {
            word.fetch_and(!(1 << (id % 64)), Ordering::SeqCst);
        }
    }

    /// Disks with writes that are held. Waits for some for at most `time`; `None` when there is nothing to wait for any more.
    pub(crate) fn wait(&self, time: Duration) -> Option<Vec<DiskId>> {
        let held = lock(&self.held);
        let waited = self
            .changed
            .wait_timeout_while(held, time, |held| !held.stop && held.requests.is_empty());
        let (held, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if held.stop && held.requests.is_empty() {
            return None;
        }
        let mut ids: Vec<DiskId> = held.requests.iter().map(|req| req.disk).collect();
        ids.sort_unstable();
        ids.dedup();
        Some(ids)
    }

    /// What is held of disks whose gate is open by now.
    pub(crate) fn take(&self) -> Vec<Request> {
        let mut held = lock(&self.held);
        let open = |req: &mut Request| !self.is_shut(req.disk);
        held.requests.extract_if(.., open).collect()
    }

    /// Nobody waits for more when what is held now is gone.
    pub(crate) fn stop(&self) {
        lock(&self.held).stop = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(tag: u64, disk: DiskId, op: ReqOp) -> Request {
        Request::new(tag, disk, op, 0, 4096, None, 0)
    }

    fn tags(reqs: &[Request]) -> Vec<u64> {
        reqs.iter().map(|req| req.tag).collect()
    }

    #[test]
    fn only_changes_of_disks_that_are_noted_as_whole_wait() {
        let gate = Gate::new(Some(&[7].into_iter().collect()));
        let mut reqs = vec![
            request(1, 7, ReqOp::Write { fua: false }),
            request(2, 8, ReqOp::Write { fua: false }),
            request(3, 8, ReqOp::Read),
            request(4, 8, ReqOp::Flush),
            request(5, 8, ReqOp::Discard { fua: false }),
            request(6, 9, ReqOp::Write { fua: true }),
        ];
        drop(gate.pass(&mut reqs));
        assert_eq!(tags(&reqs), [1, 3, 4]);
        assert_eq!(gate.wait(Duration::ZERO), Some(vec![8, 9]));
        assert!(gate.take().is_empty());
        gate.open(8);
        // In their order.
        assert_eq!(tags(&gate.take()), [2, 5]);
        gate.stop();
        assert_eq!(gate.wait(Duration::ZERO), Some(vec![9]));
        gate.open(9);
        assert_eq!(tags(&gate.take()), [6]);
        assert_eq!(gate.wait(Duration::ZERO), None);
        gate.shut(7);
        let mut reqs = vec![request(7, 7, ReqOp::Write { fua: false })];
        drop(gate.pass(&mut reqs));
        assert!(reqs.is_empty());
    }

    #[test]
    fn who_shuts_it_waits_for_those_on_their_way() {
        let gate = Gate::new(Some(&[7].into_iter().collect()));
        let mut reqs = vec![request(1, 7, ReqOp::Write { fua: false })];
        let passing = gate.pass(&mut reqs);
        assert_eq!(reqs.len(), 1);
        let through = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                gate.shut(7);
                assert!(through.load(Ordering::SeqCst), "it did not wait");
            });
            while !gate.is_shut(7) {
                std::thread::yield_now();
            }
            through.store(true, Ordering::SeqCst);
            drop(passing);
        });
    }

    #[test]
    fn one_that_is_off_holds_nobody() {
        let gate = Gate::new(None);
        let mut reqs = vec![request(1, 7, ReqOp::Write { fua: false })];
        assert!(gate.pass(&mut reqs).is_none() && reqs.len() == 1);
    }
}
