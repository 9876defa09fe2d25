//! What keeps a disk's dirty blocks from its origin.
//!
//! The destager leaves what it cannot write where it is and tries again, which is right and says
//! nothing: guests go on until flash is full of dirty blocks, and then stall. So what goes wrong is
//! kept, from the first refusal until the origin has taken and kept what it was given, for whoever
//! asks. Telling people is the daemon's part.

use hearth_io::IoError;
use serde::Serialize;

use crate::disk::Disk;

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

impl Disk {
    /// A run could not be written back.
    pub(crate) fn note_trouble(&mut self, error: Option<IoError>, now: u64) {
        self.counters.destage_errors += 1;
        let trouble = self.destage.trouble.get_or_insert(Trouble {
            since_ns: now,
            failures: 0,
            error,
        });
        trouble.failures += 1;
        trouble.error = error.or(trouble.error);
    }

    /// What keeps its dirty blocks from the origin, if anything does. Without any, nothing is kept.
    pub(crate) fn trouble(&self) -> Option<Trouble> {
        let owes = self.is_dirty() || !self.destage.written.is_empty();
        self.destage.trouble.filter(|_| owes)
    }
}
