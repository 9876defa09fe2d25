//! What the data threads ask of the cache engine.

use hearth_engine::api::{Effects, Request};
use hearth_io::IoDone;

/// The engine as the data threads see it: events in, effects out, shared by all threads.
///
/// Every request gets exactly one completion, from whichever call and on whichever thread;
/// every I/O returned is submitted once by the thread that made the call and handed back once
/// to [`io_done`](Self::io_done), perhaps much later. None of the methods blocks.
pub trait BlockEngine: Send + Sync {
    /// Takes all of `reqs`, in order; appends to `fx`. `owner` and `tag` of each come back in
    /// its completion. Times are monotonic nanoseconds.
    fn submit(&self, now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects);
    /// Takes all of `dones`; appends to `fx`.
    fn io_done(&self, now_ns: u64, dones: &mut Vec<IoDone>, fx: &mut Effects);
    /// Does what is due by now; returns when it next wants to be called (`None`: not soon).
    /// Called by one background thread only.
    fn tick(&self, now_ns: u64, fx: &mut Effects) -> Option<u64>;
}

impl BlockEngine for hearth_engine::Engine {
    fn submit(&self, now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects) {
        hearth_engine::Engine::submit(self, now_ns, reqs, fx);
    }

    fn io_done(&self, now_ns: u64, dones: &mut Vec<IoDone>, fx: &mut Effects) {
        hearth_engine::Engine::io_done(self, now_ns, dones, fx);
    }

    fn tick(&self, now_ns: u64, fx: &mut Effects) -> Option<u64> {
        hearth_engine::Engine::tick(self, now_ns, fx)
    }
}
