//! `hearth swap`: swap of this host on the flash. The daemon has no part in it: it is not in the way of a page.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_daemon::api::types::PoolInfo;
use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_daemon::size::human;
use hearth_fault::Fault;
use hearth_swap::areas::Shown;
use hearth_swap::kernel;
use hearth_swap::tuning::Setting;
use hearth_swap::{Areas, Request};
use serde::Serialize;

use crate::args::{self, Global, SwapOn, SwapState};
use crate::interrupt::Interrupt;
use crate::status::StatusLine;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

/// How often is looked how far it is.
const LOOK: Duration = Duration::from_millis(200);

pub fn run(global: &Global, command: args::Swap) -> Outcome {
    match command {
        args::Swap::On(args) => on(global, &args),
        args::Swap::Off(state) => off(global, &state),
        args::Swap::Show(state) => show(global, &open(&state)?),
        args::Swap::Resume(state) => resume(global, &state),
    }
}

fn wrong(fault: Fault) -> Failure {
    Failure::Error(Error::unavailable(fault.what, fault.remedy))
}

fn open(state: &SwapState) -> Result<Areas, Failure> {
    let dir = state
        .state_dir
        .clone()
        .unwrap_or_else(hearth_daemon::rundir::default_state_dir);
    Areas::open(&dir).map_err(wrong)
}

/// The flash file that was named, or the one that is served here.
fn flash(global: &Global, args: &SwapOn) -> Result<PathBuf, Failure> {
    if let Some(path) = &args.flash {
        return Ok(path.clone());
    }
    let info: PoolInfo = Client::new(&global.dir()).get("/v1/pool").map_err(|e| {
        Error::unavailable(
            format!("no --flash is given, and the daemon cannot be asked: {e}"),
            "name the pool's flash file with --flash",
        )
    })?;
    match &info.flash[..] {
        [one] => Ok(PathBuf::from(one)),
        _ => Err(Error::invalid(
            "the pool is not on one flash file",
            "name one of them with --flash",
        )
        .into()),
    }
}

fn on(global: &Global, args: &SwapOn) -> Outcome {
    let request = Request {
        flash: flash(global, args)?,
        size: args.size.0,
        priority: args.priority,
        discard: match args.discard {
            args::Discard::Off => kernel::Discard::Off,
            args::Discard::Once => kernel::Discard::Once,
            args::Discard::Pages => kernel::Discard::Pages,
        },
    };
    let mut areas = open(&args.state)?;
    let interrupt = Interrupt::watch();
    let mut line = StatusLine::new(!global.json).quiet_for(Duration::from_secs(1));
    let made = areas.on(&request, &mut |done, all| {
        line.show(|| format!("writing: {} of {}", human(done), human(all)));
        !interrupt.hit()
    });
    line.end();
    if made.map_err(wrong)?.is_none() {
        return Err(Failure::Interrupted(Fault::bare(
            "called off; nothing was left",
        )));
    }
    show(global, &areas)
}

fn off(global: &Global, state: &SwapState) -> Outcome {
    let mut areas = open(state)?;
    let before = areas.show().map_err(wrong)?;
    // The signal has to come to this thread, which waits in the kernel: the one that shows takes none.
    let _interrupt = Interrupt::watch();
    let done = AtomicBool::new(false);
    let gone = std::thread::scope(|scope| {
        if !global.json {
            scope.spawn(|| follow(&before, &done));
        }
        let gone = areas.off();
        done.store(true, Ordering::Release);
        gone
    });
    if !gone.map_err(wrong)? {
        return Err(Failure::Interrupted(Fault::bare(
            "called off; what was not read back yet is swapped out as before",
        )));
    }
    if global.json {
        return show(global, &areas);
    }
    println!("no swap of Hearth's is left, and what was set for it is as before");
    Ok(())
}

/// Shows how much is swapped out yet.
fn follow(areas: &[Shown], done: &AtomicBool) {
    block_signals();
    let mut line = StatusLine::new(true).quiet_for(Duration::from_secs(1));
    while !done.load(Ordering::Acquire) {
        let used = kernel::in_use().unwrap_or_default();
        let left = used
            .iter()
            .filter(|u| areas.iter().any(|a| a.noted.path == u.path));
        let left: u64 = left.map(|u| u.used).sum();
        line.show(|| format!("reading back: {} left", human(left)));
        std::thread::sleep(LOOK);
    }
}

fn block_signals() {
    // SAFETY: all zeros are a valid value; the set is filled by the call, and is ours.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

fn resume(global: &Global, state: &SwapState) -> Outcome {
    let mut areas = open(state)?;
    let told = areas.resume().map_err(wrong)?;
    let mut failed = None;
    for (path, outcome) in told {
        match outcome {
            Ok(()) if !global.json => println!("{}", path.display()),
            Ok(()) => {}
            Err(fault) => {
                eprintln!("hearth: {fault}");
                failed = Some(fault);
            }
        }
    }
    if let Some(fault) = failed {
        return Err(wrong(fault));
    }
    if global.json {
        return show(global, &areas);
    }
    Ok(())
}

#[derive(Serialize)]
struct All<'a> {
    areas: &'a [Shown],
    settings: &'a [Setting],
}

fn show(global: &Global, areas: &Areas) -> Outcome {
    let (shown, settings) = (areas.show().map_err(wrong)?, areas.settings());
    if global.json {
        return print_json(&All {
            areas: &shown,
            settings,
        });
    }
    if shown.is_empty() {
        println!("no swap; `hearth swap on --size 8G` makes some");
    } else {
        let mut table = Table::new(&["AREA", ">SIZE", ">SWAPPED OUT", ">PRIORITY", "STATE"]);
        for area in &shown {
            table.row([
                plain(&area.noted.path.display().to_string()),
                human(area.noted.size),
                human(area.used),
                area.noted.priority.to_string(),
                if area.on { "on" } else { "off" }.to_owned(),
            ]);
        }
        print!("{}", table.render());
    }
    for Setting {
        path,
        before,
        now,
        why,
    } in settings
    {
        println!("set: {} {now} (was {before}): {why}", path.display());
    }
    Ok(())
}
