//! `hearth-sim`: runs seeds of the deterministic simulation.

use hearth_sim::gate;
use hearth_sim::profile::{MIXED, PROFILES};
use hearth_sim::real::{Real, fault_names};
use hearth_sim::runner::{Summary, catches, run_loud, run_many, run_seed};
use hearth_sim::single::run_all;
use std::process::ExitCode;
use std::time::Instant;

/// So many seeds that catch a mutation are looked for.
const ENOUGH: usize = 5;

const USAGE: &str = "\
usage: hearth-sim [options]
  --seeds N        how many seeds to run (default 1000)
  --start N        the first seed (default 0)
  --seed N         run only this seed
  --trace          print every event of it
  --paths          print in how many worlds each rare path was taken
  --jobs N         threads (default 2)
  --profile NAME   the kind of hardship (default mixed, which lets the seed choose)
  --gate           run the fixed seeds of the gate and ask for every rare path
  --own-runs       print the profiles that need runs of their own
  --record FILE    search for the fixed seeds of the gate and write them to FILE
  --single         let each I/O of fixed workloads fail in turn, and nothing else
  --stride N       of those only every Nth (default 1)
  --mutation NAME  break the engine on purpose; exits 0 if a seed catches it
  --list           name the profiles and mutations";

struct Options {
    seeds: u64,
    start: u64,
    seed: Option<u64>,
    trace: bool,
    paths: bool,
    jobs: usize,
    profile: String,
    mutation: Option<String>,
    gate: bool,
    own_runs: bool,
    record: Option<String>,
    single: bool,
    stride: u64,
    list: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut o = Options {
        seeds: 1000,
        start: 0,
        seed: None,
        trace: false,
        paths: false,
        jobs: 2,
        profile: MIXED.to_string(),
        mutation: None,
        gate: false,
        own_runs: false,
        record: None,
        single: false,
        stride: 1,
        list: false,
    };
    fn number(name: &str, value: Option<String>) -> Result<u64, String> {
        let value = value.ok_or_else(|| format!("{name} needs a number"))?;
        value
            .parse()
            .map_err(|_| format!("{name} needs a number, not {value:?}"))
    }
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--seeds" => o.seeds = number("--seeds", args.next())?,
            "--start" => o.start = number("--start", args.next())?,
            "--seed" => o.seed = Some(number("--seed", args.next())?),
            "--jobs" => o.jobs = number("--jobs", args.next())?.clamp(1, 256) as usize,
            "--profile" => o.profile = args.next().ok_or("--profile needs a name")?,
            "--mutation" => o.mutation = Some(args.next().ok_or("--mutation needs a name")?),
            "--own-runs" => o.own_runs = true,
            "--gate" => o.gate = true,
            "--record" => o.record = Some(args.next().ok_or("--record needs a file")?),
            "--single" => o.single = true,
            "--stride" => o.stride = number("--stride", args.next())?.max(1),
            "--trace" => o.trace = true,
            "--paths" => o.paths = true,
            "--list" => o.list = true,
            other => return Err(format!("unknown option {other:?}")),
        }
    }
    Ok(o)
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(e) => {
            eprintln!("hearth-sim: {e}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if options.list {
        println!("profiles:");
        for p in &PROFILES {
            println!("  {:14} {}", p.name, p.about);
        }
        println!("mutations:\n  {}", fault_names().join("\n  "));
        return ExitCode::SUCCESS;
    }
    if options.own_runs {
        println!("{}", gate::OWN_RUNS.join("\n"));
        return ExitCode::SUCCESS;
    }
    let maker = match &options.mutation {
        None => Real::default(),
        Some(name) => match Real::broken(name) {
            Ok(maker) => maker,
            Err(e) => {
                eprintln!("hearth-sim: {e}");
                return ExitCode::from(2);
            }
        },
    };
    if let Some(file) = &options.record {
        return record(file, options.jobs);
    }
    if options.gate {
        return gate(&options);
    }
    if options.single {
        return single(&options, &maker);
    }
    if let Some(name) = &options.mutation {
        return hunt(name, &options, &maker);
    }
    match options.seed {
        Some(seed) if options.trace => match run_loud(seed, &options.profile, &maker) {
            Ok(report) => {
                println!("seed {seed} passed: {report:?}");
                ExitCode::SUCCESS
            }
            Err(what) => {
                println!("seed {seed} FAILED: {what}");
                ExitCode::FAILURE
            }
        },
        Some(seed) => batch(seed, 1, &options, &maker),
        None => batch(options.start, options.seeds, &options, &maker),
    }
}

/// Searches for the seeds of the gate and stores them.
fn record(file: &str, jobs: usize) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let stored = gate::record(jobs).and_then(|text| {
        std::fs::write(file, text).map_err(|e| format!("cannot write {file}: {e}"))
    });
    match stored {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the fixed seeds; fails if a world fails or a path is not reached.
fn gate(options: &Options) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let began = Instant::now();
    let outcome = gate::run(options.jobs, &|_, _| {});
    let good = report(&outcome.summary, began, options);
    if outcome.searched > 0 {
        println!(
            "recorded seeds are stale, run scripts/seeds.sh: {} worlds searched for paths that they do not reach",
            outcome.searched
        );
    }
    match good {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn batch(start: u64, count: u64, options: &Options, maker: &Real) -> ExitCode {
    // A panic inside the engine is reported with its seed by the runner.
    std::panic::set_hook(Box::new(|_| {}));
    let began = Instant::now();
    let summary = run_many(
        start,
        count,
        options.jobs,
        &options.profile,
        maker,
        &|done, failed| {
            eprint!(
                "\r{done} of {count} seeds, {failed} failed, {:.0} s ",
                began.elapsed().as_secs_f64()
            );
        },
    );
    eprintln!();
    match report(&summary, began, options) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Prints failures and totals; false if a world failed or, in the gate, a path was not reached.
fn report(summary: &Summary, began: Instant, options: &Options) -> bool {
    if options.paths {
        println!("worlds in which");
        for (name, worlds) in summary.totals.paths.all() {
            println!("{worlds:>8} {name}");
        }
    }
    for (i, failure) in summary.failures.iter().enumerate() {
        if i < 3 {
            println!("{failure}\n");
        } else {
            println!(
                "seed {}: {}",
                failure.seed,
                failure.what.lines().next().unwrap_or("")
            );
        }
    }
    let took = began.elapsed().as_secs_f64();
    println!(
        "{} requests and {} device operations in {took:.1} s; digest {:016x}",
        summary.totals.requests, summary.totals.ios, summary.totals.digest
    );
    let missing: Vec<_> = match options.gate {
        true => summary.totals.paths.missing().collect(),
        false => Vec::new(),
    };
    for name in &missing {
        println!("NOT TAKEN: {name}");
    }
    println!(
        "{} passed, {} failed",
        summary.passed,
        summary.failures.len()
    );
    summary.failures.is_empty() && missing.is_empty()
}

/// Lets each I/O of fixed workloads fail, alone.
fn single(options: &Options, maker: &Real) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let began = Instant::now();
    let tally = match run_all(options.stride, options.jobs, maker) {
        Ok(tally) => tally,
        Err(e) => {
            println!("{e}");
            return ExitCode::FAILURE;
        }
    };
    for (case, ios) in &tally.ios {
        println!("{ios:>8} I/Os: {case}");
    }
    for finding in &tally.findings {
        println!("{finding}");
    }
    println!(
        "{} runs in {:.1} s, {} found something",
        tally.runs,
        began.elapsed().as_secs_f64(),
        match tally.findings.len() {
            0 => "none".to_owned(),
            some => format!("at least {some}"),
        }
    );
    match tally.findings.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Tells which seeds catch a mutation, the first [`ENOUGH`] of them, and how long that took.
fn hunt(name: &str, options: &Options, maker: &Real) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let (began, profile) = (Instant::now(), &options.profile);
    let caught = catches(options.start, options.seeds, profile, maker);
    let caught: Vec<u64> = caught.take(ENOUGH).collect();
    let took = began.elapsed().as_secs_f64();
    if caught.is_empty() {
        println!(
            "mutation {name} ({profile}) NOT caught by {} seeds in {took:.1} s",
            options.seeds
        );
        return ExitCode::FAILURE;
    }
    println!("mutation {name} ({profile}) caught by seeds {caught:?} in {took:.1} s");
    if let Err(failure) = run_seed(caught[0], profile, maker) {
        println!("{failure}");
    }
    ExitCode::SUCCESS
}
