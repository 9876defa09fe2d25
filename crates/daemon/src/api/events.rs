//! What happened, as reported; kinds and their names are in `docs/events.md`.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use hearth_events::{Events, Record, Severity};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::server::{Panel, Shared, run, understood};
use super::types::ErrorBody;
use crate::error::{Error, Result};

/// Events in one answer, unless less is asked for.
const LIMIT: u32 = 1000;
/// Most events in one answer.
const LIMIT_MAX: u32 = 10_000;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventInfo {
    /// Grows by one with each event, over restarts.
    pub id: u64,
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// The kind's name; see `docs/events.md`.
    pub event: String,
    /// `info`, `notice`, `warning` or `error`.
    pub severity: String,
    /// The disk it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// What happened, for people.
    pub text: String,
    /// The kind's own fields.
    #[schema(value_type = Object)]
    pub details: serde_json::Map<String, serde_json::Value>,
}

impl From<Record> for EventInfo {
    fn from(record: Record) -> EventInfo {
        EventInfo {
            id: record.id,
            at: record.at,
            event: record.event,
            severity: record.severity.word().to_owned(),
            disk: record.disk,
            text: record.text,
            details: record.details,
        }
    }
}

/// Which events are asked for.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Only this disk's.
    disk: Option<String>,
    /// Only from this time on, in milliseconds since 1970.
    #[serde(default)]
    since: u64,
    /// Only those with larger numbers; the oldest of them come first, and are what a limit leaves.
    #[serde(default)]
    after: u64,
    /// At least so severe: `info`, `notice`, `warning` or `error`.
    severity: Option<String>,
    /// So many at most, the newest; 1000 unless said, at most 10000.
    limit: Option<u32>,
}

impl Asked {
    /// The events of `events` that were asked for, oldest first. Reads files.
    pub fn of(self, events: &Events) -> Result<Vec<EventInfo>> {
        let query = hearth_events::Query {
            disk: self.disk,
            since: self.since,
            after: self.after,
            severity: self.severity.as_deref().map(severity).transpose()?,
            limit: self.limit.unwrap_or(LIMIT).min(LIMIT_MAX) as usize,
        };
        let found = events.query(&query).map_err(|e| {
            Error::unavailable(
                format!("the file of events cannot be read: {e}"),
                "see `events` in the state directory",
            )
        })?;
        Ok(found.into_iter().map(EventInfo::from).collect())
    }
}

fn severity(word: &str) -> Result<Severity> {
    use Severity::{Error as Worst, Info, Notice, Warning};
    let all = [Info, Notice, Warning, Worst];
    let found = all.into_iter().find(|s| s.word() == word);
    found.ok_or_else(|| {
        Error::invalid(
            format!("\u{201c}{word}\u{201d} is no severity"),
            "give info, notice, warning or error",
        )
    })
}

/// What happened, oldest first.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(Asked), responses(
    (status = 200, body = Vec<EventInfo>), (status = "default", body = ErrorBody)))]
async fn get_events(
    State(panel): Shared,
    asked: std::result::Result<Query<Asked>, QueryRejection>,
) -> Result<Json<Vec<EventInfo>>> {
    let Query(asked) = understood(asked)?;
    run(panel, move |c| asked.of(c.events())).await
}

pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new().routes(routes!(get_events))
}
