//! How a mirror is copied to and scrubbed, as somebody has asked, and what scrubs have found: what is kept over a restart,
//! and may be lost without harm.

use serde::{Deserialize, Serialize};

/// Days between scrubs unless something else is asked for.
pub const EVERY_DAYS: u32 = 30;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Habits {
    /// Bytes a second that are copied at most; 0 is no limit.
    pub rate: u64,
    /// Nothing is copied to legs that lack something.
    pub paused: bool,
    /// Bytes of the disk a second that a scrub compares at most; 0 is no limit.
    pub scrub_rate: u64,
    /// Days from one scrub to the next; 0: only when asked for.
    pub every_days: u32,
    /// The scrub under way, or the last one.
    pub scrub: ScrubState,
}

impl Default for Habits {
    fn default() -> Habits {
        Habits {
            rate: 0,
            paused: false,
            scrub_rate: crate::machine::SCRUB_RATE,
            every_days: EVERY_DAYS,
            scrub: ScrubState::default(),
        }
    }
}

/// A scrub under way, or the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScrubState {
    /// It goes on, also after a restart.
    pub active: bool,
    /// Somebody called it off before it was through; it can be gone on with.
    pub called_off: bool,
    /// When it began, milliseconds since 1970; 0: there was none yet.
    pub began_ms: u64,
    /// When it ended, or when nothing had been scrubbed yet.
    pub ended_ms: u64,
    /// All before here is done.
    pub at: u64,
    /// Bytes looked at.
    pub checked: u64,
    /// Of these, so many that not all legs took part in.
    pub partial: u64,
    /// Of these, so many that no leg could read.
    pub unread: u64,
    /// Places that were repaired.
    pub repairs: u64,
    /// Bytes of them.
    pub repaired: u64,
    /// Where legs differ and nothing tells which one is right; of very many, the first.
    pub undecided: Vec<Undecided>,
    /// How many there are.
    pub undecided_all: u64,
}

/// A place where legs differ, or the cache differs from all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undecided {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The legs, and the CRC32C of the first block that each holds there.
    pub legs: Vec<(String, u32)>,
    /// The legs hold the same, and what is cached is something else.
    pub cached: bool,
}
