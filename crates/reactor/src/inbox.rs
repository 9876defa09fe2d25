//! What other threads leave for a data thread.

use crate::peer::{ListenerId, SessionFactory};
use crate::queue::{Queue, QueueId};
use crate::session::Session;
use hearth_engine::api::{Completion, Effects, Request};
use hearth_io::WakeHandle;
use std::os::fd::OwnedFd;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard};

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
}

/// Contents of an inbox.
#[derive(Default)]
pub(crate) struct Mail {
    /// Bounded by the requests the thread has in flight.
    pub completions: Vec<Completion>,
    /// Bounded by the connection limit and by the control plane's own (see `Reactors`).
    pub commands: Vec<Command>,
}

#[derive(Default)]
struct Locked {
    mail: Mail,
    /// The thread has ended: nobody will look again.
    closed: bool,
}

/// One thread's inbox and how to wake it.
pub(crate) struct Inbox {
    locked: Mutex<Locked>,
    wake: WakeHandle,
}

impl Inbox {
    pub(crate) fn new(wake: WakeHandle) -> Inbox {
        Inbox {
            locked: Mutex::default(),
            wake,
        }
    }

    /// Leaves completions, all of `list`. Those for a thread that has ended are dropped: their
    /// connections are gone.
    pub(crate) fn complete(&self, list: &mut Vec<Completion>) {
        let mut locked = self.lock();
        if locked.closed {
            return list.clear();
        }
        locked.mail.completions.append(list);
        drop(locked);
        self.wake.wake();
    }

    /// Leaves an order; gives it back if the thread has ended.
    pub(crate) fn command(&self, command: Command) -> Result<(), Box<Command>> {
        self.try_command(command, usize::MAX)
    }

    /// Leaves an order unless `max` are waiting or the thread has ended.
    pub(crate) fn try_command(&self, command: Command, max: usize) -> Result<(), Box<Command>> {
        let mut locked = self.lock();
        if locked.closed || locked.mail.commands.len() >= max {
            return Err(Box::new(command));
        }
        locked.mail.commands.push(command);
        drop(locked);
        self.wake.wake();
        Ok(())
    }

    /// Lets the thread come round once, if it sleeps.
    pub(crate) fn wake(&self) {
        self.wake.wake();
    }

    /// Exchanges the contents with `mail`, which should be empty.
    pub(crate) fn take(&self, mail: &mut Mail) {
        std::mem::swap(&mut self.lock().mail, mail);
    }

    /// Takes nothing more; returns what was left.
    pub(crate) fn close(&self) -> Mail {
        let mut locked = self.lock();
        locked.closed = true;
        std::mem::take(&mut locked.mail)
    }

    fn lock(&self) -> MutexGuard<'_, Locked> {
        self.locked.lock().unwrap_or_else(|e| e.into_inner())
    }
}
