//! What the second service answers on its own socket, as its clients decode it.

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
