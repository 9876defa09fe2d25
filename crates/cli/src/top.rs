//! `hearth top`: what the disks do now, live.
//!
//! The screen belongs to whoever was there before, so it is given back however this ends: by a key, a signal, an
//! error or a panic. What is shown is worked out of two looks at the daemon's counters ([`sample`]) and drawn by
//! code that knows neither daemon nor terminal ([`view`]).

mod sample;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use hearth_daemon::api::stats::StatsReport;
use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::args::{Global, Top};
use crate::interrupt::Interrupt;
use crate::{Failure, Outcome};
use sample::{Look, Sample};
use view::View;

/// Longest wait for a key: so soon a signal is seen.
const KEYS: Duration = Duration::from_millis(50);
/// Longest wait for the daemon, which may be in the middle of an upgrade.
const PATIENCE: Duration = Duration::from_secs(5);

pub fn run(global: &Global, args: &Top) -> Outcome {
    let client = Client::new(&global.dir()).patient_for(PATIENCE);
    let interrupt = Interrupt::watch();
    let interval = Duration::from_secs_f64(args.interval);
    if global.json {
        return print(&client, &interrupt, interval, args.once);
    }
    if args.once {
        return Err(Error::invalid("--once is for --json", "add --json, or leave it out").into());
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Error::invalid(
            "`hearth top` needs a terminal",
            "use `hearth top --json`, or `hearth stats`",
        )
        .into());
    }
    // Before the screen is taken: a daemon that is not there is said in plain words.
    let first = look(&client)?;
    let mut terminal = ratatui::try_init().map_err(|e| screen(&e))?;
    let outcome = live(&mut terminal, &client, &interrupt, interval, first);
    ratatui::restore();
    outcome
}

fn look(client: &Client) -> Result<Look, Error> {
    let report: StatsReport = client.get("/v1/stats")?;
    Ok(Look::new(Instant::now(), report))
}

fn screen(e: &std::io::Error) -> Failure {
    Error::unavailable(
        format!("the terminal cannot be used: {e}"),
        "use `hearth top --json`",
    )
    .into()
}

/// One line a sample.
fn print(client: &Client, interrupt: &Interrupt, interval: Duration, once: bool) -> Outcome {
    let mut before = look(client)?;
    while !interrupt.sleep(interval) {
        let now = look(client)?;
        let sample = Sample::between(&before, &now);
        let line = crate::table::json(&sample)
            .map_err(|e| Error::internal(format!("cannot print a sample: {e}")))?;
        println!("{line}");
        if once {
            break;
        }
        before = now;
    }
    Ok(())
}

fn live(
    terminal: &mut DefaultTerminal,
    client: &Client,
    interrupt: &Interrupt,
    interval: Duration,
    first: Look,
) -> Outcome {
    let mut view = View::default();
    let mut before = first;
    view.wait_for_more();
    let mut next = Instant::now() + interval;
    while !interrupt.hit() {
        terminal
            .draw(|frame| view.draw(frame))
            .map_err(|e| screen(&e))?;
        let until = next.saturating_duration_since(Instant::now()).min(KEYS);
        // Nothing else ends a wait for a key early, and signals are only looked for here.
        if event::poll(until).map_err(|e| screen(&e))?
            && let Event::Key(key) = event::read().map_err(|e| screen(&e))?
            && key.kind == KeyEventKind::Press
        {
            let ctrl = key.modifiers.contains(KeyModifiers::CONTROL);
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if ctrl => return Ok(()),
                KeyCode::Char(letter) => view.key(letter),
                KeyCode::Up => view.scroll(-1),
                KeyCode::Down => view.scroll(1),
                KeyCode::PageUp => view.scroll(-10),
                KeyCode::PageDown => view.scroll(10),
                KeyCode::Home => view.scroll(isize::MIN),
                _ => {}
            }
        }
        if Instant::now() >= next {
            next = Instant::now() + interval;
            match look(client) {
                Ok(now) => {
                    view.take(Sample::between(&before, &now));
                    before = now;
                }
                // It may be back in a moment: a restart, an upgrade.
                Err(e) => view.trouble(e.to_string()),
            }
        }
    }
    Ok(())
}
