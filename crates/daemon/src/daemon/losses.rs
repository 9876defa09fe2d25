//! Notes beside the flash that a device of it is lost, before anybody is told of anything that it lacks.
//!
//! The superblocks of the devices that are left say so as well, and say it first. But they may all be gone one day, and the lost
//! one come back alone: then a start has only what is noted beside the flash to see that it is old. A thread that does
//! nothing else, and takes no lock that anybody holds who waits for a loss.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_engine::api::Effects;
use hearth_io::Spread;
use hearth_reactor::ReactorError;

use super::{Daemon, lock};

/// How long is tried to note it while those who wait for it are held, and how often.
const NOTE_TIME: Duration = Duration::from_secs(10);
const AGAIN_TIME: Duration = Duration::from_millis(200);
/// Wait before the data threads are asked again that have too many orders.
const BUSY_TIME: Duration = Duration::from_millis(1);

/// The thread, until dropped.
pub(super) struct Losses {
    spread: Spread,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Losses {
    fn drop(&mut self) {
        self.spread.note_elsewhere(false);
        if let Some(thread) = self.thread.take()
            // It may be the one that drops the last of the daemon.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that notes lost devices ended abnormally");
        }
    }
}

impl Daemon {
    /// Starts it, where there is anything to do for it. It has been said before that somebody notes losses.
    pub(super) fn start_losses(self: &Arc<Daemon>) -> std::io::Result<Option<Losses>> {
        let spread = lock(&self.pool).flash().joined_spread();
        if self.beside.is_none() || !spread.is_twice() {
            return Ok(None);
        }
        let (daemon, theirs) = (Arc::downgrade(self), spread.clone());
        let thread = std::thread::Builder::new()
            .name("hearth-losses".to_owned())
            .spawn(move || {
                while let Some(generation) = theirs.wait_asked() {
                    note(&daemon, generation);
                }
            })?;
        Ok(Some(Losses {
            spread,
            thread: Some(thread),
        }))
    }

    /// Notes beside the flash that what is older than superblocks of this generation is not the pool. Waits for no lock of
    /// the pool's: whoever has it may be waiting for this.
    fn note_generation(&self, generation: u64) -> std::io::Result<()> {
        let Some(beside) = &self.beside else {
            return Ok(());
        };
        beside.note(|notes| notes.opened = notes.opened.max(generation))
    }

    /// A device that was lost as the pool was closed has older superblocks than the others, too.
    pub(super) fn note_lost_at_rest(&self) {
        if lock(&self.pool).flash().lost().is_empty() || self.cache_is_off() {
            return;
        }
        if let Err(e) = self.note_generation(self.engine.generation()) {
            tracing::warn!("cannot note beside the flash that a device is lost: {e}");
        }
    }
}

fn note(daemon: &Weak<Daemon>, generation: u64) {
    let until = Instant::now() + NOTE_TIME;
    loop {
        let Some(daemon) = daemon.upgrade() else {
            return;
        };
        match daemon.note_generation(generation) {
            Ok(()) => break,
            Err(e) if Instant::now() >= until => {
                tracing::error!(
                    "it cannot be noted beside the flash that a device of it is lost: {e}; if the other devices fail as well, \
                     do not serve the pool with that one"
                );
                break;
            }
            Err(_) => drop(daemon),
        }
        std::thread::sleep(AGAIN_TIME);
    }
    loop {
        let Some(daemon) = daemon.upgrade() else {
            return;
        };
        let engine = daemon.engine.clone();
        let job = move |now: u64, fx: &mut Effects| engine.loss_is_noted(generation, now, fx);
        match daemon.reactors.run(job) {
            Ok(()) => return,
            Err(ReactorError::Busy) => {}
            // They have ended, and nobody waits any more.
            Err(_) => return,
        }
        drop(daemon);
        std::thread::sleep(BUSY_TIME);
    }
}
