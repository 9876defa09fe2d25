//! What keeps a disk's dirty blocks from its origin.
//!
//! The destager leaves what it cannot write where it is and tries again, which is right and says
//! nothing: guests go on until flash is full of dirty blocks, and then stall. So what goes wrong is
//! kept, from the first refusal until the origin has taken and kept what it was given, for whoever
//! asks. Telling people is the daemon's part.

use hearth_io::IoError;
use serde::Serialize;

/// The destager cannot write a disk's dirty blocks back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Trouble {
    /// Time of the first refusal, on the clock the engine is given.
    pub since_ns: u64,
    /// Refusals since then.
    pub failures: u64,
    /// What the origin said last; `None` if it was not the origin that failed.
    #[serde(skip)]
    pub error: Option<IoError>,
}
