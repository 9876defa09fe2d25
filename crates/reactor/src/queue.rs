//! What a client that shares memory must be to run on a data thread.
//!
//! A virtual machine's queue is no stream of bytes: requests lie in memory both sides see, and
//! an eventfd (the doorbell) says that there are new ones. The reactor owns the ring, the
//! doorbell's watch and the engine; a [`Queue`] reads requests out of its memory and writes the
//! outcome back. While the thread is awake nobody has to ring: a queue asks for its doorbell
//! only when the thread is about to sleep, and rings the client's once per round.

use crate::session::SessionCx;
use hearth_engine::api::Completion;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

/// A queue given to the reactors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId {
    pub(crate) thread: u32,
    pub(crate) number: u64,
}

/// One queue of requests in memory shared with a client.
///
/// All methods are called from one thread. None may block.
pub trait Queue: Send {
    /// An eventfd the client rings. Open as long as the queue lives.
    fn doorbell(&self) -> RawFd;
    /// Takes requests that wait, a bounded number; true if more may be waiting.
    fn pump(&mut self, cx: &mut SessionCx<'_>) -> bool;
    /// A request ended.
    fn completed(&mut self, completion: Completion, cx: &mut SessionCx<'_>);
    /// Makes everything completed since the last call visible to the client; returns the
    /// eventfd to ring, if the client wants to be told.
    fn publish(&mut self) -> Option<Arc<OwnedFd>>;
    /// Asks the client to ring from now on; true if requests came before it could know.
    fn arm(&mut self) -> bool;
    /// True if requests wait. Cheap: called over and over while the thread polls.
    fn has_work(&self) -> bool;
    /// The client broke the rules: take nothing more from it.
    fn is_broken(&self) -> bool;
    /// Take no further request.
    fn shutdown(&mut self);
}
