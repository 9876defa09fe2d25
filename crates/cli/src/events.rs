//! `hearth events`: what happened.

use std::io::Write as _;
use std::time::Duration;

use hearth_daemon::api::events::EventInfo;
use hearth_daemon::client::{Client, escape};
use hearth_daemon::error::Error;
use hearth_events::time::{now_ms, utc};

use crate::args::{Events, Global};
use crate::interrupt::Interrupt;
use crate::table::plain;
use crate::{Failure, Outcome};

/// How often who follows asks for more.
const PACE: Duration = Duration::from_millis(500);

pub fn run(global: &Global, args: &Events) -> Outcome {
    let client = Client::new(&global.dir());
    let mut question = format!("/v1/events?limit={}", args.limit);
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
    let mut last = if args.follow { newest(&client)? } else { 0 };
    let first: Vec<EventInfo> = client.get(&format!("{question}&since={since}"))?;
    show(global, &first)?;
    if !args.follow {
        return Ok(());
    }
    let interrupt = Interrupt::watch();
    last = first.last().map_or(last, |e| e.id.max(last));
    while !interrupt.sleep(PACE) {
        // Over a restart of the daemon, too.
        let Ok(more) = client.get::<Vec<EventInfo>>(&format!("{question}&after={last}")) else {
            continue;
        };
        show(global, &more)?;
        last = more.last().map_or(last, |e| e.id);
    }
    Ok(())
}

/// Number of the newest event of all.
fn newest(client: &Client) -> Result<u64, Error> {
    let newest: Vec<EventInfo> = client.get("/v1/events?limit=1")?;
    Ok(newest.last().map_or(0, |e| e.id))
}

/// Shows events, oldest first.
pub fn show(global: &Global, events: &[EventInfo]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for event in events {
        let line = if global.json {
            serde_json::to_string(event)
                .map_err(|e| Error::internal(format!("cannot print an event as JSON: {e}")))?
        } else {
            line(event)
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
