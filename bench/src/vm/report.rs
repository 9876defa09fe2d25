//! What a run found, as it is kept in `results.json`.

use super::summary::Line;
use super::{html, markdown};
use crate::load::Sample;
use crate::report::{Comparison, Spread, Wanted};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the file's form; a reader refuses others.
pub const FORMAT: u32 = 1;
/// What a run leaves: for programs, for a page of text, for a browser.
const FILES: [&str; 3] = ["results.json", "results.md", "results.html"];
/// Largest file a reader takes: a thousand times what a run writes.
const FILE_MAX: u64 = 64 << 20;

/// A name and a value: what the numbers were measured on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// What.
    pub name: String,
    /// Its value.
    pub value: String,
}

/// One cell in one round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// In the table's unit.
    pub value: f64,
    /// Requests completed.
    pub requests: Option<f64>,
    /// Mean latency of a request, µs.
    pub mean_us: Option<f64>,
    /// 99th percentile of it, µs.
    pub p99_us: Option<f64>,
    /// CPU of the daemon per request, µs, the thread of a modelled disk included.
    pub server_us: Option<f64>,
    /// Bytes the pool wrote to flash per request, everything included.
    pub flash_bytes: Option<f64>,
    /// How busy the client was, of one core.
    pub client_busy: Option<f64>,
}

impl From<Sample> for Point {
    fn from(sample: Sample) -> Point {
        Point {
            value: sample.iops,
            requests: Some(sample.requests),
            mean_us: Some(sample.mean_us),
            p99_us: Some(sample.p99_us),
            server_us: sample.server_us,
            flash_bytes: None,
            client_busy: Some(sample.client_busy),
        }
    }
}

/// A cell: a point per round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Its row.
    pub row: String,
    /// Its column.
    pub column: String,
    /// A point per round.
    pub points: Vec<Point>,
    /// Of the points' values.
    pub spread: Spread,
}

impl Cell {
    /// The values alone.
    pub fn values(&self) -> Vec<f64> {
        self.points.iter().map(|p| p.value).collect()
    }

    /// The median of another figure of the points, if they have it.
    pub fn median(&self, figure: fn(&Point) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.points.iter().filter_map(figure).collect();
        (!values.is_empty()).then(|| Spread::of(&values).median)
    }
}

/// A table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Its name for programs.
    pub id: String,
    /// What it shows.
    pub title: String,
    /// The unit of its values.
    pub unit: String,
    /// More is better.
    pub more_is_better: bool,
    /// Rows in order.
    pub rows: Vec<String>,
    /// Columns in order.
    pub columns: Vec<String>,
    /// What was measured; a cell that was not is absent.
    pub cells: Vec<Cell>,
    /// What that means for the goals of the project; empty unless they were asked for.
    pub goals: Vec<Comparison>,
    /// What a reader has to know.
    pub notes: Vec<String>,
}

impl Table {
    /// An empty table.
    pub fn new(
        id: &str,
        title: &str,
        unit: &str,
        more_is_better: bool,
        rows: impl Iterator<Item = String>,
        columns: impl Iterator<Item = String>,
    ) -> Table {
        Table {
            id: id.to_owned(),
            title: title.to_owned(),
            unit: unit.to_owned(),
            more_is_better,
            rows: rows.collect(),
            columns: columns.collect(),
            cells: Vec::new(),
            goals: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds the next round of a cell.
    pub fn add(&mut self, row: &str, column: &str, point: Point) {
        let known = self
            .cells
            .iter_mut()
            .find(|c| c.row == row && c.column == column);
        match known {
            Some(cell) => {
                cell.points.push(point);
                cell.spread = Spread::of(&cell.values());
            }
            None => self.cells.push(Cell {
                row: row.to_owned(),
                column: column.to_owned(),
                points: vec![point],
                spread: Spread::of(&[point.value]),
            }),
        }
    }

    /// A cell, if it was measured.
    pub fn cell(&self, row: &str, column: &str) -> Option<&Cell> {
        self.cells
            .iter()
            .find(|c| c.row == row && c.column == column)
    }

    /// Compares two rows of a column, round by round, if both were measured.
    pub fn compare(&mut self, a: &str, b: &str, column: &str, wanted: Wanted) {
        let (Some(left), Some(right)) = (self.cell(a, column), self.cell(b, column)) else {
            return;
        };
        let pairs = left.points.iter().zip(&right.points);
        let values = pairs.map(|(l, r)| l.value / r.value).collect();
        self.goals.push(Comparison {
            what: format!("{column}: {a} / {b}"),
            values,
            unit: String::new(),
            wanted,
        });
    }
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// What it was measured on.
    pub host: Vec<Fact>,
    /// The user called it off: cells are missing.
    pub called_off: bool,
    /// Written while the run went on, which did not come to its end: cells are missing.
    #[serde(default)]
    pub unfinished: bool,
    /// Why not to trust the numbers much.
    #[serde(default)]
    pub cautions: Vec<String>,
    /// Tables that could not be measured, and why.
    pub failures: Vec<String>,
    /// What the cache changed, in a line per load.
    #[serde(default)]
    pub summary: Vec<Line>,
    /// What was measured.
    pub tables: Vec<Table>,
}

impl Report {
    /// Nothing measured yet.
    pub fn new(host: Vec<Fact>) -> Report {
        Report {
            format: FORMAT,
            host,
            called_off: false,
            unfinished: false,
            cautions: Vec::new(),
            failures: Vec::new(),
            summary: Vec::new(),
            tables: Vec::new(),
        }
    }

    /// Adds a table; its number.
    pub fn open(&mut self, table: Table) -> usize {
        self.tables.push(table);
        self.tables.len() - 1
    }

    /// The table of that number.
    pub fn table(&mut self, number: usize) -> &mut Table {
        &mut self.tables[number]
    }

    /// How many goals were met and missed; `None` if none was asked for.
    pub fn score(&self) -> Option<(usize, usize)> {
        if self.tables.iter().all(|t| t.goals.is_empty()) {
            return None;
        }
        let verdicts = self.tables.iter().flat_map(|t| &t.goals);
        Some(
            verdicts.fold((0, 0), |(met, missed), goal| match goal.met() {
                Some(true) => (met + 1, missed),
                Some(false) => (met, missed + 1),
                None => (met, missed),
            }),
        )
    }

    /// Why cells are missing, if the run did not come to its end.
    pub fn cut_short(&self) -> Option<&'static str> {
        match (self.called_off, self.unfinished) {
            (true, _) => Some("The run was called off: cells are missing."),
            (_, true) => {
                Some("The run was still going on when this was written: cells are missing.")
            }
            _ => None,
        }
    }

    /// Writes `results.json`, `results.md` and `results.html` into `dir`. Each is whole at any
    /// time, the old one or the new.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let files = [
            serde_json::to_string_pretty(self)? + "\n",
            markdown::report(self),
            html::report(self),
        ];
        for (name, text) in FILES.into_iter().zip(files) {
            let (file, new) = (dir.join(name), dir.join(format!("{name}.new")));
            std::fs::write(&new, text)
                .and_then(|()| std::fs::rename(&new, &file))
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }

    /// Reads a `results.json`.
    pub fn load(file: &Path) -> Result<Report> {
        let name = file.display();
        let size = std::fs::metadata(file)
            .with_context(|| format!("cannot read {name}"))?
            .len();
        ensure!(
            size <= FILE_MAX,
            "{name} is too large for a results.json of hearth bench"
        );
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
        let report: Report = serde_json::from_str(&text)
            .with_context(|| format!("{name} is no results.json of hearth bench"))?;
        ensure!(
            report.format == FORMAT,
            "{name} has form {}, this program reads form {FORMAT}",
            report.format
        );
        Ok(report)
    }
}

/// Keeps the results of an earlier run in `dir`, in place of those of the one before: `results.old.json`
/// and so on. Two runs are what `compare` wants.
pub fn set_aside(dir: &Path) -> Result<()> {
    for name in FILES {
        let file = dir.join(name);
        let old = dir.join(name.replacen('.', ".old.", 1));
        match std::fs::rename(&file, &old) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("cannot rename {}", file.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A report with two rows, one column and a goal.
    pub fn made(values: &[(f64, f64)]) -> Report {
        let mut table = Table::new(
            "t",
            "A <table>",
            "requests per second",
            true,
            ["slow | disk", "warm"].map(str::to_owned).into_iter(),
            ["read"].map(str::to_owned).into_iter(),
        );
        for (slow, warm) in values {
            for (row, value) in [("slow | disk", *slow), ("warm", *warm)] {
                let point = Point {
                    value,
                    server_us: Some(7.5),
                    flash_bytes: (row == "warm").then_some(4200.0),
                    ..Point::default()
                };
                table.add(row, "read", point);
            }
        }
        table.compare("warm", "slow | disk", "read", Wanted::AtLeast(50.0));
        let mut report = Report::new(vec![Fact {
            name: "kernel".to_owned(),
            value: "Linux".to_owned(),
        }]);
        report.open(table);
        report
    }

    #[test]
    fn rounds_add_up() {
        let report = made(&[(100.0, 9000.0), (110.0, 9900.0), (90.0, 1000.0)]);
        let cell = report.tables[0].cell("slow | disk", "read").unwrap();
        let spread = cell.spread;
        assert_eq!(
            (spread.min, spread.median, spread.max),
            (90.0, 100.0, 110.0)
        );
        // Ratios are taken within a round.
        assert_eq!(report.tables[0].goals[0].values[1], 90.0);
        assert_eq!(report.score(), Some((1, 0)));
        assert_eq!(cell.median(|p| p.server_us), Some(7.5));
        assert_eq!(cell.median(|p| p.flash_bytes), None);
    }

    #[test]
    fn files_are_read_back_and_strangers_refused() {
        let dir = tempfile::tempdir().unwrap();
        let report = made(&[(100.0, 9000.0)]);
        report.save(dir.path()).unwrap();
        let file = dir.path().join("results.json");
        assert_eq!(Report::load(&file).unwrap(), report);
        set_aside(dir.path()).unwrap();
        assert!(!file.exists());
        let old = dir.path().join("results.old.json");
        assert_eq!(Report::load(&old).unwrap(), report);
        // A run that was refused before it began leaves the older ones alone.
        set_aside(dir.path()).unwrap();
        assert!(old.exists() && dir.path().join("results.old.html").exists());
        report.save(dir.path()).unwrap();
        let other = std::fs::read_to_string(&file)
            .unwrap()
            .replace("\"format\": 1", "\"format\": 99");
        std::fs::write(&file, other).unwrap();
        assert!(format!("{:#}", Report::load(&file).unwrap_err()).contains("form 99"));
        std::fs::write(&file, "[]").unwrap();
        assert!(Report::load(&file).is_err());
        assert!(Report::load(&dir.path().join("none")).is_err());
    }
}
