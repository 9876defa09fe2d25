//! Random 4 KiB reads and writes: the table everybody looks at first.

use super::lab::{Lab, State};
use super::report::{Point, Table};
use super::{Mode, Options, Over, Run, model};
use crate::load::{self, Job, Sample};
use crate::report::Wanted;
use anyhow::Result;

/// Untimed work per cell, on average, in seconds: for the estimate of the time left only.
const OVERHEAD: f64 = 0.7;
/// Goals: warm reads over flash alone, write-back writes over flash alone, write-through writes
/// over the slow disk alone.
const WARM_READS: f64 = 0.9;
const BACK_WRITES: f64 = 0.7;
const THROUGH_WRITES: f64 = 0.95;

/// The name of the table of a way to the disk.
pub(super) fn id(over: Over) -> String {
    format!("random-{}", over.word())
}

/// The name of a column of reads.
pub(super) fn read_column(depth: u32) -> String {
    format!("read, depth {depth}")
}

/// The name of a column of writes.
pub(super) fn write_column(depth: u32) -> String {
    format!("write, depth {depth}")
}

/// A column: fio's word, its name, and the requests in flight.
fn columns(options: &Options) -> Vec<(&'static str, u32, String)> {
    let mut columns = Vec::new();
    for depth in &options.depths {
        columns.push(("randread", *depth, read_column(*depth)));
    }
    for depth in &options.depths {
        columns.push(("randwrite", *depth, write_column(*depth)));
    }
    columns
}

/// Seconds the tables will take.
pub fn seconds(options: &Options) -> f64 {
    let cells = State::all(&options.modes).len() * columns(options).len() * options.over.len();
    cells as f64 * f64::from(options.rounds) * (options.seconds as f64 + OVERHEAD)
}

/// Measures the tables, one for each way to the disk.
pub(super) fn run(run: &mut Run) -> Result<()> {
    let options = run.options;
    let states = State::all(&options.modes);
    let mut columns = columns(options);
    let tables: Vec<usize> = options
        .over
        .iter()
        .map(|over| {
            run.report.open(Table::new(
                &id(*over),
                &format!("Random 4 KiB requests over {}", over.word()),
                "requests per second",
                true,
                states.iter().map(|s| s.name()),
                columns.iter().map(|c| c.2.clone()),
            ))
        })
        .collect();
    let mut lab = Lab::set_up(run)?;
    // Writes first: they leave holes in warm caches, which are filled once for all reads.
    columns.reverse();
    for round in 0..options.rounds {
        for (over, table) in options.over.iter().zip(&tables) {
            for (rw, depth, column) in &columns {
                let job = Job {
                    seed: u64::from(round) + 1,
                    ..Job::random(rw, *depth, options.seconds, options.size)
                };
                for state in &states {
                    let what = format!(
                        "round {} of {}: {}, {}: {column}",
                        round + 1,
                        options.rounds,
                        over.word(),
                        state.name()
                    );
                    run.step(options.seconds as f64 + OVERHEAD, &what)?;
                    let point = cell(run, &mut lab, *state, *over, &job)?;
                    run.report.table(*table).add(&state.name(), column, point);
                }
                judge(run.report.table(*table), options);
                run.keep()?;
            }
        }
    }
    Ok(())
}

/// Measures one cell.
pub(super) fn cell(run: &Run, lab: &mut Lab, state: State, over: Over, job: &Job) -> Result<Point> {
    if state == State::SlowRaw && lab.is_modelled() {
        return model::run(job).map(Point::from);
    }
    let writing = job.rw != "randread";
    let contender = lab.prepare(state, over, writing, &|| run.go_on())?;
    let before = lab.flash_written()?;
    // A cold cache is cold: no block is asked for twice.
    let job = Job {
        once: matches!(state, State::Cold(_)) && !writing,
        ..job.clone()
    };
    // Without a server the client of the table's servers drives the file.
    let sample: Sample = match over {
        Over::Nbd => load::run(&job, &contender)?,
        Over::VhostUser => load::by_libblkio(&job, &contender, &|| run.go_on())?,
    };
    run.go_on()?;
    let written = lab.flash_written()? - before;
    lab.after(state, writing)?;
    let mut point = Point::from(sample);
    point.flash_bytes = contender.pid.map(|_| written / sample.requests.max(1.0));
    Ok(point)
}

fn judge(table: &mut Table, options: &Options) {
    table.goals.clear();
    if !options.goals {
        return;
    }
    let (slow, flash) = (State::SlowAlone.name(), State::FlashAlone.name());
    for depth in &options.depths {
        let (read, write) = (read_column(*depth), write_column(*depth));
        for mode in &options.modes {
            let (warm, cold) = (State::Warm(*mode).name(), State::Cold(*mode).name());
            table.compare(&warm, &flash, &read, Wanted::AtLeast(WARM_READS));
            table.compare(&warm, &slow, &read, Wanted::Shown);
            table.compare(&cold, &State::Off.name(), &read, Wanted::Shown);
            match mode {
                Mode::WriteBack => {
                    table.compare(&warm, &flash, &write, Wanted::AtLeast(BACK_WRITES));
                    table.compare(&warm, &slow, &write, Wanted::Shown);
                }
                Mode::WriteThrough => {
                    table.compare(&warm, &slow, &write, Wanted::AtLeast(THROUGH_WRITES));
                }
                Mode::WriteAround => table.compare(&warm, &slow, &write, Wanted::Shown),
            }
        }
        for column in [&read, &write] {
            table.compare(&State::Off.name(), &slow, column, Wanted::Shown);
        }
    }
}
