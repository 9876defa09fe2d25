//! `hearth memory run` and `undo`: the loop, and the way back.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearth_events::Event;
use hearth_events::Events;
use hearth_events::file::OpenError;
use hearth_events::time::now_ms;
use hearth_fault::Fault;
use hearth_memory::status::{Made, STEPS};
use hearth_memory::{Controller, Decision, Level, MemoryConfig, Note, Status};

use crate::Result;
use crate::act::{self, Undone};
use crate::guests::Guests;
use crate::look::{Eyes, Places};
use crate::store::RunDir;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// How long guests are waited for at one look, and for the steps that follow from it.
const LOOK: Duration = Duration::from_millis(500);
const STEPS_TIME: Duration = Duration::from_secs(2);
/// How long setting everything back may take: far less than the unit has for a stop.
const BACK_TIME: Duration = Duration::from_secs(10);
/// Longest sleep before it is seen whether to end.
const GLANCE: Duration = Duration::from_millis(50);

/// What a controller is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its own run directory.
    pub run_dir: PathBuf,
    /// Where its events are kept; nowhere if not given.
    pub events: Option<PathBuf>,
    /// What the administrator says.
    pub config: MemoryConfig,
}

/// What it has said already.
#[derive(Default)]
struct Told {
    level: Level,
    helpless: bool,
    notes: Vec<String>,
}

/// Runs the controller until `stop`; then everything is set back.
pub fn run(options: &Options, stop: &AtomicBool) -> Result<()> {
    let places = Places::default();
    let mut dir = RunDir::claim(&options.run_dir, &places.files.boot())?;
    let events = events(options)?;
    let mut eyes = Eyes::new(options.config.clone(), places);
    let mut controller = Controller::default();
    let mut made: VecDeque<Made> = VecDeque::new();
    let mut told = Told::default();
    events.tell(Event::MemoryStarted {
        changed: dir.to_undo().len() as u64,
    });
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let seen = eyes.look(LOOK).map_err(|what| {
            Fault::new(
                format!("this host cannot be looked at: {what}"),
                "run it on the host itself, as root",
            )
        })?;
        let end = Instant::now() + STEPS_TIME;
        for (guest, e) in act::have_them_tell(&eyes, &mut dir, end) {
            tracing::warn!(guest, "cannot be asked for its statistics: {e}");
        }
        let decisions = controller.decide(&seen);
        say(&events, &mut told, &controller, &seen.notes);
        for decision in decisions {
            made.push_back(step(&mut eyes, &mut dir, &events, decision, end));
            let over = made.len().saturating_sub(STEPS);
            made.drain(..over);
        }
        let mut status = Status::new(now_ms(), std::process::id(), controller.level(), seen);
        status.helpless = controller.helpless().map(str::to_owned);
        status.steps = made.iter().cloned().collect();
        if let Err(e) = dir.tell(&status) {
            tracing::error!("the status cannot be written: {e}");
        }
        while began.elapsed() < EVERY && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(GLANCE);
        }
    }
    let left = set_back(&mut dir, Some(&eyes.guests), &mut |note, how| {
        events.tell(Event::MemorySetBack {
            what: note.target.text(),
            value: note.before.clone(),
            how: how.to_owned(),
        });
    });
    events.tell(Event::MemoryStopped {
        left: left.len() as u64,
    });
    if left.is_empty() {
        dir.be_silent();
        return Ok(());
    }
    Err(failed(&left))
}

fn failed(left: &[String]) -> Fault {
    Fault::new(
        format!("not everything could be set back: {}", left.join("; ")),
        "`hearth memory undo` tries again",
    )
}

fn events(options: &Options) -> Result<Events> {
    let Some(dir) = &options.events else {
        return Ok(Events::in_memory());
    };
    Events::kept(dir, None).map_err(|e| match e {
        OpenError::Taken => Fault::new(
            format!("another controller keeps its events in {}", dir.display()),
            "stop it first, or name another directory with --state-dir",
        ),
        OpenError::Io(e) => Fault::new(
            format!("cannot keep events in {}: {e}", dir.display()),
            "name a directory you may write with --state-dir",
        ),
    })
}

/// Tells what has changed of how it is.
fn say(events: &Events, told: &mut Told, controller: &Controller, notes: &[String]) {
    let level = controller.level();
    if level != told.level {
        events.tell(Event::MemoryLevel {
            level: level.word().to_owned(),
            before: told.level.word().to_owned(),
        });
        told.level = level;
    }
    match controller.helpless() {
        Some(why) if !told.helpless => events.tell(Event::MemoryHelpless {
            why: why.to_owned(),
        }),
        None if told.helpless => events.tell(Event::MemoryHelped {}),
        _ => {}
    }
    told.helpless = controller.helpless().is_some();
    for note in notes.iter().filter(|n| !told.notes.contains(n)) {
        tracing::warn!("{note}");
    }
    told.notes = notes.to_vec();
}

fn step(
    eyes: &mut Eyes,
    dir: &mut RunDir,
    events: &Events,
    decision: Decision,
    end: Instant,
) -> Made {
    let outcome = act::act(eyes, dir, &decision.step, &decision.why, end);
    let word = decision.step.word().to_owned();
    let guest = decision.step.guest().unwrap_or_default().to_owned();
    let bytes = decision.step.bytes();
    match &outcome {
        Ok(()) => events.tell(Event::MemoryStep {
            about: about(&decision),
            step: word,
            guest,
            bytes,
            why: decision.why.clone(),
        }),
        Err(e) => events.tell(Event::MemoryStepFailed {
            about: about(&decision),
            step: word,
            guest,
            bytes,
            why: e.to_string(),
        }),
    }
    Made {
        at: now_ms(),
        error: outcome.err().map(|e| e.to_string()),
        decision,
    }
}

/// A step, for people.
fn about(decision: &Decision) -> String {
    use hearth_memory::{Step, human};
    match &decision.step {
        Step::Compress => "pages are compressed before they are swapped out".to_owned(),
        Step::StopCompress => "pages are compressed no more".to_owned(),
        Step::Balloon { guest, from, to } => {
            format!(
                "guest {guest} has {} instead of {}",
                human(*to),
                human(*from)
            )
        }
        Step::PageOut { guest, bytes } => {
            format!("{} of guest {guest} are swapped out", human(*bytes))
        }
        Step::ReadBack { guest, bytes } => {
            format!("{} of guest {guest} are read back", human(*bytes))
        }
    }
}

/// Sets everything back, all at once; what could not be, in words. `tell` is called for each
/// change, with what became of it.
fn set_back(
    dir: &mut RunDir,
    guests: Option<&Guests>,
    tell: &mut dyn FnMut(&Note, &str),
) -> Vec<String> {
    let end = Instant::now() + BACK_TIME;
    let mut left = Vec::new();
    let begin = |note: Note| {
        let begun = act::undo(&note, guests);
        (note, begun)
    };
    let begun: Vec<_> = dir.to_undo().into_iter().map(begin).collect();
    for (note, answer) in begun {
        let outcome = match answer.and_then(|answer| answer.needed_by(end)) {
            Err(e) if act::is_gone(&e) => Ok(Undone::Left),
            outcome => outcome,
        };
        match outcome {
            Ok(undone) => {
                tell(
                    &note,
                    match undone {
                        Undone::Back => "set back",
                        Undone::Left => "left alone: it is gone, or somebody else has set it",
                    },
                );
                if let Err(e) = dir.forget(&note.target) {
                    left.push(format!("the notes cannot be written: {e}"));
                }
            }
            Err(e) => left.push(format!("{}: {e}", note.target.text())),
        }
    }
    left
}

/// Sets back what a controller has changed that is no more. What was done, one line each.
pub fn undo(run_dir: &std::path::Path) -> Result<Vec<(String, String, String)>> {
    let places = Places::default();
    let mut dir = RunDir::claim(run_dir, &places.files.boot())?;
    let mut done = Vec::new();
    let left = set_back(&mut dir, None, &mut |note, how| {
        done.push((note.target.text(), note.before.clone(), how.to_owned()));
    });
    if !left.is_empty() {
        return Err(failed(&left));
    }
    dir.be_silent();
    Ok(done)
}
