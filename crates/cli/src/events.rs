//! `hearth events`: what happened.

use std::io::Write as _;
use std::time::Duration;

use hearth_daemon::api::events::EventInfo;
use hearth_daemon::client::{Client, escape};
use hearth_daemon::error::Error;
use hearth_events::time::{now_ms, utc};
use hearth_monitor::dirs;

use crate::args::{Events, Global};
use crate::interrupt::Interrupt;
use crate::table::plain;
use crate::{Failure, Outcome};

/// How often who follows asks for more.
const PACE: Duration = Duration::from_millis(500);

/// Somebody who tells events; each numbers its own.
struct Teller {
    client: Client,
    path: &'static str,
    /// Number of the newest that is dealt with, once that is known.
    last: Option<u64>,
}

impl Teller {
    fn new(client: Client, path: &'static str) -> Teller {
        Teller {
            client,
            path,
            last: None,
        }
    }

    fn ask(&self, question: &str) -> Result<Vec<EventInfo>, Error> {
        self.client.get(&format!("{}?{question}", self.path))
    }

    /// Number of the newest event of all.
    fn newest(&self) -> Result<u64, Error> {
        Ok(self.ask("limit=1")?.last().map_or(0, |e| e.id))
    }

    /// What has come since it was asked last; nothing the first time, and while it is not there.
    fn more(&mut self, question: &str) -> Vec<EventInfo> {
        let Some(last) = self.last else {
            self.last = self.newest().ok();
            return Vec::new();
        };
        let more = self.ask(&format!("{question}&after={last}"));
        let more = more.unwrap_or_default();
        self.last = Some(more.last().map_or(last, |e| e.id));
        more
    }
}

/// Where the second service tells what it told people.
pub const ALERTS: &str = "/v1/alerts/events";

/// The newest of what several told, oldest first.
pub fn merged(told: Vec<Vec<EventInfo>>, limit: usize) -> Vec<EventInfo> {
    let mut all: Vec<EventInfo> = told.into_iter().flatten().collect();
    // Stable: what one told stays in its order.
    all.sort_by_key(|event| event.at);
    all.drain(..all.len().saturating_sub(limit));
    all
}

pub fn run(global: &Global, args: &Events) -> Outcome {
    let mut daemon = Teller::new(Client::new(&global.dir()), "/v1/events");
    let mut second = Teller::new(Client::new(&dirs::run_dir(&global.dir())), ALERTS);
    let mut question = format!("limit={}", args.limit);
    if let Some(disk) = &args.disk {
        question += &format!("&disk={}", escape(disk));
    }
    if let Some(severity) = args.severity {
        question += &format!("&severity={}", severity.word());
    }
    let since = args.since.map_or(0, |s| {
        let ago = Duration::from_secs_f64(s).as_millis();
        now_ms().saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX))
    });
    // Asked first: what comes in between is shown by the next question, or the one after it.
    if args.follow {
        daemon.last = Some(daemon.newest()?);
        second.last = second.newest().ok();
    }
    let past = format!("{question}&since={since}");
    let told = daemon.ask(&past)?;
    // A host without the second service tells nobody.
    let sent = second.ask(&past).unwrap_or_default();
    for (teller, events) in [(&mut daemon, &told), (&mut second, &sent)] {
        if let (Some(last), Some(newest)) = (teller.last, events.last()) {
            teller.last = Some(last.max(newest.id));
        }
    }
    show(global, &merged(vec![told, sent], args.limit as usize))?;
    if !args.follow {
        return Ok(());
    }
    let interrupt = Interrupt::watch();
    while !interrupt.sleep(PACE) {
        // Over a restart of either, too.
        let more = vec![daemon.more(&question), second.more(&question)];
        show(global, &merged(more, usize::MAX))?;
    }
    Ok(())
}

/// Shows events, oldest first.
pub fn show(global: &Global, events: &[EventInfo]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for event in events {
        let line = if global.json {
            crate::table::json(event)
                .map_err(|e| Error::internal(format!("cannot print an event as JSON: {e}")))?
        } else {
            crate::table::shown(&line(event))
        };
        // A reader that has gone away ends the command.
        let _ = writeln!(out, "{line}");
    }
    let _ = out.flush();
    Ok(())
}

/// An event for people.
pub fn line(event: &EventInfo) -> String {
    let disk = event
        .disk
        .as_deref()
        .map_or(String::new(), |d| format!("{}: ", plain(d)));
    format!(
        "{}  {:7}  {}  {disk}{}",
        utc(event.at),
        event.severity,
        event.event,
        plain(&event.text)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_tell_is_in_the_order_of_time_and_the_newest_are_kept() {
        let event = |id, at| EventInfo {
            id,
            at,
            event: "x".to_owned(),
            severity: "info".to_owned(),
            disk: None,
            text: String::new(),
            details: serde_json::Map::new(),
        };
        let daemon = vec![event(7, 10), event(8, 30), event(9, 30)];
        let second = vec![event(1, 20), event(2, 40)];
        let all = merged(vec![daemon, second], 4);
        let ids: Vec<u64> = all.iter().map(|e| e.id).collect();
        assert_eq!(ids, [1, 8, 9, 2]);
    }

    #[test]
    fn a_line_says_when_what_and_to_whom() {
        let event = EventInfo {
            id: 1,
            at: 951_782_400_000,
            event: "disk-attached".to_owned(),
            severity: "info".to_owned(),
            disk: Some("vm1".to_owned()),
            text: "attached\n".to_owned(),
            details: serde_json::Map::new(),
        };
        assert_eq!(
            line(&event),
            "2000-02-29T00:00:00Z  info     disk-attached  vm1: attached\u{FFFD}"
        );
    }
}
