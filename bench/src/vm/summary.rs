//! What the cache changed, for somebody who wants to know just that: one line per load, and two
//! sentences.
//!
//! The tables of a report hold every state of every disk. Here are the four that answer a user's
//! question (the slow disk alone, the cache while it is cold, the cache once it is warm, flash
//! alone), the ratio that the question is about, and how long one request takes without the cache
//! and with it.

use super::lab::State;
use super::report::{Cell, Report};
use super::{Mode, Options, Part, fileio, random, storm};
use crate::report::{Spread, number};
use serde::{Deserialize, Serialize};

/// Ratios this near to one are no difference: rounds of one thing are apart as much.
const SAME: std::ops::RangeInclusive<f64> = 0.9..=1.1;

/// What a load does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Reads, writes and flushes.
    Mixed,
    /// Guests that boot.
    Boot,
}

/// One load in the four states.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// What was asked for, in words.
    pub load: String,
    /// What it does.
    pub kind: Kind,
    /// The protocol.
    pub over: String,
    /// The cache mode of the cold and the warm state.
    pub mode: String,
    /// The unit of the four figures.
    pub unit: String,
    /// The slow disk alone, median of the rounds.
    pub slow_alone: Option<f64>,
    /// With the cache, nothing on flash yet.
    pub cold: Option<f64>,
    /// With the cache, everything on flash.
    pub warm: Option<f64>,
    /// The flash alone.
    pub flash_alone: Option<f64>,
    /// How many times faster the warm cache is than the slow disk alone: median of the rounds.
    pub times_faster: Option<f64>,
    /// The same of the cold cache.
    pub times_faster_cold: Option<f64>,
    /// Mean latency of a request to the slow disk alone, µs.
    pub slow_us: Option<f64>,
    /// Mean latency of a request with the warm cache, µs.
    pub warm_us: Option<f64>,
}

/// Where the cells of a line are.
struct Place<'a> {
    table: String,
    column: String,
    /// Of the cold and the warm state, where a state has columns of its own.
    warm_column: Option<String>,
    rows: [String; 4],
    more_is_better: bool,
    load: String,
    kind: Kind,
    over: &'a str,
    mode: Mode,
}

/// The lines of a report, as far as it goes.
pub fn lines(report: &Report, options: &Options) -> Vec<Line> {
    let mut lines = Vec::new();
    for over in &options.over {
        for part in &options.parts {
            match part {
                Part::Random => random_places(options, *over).into_iter().for_each(|place| {
                    lines.extend(line(report, place));
                }),
                Part::Fileio => {
                    for mode in &options.modes {
                        // Only one mode has a cold row: reads that miss cost the same in each.
                        let cold = State::Cold(Mode::WriteBack);
                        let place = Place {
                            table: fileio::ID.to_owned(),
                            column: over.word().to_owned(),
                            warm_column: None,
                            rows: rows(cold, *mode),
                            more_is_better: true,
                            load: named("mixed 16 KiB, with fsync", *mode, options),
                            kind: Kind::Mixed,
                            over: over.word(),
                            mode: *mode,
                        };
                        lines.extend(line(report, place));
                    }
                }
                Part::Storm => {}
            }
        }
    }
    if let (true, Some(mode)) = (options.parts.contains(&Part::Storm), options.modes.first()) {
        let columns = storm::last_up();
        let place = Place {
            table: storm::ID.to_owned(),
            column: columns[0].clone(),
            warm_column: Some(columns[1].clone()),
            rows: storm::rows(*mode),
            more_is_better: false,
            load: format!(
                "{} guests boot together, until the last is up",
                storm::GUESTS
            ),
            kind: Kind::Boot,
            over: storm::over(options).word(),
            mode: *mode,
        };
        lines.extend(line(report, place));
    }
    lines
}

fn rows(cold: State, mode: Mode) -> [String; 4] {
    [
        State::SlowAlone.name(),
        cold.name(),
        State::Warm(mode).name(),
        State::FlashAlone.name(),
    ]
}

/// Names the mode if there are several.
fn named(load: &str, mode: Mode, options: &Options) -> String {
    match options.modes.len() {
        0 | 1 => load.to_owned(),
        _ => format!("{load}, {}", mode.word()),
    }
}

fn random_places<'a>(options: &Options, over: super::Over) -> Vec<Place<'a>> {
    let mut places = Vec::new();
    for kind in [Kind::Read, Kind::Write] {
        // What is read from the cache is read alike in every mode.
        let modes = match kind {
            Kind::Read => &options.modes[..options.modes.len().min(1)],
            _ => &options.modes[..],
        };
        for depth in &options.depths {
            for mode in modes {
                let (column, load) = match kind {
                    Kind::Read => (random::read_column(*depth), "read 4 KiB"),
                    _ => (random::write_column(*depth), "write 4 KiB"),
                };
                let load = format!("{load}, {depth} at a time");
                places.push(Place {
                    table: random::id(over),
                    column,
                    warm_column: None,
                    rows: rows(State::Cold(*mode), *mode),
                    more_is_better: true,
                    load: match kind {
                        Kind::Read => load,
                        _ => named(&load, *mode, options),
                    },
                    kind,
                    over: over.word(),
                    mode: *mode,
                });
            }
        }
    }
    places
}

fn line(report: &Report, place: Place) -> Option<Line> {
    let table = report.tables.iter().find(|t| t.id == place.table)?;
    let warm_column = place.warm_column.as_ref().unwrap_or(&place.column);
    let [slow, cold, warm, flash] = &place.rows;
    let (slow, cold) = (
        table.cell(slow, &place.column),
        table.cell(cold, &place.column),
    );
    let (warm, flash) = (
        table.cell(warm, warm_column),
        table.cell(flash, warm_column),
    );
    if slow.is_none() && warm.is_none() {
        return None;
    }
    let median = |cell: Option<&Cell>| cell.map(|c| c.spread.median);
    let mean_us = |cell: Option<&Cell>| cell.and_then(|c| c.median(|p| p.mean_us));
    let times = |cell: Option<&Cell>| {
        let (slow, cell) = (slow?, cell?);
        // Within a round: what the machine does beside meets both.
        let ratios: Vec<f64> = slow
            .points
            .iter()
            .zip(&cell.points)
            .map(|(s, c)| match place.more_is_better {
                true => c.value / s.value,
                false => s.value / c.value,
            })
            .filter(|ratio| ratio.is_finite())
            .collect();
        (!ratios.is_empty()).then(|| Spread::of(&ratios).median)
    };
    Some(Line {
        load: place.load,
        kind: place.kind,
        over: place.over.to_owned(),
        mode: place.mode.word().to_owned(),
        unit: table.unit.clone(),
        slow_alone: median(slow),
        cold: median(cold),
        warm: median(warm),
        flash_alone: median(flash),
        times_faster: times(warm),
        times_faster_cold: times(cold),
        slow_us: mean_us(slow),
        warm_us: mean_us(warm),
    })
}

/// Headings of the table: one for each of [`cells`].
pub const HEADINGS: [&str; 7] = [
    "requests per second",
    "slow disk alone",
    "cache, cold",
    "cache, warm",
    "flash alone",
    "times faster",
    "mean latency",
];

/// A line as the cells of a table.
pub fn cells(line: &Line) -> [String; 7] {
    let unit = match line.kind {
        Kind::Boot => " s",
        _ => "",
    };
    let shown = |value: Option<f64>| value.map_or("–".to_owned(), |v| number(v) + unit);
    let latency = match (line.slow_us, line.warm_us) {
        (Some(slow), Some(warm)) => format!("{} → {}", time(slow), time(warm)),
        _ => "–".to_owned(),
    };
    [
        line.load.clone(),
        shown(line.slow_alone),
        shown(line.cold),
        shown(line.warm),
        shown(line.flash_alone),
        line.times_faster.map_or("–".to_owned(), times),
        latency,
    ]
}

/// Lines under the protocol they went over, in order.
pub fn groups(lines: &[Line]) -> Vec<(&str, Vec<&Line>)> {
    let mut groups: Vec<(&str, Vec<&Line>)> = Vec::new();
    for line in lines {
        match groups.iter_mut().find(|(over, _)| *over == line.over) {
            Some((_, group)) => group.push(line),
            None => groups.push((&line.over, vec![line])),
        }
    }
    groups
}

/// A latency as people read it.
fn time(us: f64) -> String {
    match us {
        us if us >= 1000.0 => format!("{} ms", number(us / 1000.0)),
        us => format!("{us:.0} µs"),
    }
}

/// A factor as people read it.
fn times(ratio: f64) -> String {
    match ratio {
        r if r >= 10.0 => format!("{r:.0}"),
        r => format!("{r:.1}"),
    }
}

/// Smallest and largest of a figure of the lines of some kinds.
fn range(lines: &[Line], kinds: &[Kind], of: impl Fn(&Line) -> Option<f64>) -> Option<(f64, f64)> {
    lines
        .iter()
        .filter(|line| kinds.contains(&line.kind))
        .filter_map(of)
        .fold(None, |range, value| match range {
            None => Some((value, value)),
            Some((low, high)) => Some((f64::min(low, value), f64::max(high, value))),
        })
}

/// "51 to 153 times as fast as", or that there is no difference.
fn as_fast((low, high): (f64, f64)) -> String {
    if SAME.contains(&low) && SAME.contains(&high) {
        return "as fast as".to_owned();
    }
    let (low, high) = (times(low), times(high));
    if low == high {
        return format!("{low} times as fast as");
    }
    format!("{low} to {high} times as fast as")
}

/// Two sentences: what the cache gives once it is warm, and what it does until then.
pub fn sentences(lines: &[Line]) -> Vec<String> {
    let mut said = Vec::new();
    let reads = range(lines, &[Kind::Read], |l| l.times_faster);
    if let Some(reads) = reads {
        let one = lines
            .iter()
            .find(|l| l.kind == Kind::Read)
            .and_then(|l| Some((&l.load, l.slow_us?, l.warm_us?)));
        let latency = one.map_or(String::new(), |(load, slow, warm)| {
            format!(" ({load}: {} instead of {})", time(warm), time(slow))
        });
        said.push(format!(
            "Once the cache is warm, random reads are {} from the slow disk alone{latency}.",
            as_fast(reads)
        ));
    }
    let mut parts = Vec::new();
    if let Some(cold) = range(lines, &[Kind::Read], |l| l.times_faster_cold) {
        parts.push(format!(
            "what is read for the first time comes {} from the slow disk",
            as_fast(cold)
        ));
    }
    for mode in Mode::ALL {
        let of_mode: Vec<Line> = lines
            .iter()
            .filter(|l| l.mode == mode.word())
            .cloned()
            .collect();
        if let Some(writes) = range(&of_mode, &[Kind::Write], |l| l.times_faster) {
            parts.push(format!(
                "{} writes are {} to the slow disk",
                mode.word(),
                as_fast(writes)
            ));
        }
    }
    if said.is_empty()
        && let Some(rest) = range(lines, &[Kind::Mixed, Kind::Boot], |l| l.times_faster)
    {
        said.push(format!(
            "Once the cache is warm, this is {} the slow disk alone.",
            as_fast(rest)
        ));
    }
    if !parts.is_empty() {
        let mut sentence = parts.join("; ");
        sentence[..1].make_ascii_uppercase();
        said.push(sentence + ".");
    }
    if said.is_empty() {
        said.push("Too little was measured to say what the cache changes.".to_owned());
    }
    said
}

#[cfg(test)]
mod tests {
    use super::super::report::{Point, Table};
    use super::super::{Over, Slow, html, markdown};
    use super::*;
    use std::path::PathBuf;

    fn options(modes: &[Mode]) -> Options {
        Options {
            hearth: PathBuf::new(),
            slow: Slow::Model,
            flash: PathBuf::new(),
            out: PathBuf::new(),
            parts: vec![Part::Random, Part::Fileio],
            over: vec![Over::Nbd],
            modes: modes.to_vec(),
            depths: vec![1],
            rounds: 2,
            seconds: 1,
            size: 1 << 20,
            guest: None,
            storms: 1,
            goals: false,
        }
    }

    /// A report of random requests with these values in each of two rounds.
    fn made(options: &Options, cells: &[(State, &str, [f64; 2], f64)]) -> Report {
        let mut report = Report::new(Vec::new());
        let mut table = Table::new(
            &random::id(Over::Nbd),
            "Random",
            "requests per second",
            true,
            State::all(&options.modes).iter().map(|s| s.name()),
            [random::read_column(1), random::write_column(1)].into_iter(),
        );
        for (state, column, values, mean_us) in cells {
            for value in values {
                let point = Point {
                    value: *value,
                    mean_us: Some(*mean_us),
                    ..Point::default()
                };
                table.add(&state.name(), column, point);
            }
        }
        report.open(table);
        report.summary = lines(&report, options);
        report
    }

    fn usual() -> Report {
        let options = options(&[Mode::WriteBack]);
        let (read, write) = (random::read_column(1), random::write_column(1));
        let back = Mode::WriteBack;
        made(
            &options,
            &[
                (State::SlowAlone, &read, [70.0, 72.0], 14_100.0),
                (State::Cold(back), &read, [71.0, 72.0], 13_900.0),
                (State::Warm(back), &read, [7000.0, 10_800.0], 92.0),
                (State::FlashAlone, &read, [9000.0, 9900.0], 100.0),
                (State::SlowAlone, &write, [110.0, 110.0], 9000.0),
                (State::Warm(back), &write, [13_200.0, 13_200.0], 70.0),
            ],
        )
    }

    #[test]
    fn a_user_reads_what_the_cache_changed() {
        let report = usual();
        let [read, write] = &report.summary[..] else {
            panic!("{:?}", report.summary);
        };
        assert_eq!(
            cells(read),
            [
                "read 4 KiB, 1 at a time",
                "71.0",
                "71.5",
                "8900",
                "9450",
                "125",
                "14.1 ms → 92 µs"
            ]
            .map(str::to_owned),
            "the ratio is that of the rounds, 100 and 150"
        );
        assert_eq!((write.cold, write.times_faster), (None, Some(120.0)));
        assert_eq!(
            sentences(&report.summary),
            [
                "Once the cache is warm, random reads are 125 times as fast as from the slow disk alone \
                 (read 4 KiB, 1 at a time: 92 µs instead of 14.1 ms).",
                "What is read for the first time comes as fast as from the slow disk; write-back writes \
                 are 120 times as fast as to the slow disk.",
            ]
        );
    }

    #[test]
    fn result_files_have_the_summary_and_no_goals() {
        let report = usual();
        for text in [markdown::report(&report), html::report(&report)] {
            let found = |word: &str| text.to_lowercase().contains(word);
            assert!(
                found("what the cache changed") && found("times faster"),
                "{text}"
            );
            assert!(found("125 times as fast"), "{text}");
            for word in ["goal", " met", "missed.", "wanted"] {
                assert!(!found(word), "{word}: {text}");
            }
        }
    }

    #[test]
    fn modes_are_told_apart_and_what_is_missing_is_a_dash() {
        let options = options(&[Mode::WriteBack, Mode::WriteThrough]);
        let write = random::write_column(1);
        let report = made(
            &options,
            &[
                (State::SlowAlone, &write, [100.0, 100.0], 1.0),
                (State::Warm(Mode::WriteBack), &write, [900.0, 900.0], 1.0),
                (State::Warm(Mode::WriteThrough), &write, [98.0, 98.0], 1.0),
            ],
        );
        let loads: Vec<_> = report.summary.iter().map(|l| l.load.as_str()).collect();
        assert_eq!(
            loads,
            [
                "write 4 KiB, 1 at a time, write-back",
                "write 4 KiB, 1 at a time, write-through"
            ]
        );
        assert_eq!(cells(&report.summary[0])[2], "–");
        assert_eq!(
            sentences(&report.summary),
            [
                "Write-back writes are 9.0 times as fast as to the slow disk; write-through writes are as fast as \
                 to the slow disk."
            ]
        );
        assert!(sentences(&[])[0].contains("Too little was measured"));
    }
}
