//! Do two runs tell the same?
//!
//! Two runs of one thing never give equal numbers, so a cell agrees if the ranges of its rounds
//! overlap, or its medians are close. Even then some cells of identical runs fall apart by luck:
//! with n and m rounds, the ranges of two equal samples miss each other with probability
//! 2 / C(n+m, n) (of all orders of n+m equal values, two put all of one before all of the
//! other). Of a single round nobody knows the spread: then medians are close or they are not, and
//! luck excuses nothing. Two runs agree if no more cells fall apart than luck explains, both are
//! whole and of the same cells, and no goal met in one is clearly missed in the other.

use super::report::{Fact, Report};
use crate::report::{Comparison as Goal, Spread};
use serde::Serialize;

/// Medians this close agree whatever their spread: a model's rounds are equal to the last digit.
pub const CLOSE: f64 = 0.1;

/// Share of all cells that both runs must have: what a few leave out says little, and runs of
/// different tables cannot agree.
pub const PAIRED: f64 = 0.9;

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
    /// Goals of the same name that one run met and the other missed, those included whose
    /// medians are close: they lie on the goal's edge, and are no disagreement.
    pub goals_changed: Vec<String>,
    /// Cells that do not agree.
    pub apart: usize,
    /// As many may by luck.
    pub by_luck: usize,
    /// Why the runs do not agree, in sentences; empty if they do.
    pub reasons: Vec<String>,
    /// The runs agree.
    pub agree: bool,
}

/// Compares two runs.
pub fn compare(a: &Report, b: &Report) -> Comparison {
    let mut pairs = Vec::new();
    let (mut unpaired, mut goals_changed, mut goals_apart) = (0, Vec::new(), 0);
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
                agrees: overlap || is_close(ratio),
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
                let median = |goal: &Goal| Spread::of(&goal.values).median;
                goals_apart += usize::from(!is_close(median(twin) / median(goal)));
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
    let mut reasons = incomplete("first", a);
    reasons.extend(incomplete("second", b));
    let all = pairs.len() + unpaired;
    if pairs.is_empty() || (pairs.len() as f64) < PAIRED * all as f64 {
        reasons.push(format!(
            "only {} of {all} cells are in both runs",
            pairs.len()
        ));
    }
    if apart > by_luck {
        reasons.push(format!(
            "{apart} of {} cells fall apart, {by_luck} may by luck",
            pairs.len()
        ));
    }
    if goals_apart > 0 {
        reasons.push(format!(
            "{goals_apart} goals are met in one run and clearly missed in the other"
        ));
    }
    Comparison {
        agree: reasons.is_empty(),
        reasons,
        pairs,
        unpaired,
        differences: differences(&a.host, &b.host),
        goals_changed,
        apart,
        by_luck,
    }
}

fn is_close(ratio: f64) -> bool {
    (1.0 - CLOSE..=1.0 / (1.0 - CLOSE)).contains(&ratio)
}

/// Why a run is not whole.
fn incomplete(which: &str, run: &Report) -> Vec<String> {
    let mut reasons = Vec::new();
    if run.called_off {
        reasons.push(format!("the {which} run was called off"));
    } else if run.unfinished {
        reasons.push(format!("the {which} run did not come to its end"));
    }
    if let Some(first) = run.failures.first() {
        reasons.push(format!(
            "the {which} run lacks {} tables: {first}",
            run.failures.len()
        ));
    }
    reasons
}

/// The chance that the ranges of two samples of one thing miss each other; none is granted to a
/// sample without a range.
fn apart_by_luck(n: usize, m: usize) -> f64 {
    if n < 2 || m < 2 {
        return 0.0;
    }
    let ways: f64 = (1..=m).map(|i| (n + i) as f64 / i as f64).product();
    2.0 / ways
}

fn differences(a: &[Fact], b: &[Fact]) -> Vec<(String, String, String)> {
    let value = |facts: &[Fact], name: &str| {
        let fact = facts.iter().find(|f| f.name == name);
        fact.map_or("–", |f| &f.value).to_owned()
    };
    let only_b = b.iter().filter(|f| a.iter().all(|g| g.name != f.name));
    a.iter()
        .chain(only_b)
        .filter(|fact| fact.name != "date")
        .map(|fact| {
            (
                fact.name.clone(),
                value(a, &fact.name),
                value(b, &fact.name),
            )
        })
        .filter(|(_, first, second)| first != second)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::made;
    use super::*;

    #[test]
    fn luck_is_counted() {
        assert!((apart_by_luck(3, 3) - 0.1).abs() < 1e-9);
        assert!((apart_by_luck(2, 2) - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(apart_by_luck(1, 9), 0.0, "no spread, no luck");
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
        // Half in common is none either, whichever run has more.
        let mut more = a.clone();
        more.tables.push(b.tables[0].clone());
        for out in [compare(&a, &more), compare(&more, &a)] {
            assert_eq!((out.pairs.len(), out.unpaired, out.apart), (2, 2, 0));
            assert!(!out.agree);
            assert_eq!(out.reasons, ["only 2 of 4 cells are in both runs"]);
        }
    }

    #[test]
    fn a_single_round_is_close_or_apart() {
        let a = made(&[(100.0, 9000.0)]);
        assert!(compare(&a, &made(&[(95.0, 9500.0)])).agree);
        let out = compare(&a, &made(&[(80.0, 9000.0)]));
        assert_eq!((out.apart, out.by_luck, out.agree), (1, 0, false));
    }

    #[test]
    fn what_is_not_whole_does_not_agree() {
        let a = made(&[(100.0, 9000.0), (101.0, 9500.0), (99.0, 8000.0)]);
        let mut b = a.clone();
        b.called_off = true;
        assert!(!compare(&a, &b).agree && !compare(&b, &a).agree);
        b.called_off = false;
        b.unfinished = true;
        assert!(!compare(&a, &b).agree && !compare(&b, &a).agree);
        b.unfinished = false;
        b.failures.push("the disk is full".to_owned());
        let out = compare(&b, &a);
        assert_eq!(
            out.reasons,
            ["the first run lacks 1 tables: the disk is full"]
        );
    }

    #[test]
    fn goals_on_the_edge_are_no_disagreement_others_are() {
        // The goal is 50: medians 51 and 49 are close, 70 and 40 are not, though ranges overlap.
        let near = compare(
            &made(&[(100.0, 5100.0), (100.0, 5200.0), (100.0, 5000.0)]),
            &made(&[(100.0, 4900.0), (100.0, 5100.0), (100.0, 4800.0)]),
        );
        assert_eq!(near.goals_changed.len(), 1);
        assert!(near.agree, "{:?}", near.reasons);
        let far = compare(
            &made(&[(100.0, 7000.0), (100.0, 7100.0), (100.0, 3900.0)]),
            &made(&[(100.0, 4000.0), (100.0, 4100.0), (100.0, 3900.0)]),
        );
        assert_eq!(far.apart, 0);
        assert!(!far.agree);
    }

    #[test]
    fn facts_are_compared_both_ways() {
        let fact = |name: &str, value: &str| Fact {
            name: name.to_owned(),
            value: value.to_owned(),
        };
        let a = [
            fact("date", "Monday"),
            fact("kernel", "1"),
            fact("cpu", "x"),
        ];
        let b = [
            fact("kernel", "1"),
            fact("qemu", "9"),
            fact("date", "Tuesday"),
        ];
        let told = |name: &str, a: &str, b: &str| (name.to_owned(), a.to_owned(), b.to_owned());
        assert_eq!(
            differences(&a, &b),
            [told("cpu", "x", "–"), told("qemu", "–", "9")]
        );
    }
}
