//! What happened, as typed events with names that stay.
//!
//! A log line is for whoever reads it at the time. An operator who comes later asks what happened to a disk
//! since yesterday, and a program asks for one kind of thing by its name. So everything worth either question
//! is an [`Event`]: one table of kinds ([`kinds`]), told in one place ([`Events::tell`]), which writes the log's
//! line, keeps the event in a file ([`file`]) and gives it to the journal with fields ([`journald`]).
//!
//! Telling never waits for a disk and never fails: the event is in memory when `tell` returns, and a
//! thread of its own writes it. If that thread cannot keep up, events are left out of the file and
//! counted, and the count is an event too.

pub mod file;
pub mod journald;
pub mod kinds;
mod teller;
pub mod time;

pub use kinds::{Event, Severity};
pub use teller::{Events, Query};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An event as it is kept and shown. Kinds that this version does not know are read like all others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Grows by one with each event, over restarts.
    pub id: u64,
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// The kind's name.
    pub event: String,
    /// How much it matters.
    pub severity: Severity,
    /// The disk it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// What happened, for people.
    pub text: String,
    /// The kind's own fields.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub details: Map<String, Value>,
}
