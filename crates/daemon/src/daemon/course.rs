//! What follows from what happens to a disk: the course of its life.
//!
//! [`Life`] says what a disk does next and what has to follow. Here that is done, by whoever has the
//! disk's turn. Some of it brings news of its own (the engine has let go of it, its record is erased), of
//! which the life is told in turn until nothing follows any more.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hearth_engine::ControlError;
use hearth_engine::api::{DiskId, OriginState};
use hearth_events::Events;

use super::admission::GIVE_UP_TIME;
use super::slot::Slot;
use super::{Daemon, control_error, lock};
use crate::api::types::DrainProgress;
use crate::clients::Clients;
use crate::error::{Error, Result};
use crate::exports::DiskExport;
use crate::life::{Effect, Event, Life, Refusal};
use crate::origin;
use crate::progress::Progress;
use crate::table::{Purpose, Slots};

/// The right to change a disk.
pub(super) type Turn = crate::table::Turn<Slot>;

/// Notices kept of a disk; the oldest goes first.
const NOTICES_MAX: usize = 10;
/// How long a change of a disk waits while the disk's origin is being opened.
const OPENING_TIME: Duration = Duration::from_secs(3);
/// How long it waits for another change of the same disk, which may wait for what is in flight.
const CHANGING_TIME: Duration = Duration::from_secs(60);

/// An attempt to attach or add a disk. If it ends without a word, the disk is as it was before.
pub(super) struct Attempt<'a> {
    daemon: &'a Arc<Daemon>,
    turn: &'a Turn,
    over: bool,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(daemon: &'a Arc<Daemon>, turn: &'a Turn) -> Attempt<'a> {
        Attempt {
            daemon,
            turn,
            over: false,
        }
    }

    /// It has come to something, of which the disk's life was told.
    pub(super) fn end(mut self) {
        self.over = true;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.daemon.tell(self.turn, Event::Abandoned);
        }
    }
}

impl Slot {
    /// Takes a step of its life; what has to follow.
    fn step(&mut self, event: Event, events: &Events) -> std::result::Result<Vec<Effect>, Refusal> {
        let done = matches!(event, Event::Drained);
        let begun = matches!(event, Event::Flush | Event::Remove { .. });
        let (next, effects) = self.life.on(event)?;
        let before = std::mem::replace(&mut self.life, next);
        if begun {
            self.session.progress = Progress::default();
            self.session.shown = None;
            self.session.incomplete = None;
        } else if before.is_busy() && !self.life.is_busy() {
            let shown = self.session.shown.take().filter(|_| done);
            if done {
                events.tell(hearth_events::Event::DiskFlushed {
                    disk: self.name.clone(),
                });
            }
            self.session.shown = shown.map(|p| DrainProgress { done: true, ..p });
        }
        Ok(effects)
    }
}

impl Daemon {
    /// The turn of disk `name`. While its origin is being opened it is waited for, a little; other disks'
    /// operations go on meanwhile.
    pub(super) fn turn_for(&self, name: &str) -> Result<Turn> {
        self.turn_unless(name, |_| Ok(()))
    }

    /// The same, unless `check`, which is asked before and while somebody waits, has an objection.
    pub(super) fn turn_unless(
        &self,
        name: &str,
        check: impl Fn(&Slot) -> Result<()>,
    ) -> Result<Turn> {
        let find = |slots: &Slots<Slot>| -> Result<DiskId> {
            self.not_stopping()?;
            let slot = slots.get(name).filter(|slot| slot.life.is_known());
            let slot = slot.ok_or_else(|| Error::no_disk(name))?;
            check(slot)?;
            match slot.life {
                // The last step may wait for an origin that hangs.
                Life::Leaving => Err(Error::conflict(
                    format!("disk {name} is being removed"),
                    "wait until it is gone",
                )),
                _ => Ok(slot.id),
            }
        };
        let limit = |purpose| match purpose {
            Purpose::Opening => OPENING_TIME,
            Purpose::Changing => CHANGING_TIME,
        };
        if let Some(turn) = self.disks.turn_within(limit, find)? {
            return Ok(turn);
        }
        self.not_stopping()?;
        let id = self.with_slot(name, |slot| Ok(slot.id))?;
        Err(match self.disks.lock().purpose(id) {
            Some(Purpose::Opening) => Error::conflict(
                format!("the origin of disk {name} is being opened and does not answer"),
                "see whether its device or network mount hangs",
            ),
            _ => Error::conflict(
                format!("disk {name} is being changed by somebody else"),
                "see whether its origin or the flash hangs, and try again",
            ),
        })
    }

    /// Tells a disk's life what happened, and does what follows. An error means that it cannot happen
    /// now, and that nothing was done.
    pub(super) fn try_tell(
        self: &Arc<Daemon>,
        turn: &Turn,
        event: Event,
    ) -> std::result::Result<(), Refusal> {
        let id = turn.id();
        let mut effects: VecDeque<Effect> = self.step_of(id, event)?.into();
        while let Some(effect) = effects.pop_front() {
            let Some(news) = self.perform(turn, effect) else {
                continue;
            };
            match self.step_of(id, news) {
                Ok(more) => effects.extend(more),
                Err(refusal) => tracing::error!(disk = id, "{refusal:?}: this cannot be"),
            }
        }
        self.disks.changed();
        Ok(())
    }

    /// The same of what may always happen, or does not matter any more.
    pub(super) fn tell(self: &Arc<Daemon>, turn: &Turn, event: Event) {
        if let Err(refusal) = self.try_tell(turn, event) {
            tracing::debug!(disk = turn.id(), "nothing follows: {refusal:?}");
        }
    }

    fn step_of(&self, id: DiskId, event: Event) -> std::result::Result<Vec<Effect>, Refusal> {
        let mut disks = self.disks.lock();
        let slot = disks.by_id_mut(id).ok_or(Refusal::Unknown)?;
        slot.step(event, &self.events)
    }

    /// Does what has to follow; what comes of it, if that matters.
    fn perform(self: &Arc<Daemon>, turn: &Turn, effect: Effect) -> Option<Event> {
        let id = turn.id();
        let name = self.name_of(id);
        match effect {
            Effect::Offer => self.offer(id),
            Effect::Withdraw => self.exports.remove(&name),
            Effect::Shut(shut) => {
                if let Some(export) = self.export_of(id) {
                    export.set_closing(shut);
                }
            }
            Effect::Drain(all) => {
                if let Err(e) = self.engine.drain(id, all)
                    && all
                {
                    let what = format!("write back what is dirty of {name}");
                    return Some(Event::Failed(control_error(&what, e)));
                }
                self.poke();
            }
            Effect::Settle => return self.settle(id, &name),
            Effect::Detach => return self.detach(id, &name),
            Effect::Reattach => self.reattach(id),
            Effect::Disconnect => self.exports.disconnect(&name),
            Effect::CutOff => {
                if let Some(export) = self.export_of(id) {
                    export.set_gone();
                    self.reactors.look();
                }
                self.observer.forget_disk(id);
            }
            Effect::Close { wait: false } => self.close(id, false),
            Effect::Close { wait: true } => {
                turn.begin_opening();
                self.close(id, true);
                // A stop has come meanwhile: the next start finds the disk as it was.
                return turn.begin_change().then_some(Event::Closed);
            }
            Effect::Erase => return Some(self.erase(id)),
            Effect::GiveUp => {
                turn.begin_opening();
                self.give_up(id);
                let _ = turn.begin_change();
                return Some(Event::GivenUp);
            }
            Effect::DropClaim => {
                let claim = self.slot_by_id(id, |slot| slot.claim.take());
                drop(claim);
            }
            Effect::Retire => self.retire(id, &name),
            Effect::Tell(error) => self.note_failure(id, &name, error),
        }
        None
    }

    fn slot_by_id<T>(&self, id: DiskId, look: impl FnOnce(&mut Slot) -> Option<T>) -> Option<T> {
        look(self.disks.lock().by_id_mut(id)?)
    }

    pub(super) fn name_of(&self, id: DiskId) -> String {
        self.slot_by_id(id, |slot| Some(slot.name.clone()))
            .unwrap_or_default()
    }

    fn export_of(&self, id: DiskId) -> Option<Arc<DiskExport>> {
        self.slot_by_id(id, |slot| slot.export.clone())
    }

    /// Makes a disk of the engine visible to clients. The slot has the export last: it is reported as attached from
    /// then on, and clients that wait for that must find it.
    fn offer(&self, id: DiskId) {
        let record = lock(&self.pool).record(id).cloned();
        let Some(record) = record else { return };
        let export = self.slot_by_id(id, |slot| {
            let device = slot.device.clone()?;
            Some(slot.export.clone().unwrap_or_else(|| {
                let (crowd, events) = (self.crowd.clone(), self.events.clone());
                let clients = Clients::new(&record.name, record.clients, crowd, events);
                clients.expect(&self.client_record.take(&record.name));
                let export = DiskExport::new(&record, self.engine.clone(), device, clients);
                Arc::new(export)
            }))
        });
        if let Some(export) = export {
            self.exports.insert(export.clone());
            self.slot_by_id(id, |slot| slot.export.replace(export));
        }
    }

    /// Dirty blocks have won over the origin: what was clean may be old, so all goes, unless all of it
    /// was compared with the origin, which nobody but us has written since.
    fn settle(self: &Arc<Daemon>, id: DiskId, name: &str) -> Option<Event> {
        let (device, clean_fits) = self.slot_by_id(id, |slot| {
            Some((slot.device.clone()?, slot.session.clean_fits))
        })?;
        let since_seq = if clean_fits {
            None
        } else {
            match self.try_forget(id) {
                // Something of it is still in flight; the next round tries again.
                Err(ControlError::Busy) => return None,
                Err(e) => return Some(Event::Failed(control_error(&format!("attach {name}"), e))),
                Ok(seq) => Some(seq),
            }
        };
        let now = origin::identity(&device);
        let noted = lock(&self.pool).change(|registry| {
            let record = registry.by_id_mut(id);
            let record = record.ok_or_else(|| Error::no_disk(name))?;
            record.since_seq = since_seq.unwrap_or(record.since_seq);
            record.origin_identity = now;
            record.clean_detach = false;
            Ok(())
        });
        Some(match noted {
            Ok(()) => {
                tracing::info!(disk = %name, "what waited on flash is in the origin; attached");
                Event::Settled
            }
            Err(e) => Event::Failed(e),
        })
    }

    fn detach(&self, id: DiskId, name: &str) -> Option<Event> {
        if self.slot_by_id(id, |slot| slot.device.clone()).is_some() {
            match self.engine.detach(id) {
                Ok(()) => {}
                // The next round tries again.
                Err(ControlError::Busy) => return Some(Event::Busy),
                Err(e) => {
                    let error = control_error(&format!("let go of {name}"), e);
                    return Some(Event::Failed(error));
                }
            }
        }
        let status = self.engine.status(id).unwrap_or_default();
        let owed = status.owed_blocks() > 0;
        Some(Event::Detached { owed })
    }

    /// A disk that was to go stays, so it has to be served again.
    fn reattach(&self, id: DiskId) {
        let record = lock(&self.pool).record(id).cloned();
        let device = self.slot_by_id(id, |slot| slot.device.clone());
        if let (Some(record), Some(device)) = (record, device)
            && let Err(e) = self.give_engine(
                crate::settings::config(&record, &device),
                OriginState::Unknown,
            )
        {
            tracing::error!(disk = %record.name, "the engine does not take it again: {e}");
        }
    }

    /// Closes the origin of a disk. Whoever waits is told that the disk is gone when it is closed.
    fn close(&self, id: DiskId, wait: bool) {
        let left = self.slot_by_id(id, |slot| {
            slot.placed = false;
            Some((slot.device.take(), slot.export.take()))
        });
        drop(left);
        if wait {
            self.release(id);
        } else {
            self.release_aside(id);
        }
    }

    /// Takes a detached disk out of the registry.
    fn erase(&self, id: DiskId) -> Event {
        let record = lock(&self.pool).record(id).cloned();
        // Before it leaves the registry: users see the disk until its origin was given up.
        self.slot_by_id(id, |slot| {
            slot.erased = record.map(Box::new).or(slot.erased.take());
            Some(())
        });
        let erased = lock(&self.pool).change(|registry| {
            registry.disks.retain(|r| r.id != id);
            Ok(())
        });
        match erased {
            Ok(()) => Event::Erased,
            Err(e) => {
                self.slot_by_id(id, |slot| slot.erased.take());
                Event::NotErased(e)
            }
        }
    }

    fn give_up(&self, id: DiskId) {
        let known = self.slot_by_id(id, |slot| Some((slot.erased.clone()?, slot.claim.take())));
        if let Some((record, _)) = &known {
            super::curves::forget(&self.state_dir, &record.serial);
        }
        let mirror = known.as_ref().filter(|(record, _)| record.mirror.is_some());
        if let Some((record, _)) = mirror {
            crate::mirror::forget(self.stores.state_dir(), &record.serial);
        }
        let given_up = known.and_then(|(record, claim)| self.owners.begin_give_up(&record, claim));
        if let Some(given_up) = given_up {
            // Ends when it is done.
            let _ = given_up.recv_timeout(GIVE_UP_TIME);
        }
    }

    fn retire(self: &Arc<Daemon>, id: DiskId, name: &str) {
        let mut disks = self.disks.lock();
        let known = disks.by_id(id).is_some_and(|slot| slot.erased.is_some());
        disks.take_name(id);
        drop(disks);
        // What was kept for it is the others' now.
        self.keep_shares();
        self.forget_gone();
        if known {
            self.events.tell(hearth_events::Event::DiskRemoved {
                disk: name.to_owned(),
            });
        }
    }

    /// Records of removed disks in the log are void, but take their room, and what was dirty counts
    /// against all others. The engine cannot forget a disk while something of it is on its way to flash.
    pub(super) fn forget_gone(&self) {
        let disks = self.disks.lock();
        let gone = disks.all().filter(|(_, slot)| slot.life == Life::Gone);
        let gone: Vec<DiskId> = gone.map(|(id, _)| id).collect();
        drop(disks);
        for id in gone {
            match self.try_forget(id) {
                Ok(_) => {
                    if let Err(e) = self.engine.remove(id) {
                        tracing::debug!(disk = id, "the engine keeps an empty entry: {e}");
                    }
                }
                Err(ControlError::NoDisk) => {}
                Err(_) => continue,
            }
            let mut disks = self.disks.lock();
            lock(&self.grounds).forget(id);
            drop(disks.remove(id));
        }
    }

    fn note_failure(&self, id: DiskId, name: &str, error: Error) {
        self.slot_by_id(id, |slot| {
            let session = &mut slot.session;
            let notice = error.to_string();
            if session.notices.last() != Some(&notice) {
                self.events.tell(hearth_events::Event::DiskIncomplete {
                    disk: name.to_owned(),
                    why: notice.clone(),
                });
                session.notices.push(notice);
            }
            if session.notices.len() > NOTICES_MAX {
                session.notices.remove(0);
            }
            session.incomplete = Some(error);
            Some(())
        });
    }
}
