//! Another program is to take over: could it, and who would notice?

use std::path::PathBuf;
use std::sync::Arc;

use hearth_events::Event;

use super::{Daemon, StopReason, lock};
use crate::api::upgrade::{ClientAtRisk, UpgradePlan, UpgradeRequest};
use crate::error::{Error, Result};
use crate::upgrade::{self, Succession, probe};

/// Clients named in a sentence.
const NAMED_MAX: usize = 4;

impl Daemon {
    /// What an upgrade would do, and by which program.
    fn plan(&self, request: &UpgradeRequest) -> Result<(PathBuf, UpgradePlan)> {
        let program = upgrade::check_program(&request.program)?;
        self.not_stopping()?;
        self.check_stuck()?;
        let answer = probe::ask(&program, &upgrade::own_arguments())?;
        let (at_risk, carried) = self.clients_at_risk();
        let plan = UpgradePlan {
            program: request.program.clone(),
            from: upgrade::VERSION.to_owned(),
            to: answer.version,
            generation: self.succession.state().generation,
            carried,
            at_risk,
        };
        Ok((program, plan))
    }

    fn check_stuck(&self) -> Result<()> {
        // A thread that hangs in the kernel would keep this process from becoming another program.
        if let Some(stuck) = lock(&self.stuck).first() {
            return Err(Error::unavailable(
                format!(
                    "the thread {} is stuck, and would hold up every client",
                    stuck.thread
                ),
                "see whether an origin's device or mount, or the flash, hangs",
            ));
        }
        let pool = lock(&self.pool);
        match pool.flash().iter().find(|device| device.owes()) {
            None => Ok(()),
            Some(device) => Err(Error::unavailable(
                format!(
                    "{} does not answer, and would hold up every client",
                    device.name()
                ),
                "wait until it answers, or take the device away",
            )),
        }
    }

    /// Clients that would have to connect again, and how many connections would go over.
    fn clients_at_risk(&self) -> (Vec<ClientAtRisk>, u64) {
        let mut at_risk = Vec::new();
        let (mut all, mut lost) = (0, 0);
        for (name, slot) in self.disks.lock().iter() {
            let Some(export) = &slot.export else { continue };
            all += export.clients().connections();
            let link = slot.device().and_then(|d| Some(d.as_remote()?.link()));
            let is_away = link.is_some_and(|link| !link.connected);
            for client in export.clients().list() {
                let why = if client.kind != hearth_nbd::PROTOCOL.0 {
                    lost += client.connections;
                    "its memory is shared with the program that ends; it needs a hypervisor that connects again"
                } else if client.encrypted > 0 {
                    lost += client.encrypted;
                    "its connection is encrypted, with keys that only the program has that ends"
                } else if is_away {
                    lost += client.connections;
                    "the server of its disk's origin is away, and until that is back the program that begins has nothing to serve it with"
                } else {
                    continue;
                };
                at_risk.push(ClientAtRisk {
                    disk: name.to_owned(),
                    client,
                    why: why.to_owned(),
                });
            }
        }
        (at_risk, all.saturating_sub(lost))
    }

    /// What an upgrade would do.
    pub(super) fn plan_upgrade(&self, request: &UpgradeRequest) -> Result<UpgradePlan> {
        self.plan(request).map(|(_, plan)| plan)
    }

    /// Begins one.
    pub(super) fn begin_upgrade(
        self: &Arc<Daemon>,
        request: &UpgradeRequest,
    ) -> Result<UpgradePlan> {
        let plan = self.check_risk(request)?;
        let program = PathBuf::from(&request.program);
        if !self.succession.appoint(&program) {
            return Err(Error::conflict(
                "another program is taking over already",
                "wait until it has",
            ));
        }
        self.events.tell(Event::DaemonUpgrading {
            from: plan.from.clone(),
            to: plan.to.clone(),
            program: plan.program.clone(),
        });
        self.request_stop(StopReason::Upgrade);
        Ok(plan)
    }

    /// What it would do, unless clients would lose their connections and nobody has said that they may.
    pub(super) fn check_risk(&self, request: &UpgradeRequest) -> Result<UpgradePlan> {
        let (_, plan) = self.plan(request)?;
        refuse_at_risk(&plan.at_risk, request.yes)?;
        Ok(plan)
    }

    /// The same where this program goes on itself, with a pool that nobody can look at as it is.
    pub(super) fn check_clients(&self, yes: bool) -> Result<()> {
        self.not_stopping()?;
        self.check_stuck()?;
        refuse_at_risk(&self.clients_at_risk().0, yes)
    }

    /// Which program takes its place, and whose place it took.
    pub(crate) fn succession(&self) -> &Succession {
        &self.succession
    }

    /// Tells that it has taken the place of another program.
    pub(crate) fn tell_succeeded(&self, inherited: &upgrade::Predecessor) {
        let outcome = self.succession.succeeded(inherited);
        self.events.tell(match outcome.failure {
            Some(why) => Event::DaemonUpgradeFailed {
                why,
                pause_millis: outcome.pause_ms,
            },
            None => Event::DaemonUpgraded {
                from: outcome.from,
                to: outcome.to,
                pause_millis: outcome.pause_ms,
                carried: outcome.carried,
                ended: outcome.ended,
            },
        });
    }
}

/// Refuses if clients would lose their connections and nobody has said that they may.
fn refuse_at_risk(at_risk: &[ClientAtRisk], yes: bool) -> Result<()> {
    if at_risk.is_empty() || yes {
        return Ok(());
    }
    let mut named: Vec<String> = (at_risk.iter().take(NAMED_MAX))
        .map(|risk| {
            let client = crate::clients::sentence(std::slice::from_ref(&risk.client));
            format!("{client} on disk {}", risk.disk)
        })
        .collect();
    if at_risk.len() > NAMED_MAX {
        named.push(format!("{} more", at_risk.len() - NAMED_MAX));
    }
    Err(Error::refused(
        format!(
            "clients would have to connect again, and lose their disks if they do not: {}",
            named.join(", ")
        ),
        "see that they can, or stop them, and add --yes",
    ))
}
