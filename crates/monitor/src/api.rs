//! What the second service answers on its own socket, as its clients decode it.

use std::collections::BTreeMap;

use hearth_health::{Kind, Reason};
use serde::{Deserialize, Serialize};

/// Whether the daemon is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// Not looked yet.
    #[default]
    Unknown,
    /// It answers.
    Up,
    /// It listens and does not answer.
    Hanging,
    /// Nobody listens.
    Down,
}

impl Link {
    /// The word used in the API and the command line.
    pub fn word(self) -> &'static str {
        match self {
            Link::Unknown => "unknown",
            Link::Up => "up",
            Link::Hanging => "hanging",
            Link::Down => "down",
        }
    }
}

/// The daemon, as the second service sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonInfo {
    /// Whether it is there.
    pub link: Link,
    /// Since when, in milliseconds since 1970.
    pub since: u64,
    /// What it said instead of an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When it last answered, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<u64>,
}

/// A part of the second service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartInfo {
    /// Its name.
    pub name: String,
    /// It is at work.
    pub running: bool,
    /// How often it had to be started again.
    pub restarts: u64,
    /// Why it had to be, the last time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The second service: `GET /v1/monitor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonitorInfo {
    /// Its version.
    pub version: String,
    /// The daemon.
    pub daemon: DaemonInfo,
    /// Its parts.
    pub parts: Vec<PartInfo>,
}

/// An alert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlertInfo {
    /// What sort of thing it is about.
    pub kind: Kind,
    /// What that is called.
    pub name: String,
    /// What is so, and what to do.
    pub reason: Reason,
    /// Since when, in milliseconds since 1970.
    pub since: u64,
    /// When it was over; 0 while it lasts.
    #[serde(default)]
    pub ended: u64,
    /// That it is being mended, and how far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mending: Option<String>,
}

/// A way alerts go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WayInfo {
    /// Its name: `mail:ADDRESS`, `webhook` or `ntfy`.
    pub way: String,
    /// Messages that have not arrived.
    pub waiting: u64,
    /// Why the first of them has not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A message that has not arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingInfo {
    /// The way it goes.
    pub way: String,
    /// Its number.
    pub id: u64,
    /// Its first line.
    pub subject: String,
    /// Attempts so far.
    pub attempts: u64,
    /// When it is tried next, in milliseconds since 1970.
    pub next: u64,
    /// Why it did not arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Alerts: `GET /v1/alerts`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlertsInfo {
    /// What is wrong and was told.
    pub open: Vec<AlertInfo>,
    /// What was, the newest last.
    pub past: Vec<AlertInfo>,
    /// Ways alerts go.
    pub ways: Vec<WayInfo>,
    /// Messages that have not arrived.
    pub waiting: Vec<WaitingInfo>,
    /// Things that wait for the next message.
    #[serde(default)]
    pub untold: u64,
}

/// A test that was sent: `POST /v1/alerts/test`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestInfo {
    /// The message's number.
    pub id: u64,
    /// Ways it goes.
    pub ways: Vec<String>,
}

/// What happened over time: `GET /v1/history`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryInfo {
    /// Seconds from one point to the next, where none is missing.
    pub step: u64,
    /// When each point begins, in seconds since 1970. Times of which nothing is known have no point.
    pub at: Vec<u64>,
    /// Seconds of each that were seen.
    pub seconds: Vec<f64>,
    /// What was counted in each, by name; `cached` and `dirty` are bytes at its end.
    pub columns: BTreeMap<String, Vec<u64>>,
}

/// What happened to something in all of a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistorySum {
    /// Its name.
    pub name: String,
    /// When what is known begins, in seconds since 1970.
    pub from: u64,
    /// Seconds that were seen.
    pub seconds: f64,
    /// What was counted, by name.
    pub counted: BTreeMap<String, u64>,
}

/// What happened to everything in all of a time: `GET /v1/history/disks`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistorySums {
    /// All disks together.
    pub pool: Option<HistorySum>,
    /// The flash.
    pub flash: Option<HistorySum>,
    /// Each disk, also those that are gone.
    pub disks: Vec<HistorySum>,
}
