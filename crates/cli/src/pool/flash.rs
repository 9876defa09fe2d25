//! `hearth pool add-flash`, `replace-flash`, `remove-flash`: here, or by the daemon that serves the pool.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_daemon::api::flash::{FlashAction, FlashChange, FlashProgress, FlashState};
use hearth_daemon::api::types::{Done, PoolInfo};
use hearth_daemon::api::upgrade::UpgradeState;
use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_daemon::pool::{self, Change, CreateOptions, DeviceAt};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;

use super::{named, written};
use crate::args::{FlashAdd, FlashNew, FlashRemove, FlashReplace, FlashWhere, Global};
use crate::interrupt::Interrupt;
use crate::status::StatusLine;
use crate::table::plain;
use crate::{Failure, Outcome, print_json};

/// How often a change is looked at.
const POLL: Duration = Duration::from_millis(100);
/// Longest wait for one answer: while the daemon begins anew there is none.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest time in which it answers again and has not said how it began.
const ANEW: Duration = Duration::from_secs(60);
/// Longest wait for the daemon to be back.
const BACK: Duration = Duration::from_secs(600);

pub fn add(global: &Global, args: &FlashAdd) -> Outcome {
    let change = Change::Add {
        new: coming(&args.new, &args.device)?,
    };
    carry_out(global, &change, Some(&args.device), &args.at)
}

pub fn replace(global: &Global, args: &FlashReplace) -> Outcome {
    let change = Change::Replace {
        old: absolute(&args.old)?,
        new: coming(&args.new, &args.device)?,
    };
    carry_out(global, &change, Some(&args.device), &args.at)
}

pub fn remove(global: &Global, args: &FlashRemove) -> Outcome {
    if args.cancel {
        let done: Done = Client::new(&global.dir()).post("/v1/pool/flash/cancel", &())?;
        if global.json {
            return print_json(&done);
        }
        println!("called off: the pool keeps its devices");
        return Ok(());
    }
    let old = args.old.clone().unwrap_or_default();
    let change = Change::Remove {
        old: absolute(&old)?,
    };
    carry_out(global, &change, None, &args.at)
}

fn absolute(path: &Path) -> Result<std::path::PathBuf, Error> {
    std::path::absolute(path).map_err(|e| {
        Error::invalid(
            format!("{} is no path: {e}", path.display()),
            "name the device",
        )
    })
}

fn coming(path: &Path, device: &FlashNew) -> Result<DeviceAt, Error> {
    Ok(DeviceAt {
        path: absolute(path)?,
        size: device.size.map(|s| s.0),
    })
}

fn carry_out(
    global: &Global,
    change: &Change,
    device: Option<&FlashNew>,
    at: &FlashWhere,
) -> Outcome {
    if at.flash.is_empty() {
        return served(global, change, device, at);
    }
    let options = CreateOptions {
        size: device.and_then(|d| d.size).map(|s| s.0),
        quick: device.is_some_and(|d| d.quick),
        force: device.is_some_and(|d| d.force),
        twice: false,
        label: String::new(),
    };
    let mut notices = Vec::new();
    if let Some(new) = change.new_device() {
        notices = hearth_daemon::place::check(&new.path, &options)?;
    }
    let state_dir = at.state_dir.clone();
    let state_dir = state_dir.unwrap_or_else(hearth_daemon::rundir::default_state_dir);
    let (mut info, mut told) = written(global, |progress| {
        pool::change(&at.flash, change, &options, &state_dir, progress)
    })?;
    notices.append(&mut told);
    info.notices = notices;
    changed(global, change, &info, None)
}

/// Tells what the pool is now.
fn changed(global: &Global, change: &Change, info: &PoolInfo, pause_ms: Option<u64>) -> Outcome {
    if global.json {
        return print_json(info);
    }
    for notice in &info.notices {
        eprintln!("note: {}", plain(notice));
    }
    match change {
        Change::Add { new } => println!("{} is part of the pool now", new.path.display()),
        Change::Replace { old, new } => println!(
            "{} has taken the place of {}, which is no part of the pool any more",
            new.path.display(),
            old.display()
        ),
        Change::Remove { old } => {
            println!("{} is no part of the pool any more", old.display());
        }
    }
    if let Some(ms) = pause_ms {
        println!("clients waited for {ms} ms");
    }
    println!(
        "{} for data, in {} segments of {}",
        human(info.log_bytes),
        info.segments,
        human(info.segment_bytes)
    );
    println!(
        "wherever the devices of the pool are named (the settings, a unit of a supervisor), name these:{}",
        named(&info.flash)
    );
    Ok(())
}

fn served(global: &Global, change: &Change, device: Option<&FlashNew>, at: &FlashWhere) -> Outcome {
    let shown = |path: &Path| path.display().to_string();
    let request = FlashChange {
        action: match change {
            Change::Add { .. } => FlashAction::Add,
            Change::Replace { .. } => FlashAction::Replace,
            Change::Remove { .. } => FlashAction::Remove,
        },
        old: change.old().map(shown),
        new: change.new_device().map(|new| shown(&new.path)),
        size: device.and_then(|d| d.size).map(|s| s.0),
        quick: device.is_some_and(|d| d.quick),
        force: device.is_some_and(|d| d.force),
        yes: at.yes,
    };
    let client = Client::new(&global.dir());
    let begun: FlashState = client.post("/v1/pool/flash", &request)?;
    let client = client.patient_for(PATIENCE);
    let interrupt = Interrupt::watch();
    let mut line = StatusLine::new(!global.json);
    let outcome = follow(&client, begun.generation, &interrupt, &mut line);
    line.end();
    outcome?;
    let state: UpgradeState = client.get("/v1/upgrade")?;
    let last = state.last.filter(|_| state.generation > begun.generation);
    if let Some(why) = last.as_ref().and_then(|last| last.failure.clone()) {
        return Err(Error::unavailable(
            why,
            "the pool is served as before; put that right and try again",
        )
        .into());
    }
    let info: PoolInfo = client.get("/v1/pool")?;
    changed(global, change, &info, last.map(|last| last.pause_ms))
}

/// Waits until the daemon has begun anew with other devices, or says why it does not.
fn follow(
    client: &Client,
    before: u64,
    interrupt: &Interrupt,
    line: &mut StatusLine,
) -> Result<(), Failure> {
    let mut heard = Instant::now();
    let (mut asked, mut called_off) = (false, false);
    loop {
        match client.get::<FlashState>("/v1/pool/flash") {
            Ok(state) if state.generation > before => return Ok(()),
            // It answers a moment before it says how it began.
            Ok(FlashState { change: None, .. }) if heard.elapsed() < ANEW => {}
            Ok(FlashState { change: None, .. }) => {
                // It began anew after a crash, or another command was quicker.
                return Err(Error::unavailable(
                    "the daemon was restarted meanwhile",
                    "see with `hearth pool show` which devices the pool has, and try again",
                )
                .into());
            }
            Ok(FlashState {
                change: Some(p), ..
            }) => {
                heard = Instant::now();
                if let Some(error) = p.error {
                    let error = Error::unavailable(error.error, error.remedy);
                    return Err(match called_off {
                        true => Failure::Interrupted(error.into()),
                        false => error.into(),
                    });
                }
                line.show(|| sentence(&p));
            }
            // The socket listens all the time; who was answered by nobody asks again.
            Err(e) if !client.is_up() || heard.elapsed() > BACK => {
                return Err(Error::unavailable(
                    format!("the daemon has ended: {}", e.what),
                    "see its log; the pool is whole, with the devices it had or with those it was to have, and the next start finds it",
                )
                .into());
            }
            Err(_) => {}
        }
        if asked {
            // The next Ctrl-C ends the command.
            std::thread::sleep(POLL);
        } else if interrupt.sleep(POLL) {
            asked = true;
            let off = client.post::<_, Done>("/v1/pool/flash/cancel", &());
            called_off = off.is_ok();
        }
    }
}

fn sentence(p: &FlashProgress) -> String {
    let left = p
        .eta_seconds
        .map_or(String::new(), |s| format!(", {} left", human_seconds(s)));
    match p.stage.as_str() {
        "switching" => "the daemon begins anew with the next devices".to_owned(),
        stage if p.total > 0 => {
            format!("{stage}: {} of {}{left}", human(p.done), human(p.total))
        }
        stage => stage.to_owned(),
    }
}
