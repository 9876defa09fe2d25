//! Results: what was measured, what it was compared with, and how that reads.

use crate::load::Sample;
use crate::rows::Row;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

/// The samples of one contender, one per round.
#[derive(Clone, Debug)]
pub struct Series {
    /// The contender.
    pub name: String,
    /// A sample per round.
    pub samples: Vec<Sample>,
}

/// What a ratio has to be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// At least.
    AtLeast(f64),
    /// At most.
    AtMost(f64),
    /// Only shown.
    Shown,
}

/// A number compared with its goal; one value per round, or a single one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// What is compared.
    pub what: String,
    /// The values.
    pub values: Vec<f64>,
    /// The unit of the values; empty for a ratio.
    pub unit: String,
    /// The goal.
    pub wanted: Wanted,
}

impl Comparison {
    /// A comparison of a single value.
    pub fn single(what: impl Into<String>, value: f64, unit: &str, wanted: Wanted) -> Comparison {
        Comparison {
            what: what.into(),
            values: vec![value],
            unit: unit.to_owned(),
            wanted,
        }
    }

    /// True if the median reaches the goal; `None` if there is no goal.
    pub fn met(&self) -> Option<bool> {
        let median = Spread::of(&self.values).median;
        match self.wanted {
            Wanted::AtLeast(goal) => Some(median >= goal),
            Wanted::AtMost(goal) => Some(median <= goal),
            Wanted::Shown => None,
        }
    }

    /// Smallest, median and largest value as people read them.
    pub fn spread_words(&self) -> [String; 3] {
        let spread = Spread::of(&self.values);
        [spread.min, spread.median, spread.max].map(number)
    }

    /// The goal as people read it; empty if there is none.
    pub fn goal(&self) -> String {
        match self.wanted {
            Wanted::AtLeast(goal) => format!("≥ {}", number(goal)),
            Wanted::AtMost(goal) => format!("≤ {}", number(goal)),
            Wanted::Shown => String::new(),
        }
    }

    /// met, MISSED, or nothing where there is no goal.
    pub fn verdict(&self) -> &'static str {
        match self.met() {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        }
    }
}

/// What a row found.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Who was measured.
    pub series: Vec<Series>,
    /// What that means.
    pub comparisons: Vec<Comparison>,
    /// What a reader has to know.
    pub notes: Vec<String>,
}

impl Outcome {
    /// Takes over what was measured, compared and noted at one of several depths, and names the
    /// depth with it.
    pub fn at_depth(&mut self, depth: u32, outcome: Outcome) {
        self.part(&format!("depth {depth}"), outcome);
    }

    /// The same of any part of a row.
    pub fn part(&mut self, what: &str, outcome: Outcome) {
        for note in outcome.notes {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
        self.series.extend(outcome.series.into_iter().map(|mut s| {
            s.name = format!("{}, {what}", s.name);
            s
        }));
        self.comparisons
            .extend(outcome.comparisons.into_iter().map(|mut c| {
                c.what = format!("{what}: {}", c.what);
                c
            }));
    }

    fn find(&self, name: &str) -> Option<&Series> {
        self.series.iter().find(|s| s.name == name)
    }

    /// Compares requests per second of `a` and `b`, round by round, if both were measured.
    pub fn compare_iops(&mut self, a: &str, b: &str, wanted: Wanted) {
        self.compare("requests per second", a, b, wanted, |s| Some(s.iops));
    }

    /// Compares the 99th percentiles of latency of `a` and `b`, round by round.
    pub fn compare_p99(&mut self, a: &str, b: &str, wanted: Wanted) {
        self.compare("p99", a, b, wanted, |s| Some(s.p99_us));
    }

    /// Compares the servers' CPU per request of `a` and `b`, round by round.
    pub fn compare_cpu(&mut self, a: &str, b: &str, wanted: Wanted) {
        self.compare("server CPU per request", a, b, wanted, |s| s.server_us);
    }

    fn compare(
        &mut self,
        of: &str,
        a: &str,
        b: &str,
        wanted: Wanted,
        value: impl Fn(&Sample) -> Option<f64>,
    ) {
        let (Some(left), Some(right)) = (self.find(a), self.find(b)) else {
            return;
        };
        let pairs = left.samples.iter().zip(&right.samples);
        let values = pairs
            .filter_map(|(l, r)| Some(value(l)? / value(r)?))
            .collect::<Vec<_>>();
        if !values.is_empty() {
            self.comparisons.push(Comparison {
                what: format!("{a} / {b}, {of}"),
                values,
                unit: String::new(),
                wanted,
            });
        }
    }
}

/// Smallest, middle and largest of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Middle one (mean of two for an even number).
    pub median: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// Of `values`; NaN if there is none.
    pub fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
        let n = sorted.len();
        let median = if n % 2 == 1 {
            at(n / 2)
        } else {
            (at((n / 2).wrapping_sub(1)) + at(n / 2)) / 2.0
        };
        Spread {
            min: at(0),
            median,
            max: at(n.wrapping_sub(1)),
        }
    }
}

/// A number with as many digits as mean something.
pub fn number(value: f64) -> String {
    match value.abs() {
        v if v.is_nan() => "-".to_owned(),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A row as Markdown.
pub fn table(row: &Row, outcome: &Outcome) -> String {
    let mut text = format!("### {}\n\n`{}`\n", row.title, row.id);
    if !outcome.series.is_empty() {
        text += "\n| contender | requests/s min | median | max | mean latency µs | p99 µs | server CPU µs/request | client busy |\n";
        text += "|---|--:|--:|--:|--:|--:|--:|--:|\n";
    }
    for series in &outcome.series {
        let of =
            |f: fn(&Sample) -> f64| Spread::of(&series.samples.iter().map(f).collect::<Vec<_>>());
        let iops = of(|s| s.iops);
        let cpu = of(|s| s.server_us.unwrap_or(f64::NAN)).median;
        let _ = writeln!(
            text,
            "| {} | {:.0} | {:.0} | {:.0} | {} | {} | {} | {:.0} % |",
            series.name,
            iops.min,
            iops.median,
            iops.max,
            number(of(|s| s.mean_us).median),
            number(of(|s| s.p99_us).median),
            number(cpu),
            of(|s| s.client_busy).median * 100.0
        );
    }
    if !outcome.comparisons.is_empty() {
        text += "\n| comparison | min | median | max | goal | |\n|---|--:|--:|--:|--:|---|\n";
    }
    for c in &outcome.comparisons {
        let unit = if c.unit.is_empty() {
            String::new()
        } else {
            format!(" ({})", c.unit)
        };
        let (goal, verdict) = (c.goal(), c.verdict());
        let [min, median, max] = c.spread_words();
        let _ = writeln!(
            text,
            "| {}{unit} | {min} | {median} | {max} | {goal} | {verdict} |",
            c.what
        );
    }
    for note in &outcome.notes {
        let _ = write!(text, "\n{note}\n");
    }
    text
}

/// All rows of a run.
#[derive(Debug)]
pub struct Results {
    host: Vec<(String, String)>,
    markdown: String,
    rows: Vec<Value>,
    met: usize,
    missed: Vec<String>,
    failed: Vec<String>,
}

impl Results {
    /// No row yet.
    pub fn new(host: Vec<(String, String)>) -> Results {
        Results {
            host,
            markdown: String::new(),
            rows: Vec::new(),
            met: 0,
            missed: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Takes a measured row.
    pub fn add(&mut self, row: &Row, outcome: Outcome) {
        self.markdown += &table(row, &outcome);
        self.markdown.push('\n');
        for c in &outcome.comparisons {
            match c.met() {
                Some(true) => self.met += 1,
                Some(false) => self.missed.push(format!(
                    "{}: {} ({})",
                    row.id,
                    c.what,
                    number(Spread::of(&c.values).median)
                )),
                None => {}
            }
        }
        let series = outcome
            .series
            .iter()
            .map(|s| json!({"name": s.name, "samples": s.samples}));
        let comparisons = outcome.comparisons.iter().map(|c| {
            json!({"what": c.what, "values": c.values, "unit": c.unit, "goal": c.goal(), "met": c.met()})
        });
        self.rows.push(json!({
            "id": row.id,
            "title": row.title,
            "series": series.collect::<Vec<_>>(),
            "comparisons": comparisons.collect::<Vec<_>>(),
            "notes": outcome.notes,
        }));
    }

    /// Takes a row that could not be measured.
    pub fn failed(&mut self, row: &Row, why: &str) {
        let _ = write!(
            self.markdown,
            "### {}\n\n`{}`\n\nNot measured: {why}\n\n",
            row.title, row.id
        );
        self.rows
            .push(json!({"id": row.id, "title": row.title, "failed": why}));
        self.failed.push(format!("{}: {why}", row.id));
    }

    /// How many rows could not be measured.
    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// Writes `latest.json` and `latest.md`.
    pub fn save(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir)?;
        let host = self
            .host
            .iter()
            .map(|(k, v)| (k.clone(), json!(v)))
            .collect::<serde_json::Map<_, _>>();
        let all = json!({"host": host, "rows": self.rows});
        std::fs::write(
            dir.join("latest.json"),
            serde_json::to_string_pretty(&all)? + "\n",
        )?;
        let mut text = "# Results\n\nWritten by `make bench`.\n\n| | |\n|---|---|\n".to_owned();
        for (k, v) in &self.host {
            let _ = writeln!(text, "| {k} | {v} |");
        }
        let _ = write!(text, "\n{}\n", self.markdown);
        std::fs::write(dir.join("latest.md"), text.trim_end().to_owned() + "\n")?;
        Ok(())
    }

    /// A few last words.
    pub fn summary(&self) -> String {
        let mut text = format!(
            "{} goals met, {} missed, {} rows not measured",
            self.met,
            self.missed.len(),
            self.failed.len()
        );
        for line in &self.missed {
            let _ = write!(text, "\n  missed: {line}");
        }
        for line in &self.failed {
            let _ = write!(text, "\n  not measured: {line}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_and_goals() {
        let spread = Spread::of(&[3.0, 1.0, 2.0]);
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 2.0, 3.0));
        assert_eq!(Spread::of(&[1.0, 2.0]).median, 1.5);
        assert!(Spread::of(&[]).median.is_nan());
        let comparison = |wanted| Comparison {
            what: String::new(),
            values: vec![0.9, 1.1, 1.3],
            unit: String::new(),
            wanted,
        };
        assert_eq!(comparison(Wanted::AtLeast(1.0)).met(), Some(true));
        assert_eq!(comparison(Wanted::AtMost(1.0)).met(), Some(false));
        assert_eq!(comparison(Wanted::Shown).met(), None);
    }
}
