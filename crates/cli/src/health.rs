//! `hearth health`: one line and an exit status, as plugins of Nagios and its relatives have them.

use std::process::ExitCode;

use hearth_daemon::api::stats::PoolReport;
use hearth_health::{Condition, Item, Report};
use serde::Serialize;

use crate::args::Global;
use crate::overview::{Asked, ask};
use crate::print_json;
use crate::table::plain;

/// What a plugin says, with its exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum State {
    Ok,
    Warning,
    Critical,
    Unknown,
}

impl State {
    fn of(condition: Condition) -> State {
        match condition {
            Condition::Healthy => State::Ok,
            // Less is left before it fails, until that is rebuilt.
            Condition::Rebuilding | Condition::Degraded => State::Warning,
            Condition::Failed => State::Critical,
            Condition::Unknown => State::Unknown,
        }
    }

    fn word(self) -> &'static str {
        match self {
            State::Ok => "OK",
            State::Warning => "WARNING",
            State::Critical => "CRITICAL",
            State::Unknown => "UNKNOWN",
        }
    }
}

#[derive(Serialize)]
struct Said<'a> {
    state: State,
    exit_status: u8,
    line: String,
    health: &'a Report,
}

pub fn run(global: &Global) -> ExitCode {
    let asked = ask(global);
    let state = state(&asked);
    let line = line(&asked, state);
    if global.json {
        let said = Said {
            state,
            exit_status: state as u8,
            line,
            health: &asked.health,
        };
        // What cannot be printed was not said.
        if print_json(&said).is_err() {
            return ExitCode::from(State::Unknown as u8);
        }
    } else {
        println!("{line}");
    }
    ExitCode::from(state as u8)
}

/// A daemon that may not be asked is not known to be bad.
fn state(asked: &Asked) -> State {
    match asked.is_forbidden {
        true => State::Unknown,
        false => State::of(asked.health.condition),
    }
}

/// The state, the worst that is wrong, and figures behind a bar.
fn line(asked: &Asked, state: State) -> String {
    let mut line = format!("HEARTH {} - {}", state.word(), sentence(asked, state));
    // Both have a meaning of their own there.
    line = line.replace('|', "/").replace(['\n', '\r'], " ");
    if let Some(seen) = &asked.seen {
        line.push_str(&figures(seen.disks.len(), &seen.stats.pool));
    }
    line
}

fn sentence(asked: &Asked, state: State) -> String {
    let bad = asked.health.bad();
    if let Some(worst) = bad.first().filter(|_| !asked.is_forbidden) {
        let more = match bad.len() - 1 {
            0 => String::new(),
            n => format!("; and {n} more, see `hearth status`"),
        };
        return format!("{}{more}", told(worst));
    }
    match (&asked.error, state) {
        (Some(error), _) => plain(&error.to_string()),
        (None, State::Unknown) => "nothing is known yet".to_owned(),
        (None, _) => {
            let disks = asked.seen.as_ref().map_or(0, |seen| seen.disks.len());
            let plural = if disks == 1 { "" } else { "s" };
            format!("{disks} disk{plural}, nothing is wrong")
        }
    }
}

fn told(item: &Item) -> String {
    let what = item.reasons.first().map_or("", |reason| &reason.what);
    format!(
        "{} {}: {}",
        item.kind.word(),
        plain(&item.name),
        plain(what)
    )
}

/// Performance data: `'label'=value[unit];warn;crit;min;max`.
fn figures(disks: usize, pool: &PoolReport) -> String {
    let PoolReport {
        capacity,
        cached,
        dirty,
        ..
    } = pool;
    format!(" | disks={disks} cached={cached}B;;;0;{capacity} dirty={dirty}B;;;0;{capacity}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::error::Error;
    use hearth_health::{Kind, Reason};

    fn asked(items: Vec<Item>, error: Option<Error>) -> Asked {
        Asked {
            seen: None,
            health: Report::new(0, items, Vec::new()),
            has_second: true,
            events: Vec::new(),
            is_forbidden: error.is_some(),
            error,
        }
    }

    fn item(name: &str, reasons: Vec<Reason>) -> Item {
        Item::new(Kind::Device, name, reasons)
    }

    fn says(asked: &Asked) -> (u8, String) {
        let state = state(asked);
        (state as u8, line(asked, state))
    }

    #[test]
    fn exit_status_is_that_of_plugins() {
        let pool = || Item::new(Kind::Pool, "p", Vec::new());
        for (reason, status, word) in [
            (None, 0, "OK"),
            (Some(Reason::note("a", "x", "")), 0, "OK"),
            (Some(Reason::unknown("smart-none", "x", "")), 0, "OK"),
            (Some(Reason::rebuilding("b", "x")), 1, "WARNING"),
            (Some(Reason::degraded("c", "x", "y")), 1, "WARNING"),
            (Some(Reason::failed("d", "x", "y")), 2, "CRITICAL"),
        ] {
            let all = vec![item("sda", reason.into_iter().collect()), pool()];
            let (exit, line) = says(&asked(all, None));
            assert_eq!(exit, status, "{line}");
            assert!(line.starts_with(&format!("HEARTH {word} - ")), "{line}");
        }
        let (exit, line) = says(&asked(Vec::new(), None));
        assert_eq!(exit, 3, "{line}");
        // Judged without an answer, the daemon counts as failed.
        let down = vec![item("hearth", vec![Reason::failed("daemon-down", "x", "")])];
        let forbidden = Error::unavailable("not you", "be root");
        let (exit, line) = says(&asked(down, Some(forbidden)));
        assert_eq!(exit, 3, "{line}");
        assert!(line.starts_with("HEARTH UNKNOWN - not you"), "{line}");
    }

    #[test]
    fn line_is_one_line_with_one_bar() {
        let reason = Reason::failed("d", "x | y\nz", "remedy");
        let two = vec![item("a|b", vec![reason.clone()]), item("sdb", vec![reason])];
        let (_, line) = says(&asked(two, None));
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(!line.contains('|'), "{line}");
        assert!(line.contains("device a/b: x / y"), "{line}");
        assert!(line.contains("and 1 more"), "{line}");
        let pool = PoolReport {
            capacity: 9,
            cached: 7,
            dirty: 2,
            ..PoolReport::default()
        };
        assert_eq!(
            figures(3, &pool),
            " | disks=3 cached=7B;;;0;9 dirty=2B;;;0;9"
        );
    }
}
