//! `hearth alert`: what the second service tells people, and whether it arrives.

use std::time::{Duration, Instant};

use hearth_alerts::message::{Entry, Message, News, utc};
use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_events::time::now_ms;
use hearth_health::{Condition, Kind};
use hearth_monitor::alerts::host_name;
use hearth_monitor::api::{AlertsInfo, TestInfo};
use hearth_monitor::dirs;
use serde::Serialize;

use crate::args::{Alert, Global};
use crate::interrupt::Interrupt;
use crate::table::plain;
use crate::{Outcome, print_json};

/// Longest wait for a test to arrive: a mail server may take its time.
const TEST_LIMIT: Duration = Duration::from_secs(90);
/// How often it is asked meanwhile.
const POLL: Duration = Duration::from_millis(250);

/// What came of a test on one way.
#[derive(Serialize)]
struct Tried {
    way: String,
    arrived: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A client of the second service.
pub fn second(global: &Global) -> Result<Client, Error> {
    let dir = dirs::run_dir(&global.dir());
    let client = Client::new(&dir);
    if client.is_up() {
        return Ok(client);
    }
    Err(Error::unavailable(
        format!(
            "the second service is not there, or you may not use {}",
            dirs::socket(&global.dir()).display()
        ),
        "start it with `hearth monitor` (or `systemctl start hearth-monitor`), or be in its group",
    ))
}

pub fn run(global: &Global, command: &Alert) -> Outcome {
    if let Alert::Failed { unit, config } = command {
        return failed(unit, config.as_deref());
    }
    let client = second(global)?;
    match command {
        // Done above, where the second service is not needed.
        Alert::Failed { .. } => Ok(()),
        Alert::List => list(global, &client),
        Alert::Test => test(global, &client),
    }
}

/// Tells that a unit has failed, without the second service, whose failure it may be.
fn failed(unit: &str, config: Option<&std::path::Path>) -> Outcome {
    let config = crate::monitor::config(config)?.alerts;
    let now = now_ms();
    let entry = Entry {
        news: News::Happened,
        condition: Condition::Failed,
        kind: Kind::Host,
        name: unit.to_owned(),
        code: "unit-failed".to_owned(),
        what: format!("{unit} has failed, and is not started again by itself"),
        remedy: format!(
            "see `journalctl -u {unit}`, mend what it says, and `systemctl start {unit}`; until then nobody is told of anything else"
        ),
        since: now,
    };
    let message = Message {
        // Other than those of the second service, and as good for telling two of them apart.
        id: now,
        at: now,
        host: config.host.clone().unwrap_or_else(host_name),
        entries: vec![entry],
        lost_before: 0,
    };
    let mut missing = Vec::new();
    for way in config.ways() {
        if let Err(e) = hearth_alerts::send::send(&config, &way, &message) {
            missing.push(format!("{}: {e}", plain(&way)));
        }
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Error::unavailable(missing.join("; "), "it has to be tried again").into()),
    }
}

fn list(global: &Global, client: &Client) -> Outcome {
    let info: AlertsInfo = client.get("/v1/alerts")?;
    if global.json {
        return print_json(&info);
    }
    if info.open.is_empty() {
        println!("nothing is wrong that was told");
    }
    for a in &info.open {
        println!(
            "{}  {}  {} {}: {}",
            utc(a.since),
            a.reason.condition.word(),
            a.kind.word(),
            plain(&a.name),
            plain(&a.reason.what)
        );
        if let Some(how) = &a.mending {
            println!("    {}", plain(how));
        } else if !a.reason.remedy.is_empty() {
            println!("    {}", plain(&a.reason.remedy));
        }
    }
    for a in info.past.iter().rev().take(10) {
        println!(
            "{} to {}  over  {} {}: {}",
            utc(a.since),
            utc(a.ended),
            a.kind.word(),
            plain(&a.name),
            plain(&a.reason.what)
        );
    }
    if info.ways.is_empty() {
        println!(
            "nobody is told: there is no section [alerts] with mail, webhook or ntfy; see docs/alerts.md"
        );
    }
    for way in &info.ways {
        match (&way.error, way.waiting) {
            (Some(e), n) => println!("{}: {n} messages wait: {}", plain(&way.way), plain(e)),
            (None, 0) if info.untold > 0 => println!(
                "{}: every message has arrived; {} things wait for the next one (alerts.most_per_hour)",
                plain(&way.way),
                info.untold
            ),
            (None, 0) => println!("{}: everything has arrived", plain(&way.way)),
            (None, n) => println!("{}: {n} messages are on their way", plain(&way.way)),
        }
    }
    Ok(())
}

fn test(global: &Global, client: &Client) -> Outcome {
    let sent: TestInfo = client.order("/v1/alerts/test")?;
    if sent.ways.is_empty() {
        return Err(Error::invalid(
            "nobody is told: the configuration has no section [alerts] with mail, webhook or ntfy",
            "see docs/alerts.md",
        )
        .into());
    }
    let interrupt = Interrupt::watch();
    let end = Instant::now() + TEST_LIMIT;
    let tried = loop {
        let info: AlertsInfo = client.get("/v1/alerts")?;
        let waits = |way: &String| {
            info.waiting
                .iter()
                .find(|w| w.way == *way && w.id == sent.id)
        };
        // A message behind one that does not arrive is not tried before it.
        let stuck = |way: &String| {
            info.ways
                .iter()
                .find(|w| w.way == *way)
                .and_then(|w| w.error.clone())
        };
        let tried: Vec<Tried> = (sent.ways.iter())
            .map(|way| Tried {
                arrived: waits(way).is_none(),
                error: waits(way).and_then(|w| w.error.clone().or_else(|| stuck(way))),
                way: way.clone(),
            })
            .collect();
        let decided = tried.iter().all(|t| t.arrived || t.error.is_some());
        if decided || Instant::now() >= end || interrupt.sleep(POLL) {
            break tried;
        }
    };
    if global.json {
        print_json(&tried)?;
    } else {
        for t in &tried {
            match (&t.error, t.arrived) {
                (_, true) => println!("{}: arrived", plain(&t.way)),
                (Some(e), false) => println!("{}: {}", plain(&t.way), plain(e)),
                (None, false) => println!("{}: still on its way", plain(&t.way)),
            }
        }
    }
    let missing = tried.iter().filter(|t| !t.arrived).count();
    if missing > 0 {
        return Err(Error::unavailable(
            format!(
                "{missing} of {} tests did not arrive; they are tried again",
                tried.len()
            ),
            "put right what is said above",
        )
        .into());
    }
    Ok(())
}
