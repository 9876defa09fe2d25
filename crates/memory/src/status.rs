//! What the controller says of itself: a file, written anew at each look, for whoever asks and for who watches it.
//!
//! A file and not a socket: who wants to know whether the controller still lives must not wait for it.

use serde::{Deserialize, Serialize};

use crate::{Decision, Level, Seen};

/// Of its form.
pub const VERSION: u32 = 1;
/// Without a new one for so long, the controller has stopped.
pub const SILENT_MS: u64 = 30_000;
/// Steps that are kept in it, the newest.
pub const STEPS: usize = 20;

/// A step that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Made {
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// What, and why.
    #[serde(flatten)]
    pub decision: Decision,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// The file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    version: u32,
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// The controller's process.
    pub pid: u32,
    /// How short memory is.
    pub level: Level,
    /// Why nothing helps, if so.
    pub helpless: Option<String>,
    /// What it sees.
    pub seen: Seen,
    /// What it did last, the newest last.
    pub steps: Vec<Made>,
}

impl Status {
    /// One of this version.
    pub fn new(at: u64, pid: u32, level: Level, seen: Seen) -> Status {
        Status {
            version: VERSION,
            at,
            pid,
            level,
            helpless: None,
            seen,
            steps: Vec::new(),
        }
    }

    /// Understands a file.
    pub fn parse(bytes: &[u8]) -> Result<Status, String> {
        let value: serde_json::Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        match value["version"].as_u64() {
            Some(v) if v == u64::from(VERSION) => {}
            Some(v) => return Err(format!("it is of version {v}, this build knows {VERSION}")),
            None => return Err("it has no version".to_owned()),
        }
        serde_json::from_value(value).map_err(|e| e.to_string())
    }

    /// Has nothing been heard of the controller for too long?
    pub fn is_silent(&self, now: u64) -> bool {
        now.saturating_sub(self.at) > SILENT_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Guest, Step};

    #[test]
    fn the_form_stays() {
        let seen = Seen {
            total: 2,
            available: 1,
            guests: vec![Guest {
                name: "vm".into(),
                assigned: 3,
                ..Guest::default()
            }],
            ..Seen::default()
        };
        let mut status = Status::new(5, 7, Level::Soft, seen);
        status.steps.push(Made {
            at: 4,
            decision: Decision {
                step: Step::Balloon {
                    guest: "vm".into(),
                    from: 3,
                    to: 2,
                },
                why: "w".into(),
            },
            error: None,
        });
        let golden = r#"{"version":1,"at":5,"pid":7,"level":"soft","helpless":null,"seen":{"at_ms":0,"total":2,"available":1,"swap_total":0,"swap_free":0,"swap_in":0,"swap_out":0,"pressure":null,"zswap":null,"guests":[{"name":"vm","pid":null,"assigned":3,"resident":0,"swapped":0,"compressed":null,"active":0,"cpu":0.0,"stalled_ms":null,"balloon":null,"inside":null,"reporting":null,"exempt":false,"minimum":0,"reserved":0,"maximum":0,"share":0}],"notes":[]},"steps":[{"at":4,"step":{"balloon":{"guest":"vm","from":3,"to":2}},"why":"w","error":null}]}"#;
        assert_eq!(serde_json::to_string(&status).unwrap(), golden);
        assert_eq!(Status::parse(golden.as_bytes()), Ok(status.clone()));
        assert!(!status.is_silent(SILENT_MS) && status.is_silent(SILENT_MS + 6));
        for bad in ["", "{}", "{\"version\":2}", "{\"version\":1}"] {
            assert!(Status::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
