//! The daemon's events, each once, over restarts of either service.
//!
//! Whoever follows remembers the number of the last event dealt with, together with what came of it: so
//! nothing is missed that happened while the second service was not there, and nothing is dealt with twice. Numbers
//! grow over restarts of the daemon; where they went back, its file of events was lost, and what is in the new
//! one has not been seen.

use hearth_daemon::api::events::EventInfo;
use hearth_daemon::client::Client;
use hearth_daemon::error::Result;
use serde::{Deserialize, Serialize};

/// Events in one answer.
const PIECE: usize = 1000;

/// How far somebody has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Number of the last event dealt with.
    pub last: u64,
    /// False until the first answer: what happened before somebody began to follow is not news.
    pub begun: bool,
}

impl Cursor {
    /// The next events, oldest first, and the cursor behind them. No more than a piece at a time: if it is full,
    /// there may be more.
    pub fn next(self, client: &Client) -> Result<(Vec<EventInfo>, Cursor)> {
        let newest: Vec<EventInfo> = client.get("/v1/events?limit=1")?;
        let newest = newest.last().map_or(0, |e| e.id);
        let events: Vec<EventInfo> = match self.after(newest) {
            None => Vec::new(),
            // `after=0` would give the newest, not the oldest.
            Some(0) => client.get(&format!("/v1/events?limit={PIECE}"))?,
            Some(after) => client.get(&format!("/v1/events?after={after}&limit={PIECE}"))?,
        };
        let last = events.last().map_or(newest, |e| e.id);
        Ok((events, Cursor { last, begun: true }))
    }

    /// After which number there is something new; the newest there is has number `newest`.
    fn after(self, newest: u64) -> Option<u64> {
        if !self.begun || newest == self.last {
            return None;
        }
        // A file of events that was lost begins at 1 again.
        Some(if newest < self.last { 0 } else { self.last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_past_is_no_news_and_a_lost_file_is() {
        let fresh = Cursor::default();
        assert_eq!(fresh.after(100), None);
        let begun = Cursor {
            last: 100,
            begun: true,
        };
        assert_eq!(begun.after(100), None);
        assert_eq!(begun.after(103), Some(100));
        assert_eq!(begun.after(3), Some(0));
    }
}
