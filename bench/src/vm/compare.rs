//! Do two runs tell the same?
//!
//! Two runs of one thing never give equal numbers, so a cell agrees if the ranges of its rounds
//! overlap, or its medians are close. Even then some cells of identical runs fall apart by luck:
//! with n and m rounds, the ranges of two equal samples miss each other with probability
//! 2 / C(n+m, n) (of all orders of n+m equal values, two put all of one before all of the
//! other). Two runs agree if no more cells fall apart than that explains.

use super::report::{Fact, Report};
use crate::report::Spread;
use serde::Serialize;

/// Medians this close agree whatever their spread: a model's rounds are equal to the last digit.
pub const CLOSE: f64 = 0.1;

/// One cell in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Its table.
    pub table: String,
    /// Its row.
    pub row: String,
    /// Its column.
    pub column: String,
    /// In the first run.
    pub a: Spread,
    /// In the second run.
    pub b: Spread,
    /// The second's median over the first's.
    pub ratio: f64,
    /// They agree.
    pub agrees: bool,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Cells measured in both.
    pub pairs: Vec<Pair>,
    /// Cells only one run has.
    pub unpaired: usize,
    /// What the runs were measured on, where it differs: the name, the first's, the second's.
    pub differences: Vec<(String, String, String)>,
    /// Goals of the same name that one run met and the other missed.
    pub goals_changed: Vec<String>,
    /// Cells that do not agree.
    pub apart: usize,
    /// As many may by luck.
    pub by_luck: usize,
    /// The runs agree.
    pub agree: bool,
}

/// Compares two runs.
pub fn compare(a: &Report, b: &Report) -> Comparison {
    let mut pairs = Vec::new();
    let (mut unpaired, mut goals_changed) = (0, Vec::new());
    // Mean and variance of how many fall apart by luck.
    let (mut mean, mut variance) = (0.0, 0.0);
    for table in &a.tables {
        let Some(other) = b.tables.iter().find(|t| t.id == table.id) else {
            unpaired += table.cells.len();
            continue;
        };
        for cell in &table.cells {
            let Some(twin) = other.cell(&cell.row, &cell.column) else {
                unpaired += 1;
                continue;
            };
            let (x, y) = (cell.spread, twin.spread);
            let ratio = y.median / x.median;
            let overlap = x.min <= y.max && y.min <= x.max;
            let close = (1.0 - CLOSE..=1.0 / (1.0 - CLOSE)).contains(&ratio);
            let luck = apart_by_luck(cell.points.len(), twin.points.len());
            mean += luck;
            variance += luck * (1.0 - luck);
            pairs.push(Pair {
                table: table.id.clone(),
                row: cell.row.clone(),
                column: cell.column.clone(),
                a: x,
                b: y,
                ratio,
                agrees: overlap || close,
            });
        }
        unpaired += other
            .cells
            .iter()
            .filter(|c| table.cell(&c.row, &c.column).is_none())
            .count();
        for goal in &table.goals {
            let twin = other.goals.iter().find(|g| g.what == goal.what);
            if let Some(twin) = twin
                && goal.met() != twin.met()
            {
                goals_changed.push(format!(
                    "{}: {}: {}, then {}",
                    table.id,
                    goal.what,
                    goal.verdict(),
                    twin.verdict()
                ));
            }
        }
    }
    unpaired += b
        .tables
        .iter()
        .filter(|t| a.tables.iter().all(|u| u.id != t.id))
        .map(|t| t.cells.len())
        .sum::<usize>();
    let apart = pairs.iter().filter(|p| !p.agrees).count();
    // Two standard deviations above the mean.
    let by_luck = (mean + 2.0 * f64::sqrt(variance)) as usize;
    let by_luck = by_luck.min(pairs.len() / 4);
    Comparison {
        agree: !pairs.is_empty() && apart <= by_luck,
        pairs,
        unpaired,
        differences: differences(&a.host, &b.host),
        goals_changed,
        apart,
        by_luck,
    }
}

/// The chance that the ranges of two samples of one thing miss each other.
fn apart_by_luck(n: usize, m: usize) -> f64 {
    let ways: f64 = (1..=m).map(|i| (n + i) as f64 / i as f64).product();
    (2.0 / ways).min(1.0)
}

fn differences(a: &[Fact], b: &[Fact]) -> Vec<(String, String, String)> {
    a.iter()
        .filter(|fact| fact.name != "date")
        .filter_map(|fact| {
            let other = b.iter().find(|f| f.name == fact.name);
            let value = other.map_or("–", |f| &f.value);
            (value != fact.value).then(|| (fact.name.clone(), fact.value.clone(), value.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::made;
    use super::*;

    #[test]
    fn luck_is_counted() {
        assert!((apart_by_luck(3, 3) - 0.1).abs() < 1e-9);
        assert!((apart_by_luck(1, 1) - 1.0).abs() < 1e-9);
        assert!((apart_by_luck(5, 5) - 2.0 / 252.0).abs() < 1e-9);
    }

    #[test]
    fn a_run_agrees_with_itself_and_with_a_near_one() {
        let a = made(&[(100.0, 9000.0), (101.0, 9500.0), (99.0, 8000.0)]);
        let same = compare(&a, &a);
        assert!(same.agree && same.apart == 0 && same.differences.is_empty());
        let near = made(&[(104.0, 9600.0), (105.0, 9700.0), (106.0, 9800.0)]);
        assert!(compare(&a, &near).agree, "close medians");
    }

    #[test]
    fn a_change_is_seen() {
        let a = made(&[(100.0, 9000.0), (101.0, 9500.0), (99.0, 8000.0)]);
        let mut b = made(&[(100.0, 4000.0), (101.0, 4100.0), (99.0, 4200.0)]);
        b.host[0].value = "another".to_owned();
        let out = compare(&a, &b);
        assert!(!out.agree);
        assert_eq!((out.apart, out.by_luck, out.unpaired), (1, 0, 0));
        assert_eq!(out.goals_changed.len(), 1);
        assert_eq!(out.differences.len(), 1);
    }

    #[test]
    fn what_only_one_has_is_counted() {
        let a = made(&[(100.0, 9000.0)]);
        let mut b = a.clone();
        b.tables[0].id = "other".to_owned();
        let out = compare(&a, &b);
        assert_eq!(out.unpaired, 4);
        assert!(!out.agree, "nothing in common is no agreement");
    }
}
