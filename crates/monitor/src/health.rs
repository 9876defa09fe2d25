//! The part that judges: the daemon's own words, what was found beneath, and the host's clock, in one report.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::routing::get;
use axum::{Json, Router};
use hearth_daemon::api::types::PoolDevice;
use hearth_daemon::error::Result;
use hearth_daemon::sign;
use hearth_events::time::now_ms;
use hearth_health::clock::Clocks;
use hearth_health::daemon::{Daemon, Limits, Presence};
use hearth_health::latency::{Answers, Total, Trail};
use hearth_health::memory::{self, Controller};
use hearth_health::{Item, Kind, Reason, Report, latency};

use crate::api::Link;
use crate::collect::Findings;
use crate::facts::{self, Asked};
use crate::part::{Context, Part};
use crate::watch::Seen;

/// Between two judgements.
const EVERY: Duration = Duration::from_secs(2);
/// How long starts of the daemon are counted.
const STARTS: Duration = Duration::from_secs(600);

/// What was judged, and what could not be seen for it.
#[derive(Clone, Debug, Default)]
pub struct Judged {
    /// The report.
    pub report: Report,
    /// Kinds of things of which nothing is known now.
    pub unseen: Vec<Kind>,
}

/// The newest judgement.
#[derive(Clone, Debug, Default)]
pub struct Verdict(Arc<Mutex<Option<Arc<Judged>>>>);

impl Verdict {
    /// It, once there is one.
    pub fn get(&self) -> Option<Arc<Judged>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, judged: Judged) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(judged));
    }
}

/// The part that judges.
#[derive(Debug)]
pub struct Judging {
    /// What it came to.
    pub verdict: Verdict,
    /// What was found beneath.
    pub findings: Findings,
    /// What an operator allows.
    pub limits: Limits,
}

/// What is remembered from one judgement to the next.
struct Memory {
    began: Instant,
    clocks: Clocks,
    flash: Trails,
    pid: Option<u32>,
    /// The daemon's starts.
    starts: Vec<Instant>,
}

impl Memory {
    fn starts(&mut self, pid: Option<u32>) -> u64 {
        // The one that was there before us did not start in our time.
        let first = self.pid.is_none();
        if pid.is_some() && pid != self.pid {
            self.pid = pid;
            if !first {
                self.starts.push(Instant::now());
            }
        }
        self.starts.retain(|at| at.elapsed() < STARTS);
        self.starts.len() as u64
    }
}

fn presence(context: &Context) -> Presence {
    let info = context.daemon.info();
    let why = info.error.unwrap_or_default();
    match info.link {
        Link::Up | Link::Unknown => Presence::Up,
        Link::Hanging => Presence::Hanging(why),
        Link::Down => {
            // A daemon that ends in order takes its sockets with it and leaves its directory.
            let socket = hearth_daemon::rundir::second_socket(&context.run_dir);
            let left = context.run_dir.join("hearth.pid").exists() && !socket.exists();
            if left {
                Presence::Stopped
            } else {
                Presence::Down(why)
            }
        }
    }
}

/// The memory controller beside a daemon in this run directory, by the file it leaves. It is read and not asked: one that hangs
/// answers nobody.
fn controller(run_dir: &std::path::Path) -> Controller {
    let dir = hearth_memory_host::run_dir(run_dir);
    match hearth_memory_host::status(&dir) {
        Ok(None) => Controller::default(),
        Ok(Some(status)) => Controller {
            silent: (status.is_silent(now_ms())).then(|| now_ms().saturating_sub(status.at) / 1000),
            helpless: status.helpless,
            unreadable: None,
        },
        Err(fault) => Controller {
            unreadable: Some(fault.what),
            ..Controller::default()
        },
    }
}

/// Devices that have become slow; disks on no device of this host are their own.
fn slow(items: &mut [Item], seen: &Seen) {
    let kinds = |item: &Item| item.kind == Kind::Device && !item.disks.is_empty();
    let local: Vec<String> = (items.iter())
        .filter(|item| kinds(item))
        .flat_map(|item| item.disks.clone())
        .collect();
    for (asked, sort) in [
        (Asked::Read, latency::ORIGIN_READS),
        (Asked::Write, latency::ORIGIN_WRITES),
    ] {
        let answers = |item: &Item| {
            let own = std::slice::from_ref(&item.name);
            if kinds(item) {
                Some(facts::answers(&item.name, seen, &item.disks, asked))
            } else if item.kind == Kind::Disk && !local.contains(&item.name) {
                Some(facts::answers(&item.name, seen, own, asked))
            } else {
                None
            }
        };
        let all: Vec<_> = items.iter().map(answers).collect();
        for kind in [Kind::Device, Kind::Disk] {
            let peers: Vec<_> = (items.iter().zip(&all))
                .filter(|(item, _)| item.kind == kind)
                .filter_map(|(_, answers)| answers.clone())
                .collect();
            for (item, answers) in (items.iter_mut().zip(&all)).filter(|(i, _)| i.kind == kind) {
                if let Some(answers) = answers {
                    item.add(latency::judge(sort, answers, &peers));
                }
            }
        }
    }
}

/// What each flash device did, by its number for life: reads and writes.
#[derive(Default)]
struct Trails(BTreeMap<String, [Trail; 2]>);

impl Trails {
    /// Flash devices that have become slow, in what is said of the pool.
    fn judge(&mut self, at: u64, devices: &[PoolDevice]) -> Vec<Reason> {
        self.0.retain(|id, _| devices.iter().any(|d| d.uuid == *id));
        for device in devices {
            let Some(io) = &device.io else { continue };
            let [reads, writes] = self.0.entry(device.uuid.clone()).or_default();
            let total = |ops, us| Total { ops, us };
            reads.add(at, total(io.reads, io.read_us));
            writes.add(at, total(io.writes, io.write_us));
        }
        let mut said = Vec::new();
        for (which, sort) in [latency::FLASH_READS, latency::FLASH_WRITES]
            .into_iter()
            .enumerate()
        {
            let answers = |device: &PoolDevice| {
                let trails = self.0.get(&device.uuid)?;
                Some(trails[which].answers(&device.path))
            };
            let all: Vec<Answers> = devices.iter().filter_map(answers).collect();
            // One that is known to be slow, or lost, is told by the daemon.
            for device in devices.iter().filter(|d| !d.slow && !d.lost) {
                if let Some(one) = answers(device) {
                    let reasons = latency::judge(sort, &one, &all);
                    latency::join(&mut said, &device.path, reasons);
                }
            }
        }
        said
    }
}

impl Judging {
    fn judge(&self, context: &Context, memory: &mut Memory) -> Judged {
        let presence = presence(context);
        let up = presence == Presence::Up;
        let seen = context.daemon.seen();
        let starts = memory.starts(sign::last_sign(&context.run_dir).map(|s| s.pid));
        let stuck = seen.as_ref().filter(|_| up).map(|seen| facts::stuck(seen));
        let daemon = Daemon {
            presence,
            stuck: stuck.unwrap_or_default(),
            starts,
        };
        let steady = u64::try_from(memory.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        memory.clocks.look(steady, now_ms());
        let mut host = Item::new(Kind::Host, "this host", memory.clocks.reasons(steady));
        host.add(memory::judge(&controller(&context.run_dir)));

        let collected = self.findings.get();
        let mut items = vec![facts::daemon(&daemon), host];
        let mut unseen = Vec::new();
        match seen.as_ref().filter(|_| up) {
            Some(seen) => {
                items.extend(facts::items(seen, &self.limits));
                items.extend(collected.items);
                slow(&mut items, seen);
                let late = memory.flash.judge(steady, &seen.pool.devices);
                if let Some(pool) = items.iter_mut().find(|item| item.kind == Kind::Pool) {
                    pool.add(late);
                }
            }
            None => {
                unseen.extend([Kind::Pool, Kind::Disk, Kind::Datastore]);
                items.extend(collected.items);
            }
        }
        if collected.rounds == 0 {
            unseen.extend([Kind::Device, Kind::FileSystem]);
        }
        let mut report = Report::new(now_ms(), items, collected.notes);
        if seen.is_none() && report.condition < hearth_health::Condition::Rebuilding {
            report.condition = hearth_health::Condition::Unknown;
        }
        Judged { report, unseen }
    }
}

impl Part for Judging {
    fn name(&self) -> &'static str {
        "health"
    }

    fn run(&self, context: &Context) -> Result<()> {
        let mut memory = Memory {
            began: Instant::now(),
            clocks: Clocks::default(),
            flash: Trails::default(),
            pid: None,
            starts: Vec::new(),
        };
        loop {
            // Nothing is judged before the first look.
            if context.daemon.info().link != Link::Unknown {
                self.verdict.set(self.judge(context, &mut memory));
            }
            if context.stop.wait(EVERY) {
                return Ok(());
            }
        }
    }

    fn routes(&self) -> Router {
        let verdict = self.verdict.clone();
        let answer = move || async move {
            let judged = verdict.get();
            Json(judged.map_or_else(unknown, |judged| judged.report.clone()))
        };
        Router::new().route("/v1/health", get(answer))
    }
}

fn unknown() -> Report {
    let reason = Reason::unknown("not-yet", "nothing has been looked at yet", "");
    Report::new(
        now_ms(),
        vec![Item::new(Kind::Daemon, "hearth", vec![reason])],
        Vec::new(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::types::DeviceIo;
    use hearth_memory::{Level, Seen, Status};

    #[test]
    fn a_flash_device_that_has_become_slow_is_named() {
        let mut trails = Trails::default();
        let device = |uuid: &str| PoolDevice {
            path: format!("/dev/{uuid}"),
            uuid: uuid.to_owned(),
            io: Some(DeviceIo::default()),
            ..PoolDevice::default()
        };
        let mut devices = vec![device("a"), device("b")];
        let mut at = 0;
        let mut work = |devices: &mut [PoolDevice], minutes: u64, write_us: u64| {
            let mut said = Vec::new();
            for _ in 0..minutes {
                at += 60_000;
                let writes = [300, write_us];
                for (device, us) in devices.iter_mut().zip(writes) {
                    let io = device.io.as_mut().unwrap();
                    (io.reads, io.read_us) = (io.reads + 100, io.read_us + 20_000);
                    (io.writes, io.write_us) = (io.writes + 100, io.write_us + 100 * us);
                }
                said = trails.judge(at, devices);
            }
            said
        };
        assert_eq!(work(&mut devices, 300, 300), []);
        let said = work(&mut devices, 6, 60_000);
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].code, "flash-slow-writes");
        assert!(
            said[0].what.starts_with("/dev/b: writes take 60 ms"),
            "{said:?}"
        );
        // The daemon says so itself.
        devices[1].slow = true;
        assert_eq!(work(&mut devices, 1, 60_000), []);
        // One that has gone is forgotten.
        devices.pop();
        assert_eq!(work(&mut devices, 1, 300), []);
        assert_eq!(trails.0.len(), 1);
    }

    #[test]
    fn the_memory_controller_is_judged_by_its_file() {
        let tmp = tempfile::tempdir().unwrap();
        let run = tmp.path().join("hearth");
        assert_eq!(controller(&run), Controller::default());
        let beside = tmp.path().join("hearth-memory");
        std::fs::create_dir(&beside).unwrap();
        let put = |status: &Status| {
            let text = serde_json::to_vec(status).unwrap();
            std::fs::write(beside.join("status.json"), text).unwrap();
        };
        let at = |at| Status::new(at, 1, Level::Hard, Seen::default());
        let mut status = at(now_ms());
        status.helpless = Some("no swap".into());
        put(&status);
        assert_eq!(controller(&run).helpless.as_deref(), Some("no swap"));
        put(&at(now_ms() - 100_000));
        assert!(controller(&run).silent.is_some_and(|s| s >= 100));
        std::fs::write(beside.join("status.json"), "{}").unwrap();
        assert!(controller(&run).unreadable.is_some());
    }
}
