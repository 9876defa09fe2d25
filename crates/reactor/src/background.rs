//! The thread that works when no client asks: engine ticks, and calls of the control plane.
//!
//! Destaging, eviction and flushing have their own ring here, so that they never hold up a
//! data thread. What the control plane wants of the engine (flush this disk, drop that range)
//! is done here too, because only a thread with a ring can carry out its effects.

use crate::effects::Carrier;
use crate::engine::BlockEngine;
use crate::inbox::{Command, Mail};
use crate::pulse::thread_name;
use crate::reactors::Shared;
use crate::tags::{Tag, Tags};
use hearth_engine::api::{Completion, Request};
use hearth_io::{IoDone, Proactor, Wait};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Longest sleep between two ticks: work may come up without this thread being told.
const TICK_MAX_NS: u64 = 100_000_000;
/// Shortest time between two ticks, so that an impatient engine does not spin.
const TICK_MIN_NS: u64 = 100_000;
/// How long the thread waits for I/O in flight once it is to stop.
const DRAIN_NS: u64 = 10_000_000_000;

/// How often memory the allocator holds is given back, at most, and only while nothing goes on.
const TRIM_NS: u64 = 10_000_000_000;

/// Returns freed memory to the system: after a burst of long requests the allocator keeps many
/// times what the index needs.
fn trim_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers; thread-safe by malloc_trim(3).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// See the module.
pub(crate) struct Background {
    index: u32,
    engine: Arc<dyn BlockEngine>,
    shared: Arc<Shared>,
    proactor: Box<dyn Proactor>,
    tags: Tags<SyncSender<Completion>>,
    requests: Vec<Request>,
    carrier: Carrier,
    stop: Option<u64>,
}

impl Background {
    pub(crate) fn new(
        engine: Arc<dyn BlockEngine>,
        shared: Arc<Shared>,
        proactor: Box<dyn Proactor>,
    ) -> Background {
        Background {
            index: shared.threads,
            engine,
            carrier: Carrier::new(shared.threads, &shared),
            shared,
            proactor,
            tags: Tags::default(),
            requests: Vec::new(),
            stop: None,
        }
    }

    /// Runs until stopped. An error means that the driver cannot go on; `told` hears of it.
    pub(crate) fn run(mut self, told: Option<fn(&str, &io::Error)>) -> io::Result<()> {
        let result = self.rounds();
        if let (Err(e), Some(told)) = (&result, told) {
            told(&thread_name(self.index, self.shared.threads), e);
        }
        result
    }

    fn rounds(&mut self) -> io::Result<()> {
        let mut events = Vec::new();
        let mut dones: Vec<IoDone> = Vec::new();
        let mut mail = Mail::default();
        let mut tick_at = 0;
        let mut trim_at = 0;
        loop {
            let until = tick_at.min(self.stop.unwrap_or(u64::MAX));
            let now = self
                .proactor
                .wait(Wait::Until(until), &mut events, &mut dones)?;
            self.shared.pulse.beat(self.index, now);
            events.clear();
            self.shared.inbox(self.index).take(&mut mail);
            mail.completions.drain(..).for_each(|c| self.deliver(c));
            for command in mail.commands.drain(..) {
                self.command(command, now);
            }
            if !self.requests.is_empty() {
                self.engine
                    .submit(now, &mut self.requests, &mut self.carrier.fx);
                self.apply();
            }
            if !dones.is_empty() {
                self.engine.io_done(now, &mut dones, &mut self.carrier.fx);
                self.apply();
            }
            if let Some(end) = self.stop {
                // No further ticks: they would start new work for ever.
                tick_at = end;
                let left = self.proactor.io_in_flight();
                if left == 0 && self.tags.len() == 0 {
                    return Ok(());
                }
                if now >= end {
                    tracing::error!(
                        operations = left,
                        "background I/O did not finish; stopping without it"
                    );
                    return Ok(());
                }
            } else if now >= tick_at {
                let next = self
                    .engine
                    .tick(now, &mut self.carrier.fx)
                    .unwrap_or(u64::MAX);
                tick_at = next.clamp(now + TICK_MIN_NS, now + TICK_MAX_NS);
                if next > tick_at && now >= trim_at {
                    trim_at = now + TRIM_NS;
                    trim_memory();
                }
                self.apply();
            }
        }
    }

    fn command(&mut self, command: Command, now: u64) {
        match command {
            Command::Request(mut request, answer) => {
                request.owner = self.index;
                request.tag = self.tags.put(Tag::new(answer, 0, &request));
                self.requests.push(request);
            }
            Command::Job(job) => {
                job(now, &mut self.carrier.fx);
                self.apply();
            }
            Command::Stop => self.stop = Some(now + DRAIN_NS),
            // Sent to data threads only.
            Command::Adopt(..)
            | Command::AddQueue(..)
            | Command::RemoveQueue(..)
            | Command::Ring(_)
            | Command::Listen(..)
            | Command::Unlisten(..)
            | Command::HandOver(_)
            | Command::Look => {}
        }
    }

    fn apply(&mut self) {
        self.carrier.carry_out(&mut *self.proactor, &self.shared);
        let mut own = std::mem::take(&mut self.carrier.own);
        own.drain(..).for_each(|c| self.deliver(c));
        self.carrier.own = own;
    }

    fn deliver(&mut self, mut completion: Completion) {
        match self.tags.take(completion.tag) {
            Some(tag) => {
                completion.tag = tag.tag;
                // Whoever asked may have stopped waiting; its channel has room for the one answer.
                let _ = tag.owner.try_send(completion);
            }
            None => tracing::error!(
                tag = completion.tag,
                "the engine completed a request that is not outstanding"
            ),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Dropping what is left tells those who wait for it.
        self.shared.inbox(self.index).close();
    }
}
