//! `hearth bench`: the before and after tables that people with a rack at home publish, for disks
//! of their own.
//!
//! Three tables, each a module: [`random`] (4 KiB reads and writes on a slow disk, on a cache in
//! each of its states and on flash), [`fileio`] (a mixed load with a flush now and then, as
//! sysbench's fileio does it) and [`storm`] (five guests started at once). Every cell is measured
//! in each round, cells of one column right after one another, so that what the machine does
//! beside meets all of them; ratios are taken within a round. Along with every cell goes what it
//! cost: the daemon's CPU and the bytes written to flash, per request.
//!
//! Only new files are written, in directories made for the run and removed after it: nothing a
//! user has is touched, and a run that would fill a disk does not begin. A run that is called off
//! ends within a second or two and keeps the cells it has; one that is killed keeps what it had
//! when a column (of the storm, a round) was last complete.

pub mod compare;
pub mod fileio;
pub mod html;
mod lab;
pub mod markdown;
mod model;
pub mod random;
pub mod report;
mod room;
pub mod storm;
pub mod summary;

use crate::host;
use anyhow::{Context, Result};
use hearth_fault::Fault;
use hearth_rig::clients;
use report::Report;
use std::path::{Path, PathBuf};

/// Share of the processors that others may keep busy before a run is worth little.
const BUSY: f64 = 0.25;

/// A cache mode, as the command line spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Writes complete on flash.
    WriteBack,
    /// Writes complete on the slow disk; flash is renewed.
    WriteThrough,
    /// Writes go to the slow disk only.
    WriteAround,
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 3] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround];

    /// As it is typed.
    pub fn word(self) -> &'static str {
        match self {
            Mode::WriteBack => "write-back",
            Mode::WriteThrough => "write-through",
            Mode::WriteAround => "write-around",
        }
    }
}

/// What the load goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// A unix socket; fio's NBD engine.
    Nbd,
    /// Shared memory; libblkio.
    VhostUser,
}

impl Over {
    /// Both.
    pub const ALL: [Over; 2] = [Over::Nbd, Over::VhostUser];

    /// As it is typed.
    pub fn word(self) -> &'static str {
        match self {
            Over::Nbd => "nbd",
            Over::VhostUser => "vhost-user",
        }
    }
}

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Random reads and writes.
    Random,
    /// The mixed load with flushes.
    Fileio,
    /// The boot storm.
    Storm,
}

impl Part {
    /// All of them, in the order of the report.
    pub const ALL: [Part; 3] = [Part::Random, Part::Fileio, Part::Storm];
}

/// The slow disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slow {
    /// A model of a hard disk over files beside the flash.
    Model,
    /// A directory on a real one.
    Directory(PathBuf),
}

/// What to measure, where and how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `hearth` program that serves.
    pub hearth: PathBuf,
    /// The slow disk.
    pub slow: Slow,
    /// A directory on the flash.
    pub flash: PathBuf,
    /// Where the result files go.
    pub out: PathBuf,
    /// Which tables.
    pub parts: Vec<Part>,
    /// Which ways to the disk.
    pub over: Vec<Over>,
    /// Which cache modes.
    pub modes: Vec<Mode>,
    /// Requests in flight.
    pub depths: Vec<u32>,
    /// Rounds.
    pub rounds: u32,
    /// Seconds of every cell in a round.
    pub seconds: u64,
    /// Bytes of every disk.
    pub size: u64,
    /// Directory with a guest's `kernel`, `initrd` and `root.img`, for the boot storm.
    pub guest: Option<PathBuf>,
    /// How often the storm's three rounds are measured.
    pub storms: u32,
    /// Compare with the goals of the project, and keep the verdicts.
    pub goals: bool,
}

/// Why a benchmark did not begin, or gave nothing.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum BenchError {
    /// A program that is not there.
    Missing {
        /// The program.
        program: &'static str,
        /// Debian's name of its package.
        package: &'static str,
        /// How to do without.
        without: &'static str,
    },
    /// A place that is none.
    NotADirectory(PathBuf),
    /// The disk would be full.
    NoRoom {
        /// A directory on that disk.
        place: PathBuf,
        /// MiB that would be written.
        need: u64,
        /// MiB that are free.
        free: u64,
        /// MiB that must stay free.
        headroom: u64,
    },
    /// Nothing to boot.
    NoGuest,
    /// The user called it off.
    CalledOff,
}

impl BenchError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            BenchError::Missing {
                program,
                package,
                without,
            } => Fault::new(
                format!("{program} is not installed"),
                format!("install the package {package}, or leave out what needs it with {without}"),
            ),
            BenchError::NotADirectory(path) => Fault::new(
                format!("{path} is not a directory", path = path.display()),
                "give a directory on the disk to measure (make a file system on a bare device first)",
            ),
            BenchError::NoRoom {
                place,
                need,
                free,
                headroom,
            } => Fault::new(
                format!(
                    "{} has {free} MiB free, and the benchmark writes {need} MiB there and leaves {headroom} MiB to others",
                    place.display()
                ),
                "make room, give another directory, or disks of less with --size",
            ),
            BenchError::NoGuest => Fault::new(
                "the boot storm needs a guest",
                "give its directory with --guest (scripts/guest-lab.sh image makes one and prints where it is)",
            ),
            BenchError::CalledOff => Fault::bare("called off"),
        }
    }
}

/// Who looks on: shows how far it is, and says when to stop.
pub trait Watcher {
    /// `done` of `total` seconds of measuring are over; `what` comes next.
    fn step(&mut self, done: f64, total: f64, what: &str);
    /// True once the user has called it off.
    fn stopped(&self) -> bool;
}

/// A run under way.
struct Run<'a> {
    options: &'a Options,
    watcher: &'a mut dyn Watcher,
    report: Report,
    done: f64,
    total: f64,
}

impl Run<'_> {
    /// Fails if the user called it off.
    fn go_on(&self) -> Result<()> {
        if self.watcher.stopped() {
            return Err(BenchError::CalledOff.into());
        }
        Ok(())
    }

    /// Announces a cell of so many seconds.
    fn step(&mut self, seconds: f64, what: &str) -> Result<()> {
        self.go_on()?;
        self.watcher.step(self.done, self.total, what);
        self.done += seconds;
        Ok(())
    }

    /// Writes the result files as far as they go.
    fn keep(&mut self) -> Result<()> {
        self.report.unfinished = true;
        self.report.summary = summary::lines(&self.report, self.options);
        self.report.save(&self.options.out)
    }
}

/// Measures. The report holds what was measured, also if it was called off or a table failed;
/// its files are in the directory asked for.
pub fn run(options: &Options, watcher: &mut dyn Watcher) -> Result<Report> {
    check(options)?;
    let total = options
        .parts
        .iter()
        .map(|part| match part {
            Part::Random => random::seconds(options),
            Part::Fileio => fileio::seconds(options),
            Part::Storm => storm::seconds(options),
        })
        .sum();
    let mut run = Run {
        options,
        watcher,
        report: Report {
            cautions: cautions(options, host::load()),
            ..Report::new(facts(options))
        },
        done: 0.0,
        total,
    };
    for (number, part) in options.parts.iter().enumerate() {
        let outcome = match part {
            Part::Random => random::run(&mut run),
            Part::Fileio => fileio::run(&mut run),
            Part::Storm => storm::run(&mut run),
        };
        // Errors of servers that a Ctrl-C ended are no failures.
        if run.watcher.stopped() {
            run.report.called_off = true;
        } else if let Err(e) = outcome {
            run.report.failures.push(format!("{e:#}"));
        }
        run.report.summary = summary::lines(&run.report, options);
        run.report.unfinished = !run.report.called_off && number + 1 < options.parts.len();
        run.report.save(&options.out)?;
        if run.report.called_off {
            break;
        }
    }
    Ok(run.report)
}

/// Are the tools and places there?
fn check(options: &Options) -> Result<()> {
    let fio = options.over.contains(&Over::Nbd);
    if fio && clients::find("fio").is_none() {
        return Err(BenchError::Missing {
            program: "fio",
            package: "fio",
            without: "--over vhost-user",
        }
        .into());
    }
    if options.parts.contains(&Part::Storm) {
        if options.guest.is_none() {
            return Err(BenchError::NoGuest.into());
        }
        if clients::find("qemu-system-x86_64").is_none() {
            return Err(BenchError::Missing {
                program: "qemu-system-x86_64",
                package: "qemu-system-x86",
                without: "--table random,fileio",
            }
            .into());
        }
    }
    let mut places = vec![&options.flash];
    if let Slow::Directory(dir) = &options.slow {
        places.push(dir);
    }
    for place in places {
        if !place.is_dir() {
            return Err(BenchError::NotADirectory(place.clone()).into());
        }
    }
    for part in &options.parts {
        // What one table wrote is gone before the next begins.
        match part {
            Part::Random | Part::Fileio => room::check(&lab::needs(options))?,
            Part::Storm => storm::check_room(options)?,
        }
    }
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot make the directory {}", options.out.display()))?;
    report::set_aside(&options.out)
}

/// What a reader should hear before the numbers; `load` is how many threads others kept busy in
/// the minute before.
fn cautions(options: &Options, load: Option<f64>) -> Vec<String> {
    let mut cautions = Vec::new();
    if let Some(load) = load.filter(|l| *l > BUSY * host::threads() as f64) {
        cautions.push(format!(
            "The machine was busy when the run began (load average {load}): what others took is missing here, \
             from the flash and the boot storm most."
        ));
    }
    if options.rounds == 1 {
        cautions.push(
            "One round: the numbers have no spread, and a single cell may be off by much. Take more with --rounds."
                .to_owned(),
        );
    }
    cautions
}

/// What the head of a report says.
fn facts(options: &Options) -> Vec<report::Fact> {
    let mut rows = host::machine(&options.hearth);
    if let Some(load) = host::load() {
        let threads = host::threads();
        rows.push(("load before", format!("{load} of {threads} threads busy")));
    }
    rows.push(("flash", host::disk(&options.flash)));
    rows.push((
        "slow disk",
        match &options.slow {
            Slow::Model => model::describe(options.size),
            Slow::Directory(dir) => host::disk(dir),
        },
    ));
    let modes: Vec<_> = options.modes.iter().map(|m| m.word()).collect();
    rows.push((
        "run",
        format!(
            "rounds: {}, {} s a cell, disks of {} MiB, {}, address seeds 1 to {}",
            options.rounds,
            options.seconds,
            options.size >> 20,
            modes.join(", "),
            options.rounds
        ),
    ));
    rows.into_iter()
        .map(|(name, value)| report::Fact {
            name: name.to_owned(),
            value,
        })
        .collect()
}

/// A directory of this run's own below `parent`, removed when dropped.
fn scratch(parent: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("hearth-bench.")
        .tempdir_in(parent)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_and_a_single_round_are_no_secret() {
        let mut options = Options {
            hearth: PathBuf::new(),
            slow: Slow::Model,
            flash: PathBuf::new(),
            out: PathBuf::new(),
            parts: Vec::new(),
            over: Vec::new(),
            modes: Vec::new(),
            depths: Vec::new(),
            rounds: 3,
            seconds: 1,
            size: 1 << 20,
            guest: None,
            storms: 1,
            goals: false,
        };
        let busy = host::threads() as f64;
        assert!(cautions(&options, Some(0.0)).is_empty());
        assert!(cautions(&options, None).is_empty());
        assert!(cautions(&options, Some(busy))[0].contains("busy"));
        options.rounds = 1;
        assert!(cautions(&options, None)[0].contains("One round"));
    }
}
