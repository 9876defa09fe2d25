//! Seeing requests come and go, whatever protocol they came over.
//!
//! Who wants to know what guests do to a disk (histograms, recordings, miss-ratio curves) must
//! not be built into every exporter, and must not see the cache's own I/O. All clients' requests
//! pass one place: where a data thread names them for the engine. A [`Watch`] sits there. What
//! it does is paid by every request, so it gets many requests in one call where there are many.

use hearth_engine::api::{DiskId, ReqOp, Request};

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its disk.
    pub disk: DiskId,
    /// What it wanted.
    pub op: ReqOp,
    /// When it arrived, monotonic nanoseconds.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
}

/// What one data thread tells. All calls come from that thread; none may block for long.
pub trait Watch: Send {
    /// Requests of one client have arrived (their `start_ns` says when).
    fn arrived(&mut self, requests: &[Request]);
    /// A request has ended. More may follow before [`settle`](Self::settle).
    fn ended(&mut self, ended: Ended);
    /// The thread has delivered what ended in this round.
    fn settle(&mut self);
}

/// Gives every data thread its [`Watch`].
pub trait Watcher: Send + Sync {
    /// A watch for a thread that is about to start.
    fn watch(&self) -> Box<dyn Watch>;
}
