//! The part that tells people.
//!
//! What is to be told is decided by the [desk](hearth_alerts::desk), which is kept in a file together with how
//! far the daemon's events were read: so neither a restart of this service nor one of the daemon loses or repeats
//! anything. The file is written before a message goes out and after. That a message went out is an event, kept in this
//! service's own state directory: the daemon, of which it may tell that it is gone, has no part in it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use axum::routing::{get, post};
use axum::{Json, Router};
use hearth_alerts::desk::{Delivery, Happened, Outcome};
use hearth_alerts::{AlertsConfig, Desk, send};
use hearth_daemon::api::events::{Asked, EventInfo};
use hearth_daemon::error::{Error, Result};
use hearth_events::time::now_ms;
use hearth_events::{Event, Events};
use hearth_health::{Condition, Kind};
use serde::{Deserialize, Serialize};

use crate::api::{AlertInfo, AlertsInfo, TestInfo, WaitingInfo, WayInfo};
use crate::events::Cursor;
use crate::health::Verdict;
use crate::part::{Context, Part};

/// Between two looks at what is due.
const EVERY: Duration = Duration::from_secs(1);
/// Longest wait at the end for messages that are being sent: as long as one may take.
const FAREWELL: Duration = Duration::from_secs(30);
/// How often events are asked for, in looks.
const EVENTS_EVERY: u64 = 5;
/// Between two signs of life for whoever waits for them.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// The file.
const FILE: &str = "alerts.json";

/// All that is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Kept {
    desk: Desk,
    events: Cursor,
}

/// A way on which a message is being sent, until dropped.
struct Sending {
    alerting: Arc<Alerting>,
    way: String,
}

impl Sending {
    /// `None` if one is being sent already.
    fn begin(alerting: &Arc<Alerting>, way: &str) -> Option<Sending> {
        let mut ways = alerting.ways();
        ways.insert(way.to_owned()).then(|| Sending {
            alerting: alerting.clone(),
            way: way.to_owned(),
        })
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.alerting.ways().remove(&self.way);
        self.alerting.sending.1.notify_all();
    }
}

/// The part that tells people.
#[derive(Debug)]
pub struct Alerting {
    config: AlertsConfig,
    host: String,
    verdict: Verdict,
    kept: Arc<Mutex<Kept>>,
    /// What became of messages; there once it is prepared, and over restarts of the part.
    events: Arc<OnceLock<Events>>,
    /// `kept` is what was stored, and what was asked for since.
    prepared: Arc<AtomicBool>,
    /// Ways on which a message is being sent.
    sending: (Mutex<BTreeSet<String>>, Condvar),
}

/// This host's name.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_owned(),
        name => name.to_owned(),
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What it remembers.
fn load(context: &Context) -> Result<Kept> {
    let stored = context.state.load::<Kept>(FILE).map_err(|e| {
        Error::unavailable(
            format!("cannot read {}: {e}", context.state.path(FILE).display()),
            "check its permissions",
        )
    })?;
    Ok(stored.unwrap_or_default())
}

/// What an event is worth being told for, if it is: what lasts is told by health, and not twice.
fn told(event: &EventInfo) -> Option<Happened> {
    let condition = match event.event.as_str() {
        "daemon-start-failed"
        | "daemon-stopped-badly"
        | "daemon-aborted-before"
        | "data-lost"
        | "leg-changed"
        | "leg-stale"
        | "scrub-undecided"
        | "datastore-scrub-undecided" => Condition::Failed,
        "daemon-started-after-crash"
        | "events-left-out"
        | "leg-repaired"
        | "scrub-repaired"
        | "datastore-scrub-repaired" => Condition::Degraded,
        _ => return None,
    };
    let kind = if event.disk.is_some() {
        Kind::Disk
    } else {
        Kind::Daemon
    };
    Some(Happened {
        code: event.event.clone(),
        condition,
        kind,
        name: event.disk.clone().unwrap_or_else(|| "hearth".to_owned()),
        what: event.text.clone(),
        at: event.at,
    })
}

/// What became of a message, as an event.
fn event(outcome: Outcome) -> Event {
    match outcome {
        Outcome::Sent {
            way,
            message,
            attempts,
            subject,
        } => Event::AlertSent {
            way,
            message,
            attempts,
            subject,
        },
        Outcome::GivenUp { way, count, why } => Event::AlertGivenUp {
            way,
            count,
            why: why.to_owned(),
        },
        Outcome::HeldBack {
            count,
            most_per_hour,
        } => Event::AlertsHeldBack {
            count,
            most_per_hour,
        },
    }
}

/// The events somebody asked for.
async fn asked(
    events: Arc<OnceLock<Events>>,
    asked: std::result::Result<Query<Asked>, QueryRejection>,
) -> Result<Json<Vec<EventInfo>>> {
    let Query(asked) = asked.map_err(|e| {
        Error::invalid(
            format!("the question is not understood: {}", e.body_text()),
            "ask as for the daemon's events, see docs/events.md",
        )
    })?;
    // It reads files.
    let found = tokio::task::spawn_blocking(move || {
        let events = events.get();
        events.map_or(Ok(Vec::new()), |events| asked.of(events))
    });
    let ended = |e| Error::internal(format!("events could not be read: {e}"));
    Ok(Json(found.await.map_err(ended)??))
}

impl Alerting {
    /// Tells whom the configuration names.
    pub fn new(config: AlertsConfig, verdict: Verdict) -> Alerting {
        Alerting {
            host: config.host.clone().unwrap_or_else(host_name),
            config,
            verdict,
            kept: Arc::default(),
            events: Arc::default(),
            prepared: Arc::default(),
            sending: Default::default(),
        }
    }

    fn ways(&self) -> MutexGuard<'_, BTreeSet<String>> {
        let ways = self.sending.0.lock();
        ways.unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes events of what became of messages.
    fn tell(&self, outcomes: Vec<Outcome>) {
        let Some(events) = self.events.get() else {
            return;
        };
        outcomes.into_iter().map(event).for_each(|e| events.tell(e));
    }

    /// Keeps what changed, if something did.
    fn keep(&self, context: &Context, stored: &mut Kept) -> Result<()> {
        let now = lock(&self.kept).clone();
        // When something was last seen changes all the time, and nothing depends on it over a restart.
        let same = now.events == stored.events && now.desk.is_as_good_as(&stored.desk);
        if same {
            return Ok(());
        }
        context.state.store(FILE, &now).map_err(|e| {
            Error::unavailable(
                format!(
                    "alerts cannot be kept in {}: {e}",
                    context.state.path(FILE).display()
                ),
                "make room there; until then a restart repeats or loses alerts",
            )
        })?;
        *stored = now;
        Ok(())
    }

    fn follow(&self, context: &Context) {
        loop {
            let cursor = lock(&self.kept).events;
            // A daemon that does not answer is health's business.
            let Ok((events, next)) = cursor.next(&context.client) else {
                return;
            };
            let mut kept = lock(&self.kept);
            kept.events = next;
            for event in events.iter().filter_map(told) {
                kept.desk.happened(now_ms(), event);
            }
            if events.is_empty() {
                return;
            }
        }
    }

    /// Begins to send what is due. Each way has a thread of its own while it sends, so that one that hangs holds up no other.
    fn deliver(self: &Arc<Alerting>) {
        let due = lock(&self.kept).desk.due(now_ms());
        for delivery in due {
            let Some(way) = Sending::begin(self, &delivery.way) else {
                continue;
            };
            let alerting = self.clone();
            let send = move || {
                alerting.send(&delivery);
                drop(way);
            };
            let thread = std::thread::Builder::new().name("alert-way".to_owned());
            if let Err(e) = thread.spawn(send) {
                tracing::warn!("no thread to tell with, and tried again: {e}");
            }
        }
    }

    fn send(&self, delivery: &Delivery) {
        let (way, id) = (&delivery.way, delivery.message.id);
        let outcome = send::send(&self.config, way, &delivery.message);
        if let Err(e) = &outcome {
            tracing::warn!(way, id, "not told, and tried again: {e}");
        }
        let outcomes = {
            let mut kept = lock(&self.kept);
            (kept.desk).attempted(&self.config, now_ms(), way, id, outcome);
            kept.desk.outcomes()
        };
        self.tell(outcomes);
    }

    /// Waits, within bounds, until nothing is being sent.
    fn settle(&self) {
        let sending = self.sending.0.lock();
        let sending = sending.unwrap_or_else(PoisonError::into_inner);
        let busy = |ways: &mut BTreeSet<String>| !ways.is_empty();
        let waited = self.sending.1.wait_timeout_while(sending, FAREWELL, busy);
        if waited.is_ok_and(|(_, result)| result.timed_out()) {
            tracing::warn!("a message is still being sent; it is sent again after the next start");
        }
    }

    fn info(&self) -> AlertsInfo {
        let kept = lock(&self.kept);
        let alert = |alert: hearth_alerts::desk::Alert| AlertInfo {
            kind: alert.kind,
            name: alert.name,
            reason: alert.reason,
            since: alert.since,
            ended: alert.ended,
            mending: alert.mending.map(|mending| mending.what),
        };
        let waiting = kept.desk.waiting();
        let ways = self.config.ways().into_iter().map(|way| WayInfo {
            waiting: waiting.iter().filter(|d| d.way == way).count() as u64,
            error: waiting
                .iter()
                .find(|d| d.way == way)
                .and_then(|d| d.error.clone()),
            way,
        });
        AlertsInfo {
            open: kept.desk.open().into_iter().map(alert).collect(),
            past: kept.desk.past().into_iter().map(alert).collect(),
            ways: ways.collect(),
            untold: kept.desk.untold(),
            waiting: (waiting.iter())
                .map(|d| WaitingInfo {
                    way: d.way.clone(),
                    id: d.message.id,
                    subject: d.message.subject(),
                    attempts: d.attempts,
                    next: d.next,
                    error: d.error.clone(),
                })
                .collect(),
        }
    }
}

impl Part for Arc<Alerting> {
    fn name(&self) -> &'static str {
        "alerts"
    }

    fn prepare(&self, context: &Context) {
        (self.events).get_or_init(|| hearth_daemon::events::open(context.state.dir()));
        if let Ok(stored) = load(context) {
            *lock(&self.kept) = stored;
            self.prepared.store(true, Ordering::Relaxed);
        }
    }

    fn run(&self, context: &Context) -> Result<()> {
        let mut stored = load(context)?;
        let outcomes = {
            let mut kept = lock(&self.kept);
            // Whoever asked for a message since it was prepared is to get it. Started again after a panic, only
            // what is stored is known to be whole.
            if !self.prepared.swap(false, Ordering::Relaxed) {
                *kept = stored.clone();
            }
            kept.desk.ways_are(&self.config);
            kept.desk.outcomes()
        };
        self.tell(outcomes);
        let mut judged_at = 0;
        let mut failing = false;
        for turn in 0u64.. {
            if let Some(judged) = self.verdict.get().filter(|j| j.report.at != judged_at) {
                judged_at = judged.report.at;
                let mut kept = lock(&self.kept);
                kept.desk
                    .judge(&self.config, now_ms(), &judged.report, &judged.unseen);
            }
            if turn % EVENTS_EVERY == 0 {
                self.follow(context);
            }
            let outcomes = {
                let mut kept = lock(&self.kept);
                kept.desk.write(&self.config, now_ms(), &self.host);
                kept.desk.outcomes()
            };
            self.tell(outcomes);
            let before = self.keep(context, &mut stored);
            // A full file system is no reason to tell nobody.
            self.deliver();
            let kept = before.and_then(|()| self.keep(context, &mut stored));
            if let Err(e) = &kept
                && !failing
            {
                tracing::error!("{e}");
            }
            failing = kept.is_err();
            if context.stop.wait(EVERY) {
                break;
            }
        }
        self.settle();
        self.keep(context, &mut stored)
    }

    fn routes(&self) -> Router {
        let (list, test, events) = (self.clone(), self.clone(), self.events.clone());
        let list = move || async move { Json(list.info()) };
        let test = move || async move {
            let mut kept = lock(&test.kept);
            let id = kept.desk.test(&test.config, now_ms(), &test.host);
            Json(TestInfo {
                id,
                ways: test.config.ways(),
            })
        };
        Router::new()
            .route("/v1/alerts", get(list))
            .route("/v1/alerts/test", post(test))
            .route("/v1/alerts/events", get(move |query| asked(events, query)))
    }
}

/// The part that gives a sign of life to a service that waits for it: only that can tell of a dead host.
#[derive(Debug)]
pub struct Beating {
    /// Where it is given.
    pub url: String,
}

impl Part for Beating {
    fn name(&self) -> &'static str {
        "heartbeat"
    }

    fn run(&self, context: &Context) -> Result<()> {
        let mut failing = false;
        loop {
            let outcome = send::heartbeat(&self.url);
            if let Err(e) = &outcome
                && !failing
            {
                tracing::warn!("no sign of life could be given: {e}");
            }
            failing = outcome.is_err();
            if context.stop.wait(HEARTBEAT) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, severity: &str) -> EventInfo {
        EventInfo {
            id: 1,
            at: 1,
            event: name.to_owned(),
            severity: severity.to_owned(),
            disk: None,
            text: "x".to_owned(),
            details: serde_json::Map::new(),
        }
    }

    #[test]
    fn events_worth_an_alert_are_kinds_that_exist() {
        let told = |name: &str, severity: &str| told(&event(name, severity)).map(|h| h.condition);
        for name in [
            "daemon-start-failed",
            "daemon-stopped-badly",
            "daemon-started-after-crash",
            "daemon-aborted-before",
            "data-lost",
            "events-left-out",
            "leg-changed",
            "leg-stale",
            "leg-repaired",
            "scrub-repaired",
            "scrub-undecided",
            "datastore-scrub-repaired",
            "datastore-scrub-undecided",
        ] {
            let kind = hearth_events::kinds::KINDS.iter().find(|k| k.0 == name);
            let (_, severity, _) = kind.expect(name);
            assert!(told(name, severity.word()).is_some(), "{name}");
        }
        // Health tells what lasts; what was asked for is no news.
        assert_eq!(told("disk-attached", "info"), None);
        assert_eq!(told("leg-lost", "warning"), None);
        assert_eq!(told("tree-lost", "warning"), None);
        assert_eq!(told("two-clients-write", "warning"), None);
        assert_eq!(told("scrub-undecided", "error"), Some(Condition::Failed));
        assert_eq!(told("scrub-started", "info"), None);
    }

    /// Asked right after a start it told of nothing, and lost what somebody asked for.
    #[test]
    fn what_was_kept_is_there_before_the_first_question_and_what_is_asked_for_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut context = crate::part::tests::context(dir.path());
        let config = AlertsConfig {
            mail: serde_json::from_str(r#"{"to": ["a@example.org"]}"#).unwrap(),
            ..AlertsConfig::default()
        };
        let start = |context: &Context| {
            let alerting = Arc::new(Alerting::new(config.clone(), Verdict::default()));
            let part: Arc<dyn Part> = Arc::new(alerting.clone());
            drop(crate::part::Kept::new(part).routes(context));
            alerting
        };
        let alerting = start(&context);
        assert_eq!(alerting.info().waiting.len(), 0);
        lock(&alerting.kept).desk.test(&config, now_ms(), "host1");
        // It runs for one turn, and sends nothing.
        context.stop.tell();
        alerting.run(&context).unwrap();

        context.stop = crate::stop::Stop::default();
        let alerting = start(&context);
        assert_eq!(alerting.info().waiting.len(), 1);
        assert!(alerting.events.get().is_some());
    }
}
