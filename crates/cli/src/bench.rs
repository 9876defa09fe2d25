//! `hearth bench`: measure disks of one's own, and compare two measurements.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use hearth_bench::report::{Spread, number};
use hearth_bench::vm::compare::{Comparison, compare};
use hearth_bench::vm::report::Report;
use hearth_bench::vm::{self, BenchError, Options, Part, Slow, Watcher, markdown, summary};
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::progress::human_seconds;
use hearth_fault::Fault;

use crate::args::{Bench, BenchCommand, BenchCompare, BenchTable, Global, Mode, Over, Size};
use crate::interrupt::Interrupt;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

/// Smallest and largest disk: below, a hard disk's few requests would all meet; above, the files
/// alone would take a night.
const SIZE_MIN: u64 = 16 << 20;
const SIZE_MAX: u64 = 1 << 40;
/// Cells of the progress bar.
const BAR: usize = 24;
/// Where there is no terminal, a line is printed whenever this share of the work is done.
const LINE_EVERY: f64 = 0.05;

pub fn run(global: &Global, args: &Bench) -> Outcome {
    if let Some(BenchCommand::Compare(files)) = &args.command {
        return show_comparison(global, files);
    }
    let options = options(args)?;
    let mut screen = Screen::new();
    let outcome = vm::run(&options, &mut screen);
    screen.clear();
    let report = outcome.map_err(failed)?;
    if global.json {
        print_json(&report)?;
    } else {
        print_what(&report);
        if args.goals {
            print_tables(&report);
        }
        print_summary(&report);
        let out = options.out.display();
        println!("\n{out}/results.html, {out}/results.md, {out}/results.json");
    }
    if report.called_off {
        return Err(Failure::Interrupted(Fault::bare(
            "called off; the cells measured until then are kept",
        )));
    }
    if let Some(first) = report.failures.first() {
        return Err(Error::unavailable(
            format!(
                "{} of the tables could not be measured: {first}",
                report.failures.len()
            ),
            "the rest is in the result files",
        )
        .into());
    }
    Ok(())
}

fn options(args: &Bench) -> Result<Options, Error> {
    let quick = |usual, quick| if args.quick { quick } else { usual };
    let size = args.size.map_or(quick(256 << 20, 64 << 20), |Size(n)| n);
    if !(SIZE_MIN..=SIZE_MAX).contains(&size) || size % (1 << 20) != 0 {
        return Err(Error::invalid(
            format!("a disk of {size} bytes cannot be measured"),
            "give --size between 16M and 1T, in whole MiB",
        ));
    }
    let hearth = std::env::current_exe()
        .map_err(|e| Error::internal(format!("cannot find this program's own file: {e}")))?;
    let absolute = |path: &std::path::Path| {
        std::path::absolute(path).map_err(|e| {
            Error::invalid(format!("{}: {e}", path.display()), "give an absolute path")
        })
    };
    let modes: Vec<vm::Mode> = once(args.mode.iter().filter_map(|m| mode(*m)).collect());
    let parts: Vec<Part> = once(args.table.iter().map(|t| part(*t)).collect());
    Ok(Options {
        hearth,
        slow: match &args.slow {
            Some(dir) => Slow::Directory(absolute(dir)?),
            None => Slow::Model,
        },
        flash: absolute(&args.flash)?,
        out: absolute(&args.out)?,
        parts: match (parts.is_empty(), &args.guest) {
            (false, _) => parts,
            (true, Some(_)) => Part::ALL.to_vec(),
            (true, None) => vec![Part::Random, Part::Fileio],
        },
        guest: args.guest.as_deref().map(absolute).transpose()?,
        storms: args.storms,
        goals: args.goals,
        over: match args.over {
            None => vm::Over::ALL.to_vec(),
            Some(Over::Nbd) => vec![vm::Over::Nbd],
            Some(Over::VhostUser) => vec![vm::Over::VhostUser],
        },
        modes: match (modes.is_empty(), args.quick) {
            (false, _) => modes,
            (true, true) => vec![vm::Mode::WriteBack],
            (true, false) => vm::Mode::ALL.to_vec(),
        },
        depths: once(args.depth.clone()),
        rounds: args.rounds.unwrap_or(quick(3, 1) as u32),
        seconds: args.seconds.unwrap_or(quick(2, 1)),
        size,
    })
}

/// The list without what it repeats.
fn once<T: PartialEq>(list: Vec<T>) -> Vec<T> {
    let mut kept = Vec::new();
    for item in list {
        if !kept.contains(&item) {
            kept.push(item);
        }
    }
    kept
}

/// A mode to compare with off, which is measured anyway.
fn mode(mode: Mode) -> Option<vm::Mode> {
    match mode {
        Mode::WriteBack => Some(vm::Mode::WriteBack),
        Mode::WriteThrough => Some(vm::Mode::WriteThrough),
        Mode::WriteAround => Some(vm::Mode::WriteAround),
        Mode::Off | Mode::WriteBackOrdered => None,
    }
}

fn part(table: BenchTable) -> Part {
    match table {
        BenchTable::Random => Part::Random,
        BenchTable::Fileio => Part::Fileio,
        BenchTable::Storm => Part::Storm,
    }
}

/// An error of the benchmark as one for the user.
fn failed(error: anyhow::Error) -> Failure {
    match error.downcast_ref::<BenchError>() {
        Some(BenchError::CalledOff) => Failure::Interrupted(Fault::bare("called off")),
        Some(e) => Error::of(Kind::Invalid, e.fault()).into(),
        None => Error::unavailable(
            format!("{error:#}"),
            "what was measured until then is kept; see what is wrong with that and run it again",
        )
        .into(),
    }
}

/// The terminal: a bar while it runs, and Ctrl-C.
struct Screen {
    interrupt: Interrupt,
    terminal: bool,
    started: Instant,
    /// Share of the work at the last line, where there is no terminal.
    told: f64,
}

impl Screen {
    fn new() -> Screen {
        Screen {
            interrupt: Interrupt::watch(),
            terminal: std::io::stderr().is_terminal(),
            started: Instant::now(),
            told: f64::NEG_INFINITY,
        }
    }

    fn clear(&self) {
        if self.terminal {
            std::eprint!("\r\x1b[K");
        }
    }
}

impl Watcher for Screen {
    fn step(&mut self, done: f64, total: f64, what: &str) {
        let share = (done / total.max(1.0)).clamp(0.0, 1.0);
        // At first the plan is all there is to go by.
        let left = if share > 0.02 {
            self.started.elapsed().as_secs_f64() * (1.0 - share) / share
        } else {
            total - done
        };
        let left = human_seconds(left);
        let percent = share * 100.0;
        if self.terminal {
            let full = (share * BAR as f64) as usize;
            let bar = format!("{}{}", "#".repeat(full), "-".repeat(BAR - full));
            let what = crate::table::plain(what);
            std::eprint!("\r\x1b[K[{bar}] {percent:.0} %, {left} left · {what}");
            let _ = std::io::stderr().flush();
        } else if share - self.told >= LINE_EVERY {
            self.told = share;
            eprintln!("{percent:.0} %, {left} left: {what}");
        }
    }

    fn stopped(&self) -> bool {
        self.interrupt.hit()
    }
}

/// What was measured; the rest of what is known of the machine is in the files.
fn print_what(report: &Report) {
    for name in ["slow disk", "flash", "run"] {
        for fact in report.host.iter().filter(|f| f.name == name) {
            println!("{name:>9}: {}", plain(&fact.value));
        }
    }
}

/// What the cache changed: a table, two sentences, and why not to trust them much.
fn print_summary(report: &Report) {
    let headings = summary::HEADINGS.map(|h| format!(">{}", h.to_uppercase()));
    let mut headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    headings[0] = "REQUESTS PER SECOND";
    let mut table = Table::new(&headings);
    for (over, lines) in summary::groups(&report.summary) {
        table.row([format!("over {over}")]);
        for line in lines {
            let mut cells = summary::cells(line);
            cells[0] = format!("  {}", cells[0]);
            table.row(cells);
        }
    }
    if !report.summary.is_empty() {
        print!("\n{}", table.render());
    }
    println!();
    for sentence in summary::sentences(&report.summary) {
        println!("{sentence}");
    }
    for failure in &report.failures {
        println!("not measured: {}", plain(failure));
    }
    for caution in &report.cautions {
        println!("{caution}");
    }
}

/// Every table with its spread, and the goals.
fn print_tables(report: &Report) {
    for table in &report.tables {
        println!(
            "\n{} ({}; median, smallest–largest)",
            table.title, table.unit
        );
        let mut headings = vec!["".to_owned()];
        headings.extend(table.columns.iter().map(|c| format!(">{c}")));
        let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
        let mut grid = Table::new(&headings);
        for row in &table.rows {
            let cells = table.columns.iter().map(|column| {
                let cell = table.cell(row, column);
                cell.map_or_else(|| "–".to_owned(), markdown::spread)
            });
            grid.row(std::iter::once(row.clone()).chain(cells));
        }
        print!("{}", grid.render());
        let mut goals = Table::new(&["GOAL", ">MIN", ">MEDIAN", ">MAX", ">WANTED", ""]);
        let mut judged = table.goals.iter().filter(|g| g.met().is_some()).peekable();
        if judged.peek().is_none() {
            continue;
        }
        for goal in judged {
            let [min, median, max] = goal.spread_words();
            let verdict = goal.verdict().to_owned();
            goals.row([goal.what.clone(), min, median, max, goal.goal(), verdict]);
        }
        print!("\n{}", goals.render());
    }
    if let Some((met, missed)) = report.score() {
        println!("\ngoals: {met} met, {missed} missed");
    }
}

fn show_comparison(global: &Global, files: &BenchCompare) -> Outcome {
    let load = |file| {
        Report::load(file).map_err(|e| {
            Error::invalid(
                format!("{e:#}"),
                "give two results.json files written by hearth bench",
            )
        })
    };
    let (a, b) = (load(&files.a)?, load(&files.b)?);
    let outcome = compare(&a, &b);
    if global.json {
        print_json(&outcome)?;
    } else {
        print_comparison(&outcome);
    }
    if !outcome.agree {
        return Err(Error::refused(
            format!("the runs do not agree: {}", outcome.reasons.join("; ")),
            "compare whole runs of the same tables, taken on a quiet machine with more --rounds",
        )
        .into());
    }
    Ok(())
}

fn print_comparison(outcome: &Comparison) {
    for (name, a, b) in &outcome.differences {
        println!("different {}: {} / {}", plain(name), plain(a), plain(b));
    }
    let mut table = Table::new(&["TABLE", "ROW", "COLUMN", ">FIRST", ">SECOND", ">RATIO", ""]);
    for pair in &outcome.pairs {
        let range =
            |s: Spread| format!("{} ({}–{})", number(s.median), number(s.min), number(s.max));
        table.row([
            plain(&pair.table),
            plain(&pair.row),
            plain(&pair.column),
            range(pair.a),
            range(pair.b),
            number(pair.ratio),
            if pair.agrees { "" } else { "APART" }.to_owned(),
        ]);
    }
    print!("{}", table.render());
    for goal in &outcome.goals_changed {
        println!("goal changed: {}", plain(goal));
    }
    if outcome.unpaired > 0 {
        println!("{} cells are in one run only", outcome.unpaired);
    }
    println!(
        "{} of {} cells fall apart, {} may by luck: the runs {}",
        outcome.apart,
        outcome.pairs.len(),
        outcome.by_luck,
        if outcome.agree {
            "agree"
        } else {
            "do not agree"
        }
    );
}
