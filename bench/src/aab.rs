//! Two builds against each other: is the new one worse anywhere?
//!
//! A machine's own noise is measured first: the old build against itself (A/A), then the old and the new in turn
//! (A/B), each as many rounds. All of a row's runs are on the same flash file and the same origin, served by the
//! one build and the other in turn, because two files on one disk may differ in speed by half. Which goes first
//! changes with every round.
//!
//! A row is worse, or better, when the median of its A/B ratios lies outside all of its A/A ratios. Where those
//! are further apart than [`NOISY`], requests per second say nothing, and CPU time per request decides.

use crate::args::Args;
use crate::fixture;
use crate::load::{Job, Sample, run};
use crate::peers::{At, Contender};
use crate::report::Spread;
use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Fewest rounds from which anything is concluded.
const ROUNDS_MIN: usize = 11;
/// Ratios of a build against itself that are this far apart are noise.
const NOISY: f64 = 0.03;
/// Bytes cached where starts are timed.
const START_BYTES: u64 = 1 << 30;
/// How long a first answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
const DISK: &str = "disk";

/// What a row does.
#[derive(Clone, Copy)]
enum Kind {
    /// Reads of what is cached.
    Warm,
    /// Reads of what is not: the disk is added anew before each run.
    Cold,
    /// Writes; what is dirty is destaged after each run.
    Write,
    /// The time to the first answer, after SIGTERM or kill -9.
    Start { kill: bool },
}

struct Row {
    id: &'static str,
    mode: &'static str,
    kind: Kind,
    vhost: bool,
    /// Of requests, their size and the disk's.
    job: fn(u64, u64) -> Job,
}

const fn row(id: &'static str, kind: Kind, job: fn(u64, u64) -> Job) -> Row {
    Row {
        id,
        mode: "write-back",
        kind,
        vhost: false,
        job,
    }
}

fn flushed(depth: u32, seconds: u64, size: u64) -> Job {
    Job {
        flush_every: 32,
        ..Job::random("randwrite", depth, seconds, size)
    }
}

/// The rows of docs/benchmarks.md that are about Hearth's own work, under their names there.
const ROWS: &[Row] = &[
    row("read-qd24", Kind::Warm, |s, n| {
        Job::random("randread", 24, s, n)
    }),
    row("read-qd1", Kind::Warm, |s, n| {
        Job::random("randread", 1, s, n)
    }),
    row("scale", Kind::Warm, |s, n| Job {
        connections: 4,
        ..Job::random("randread", 16, s, n)
    }),
    row("seq-read", Kind::Warm, |s, n| {
        Job::sequential("read", 16, s, n)
    }),
    row("seq-write", Kind::Write, |s, n| {
        Job::sequential("write", 16, s, n)
    }),
    row("write-qd24", Kind::Write, |s, n| {
        Job::random("randwrite", 24, s, n)
    }),
    row("flush-qd1", Kind::Write, |s, n| flushed(1, s, n)),
    row("flush-qd24", Kind::Write, |s, n| flushed(24, s, n)),
    Row {
        mode: "write-through",
        ..row("wt-qd1", Kind::Write, |s, n| {
            Job::random("randwrite", 1, s, n)
        })
    },
    Row {
        mode: "write-through",
        ..row("wt-qd24", Kind::Write, |s, n| {
            Job::random("randwrite", 24, s, n)
        })
    },
    Row {
        vhost: true,
        ..row("vhost-read-qd24", Kind::Warm, |s, n| {
            Job::random("randread", 24, s, n)
        })
    },
    Row {
        vhost: true,
        ..row("vhost-read-qd1", Kind::Warm, |s, n| {
            Job::random("randread", 1, s, n)
        })
    },
    Row {
        vhost: true,
        ..row("vhost-write-qd24", Kind::Write, |s, n| {
            Job::random("randwrite", 24, s, n)
        })
    },
    row("cold-qd1", Kind::Cold, |s, n| Job {
        once: true,
        ..Job::random("randread", 1, s, n)
    }),
    row("cold-qd24", Kind::Cold, |s, n| Job {
        once: true,
        ..Job::random("randread", 24, s, n)
    }),
    row("start-killed", Kind::Start { kill: true }, |s, n| {
        Job::random("randread", 1, s, n)
    }),
    row("start-stopped", Kind::Start { kill: false }, |s, n| {
        Job::random("randread", 1, s, n)
    }),
];

/// How a row reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Better,
    Worse,
    /// Even CPU time is not known, or too noisy.
    Unknown,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Same => "same",
            Verdict::Better => "better",
            Verdict::Worse => "WORSE",
            Verdict::Unknown => "unknown",
        }
    }
}

/// Ratios of one figure, a round each: of the old build by itself, and of the new one by the old.
#[derive(Clone, Debug, Default)]
struct Ratios {
    aa: Vec<f64>,
    ab: Vec<f64>,
}

impl Ratios {
    /// True if a build differs from itself too much for this figure to say anything.
    fn noisy(&self) -> bool {
        let spread = Spread::of(&self.aa);
        spread.max - spread.min > NOISY * spread.median
    }

    /// Where the median lies; `more` says whether more of it is better.
    fn verdict(&self, more: bool) -> Verdict {
        let (noise, median) = (Spread::of(&self.aa), Spread::of(&self.ab).median);
        if !(noise.min..=noise.max).contains(&median) {
            let above = median > noise.max;
            return if above == more {
                Verdict::Better
            } else {
                Verdict::Worse
            };
        }
        Verdict::Same
    }
}

/// A row as measured: requests per second, and CPU of the server per request where that is known.
#[derive(Clone, Debug, Default)]
struct Measured {
    speed: Ratios,
    cpu: Ratios,
}

impl Measured {
    /// What it comes to, and which figure says so.
    fn verdict(&self) -> (Verdict, &'static str) {
        if !self.speed.noisy() {
            (self.speed.verdict(true), "speed")
        } else if self.cpu.ab.is_empty() {
            (Verdict::Unknown, "noise")
        } else {
            (self.cpu.verdict(false), "CPU")
        }
    }
}

/// A row's pool, which either build serves.
struct Bench<'a> {
    args: &'a Args,
    row: &'a Row,
    hearth: Hearth,
    origin: PathBuf,
    size: u64,
}

impl<'a> Bench<'a> {
    fn new(args: &'a Args, row: &'a Row, old: &Path) -> Result<Bench<'a>> {
        let size = match row.kind {
            Kind::Start { .. } if !args.smoke => START_BYTES,
            _ => args.disk,
        };
        let origin = fixture::file(&args.dir, "aab.img", size)?;
        let room = match row.kind {
            Kind::Write => size * 2,
            _ => size,
        };
        let slack = if args.smoke { 64 << 20 } else { 256 << 20 };
        // The old build makes it: the new one must go on with what there is.
        let hearth = fixture::pool_in(old, &args.dir, room + room / 8 + slack)?;
        let bench = Bench {
            args,
            row,
            hearth,
            origin,
            size,
        };
        if !args.anew {
            bench.fill()?;
        }
        Ok(bench)
    }

    /// Adds the disk to a pool that has none, and caches what the row reads.
    fn fill(&self) -> Result<()> {
        fixture::add(&self.hearth, DISK, path(&self.origin), self.row.mode)?;
        if matches!(self.row.kind, Kind::Warm | Kind::Start { .. }) {
            fixture::warm(&self.hearth, DISK, self.size)?;
        }
        Ok(())
    }

    /// Has `bin` serve the pool, or one that it makes in its place.
    fn serve_with(&mut self, bin: &Path) -> Result<()> {
        self.hearth.stop()?;
        self.hearth.set_binary(bin.to_owned());
        if !self.args.anew {
            return self.hearth.start().map(drop);
        }
        let state = self.hearth.dir().join("state");
        if state.exists() {
            std::fs::remove_dir_all(&state)?;
        }
        let flash = self.hearth.flash().to_owned();
        self.hearth
            .ok(&["pool", "create", "--flash", path(&flash), "--force"])?;
        self.hearth.start()?;
        self.fill()
    }

    /// One run, served by `bin`.
    fn sample(&mut self, bin: &Path, round: usize) -> Result<Sample> {
        if let Kind::Start { kill } = self.row.kind {
            return self.first_answer(bin, kill);
        }
        self.serve_with(bin)?;
        if matches!(self.row.kind, Kind::Cold) && !self.args.anew {
            self.hearth.ok(&["disk", "remove", DISK])?;
            fixture::add(&self.hearth, DISK, path(&self.origin), self.row.mode)?;
        }
        let mut contender = fixture::contender(&self.hearth, DISK, "hearth")?;
        if self.row.vhost {
            contender = Contender {
                at: At::Vhost(self.hearth.vhost_socket(DISK)),
                ..contender
            };
        }
        let job = Job {
            seed: round as u64 + 1,
            ..(self.row.job)(self.args.seconds, self.size)
        };
        let sample = run(&job, &contender)?;
        if matches!(self.row.kind, Kind::Write) {
            fixture::drain(&self.hearth, DISK)?;
        }
        Ok(sample)
    }

    /// The time from the start of the process to the first answer, as starts a second.
    fn first_answer(&mut self, bin: &Path, kill: bool) -> Result<Sample> {
        if kill {
            // What is to be found is what the same build left.
            self.serve_with(bin)?;
            self.hearth.kill9()?;
        } else if self.args.anew {
            self.serve_with(bin)?;
            self.hearth.stop()?;
        } else {
            self.hearth.stop()?;
            self.hearth.set_binary(bin.to_owned());
        }
        let start = Instant::now();
        self.hearth.spawn()?;
        loop {
            match Client::connect(&self.hearth.socket(), DISK).and_then(|mut c| c.read(4096, 4096))
            {
                Ok(_) => break,
                Err(e) => ensure!(
                    start.elapsed() < ANSWER_LIMIT,
                    "no answer: {e}\n{}",
                    self.hearth.log()
                ),
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        let took = start.elapsed().as_secs_f64();
        let pid = self.hearth.pid().context("the daemon is not running")?;
        Ok(Sample {
            iops: 1.0 / took,
            mean_us: took * 1e6,
            server_us: Some(hearth_rig::process::cpu_us(pid)?),
            requests: 1.0,
            ..Sample::default()
        })
    }

    /// `rounds` ratios of `second` by `first`, which go first in turn.
    fn ratios(&mut self, first: &Path, second: &Path, rounds: usize) -> Result<[Vec<f64>; 2]> {
        let (mut speed, mut cpu) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let (one, two) = if round % 2 == 0 {
                let one = self.sample(first, round)?;
                (one, self.sample(second, round)?)
            } else {
                let two = self.sample(second, round)?;
                (self.sample(first, round)?, two)
            };
            speed.push(two.iops / one.iops);
            cpu.extend(one.server_us.zip(two.server_us).map(|(one, two)| two / one));
            eprintln!(
                "   {} round {}: {:.0} and {:.0} a second",
                self.row.id,
                round + 1,
                one.iops,
                two.iops
            );
        }
        Ok([speed, cpu])
    }
}

fn measure(args: &Args, row: &Row, old: &Path, rounds: usize) -> Result<Measured> {
    let mut bench = Bench::new(args, row, old)?;
    let [speed_aa, cpu_aa] = bench.ratios(old, old, rounds)?;
    let [speed_ab, cpu_ab] = bench.ratios(old, &args.hearth, rounds)?;
    Ok(Measured {
        speed: Ratios {
            aa: speed_aa,
            ab: speed_ab,
        },
        cpu: Ratios {
            aa: cpu_aa,
            ab: cpu_ab,
        },
    })
}

fn words(ratios: &[f64]) -> String {
    if ratios.is_empty() {
        return "–".to_owned();
    }
    let Spread { min, median, max } = Spread::of(ratios);
    format!("{median:.3} ({min:.3}–{max:.3})")
}

fn line(id: &str, measured: &Measured) -> String {
    let (verdict, by) = measured.verdict();
    format!(
        "| {id} | {} | {} | {} | {} | {} | {by} |",
        words(&measured.speed.aa),
        words(&measured.speed.ab),
        words(&measured.cpu.aa),
        words(&measured.cpu.ab),
        verdict.word()
    )
}

/// Measures the rows that are wanted, and prints a line for each. Fails if a row is worse.
pub fn compare(args: &Args, old: &Path) -> Result<()> {
    let rounds = if args.smoke {
        args.rounds
    } else {
        args.rounds.max(ROUNDS_MIN)
    };
    let mut text = format!(
        "Ratios of {rounds} rounds, the median and between which two all lie. A/A: {} by itself; A/B: {} by it. More \
         requests a second are better, and less CPU time for each.\n\n\
         | row | speed A/A | speed A/B | CPU A/A | CPU A/B | verdict | by |\n|---|---|---|---|---|---|---|\n",
        old.display(),
        args.hearth.display()
    );
    let (mut rows, mut bad) = (Vec::new(), Vec::new());
    for row in ROWS {
        let asked = if args.only.is_empty() {
            !args.smoke || matches!(row.id, "read-qd24" | "vhost-write-qd24" | "start-killed")
        } else {
            args.only
                .iter()
                .any(|only| row.id.starts_with(only.as_str()))
        };
        if !asked {
            continue;
        }
        eprintln!("\n== {}", row.id);
        match measure(args, row, old, rounds) {
            Ok(measured) => {
                let line = line(row.id, &measured);
                eprintln!("{line}");
                let _ = writeln!(text, "{line}");
                if measured.verdict().0 == Verdict::Worse {
                    bad.push(format!("{} is worse", row.id));
                }
                rows.push(as_json(row.id, &measured));
            }
            Err(e) => {
                eprintln!("   failed: {e:#}");
                let _ = writeln!(text, "| {} | not measured: {e:#} |", row.id);
                bad.push(format!("{} could not be measured", row.id));
            }
        }
        // After every row: a run that is interrupted keeps what it has measured.
        std::fs::create_dir_all(&args.out)?;
        std::fs::write(args.out.join("aab.md"), &text)?;
        let all = serde_json::to_string_pretty(&json!({"rounds": rounds, "rows": rows}))?;
        std::fs::write(args.out.join("aab.json"), all)?;
    }
    println!("{text}");
    // A smoke run proves that it runs, and measures nothing.
    let counts = |what: &&String| !args.smoke || !what.ends_with("worse");
    let bad: Vec<&String> = bad.iter().filter(counts).collect();
    ensure!(bad.is_empty(), "{bad:?}");
    Ok(())
}

fn as_json(id: &str, measured: &Measured) -> Value {
    let ratios = |r: &Ratios| json!({"aa": r.aa, "ab": r.ab});
    json!({
        "id": id,
        "speed": ratios(&measured.speed),
        "cpu": ratios(&measured.cpu),
        "verdict": measured.verdict().0.word(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(speed: [&[f64]; 2], cpu: [&[f64]; 2]) -> Measured {
        let ratios = |[aa, ab]: [&[f64]; 2]| Ratios {
            aa: aa.to_vec(),
            ab: ab.to_vec(),
        };
        Measured {
            speed: ratios(speed),
            cpu: ratios(cpu),
        }
    }

    #[test]
    fn speed_decides_where_a_build_equals_itself() {
        let quiet: &[f64] = &[0.99, 1.0, 1.01];
        let of = |ab: &[f64]| measured([quiet, ab], [quiet, &[2.0]]).verdict();
        assert_eq!(of(&[0.97, 0.98, 1.0]), (Verdict::Worse, "speed"));
        assert_eq!(of(&[0.9, 0.995, 1.2]), (Verdict::Same, "speed"));
        assert_eq!(of(&[1.0, 1.02, 1.5]), (Verdict::Better, "speed"));
    }

    #[test]
    fn cpu_decides_where_it_does_not() {
        let noisy: &[f64] = &[0.9, 1.0, 1.1];
        let of = |ab: &[f64]| measured([noisy, &[0.5]], [&[0.98, 1.0, 1.02], ab]).verdict();
        assert_eq!(of(&[1.03]), (Verdict::Worse, "CPU"));
        assert_eq!(of(&[1.01]), (Verdict::Same, "CPU"));
        assert_eq!(of(&[0.9]), (Verdict::Better, "CPU"));
        let none = measured([noisy, &[0.5]], [&[], &[]]);
        assert_eq!(none.verdict(), (Verdict::Unknown, "noise"));
    }
}
