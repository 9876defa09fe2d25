//! `hearth status`: everything on one screen, for people.
//!
//! What the daemon knows is asked of the daemon, and what is judged of the second service. Where that is not
//! there, the same rules judge what the daemon tells; nothing is known of drives and arrays then, and that is said.

mod screen;

use std::time::Duration;

use hearth_daemon::api::datastores::DatastoreInfo;
use hearth_daemon::api::events::EventInfo;
use hearth_daemon::api::stats::{DiskSpan, Ratios};
use hearth_daemon::client::{Client, Trace};
use hearth_daemon::error::Error;
use hearth_health::daemon::{Daemon, Limits, Presence};
use hearth_health::{Condition, Kind, Report};
use hearth_monitor::facts;
use hearth_monitor::watch::Seen;
use serde::Serialize;

use crate::args::Global;
use crate::{Failure, Outcome, alert, events, print_json};
use screen::{Room, text};

/// Longest wait for the daemon: it answers from memory.
const ANSWER_TIME: Duration = Duration::from_secs(20);
/// Events shown.
const EVENTS: usize = 5;

/// Whether the cache helps.
#[derive(Debug, Serialize)]
struct Helping {
    /// In one sentence.
    sentence: String,
    /// Time without the cache / time with it, over the day.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup_day: Option<f64>,
    /// The same over the last five minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup_now: Option<f64>,
}

#[derive(Debug, Serialize)]
struct DiskRow {
    name: String,
    state: &'static str,
    mode: &'static str,
    condition: Condition,
    reads_per_second: f64,
    writes_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio_now: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio_day: Option<f64>,
    cached: u64,
    dirty: u64,
}

#[derive(Debug, Serialize)]
struct DatastoreRow {
    name: String,
    served: bool,
    /// Files that are or were disks of the cache.
    disks: u64,
    /// Of these, those in use.
    open: u64,
    dirty: u64,
}

#[derive(Debug, Serialize)]
struct PoolRow {
    name: String,
    flash: Vec<String>,
    state: String,
    capacity: u64,
    cached: u64,
    dirty: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio_now: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio_day: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Status {
    condition: Condition,
    /// The second service answered, so drives, arrays and file systems were judged, too.
    monitor: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<PoolRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    helping: Option<Helping>,
    disks: Vec<DiskRow>,
    datastores: Vec<DatastoreRow>,
    health: Report,
    events: Vec<EventInfo>,
    /// Why the daemon could not be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn ratios<'a>(spans: &'a [DiskSpan], name: &str) -> Option<&'a Ratios> {
    spans.iter().find(|s| s.span == name).map(|s| &s.ratios)
}

fn helping(spans: &[DiskSpan]) -> Helping {
    let of = |name: &str| ratios(spans, name).and_then(|r| r.speedup);
    let (day, now) = (of("1d"), of("5min"));
    let over = if day.is_some() {
        "the day"
    } else {
        "5 minutes"
    };
    let sentence = match day.or(now) {
        None => "not known yet: too little was asked of the disks".to_owned(),
        Some(x) if x >= 1.05 => format!(
            "yes: without the cache, requests would take {x:.1} times as long (estimate over {over})"
        ),
        Some(x) if x > 0.95 => format!(
            "no difference: requests take as long as without the cache ({x:.2} times, estimate over {over})"
        ),
        Some(x) => format!(
            "no: without the cache, requests would take {x:.2} times as long (estimate over {over})"
        ),
    };
    Helping {
        sentence,
        speedup_day: day,
        speedup_now: now,
    }
}

fn disks(seen: &Seen, health: &Report) -> Vec<DiskRow> {
    let row = |info: &hearth_daemon::api::types::DiskInfo| {
        let report = seen.stats.disks.iter().find(|r| r.name == info.name);
        let spans = report.map(|r| r.spans.as_slice()).unwrap_or_default();
        let now = spans.iter().find(|s| s.span == "5min");
        let rate = |n: u64| now.map_or(0.0, |s| n as f64 / s.seconds.max(1) as f64);
        let judged = (health.items.iter()).find(|i| i.kind == Kind::Disk && i.name == info.name);
        DiskRow {
            name: info.name.clone(),
            state: info.state.word(),
            mode: info.settings.mode.word(),
            condition: judged.map_or(Condition::Unknown, |i| i.condition),
            reads_per_second: rate(now.map_or(0, |s| s.counters.reads())),
            writes_per_second: rate(now.map_or(0, |s| s.counters.writes())),
            hit_ratio_now: now.and_then(|s| s.ratios.read_hit_ratio),
            hit_ratio_day: ratios(spans, "1d").and_then(|r| r.read_hit_ratio),
            cached: info.cached,
            dirty: info.dirty,
        }
    };
    seen.disks.iter().map(row).collect()
}

fn datastores(seen: &Seen) -> Vec<DatastoreRow> {
    let row = |info: &DatastoreInfo| DatastoreRow {
        name: info.name.clone(),
        served: info.served,
        disks: info.disks,
        open: info.open,
        dirty: info.dirty,
    };
    seen.datastores.iter().map(row).collect()
}

fn pool(seen: &Seen) -> PoolRow {
    let stats = &seen.stats.pool;
    let of = |name: &str| ratios(&stats.disks, name).and_then(|r| r.read_hit_ratio);
    PoolRow {
        name: facts::pool_name(seen),
        flash: seen.pool.flash.clone(),
        state: seen.pool.state.clone(),
        capacity: stats.capacity,
        cached: stats.cached,
        dirty: stats.dirty,
        hit_ratio_now: of("5min"),
        hit_ratio_day: of("1d"),
    }
}

/// What can be judged without the second service.
pub fn judged(seen: Option<&Seen>, error: Option<(&Error, Trace)>) -> Report {
    let presence = match error {
        None => Presence::Up,
        Some((e, Trace::Listens)) => Presence::Hanging(e.what.clone()),
        Some((e, Trace::Hidden)) => Presence::Hidden(e.what.clone()),
        Some((e, Trace::Absent)) => Presence::Down(e.what.clone()),
    };
    let daemon = Daemon {
        presence,
        stuck: seen.map(facts::stuck).unwrap_or_default(),
        starts: 0,
    };
    let mut items = vec![facts::daemon(&daemon)];
    items.extend(
        seen.into_iter()
            .flat_map(|s| facts::items(s, &Limits::default())),
    );
    let note = "the second service is not there, so nothing is known of drives, arrays and file systems; start it: `systemctl start hearth-monitor`, or `hearth monitor`";
    Report::new(hearth_events::time::now_ms(), items, vec![note.to_owned()])
}

/// What the daemon and the second service said.
pub struct Asked {
    /// What the daemon knows.
    pub seen: Option<Seen>,
    /// Everything judged.
    pub health: Report,
    /// The second service answered.
    pub has_second: bool,
    /// The newest events.
    pub events: Vec<EventInfo>,
    /// Why the daemon could not be asked.
    pub error: Option<Error>,
    /// This user may not ask it.
    pub is_forbidden: bool,
}

/// Asks both.
pub fn ask(global: &Global) -> Asked {
    let client = Client::new(&global.dir()).patient_for(ANSWER_TIME);
    let seen = Seen::ask(&client);
    let second = alert::second(global);
    let recent = format!("severity=notice&limit={EVENTS}");
    let sent: Vec<EventInfo> = (second.as_ref().ok())
        .and_then(|c| c.get(&format!("{}?{recent}", events::ALERTS)).ok())
        .unwrap_or_default();
    let second = second.and_then(|c| c.get::<Report>("/v1/health"));
    let has_second = second.is_ok();
    let (seen, error) = match seen {
        Ok(seen) => (Some(seen), None),
        Err(error) => (None, Some(error)),
    };
    let trace = error.as_ref().map(|error| (error, client.trace()));
    let is_forbidden = matches!(trace, Some((_, Trace::Hidden)));
    let health = second.unwrap_or_else(|_| judged(seen.as_ref(), trace));
    let events: Vec<EventInfo> = match &seen {
        // Events are the least of it: without them the rest is worth showing.
        Some(_) => client
            .get(&format!("/v1/events?{recent}"))
            .unwrap_or_default(),
        None => Vec::new(),
    };
    Asked {
        seen,
        health,
        has_second,
        events: events::merged(vec![events, sent], EVENTS),
        is_forbidden,
        error,
    }
}

pub fn run(global: &Global) -> Outcome {
    let Asked {
        seen,
        health,
        has_second,
        events,
        error,
        ..
    } = ask(global);
    let status = Status {
        condition: health.condition,
        monitor: has_second,
        pool: seen.as_ref().map(pool),
        helping: seen.as_ref().map(|s| helping(&s.stats.pool.disks)),
        disks: seen.as_ref().map(|s| disks(s, &health)).unwrap_or_default(),
        datastores: seen.as_ref().map(datastores).unwrap_or_default(),
        health,
        events,
        error: error.as_ref().map(ToString::to_string),
    };
    if global.json {
        print_json(&status)?;
    } else {
        print!("{}", text(&status, Room::here()));
    }
    match error {
        // Shown already, as far as it goes; and still a failure.
        Some(error) => Err(error.into()),
        // The screen says what has failed.
        None if status.condition == Condition::Failed => Err(Failure::Said),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_has_its_figure() {
        let spans = |x: Option<f64>| {
            vec![DiskSpan {
                span: "1d".to_owned(),
                ratios: Ratios {
                    speedup: x,
                    ..Ratios::default()
                },
                ..DiskSpan::default()
            }]
        };
        assert!(
            helping(&spans(Some(5.26)))
                .sentence
                .starts_with("yes: without the cache, requests would take 5.3 times")
        );
        assert!(helping(&spans(Some(0.5))).sentence.starts_with("no: "));
        assert!(
            helping(&spans(Some(1.0)))
                .sentence
                .starts_with("no difference")
        );
        assert!(helping(&spans(None)).sentence.starts_with("not known yet"));
        let mut lately = spans(Some(2.0));
        lately[0].span = "5min".to_owned();
        assert!(helping(&lately).sentence.contains("over 5 minutes"));
    }

    #[test]
    fn daemon_that_hangs_or_hides_is_not_absent() {
        let error = Error::unavailable("no answer", "");
        let said = |trace| {
            let report = judged(None, Some((&error, trace)));
            let reason = report.items[0].reasons[0].clone();
            (report.condition, reason.code)
        };
        let hangs = (Condition::Failed, "daemon-hanging".into());
        assert_eq!(said(Trace::Listens), hangs);
        let hidden = (Condition::Unknown, "daemon-hidden".into());
        assert_eq!(said(Trace::Hidden), hidden);
    }

    #[test]
    fn a_daemon_that_is_not_there_is_shown_as_failed() {
        let error = Error::unavailable("nobody listens", "");
        let health = judged(None, Some((&error, Trace::Absent)));
        assert_eq!(health.condition, Condition::Failed);
        let status = Status {
            condition: health.condition,
            monitor: false,
            pool: None,
            helping: None,
            disks: Vec::new(),
            datastores: Vec::new(),
            health,
            events: Vec::new(),
            error: Some(error.to_string()),
        };
        let text = text(&status, Room::UNBOUNDED);
        assert!(
            text.starts_with("health: failed\n  failed     daemon hearth: the daemon is not there"),
            "{text}"
        );
        assert!(
            text.contains("note: the second service is not there"),
            "{text}"
        );
    }
}
