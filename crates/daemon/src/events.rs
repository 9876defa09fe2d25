//! Where the events of a daemon, or of the second service, are kept: in its state directory, if they can be.

use std::path::Path;

use hearth_events::Events;
use hearth_events::file::OpenError;
use hearth_events::journald::{Journal, SOCKET};

/// The journal, if standard error leads there: whoever redirects it wants to read it elsewhere.
fn journal() -> Option<Journal> {
    std::env::var_os("JOURNAL_STREAM")?;
    Journal::connect(Path::new(SOCKET)).ok()
}

/// Opens the events kept in the state directory. A daemon serves its disks without, too.
pub fn open(state_dir: &Path) -> Events {
    let dir = state_dir.join("events");
    match Events::kept(&dir, journal()) {
        Ok(events) => return events,
        Err(OpenError::Taken) => tracing::warn!(
            "another process keeps its events in {}; this one's are lost at its end. Give each a --state-dir of its own",
            dir.display()
        ),
        Err(OpenError::Io(e)) => tracing::warn!(
            "events cannot be kept in {}: {e}; they are lost at the end. Name another place with --state-dir",
            dir.display()
        ),
    }
    Events::in_memory()
}
