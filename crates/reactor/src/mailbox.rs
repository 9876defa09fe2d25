//! What other threads leave for one thread, and how it learns of it.
//!
//! Everything left is taken exactly once: by the owner while it runs, by whoever ends it
//! ([`Mailbox::close`]), or it goes back to the sender. And what was left is never slept over: it is in
//! the box before the owner is woken. Without the thread and its bell, so that a test can try every
//! order of steps.

use crate::sync::{Mutex, MutexGuard};

/// Wakes the owner, if it sleeps.
pub(crate) trait Wake {
    /// See the trait. What was left before is seen by the owner after that.
    fn wake(&self);
}

/// Contents of a mailbox: completions `A` and orders `O`.
pub(crate) struct Letters<A, O> {
    /// Bounded by the requests the thread has in flight.
    pub completions: Vec<A>,
    /// Bounded by the connection limit and by the control plane's own (see `Reactors`).
    pub commands: Vec<O>,
}

impl<A, O> Default for Letters<A, O> {
    fn default() -> Self {
        Letters {
            completions: Vec::new(),
            commands: Vec::new(),
        }
    }
}

struct Locked<A, O> {
    mail: Letters<A, O>,
    /// The thread has ended: nobody will look again.
    closed: bool,
}

/// One thread's mailbox and how to wake it.
pub(crate) struct Mailbox<A, O, W> {
    locked: Mutex<Locked<A, O>>,
    wake: W,
}

impl<A, O, W: Wake> Mailbox<A, O, W> {
    pub(crate) fn new(wake: W) -> Self {
        Mailbox {
            locked: Mutex::new(Locked {
                mail: Letters::default(),
                closed: false,
            }),
            wake,
        }
    }

    /// Leaves completions, all of `list`. Those for a thread that has ended are dropped: their
    /// connections are gone.
    pub(crate) fn complete(&self, list: &mut Vec<A>) {
        let mut locked = self.lock();
        if locked.closed {
            return list.clear();
        }
        locked.mail.completions.append(list);
        drop(locked);
        self.wake.wake();
    }

    /// Leaves an order; gives it back if the thread has ended.
    pub(crate) fn command(&self, command: O) -> Result<(), Box<O>> {
        self.try_command(command, usize::MAX)
    }

    /// Leaves an order unless `max` are waiting or the thread has ended.
    pub(crate) fn try_command(&self, command: O, max: usize) -> Result<(), Box<O>> {
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
    pub(crate) fn take(&self, mail: &mut Letters<A, O>) {
        std::mem::swap(&mut self.lock().mail, mail);
    }

    /// Takes nothing more; returns what was left.
    pub(crate) fn close(&self) -> Letters<A, O> {
        let mut locked = self.lock();
        locked.closed = true;
        std::mem::take(&mut locked.mail)
    }

    fn lock(&self) -> MutexGuard<'_, Locked<A, O>> {
        self.locked.lock().unwrap_or_else(|e| e.into_inner())
    }
}
