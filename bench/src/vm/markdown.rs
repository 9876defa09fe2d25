//! A report as Markdown.

use super::report::{Cell, Point, Report, Table};
use super::summary::{self, Line};
use crate::report::number;
use std::fmt::Write;

/// A figure of a point besides its value.
pub type Figure = fn(&Point) -> Option<f64>;

/// Costs shown below each table: a heading and which figure of the points.
pub const COSTS: [(&str, Figure); 4] = [
    ("Mean latency, µs (median of the rounds)", |p| p.mean_us),
    ("99th percentile of latency, µs (median)", |p| p.p99_us),
    ("The daemon's CPU per request, µs (median)", |p| {
        p.server_us
    }),
    ("Bytes written to flash per request (median)", |p| {
        p.flash_bytes
    }),
];

/// Text that cannot end a cell of a table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Median, smallest and largest.
pub fn spread(cell: &Cell) -> String {
    let s = cell.spread;
    if cell.points.len() < 2 {
        return number(s.median);
    }
    format!("{} ({}–{})", number(s.median), number(s.min), number(s.max))
}

/// A report.
pub fn report(report: &Report) -> String {
    let mut text = "# Results of hearth bench\n\n| | |\n|---|---|\n".to_owned();
    for fact in &report.host {
        let _ = writeln!(text, "| {} | {} |", fact.name, escaped(&fact.value));
    }
    if let Some((met, missed)) = report.score() {
        let _ = write!(text, "\nGoals: {met} met, {missed} missed.\n");
    }
    if let Some(why) = report.cut_short() {
        let _ = write!(text, "\n**{why}**\n");
    }
    for caution in &report.cautions {
        let _ = write!(text, "\n{caution}\n");
    }
    for failure in &report.failures {
        let _ = write!(text, "\nNot measured: {failure}\n");
    }
    summarised(&mut text, &report.summary);
    for table in &report.tables {
        let _ = write!(text, "\n## {}\n\n`{}`, ", table.title, table.id);
        let better = if table.more_is_better { "more" } else { "less" };
        let _ = write!(
            text,
            "{}: median (smallest–largest) of the rounds; {better} is better.\n\n",
            table.unit
        );
        grid(&mut text, table, |c| Some(spread(c)));
        if !table.goals.is_empty() {
            text += "\n| comparison, round by round | min | median | max | goal | |\n|---|--:|--:|--:|--:|---|\n";
        }
        for goal in &table.goals {
            let _ = writeln!(
                text,
                "| {} | {} | {} |",
                escaped(&goal.what),
                goal.spread_words().join(" | "),
                [goal.goal(), goal.verdict().to_owned()].join(" | ")
            );
        }
        for note in &table.notes {
            let _ = write!(text, "\n{note}\n");
        }
        for (heading, figure) in COSTS {
            if table.cells.iter().any(|c| c.median(figure).is_some()) {
                let _ = write!(text, "\n{heading}:\n\n");
                grid(&mut text, table, |c| c.median(figure).map(number));
            }
        }
    }
    text
}

fn summarised(text: &mut String, lines: &[Line]) {
    if lines.is_empty() {
        return;
    }
    *text += "\n## What the cache changed\n\n";
    for sentence in summary::sentences(lines) {
        let _ = writeln!(text, "{sentence}");
    }
    for (over, lines) in summary::groups(lines) {
        let _ = write!(
            text,
            "\nOver {over}:\n\n| {} |\n",
            summary::HEADINGS.join(" | ")
        );
        let _ = writeln!(text, "|---|{}", "--:|".repeat(summary::HEADINGS.len() - 1));
        for line in lines {
            let _ = writeln!(text, "| {} |", summary::cells(line).join(" | "));
        }
    }
}

fn grid(text: &mut String, table: &Table, show: impl Fn(&Cell) -> Option<String>) {
    let columns: Vec<_> = table.columns.iter().map(|c| escaped(c)).collect();
    let _ = writeln!(text, "| | {} |", columns.join(" | "));
    let _ = writeln!(text, "|---|{}", "--:|".repeat(columns.len()));
    for row in &table.rows {
        let cells: Vec<_> = table
            .columns
            .iter()
            .map(|column| {
                let cell = table.cell(row, column);
                cell.and_then(&show).unwrap_or_else(|| "–".to_owned())
            })
            .collect();
        let _ = writeln!(text, "| {} | {} |", escaped(row), cells.join(" | "));
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::made;

    #[test]
    fn a_report_reads_well() {
        let text = super::report(&made(&[(100.0, 9000.0), (110.0, 9900.0)]));
        assert!(text.contains("| slow \\| disk | 105 (100–110) |"), "{text}");
        assert!(
            text.contains("| read: warm / slow \\| disk | 90.0 | 90.0 | 90.0 | ≥ 50.0 | met |"),
            "{text}"
        );
        assert!(text.contains("Goals: 1 met, 0 missed"), "{text}");
        assert!(text.contains("| warm | 4200 |"), "{text}");
    }
}
