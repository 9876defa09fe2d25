//! What other threads leave for a data thread.

use crate::mailbox::{Letters, Mailbox, Wake};
use crate::peer::{ListenerId, SessionFactory};
use crate::queue::{Queue, QueueId};
use crate::reactors::Carried;
use crate::session::Session;
use hearth_engine::api::{Completion, Effects, Request};
use hearth_io::WakeHandle;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender};

/// Something to do on the engine's behalf, with its effects carried out.
pub(crate) type EngineJob = Box<dyn FnOnce(u64, &mut Effects) + Send>;

/// An order from another thread.
pub(crate) enum Command {
    /// A connection to serve; it is already counted.
    Adopt(OwnedFd, Box<dyn Session>),
    /// A queue to serve.
    AddQueue(QueueId, Box<dyn Queue>),
    /// Let a queue go when its requests have ended, then drop the sender.
    RemoveQueue(QueueId, SyncSender<()>),
    /// Ring a client's eventfd once.
    Ring(Arc<OwnedFd>),
    /// A listening socket to accept on.
    Listen(ListenerId, OwnedFd, Arc<dyn SessionFactory>),
    /// Accept there no more, then drop the sender.
    Unlisten(ListenerId, SyncSender<()>),
    /// A request of the control plane (background thread only).
    Request(Request, SyncSender<Completion>),
    /// An engine call of the control plane (background thread only).
    Job(EngineJob),
    /// Look at all connections: some may have reason to close.
    Look,
    /// End connections, then the thread.
    Stop,
    /// The same, but connections that can go over to another process are sent there.
    HandOver(Sender<Carried>),
}

/// Contents of an inbox.
pub(crate) type Mail = Letters<Completion, Command>;

/// One thread's inbox and how to wake it.
pub(crate) type Inbox = Mailbox<Completion, Command, WakeHandle>;

impl Wake for WakeHandle {
    fn wake(&self) {
        WakeHandle::wake(self);
    }
}
