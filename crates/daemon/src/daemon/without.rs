//! One of several flash devices has failed: the daemon goes on with what the others hold, by itself.
//!
//! Flash was given up, and the disks went on from their origins (see [`super::flash`]). Once nothing dirty is left on it, what the others hold is
//! clean, and worth keeping. As with any change of the devices ([`super::reshape`]) the daemon begins anew for that, under its
//! clients: the pool is closed so that nothing needs the device that failed ([`hearth_engine::Engine::close_without`]), it is taken off the list, and the
//! pool is opened with the others, warm. If that cannot be, everything is as it was: a start finds the pool without one of its devices.
//!
//! Guests are not disturbed for it unasked. Where clients would have to connect again, it waits for the administrator, whose command is
//! `hearth pool remove-flash` with the device that failed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearth_engine::{FailedAlone, Hindrance};
use hearth_events::Event;
use hearth_io::BLOCK;

use super::reshape::{OURSELVES, Stage};
use super::{Daemon, StopReason, lock};
use crate::error::{Error, Kind, Result};
use crate::pool::change;
use crate::upgrade;

/// Longest wait, when clients are at rest, until the origins have everything durably.
const SETTLE_TIME: Duration = Duration::from_secs(10);
const SETTLE_PACE: Duration = Duration::from_millis(5);

impl Daemon {
    fn path_of(&self, device: u16) -> String {
        let paths = lock(&self.pool).paths();
        let path = paths.get(usize::from(device));
        path.map_or_else(|| "?".to_owned(), |path| path.display().to_string())
    }

    /// Goes on without a device that failed, if it is time for that. Called by housekeeping while flash is given up.
    pub(super) fn go_on_round(self: &Arc<Daemon>) {
        let Some(failed) = self.engine.failed_alone() else {
            return;
        };
        if !is_due(&failed) || self.stopping.load(Ordering::Relaxed) || !self.flash.may_try() {
            return;
        }
        // In vain it would begin anew, and be back without any flash. Once such an origin has failed a flush, nobody waits for it.
        if failed.hindrance == Some(Hindrance::Unflushed) && !self.origins_answer() {
            return;
        }
        let waits = self.begin_without(&failed, false).err();
        self.flash.set_waits(waits);
    }

    /// Are the servers of all origins there that have to make something durable first?
    fn origins_answer(&self) -> bool {
        let waited_for = self.engine.unflushed();
        let disks = self.disks.lock();
        let links = disks
            .all()
            .filter(|(id, _)| waited_for.contains(id))
            .filter_map(|(_, slot)| Some(slot.device()?.as_remote()?.link()));
        links
            .into_iter()
            .all(|link| link.connected && !link.failing)
    }

    /// The administrator says that it is to go on without this device, whatever clients have to do.
    pub(super) fn remove_failed(self: &Arc<Daemon>, old: &Path, yes: bool) -> Result<()> {
        let failed = self.engine.failed_alone().filter(|failed| {
            let paths = lock(&self.pool).paths();
            let path = paths.get(usize::from(failed.device));
            path.is_some_and(|path| change::same(path, old))
        });
        let Some(failed) = failed else {
            return Err(Error::refused(
                "the pool is served without its flash",
                "see `hearth pool show` for the reason and put that right first",
            ));
        };
        if !is_due(&failed) {
            return Err(Error::refused(
                format!(
                    "the pool cannot go on without {} yet: {}",
                    old.display(),
                    self.hindrance_words(failed.hindrance)
                ),
                "`hearth disk list` shows what is dirty or lost; `hearth disk accept-loss NAME` accepts it, and then it goes on by itself",
            ));
        }
        // What such a server has answered, and not made durable, nobody would send it again.
        if failed.hindrance == Some(Hindrance::Unflushed) && !self.origins_answer() {
            return Err(Error::refused(
                format!(
                    "the pool cannot go on without {} yet: an origin that has to make something durable first does not answer",
                    old.display()
                ),
                "see `hearth status` for which one; it goes on by itself once the guest's next flush has failed, or that origin is back",
            ));
        }
        self.begin_without(&failed, yes)
    }

    /// Has the daemon begin anew for that.
    fn begin_without(self: &Arc<Daemon>, failed: &FailedAlone, yes: bool) -> Result<()> {
        self.check_clients(yes)?;
        let device = self.path_of(failed.device);
        let what = format!("go on without {device}");
        self.reshaping.begin(what.clone(), Stage::Switching)?;
        if !self.succession.appoint(Path::new(OURSELVES)) {
            let why = Error::conflict("another program is taking over", "try again when it has");
            self.reshaping.end(Err(why.clone()));
            return Err(why);
        }
        self.reshaping.set_without(failed.device);
        self.events.tell(Event::FlashDeviceLeft {
            device,
            kept_bytes: failed.kept_blocks * BLOCK,
        });
        self.events.tell(Event::DaemonUpgrading {
            from: upgrade::VERSION.to_owned(),
            to: upgrade::VERSION.to_owned(),
            program: what,
        });
        self.request_stop(StopReason::Upgrade);
        Ok(())
    }

    /// Clients are at rest: if the pool is to go on without a device, waits until the origins have everything durably. That takes data
    /// threads.
    pub(super) fn settle_without(&self) {
        if let Some(device) = self.reshaping.without() {
            let ready = || self.is_ready_without(device).then_some(());
            self.bell.wait(SETTLE_TIME, SETTLE_PACE, ready);
        }
    }

    fn is_ready_without(&self, device: u16) -> bool {
        let failed = self.engine.failed_alone();
        failed.is_some_and(|f| f.device == device && f.hindrance.is_none())
    }

    /// Everything is at rest: closes the pool so that it can go on without a device. None: that is not wanted, or cannot be.
    pub(super) fn close_without(&self) -> Option<Result<()>> {
        let device = self.reshaping.without()?;
        if !self.is_ready_without(device) {
            let failed = self.engine.failed_alone();
            tracing::error!(
                "cannot go on without a flash device: {}",
                self.hindrance_words(failed.and_then(|failed| failed.hindrance))
            );
            return None;
        }
        if let Err(e) = self.unsettle() {
            tracing::error!("cannot go on without a flash device: {e}");
            return None;
        }
        let mut media = lock(&self.pool).flash().joined().without(device);
        let closed = self.engine.close_without(&mut media).map_err(|e| {
            let why = e.fault().within("cannot close the pool without a device");
            Error::of(Kind::Unavailable, why)
        });
        match closed {
            Ok(()) => Some(Ok(())),
            Err(e) => {
                tracing::error!("{e}");
                None
            }
        }
    }

    /// The records of disks that had nothing left on flash were voided. They count again, as they did before: that flash was given up
    /// stands on it still.
    fn unsettle(&self) -> Result<()> {
        let settled = self.flash.settled();
        lock(&self.pool).change(|registry| {
            for (id, before, since) in &settled {
                if let Some(record) = registry.by_id_mut(*id)
                    && record.since_seq == *since
                {
                    record.since_seq = *before;
                }
            }
            Ok(())
        })
    }

    /// The pool is closed for it: takes the device off the list. The devices that are left, or why it is as before.
    pub(super) fn finish_without(&self, device: u16) -> (Vec<PathBuf>, String) {
        let pool = lock(&self.pool);
        match change::go_on_without(&pool, device) {
            Ok(flash) => (flash, String::new()),
            Err(e) => {
                let failed = format!("cannot go on without {}: {e}", self.shown(&pool, device));
                (pool.paths(), failed)
            }
        }
    }

    fn shown(&self, pool: &crate::pool::Pool, device: u16) -> String {
        let paths = pool.paths();
        let path = paths.get(usize::from(device));
        path.map_or_else(String::new, |path| path.display().to_string())
    }

    /// What is to be said of a device that failed alone; none if the pool cannot go on without it.
    pub(super) fn without_notice(&self) -> Option<String> {
        let failed = self.engine.failed_alone()?;
        let device = self.path_of(failed.device);
        let then = match (self.flash.waits(), is_due(&failed)) {
            (Some(why), true) if why.kind == Kind::Unavailable => {
                format!("it waits, because {}: {}", why.what, why.remedy)
            }
            (Some(why), true) => format!(
                "it waits, because {}: run `hearth pool remove-flash {device} --yes` when they may",
                why.what
            ),
            (None, true) => "the pool goes on without it in a moment".to_owned(),
            (_, false) => format!(
                "the pool goes on without it, with what the others hold, as soon as nothing is dirty any more: {}",
                self.hindrance_words(failed.hindrance)
            ),
        };
        Some(format!("flash device {device} has failed; {then}"))
    }

    fn hindrance_words(&self, hindrance: Option<Hindrance>) -> &'static str {
        match hindrance {
            None => "another device failed, too",
            Some(Hindrance::LivesOnFlash) => {
                "a disk lives on flash, and nobody else has what it holds; remove it, or replace the device"
            }
            Some(Hindrance::Lost) => {
                "something dirty was on that device alone and is lost (`hearth disk show` lists it): write it again, or accept it with `hearth disk accept-loss NAME`"
            }
            Some(Hindrance::Dirty) => "what is dirty is being written to the origins",
            Some(Hindrance::Unflushed) => "an origin has not made everything durable",
            Some(Hindrance::OriginFails) => {
                "an origin does not make durable what was written to it (`hearth status` says which); it goes on when that one answers again"
            }
        }
    }
}

/// Is nothing left but what clients do at this moment?
fn is_due(failed: &FailedAlone) -> bool {
    matches!(failed.hindrance, None | Some(Hindrance::Unflushed))
}
