//! A mixed load with a flush now and then, as sysbench's fileio test does it: random requests of
//! 16 KiB, three reads to two writes, one at a time, and an fsync after every 100 requests.
//!
//! sysbench itself would need a file system, whose own cache would answer most reads; here the
//! same mix goes to the disk.

use super::lab::{Lab, State};
use super::random::cell;
use super::report::Table;
use super::{Mode, Options, Run};
use crate::load::Job;
use crate::report::Wanted;
use anyhow::Result;

/// The table's name for programs.
pub(super) const ID: &str = "fileio";
/// Bytes of a request, and the share of reads.
const BLOCK: u64 = 16 << 10;
const READS: u32 = 60;
/// Writes between flushes: what 100 requests hold of them.
const FLUSH_EVERY: u32 = 40;
/// A cell is so many seconds longer than one of the random table: the slow disk answers some 80
/// requests a second, and a flush comes once in a hundred.
const LONGER: u64 = 1;
/// Untimed work per cell, on average, in seconds.
const OVERHEAD: f64 = 1.5;
/// Goal: warm write-back over the slow disk alone.
const TIMES: f64 = 50.0;

fn states(options: &Options) -> Vec<State> {
    State::all(&options.modes)
        .into_iter()
        // Reads that miss cost the same in every mode, and so does a cache that is off.
        .filter(|s| match s {
            State::Off => false,
            State::Cold(mode) => *mode == Mode::WriteBack,
            _ => true,
        })
        .collect()
}

fn cell_seconds(options: &Options) -> u64 {
    options.seconds + LONGER
}

/// Seconds the table will take.
pub fn seconds(options: &Options) -> f64 {
    let cells = states(options).len() * options.over.len();
    cells as f64 * f64::from(options.rounds) * (cell_seconds(options) as f64 + OVERHEAD)
}

/// Measures the table.
pub(super) fn run(run: &mut Run) -> Result<()> {
    let options = run.options;
    let states = states(options);
    let mut table = Table::new(
        ID,
        "Mixed random 16 KiB requests, three reads to two writes, an fsync every 100, depth 1",
        "requests per second",
        true,
        states.iter().map(|s| s.name()),
        options.over.iter().map(|o| o.word().to_owned()),
    );
    table.notes.push(
        "The mix of sysbench's fileio test (rndrw, --file-fsync-freq=100), asked of the disk \
         itself: no file system, no page cache."
            .to_owned(),
    );
    let table = run.report.open(table);
    let mut lab = Lab::set_up(run)?;
    for round in 0..options.rounds {
        for over in &options.over {
            let job = Job {
                bs: BLOCK,
                reads: READS,
                flush_every: FLUSH_EVERY,
                seed: u64::from(round) + 1,
                ..Job::random("randrw", 1, cell_seconds(options), options.size)
            };
            for state in &states {
                let what = format!(
                    "round {} of {}: {}, {}: mixed with fsync",
                    round + 1,
                    options.rounds,
                    over.word(),
                    state.name()
                );
                run.step(cell_seconds(options) as f64 + OVERHEAD, &what)?;
                let point = cell(run, &mut lab, *state, *over, &job)?;
                run.report
                    .table(table)
                    .add(&state.name(), over.word(), point);
            }
            judge(run.report.table(table), options);
            run.keep()?;
        }
    }
    Ok(())
}

fn judge(table: &mut Table, options: &Options) {
    table.goals.clear();
    if !options.goals {
        return;
    }
    let (slow, flash) = (State::SlowAlone.name(), State::FlashAlone.name());
    for over in &options.over {
        for mode in &options.modes {
            let warm = State::Warm(*mode).name();
            let wanted = match mode {
                Mode::WriteBack => Wanted::AtLeast(TIMES),
                _ => Wanted::Shown,
            };
            table.compare(&warm, &slow, over.word(), wanted);
            table.compare(&warm, &flash, over.word(), Wanted::Shown);
        }
    }
}
