//! `hearth memory`: the controller that takes memory back in the right order, and what it sees.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hearth_daemon::api::events::EventInfo;
use hearth_daemon::error::Error;
use hearth_daemon::size::human;
use hearth_events::time::now_ms;
use hearth_fault::Fault;
use hearth_memory::plan::{Plan, gaps, plan};
use hearth_memory::{Guest, GuestConfig, Level, MemoryConfig, Seen, Status};
use hearth_memory_host::{Eyes, Options, Places};
use serde::{Deserialize, Serialize};

use crate::args::{self, Global, MemoryEvents, MemoryHost, MemoryRun};
use crate::serve::log_to_stderr;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json, section};

/// Between the two looks of a command that asks once: rates need two.
const APART: Duration = Duration::from_millis(700);

pub fn run(global: &Global, command: args::Memory) -> Outcome {
    match command {
        args::Memory::Status(host) => status(global, &host),
        args::Memory::Plan(host) => show_plan(global, &host),
        args::Memory::Run(args) => control(global, &args),
        args::Memory::Undo => undo(global),
        args::Memory::Events(args) => events(global, &args),
    }
}

fn wrong(fault: Fault) -> Failure {
    Failure::Error(Error::unavailable(fault.what, fault.remedy))
}

/// What the file says that is our business.
#[derive(Debug, Default, Deserialize)]
struct File {
    #[serde(default)]
    memory: MemoryConfig,
}

/// The section `[memory]`. A file that was named must be there.
pub fn config(given: Option<&Path>) -> Result<MemoryConfig, Error> {
    section::read(given, "see docs/memory.md", |file: &File| {
        file.memory.check()
    })
    .map(|f| f.memory)
}

/// What the file says, and what was typed.
fn settings(host: &MemoryHost) -> Result<MemoryConfig, Error> {
    let mut config = config(host.config.as_deref())?;
    for (name, socket) in &host.guest {
        let qmp = Some(std::path::absolute(socket).unwrap_or_else(|_| socket.clone()));
        match config.guest.iter_mut().find(|g| g.name == *name) {
            Some(guest) => guest.qmp = qmp,
            None => config.guest.push(GuestConfig {
                name: name.clone(),
                qmp,
                ..GuestConfig::default()
            }),
        }
    }
    if host.cgroup.is_some() {
        config.cgroup.clone_from(&host.cgroup);
    }
    Ok(config)
}

fn run_dir(global: &Global) -> PathBuf {
    hearth_memory_host::run_dir(&global.dir())
}

fn state_dir(given: Option<&PathBuf>) -> PathBuf {
    given.cloned().unwrap_or_else(|| {
        let daemons = hearth_daemon::rundir::default_state_dir();
        hearth_memory_host::run_dir(&daemons)
    })
}

/// What a controller that lives sees, or what this process does.
fn look(global: &Global, config: &MemoryConfig) -> Result<(Option<Status>, Seen), Failure> {
    let told = hearth_memory_host::status(&run_dir(global)).map_err(wrong)?;
    if let Some(status) = told.clone().filter(|s| !s.is_silent(now_ms())) {
        let seen = status.seen.clone();
        return Ok((Some(status), seen));
    }
    let mut eyes = Eyes::new(config.clone(), Places::default());
    let seen = eyes.look_twice(APART).map_err(|what| {
        Error::unavailable(
            format!("this host cannot be looked at: {what}"),
            "run it on the host itself, as root",
        )
    })?;
    Ok((told, seen))
}

/// How it is, for programs.
#[derive(Serialize)]
struct Shown<'a> {
    /// `running`, `silent` or `off`.
    controller: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<Level>,
    #[serde(skip_serializing_if = "Option::is_none")]
    helpless: Option<&'a str>,
    seen: &'a Seen,
    /// What is not possible with which guest.
    gaps: Vec<String>,
    steps: &'a [hearth_memory::status::Made],
}

fn status(global: &Global, host: &MemoryHost) -> Outcome {
    let config = settings(host)?;
    let (told, seen) = look(global, &config)?;
    let running = told.as_ref().filter(|s| !s.is_silent(now_ms()));
    let shown = Shown {
        controller: match (&told, &running) {
            (_, Some(_)) => "running",
            (Some(_), None) => "silent",
            (None, None) => "off",
        },
        level: running.map(|s| s.level),
        helpless: running.and_then(|s| s.helpless.as_deref()),
        seen: &seen,
        gaps: gaps(&seen),
        steps: running.map_or(&[], |s| &s.steps),
    };
    if global.json {
        return print_json(&shown);
    }
    println!("{}", sentence(&shown, told.as_ref()));
    println!("{}", means(&seen));
    if !seen.guests.is_empty() {
        print!("{}", table(&seen));
    }
    for line in shown.gaps.iter().chain(&seen.notes) {
        println!("{}", plain(line));
    }
    if let Some(last) = shown.steps.last() {
        println!(
            "last step, {}: {}",
            hearth_events::time::utc(last.at),
            plain(&last.decision.why)
        );
    }
    Ok(())
}

fn sentence(shown: &Shown<'_>, told: Option<&Status>) -> String {
    let memory = format!(
        "{} of {} are available, {} of {} of swap are free",
        human(shown.seen.available),
        human(shown.seen.total),
        human(shown.seen.swap_free),
        human(shown.seen.swap_total)
    );
    match (shown.controller, shown.level, told) {
        ("running", Some(level), _) => format!(
            "the controller runs; memory is {}: {memory}{}",
            level.word(),
            shown.helpless.map_or(String::new(), |why| format!(
                "\nnothing helps any more: {}",
                plain(why)
            ))
        ),
        ("silent", _, Some(told)) => format!(
            "the controller has not been heard of since {} and may have left things changed; `hearth memory undo` sets them back\n{memory}",
            hearth_events::time::utc(told.at)
        ),
        _ => format!("no controller runs; {memory}"),
    }
}

fn means(seen: &Seen) -> String {
    let pressure = seen
        .pressure
        .map_or("not told by this kernel".to_owned(), |p| {
            format!(
                "{:.0} % of the time something waits, {:.0} % everything",
                p.some, p.full
            )
        });
    let zswap = seen
        .zswap
        .as_ref()
        .map_or("not in this kernel".to_owned(), |z| {
            if !z.on {
                return "off".to_owned();
            }
            let held = match (z.stored, z.pool) {
                (Some(stored), Some(pool)) => format!(", {} in {}", human(stored), human(pool)),
                _ => String::new(),
            };
            format!("on ({}, up to {} %){held}", z.compressor, z.pool_percent)
        });
    format!("pressure: {pressure}\ncompression: {zswap}")
}

fn table(seen: &Seen) -> String {
    let mut table = Table::new(&[
        "GUEST",
        ">ASSIGNED",
        ">RESIDENT",
        ">ACTIVE",
        ">HAS",
        ">MINIMUM",
        ">SWAPPED",
        ">COMPRESSED",
        ">STALLED",
    ]);
    let some = |bytes: Option<u64>| bytes.map_or("-".to_owned(), human);
    for guest in &seen.guests {
        let Guest {
            name,
            assigned,
            resident,
            active,
            balloon,
            minimum,
            swapped,
            compressed,
            stalled_ms,
            ..
        } = guest;
        table.row([
            plain(name),
            human(*assigned),
            human(*resident),
            human(*active),
            some(*balloon),
            human(*minimum),
            human(*swapped),
            some(*compressed),
            stalled_ms.map_or("-".to_owned(), |ms| format!("{:.1} s", ms as f64 / 1000.0)),
        ]);
    }
    table.render()
}

fn show_plan(global: &Global, host: &MemoryHost) -> Outcome {
    let (_, seen) = look(global, &settings(host)?)?;
    let plan = plan(&seen);
    if global.json {
        return print_json(&plan);
    }
    print!("{}", plan_text(&plan));
    for note in &seen.notes {
        println!("{}", plain(note));
    }
    Ok(())
}

fn plan_text(plan: &Plan) -> String {
    let mut table = Table::new(&["", ">BYTES"]);
    for (what, bytes) in [
        ("memory of this host", plan.total),
        ("of that for guests", plan.for_guests),
        ("assigned to guests", plan.assigned),
        ("used by them", plan.used),
        ("in use all the time", plan.active),
        ("kept by them whatever happens", plan.minimum),
        ("balloons could take now", plan.balloons),
        ("more by compression", plan.compressed),
        ("free swap", plan.swap_free),
    ] {
        table.row([what.to_owned(), human(bytes)]);
    }
    let mut text = table.render();
    if plan.assigned > 0 {
        text += &format!(
            "over-committed {:.1} times now; guests like these go up to {:.1} times without swapping, and {:.1} times before they stall\n",
            plan.now, plan.without_swap, plan.at_most
        );
    }
    for line in &plan.advice {
        text += &format!("{}\n", plain(line));
    }
    text
}

fn control(global: &Global, args: &MemoryRun) -> Outcome {
    log_to_stderr(args.log.as_deref(), args.log_format)?;
    let config = settings(&args.host)?;
    hearth_daemon::signals::survive()?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|e| Error::internal(format!("cannot watch signals: {e}")))?;
    }
    let options = Options {
        run_dir: run_dir(global),
        events: Some(state_dir(args.state_dir.as_ref()).join("events")),
        config,
    };
    hearth_memory_host::run(&options, &stop).map_err(wrong)
}

/// A change that was set back, for programs.
#[derive(Serialize)]
struct Undone {
    what: String,
    before: String,
    how: String,
}

fn undo(global: &Global) -> Outcome {
    let done = hearth_memory_host::undo(&run_dir(global)).map_err(wrong)?;
    let done: Vec<Undone> = done
        .into_iter()
        .map(|(what, before, how)| Undone { what, before, how })
        .collect();
    if global.json {
        return print_json(&done);
    }
    if done.is_empty() {
        println!("nothing was changed");
    }
    for one in &done {
        println!("{}: {} ({})", plain(&one.what), one.how, plain(&one.before));
    }
    Ok(())
}

fn events(global: &Global, args: &MemoryEvents) -> Outcome {
    let dir = state_dir(args.state_dir.as_ref()).join("events");
    let since = args.since.map_or(0, |s| {
        let ago = Duration::from_secs_f64(s).as_millis();
        now_ms().saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX))
    });
    let mut found = std::collections::VecDeque::new();
    let read = hearth_events::file::scan(&dir, 0, &mut |record| {
        if record.at >= since {
            if found.len() >= args.limit as usize {
                found.pop_front();
            }
            found.push_back(record);
        }
        true
    });
    match read {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::unavailable(
                format!("no controller has kept events in {}", dir.display()),
                "start one (systemctl start hearth-memory), or name its --state-dir",
            )
            .into());
        }
        read => read.map_err(|e| {
            Error::unavailable(
                format!("cannot read events in {}: {e}", dir.display()),
                "run it as root",
            )
        })?,
    }
    let found: Vec<EventInfo> = found.into_iter().map(EventInfo::from).collect();
    crate::events::show(global, &found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_is_read_and_judged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hearth.toml");
        let put = |text: &str| std::fs::write(&path, text).unwrap();
        put(
            "[serve]\n[[memory.guest]]\nname = \"a\"\nmin_mib = 7\n[[memory.guest]]\nname = \"b\"\nexempt = true\n",
        );
        let read = config(Some(&path)).unwrap();
        assert!(!read.is_exempt("a") && read.is_exempt("b"));
        assert_eq!(read.guest[0].min_mib, Some(7));
        for (text, word) in [
            ("[memory]\nlibvirtd = true\n", "libvirt"),
            ("[[memory.guest]]\nname = \"a\"\nshare = 0\n", "share"),
        ] {
            put(text);
            let error = config(Some(&path)).unwrap_err();
            assert!(error.what.contains(word), "{error}");
        }
        assert!(config(Some(&dir.path().join("none"))).is_err());
    }

    #[test]
    fn a_plan_in_words() {
        let text = plan_text(&plan(&Seen::default()));
        assert!(
            text.contains("--guest") && !text.contains("times"),
            "{text}"
        );
        let seen = Seen {
            total: 8 << 30,
            available: 4 << 30,
            guests: vec![Guest {
                name: "a\u{1b}".into(),
                assigned: 4 << 30,
                resident: 1 << 30,
                ..Guest::default()
            }],
            ..Seen::default()
        };
        let text = plan_text(&plan(&seen));
        assert!(
            text.contains("times before they stall") && !text.contains('\u{1b}'),
            "{text}"
        );
    }
}
